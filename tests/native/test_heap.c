/* test_heap.c - the registering heap against its contract: contents survive, invariants hold, limits bind, nothing
 * is lost.
 *
 * Every rank's memory is one sparse memory file, as under the driver memfd, so that zeroing, giving back, and the
 * child's private view are the real ones. */
#include <pthread.h>
#include <stdint.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"
#include "memory/heap.h"
#include "memory/zone.h"

#define KIB ((uint64_t)1 << 10)
#define MIB ((uint64_t)1 << 20)
#define GIB ((uint64_t)1 << 30)

static struct {
    struct smpi_world world;
    char *segment;
    ptrdiff_t delta;
} one;

static smpi_world *start(uint64_t bytes, uint64_t heap_max, int populate)
{
    int fd = memfd_create("test_heap", MFD_CLOEXEC);
    REQUIRE(fd >= 0 && ftruncate(fd, (off_t)bytes) == 0);
    one.segment = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
    REQUIRE(one.segment != MAP_FAILED);
    one.world = (struct smpi_world){.rank = 0, .size = 1, .cores = 1, .driver = "memfd", .bytes = bytes, .fd = fd};
    one.world.segment = &one.segment;
    one.world.delta = &one.delta;
    REQUIRE(smpi_heap_create(&one.world, heap_max, populate) == SMPI_OK);
    return &one.world;
}

static void stop(void)
{
    CHECK(smpi_heap_is_valid(&one.world));
    smpi_heap_delete(&one.world);
    munmap(one.segment, one.world.bytes);
    close(one.world.fd);
}

static uint64_t memory_held(void)
{
    struct stat status;
    REQUIRE(fstat(one.world.fd, &status) == 0);
    return (uint64_t)status.st_blocks * 512;
}

static uint64_t live_bytes(void)
{
    uint64_t live;
    smpi_heap_stats(&one.world, &live, NULL, NULL, NULL, NULL);
    return live;
}

static uint64_t cached_bytes(void)
{
    uint64_t cached;
    smpi_heap_stats(&one.world, NULL, NULL, &cached, NULL, NULL);
    return cached;
}

static uint32_t next_random(uint64_t *state)
{
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(*state >> 33);
}

static int is_filled(const unsigned char *block, size_t bytes, unsigned char value)
{
    return bytes == 0 || (block[0] == value && memcmp(block, block + 1, bytes - 1) == 0);
}

/* Sizes of all magnitudes up to 1 MiB, so that both zones and every way of splitting and merging are met. */
static size_t random_size(uint64_t *state)
{
    unsigned bits = next_random(state) % 21;
    return next_random(state) % (((size_t)1 << bits) + 1);
}

struct slot {
    unsigned char *block;
    size_t bytes;
    unsigned char value;
};

static void churn(smpi_world *world, uint64_t seed, int steps, int check_every)
{
    enum { SLOTS = 64 };
    struct slot slots[SLOTS] = {0};
    for (int step = 0; step < steps; step++) {
        struct slot *slot = &slots[next_random(&seed) % SLOTS];
        size_t bytes = random_size(&seed);
        if (!slot->block) {
            int zeroed = (int)(next_random(&seed) & 1);
            slot->block = smpi_heap_alloc(world, bytes, zeroed);
            REQUIRE(slot->block != NULL);
            CHECK(!zeroed || is_filled(slot->block, bytes, 0));
            CHECK_EQ((uintptr_t)slot->block % (bytes < 16 * KIB ? 128 : 4096), 0);
            CHECK(smpi_heap_owns(world, (uintptr_t)slot->block, bytes));
        } else if (next_random(&seed) & 1) {
            size_t kept = bytes < slot->bytes ? bytes : slot->bytes;
            slot->block = smpi_heap_realloc(world, slot->block, bytes);
            REQUIRE(slot->block != NULL);
            CHECK(is_filled(slot->block, kept, slot->value));
        } else {
            CHECK(is_filled(slot->block, slot->bytes, slot->value));
            smpi_heap_free(world, slot->block);
            slot->block = NULL;
            continue;
        }
        slot->bytes = bytes;
        slot->value = (unsigned char)next_random(&seed);
        memset(slot->block, slot->value, bytes);
        if (check_every && step % check_every == 0) {
            CHECK(smpi_heap_is_valid(world));
        }
    }
    for (int i = 0; i < SLOTS; i++) {
        if (slots[i].block) {
            CHECK(is_filled(slots[i].block, slots[i].bytes, slots[i].value));
            smpi_heap_free(world, slots[i].block);
        }
    }
}

