/* alltoall.c - Alltoall and Alltoallv: every source has a slice of its own for every destination. */
#include <stdlib.h>

#include "../memory/shadow.h"
#include "enter.h"
#include "move.h"
#include "payload.h"

static struct smpi_slice slice_of(const struct smpi_comm *comm, int source, int destination)
{
    const struct smpi_line *from = smpi_line_of(comm, source);
    const struct smpi_line *to = smpi_line_of(comm, destination);
    return (struct smpi_slice){.src = from->send + (uint64_t)destination * from->count,
                               .dst = to->recv + (uint64_t)source * from->count,
                               .bytes = from->count};
}

static int alltoall(struct smpi_comm *comm, const void *send, size_t send_bytes, void *recv, size_t recv_bytes)
{
    const size_t size = (size_t)comm->size;
    struct smpi_line *line = smpi_begin(comm, SMPI_ALLTOALL);
    line->count = send_bytes;
    if (send_bytes != recv_bytes) {
        line->flags |= SMPI_FLAG_MISFIT;
    }
    const int small = smpi_fits_payload(send_bytes * size);
    if (small) {
        smpi_put_payload(comm, line, send, send_bytes * size);
    } else {
        smpi_publish_send(comm, line, send, send_bytes * size);
        smpi_publish_recv(comm, line, recv, recv_bytes * size);
    }
    smpi_check_alias(line, send, send_bytes * size, recv, recv_bytes * size);
    int status = smpi_enter(comm);
    int path = SMPI_PATH_INLINE;
    if (status == SMPI_OK && !small) {
        status = smpi_move(comm, slice_of, 0, &path);
    } else if (status == SMPI_OK && recv_bytes) {
        for (int rank = 0; rank < comm->size; rank++) {
            const char *blocks = smpi_payload_of(comm, rank, recv_bytes * size);
            smpi_copy((char *)recv + (size_t)rank * recv_bytes, blocks + (size_t)comm->rank * recv_bytes, recv_bytes);
        }
    }
    if (status == SMPI_OK) {
        smpi_count(comm, SMPI_ALLTOALL, path, send_bytes * size);
    }
    return status;
}

int smpi_alltoall(smpi_comm *comm, const void *send, size_t send_bytes, void *recv, size_t recv_bytes)
{
    if (send) {
        return alltoall(comm, send, send_bytes, recv, recv_bytes);
    }
    /* In place: peers write to recv while others still read it, so they read a copy. */
    const size_t bytes = recv_bytes * (size_t)comm->size;
    void *copy = smpi_heap_alloc(comm->world, bytes, 0);
    if (!copy) {
        return smpi_needs_mpi(comm, SMPI_ALLTOALL, 0, SMPI_WHY_MEMORY);
    }
    smpi_copy(copy, recv, bytes);
    const int status = alltoall(comm, copy, recv_bytes, recv, recv_bytes);
    smpi_heap_free(comm->world, copy);
    return status;
}

/* The v-form: a rank's slot opens with what it sends to and expects from each peer; if all it sends fits behind that, its bytes are
 * there as well, in the order of destinations, and that is where they are taken from, whatever the path. */
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

