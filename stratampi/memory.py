"""Registered arrays: NumPy arrays whose data lies in this rank's heap, so that peers read and write it without a copy.

Everything here is an ordinary `numpy.ndarray` that owns its data (`base is None`). Only the allocator differs: NumPy asks the
handler in its context variable for memory (NEP 49) and frees through the same handler, whenever and in whatever thread the array
dies; the heap itself lives until the process ends. NumPy's headers are not needed: the handler is a C struct made by
native/memory/numpy.c, and the setter is entry 304 of NumPy's published `_ARRAY_API` table.

Two handlers: `always` places every array in the heap or raises MemoryError (the makers below use it); `hook` places arrays of
at least STRATAMPI_REGISTER_MIN bytes there and others, or all when the heap is full, where NumPy would (`registered()`,
`register_numpy()`). Neither is ever collective. Which handler is current belongs to the *context* (PEP 567): a thread starts
with NumPy's own, an asyncio task with its creator's. The makers below work in every thread all the same.

The first call of anything but is_registered() brings up the world, collectively over COMM_WORLD, unless `stratampi.MPI` was
imported before. Where the world is not ready (no shared memory) all of this still works, with NumPy's own memory.
"""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import importlib
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

from ._native import ffi, lib
from .world import world

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy.typing as npt

    Shape = int | tuple[int, ...] | list[int] | npt.NDArray[np.integer[Any]]
    Order = Literal["C", "F"]
    OrderLike = Literal["C", "F", "A", "K"]
    Array = npt.NDArray[Any]

__all__ = [
    "empty", "zeros", "ones", "full", "array", "empty_like", "zeros_like",
    "is_registered", "registered", "register_numpy", "heap_stats",
]  # fmt: skip

_SET_HANDLER = 304  # PyDataMem_SetHandler in numpy/_core/code_generators/numpy_api.py; never renumbered
_NAME = b"mem_handler"  # a capsule keeps the pointer only, and arrays keep the capsule
ctypes.pythonapi.Py_IncRef(ctypes.py_object(_NAME))  # so this text outlives the module


class _Variable(Protocol):
    """What is used of a ContextVar."""

    def set(self, value: Any, /) -> Any: ...
    def reset(self, token: Any, /) -> None: ...


class _SetterOnly:
    """Stands in for NumPy's context variable, by its setter alone; slower."""

    def set(self, value: Any, /) -> Any:
        return _set_handler(value)

    def reset(self, token: Any, /) -> None:
        _set_handler(token)


def _bind_setter() -> Any:
    """PyDataMem_SetHandler(capsule or NULL for NumPy's own) -> the previous capsule."""
    core = "numpy.core" if np.__version__.startswith("1.") else "numpy._core"
    api = importlib.import_module(f"{core}._multiarray_umath")._ARRAY_API
    pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
    pointer_of.restype = ctypes.c_void_p
    pointer_of.argtypes = [ctypes.py_object, ctypes.c_char_p]
    table = ctypes.cast(pointer_of(api, None), ctypes.POINTER(ctypes.c_void_p))
    return ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.py_object)(table[_SET_HANDLER])


def _find_variable() -> _Variable:
    """NumPy's context variable, caught in a fresh context where the setter has just set it.

    Setting the variable is all that the setter does, and Python does it several times faster than ctypes calls.
    """
    context = contextvars.Context()
    context.run(_set_handler, ctypes.py_object())
    found = [variable for variable, value in context.items() if type(value).__name__ == "PyCapsule"]
    return found[0] if len(found) == 1 else _SetterOnly()


_set_handler = _bind_setter()
_current = _find_variable()
_set, _reset = _current.set, _current.reset
_world: Any = None  # smpi_world*, once it is ready
_always: Any = None  # capsules, from then on
_hooks: dict[int, Any] = {}  # by threshold in bytes


