"""The lower-case collectives, of any Python object: a mixin in front of mpi4py's communicator classes, beside `Collectives`.

An object becomes a message: a pickle stream and, out of band (PEP 574), the memory of its large NumPy arrays. It travels in one
to three steps, each a native operator that all ranks enter together:

    cells      one fixed-size cell from each source: what is to come, and the stream itself if it fits; mostly that is all
    streams    those that did not fit
    buffers    one after the other, from the sender's array into registered memory on which the receiver's array is built

What comes after the cells is decided from all cells, so all ranks do the same. A cell also carries root and operator, which all
ranks compare, and says so if its rank failed before it could send (an object that cannot be pickled, a wrong number of items, a
reduction that raised): then all ranks raise, that one its own exception and the others an `Error` that names it. mpi4py leaves the
others waiting.

Everything else is mpi4py's meaning (its msgpickle.pxi): every result is a copy, also the root's own; reductions run on the same
tree, so operands meet in the same order and with the same brackets; what the user did to `MPI.pickle` holds. Out of band go NumPy
arrays of MPI.pickle.THRESHOLD bytes or more, if `dumps` and `loads` are the standard ones and the protocol is 5 or newer. Buffers
of other types stay in the stream, because their reducers may count on getting bytes or bytearray back.
"""

from __future__ import annotations

import functools
import gc
import pickle
import struct
import threading
from typing import TYPE_CHECKING, Any, NamedTuple

import mpi4py
import numpy as np
from mpi4py import MPI

from . import memory
from ._native import ffi, lib
from .errors import Error, check, fail

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    _Base = MPI.Intracomm  # what comes next in line
else:
    _Base = object

# About all messages that this rank sends in this step: call, state, root, the most buffers of one. About this one: number of
# buffers, bytes of the stream (the sizes of the buffers, then the pickle), which follows if it fits, or bytes of a text.
_HEAD = struct.Struct("=BBxxiIIq")
_CELL = 1024
_BCAST_CELL = 4096  # only one is filled, so it may be larger

_FITS, _SPILLS, _LARGE, _FAILED = range(4)  # states; the first three by the longest stream
_LARGE_MIN = 64 * 1024  # bytes; from here on receivers first say that they have the memory

_CALLS = ("bcast", "gather", "scatter", "allgather", "alltoall", "reduce", "allreduce", "scan", "exscan")
_CODE = {name: code for code, name in enumerate(_CALLS)}

_PICKLE = MPI.pickle  # mpi4py's own methods keep to this object, whatever the name stands for later
_TREE = getattr(mpi4py.rc, "fast_reduce", True) in (True, "yes")
_CHUNK = 1 << 30  # bytes in one call of an MPI library that counts in int
_NOWHERE = ffi.new("char[8]")


class _Head(NamedTuple):
    call: int
    state: int
    root: int
    rounds: int
    buffers: int
    length: int


# Stream and buffers, these contiguous and one-dimensional. A plain tuple: a named one costs as much as pickling a number.
_Message = tuple[Any, "Sequence[Any]"]


class _Failure(NamedTuple):
    error: BaseException


_NOTHING: _Message = (b"", ())


def _has_known_fields() -> bool:
    """Whether mpi4py's Pickle shows its fields to the garbage collector in the order that `_out_of_band_from` reads."""
    probe = MPI.Pickle(pickle.dumps, pickle.loads, 4, 77)  # type: ignore[arg-type]  # its own default
    return gc.get_referents(probe) == [pickle.dumps, pickle.loads, 4, 77]


_KNOWN_FIELDS = _has_known_fields()


def _out_of_band_from() -> int | None:
    """The size from which arrays go out of band, None: never, the user has his own way of pickling."""
    if _KNOWN_FIELDS:
        dumps, loads, protocol, threshold = gc.get_referents(_PICKLE)
        if dumps is pickle.dumps and loads is pickle.loads and protocol >= 5:
            return threshold  # type: ignore[no-any-return]
    return None


