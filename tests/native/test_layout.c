/* test_layout.c - layouts against a list of all their bytes: packing, unpacking and copies from one layout to another, whole and in
 * ranges that begin and end anywhere; what is no layout is refused. Then the operators that know layouts, on ranks that are
 * threads. */
#include "check.h"
#include "ranks.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { NODES = 64, MESSAGE = 1 << 16, SPACE = 1 << 19 };

static unsigned seed;

static int64_t draw(int64_t below)
{
    seed = seed * 1664525u + 1013904223u;
    return (int64_t)(seed >> 8) % below;
}

struct tree {
    struct smpi_node node[NODES];
    int64_t count;
};

/* A random subtree at `at`, in which blocks do not overlap: every step starts behind the one before. Returns the bytes it spans. */
static int64_t grow(struct tree *tree, int64_t at, int levels)
{
    struct smpi_node *node = &tree->node[at];
    const int64_t children = levels < 4 && tree->count < NODES - 4 ? draw(4) : 0;
    int64_t bytes, span;
    node->children = children;
    node->first = tree->count;
    node->count = 1 + draw(4);
    if (children) {
        tree->count += children;
        bytes = span = 0;
        for (int64_t i = 0; i < children; i++) {
            const int64_t child_span = grow(tree, node->first + i, levels + 1);
            tree->node[node->first + i].offset += span + draw(3);
            span = tree->node[node->first + i].offset + child_span;
            bytes += tree->node[node->first + i].bytes;
        }
    } else {
        static const int64_t LENGTHS[] = {1, 2, 3, 4, 8, 16, 24, 1030};
        bytes = span = LENGTHS[draw(8)];
    }
    node->bytes = bytes * node->count;
    node->stride = span + draw(3);
    node->offset = 0;
    if (draw(4) == 0) { /* the same places, from the last to the first */
        node->offset = (node->count - 1) * node->stride;
        node->stride = -node->stride;
        return span; /* behind its offset, as the caller adds it up */
    }
    return (node->count - 1) * node->stride + span;
}

static struct tree any_tree(void)
{
    struct tree tree = {.count = 1};
    grow(&tree, 0, 0);
    return tree;
}

/* The offset of every byte of one element, in the message's order. */
static size_t list_bytes(const struct tree *tree, int64_t at, int64_t start, int64_t *list)
{
    const struct smpi_node *node = &tree->node[at];
    size_t used = 0;
    for (int64_t i = 0; i < node->count; i++) {
        const int64_t here = start + node->offset + i * node->stride;
        for (int64_t child = 0; child < node->children; child++) {
            used += list_bytes(tree, node->first + child, here, list + used);
        }
        for (int64_t b = 0; !node->children && b < node->bytes / node->count; b++) {
            list[used++] = here + b;
        }
    }
    return used;
}

struct side {
    smpi_layout *layout;
    int64_t *list; /* [bytes] where each byte of the message lies */
    char *memory;  /* [SPACE], the buffer's address in the middle */
};

static char *at(struct side side)
{
    return side.memory + SPACE / 2;
}

/* A side for at most `bytes` bytes, or of `bytes` without gaps. */
static struct side make(smpi_world *world, int gaps, size_t *bytes)
{
    struct side side = {.list = malloc(MESSAGE * sizeof *side.list), .memory = malloc(SPACE)};
    REQUIRE(side.list && side.memory);
    if (!gaps) {
        for (size_t i = 0; i < *bytes; i++) {
            side.list[i] = (int64_t)i;
        }
        return side;
    }
    struct tree tree;
    do {
        tree = any_tree();
    } while (tree.node[0].bytes > MESSAGE / 8);
    const size_t element = (size_t)tree.node[0].bytes;
    list_bytes(&tree, 0, 0, side.list);
    int64_t low = INT64_MAX, high = INT64_MIN;
    for (size_t i = 0; i < element; i++) {
        low = side.list[i] < low ? side.list[i] : low;
        high = side.list[i] + 1 > high ? side.list[i] + 1 : high;
    }
    const int64_t extent = (high - low + draw(3)) * (draw(3) ? 1 : -1);
    const size_t elements = *bytes / element < SPACE / 8 / (size_t)(high - low + 3)
                                ? *bytes / element
                                : SPACE / 8 / (size_t)(high - low + 3);
    *bytes = elements * element;
    for (size_t i = element; i < *bytes; i++) {
        side.list[i] = side.list[i - element] + extent;
    }
    side.layout = smpi_layout_new(world, tree.node, tree.count, extent);
    REQUIRE(side.layout != NULL);
    if (elements) {
        int64_t span_low, span_high;
        smpi_layout_span(side.layout, (int64_t)elements, &span_low, &span_high);
        const int64_t way = (int64_t)(elements - 1) * extent;
        CHECK_EQ(span_low, low + (way < 0 ? way : 0));
        CHECK_EQ(span_high, high + (way > 0 ? way : 0));
    }
    return side;
}

