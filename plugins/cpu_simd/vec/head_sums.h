/* SPDX-License-Identifier: Apache-2.0 */
/* An indexer's scores: products of a tile of keys, summed over the heads of a list. */
#ifndef CPU_SIMD_HEAD_SUMS_H
#define CPU_SIMD_HEAD_SUMS_H

#include <limits.h>
#include <string.h>

/* Four vectors of columns at once: their sums and factors stay in registers. */
static void sum_heads(const struct head_sum_args *args)
{
    /* a NaN stays: vf_max gives its second operand */
    const vf least = vf_set1(args->relu ? 0.0f : -INFINITY);
    float out[TILE_KEYS];
    for (int32_t j = 0; j < TILE_KEYS; j += 4 * VF_WIDTH) {
        vf sums[4], factors[4];
        for (int32_t v = 0; v < 4; v++) {
            sums[v] = vf_set1(0.0f);
            factors[v] = vf_load(args->factors + j + v * VF_WIDTH);
        }
        for (int32_t h = 0; h < args->heads; h++) {
            const float *scores = args->scores + (int64_t)h * TILE_KEYS + j;
            const vf weight = vf_set1(args->weights[h]);
            for (int32_t v = 0; v < 4; v++) {
                const vf score = vf_mul(vf_load(scores + v * VF_WIDTH), factors[v]);
                sums[v] = vf_fma(vf_max(least, score), weight, sums[v]);
            }
        }
        for (int32_t v = 0; v < 4; v++) {
            vf_store(out + j + v * VF_WIDTH, sums[v]);
        }
    }
    for (int32_t j = 0; j < TILE_KEYS; j++) {
        const float sum = out[j] + 0.0f;
        int32_t bits;
        memcpy(&bits, &sum, sizeof bits);
        bits ^= (bits >> 31) & INT32_MAX;
        args->out[j] = sum == sum ? bits : INT32_MAX;
    }
}

static int32_t highest(const int32_t *x, int32_t n)
{
    int32_t most = x[0];
    for (int32_t i = 1; i < n; i++) {
        most = x[i] > most ? x[i] : most;
    }
    return most;
}

static int32_t count_above(const int32_t *x, int32_t n, int32_t least)
{
    int32_t count = 0;
    for (int32_t i = 0; i < n; i++) {
        count += x[i] > least;
    }
    return count;
}

static int32_t keep_above(const struct keep_args *args)
{
    const int32_t *from = args->from, *entries = args->entries;
    const int32_t n = args->n, first = args->first, least = args->least;
    int32_t *to = args->to, *to_entries = args->to_entries;
    int32_t kept = 0, equals = args->equals, i = 0;
#ifdef __AVX512F__
    const __m512i bound = _mm512_set1_epi32(least);
    __m512i entry = _mm512_add_epi32(_mm512_set1_epi32(first), vf_lanes());
    for (; i < n; i += 16, entry = _mm512_add_epi32(entry, _mm512_set1_epi32(16))) {
        const __mmask16 valid = (__mmask16)(n - i >= 16 ? 0xffff : (1 << (n - i)) - 1);
        const __m512i x = _mm512_maskz_loadu_epi32(valid, from + i);
        const __m512i of_x = entries != NULL ? _mm512_maskz_loadu_epi32(valid, entries + i) : entry;
        __mmask16 keep = _mm512_mask_cmpgt_epi32_mask(valid, x, bound);
        uint32_t equal = equals > 0 ? _mm512_mask_cmpeq_epi32_mask(valid, x, bound) : 0;
        for (; equal != 0 && equals > 0; equal &= equal - 1, equals--) {
            keep |= (__mmask16)(equal & -equal);
        }
        const int32_t count = __builtin_popcount(keep);
        const __mmask16 front = (__mmask16)((1 << count) - 1);
        _mm512_mask_storeu_epi32(to + kept, front, _mm512_maskz_compress_epi32(keep, x));
        _mm512_mask_storeu_epi32(to_entries + kept, front, _mm512_maskz_compress_epi32(keep, of_x));
        kept += count;
    }
#endif
    for (; i < n; i++) {
        const int32_t score = from[i];
        const bool equal = score == least && equals > 0;
        to[kept] = score;
        to_entries[kept] = entries != NULL ? entries[i] : first + i;
        kept += score > least || equal;
        equals -= equal;
    }
    return kept;
}

#endif
