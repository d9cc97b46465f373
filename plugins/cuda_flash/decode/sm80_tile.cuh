/* SPDX-License-Identifier: Apache-2.0 */
/* One tile in one warp: Q K^T of 16 rows, terms and masks, online softmax, P V. */
#ifndef CUDA_FLASH_SM80_TILE_CUH
#define CUDA_FLASH_SM80_TILE_CUH

#include "sm80_epilogue.cuh"
#include "sm80_turboquant.cuh"

/* What a lane's two rows, `row` and row + apart, see. Rows out of range see everything; their
 * results are discarded. */
struct row_bounds {
    int32_t first[2], last[2];
};

/* Loads the bounds of two rows. `all` gets the keys that every row of the warp sees. */
GPU_INLINE row_bounds load_row_bounds(const gpu_params &p, const gpu_run &run, int row, int apart,
                                      int2 &all)
{
    row_bounds v;
    gpu_request request = request_of_row_tile(run.row_tile);
#pragma unroll
    for (int i = 0; i < 2; i++) {
        v.first[i] = INT32_MIN;
        v.last[i] = INT32_MAX;
        if (row + apart * i < run.row_tile.num_rows) {
            int32_t index = (run.row_tile.first_row + row + apart * i) / p.problem.group;
            gpu_interval seen = interval_of(p.problem, request, index);
            v.first[i] = seen.first;
            v.last[i] = seen.last;
        }
    }
    int32_t first = __reduce_max_sync(0xffffffffu, max(v.first[0], v.first[1]));
    int32_t last = __reduce_min_sync(0xffffffffu, min(v.last[0], v.last[1]));
    if (p.problem.tree != nullptr) { /* concerns the step's own tokens */
        last = min(last, request.length - request.query_len - 1);
    }
    if ((threadIdx.x & 31) == 0) {
        all = make_int2(first, p.problem.spans != nullptr ? INT32_MIN : last);
    }
    __syncwarp(); /* `all` is written */
    return v;
}

GPU_INLINE float cap_score(float score, float cap, float two_over_cap)
{
    float e = __expf(score * two_over_cap);
    return cap - 2.0f * cap * __fdividef(1.0f, e + 1.0f);
}

/* A tile's scores in memory: rare terms are computed in calls, so that the loop stays small. */
template <int N> struct tile_scores {
    float acc_s[N][4];
};

/* Terms beyond intervals: spans, trees, ALiBi. Scores are already scaled and capped, in base 2;
 * `row` is the lane's first. */
template <int SWAP, int N>
static __device__ __noinline__ void score_slowly(const gpu_params &p, const gpu_run &run, int row,
                                                 int32_t first_key, tile_scores<N> &x)
{
    gpu_request request = request_of_row_tile(run.row_tile);
    for (int i = 0; i < 2; i++) {
        int32_t own = row + (SWAP ? 1 : 8) * i, at = run.row_tile.first_row + own;
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
            int element = SWAP ? 2 * (e & 1) + i : 2 * i + (e & 1);
            float *score = &x.acc_s[e >> 1][element];
            int32_t j = first_key + acc_layout<SWAP>::key(e >> 1, element);
            bool sees =
                sees_slow(p.problem, request, index, v.position, j, j >= v.first && j <= v.last);
            float bias =
                sees ? bias_of(p.problem, request, index, v.position, slope, j) : -INFINITY;
            *score =
                /* a hidden key's NaN becomes -inf, too */
                bias == -INFINITY ? -INFINITY : *score + LOG2E * bias;
        }
    }
}

/* Scales, caps and masks the scores of a tile, to base 2. `first_key` is the lane's first. PRECISE:
 * exact tanh. SCALED: scores are scaled already. Without high_rows, rows 8 to 15 do not exist.
 * `inside`: all rows see all keys. */