static void drop(smpi_world *world, struct side side)
{
    smpi_layout_free(world, side.layout);
    free(side.list);
    free(side.memory);
}

static void copies(smpi_world *world, int to_gaps, int from_gaps)
{
    size_t bytes = (size_t)draw(MESSAGE), fits = bytes;
    struct side to = make(world, to_gaps, &fits);
    bytes = fits < bytes ? fits : bytes;
    struct side from = make(world, from_gaps, &fits);
    bytes = fits < bytes ? fits : bytes;
    const size_t first = draw(2) ? 0 : (size_t)draw((int64_t)bytes + 1);
    const size_t last = draw(2) ? bytes : first + (size_t)draw((int64_t)(bytes - first) + 1);
    char *wanted = malloc(SPACE);
    REQUIRE(wanted != NULL);
    for (size_t i = 0; i < SPACE; i++) {
        from.memory[i] = (char)(i * 7 + i / 251);
        to.memory[i] = wanted[i] = (char)(i * 3);
    }
    for (size_t i = first; i < last; i++) {
        wanted[SPACE / 2 + to.list[i]] = at(from)[from.list[i]];
    }
    smpi_layout_copy(to.layout, at(to), from.layout, at(from), first, last);
    CHECK(memcmp(to.memory, wanted, SPACE) == 0);
    free(wanted);
    drop(world, to);
    drop(world, from);
}

static void parts(smpi_world *world)
{
    size_t bytes[2] = {1000, 3000};
    struct side sides[2];
    struct smpi_part part[2];
    char packed[4000], again[4000];
    memset(packed, 0, sizeof packed);
    memset(again, 0, sizeof again);
    for (int i = 0; i < 2; i++) {
        sides[i] = make(world, 1, &bytes[i]);
        for (int b = 0; b < SPACE; b++) {
            sides[i].memory[b] = (char)(b * 5 + i);
        }
        part[i] = (struct smpi_part){sides[i].layout, at(sides[i]), packed + (ptrdiff_t)i * 1000, bytes[i]};
    }
    smpi_pack(part, 2);
    for (int i = 0; i < 2; i++) {
        memset(sides[i].memory, 0, SPACE);
    }
    smpi_unpack(part, 2);
    part[0].packed = again;
    part[1].packed = again + 1000;
    smpi_pack(part, 2);
    CHECK(memcmp(packed, again, sizeof packed) == 0);
    for (int i = 0; i < 2; i++) {
        for (size_t b = 0; b < bytes[i]; b++) {
            if (packed[(size_t)i * 1000 + b] != (char)((SPACE / 2 + sides[i].list[b]) * 5 + i)) {
                CHECK_EQ(b, -1);
            }
        }
        drop(world, sides[i]);
    }
}

