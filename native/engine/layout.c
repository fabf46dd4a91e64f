/* layout.c - see cdef/layout.h.
 *
 * A cursor walks the leaves of a tree in order. What it gives is a run: the rest of a block, and how many like it follow at which
 * stride. A copy takes as much as it can from a pair of runs at once: blocks of the same length side by side, or one long block
 * against many short ones. */
#include "layout.h"

#include <string.h>

#include "../base/error.h"
#include "../memory/heap.h"
#include "kernels.h"

struct level {
    const struct smpi_node *node;
    char *start; /* of the step it is in */
    int64_t done, child;
};

struct cursor {
    const struct smpi_layout *layout; /* NULL: one endless block */
    char *element;
    int depth;
    struct level level[SMPI_LAYOUT_LEVELS];
    /* the run */
    char *at;
    size_t rest;  /* of the block at `at` */
    size_t block; /* bytes of each that follows */
    size_t count; /* blocks, with the one at `at` */
    ptrdiff_t stride;
};

/* From byte `skip` of the node on, which starts at `start`. */
static void descend(struct cursor *cursor, const struct smpi_node *node, char *start, int64_t skip)
{
    const struct smpi_node *nodes = cursor->layout->node;
    for (;;) {
        const int64_t step = node->bytes / node->count;
        const int64_t done = skip / step;
        start += node->offset + done * node->stride;
        skip %= step;
        if (!node->children) {
            cursor->at = start + skip;
            cursor->rest = (size_t)(step - skip);
            cursor->block = (size_t)step;
            cursor->count = (size_t)(node->count - done);
            cursor->stride = node->stride;
            return;
        }
        int64_t child = 0;
        while (skip >= nodes[node->first + child].bytes) {
            skip -= nodes[node->first + child].bytes;
            child++;
        }
        cursor->level[cursor->depth++] = (struct level){node, start, done, child};
        node = &nodes[node->first + child];
    }
}

static struct cursor cursor_at(const struct smpi_layout *layout, char *base, size_t position)
{
    struct cursor cursor;
    cursor.layout = layout;
    cursor.depth = 0;
    cursor.stride = 0;
    if (!layout) {
        cursor.at = base + position;
        cursor.rest = cursor.block = SIZE_MAX / 2;
        cursor.count = 1;
        return cursor;
    }
    const int64_t element = (int64_t)position / layout->bytes;
    cursor.element = base + element * layout->extent;
    descend(&cursor, layout->node, cursor.element, (int64_t)position % layout->bytes);
    if (!layout->node->children && layout->node->count == 1) { /* elements of one block: one run for all of them */
        cursor.count = SIZE_MAX / 2;
        cursor.stride = layout->extent;
    }
    return cursor;
}

static void next_run(struct cursor *cursor)
{
    const struct smpi_node *nodes = cursor->layout->node;
    while (cursor->depth) {
        struct level *level = &cursor->level[cursor->depth - 1];
        if (level->child + 1 < level->node->children) {
            level->child++;
            break;
        }
        if (level->done + 1 < level->node->count) {
            level->done++;
            level->start += level->node->stride;
            level->child = 0;
            break;
        }
        cursor->depth--;
    }
    if (cursor->depth) {
        const struct level *level = &cursor->level[cursor->depth - 1];
        descend(cursor, &nodes[level->node->first + level->child], level->start, 0);
    } else {
        cursor->element += cursor->layout->extent;
        descend(cursor, nodes, cursor->element, 0);
    }
}

/* Whether the run is blocks of that length side by side; else it is the pieces that a block can be cut into. */
static int is_row(const struct cursor *cursor, size_t bytes)
{
    return cursor->rest == bytes && cursor->block == bytes;
}

static void advance(struct cursor *cursor, size_t pieces, size_t bytes)
{
    if (is_row(cursor, bytes)) {
        cursor->at += (ptrdiff_t)pieces * cursor->stride;
        cursor->count -= pieces;
    } else {
        cursor->at += pieces * bytes;
        cursor->rest -= pieces * bytes;
        if (!cursor->rest) {
            cursor->at += cursor->stride - (ptrdiff_t)cursor->block;
            cursor->rest = cursor->block;
            cursor->count--;
        }
    }
    if (!cursor->count && cursor->layout) {
        next_run(cursor);
    }
}

#define COPY_PIECES(constant)                                                   \
    for (size_t i = 0; i < pieces; i++, dst += dst_stride, src += src_stride) { \
        memcpy(dst, src, constant);                                             \
    }

