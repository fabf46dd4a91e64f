"""Errors of the native runtime as MPI exceptions: one class, one `check()`."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from mpi4py import MPI

from ._native import ffi, lib

if TYPE_CHECKING:
    from mpi4py.MPI import Comm

_CLASS = {
    lib.SMPI_ERR_NOMEM: MPI.ERR_NO_MEM,
    lib.SMPI_ERR_ARG: MPI.ERR_ARG,
    lib.SMPI_ERR_SYS: MPI.ERR_OTHER,
    lib.SMPI_ERR_REFUSED: MPI.ERR_UNSUPPORTED_OPERATION,
    lib.SMPI_ERR_TIMEOUT: MPI.ERR_OTHER,
    lib.SMPI_ERR_MISMATCH: MPI.ERR_TRUNCATE,
    lib.SMPI_ERR_INTERRUPTED: MPI.ERR_PENDING,
    lib.SMPI_ERR_REVOKED: MPI.ERR_COMM,
    lib.SMPI_ERR_ALIAS: MPI.ERR_BUFFER,
}


class Error(MPI.Exception):
    """An MPI exception with a text of its own: which rank, operator, counts and types (MPI 5.1, section 9.4 for the classes)."""

    def __new__(cls, ierr: int, text: str) -> Error:
        return super().__new__(cls, ierr)

    def __init__(self, ierr: int, text: str) -> None:
        super().__init__(ierr)
        self.text = text

    def __str__(self) -> str:
        return f"{MPI.Get_error_string(self.Get_error_class())}: {self.text}"

    def __reduce__(self) -> tuple[type[Error], tuple[int, str]]:
        return (Error, (self.Get_error_code(), self.text))


def reason() -> str:
    """The calling thread's last reason, as the runtime wrote it."""
    return str(ffi.string(lib.smpi_reason()).decode("utf-8", "replace"))


def check(status: int, comm: Comm | None = None) -> None:
    """Raise what a negative status stands for; 0 and positive ones pass.

    An exception that Python code raised inside a native wait (Ctrl-C above all) is raised again as it is. With `comm`, its error
    handler is called first, so ERRORS_ARE_FATAL ends the job.

    Raises:
        MemoryError: the heap is full.
        Error: everything else, with the matching MPI error class.
    """
    if status >= 0:
        return
    if status == lib.SMPI_ERR_INTERRUPTED:
        from .world import take_pending_exception

        pending = take_pending_exception()
        if pending is not None:
            raise pending
    text = reason()
    if status == lib.SMPI_ERR_NOMEM:
        raise MemoryError(text)
    fail(Error(_CLASS.get(status, MPI.ERR_OTHER), text), comm)


def fail(error: MPI.Exception, comm: Comm | None) -> NoReturn:
    """Raise the error, after the communicator's error handler if it has another than mpi4py's default (MPI 5.1, section 9.3)."""
    if comm is not None:
        handler = comm.Get_errhandler()
        if handler != MPI.ERRORS_RETURN:
            comm.Call_errhandler(error.Get_error_code())
        handler.Free()
    raise error
