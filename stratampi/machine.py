"""What this process may use of the machine: memory, cores, address space. Plain readings of /proc and /sys, no MPI.

Every function gives the answer for the calling process as it is now; world.py compares the ranks' answers. A file that
is missing (another kernel, a sandbox) never raises: the limit it would tell is then taken to be absent.
"""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

NO_LIMIT = 2**63 - 1  # bytes
CELL = 1 << 40  # bytes of one cell of free_cells()
CELLS = 128  # cells looked at: the 47 bits of x86-64 user space
MASK_BYTES = 512  # of affinity_mask(): 4096 cores


def _read(path: Path | str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _control_groups(controller: str) -> Iterator[Path]:
    """The folders of this process's control groups, innermost first: of v2, and of `controller` under v1."""
    for line in _read("/proc/self/cgroup").splitlines():
        parts = line.split(":", 2)
        if len(parts) != 3:
            continue
        if parts[1] == "":
            root = Path("/sys/fs/cgroup")
        elif controller in parts[1].split(","):
            root = Path("/sys/fs/cgroup") / controller
        else:
            continue
        inner = root / parts[2].lstrip("/")
        yield from (folder for folder in (inner, *inner.parents) if folder == root or root in folder.parents)


def memory_limit() -> int:
    """Bytes of memory that this process could ever have: the machine's, or its control group's if that is less."""
    limit = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for folder in _control_groups("memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            words = _read(folder / name).split()
            if words and words[0].isdigit():
                limit = min(limit, int(words[0]))
    return limit


def core_quota() -> int:
    """Cores' worth of time that the control group grants (rounded up), NO_LIMIT where it sets none."""
    cores = NO_LIMIT
    for folder in _control_groups("cpu"):
        words = _read(folder / "cpu.max").split()
        if not words:
            words = (_read(folder / "cpu.cfs_quota_us") + " " + _read(folder / "cpu.cfs_period_us")).split()
        if len(words) == 2 and words[0].isdigit() and words[1].isdigit() and int(words[1]) > 0:
            cores = min(cores, max(1, -(-int(words[0]) // int(words[1]))))
    return cores


def cache_size() -> int:
    """Bytes of the largest cache of one core; 32 MiB where the system does not say.

    From sysfs: sysconf(_SC_LEVEL3_CACHE_SIZE) multiplies by cores on some AMD machines.
    """
    core = min(os.sched_getaffinity(0))
    sizes = [0]
    for folder in Path(f"/sys/devices/system/cpu/cpu{core}/cache").glob("index*"):
        text = _read(folder / "size").strip()
        if text.endswith("K") and text[:-1].isdigit():
            sizes.append(int(text[:-1]) << 10)
    return max(sizes) or 32 << 20


def affinity_mask() -> bytes:
    """The cores this process may run on, bit i of the MASK_BYTES (little-endian) for core i."""
    mask = sum(1 << core for core in os.sched_getaffinity(0) if core < 8 * MASK_BYTES)
    return mask.to_bytes(MASK_BYTES, "little")


def _limit(which: int) -> int:
    soft = resource.getrlimit(which)[0]
    return NO_LIMIT if soft == resource.RLIM_INFINITY else min(soft, NO_LIMIT)


def file_size_limit() -> int:
    """The largest file this process may make, in bytes (RLIMIT_FSIZE); beyond it the kernel kills."""
    return _limit(resource.RLIMIT_FSIZE)


def address_space_left() -> int:
    """Bytes that this process may still map (RLIMIT_AS less what it has mapped)."""
    limit = _limit(resource.RLIMIT_AS)
    if limit == NO_LIMIT:
        return limit
    pages = _read("/proc/self/statm").split()
    return max(0, limit - (int(pages[0]) if pages else 0) * os.sysconf("SC_PAGE_SIZE"))


def free_cells() -> tuple[int, int]:
    """(cells, span): where this process has nothing mapped, and how many bytes its address space spans.

    Bit i of cells is set when [i TiB, (i + 1) TiB) is free and so are its neighbours: the C heap grows upwards and the
    system's mappings grow downwards. span is the power of two above the highest mapping (the stack), 0 if unknown.
    """
    taken, top = 1, 0
    for line in _read("/proc/self/maps").splitlines():
        begin, end = (int(word, 16) for word in line.split(" ", 1)[0].split("-"))
        if end > 1 << 63:  # the kernel's own page
            continue
        top = max(top, end)
        for cell in range(max(0, begin // CELL - 1), min(CELLS - 1, end // CELL + 1) + 1):
            taken |= 1 << cell
    if top == 0:
        return 0, 0
    return ~taken & ((1 << CELLS) - 1), 1 << (top - 1).bit_length()


def shm_free() -> int:
    """Bytes free in /dev/shm, where MPI libraries put shared windows; NO_LIMIT if that cannot be told."""
    try:
        about = os.statvfs("/dev/shm")  # noqa: S108 - asked, not used
    except OSError:
        return NO_LIMIT
    return about.f_bavail * about.f_frsize


def commits_strictly() -> bool:
    """True if the kernel keeps a commit limit (vm.overcommit_memory = 2): a first touch can then fail (SIGBUS)."""
    return _read("/proc/sys/vm/overcommit_memory").strip() == "2"
