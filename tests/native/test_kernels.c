/* test_kernels.c - every table this machine can run against a scalar oracle that shares no line with the kernels.
 *
 * The oracle works on one element at a time: unpack to the type the standard says, combine in rank order, pack. Its
 * 16-bit floats go through frexp and ldexp instead of bit tricks. A case is (type, op, sources, elements); inputs and
 * the wanted bytes are made once, then every table runs it at every misalignment of dst, with sources misaligned
 * differently each, and with dst aliasing none or one of the sources in turn. Guard bytes on both sides of dst must
 * survive.
 *
 * Floats compare by bits, except that any NaN equals any NaN: where two meet, the payload is open. */
#include "engine/kernels.h"

#include <math.h>
#include <pthread.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"

#define MAX_SOURCES 5
#define MAX_BYTES 8192
#define GUARD 96
#define ROOM (GUARD + 16 + MAX_BYTES + GUARD)

/* ThreadSanitizer has only the picking of a table to look at and makes the loops fifty times slower. */
#if defined(__SANITIZE_THREAD__)
#define OFFSET_STEP 5
#else
#define OFFSET_STEP 1
#endif

static const char *const table_names[] = {"base", "avx2", "avx512"};
#define NUM_TABLES 3

/* A fixed sequence: a failure must come back when the program is run again. */
static uint64_t random_state = 0x9e3779b97f4a7c15u;

static uint64_t random_bits(void)
{
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return random_state;
}

/* ---- the oracle ---- */

/* value = (-1)^sign * fraction * 2^exponent, by the definition of IEEE 754 binary16 and of bfloat16. */
static float unpack_half(uint16_t half, int exponent_bits)
{
    int fraction_bits = 15 - exponent_bits, bias = (1 << (exponent_bits - 1)) - 1;
    int exponent = half >> fraction_bits & ((1 << exponent_bits) - 1), fraction = half & ((1 << fraction_bits) - 1);
    double value;
    if (exponent == (1 << exponent_bits) - 1)
        value = fraction != 0 ? (double)NAN : (double)INFINITY;
    else if (exponent == 0)
        value = ldexp(fraction, 1 - bias - fraction_bits);
    else
        value = ldexp(fraction + (1 << fraction_bits), exponent - bias - fraction_bits);
    return (float)(half >> 15 ? -value : value);
}

static uint16_t pack_half(float value, int exponent_bits)
{
    int fraction_bits = 15 - exponent_bits, bias = (1 << (exponent_bits - 1)) - 1;
    unsigned sign = signbit(value) ? 0x8000u : 0u, infinite = ((1u << exponent_bits) - 1) << fraction_bits;
    if (isnan(value))
        return (uint16_t)(sign | infinite | 1u << (fraction_bits - 1));
    if (isinf(value))
        return (uint16_t)(sign | infinite);
    if (value == 0)
        return (uint16_t)sign;
    int exponent;
    (void)frexp(fabs((double)value), &exponent);
    int last = exponent - 1 < 1 - bias ? 1 - bias - fraction_bits
                                       : exponent - 1 - fraction_bits; /* exponent of the last place */
    double units = nearbyint(ldexp(fabs((double)value), -last));       /* ties to even */
    /* units counts last places; carrying into the exponent is what the encoding does by itself. */
    unsigned bits = (unsigned)units + (unsigned)(last - (1 - bias - fraction_bits)) * (1u << fraction_bits);
    return (uint16_t)(sign | (bits > infinite ? infinite : bits));
}

static int is_half(int type)
{
    return type == SMPI_FLOAT16 || type == SMPI_BFLOAT16;
}

static int exponent_bits_of(int type)
{
    return type == SMPI_FLOAT16 ? 5 : 8;
}

#define COMBINE_ORDERED(op, acc, x)                          \
    switch (op) {                                            \
    case SMPI_SUM: (acc) = (acc) + (x); break;               \
    case SMPI_PROD: (acc) = (acc) * (x); break;              \
    case SMPI_MAX: (acc) = (x) > (acc) ? (x) : (acc); break; \
    default: (acc) = (x) < (acc) ? (x) : (acc); break;       \
    }

/* Integers as 64-bit numbers; the caller cuts the result to the type, which is what wrapping means. */
static uint64_t combine_integer(int op, int is_signed, uint64_t acc, uint64_t x)
{
    switch (op) {
    case SMPI_SUM: return acc + x;
    case SMPI_PROD: return acc * x;
    case SMPI_MAX: return (is_signed ? (int64_t)x > (int64_t)acc : x > acc) ? x : acc;
    case SMPI_MIN: return (is_signed ? (int64_t)x < (int64_t)acc : x < acc) ? x : acc;
    case SMPI_LAND: return acc && x;
    case SMPI_LOR: return acc || x;
    case SMPI_LXOR: return !acc != !x;
    case SMPI_BAND: return acc & x;
    case SMPI_BOR: return acc | x;
    default: return acc ^ x;
    }
}

