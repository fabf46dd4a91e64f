"""The collective operators on the native path: a mixin in front of mpi4py's communicator classes.

Every operator is the same three moves. Parse: contiguous NumPy arrays at once, everything else through `buffers`, which raises mpi4py's
own errors before a peer is concerned. Call: the runtime lets all ranks agree on the path. Finish: an error status is raised; the
status SMPI_MPI means that all ranks call mpi4py's own method now, and so we do.

    ctx          the runtime's communicator; None until the first collective, False where there is none (one rank, ranks of several
                 supernodes, fabric refused)

The runtime's communicator belongs to the MPI handle, not to the Python object: it hangs on the handle as an MPI attribute, and
freeing the handle by any means closes it.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from mpi4py import MPI

from . import buffers
from ._native import ffi, lib
from .buffers import CHARS, OP_OF, TYPE_OF_DTYPE, Unsupported
from .errors import check
from .world import world

# What each rank tells the others when a communicator is opened: the supernode's token, its rank there, its gate's address.
_CARD = struct.Struct("=16siQ")
_NO_TOKEN = bytes(16)

_MPI = lib.SMPI_MPI


def _close(_handle: MPI.Comm, _keyval: int, ctx: Any) -> None:
    if ctx:
        lib.smpi_comm_close(ctx)


_keyval = MPI.KEYVAL_INVALID


def _attribute() -> int:
    """The MPI attribute key (MPI 5.1, section 7.7) under which the runtime's communicator hangs; not copied by Dup."""
    global _keyval
    if _keyval == MPI.KEYVAL_INVALID:
        _keyval = MPI.Comm.Create_keyval(None, _close)
    return _keyval


def _new_context(comm: MPI.Comm) -> Any:
    """Collective: the runtime's communicator over `comm`'s ranks, or False if they are not all members of one started supernode."""
    size = comm.Get_size()
    if size == 1:
        return False
    here = world()
    ctx = lib.smpi_comm_new(here.ptr, comm.Get_rank(), size) if here.ready else ffi.NULL
    mine = _CARD.pack(here.token if ctx else _NO_TOKEN, here.rank, lib.smpi_comm_gate(ctx) if ctx else 0)
    everyone = bytearray(_CARD.size * size)
    MPI.Comm.Allgather(comm, mine, everyone)
    tokens, members, gates = zip(*_CARD.iter_unpack(everyone), strict=True)
    if tokens[0] != _NO_TOKEN and len(set(tokens)) == 1:
        check(lib.smpi_comm_open(ctx, ffi.new("int32_t[]", members), ffi.new("uint64_t[]", gates)))
        return ctx
    _close(comm, 0, ctx)
    return False


