/* gather.c - Gather and Gatherv: from every source one slice to the root. */
#include "../memory/shadow.h"
#include "payload.h"
#include "request.h"
#include "table.h"

static struct smpi_slice slice_of(const struct smpi_comm *comm, int source, int destination)
{
    const struct smpi_line *from = smpi_line_of(comm, source);
    if (destination != from->root) {
        return (struct smpi_slice){0};
    }
    const uint64_t dst = smpi_line_of(comm, destination)->recv + (uint64_t)source * from->count;
    return (struct smpi_slice){
        .src = from->send, .dst = dst, .bytes = from->send == dst && source == destination ? 0 : from->count};
}

static int is_root(const struct smpi_request *request)
{
    return request->comm->rank == request->root;
}

/* The root's own block in its receive buffer. */
static char *own_of(const struct smpi_request *request)
{
    return (char *)request->recv + (size_t)request->root * request->recv_bytes;
}

static void fill(struct smpi_request *request, struct smpi_line *line)
{
    struct smpi_comm *comm = request->comm;
    const size_t total = request->recv_bytes * (size_t)comm->size;
    line->count = request->send_bytes;
    if (smpi_fits_payload(request->send_bytes)) {
        smpi_put_payload(comm, line, request->send, request->send_bytes);
    } else {
        smpi_publish_send(comm, line, request->send, request->send_bytes);
        smpi_publish_recv(comm, line, request->recv, is_root(request) ? total : 0);
    }
    if (is_root(request)) {
        if (request->send_bytes != request->recv_bytes) {
            line->flags |= SMPI_FLAG_MISFIT;
        }
        smpi_check_alias(line, request->send == own_of(request) ? NULL : request->send, request->send_bytes,
                         request->recv, total);
    }
}

static int proceed(struct smpi_request *request)
{
    const struct smpi_comm *comm = request->comm;
    const size_t bytes = request->send_bytes;
    if (!smpi_fits_payload(bytes)) {
        return smpi_move(request, slice_of, 1);
    }
    for (int rank = 0; rank < comm->size && is_root(request); rank++) {
        if (rank != comm->rank || request->send != own_of(request)) {
            smpi_copy((char *)request->recv + (size_t)rank * bytes, smpi_payload_of(comm, rank, bytes), bytes);
        }
    }
    return SMPI_OK;
}

void smpi_plan_gather(smpi_request *request, const void *send, size_t send_bytes, void *recv, size_t recv_bytes,
                      int root)
{
    request->operator_ = SMPI_GATHER;
    request->fill = fill;
    request->proceed = proceed;
    request->root = root;
    request->recv = recv;
    request->recv_bytes = recv_bytes;
    request->send = send;
    request->send_bytes = send_bytes;
    if (is_root(request) && (!send || send == own_of(request))) {
        request->send = own_of(request);
        request->send_bytes = recv_bytes;
    }
    request->passed = request->send_bytes;
    if (root < 0 || root >= request->comm->size || !request->send) {
        smpi_plan_mpi(request, SMPI_GATHER, root, SMPI_WHY_LAYOUT); /* MPI names the error */
    }
}

int smpi_gather(smpi_comm *comm, const void *send, size_t send_bytes, void *recv, size_t recv_bytes, int root)
{
    struct smpi_request request = {.comm = comm};
    smpi_plan_gather(&request, send, send_bytes, recv, recv_bytes, root);
    return smpi_request_run(&request);
}

/* The v-form: what the root expects stands in its table (table.h), what a rank sends in its line. If they fit, its bytes are in its
 * slot behind the table's place, and that is where they are taken from, whatever the path. */

