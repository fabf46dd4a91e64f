"""`python -m stratampi` runs programs as `python -m mpi4py` does, with our communicators in them. A test is a job of its own."""

import os
import signal
import subprocess
import sys

import pytest

OURS = ("-m", "stratampi")
PLAIN = ("-m", "mpi4py")

# One write a line, so that ranks do not mix within it. Only these lines are compared: launchers add their own.
SAY = """
def say(*words):
    import sys
    sys.stdout.write(" ".join(map(str, ("|", *words))) + "\\n")
    sys.stdout.flush()
"""
# What a program sees of the way it was started.
LOOK = (
    SAY
    + """
import sys
from mpi4py import MPI
comm = MPI.COMM_WORLD
seen = [__name__, sys.modules["__main__"].__dict__ is globals(), sys.argv[1:], comm.size, comm.allreduce(comm.rank)]
say(comm.rank, *seen)
"""
)


def said(job):
    """The program's own lines, in the order of ranks."""
    return sorted(line for line in job.stdout.splitlines() if line.startswith("| "))


def same(mpirun, n, code, args=(), options=()):
    """Runs a program both ways; checks that it says the same and ends the same, and returns our job."""

    def run(runner):
        # 141: Intel's launcher sometimes dies itself (SIGPIPE) when two ranks abort at once; it says nothing about the ranks.
        for _ in range(5):
            job = mpirun(n, code, runner=(*runner, *options), args=args)
            if job.returncode != 128 + signal.SIGPIPE:
                break
        return job

    plain, ours = run(PLAIN), run(OURS)
    assert said(ours) == said(plain), (ours.returncode, ours.stderr)
    assert ours.returncode == plain.returncode
    return ours


def test_script(mpirun):
    job = same(mpirun, 2, LOOK, args=("one", "--two", "-rc", "-m"))
    assert job.returncode == 0
    assert said(job)[1] == "| 1 __main__ True ['one', '--two', '-rc', '-m'] 2 1"


def test_command(mpirun):
    """The script's path that the fixture adds becomes the program's first argument."""
    job = same(mpirun, 2, "", options=("-c", LOOK), args=("two",))
    assert len(said(job)) == 2
    assert "job.py" in said(job)[0]


def test_module(mpirun, tmp_path, monkeypatch):
    (tmp_path / "somepackage").mkdir()
    (tmp_path / "somepackage" / "__main__.py").write_text(LOOK)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    assert len(said(same(mpirun, 2, "", options=("-m", "somepackage")))) == 2


def test_modules_of_mpi4py(mpirun):
    code = "import sys; from mpi4py.bench import main; sys.exit(main(['helloworld']))"
    job = mpirun(2, code, runner=OURS)
    assert job.returncode == 0, job.stderr
    for rank in range(2):
        assert f"I am process {rank} of 2" in job.stdout


@pytest.mark.parametrize("runner", [OURS, PLAIN])
def test_standard_input(runner):
    text = "import sys; print('|', __name__, sys.argv)"
    done = subprocess.run([sys.executable, *runner, "-", "x"], input=text, capture_output=True, text=True, check=False)
    assert done.stdout == "| __main__ ['-', 'x']\n"
    assert done.returncode == 0


def test_the_program_gets_our_communicators_and_registered_arrays(mpirun):
    code = (
        SAY
        + """
import numpy as np
from mpi4py import MPI
import mpi4py.MPI, stratampi, stratampi.MPI
from stratampi.world import world
comm = MPI.COMM_WORLD
array = np.zeros(1 << 20)
small = comm.Split(comm.rank % 2)
say(comm.rank, type(comm).__module__, type(small).__module__, MPI is mpi4py.MPI,
      comm is stratampi.MPI.COMM_WORLD, stratampi.is_registered(array) == world().ready)
"""
    )
    job = mpirun(2, code, runner=OURS)
    assert said(job) == [f"| {rank} stratampi.comm stratampi.comm True True True" for rank in range(2)], job.stderr


@pytest.mark.parametrize(
    "end",
    [
        "",
        "sys.exit()",
        "sys.exit(0)",
        "sys.exit(3)",
        "sys.exit('a reason')",
        "raise ValueError('a reason')",
        "raise KeyboardInterrupt",
        "import mpi4py.run; mpi4py.run.set_abort_status(7)",
    ],
)
def test_every_end_has_the_same_exit_code(mpirun, end):
    job = same(mpirun, 2, f"import sys\nfrom mpi4py import MPI\n{end}\n")
    assert (job.returncode == 0) == (end in ("", "sys.exit()", "sys.exit(0)"))


