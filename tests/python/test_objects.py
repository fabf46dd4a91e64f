"""The lower-case collectives against mpi4py's own on a duplicate of the communicator: results, errors, and that nothing hangs.

Collective, as test_collectives.py: all ranks draw the same examples and agree on the outcome before they judge it.
"""

import functools
import json
import operator
import pickle
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from mpi4py import MPI as plain_mpi

import stratampi
import stratampi.objects
from stratampi import MPI

pytestmark = pytest.mark.mpi

COMM = MPI.COMM_WORLD
RANK, SIZE = COMM.rank, COMM.size
PLAIN = plain_mpi.Intracomm(COMM).Dup()  # mpi4py's own methods
NATIVE = stratampi.stats()["driver"] != "none" and SIZE > 1
BIG = MPI.pickle.THRESHOLD  # bytes from which arrays go out of band

native = pytest.mark.skipif(not NATIVE, reason="mpi4py's own methods here")


def all_true(ok: bool) -> bool:
    answer = np.array([bool(ok)])
    PLAIN.Allreduce(plain_mpi.IN_PLACE, answer, plain_mpi.LAND)  # of no object: MPI.pickle may be anybody's
    return bool(answer[0])


def same(a: Any, b: Any) -> bool:
    """Equal in type, value and everything a program can tell of an array but where it lies."""
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray):
        fields = ("dtype", "shape", "strides")
        flags = a.flags.writeable == b.flags.writeable and a.flags.forc == b.flags.forc
        if not flags or any(getattr(a, field) != getattr(b, field) for field in fields):
            return False
        return all(map(same, a.flat, b.flat)) if a.dtype.hasobject else a.tobytes() == b.tobytes()
    if isinstance(a, dict):
        return same(list(a.items()), list(b.items()))
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, Holder):
        return same(vars(a), vars(b))
    return bool(a == b) or a != a