static void test_random(void)
{
    smpi_world *world = start(64 * GIB, 32 * GIB, 0);
    churn(world, 1, 20000, 50);
    CHECK_EQ(live_bytes(), 0);
    stop();
    world = start(64 * GIB, 32 * GIB, 1);
    churn(world, 2, 3000, 50);
    stop();
    world = start(256 * MIB, 24 * MIB, 1); /* tight: memory is given back and reserved again all the time */
    churn(world, 3, 6000, 10);
    CHECK(memory_held() <= 24 * MIB + 4 * MIB);
    stop();
}

static void test_zeroing(void)
{
    smpi_world *world = start(64 * MIB, 64 * MIB, 0);
    for (size_t bytes = 1; bytes <= 4 * MIB; bytes = bytes * 3 + 1) {
        unsigned char *block = smpi_heap_alloc(world, bytes, 1);
        REQUIRE(block != NULL);
        CHECK(is_filled(block, bytes, 0));
        memset(block, 0xff, bytes);
        smpi_heap_free(world, block);
        unsigned char *again = smpi_heap_alloc(world, bytes, 1); /* the same memory, now dirty */
        CHECK(again == block);
        CHECK(is_filled(again, bytes, 0));
        smpi_heap_free(world, again);
    }
    unsigned char *fresh = smpi_heap_alloc(world, 32 * MIB, 1); /* half dirty, half never touched */
    CHECK(is_filled(fresh, 32 * MIB, 0));
    stop();

    world = start(8 * GIB, 8 * GIB, 0);
    uint64_t before = memory_held();
    CHECK(smpi_heap_alloc(world, 4 * GIB, 1) != NULL);
    CHECK_EQ(memory_held(), before); /* untouched memory is zero already and costs nothing */
    stop();
}

static void test_reuse(void)
{
    smpi_world *world = start(64 * GIB, 64 * GIB, 0);
    void *guard[40], *block[40];
    for (int i = 0; i < 40; i++) { /* sizes that are no size class */
        block[i] = smpi_heap_alloc(world, 100 * KIB + 4101 * (uint64_t)i * 3, 0);
        guard[i] = smpi_heap_alloc(world, 16 * KIB, 0);
        CHECK(block[i] && guard[i]);
    }
    for (int i = 0; i < 40; i++) {
        smpi_heap_free(world, block[i]);
        CHECK(smpi_heap_alloc(world, 100 * KIB + 4101 * (uint64_t)i * 3, 0) == block[i]);
    }
    stop();
}

static void test_coalescing(void)
{
    enum { BLOCKS = 1500 };
    static void *blocks[BLOCKS];
    smpi_world *world = start(64 * MIB, 64 * MIB, 0);
    uint64_t seed = 7, whole = 60 * MIB; /* the large zone */
    void *first = smpi_heap_alloc(world, whole, 0);
    REQUIRE(first != NULL);
    CHECK(smpi_heap_alloc(world, 16 * KIB, 0) == NULL);
    smpi_heap_free(world, first);
    for (int i = 0; i < BLOCKS; i++) {
        blocks[i] = smpi_heap_alloc(world, next_random(&seed) % (48 * KIB), 0);
        REQUIRE(blocks[i] != NULL);
    }
    for (int i = BLOCKS - 1; i > 0; i--) { /* free in a random order */
        int j = (int)(next_random(&seed) % (uint32_t)(i + 1));
        void *swap = blocks[i];
        blocks[i] = blocks[j];
        blocks[j] = swap;
    }
    for (int i = 0; i < BLOCKS; i++) {
        smpi_heap_free(world, blocks[i]);
        if (i % 100 == 0) {
            CHECK(smpi_heap_is_valid(world));
        }
    }
    CHECK_EQ(live_bytes(), 0);
    CHECK(smpi_heap_alloc(world, whole, 0) == first); /* one extent again */
    stop();
}

