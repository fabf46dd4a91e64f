"""Nonblocking and persistent collectives: results as of the blocking ones, any order of completion, any mix with MPI requests."""

import gc
import random
import threading
import time
import weakref

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mpi4py import MPI as plain_mpi

import stratampi
from stratampi import MPI
from stratampi.requests import PersistentRequest, Request

pytestmark = pytest.mark.mpi

COMM = MPI.COMM_WORLD
RANK, SIZE = COMM.rank, COMM.size
PLAIN = plain_mpi.Intracomm(COMM).Dup()
NATIVE = stratampi.stats()["driver"] != "none"
TOTAL = SIZE * (SIZE + 1) // 2


def all_true(ok):
    return bool(PLAIN.allreduce(bool(ok), op=plain_mpi.MIN))


def array(count, value, registered):
    return (stratampi.full if registered else np.full)(count, value, np.float64)


def one_of_each(comm, count, registered):
    """Every operator once, not waited for: requests, and what to ask when they are complete."""
    mine = RANK + 1.0
    send, everyone = array(count, mine, registered), array(count * SIZE, mine, registered)
    total, root_total, same = (array(count, 0, registered) for _ in range(3))
    gathered, gathered_v, swapped, swapped_v = (array(count * SIZE, 0, registered) for _ in range(4))
    collected, collected_v = (array(count * SIZE, 0, registered) for _ in range(2))
    dealt, dealt_v, part, part_v, upto, before = (array(count, 0, registered) for _ in range(6))
    text = array(count, 7.0 if RANK == SIZE - 1 else 0, registered)
    same[:] = mine
    counts = [count] * SIZE
    requests = [
        comm.Ibarrier(),
        comm.Iallreduce(send, total),
        comm.Iallreduce(MPI.IN_PLACE, same, MPI.MAX),
        comm.Ireduce(send, root_total if RANK == 0 else None, root=0),
        comm.Ibcast(text, root=SIZE - 1),
        comm.Iallgather(send, gathered),
        comm.Iallgatherv(send, [gathered_v, counts]),
        comm.Ialltoall(everyone, swapped),
        comm.Ialltoallv([everyone, counts], [swapped_v, counts]),
        comm.Igather(send, collected if RANK == 0 else None),
        comm.Igatherv(send, [collected_v, counts] if RANK == SIZE - 1 else None, root=SIZE - 1),
        comm.Iscatter(everyone if RANK == SIZE - 1 else None, dealt, SIZE - 1),
        comm.Iscatterv([everyone, counts] if RANK == 0 else None, dealt_v),
        comm.Ireduce_scatter_block(everyone, part),
        comm.Ireduce_scatter(everyone, part_v, counts, MPI.MAX),
        comm.Iscan(send, upto),
        comm.Iexscan(send, before),
    ]
    ranks = np.repeat(np.arange(1.0, SIZE + 1), count)

    def is_right():
        return all([
            (total == TOTAL).all(),
            (same == SIZE).all(),
            RANK != 0 or (root_total == TOTAL).all(),
            (text == 7.0).all(),
            *((block == ranks).all() for block in (gathered, gathered_v, swapped, swapped_v)),
            (collected == (ranks if RANK == 0 else 0)).all(),
            (collected_v == (ranks if RANK == SIZE - 1 else 0)).all(),
            (dealt == SIZE).all() and (dealt_v == 1).all(),
            (part == TOTAL).all() and (part_v == SIZE).all(),
            (upto == mine * (mine + 1) / 2).all(),
            RANK == 0 or (before == mine * (mine - 1) / 2).all(),
        ])  # fmt: skip

    return requests, is_right


@pytest.mark.parametrize("registered", [True, False])
@pytest.mark.parametrize("count", [0, 1, 100, 5000, 300_000])
def test_every_operator(count, registered):
    requests, is_right = one_of_each(COMM, count, registered)
    assert all(isinstance(request, MPI.Request) for request in requests)
    MPI.Request.Waitall(requests)
    assert all(request == MPI.REQUEST_NULL for request in requests)
    assert all_true(is_right())


