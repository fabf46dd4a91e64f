/* payload.h - where a small operator's bytes travel: in the entry line up to SMPI_PAYLOAD_BYTES, in the slot behind it up to
 * SMPI_SLOT_BYTES. Either way they are there for all to read once smpi_enter has returned, until this rank enters its next
 * operator. */
#ifndef SMPI_COLL_PAYLOAD_H
#define SMPI_COLL_PAYLOAD_H

#include "../engine/kernels.h"
#include "../sync/comm.h"

static inline int smpi_fits_payload(size_t bytes)
{
    return bytes <= SMPI_SLOT_BYTES;
}

/* Before smpi_enter: copies this rank's bytes to where the others will look. */
static inline void smpi_put_payload(struct smpi_comm *comm, struct smpi_line *line, const void *data, size_t bytes)
{
    smpi_copy(bytes <= SMPI_PAYLOAD_BYTES ? line->payload : smpi_next_slot(comm), data, bytes);
}

/* After smpi_enter: rank's bytes. */
static inline const void *smpi_payload_of(const struct smpi_comm *comm, int rank, size_t bytes)
{
    return bytes <= SMPI_PAYLOAD_BYTES ? smpi_line_of(comm, rank)->payload : smpi_slot_of(comm, rank);
}

#endif
