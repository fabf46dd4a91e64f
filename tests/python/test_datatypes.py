"""Derived datatypes on the native path, against their type maps: results, gaps, errors.

Every rank builds its own datatype for the same message, some ranks none at all. Collective as test_collectives.py: all ranks draw
the same examples and agree on the outcome.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from mpi4py import MPI as plain_mpi

import stratampi
from stratampi import MPI, datatypes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

pytestmark = pytest.mark.mpi

COMM = MPI.COMM_WORLD
RANK, SIZE = COMM.rank, COMM.size
PLAIN = plain_mpi.Intracomm(COMM)  # the same handle, mpi4py's own methods
AGREE = PLAIN.Dup()
NATIVE = stratampi.stats()["driver"] != "none"
KINDS = [
    *("contiguous", "dup", "resized", "struct", "vector", "hvector"),
    *("subarray", "indexed", "hindexed", "indexed_block", "hindexed_block"),
]
LEAVES = [MPI.CHAR, MPI.SHORT, MPI.FLOAT, MPI.DOUBLE, MPI.C_DOUBLE_COMPLEX]
SIGNS = (
    [1] if MPI.get_vendor()[0] == "Open MPI" else [1, -1]
)  # Open MPI 5.0.11 takes some negative strides for positive ones
ROOM = 1 << 16  # bytes on both sides of where a buffer starts, so that datatypes may reach before it


def all_true(ok: bool) -> bool:
    return bool(AGREE.allreduce(bool(ok), op=plain_mpi.MIN))


def divisor(rng: random.Random, n: int) -> int:
    return rng.choice([d for d in range(1, n + 1) if n % d == 0])


def cuts(rng: random.Random, n: int) -> list[int]:
    """Lengths, some of them 0, that sum up to n."""
    at = sorted(rng.randint(0, n) for _ in range(rng.randint(0, 4)))
    return [b - a for a, b in zip([0, *at], [*at, n], strict=True)]


Map = list[int]  # the offset of every leaf, in the message's order (MPI 5.1, section 5.1)


def repeat(offsets: Map, starts: Iterable[int]) -> Map:
    return [start + offset for start in starts for offset in offsets]


def build(rng: random.Random, leaf: MPI.Datatype, n: int, depth: int = 0) -> tuple[MPI.Datatype, Map]:
    """A random datatype of n leaves whose bytes do not overlap, not committed, and its type map."""

    def inner(n: int) -> tuple[MPI.Datatype, int, Map]:
        made, offsets = build(rng, leaf, n, depth + 1)
        lb, extent = made.Get_extent()
        low, span = made.Get_true_extent()
        if low < lb or low + span > lb + extent:  # a subarray of what has a lower bound
            lb, end = min(lb, low), max(lb + extent, low + span)
            made, extent = made.Create_resized(lb, end - lb), end - lb
        return made, extent, offsets

    kind = "contiguous" if depth > 3 else rng.choice(KINDS)
    if kind == "contiguous":
        return leaf.Create_contiguous(n), repeat([0], range(0, n * leaf.size, leaf.size))
    if kind == "dup":
        base, _, offsets = inner(n)
        return base.Dup(), offsets
    if kind == "resized":
        base, extent, offsets = inner(n)
        before = rng.randint(0, 9)
        return base.Create_resized(base.Get_extent()[0] - before, extent + before + rng.randint(0, 9)), offsets
    if kind == "struct":
        lengths = [length for length in cuts(rng, n) if length]
        types, starts, end, offsets = [], [], rng.randint(-20, 20), []
        for length in lengths:
            base, extent, inside = inner(length)
            types.append(base)
            starts.append(end - base.Get_extent()[0])
            end += extent + rng.randint(0, 5)
            offsets += repeat(inside, [starts[-1]])
        return MPI.Datatype.Create_struct([1] * len(types), starts, types), offsets
    m = divisor(rng, n)
    base, extent, inside = inner(n // m)
    if kind in ("vector", "hvector"):
        count = divisor(rng, m)
        length = m // count
        gap = rng.randint(0, 2) * extent if kind == "vector" else rng.randint(0, 9)
        stride = rng.choice(SIGNS) * (length * extent + gap)
        made = (
            base.Create_vector(count, length, stride // extent)
            if kind == "vector"
            else base.Create_hvector(count, length, stride)
        )
        return made, repeat(inside, [i * stride + j * extent for i in range(count) for j in range(length)])
    if kind == "subarray":
        dims = [divisor(rng, m)]
        dims.append(m // dims[0])
        starts = [rng.randint(0, 2) for _ in dims]
        sizes = [d + s + rng.randint(0, 2) for d, s in zip(dims, starts, strict=True)]
        order = rng.choice([MPI.ORDER_C, MPI.ORDER_F])
        made = base.Create_subarray(sizes, dims, starts, order=order)
        if order == MPI.ORDER_F:
            sizes, dims, starts = sizes[::-1], dims[::-1], starts[::-1]
        steps = [((starts[0] + i) * sizes[1] + starts[1] + j) * extent for i in range(dims[0]) for j in range(dims[1])]
        return made, repeat(inside, steps)
    length = divisor(rng, m)
    lengths = [length] * (m // length) if kind.endswith("block") else cuts(rng, m)
    starts, end = [], rng.randint(-4, 4)
    for length in lengths:
        starts.append(end)
        end += length + rng.randint(0, 1)
    order = list(range(len(lengths)))
    rng.shuffle(order)  # the message need not follow the addresses
    lengths, starts = [lengths[i] for i in order], [starts[i] for i in order]
    offsets = repeat(
        inside, [(s + j) * extent for s, length in zip(starts, lengths, strict=True) for j in range(length)]
    )
    if kind == "indexed":
        return base.Create_indexed(lengths, starts), offsets
    if kind == "hindexed":
        return base.Create_hindexed(lengths, [s * extent for s in starts]), offsets
    if kind == "indexed_block":
        return base.Create_indexed_block(lengths[0], starts), offsets
    return base.Create_hindexed_block(lengths[0], [s * extent for s in starts]), offsets


class Side:
    """A buffer for `count` times n leaves in each of `blocks` blocks: of a random datatype, or plain."""

    def __init__(self, rng: random.Random, leaf: MPI.Datatype, n: int, count: int, blocks: int) -> None:
        derived, registered = rng.random() < 0.7, rng.random() < 0.5
        self.datatype, offsets = leaf, [0]
        while derived:
            made, offsets = build(rng, leaf, n)
            self.datatype = made.Commit()
            if sum(map(abs, made.Get_true_extent())) < ROOM:
                break
            made.Free()
        self.count = count * (1 if derived else n)
        self.extent, span = self.datatype.Get_extent()[1], self.datatype.Get_true_extent()[1]
        self.element = (np.array(offsets, np.int64)[:, None] + np.arange(leaf.size)).ravel()  # of every byte
        nbytes = 2 * ROOM + abs(self.extent) * self.count * blocks + span
        self.memory = (stratampi.empty if registered else np.empty)(nbytes, np.uint8)
        self.memory[:] = np.random.default_rng(rng.randint(0, 99)).integers(0, 256, nbytes, np.uint8)
        self.before = self.memory.copy()

    @property
    def buffer(self) -> np.ndarray:
        return self.memory[ROOM:-ROOM]

    def spec(self) -> list[Any]:
        return [self.buffer, self.count, self.datatype]

    def at(self, count: int, displ: int) -> np.ndarray:
        """Where in `memory` the bytes of `count` elements from `displ` on lie, in the message's order."""
        elements = (displ + np.arange(count)) * self.extent + ROOM
        return (elements[:, None] + self.element).ravel()

    def blocks(self) -> list[np.ndarray]:
        return [self.at(self.count, i * self.count) for i in range(SIZE)]

    def free(self) -> None:
        if not self.datatype.is_predefined:
            self.datatype.Free()


