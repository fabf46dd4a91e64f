/* request.c - see request.h. */
#include "request.h"

#include <stdlib.h>
#include <string.h>

#include "../base/error.h"
#include "../memory/heap.h"
#include "../sync/wait.h"

int smpi_sync_then(struct smpi_request *request, int (*next)(struct smpi_request *request))
{
    request->next = next;
    smpi_post_phase(request->comm);
    return SMPI_AGAIN;
}

int smpi_request_done(struct smpi_request *request)
{
    (void)request;
    return SMPI_OK;
}

struct smpi_pieces smpi_keep_pieces(struct smpi_request *request, int which, const void *base, const int64_t *counts,
                                    const int64_t *displs)
{
    if (request->tables) {
        const size_t size = (size_t)request->comm->size;
        int64_t *kept = request->tables + (size_t)which * 2 * size;
        memcpy(kept, counts, size * sizeof *kept);
        memcpy(kept + size, displs, size * sizeof *kept);
        counts = kept;
        displs = kept + size;
    }
    return (struct smpi_pieces){base, counts, displs, NULL};
}

static int agree(struct smpi_request *request)
{
    const int status = smpi_agree(request->comm);
    return status == SMPI_OK ? request->proceed(request) : status;
}

static int start(struct smpi_request *request)
{
    struct smpi_comm *comm = request->comm;
    request->next = agree;
    const int status = smpi_may_enter(comm);
    if (status) {
        return status;
    }
    smpi_pack(request->packs, request->pack_count);
    struct smpi_line *line = smpi_begin(comm, request->operator_);
    line->root = request->root;
    request->fill(request, line);
    request->path = SMPI_PATH_INLINE;
    smpi_post_line(comm);
    return SMPI_AGAIN;
}

static int end(struct smpi_request *request, int status)
{
    if (request->scratch) {
        smpi_heap_free(request->comm->world, request->scratch);
        request->scratch = NULL;
    }
    if (request->layouts) {
        smpi_heap_free(request->comm->world, request->layouts);
        request->layouts = NULL;
    }
    if (status == SMPI_OK) {
        smpi_unpack(request->unpacks, request->unpack_count);
    }
    if (request->comm->interrupted) {
        request->comm->interrupted = 0;
        status = status ? status
                        : smpi_fail(SMPI_ERR_INTERRUPTED, "interrupted; the %s had to be completed and is",
                                    smpi_operator_name(request->operator_));
    }
    if (status == SMPI_OK) {
        smpi_count(request->comm, request->operator_, request->path, request->passed);
    }
    return status;
}

static int run(struct smpi_request *request, int status)
{
    while (status == SMPI_AGAIN) {
        status = smpi_wait(request->comm);
        if (status == SMPI_OK) {
            status = request->next(request);
        }
    }
    return end(request, status);
}

int smpi_request_run(struct smpi_request *request)
{
    return run(request, start(request));
}

smpi_request *smpi_request_new(smpi_comm *comm)
{
    smpi_request *request = calloc(1, sizeof *request);
    int64_t *tables = calloc(4 * (size_t)comm->size, sizeof *tables);
    if (!request || !tables) {
        free(request);
        free(tables);
        return NULL;
    }
    request->comm = comm;
    request->tables = tables;
    return request;
}

void smpi_request_free(smpi_request *request)
{
    free(request->tables);
    free(request);
}

int smpi_request_start(smpi_request *request)
{
    request->status = start(request);
    return request->status == SMPI_AGAIN ? SMPI_OK : request->status;
}

int smpi_request_test(smpi_request *request)
{
    int status = request->status;
    while (status == SMPI_AGAIN) {
        status = smpi_poll(request->comm);
        if (status == SMPI_AGAIN) {
            return SMPI_AGAIN;
        }
        if (status == SMPI_OK) {
            request->steps++;
            status = request->next(request);
        }
        request->status = status == SMPI_AGAIN ? SMPI_AGAIN : end(request, status);
    }
    return request->status;
}

uint64_t smpi_request_steps(const smpi_request *request)
{
    return request->steps;
}

int smpi_request_wait(smpi_request *request, int64_t us)
{
    const int64_t until = us < 0 ? INT64_MAX : smpi_now_ns() + us * 1000;
    while (smpi_request_test(request) == SMPI_AGAIN && smpi_now_ns() < until) {
        smpi_doze(request->comm, until);
    }
    return request->status;
}

void smpi_plan_parts(smpi_request *request, const struct smpi_part *packs, size_t pack_count,
                     const struct smpi_part *unpacks, size_t unpack_count)
{
    request->packs = packs;
    request->pack_count = pack_count;
    request->unpacks = unpacks;
    request->unpack_count = unpack_count;
}

static void ask(struct smpi_request *request, struct smpi_line *line)
{
    smpi_ask_for_mpi(request->comm, line, request->why);
}

void smpi_plan_mpi(smpi_request *request, int operator_, int root, int why)
{
    request->operator_ = operator_;
    request->fill = ask;
    request->proceed = smpi_request_done; /* never: smpi_agree says SMPI_MPI */
    request->root = root;
    request->why = why;
}

int smpi_needs_mpi(smpi_comm *comm, int operator_, int root, int why)
{
    struct smpi_request request = {.comm = comm};
    smpi_plan_mpi(&request, operator_, root, why);
    return smpi_request_run(&request);
}
