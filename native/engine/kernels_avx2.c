/* kernels_avx2.c - the kernels with 32-byte vectors. Built with -mavx2 and -mf16c, empty outside x86-64. */
#if defined(__x86_64__)
#if !defined(__AVX2__) || !defined(__F16C__)
#error "this file needs -mavx2 -mf16c"
#endif
#define KERNELS_TABLE smpi_kernels_avx2
#define KERNELS_NAME "avx2"
#include "kernels_body.h"
#endif
