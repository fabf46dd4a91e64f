"""The collective operators on the native path: a mixin in front of mpi4py's communicator classes.

Every operator is the same three moves. Call: the runtime reads plain arrays itself, lets all ranks agree on the path and mostly
does it all. Parse, where the arguments are anything else: `buffers` understands them, or raises mpi4py's own errors before a peer
is concerned; a rank that cannot go on natively says so to the others instead of calling. Finish: an error is raised on all ranks;
SMPI_MPI means that all ranks call mpi4py's method now, and so we do.

    ctx          the runtime's communicator; None until the first collective, False where there is none (ranks of several
    supernodes,
                 fabric refused)

The runtime's communicator belongs to the MPI handle, not to the Python object: it hangs on the handle as an MPI attribute, and
freeing the handle by any means closes it.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

from mpi4py import MPI

from . import buffers, packing, userops
from ._native import ffi, lib
from .buffers import Unsupported, runs
from .errors import check
from .requests import Line
from .world import world

# What each rank tells the others when a communicator is opened: the supernode's token, its rank there, its gate's address.
_CARD = struct.Struct("=16siQ")
_NO_TOKEN = bytes(16)

_MPI, _PARSE = lib.SMPI_MPI, lib.SMPI_PARSE
_barrier, _bcast = lib.smpi_array_barrier, lib.smpi_array_bcast
_reduce, _allreduce = lib.smpi_array_reduce, lib.smpi_array_allreduce
_allgather, _allgatherv = lib.smpi_array_allgather, lib.smpi_array_allgatherv
_alltoall, _alltoallv = lib.smpi_array_alltoall, lib.smpi_array_alltoallv
_gather, _scatter = lib.smpi_array_gather, lib.smpi_array_scatter
_reduce_scatter_block = lib.smpi_array_reduce_scatter_block
_scan, _exscan = lib.smpi_array_scan, lib.smpi_array_exscan


def _close(_handle: MPI.Comm, _keyval: int, ctx: Any) -> None:
    if ctx:
        lib.smpi_comm_close(ctx)


_keyvals: list[int] = []


def _attribute(which: int) -> int:
    """The MPI attribute keys (MPI 5.1, section 7.7) of the runtime's communicator and the line of requests. Not copied by Dup."""
    if not _keyvals:
        _keyvals.extend((MPI.Comm.Create_keyval(None, _close), MPI.Comm.Create_keyval()))
    return _keyvals[which]


_CTX, _LINE = 0, 1


def _card(comm: MPI.Comm) -> tuple[Any, bytes]:
    """A new runtime communicator over `comm`'s ranks, not open yet, NULL if it cannot be; and this rank's card. Local."""
    here = world()
    ctx = lib.smpi_comm_new(here.ptr, comm.Get_rank(), comm.Get_size()) if here.ready else ffi.NULL
    if ctx:  # closed when the handle is freed; deleted when no Python object remembers it any more
        ctx = ffi.gc(ctx, lib.smpi_comm_delete)
    return ctx, _CARD.pack(here.token if ctx else _NO_TOKEN, here.rank, lib.smpi_comm_gate(ctx) if ctx else 0)


def _with_cards(ctx: Any, everyone: bytearray) -> Any:
    """Opens it with what all told; NULL on all ranks if they are not all members of one started supernode. Local."""
    tokens, members, gates = zip(*_CARD.iter_unpack(everyone), strict=True)
    if tokens[0] != _NO_TOKEN and len(set(tokens)) == 1:
        check(lib.smpi_comm_open(ctx, ffi.new("int32_t[]", members), ffi.new("uint64_t[]", gates)))
        return ctx
    if ctx:
        lib.smpi_comm_close(ctx)
    return ffi.NULL


def _new_context(comm: MPI.Comm) -> Any:
    """Collective: the runtime's communicator over `comm`'s ranks, or NULL."""
    ctx, mine = _card(comm)
    everyone = bytearray(_CARD.size * comm.Get_size())
    MPI.Comm.Allgather(comm, mine, everyone)
    return _with_cards(ctx, everyone)


