/* driver.h - what the two drivers owe the rest of the fabric.
 *
 * A driver fills world->bytes and world->segment[0..size) and then sets world->driver to its name, in this order, so that a world
 * whose driver is not "none" is one whose segments are all mapped. Nothing is half done: a call that fails leaves the world as it was. */
#ifndef SMPI_FABRIC_DRIVER_H
#define SMPI_FABRIC_DRIVER_H

#include "world.h"

#define SMPI_DRIVER_NONE "none"
#define SMPI_DRIVER_MEMFD "memfd"
#define SMPI_DRIVER_WINDOW "window"

/* Segments begin and end on these: huge pages fit, and every address of a segment has the same offset from it on every rank. */
#define SMPI_SEGMENT_UNIT (UINT64_C(2) << 20)

/* Unmaps what smpi_memfd_map has mapped and closes world->fd; does nothing for the driver window, whose memory is not ours. */
void smpi_memfd_unmap(struct smpi_world *world);

#endif
