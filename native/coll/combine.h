/* combine.h - the back end of the large reductions.
 *
 * The elements are cut into one part per rank; a part's owner reads it from every rank, combines in rank order and writes the
 * result to every rank that wants it, straight into user memory where that is registered. Only a part's owner ever reads or writes
 * that part of anybody's buffers, so sending and receiving in place needs no synchronisation in the middle. Memory that is not
 * registered takes part chunk by chunk through its rank's stage. Every element is combined once, in the same order whatever the
 * path. */
#ifndef SMPI_COLL_COMBINE_H
#define SMPI_COLL_COMBINE_H

#include "../engine/kernels.h"
#include "../sync/comm.h"

struct smpi_request;

/* Where it stands between two steps. */
struct smpi_combine {
    struct smpi_comm *comm;
    smpi_reduce_kernel *reduce;
    size_t size;        /* bytes of one element */
    size_t count;       /* elements in all */
    size_t chunk;       /* elements of one round */
    size_t round_bytes; /* of the stages, where they are used */
    size_t round, rounds;
    int root;            /* -1: every rank receives */
    int large;           /* what all touch together does not fit in the cache */
    int stream;          /* results go past the caches */
    const char **source; /* [ranks] the byte of element 0 in this round */
    char **sink;         /* [ranks + 1] */
    const void **block;  /* [ranks] */
};

/* Starts to combine; called by all ranks when they have agreed; type, op, count and root from their lines. to_all: every rank
 * receives; otherwise only the root does. The operator ends when nobody touches this rank's memory any more. Sets request->path.
 * Returns as smpi_sync_then. */
int smpi_combine(struct smpi_request *request, int to_all);

#endif
