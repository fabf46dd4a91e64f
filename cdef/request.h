/* request.h - operators that are planned first and run later, once or many times: nonblocking and persistent ones.
 *
 *     smpi_request *request = smpi_request_new(comm);   a communicator of its own for such operators: see below
 *     smpi_plan_allreduce(request, …);        notes the arguments
 *     smpi_request_start(request);                 never waits
 *     while (smpi_request_test(request) == SMPI_AGAIN) …   or smpi_request_wait(request)
 *     smpi_request_free(request);
 *
 * Preconditions: on one communicator operators run one after the other, started in the same order on all ranks: the next is started
 * when test or wait has returned the result of the one before. Arguments are those of coll.h; buffers are read from start on and
 * stay the caller's; counts and displacements are copied by plan. One thread at a time per communicator. */

typedef struct smpi_request smpi_request;

smpi_request *smpi_request_new(smpi_comm *comm); /* NULL: no memory */
void smpi_request_free(smpi_request *request);        /* not between start and the result */

void smpi_plan_mpi(smpi_request *request, int operator_, int root, int why); /* as smpi_needs_mpi */
void smpi_plan_barrier(smpi_request *request);
void smpi_plan_bcast(smpi_request *request, void *buffer, size_t bytes, int root);
void smpi_plan_reduce(smpi_request *request, const void *send, void *recv, size_t count, int type, int op, int root);
void smpi_plan_allreduce(smpi_request *request, const void *send, void *recv, size_t count, int type, int op);
void smpi_plan_allgather(smpi_request *request, const void *send, size_t send_bytes, void *recv, size_t recv_bytes);
void smpi_plan_allgatherv(smpi_request *request, const void *send, size_t send_bytes, void *recv, const int64_t *counts,
                          const int64_t *displs);
void smpi_plan_alltoall(smpi_request *request, const void *send, size_t send_bytes, void *recv, size_t recv_bytes);
void smpi_plan_alltoallv(smpi_request *request, const void *send, const int64_t *send_counts, const int64_t *send_displs,
                         void *recv, const int64_t *recv_counts, const int64_t *recv_displs);
/* The arrays of layouts are the caller's and must live as long as the request. */
void smpi_plan_alltoallw(smpi_request *request, const void *send, const int64_t *send_counts, const int64_t *send_displs,
                         const smpi_layout *const *send_layouts, void *recv, const int64_t *recv_counts,
                         const int64_t *recv_displs, const smpi_layout *const *recv_layouts);
void smpi_plan_gather(smpi_request *request, const void *send, size_t send_bytes, void *recv, size_t recv_bytes, int root);
void smpi_plan_gatherv(smpi_request *request, const void *send, size_t send_bytes, void *recv, const int64_t *counts,
                       const int64_t *displs, int root);
void smpi_plan_scatter(smpi_request *request, const void *send, size_t send_bytes, void *recv, size_t recv_bytes, int root);
void smpi_plan_scatterv(smpi_request *request, const void *send, const int64_t *counts, const int64_t *displs, void *recv,
                        size_t recv_bytes, int root);
void smpi_plan_reduce_scatter_block(smpi_request *request, const void *send, void *recv, size_t count, int type, int op);
void smpi_plan_reduce_scatter(smpi_request *request, const void *send, size_t count, void *recv, size_t recv_count,
                              const int64_t *counts, int type, int op);
void smpi_plan_scan(smpi_request *request, const void *send, void *recv, size_t count, int type, int op);
void smpi_plan_exscan(smpi_request *request, const void *send, void *recv, size_t count, int type, int op);

/* After one of the above: parts that are packed at each start, and parts that are unpacked when the operator has gone well. The
 * arrays are the caller's and must live as long as the request. NULL, 0: none. */
void smpi_plan_parts(smpi_request *request, const struct smpi_part *packs, size_t pack_count, const struct smpi_part *unpacks,
                     size_t unpack_count);

/* start: SMPI_OK, or SMPI_ERR_REVOKED. test: SMPI_AGAIN while it is under way, then the operator's result, again and again; does
 * what this rank can do without waiting. wait: the same after up to `us` microseconds (without limit where negative), in
 * which it spins, then sleeps; the wait hook is not called. */
int smpi_request_start(smpi_request *request);
int smpi_request_test(smpi_request *request);
uint64_t smpi_request_steps(const smpi_request *request); /* counts what test and wait have done, to see whether something moves */
int smpi_request_wait(smpi_request *request, int64_t us);
