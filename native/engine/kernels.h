/* kernels.h - the table of loops that touch user data: reductions and copies, one table per instruction set.
 *
 * The loops are written once (kernels_body.h) and compiled several times; smpi_kernels() picks a table once (STRATAMPI_KERNELS
 * forces one). All tables give the same bits: no contraction to FMA, no reassociation, sources combined strictly in order;
 * float16 and bfloat16 accumulate in float and are rounded once (to nearest even). No alignment is required of any pointer. */
#ifndef SMPI_ENGINE_KERNELS_H
#define SMPI_ENGINE_KERNELS_H

#include "../stratampi.h"

/* dst[i] = sources[0][i] op sources[1][i] op …, count elements, 1 <= sources. dst may be the same address as any source, but must
 * not overlap one otherwise. */
typedef void smpi_reduce_kernel(void *dst, const void *const *sources, int num_sources, size_t count);

struct smpi_kernels {
    const char *name;                                          /* "base", "avx2", "avx512", "neon" */
    smpi_reduce_kernel *reduce[SMPI_TYPE_COUNT][SMPI_OP_COUNT]; /* NULL where smpi_op_is_legal() is 0 */
    /* Copies that do not overlap. stream writes past the caches (non-temporal stores) and ends with a store fence, so that a
     * release store after it publishes the bytes. */
    void (*copy)(void *dst, const void *src, size_t bytes);
    void (*stream)(void *dst, const void *src, size_t bytes);
};

/* The table in use. Never NULL; thread-safe. */
const struct smpi_kernels *smpi_kernels(void);

/* The table of that name; NULL if this build or this machine has none. For tests. */
const struct smpi_kernels *smpi_kernels_named(const char *name);

#endif
