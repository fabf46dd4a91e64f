"""Buffer specifications against plain mpi4py: the same specification is parsed here and handed to mpi4py, and either both refuse
it with the same type and text, or the bytes that mpi4py moves are the bytes that the Message describes.

mpi4py runs on one rank: simple forms by Sendrecv with itself; block and vector forms for any number of ranks by
Neighbor_alltoall(v) over a graph whose only rank is its own neighbour `size` times, because those parse like Alltoall(v).
"""

import array
import contextlib
import ctypes
import functools
import gc
import itertools
import mmap
import weakref
from collections import UserList

import ml_dtypes
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from mpi4py import MPI

from stratampi import buffers
from stratampi._native import ffi, lib
from stratampi.buffers import Unsupported
from stratampi.errors import Error

SELF = MPI.COMM_SELF
REFUSALS = (TypeError, ValueError, KeyError, BufferError, OverflowError)
ROOM = 4096
MAP_NORESERVE = 0x4000  # Linux; mmap names it from Python 3.12 on


def doubles(n=6):
    return np.arange(1.0, n + 1)


def frozen(a):
    a.flags.writeable = False
    return a


class Tensor:
    """DLPack and nothing else, in the manner of a CPU or GPU tensor library."""

    def __init__(self, a, device=1, code=None):
        self.array, self.device, self.code = a, device, code

    def __dlpack_device__(self):
        return (self.device, 0)

    def __dlpack__(self, stream=None, **options):
        capsule = self.array.__dlpack__(**options)
        if self.code is not None:
            name = b"dltensor_versioned" if options else b"dltensor"
            get = ctypes.pythonapi.PyCapsule_GetPointer
            get.restype, get.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
            ctypes.c_uint8.from_address(get(capsule, name) + (52 if options else 20)).value = self.code
        return capsule


class OldTensor(Tensor):
    """DLPack before 1.0."""

    def __dlpack__(self, stream=None):
        return super().__dlpack__()


class DeviceArray:
    """The CUDA array interface."""

    def __init__(self, a):
        self.array = a
        self.__cuda_array_interface__ = {
            "version": 3,
            "data": (a.ctypes.data, False),
            "typestr": a.dtype.str,
            "shape": a.shape,
        }


def parsed(parse):
    """("message", Message) | ("mpi", why) | ("refused", type, text)"""
    try:
        return ("message", parse())
    except Unsupported as verdict:
        return ("mpi", verdict.why)
    except REFUSALS as refusal:
        return ("refused", type(refusal), str(refusal))


def content(message):
    """The bytes a Message describes, in the order in which they travel."""
    if message.counts is None:
        return bytes(ffi.buffer(message.data, message.nbytes))
    return b"".join(bytes(ffi.buffer(message.data + d, n)) for n, d in zip(message.counts, message.displs, strict=True))


def pattern(n):
    return bytes(1 + i % 251 for i in range(n))


def same_count_and_type(spec, message, writable):
    """A local reduction compares count and datatype of its two sides: mpi4py must read ours out of the specification."""
    if message.kind.datatype is None:
        return
    other = [bytearray(message.nbytes + 1), message.count, message.kind.datatype]
    try:
        MPI.SUM.Reduce_local(other, spec) if writable else MPI.SUM.Reduce_local(spec, other)
    except MPI.Exception as error:
        if error.Get_error_class() not in (MPI.ERR_OP, MPI.ERR_TYPE):
            raise


def check_simple(spec, writable):
    ours = parsed(lambda: buffers.simple(spec, writable))
    status = MPI.Status()
    room = bytearray(ROOM)
    if ours[0] == "refused":
        with pytest.raises(ours[1]) as caught:
            if writable:
                SELF.Sendrecv([b"", 0, MPI.BYTE], 0, recvbuf=spec, source=0)
            else:
                SELF.Sendrecv(spec, 0, recvbuf=room, source=0)
        assert (caught.type, str(caught.value)) == ours[1:]
    elif ours[0] == "message":
        message = ours[1]
        assert message.nbytes == message.count * message.itemsize
        assert message.address != 0
        if writable:
            payload = pattern(message.nbytes)
            SELF.Sendrecv([payload, MPI.BYTE], 0, recvbuf=spec, source=0, status=status)
            assert content(message) == payload
        else:
            SELF.Sendrecv(spec, 0, recvbuf=room, source=0, status=status)
            assert bytes(room[: status.Get_count(MPI.BYTE)]) == content(message)
        same_count_and_type(spec, message, writable)
    return ours


