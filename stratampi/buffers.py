"""Buffer specifications: from what the user wrote to an address, a count and a basic type.

The grammar is mpi4py's (4.1.2, msgbuffer.pxi), which has four readings of one text:

    simple   one run of elements           Bcast, reductions, a rank's own block in Allgather
    block    `size` equal runs             both sides of Alltoall, the receive side of Allgather
    vector   `size` runs, each anywhere    both sides of Alltoallv, the receive side of Allgatherv
    each     as vector, of many datatypes  both sides of Alltoallw

Invariant: what mpi4py would refuse before it calls MPI is refused here with the same exception type and text, before this rank
has touched anything shared; a peer must never wait for a rank that raised over its own arguments. What is legal but not
native (datatypes that are not taken apart, device memory, BOTTOM, user ops) is `Unsupported`: the caller enters with that reason,
and all ranks take mpi4py's method together. Where mpi4py's verdict depends on the exporter of the memory, mpi4py itself is asked
(`_judge`).

Two departures, both on purpose. A count that runs past the memory raises, where mpi4py reads or writes beyond it. Arrays of
bfloat16, and float16 where the MPI library has no such type, are accepted: the runtime knows these types.
A bare NumPy array of a built-in dtype is looked up by dtype alone, so a changed `MPI._typedict` shows in every form but that one.
"""

from __future__ import annotations

import ctypes
import sys
from itertools import accumulate
from operator import index
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import numpy as np
from mpi4py import MPI
from numpy import ndarray

from ._native import ffi, lib
from .datatypes import layout_of, place
from .errors import Error

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .datatypes import Layout

CHARS: Any = ffi.typeof("char[]")
_INT64S: Any = ffi.typeof("int64_t[]")
_LAYOUTS: Any = ffi.typeof("smpi_layout *[]")
_PARTS: Any = ffi.typeof("struct smpi_part[]")
BOTTOM, IN_PLACE = MPI.BOTTOM, MPI.IN_PLACE
from_buffer = ffi.from_buffer

# Taken now: the runner puts other communicators in their place.
_Datatype, _Comm, _SELF = MPI.Datatype, MPI.Comm, MPI.COMM_SELF
_typedict: dict[Any, Any] = MPI._typedict  # the dict itself, which users change
_BYTE = MPI.BYTE
_NOWHERE: Any = ffi.new("char[128]")  # where nothing is sent from: C reads NULL as IN_PLACE
_LONG_MAX = 2**63 - 1
_TOO_LARGE = "Python int too large to convert to C long"
_NATIVE_ORDER, _FOREIGN_ORDER = ("<", ">") if sys.byteorder == "little" else (">", "<")


class Unsupported(Exception):  # a verdict, not an error: the caller never lets it out
    """Legal for mpi4py, but not for the native path; `why` is an SMPI_WHY_*."""

    def __init__(self, why: int) -> None:
        super().__init__(why)
        self.why = why


class Kind(NamedTuple):
    """What one element is. `code` is an SMPI_* type, or -1 for a datatype that the native path does not decode.

    `itemsize` does not count gaps; where there are any, `layout` says where the bytes lie.

    `ops` has bit 1 << op where a reduction by op is legal. `handle` tells MPI datatypes apart as mpi4py does (MPI.LONG is
    not MPI.INT64_T); it is negative for types that MPI does not have.
    """

    code: int
    itemsize: int
    ops: int
    handle: int
    datatype: MPI.Datatype | None
    layout: Layout | None = None


class Message:
    """One parsed buffer.

    data: the first byte as cdata, ready for a `void *` argument; NULL if and only if `in_place`.
    count: elements; in block form elements of one block, in vector form of all together.
    type, itemsize: SMPI_* code and bytes of an element. nbytes: count * itemsize.
    counts, displs: vector form only, `int64_t[size]` in bytes; the displacement of an empty run is 0.
    parts: where the bytes lie, if there are gaps between them: `struct smpi_part[]`, one for each run that is not empty; data and
    displs are then those of memory without gaps (packing.py). None: no gaps. layouts: of `each` only, `smpi_layout *[size]`.
    keep: what owns the memory. why: SMPI_WHY_* if the native path cannot take it, else 0 (functions of this module that return a
    Message raise Unsupported in that case).
    """

    __slots__ = ("count", "data", "itemsize", "keep", "kind", "nbytes", "type")

    counts: Any = None  # no slots: a slot to fill is a cost on every call, and these are rarely anything else
    displs: Any = None
    in_place: bool = False
    layouts: Any = ffi.NULL
    parts: Any = None
    why: int = 0

    def __init__(self, data: Any, count: int, kind: Kind, keep: Any) -> None:
        self.data = data
        self.count = count
        self.kind = kind
        self.type = kind.code
        self.itemsize = itemsize = kind.itemsize
        self.nbytes = count * itemsize
        self.keep = keep

    @property
    def address(self) -> int:
        """The first byte's address, 0 for IN_PLACE."""
        return int(ffi.cast("uintptr_t", self.data))


class _Parsed(Message):
    """A Message in which everything may be set."""

    __slots__ = ("counts", "displs", "in_place", "layouts", "parts", "why")

    def __init__(self, data: Any, count: int, kind: Kind, keep: Any) -> None:
        super().__init__(data, count, kind, keep)
        self.counts = self.displs = self.parts = None
        self.in_place = False
        self.layouts = ffi.NULL
        self.why = 0


# ---------------------------------------------------------------------------------------------------------------------
# Tables: dtypes, datatypes and ops of the native path

SIZE_OF_TYPE: tuple[int, ...] = tuple(lib.smpi_type_size(code) for code in range(lib.SMPI_TYPE_COUNT))
"""SMPI_* type -> bytes of an element."""

LEGAL: tuple[int, ...] = tuple(
    sum(1 << op for op in range(lib.SMPI_OP_COUNT) if lib.smpi_op_is_legal(code, op))
    for code in range(lib.SMPI_TYPE_COUNT)
)
"""SMPI_* type -> bits 1 << op of the reductions that MPI defines for it."""

