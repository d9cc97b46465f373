/* SPDX-License-Identifier: Apache-2.0 */
/* Softmax of a tile in registers: terms, masks, online softmax. acc_s[i] of a lane belongs to row
 * (i >> 1) & 1 of its two rows and to key (i >> 2) * 8 + (i & 1), counted from its first. All
 * functions must be inlined, since wgmma would be serialized across a call. The compiler keeps
 * several copies of this code which must give the same bits; therefore fused multiply-adds are
 * written out. */
#ifndef CUDA_FLASH_SM90_SOFTMAX_CUH
#define CUDA_FLASH_SM90_SOFTMAX_CUH

#include "sm90_shape.cuh"

/* What a lane's two rows, 8 apart, see. Rows out of range see everything, so that no tile is masked
 * because of them. */
struct row_bounds {
    int32_t first[2], last[2], position[2];
    float slope[2]; /* slope of ALiBi, divided by the scale of scores */
};

/* The visible interval of a query. A span that contains the query's position extends the interval.
 */
template <class S>
GPU_INLINE gpu_interval visible_to(const gpu_params &p, const prefill_item &item, int32_t index)
{
    const gpu_request request = request_of_row_tile(item.row_tile);
    gpu_problem problem = p.problem;
    problem.chunk_size = item.chunk_first < 0 ? problem.chunk_size : 0; /* spares a division */
    gpu_interval v = interval_of(problem, request, index);
    v.first = max(v.first, item.chunk_first);
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

/* Loads the bounds of rows `row` and row + 8 of an item. */
template <class S>
GPU_INLINE void load_row_bounds(const prefill_params &a, const prefill_item &item, int32_t row,
                                row_bounds &rows)
{
    const gpu_params &p = a.p;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        rows.first[i] = 0;
        rows.last[i] = INT32_MAX - 1;
        rows.position[i] = 0;
        rows.slope[i] = 0.0f;
        if (row + 8 * i < item.row_tile.num_rows) {
            prefill_row at = split_row(a, row + 8 * i);
            gpu_interval v = visible_to<S>(p, item, item.first_query + at.query);
            rows.first[i] = v.first;
            rows.last[i] = v.last;
            rows.position[i] = v.position;
            if (has_term<S>(a, PREFILL_LINEAR | PREFILL_ROOT)) {
                rows.slope[i] =
                    -p.problem.slopes[item.head * p.problem.group + at.head] * a.bias_scale;
            }
        }
    }
}

/* Applies tree masks and biases, which concern keys from `start` on, the step's own tokens. */
template <int N>
GPU_INLINE void add_tree(const prefill_params &a, const prefill_item &item, int32_t row,
                         int32_t key, float (&acc_s)[N])
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
            keep_order_of_loads(); /* one load at a time, to save registers */
            if (column < 0 || column >= item.row_tile.query_len) {
                continue;
            }
            if (p.problem.tree_mask == ATTN_TREE_BITS) {
                acc_s[i] = bits[column / 32] >> (column % 32) & 1 ? acc_s[i] : -INFINITY;
            } else {
                float bias = __uint_as_float(bits[column]);
                acc_s[i] = bias == -INFINITY ? -INFINITY : acc_s[i] + a.bias_scale * bias;
            }
        }
    }
}

/* acc_s = tanh(acc_s x pre_scale). */
template <int N> GPU_INLINE void apply_softcap(float pre_scale, float (&acc_s)[N])
{
#pragma unroll
    for (int i = 0; i < N; i++) {
        acc_s[i] = fast_tanh(acc_s[i] * pre_scale);
    }
}

/* Adds linear ALiBi to a tile whose keys are all at or before every row's position. The part that a
 * lane's keys share goes to `shift`, in base 2. `key` is the lane's first. */
template <int N>
GPU_INLINE void add_linear_alibi(const prefill_params &a, const row_bounds &rows, int32_t key,
                                 float (&acc_s)[N], float (&shift)[2])
{
#pragma unroll
    for (int r = 0; r < 2; r++) {
        shift[r] =
            __fmul_rn(__fmul_rn(rows.slope[r], a.scale_log2), (float)(rows.position[r] - key));
    }
#pragma unroll
    for (int i = 0; i < N; i++) {
        acc_s[i] = fmaf(-rows.slope[(i >> 1) & 1], (float)((i >> 2) * 8 + (i & 1)), acc_s[i]);
    }
}

/* Linear ALiBi of inner tiles as one more k-step of Q K^T: the slopes of the rows times the
 * positions of keys in their tile. */