def wanted(sends: Sequence[np.ndarray | None], recv: Side, places: Sequence[np.ndarray | None]) -> np.ndarray:
    """The reference: what recv.memory holds when every rank has sent sends[peer], bytes, to each peer. None: nothing.

    Not plain mpi4py's result: each of the libraries has collectives that fail where ranks have datatypes of different sizes, and
    Open MPI unpacks some datatypes wrongly.
    """
    memory = recv.before.copy()
    for place, arrived in zip(places, AGREE.alltoall(list(sends)), strict=True):
        if place is not None and arrived is not None:
            memory[place] = arrived
    return memory


def is_right(call: Callable[[], None], result: np.ndarray, recv: Side) -> bool:
    """Whether the call leaves the result in recv.memory."""
    recv.memory[:] = recv.before
    call()
    return np.array_equal(recv.memory, result)


def by_mpi() -> int:
    """Calls of this rank that went to MPI."""
    return sum(paths.get("mpi", 0) for paths in stratampi.stats()["calls"].values())


cases = given(
    seed=st.integers(0, 2**20),
    n=st.sampled_from([1, 2, 12, 60]),
    count=st.sampled_from([0, 1, 2, 7, 50, 400]),
    leaf=st.sampled_from(range(len(LEAVES))),
)
large = example(seed=1, n=60, count=400, leaf=3)


