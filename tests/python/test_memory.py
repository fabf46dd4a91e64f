"""Registered arrays: NumPy's arrays in every respect but one, the memory they lie in.

Each test runs alone and, marked `mpi`, on the ranks of a job; nothing here is collective but the first call, which brings up
the world.
"""

import contextvars
import copy
import gc
import os
import pickle
import subprocess
import sys
import textwrap
import threading

import numpy as np
import pytest

from stratampi import memory
from stratampi.memory import heap_stats, is_registered

DTYPES = [*"?bBhHiIlLqQefdgFDG", "S5", "U3", "M8[s]", "m8[ms]", "V7", "i4,f8", "bf16", "bfloat16", "fp16"]
LARGE = 1 << 16  # float64 elements: half a MiB, above STRATAMPI_REGISTER_MIN


@pytest.fixture(autouse=True, params=["alone", pytest.param("ranks", marks=pytest.mark.mpi)])
def heap(request):
    """A heap in use, whose live bytes are the same before and after: no test leaks a block."""
    first = memory.empty(1)
    if not is_registered(first):
        pytest.skip("no shared memory here: the world is not ready")
    del first
    gc.collect()
    before = heap_stats()
    yield
    gc.collect()
    after = heap_stats()
    # Fewer: what an earlier test's communicator still held comes back when the last peer has closed it too.
    assert after["live"] <= before["live"]
    assert after["blocks"] <= before["blocks"]


@pytest.fixture
def alone(request):
    """For tests that start programs of their own."""
    if request.node.callspec.params["heap"] != "alone":
        pytest.skip("one process is enough")


def run(code, **env):
    """Runs Python text in a process of its own; its output. Fails on any error, also a silent crash at exit."""
    process = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=os.environ | env,
    )
    assert process.returncode == 0, process.stderr
    assert "Traceback" not in process.stderr, process.stderr
    assert "Exception ignored" not in process.stderr, process.stderr
    return process.stdout


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_makers_by_dtype_and_order(dtype, order):
    if dtype.startswith("bf"):
        pytest.importorskip("ml_dtypes")
    for shape in [(), 3, (0,), (3, 4), [2, 0, 3], (2, 3, 4)]:
        for make in (memory.empty, memory.zeros, memory.ones):
            if make is memory.ones and dtype in ("V7", "i4,f8", "M8[s]"):
                continue  # neither does NumPy
            made = make(shape, dtype, order)
            assert type(made) is np.ndarray
            assert made.base is None
            assert made.flags.owndata
            assert made.flags.writeable
            assert made.flags["C_CONTIGUOUS" if order == "C" else "F_CONTIGUOUS"]
            assert made.dtype == (made.dtype if dtype.startswith(("bf", "fp")) else np.dtype(dtype))
            assert made.shape == np.empty(shape).shape
            assert is_registered(made)
            if make is not memory.empty:
                wanted = (np.zeros if make is memory.zeros else np.ones)(shape, made.dtype, order)
                if made.dtype.char in "gG":  # an extended float has padding, which NumPy leaves as it is
                    assert np.array_equal(made, wanted)
                else:
                    assert made.tobytes() == wanted.tobytes()


def test_named_16_bit_floats(monkeypatch):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    assert memory.empty(3, "bf16").dtype == ml_dtypes.bfloat16
    assert memory.zeros(3, "bfloat16").dtype == ml_dtypes.bfloat16
    assert memory.full(3, 1.5, "bf16").dtype == ml_dtypes.bfloat16
    assert memory.array([1, 2], "bf16").dtype == ml_dtypes.bfloat16
    assert memory.empty_like(np.empty(3), "bf16").dtype == ml_dtypes.bfloat16
    assert memory.empty(3, "fp16").dtype == np.float16
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    with pytest.raises(TypeError, match="ml_dtypes"):
        memory.empty(3, "bf16")
    assert memory.empty(3, "fp16").dtype == np.float16


