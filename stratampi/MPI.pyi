from .comm import Comm

COMM_WORLD: Comm

from mpi4py.MPI import *  # type: ignore[assignment]  # noqa: E402, F403
