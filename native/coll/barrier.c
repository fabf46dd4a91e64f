/* barrier.c - Barrier: an operator that is nothing but its entry. */
#include "enter.h"

int smpi_barrier(smpi_comm *comm)
{
    smpi_begin(comm, SMPI_BARRIER);
    const int status = smpi_enter(comm);
    if (status == SMPI_OK) {
        smpi_count(comm, SMPI_BARRIER, SMPI_PATH_INLINE, 0);
    }
    return status;
}
