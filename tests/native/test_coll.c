/* test_coll.c - every operator on ranks that are threads: results against plain loops, over sizes that cross every threshold, with
 * each rank's buffers registered or not, in place or not; then what happens when arguments differ. Run under TSan, this checks the
 * entry and exit protocol: a missing release or a slot reused too early is a race. */
#include "check.h"
#include "ranks.h"

#include <stdint.h>
#include <stdlib.h>

/* Elements (int64): nothing, the entry line, the slot and its edge, one and several staged chunks. */
static const size_t COUNTS[] = {0, 1, 12, 13, 100, 1024, 1025, 5000, 8192, 30011};
#define NUM_COUNTS (sizeof COUNTS / sizeof COUNTS[0])

/* An array of count elements, in the heap or not, filled with -1. */
static int64_t *make(smpi_world *world, int registered, size_t count)
{
    const size_t bytes = (count + 1) * sizeof(int64_t);
    int64_t *array = registered ? smpi_heap_alloc(world, bytes, 0) : malloc(bytes);
    REQUIRE(array != NULL);
    memset(array, 0xff, bytes);
    return array;
}

/* Also checks that the element behind the end is still untouched. */
static void drop(smpi_world *world, int registered, int64_t *array, size_t count)
{
    CHECK_EQ(array[count], -1);
    if (registered) {
        smpi_heap_free(world, array);
    } else {
        free(array);
    }
}

static int64_t value(int rank, size_t i)
{
    return (int64_t)(i * 31 + 7) * (rank + 1);
}

static int64_t *make_filled(smpi_world *world, int registered, size_t count, int rank)
{
    int64_t *array = make(world, registered, count);
    for (size_t i = 0; i < count; i++) {
        array[i] = value(rank, i);
    }
    return array;
}

/* One decision per rank and round that all ranks can compute. */
static int coin(unsigned round, int rank, int which)
{
    unsigned x = round * 2654435761u + (unsigned)rank * 40503u + (unsigned)which * 9176u;
    x ^= x >> 13;
    x *= 0x5bd1e995u;
    return (int)((x >> 15) & 1);
}

static void check_sum(const int64_t *recv, size_t count, int size)
{
    size_t wrong = 0;
    for (size_t i = 0; i < count; i++) {
        wrong += recv[i] != value(0, i) * size * (size + 1) / 2;
    }
    CHECK_EQ(wrong, 0);
}

static void reductions(smpi_world *world, smpi_comm *comm, int rank, int size, unsigned round, size_t count)
{
    const int rs = coin(round, rank, 0), rr = coin(round, rank, 1);
    int64_t *send = make_filled(world, rs, count, rank);
    int64_t *recv = make(world, rr, count);
    CHECK_EQ(smpi_allreduce(comm, send, recv, count, SMPI_INT64, SMPI_SUM), SMPI_OK);
    check_sum(recv, count, size);
    memcpy(recv, send, count * sizeof *send);
    CHECK_EQ(smpi_allreduce(comm, NULL, recv, count, SMPI_INT64, SMPI_SUM), SMPI_OK);
    check_sum(recv, count, size);
    const int root = (int)(round % (unsigned)size);
    memset(recv, 0xff, count * sizeof *recv);
    CHECK_EQ(smpi_reduce(comm, send, rank == root ? recv : NULL, count, SMPI_INT64, SMPI_SUM, root), SMPI_OK);
    if (rank == root) {
        check_sum(recv, count, size);
    } else {
        for (size_t i = 0; i < count; i++) {
            if (recv[i] != -1) {
                CHECK_EQ(recv[i], -1);
                break;
            }
        }
    }
    drop(world, rs, send, count);
    drop(world, rr, recv, count);
}