def _capsule(handler: Any) -> Any:
    if handler == ffi.NULL:
        raise MemoryError("no memory for a NumPy allocation handler")
    new = ctypes.pythonapi.PyCapsule_New
    new.restype = ctypes.py_object
    new.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    return new(int(ffi.cast("uintptr_t", handler)), _NAME, None)


def _bind() -> bool:
    """True once there is a heap to allocate from."""
    global _world, _always
    if _always is None:
        here = world()
        if here.ready:
            _world = here.ptr
            _always = _capsule(lib.smpi_numpy_handler_always(here.ptr))
    return _always is not None


def _hook(min_bytes: int | None) -> Any:
    if min_bytes is None:
        min_bytes = int(lib.smpi_setting_number(lib.SMPI_SET_REGISTER_MIN))
    min_bytes = max(min_bytes, 0)
    if min_bytes not in _hooks:
        _hooks[min_bytes] = _capsule(lib.smpi_numpy_handler_hook(_world, min_bytes))
    return _hooks[min_bytes]


def _named(name: str) -> npt.DTypeLike:
    """A dtype by name, with the two 16-bit floats under the names that machine learning uses."""
    if name == "fp16":
        return np.float16
    if name in ("bf16", "bfloat16"):
        try:
            from ml_dtypes import bfloat16
        except ImportError:
            raise TypeError(f"dtype {name!r} needs the package ml_dtypes (pip install ml_dtypes)") from None
        return bfloat16  # type: ignore[no-any-return]
    return name


def _place(make: Callable[..., Array], *args: Any, **kwargs: Any) -> Array:
    """make(...) with its arrays in the heap, if there is one."""
    if _always is None and not _bind():
        return make(*args, **kwargs)
    token = _set(_always)
    try:
        return make(*args, **kwargs)
    finally:
        _reset(token)


def empty(shape: Shape, dtype: npt.DTypeLike = np.float64, order: Order = "C") -> Array:
    """A registered array with arbitrary contents; like `numpy.empty`.

    shape: elements along each axis. dtype: any NumPy dtype, and the names "bf16" and "bfloat16" (by ml_dtypes) and "fp16".
    MemoryError when the heap has no room (STRATAMPI_HEAP_MAX), TypeError for "bf16" without ml_dtypes.
    """
    if type(dtype) is str:
        dtype = _named(dtype)
    if _always is None and not _bind():
        return np.empty(shape, dtype, order)
    token = _set(_always)  # as _place() does; written out, because a call costs a tenth of it
    try:
        return np.empty(shape, dtype, order)
    finally:
        _reset(token)


def zeros(shape: Shape, dtype: npt.DTypeLike = np.float64, order: Order = "C") -> Array:
    """A registered array of zeros; like `numpy.zeros`. Arguments and errors as for `empty`."""
    if type(dtype) is str:
        dtype = _named(dtype)
    return _place(np.zeros, shape, dtype, order)


def ones(shape: Shape, dtype: npt.DTypeLike = np.float64, order: Order = "C") -> Array:
    """A registered array of ones; like `numpy.ones`. Arguments and errors as for `empty`."""
    if type(dtype) is str:
        dtype = _named(dtype)
    return _place(np.ones, shape, dtype, order)


def full(shape: Shape, fill_value: Any, dtype: npt.DTypeLike | None = None, order: Order = "C") -> Array:
    """A registered array with every element fill_value; like `numpy.full`.

    dtype None: the one that NumPy finds for fill_value. Errors as for `empty`.
    """
    if type(dtype) is str:
        dtype = _named(dtype)
    return _place(np.full, shape, fill_value, dtype, order)


