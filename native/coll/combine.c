/* combine.c - see combine.h. */
#include "combine.h"

#include "../engine/kernels.h"
#include "../memory/shadow.h"
#include "request.h"
#include "stage.h"

#define BLOCK_BYTES 4096        /* combined at a time: stays in the first-level cache while it is copied to all */
#define STREAM_BLOCK_BYTES 1024 /* the same past the caches: short, so that reading and writing overlap */

static int receives(const struct smpi_combine *c, int rank)
{
    return c->root < 0 || c->root == rank;
}

static int has(const struct smpi_combine *c, int rank, int flag)
{
    return smpi_line_of(c->comm, rank)->flags & flag;
}

/* The elements of `round` that `rank` combines: whole cache lines as far as possible. */
static void part_of(const struct smpi_combine *c, size_t round, int rank, size_t *from, size_t *to)
{
    const size_t start = round * c->chunk;
    const size_t elements = c->count - start < c->chunk ? c->count - start : c->chunk;
    const size_t per_line = c->size < SMPI_LINE ? SMPI_LINE / c->size : 1;
    const size_t lines = (elements + per_line - 1) / per_line;
    const size_t ranks = (size_t)c->comm->size;
    const size_t r = (size_t)rank;
    const size_t first = (lines / ranks * r + (r < lines % ranks ? r : lines % ranks)) * per_line;
    const size_t last = first + (lines / ranks + (r < lines % ranks)) * per_line;
    *from = start + (first < elements ? first : elements);
    *to = start + (last < elements ? last : elements);
}

/* The sources' next block, which lies on pages that the hardware does not read ahead into. */
static void read_ahead(const struct smpi_combine *c, size_t offset, size_t bytes)
{
    for (int rank = 0; rank < c->comm->size; rank++) {
        for (size_t at = 0; at < bytes; at += SMPI_LINE) {
            __builtin_prefetch(c->source[rank] + offset + at, 0, 3);
        }
    }
}

static void combine_part(const struct smpi_combine *c, size_t round)
{
    const struct smpi_comm *comm = c->comm;
    size_t from, to;
    part_of(c, round, comm->rank, &from, &to);
    const size_t chunk_start = round * c->chunk * c->size;
    int sinks = 0;
    int staged_sinks = 0;
    for (int rank = 0; rank < comm->size; rank++) {
        const struct smpi_line *line = smpi_line_of(comm, rank);
        const int member = comm->members[rank];
        c->source[rank] = has(c, rank, SMPI_FLAG_SEND_REGISTERED)
                              ? smpi_shadow(comm->world, member, line->send)
                              : smpi_stage_in(comm, rank, round, c->round_bytes) - chunk_start;
        if (receives(c, rank)) {
            if (has(c, rank, SMPI_FLAG_RECV_REGISTERED)) {
                c->sink[sinks++] = smpi_shadow(comm->world, member, line->recv);
            } else {
                staged_sinks = 1;
            }
        }
    }
    if (staged_sinks) {
        c->sink[sinks++] = smpi_stage_out(comm, comm->rank, round, c->round_bytes) - chunk_start;
    }
    _Alignas(SMPI_LINE) char scratch[STREAM_BLOCK_BYTES];
    const size_t step = (c->stream ? STREAM_BLOCK_BYTES : BLOCK_BYTES) / c->size;
    for (size_t at = from; at < to; at += step) {
        const size_t elements = to - at < step ? to - at : step;
        const size_t offset = at * c->size;
        for (int rank = 0; rank < comm->size; rank++) {
            c->block[rank] = c->source[rank] + offset;
        }
        if (c->stream) {
            if (to - at >= 2 * step) {
                read_ahead(c, offset + STREAM_BLOCK_BYTES, STREAM_BLOCK_BYTES);
            }
            c->reduce(scratch, c->block, comm->size, elements);
            smpi_kernels()->stream_to_all(c->sink, sinks, offset, scratch, elements * c->size);
            continue;
        }
        c->reduce(c->sink[0] + offset, c->block, comm->size, elements);
        for (int i = 1; i < sinks; i++) {
            smpi_kernels()->copy(c->sink[i] + offset, c->sink[0] + offset, elements * c->size);
        }
    }
}

