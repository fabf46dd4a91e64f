/* kernels_body.h - the loops over user data, written once. Included by every kernels_<isa>.c, which says KERNELS_TABLE
 * and KERNELS_NAME and is compiled for its instruction set; the compiler does the vectorising.
 *
 * Three layers:
 *   pair loop   dst[i] = a[i] op b[i]: all arithmetic is here. One per element type and op; signed and unsigned share
 *               the loops that give the same bits, complex sums are float sums of twice the length.
 *   fold        any number of sources by pair loops, one pass over memory: a block of the result stays in the
 *               first-level cache until the last source has been combined into it.
 *
 *                   block   = s0 op s1         block = block op s2  …      dst = block op s[last]
 *
 *               Invariant: a block of dst is written only by the last step, when every source's block has been read.
 *               So dst may be any of the sources. Not done: accumulating in dst itself; it saves one L1 buffer and is
 *               wrong as soon as dst is the third source.
 *   fold_half   the same for 16-bit floats: the block holds floats, and the last step rounds.
 *
 * User memory has any alignment and any effective type, so every access goes through the typedefs below. */
#include "kernels.h"

#include <string.h>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

/* Iterations of a loop are independent: pointers are equal or do not overlap. Without this the compiler tests for
 * overlap at run time and takes the scalar loop for dst == source. */
#if defined(__clang__)
#define INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define INDEPENDENT _Pragma("GCC ivdep")
#endif

#define USER_MEMORY __attribute__((aligned(1), may_alias))
typedef uint8_t u8 USER_MEMORY;
typedef uint16_t u16 USER_MEMORY;
typedef uint32_t u32 USER_MEMORY;
typedef uint64_t u64 USER_MEMORY;
typedef int8_t i8 USER_MEMORY;
typedef int16_t i16 USER_MEMORY;
typedef int32_t i32 USER_MEMORY;
typedef int64_t i64 USER_MEMORY;
typedef float f32 USER_MEMORY;
typedef double f64 USER_MEMORY;
typedef long double f80 USER_MEMORY;

/* Of user data per source and step. So small, because then all sources are read nearly side by side and the hardware
 * prefetchers keep following each of them: with 4096, sums of 6 and 8 sources out of memory took twice as long. Below
 * 512 the calls show. */
#define BLOCK_BYTES 1024

typedef void pair_loop(void *dst, const void *a, const void *b, size_t count);

typedef char line_of_bytes __attribute__((vector_size(64), aligned(1), may_alias));

static void copy(void *dst, const void *src, size_t bytes)
{
    if (bytes == 0 || dst == src)
        return;
    char *to = dst;
    const char *from = src;
    if (bytes > SMPI_SHORT_COPY) {
        const size_t head = -(uintptr_t)to & 63;
        memcpy(to, from, head);
        to += head;
        from += head;
        bytes -= head;
        for (; bytes >= 4 * sizeof(line_of_bytes); to += 256, from += 256, bytes -= 256) {
            const line_of_bytes *read = (const line_of_bytes *)from;
            line_of_bytes *write = (line_of_bytes *)to;
            const line_of_bytes first = read[0], second = read[1], third = read[2], fourth = read[3];
            write[0] = first;
            write[1] = second;
            write[2] = third;
            write[3] = fourth;
        }
    }
    memcpy(to, from, bytes);
}

__attribute__((noinline)) static void fold(pair_loop *pair, size_t element_bytes, void *dst, const void *const *sources,
                                           int num_sources, size_t count)
{
    if (num_sources == 1) {
        copy(dst, sources[0], count * element_bytes);
        return;
    }
    if (num_sources == 2) {
        pair(dst, sources[0], sources[1], count);
        return;
    }
    _Alignas(64) char block[BLOCK_BYTES];
    for (size_t done = 0; done < count;) {
        size_t n = count - done < BLOCK_BYTES / element_bytes ? count - done : BLOCK_BYTES / element_bytes;
        size_t at = done * element_bytes;
        pair(block, (const char *)sources[0] + at, (const char *)sources[1] + at, n);
        for (int k = 2; k < num_sources - 1; k++)
            pair(block, block, (const char *)sources[k] + at, n);
        pair((char *)dst + at, block, (const char *)sources[num_sources - 1] + at, n);
        done += n;
    }
}