class Holder:
    """An object with a reducer of its own that hands out a buffer and counts on what comes back."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __reduce_ex__(self, protocol: int) -> Any:
        return Holder, (pickle.PickleBuffer(self.data),)


def array(seed: int, num_bytes: int, kind: str) -> np.ndarray[Any, Any]:
    """One of the forms that NumPy pickles in its different ways."""
    raw = np.random.default_rng(seed).integers(0, 256, max(num_bytes, 48), np.uint8)[: num_bytes // 24 * 24]
    if kind == "plain":
        return raw
    if kind == "fortran":
        return np.asfortranarray(raw.view(np.int64).reshape(3, -1))
    if kind == "readonly":
        raw.flags.writeable = False
        return raw
    if kind == "registered":
        return stratampi.array(raw.view(np.int32))
    if kind == "strided":
        return raw[::-2]
    if kind == "fields":
        return raw.view([("a", "<i4"), ("b", "S4")])
    if kind == "dates":
        return raw.view("M8[s]")
    if kind == "subclass":
        return raw.view(np.recarray)
    return np.array([seed, "x", None, [raw]], dtype=object)


KINDS = ["plain", "fortran", "readonly", "registered", "strided", "fields", "dates", "subclass", "objects"]
arrays = st.builds(
    array,
    st.integers(0, 99),
    st.sampled_from([0, 24, 1000, 8184, 20_016, 70_008, BIG - 24, BIG + 24, 3 * BIG]),
    st.sampled_from(KINDS),
)
leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=20),
    st.binary(max_size=20),
    st.sampled_from([900, 1000, 1001, 5000, 70_000, 300_000]).map(bytes),
    st.sampled_from([30, 2000, 300_000]).map(bytearray),
    arrays,
    arrays,
    st.builds(Holder, st.sampled_from([b"short", bytearray(b"short"), bytes(300_000), bytearray(300_000)])),
)
objects = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.tuples(inner, inner),
        st.dictionaries(st.text(max_size=3), inner, max_size=3),
    ),
    max_leaves=6,
)
everybodys = st.lists(objects, min_size=SIZE, max_size=SIZE)
roots = st.integers(0, SIZE - 1)


def calls_agree(name: str, *args: Any, **kwargs: Any) -> None:
    """Both libraries give the same; ours a copy that does not share memory with what was passed."""
    ours, theirs = getattr(COMM, name)(*args, **kwargs), getattr(PLAIN, name)(*args, **kwargs)
    assert all_true(same(ours, theirs)), (name, ours, theirs)


@settings(max_examples=settings.default.max_examples // 2, phases=[Phase.explicit, Phase.generate])
@given(everybodys, roots)
def test_objects_arrive_as_with_mpi4py(values: list[Any], root: int) -> None:
    """Nested objects of every kind and size, different on every rank."""
    mine = values[RANK]
    row = values[RANK:] + values[:RANK]
    calls_agree("bcast", mine, root)
    calls_agree("gather", mine, root)
    calls_agree("scatter", row if root == RANK else None, root)
    calls_agree("allgather", mine)
    calls_agree("alltoall", row)


def pair(a: Any, b: Any) -> Any:
    return (a, b)


def grow(a: list[Any], b: list[Any]) -> list[Any]:
    """In place, as operator.iadd."""
    a.extend(b)
    return a


@settings(max_examples=settings.default.max_examples // 2, phases=[Phase.explicit, Phase.generate])
@given(everybodys, roots, st.sampled_from(["pair", "grow", "left", "MPI"]))
def test_reductions_bracket_as_with_mpi4py(values: list[Any], root: int, which: str) -> None:
    """An op that keeps its operands shows their order and brackets; one that changes its left operand must only have copies."""
    mine, op = {
        "pair": (values[RANK], pair),
        "grow": ([values[RANK]], grow),
        "left": (values[RANK], MPI.NO_OP),
        "MPI": ([values[RANK]], MPI.SUM),
    }[which]
    before = pickle.dumps(mine, 5)
    calls_agree("reduce", mine, op, root)
    calls_agree("allreduce", mine, op)
    calls_agree("scan", mine, op)
    calls_agree("exscan", mine, op)
    assert all_true(pickle.dumps(mine, 5) == before)


@pytest.mark.parametrize("name", ["reduce", "allreduce", "scan", "exscan"])
@pytest.mark.parametrize("length", [1, 100, 50_000])
def test_sums_have_the_same_bits(name: str, length: int) -> None:
    x = np.random.default_rng(RANK).standard_normal(length) * 10.0**RANK
    calls_agree(name, x)
    calls_agree(name, x, MPI.PROD)
    calls_agree(name, (float(x[0]), RANK), MPI.MAXLOC)
    calls_agree(name, x, op=functools.partial(np.subtract, dtype=float))


@pytest.mark.parametrize("registered", [False, True])
def test_results_are_copies_built_on_registered_memory(registered: bool) -> None:
    x = np.full(BIG, RANK, np.float64)
    if registered:
        x = stratampi.array(x)
    results = [
        COMM.bcast(x, SIZE - 1),
        *COMM.allgather(x),
        *COMM.alltoall([x] * SIZE),
        COMM.scatter([x] * SIZE if RANK == 0 else None),
        *(COMM.gather(x) or []),
    ]
    for result in results:
        assert not np.shares_memory(result, x)
        assert not NATIVE or stratampi.is_registered(result)
        result[:] = -1
    assert np.all(x == RANK)


@native
def test_arrays_do_not_hold_each_others_memory() -> None:
    held = stratampi.stats()["memory"]["live"]
    one = COMM.allgather([np.zeros(1 << 20, np.uint8)] * 1 + [np.zeros(1 << 20, np.uint8) for _ in range(3)])[0][0]
    assert stratampi.stats()["memory"]["live"] - held < 2 << 20
    assert one.nbytes == 1 << 20
    del one
    COMM.barrier()


@native
def test_an_array_takes_the_direct_path() -> None:
    """Also from a plain array: the root's own copy, which it needs anyway, is registered."""
    before = stratampi.stats()["bytes"]["direct"]
    COMM.bcast(np.zeros(1 << 20))
    moved = stratampi.stats()["bytes"]["direct"] - before
    assert moved == (8 << 20 if RANK == 0 else 0)