template <bool PRECISE, bool SCALED, int SWAP, int N>
GPU_INLINE void score_tile(const gpu_params &p, const gpu_run &run, const row_bounds &rows, int row,
                           float scale, bool slow, bool high_rows, bool inside, int32_t first_key,
                           float (&acc_s)[N][4])
{
#pragma unroll
    for (int n = 0; n < N && !SCALED; n++) {
        acc_s[n][0] *= scale, acc_s[n][1] *= scale, acc_s[n][2] *= scale, acc_s[n][3] *= scale;
    }
    if (p.problem.soft_cap > 0.0f) {
        float two_over_cap = 2.0f / p.problem.soft_cap;
#pragma unroll
        for (int n = 0; n < N; n++) {
#pragma unroll
            for (int e = 0; e < 4; e++) {
                if (SWAP || e < 2 || high_rows) {
                    acc_s[n][e] =
                        PRECISE
                            ? LOG2E * p.problem.soft_cap * tanhf(acc_s[n][e] / p.problem.soft_cap)
                            : LOG2E * cap_score(acc_s[n][e], p.problem.soft_cap, two_over_cap);
                }
            }
        }
    }
    if (slow && (!inside || p.problem.alibi != 0)) {
        tile_scores<N> x;
#pragma unroll
        for (int n = 0; n < N; n++) {
            x.acc_s[n][0] = acc_s[n][0], x.acc_s[n][1] = acc_s[n][1], x.acc_s[n][2] = acc_s[n][2],
            x.acc_s[n][3] = acc_s[n][3];
        }
        score_slowly<SWAP>(p, run, row, first_key, x);
#pragma unroll
        for (int n = 0; n < N; n++) {
            acc_s[n][0] = x.acc_s[n][0], acc_s[n][1] = x.acc_s[n][1], acc_s[n][2] = x.acc_s[n][2],
            acc_s[n][3] = x.acc_s[n][3];
        }
    } else if (!inside) {
#pragma unroll
        for (int n = 0; n < N; n++) {
#pragma unroll
            for (int e = 0; e < 4; e++) {
                int32_t j = first_key + acc_layout<SWAP>::key(n, e), i = acc_layout<SWAP>::which(e);
                bool sees = j >= rows.first[i] && j <= rows.last[i];
                acc_s[n][e] = sees ? acc_s[n][e] : -INFINITY;
            }
        }
    }
}

enum tile_view {
    SEES_ALL,   /* every row of the warp sees every key of the tile */
    SEES_ALIKE, /* a key is hidden from all rows or from none; hidden values are zero */
    SEES_APART  /* a probability of 0 may meet a value that is not finite */
};

GPU_INLINE int view_of_tile(const gpu_params &p, const gpu_run &run, const row_bounds &rows,
                            const int2 &all, int32_t low, int32_t high)
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

/* row_max is only raised by more than this, in base 2: P stays below 2^8, and rescaling with its
 * exchange between lanes is rare. */
#define RESCALE_THRESHOLD 8.0f

/* Raises row_max and rescales row_sum, acc_o and zero_sum if the row's maximum exceeds the
 * threshold. This depends on the row alone, so its bits do not depend on the rows that share the
 * tile. */
template <int SWAP, int ND>
GPU_INLINE void update_row_max(int i, float new_max, float (&row_max)[2], float (&row_sum)[2],
                               float (&zero_sum)[4], float (&acc_o)[ND][4])
{
    const int first = SWAP ? i : 2 * i, next = SWAP ? i + 2 : 2 * i + 1; /* the row's elements */
    new_max = acc_layout<SWAP>::largest(new_max);
    new_max = new_max > row_max[i] + RESCALE_THRESHOLD ? new_max : row_max[i];
    float scores_scale = fast_exp2(row_max[i] - softmax_base(new_max));
    row_max[i] = new_max;
    row_sum[i] *= scores_scale;
    zero_sum[first] *= scores_scale;
    zero_sum[next] *= scores_scale;
#pragma unroll
    for (int n = 0; n < ND; n++) {
        acc_o[n][first] *= scores_scale;
        acc_o[n][next] *= scores_scale;
    }
}