_OP_NAMES = ("SUM", "PROD", "MAX", "MIN", "LAND", "LOR", "LXOR", "BAND", "BOR", "BXOR", "MAXLOC", "MINLOC")

OP_OF: dict[int, int] = {getattr(MPI, name).handle: getattr(lib, f"SMPI_{name}") for name in _OP_NAMES}
"""`MPI.Op.handle` -> SMPI_* op (mpi4py's handles cannot be hashed; copies such as `MPI.Op(MPI.SUM)` have the same handle)."""

_LOGICAL = 1 << lib.SMPI_LAND | 1 << lib.SMPI_LOR | 1 << lib.SMPI_LXOR

_DATATYPES = {
    lib.SMPI_BYTE: "BYTE",
    lib.SMPI_BOOL: "C_BOOL CXX_BOOL",
    lib.SMPI_INT8: "SIGNED_CHAR INT8_T",
    lib.SMPI_INT16: "SHORT INT16_T",
    lib.SMPI_INT32: "INT INT32_T",
    lib.SMPI_INT64: "LONG LONG_LONG INT64_T AINT OFFSET COUNT",
    lib.SMPI_UINT8: "UNSIGNED_CHAR UINT8_T",
    lib.SMPI_UINT16: "UNSIGNED_SHORT UINT16_T",
    lib.SMPI_UINT32: "UNSIGNED UINT32_T",
    lib.SMPI_UINT64: "UNSIGNED_LONG UNSIGNED_LONG_LONG UINT64_T",
    lib.SMPI_FLOAT16: "FLOAT16_T",
    lib.SMPI_BFLOAT16: "BFLOAT16_T",
    lib.SMPI_FLOAT32: "FLOAT FLOAT32_T",
    lib.SMPI_FLOAT64: "DOUBLE FLOAT64_T",
    lib.SMPI_LONGDOUBLE: "LONG_DOUBLE",
    lib.SMPI_COMPLEX64: "C_COMPLEX C_FLOAT_COMPLEX CXX_FLOAT_COMPLEX",
    lib.SMPI_COMPLEX128: "C_DOUBLE_COMPLEX CXX_DOUBLE_COMPLEX",
    lib.SMPI_CLONGDOUBLE: "C_LONG_DOUBLE_COMPLEX CXX_LONG_DOUBLE_COMPLEX",
}
assert ctypes.sizeof(ctypes.c_long) == 8, "the table is that of LP64 systems"


def _kinds_by_handle() -> dict[int, Kind]:
    """All MPI datatypes of the native path. Asks MPI nothing: it may not be initialised yet."""
    kinds = {}
    for code, names in _DATATYPES.items():
        for name in names.split():
            datatype = getattr(MPI, name, MPI.DATATYPE_NULL)
            if datatype != MPI.DATATYPE_NULL:
                ops = LEGAL[code]
                if name in ("AINT", "OFFSET", "COUNT"):  # "multi-language types": no logical ops (MPI 5.1, 6.9.2)
                    ops &= ~_LOGICAL
                kinds[datatype.handle] = Kind(code, SIZE_OF_TYPE[code], ops, datatype.handle, datatype)
    for datatype, size in ((MPI.CHAR, 1), (MPI.WCHAR, ctypes.sizeof(ctypes.c_wchar))):  # text: moved, never reduced
        kinds[datatype.handle] = Kind(lib.SMPI_BYTE, size, 0, datatype.handle, datatype)
    return kinds


_KIND_OF_HANDLE = _kinds_by_handle()
_KIND_OF_ID = {  # of MPI's own objects, which live as long as the process
    id(datatype): _KIND_OF_HANDLE[datatype.handle]
    for datatype in vars(MPI).values()
    if isinstance(datatype, MPI.Datatype) and datatype.handle in _KIND_OF_HANDLE
}


def _own(code: int) -> Kind:
    """The kind of a type that MPI does not have."""
    return Kind(code, SIZE_OF_TYPE[code], LEGAL[code], -1 - code, None)


_FLOAT16, _BFLOAT16 = _own(lib.SMPI_FLOAT16), _own(lib.SMPI_BFLOAT16)

_DTYPES = {
    lib.SMPI_BOOL: "?",
    lib.SMPI_INT8: "b",
    lib.SMPI_INT16: "h",
    lib.SMPI_INT32: "i",
    lib.SMPI_INT64: "l",
    lib.SMPI_UINT8: "B",
    lib.SMPI_UINT16: "H",
    lib.SMPI_UINT32: "I",
    lib.SMPI_UINT64: "L",
    lib.SMPI_FLOAT16: "e",
    lib.SMPI_FLOAT32: "f",
    lib.SMPI_FLOAT64: "d",
    lib.SMPI_LONGDOUBLE: "g",
    lib.SMPI_COMPLEX64: "F",
    lib.SMPI_COMPLEX128: "D",
    lib.SMPI_CLONGDOUBLE: "G",
}

TYPE_OF_DTYPE: dict[np.dtype[Any], int] = {np.dtype(char): code for code, char in _DTYPES.items()}
"""dtype -> SMPI_* type, for arrays that need no further look. Equal dtypes (long, long long) are one key."""


def _kind_of_key(key: Any) -> Kind:
    """The kind that a key of MPI._typedict stands for now."""
    try:
        datatype = _typedict[key]
    except KeyError:
        if key == "e":
            return _FLOAT16
        raise KeyError(f"cannot map {key!r} to MPI datatype") from None
    if not isinstance(datatype, MPI.Datatype):
        raise TypeError(f"Cannot convert {type(datatype).__name__} to mpi4py.MPI.Datatype")
    return _kind_of_datatype(datatype)


def _kind_of_datatype(datatype: MPI.Datatype) -> Kind:
    return _KIND_OF_HANDLE.get(datatype.handle) or _derived(datatype)


