/* ranks.h - N ranks as N threads of one process, over one shared mapping cut in N segments.
 *
 *   mapping    [ segment of 0   | segment of 1   | segment of 2   ]
 *   thread 0     world 0 ---------------- all bases equal, delta 0 (driver window: smpi_adopt)
 *
 * One mapping on purpose: ThreadSanitizer keeps its shadow per address, so two mappings of the same memory would hide every
 * race. One run at a time: the barrier and the gates of the running ranks are static.
 *
 *     static void body(smpi_world *world, int rank, int size, void *arg)
 *     {
 *         smpi_comm *comm = ranks_open(world, rank, size);
 *         CHECK_EQ(smpi_barrier(comm), SMPI_OK);
 *         smpi_comm_close(comm);
 *     }
 *     ranks_run(4, 64 << 20, body, NULL); */
#ifndef SMPI_TESTS_RANKS_H
#define SMPI_TESTS_RANKS_H

#include <pthread.h>
#include <stdint.h>
#include <sys/mman.h>
#include <unistd.h>

#include "check.h"
#include "stratampi.h"

#define RANKS_MAX 64
#define RANKS_ALIGN ((size_t)2 << 20)

typedef void ranks_body(smpi_world *world, int rank, int size, void *arg);

static struct {
    int size, cores;
    size_t bytes; /* of one segment */
    char *base;   /* of segment 0 */
    ranks_body *body;
    void *arg;
    pthread_barrier_t barrier;
    uint64_t gates[RANKS_MAX];
} ranks;

/* All ranks of the run wait for each other. Returns 1 on exactly one of them. */
static inline int ranks_barrier(void)
{
    return pthread_barrier_wait(&ranks.barrier) == PTHREAD_BARRIER_SERIAL_THREAD;
}

/* Collective: a communicator over all ranks of the run, communicator rank = supernode rank. */
static inline smpi_comm *ranks_open(smpi_world *world, int rank, int size)
{
    int32_t members[RANKS_MAX];
    uint64_t gates[RANKS_MAX];
    smpi_comm *comm = smpi_comm_new(world, rank, size);
    REQUIRE(comm != NULL);
    ranks.gates[rank] = smpi_comm_gate(comm);
    ranks_barrier();
    for (int i = 0; i < size; i++) {
        members[i] = i;
        gates[i] = ranks.gates[i];
    }
    ranks_barrier(); /* nobody overwrites gates for the next communicator before all have read */
    REQUIRE(smpi_comm_open(comm, members, gates) == SMPI_OK);
    return comm;
}

static inline void *ranks_thread(void *argument)
{
    int rank = (int)(intptr_t)argument;
    uint64_t bases[RANKS_MAX];
    for (int i = 0; i < ranks.size; i++) {
        bases[i] = (uint64_t)(uintptr_t)(ranks.base + (size_t)i * ranks.bytes);
    }
    smpi_world *world = smpi_world_new(rank, ranks.size);
    REQUIRE(world != NULL);
    REQUIRE(smpi_adopt(world, bases, ranks.bytes) == SMPI_OK);
    REQUIRE(smpi_world_start(world, bases, ranks.cores, ranks.bytes, 0) == SMPI_OK);
    ranks_barrier();
    ranks.body(world, rank, ranks.size, ranks.arg);
    ranks_barrier(); /* a peer may still look into this rank's segment and world */
    smpi_world_delete(world);
    return NULL;
}

/* Runs body on `size` ranks with segments of `bytes` (rounded up to 2 MiB; address space, pages come on first touch) and as
 * many cores as this machine has. Returns when all ranks have returned. */
static inline void ranks_run(int size, size_t bytes, ranks_body *body, void *arg)
{
    REQUIRE(0 < size && size <= RANKS_MAX);
    ranks.size = size;
    ranks.cores = (int)sysconf(_SC_NPROCESSORS_ONLN);
    ranks.bytes = (bytes + RANKS_ALIGN - 1) / RANKS_ALIGN * RANKS_ALIGN;
    ranks.body = body;
    ranks.arg = arg;
    size_t total = (size_t)size * ranks.bytes + RANKS_ALIGN;
    char *mapping = mmap(NULL, total, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    REQUIRE(mapping != MAP_FAILED);
    ranks.base = mapping + (RANKS_ALIGN - (uintptr_t)mapping % RANKS_ALIGN) % RANKS_ALIGN;
    REQUIRE(pthread_barrier_init(&ranks.barrier, NULL, (unsigned)size) == 0);
    pthread_t threads[RANKS_MAX];
    for (int i = 0; i < size; i++) {
        REQUIRE(pthread_create(&threads[i], NULL, ranks_thread, (void *)(intptr_t)i) == 0);
    }
    for (int i = 0; i < size; i++) {
        pthread_join(threads[i], NULL);
    }
    pthread_barrier_destroy(&ranks.barrier);
    munmap(mapping, total);
}

#endif
