/* SPDX-License-Identifier: Apache-2.0 */
/* Encodes rows of float32 as the codes of quantized caches, each as one rounding of the true
 * quotient gives it. Plain loops without branches, which the compiler vectorizes. Each element
 * takes one division and some 25 other operations for a byte written. */
#ifndef CPU_SIMD_CODES_WRITE_H
#define CPU_SIMD_CODES_WRITE_H

#include "cpu_simd/convert.h"
#include "cpu_simd/kernels.h"
#include "common/turboquant.h"

/* x - q by without rounding: q is a quotient of theirs */
INLINE float quotient_rest(float x, float q, float by)
{
#if defined(__FMA__) || defined(__aarch64__)
    return __builtin_fmaf(-q, by, x);
#else
    return (float)((double)x - (double)q * (double)by);
#endif
}

/* Bits of x / by rounded to odd: where it is no float, of its two neighbours the one whose last bit
 * is set, so that a step from here to fewer bits rounds as the true quotient would. Infinities and
 * NaN stay. */
INLINE int32_t quotient_odd(float x, float by)
{
    float up = __builtin_fabsf(by) < 0x1p-60f ? 0x1p64f : 1.0f; /* rests stay normal numbers */
    float q = (x * up) / (by * up);
    float rest = quotient_rest(x * up, q, by * up);
    int32_t bits = (int32_t)number_bits(q);
    int32_t sides = (int32_t)(number_bits(rest) ^ number_bits(by)) ^ bits;
    int32_t size = (int32_t)(number_bits(rest) & 0x7fffffffu);
    int32_t step = sides < 0 ? -1 : 1; /* 1: the true one is larger */
    step = size > 0 ? step : 0;
    step = size < 0x7f800000 ? step : 0;
    return bits + ((bits & 1) != 0 ? 0 : step);
}

/* The code of an fp8 format, to nearest, halves to even, saturating; NaN keeps its sign. */
INLINE uint8_t fp8_of(int32_t bits, const int32_t mantissa, const int32_t least, float limit)
{
    const int32_t shift = 23 - mantissa, magic = (least + shift) << 23;
    int32_t size = bits & 0x7fffffff, most = (int32_t)number_bits(limit);
    int32_t held = size < most ? size : most;
    int32_t normal = ((held + (1 << (shift - 1)) - 1 + (held >> shift & 1)) >> shift) -
                     ((least - 1) << mantissa);
    /* under the least normal number: added to one whose last bit is the smallest step */
    float nearby = number_from_bits((uint32_t)held) + number_from_bits((uint32_t)magic);
    int32_t small = (int32_t)number_bits(nearby) - magic;
    int32_t code = held < least << 23 ? small : normal;
    code = size > 0x7f800000 ? 0x7f : code;
    return (uint8_t)(code | (bits >> 24 & 0x80));
}

/* Rounds to an integer, halves away from zero; a NaN, which shows in the row's scale, becomes 0. */
INLINE int8_t int8_of(int32_t bits)
{
    int32_t size = bits & 0x7fffffff, most = (int32_t)number_bits(127.0f);
    int32_t held = size < most ? size : most;
    held = size > 0x7f800000 ? 0 : held;
    float q = number_from_bits((uint32_t)(held | (bits & (int32_t)0x80000000)));
    int32_t whole = (int32_t)q;
    float part = q - (float)whole;
    return (int8_t)(whole + (int32_t)(part + part));
}

#define E4M3_OF(bits) fp8_of(bits, 3, 121, 448.0f)   /* from 2^-6 on */
#define E5M2_OF(bits) fp8_of(bits, 2, 113, 57344.0f) /* 2^-14 */

#define DEFINE_ENCODE(name, type, convert)                                                         \
    static void name(void *codes, const float *x, float scale, const float *channels, int32_t n)   \
    {                                                                                              \
        type *restrict to = codes;                                                                 \
        const int whole = channels == NULL && scale == 1.0f; /* no quotient to round */            \
        for (int32_t i = 0; whole && i < n; i++) {                                                 \
            to[i] = convert((int32_t)number_bits(x[i]));                                           \
        }                                                                                          \
        for (int32_t i = 0; channels == NULL && !whole && i < n; i++) {                            \
            to[i] = convert(quotient_odd(x[i], scale));                                            \
        }                                                                                          \
        for (int32_t i = 0; channels != NULL && i < n; i++) {                                      \
            to[i] = convert(quotient_odd(x[i], channels[i]));                                      \
        }                                                                                          \
    }