def _dump(obj: Any) -> _Message:
    """The message for an object. Raises what its pickling raises."""
    threshold = _out_of_band_from()
    if threshold is None:
        data = _PICKLE.dumps(obj)
        if not isinstance(data, bytes):
            raise TypeError(f"expected bytes, {type(data).__name__} found")
        return (data, ())
    buffers: list[memoryview] = []

    def keep_in_stream(buffer: pickle.PickleBuffer) -> bool:
        with memoryview(buffer) as view:
            owner: object = view.obj
            if view.nbytes < threshold or type(owner) is not np.ndarray:
                return True
        buffers.append(buffer.raw())
        return False

    data = pickle.dumps(obj, _PICKLE.PROTOCOL, buffer_callback=keep_in_stream)
    if buffers:
        data = struct.pack(f"={len(buffers)}q", *(buffer.nbytes for buffer in buffers)) + data
    return (data, buffers)


def _load(message: _Message) -> Any:
    """The object of a message that has arrived. Raises what its unpickling raises."""
    stream, buffers = message
    if not stream:
        return None
    if buffers:
        stream = memoryview(stream)[8 * len(buffers) :]
    if _out_of_band_from() is not None:
        return pickle.loads(stream, buffers=buffers)  # noqa: S301  # that is what these operators are
    if buffers:  # the sender has the standard way, this rank has not
        standard = pickle.loads(stream, buffers=buffers)  # noqa: S301
        stream = pickle.dumps(standard, pickle.HIGHEST_PROTOCOL)
    return _PICKLE.loads(MPI.buffer(stream))


def _copy(message: _Message) -> Any:
    """The object of a message that this rank made, as if it had arrived."""
    rooms = [_room(buffer.nbytes) for buffer in message[1]]
    for room, buffer in zip(rooms, message[1], strict=True):
        room[:] = buffer
    return _load((message[0], rooms))


def _room(num_bytes: int) -> memoryview:
    """Memory to receive into, registered if there is room."""
    try:
        array = memory.empty(num_bytes, np.uint8)
    except MemoryError:
        array = np.empty(num_bytes, np.uint8)
    return array.data


def _try(function: Callable[..., Any], *args: Any) -> Any:
    """What the function returns, or the _Failure that the next cell will tell the others."""
    try:
        return function(*args)
    except BaseException as error:
        return _Failure(error)


def _result(value: Any) -> Any:
    if type(value) is _Failure:
        raise value.error
    return value


def _combine(op: Callable[[Any, Any], Any], a: Any, b: Any) -> Any:
    """op(a, b), or the failure of one side or of the op."""
    for value in (a, b):
        if type(value) is _Failure:
            return value
    return _try(op, a, b)


def _items(obj: Any, size: int) -> list[_Message]:
    """A message for each rank."""
    items = [None] * size if obj is None else list(obj)
    if len(items) != size:
        raise ValueError(f"expecting {size} items, got {len(items)}")
    return [_dump(item) for item in items]


def _rank_argument(root: Any) -> int:
    """A C int, from whatever mpi4py takes for one: it asks for __int__."""
    if type(root) is not int:
        convert = getattr(type(root), "__int__", None)
        if convert is None:
            raise TypeError("an integer is required")
        root = convert(root)
    if not -(1 << 31) <= root < 1 << 31:
        raise OverflowError("value too large to convert to int")
    return int(root)


def _cells(messages: Sequence[_Message], call: str, root: int, size: int = _CELL) -> bytes:
    """A cell for each message; for all of them together they say how much there is to come."""
    room = size - _HEAD.size
    rounds = longest = 0
    for stream, buffers in messages:
        rounds = max(rounds, len(buffers))
        longest = max(longest, len(stream))
    state = _FITS if longest <= room else _SPILLS if longest < _LARGE_MIN else _LARGE
    cells = []
    for stream, buffers in messages:
        head = _HEAD.pack(_CODE[call], state, root, rounds, len(buffers), len(stream))
        cells.append((head + stream if len(stream) <= room else head).ljust(size, b"\0"))
    return b"".join(cells)