static void movements(smpi_world *world, smpi_comm *comm, int rank, int size, unsigned round, size_t count)
{
    const int rs = coin(round, rank, 2), rr = coin(round, rank, 3);
    const int root = (int)(round % (unsigned)size);
    const size_t total = count * (size_t)size;
    const size_t bytes = count * sizeof(int64_t);
    size_t wrong = 0;

    int64_t *buffer = rank == root ? make_filled(world, rs, count, root) : make(world, rs, count);
    CHECK_EQ(smpi_bcast(comm, buffer, bytes, root), SMPI_OK);
    for (size_t i = 0; i < count; i++) {
        wrong += buffer[i] != value(root, i);
    }
    CHECK_EQ(wrong, 0);
    drop(world, rs, buffer, count);

    int64_t *send = make_filled(world, rs, total, rank);
    int64_t *recv = make(world, rr, total);
    CHECK_EQ(smpi_allgather(comm, send, bytes, recv, bytes), SMPI_OK);
    for (size_t i = 0; i < total; i++) {
        wrong += recv[i] != value((int)(i / count), i % count);
    }
    CHECK_EQ(wrong, 0);
    memset(recv, 0xff, total * sizeof *recv);
    memcpy(recv + (size_t)rank * count, send, bytes);
    CHECK_EQ(smpi_allgather(comm, NULL, 0, recv, bytes), SMPI_OK);
    for (size_t i = 0; i < total; i++) {
        wrong += recv[i] != value((int)(i / count), i % count);
    }
    CHECK_EQ(wrong, 0);
    CHECK_EQ(smpi_alltoall(comm, send, bytes, recv, bytes), SMPI_OK);
    for (size_t i = 0; i < total; i++) {
        wrong += recv[i] != value((int)(i / count), i % count + (size_t)rank * count);
    }
    CHECK_EQ(wrong, 0);
    drop(world, rs, send, total);
    drop(world, rr, recv, total);
}

/* Rank s sends `block(s, d)` elements to rank d; blocks lie in reverse order with one element between them. */
static size_t block(unsigned round, size_t count, int s, int d)
{
    return coin(round, s, 10 + d) ? count : (size_t)((s + 2 * d) % 3);
}

static void vectors(smpi_world *world, smpi_comm *comm, int rank, int size, unsigned round, size_t count)
{
    const int rs = coin(round, rank, 4), rr = coin(round, rank, 5);
    int64_t sc[RANKS_MAX], sd[RANKS_MAX], rc[RANKS_MAX], rd[RANKS_MAX];
    size_t send_total = 0, recv_total = 0;
    for (int peer = size - 1; peer >= 0; peer--) {
        sc[peer] = (int64_t)(block(round, count, rank, peer) * sizeof(int64_t));
        sd[peer] = (int64_t)(send_total * sizeof(int64_t));
        send_total += block(round, count, rank, peer) + 1;
        rc[peer] = (int64_t)(block(round, count, peer, rank) * sizeof(int64_t));
        rd[peer] = (int64_t)(recv_total * sizeof(int64_t));
        recv_total += block(round, count, peer, rank) + 1;
    }
    int64_t *send = make_filled(world, rs, send_total, rank);
    int64_t *recv = make(world, rr, recv_total);
    CHECK_EQ(smpi_alltoallv(comm, send, sc, sd, recv, rc, rd), SMPI_OK);
    size_t wrong = 0;
    for (int peer = 0; peer < size; peer++) {
        size_t at = 0;
        for (int d = size - 1; d > rank; d--) {
            at += block(round, count, peer, d) + 1;
        }
        const size_t n = (size_t)rc[peer] / sizeof(int64_t);
        const int64_t *got = recv + (size_t)rd[peer] / sizeof(int64_t);
        for (size_t i = 0; i < n; i++) {
            wrong += got[i] != value(peer, at + i);
        }
        wrong += got[n] != -1;
    }
    CHECK_EQ(wrong, 0);
    drop(world, rs, send, send_total);
    drop(world, rr, recv, recv_total);

    /* Allgatherv: rank s contributes block(s, 0). */
    recv_total = 0;
    for (int peer = size - 1; peer >= 0; peer--) {
        rc[peer] = (int64_t)(block(round, count, peer, 0) * sizeof(int64_t));
        rd[peer] = (int64_t)(recv_total * sizeof(int64_t));
        recv_total += block(round, count, peer, 0) + 1;
    }
    const size_t mine = block(round, count, rank, 0);
    send = make_filled(world, rs, mine, rank);
    recv = make(world, rr, recv_total);
    for (int in_place = 0; in_place < 2; in_place++) {
        if (in_place) {
            memset(recv, 0xff, recv_total * sizeof *recv);
            memcpy((char *)recv + rd[rank], send, mine * sizeof *send);
        }
        CHECK_EQ(smpi_allgatherv(comm, in_place ? NULL : send, mine * sizeof *send, recv, rc, rd), SMPI_OK);
        for (int peer = 0; peer < size; peer++) {
            const size_t n = (size_t)rc[peer] / sizeof(int64_t);
            const int64_t *got = recv + (size_t)rd[peer] / sizeof(int64_t);
            for (size_t i = 0; i < n; i++) {
                wrong += got[i] != value(peer, i);
            }
            wrong += got[n] != -1;
        }
    }
    CHECK_EQ(wrong, 0);
    drop(world, rs, send, mine);
    drop(world, rr, recv, recv_total);
}

