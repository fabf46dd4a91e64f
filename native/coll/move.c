/* move.c - see move.h. */
#include "move.h"

#include "../engine/kernels.h"
#include "../engine/layout.h"
#include "../memory/shadow.h"
#include "request.h"
#include "stage.h"

#define LINE_MASK (~(size_t)(SMPI_LINE - 1))

static char *here(const struct smpi_comm *comm, int rank, uint64_t address)
{
    return smpi_shadow(comm->world, comm->members[rank], address);
}

static const smpi_layout *layout_at(const struct smpi_comm *comm, int rank, uint64_t address)
{
    return address ? (const smpi_layout *)(void *)here(comm, rank, address) : NULL;
}

/* Bytes [first, last) of a slice. */
static void copy_slice(const struct smpi_move *move, int source, int destination, struct smpi_slice slice, size_t first,
                       size_t last)
{
    char *dst = here(move->comm, destination, slice.dst);
    const char *src = here(move->comm, source, slice.src);
    if (slice.src_layout || slice.dst_layout) {
        smpi_layout_copy(layout_at(move->comm, destination, slice.dst_layout), dst,
                         layout_at(move->comm, source, slice.src_layout), src, first, last);
    } else {
        move->copy(dst + first, src + first, last - first);
    }
}

/* Sources in an order that starts at the destination itself, so that ranks do not all read from the same one at once. */
static int source_at(const struct smpi_comm *comm, int destination, int i)
{
    return (destination + i) % comm->size;
}

static int is_staged(const struct smpi_comm *comm, int source)
{
    return !(smpi_line_of(comm, source)->flags & SMPI_FLAG_SEND_REGISTERED);
}

static size_t total_bytes(const struct smpi_move *move)
{
    size_t total = 0;
    for (int destination = 0; destination < move->comm->size; destination++) {
        for (int source = 0; source < move->comm->size; source++) {
            total += move->map(move->comm, source, destination).bytes;
        }
    }
    return total;
}

/* Bytes [from, to) of the row of all slices, destination by destination. */
static void move_part(const struct smpi_move *move, size_t from, size_t to)
{
    const struct smpi_comm *comm = move->comm;
    size_t at = 0;
    for (int destination = 0; destination < comm->size && at < to; destination++) {
        for (int i = 0; i < comm->size && at < to; i++) {
            const int source = source_at(comm, destination, i);
            const struct smpi_slice slice = move->map(comm, source, destination);
            const size_t first = from > at ? from - at : 0;
            const size_t last = to - at < slice.bytes ? to - at : slice.bytes;
            if (first < last) {
                copy_slice(move, source, destination, slice, first, last);
            }
            at += slice.bytes;
        }
    }
}

/* This rank's share of every block to everybody who gets it, past the caches: every byte is read once. */
static void spread_shares(const struct smpi_move *move)
{
    const struct smpi_comm *comm = move->comm;
    char **sinks = (char **)(void *)comm->pointers;
    for (int source = 0; source < comm->size; source++) {
        size_t block = 0;
        const char *from = NULL;
        int count = 0;
        for (int destination = 0; destination < comm->size; destination++) {
            const struct smpi_slice slice = move->map(comm, source, destination);
            if (slice.bytes) {
                block = slice.bytes;
                from = here(comm, source, slice.src);
                sinks[count++] = here(comm, destination, slice.dst);
            }
        }
        const size_t share = (block / (size_t)comm->size + SMPI_LINE) & LINE_MASK;
        const size_t start = share * (size_t)comm->rank;
        if (start < block) {
            const size_t bytes = block - start < share ? block - start : share;
            smpi_kernels()->stream_to_all(sinks, count, start, from + start, bytes);
        }
    }
}

/* What this rank receives from sources it can read: registered ones and itself. */
static void pull_direct(const struct smpi_move *move)
{
    const struct smpi_comm *comm = move->comm;
    for (int i = 0; i < comm->size; i++) {
        const int source = source_at(comm, comm->rank, i);
        const struct smpi_slice slice = move->map(comm, source, comm->rank);
        if (slice.bytes && (source == comm->rank || !is_staged(comm, source))) {
            copy_slice(move, source, comm->rank, slice, 0, slice.bytes);
        }
    }
}

/* The longest slice that has to be staged. */
static size_t longest_staged(const struct smpi_move *move)
{
    size_t longest = 0;
    for (int source = 0; source < move->comm->size; source++) {
        for (int destination = 0; destination < move->comm->size && is_staged(move->comm, source); destination++) {
            const size_t bytes = source == destination ? 0 : move->map(move->comm, source, destination).bytes;
            longest = bytes > longest ? bytes : longest;
        }
    }
    return longest;
}