struct prefill_ramp {
    uint32_t w[4];   /* left operand of the k-step */
    float fall[2];   /* slope in base 2 */
    float before[2]; /* distance from the tile's first key to the row's position */
};

/* Splits x into three 16-bit numbers; in f16 the first is in units of 256. */
template <int KIND> GPU_INLINE void split_slope(float x, float (&parts)[3])
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
GPU_INLINE prefill_ramp ramp_of_rows(const row_bounds &rows, float scale_log2, int32_t base)
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
        ramp.fall[r] = __fmul_rn(rows.slope[r], scale_log2);
        ramp.before[r] = (float)(rows.position[r] - base);
    }
    return ramp;
}

/* Fills the right operand of the k-step: rows of 8 numbers, three of which hold a key's position.
 * One more group of keys follows the last, since wgmma reads it; it meets zeros. */
template <class S> GPU_INLINE void fill_ramp(char *ramp)
{
    for (int key = threadIdx.x; key < S::ramp_bytes / 16; key += S::threads) {
        const float unit = S::kind == KIND_BF16 ? 1.0f : (float)PREFILL_RAMP_UNIT,
                    at = (float)(key % S::keys);
        *(uint4 *)(ramp + key * 16) =
            make_uint4(pack2<S::kind>(at * unit, at), pack2<S::kind>(at, 0.0f), 0, 0);
    }
    fence_async_proxy();
}

/* Multiplies acc_s by the scales of its keys; `scales` points to the scale of the lane's first key.
 */
template <int N> GPU_INLINE void scale_keys(const float *scales, float (&acc_s)[N])
{
#pragma unroll
    for (int i = 0; i < N / 4; i++) {
        const float2 x = *(const float2 *)(scales + 8 * i);
        acc_s[4 * i] *= x.x, acc_s[4 * i + 1] *= x.y;
        acc_s[4 * i + 2] *= x.x, acc_s[4 * i + 3] *= x.y;
    }
}

/* An item's factor before a soft cap, and its factor of scores in base 2. */
template <class S> GPU_INLINE float pre_scale_of(const prefill_params &a, const prefill_item &item)
{
    return S::by_head ? a.pre_scale * item.scale : a.pre_scale;
}

template <class S> GPU_INLINE float scale_log2_of(const prefill_params &a, const prefill_item &item)
{
    return S::by_head && S::terms != PREFILL_CAPPED ? a.scale_log2 * item.scale : a.scale_log2;
}

/* Applies the terms to the products. Scores are then in units of a.scale_log2, apart from what goes
 * to `shift`. */
template <class S, int N>
GPU_INLINE void add_terms(const prefill_params &a, const prefill_item &item, const row_bounds &rows,
                          int32_t row, int32_t key, bool inner, float (&acc_s)[N],
                          float (&shift)[2])
{
    if (has_term<S>(a, PREFILL_CAPPED)) {
        apply_softcap(pre_scale_of<S>(a, item), acc_s);
    } else if (has_term<S>(a, PREFILL_MULTIPLIED)) {
#pragma unroll
        for (int i = 0; i < N; i++) {
            acc_s[i] *= a.pre_scale;
        }
    }
    if (has_term<S>(a, PREFILL_LINEAR) && inner) {
        add_linear_alibi(a, rows, key, acc_s, shift);
    } else if (has_term<S>(a, PREFILL_LINEAR | PREFILL_ROOT)) {
        bool root = has_term<S>(a, PREFILL_ROOT);
#pragma unroll
        for (int i = 0; i < N; i++) {
            int r = (i >> 1) & 1;
            float distance = (float)(rows.position[r] - key) - (float)((i >> 2) * 8 + (i & 1));
            distance = root ? fast_sqrt(fmaxf(distance, 0.0f)) : fabsf(distance);
            acc_s[i] = fmaf(rows.slope[r], distance, acc_s[i]);
        }
    }
    if (has_term<S>(a, PREFILL_TREE) &&
        key + 2 * N > item.row_tile.length - item.row_tile.query_len) { /* 2 N keys are one tile */
        add_tree(a, item, row, key, acc_s);
    }
}

/* A bit for each of a lane's keys of one row: those before `end`, which counts from its first. */
GPU_INLINE uint32_t keys_before(int32_t end)
{
    end = max(end, 0);
    return __funnelshift_lc(0xffffffffu, 0, 2 * (end >> 3) + min(end & 7, 2)); /* 32 ones at most */
}

/* Sets keys that a row does not see to -inf, NaN too. `key` is the lane's first. Tests of constant
 * bits become seven predicates by one instruction. */
