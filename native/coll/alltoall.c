/* alltoall.c - Alltoall, Alltoallv and Alltoallw: every source has a slice of its own for every destination. */
#include "../engine/layout.h"
#include "../memory/heap.h"
#include "../memory/shadow.h"
#include "request.h"
#include "payload.h"

static struct smpi_slice slice_of(const struct smpi_comm *comm, int source, int destination)
{
    const struct smpi_line *from = smpi_line_of(comm, source);
    const struct smpi_line *to = smpi_line_of(comm, destination);
    return (struct smpi_slice){.src = from->send + (uint64_t)destination * from->count,
                               .dst = to->recv + (uint64_t)source * from->count,
                               .bytes = from->count};
}

static void fill(struct smpi_request *request, struct smpi_line *line)
{
    struct smpi_comm *comm = request->comm;
    const size_t total = request->recv_bytes * (size_t)comm->size;
    const void *send = request->send;
    line->count = request->send_bytes;
    if (request->send_bytes != request->recv_bytes) {
        line->flags |= SMPI_FLAG_MISFIT;
    }
    if (!send) { /* in place: peers write to recv while others still read it, so they read a copy */
        send = request->scratch = smpi_heap_alloc(comm->world, total, 0);
        if (!send) {
            smpi_ask_for_mpi(comm, line, SMPI_WHY_MEMORY);
            return;
        }
        smpi_copy(request->scratch, request->recv, total);
    }
    const size_t bytes = request->send_bytes * (size_t)comm->size;
    if (smpi_fits_payload(bytes)) {
        smpi_put_payload(comm, line, send, bytes);
    } else {
        smpi_publish_send(comm, line, send, bytes);
        smpi_publish_recv(comm, line, request->recv, total);
    }
    smpi_check_alias(line, request->send, bytes, request->recv, total);
}

static int proceed(struct smpi_request *request)
{
    const struct smpi_comm *comm = request->comm;
    const size_t bytes = request->recv_bytes;
    const size_t total = bytes * (size_t)comm->size;
    if (!smpi_fits_payload(total)) {
        return smpi_move(request, slice_of, 0);
    }
    for (int rank = 0; rank < comm->size; rank++) {
        const char *blocks = smpi_payload_of(comm, rank, total);
        smpi_copy((char *)request->recv + (size_t)rank * bytes, blocks + (size_t)comm->rank * bytes, bytes);
    }
    return SMPI_OK;
}

void smpi_plan_alltoall(smpi_request *request, const void *send, size_t send_bytes, void *recv, size_t recv_bytes)
{
    request->operator_ = SMPI_ALLTOALL;
    request->fill = fill;
    request->proceed = proceed;
    request->send = send;
    request->recv = recv;
    request->send_bytes = send ? send_bytes : recv_bytes;
    request->recv_bytes = recv_bytes;
    request->passed = request->send_bytes * (size_t)request->comm->size;
}

int smpi_alltoall(smpi_comm *comm, const void *send, size_t send_bytes, void *recv, size_t recv_bytes)
{
    struct smpi_request request = {.comm = comm};
    smpi_plan_alltoall(&request, send, send_bytes, recv, recv_bytes);
    return smpi_request_run(&request);
}

/* The v- and w-forms: a rank's slot opens with what it sends to and expects from each peer; if all it sends fits behind that, its
 * bytes are there as well, in the order of destinations, and that is where they are taken from, whatever the path. */
struct row {
    int64_t send_count, send_displ, recv_count, recv_displ; /* bytes */
};

static struct row row_of(const struct smpi_comm *comm, int rank, int peer)
{
    struct row row;
    memcpy(&row, smpi_slot_of(comm, rank) + (size_t)peer * sizeof row, sizeof row);
    return row;
}

static size_t payload_room(const struct smpi_comm *comm)
{
    return SMPI_SLOT_BYTES - (size_t)comm->size * sizeof(struct row);
}

static int has_payload(const struct smpi_comm *comm, int rank)
{
    return smpi_line_of(comm, rank)->bytes <= payload_room(comm);
}

/* Where source's bytes for destination lie in its slot. */
static const uint8_t *payload_of(const struct smpi_comm *comm, int source, int destination)
{
    const uint8_t *payload = smpi_slot_of(comm, source) + (size_t)comm->size * sizeof(struct row);
    for (int i = 0; i < destination; i++) {
        payload += row_of(comm, source, i).send_count;
    }
    return payload;
}

