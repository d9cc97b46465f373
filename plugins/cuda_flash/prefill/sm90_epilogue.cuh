/* SPDX-License-Identifier: Apache-2.0 */
/* The epilogue of an item: acc_o is divided by row_sum and written. Rows with a result that is not
 * finite are recomputed key by key, because a probability of 0 may have met a NaN value of a masked
 * key. */
#ifndef CUDA_FLASH_SM90_EPILOGUE_CUH
#define CUDA_FLASH_SM90_EPILOGUE_CUH

#include "cuda_flash/store_codes.cuh"
#include "gpu/device/number.h"
#include "sm90_softmax.cuh"

struct prefill_out {
    char *data;
    float *lse;
    float sink; /* base 2; -inf without a sink */
};

GPU_INLINE prefill_out out_of_item(const prefill_params &a, const prefill_item &item, int32_t row)
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

/* Returns where a row is written: the output, or the item's part where the item is cut. */
template <class S>
GPU_INLINE prefill_out out_of_row(const prefill_params &a, const prefill_item &item, int32_t row)
{
    if (S::cuts && item.part > 0) {
        int64_t at = (int64_t)(item.part - 1) * PREFILL_ROWS + row;
        return {a.parts + at * a.size_v * 2, a.part_lse + at, -INFINITY};
    }
    if constexpr (S::wide) {
        prefill_out out = out_of_item(a, item, row);
        out.data += first_dim<S>(item) * 2;
        out.lse = item.part == 0 ? out.lse : nullptr;
        return out;
    }
    return out_of_item(a, item, row);
}

template <int KIND> GPU_INLINE float load_number(const char *row, int32_t d)
{
    if constexpr (KIND == KIND_BF16) {
        return float_of_bf16(((const uint16_t *)row)[d]);
    }
    return __half2float(((const __half *)row)[d]);
}

/* Loads one element of a query or key row. */
template <class S> GPU_INLINE float load_key_number(const char *row, int32_t d)
{
    if constexpr (S::fp8) {
        return float_of_fp8(false, ((const uint8_t *)row)[d]);
    }
    return load_number<S::kind>(row, d);
}

template <int KIND> GPU_INLINE void store_number(char *row, int32_t d, float x)
{
    if constexpr (KIND == KIND_BF16) {
        ((uint16_t *)row)[d] = bf16_of(x);
    } else {
        ((__half *)row)[d] = __float2half_rn(x);
    }
}

/* Returns the address of K or V of key j. */
template <class S>
GPU_INLINE const char *row_of_key(const prefill_params &a, const gpu_cache &c,
                                  const prefill_item &item, int32_t j)
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

/* The score of one key in base 2; -inf where a tree mask hides the key. */
GPU_INLINE float score_of(const gpu_params &p, const prefill_item &item, int32_t index,
                          int32_t position, float slope, float product, int32_t j)
{
    float s = product * p.problem.scale;
    s = p.problem.soft_cap > 0.0f ? p.problem.soft_cap * tanhf(s / p.problem.soft_cap) : s;
    float bias = bias_of(p.problem, request_of_row_tile(item.row_tile), index, position, slope, j);
    /* a hidden key's NaN becomes -inf, too */
    s = bias == -INFINITY ? -INFINITY : LOG2E * (s + bias);
    int32_t column = j - (item.row_tile.length - item.row_tile.query_len);
    if (p.problem.tree_mask == ATTN_TREE_BITS && p.problem.tree != nullptr && column >= 0) {
        const uint32_t *bits = (const uint32_t *)p.problem.tree +
                               item.row_tile.request * p.problem.tree_request +
                               index * p.problem.tree_row;
        s = bits[column / 32] >> (column % 32) & 1 ? s : -INFINITY;
    }
    return s;
}

/* Whether the output is quantized. The codes are made from the 16-bit values that a plain output
 * would get. */
template <class S> GPU_INLINE bool writes_codes(const prefill_params &a)
{
    return S::codes && a.output.form != ATTN_OUTPUT_PLAIN;
}

