"""Derived datatypes: from an MPI handle to the native layout of its bytes (cdef/layout.h).

A handle is taken apart once (MPI 5.1, section 5.1.13) and what was found hangs on it as an MPI attribute, so it goes when the
datatype is freed, and a later datatype with the same handle starts anew.

    blocks of one step    Step(offset, times, stride, nbytes, children)     as struct smpi_node, children as a tuple

Steps are joined as they are made: what lies side by side is one block, blocks at one distance are one step. So a subarray has a
step for each dimension that it does not take whole, whatever its size. A datatype whose bytes lie in a row from its start to its
end has no layout: it is so many bytes.

What is not taken apart goes to MPI: darray, datatypes of more than `MOST` blocks or steps, and those that are not committed, for
which MPI has an error.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from mpi4py import MPI

from ._native import ffi, lib
from .world import world

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

MOST = 65536
"""Blocks that a datatype may list; what is left when neighbours are joined is bounded by SMPI_LAYOUT_NODES."""

# Basic types with a gap inside or behind: value, then int.
_PAIRS = {
    MPI.SHORT_INT.handle: ((0, 2), (4, 4)),
    MPI.LONG_INT.handle: ((0, 8), (8, 4)),
    MPI.DOUBLE_INT.handle: ((0, 8), (8, 4)),
    MPI.LONG_DOUBLE_INT.handle: ((0, 16), (16, 4)),
}
_Comm, _SELF = MPI.Comm, MPI.COMM_SELF  # taken now: the runner puts other communicators in their place
_keyval = MPI.KEYVAL_INVALID


class Step(NamedTuple):
    """A node of a layout, with its children."""

    offset: int
    times: int
    stride: int
    nbytes: int
    children: tuple[Step, ...]


class Layout:
    """What is known of a datatype. All lengths in bytes.

    size: of one element, gaps not counted. lb, extent: as MPI has them.
    ptr: the native layout, NULL if the bytes have no gaps.
    """

    __slots__ = ("extent", "lb", "ptr", "size")

    def __init__(self, size: int, lb: int, extent: int, ptr: Any) -> None:
        self.size = size
        self.lb = lb
        self.extent = extent
        self.ptr = ptr

    def span(self, elements: int) -> tuple[int, int]:
        """Where the bytes of so many elements (>= 1) lie, from the buffer's address on; with gaps only."""
        bounds = ffi.new("int64_t[2]")
        lib.smpi_layout_span(self.ptr, elements, bounds, bounds + 1)
        return bounds[0], bounds[1]


class _NotTaken(Exception):
    """This datatype is MPI's. Never seen outside."""


def _repeat(step: Step | None, count: int, stride: int) -> Step | None:
    """`count` times the step. None stands for no bytes."""
    if step is None or count == 0:
        return None
    if count == 1:
        return step
    offset, times, inner, nbytes, children = step
    if times == 1 and stride == nbytes and not children:
        return Step(offset, 1, 0, count * nbytes, ())
    if times == 1 or stride == times * inner:
        return Step(offset, count * times, stride if times == 1 else inner, count * nbytes, children)
    return Step(0, count, stride, count * nbytes, (step,))


def _join(steps: Iterable[tuple[int, Step | None]]) -> Step | None:
    """Steps at their offsets, one after the other."""
    joined: list[Step] = []
    for offset, step in steps:
        if step is None:
            continue
        moved = step._replace(offset=step.offset + offset)
        last = joined[-1] if joined else None
        if last and not last.children and not moved.children and last.times == moved.times == 1:
            if moved.offset == last.offset + last.nbytes:
                joined[-1] = last._replace(nbytes=last.nbytes + moved.nbytes)
                continue
        joined.append(moved)
    if len(joined) <= 1:
        return joined[0] if joined else None
    first, stride = joined[0], joined[1].offset - joined[0].offset
    if all(step == first._replace(offset=first.offset + i * stride) for i, step in enumerate(joined)):
        once = first._replace(offset=0)
        again = _repeat(once, len(joined), stride)
        return again and again._replace(offset=again.offset + first.offset)
    return Step(0, 1, 0, sum(step.nbytes for step in joined), tuple(joined))


def _blocks(step: Step | None, extent: int, lengths: Sequence[int], offsets: Sequence[int]) -> Step | None:
    """Blocks of elements, as the indexed constructors have them; offsets in bytes."""
    if len(lengths) > MOST:
        raise _NotTaken
    return _join((offset, _repeat(step, n, extent)) for n, offset in zip(lengths, offsets, strict=True))


def _steps(datatype: MPI.Datatype) -> Step | None:
    """The steps of a datatype (MPI 5.1, section 5.1.2 and on). Frees what MPI handed out on the way.

    Raises:
        _NotTaken: MPI's affair.
    """
    base, combiner, values = datatype.decode()
    if base is datatype or datatype.is_predefined:
        return _basic(datatype)
    bases = values["datatypes"] if combiner == "STRUCT" else [base]
    try:
        if combiner == "STRUCT":
            if len(bases) > MOST:
                raise _NotTaken
            return _join(
                (offset, _repeat(_steps(each), n, each.Get_extent()[1]))
                for each, n, offset in zip(bases, values["blocklengths"], values["displacements"], strict=True)
            )
        return _constructed(combiner, values, _steps(base), base.Get_extent()[1])
    finally:
        for each in bases:
            if not each.is_predefined:
                each.Free()


