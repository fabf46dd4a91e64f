/* world.c - the life of a world: made empty, filled by a driver, started once, then constant.
 *
 * The only arithmetic on addresses of other processes happens here, once: delta[r] is the distance between where this
 * process sees rank r's segment and where rank r itself does. Everything later adds it and asks no questions. It is
 * signed and taken modulo 2^64, so it is right whichever of the two lies higher. */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "../base/error.h"
#include "../memory/heap.h" /* the one look upwards: a started world is one whose heap exists */
#include "driver.h"

#define PAGE ((uint64_t)4096)
#define CACHE_WHEN_UNKNOWN ((uint64_t)32 << 20)

smpi_world *smpi_world_new(int rank, int size)
{
    if (size < 1 || rank < 0 || rank >= size) {
        (void)smpi_fail(SMPI_ERR_ARG, "rank %d of %d ranks makes no sense", rank, size);
        return NULL;
    }
    smpi_world *world = calloc(1, sizeof *world);
    char **segment = calloc((size_t)size, sizeof *segment);
    ptrdiff_t *delta = calloc((size_t)size, sizeof *delta);
    if (world == NULL || segment == NULL || delta == NULL) {
        free(world);
        free(segment);
        free(delta);
        (void)smpi_fail(SMPI_ERR_NOMEM, "no memory for a world of %d ranks", size);
        return NULL;
    }
    world->rank = rank;
    world->size = size;
    world->cores = 1;
    world->driver = SMPI_DRIVER_NONE;
    world->segment = segment;
    world->delta = delta;
    world->fd = -1;
    const int64_t stream_min = smpi_setting_number(SMPI_SET_STREAM_MIN);
    smpi_world_tune(world, (uint64_t)smpi_setting_number(SMPI_SET_STAGE_CHUNK),
                    stream_min >= 0 ? (uint64_t)stream_min : CACHE_WHEN_UNKNOWN);
    pthread_mutex_init(&world->parting_lock, NULL);
    return world;
}

void smpi_world_delete(smpi_world *world)
{
    if (world == NULL)
        return;
    if (world->heap != NULL)
        smpi_heap_delete(world);
    smpi_memfd_finish(world);
    smpi_range_release(world);
    if (world->fd >= 0)
        close(world->fd);
    while (world->parting != NULL) {
        struct smpi_parting *parting = world->parting;
        world->parting = parting->next;
        free(parting);
    }
    pthread_mutex_destroy(&world->parting_lock);
    free(world->segment);
    free(world->delta);
    free(world);
}

uint64_t smpi_world_base(const smpi_world *world, int rank)
{
    return rank >= 0 && rank < world->size ? (uint64_t)(uintptr_t)world->segment[rank] : 0;
}

uint64_t smpi_world_bytes(const smpi_world *world)
{
    return world->bytes;
}

const char *smpi_world_driver(const smpi_world *world)
{
    return world->driver;
}

void smpi_world_tune(smpi_world *world, uint64_t stage_chunk, uint64_t stream_min)
{
    world->stage_chunk = stage_chunk < PAGE ? PAGE : stage_chunk / PAGE * PAGE;
    world->stream_min = stream_min;
}

void smpi_world_set_hook(smpi_world *world, int (*hook)(void))
{
    world->hook = hook;
}

int smpi_world_start(smpi_world *world, const uint64_t *peer_bases, int cores, uint64_t heap_max, int populate)
{
    if (strcmp(world->driver, SMPI_DRIVER_NONE) == 0)
        return smpi_fail(SMPI_ERR_ARG, "a world cannot start before its segments are mapped");
    if (world->heap != NULL)
        return smpi_fail(SMPI_ERR_ARG, "the world was started before");
    if (peer_bases[world->rank] != smpi_world_base(world, world->rank))
        return smpi_fail(SMPI_ERR_ARG, "rank %d says its segment begins at %#llx, but it is mapped at %p", world->rank,
                         (unsigned long long)peer_bases[world->rank], (void *)world->segment[world->rank]);
    for (int r = 0; r < world->size; r++)
        world->delta[r] = (ptrdiff_t)(smpi_world_base(world, r) - peer_bases[r]);
    world->cores = cores < 1 ? 1 : cores;
    return smpi_heap_create(world, heap_max, populate);
}
