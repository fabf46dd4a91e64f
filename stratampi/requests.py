"""Nonblocking and persistent operators: requests, and the line in which a communicator's requests wait for each other.

A communicator has one `Line`: its requests run one after the other, in the order in which they were started, which MPI makes the
same on all ranks (MPI 5.1, section 6.12). The line has a runtime communicator of its own, so blocking operators pass, as in MPI.
Where all ranks agreed on MPI, mpi4py's nonblocking method runs on a duplicate of the communicator, in the line's order.

    start   the request joins the line; at its head, its entry is posted. Never waits.
    move    whoever has time moves lines on: Wait and Test of any request, and the mover, a thread that sleeps while all lines are
            empty. Without it a rank that sits in MPI_Recv would keep its peers from completing.
    end     the MPI request that the user holds, a generalized one (section 13.2), is completed, so that MPI's own calls see it

`Wait…` and `Test…` of mpi4py's classes take any mix of requests: they are wrapped to move our lines first.

Invariant: a line is moved under the lock `_moving`, by one thread at a time; nothing in there waits for another rank for longer
than PATIENCE_US.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from mpi4py import MPI

from ._native import ffi, lib
from .errors import check

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

PATIENCE_US = 200  # of the thread that waits for a request, before it lets others move lines
NAP_MIN, NAP_MAX = 50e-6, 1e-3  # seconds between two looks of a thread that has nothing to do
STILL_NAPS = 20  # of the mover before it sleeps for good

_moving = threading.Lock()
_lines: set[Line] = set()  # with requests under way
_wakeup = threading.Condition()
_mover: threading.Thread | None = None
_pid = os.getpid()
_asleep = False  # the mover, until somebody notifies it


class Plan:
    """What a request is to do: once native, by filling the runtime's request; and by mpi4py, where all ranks agree on that.

    fill: called with the runtime's request. keep: what must live until the end. fall_back: called with the line's duplicate
    communicator, returns mpi4py's request.
    """

    __slots__ = ("fall_back", "fill", "keep")

    def __init__(self, fill: Callable[[Any], None], keep: Any, fall_back: Callable[[MPI.Comm], MPI.Request]) -> None:
        self.fill = fill
        self.keep = keep
        self.fall_back = fall_back


class _Run:
    """One run of a plan: what stands in the line."""

    __slots__ = ("error", "line", "mpi", "native", "plan", "proxy", "status")

    def __init__(self, line: Line, plan: Plan) -> None:
        self.line = line
        self.plan: Plan | None = plan
        self.proxy = MPI.Grequest.Start()
        self.native: Any = None
        self.mpi: MPI.Request | None = None
        self.status = lib.SMPI_AGAIN
        self.error: BaseException | None = None

    def end(self, error: BaseException | None) -> None:
        if self.native is not None:
            lib.smpi_request_free(self.native)
        self.error = error
        self.native = self.plan = self.mpi = None
        self.status = lib.SMPI_OK
        self.proxy.Complete()


class Line:
    """The requests of one communicator that are under way, the first of them running.

    `opening` is what the communicator's ranks still exchange before the first can run: a callable that returns the runtime's
    communicator and the duplicate when that is done, None until then.
    """

    def __init__(self, opening: Callable[[], tuple[Any, MPI.Comm] | None]) -> None:
        self.opening: Callable[[], tuple[Any, MPI.Comm] | None] | None = opening
        self.ctx: Any = ffi.NULL
        self.comm: MPI.Comm = MPI.COMM_NULL
        self.runs: deque[_Run] = deque()

    def join(self, plan: Plan) -> _Run:
        """Local; returns at once."""
        run = _Run(self, plan)
        with _moving:
            self.runs.append(run)
            _lines.add(self)
            self.move()
        if run.status == lib.SMPI_AGAIN:
            _wake_mover()
        return run

    def steps(self) -> int:
        """A number that changes when the line moves. Under `_moving`."""
        run = self.runs[0] if self.runs else None
        native = run.native if run is not None else None
        return len(self.runs) + (int(lib.smpi_request_steps(native)) if native is not None else 0)

    def move(self, patience_us: int = 0) -> None:
        """Does what can be done without waiting, or with waiting for the first request only for so long. Under `_moving`."""
        if self.opening is not None:
            found = self.opening()
            if found is None:
                return
            self.ctx, self.comm = found
            self.opening = None
        while self.runs:
            run = self.runs[0]
            if not self._move_first(run, patience_us):
                return
            self.runs.popleft()
        _lines.discard(self)

    def _move_first(self, run: _Run, patience_us: int) -> bool:
        """True when the first request has ended."""
        assert run.plan is not None
        if run.mpi is not None:
            return self._move_mpi(run)
        try:
            if not self.ctx:
                status = lib.SMPI_MPI
            else:
                if run.native is None:
                    run.native = lib.smpi_request_new(self.ctx)
                    run.plan.fill(run.native)
                    check(lib.smpi_request_start(run.native))
                status = (
                    lib.smpi_request_wait(run.native, patience_us) if patience_us else lib.smpi_request_test(run.native)
                )
            if status == lib.SMPI_AGAIN:
                return False
            if status == lib.SMPI_MPI:
                run.mpi = run.plan.fall_back(self.comm)
                return self._move_mpi(run)
            check(status)
        except Exception as error:  # raised again where the user waits
            run.end(error)
        else:
            run.end(None)
        return True

    @staticmethod
    def _move_mpi(run: _Run) -> bool:
        assert run.mpi is not None
        try:
            if not MPI.Request.Test(run.mpi):
                return False
        except Exception as error:
            run.end(error)
        else:
            run.end(None)
        return True

    def close(self) -> None:
        """The communicator is about to be freed: what is under way is completed first (MPI 5.1, section 7.4.3)."""
        while self.runs or self.opening is not None:
            with _moving:
                self.move(PATIENCE_US)
        if self.ctx:
            lib.smpi_comm_close(self.ctx)
            self.ctx = ffi.NULL
        if self.comm:
            self.comm.Free()


def move_all() -> bool:
    """Moves all lines once; whether anything moved. Returns at once where another thread is at it."""
    moved = False
    if _lines and _moving.acquire(blocking=False):
        try:
            for line in list(_lines):
                before = line.steps()
                line.move()
                moved |= line.steps() != before
        finally:
            _moving.release()
    return moved


def _wake_mover() -> None:
    """Lets the mover look after the lines from now on; starts it if there is none in this process."""
    global _mover, _pid
    if _mover is None or _pid != os.getpid():
        _pid = os.getpid()
        _mover = threading.Thread(target=_move_on, name="stratampi-mover", daemon=True)
        _mover.start()
    elif _asleep:
        with _wakeup:
            _wakeup.notify()


def _move_on() -> None:
    """The mover. Goes on looking for some time after the last request, because waking it costs more than a small operator."""
    global _asleep
    nap, still = NAP_MIN, 0
    while not MPI.Is_finalized():
        if move_all():
            nap, still = NAP_MIN, 0
        else:
            nap, still = min(2 * nap, NAP_MAX), still + 1
        if still > STILL_NAPS and not _lines:
            with _wakeup:
                _asleep = True
                while not _lines:
                    _wakeup.wait()
                _asleep = False
        time.sleep(nap)


def _finish(run: _Run) -> None:
    """Waits until the run has ended: spins and sleeps in the runtime where it is the first of its line, naps otherwise."""
    nap = NAP_MIN
    while run.status == lib.SMPI_AGAIN:
        with _moving:
            if run.status == lib.SMPI_AGAIN:
                run.line.move(PATIENCE_US)
        if run.status == lib.SMPI_AGAIN:
            move_all()
        if run.mpi is not None or run.line.opening is not None:  # MPI's progress wants to be asked, not slept for
            time.sleep(nap if nap > NAP_MIN * 100 else 0)
            nap += NAP_MIN


def _raise(run: _Run | None) -> None:
    """The run's error, once."""
    if run is not None and run.error is not None:
        error, run.error = run.error, None
        raise error