_PAIRS = {  # a value and where it is
    MPI.SHORT_INT.handle: lib.SMPI_INT16_INT32,
    MPI.TWOINT.handle: lib.SMPI_INT32_INT32,
    MPI.LONG_INT.handle: lib.SMPI_INT64_INT32,
    MPI.FLOAT_INT.handle: lib.SMPI_FLOAT32_INT32,
    MPI.DOUBLE_INT.handle: lib.SMPI_FLOAT64_INT32,
    MPI.LONG_DOUBLE_INT.handle: lib.SMPI_LONGDOUBLE_INT32,
}


def _derived(datatype: MPI.Datatype) -> Kind:
    """A datatype that is no row of the table: to be moved; predefined ops are for the pairs alone."""
    layout = layout_of(datatype) if datatype != MPI.DATATYPE_NULL else None
    if layout is None:
        return Kind(-1, 0, 0, datatype.handle, datatype)
    code = _PAIRS.get(datatype.handle, lib.SMPI_BYTE)
    ops = LEGAL[code] if code != lib.SMPI_BYTE else 0
    return Kind(code, layout.size, ops, datatype.handle, datatype, layout if layout.ptr else None)


# By the address of NumPy's own dtype objects, which live on. By address because long and long long are equal, and two MPI
# datatypes.
_KIND_OF_DTYPE: dict[int, Kind] = {
    id(np.dtype(char)): _KIND_OF_HANDLE.get(getattr(_typedict.get(char), "handle", 0))
    or _own(TYPE_OF_DTYPE[np.dtype(char)])
    for char in (*_DTYPES.values(), "q", "Q")
}


def _kind_of_array(array: ndarray[Any, Any]) -> Kind:
    """Raises what memoryview or mpi4py raise for a dtype that is no MPI type."""
    dtype = array.dtype
    if array.flags.aligned and TYPE_OF_DTYPE.get(dtype, lib.SMPI_BFLOAT16) != lib.SMPI_BFLOAT16:
        return _kind_of_key(dtype.char)
    if (
        dtype.kind == "V" and dtype.isnative and dtype.name == "bfloat16"
    ):  # ml_dtypes; the buffer protocol has no letter for it
        if dtype is np.dtype(dtype.type) and id(dtype) not in _KIND_OF_DTYPE:
            TYPE_OF_DTYPE[dtype] = lib.SMPI_BFLOAT16
            _learn(dtype, lib.SMPI_KNOWN_DTYPE, lib.SMPI_BFLOAT16)
            _KIND_OF_DTYPE[id(dtype)] = _BFLOAT16
        return _BFLOAT16
    exporter: Any = array
    return _kind_of_format(memoryview(exporter).format)


def _kind_of_format(format_: str) -> Kind:
    """A struct-module format, as PEP 3118 exporters give it."""
    order = format_[:1]
    if order == _FOREIGN_ORDER:
        raise BufferError(f"format string {format_!r} with non-native byte order")
    return _kind_of_key(format_[1:] if order in ("@", _NATIVE_ORDER) else format_)


# ---------------------------------------------------------------------------------------------------------------------
# Memory: from an object to an address, a length in bytes and a kind


class _Judged(Exception):
    """mpi4py took the specification. Never seen outside."""


class _Stop(list[Any]):
    """A specification whose parsing ends mpi4py's method, after it has taken the other side's and before it calls MPI."""

    def __len__(self) -> int:
        raise _Judged


_STOP = _Stop()


def _judge(spec: Any, writable: bool) -> None:
    """Raises what mpi4py raises for a simple specification; returns if it takes it. Nothing is communicated or written."""
    try:
        if writable:
            _Comm.Allreduce(_SELF, _STOP, spec)  # takes the receive side first
        else:
            _Comm.Sendrecv(_SELF, spec, 0, recvbuf=_STOP, source=0)  # takes the send side first
    except _Judged:
        return


_DLPACK_HOST = frozenset((1, 3, 11))  # kDLCPU, kDLCUDAHost, kDLROCMHost: host memory, the last two pinned
_DLPACK_FORMAT = {
    (code, bits): letter
    for code, letters in {
        0: {8: "b", 16: "h", 32: "i", 64: "l"},
        1: {8: "B", 16: "H", 32: "I", 64: "L"},
        2: {16: "e", 32: "f", 64: "d", 128: "g"},
        5: {32: "Ze", 64: "Zf", 128: "Zd", 256: "Zg"},
        6: {8: "?"},
    }.items()
    for bits, letter in letters.items()
}
_DLPACK_BFLOAT = 4
# Where DLDataType lies: behind data, device and ndim of DLTensor, which itself lies behind version, context, deleter
# and flags in the versioned form (dlpack.h 1.0).
_DLPACK_DTYPE_AT = {b"dltensor": 20, b"dltensor_versioned": 52}

_capsule_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_IsValid", ctypes.pythonapi)
)
_capsule_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


class _DLDataType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


def _kind_of_capsule(capsule: Any, bare: bool) -> Kind | None:
    """mpi4py's reading of a DLPack dtype, but for bare bfloat16, which mpi4py takes for bytes. None: no capsule."""
    for name, offset in _DLPACK_DTYPE_AT.items():
        if _capsule_is_valid(capsule, name):
            dtype = _DLDataType.from_address(_capsule_pointer(capsule, name) + offset)
            break
    else:
        return None
    if dtype.lanes != 1:
        letter = {32: "Zf", 64: "Zd", 128: "Zg"}.get(dtype.bits) if (dtype.code, dtype.lanes) == (2, 2) else None
        return _kind_of_key(letter or "B")
    if bare and (dtype.code, dtype.bits) == (_DLPACK_BFLOAT, 16):
        return _BFLOAT16
    letter = _DLPACK_FORMAT.get((dtype.code, dtype.bits))
    return _kind_of_key(letter) if letter else _kind_of_datatype(MPI.BYTE)


class _Memory(NamedTuple):
    data: Any
    nbytes: int
    kind: Kind
    keep: Any


