/* kernels.h - the table of loops that touch user data: reductions and copies, one table per instruction set.
 *
 * The loops are written once (kernels_body.h) and compiled several times; smpi_kernels() picks a table once
 * (STRATAMPI_KERNELS forces one). All tables give the same bits: no contraction to FMA, no reassociation, sources
 * combined strictly in order; float16 and bfloat16 accumulate in float and are rounded once (to nearest even). No
 * alignment is required of any pointer. The one freedom: where two NaNs meet, which of their payloads survives is open
 * (the result is a NaN everywhere). */
#ifndef SMPI_ENGINE_KERNELS_H
#define SMPI_ENGINE_KERNELS_H

#include <string.h>

#include "../stratampi.h"

/* Up to here memcpy is best. Beyond, glibc may take `rep movsb`, which on AMD's Zen 3 and 4 falls to a tenth of its speed for some
 * distances between source and destination modulo the page size (glibc bug 30994); copy is a loop of its own. */
#define SMPI_SHORT_COPY 1024

/* dst[i] = sources[0][i] op sources[1][i] op …, count elements, 1 <= num_sources; one source is copied as it is. dst
 * may be the same address as any source, but must not overlap one otherwise. With count 0 no pointer is looked at.
 * Padding inside an element (long double) is not part of the result. */
typedef void smpi_reduce_kernel(void *dst, const void *const *sources, int num_sources, size_t count);

struct smpi_kernels {
    const char *name;                                           /* "base", "avx2", "avx512" */
    smpi_reduce_kernel *reduce[SMPI_TYPE_COUNT][SMPI_OP_COUNT]; /* NULL where smpi_op_is_legal() is 0 */
    /* Copies that do not overlap. stream writes past the caches (non-temporal stores); its bytes are published by
     * smpi_drain and a release store after it (smpi_sync does both). stream_to_all does so to each dsts[i] + offset; num_dsts >= 1.
     * */
    void (*copy)(void *dst, const void *src, size_t bytes);
    void (*stream)(void *dst, const void *src, size_t bytes);
    void (*stream_to_all)(char *const *dsts, int num_dsts, size_t offset, const void *src, size_t bytes);
};

/* The table in use. Never NULL; thread-safe. A table that STRATAMPI_KERNELS names and this machine cannot run is
 * replaced by the best one it can. */
const struct smpi_kernels *smpi_kernels(void);

/* The copy for bytes of any number. */
static inline void smpi_copy(void *dst, const void *src, size_t bytes)
{
    if (bytes > SMPI_SHORT_COPY) {
        smpi_kernels()->copy(dst, src, bytes);
    } else if (bytes) {
        memcpy(dst, src, bytes);
    }
}

/* The table of that name; NULL if this build or this machine has none. */
const struct smpi_kernels *smpi_kernels_named(const char *name);

/* The tables of this build, for dispatch.c alone: a machine may not be able to run them. base is what every machine of
 * the architecture runs; on aarch64 that is NEON already. */
extern const struct smpi_kernels smpi_kernels_base;
#if defined(__x86_64__)
extern const struct smpi_kernels smpi_kernels_avx2;
extern const struct smpi_kernels smpi_kernels_avx512;
#endif

#endif