def complete_by(how, requests, rng):
    """Completes the requests in one of MPI's ways; each must come exactly once."""
    left = dict(enumerate(requests))
    while left:
        keys = list(left)
        listed = [left[key] for key in keys]
        if how == "wait":
            key = rng.choice(keys)
            left.pop(key).Wait()
        elif how == "test":
            for key in keys:
                if left[key].Test():
                    del left[key]
        elif how in ("Waitany", "waitany"):
            found = getattr(MPI.Request, how)(listed)
            del left[keys[found if how == "Waitany" else found[0]]]
        elif how == "Waitsome":
            for index in MPI.Request.Waitsome(listed):
                del left[keys[index]]
        elif how == "Testany":
            index, flag = MPI.Request.Testany(listed)
            if flag:
                del left[keys[index]]
        elif how == "Testsome":
            for index in MPI.Request.Testsome(listed) or []:
                del left[keys[index]]
        elif how == "Testall":
            if MPI.Request.Testall(listed):
                left.clear()
        else:
            getattr(MPI.Request, how)(listed)
            left.clear()


WAYS = ["wait", "test", "Waitany", "waitany", "Waitsome", "Testany", "Testsome", "Testall", "Waitall", "waitall"]


@pytest.mark.parametrize("how", WAYS)
def test_any_way_of_completion_with_messages_in_between(how):
    rng = random.Random(RANK)  # every rank in an order of its own
    requests, is_right = one_of_each(COMM, 2000, True)
    got = np.zeros(5)
    requests.append(PLAIN.Irecv(got, (RANK - 1) % SIZE, tag=3))
    requests.append(PLAIN.Isend(np.full(5, float(RANK)), (RANK + 1) % SIZE, tag=3))
    requests.append(MPI.Request())
    if how in ("wait", "test", "Waitall", "waitall", "Testall"):
        rng.shuffle(requests)
    else:
        requests.pop()
        rng.shuffle(requests)
    complete_by(how, requests, rng)
    assert all_true(is_right() and (got == (RANK - 1) % SIZE).all())


def test_get_status_does_not_complete():
    request = COMM.Ibarrier()
    while not request.Get_status():
        pass
    assert request != MPI.REQUEST_NULL
    assert request.Get_status()
    status = MPI.Status()
    request.Wait(status)
    assert request == MPI.REQUEST_NULL
    assert (status.source, status.tag, status.Get_count(MPI.BYTE)) == (MPI.ANY_SOURCE, MPI.ANY_TAG, 0)


def test_blocking_operators_pass():
    total, now = np.zeros(4000), np.zeros(1)
    request = COMM.Iallreduce(np.ones(4000), total)
    for _ in range(10):
        COMM.Allreduce(np.ones(1), now)
        COMM.Barrier()
    request.Wait()
    assert (total == SIZE).all()
    assert now[0] == SIZE


@pytest.mark.mpi(min_size=2)
def test_different_order_on_different_communicators():
    """Legal for nonblocking operators: the ranks start on two communicators in different orders and wait in different orders."""
    one, two = COMM.Dup(), COMM.Dup()
    a, b = np.zeros(50_000), np.zeros(50_000)
    order = [(one, a), (two, b)] if RANK % 2 else [(two, b), (one, a)]
    for _ in range(5):
        requests = [comm.Iallreduce(np.ones(50_000), out) for comm, out in order]
        for request in requests:
            request.Wait()
    one.Free()
    two.Free()
    assert all_true((a == SIZE).all() and (b == SIZE).all())


@pytest.mark.mpi(min_size=2)
def test_completes_while_a_rank_sits_in_mpi():
    """Rank 0 blocks in a receive of MPI's whose message comes only after the others have completed: the mover must work."""
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        pytest.skip("needs THREAD_MULTIPLE")
    for count in (10, 300_000):
        total = array(count, 0, True)
        request = COMM.Iallreduce(array(count, 1, True), total)
        token = np.zeros(1)
        if RANK == 0:
            for source in range(1, SIZE):
                PLAIN.Recv(token, source)
            request.Wait()
        else:
            request.Wait()
            PLAIN.Send(token, 0)
        assert all_true((total == SIZE).all())


