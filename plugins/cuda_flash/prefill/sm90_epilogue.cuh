/* SPDX-License-Identifier: Apache-2.0 */
/* The end of an item: rows are divided by their sums and written. Rows that came out as no numbers
 * are computed again, key by key: a weight of 0 may have met a NaN of a key that they do not see.
 */
#ifndef CUDA_FLASH_SM90_EPILOGUE_CUH
#define CUDA_FLASH_SM90_EPILOGUE_CUH

#include "cuda_flash/store_codes.cuh"
#include "gpu/device/number.h"
#include "sm90_softmax.cuh"

struct prefill_out {
    char *data;
    float *lse;
    float sink; /* base 2; -inf: none */
};

static __device__ __forceinline__ prefill_out out_of_item(const prefill_params &a,
                                                          const prefill_item &item, int32_t row)
{
    const gpu_params &p = a.p;
    prefill_row at = split_row(a, row);
    int64_t token = item.row_tile.query_start + item.first_query + at.query;
    int32_t head = item.head * p.problem.group + at.head;
    prefill_out v;
    v.data = p.out.data + token * p.out.row + head * p.out.head;
    v.lse = p.lse.data != nullptr ? p.lse.data + head * p.lse.head + token * p.lse.row : nullptr;
    v.sink = p.problem.sinks != nullptr ? p.problem.sinks[head] * LOG2E : -INFINITY;
    return v;
}

/* The same, of a part where the item is one. */
template <class S>
static __device__ __forceinline__ prefill_out out_of_row(const prefill_params &a,
                                                         const prefill_item &item, int32_t row)
{
    if (S::cuts && item.part > 0) {
        int64_t at = (int64_t)(item.part - 1) * PREFILL_ROWS + row;
        return {a.parts + at * a.size_v * 2, a.part_lse + at, -INFINITY};
    }
    return out_of_item(a, item, row);
}

template <int KIND> static __device__ __forceinline__ float number_at(const char *row, int32_t d)
{
    if constexpr (KIND == KIND_BF16) {
        return float_of_bf16(((const uint16_t *)row)[d]);
    }
    return __half2float(((const __half *)row)[d]);
}

/* Of a query or key. */
template <class S> static __device__ __forceinline__ float key_number(const char *row, int32_t d)
{
    if constexpr (S::fp8) {
        return float_of_fp8(false, ((const uint8_t *)row)[d]);
    }
    return number_at<S::kind>(row, d);
}

template <int KIND> static __device__ __forceinline__ void put_number(char *row, int32_t d, float x)
{
    if constexpr (KIND == KIND_BF16) {
        ((uint16_t *)row)[d] = bf16_of(x);
    } else {
        ((__half *)row)[d] = __float2half_rn(x);
    }
}

/* Where K or V of a key lies. */
template <class S>
static __device__ __forceinline__ const char *
row_of_key(const prefill_params &a, const gpu_cache &c, const prefill_item &item, int32_t j)
{
    const gpu_params &p = a.p;
    int32_t head = S::scales == PREFILL_UNSCALED ? item.head : item.head - a.first_head;
    const char *at = c.data + head * c.head;
    if (!p.problem.paged) {
        return at + (item.row_tile.key_start + j) * c.block;
    }
    int32_t index = j / p.problem.block_size;
    int64_t block = p.problem.block_table[item.row_tile.table + index];
    return at + block * c.block + (j - index * p.problem.block_size) * c.slot;
}

/* Score of one key in base 2, -inf where a tree hides it. */
static __device__ __forceinline__ float score_of(const gpu_params &p, const prefill_item &item,
                                                 int32_t index, int32_t position, float slope,
                                                 float product, int32_t j)
{
    float s = product * p.problem.scale;
    s = p.problem.soft_cap > 0.0f ? p.problem.soft_cap * tanhf(s / p.problem.soft_cap) : s;
    float bias = bias_of(p.problem, request_of_row_tile(item.row_tile), index, position, slope, j);
    s = bias == -INFINITY ? -INFINITY : LOG2E * (s + bias); /* NaN of a hidden key too */
    int32_t column = j - (item.row_tile.length - item.row_tile.query_len);
    if (p.problem.tree_mask == ATTN_TREE_BITS && p.problem.tree != nullptr && column >= 0) {
        const uint32_t *bits = (const uint32_t *)p.problem.tree +
                               item.row_tile.request * p.problem.tree_request +
                               index * p.problem.tree_row;
        s = bits[column / 32] >> (column % 32) & 1 ? s : -INFINITY;
    }
    return s;
}