def _failure_cell(failure: _Failure, call: str, root: int, size: int = _CELL) -> bytes:
    try:
        text = f"{type(failure.error).__name__}: {failure.error}"
    except Exception:
        text = type(failure.error).__name__
    encoded = text.encode("utf-8", "replace")[: size - _HEAD.size]
    return (_HEAD.pack(_CODE[call], _FAILED, root, 0, 0, len(encoded)) + encoded).ljust(size, b"\0")


def _complete(cells: Any, call: str, root: int, size: int = _CELL) -> list[_Message] | None:
    """The messages, if there are no failures, no differences and nothing to come: the usual case. None: look closer."""
    code = _CODE[call]
    view = memoryview(cells)
    messages: list[_Message] = []
    for at in range(0, len(cells), size):
        said, state, where, rounds, _, length = _HEAD.unpack_from(cells, at)
        if state != _FITS or rounds or said != code or where != root:
            return None
        at += _HEAD.size
        messages.append((view[at : at + length], ()))
    return messages


def _address(block: Any) -> int:
    return int(ffi.cast("uintptr_t", ffi.from_buffer(block)))


def _pieces(blocks: Sequence[Any]) -> tuple[Any, Any, Any]:
    """Blocks anywhere in memory as base, counts and displacements in bytes. None is an empty one."""
    counts = [0 if block is None else len(block) for block in blocks]
    places = [_address(block) if count else 0 for block, count in zip(blocks, counts, strict=True)]
    base = min(filter(None, places), default=int(ffi.cast("uintptr_t", _NOWHERE)))
    displs = [place - base if place else 0 for place in places]
    return ffi.cast("char *", base), ffi.new("int64_t[]", counts), ffi.new("int64_t[]", displs)


class _Held(threading.local):
    """The locks that this thread holds: pickling and ops are the user's code, which may communicate itself."""

    def __init__(self) -> None:
        self.locks: set[Any] = set()


_held = _Held()


def _one_at_a_time(method: Any) -> Any:
    """Threads may call the same operator on one communicator; mpi4py lets them in one after the other, by locks that it keeps with
    the communicator. These are the same locks. Where there is no native path mpi4py's own method takes them.
    """
    name = method.__name__

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not self._native():
            return method(self, *args, **kwargs)
        table = MPI._comm_lock_table(self)
        lock = table.get(name) or table.setdefault(name, threading.Lock())
        if lock in _held.locks:
            return method(self, *args, **kwargs)
        with lock:
            _held.locks.add(lock)
            try:
                return method(self, *args, **kwargs)
            finally:
                _held.locks.discard(lock)

    return call