/* Online softmax of one tile; acc_s becomes P. */
template <int SWAP, int N, int ND>
GPU_INLINE void online_softmax(bool high_rows, float (&acc_s)[N][4], float (&row_max)[2],
                               float (&row_sum)[2], float (&zero_sum)[4], float (&acc_o)[ND][4])
{
    float new_max[2] = {row_max[0], row_max[1]};
#pragma unroll
    for (int n = 0; n < N; n++) {
#pragma unroll
        for (int e = 0; e < 4; e++) {
            if (SWAP || e < 2 || high_rows) {
                float &most = new_max[acc_layout<SWAP>::which(e)];
                most = fmaxf(most, acc_s[n][e]);
            }
        }
    }
    bool past =
        new_max[0] > row_max[0] + RESCALE_THRESHOLD || new_max[1] > row_max[1] + RESCALE_THRESHOLD;
    if (__any_sync(0xffffffffu, past)) {
        update_row_max<SWAP>(0, new_max[0], row_max, row_sum, zero_sum, acc_o);
        update_row_max<SWAP>(1, new_max[1], row_max, row_sum, zero_sum, acc_o);
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int first = SWAP ? i : 2 * i, next = SWAP ? i + 2 : 2 * i + 1;
        if (!SWAP && i == 1 && !high_rows) {
#pragma unroll
            for (int n = 0; n < N; n++) {
                acc_s[n][2] = acc_s[n][3] = 0.0f;
            }
            break;
        }
        float base = softmax_base(row_max[i]);
#pragma unroll
        for (int n = 0; n < N; n++) {
            acc_s[n][first] = fast_exp2(acc_s[n][first] - base);
            acc_s[n][next] = fast_exp2(acc_s[n][next] - base);
            row_sum[i] += acc_s[n][first] + acc_s[n][next];
        }
    }
}

/* Loads a query's fragment of 16 dims. 8-bit keys are read 4 neighbouring dims at a time, so the
 * query's dims are permuted to match. */
template <int KIND, int D>
GPU_INLINE void load_query(const char *sq, int kk, int lane, uint32_t (&a)[4])
{
    if constexpr (KIND < KIND_E4M3) {
        int row = lane & 15;
        load4(a, shared_address(sq) +
                     (row * (D / 8) + swizzle<D / 8>(row, kk * 2 + (lane >> 4))) * 16);
    } else {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            int row = (lane >> 2) + 8 * i, chunk = kk * 2 + ((lane & 3) >> 1);
            uint2 x = *(const uint2 *)(sq + (row * (D / 8) + swizzle<D / 8>(row, chunk)) * 16 +
                                       (lane & 1) * 8);
            a[i] = x.x;
            a[i + 2] = x.y;
        }
    }
}

GPU_INLINE uint32_t bf16_to_f16(uint32_t two)
{
    float low = __uint_as_float(two << 16), high = __uint_as_float(two & 0xffff0000u);
    return pack2<KIND_F16>(clamp_half(low), clamp_half(high));
}

/* Converts bf16 queries to f16 for 8-bit caches, in place, once a run. */
GPU_INLINE void convert_query(char *sq, int bytes)
{
    for (int i = threadIdx.x * 16; i < bytes; i += 128 * 16) {
        uint4 *at = (uint4 *)(sq + i), x = *at;
        *at = make_uint4(bf16_to_f16(x.x), bf16_to_f16(x.y), bf16_to_f16(x.z), bf16_to_f16(x.w));
    }
    barrier_consumers(); /* all rows are converted */
}

/* Q K^T of 16 keys from `first` on, over 16 dims. */
template <int KIND, int D, int TILE, int SWAP>
GPU_INLINE void dot_step(const char *stage, int first, int kk, int lane, const uint32_t (&a)[4],
                         float (*acc_s)[4])
{
    constexpr int chunks = decode_shape<KIND, D>::chunks;
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
            if constexpr (KIND == KIND_INT8) { /* as 128 + x in subnormal f16: times 2^-24 */
                x ^= 0x80808080u;
                b[2 * h] = __byte_perm(x, 0, 0x4140);
                b[2 * h + 1] = __byte_perm(x, 0, 0x4342);
            } else {
                b[2 * h] = widen<KIND>(x & 0xffff);
                b[2 * h + 1] = widen<KIND>(x >> 16);
            }
        }
    }
    mma_qk<SWAP, KIND>(acc_s, a, b);
}

/* Q K^T in float32 of 16 rows and 16 SUBS keys. Of 16 dims, lane (g, c) has 4 c .. 4 c + 3, two for
 * each product. */
template <int D, int TILE, int SUBS>
GPU_INLINE void dot_floats(const char *stage, const char *sq, int first, int lane,
                           float (&acc_s)[2 * SUBS][4])
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
            add_sums(acc_s[n], sums);
        }
    }
#pragma unroll
    for (int n = 0; n < 2 * SUBS; n++) {
        add_sums(acc_s[n], rest[n]);
    }
}

