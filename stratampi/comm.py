"""Communicators: mpi4py's classes with the collectives of `Collectives` in front of mpi4py's own.

    Comm(Collectives, Nonblocking, Objects, MPI.Intracomm)    Cartcomm  Graphcomm  Distgraphcomm    Intercomm (hands on its class)

An object here holds the same MPI handle as a plain mpi4py object, nothing else: mpi4py never frees a handle at garbage collection,
so several objects may share one, and whatever must live as long as the communicator hangs on an MPI attribute of the handle.

Invariant: a communicator is accelerated on all of its ranks or on none, because the native path waits for all members. Makers keep
it: what an accelerated communicator makes is accelerated on every rank that gets it. Where the other side may be plain mpi4py we
stay plain: `Spawn`, `Get_parent`, `Accept`, `Connect` and `Join` (another program), and `Merge` with a group of one rank, which may
have come by COMM_SELF, mpi4py's own object. A handle we made carries a mark, so that it comes back as ours from C or Fortran, and
a stranger's handle comes as mpi4py's.

Two ways to make a communicator exist in mpi4py. Dup, Clone and Idup keep the Python class, so ours already (and MPI copies the
mark); the others name the class, so `_accelerates` wraps each of these once more.
"""

from __future__ import annotations

import copyreg
import ctypes
import functools
import gc
import sys
from typing import TYPE_CHECKING, Any, TypeVar

from mpi4py import MPI

from . import requests
from .collectives import Collectives
from .nonblocking import Nonblocking
from .objects import Objects
from .world import progress

if TYPE_CHECKING:
    from collections.abc import Callable

_MAKERS = (
    "Create", "Create_group", "Split", "Split_type", "Shrink", "Ishrink",
    "Create_cart", "Create_graph", "Create_dist_graph", "Create_dist_graph_adjacent", "Sub",
    "Create_intercomm",
)  # fmt: skip
_ENDS = ("Free", "Disconnect")
_FROM_HANDLE = ("fromhandle", "fromint", "f2py")

_C = TypeVar("_C", bound=type[MPI.Comm])
_accelerated: dict[type[MPI.Comm], type[MPI.Comm]] = {}  # mpi4py's class -> ours
_mpi4py_world = MPI.COMM_WORLD  # the runner puts ours in its place
_mark = MPI.KEYVAL_INVALID


def _set_mark(comm: MPI.Comm) -> None:
    """Marks a handle as one of ours, for as long as it lives. Local."""
    global _mark
    if _mark == MPI.KEYVAL_INVALID:
        _mark = MPI.Comm.Create_keyval(copy_fn=True, nopython=True)  # type: ignore[arg-type]  # True: copied as it is
        _mpi4py_world.Set_attr(_mark, 1)  # for its duplicates, which no maker of ours sees
    if comm != _mpi4py_world:
        comm.Set_attr(_mark, 1)


def _adopt(made: Any) -> Any:
    """Our object for what an mpi4py maker returned: a communicator, or a tuple that starts with one.

    COMM_NULL and classes not ours pass. In a tuple the communicator's request is still under way and the library may write to the
    object it was given until it completes, so that object is kept.
    """
    if isinstance(made, tuple):
        mine = _adopt(made[0])
        if mine is not made[0]:
            mine._given_to_mpi = made[0]
        return (mine, *made[1:])
    cls = _accelerated.get(type(made))
    if cls is None or not made:
        return made
    _set_mark(made)
    return cls(made)


def _maker(original: Any) -> Any:
    """An mpi4py method with its result adopted; signature and docstring stay mpi4py's."""

    @functools.wraps(original)
    def make(self: MPI.Comm, *args: Any, **kwargs: Any) -> Any:
        return _adopt(original(self, *args, **kwargs))

    return make


def _end(original: Any) -> Any:
    """An mpi4py method that frees the handle. The native context went with it, so this object must not reach for it again."""

    @functools.wraps(original)
    def end(self: Any, *args: Any, **kwargs: Any) -> None:
        self._end()
        original(self, *args, **kwargs)
        self._forget()

    return end


