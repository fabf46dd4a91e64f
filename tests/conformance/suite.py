"""One rank of a run of mpi4py's own test suite: its test/main.py, with every test's outcome written down.

    mpirun -n N python -m mpi4py|stratampi suite.py FOLDER TESTDIR LIMIT [--module] [arguments of test/main.py]

Writes FOLDER/rank<R>.jsonl: a line when a test starts and one when it ends, so that a hang or a crash names its test. A test
that takes longer than LIMIT seconds ends this process, with all its stacks in FOLDER/stacks<R>.txt; the launcher then ends the job.
--module: the tests see `stratampi.MPI` under the name mpi4py.MPI, instead of what the runner makes of mpi4py.MPI.
"""

import faulthandler
import json
import sys
import time
import unittest
from pathlib import Path
from typing import Any

ORDER = ("passed", "skipped", "failed")  # of a test with subtests the worst counts


class Record(unittest.TextTestResult):
    """A text result that also writes the lines."""

    folder: Path
    limit: float

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        from mpi4py import MPI

        rank = MPI.COMM_WORLD.rank
        self.lines = (self.folder / f"rank{rank}.jsonl").open("w", encoding="utf-8")
        self.stacks = (self.folder / f"stacks{rank}.txt").open("w", encoding="utf-8")
        self.outcome, self.text, self.begin = "passed", "", 0.0

    def write(self, test: Any, outcome: str, **more: Any) -> None:
        self.lines.write(json.dumps({"test": test.id(), "outcome": outcome, **more}) + "\n")
        self.lines.flush()

    def startTest(self, test: Any) -> None:
        super().startTest(test)
        self.outcome, self.text, self.begin = "passed", "", time.monotonic()
        self.write(test, "started")
        faulthandler.dump_traceback_later(self.limit, exit=True, file=self.stacks)

    def stopTest(self, test: Any) -> None:
        self.write(test, self.outcome, text=self.text[-3000:], seconds=round(time.monotonic() - self.begin, 4))
        super().stopTest(test)

    def note(self, test: Any, outcome: str, text: str) -> None:
        if isinstance(test, unittest.TestCase):
            self.outcome = max(self.outcome, outcome, key=ORDER.index)
            self.text += text
        else:  # a module or class that could not be set up: it has no startTest
            self.write(test, outcome, text=text[-3000:], seconds=0.0)

    def addError(self, test: Any, err: Any) -> None:
        super().addError(test, err)
        self.note(test, "failed", self.errors[-1][1])

    def addFailure(self, test: Any, err: Any) -> None:
        super().addFailure(test, err)
        self.note(test, "failed", self.failures[-1][1])

    def addSubTest(self, test: Any, subtest: Any, err: Any) -> None:
        super().addSubTest(test, subtest, err)
        if err is not None:
            self.note(test, "failed", f"{subtest}: {err[1]!r}")

    def addUnexpectedSuccess(self, test: Any) -> None:
        super().addUnexpectedSuccess(test)
        self.note(test, "failed", "unexpected success")

    def addSkip(self, test: Any, reason: str) -> None:
        super().addSkip(test, reason)
        self.note(test, "skipped", reason)


def main() -> None:
    """Never returns: test/main.py exits."""
    folder, testdir, limit, *rest = sys.argv[1:]
    Record.folder, Record.limit = Path(folder), float(limit)
    if rest[:1] == ["--module"]:
        del rest[0]
        import mpi4py

        import stratampi.MPI

        mpi4py.MPI = sys.modules["mpi4py.MPI"] = stratampi.MPI  # type: ignore[attr-defined]
    sys.path.insert(0, testdir)
    sys.argv[:] = [str(Path(testdir, "main.py")), *rest]
    sys.dont_write_bytecode = True
    from main import TestProgram

    class Runner(unittest.TextTestRunner):
        resultclass = Record

    TestProgram(module=None, testRunner=Runner)


if __name__ == "__main__":
    main()
