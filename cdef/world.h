/* world.h - one rank's view of its supernode: who is in it and where their segments are mapped.
 *
 * Life: new -> (memfd_open, memfd_listen, memfd_exchange, memfd_map | adopt, adopt_again) -> start -> heap and communicators. A
 * world lives until the process ends: arrays may outlive everything, so nothing is ever unmapped. Ranks below are ranks in the
 * supernode. None of these calls is collective by itself; stratampi/world.py puts MPI calls between them. Not thread-safe before
 * start. */

typedef struct smpi_world smpi_world;

/* rank in [0, size). NULL: no memory. */
smpi_world *smpi_world_new(int rank, int size);
void smpi_world_delete(smpi_world *world); /* only for a world that was never started, and for tests */

/* Driver memfd. open: creates this rank's memory file of `bytes` (sparse, a multiple of 2 MiB). listen: binds an abstract unix
 * socket and writes its name (without the leading NUL, at most 63 bytes + NUL) into `name`; after it a barrier must follow on all
 * ranks. exchange: `names` is size x 64 bytes, entry r the name of rank r; sends this rank's descriptor to every peer and takes
 * theirs; a connection whose uid or 16-byte token is not ours is dropped and the wait goes on. Blocks up to timeout_ms.
 * map: maps all segments at base + r * bytes; base 0 lets the system choose; SMPI_ERR_REFUSED if the range is taken (call again
 * with another base). finish: closes all descriptors and the socket, also after a failure. */
int smpi_memfd_open(smpi_world *world, uint64_t bytes);
int smpi_memfd_listen(smpi_world *world, char *name);
int smpi_memfd_exchange(smpi_world *world, const char *names, const char *token, int timeout_ms);
int smpi_memfd_map(smpi_world *world, uint64_t base);
void smpi_memfd_finish(smpi_world *world);

/* Driver window. adopt: segments that somebody else mapped (MPI shared windows): bases[r] is rank r's segment as this process sees
 * it. The runtime never unmaps them. adopt_again: maps them once more at base + r * bytes (base 0: the system chooses) and uses
 * them there; these addresses stay valid when the first mapping goes. SMPI_ERR_REFUSED: nothing changed, call again with another
 * base or go on with the adopted addresses, which must then stay mapped. */
int smpi_adopt(smpi_world *world, const uint64_t *bases, uint64_t bytes);
int smpi_adopt_again(smpi_world *world, uint64_t base);

/* Where this process sees rank r's segment; 0 if not mapped. */
uint64_t smpi_world_base(const smpi_world *world, int rank);
uint64_t smpi_world_bytes(const smpi_world *world); /* bytes of one segment */

/* Sizes in bytes by which operators choose their form; the same on all ranks, set before start. stage_chunk: longest round of the
 * path staged, a multiple of 4096. stream_min: what all ranks of an operator read and write together, from where on it goes past
 * the caches. Until then they are what the settings say, with 32 MiB for a cache of unknown size. */
void smpi_world_tune(smpi_world *world, uint64_t stage_chunk, uint64_t stream_min);

/* peer_bases[r]: where rank r sees its own segment. cores: how many cores the ranks of this supernode may use together.
 * Builds the heap in this rank's segment. heap_max: bytes it may hand out. populate: 1 if pages must be reserved at growth,
 * because the system could refuse them later with SIGBUS. */
int smpi_world_start(smpi_world *world, const uint64_t *peer_bases, int cores, uint64_t heap_max, int populate);

/* Called by a waiting rank about once a millisecond, without any lock held: lets Python run signal handlers and MPI make progress.
 * Returns 0 to go on waiting, anything else to give up (SMPI_ERR_INTERRUPTED). NULL: none. */
void smpi_world_set_hook(smpi_world *world, int (*hook)(void));

/* Name of the driver in use: "memfd", "window" or "none". */
const char *smpi_world_driver(const smpi_world *world);
