/* move.h - the back end of every operator that only moves bytes.
 *
 * Such an operator is a map: (source rank, destination rank) -> slice, a pure function of what the ranks have published; its front
 * end is that map and nothing else. This back end decides who moves what:
 *
 *   all sources and destinations registered    all slices in one row, cut into equal parts, one part a rank: a busy destination is
 *                                              served by everybody (with equal slices everybody serves itself); blocks too large
 *                                              for the cache that go to several destinations: every rank takes a share of each
 *   some destination is not                    every rank pulls its own slices, as only it can write there
 *   some source is not                         that source copies chunk after chunk to its stage, and everybody pulls from
 *                                              there; the other sources stay direct */
#ifndef SMPI_COLL_MOVE_H
#define SMPI_COLL_MOVE_H

#include "../sync/comm.h"

struct smpi_request;

/* Addresses as source and destination rank say them. */
struct smpi_slice {
    uint64_t src, dst;
    size_t bytes;
    uint64_t src_layout, dst_layout; /* 0: no gaps */
};

typedef struct smpi_slice smpi_slice_map(const struct smpi_comm *comm, int source, int destination);

/* Where it stands between two steps. */
struct smpi_move {
    struct smpi_comm *comm;
    smpi_slice_map *map;
    int one_block;
    size_t round, rounds;
    size_t round_bytes; /* of a source's stage that one staged round takes */
    size_t chunk;       /* bytes of one slice that travel in one staged round */
    void (*copy)(void *dst, const void *src, size_t bytes);
};

/* Starts to move all slices; the operator ends when nobody touches this rank's memory any more. Called by all ranks when they have
 * agreed, with the flags and stages published as enter.h says. one_block: every destination gets the same bytes from a source
 * (Bcast, Allgather). Sets request->path to direct or staged. SMPI_AGAIN, as smpi_sync_then. */
int smpi_move(struct smpi_request *request, smpi_slice_map *map, int one_block);

#endif