/* acc_o += P V in float32 for 16 keys. Column g of tiles 4 j .. 4 j + 3 is dim 32 j + 4 g .. + 3. A
 * lane's two keys are both halves of the reduction dimension. */
template <int D, int TILE>
GPU_INLINE void add_floats(const char *values, int first, int lane, const float (&p0)[4],
                           const float (&p1)[4], float (&acc_o)[D / 8][4])
{
    constexpr int chunks = D / 4;
    const int key = first + (lane & 3) * 2;
    const tf32_pair a[2][4] = {
        {split_float(p0[0]), split_float(p0[2]), split_float(p0[1]), split_float(p0[3])},
        {split_float(p1[0]), split_float(p1[2]), split_float(p1[1]), split_float(p1[3])}};
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
            add_sums(acc_o[4 * j + i], sums[i]);
        }
    }
}

/* Q K^T in float32 of 16 keys and up to ROWS rows on the FMA units, since so few rows would leave
 * most of a tf32 product empty. Lane (g, c) has keys g and g + 8 and every fourth chunk of dims;
 * odd keys take other chunks than even keys at a time, to avoid bank conflicts. */
template <int D, int TILE, int ROWS>
GPU_INLINE void dot_floats_8rows(const char *stage, const char *sq, int first, int lane,
                                 float (&acc_s)[4])
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
            acc_s[2 * i + (r & 1)] = c == r >> 1 ? sum : acc_s[2 * i + (r & 1)];
        }
    }
}

/* acc_o += P V in float32 for 16 keys and up to 8 rows. */
template <int D, int TILE>
GPU_INLINE void add_floats_8rows(const char *values, int first, int lane, const float (&acc_s)[4],
                                 float (&acc_o)[D / 16][4])
{
#pragma unroll
    for (int key = 0; key < 16; key++) {
        const int from = (key & 7) * 4 + (lane & 3), at = key >> 3 << 1;
        float w0 = __shfl_sync(0xffffffffu, acc_s[at], from);
        float w1 = __shfl_sync(0xffffffffu, acc_s[at + 1], from);
#pragma unroll
        for (int j = 0; j < D / 32; j++) {
            int chunk = 8 * j + (lane >> 2);
            float4 x = *(const float4 *)(values + place_of<D / 4, TILE>(first + key, chunk));
            acc_o[2 * j][0] = fmaf(w0, x.x, acc_o[2 * j][0]);
            acc_o[2 * j][1] = fmaf(w1, x.x, acc_o[2 * j][1]);
            acc_o[2 * j][2] = fmaf(w0, x.y, acc_o[2 * j][2]);
            acc_o[2 * j][3] = fmaf(w1, x.y, acc_o[2 * j][3]);
            acc_o[2 * j + 1][0] = fmaf(w0, x.z, acc_o[2 * j + 1][0]);
            acc_o[2 * j + 1][1] = fmaf(w1, x.z, acc_o[2 * j + 1][1]);
            acc_o[2 * j + 1][2] = fmaf(w0, x.w, acc_o[2 * j + 1][2]);
            acc_o[2 * j + 1][3] = fmaf(w1, x.w, acc_o[2 * j + 1][3]);
        }
    }
}

/* acc_o += P V for 16 keys of 16-bit kinds: ND column tiles from first_chunk on. */
template <int KIND, int D, int TILE, int ND>
GPU_INLINE void add_values(const char *values, int first, int lane, const float (&p0)[4],
                           const float (&p1)[4], float (&acc_o)[ND][4], int first_chunk = 0)
{
    constexpr int chunks = decode_shape<KIND, D>::chunks;
    uint32_t a[4] = {pack2<KIND>(p0[0], p0[1]), pack2<KIND>(p0[2], p0[3]),
                     pack2<KIND>(p1[0], p1[1]), pack2<KIND>(p1[2], p1[3])};
    int key = first + (lane & 15);
#pragma unroll
    for (int c = 0; c < ND / 2; c++) {
        uint32_t b[4];
        int chunk = first_chunk + 2 * c + (lane >> 4);
        load4_transposed(b, shared_address(values) + place_of<chunks, TILE>(key, chunk));
        multiply<KIND>(acc_o[2 * c], a, b[0], b[1]);
        multiply<KIND>(acc_o[2 * c + 1], a, b[2], b[3]);
    }
}

