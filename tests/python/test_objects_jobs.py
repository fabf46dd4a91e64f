"""Objects when the heap has no room: jobs of their own, started by one process."""

from typing import Any

# First the objects do not fit, then the stages do not: the same results, by way of MPI in the end.
FULL = """
import numpy as np, stratampi
from stratampi import MPI
comm = MPI.COMM_WORLD
comm.Barrier()  # opens the communicator
hoard = []
size = 1 << 22
while size >= 1 << 12:
    try:
        hoard.append(stratampi.empty(size, np.uint8))
    except MemoryError:
        size >>= 1
for length in (1000, 40_000, 500_000):
    x = np.arange(length) + comm.rank
    stream = bytes(length * 8)
    assert all(np.array_equal(got, np.arange(length) + r) for r, got in enumerate(comm.allgather(x)))
    assert all(np.array_equal(got, np.arange(length) + r) for r, got in enumerate(comm.alltoall([x] * comm.size)))
    assert np.array_equal(comm.bcast(x, 1), np.arange(length) + 1)
    assert comm.allgather(stream) == [stream] * comm.size
    assert comm.alltoall([stream] * comm.size) == [stream] * comm.size
    assert comm.scatter([stream] * comm.size) == stream
    assert not stratampi.is_registered(comm.bcast(x)) or length * 8 < MPI.pickle.THRESHOLD
if comm.rank == 0:
    calls = stratampi.stats()["calls"]
    print(calls["allgatherv"]["mpi"], calls["alltoallv"]["mpi"])
"""


def test_full_heap(mpirun: Any) -> None:
    done = mpirun(2, FULL, env={"STRATAMPI_HEAP_MAX": "16M"})
    assert done.returncode == 0, done.stderr
    assert all(int(times) > 0 for times in done.stdout.split())
    assert done.stdout
