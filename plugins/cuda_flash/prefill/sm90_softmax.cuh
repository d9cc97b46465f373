/* SPDX-License-Identifier: Apache-2.0 */
/* Scores of a tile in a lane's registers: terms, masks where a tile needs them, online softmax.
 * Sum i of a lane: its row (i >> 1) & 1 of two, key (i >> 2) * 8 + (i & 1) from its first on. No
 * function here may be a call: wgmma would wait for each other across it. The compiler has several
 * copies of this, which give the same bits: products that may be fused are written as fused. */
#ifndef CUDA_FLASH_SM90_SOFTMAX_CUH
#define CUDA_FLASH_SM90_SOFTMAX_CUH

#include "sm90_shape.cuh"

/* What a lane's two rows of an item see, 8 rows apart. Rows that are not there see everything, so
 * that no tile is masked for them. */
struct prefill_rows {
    int32_t first[2], last[2], position[2];
    float slope[2]; /* of a bias, in the unit of scores */
};

/* An interval even with spans: each that holds the query's position only makes it longer. */
template <class S>
static __device__ __forceinline__ gpu_interval visible_to(const gpu_params &p,
                                                          const gpu_request &request, int32_t index)
{
    gpu_interval v = interval_of(p.problem, request, index);
    if (S::terms == PREFILL_ANY && p.problem.spans != nullptr) {
#pragma unroll 1
        for (int32_t s = p.problem.span_start[request.r]; s < p.problem.span_start[request.r + 1];
             s++) {
            int32_t first = p.problem.spans[2 * s], last = p.problem.spans[2 * s + 1];
            if (v.position < first || v.position > last) {
                continue;
            }
            if (p.problem.prefix_lm_window > 0) {
                first = max(first, v.position - p.problem.prefix_lm_window + 1);
            }
            v.first = min(v.first, first);
            v.last = max(v.last, min(last, request.length - 1));
        }
    }
    v.first = max(v.first, 0);
    return v;
}

/* Rows `row` and row + 8 of an item. */
template <class S>
static __device__ __forceinline__ void enter_rows(const prefill_params &a, const prefill_item &item,
                                                  int32_t row, prefill_rows &rows)
{
    const gpu_params &p = a.p;
    gpu_request request = request_of_row_tile(item.row_tile);
#pragma unroll
    for (int i = 0; i < 2; i++) {
        rows.first[i] = 0;
        rows.last[i] = INT32_MAX;
        rows.position[i] = 0;
        rows.slope[i] = 0.0f;
        if (row + 8 * i < item.row_tile.num_rows) {
            prefill_row at = split_row(a, row + 8 * i);
            gpu_interval v = visible_to<S>(p, request, item.first_query + at.query);
            rows.first[i] = v.first;
            rows.last[i] = v.last;
            rows.position[i] = v.position;
            if (has_term<S>(a, PREFILL_LINEAR | PREFILL_ROOT)) {
                rows.slope[i] =
                    -p.problem.slopes[item.head * p.problem.group + at.head] * a.of_bias;
            }
        }
    }
}

/* Tree masks and biases between the step's own tokens, from key `start` on. */
template <int N>
static __device__ __forceinline__ void add_tree(const prefill_params &a, const prefill_item &item,
                                                int32_t row, int32_t key, float (&s)[N])
{
    const gpu_params &p = a.p;
    int32_t start = item.row_tile.length - item.row_tile.query_len;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        if (row + 8 * r >= item.row_tile.num_rows) {
            continue;
        }
        int32_t index = item.first_query + split_row(a, row + 8 * r).query;
        int64_t at = item.row_tile.request * p.problem.tree_request + index * p.problem.tree_row;
        const uint32_t *bits = (const uint32_t *)p.problem.tree + at;
#pragma unroll
        for (int i = 2 * r; i < N; i += (i & 1) ? 3 : 1) {
            int32_t column = key + (i >> 2) * 8 + (i & 1) - start;
            keep_order_of_loads(); /* one load at a time: registers are few */
            if (column < 0 || column >= item.row_tile.query_len) {
                continue;
            }
            if (p.problem.tree_mask == ATTN_TREE_BITS) {
                s[i] = bits[column / 32] >> (column % 32) & 1 ? s[i] : -INFINITY;
            } else {
                float bias = __uint_as_float(bits[column]);
                s[i] = bias == -INFINITY ? -INFINITY : s[i] + a.of_bias * bias;
            }
        }
    }
}

/* `into`: what products are multiplied by first. */
template <int N> static __device__ __forceinline__ void cap_scores(float into, float (&s)[N])
{
#pragma unroll
    for (int i = 0; i < N; i++) {
        s[i] = fast_tanh(s[i] * into);
    }
}

/* Linear ALiBi of a tile whose keys lie at or before every row's position: what a lane's keys share
 * goes into `shift`, in base 2; `key`: the lane's first. */
