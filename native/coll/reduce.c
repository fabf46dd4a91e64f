/* reduce.c - Reduce, Allreduce, Reduce_scatter, Scan and their kin: small ones from everybody's payload, each rank for itself;
 * large ones by parts (combine.h).
 *
 * All combine in rank order, so every rank that computes a result computes the same bits. What an operator is, is which ranks'
 * elements go into which rank's result (result_of). */
#include "../engine/kernels.h"
#include "payload.h"
#include "request.h"

/* Elements of a rank's result of Reduce_scatter, as it said itself. */
static size_t own_count(const struct smpi_comm *comm, int rank)
{
    return smpi_line_of(comm, rank)->bytes;
}

static struct smpi_result result_of(const struct smpi_request *request, int rank)
{
    const int size = request->comm->size;
    const size_t count = request->count; /* of all that is combined */
    switch (request->operator_) {
    case SMPI_REDUCE: return (struct smpi_result){size, 0, rank == request->root ? count : 0};
    case SMPI_REDUCE_SCATTER_BLOCK:
        return (struct smpi_result){size, count / (size_t)size * (size_t)rank, count / (size_t)size};
    case SMPI_REDUCE_SCATTER: {
        struct smpi_result result = {size, 0, own_count(request->comm, rank)};
        for (int i = 0; i < rank; i++) {
            result.from += own_count(request->comm, i);
        }
        return result;
    }
    case SMPI_SCAN: return (struct smpi_result){rank + 1, 0, count};
    case SMPI_EXSCAN: return (struct smpi_result){rank, 0, rank ? count : 0};
    default: return (struct smpi_result){size, 0, count}; /* SMPI_ALLREDUCE */
    }
}

static size_t bytes_of(const struct smpi_request *request)
{
    return request->count * smpi_type_size(request->type);
}

/* In place, and the result goes elsewhere than where it is made from. */
static int overwrites(const struct smpi_request *request)
{
    const int scatters = request->operator_ == SMPI_REDUCE_SCATTER_BLOCK || request->operator_ == SMPI_REDUCE_SCATTER;
    return scatters && !request->send && request->comm->rank > 0;
}

static void fill(struct smpi_request *request, struct smpi_line *line)
{
    struct smpi_comm *comm = request->comm;
    const size_t bytes = bytes_of(request);
    const void *source = request->send ? request->send : request->recv;
    line->type = (uint8_t)request->type;
    line->op = (uint8_t)request->op;
    line->count = request->count;
    if (!smpi_fits_payload(bytes)) {
        smpi_publish_send(comm, line, source, bytes);
        smpi_publish_recv(comm, line, request->recv, request->recv_bytes);
        smpi_publish_stage(comm, line); /* this rank's part may go to somebody's unregistered memory */
        if (overwrites(request)) {
            line->flags &= (uint8_t)~SMPI_FLAG_RECV_REGISTERED; /* combine.h */
        }
    } else if (request->operator_ == SMPI_REDUCE_SCATTER) {
        smpi_copy(smpi_next_slot(comm), source, bytes);
    } else {
        smpi_put_payload(comm, line, source, bytes);
    }
    if (request->operator_ == SMPI_REDUCE_SCATTER) {
        line->bytes = request->recv_bytes / smpi_type_size(request->type);
        line->digest = request->digest;
    }
    smpi_check_alias(line, request->send, bytes, request->recv, request->recv_bytes);
}

/* What the ranks say of themselves makes up the whole, and is what those with a table of counts were told. */
static int counts_agree(const struct smpi_comm *comm)
{
    uint64_t total = 0;
    for (int rank = 0; rank < comm->size; rank++) {
        comm->runs[rank] = (int64_t)own_count(comm, rank);
        total += own_count(comm, rank);
    }
    const uint64_t digest = smpi_digest_of(comm->runs, comm->size);
    int agree = total == smpi_line_of(comm, comm->rank)->count;
    for (int rank = 0; rank < comm->size; rank++) {
        const uint64_t told = smpi_line_of(comm, rank)->digest;
        agree &= !told || told == digest;
    }
    return agree;
}

static int proceed(struct smpi_request *request)
{
    struct smpi_comm *comm = request->comm;
    const size_t bytes = bytes_of(request);
    const int scatters = request->operator_ == SMPI_REDUCE_SCATTER;
    if (scatters && !counts_agree(comm)) {
        return smpi_mismatch(comm,
                             "all ranks must bring as many elements as all their results have, by the same counts");
    }
    if (!smpi_fits_payload(bytes)) {
        return smpi_combine(request, result_of);
    }
    const struct smpi_result mine = result_of(request, comm->rank);
    if (mine.count) {
        const void **sources = (const void **)comm->pointers;
        for (int rank = 0; rank < mine.sources; rank++) {
            const char *payload =
                scatters ? (const void *)smpi_slot_of(comm, rank) : smpi_payload_of(comm, rank, bytes);
            sources[rank] = payload + mine.from * smpi_type_size(request->type);
        }
        smpi_kernels()->reduce[request->type][request->op](request->recv, sources, mine.sources, mine.count);
    }
    return SMPI_OK;
}

