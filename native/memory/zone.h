/* zone.h - which granules of a range are taken: two-level segregated fit (TLSF) with all its bookkeeping out of
 * band.
 *
 * A zone is `count` granules, cut without gaps into blocks, live or free. It never touches the memory it describes:
 * tags lie in a private sparse array parallel to the granules, so no write of a peer or of the user can corrupt it,
 * and a block is exactly its granules. The first and the last granule's tag of a block carry its length; tags inside
 * a block are zero.
 *
 *     granules  | 0        | 1      | 2        | 3    | 4      | 5       | 6 ...            count - 1 |
 *     blocks    [ live, 3 granules             ][live ][ free, all the rest                           ]
 *     tags        head 3     0        tail 3    h+t 1   head n   0         0 ...              tail n
 *
 * Invariants: two free blocks never touch; every free block is on the list of its size class, and the two bitmaps
 * say which lists are not empty; granules from `high` on have never been part of a live block, so their memory is as
 * the system gave it (zero, not there yet). A free block may be `clean`: its memory was given back to the system, so
 * that it is again like new; clean blocks lie below `high`.
 *
 * All calls are O(1) except clean and is_valid, and find when the zone is nearly full. Not thread-safe: the heap's
 * lock covers it. */
#ifndef SMPI_MEMORY_ZONE_H
#define SMPI_MEMORY_ZONE_H

#include <stdint.h>

#define SMPI_ZONE_NONE UINT32_MAX
#define SMPI_ZONE_SUB 32 /* classes per power of two: a block is at most 1/32 larger than its class says */
#define SMPI_ZONE_POWERS 28

struct smpi_tag {
    uint32_t length;     /* granules; in the first and last tag of a block */
    uint32_t state;      /* bits, see zone.c; 0 inside a block */
    uint32_t prev, next; /* free list, in the first tag of a free block; SMPI_ZONE_NONE ends it */
};

struct smpi_zone {
    struct smpi_tag *tags; /* [count], sparse */
    uint32_t count, high;
    uint32_t clean; /* granules in clean blocks */
    uint32_t power_map;
    uint32_t sub_map[SMPI_ZONE_POWERS];
    uint32_t heads[SMPI_ZONE_POWERS][SMPI_ZONE_SUB];
};

/* One free block of count granules (none when 0). When the system has no room for that many tags the zone gets
 * smaller. */
void smpi_zone_open(struct smpi_zone *zone, uint64_t count);
void smpi_zone_close(struct smpi_zone *zone);

/* First granule of a free block of at least n >= 1 granules, or SMPI_ZONE_NONE. Changes nothing. */
uint32_t smpi_zone_find(const struct smpi_zone *zone, uint32_t n);

/* How many of the first n granules of free block `at` may hold old contents; those behind them are like new. */
uint32_t smpi_zone_dirty(const struct smpi_zone *zone, uint32_t at, uint32_t n);

/* Makes the first n granules of free block `at` a live block. */
void smpi_zone_take(struct smpi_zone *zone, uint32_t at, uint32_t n);

/* Length of the live block that starts at `at`; 0 if none does. */
uint32_t smpi_zone_length(const struct smpi_zone *zone, uint32_t at);

/* Frees live block `at`. */
void smpi_zone_give(struct smpi_zone *zone, uint32_t at);

/* Keeps the first n granules of live block `at`, 1 <= n <= its length, and frees the others. */
void smpi_zone_shrink(struct smpi_zone *zone, uint32_t at, uint32_t n);

/* The free block behind live block `at`, if both together have n granules, else SMPI_ZONE_NONE. grow then makes it
 * so. */
uint32_t smpi_zone_room(const struct smpi_zone *zone, uint32_t at, uint32_t n);
void smpi_zone_grow(struct smpi_zone *zone, uint32_t at, uint32_t n);

/* Calls punch for the touched part of every free block that is not clean; where it returns 0 the block becomes
 * clean. */
void smpi_zone_clean(struct smpi_zone *zone, int (*punch)(void *arg, uint32_t at, uint32_t n), void *arg);

/* 1 if all of the above holds; *live and *blocks: granules in, and number of, live blocks. */
int smpi_zone_is_valid(const struct smpi_zone *zone, uint64_t *live, uint64_t *blocks);

#endif