static uint64_t load_integer(const unsigned char *at, size_t size, int is_signed)
{
    uint64_t value = 0;
    for (size_t i = 0; i < size; i++)
        value |= (uint64_t)at[i] << (8 * i);
    if (is_signed && size < 8 && value >> (8 * size - 1))
        value |= ~(uint64_t)0 << (8 * size);
    return value;
}

static void oracle_integer(int type, int op, unsigned char *dst, unsigned char *const *sources, int num, size_t i)
{
    size_t size = smpi_type_size(type);
    int is_signed = type == SMPI_INT8 || type == SMPI_INT16 || type == SMPI_INT32 || type == SMPI_INT64;
    uint64_t acc = load_integer(sources[0] + i * size, size, is_signed);
    for (int k = 1; k < num; k++) {
        acc = combine_integer(op, is_signed, acc, load_integer(sources[k] + i * size, size, is_signed));
        unsigned char cut[8];
        for (size_t b = 0; b < 8; b++)
            cut[b] = (unsigned char)(acc >> (8 * b));
        acc = load_integer(cut, size, is_signed);
    }
    for (size_t b = 0; b < size; b++)
        dst[i * size + b] = (unsigned char)(acc >> (8 * b));
}

#define ORACLE_FLOAT(type_)                                                                                  \
    static void oracle_##type_(int op, unsigned char *dst, unsigned char *const *sources, int num, size_t i) \
    {                                                                                                        \
        type_ acc, x;                                                                                        \
        memcpy(&acc, sources[0] + i * sizeof acc, sizeof acc);                                               \
        for (int k = 1; k < num; k++) {                                                                      \
            memcpy(&x, sources[k] + i * sizeof x, sizeof x);                                                 \
            COMBINE_ORDERED(op, acc, x)                                                                      \
        }                                                                                                    \
        memcpy(dst + i * sizeof acc, &acc, sizeof acc);                                                      \
    }

#define ORACLE_COMPLEX(type_)                                                                                        \
    static void oracle_complex_##type_(int op, unsigned char *dst, unsigned char *const *sources, int num, size_t i) \
    {                                                                                                                \
        type_ acc[2], x[2];                                                                                          \
        memcpy(acc, sources[0] + i * sizeof acc, sizeof acc);                                                        \
        for (int k = 1; k < num; k++) {                                                                              \
            memcpy(x, sources[k] + i * sizeof x, sizeof x);                                                          \
            if (op == SMPI_SUM) {                                                                                    \
                acc[0] += x[0];                                                                                      \
                acc[1] += x[1];                                                                                      \
            } else {                                                                                                 \
                volatile type_ rr = acc[0] * x[0], ii = acc[1] * x[1], ri = acc[0] * x[1], ir = acc[1] * x[0];       \
                acc[0] = rr - ii; /* volatile: no fused multiply-add here either */                                  \
                acc[1] = ri + ir;                                                                                    \
            }                                                                                                        \
        }                                                                                                            \
        memcpy(dst + i * sizeof acc, acc, sizeof acc);                                                               \
    }

typedef long double extended;
ORACLE_FLOAT(float)
ORACLE_FLOAT(double)
ORACLE_FLOAT(extended)
ORACLE_COMPLEX(float)
ORACLE_COMPLEX(double)
ORACLE_COMPLEX(extended)

static void oracle_half(int type, int op, unsigned char *dst, unsigned char *const *sources, int num, size_t i)
{
    uint16_t half;
    float acc = 0;
    for (int k = 0; k < num; k++) {
        memcpy(&half, sources[k] + 2 * i, 2);
        float x = unpack_half(half, exponent_bits_of(type));
        if (k == 0)
            acc = x;
        else
            COMBINE_ORDERED(op, acc, x)
    }
    half = pack_half(acc, exponent_bits_of(type));
    memcpy(dst + 2 * i, &half, 2);
}

static void oracle(int type, int op, unsigned char *dst, unsigned char *const *sources, int num, size_t count)
{
    if (num == 1) {
        memcpy(dst, sources[0], count * smpi_type_size(type));
        return;
    }
    for (size_t i = 0; i < count; i++) {
        switch (type) {
        case SMPI_FLOAT16:
        case SMPI_BFLOAT16: oracle_half(type, op, dst, sources, num, i); break;
        case SMPI_FLOAT32: oracle_float(op, dst, sources, num, i); break;
        case SMPI_FLOAT64: oracle_double(op, dst, sources, num, i); break;
        case SMPI_LONGDOUBLE: oracle_extended(op, dst, sources, num, i); break;
        case SMPI_COMPLEX64: oracle_complex_float(op, dst, sources, num, i); break;
        case SMPI_COMPLEX128: oracle_complex_double(op, dst, sources, num, i); break;
        case SMPI_CLONGDOUBLE: oracle_complex_extended(op, dst, sources, num, i); break;
        default: oracle_integer(type, op, dst, sources, num, i);
        }
    }
}

