/* shadow.h - one address for one byte, on every rank.
 *
 * Every process maps rank r's segment at base + r * bytes, so a pointer into it means the same everywhere:
 *
 *   every rank's address space     base             base + bytes     base + 2 bytes
 *                                  |                |                |
 *                                  [ segment of 0   | segment of 1   | segment of 2   ]
 *                                         p ->|xx|
 *
 * Invariant: delta[r] is 0, or the one correction to apply to addresses of rank r where some process could not map at base (the
 * driver window, a taken range). Not done: publishing offsets and adding a base at each use; it costs every rank an addition for
 * the sake of the few that need it, and a debugger would show numbers instead of pointers. */
#ifndef SMPI_MEMORY_SHADOW_H
#define SMPI_MEMORY_SHADOW_H

#include "../fabric/world.h"

/* Where this process sees the byte that supernode rank `rank` calls `address`. */
static inline void *smpi_shadow(const struct smpi_world *world, int rank, uint64_t address)
{
    return (void *)(uintptr_t)(address + (uint64_t)world->delta[rank]);
}

/* The other way: what supernode rank `rank` calls the byte that this process sees at `here`. */
static inline uint64_t smpi_home(const struct smpi_world *world, int rank, const void *here)
{
    return (uint64_t)(uintptr_t)here - (uint64_t)world->delta[rank];
}

#endif
