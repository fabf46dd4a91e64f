"""The native operators against ref.py: dtypes, ops, sizes that cross every threshold, each rank's memory registered or plain.

Collective: all ranks draw the same examples, each takes its own entry, and all agree on the outcome before they judge it, so that a
failure on one rank fails the test on all instead of leaving the others waiting.
"""

import os
import random
import resource
import threading
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from mpi4py import MPI as plain_mpi

import stratampi
from stratampi import MPI, ref

pytestmark = pytest.mark.mpi

COMM = MPI.COMM_WORLD
RANK, SIZE = COMM.rank, COMM.size
PLAIN = plain_mpi.Intracomm(COMM)  # the same handle, mpi4py's own methods
NATIVE = stratampi.stats()["driver"] != "none"

try:
    import ml_dtypes

    EXTRA = [np.dtype(ml_dtypes.bfloat16)]
except ImportError:
    EXTRA = []
DTYPES = [np.dtype(c) for c in "?bhilBHILefdgFDG"] + (EXTRA if NATIVE else [])  # bfloat16 is an extension of ours
OPS = ["SUM", "PROD", "MAX", "MIN", "LAND", "LOR", "LXOR", "BAND", "BOR", "BXOR"]
LEGAL = [(dtype, op) for dtype in DTYPES for op in OPS if ref.is_legal(dtype, op)]

# Bytes: nothing; the entry line (96); the slot (8192); staged chunks; several pages.
SIZES = [0, 1, 8, 95, 96, 97, 1000, 8191, 8192, 8193, 20_000, 65_536, 65_537, 200_001]
per_rank = st.integers(0, 2**20 - 1)  # a bit for each rank and buffer
sizes = st.sampled_from(SIZES)


def all_true(ok: bool) -> bool:
    """Whether it holds on all ranks; asked by mpi4py's own Allreduce on another communicator than the one under test."""
    return bool(AGREE.allreduce(bool(ok), op=plain_mpi.MIN))


AGREE = PLAIN.Dup()


def bit(bits: int, which: int, rank: int = RANK) -> bool:
    return bool(bits >> (which * 5 + rank) & 1)


class Buffer:
    """`count` elements with a guard element on both sides, in the heap or not, aligned or one byte off."""

    def __init__(self, count: int, dtype: np.dtype, registered: bool, shifted: bool) -> None:
        make = stratampi.empty if registered else np.empty
        self.bytes = make((count + 2) * dtype.itemsize + 1, np.uint8)
        self.bytes[:] = 0xA5
        start = (1 if shifted and dtype.char in plain_mpi._typedict else 0) + dtype.itemsize
        self.array = self.bytes[start : start + count * dtype.itemsize].view(dtype)
        self.start, self.end = start, start + count * dtype.itemsize

    def guards_intact(self) -> bool:
        return bool((self.bytes[: self.start] == 0xA5).all() and (self.bytes[self.end :] == 0xA5).all())


def typed(array: np.ndarray) -> Any:
    """As mpi4py takes it: at an odd address an array needs its datatype said."""
    return array if array.flags.aligned else [array, plain_mpi._typedict[array.dtype.char]]


def typed_runs(array: np.ndarray, counts: Any, displs: Any) -> Any:
    return (
        [array, (counts, displs)]
        if array.flags.aligned
        else [array, (counts, displs), plain_mpi._typedict[array.dtype.char]]
    )


def values(rng: np.random.Generator, count: int, dtype: np.dtype) -> np.ndarray:
    """Any numbers; small enough that products of a few stay finite in every float."""
    if dtype.kind == "b":
        return rng.integers(0, 2, count).astype(dtype)
    if dtype.kind in "iu":
        return rng.integers(0, 256, count * dtype.itemsize, np.uint8).view(dtype)
    x = rng.standard_normal(count) * 2
    return (x + 1j * rng.standard_normal(count)).astype(dtype) if dtype.kind == "c" else x.astype(dtype)


def inputs(seed: int, count: int, dtype: np.dtype) -> list[np.ndarray]:
    return [values(np.random.default_rng([seed, rank]), count, dtype) for rank in range(SIZE)]


def same(got: np.ndarray, wanted: np.ndarray) -> bool:
    """Bit for bit; an extended float's padding bytes and the payload of a NaN do not count."""
    if got.dtype.char in "gG":
        return bool(np.array_equal(got, wanted, equal_nan=True))
    return got.tobytes() == np.asarray(wanted).tobytes() or bool(
        got.dtype.kind in "fc" and np.array_equal(got, wanted, equal_nan=True)
    )