@pytest.mark.mpi(min_size=2)
def test_the_call_waits_for_nobody():
    """The first operator on a communicator, where everything has still to be made."""
    comm = COMM.Dup()
    token = np.zeros(1)
    if RANK == 0:
        request = comm.Ibarrier()
        PLAIN.Send(token, 1, tag=9)
    elif RANK == 1:
        PLAIN.Recv(token, 0, tag=9)
        request = comm.Ibarrier()
    else:
        request = comm.Ibarrier()
    request.Wait()
    comm.Free()


def test_dropped_requests_complete_and_keep_their_buffers():
    out = np.zeros(1000)

    def begin():
        send = np.full(1000, RANK + 1.0)
        COMM.Iallreduce(send, out)
        return weakref.ref(send)

    send = begin()
    gc.collect()
    COMM.Ibarrier().Wait()  # behind it in the line
    assert all_true((out == TOTAL).all())
    gc.collect()
    assert send() is None


@pytest.mark.mpi(min_size=2)
def test_mismatch_is_raised_by_wait_on_all_ranks():
    if not NATIVE:
        pytest.skip("MPI does not compare")
    count = 10 + (RANK == 1)
    request = COMM.Iallreduce(np.ones(count), np.zeros(count))
    with pytest.raises(MPI.Exception) as caught:
        request.Wait()
    assert caught.value.Get_error_class() == MPI.ERR_TRUNCATE
    total = np.zeros(3)
    COMM.Iallreduce(np.ones(3), total).Wait()
    assert (total == SIZE).all()


def test_bad_arguments_raise_at_the_call_and_nothing_is_started():
    for call in (
        lambda comm: comm.Iallreduce(np.ones(3), np.zeros(4)),
        lambda comm: comm.Ibcast("text"),
        lambda comm: comm.Ialltoall(np.ones(SIZE + 1), np.zeros(SIZE + 1)) if SIZE > 1 else comm.Ibcast(None),
        lambda comm: comm.Ibcast(np.ones(2), root=SIZE),
        lambda comm: comm.Allreduce_init(np.ones(3), np.zeros(4)),
    ):
        with pytest.raises(Exception) as plain:
            call(PLAIN)
        with pytest.raises(type(plain.value)) as ours:
            call(COMM)
        if not isinstance(plain.value, MPI.Exception):
            assert str(ours.value) == str(plain.value)
    total = np.zeros(1)
    COMM.Iallreduce(np.ones(1), total).Wait()
    assert total[0] == SIZE


def test_what_is_not_native_goes_to_mpi_in_order():
    """One rank has a datatype of its own, or all a user's op: the same line, MPI's operators, and native ones behind them."""
    every_other = MPI.DOUBLE.Create_vector(5, 1, 2).Commit()
    gaps = np.full(10, -1.0)
    plain = np.full(5, -1.0)
    data = [gaps, 1, every_other] if RANK == SIZE - 1 else plain
    if RANK == 0 and SIZE > 1:
        plain[:] = np.arange(5)
    elif SIZE == 1:
        gaps[::2] = np.arange(5)
    smallest = MPI.Op.Create(
        lambda a, b, _: np.frombuffer(b, "d").__setitem__(
            slice(None), np.minimum(np.frombuffer(a, "d"), np.frombuffer(b, "d"))
        ),
        commute=True,
    )
    low, total = np.zeros(2), np.zeros(2)
    requests = [
        COMM.Ibcast(data, 0),
        COMM.Iallreduce(np.full(2, RANK + 1.0), low, smallest),
        COMM.Iallreduce(np.ones(2), total),
    ]
    MPI.Request.Waitall(requests)
    mine = gaps[::2] if RANK == SIZE - 1 else plain
    assert all_true(
        (mine == np.arange(5)).all() and (gaps[1::2] == -1).all() and (low == 1).all() and (total == SIZE).all()
    )
    smallest.Free()
    every_other.Free()


