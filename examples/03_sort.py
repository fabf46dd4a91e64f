"""Sorting numbers that are spread over all ranks: sample sort with one Alltoallv.

Every rank sorts what it has and offers a few samples; from all samples the ranks choose the same splitters; then every
rank sends each other rank the numbers that belong there. How many those are differs from pair to pair, which is what
Alltoallv is for.

Written for mpi4py; nothing in it knows about stratampi. Run it either way:

    mpirun -n 4 python examples/03_sort.py
    mpirun -n 4 python -m stratampi examples/03_sort.py
"""

import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
rank, size = comm.Get_rank(), comm.Get_size()


def offsets(counts: np.ndarray) -> np.ndarray:
    """Where each block starts when they lie one behind the other."""
    return np.concatenate(([0], np.cumsum(counts)[:-1]))


mine = np.random.default_rng(seed=rank).standard_normal(1_000_000)
mine.sort()

# Splitters: size - 1 values that cut the samples of all ranks into equal parts.
samples = np.empty((size, 64))
comm.Allgather(np.ascontiguousarray(mine[:: mine.size // 64][:64]), samples)
splitters = np.sort(samples, axis=None)[64::64][: size - 1]

# How many numbers go to each rank, and, from the others, how many come.
cuts = np.searchsorted(mine, splitters)
send_counts = np.diff(np.concatenate(([0], cuts, [mine.size]))).astype(np.int64)
recv_counts = np.empty_like(send_counts)
comm.Alltoall(send_counts, recv_counts)

received = np.empty(recv_counts.sum())
comm.Alltoallv([mine, (send_counts, offsets(send_counts))], [received, (recv_counts, offsets(recv_counts))])
received.sort()

# Right if every rank's part is in order, the parts are in order, and no number is lost.
edges = np.empty((size, 2))
comm.Allgather(received[[0, -1]], edges)
assert np.all(received[:-1] <= received[1:])
assert np.all(edges[:-1, 1] <= edges[1:, 0])
totals = np.empty(2, np.int64)
comm.Allreduce(np.array([mine.size, received.size]), totals)
assert totals[0] == totals[1]

parts = comm.gather(received.size)
if parts is not None:  # rank 0
    print(f"{sum(parts)} numbers sorted by {size} ranks; they hold {', '.join(map(str, parts))}")
