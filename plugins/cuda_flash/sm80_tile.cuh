/* SPDX-License-Identifier: Apache-2.0 */
/* One tile in one warp: scores of 16 rows, what they see, online softmax, weighted values. */
#ifndef CUDA_FLASH_SM80_TILE_CUH
#define CUDA_FLASH_SM80_TILE_CUH

#include "sm80_finish.cuh"

/* What the two rows of a lane, g and g + 8 of its warp's 16, see. Rows that are not there see all;
 * their results are discarded. */
struct lane_rows {
    int32_t first[2], last[2];
};

static __device__ __forceinline__ lane_rows enter_rows(const gpu_params &p, const gpu_run &run,
                                                       int row)
{
    lane_rows v;
    gpu_request request = request_of_row_tile(run.row_tile);
#pragma unroll
    for (int i = 0; i < 2; i++) {
        v.first[i] = INT32_MIN;
        v.last[i] = INT32_MAX;
        if (row + 8 * i < run.row_tile.num_rows) {
            int32_t index = (run.row_tile.first_row + row + 8 * i) / p.problem.group;
            gpu_interval s = interval_of(p.problem, request, index);
            v.first[i] = s.first;
            v.last[i] = s.last;
        }
    }
    return v;
}

static __device__ __forceinline__ float cap_score(float s, float cap, float two_over_cap)
{
    float e = __expf(s * two_over_cap);
    return cap - 2.0f * cap * __fdividef(1.0f, e + 1.0f);
}

/* A tile's scores outside of registers: what rarely happens happens in calls, so that the loop
 * stays small. */
template <int N> struct tile_scores {
    float s[N][4];
};

/* What intervals do not say: spans, trees, ALiBi. Scores are scaled and capped, base 2; `row` and
 * row + 8 are the lane's. */
template <int N>
static __device__ __noinline__ void score_slowly(const gpu_params &p, const gpu_run &run, int row,
                                                 int32_t first_key, tile_scores<N> &x)
{
    gpu_request request = request_of_row_tile(run.row_tile);
    for (int i = 0; i < 2; i++) {
        int32_t at = run.row_tile.first_row + row + 8 * i, index = at / p.problem.group;
        if (row + 8 * i >= run.row_tile.num_rows) {
            break;
        }
        gpu_interval v = interval_of(p.problem, request, index);
        float slope =
            p.problem.slopes != nullptr
                ? p.problem.slopes[run.head * p.problem.group + at - index * p.problem.group]
                : 0.0f;
#pragma unroll 1
        for (int e = 0; e < N * 2; e++) {
            float *s = &x.s[e >> 1][2 * i + (e & 1)];
            int32_t j = first_key + (e >> 1) * 8 + (e & 1);
            bool sees =
                sees_slow(p.problem, request, index, v.position, j, j >= v.first && j <= v.last);
            float bias =
                sees ? bias_of(p.problem, request, index, v.position, slope, j) : -INFINITY;
            *s = bias == -INFINITY ? -INFINITY : *s + LOG2E * bias; /* NaN of a hidden key too */
        }
    }
}

/* Scores of one tile in base 2; `first_key` is the lane's first. Rows from 8 on are left out where
 * there are none. `inside`: all rows see all keys. */
template <int N>
static __device__ __forceinline__ void
score_tile(const gpu_params &p, const gpu_run &run, const lane_rows &rows, int row, float scale,
           bool slow, bool high_rows, bool inside, int32_t first_key, float (&s)[N][4])
{
#pragma unroll
    for (int n = 0; n < N; n++) {
        s[n][0] *= scale, s[n][1] *= scale, s[n][2] *= scale, s[n][3] *= scale;
    }
    if (p.problem.soft_cap > 0.0f) {
        float two_over_cap = 2.0f / p.problem.soft_cap;
#pragma unroll
        for (int n = 0; n < N; n++) {
#pragma unroll
            for (int e = 0; e < 4; e++) {
                if (e < 2 || high_rows) {
                    s[n][e] = LOG2E * cap_score(s[n][e], p.problem.soft_cap, two_over_cap);
                }
            }
        }
    }
    if (slow) {
        tile_scores<N> x;
#pragma unroll
        for (int n = 0; n < N; n++) {
            x.s[n][0] = s[n][0], x.s[n][1] = s[n][1], x.s[n][2] = s[n][2], x.s[n][3] = s[n][3];
        }
        score_slowly(p, run, row, first_key, x);
#pragma unroll
        for (int n = 0; n < N; n++) {
            s[n][0] = x.s[n][0], s[n][1] = x.s[n][1], s[n][2] = x.s[n][2], s[n][3] = x.s[n][3];
        }
    } else if (!inside) {
#pragma unroll
        for (int n = 0; n < N; n++) {
#pragma unroll
            for (int e = 0; e < 4; e++) {
                int32_t j = first_key + n * 8 + (e & 1);
                bool sees = j >= rows.first[e >> 1] && j <= rows.last[e >> 1];
                s[n][e] = sees ? s[n][e] : -INFINITY;
            }
        }
    }
}

