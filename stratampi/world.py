"""The world: which ranks share memory with this one, and the native state that maps it. Brought up once, collectively.

    COMM_WORLD --Split_type(SHARED)--> machine --STRATAMPI_SUPERNODE_SIZE--> supernode --driver--> segments --> heap

Invariant: all ranks of a supernode come out with the same driver. So a rank never acts on its own finding: each step
is tried by all ranks, its outcome is gathered by all (`_Team.agree`), and one refusal turns all to the next driver,
with the same reason in everybody's hand. What can be computed from gathered facts (segment size, addresses, slices) is
computed by each rank for itself instead of being sent.

All MPI calls go through plain mpi4py communicators made from handles: the runner puts our subclass into
mpi4py.MPI.COMM_WORLD, and this is the code that the subclass needs.
"""

from __future__ import annotations

import os
import struct
import sys
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from mpi4py import MPI

from . import machine, settings
from ._native import ffi, lib

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from types import TracebackType

TERABYTE = 1 << 40
UNIT = 2 << 20  # segments are multiples of a huge page
SMALLEST = 64 << 20  # a smaller segment is not worth a driver
MOST_SPACE = 32 * TERABYTE  # address space for the segments of one supernode
FAVOURITE_CELL = 32  # TiB: in the middle of the free range of x86-64
EXCHANGE_MS = 30_000  # all ranks have just been in a collective, so only a stuck one takes this long
PROGRESS_CALLS = 4  # of the MPI library in one call of the wait hook
NO_TOKEN = bytes(16)


@dataclass(frozen=True, slots=True)
class World:
    """This rank's supernode. `ptr` is the native smpi_world, None unless `ready`.

    `driver` is "memfd", "window" or "none", and `why` says why this one. `rank` and `size` count in the supernode.
    `token` (16 bytes) is the same on its ranks and nowhere else, all zeros unless `ready`. `cores`: cores its ranks may
    use together.
    """

    ptr: Any
    ready: bool
    driver: str
    why: str
    rank: int
    size: int
    token: bytes
    cores: int


_lock = threading.Lock()
_world: World | None = None
_allocate_shared = MPI.Win.Allocate_shared  # mpi4py's own: comm.py wraps it for users' windows
_windows: list[MPI.Win] = []  # kept for the life of the process: arrays may outlive everything
_everybody: MPI.Intracomm | None = None  # plain COMM_WORLD, for the wait hook
_quiet_tag = 0  # the largest tag: hardly anybody's


def world() -> World:
    """The world of this process; the first call after MPI_Init brings it up, collectively over COMM_WORLD.

    While MPI is not initialised, or is finalised before the first call, the answer is a world that is not ready, and
    the next call tries again. Thread-safe.

    Raises:
        mpi4py.MPI.Exception: MPI itself failed.
    """
    global _world
    if _world is not None:
        return _world
    if not MPI.Is_initialized() or MPI.Is_finalized():
        why = "MPI is finalized" if MPI.Is_initialized() else "MPI is not initialized"
        return World(None, False, "none", why, 0, 1, NO_TOKEN, 1)
    with _lock:
        if _world is None:
            _world = _bring_up(MPI.Intracomm(MPI.COMM_WORLD))
    return _world


# ---- agreeing ----


class _Facts(NamedTuple):
    """What one rank tells the others of its machine before anything is decided."""

    world_rank: int
    fabric: bytes  # STRATAMPI_FABRIC
    supernode_size: int
    window_size: int  # bytes
    stage_chunk: int  # bytes
    stream_min: int  # bytes
    space_left: int  # bytes
    file_limit: int  # bytes
    span: int  # bytes
    shm_free: int  # bytes
    quota: int  # cores
    token: bytes
    cells: bytes  # machine.free_cells(), little-endian
    mask: bytes  # machine.affinity_mask()


_FACTS = struct.Struct(f"<q8s9q16s{machine.CELLS // 8}s{machine.MASK_BYTES}s")