@pytest.mark.parametrize("wait", ["comm.Barrier()", "comm.Allreduce(np.ones(9), np.ones(9))", "comm.recv()"])
def test_an_exception_on_one_rank_ends_the_job(mpirun, wait):
    """The others wait in the native path, or in MPI, for a rank that will never come."""
    code = f"""{SAY}import numpy as np
from mpi4py import MPI
comm = MPI.COMM_WORLD
comm.Barrier()
if comm.rank == 1:
    raise LookupError("nothing here")
{wait}
say("not reached")
"""
    job = mpirun(3, code, runner=OURS)
    assert job.returncode != 0
    assert said(job) == []
    assert "LookupError: nothing here" in job.stderr
    assert (
        'raise LookupError("nothing here")' in job.stderr
    )  # the line of the program, and not only a line of the runner


def test_rc_option_and_rc_set_by_the_program(mpirun):
    code = (
        SAY
        + """
import mpi4py
{}
from mpi4py import MPI
say(MPI.Query_thread() == MPI.THREAD_SINGLE, MPI.Query_thread() == MPI.THREAD_FUNNELED)
"""
    )
    by_option = same(mpirun, 1, code.format(""), options=("-rc", "thread_level=funneled,fast_reduce=False"))
    by_program = same(mpirun, 1, code.format('mpi4py.rc.thread_level = "single"'))
    assert by_option.returncode == by_program.returncode == 0


def test_mpi_initialised_by_the_program(mpirun):
    """The world comes up in Init, where all ranks are; afterwards a part of the ranks may go first."""
    code = (
        SAY
        + """
from mpi4py import MPI
import numpy as np
assert not MPI.Is_initialized()
MPI.Init_thread(MPI.THREAD_MULTIPLE)
from stratampi.world import world
comm = MPI.COMM_WORLD
half = comm.Split(comm.rank % 2)
if comm.rank % 2 == 0:
    out = np.empty(3)
    half.Allreduce(np.ones(3), out)
    assert (out == half.size).all()
    comm.send(1, comm.rank + 1) if comm.rank + 1 < comm.size else None
else:
    comm.recv(source=comm.rank - 1)
say(comm.rank, type(comm).__name__, type(half).__name__, world().size > 0)
half.Free()
MPI.Finalize()
"""
    )
    job = mpirun(3, code, runner=(*OURS, "-rc", "initialize=False,finalize=False"))
    assert job.returncode == 0, job.stderr
    assert said(job) == [f"| {rank} Comm Comm True" for rank in range(3)]


def test_a_program_without_mpi_does_not_start_it(mpirun):
    job = mpirun(1, SAY + "import sys; say('mpi4py.MPI' in sys.modules, 'numpy' in sys.modules)", runner=OURS)
    assert said(job) == ["| False False"]


def test_drop_in_without_the_runner(mpirun):
    code = (
        SAY
        + """
from stratampi import MPI
import numpy as np
out = np.empty(4)
MPI.COMM_WORLD.Allreduce(np.ones(4), out)
import mpi4py.MPI
say(MPI.COMM_WORLD.rank, out.sum(), type(mpi4py.MPI.COMM_WORLD).__module__, MPI.COMM_WORLD == mpi4py.MPI.COMM_WORLD)
"""
    )
    job = mpirun(2, code)
    assert said(job) == [f"| {rank} 8.0 mpi4py.MPI True" for rank in range(2)], job.stderr


def run_alone(*args):
    return subprocess.run([sys.executable, *args], capture_output=True, text=True, check=False, timeout=60)


def test_help_and_version():
    shown = run_alone(*OURS, "--help")
    assert shown.returncode == 0
    assert "usage: " in shown.stdout
    assert "-m stratampi [options] <pyfile>" in shown.stdout
    version = run_alone(*OURS, "--version")
    assert version.returncode == 0
    assert version.stdout.startswith("stratampi ")
    assert "mpi4py" in version.stdout


@pytest.mark.parametrize(
    "args", [(), ("--no-such-option",), ("-m",), ("-rc",), ("-rc", "threads"), ("no/such/file.py",)]
)
def test_wrong_command_lines_fail_as_mpi4pys(args):
    ours, plain = run_alone(*OURS, *args), run_alone(*PLAIN, *args)
    assert ours.returncode == plain.returncode != 0
    assert ours.stdout == plain.stdout == ""
    said_first = (args or ("",))[0] != "no/such/file.py"  # a complaint, not a traceback
    ours_line, plain_line = (run.stderr.splitlines()[0 if said_first else -1] for run in (ours, plain))
    assert ours_line == plain_line
