"""The doctor says what is so: its advice follows from the facts, and a real job's facts are right."""

import copy
import json
from pathlib import Path

import pytest

from stratampi import doctor, settings

ROOT = Path(__file__).resolve().parent.parent.parent
RUN = "import sys; from stratampi.doctor import main; sys.exit(main(sys.argv[1:]))"
TRIALS = 5


def rank_facts(rank):
    return {
        "rank": rank, "machine": 0, "processor": "node", "stratampi": "1.0",
        "ready": True, "driver": "memfd", "why": "all ranks can", "supernode": "aa", "supernode_rank": rank,
        "supernode_size": 2, "supernode_cores": 4, "bases": [1 << 40, 2 << 40], "segment_bytes": 1 << 40,
        "heap": {"live": 0, "peak": 0, "cached": 0, "limit": 8 << 30, "blocks": 0},
        "affinity": [0, 1, 2, 3], "machine_cores": 4, "core_quota": None,
        "memory_available": 16 << 30, "memory_limit": 32 << 30, "shm": {"bytes": 8 << 30, "free": 8 << 30},
        "memfd": "ok", "huge_pages": {"anonymous": "always", "shmem": "advise", "heap_bytes": 8 << 20},
        "ptrace_scope": "0", "cma": "ok",
    }  # fmt: skip


@pytest.fixture
def facts():
    """Two ranks on a machine where nothing is to be mended."""
    return {
        "mpi": "MPICH 5.0.2", "mpi4py": "4.1", "mpi_version": "5.0", "mpi_library_version": "MPICH 5", "size": 2,
        "thread_level": "multiple", "machine": {"cpu": "a cpu", "cores": 4, "isa": "avx2"}, "machines": 1,
        "ready": True, "supernodes": 1, "drivers": ["memfd"], "addresses": {"pairs": 2, "moved": 0}, "kernels": "avx2",
        "trials": [{"op": "allreduce", "bytes": 8, "buffers": "plain", "path": "inline", "right": True}],
        "settings": [
            {"name": "STRATAMPI_FABRIC", "value": "auto", "default": "auto", "unit": "name", "help": "how", "invalid": False}
        ],
        "ranks": [rank_facts(0), rank_facts(1)], "advice": [],
    }  # fmt: skip


def test_a_healthy_machine_needs_nothing(facts):
    assert doctor.advise(facts) == []
    assert "nothing to mend" in doctor.text(facts)


def change(facts, path, value):
    *keys, last = path.split(".")
    for target in [facts] if keys[:1] != ["ranks"] else facts["ranks"]:
        place = target
        for key in keys[1:] if keys[:1] == ["ranks"] else keys:
            place = place[int(key) if key.isdigit() else key]
        place[last] = value


@pytest.mark.parametrize(
    ("path", "value", "what", "mend"),
    [
        ("trials.0.right", False, "WRONG RESULT", "--json"),
        ("settings.0.invalid", True, "STRATAMPI_FABRIC has a value", "how"),
        ("ranks.ready", False, "share a machine but not memory", "STRATAMPI_LOG=info"),
        ("ranks.affinity", [0], "2 ranks have 1 cores", "I_MPI_PIN=0"),
        ("ranks.core_quota", 1, "2 ranks have 1 cores", "no more ranks than cores"),
        (
            "ranks.huge_pages",
            {"anonymous": "always", "shmem": "never", "heap_bytes": 0},
            "no huge pages",
            "shmem_enabled",
        ),
        ("ranks.cma", "process_vm_readv: EPERM", "cannot read a peer's memory", "ptrace_scope"),
        ("ranks.heap", {"limit": 1 << 20, "live": 0}, "hand out only 1M", "STRATAMPI_HEAP_MAX"),
        ("ranks.shm", {"bytes": 64 << 20, "free": 8 << 20}, "/dev/shm (8M free)", "--shm-size"),
        ("ranks.shm", None, "/dev/shm (missing)", "--shm-size"),
        ("addresses.moved", 1, "1 of 2 segments", "none needed"),
        ("drivers", ["window"], "fixed size", "STRATAMPI_WINDOW_SIZE"),
        ("kernels", "base", "kernels `base` though this machine has avx2", "STRATAMPI_KERNELS"),
    ],
)
def test_each_fault_has_its_advice(facts, path, value, what, mend):
    facts = copy.deepcopy(facts)
    change(facts, path, value)
    advice = doctor.advise(facts)
    assert what in advice[0]["what"]
    assert mend in advice[0]["mend"]
    facts["advice"] = advice
    assert what in doctor.text(facts)