/* ---- inputs and comparison ---- */

/* Bytes of one scalar of a floating type, 0 for the others. */
static size_t part_size(int type)
{
    switch (type) {
    case SMPI_FLOAT16:
    case SMPI_BFLOAT16: return 2;
    case SMPI_FLOAT32:
    case SMPI_COMPLEX64: return 4;
    case SMPI_FLOAT64:
    case SMPI_COMPLEX128: return 8;
    case SMPI_LONGDOUBLE:
    case SMPI_CLONGDOUBLE: return sizeof(long double);
    default: return 0;
    }
}

/* A tenth of the values are the awkward ones, half are near 1 so that sums round, the rest are any bits. */
static void fill(int type, unsigned char *at, size_t bytes)
{
    static const double awkward[] = {0.0,     -0.0,    1.0,    -1.0,     INFINITY, -INFINITY, NAN,
                                     65504.0, 65520.0, 6e-8,   -5.96e-8, 6.1e-5,   1e-40,     -1e-45,
                                     3.4e38,  1e308,   -1e308, 5e-324,   2049.0,   0.333};
    size_t part = part_size(type);
    if (part == 0) {
        for (size_t i = 0; i < bytes; i++) {
            uint64_t bits = random_bits();
            at[i] = bits >> 60 < 4    ? 0
                    : bits >> 60 == 4 ? 0xff
                                      : (unsigned char)bits; /* zeros matter to the logical ops */
        }
        return;
    }
    for (size_t i = 0; i + part <= bytes; i += part) {
        unsigned pick = (unsigned)(random_bits() % 10);
        double value = pick == 0 ? awkward[random_bits() % (sizeof awkward / sizeof awkward[0])]
                                 : ((double)(random_bits() >> 11) / 4503599627370496.0 - 1.0) * 2.0;
        if (is_half(type)) {
            uint16_t half = pick < 6 ? pack_half((float)value, exponent_bits_of(type)) : (uint16_t)random_bits();
            memcpy(at + i, &half, 2);
        } else if (part == 4) {
            uint32_t bits = (uint32_t)random_bits();
            float narrow = (float)value;
            memcpy(at + i, pick < 6 ? (void *)&narrow : (void *)&bits, 4);
        } else if (part == 8) {
            uint64_t bits = random_bits();
            memcpy(at + i, pick < 6 ? (void *)&value : (void *)&bits, 8);
        } else { /* any bits could be an x87 pattern that no machine makes */
            long double wide = (long double)value * (1 + (long double)(random_bits() >> 1) * 0x1p-80L);
            memset(at + i, 0, part);
            memcpy(at + i, &wide, sizeof wide);
        }
    }
}

static int part_is_nan(int type, const unsigned char *at)
{
    switch (part_size(type)) {
    case 2: {
        uint16_t half;
        memcpy(&half, at, 2);
        return isnan(unpack_half(half, exponent_bits_of(type)));
    }
    case 4: {
        float value;
        memcpy(&value, at, 4);
        return isnan(value);
    }
    case 8: {
        double value;
        memcpy(&value, at, 8);
        return isnan(value);
    }
    default: {
        long double value;
        memcpy(&value, at, sizeof value);
        return isnan(value);
    }
    }
}

static size_t significant_bytes(size_t part)
{
#if defined(__x86_64__)
    return part == sizeof(long double) ? 10 : part; /* the rest of an x87 number is padding */
#else
    return part;
#endif
}

/* The first byte that differs, or bytes. */
static size_t difference(int type, const unsigned char *got, const unsigned char *wanted, size_t bytes)
{
    size_t part = part_size(type);
    if (memcmp(got, wanted, bytes) == 0)
        return bytes;
    if (part == 0)
        part = 1;
    for (size_t i = 0; i < bytes; i += part) {
        if (memcmp(got + i, wanted + i, significant_bytes(part)) != 0 &&
            !(part > 1 && part_is_nan(type, got + i) && part_is_nan(type, wanted + i)))
            return i;
    }
    return bytes;
}

static const unsigned char guard[GUARD] = {[0 ... GUARD - 1] = 0xa5};

static void set_guards(unsigned char *dst, size_t bytes)
{
    memcpy(dst - GUARD, guard, GUARD);
    memset(dst, 0xa5, bytes);
    memcpy(dst + bytes, guard, GUARD);
}

static int guards_intact(const unsigned char *dst, size_t bytes)
{
    return memcmp(dst - GUARD, guard, GUARD) == 0 && memcmp(dst + bytes, guard, GUARD) == 0;
}