@given(pair=st.sampled_from(LEGAL), nbytes=sizes, bits=per_rank, root=st.integers(0, SIZE - 1), seed=st.integers(0, 99))
@example(pair=(np.dtype("d"), "SUM"), nbytes=200_001, bits=0, root=0, seed=0)
@example(pair=(np.dtype("d"), "SUM"), nbytes=200_001, bits=2**10 - 1, root=SIZE - 1, seed=0)
@example(pair=(np.dtype("e"), "SUM"), nbytes=65_537, bits=1, root=0, seed=1)
def test_reductions(pair: tuple[np.dtype, str], nbytes: int, bits: int, root: int, seed: int) -> None:
    dtype, op = pair
    count = nbytes // dtype.itemsize
    given_to = inputs(seed, count, dtype)
    wanted = ref.combine(given_to, op)
    send = Buffer(count, dtype, bit(bits, 0), bit(bits, 2))
    recv = Buffer(count, dtype, bit(bits, 1), bit(bits, 3))
    mpi_op = getattr(MPI, op)
    ok = True

    send.array[:] = given_to[RANK]
    COMM.Allreduce(typed(send.array), typed(recv.array), mpi_op)
    ok &= same(recv.array, wanted) and same(send.array, given_to[RANK])
    recv.array[:] = given_to[RANK]
    COMM.Allreduce(MPI.IN_PLACE, typed(recv.array), mpi_op)
    ok &= same(recv.array, wanted)
    recv.array[:] = 0
    COMM.Reduce(typed(send.array), typed(recv.array) if root == RANK else None, mpi_op, root)
    ok &= same(recv.array, wanted) if root == RANK else not recv.array.any()
    if root == RANK:
        recv.array[:] = given_to[RANK]
        COMM.Reduce(MPI.IN_PLACE, typed(recv.array), mpi_op, root)
        ok &= same(recv.array, wanted)
    else:
        COMM.Reduce(typed(send.array), None, mpi_op, root)
    assert all_true(ok and send.guards_intact() and recv.guards_intact())


@given(
    dtype=st.sampled_from(DTYPES), nbytes=sizes, bits=per_rank, root=st.integers(0, SIZE - 1), seed=st.integers(0, 99)
)
@example(dtype=np.dtype("d"), nbytes=200_001, bits=0, root=0, seed=0)
@example(dtype=np.dtype("d"), nbytes=200_001, bits=2**10 - 1, root=0, seed=0)
def test_movements(dtype: np.dtype, nbytes: int, bits: int, root: int, seed: int) -> None:
    count = nbytes // dtype.itemsize
    given_to = inputs(seed, count * SIZE, dtype)
    blocks = [x[:count] for x in given_to]
    send = Buffer(count * SIZE, dtype, bit(bits, 0), bit(bits, 2))
    recv = Buffer(count * SIZE, dtype, bit(bits, 1), bit(bits, 3))
    send.array[:] = given_to[RANK]
    ok = True

    one = recv.array[:count]
    if root == RANK:
        one[:] = blocks[root]
    COMM.Bcast(typed(one), root)
    ok &= same(one, blocks[root])
    COMM.Allgather(typed(send.array[:count]), typed(recv.array))
    ok &= same(recv.array, np.concatenate(blocks))
    recv.array[:] = 0
    recv.array[RANK * count : (RANK + 1) * count] = blocks[RANK]
    COMM.Allgather(MPI.IN_PLACE, typed(recv.array))
    ok &= same(recv.array, np.concatenate(blocks))
    wanted = ref.alltoall([x.reshape(SIZE, count) for x in given_to])[RANK].reshape(-1)
    COMM.Alltoall(typed(send.array), typed(recv.array))
    ok &= same(recv.array, wanted)
    recv.array[:] = given_to[RANK]
    COMM.Alltoall(MPI.IN_PLACE, typed(recv.array))
    ok &= same(recv.array, wanted)
    ok &= same(send.array, given_to[RANK])
    assert all_true(ok and send.guards_intact() and recv.guards_intact())


@given(
    dtype=st.sampled_from([np.dtype(c) for c in "bdF"]),
    lengths=st.lists(st.sampled_from([0, 1, 5, 100, 1100, 20_000]), min_size=25, max_size=25),
    gap=st.integers(0, 3),
    bits=per_rank,
    seed=st.integers(0, 99),
)
def test_vectors(dtype: np.dtype, lengths: list[int], gap: int, bits: int, seed: int) -> None:
    counts = [[lengths[s * 5 + d] for d in range(SIZE)] for s in range(SIZE)]
    ok = True

    def layout(runs: list[int]) -> tuple[list[int], int]:
        """Displacements of runs in reverse order with gaps, and the elements in all."""
        displs, end = [0] * len(runs), 0
        for i in reversed(range(len(runs))):
            displs[i] = end
            end += runs[i] + gap
        return displs, end

    send_displs = [layout(counts[r])[0] for r in range(SIZE)]
    given_to = [values(np.random.default_rng([seed, r]), layout(counts[r])[1], dtype) for r in range(SIZE)]
    incoming = [counts[s][RANK] for s in range(SIZE)]
    displs, total = layout(incoming)
    send = Buffer(given_to[RANK].size, dtype, bit(bits, 0), bit(bits, 2))
    recv = Buffer(total, dtype, bit(bits, 1), bit(bits, 3))
    send.array[:] = given_to[RANK]
    before = recv.array.copy()
    COMM.Alltoallv(typed_runs(send.array, counts[RANK], send_displs[RANK]), typed_runs(recv.array, incoming, displs))
    wanted = before
    for s in range(SIZE):
        at = send_displs[s][RANK]
        wanted[displs[s] : displs[s] + incoming[s]] = given_to[s][at : at + incoming[s]]
    ok &= same(recv.array, wanted)

    contributed = [counts[r][0] for r in range(SIZE)]
    displs, total = layout(contributed)
    gathered = Buffer(total, dtype, bit(bits, 1), bit(bits, 3))
    wanted = gathered.array.copy()
    for r in range(SIZE):
        wanted[displs[r] : displs[r] + contributed[r]] = given_to[r][: contributed[r]]
    COMM.Allgatherv(typed(send.array[: contributed[RANK]]), typed_runs(gathered.array, contributed, displs))
    ok &= same(gathered.array, wanted)
    COMM.Allgatherv(MPI.IN_PLACE, typed_runs(gathered.array, contributed, displs))
    ok &= same(gathered.array, wanted)
    assert all_true(ok and recv.guards_intact() and gathered.guards_intact())


