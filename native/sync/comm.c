/* comm.c - a communicator's life on this rank: new, open, close.
 *
 * A gate may be freed only when no peer reads it any more, and nobody may wait for that. So every rank that closes adds one to
 * `closed` of each peer's gate, its own side being done; the rank whose gate has been closed by all peers, or who closes last, may
 * free it. The owner keeps gates that are not there yet on its world's list and looks through it when it makes the next one. */
#include "comm.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "../base/error.h"
#include "../memory/shadow.h"

#define SPIN_NS_WHEN_ROOMY 300000

static void reclaim(struct smpi_world *world)
{
    pthread_mutex_lock(&world->parting_lock);
    struct smpi_parting **link = &world->parting;
    while (*link) {
        struct smpi_parting *parting = *link;
        if (smpi_read_acquire(&((struct smpi_gate *)parting->gate)->closed) == parting->peers) {
            *link = parting->next;
            smpi_heap_free(world, parting->gate);
            smpi_heap_free(world, parting->stage);
            free(parting);
        } else {
            link = &parting->next;
        }
    }
    pthread_mutex_unlock(&world->parting_lock);
}

smpi_comm *smpi_comm_new(smpi_world *world, int rank, int size)
{
    reclaim(world);
    struct smpi_comm *comm = calloc(1, sizeof *comm);
    struct smpi_parting *parting = calloc(1, sizeof *parting);
    int32_t *members = calloc((size_t)size, sizeof *members);
    struct smpi_gate **gates = calloc((size_t)size, sizeof *gates);
    void **pointers = calloc(3 * (size_t)size + 1, sizeof *pointers);
    int64_t *runs = calloc(4 * (size_t)size, sizeof *runs);
    struct smpi_gate *gate = smpi_heap_alloc(world, sizeof *gate, 0);
    if (!comm || !parting || !members || !gates || !pointers || !runs || !gate) {
        smpi_heap_free(world, gate);
        free(runs);
        free(pointers);
        free(gates);
        free(members);
        free(parting);
        free(comm);
        smpi_fail(SMPI_ERR_NOMEM, "no memory for a communicator of %d ranks", size);
        return NULL;
    }
    memset(gate, 0, offsetof(struct smpi_gate, slot)); /* slots are read only after they are written */
    gates[rank] = gate;
    const int64_t spin = smpi_setting_number(SMPI_SET_SPIN);
    *comm = (struct smpi_comm){.world = world,
                               .rank = rank,
                               .size = size,
                               .members = members,
                               .gate = gates,
                               .pointers = pointers,
                               .runs = runs,
                               .parting = parting};
    comm->crowded = world->size > world->cores;
    comm->spin_ns = spin >= 0 ? spin * 1000 : comm->crowded ? 0 : SPIN_NS_WHEN_ROOMY;
    return comm;
}

uint64_t smpi_comm_gate(const smpi_comm *comm)
{
    return (uint64_t)(uintptr_t)comm->gate[comm->rank];
}

int smpi_comm_open(smpi_comm *comm, const int32_t *members, const uint64_t *gates)
{
    for (int i = 0; i < comm->size; i++) {
        if (members[i] < 0 || members[i] >= comm->world->size) {
            return smpi_fail(SMPI_ERR_ARG, "member %d of a communicator is rank %d of a supernode of %d", i, members[i],
                             comm->world->size);
        }
    }
    for (int i = 0; i < comm->size; i++) {
        comm->members[i] = members[i];
        comm->gate[i] = smpi_shadow(comm->world, members[i], gates[i]);
    }
    return SMPI_OK;
}

void smpi_comm_close(smpi_comm *comm)
{
    struct smpi_world *world = comm->world;
    struct smpi_parting *parting = comm->parting;
    *parting =
        (struct smpi_parting){.gate = comm->gate[comm->rank], .stage = comm->stage, .peers = (uint32_t)comm->size - 1};
    int opened = 1;
    for (int i = 0; i < comm->size; i++) {
        opened &= comm->gate[i] != NULL;
    }
    if (opened) {
        for (int i = 0; i < comm->size; i++) {
            if (i != comm->rank) {
                atomic_fetch_add_explicit(&comm->gate[i]->closed, 1, memory_order_release);
            }
        }
    } else {
        parting->peers = 0; /* nobody ever saw this gate */
    }
    pthread_mutex_lock(&world->parting_lock);
    parting->next = world->parting;
    world->parting = parting;
    pthread_mutex_unlock(&world->parting_lock);
    free(comm->runs);
    free(comm->pointers);
    free(comm->gate);
    free(comm->members);
    comm->is_closed = 1;
    reclaim(world);
}

int smpi_comm_is_closed(const smpi_comm *comm)
{
    return comm->is_closed;
}

void smpi_comm_delete(smpi_comm *comm)
{
    free(comm);
}