enum tile_view {
    SEES_ALL,   /* every row of the warp sees every key of the tile */
    SEES_ALIKE, /* what one row does not see no row does: those values are zero */
    SEES_APART  /* a weight of 0 may meet a value that is no number */
};

static __device__ __forceinline__ int view_of_tile(const gpu_params &p, const gpu_run &run,
                                                   const lane_rows &rows, int32_t low, int32_t high)
{
    bool outer = false, inner = p.problem.spans != nullptr || p.problem.tree != nullptr;
    int32_t seen_low = max(low, run.row_tile.k0), seen_high = min(high, run.row_tile.k1 - 1);
#pragma unroll
    for (int i = 0; i < 2; i++) {
        outer |= rows.first[i] > low || rows.last[i] < high;
        inner |= seen_low <= seen_high && (rows.first[i] > seen_low || rows.last[i] < seen_high);
    }
    return !__any_sync(0xffffffffu, outer | inner) ? SEES_ALL
           : __any_sync(0xffffffffu, inner)        ? SEES_APART
                                                   : SEES_ALIKE;
}

/* Online softmax of one tile; s becomes weights, o and l shrink to the new maximum. */
template <int N, int ND>
static __device__ __forceinline__ void soften(bool high_rows, float (&s)[N][4], float (&m)[2],
                                              float (&l)[2], float (&o)[ND][4])
{
#pragma unroll
    for (int i = 0; i < 2; i++) {
        if (i == 1 && !high_rows) {
#pragma unroll
            for (int n = 0; n < N; n++) {
                s[n][2] = s[n][3] = 0.0f;
            }
            break;
        }
        float high = m[i];
#pragma unroll
        for (int n = 0; n < N; n++) {
            high = fmaxf(high, fmaxf(s[n][2 * i], s[n][2 * i + 1]));
        }
        high = fmaxf(high, __shfl_xor_sync(0xffffffffu, high, 1));
        high = fmaxf(high, __shfl_xor_sync(0xffffffffu, high, 2));
        float base = softmax_base(high);
        float shrink = exp2f(m[i] - base), sum = 0.0f;
        m[i] = high;
#pragma unroll
        for (int n = 0; n < N; n++) {
            s[n][2 * i] = exp2f(s[n][2 * i] - base);
            s[n][2 * i + 1] = exp2f(s[n][2 * i + 1] - base);
            sum += s[n][2 * i] + s[n][2 * i + 1];
        }
        l[i] = l[i] * shrink + sum;
#pragma unroll
        for (int n = 0; n < ND; n++) {
            o[n][2 * i] *= shrink;
            o[n][2 * i + 1] *= shrink;
        }
    }
}

/* The query's fragment of 16 dims. 8-bit keys are read 4 neighbouring dims at a time, so there the
 * query's dims stand in that order. */
template <int KIND, int D>
static __device__ __forceinline__ void load_query(const char *sq, int q_row, int kk, int lane,
                                                  uint32_t (&a)[4])
{
    if constexpr (KIND < KIND_E4M3) {
        int row = q_row + (lane & 15);
        load4(a, shared_address(sq) +
                     (row * (D / 8) + swizzle<D / 8>(row, kk * 2 + (lane >> 4))) * 16);
    } else {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            int row = q_row + (lane >> 2) + 8 * i, chunk = kk * 2 + ((lane & 3) >> 1);
            uint2 x = *(const uint2 *)(sq + (row * (D / 8) + swizzle<D / 8>(row, chunk)) * 16 +
                                       (lane & 1) * 8);
            a[i] = x.x;
            a[i + 2] = x.y;
        }
    }
}