# Each makes a fresh specification. The word is the outcome for (send, receive): m message, r refused, u for MPI.
SIMPLE = {
    "array": ("mm", doubles),
    "2-d": ("mm", lambda: np.ones((2, 3), "i")),
    "0-d": ("mm", lambda: np.array(3.0)),
    "empty": ("mm", lambda: np.empty(0)),
    "fortran order": ("mm", lambda: np.arange(6.0).reshape(2, 3).T),
    "fortran order, typed": ("mm", lambda: [np.arange(6.0).reshape(2, 3).T, MPI.DOUBLE]),
    "row": ("mm", lambda: np.arange(6.0).reshape(2, 3)[1]),
    "column": ("rr", lambda: np.arange(6.0).reshape(2, 3)[:, 1]),
    "column, typed": ("rr", lambda: [np.arange(6.0).reshape(2, 3)[:, 1], 2, MPI.DOUBLE]),
    "real part": ("rr", lambda: np.ones(4, "D").real),
    "every other": ("rr", lambda: doubles()[::2]),
    "reversed": ("rr", lambda: doubles()[::-1]),
    "read-only": ("mr", lambda: frozen(doubles())),
    "read-only, typed": ("mr", lambda: [frozen(doubles()), 2, "d"]),
    "array of a subclass": ("mm", lambda: doubles().view(np.recarray)),
    "NumPy scalar": ("mr", lambda: np.float32(2.5)),
    "foreign order": ("rr", lambda: doubles().astype(">f8")),
    "foreign order, typed": ("mm", lambda: [doubles().astype(">f8"), MPI.DOUBLE]),
    "struct dtype": ("rr", lambda: np.zeros(2, [("a", "i4"), ("b", "f8")])),
    "struct dtype, typed": ("mm", lambda: [np.zeros(2, [("a", "i4"), ("b", "f8")]), MPI.BYTE]),
    "objects": ("rr", lambda: np.zeros(2, object)),
    "S4": ("rr", lambda: np.zeros(2, "S4")),
    "S1": ("mm", lambda: np.zeros(2, "S1")),
    "U1": ("mm", lambda: np.zeros(2, "U1")),
    "datetime": ("rr", lambda: np.zeros(2, "M8[s]")),
    "datetime, typed": ("mm", lambda: [np.zeros(2, "M8[s]"), MPI.INT64_T]),
    "bytes": ("mr", lambda: b"abc"),
    "bytes, typed": ("mr", lambda: [b"abc", MPI.CHAR]),
    "bytearray": ("mm", lambda: bytearray(b"abcd")),
    "memoryview": ("mm", lambda: memoryview(bytearray(b"abcdef"))[2:5]),
    "strided memoryview": ("rr", lambda: memoryview(bytearray(b"abcdef"))[::2]),
    "released memoryview": ("rr", lambda: (m := memoryview(b"abc"), m.release())[0]),
    "array.array": ("mm", lambda: array.array("h", [1, 2, 3])),
    "ctypes": ("mm", lambda: (ctypes.c_double * 3)(1, 2, 3)),
    "ctypes, foreign order": ("rr", lambda: (ctypes.c_int.__ctype_be__ * 3)()),
    "mmap": ("mm", lambda: mmap.mmap(-1, 256)),
    "MPI memory": ("mm", lambda: MPI.buffer.allocate(24)),
    "tensor": ("mm", lambda: Tensor(doubles())),
    "tensor, old": ("mm", lambda: OldTensor(doubles())),
    "tensor, int8": ("mm", lambda: Tensor(np.ones(3, "b"))),
    "tensor, uint8": ("mm", lambda: Tensor(np.ones(3, "B"))),
    "tensor, complex": ("mm", lambda: Tensor(np.ones(3, "F"))),
    "tensor, empty": ("mm", lambda: Tensor(np.empty((0, 3)))),
    "tensor, count": ("mm", lambda: [Tensor(doubles()), (2, 1)]),
    "tensor, typed": ("mm", lambda: [Tensor(doubles()), MPI.LONG]),
    "tensor, opaque": ("mm", lambda: Tensor(doubles(), code=3)),
    "tensor, strided": ("rr", lambda: Tensor(doubles()[::2])),
    "tensor, read-only": ("mr", lambda: Tensor(frozen(doubles()))),
    "tensor, no device": ("rr", lambda: Tensor(doubles(), device=None)),
    "tensor, pinned": ("mm", lambda: Tensor(doubles(), device=3)),
    "None": ("rr", lambda: None),
    "number": ("rr", lambda: 3),
    "object": ("rr", lambda: object()),
    "text": ("rr", lambda: "abc"),
    "class": ("rr", lambda: object),
    "list of numbers": ("rr", lambda: [[1, 2, 3, 4], 4, "i"]),
    "dictionary": ("rr", lambda: [{1: 2}, 1, "i"]),
    "UserList": ("rr", lambda: UserList([doubles(), 2])),
    "BOTTOM": ("rr", lambda: MPI.BOTTOM),
    "no items": ("rr", list),
    "1 item": ("rr", lambda: [doubles()]),
    "5 items": ("rr", lambda: (doubles(), 1, 0, "d", None)),
    "count": ("mm", lambda: [doubles(), 2]),
    "count 0": ("mm", lambda: (doubles(), 0)),
    "count None": ("mm", lambda: [doubles(), None]),
    "count True": ("mm", lambda: [doubles(), True]),
    "count np.int8": ("mm", lambda: [doubles(), np.int8(3)]),
    "count 0-d": ("mm", lambda: [doubles(), np.array(3)]),
    "count 1-d": ("rr", lambda: [doubles(), np.array([3, 4])]),
    "count -1": ("rr", lambda: [doubles(), -1]),
    "count 1.5": ("rr", lambda: [doubles(), 1.5]),
    "count 2**63": ("rr", lambda: [doubles(), 2**63]),
    "count -2**70": ("rr", lambda: [doubles(), -(2**70)]),
    "key": ("mm", lambda: [doubles(), "f8"]),
    "key, other size": ("mm", lambda: [doubles(), "i"]),
    "key, complex": ("mm", lambda: [doubles(), "Zd"]),
    "key unknown": ("rr", lambda: [doubles(), "x"]),
    "key empty": ("rr", lambda: [doubles(), 1, ""]),
    "key a number": ("rr", lambda: [doubles(), 1, 7]),
    "key a list": ("rr", lambda: [doubles(), 1, [MPI.DOUBLE]]),
    "type": ("mm", lambda: [doubles(), MPI.DOUBLE]),
    "type, uneven": ("rr", lambda: [np.ones(3, "b"), MPI.INT]),
    "type null": ("rr", lambda: [doubles(), MPI.DATATYPE_NULL]),
    "type null, displ": ("rr", lambda: [doubles(), (0, 1), MPI.DATATYPE_NULL]),
    "type pair": ("mm", lambda: [np.zeros(3, "i8"), MPI.TWOINT]),
    "type Fortran": ("mm", lambda: [doubles(), MPI.DOUBLE_PRECISION]),
    "type, Fortran text": ("mm", lambda: [bytearray(4), MPI.CHARACTER]),
    "count, type": ("mm", lambda: [doubles(), 2, MPI.DOUBLE]),
    "count, None": ("mm", lambda: [doubles(), 2, None]),
    "None, type": ("mm", lambda: [doubles(), None, MPI.INT]),
    "pair": ("mm", lambda: [doubles(), (2, 3)]),
    "list pair": ("mm", lambda: [doubles(), [2, 3], "d"]),
    "pair, no count": ("mm", lambda: [doubles(), (None, 2)]),
    "pair, no displ": ("mm", lambda: (doubles(), (2, None), "d")),
    "pair of 0": ("rr", lambda: [doubles(), ()]),
    "pair of 1": ("rr", lambda: [doubles(), (1,)]),
    "pair of 3": ("rr", lambda: [doubles(), [1, 2, 3], "d"]),
    "4 items": ("mm", lambda: [doubles(), 2, 3, MPI.DOUBLE]),
    "4 items, all None": ("mm", lambda: [doubles(), None, None, None]),
    "4 items, pair": ("rr", lambda: [doubles(), (2, 1), 0, "d"]),
    "displ to the end": ("mm", lambda: [doubles(), (0, 6)]),
    "displ past the end": ("rr", lambda: [doubles(), (0, 7)]),
    "displ negative": ("rr", lambda: [doubles(), (1, -1)]),
    "displ 0.5": ("rr", lambda: [doubles(), (1, 0.5)]),
    "displ 2**64": ("rr", lambda: [doubles(), (1, 2**64)]),
    "displ before count": ("rr", lambda: [doubles(), (-1, -1)]),
    "displ, odd rest": ("rr", lambda: [bytearray(11), (None, 1), "i"]),
    "memory before type": ("rr", lambda: [doubles()[::2], 1, "nonsense"]),
    "nothing": ("mm", lambda: [None, 0, "B"]),
    "nothing, type": ("mm", lambda: [None, MPI.DOUBLE]),
    "nothing, counted": ("rr", lambda: [None, 1, "d"]),
    "nothing, displaced": ("rr", lambda: [None, (0, 1), "d"]),
    "nothing, untyped": ("rr", lambda: [None, 0]),
    "BOTTOM, type": ("mm", lambda: [MPI.BOTTOM, "B"]),
    "BOTTOM, untyped": ("rr", lambda: [MPI.BOTTOM, 0]),
    "another view's count": ("mm", lambda: [np.arange(6.0).reshape(2, 3)[0], 6]),
}
SIMPLE.update({f"dtype {c}": ("mm", functools.partial(np.ones, 5, c)) for c in "?bhilBHILfdgFDG"})
SIMPLE.update({f"dtype {c}, counted": ("mm", lambda c=c: [np.ones(5, c), 3]) for c in "?bhilqBHILQfdgFDG"})