/* ---- reductions ---- */

static unsigned char inputs[MAX_SOURCES][MAX_BYTES], wanted[MAX_BYTES];
static _Alignas(64) unsigned char source_rooms[MAX_SOURCES][MAX_BYTES + 64], dst_room[ROOM];

/* One call at one placement. alias: the source that dst is, or num for none. */
static void check_placement(const struct smpi_kernels *table, int type, int op, int num, size_t count,
                            size_t dst_offset, int alias)
{
    size_t bytes = count * smpi_type_size(type);
    const void *sources[MAX_SOURCES];
    unsigned char *dst = dst_room + GUARD + dst_offset;
    set_guards(dst, bytes);
    for (int k = 0; k < num; k++) {
        unsigned char *at = source_rooms[k] + (dst_offset * (size_t)(2 * k + 1) + count + 5 * (size_t)k) % 16;
        if (k == alias)
            at = dst;
        memcpy(at, inputs[k], bytes);
        sources[k] = at;
    }
    table->reduce[type][op](dst, sources, num, count);
    size_t at = difference(type, dst, wanted, bytes);
    check_note(at == bytes, __FILE__, __LINE__,
               "%s: %s %s of %d sources, %zu elements, dst +%zu, dst is source %d: byte %zu differs", table->name,
               smpi_type_name(type), smpi_op_name(op), num, count, dst_offset, alias, at);
    check_note(guards_intact(dst, bytes), __FILE__, __LINE__, "%s: %s %s of %d, %zu elements, dst +%zu: wrote outside",
               table->name, smpi_type_name(type), smpi_op_name(op), num, count, dst_offset);
    for (int k = 0; k < num; k++) {
        if (k != alias)
            check_note(memcmp(sources[k], inputs[k], bytes) == 0, __FILE__, __LINE__, "%s: %s %s wrote to source %d",
                       table->name, smpi_type_name(type), smpi_op_name(op), k);
    }
}

/* Every tail after a whole vector, and around the blocks of the kernels (1024 bytes, 512 halves). */
static size_t next_count(size_t count, size_t size)
{
    static const size_t more[] = {127, 129, 255, 257, 511, 512, 513, 1023, 1024, 1025, 1601, 2048, 4099};
    if (count < 80)
        return count + 1;
    for (size_t i = 0; i < sizeof more / sizeof more[0]; i++) {
        if (more[i] > count && more[i] * size <= MAX_BYTES)
            return more[i];
    }
    return 0;
}

static void check_kernel(const struct smpi_kernels *const *tables, int num_tables, int type, int op)
{
    size_t size = smpi_type_size(type), round = 0;
    for (int num = 1; num <= MAX_SOURCES; num++) {
        size_t count = 0;
        do {
            unsigned char *sources[MAX_SOURCES];
            for (int k = 0; k < num; k++) {
                sources[k] = inputs[k];
                fill(type, inputs[k], count * size);
            }
            oracle(type, op, wanted, sources, num, count);
            for (size_t offset = 0; offset < 16; offset += OFFSET_STEP, round++) {
                for (int t = 0; t < num_tables; t++)
                    check_placement(tables[t], type, op, num, count, offset, (int)(round % (size_t)(num + 1)));
            }
            count = next_count(count, size);
        } while (count != 0);
    }
}

static const struct smpi_kernels *tables[NUM_TABLES];
static int num_tables;

static void test_reductions(void)
{
    for (int type = 0; type < SMPI_TYPE_COUNT; type++) {
        for (int op = 0; op < SMPI_OP_COUNT; op++) {
            if (smpi_op_is_legal(type, op) && op != SMPI_MAXLOC && op != SMPI_MINLOC)
                check_kernel(tables, num_tables, type, op);
        }
    }
}

/* Element i of a pair type. */
static void put_pair(int type, unsigned char *at, size_t i, int value, int32_t place)
{
    const size_t size = smpi_type_size(type);
    const int16_t i16 = (int16_t)value;
    const int32_t i32 = value;
    const int64_t i64 = value;
    const float f32 = (float)value;
    const double f64 = value;
    const long double f80 = value;
    const void *from = NULL;
    switch (type) {
    case SMPI_INT16_INT32: from = &i16; break;
    case SMPI_INT32_INT32: from = &i32; break;
    case SMPI_INT64_INT32: from = &i64; break;
    case SMPI_FLOAT32_INT32: from = &f32; break;
    case SMPI_FLOAT64_INT32: from = &f64; break;
    case SMPI_LONGDOUBLE_INT32: from = &f80; break;
    default: break;
    }
    memcpy(at + i * size, from, size - sizeof place);
    memcpy(at + (i + 1) * size - sizeof place, &place, sizeof place);
}