/* Quantizes dims d .. d + 7 of a row. Neighbouring lanes of the warp hold the next dims. */
template <int KIND>
GPU_INLINE void quantize_8(const prefill_params &a, const prefill_item &item, int32_t row,
                           int32_t d, bool is_there, uint4 numbers)
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
        x[e] = load_number<KIND>((const char *)words, e);
    }
    store_codes(a.output, token, head, d, is_there && d < p.problem.head_size_v, x,
                p.out.data + token * p.out.row + head * p.out.head + byte);
}

/* The dot product of a query and a key, whose rows are aligned to 16 bytes. Kernels with enough
 * registers read 16 bytes at a time. */
template <class S> GPU_INLINE float dot_product(const char *q, const char *k, int32_t size)
{
    constexpr int piece = S::fp8 ? 16 : 8; /* elements in 16 bytes */
    float product = 0.0f;
    int32_t d = 0;
#pragma unroll 1
    for (; S::has_inner_loop && d + piece <= size; d += piece) {
        const uint4 x = *(const uint4 *)(q + d * (16 / piece)),
                    y = *(const uint4 *)(k + d * (16 / piece));
        const uint32_t xs[4] = {x.x, x.y, x.z, x.w}, ys[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
        for (int i = 0; i < piece; i++) {
            product +=
                load_key_number<S>((const char *)xs, i) * load_key_number<S>((const char *)ys, i);
        }
    }
#pragma unroll 1
    for (; d < size; d++) {
        product += load_key_number<S>(q, d) * load_key_number<S>(k, d);
    }
    return product;
}

/* One warp recomputes one row: a first pass over the keys makes row_max and row_sum, and each
 * further pass makes 128 dims of the output. Probabilities of 0 skip their value. A quantized
 * output's row goes to `out_smem` first. */
template <class S>
GPU_INLINE void recompute_row(const prefill_params &a, const prefill_item &item, int32_t row,
                              char *out_smem)
{
    const gpu_params &p = a.p;
    constexpr int own = (S::dv < 128 ? S::dv : 128) / 32;
    const int lane = threadIdx.x & 31;
    prefill_row at = split_row(a, row);
    int32_t index = item.first_query + at.query, head = item.head * p.problem.group + at.head;
    gpu_interval v = visible_to<S>(p, item, index);
    v.first = max(v.first, item.row_tile.k0);
    v.last = min(v.last, item.row_tile.k1 - 1);
    const char *q =
        p.q.data + (int64_t)(item.row_tile.query_start + index) * p.q.row + head * p.q.head;
    float slope = p.problem.slopes != nullptr ? p.problem.slopes[head] : 0.0f;
    prefill_out out = out_of_row<S>(a, item, row);
    float row_max = -INFINITY, row_sum = 0.0f, factor = 0.0f;
#pragma unroll 1
    for (int32_t first = -32 * own; first < dims_of_item<S>(a, item); first += 32 * own) {
        float acc_o[own];
#pragma unroll
        for (int i = 0; i < own; i++) {
            acc_o[i] = 0.0f;
        }
#pragma unroll 1
        for (int32_t base = v.first; base <= v.last; base += 32) {
            float x = -INFINITY;
            if (base + lane <= v.last) {
                const char *k = row_of_key<S>(a, p.k, item, base + lane);
                float product = dot_product<S>(q, k, p.problem.head_size);
                if (S::by_head) {
                    product *= item.scale;
                } else if (S::scales == PREFILL_BY_KEY) {
                    product *= key_scales_of(a, item)[base + lane];
                }
                x = score_of(p, item, index, v.position, slope, product, base + lane);
            }
            if (first < 0) {
                float new_max = fmaxf(row_max, x);
#pragma unroll
                for (int d = 16; d > 0; d >>= 1) {
                    new_max = fmaxf(new_max, __shfl_xor_sync(0xffffffffu, new_max, d));
                }
                float from = softmax_base(new_max);
                row_sum = row_sum * exp2f(row_max - from) + exp2f(x - from); /* this lane's keys */
                row_max = new_max;
                continue;
            }
            float weight = exp2f(x - softmax_base(row_max));
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
                    acc_o[i] += d < dims_of_item<S>(a, item)
                                    ? w * load_number<S::kind>(value, first_dim<S>(item) + d)
                                    : 0.0f;
                }
            }
        }
        if (first < 0) {
#pragma unroll
            for (int d = 16; d > 0; d >>= 1) {
                row_sum += __shfl_xor_sync(0xffffffffu, row_sum, d);
            }
            factor = softmax_close_base2(out.sink, row_max, row_sum, lane == 0 ? out.lse : nullptr);
            continue;
        }
#pragma unroll
        for (int i = 0; i < own; i++) {
            int32_t d = first + lane + 32 * i;
            if (d < dims_of_item<S>(a, item)) {
                store_number<S::kind>(writes_codes<S>(a) ? out_smem : out.data, d,
                                      acc_o[i] * factor);
            }
        }
    }
}

