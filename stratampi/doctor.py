"""What this machine offers to these ranks, what stratampi makes of it, and what will be slow.

    python -m stratampi.doctor                    # one process: the machine, the settings
    mpirun -n 4 python -m stratampi.doctor        # also how these four ranks reach each other
    mpirun -n 4 python -m stratampi.doctor --json

Every rank looks at itself (examine), rank 0 collects (report), judges (advise, a pure function of the report) and prints. The
facts are tried, not read off: ranks read each other's memory, map each other's segments and run real operators whose path is
counted. All exchange goes through plain MPI, so the doctor also works where the native path does not. It always exits with
0 once it could look; a program that wants an answer reads `ready` and `advice` in the JSON.
"""

from __future__ import annotations

import argparse
import ctypes
import errno
import json
import mmap
import os
import sys
from importlib import metadata
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np
from mpi4py import MPI

from . import bench, machine, settings
from ._native import ffi, lib
from .memory import empty, heap_stats
from .world import world

if TYPE_CHECKING:
    from collections.abc import Sequence

Facts = dict[str, Any]


class Advice(TypedDict):
    """Something that will be slow or that does not work, and what mends it."""

    what: str
    mend: str


# ------------------------------------------------------------------------------------------------------------- one process


def read_text(path: str) -> str | None:
    """A small system file without the newline at its end; None where it is missing or not for us."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return None


def chosen(text: str | None) -> str | None:
    """The bracketed word of a kernel choice: from "always [madvise] never" to "madvise"."""
    if text is None or "[" not in text:
        return None
    return text.split("[", 1)[1].split("]", 1)[0]


def memory_available() -> int | None:
    """Bytes the system could give to programs now (MemAvailable)."""
    for line in (read_text("/proc/meminfo") or "").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def probe_memfd() -> str:
    """Says "ok", or why this process cannot make, size and map a memory file."""
    try:
        descriptor = os.memfd_create("stratampi-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(descriptor, 1 << 40)
            with mmap.mmap(descriptor, 1 << 20) as view:
                view[:4] = b"test"
        finally:
            os.close(descriptor)
    except (OSError, AttributeError) as error:
        return str(error)
    return "ok"


def huge_bytes(smaps: str, address: int) -> int | None:
    """Bytes in huge pages of the mapping that holds `address`, from the text of /proc/self/smaps; None if it is not there."""
    inside = False
    for line in smaps.splitlines():
        words = line.split()
        if "-" in words[0] and not words[0].endswith(":"):
            begin, end = (int(word, 16) for word in words[0].split("-"))
            inside = begin <= address < end
        elif inside and words[0] == "ShmemPmdMapped:":
            return int(words[1]) * 1024
    return None


def probe_huge_pages() -> int | None:
    """Touches 8 MiB of the heap; how many bytes of the heap lie in huge pages then. None without a heap."""
    if not world().ready:
        return None
    array = empty(8 << 20, np.uint8)
    array.fill(1)
    return huge_bytes(read_text("/proc/self/smaps") or "", array.ctypes.data)


def examine() -> Facts:
    """What this process sees without asking any other."""
    here, quota, shm = world(), machine.core_quota(), None
    try:
        stat = os.statvfs("/dev/shm")  # noqa: S108
        shm = {"bytes": stat.f_blocks * stat.f_frsize, "free": stat.f_bavail * stat.f_frsize}
    except OSError:
        pass
    pages = "/sys/kernel/mm/transparent_hugepage"
    return {
        "rank": MPI.COMM_WORLD.Get_rank(),
        "pid": os.getpid(),
        "processor": MPI.Get_processor_name(),
        "stratampi": metadata.version("stratampi"),
        "ready": here.ready,
        "driver": here.driver,
        "why": here.why,
        "supernode": here.token.hex() if here.ready else None,
        "supernode_rank": here.rank,
        "supernode_size": here.size,
        "supernode_cores": here.cores,
        "bases": [int(lib.smpi_world_base(here.ptr, peer)) for peer in range(here.size)] if here.ready else [],
        "segment_bytes": int(lib.smpi_world_bytes(here.ptr)) if here.ready else 0,
        "heap": heap_stats() if here.ready else {},
        "affinity": sorted(os.sched_getaffinity(0)),
        "machine_cores": os.cpu_count(),
        "core_quota": None if quota == machine.NO_LIMIT else quota,
        "memory_available": memory_available(),
        "memory_limit": machine.memory_limit(),
        "shm": shm,
        "memfd": probe_memfd(),
        "huge_pages": {
            "anonymous": chosen(read_text(f"{pages}/enabled")),
            "shmem": chosen(read_text(f"{pages}/shmem_enabled")),
            "heap_bytes": probe_huge_pages(),
        },
        "ptrace_scope": read_text("/proc/sys/kernel/yama/ptrace_scope"),
    }


# ------------------------------------------------------------------------------------------------------ between the ranks


class _Vector(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("bytes", ctypes.c_size_t))


def _pattern(rank: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Bytes that tell ranks and places apart, longer than a few pages."""
    return ((np.arange(1 << 18, dtype=np.uint32) * 7 + rank) % 251).astype(np.uint8)