template <int N> GPU_INLINE void apply_mask(const row_bounds &rows, int32_t key, float (&acc_s)[N])
{
    static_assert(N <= 64, "a word has the bits of 128 keys");
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const uint32_t sees =
            keys_before(rows.last[r] - key + 1) & ~keys_before(rows.first[r] - key);
#pragma unroll
        for (int i = 0; i < N / 4; i++) {
            const int at = 4 * i + 2 * r;
            acc_s[at] = sees & 1u << 2 * i ? acc_s[at] : -INFINITY;
            acc_s[at + 1] = sees & 2u << 2 * i ? acc_s[at + 1] : -INFINITY;
        }
    }
}

/* The maximum over the four lanes of a row. */
GPU_INLINE float quad_max(float x)
{
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

/* The maximum of a lane's scores of row r; two chains halve the latency. */
template <int N> GPU_INLINE float thread_max(const float (&acc_s)[N], int r)
{
    float high = acc_s[2 * r], other = acc_s[2 * r + 1];
#pragma unroll
    for (int i = 1; i < N / 4; i++) {
        high = fmaxf(high, acc_s[4 * i + 2 * r]);
        other = fmaxf(other, acc_s[4 * i + 2 * r + 1]);
    }
    return fmaxf(high, other);
}

/* row_sum of a lane from which on lazy_update_row_max raises row_max. A tile whose probabilities
 * exceed float32, past 2^127, makes the row non-finite, and it is recomputed. */
#define PREFILL_RESCALE_SUM 1e12f
/* Rows whose row_sum ends outside of these bounds are recomputed as well: the reciprocal of a
 * larger sum is 0, and probabilities far below row_max lose precision. */
#define PREFILL_MAX_SUM 1e37f
#define PREFILL_MIN_SUM 1e-30f

/* For lazy_rescale: raises row_max, here a reference in base 2 and not the true maximum, only when
 * row_sum gets large. bf16 has the exponents of float32, so inner tiles need no maximum of their
 * scores. Returns true if scores_scale of a row of the warp is below 1. */
GPU_INLINE bool lazy_update_row_max(float (&row_max)[2], float (&row_sum)[2],
                                    float (&scores_scale)[2])
{
    scores_scale[0] = scores_scale[1] = 1.0f;
    if (!__any_sync(0xffffffffu, fmaxf(row_sum[0], row_sum[1]) > PREFILL_RESCALE_SUM)) {
        return false;
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const float most = quad_max(row_sum[r]);
        if (most > PREFILL_RESCALE_SUM) { /* the row overflowed and will be recomputed */
            const int32_t up = min((__float_as_int(most) >> 23) - 127, 100);
            scores_scale[r] = __int_as_float((127 - up) << 23); /* 2^-up */
            row_max[r] += (float)up;
            row_sum[r] *= scores_scale[r];
        }
    }
    return true;
}

/* Makes row_max finite for rows without visible keys so far, before a tile whose maximum is not
 * computed. */
GPU_INLINE void init_row_max(float (&row_max)[2])
{
    row_max[0] = row_max[0] == -INFINITY ? 0.0f : row_max[0];
    row_max[1] = row_max[1] == -INFINITY ? 0.0f : row_max[1];
}

/* Updates row_max from the scores and sets scores_scale. For tiles at edges, and for all tiles
 * without lazy_rescale; with lazy_rescale, scores_scale already holds the factor of
 * lazy_update_row_max. */
template <class S, int N>
GPU_INLINE void update_row_max(float scale_log2, const float (&shift)[2], const float (&acc_s)[N],
                               float (&row_max)[2], float (&row_sum)[2], float (&scores_scale)[2])
{
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float high = quad_max(fmaf(thread_max(acc_s, r), scale_log2, shift[r]));
        high = fmaxf(high, row_max[r]);
        const float scale =
            /* 1 if row_max does not change */
            fast_exp2(row_max[r] - (high == -INFINITY ? 0.0f : high));
        scores_scale[r] = S::lazy_rescale ? scores_scale[r] * scale : scale;
        row_max[r] = high;
        row_sum[r] *= scale;
    }
}

