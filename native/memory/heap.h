/* heap.h - inside view of the registering heap (public calls: cdef/heap.h). */
#ifndef SMPI_MEMORY_HEAP_H
#define SMPI_MEMORY_HEAP_H

#include "../fabric/world.h"

/* Builds the heap over world->segment[world->rank], world->bytes long, and sets world->heap. Called by smpi_world_start.
 * populate: reserve pages (MADV_POPULATE_WRITE) whenever the heap grows, so that a full file system shows as SMPI_ERR_NOMEM. */
int smpi_heap_create(struct smpi_world *world, uint64_t heap_max, int populate);
void smpi_heap_delete(struct smpi_world *world); /* bookkeeping only; the segment stays mapped */

#endif
