/* reduce.c - Reduce and Allreduce: small ones from everybody's payload, each rank for itself; large ones by parts (combine.h).
 *
 * Both combine in rank order, so every rank that computes a result computes the same bits. */
#include "../engine/kernels.h"
#include "request.h"
#include "payload.h"

static int receives(const struct smpi_request *request)
{
    return request->operator_ == SMPI_ALLREDUCE || request->comm->rank == request->root;
}

static size_t bytes_of(const struct smpi_request *request)
{
    return request->count * smpi_type_size(request->type);
}

static void fill(struct smpi_request *request, struct smpi_line *line)
{
    const size_t bytes = bytes_of(request);
    const void *source = request->send ? request->send : request->recv;
    line->type = (uint8_t)request->type;
    line->op = (uint8_t)request->op;
    line->count = request->count;
    if (smpi_fits_payload(bytes)) {
        smpi_put_payload(request->comm, line, source, bytes);
    } else {
        smpi_publish_send(request->comm, line, source, bytes);
        smpi_publish_recv(request->comm, line, request->recv, receives(request) ? bytes : 0);
        smpi_publish_stage(request->comm, line); /* this rank's part may go to somebody's unregistered memory */
    }
    if (receives(request)) {
        smpi_check_alias(line, request->send, bytes, request->recv, bytes);
    }
}

static int proceed(struct smpi_request *request)
{
    const struct smpi_comm *comm = request->comm;
    const size_t bytes = bytes_of(request);
    if (!smpi_fits_payload(bytes)) {
        return smpi_combine(request, request->operator_ == SMPI_ALLREDUCE);
    }
    if (receives(request) && request->count) {
        const void **sources = (const void **)comm->pointers;
        for (int rank = 0; rank < comm->size; rank++) {
            sources[rank] = smpi_payload_of(comm, rank, bytes);
        }
        smpi_kernels()->reduce[request->type][request->op](request->recv, sources, comm->size, request->count);
    }
    return SMPI_OK;
}

static void plan(smpi_request *request, int operator_, const void *send, void *recv, size_t count, int type, int op,
                 int root)
{
    request->operator_ = operator_;
    request->fill = fill;
    request->proceed = proceed;
    request->root = root;
    request->send = send;
    request->recv = recv;
    request->count = count;
    request->type = type;
    request->op = op;
    request->passed = bytes_of(request);
    if (!smpi_op_is_legal(type, op)) {
        smpi_plan_mpi(request, operator_, root, SMPI_WHY_OP);
    }
}

void smpi_plan_reduce(smpi_request *request, const void *send, void *recv, size_t count, int type, int op, int root)
{
    plan(request, SMPI_REDUCE, send, recv, count, type, op, root);
    if (root < 0 || root >= request->comm->size || (!send && request->comm->rank != root)) {
        smpi_plan_mpi(request, SMPI_REDUCE, root, SMPI_WHY_LAYOUT); /* MPI names the error */
    }
}

void smpi_plan_allreduce(smpi_request *request, const void *send, void *recv, size_t count, int type, int op)
{
    plan(request, SMPI_ALLREDUCE, send, recv, count, type, op, 0);
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