@pytest.mark.parametrize("writable", [False, True], ids=["send", "receive"])
@pytest.mark.parametrize("name", SIMPLE)
def test_simple(name, writable):
    outcomes, make = SIMPLE[name]
    expected = {"m": "message", "r": "refused", "u": "mpi"}[outcomes[writable]]
    assert check_simple(make(), writable)[0] == expected


def test_stop_is_seen_before_mpi_is_called():
    buffers._judge(doubles(), writable=True)
    buffers._judge([doubles(), 2], writable=False)
    assert not SELF.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG)


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        ([MPI.BOTTOM, 3, "d"], lib.SMPI_WHY_LAYOUT),
        ([MPI.IN_PLACE, 3, "d"], lib.SMPI_WHY_LAYOUT),
        (MPI.IN_PLACE, lib.SMPI_WHY_LAYOUT),
        ([doubles(), 1, MPI.DATATYPE_NULL], lib.SMPI_WHY_DATATYPE),
        (Tensor(doubles(), device=2), lib.SMPI_WHY_DEVICE),
        ([Tensor(doubles(), device=2), 3, MPI.DOUBLE], lib.SMPI_WHY_DEVICE),
        (DeviceArray(doubles()), lib.SMPI_WHY_DEVICE),
    ],
)
def test_legal_but_not_native(spec, why):
    for writable in (False, True):
        assert parsed(lambda w=writable: buffers.simple(spec, w)) == ("mpi", why)


@pytest.mark.parametrize("memory", [Tensor(doubles(), device=2), DeviceArray(doubles())], ids=["dlpack", "cai"])
@pytest.mark.parametrize("rest", [(-1,), (1, 7), ((0, 99), "d"), ((1,),)])
def test_device_memory_is_refused_before_mpi(memory, rest):
    assert check_simple([memory, *rest], writable=False)[0] == "refused"


