"""ref.py against results worked out by hand: the reference itself must be right before anything is compared with it."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratampi import ref


def same(got, wanted):
    """Exactly equal lists of arrays: dtype, shape, bits. None stands for None."""
    assert len(got) == len(wanted)
    for g, w in zip(got, wanted, strict=True):
        if w is None:
            assert g is None
            continue
        w = np.asarray(w)
        assert g.dtype == w.dtype
        assert g.shape == w.shape
        assert g.tobytes() == w.tobytes()


def i32(*values):
    return np.array(values, "i4")


A, B, C = i32(1, 2), i32(30, 40), i32(500, 600)


def test_barrier_moves_nothing():
    assert ref.barrier([None, None]) == [None, None]


def test_bcast():
    same(ref.bcast([None, B, None], root=1), [B, B, B])


def test_results_are_fresh():
    got = ref.bcast([A, None])
    got[0][0] = 99
    assert A[0] == 1
    assert got[1][0] == 1


def test_gather():
    same(ref.gather([A, B, C], root=2), [None, None, np.array([[1, 2], [30, 40], [500, 600]], "i4")])
    assert ref.gather([A, B], root=0)[0].tolist() == [[1, 2], [30, 40]]


def test_gatherv_packs_by_default():
    same(ref.gatherv([i32(1), i32(), i32(2, 3)]), [i32(1, 2, 3), None, None])


def test_gatherv_keeps_gaps_and_obeys_displacements():
    recv = np.full(8, 7, "i4")
    same(ref.gatherv([i32(1), i32(2, 3)], root=1, displs=[6, 1], recv=recv), [None, i32(7, 2, 3, 7, 7, 7, 1, 7)])
    assert recv.tolist() == [7] * 8


def test_scatter():
    same(ref.scatter([np.stack([A, B, C]), None, None]), [A, B, C])
    same(ref.scatter([None, i32(5, 6)], root=1), [np.int32(5), np.int32(6)])


def test_scatterv():
    same(ref.scatterv([i32(1, 2, 3), None], [1, 2]), [i32(1), i32(2, 3)])
    same(ref.scatterv([None, i32(1, 2, 3, 4)], [2, 1], root=1, displs=[2, 0]), [i32(3, 4), i32(1)])


def test_allgather():
    same(ref.allgather([A, B]), [np.stack([A, B])] * 2)


def test_allgatherv():
    same(ref.allgatherv([i32(1), i32(2, 3)]), [i32(1, 2, 3)] * 2)
    recvs = [i32(7, 7, 7, 7), i32(8, 8, 8, 8)]
    same(ref.allgatherv([i32(1), i32(2, 3)], [3, 0], recvs), [i32(2, 3, 7, 1), i32(2, 3, 8, 1)])


def test_alltoall():
    same(
        ref.alltoall([i32(11, 12, 13), i32(21, 22, 23), i32(31, 32, 33)]),
        [i32(11, 21, 31), i32(12, 22, 32), i32(13, 23, 33)],
    )


def test_alltoallv():
    sends = [i32(1, 2, 3), i32(4, 5)]
    counts = [[1, 2], [0, 2]]
    same(ref.alltoallv(sends, counts), [i32(1), i32(2, 3, 4, 5)])
    got = ref.alltoallv(
        sends, counts, send_displs=[[2, 0], [0, 0]], recv_displs=[[1, 0], [3, 0]], recvs=[i32(9, 9), i32(9, 9, 9, 9, 9)]
    )
    same(got, [i32(9, 3), i32(4, 5, 9, 1, 2)])


def test_reduce_and_allreduce():
    same(ref.reduce([A, B, C], "SUM", root=1), [None, i32(531, 642), None])
    same(ref.allreduce([A, B, C], "PROD"), [i32(15000, 48000)] * 3)


def test_reduce_scatter():
    same(ref.reduce_scatter_block([A, B]), [np.int32(31), np.int32(42)])
    same(ref.reduce_scatter([i32(1, 2, 3), i32(10, 20, 30)], [0, 3]), [i32(), i32(11, 22, 33)])


def test_scans():
    same(ref.scan([A, B, C]), [A, i32(31, 42), i32(531, 642)])
    same(ref.exscan([A, B, C]), [None, A, i32(31, 42)])


def test_integers_wrap():
    same([ref.combine([np.array([127], "i1"), np.array([1], "i1")], "SUM")], [np.array([-128], "i1")])
    same([ref.combine([np.array([65535], "u2")] * 2, "PROD")], [np.array([1], "u2")])
    same([ref.combine([np.array(255, "u1"), np.array(1, "u1")], "SUM")], [np.array(0, "u1")])


@pytest.mark.parametrize(
    ("op", "wanted"),
    [
        ("LAND", [1, 0, 0]),
        ("LOR", [1, 1, 0]),
        ("LXOR", [0, 1, 0]),
        ("BAND", [0, 0, 0]),
        ("BOR", [6, 2, 0]),
        ("BXOR", [6, 2, 0]),
    ],
)
def test_logical_and_bitwise(op, wanted):
    same([ref.combine([i32(2, 2, 0), i32(4, 0, 0)], op)], [i32(*wanted)])


def test_logical_of_three_in_order():
    same([ref.combine([i32(5), i32(5), i32(5)], "LXOR")], [i32(1)])
    same([ref.combine([np.array([True]), np.array([True])], "LXOR")], [np.array([False])])


def test_one_rank_gets_its_own_back():
    same([ref.combine([i32(5)], "LAND")], [i32(5)])


def test_sum_goes_in_rank_order():
    big, one = np.array([2.0**53]), np.array([1.0])
    assert ref.combine([big, one, one], "SUM")[0] == 2.0**53
    assert ref.combine([one, one, big], "SUM")[0] == 2.0**53 + 2


def test_max_keeps_the_earlier_unless_beaten():
    nan, one = np.array([math.nan]), np.array([1.0])
    assert np.isnan(ref.combine([nan, one], "MAX")[0])
    assert ref.combine([one, nan], "MAX")[0] == 1
    assert np.signbit(ref.combine([np.array([-0.0]), np.array([0.0])], "MAX")[0])
    assert not np.signbit(ref.combine([np.array([0.0]), np.array([-0.0])], "MIN")[0])


def test_complex_product():
    same([ref.combine([np.array([1 + 2j]), np.array([3 + 4j])], "PROD")], [np.array([-5 + 10j])])
    # (1+e)(1+e) - 1*1 with e = 2^-29 is 2e if the square is rounded first; a fused multiplication would leave 2e + e^2.
    x, y = np.array([1 + 2.0**-29 + 1j]), np.array([1 + 2.0**-29 + 1j])
    assert ref.combine([x, y], "PROD")[0].real == 2.0**-28


def test_float16_rounds_once():
    x = [np.array([v], "f2") for v in (2048, 1, 1)]
    assert ref.combine(x, "SUM")[0] == 2050
    assert ref.combine(x, "SUM").dtype == np.float16


def test_bfloat16_rounds_once():
    bfloat16 = np.dtype(pytest.importorskip("ml_dtypes").bfloat16)
    x = [np.array([v], bfloat16) for v in (256, 1, 1)]
    got = ref.combine(x, "SUM")
    assert got.dtype == bfloat16
    assert float(got[0]) == 258
    assert float(ref.combine(x, "MAX")[0]) == 256


@pytest.mark.parametrize(
    ("dtype", "op"), [("f8", "BAND"), ("f4", "LAND"), ("c16", "MAX"), ("?", "SUM"), ("M8[s]", "SUM")]
)
def test_undefined_ops_are_refused(dtype, op):
    with pytest.raises(TypeError, match=op):
        ref.combine([np.zeros(1, dtype)] * 2, op)


def test_unequal_arrays_are_refused():
    with pytest.raises(ValueError):
        ref.combine([i32(1), i32(1, 2)], "SUM")
    with pytest.raises(ValueError):
        ref.combine([i32(1), np.array([1], "i8")], "SUM")


def test_legality_agrees_with_the_native_table():
    from stratampi._native import ffi, lib  # the rest of this file needs no native module

    dtypes = (
        "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 longdouble complex64 complex128"
    )
    for name in [*dtypes.split(), "clongdouble"]:
        type_ = getattr(lib, f"SMPI_{name.upper()}")
        assert ffi.string(lib.smpi_type_name(type_)).decode() == name
        assert lib.smpi_type_size(type_) == np.dtype(name).itemsize
        for op in ref.ARITHMETIC + ref.ORDER + ref.LOGICAL + ref.BITWISE:
            assert ref.is_legal(np.dtype(name), op) == bool(lib.smpi_op_is_legal(type_, getattr(lib, f"SMPI_{op}")))


@given(
    st.lists(st.lists(st.integers(0, 9), min_size=3, max_size=3), min_size=3, max_size=3),
    st.randoms(use_true_random=False),
)
def test_alltoallv_is_a_transposition(counts, random):
    """Sending the results back with transposed counts restores what was sent."""
    sends = [np.array([random.randrange(100) for _ in range(sum(row))], "i8") for row in counts]
    back = ref.alltoallv(ref.alltoallv(sends, counts), np.array(counts).T.tolist())
    same(back, sends)