@given(
    dtype=st.sampled_from(DTYPES), nbytes=sizes, bits=per_rank, root=st.integers(0, SIZE - 1), seed=st.integers(0, 99)
)
@example(dtype=np.dtype("d"), nbytes=200_001, bits=0, root=0, seed=0)
@example(dtype=np.dtype("d"), nbytes=200_001, bits=2**20 - 1, root=SIZE - 1, seed=0)
def test_gather_and_scatter(dtype: np.dtype, nbytes: int, bits: int, root: int, seed: int) -> None:
    count = nbytes // dtype.itemsize
    given_to = inputs(seed, count * SIZE, dtype)
    whole, one = Buffer(count * SIZE, dtype, bit(bits, 0), bit(bits, 2)), Buffer(count, dtype, bit(bits, 1), False)
    in_place = root == RANK and bit(bits, 3)
    mine = slice(RANK * count, (RANK + 1) * count)
    before = whole.array.copy()
    one.array[:] = given_to[RANK][:count]
    if in_place:
        whole.array[mine] = one.array
    COMM.Gather(MPI.IN_PLACE if in_place else typed(one.array), typed(whole.array) if root == RANK else None, root)
    wanted = ref.gather([x[:count] for x in given_to], root)[RANK]
    ok = same(whole.array, before if wanted is None else wanted.reshape(-1))
    ok &= same(one.array, given_to[RANK][:count])

    whole.array[:] = given_to[RANK]
    one.array[:] = 0
    COMM.Scatter(typed(whole.array) if root == RANK else None, None if in_place else typed(one.array), root)
    wanted = ref.scatter([x.reshape(SIZE, count) for x in given_to], root)[RANK]
    ok &= not one.array.any() if in_place else same(one.array, wanted)
    ok &= same(whole.array, given_to[RANK])
    assert all_true(ok and whole.guards_intact() and one.guards_intact())


@given(
    dtype=st.sampled_from([np.dtype(c) for c in "bdF"]),
    counts=st.lists(st.sampled_from([0, 1, 5, 100, 1100, 20_000]), min_size=SIZE, max_size=SIZE),
    gap=st.integers(0, 3),
    bits=per_rank,
    root=st.integers(0, SIZE - 1),
    seed=st.integers(0, 99),
)
@example(dtype=np.dtype("d"), counts=[20_000] * SIZE, gap=1, bits=0, root=0, seed=0)
@example(dtype=np.dtype("d"), counts=[20_000] * SIZE, gap=1, bits=2**20 - 1, root=0, seed=0)
def test_gatherv_and_scatterv(dtype: np.dtype, counts: list[int], gap: int, bits: int, root: int, seed: int) -> None:
    """What the other ranks pass for the root's side is ignored, whatever it is."""
    displs, end = [0] * SIZE, 0
    for i in reversed(range(SIZE)):
        displs[i], end = end, end + counts[i] + gap
    given_to = inputs(seed, end, dtype)
    whole, one = Buffer(end, dtype, bit(bits, 0), bit(bits, 2)), Buffer(counts[RANK], dtype, bit(bits, 1), False)
    in_place = root == RANK and bit(bits, 3)
    before = whole.array.copy()
    one.array[:] = given_to[RANK][: counts[RANK]]
    if in_place:
        whole.array[displs[RANK] : displs[RANK] + counts[RANK]] = one.array
    layout = typed_runs(whole.array, counts, displs) if root == RANK else "nothing to look at"
    COMM.Gatherv(MPI.IN_PLACE if in_place else typed(one.array), layout, root)
    wanted = ref.gatherv([x[:n] for x, n in zip(given_to, counts, strict=True)], root, displs, before)[RANK]
    ok = same(whole.array, before if wanted is None else wanted)

    whole.array[:] = given_to[RANK]
    one.array[:] = 0
    COMM.Scatterv(layout, MPI.IN_PLACE if in_place else typed(one.array), root)
    wanted = ref.scatterv(given_to, counts, root, displs)[RANK]
    ok &= not one.array.any() if in_place else same(one.array, wanted)
    ok &= same(whole.array, given_to[RANK])
    assert all_true(ok and whole.guards_intact() and one.guards_intact())