def _accelerates(base: type[MPI.Comm]) -> Callable[[_C], _C]:
    """Class decorator: our class for mpi4py's class `base`; wraps the makers that `base` has."""

    def register(cls: _C) -> _C:
        for name in _MAKERS:
            if hasattr(base, name):
                setattr(cls, name, _maker(getattr(base, name)))
        for name in _ENDS if issubclass(cls, Collectives) else ():
            setattr(cls, name, _end(getattr(base, name)))
        _accelerated[base] = cls
        return cls

    return register


@_accelerates(MPI.Intracomm)
class Comm(Collectives, Nonblocking, Objects, MPI.Intracomm):
    """An mpi4py intracommunicator whose collectives take the native path where its ranks share memory.

    `Comm(comm)` shares the handle of `comm`, as `MPI.Intracomm(comm)` does; `accelerate` picks the class that fits.
    """

    def free(self) -> None:
        """Call `Free` if not null or predefined."""
        # mpi4py marks its own COMM_WORLD as constant and leaves it alone here; the mark does not come with the handle.
        if self is not COMM_WORLD:
            super().free()

    def __reduce__(self) -> str | tuple[Any, ...]:
        # mpi4py would name its own constant, which is not what the name COMM_WORLD stands for next to us.
        if self is COMM_WORLD:
            return "COMM_WORLD"
        if self == COMM_WORLD:
            return (copyreg.__newobj__, (type(self), COMM_WORLD))  # type: ignore[attr-defined]  # not in typeshed
        return super().__reduce__()


@_accelerates(MPI.Cartcomm)
class Cartcomm(Collectives, Nonblocking, Objects, MPI.Cartcomm):
    """`Comm` with a Cartesian topology; `Neighbor_*` operators stay mpi4py's."""


@_accelerates(MPI.Graphcomm)
class Graphcomm(Collectives, Nonblocking, Objects, MPI.Graphcomm):
    """`Comm` with a graph topology; `Neighbor_*` operators stay mpi4py's."""


@_accelerates(MPI.Distgraphcomm)
class Distgraphcomm(Collectives, Nonblocking, Objects, MPI.Distgraphcomm):
    """`Comm` with a distributed graph topology; `Neighbor_*` operators stay mpi4py's."""


@_accelerates(MPI.Intercomm)
class Intercomm(MPI.Intercomm):
    """An intercommunicator between two groups of accelerated communicators. Its operators stay mpi4py's."""

    def Merge(self, high: bool = False) -> MPI.Intracomm:
        """Merge intercommunicator into an intracommunicator."""
        made = super().Merge(high)
        # Both sides see the same two sizes, so they decide alike.
        one_rank = min(self.Get_size(), self.Get_remote_size()) == 1
        return made if one_rank else _adopt(made)


def _world_constant() -> Comm:
    """Our object for MPI_COMM_WORLD, also before MPI_Init: `Comm(MPI.COMM_WORLD)` would ask MPI for the communicator's kind."""
    world = Comm()
    ctypes.memmove(MPI._addressof(world), MPI._addressof(MPI.COMM_WORLD), MPI._sizeof(MPI.Comm))
    return world


COMM_WORLD = _world_constant()


def _from_handle(original: Any) -> Any:
    """mpi4py's class method from a handle to an object, but a marked handle gives our class."""

    @functools.wraps(original)
    def from_handle(cls: type[MPI.Comm], *args: Any, **kwargs: Any) -> Any:
        comm = original.__get__(None, cls)(*args, **kwargs)
        if comm == COMM_WORLD:
            return COMM_WORLD
        if not comm or comm == MPI.COMM_SELF or _mark == MPI.KEYVAL_INVALID or not comm.Get_attr(_mark):
            return comm
        return _accelerated[type(comm)](comm)

    return classmethod(from_handle)


