"""Runner: `python -m stratampi [-rc k=v,...] script.py | -m mod | -c cmd | -` runs an unmodified mpi4py program, accelerated.

Everything a program can see is `python -m mpi4py`: its own `mpi4py.run` does the work (command line, `__main__`, ending the whole
job after an uncaught exception). We only wait for the program to import mpi4py.MPI, and then put our COMM_WORLD there and let
NumPy place its arrays in the heap. Not done earlier, because a program may set `mpi4py.rc` before that import.
"""

from __future__ import annotations

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType


def install(mpi: ModuleType) -> None:
    """Makes the module `mpi4py.MPI` ours: COMM_WORLD, and NumPy arrays in the heap. Collective if MPI is initialised."""
    from .comm import take_place
    from .memory import register_numpy
    from .world import world

    def begin() -> None:
        world()
        register_numpy()

    take_place(vars(mpi), begin)


class _InstallAfter(Loader):
    """The loader of mpi4py.MPI, followed by `install`. The module does not see the difference: it gets the real loader back."""

    def __init__(self, loader: Loader) -> None:
        self.loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self.loader
        if module.__spec__ is not None:
            module.__spec__.loader = self.loader
        self.loader.exec_module(module)
        install(module)


class _Finder(MetaPathFinder):
    """Finds mpi4py.MPI as everybody else does, once, and lets `install` follow."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "mpi4py.MPI":
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _InstallAfter(spec.loader)
        return spec


class _Spec(ModuleSpec):
    """What mpi4py.run takes its program name (`name`) and its package (`parent`) from."""

    parent = "mpi4py"


def main() -> None:
    """Entry point of `python -m stratampi`. Exits as `python -m mpi4py` does."""
    from mpi4py import __version__ as mpi4py_version
    from mpi4py import run

    from . import __version__

    if sys.argv[1:2] in (["--version"], ["-version"], ["-V"]):
        print(f"stratampi {__version__} (mpi4py {mpi4py_version})")
        return
    run.__spec__ = _Spec("stratampi", run.__spec__.loader, origin=run.__spec__.origin)  # so that its help names us
    if "mpi4py.MPI" in sys.modules:
        install(sys.modules["mpi4py.MPI"])
    else:
        sys.meta_path.insert(0, _Finder())
    run.main()


if __name__ == "__main__":
    main()