def test_many_buffers_and_shared_ones() -> None:
    """More sizes than fit in a cell; one array twice is one array on the other side, too."""
    x = np.arange(BIG // 8, dtype=np.int64)
    many = [x + i for i in range(150)]
    calls_agree("bcast", many)
    first, second = COMM.bcast([x, x])
    assert first is second


def test_all_sizes_around_a_cell() -> None:
    for length in (*range(900, 1100, 7), *range(970, 1010), *range(4040, 4100, 3)):
        assert COMM.bcast(bytes(length)) == bytes(length)
        assert COMM.allgather(bytes(length + RANK)) == [bytes(length + rank) for rank in range(SIZE)]


def test_roots_out_of_range() -> None:
    for root in (SIZE, -1, -(1 << 31)):
        for name in ("bcast", "gather", "scatter", "reduce"):
            args = ([1] * SIZE,) if name == "scatter" else (1,)
            with pytest.raises(MPI.Exception) as caught:
                getattr(COMM, name)(*args, root=root)
            assert caught.value.Get_error_class() == MPI.ERR_ROOT
    for root, error in ((None, TypeError), ("0", TypeError), (1j, TypeError), (1 << 31, OverflowError)):
        for name in ("bcast", "gather", "scatter", "reduce"):
            with pytest.raises(error):
                getattr(COMM, name)([1] * SIZE, root=root)
            with pytest.raises(error):
                getattr(PLAIN, name)([1] * SIZE, root=root)
    for root in (np.int64(SIZE - 1), float(SIZE - 1), Decimal(SIZE - 1)):
        calls_agree("bcast", RANK, root)
        calls_agree("gather", RANK, root)


class Unpicklable:
    def __reduce__(self) -> Any:
        raise LookupError("not this one")


def boom(_a: Any, _b: Any) -> Any:
    raise ZeroDivisionError("op")


def expect_failure(bad: int, error: type[Exception], name: str, *args: Any, **kwargs: Any) -> None:
    """The rank that is at fault raises its own error, the others one that names it; then all goes on."""
    with pytest.raises(error if bad == RANK else stratampi.Error) as caught:
        getattr(COMM, name)(*args, **kwargs)
    if bad != RANK:
        assert f"rank {bad} failed: {error.__name__}" in str(caught.value)
    assert all_true(COMM.allreduce(1) == SIZE)


@native
@pytest.mark.parametrize("bad", range(SIZE))
def test_one_rank_cannot_pickle(bad: int) -> None:
    value = Unpicklable() if bad == RANK else np.zeros(BIG)
    for name in ("allgather", "gather", "allreduce", "reduce", "scan", "exscan"):
        expect_failure(bad, LookupError, name, value)
    expect_failure(bad, LookupError, "bcast", value, bad)
    expect_failure(bad, LookupError, "alltoall", [value] * SIZE)
    expect_failure(bad, LookupError, "scatter", [1] * (SIZE - 1) + [value] if bad == RANK else None, bad)


@native
@pytest.mark.parametrize("bad", range(SIZE))
def test_one_rank_has_a_wrong_number_of_items(bad: int) -> None:
    expect_failure(bad, ValueError, "alltoall", [1] * (SIZE + (bad == RANK)))
    expect_failure(bad, ValueError, "scatter", [1] * (SIZE - 1), bad)
    expect_failure(bad, TypeError, "alltoall", 3 if bad == RANK else [1] * SIZE)
    with pytest.raises(ValueError, match=f"expecting {SIZE} items, got {SIZE + 1}"):
        COMM.alltoall([1] * (SIZE + 1))
    assert COMM.alltoall(None) == [None] * SIZE
    assert COMM.scatter(None) is None


@native
def test_an_op_fails() -> None:
    expect_failure(0, ZeroDivisionError, "allreduce", 1, boom if RANK == 0 else operator.add)
    expect_failure(0, ZeroDivisionError, "reduce", 1, boom if RANK == 0 else operator.add, SIZE - 1)
    last = 1 << (SIZE - 1).bit_length() - 1  # the rank that the root hears last; nobody waits for the root any more
    if RANK == 0:
        with pytest.raises(ZeroDivisionError):
            COMM.reduce(RANK, lambda a, b: boom(a, b) if b >= last else max(a, b))
    else:
        assert COMM.reduce(RANK, max) is None
    with pytest.raises((ZeroDivisionError, stratampi.Error)):
        COMM.scan(1, boom)
    assert all_true(COMM.allreduce(1) == SIZE)


@native
def test_calls_that_do_not_fit_together() -> None:
    for call in (
        lambda: COMM.gather(1, root=RANK),
        lambda: COMM.bcast(1, root=RANK),
        lambda: COMM.scatter([1] * SIZE, root=RANK),
        lambda: COMM.gather(1) if RANK else COMM.alltoall([1] * SIZE),
        lambda: COMM.bcast(1) if RANK else COMM.allgather(1),
        lambda: COMM.Barrier() if RANK else COMM.reduce(1),
    ):
        with pytest.raises(stratampi.Error) as caught:
            call()
        assert caught.value.Get_error_class() == MPI.ERR_TRUNCATE
    assert all_true(COMM.allreduce(1) == SIZE)


class LoadFails:
    """Pickles, but does not come back on rank `bad`."""

    def __init__(self, bad: int) -> None:
        self.bad = bad

    def __reduce__(self) -> Any:
        return load_fails, (self.bad,)


def load_fails(bad: int) -> Any:
    if bad == RANK:
        raise LookupError("on arrival")
    return None


@native
def test_one_rank_cannot_unpickle() -> None:
    if RANK == SIZE - 1:
        with pytest.raises(LookupError):
            COMM.bcast(LoadFails(SIZE - 1))
    else:
        assert COMM.bcast(LoadFails(SIZE - 1)) is None
    expect_failure(0, LookupError, "allreduce", LoadFails(0), pair)


@native
def test_one_rank_has_no_memory_to_receive_into(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(num_bytes: int) -> memoryview:
        raise MemoryError(f"{num_bytes} bytes")

    with monkeypatch.context() as patch:
        if RANK == SIZE - 1:
            patch.setattr(stratampi.objects, "_room", no_room)
        for value in (np.zeros(BIG), bytes(BIG)):
            for name in ("bcast", "allgather"):
                with pytest.raises(
                    MemoryError, match="bytes" if RANK == SIZE - 1 else f"rank {SIZE - 1} has no memory"
                ):
                    getattr(COMM, name)(value)
            with pytest.raises(MemoryError):
                COMM.alltoall([value] * SIZE)
    calls_agree("bcast", np.zeros(BIG))


def text_dumps(obj: Any, protocol: int | None = None) -> bytes:
    return json.dumps(obj).encode()


def text_loads(data: Any) -> Any:
    return json.loads(bytes(data))


def test_pickle_replaced_by_the_user() -> None:
    """MPI.pickle's functions and protocol are asked at every call; json turns a tuple into a list."""
    try:
        MPI.pickle.__init__(text_dumps, text_loads)  # type: ignore[misc]
        assert COMM.bcast((1, 2)) == [1, 2]
        assert COMM.allgather((RANK,)) == [[rank] for rank in range(SIZE)]
        assert COMM.allreduce((RANK,)) == list(range(SIZE))
        calls_agree("bcast", ["x" * 5000])
        MPI.pickle.__init__(lambda _obj: b"", text_loads)  # type: ignore[misc]
        assert COMM.bcast(1) is None
        MPI.pickle.__init__(json.dumps, json.loads)  # type: ignore[misc]
        with pytest.raises((TypeError, MPI.Exception)):
            COMM.allgather(1)
        MPI.pickle.__init__(pickle.dumps, lambda data: ("mine", pickle.loads(data)))  # type: ignore[misc]
        calls_agree("bcast", np.zeros(BIG))
        MPI.pickle.__init__()  # type: ignore[misc]
        for protocol in (0, 2, 4, -1, None):
            MPI.pickle.PROTOCOL = protocol
            calls_agree("bcast", [np.zeros(BIG), np.asfortranarray(np.ones((3, 5)))])
    finally:
        MPI.pickle.__init__()  # type: ignore[misc]


@native
def test_ranks_may_differ_in_how_they_load() -> None:
    """The root sends out of band; a rank with its own loads gets the whole pickle."""
    if RANK == SIZE - 1:
        MPI.pickle.__init__(loads=lambda data: ("mine", pickle.loads(data)))  # type: ignore[misc]
    try:
        got = COMM.bcast(np.arange(BIG))
    finally:
        MPI.pickle.__init__()  # type: ignore[misc]
    if RANK == SIZE - 1:
        mark, got = got
        assert mark == "mine"
    assert np.array_equal(got, np.arange(BIG))


def test_threshold_of_mpi4py() -> None:
    MPI.pickle.THRESHOLD = 0
    try:
        calls_agree("allgather", [np.zeros(0), np.zeros((0, 3)), np.arange(5), b"x"])
        calls_agree("alltoall", [np.arange(5) + RANK] * SIZE)
        calls_agree("reduce", np.arange(5))
    finally:
        MPI.pickle.THRESHOLD = None


def test_other_communicators() -> None:
    half = COMM.Split(RANK % 2, -RANK)
    assert half.allgather(RANK) == sorted(range(RANK % 2, SIZE, 2), reverse=True)
    assert np.array_equal(half.bcast(np.full(BIG, RANK)), half.bcast(RANK) * np.ones(BIG))
    half.Free()
    grid = COMM.Create_cart([SIZE])
    assert grid.allreduce(RANK, MPI.MAX) == SIZE - 1
    grid.Free()
    assert MPI.COMM_SELF.allgather(RANK) == [RANK]


class Asks:
    """Calls a collective while it is pickled and while it is unpickled."""

    def __reduce__(self) -> Any:
        return COMM.allgather, (COMM.allgather(RANK),)


def test_pickling_may_communicate() -> None:
    assert COMM.allgather(Asks())[0] == [list(range(SIZE))] * SIZE