def probe_cma(neighbours: MPI.Intracomm) -> str:
    """Reads the next rank's memory with process_vm_readv and looks at the bytes; collective over the ranks of a machine.

    Returns "ok", "one rank", or why it does not work on this rank.
    """
    ranks, rank = neighbours.Get_size(), neighbours.Get_rank()
    if ranks == 1:
        return "one rank"
    mine = _pattern(rank)
    peers = neighbours.allgather((os.getpid(), mine.ctypes.data))
    peer = (rank + 1) % ranks
    pid, address = peers[peer]
    copy = np.zeros_like(mine)
    result = "ok"
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        one, vector = ctypes.c_ulong, ctypes.POINTER(_Vector)
        libc.process_vm_readv.argtypes = (ctypes.c_int, vector, one, vector, one, one)
        libc.process_vm_readv.restype = ctypes.c_ssize_t
        here, there = _Vector(copy.ctypes.data, copy.nbytes), _Vector(address, copy.nbytes)
        count = libc.process_vm_readv(pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
        if count < 0:
            code = ctypes.get_errno()
            result = f"process_vm_readv: {errno.errorcode.get(code, str(code))} ({os.strerror(code)})"
        elif not np.array_equal(copy, _pattern(peer)):
            result = f"process_vm_readv: {count} of {copy.nbytes} bytes, or not the peer's"
    except AttributeError:
        result = "this C library has no process_vm_readv"
    neighbours.Barrier()  # `mine` must live until the peer has read it
    return result


def try_operators() -> list[Facts]:
    """Runs a few real operators on a communicator of their own; collective over COMM_WORLD. Path as counted, result checked."""
    from . import MPI as accelerated

    comm = accelerated.COMM_WORLD.Dup()
    sync = bench.plain_world()
    rank, ranks = comm.Get_rank(), comm.Get_size()
    out = []
    trials = (("barrier", 0, "-"), ("allreduce", 8, "plain"), ("allreduce", 1 << 20, "registered"))
    for name, size, kind in (*trials, ("allreduce", 1 << 20, "plain"), ("alltoallv", 1 << 20, "registered")):
        case = bench.Case(bench.OPERATORS[name], size, np.dtype(np.float64), rank, ranks)
        call = bench.Call(case, comm, empty if kind == "registered" else np.empty)
        call.forget()
        before = bench.path_counts(name)
        try:
            call.run()
            path = bench.path_taken(before, bench.path_counts(name))
        except MPI.Exception as error:
            path = f"failed: {error}"
        right = bool(sync.allreduce(call.is_right(case.expected()), op=MPI.LAND))
        out.append({"op": name, "bytes": case.bytes, "buffers": kind, "path": path, "right": right})
    comm.Free()
    return out


def address_facts(ranks: Sequence[Facts]) -> Facts:
    """How many (rank, peer) pairs of one supernode see the peer's segment elsewhere than the peer itself does."""
    pairs = moved = 0
    by_token: dict[str, dict[int, list[int]]] = {}
    for facts in ranks:
        if facts["ready"]:
            by_token.setdefault(facts["supernode"], {})[facts["supernode_rank"]] = facts["bases"]
    for members in by_token.values():
        for rank, bases in members.items():
            for peer, own in members.items():
                if peer != rank:
                    pairs += 1
                    moved += bases[peer] != own[peer]
    return {"pairs": pairs, "moved": moved}


def report() -> Facts | None:
    """Everything, on rank 0; None elsewhere. Collective over COMM_WORLD. Keys as in the JSON output."""
    sync = bench.plain_world()
    neighbours = MPI.Intracomm(sync.Split_type(MPI.COMM_TYPE_SHARED))
    mine = examine()
    mine["machine"] = neighbours.bcast(sync.Get_rank())
    mine["cma"] = probe_cma(neighbours)
    neighbours.Free()
    trials = try_operators()
    ranks = sync.gather(mine)
    if ranks is None:
        return None
    out: Facts = {
        **bench.context(["mpi4py"]),
        "mpi_version": ".".join(map(str, MPI.Get_version())),
        "mpi_library_version": MPI.Get_library_version().strip("\0 \n").splitlines()[0],
        "size": len(ranks),
        "machines": len({facts["machine"] for facts in ranks}),
        "ready": all(facts["ready"] for facts in ranks),
        "supernodes": len({facts["supernode"] for facts in ranks if facts["ready"]}),
        "drivers": sorted({facts["driver"] for facts in ranks}),
        "addresses": address_facts(ranks),
        "kernels": ffi.string(lib.smpi_kernels_name()).decode(),
        "trials": trials,
        "settings": [row._asdict() for row in settings.table()],
        "ranks": ranks,
    }
    out["advice"] = advise(out)
    return out


# ----------------------------------------------------------------------------------------------------------------- judgement


def cores_for(ranks: Sequence[Facts]) -> float:
    """Cores that these ranks of one machine may use together: the union of their affinities, cut by the quota."""
    union = {core for facts in ranks for core in facts["affinity"]}
    quotas = [facts["core_quota"] for facts in ranks if facts["core_quota"]]
    return float(min([len(union), *quotas]))


def advise(facts: Facts) -> list[Advice]:
    """What will be slow or fail, worst first, each with what mends it. Only looks at the report."""
    out: list[Advice] = []

    def say(what: str, mend: str) -> None:
        out.append({"what": what, "mend": mend})

    ranks: list[Facts] = facts["ranks"]
    by_machine: dict[int, list[Facts]] = {}
    for rank in ranks:
        by_machine.setdefault(rank["machine"], []).append(rank)

    for trial in facts["trials"]:
        if not trial["right"]:
            say(f"{trial['op']} of {trial['bytes']} bytes gave a WRONG RESULT", "report this with the output of --json")
    for row in facts["settings"]:
        if row["invalid"]:
            say(
                f"{row['name']} has a value that is not understood; {row['default']} is used",
                f"set it to: {row['help']}",
            )
    if len({rank["stratampi"] for rank in ranks}) > 1:
        say("the ranks run different versions of stratampi", "install the same one everywhere")
    if len(ranks) == 1:
        say("one rank: there is nothing to accelerate", "start under MPI: mpirun -n 2 python -m stratampi.doctor")

    apart = [rank for rank in ranks if not rank["ready"] and len(by_machine[rank["machine"]]) > 1]
    if apart:
        is_chosen = any(row["name"] == "STRATAMPI_FABRIC" and row["value"] == "none" for row in facts["settings"])
        say(
            f"{len(apart)} of {len(ranks)} ranks share a machine but not memory: {apart[0]['why']}; all goes through MPI",
            "unset STRATAMPI_FABRIC" if is_chosen else "run with STRATAMPI_LOG=info to see which step failed",
        )
        if facts["mpi"].startswith("MPICH") and facts["thread_level"] == "multiple":
            say(
                "MPICH leaves out its shared-memory collectives when started for several threads, which is mpi4py's default",
                "if the program has one thread: MPI4PY_RC_THREAD_LEVEL=single",
            )
    if "window" in facts["drivers"]:
        say(
            "driver window: segments have a fixed size, and arrays beyond it are not registered",
            "unset STRATAMPI_FABRIC"
            if any(row["name"] == "STRATAMPI_FABRIC" and row["value"] == "window" for row in facts["settings"])
            else "raise STRATAMPI_WINDOW_SIZE, or allow memory files and passing descriptors between the ranks (container profile)",
        )
    supernodes = [{rank["supernode"] for rank in members if rank["ready"]} for members in by_machine.values()]
    if any(len(tokens) > 1 for tokens in supernodes):
        say(
            "one machine's ranks form several supernodes; between them MPI carries everything",
            "unset STRATAMPI_SUPERNODE_SIZE",
        )
    if facts["addresses"]["moved"]:
        say(
            f"{facts['addresses']['moved']} of {facts['addresses']['pairs']} segments are mapped at another address than"
            " their owner's; each access adds an offset, which is cheap",
            "none needed; the usual cause is the driver window or a memory layout that differs between the ranks",
        )

    for members in by_machine.values():
        cores, count = cores_for(members), len(members)
        whole = members[0]["machine_cores"] or 0
        if count > cores:
            pinned = len({core for rank in members for core in rank["affinity"]}) < min(count, whole)
            say(
                f"{count} ranks have {cores:g} cores on {members[0]['processor']}: waiting ranks sleep at once, so small"
                " operators take tens of microseconds",
                "let the launcher bind to more cores (Open MPI: --bind-to none, MPICH: -bind-to none, Intel MPI: I_MPI_PIN=0)"
                if pinned
                else "start no more ranks than cores",
            )
        limits = [rank["heap"]["limit"] for rank in members if rank["heap"]]
        if limits and min(limits) < 256 << 20:
            say(
                f"a rank's heap may hand out only {bench.size_text(min(limits))}; larger arrays are not registered",
                "raise STRATAMPI_HEAP_MAX",
            )
        shm = members[0]["shm"]
        if count > 1 and (shm is None or shm["free"] < count * (16 << 20)):
            room = "missing" if shm is None else f"{bench.size_text(shm['free'])} free"
            say(
                f"little room for the MPI library's own segments in /dev/shm ({room}); the driver memfd does not use it",
                "give the container more: docker run --shm-size=1g",
            )

    if any(rank["huge_pages"]["heap_bytes"] == 0 for rank in ranks):
        say(
            "the heap gets no huge pages: large arrays take more page faults and TLB misses",
            "as root: echo within_size > /sys/kernel/mm/transparent_hugepage/shmem_enabled",
        )
    blocked = [rank for rank in ranks if rank["cma"] not in ("ok", "one rank")]
    if blocked:
        say(
            f"{len(blocked)} ranks cannot read a peer's memory ({blocked[0]['cma']}): the MPI library copies its own large"
            " messages twice; stratampi does not need this",
            "allow ptrace between the ranks: sysctl kernel.yama.ptrace_scope=0, or docker run --cap-add SYS_PTRACE",
        )
    if facts["kernels"] == "base" and facts["machine"]["isa"] != "base":
        say(
            f"reductions use the kernels `base` though this machine has {facts['machine']['isa']}",
            "unset STRATAMPI_KERNELS",
        )
    return out


# --------------------------------------------------------------------------------------------------------------------- print


def spans(numbers: Sequence[int]) -> str:
    """From [0, 1, 2, 5] to "0-2,5"."""
    out: list[list[int]] = []
    for number in numbers:
        if out and number == out[-1][1] + 1:
            out[-1][1] = number
        else:
            out.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in out)


