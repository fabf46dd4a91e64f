/* heap.c - the registering allocator: two zones over this rank's segment, one lock, one limit.
 *
 *   segment   | small: 1/16, granules of 128 B, blocks below 16 KiB | large: the rest, granules of one page        |
 *                                                                     ^ high: never used before, reads as zero
 *
 * What is taken and what is free stands in the zones' private tags (zone.h), never in the segment: a peer's stray
 * write damages data, not the allocator. Granules of one line pair keep two small blocks from sharing a line that
 * two ranks write.
 *
 * Memory, as opposed to address space, comes on first touch and stays for reuse, because a page fault costs more
 * than the copy of a page. So the segment can be sized far past need, and what must be bounded is the memory held:
 * live bytes never exceed the limit, and before growth would take live plus kept over it, kept memory of free large
 * blocks is given back (MADV_REMOVE). Small blocks are not given back: their zone is reused whole and rarely
 * matters.
 *
 * Not done: a cache per thread. One uncontended lock costs less than the page or the NumPy header that comes with a
 * block. */
#include "heap.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "../base/error.h"
#include "fork.h"
#include "huge.h"
#include "zone.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

#define PAGE ((uint64_t)4096)
#define SMALL_GRANULE ((uint64_t)128)
#define SMALL_MAX ((uint64_t)16384) /* blocks from here on are large */
#define POPULATE_STEP ((uint64_t)2 << 20)

enum { SMALL, LARGE };

struct part {
    struct smpi_zone zone;
    char *base;
    unsigned shift;     /* granule = 1 << shift bytes */
    uint64_t populated; /* bytes from base whose pages are reserved, if the heap populates */
};

struct smpi_heap {
    struct smpi_fork_guard guard;
    struct smpi_world *world;
    uintptr_t base;
    uint64_t bytes;
    uint64_t limit;
    int own_file;         /* a memory file of ours: reads zero where untouched, memory can be given back */
    _Atomic int closed;   /* 1 in a forked child */
    pthread_mutex_t lock; /* of all below */
    int populate;
    uint64_t live, peak, blocks;
    struct part parts[2];
};

/* What a new block needs before it is handed out: bytes at its start that may hold old contents. */
struct grant {
    char *block;
    uint64_t dirty;
};

static int is_closed(const struct smpi_heap *heap)
{
    return atomic_load_explicit(&heap->closed, memory_order_relaxed);
}

static struct part *part_of(struct smpi_heap *heap, const void *block)
{
    return &heap->parts[(const char *)block >= heap->parts[LARGE].base ? LARGE : SMALL];
}

static uint32_t granule_of(const struct part *part, const void *block)
{
    return (uint32_t)((uint64_t)((const char *)block - part->base) >> part->shift);
}

/* Granules that hold `bytes`; UINT64_MAX rounds to a number no zone has. */
static uint64_t granules_for(const struct part *part, uint64_t bytes)
{
    return bytes ? ((bytes - 1) >> part->shift) + 1 : 1;
}

/* The block must be live: anything else is an error of the caller after which nothing can be trusted, as with
 * free(). */
static uint32_t live_length(const struct part *part, const void *block, const char *caller)
{
    uint32_t at = granule_of(part, block);
    uint32_t length = at < part->zone.count && part->base + ((uint64_t)at << part->shift) == (const char *)block
                          ? smpi_zone_length(&part->zone, at)
                          : 0;
    if (!length) {
        fprintf(stderr, "stratampi: %s: %p is not a live block of the heap\n", caller, block);
        abort();
    }
    return length;
}

/* Bytes that hold memory: live ones and those kept for reuse. */
static uint64_t held(const struct smpi_heap *heap)
{
    uint64_t bytes = 0;
    for (int i = SMALL; i <= LARGE; i++) {
        const struct part *part = &heap->parts[i];
        bytes += (uint64_t)(part->zone.high - part->zone.clean) << part->shift;
    }
    return bytes;
}

static int punch(void *arg, uint32_t at, uint32_t n)
{
    const struct part *part = arg;
    return madvise(part->base + ((uint64_t)at << part->shift), (uint64_t)n << part->shift, MADV_REMOVE);
}

static void give_back(struct smpi_heap *heap)
{
    smpi_huge_forget(heap->world);
    struct part *part = &heap->parts[LARGE];
    smpi_zone_clean(&part->zone, punch, part);
    uint64_t high = (uint64_t)part->zone.high << part->shift;
    if (part->populated > high && madvise(part->base + high, part->populated - high, MADV_REMOVE) == 0) {
        part->populated = high;
    }
}

