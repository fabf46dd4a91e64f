/* table.h - the root's counts and displacements in Gatherv and Scatterv, which no other rank has been told.
 *
 *   slot   [ run of rank 0 | run of rank 1 | … | payload ]
 *
 * They open the root's slot, so that all ranks can compare them with what everybody says of itself, and move what lies there. The
 * payload begins at the same place in everybody's slot. */
#ifndef SMPI_COLL_TABLE_H
#define SMPI_COLL_TABLE_H

#include <string.h>

#include "../sync/comm.h"
#include "enter.h"

struct smpi_run {
    int64_t count, displ; /* bytes */
};

static inline size_t smpi_table_bytes(const struct smpi_comm *comm)
{
    return (size_t)comm->size * sizeof(struct smpi_run);
}

static inline int smpi_table_fits(const struct smpi_comm *comm)
{
    return smpi_table_bytes(comm) <= SMPI_SLOT_BYTES;
}

/* Bytes of payload that fit behind it. */
static inline size_t smpi_table_room(const struct smpi_comm *comm)
{
    return SMPI_SLOT_BYTES - smpi_table_bytes(comm);
}

/* For the operator that this rank, the root, is about to enter. */
static inline void smpi_put_table(struct smpi_comm *comm, struct smpi_pieces pieces)
{
    for (int i = 0; i < comm->size; i++) {
        const struct smpi_run run = {pieces.counts[i], pieces.displs[i]};
        memcpy(smpi_next_slot(comm) + (size_t)i * sizeof run, &run, sizeof run);
    }
}

/* Of the operator just entered: what the root says about `rank`, and where rank's payload begins. */
static inline struct smpi_run smpi_table_row(const struct smpi_comm *comm, int root, int rank)
{
    struct smpi_run run;
    memcpy(&run, smpi_slot_of(comm, root) + (size_t)rank * sizeof run, sizeof run);
    return run;
}

static inline const uint8_t *smpi_behind_table(const struct smpi_comm *comm, int rank)
{
    return smpi_slot_of(comm, rank) + smpi_table_bytes(comm);
}

#endif