/* count: elements that a rank brings; recv_count: of its result. */
static void plan(smpi_request *request, int operator_, const void *send, size_t count, void *recv, size_t recv_count,
                 int type, int op)
{
    request->operator_ = operator_;
    request->fill = fill;
    request->proceed = proceed;
    request->send = send;
    request->recv = recv;
    request->count = count;
    request->recv_bytes = recv_count * smpi_type_size(type);
    request->type = type;
    request->op = op;
    request->passed = bytes_of(request);
    if (!smpi_op_is_legal(type, op)) {
        smpi_plan_mpi(request, operator_, request->root, SMPI_WHY_OP);
    }
}

void smpi_plan_reduce(smpi_request *request, const void *send, void *recv, size_t count, int type, int op, int root)
{
    const int is_root = request->comm->rank == root;
    request->root = root;
    plan(request, SMPI_REDUCE, send, count, recv, is_root ? count : 0, type, op);
    if (root < 0 || root >= request->comm->size || (!send && !is_root)) {
        smpi_plan_mpi(request, SMPI_REDUCE, root, SMPI_WHY_LAYOUT); /* MPI names the error */
    }
}

void smpi_plan_allreduce(smpi_request *request, const void *send, void *recv, size_t count, int type, int op)
{
    plan(request, SMPI_ALLREDUCE, send, count, recv, count, type, op);
}

void smpi_plan_reduce_scatter_block(smpi_request *request, const void *send, void *recv, size_t count, int type, int op)
{
    plan(request, SMPI_REDUCE_SCATTER_BLOCK, send, count * (size_t)request->comm->size, recv, count, type, op);
}

void smpi_plan_reduce_scatter(smpi_request *request, const void *send, size_t count, void *recv, size_t recv_count,
                              const int64_t *counts, int type, int op)
{
    request->digest = counts ? smpi_digest_of(counts, request->comm->size) : 0;
    plan(request, SMPI_REDUCE_SCATTER, send, count, recv, recv_count, type, op);
}

static void plan_prefix(smpi_request *request, int operator_, const void *send, void *recv, size_t count,
                        size_t recv_count, int type, int op)
{
    plan(request, operator_, send, count, recv, recv_count, type, op);
    if ((size_t)request->comm->size * SMPI_LINE > request->comm->world->stage_chunk) {
        smpi_plan_mpi(request, operator_, 0, SMPI_WHY_LAYOUT); /* no room for every rank's result in a round */
    }
}

void smpi_plan_scan(smpi_request *request, const void *send, void *recv, size_t count, int type, int op)
{
    plan_prefix(request, SMPI_SCAN, send, recv, count, count, type, op);
}

void smpi_plan_exscan(smpi_request *request, const void *send, void *recv, size_t count, int type, int op)
{
    plan_prefix(request, SMPI_EXSCAN, send, recv, count, request->comm->rank ? count : 0, type, op);
}

int smpi_reduce(smpi_comm *comm, const void *send, void *recv, size_t count, int type, int op, int root)
{
    struct smpi_request request = {.comm = comm};
    smpi_plan_reduce(&request, send, recv, count, type, op, root);
    return smpi_request_run(&request);
}

int smpi_allreduce(smpi_comm *comm, const void *send, void *recv, size_t count, int type, int op)
{
    struct smpi_request request = {.comm = comm};
    smpi_plan_allreduce(&request, send, recv, count, type, op);
    return smpi_request_run(&request);
}

int smpi_reduce_scatter_block(smpi_comm *comm, const void *send, void *recv, size_t count, int type, int op)
{
    struct smpi_request request = {.comm = comm};
    smpi_plan_reduce_scatter_block(&request, send, recv, count, type, op);
    return smpi_request_run(&request);
}

int smpi_reduce_scatter(smpi_comm *comm, const void *send, size_t count, void *recv, size_t recv_count,
                        const int64_t *counts, int type, int op)
{
    struct smpi_request request = {.comm = comm};
    smpi_plan_reduce_scatter(&request, send, count, recv, recv_count, counts, type, op);
    return smpi_request_run(&request);
}

int smpi_scan(smpi_comm *comm, const void *send, void *recv, size_t count, int type, int op)
{
    struct smpi_request request = {.comm = comm};
    smpi_plan_scan(&request, send, recv, count, type, op);
    return smpi_request_run(&request);
}

int smpi_exscan(smpi_comm *comm, const void *send, void *recv, size_t count, int type, int op)
{
    struct smpi_request request = {.comm = comm};
    smpi_plan_exscan(&request, send, recv, count, type, op);
    return smpi_request_run(&request);
}
