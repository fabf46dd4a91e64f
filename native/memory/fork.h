/* fork.h - what must happen to memory in a forked child: a small list of guards whose functions run there, before
 * fork returns.
 *
 * The child shares every segment with its parent's peers, yet is no rank: nothing it allocates or writes may reach
 * them. The functions run in the only thread of the child, while locks of the parent's other threads may be held for
 * ever: they must take none. vfork and posix_spawn call nothing, and need not. */
#ifndef SMPI_MEMORY_FORK_H
#define SMPI_MEMORY_FORK_H

struct smpi_fork_guard {
    void (*in_child)(struct smpi_fork_guard *guard);
    struct smpi_fork_guard *next;
};

/* The guard stays the caller's memory, and in the list until unguard. Thread-safe. */
void smpi_fork_guard(struct smpi_fork_guard *guard, void (*child)(struct smpi_fork_guard *guard));
void smpi_fork_unguard(struct smpi_fork_guard *guard);

#endif
