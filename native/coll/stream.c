/* stream.c - see stream.h. */
#include "stream.h"

#include <unistd.h>

#include "../stratampi.h"

#define CACHE_WHEN_UNKNOWN (32 << 20)

int smpi_stream_wanted(size_t working_set)
{
    const int64_t setting = smpi_setting_number(SMPI_SET_STREAM_MIN);
    if (setting >= 0) {
        return working_set >= (size_t)setting;
    }
    const long cache = sysconf(_SC_LEVEL3_CACHE_SIZE);
    return working_set > (size_t)(cache > 0 ? cache : CACHE_WHEN_UNKNOWN);
}
