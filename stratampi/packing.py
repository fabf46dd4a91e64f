"""Messages with gaps: the runtime's operators see memory without gaps (`Message.data`), filled before them and emptied after.

    load(send, recv)        what is sent is packed; in place, what is received as well
    the operator
    store(status, recv)     what was received goes where it belongs; bytes in the gaps are not written

A message without gaps passes untouched. None stands for a side that this rank does not have.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ._native import ffi, lib

if TYPE_CHECKING:
    from .buffers import Message


def parts(send: Message | None, recv: Message | None) -> tuple[Any, int, Any, int]:
    """What is to be packed, how many, what is to be unpacked, how many: the arguments of smpi_plan_parts."""
    into = recv.parts if recv is not None else None
    out = None if send is None else into if send.in_place else send.parts
    return (
        *((out, len(out)) if out is not None else (ffi.NULL, 0)),
        *((into, len(into)) if into is not None else (ffi.NULL, 0)),
    )


def load(send: Message | None, recv: Message | None) -> None:
    """Before the operator."""
    out, count, _, _ = parts(send, recv)
    if count:
        lib.smpi_pack(out, count)


def store(status: int, recv: Message) -> None:
    """After the operator. Does nothing unless that has gone well."""
    if recv.parts is not None and status == lib.SMPI_OK:
        lib.smpi_unpack(recv.parts, len(recv.parts))
