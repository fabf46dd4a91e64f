"""Who is here: every rank says its name, rank 0 prints them in order.

Written for mpi4py; nothing in it knows about stratampi. Run it either way:

    mpirun -n 4 python examples/01_hello.py                  # plain mpi4py
    mpirun -n 4 python -m stratampi examples/01_hello.py     # the same program on stratampi

The last line shows which of the two it was. Objects (lower-case methods) go through the MPI library in both.
"""

from mpi4py import MPI

comm = MPI.COMM_WORLD
node = comm.Split_type(MPI.COMM_TYPE_SHARED)  # the ranks that share this machine's memory

lines = comm.gather(
    f"rank {comm.Get_rank()} of {comm.Get_size()} on {MPI.Get_processor_name()},"
    f" {node.Get_rank()} of {node.Get_size()} on that machine"
)
if lines is not None:  # rank 0
    print("\n".join(lines))
    print(f"the communicator is a {type(comm).__module__}.{type(comm).__name__}")
node.Free()
