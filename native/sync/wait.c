/* wait.c - waiting for the words that peers write: spin, then sleep, without a lost wake-up and without a fence on the fast path.
 *
 * Who wakes whom: a rank that has to sleep says so in its own bell and looks at all words once more; a rank that finds all words
 * in place (every rank does, the last to arrive at once) looks at all bells and wakes the sleepers. The race between "I sleep" and
 * "I was the last" is closed by a fence on the sleeper's side and, where sleeping is the rule (crowded), on the other. Where
 * spinning is the rule the second fence is left out: a wake-up lost there costs one millisecond, the sleep's own limit, and it
 * needs the last rank's store to linger in its store buffer just while the sleeper's spinning time runs out. */
#include "wait.h"

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "../base/error.h"

#define HOOK_INTERVAL_NS 1000000
#define SPINS_PER_CLOCK 64
#define YIELDS 4

int64_t smpi_now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static void futex_wait(_Atomic uint32_t *word, uint32_t value, int64_t ns)
{
    const struct timespec limit = {.tv_sec = ns / 1000000000, .tv_nsec = ns % 1000000000};
    syscall(SYS_futex, word, FUTEX_WAIT, value, &limit, NULL, 0);
}

static void futex_wake(_Atomic uint32_t *word)
{
    syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

/* The word at `offset` in rank's gate: an epoch or a phase. */
static _Atomic uint64_t *word_of(const struct smpi_comm *comm, int rank, size_t offset)
{
    return (_Atomic uint64_t *)(void *)((char *)comm->gate[rank] + offset);
}

/* The first rank from `start` on whose word is below value; comm->size if there is none. */
static int first_missing(const struct smpi_comm *comm, size_t offset, uint64_t value, int start)
{
    int rank = start;
    while (rank < comm->size && smpi_read_acquire(word_of(comm, rank, offset)) >= value) {
        rank++;
    }
    return rank;
}

static int revoked_by(const struct smpi_comm *comm)
{
    for (int rank = 0; rank < comm->size; rank++) {
        if (smpi_read_acquire(&comm->gate[rank]->revoked) == SMPI_LEFT) {
            return rank;
        }
    }
    return -1;
}

static int give_up(struct smpi_comm *comm, int status)
{
    comm->revoked = 1;
    smpi_write_release(&comm->gate[comm->rank]->revoked, SMPI_LEFT);
    return status;
}

/* The hook wants this rank to stop. 1: it has left, and nobody will touch its memory. 0: too late, the operator is under way on
 * some peer and must be completed here too; the caller is told afterwards.
 *
 * A peer that finds all words in place goes on unless a rank is leaving. So say so, give every core the time to make its word
 * visible, and look: if a word is still missing, its owner will see this rank's mark before it goes on, and so will all who wait
 * for that word. */
static int leave(struct smpi_comm *comm)
{
    if (comm->interrupted) { /* asked for the second time: at whatever cost */
        give_up(comm, 0);
        return 1;
    }
    _Atomic uint32_t *mark = &comm->gate[comm->rank]->revoked;
    atomic_exchange(mark, SMPI_LEAVING);
    const struct timespec moment = {.tv_nsec = 1000000};
    nanosleep(&moment, NULL);
    if (comm->awaited != offsetof(struct smpi_gate, phase) &&
        first_missing(comm, comm->awaited, comm->awaited_value, 0) < comm->size) {
        give_up(comm, 0);
        return 1;
    }
    smpi_write_release(mark, 0);
    return 0;
}

/* All words are in place: whether nobody is leaving. Waits for those who are thinking about it. -1, or the rank that left. */
static int left_by(const struct smpi_comm *comm)
{
    for (int rank = 0; rank < comm->size; rank++) {
        uint32_t mark;
        while ((mark = smpi_read_acquire(&comm->gate[rank]->revoked)) == SMPI_LEAVING) {
            sched_yield();
        }
        if (mark == SMPI_LEFT) {
            return rank;
        }
    }
    return -1;
}

static int revoked(struct smpi_comm *comm, int culprit)
{
    return smpi_fail(give_up(comm, SMPI_ERR_REVOKED),
                     "rank %d gave up in the middle of operator %llu of this communicator", culprit,
                     (unsigned long long)comm->epoch);
}

/* Everybody is here: let those run who went to sleep before the last came, and see that nobody has left. */
static int arrive(struct smpi_comm *comm)
{
    if (comm->crowded) {
        smpi_fence();
    }
    for (int rank = 0; rank < comm->size; rank++) {
        _Atomic uint32_t *asleep = &comm->gate[rank]->asleep;
        if (rank != comm->rank && smpi_read_relaxed(asleep) && atomic_exchange(asleep, 0)) {
            futex_wake(asleep);
        }
    }
    const int culprit = left_by(comm);
    return culprit < 0 ? SMPI_OK : revoked(comm, culprit);
}

static int sleep_until(struct smpi_comm *comm, size_t offset, uint64_t value, int missing)
{
    _Atomic uint32_t *asleep = &comm->gate[comm->rank]->asleep;
    int64_t hook_at = smpi_now_ns() + HOOK_INTERVAL_NS;
    for (;;) {
        smpi_write_relaxed(asleep, 1);
        smpi_fence();
        missing = first_missing(comm, offset, value, missing);
        if (missing == comm->size) {
            break;
        }
        const int culprit = revoked_by(comm);
        if (culprit >= 0) {
            smpi_write_relaxed(asleep, 0);
            return revoked(comm, culprit);
        }
        int64_t now = smpi_now_ns();
        if (now < hook_at) {
            futex_wait(asleep, 1, hook_at - now);
            now = smpi_now_ns();
        }
        if (now >= hook_at) {
            hook_at = now + HOOK_INTERVAL_NS;
            if (comm->world->hook && comm->world->hook()) {
                if (leave(comm)) {
                    smpi_write_relaxed(asleep, 0);
                    return smpi_fail(SMPI_ERR_INTERRUPTED, "interrupted while waiting for rank %d in operator %llu",
                                     missing, (unsigned long long)comm->epoch);
                }
                comm->interrupted = 1;
            }
        }
    }
    smpi_write_relaxed(asleep, 0);
    return SMPI_OK;
}

/* Cheaper than sleeping when the missing ranks only need this core for a moment. */
static int yield(const struct smpi_comm *comm, int missing)
{
    for (int i = 0; i < YIELDS && missing < comm->size; i++) {
        sched_yield();
        missing = first_missing(comm, comm->awaited, comm->awaited_value, missing);
    }
    return missing;
}

int smpi_wait(struct smpi_comm *comm)
{
    const size_t offset = comm->awaited;
    const uint64_t value = comm->awaited_value;
    int missing = first_missing(comm, offset, value, 0);
    if (missing < comm->size && comm->crowded) {
        missing = yield(comm, missing);
    }
    if (missing < comm->size && comm->spin_ns) {
        int64_t until = 0;
        do {
            for (int i = 0; i < SPINS_PER_CLOCK && missing < comm->size; i++) {
                smpi_pause();
                missing = first_missing(comm, offset, value, missing);
            }
            if (missing < comm->size && !until) {
                until = smpi_now_ns() + comm->spin_ns;
            }
        } while (missing < comm->size && smpi_now_ns() < until);
    }
    if (missing < comm->size) {
        const int status = sleep_until(comm, offset, value, missing);
        if (status) {
            return status;
        }
    }
    return arrive(comm);
}

int smpi_poll(struct smpi_comm *comm)
{
    if (first_missing(comm, comm->awaited, comm->awaited_value, 0) < comm->size) {
        const int culprit = revoked_by(comm);
        return culprit < 0 ? SMPI_AGAIN : revoked(comm, culprit);
    }
    return arrive(comm);
}

void smpi_doze(struct smpi_comm *comm, int64_t until)
{
    int missing = first_missing(comm, comm->awaited, comm->awaited_value, 0);
    if (missing < comm->size && comm->crowded) {
        missing = yield(comm, missing);
    }
    int64_t now = smpi_now_ns();
    while (missing < comm->size && now < until && comm->spin_left > 0) {
        const int64_t before = now;
        for (int i = 0; i < SPINS_PER_CLOCK && missing < comm->size; i++) {
            smpi_pause();
            missing = first_missing(comm, comm->awaited, comm->awaited_value, missing);
        }
        now = smpi_now_ns();
        comm->spin_left -= now - before;
    }
    if (missing < comm->size && now < until) {
        _Atomic uint32_t *asleep = &comm->gate[comm->rank]->asleep;
        smpi_write_relaxed(asleep, 1);
        smpi_fence();
        if (first_missing(comm, comm->awaited, comm->awaited_value, missing) < comm->size && revoked_by(comm) < 0) {
            const int64_t left = until - now;
            futex_wait(asleep, 1, left < HOOK_INTERVAL_NS ? left : HOOK_INTERVAL_NS);
        }
        smpi_write_relaxed(asleep, 0);
    }
}

int smpi_may_enter(const struct smpi_comm *comm)
{
    return comm->revoked
               ? smpi_fail(SMPI_ERR_REVOKED, "this communicator was revoked: operator %llu was given up in the middle",
                           (unsigned long long)comm->epoch)
               : SMPI_OK;
}

void smpi_post_line(struct smpi_comm *comm)
{
    struct smpi_line *line = smpi_next_line(comm);
    comm->epoch++;
    comm->awaited = offsetof(struct smpi_gate, line) + (comm->epoch % SMPI_LINES) * sizeof(struct smpi_line);
    comm->awaited_value = comm->epoch;
    comm->spin_left = comm->spin_ns;
    smpi_write_release(&line->epoch, comm->epoch);
}

void smpi_post_phase(struct smpi_comm *comm)
{
    comm->phase++;
    comm->awaited = offsetof(struct smpi_gate, phase);
    comm->awaited_value = comm->phase;
    comm->spin_left = comm->spin_ns;
    smpi_drain();
    smpi_write_release(&comm->gate[comm->rank]->phase, comm->phase);
}