class Request(MPI.Request):
    """A nonblocking operator under way. An MPI request like any other, completed by the runtime."""

    _run: _Run | None = None

    def _look(self, finish: bool) -> None:
        run = self._run
        if run is not None:
            if finish:
                _finish(run)
            elif run.status == lib.SMPI_AGAIN:
                move_all()

    def _taken(self) -> None:
        """MPI has seen it complete."""
        run, self._run = self._run, None
        _raise(run)


class PersistentRequest(MPI.Prequest, Request):
    """A persistent operator (MPI 5.1, section 6.13): planned once, started many times. Inactive, it is MPI's null request."""

    def _plan_on(self, line: Line, plan: Plan) -> PersistentRequest:
        self._line: Line | None = line
        self._plan: Plan | None = plan
        return self

    def __bool__(self) -> bool:
        return self._plan is not None

    def Start(self) -> None:
        """Initiate a communication with a persistent request."""
        if self._plan is None or self._line is None or self._run is not None:
            raise MPI.Exception(MPI.ERR_REQUEST)
        self._run = self._line.join(self._plan)
        _hold(self, self._run)

    def Free(self) -> None:
        """Free a communication request."""
        if self._run is not None:
            super().Free()
        self._run = self._plan = self._line = None


def _hold(request: MPI.Request, run: _Run) -> None:
    """Puts the run's MPI request into the user's object."""
    ffi.memmove(
        ffi.cast("char *", MPI._addressof(request)),
        ffi.cast("char *", MPI._addressof(run.proxy)),
        MPI._sizeof(MPI.Request),
    )


