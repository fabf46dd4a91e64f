"""Reductions by ops of the user's (MPI 5.1, section 6.9.5), on any datatype.

The runtime brings every contribution to every rank that combines, and that rank applies the op itself, strictly in rank order:
((x0 op x1) op x2) …, commutative or not. MPI calls an op as inout = in op inout, so each step leaves its result in the place of the
right operand, which is the next step's left one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from . import buffers, datatypes, packing
from ._native import ffi, lib
from .buffers import Unsupported

if TYPE_CHECKING:
    from mpi4py import MPI

    from .buffers import Message


def _combine(op: MPI.Op, message: Message, contributions: Any, size: int) -> Any:
    """Where the result is: in place of the last contribution, without gaps."""
    count, datatype, nbytes = message.count, message.kind.datatype, message.nbytes
    layout = message.kind.layout
    if layout is None:
        for left in range(size - 1):
            pair = [ffi.buffer(contributions + r * nbytes, nbytes) for r in (left, left + 1)]
            op.Reduce_local([pair[0], count, datatype], [pair[1], count, datatype])
        return contributions + (size - 1) * nbytes
    low, high = layout.span(count)
    before = max(-low, 0)
    memory = [np.zeros(before + max(high, 1), np.uint8) for _ in range(2)]
    at = [ffi.from_buffer("char[]", each) + before for each in memory]
    for r in range(size):
        lib.smpi_layout_copy(layout.ptr, at[r % 2], ffi.NULL, contributions + r * nbytes, 0, nbytes)
        if r:
            op.Reduce_local(*([memory[i][before:], count, datatype] for i in (1 - r % 2, r % 2)))
    result = contributions + (size - 1) * nbytes
    lib.smpi_layout_copy(ffi.NULL, result, layout.ptr, at[(size - 1) % 2], 0, nbytes)
    return result


def reduce(
    ctx: Any, size: int, operator: int, sendbuf: Any, recvbuf: Any, op: MPI.Op, root: int = 0, receives: bool = True
) -> int:
    """The operator's status. receives: False on ranks that only contribute.

    Raises:
        Unsupported, and what mpi4py raises: as buffers.sides.
    """
    send, recv = buffers.sides(sendbuf, recvbuf, receives, in_place=receives, gaps=True)
    if send.kind.datatype is None or recv.kind.datatype is None:
        raise Unsupported(lib.SMPI_WHY_OP)  # a type that MPI does not have
    packing.load(send, recv if receives else None)
    mine = recv if send.in_place else send
    contributions = datatypes.block(size * mine.nbytes) if receives else ffi.NULL
    if receives and not contributions:
        raise Unsupported(lib.SMPI_WHY_MEMORY)
    status = int(lib.smpi_contribute(ctx, operator, root, mine.data, mine.nbytes, contributions))
    if status == lib.SMPI_OK and receives and recv.nbytes:
        ffi.memmove(recv.data, _combine(op, recv, contributions, size), recv.nbytes)
        packing.store(status, recv)
    return status