/* The layout of what rank sends to peer (which 0) or receives from it (which 1), as rank calls it; 0: no gaps. */
static uint64_t layout_of(const struct smpi_comm *comm, int rank, int which, int peer)
{
    const uint64_t table = smpi_line_of(comm, rank)->layouts;
    if (!table) {
        return 0;
    }
    const uint64_t *layouts = smpi_shadow(comm->world, comm->members[rank], table);
    return layouts[which * comm->size + peer];
}

static struct smpi_slice slice_of_v(const struct smpi_comm *comm, int source, int destination)
{
    const struct row from = row_of(comm, source, destination);
    const struct row to = row_of(comm, destination, source);
    const int in_slot = has_payload(comm, source);
    const uint64_t src = in_slot ? smpi_home(comm->world, comm->members[source], payload_of(comm, source, destination))
                                 : smpi_line_of(comm, source)->send + (uint64_t)from.send_displ;
    return (struct smpi_slice){.src = src,
                               .dst = smpi_line_of(comm, destination)->recv + (uint64_t)to.recv_displ,
                               .bytes = (size_t)from.send_count,
                               .src_layout = in_slot ? 0 : layout_of(comm, source, 0, destination),
                               .dst_layout = layout_of(comm, destination, 1, source)};
}

static int counts_agree(const struct smpi_comm *comm)
{
    for (int source = 0; source < comm->size; source++) {
        for (int destination = 0; destination < comm->size; destination++) {
            if (row_of(comm, source, destination).send_count != row_of(comm, destination, source).recv_count) {
                return 0;
            }
        }
    }
    return 1;
}

static const smpi_layout *layout_in(struct smpi_pieces pieces, int i)
{
    return pieces.layouts ? pieces.layouts[i] : NULL;
}

/* Shows the layouts to the others. 0 without memory. */
static int put_layouts(struct smpi_request *request, struct smpi_line *line)
{
    const struct smpi_comm *comm = request->comm;
    line->layouts = 0;
    if (!request->from.layouts && !request->to.layouts) {
        return 1;
    }
    uint64_t *table = smpi_heap_alloc(comm->world, 2 * (size_t)comm->size * sizeof *table, 0);
    for (int i = 0; i < comm->size && table; i++) {
        table[i] = (uint64_t)(uintptr_t)layout_in(request->from, i);
        table[comm->size + i] = (uint64_t)(uintptr_t)layout_in(request->to, i);
    }
    request->layouts = table;
    line->layouts = (uint64_t)(uintptr_t)table;
    return table != NULL;
}

static void put_rows(struct smpi_comm *comm, struct smpi_pieces send, struct smpi_pieces recv, int with_payload)
{
    uint8_t *slot = smpi_next_slot(comm);
    uint8_t *payload = slot + (size_t)comm->size * sizeof(struct row);
    for (int i = 0; i < comm->size; i++) {
        const struct row row = {send.counts[i], send.displs[i], recv.counts[i], recv.displs[i]};
        memcpy(slot + (size_t)i * sizeof row, &row, sizeof row);
        if (with_payload && row.send_count) {
            smpi_layout_copy(NULL, payload, layout_in(send, i), (const char *)send.base + row.send_displ, 0,
                             (size_t)row.send_count);
            payload += row.send_count;
        }
    }
}

static void take_payload(const struct smpi_comm *comm, int source, struct smpi_pieces recv)
{
    const struct row row = row_of(comm, comm->rank, source);
    if (row.recv_count) {
        smpi_layout_copy(layout_in(recv, source), (char *)(uintptr_t)recv.base + row.recv_displ, NULL,
                         payload_of(comm, source, comm->rank), 0, (size_t)row.recv_count);
    }
}

static size_t bytes_of(const struct smpi_comm *comm, struct smpi_pieces pieces)
{
    size_t bytes = 0;
    for (int i = 0; i < comm->size; i++) {
        bytes += (size_t)pieces.counts[i];
    }
    return bytes;
}