def test_makers_agree_with_numpy():
    x = np.arange(24.0).reshape(4, 6)
    for call in (
        lambda m: m.full((2, 3), 7),
        lambda m: m.full((2, 3), [1, 2, 3], np.float32, "F"),
        lambda m: m.full(2, "abc"),
        lambda m: m.full(2, 3.7, np.uint8),
        lambda m: m.zeros(5, order="F"),
        lambda m: m.ones((2, 2), dtype=None),
        lambda m: m.zeros(3, dtype=bool),
        lambda m: m.array([[1, 2], [3, 4.5]]),
        lambda m: m.array([1, 2, 3], np.int8, ndmin=3),
        lambda m: m.array(x.T, order="C"),
        lambda m: m.array(x[::2, ::-1]),
        lambda m: m.array(5),
        lambda m: m.array([None, "x", 3], dtype=object),
        lambda m: m.array(np.ma.masked_array([1, 2], [True, False]), subok=True),
        lambda m: m.zeros_like(x.T),
        lambda m: m.zeros_like(x, np.int16, "F", True, (3, 2)),
        lambda m: m.zeros_like([1, 2, 3]),
        lambda m: m.zeros_like(np.ma.masked_array([1, 2], [True, False]), subok=False),
    ):
        ours, theirs = call(memory), call(np)
        assert type(ours) is type(theirs)
        assert (ours.dtype, ours.shape, ours.strides) == (theirs.dtype, theirs.shape, theirs.strides)
        assert ours.tolist() == theirs.tolist()
        assert is_registered(ours)
    like = memory.empty_like(x.T)
    assert (like.shape, like.strides) == (x.T.shape, np.empty_like(x.T).strides)


def test_array_copy():
    mine, plain = memory.array([1.0, 2.0]), np.array([1.0, 2.0])
    assert memory.array(mine) is not mine
    assert memory.array(mine, copy=None) is mine
    assert memory.array(mine, copy=False) is mine
    assert memory.array(mine, np.float32, copy=None).dtype == np.float32
    needed = memory.array(plain, copy=None)
    assert needed is not plain
    assert is_registered(needed)
    with pytest.raises(ValueError, match="copy"):
        memory.array(plain, copy=False)


def test_errors_are_numpys():
    with pytest.raises(ValueError, match="negative"):
        memory.empty(-1)
    with pytest.raises(TypeError):
        memory.zeros("x")
    with pytest.raises(TypeError):
        memory.empty(3, "no such type")
    assert not is_registered(np.empty(LARGE))  # NumPy's handler is back after each of them


def test_views_are_registered():
    a = memory.zeros((40, 50))
    for view in (a[1:], a[::2, ::-3], a.T, a[5, 7], a[3:3], a[::-1], a.reshape(-1), a.view(np.uint8), a[7, 9, ...]):
        if isinstance(view, np.ndarray):
            assert is_registered(view)
    assert is_registered(memoryview(a))
    assert is_registered(memoryview(a)[3:5])
    assert is_registered(memoryview(a.reshape(-1))[::-2])


def test_what_is_not_registered():
    a = memory.zeros(1000)
    far = 1 << 42  # more than a segment; such views must not be printed
    others = [
        np.lib.stride_tricks.as_strided(a, (2,), (far,)),  # starts in the heap, ends behind it
        np.lib.stride_tricks.as_strided(a, (2,), (-far,)),
        np.zeros(1000),
        b"abc",
        bytearray(9),
        memoryview(b"abcdef")[::-2],
        np.float64(1),
    ]
    answers = [is_registered(other) for other in others]
    assert answers == [False] * len(others)
    for no_buffer in (3, None, [1, 2], "text"):
        with pytest.raises(TypeError):
            is_registered(no_buffer)


def test_freed_memory_is_reused():
    a = memory.empty(LARGE)
    address, cached = a.ctypes.data, heap_stats()["cached"]
    del a
    assert heap_stats()["cached"] >= cached + 8 * LARGE
    again = memory.empty(LARGE)
    assert again.ctypes.data == address
    again[:] = 3
    del again
    assert not memory.zeros(LARGE).any()


def test_memory_is_stable():
    rng = np.random.default_rng(1)
    keep = [None] * 20
    for i in range(10_000):
        keep[i % 20] = memory.empty(int(rng.integers(1, 20_000)))
        keep[i % 20][-1] = i
        if i == 1_000:
            early = heap_stats()
    late = heap_stats()
    assert late["live"] + late["cached"] <= 2 * (early["live"] + early["cached"])
    assert late["blocks"] <= early["blocks"] + 20


def test_memory_error():
    limit = heap_stats()["limit"]
    for shape, dtype in ((limit + 1, np.uint8), (1 << 50, np.float64), ((1 << 31, 1 << 20), np.complex128)):
        for make in (memory.empty, memory.zeros, memory.ones):
            with pytest.raises(MemoryError):
                make(shape, dtype)
    a = memory.zeros(10)
    with pytest.raises(MemoryError):
        a.resize(limit)
    assert a.shape == (10,)
    assert not is_registered(np.empty(LARGE))