def _pointer(exporter: Any) -> Any:
    return ffi.cast("char *", MPI.Get_address(exporter))


def _memory(buf: Any, type_: Any, writable: bool, bare: bool) -> _Memory:
    """Opens `buf` as mpi4py's message_basic does: the memory first, the datatype second.

    type_: the datatype or key of the specification, None to take the exporter's. bare: the buffer is the whole specification.
    """
    if buf is BOTTOM or (buf is None and not bare):
        return _Memory(_NOWHERE, 0, _explicit(type_), None)
    if isinstance(buf, ndarray):
        flags = buf.flags
        if flags.forc and (flags.writeable or not writable):
            data = from_buffer(CHARS, buf) if flags.c_contiguous else _pointer(buf)
            try:
                kind = _kind_of_array(buf) if type_ is None else _explicit(type_)
            except (ValueError, BufferError):  # a dtype that NumPy does not export
                _refuse(buf, type_, writable, bare)
            return _Memory(data, buf.nbytes, kind, (buf, data))
        _refuse(buf, type_, writable, bare)
    try:
        view = memoryview(buf)
    except Exception:
        return _exported(buf, type_, writable, bare)
    if not view.contiguous or (view.readonly and writable):
        _refuse(buf, type_, writable, bare)
    # Not from_buffer: a memoryview with exports that is cleared in a garbage cycle crashes CPython 3.11.
    kind = _kind_of_format(view.format) if type_ is None else _explicit(type_)
    return _Memory(_pointer(view), view.nbytes, kind, view)


def _explicit(type_: Any) -> Kind:
    return _kind_of_datatype(type_) if isinstance(type_, _Datatype) else _kind_of_key(type_)


def _exported(buf: Any, type_: Any, writable: bool, bare: bool) -> _Memory:
    """Memory that is not offered by the buffer protocol: DLPack in host memory is native, the rest is MPI's affair."""
    try:
        hosted = buf.__dlpack_device__()[0] in _DLPACK_HOST
        export = MPI.buffer.frombuffer(buf, not writable) if hosted else None
    except Exception:
        export = None
    kind = None if export is None else _kind_of_capsule(export.obj, bare)
    if export is None or kind is None:
        _refuse(buf, type_, writable, bare)
    if type_ is not None:
        kind = _explicit(type_)
    data = ffi.cast("char *", export.address) if export.nbytes else _NOWHERE
    return _Memory(data, export.nbytes, kind, export)


def _refuse(buf: Any, type_: Any, writable: bool, bare: bool) -> NoReturn:
    """Raises what mpi4py says about memory that this module did not take, or Unsupported if mpi4py takes it."""
    _judge(buf if bare else (buf, 0) if type_ is None else (buf, 0, type_), writable)
    device = hasattr(buf, "__dlpack__") or hasattr(buf, "__cuda_array_interface__")
    raise Unsupported(lib.SMPI_WHY_DEVICE if device else lib.SMPI_WHY_DATATYPE)


# ---------------------------------------------------------------------------------------------------------------------
# Grammar


def _pair(items: Sequence[Any]) -> tuple[Any, Any]:
    """Two items, refused with the texts of mpi4py's compiled code, which are not the interpreter's."""
    n = len(items)
    if n < 2:
        raise ValueError(f"need more than {n} value{'' if n == 1 else 's'} to unpack")
    if n > 2:
        raise ValueError("too many values to unpack (expected 2)")
    return items[0], items[1]


def _unpack(spec: Sequence[Any], pairs: tuple[type[Sequence[Any]], ...]) -> tuple[Any, Any, Any, Any]:
    """(buffer, count, displ, type), absent ones None. pairs: the sequences that are read as (count, displ)."""
    n = len(spec)
    displ = type_ = None
    if n == 2:
        buf, count = spec
        if isinstance(count, (_Datatype, str)):
            return buf, None, None, count
    elif n == 3:
        buf, count, type_ = spec
    elif n == 4:
        buf, count, displ, type_ = spec
        return buf, count, displ, type_
    else:
        raise ValueError("message: expecting 2 to 4 items")
    if isinstance(count, pairs):
        count, displ = _pair(count)
    return buf, count, displ, type_


def _long(value: Any) -> int:
    n = index(value)
    if not -_LONG_MAX - 1 <= n <= _LONG_MAX:
        raise OverflowError(_TOO_LARGE)
    return n


def _longs(values: Any, size: int) -> list[int]:
    items: list[int]
    if isinstance(values, ndarray) and values.ndim == 1 and values.dtype.kind in "iu":
        items = values.tolist()
    elif type(values) is list or type(values) is tuple:
        items = list(map(index, values))
    else:
        items = [index(values[i]) for i in range(len(values))]
    if items and (max(items) > _LONG_MAX or min(items) < -_LONG_MAX - 1):
        raise OverflowError(_TOO_LARGE)
    if len(items) != size:
        raise ValueError(f"expecting {size} items, got {len(items)}")
    return items


def _is_integral(value: Any) -> bool:
    """One integer, not a sequence of them; a 0-d array is one (asarray.pxi)."""
    if type(value) is int:
        return True
    if type(value) is list or type(value) is tuple:  # the usual ones; looking for __index__ in vain is slow
        return False
    if not hasattr(type(value), "__index__"):
        return False
    try:
        len(value)
    except Exception:
        try:
            index(value)
        except Exception:
            return False
        return True
    return False


def _extent(kind: Kind, purpose: str) -> tuple[int, int]:
    """Lower bound and extent in bytes. purpose: what cannot be done without, for the text."""
    if kind.code >= 0 and kind.layout is None:
        return 0, kind.itemsize
    assert kind.datatype is not None
    if kind.datatype == MPI.DATATYPE_NULL:
        raise ValueError(f"message: cannot {purpose}, datatype is null")
    lb, extent = kind.datatype.Get_extent()
    if extent <= 0:
        raise ValueError(f"message: cannot {purpose}, datatype extent {extent} (lb:{lb}, ub:{lb + extent})")
    return lb, extent


