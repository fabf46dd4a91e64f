"""What all Python tests share: a current native module, ranks that report, and an MPI job as a fixture.

Serial tests run under plain `python -m pytest`. Tests marked `mpi` are collective: every rank of `mpirun -n N python -m pytest
--with-mpi -m mpi` runs the same ones in the same order (tools/test does that for every MPI library). A rank that fails alone leaves
its peers waiting, so the time limit ends the process with all stacks printed, and the launcher ends the job.

The native module is rebuilt before the package is first imported, once per job: the first rank does it, the others wait for
its word in a broadcast.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TextIO

import hypothesis
import pytest

ROOT = Path(__file__).resolve().parent.parent
LAUNCHER_VARIABLES = ("PMI", "OMPI_", "PRTE_", "HYDRA_", "HYDI_", "MPI_LOCAL", "MPIR_", "I_MPI_HYDRA", "SKBUILD_")
UNDER_MPIRUN = any(name in os.environ for name in ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK"))


def rebuild() -> str:
    """Brings the editable install up to date. Returns "" or why it could not be done."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "rebuild")], capture_output=True, text=True, timeout=600, check=False
    )
    return "" if done.returncode == 0 else done.stdout + done.stderr


def rebuild_once() -> None:
    """Collective under mpirun. Ends the test session with the compiler's words if the module does not build."""
    if UNDER_MPIRUN:
        from mpi4py import MPI

        problem = MPI.COMM_WORLD.bcast(rebuild() if MPI.COMM_WORLD.rank == 0 else None, root=0)
    else:
        problem = rebuild()
    if problem:
        pytest.exit(f"the native module does not build:\n{problem}", returncode=3)


# Property tests draw the same examples on every rank: they are collective. `core` is for the combinations that tools/test
# does not test in full.
for profile, examples in (("full", 100), ("core", 15)):
    hypothesis.settings.register_profile(profile, max_examples=examples, derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "full"))


class Report:
    """Writes what happens on this rank to $TEST_REPORT/rank<R>.jsonl, line by line, so that a crash keeps what came before.

    tools/test reads these: a test has passed when it passed on every rank.
    """

    def __init__(self, file: TextIO) -> None:
        self.file = file

    def write(self, **fields: str) -> None:
        self.file.write(json.dumps(fields) + "\n")
        self.file.flush()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.write(test=nodeid, outcome="started")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.write(test=report.nodeid, outcome=report.outcome, text=report.longreprtext[-4000:])

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.write(test=report.nodeid, outcome="failed", text=report.longreprtext[-4000:])


def pytest_configure(config: pytest.Config) -> None:
    """Rebuilds the module and starts this rank's report."""
    rebuild_once()
    folder = os.environ.get("TEST_REPORT")
    if folder:
        rank = next((os.environ[n] for n in ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK") if n in os.environ), "0")
        config.pluginmanager.register(Report(Path(folder, f"rank{rank}.jsonl").open("a", encoding="utf-8")))


@pytest.fixture(scope="session")
def comm() -> Any:
    """`stratampi.MPI.COMM_WORLD`, the accelerated communicator over all ranks of the job."""
    from stratampi import MPI

    return MPI.COMM_WORLD


Launch = Callable[..., "subprocess.CompletedProcess[str]"]


def current_mpi() -> str | None:
    """The name of the MPI library in .mpi/ that this process is set to use (tools/with-mpi); None for any other."""
    prefix = Path(os.environ.get("MPI4PY_LIBMPI", "/")).parent.parent
    return prefix.name if prefix.parent == ROOT / ".mpi" else None


@pytest.fixture
def mpirun(tmp_path: Path) -> Launch:
    """`mpirun(n, code, env={}, mpi=None, args=(), runner=(), timeout=60)`: runs Python text as an MPI job of n ranks.

    Returns the CompletedProcess with text stdout and stderr, whatever the exit code. `mpi` names a library of .mpi/; without it
    the one of this process is used, else the `mpirun` of PATH; the test is skipped if there is none. `runner` comes before the
    script, e.g. ("-m", "stratampi"), `args` after it. A job that takes longer than `timeout` seconds is killed and the test
    fails with what it had printed.
    """
    if UNDER_MPIRUN:
        pytest.skip("starts MPI jobs of its own")

    def launch(
        n: int,
        code: str,
        env: Mapping[str, str] | None = None,
        mpi: str | None = None,
        args: tuple[str, ...] = (),
        runner: tuple[str, ...] = (),
        timeout: float = 60,
    ) -> "subprocess.CompletedProcess[str]":
        script = tmp_path / "job.py"
        script.write_text(code, encoding="utf-8")
        name = mpi or current_mpi()
        if name is not None and (ROOT / ".mpi" / name).is_dir():
            command = [str(ROOT / "tools" / "mpirun"), name]
        elif mpi is None and shutil.which("mpirun"):
            command = ["mpirun"]
        else:
            pytest.skip(f"no MPI library {name or 'on PATH'}; run tools/setup")
        command += ["-n", str(n), sys.executable, *runner, str(script), *args]
        clean = {k: v for k, v in os.environ.items() if not k.startswith(LAUNCHER_VARIABLES) or k == "OMPI_MCA_osc"}
        clean.update(env or {})
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True, env=clean,
            start_new_session=True,
        )  # fmt: skip
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.terminate()  # the launcher ends its ranks
            try:
                out, err = process.communicate(timeout=10)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, 9)
                out, err = process.communicate()
            pytest.fail(f"timed out after {timeout} s: {' '.join(command)}\n{out}\n{err}")
        return subprocess.CompletedProcess(command, process.returncode, out, err)

    return launch