def test_derived_datatypes():
    vector = MPI.DOUBLE.Create_vector(2, 1, 2).Commit()
    backwards = MPI.INT.Create_resized(0, -4).Commit()
    try:
        assert parsed(lambda: buffers.simple([doubles(), 1, vector], True)) == ("mpi", lib.SMPI_WHY_DATATYPE)
        assert parsed(lambda: buffers.vector([doubles(), 1, vector], 2, True)) == ("mpi", lib.SMPI_WHY_DATATYPE)
        assert check_simple([np.ones(7), vector], True)[0] == "refused"  # not a multiple of its extent
        assert check_simple([doubles(), backwards], False)[0] == "refused"
        assert check_simple([doubles(), (0, 1), backwards], False)[0] == "refused"
    finally:
        vector.Free()
        backwards.Free()


def test_count_past_the_memory_raises():
    for spec, has in [([doubles(), 7], 48), ([doubles(), (3, 4)], 16), ([bytearray(10), 3, "i"], 10)]:
        for writable in (False, True):
            with pytest.raises(Error, match=f"buffer has {has} bytes") as caught:
                buffers.simple(spec, writable)
            assert caught.value.Get_error_class() == MPI.ERR_COUNT
            assert f"count {spec[1] if isinstance(spec[1], int) else spec[1][0]} " in str(caught.value)
    with pytest.raises(Error, match="count 4 in each of 2 blocks needs 64 bytes"):
        buffers.block([doubles(), 4], 2, True)


def test_count_past_a_view_but_inside_its_array():
    table = np.arange(12.0).reshape(3, 4)
    assert buffers.simple([table[1], 8], False).nbytes == 64
    with pytest.raises(Error):
        buffers.simple([table[1], 9], False)
    message = buffers.vector([table[1], [2, 2], [-4, 4], "d"], 2, False)
    assert content(message) == table[0, :2].tobytes() + table[2, :2].tobytes()
    with pytest.raises(Error):
        buffers.vector([table[1], [2, 2], [-5, 4], "d"], 2, False)


def test_long_buffers():
    size = 2**32 + 64
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
    except OSError:
        pytest.skip("no address space for 4 GiB")
    a = np.frombuffer(memory, "B")
    assert buffers.simple(a, True).nbytes == size
    assert buffers.simple([a, "d"], True).count == size // 8
    message = buffers.vector([a, (2**30, [0, 2**30]), "h"], 2, True)
    assert list(message.counts) == [2**31] * 2
    assert list(message.displs) == [0, 2**31]
    displaced = buffers.simple([a, (8, 2**32)], True)
    assert displaced.address == buffers.simple(a, True).address + 2**32


# ---------------------------------------------------------------------------------------------------------------------
# Block and vector forms


@functools.cache
def neighbours(size):
    return SELF.Create_dist_graph_adjacent([0] * size, [0] * size)


@pytest.fixture(scope="module", autouse=True)
def free_neighbours():
    yield
    for size in range(1, 6):
        neighbours(size).Free()
    neighbours.cache_clear()


def mpi4py_moves(spec, size, is_vector, writable, blocks):
    """Hands `spec` to mpi4py; blocks: what the other side gives or has room for, in bytes a neighbour. Returns what arrived."""
    comm = neighbours(size)
    call = comm.Neighbor_alltoallv if is_vector else comm.Neighbor_alltoall
    counts = list(blocks) if is_vector else (blocks[0] if blocks else 0)
    other = bytearray(pattern(sum(blocks))) if writable else bytearray(sum(blocks))
    full = [other, counts, MPI.BYTE]
    if writable:
        call(full, spec)
    else:
        call(spec, full)
    return bytes(other)


def check_many(spec, size, is_vector, writable):
    parse = buffers.vector if is_vector else buffers.block
    ours = parsed(lambda: parse(spec, size, writable))
    if ours[0] == "refused":
        with pytest.raises(ours[1]) as caught:
            mpi4py_moves(spec, size, is_vector, writable, [0] * size)
        assert (caught.type, str(caught.value)) == ours[1:]
    elif ours[0] == "message":
        message = ours[1]
        if is_vector:
            blocks = list(message.counts)
            runs = sorted((d, d + n) for n, d in zip(message.counts, message.displs, strict=True) if n)
            if writable and any(a[1] > b[0] for a, b in itertools.pairwise(runs)):
                return ours  # overlapping receives are erroneous
            assert sum(blocks) == message.nbytes == message.count * message.itemsize
        else:
            blocks = [message.nbytes] * size
        moved = mpi4py_moves(spec, size, is_vector, writable, blocks)
        if is_vector:
            assert content(message) == moved
        else:
            assert bytes(ffi.buffer(message.data, message.nbytes * size)) == moved
    return ours


