"""Waits that end otherwise than by success: Ctrl-C, a peer that gave up, kill -9. Each test is a job of its own."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
UNDER_MPIRUN = any(name in os.environ for name in ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK"))

# One write a line, so that ranks do not mix within it.
SAY = """
def say(*words):
    import sys
    sys.stdout.write(" ".join(map(str, ("|", *words))) + "\\n")
    sys.stdout.flush()
"""
INTERRUPTED = (
    SAY
    + """
import os, signal, threading
import numpy as np
from stratampi import MPI
comm = MPI.COMM_WORLD
comm.Barrier()
if comm.rank == 0:
    threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    try:
        comm.{call}
        say("not interrupted")
    except KeyboardInterrupt:
        say("KeyboardInterrupt")
    comm.send("given up", 1)
    try:
        comm.Barrier()
        say("goes on")
    except MPI.Exception as error:
        say(error.Get_error_class() == MPI.ERR_COMM, error)
else:
    comm.recv(source=0)  # not a sleep: on a busy machine none is long enough
    try:
        comm.{call}  # all entries are there, so a small operator is complete; the next one cannot be
        comm.Barrier()
        say("not told")
    except MPI.Exception as error:
        say(error.Get_error_class() == MPI.ERR_COMM, error)
"""
)


@pytest.mark.parametrize(
    "call", ["Barrier()", "Allreduce(np.zeros(1), np.zeros(1))", "Bcast(np.zeros(100_000), comm.size - 1)"]
)
def test_ctrl_c_ends_a_wait_and_revokes_the_communicator(mpirun, call):
    job = mpirun(2, INTERRUPTED.replace("{call}", call))
    lines = sorted(line for line in job.stdout.splitlines() if line.startswith("| "))
    assert lines[0] == "| KeyboardInterrupt", job.stdout + job.stderr
    assert [line.split()[1] for line in lines[1:]] == ["True", "True"], lines
    assert any("rank 0 gave up" in line for line in lines[1:])


ENDLESS = (
    SAY
    + """
import numpy as np, stratampi
from stratampi import MPI
comm = MPI.COMM_WORLD
a, b = stratampi.ones({n}), stratampi.ones({n})
comm.Allreduce(a, b)
say("up")
while True:
    comm.Allreduce(a, b)
"""
)
ENDLESS_PLAIN = (
    ENDLESS.replace("stratampi.ones", "np.ones")
    .replace("from stratampi import MPI", "from mpi4py import MPI")
    .replace(", stratampi", "")
)


def descendants(pid: int) -> list[int]:
    """Its children, theirs, and so on; from /proc, as not every machine has a `ps`."""
    tree: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            parent = stat.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[1]
            tree.setdefault(int(parent), []).append(int(stat.parent.name))
    found = list(tree.get(pid, []))
    for child in found:  # grows as it goes
        found += tree.get(child, [])
    return found


def named_files(pid: int) -> set[Path]:
    """Files with a name in /dev/shm or the temporary folders that a process has open or mapped, but for the programs' own."""
    names = [line.split(maxsplit=5)[-1] for line in Path(f"/proc/{pid}/maps").read_text(encoding="utf-8").splitlines()]
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            names.append(str(link.readlink()))
    paths = {Path(name.removesuffix(" (deleted)")) for name in names if name.startswith("/")}
    folders = [Path(folder) for folder in ("/dev/shm", "/tmp", "/var/tmp", tempfile.gettempdir())]
    return {
        path
        for path in paths
        if any(path.is_relative_to(folder) for folder in folders)
        and not any(path.is_relative_to(folder) for folder in (ROOT, sys.prefix, sys.base_prefix))
    }


def pattern(name: str) -> str:
    """A name without what differs from job to job: numbers and six random characters at the end."""
    return re.sub("_[0-9a-zA-Z]{6}$|[0-9a-fA-F]{2,}|[0-9]", "#", name)


def killed(code: str, folder: Path) -> tuple[set[str], set[str]]:
    """Kills a job in the midst of its work. Returns patterns of the files its ranks had, and of what is left in their TMPDIR."""
    temporary = folder / "tmp"
    temporary.mkdir(parents=True)
    script = folder / "job.py"
    script.write_text(code, encoding="utf-8")
    extra = ["--allow-run-as-root"] if "openmpi" in os.environ["MPI4PY_LIBMPI"] else []
    command = ["mpirun", *extra, "-n", "2", sys.executable, str(script)]
    files: set[Path] = set()
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, start_new_session=True,
        env={**os.environ, "TMPDIR": str(temporary)},
    ) as job:  # fmt: skip
        try:
            assert job.stdout is not None
            assert [job.stdout.readline() for _ in range(2)] == ["| up\n"] * 2
            time.sleep(0.05)
            python = Path(sys.executable).resolve()
            ranks = [pid for pid in descendants(job.pid) if Path(f"/proc/{pid}/exe").readlink() == python]
            assert len(ranks) == 2
            files = set().union(*map(named_files, ranks))
        finally:
            for pid in [*descendants(job.pid), job.pid]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
    left = {pattern(str(path.relative_to(temporary))) for path in temporary.rglob("*")}
    for path in files:  # what the MPI library leaves behind
        if path.is_relative_to("/dev/shm"):
            path.unlink(missing_ok=True)
    return {pattern(str(path).replace(str(folder), "")) for path in files}, left


@pytest.mark.parametrize("n", [1, 1_000_000])
def test_kill_9_leaves_nothing_behind(tmp_path, n):
    """A job has no named file but those that the MPI library gives a job on mpi4py alone, so none of ours can be left."""
    if "MPI4PY_LIBMPI" not in os.environ or UNDER_MPIRUN:
        pytest.skip("needs an MPI library of .mpi/ and starts a job of its own")
    their_files, their_rest = killed(ENDLESS_PLAIN.replace("{n}", str(n)), tmp_path / "plain")
    our_files, our_rest = killed(ENDLESS.replace("{n}", str(n)), tmp_path / "ours")
    assert our_files <= their_files
    assert our_rest <= their_rest
