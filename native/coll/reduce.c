/* reduce.c - Reduce and Allreduce: small ones from everybody's payload, each rank for itself; large ones by parts (combine.h).
 *
 * Both combine in rank order, so every rank that computes a result computes the same bits. */
#include "../engine/kernels.h"
#include "combine.h"
#include "enter.h"
#include "payload.h"

static void combine_payloads(const struct smpi_comm *comm, void *recv, size_t count, int type, int op)
{
    const void **sources = (const void **)comm->pointers;
    const size_t bytes = count * smpi_type_size(type);
    for (int rank = 0; rank < comm->size; rank++) {
        sources[rank] = smpi_payload_of(comm, rank, bytes);
    }
    smpi_kernels()->reduce[type][op](recv, sources, comm->size, count);
}

/* receives: recv is significant on this rank. */
static int reduce(struct smpi_comm *comm, int operator_, const void *send, void *recv, size_t count, int type, int op,
                  int root, int receives)
{
    if (!smpi_op_is_legal(type, op)) {
        return smpi_needs_mpi(comm, operator_, root, SMPI_WHY_OP);
    }
    const size_t bytes = count * smpi_type_size(type);
    const void *source = send ? send : recv;
    struct smpi_line *line = smpi_begin(comm, operator_);
    line->type = (uint8_t)type;
    line->op = (uint8_t)op;
    line->root = root;
    line->count = count;
    if (smpi_fits_payload(bytes)) {
        smpi_put_payload(comm, line, source, bytes);
    } else {
        smpi_publish_send(comm, line, source, bytes);
        smpi_publish_recv(comm, line, recv, receives ? bytes : 0);
        smpi_publish_stage(comm, line); /* this rank's part may go to somebody's unregistered memory */
    }
    if (receives) {
        smpi_check_alias(line, send, bytes, recv, bytes);
    }
    int status = smpi_enter(comm);
    int path = SMPI_PATH_INLINE;
    if (status == SMPI_OK && !smpi_fits_payload(bytes)) {
        status = smpi_combine(comm, operator_ == SMPI_ALLREDUCE, &path);
    } else if (status == SMPI_OK && receives && count) {
        combine_payloads(comm, recv, count, type, op);
    }
    if (status == SMPI_OK) {
        smpi_count(comm, operator_, path, bytes);
    }
    return status;
}

int smpi_reduce(smpi_comm *comm, const void *send, void *recv, size_t count, int type, int op, int root)
{
    if (root < 0 || root >= comm->size || (!send && comm->rank != root)) {
        return smpi_needs_mpi(comm, SMPI_REDUCE, root, SMPI_WHY_LAYOUT); /* MPI names the error */
    }
    return reduce(comm, SMPI_REDUCE, send, recv, count, type, op, root, comm->rank == root);
}

int smpi_allreduce(smpi_comm *comm, const void *send, void *recv, size_t count, int type, int op)
{
    return reduce(comm, SMPI_ALLREDUCE, send, recv, count, type, op, 0, 1);
}