@given(
    pair=st.sampled_from(LEGAL),
    counts=st.lists(st.sampled_from([0, 1, 13, 1000, 20_000]), min_size=SIZE, max_size=SIZE),
    told=st.integers(0, 31),
    bits=per_rank,
    seed=st.integers(0, 99),
)
@example(pair=(np.dtype("d"), "SUM"), counts=[20_000] * SIZE, told=31, bits=0, seed=0)
@example(pair=(np.dtype("d"), "SUM"), counts=[20_000] * SIZE, told=0, bits=2**10 - 1, seed=0)
@example(pair=(np.dtype("d"), "SUM"), counts=[20_000] * SIZE, told=0, bits=2**20 - 1, seed=0)
def test_scattered_reductions(pair: tuple[np.dtype, str], counts: list[int], told: int, bits: int, seed: int) -> None:
    """Each rank for itself is in place or not, and has a table of counts or not: more than mpi4py allows."""
    dtype, op = pair
    mpi_op = getattr(MPI, op)
    total = sum(counts)
    in_place = bit(bits, 3)
    table = counts if in_place or not NATIVE or told >> RANK & 1 else None
    given_to = inputs(seed, total, dtype)
    send, recv = Buffer(total, dtype, bit(bits, 0), False), Buffer(total, dtype, bit(bits, 1), bit(bits, 2))
    send.array[:] = given_to[RANK]
    recv.array[:] = given_to[RANK]
    mine = recv.array[: counts[RANK]]
    COMM.Reduce_scatter(
        MPI.IN_PLACE if in_place else typed(send.array), typed(recv.array if in_place else mine), table, mpi_op
    )
    ok = same(mine, ref.reduce_scatter(given_to, counts, op)[RANK])
    ok &= in_place or same(recv.array[counts[RANK] :], given_to[RANK][counts[RANK] :])

    count = total // SIZE
    given_to = [x[: count * SIZE] for x in given_to]
    whole = recv.array[: count * SIZE]
    whole[:] = given_to[RANK]
    if in_place:
        COMM.Reduce_scatter_block(MPI.IN_PLACE, typed(whole), mpi_op)
    else:
        COMM.Reduce_scatter_block(typed(send.array[: count * SIZE]), typed(whole[:count]), mpi_op)
        ok &= same(whole[count:], given_to[RANK][count:])
    ok &= same(whole[:count], ref.reduce_scatter_block([x.reshape(SIZE, count) for x in given_to], op)[RANK])
    assert all_true(ok and send.guards_intact() and recv.guards_intact())


@given(pair=st.sampled_from(LEGAL), nbytes=sizes, bits=per_rank, seed=st.integers(0, 99))
@example(pair=(np.dtype("d"), "SUM"), nbytes=200_001, bits=0, seed=0)
@example(pair=(np.dtype("d"), "SUM"), nbytes=200_001, bits=2**10 - 1, seed=0)
@example(pair=(np.dtype("d"), "SUM"), nbytes=200_001, bits=2**20 - 1, seed=0)
@example(pair=(np.dtype("e"), "SUM"), nbytes=200_001, bits=2**20 - 1 - 6, seed=1)
def test_prefixes(pair: tuple[np.dtype, str], nbytes: int, bits: int, seed: int) -> None:
    dtype, op = pair
    count = nbytes // dtype.itemsize
    given_to = inputs(seed, count, dtype)
    in_place = bit(bits, 3)
    send = Buffer(count, dtype, bit(bits, 0), bit(bits, 2))
    recv = Buffer(count, dtype, bit(bits, 1), False)
    send.array[:] = given_to[RANK]
    ok = True
    for method, model in ((COMM.Scan, ref.scan), (COMM.Exscan, ref.exscan)):
        recv.array[:] = given_to[RANK]
        method(MPI.IN_PLACE if in_place else typed(send.array), typed(recv.array), getattr(MPI, op))
        wanted = model(given_to, op)[RANK]
        if wanted is not None or NATIVE:  # an MPI library may write to rank 0's buffer of Exscan
            ok &= same(recv.array, given_to[RANK] if wanted is None else wanted)
        ok &= same(send.array, given_to[RANK])
    assert all_true(ok and send.guards_intact() and recv.guards_intact())


@pytest.mark.parametrize("n", [3, 30_000])
@pytest.mark.parametrize("name", ["SHORT_INT", "DOUBLE_INT", "INT_INT"])
def test_pairs_in_partial_reductions(n: int, name: str) -> None:
    """Elements that do not divide a cache line, and have gaps, which stay as they are."""
    datatype = getattr(MPI, name)
    extent = datatype.Get_extent()[1]
    value, at = {"SHORT_INT": ("h", 4), "DOUBLE_INT": ("d", 8), "INT_INT": ("i", 4)}[name]
    pair = np.dtype({"names": ["value", "rank"], "formats": [value, "i"], "offsets": [0, at], "itemsize": extent})
    given_to = [np.zeros(n * SIZE, pair) for _ in range(SIZE)]
    for rank, pairs in enumerate(given_to):
        pairs["value"] = np.random.default_rng([n, rank]).integers(0, 9, n * SIZE)
        pairs["rank"] = rank

    def best(ranks: int) -> np.ndarray:
        values = np.stack([pairs["value"] for pairs in given_to[:ranks]])
        first = values.argmax(axis=0)
        return np.stack([values.max(axis=0).astype("d"), first.astype("d")])

    def result(method: Any, each: int) -> np.ndarray:
        recv = np.full(extent * n * SIZE, 0xA5, np.uint8)
        method([given_to[RANK], each, datatype], [recv, each, datatype], MPI.MAXLOC)
        nonlocal ok
        gaps = np.ones(extent, bool)
        gaps[: np.dtype(value).itemsize] = gaps[at : at + 4] = False
        ok &= bool((recv.reshape(-1, extent)[:, gaps] == 0xA5).all() and (recv[extent * each :] == 0xA5).all())
        pairs = recv.view(pair)[:each]
        return np.stack([pairs["value"].astype("d"), pairs["rank"].astype("d")])

    ok = True
    ok &= np.array_equal(result(COMM.Scan, n * SIZE), best(RANK + 1))
    ok &= np.array_equal(result(COMM.Reduce_scatter_block, n), best(SIZE)[:, RANK * n : (RANK + 1) * n])
    if RANK > 0:
        ok &= np.array_equal(result(COMM.Exscan, n * SIZE), best(RANK))
    else:
        untouched = np.full(extent * n * SIZE, 0xA5, np.uint8)
        COMM.Exscan([given_to[0], n * SIZE, datatype], [untouched, n * SIZE, datatype], MPI.MAXLOC)
        ok &= bool((untouched == 0xA5).all()) or not NATIVE
    assert all_true(ok)