/* Few values, so that there are ties; the last source is also the destination. */
static void test_locations(void)
{
    enum { MOST = 5, COUNT = 1000 };
    static unsigned char sources[MOST][COUNT * 20], best_of[COUNT * 20];
    for (int type = SMPI_INT16_INT32; type <= SMPI_LONGDOUBLE_INT32; type++) {
        for (int round = 0; round < 2 * MOST * num_tables; round++) {
            const int op = round % 2 ? SMPI_MAXLOC : SMPI_MINLOC, num = 1 + round / 2 % MOST;
            const void *from[MOST];
            for (int k = 0; k < num; k++)
                from[k] = sources[k];
            for (size_t i = 0; i < COUNT; i++) {
                int best = 0;
                int32_t best_place = 0;
                for (int k = 0; k < num; k++) {
                    const int value = rand() % 5 - 2;
                    const int32_t place = rand() % 7 - 3;
                    put_pair(type, sources[k], i, value, place);
                    const int beyond = op == SMPI_MAXLOC ? value > best : value < best;
                    if (k == 0 || beyond || (value == best && place < best_place)) {
                        best = value;
                        best_place = place;
                    }
                }
                put_pair(type, best_of, i, best, best_place);
            }
            tables[round / (2 * MOST)]->reduce[type][op](sources[num - 1], from, num, COUNT);
            size_t wrong = 0;
            const size_t size = smpi_type_size(type);
            for (size_t i = 0; i < COUNT; i++) { /* a long double's last bytes are padding */
                const size_t value = type == SMPI_LONGDOUBLE_INT32 ? 10 : size - 4;
                wrong += memcmp(sources[num - 1] + i * size, best_of + i * size, value) != 0;
                wrong += memcmp(sources[num - 1] + (i + 1) * size - 4, best_of + (i + 1) * size - 4, 4) != 0;
            }
            CHECK_EQ(wrong, 0);
        }
    }
}

/* dst and source at every pair of misalignments; the loop above couples the two. */
static void test_misalignment_pairs(void)
{
    static const int types[] = {SMPI_UINT8, SMPI_INT16, SMPI_BFLOAT16, SMPI_FLOAT32, SMPI_FLOAT64, SMPI_COMPLEX128};
    for (size_t i = 0; i < sizeof types / sizeof types[0]; i++) {
        int type = types[i];
        size_t count = 67, bytes = count * smpi_type_size(type);
        unsigned char *sources[2] = {inputs[0], inputs[1]};
        fill(type, inputs[0], bytes);
        fill(type, inputs[1], bytes);
        oracle(type, SMPI_SUM, wanted, sources, 2, count);
        for (size_t place = 0; place < 4096; place += OFFSET_STEP) {
            unsigned char *dst = dst_room + GUARD + place % 16;
            const void *at[2] = {source_rooms[0] + place / 16 % 16, source_rooms[1] + place / 256};
            memcpy(source_rooms[0] + place / 16 % 16, inputs[0], bytes);
            memcpy(source_rooms[1] + place / 256, inputs[1], bytes);
            for (int t = 0; t < num_tables; t++) {
                set_guards(dst, bytes);
                tables[t]->reduce[type][SMPI_SUM](dst, at, 2, count);
                CHECK_EQ(difference(type, dst, wanted, bytes), bytes);
                CHECK(guards_intact(dst, bytes));
            }
        }
    }
}

/* The same source more than once, dst among them. */
static void test_repeated_source(void)
{
    for (int t = 0; t < num_tables; t++) {
        double values[300];
        for (int i = 0; i < 300; i++)
            values[i] = i;
        const void *sources[4] = {values, values, values, values};
        tables[t]->reduce[SMPI_FLOAT64][SMPI_SUM](values, sources, 4, 300);
        for (int i = 0; i < 300; i++)
            CHECK(values[i] == 4.0 * i);
    }
}

/* MAX(x, x) is x: all 65536 patterns come back, signalling NaNs quiet with their payload. Here NaN bits are compared.
 * */
static void test_half_round_trip(void)
{
    static uint16_t all[65536], out[65536];
    for (int i = 0; i < 65536; i++)
        all[i] = (uint16_t)i;
    for (int t = 0; t < num_tables; t++) {
        for (int which = 0; which < 2; which++) {
            int type = which ? SMPI_BFLOAT16 : SMPI_FLOAT16, fraction_bits = which ? 7 : 10;
            const void *sources[2] = {all, all};
            /* Odd pieces, so that vector bodies and tails both see every pattern class. */
            for (size_t at = 0; at < 65536; at += 4099) {
                size_t n = at + 4099 < 65536 ? 4099 : 65536 - at;
                sources[0] = sources[1] = all + at;
                tables[t]->reduce[type][SMPI_MAX](out + at, sources, 2, n);
            }
            for (int i = 0; i < 65536; i++) {
                int quiet = isnan(unpack_half((uint16_t)i, which ? 8 : 5)) ? i | 1 << (fraction_bits - 1) : i;
                check_note(out[i] == quiet, __FILE__, __LINE__, "%s: %s 0x%04x became 0x%04x", tables[t]->name,
                           smpi_type_name(type), i, out[i]);
            }
        }
    }
}

