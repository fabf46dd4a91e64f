/* adopt.c - the driver window: segments that somebody else mapped.
 *
 * Python allocates an MPI shared window and hands over the addresses, so the native code needs no MPI library. The
 * price is a fixed size, and addresses that differ from rank to rank and die with MPI_Finalize (Open MPI unmaps windows
 * then), while arrays live on. smpi_adopt_again heals the second: mremap of length 0 maps the same pages of a shared
 * mapping a second time, at an address of our choice, and they stay when the first mapping goes. Where that is refused
 * the adopted addresses serve, and smpi_world_start turns their distances into deltas. */
#include <errno.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "../base/error.h"
#include "driver.h"

int smpi_adopt(smpi_world *world, const uint64_t *bases, uint64_t bytes)
{
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
    if (strcmp(world->driver, SMPI_DRIVER_NONE) != 0)
        return smpi_fail(SMPI_ERR_ARG, "the segments of this world are already mapped by the driver %s", world->driver);
    if (bytes == 0 || bytes % page != 0)
        return smpi_fail(SMPI_ERR_ARG, "a segment of %llu bytes is not a multiple of the page size %llu",
                         (unsigned long long)bytes, (unsigned long long)page);
    for (int r = 0; r < world->size; r++)
        if (bases[r] == 0 || bases[r] % page != 0 || bases[r] > UINT64_MAX - bytes)
            return smpi_fail(SMPI_ERR_ARG, "rank %d's segment cannot begin at %#llx", r, (unsigned long long)bases[r]);
    for (int r = 0; r < world->size; r++)
        world->segment[r] = (char *)(uintptr_t)bases[r];
    world->bytes = bytes;
    world->driver = SMPI_DRIVER_WINDOW;
    return SMPI_OK;
}

int smpi_adopt_again(smpi_world *world, uint64_t base)
{
    if (strcmp(world->driver, SMPI_DRIVER_WINDOW) != 0 || world->range != NULL || world->heap != NULL)
        return smpi_fail(SMPI_ERR_ARG, "only adopted segments can be mapped again, once, before the start");
    uint64_t total = world->bytes * (uint64_t)world->size;
    if (base % SMPI_SEGMENT_UNIT != 0 || base > UINT64_MAX - total)
        return smpi_fail(SMPI_ERR_ARG, "segments cannot begin at %#llx", (unsigned long long)base);
    char *begin = smpi_range_reserve(base, total);
    if (begin == NULL)
        return smpi_fail(SMPI_ERR_REFUSED, "no address range of %llu bytes at %#llx: %s", (unsigned long long)total,
                         (unsigned long long)base, strerror(errno));
    for (int r = 0; r < world->size; r++) {
        char *at = begin + (uint64_t)r * world->bytes;
        if (mremap(world->segment[r], 0, world->bytes, MREMAP_MAYMOVE | MREMAP_FIXED, at) != at) {
            int status = smpi_fail(SMPI_ERR_REFUSED, "mremap of rank %d's segment: %s", r, strerror(errno));
            munmap(begin, total);
            return status;
        }
    }
    smpi_range_use(world, begin);
    return SMPI_OK;
}
