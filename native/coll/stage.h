/* stage.h - a rank's staging memory on one communicator: where chunks of unregistered memory meet the fabric.
 *
 *   in: what this rank sends, written by it, read by all     out: what this rank has combined, written by it, read by all
 *   [ round 0 | round 1 | … ]                                [ round 0 | round 1 | … ]       each 2 x STRATAMPI_STAGE_CHUNK
 *
 * An operator goes through both in rounds of equal size, at least two in each before they are used again. So one synchronisation a
 * round is enough: whoever writes a place again two or more rounds later has passed the synchronisation that every reader of it
 * reached after reading. Rounds are short for short operators, so that writing and reading overlap, and as many as fit, because a
 * line that a peer has just read is slow to write: on cores that share no cache at 2 GB/s (measured; AMD EPYC), against 20 GB/s
 * past the caches. Allocated in the heap at first use, freed with the communicator. */
#ifndef SMPI_COLL_STAGE_H
#define SMPI_COLL_STAGE_H

#include "../sync/comm.h"

/* Bytes of one round, at most STRATAMPI_STAGE_CHUNK and a multiple of 4096, for an operator that stages `bytes` in all. */
size_t smpi_stage_round(const struct smpi_comm *comm, size_t bytes);

/* This rank's staging memory, allocated now if need be; NULL without memory. */
char *smpi_stage_of(struct smpi_comm *comm);

/* Where this process sees rank's memory for a round of that many bytes, in an operator for which it has published its stage. */
char *smpi_stage_in(const struct smpi_comm *comm, int rank, size_t round, size_t round_bytes);
char *smpi_stage_out(const struct smpi_comm *comm, int rank, size_t round, size_t round_bytes);

#endif
