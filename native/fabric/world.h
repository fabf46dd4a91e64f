/* world.h - what the layers above see of a world: its members' segments and the few facts agreed at start.
 *
 * The struct is filled by fabric/world.c and the two drivers; after smpi_world_start everything but the counters and
 * the hook is constant, so reading needs no lock. A process normally has one world; tests make several, one per thread,
 * over one mapping. */
#ifndef SMPI_FABRIC_WORLD_H
#define SMPI_FABRIC_WORLD_H

#include <pthread.h>
#include <stdatomic.h>

#include "../stratampi.h"

struct smpi_heap;
struct smpi_huge;
struct smpi_memfd;

/* A gate that this rank has closed and some peer has not: its memory waits here (sync/comm.c). */
struct smpi_parting {
    struct smpi_parting *next;
    void *gate, *stage;
    uint32_t peers;
};

struct smpi_world {
    int rank, size;           /* in the supernode */
    int cores;                /* usable by all its ranks together */
    const char *driver;       /* "none" until a driver has mapped the segments */
    uint64_t bytes;           /* of one segment */
    char **segment;           /* [size] where this process sees each rank's segment */
    char *range;              /* where the segments lie in a mapping of ours; NULL if somebody else mapped them */
    ptrdiff_t *delta;         /* [size] to add to an address of rank r to reach the same byte here; normally 0 */
    struct smpi_memfd *memfd; /* driver state until smpi_memfd_finish */
    int fd;                   /* own segment's descriptor, kept open for forked children (close-on-exec); -1: unknown */
    struct smpi_heap *heap;   /* in segment[rank] */
    struct smpi_huge *huge;   /* what is known of its pages; may be NULL */
    uint64_t stage_chunk, stream_min; /* smpi_world_tune */
    int (*hook)(void);
    struct smpi_parting *parting; /* under parting_lock */
    pthread_mutex_t parting_lock;
    _Atomic uint64_t calls[SMPI_OPERATOR_COUNT * SMPI_PATH_COUNT]; /* written by this process only */
    _Atomic uint64_t call_bytes[SMPI_PATH_COUNT];
    _Atomic uint64_t why[SMPI_WHY_COUNT];
};

#endif
