/* dispatch.c - picks the kernels' table: the best one this machine runs, or the one STRATAMPI_KERNELS names.
 *
 * Picked once per process. Two threads that come first at the same time pick the same table, so the choice needs no
 * lock: the pointer is all there is to publish. */
#include "kernels.h"

#include <string.h>

#include "../base/order.h"

static int runs_base(void)
{
    return 1;
}

#if defined(__x86_64__)
/* Each asks for exactly what CMakeLists.txt lets the compiler use in that file; the builtin also asks the operating
 * system. */
static int runs_avx2(void)
{
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
}

static int runs_avx512(void)
{
    return runs_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}
#endif

/* Best first; the last one runs everywhere. */
static const struct {
    const struct smpi_kernels *table;
    int (*runs)(void);
} candidates[] = {
#if defined(__x86_64__)
    {&smpi_kernels_avx512, runs_avx512},
    {&smpi_kernels_avx2, runs_avx2},
#endif
    {&smpi_kernels_base, runs_base},
};

#define NUM_CANDIDATES (sizeof candidates / sizeof candidates[0])

const struct smpi_kernels *smpi_kernels_named(const char *name)
{
    for (size_t i = 0; i < NUM_CANDIDATES; i++) {
        if (strcmp(candidates[i].table->name, name) == 0)
            return candidates[i].runs() ? candidates[i].table : NULL;
    }
    return NULL;
}

static const struct smpi_kernels *pick(void)
{
    const struct smpi_kernels *named = smpi_kernels_named(smpi_setting_text(SMPI_SET_KERNELS));
    if (named != NULL)
        return named;
    size_t i = 0;
    while (!candidates[i].runs())
        i++;
    return candidates[i].table;
}

const struct smpi_kernels *smpi_kernels(void)
{
    static const struct smpi_kernels *_Atomic picked;
    const struct smpi_kernels *table = smpi_read_acquire(&picked);
    if (table == NULL) {
        table = pick();
        smpi_write_release(&picked, table);
    }
    return table;
}

const char *smpi_kernels_name(void)
{
    return smpi_kernels()->name;
}
