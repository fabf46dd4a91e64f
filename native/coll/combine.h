/* combine.h - the back end of the large reductions.
 *
 * Such an operator is a map: rank -> result, a pure function of what the ranks have published; its front end is that map.
 *
 *     Allreduce   every rank: all elements of all sources       Reduce_scatter   rank r: its elements of all sources
 *     Scan        rank r: all elements of sources 0 to r        Exscan           rank r: all elements of sources 0 to r - 1
 *
 * The elements are cut into one part per rank; a part's owner reads it from every rank, combines in rank order and writes the
 * results to every rank that wants one, straight into user memory where that is registered. Memory that is not takes part chunk
 * by chunk through its rank's stage. The order of combining is the same whatever the path.
 *
 * In place: only a part's owner ever reads or writes that part of anybody's buffers, so nothing in the middle needs
 * synchronisation. Except where a result lies at other elements than it is made of (Reduce_scatter): that rank takes it by way of
 * the stages, round by round, as if its memory were not registered; what it overwrites, which is never ahead, was read in the
 * rounds before. */
#ifndef SMPI_COLL_COMBINE_H
#define SMPI_COLL_COMBINE_H

#include "../engine/kernels.h"
#include "../sync/comm.h"

struct smpi_request;

/* What a rank receives: elements [from, from + count) of the combination of sources 0 to sources - 1. Either all that receive
 * get all elements; or they get the elements in order of rank, without gaps, of all sources. */
struct smpi_result {
    int sources;
    size_t from, count;
};

typedef struct smpi_result smpi_result_map(const struct smpi_request *request, int rank);

/* Where it stands between two steps. */
struct smpi_combine {
    struct smpi_comm *comm;
    const struct smpi_request *request;
    smpi_result_map *map;
    smpi_reduce_kernel *reduce;
    size_t size;        /* bytes of one element */
    size_t count;       /* elements in all */
    size_t chunk;       /* elements of one round */
    size_t round_bytes; /* of the stages, where they are used */
    size_t round, rounds;
    int prefixes;        /* every rank's result is another one */
    int large;           /* what all touch together does not fit in the cache */
    int stream;          /* results go past the caches */
    const char **source; /* [ranks] the byte of element 0 in this round */
    char **sink;         /* [ranks] where results would have their element 0; prefixes: by rank, NULL for none */
    const void **block;  /* [ranks] */
};

/* Starts to combine; called by all ranks when they have agreed; type, op and count from their lines. The operator ends when
 * nobody touches this rank's memory any more. Sets request->path. Returns as smpi_sync_then. */
int smpi_combine(struct smpi_request *request, smpi_result_map *map);

#endif