def test_ranks_that_differ(facts):
    facts["ranks"][1]["supernode"] = "bb"
    facts["ranks"][1]["stratampi"] = "2.0"
    said = [item["what"] for item in doctor.advise(facts)]
    assert len(said) == 2
    assert "different versions" in said[0]
    assert "several supernodes" in said[1]


def test_fabric_none_is_named_as_the_reason(facts):
    for rank in facts["ranks"]:
        rank["ready"] = False
    facts["settings"][0]["value"] = "none"
    advice = doctor.advise(facts)
    assert advice[0]["mend"] == "unset STRATAMPI_FABRIC"
    assert "MPI4PY_RC_THREAD_LEVEL=single" in advice[1]["mend"]  # it is MPICH, and everything goes through it


def test_addresses_are_compared_with_their_owners(facts):
    assert doctor.address_facts(facts["ranks"]) == {"pairs": 2, "moved": 0}
    facts["ranks"][0]["bases"] = [1 << 40, 5 << 40]  # rank 0 sees rank 1 elsewhere than rank 1 does
    assert doctor.address_facts(facts["ranks"]) == {"pairs": 2, "moved": 1}
    facts["ranks"][1]["supernode"] = "bb"
    assert doctor.address_facts(facts["ranks"]) == {"pairs": 0, "moved": 0}


@pytest.mark.parametrize(("numbers", "said"), [([], ""), ([3], "3"), ([0, 1, 2, 5, 7, 8], "0-2,5,7-8")])
def test_spans(numbers, said):
    assert doctor.spans(numbers) == said


def test_huge_pages_of_the_right_mapping():
    smaps = """\
1000-3000 rw-s 00000000 00:01 7 /memfd:x (deleted)
Size:                  8 kB
ShmemPmdMapped:     2048 kB
VmFlags: rd wr
3000-5000 rw-p 00000000 00:00 0
ShmemPmdMapped:        0 kB
"""
    assert doctor.huge_bytes(smaps, 0x2FFF) == 2 << 20
    assert doctor.huge_bytes(smaps, 0x3000) == 0
    assert doctor.huge_bytes(smaps, 0x5000) is None


def test_readme_has_every_setting():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    rows = list(settings.table())
    assert rows
    for name, _value, default, *_ in rows:
        assert f"| `{name}` | {default} |" in readme


def diagnose(mpirun, n, **env):
    done = mpirun(n, RUN, args=("--json",), env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


def test_a_real_job(mpirun):
    facts = diagnose(mpirun, 2)
    assert facts["size"] == len(facts["ranks"]) == 2
    assert facts["machines"] == 1
    assert [rank["rank"] for rank in facts["ranks"]] == [0, 1]
    assert facts["mpi"]
    assert facts["thread_level"]
    assert facts["kernels"]
    assert all(rank["memfd"] == "ok" for rank in facts["ranks"])
    assert len(facts["trials"]) == TRIALS
    assert all(trial["right"] for trial in facts["trials"])
    assert facts["ready"]
    assert facts["supernodes"] == 1
    assert facts["ranks"][0]["supernode"] == facts["ranks"][1]["supernode"]
    assert facts["addresses"] == {"pairs": 2, "moved": 0}
    paths = {(trial["op"], trial["bytes"], trial["buffers"]): trial["path"] for trial in facts["trials"]}
    assert paths["allreduce", 1 << 20, "registered"] == "direct"
    assert paths["allreduce", 1 << 20, "plain"] == "staged"
    assert paths["allreduce", 8, "plain"] == "inline"


def test_a_job_without_a_fabric(mpirun):
    facts = diagnose(mpirun, 2, STRATAMPI_FABRIC="none", STRATAMPI_HEAP_MAX="plenty")
    assert not facts["ready"]
    assert {trial["path"] for trial in facts["trials"]} == {"mpi"}
    assert all(trial["right"] for trial in facts["trials"])
    said = " ".join(item["what"] for item in facts["advice"])
    assert "share a machine but not memory" in said
    assert "STRATAMPI_HEAP_MAX has a value that is not understood" in said


def test_a_page_for_people(mpirun):
    done = mpirun(3, RUN)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("Settings (environment)") == 1  # rank 0 alone
    for title in ("MPI", "Fabric", "Machine", "Heap", "Tried just now", "Advice"):
        assert f"\n{title}\n" in done.stdout
