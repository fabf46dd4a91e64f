/* kernels_base.c - the kernels for every machine of the architecture. */
#define KERNELS_TABLE smpi_kernels_base
#define KERNELS_NAME "base"
#include "kernels_body.h"