static __device__ __forceinline__ uint32_t bf16_to_f16(uint32_t two)
{
    float low = __uint_as_float(two << 16), high = __uint_as_float(two & 0xffff0000u);
    low = low != low ? low : fminf(fmaxf(low, -65504.0f), 65504.0f);
    high = high != high ? high : fminf(fmaxf(high, -65504.0f), 65504.0f);
    return pack2<KIND_F16>(low, high);
}

/* Queries of 8-bit caches become f16 in place, once a run. */
static __device__ __forceinline__ void convert_query(char *sq, int bytes)
{
    for (int i = threadIdx.x * 16; i < bytes; i += 128 * 16) {
        uint4 *at = (uint4 *)(sq + i), x = *at;
        *at = make_uint4(bf16_to_f16(x.x), bf16_to_f16(x.y), bf16_to_f16(x.z), bf16_to_f16(x.w));
    }
    barrier_consumers(); /* all rows are converted */
}

/* 16 rows against 16 keys from key `first` of a stage on, 16 dims of them. */
template <int KIND, int D, int TILE>
static __device__ __forceinline__ void dot_step(const char *stage, int first, int kk, int lane,
                                                const uint32_t (&a)[4], float (&s0)[4],
                                                float (&s1)[4])
{
    constexpr int chunks = shape<KIND, D, true>::chunks;
    uint32_t b[4];
    if constexpr (KIND < KIND_E4M3) {
        int key = first + (lane & 7) + (lane >> 4) * 8, chunk = kk * 2 + ((lane >> 3) & 1);
        load4(b, shared_address(stage) + place_of<chunks, TILE>(key, chunk));
    } else {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            int key = first + h * 8 + (lane >> 2);
            uint32_t x =
                *(const uint32_t *)(stage + place_of<chunks, TILE>(key, kk) + (lane & 3) * 4);
            b[2 * h] = widen<KIND>(x & 0xffff);
            b[2 * h + 1] = widen<KIND>(x >> 16);
        }
    }
    multiply<KIND>(s0, a, b[0], b[1]);
    multiply<KIND>(s1, a, b[2], b[3]);
}

/* o += weights x values of 16 keys. `scales`: of the values' rows, NULL: none. */
template <int KIND, int D, int TILE>
static __device__ __forceinline__ void add_values(const char *values, int first, int lane,
                                                  const float *scales, const float (&s0)[4],
                                                  const float (&s1)[4], float (&o)[D / 8][4])
{
    constexpr int chunks = shape<KIND, D, true>::chunks;
    uint32_t a[4] = {pack2<KIND>(s0[0], s0[1]), pack2<KIND>(s0[2], s0[3]),
                     pack2<KIND>(s1[0], s1[1]), pack2<KIND>(s1[2], s1[3])};
    int key = first + (lane & 15);
    uint32_t low = 0, high = 0;
    if (KIND >= KIND_E4M3 && scales != nullptr) {
        const float *at = scales + first + (lane & 3) * 2;
        low = pack2<KIND_F16>(at[0], at[1]);
        high = pack2<KIND_F16>(at[8], at[9]);
    }
#pragma unroll
    for (int c = 0; c < chunks / 2; c++) {
        uint32_t b[4];
        load4_transposed(b,
                         shared_address(values) + place_of<chunks, TILE>(key, 2 * c + (lane >> 4)));
        if constexpr (KIND < KIND_E4M3) {
            multiply<KIND>(o[2 * c], a, b[0], b[1]);
            multiply<KIND>(o[2 * c + 1], a, b[2], b[3]);
        } else { /* bytes of even dims to the first of two column tiles, odd to the second */
#pragma unroll
            for (int h = 0; h < 2; h++) {
                uint32_t x = __byte_perm(b[2 * h], 0, 0x3120);
                uint32_t y = __byte_perm(b[2 * h + 1], 0, 0x3120);
#pragma unroll
                for (int odd = 0; odd < 2; odd++) {
                    uint32_t b0 = widen<KIND>(odd ? x >> 16 : x & 0xffff);
                    uint32_t b1 = widen<KIND>(odd ? y >> 16 : y & 0xffff);
                    if (scales != nullptr) {
                        b0 = multiply_halves(b0, low);
                        b1 = multiply_halves(b1, high);
                    }
                    multiply<KIND>(o[4 * c + 2 * h + odd], a, b0, b1);
                }
            }
        }
    }
}

