/* huge.c - see huge.h. */
#include "huge.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/mman.h>

#include "../base/order.h"

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

#define GATHER_MAX 32 /* huge pages in one operator */
#define DONE UINT8_MAX

struct smpi_huge {
    uint64_t first; /* address of the first whole huge page of the segment */
    uint64_t count;
    int64_t after;          /* uses before a page is gathered */
    _Atomic int refused;    /* the system cannot; not asked again */
    _Atomic uint8_t uses[]; /* [count], DONE when gathered or refused for this page */
};

void smpi_huge_open(struct smpi_world *world)
{
    const uint64_t start = (uint64_t)(uintptr_t)world->segment[world->rank];
    const uint64_t first = (start + SMPI_HUGE_PAGE - 1) / SMPI_HUGE_PAGE * SMPI_HUGE_PAGE;
    const uint64_t count = world->bytes > first - start ? (world->bytes - (first - start)) / SMPI_HUGE_PAGE : 0;
    const int64_t after = smpi_setting_number(SMPI_SET_HUGE_AFTER);
    world->huge = after > 0 ? calloc(1, sizeof *world->huge + count) : NULL;
    if (world->huge) {
        world->huge->first = first;
        world->huge->count = count;
        world->huge->after = after < DONE ? after : DONE - 1;
    }
}

void smpi_huge_close(struct smpi_world *world)
{
    free(world->huge);
    world->huge = NULL;
}

static void gather(struct smpi_huge *huge, uint64_t page)
{
    void *address = (void *)(uintptr_t)(huge->first + page * SMPI_HUGE_PAGE); /* NOLINT(performance-no-int-to-ptr) */
    smpi_write_relaxed(&huge->uses[page], DONE);
    if (madvise(address, SMPI_HUGE_PAGE, MADV_COLLAPSE) && errno != EAGAIN && errno != EBUSY && errno != ENOMEM) {
        smpi_write_relaxed(&huge->refused, 1);
    }
}

void smpi_huge_use(struct smpi_world *world, uint64_t address, uint64_t bytes)
{
    struct smpi_huge *huge = world->huge;
    if (bytes < SMPI_HUGE_PAGE || !huge || smpi_read_relaxed(&huge->refused)) {
        return;
    }
    const uint64_t from = address > huge->first ? (address - huge->first + SMPI_HUGE_PAGE - 1) / SMPI_HUGE_PAGE : 0;
    const uint64_t end = (address + bytes - huge->first) / SMPI_HUGE_PAGE;
    int gathered = 0;
    for (uint64_t page = from; page < end && page < huge->count && gathered < GATHER_MAX; page++) {
        const uint8_t uses = smpi_read_relaxed(&huge->uses[page]);
        if (uses == DONE) {
            continue;
        }
        if (uses < huge->after) {
            smpi_write_relaxed(&huge->uses[page], (uint8_t)(uses + 1));
        } else {
            gather(huge, page);
            gathered++;
        }
    }
}

void smpi_huge_forget(struct smpi_world *world)
{
    for (uint64_t page = 0; world->huge && page < world->huge->count; page++) {
        smpi_write_relaxed(&world->huge->uses[page], 0);
    }
}
