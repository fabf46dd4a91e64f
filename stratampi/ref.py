"""What every collective means, in NumPy: the reference the tests compare with.

Every function takes a list with one entry per rank (what that rank passes) and returns a list with one entry per rank
(what that rank receives; None where MPI leaves the receive buffer alone). Inputs are never written to, results are
fresh arrays. Counts and displacements are in elements. Nothing here is fast; each function is meant to be read next to
the section of the MPI standard it cites (MPI 5.1, chapter 6).

Reductions combine in rank order, ((x0 op x1) op x2) ..., with the exact semantics of the native kernels, so results
can be compared bit for bit: integers wrap; MAX and MIN keep the earlier rank's value unless the later one is strictly
beyond it, which decides about NaN and the sign of zero; LAND, LOR and LXOR give 0 or 1 in the operands' type; complex
products are the plain four multiplications; float16 and bfloat16 accumulate in float32 and are rounded once. One
rank's contribution alone comes back as it is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Array = NDArray[Any]

ARITHMETIC = ("SUM", "PROD")
ORDER = ("MAX", "MIN")
LOGICAL = ("LAND", "LOR", "LXOR")
BITWISE = ("BAND", "BOR", "BXOR")


def is_half(dtype: np.dtype[Any]) -> bool:
    """True for the 16-bit floats: float16, and ml_dtypes' bfloat16 (a NumPy dtype of kind V)."""
    return dtype.name in ("float16", "bfloat16")


def is_legal(dtype: np.dtype[Any], op: str) -> bool:
    """Whether MPI defines op ("SUM", ...) for elements of this dtype (MPI 5.1, section 6.9.2)."""
    if is_half(dtype) or dtype.kind == "f":
        return op in ARITHMETIC + ORDER
    if dtype.kind in "iu":
        return op in ARITHMETIC + ORDER + LOGICAL + BITWISE
    return (dtype.kind == "c" and op in ARITHMETIC) or (dtype.kind == "b" and op in LOGICAL)


def _product(acc: Array, x: Array) -> Array:
    if acc.dtype.kind != "c":
        return acc * x
    # Spelled out, because NumPy's own complex loops may fuse a multiplication into the sum and round differently.
    result = np.empty_like(acc)
    result.real = acc.real * x.real - acc.imag * x.imag
    result.imag = acc.real * x.imag + acc.imag * x.real
    return result


_COMBINE: dict[str, Callable[[Array, Array], Array]] = {
    "SUM": lambda acc, x: acc + x,
    "PROD": _product,
    "MAX": lambda acc, x: np.where(x > acc, x, acc),
    "MIN": lambda acc, x: np.where(x < acc, x, acc),
    "LAND": lambda acc, x: ((acc != 0) & (x != 0)).astype(acc.dtype),
    "LOR": lambda acc, x: ((acc != 0) | (x != 0)).astype(acc.dtype),
    "LXOR": lambda acc, x: ((acc != 0) ^ (x != 0)).astype(acc.dtype),
    "BAND": lambda acc, x: acc & x,
    "BOR": lambda acc, x: acc | x,
    "BXOR": lambda acc, x: acc ^ x,
}


def combine(inputs: Sequence[Array], op: str) -> Array:
    """The reduction of all inputs in order: arrays of one shape and dtype in, one such array out.

    MPI 5.1, section 6.9.2.

    Raises:
        TypeError: MPI does not define op for this dtype.
        ValueError: shapes or dtypes differ.
    """
    arrays = [np.asarray(x) for x in inputs]
    first = arrays[0]
    if any(x.shape != first.shape or x.dtype != first.dtype for x in arrays):
        raise ValueError("the ranks' arrays differ in shape or dtype")
    if not is_legal(first.dtype, op):
        raise TypeError(f"MPI does not define {op} for {first.dtype}")
    if len(arrays) == 1:
        return first.copy()
    wide = [x.astype(np.float32) for x in arrays] if is_half(first.dtype) else arrays
    with np.errstate(all="ignore"):
        acc = wide[0]
        for x in wide[1:]:
            acc = np.asarray(_COMBINE[op](acc, x))
        return acc.astype(first.dtype)


def _only_at(root: int, size: int, value: Array) -> list[Array | None]:
    return [value if rank == root else None for rank in range(size)]


def _starts(counts: Sequence[int]) -> list[int]:
    """Displacements of blocks that follow each other without gaps."""
    return [int(sum(counts[:i])) for i in range(len(counts))]


def _place(blocks: Sequence[Array], displs: Sequence[int] | None, recv: Array | None) -> Array:
    """The receive buffer after flat block i went to displs[i]; what no block covers stays as in recv, or is 0."""
    at = _starts([block.size for block in blocks]) if displs is None else displs
    if recv is None:
        recv = np.zeros(max(d + b.size for d, b in zip(at, blocks, strict=True)), blocks[0].dtype)
    out = recv.copy()
    for d, block in zip(at, blocks, strict=True):
        out[d : d + block.size] = block
    return out


def barrier(inputs: Sequence[None]) -> list[None]:
    """No rank leaves before all have entered; no data (MPI 5.1, section 6.3)."""
    return [None for _ in inputs]