def _basic(datatype: MPI.Datatype) -> Step | None:
    size = datatype.Get_size()
    pair = _PAIRS.get(datatype.handle)
    if pair:
        return _join((offset, Step(0, 1, 0, nbytes, ())) for offset, nbytes in pair)
    if datatype.Get_extent() != (0, size):
        raise _NotTaken
    return Step(0, 1, 0, size, ()) if size else None


def _constructed(combiner: str, values: dict[str, Any], step: Step | None, extent: int) -> Step | None:
    """One step of construction around `step`, whose datatype has that extent."""
    if combiner in ("DUP", "RESIZED"):
        return step
    if combiner == "CONTIGUOUS":
        return _repeat(step, values["count"], extent)
    if combiner in ("VECTOR", "HVECTOR"):
        stride = values["stride"] * (extent if combiner == "VECTOR" else 1)
        return _repeat(_repeat(step, values["blocklength"], extent), values["count"], stride)
    if combiner in ("INDEXED", "HINDEXED", "INDEXED_BLOCK", "HINDEXED_BLOCK"):
        unit = 1 if combiner.startswith("H") else extent
        offsets = [displacement * unit for displacement in values["displacements"]]
        lengths = values["blocklengths"] if "BLOCK" not in combiner else [values["blocklength"]] * len(offsets)
        return _blocks(step, extent, lengths, offsets)
    if combiner == "SUBARRAY":
        dimensions = list(zip(values["sizes"], values["subsizes"], values["starts"], strict=True))
        if values["order"] == MPI.ORDER_C:
            dimensions.reverse()
        start = 0
        for size, subsize, first in dimensions:  # the densest first
            step = _repeat(step, subsize, extent)
            start += first * extent
            extent *= size
        return step and step._replace(offset=step.offset + start)
    raise _NotTaken


def _flatten(root: Step) -> Any:
    """The steps as struct smpi_node[], children behind their parents.

    Raises:
        _NotTaken: too many.
    """
    rows: list[list[int]] = []
    queue = [root]
    for step in queue:
        if len(queue) + len(step.children) > lib.SMPI_LAYOUT_NODES:
            raise _NotTaken
        rows.append([step.offset, step.times, step.stride, step.nbytes, len(queue), len(step.children)])
        queue += step.children
    return ffi.new("struct smpi_node[]", rows)


def _is_committed(datatype: MPI.Datatype) -> bool:
    """MPI has no question for it, but an operator of no elements refuses a datatype that is not. Pack would do as well, but
    mpi4py divides by the extent there.
    """
    nothing = [None, 0, datatype]
    try:
        _Comm.Allgather(_SELF, nothing, nothing)
    except MPI.Exception:
        return False
    return True


def _free(layout: Any) -> None:
    lib.smpi_layout_free(world().ptr, layout)


def _free_block(found: Any) -> None:
    lib.smpi_heap_free(world().ptr, found)


def block(nbytes: int) -> Any:
    """Memory in the heap as a `char *`, which owns it; NULL if there is none."""
    found = ffi.cast("char *", lib.smpi_heap_alloc(world().ptr, nbytes, 0))
    return ffi.gc(found, _free_block) if found else found


def place(parts: Any) -> Any:
    """As `block`, for all of a `struct smpi_part[]`, one behind the other."""
    at = found = block(sum(part.bytes for part in parts))
    for part in parts if found else ():
        part.packed = at
        at += part.bytes
    return found


def _take_apart(datatype: MPI.Datatype) -> Layout | None:
    step = _steps(datatype)
    size, (lb, extent) = datatype.Get_size(), datatype.Get_extent()
    if step is None:
        raise _NotTaken
    if (step.offset, step.times, step.nbytes, step.children, lb, extent) == (0, 1, size, (), 0, size):
        return Layout(size, lb, extent, ffi.NULL)
    nodes = _flatten(step)
    ptr = lib.smpi_layout_new(world().ptr, nodes, len(nodes), extent) if world().ready else ffi.NULL
    return Layout(size, lb, extent, ffi.gc(ptr, _free)) if ptr else None


def layout_of(datatype: MPI.Datatype) -> Layout | None:
    """The layout of a derived datatype, or of a basic one that has no SMPI_* type. None: it goes to MPI. Local."""
    global _keyval
    if _keyval == MPI.KEYVAL_INVALID:
        _keyval = MPI.Datatype.Create_keyval()
    known: Any = datatype.Get_attr(_keyval)
    if known is None and _is_committed(datatype):
        try:
            known = _take_apart(datatype)
        except _NotTaken:
            known = False
        if known is not None:  # there was memory
            datatype.Set_attr(_keyval, known)
    return known or None
