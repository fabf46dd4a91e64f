/* enter.c - publish, wait, compare: see enter.h. */
#include "enter.h"

#include <stdio.h>
#include <string.h>

#include "../base/error.h"
#include "../engine/layout.h"
#include "../memory/huge.h"
#include "stage.h"

static void add(_Atomic uint64_t *counter, uint64_t value)
{
    atomic_fetch_add_explicit(counter, value, memory_order_relaxed);
}

struct smpi_line *smpi_begin(struct smpi_comm *comm, int operator_)
{
    struct smpi_line *line = smpi_next_line(comm);
    line->operator_ = (uint8_t)operator_;
    line->type = line->op = line->unused = 0;
    line->root = 0;
    line->count = 0;
    line->flags = SMPI_FLAG_SEND_REGISTERED | SMPI_FLAG_RECV_REGISTERED;
    line->why = SMPI_WHY_NOT;
    return line;
}

static uint64_t signature_of(const struct smpi_line *line)
{
    uint64_t signature;
    memcpy(&signature, &line->operator_, sizeof signature);
    return signature;
}

/* One rank's arguments as its caller would write them. */
static void describe(const struct smpi_line *line, char *text, size_t size)
{
    const char *operator_ = smpi_operator_name(line->operator_);
    const unsigned long long count = line->count;
    if (line->flags & SMPI_FLAG_NEEDS_MPI) {
        snprintf(text, size, "%s(%s)", operator_, smpi_why_name(line->why));
        return;
    }
    switch ((enum smpi_operator)line->operator_) {
    case SMPI_BARRIER: snprintf(text, size, "%s()", operator_); break;
    case SMPI_BCAST: snprintf(text, size, "%s(%llu bytes, root %d)", operator_, count, line->root); break;
    case SMPI_REDUCE:
        snprintf(text, size, "%s(%llu x %s, %s, root %d)", operator_, count, smpi_type_name(line->type),
                 smpi_op_name(line->op), line->root);
        break;
    case SMPI_ALLREDUCE:
    case SMPI_REDUCE_SCATTER_BLOCK:
    case SMPI_SCAN:
    case SMPI_EXSCAN:
        snprintf(text, size, "%s(%llu x %s, %s)", operator_, count, smpi_type_name(line->type), smpi_op_name(line->op));
        break;
    case SMPI_REDUCE_SCATTER:
        snprintf(text, size, "%s(%llu x %s, %s, receives %llu)", operator_, count, smpi_type_name(line->type),
                 smpi_op_name(line->op), (unsigned long long)line->bytes);
        break;
    case SMPI_ALLGATHER:
    case SMPI_ALLTOALL: snprintf(text, size, "%s(%llu bytes from each rank)", operator_, count); break;
    case SMPI_ALLGATHERV:
    case SMPI_ALLTOALLV:
    case SMPI_ALLTOALLW:
        snprintf(text, size, "%s(sends %llu bytes)", operator_, (unsigned long long)line->bytes);
        break;
    case SMPI_GATHER:
    case SMPI_SCATTER: snprintf(text, size, "%s(%llu bytes a rank, root %d)", operator_, count, line->root); break;
    case SMPI_GATHERV:
    case SMPI_SCATTERV:
        snprintf(text, size, "%s(%llu bytes, root %d)", operator_, (unsigned long long)line->bytes, line->root);
        break;
    case SMPI_OPERATOR_COUNT: snprintf(text, size, "%s", operator_); break;
    }
}

int smpi_mismatch(struct smpi_comm *comm, const char *what)
{
    char text[1600];
    size_t used = 0;
    for (int rank = 0; rank < comm->size && used < sizeof text - 200; rank++) {
        char arguments[160];
        describe(smpi_line_of(comm, rank), arguments, sizeof arguments);
        used += (size_t)snprintf(text + used, sizeof text - used, "%srank %d: %s", rank ? "; " : "", rank, arguments);
    }
    return smpi_fail(SMPI_ERR_MISMATCH, "the ranks' arguments do not fit together (seen by rank %d): %s%s%s",
                     comm->rank, text, what ? "; " : "", what ? what : "");
}

