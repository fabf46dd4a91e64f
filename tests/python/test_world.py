"""The world: drivers, slices, agreement and warnings. What changes a job's environment runs in a job of its own."""

import json
import platform
import subprocess
import textwrap
import threading

import pytest
from mpi4py import MPI

from stratampi import machine
from stratampi._native import ffi, lib
from stratampi.world import _by_reason, _common_base, _Facts, _ranks, _Refused, _segment_bytes, world

TERABYTE = 1 << 40

# ---- in the job that pytest itself is ----


@pytest.fixture
def here():
    """This process's world, collectively the same driver on all its ranks."""
    if not world().ready:
        pytest.skip(f"no native fabric: {world().why}")
    return world()


@pytest.mark.mpi
def test_supernode_has_one_token_and_one_set_of_addresses(here):
    bases = [lib.smpi_world_base(here.ptr, r) for r in range(here.size)]
    everybody = MPI.COMM_WORLD.allgather((here.token, here.rank, here.size, here.driver, here.cores, bases))
    mine = [other for other in everybody if other[0] == here.token]
    assert here.token != bytes(16)
    assert [other[1] for other in mine] == list(range(here.size))
    assert {other[2:5] for other in mine} == {(here.size, here.driver, here.cores)}
    assert all(other[5] == bases for other in mine)
    assert all(bases)
    assert len(set(bases)) == here.size
    assert here.cores >= 1
    assert bytes(ffi.string(lib.smpi_world_driver(here.ptr))).decode() == here.driver


@pytest.mark.mpi
def test_peers_see_each_others_writes(here):
    comm, size = MPI.COMM_WORLD, 5000
    block = lib.smpi_heap_alloc(here.ptr, size, 1)
    assert block != ffi.NULL
    address = int(ffi.cast("uintptr_t", block))
    own_base = lib.smpi_world_base(here.ptr, here.rank)
    assert own_base <= address < own_base + lib.smpi_world_bytes(here.ptr)
    ffi.buffer(block, size)[:] = bytes([(here.rank + 1) % 251]) * size
    blocks = comm.allgather((here.token, here.rank, address - own_base))
    for token, rank, offset in blocks:
        if token == here.token:
            shadow = ffi.cast("char *", lib.smpi_world_base(here.ptr, rank) + offset)
            assert ffi.buffer(shadow, size)[:] == bytes([(rank + 1) % 251]) * size
    comm.Barrier()
    if here.size > 1:  # and a peer's write reaches the owner
        token, rank, offset = next(b for b in blocks if b[0] == here.token and b[1] == (here.rank + 1) % here.size)
        ffi.cast("char *", lib.smpi_world_base(here.ptr, rank) + offset)[size - 1] = b"\xfe"
        comm.Barrier()
        assert ffi.buffer(block, size)[size - 1] == b"\xfe"
    else:
        comm.Barrier()
    lib.smpi_heap_free(here.ptr, block)