/* acc_o += P V for 16 keys of 8-bit kinds; zero_sum += P x the offset of int8's codes. */
template <int KIND, int D, int TILE, int SWAP, int ND>
GPU_INLINE void add_bytes(const char *values, int first, int lane, const float (&p0)[4],
                          const float (&p1)[4], float (&acc_o)[ND][4], float (&zero_sum)[4],
                          int first_chunk = 0)
{
    constexpr int chunks = decode_shape<KIND, D>::chunks;
    packed_probs<SWAP> probs(p0, p1);
    if constexpr (SWAP) {
        probs.arrange(0x3210);
    }
    if constexpr (KIND == KIND_INT8) {
        probs.add_offsets(zero_sum, 0x00800080u, 0x00800080u);
    }
    int key = first + (lane & 15);
#pragma unroll
    for (int c = 0; c < ND / (SWAP ? 2 : 4); c++) {
        uint32_t b[4];
        int chunk = first_chunk + 2 * c + (lane >> 4);
        load4_transposed(b, shared_address(values) + place_of<chunks, TILE>(key, chunk));
#pragma unroll
        for (int h = 0; h < 2; h++) { /* even dims go to the first of two column tiles */
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
            probs.add(&acc_o[(4 * c + 2 * h) / (SWAP ? 2 : 1)], even, odd);
        }
    }
}

/* The scaling of acc_o in a run. `reference` is a power of two that is not below any value's scale
 * so far, so that P x scale fits f16. zero_sum is P x the codes' offsets, over 2^24, in the layout
 * of a tile of acc_o whose columns are equal; for KIND_LEVELS it is the lane's P x lowest values,
 * in the elements of column 0. */
struct value_scaling {
    float reference, zero_sum[4];
};

/* Loads the scales of the lane's values. For KIND_LEVELS they are steps, and zero_sum += P x lowest
 * values. */
template <int KIND, int SWAP, int N>
GPU_INLINE void load_value_scales(const char *stage, const float *scales, const sm80_plane &plane,
                                  int first, int lane, bool apart, const float (&acc_s)[N][4],
                                  float (&zero_sum)[4], float (&scale)[N][2])
{
    if constexpr (KIND >= KIND_LEVELS) {
        float lowest[N][2];
        load_steps<SWAP>(stage, plane, first, lane, scale, lowest);
#pragma unroll
        for (int i = 0; i < 4 * N; i++) {
            float weight = acc_s[i / 4][i % 4], low = lowest[i / 4][SWAP ? i % 4 >> 1 : i & 1];
            float &sum = zero_sum[SWAP ? i & 1 : i & 2];
            sum = apart && weight == 0.0f ? sum : fmaf(weight, low, sum);
        }
        return;
    }
    constexpr uint32_t mask = KIND == KIND_INT4 ? ~ZERO_POINT_MASK : ~0u;
#pragma unroll
    for (int i = 0; i < 2 * N; i++) {
        float both = scales[acc_layout<SWAP>::key(i / 2, SWAP ? i % 2 * 2 : i % 2)];
        scale[i / 2][i % 2] = bits_float(float_bits(both) & mask);
    }
}

/* P becomes P x value scale / reference. `apart`: a probability of 0 may meet a scale that is not
 * finite. */
template <int KIND, int SWAP, int N, int ND>
GPU_INLINE void scale_probs(float (&scale)[N][2], bool apart, float (&acc_s)[N][4],
                            value_scaling &sums, float (&acc_o)[ND][4])
{
    float largest = 0.0f;
#pragma unroll
    for (int i = 0; i < 2 * N; i++) {
        largest = fmaxf(largest, fabsf(scale[i / 2][i % 2]));
    }
    if (__any_sync(0xffffffffu, largest > sums.reference)) { /* all lanes have the same reference */
        largest = acc_layout<SWAP>::largest(largest);
        uint32_t above = (float_bits(largest) + 0x7fffffu) & 0x7f800000u;
        float next = bits_float(min(above, 0x7e000000u)); /* keeps the inverse normal */
        float rescale = sums.reference / next;
        sums.reference = next;
        if (KIND < KIND_LEVELS) { /* TurboQuant's lowest values are not relative to the reference */
            sums.zero_sum[0] *= rescale, sums.zero_sum[1] *= rescale, sums.zero_sum[2] *= rescale,
                sums.zero_sum[3] *= rescale;
        }
#pragma unroll
        for (int n = 0; n < ND; n++) {
            acc_o[n][0] *= rescale, acc_o[n][1] *= rescale, acc_o[n][2] *= rescale,
                acc_o[n][3] *= rescale;
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
                float weight = acc_s[n][e] * scale[n][SWAP ? e >> 1 : e & 1];
                acc_s[n][e] = acc_s[n][e] == 0.0f ? 0.0f : weight;
            }
        }
        return;
    }
