/* error.h - the one way an error is reported: whoever first knows the reason writes it here and returns the status. */
#ifndef SMPI_BASE_ERROR_H
#define SMPI_BASE_ERROR_H

#include "../stratampi.h"

/* Writes the thread's reason (printf format, cut at 2047 bytes, newlines become spaces) and returns `status`:
 *     return smpi_fail(SMPI_ERR_SYS, "memfd_create: %s", strerror(errno)); */
int smpi_fail(int status, const char *format, ...) __attribute__((format(printf, 2, 3)));

#endif