def start(line: Line, plan: Plan) -> Request:
    """A nonblocking operator: joins the line and gives the user a request for it."""
    request = Request()
    request._run = line.join(plan)
    _hold(request, request._run)
    return request


# ---------------------------------------------------------------------------------------------------------------------
# mpi4py's calls on requests, taught to move our lines


def _ours(requests: Sequence[MPI.Request]) -> list[Request]:
    return [request for request in requests if isinstance(request, Request) and request._run is not None]


def _one(name: str, original: Any) -> Any:
    finish = name.lower() == "wait"

    @functools.wraps(original)
    def one(self: Request, *args: Any, **kwargs: Any) -> Any:
        self._look(finish)
        result = original(self, *args, **kwargs)
        if self == MPI.REQUEST_NULL:
            self._taken()
        return result

    return one


for _name in ("Wait", "Test", "wait", "test", "Get_status", "get_status"):
    setattr(Request, _name, _one(_name, getattr(MPI.Request, _name)))


def _settle(ours: Sequence[Request]) -> None:
    """Those that MPI has seen complete are no longer ours; raises the first error among them."""
    runs = []
    for request in ours:
        if request == MPI.REQUEST_NULL:
            runs.append(request._run)
            request._run = None
    for run in runs:
        _raise(run)


def _finish_ours(ours: Sequence[Request], _requests: Sequence[MPI.Request]) -> None:
    """Waitall, waitall: every one of ours is finished, MPI waits for the rest."""
    for request in ours:
        request._look(finish=True)


def _move_once(_ours: Sequence[Request], _requests: Sequence[MPI.Request]) -> None:
    """Test… and Get_status…"""
    move_all()


def _move_until_one(ours: Sequence[Request], requests: Sequence[MPI.Request]) -> None:
    """Waitany, Waitsome, waitany, waitsome: moves until one of ours has ended or MPI has one complete."""
    others = [request for request in requests if request and request not in ours]
    nap = NAP_MIN
    while all(request._run is None or request._run.status == lib.SMPI_AGAIN for request in ours):
        move_all()
        if any(MPI.Request.Get_status(request) for request in others):
            break
        time.sleep(0 if nap == NAP_MIN else nap)
        nap = min(2 * nap, NAP_MAX)


def _many(prepare: Callable[[Sequence[Request], Sequence[MPI.Request]], None]) -> Callable[[Any], Any]:
    """A call on many requests: `prepare` for those of ours among them, then MPI's own call on all."""

    def wrap(original: Any) -> Any:
        @functools.wraps(original)
        def call(cls: type, requests: Sequence[MPI.Request], *args: Any, **kwargs: Any) -> Any:
            ours = _ours(requests)
            if ours:
                prepare(ours, requests)
            result = original.__get__(None, cls)(requests, *args, **kwargs)
            if ours:
                _settle(ours)
            return result

        return classmethod(call)

    return wrap


def startall(original: Any) -> Any:
    """Wraps MPI.Prequest.Startall: where one of ours is among them, each is started by its own method."""

    @functools.wraps(original)
    def call(cls: type, requests: Sequence[MPI.Prequest]) -> None:
        if any(isinstance(request, PersistentRequest) for request in requests):
            for request in requests:
                request.Start()
        else:
            original.__get__(None, cls)(requests)

    return classmethod(call)


CALLS: dict[str, Callable[[Any], Any]] = {
    name: _many(prepare)
    for prepare, names in (
        (_finish_ours, "Waitall waitall"),
        (_move_until_one, "Waitany waitany Waitsome waitsome"),
        (_move_once, "Testall testall Testany testany Testsome testsome Get_status_all get_status_all"),
        (_move_once, "Get_status_any get_status_any Get_status_some get_status_some"),
    )
    for name in names.split()
}
"""Class methods of MPI.Request -> how they are wrapped (`comm.py` puts the wrapped ones in their place)."""