/* One warp quantizes a row that lies in shared memory. */
template <class S>
GPU_INLINE void quantize_row(const prefill_params &a, const prefill_item &item, int32_t row,
                             const char *numbers)
{
    const int lane = threadIdx.x & 31;
#pragma unroll 1
    for (int first = 0; first < S::dv; first += 256) {
        const int32_t d = first + lane * 8;
        const bool has = d < S::dv;
        quantize_8<S::kind>(a, item, row, d, has, *(const uint4 *)(numbers + (has ? d : 0) * 2));
    }
}

/* Adds packed results to `nonfinite` such that it ends non-finite if one of them is. Finite values
 * past 1e19 may raise it as well, which costs a recomputation but no accuracy. */
template <int KIND> GPU_INLINE void note_nonfinite(uint32_t v, uint32_t w, uint32_t &nonfinite)
{
    if constexpr (KIND == KIND_BF16) {
        asm("fma.rn.bf16x2 %0, %1, %2, %0;" : "+r"(nonfinite) : "r"(v), "r"(w));
    } else {
        asm("fma.rn.f16x2 %0, %1, %2, %0;" : "+r"(nonfinite) : "r"(v), "r"(0u));
        asm("fma.rn.f16x2 %0, %1, %2, %0;" : "+r"(nonfinite) : "r"(w), "r"(0u));
    }
}

/* Whether one of two packed numbers is not finite. */
template <int KIND> GPU_INLINE bool is_nonfinite(uint32_t w)
{
    constexpr uint32_t exponent = KIND == KIND_BF16 ? 0x7f80 : 0x7c00;
    return (w & exponent) == exponent || (w >> 16 & exponent) == exponent;
}

/* The offset of 16 bytes of an output row in a warp's staging memory. Rows are swizzled as TMA does
 * or padded, so that the same chunk of 8 rows lies in different banks. */
template <class S> GPU_INLINE int out_smem_offset(int row, int chunk)
{
    return S::swizzles ? (chunk >> 3) * 2048 + row * 128 + ((chunk ^ row) & 7) * 16
                       : row * S::out_pitch + chunk * 16;
}

/* Copies dims first .. first + out_dims - 1 of the warp's 16 rows, the first of which is `top`,
 * from shared memory to global memory. `data` is the address of row top + (lane & 15). */