template <int N>
static __device__ __forceinline__ void slope_scores(const prefill_params &a,
                                                    const prefill_rows &rows, int32_t key,
                                                    float (&s)[N], float (&shift)[2])
{
#pragma unroll
    for (int r = 0; r < 2; r++) {
        shift[r] = __fmul_rn(__fmul_rn(rows.slope[r], a.unit), (float)(rows.position[r] - key));
    }
#pragma unroll
    for (int i = 0; i < N; i++) {
        s[i] = fmaf(-rows.slope[(i >> 1) & 1], (float)((i >> 2) * 8 + (i & 1)), s[i]);
    }
}

/* Linear ALiBi of inner tiles as one more step of the product of queries and keys: the slopes of a
 * lane's rows times the places of keys in their tile. */
struct prefill_ramp {
    uint32_t w[4];   /* the step's left side */
    float fall[2];   /* of a key, in base 2; what a row's keys share */
    float before[2]; /* keys of the request between the tile's first and the row's position */
};

/* x in three numbers of 16 bits; of f16 the first counts in 256. */
template <int KIND> static __device__ __forceinline__ void split_slope(float x, float (&parts)[3])
{
#pragma unroll
    for (int i = 0; i < 3; i++) {
        if constexpr (KIND == KIND_BF16) {
            parts[i] = float_of_bf16(bf16_of(x));
            x -= parts[i];
        } else {
            const float unit = i == 0 ? (float)PREFILL_RAMP_UNIT : 1.0f;
            parts[i] = __half2float(__float2half_rn(x / unit));
            x -= parts[i] * unit;
        }
    }
}

template <class S>
static __device__ __forceinline__ prefill_ramp ramp_of_rows(const prefill_rows &rows, float unit,
                                                            int32_t base)
{
    const int place = threadIdx.x & 3;
    prefill_ramp ramp;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float parts[3];
        split_slope<S::kind>(-rows.slope[r], parts);
        const uint32_t first = pack2<S::kind>(parts[0], parts[1]),
                       second = pack2<S::kind>(parts[2], 0.0f);
        ramp.w[r] = place == 0 ? first : place == 1 ? second : 0;
        ramp.w[2 + r] = 0;
        ramp.fall[r] = __fmul_rn(rows.slope[r], unit);
        ramp.before[r] = (float)(rows.position[r] - base);
    }
    return ramp;
}

/* The step's right side: rows of 8 numbers, of which three are a key's place. Behind the last group
 * of keys lies another that meets zeros. */
template <class S> static __device__ __forceinline__ void fill_ramp(char *ramp)
{
    for (int key = threadIdx.x; key < S::ramp_bytes / 16; key += S::threads) {
        const float unit = S::kind == KIND_BF16 ? 1.0f : (float)PREFILL_RAMP_UNIT,
                    at = (float)(key % S::keys);
        *(uint4 *)(ramp + key * 16) =
            make_uint4(pack2<S::kind>(at * unit, at), pack2<S::kind>(at, 0.0f), 0, 0);
    }
    fence_for_boxes();
}

/* Products of a tile's keys with their scales, `scales` being those of the lane's first. */
template <int N>
static __device__ __forceinline__ void scale_keys(const float *scales, float (&s)[N])
{
#pragma unroll
    for (int i = 0; i < N / 4; i++) {
        const float2 x = *(const float2 *)(scales + 8 * i);
        s[4 * i] *= x.x, s[4 * i + 1] *= x.y;
        s[4 * i + 2] *= x.x, s[4 * i + 3] *= x.y;
    }
}

/* What products are multiplied by before a soft cap, and what a score's unit is in base 2, in an
 * item. */
template <class S>
static __device__ __forceinline__ float into_of(const prefill_params &a, const prefill_item &item)
{
    return S::by_head ? a.into * item.scale : a.into;
}

template <class S>
static __device__ __forceinline__ float unit_of(const prefill_params &a, const prefill_item &item)
{
    return S::by_head && S::terms != PREFILL_CAPPED ? a.unit * item.scale : a.unit;
}

/* Raw products become scores, whose unit is a.unit in base 2, but for what goes into `shift`. */
template <class S, int N>
static __device__ __forceinline__ void add_terms(const prefill_params &a, const prefill_item &item,
                                                 const prefill_rows &rows, int32_t row, int32_t key,
                                                 bool inner, float (&s)[N], float (&shift)[2])
{
    if (has_term<S>(a, PREFILL_CAPPED)) {
        cap_scores(into_of<S>(a, item), s);
    } else if (has_term<S>(a, PREFILL_MULTIPLIED)) {
#pragma unroll
        for (int i = 0; i < N; i++) {
            s[i] *= a.into;
        }
    }
    if (has_term<S>(a, PREFILL_LINEAR) && inner) {
        slope_scores(a, rows, key, s, shift);
    } else if (has_term<S>(a, PREFILL_LINEAR | PREFILL_ROOT)) {
        bool root = has_term<S>(a, PREFILL_ROOT);
#pragma unroll
        for (int i = 0; i < N; i++) {
            int r = (i >> 1) & 1;
            float distance = (float)(rows.position[r] - key) - (float)((i >> 2) * 8 + (i & 1));
            distance = root ? fast_sqrt(fmaxf(distance, 0.0f)) : fabsf(distance);
            s[i] = fmaf(rows.slope[r], distance, s[i]);
        }
    }
    if (has_term<S>(a, PREFILL_TREE) &&
        key + 2 * N > item.row_tile.length - item.row_tile.query_len) { /* 2 N keys are one tile */
        add_tree(a, item, row, key, s);
    }
}

