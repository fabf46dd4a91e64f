/* wait.h - the two synchronisations an operator is made of: post, then wait (or poll) until everybody has posted as much.
 *
 * wait and poll return SMPI_OK, SMPI_ERR_REVOKED (a peer gave up), wait also SMPI_ERR_INTERRUPTED (the hook gave up; the
 * communicator is revoked for all), poll SMPI_AGAIN. After SMPI_OK everything written by anybody before it posted is visible. wait
 * blocks: it spins for comm->spin_ns, then sleeps on a futex, woken by whoever arrives last; about once a millisecond the world's
 * hook runs. */
#ifndef SMPI_SYNC_WAIT_H
#define SMPI_SYNC_WAIT_H

#include "comm.h"

/* SMPI_OK, or SMPI_ERR_REVOKED when an operator was given up in the middle before. */
int smpi_may_enter(const struct smpi_comm *comm);

/* Publishes this rank's filled next line as the entry of the next epoch. comm->epoch is that epoch from now on, and once
 * everybody has posted smpi_line_of() is valid for all ranks. */
void smpi_post_line(struct smpi_comm *comm);

/* Says that this rank has come to the next point inside the current operator. */
void smpi_post_phase(struct smpi_comm *comm);

int smpi_wait(struct smpi_comm *comm);
int smpi_poll(struct smpi_comm *comm);

/* Spins (for comm->spin_ns since the last post), then sleeps, until smpi_poll has something to say or it is `until` (smpi_now_ns),
 * or for no reason. */
void smpi_doze(struct smpi_comm *comm, int64_t until);

int64_t smpi_now_ns(void); /* monotonic */

#endif
