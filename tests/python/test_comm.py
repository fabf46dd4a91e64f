"""Communicators: who makes accelerated ones, how they end, and that next to mpi4py's objects they pass for the same thing."""

import copy
import inspect
import pickle

import mpi4py.MPI
import numpy as np
import pytest

from stratampi import MPI, Comm, accelerate
from stratampi.comm import Cartcomm, Distgraphcomm, Graphcomm, Intercomm

pytestmark = pytest.mark.mpi

SPREAD = np.arange(5.0)


def ring(size, rank):
    return [(rank - 1) % size], [(rank + 1) % size]


# What to call on COMM_WORLD (of size n, rank r), and the class of what comes.
MAKERS = {
    "Dup": (lambda c, n, r: c.Dup(), Comm),
    "Dup info": (lambda c, n, r: c.Dup(MPI.INFO_NULL), Comm),
    "Clone": (lambda c, n, r: c.Clone(), Comm),
    "Dup_with_info": (lambda c, n, r: c.Dup_with_info(MPI.INFO_NULL), Comm),
    "Idup": (lambda c, n, r: finished(c.Idup()), Comm),
    "Idup_with_info": (lambda c, n, r: finished(c.Idup_with_info(MPI.INFO_NULL)), Comm),
    "Create": (lambda c, n, r: with_group(c, lambda g: c.Create(g)), Comm),
    "Create_group": (lambda c, n, r: with_group(c, lambda g: c.Create_group(g, tag=3)), Comm),
    "Split": (lambda c, n, r: c.Split(color=r % 2, key=-r), Comm),
    "Split_type": (lambda c, n, r: c.Split_type(MPI.COMM_TYPE_SHARED), Comm),
    "Create_cart": (lambda c, n, r: c.Create_cart([n], periods=[True]), Cartcomm),
    "Create_graph": (lambda c, n, r: c.Create_graph(list(range(1, n + 1)), [(i + 1) % n for i in range(n)]), Graphcomm),
    "Create_dist_graph_adjacent": (lambda c, n, r: c.Create_dist_graph_adjacent(*ring(n, r)), Distgraphcomm),
    "Create_dist_graph": (lambda c, n, r: c.Create_dist_graph([r], [1], [(r + 1) % n]), Distgraphcomm),
}


def finished(made):
    comm, request = made
    request.Wait()
    return comm


def with_group(comm, make):
    group = comm.Get_group()
    try:
        return make(group)
    finally:
        group.Free()


def check_allreduce(comm):
    """The communicator works: its ranks' sum."""
    out = np.empty_like(SPREAD)
    comm.Allreduce(SPREAD * (comm.rank + 1), out)
    assert (out == SPREAD * sum(range(1, comm.size + 1))).all()


@pytest.mark.parametrize("name", MAKERS)
def test_makers_return_accelerated_communicators_that_work(comm, name):
    make, cls = MAKERS[name]
    made = make(comm, comm.size, comm.rank)
    assert type(made) is cls
    assert made != comm
    check_allreduce(made)
    again = made.Dup()  # what was made makes in turn
    part = made.Split(color=0, key=made.rank)
    assert type(again) is cls
    assert type(part) is Comm
    check_allreduce(again)
    check_allreduce(part)
    for each in (again, part, made):
        each.Free()
        assert each == MPI.COMM_NULL


def test_sub_of_a_cartesian_communicator(comm):
    cart = comm.Create_cart([comm.size, 1])
    rows = cart.Sub([True, False])
    assert type(rows) is Cartcomm
    assert rows.dims == [comm.size]
    check_allreduce(rows)
    # A grid of no dimensions: Intel MPI gives it to rank 0 alone, the others get its null, which is no failure of ours.
    plain, point = MPI.Cartcomm(cart).Sub([False, False]), cart.Sub([False, False])
    assert (point == MPI.COMM_NULL) == (plain == MPI.COMM_NULL)
    assert type(point) is (Cartcomm if plain else MPI.Cartcomm)
    if plain:
        check_allreduce(point)
        point.Free()
        plain.Free()
    for each in (rows, cart):
        each.Free()