def _own_facts(world_rank: int) -> _Facts:
    cells, span = machine.free_cells()
    stream_min = settings.number("STRATAMPI_STREAM_MIN")
    return _Facts(
        world_rank=world_rank,
        fabric=settings.text("STRATAMPI_FABRIC").encode(),
        supernode_size=settings.number("STRATAMPI_SUPERNODE_SIZE"),
        window_size=settings.number("STRATAMPI_WINDOW_SIZE"),
        stage_chunk=settings.number("STRATAMPI_STAGE_CHUNK"),
        stream_min=machine.cache_size() if stream_min < 0 else stream_min,
        space_left=machine.address_space_left(),
        file_limit=machine.file_size_limit(),
        span=min(span, machine.NO_LIMIT),
        shm_free=machine.shm_free(),
        quota=machine.core_quota(),
        token=os.urandom(16),
        cells=cells.to_bytes(machine.CELLS // 8, "little"),
        mask=machine.affinity_mask(),
    )


def _gather(comm: MPI.Intracomm, record: bytes) -> list[bytes]:
    """Every rank's record (all of one length), in rank order."""
    records = bytearray(len(record) * comm.Get_size())
    comm.Allgather([record, MPI.BYTE], [records, MPI.BYTE])
    return [bytes(records[i : i + len(record)]) for i in range(0, len(records), len(record))]


def _ranks(numbers: Iterable[int]) -> str:
    """`[0, 1, 2, 5]` as "ranks 0-2, 5"."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
    return ("rank " if len(runs) == 1 and runs[0][0] == runs[0][1] else "ranks ") + text


def _by_reason(reasons: Iterable[tuple[int, str]]) -> str:
    """Pairs (rank, reason) as "ranks 0-2: this; rank 3: that"."""
    groups: dict[str, list[int]] = {}
    for rank, reason in reasons:
        groups.setdefault(reason, []).append(rank)
    return "; ".join(f"{_ranks(numbers)}: {reason}" for reason, numbers in groups.items())


class _Refused(Exception):
    """A driver cannot be had; the text names ranks and reasons and is the same on all ranks of the supernode."""


_OUTCOME = struct.Struct("<i64s444s")  # status, payload, reason


@dataclass(frozen=True, slots=True)
class _Team:
    """The ranks of one supernode while they bring it up. `facts[r]` are those of its rank r."""

    comm: MPI.Intracomm
    facts: Sequence[_Facts]

    @property
    def rank(self) -> int:
        return self.comm.Get_rank()

    @property
    def size(self) -> int:
        return len(self.facts)

    def agree(self, status: int, payload: bytes = b"", reason: str | None = None) -> list[bytes]:
        """Ends a step: every rank says how it fared. Returns all payloads (64 bytes each) if it went well everywhere.

        Without `reason` the native runtime's last one is told for a negative status. Collective.

        Raises:
            _Refused: on all ranks, if status was negative on any.
        """
        if status >= 0:
            text = ""
        elif reason is not None:
            text = reason
        else:
            text = bytes(ffi.string(lib.smpi_reason())).decode("utf-8", "replace")
        outcomes = [
            _OUTCOME.unpack(record) for record in _gather(self.comm, _OUTCOME.pack(status, payload, text.encode()))
        ]
        refusals = [
            (facts.world_rank, outcome[2].rstrip(b"\0").decode("utf-8", "ignore"))
            for facts, outcome in zip(self.facts, outcomes, strict=True)
            if outcome[0] < 0
        ]
        if refusals:
            raise _Refused(_by_reason(refusals))
        return [outcome[1] for outcome in outcomes]


# ---- what follows from the facts ----


def _segment_bytes(facts: Sequence[_Facts]) -> int:
    """Bytes of one segment under the driver memfd: 1 TiB, halved until every rank may have them all.

    Half of what RLIMIT_AS leaves is left to the program.

    Raises:
        _Refused: less than SMALLEST would be left.
    """
    space = min(MOST_SPACE, *(f.span // 4 or MOST_SPACE for f in facts), *(f.space_left // 2 for f in facts))
    largest = min(f.file_limit for f in facts)
    size = TERABYTE
    while size >= SMALLEST and (size > largest or size * len(facts) + UNIT > space):
        size //= 2
    if size < SMALLEST:
        limits = [
            (
                f.world_rank,
                f"limits of file size (ulimit -f: {f.file_limit}) or address space (ulimit -v: {f.space_left} left)",
            )
            for f in facts
            if min(f.file_limit, f.space_left) < machine.NO_LIMIT
        ]
        raise _Refused(f"no room for {len(facts)} segments of at least {SMALLEST >> 20} MiB: {_by_reason(limits)}")
    return size


def _common_base(facts: Sequence[_Facts], total: int) -> int:
    """Where `total` bytes are free on every rank, 0 if nowhere."""
    free = (1 << machine.CELLS) - 1
    for f in facts:
        free &= int.from_bytes(f.cells, "little")
    run = (1 << -(-total // machine.CELL)) - 1
    starts = sorted(range(1, machine.CELLS), key=lambda cell: abs(cell - FAVOURITE_CELL))
    return next((cell * machine.CELL for cell in starts if free >> cell & run == run), 0)


def _cores(facts: Sequence[_Facts]) -> int:
    """Cores the ranks may use together: all that any may run on, as far as control groups grant time for them."""
    mask = 0
    for f in facts:
        mask |= int.from_bytes(f.mask, "little")
    return max(1, min(mask.bit_count(), max(f.quota for f in facts)))


# ---- drivers ----


def _start(team: _Team, ptr: Any, status: int, cores: int, populate: bool) -> None:
    """The end of every driver: segments are mapped (or status says why not), so exchange addresses and build the heap.

    Raises:
        _Refused: on all ranks, if any rank's status is negative or its heap could not be built.
    """
    own = int(lib.smpi_world_base(ptr, team.rank))
    bases = [int.from_bytes(payload[:8], "little") for payload in team.agree(status, own.to_bytes(8, "little"))]
    lib.smpi_world_tune(ptr, min(f.stage_chunk for f in team.facts), min(f.stream_min for f in team.facts))
    heap_max = settings.number("STRATAMPI_HEAP_MAX") or machine.memory_limit()
    team.agree(lib.smpi_world_start(ptr, ffi.new("uint64_t[]", bases), cores, heap_max, populate))


def _memfd(team: _Team, cores: int) -> Any:
    """Sparse memory files, passed over unix sockets and mapped at one address.

    Raises:
        _Refused: on all ranks.
    """
    size = _segment_bytes(team.facts)
    base = _common_base(team.facts, size * team.size)
    ptr = lib.smpi_world_new(team.rank, team.size)
    try:
        name = ffi.new("char[64]")
        status = lib.smpi_memfd_open(ptr, size) if ptr != ffi.NULL else lib.SMPI_ERR_NOMEM
        if status == 0:
            status = lib.smpi_memfd_listen(ptr, name)
        names = team.agree(status, bytes(ffi.buffer(name)))
        status = lib.smpi_memfd_exchange(ptr, b"".join(names), team.facts[0].token, EXCHANGE_MS)
        if status == 0:
            status = lib.smpi_memfd_map(ptr, base)
            if status == lib.SMPI_ERR_REFUSED and base != 0:  # taken a moment ago: this rank's peers get a delta
                status = lib.smpi_memfd_map(ptr, 0)
        _start(team, ptr, status, cores, machine.commits_strictly())
        lib.smpi_memfd_finish(ptr)
    except BaseException:
        lib.smpi_world_delete(ptr)
        raise
    return ptr


def _window(team: _Team, cores: int, ranks_on_machine: int) -> Any:
    """Segments of fixed size in an MPI shared window.

    Raises:
        _Refused: on all ranks.
    """
    page = os.sysconf("SC_PAGE_SIZE")
    wanted = min(f.window_size for f in team.facts)
    room = min(f.shm_free for f in team.facts) * 7 // 8 // ranks_on_machine  # MPI needs some of it itself
    size = min(wanted, room) // UNIT * UNIT
    if size == 0:
        raise _Refused(
            f"STRATAMPI_WINDOW_SIZE is {wanted} bytes, /dev/shm has {room} a rank, and {UNIT} is the least of use"
        )
    ptr = lib.smpi_world_new(team.rank, team.size)
    try:
        window, reason = None, None
        status = 0 if ptr != ffi.NULL else lib.SMPI_ERR_NOMEM
        try:
            window = _allocate_shared(size + page, 1, MPI.INFO_NULL, team.comm)
        except MPI.Exception as error:
            status, reason = lib.SMPI_ERR_REFUSED, f"MPI_Win_allocate_shared: {error}"
        team.agree(status, reason=reason)
        assert window is not None
        _windows.append(window)
        bases = [-(-window.Shared_query(r)[0].address // page) * page for r in range(team.size)]
        status = lib.smpi_adopt(ptr, ffi.new("uint64_t[]", bases), size)
        if (
            status == 0
        ):  # where the addresses cannot be had once more the window's own do, as long as MPI is not finalized
            if lib.smpi_adopt_again(ptr, _common_base(team.facts, size * team.size)) == lib.SMPI_ERR_REFUSED:
                lib.smpi_adopt_again(ptr, 0)
        # The file system may fill up meanwhile: pages are asked for when the heap grows, never at a first touch.
        _start(team, ptr, status, cores, True)
    except BaseException:
        lib.smpi_world_delete(ptr)
        raise
    return ptr


# ---- all of it ----


def _say(line: str) -> None:
    """One line on stderr, in one write, so that ranks do not mix theirs."""
    sys.stderr.write(f"stratampi: {line}\n")
    sys.stderr.flush()


def _bring_up(everybody: MPI.Intracomm) -> World:
    """Collective over COMM_WORLD: every rank finds its supernode and maps it."""
    global _everybody, _quiet_tag
    _everybody = everybody
    _quiet_tag = everybody.Get_attr(MPI.TAG_UB) or 0
    level = settings.text("STRATAMPI_LOG")
    if everybody.Get_rank() == 0 and level != "none":
        for complaint in settings.complaints():
            _say(complaint)

    node = MPI.Intracomm(everybody.Split_type(MPI.COMM_TYPE_SHARED))
    node.Set_errhandler(MPI.ERRORS_RETURN)
    record = _FACTS.pack(*_own_facts(everybody.Get_rank()))
    facts = [_Facts(*_FACTS.unpack(other)) for other in _gather(node, record)]
    machine_size = len(facts)
    problem = _difference("STRATAMPI_SUPERNODE_SIZE", [(f.world_rank, str(f.supernode_size)) for f in facts])
    slice_size = facts[0].supernode_size
    if not problem and 0 < slice_size < machine_size:
        own_slice = node.Get_rank() // slice_size
        facts = facts[own_slice * slice_size : (own_slice + 1) * slice_size]
        part = MPI.Intracomm(node.Split(own_slice, node.Get_rank()))
        node.Free()
        node = part
    problem = problem or _difference(
        "STRATAMPI_FABRIC", [(f.world_rank, f.fabric.rstrip(b"\0").decode()) for f in facts]
    )
    team = _Team(node, facts)
    try:
        result, problem = _choose(team, machine_size, problem)
    finally:
        node.Free()
    if result.rank == 0 and level != "none":
        who = _ranks(f.world_rank for f in facts)
        if problem:
            _say(f"{who}: everything goes through MPI, slower than need be: {problem}")
        elif level == "info":
            _say(f"{who}: driver {result.driver} ({result.why}), {result.cores} cores")
    return result


def _difference(name: str, values: Sequence[tuple[int, str]]) -> str:
    """Who says what of the variable `name`, if not all ranks say the same; else ""."""
    if len({value for _, value in values}) == 1:
        return ""
    return f"{name} must be the same on all ranks of a machine ({_by_reason(values)})"


def _choose(team: _Team, machine_size: int, problem: str) -> tuple[World, str]:
    """The first driver that all ranks can have, none if there is a problem already, and the problem if there is one."""
    cores = _cores(team.facts)
    wish = team.facts[0].fabric.rstrip(b"\0").decode()

    def without(why: str) -> World:
        return World(None, False, "none", why, team.rank, team.size, NO_TOKEN, cores)

    if problem:
        return without(problem), problem
    if wish == "none":
        return without("STRATAMPI_FABRIC=none"), ""

    refusals: list[str] = []
    for driver in ("memfd", "window") if wish == "auto" else (wish,):
        try:
            ptr = _memfd(team, cores) if driver == "memfd" else _window(team, cores, machine_size)
        except _Refused as refusal:
            refusals.append(f"{driver}: {refusal}")
            continue
        lib.smpi_world_set_hook(ptr, lib.smpi_py_hook)
        first = "first choice" if wish == "auto" else f"STRATAMPI_FABRIC={wish}"
        why = "; ".join(refusals) or first
        return World(ptr, True, driver, why, team.rank, team.size, team.facts[0].token, cores), ""
    why = "; ".join(refusals)
    return without(why), why


# ---- the wait hook ----

_pending = threading.local()


def _keep_exception(_type: type[BaseException], value: BaseException, traceback: TracebackType | None) -> None:
    _pending.exception = value.with_traceback(traceback)


def take_pending_exception() -> BaseException | None:
    """The exception that Python code raised inside this thread's last native wait, once; None if there was none."""
    exception: BaseException | None = getattr(_pending, "exception", None)
    _pending.exception = None
    return exception


def progress() -> None:
    """Lets the MPI library work on what has arrived: messages and one-sided accesses of peers.

    By a probe of COMM_WORLD. One of COMM_SELF asks MPICH's queue of messages to oneself and nothing else, and a message found
    ends a probe before any progress, hence the tag.
    """
    if _everybody is not None and not MPI.Is_finalized():
        _everybody.Iprobe(MPI.ANY_SOURCE, _quiet_tag)


def _wait_hook() -> int:
    """Called by a rank that waits in native code, about once a millisecond, with the GIL.

    That Python code runs at all is half the purpose: it lets signal handlers run, and what they raise
    (KeyboardInterrupt) ends the wait. The other half is progress of MPI, which a peer may need before it can come to
    where we wait for it.
    """
    for _ in range(PROGRESS_CALLS):
        progress()
    return 0


ffi.def_extern(name="smpi_py_hook", error=lib.SMPI_ERR_INTERRUPTED, onerror=_keep_exception)(_wait_hook)
