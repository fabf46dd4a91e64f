"""The bench measures what it says: figures by their formulas, wrong results noticed, one JSON line a case.

Nothing here depends on how long anything took.
"""

import importlib.machinery
import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI

from stratampi import bench

ROOT = Path(__file__).resolve().parent.parent.parent
RUN = "import sys; from stratampi.bench import main; sys.exit(main(sys.argv[1:]))"
QUICK = ("--rounds", "2", "--round-time", "0.001")


def case(name, size=1024, rank=0, ranks=2, dtype="float64"):
    return bench.Case(bench.OPERATORS[name], size, np.dtype(dtype), rank, ranks)


@pytest.mark.parametrize(
    ("text", "nbytes"), [("8", 8), ("64K", 65536), ("1m", 1 << 20), ("2G", 2 << 30), (" 4KB ", 4096)]
)
def test_sizes_are_powers_of_1024(text, nbytes):
    assert bench.parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "K", "1.5K", "-8", "0", "8X"])
def test_other_sizes_are_refused(text):
    with pytest.raises(ValueError, match="not a size"):
        bench.parse_size(text)


@pytest.mark.parametrize(
    ("name", "size", "ranks", "items", "send_items", "osu_bytes"),
    [
        ("allreduce", 1024, 4, 128, 128, 1024),
        ("allgather", 1024, 4, 128, 32, 256),
        ("alltoallv", 1024, 4, 128, 128, 256),
        ("gather", 1024, 4, 128, 32, 256),
        ("scatterv", 1024, 4, 128, 128, 256),
        ("reduce_scatter", 1024, 4, 128, 128, 1024),
        ("exscan", 1024, 4, 128, 128, 1024),
        ("alltoall", 8, 4, 4, 4, 8),  # at least one item a block
        ("bcast", 1, 4, 1, 1, 8),
        ("barrier", 1024, 4, 0, 0, 0),
    ],
)
def test_a_size_is_the_largest_user_buffer(name, size, ranks, items, send_items, osu_bytes):
    made = case(name, size, ranks=ranks)
    assert (made.items, made.send_items, made.osu_bytes) == (items, send_items, osu_bytes)


def test_patterns_tell_ranks_and_blocks_apart():
    sends = [case("alltoall", 1024, rank, ranks=4).pattern(rank) for rank in range(4)]
    blocks = [block.tobytes() for send in sends for block in np.split(send, 4)]
    assert len(set(blocks)) == 16


def timing(*rounds):
    return bench.Timing(1, list(rounds))


def test_the_ratio_is_the_median_of_paired_ratios():
    # ratio of medians: 2 / 4; the rounds' ratios are 0.25, 2 and 2
    timings = {"mpi4py": timing(1.0, 2.0, 20.0), "stratampi": timing(4.0, 1.0, 10.0)}
    assert bench.record(case("barrier"), "plain", timings, None)["ratio"] == 2.0


@pytest.mark.parametrize(
    ("name", "bus", "share"),
    [  # 1 MB in 1 ms is 1 GB/s; four ranks that copy 4 GB/s together read and write 8 GB/s
        ("bcast", 1.0, 2 * 3 / 8),
        ("reduce", 1.0, 5 / 8),
        ("allreduce", 1.5, 2 * 4 / 8),
        ("allgather", 0.75, 2 * 4 / 8),
        ("alltoallv", 0.75, 2 * 4 / 8),
        ("scatter", 0.75, 2 / 8),
        ("reduce_scatter_block", 0.75, 5 / 8),
        ("exscan", 1.0, 2 * 3 / 8),
    ],
)
def test_bandwidth_and_share_follow_their_formulas(name, bus, share):
    entry = bench.record(case(name, 1_000_000, ranks=4), "plain", {"stratampi": timing(1000.0)}, (3e9, 4e9))
    assert entry["bytes"] == 1_000_000
    assert entry["stratampi_bus_gbs"] == pytest.approx(bus)
    assert entry["stratampi_limit_share"] == pytest.approx(share)


class OffByOne(MPI.Intracomm):
    """A communicator whose sums are wrong in their last element."""

    def Allreduce(self, sendbuf, recvbuf, op=MPI.SUM):
        super().Allreduce(sendbuf, recvbuf, op)
        recvbuf[-1] += 1


class Forgetful(MPI.Intracomm):
    """A communicator that does nothing from its second call on: the right answer is still lying there."""

    calls = 0

    def Allreduce(self, sendbuf, recvbuf, op=MPI.SUM):
        self.calls += 1
        if self.calls == 1:
            super().Allreduce(sendbuf, recvbuf, op)


@pytest.mark.parametrize(("kind", "right"), [(MPI.Intracomm, True), (OffByOne, False), (Forgetful, False)])
def test_check_notices_wrong_results(kind, right):
    sync = MPI.Intracomm(MPI.COMM_SELF)
    contender = bench.Contender("mpi4py", kind(MPI.COMM_SELF), np.empty)
    timings = bench.measure(case("allreduce", ranks=1), [contender], sync, rounds=1, round_time=1e-4, check=True)
    assert timings["mpi4py"].right is right