/* Where the source's stage has what goes to destination in this round. */
static char *stage_for(const struct smpi_move *move, int source, int destination, size_t round)
{
    char *stage = smpi_stage_in(move->comm, source, round, move->round_bytes);
    const int place = destination - (destination > source); /* nothing is staged for the source itself */
    return move->one_block ? stage : stage + (size_t)place * move->chunk;
}

/* The chunk of a slice that travels in `round`: its offset is round * chunk; 0 bytes when the slice is shorter. */
static size_t chunk_bytes(const struct smpi_move *move, size_t bytes, size_t round)
{
    const size_t at = round * move->chunk;
    return at >= bytes ? 0 : bytes - at < move->chunk ? bytes - at : move->chunk;
}

static void copy_in(const struct smpi_move *move, size_t round)
{
    const struct smpi_comm *comm = move->comm;
    if (!is_staged(comm, comm->rank)) {
        return;
    }
    for (int destination = 0; destination < comm->size; destination++) {
        const struct smpi_slice slice = move->map(comm, comm->rank, destination);
        const size_t bytes = destination == comm->rank ? 0 : chunk_bytes(move, slice.bytes, round);
        if (bytes) {
            char *stage = stage_for(move, comm->rank, destination, round);
            const char *src = here(comm, comm->rank, slice.src);
            const size_t first = round * move->chunk;
            if (slice.src_layout) {
                smpi_layout_copy(NULL, stage - first, layout_at(comm, comm->rank, slice.src_layout), src, first,
                                 first + bytes);
            } else {
                smpi_kernels()->stream(stage, src + first, bytes);
            }
            if (move->one_block) {
                break;
            }
        }
    }
}

static void pull_staged(const struct smpi_move *move, size_t round)
{
    const struct smpi_comm *comm = move->comm;
    for (int i = 1; i < comm->size; i++) {
        const int source = source_at(comm, comm->rank, i);
        const struct smpi_slice slice = move->map(comm, source, comm->rank);
        const size_t bytes = is_staged(comm, source) ? chunk_bytes(move, slice.bytes, round) : 0;
        if (bytes) {
            const char *stage = stage_for(move, source, comm->rank, round);
            char *dst = here(comm, comm->rank, slice.dst);
            const size_t first = round * move->chunk;
            if (slice.dst_layout) {
                smpi_layout_copy(layout_at(comm, comm->rank, slice.dst_layout), dst, NULL, stage - first, first,
                                 first + bytes);
            } else {
                move->copy(dst + first, stage, bytes);
            }
        }
    }
}

static int last_round(struct smpi_request *request)
{
    pull_direct(&request->move);
    return smpi_sync_then(request, smpi_request_done);
}

/* Everybody's stage holds this round. */
static int next_round(struct smpi_request *request)
{
    struct smpi_move *move = &request->move;
    copy_in(move, move->round + 1);
    pull_staged(move, move->round);
    move->round++;
    return move->round < move->rounds ? smpi_sync_then(request, next_round) : last_round(request);
}

int smpi_move(struct smpi_request *request, smpi_slice_map *map, int one_block)
{
    struct smpi_comm *comm = request->comm;
    struct smpi_move *move = &request->move;
    *move = (struct smpi_move){.comm = comm, .map = map, .one_block = one_block};
    const size_t total = total_bytes(move);
    const int stream = 2 * total > comm->world->stream_min;
    move->copy = stream ? smpi_kernels()->stream : smpi_kernels()->copy;

    if (smpi_all_have(comm, SMPI_FLAG_SEND_REGISTERED) && smpi_all_have(comm, SMPI_FLAG_RECV_REGISTERED)) {
        request->path = SMPI_PATH_DIRECT;
        if (stream && one_block) {
            spread_shares(move);
        } else {
            const size_t share = total / (size_t)comm->size;
            const size_t from = share * (size_t)comm->rank;
            move_part(move, from, comm->rank == comm->size - 1 ? total : from + share);
        }
        return smpi_sync_then(request, smpi_request_done);
    }
    const size_t longest = longest_staged(move);
    const size_t slices = one_block || comm->size < 2 ? 1 : (size_t)comm->size - 1; /* of one source in one round */
    move->round_bytes = smpi_stage_round(comm, longest * slices);
    move->chunk = one_block ? move->round_bytes : move->round_bytes / slices & LINE_MASK;
    move->rounds = (longest + move->chunk - 1) / move->chunk;
    request->path = move->rounds ? SMPI_PATH_STAGED : SMPI_PATH_DIRECT;
    copy_in(move, 0);
    return move->rounds ? smpi_sync_then(request, next_round) : last_round(request);
}