def paths() -> dict[str, dict[str, int]]:
    return dict(stratampi.stats()["calls"])


def taken(operator: str, call: Any) -> str:
    """The path that one call took."""
    before = paths().get(operator, {})
    call()
    after = paths().get(operator, {})
    return next((path for path in after if after[path] != before.get(path, 0)), "")


@pytest.mark.skipif(not NATIVE or SIZE < 2, reason="needs the fabric and two ranks")
def test_the_path_is_what_all_ranks_brought() -> None:
    n = 50_000
    registered, also = stratampi.ones(n), stratampi.ones(n)
    plain = np.ones(n)
    assert stratampi.is_registered(registered[10:20])
    assert not stratampi.is_registered(plain)
    assert taken("allreduce", lambda: COMM.Allreduce(registered, also)) == "direct"
    assert taken("allreduce", lambda: COMM.Allreduce(registered[:8], also[:8])) == "inline"
    assert taken("allreduce", lambda: COMM.Allreduce(registered if RANK else plain, also)) == "staged"
    assert taken("bcast", lambda: COMM.Bcast(registered, 0)) == "direct"
    assert taken("bcast", lambda: COMM.Bcast(plain if RANK == 0 else registered, 0)) == "staged"
    assert taken("bcast", lambda: COMM.Bcast(registered if RANK == 0 else plain, 0)) == "direct"
    blocks, part = stratampi.ones(n * SIZE), n // SIZE
    assert taken("gather", lambda: COMM.Gather(registered, blocks)) == "direct"
    assert taken("gather", lambda: COMM.Gather(registered if RANK else plain, blocks)) == "direct"
    assert taken("gather", lambda: COMM.Gather(plain, blocks)) == "staged"
    assert taken("gatherv", lambda: COMM.Gatherv(registered, blocks)) == "direct"
    assert taken("scatter", lambda: COMM.Scatter(blocks, plain)) == "direct"
    assert taken("scatterv", lambda: COMM.Scatterv(np.ones(n * SIZE), plain)) == "staged"
    assert taken("scan", lambda: COMM.Scan(registered, also)) == "direct"
    assert taken("exscan", lambda: COMM.Exscan(MPI.IN_PLACE, registered)) == "direct"
    assert taken("exscan", lambda: COMM.Exscan(registered, plain if RANK == 0 else also)) == "direct"
    assert taken("scan", lambda: COMM.Scan(registered, plain if RANK == 0 else also)) == "staged"
    whole = registered[: part * SIZE]
    assert taken("reduce_scatter", lambda: COMM.Reduce_scatter(whole, also[:part])) == "direct"
    assert taken("reduce_scatter_block", lambda: COMM.Reduce_scatter_block(whole, also[:part])) == "direct"
    assert taken("reduce_scatter_block", lambda: COMM.Reduce_scatter_block(MPI.IN_PLACE, whole)) == "staged"


