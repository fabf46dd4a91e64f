/* driver.h - what the two drivers owe the rest of the fabric, and the address range both map into.
 *
 * A driver fills world->bytes and world->segment[0..size) and then sets world->driver to its name, in this order, so
 * that a world whose driver is not "none" is one whose segments are all mapped. Nothing is half done: a call that fails
 * leaves the world as it was. */
#ifndef SMPI_FABRIC_DRIVER_H
#define SMPI_FABRIC_DRIVER_H

#include "world.h"

#define SMPI_DRIVER_NONE "none"
#define SMPI_DRIVER_MEMFD "memfd"
#define SMPI_DRIVER_WINDOW "window"

/* Segments begin and end on these: huge pages fit, and every address of a segment has the same offset from it on every
 * rank. */
#define SMPI_SEGMENT_UNIT (UINT64_C(2) << 20)

/* total bytes of address space at base, inaccessible; base 0: anywhere, on a boundary of SMPI_SEGMENT_UNIT. NULL: errno
 * says why. */
char *smpi_range_reserve(uint64_t base, uint64_t total);
/* The segments are mapped side by side from begin, in a range of ours: from now on they are used there. */
void smpi_range_use(struct smpi_world *world, char *begin);
/* Unmaps what smpi_range_use was told of; segments that somebody else mapped are left alone. */
void smpi_range_release(struct smpi_world *world);

#endif