static void test_exhaustion(void)
{
    static const size_t sizes[] = {1, 100, 5000, 16 * KIB, 1 * MIB};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        smpi_world *world = start(16 * MIB, 16 * MIB, 1);
        void **list = NULL, **block;
        uint64_t blocks = 0, counted;
        while ((block = smpi_heap_alloc(world, sizes[i] < sizeof list ? sizeof list : sizes[i], 0))) {
            *block = list;
            list = block;
            blocks++;
        }
        CHECK(strstr(smpi_reason(), "no room") != NULL);
        CHECK(smpi_heap_is_valid(world));
        smpi_heap_stats(world, NULL, NULL, NULL, NULL, &counted);
        CHECK_EQ(blocks, counted);
        CHECK(live_bytes() >= (i < 3 ? 16 : 15) * MIB - (1 * MIB - 1)); /* small ones take both zones */
        while (list) {
            block = list;
            list = *block;
            smpi_heap_free(world, block);
        }
        CHECK_EQ(live_bytes(), 0);
        stop();
    }
}

static void test_limit(void)
{
    smpi_world *world = start(1 * GIB, 8 * MIB, 0);
    uint64_t live, peak, cached, limit, blocks;
    void *half = smpi_heap_alloc(world, 4 * MIB, 0), *other = smpi_heap_alloc(world, 4 * MIB, 0);
    REQUIRE(half && other);
    CHECK(smpi_heap_alloc(world, 1, 0) == NULL);
    CHECK(smpi_heap_realloc(world, other, 5 * MIB) == NULL);
    memset(other, 1, 4 * MIB); /* still ours */
    smpi_heap_stats(world, &live, &peak, &cached, &limit, &blocks);
    CHECK_EQ(live, 8 * MIB);
    CHECK_EQ(peak, 8 * MIB);
    CHECK_EQ(cached, 0);
    CHECK_EQ(limit, 8 * MIB);
    CHECK_EQ(blocks, 2);
    smpi_heap_free(world, half);
    CHECK_EQ(cached_bytes(), 4 * MIB);
    CHECK(smpi_heap_alloc(world, 4 * MIB + 1, 0) == NULL);
    CHECK(smpi_heap_realloc(world, other, 8 * MIB) == other); /* in place, into memory behind it */
    stop();
}

/* Fragments must not add up: what is held stays near the limit, although the free blocks fit nothing that is asked
 * for. */
static void test_give_back(void)
{
    for (int populate = 0; populate < 2; populate++) {
        smpi_world *world = start(4 * GIB, 64 * MIB, populate);
        unsigned char *fences[24];
        for (uint64_t i = 0; i < 24; i++) {
            uint64_t bytes = (4 + i) * MIB;
            unsigned char *block = smpi_heap_alloc(world, bytes, 0);
            REQUIRE(block != NULL);
            memset(block, 0xee, bytes);
            fences[i] = smpi_heap_alloc(world, 16 * KIB, 1);
            REQUIRE(fences[i] != NULL);
            memset(fences[i], (int)i, 16 * KIB);
            smpi_heap_free(world, block);
            CHECK(smpi_heap_is_valid(world));
            CHECK(memory_held() <= 64 * MIB + 2 * MIB);
        }
        for (uint64_t i = 0; i < 24; i++) {
            CHECK(is_filled(fences[i], 16 * KIB, (unsigned char)i));
        }
        for (uint64_t i = 0; i < 24; i++) { /* given back or not, zeroed means zero */
            uint64_t bytes = (27 - i) * MIB;
            unsigned char *block = smpi_heap_alloc(world, bytes, 1);
            REQUIRE(block != NULL);
            CHECK(is_filled(block, bytes, 0));
            memset(block, 0xdd, bytes);
            smpi_heap_free(world, block);
            CHECK(smpi_heap_is_valid(world));
            CHECK(memory_held() <= 64 * MIB + 2 * MIB);
        }
        stop();
    }
}

static void test_populate(void)
{
    smpi_world *world = start(1 * GIB, 1 * GIB, 1);
    CHECK(smpi_heap_alloc(world, 1 * MIB, 0) != NULL);
    if (memory_held() == 0) { /* before Linux 5.14 */
        stop();
        return;
    }
    CHECK(memory_held() >= 1 * MIB && memory_held() <= 4 * MIB);
    CHECK(smpi_heap_alloc(world, 20 * MIB, 0) != NULL);
    CHECK(memory_held() >= 21 * MIB && memory_held() <= 24 * MIB);
    stop();

    /* The file ends before its mapping does: the system refuses the pages, as when its file system is full. */
    world = start(64 * MIB, 64 * MIB, 1);
    REQUIRE(ftruncate(world->fd, 16 * (off_t)MIB) == 0);
    unsigned char *inside = smpi_heap_alloc(world, 8 * MIB, 0);
    REQUIRE(inside != NULL);
    memset(inside, 1, 8 * MIB);
    CHECK(smpi_heap_alloc(world, 16 * MIB, 0) == NULL);
    CHECK(smpi_heap_realloc(world, inside, 32 * MIB) == NULL);
    CHECK(smpi_heap_is_valid(world));
    unsigned char *still = smpi_heap_alloc(world, 3 * MIB, 0);
    REQUIRE(still != NULL);
    memset(still, 2, 3 * MIB);
    CHECK(is_filled(inside, 8 * MIB, 1));
    stop();
}