/* Whether one of `keys` rows of values has a NaN or an infinity; a row's scale counts. */
template <int KIND, int D, int TILE>
static __device__ __forceinline__ bool values_odd(const char *values, int first, int keys, int lane,
                                                  const float *scales)
{
    constexpr int chunks = shape<KIND, D, true>::chunks;
    constexpr uint32_t mask = KIND == KIND_BF16   ? 0x7f807f80u
                              : KIND == KIND_F16  ? 0x7c007c00u
                              : KIND == KIND_E4M3 ? 0x7f7f7f7fu
                                                  : 0x7c7c7c7cu;
    constexpr uint32_t one = KIND == KIND_BF16   ? 0x00800080u
                             : KIND == KIND_F16  ? 0x04000400u
                             : KIND == KIND_E4M3 ? 0x01010101u
                                                 : 0x04040404u;
    constexpr uint32_t sign = KIND < KIND_E4M3 ? 0x80008000u : 0x80808080u;
    bool odd = false;
    if (KIND != KIND_INT8) {
        for (int i = lane; i < keys * chunks; i += 32) {
            uint4 x =
                *(const uint4 *)(values + place_of<chunks, TILE>(first + i / chunks, i % chunks));
            uint32_t any = (((x.x & mask) + one) | ((x.y & mask) + one) | ((x.z & mask) + one) |
                            ((x.w & mask) + one)) &
                           sign;
            odd |= any != 0;
        }
    }
    if (scales != nullptr) {
        for (int i = lane; i < keys; i += 32) {
            odd |= !isfinite(scales[first + i]);
        }
    }
    return __any_sync(0xffffffffu, odd);
}

template <int D, int SUBS> struct exact_step {
    float s[2 * SUBS][4], o[D / 8][4];
};

/* add_values one product at a time, without those of weight 0: a masked NaN stays out. */
template <int KIND, int D, int SUBS, int TILE>
static __device__ __noinline__ void add_values_exactly(const char *values, int first, int lane,
                                                       const float *scales, exact_step<D, SUBS> &x)
{
    constexpr int chunks = shape<KIND, D, true>::chunks, per = 16 / shape<KIND, D, true>::element;
    constexpr int32_t dtype = KIND == KIND_BF16   ? ATTN_DTYPE_BF16
                              : KIND == KIND_F16  ? ATTN_DTYPE_F16
                              : KIND == KIND_E4M3 ? ATTN_DTYPE_FP8_E4M3
                              : KIND == KIND_E5M2 ? ATTN_DTYPE_FP8_E5M2
                                                  : ATTN_DTYPE_INT8;
#pragma unroll 1
    for (int j = 0; j < 16 * SUBS; j++) { /* key j stands in lane (j / 2) % 4 of the quad */
        int from = (lane & 28) + ((j & 7) >> 1), key = first + j;
        float w0 = __shfl_sync(0xffffffffu, x.s[j / 8][j & 1], from);
        float w1 = __shfl_sync(0xffffffffu, x.s[j / 8][2 + (j & 1)], from);
        float scale = scales != nullptr ? scales[key] : 1.0f;
#pragma unroll 1
        for (int i = 0; i < D / 4; i++) {
            int n = i >> 1, e = i & 1, d = value_dim<KIND>(n, lane, e);
            float v =
                number_load(values + place_of<chunks, TILE>(key, d / per), dtype, d % per) * scale;
            x.o[n][e] += w0 == 0.0f ? 0.0f : w0 * v;
            x.o[n][2 + e] += w1 == 0.0f ? 0.0f : w1 * v;
        }
    }
}

template <int ND>
static __device__ __forceinline__ void clear_rows(float (&m)[2], float (&l)[2], float (&o)[ND][4])
{
    m[0] = m[1] = -INFINITY;
    l[0] = l[1] = 0.0f;
#pragma unroll
    for (int n = 0; n < ND; n++) {
        o[n][0] = o[n][1] = o[n][2] = o[n][3] = 0.0f;
    }
}

/* Values of keys outside k0 .. k1 - 1 that a box brought along become zero: 0 x NaN is NaN. */
template <int KIND, int D, int TILE>
static __device__ __forceinline__ void clear_values(char *values, int first, int keys, int low,
                                                    int high, int lane)
{
    constexpr int chunks = shape<KIND, D, true>::chunks;
    for (int i = lane; i < keys * chunks; i += 32) {
        int key = first + i / chunks;
        if (key < low || key >= high) {
            *(uint4 *)(values + place_of<chunks, TILE>(key, i % chunks)) = make_uint4(0, 0, 0, 0);
        }
    }
    fence_for_boxes();
}

#endif