/* 0 if the system gave the pages of [start, end) from the part's base, or has no means to ask. */
static int populate(struct smpi_heap *heap, const struct part *part, uint64_t start, uint64_t end)
{
    int status;
    do {
        status = madvise(part->base + start, end - start, MADV_POPULATE_WRITE);
    } while (status && (errno == EINTR || errno == EAGAIN));
    if (status && errno == EINVAL) { /* before Linux 5.14 */
        heap->populate = 0;
        return 0;
    }
    return status;
}

/* Reserves the pages of the first n granules of free block `at`. */
static int reserve(struct smpi_heap *heap, struct part *part, uint32_t at, uint32_t n)
{
    uint64_t start = (uint64_t)at << part->shift, end = start + ((uint64_t)n << part->shift);
    uint64_t all = (uint64_t)part->zone.count << part->shift;
    if (!heap->populate) {
        return 0;
    }
    if (end <= part->populated) {
        int is_clean = at < part->zone.high && !smpi_zone_dirty(&part->zone, at, n);
        return is_clean ? populate(heap, part, start, end) : 0;
    }
    uint64_t page_end = (end + PAGE - 1) / PAGE * PAGE,
             step_end = (end + POPULATE_STEP - 1) / POPULATE_STEP * POPULATE_STEP;
    step_end = step_end < all ? step_end : all / PAGE * PAGE;
    if (step_end > page_end && populate(heap, part, part->populated, step_end) == 0) {
        part->populated = step_end;
        return 0;
    }
    if (populate(heap, part, part->populated, page_end)) {
        return -1;
    }
    part->populated = page_end;
    return 0;
}

static void count_live(struct smpi_heap *heap, uint64_t bytes)
{
    heap->live += bytes;
    heap->peak = heap->live > heap->peak ? heap->live : heap->peak;
}

/* Whether n granules more, of which `fresh` take new memory, stay under the limit. May give memory back: free blocks
 * stay where they are, but what smpi_zone_dirty said before is stale then. */
static int admit(struct smpi_heap *heap, const struct part *part, uint64_t n, uint64_t fresh)
{
    if (n << part->shift > heap->limit - heap->live) {
        return 0;
    }
    uint64_t now = held(heap);
    if (heap->own_file && now > heap->live && now + (fresh << part->shift) > heap->limit) {
        give_back(heap);
    }
    return 1;
}

static int take(struct smpi_heap *heap, struct part *part, uint64_t bytes, struct grant *grant)
{
    uint64_t n = granules_for(part, bytes);
    if (n > part->zone.count) {
        return 0;
    }
    uint32_t count = (uint32_t)n, at = smpi_zone_find(&part->zone, count);
    if (at == SMPI_ZONE_NONE || !admit(heap, part, n, n - smpi_zone_dirty(&part->zone, at, count)) ||
        reserve(heap, part, at, count)) {
        return 0;
    }
    grant->block = part->base + ((uint64_t)at << part->shift);
    grant->dirty = heap->own_file ? (uint64_t)smpi_zone_dirty(&part->zone, at, count) << part->shift : UINT64_MAX;
    smpi_zone_take(&part->zone, at, count);
    heap->blocks++;
    count_live(heap, n << part->shift);
    return 1;
}

/* Puts private copies over what was ever used of the segment. */
static void copy_in_child(const struct smpi_heap *heap)
{
    for (int i = SMALL; i <= LARGE; i++) {
        const struct part *part = &heap->parts[i];
        uint64_t bytes = (((uint64_t)part->zone.high << part->shift) + PAGE - 1) / PAGE * PAGE;
        void *copy = bytes
                         ? mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)
                         : MAP_FAILED;
        if (copy != MAP_FAILED) {
            memcpy(copy, part->base, bytes);
            void *view = mremap(copy, bytes, bytes, MREMAP_MAYMOVE | MREMAP_FIXED, part->base);
            (void)view; /* refused: it stays shared */
        }
    }
}

/* The child's view of its parent's segment becomes its own: it sees the contents as they are, and what it writes
 * stays with it. With the memory file's descriptor that is one call, without a copy (pages the child has not written
 * then follow what the parent still writes: mmap promises no snapshot); segments that somebody else mapped are
 * copied, and they are small. */
