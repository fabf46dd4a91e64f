/* memfd.h - the driver memfd between its two halves: memfd.c makes and maps memory files, meeting.c hands them round. */
#ifndef SMPI_FABRIC_MEMFD_H
#define SMPI_FABRIC_MEMFD_H

#include <fcntl.h>

#include "driver.h"

/* Every segment's file has these seals: it can never be resized, so a page of it can never vanish under a reader
 * (SIGBUS). */
#define SMPI_MEMFD_SEALS (F_SEAL_SHRINK | F_SEAL_GROW)

struct smpi_memfd {
    int listener; /* -1 until listen */
    int *fds;     /* [size] descriptors of the segments, -1 where not here; fds[rank] is our own */
};

/* The driver's state, made by the first call that needs it; NULL without memory (the reason is written). */
struct smpi_memfd *smpi_memfd_state(struct smpi_world *world);

/* SMPI_ERR_REFUSED for the errno values by which a sandbox, a container or an old kernel says "not here", else
 * SMPI_ERR_SYS. */
int smpi_system_status(int error);

#endif
