"""Nonblocking and persistent collectives on the native path: what each operator plans; requests.py runs it.

A planner has the signature of mpi4py's method and returns how the runtime's request is filled and what must stay alive, or raises
Unsupported. From one planner come the I-form and the _init form.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from mpi4py import MPI

from . import buffers, packing, requests
from ._native import ffi, lib
from .buffers import Unsupported

if TYPE_CHECKING:
    from collections.abc import Callable

    Sides = tuple[buffers.Message | None, buffers.Message | None]  # send and receive
    Filled = tuple[Any, tuple[Any, ...], Sides]  # runtime function, its arguments behind the request, what it moves


def _barrier(comm: MPI.Comm) -> Filled:
    return lib.smpi_plan_barrier, (), (None, None)


def _bcast(comm: MPI.Comm, buf: Any, root: int = 0) -> Filled:
    sends = bool(root == comm.Get_rank())
    data = buffers.simple(buf, writable=not sends, gaps=True)
    return lib.smpi_plan_bcast, (data.data, data.nbytes, root), (data, None) if sends else (None, data)


def _reduce(comm: MPI.Comm, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM, root: int = 0) -> Filled:
    is_root = bool(root == comm.Get_rank())
    send, recv, code = buffers.reduction(sendbuf, recvbuf, op, receives=is_root, in_place=is_root, gaps=True)
    target = recv.data if is_root else ffi.NULL
    return (
        lib.smpi_plan_reduce,
        (send.data, target, recv.count, recv.type, code, root),
        (send, recv if is_root else None),
    )


def _allreduce(comm: MPI.Comm, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM) -> Filled:
    send, recv, code = buffers.reduction(sendbuf, recvbuf, op, gaps=True)
    return lib.smpi_plan_allreduce, (send.data, recv.data, recv.count, recv.type, code), (send, recv)


def _allgather(comm: MPI.Comm, sendbuf: Any, recvbuf: Any) -> Filled:
    recv, send = buffers.both(
        lambda: buffers.block(recvbuf, comm.Get_size(), writable=True, gaps=True),
        lambda: buffers.simple(sendbuf, writable=False, in_place=True, gaps=True),
    )
    return lib.smpi_plan_allgather, (send.data, send.nbytes, recv.data, recv.nbytes), (send, recv)


def _allgatherv(comm: MPI.Comm, sendbuf: Any, recvbuf: Any) -> Filled:
    recv, send = buffers.both(
        lambda: buffers.vector(recvbuf, comm.Get_size(), writable=True, gaps=True),
        lambda: buffers.simple(sendbuf, writable=False, in_place=True, gaps=True),
    )
    return lib.smpi_plan_allgatherv, (send.data, send.nbytes, recv.data, recv.counts, recv.displs), (send, recv)


def _alltoall(comm: MPI.Comm, sendbuf: Any, recvbuf: Any) -> Filled:
    size = comm.Get_size()
    recv, send = buffers.both(
        lambda: buffers.block(recvbuf, size, writable=True, gaps=True),
        lambda: buffers.block(sendbuf, size, writable=False, in_place=True, gaps=True),
    )
    return lib.smpi_plan_alltoall, (send.data, send.nbytes, recv.data, recv.nbytes), (send, recv)


def _alltoallv(comm: MPI.Comm, sendbuf: Any, recvbuf: Any) -> Filled:
    size = comm.Get_size()
    recv, send = buffers.both(
        lambda: buffers.vector(recvbuf, size, writable=True, gaps=True),
        lambda: buffers.vector(sendbuf, size, writable=False, in_place=True, gaps=True),
    )
    counts, displs = (ffi.NULL, ffi.NULL) if send.in_place else (send.counts, send.displs)
    return lib.smpi_plan_alltoallv, (send.data, counts, displs, recv.data, recv.counts, recv.displs), (send, recv)


def _alltoallw(comm: MPI.Comm, sendbuf: Any, recvbuf: Any) -> Filled:
    size = comm.Get_size()
    recv = buffers.each(recvbuf, size, writable=True)
    send = buffers.each(sendbuf, size, writable=False, in_place=True)
    counts, displs = (ffi.NULL, ffi.NULL) if send.in_place else (send.counts, send.displs)
    out, into = (send.data, counts, displs, send.layouts), (recv.data, recv.counts, recv.displs, recv.layouts)
    return lib.smpi_plan_alltoallw, (*out, *into), (send, recv)


def _gather(comm: MPI.Comm, sendbuf: Any, recvbuf: Any, root: int = 0) -> Filled:
    is_root = bool(root == comm.Get_rank())
    recv, send = buffers.both(
        lambda: buffers.block(recvbuf, comm.Get_size(), writable=True, gaps=True) if is_root else buffers.NOTHING,
        lambda: buffers.simple(sendbuf, writable=False, in_place=is_root, gaps=True),
    )
    return lib.smpi_plan_gather, (send.data, send.nbytes, recv.data, recv.nbytes, root), (send, recv)


def _gatherv(comm: MPI.Comm, sendbuf: Any, recvbuf: Any, root: int = 0) -> Filled:
    is_root = bool(root == comm.Get_rank())
    recv, send = buffers.both(
        lambda: buffers.vector(recvbuf, comm.Get_size(), writable=True, gaps=True) if is_root else buffers.NOTHING,
        lambda: buffers.simple(sendbuf, writable=False, in_place=is_root, gaps=True),
    )
    return lib.smpi_plan_gatherv, (send.data, send.nbytes, recv.data, recv.counts, recv.displs, root), (send, recv)


def _scatter(comm: MPI.Comm, sendbuf: Any, recvbuf: Any, root: int = 0) -> Filled:
    is_root = bool(root == comm.Get_rank())
    send, recv = buffers.both(
        lambda: buffers.block(sendbuf, comm.Get_size(), writable=False, gaps=True) if is_root else buffers.NOTHING,
        lambda: buffers.simple(recvbuf, writable=True, in_place=is_root, gaps=True),
    )
    return lib.smpi_plan_scatter, (send.data, send.nbytes, recv.data, recv.nbytes, root), (send, recv)


def _scatterv(comm: MPI.Comm, sendbuf: Any, recvbuf: Any, root: int = 0) -> Filled:
    is_root = bool(root == comm.Get_rank())
    send, recv = buffers.both(
        lambda: buffers.vector(sendbuf, comm.Get_size(), writable=False, gaps=True) if is_root else buffers.NOTHING,
        lambda: buffers.simple(recvbuf, writable=True, in_place=is_root, gaps=True),
    )
    return lib.smpi_plan_scatterv, (send.data, send.counts, send.displs, recv.data, recv.nbytes, root), (send, recv)


def _reduce_scatter_block(comm: MPI.Comm, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM) -> Filled:
    send, recv, code = buffers.reduction(sendbuf, recvbuf, op, gaps=True, blocks=comm.Get_size())
    return lib.smpi_plan_reduce_scatter_block, (send.data, recv.data, recv.count, recv.type, code), (send, recv)


def _reduce_scatter(comm: MPI.Comm, sendbuf: Any, recvbuf: Any, recvcounts: Any = None, op: MPI.Op = MPI.SUM) -> Filled:
    size, rank = comm.Get_size(), comm.Get_rank()
    send, recv, counts, code = buffers.scattered_reduction(sendbuf, recvbuf, recvcounts, op, size, rank, gaps=True)
    mine = recv.count if counts is None else counts[rank]
    table = ffi.NULL if counts is None else counts
    total = (recv if send.in_place else send).count
    return lib.smpi_plan_reduce_scatter, (send.data, total, recv.data, mine, table, recv.type, code), (send, recv)


def _scan(comm: MPI.Comm, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM) -> Filled:
    send, recv, code = buffers.reduction(sendbuf, recvbuf, op, gaps=True)
    return lib.smpi_plan_scan, (send.data, recv.data, recv.count, recv.type, code), (send, recv)


def _exscan(comm: MPI.Comm, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM) -> Filled:
    send, recv, code = buffers.reduction(sendbuf, recvbuf, op, gaps=True)
    moved = recv if comm.Get_rank() > 0 or send.in_place else None
    return lib.smpi_plan_exscan, (send.data, recv.data, recv.count, recv.type, code), (send, moved)


PLANNERS: dict[str, tuple[int, Callable[..., Filled]]] = {
    "barrier": (lib.SMPI_BARRIER, _barrier),
    "bcast": (lib.SMPI_BCAST, _bcast),
    "reduce": (lib.SMPI_REDUCE, _reduce),
    "allreduce": (lib.SMPI_ALLREDUCE, _allreduce),
    "allgather": (lib.SMPI_ALLGATHER, _allgather),
    "allgatherv": (lib.SMPI_ALLGATHERV, _allgatherv),
    "alltoall": (lib.SMPI_ALLTOALL, _alltoall),
    "alltoallv": (lib.SMPI_ALLTOALLV, _alltoallv),
    "alltoallw": (lib.SMPI_ALLTOALLW, _alltoallw),
    "gather": (lib.SMPI_GATHER, _gather),
    "gatherv": (lib.SMPI_GATHERV, _gatherv),
    "scatter": (lib.SMPI_SCATTER, _scatter),
    "scatterv": (lib.SMPI_SCATTERV, _scatterv),
    "reduce_scatter_block": (lib.SMPI_REDUCE_SCATTER_BLOCK, _reduce_scatter_block),
    "reduce_scatter": (lib.SMPI_REDUCE_SCATTER, _reduce_scatter),
    "scan": (lib.SMPI_SCAN, _scan),
    "exscan": (lib.SMPI_EXSCAN, _exscan),
}
"""Operator (mpi4py's name in lower case) -> the runtime's number for it, and its planner."""


def _plan(comm: MPI.Comm, operator: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> requests.Plan:
    """Raises mpi4py's own errors for arguments that it would refuse before it calls MPI."""
    code, planner = PLANNERS[operator]
    try:
        function, arguments, keep = planner(comm, *args, **kwargs)
    except Unsupported as cannot:
        function, arguments, keep = (
            lib.smpi_plan_mpi,
            (code, _root_of(operator, args, kwargs), cannot.why),
            (None, None),
        )
    mpi = getattr(MPI.Intracomm, "I" + operator)
    parts = packing.parts(*keep)

    def fill(request: Any) -> None:
        function(request, *arguments)
        lib.smpi_plan_parts(request, *parts)

    return requests.Plan(
        fill=fill,
        keep=(keep, args, kwargs),
        fall_back=lambda duplicate: mpi(duplicate, *args, **kwargs),
    )


_ROOT_AT = {
    "bcast": 1,
    "reduce": 3,
    "gather": 2,
    "gatherv": 2,
    "scatter": 2,
    "scatterv": 2,
}  # among the positional arguments


def _root_of(operator: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    place = _ROOT_AT.get(operator, len(args))
    return kwargs.get("root", args[place] if place < len(args) else 0)


def _is_for_us(comm: MPI.Comm, operator: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """A wrong root is for MPI, which names the error at the call."""
    root = _root_of(operator, args, kwargs)
    return hasattr(root, "__index__") and 0 <= root < comm.Get_size()


def _nonblocking(operator: str) -> Any:
    original = getattr(MPI.Intracomm, "I" + operator)

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> MPI.Request:
        line = self._line()
        if line is None or not _is_for_us(self, operator, args, kwargs):
            return original(self, *args, **kwargs)  # type: ignore[no-any-return]
        return requests.start(line, _plan(self, operator, args, kwargs))

    return method


def _persistent(operator: str) -> Any:
    original = getattr(MPI.Intracomm, operator.capitalize() + "_init")
    arguments = PLANNERS[operator][1].__code__.co_argcount - 1

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> MPI.Prequest:
        line = self._line()
        if line is None or not _is_for_us(self, operator, args, kwargs):
            return original(self, *args, **kwargs)  # type: ignore[no-any-return]
        kwargs.pop("info", None)  # hints; we take none
        args = args[:arguments]
        return requests.PersistentRequest()._plan_on(line, _plan(self, operator, args, kwargs))

    return method


class Nonblocking:
    """The I- and _init forms of the collectives. `_line` is what Collectives gives: None where MPI does it all."""


for _operator in PLANNERS:
    setattr(Nonblocking, "I" + _operator, _nonblocking(_operator))
    setattr(Nonblocking, _operator.capitalize() + "_init", _persistent(_operator))
