/* zone.c - two-level segregated fit over out-of-band tags (Masmano et al., TLSF, ECRTS 2004; the tags and the clean
 * state are ours).
 *
 * Size classes: sizes below 32 have one each; above, every power of two is cut in 32. A request looks at a few
 * blocks of its own class first and then takes the head of the next class that is not empty, where everything fits.
 * The textbook skips the first step and so misses the block of just this size that was freed a moment ago: with
 * arrays, the commonest case of all. */
#include "zone.h"

#include <stddef.h>
#include <sys/mman.h>

enum { HEAD = 1, TAIL = 2, LIVE = 4, CLEAN = 8 };

#define LOOKS 8 /* blocks of the request's own class that are looked at before the next class is taken */

static void class_of(uint32_t n, unsigned *power, unsigned *sub)
{
    if (n < SMPI_ZONE_SUB) {
        *power = 0;
        *sub = n;
    } else {
        unsigned top = 31 - (unsigned)__builtin_clz(n);
        *power = top - 4;
        *sub = (n >> (top - 5)) & (SMPI_ZONE_SUB - 1);
    }
}

static void mark(struct smpi_zone *zone, uint32_t at, uint32_t n, uint32_t flags)
{
    struct smpi_tag *first = &zone->tags[at], *last = &zone->tags[at + n - 1];
    last->length = n;
    last->state = TAIL | flags;
    first->length = n;
    first->state = HEAD | flags | (n == 1 ? TAIL : 0);
}

/* The block's tags become tags inside a block. */
static void unmark(struct smpi_zone *zone, uint32_t at)
{
    zone->tags[at + zone->tags[at].length - 1].state = 0;
    zone->tags[at].state = 0;
}

static void push(struct smpi_zone *zone, uint32_t at)
{
    struct smpi_tag *tag = &zone->tags[at];
    unsigned power, sub;
    class_of(tag->length, &power, &sub);
    uint32_t *head = &zone->heads[power][sub];
    tag->prev = SMPI_ZONE_NONE;
    tag->next = *head;
    if (*head != SMPI_ZONE_NONE) {
        zone->tags[*head].prev = at;
    }
    *head = at;
    zone->sub_map[power] |= 1u << sub;
    zone->power_map |= 1u << power;
    if (tag->state & CLEAN) {
        zone->clean += tag->length;
    }
}

static void unlink_free(struct smpi_zone *zone, uint32_t at)
{
    struct smpi_tag *tag = &zone->tags[at];
    unsigned power, sub;
    class_of(tag->length, &power, &sub);
    if (tag->next != SMPI_ZONE_NONE) {
        zone->tags[tag->next].prev = tag->prev;
    }
    if (tag->prev != SMPI_ZONE_NONE) {
        zone->tags[tag->prev].next = tag->next;
    } else {
        zone->heads[power][sub] = tag->next;
        if (tag->next == SMPI_ZONE_NONE) {
            zone->sub_map[power] &= ~(1u << sub);
            if (!zone->sub_map[power]) {
                zone->power_map &= ~(1u << power);
            }
        }
    }
    if (tag->state & CLEAN) {
        zone->clean -= tag->length;
    }
}

/* [at, at + n), tags inside it zero, becomes free and merges with a free block behind it. */
static void free_range(struct smpi_zone *zone, uint32_t at, uint32_t n)
{
    uint32_t end = at + n;
    if (end < zone->count && !(zone->tags[end].state & LIVE)) {
        n += zone->tags[end].length;
        unlink_free(zone, end);
        unmark(zone, end);
    }
    mark(zone, at, n, 0);
    push(zone, at);
}