/* My unregistered source's chunk of `round` to my stage. */
static void copy_in(const struct smpi_combine *c, size_t round)
{
    const struct smpi_comm *comm = c->comm;
    const size_t start = round * c->chunk;
    if (start < c->count && !has(c, comm->rank, SMPI_FLAG_SEND_REGISTERED)) {
        const size_t elements = c->count - start < c->chunk ? c->count - start : c->chunk;
        const char *send = (const char *)(uintptr_t)smpi_line_of(comm, comm->rank)->send;
        (c->large ? smpi_kernels()->stream : smpi_kernels()->copy)(
            smpi_stage_in(comm, comm->rank, round, c->round_bytes), send + start * c->size, elements * c->size);
    }
}

/* Every owner's result of `round` to my unregistered receive buffer. */
static void copy_out(const struct smpi_combine *c, size_t round)
{
    const struct smpi_comm *comm = c->comm;
    if (!receives(c, comm->rank) || has(c, comm->rank, SMPI_FLAG_RECV_REGISTERED)) {
        return;
    }
    char *recv = (char *)(uintptr_t)smpi_line_of(comm, comm->rank)->recv;
    for (int i = 0; i < comm->size; i++) {
        const int owner = (comm->rank + i) % comm->size;
        size_t from, to;
        part_of(c, round, owner, &from, &to);
        smpi_kernels()->copy(recv + from * c->size,
                             smpi_stage_out(comm, owner, round, c->round_bytes) + (from - round * c->chunk) * c->size,
                             (to - from) * c->size);
    }
}

static int last_round(struct smpi_request *request)
{
    copy_out(&request->combine, request->combine.rounds - 1);
    return SMPI_OK;
}

/* Everybody's stage holds this round, as far as it is needed. */
static int next_round(struct smpi_request *request)
{
    struct smpi_combine *c = &request->combine;
    if (c->round > 0) {
        copy_out(c, c->round - 1);
    }
    copy_in(c, c->round + 1);
    combine_part(c, c->round);
    c->round++;
    return smpi_sync_then(request, c->round < c->rounds ? next_round : last_round);
}

int smpi_combine(struct smpi_request *request, int to_all)
{
    struct smpi_comm *comm = request->comm;
    const struct smpi_line *mine = smpi_line_of(comm, comm->rank);
    const size_t ranks = (size_t)comm->size;
    struct smpi_combine *c = &request->combine;
    *c = (struct smpi_combine){
        .comm = comm,
        .reduce = smpi_kernels()->reduce[mine->type][mine->op],
        .size = smpi_type_size(mine->type),
        .count = mine->count,
        .chunk = mine->count,
        .root = to_all ? -1 : mine->root,
        .source = (const char **)(void *)comm->pointers,
        .block = (const void **)(comm->pointers + ranks),
        .sink = (char **)(void *)(comm->pointers + 2 * ranks),
    };
    const int staged_sources = !smpi_all_have(comm, SMPI_FLAG_SEND_REGISTERED);
    int staged_sinks = 0;
    int sinks = 0;
    for (int rank = 0; rank < comm->size; rank++) {
        if (receives(c, rank)) {
            sinks++;
            staged_sinks |= !has(c, rank, SMPI_FLAG_RECV_REGISTERED);
        }
    }
    request->path = SMPI_PATH_DIRECT;
    if (staged_sources || staged_sinks) {
        request->path = SMPI_PATH_STAGED;
        c->round_bytes = smpi_stage_round(comm, c->count * c->size);
        c->chunk = c->round_bytes / c->size;
    }
    c->rounds = (c->count + c->chunk - 1) / c->chunk;
    c->large = c->count * c->size * (ranks + (size_t)sinks) > comm->world->stream_min;
    c->stream = c->large && !staged_sinks;
    copy_in(c, 0);
    return staged_sources ? smpi_sync_then(request, next_round) : next_round(request);
}