@cases
@large
def test_moves(seed: int, n: int, count: int, leaf: int) -> None:
    rng = random.Random(seed * 10 + RANK)
    root = seed % SIZE
    send = Side(rng, LEAVES[leaf], n, count, SIZE)
    recv = Side(rng, LEAVES[leaf], n, count, SIZE)
    before = by_mpi()
    ours, theirs = send.blocks(), recv.blocks()
    mine = send.before[ours[0]]
    own = recv.before[theirs[RANK]]
    nothing: list[Any] = [None] * SIZE
    from_root = [theirs[0] if i == root and root != RANK else None for i in range(SIZE)]
    result = wanted([recv.before[theirs[0]]] * SIZE if root == RANK else nothing, recv, from_root)
    ok = is_right(lambda: COMM.Bcast(recv.spec(), root), result, recv)
    result = wanted([mine] * SIZE, recv, theirs)
    ok &= is_right(lambda: COMM.Allgather(send.spec(), recv.spec()), result, recv)
    result = wanted([own] * SIZE, recv, theirs)
    ok &= is_right(lambda: COMM.Allgather(MPI.IN_PLACE, recv.spec()), result, recv)
    result = wanted([send.before[block] for block in ours], recv, theirs)
    ok &= is_right(lambda: COMM.Alltoall(send.spec(), recv.spec()), result, recv)
    result = wanted([recv.before[block] for block in theirs], recv, theirs)
    ok &= is_right(lambda: COMM.Alltoall(MPI.IN_PLACE, recv.spec()), result, recv)
    ok &= np.array_equal(send.memory, send.before)
    native = by_mpi() == before
    send.free()
    recv.free()
    assert all_true(ok)
    assert all_true(native or not NATIVE)