static void test_realloc(void)
{
    smpi_world *world = start(1 * GIB, 1 * GIB, 0);
    unsigned char *block = smpi_heap_realloc(world, NULL, 20 * KIB);
    REQUIRE(block != NULL);
    memset(block, 3, 20 * KIB);
    CHECK(smpi_heap_realloc(world, block, 300 * KIB) == block); /* free behind */
    unsigned char *fence = smpi_heap_alloc(world, 16 * KIB, 0);
    CHECK(smpi_heap_realloc(world, block, 30 * KIB) == block);
    CHECK(smpi_heap_realloc(world, block, 300 * KIB) == block); /* what it gave up is still free */
    unsigned char *moved = smpi_heap_realloc(world, block, 400 * KIB);
    CHECK(moved && moved != block && is_filled(moved, 20 * KIB, 3));
    unsigned char *small = smpi_heap_alloc(world, 10, 0);
    memset(small, 4, 10);
    unsigned char *large = smpi_heap_realloc(world, small, 1 * MIB);
    CHECK(large && is_filled(large, 10, 4));
    CHECK(smpi_heap_realloc(world, large, 0) == large);
    CHECK(smpi_heap_is_valid(world));
    smpi_heap_free(world, large);
    smpi_heap_free(world, moved);
    smpi_heap_free(world, fence);
    smpi_heap_free(world, NULL);
    CHECK_EQ(live_bytes(), 0);
    stop();
}

static void test_huge_sizes(void)
{
    static const size_t sizes[] = {SIZE_MAX,        SIZE_MAX - 1, SIZE_MAX - 127,
                                   SIZE_MAX - 4095, SIZE_MAX / 2, (size_t)1 << 44};
    smpi_world *world = start(64 * GIB, 64 * GIB, 0);
    void *block = smpi_heap_alloc(world, 100, 0);
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        CHECK(smpi_heap_alloc(world, sizes[i], 0) == NULL);
        CHECK(smpi_heap_alloc(world, sizes[i], 1) == NULL);
        CHECK(smpi_heap_realloc(world, block, sizes[i]) == NULL);
    }
    CHECK_EQ(live_bytes(), 128);
    stop();
}

static void test_owns(void)
{
    smpi_world *world = start(64 * MIB, 64 * MIB, 0);
    uint64_t base = (uintptr_t)one.segment, bytes = 64 * MIB;
    CHECK(smpi_heap_owns(world, base, bytes));
    CHECK(smpi_heap_owns(world, base + bytes - 1, 1));
    CHECK(smpi_heap_owns(world, base, 0));
    CHECK(!smpi_heap_owns(world, base, bytes + 1));
    CHECK(!smpi_heap_owns(world, base - 1, 2));
    CHECK(!smpi_heap_owns(world, base + bytes, 0));
    CHECK(!smpi_heap_owns(world, base + bytes - 1, 2));
    CHECK(!smpi_heap_owns(world, base + 1, UINT64_MAX));
    CHECK(!smpi_heap_owns(world, 0, 1));
    stop();
    CHECK(!smpi_heap_owns(world, base, 1));
}

static void test_tiny_segments(void)
{
    static const uint64_t sizes[] = {4 * KIB, 64 * KIB, 1 * MIB, 2 * MIB + 4 * KIB, 4 * MIB};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        smpi_world *world = start(sizes[i], UINT64_MAX, 1);
        unsigned char *block = smpi_heap_alloc(world, 1, 1);
        REQUIRE(block != NULL);
        *block = 1;
        unsigned char *page = smpi_heap_alloc(world, 16 * KIB, 1);
        CHECK((page != NULL) == (sizes[i] >= 64 * KIB));
        smpi_heap_free(world, page);
        smpi_heap_free(world, block);
        CHECK_EQ(live_bytes(), 0);
        stop();
    }
}

