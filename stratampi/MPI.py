"""Drop-in for `mpi4py.MPI`: `from stratampi import MPI`.

The namespace *is* mpi4py.MPI's: every name, private ones (`_typedict`, `__pyx_capi__`, ...) included, and the very same objects, so
that isinstance, pickling and C code that reads mpi4py's objects hold. One name differs: COMM_WORLD is a `stratampi.Comm`. Even
`__file__` and `__doc__` are mpi4py's, because programs look for the library and the headers there; so no name of our own may stay
behind, and there is no `__all__`.

Importing this brings up the world, collectively over COMM_WORLD, if MPI is initialised; with `mpi4py.rc.initialize = False`
MPI.Init or MPI.Init_thread does it.
"""


def _fill(namespace: dict[str, object]) -> None:
    from mpi4py import MPI

    from .comm import take_place
    from .world import world

    own = {"__name__", "__package__", "__loader__", "__spec__", "__builtins__", "__cached__"}
    namespace.update((name, value) for name, value in vars(MPI).items() if name not in own)
    take_place(namespace, world)


_fill(globals())
del _fill