class Collectives:
    """Overrides mpi4py's collectives; what it cannot do goes to the next class in line, which is mpi4py's.

    Buffers are mpi4py's buffer specifications. Errors, beside mpi4py's own: `stratampi.errors.Error` with class ERR_TRUNCATE on all
    ranks if their arguments do not fit together and ERR_BUFFER if some rank's buffers overlap (nothing is written then and
    the communicator stays usable); KeyboardInterrupt out of a wait (the communicator is then revoked).
    """

    _ctx: Any = None

    def _open(self: Any) -> Any:
        """Collective on the handle's first use; later it finds what is there."""
        ctx = self._ctx
        if ctx is None:
            ctx = self.Get_attr(_attribute())
            if ctx is None:
                ctx = _new_context(self)
                self.Set_attr(_attribute(), ctx)
            self._ctx = ctx
        return ctx

    def _run(self: Any, operator: int, call: Callable[[], int], mpi: Callable[[], None], root: int = 0) -> None:
        """Parse and call; where this rank cannot, tell the others; finish."""
        try:
            status = call()
        except Unsupported as unsupported:
            status = lib.smpi_needs_mpi(self._ctx, operator, root, unsupported.why)
        if status:
            self._finish(status, mpi)

    def _finish(self: Any, status: int, mpi: Callable[[], None]) -> None:
        """What an operator's status other than SMPI_OK asks for."""
        if status == _MPI:
            mpi()
        else:
            check(status, self)

    def Barrier(self: Any) -> None:
        """All ranks wait for each other (MPI 5.1, section 6.3)."""
        ctx = self._ctx or self._open()
        if not ctx:
            return super().Barrier()
        status = lib.smpi_barrier(ctx)
        if status:
            self._finish(status, super().Barrier)

    def Bcast(self: Any, buf: Any, root: int = 0) -> None:
        """The root's `buf` to everybody's (MPI 5.1, section 6.4)."""
        ctx = self._ctx or self._open()
        if not ctx:
            return super().Bcast(buf, root)
        mpi = super().Bcast

        def call() -> int:
            data = buffers.simple(buf, writable=root != self.Get_rank())
            return int(lib.smpi_bcast(ctx, data.data, data.nbytes, root))

        self._run(lib.SMPI_BCAST, call, lambda: mpi(buf, root), root)

    def Reduce(self: Any, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM, root: int = 0) -> None:
        """`op` over all ranks' `sendbuf`, element by element in rank order, to the root's `recvbuf` (MPI 5.1, section 6.9.1)."""
        ctx = self._ctx or self._open()
        if not ctx:
            return super().Reduce(sendbuf, recvbuf, op, root)
        mpi = super().Reduce
        is_root = root == self.Get_rank()

        def call() -> int:
            send, recv, code = buffers.reduction(sendbuf, recvbuf, op, receives=is_root, in_place=is_root)
            target = recv.data if is_root else ffi.NULL
            return int(lib.smpi_reduce(ctx, send.data, target, recv.count, recv.type, code, root))

        self._run(lib.SMPI_REDUCE, call, lambda: mpi(sendbuf, recvbuf, op, root), root)

    def Allreduce(self: Any, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM) -> None:
        """`op` over all ranks' `sendbuf`, element by element in rank order, to every `recvbuf` (MPI 5.1, section 6.9.6)."""
        ctx = self._ctx or self._open()
        if not ctx:
            return super().Allreduce(sendbuf, recvbuf, op)
        mpi = super().Allreduce

        def call() -> int:
            send, recv, code = buffers.reduction(sendbuf, recvbuf, op)
            return int(lib.smpi_allreduce(ctx, send.data, recv.data, recv.count, recv.type, code))

        self._run(lib.SMPI_ALLREDUCE, call, lambda: mpi(sendbuf, recvbuf, op))

    def Allgather(self: Any, sendbuf: Any, recvbuf: Any) -> None:
        """Everybody's `sendbuf` to everybody, one block a rank (MPI 5.1, section 6.7)."""
        ctx = self._ctx or self._open()
        if not ctx:
            return super().Allgather(sendbuf, recvbuf)
        mpi = super().Allgather

        def call() -> int:
            recv = buffers.block(recvbuf, self.Get_size(), writable=True)
            send = buffers.simple(sendbuf, writable=False, in_place=True)
            return int(lib.smpi_allgather(ctx, send.data, send.nbytes, recv.data, recv.nbytes))

        self._run(lib.SMPI_ALLGATHER, call, lambda: mpi(sendbuf, recvbuf))

    def Allgatherv(self: Any, sendbuf: Any, recvbuf: Any) -> None:
        """Everybody's `sendbuf` to everybody, blocks of different lengths (MPI 5.1, section 6.7)."""
        ctx = self._ctx or self._open()
        if not ctx:
            return super().Allgatherv(sendbuf, recvbuf)
        mpi = super().Allgatherv

        def call() -> int:
            recv = buffers.vector(recvbuf, self.Get_size(), writable=True)
            send = buffers.simple(sendbuf, writable=False, in_place=True)
            return int(lib.smpi_allgatherv(ctx, send.data, send.nbytes, recv.data, recv.counts, recv.displs))

        self._run(lib.SMPI_ALLGATHERV, call, lambda: mpi(sendbuf, recvbuf))

    def Alltoall(self: Any, sendbuf: Any, recvbuf: Any) -> None:
        """Block d of rank s's `sendbuf` to block s of rank d's `recvbuf` (MPI 5.1, section 6.8)."""
        ctx = self._ctx or self._open()
        if not ctx:
            return super().Alltoall(sendbuf, recvbuf)
        mpi = super().Alltoall

        def call() -> int:
            size = self.Get_size()
            recv = buffers.block(recvbuf, size, writable=True)
            send = buffers.block(sendbuf, size, writable=False, in_place=True)
            if send.in_place:
                raise Unsupported(lib.SMPI_WHY_LAYOUT)
            return int(lib.smpi_alltoall(ctx, send.data, send.nbytes, recv.data, recv.nbytes))

        self._run(lib.SMPI_ALLTOALL, call, lambda: mpi(sendbuf, recvbuf))

    def Alltoallv(self: Any, sendbuf: Any, recvbuf: Any) -> None:
        """As Alltoall, with blocks of different lengths (MPI 5.1, section 6.8)."""
        ctx = self._ctx or self._open()
        if not ctx:
            return super().Alltoallv(sendbuf, recvbuf)
        mpi = super().Alltoallv

        def call() -> int:
            size = self.Get_size()
            recv = buffers.vector(recvbuf, size, writable=True)
            send = buffers.vector(sendbuf, size, writable=False, in_place=True)
            if send.in_place:
                raise Unsupported(lib.SMPI_WHY_LAYOUT)
            return int(
                lib.smpi_alltoallv(ctx, send.data, send.counts, send.displs, recv.data, recv.counts, recv.displs)
            )

        self._run(lib.SMPI_ALLTOALLV, call, lambda: mpi(sendbuf, recvbuf))
