/* types.c - names and sizes: what messages, statistics and Python call the numbers of coll.h.
 *
 * Every switch is over the enum and has no default, so that a new enumerator without a name is a compiler warning.
 * Element types carry NumPy's names, ops MPI's, operators and paths the words of the design. */
#include "../stratampi.h"

const char *smpi_operator_name(int op)
{
    switch ((enum smpi_operator)op) {
    case SMPI_BARRIER: return "barrier";
    case SMPI_BCAST: return "bcast";
    case SMPI_REDUCE: return "reduce";
    case SMPI_ALLREDUCE: return "allreduce";
    case SMPI_ALLGATHER: return "allgather";
    case SMPI_ALLGATHERV: return "allgatherv";
    case SMPI_ALLTOALL: return "alltoall";
    case SMPI_ALLTOALLV: return "alltoallv";
    case SMPI_ALLTOALLW: return "alltoallw";
    case SMPI_GATHER: return "gather";
    case SMPI_GATHERV: return "gatherv";
    case SMPI_SCATTER: return "scatter";
    case SMPI_SCATTERV: return "scatterv";
    case SMPI_REDUCE_SCATTER_BLOCK: return "reduce_scatter_block";
    case SMPI_REDUCE_SCATTER: return "reduce_scatter";
    case SMPI_SCAN: return "scan";
    case SMPI_EXSCAN: return "exscan";
    case SMPI_OPERATOR_COUNT: break;
    }
    return "unknown operator";
}

const char *smpi_path_name(int path)
{
    switch ((enum smpi_path)path) {
    case SMPI_PATH_INLINE: return "inline";
    case SMPI_PATH_DIRECT: return "direct";
    case SMPI_PATH_STAGED: return "staged";
    case SMPI_PATH_MPI: return "mpi";
    case SMPI_PATH_COUNT: break;
    }
    return "unknown path";
}

const char *smpi_why_name(int why)
{
    switch ((enum smpi_why)why) {
    case SMPI_WHY_NOT: return "not asked";
    case SMPI_WHY_DATATYPE: return "datatype";
    case SMPI_WHY_OP: return "op";
    case SMPI_WHY_DEVICE: return "device memory";
    case SMPI_WHY_LAYOUT: return "counts or displacements";
    case SMPI_WHY_MEMORY: return "no heap memory";
    case SMPI_WHY_COUNT: break;
    }
    return "unknown reason";
}

const char *smpi_type_name(int type)
{
    switch ((enum smpi_type)type) {
    case SMPI_BYTE: return "byte";
    case SMPI_BOOL: return "bool";
    case SMPI_INT8: return "int8";
    case SMPI_INT16: return "int16";
    case SMPI_INT32: return "int32";
    case SMPI_INT64: return "int64";
    case SMPI_UINT8: return "uint8";
    case SMPI_UINT16: return "uint16";
    case SMPI_UINT32: return "uint32";
    case SMPI_UINT64: return "uint64";
    case SMPI_FLOAT16: return "float16";
    case SMPI_BFLOAT16: return "bfloat16";
    case SMPI_FLOAT32: return "float32";
    case SMPI_FLOAT64: return "float64";
    case SMPI_LONGDOUBLE: return "longdouble";
    case SMPI_COMPLEX64: return "complex64";
    case SMPI_COMPLEX128: return "complex128";
    case SMPI_CLONGDOUBLE: return "clongdouble";
    case SMPI_INT16_INT32: return "int16+int32";
    case SMPI_INT32_INT32: return "int32+int32";
    case SMPI_INT64_INT32: return "int64+int32";
    case SMPI_FLOAT32_INT32: return "float32+int32";
    case SMPI_FLOAT64_INT32: return "float64+int32";
    case SMPI_LONGDOUBLE_INT32: return "longdouble+int32";
    case SMPI_TYPE_COUNT: break;
    }
    return "unknown type";
}