void smpi_zone_open(struct smpi_zone *zone, uint64_t count)
{
    *zone = (struct smpi_zone){0};
    for (unsigned power = 0; power < SMPI_ZONE_POWERS; power++) {
        for (unsigned sub = 0; sub < SMPI_ZONE_SUB; sub++) {
            zone->heads[power][sub] = SMPI_ZONE_NONE;
        }
    }
    if (count > SMPI_ZONE_NONE - 1) {
        count = SMPI_ZONE_NONE - 1;
    }
    for (; count;
         count /= 2) { /* a limit on address space or strict overcommit may refuse; a smaller zone still serves */
        void *tags = mmap(NULL, count * sizeof(struct smpi_tag), PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (tags != MAP_FAILED) {
            zone->tags = tags;
            zone->count = (uint32_t)count;
            free_range(zone, 0, zone->count);
            return;
        }
    }
}

void smpi_zone_close(struct smpi_zone *zone)
{
    if (zone->tags) {
        munmap(zone->tags, zone->count * sizeof(struct smpi_tag));
    }
    *zone = (struct smpi_zone){0};
}

uint32_t smpi_zone_find(const struct smpi_zone *zone, uint32_t n)
{
    unsigned own_power, own_sub;
    class_of(n, &own_power, &own_sub);
    uint32_t at = zone->heads[own_power][own_sub];
    for (int looks = 0; at != SMPI_ZONE_NONE && looks < LOOKS; looks++) {
        if (zone->tags[at].length >= n) {
            return at;
        }
        at = zone->tags[at].next;
    }
    unsigned power = own_power;
    uint32_t subs = zone->sub_map[power] & ~((2u << own_sub) - 1);
    if (!subs) {
        uint32_t powers = zone->power_map & ~((2u << own_power) - 1);
        if (powers) {
            power = (unsigned)__builtin_ctz(powers);
            subs = zone->sub_map[power];
        }
    }
    if (subs) {
        return zone->heads[power][__builtin_ctz(subs)];
    }
    while (at != SMPI_ZONE_NONE && zone->tags[at].length < n) { /* nearly full: nothing is refused that would fit */
        at = zone->tags[at].next;
    }
    return at;
}

uint32_t smpi_zone_dirty(const struct smpi_zone *zone, uint32_t at, uint32_t n)
{
    if (zone->tags[at].state & CLEAN || at >= zone->high) {
        return 0;
    }
    return zone->high - at < n ? zone->high - at : n;
}

void smpi_zone_take(struct smpi_zone *zone, uint32_t at, uint32_t n)
{
    uint32_t length = zone->tags[at].length, clean = zone->tags[at].state & CLEAN;
    unlink_free(zone, at);
    unmark(zone, at);
    mark(zone, at, n, LIVE);
    if (length > n) {
        mark(zone, at + n, length - n, clean);
        push(zone, at + n);
    }
    if (at + n > zone->high) {
        zone->high = at + n;
    }
}

uint32_t smpi_zone_length(const struct smpi_zone *zone, uint32_t at)
{
    const struct smpi_tag *tag = &zone->tags[at];
    return (tag->state & (HEAD | LIVE)) == (HEAD | LIVE) ? tag->length : 0;
}

void smpi_zone_give(struct smpi_zone *zone, uint32_t at)
{
    uint32_t n = zone->tags[at].length;
    unmark(zone, at);
    if (at > 0 && !(zone->tags[at - 1].state & LIVE)) {
        uint32_t before = zone->tags[at - 1].length;
        at -= before;
        n += before;
        unlink_free(zone, at);
        unmark(zone, at);
    }
    free_range(zone, at, n);
}

void smpi_zone_shrink(struct smpi_zone *zone, uint32_t at, uint32_t n)
{
    uint32_t length = zone->tags[at].length;
    if (n < length) {
        unmark(zone, at);
        mark(zone, at, n, LIVE);
        free_range(zone, at + n, length - n);
    }
}

uint32_t smpi_zone_room(const struct smpi_zone *zone, uint32_t at, uint32_t n)
{
    uint32_t length = zone->tags[at].length, end = at + length;
    if (end < zone->count && !(zone->tags[end].state & LIVE) && zone->tags[end].length >= n - length) {
        return end;
    }
    return SMPI_ZONE_NONE;
}

void smpi_zone_grow(struct smpi_zone *zone, uint32_t at, uint32_t n)
{
    uint32_t length = zone->tags[at].length;
    smpi_zone_take(zone, at + length, n - length);
    unmark(zone, at + length);
    unmark(zone, at);
    mark(zone, at, n, LIVE);
}

void smpi_zone_clean(struct smpi_zone *zone, int (*punch)(void *arg, uint32_t at, uint32_t n), void *arg)
{
    for (unsigned power = 0; power < SMPI_ZONE_POWERS; power++) {
        for (uint32_t subs = zone->sub_map[power]; subs; subs &= subs - 1) {
            for (uint32_t at = zone->heads[power][__builtin_ctz(subs)]; at != SMPI_ZONE_NONE;
                 at = zone->tags[at].next) {
                uint32_t length = zone->tags[at].length, dirty = smpi_zone_dirty(zone, at, length);
                if (dirty && punch(arg, at, dirty) == 0) {
                    if (at + length > zone->high || at + length == zone->count) {
                        zone->high = at; /* nothing live behind it: as if never used */
                    } else {
                        mark(zone, at, length, CLEAN);
                        zone->clean += length;
                    }
                }
            }
        }
    }
}

int smpi_zone_is_valid(const struct smpi_zone *zone, uint64_t *live, uint64_t *blocks)
{
    uint64_t free_blocks = 0, listed = 0, clean = 0;
    int after_free = 0;
    *live = *blocks = 0;
    for (uint64_t at = 0; at < zone->count;) {
        const struct smpi_tag *first = &zone->tags[at];
        uint32_t n = first->length, kept = first->state & (LIVE | CLEAN), is_live = first->state & LIVE;
        if (!(first->state & HEAD) || n == 0 || n > zone->count - at) {
            return 0;
        }
        const struct smpi_tag *last = &zone->tags[at + n - 1];
        if (last->length != n || (last->state & ~(uint32_t)HEAD) != (TAIL | kept) || (n > 1 && last->state & HEAD)) {
            return 0;
        }
        if ((is_live || kept & CLEAN) && at + n > zone->high) {
            return 0;
        }
        if (kept == (LIVE | CLEAN) || (!is_live && after_free)) {
            return 0;
        }
        for (uint64_t inside = at + 1; inside < at + n - 1 && inside < zone->high; inside++) {
            if (zone->tags[inside].state) {
                return 0;
            }
        }
        *live += is_live ? n : 0;
        *blocks += is_live ? 1 : 0;
        free_blocks += is_live ? 0 : 1;
        clean += kept & CLEAN ? n : 0;
        after_free = !is_live;
        at += n;
    }
    for (unsigned power = 0; power < SMPI_ZONE_POWERS; power++) {
        if (!(zone->power_map >> power & 1) != !zone->sub_map[power]) {
            return 0;
        }
        for (unsigned sub = 0; sub < SMPI_ZONE_SUB; sub++) {
            uint32_t before = SMPI_ZONE_NONE;
            if (!(zone->sub_map[power] >> sub & 1) != (zone->heads[power][sub] == SMPI_ZONE_NONE)) {
                return 0;
            }
            for (uint32_t at = zone->heads[power][sub]; at != SMPI_ZONE_NONE; at = zone->tags[at].next) {
                unsigned its_power, its_sub;
                class_of(zone->tags[at].length, &its_power, &its_sub);
                if (its_power != power || its_sub != sub || zone->tags[at].prev != before ||
                    (zone->tags[at].state & (HEAD | LIVE)) != HEAD || ++listed > free_blocks) {
                    return 0;
                }
                before = at;
            }
        }
    }
    return listed == free_blocks && clean == zone->clean;
}
