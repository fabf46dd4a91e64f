/* stage.c - see stage.h. */
#include "stage.h"

#include "../memory/shadow.h"

#define PAGE 4096
#define ROUNDS_WANTED 4 /* of an operator, if they are then not shorter than … */
#define ROUND_MIN (128 << 10)

size_t smpi_stage_round(const struct smpi_comm *comm, size_t bytes)
{
    const size_t wanted =
        bytes / ROUNDS_WANTED < ROUND_MIN ? ROUND_MIN : (bytes / ROUNDS_WANTED + PAGE - 1) / PAGE * PAGE;
    return wanted < comm->world->stage_chunk ? wanted : comm->world->stage_chunk;
}

char *smpi_stage_of(struct smpi_comm *comm)
{
    if (!comm->stage) {
        comm->stage = smpi_heap_alloc(comm->world, 4 * comm->world->stage_chunk, 0);
    }
    return comm->stage;
}

char *smpi_stage_in(const struct smpi_comm *comm, int rank, size_t round, size_t round_bytes)
{
    char *stage = smpi_shadow(comm->world, comm->members[rank], smpi_line_of(comm, rank)->stage);
    return stage + round % (2 * comm->world->stage_chunk / round_bytes) * round_bytes;
}

char *smpi_stage_out(const struct smpi_comm *comm, int rank, size_t round, size_t round_bytes)
{
    return smpi_stage_in(comm, rank, round, round_bytes) + 2 * comm->world->stage_chunk;
}
