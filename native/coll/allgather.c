/* allgather.c - Allgather and Allgatherv: from every source the same slice to every destination. */
#include "request.h"
#include "payload.h"

static struct smpi_slice slice_of(const struct smpi_comm *comm, int source, int destination)
{
    const struct smpi_line *from = smpi_line_of(comm, source);
    const uint64_t dst = smpi_line_of(comm, destination)->recv + (uint64_t)source * from->count;
    return (struct smpi_slice){
        .src = from->send, .dst = dst, .bytes = from->send == dst && source == destination ? 0 : from->count};
}

/* This rank's own block in its receive buffer. */
static char *own_of(const struct smpi_request *request)
{
    return (char *)request->recv + (size_t)request->comm->rank * request->recv_bytes;
}

static void fill(struct smpi_request *request, struct smpi_line *line)
{
    const size_t total = request->recv_bytes * (size_t)request->comm->size;
    line->count = request->send_bytes;
    if (request->send_bytes != request->recv_bytes) {
        line->flags |= SMPI_FLAG_MISFIT;
    }
    if (smpi_fits_payload(request->send_bytes)) {
        smpi_put_payload(request->comm, line, request->send, request->send_bytes);
    } else {
        smpi_publish_send(request->comm, line, request->send, request->send_bytes);
        smpi_publish_recv(request->comm, line, request->recv, total);
    }
    smpi_check_alias(line, request->send == own_of(request) ? NULL : request->send, request->send_bytes, request->recv,
                     total);
}

static int proceed(struct smpi_request *request)
{
    const struct smpi_comm *comm = request->comm;
    const size_t bytes = request->recv_bytes;
    if (!smpi_fits_payload(bytes)) {
        return smpi_move(request, slice_of, 1);
    }
    for (int rank = 0; rank < comm->size; rank++) {
        if (rank != comm->rank || request->send != own_of(request)) {
            smpi_copy((char *)request->recv + (size_t)rank * bytes, smpi_payload_of(comm, rank, bytes), bytes);
        }
    }
    return SMPI_OK;
}

void smpi_plan_allgather(smpi_request *request, const void *send, size_t send_bytes, void *recv, size_t recv_bytes)
{
    request->operator_ = SMPI_ALLGATHER;
    request->fill = fill;
    request->proceed = proceed;
    request->recv = recv;
    request->recv_bytes = recv_bytes;
    request->send = send ? send : own_of(request);
    request->send_bytes = send ? send_bytes : recv_bytes;
    request->passed = request->send_bytes;
}

int smpi_allgather(smpi_comm *comm, const void *send, size_t send_bytes, void *recv, size_t recv_bytes)
{
    struct smpi_request request = {.comm = comm};
    smpi_plan_allgather(&request, send, send_bytes, recv, recv_bytes);
    return smpi_request_run(&request);
}

/* The v-form: all ranks know the same counts (compared by digest); where blocks go is each rank's own affair and stands in its
 * slot. */

static struct smpi_slice slice_of_v(const struct smpi_comm *comm, int source, int destination)
{
    const struct smpi_line *from = smpi_line_of(comm, source);
    int64_t displacement;
    memcpy(&displacement, smpi_slot_of(comm, destination) + (size_t)source * sizeof displacement, sizeof displacement);
    const uint64_t dst = smpi_line_of(comm, destination)->recv + (uint64_t)displacement;
    return (struct smpi_slice){
        .src = from->send, .dst = dst, .bytes = from->send == dst && source == destination ? 0 : from->bytes};
}

static int counts_agree(const struct smpi_comm *comm, const int64_t *counts)
{
    const uint64_t digest = smpi_line_of(comm, comm->rank)->digest;
    for (int rank = 0; rank < comm->size; rank++) {
        const struct smpi_line *line = smpi_line_of(comm, rank);
        if (line->digest != digest || line->bytes != (uint64_t)counts[rank]) {
            return 0;
        }
    }
    return 1;
}

static size_t longest_of(const struct smpi_request *request)
{
    int64_t longest = 0;
    for (int i = 0; i < request->comm->size; i++) {
        longest = request->to.counts[i] > longest ? request->to.counts[i] : longest;
    }
    return (size_t)longest;
}

static char *own_of_v(const struct smpi_request *request)
{
    return (char *)request->recv + request->to.displs[request->comm->rank];
}

static void fill_v(struct smpi_request *request, struct smpi_line *line)
{
    struct smpi_comm *comm = request->comm;
    const int in_place = request->send == own_of_v(request);
    for (int i = 0; i < comm->size; i++) {
        smpi_check_alias(line, in_place && i == comm->rank ? NULL : request->send, request->send_bytes,
                         (char *)request->recv + request->to.displs[i], (size_t)request->to.counts[i]);
    }
    line->bytes = request->send_bytes;
    line->digest = smpi_digest_of(request->to.counts, comm->size);
    /* A rank whose own counts do not fit still enters: everybody will see it. */
    if (!smpi_fits_payload(longest_of(request))) {
        memcpy(smpi_next_slot(comm), request->to.displs, (size_t)comm->size * sizeof *request->to.displs);
        smpi_publish_send(comm, line, request->send, request->send_bytes);
        smpi_publish_recv_pieces(comm, line, request->to);
    } else if (request->send_bytes <= longest_of(request)) {
        smpi_copy(smpi_next_slot(comm), request->send, request->send_bytes);
    }
}

static int proceed_v(struct smpi_request *request)
{
    struct smpi_comm *comm = request->comm;
    if (!counts_agree(comm, request->to.counts)) {
        return smpi_mismatch(comm, "what a rank sends must be what all ranks expect from it");
    }
    if (!smpi_fits_payload(longest_of(request))) {
        return smpi_move(request, slice_of_v, 1);
    }
    for (int i = 0; i < comm->size; i++) {
        if (i != comm->rank || request->send != own_of_v(request)) {
            smpi_copy((char *)request->recv + request->to.displs[i], smpi_slot_of(comm, i),
                      (size_t)request->to.counts[i]);
        }
    }
    return SMPI_OK;
}

void smpi_plan_allgatherv(smpi_request *request, const void *send, size_t send_bytes, void *recv, const int64_t *counts,
                          const int64_t *displs)
{
    request->operator_ = SMPI_ALLGATHERV;
    request->fill = fill_v;
    request->proceed = proceed_v;
    request->recv = recv;
    request->to = smpi_keep_pieces(request, 0, recv, counts, displs);
    request->send = send ? send : own_of_v(request);
    request->send_bytes = send ? send_bytes : (size_t)counts[request->comm->rank];
    request->passed = request->send_bytes;
    if ((size_t)request->comm->size * sizeof *displs > SMPI_SLOT_BYTES) {
        smpi_plan_mpi(request, SMPI_ALLGATHERV, 0, SMPI_WHY_LAYOUT);
    }
}

int smpi_allgatherv(smpi_comm *comm, const void *send, size_t send_bytes, void *recv, const int64_t *counts,
                    const int64_t *displs)
{
    struct smpi_request request = {.comm = comm};
    smpi_plan_allgatherv(&request, send, send_bytes, recv, counts, displs);
    return smpi_request_run(&request);
}