/* In place: what this rank sends is what it holds where it will receive, packed into a copy. 0 without memory. */
static int pack(struct smpi_request *request)
{
    const struct smpi_comm *comm = request->comm;
    char *copy = smpi_heap_alloc(comm->world, bytes_of(comm, request->to), 0);
    request->scratch = copy;
    int64_t *displs = comm->runs + 2 * (ptrdiff_t)comm->size;
    int64_t at = 0;
    for (int i = 0; i < comm->size && copy; i++) {
        displs[i] = at;
        smpi_layout_copy(NULL, copy + at, layout_in(request->to, i),
                         (const char *)request->to.base + request->to.displs[i], 0, (size_t)request->to.counts[i]);
        at += request->to.counts[i];
    }
    request->from = (struct smpi_pieces){copy, request->to.counts, displs, NULL};
    return copy != NULL;
}

static void fill_v(struct smpi_request *request, struct smpi_line *line)
{
    struct smpi_comm *comm = request->comm;
    if ((!request->send && !pack(request)) || !put_layouts(request, line)) {
        smpi_ask_for_mpi(comm, line, SMPI_WHY_MEMORY);
        return;
    }
    line->bytes = bytes_of(comm, request->from);
    const int with_payload = line->bytes <= payload_room(comm);
    put_rows(comm, request->from, request->to, with_payload);
    if (!with_payload) {
        smpi_publish_send_pieces(comm, line, request->from);
    }
    smpi_publish_recv_pieces(comm, line, request->to);
    smpi_check_alias_pieces(comm, line, request->from, request->to);
}

static int proceed_v(struct smpi_request *request)
{
    struct smpi_comm *comm = request->comm;
    if (!counts_agree(comm)) {
        return smpi_mismatch(comm, "what a rank sends to another must be what that one expects from it");
    }
    int small = 1;
    for (int rank = 0; rank < comm->size; rank++) {
        small &= has_payload(comm, rank);
    }
    if (!small) {
        return smpi_move(request, slice_of_v, 0);
    }
    for (int rank = 0; rank < comm->size; rank++) {
        take_payload(comm, rank, request->to);
    }
    return SMPI_OK;
}

static void plan_v(smpi_request *request, int operator_, const void *send, const int64_t *send_counts,
                   const int64_t *send_displs, void *recv, const int64_t *recv_counts, const int64_t *recv_displs)
{
    request->operator_ = operator_;
    request->fill = fill_v;
    request->proceed = proceed_v;
    request->send = send;
    request->recv = recv;
    request->to = smpi_keep_pieces(request, 0, recv, recv_counts, recv_displs);
    if (send) {
        request->from = smpi_keep_pieces(request, 1, send, send_counts, send_displs);
    }
    request->passed = bytes_of(request->comm, send ? request->from : request->to);
    if ((size_t)request->comm->size * sizeof(struct row) > SMPI_SLOT_BYTES) {
        smpi_plan_mpi(request, operator_, 0, SMPI_WHY_LAYOUT);
    }
}

void smpi_plan_alltoallv(smpi_request *request, const void *send, const int64_t *send_counts,
                         const int64_t *send_displs, void *recv, const int64_t *recv_counts, const int64_t *recv_displs)
{
    plan_v(request, SMPI_ALLTOALLV, send, send_counts, send_displs, recv, recv_counts, recv_displs);
}

int smpi_alltoallv(smpi_comm *comm, const void *send, const int64_t *send_counts, const int64_t *send_displs,
                   void *recv, const int64_t *recv_counts, const int64_t *recv_displs)
{
    struct smpi_request request = {.comm = comm};
    smpi_plan_alltoallv(&request, send, send_counts, send_displs, recv, recv_counts, recv_displs);
    return smpi_request_run(&request);
}

void smpi_plan_alltoallw(smpi_request *request, const void *send, const int64_t *send_counts,
                         const int64_t *send_displs, const smpi_layout *const *send_layouts, void *recv,
                         const int64_t *recv_counts, const int64_t *recv_displs, const smpi_layout *const *recv_layouts)
{
    plan_v(request, SMPI_ALLTOALLW, send, send_counts, send_displs, recv, recv_counts, recv_displs);
    request->from.layouts = send_layouts;
    request->to.layouts = recv_layouts;
}

int smpi_alltoallw(smpi_comm *comm, const void *send, const int64_t *send_counts, const int64_t *send_displs,
                   const smpi_layout *const *send_layouts, void *recv, const int64_t *recv_counts,
                   const int64_t *recv_displs, const smpi_layout *const *recv_layouts)
{
    struct smpi_request request = {.comm = comm};
    smpi_plan_alltoallw(&request, send, send_counts, send_displs, send_layouts, recv, recv_counts, recv_displs,
                        recv_layouts);
    return smpi_request_run(&request);
}
