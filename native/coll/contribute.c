/* contribute.c - reductions by an op that only the caller can apply: every contribution as it is to every rank that combines. */
#include "payload.h"
#include "request.h"

static int receives(const struct smpi_request *request)
{
    return request->recv != NULL;
}

static struct smpi_slice slice_of(const struct smpi_comm *comm, int source, int destination)
{
    const struct smpi_line *from = smpi_line_of(comm, source);
    const uint64_t recv = smpi_line_of(comm, destination)->recv;
    return (struct smpi_slice){
        .src = from->send, .dst = recv + (uint64_t)source * from->count, .bytes = recv ? from->count : 0};
}

static void fill(struct smpi_request *request, struct smpi_line *line)
{
    line->op = SMPI_OP_USER;
    line->count = request->send_bytes;
    if (smpi_fits_payload(request->send_bytes)) {
        smpi_put_payload(request->comm, line, request->send, request->send_bytes);
        return;
    }
    smpi_publish_send(request->comm, line, request->send, request->send_bytes);
    const size_t total = request->send_bytes * (size_t)request->comm->size;
    smpi_publish_recv(request->comm, line, request->recv, receives(request) ? total : 0);
}

static int proceed(struct smpi_request *request)
{
    const size_t bytes = request->send_bytes;
    if (!smpi_fits_payload(bytes)) {
        return smpi_move(request, slice_of, 1);
    }
    for (int rank = 0; rank < request->comm->size && receives(request); rank++) {
        smpi_copy((char *)request->recv + (size_t)rank * bytes, smpi_payload_of(request->comm, rank, bytes), bytes);
    }
    return SMPI_OK;
}

int smpi_contribute(smpi_comm *comm, int operator_, int root, const void *send, size_t bytes, void *contributions)
{
    if (root < 0 || root >= comm->size) {
        return smpi_needs_mpi(comm, operator_, root, SMPI_WHY_LAYOUT); /* MPI names the error */
    }
    struct smpi_request request = {.comm = comm,
                                   .operator_ = operator_,
                                   .root = root,
                                   .fill = fill,
                                   .proceed = proceed,
                                   .send = send,
                                   .recv = contributions,
                                   .send_bytes = bytes,
                                   .passed = bytes};
    return smpi_request_run(&request);
}