/* acc_s becomes P = exp2(acc_s x scale_log2 + shift - row_max), and row_sum grows by it. */
template <int N>
GPU_INLINE void scale_apply_exp2(float scale_log2, const float (&shift)[2], float (&acc_s)[N],
                                 const float (&row_max)[2], float (&row_sum)[2])
{
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const float base = shift[r] - (row_max[r] == -INFINITY ? 0.0f : row_max[r]);
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < N / 4; i++) {
            float x = fast_exp2(fmaf(acc_s[4 * i + 2 * r], scale_log2, base));
            float y = fast_exp2(fmaf(acc_s[4 * i + 2 * r + 1], scale_log2, base));
            acc_s[4 * i + 2 * r] = x;
            acc_s[4 * i + 2 * r + 1] = y;
            sum += x + y;
        }
        row_sum[r] += sum;
    }
}

/* tanh(u) is u (c0 + c1 u^2) for |u| <= 0.35 and u (c0 + c1 u^2 + c2 u^4) for |u| <= 0.75, with a
 * relative error of 2^-12, where tanh.approx has 2^-11: multiply-adds in place of half of the
 * exponential unit's work. The factors are those of a product x = u / pre_scale, times scale_log2.
 */
#define PREFILL_SMALL_CAP 0.35f
#define PREFILL_MEDIUM_CAP 0.75f
struct capped_softmax {
    float small[2], medium[3];
    float most[2]; /* each row's largest |x| of `medium`; rows out of range have no say */
};

GPU_INLINE capped_softmax capped_softmax_of(const prefill_item &item, int32_t row, float pre_scale,
                                            float scale_log2)
{
    const float square = pre_scale * pre_scale, scale = scale_log2 * pre_scale;
    /* Outside of these bounds the factors may leave float32's range. */
    const bool fits = pre_scale > 1e-5f && pre_scale < 1e4f;
    capped_softmax softmax = {{0.9997628f * scale}, {0.9997852f * scale}};
    softmax.small[1] = -0.31777117f * square * softmax.small[0];
    softmax.medium[1] = -0.32636619f * square * softmax.medium[0];
    softmax.medium[2] = -0.29836079f * square * softmax.medium[1];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        softmax.most[r] = row + 8 * r >= item.row_tile.num_rows ? INFINITY
                          : fits                                ? PREFILL_MEDIUM_CAP / pre_scale
                                                                : -1.0f;
    }
    return softmax;
}

/* acc_s becomes P = exp2(the polynomial of acc_s - row_max), and row_sum grows by it. */
template <int FACTORS, int N>
GPU_INLINE void polynomial_apply_exp2(const float (&factors)[FACTORS], float (&acc_s)[N],
                                      const float (&row_max)[2], float (&row_sum)[2])
{
    auto probability = [&](float x, float base) {
        const float square = __fmul_rn(x, x);
        float factor = factors[FACTORS - 1];
#pragma unroll
        for (int i = FACTORS - 2; i >= 0; i--) {
            factor = fmaf(factor, square, factors[i]);
        }
        return fast_exp2(fmaf(x, factor, -base));
    };
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float sum = 0.0f;
#pragma unroll
        for (int i = 2 * r; i < N; i += 4) {
            acc_s[i] = probability(acc_s[i], row_max[r]);
            acc_s[i + 1] = probability(acc_s[i + 1], row_max[r]);
            sum += acc_s[i] + acc_s[i + 1];
        }
        row_sum[r] += sum;
    }
}

/* The same of capped scores, in the cheapest of three ways that all of a warp's products allow.
 * row_max is finite. */
template <int N>
GPU_INLINE void capped_apply_exp2(const capped_softmax &softmax, float pre_scale, float scale_log2,
                                  float (&acc_s)[N], const float (&row_max)[2], float (&row_sum)[2])
{
    float high[2][2];
#pragma unroll
    for (int i = 0; i < N; i++) {
        const int r = (i >> 1) & 1, chain = i & 1;
        high[r][chain] = i < 4 ? fabsf(acc_s[i]) : fmaxf(high[r][chain], fabsf(acc_s[i]));
    }
    auto exceed = [&](float part) {
        return __any_sync(0xffffffffu,
                          fmaxf(high[0][0], high[0][1]) > part * softmax.most[0] ||
                              fmaxf(high[1][0], high[1][1]) > part * softmax.most[1]) != 0;
    };
    if (!exceed(PREFILL_SMALL_CAP / PREFILL_MEDIUM_CAP)) {
        polynomial_apply_exp2(softmax.small, acc_s, row_max, row_sum);
    } else if (!exceed(1.0f)) {
        polynomial_apply_exp2(softmax.medium, acc_s, row_max, row_sum);
    } else {
        const float shift[2] = {0.0f, 0.0f};
        apply_softcap(pre_scale, acc_s);
        scale_apply_exp2(scale_log2, shift, acc_s, row_max, row_sum);
    }
}

#endif