DEFINE_ENCODE(codes_to_e4m3, uint8_t, E4M3_OF)
DEFINE_ENCODE(codes_to_e5m2, uint8_t, E5M2_OF)
DEFINE_ENCODE(codes_to_int8, int8_t, int8_of)

/* By their bits NaNs are larger than every number. */
static float codes_largest(const float *x, int32_t n)
{
    int32_t largest = 0;
    for (int32_t i = 0; i < n; i++) {
        int32_t size = (int32_t)(number_bits(x[i]) & 0x7fffffffu);
        largest = size > largest ? size : largest;
    }
    return number_from_bits((uint32_t)largest);
}

/* In double: near the midpoint of two codes rounding of the sums would decide. */
INLINE void rotate_stage(double *restrict row, int32_t n, const int32_t half)
{
    for (int32_t first = 0; first < n; first += 2 * half) {
        for (int32_t d = first; d < first + half; d++) {
            double a = row[d], b = row[d + half];
            row[d] = a + b;
            row[d + half] = a - b;
        }
    }
}

/* Integers that sort like the doubles; NaNs sort past the infinities. */
INLINE int64_t order_of(double x)
{
    int64_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits ^ ((bits >> 63) & INT64_MAX);
}

INLINE double of_order(int64_t order)
{
    double x;
    order ^= (order >> 63) & INT64_MAX;
    memcpy(&x, &order, sizeof x);
    return x;
}

/* Halves away from zero, then plus the zero point, 0 to 15. */
INLINE int32_t nibble_of(double q, int32_t zero)
{
    int64_t bits, most = INT64_C(0x4040000000000000); /* 32.0: more is 15 or 0 as well */
    memcpy(&bits, &q, sizeof bits);
    int64_t size = bits & INT64_MAX;
    size = (size < most ? size : most) | (bits & INT64_MIN);
    memcpy(&q, &size, sizeof q);
    int32_t whole = (int32_t)q;
    double part = q - (double)whole;
    int32_t code = whole + (int32_t)(part + part) + zero;
    code = code < 15 ? code : 15;
    return code > 0 ? code : 0;
}

#ifdef __AVX512F__
#include "codes_int4.h"
#endif

static int32_t codes_to_int4(uint8_t *codes, const float *x, const float *signs, int32_t n,
                             float *scale)
{
#ifdef __AVX512F__
    if (n >= 16) {
        return codes_to_int4_by_eights(codes, x, signs, n, scale);
    }
#endif
    double row[MAX_HEAD_SIZE];
    int64_t low = INT64_MAX, high = INT64_MIN;
    for (int32_t d = 0; d < n; d++) {
        row[d] = (double)x[d] * (double)signs[d];
    }
    if (n >= 8) {
        rotate_stage(row, n, 1);
        rotate_stage(row, n, 2);
        rotate_stage(row, n, 4);
    }
    for (int32_t half = n >= 8 ? 8 : 1; half < n; half *= 2) {
        rotate_stage(row, n, half);
    }
    for (int32_t d = 0; d < n; d++) {
        int64_t order = order_of(row[d]);
        low = order < low ? order : low;
        high = order > high ? order : high;
    }
    double exact = (of_order(high) - of_order(low)) / 15.0;
    *scale = exact < LEAST_ROW_SCALE ? (float)LEAST_ROW_SCALE : (float)exact;
    if (*scale != *scale) {
        return 0;
    }
    double by = *scale, from = -of_order(low) / by;
    int32_t zero = nibble_of(from, 0), wide[MAX_HEAD_SIZE];
    for (int32_t d = 0; d < n; d++) {
        wide[d] = nibble_of(row[d] / by, zero);
    }
    for (int32_t i = 0; i < n / 2; i++) {
        codes[i] = (uint8_t)(wide[2 * i] | wide[2 * i + 1] << 4);
    }
    return zero;
}