/* Whether a kernel's output is codes, which are made of what it would write else. */
template <class S> static __device__ __forceinline__ bool writes_codes(const prefill_params &a)
{
    return S::codes && a.output.form != ATTN_OUTPUT_PLAIN;
}

/* 8 numbers of a row, dims d .. d + 7, as codes; by a warp whose neighbouring lanes have the next
 * dims. */
template <int KIND>
static __device__ __forceinline__ void write_codes(const prefill_params &a,
                                                   const prefill_item &item, int32_t row, int32_t d,
                                                   bool is_there, uint4 numbers)
{
    const gpu_params &p = a.p;
    const uint32_t words[4] = {numbers.x, numbers.y, numbers.z, numbers.w};
    prefill_row at = split_row(a, row);
    int64_t token = item.row_tile.query_start + item.first_query + at.query;
    int32_t head = item.head * p.problem.group + at.head;
    int32_t byte = a.output.form == ATTN_OUTPUT_NVFP4 ? d / 2 : d;
    float x[8];
#pragma unroll
    for (int e = 0; e < 8; e++) {
        x[e] = number_at<KIND>((const char *)words, e);
    }
    store_codes(a.output, token, head, d, is_there && d < p.problem.head_size_v, x,
                p.out.data + token * p.out.row + head * p.out.head + byte);
}

/* Of a query and a key, whose rows begin at multiples of 16 bytes; 16 bytes at a time where there
 * are registers for it. */