/* Gather and Scatter, their v-forms with blocks in reverse order and one element between them, from and to every place. */
static void rooted(smpi_world *world, smpi_comm *comm, int rank, int size, unsigned round, size_t count)
{
    const int rs = coin(round, rank, 6), rr = coin(round, rank, 7);
    const int root = (int)(round % (unsigned)size);
    const size_t total = count * (size_t)size;
    const size_t bytes = count * sizeof(int64_t);
    const int in_place = coin(round, root, 20) && rank == root;
    size_t wrong = 0;

    int64_t *send = make_filled(world, rs, total, rank);
    int64_t *recv = make(world, rr, total);
    if (in_place) {
        memcpy(recv + (size_t)rank * count, send, bytes);
    }
    CHECK_EQ(smpi_gather(comm, in_place ? NULL : send, bytes, rank == root ? recv : NULL, bytes, root), SMPI_OK);
    for (size_t i = 0; i < total; i++) {
        wrong += recv[i] != (rank == root ? value((int)(i / count), i % count) : -1);
    }
    CHECK_EQ(wrong, 0);
    memset(recv, 0xff, total * sizeof *recv);
    CHECK_EQ(smpi_scatter(comm, rank == root ? send : NULL, bytes, in_place ? NULL : recv, bytes, root), SMPI_OK);
    for (size_t i = 0; i < total; i++) {
        wrong += recv[i] != (in_place || i >= count ? -1 : value(root, i + (size_t)rank * count));
    }
    for (size_t i = 0; i < total; i++) {
        wrong += send[i] != value(rank, i);
    }
    CHECK_EQ(wrong, 0);
    drop(world, rs, send, total);
    drop(world, rr, recv, total);
}