static double codes_to_levels(uint8_t *codes, const float *x, const double *halfway, int32_t bits,
                              int32_t n)
{
    double row[MAX_HEAD_SIZE], sum = 0;
    int32_t half = 1 << (bits - 1), away[MAX_HEAD_SIZE];
    for (int32_t d = 0; d < n; d++) {
        row[d] = (double)x[d];
        sum += row[d] * row[d];
    }
    double norm = __builtin_sqrt(sum);
    if (!(norm <= 0x1p1000)) {
        return (double)__builtin_nanf("");
    }
    for (int32_t at = 1; at < n; at *= 2) {
        rotate_stage(row, n, at);
    }
    for (int32_t d = 0; d < n; d++) {
        row[d] = row[d] / (norm + TURBOQUANT_EPSILON);
        away[d] = 0;
    }
    for (int32_t i = 0; i + 1 < half;
         i++) { /* a value halfway between two levels gets the upper one */
        for (int32_t d = 0; d < n; d++) {
            away[d] += row[d] >= 0 ? row[d] >= halfway[i] : row[d] < -halfway[i];
        }
    }
    for (int32_t d = 0; d < n; d++) {
        codes[d] = (uint8_t)(row[d] >= 0 ? half + away[d] : half - 1 - away[d]);
    }
    return norm;
}

static float codes_levels(float *restrict out, const int8_t *restrict codes,
                          const float *restrict levels, int32_t n)
{
    float parts[8] = {0};
    for (int32_t d = 0; d < n; d++) {
        out[d] = levels[codes[d]];
    }
    for (int32_t d = 0; d < n; d += 8) {
        for (int32_t i = 0; i < 8; i++) {
            parts[i] += out[d + i] * out[d + i];
        }
    }
    return ((parts[0] + parts[1]) + (parts[2] + parts[3])) +
           ((parts[4] + parts[5]) + (parts[6] + parts[7]));
}

static void codes_steps(float *restrict out, const int8_t *restrict codes, float step, float low,
                        int32_t n)
{
    for (int32_t d = 0; d < n; d++) {
        out[d] = (float)codes[d] * step + low;
    }
}

/* Twice 0, 0.5, 1, 1.5, 2, 3, 4, 6. */
INLINE float e2m1_doubled(int8_t code)
{
    int8_t size = code & 7;
    int8_t doubled = (int8_t)(size + (size > 4) + (size > 5) + (size > 6 ? 3 : 0));
    return (float)(code & 8 ? (int8_t)-doubled : doubled);
}

static void codes_e2m1(float *restrict out, const int8_t *restrict codes,
                       const float *restrict scales, int32_t run, int32_t n)
{
    for (int32_t d = 0; d < n && run == 1; d++) {
        out[d] = e2m1_doubled(codes[d]) * (0.5f * scales[d]);
    }
    for (int32_t first = 0; first < n && run > 1; first += 16) {
        float scale = 0.5f * scales[first / run];
        for (int32_t d = first; d < first + 16; d++) {
            out[d] = e2m1_doubled(codes[d]) * scale;
        }
    }
}

static void codes_threes(int8_t *restrict codes, const uint8_t *restrict packed, int32_t n)
{
    for (int32_t i = 0; i < n / 8; i++) {
        uint32_t bits = (uint32_t)packed[3 * i] | (uint32_t)packed[3 * i + 1] << 8 |
                        (uint32_t)packed[3 * i + 2] << 16;
        for (int32_t d = 0; d < 8; d++) {
            codes[8 * i + d] = (int8_t)(bits >> 3 * d & 7);
        }
    }
}

static const struct code_kernels code_operations = {.largest = codes_largest,
                                                    .encode = {[ELEMENT_E4M3] = codes_to_e4m3,
                                                               [ELEMENT_E5M2] = codes_to_e5m2,
                                                               [ELEMENT_INT8] = codes_to_int8},
                                                    .encode_int4 = codes_to_int4,
                                                    .encode_levels = codes_to_levels,
                                                    .levels = codes_levels,
                                                    .steps = codes_steps,
                                                    .e2m1 = codes_e2m1,
                                                    .threes = codes_threes};

#endif