@pytest.mark.mpi
def test_there_is_one_world_for_all_threads():
    found = []
    threads = [threading.Thread(target=lambda: found.append(world())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert all(one is world() for one in found)


# ---- what follows from the facts ----


def facts(rank=0, **changes):
    fields = {
        "world_rank": rank, "fabric": b"auto", "supernode_size": 0, "window_size": 1 << 28, "stage_chunk": 1 << 20, "stream_min": 32
        << 20, "token": bytes(16),
        "space_left": machine.NO_LIMIT, "file_limit": machine.NO_LIMIT, "span": 1 << 47, "shm_free": 1 << 30,
        "quota": machine.NO_LIMIT, "cells": ((1 << 85) - 2).to_bytes(16, "little"), "mask": bytes(machine.MASK_BYTES),
    }  # fmt: skip
    return _Facts(**(fields | changes))


@pytest.mark.parametrize(
    ("ranks", "changes", "expected"),
    [
        (1, {}, TERABYTE),
        (32, {}, TERABYTE // 2),  # the reserve must fit beside them
        (16, {}, TERABYTE),
        (512, {}, TERABYTE // 32),
        (2, {"file_limit": 1 << 30}, 1 << 30),
        (2, {"file_limit": (1 << 30) + 5}, 1 << 30),
        (2, {"space_left": 5 << 30}, 1 << 30),
        (4, {"span": 1 << 39}, 1 << 34),  # 39 bits of address space
    ],
)
def test_segments_are_as_large_as_the_most_limited_rank_allows(ranks, changes, expected):
    team = [facts(r) for r in range(ranks - 1)] + [facts(ranks - 1, **changes)]
    assert _segment_bytes(team) == expected


def test_too_little_room_is_refused_by_name():
    with pytest.raises(_Refused, match=r"rank 3: .*ulimit -f: 1048576"):
        _segment_bytes([facts(0), facts(3, file_limit=1 << 20)])


def test_segments_go_where_every_rank_has_room():
    free = (1 << 85) - 2
    assert _common_base([facts(), facts()], TERABYTE) == 32 * TERABYTE
    taken = facts(1, cells=(free & ~(1 << 32)).to_bytes(16, "little"))
    assert _common_base([facts(), taken], TERABYTE) in (31 * TERABYTE, 33 * TERABYTE)
    assert _common_base([facts(), taken], 32 * TERABYTE) == 33 * TERABYTE
    even = facts(0, cells=int("01" * 64, 2).to_bytes(16, "little"))
    odd = facts(1, cells=int("10" * 64, 2).to_bytes(16, "little"))
    assert _common_base([even], 3 << 20) != 0
    assert _common_base([even], TERABYTE + 1) == 0
    assert _common_base([even, odd], 1) == 0


def test_free_cells_leaves_out_what_is_mapped():
    cells, span = machine.free_cells()
    block = ffi.new("char[]", 1)
    address = int(ffi.cast("uintptr_t", block))
    assert not cells >> (address // machine.CELL) & 1
    assert not cells & 1
    assert span >= address


def test_ranks_and_reasons_are_told_shortly():
    assert _ranks([4]) == "rank 4"
    assert _ranks([3, 1, 0, 2, 7, 9, 8]) == "ranks 0-3, 7-9"
    assert _by_reason([(0, "a"), (1, "a"), (2, "b")]) == "ranks 0-1: a; rank 2: b"


def test_machine_facts_are_sane():
    assert machine.memory_limit() > 1 << 20
    assert machine.core_quota() >= 1
    assert 1 <= int.from_bytes(machine.affinity_mask(), "little").bit_count() <= 8 * machine.MASK_BYTES
    assert machine.file_size_limit() > 0
    assert machine.address_space_left() >= 0


# ---- jobs of their own ----

REPORT = """
import json, os, sys
from stratampi._native import lib
from stratampi.world import world
w = world()
line = dict(
    world_rank=MPI.COMM_WORLD.rank, ready=w.ready, driver=w.driver, why=w.why, rank=w.rank, size=w.size,
    token=w.token.hex(), cores=w.cores, ptr=w.ptr is not None, bytes=lib.smpi_world_bytes(w.ptr) if w.ready else 0,
    heap=w.ready and lib.smpi_heap_alloc(w.ptr, 100, 0) is not None,
)
os.write(1, ("REPORT " + json.dumps(line) + "\\n").encode())
"""


def reports(done: "subprocess.CompletedProcess[str]"):
    """What the ranks of a job found, by COMM_WORLD rank."""
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.split("REPORT ", 1)[1] for line in done.stdout.splitlines() if "REPORT " in line]
    return sorted((json.loads(line) for line in lines), key=lambda report: report["world_rank"])


def said(done: "subprocess.CompletedProcess[str]"):
    return [line for line in done.stderr.splitlines() if "stratampi: " in line]


def job(before: str = "") -> str:
    return "from mpi4py import MPI\n" + textwrap.dedent(before) + REPORT


def test_memfd_is_the_first_choice(mpirun):
    done = mpirun(2, job(), {"STRATAMPI_FABRIC": "auto"})
    found = reports(done)
    assert [r["driver"] for r in found] == ["memfd"] * 2
    assert all(r["bytes"] == TERABYTE and r["heap"] and r["why"] == "first choice" for r in found)
    assert said(done) == []


def test_window_can_be_forced(mpirun):
    done = mpirun(3, job(), {"STRATAMPI_FABRIC": "window", "STRATAMPI_WINDOW_SIZE": "8M"})
    found = reports(done)
    assert [(r["driver"], r["size"], r["bytes"]) for r in found] == [("window", 3, 8 << 20)] * 3
    assert len({r["token"] for r in found}) == 1
    assert all(r["heap"] for r in found)
    assert said(done) == []


def test_arrays_outlive_finalize(mpirun):
    """Open MPI unmaps its windows in MPI_Finalize."""
    after = """
    MPI.Finalize()
    block = lib.smpi_heap_alloc(w.ptr, 100000, 1)
    from stratampi._native import ffi
    os.write(1, b"ALIVE\\n" if ffi.buffer(block, 100000)[:] == bytes(100000) else b"DEAD\\n")
    """
    done = mpirun(2, job() + textwrap.dedent(after), {"STRATAMPI_FABRIC": "window"})
    assert len(reports(done)) == 2
    assert done.stdout.count("ALIVE") == 2


def test_none_can_be_forced(mpirun):
    done = mpirun(2, job(), {"STRATAMPI_FABRIC": "none"})
    for report in reports(done):
        assert (report["driver"], report["ready"], report["ptr"], report["size"]) == ("none", False, False, 2)
        assert report["token"] == "00" * 16
    assert said(done) == []


@pytest.mark.parametrize(("k", "sizes"), [(1, [1, 1, 1]), (2, [2, 2, 1]), (3, [3, 3, 3]), (9, [3, 3, 3])])
def test_supernodes_are_slices_of_the_machine(mpirun, k, sizes):
    found = reports(mpirun(3, job(), {"STRATAMPI_SUPERNODE_SIZE": str(k)}))
    assert [r["size"] for r in found] == sizes
    assert [r["rank"] for r in found] == [i % k for i in range(3)]
    assert all(r["ready"] and r["heap"] for r in found)
    groups = {}
    for report in found:
        groups.setdefault(report["token"], []).append(report["world_rank"])
    assert sorted(groups.values()) == [list(range(i, min(i + k, 3))) for i in range(0, 3, k)]


LIMIT_FILES_OF_RANK_1 = """
    import resource
    if MPI.COMM_WORLD.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (32 << 20, 32 << 20))
    """


def test_a_limit_on_one_rank_turns_all_to_the_window(mpirun):
    done = mpirun(2, job(LIMIT_FILES_OF_RANK_1), {"STRATAMPI_WINDOW_SIZE": "4M"})
    for report in reports(done):
        assert report["driver"] == "window"
        assert "rank 1: " in report["why"]
        assert "ulimit -f" in report["why"]
    assert said(done) == []


def test_what_was_forced_and_is_refused_is_said_once(mpirun):
    done = mpirun(3, job(LIMIT_FILES_OF_RANK_1), {"STRATAMPI_FABRIC": "memfd"})
    assert [(r["driver"], r["ready"]) for r in reports(done)] == [("none", False)] * 3
    (line,) = said(done)
    assert "everything goes through MPI" in line
    assert "ranks 0-2: " in line
    assert "rank 1: " in line
    assert "ulimit -f" in line


def test_log_none_says_nothing(mpirun):
    env = {"STRATAMPI_FABRIC": "memfd", "STRATAMPI_LOG": "none", "STRATAMPI_SPIN": "nonsense"}
    done = mpirun(2, job(LIMIT_FILES_OF_RANK_1), env)
    assert [r["driver"] for r in reports(done)] == ["none"] * 2
    assert said(done) == []


def test_log_info_says_what_was_chosen(mpirun):
    done = mpirun(2, job(), {"STRATAMPI_LOG": "info"})
    (line,) = said(done)
    assert line.startswith("stratampi: ranks 0-1: driver memfd (first choice), ")


def test_limited_address_space_makes_segments_smaller(mpirun):
    limit = """
    import resource
    pages = int(open("/proc/self/statm").read().split()[0])
    room = pages * 4096 + (16 << 30 if MPI.COMM_WORLD.rank == 1 else 64 << 30)
    resource.setrlimit(resource.RLIMIT_AS, (room, room))
    """
    found = reports(mpirun(2, job(limit)))
    assert [r["driver"] for r in found] == ["memfd"] * 2
    assert {r["bytes"] for r in found} == {2 << 30}  # two of them and the reserve in half of rank 1's 16 GiB


REFUSE_MEMFD_ON_RANK_1 = """
    import ctypes, errno, struct
    def refuse(number):
        code = b"".join(struct.pack("<HBBI", *step) for step in (
            (0x20, 0, 0, 0), (0x15, 0, 1, number), (0x06, 0, 0, 0x00050000 | errno.ENOSYS), (0x06, 0, 0, 0x7fff0000)))
        text = ctypes.create_string_buffer(code, len(code))
        program = struct.pack("HxxxxxxP", 4, ctypes.addressof(text))
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.prctl(38, 1, 0, 0, 0) == 0
        return libc.prctl(22, 2, program)
    if MPI.COMM_WORLD.rank == 1 and refuse({number}) != 0:
        MPI.COMM_WORLD.Abort(77)
    """


@pytest.mark.skipif(platform.machine() not in ("x86_64", "aarch64"), reason="system call number not known")
def test_a_sandbox_without_memfd_gets_the_window(mpirun):
    number = {"x86_64": 319, "aarch64": 279}[platform.machine()]
    done = mpirun(2, job(REFUSE_MEMFD_ON_RANK_1.replace("{number}", str(number))))
    if done.returncode == 77:
        pytest.skip("no seccomp filters here")
    found = reports(done)
    assert [r["driver"] for r in found] == ["window"] * 2
    assert all("rank 1: memfd_create: Function not implemented" in r["why"] for r in found)


@pytest.mark.parametrize("name", ["STRATAMPI_FABRIC", "STRATAMPI_SUPERNODE_SIZE"])
def test_ranks_that_disagree_go_through_mpi(mpirun, name):
    values = {"STRATAMPI_FABRIC": ("memfd", "window"), "STRATAMPI_SUPERNODE_SIZE": ("1", "2")}[name]
    before = f"""
    import os
    os.environ[{name!r}] = {values!r}[MPI.COMM_WORLD.rank == 2]
    """
    done = mpirun(3, job(before))
    assert [(r["driver"], r["ready"]) for r in reports(done)] == [("none", False)] * 3
    (line,) = said(done)
    assert name in line
    assert f"ranks 0-1: {values[0]}; rank 2: {values[1]}" in line


def test_nonsense_in_the_environment_is_said_once(mpirun):
    done = mpirun(2, job(), {"STRATAMPI_SPIN": "fast"})
    assert [r["driver"] for r in reports(done)] == ["memfd"] * 2
    assert said(done) == ["stratampi: STRATAMPI_SPIN='fast' is not understood, -1 is used"]


def test_nothing_happens_before_mpi_is_initialised_or_after(mpirun):
    code = """
    import mpi4py
    mpi4py.rc.initialize = False
    from mpi4py import MPI
    from stratampi.world import world
    early = world()
    assert not early.ready and early.why == "MPI is not initialized", early
    MPI.Init()
    w = world()
    assert w.ready and w.size == 2, w
    MPI.Finalize()
    assert world() is w
    """
    done = mpirun(2, textwrap.dedent(code))
    assert done.returncode == 0, done.stderr
    late = """
    from mpi4py import MPI
    MPI.Finalize()
    from stratampi.world import world
    assert world().why == 'MPI is finalized'
    """
    done = mpirun(2, textwrap.dedent(late))
    assert done.returncode == 0, done.stderr


GATES = """
import os, signal, threading
from mpi4py import MPI
from stratampi._native import ffi, lib
from stratampi.world import take_pending_exception, world
w, comm = world(), MPI.COMM_WORLD
native = lib.smpi_comm_new(w.ptr, w.rank, w.size)
gates = comm.allgather(int(lib.smpi_comm_gate(native)))
assert lib.smpi_comm_open(native, ffi.new("int32_t[]", list(range(w.size))), ffi.new("uint64_t[]", gates)) == 0
assert lib.smpi_barrier(native) == 0
"""


def test_ctrl_c_ends_a_native_wait(mpirun):
    """SIGINT to a rank that waits for one that never comes: the wait ends, and the exception is there to be raised."""
    code = """
    if comm.rank == 0:
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        status = lib.smpi_barrier(native)
        exception = take_pending_exception()
        assert status == lib.SMPI_ERR_INTERRUPTED, status
        assert type(exception) is KeyboardInterrupt and exception.__traceback__ is not None, exception
        assert take_pending_exception() is None
        print("INTERRUPTED")
    comm.Barrier()
    """
    done = mpirun(2, GATES + textwrap.dedent(code))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("INTERRUPTED") == 1


def test_mpi_progresses_inside_a_native_wait(mpirun):
    """A large synchronous send to a rank that is in our barrier needs that rank's MPI library to move."""
    code = """
    big = bytearray(8 << 20)
    if comm.rank == 0:
        request = comm.Irecv(big, source=1)
        assert lib.smpi_barrier(native) == 0
        request.Wait()
    else:
        comm.Ssend(big, dest=0)
        assert lib.smpi_barrier(native) == 0
    """
    done = mpirun(2, GATES + textwrap.dedent(code))
    assert done.returncode == 0, done.stderr