static void rooted_vectors(smpi_world *world, smpi_comm *comm, int rank, int size, unsigned round, size_t count)
{
    const int rs = coin(round, rank, 8), rr = coin(round, rank, 9);
    const int root = (int)(round % (unsigned)size);
    const int in_place = coin(round, root, 21) && rank == root;
    int64_t counts[RANKS_MAX] = {0}, displs[RANKS_MAX] = {0};
    size_t total = 0, wrong = 0;
    for (int peer = size - 1; peer >= 0; peer--) {
        counts[peer] = (int64_t)(block(round, count, peer, 1) * sizeof(int64_t));
        displs[peer] = (int64_t)(total * sizeof(int64_t));
        total += block(round, count, peer, 1) + 1;
    }
    const size_t mine = block(round, count, rank, 1);
    const size_t mine_at = (size_t)displs[rank] / sizeof(int64_t);
    const int is_root = rank == root;
    const int64_t *tables[] = {is_root ? counts : NULL, is_root ? displs : NULL};

    int64_t *send = make_filled(world, rs, mine, rank);
    int64_t *recv = make(world, rr, total);
    if (in_place) {
        memcpy(recv + mine_at, send, mine * sizeof *send);
    }
    CHECK_EQ(smpi_gatherv(comm, in_place ? NULL : send, mine * sizeof *send, recv, tables[0], tables[1], root),
             SMPI_OK);
    for (int peer = 0; peer < size; peer++) {
        const size_t n = (size_t)counts[peer] / sizeof(int64_t);
        const int64_t *got = recv + (size_t)displs[peer] / sizeof(int64_t);
        for (size_t i = 0; i < n; i++) {
            wrong += got[i] != (is_root ? value(peer, i) : -1);
        }
        wrong += got[n] != -1;
    }
    CHECK_EQ(wrong, 0);
    drop(world, rs, send, mine);
    drop(world, rr, recv, total);

    send = make_filled(world, rs, total, rank);
    recv = make(world, rr, mine);
    CHECK_EQ(smpi_scatterv(comm, send, tables[0], tables[1], in_place ? NULL : recv, mine * sizeof *recv, root),
             SMPI_OK);
    for (size_t i = 0; i < mine; i++) {
        wrong += recv[i] != (in_place ? -1 : value(root, i + mine_at));
    }
    for (size_t i = 0; i < total; i++) {
        wrong += send[i] != value(rank, i);
    }
    CHECK_EQ(wrong, 0);
    drop(world, rs, send, total);
    drop(world, rr, recv, mine);
}

/* Elements [from, from + count) of the sum over ranks 0 to ranks - 1. */
static size_t differs(const int64_t *recv, size_t from, size_t count, int summed)
{
    size_t wrong = 0;
    for (size_t i = 0; i < count; i++) {
        wrong += recv[i] != value(0, from + i) * summed * (summed + 1) / 2;
    }
    return wrong;
}

static size_t touched(const int64_t *recv, size_t count)
{
    size_t touched = 0;
    for (size_t i = 0; i < count; i++) {
        touched += recv[i] != -1;
    }
    return touched;
}

/* Reduce_scatter and Scan; each rank in place or not, with a table of counts or not. */
static void partial_reductions(smpi_world *world, smpi_comm *comm, int rank, int size, unsigned round, size_t count)
{
    const int rs = coin(round, rank, 11), rr = coin(round, rank, 12);
    const int in_place = coin(round, rank, 13), knows = coin(round, rank, 14);
    int64_t counts[RANKS_MAX] = {0};
    size_t total = 0, start = 0;
    for (int peer = 0; peer < size; peer++) {
        counts[peer] = (int64_t)block(round, count, peer, 2);
        start = peer == rank ? total : start;
        total += (size_t)counts[peer];
    }
    const size_t mine = (size_t)counts[rank];
    int64_t *send = make_filled(world, rs, total, rank);
    int64_t *recv = in_place ? make_filled(world, rr, total, rank) : make(world, rr, total);
    CHECK_EQ(smpi_reduce_scatter(comm, in_place ? NULL : send, total, recv, mine, knows ? counts : NULL, SMPI_INT64,
                                 SMPI_SUM),
             SMPI_OK);
    CHECK_EQ(differs(recv, start, mine, size), 0);
    CHECK_EQ(in_place ? 0 : touched(recv + mine, total - mine), 0);
    drop(world, rs, send, total);
    drop(world, rr, recv, total);

    total = count * (size_t)size;
    send = make_filled(world, rs, total, rank);
    recv = in_place ? make_filled(world, rr, total, rank) : make(world, rr, total);
    CHECK_EQ(smpi_reduce_scatter_block(comm, in_place ? NULL : send, recv, count, SMPI_INT64, SMPI_SUM), SMPI_OK);
    CHECK_EQ(differs(recv, count * (size_t)rank, count, size), 0);
    CHECK_EQ(in_place ? 0 : touched(recv + count, total - count), 0);
    memcpy(recv, send, count * sizeof *send);
    CHECK_EQ(smpi_scan(comm, in_place ? NULL : send, recv, count, SMPI_INT64, SMPI_SUM), SMPI_OK);
    CHECK_EQ(differs(recv, 0, count, rank + 1), 0);
    memcpy(recv, send, count * sizeof *send);
    CHECK_EQ(smpi_exscan(comm, in_place ? NULL : send, recv, count, SMPI_INT64, SMPI_SUM), SMPI_OK);
    CHECK_EQ(rank ? differs(recv, 0, count, rank) : (size_t)memcmp(recv, send, count * sizeof *send), 0);
    drop(world, rs, send, total);
    drop(world, rr, recv, total);
}