template <class S>
GPU_INLINE void write_rows(const prefill_params &a, const prefill_item &item, int32_t top,
                           int32_t first, const char *out_smem, char *data)
{
    /* lanes for each row, and rows at a time */
    constexpr int lanes = S::out_dims / 8, rows = 32 / lanes;
    const int lane = threadIdx.x & 31;
    const int32_t d = first + lane % lanes * 8, left = item.row_tile.num_rows - top;
    const bool is_wide = a.wide_rows != 0, is_there = d < a.p.problem.head_size_v;
    auto at = [&](int i) {
        return out_smem + out_smem_offset<S>(lane / lanes + i * rows, lane % lanes);
    };
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

/* As write_rows, for a quantized output. */
template <class S>
GPU_INLINE void write_quantized_rows(const prefill_params &a, const prefill_item &item, int32_t top,
                                     int32_t first, const char *out_smem)
{
    constexpr int lanes = S::out_dims / 8, rows = 32 / lanes;
    const int lane = threadIdx.x & 31;
    const int32_t d = first + lane % lanes * 8, left = item.row_tile.num_rows - top;
#pragma unroll 1
    for (int32_t r = lane / lanes; r < 16; r += rows) {
        quantize_8<S::kind>(a, item, top + r, d, r < left,
                            *(const uint4 *)(out_smem + out_smem_offset<S>(r, lane % lanes)));
    }
}

/* Stores the warp's 16 rows from `top` on, all of them in range, as one TMA box. */
GPU_INLINE void store_rows(const prefill_params &a, const prefill_item &item, int32_t top,
                           const char *out_smem)
{
    fence_async_proxy();
    __syncwarp(); /* all lanes have written their rows */
    if ((threadIdx.x & 31) == 0) {
        prefill_row at = split_row(a, top);
        store_box4(&a.out_map, 0, item.head * a.p.problem.group + at.head,
                   item.row_tile.query_start + item.first_query + at.query, 0,
                   shared_address(out_smem));
    }
}

/* Writes rows `row` and row + 8 of this lane from registers: the four lanes of a row exchange their
 * numbers, so that each writes 16 bytes. For kernels without staging memory. */
template <class S>
GPU_INLINE void write_directly(const prefill_params &a, const prefill_item &item, int32_t row,
                               const float (&inv_sum)[2], const float (&acc_o)[S::dv / 2],
                               uint32_t (&nonfinite)[2])
{
    const int part = threadIdx.x & 3;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const bool is_there = row + 8 * r < item.row_tile.num_rows;
        char *to = is_there ? out_of_row<S>(a, item, row + 8 * r).data + part * 16 : nullptr;
#pragma unroll
        for (int n = 0; n < S::dv / 8; n += 4) {
            uint32_t x[4];
#pragma unroll
            for (int c = 0; c < 4; c++) {
                const int i = 4 * (n + c) + 2 * r;
                x[c] = pack2<S::kind>(acc_o[i] * inv_sum[r], acc_o[i + 1] * inv_sum[r]);
            }
            note_nonfinite<S::kind>(x[0], x[1], nonfinite[r]);
            note_nonfinite<S::kind>(x[2], x[3], nonfinite[r]);
            transpose_4x4(x);
            if (is_there && (n + part) * 8 < dims_of_item<S>(a, item)) {
                *(uint4 *)(to + n * 16) = make_uint4(x[0], x[1], x[2], x[3]);
            }
        }
    }
}

/* Finishes rows `row` and row + 8 of this lane. row_max is in base 2; `out_smem` is the warp's
 * staging memory. acc_o is overwritten: quantization and recomputation need its registers and leave
 * zeros. */
template <class S>
GPU_INLINE void epilogue(const prefill_params &a, const prefill_item &item, int32_t row,
                         const float (&row_max)[2], const float (&row_sum)[2],
                         float (&acc_o)[S::dv / 2], char *out_smem)
{
    const int lane = threadIdx.x & 31;
    const int32_t top = row - (lane >> 2);
    float inv_sum[2], sum[2] = {row_sum[0], row_sum[1]};
    if (S::boxes_rows && lane == 0) {
        wait_for_stored_boxes(); /* the previous item's box has been read */
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
        sum[r] += __shfl_xor_sync(0xffffffffu, sum[r], 1);
        sum[r] += __shfl_xor_sync(0xffffffffu, sum[r], 2);
        inv_sum[r] = sum[r] == 0.0f ? 0.0f : fast_reciprocal(sum[r]);
    }
    if (a.p.problem.sinks != nullptr || a.p.lse.data != nullptr || (S::cuts && item.part > 0)) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            if (row + 8 * r < item.row_tile.num_rows) {
                prefill_out out = out_of_row<S>(a, item, row + 8 * r);
                float *lse = (lane & 3) == 0 ? out.lse : nullptr;
                float factor = softmax_close_base2(out.sink, row_max[r], sum[r], lse);
                inv_sum[r] = a.p.problem.sinks != nullptr ? factor : inv_sum[r];
            }
        }
    }