template <class S>
static __device__ __forceinline__ float product_of(const char *q, const char *k, int32_t size)
{
    constexpr int piece = S::fp8 ? 16 : 8; /* numbers in 16 bytes */
    float product = 0.0f;
    int32_t d = 0;
#pragma unroll 1
    for (; S::walks && d + piece <= size; d += piece) {
        const uint4 x = *(const uint4 *)(q + d * (16 / piece)),
                    y = *(const uint4 *)(k + d * (16 / piece));
        const uint32_t xs[4] = {x.x, x.y, x.z, x.w}, ys[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
        for (int i = 0; i < piece; i++) {
            product += key_number<S>((const char *)xs, i) * key_number<S>((const char *)ys, i);
        }
    }
#pragma unroll 1
    for (; d < size; d++) {
        product += key_number<S>(q, d) * key_number<S>(k, d);
    }
    return product;
}

/* One row by one warp, numbers of codes to `part`: a pass over its keys for their sum, then one for
 * each 128 dims of values. Products of weight 0 are left out. */
template <class S>
static __device__ __forceinline__ void exact_row(const prefill_params &a, const prefill_item &item,
                                                 int32_t row, char *part)
{
    const gpu_params &p = a.p;
    constexpr int own = (S::dv < 128 ? S::dv : 128) / 32;
    const int lane = threadIdx.x & 31;
    prefill_row at = split_row(a, row);
    int32_t index = item.first_query + at.query, head = item.head * p.problem.group + at.head;
    gpu_interval v = visible_to<S>(p, request_of_row_tile(item.row_tile), index);
    v.first = max(v.first, item.row_tile.k0);
    v.last = min(v.last, item.row_tile.k1 - 1);
    const char *q =
        p.q.data + (int64_t)(item.row_tile.query_start + index) * p.q.row + head * p.q.head;
    float slope = p.problem.slopes != nullptr ? p.problem.slopes[head] : 0.0f;
    prefill_out out = out_of_row<S>(a, item, row);
    float high = -INFINITY, sum = 0.0f, factor = 0.0f;
#pragma unroll 1
    for (int32_t first = -32 * own; first < p.problem.head_size_v; first += 32 * own) {
        float o[own];
#pragma unroll
        for (int i = 0; i < own; i++) {
            o[i] = 0.0f;
        }
#pragma unroll 1
        for (int32_t base = v.first; base <= v.last; base += 32) {
            float x = -INFINITY;
            if (base + lane <= v.last) {
                const char *k = row_of_key<S>(a, p.k, item, base + lane);
                float product = product_of<S>(q, k, p.problem.head_size);
                if (S::by_head) {
                    product *= item.scale;
                } else if (S::scales == PREFILL_BY_KEY) {
                    product *= key_scales_of(a, item)[base + lane];
                }
                x = score_of(p, item, index, v.position, slope, product, base + lane);
            }
            if (first < 0) {
                float most = fmaxf(high, x);
#pragma unroll
                for (int d = 16; d > 0; d >>= 1) {
                    most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, d));
                }
                float from = softmax_base(most);
                sum = sum * exp2f(high - from) + exp2f(x - from); /* of this lane's keys */
                high = most;
                continue;
            }
            float weight = exp2f(x - softmax_base(high));
#pragma unroll 1
            for (int t = 0; t < 32 && base + t <= v.last; t++) {
                float w = __shfl_sync(0xffffffffu, weight, t);
                if (w == 0.0f) {
                    continue;
                }
                const char *value = row_of_key<S>(a, p.v, item, base + t);
#pragma unroll
                for (int i = 0; i < own; i++) {
                    int32_t d = first + lane + 32 * i;
                    o[i] += d < p.problem.head_size_v ? w * number_at<S::kind>(value, d) : 0.0f;
                }
            }
        }
        if (first < 0) {
#pragma unroll
            for (int d = 16; d > 0; d >>= 1) {
                sum += __shfl_xor_sync(0xffffffffu, sum, d);
            }
            factor = softmax_close_base2(out.sink, high, sum, lane == 0 ? out.lse : nullptr);
            continue;
        }
#pragma unroll
        for (int i = 0; i < own; i++) {
            int32_t d = first + lane + 32 * i;
            if (d < p.problem.head_size_v) {
                put_number<S::kind>(writes_codes<S>(a) ? part : out.data, d, o[i] * factor);
            }
        }
    }
}

/* The numbers of a row in shared memory as codes; by one warp. */
template <class S>
static __device__ __forceinline__ void code_row(const prefill_params &a, const prefill_item &item,
                                                int32_t row, const char *numbers)
{
    const int lane = threadIdx.x & 31;
#pragma unroll 1
    for (int first = 0; first < S::dv; first += 256) {
        const int32_t d = first + lane * 8;
        const bool has = d < S::dv;
        write_codes<S::kind>(a, item, row, d, has, *(const uint4 *)(numbers + (has ? d : 0) * 2));
    }
}

/* NaN or infinite where one of four packed numbers or of those so far was, or theirs are past 1e19,
 * which costs time alone: `odd` is a sum of products. */
template <int KIND>
static __device__ __forceinline__ void note_odd(uint32_t v, uint32_t w, uint32_t &odd)
{
    if constexpr (KIND == KIND_BF16) {
        asm("fma.rn.bf16x2 %0, %1, %2, %0;" : "+r"(odd) : "r"(v), "r"(w));
    } else {
        asm("fma.rn.f16x2 %0, %1, %2, %0;" : "+r"(odd) : "r"(v), "r"(0u));
        asm("fma.rn.f16x2 %0, %1, %2, %0;" : "+r"(odd) : "r"(w), "r"(0u));
    }
}

/* Whether one of two packed numbers is not finite. */
template <int KIND> static __device__ __forceinline__ bool is_odd(uint32_t w)
{
    constexpr uint32_t exponent = KIND == KIND_BF16 ? 0x7f80 : 0x7c00;
    return (w & exponent) == exponent || (w >> 16 & exponent) == exponent;
}

/* Where 16 bytes of an output row lie in a warp's part of shared memory, so that those of 8 rows at
 * the same place are in different banks: columns of 64 dims as TMA swizzles them, or padded rows.
 */
