/* allgather.c - Allgather and Allgatherv: from every source the same slice to every destination. */
#include "enter.h"
#include "move.h"
#include "payload.h"

static struct smpi_slice slice_of(const struct smpi_comm *comm, int source, int destination)
{
    const struct smpi_line *from = smpi_line_of(comm, source);
    const uint64_t dst = smpi_line_of(comm, destination)->recv + (uint64_t)source * from->count;
    return (struct smpi_slice){
        .src = from->send, .dst = dst, .bytes = from->send == dst && source == destination ? 0 : from->count};
}

int smpi_allgather(smpi_comm *comm, const void *send, size_t send_bytes, void *recv, size_t recv_bytes)
{
    char *own = (char *)recv + (size_t)comm->rank * recv_bytes;
    if (!send || send == own) {
        send = own;
        send_bytes = recv_bytes;
    }
    struct smpi_line *line = smpi_begin(comm, SMPI_ALLGATHER);
    line->count = send_bytes;
    if (send_bytes != recv_bytes) {
        line->flags |= SMPI_FLAG_MISFIT;
    }
    const int small = smpi_fits_payload(send_bytes);
    if (small) {
        smpi_put_payload(comm, line, send, send_bytes);
    } else {
        smpi_publish_send(comm, line, send, send_bytes);
        smpi_publish_recv(comm, line, recv, recv_bytes * (size_t)comm->size);
    }
    smpi_check_alias(line, send == own ? NULL : send, send_bytes, recv, recv_bytes * (size_t)comm->size);
    int status = smpi_enter(comm);
    int path = SMPI_PATH_INLINE;
    if (status == SMPI_OK && !small) {
        status = smpi_move(comm, slice_of, 1, &path);
    } else if (status == SMPI_OK && recv_bytes) {
        for (int rank = 0; rank < comm->size; rank++) {
            if (rank != comm->rank || send != own) {
                smpi_copy((char *)recv + (size_t)rank * recv_bytes, smpi_payload_of(comm, rank, recv_bytes),
                          recv_bytes);
            }
        }
    }
    if (status == SMPI_OK) {
        smpi_count(comm, SMPI_ALLGATHER, path, send_bytes);
    }
    return status;
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

/* FNV-1a over the counts. */
static uint64_t digest_of(const int64_t *counts, int size)
{
    uint64_t digest = 14695981039346656037u;
    for (int i = 0; i < size; i++) {
        digest = (digest ^ (uint64_t)counts[i]) * 1099511628211u;
        digest ^= digest >> 29;
    }
    return digest;
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

int smpi_allgatherv(smpi_comm *comm, const void *send, size_t send_bytes, void *recv, const int64_t *counts,
                    const int64_t *displs)
{
    if ((size_t)comm->size * sizeof *displs > SMPI_SLOT_BYTES) {
        return smpi_needs_mpi(comm, SMPI_ALLGATHERV, 0, SMPI_WHY_LAYOUT);
    }
    const int rank = comm->rank;
    char *own = (char *)recv + displs[rank];
    if (!send || send == own) {
        send = own;
        send_bytes = (size_t)counts[rank];
    }
    int64_t longest = 0;
    struct smpi_line *line = smpi_begin(comm, SMPI_ALLGATHERV);
    for (int i = 0; i < comm->size; i++) {
        longest = counts[i] > longest ? counts[i] : longest;
        smpi_check_alias(line, send == own && i == rank ? NULL : send, send_bytes, (char *)recv + displs[i],
                         (size_t)counts[i]);
    }
    line->bytes = send_bytes;
    line->digest = digest_of(counts, comm->size);
    /* A rank whose own counts do not fit still enters: everybody will see it. */
    const int small = smpi_fits_payload((size_t)longest);
    if (!small) {
        memcpy(smpi_next_slot(comm), displs, (size_t)comm->size * sizeof *displs);
        smpi_publish_send(comm, line, send, send_bytes);
        smpi_publish_recv_pieces(comm, line, (struct smpi_pieces){recv, counts, displs});
    } else if (send_bytes <= (size_t)longest) {
        smpi_copy(smpi_next_slot(comm), send, send_bytes);
    }
    int status = smpi_enter(comm);
    if (status == SMPI_OK && !counts_agree(comm, counts)) {
        return smpi_mismatch(comm, "what a rank sends must be what all ranks expect from it");
    }
    int path = SMPI_PATH_INLINE;
    if (status == SMPI_OK && !small) {
        status = smpi_move(comm, slice_of_v, 1, &path);
    } else if (status == SMPI_OK) {
        for (int i = 0; i < comm->size; i++) {
            if (counts[i] && (i != rank || send != own)) {
                smpi_copy((char *)recv + displs[i], smpi_slot_of(comm, i), (size_t)counts[i]);
            }
        }
    }
    if (status == SMPI_OK) {
        smpi_count(comm, SMPI_ALLGATHERV, path, send_bytes);
    }
    return status;
}