@pytest.mark.skipif(SIZE < 2, reason="needs two ranks")
@pytest.mark.parametrize("n", [4, 1000, 100_000])
def test_ranks_bring_different_memory(n: int) -> None:
    """Registered, plain, read-only and a derived datatype, each on another rank, in every rotation."""
    for shift in range(4):
        kind = (RANK + shift) % 4
        data = stratampi.full(n, RANK + 1.0) if kind == 0 else np.full(n, RANK + 1.0)
        recv = np.zeros(n) if kind else stratampi.zeros(n)
        target: Any = recv
        datatype = MPI.DOUBLE.Create_contiguous(n).Commit()
        if kind == 2:
            data.flags.writeable = False
        if kind == 3:
            target = [recv, n, MPI.DOUBLE]
        COMM.Allgather([data, n // SIZE, MPI.DOUBLE], [recv, n // SIZE, MPI.DOUBLE])
        ok = bool(all((recv[r * (n // SIZE) : (r + 1) * (n // SIZE)] == r + 1).all() for r in range(SIZE)))
        copy = data.copy()
        COMM.Bcast([copy, 1, datatype] if kind == 3 else copy, root=shift % SIZE)
        ok &= bool((copy == shift % SIZE + 1).all())
        COMM.Allreduce(data, target)
        ok &= bool((recv == SIZE * (SIZE + 1) / 2).all())
        datatype.Free()
        assert all_true(ok)


@pytest.mark.skipif(not NATIVE or SIZE < 2, reason="needs the fabric and two ranks")
@pytest.mark.parametrize("n", [4, 1000, 100_000])
@pytest.mark.parametrize("make", [np.zeros, stratampi.zeros])
def test_differing_arguments_raise_everywhere(n: int, make: Any) -> None:
    odd = RANK == SIZE - 1
    a, b = make(n + 1), make((n + 1) * SIZE)
    even = [n] * SIZE
    calls = {
        "count": lambda: COMM.Allreduce(a[: n + odd], b[: n + odd]),
        "type": lambda: COMM.Allreduce(a[:n].view("l" if odd else "d"), b[:n].view("l" if odd else "d")),
        "op": lambda: COMM.Allreduce(a, b[: n + 1], MPI.MAX if odd else MPI.SUM),
        "root": lambda: COMM.Bcast(a, SIZE - 1 if odd else 0),
        "bytes": lambda: COMM.Bcast(a[: n + odd], 0),
        "operator": lambda: COMM.Barrier() if odd else COMM.Bcast(a, 0),
        "block": lambda: COMM.Alltoall([b, n + odd, MPI.DOUBLE], [b.copy(), n + odd, MPI.DOUBLE]),
        "gathered": lambda: COMM.Allgatherv(a[: n + odd], [b, even]),
        "to gather": lambda: COMM.Gather([a, n + odd, MPI.DOUBLE], [b, n, MPI.DOUBLE]),
        "to the root": lambda: COMM.Gatherv(a[: n + odd], [b, even]),
        "to scatter": lambda: COMM.Scatter([b, n, MPI.DOUBLE], a[: n + odd]),
        "from the root": lambda: COMM.Scatterv([b, even], a[: n + odd]),
        "gathering root": lambda: COMM.Gather(a[:n], b[: n * SIZE], root=int(odd)),
        "prefix": lambda: COMM.Scan(a[: n + odd], b[: n + odd]),
        "scattered": lambda: COMM.Reduce_scatter_block(b[: (n + odd) * SIZE], a[: n + odd]),
        "received": lambda: COMM.Reduce_scatter(b[: n * SIZE], a[: n + odd]),
        "tables": lambda: COMM.Reduce_scatter(b[: n * SIZE], a[: n - odd], [n + odd, *even[2:], n - odd]),
        "sent": lambda: COMM.Alltoallv([b, [n + odd, *even[1:]]], [b.copy(), even]),
    }
    for name, call in calls.items():
        with pytest.raises(MPI.Exception) as caught:
            call()
        text = str(caught.value)
        ok = caught.value.Get_error_class() == MPI.ERR_TRUNCATE and all(f"rank {r}:" in text for r in range(SIZE))
        assert all_true(ok), (name, text)
        x = np.array([RANK])
        COMM.Allreduce(MPI.IN_PLACE, x)
        assert x[0] == SIZE * (SIZE - 1) // 2  # the communicator goes on


@pytest.mark.skipif(not NATIVE or SIZE < 2, reason="needs the fabric and two ranks")
@pytest.mark.parametrize("n", [4, 100_000])
def test_overlapping_buffers_raise_everywhere(n: int) -> None:
    a, b = np.zeros(2 * n), np.zeros(n)
    with pytest.raises(MPI.Exception) as caught:
        COMM.Allreduce(a[:n], a[1 : n + 1] if RANK == SIZE - 1 else b)
    assert all_true(caught.value.Get_error_class() == MPI.ERR_BUFFER and f"rank {SIZE - 1}" in str(caught.value))
    COMM.Barrier()


def outcome(call: Any) -> Any:
    try:
        return call()
    except Exception as error:
        return type(error), error.Get_error_class() if isinstance(error, MPI.Exception) else str(error)


@pytest.mark.parametrize("char", list("?bhilBHILefdgFDG"))
def test_legality_is_mpi4pys(char: str) -> None:
    """Every type with every op: the same result, or the same error, as mpi4py on this library."""
    rng = np.random.default_rng([7, RANK])
    for name in [*OPS, "MINLOC", "REPLACE"]:
        op = getattr(MPI, name)
        data = values(rng, 3, np.dtype(char))

        def run(comm: Any, data: np.ndarray = data, op: MPI.Op = op) -> Any:
            recv = np.zeros_like(data)
            comm.Allreduce(data, recv, op)
            return recv

        ours, theirs = outcome(lambda: run(COMM)), outcome(lambda: run(PLAIN))
        if isinstance(ours, np.ndarray) and isinstance(theirs, np.ndarray):
            tolerance = {"e": 1e-2, "f": 1e-5, "F": 1e-5}.get(char, 1e-12)
            assert all_true(np.allclose(ours, theirs, tolerance, tolerance, equal_nan=True)), name
        elif char == "e" and isinstance(ours, np.ndarray):
            assert all_true(True)  # an MPI library without float16: ours has it
        else:
            assert all_true(ours == theirs), (name, ours, theirs)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda a: a[::2],
        lambda a: a[::-1],
        lambda a: a.astype(">f8"),
        lambda a: a.astype("S8"),
        lambda a: [a, 1, 2, 3, 4],
        lambda a: [a, -1],
        lambda a: [a, (1, -1)],
        lambda a: 5,
    ],
)
def test_bad_buffers_raise_what_mpi4py_raises(spoil: Any) -> None:
    bad = spoil(np.zeros(8))

    def outcome_of(comm: Any, name: str) -> Any:
        args = (bad,) if name == "Bcast" else (bad, np.zeros(8 * comm.size))
        return outcome(lambda: getattr(comm, name)(*args))

    for name in ("Bcast", "Allreduce", "Allgather"):
        assert outcome_of(COMM, name) == outcome_of(plain_mpi.COMM_SELF, name), name
    COMM.Barrier()


def test_user_ops_and_types() -> None:
    def add(a: Any, b: Any, _datatype: Any) -> None:
        np.frombuffer(b, "d")[:] += np.frombuffer(a, "d")

    op = MPI.Op.Create(add, commute=True)
    x = np.full(1000, RANK + 1.0)
    y = np.zeros(1000)
    COMM.Allreduce(x, y, op)
    assert all_true(bool((y == SIZE * (SIZE + 1) / 2).all()))
    op.Free()
    pairs = np.array([(RANK, RANK), (-RANK, RANK)], np.dtype("i,i"))
    best = np.zeros_like(pairs)
    COMM.Allreduce([pairs, MPI.TWOINT], [best, MPI.TWOINT], MPI.MAXLOC)
    assert all_true(tuple(best[0]) == (SIZE - 1, SIZE - 1) and tuple(best[1]) == (0, 0))


def test_results_are_the_same_bits_everywhere_and_every_time() -> None:
    rng = random.Random(RANK)
    for n in (3, 500, 70_001):
        x = values(np.random.default_rng([3, RANK]), n, np.dtype("f"))
        seen = set()
        for turn in range(6):
            time.sleep(rng.random() * 0.003)
            send = x if turn % 2 else stratampi.array(x)
            recv = np.empty_like(x) if turn % 3 else stratampi.empty_like(x)
            COMM.Allreduce(send, recv)
            seen.update(AGREE.allgather(recv.tobytes()))
        assert len(seen) == 1


def test_many_communicators_live_at_once() -> None:
    comms = [COMM.Split(RANK % 2 if i % 2 else 0, RANK) for i in range(100)]
    for i, comm in enumerate(comms):
        x = np.array([i])
        comm.Allreduce(MPI.IN_PLACE, x)
        assert x[0] == i * comm.size
    for comm in comms:
        comm.Free()
    COMM.Barrier()


def test_communicators_give_everything_back() -> None:
    def used() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), stratampi.stats()["memory"]["live"]

    def turn(n: int) -> None:
        for _ in range(n):
            comm = COMM.Split(0, RANK)
            x = np.array([1])
            comm.Allreduce(MPI.IN_PLACE, x)
            assert x[0] == SIZE
            comm.Free()

    turn(50)
    COMM.Barrier()
    before = used()
    turn(300)
    COMM.Barrier()
    after = used()
    assert after[0] <= before[0] + 2
    assert after[1] <= before[1] + 256 * 1024


def test_two_threads_two_communicators() -> None:
    if plain_mpi.Query_thread() < plain_mpi.THREAD_MULTIPLE:
        pytest.skip("needs THREAD_MULTIPLE")
    comms = [COMM.Dup(), COMM.Dup()]
    for comm in comms:
        comm.Barrier()
    wrong = []

    def work(which: int) -> None:
        for i in range(200):
            x = np.full(1 + i * 20, float(which + 1))
            comms[which].Allreduce(MPI.IN_PLACE, x)
            if not (x == (which + 1) * SIZE).all():
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all_true(not wrong)
    for comm in comms:
        comm.Free()


@pytest.mark.skipif(SIZE < 2, reason="needs two ranks")
def test_a_waiting_rank_sleeps() -> None:
    COMM.Barrier()
    if RANK == 0:
        time.sleep(1.0)
    before = resource.getrusage(resource.RUSAGE_THREAD)
    COMM.Barrier()
    after = resource.getrusage(resource.RUSAGE_THREAD)
    busy = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert all_true(not NATIVE or busy < 0.3)


@pytest.mark.skipif(SIZE < 2, reason="needs two ranks")
def test_mpi_makes_progress_while_a_rank_waits() -> None:
    """Rank 0 waits in our Barrier with a receive outstanding; rank 1 must get its large message out to come there."""
    n = 4_000_000
    if RANK == 0:
        data = np.zeros(n)
        request = COMM.Irecv(data, 1, 7)
        COMM.Barrier()
        request.Wait()
        assert (data == 3).all()
    else:
        if RANK == 1:
            COMM.Send(np.full(n, 3.0), 0, 7)
        COMM.Barrier()


@settings(max_examples=20)
@given(nbytes=st.sampled_from([8, 5000, 100_000]), bits=per_rank)
def test_after_mpi_did_one_the_native_path_goes_on(nbytes: int, bits: int) -> None:
    """Operators left to MPI and native ones in one sequence on one communicator."""
    n = nbytes // 8
    x = stratampi.ones(n) if bit(bits, 0) else np.ones(n)
    y = np.zeros(n)
    COMM.Allreduce(x, y)
    vector = MPI.DOUBLE.Create_vector(1, n, n).Commit()
    COMM.Bcast([y, 1, vector], 0)
    COMM.Allreduce(y, x)
    vector.Free()
    assert all_true(bool((x == SIZE * SIZE).all()))


BIG = 2**31 + 64  # bytes and counts that do not fit into 32 bits with a sign


def need_memory(nbytes: int) -> None:
    """Skips the test on all ranks unless this much is free for all of them together."""
    with open("/proc/meminfo", encoding="ascii") as lines:
        available = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable")) * 1024
    if not all_true(available >= nbytes):
        pytest.skip(f"needs {nbytes / 1e9:.1f} GB of memory, {available / 1e9:.1f} GB are available")


def is_full_of(array: np.ndarray, value: int) -> bool:
    """Whether all elements have this value; without a temporary of the array's size."""
    return bool(array.min() == value == array.max())


@pytest.mark.slow
@pytest.mark.skipif(not NATIVE or SIZE != 2, reason="needs the fabric and exactly two ranks")
@pytest.mark.parametrize("registered", [True, False], ids=["registered", "plain"])
def test_bcast_of_more_than_2_gib(registered: bool) -> None:
    if registered and stratampi.stats()["driver"] == "window":
        pytest.skip("segments of the driver window are smaller")
    need_memory(6 * 10**9)
    data = (stratampi.empty if registered else np.empty)(BIG, np.uint8)
    if RANK == 1:
        data[:] = 7
        data[-1] = 9
    path = taken("bcast", lambda: COMM.Bcast(data, 1))
    ok = path == ("direct" if registered else "staged")
    assert all_true(ok and is_full_of(data[:-1], 7) and data[-1] == 9)


@pytest.mark.slow
@pytest.mark.skipif(
    stratampi.stats()["driver"] != "memfd" or SIZE != 2, reason="needs memory files and exactly two ranks"
)
def test_counts_and_displacements_above_32_bits() -> None:
    """A reduction of so many elements, then a vector operator with a displacement so far out, both in place on one array."""
    need_memory(6 * 10**9)
    data = stratampi.full(BIG, RANK + 1, np.uint8)
    assert taken("allreduce", lambda: COMM.Allreduce(MPI.IN_PLACE, data)) == "direct"
    ok = is_full_of(data, 3)
    counts, displs = [BIG - 16, 8], [0, BIG - 8]
    data[displs[RANK] : displs[RANK] + counts[RANK]] = 10 + RANK
    assert taken("allgatherv", lambda: COMM.Allgatherv(MPI.IN_PLACE, [data, counts, displs, MPI.UINT8_T])) == "direct"
    ok &= (
        is_full_of(data[: BIG - 16], 10) and is_full_of(data[BIG - 16 : BIG - 8], 3) and is_full_of(data[BIG - 8 :], 11)
    )
    assert all_true(ok)


def test_roots_that_are_numpy_integers() -> None:
    """np.argmax and the like; also as the first call on a communicator, which takes the long way."""
    comm = COMM.Dup()
    for root in (np.int64(SIZE - 1), np.uint8(0), np.argmax([1, 0])):
        x = np.full(3, float(RANK))
        comm.Bcast(x, root=root)
        assert (x == int(root)).all()
        total = np.zeros(3)
        comm.Reduce((x, MPI.DOUBLE), [total, 3, MPI.DOUBLE] if int(root) == RANK else None, root=root)
        all_ranks, mine = np.repeat(np.arange(SIZE), 3).astype(float), np.zeros(3)
        comm.Scatterv((all_ranks, MPI.DOUBLE) if int(root) == RANK else None, (mine, MPI.DOUBLE), root=root)
        comm.Gather((mine, MPI.DOUBLE), (all_ranks, MPI.DOUBLE) if int(root) == RANK else None, root=root)
        assert (mine == RANK).all()
        comm.Ibcast(x, root=root).Wait()
    comm.Free()


@pytest.mark.parametrize(
    "bad", [[1.0], [np.float32(1.7)], [None], [True], ["1"], np.ones(1), np.array([True]), np.ones(1, "u1")]
)
def test_counts_that_are_no_integers_are_taken_or_refused_as_by_mpi4py(bad: Any) -> None:
    wrong = np.repeat(bad, SIZE) if isinstance(bad, np.ndarray) else bad * SIZE

    def outcome(comm: Any, call: Any) -> Any:
        try:
            call(comm)
        except (TypeError, ValueError) as error:
            return type(error), str(error)
        return None

    for call in (
        lambda comm: comm.Allgatherv(np.ones(1), [np.zeros(SIZE), wrong]),
        lambda comm: comm.Alltoallv([np.ones(SIZE), wrong], [np.zeros(SIZE), [1] * SIZE]),
        lambda comm: comm.Alltoallv([np.ones(SIZE), [1] * SIZE], [np.zeros(4 * SIZE), ([1] * SIZE, wrong)]),
    ):
        assert outcome(COMM, call) == outcome(PLAIN, call)


def test_a_list_may_change_during_the_call() -> None:
    """Another thread replaces the array in a specification while the operator runs: what is written to is kept alive."""
    spec = [np.ones(2000), MPI.DOUBLE]
    stop = threading.Event()

    def replace() -> None:
        while not stop.is_set():
            spec[0] = np.ones(2000)
            time.sleep(0)

    thread = threading.Thread(target=replace)
    thread.start()
    for _ in range(300):
        COMM.Allreduce([np.ones(2000), MPI.DOUBLE], spec)
    stop.set()
    thread.join()
    COMM.Barrier()


def test_many_dtype_objects_of_one_kind() -> None:
    """What the runtime has learnt by address is bounded; the long way does the rest."""
    if not EXTRA:
        pytest.skip("no ml_dtypes")
    x = np.ones(4, EXTRA[0])
    for i in range(300):
        COMM.Bcast(x.view(np.dtype(EXTRA[0], metadata={"i": i})))
    with pytest.raises(BufferError):
        COMM.Bcast(x.view(EXTRA[0].newbyteorder(">")))


def test_in_place_in_a_list() -> None:
    x = np.ones(4)
    COMM.Allreduce([MPI.IN_PLACE, MPI.DOUBLE], x)
    assert (x == SIZE).all()
