/* barrier.c - Barrier: an operator that is nothing but its entry. */
#include "request.h"

static void fill(struct smpi_request *request, struct smpi_line *line)
{
    (void)request;
    (void)line;
}

void smpi_plan_barrier(smpi_request *request)
{
    request->operator_ = SMPI_BARRIER;
    request->fill = fill;
    request->proceed = smpi_request_done;
}

int smpi_barrier(smpi_comm *comm)
{
    struct smpi_request request = {.comm = comm};
    smpi_plan_barrier(&request);
    return smpi_request_run(&request);
}