static void copy_pieces(char *dst, ptrdiff_t dst_stride, const char *src, ptrdiff_t src_stride, size_t bytes,
                        size_t pieces)
{
    if (dst_stride == (ptrdiff_t)bytes && src_stride == (ptrdiff_t)bytes) {
        bytes *= pieces;
        pieces = 1;
    }
    switch (bytes) { /* so that the compiler knows the length */
    case 1: COPY_PIECES(1) break;
    case 2: COPY_PIECES(2) break;
    case 4: COPY_PIECES(4) break;
    case 8: COPY_PIECES(8) break;
    case 16: COPY_PIECES(16) break;
    default:
        for (size_t i = 0; i < pieces; i++, dst += dst_stride, src += src_stride) {
            smpi_copy(dst, src, bytes);
        }
    }
}

static size_t least(size_t a, size_t b)
{
    return a < b ? a : b;
}

void smpi_layout_copy(const smpi_layout *to, void *dst, const smpi_layout *from, const void *src, size_t first,
                      size_t last)
{
    if (first >= last) {
        return;
    }
    if (!to && !from) {
        smpi_copy((char *)dst + first, (const char *)src + first, last - first);
        return;
    }
    struct cursor write = cursor_at(to, dst, first);
    struct cursor read = cursor_at(from, (char *)(uintptr_t)src, first);
    for (size_t left = last - first; left;) {
        const size_t bytes = least(left, least(write.rest, read.rest));
        const size_t writes = is_row(&write, bytes) ? write.count : write.rest / bytes;
        const size_t reads = is_row(&read, bytes) ? read.count : read.rest / bytes;
        const size_t pieces = least(left / bytes, least(writes, reads));
        copy_pieces(write.at, is_row(&write, bytes) ? write.stride : (ptrdiff_t)bytes, read.at,
                    is_row(&read, bytes) ? read.stride : (ptrdiff_t)bytes, bytes, pieces);
        left -= pieces * bytes;
        if (left) {
            advance(&write, pieces, bytes);
            advance(&read, pieces, bytes);
        }
    }
}

void smpi_pack(const struct smpi_part *parts, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        smpi_layout_copy(NULL, parts[i].packed, parts[i].layout, parts[i].user, 0, parts[i].bytes);
    }
}

void smpi_unpack(const struct smpi_part *parts, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        smpi_layout_copy(parts[i].layout, parts[i].user, NULL, parts[i].packed, 0, parts[i].bytes);
    }
}

struct tree {
    const struct smpi_node *nodes;
    int64_t count;
    int64_t unseen; /* each node is the child of one, so no more than count are seen */
};

/* Whether the nodes below `at` are as they must be; where their bytes lie from the parent's start on. */
static int measure(struct tree *tree, int64_t at, int levels, int64_t *low, int64_t *high)
{
    const struct smpi_node *node = &tree->nodes[at];
    if (!tree->unseen-- || node->count < 1 || node->bytes < 1 || node->bytes % node->count ||
        levels > SMPI_LAYOUT_LEVELS) {
        return 0;
    }
    int64_t bytes = node->bytes / node->count;
    *low = 0;
    *high = bytes;
    if (node->children) {
        if (node->children < 0 || node->first <= at || node->first > tree->count - node->children) {
            return 0;
        }
        *low = INT64_MAX;
        *high = INT64_MIN;
        for (int64_t i = 0; i < node->children; i++) {
            int64_t child_low, child_high;
            if (!measure(tree, node->first + i, levels + 1, &child_low, &child_high)) {
                return 0;
            }
            *low = child_low < *low ? child_low : *low;
            *high = child_high > *high ? child_high : *high;
            bytes -= tree->nodes[node->first + i].bytes;
        }
        if (bytes) {
            return 0;
        }
    }
    const int64_t way = (node->count - 1) * node->stride;
    *low += node->offset + (way < 0 ? way : 0);
    *high += node->offset + (way > 0 ? way : 0);
    return 1;
}

smpi_layout *smpi_layout_new(smpi_world *world, const struct smpi_node *nodes, int64_t count, int64_t extent)
{
    struct tree tree = {nodes, count, count};
    int64_t low, high;
    if (count < 1 || count > SMPI_LAYOUT_NODES || !measure(&tree, 0, 1, &low, &high)) {
        smpi_fail(SMPI_ERR_ARG, "%lld nodes that are no layout", (long long)count);
        return NULL;
    }
    const size_t bytes = (size_t)count * sizeof *nodes;
    struct smpi_layout *layout = smpi_heap_alloc(world, sizeof *layout + bytes, 0);
    if (layout) {
        layout->extent = extent;
        layout->bytes = nodes->bytes;
        layout->low = low;
        layout->high = high;
        memcpy(layout->node, nodes, bytes);
    }
    return layout;
}

void smpi_layout_free(smpi_world *world, smpi_layout *layout)
{
    smpi_heap_free(world, layout);
}

void smpi_layout_span(const smpi_layout *layout, int64_t elements, int64_t *low, int64_t *high)
{
    const int64_t way = (elements - 1) * layout->extent;
    *low = layout->low + (way < 0 ? way : 0);
    *high = layout->high + (way > 0 ? way : 0);
}