def some(count: int, noun: str) -> str:
    """A count with its noun: "1 rank", "2 ranks"."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def amount(nbytes: int | None) -> str:
    """Bytes as text; "?" where the system does not say."""
    return "?" if nbytes is None else bench.size_text(nbytes)


def text(facts: Facts) -> str:
    """The report as a page."""
    ranks: list[Facts] = facts["ranks"]
    lines: list[str] = []

    def head(title: str) -> None:
        lines.extend(("", title))

    def line(label: str, value: object) -> None:
        lines.append(f"  {label:<26} {value}")

    def per_rank(label: str, values: Sequence[object]) -> None:
        """One line where all ranks say the same, else a line for each rank that differs from the one before."""
        if len(set(map(str, values))) == 1:
            line(label, values[0])
            return
        last: object = None
        for rank, value in enumerate(values):
            if str(value) != str(last):
                line(f"{label}, rank {rank}", value)
            last = value

    first = ranks[0]
    lines.append(
        f"stratampi {first['stratampi']}: {some(facts['size'], 'rank')} on {some(facts['machines'], 'machine')}"
    )
    head("MPI")
    line("library", f"{facts['mpi']} (MPI {facts['mpi_version']}), mpi4py {facts['mpi4py']}")
    line("its own words", facts["mpi_library_version"])
    line("thread level", facts["thread_level"])

    head("Fabric")
    line("native path", "ready" if facts["ready"] else "NOT READY on some ranks: all goes through MPI there")
    line(
        "supernodes",
        f"{facts['supernodes']}, ranks in each: {', '.join(map(str, sorted({rank['supernode_size'] for rank in ranks})))}",
    )
    per_rank("driver", [f"{rank['driver']}: {rank['why']}" for rank in ranks])
    if facts["addresses"]["pairs"]:
        moved, pairs = facts["addresses"]["moved"], facts["addresses"]["pairs"]
        line("addresses", "the same on all ranks" if moved == 0 else f"{moved} of {pairs} segments mapped elsewhere")
    per_rank("segment", [f"{amount(rank['segment_bytes'])} of address space" for rank in ranks])
    per_rank("memory files", [rank["memfd"] for rank in ranks])
    per_rank("CMA", [rank["cma"] for rank in ranks])
    line("kernels", facts["kernels"])

    head("Machine")
    line("processor", facts["machine"]["cpu"])
    by_machine: dict[int, list[Facts]] = {}
    for rank in ranks:
        by_machine.setdefault(rank["machine"], []).append(rank)
    for members in by_machine.values():
        quota = next((rank["core_quota"] for rank in members if rank["core_quota"]), None)
        line(
            "cores",
            f"{cores_for(members):g} for {len(members)} ranks on {members[0]['processor']}"
            f" (machine {members[0]['machine_cores']}, quota {'none' if quota is None else f'{quota:g}'})",
        )
    per_rank("may run on", [spans(rank["affinity"]) for rank in ranks])
    line("memory", f"{amount(first['memory_available'])} available, limit {amount(first['memory_limit'])}")
    shm = first["shm"]
    line("/dev/shm", "missing" if shm is None else f"{amount(shm['bytes'])}, {amount(shm['free'])} free")  # noqa: S108
    pages = first["huge_pages"]
    line("huge pages allowed", f"shared memory: {pages['shmem'] or '?'}, other: {pages['anonymous'] or '?'}")

    head("Heap")
    per_rank("limit of a rank", [amount(rank["heap"].get("limit")) if rank["heap"] else "no heap" for rank in ranks])
    per_rank("in use", [amount(rank["heap"].get("live")) if rank["heap"] else "no heap" for rank in ranks])

    per_rank("in huge pages", [amount(rank["huge_pages"]["heap_bytes"]) for rank in ranks])

    head("Tried just now")
    for trial in facts["trials"]:
        size = "" if trial["op"] == "barrier" else f" {bench.size_text(trial['bytes'])} {trial['buffers']}"
        line(trial["op"] + size, trial["path"] + ("" if trial["right"] else "   WRONG RESULT"))

    head("Settings (environment)")
    for row in facts["settings"]:
        unit = "" if row["unit"] == "name" else f" {row['unit']}"
        note = "   NOT UNDERSTOOD" if row["invalid"] else ""
        is_default = str(row["value"]) == str(row["default"])
        given = "" if is_default else f" (default {row['default']}{unit})"
        lines.append(f"  {row['name']:<26} {row['value']}{unit}{given}{note}")

    head("Advice")
    lines.extend(f"  ! {item['what']}\n    -> {item['mend']}" for item in facts["advice"])
    if not facts["advice"]:
        lines.append("  nothing to mend")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """0 once it could look, whatever it found."""
    parser = argparse.ArgumentParser(
        prog="python -m stratampi.doctor",
        description="Shows what this machine offers to these ranks, which settings apply and what will be slow.",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the page")
    arguments = parser.parse_args(argv)
    facts = report()
    if facts is not None:
        print(json.dumps(facts, indent=1) if arguments.json else text(facts), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