BLOCK = {
    "array": ("m", doubles),
    "uneven": ("r", lambda: doubles(7)),
    "uneven, typed": ("r", lambda: [np.ones(4, "i"), "i"]),
    "empty": ("m", lambda: np.empty(0)),
    "fortran order": ("m", lambda: np.arange(6.0).reshape(2, 3).T),
    "strided": ("r", lambda: doubles(12)[::2]),
    "count is a block's": ("m", lambda: [doubles(), 1]),
    "count, type": ("m", lambda: [doubles(), 2, MPI.DOUBLE]),
    "count None": ("m", lambda: [doubles(), None, "i"]),
    "displ": ("m", lambda: [doubles(7), (None, 1)]),
    "displ, uneven": ("r", lambda: [doubles(6), (None, 1)]),
    "count, displ": ("m", lambda: [doubles(), 1, 2, "d"]),
    "negative": ("r", lambda: [doubles(), -1]),
    "odd length": ("r", lambda: [bytearray(13), "i"]),
    "nothing": ("m", lambda: [None, 0, "d"]),
    "pair type": ("m", lambda: [np.zeros(6, "i8"), MPI.TWOINT]),
}


@pytest.mark.parametrize("writable", [False, True], ids=["send", "receive"])
@pytest.mark.parametrize("name", BLOCK)
def test_block(name, writable):
    outcome, make = BLOCK[name]
    assert check_many(make(), 3, False, writable)[0] == {"m": "message", "r": "refused", "u": "mpi"}[outcome]


class Indexed:
    """A sequence by __len__ and __getitem__ alone."""

    def __init__(self, items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]


VECTOR = {
    "array": ("m", doubles),
    "array that does not divide": ("m", lambda: doubles(7)),
    "fewer items than ranks": ("m", lambda: doubles(2)),
    "empty": ("m", lambda: np.empty(0)),
    "fortran order": ("m", lambda: np.arange(6.0).reshape(2, 3).T),
    "strided": ("r", lambda: doubles()[::2]),
    "counts": ("m", lambda: [doubles(), [1, 2, 3]]),
    "counts with zeros": ("m", lambda: [doubles(), [0, 6, 0]]),
    "counts array": ("m", lambda: [doubles(), np.array([1, 2, 3])]),
    "counts uint8 array": ("m", lambda: [doubles(), np.array([1, 2, 3], "B")]),
    "counts float array": ("r", lambda: [doubles(), np.ones(3)]),
    "counts 2-d": ("r", lambda: [doubles(), np.ones((3, 1), "i")]),
    "counts by index": ("m", lambda: [doubles(), Indexed([3, 2, 1])]),
    "counts range": ("m", lambda: [doubles(), range(3)]),
    "counts array.array": ("m", lambda: [doubles(), array.array("i", [1, 2, 3])]),
    "counts set": ("r", lambda: [doubles(), {1, 2, 3}]),
    "counts too few": ("r", lambda: [doubles(), [1, 2]]),
    "counts too many": ("r", lambda: [doubles(), [1, 2, 3, 0]]),
    "counts with a float": ("r", lambda: [doubles(), [1, 2.0, 3]]),
    "counts with None": ("r", lambda: [doubles(), [1, None, 3]]),
    "counts beyond long": ("r", lambda: [doubles(), [1, 2**63, 3]]),
    "count": ("m", lambda: [doubles(), 2]),
    "count 0-d": ("m", lambda: [doubles(), np.array(2)]),
    "count np.int64": ("m", lambda: [doubles(), np.int64(1)]),
    "count 1.5": ("r", lambda: [doubles(), 1.5]),
    "count 0-d float": ("r", lambda: [doubles(), np.array(1.5)]),
    "count beyond long": ("r", lambda: [doubles(), 2**64]),
    "a tuple is a pair": ("m", lambda: [doubles(), ([1, 2, 3], [0, 1, 3])]),
    "a tuple of 3 is no counts": ("r", lambda: [doubles(), (1, 2, 3)]),
    "a tuple of 1": ("r", lambda: [doubles(), ([1, 2, 3],), "d"]),
    "a list is counts": ("r", lambda: [doubles(), [[1, 2, 3], [0, 1, 3]]]),
    "tuple counts in 4 items": ("m", lambda: [doubles(), (1, 2, 3), (0, 1, 3), "d"]),
    "type": ("m", lambda: [doubles(), MPI.INT]),
    "key": ("m", lambda: (doubles(), "f")),
    "key unknown": ("r", lambda: [doubles(), "x"]),
    "type null": ("r", lambda: [doubles(), MPI.DATATYPE_NULL]),
    "uneven": ("r", lambda: [np.ones(3, "b"), MPI.INT]),
    "counts, type": ("m", lambda: [doubles(), [1, 2, 3], "d"]),
    "pair, type": ("m", lambda: [doubles(), ([1, 2, 2], [4, 2, 0]), "d"]),
    "pair, no counts": ("m", lambda: [doubles(), (None, [4, 2, 0])]),
    "pair, no displs": ("m", lambda: [doubles(), ([2, 1, 3], None)]),
    "pair, stride": ("m", lambda: [doubles(), (1, 2)]),
    "stride 0": ("m", lambda: [doubles(), (1, 0)]),
    "stride 0.5": ("r", lambda: [doubles(), (1, 0.5)]),
    "displs too few": ("r", lambda: [doubles(), (1, [0])]),
    "displs beyond long": ("r", lambda: [doubles(), (1, [0, 2**63, 0])]),
    "displs of no use": ("m", lambda: [doubles(), [2, 0, 1], [0, -77, 2], "d"]),
    "4 items": ("m", lambda: [doubles(), [1, 2, 1], [5, 1, 0], MPI.DOUBLE]),
    "1 item": ("r", lambda: [doubles()]),
    "5 items": ("r", lambda: [doubles(), 1, 0, "d", None]),
    "number": ("r", lambda: 3),
    "list of numbers": ("r", lambda: [[1, 2, 3], 1, "i"]),
    "nothing": ("m", lambda: [None, 0, "B"]),
    "nothing, counted": ("u", lambda: [None, 1, "B"]),
    "BOTTOM": ("m", lambda: [MPI.BOTTOM, "B"]),
    "pair type": ("m", lambda: [np.zeros(6, "i8"), MPI.TWOINT]),
    "bytes": ("m", lambda: [bytearray(b"abcdefg"), [3, 1, 3]]),
    "tensor": ("m", lambda: [Tensor(doubles()), [3, 1, 2]]),
    "device": ("u", lambda: [Tensor(doubles(), device=2), [3, 1, 2]]),
}