static struct smpi_slice slice_of_v(const struct smpi_comm *comm, int source, int destination)
{
    const struct row from = row_of(comm, source, destination);
    const struct row to = row_of(comm, destination, source);
    const uint64_t src = has_payload(comm, source)
                             ? smpi_home(comm->world, comm->members[source], payload_of(comm, source, destination))
                             : smpi_line_of(comm, source)->send + (uint64_t)from.send_displ;
    return (struct smpi_slice){.src = src,
                               .dst = smpi_line_of(comm, destination)->recv + (uint64_t)to.recv_displ,
                               .bytes = (size_t)from.send_count};
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

static void put_rows(struct smpi_comm *comm, struct smpi_pieces send, struct smpi_pieces recv, int with_payload)
{
    uint8_t *slot = smpi_next_slot(comm);
    uint8_t *payload = slot + (size_t)comm->size * sizeof(struct row);
    for (int i = 0; i < comm->size; i++) {
        const struct row row = {send.counts[i], send.displs[i], recv.counts[i], recv.displs[i]};
        memcpy(slot + (size_t)i * sizeof row, &row, sizeof row);
        if (with_payload && row.send_count) {
            smpi_copy(payload, (const char *)send.base + row.send_displ, (size_t)row.send_count);
            payload += row.send_count;
        }
    }
}

static void take_payload(const struct smpi_comm *comm, int source, char *recv)
{
    const struct row row = row_of(comm, comm->rank, source);
    if (row.recv_count) {
        smpi_copy(recv + row.recv_displ, payload_of(comm, source, comm->rank), (size_t)row.recv_count);
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

static int alltoallv(struct smpi_comm *comm, struct smpi_pieces from, struct smpi_pieces to)
{
    const size_t bytes = bytes_of(comm, from);
    struct smpi_line *line = smpi_begin(comm, SMPI_ALLTOALLV);
    line->bytes = bytes;
    const int with_payload = bytes <= payload_room(comm);
    put_rows(comm, from, to, with_payload);
    if (!with_payload) {
        smpi_publish_send_pieces(comm, line, from);
    }
    smpi_publish_recv_pieces(comm, line, to);
    smpi_check_alias_pieces(comm, line, from, to);
    int status = smpi_enter(comm);
    if (status == SMPI_OK && !counts_agree(comm)) {
        return smpi_mismatch(comm, "what a rank sends to another must be what that one expects from it");
    }
    int small = 1;
    for (int rank = 0; rank < comm->size && status == SMPI_OK; rank++) {
        small &= has_payload(comm, rank);
    }
    int path = SMPI_PATH_INLINE;
    if (status == SMPI_OK && !small) {
        status = smpi_move(comm, slice_of_v, 0, &path);
    } else if (status == SMPI_OK) {
        for (int rank = 0; rank < comm->size; rank++) {
            take_payload(comm, rank, (char *)(uintptr_t)to.base);
        }
    }
    if (status == SMPI_OK) {
        smpi_count(comm, SMPI_ALLTOALLV, path, bytes);
    }
    return status;
}

/* In place: what this rank sends is what it holds where it will receive, packed into a copy. */
static int alltoallv_in_place(struct smpi_comm *comm, struct smpi_pieces to)
{
    char *copy = smpi_heap_alloc(comm->world, bytes_of(comm, to), 0);
    int64_t *displs = calloc((size_t)comm->size, sizeof *displs);
    int status;
    if (copy && displs) {
        int64_t at = 0;
        for (int i = 0; i < comm->size; i++) {
            displs[i] = at;
            if (to.counts[i]) {
                smpi_copy(copy + at, (const char *)to.base + to.displs[i], (size_t)to.counts[i]);
            }
            at += to.counts[i];
        }
        status = alltoallv(comm, (struct smpi_pieces){copy, to.counts, displs}, to);
    } else {
        status = smpi_needs_mpi(comm, SMPI_ALLTOALLV, 0, SMPI_WHY_MEMORY);
    }
    free(displs);
    smpi_heap_free(comm->world, copy);
    return status;
}

int smpi_alltoallv(smpi_comm *comm, const void *send, const int64_t *send_counts, const int64_t *send_displs,
                   void *recv, const int64_t *recv_counts, const int64_t *recv_displs)
{
    const struct smpi_pieces to = {recv, recv_counts, recv_displs};
    if ((size_t)comm->size * sizeof(struct row) > SMPI_SLOT_BYTES) {
        return smpi_needs_mpi(comm, SMPI_ALLTOALLV, 0, SMPI_WHY_LAYOUT);
    }
    return send ? alltoallv(comm, (struct smpi_pieces){send, send_counts, send_displs}, to)
                : alltoallv_in_place(comm, to);
}