def test_shrink_where_the_library_has_it(comm):
    try:
        shrunk = comm.Shrink()
    except NotImplementedError:
        pytest.skip("no MPI_Comm_shrink")
    soon, request = comm.Ishrink()
    request.Wait()
    for made in (shrunk, soon):
        assert type(made) is Comm
        check_allreduce(made)
        made.Free()


def test_ranks_left_out_get_mpi4pys_null(comm):
    left_out = comm.Split(MPI.UNDEFINED if comm.rank else 0)
    nobody = comm.Create(MPI.GROUP_EMPTY)
    assert type(nobody) is MPI.Intracomm
    assert nobody == MPI.COMM_NULL
    if comm.rank:
        assert type(left_out) is MPI.Intracomm
        assert not left_out
    else:
        assert type(left_out) is Comm
        assert left_out.size == 1
        left_out.Free()
    if comm.size > 1:
        cart = comm.Create_cart([comm.size - 1])
        assert (type(cart) is MPI.Cartcomm and not cart) if comm.rank == comm.size - 1 else type(cart) is Cartcomm
        cart.free()


@pytest.mark.mpi(min_size=4)
def test_intercommunicators_merge_into_accelerated_ones(comm):
    half = comm.Split(comm.rank % 2, comm.rank)
    inter = half.Create_intercomm(0, comm, 1 - comm.rank % 2, tag=5)
    assert type(inter) is Intercomm
    again = inter.Dup()
    assert type(again) is Intercomm
    merged = inter.Merge(high=bool(comm.rank % 2))
    assert type(merged) is Comm
    assert merged.size == comm.size
    check_allreduce(merged)
    for each in (merged, again, inter, half):
        each.Free()


@pytest.mark.mpi(min_size=2)
def test_merge_with_one_rank_alone_stays_plain_on_both_sides(comm):
    """The side of one rank may have come by COMM_SELF, a plain object: others with an accelerated one would wait for it."""
    workers = comm.Split(int(comm.rank > 0), comm.rank)
    if comm.rank == 0:
        inter = MPI.COMM_SELF.Create_intercomm(0, comm, 1, tag=6)
        assert type(inter) is MPI.Intercomm
    else:
        inter = workers.Create_intercomm(0, comm, 0, tag=6)
        assert type(inter) is Intercomm
    merged = inter.Merge()
    assert type(merged) is MPI.Intracomm
    check_allreduce(merged)
    for each in (merged, inter, workers):
        each.Free()


@pytest.mark.parametrize("end", ["Free", "free", "Disconnect"])
def test_a_freed_communicator_raises_and_does_not_crash(comm, end):
    made = comm.Dup()
    check_allreduce(made)
    getattr(made, end)()
    assert not made
    for call in (made.Barrier, made.Get_size, lambda: made.Allreduce(SPREAD, np.empty(5))):
        with pytest.raises(MPI.Exception) as caught:
            call()
        assert caught.value.Get_error_class() == MPI.ERR_COMM
    made.free()  # harmless when null


def test_the_constant_cannot_be_freed(comm):
    for _ in range(3):
        comm.free()
        assert comm
    clone = Comm(comm)
    assert clone == comm
    clone.free()
    assert not clone
    assert comm.size == MPI.COMM_WORLD.size
    check_allreduce(comm)


def test_attributes_names_and_error_handlers_are_the_handles(comm):
    made = comm.Split()
    key = MPI.Comm.Create_keyval(copy_fn=lambda c, k, v: v + 1)
    made.Set_attr(key, 41)
    made.Set_name("a name")
    plain = MPI.Intracomm(made)
    assert plain.Get_attr(key) == 41
    assert plain.name == "a name"
    assert made.Get_errhandler() == MPI.ERRORS_RETURN
    again = made.Dup()
    assert again.Get_attr(key) == 42
    made.Free()
    again.Free()
    MPI.Comm.Free_keyval(key)