static void refusals(smpi_world *world)
{
    struct smpi_node node[SMPI_LAYOUT_LEVELS + 1];
    for (int64_t i = 0; i <= SMPI_LAYOUT_LEVELS; i++) {
        node[i] = (struct smpi_node){0, 1, 8, 8, i + 1, i < SMPI_LAYOUT_LEVELS};
    }
    CHECK(smpi_layout_new(world, node, SMPI_LAYOUT_LEVELS + 1, 8) == NULL); /* a level too many */
    node[SMPI_LAYOUT_LEVELS - 1].children = 0;
    smpi_layout *layout = smpi_layout_new(world, node, SMPI_LAYOUT_LEVELS, 8);
    CHECK(layout != NULL);
    smpi_layout_free(world, layout);
    CHECK(smpi_layout_new(world, node, 0, 8) == NULL);
    CHECK(smpi_layout_new(world, node, SMPI_LAYOUT_NODES + 1, 8) == NULL);
    const struct smpi_node bad[][2] = {
        {{0, 0, 8, 8, 0, 0}},                     /* never done */
        {{0, 1, 8, 0, 0, 0}},                     /* nothing in it */
        {{0, 3, 8, 8, 0, 0}},                     /* blocks of 8/3 bytes */
        {{0, 1, 8, 8, 0, 1}},                     /* its own child */
        {{0, 1, 8, 8, 1, 2}, {0, 1, 8, 8, 0, 0}}, /* a child that is not there */
        {{0, 1, 8, 8, 1, -1}, {0, 1, 8, 8, 0, 0}},
        {{0, 2, 8, 8, 1, 1}, {0, 1, 8, 8, 0, 0}}, /* twice 8 bytes are not 8 */
    };
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        CHECK(smpi_layout_new(world, bad[i], 2, 8) == NULL);
    }
    const struct smpi_node shared[] = {{0, 1, 8, 16, 1, 2}, {0, 1, 8, 8, 3, 1}, {0, 1, 8, 8, 3, 1}, {0, 1, 8, 8, 0, 0}};
    CHECK(smpi_layout_new(world, shared, 4, 8) == NULL); /* one child of two */
}

static void body(smpi_world *world, int rank, int size, void *arg)
{
    (void)rank, (void)size, (void)arg;
    for (seed = 1; seed < 400;) {
        const unsigned round = seed;
        copies(world, 1, 0);
        copies(world, 0, 1);
        copies(world, 1, 1);
        seed = round + 1;
    }
    parts(world);
    refusals(world);
    uint64_t blocks;
    smpi_heap_stats(world, NULL, NULL, NULL, NULL, &blocks);
    CHECK_EQ(blocks, 0);
}

/* Where element (row, column) of a matrix of `rows` x `columns` int32 on rank lies; what it holds. */
static int32_t value_of(int rank, size_t row, size_t column)
{
    return (int32_t)((size_t)rank * 1000000 + row * 1000 + column);
}

static smpi_layout *columns_of(smpi_world *world, int64_t rows, int64_t width, int64_t line, int64_t first)
{
    const struct smpi_node node = {4 * first, rows, 4 * line, 4 * rows * width, 0, 0};
    smpi_layout *layout = smpi_layout_new(world, &node, 1, 4 * rows * line);
    REQUIRE(layout != NULL);
    return layout;
}

static int32_t *matrix(smpi_world *world, int registered, size_t elements)
{
    int32_t *made = registered ? smpi_heap_alloc(world, elements * sizeof *made, 0) : malloc(elements * sizeof *made);
    REQUIRE(made != NULL);
    memset(made, 0xff, elements * sizeof *made);
    return made;
}

static void drop_matrix(smpi_world *world, int registered, int32_t *made)
{
    if (registered) {
        smpi_heap_free(world, made);
    } else {
        free(made);
    }
}