def array(
    object: Any,
    dtype: npt.DTypeLike | None = None,
    *,
    copy: bool | None = True,
    order: OrderLike = "K",
    subok: bool = False,
    ndmin: int = 0,
) -> Array:
    """A registered array with the contents of object (an array, a nested sequence, a buffer); like `numpy.array`.

    copy None: object itself where it is registered and fits the other arguments. copy False: the same, or ValueError. Other
    errors as for `empty`.
    """
    if type(dtype) is str:
        dtype = _named(dtype)
    made = _place(np.array, object, dtype, copy=copy, order=order, subok=subok, ndmin=ndmin)
    if copy or _always is None or is_registered(made):
        return made
    if copy is not None:
        raise ValueError("the object is not registered, so a registered array of it is a copy, and copy is False")
    return _place(made.copy, order)


def empty_like(
    prototype: Any,
    dtype: npt.DTypeLike | None = None,
    order: OrderLike = "K",
    subok: bool = True,
    shape: Shape | None = None,
) -> Array:
    """A registered array of prototype's shape and dtype, contents arbitrary; like `numpy.empty_like`. Errors as for `empty`."""
    if type(dtype) is str:
        dtype = _named(dtype)
    return _place(np.empty_like, prototype, dtype, order, subok, shape)


def zeros_like(
    a: Any,
    dtype: npt.DTypeLike | None = None,
    order: OrderLike = "K",
    subok: bool = True,
    shape: Shape | None = None,
) -> Array:
    """A registered array of zeros of a's shape and dtype; like `numpy.zeros_like`. Errors as for `empty`."""
    if type(dtype) is str:
        dtype = _named(dtype)
    return _place(np.zeros_like, a, dtype, order, subok, shape)


def _extent(obj: Any) -> tuple[int, int]:
    """Address and bytes of the memory from the first to the last byte that obj shows."""
    if not isinstance(obj, np.ndarray):
        view = memoryview(obj)
        if view.c_contiguous:
            return int(ffi.cast("uintptr_t", ffi.from_buffer(view))), view.nbytes
        obj = np.asarray(view)
    start = obj.__array_interface__["data"][0]
    if obj.flags.forc:
        return start, obj.nbytes
    if obj.size == 0:
        return start, 0
    steps = [(n - 1) * stride for n, stride in zip(obj.shape, obj.strides, strict=True)]
    first = start + sum(step for step in steps if step < 0)
    return first, start + sum(step for step in steps if step > 0) + obj.itemsize - first


def is_registered(obj: Any) -> bool:
    """Whether all memory that obj shows, also a slice or another view, lies in this rank's heap.

    obj: a NumPy array or anything with the buffer protocol; TypeError if neither. Always False in a forked child.
    """
    start, num_bytes = _extent(obj)
    return _world is not None and bool(lib.smpi_heap_owns(_world, start, num_bytes))


@contextlib.contextmanager
def registered(min_bytes: int | None = None) -> Iterator[None]:
    """Inside, every NumPy array made in this context of at least min_bytes is registered: results of ufuncs, copies, and so on.

    min_bytes None: STRATAMPI_REGISTER_MIN. Arrays that do not fit in the heap come from NumPy's own memory, without an error.
    """
    if not _bind():
        yield
        return
    token = _set(_hook(min_bytes))
    try:
        yield
    finally:
        _reset(token)


def register_numpy(on: bool = True) -> None:
    """From now on registers the NumPy arrays of the current context as `registered()` does; on False: NumPy's own memory again.

    Threads begin in a context of their own: call it in each, or start them with `contextvars.copy_context().run`.
    """
    if not on:
        _set_handler(ctypes.py_object())
    elif _bind():
        _set(_hook(None))


def heap_stats() -> dict[str, int]:
    """Bytes of this rank's heap: live (in arrays and communicators), peak (of live), cached (free, kept for reuse), limit; and the
    number of live blocks. All 0 without a heap.
    """
    names = ("live", "peak", "cached", "limit", "blocks")
    values = ffi.new("uint64_t[5]")
    if _bind():
        lib.smpi_heap_stats(_world, *(values + i for i in range(5)))
    return dict(zip(names, map(int, values), strict=True))