/* Keys that a row does not see become -inf, a NaN too. `key`: the lane's first; `base`: the tile's.
 */
template <int N>
static __device__ __forceinline__ void mask_tile(const prefill_rows &rows, int32_t base,
                                                 int32_t key, float (&s)[N])
{
    int32_t end = base + 2 * N - 1;
    const int32_t last[2] = {rows.last[0] - key, rows.last[1] - key};
    if (__any_sync(0xffffffffu, min(rows.last[0], rows.last[1]) < end)) {
#pragma unroll
        for (int i = 0; i < N; i++) {
            s[i] = (i >> 2) * 8 + (i & 1) <= last[(i >> 1) & 1] ? s[i] : -INFINITY;
        }
    }
    if (__any_sync(0xffffffffu, max(rows.first[0], rows.first[1]) > base)) {
        const int32_t first[2] = {rows.first[0] - key, rows.first[1] - key};
#pragma unroll
        for (int i = 0; i < N; i++) {
            s[i] = (i >> 2) * 8 + (i & 1) >= first[(i >> 1) & 1] ? s[i] : -INFINITY;
        }
    }
}

/* The largest of a row's four lanes. */
static __device__ __forceinline__ float largest_of_row(float x)
{
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

/* Largest of a lane's scores in row r. Two maxima at a time: one would wait for itself. */
template <int N> static __device__ __forceinline__ float largest_score(const float (&s)[N], int r)
{
    float high = s[2 * r], other = s[2 * r + 1];
#pragma unroll
    for (int i = 1; i < N / 4; i++) {
        high = fmaxf(high, s[4 * i + 2 * r]);
        other = fmaxf(other, s[4 * i + 2 * r + 1]);
    }
    return fmaxf(high, other);
}

/* What a lane's weights of a row add up to where the row's base moves. Where a tile's weights are
 * more than float32 holds, past 2^127, the row comes out as no number and is computed again. */
#define PREFILL_MOST 1e12f
/* Rows whose sums end outside of these are computed again, too: a reciprocal of more is 0, and of
 * weights far below their base little is left. */
#define PREFILL_LARGEST 1e37f
#define PREFILL_LEAST 1e-30f

/* Bases of rows of steady shapes; true: sums shrink by f, of one of the warp's rows by less than 1.
 * m: the base in base 2, from which weights count. bf16 has float32's exponents, so it need not be
 * the largest score of all, and inner tiles become weights without a look at their scores. */
static __device__ __forceinline__ bool move_bases(float (&m)[2], float (&l)[2], float (&f)[2])
{
    f[0] = f[1] = 1.0f;
    if (!__any_sync(0xffffffffu, fmaxf(l[0], l[1]) > PREFILL_MOST)) {
        return false;
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const float most = largest_of_row(l[r]);
        if (most > PREFILL_MOST) { /* infinite: the row is lost */
            const int32_t up = min((__float_as_int(most) >> 23) - 127, 100);
            f[r] = __int_as_float((127 - up) << 23); /* 2^-up */
            m[r] += (float)up;
            l[r] *= f[r];
        }
    }
    return true;
}

/* Bases of rows that saw nothing so far, before a tile whose scores are not looked at. */
static __device__ __forceinline__ void enter_bases(float (&m)[2])
{
    m[0] = m[0] == -INFINITY ? 0.0f : m[0];
    m[1] = m[1] == -INFINITY ? 0.0f : m[1];
}

/* The same with a look at the scores: the base is the largest so far. For shapes that are not
 * steady, and for tiles at edges, whose f has what move_bases left. */
template <class S, int N>
static __device__ __forceinline__ void raise_bases(float unit, const float (&shift)[2],
                                                   const float (&s)[N], float (&m)[2],
                                                   float (&l)[2], float (&f)[2])
{
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float high = largest_of_row(fmaf(largest_score(s, r), unit, shift[r]));
        high = fmaxf(high, m[r]);
        const float by = fast_exp2(m[r] - (high == -INFINITY ? 0.0f : high)); /* 1: it stays */
        f[r] = S::steady ? f[r] * by : by;
        m[r] = high;
        l[r] *= by;
    }
}

/* Scores become weights. A score in base 2, as m is, is s times `unit` plus the lane's shift for
 * its row. */
template <int N>
static __device__ __forceinline__ void soften(float unit, const float (&shift)[2], float (&s)[N],
                                              const float (&m)[2], float (&l)[2])
{
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const float base = shift[r] - (m[r] == -INFINITY ? 0.0f : m[r]);
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < N / 4; i++) {
            float x = fast_exp2(fmaf(s[4 * i + 2 * r], unit, base));
            float y = fast_exp2(fmaf(s[4 * i + 2 * r + 1], unit, base));
            s[4 * i + 2 * r] = x;
            s[4 * i + 2 * r + 1] = y;
            sum += x + y;
        }
        l[r] += sum;
    }
}

#endif