/* float16: 2048 + 1 + 1 is 2050 only if it is rounded once, at the end. */
static void halves(smpi_world *world, smpi_comm *comm, int rank, int size, unsigned round, size_t count)
{
    enum { ONE = 0x3c00, BIG = 0x6800 };                                     /* 1 and 2048 */
    static const uint16_t sums[] = {0x6800, 0x6800, 0x6801, 0x6802, 0x6802}; /* of 2048, 2049 … 2052, to even */
    const size_t bytes = count * sizeof(uint16_t);
    const int registered = coin(round, rank, 15);
    uint16_t *data = registered ? smpi_heap_alloc(world, bytes + 1, 0) : malloc(bytes + 1);
    for (int exclusive = 0; exclusive < 2; exclusive++) {
        for (size_t i = 0; i < count; i++) {
            data[i] = rank ? ONE : BIG;
        }
        CHECK_EQ((exclusive ? smpi_exscan : smpi_scan)(comm, NULL, data, count, SMPI_FLOAT16, SMPI_SUM), SMPI_OK);
        const uint16_t wanted = sums[exclusive && rank ? rank - 1 : rank];
        size_t wrong = 0;
        for (size_t i = 0; i < count; i++) {
            wrong += data[i] != wanted;
        }
        CHECK_EQ(wrong, 0);
    }
    (void)size;
    if (registered) {
        smpi_heap_free(world, data);
    } else {
        free(data);
    }
}

static void all_operators(smpi_world *world, int rank, int size, void *arg)
{
    (void)arg;
    smpi_comm *comm = ranks_open(world, rank, size);
    unsigned round = 0;
    for (size_t i = 0; i < NUM_COUNTS; i++) {
        for (int repeat = 0; repeat < 3; repeat++, round++) {
            reductions(world, comm, rank, size, round, COUNTS[i]);
            movements(world, comm, rank, size, round, COUNTS[i]);
            vectors(world, comm, rank, size, round, COUNTS[i]);
            rooted(world, comm, rank, size, round, COUNTS[i]);
            rooted_vectors(world, comm, rank, size, round, COUNTS[i]);
            partial_reductions(world, comm, rank, size, round, COUNTS[i]);
            halves(world, comm, rank, size, round, COUNTS[i]);
            CHECK_EQ(smpi_barrier(comm), SMPI_OK);
        }
    }
    smpi_comm_close(comm);
    smpi_comm_delete(comm);
}

static void test_all_operators(void)
{
    for (int size = 1; size <= 5; size++) {
        ranks_run(size, 64 << 20, all_operators, NULL);
    }
}