static int aliased(struct smpi_comm *comm)
{
    int culprit = 0;
    while (!(smpi_line_of(comm, culprit)->flags & SMPI_FLAG_ALIAS)) {
        culprit++;
    }
    return smpi_fail(SMPI_ERR_ALIAS,
                     "%s: send and receive buffers of rank %d overlap (seen by rank %d); use MPI.IN_PLACE",
                     smpi_operator_name(smpi_line_of(comm, culprit)->operator_), culprit, comm->rank);
}

int smpi_agree(struct smpi_comm *comm)
{
    const struct smpi_line *mine = smpi_line_of(comm, comm->rank);
    const uint64_t signature = signature_of(mine);
    uint64_t differ = 0;
    int wrong = 0; /* whatever path the others ask for */
    int flags = 0;
    for (int rank = 0; rank < comm->size; rank++) {
        const struct smpi_line *line = smpi_line_of(comm, rank);
        differ |= (signature_of(line) ^ signature) | (line->count ^ mine->count);
        wrong |= (line->operator_ ^ mine->operator_) | (line->root ^ mine->root) | (line->flags & SMPI_FLAG_MISFIT);
        flags |= line->flags;
    }
    if (wrong || (differ && !(flags & SMPI_FLAG_NEEDS_MPI))) {
        return smpi_mismatch(comm, NULL);
    }
    if (flags & SMPI_FLAG_NEEDS_MPI) {
        smpi_count(comm, mine->operator_, SMPI_PATH_MPI, 0);
        return SMPI_MPI;
    }
    if (flags & SMPI_FLAG_ALIAS) {
        return aliased(comm);
    }
    return SMPI_OK;
}

void smpi_publish_stage(struct smpi_comm *comm, struct smpi_line *line)
{
    line->stage = (uint64_t)(uintptr_t)smpi_stage_of(comm);
    if (!line->stage) {
        smpi_ask_for_mpi(comm, line, SMPI_WHY_MEMORY);
    }
}

/* 1 if all of it is registered; it is then used once more. */
static int use_registered(const struct smpi_comm *comm, const void *data, size_t bytes)
{
    if (bytes && !smpi_heap_owns(comm->world, (uint64_t)(uintptr_t)data, bytes)) {
        return 0;
    }
    smpi_huge_use(comm->world, (uint64_t)(uintptr_t)data, bytes);
    return 1;
}

static int use_registered_pieces(const struct smpi_comm *comm, struct smpi_pieces pieces)
{
    for (int i = 0; i < comm->size; i++) {
        const struct smpi_layout *layout = pieces.layouts ? pieces.layouts[i] : NULL;
        int64_t low = 0, high = pieces.counts[i];
        if (layout && high) {
            smpi_layout_span(layout, high / layout->bytes, &low, &high);
        }
        if (!use_registered(comm, (const char *)pieces.base + pieces.displs[i] + low, (size_t)(high - low))) {
            return 0;
        }
    }
    return 1;
}

static void publish_send(struct smpi_comm *comm, struct smpi_line *line, const void *send, int registered)
{
    line->send = (uint64_t)(uintptr_t)send;
    if (!registered) {
        line->flags &= (uint8_t)~SMPI_FLAG_SEND_REGISTERED;
        smpi_publish_stage(comm, line);
    }
}

static void publish_recv(struct smpi_line *line, const void *recv, int registered)
{
    line->recv = (uint64_t)(uintptr_t)recv;
    if (!registered) {
        line->flags &= (uint8_t)~SMPI_FLAG_RECV_REGISTERED;
    }
}

void smpi_publish_send(struct smpi_comm *comm, struct smpi_line *line, const void *send, size_t bytes)
{
    publish_send(comm, line, send, use_registered(comm, send, bytes));
}

void smpi_publish_recv(struct smpi_comm *comm, struct smpi_line *line, const void *recv, size_t bytes)
{
    publish_recv(line, recv, use_registered(comm, recv, bytes));
}