def test_hook():
    plain = np.arange(float(LARGE))
    with memory.registered():
        small = np.empty(10)
        results = {
            "empty": np.empty(LARGE),
            "zeros": np.zeros(LARGE),
            "ufunc": plain + 1,
            "chain": np.sqrt(plain * 2 + plain),
            "concatenate": np.concatenate([plain, plain]),
            "copy": plain.copy(),
            "astype": plain.astype(np.float32),
            "take": plain[::2][np.arange(LARGE // 2)],
            "matmul": np.ones((300, 20)) @ np.ones((20, 300)),
            "fromiter": np.fromiter(range(LARGE), np.float64),
            "random": np.random.default_rng(0).random(LARGE),
            "unpickled": pickle.loads(pickle.dumps(plain)),
        }
    assert not is_registered(small)
    for name, result in results.items():
        if name != "unpickled":  # that one may lie in the bytes object it was read from
            assert is_registered(result), name
    assert not results["zeros"].any()
    assert np.array_equal(results["fromiter"], plain)
    assert np.array_equal(results["ufunc"], np.arange(1.0, LARGE + 1))
    assert np.array_equal(results["unpickled"], plain)
    assert not is_registered(plain.copy())


def test_hook_threshold_and_nesting():
    with memory.registered(100):
        assert not is_registered(np.empty(99, np.uint8))
        assert is_registered(np.empty(100, np.uint8))
        with memory.registered(0):
            assert is_registered(np.empty(1, np.uint8))
        assert not is_registered(np.empty(99, np.uint8))
        with pytest.raises(KeyError), memory.registered(10):
            raise KeyError
        assert not is_registered(np.empty(99, np.uint8))
        assert is_registered(memory.empty(1))
        assert is_registered(np.empty(100, np.uint8))
    assert not is_registered(np.empty(100, np.uint8))


def test_register_numpy():
    try:
        memory.register_numpy()
        memory.register_numpy()
        a = np.ones(LARGE)
        assert is_registered(a)
        with memory.registered(1):
            assert is_registered(np.empty(1))
        assert is_registered(np.empty(LARGE))
    finally:
        memory.register_numpy(False)
    assert not is_registered(np.empty(LARGE))
    assert is_registered(a)
    memory.register_numpy(False)
    a.resize(2 * LARGE)  # by the handler it was born with
    assert is_registered(a)


def test_outliving_the_context():
    def make():
        with memory.registered():
            return np.full(LARGE, 2.5)

    a = make()
    gc.collect()
    assert a.sum() == 2.5 * LARGE
    a += 1
    assert is_registered(a)
    assert not is_registered(a + 1)


def test_arrays_from_before_die_inside():
    before = np.ones(LARGE)
    small = np.ones(3)
    with memory.registered(0):
        del before, small
        inside = np.ones(3)
        more = memory.ones(LARGE)
    del inside, more


def test_threads():
    seen = {}

    def work(name):
        seen[name, "numpy"] = is_registered(np.empty(LARGE))  # a new thread has a context of its own
        seen[name, "makers"] = is_registered(memory.empty(3))
        with memory.registered():
            seen[name, "registered"] = is_registered(np.empty(LARGE))

    with memory.registered():
        thread = threading.Thread(target=work, args=("thread",))
        thread.start()
        thread.join()
        thread = threading.Thread(target=contextvars.copy_context().run, args=(work, "copied"))
        thread.start()
        thread.join()
        assert is_registered(np.empty(LARGE))
    inherits = getattr(sys.flags, "thread_inherit_context", 0)
    assert seen["thread", "numpy"] == bool(inherits)
    assert seen["copied", "numpy"]
    assert all(seen[name, how] for name in ("thread", "copied") for how in ("makers", "registered"))


def test_freed_in_another_thread():
    arrays = [memory.full(1000 + i, i) for i in range(200)]
    bad = []

    def work():
        for _ in range(50):
            a = arrays.pop()
            if not (a == a[0]).all():
                bad.append(a)
            del a
            memory.zeros(500)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not bad
    assert not arrays


def test_resize():
    a = memory.array(np.arange(10))
    a.resize(10_000)
    assert is_registered(a)
    assert a[:10].tolist() == list(range(10))
    assert not a[10:].any()
    a.resize((2, 3))
    assert is_registered(a)
    assert a.tolist() == [[0, 1, 2], [3, 4, 5]]
    with memory.registered():
        b = np.arange(10)
    assert not is_registered(b)
    b.resize(LARGE)  # grows past the threshold of its handler
    assert is_registered(b)
    assert b[:10].tolist() == list(range(10))
    assert not b[10:].any()


def test_copies_and_pickles_are_plain():
    a = memory.array(np.arange(float(LARGE)))
    for other in (a.copy(), copy.copy(a), copy.deepcopy(a), pickle.loads(pickle.dumps(a)), a + 0):
        assert np.array_equal(other, a)
        assert not is_registered(other)
    out_of_band = []
    data = pickle.dumps(a, protocol=5, buffer_callback=out_of_band.append)
    assert is_registered(out_of_band[0].raw())
    same = pickle.loads(data, buffers=out_of_band)
    assert is_registered(same)
    assert np.shares_memory(same, a)


def test_objects_live_and_die():
    class Thing:
        pass

    things = memory.empty(100, object)
    things[:] = [Thing() for _ in range(100)]
    alone = sys.getrefcount(things[0])
    other = memory.array(things)
    shared = sys.getrefcount(things[0])
    del other
    after = sys.getrefcount(things[0])
    assert (shared, after) == (alone + 1, alone)


def test_statistics():
    before = heap_stats()
    assert set(before) == {"live", "peak", "cached", "limit", "blocks"}
    a = memory.empty(1 << 20, np.uint8)
    after = heap_stats()
    assert after["live"] == before["live"] + a.nbytes
    assert after["blocks"] == before["blocks"] + 1
    assert after["peak"] >= after["live"]
    assert after["limit"] == before["limit"] >= after["live"]


@pytest.mark.usefixtures("alone")
def test_interpreter_exit_with_live_arrays():
    out = run("""
        import atexit, sys
        import numpy as np
        from stratampi import memory
        memory.register_numpy()
        kept = [memory.ones(n) for n in (1, 1000, 10**6)] + [np.ones(10**6)]
        sys.kept = kept
        np.kept = [np.ones(10**5)]
        class Late:
            a = memory.ones(1000)
            def __del__(self): print("late", float(self.a.sum()))
        late = Late()
        atexit.register(lambda: print("atexit", float(np.ones(10**6).sum())))
        cycle = [memory.ones(10)]
        cycle.append(cycle)
    """)
    assert "atexit 1000000.0" in out
    assert "late 1000.0" in out


@pytest.mark.usefixtures("alone")
def test_full_heap():
    run(
        """
        import numpy as np
        from stratampi import memory
        assert memory.empty(1).nbytes and memory.heap_stats()["limit"] == 64 << 20, memory.heap_stats()
        held = memory.ones(6 << 20)
        try:
            memory.ones(4 << 20)
        except MemoryError:
            pass
        else:
            raise SystemExit("no MemoryError")
        with memory.registered():
            a, b = np.ones(1 << 20), np.ones(4 << 20)
        assert memory.is_registered(a) and not memory.is_registered(b)
        a.resize(8 << 20)
        assert not memory.is_registered(a) and a[: 1 << 20].all() and not a[1 << 20 :].any()
        """,
        STRATAMPI_HEAP_MAX="64M",
    )


@pytest.mark.usefixtures("alone")
def test_without_shared_memory():
    run(
        """
        import numpy as np
        from stratampi import memory
        with memory.registered():
            for a in (memory.empty((3, 4), "f4", "F"), memory.zeros(3), memory.ones(3), memory.full(3, 7), memory.array([1, 2]),
                      memory.array(np.ones(3), copy=None), memory.array(np.ones(3), copy=False),
                      memory.empty_like(np.ones(3)), memory.zeros_like(np.ones(3)), np.ones(10**6)):
                assert a.flags.owndata and not memory.is_registered(a)
        memory.register_numpy()
        memory.register_numpy(False)
        assert set(memory.heap_stats().values()) == {0}
        try:
            memory.empty(1 << 50)
        except MemoryError:
            pass
        else:
            raise SystemExit("no MemoryError")
        """,
        STRATAMPI_FABRIC="none",
    )


@pytest.mark.usefixtures("alone")
def test_forked_child():
    """What a child writes stays in the child, and it can allocate, grow and free like any process."""
    run("""
        import os
        import numpy as np
        from stratampi import memory
        a, small = memory.ones(10**6), memory.ones(3)
        with memory.registered():
            hooked = np.arange(10**5)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                assert a.all() and small.all()
                a[:] = 7
                small[:] = 7
                assert not memory.is_registered(a)
                with memory.registered():
                    b = np.ones(10**6) + memory.zeros(10**6)
                assert not memory.is_registered(b) and b.all()
                hooked.resize(10**6)
                assert hooked[99_999] == 99_999
                del b, small
                code = 0
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert (a == 1).all() and (small == 1).all() and hooked.shape == (10**5,)
        del a, small, hooked
    """)
