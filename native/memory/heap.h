/* heap.h - inside view of the registering heap (public calls: cdef/heap.h). */
#ifndef SMPI_MEMORY_HEAP_H
#define SMPI_MEMORY_HEAP_H

#include "../fabric/world.h"

/* Builds the heap over world->segment[world->rank], world->bytes long, and sets world->heap. Called by
 * smpi_world_start. Under the driver memfd the segment must be a fresh memory file: it reads zero. heap_max: bounds
 * the bytes in live blocks and, by giving free memory back to the system, nearly the bytes held. populate: reserve
 * pages (MADV_POPULATE_WRITE) whenever the heap grows, so that a full file system shows as SMPI_ERR_NOMEM. */
int smpi_heap_create(struct smpi_world *world, uint64_t heap_max, int populate);
void smpi_heap_delete(struct smpi_world *world); /* bookkeeping only; the segment stays mapped */

/* 1 if the block came from this heap, also in a forked child, where smpi_heap_owns() says 0. 0 if there is no heap. */
int smpi_heap_made(const struct smpi_world *world, const void *block);

/* Usable bytes of a live block of this heap. */
size_t smpi_heap_block_bytes(const struct smpi_world *world, const void *block);

#endif
