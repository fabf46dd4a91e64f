"""What an operator costs: plain mpi4py and stratampi in turn, in the same processes.

    mpirun -n 2 python -m stratampi.bench --ops allreduce,alltoallv --sizes 8,1M,64M

One *case* is an operator, a size and a kind of array. Its *contenders* (plain mpi4py on its own communicator,
stratampi on another) are timed in rounds, in turn, so that whatever else the machine does meets both alike; absolute
times on a shared machine swing by a factor, ratios of neighbouring rounds do not. One round: a barrier by plain MPI,
then `iterations` calls back to back; its time is the slowest rank's total divided by the iterations. A case reports
the median over rounds, and as ratio the median of the rounds' ratios, not the ratio of the medians.

Plain mpi4py always works on NumPy's own arrays, because that is what its users have; `--buffers` says what stratampi
gets.

Not done: a barrier between the calls, as some OSU tests have. It would add the barrier to every time, and back-to-back
calls of a rooted operator are what programs do. So a rooted operator's time is its throughput: a root may run ahead of
the others.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import IO, Any

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

Array = NDArray[Any]
Allocator = Callable[[int, Any], Array]  # (items, dtype) -> one-dimensional array

SIZES = "8,1K,64K,1M,16M,64M"
LIMIT_FROM = 64 << 10  # below this many bytes a call is latency, and a share of the copy limit means nothing

SIZE_HELP = """\
sizes
  A size is the bytes of a rank's largest user buffer, all ranks' blocks together (P ranks):
    bcast, reduce, allreduce    the vector                       OSU's message size = size
    allgather, allgatherv       the receive buffer, P blocks     OSU's message size = size / P
    alltoall, alltoallv         the send buffer, P blocks        OSU's message size = size / P
    gather, gatherv             the root's receive buffer        OSU's message size = size / P
    scatter, scatterv           the root's send buffer           OSU's message size = size / P
    reduce_scatter(_block)      the send buffer, P blocks        OSU's message size = size
    scan, exscan                the vector                       OSU's message size = size
  The v-forms and reduce_scatter have equal counts, as OSU's tests. Sizes are rounded to whole items, at least one a block.

columns
  us      microseconds a call: slowest rank, median over rounds
  ratio   mpi4py's time / stratampi's time in the same round, median: above 1 stratampi is faster
  bus     GB/s (1e9) after nccl-tests: size / time, times 2(P-1)/P for allreduce, 1 for bcast, reduce, scan
          and exscan, (P-1)/P for all others
  limit   share of the copy limit: the bytes all ranks together must at least read and write, over what they read and
          write per second when all of them copy as many bytes at once (measured beside the case, cached or streamed, the
          faster): bcast and exscan 2(P-1)S, reduce and reduce_scatter (P+1)S, gather and scatter 2S, all others 2PS for size S.
          More than 100% is possible where several
          ranks read the same bytes and a shared cache serves all but the first.
  path    how stratampi's calls went: inline, direct, staged, or mpi (the MPI library did it)

