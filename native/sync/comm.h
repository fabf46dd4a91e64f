/* comm.h - one rank's handle on a communicator: its members' gates and its place in the sequence of operators.
 *
 * Private to the rank; used by one thread at a time (MPI's own rule for collectives on one communicator). */
#ifndef SMPI_SYNC_COMM_H
#define SMPI_SYNC_COMM_H

#include "../fabric/world.h"
#include "gate.h"

struct smpi_comm {
    struct smpi_world *world;
    int rank, size;
    int32_t *members;             /* [size] supernode rank of each communicator rank */
    struct smpi_gate **gate;      /* [size] as mapped here */
    void **pointers;              /* [3 size + 1] scratch for one operator's lists of sources and sinks */
    int64_t *runs;                /* [4 size] scratch for one operator's counts and displacements, in bytes */
    uint64_t epoch;               /* of the last operator entered */
    uint64_t phase;               /* of the last synchronisation inside operators */
    size_t awaited;               /* offset in a gate of the word that all ranks must bring to … */
    uint64_t awaited_value;       /* … this value before this rank goes on */
    int64_t spin_ns;              /* how long to spin before sleeping */
    int64_t spin_left;            /* of it, for a wait in several pieces (smpi_doze) */
    int crowded;                  /* ranks outnumber cores: let others run at once */
    int revoked;                  /* an operator was given up in the middle; nothing works any more */
    int interrupted;              /* the hook wanted to stop when it was too late */
    int is_closed;                /* nothing but this struct is left */
    char *stage;                  /* this rank's staging memory (coll/stage.h), allocated at first use */
    struct smpi_parting *parting; /* made with the communicator, so that closing cannot fail */
};

/* This rank's line and slot for the operator it is about to enter, and another rank's for the operator just entered. */
static inline struct smpi_line *smpi_next_line(struct smpi_comm *comm)
{
    return &comm->gate[comm->rank]->line[(comm->epoch + 1) % SMPI_LINES];
}

static inline uint8_t *smpi_next_slot(struct smpi_comm *comm)
{
    return comm->gate[comm->rank]->slot[(comm->epoch + 1) % SMPI_LINES];
}

static inline const struct smpi_line *smpi_line_of(const struct smpi_comm *comm, int rank)
{
    return &comm->gate[rank]->line[comm->epoch % SMPI_LINES];
}

static inline const uint8_t *smpi_slot_of(const struct smpi_comm *comm, int rank)
{
    return comm->gate[rank]->slot[comm->epoch % SMPI_LINES];
}

#endif
