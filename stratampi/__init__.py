"""stratampi: MPI-compatible messaging for Python, user buffer to user buffer between ranks that share memory.

    from stratampi import MPI                              # mpi4py's names, accelerated communicators
    x = stratampi.empty((4096, 7168), "bf16")              # an array that peers can reach
    mpirun -n 8 python -m stratampi train.py               # an unmodified mpi4py program

Names are loaded at first use: importing the package alone neither starts MPI nor meets the other ranks. Importing
`stratampi.MPI`, or the first allocation without it, does both, collectively over COMM_WORLD.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .comm import Comm, accelerate
    from .errors import Error
    from .memory import (
        array,
        empty,
        empty_like,
        full,
        is_registered,
        ones,
        register_numpy,
        registered,
        zeros,
        zeros_like,
    )
    from .stats import stats

__version__ = "0.1.0"

_HOME = {
    "Comm": "comm",
    "accelerate": "comm",
    "Error": "errors",
    **dict.fromkeys(
        (
            "array",
            "empty",
            "empty_like",
            "full",
            "is_registered",
            "ones",
            "register_numpy",
            "registered",
            "zeros",
            "zeros_like",
        ),
        "memory",
    ),
    "stats": "stats",
}

__all__ = [
    "Comm",
    "Error",
    "accelerate",
    "array",
    "empty",
    "empty_like",
    "full",
    "is_registered",
    "ones",
    "register_numpy",
    "registered",
    "stats",
    "zeros",
    "zeros_like",
]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{home}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
