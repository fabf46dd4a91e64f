/* combine.c - see combine.h. */
#include "combine.h"

#include "../engine/kernels.h"
#include "../memory/shadow.h"
#include "request.h"
#include "stage.h"

#define BLOCK_BYTES 4096        /* combined at a time: stays in the first-level cache while it is copied to all */
#define STREAM_BLOCK_BYTES 1024 /* the same past the caches: short, so that reading and writing overlap */

static struct smpi_result result_of(const struct smpi_combine *c, int rank)
{
    return c->map(c->request, rank);
}

static int has(const struct smpi_combine *c, int rank, int flag)
{
    return smpi_line_of(c->comm, rank)->flags & flag;
}

/* 1 if this rank may write rank's result where it belongs: in registered memory, or its own, if no peer still reads there. */
static int reaches(const struct smpi_combine *c, int rank)
{
    const int own = rank == c->comm->rank && (c->request->send || !result_of(c, rank).from);
    return own || has(c, rank, SMPI_FLAG_RECV_REGISTERED);
}

/* Elements that make up a cache line, or nearly so. */
static size_t per_line(const struct smpi_combine *c)
{
    return c->size < SMPI_LINE ? SMPI_LINE / c->size : 1;
}

/* The elements of `round` that `rank` combines: whole cache lines as far as possible. */
static void part_of(const struct smpi_combine *c, size_t round, int rank, size_t *from, size_t *to)
{
    const size_t start = round * c->chunk;
    const size_t elements = c->count - start < c->chunk ? c->count - start : c->chunk;
    const size_t lines = (elements + per_line(c) - 1) / per_line(c);
    const size_t ranks = (size_t)c->comm->size;
    const size_t r = (size_t)rank;
    const size_t first = (lines / ranks * r + (r < lines % ranks ? r : lines % ranks)) * per_line(c);
    const size_t last = first + (lines / ranks + (r < lines % ranks)) * per_line(c);
    *from = start + (first < elements ? first : elements);
    *to = start + (last < elements ? last : elements);
}

/* Bytes of a round's longest part. */
static size_t part_room(const struct smpi_combine *c)
{
    const size_t lines = (c->chunk + per_line(c) - 1) / per_line(c);
    const size_t ranks = (size_t)c->comm->size;
    return (lines + ranks - 1) / ranks * per_line(c) * c->size;
}

