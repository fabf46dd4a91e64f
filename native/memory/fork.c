/* fork.c - the process-wide list of fork guards.
 *
 * One of the few globals of the runtime: pthread_atfork knows the process, not the rank. The list's lock is held
 * across fork, so the child never sees a half-made list. */
#include "fork.h"

#include <pthread.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static struct smpi_fork_guard *guards;

static void before_fork(void)
{
    pthread_mutex_lock(&lock);
}

static void in_parent(void)
{
    pthread_mutex_unlock(&lock);
}

static void in_child(void)
{
    for (struct smpi_fork_guard *guard = guards; guard; guard = guard->next) {
        guard->in_child(guard);
    }
    pthread_mutex_unlock(&lock);
}

static void install(void)
{
    pthread_atfork(before_fork, in_parent, in_child);
}

void smpi_fork_guard(struct smpi_fork_guard *guard, void (*child)(struct smpi_fork_guard *guard))
{
    pthread_once(&once, install);
    pthread_mutex_lock(&lock);
    guard->in_child = child;
    guard->next = guards;
    guards = guard;
    pthread_mutex_unlock(&lock);
}

void smpi_fork_unguard(struct smpi_fork_guard *guard)
{
    pthread_mutex_lock(&lock);
    struct smpi_fork_guard **link = &guards;
    while (*link && *link != guard) {
        link = &(*link)->next;
    }
    if (*link) {
        *link = guard->next;
    }
    pthread_mutex_unlock(&lock);
}