@pytest.mark.parametrize("writable", [False, True], ids=["send", "receive"])
@pytest.mark.parametrize("name", VECTOR)
def test_vector(name, writable):
    outcome, make = VECTOR[name]
    assert check_many(make(), 3, True, writable)[0] == {"m": "message", "r": "refused", "u": "mpi"}[outcome]


def test_an_empty_run_lies_at_the_start():
    message = buffers.vector([doubles(), [2, 0, 1], [4, -77, 2], "d"], 3, True)
    assert (list(message.counts), list(message.displs)) == ([16, 0, 8], [32, 0, 16])


def test_vector_runs_outside_the_memory_raise():
    for spec, text in [
        ([doubles(), [3, 2, 2]], "count 2 at displacement 5 for rank 2 needs bytes 40 to 56"),
        ([doubles(), [1, 1, 1], [0, -1, 2], "d"], "displacement -1 for rank 1"),
        ([doubles(), [1, -1, 1]], "negative count -1 for rank 1"),
        ([doubles(), (1, -2)], "displacement -2 for rank 1"),
    ]:
        with pytest.raises(Error, match=text) as caught:
            buffers.vector(spec, 3, False)
        assert caught.value.Get_error_class() == MPI.ERR_COUNT


@contextlib.contextmanager
def inside_memory():
    """Ends a comparison with mpi4py before it goes past the memory."""
    try:
        yield
    except Error as error:
        if "but the buffer has" not in str(error):
            raise


def one_of(draw, choices):
    """As sampled_from, which hashes its choices; a writable memoryview has no hash."""
    return choices[draw(st.integers(0, len(choices) - 1))]


@st.composite
def numbers(draw, size, low, high):
    """An integer or `size` of them (rarely another number of them, or something that is none), in the types users write."""
    if draw(st.integers(0, 3)) == 0:
        one = draw(st.integers(low, high))
        return draw(st.sampled_from([one, np.int32(one), np.array(one), float(one)]))
    length = size + draw(st.sampled_from([0] * 8 + [1, -1]))
    many = draw(st.lists(st.integers(low, high), min_size=length, max_size=length))
    if many and draw(st.integers(0, 15)) == 0:
        many[draw(st.integers(0, length - 1))] = draw(st.sampled_from([None, 1.5, "1", 2**64, np.int8(1)]))
        return many
    return draw(st.sampled_from([many, tuple(many), np.array(many, "i8"), np.array(many, "i2"), Indexed(many)]))


@st.composite
def vectors(draw):
    size = draw(st.integers(1, 5))
    n = draw(st.integers(0, 12))
    a = np.arange(1, n + 1).astype(draw(st.sampled_from("bhidFB")))
    buf = draw(st.sampled_from([a, a, bytearray(a.tobytes()), Tensor(a), None]))
    counts = draw(st.none() | numbers(size, 0, 4))
    displs = draw(st.none() | numbers(size, 0, 8))
    type_ = draw(st.sampled_from([None, None, a.dtype.char, MPI.BYTE, MPI.SHORT, MPI.TWOINT, MPI.DATATYPE_NULL, "x"]))
    spec = draw(
        st.sampled_from(
            [
                [buf, counts],
                (buf, (counts, displs)),
                [buf, type_],
                (buf, counts, type_),
                [buf, (counts, displs), type_],
                [buf, counts, displs, type_],
                [buf, displs, counts],
                buf,
            ]
        )
    )
    return size, spec


@given(vectors(), st.booleans())
def test_any_vector(case, writable):
    size, spec = case
    with inside_memory():
        check_many(spec, size, True, writable)


@st.composite
def simples(draw):
    n = draw(st.integers(0, 9))
    a = np.arange(1, n + 1).astype(draw(st.sampled_from("?bhidFBg")))
    bufs = (a, bytearray(a.tobytes()), memoryview(a), Tensor(a), None, MPI.BOTTOM, 5)
    buf = one_of(draw, bufs)
    integer = st.none() | st.integers(-1, 10) | st.sampled_from([1.5, "d", np.int8(2), np.array(1), (1,), 2**64])
    count, displ = draw(integer), draw(integer)
    type_ = draw(
        st.sampled_from([None, None, a.dtype.char, "i2", MPI.BYTE, MPI.INT, MPI.TWOINT, MPI.DATATYPE_NULL, "x"])
    )
    forms = [
        buf,
        [buf, count],
        (buf, type_),
        [buf, (count, displ)],
        [buf, [count, displ]],
        (buf, count, type_),
        (buf, (count, displ), type_),
        [buf, count, displ, type_],
        [buf, count, displ, type_, None],
    ]
    return one_of(draw, forms)