const char *smpi_op_name(int op)
{
    switch ((enum smpi_op)op) {
    case SMPI_SUM: return "SUM";
    case SMPI_PROD: return "PROD";
    case SMPI_MAX: return "MAX";
    case SMPI_MIN: return "MIN";
    case SMPI_LAND: return "LAND";
    case SMPI_LOR: return "LOR";
    case SMPI_LXOR: return "LXOR";
    case SMPI_BAND: return "BAND";
    case SMPI_BOR: return "BOR";
    case SMPI_BXOR: return "BXOR";
    case SMPI_MAXLOC: return "MAXLOC";
    case SMPI_MINLOC: return "MINLOC";
    case SMPI_OP_USER: return "a user-defined op";
    case SMPI_OP_COUNT: break;
    }
    return "unknown op";
}

size_t smpi_type_size(int type)
{
    switch ((enum smpi_type)type) {
    case SMPI_BYTE:
    case SMPI_BOOL:
    case SMPI_INT8:
    case SMPI_UINT8: return 1;
    case SMPI_INT16:
    case SMPI_UINT16:
    case SMPI_FLOAT16:
    case SMPI_BFLOAT16: return 2;
    case SMPI_INT32:
    case SMPI_UINT32:
    case SMPI_FLOAT32: return 4;
    case SMPI_INT64:
    case SMPI_UINT64:
    case SMPI_FLOAT64:
    case SMPI_COMPLEX64: return 8;
    case SMPI_COMPLEX128: return 16;
    case SMPI_LONGDOUBLE: return sizeof(long double);
    case SMPI_CLONGDOUBLE: return 2 * sizeof(long double);
    case SMPI_INT16_INT32: return 6;
    case SMPI_INT32_INT32:
    case SMPI_FLOAT32_INT32: return 8;
    case SMPI_INT64_INT32:
    case SMPI_FLOAT64_INT32: return 12;
    case SMPI_LONGDOUBLE_INT32: return sizeof(long double) + 4;
    case SMPI_TYPE_COUNT: break;
    }
    return 0;
}

/* The families of ops, as bits of 1 << op. */
enum {
    ADDING = 1 << SMPI_SUM | 1 << SMPI_PROD,
    ORDERING = 1 << SMPI_MAX | 1 << SMPI_MIN,
    LOGICAL = 1 << SMPI_LAND | 1 << SMPI_LOR | 1 << SMPI_LXOR,
    LOCATING = 1 << SMPI_MAXLOC | 1 << SMPI_MINLOC,
    BITWISE = 1 << SMPI_BAND | 1 << SMPI_BOR | 1 << SMPI_BXOR
};

static int legal_ops(int type)
{
    switch ((enum smpi_type)type) {
    case SMPI_BYTE: return BITWISE;
    case SMPI_BOOL: return LOGICAL;
    case SMPI_INT8:
    case SMPI_INT16:
    case SMPI_INT32:
    case SMPI_INT64:
    case SMPI_UINT8:
    case SMPI_UINT16:
    case SMPI_UINT32:
    case SMPI_UINT64: return ADDING | ORDERING | LOGICAL | BITWISE;
    case SMPI_FLOAT16:
    case SMPI_BFLOAT16:
    case SMPI_FLOAT32:
    case SMPI_FLOAT64:
    case SMPI_LONGDOUBLE: return ADDING | ORDERING;
    case SMPI_COMPLEX64:
    case SMPI_COMPLEX128:
    case SMPI_CLONGDOUBLE: return ADDING;
    case SMPI_INT16_INT32:
    case SMPI_INT32_INT32:
    case SMPI_INT64_INT32:
    case SMPI_FLOAT32_INT32:
    case SMPI_FLOAT64_INT32:
    case SMPI_LONGDOUBLE_INT32: return LOCATING;
    case SMPI_TYPE_COUNT: break;
    }
    return 0;
}

int smpi_op_is_legal(int type, int op)
{
    return op >= 0 && op < SMPI_OP_COUNT && legal_ops(type) >> op & 1;
}