/* Rounding: the products and sums of many pairs land on and beside ties, below the smallest normal, and beyond the
 * largest. */
static void test_half_rounding(void)
{
    static uint16_t a[65536], b[65536], out[65536], right[65536];
    for (int which = 0; which < 2; which++) {
        int type = which ? SMPI_BFLOAT16 : SMPI_FLOAT16;
        for (int round = 0; round < 8; round++) {
            for (int i = 0; i < 65536; i++) {
                a[i] = (uint16_t)i;
                b[i] = (uint16_t)random_bits();
                if (round == 0) /* neighbours in exponent: sums that need one or two bits more than there are */
                    b[i] = (uint16_t)(i - ((int)(random_bits() % 4) << (which ? 7 : 10)));
            }
            int op = round % 2 ? SMPI_PROD : SMPI_SUM;
            const void *sources[2] = {a, b};
            unsigned char *oracle_sources[2] = {(unsigned char *)a, (unsigned char *)b};
            oracle(type, op, (unsigned char *)right, oracle_sources, 2, 65536);
            for (int t = 0; t < num_tables; t++) {
                tables[t]->reduce[type][op](out, sources, 2, 65536);
                size_t at = difference(type, (unsigned char *)out, (unsigned char *)right, sizeof out);
                check_note(at == sizeof out, __FILE__, __LINE__,
                           "%s: %s %s of 0x%04x and 0x%04x is 0x%04x, wanted 0x%04x", tables[t]->name,
                           smpi_type_name(type), smpi_op_name(op), a[at / 2 % 65536], b[at / 2 % 65536],
                           out[at / 2 % 65536], right[at / 2 % 65536]);
            }
        }
    }
}

/* One rounding at the end: 2048 + 1 + 1 is 2050 in float16, but 2048 if every step rounds. */
static void test_half_rounds_once(void)
{
    for (int t = 0; t < num_tables; t++) {
        uint16_t big = 0x6800, one = 0x3c00, out;
        const void *sources[3] = {&big, &one, &one};
        tables[t]->reduce[SMPI_FLOAT16][SMPI_SUM](&out, sources, 3, 1);
        CHECK_EQ(out, 0x6801);
        uint16_t wide = 0x4380, unit = 0x3f80; /* bfloat16: 256 + 1 + 1 = 258 */
        const void *brains[3] = {&wide, &unit, &unit};
        tables[t]->reduce[SMPI_BFLOAT16][SMPI_SUM](&out, brains, 3, 1);
        CHECK_EQ(out, 0x4381);
    }
}

static void test_known_values(void)
{
    for (int t = 0; t < num_tables; t++) {
        int8_t x = 127, y = 1, z;
        const void *bytes[2] = {&x, &y};
        tables[t]->reduce[SMPI_INT8][SMPI_SUM](&z, bytes, 2, 1);
        CHECK_EQ(z, -128);
        uint16_t p = 65535, q = 65535, r;
        const void *shorts[2] = {&p, &q};
        tables[t]->reduce[SMPI_UINT16][SMPI_PROD](&r, shorts, 2, 1);
        CHECK_EQ(r, 1);
        uint8_t yes = 2, other = 4, no;
        const void *truths[2] = {&yes, &other};
        tables[t]->reduce[SMPI_BOOL][SMPI_LAND](&no, truths, 2, 1);
        CHECK_EQ(no, 1);
        tables[t]->reduce[SMPI_BOOL][SMPI_LXOR](&no, truths, 2, 1);
        CHECK_EQ(no, 0);
        float u[2] = {1, 2}, v[2] = {3, 4}, w[2];
        const void *complexes[2] = {u, v};
        tables[t]->reduce[SMPI_COMPLEX64][SMPI_PROD](w, complexes, 2, 1);
        CHECK(w[0] == -5 && w[1] == 10);
        double nan = NAN, one = 1, out;
        const void *first[2] = {&nan, &one}, *second[2] = {&one, &nan};
        tables[t]->reduce[SMPI_FLOAT64][SMPI_MAX](&out, first, 2, 1);
        CHECK(isnan(out));
        tables[t]->reduce[SMPI_FLOAT64][SMPI_MAX](&out, second, 2, 1);
        CHECK(out == 1);
    }
}

/* ---- copies ---- */