def _entries(nbytes: int, kind: Kind) -> int:
    """How many elements a buffer of nbytes > 0 holds."""
    lb, extent = _extent(kind, "infer count")
    if nbytes % extent:
        raise ValueError(
            f"message: cannot infer count, buffer length {nbytes} is not a multiple of "
            f"datatype extent {extent} (lb:{lb}, ub:{lb + extent})"
        )
    return nbytes // extent


def _reaches(buf: Any, low: int, high: int) -> bool:
    """Whether bytes [low, high) from the start of `buf` lie in the array that `buf` is a view of, `[a[i], n]` for instance."""
    if not isinstance(buf, ndarray):
        return False
    owner = buf
    while isinstance(owner.base, ndarray):
        owner = owner.base
    if owner is buf or not owner.flags.forc:
        return False
    start = MPI.Get_address(buf) - MPI.Get_address(owner)
    return start + low >= 0 and start + high <= owner.nbytes


def _parse_usual(spec: Any, blocks: int, writable: bool) -> Message | None:
    """What programs mostly pass: an array, [array, datatype], [array, count, datatype], C contiguous. None: something else."""
    if type(spec) is ndarray:
        buf, kind, count = spec, _KIND_OF_DTYPE.get(id(spec.dtype)) if spec.flags.aligned else None, None
    elif (type(spec) is list or type(spec) is tuple) and 2 <= len(spec) <= 3 and type(spec[0]) is ndarray:
        buf, kind, count = spec[0], _KIND_OF_ID.get(id(spec[-1])), spec[1] if len(spec) == 3 else None
    else:
        return None
    if kind is None:
        return None
    try:
        data = from_buffer(CHARS, buf, writable)
    except (ValueError, BufferError):
        return None
    available, rest = divmod(len(data), kind.itemsize * (blocks or 1))
    if count is None and not rest:
        count = available
    elif type(count) is not int or not 0 <= count <= available:
        return None
    return Message(data, count, kind, data)


def _parse(spec: Any, blocks: int, writable: bool) -> Message:
    """message_simple of mpi4py: simple form (blocks 0) or block form. A Message with `why` set is legal but not native."""
    usual = _parse_usual(spec, blocks, writable)
    if usual is not None:
        return usual
    if isinstance(spec, (list, tuple)):
        buf, count, displ, type_ = _unpack(spec, (tuple, list))
        try:
            memory = _memory(buf, type_, writable, bare=False)
        except Unsupported:
            _judge(spec, writable)
            raise
    else:
        buf, count, displ = spec, None, None
        memory = _memory(spec, None, writable, bare=True)
    data, left, kind, keep = memory
    offset = 0
    if displ is not None:
        displ = _long(displ)
        if displ < 0:
            raise ValueError(f"message: negative displacement {displ}")
        if displ > 0:
            extent = _extent(kind, "handle displacement")[1]
            offset = displ * extent
            if offset > left:
                raise ValueError(
                    f"message: displacement {displ} out of bounds, number of datatype entries {left // extent}"
                )
            left -= offset
    if count is not None:
        count = _long(count)
        if count < 0:
            raise ValueError(f"message: negative count {count}")
        if count > 0 and buf is None:
            raise ValueError(f"message: buffer is None but count is {count}")
    elif left > 0:
        count = _entries(left, kind)
        if blocks >= 2:
            if count % blocks:
                raise ValueError(
                    f"message: cannot infer count, number of entries {count} is not a multiple of "
                    f"required number of blocks {blocks}"
                )
            count //= blocks
    else:
        count = 0
    message = _Parsed(data + offset if offset else data, count, kind, keep)
    if kind.code < 0:
        message.why = lib.SMPI_WHY_DATATYPE
        return message
    if kind.layout is not None:
        _scatter(message, buf, data, memory.nbytes, [(count * max(blocks, 1), offset)])
        return message
    needed = message.nbytes * max(blocks, 1)
    if buf is IN_PLACE:  # to mpi4py a buffer of no bytes at MPI's own address
        message.why = lib.SMPI_WHY_LAYOUT
    elif needed == 0:
        message.data = _NOWHERE
    elif buf is BOTTOM:
        message.why = lib.SMPI_WHY_LAYOUT
    elif needed > left and not _reaches(buf, offset, offset + needed):
        times = f" in each of {blocks} blocks" if blocks > 1 else ""
        raise Error(
            MPI.ERR_COUNT,
            f"count {count}{times} needs {needed} bytes ({kind.itemsize} an element), but the buffer has {left} bytes"
            + (f" from displacement {displ} on" if offset else ""),
        )
    return message


def _scatter(message: _Parsed, buf: Any, data: Any, nbytes: int, runs: list[tuple[int, int]]) -> None:
    """Notes where the bytes of a message with gaps lie. runs: elements and bytes from `data` on.

    What leaves the memory is MPI's affair: datatypes may reach where their buffer does not.
    """
    layout = message.kind.layout
    assert layout is not None
    parts = []
    for elements, displ in runs:
        if not elements:
            continue
        low, high = (displ + bound for bound in layout.span(elements))
        if (
            buf is None
            or buf is BOTTOM
            or buf is IN_PLACE
            or ((low < 0 or high > nbytes) and not _reaches(buf, low, high))
        ):
            message.why = lib.SMPI_WHY_LAYOUT
            return
        parts.append((layout.ptr, data + displ, ffi.NULL, elements * message.itemsize))
    message.data = _NOWHERE
    if parts:
        message.parts = ffi.new(_PARTS, parts)


