/* combine.h - the back end of the large reductions.
 *
 * The elements are cut into one part per rank; a part's owner reads it from every rank, combines in rank order and writes the
 * result to every rank that wants it, straight into user memory where that is registered. Only a part's owner ever reads or writes
 * that part of anybody's buffers, so sending and receiving in place needs no synchronisation in the middle. Memory that is not
 * registered takes part chunk by chunk through its rank's stage. Every element is combined once, in the same order whatever the
 * path. */
#ifndef SMPI_COLL_COMBINE_H
#define SMPI_COLL_COMBINE_H

#include "../sync/comm.h"

/* Called by all ranks after smpi_enter; type, op, count and root from its lines. to_all: every rank receives; otherwise only
 * the root does. Returns when nobody touches this rank's memory any more. *path as in move.h. SMPI_OK, or an error of wait.h. */
int smpi_combine(struct smpi_comm *comm, int to_all, int *path);

#endif
