/* coll.h - communicators and their collective operators on the native path.
 *
 * Preconditions of every operator: the communicator is open; all its ranks call the same operators in the same order, one at
 * a time per communicator (different communicators may be used by different threads). Buffers: `send` is only read; counts of
 * reductions are elements, all other lengths are bytes; a NULL send means MPI.IN_PLACE where MPI allows it; recv of ranks where it
 * is not significant is ignored. Blocking until the operator is complete on this rank.
 *
 * Every operator returns SMPI_OK; SMPI_MPI when all ranks agreed that MPI does it (nothing was written); SMPI_ERR_MISMATCH or
 * SMPI_ERR_ALIAS on all ranks when arguments do not fit (nothing was written, communicator usable); SMPI_ERR_INTERRUPTED or
 * SMPI_ERR_REVOKED. */

typedef struct smpi_comm smpi_comm;

enum smpi_operator {
    SMPI_BARRIER, SMPI_BCAST, SMPI_REDUCE, SMPI_ALLREDUCE, SMPI_ALLGATHER, SMPI_ALLGATHERV, SMPI_ALLTOALL, SMPI_ALLTOALLV,
    SMPI_ALLTOALLW,
    SMPI_GATHER, SMPI_GATHERV, SMPI_SCATTER, SMPI_SCATTERV, SMPI_REDUCE_SCATTER_BLOCK, SMPI_REDUCE_SCATTER, SMPI_SCAN,
    SMPI_EXSCAN,
    SMPI_OPERATOR_COUNT
};

/* How an operator's bytes travel. inline: in the entry line or the slot behind it; direct: user memory to user memory; staged:
 * through the heap in chunks where a rank's memory is not registered; mpi: by the MPI library. */
enum smpi_path { SMPI_PATH_INLINE, SMPI_PATH_DIRECT, SMPI_PATH_STAGED, SMPI_PATH_MPI, SMPI_PATH_COUNT };

/* Why a rank asked for the path mpi. Published in its entry line. */
enum smpi_why {
    SMPI_WHY_NOT,        /* it did not ask */
    SMPI_WHY_DATATYPE,   /* a datatype the native path does not decode */
    SMPI_WHY_OP,         /* a user-defined op, or an op that MPI does not define for this type */
    SMPI_WHY_DEVICE,     /* not in host memory */
    SMPI_WHY_LAYOUT,     /* displacements or counts that the native path does not take */
    SMPI_WHY_MEMORY,     /* no heap memory left for staging */
    SMPI_WHY_COUNT
};

/* Basic element types of reductions. */
enum smpi_type {
    SMPI_BYTE, SMPI_BOOL,
    SMPI_INT8, SMPI_INT16, SMPI_INT32, SMPI_INT64, SMPI_UINT8, SMPI_UINT16, SMPI_UINT32, SMPI_UINT64,
    SMPI_FLOAT16, SMPI_BFLOAT16, SMPI_FLOAT32, SMPI_FLOAT64, SMPI_LONGDOUBLE,
    SMPI_COMPLEX64, SMPI_COMPLEX128, SMPI_CLONGDOUBLE,
    /* a value and where it is, an int; without the gap that the C struct has in some */
    SMPI_INT16_INT32, SMPI_INT32_INT32, SMPI_INT64_INT32, SMPI_FLOAT32_INT32, SMPI_FLOAT64_INT32, SMPI_LONGDOUBLE_INT32,
    SMPI_TYPE_COUNT
};

/* Reduction ops, combined in rank order: ((x0 op x1) op x2) … */
enum smpi_op {
    SMPI_SUM, SMPI_PROD, SMPI_MAX, SMPI_MIN, SMPI_LAND, SMPI_LOR, SMPI_LXOR, SMPI_BAND, SMPI_BOR, SMPI_BXOR,
    SMPI_MAXLOC, SMPI_MINLOC,
    SMPI_OP_COUNT,
    SMPI_OP_USER /* only the caller knows it: smpi_contribute */
};

const char *smpi_operator_name(int op);
const char *smpi_path_name(int path);
const char *smpi_why_name(int why);
const char *smpi_type_name(int type);
const char *smpi_op_name(int op);
size_t smpi_type_size(int type);              /* bytes of one element; 0 when out of range */
int smpi_op_is_legal(int type, int op);       /* 1 where the MPI standard (5.1, section 6.9.2) defines op for type */
const char *smpi_kernels_name(void);          /* the table of kernels in use: "base", "avx2", "avx512" */

/* Two steps, so that the ranks can exchange gates in between. new: allocates this rank's gate in its heap; NULL without memory.
 * gate: the gate's address as this rank sees it. open: members[i] is the supernode rank of communicator rank i and gates[i] what
 * its smpi_comm_gate said; after it operators may be called as soon as this rank likes. close: never waits; this rank's gate
 * is reused once all peers have closed too. Afterwards the pointer may only be asked whether it is closed, and be deleted; the
 * short way of array.h asks for itself. delete: of one that is closed. */