def _odd_runs(buf: Any, nbytes: int, itemsize: int, counts: list[int], displs: list[int]) -> int:
    """Looks at runs of which some are empty or outside of the buffer: sets the displacements of the empty ones to 0.

    Returns 0, or SMPI_WHY_LAYOUT if MPI must see to them. Raises Error for one that is outside of all memory.
    """
    for i, (count, displ) in enumerate(zip(counts, displs, strict=True)):
        low, high = displ * itemsize, (displ + count) * itemsize
        if count == 0:
            displs[i] = 0
        elif count < 0:
            raise Error(MPI.ERR_COUNT, f"negative count {count} for rank {i}")
        elif low < 0 or high > nbytes:
            if buf is None or buf is BOTTOM:
                return int(lib.SMPI_WHY_LAYOUT)
            if not _reaches(buf, low, high):
                raise Error(
                    MPI.ERR_COUNT,
                    f"count {count} at displacement {displ} for rank {i} needs bytes {low} to {high} "
                    f"({itemsize} an element), but the buffer has {nbytes} bytes",
                )
    return 0


def _parse_vector(spec: Any, size: int, writable: bool) -> Message:
    """message_vector of mpi4py. A Message with `why` set is legal but not native."""
    counts: Any = None
    displs: Any = None
    if isinstance(spec, (list, tuple)):
        buf, counts, displs, type_ = _unpack(spec, (tuple,))
        data, nbytes, kind, keep = _memory(buf, type_, writable, bare=False)
    else:
        buf = spec
        data, nbytes, kind, keep = _memory(spec, None, writable, bare=True)
    if counts is None:
        each, rest = divmod(_entries(nbytes, kind) if nbytes > 0 else 0, size)
        counts = [each + (i < rest) for i in range(size)]
    elif _is_integral(counts):
        counts = [_long(counts)] * size
    else:
        counts = _longs(counts, size)
    if displs is None:
        displs, end = [], 0
        for count in counts:
            displs.append(end)
            end += count
    elif _is_integral(displs):
        stride = _long(displs)
        displs = [stride * i for i in range(size)]
    else:
        displs = _longs(displs, size)
    message = _Parsed(data, sum(counts), kind, keep)
    if kind.code < 0 or buf is IN_PLACE:
        message.why = lib.SMPI_WHY_DATATYPE if kind.code < 0 else lib.SMPI_WHY_LAYOUT
        return message
    itemsize = kind.itemsize
    if kind.layout is not None:
        for i, count in enumerate(counts):
            if count < 0:
                raise Error(MPI.ERR_COUNT, f"negative count {count} for rank {i}")
        extent = kind.layout.extent
        _scatter(message, buf, data, nbytes, [(n, displ * extent) for n, displ in zip(counts, displs, strict=True)])
        displs = list(accumulate(counts, initial=0))[:-1]
        message.counts = ffi.new(_INT64S, [count * itemsize for count in counts])
        message.displs = ffi.new(_INT64S, [displ * itemsize for displ in displs])
        return message
    limit = nbytes // itemsize
    for count, displ in zip(counts, displs, strict=True):
        if count <= 0 or displ < 0 or displ + count > limit:
            message.why = _odd_runs(buf, nbytes, itemsize, counts, displs)
            break
    if message.nbytes == 0:
        message.data = _NOWHERE
    message.counts = ffi.new(_INT64S, [count * itemsize for count in counts])
    message.displs = ffi.new(_INT64S, [displ * itemsize for displ in displs])
    return message


def _parse_each(spec: Any, size: int, writable: bool) -> Message:
    """message_vector_w of mpi4py: `size` runs, each with a datatype of its own and a displacement in bytes. As vector form, with
    `layouts`.
    """
    n = len(spec)
    counts = displs = None
    if n == 2:
        buf, types = spec
    elif n == 3:
        buf, pair, types = spec
        counts, displs = _pair(pair) if isinstance(pair, (tuple, list)) else pair
    elif n == 4:
        buf, counts, displs, types = spec
    else:
        raise ValueError("message: expecting 2 to 4 items")
    if buf is BOTTOM:
        if counts is None:
            raise ValueError("message: BOTTOM requires counts")
        if displs is None:
            raise ValueError("message: BOTTOM requires displs")
    data, nbytes, _, keep = _memory(buf, _BYTE, writable, bare=buf is None)
    if counts is None and displs is None:
        counts, displs = [1] * size, [0] * size
    else:
        counts, displs = _longs(counts, size), _longs(displs, size)
    if len(types) != size:
        raise ValueError(f"expecting {size} items, got {len(types)}")
    kinds = []
    for i in range(size):
        if not isinstance(types[i], _Datatype):
            raise TypeError(f"Cannot convert {type(types[i]).__name__} to mpi4py.MPI.Datatype")
        kinds.append(_kind_of_datatype(types[i]))
    message = _Parsed(data, sum(counts), _kind_of_datatype(_BYTE), keep)
    for i, (kind, count, displ) in enumerate(zip(kinds, counts, displs, strict=True)):
        if count < 0:
            raise Error(MPI.ERR_COUNT, f"negative count {count} for rank {i}")
        if kind.code < 0:
            message.why = lib.SMPI_WHY_DATATYPE
        elif count:
            low, high = kind.layout.span(count) if kind.layout is not None else (0, count * kind.itemsize)
            low, high = low + displ, high + displ
            if buf is BOTTOM or ((low < 0 or high > nbytes) and not _reaches(buf, low, high)):
                message.why = lib.SMPI_WHY_LAYOUT
    message.nbytes = sum(count * kind.itemsize for count, kind in zip(counts, kinds, strict=True))
    message.counts = ffi.new(_INT64S, [count * kind.itemsize for count, kind in zip(counts, kinds, strict=True)])
    message.displs = ffi.new(_INT64S, [displ if count else 0 for count, displ in zip(counts, displs, strict=True)])
    message.layouts = ffi.new(_LAYOUTS, [ffi.NULL if kind.layout is None else kind.layout.ptr for kind in kinds])
    message.keep = (keep, kinds)
    return message


# ---------------------------------------------------------------------------------------------------------------------
# What the collectives call

_IN_PLACE = _Parsed(ffi.NULL, 0, _kind_of_datatype(MPI.BYTE), None)
_IN_PLACE.in_place = True

