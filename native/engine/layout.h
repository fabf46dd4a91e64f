/* layout.h - inside view of layouts (public calls: cdef/layout.h). */
#ifndef SMPI_ENGINE_LAYOUT_H
#define SMPI_ENGINE_LAYOUT_H

#include "../stratampi.h"

struct smpi_layout {
    int64_t extent;    /* bytes from one element to the next; any sign */
    int64_t bytes;     /* of one element, gaps not counted */
    int64_t low, high; /* where they lie */
    struct smpi_node node[];
};

#endif