/* One pair loop with the kernel around it. `expression` combines acc, the earlier sources' result, with x. */
#define KERNEL(name, type, expression)                                                     \
    static void name##_pair(void *dst, const void *a, const void *b, size_t count)         \
    {                                                                                      \
        type *to = dst;                                                                    \
        const type *left = a, *right = b;                                                  \
        INDEPENDENT                                                                        \
        for (size_t i = 0; i < count; i++) {                                               \
            const type acc = left[i], x = right[i];                                        \
            to[i] = (type)(expression);                                                    \
        }                                                                                  \
    }                                                                                      \
    static void name(void *dst, const void *const *sources, int num_sources, size_t count) \
    {                                                                                      \
        fold(name##_pair, sizeof(type), dst, sources, num_sources, count);                 \
    }

/* The same memory as twice as many of its parts. */
#define COMPLEX_SUM(name, part_kernel)                                                     \
    static void name(void *dst, const void *const *sources, int num_sources, size_t count) \
    {                                                                                      \
        part_kernel(dst, sources, num_sources, 2 * count);                                 \
    }

/* (a + bi)(c + di) by four multiplications, without the C library's rescue of infinities.
 * The minus of the real part is a factor that the compiler cannot see through: gcc 12 turns a difference beside a sum
 * into AVX-512's fused multiply-add-subtract even with contraction off, and base would round differently. */
static const volatile signed char part_sign[2] = {-1, 1};

#define COMPLEX_PROD(name, type)                                                           \
    static void name##_pair(void *dst, const void *a, const void *b, size_t count)         \
    {                                                                                      \
        type *to = dst;                                                                    \
        const type *left = a, *right = b;                                                  \
        const type minus = part_sign[0], plus = part_sign[1];                              \
        INDEPENDENT                                                                        \
        for (size_t i = 0; i < count; i++) {                                               \
            const type re = left[2 * i], im = left[2 * i + 1];                             \
            const type x_re = right[2 * i], x_im = right[2 * i + 1];                       \
            to[2 * i] = re * x_re + minus * (im * x_im);                                   \
            to[2 * i + 1] = re * x_im + plus * (im * x_re);                                \
        }                                                                                  \
    }                                                                                      \
    static void name(void *dst, const void *const *sources, int num_sources, size_t count) \
    {                                                                                      \
        fold(name##_pair, 2 * sizeof(type), dst, sources, num_sources, count);             \
    }

/* `1u *` keeps the narrow types out of int, where their product could overflow; wrapping is what MPI libraries do. */
#define INTEGER_KERNELS(bits)                           \
    KERNEL(sum_##bits, u##bits, acc + 1u * x)           \
    KERNEL(prod_##bits, u##bits, acc * 1u * x)          \
    KERNEL(max_u##bits, u##bits, x > acc ? x : acc)     \
    KERNEL(min_u##bits, u##bits, x < acc ? x : acc)     \
    KERNEL(max_i##bits, i##bits, x > acc ? x : acc)     \
    KERNEL(min_i##bits, i##bits, x < acc ? x : acc)     \
    KERNEL(land_##bits, u##bits, (acc != 0) & (x != 0)) \
    KERNEL(lor_##bits, u##bits, (acc | x) != 0)         \
    KERNEL(lxor_##bits, u##bits, (acc != 0) ^ (x != 0)) \
    KERNEL(band_##bits, u##bits, acc &x)                \
    KERNEL(bor_##bits, u##bits, acc | x)                \
    KERNEL(bxor_##bits, u##bits, acc ^ x)

/* The comparisons are what decides about NaN and the zeros' signs: acc stays unless x is really beyond it. */
#define FLOAT_KERNELS(bits)                         \
    KERNEL(sum_f##bits, f##bits, acc + x)           \
    KERNEL(prod_f##bits, f##bits, acc *x)           \
    KERNEL(max_f##bits, f##bits, x > acc ? x : acc) \
    KERNEL(min_f##bits, f##bits, x < acc ? x : acc) \
    COMPLEX_SUM(sum_c##bits, sum_f##bits)           \
    COMPLEX_PROD(prod_c##bits, f##bits)

INTEGER_KERNELS(8)
INTEGER_KERNELS(16)
INTEGER_KERNELS(32)
INTEGER_KERNELS(64)
FLOAT_KERNELS(32)
FLOAT_KERNELS(64)
FLOAT_KERNELS(80)

/* A value and where it is. Of equal values the lower place counts; acc stays unless x is really beyond it. */
#define LOCATION_KERNEL(name, type, beyond)                                                              \
    static void name##_pair(void *dst, const void *a, const void *b, size_t count)                       \
    {                                                                                                    \
        typedef struct __attribute__((packed, may_alias)) {                                              \
            type value;                                                                                  \
            i32 place;                                                                                   \
        } element;                                                                                       \
        element *to = dst;                                                                               \
        const element *left = a, *right = b;                                                             \
        for (size_t i = 0; i < count; i++) {                                                             \
            const element acc = left[i], x = right[i];                                                   \
            const int takes = x.value beyond acc.value || (x.value == acc.value && x.place < acc.place); \
            to[i] = takes ? x : acc;                                                                     \
        }                                                                                                \
    }                                                                                                    \
    static void name(void *dst, const void *const *sources, int num_sources, size_t count)               \
    {                                                                                                    \
        fold(name##_pair, sizeof(type) + sizeof(i32), dst, sources, num_sources, count);                 \
    }

#define LOCATION_KERNELS(type)              \
    LOCATION_KERNEL(maxloc_##type, type, >) \
    LOCATION_KERNEL(minloc_##type, type, <)

LOCATION_KERNELS(i16)
LOCATION_KERNELS(i32)
LOCATION_KERNELS(i64)
LOCATION_KERNELS(f32)
LOCATION_KERNELS(f64)
LOCATION_KERNELS(f80)

/* 16-bit floats. Conversions are integer arithmetic without branches, so that every instruction set gives the same
 * bits and the compiler can vectorise them; where F16C is there, results have those bits too. NaNs become quiet and
 * keep their upper payload. */

static inline float float_of_bits(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint32_t bits_of_float(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

/* yes where condition is 1, no where it is 0, by masks: a ternary may become a branch, which keeps the loop scalar. */
static inline uint32_t choose(int condition, uint32_t yes, uint32_t no)
{
    uint32_t mask = 0u - (uint32_t)condition;
    return (yes & mask) | (no & ~mask);
}

static inline float float_of_float16(uint16_t half)
{
    uint32_t sign = (half & 0x8000u) << 16, rest = half & 0x7fffu;
    uint32_t normal = (rest << 13) + ((127u - 15u) << 23);
    uint32_t infinite = rest << 13 | 0x7f800000u; /* and NaN, made quiet on the way back at the latest */
    /* A subnormal is rest * 2^-24: put rest below the leading one of 2^-14 and take that one off again. */
    uint32_t small = bits_of_float(float_of_bits((113u << 23) + (rest << 13)) - float_of_bits(113u << 23));
    uint32_t bits = choose(rest < 0x400u, small, normal);
    return float_of_bits(sign | choose(rest >= 0x7c00u, infinite, bits));
}

static inline uint16_t float16_of_float(float value)
{
    uint32_t bits = bits_of_float(value), sign = bits >> 16 & 0x8000u, rest = bits & 0x7fffffffu;
    /* Half a unit less one, and one more where the result is odd: carries exactly when rounding to even goes up. */
    uint32_t normal = (rest - ((127u - 15u) << 23) + 0xfffu + (rest >> 13 & 1u)) >> 13;
    /* Below 2^-14: adding 0.5 lets the adder round at 2^-24, float16's last place there. */
    uint32_t small = bits_of_float(float_of_bits(rest) + 0.5f) - bits_of_float(0.5f);
    uint32_t not_a_number = 0x7e00u | (rest >> 13 & 0x3ffu);
    uint32_t half = choose(rest < 113u << 23, small, normal);
    half = choose(rest >= (127u + 16u) << 23, 0x7c00u, half);
    half = choose(rest > 0x7f800000u, not_a_number, half);
    return (uint16_t)(sign | half);
}

static inline float float_of_bfloat16(uint16_t half)
{
    return float_of_bits((uint32_t)half << 16);
}

static inline uint16_t bfloat16_of_float(float value)
{
    uint32_t bits = bits_of_float(value);
    uint32_t rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
    uint32_t not_a_number = bits >> 16 | 0x40u;
    return (uint16_t)choose((bits & 0x7fffffffu) > 0x7f800000u, not_a_number, rounded);
}

#define HALF_BLOCK (BLOCK_BYTES / sizeof(uint16_t))

static void widen_float16(float *to, const void *from, size_t count)
{
    const u16 *half = from;
    size_t i = 0;
#if defined(__AVX512F__)
    for (; i + 16 <= count; i += 16)
        _mm512_storeu_ps(to + i, _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i_u *)(half + i))));
#endif
#if defined(__F16C__)
    for (; i + 8 <= count; i += 8)
        _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i_u *)(half + i))));
#endif
    for (; i < count; i++)
        to[i] = float_of_float16(half[i]);
}

static void narrow_float16(void *to, const float *from, size_t count)
{
    u16 *half = to;
    size_t i = 0;
#if defined(__AVX512F__)
    for (; i + 16 <= count; i += 16)
        _mm256_storeu_si256((__m256i_u *)(half + i),
                            _mm512_cvtps_ph(_mm512_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT));
#endif
#if defined(__F16C__)
    for (; i + 8 <= count; i += 8)
        _mm_storeu_si128((__m128i_u *)(half + i),
                         _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT));
#endif
    for (; i < count; i++)
        half[i] = float16_of_float(from[i]);
}

static void widen_bfloat16(float *to, const void *from, size_t count)
{
    const u16 *half = from;
    for (size_t i = 0; i < count; i++)
        to[i] = float_of_bfloat16(half[i]);
}

static void narrow_bfloat16(void *to, const float *from, size_t count)
{
    u16 *half = to;
    for (size_t i = 0; i < count; i++)
        half[i] = bfloat16_of_float(from[i]);
}

struct half_format {
    void (*widen)(float *to, const void *from, size_t count);
    void (*narrow)(void *to, const float *from, size_t count);
};

static const struct half_format float16 = {widen_float16, narrow_float16};
static const struct half_format bfloat16 = {widen_bfloat16, narrow_bfloat16};

__attribute__((noinline)) static void fold_half(pair_loop *pair, const struct half_format *format, void *dst,
                                                const void *const *sources, int num_sources, size_t count)
{
    if (num_sources == 1) {
        copy(dst, sources[0], count * sizeof(uint16_t));
        return;
    }
    _Alignas(64) float block[HALF_BLOCK], next[HALF_BLOCK];
    for (size_t done = 0; done < count;) {
        size_t n = count - done < HALF_BLOCK ? count - done : HALF_BLOCK;
        size_t at = done * sizeof(uint16_t);
        format->widen(block, (const char *)sources[0] + at, n);
        for (int k = 1; k < num_sources; k++) {
            format->widen(next, (const char *)sources[k] + at, n);
            pair(block, block, next, n);
        }
        format->narrow((char *)dst + at, block, n);
        done += n;
    }
}

#define HALF_KERNEL(name, format, pair)                                                    \
    static void name(void *dst, const void *const *sources, int num_sources, size_t count) \
    {                                                                                      \
        fold_half(pair, &format, dst, sources, num_sources, count);                        \
    }

#define HALF_KERNELS(suffix, format)                  \
    HALF_KERNEL(sum_##suffix, format, sum_f32_pair)   \
    HALF_KERNEL(prod_##suffix, format, prod_f32_pair) \
    HALF_KERNEL(max_##suffix, format, max_f32_pair)   \
    HALF_KERNEL(min_##suffix, format, min_f32_pair)

HALF_KERNELS(f16, float16)
HALF_KERNELS(bf16, bfloat16)

#define STREAM_AHEAD \
    2048 /* bytes that reading is ahead of writing: the hardware's own prefetch ends with each 4 KiB page */

#if defined(__SSE2__)
/* One cache line to an aligned place, past the caches. */
static inline void stream_line(char *to, const char *from)
{
#if defined(__AVX512F__)
    _mm512_stream_si512((__m512i *)to, _mm512_loadu_si512(from));
#elif defined(__AVX2__)
    __m256i first = _mm256_loadu_si256((const __m256i_u *)from);
    __m256i second = _mm256_loadu_si256((const __m256i_u *)(from + 32));
    _mm256_stream_si256((__m256i *)to, first);
    _mm256_stream_si256((__m256i *)(to + 32), second);
#else
    __m128i part[4];
    for (size_t i = 0; i < 4; i++)
        part[i] = _mm_loadu_si128((const __m128i_u *)(from + 16 * i));
    for (size_t i = 0; i < 4; i++)
        _mm_stream_si128((__m128i *)(to + 16 * i), part[i]);
#endif
}
#endif

/* Whole cache lines go past the caches; a line written in part would have to be read from memory to be merged, so both
 * ends are plain stores. */
static void stream(void *dst, const void *src, size_t bytes)
{
#if defined(__SSE2__)
    char *to = dst;
    const char *from = src;
    size_t head = -(uintptr_t)to & 63;
    if (head > bytes)
        head = bytes;
    copy(to, from, head);
    to += head;
    from += head;
    bytes -= head;
    for (; bytes >= 64; to += 64, from += 64, bytes -= 64) {
        __builtin_prefetch(from + STREAM_AHEAD, 0, 0);
        stream_line(to, from);
    }
    copy(to, from, bytes);
#else
    copy(dst, src, bytes);
#endif
}

/* Line by line to all of them: reading and writing overlap, which they do not where one destination follows the other. */
static void stream_to_all(char *const *dsts, int num_dsts, size_t offset, const void *src, size_t bytes)
{
    size_t head = -(uintptr_t)(dsts[0] + offset) & 63;
    int alike = num_dsts > 1 && bytes > head;
    for (int i = 1; i < num_dsts; i++)
        alike &= ((uintptr_t)dsts[i] & 63) == ((uintptr_t)dsts[0] & 63);
    size_t done = 0;
#if defined(__SSE2__)
    if (alike) {
        for (int i = 0; i < num_dsts; i++)
            copy(dsts[i] + offset, src, head);
        for (done = head; done + 64 <= bytes; done += 64) {
            const char *from = (const char *)src + done;
            __builtin_prefetch(from + STREAM_AHEAD, 0, 0);
            for (int i = 0; i < num_dsts; i++)
                stream_line(dsts[i] + offset + done, from);
        }
    }
#endif
    for (int i = 0; i < num_dsts; i++)
        stream(dsts[i] + offset + done, (const char *)src + done, bytes - done);
}

#define LOGICAL(bits) [SMPI_LAND] = land_##bits, [SMPI_LOR] = lor_##bits, [SMPI_LXOR] = lxor_##bits
#define BITWISE(bits) [SMPI_BAND] = band_##bits, [SMPI_BOR] = bor_##bits, [SMPI_BXOR] = bxor_##bits
#define LOCATION(type) [SMPI_MAXLOC] = maxloc_##type, [SMPI_MINLOC] = minloc_##type
#define ARITHMETIC(sums, order) \
    [SMPI_SUM] = sum_##sums, [SMPI_PROD] = prod_##sums, [SMPI_MAX] = max_##order, [SMPI_MIN] = min_##order

const struct smpi_kernels KERNELS_TABLE = {
    .name = KERNELS_NAME,
    .reduce =
        {
            [SMPI_BYTE] = {BITWISE(8)},
            [SMPI_BOOL] = {LOGICAL(8)},
            [SMPI_INT8] = {ARITHMETIC(8, i8), LOGICAL(8), BITWISE(8)},
            [SMPI_INT16] = {ARITHMETIC(16, i16), LOGICAL(16), BITWISE(16)},
            [SMPI_INT32] = {ARITHMETIC(32, i32), LOGICAL(32), BITWISE(32)},
            [SMPI_INT64] = {ARITHMETIC(64, i64), LOGICAL(64), BITWISE(64)},
            [SMPI_UINT8] = {ARITHMETIC(8, u8), LOGICAL(8), BITWISE(8)},
            [SMPI_UINT16] = {ARITHMETIC(16, u16), LOGICAL(16), BITWISE(16)},
            [SMPI_UINT32] = {ARITHMETIC(32, u32), LOGICAL(32), BITWISE(32)},
            [SMPI_UINT64] = {ARITHMETIC(64, u64), LOGICAL(64), BITWISE(64)},
            [SMPI_FLOAT16] = {ARITHMETIC(f16, f16)},
            [SMPI_BFLOAT16] = {ARITHMETIC(bf16, bf16)},
            [SMPI_FLOAT32] = {ARITHMETIC(f32, f32)},
            [SMPI_FLOAT64] = {ARITHMETIC(f64, f64)},
            [SMPI_LONGDOUBLE] = {ARITHMETIC(f80, f80)},
            [SMPI_COMPLEX64] = {[SMPI_SUM] = sum_c32, [SMPI_PROD] = prod_c32},
            [SMPI_COMPLEX128] = {[SMPI_SUM] = sum_c64, [SMPI_PROD] = prod_c64},
            [SMPI_CLONGDOUBLE] = {[SMPI_SUM] = sum_c80, [SMPI_PROD] = prod_c80},
            [SMPI_INT16_INT32] = {LOCATION(i16)},
            [SMPI_INT32_INT32] = {LOCATION(i32)},
            [SMPI_INT64_INT32] = {LOCATION(i64)},
            [SMPI_FLOAT32_INT32] = {LOCATION(f32)},
            [SMPI_FLOAT64_INT32] = {LOCATION(f64)},
            [SMPI_LONGDOUBLE_INT32] = {LOCATION(f80)},
        },
    .copy = copy,
    .stream = stream,
    .stream_to_all = stream_to_all,
};