#pragma unroll
    for (int n = 0; n < N; n++) {
#pragma unroll
        for (int e = 0; e < 4; e++) {
            acc_s[n][e] *= scale[n][SWAP ? e >> 1 : e & 1];
        }
    }
}

/* Turns raw acc_o of a run into sums of values, without the head's scale. `bits` is for
 * KIND_LEVELS. */
template <int KIND, int SWAP, int ND>
GPU_INLINE void finish_values(bool scaled, int bits, value_scaling &sums, float (&acc_o)[ND][4])
{
    float reference = scaled ? sums.reference : 1.0f;
    if (KIND < KIND_INT8 && !scaled) {
        return;
    }
    if (KIND >= KIND_LEVELS) {
        sums.zero_sum[0] = acc_layout<SWAP>::sum(sums.zero_sum[0]);
        sums.zero_sum[SWAP ? 1 : 2] = acc_layout<SWAP>::sum(sums.zero_sum[SWAP ? 1 : 2]);
    }
#pragma unroll
    for (int n = 0; n < ND; n++) {
#pragma unroll
        for (int e = 0; e < 4; e++) {
            float raw = acc_o[n][e] * unit_of_sum<KIND>(acc_layout<SWAP>::tile(n, e), bits);
            float zero_sum = sums.zero_sum[SWAP ? e & 1 : e & 2];
            acc_o[n][e] = KIND >= KIND_LEVELS ? fmaf(raw, reference, zero_sum)
                                              : fmaf(zero_sum, -0x1p24f, raw) * reference;
        }
    }
}

/* Whether one of `keys` rows of values has a NaN or an infinity. */
template <int KIND, int D, int TILE>
GPU_INLINE bool has_nonfinite_values(const char *values, int first, int keys, int lane)
{
    constexpr int chunks = decode_shape<KIND, D>::chunks;
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
    float acc_s[N][4], acc_o[ND][4];
};