static void *churn_thread(void *argument)
{
    churn(&one.world, (uint64_t)(uintptr_t)argument, 4000, 0);
    return NULL;
}

/* Blocks freed by another thread than the one that allocated them. */
static _Atomic(void *) handed_over[32];

static void *free_thread(void *argument)
{
    int *allocated = argument;
    for (int done = 0; done < *allocated;) {
        for (int i = 0; i < 32; i++) {
            void *block = atomic_exchange(&handed_over[i], NULL);
            if (block) {
                smpi_heap_free(&one.world, block);
                done++;
            }
        }
    }
    return NULL;
}

static void test_threads(void)
{
    enum { THREADS = 4 };
    pthread_t threads[THREADS], freer;
    start(64 * GIB, 32 * GIB, 1);
    for (int i = 0; i < THREADS; i++) {
        REQUIRE(pthread_create(&threads[i], NULL, churn_thread, (void *)(uintptr_t)(i + 1)) == 0);
    }
    for (int i = 0; i < THREADS; i++) {
        pthread_join(threads[i], NULL);
    }
    CHECK_EQ(live_bytes(), 0);
    int count = 5000;
    uint64_t seed = 5;
    REQUIRE(pthread_create(&freer, NULL, free_thread, &count) == 0);
    for (int i = 0; i < count; i++) {
        void *block = smpi_heap_alloc(&one.world, random_size(&seed), 0), *none = NULL;
        REQUIRE(block != NULL);
        while (!atomic_compare_exchange_weak(&handed_over[i % 32], &none, block)) {
            none = NULL;
        }
    }
    pthread_join(freer, NULL);
    CHECK_EQ(live_bytes(), 0);
    stop();
}

/* What the child found wrong, as a number of its own; 0 if nothing. */
static int child_of(smpi_world *world, unsigned char *block, size_t bytes)
{
    if (!is_filled(block, bytes, 5)) {
        return 1;
    }
    memset(block, 6, bytes); /* must stay in the child */
    if (smpi_heap_owns(world, (uintptr_t)block, 1)) {
        return 2;
    }
    unsigned char *own = smpi_heap_alloc(world, 1 * MIB, 1);
    if (!own || smpi_heap_made(world, own) || !is_filled(own, 1 * MIB, 0)) {
        return 3;
    }
    memset(own, 7, 1 * MIB);
    own = smpi_heap_realloc(world, own, 2 * MIB);
    if (!own || !is_filled(own, 1 * MIB, 7)) {
        return 4;
    }
    smpi_heap_free(world, own);
    unsigned char *moved = smpi_heap_realloc(world, block, 2 * MIB);
    if (!moved || smpi_heap_made(world, moved) || !is_filled(moved, bytes, 6)) {
        return 5;
    }
    smpi_heap_free(world, moved);
    smpi_heap_free(world, block);
    smpi_heap_free(world, block); /* nothing, however often */
    return 0;
}

static int exit_code_in_child(smpi_world *world, unsigned char *block, size_t bytes)
{
    pid_t child = fork();
    REQUIRE(child >= 0);
    if (child == 0) {
        _exit(child_of(world, block, bytes));
    }
    int status;
    REQUIRE(waitpid(child, &status, 0) == child);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
}

static _Atomic int forks_done;

static void *allocate_until_forked(void *argument)
{
    uint64_t seed = 3;
    (void)argument;
    while (!atomic_load(&forks_done)) {
        smpi_heap_free(&one.world, smpi_heap_alloc(&one.world, random_size(&seed), 0));
    }
    return NULL;
}

static void test_fork(void)
{
    smpi_world *world = start(64 * GIB, 1 * GIB, 0);
    unsigned char *block = smpi_heap_alloc(world, 1 * MIB, 0);
    REQUIRE(block != NULL);
    memset(block, 5, 1 * MIB);
    pthread_t other; /* holds the heap's lock at many of the forks */
    atomic_store(&forks_done, 0);
    REQUIRE(pthread_create(&other, NULL, allocate_until_forked, NULL) == 0);
    for (int i = 0; i < 20; i++) {
        CHECK_EQ(exit_code_in_child(world, block, 1 * MIB), 0);
        CHECK(is_filled(block, 1 * MIB, 5));
    }
    atomic_store(&forks_done, 1);
    pthread_join(other, NULL);
    smpi_heap_free(world, block);
    CHECK_EQ(live_bytes(), 0);
    stop();
}