@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    which=st.lists(st.sampled_from([0, 1, 2]), min_size=1, max_size=8),
    counts=st.lists(st.sampled_from([1, 50, 1500, 20_000]), min_size=8, max_size=8),
    seed=st.integers(0, 1000),
)
def test_many_under_way(which, counts, seed):
    outs, requests = [], []
    for kind, count in zip(which, counts, strict=False):
        registered = bool(seed >> RANK & 1)
        send = array(count, RANK + 1.0, registered)
        if kind == 0:
            out = array(count, 0, registered)
            requests.append(COMM.Iallreduce(send, out))
            outs.append((out, np.full(count, float(TOTAL))))
        elif kind == 1:
            out = array(count * SIZE, 0, registered)
            requests.append(COMM.Iallgather(send, out))
            outs.append((out, np.repeat(np.arange(1.0, SIZE + 1), count)))
        else:
            root = count % SIZE
            requests.append(COMM.Ibcast(send, root))
            outs.append((send, np.full(count, root + 1.0)))
    complete_by(
        random.Random(seed + RANK).choice(["wait", "Waitany", "Testsome", "Waitall"]), requests, random.Random(RANK)
    )
    assert all_true(all(np.array_equal(out, expected) for out, expected in outs))


# ---- persistent ----


@pytest.mark.parametrize("registered", [True, False])
@pytest.mark.parametrize("count", [3, 30_000])
def test_persistent_operators_read_their_buffers_at_start(count, registered):
    send, total, text, gathered = (array(count * k, 0, registered) for k in (1, 1, 1, SIZE))
    requests = [
        COMM.Allreduce_init(send, total),
        COMM.Bcast_init(text, SIZE - 1),
        COMM.Allgather_init(send, gathered, info=MPI.INFO_NULL),
        COMM.Barrier_init(),
    ]
    assert all(isinstance(request, MPI.Prequest) and request for request in requests)
    requests[0].Wait()  # inactive: returns at once
    for step in range(6):
        send[:] = step * (RANK + 1)
        text[:] = step if RANK == SIZE - 1 else -1
        if step % 2:
            MPI.Prequest.Startall(requests)
        else:
            for request in requests:
                request.Start()
        complete_by(["Waitall", "wait", "test"][step % 3], requests, random.Random(RANK)) if step % 3 != 1 else [
            r.Wait() for r in requests
        ]
        right = (total == step * TOTAL).all() and (text == step).all()
        assert all_true(right and (gathered == step * np.repeat(np.arange(1.0, SIZE + 1), count)).all())
    for request in requests:
        request.Free()
        assert not request


def test_an_active_persistent_request_cannot_be_started():
    if not NATIVE:
        pytest.skip("MPI's own")
    request = COMM.Barrier_init()
    request.Start()
    with pytest.raises(MPI.Exception):
        request.Start()
    request.Wait()
    request.Free()
    with pytest.raises(MPI.Exception):
        request.Start()


def test_classes():
    request = COMM.Ibarrier()
    assert isinstance(request, Request if NATIVE else MPI.Request)
    request.Wait()
    persistent = COMM.Barrier_init()
    assert isinstance(persistent, PersistentRequest if NATIVE else MPI.Prequest)
    persistent.Free()


def test_communicator_freed_with_requests_under_way():
    for _ in range(20):
        comm = COMM.Dup()
        total = np.zeros(2000)
        request = comm.Iallreduce(np.ones(2000), total)
        comm.Free()
        request.Wait()
        assert (total == SIZE).all()


@pytest.mark.mpi(min_size=2)
def test_threads_each_with_a_communicator():
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        pytest.skip("needs THREAD_MULTIPLE")
    comms = [COMM.Dup() for _ in range(3)]
    wrong = []

    def work(comm, number):
        for step in range(30):
            total = np.zeros(500 * number + 1)
            request = comm.Iallreduce(np.full(total.size, step + 1.0), total)
            if step % 3 == 0:
                time.sleep(0)
            request.Wait()
            if not (total == SIZE * (step + 1)).all():
                wrong.append((number, step))

    threads = [threading.Thread(target=work, args=(comm, number)) for number, comm in enumerate(comms)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for comm in comms:
        comm.Free()
    assert all_true(not wrong)