/* Element d of a value in a stage, before its scale. */
template <int KIND, int D, int TILE>
GPU_INLINE float raw_value(const char *stage, const sm80_plane &plane, int key, int d)
{
    using S = decode_shape<KIND, D>;
    if constexpr (S::packed) { /* nvfp4: other packed kinds are always finite */
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

/* P V one product at a time, skipping probabilities of 0, so that a hidden NaN has no effect. The
 * warp has dims from first_dim on. */
template <int KIND, int D, int SWAP, int TILE, int N, int ND>
static __device__ __noinline__ void add_values_exactly(const char *stage, const sm80_plane &plane,
                                                       int first, int first_dim, int lane,
                                                       exact_step<N, ND> &x)
{
    constexpr int keys = SWAP == SM80_SWAP4 ? 32 : SWAP ? 16 : 8;
#pragma unroll 1
    for (int j = 0; j < N * keys; j++) { /* the lanes that hold a key's P */
        int n = j / keys, key = first + j;
        int from = SWAP == SM80_SWAP4 ? (lane & 1) + (j >> 4) * 2 + (j & 7) * 4
                   : SWAP             ? (lane & 3) + (j & 7) * 4
                                      : (lane & 28) + ((j & 7) >> 1);
        int e0 = SWAP ? (j >> 3 & 1) * 2 : j & 1;
        float w[2] = {__shfl_sync(0xffffffffu, x.acc_s[n][e0], from),
                      __shfl_sync(0xffffffffu, x.acc_s[n][e0 + (SWAP ? 1 : 2)], from)};
#pragma unroll 1
        for (int i = 0; i < ND * 4; i++) {
            int at = i >> 2, e = i & 3;
            int place =
                value_dim<KIND>(acc_layout<SWAP>::tile(at, e), acc_layout<SWAP>::column(lane, e));
            place += first_dim;
            float v = raw_value<KIND, D, TILE>(stage, plane, key, dim_of_place<KIND, D>(place));
            float weight = acc_layout<SWAP>::which(e) == 0 ? w[0] : w[1];
            x.acc_o[at][e] += weight == 0.0f ? 0.0f : weight * v;
        }
    }
}

/* As add_values_exactly, with operands in registers: arguments passed by address would leave them.
 */
template <int KIND, int D, int SWAP, int TILE, int N, int ND>
GPU_INLINE void add_exactly(const char *stage, const sm80_plane &plane, int first, int first_dim,
                            int lane, const float (&acc_s)[N][4], float (&acc_o)[ND][4])
{
    exact_step<N, ND> x;
#pragma unroll
    for (int i = 0; i < 4 * N; i++) {
        x.acc_s[i / 4][i % 4] = acc_s[i / 4][i % 4];
    }
#pragma unroll
    for (int i = 0; i < 4 * ND; i++) {
        x.acc_o[i / 4][i % 4] = acc_o[i / 4][i % 4];
    }
    add_values_exactly<KIND, D, SWAP, TILE>(stage, plane, first, first_dim, lane, x);
#pragma unroll
    for (int i = 0; i < 4 * ND; i++) {
        acc_o[i / 4][i % 4] = x.acc_o[i / 4][i % 4];
    }
}

template <int ND>
GPU_INLINE void clear_acc(float (&row_max)[2], float (&row_sum)[2], float (&acc_o)[ND][4])
{
    row_max[0] = row_max[1] = -INFINITY;
    row_sum[0] = row_sum[1] = 0.0f;
#pragma unroll
    for (int n = 0; n < ND; n++) {
        acc_o[n][0] = acc_o[n][1] = acc_o[n][2] = acc_o[n][3] = 0.0f;
    }
}

/* A consumer's position in the rings of stages and queries. */
struct pipeline_state {
    int stage = 0, phase = 0, q_slot = 0;
};

/* Ends a tile. After the last tile of a run, its epilogue runs with the stage as scratch memory,
 * the accumulators are cleared and the query buffer is released. */
template <int KIND, int D, int SWAP, int ND>
GPU_INLINE void end_tile(const sm80_params &a, shared_storage<KIND, D> &smem, const gpu_run &run,
                         bool last, bool scaled, pipeline_state &place, float (&row_max)[2],
                         float (&row_sum)[2], value_scaling &sums, float (&acc_o)[ND][4])
{
    if (last) {
        finish_values<KIND, SWAP>(scaled, a.p.v.bits, sums, acc_o);
        epilogue<KIND, D, SWAP>(a.p, a.output, run, stage_at(smem, place.stage), &smem.last_one,
                                row_max, row_sum, acc_o);
        clear_acc(row_max, row_sum, acc_o);
        sums = {};
        fence_async_proxy(); /* the stage was used as scratch memory */
        barrier_arrive(shared_address(&smem.q_empty[place.q_slot]));
        place.q_slot = place.q_slot + 1 == decode_shape<KIND, D>::q_buffers ? 0 : place.q_slot + 1;
    }
    /* All lanes arrive for themselves, because racecheck does not follow reads through __syncwarp
     * to a barrier. */
    barrier_arrive(shared_address(&smem.empty[place.stage]));
    place.stage++;
    if (place.stage == a.stages) {
        place.stage = 0;
        place.phase ^= 1;
    }
}

/* Clears values of keys outside k0 .. k1 - 1 that a box brought along, because 0 x NaN is NaN: OWN
 * chunks of each, from first_chunk on. */
template <int KIND, int D, int TILE, int OWN = decode_shape<KIND, D>::chunks>
GPU_INLINE void clear_values(char *values, int first, int keys, int low, int high, int lane,
                             int first_chunk = 0)
{
    constexpr int chunks = decode_shape<KIND, D>::chunks;
    for (int i = lane; i < keys * OWN; i += 32) {
        int key = first + i / OWN, chunk = first_chunk + i % OWN;
        if (key < low || key >= high) {
            *(uint4 *)(values + place_of<chunks, TILE>(key, chunk)) = make_uint4(0, 0, 0, 0);
        }
    }
    fence_async_proxy();
}

#endif