/* Arguments that differ: an error on every rank, nothing written, and the communicator goes on. */
static void differing(smpi_world *world, int rank, int size, void *arg)
{
    (void)arg;
    smpi_comm *comm = ranks_open(world, rank, size);
    for (int registered = 0; registered < 2; registered++) {
        for (size_t i = 1; i < NUM_COUNTS; i++) {
            const size_t count = COUNTS[i];
            const size_t odd = rank == size - 1; /* the rank that errs */
            int64_t *send = make_filled(world, registered, 2 * count * (size_t)size, rank);
            int64_t *recv = make(world, registered, 2 * count * (size_t)size);
            const size_t bytes = count * sizeof(int64_t);
            CHECK_EQ(smpi_allreduce(comm, send, recv, count + odd, SMPI_INT64, SMPI_SUM), SMPI_ERR_MISMATCH);
            CHECK(strstr(smpi_reason(), smpi_operator_name(SMPI_ALLREDUCE)) != NULL);
            CHECK_EQ(smpi_allreduce(comm, send, recv, count, odd ? SMPI_FLOAT64 : SMPI_INT64, SMPI_SUM),
                     SMPI_ERR_MISMATCH);
            CHECK_EQ(smpi_allreduce(comm, send, recv, count, SMPI_INT64, odd ? SMPI_MAX : SMPI_SUM), SMPI_ERR_MISMATCH);
            CHECK_EQ(smpi_bcast(comm, recv, bytes, (int)odd), SMPI_ERR_MISMATCH);
            CHECK_EQ(odd ? smpi_barrier(comm) : smpi_bcast(comm, recv, bytes, 0), SMPI_ERR_MISMATCH);
            CHECK_EQ(smpi_allgather(comm, send, bytes, recv, bytes + 8 * odd), SMPI_ERR_MISMATCH);
            CHECK_EQ(smpi_alltoall(comm, send, bytes + 8 * odd, recv, bytes + 8 * odd), SMPI_ERR_MISMATCH);
            int64_t counts[RANKS_MAX], more[RANKS_MAX], displs[RANKS_MAX];
            for (int peer = 0; peer < size; peer++) {
                counts[peer] = (int64_t)bytes;
                more[peer] = (int64_t)(bytes + 8 * (odd && peer == 0));
                displs[peer] = (int64_t)((bytes + 8) * (size_t)peer);
            }
            CHECK_EQ(smpi_alltoallv(comm, send, more, displs, recv, counts, displs), SMPI_ERR_MISMATCH);
            CHECK_EQ(smpi_alltoallv(comm, send, counts, displs, recv, more, displs), SMPI_ERR_MISMATCH);
            CHECK_EQ(smpi_allgatherv(comm, send, bytes + 8 * odd, recv, counts, displs), SMPI_ERR_MISMATCH);
            CHECK_EQ(smpi_allgatherv(comm, send, bytes, recv, more, displs), SMPI_ERR_MISMATCH);
            CHECK_EQ(smpi_gather(comm, send, bytes + 8 * odd, recv, bytes, 0), SMPI_ERR_MISMATCH);
            CHECK_EQ(smpi_gather(comm, send, bytes, recv, bytes + 8 * !rank, 0), SMPI_ERR_MISMATCH);
            CHECK_EQ(smpi_scatter(comm, send, bytes, recv, bytes + 8 * odd, 0), SMPI_ERR_MISMATCH);
            CHECK_EQ(smpi_scatter(comm, send, bytes + 8 * !rank, recv, bytes, 0), SMPI_ERR_MISMATCH);
            CHECK_EQ(smpi_gather(comm, send, bytes, recv, bytes, (int)odd), SMPI_ERR_MISMATCH);
            CHECK_EQ(smpi_gatherv(comm, send, bytes + 8 * odd, recv, counts, displs, 0), SMPI_ERR_MISMATCH);
            CHECK(strstr(smpi_reason(), "what the root expects") != NULL);
            CHECK_EQ(smpi_scatterv(comm, send, counts, displs, recv, bytes + 8 * odd, 0), SMPI_ERR_MISMATCH);
            CHECK_EQ(smpi_scatterv(comm, send, counts, displs, recv, bytes + 8 * !rank, 0), SMPI_ERR_MISMATCH);
            CHECK_EQ(smpi_scan(comm, send, recv, count + odd, SMPI_INT64, SMPI_SUM), SMPI_ERR_MISMATCH);
            const size_t all = count * (size_t)size;
            for (int peer = 0; peer < size; peer++) { /* now elements: the same sum, and the last rank's wrong */
                counts[peer] = (int64_t)count;
                more[peer] = (int64_t)count + (odd && peer == 0) - (odd && peer == 1);
            }
            CHECK_EQ(smpi_reduce_scatter(comm, send, all, recv, count, more, SMPI_INT64, SMPI_SUM), SMPI_ERR_MISMATCH);
            CHECK_EQ(smpi_reduce_scatter(comm, send, all, recv, count + odd, NULL, SMPI_INT64, SMPI_SUM),
                     SMPI_ERR_MISMATCH);
            CHECK_EQ(smpi_gather(comm, rank ? send : recv + 1, bytes, recv, bytes, 0), SMPI_ERR_ALIAS);
            CHECK_EQ(smpi_exscan(comm, odd ? recv : send, recv, count, SMPI_INT64, SMPI_SUM), SMPI_ERR_ALIAS);
            CHECK_EQ(smpi_scatter(comm, send, bytes, odd ? NULL : recv, bytes, 0),
                     SMPI_MPI); /* in place: at the root */
            CHECK_EQ(smpi_gather(comm, odd ? NULL : send, bytes, recv, bytes, 0), SMPI_MPI);
            CHECK_EQ(smpi_gatherv(comm, send, bytes, recv, counts, displs, size), SMPI_MPI); /* no such root */
            CHECK_EQ(smpi_allreduce(comm, odd ? recv : send, recv, count, SMPI_INT64, SMPI_SUM), SMPI_ERR_ALIAS);
            CHECK_EQ(odd ? smpi_needs_mpi(comm, SMPI_BCAST, 0, SMPI_WHY_DATATYPE) : smpi_bcast(comm, recv, bytes, 0),
                     SMPI_MPI);
            CHECK_EQ(odd ? smpi_needs_mpi(comm, SMPI_BCAST, 0, SMPI_WHY_DATATYPE) : smpi_barrier(comm),
                     SMPI_ERR_MISMATCH);
            size_t written = 0;
            for (size_t k = 0; k < 2 * count * (size_t)size; k++) {
                written += recv[k] != -1;
            }
            CHECK_EQ(written, 0);
            CHECK_EQ(smpi_allreduce(comm, send, recv, count, SMPI_INT64, SMPI_SUM), SMPI_OK);
            check_sum(recv, count, size);
            drop(world, registered, send, 2 * count * (size_t)size);
            drop(world, registered, recv, 2 * count * (size_t)size);
        }
    }
    smpi_comm_close(comm);
    smpi_comm_delete(comm);
}