/* Columns [d w, (d + 1) w) of every rank's rows x (size w) matrix go to rank d, which puts them side by side, one column apart. */
static void exchange(smpi_world *world, smpi_comm *comm, int rank, int size, int64_t rows, int64_t width,
                     unsigned round)
{
    const int registered[2] = {(int)(round >> rank & 1), (int)(round >> (rank + 1) & 1)};
    const int64_t line = width * size, wide = (width + 1) * size;
    int32_t *send = matrix(world, registered[0], (size_t)(rows * line));
    int32_t *recv = matrix(world, registered[1], (size_t)(rows * wide));
    const smpi_layout *out[RANKS_MAX], *in[RANKS_MAX];
    int64_t counts[RANKS_MAX], zeros[RANKS_MAX];
    for (int i = 0; i < size; i++) {
        out[i] = columns_of(world, rows, width, line, i * width);
        in[i] = columns_of(world, rows, width, wide, i * (width + 1));
        counts[i] = 4 * rows * width;
        zeros[i] = 0;
    }
    for (int64_t i = 0; i < rows * line; i++) {
        send[i] = value_of(rank, (size_t)(i / line), (size_t)(i % line));
    }
    CHECK_EQ(smpi_alltoallw(comm, send, counts, zeros, out, recv, counts, zeros, in), SMPI_OK);
    size_t wrong = 0;
    for (int64_t i = 0; i < rows * wide; i++) {
        const int64_t row = i / wide, source = i % wide / (width + 1), column = i % wide % (width + 1);
        wrong +=
            recv[i] != (column == width ? -1 : value_of((int)source, (size_t)row, (size_t)(rank * width + column)));
    }
    CHECK_EQ(wrong, 0);

    /* Rank 0's columns to all, as a request that packs and unpacks. */
    const size_t bytes = (size_t)counts[0];
    void *packed = smpi_heap_alloc(world, bytes, 0);
    REQUIRE(packed != NULL);
    const struct smpi_part pack = {out[0], send, packed, bytes}, unpack = {in[1 % size], recv, packed, bytes};
    smpi_request *request = smpi_request_new(comm);
    smpi_plan_bcast(request, packed, bytes, 0);
    smpi_plan_parts(request, &pack, rank == 0, &unpack, rank != 0);
    for (int turn = 0; turn < 2; turn++) {
        send[0] = turn;
        CHECK_EQ(smpi_request_start(request), SMPI_OK);
        CHECK_EQ(smpi_request_wait(request, -1), SMPI_OK);
        CHECK_EQ(rank == 0 ? turn : recv[(size_t)(1 % size) * (size_t)(width + 1)], turn);
    }
    smpi_request_free(request);

    /* Counts that do not fit are told to all. */
    if (size > 1) {
        counts[0] += rank == size - 1 ? 4 : 0;
        CHECK_EQ(smpi_alltoallw(comm, send, counts, zeros, NULL, recv, counts, zeros, NULL), SMPI_ERR_MISMATCH);
    }

    void *all = smpi_heap_alloc(world, bytes * (size_t)size, 0);
    REQUIRE(all != NULL);
    send[0] = rank;
    CHECK_EQ(smpi_contribute(comm, SMPI_ALLREDUCE, 0, send, bytes, all), SMPI_OK);
    for (int i = 0; i < size; i++) {
        int32_t first;
        memcpy(&first, (char *)all + (size_t)i * bytes, sizeof first);
        CHECK_EQ(first, i);
    }
    CHECK_EQ(smpi_contribute(comm, SMPI_REDUCE, size - 1, send, bytes, rank == size - 1 ? all : NULL), SMPI_OK);
    CHECK_EQ(smpi_contribute(comm, SMPI_REDUCE, size, send, bytes, all), SMPI_MPI);
    smpi_heap_free(world, all);
    smpi_heap_free(world, packed);
    for (int i = 0; i < size; i++) {
        smpi_layout_free(world, (smpi_layout *)(uintptr_t)out[i]);
        smpi_layout_free(world, (smpi_layout *)(uintptr_t)in[i]);
    }
    drop_matrix(world, registered[0], send);
    drop_matrix(world, registered[1], recv);
}

static void ranks_body_of_exchange(smpi_world *world, int rank, int size, void *arg)
{
    (void)arg;
    smpi_comm *comm = ranks_open(world, rank, size);
    static const int64_t SHAPES[][2] = {{1, 1}, {7, 3}, {40, 16}, {200, 70}, {300, 300}};
    for (unsigned round = 0; round < 16; round++) {
        for (size_t i = 0; i < sizeof SHAPES / sizeof SHAPES[0]; i++) {
            exchange(world, comm, rank, size, SHAPES[i][0], SHAPES[i][1], round);
        }
    }
    smpi_comm_close(comm);
    smpi_comm_delete(comm);
}

static void test_exchange(void)
{
    for (int size = 1; size <= 4; size++) {
        ranks_run(size, 64 << 20, ranks_body_of_exchange, NULL);
    }
}

static void test_layouts(void)
{
    ranks_run(1, 64 << 20, body, NULL);
}

int main(void)
{
    CHECK_RUN(test_layouts);
    CHECK_RUN(test_exchange);
    return check_result();
}
