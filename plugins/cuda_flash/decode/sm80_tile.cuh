/* SPDX-License-Identifier: Apache-2.0 */
/* One tile in one warp: scores of 16 rows, what they see, online softmax, weighted values. */
#ifndef CUDA_FLASH_SM80_TILE_CUH
#define CUDA_FLASH_SM80_TILE_CUH

#include "sm80_epilogue.cuh"
#include "sm80_turboquant.cuh"

/* What the two rows of a lane, `row` and row + apart, see. Rows that are not there see all;
 * their results are discarded. */
struct lane_rows {
    int32_t first[2], last[2];
};

/* `all`, of the warp's own: the first and the last key that every row sees. */
static __device__ __forceinline__ lane_rows enter_rows(const gpu_params &p, const gpu_run &run,
                                                       int row, int apart, int2 &all)
{
    lane_rows v;
    gpu_request request = request_of_row_tile(run.row_tile);
#pragma unroll
    for (int i = 0; i < 2; i++) {
        v.first[i] = INT32_MIN;
        v.last[i] = INT32_MAX;
        if (row + apart * i < run.row_tile.num_rows) {
            int32_t index = (run.row_tile.first_row + row + apart * i) / p.problem.group;
            gpu_interval s = interval_of(p.problem, request, index);
            v.first[i] = s.first;
            v.last[i] = s.last;
        }
    }
    bool masked = p.problem.spans != nullptr || p.problem.tree != nullptr;
    int32_t first = __reduce_max_sync(0xffffffffu, max(v.first[0], v.first[1]));
    int32_t last = __reduce_min_sync(0xffffffffu, min(v.last[0], v.last[1]));
    if ((threadIdx.x & 31) == 0) {
        all = make_int2(first, masked ? INT32_MIN : last);
    }
    __syncwarp(); /* it is there */
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

/* What intervals do not say: spans, trees, ALiBi. Scores are scaled and capped, base 2; `row` is
 * the lane's first. */
template <int FEW, int N>
static __device__ __noinline__ void score_slowly(const gpu_params &p, const gpu_run &run, int row,
                                                 int32_t first_key, tile_scores<N> &x)
{
    gpu_request request = request_of_row_tile(run.row_tile);
    for (int i = 0; i < 2; i++) {
        int32_t own = row + (FEW ? 1 : 8) * i, at = run.row_tile.first_row + own;
        int32_t index = at / p.problem.group;
        if (own >= run.row_tile.num_rows) {
            break;
        }
        gpu_interval v = interval_of(p.problem, request, index);
        float slope =
            p.problem.slopes != nullptr
                ? p.problem.slopes[run.head * p.problem.group + at - index * p.problem.group]
                : 0.0f;
#pragma unroll 1
        for (int e = 0; e < N * 2; e++) {
            int element = FEW ? 2 * (e & 1) + i : 2 * i + (e & 1);
            float *s = &x.s[e >> 1][element];
            int32_t j = first_key + sums_at<FEW>::key(e >> 1, element);
            bool sees =
                sees_slow(p.problem, request, index, v.position, j, j >= v.first && j <= v.last);
            float bias =
                sees ? bias_of(p.problem, request, index, v.position, slope, j) : -INFINITY;
            *s = bias == -INFINITY ? -INFINITY : *s + LOG2E * bias; /* NaN of a hidden key too */
        }
    }
}

/* Scores of one tile in base 2; `first_key` is the lane's first. PRECISE: to float32's last bits.
 * SCALED: times `scale` they are. Rows from 8 on are left out where there are none. `inside`: all
 * rows see all keys. */
template <bool PRECISE, bool SCALED, int FEW, int N>
static __device__ __forceinline__ void
score_tile(const gpu_params &p, const gpu_run &run, const lane_rows &rows, int row, float scale,
           bool slow, bool high_rows, bool inside, int32_t first_key, float (&s)[N][4])
{
#pragma unroll
    for (int n = 0; n < N && !SCALED; n++) {
        s[n][0] *= scale, s[n][1] *= scale, s[n][2] *= scale, s[n][3] *= scale;
    }
    if (p.problem.soft_cap > 0.0f) {
        float two_over_cap = 2.0f / p.problem.soft_cap;
#pragma unroll
        for (int n = 0; n < N; n++) {
#pragma unroll
            for (int e = 0; e < 4; e++) {
                if (FEW || e < 2 || high_rows) {
                    s[n][e] = PRECISE
                                  ? LOG2E * p.problem.soft_cap * tanhf(s[n][e] / p.problem.soft_cap)
                                  : LOG2E * cap_score(s[n][e], p.problem.soft_cap, two_over_cap);
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
        score_slowly<FEW>(p, run, row, first_key, x);
#pragma unroll
        for (int n = 0; n < N; n++) {
            s[n][0] = x.s[n][0], s[n][1] = x.s[n][1], s[n][2] = x.s[n][2], s[n][3] = x.s[n][3];
        }
    } else if (!inside) {
#pragma unroll
        for (int n = 0; n < N; n++) {
#pragma unroll
            for (int e = 0; e < 4; e++) {
                int32_t j = first_key + sums_at<FEW>::key(n, e), i = sums_at<FEW>::which(e);
                bool sees = j >= rows.first[i] && j <= rows.last[i];
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
                                                   const lane_rows &rows, const int2 &all,
                                                   int32_t low, int32_t high)
{
    if (low >= all.x && high <= all.y) {
        return SEES_ALL;
    }
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

/* Weights are relative to a row's largest score, but one up to 2^8 times larger moves nothing: sums
 * shrink rarely, and lanes ask each other only then. */
#define SOFTMAX_SLACK 8.0f

/* A row's reference m becomes its largest score where that is past the slack, by this row alone:
 * its bits are the same whatever rows share the tile. o, l and z shrink to it. */
template <int FEW, int ND>
static __device__ __forceinline__ void
raise_reference(int i, float high, float (&m)[2], float (&l)[2], float (&z)[4], float (&o)[ND][4])
{
    const int first = FEW ? i : 2 * i, next = FEW ? i + 2 : 2 * i + 1; /* the row's elements */
    high = sums_at<FEW>::largest(high);
    high = high > m[i] + SOFTMAX_SLACK ? high : m[i];
    float shrink = exponential2(m[i] - softmax_base(high));
    m[i] = high;
    l[i] *= shrink;
    z[first] *= shrink;
    z[next] *= shrink;
#pragma unroll
    for (int n = 0; n < ND; n++) {
        o[n][first] *= shrink;
        o[n][next] *= shrink;
    }
}

/* Online softmax of one tile; s becomes weights. */
template <int FEW, int N, int ND>
static __device__ __forceinline__ void soften(bool high_rows, float (&s)[N][4], float (&m)[2],
                                              float (&l)[2], float (&z)[4], float (&o)[ND][4])
{
    float high[2] = {m[0], m[1]};
#pragma unroll
    for (int n = 0; n < N; n++) {
#pragma unroll
        for (int e = 0; e < 4; e++) {
            if (FEW || e < 2 || high_rows) {
                float &most = high[sums_at<FEW>::which(e)];
                most = fmaxf(most, s[n][e]);
            }
        }
    }
    bool past = high[0] > m[0] + SOFTMAX_SLACK || high[1] > m[1] + SOFTMAX_SLACK;
    if (__any_sync(0xffffffffu, past)) {
        raise_reference<FEW>(0, high[0], m, l, z, o);
        raise_reference<FEW>(1, high[1], m, l, z, o);
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int first = FEW ? i : 2 * i, next = FEW ? i + 2 : 2 * i + 1;
        if (!FEW && i == 1 && !high_rows) {
#pragma unroll
            for (int n = 0; n < N; n++) {
                s[n][2] = s[n][3] = 0.0f;
            }
            break;
        }
        float base = softmax_base(m[i]);
#pragma unroll
        for (int n = 0; n < N; n++) {
            s[n][first] = exponential2(s[n][first] - base);
            s[n][next] = exponential2(s[n][next] - base);
            l[i] += s[n][first] + s[n][next];
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
    return pack2<KIND_F16>(clamp_half(low), clamp_half(high));
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

/* The rows against 16 keys from key `first` of a stage on, 16 dims of them. */
template <int KIND, int D, int TILE, int FEW>
static __device__ __forceinline__ void dot_step(const char *stage, int first, int kk, int lane,
                                                const uint32_t (&a)[4], float (*s)[4])
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
            if constexpr (KIND == KIND_INT8) { /* as 128 + x without exponents: x 2^-24 */
                x ^= 0x80808080u;
                b[2 * h] = __byte_perm(x, 0, 0x4140);
                b[2 * h + 1] = __byte_perm(x, 0, 0x4342);
            } else {
                b[2 * h] = widen<KIND>(x & 0xffff);
                b[2 * h + 1] = widen<KIND>(x >> 16);
            }
        }
    }
    multiply_keys<FEW, KIND>(s, a, b);
}

/* All scores of 16 rows against 16 SUBS keys of float32. Of 16 dims lane (g, c) has 4 c .. 4 c + 3,
 * two for each product. */
template <int D, int TILE, int SUBS>
static __device__ __forceinline__ void dot_floats(const char *stage, const char *sq, int first,
                                                  int lane, float (&s)[2 * SUBS][4])
{
    constexpr int chunks = D / 4;
    const int g = lane >> 2;
    float rest[2 * SUBS][4] = {};
#pragma unroll
    for (int kk = 0; kk < D / 16; kk++) {
        int chunk = 4 * kk + (lane & 3);
        float4 low = *(const float4 *)(sq + (g * chunks + swizzle<chunks>(g, chunk)) * 16);
        float4 high =
            *(const float4 *)(sq + ((g + 8) * chunks + swizzle<chunks>(g + 8, chunk)) * 16);
        const tf32_pair a[2][4] = {
            {split_float(low.x), split_float(high.x), split_float(low.y), split_float(high.y)},
            {split_float(low.z), split_float(high.z), split_float(low.w), split_float(high.w)}};
#pragma unroll
        for (int n = 0; n < 2 * SUBS; n++) {
            float4 k = *(const float4 *)(stage + place_of<chunks, TILE>(first + n * 8 + g, chunk));
            float sums[4] = {};
            multiply_floats(sums, rest[n], a[0], split_float(k.x), split_float(k.y));
            multiply_floats(sums, rest[n], a[1], split_float(k.z), split_float(k.w));
            add_sums(s[n], sums);
        }
    }
#pragma unroll
    for (int n = 0; n < 2 * SUBS; n++) {
        add_sums(s[n], rest[n]);
    }
}

/* o += weights x values of 16 keys of float32. Column g of tiles 4 j .. 4 j + 3 has dims 32 j + 4 g
 * .. + 3; a lane's two keys are both halves of a product's depth. */
template <int D, int TILE>
static __device__ __forceinline__ void add_floats(const char *values, int first, int lane,
                                                  const float (&s0)[4], const float (&s1)[4],
                                                  float (&o)[D / 8][4])
{
    constexpr int chunks = D / 4;
    const int key = first + (lane & 3) * 2;
    const tf32_pair a[2][4] = {
        {split_float(s0[0]), split_float(s0[2]), split_float(s0[1]), split_float(s0[3])},
        {split_float(s1[0]), split_float(s1[2]), split_float(s1[1]), split_float(s1[3])}};
#pragma unroll
    for (int j = 0; j < D / 32; j++) {
        int chunk = 8 * j + (lane >> 2);
        float sums[4][4] = {};
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float4 x = *(const float4 *)(values + place_of<chunks, TILE>(key + 8 * half, chunk));
            float4 y =
                *(const float4 *)(values + place_of<chunks, TILE>(key + 8 * half + 1, chunk));
            multiply_floats(sums[0], sums[0], a[half], split_float(x.x), split_float(y.x));
            multiply_floats(sums[1], sums[1], a[half], split_float(x.y), split_float(y.y));
            multiply_floats(sums[2], sums[2], a[half], split_float(x.z), split_float(y.z));
            multiply_floats(sums[3], sums[3], a[half], split_float(x.w), split_float(y.w));
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            add_sums(o[4 * j + i], sums[i]);
        }
    }
}

/* Dots of 16 keys with up to ROWS rows of float32, on the FMA units: so few rows would leave most
 * of a product of tf32 empty. Lane (g, c) has keys g and g + 8 and each fourth chunk of dims, odd
 * keys those that even keys do not read at that time: other banks. */
template <int D, int TILE, int ROWS>
static __device__ __forceinline__ void dot_few_floats(const char *stage, const char *sq, int first,
                                                      int lane, float (&s)[4])
{
    constexpr int chunks = D / 4;
    const int g = lane >> 2, c = lane & 3;
    float sums[2][ROWS] = {};
#pragma unroll
    for (int kk = 0; kk < D / 16; kk++) {
        int chunk = (4 * kk + c) ^ ((g & 1) << 2);
        float4 low = *(const float4 *)(stage + place_of<chunks, TILE>(first + g, chunk));
        float4 high = *(const float4 *)(stage + place_of<chunks, TILE>(first + g + 8, chunk));
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            float4 q = *(const float4 *)(sq + (r * chunks + swizzle<chunks>(r, chunk)) * 16);
            sums[0][r] = fmaf(low.x, q.x, fmaf(low.y, q.y, sums[0][r]));
            sums[1][r] = fmaf(high.x, q.x, fmaf(high.y, q.y, sums[1][r]));
            sums[0][r] = fmaf(low.z, q.z, fmaf(low.w, q.w, sums[0][r]));
            sums[1][r] = fmaf(high.z, q.z, fmaf(high.w, q.w, sums[1][r]));
        }
    }
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float sum = sums[i][r];
            sum += __shfl_xor_sync(0xffffffffu, sum, 1);
            sum += __shfl_xor_sync(0xffffffffu, sum, 2);
            s[2 * i + (r & 1)] = c == r >> 1 ? sum : s[2 * i + (r & 1)];
        }
    }
}

/* o += weights x values of 16 keys of float32, up to 8 rows. */
template <int D, int TILE>
static __device__ __forceinline__ void add_few_floats(const char *values, int first, int lane,
                                                      const float (&s)[4], float (&o)[D / 16][4])
{
#pragma unroll
    for (int key = 0; key < 16; key++) {
        const int from = (key & 7) * 4 + (lane & 3), at = key >> 3 << 1;
        float w0 = __shfl_sync(0xffffffffu, s[at], from);
        float w1 = __shfl_sync(0xffffffffu, s[at + 1], from);
#pragma unroll
        for (int j = 0; j < D / 32; j++) {
            int chunk = 8 * j + (lane >> 2);
            float4 x = *(const float4 *)(values + place_of<D / 4, TILE>(first + key, chunk));
            o[2 * j][0] = fmaf(w0, x.x, o[2 * j][0]);
            o[2 * j][1] = fmaf(w1, x.x, o[2 * j][1]);
            o[2 * j][2] = fmaf(w0, x.y, o[2 * j][2]);
            o[2 * j][3] = fmaf(w1, x.y, o[2 * j][3]);
            o[2 * j + 1][0] = fmaf(w0, x.z, o[2 * j + 1][0]);
            o[2 * j + 1][1] = fmaf(w1, x.z, o[2 * j + 1][1]);
            o[2 * j + 1][2] = fmaf(w0, x.w, o[2 * j + 1][2]);
            o[2 * j + 1][3] = fmaf(w1, x.w, o[2 * j + 1][3]);
        }
    }
}

/* o += weights x values of 16 keys, of 16-bit kinds: ND column tiles, from first_chunk on. */
template <int KIND, int D, int TILE, int ND>
static __device__ __forceinline__ void add_values(const char *values, int first, int lane,
                                                  const float (&s0)[4], const float (&s1)[4],
                                                  float (&o)[ND][4], int first_chunk = 0)
{
    constexpr int chunks = shape<KIND, D, true>::chunks;
    uint32_t a[4] = {pack2<KIND>(s0[0], s0[1]), pack2<KIND>(s0[2], s0[3]),
                     pack2<KIND>(s1[0], s1[1]), pack2<KIND>(s1[2], s1[3])};
    int key = first + (lane & 15);
#pragma unroll
    for (int c = 0; c < ND / 2; c++) {
        uint32_t b[4];
        int chunk = first_chunk + 2 * c + (lane >> 4);
        load4_transposed(b, shared_address(values) + place_of<chunks, TILE>(key, chunk));
        multiply<KIND>(o[2 * c], a, b[0], b[1]);
        multiply<KIND>(o[2 * c + 1], a, b[2], b[3]);
    }
}

/* The same of 8-bit kinds; z: the weights' sums with the offsets of int8's codes. */
template <int KIND, int D, int TILE, int FEW, int ND>
static __device__ __forceinline__ void
add_bytes(const char *values, int first, int lane, const float (&s0)[4], const float (&s1)[4],
          float (&o)[ND][4], float (&z)[4], int first_chunk = 0)
{
    constexpr int chunks = shape<KIND, D, true>::chunks;
    packed_weights<FEW> weights(s0, s1);
    if constexpr (FEW) {
        weights.arrange(0x3210);
    }
    if constexpr (KIND == KIND_INT8) {
        weights.add_offsets(z, 0x00800080u, 0x00800080u);
    }
    int key = first + (lane & 15);
#pragma unroll
    for (int c = 0; c < ND / (FEW ? 2 : 4); c++) {
        uint32_t b[4];
        int chunk = first_chunk + 2 * c + (lane >> 4);
        load4_transposed(b, shared_address(values) + place_of<chunks, TILE>(key, chunk));
#pragma unroll
        for (int h = 0; h < 2; h++) { /* even dims to the first of two column tiles */
            uint32_t even[2], odd[2];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                if constexpr (KIND == KIND_INT8) {
                    uint32_t x = b[2 * h + i] ^ 0x80808080u;
                    even[i] = x & 0x00ff00ffu;
                    odd[i] = __byte_perm(x, 0, 0x4341);
                } else {
                    uint32_t x = __byte_perm(b[2 * h + i], 0, 0x3120);
                    even[i] = widen<KIND>(x & 0xffff);
                    odd[i] = widen<KIND>(x >> 16);
                }
            }
            weights.add(&o[(4 * c + 2 * h) / (FEW ? 2 : 1)], even, odd);
        }
    }
}

/* What a run's sums of values are relative to: a power of two that no value's scale so far is
 * above, so that weights times scales are f16; and the sums with the codes' offsets, as a tile of o
 * whose columns are alike, over 2^24. KIND_LEVELS: the lane's sums with lowest values, in the
 * places of column 0. */
struct value_sums {
    float reference, z[4];
};

/* Scales of the lane's values; of KIND_LEVELS their steps, and z += weights x lowest values. */
template <int KIND, int FEW, int N>
static __device__ __forceinline__ void
load_value_scales(const char *stage, const float *scales, const sm80_plane &plane, int first,
                  int lane, bool apart, const float (&s)[N][4], float (&z)[4], float (&scale)[N][2])
{
    if constexpr (KIND >= KIND_LEVELS) {
        float lowest[N][2];
        load_steps<FEW>(stage, plane, first, lane, scale, lowest);
#pragma unroll
        for (int i = 0; i < 4 * N; i++) {
            float weight = s[i / 4][i % 4], low = lowest[i / 4][FEW ? i % 4 >> 1 : i & 1];
            float &sum = z[FEW ? i & 1 : i & 2];
            sum = apart && weight == 0.0f ? sum : fmaf(weight, low, sum);
        }
        return;
    }
    constexpr uint32_t mask = KIND == KIND_INT4 ? ~ZERO_POINT_MASK : ~0u;
#pragma unroll
    for (int i = 0; i < 2 * N; i++) {
        float both = scales[sums_at<FEW>::key(i / 2, FEW ? i % 2 * 2 : i % 2)];
        scale[i / 2][i % 2] = bits_float(float_bits(both) & mask);
    }
}

/* Weights times their values' scales over the reference. apart: a weight of 0 may meet a scale that
 * is no number. */
template <int KIND, int FEW, int N, int ND>
static __device__ __forceinline__ void scale_weights(float (&scale)[N][2], bool apart,
                                                     float (&s)[N][4], value_sums &sums,
                                                     float (&o)[ND][4])
{
    float largest = 0.0f;
#pragma unroll
    for (int i = 0; i < 2 * N; i++) {
        largest = fmaxf(largest, fabsf(scale[i / 2][i % 2]));
    }
    if (__any_sync(0xffffffffu, largest > sums.reference)) { /* which all lanes share */
        largest = sums_at<FEW>::largest(largest);
        uint32_t above = (float_bits(largest) + 0x7fffffu) & 0x7f800000u;
        float next = bits_float(min(above, 0x7e000000u)); /* its inverse is a number, too */
        float shrink = sums.reference / next;
        sums.reference = next;
        if (KIND < KIND_LEVELS) { /* whose lowest values are numbers as they are */
            sums.z[0] *= shrink, sums.z[1] *= shrink, sums.z[2] *= shrink, sums.z[3] *= shrink;
        }
#pragma unroll
        for (int n = 0; n < ND; n++) {
            o[n][0] *= shrink, o[n][1] *= shrink, o[n][2] *= shrink, o[n][3] *= shrink;
        }
    }
    float inverse = bits_float(0x7f000000u - float_bits(sums.reference));
#pragma unroll
    for (int n = 0; n < N; n++) {
        scale[n][0] *= inverse, scale[n][1] *= inverse;
    }
    if (apart) {
#pragma unroll
        for (int n = 0; n < N; n++) {
#pragma unroll
            for (int e = 0; e < 4; e++) {
                float weight = s[n][e] * scale[n][FEW ? e >> 1 : e & 1];
                s[n][e] = s[n][e] == 0.0f ? 0.0f : weight;
            }
        }
        return;
    }
#pragma unroll
    for (int n = 0; n < N; n++) {
#pragma unroll
        for (int e = 0; e < 4; e++) {
            s[n][e] *= scale[n][FEW ? e >> 1 : e & 1];
        }
    }
}

/* Raw sums of a run become sums of values, less their offsets; the head's scale is still missing.
 */
template <int KIND, int FEW, int ND>
static __device__ __forceinline__ void close_values(bool scaled, value_sums &sums,
                                                    float (&o)[ND][4])
{
    float reference = scaled ? sums.reference : 1.0f;
    if (KIND < KIND_INT8 && !scaled) {
        return;
    }
    if (KIND >= KIND_LEVELS) {
        sums.z[0] = sums_at<FEW>::sum(sums.z[0]);
        sums.z[FEW ? 1 : 2] = sums_at<FEW>::sum(sums.z[FEW ? 1 : 2]);
    }
#pragma unroll
    for (int n = 0; n < ND; n++) {
#pragma unroll
        for (int e = 0; e < 4; e++) {
            float raw = o[n][e] * unit_of_sum<KIND>(sums_at<FEW>::tile(n, e));
            float z = sums.z[FEW ? e & 1 : e & 2];
            o[n][e] =
                KIND >= KIND_LEVELS ? fmaf(raw, reference, z) : fmaf(z, -0x1p24f, raw) * reference;
        }
    }
}

/* Whether one of `keys` rows of values has a NaN or an infinity. */
template <int KIND, int D, int TILE>
static __device__ __forceinline__ bool values_odd(const char *values, int first, int keys, int lane)
{
    constexpr int chunks = shape<KIND, D, true>::chunks;
    constexpr uint32_t mask = KIND == KIND_F32    ? 0x7f800000u
                              : KIND == KIND_BF16 ? 0x7f807f80u
                              : KIND == KIND_F16  ? 0x7c007c00u
                              : KIND == KIND_E4M3 ? 0x7f7f7f7fu
                                                  : 0x7c7c7c7cu;
    constexpr uint32_t one = KIND == KIND_F32    ? 0x00800000u
                             : KIND == KIND_BF16 ? 0x00800080u
                             : KIND == KIND_F16  ? 0x04000400u
                             : KIND == KIND_E4M3 ? 0x01010101u
                                                 : 0x04040404u;
    constexpr uint32_t sign = KIND == KIND_F32   ? 0x80000000u
                              : KIND < KIND_E4M3 ? 0x80008000u
                                                 : 0x80808080u;
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
    return __any_sync(0xffffffffu, odd);
}

template <int N, int ND> struct exact_step {
    float s[N][4], o[ND][4];
};

/* Element d of a value in a stage, raw. */
template <int KIND, int D, int TILE>
static __device__ __forceinline__ float raw_value(const char *stage, const sm80_plane &plane,
                                                  int key, int d)
{
    using S = shape<KIND, D, true>;
    if constexpr (S::packed) { /* nvfp4: others have no odd values */
        uint32_t byte = *(const uint8_t *)(stage + plane.at + key * plane.pitch + d / 2);
        const char *scale = value_scale_at<D>(stage, plane, key, d / NVFP4_BLOCK);
        return e2m1_number((d & 1) != 0 ? byte >> 4 : byte & 15) *
               number_load(scale, ATTN_DTYPE_FP8_E4M3, 0) * 0x1p-14f;
    } else {
        constexpr int per = 16 / S::element;
        constexpr int32_t dtype = KIND == KIND_F32    ? ATTN_DTYPE_F32
                                  : KIND == KIND_BF16 ? ATTN_DTYPE_BF16
                                  : KIND == KIND_F16  ? ATTN_DTYPE_F16
                                  : KIND == KIND_E4M3 ? ATTN_DTYPE_FP8_E4M3
                                                      : ATTN_DTYPE_FP8_E5M2;
        return number_load(stage + S::half + place_of<S::chunks, TILE>(key, d / per), dtype,
                           d % per);
    }
}

/* add_values one product at a time, without those of weight 0: a masked NaN stays out. The warp has
 * dims from first_dim on. */
template <int KIND, int D, int FEW, int TILE, int N, int ND>
static __device__ __noinline__ void add_values_exactly(const char *stage, const sm80_plane &plane,
                                                       int first, int first_dim, int lane,
                                                       exact_step<N, ND> &x)
{
    constexpr int keys = FEW == SM80_FOUR ? 32 : FEW ? 16 : 8;
#pragma unroll 1
    for (int j = 0; j < N * keys; j++) { /* a key's weights stand in lanes of its own */
        int n = j / keys, key = first + j;
        int from = FEW == SM80_FOUR ? (lane & 1) + (j >> 4) * 2 + (j & 7) * 4
                   : FEW            ? (lane & 3) + (j & 7) * 4
                                    : (lane & 28) + ((j & 7) >> 1);
        int e0 = FEW ? (j >> 3 & 1) * 2 : j & 1;
        float w[2] = {__shfl_sync(0xffffffffu, x.s[n][e0], from),
                      __shfl_sync(0xffffffffu, x.s[n][e0 + (FEW ? 1 : 2)], from)};
#pragma unroll 1
        for (int i = 0; i < ND * 4; i++) {
            int at = i >> 2, e = i & 3;
            int place = value_dim<KIND>(sums_at<FEW>::tile(at, e), sums_at<FEW>::column(lane, e));
            place += first_dim;
            float v = raw_value<KIND, D, TILE>(stage, plane, key, dim_of_place<KIND, D>(place));
            float weight = sums_at<FEW>::which(e) == 0 ? w[0] : w[1];
            x.o[at][e] += weight == 0.0f ? 0.0f : weight * v;
        }
    }
}

/* The same from and to registers: what a call takes the address of leaves them. */
template <int KIND, int D, int FEW, int TILE, int N, int ND>
static __device__ __forceinline__ void add_exactly(const char *stage, const sm80_plane &plane,
                                                   int first, int first_dim, int lane,
                                                   const float (&s)[N][4], float (&o)[ND][4])
{
    exact_step<N, ND> x;
#pragma unroll
    for (int i = 0; i < 4 * N; i++) {
        x.s[i / 4][i % 4] = s[i / 4][i % 4];
    }
#pragma unroll
    for (int i = 0; i < 4 * ND; i++) {
        x.o[i / 4][i % 4] = o[i / 4][i % 4];
    }
    add_values_exactly<KIND, D, FEW, TILE>(stage, plane, first, first_dim, lane, x);
#pragma unroll
    for (int i = 0; i < 4 * ND; i++) {
        o[i / 4][i % 4] = x.o[i / 4][i % 4];
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

/* Where a warp that computes stands in the rings of stages and of queries. */
struct ring_place {
    int stage = 0, phase = 0, q_slot = 0;
};

/* Ends a tile. Behind a run's last one its results leave, through the stage as scratch memory, its
 * sums begin anew and its queries are given back. */
template <int KIND, int D, bool SPLIT, int FEW, int ND>
static __device__ __forceinline__ void end_tile(const sm80_params &a, shared<KIND, D, SPLIT> &mine,
                                                const gpu_run &run, bool last, bool scaled,
                                                ring_place &place, float (&m)[2], float (&l)[2],
                                                value_sums &sums, float (&o)[ND][4])
{
    if (last) {
        close_values<KIND, FEW>(scaled, sums, o);
        finish_run<KIND, D, SPLIT, FEW>(a.p, a.output, run, stage_at(mine, place.stage),
                                        &mine.last_one, m, l, o);
        clear_rows(m, l, o);
        sums = {};
        fence_for_boxes(); /* the stage was scratch memory */
        barrier_arrive(shared_address(&mine.q_empty[place.q_slot]));
        place.q_slot = place.q_slot + 1 == shape<KIND, D, SPLIT>::q_buffers ? 0 : place.q_slot + 1;
    }
    /* every lane for itself: racecheck does not follow reads through __syncwarp to a barrier */
    barrier_arrive(shared_address(&mine.empty[place.stage]));
    place.stage++;
    if (place.stage == a.stages) {
        place.stage = 0;
        place.phase ^= 1;
    }
}

/* Values of keys outside k0 .. k1 - 1 that a box brought along become zero: 0 x NaN is NaN. Of each
 * OWN of its chunks, from first_chunk on. */
template <int KIND, int D, int TILE, int OWN = shape<KIND, D, true>::chunks>
static __device__ __forceinline__ void clear_values(char *values, int first, int keys, int low,
                                                    int high, int lane, int first_chunk = 0)
{
    constexpr int chunks = shape<KIND, D, true>::chunks;
    for (int i = lane; i < keys * OWN; i += 32) {
        int key = first + i / OWN, chunk = first_chunk + i % OWN;
        if (key < low || key >= high) {
            *(uint4 *)(values + place_of<chunks, TILE>(key, chunk)) = make_uint4(0, 0, 0, 0);
        }
    }
    fence_for_boxes();
}

#endif
