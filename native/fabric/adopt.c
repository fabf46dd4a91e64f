/* adopt.c - the driver window: segments that somebody else mapped and keeps mapped.
 *
 * Python allocates an MPI shared window and hands over the addresses, so the native code needs no MPI library. The price is a
 * fixed size and addresses that differ from rank to rank, which smpi_world_start turns into deltas. Nothing here is ever
 * unmapped: the window belongs to MPI and lives as long as the object Python holds. */
#include <string.h>
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