static void check_copy(const struct smpi_kernels *table, int streaming, size_t bytes, size_t dst_offset,
                       size_t src_offset)
{
    static unsigned char dst[GUARD + 64 + (1 << 16) + GUARD], src[64 + (1 << 16)];
    static int ready;
    if (!ready) {
        for (size_t i = 0; i < sizeof src; i++)
            src[i] = (unsigned char)random_bits();
        ready = 1;
    }
    unsigned char *to = dst + GUARD + dst_offset;
    set_guards(to, bytes);
    (streaming ? table->stream : table->copy)(to, src + src_offset, bytes);
    check_note(memcmp(to, src + src_offset, bytes) == 0 && guards_intact(to, bytes), __FILE__, __LINE__,
               "%s: %s of %zu bytes to +%zu from +%zu", table->name, streaming ? "stream" : "copy", bytes, dst_offset,
               src_offset);
}

static void test_copies(void)
{
    static const size_t large[] = {511, 512, 513, 4095, 4096, 4097, 65535, 65536};
    for (int t = 0; t < num_tables; t++) {
        for (int streaming = 0; streaming < 2; streaming++) {
            for (size_t bytes = 0; bytes <= 260; bytes++) {
                for (size_t offset = 0; offset < 64; offset += OFFSET_STEP)
                    check_copy(tables[t], streaming, bytes, offset, (offset * 7 + bytes) % 64);
            }
            for (size_t i = 0; i < sizeof large / sizeof large[0]; i++) {
                for (size_t offset = 0; offset < 256; offset++)
                    check_copy(tables[t], streaming, large[i], offset % 16, offset / 16);
            }
        }
    }
}

/* stream_to_all: destinations of equal and of unequal alignment, from 1 to more than a core has buffers for. */
static void test_copies_to_all(void)
{
    enum { MOST_SINKS = 9, ROW = 64 + 32 + 4096 + 2 * GUARD };
    static unsigned char dst[MOST_SINKS][ROW], src[64 + 4096];
    for (size_t i = 0; i < sizeof src; i++)
        src[i] = (unsigned char)random_bits();
    for (int t = 0; t < num_tables; t++) {
        for (int trial = 0; trial < 2000; trial++) {
            const int num = 1 + (int)(random_bits() % MOST_SINKS);
            const size_t bytes = random_bits() % 4097, offset = random_bits() % (bytes + 1), skew = random_bits() % 64;
            const unsigned char *from = src + random_bits() % 64;
            const int alike = trial % 2;
            char *places[MOST_SINKS];
            for (int i = 0; i < num; i++) {
                /* the same distance from a line's start, or any */
                unsigned char *row = dst[i] + GUARD + (-(uintptr_t)(dst[i] + GUARD) & 63);
                places[i] = (char *)row + (alike ? skew % 32 : (skew + (size_t)i * 7) % 32);
                set_guards((unsigned char *)places[i] + offset, bytes - offset);
            }
            tables[t]->stream_to_all(places, num, offset, from, bytes - offset);
            for (int i = 0; i < num; i++) {
                unsigned char *to = (unsigned char *)places[i] + offset;
                check_note(memcmp(to, from, bytes - offset) == 0 && guards_intact(to, bytes - offset), __FILE__,
                           __LINE__, "%s: %zu bytes at %zu to place %d of %d", tables[t]->name, bytes - offset, offset,
                           i, num);
            }
        }
    }
}

static void test_nothing_to_do(void)
{
    const void *sources[3] = {NULL, NULL, NULL};
    for (int t = 0; t < num_tables; t++) {
        for (int num = 1; num <= 3; num++) {
            tables[t]->reduce[SMPI_INT32][SMPI_SUM](NULL, sources, num, 0);
            tables[t]->reduce[SMPI_FLOAT16][SMPI_SUM](NULL, sources, num, 0);
        }
        tables[t]->copy(NULL, NULL, 0);
        tables[t]->stream(NULL, NULL, 0);
        CHECK(tables[t]->name != NULL);
    }
}

/* ---- the tables themselves ---- */

static void test_table_is_complete(void)
{
    int legal = 0;
    for (int type = 0; type < SMPI_TYPE_COUNT; type++) {
        for (int op = 0; op < SMPI_OP_COUNT; op++) {
            legal += smpi_op_is_legal(type, op);
            for (int t = 0; t < num_tables; t++)
                check_note((tables[t]->reduce[type][op] != NULL) == smpi_op_is_legal(type, op), __FILE__, __LINE__,
                           "%s: %s %s", tables[t]->name, smpi_type_name(type), smpi_op_name(op));
        }
    }
    /* byte, bool, eight integers, five floats, three complex, six pairs (MPI 5.1, sections 6.9.2 and 6.9.4) */
    CHECK_EQ(legal, 3 + 3 + 8 * 10 + 5 * 4 + 3 * 2 + 6 * 2);
}

