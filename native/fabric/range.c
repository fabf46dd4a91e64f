/* range.c - address space for all segments of a world, taken in one piece before anything is mapped into it.
 *
 * Reserving first makes the rest safe: inside the reserved range MAP_FIXED and MREMAP_FIXED replace our own empty pages
 * and cannot hit anything that another thread has mapped in the meantime. */
#include <errno.h>
#include <sys/mman.h>

#include "../base/error.h"
#include "driver.h"

#ifndef MAP_FIXED_NOREPLACE
#define MAP_FIXED_NOREPLACE 0x100000
#endif

char *smpi_range_reserve(uint64_t base, uint64_t total)
{
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    if (base != 0) {
        void *at = mmap((void *)(uintptr_t)base, total, PROT_NONE, flags | MAP_FIXED_NOREPLACE, -1, 0);
        if (at == MAP_FAILED)
            return NULL;
        if ((uint64_t)(uintptr_t)at == base)
            return at;
        munmap(at, total); /* before Linux 4.17 the flag is unknown and the address only a wish */
        errno = EEXIST;
        return NULL;
    }
    void *at = mmap(NULL, total + SMPI_SEGMENT_UNIT, PROT_NONE, flags, -1, 0);
    if (at == MAP_FAILED)
        return NULL;
    uint64_t begin = (uint64_t)(uintptr_t)at;
    uint64_t aligned = (begin + SMPI_SEGMENT_UNIT - 1) / SMPI_SEGMENT_UNIT * SMPI_SEGMENT_UNIT;
    if (aligned > begin)
        munmap(at, aligned - begin);
    if (begin + SMPI_SEGMENT_UNIT > aligned)
        munmap((void *)(uintptr_t)(aligned + total), begin + SMPI_SEGMENT_UNIT - aligned);
    return (char *)(uintptr_t)aligned;
}

void smpi_range_use(struct smpi_world *world, char *begin)
{
    world->range = begin;
    for (int r = 0; r < world->size; r++)
        world->segment[r] = begin + (uint64_t)r * world->bytes;
}

void smpi_range_release(struct smpi_world *world)
{
    if (world->range == NULL)
        return;
    munmap(world->range, world->bytes * (uint64_t)world->size);
    world->range = NULL;
    for (int r = 0; r < world->size; r++)
        world->segment[r] = NULL;
}