Under MPI4PY_RC_THREAD_LEVEL=single the MPI library may choose faster algorithms than under mpi4py's default, multiple.
"""


# ------------------------------------------------------------------------------------------------------------ operators


@dataclass(frozen=True)
class Operator:
    """What the figures of one operator are made of; P ranks, S bytes as defined in SIZE_HELP."""

    name: str
    blocks: bool  # the size counts P blocks, one a rank
    bus: Callable[[int], float]  # P -> factor from S / time to bus bandwidth
    traffic: Callable[[int], float]  # P -> bytes read and written by all ranks together, at least, in units of S


def _whole(ranks: int) -> float:
    return 1.0


def _others(ranks: int) -> float:
    return (ranks - 1) / ranks


OPERATORS: dict[str, Operator] = {
    operator.name: operator
    for operator in (
        Operator("barrier", False, lambda ranks: 0.0, lambda ranks: 0.0),
        # every rank but the root reads the vector once and writes it once
        Operator("bcast", False, _whole, lambda ranks: 2.0 * (ranks - 1)),
        # every rank's vector is read once, the root's result written once
        Operator("reduce", False, _whole, lambda ranks: ranks + 1.0),
        # ... and the result is written once on every rank
        Operator("allreduce", False, lambda ranks: 2 * _others(ranks), lambda ranks: 2.0 * ranks),
        # every rank writes S bytes, and each of them was read somewhere
        Operator("allgather", True, _others, lambda ranks: 2.0 * ranks),
        Operator("allgatherv", True, _others, lambda ranks: 2.0 * ranks),
        Operator("alltoall", True, _others, lambda ranks: 2.0 * ranks),
        Operator("alltoallv", True, _others, lambda ranks: 2.0 * ranks),
        # the root's buffer is written or read once, the blocks on the other side as well
        Operator("gather", True, _others, lambda ranks: 2.0),
        Operator("gatherv", True, _others, lambda ranks: 2.0),
        Operator("scatter", True, _others, lambda ranks: 2.0),
        Operator("scatterv", True, _others, lambda ranks: 2.0),
        # every rank's vector is read once, one block of the result is written on each
        Operator("reduce_scatter_block", True, _others, lambda ranks: ranks + 1.0),
        Operator("reduce_scatter", True, _others, lambda ranks: ranks + 1.0),
        # every rank's vector is read once, a result is written on each; exscan: not the last one's, not on the first
        Operator("scan", False, _whole, lambda ranks: 2.0 * ranks),
        Operator("exscan", False, _whole, lambda ranks: 2.0 * (ranks - 1)),
    )
}


@dataclass(frozen=True)
class Case:
    """One operator on arrays of one size, seen from one rank; `size` is bytes asked for, `bytes` bytes used."""

    operator: Operator
    size: int
    dtype: np.dtype[Any]
    rank: int
    ranks: int

    @property
    def items(self) -> int:
        """Items of the largest user buffer of a rank."""
        if self.operator.name == "barrier":
            return 0
        parts = self.ranks if self.operator.blocks else 1
        return max(1, self.size // (self.dtype.itemsize * parts)) * parts

    @property
    def bytes(self) -> int:
        return self.items * self.dtype.itemsize

    @property
    def osu_bytes(self) -> int:
        """The message size that OSU's tests would print for this case."""
        return self.bytes // (self.ranks if self.operator.blocks and "reduce" not in self.operator.name else 1)

    @property
    def send_items(self) -> int:
        return self.items // self.ranks if "gather" in self.operator.name else self.items

    @property
    def recv_items(self) -> int:
        return self.items // self.ranks if "scatter" in self.operator.name else self.items

    def pattern(self, rank: int) -> Array:
        """What `rank` sends: shape (send_items,). Small whole numbers, so sums are exact in any order; period 101 tells
        blocks apart."""
        wide = np.arange(self.send_items, dtype=np.int64)
        wide += 13 * rank
        wide %= 101
        return wide.astype(self.dtype)

    def expected(self) -> Array | None:
        """This rank's right result by stratampi.ref, or None where the operator leaves nothing here."""
        from stratampi import ref

        name = self.operator.name
        if name == "barrier":
            return None
        sends = [self.pattern(rank) for rank in range(self.ranks)]
        counts = [self.items // self.ranks] * self.ranks
        results: Sequence[Array | None]
        if name == "alltoallv":
            results = ref.alltoallv(sends, [counts] * self.ranks)
        elif name in ("scatterv", "reduce_scatter"):
            results = getattr(ref, name)(sends, counts)
        elif name in ("alltoall", "scatter", "reduce_scatter_block"):
            results = getattr(ref, name)([send.reshape(self.ranks, -1) for send in sends])
        else:
            results = getattr(ref, name)(sends)
        mine = results[self.rank]
        return None if mine is None else mine.ravel()


class Call:
    """A case bound to a communicator and its buffers: call it to run the operator once."""

    def __init__(self, case: Case, comm: MPI.Intracomm, allocate: Allocator) -> None:
        self.case = case
        name = case.operator.name
        self.send: Array | None = None
        self.recv: Array | None = None
        if name != "barrier":
            self.recv = allocate(case.recv_items, case.dtype)
            self.recv.fill(0)
            if name == "bcast":
                if case.rank == 0:
                    self.recv[:] = case.pattern(0)
            else:
                self.send = allocate(case.send_items, case.dtype)
                self.send[:] = case.pattern(case.rank)
        counts = (case.items // case.ranks,) * case.ranks
        displs = tuple(itertools.accumulate(counts[:-1], initial=0))
        vector = (counts, displs)
        run: Callable[[], object]
        if name == "barrier":
            run = comm.Barrier
        elif name == "bcast":
            run = partial(comm.Bcast, self.recv, 0)
        elif name == "reduce":
            run = partial(comm.Reduce, self.send, self.recv if case.rank == 0 else None, MPI.SUM, 0)
        elif name == "gather":
            run = partial(comm.Gather, self.send, self.recv if case.rank == 0 else None, 0)
        elif name == "gatherv":
            run = partial(comm.Gatherv, self.send, [self.recv, vector] if case.rank == 0 else None, 0)
        elif name == "scatter":
            run = partial(comm.Scatter, self.send if case.rank == 0 else None, self.recv, 0)
        elif name == "scatterv":
            run = partial(comm.Scatterv, [self.send, vector] if case.rank == 0 else None, self.recv, 0)
        elif name == "reduce_scatter":
            run = partial(comm.Reduce_scatter, self.send, self.recv, counts)
        elif name == "allgatherv":
            run = partial(comm.Allgatherv, self.send, [self.recv, vector])
        elif name == "alltoallv":
            run = partial(comm.Alltoallv, [self.send, vector], [self.recv, vector])
        else:
            run = partial(getattr(comm, name.capitalize()), self.send, self.recv)
        self.run = run

    def forget(self) -> None:
        """Clears the result, so that a right answer left by an earlier call cannot pass for this one's."""
        if self.recv is not None and not (self.case.operator.name == "bcast" and self.case.rank == 0):
            self.recv.fill(0)

    def is_right(self, expected: Array | None) -> bool:
        if expected is None or self.recv is None:
            return True
        return bool(np.array_equal(self.recv, expected))


# --------------------------------------------------------------------------------------------------------------- timing


@dataclass(frozen=True)
class Contender:
    """A library under test: a communicator of its own and where its arrays come from."""

    name: str
    comm: MPI.Intracomm
    allocate: Allocator


@dataclass
class Timing:
    """One contender's measurement of one case. `rounds`: microseconds a call, one entry a round."""

    iterations: int
    rounds: list[float] = field(default_factory=list)
    right: bool | None = None  # None: not checked

    @property
    def median(self) -> float:
        return statistics.median(self.rounds)


def _elapsed(run: Callable[[], object], iterations: int, sync: MPI.Intracomm) -> int:
    """Nanoseconds that the slowest rank took for `iterations` calls."""
    sync.Barrier()
    start = time.perf_counter_ns()
    for _ in itertools.repeat(None, iterations):
        run()
    mine = time.perf_counter_ns() - start
    return int(sync.allreduce(mine, op=MPI.MAX))


def calibrate(run: Callable[[], object], sync: MPI.Intracomm, round_time: float) -> int:
    """How many calls take about `round_time` seconds; the same answer on all ranks. Also the warm-up."""
    target = round_time * 1e9
    _elapsed(run, 1, sync)
    iterations = 1
    while True:
        taken = max(1, _elapsed(run, iterations, sync))
        if taken * 4 >= target or iterations >= 1 << 22:
            return max(1, round(iterations * target / taken))
        iterations *= min(8, max(2, int(target / taken / 2)))


def measure(
    case: Case,
    contenders: Sequence[Contender],
    sync: MPI.Intracomm,
    *,
    rounds: int = 5,
    round_time: float = 0.02,
    check: bool = False,
) -> dict[str, Timing]:
    """Times one case for every contender, in alternating rounds. Collective over `sync`, a plain MPI communicator.

    rounds: at least 1; round_time: seconds of one contender's round. check: compares results before and after the
    timing with stratampi.ref; Timing.right is then the same on all ranks. Returns the timings by contender's name, the
    same on all ranks.
    """
    calls = {contender.name: Call(case, contender.comm, contender.allocate) for contender in contenders}
    expected = case.expected() if check else None
    right = dict.fromkeys(calls, True)

    def compare() -> None:
        for name, call in calls.items():
            call.forget()
            call.run()
            right[name] &= bool(sync.allreduce(call.is_right(expected), op=MPI.LAND))

    if check:
        compare()
    timings = {name: Timing(calibrate(call.run, sync, round_time)) for name, call in calls.items()}
    collecting = gc.isenabled()
    gc.disable()
    try:
        for number in range(rounds):
            order = list(calls) if number % 2 == 0 else list(reversed(calls))
            for name in order:
                timing = timings[name]
                taken = _elapsed(calls[name].run, timing.iterations, sync)
                timing.rounds.append(taken / timing.iterations / 1e3)
    finally:
        if collecting:
            gc.enable()
    if check:
        compare()
        for name, timing in timings.items():
            timing.right = right[name]
    return timings


def copy_limit(sync: MPI.Intracomm, nbytes: int, *, rounds: int = 3, round_time: float = 0.01) -> tuple[float, float]:
    """Bytes per second that all ranks together copy when each copies an array of `nbytes` at once: (cached, whole).

    cached: in pieces of 256 KiB, which the C library copies through the caches. whole: in one call, by the C library or
    by the runtime (Alltoall of one rank with itself, past the caches where that is better), whichever is faster. Best
    of `rounds`: it is a limit.
    """
    from stratampi import accelerate, array

    source = np.ones(max(1, nbytes), np.uint8)
    target = np.zeros_like(source)
    alone = accelerate(MPI.Intracomm(MPI.COMM_SELF).Dup())
    registered = [array(source), array(target)]
    pieces = [(target[at : at + (256 << 10)], source[at : at + (256 << 10)]) for at in range(0, source.size, 256 << 10)]

    def cached() -> None:
        for piece, origin in pieces:
            np.copyto(piece, origin)

    def best(run: Callable[[], object]) -> float:
        iterations = calibrate(run, sync, round_time)
        taken = min(_elapsed(run, iterations, sync) for _ in range(rounds)) / iterations
        return sync.Get_size() * source.size / (taken / 1e9)

    whole = max(best(partial(np.copyto, target, source)), best(partial(alone.Alltoall, *registered)))
    alone.Free()
    return best(cached), whole


# -------------------------------------------------------------------------------------------------------------- records


def record(case: Case, buffers: str, timings: dict[str, Timing], limit: tuple[float, float] | None) -> dict[str, Any]:
    """One case as a flat JSON object: times in microseconds, bandwidths in GB/s (1e9)."""
    out: dict[str, Any] = {
        "op": case.operator.name,
        "size": case.size,
        "bytes": case.bytes,
        "osu_bytes": case.osu_bytes,
        "dtype": case.dtype.name,
        "buffers": buffers,
        "ranks": case.ranks,
    }
    for name, timing in timings.items():
        seconds = timing.median / 1e6
        out[f"{name}_us"] = round(timing.median, 4)
        out[f"{name}_us_min"] = round(min(timing.rounds), 4)
        out[f"{name}_us_max"] = round(max(timing.rounds), 4)
        out[f"{name}_rounds_us"] = [round(value, 4) for value in timing.rounds]
        out[f"{name}_iterations"] = timing.iterations
        out[f"{name}_bus_gbs"] = round(case.operator.bus(case.ranks) * case.bytes / seconds / 1e9, 4)
        if limit is not None:
            moved = case.operator.traffic(case.ranks) * case.bytes
            out[f"{name}_limit_share"] = round(moved / seconds / (2 * max(limit)), 4)
        if timing.right is not None:
            out[f"{name}_right"] = timing.right
    if limit is not None:
        out["copy_cached_gbs"], out["copy_whole_gbs"] = (round(value / 1e9, 4) for value in limit)
    if "mpi4py" in timings and "stratampi" in timings:
        pairs = zip(timings["mpi4py"].rounds, timings["stratampi"].rounds, strict=True)
        out["ratio"] = round(statistics.median(plain / ours for plain, ours in pairs), 4)
    return out


def thread_level() -> str:
    """The level of thread support that MPI was started with, as MPI4PY_RC_THREAD_LEVEL spells it."""
    levels = {
        MPI.THREAD_SINGLE: "single",
        MPI.THREAD_FUNNELED: "funneled",
        MPI.THREAD_SERIALIZED: "serialized",
        MPI.THREAD_MULTIPLE: "multiple",
    }
    return levels.get(MPI.Query_thread(), "unknown")


def mpi_library() -> str:
    """Name and version of the MPI library in one short line."""
    vendor, version = MPI.get_vendor()
    return f"{vendor} {'.'.join(map(str, version))}"


def machine() -> dict[str, Any]:
    """The parts of this machine that a time depends on."""
    model, flags = platform.processor() or platform.machine(), set[str]()
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if line.startswith("model name"):
                    model = line.split(":", 1)[1].strip()
                elif line.startswith("flags"):
                    flags = set(line.split())
                    break
    except OSError:
        pass
    return {
        "cpu": model,
        "isa": next((name for name, flag in (("avx512", "avx512bw"), ("avx2", "avx2")) if flag in flags), "base"),
        "cores": len(os.sched_getaffinity(0)),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "numpy": np.__version__,
    }


def context(libraries: Sequence[str]) -> dict[str, Any]:
    """What all cases of a run have in common; goes into every JSON line."""
    import mpi4py

    out: dict[str, Any] = {
        "mpi": mpi_library(),
        "mpi4py": mpi4py.__version__,
        "thread_level": thread_level(),
        "machine": machine(),
    }
    if "stratampi" in libraries:
        from stratampi.world import world

        here = world()
        out["driver"] = here.driver
        out["why"] = here.why
    return out


def path_counts(operator: str) -> dict[str, int]:
    """Calls of `operator` in this process so far, by path; {} where the native path is not there."""
    from stratampi.stats import stats

    return dict(stats()["calls"].get(operator, {}))


def path_taken(before: dict[str, int], after: dict[str, int]) -> str:
    """Such as "direct", or "direct+mpi" where calls went several ways; "mpi" where none was counted."""
    return "+".join(path for path, count in after.items() if count > before.get(path, 0)) or "mpi"


# --------------------------------------------------------------------------------------------------------------- output


def size_text(nbytes: int) -> str:
    """1536 -> "1.5K"; powers of 1024."""
    value = float(nbytes)
    for suffix in ("", "K", "M", "G"):
        if value < 1024:
            return f"{value:.4g}{suffix}"
        value /= 1024
    return f"{value:.4g}T"


def parse_size(text: str) -> int:
    """From "64K" to 65536; suffixes K, M, G are powers of 1024. ValueError for anything else."""
    digits = text.strip().upper().removesuffix("B")
    factor = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(digits[-1:], 1)
    if factor > 1:
        digits = digits[:-1]
    if not digits.isdecimal() or int(digits) == 0:
        raise ValueError(f"not a size: {text!r} (64, 64K, 1M, 2G)")
    return int(digits) * factor


HEADER = (
    f"{'operator':<21}{'size':>7}  {'buffers':<11}{'mpi4py us':>12}{'stratampi us':>14}{'ratio':>8}"
    f"{'bus GB/s':>10}{'limit':>7}  path"
)


def row(entry: dict[str, Any]) -> str:
    """One record as a line under HEADER; bus and limit are stratampi's, or mpi4py's where it ran alone."""

    def number(key: str, width: int, form: str) -> str:
        value = entry.get(key)
        return f"{'-':>{width}}" if value is None else f"{value:>{width}{form}}"

    name = "stratampi" if "stratampi_us" in entry else "mpi4py"
    is_data = entry["bytes"] > 0
    wrong = [library for library in ("mpi4py", "stratampi") if entry.get(f"{library}_right") is False]
    return (
        f"{entry['op']:<21}{size_text(entry['size']) if is_data else '-':>7}  {entry['buffers']:<11}"
        f"{number('mpi4py_us', 12, '.2f')}{number('stratampi_us', 14, '.2f')}{number('ratio', 8, '.2f')}"
        f"{number(f'{name}_bus_gbs' if is_data else '', 10, '.2f')}{number(f'{name}_limit_share', 7, '.0%')}"
        f"  {entry.get('path', '-')}"
    ) + (f"   WRONG RESULT: {', '.join(wrong)}" if wrong else "")


def plot(entries: Sequence[dict[str, Any]], path: str) -> None:
    """One panel an operator: time over size, a line per library and kind of array. ImportError without matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = [name for name in OPERATORS if name != "barrier" and any(entry["op"] == name for entry in entries)]
    columns = min(4, max(1, len(names)))
    lines = max(1, -(-len(names) // columns))
    shape = (4 * columns, 3.2 * lines)
    figure, axes = pyplot.subplots(lines, columns, figsize=shape, squeeze=False, layout="constrained")
    for axis, name in itertools.zip_longest(axes.flat, names):
        if name is None:
            axis.set_visible(False)
            continue
        for library, style in (("mpi4py", "--"), ("stratampi", "-")):
            for buffers, colour in (("plain", "tab:blue"), ("registered", "tab:orange")):
                points = [
                    (entry["bytes"], entry[f"{library}_us"])
                    for entry in entries
                    if entry["op"] == name and entry["buffers"] == buffers and f"{library}_us" in entry
                ]
                if points and not (library == "mpi4py" and buffers == "registered"):
                    label = library if library == "mpi4py" else f"{library}, {buffers}"
                    axis.loglog(*zip(*sorted(points), strict=True), style, color=colour, marker=".", label=label)
        axis.set(title=name, xlabel="bytes", ylabel="us")
        axis.grid(alpha=0.3)
        axis.legend(fontsize="small")
    head = entries[0]
    figure.suptitle(f"{head['ranks']} ranks, {head['mpi']}, thread level {head['thread_level']}, {head['dtype']}")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


# ----------------------------------------------------------------------------------------------------------------- main


def make_contenders(libraries: Iterable[str], buffers: str) -> list[Contender]:
    """Communicators of their own over all ranks: collective over COMM_WORLD. Never freed: they live as long as the run.

    buffers: "registered" or "plain", for stratampi; mpi4py gets NumPy's arrays always.
    """
    out = []
    for name in libraries:
        if name == "mpi4py":
            out.append(Contender(name, plain_world().Dup(), np.empty))
        elif name == "stratampi":
            # Imported only here, so that a run of mpi4py alone does not start the native runtime.
            from stratampi import MPI as accelerated
            from stratampi import memory

            allocate = memory.empty if buffers == "registered" else np.empty
            out.append(Contender(name, accelerated.COMM_WORLD.Dup(), allocate))
        else:
            raise ValueError(f"unknown library {name!r}")
    return out


def plain_world() -> MPI.Intracomm:
    """COMM_WORLD as mpi4py's own class, also where the runner has put another in its place."""
    return MPI.Intracomm(MPI.COMM_WORLD)


def _choices(known: Iterable[str]) -> Callable[[str], list[str]]:
    known = list(known)

    def parse(text: str) -> list[str]:
        names = [name.strip() for name in text.split(",") if name.strip()]
        unknown = [name for name in names if name not in known]
        if unknown or not names:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown) or 'nothing given'}; known: {', '.join(known)}")
        return names

    return parse


