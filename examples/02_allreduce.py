"""Sums over all ranks: one number, a large array, and a large array in place.

Written for mpi4py; nothing in it knows about stratampi. Run it either way:

    mpirun -n 2 python examples/02_allreduce.py
    mpirun -n 2 python -m stratampi examples/02_allreduce.py

Under the runner the large arrays below are allocated where all ranks can reach them, and Allreduce reads and writes
them there. To port a program for good instead of using the runner, change one line to `from stratampi import MPI`, and
allocate the arrays that travel with `stratampi.empty` and its kin.
"""

import time

import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
rank, size = comm.Get_rank(), comm.Get_size()

# One number: the sum of all ranks.
total = np.empty(1)
comm.Allreduce(np.array([float(rank)]), total, op=MPI.SUM)
assert total[0] == size * (size - 1) / 2

# A large array: element i of the result is the sum over ranks r of (r + 1) * i.
items = 4 << 20
ramp = np.arange(items, dtype=np.float64)
mine = ramp * (rank + 1)
result = np.empty_like(mine)
comm.Allreduce(mine, result)
assert np.array_equal(result, ramp * (size * (size + 1) / 2))

# In place: `mine` is replaced by the sum.
comm.Allreduce(MPI.IN_PLACE, mine)
assert np.array_equal(mine, result)

# How long one takes here: the best of ten, after the calls above have warmed everything up.
times = []
for _ in range(10):
    comm.Barrier()
    start = time.perf_counter()
    comm.Allreduce(mine, result)
    times.append(time.perf_counter() - start)
if rank == 0:
    print(f"{size} ranks: sums are right; Allreduce of {mine.nbytes >> 20} MiB took {min(times) * 1e3:.2f} ms")
