#!/usr/bin/env python3
"""mpi4py's own test suite, once on plain mpi4py and once with our COMM_WORLD: whatever passes plain must pass with ours.

    tests/conformance/run.py [--mpi NAME] [-n N] [--quick] [--module] [--timeout S] [--limit S] [-i REGEX]… [fetch]

The suite is the one of the installed mpi4py's version, from its source distribution, fetched into build/conformance/ when it is not
there (`fetch`: only that). Both runs write one line a test and rank (suite.py); a test counts as passed when it passed on every
rank, and as lost when on some rank it passed plain and did not with ours. Prints a table by test module and the lost tests.
Exit code 0: nothing lost, and the job ended as well as the plain one.

No hang outlives its limit: a test that takes longer than --limit seconds ends its process with all stacks written, a job that takes
longer than --timeout is killed with its process group; both name the tests that were running.

Left out: spawn and dynproc (they start jobs inside the job and need a free port service), and testGetFortranInfo, which fails in
the MPI library. --quick leaves out what never meets a communicator of ours, and what is slow.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections import Counter
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HERE = ROOT / "build" / "conformance"
LEFT_OUT = ("-e", "^test_spawn", "-e", "^test_dynproc", "-x", "testGetFortranInfo")
SLOW = ("datatype", "util_dtlib", "io", "file", "pack", "util_pool", "util_sync", "mpiapi", "package")
QUICK = [word for name in SLOW for word in ("-e", f"^test_{name}[.]py$")]
RUNNERS = {"plain": ("-m", "mpi4py"), "ours": ("-m", "stratampi"), "module": ("-m", "mpi4py")}


def fetch() -> Path:
    """The folder of the suite; downloaded by pip if need be. Exits with a message if that fails."""
    name = f"mpi4py-{version('mpi4py')}"
    suite = HERE / name / "test"
    if not (suite / "main.py").exists():
        HERE.mkdir(parents=True, exist_ok=True)
        requirement = name.replace("-", "==")
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--no-binary",
            "mpi4py",
            requirement,
        ]
        done = subprocess.run([*command, "--dest", str(HERE)], timeout=600, check=False)
        if done.returncode != 0:
            sys.exit(f"conformance: could not fetch the source distribution of {name}")
        with tarfile.open(HERE / f"{name}.tar.gz") as archive:
            archive.extractall(HERE, [m for m in archive if m.name.startswith(f"{name}/test/")], filter="data")
    return suite


@dataclass
class Outcome:
    """What came of one run. `tests[name]` has an entry (passed, skipped, failed or started) for each rank that met the test."""

    code: int = 0
    seconds: float = 0.0
    problem: str = ""
    tests: dict[str, list[str]] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    running: dict[int, str] = field(default_factory=dict)  # by rank: the test that never ended

    def verdict(self, test: str, ranks: int) -> str:
        """One word for all ranks: passed, skipped, failed, or missing."""
        got = self.tests.get(test, [])
        if "failed" in got:
            return "failed"
        if len(got) < ranks or "started" in got:
            return "missing"
        return "passed" if "passed" in got else "skipped"


def end(process: subprocess.Popen[bytes]) -> None:
    """Ends a job: politely to the launcher, which ends its ranks; then the whole process group."""
    for step in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, step)
            process.wait(10)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue


def run(subject: str, suite: Path, options: argparse.Namespace) -> Outcome:
    """One run of the suite under mpirun."""
    folder = HERE / f"{options.mpi}-{options.n}-{subject}"
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.iterdir():
        old.unlink()
    command = [str(ROOT / "tools" / "mpirun"), options.mpi, "-n", str(options.n), sys.executable, *RUNNERS[subject]]
    command += [str(Path(__file__).with_name("suite.py")), str(folder), str(suite), str(options.limit)]
    command += ["--module"] if subject == "module" else []
    command += ["-q", *LEFT_OUT, *(QUICK if options.quick else ()), *(w for i in options.include for w in ("-i", i))]
    path = os.pathsep.join(
        filter(None, [str(suite), os.environ.get("PYTHONPATH", "")])
    )  # pool workers import the tests
    outcome = Outcome()
    begin = time.monotonic()
    with (folder / "output.log").open("wb") as log:
        process = subprocess.Popen(
            command, cwd=folder, env={**os.environ, "PYTHONPATH": path}, stdin=subprocess.DEVNULL, stdout=log,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            outcome.code = process.wait(options.timeout)
        except subprocess.TimeoutExpired:
            outcome.problem = f"took longer than {options.timeout:.0f} s"
            end(process)
        except BaseException:
            end(process)
            raise
    outcome.seconds = time.monotonic() - begin
    for rank in range(options.n):
        read(folder / f"rank{rank}.jsonl", rank, outcome)
    return outcome


def read(path: Path, rank: int, outcome: Outcome) -> None:
    """Adds what one rank wrote."""
    last: dict[str, str] = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            event = json.loads(line)
        except ValueError:  # the last line of a rank that was killed
            break
        last[event["test"]] = event["outcome"]
        if event["outcome"] == "failed":
            outcome.texts.setdefault(event["test"], f"on rank {rank}: " + event["text"])
    for test, word in last.items():
        outcome.tests.setdefault(test, []).append(word)
        if word == "started":
            outcome.running[rank] = test


def report(plain: Outcome, ours: Outcome, subject: str, options: argparse.Namespace) -> bool:
    """Prints the comparison. True if nothing was lost."""
    rows: dict[str, Counter[tuple[str, str]]] = {}
    lost = []
    tally: Counter[str] = Counter()
    for test in plain.tests | ours.tests:
        before, after = plain.verdict(test, options.n), ours.verdict(test, options.n)
        counter = rows.setdefault(test.rpartition("(")[2].split(".")[0], Counter())
        counter["plain", before] += 1
        counter["ours", after] += 1
        tally[after] += 1
        worse = before == "passed" and after != "passed"
        if worse or (before == "skipped" and after in ("failed", "missing")):
            lost.append(test)
            counter["ours", "lost"] += 1
    words = ("passed", "skipped", "failed", "missing")
    columns = [("plain", w) for w in words] + [("ours", w) for w in (*words, "lost")]
    print(f"\n{'':26}{'plain':^36}{subject:^45}\n{'module':26}" + "".join(f"{w:>9}" for _, w in columns))
    total: Counter[tuple[str, str]] = Counter()
    for name, counter in sorted(rows.items()):
        total += counter
        print(f"{name:26}" + "".join(f"{counter[c] or '.':>9}" for c in columns))
    print(f"{'all':26}" + "".join(f"{total[c]:>9}" for c in columns))
    print(
        f"{options.mpi}, {options.n} ranks; plain {plain.seconds:.0f} s, {subject} {ours.seconds:.0f} s; both in {HERE}"
    )

    for name, outcome in (("plain", plain), (subject, ours)):
        for rank, test in outcome.running.items():
            print(f"{name}: rank {rank} never ended {test} (see stacks{rank}.txt)")
        if outcome.problem:
            print(f"{name}: {outcome.problem}")
    for test in lost:
        print(f"LOST {test}: {plain.verdict(test, options.n)}, with ours {ours.verdict(test, options.n)}")
        print("    " + ours.texts.get(test, "").strip().replace("\n", "\n    ")[-1500:])
    ended_worse = ours.code != 0 and plain.code == 0
    if ended_worse or ours.problem:
        log = HERE / f"{options.mpi}-{options.n}-{subject}" / "output.log"
        print(f"{subject}: the job ended with {ours.code}, plain with {plain.code}; the end of {log}:")
        print("\n".join("    " + line for line in log.read_text(errors="replace").splitlines()[-20:]))
    if not tally["passed"]:
        print("no test passed")
    good = not lost and not ended_worse and not ours.problem and tally["passed"] > 0
    print(f"{tally['passed']} passed, {len(lost) or int(not good)} failed, {tally['skipped']} skipped")
    return good


def main() -> int:
    """Exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=("fetch", "run"), default="run")
    parser.add_argument("--mpi", choices=("mpich", "openmpi", "impi"), default="mpich")
    parser.add_argument("-n", type=int, default=2, help="ranks")
    parser.add_argument("--quick", action="store_true", help="the core of the suite")
    parser.add_argument(
        "--module", action="store_true", help="stratampi.MPI as mpi4py.MPI, instead of python -m stratampi"
    )
    parser.add_argument("--timeout", type=float, default=900, help="seconds a job may take")
    parser.add_argument("--limit", type=float, default=90, help="seconds a test may take")
    parser.add_argument("-i", dest="include", action="append", default=[], help="only test modules that match REGEX")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the job ends with us
    suite = fetch()
    if options.what == "fetch":
        return 0
    subject = "module" if options.module else "ours"
    outcomes = []
    for name in ("plain", subject):
        print(f"{name} …", flush=True)
        outcomes.append(run(name, suite, options))
    return 0 if report(*outcomes, subject, options) else 1


if __name__ == "__main__":
    sys.exit(main())
