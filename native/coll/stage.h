/* stage.h - a rank's staging memory on one communicator: where chunks of unregistered memory meet the fabric.
 *
 *   in[0] | in[1] | out[0] | out[1]        each one chunk (STRATAMPI_STAGE_CHUNK)
 *
 * in: what this rank sends, written by it, read by all. out: what this rank has combined, written by it, read by all. Two of each,
 * used alternately by round, so that one synchronisation a round is enough: whoever writes half r % 2 in round r + 2 has passed the
 * synchronisation that every reader of round r reached after reading. Allocated in the heap at first use, freed with the
 * communicator. */
#ifndef SMPI_COLL_STAGE_H
#define SMPI_COLL_STAGE_H

#include "../sync/comm.h"

/* Bytes of one chunk, a multiple of 4096; the same on all ranks of a job. */
size_t smpi_stage_chunk(void);

/* This rank's staging memory, allocated now if need be; NULL without memory. */
char *smpi_stage_of(struct smpi_comm *comm);

/* Where this process sees rank's in or out chunk of a round, during an operator in which that rank has published its stage. */
char *smpi_stage_in(const struct smpi_comm *comm, int rank, size_t round);
char *smpi_stage_out(const struct smpi_comm *comm, int rank, size_t round);

#endif
