"""The collective operators on the native path: a mixin in front of mpi4py's communicator classes."""

from __future__ import annotations

from typing import Any


class Collectives:
    """Overrides mpi4py's collectives; what it cannot do goes to the next class in line, which is mpi4py's."""

    _ctx: Any = None