static void test_differing_arguments(void)
{
    for (int size = 2; size <= 4; size++) {
        ranks_run(size, 64 << 20, differing, NULL);
    }
}

/* Many small operators in a row, ranks running apart as far as they can; then communicators made and closed by the thousand. */
static void hammer(smpi_world *world, int rank, int size, void *arg)
{
    (void)arg;
    smpi_comm *comm = ranks_open(world, rank, size);
    for (int64_t i = 0; i < 3000; i++) {
        int64_t mine = i * (rank + 1), sum = -1;
        CHECK_EQ(smpi_allreduce(comm, &mine, &sum, 1, SMPI_INT64, SMPI_SUM), SMPI_OK);
        CHECK_EQ(sum, i * size * (size + 1) / 2);
        int64_t word = rank == i % size ? i : -1;
        CHECK_EQ(smpi_bcast(comm, &word, sizeof word, (int)(i % size)), SMPI_OK);
        CHECK_EQ(word, i);
    }
    smpi_comm_close(comm);
    smpi_comm_delete(comm);
    uint64_t live = 0, after = 0;
    for (int i = 0; i < 600; i++) {
        comm = ranks_open(world, rank, size);
        int64_t one = 1, sum = 0;
        CHECK_EQ(smpi_allreduce(comm, &one, &sum, 1, SMPI_INT64, SMPI_SUM), SMPI_OK);
        CHECK_EQ(sum, size);
        smpi_comm_close(comm);
        smpi_comm_delete(comm);
        smpi_heap_stats(world, i < 100 ? &live : &after, NULL, NULL, NULL, NULL);
    }
    CHECK(after <= live + 64 * 1024); /* gates come back */
    CHECK(smpi_heap_is_valid(world));
}

static void test_many(void)
{
    for (int size = 2; size <= 5; size++) {
        ranks_run(size, 64 << 20, hammer, NULL);
    }
}

int main(void)
{
    CHECK_RUN(test_all_operators);
    CHECK_RUN(test_differing_arguments);
    CHECK_RUN(test_many);
    return check_result();
}