def _sizes(text: str) -> list[int]:
    try:
        return [parse_size(part) for part in text.split(",") if part.strip()]
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _dtype(text: str) -> np.dtype[Any]:
    try:
        dtype = np.dtype(text)
    except TypeError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if dtype.kind not in "iufc":
        raise argparse.ArgumentTypeError(f"{text} is not a numeric type")
    return dtype


def parser() -> argparse.ArgumentParser:
    """The command line, also for tools that want run() with its defaults."""
    out = argparse.ArgumentParser(
        prog="python -m stratampi.bench",
        description="Times collective operators of plain mpi4py and stratampi in turn in the same processes.",
        epilog=SIZE_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    out.add_argument("--ops", type=_choices(OPERATORS), default=list(OPERATORS), help="comma-separated; default: all")
    out.add_argument("--sizes", type=_sizes, default=_sizes(SIZES), help=f"bytes, see below; default {SIZES}")
    out.add_argument("--dtype", type=_dtype, default=np.dtype("float64"), help="NumPy type; default float64")
    out.add_argument(
        "--buffers",
        type=_choices(("registered", "plain")),
        default=["registered", "plain"],
        help="stratampi's arrays: registered (stratampi.empty), plain (np.empty); default both",
    )
    out.add_argument("--library", choices=("mpi4py", "stratampi", "both"), default="both")
    out.add_argument("--rounds", type=int, default=5, help="rounds of each contender; default 5")
    out.add_argument("--round-time", type=float, default=0.02, help="seconds of one round; default 0.02")
    out.add_argument("--time-limit", type=float, default=85.0, help="seconds; later cases are skipped; default 85")
    out.add_argument("--check", action="store_true", help="compare every case's results with stratampi.ref")
    out.add_argument("--json", metavar="FILE", help="write a JSON line as each case finishes; - is standard output")
    out.add_argument("--plot", metavar="PNG", help="write a picture (needs matplotlib: the extra `plot`)")
    return out


def run(arguments: argparse.Namespace, lines: IO[str] | None = None) -> list[dict[str, Any]]:
    """All cases of `arguments` (from parser()). Collective over COMM_WORLD; returns the records, the same on all ranks.

    lines: where rank 0 writes a JSON line per case as it finishes.
    """
    start = time.monotonic()
    sync = plain_world().Dup()
    rank, ranks = sync.Get_rank(), sync.Get_size()
    libraries = ["mpi4py", "stratampi"] if arguments.library == "both" else [arguments.library]
    kinds = ["plain"] if libraries == ["mpi4py"] else arguments.buffers
    contenders = {kind: make_contenders(libraries, kind) for kind in kinds}
    common = context(libraries)
    # JSON on standard output must stay readable by a program: the table goes to standard error then.
    table = sys.stderr if arguments.json == "-" else sys.stdout
    entries: list[dict[str, Any]] = []

    def show(text: str) -> None:
        if rank == 0:
            print(text, file=table, flush=True)

    driver = f", driver {common['driver']}" if "driver" in common else ""
    show(f"# {ranks} ranks, {common['mpi']}, thread level {common['thread_level']}{driver}, {arguments.dtype.name}")
    show(f"# {common['machine']['cpu']}, {common['machine']['cores']} cores for rank 0")
    show(HEADER)
    skipped = 0
    for name, kind, size in itertools.product(arguments.ops, kinds, arguments.sizes):
        if name == "barrier" and (kind, size) != (kinds[0], arguments.sizes[0]):
            continue
        if sync.bcast(time.monotonic() - start > arguments.time_limit):
            skipped += 1
            continue
        case = Case(OPERATORS[name], size, arguments.dtype, rank, ranks)
        limit = None
        moved = int(case.operator.traffic(ranks) * case.bytes / (2 * ranks))
        if case.bytes >= LIMIT_FROM and moved > 0:
            limit = copy_limit(sync, moved)
        before = path_counts(name) if "stratampi" in libraries else {}
        timings = measure(
            case,
            contenders[kind],
            sync,
            rounds=arguments.rounds,
            round_time=arguments.round_time,
            check=arguments.check,
        )
        entry = record(case, kind, timings, limit)
        if name == "barrier":
            entry["buffers"] = "-"
        if "stratampi" in libraries:
            entry["path"] = path_taken(before, path_counts(name))
        entry.update(common)
        entries.append(entry)
        show(row(entry))
        if lines is not None:
            print(json.dumps(entry), file=lines, flush=True)
    if skipped:
        show(f"# {skipped} cases skipped: --time-limit {arguments.time_limit:g} s is over")
    sync.Free()
    return entries


def main(argv: Sequence[str] | None = None) -> int:
    """0, or 1 when --check found a wrong result."""
    arguments = parser().parse_args(argv)
    if arguments.rounds < 1:
        parser().error("--rounds must be at least 1")
    is_first = MPI.COMM_WORLD.Get_rank() == 0
    if arguments.plot and is_first:
        try:
            import matplotlib  # noqa: F401
        except ImportError:
            print("python -m stratampi.bench: --plot needs matplotlib: pip install 'stratampi[plot]'", file=sys.stderr)
            arguments.plot = None
    lines: IO[str] | None = None
    if arguments.json and is_first:
        lines = sys.stdout if arguments.json == "-" else open(arguments.json, "w", encoding="utf-8")  # noqa: SIM115
    try:
        entries = run(arguments, lines)
    finally:
        if lines is not None and lines is not sys.stdout:
            lines.close()
    if arguments.plot and is_first and entries:
        plot(entries, arguments.plot)
    checks = [entry.get(f"{library}_right") for entry in entries for library in ("mpi4py", "stratampi")]
    return 1 if False in checks else 0


if __name__ == "__main__":
    sys.exit(main())