static struct smpi_slice slice_of_v(const struct smpi_comm *comm, int source, int destination)
{
    const struct smpi_line *from = smpi_line_of(comm, source);
    if (destination != from->root) {
        return (struct smpi_slice){0};
    }
    const uint64_t dst =
        smpi_line_of(comm, destination)->recv + (uint64_t)smpi_table_row(comm, destination, source).displ;
    if (source == destination && from->send == dst) {
        return (struct smpi_slice){0};
    }
    const uint64_t src = from->bytes <= smpi_table_room(comm)
                             ? smpi_home(comm->world, comm->members[source], smpi_behind_table(comm, source))
                             : from->send;
    return (struct smpi_slice){.src = src, .dst = dst, .bytes = from->bytes};
}

static int all_are_small(const struct smpi_comm *comm)
{
    for (int rank = 0; rank < comm->size; rank++) {
        if (smpi_line_of(comm, rank)->bytes > smpi_table_room(comm)) {
            return 0;
        }
    }
    return 1;
}

static char *own_of_v(const struct smpi_request *request)
{
    return (char *)request->recv + request->to.displs[request->root];
}

static void fill_v(struct smpi_request *request, struct smpi_line *line)
{
    struct smpi_comm *comm = request->comm;
    line->bytes = request->send_bytes;
    line->send = (uint64_t)(uintptr_t)request->send;
    if (request->send_bytes <= smpi_table_room(comm)) {
        smpi_copy(smpi_next_slot(comm) + smpi_table_bytes(comm), request->send, request->send_bytes);
    } else {
        smpi_publish_send(comm, line, request->send, request->send_bytes);
    }
    if (is_root(request)) {
        smpi_put_table(comm, request->to);
        smpi_publish_recv_pieces(comm, line, request->to);
        const int in_place = request->send == own_of_v(request);
        for (int i = 0; i < comm->size; i++) {
            smpi_check_alias(line, in_place && i == comm->rank ? NULL : request->send, request->send_bytes,
                             (char *)request->recv + request->to.displs[i], (size_t)request->to.counts[i]);
        }
    }
}

static int proceed_v(struct smpi_request *request)
{
    struct smpi_comm *comm = request->comm;
    for (int rank = 0; rank < comm->size; rank++) {
        if (smpi_line_of(comm, rank)->bytes != (uint64_t)smpi_table_row(comm, request->root, rank).count) {
            return smpi_mismatch(comm, "what a rank sends must be what the root expects from it");
        }
    }
    if (!all_are_small(comm)) {
        return smpi_move(request, slice_of_v, 1);
    }
    for (int rank = 0; rank < comm->size && is_root(request); rank++) {
        if (rank != comm->rank || request->send != own_of_v(request)) {
            smpi_copy((char *)request->recv + request->to.displs[rank], smpi_behind_table(comm, rank),
                      (size_t)request->to.counts[rank]);
        }
    }
    return SMPI_OK;
}

void smpi_plan_gatherv(smpi_request *request, const void *send, size_t send_bytes, void *recv, const int64_t *counts,
                       const int64_t *displs, int root)
{
    request->operator_ = SMPI_GATHERV;
    request->fill = fill_v;
    request->proceed = proceed_v;
    request->root = root;
    request->recv = recv;
    request->send = send;
    request->send_bytes = send_bytes;
    if (is_root(request)) {
        request->to = smpi_keep_pieces(request, 0, recv, counts, displs);
        if (!send || send == own_of_v(request)) {
            request->send = own_of_v(request);
            request->send_bytes = (size_t)counts[root];
        }
    }
    request->passed = request->send_bytes;
    if (root < 0 || root >= request->comm->size || !request->send || !smpi_table_fits(request->comm)) {
        smpi_plan_mpi(request, SMPI_GATHERV, root, SMPI_WHY_LAYOUT);
    }
}

int smpi_gatherv(smpi_comm *comm, const void *send, size_t send_bytes, void *recv, const int64_t *counts,
                 const int64_t *displs, int root)
{
    struct smpi_request request = {.comm = comm};
    smpi_plan_gatherv(&request, send, send_bytes, recv, counts, displs, root);
    return smpi_request_run(&request);
}
