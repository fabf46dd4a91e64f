/* order.h - the whole memory-ordering vocabulary of the runtime: six words.
 *
 * A word that several ranks see is a C11 _Atomic, has one writer (unless its declaration says otherwise) and is touched only
 * through these. release: everything this rank wrote before is visible to whoever reads the word with acquire and sees the
 * value. relaxed: the value alone. fence: orders this rank's earlier stores before its later loads; needed only where two ranks
 * each write one word and then read the other's (going to sleep against posting). Fences order nothing else here: ThreadSanitizer
 * understands release and acquire on the word itself, not fences. */
#ifndef SMPI_BASE_ORDER_H
#define SMPI_BASE_ORDER_H

#include <stdatomic.h>

#define smpi_read_acquire(word) atomic_load_explicit((word), memory_order_acquire)
#define smpi_read_relaxed(word) atomic_load_explicit((word), memory_order_relaxed)
#define smpi_write_release(word, value) atomic_store_explicit((word), (value), memory_order_release)
#define smpi_write_relaxed(word, value) atomic_store_explicit((word), (value), memory_order_relaxed)
#define smpi_fence() atomic_thread_fence(memory_order_seq_cst)

/* Stores past the caches are outside of the order above until this. */
static inline void smpi_drain(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_sfence();
#endif
}

/* Words written by different ranks lie this many bytes apart: a cache line and the one the prefetcher fetches with it. */
#define SMPI_LINE 64
#define SMPI_LINE_PAIR 128

/* Tells the core that this is a spin loop. */
static inline void smpi_pause(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("isb" ::: "memory");
#endif
}

#endif