@pytest.mark.parametrize("dtype", ["float64", "int32"])
def test_every_operator_is_measured_and_right(mpirun, tmp_path, dtype):
    out = tmp_path / "out.json"
    done = mpirun(2, RUN, args=("--sizes", "8,40K", "--dtype", dtype, "--check", "--json", str(out), *QUICK))
    assert done.returncode == 0, done.stdout + done.stderr
    entries = [json.loads(line) for line in out.read_text().splitlines()]
    kinds = {(entry["op"], entry["size"], entry["buffers"]) for entry in entries}
    data = set(bench.OPERATORS) - {"barrier"}
    wanted = {(name, size, kind) for name in data for size in (8, 40960) for kind in ("registered", "plain")}
    assert kinds == wanted | {("barrier", 8, "-")}
    for entry in entries:
        assert entry["mpi4py_right"], entry
        assert entry["stratampi_right"], entry
        assert entry["ranks"] == 2
        assert entry["dtype"] == dtype
        assert entry["ratio"] > 0
        assert entry["mpi4py_us"] > 0
        assert entry["stratampi_us"] > 0
        assert len(entry["mpi4py_rounds_us"]) == len(entry["stratampi_rounds_us"]) == 2
        assert set(entry["path"].split("+")) <= {"inline", "direct", "staged", "mpi"}
        assert entry["mpi"]
        assert entry["thread_level"]
        assert entry["driver"]
        assert entry["machine"]["cores"]
    # a line a case on rank 0, under the header
    assert sum(line.startswith(tuple(bench.OPERATORS)) for line in done.stdout.splitlines()) == len(entries)


def test_registered_arrays_go_direct(mpirun, tmp_path):
    out = tmp_path / "out.json"
    args = ("--ops", "allreduce,alltoallv", "--sizes", "1M", "--buffers", "registered", "--library", "stratampi")
    done = mpirun(2, RUN, args=(*args, "--json", str(out), *QUICK))
    assert done.returncode == 0, done.stdout + done.stderr
    entries = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(entry["op"], entry["path"]) for entry in entries] == [("allreduce", "direct"), ("alltoallv", "direct")]
    for entry in entries:
        assert "ratio" not in entry
        assert "mpi4py_us" not in entry
        assert entry["stratampi_limit_share"] > 0
        assert entry["copy_whole_gbs"] > 0


def test_a_wrong_result_fails_the_run(mpirun):
    broken = """
import sys
from stratampi import bench
from stratampi.comm import Comm

def make(libraries, buffers, make=bench.make_contenders):
    class Broken(Comm):
        def Allgather(self, sendbuf, recvbuf):
            super().Allgather(sendbuf, recvbuf)
            if self.Get_rank() == 1:
                recvbuf[0] += 1

    return [
        bench.Contender(c.name, Broken(c.comm), c.allocate) if c.name == "stratampi" else c for c in make(libraries, buffers)
    ]

bench.make_contenders = make
sys.exit(bench.main(sys.argv[1:]))
"""
    args = ("--ops", "allreduce,allgather", "--sizes", "1K", "--check", "--buffers", "plain", *QUICK)
    done = mpirun(2, broken, args=args)
    assert done.returncode != 0
    lines = [line for line in done.stdout.splitlines() if "WRONG RESULT" in line]
    assert len(lines) == 1
    assert lines[0].startswith("allgather")
    assert lines[0].endswith("stratampi")


def test_time_limit_skips_what_is_left(mpirun):
    done = mpirun(2, RUN, args=("--ops", "bcast", "--sizes", "8,1K", "--buffers", "plain", "--time-limit", "0"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 cases skipped" in done.stdout


def test_plot_makes_a_picture(tmp_path):
    pytest.importorskip("matplotlib")
    common = {"ranks": 2, "mpi": "X 1", "thread_level": "multiple", "dtype": "float64", "buffers": "plain"}
    entries = [
        {"op": "bcast", "bytes": nbytes, "mpi4py_us": nbytes / 10, "stratampi_us": nbytes / 20, **common}
        for nbytes in (8, 64)
    ]
    bench.plot(entries, str(tmp_path / "out.png"))
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


@pytest.fixture(scope="module")
def compare():
    loader = importlib.machinery.SourceFileLoader("compare", str(ROOT / "tools" / "compare"))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("compare", loader))
    loader.exec_module(module)
    return module


def test_compare_takes_the_best_library_and_pairs_its_runs(compare):
    def run(plain, ours):
        return {
            "op": "bcast", "size": 2048, "bytes": 2048, "buffers": "plain", "path": "direct",
            "mpi4py_us": plain, "stratampi_us": ours, "ratio": plain / ours,
        }  # fmt: skip

    runs = {
        "mpich": [run(9.0, 1.0), run(9.0, 1.0), run(8.0, 1.0)],
        "impi": [
            run(4.0, 2.0),
            run(6.0, 2.0),
            run(40.0, 4.0),
        ],  # best by its median; in the last run the machine was busy
    }
    (row,) = compare.summarise(runs)
    assert (row["best_mpi"], row["mpi4py_us"], row["ratio"]) == ("impi", 6.0, 3.0)
    assert (row["stratampi_best_with"], row["stratampi_best_us"], row["ratio_best"]) == ("mpich", 1.0, 6.0)
    table = compare.markdown([row])
    assert "| bcast | 2K | plain | impi | 6.00 | 2.00 | 3.00 | 1.00 (mpich) | 6.00 | direct |" in table


def test_compare_leaves_out_what_one_library_did_not_measure(compare):
    record = {
        "op": "bcast",
        "size": 8,
        "bytes": 8,
        "buffers": "plain",
        "mpi4py_us": 1.0,
        "stratampi_us": 1.0,
        "ratio": 1.0,
    }
    assert compare.summarise({"mpich": [record], "impi": []}) == []