template <class S> static __device__ __forceinline__ int place_of_out(int row, int chunk)
{
    return S::swizzles ? (chunk >> 3) * 2048 + row * 128 + ((chunk ^ row) & 7) * 16
                       : row * S::out_pitch + chunk * 16;
}

/* The warp's 16 rows from `top` on, dims first .. first + out_dims - 1, from its part of shared
 * memory to where they belong. `data`: a lane's row, top + (lane & 15). */
template <class S>
static __device__ __forceinline__ void write_rows(const prefill_params &a, const prefill_item &item,
                                                  int32_t top, int32_t first, const char *part,
                                                  char *data)
{
    constexpr int lanes = S::out_dims / 8, rows = 32 / lanes; /* of a row, and at a time */
    const int lane = threadIdx.x & 31;
    const int32_t d = first + lane % lanes * 8, left = item.row_tile.num_rows - top;
    const bool is_wide = a.wide_rows != 0, is_there = d < a.p.problem.head_size_v;
    auto at = [&](int i) { return part + place_of_out<S>(lane / lanes + i * rows, lane % lanes); };
#pragma unroll
    for (int i = 0; i < 16 / rows; i++) {
        const int r = lane / lanes + i * rows;
        const uint4 w = *(const uint4 *)at(i);
        char *to = (char *)__shfl_sync(0xffffffffu, (unsigned long long)data, r) + d * 2;
        if (is_wide && is_there && r < left) {
            *(uint4 *)to = w;
        }
    }
    if (is_wide) {
        return;
    }
#pragma unroll 1
    for (int i = 0; i < 16 / rows; i++) {
        const int r = lane / lanes + i * rows;
        char *to = (char *)__shfl_sync(0xffffffffu, (unsigned long long)data, r) + d * 2;
        for (int c = 0; c < 8 && d + c < a.p.problem.head_size_v && r < left; c++) {
            ((uint16_t *)to)[c] = *(const uint16_t *)(at(i) + c * 2);
        }
    }
}

/* The same as codes. */
template <class S>
static __device__ __forceinline__ void write_coded_rows(const prefill_params &a,
                                                        const prefill_item &item, int32_t top,
                                                        int32_t first, const char *part)
{
    constexpr int lanes = S::out_dims / 8, rows = 32 / lanes;
    const int lane = threadIdx.x & 31;
    const int32_t d = first + lane % lanes * 8, left = item.row_tile.num_rows - top;
#pragma unroll 1
    for (int32_t r = lane / lanes; r < 16; r += rows) {
        write_codes<S::kind>(a, item, top + r, d, r < left,
                             *(const uint4 *)(part + place_of_out<S>(r, lane % lanes)));
    }
}

/* The warp's 16 rows from `top` on, all there, as one box. */
static __device__ __forceinline__ void store_rows(const prefill_params &a, const prefill_item &item,
                                                  int32_t top, const char *part)
{
    fence_for_boxes();
    __syncwarp(); /* all lanes' rows are there */
    if ((threadIdx.x & 31) == 0) {
        prefill_row at = split_row(a, top);
        store_box4(&a.out_map, 0, item.head * a.p.problem.group + at.head,
                   item.row_tile.query_start + item.first_query + at.query, 0,
                   shared_address(part));
    }
}

/* Rows `row` and row + 8 of this lane; m is in base 2. `part`: of shared memory, the warp's. What o
 * holds is lost: codes, and rows that are computed again, leave zeros, whose registers they need.
 */
