/* enter.h - the first half of every operator: say what I was asked to do, hear what the others were, agree on the path.
 *
 * Between smpi_begin and posting, the front end fills in type, op, root, count, and payload or addresses. When everybody has
 * posted, smpi_agree compares signature and count. What may differ between ranks (counts of v-operators) the front end compares
 * afterwards, from the same lines and slots on every rank, and reports with smpi_mismatch: a pure function of what everybody
 * published, so all ranks come to the same result without another word. */
#ifndef SMPI_COLL_ENTER_H
#define SMPI_COLL_ENTER_H

#include "../sync/comm.h"

/* This rank's next entry line, signature and flags still empty. */
struct smpi_line *smpi_begin(struct smpi_comm *comm, int operator_);

/* SMPI_OK: all agree and the native path does it. Anything else is the operator's result. */
int smpi_agree(struct smpi_comm *comm);

/* This rank cannot do it natively. */
void smpi_ask_for_mpi(struct smpi_comm *comm, struct smpi_line *line, int why);

/* A buffer in pieces: piece i is counts[i] bytes at base + displs[i]; with gaps where layouts and layouts[i] are not NULL. */
struct smpi_pieces {
    const void *base;
    const int64_t *counts, *displs;
    const smpi_layout *const *layouts;
};

/* Fill the address and say whether all of it is registered; bytes or pieces as the operator has it. What a rank does not send or
 * receive it does not publish: nothing counts as registered. A source that is not registered passes this rank's stage. */
void smpi_publish_send(struct smpi_comm *comm, struct smpi_line *line, const void *send, size_t bytes);
void smpi_publish_recv(struct smpi_comm *comm, struct smpi_line *line, const void *recv, size_t bytes);
void smpi_publish_send_pieces(struct smpi_comm *comm, struct smpi_line *line, struct smpi_pieces send);
void smpi_publish_recv_pieces(struct smpi_comm *comm, struct smpi_line *line, struct smpi_pieces recv);

/* Publishes this rank's stage; without memory for it the rank asks for the path mpi. */
void smpi_publish_stage(struct smpi_comm *comm, struct smpi_line *line);

/* Flags the line if a piece sent and a piece received overlap. NULL (MPI.IN_PLACE) overlaps nothing. */
void smpi_check_alias(struct smpi_line *line, const void *send, size_t send_bytes, const void *recv, size_t recv_bytes);
void smpi_check_alias_pieces(const struct smpi_comm *comm, struct smpi_line *line, struct smpi_pieces send,
                             struct smpi_pieces recv);

/* 1 if all members' lines of the current operator have the flag. */
int smpi_all_have(const struct smpi_comm *comm, int flag);

/* A number that differs, but for a rare chance, where counts differ; for tables that must be the same on all ranks. */
uint64_t smpi_digest_of(const int64_t *counts, int size);

/* Counts the operator for smpi_stats; bytes: what this rank passed in. */
void smpi_count(struct smpi_comm *comm, int operator_, int path, size_t bytes);

/* Writes every rank's arguments into the reason and returns SMPI_ERR_MISMATCH. `what`: which counts do not fit, or NULL. */
int smpi_mismatch(struct smpi_comm *comm, const char *what);

#endif
