"""What the native path has done in this process: memory, paths taken, and why calls were left to MPI."""

from __future__ import annotations

from typing import Any

from ._native import ffi, lib
from .memory import heap_stats
from .world import world


def _names(count: int, name_of: Any) -> list[str]:
    return [ffi.string(name_of(i)).decode() for i in range(count)]


def stats() -> dict[str, Any]:
    """Counters since the start of the process; local, not collective.

    Returns a dict:
        driver: the fabric in use ("memfd", "window", "none"), fabric: why it is this one.
        memory: as `stratampi.memory.heap_stats()`, bytes.
        calls: operator -> path ("inline", "direct", "staged", "mpi") -> how many calls took it; operators never called are absent.
        bytes: path -> user bytes that this rank passed to such calls.
        why_not_direct: reason -> how often *this* rank asked for the path mpi (another rank's reason counts there).
    """
    here = world()
    operators = _names(lib.SMPI_OPERATOR_COUNT, lib.smpi_operator_name)
    paths = _names(lib.SMPI_PATH_COUNT, lib.smpi_path_name)
    whys = _names(lib.SMPI_WHY_COUNT, lib.smpi_why_name)
    calls = ffi.new("uint64_t[]", len(operators) * len(paths))
    passed = ffi.new("uint64_t[]", len(paths))
    why = ffi.new("uint64_t[]", len(whys))
    if here.ready:
        lib.smpi_stats(here.ptr, calls, passed, why)
    table = {
        operator: {path: calls[i * len(paths) + j] for j, path in enumerate(paths) if calls[i * len(paths) + j]}
        for i, operator in enumerate(operators)
    }
    return {
        "driver": here.driver,
        "fabric": here.why,
        "memory": heap_stats(),
        "calls": {operator: row for operator, row in table.items() if row},
        "bytes": dict(zip(paths, passed, strict=True)),
        "why_not_direct": {reason: why[i] for i, reason in enumerate(whys) if i != lib.SMPI_WHY_NOT and why[i]},
    }