smpi_comm *smpi_comm_new(smpi_world *world, int rank, int size);
uint64_t smpi_comm_gate(const smpi_comm *comm);
int smpi_comm_open(smpi_comm *comm, const int32_t *members, const uint64_t *gates);
void smpi_comm_close(smpi_comm *comm);
int smpi_comm_is_closed(const smpi_comm *comm);
void smpi_comm_delete(smpi_comm *comm);

/* This rank cannot do the operator natively, for the reason why: enters so that all ranks agree on the path mpi. root: the
 * operator's, 0 where it has none. SMPI_MPI, or an error as above. */
int smpi_needs_mpi(smpi_comm *comm, int operator_, int root, int why);

int smpi_barrier(smpi_comm *comm);
int smpi_bcast(smpi_comm *comm, void *buffer, size_t bytes, int root);
int smpi_reduce(smpi_comm *comm, const void *send, void *recv, size_t count, int type, int op, int root);
int smpi_allreduce(smpi_comm *comm, const void *send, void *recv, size_t count, int type, int op);
/* A reduction whose op the caller applies: everybody's `bytes` bytes, in rank order, to contributions on the ranks that combine;
 * NULL on the others. operator_ and root as the caller's operator has them; all lengths are the same. */
int smpi_contribute(smpi_comm *comm, int operator_, int root, const void *send, size_t bytes, void *contributions);
/* send_bytes: this rank's block; recv holds size blocks of recv_bytes. send NULL: this rank's block is already in recv. */
int smpi_allgather(smpi_comm *comm, const void *send, size_t send_bytes, void *recv, size_t recv_bytes);
/* Rank i's block goes to recv + displs[i] and has counts[i] bytes. */
int smpi_allgatherv(smpi_comm *comm, const void *send, size_t send_bytes, void *recv, const int64_t *counts, const int64_t *displs);
int smpi_alltoall(smpi_comm *comm, const void *send, size_t send_bytes, void *recv, size_t recv_bytes); /* bytes of one block */
int smpi_alltoallv(smpi_comm *comm, const void *send, const int64_t *send_counts, const int64_t *send_displs, void *recv,
                   const int64_t *recv_counts, const int64_t *recv_displs);
/* As smpi_alltoallv, but a block's bytes lie as its layout says; counts are without gaps. An entry of NULL: no gaps. */
int smpi_alltoallw(smpi_comm *comm, const void *send, const int64_t *send_counts, const int64_t *send_displs,
                   const smpi_layout *const *send_layouts, void *recv, const int64_t *recv_counts, const int64_t *recv_displs,
                   const smpi_layout *const *recv_layouts);

/* The root's recv holds size blocks of recv_bytes; send NULL, at the root only: its block is already there. v: rank i's block goes
 * to the root's recv + displs[i] and has counts[i] bytes. */
int smpi_gather(smpi_comm *comm, const void *send, size_t send_bytes, void *recv, size_t recv_bytes, int root);
int smpi_gatherv(smpi_comm *comm, const void *send, size_t send_bytes, void *recv, const int64_t *counts, const int64_t *displs,
                 int root);
/* The other way round; recv NULL, at the root only: its block stays where it is. */
int smpi_scatter(smpi_comm *comm, const void *send, size_t send_bytes, void *recv, size_t recv_bytes, int root);
int smpi_scatterv(smpi_comm *comm, const void *send, const int64_t *counts, const int64_t *displs, void *recv, size_t recv_bytes,
                  int root);

/* count: elements of one rank's result; all ranks bring size times as many. send NULL: they lie in recv, and the result goes to its
 * start. */
int smpi_reduce_scatter_block(smpi_comm *comm, const void *send, void *recv, size_t count, int type, int op);
/* Rank i's result has counts[i] elements; count: all together. counts NULL on some ranks: they learn it from the others. */
int smpi_reduce_scatter(smpi_comm *comm, const void *send, size_t count, void *recv, size_t recv_count, const int64_t *counts,
                        int type, int op);
/* The reduction over the ranks up to this one, exscan: before this one, which leaves rank 0's recv alone. send NULL: what this rank
 * brings lies in recv, also on rank 0. */
int smpi_scan(smpi_comm *comm, const void *send, void *recv, size_t count, int type, int op);
int smpi_exscan(smpi_comm *comm, const void *send, void *recv, size_t count, int type, int op);

/* Counters of this process, all communicators together: calls[operator * SMPI_PATH_COUNT + path], why[reason] as asked by this
 * rank, bytes[path]: user bytes this rank passed in. */
void smpi_stats(const smpi_world *world, uint64_t *calls, uint64_t *bytes, uint64_t *why);