def test_equal_to_mpi4pys_object_of_the_same_handle(comm):
    made = comm.Dup()
    for ours, plain in ((comm, mpi4py.MPI.COMM_WORLD), (made, MPI.Intracomm(made))):
        assert ours == plain
        assert plain == ours
        assert not (ours != plain)  # noqa: SIM202  # another slot than ==
        assert ours.Compare(plain) == MPI.IDENT
        assert ours.handle == plain.handle
        assert isinstance(ours, mpi4py.MPI.Intracomm)
    assert made != comm
    assert comm != MPI.COMM_SELF
    assert type(MPI.COMM_SELF) is MPI.Intracomm
    for ours in (comm, made):
        with pytest.raises(TypeError):
            hash(ours)
    made.Free()


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickling_as_mpi4py_does(comm, protocol):
    def there_and_back(obj):
        return pickle.loads(pickle.dumps(obj, protocol))

    plain = MPI.Comm.fromhandle(MPI.COMM_SELF.handle)
    original = mpi4py.MPI.COMM_WORLD
    for constant in (comm, original, MPI.COMM_SELF, MPI.COMM_NULL):
        assert there_and_back(constant) is constant
        assert copy.copy(constant) is constant
        assert copy.deepcopy(constant) is constant
    for obj in (Comm(comm), MPI.Intracomm(comm), MPI.Intracomm(original), plain, Comm(), Cartcomm()):
        back = there_and_back(obj)
        assert back == obj
        assert type(back) is type(obj)
        assert back is not obj
    made = comm.Dup()
    with pytest.raises(ValueError, match="cannot serialize"):
        there_and_back(made)
    made.Free()


def test_our_handles_come_back_as_ours_and_strangers_as_mpi4pys(comm):
    cart = comm.Create_cart([comm.size])
    stranger = MPI.COMM_SELF.Dup()
    expected = [(comm, Comm), (cart, Cartcomm), (stranger, MPI.Intracomm), (MPI.COMM_SELF, MPI.Intracomm)]
    expected += [(comm.Dup(), Comm), (cart.Dup(), Cartcomm), (MPI.COMM_NULL, MPI.Comm)]
    for obj, cls in expected:
        for caller in (MPI.Comm, MPI.Intracomm, Comm, Comm(comm)):
            assert caller.fromhandle(obj.handle) == obj
            assert type(caller.fromhandle(obj.handle)) is cls
            assert type(caller.f2py(obj.py2f())) is cls
            if obj.toint() != -1:
                assert type(caller.fromint(obj.toint())) is cls
    assert MPI.Comm.f2py(comm.py2f()) is comm
    for each in (expected[4][0], expected[5][0], cart, stranger):
        each.Free()


class UserComm(MPI.Intracomm):
    """As mpi4py programs write them."""

    def __new__(cls, comm=None):
        return super().__new__(cls, comm)

    def double(self, value):
        return 2 * self.allreduce(value)


class UserOurs(Comm):
    """The same, on top of ours."""

    def double(self, value):
        return 2 * self.allreduce(value)


@pytest.mark.parametrize("cls", [UserComm, UserOurs])
def test_users_subclasses(comm, cls):
    mine = cls(comm)
    assert mine.double(1) == 2 * comm.size
    again = mine.Dup()
    assert type(again) is cls
    assert again.double(1) == 2 * comm.size
    check_allreduce(again)
    part = again.Split()
    assert type(part) is (Comm if cls is UserOurs else MPI.Intracomm)
    part.Free()
    again.Free()
    mine.free()
    assert comm.size > 0


