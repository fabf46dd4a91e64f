/* bcast.c - Bcast: one source, the same slice to every other rank. */
#include "enter.h"
#include "move.h"
#include "payload.h"

static struct smpi_slice slice_of(const struct smpi_comm *comm, int source, int destination)
{
    const struct smpi_line *line = smpi_line_of(comm, source);
    if (source != line->root || destination == source) {
        return (struct smpi_slice){0};
    }
    return (struct smpi_slice){.src = line->send, .dst = smpi_line_of(comm, destination)->recv, .bytes = line->count};
}

int smpi_bcast(smpi_comm *comm, void *buffer, size_t bytes, int root)
{
    if (root < 0 || root >= comm->size) {
        return smpi_needs_mpi(comm, SMPI_BCAST, root, SMPI_WHY_LAYOUT); /* MPI names the error */
    }
    const int is_root = comm->rank == root;
    struct smpi_line *line = smpi_begin(comm, SMPI_BCAST);
    line->root = root;
    line->count = bytes;
    if (smpi_fits_payload(bytes)) {
        if (is_root) {
            smpi_put_payload(comm, line, buffer, bytes);
        }
    } else if (is_root) {
        smpi_publish_send(comm, line, buffer, bytes);
    } else {
        smpi_publish_recv(comm, line, buffer, bytes);
    }
    int status = smpi_enter(comm);
    int path = SMPI_PATH_INLINE;
    if (status == SMPI_OK && !smpi_fits_payload(bytes)) {
        status = smpi_move(comm, slice_of, 1, &path);
    } else if (status == SMPI_OK && !is_root) {
        smpi_copy(buffer, smpi_payload_of(comm, root, bytes), bytes);
    }
    if (status == SMPI_OK) {
        smpi_count(comm, SMPI_BCAST, path, bytes);
    }
    return status;
}