/* Segments of a window may start anywhere, are not known to be zero, and their memory is not ours to give back. */
static void test_window(void)
{
    unsigned char *memory = mmap(NULL, 2 * MIB, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    REQUIRE(memory != MAP_FAILED);
    memset(memory, 0xcc, 2 * MIB);
    char *segment = (char *)memory + 64;
    struct smpi_world world = {.size = 1, .driver = "window", .bytes = 2 * MIB - 64, .fd = -1};
    world.segment = &segment;
    REQUIRE(smpi_heap_create(&world, 1 * MIB, 0) == SMPI_OK);
    unsigned char *block = smpi_heap_alloc(&world, 512 * KIB, 1);
    REQUIRE(block != NULL);
    CHECK_EQ((uintptr_t)block % 4096, 0);
    CHECK(is_filled(block, 512 * KIB, 0));
    smpi_heap_free(&world, block);
    for (size_t i = 0; i < 40; i++) {
        size_t bytes = 100 * KIB + i * 4096;
        void *fence = smpi_heap_alloc(&world, 5 * KIB, 0);
        block = smpi_heap_alloc(&world, bytes, 1);
        REQUIRE(fence && block);
        CHECK(is_filled(block, bytes, 0));
        memset(block, 0xcc, bytes);
        smpi_heap_free(&world, block);
    }
    CHECK(smpi_heap_is_valid(&world));
    CHECK_EQ(memory[2 * MIB - 1], 0xcc);
    void *shared = smpi_heap_alloc(&world, 1, 0);
    memset(shared, 9, 1);
    block = smpi_heap_alloc(&world, 200 * KIB, 0);
    memset(block, 5, 200 * KIB);
    CHECK_EQ(exit_code_in_child(&world, block, 200 * KIB), 0);
    CHECK(is_filled(block, 200 * KIB, 5) && is_filled(shared, 1, 9));
    smpi_heap_delete(&world);
    world.bytes = 100;
    CHECK_EQ(smpi_heap_create(&world, 1 * MIB, 0), SMPI_ERR_NOMEM);
    CHECK(world.heap == NULL);
    munmap(memory, 2 * MIB);
}

/* A wrong free ends the process with its address rather than damaging the next owner's data. */
static void test_wrong_free(void)
{
    smpi_world *world = start(64 * MIB, 64 * MIB, 0);
    char *block = smpi_heap_alloc(world, 64 * KIB, 0), *gone = smpi_heap_alloc(world, 64 * KIB, 0);
    smpi_heap_free(world, gone);
    char *wrong[] = {block + 4096, block + 8, gone, block + 60 * KIB, one.segment + 128};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        pid_t child = fork();
        REQUIRE(child >= 0);
        if (child == 0) {
            REQUIRE(freopen("/dev/null", "w", stderr) != NULL);
            /* The child's heap is closed; a fresh one over the same layout is not. */
            world = start(64 * MIB, 64 * MIB, 0);
            char *base = smpi_heap_alloc(world, 64 * KIB, 0), *freed = smpi_heap_alloc(world, 64 * KIB, 0);
            smpi_heap_free(world, freed);
            smpi_heap_free(world, base + (wrong[i] - block));
            _exit(0);
        }
        int status;
        REQUIRE(waitpid(child, &status, 0) == child);
        CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT);
    }
    stop();
}

/* The handler as NumPy sees it. */
struct numpy_handler {
    char name[127];
    uint8_t version;
    void *ctx;
    void *(*malloc)(void *, size_t);
    void *(*calloc)(void *, size_t, size_t);
    void *(*realloc)(void *, void *, size_t);
    void (*free)(void *, void *, size_t);
};

