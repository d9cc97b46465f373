/* SPDX-License-Identifier: Apache-2.0 */
/* Codes of 8 and 4 bits to bf16 by look-ups: tables of the low and high bytes of the bf16 that each
 * magnitude is. Exact: fp8 types have fewer mantissa bits and smaller exponents than bf16, whole
 * numbers to 128 have as many bits. */
#ifndef CPU_SIMD_CODE_TABLES_H
#define CPU_SIMD_CODE_TABLES_H

#include "bf16_tile.h"

/* bf16 of the whole number x, 1 to 128, times 2^power */
#define WHOLE_LOG(x) ((x) > 127 ? 7 : (x) > 63 ? 6 : (x) > 31 ? 5 : (x) > 15 ? 4 : WHOLE_LOG_15(x))
#define WHOLE_LOG_15(x) ((x) > 7 ? 3 : (x) > 3 ? 2 : (x) > 1)
#define WHOLE(x, power) (((127 + (power) + WHOLE_LOG(x)) << 7) + ((x) << (7 - WHOLE_LOG(x))) - 128)
/* bf16 of a code's magnitude; the least of fp8 are whole numbers of their smallest step */
#define BF16_OF_E4M3(x)                                                                            \
    ((x) == 0 ? 0 : (x) < 8 ? WHOLE(x, -9) : (x) == 127 ? 0x7fc0 : ((x) << 4) + (120 << 7))
#define BF16_OF_E5M2(x)                                                                            \
    ((x) == 0    ? 0                                                                               \
     : (x) < 4   ? WHOLE(x, -16)                                                                   \
     : (x) < 124 ? ((x) << 5) + (112 << 7)                                                         \
                 : ((x) == 124 ? 0x7f80 : 0x7fc0))
#define BF16_OF_INT8(x) ((x) == 0 ? WHOLE(128, 0) : WHOLE(x, 0)) /* magnitude 0 means 128 */
#define BF16_OF_NIBBLE(x)                                                                          \
    ((x) == 15 ? 0 : (x) > 15 ? WHOLE((x)-15, 0) : WHOLE(15 - (x), 0) + 0x8000)

#define LOW_BYTE(bits) ((bits)&255)
#define HIGH_BYTE(bits) ((bits) >> 8)
#define OF_4(byte, of, x) byte(of(x)), byte(of((x) + 1)), byte(of((x) + 2)), byte(of((x) + 3))
#define OF_16(byte, of, x)                                                                         \
    OF_4(byte, of, x), OF_4(byte, of, (x) + 4), OF_4(byte, of, (x) + 8), OF_4(byte, of, (x) + 12)
#define OF_64(byte, of, x)                                                                         \
    OF_16(byte, of, x), OF_16(byte, of, (x) + 16), OF_16(byte, of, (x) + 32),                      \
        OF_16(byte, of, (x) + 48)
#define CODE_TABLE(of)                                                                             \
    {                                                                                              \
        {OF_64(LOW_BYTE, of, 0), OF_64(LOW_BYTE, of, 64)},                                         \
        {                                                                                          \
            OF_64(HIGH_BYTE, of, 0), OF_64(HIGH_BYTE, of, 64)                                      \
        }                                                                                          \
    }

struct code_table {
    uint8_t low[128];
    uint8_t high[128];
};

static const struct code_table table_e4m3 = CODE_TABLE(BF16_OF_E4M3);
static const struct code_table table_e5m2 = CODE_TABLE(BF16_OF_E5M2);
static const struct code_table table_int8 = CODE_TABLE(BF16_OF_INT8);

/* -15 .. 15: the 16 codes of 4 bits less a zero point z begin at 15 - z. */
static const struct {
    uint8_t low[32];
    uint8_t high[32];
} table_nibbles = {{OF_16(LOW_BYTE, BF16_OF_NIBBLE, 0), OF_16(LOW_BYTE, BF16_OF_NIBBLE, 16)},
                   {OF_16(HIGH_BYTE, BF16_OF_NIBBLE, 0), OF_16(HIGH_BYTE, BF16_OF_NIBBLE, 16)}};

enum code_kind { CODES_FP8, CODES_INT8, CODES_INT4 };

struct code_lookup {
    __m512i low[2];
    __m512i high[2];
};

/* For int8 and int4's int8, or the fp8 type `element`. */
INLINE struct code_lookup code_lookup_of(int32_t element, const enum code_kind kind)
{
    const struct code_table *table = kind == CODES_INT8        ? &table_int8
                                     : element == ELEMENT_E4M3 ? &table_e4m3
                                                               : &table_e5m2;
    return (struct code_lookup){
        {_mm512_loadu_si512(table->low), _mm512_loadu_si512(table->low + 64)},
        {_mm512_loadu_si512(table->high), _mm512_loadu_si512(table->high + 64)}};
}

/* The look-ups take 7 bits of a magnitude, which are 0 for int8's -128 as they are for 0: there the
 * table has 128, and what is 0 is masked. */
INLINE void bytes_widen(const struct code_lookup *lookup, __m512i codes, const enum code_kind kind,
                        __m512i *first, __m512i *second)
{
    const int is_int8 = kind == CODES_INT8;
    __m512i magnitude = is_int8 ? _mm512_abs_epi8(codes) : codes;
    __mmask64 some = is_int8 ? _mm512_test_epi8_mask(codes, codes) : ~(__mmask64)0;
    __m512i low = _mm512_permutex2var_epi8(lookup->low[0], magnitude, lookup->low[1]);
    __m512i high =
        _mm512_maskz_permutex2var_epi8(some, lookup->high[0], magnitude, lookup->high[1]);
    /* high | (codes & 0x80) */
    high = _mm512_ternarylogic_epi32(high, codes, _mm512_set1_epi8((char)0x80), 0xf8);
    *first = _mm512_unpacklo_epi8(low, high);
    *second = _mm512_unpackhi_epi8(low, high);
}

/* Rows of codes to bf16 in order. */
INLINE void bf16_from_codes(void *destination, const void *source, int64_t n, int32_t element,
                            const enum code_kind kind)
{
    /* quarters of 16 codes go where unpacking by lanes leaves them in order */
    const __m512i places = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
    const struct code_lookup lookup = code_lookup_of(element, kind);
    uint16_t *out = destination;
    const uint8_t *in = source;
    for (int64_t i = 0; i < n; i += 64) {
        const int64_t left = n - i;
        const __mmask64 some = left < 64 ? ((__mmask64)1 << left) - 1 : ~(__mmask64)0;
        __m512i first, second, codes = _mm512_maskz_loadu_epi8(some, in + i);
        bytes_widen(&lookup, _mm512_permutexvar_epi64(places, codes), kind, &first, &second);
        _mm512_mask_storeu_epi16(out + i, (__mmask32)some, first);
        _mm512_mask_storeu_epi16(out + i + 32, (__mmask32)(some >> 32), second);
    }
}

static void bf16_from_e4m3(void *destination, const void *source, int64_t n)
{
    bf16_from_codes(destination, source, n, ELEMENT_E4M3, CODES_FP8);
}

static void bf16_from_e5m2(void *destination, const void *source, int64_t n)
{
    bf16_from_codes(destination, source, n, ELEMENT_E5M2, CODES_FP8);
}

static void bf16_from_int8(void *destination, const void *source, int64_t n)
{
    bf16_from_codes(destination, source, n, ELEMENT_INT8, CODES_INT8);
}

#endif
