/* request.h - one operator under way on one communicator. All of them live the same life:
 *
 *   plan        the arguments are noted (smpi_plan_*); nothing has been looked at, nothing is shared
 *   start       what has gaps is packed; the front end fills this rank's entry line: signature, then payload or addresses (fill);
 *               posted
 *   agree       everybody's lines are there: compared, and all ranks know the path (enter.h)
 *   proceed     inline in the front end, or in a back end (move.h, combine.h): step by step, with a synchronisation between two
 *   steps end         counted; what was allocated on the way is freed
 *
 * A blocking operator sleeps between the steps (smpi_request_run), a nonblocking one comes back later (smpi_request_test). The
 * steps are the same code. One operator at a time is between start and end on a communicator; another may be planned. */
#ifndef SMPI_COLL_REQUEST_H
#define SMPI_COLL_REQUEST_H

#include "../sync/comm.h"
#include "combine.h"
#include "enter.h"
#include "move.h"

struct smpi_request {
    struct smpi_comm *comm;
    void (*fill)(struct smpi_request *request, struct smpi_line *line);
    int (*proceed)(
        struct smpi_request *request);         /* once all agree: SMPI_OK, an error, or what smpi_sync_then returned */
    int (*next)(struct smpi_request *request); /* the step that waits for everybody */
    int operator_, type, op, root, why;
    int path;
    const void *send; /* NULL: MPI.IN_PLACE */
    void *recv;
    size_t count;                  /* elements of a reduction */
    size_t send_bytes, recv_bytes; /* one block where there are several */
    size_t passed;                 /* bytes for the statistics */
    uint64_t digest;               /* of a table of counts; 0: this rank has none */
    struct smpi_pieces from, to;
    void *scratch;                           /* in the heap, until the end */
    uint64_t *layouts;                       /* in the heap, until the end: [2 size] of Alltoallw */
    const struct smpi_part *packs, *unpacks; /* what is packed at the start and unpacked at the end */
    size_t pack_count, unpack_count;
    union {
        struct smpi_move move;
        struct smpi_combine combine;
    };
    /* Of operators that outlive their call (smpi_request_new). */
    int64_t *tables; /* [4 size] copies of counts and displacements; NULL: the caller's are good until the end */
    uint64_t steps;  /* taken since it was made */
    int status;      /* of the last test or wait; SMPI_AGAIN between start and end */
};

/* Ends a step: says that this rank has come so far, and names the step to take when all have. Returns SMPI_AGAIN. */
int smpi_sync_then(struct smpi_request *request, int (*next)(struct smpi_request *request));

/* The last step where nothing is left to do. */
int smpi_request_done(struct smpi_request *request);

/* The pieces, with counts and displacements copied to the op's own tables if it has any. which: 0 or 1. */
struct smpi_pieces smpi_keep_pieces(struct smpi_request *request, int which, const void *base, const int64_t *counts,
                                    const int64_t *displs);

/* Start to end, blocking. The result is the operator's. */
int smpi_request_run(struct smpi_request *request);

#endif