def _opening(comm: MPI.Comm) -> Callable[[], tuple[Any, MPI.Comm] | None]:
    """Collective, but waits for nobody: begins to make what a line of requests needs; the callable says when it is there."""
    plain = MPI.Intracomm(comm)
    ctx, mine = _card(comm)
    everyone = bytearray(_CARD.size * comm.Get_size())
    gathering = MPI.Comm.Iallgather(plain, [mine, MPI.BYTE], [everyone, MPI.BYTE])
    duplicate, duplicating = MPI.Comm.Idup(plain)

    def look() -> tuple[Any, MPI.Comm] | None:
        if MPI.Request.Test(gathering) and MPI.Request.Test(duplicating):
            return _with_cards(ctx, everyone), duplicate
        return None

    return look


if TYPE_CHECKING:
    from collections.abc import Callable

    _Base = MPI.Intracomm  # what comes next in line
else:
    _Base = object


class Collectives(_Base):
    """Overrides mpi4py's collectives; what it cannot do goes to the next class in line, which is mpi4py's.

    Buffers are mpi4py's buffer specifications. Errors, beside mpi4py's own: `stratampi.errors.Error` with class ERR_TRUNCATE on all
    ranks if their arguments do not fit together and ERR_BUFFER if some rank's buffers overlap (nothing is written then and
    the communicator stays usable); KeyboardInterrupt out of a wait (the communicator is then revoked).
    """

    _ctx: Any = ffi.NULL
    _is_open = False
    _requests: Any = None

    def _open(self) -> Any:
        """The runtime's communicator, or NULL. Collective on the handle's first use; later it finds what is there."""
        if not self._is_open or (
            self._ctx and lib.smpi_comm_is_closed(self._ctx)
        ):  # by another object with this handle
            ctx = self.Get_attr(_attribute(_CTX))
            if ctx is None:
                ctx = _new_context(self)
                self.Set_attr(_attribute(_CTX), ctx)
            self._ctx, self._is_open = ctx, True
        return self._ctx

    def _line(self) -> Line | None:
        """Where nonblocking operators stand in line; None where all of them are MPI's. Collective on first use, not blocking."""
        line = self._requests
        if line is None:
            line = self.Get_attr(_attribute(_LINE))
            if line is None:
                ctx = self.Get_attr(_attribute(_CTX))
                if MPI.Query_thread() < MPI.THREAD_MULTIPLE or (ctx is not None and not ctx):
                    line = False  # without threads nobody could move the line while MPI blocks
                else:
                    line = Line(_opening(self))
                self.Set_attr(_attribute(_LINE), line)
            self._requests = line
        return line or None

    def _end(self) -> None:
        """The handle is about to be freed; with it goes the runtime's communicator."""
        line = self.Get_attr(_attribute(_LINE)) if self else None
        if isinstance(line, Line):
            line.close()

    def _forget(self) -> None:
        """The handle was freed."""
        self._ctx, self._is_open, self._requests = ffi.NULL, False, None

    def Barrier(self) -> None:
        """All ranks wait for each other (MPI 5.1, section 6.3)."""
        status = _barrier(self._ctx)
        if status == _PARSE and (ctx := self._open()):
            status = _barrier(ctx)
        if not status:
            return
        check(status, self)
        super().Barrier()

    def Bcast(self, buf: Any, root: int = 0) -> None:
        """The root's `buf` to everybody's (MPI 5.1, section 6.4)."""
        status = _bcast(self._ctx, id(buf), root)
        if status == _PARSE and (ctx := self._open()):
            try:
                sends = bool(root == self.Get_rank())
                data = buffers.simple(buf, writable=not sends, gaps=True)
                packing.load(data if sends else None, None)
                status = lib.smpi_bcast(ctx, data.data, data.nbytes, root)
                if not sends:
                    packing.store(status, data)
            except Unsupported as cannot:
                status = lib.smpi_needs_mpi(ctx, lib.SMPI_BCAST, root, cannot.why)
        if not status:
            return
        check(status, self)
        super().Bcast(buf, root)

    def Reduce(self, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM, root: int = 0) -> None:
        """`op` over all ranks' `sendbuf`, element by element in rank order, to the root's `recvbuf` (MPI 5.1, section 6.9.1)."""
        status = _reduce(self._ctx, id(sendbuf), id(recvbuf), id(op), root)
        if status == _PARSE and (ctx := self._open()):
            try:
                is_root = bool(root == self.Get_rank())
                if buffers.is_users(op):
                    size = self.Get_size()
                    status = userops.reduce(ctx, size, lib.SMPI_REDUCE, sendbuf, recvbuf, op, root, receives=is_root)
                else:
                    both = buffers.reduction(sendbuf, recvbuf, op, receives=is_root, in_place=is_root, gaps=True)
                    send, recv, code = both
                    target = recv.data if is_root else ffi.NULL
                    packing.load(send, recv if is_root else None)
                    status = lib.smpi_reduce(ctx, send.data, target, recv.count, recv.type, code, root)
                    if is_root:
                        packing.store(status, recv)
            except Unsupported as cannot:
                status = lib.smpi_needs_mpi(ctx, lib.SMPI_REDUCE, root, cannot.why)
        if not status:
            return
        check(status, self)
        super().Reduce(sendbuf, recvbuf, op, root)

    def Allreduce(self, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM) -> None:
        """`op` over all ranks' `sendbuf`, element by element in rank order, to every `recvbuf` (MPI 5.1, section 6.9.6)."""
        status = _allreduce(self._ctx, id(sendbuf), id(recvbuf), id(op))
        if status == _PARSE and (ctx := self._open()):
            try:
                if buffers.is_users(op):
                    status = userops.reduce(ctx, self.Get_size(), lib.SMPI_ALLREDUCE, sendbuf, recvbuf, op)
                else:
                    send, recv, code = buffers.reduction(sendbuf, recvbuf, op, gaps=True)
                    packing.load(send, recv)
                    status = lib.smpi_allreduce(ctx, send.data, recv.data, recv.count, recv.type, code)
                    packing.store(status, recv)
            except Unsupported as cannot:
                status = lib.smpi_needs_mpi(ctx, lib.SMPI_ALLREDUCE, 0, cannot.why)
        if not status:
            return
        check(status, self)
        super().Allreduce(sendbuf, recvbuf, op)

    def Allgather(self, sendbuf: Any, recvbuf: Any) -> None:
        """Everybody's `sendbuf` to everybody, one block a rank (MPI 5.1, section 6.7)."""
        status = _allgather(self._ctx, id(sendbuf), id(recvbuf))
        if status == _PARSE and (ctx := self._open()):
            try:
                recv, send = buffers.both(
                    lambda: buffers.block(recvbuf, self.Get_size(), writable=True, gaps=True),
                    lambda: buffers.simple(sendbuf, writable=False, in_place=True, gaps=True),
                )
                packing.load(send, recv)
                status = lib.smpi_allgather(ctx, send.data, send.nbytes, recv.data, recv.nbytes)
                packing.store(status, recv)
            except Unsupported as cannot:
                status = lib.smpi_needs_mpi(ctx, lib.SMPI_ALLGATHER, 0, cannot.why)
        if not status:
            return
        check(status, self)
        super().Allgather(sendbuf, recvbuf)

    def Allgatherv(self, sendbuf: Any, recvbuf: Any) -> None:
        """Everybody's `sendbuf` to everybody, blocks of different lengths (MPI 5.1, section 6.7)."""
        status = _PARSE
        parts = runs(recvbuf, self.Get_size())
        if parts:
            try:
                buf, counts, displs, datatype = parts
                status = _allgatherv(self._ctx, id(sendbuf), id(buf), counts, displs, datatype)
            except (TypeError, OverflowError):  # counts that are no integers
                status = _PARSE
        if status == _PARSE and (ctx := self._open()):
            try:
                recv, send = buffers.both(
                    lambda: buffers.vector(recvbuf, self.Get_size(), writable=True, gaps=True),
                    lambda: buffers.simple(sendbuf, writable=False, in_place=True, gaps=True),
                )
                packing.load(send, recv)
                status = lib.smpi_allgatherv(ctx, send.data, send.nbytes, recv.data, recv.counts, recv.displs)
                packing.store(status, recv)
            except Unsupported as cannot:
                status = lib.smpi_needs_mpi(ctx, lib.SMPI_ALLGATHERV, 0, cannot.why)
        if not status:
            return
        check(status, self)
        super().Allgatherv(sendbuf, recvbuf)

    def Alltoall(self, sendbuf: Any, recvbuf: Any) -> None:
        """Block d of rank s's `sendbuf` to block s of rank d's `recvbuf` (MPI 5.1, section 6.8)."""
        status = _alltoall(self._ctx, id(sendbuf), id(recvbuf))
        if status == _PARSE and (ctx := self._open()):
            try:
                size = self.Get_size()
                recv, send = buffers.both(
                    lambda: buffers.block(recvbuf, size, writable=True, gaps=True),
                    lambda: buffers.block(sendbuf, size, writable=False, in_place=True, gaps=True),
                )
                packing.load(send, recv)
                status = lib.smpi_alltoall(ctx, send.data, send.nbytes, recv.data, recv.nbytes)
                packing.store(status, recv)
            except Unsupported as cannot:
                status = lib.smpi_needs_mpi(ctx, lib.SMPI_ALLTOALL, 0, cannot.why)
        if not status:
            return
        check(status, self)
        super().Alltoall(sendbuf, recvbuf)

    def Alltoallv(self, sendbuf: Any, recvbuf: Any) -> None:
        """As Alltoall, with blocks of different lengths (MPI 5.1, section 6.8)."""
        status = _PARSE
        size = self.Get_size()
        sends = runs(sendbuf, size)
        receives = runs(recvbuf, size)
        if sends and receives:
            try:
                status = _alltoallv(self._ctx, id(sends[0]), *sends[1:], id(receives[0]), *receives[1:])
            except (TypeError, OverflowError):
                status = _PARSE
        if status == _PARSE and (ctx := self._open()):
            try:
                recv, send = buffers.both(
                    lambda: buffers.vector(recvbuf, size, writable=True, gaps=True),
                    lambda: buffers.vector(sendbuf, size, writable=False, in_place=True, gaps=True),
                )
                counts, displs = (ffi.NULL, ffi.NULL) if send.in_place else (send.counts, send.displs)
                packing.load(send, recv)
                status = lib.smpi_alltoallv(ctx, send.data, counts, displs, recv.data, recv.counts, recv.displs)
                packing.store(status, recv)
            except Unsupported as cannot:
                status = lib.smpi_needs_mpi(ctx, lib.SMPI_ALLTOALLV, 0, cannot.why)
        if not status:
            return
        check(status, self)
        super().Alltoallv(sendbuf, recvbuf)

    def Alltoallw(self, sendbuf: Any, recvbuf: Any) -> None:
        """As Alltoallv, with a datatype for each block and displacements in bytes (MPI 5.1, section 6.8)."""
        status = int(_MPI)
        if ctx := self._open():
            try:
                size = self.Get_size()
                recv = buffers.each(recvbuf, size, writable=True)
                send = buffers.each(sendbuf, size, writable=False, in_place=True)
                counts, displs = (ffi.NULL, ffi.NULL) if send.in_place else (send.counts, send.displs)
                out, into = (
                    (send.data, counts, displs, send.layouts),
                    (recv.data, recv.counts, recv.displs, recv.layouts),
                )
                status = lib.smpi_alltoallw(ctx, *out, *into)
            except Unsupported as cannot:
                status = lib.smpi_needs_mpi(ctx, lib.SMPI_ALLTOALLW, 0, cannot.why)
        if not status:
            return
        check(status, self)
        super().Alltoallw(sendbuf, recvbuf)

    def Gather(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> None:
        """Everybody's `sendbuf` to the root, one block a rank (MPI 5.1, section 6.5)."""
        status = _gather(self._ctx, id(sendbuf), id(recvbuf), root)
        if status == _PARSE and (ctx := self._open()):
            try:
                is_root = bool(root == self.Get_rank())
                recv, send = buffers.both(
                    lambda: (
                        buffers.block(recvbuf, self.Get_size(), writable=True, gaps=True)
                        if is_root
                        else buffers.NOTHING
                    ),
                    lambda: buffers.simple(sendbuf, writable=False, in_place=is_root, gaps=True),
                )
                packing.load(send, recv)
                status = lib.smpi_gather(ctx, send.data, send.nbytes, recv.data, recv.nbytes, root)
                packing.store(status, recv)
            except Unsupported as cannot:
                status = lib.smpi_needs_mpi(ctx, lib.SMPI_GATHER, root, cannot.why)
        if not status:
            return
        check(status, self)
        super().Gather(sendbuf, recvbuf, root)

    def Gatherv(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> None:
        """As Gather, with blocks of different lengths (MPI 5.1, section 6.5)."""
        status = _PARSE
        if ctx := self._open():
            try:
                is_root = bool(root == self.Get_rank())
                recv, send = buffers.both(
                    lambda: (
                        buffers.vector(recvbuf, self.Get_size(), writable=True, gaps=True)
                        if is_root
                        else buffers.NOTHING
                    ),
                    lambda: buffers.simple(sendbuf, writable=False, in_place=is_root, gaps=True),
                )
                packing.load(send, recv)
                status = lib.smpi_gatherv(ctx, send.data, send.nbytes, recv.data, recv.counts, recv.displs, root)
                packing.store(status, recv)
            except Unsupported as cannot:
                status = lib.smpi_needs_mpi(ctx, lib.SMPI_GATHERV, root, cannot.why)
        if not status:
            return
        check(status, self)
        super().Gatherv(sendbuf, recvbuf, root)

    def Scatter(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> None:
        """Block r of the root's `sendbuf` to rank r (MPI 5.1, section 6.6)."""
        status = _scatter(self._ctx, id(sendbuf), id(recvbuf), root)
        if status == _PARSE and (ctx := self._open()):
            try:
                is_root = bool(root == self.Get_rank())
                send, recv = buffers.both(
                    lambda: (
                        buffers.block(sendbuf, self.Get_size(), writable=False, gaps=True)
                        if is_root
                        else buffers.NOTHING
                    ),
                    lambda: buffers.simple(recvbuf, writable=True, in_place=is_root, gaps=True),
                )
                packing.load(send, recv)
                status = lib.smpi_scatter(ctx, send.data, send.nbytes, recv.data, recv.nbytes, root)
                packing.store(status, recv)
            except Unsupported as cannot:
                status = lib.smpi_needs_mpi(ctx, lib.SMPI_SCATTER, root, cannot.why)
        if not status:
            return
        check(status, self)
        super().Scatter(sendbuf, recvbuf, root)

    def Scatterv(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> None:
        """As Scatter, with blocks of different lengths (MPI 5.1, section 6.6)."""
        status = _PARSE
        if ctx := self._open():
            try:
                is_root = bool(root == self.Get_rank())
                send, recv = buffers.both(
                    lambda: (
                        buffers.vector(sendbuf, self.Get_size(), writable=False, gaps=True)
                        if is_root
                        else buffers.NOTHING
                    ),
                    lambda: buffers.simple(recvbuf, writable=True, in_place=is_root, gaps=True),
                )
                packing.load(send, recv)
                status = lib.smpi_scatterv(ctx, send.data, send.counts, send.displs, recv.data, recv.nbytes, root)
                packing.store(status, recv)
            except Unsupported as cannot:
                status = lib.smpi_needs_mpi(ctx, lib.SMPI_SCATTERV, root, cannot.why)
        if not status:
            return
        check(status, self)
        super().Scatterv(sendbuf, recvbuf, root)

    def Reduce_scatter_block(self, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM) -> None:
        """Block r of `op` over all ranks' `sendbuf` to rank r (MPI 5.1, section 6.10.1)."""
        status = _reduce_scatter_block(self._ctx, id(sendbuf), id(recvbuf), id(op))
        if status == _PARSE and (ctx := self._open()):
            try:
                send, recv, code = buffers.reduction(sendbuf, recvbuf, op, gaps=True, blocks=self.Get_size())
                packing.load(send, recv)
                status = lib.smpi_reduce_scatter_block(ctx, send.data, recv.data, recv.count, recv.type, code)
                packing.store(status, recv)
            except Unsupported as cannot:
                status = lib.smpi_needs_mpi(ctx, lib.SMPI_REDUCE_SCATTER_BLOCK, 0, cannot.why)
        if not status:
            return
        check(status, self)
        super().Reduce_scatter_block(sendbuf, recvbuf, op)

    def Reduce_scatter(self, sendbuf: Any, recvbuf: Any, recvcounts: Any = None, op: MPI.Op = MPI.SUM) -> None:
        """As Reduce_scatter_block, with blocks of different lengths (MPI 5.1, section 6.10.2).

        Without `recvcounts` each rank's `recvbuf` says how long its block is.
        """
        status = _PARSE
        if ctx := self._open():
            try:
                size, rank = self.Get_size(), self.Get_rank()
                both = buffers.scattered_reduction(sendbuf, recvbuf, recvcounts, op, size, rank, gaps=True)
                send, recv, counts, code = both
                mine = recv.count if counts is None else counts[rank]
                table = ffi.NULL if counts is None else counts
                total = (recv if send.in_place else send).count
                args = (recv.data, mine, table, recv.type, code)
                packing.load(send, recv)
                status = lib.smpi_reduce_scatter(ctx, send.data, total, *args)
                packing.store(status, recv)
            except Unsupported as cannot:
                status = lib.smpi_needs_mpi(ctx, lib.SMPI_REDUCE_SCATTER, 0, cannot.why)
        if not status:
            return
        check(status, self)
        super().Reduce_scatter(sendbuf, recvbuf, recvcounts, op)

    def Scan(self, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM) -> None:
        """`op` over the `sendbuf` of ranks 0 to r, in rank order, to rank r's `recvbuf` (MPI 5.1, section 6.11.1)."""
        status = _scan(self._ctx, id(sendbuf), id(recvbuf), id(op))
        if status == _PARSE and (ctx := self._open()):
            try:
                send, recv, code = buffers.reduction(sendbuf, recvbuf, op, gaps=True)
                packing.load(send, recv)
                status = lib.smpi_scan(ctx, send.data, recv.data, recv.count, recv.type, code)
                packing.store(status, recv)
            except Unsupported as cannot:
                status = lib.smpi_needs_mpi(ctx, lib.SMPI_SCAN, 0, cannot.why)
        if not status:
            return
        check(status, self)
        super().Scan(sendbuf, recvbuf, op)

    def Exscan(self, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM) -> None:
        """As Scan over ranks 0 to r - 1; rank 0's `recvbuf` stays as it is (MPI 5.1, section 6.11.2)."""
        status = _exscan(self._ctx, id(sendbuf), id(recvbuf), id(op))
        if status == _PARSE and (ctx := self._open()):
            try:
                send, recv, code = buffers.reduction(sendbuf, recvbuf, op, gaps=True)
                packing.load(send, recv)
                status = lib.smpi_exscan(ctx, send.data, recv.data, recv.count, recv.type, code)
                if self.Get_rank() > 0:
                    packing.store(status, recv)
            except Unsupported as cannot:
                status = lib.smpi_needs_mpi(ctx, lib.SMPI_EXSCAN, 0, cannot.why)
        if not status:
            return
        check(status, self)
        super().Exscan(sendbuf, recvbuf, op)
