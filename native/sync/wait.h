/* wait.h - the two synchronisations an operator is made of.
 *
 * Both return SMPI_OK, SMPI_ERR_INTERRUPTED (the hook gave up; the communicator is revoked for all) or SMPI_ERR_REVOKED (a peer
 * gave up). Blocking: spin for comm->spin_ns, then sleep on a futex, woken by whoever arrives last; about once a millisecond the
 * world's hook runs. */
#ifndef SMPI_SYNC_WAIT_H
#define SMPI_SYNC_WAIT_H

#include "comm.h"

/* Publishes this rank's filled next line as the entry of the next epoch and waits for everybody's. After it comm->epoch is that
 * epoch and smpi_line_of() is valid for all ranks. */
int smpi_post_line(struct smpi_comm *comm);

/* Waits until all ranks have come to the same point inside the current operator. Everything written before by anybody is visible
 * after. */
int smpi_sync(struct smpi_comm *comm);

#endif
