/* gate.h - what one rank shows to the others of one communicator.
 *
 * A gate lies in its rank's heap and is mapped by all members. The owner writes its entry lines, slots and phase; the others only
 * read them. Two words have other writers: `asleep` (a peer that completes a wait clears it and wakes the owner) and `closed`
 * (every peer adds one when it is done with the communicator).
 *
 *   line[e % 2]     epoch e | signature | count | flags |  addresses, or up to 96 bytes of payload       1 pair of cache lines
 *   phase           how many synchronisations inside operators the owner has reached
 *   bell            asleep, revoked
 *   closed
 *   slot[e % 2]     up to 8 KiB of the owner's data (or its tables of counts) for epoch e
 *
 * Why two lines are enough: every rank waits for all lines of epoch e before it leaves e, so whoever posts e + 1 has read all of e,
 * and whoever posts e + 2 has seen all of e + 1: nobody reads line e any more.
 * Not done: one line per rank with a done flag; it costs a second synchronisation for every small operator. */
#ifndef SMPI_SYNC_GATE_H
#define SMPI_SYNC_GATE_H

#include <stdatomic.h>
#include <stdint.h>

#include "../base/order.h"

#define SMPI_LINES 2
#define SMPI_PAYLOAD_BYTES 96
#define SMPI_SLOT_BYTES 8192

enum {
    SMPI_FLAG_SEND_REGISTERED = 1, /* what the owner sends lies in its heap (or it sends nothing) */
    SMPI_FLAG_RECV_REGISTERED = 2, /* where the owner receives lies in its heap (or it receives nothing) */
    SMPI_FLAG_NEEDS_MPI = 4,       /* the owner asks for the path mpi; `why` says for which reason */
    SMPI_FLAG_ALIAS = 8,           /* the owner's send and receive buffers overlap */
    SMPI_FLAG_MISFIT = 16,         /* the owner's own send and receive counts do not fit each other */
};

/* A gate's `revoked`: its owner thinks about leaving the operator in the middle; it has left, and the communicator is no good any
 * more. */
enum { SMPI_LEAVING = 1, SMPI_LEFT = 2 };

struct smpi_line {
    _Alignas(SMPI_LINE_PAIR) _Atomic uint64_t epoch; /* written last, with release */
    uint8_t operator_, type, op, unused;             /* these eight bytes are the signature, */
    int32_t root;                                    /* compared as one word */
    uint64_t count;                                  /* elements (reductions) or bytes; 0 where ranks may differ */
    uint8_t flags, why;
    union {
        uint8_t payload[SMPI_PAYLOAD_BYTES];
        struct {
            uint64_t send, recv; /* user buffers, as the owner addresses them */
            uint64_t stage;      /* the owner's staging memory (coll/stage.h), 0 if it has none */
            uint64_t bytes;      /* what the owner sends, where ranks may differ */
            uint64_t digest;     /* of tables that must be the same on all ranks */
            uint64_t layouts;    /* of what the owner sends to and receives from each rank; 0: no gaps anywhere */
        };
    };
};
_Static_assert(sizeof(struct smpi_line) == SMPI_LINE_PAIR, "an entry line is one pair of cache lines");

struct smpi_gate {
    struct smpi_line line[SMPI_LINES];
    _Alignas(SMPI_LINE_PAIR) _Atomic uint64_t phase;
    _Alignas(SMPI_LINE_PAIR) _Atomic uint32_t asleep;
    _Atomic uint32_t revoked;
    _Alignas(SMPI_LINE_PAIR) _Atomic uint32_t closed;
    _Alignas(SMPI_LINE_PAIR) uint8_t slot[SMPI_LINES][SMPI_SLOT_BYTES];
};

#endif
