/* stream.h - when a large operator writes past the caches.
 *
 * Non-temporal stores save the read of every line that is written, but take the result out of the caches; they pay when the bytes
 * an operator touches, on all ranks together, do not fit in the last-level cache anyway. */
#ifndef SMPI_COLL_STREAM_H
#define SMPI_COLL_STREAM_H

#include <stddef.h>

/* working_set: bytes all ranks of the operator read and write together. */
int smpi_stream_wanted(size_t working_set);

#endif