def bcast(inputs: Sequence[Array | None], root: int = 0) -> list[Array]:
    """Everyone gets the root's array; the others' entries do not matter (MPI 5.1, section 6.4)."""
    return [np.array(inputs[root]) for _ in inputs]


def gather(inputs: Sequence[Array], root: int = 0) -> list[Array | None]:
    """The root gets shape (size, *shape), row r from rank r (MPI 5.1, section 6.5)."""
    return _only_at(root, len(inputs), np.stack(inputs))


def gatherv(
    inputs: Sequence[Array], root: int = 0, displs: Sequence[int] | None = None, recv: Array | None = None
) -> list[Array | None]:
    """The root gets rank r's flat block at displs[r] of recv.

    The blocks may have any lengths; displs defaults to one block after the other. MPI 5.1, section 6.5.
    """
    return _only_at(root, len(inputs), _place(inputs, displs, recv))


def scatter(inputs: Sequence[Array | None], root: int = 0) -> list[Array]:
    """Rank r gets row r of the root's array of shape (size, ...) (MPI 5.1, section 6.6)."""
    rows = np.asarray(inputs[root])
    return [np.array(rows[rank]) for rank in range(len(inputs))]


def scatterv(
    inputs: Sequence[Array | None], counts: Sequence[int], root: int = 0, displs: Sequence[int] | None = None
) -> list[Array]:
    """Rank r gets counts[r] elements from displs[r] of the root's flat array.

    displs defaults to one block after the other. MPI 5.1, section 6.6.
    """
    send = np.asarray(inputs[root])
    at = _starts(counts) if displs is None else displs
    return [send[d : d + n].copy() for d, n in zip(at, counts, strict=True)]


def allgather(inputs: Sequence[Array]) -> list[Array]:
    """gather, and everyone gets the result: shape (size, *shape) (MPI 5.1, section 6.7)."""
    return [np.stack(inputs) for _ in inputs]


def allgatherv(
    inputs: Sequence[Array], displs: Sequence[int] | None = None, recvs: Sequence[Array] | None = None
) -> list[Array]:
    """gatherv, and everyone gets the result, each in its own recvs[r] (MPI 5.1, section 6.7)."""
    return [_place(inputs, displs, None if recvs is None else recvs[rank]) for rank in range(len(inputs))]


def alltoall(inputs: Sequence[Array]) -> list[Array]:
    """Row j of rank i's array of shape (size, ...) becomes row i of rank j's result (MPI 5.1, section 6.8)."""
    return [np.stack([x[rank] for x in inputs]) for rank in range(len(inputs))]


def alltoallv(
    inputs: Sequence[Array],
    counts: Sequence[Sequence[int]],
    send_displs: Sequence[Sequence[int]] | None = None,
    recv_displs: Sequence[Sequence[int]] | None = None,
    recvs: Sequence[Array] | None = None,
) -> list[Array]:
    """Rank i sends counts[i][j] elements from send_displs[i][j] of its array, to recv_displs[j][i] at rank j.

    Displacements default to one block after the other. MPI 5.1, section 6.8.
    """
    size = len(inputs)
    sent = [scatterv([x], counts[i], 0, send_displs[i] if send_displs else None) for i, x in enumerate(inputs)]
    return [
        _place([sent[i][j] for i in range(size)], recv_displs[j] if recv_displs else None, recvs[j] if recvs else None)
        for j in range(size)
    ]


def reduce(inputs: Sequence[Array], op: str = "SUM", root: int = 0) -> list[Array | None]:
    """The root gets the reduction, of the inputs' shape (MPI 5.1, section 6.9.1)."""
    return _only_at(root, len(inputs), combine(inputs, op))


def allreduce(inputs: Sequence[Array], op: str = "SUM") -> list[Array]:
    """Everyone gets the reduction (MPI 5.1, section 6.9.6)."""
    return [combine(inputs, op) for _ in inputs]


def reduce_scatter_block(inputs: Sequence[Array], op: str = "SUM") -> list[Array]:
    """Arrays of shape (size, ...); rank r gets row r of their reduction (MPI 5.1, section 6.10.1)."""
    return [np.array(combine(inputs, op)[rank]) for rank in range(len(inputs))]


def reduce_scatter(inputs: Sequence[Array], counts: Sequence[int], op: str = "SUM") -> list[Array]:
    """Flat arrays of sum(counts) elements; rank r gets the r-th block, of counts[r] elements, of their reduction.

    MPI 5.1, section 6.10.2.
    """
    return scatterv([combine(inputs, op)], counts)


def scan(inputs: Sequence[Array], op: str = "SUM") -> list[Array]:
    """Rank r gets the reduction of ranks 0 to r (MPI 5.1, section 6.11.1)."""
    return [combine(inputs[: rank + 1], op) for rank in range(len(inputs))]


def exscan(inputs: Sequence[Array], op: str = "SUM") -> list[Array | None]:
    """Rank r gets the reduction of ranks 0 to r - 1; rank 0's is undefined, here None (MPI 5.1, section 6.11.2)."""
    return [None, *(combine(inputs[:rank], op) for rank in range(1, len(inputs)))]