@given(simples(), st.booleans())
def test_any_simple(spec, writable):
    with inside_memory():
        check_simple(spec, writable)


@given(simples(), st.integers(1, 5), st.booleans())
def test_any_block(spec, size, writable):
    assume(not (isinstance(spec, list | tuple) and spec[0] is MPI.BOTTOM))
    with inside_memory():
        check_many(spec, size, False, writable)


# ---------------------------------------------------------------------------------------------------------------------
# Types, ops, IN_PLACE, lifetime


def test_tables():
    for dtype, code in buffers.TYPE_OF_DTYPE.items():
        assert buffers.SIZE_OF_TYPE[code] == dtype.itemsize
    assert buffers.OP_OF[MPI.Op(MPI.SUM).handle] == lib.SMPI_SUM
    assert len(buffers.OP_OF) == lib.SMPI_OP_COUNT == len(set(buffers.OP_OF.values()))
    assert buffers.LEGAL[lib.SMPI_BOOL] == 1 << lib.SMPI_LAND | 1 << lib.SMPI_LOR | 1 << lib.SMPI_LXOR
    for kind in buffers._KIND_OF_HANDLE.values():
        assert kind.datatype.Get_extent() == (0, kind.itemsize)


def test_half_precision_is_native_whatever_mpi_has():
    half = np.arange(4).astype("e")
    assert buffers.simple(half, True).type == lib.SMPI_FLOAT16
    assert buffers.simple([half, 2], True).nbytes == 4
    if MPI.FLOAT16_T != MPI.DATATYPE_NULL:
        assert check_simple(half, False)[1].type == lib.SMPI_FLOAT16


def test_bfloat16_is_native():
    brain = np.arange(4).astype(ml_dtypes.bfloat16)
    for spec, count in [(brain, 4), ([brain, 3], 3), ([brain, (2, 1)], 2), (brain[1:], 3)]:
        message = buffers.simple(spec, True)
        assert (message.type, message.itemsize, message.count) == (lib.SMPI_BFLOAT16, 2, count)
    assert list(buffers.vector([brain, [1, 3]], 2, True).counts) == [2, 6]
    assert parsed(lambda: buffers.simple(brain[::2], True))[1] is BufferError
    assert buffers.simple([brain, MPI.UINT16_T], True).type == lib.SMPI_UINT16
    send, recv, op = buffers.reduction(brain, brain.copy(), MPI.SUM)
    assert (send.type, recv.count, op) == (lib.SMPI_BFLOAT16, 4, lib.SMPI_SUM)
    with pytest.raises(ValueError, match="mismatch in send and receive MPI datatypes"):
        buffers.reduction(brain, brain.view("e"), MPI.SUM)


def test_bfloat16_tensor_is_native_alone_and_bytes_in_a_specification():
    tensor = Tensor(np.arange(4, dtype="H"), code=4)
    assert (buffers.simple(tensor, True).type, buffers.simple(tensor, True).count) == (lib.SMPI_BFLOAT16, 4)
    assert check_simple([tensor, 3], False)[1].nbytes == 3


def test_typedict_is_looked_up_each_time(monkeypatch):
    own = MPI.BYTE.Create_vector(2, 1, 2).Commit()  # with a gap, so not for a caller that takes none
    monkeypatch.setitem(MPI._typedict, "own", own)
    monkeypatch.setitem(MPI._typedict, "whole", MPI.INT)
    monkeypatch.setitem(MPI._typedict, "junk", 7)
    try:
        assert parsed(lambda: buffers.simple([doubles(), "own"], True)) == ("mpi", lib.SMPI_WHY_DATATYPE)
        assert check_simple([doubles(), "whole"], True)[1].type == lib.SMPI_INT32
        assert check_simple([doubles(), "junk"], True)[1] is TypeError
        monkeypatch.setitem(MPI._typedict, "e", own)
        assert parsed(lambda: buffers.simple([np.ones(2, "e"), 1], True)) == ("mpi", lib.SMPI_WHY_DATATYPE)
        monkeypatch.delitem(MPI._typedict, "d")
        assert check_simple([doubles(), "d"], True)[1] is KeyError
    finally:
        own.Free()


def test_in_place():
    for form in (buffers.simple, lambda o, w, p: buffers.block(o, 2, w, p), lambda o, w, p: buffers.vector(o, 2, w, p)):
        for word in (None, MPI.IN_PLACE):
            message = form(word, False, True)
            assert message.in_place
            assert message.address == 0
            assert message.data == ffi.NULL
        assert parsed(lambda f=form: f(None, False, False))[1] is TypeError
        assert not form(doubles(), False, True).in_place


def plain_reduction(send, recv, op):
    """The type and text of mpi4py's own refusal, None if it calls MPI."""
    try:
        SELF.Allreduce(send, recv, op)
    except MPI.Exception:
        return None
    except REFUSALS as refusal:
        return (type(refusal), str(refusal))
    return None


