/* huge.h - huge pages under memory that communicates again and again.
 *
 * A memory file lies in pages of 4 KiB unless the system was told otherwise (shmem_enabled), and large copies then wait for page
 * tables: 15 to 25 % of their time on the machines measured. Linux gathers pages into huge ones on request, whatever its default is
 * (MADV_COLLAPSE, since 6.1), but that takes about a millisecond for 2 MiB that have been touched. So only memory that has been
 * communicated STRATAMPI_HUGE_AFTER times is gathered, by its owner, a limited amount in one operator. */
#ifndef SMPI_MEMORY_HUGE_H
#define SMPI_MEMORY_HUGE_H

#include "../fabric/world.h"

#define SMPI_HUGE_PAGE ((uint64_t)2 << 20)

/* Makes the bookkeeping for this rank's segment; without memory for it nothing is ever gathered. */
void smpi_huge_open(struct smpi_world *world);
void smpi_huge_close(struct smpi_world *world);

/* [address, address + bytes) of this rank's segment enters an operator. Never fails; takes up to some ten milliseconds when it
 * gathers. */
void smpi_huge_use(struct smpi_world *world, uint64_t address, uint64_t bytes);

/* The segment's memory was given back: everything starts from zero. */
void smpi_huge_forget(struct smpi_world *world);

#endif