class Objects(_Base):
    """Overrides mpi4py's collectives of objects; where the runtime has no communicator they are mpi4py's.

    Errors are mpi4py's, on the rank that has one. The others raise `stratampi.errors.Error`: ERR_OTHER if a rank could not
    send what the operator needs, ERR_TRUNCATE if operators or roots differ; MemoryError if one has no memory to receive into.
    """

    if TYPE_CHECKING:
        _ctx: Any

        def _open(self) -> Any: ...

    def _native(self) -> Any:
        """The runtime's communicator, or NULL where mpi4py's method is to be called."""
        ctx = self._ctx or self._open()
        return ctx if ctx and self.Get_size() > 1 else ffi.NULL

    # The operators.

    @_one_at_a_time
    def bcast(self, obj: Any, root: int = 0) -> Any:
        """A copy of the root's `obj` (MPI 5.1, section 6.4)."""
        ctx = self._native()
        if not ctx:
            return super().bcast(obj, root)
        root = _rank_argument(root)
        mine = _try(_dump, obj) if root == self.Get_rank() else _NOTHING
        return _load(self._broadcast(ctx, "bcast", mine, root))

    @_one_at_a_time
    def gather(self, sendobj: Any, root: int = 0) -> list[Any] | None:
        """At the root the list of copies of everybody's `sendobj`, elsewhere None (MPI 5.1, section 6.5)."""
        ctx = self._native()
        if not ctx:
            return super().gather(sendobj, root)
        root = _rank_argument(root)
        mine = _try(_dump, sendobj)
        arrived = self._exchange(ctx, "gather", mine if type(mine) is _Failure else {root: mine}, root)
        return [_load(message) for message in arrived] if root == self.Get_rank() else None

    @_one_at_a_time
    def scatter(self, sendobj: Sequence[Any] | None, root: int = 0) -> Any:
        """A copy of this rank's item of the root's `sendobj` (MPI 5.1, section 6.6)."""
        ctx = self._native()
        if not ctx:
            return super().scatter(sendobj, root)
        root = _rank_argument(root)
        mine = {}
        if root == self.Get_rank():
            mine = _try(lambda: dict(enumerate(_items(sendobj, self.Get_size()))))
        arrived = self._exchange(ctx, "scatter", mine, root)
        return _load(arrived[root])

    @_one_at_a_time
    def allgather(self, sendobj: Any) -> list[Any]:
        """The list of copies of everybody's `sendobj` (MPI 5.1, section 6.7)."""
        ctx = self._native()
        if not ctx:
            return super().allgather(sendobj)
        mine = _try(_dump, sendobj)
        cell = _failure_cell(mine, "allgather", 0) if type(mine) is _Failure else _cells([mine], "allgather", 0)
        cells = bytearray(_CELL * self.Get_size())
        status = lib.smpi_allgather(ctx, ffi.from_buffer(cell), _CELL, ffi.from_buffer(cells), _CELL)
        if status:
            check(status, self)
            MPI.Comm.Allgather(self, cell, cells)
        arrived = _complete(cells, "allgather", 0)
        if arrived is None:
            arrived = self._receive(ctx, *self._look(cells, "allgather", mine, 0), [mine], self._spread)
        return [_load(message) for message in arrived]

    @_one_at_a_time
    def alltoall(self, sendobj: Sequence[Any] | None) -> list[Any]:
        """The list of copies of everybody's item for this rank (MPI 5.1, section 6.8)."""
        ctx = self._native()
        if not ctx:
            return super().alltoall(sendobj)  # type: ignore[arg-type]  # mpi4py takes None, too
        mine = _try(lambda: dict(enumerate(_items(sendobj, self.Get_size()))))
        return [_load(message) for message in self._exchange(ctx, "alltoall", mine)]

    @_one_at_a_time
    def reduce(self, sendobj: Any, op: MPI.Op | Callable[[Any, Any], Any] = MPI.SUM, root: int = 0) -> Any | None:
        """At the root `op` over everybody's `sendobj`, in rank order, elsewhere None (MPI 5.1, section 6.9.1)."""
        ctx = self._native()
        if not ctx or not _TREE:
            return super().reduce(sendobj, op, root)
        root = _rank_argument(root)
        result = self._reduce(ctx, "reduce", sendobj, op, root)
        if root == 0:
            return _result(result) if self.Get_rank() == 0 else None
        mine: Any = {}
        if self.Get_rank() == 0:
            mine = result if type(result) is _Failure else _try(lambda: {root: _dump(result)})
        arrived = self._exchange(ctx, "reduce", mine, root)
        return _load(arrived[0]) if root == self.Get_rank() else None

    @_one_at_a_time
    def allreduce(self, sendobj: Any, op: MPI.Op | Callable[[Any, Any], Any] = MPI.SUM) -> Any:
        """A copy of `op` over everybody's `sendobj`, in rank order (MPI 5.1, section 6.9.6)."""
        ctx = self._native()
        if not ctx or not _TREE:
            return super().allreduce(sendobj, op)
        mine = result = self._reduce(ctx, "allreduce", sendobj, op, 0)
        if self.Get_rank() > 0:
            mine = _NOTHING
        elif type(result) is not _Failure:
            mine = _try(_dump, result)
        return _load(self._broadcast(ctx, "allreduce", mine, 0))

    @_one_at_a_time
    def scan(self, sendobj: Any, op: MPI.Op | Callable[[Any, Any], Any] = MPI.SUM) -> Any:
        """`op` over the `sendobj` of the ranks up to this one (MPI 5.1, section 6.11.1)."""
        ctx = self._native()
        if not ctx or not _TREE:
            return super().scan(sendobj, op)
        return self._scan(ctx, "scan", sendobj, op, inclusive=True)

    @_one_at_a_time
    def exscan(self, sendobj: Any, op: MPI.Op | Callable[[Any, Any], Any] = MPI.SUM) -> Any:
        """`op` over the `sendobj` of the ranks before this one; None on rank 0 (MPI 5.1, section 6.11.2)."""
        ctx = self._native()
        if not ctx or not _TREE:
            return super().exscan(sendobj, op)
        return self._scan(ctx, "exscan", sendobj, op, inclusive=False)

    # Reductions, as mpi4py brackets them. Every level is one exchange, in which each rank sends to one or to none.

    def _reduce(self, ctx: Any, call: str, sendobj: Any, op: Any, root: int) -> Any:
        """The result at rank 0, or a _Failure if the last op failed; elsewhere what this rank sent."""
        rank, size = self.Get_rank(), self.Get_size()
        mine = _try(_dump, sendobj)  # of a rank that sends, or of one that begins with a copy of its own
        value = mine if type(mine) is _Failure or rank % 2 else _try(_copy, mine)
        step = 1
        while step < size:
            outgoing: Any = {}
            if type(value) is _Failure:
                outgoing = value
            elif rank % (2 * step) == step:
                message = mine if step == 1 else _try(_dump, value)
                outgoing = message if type(message) is _Failure else {rank - step: message}
            arrived = self._exchange(ctx, call, outgoing, root)
            if rank % (2 * step) == 0 and rank + step < size:
                value = _combine(op, value, _try(_load, arrived[rank + step]))
            step *= 2
        return value

    def _scan(self, ctx: Any, call: str, sendobj: Any, op: Any, inclusive: bool) -> Any:
        """Result: over what lies before this rank, and at it if inclusive. Partial: over the block of ranks this one is in."""
        rank, size = self.Get_rank(), self.Get_size()
        message = _try(_dump, sendobj)
        partial = message if type(message) is _Failure else _try(_copy, message)
        result = partial if inclusive else None
        has_result = inclusive
        step = 1
        while step < size:
            peer = rank ^ step
            failed = next((value for value in (partial, result) if type(value) is _Failure), None)
            if failed is None and step > 1 and peer < size:
                message = _try(_dump, partial)
                failed = message if type(message) is _Failure else None
            arrived = self._exchange(ctx, call, failed or ({peer: message} if peer < size else {}))
            if peer < size:
                theirs = _try(_load, arrived[peer])
                if rank > peer:
                    partial = _combine(op, theirs, partial)
                    result = _combine(op, theirs, result) if has_result else theirs
                    has_result = True
                else:
                    partial = _combine(op, partial, theirs)
            step *= 2
        _result(partial)
        return _result(result)

    # How messages travel.

    def _broadcast(self, ctx: Any, call: str, mine: Any, root: int) -> _Message:
        """The root's message; mine is a _Message or a _Failure."""
        if root != self.Get_rank():
            cell: Any = bytearray(_BCAST_CELL)
        elif type(mine) is _Failure:
            cell = _failure_cell(mine, call, root, _BCAST_CELL)
        else:
            cell = _cells([mine], call, root, _BCAST_CELL)
        status = lib.smpi_bcast(ctx, ffi.from_buffer(cell), _BCAST_CELL, root)
        if status:
            check(status, self)
            MPI.Comm.Bcast(self, [cell, MPI.BYTE], root)  # raises what is to be raised about a root out of range
        arrived = _complete(cell, call, root, _BCAST_CELL)
        if arrived:
            return arrived[0]
        size = self.Get_size()
        heads = [_Head(0, 0, 0, 0, 0, 0)] * size
        streams: list[memoryview | None] = [memoryview(b"")] * size
        [heads[root]], [streams[root]] = self._look(cell, call, mine, root, _BCAST_CELL, first=root)
        return self._receive(ctx, heads, streams, [mine], self._spread, _BCAST_CELL)[root]

    def _exchange(self, ctx: Any, call: str, outgoing: Any, root: int = 0) -> list[_Message]:
        """The messages for this rank, one from each rank. outgoing: destination -> _Message (others get nothing), or a _Failure."""
        size = self.Get_size()
        sends: list[_Message] = []
        if type(outgoing) is _Failure:
            cell = _failure_cell(outgoing, call, root) * size
        else:
            sends = [outgoing.get(destination, _NOTHING) for destination in range(size)]
            cell = _cells(sends, call, root)
        cells = bytearray(_CELL * size)
        status = lib.smpi_alltoall(ctx, ffi.from_buffer(cell), _CELL, ffi.from_buffer(cells), _CELL)
        if status:
            check(status, self)
            MPI.Comm.Alltoall(self, cell, cells)
        arrived = _complete(cells, call, root)
        looked = self._look(cells, call, outgoing, root) if arrived is None else None
        if not 0 <= root < size:
            fail(MPI.Exception(MPI.ERR_ROOT), self)
        return self._receive(ctx, *looked, sends, self._swap) if looked else arrived  # type: ignore[return-value]

    def _look(
        self, cells: Any, call: str, mine: Any, root: int, size: int = _CELL, first: int = 0
    ) -> tuple[list[_Head], list[memoryview | None]]:
        """What the cells of the ranks from `first` on announce, and the streams that they hold (None: it did not fit).

        Raises if they do not fit together or if a rank failed.
        """
        heads = [_Head._make(_HEAD.unpack_from(cells, at)) for at in range(0, len(cells), size)]
        if any((head.call, head.root) != (_CODE[call], root) for head in heads):
            calls = "; ".join(f"rank {i}: {_CALLS[h.call]}(root {h.root})" for i, h in enumerate(heads, first))
            text = f"the ranks' arguments do not fit together (seen by rank {self.Get_rank()}): {calls}"
            fail(Error(MPI.ERR_TRUNCATE, text), self)
        view = memoryview(cells)
        streams: list[memoryview | None] = []
        for i, head in enumerate(heads):
            held = view[i * size + _HEAD.size : (i + 1) * size]
            streams.append(held[: head.length] if head.length <= len(held) else None)
            if head.state == _FAILED:
                if type(mine) is _Failure:
                    raise mine.error
                text = bytes(held[: head.length]).decode("utf-8", "replace")
                fail(Error(MPI.ERR_OTHER, f"{call}: rank {first + i} failed: {text}"), self)
        return heads, streams

    def _receive(
        self,
        ctx: Any,
        heads: list[_Head],
        streams: list[memoryview | None],
        outgoing: Sequence[_Message],
        move: Callable[..., None],
        size: int = _CELL,
    ) -> list[_Message]:
        """The messages that the cells announce, one from each rank. move: how what is not in the cells gets here."""
        state = max(head.state for head in heads)
        if state != _FITS:
            rank = self.Get_rank()
            late = [message[0] if len(message[0]) > size - _HEAD.size else None for message in outgoing]
            if streams[rank] is None:  # a stream is only read, so this rank's own need not be copied
                streams[rank] = late[-1]  # of _spread
                if len(late) > 1:
                    streams[rank], late[rank] = late[rank], None
            lengths = [(head.length,) if stream is None else () for head, stream in zip(heads, streams, strict=True)]
            rooms = self._rooms(ctx, lengths, state)
            move(ctx, late, [room[0] if room else None for room in rooms])
            streams = [room[0] if room else stream for room, stream in zip(rooms, streams, strict=True)]
        rounds = max(head.rounds for head in heads)
        if not rounds:
            return [(stream, ()) for stream in streams]
        sizes = [
            struct.unpack_from(f"={head.buffers}q", stream or b"") for head, stream in zip(heads, streams, strict=True)
        ]
        rooms = self._rooms(ctx, sizes, _LARGE)
        for i in range(rounds):
            sends = [message[1][i] if i < len(message[1]) else None for message in outgoing]
            move(ctx, sends, [room[i] if i < len(room) else None for room in rooms])
        return [(stream, room) for stream, room in zip(streams, rooms, strict=True)]

    def _rooms(self, ctx: Any, sizes: Sequence[Sequence[int]], state: int) -> list[list[memoryview]]:
        """Memory of these sizes. _LARGE: all ranks first make sure that everybody has it."""
        if state != _LARGE:
            return [[memoryview(bytearray(size)) for size in row] for row in sizes]
        rooms = _try(lambda: [[_room(size) for size in row] for row in sizes])
        failed = bytearray(self.Get_size())
        mine = bytes([type(rooms) is _Failure])
        status = lib.smpi_allgather(ctx, ffi.from_buffer(mine), 1, ffi.from_buffer(failed), 1)
        if status:
            check(status, self)
            MPI.Comm.Allgather(self, mine, failed)
        if any(failed):
            _result(rooms)
            raise MemoryError(f"rank {failed.index(1)} has no memory for the objects it would receive")
        return rooms  # type: ignore[no-any-return]

    def _spread(self, ctx: Any, sends: Sequence[Any], rooms: Sequence[memoryview | None]) -> None:
        """sends[0] to all ranks. rooms: one for each rank that sends, of just its size; this rank's own may be missing.

        A copy in this rank's own room is needed anyway, so what is not registered is copied there first and read from there.
        """
        [send], rank = sends, self.Get_rank()
        own = rooms[rank]
        blocks = list(rooms)
        in_place = own is None or not memory.is_registered(send)
        if own is None:
            blocks[rank] = send
        elif in_place:
            own[:] = send
        num_bytes = 0 if send is None else len(send)
        source = ffi.NULL if in_place else ffi.from_buffer(send)
        status = lib.smpi_allgatherv(ctx, source, num_bytes, *_pieces(blocks))
        if not status:
            return
        check(status, self)
        if own is not None:
            own[:] = send
        for source, block in enumerate(blocks):
            view = memoryview(block or b"")
            for at in range(0, len(view), _CHUNK):
                MPI.Comm.Bcast(self, [view[at : at + _CHUNK], MPI.BYTE], source)

    def _swap(self, ctx: Any, sends: Sequence[Any], rooms: Sequence[memoryview | None]) -> None:
        """sends[d] to rank d, the one from rank s to rooms[s]. None: nothing."""
        status = lib.smpi_alltoallv(ctx, *_pieces(sends), *_pieces(rooms))
        if not status:
            return
        check(status, self)
        send_counts, recv_counts = (
            [0 if block is None else len(block) for block in blocks] for blocks in (sends, rooms)
        )
        arrived = np.empty(sum(recv_counts), np.uint8)
        packed = np.frombuffer(b"".join(block for block in sends if block is not None), np.uint8)
        MPI.Comm.Alltoallv(self, [packed, send_counts], [arrived, recv_counts])
        at = 0
        for room in rooms:
            if room is not None:
                room[:] = arrived.data[at : at + len(room)]
                at += len(room)