static void close_in_child(struct smpi_fork_guard *guard)
{
    struct smpi_heap *heap = (struct smpi_heap *)guard; /* its first member */
    const struct smpi_world *world = heap->world;
    atomic_store_explicit(&heap->closed, 1, memory_order_relaxed);
    void *view = MAP_FAILED;
    if (world->fd >= 0) {
        view = mmap(world->segment[world->rank], world->bytes, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE, world->fd, 0);
    }
    if (view == MAP_FAILED) {
        copy_in_child(heap);
    }
}

int smpi_heap_create(struct smpi_world *world, uint64_t heap_max, int populate_pages)
{
    struct smpi_heap *heap = calloc(1, sizeof *heap);
    if (!heap) {
        return smpi_fail(SMPI_ERR_NOMEM, "heap: no memory for its bookkeeping");
    }
    /* A window need not start at a page. */
    uintptr_t first = (uintptr_t)world->segment[world->rank], base = (first + PAGE - 1) & ~(uintptr_t)(PAGE - 1);
    uint64_t bytes = world->bytes > base - first ? (world->bytes - (base - first)) / PAGE * PAGE : 0;
    uint64_t small = bytes / 16 / PAGE * PAGE;
    heap->world = world;
    heap->base = base;
    heap->bytes = bytes;
    heap->own_file = strcmp(world->driver, "memfd") == 0;
    heap->populate = populate_pages;
    pthread_mutex_init(&heap->lock, NULL);
    for (int i = SMALL; i <= LARGE; i++) {
        struct part *part = &heap->parts[i];
        part->base = (char *)base + (i == LARGE ? small : 0);
        part->shift = (unsigned)__builtin_ctzll(i == LARGE ? PAGE : SMALL_GRANULE);
        smpi_zone_open(&part->zone, (i == LARGE ? bytes - small : small) >> part->shift);
    }
    heap->limit = heap_max < bytes ? heap_max : bytes;
    if (!heap->parts[LARGE].zone.count) {
        smpi_zone_close(&heap->parts[SMALL].zone);
        free(heap);
        return smpi_fail(SMPI_ERR_NOMEM, "heap: a segment of %llu bytes is too small, or no address space is left",
                         (unsigned long long)world->bytes);
    }
    smpi_fork_guard(&heap->guard, close_in_child);
    world->heap = heap;
    smpi_huge_open(world);
    return SMPI_OK;
}

void smpi_heap_delete(struct smpi_world *world)
{
    struct smpi_heap *heap = world->heap;
    if (heap) {
        world->heap = NULL;
        smpi_huge_close(world);
        smpi_fork_unguard(&heap->guard);
        smpi_zone_close(&heap->parts[SMALL].zone);
        smpi_zone_close(&heap->parts[LARGE].zone);
        pthread_mutex_destroy(&heap->lock);
        free(heap);
    }
}

void *smpi_heap_alloc(smpi_world *world, size_t bytes, int zeroed)
{
    struct smpi_heap *heap = world->heap;
    struct grant grant;
    if (is_closed(heap)) {
        return zeroed ? calloc(1, bytes ? bytes : 1) : malloc(bytes ? bytes : 1);
    }
    pthread_mutex_lock(&heap->lock);
    int done = (bytes < SMALL_MAX && take(heap, &heap->parts[SMALL], bytes, &grant)) ||
               take(heap, &heap->parts[LARGE], bytes, &grant);
    uint64_t live = heap->live;
    pthread_mutex_unlock(&heap->lock);
    if (!done) {
        smpi_fail(SMPI_ERR_NOMEM, "heap: no room for %zu bytes: %llu in use of at most %llu", bytes,
                  (unsigned long long)live, (unsigned long long)heap->limit);
        return NULL;
    }
    if (zeroed && grant.dirty) {
        memset(grant.block, 0, grant.dirty < bytes ? grant.dirty : bytes);
    }
    return grant.block;
}

/* 1 if the block could be given its new size where it lies. */
static int resize(struct smpi_heap *heap, void *block, size_t bytes)
{
    struct part *part = part_of(heap, block);
    uint32_t length = live_length(part, block, "smpi_heap_realloc"), at = granule_of(part, block);
    uint64_t n = granules_for(part, bytes);
    if (n <= length) {
        smpi_zone_shrink(&part->zone, at, (uint32_t)n);
        heap->live -= (length - n) << part->shift;
        return 1;
    }
    if (n > part->zone.count) {
        return 0;
    }
    uint32_t more = (uint32_t)n - length, behind = smpi_zone_room(&part->zone, at, (uint32_t)n);
    if (behind == SMPI_ZONE_NONE || !admit(heap, part, more, more - smpi_zone_dirty(&part->zone, behind, more)) ||
        reserve(heap, part, behind, more)) {
        return 0;
    }
    smpi_zone_grow(&part->zone, at, (uint32_t)n);
    count_live(heap, (uint64_t)more << part->shift);
    return 1;
}