static void test_names_and_sizes(void)
{
    CHECK_STR(smpi_operator_name(SMPI_ALLTOALLV), "alltoallv");
    CHECK_STR(smpi_operator_name(SMPI_OPERATOR_COUNT), "unknown operator");
    CHECK_STR(smpi_path_name(SMPI_PATH_STAGED), "staged");
    CHECK_STR(smpi_path_name(-1), "unknown path");
    CHECK_STR(smpi_why_name(SMPI_WHY_DATATYPE), "datatype");
    CHECK_STR(smpi_why_name(SMPI_WHY_COUNT), "unknown reason");
    CHECK_STR(smpi_type_name(SMPI_BFLOAT16), "bfloat16");
    CHECK_STR(smpi_type_name(SMPI_TYPE_COUNT), "unknown type");
    CHECK_STR(smpi_op_name(SMPI_LXOR), "LXOR");
    CHECK_STR(smpi_op_name(99), "unknown op");
    CHECK_EQ(smpi_type_size(SMPI_COMPLEX64), 8);
    CHECK_EQ(smpi_type_size(SMPI_CLONGDOUBLE), 2 * sizeof(long double));
    CHECK_EQ(smpi_type_size(SMPI_TYPE_COUNT), 0);
    CHECK_EQ(smpi_op_is_legal(SMPI_INT32, -1), 0);
    CHECK_EQ(smpi_op_is_legal(SMPI_INT32, SMPI_OP_COUNT), 0);
    CHECK_EQ(smpi_op_is_legal(-1, SMPI_SUM), 0);
    CHECK_EQ(smpi_op_is_legal(SMPI_COMPLEX64, SMPI_MAX), 0);
    CHECK_EQ(smpi_op_is_legal(SMPI_FLOAT32, SMPI_BAND), 0);
}

static void *ask(void *picked)
{
    *(const struct smpi_kernels **)picked = smpi_kernels();
    return NULL;
}

static void test_one_table_for_all_threads(void)
{
    enum { THREADS = 8 };
    const struct smpi_kernels *picked[THREADS];
    pthread_t threads[THREADS];
    for (int i = 0; i < THREADS; i++)
        REQUIRE(pthread_create(&threads[i], NULL, ask, &picked[i]) == 0);
    for (int i = 0; i < THREADS; i++)
        pthread_join(threads[i], NULL);
    for (int i = 0; i < THREADS; i++)
        CHECK(picked[i] != NULL && picked[i] == smpi_kernels());
    CHECK(smpi_kernels_named("no such table") == NULL);
}

/* The environment is read once a process, so every case is a child; it must run before anybody here has asked. */
static void test_setting_forces_a_table(void)
{
    static const char *const settings[] = {"base", "avx2", "avx512", "auto", "nonsense"};
    for (size_t i = 0; i < sizeof settings / sizeof settings[0]; i++) {
        const struct smpi_kernels *expected = smpi_kernels_named(settings[i]);
        if (expected == NULL) /* no such table, or not on this machine: the best one */
            expected = tables[num_tables - 1];
        fflush(NULL);
        pid_t child = fork();
        REQUIRE(child >= 0);
        if (child == 0) {
            setenv("STRATAMPI_KERNELS", settings[i], 1);
            _exit(smpi_kernels() == expected ? 0 : 1);
        }
        int status;
        REQUIRE(waitpid(child, &status, 0) == child);
        check_note(WIFEXITED(status) && WEXITSTATUS(status) == 0, __FILE__, __LINE__,
                   "STRATAMPI_KERNELS=%s did not give %s", settings[i], expected->name);
    }
}

int main(void)
{
    for (int i = 0; i < NUM_TABLES; i++) {
        const struct smpi_kernels *table = smpi_kernels_named(table_names[i]);
        if (table != NULL) {
            printf("table %s\n", table->name);
            tables[num_tables++] = table;
        }
    }
    REQUIRE(num_tables > 0 && strcmp(tables[0]->name, "base") == 0);
    CHECK_RUN(test_setting_forces_a_table);    /* first: nothing is read yet */
    CHECK_RUN(test_one_table_for_all_threads); /* second: nothing is picked yet */
    CHECK_RUN(test_table_is_complete);
    CHECK_RUN(test_names_and_sizes);
    CHECK_RUN(test_known_values);
    CHECK_RUN(test_half_round_trip);
    CHECK_RUN(test_half_rounding);
    CHECK_RUN(test_half_rounds_once);
    CHECK_RUN(test_nothing_to_do);
    CHECK_RUN(test_repeated_source);
    CHECK_RUN(test_copies);
    CHECK_RUN(test_copies_to_all);
    CHECK_RUN(test_locations);
    CHECK_RUN(test_misalignment_pairs);
    CHECK_RUN(test_reductions);
    return check_result();
}
