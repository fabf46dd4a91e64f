/* stage.c - see stage.h. */
#include "stage.h"

#include "../memory/shadow.h"

#define PAGE 4096

size_t smpi_stage_chunk(void)
{
    const int64_t chunk = smpi_setting_number(SMPI_SET_STAGE_CHUNK);
    return chunk < PAGE ? PAGE : (size_t)chunk / PAGE * PAGE;
}

char *smpi_stage_of(struct smpi_comm *comm)
{
    if (!comm->stage) {
        comm->stage = smpi_heap_alloc(comm->world, 4 * smpi_stage_chunk(), 0);
    }
    return comm->stage;
}

static char *part_of(const struct smpi_comm *comm, int rank, size_t index)
{
    char *stage = smpi_shadow(comm->world, comm->members[rank], smpi_line_of(comm, rank)->stage);
    return stage + index * smpi_stage_chunk();
}

char *smpi_stage_in(const struct smpi_comm *comm, int rank, size_t round)
{
    return part_of(comm, rank, round % 2);
}

char *smpi_stage_out(const struct smpi_comm *comm, int rank, size_t round)
{
    return part_of(comm, rank, 2 + round % 2);
}
