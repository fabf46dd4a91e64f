/* kernels_avx512.c - the kernels with 64-byte vectors. Built with -mavx512f, bw, vl, dq and -mf16c, empty outside
 * x86-64. */
#if defined(__x86_64__)
#if !defined(__AVX512F__) || !defined(__AVX512BW__) || !defined(__AVX512VL__) || !defined(__AVX512DQ__) || \
    !defined(__F16C__)
#error "this file needs -mavx512f -mavx512bw -mavx512vl -mavx512dq -mf16c"
#endif
#define KERNELS_TABLE smpi_kernels_avx512
#define KERNELS_NAME "avx512"
#include "kernels_body.h"
#endif