def _teach(cls: type, names: tuple[str, ...], wrap: Callable[[Any], Any]) -> None:
    """Wraps methods of one of mpi4py's classes. These refuse setattr, being static types; their dictionary does not."""
    namespace = gc.get_referents(cls.__dict__)[0]
    for name in names:
        namespace[name] = wrap(namespace[name])
    ctypes.pythonapi.PyType_Modified(ctypes.py_object(cls))


# `MPI.Comm.f2py` and its kin, called on whatever class, give our objects for our handles, as they give mpi4py's for its own.
# Otherwise a communicator that went through C or Fortran on one rank only would be accelerated on the others only.
_teach(MPI.Comm, _FROM_HANDLE, _from_handle)


def _barrier_with_progress(self: Any, _barrier: Any = Collectives.Barrier) -> None:
    """All ranks wait for each other (MPI 5.1, section 6.3)."""
    _barrier(self)
    progress()


def _window_maker(original: Any) -> Any:
    """mpi4py's class method that makes a window. From then on this rank's Barrier lets MPI progress.

    With one-sided communication programs expect of a barrier that what peers completed before it has arrived after it; our own
    barrier may be over before the MPI library has looked at its queues once.
    """

    @functools.wraps(original)
    def make(cls: type[MPI.Win], *args: Any, **kwargs: Any) -> Any:
        Collectives.Barrier = _barrier_with_progress  # type: ignore[method-assign]
        return original.__get__(None, cls)(*args, **kwargs)

    return classmethod(make)


for _name, _wrap in requests.CALLS.items():
    _teach(MPI.Request, (_name,), _wrap)
_teach(MPI.Prequest, ("Startall",), requests.startall)
_teach(MPI.Win, ("Create", "Allocate", "Allocate_shared", "Create_dynamic"), _window_maker)


def take_place(namespace: dict[str, Any], begin: Callable[[], None]) -> None:
    """Puts our names in the place of mpi4py's in `namespace`, a copy of the module mpi4py.MPI's or itself.

    `begin` is what to do once MPI is up, collectively over COMM_WORLD: it is called now, or by `Init` and `Init_thread` with
    `mpi4py.rc.initialize = False`. Those two names are ours only then.
    """

    def up() -> None:
        _set_mark(COMM_WORLD)
        begin()

    def then_up(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def init(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            up()
            return result

        return init

    namespace["COMM_WORLD"] = COMM_WORLD
    if MPI.Is_finalized():
        return
    if MPI.Is_initialized():
        up()
    else:
        namespace["Init"], namespace["Init_thread"] = then_up(MPI.Init), then_up(MPI.Init_thread)


def accelerate(comm: MPI.Comm) -> MPI.Comm:
    """The accelerated object for a communicator made by plain mpi4py. To be called on all of its ranks, or on none.

    Both objects share one handle: freeing either frees the communicator. For the handle COMM_WORLD it is the constant itself.
    Accelerated communicators, intercommunicators and COMM_NULL are returned as they are.
    """
    if not comm or isinstance(comm, (Collectives, MPI.Intercomm)):
        return comm
    if comm == COMM_WORLD:
        return COMM_WORLD
    if type(comm) in _accelerated:
        return _adopt(comm)  # type: ignore[no-any-return]
    plain = MPI.Comm.fromhandle(comm.handle)  # a user's subclass, or a base class: its handle knows what it is
    return comm if isinstance(plain, MPI.Intercomm) else _adopt(plain)


def _original_world() -> MPI.Intracomm:
    return _mpi4py_world


def _reduce_intracomm(comm: MPI.Intracomm) -> str | tuple[Any, ...]:
    """Pickling for plain `MPI.Intracomm`: mpi4py's own COMM_WORLD cannot go by name where that name gives ours."""
    named = getattr(sys.modules.get("mpi4py.MPI"), "COMM_WORLD", None)
    if comm is _mpi4py_world and named is not comm:
        return (_original_world, ())
    return comm.__reduce__()


copyreg.pickle(MPI.Intracomm, _reduce_intracomm)