/* Where in `owner`'s stage the result for `rank` of a part would have its element 0, if the part starts with element `from`. */
static char *staged_sink(const struct smpi_combine *c, size_t round, int owner, int rank, size_t from)
{
    char *stage = smpi_stage_out(c->comm, owner, round, c->round_bytes);
    return stage + (c->prefixes ? (size_t)rank * part_room(c) : 0) - from * c->size;
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

/* Sets the sinks of elements from `from` on, of a part that starts at `part`, and returns their number; *to: where others begin. */
static int find_sinks(const struct smpi_combine *c, size_t round, size_t part, size_t from, size_t *to)
{
    const struct smpi_comm *comm = c->comm;
    int sinks = 0;
    int staged = 0;
    for (int rank = 0; rank < comm->size; rank++) {
        const struct smpi_result result = result_of(c, rank);
        const size_t end = result.from + result.count;
        char *sink = NULL;
        if (result.from <= from && from < end) {
            *to = end < *to ? end : *to;
            if (reaches(c, rank)) {
                sink = (char *)smpi_shadow(comm->world, comm->members[rank], smpi_line_of(comm, rank)->recv) -
                       result.from * c->size;
            } else if (c->prefixes || !staged) {
                sink = staged_sink(c, round, comm->rank, rank, part);
                staged = 1;
            }
        }
        if (sink || c->prefixes) {
            c->sink[sinks++] = sink;
        }
    }
    return sinks;
}

static void set_blocks(const struct smpi_combine *c, size_t offset)
{
    for (int rank = 0; rank < c->comm->size; rank++) {
        c->block[rank] = c->source[rank] + offset;
    }
}

/* One result, the same for all sinks. */
static void combine_once(const struct smpi_combine *c, size_t from, size_t to, int sinks)
{
    const int ranks = c->comm->size;
    _Alignas(SMPI_LINE) char scratch[STREAM_BLOCK_BYTES];
    const size_t step = (c->stream ? STREAM_BLOCK_BYTES : BLOCK_BYTES) / c->size;
    for (size_t at = from; at < to && sinks; at += step) {
        const size_t elements = to - at < step ? to - at : step;
        const size_t offset = at * c->size;
        set_blocks(c, offset);
        if (c->stream) {
            if (to - at >= 2 * step) {
                read_ahead(c, offset + STREAM_BLOCK_BYTES, STREAM_BLOCK_BYTES);
            }
            c->reduce(scratch, c->block, ranks, elements);
            smpi_kernels()->stream_to_all(c->sink, sinks, offset, scratch, elements * c->size);
            continue;
        }
        c->reduce(c->sink[0] + offset, c->block, ranks, elements);
        for (int i = 1; i < sinks; i++) {
            smpi_kernels()->copy(c->sink[i] + offset, c->sink[0] + offset, elements * c->size);
        }
    }
}

static void deliver(const struct smpi_combine *c, int rank, size_t offset, const void *result, size_t elements)
{
    if (c->sink[rank] && c->sink[rank] + offset != result) {
        (c->stream ? smpi_kernels()->stream : smpi_kernels()->copy)(c->sink[rank] + offset, result, elements * c->size);
    }
}

/* Rank by rank, each result from the one before. A source may be its rank's sink: it is combined before that is written. */
static void combine_prefixes(const struct smpi_combine *c, size_t from, size_t to)
{
    const int ranks = c->comm->size;
    const int exclusive = result_of(c, ranks - 1).sources < ranks;
    _Alignas(SMPI_LINE) char scratch[2][STREAM_BLOCK_BYTES];
    const size_t step = STREAM_BLOCK_BYTES / c->size;
    for (size_t at = from; at < to; at += step) {
        const size_t elements = to - at < step ? to - at : step;
        const size_t offset = at * c->size;
        set_blocks(c, offset);
        const void *before = NULL;
        for (int rank = 0; rank < ranks; rank++) {
            const void *upto = c->block[0];
            if (rank > 0) {
                const void *const pair[] = {before, c->block[rank]};
                c->reduce(scratch[rank % 2], pair, 2, elements);
                upto = scratch[rank % 2];
            }
            deliver(c, rank, offset, exclusive ? before : upto, elements);
            before = upto;
        }
    }
}

/* The same for types that are rounded once, at the end of each result: all from the sources, the last rank first, because no other
 * needs its source. */
static void combine_rounded_prefixes(const struct smpi_combine *c, size_t from, size_t to)
{
    _Alignas(SMPI_LINE) char scratch[STREAM_BLOCK_BYTES];
    const size_t step = STREAM_BLOCK_BYTES / c->size;
    for (size_t at = from; at < to; at += step) {
        const size_t elements = to - at < step ? to - at : step;
        const size_t offset = at * c->size;
        set_blocks(c, offset);
        for (int rank = c->comm->size - 1; rank >= 0; rank--) {
            if (c->sink[rank]) {
                c->reduce(scratch, c->block, result_of(c, rank).sources, elements);
                deliver(c, rank, offset, scratch, elements);
            }
        }
    }
}

static void combine_part(const struct smpi_combine *c, size_t round)
{
    const struct smpi_comm *comm = c->comm;
    size_t part, end;
    part_of(c, round, comm->rank, &part, &end);
    const size_t chunk_start = round * c->chunk * c->size;
    for (int rank = 0; rank < comm->size; rank++) {
        c->source[rank] = has(c, rank, SMPI_FLAG_SEND_REGISTERED)
                              ? smpi_shadow(comm->world, comm->members[rank], smpi_line_of(comm, rank)->send)
                              : smpi_stage_in(comm, rank, round, c->round_bytes) - chunk_start;
    }
    const int type = smpi_line_of(comm, comm->rank)->type;
    for (size_t from = part, to; from < end; from = to) {
        to = end;
        const int sinks = find_sinks(c, round, part, from, &to);
        if (!c->prefixes) {
            combine_once(c, from, to, sinks);
        } else if (type == SMPI_FLOAT16 || type == SMPI_BFLOAT16) {
            combine_rounded_prefixes(c, from, to);
        } else {
            combine_prefixes(c, from, to);
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

/* Every owner's result of `round` to my receive buffer, if they could not write there. */
static void copy_out(const struct smpi_combine *c, size_t round)
{
    const struct smpi_comm *comm = c->comm;
    const struct smpi_result mine = result_of(c, comm->rank);
    if (!mine.count || has(c, comm->rank, SMPI_FLAG_RECV_REGISTERED)) {
        return;
    }
    char *recv = (char *)(uintptr_t)smpi_line_of(comm, comm->rank)->recv;
    for (int i = 0; i < comm->size; i++) {
        const int owner = (comm->rank + i) % comm->size;
        size_t part, end;
        part_of(c, round, owner, &part, &end);
        const size_t from = mine.from > part ? mine.from : part;
        const size_t to = mine.from + mine.count < end ? mine.from + mine.count : end;
        if (from < to && (owner != comm->rank || !reaches(c, owner))) {
            smpi_kernels()->copy(recv + (from - mine.from) * c->size,
                                 staged_sink(c, round, owner, comm->rank, part) + from * c->size,
                                 (to - from) * c->size);
        }
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

int smpi_combine(struct smpi_request *request, smpi_result_map *map)
{
    struct smpi_comm *comm = request->comm;
    const struct smpi_line *mine = smpi_line_of(comm, comm->rank);
    const size_t ranks = (size_t)comm->size;
    struct smpi_combine *c = &request->combine;
    *c = (struct smpi_combine){
        .comm = comm,
        .request = request,
        .map = map,
        .reduce = smpi_kernels()->reduce[mine->type][mine->op],
        .size = smpi_type_size(mine->type),
        .count = mine->count,
        .chunk = mine->count,
        .source = (const char **)(void *)comm->pointers,
        .block = (const void **)(comm->pointers + ranks),
        .sink = (char **)(void *)(comm->pointers + 2 * ranks),
    };
    const int staged_sources = !smpi_all_have(comm, SMPI_FLAG_SEND_REGISTERED);
    int staged_sinks = 0;
    size_t touched = c->count * ranks; /* elements */
    for (int rank = 0; rank < comm->size; rank++) {
        const struct smpi_result result = result_of(c, rank);
        touched += result.count;
        staged_sinks |= result.count && !has(c, rank, SMPI_FLAG_RECV_REGISTERED);
        c->prefixes |= result.count && result.sources < comm->size;
    }
    request->path = SMPI_PATH_DIRECT;
    if (staged_sources || staged_sinks) {
        request->path = SMPI_PATH_STAGED;
        c->round_bytes = smpi_stage_round(comm, c->count * c->size);
        c->chunk = c->round_bytes / c->size;
        if (c->prefixes) { /* parts of equal length, so that one for every rank fits in the stage */
            c->chunk = c->round_bytes / SMPI_LINE / ranks * ranks * per_line(c);
        }
    }
    c->rounds = (c->count + c->chunk - 1) / c->chunk;
    c->large = touched * c->size > comm->world->stream_min;
    c->stream = c->large && !staged_sinks;
    copy_in(c, 0);
    return staged_sources ? smpi_sync_then(request, next_round) : next_round(request);
}