@cases
@large
def test_vectors(seed: int, n: int, count: int, leaf: int) -> None:
    rng = random.Random(seed * 10 + RANK)
    common = random.Random(seed)
    counts = [[common.choice([0, 1, count]) for _ in range(SIZE)] for _ in range(SIZE)]
    send = Side(rng, LEAVES[leaf], n, count + 2, SIZE)
    recv = Side(rng, LEAVES[leaf], n, count + 2, SIZE)

    def vector(side: Side, elements: list[int]) -> list[Any]:
        unit = side.count // (count + 2)
        displs = [i * side.count for i in range(SIZE)]
        rng.shuffle(displs)
        return [side.buffer, [e * unit for e in elements], displs, side.datatype]

    def places(side: Side, spec: list[Any]) -> list[np.ndarray]:
        return [side.at(n, displ) for n, displ in zip(spec[1], spec[2], strict=True)]

    sends = vector(send, counts[RANK])
    receives = vector(recv, [counts[s][RANK] for s in range(SIZE)])
    gathers = vector(recv, [counts[s][0] for s in range(SIZE)])
    mine = [send.buffer, counts[RANK][0] * send.count // (count + 2), send.datatype]
    before = by_mpi()
    result = wanted([send.before[place] for place in places(send, sends)], recv, places(recv, receives))
    ok = is_right(lambda: COMM.Alltoallv(sends, receives), result, recv)
    into = places(recv, gathers)
    result = wanted([send.before[send.at(mine[1], 0)]] * SIZE, recv, into)
    ok &= is_right(lambda: COMM.Allgatherv(mine, gathers), result, recv)
    result = wanted([recv.before[into[RANK]]] * SIZE, recv, into)
    ok &= is_right(lambda: COMM.Allgatherv(MPI.IN_PLACE, gathers), result, recv)
    native = by_mpi() == before
    send.free()
    recv.free()
    assert all_true(ok)
    assert all_true(native or not NATIVE)


@cases
def test_predefined_ops_are_not_for_derived_datatypes(seed: int, n: int, count: int, leaf: int) -> None:
    rng = random.Random(seed)
    derived = build(rng, LEAVES[leaf], n)[0].Commit()
    a, b = np.zeros(2 * ROOM, np.uint8), np.zeros(2 * ROOM, np.uint8)
    for comm in (PLAIN, COMM):
        with pytest.raises(MPI.Exception) as caught:
            comm.Allreduce([a[ROOM:], min(count, 1), derived], [b[ROOM:], min(count, 1), derived], MPI.SUM)
        assert caught.value.Get_error_class() == MPI.ERR_OP
    derived.Free()
    assert all_true(not b.any())


def test_a_handle_used_again_is_looked_at_again() -> None:
    """MPI may give a new datatype the handle of a freed one."""
    for stride in (2, 3, 5, 4):
        vector = MPI.INT.Create_vector(3, 1, stride).Commit()
        a = np.arange(20, dtype=np.int32) if RANK == 0 else np.zeros(20, np.int32)
        COMM.Bcast([a, 1, vector])
        assert all_true(list(a[: 3 * stride : stride]) == [0, stride, 2 * stride])
        assert all_true(RANK == 0 or np.count_nonzero(a) == 2)
        vector.Free()


def test_what_is_not_taken_apart_is_mpis() -> None:
    """A cyclic darray, a datatype without bytes, one of too many blocks; on one rank only, all others plain."""
    n = 4096
    scattered = sorted(random.Random(1).sample(range(4 * n), n))
    made = [
        MPI.INT.Create_darray(1, 0, [n], [MPI.DISTRIBUTE_CYCLIC], [1], [1]),
        MPI.INT.Create_indexed_block(1, scattered),
    ]
    for datatype in made:
        datatype.Commit()
        assert datatypes.layout_of(datatype) is None
        a = np.full(4 * n, RANK, np.int32)
        before = by_mpi()
        COMM.Bcast([a, 1, datatype] if RANK == SIZE - 1 else [a, n, MPI.INT])
        assert all_true(not NATIVE or by_mpi() == before + 1)
        assert all_true(np.count_nonzero(a == 0) == (n if RANK else 4 * n))
        datatype.Free()


def test_a_datatype_that_is_not_committed_is_mpis_error() -> None:
    vector = MPI.INT.Create_vector(3, 1, 2)
    a = np.arange(20, dtype=np.int32)
    for comm in (PLAIN, COMM):
        with pytest.raises(MPI.Exception) as caught:
            comm.Allgather([a, 1, vector], [np.empty(100, np.int32), 1, vector])
        assert caught.value.Get_error_class() == MPI.ERR_TYPE
    vector.Commit()
    assert datatypes.layout_of(vector) is not None or not NATIVE
    vector.Free()


def test_nonblocking_and_persistent() -> None:
    column = MPI.DOUBLE.Create_vector(50, 1, 50).Commit()
    for registered in (False, True):
        make = stratampi.zeros if registered else np.zeros
        a, b = make((50, 50)), make((50 * SIZE, 50))
        persistent = COMM.Allgather_init([a, 1, column], [b, 50, MPI.DOUBLE])
        for turn in range(3):
            a[:, 0] = np.arange(50) + 100 * RANK + turn
            persistent.Start()
            persistent.Wait()
            wanted = [np.arange(50) + 100 * r + turn for r in range(SIZE)]
            assert all_true(all((b.ravel()[r * 50 : (r + 1) * 50] == wanted[r]).all() for r in range(SIZE)))
            a[:, 1] = -1
            request = COMM.Ibcast([a[:, 0:], 1, column] if RANK == 0 else [a.ravel()[1:], 1, column])
            request.Wait()
            assert all_true((a[:, min(RANK, 1)] == wanted[0]).all() and (RANK == 0 or (a[:, 0] == wanted[RANK]).all()))
        persistent.Free()
    column.Free()


@cases
@large
def test_alltoallw(seed: int, n: int, count: int, leaf: int) -> None:
    """Every pair of ranks has datatypes of its own; blocks lie in one buffer a side, in any order."""
    rng = random.Random(seed * 10 + RANK)
    common = random.Random(seed)
    counts = [[common.choice([0, 1, count]) for _ in range(SIZE)] for _ in range(SIZE)]

    def side() -> tuple[list[Side], np.ndarray, list[int]]:
        """A Side for each peer, and one memory for all of them in which the i-th lies from start[i] on."""
        sides = [Side(rng, LEAVES[leaf], n, count + 1, 1) for _ in range(SIZE)]
        order = list(range(SIZE))
        rng.shuffle(order)
        starts, end = [0] * SIZE, 0
        for i in order:
            starts[i] = end
            end += sides[i].memory.size
        memory = (stratampi.empty if rng.random() < 0.5 else np.empty)(end, np.uint8)
        for start, each in zip(starts, sides, strict=True):
            memory[start : start + each.memory.size] = each.before
        return sides, memory, starts

    def units(each: Side) -> int:
        return each.count // (count + 1)

    def spec(sides: list[Side], memory: np.ndarray, starts: list[int], blocks: list[int]) -> list[Any]:
        elements = [units(each) * block for each, block in zip(sides, blocks, strict=True)]
        displs = [start + ROOM for start in starts]
        types = [each.datatype for each in sides]
        return [memory, elements, displs, types] if seed % 2 else [memory, (elements, displs), types]

    def places(sides: list[Side], starts: list[int], blocks: list[int]) -> list[np.ndarray]:
        return [
            each.at(units(each) * block, 0) + start for each, start, block in zip(sides, starts, blocks, strict=True)
        ]

    out, sent, out_starts = side()
    into, received, in_starts = side()
    outgoing, incoming = counts[RANK], [counts[s][RANK] for s in range(SIZE)]
    before, calls = received.copy(), by_mpi()
    sends, receives = spec(out, sent, out_starts, outgoing), spec(into, received, in_starts, incoming)
    result = before.copy()
    arrived = AGREE.alltoall([sent[place] for place in places(out, out_starts, outgoing)])
    for place, bytes_ in zip(places(into, in_starts, incoming), arrived, strict=True):
        result[place] = bytes_
    COMM.Alltoallw(sends, receives)
    ok = np.array_equal(received, result)
    received[:] = before
    COMM.Ialltoallw(sends, receives).Wait()
    ok &= np.array_equal(received, result)

    # In place the counts of a pair are the same both ways.
    both = [counts[min(s, RANK)][max(s, RANK)] for s in range(SIZE)]
    received[:] = before
    result[:] = before
    arrived = AGREE.alltoall([before[place] for place in places(into, in_starts, both)])
    for place, bytes_ in zip(places(into, in_starts, both), arrived, strict=True):
        result[place] = bytes_
    COMM.Alltoallw(MPI.IN_PLACE, spec(into, received, in_starts, both))
    ok &= np.array_equal(received, result)
    native = by_mpi() == calls
    for each in out + into:
        each.free()
    assert all_true(ok)
    assert all_true(native or not NATIVE)


def test_alltoallw_of_a_transpose() -> None:
    """A parallel FFT's exchange: slabs along the rows to slabs along the columns."""
    n, m = 4 * SIZE, 6 * SIZE
    whole = np.arange(n * m, dtype=np.float64).reshape(n, m)
    rows, columns = n // SIZE, m // SIZE
    sends = [MPI.DOUBLE.Create_subarray([rows, m], [rows, columns], [0, p * columns]).Commit() for p in range(SIZE)]
    receives = [MPI.DOUBLE.Create_subarray([n, columns], [rows, columns], [p * rows, 0]).Commit() for p in range(SIZE)]
    for make in (np.empty, stratampi.empty):
        a, b = make((rows, m)), make((n, columns))
        a[:] = whole[RANK * rows : (RANK + 1) * rows]
        COMM.Alltoallw([a, sends], [b, receives])
        assert all_true(np.array_equal(b, whole[:, RANK * columns : (RANK + 1) * columns]))
    for datatype in sends + receives:
        datatype.Free()


def test_alltoallw_refuses_as_mpi4py_does() -> None:
    a = np.zeros(4 * SIZE, np.int32)
    types, ones, zeros = [MPI.INT] * SIZE, [1] * SIZE, [0] * SIZE
    good = [a.copy(), ones, zeros, types]
    bad: list[Any] = [
        [a],
        [a, ones, zeros, types, 1],
        [a, ones, types],
        [a, ones, None, types],
        [a, [1] * (SIZE + 1), zeros, types],
        [a, ones, [0.5] * SIZE, types],
        [a, types + types],
        [a, ["i"] * SIZE],
        [MPI.BOTTOM, types],
        [MPI.BOTTOM, (ones, None), types],
        [object(), types],
        7,
    ]
    for spec in bad:
        for args in ((spec, good), (good, spec)):
            told = []
            for comm in (PLAIN, COMM):
                with pytest.raises((ValueError, TypeError)) as caught:
                    comm.Alltoallw(*args)
                told.append((caught.type, str(caught.value)))
            assert told[0] == told[1], (spec, told)


PAIRS = {
    "h": MPI.SHORT_INT,
    "i": MPI.TWOINT,
    "l": MPI.LONG_INT,
    "f": MPI.FLOAT_INT,
    "d": MPI.DOUBLE_INT,
    "g": MPI.LONG_DOUBLE_INT,
}


@given(
    char=st.sampled_from(sorted(PAIRS)),
    count=st.sampled_from([0, 1, 7, 500, 5000, 40_000]),
    seed=st.integers(0, 999),
    largest=st.booleans(),
)
@example(char="d", count=40_000, seed=1, largest=True)
def test_value_and_location(char: str, count: int, seed: int, largest: bool) -> None:
    """MAXLOC and MINLOC on all pair types; of equal values the lower location (MPI 5.1, section 6.9.4). Gaps keep their bytes."""
    dtype = np.dtype([("value", char), ("place", "i")], align=True)
    root = seed % SIZE
    drawn = []
    for rank in range(SIZE):
        rng = np.random.default_rng([seed, rank])
        each = np.empty(count, dtype)
        each["value"], each["place"] = rng.integers(-2, 3, count), rng.integers(-9, 9, count)
        drawn.append(each)
    sign = -1 if largest else 1
    keys = np.array([[sign * each["value"], each["place"]] for each in drawn], np.int64).reshape(SIZE, 2, count)
    best = keys[0]
    for key in keys[1:]:
        takes = (key[0] < best[0]) | ((key[0] == best[0]) & (key[1] < best[1]))
        best = np.where(takes, key, best)
    gaps = np.ones(dtype.itemsize, bool)
    gaps[: 10 if char == "g" else dtype["value"].itemsize] = False
    gaps[dtype.fields["place"][1] : dtype.fields["place"][1] + 4] = False
    gaps[10:16] &= char != "g"  # a long double's own padding

    def is_best(got: np.ndarray) -> bool:
        right = np.array_equal(got["value"], sign * best[0]) and np.array_equal(got["place"], best[1])
        return bool(right and (got.view(np.uint8).reshape(count, dtype.itemsize)[:, gaps] == 0x5A).all())

    registered = np.random.default_rng([seed, RANK]).integers(0, 4)
    send, recv = (
        (stratampi.empty if registered >> i & 1 else np.empty)(count * dtype.itemsize, np.uint8) for i in range(2)
    )
    send[:] = drawn[RANK].view(np.uint8)
    datatype, op = PAIRS[char], MPI.MAXLOC if largest else MPI.MINLOC
    before = by_mpi()
    recv[:] = 0x5A
    COMM.Allreduce([send, datatype], [recv, datatype], op)
    ok = is_best(recv.view(dtype))
    recv[:] = 0x5A
    COMM.Reduce([send, datatype], [recv, datatype] if root == RANK else None, op, root)
    ok &= is_best(recv.view(dtype)) if root == RANK else bool((recv == 0x5A).all())
    recv[:] = 0x5A
    inside = recv.view(dtype)
    inside["value"], inside["place"] = drawn[RANK]["value"], drawn[RANK]["place"]
    COMM.Iallreduce(MPI.IN_PLACE, [recv, datatype], op).Wait()
    ok &= is_best(recv.view(dtype))
    assert all_true(ok)
    assert all_true(by_mpi() == before or not NATIVE)


def times(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Products of 2 x 2 matrices of uint64, one a row: associative, not commutative, exact."""
    return (a.reshape(-1, 2, 2) @ b.reshape(-1, 2, 2)).reshape(-1, 4)


@given(count=st.sampled_from([0, 1, 3, 200, 300, 5000]), seed=st.integers(0, 999), gap=st.integers(0, 2))
@example(count=5000, seed=1, gap=0)
@example(count=5000, seed=2, gap=1)
def test_ops_of_the_users(count: int, seed: int, gap: int) -> None:
    """A matrix is a contiguous datatype, or one with a gap inside and another behind; gap 2: with a lower bound below it."""
    root = seed % SIZE
    drawn = [
        np.random.default_rng([seed, r]).integers(0, 2**64, (count, 4), np.uint64, endpoint=False) for r in range(SIZE)
    ]
    result = drawn[0]
    for each in drawn[1:]:
        result = times(result, each)
    columns = [0, 1, 3, 4] if gap else [0, 1, 2, 3]  # of the words of one element
    words = 6 if gap else 4
    if gap:
        base = MPI.UINT64_T.Create_vector(2, 2, 3)
        datatype = base.Create_resized(-8 * (gap - 1), 8 * words).Commit()
    else:
        datatype = MPI.UINT64_T.Create_contiguous(4).Commit()

    def product(a: memoryview, b: memoryview, type_: MPI.Datatype) -> None:
        left = np.frombuffer(a, np.uint64)
        right = np.frombuffer(b, np.uint64)
        x, y = left.reshape(-1, words)[:, columns], right.reshape(-1, words)
        y[:, columns] = times(x, y[:, columns])

    op = MPI.Op.Create(product, commute=bool(seed % 2))
    make = stratampi.empty if np.random.default_rng([seed, RANK]).integers(0, 2) else np.empty
    send, recv = make((count + 1, words), np.uint64), make((count + 1, words), np.uint64)
    blank = np.full((count + 1, words), 7, np.uint64)
    send[:] = blank
    send[:count, columns] = drawn[RANK]
    wanted_ = blank.copy()
    wanted_[:count, columns] = result
    before = by_mpi()
    recv[:] = blank
    COMM.Allreduce([send, count, datatype], [recv, count, datatype], op)
    ok = np.array_equal(recv, wanted_)
    recv[:] = send
    COMM.Allreduce(MPI.IN_PLACE, [recv, count, datatype], op)
    ok &= np.array_equal(recv, wanted_)
    recv[:] = blank
    COMM.Reduce([send, count, datatype], [recv, count, datatype] if root == RANK else None, op, root)
    ok &= np.array_equal(recv, wanted_ if root == RANK else blank)
    native = by_mpi() == before
    op.Free()
    datatype.Free()
    assert all_true(ok)
    assert all_true(native or not NATIVE)


def test_an_op_of_the_users_meets_its_like() -> None:
    """Errors of the caller come before a peer is concerned; ranks whose ops or counts differ are all told."""
    op = MPI.Op.Create(lambda a, b, datatype: None)
    a, b = np.ones(2000), np.ones(2000)
    for comm in (PLAIN, COMM):
        with pytest.raises(ValueError, match="mismatch in send count"):
            comm.Allreduce([a, 3], [b, 2], op)
        with pytest.raises(MPI.Exception) as caught:
            comm.Reduce(a, b, op, SIZE)
        assert caught.value.Get_error_class() == MPI.ERR_ROOT
    if NATIVE and SIZE > 1:
        with pytest.raises(MPI.Exception, match="do not fit together"):
            COMM.Allreduce(a, b, MPI.SUM if RANK == 0 else op)
        with pytest.raises(MPI.Exception, match="do not fit together"):
            COMM.Allreduce(a[: 1500 + (RANK == 0)], b[: 1500 + (RANK == 0)], op)
    op.Free()