NOTHING = _Parsed(ffi.NULL, 0, _kind_of_datatype(MPI.BYTE), None)
"""What a rank passes on where MPI ignores the buffer: the receive side of Gather everywhere but at the root."""
NOTHING.counts = NOTHING.displs = ffi.NULL


def simple(obj: Any, writable: bool, in_place: bool = False, gaps: bool = False) -> Message:
    """One run of elements. in_place: MPI.IN_PLACE and None mean MPI.IN_PLACE here, instead of being refused.

    gaps: the caller takes messages with `parts` (packing.py); without, they are MPI's.

    Raises:
        Unsupported: legal, but for MPI.
        Error: the count runs past the memory (ERR_COUNT).
        TypeError, ValueError, KeyError, BufferError, OverflowError: as mpi4py.
    """
    if in_place and (obj is None or obj is IN_PLACE):
        return _IN_PLACE
    return _native(_parse(obj, 0, writable), gaps)


def block(obj: Any, size: int, writable: bool, in_place: bool = False, gaps: bool = False) -> Message:
    """`size` equal runs, one behind the other; count and nbytes are those of one run. Otherwise as `simple`."""
    if in_place and (obj is None or obj is IN_PLACE):
        return _IN_PLACE
    return _native(_parse(obj, size, writable), gaps)


def vector(obj: Any, size: int, writable: bool, in_place: bool = False, gaps: bool = False) -> Message:
    """`size` runs of their own counts and displacements. Otherwise as `simple`."""
    if in_place and (obj is None or obj is IN_PLACE):
        return _IN_PLACE
    return _native(_parse_vector(obj, size, writable), gaps)


def both(first: Callable[[], Message], second: Callable[[], Message]) -> tuple[Message, Message]:
    """Two sides, parsed in this order. That one is for MPI is only said when the other has been looked at too: an error of its own
    must not keep a rank from an agreement that it has begun.
    """
    verdict = None
    found = []
    for parse in (first, second):
        try:
            found.append(parse())
        except Unsupported as cannot:
            verdict = verdict or cannot
    if verdict is not None:
        raise verdict
    return found[0], found[1]


def each(obj: Any, size: int, writable: bool, in_place: bool = False) -> Message:
    """`size` runs of their own counts, displacements and datatypes: Alltoallw. `layouts` tells the gaps. Otherwise as `simple`."""
    if in_place and (obj is None or obj is IN_PLACE):
        return _IN_PLACE
    return _native(_parse_each(obj, size, writable), False)


def _native(message: Message, gaps: bool) -> Message:
    if message.why:
        raise Unsupported(message.why)
    if message.parts is not None:
        if not gaps:
            raise Unsupported(lib.SMPI_WHY_DATATYPE)
        message.data = place(message.parts)
        if not message.data:
            raise Unsupported(lib.SMPI_WHY_MEMORY)
    return message


def op_code(op: Any) -> int:
    """The SMPI_* op of a predefined op.

    Raises:
        Unsupported: an op of the user's, or one that is not for reductions.
        TypeError: no MPI.Op, as mpi4py.
    """
    if not isinstance(op, MPI.Op):
        _Comm.Allreduce(_SELF, _STOP, (None, 0, MPI.BYTE), op)  # refuses its argument before it looks at the others
    code = OP_OF.get(op.handle)
    if code is None:
        raise Unsupported(lib.SMPI_WHY_OP)
    return code


def is_users(op: Any) -> bool:
    """Whether the op is one of the user's (MPI 5.1, section 6.9.5)."""
    return isinstance(op, MPI.Op) and op != MPI.OP_NULL and not op.is_predefined


def sides(
    sendbuf: Any,
    recvbuf: Any,
    receives: bool = True,
    in_place: bool = True,
    gaps: bool = False,
    why: int = 0,
    blocks: int = 0,
) -> tuple[Message, Message]:
    """Both sides of a reduction. `gaps` as for `simple`.

    receives: False on a rank that is not the root of Reduce; recvbuf is then ignored and the second Message is the first.
    in_place: whether this operator has MPI.IN_PLACE on this rank; never where `receives` is False.
    why: the caller's own reason for MPI, for which arguments that mpi4py refuses are refused first.
    blocks: of Reduce_scatter_block, where a rank brings so many runs (in place: in recvbuf) and receives one; counts are one run's.

    Raises:
        ValueError: the two sides differ in datatype or count, as mpi4py; otherwise as `simple`.
    """
    recv: Message = _IN_PLACE
    if receives and in_place and (sendbuf is None or sendbuf is IN_PLACE):
        send: Message = _IN_PLACE
        recv = _parse(recvbuf, blocks, True)
    else:
        if receives:
            recv = _parse(recvbuf, 0, True)
        send = _parse(sendbuf, blocks, False)
    if not receives:
        recv = send
    elif send is not _IN_PLACE and not _is_listed_in_place(send):
        _same_kind(send, recv)
        if send.count != recv.count:
            raise ValueError(f"mismatch in send count {send.count} and receive count {recv.count}")
    return _both_native(send, recv, gaps, why)


def reduction(
    sendbuf: Any,
    recvbuf: Any,
    op: Any,
    receives: bool = True,
    in_place: bool = True,
    gaps: bool = False,
    blocks: int = 0,
) -> tuple[Message, Message, int]:
    """Both sides of a reduction, as `sides`, and the op's code.

    Raises:
        As `sides` and `op_code`.
    """
    code, why = _op_or_why(op)
    send, recv = sides(sendbuf, recvbuf, receives, in_place, gaps, why, blocks)
    if not recv.kind.ops >> code & 1:
        raise Unsupported(lib.SMPI_WHY_OP)
    return send, recv, code