@pytest.mark.parametrize(
    ("send", "recv", "op"),
    [
        (doubles(), doubles(5), MPI.SUM),
        (doubles(), np.ones(6, "f"), MPI.SUM),
        (np.ones(3, "l"), np.ones(3, "q"), MPI.SUM),
        ([np.ones(3, "l"), MPI.INT64_T], np.ones(3, "l"), MPI.SUM),
        ([doubles(), 1, MPI.FLOAT_INT], doubles(1), MPI.MAXLOC),
        ([doubles(), 4], [doubles(), 5], MPI.MINLOC),
        ([doubles(), 4], [doubles(), 5], MPI.BAND),
        (doubles(), None, MPI.SUM),
        (doubles(), MPI.BOTTOM, MPI.SUM),
        (doubles()[::2], doubles(3), MPI.SUM),
        (doubles(), frozen(doubles()), MPI.SUM),
        (doubles()[::2], frozen(doubles()), MPI.SUM),
        (b"abc", bytearray(4), MPI.BOR),
        (doubles(), doubles(), None),
        (doubles(), doubles()[::2], "sum"),
        ([], doubles(), max),
    ],
)
def test_reductions_refused_as_by_mpi4py(send, recv, op):
    ours = parsed(lambda: buffers.reduction(send, recv, op))
    assert ours[0] == "refused"
    assert ours[1:] == plain_reduction(send, recv, op)


@pytest.mark.parametrize(
    ("send", "recv", "op"),
    [
        (doubles(), doubles(), MPI.SUM),
        (doubles(), doubles().reshape(2, 3).T, MPI.SUM),
        ([doubles(), 4], [doubles(), 4, "d"], MPI.MAX),
        (Tensor(doubles()), doubles(), MPI.MIN),
        (None, doubles(), MPI.Op(MPI.PROD)),
        (MPI.IN_PLACE, [doubles(), 3], MPI.SUM),
        (np.float64(3), np.array(0.0), MPI.SUM),
        ([np.ones(3, "i"), MPI.INT32_T], [np.ones(3, "i"), MPI.INT32_T], MPI.LAND),
        ([b"abc", MPI.BYTE], [bytearray(3), MPI.BYTE], MPI.BXOR),
    ],
)
def test_reductions_taken(send, recv, op):
    source, target, code = buffers.reduction(send, recv, op)
    assert source.in_place == (send is None or send is MPI.IN_PLACE)
    assert code == buffers.OP_OF[op.handle]
    assert plain_reduction(send, recv, op) is None
    assert source.in_place or (source.count, source.type) == (target.count, target.type)


def test_reduction_on_a_rank_that_receives_nothing():
    send, recv, _ = buffers.reduction(doubles(), "ignored", MPI.SUM, receives=False)
    assert send is recv
    assert send.count == 6
    with pytest.raises(TypeError, match="message: expecting buffer or list/tuple"):
        buffers.reduction(None, None, MPI.SUM, receives=False)
    with pytest.raises(Unsupported):  # MPI names the error
        buffers.reduction(MPI.IN_PLACE, None, MPI.SUM, receives=False)


OPS = [getattr(MPI, name) for name in buffers._OP_NAMES]


@pytest.mark.parametrize("char", "?bhilqBHILQfdgFDG")
def test_what_is_taken_is_legal_for_mpi(char):
    a = np.ones(2, char)
    for op in OPS:
        ours = parsed(lambda o=op: buffers.reduction(a, a.copy(), o))
        if ours[0] == "message":
            SELF.Allreduce(a, a.copy(), op)
        else:
            assert ours == ("mpi", lib.SMPI_WHY_OP)  # Intel MPI knows logical ops on floats: its affair


def test_ops_for_mpi():
    user = MPI.Op.Create(lambda a, b, t: None)
    try:
        for op in (user, MPI.MINLOC, MPI.MAXLOC, MPI.REPLACE, MPI.NO_OP, MPI.OP_NULL):
            assert parsed(lambda o=op: buffers.reduction(doubles(), doubles(), o)) == ("mpi", lib.SMPI_WHY_OP)
    finally:
        user.Free()
    letters = [bytearray(3), MPI.CHAR]
    assert parsed(lambda: buffers.reduction(letters, letters, MPI.BAND)) == ("mpi", lib.SMPI_WHY_OP)
    offsets = [np.ones(3, "l"), MPI.AINT]
    assert parsed(lambda: buffers.reduction(offsets, offsets, MPI.LAND)) == ("mpi", lib.SMPI_WHY_OP)
    assert parsed(lambda: buffers.reduction(offsets, offsets, MPI.SUM))[0] == "message"


def test_message_holds_the_memory():
    memory = bytearray(8)
    for spec in (memory, [memory, (2, 3)]):
        message = buffers.simple(spec, True)
        with pytest.raises(BufferError):
            memory.append(0)
        del message
    message = buffers.vector([memory, [2, 3]], 2, True)
    with pytest.raises(BufferError):
        memory.append(0)
    del message
    memory.append(0)


def test_message_lets_go_of_an_array():
    a = doubles()
    ref = weakref.ref(a)
    messages = [buffers.simple(a, True), buffers.simple([a, 2], True), buffers.block(a, 2, True)]
    del a
    assert ref() is not None
    messages.clear()
    assert ref() is None


def test_message_in_a_garbage_cycle():
    for make in (lambda: memoryview(bytearray(8))[2:6], lambda: bytearray(8), doubles, lambda: Tensor(doubles())):
        cycle = [make()]
        cycle += [cycle, buffers.simple(cycle[0], True), buffers.vector([cycle[0], [1, 2]], 2, True)]
        memory = weakref.ref(cycle[0]) if isinstance(cycle[0], memoryview | np.ndarray) else None
        del cycle
        gc.collect()
        assert memory is None or memory() is None
