/* layout.h - where the bytes of a derived datatype lie, and copies between such places.
 *
 * A layout is a tree of nodes. A node is a step that is done `count` times, each time `stride` bytes further: a block of bytes
 * where it has no children, else its children one after another. The order is the type map's (MPI 5.1, section 5.1), so the same
 * bytes in the same order are the message, whatever the layouts of the two sides.
 *
 *     vector of 2 x 3 doubles, stride 5    {offset 0, count 2, stride 40, bytes 48}
 *
 *     bytes of the message                 0      24      48
 *                                          [a b c][d e f]
 *     where they lie                       [a b c . . d e f . .] 40 bytes from a to d
 *
 * Elements of the datatype follow each other at distance `extent`, as many as there are bytes. A layout lies in the heap and holds
 * no addresses, so every peer can read it. Not done: lists of all blocks; a subarray may have millions of them. */

struct smpi_node {
    int64_t offset; /* bytes from the start of the parent's step; for the root from the buffer's address */
    int64_t count, stride; /* how often, and bytes from one time to the next; count >= 1 */
    int64_t bytes;         /* of all times together, gaps not counted; > 0 */
    int64_t first, children; /* nodes [first, first + children) are its children, all behind it; children 0: a block */
};

/* A layout with more nodes or more levels than this is none. */
enum { SMPI_LAYOUT_NODES = 1365, SMPI_LAYOUT_LEVELS = 16 };

typedef struct smpi_layout smpi_layout;

/* Node 0 is the root. NULL: no memory, or not a layout as described above (the reason says which). free: NULL is ignored. */
smpi_layout *smpi_layout_new(smpi_world *world, const struct smpi_node *nodes, int64_t count, int64_t extent);
void smpi_layout_free(smpi_world *world, smpi_layout *layout);

/* The bytes of `elements` elements lie in [low, high) from the buffer's address on; elements >= 1. */
void smpi_layout_span(const smpi_layout *layout, int64_t elements, int64_t *low, int64_t *high);

/* Bytes [first, last) of a message from src to dst; a layout of NULL is bytes without gaps. Bytes between the blocks of `to` are
 * not written. The two must not overlap. */
void smpi_layout_copy(const smpi_layout *to, void *dst, const smpi_layout *from, const void *src, size_t first, size_t last);

/* A part of a message that travels without gaps: `bytes` bytes that lie as `layout` says at `user`, and in a row at `packed`. */
struct smpi_part {
    const smpi_layout *layout;
    void *user, *packed;
    size_t bytes;
};

void smpi_pack(const struct smpi_part *parts, size_t count);
void smpi_unpack(const struct smpi_part *parts, size_t count);
