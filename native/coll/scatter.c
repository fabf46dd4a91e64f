/* scatter.c - Scatter and Scatterv: from the root a slice of its own to every destination. */
#include "../memory/shadow.h"
#include "payload.h"
#include "request.h"
#include "table.h"

static struct smpi_slice slice_of(const struct smpi_comm *comm, int source, int destination)
{
    const struct smpi_line *from = smpi_line_of(comm, source);
    const struct smpi_line *to = smpi_line_of(comm, destination);
    const uint64_t src = from->send + (uint64_t)destination * from->count;
    if (source != from->root || (source == destination && to->recv == src)) {
        return (struct smpi_slice){0};
    }
    return (struct smpi_slice){.src = src, .dst = to->recv, .bytes = from->count};
}

static int is_root(const struct smpi_request *request)
{
    return request->comm->rank == request->root;
}

/* The root's own block in its send buffer. */
static const char *own_of(const struct smpi_request *request)
{
    return (const char *)request->send + (size_t)request->root * request->send_bytes;
}

static int is_in_place(const struct smpi_request *request)
{
    return is_root(request) && request->recv == own_of(request);
}

static void fill(struct smpi_request *request, struct smpi_line *line)
{
    struct smpi_comm *comm = request->comm;
    const size_t total = request->recv_bytes * (size_t)comm->size;
    line->count = request->recv_bytes;
    if (is_root(request)) {
        if (request->send_bytes != request->recv_bytes) {
            line->flags |= SMPI_FLAG_MISFIT;
        }
        smpi_check_alias(line, is_in_place(request) ? NULL : request->send, request->send_bytes * (size_t)comm->size,
                         request->recv, request->recv_bytes);
    }
    if (smpi_fits_payload(total)) {
        if (is_root(request) && request->send_bytes == request->recv_bytes) {
            smpi_put_payload(comm, line, request->send, total);
        }
        return;
    }
    smpi_publish_send(comm, line, request->send, is_root(request) ? request->send_bytes * (size_t)comm->size : 0);
    smpi_publish_recv(comm, line, request->recv, is_in_place(request) ? 0 : request->recv_bytes);
}

static int proceed(struct smpi_request *request)
{
    const struct smpi_comm *comm = request->comm;
    const size_t bytes = request->recv_bytes;
    const size_t total = bytes * (size_t)comm->size;
    if (!smpi_fits_payload(total)) {
        return smpi_move(request, slice_of, 0);
    }
    if (!is_in_place(request)) {
        const char *blocks = smpi_payload_of(comm, request->root, total);
        smpi_copy(request->recv, blocks + (size_t)comm->rank * bytes, bytes);
    }
    return SMPI_OK;
}

void smpi_plan_scatter(smpi_request *request, const void *send, size_t send_bytes, void *recv, size_t recv_bytes,
                       int root)
{
    request->operator_ = SMPI_SCATTER;
    request->fill = fill;
    request->proceed = proceed;
    request->root = root;
    request->send = send;
    request->send_bytes = send_bytes;
    request->recv = recv;
    request->recv_bytes = recv_bytes;
    if (is_root(request)) {
        if (!recv || recv == own_of(request)) {
            request->recv = (char *)(uintptr_t)own_of(request); /* only its address is used */
            request->recv_bytes = send_bytes;
        }
        request->passed = send_bytes * (size_t)request->comm->size;
    }
    if (root < 0 || root >= request->comm->size || !request->recv) {
        smpi_plan_mpi(request, SMPI_SCATTER, root, SMPI_WHY_LAYOUT); /* MPI names the error */
    }
}

int smpi_scatter(smpi_comm *comm, const void *send, size_t send_bytes, void *recv, size_t recv_bytes, int root)
{
    struct smpi_request request = {.comm = comm};
    smpi_plan_scatter(&request, send, send_bytes, recv, recv_bytes, root);
    return smpi_request_run(&request);
}

/* The v-form: what the root sends stands in its table (table.h), what a rank expects in its line. If all that the root sends fits,
 * it is in its slot behind the table, in the order of destinations. */

static struct smpi_slice slice_of_v(const struct smpi_comm *comm, int source, int destination)
{
    const struct smpi_line *from = smpi_line_of(comm, source);
    if (source != from->root) {
        return (struct smpi_slice){0};
    }
    const struct smpi_run run = smpi_table_row(comm, source, destination);
    const uint64_t src = from->send + (uint64_t)run.displ;
    const uint64_t dst = smpi_line_of(comm, destination)->recv;
    return (struct smpi_slice){
        .src = src, .dst = dst, .bytes = source == destination && src == dst ? 0 : (size_t)run.count};
}