void smpi_publish_send_pieces(struct smpi_comm *comm, struct smpi_line *line, struct smpi_pieces send)
{
    publish_send(comm, line, send.base, use_registered_pieces(comm, send));
}

void smpi_publish_recv_pieces(struct smpi_comm *comm, struct smpi_line *line, struct smpi_pieces recv)
{
    publish_recv(line, recv.base, use_registered_pieces(comm, recv));
}

void smpi_check_alias(struct smpi_line *line, const void *send, size_t send_bytes, const void *recv, size_t recv_bytes)
{
    const uint64_t from = (uint64_t)(uintptr_t)send;
    const uint64_t to = (uint64_t)(uintptr_t)recv;
    if (send && send_bytes && recv_bytes && from < to + recv_bytes && to < from + send_bytes) {
        line->flags |= SMPI_FLAG_ALIAS;
    }
}

/* The smallest range that holds all pieces; empty if all are. */
static void extent_of(const struct smpi_comm *comm, struct smpi_pieces pieces, uint64_t *from, uint64_t *to)
{
    *from = UINT64_MAX;
    *to = 0;
    for (int i = 0; i < comm->size; i++) {
        const uint64_t start = (uint64_t)(uintptr_t)pieces.base + (uint64_t)pieces.displs[i];
        if (pieces.counts[i]) {
            *from = start < *from ? start : *from;
            *to = start + (uint64_t)pieces.counts[i] > *to ? start + (uint64_t)pieces.counts[i] : *to;
        }
    }
}

void smpi_check_alias_pieces(const struct smpi_comm *comm, struct smpi_line *line, struct smpi_pieces send,
                             struct smpi_pieces recv)
{
    if (send.layouts || recv.layouts) {
        return; /* the blocks of one may lie in the gaps of the other */
    }
    uint64_t send_from, send_to, recv_from, recv_to;
    extent_of(comm, send, &send_from, &send_to);
    extent_of(comm, recv, &recv_from, &recv_to);
    if (send_from >= recv_to || recv_from >= send_to) {
        return;
    }
    for (int i = 0; i < comm->size; i++) {
        for (int j = 0; j < comm->size; j++) {
            smpi_check_alias(line, (const char *)send.base + send.displs[i], (size_t)send.counts[i],
                             (const char *)recv.base + recv.displs[j], (size_t)recv.counts[j]);
        }
    }
}

int smpi_all_have(const struct smpi_comm *comm, int flag)
{
    int flags = flag;
    for (int rank = 0; rank < comm->size; rank++) {
        flags &= smpi_line_of(comm, rank)->flags;
    }
    return flags != 0;
}

uint64_t smpi_digest_of(const int64_t *counts, int size)
{
    uint64_t digest = 14695981039346656037u; /* FNV-1a */
    for (int i = 0; i < size; i++) {
        digest = (digest ^ (uint64_t)counts[i]) * 1099511628211u;
        digest ^= digest >> 29;
    }
    return digest;
}

void smpi_count(struct smpi_comm *comm, int operator_, int path, size_t bytes)
{
    add(&comm->world->calls[operator_ * SMPI_PATH_COUNT + path], 1);
    if (bytes) {
        add(&comm->world->call_bytes[path], bytes);
    }
}

void smpi_ask_for_mpi(struct smpi_comm *comm, struct smpi_line *line, int why)
{
    line->flags |= SMPI_FLAG_NEEDS_MPI;
    line->why = (uint8_t)why;
    add(&comm->world->why[why], 1);
}

void smpi_stats(const smpi_world *world, uint64_t *calls, uint64_t *bytes, uint64_t *why)
{
    for (int i = 0; i < SMPI_OPERATOR_COUNT * SMPI_PATH_COUNT; i++) {
        calls[i] = smpi_read_relaxed(&world->calls[i]);
    }
    for (int i = 0; i < SMPI_PATH_COUNT; i++) {
        bytes[i] = smpi_read_relaxed(&world->call_bytes[i]);
    }
    for (int i = 0; i < SMPI_WHY_COUNT; i++) {
        why[i] = smpi_read_relaxed(&world->why[i]);
    }
}
