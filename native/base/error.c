/* error.c - status names and the thread's last reason.
 *
 * The reason belongs to the thread, not to the process: several communicators may be used by several threads, and a
 * reason must not be overwritten between the failing call and the caller that reads it. It is one line, because it ends
 * up inside one line of an exception or of a log. */
#include "error.h"

#include <stdarg.h>
#include <stdio.h>

static _Thread_local char reason[2048];

const char *smpi_status_name(int status)
{
    switch ((enum smpi_status)status) { /* no default: the compiler names a status that is missing here */
    case SMPI_OK: return "SMPI_OK";
    case SMPI_MPI: return "SMPI_MPI";
    case SMPI_AGAIN: return "SMPI_AGAIN";
    case SMPI_PARSE: return "SMPI_PARSE";
    case SMPI_ERR_NOMEM: return "SMPI_ERR_NOMEM";
    case SMPI_ERR_ARG: return "SMPI_ERR_ARG";
    case SMPI_ERR_SYS: return "SMPI_ERR_SYS";
    case SMPI_ERR_REFUSED: return "SMPI_ERR_REFUSED";
    case SMPI_ERR_TIMEOUT: return "SMPI_ERR_TIMEOUT";
    case SMPI_ERR_MISMATCH: return "SMPI_ERR_MISMATCH";
    case SMPI_ERR_INTERRUPTED: return "SMPI_ERR_INTERRUPTED";
    case SMPI_ERR_REVOKED: return "SMPI_ERR_REVOKED";
    case SMPI_ERR_ALIAS: return "SMPI_ERR_ALIAS";
    }
    return "unknown status";
}

const char *smpi_reason(void)
{
    return reason;
}

int smpi_fail(int status, const char *format, ...)
{
    /* Formatted aside, so that an old reason may be an argument of the new one. */
    char text[sizeof reason];
    va_list arguments;
    va_start(arguments, format);
    int length = vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    if (length < 0)
        text[0] = '\0';
    char *to = reason;
    for (const char *from = text; *from != '\0'; from++)
        *to++ = (*from == '\n' || *from == '\r') ? ' ' : *from;
    *to = '\0';
    return status;
}