void *smpi_heap_realloc(smpi_world *world, void *block, size_t bytes)
{
    struct smpi_heap *heap = world->heap;
    if (!block) {
        return smpi_heap_alloc(world, bytes, 0);
    }
    if (!smpi_heap_made(world, block)) { /* from malloc, in a forked child */
        return realloc(block, bytes ? bytes : 1);
    }
    if (!is_closed(heap)) {
        pthread_mutex_lock(&heap->lock);
        int done = resize(heap, block, bytes);
        pthread_mutex_unlock(&heap->lock);
        if (done) {
            return block;
        }
    }
    void *moved = smpi_heap_alloc(world, bytes, 0);
    if (moved) {
        size_t old_bytes = smpi_heap_block_bytes(world, block);
        memcpy(moved, block, old_bytes < bytes ? old_bytes : bytes);
        smpi_heap_free(world, block);
    }
    return moved;
}

void smpi_heap_free(smpi_world *world, void *block)
{
    struct smpi_heap *heap = world->heap;
    if (!block) {
        return;
    }
    if (is_closed(heap)) {
        if (!smpi_heap_made(world, block)) {
            free(block);
        }
        return;
    }
    pthread_mutex_lock(&heap->lock);
    struct part *part = part_of(heap, block);
    uint32_t length = live_length(part, block, "smpi_heap_free");
    smpi_zone_give(&part->zone, granule_of(part, block));
    heap->live -= (uint64_t)length << part->shift;
    heap->blocks--;
    pthread_mutex_unlock(&heap->lock);
}

int smpi_heap_owns(const smpi_world *world, uint64_t address, uint64_t bytes)
{
    const struct smpi_heap *heap = world->heap;
    if (!heap || is_closed(heap)) {
        return 0;
    }
    uint64_t offset = address - heap->base;
    return offset < heap->bytes && bytes <= heap->bytes - offset;
}

int smpi_heap_made(const struct smpi_world *world, const void *block)
{
    const struct smpi_heap *heap = world->heap;
    return heap && (uintptr_t)block - heap->base < heap->bytes;
}

size_t smpi_heap_block_bytes(const struct smpi_world *world, const void *block)
{
    struct smpi_heap *heap = world->heap;
    int locked = !is_closed(heap); /* in a forked child the lock may be held for ever, and the tags no longer change */
    if (locked) {
        pthread_mutex_lock(&heap->lock);
    }
    struct part *part = part_of(heap, block);
    size_t bytes = (size_t)live_length(part, block, "smpi_heap_block_bytes") << part->shift;
    if (locked) {
        pthread_mutex_unlock(&heap->lock);
    }
    return bytes;
}

void smpi_heap_stats(smpi_world *world, uint64_t *live, uint64_t *peak, uint64_t *cached, uint64_t *limit,
                     uint64_t *blocks)
{
    struct smpi_heap *heap = world->heap;
    uint64_t values[5] = {0};
    if (heap && !is_closed(heap)) {
        pthread_mutex_lock(&heap->lock);
        values[0] = heap->live;
        values[1] = heap->peak;
        values[2] = held(heap) - heap->live;
        values[3] = heap->limit;
        values[4] = heap->blocks;
        pthread_mutex_unlock(&heap->lock);
    }
    uint64_t *outputs[5] = {live, peak, cached, limit, blocks};
    for (int i = 0; i < 5; i++) {
        if (outputs[i]) {
            *outputs[i] = values[i];
        }
    }
}

int smpi_heap_is_valid(smpi_world *world)
{
    struct smpi_heap *heap = world->heap;
    if (!heap || is_closed(heap)) {
        return 1;
    }
    pthread_mutex_lock(&heap->lock);
    uint64_t live = 0, blocks = 0;
    int valid = 1;
    for (int i = SMALL; i <= LARGE; i++) {
        struct part *part = &heap->parts[i];
        uint64_t part_live, part_blocks;
        valid = valid && smpi_zone_is_valid(&part->zone, &part_live, &part_blocks);
        live += valid ? part_live << part->shift : 0;
        blocks += valid ? part_blocks : 0;
    }
    valid = valid && live == heap->live && blocks == heap->blocks && live <= heap->limit && heap->peak >= live;
    pthread_mutex_unlock(&heap->lock);
    return valid;
}
