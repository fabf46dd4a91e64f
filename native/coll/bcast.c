/* bcast.c - Bcast: one source, the same slice to every other rank. */
#include "request.h"
#include "payload.h"

static struct smpi_slice slice_of(const struct smpi_comm *comm, int source, int destination)
{
    const struct smpi_line *line = smpi_line_of(comm, source);
    if (source != line->root || destination == source) {
        return (struct smpi_slice){0};
    }
    return (struct smpi_slice){.src = line->send, .dst = smpi_line_of(comm, destination)->recv, .bytes = line->count};
}

static void fill(struct smpi_request *request, struct smpi_line *line)
{
    struct smpi_comm *comm = request->comm;
    const int is_root = comm->rank == request->root;
    line->count = request->recv_bytes;
    if (smpi_fits_payload(request->recv_bytes)) {
        if (is_root) {
            smpi_put_payload(comm, line, request->recv, request->recv_bytes);
        }
    } else if (is_root) {
        smpi_publish_send(comm, line, request->recv, request->recv_bytes);
    } else {
        smpi_publish_recv(comm, line, request->recv, request->recv_bytes);
    }
}

static int proceed(struct smpi_request *request)
{
    if (!smpi_fits_payload(request->recv_bytes)) {
        return smpi_move(request, slice_of, 1);
    }
    if (request->comm->rank != request->root) {
        smpi_copy(request->recv, smpi_payload_of(request->comm, request->root, request->recv_bytes),
                  request->recv_bytes);
    }
    return SMPI_OK;
}

void smpi_plan_bcast(smpi_request *request, void *buffer, size_t bytes, int root)
{
    request->operator_ = SMPI_BCAST;
    request->fill = fill;
    request->proceed = proceed;
    request->root = root;
    request->recv = buffer;
    request->recv_bytes = request->passed = bytes;
    if (root < 0 || root >= request->comm->size) {
        smpi_plan_mpi(request, SMPI_BCAST, root, SMPI_WHY_LAYOUT); /* MPI names the error */
    }
}

int smpi_bcast(smpi_comm *comm, void *buffer, size_t bytes, int root)
{
    struct smpi_request request = {.comm = comm};
    smpi_plan_bcast(&request, buffer, bytes, root);
    return smpi_request_run(&request);
}
