/* stratampi.h - the runtime's public declarations, for C and (through cffi) for Python: the texts of cdef/ and what they need. */
#ifndef STRATAMPI_H
#define STRATAMPI_H

#include <stddef.h>
#include <stdint.h>

#include "../cdef/status.h"
#include "../cdef/setting.h"
#include "../cdef/world.h"
#include "../cdef/heap.h"
#include "../cdef/layout.h"
#include "../cdef/coll.h"
#include "../cdef/request.h"
#include "../cdef/array.h"

#endif