def scattered_reduction(
    sendbuf: Any, recvbuf: Any, recvcounts: Any, op: Any, size: int, rank: int, gaps: bool = False
) -> tuple[Message, Message, list[int] | None, int]:
    """Both sides of Reduce_scatter, its counts and the op's code. In place the second Message is all that the rank brings.

    counts: elements, by rank; None where the caller gave none and the ranks learn them from each other. `gaps` as for `simple`.

    Raises:
        ValueError: the sides differ in datatype, or from the counts, as mpi4py; otherwise as `simple` and `op_code`.
    """
    code, why = _op_or_why(op)
    recv = _parse(recvbuf, 0, True)
    in_place = sendbuf is None or sendbuf is IN_PLACE
    send = _IN_PLACE if in_place else _parse(sendbuf, 0, False)
    if recvcounts is None and not in_place:
        counts = [recv.count] if size == 1 else None
    else:
        counts = _longs(recvcounts, size)
    if _is_listed_in_place(send):
        raise Unsupported(lib.SMPI_WHY_LAYOUT)
    if not in_place:
        _same_kind(send, recv)
    if counts is not None:
        total = sum(counts)
        if in_place and recv.count != total:
            raise ValueError(f"mismatch in receive count {recv.count} and sum(counts) {total}")
        if not in_place and send.count != total:
            raise ValueError(f"mismatch in send count {send.count} and sum(counts) {total}")
        if not in_place and recv.count != counts[rank]:
            raise ValueError(f"mismatch in receive count {recv.count} and counts[{rank}] {counts[rank]}")
        if min(counts) < 0:
            why = why or lib.SMPI_WHY_LAYOUT
    send, recv = _both_native(send, recv, gaps, why)
    if not recv.kind.ops >> code & 1:
        raise Unsupported(lib.SMPI_WHY_OP)
    return send, recv, counts, code


def _op_or_why(op: Any) -> tuple[int, int]:
    """The op's code, or -1 and why the native path cannot take it."""
    try:
        return op_code(op), 0
    except Unsupported as verdict:
        return -1, verdict.why


def _is_listed_in_place(send: Message) -> bool:
    """MPI.IN_PLACE in a list, [MPI.IN_PLACE, …]: mpi4py compares nothing of it with the other side, and MPI takes it."""
    return bool(send.why == lib.SMPI_WHY_LAYOUT)


def _same_kind(send: Message, recv: Message) -> None:
    if send.kind.handle != recv.kind.handle:
        raise ValueError("mismatch in send and receive MPI datatypes")


def _both_native(send: Message, recv: Message, gaps: bool, why: int) -> tuple[Message, Message]:
    if send.why or recv.why or why:
        raise Unsupported(send.why or recv.why or why)
    return _native(send, gaps), recv if recv is send else _native(recv, gaps)


# ---------------------------------------------------------------------------------------------------------------------
# The short way (cdef/array.h): plain arrays, which the runtime reads itself

_learnt: list[Any] = []  # what the runtime knows by address, and must therefore live


def _learn(obj: Any, known: int, value: int = 0) -> None:
    if lib.smpi_array_learn(id(obj), known, value) == lib.SMPI_OK:
        _learnt.append(obj)


def _teach() -> None:
    """Tells the runtime which objects are the arrays, dtypes, datatypes and ops that it may read by address.

    Only where an array's memory says what NumPy says: CPython whose objects have the common header, and the struct as documented.
    Elsewhere the runtime knows nothing, and every call takes the long way.
    """
    if sys.implementation.name != "cpython":
        return
    probe = np.ones((2, 3), order="F")
    fields = ffi.new("uint64_t[6]")
    listed = [probe, probe.dtype]
    lib.smpi_array_probe(id(probe), id(listed), fields)
    said = [probe.__array_interface__["data"][0], probe.ndim, id(probe.dtype), probe.flags.num, len(listed), id(probe)]
    if list(fields) != said:
        return
    for char in (*_DTYPES.values(), "q", "Q"):
        dtype = np.dtype(char)
        _learn(dtype, lib.SMPI_KNOWN_DTYPE, TYPE_OF_DTYPE[dtype])
    for datatype in vars(MPI).values():
        kind = _KIND_OF_ID.get(id(datatype))
        if kind is not None and kind.itemsize == SIZE_OF_TYPE[kind.code]:  # not WCHAR
            _learn(datatype, lib.SMPI_KNOWN_DATATYPE, kind.code)
    for name in _OP_NAMES:
        _learn(getattr(MPI, name), lib.SMPI_KNOWN_OP, OP_OF[getattr(MPI, name).handle])
    _learn(None, lib.SMPI_KNOWN_IN_PLACE)
    _learn(IN_PLACE, lib.SMPI_KNOWN_IN_PLACE)
    _learn(ndarray, lib.SMPI_KNOWN_NDARRAY)
    _learn(list, lib.SMPI_KNOWN_LIST)


def runs(spec: Any, size: int) -> tuple[Any, Any, Any, int] | None:
    """A vector specification in its usual forms, taken apart but not judged: buffer, counts, displs, datatype as array.h wants
    them.

    None: another form. A count that is no integer is found by cffi (TypeError, OverflowError).
    """
    if type(spec) is not list and type(spec) is not tuple:
        return None
    n = len(spec)
    datatype = None
    if n == 2:
        buf, counts = spec
    elif n == 3:
        buf, counts, datatype = spec
    elif n == 4:
        buf, counts, displs, datatype = spec
    else:
        return None
    if n != 4:
        displs = None
        if type(counts) is tuple:
            if len(counts) != 2:
                return None
            counts, displs = counts
    if type(buf) is not ndarray:
        return None
    counts = _integers(counts, size)
    displs = ffi.NULL if displs is None else _integers(displs, size)
    if counts is None or displs is None:
        return None
    return buf, counts, displs, 0 if datatype is None else id(datatype)


def _integers(values: Any, size: int) -> Any:
    """`size` integers as cffi takes them, or None."""
    if type(values) is ndarray and values.dtype.kind in "iu":
        values = values.tolist()
    if (type(values) is list or type(values) is tuple) and len(values) == size:
        try:
            return values if type(sum(values)) is int else None
        except TypeError:
            return None
    return None


_teach()
