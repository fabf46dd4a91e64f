/* heap.h - the registering allocator: blocks inside this rank's segment, so every peer can address them the moment they exist.
 *
 * Never collective, never waits for a peer. Thread-safe. Addresses are aligned to 128 bytes (blocks below 16 KiB) or to a page.
 * In a forked child the heap is closed: allocations come from malloc, frees of parent blocks do nothing. */

/* NULL: no memory left under heap_max or in the segment. bytes 0 is served as 1. zeroed: contents are 0. */
void *smpi_heap_alloc(smpi_world *world, size_t bytes, int zeroed);
/* Keeps the contents up to the smaller size; NULL leaves the old block as it was. */
void *smpi_heap_realloc(smpi_world *world, void *block, size_t bytes);
/* NULL is ignored. */
void smpi_heap_free(smpi_world *world, void *block);

/* 1 if [address, address + bytes) lies wholly inside this rank's segment. */
int smpi_heap_owns(const smpi_world *world, uint64_t address, uint64_t bytes);

/* Bytes: in live blocks; handed out at most so far; kept in the segment for reuse (free, but touched); limit. Any may be NULL. */
void smpi_heap_stats(smpi_world *world, uint64_t *live, uint64_t *peak, uint64_t *cached, uint64_t *limit, uint64_t *blocks);

/* 1 if all internal invariants hold (walks every block; for tests). */
int smpi_heap_is_valid(smpi_world *world);

/* NumPy allocation handlers (NEP 49): the address of a PyDataMem_Handler, for a capsule named "mem_handler". The handler
 * `always` places every array in the heap and fails with MemoryError; the handler `hook` places arrays of at least register_min
 * bytes there and falls back to malloc when they are smaller or the heap is full. Both free whatever the other, or malloc,
 * gave. They live as long as the process. */
void *smpi_numpy_handler_always(smpi_world *world);
void *smpi_numpy_handler_hook(smpi_world *world, uint64_t register_min);