static void test_numpy(void)
{
    smpi_world *world = start(64 * MIB, 4 * MIB, 0);
    struct numpy_handler *always = smpi_numpy_handler_always(world), *hook = smpi_numpy_handler_hook(world, 1000);
    REQUIRE(always && hook);
    CHECK_EQ(always->version, 1);
    CHECK_STR(always->name, "stratampi");
    CHECK(always == smpi_numpy_handler_always(world));
    CHECK(hook == smpi_numpy_handler_hook(world, 1000));
    CHECK(hook != smpi_numpy_handler_hook(world, 1001));

    char *small = always->malloc(always->ctx, 0), *large = always->calloc(always->ctx, 1000, 1000);
    CHECK(smpi_heap_made(world, small) && smpi_heap_made(world, large));
    CHECK(is_filled((unsigned char *)large, 1000000, 0));
    CHECK(always->malloc(always->ctx, 5 * MIB) == NULL);
    CHECK(always->calloc(always->ctx, SIZE_MAX / 2, 3) == NULL);
    CHECK(always->calloc(always->ctx, SIZE_MAX, SIZE_MAX) == NULL);
    CHECK(always->realloc(always->ctx, large, 5 * MIB) == NULL);
    hook->free(hook->ctx, small, 0); /* either frees what the other gave */
    always->free(always->ctx, large, 1000000);
    always->free(always->ctx, NULL, 0);
    always->free(always->ctx, malloc(10), 10);
    CHECK_EQ(live_bytes(), 0);

    small = hook->malloc(hook->ctx, 999);
    large = hook->malloc(hook->ctx, 1000);
    CHECK(!smpi_heap_made(world, small) && smpi_heap_made(world, large));
    char *beyond = hook->malloc(hook->ctx, 5 * MIB), *zero = hook->calloc(hook->ctx, 5, MIB);
    CHECK(beyond && zero && !smpi_heap_made(world, beyond) && !smpi_heap_made(world, zero));
    CHECK(hook->calloc(hook->ctx, SIZE_MAX / 2, 3) == NULL);
    memset(small, 8, 999);
    small = hook->realloc(hook->ctx, small, 500);
    CHECK(!smpi_heap_made(world, small));
    small = hook->realloc(hook->ctx, small, 100 * KIB);
    CHECK(smpi_heap_made(world, small) && is_filled((unsigned char *)small, 500, 8));
    small = hook->realloc(hook->ctx, small, 6 * MIB); /* more than the heap has */
    CHECK(small && !smpi_heap_made(world, small) && is_filled((unsigned char *)small, 500, 8));
    always->free(always->ctx, small, 0);
    hook->free(hook->ctx, large, 0);
    hook->free(hook->ctx, beyond, 0);
    hook->free(hook->ctx, zero, 0);
    CHECK_EQ(live_bytes(), 0);
    stop();
}

/* The check must be able to fail: damage each kind of bookkeeping and see that it is noticed. */
static void test_is_valid_notices(void)
{
    struct smpi_zone zone;
    uint64_t live, blocks;
    smpi_zone_open(&zone, 1000);
    REQUIRE(zone.count == 1000);
    smpi_zone_take(&zone, smpi_zone_find(&zone, 10), 10);
    smpi_zone_take(&zone, smpi_zone_find(&zone, 20), 20);
    smpi_zone_give(&zone, 0);
    REQUIRE(smpi_zone_is_valid(&zone, &live, &blocks) && live == 20 && blocks == 1);
    uint32_t *damaged[] = {&zone.tags[0].length,  &zone.tags[0].state,  &zone.tags[9].length,  &zone.tags[9].state,
                           &zone.tags[5].state,   &zone.tags[0].prev,   &zone.tags[10].length, &zone.tags[10].state,
                           &zone.tags[29].length, &zone.tags[30].state, &zone.power_map,       &zone.sub_map[0],
                           &zone.heads[0][10],    &zone.clean};
    for (size_t i = 0; i < sizeof damaged / sizeof *damaged; i++) {
        uint32_t old = *damaged[i];
        *damaged[i] = old ^ 4;
        CHECK(!smpi_zone_is_valid(&zone, &live, &blocks));
        *damaged[i] = old;
        CHECK(smpi_zone_is_valid(&zone, &live, &blocks));
    }
    smpi_zone_close(&zone);
}

int main(void)
{
    CHECK_RUN(test_random);
    CHECK_RUN(test_zeroing);
    CHECK_RUN(test_reuse);
    CHECK_RUN(test_coalescing);
    CHECK_RUN(test_exhaustion);
    CHECK_RUN(test_limit);
    CHECK_RUN(test_give_back);
    CHECK_RUN(test_populate);
    CHECK_RUN(test_realloc);
    CHECK_RUN(test_huge_sizes);
    CHECK_RUN(test_owns);
    CHECK_RUN(test_tiny_segments);
    CHECK_RUN(test_threads);
    CHECK_RUN(test_fork);
    CHECK_RUN(test_window);
    CHECK_RUN(test_wrong_free);
    CHECK_RUN(test_numpy);
    CHECK_RUN(test_is_valid_notices);
    return check_result();
}