def test_accelerate(comm):
    stranger = MPI.Intracomm(comm).Split()
    cart = stranger.Create_cart([comm.size])
    assert type(stranger) is MPI.Intracomm
    assert type(cart) is MPI.Cartcomm
    assert type(accelerate(stranger)) is Comm
    assert accelerate(stranger) == stranger
    assert type(accelerate(cart)) is Cartcomm
    assert type(accelerate(MPI.Comm(cart))) is Cartcomm
    assert type(accelerate(UserComm(stranger))) is Comm
    check_allreduce(accelerate(stranger))
    assert accelerate(mpi4py.MPI.COMM_WORLD) is comm
    assert accelerate(comm) is comm
    assert accelerate(MPI.COMM_NULL) is MPI.COMM_NULL
    cart.Free()
    stranger.Free()


def test_wrong_handles_are_refused_as_by_mpi4py(comm):
    for wrong in (3, "comm", MPI.GROUP_NULL):
        with pytest.raises(TypeError):
            Comm(wrong)
    with pytest.raises(TypeError):
        Cartcomm(comm)
    with pytest.raises(TypeError):
        comm.Split("red")
    with pytest.raises(TypeError):
        comm.Create_cart([1], colour=2)


def test_signatures_and_texts_are_mpi4pys():
    for ours, plain in ((Comm, MPI.Intracomm), (Cartcomm, MPI.Cartcomm), (Intercomm, MPI.Intercomm)):
        for name in ("Split", "Create", "Split_type", "Free"):
            assert getattr(ours, name).__doc__ == getattr(plain, name).__doc__
            assert inspect.signature(getattr(ours, name)) == inspect.signature(getattr(plain, name))
    assert inspect.signature(Cartcomm.Sub) == inspect.signature(MPI.Cartcomm.Sub)


def test_the_namespace_is_mpi4pys(comm):
    """Every name, the very same object, but for COMM_WORLD; also by `import *`."""
    own = {"__name__", "__package__", "__loader__", "__spec__", "__builtins__"}
    here, there = vars(MPI), vars(mpi4py.MPI)
    assert set(there) <= set(here) <= set(there) | {"__cached__"}
    different = {name for name in set(there) - own if here[name] is not there[name]}
    assert different <= {"COMM_WORLD"}  # empty inside the runner
    assert MPI.COMM_WORLD is comm
    assert type(comm) is Comm
    ours, theirs = {}, {}
    exec("from stratampi.MPI import *", ours)
    exec("from mpi4py.MPI import *", theirs)
    assert set(ours) == set(theirs)
    assert ours["COMM_WORLD"] is comm
    assert MPI.__file__ == mpi4py.MPI.__file__


@pytest.mark.mpi(min_size=2)
def test_barrier_lets_one_sided_communication_progress():
    """What a peer completed before a barrier has arrived after it: one Win.Test sees it, as with MPI's own barrier."""

    class Window(MPI.Win):
        pass

    comm = MPI.COMM_WORLD.Dup()
    memory = np.zeros(4)
    win = Window.Create(memory, comm=comm)
    assert type(win) is Window
    group = comm.Get_group()
    seen = []
    for _ in range(50):
        if comm.rank == 0:
            win.Start(group.Incl([1]))
            win.Complete()
        elif comm.rank == 1:
            win.Post(group.Incl([0]))
        comm.Barrier()
        if comm.rank == 1:
            seen.append(win.Test())
            if not seen[-1]:
                win.Wait()
        comm.Barrier()
    win.Free()
    comm.Free()
    assert all(seen)


@pytest.mark.mpi
def test_an_object_whose_handle_another_has_freed():
    """Objects share a handle; after Free through one of them the others must not reach for what is gone."""
    one = MPI.COMM_WORLD.Dup()
    other = MPI.Comm.f2py(one.py2f())
    third = type(one)(one)
    for comm in (one, other, third):
        comm.Barrier()
        comm.Allreduce(np.ones(3), np.ones(3))
    one.Free()
    if MPI.get_vendor()[0] != "Open MPI":  # which crashes on a dead handle itself
        for comm in (other, third):
            with pytest.raises(MPI.Exception):
                comm.Barrier()
    assert one == MPI.COMM_NULL
