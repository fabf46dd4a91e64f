/* numpy.c - the heap as NumPy's allocator (NEP 49), without NumPy's headers.
 *
 * NumPy keeps with each array the handler that allocated it, and frees through that one whenever and in whatever
 * thread the array dies. So handlers are never freed, and every handler frees by address: what lies in the segment
 * goes back to the heap, anything else to free(). An array may have been born under `always` in a forked child
 * (malloc), or have moved from malloc to the heap while it grew; nobody needs to remember.
 *
 * NumPy calls with the GIL held. Nothing here calls Python, waits for a peer, or blocks longer than the heap's lock. */
#include <malloc.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "heap.h"

/* PyDataMemAllocator and PyDataMem_Handler of numpy/ndarraytypes.h, version 1; a part of NumPy's stable C API since
 * 1.22. */
struct allocator {
    void *ctx;
    void *(*malloc)(void *ctx, size_t bytes);
    void *(*calloc)(void *ctx, size_t count, size_t bytes);
    void *(*realloc)(void *ctx, void *block, size_t bytes);
    void (*free)(void *ctx, void *block, size_t bytes);
};

struct numpy_handler {
    char name[127]; /* what np.lib's get_handler_name() says */
    uint8_t version;
    struct allocator allocator;
};

struct handler {
    struct numpy_handler numpy;
    smpi_world *world;
    uint64_t min;      /* smaller arrays come from malloc */
    int may_fall_back; /* to malloc, when the heap has no room */
    struct handler *next;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct handler *handlers; /* of all worlds; arrays point to them until the process ends */

static void *allocate(const struct handler *handler, size_t bytes, int zeroed)
{
    if (handler->world->heap && bytes >= handler->min) {
        void *block = smpi_heap_alloc(handler->world, bytes, zeroed);
        if (block || !handler->may_fall_back) {
            return block;
        }
    }
    return zeroed ? calloc(1, bytes ? bytes : 1) : malloc(bytes ? bytes : 1);
}

static void *numpy_malloc(void *ctx, size_t bytes)
{
    return allocate(ctx, bytes, 0);
}

static void *numpy_calloc(void *ctx, size_t count, size_t bytes)
{
    size_t total;
    return __builtin_mul_overflow(count, bytes, &total) ? NULL : allocate(ctx, total, 1);
}

static void numpy_free(void *ctx, void *block, size_t bytes)
{
    const struct handler *handler = ctx;
    (void)bytes;
    if (smpi_heap_made(handler->world, block)) {
        smpi_heap_free(handler->world, block);
    } else {
        free(block);
    }
}

static void *numpy_realloc(void *ctx, void *block, size_t bytes)
{
    const struct handler *handler = ctx;
    int in_heap = smpi_heap_made(handler->world, block);
    if (in_heap) {
        void *moved = smpi_heap_realloc(handler->world, block, bytes);
        if (moved || !handler->may_fall_back) {
            return moved;
        }
    } else if (!block || !handler->world->heap || bytes < handler->min) {
        return realloc(block, bytes ? bytes : 1);
    }
    /* Out of a full heap, or a small array that has grown enough to belong there (np.fromiter, ndarray.resize). */
    void *moved = allocate(handler, bytes, 0);
    if (moved) {
        size_t old_bytes = in_heap ? smpi_heap_block_bytes(handler->world, block) : malloc_usable_size(block);
        memcpy(moved, block, old_bytes < bytes ? old_bytes : bytes);
        numpy_free(ctx, block, 0);
    }
    return moved;
}

static void *handler_for(smpi_world *world, const char *name, uint64_t min, int may_fall_back)
{
    pthread_mutex_lock(&lock);
    struct handler *handler = handlers;
    while (handler && !(handler->world == world && handler->min == min && handler->may_fall_back == may_fall_back)) {
        handler = handler->next;
    }
    if (!handler && (handler = calloc(1, sizeof *handler))) {
        strncpy(handler->numpy.name, name, sizeof handler->numpy.name - 1);
        handler->numpy.version = 1;
        handler->numpy.allocator = (struct allocator){handler, numpy_malloc, numpy_calloc, numpy_realloc, numpy_free};
        handler->world = world;
        handler->min = min;
        handler->may_fall_back = may_fall_back;
        handler->next = handlers;
        handlers = handler;
    }
    pthread_mutex_unlock(&lock);
    return handler ? &handler->numpy : NULL;
}

void *smpi_numpy_handler_always(smpi_world *world)
{
    return handler_for(world, "stratampi", 0, 0);
}

void *smpi_numpy_handler_hook(smpi_world *world, uint64_t register_min)
{
    return handler_for(world, "stratampi_hook", register_min, 1);
}