#pragma unroll
    for (int r = 0; r < 2; r++) { /* row_sum out of range: recompute the row */
        const bool lacks = S::lazy_rescale && sum[r] < PREFILL_MIN_SUM && row_max[r] != -INFINITY;
        inv_sum[r] = sum[r] > PREFILL_MAX_SUM || lacks ? NAN : inv_sum[r];
    }
    const uint32_t to = shared_address(out_smem) + out_smem_offset<S>(lane & 15, lane >> 4);
    const int32_t left = item.row_tile.num_rows - top;
    uint32_t nonfinite[2] = {0, 0}, bad_rows[2];
    if constexpr (S::wide) {
        write_directly<S>(a, item, row, inv_sum, acc_o, nonfinite);
#pragma unroll
        for (int r = 0; r < 2; r++) {
            bad_rows[r] = __ballot_sync(0xffffffffu, row + 8 * r < item.row_tile.num_rows &&
                                                         is_nonfinite<S::kind>(nonfinite[r]));
        }
    }
#pragma unroll
    for (int first = 0; !S::wide && first < S::dv; first += S::out_dims) {
        __syncwarp(); /* the previous contents have been read */
#pragma unroll
        for (int n = 0; n < S::out_dims / 8; n += 2) {
            uint32_t packed[4];
#pragma unroll
            for (int c = 0; c < 4; c++) {
                int i = first / 2 + 4 * (n + (c >> 1)) + 2 * (c & 1);
                packed[c] =
                    pack2<S::kind>(acc_o[i] * inv_sum[c & 1], acc_o[i + 1] * inv_sum[c & 1]);
            }
            note_nonfinite<S::kind>(packed[0], packed[2], nonfinite[0]);
            note_nonfinite<S::kind>(packed[1], packed[3], nonfinite[1]);
            /* Packs into four consecutive registers, without moves. */
#pragma unroll
            for (int c = 0; S::packs_in_place && c < 4; c++) {
                acc_o[first / 2 + 4 * n + c] = __uint_as_float(packed[c]);
            }
            store4(S::swizzles ? (to ^ (n & 7) * 16) + (n >> 3) * 2048 : to + n * 16, packed);
        }
        if (first + S::out_dims == S::dv) {
#pragma unroll
            for (int r = 0; r < 2; r++) {
                bad_rows[r] = __ballot_sync(0xffffffffu, row + 8 * r < item.row_tile.num_rows &&
                                                             is_nonfinite<S::kind>(nonfinite[r]));
            }
        }
        if (S::boxes_rows && a.boxes_rows && left >= 16 && (bad_rows[0] | bad_rows[1]) == 0) {
            store_rows(a, item, top, out_smem);
            return;
        }
        __syncwarp(); /* all lanes have written their rows */
        if (!writes_codes<S>(a)) {
            write_rows<S>(a, item, top, first, out_smem,
                          out_of_row<S>(a, item, top + (lane & 15)).data);
            continue;
        }
        write_quantized_rows<S>(a, item, top, first, out_smem);
#pragma unroll
        for (int i = first / 2; i < (first + S::out_dims) / 2; i++) {
            acc_o[i] = 0.0f;
        }
    }
    if ((bad_rows[0] | bad_rows[1]) == 0) {
        return;
    }
    __syncwarp(); /* recomputed rows must overwrite what was written above */
#pragma unroll
    for (int i = 0; S::codes && i < S::dv / 2; i++) {
        acc_o[i] = 0.0f; /* frees its registers */
    }
#pragma unroll 1
    for (int i = 0; i < 16; i++) {
        uint32_t lanes = (i < 8 ? bad_rows[0] : bad_rows[1]) >> (i & 7) * 4;
        if ((lanes & 15) != 0) {
            const bool codes = writes_codes<S>(a);
            recompute_row<S>(a, item, top + i, out_smem);
            if (codes) {
                __syncwarp(); /* the row is complete */
                quantize_row<S>(a, item, top + i, out_smem);
                __syncwarp(); /* the row has been read */
            }
        }
    }
}

#endif