static const char *own_of_v(const struct smpi_request *request)
{
    return (const char *)request->send + request->from.displs[request->root];
}

static int is_in_place_v(const struct smpi_request *request)
{
    return is_root(request) && request->recv == own_of_v(request);
}

static void put_payload(struct smpi_comm *comm, struct smpi_pieces pieces)
{
    uint8_t *payload = smpi_next_slot(comm) + smpi_table_bytes(comm);
    for (int i = 0; i < comm->size; i++) {
        smpi_copy(payload, (const char *)pieces.base + pieces.displs[i], (size_t)pieces.counts[i]);
        payload += pieces.counts[i];
    }
}

static void take_payload(const struct smpi_request *request)
{
    const uint8_t *payload = smpi_behind_table(request->comm, request->root);
    for (int i = 0; i < request->comm->rank; i++) {
        payload += smpi_table_row(request->comm, request->root, i).count;
    }
    smpi_copy(request->recv, payload, request->recv_bytes);
}

static void fill_v(struct smpi_request *request, struct smpi_line *line)
{
    struct smpi_comm *comm = request->comm;
    const struct smpi_pieces from = request->from;
    line->bytes = is_root(request) ? request->send_bytes : request->recv_bytes;
    if (is_root(request)) {
        smpi_put_table(comm, from);
        if (request->recv_bytes != (size_t)from.counts[comm->rank]) {
            line->flags |= SMPI_FLAG_MISFIT;
        }
        for (int i = 0; i < comm->size; i++) {
            smpi_check_alias(
                line, is_in_place_v(request) && i == comm->rank ? NULL : (const char *)from.base + from.displs[i],
                (size_t)from.counts[i], request->recv, request->recv_bytes);
        }
        if (request->send_bytes <= smpi_table_room(comm)) {
            put_payload(comm, from);
        } else {
            smpi_publish_send_pieces(comm, line, from);
        }
    }
    smpi_publish_recv(comm, line, request->recv, is_in_place_v(request) ? 0 : request->recv_bytes);
}

static int proceed_v(struct smpi_request *request)
{
    struct smpi_comm *comm = request->comm;
    for (int rank = 0; rank < comm->size; rank++) {
        if (rank != request->root &&
            smpi_line_of(comm, rank)->bytes != (uint64_t)smpi_table_row(comm, request->root, rank).count) {
            return smpi_mismatch(comm, "what a rank expects must be what the root sends to it");
        }
    }
    if (smpi_line_of(comm, request->root)->bytes > smpi_table_room(comm)) {
        return smpi_move(request, slice_of_v, 0);
    }
    if (!is_in_place_v(request)) {
        take_payload(request);
    }
    return SMPI_OK;
}

void smpi_plan_scatterv(smpi_request *request, const void *send, const int64_t *counts, const int64_t *displs,
                        void *recv, size_t recv_bytes, int root)
{
    request->operator_ = SMPI_SCATTERV;
    request->fill = fill_v;
    request->proceed = proceed_v;
    request->root = root;
    request->send = send;
    request->recv = recv;
    request->recv_bytes = recv_bytes;
    if (is_root(request)) {
        request->from = smpi_keep_pieces(request, 0, send, counts, displs);
        request->send_bytes = 0;
        for (int i = 0; i < request->comm->size; i++) {
            request->send_bytes += (size_t)counts[i];
        }
        if (!recv || recv == own_of_v(request)) {
            request->recv = (char *)(uintptr_t)own_of_v(request);
            request->recv_bytes = (size_t)counts[root];
        }
        request->passed = request->send_bytes;
    }
    if (root < 0 || root >= request->comm->size || !request->recv || !smpi_table_fits(request->comm)) {
        smpi_plan_mpi(request, SMPI_SCATTERV, root, SMPI_WHY_LAYOUT);
    }
}

int smpi_scatterv(smpi_comm *comm, const void *send, const int64_t *counts, const int64_t *displs, void *recv,
                  size_t recv_bytes, int root)
{
    struct smpi_request request = {.comm = comm};
    smpi_plan_scatterv(&request, send, counts, displs, recv, recv_bytes, root);
    return smpi_request_run(&request);
}