template <class S>
static __device__ __forceinline__ void
finish_item(const prefill_params &a, const prefill_item &item, int32_t row, const float (&m)[2],
            const float (&l)[2], float (&o)[S::dv / 2], char *part)
{
    const int lane = threadIdx.x & 31;
    const int32_t top = row - (lane >> 2);
    float by[2], sum[2] = {l[0], l[1]};
    if (S::boxes_rows && lane == 0) {
        wait_for_stored_boxes(); /* of the item before */
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
        sum[r] += __shfl_xor_sync(0xffffffffu, sum[r], 1);
        sum[r] += __shfl_xor_sync(0xffffffffu, sum[r], 2);
        by[r] = sum[r] == 0.0f ? 0.0f : fast_reciprocal(sum[r]);
    }
    if (a.p.problem.sinks != nullptr || a.p.lse.data != nullptr || (S::cuts && item.part > 0)) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            if (row + 8 * r < item.row_tile.num_rows) {
                prefill_out out = out_of_row<S>(a, item, row + 8 * r);
                float *lse = (lane & 3) == 0 ? out.lse : nullptr;
                float factor = softmax_close_base2(out.sink, m[r], sum[r], lse);
                by[r] = a.p.problem.sinks != nullptr ? factor : by[r];
            }
        }
    }
#pragma unroll
    for (int r = 0; r < 2; r++) { /* weights past float32's range: the row is computed again */
        const bool lacks = S::steady && sum[r] < PREFILL_LEAST && m[r] != -INFINITY;
        by[r] = sum[r] > PREFILL_LARGEST || lacks ? NAN : by[r];
    }
    const uint32_t to = shared_address(part) + place_of_out<S>(lane & 15, lane >> 4);
    const int32_t left = item.row_tile.num_rows - top;
    uint32_t odd[2] = {0, 0}, bad[2];
#pragma unroll
    for (int first = 0; first < S::dv; first += S::out_dims) {
        __syncwarp(); /* what was there is read */
#pragma unroll
        for (int n = 0; n < S::out_dims / 8; n += 2) {
            uint32_t w[4];
#pragma unroll
            for (int c = 0; c < 4; c++) {
                int i = first / 2 + 4 * (n + (c >> 1)) + 2 * (c & 1);
                w[c] = pack2<S::kind>(o[i] * by[c & 1], o[i + 1] * by[c & 1]);
            }
            note_odd<S::kind>(w[0], w[2], odd[0]);
            note_odd<S::kind>(w[1], w[3], odd[1]);
            /* four registers next to each other, without moves */
#pragma unroll
            for (int c = 0; S::packs_in_place && c < 4; c++) {
                o[first / 2 + 4 * n + c] = __uint_as_float(w[c]);
            }
            store4(S::swizzles ? (to ^ (n & 7) * 16) + (n >> 3) * 2048 : to + n * 16, w);
        }
        if (first + S::out_dims == S::dv) {
#pragma unroll
            for (int r = 0; r < 2; r++) {
                bad[r] = __ballot_sync(0xffffffffu, row + 8 * r < item.row_tile.num_rows &&
                                                        is_odd<S::kind>(odd[r]));
            }
        }
        if (S::boxes_rows && a.boxes_rows && left >= 16 && (bad[0] | bad[1]) == 0) {
            store_rows(a, item, top, part);
            return;
        }
        __syncwarp(); /* the rows are there */
        if (!writes_codes<S>(a)) {
            write_rows<S>(a, item, top, first, part,
                          out_of_row<S>(a, item, top + (lane & 15)).data);
            continue;
        }
        write_coded_rows<S>(a, item, top, first, part);
#pragma unroll
        for (int i = first / 2; i < (first + S::out_dims) / 2; i++) {
            o[i] = 0.0f;
        }
    }
    if ((bad[0] | bad[1]) == 0) {
        return;
    }
    __syncwarp(); /* what is written again comes second */
#pragma unroll
    for (int i = 0; S::codes && i < S::dv / 2; i++) {
        o[i] = 0.0f; /* as above */
    }
#pragma unroll 1
    for (int i = 0; i < 16; i++) {
        uint32_t lanes = (i < 8 ? bad[0] : bad[1]) >> (i & 7) * 4;
        if ((lanes & 15) != 0) {
            const bool codes = writes_codes<S>(a);
            exact_row<S>(a, item, top + i, part);
            if (codes) {
                __syncwarp(); /* the numbers are there */
                code_row<S>(a, item, top + i, part);
                __syncwarp(); /* they are read */
            }
        }
    }
}

#endif
