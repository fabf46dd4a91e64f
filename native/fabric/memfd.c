/* memfd.c - the driver memfd: one sparse memory file per rank, its descriptor handed to every peer, all mapped side by
 * side.
 *
 * The files have no names, so a killed job leaves nothing behind and the quota of /dev/shm does not count, and they are
 * far larger than memory: pages come on first touch.
 *
 * Invariant: a map that fails unmaps all it had mapped, so that the caller can try the next base. */
#include "memfd.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include "../base/error.h"

#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 0x0008U
#endif

int smpi_system_status(int error)
{
    switch (error) {
    case ENOSYS:
    case EPERM:
    case EACCES:
    case EOPNOTSUPP:
    case EAFNOSUPPORT:
    case EPROTONOSUPPORT:
    case ESOCKTNOSUPPORT:
    case ENFILE:
    case EMFILE: return SMPI_ERR_REFUSED;
    default: return SMPI_ERR_SYS;
    }
}

static void close_fd(int *fd)
{
    if (*fd >= 0)
        close(*fd);
    *fd = -1;
}

struct smpi_memfd *smpi_memfd_state(struct smpi_world *world)
{
    if (world->memfd != NULL)
        return world->memfd;
    struct smpi_memfd *memfd = malloc(sizeof *memfd);
    int *fds = malloc((size_t)world->size * sizeof *fds);
    if (memfd == NULL || fds == NULL) {
        free(memfd);
        free(fds);
        (void)smpi_fail(SMPI_ERR_NOMEM, "no memory for the descriptors of %d ranks", world->size);
        return NULL;
    }
    for (int r = 0; r < world->size; r++)
        fds[r] = -1;
    *memfd = (struct smpi_memfd){.listener = -1, .fds = fds};
    world->memfd = memfd;
    return memfd;
}

int smpi_memfd_open(smpi_world *world, uint64_t bytes)
{
    if (bytes == 0 || bytes % SMPI_SEGMENT_UNIT != 0 || bytes > INT64_MAX / (uint64_t)world->size)
        return smpi_fail(SMPI_ERR_ARG, "%d segments of %llu bytes: not a multiple of 2 MiB, or too much", world->size,
                         (unsigned long long)bytes);
    if (strcmp(world->driver, SMPI_DRIVER_NONE) != 0 || (world->memfd != NULL && world->memfd->fds[world->rank] >= 0))
        return smpi_fail(SMPI_ERR_ARG, "this world has a segment already");
    /* Asked before ftruncate, which answers with a signal (SIGXFSZ) that ends the process. */
    struct rlimit limit;
    if (getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY && bytes > limit.rlim_cur)
        return smpi_fail(SMPI_ERR_REFUSED,
                         "the limit of file sizes (ulimit -f, %llu bytes) forbids a memory file of %llu bytes",
                         (unsigned long long)limit.rlim_cur, (unsigned long long)bytes);
    struct smpi_memfd *memfd = smpi_memfd_state(world);
    if (memfd == NULL)
        return SMPI_ERR_NOMEM;

    char name[32];
    snprintf(name, sizeof name, "stratampi-%d", world->rank);
    int fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING | MFD_NOEXEC_SEAL);
    if (fd < 0 && errno == EINVAL) /* before Linux 6.3; from then on vm.memfd_noexec may insist on that flag */
        fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd < 0)
        return smpi_fail(smpi_system_status(errno), "memfd_create: %s", strerror(errno));
    int status;
    if (ftruncate(fd, (off_t)bytes) != 0)
        status =
            smpi_fail(errno == EINVAL || errno == EFBIG ? SMPI_ERR_REFUSED : smpi_system_status(errno),
                      "ftruncate of the memory file to %llu bytes: %s", (unsigned long long)bytes, strerror(errno));
    else if (fcntl(fd, F_ADD_SEALS, SMPI_MEMFD_SEALS) != 0)
        status = smpi_fail(smpi_system_status(errno), "sealing the memory file: %s", strerror(errno));
    else {
        memfd->fds[world->rank] = fd;
        world->bytes = bytes;
        return SMPI_OK;
    }
    close(fd);
    return status;
}

int smpi_memfd_map(smpi_world *world, uint64_t base)
{
    struct smpi_memfd *memfd = world->memfd;
    if (memfd == NULL || strcmp(world->driver, SMPI_DRIVER_NONE) != 0)
        return smpi_fail(SMPI_ERR_ARG, "map comes after exchange, once");
    for (int r = 0; r < world->size; r++)
        if (memfd->fds[r] < 0)
            return smpi_fail(SMPI_ERR_ARG, "the descriptor of rank %d is not here", r);
    uint64_t total = world->bytes * (uint64_t)world->size;
    if (base % SMPI_SEGMENT_UNIT != 0 || base > UINT64_MAX - total)
        return smpi_fail(SMPI_ERR_ARG, "segments cannot begin at %#llx", (unsigned long long)base);
    char *begin = smpi_range_reserve(base, total);
    if (begin == NULL)
        return smpi_fail(errno == EINVAL ? SMPI_ERR_SYS : SMPI_ERR_REFUSED,
                         "no address range of %llu bytes at %#llx: %s%s", (unsigned long long)total,
                         (unsigned long long)base, strerror(errno),
                         errno == ENOMEM ? " (ulimit -v, or no such addresses on this system)" : "");
    for (int r = 0; r < world->size; r++) {
        void *at = mmap(begin + (uint64_t)r * world->bytes, world->bytes, PROT_READ | PROT_WRITE,
                        MAP_SHARED | MAP_NORESERVE | MAP_FIXED, memfd->fds[r], 0);
        if (at == MAP_FAILED) {
            int status = smpi_fail(SMPI_ERR_REFUSED, "mmap of rank %d's segment: %s", r, strerror(errno));
            munmap(begin, total);
            return status;
        }
    }
    /* A core dump would fault in every page of every segment, terabytes of them. */
    (void)madvise(begin, total, MADV_DONTDUMP);
    smpi_range_use(world, begin);
    world->driver = SMPI_DRIVER_MEMFD;
    world->fd = memfd->fds[world->rank];
    memfd->fds[world->rank] = -1;
    return SMPI_OK;
}

void smpi_memfd_finish(smpi_world *world)
{
    struct smpi_memfd *memfd = world->memfd;
    if (memfd == NULL)
        return;
    for (int r = 0; r < world->size; r++)
        close_fd(&memfd->fds[r]);
    close_fd(&memfd->listener);
    free(memfd->fds);
    free(memfd);
    world->memfd = NULL;
    if (strcmp(world->driver, SMPI_DRIVER_NONE) == 0)
        world->bytes = 0;
}
