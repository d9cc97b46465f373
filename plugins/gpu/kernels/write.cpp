/* SPDX-License-Identifier: Apache-2.0 */
/* The KV write, alone or after RMS norm and rotary embedding (Su et al. 2021). Each new row is read
 * and written once; the limit is memory bandwidth. */
#include "gpu/device/rows.h"

#define WRITE_THREADS GPU_THREADS_write_copy
#define ROPE_WARPS (GPU_THREADS_rope_write / GPU_LANES)
#define ROPE_MAX_HEAD_SIZE 512

/* Copies `bytes` of a row, or converts 16-bit elements to half as many bytes of fp8. */
enum write_way { WRITE_COPY, WRITE_FP8 };

/* x / scale to fp8. The product with the inverse is off by less than 2 units, which matters only
 * near the midpoint of two fp8 numbers, where the last 19 bits are 0. */
template <int FORMAT> GPU_INLINE uint32_t shrink2(float x, float y, number_divisor by)
{
    float a = x * by.inverse, b = y * by.inverse;
    if (!by.exact) {
        bool a_sure = ((float_bits(a) + 4) & 0x7ffff) > 8 && fabsf(a) < 60000.0f;
        bool b_sure = ((float_bits(b) + 4) & 0x7ffff) > 8 && fabsf(b) < 60000.0f;
        a = a_sure ? a : divide_odd(x, by);
        b = b_sure ? b : divide_odd(y, by);
    }
    if (!(isnan(a) || isnan(b))) {
        return fp8_pair_of(FORMAT == ATTN_DTYPE_FP8_E5M2, a, b);
    }
    /* a NaN of x keeps x's sign */
    return number_to_fp8(FORMAT, isnan(x) ? x : a) |
           (uint32_t)number_to_fp8(FORMAT, isnan(y) ? y : b) << 8;
}

GPU_INLINE float number_of_word(uint32_t word, bool high, int32_t dtype)
{
    if (dtype == ATTN_DTYPE_BF16) {
        return bits_float(high ? word & 0xffff0000u : word << 16);
    }
    return float_of_half((uint16_t)(high ? word >> 16 : word & 0xffff));
}

template <int FORMAT>
GPU_INLINE uint4 shrink16(const uint4 (&x)[2], int32_t from, number_divisor by)
{
    const uint32_t words[8] = {x[0].x, x[0].y, x[0].z, x[0].w, x[1].x, x[1].y, x[1].z, x[1].w};
    uint32_t out[4] = {0, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < 8; i++) {
        float low = number_of_word(words[i], false, from);
        float high = number_of_word(words[i], true, from);
        out[i / 2] |= shrink2<FORMAT>(low, high, by) << (16 * (i & 1));
    }
    return make_uint4(out[0], out[1], out[2], out[3]);
}

/* 16 bytes as they are stored. */
template <int WAY>
GPU_INLINE uint4 stored(const gpu_write_params &p, int side, int32_t head, const uint4 (&x)[2])
{
    if (WAY == WRITE_COPY) {
        return x[0];
    }
    const gpu_cache &cache = p.to[side];
    number_divisor by = divisor_of(cache_scale(cache, head));
    int32_t dtype = p.from[side].dtype;
    return cache.dtype == ATTN_DTYPE_FP8_E5M2 ? shrink16<ATTN_DTYPE_FP8_E5M2>(x, dtype, by)
                                              : shrink16<ATTN_DTYPE_FP8_E4M3>(x, dtype, by);
}

/* For few rows: a group writes one, and loads the row while it loads its slot. The limit is
 * latency. */
template <int WAY> GPU_INLINE void write_row(const gpu_write_params &p)
{
    let_later_kernels_begin();
    const int64_t row = group_index(), slot = p.slots[row];
    const int32_t k_vectors = p.vectors[0] * p.num_heads,
                  all = k_vectors + p.vectors[1] * p.num_heads;
    for (int32_t first = 0; first < all; first += WRITE_THREADS) {
        const int32_t i = first + (int32_t)thread_index();
        const int32_t side = i >= k_vectors, at = i - (side ? k_vectors : 0);
        const int32_t head = at / p.vectors[side], place = at - head * p.vectors[side];
        const gpu_tensor &rows = p.from[side];
        const uint4 *from = (const uint4 *)(rows.data + row * rows.row + head * rows.head) +
                            place * (WAY == WRITE_COPY ? 1 : 2);
        uint4 x[2] = {};
        if (i < all) {
            x[0] = load_once(from);
            if (WAY == WRITE_FP8) {
                x[1] = load_once(from + 1);
            }
        }
        sync_group(); /* else compilers move the loads after the slot's */
        if (i < all && slot >= 0) {
            const int64_t block = (int64_t)((uint64_t)slot / (uint32_t)p.block_size);
            char *to = (char *)row_at(p.to[side], block, slot - block * p.block_size, head);
            ((uint4 *)to)[place] = stored<WAY>(p, side, head, x);
        }
    }
}

/* Vectors of 16 written bytes, counted over (row, side, head, position in the head's row). */
template <int WAY, class INDEX> GPU_INLINE void write_vectors(const gpu_write_params &p)
{
    if (group_count() == p.num_slots) {
        write_row<WAY>(p);
        return;
    }
    let_later_kernels_begin();
    int32_t k_vectors = p.vectors[0], v_vectors = p.vectors[1];
    int32_t per_row = (k_vectors + v_vectors) * p.num_heads;
    const INDEX total = (INDEX)(p.num_slots * per_row),
                step = (INDEX)(group_count() * WRITE_THREADS);
    INDEX first = (INDEX)group_index() * WRITE_THREADS + thread_index();
    for (; first < total; first += step * WRITE_VECTORS) {
        const char *from[WRITE_VECTORS];
        char *to[WRITE_VECTORS];
        int32_t heads[WRITE_VECTORS], sides[WRITE_VECTORS];
        int64_t slots[WRITE_VECTORS];
        uint4 x[WRITE_VECTORS][2];
#pragma unroll
        for (int u = 0; u < WRITE_VECTORS; u++) {
            INDEX i = first + u * step;
            slots[u] = i < total ? p.slots[i / per_row] : -1;
        }
#pragma unroll
        for (int u = 0; u < WRITE_VECTORS; u++) {
            INDEX i = first + u * step, row = i / per_row;
            int32_t at = (int32_t)(i - row * per_row), side = at >= k_vectors * p.num_heads;
            int32_t vectors = side ? v_vectors : k_vectors;
            at -= side ? k_vectors * p.num_heads : 0;
            int32_t head = at / vectors, place = at - head * vectors;
            int64_t block = (int64_t)((uint64_t)slots[u] / (uint32_t)p.block_size);
            const gpu_tensor &rows = p.from[side];
            const gpu_cache &cache = p.to[side];
            from[u] = rows.data + (int64_t)row * rows.row + head * rows.head +
                      place * (WAY == WRITE_COPY ? 16 : 32);
            to[u] =
                (char *)row_at(cache, block, slots[u] - block * p.block_size, head) + place * 16;
            heads[u] = head;
            sides[u] = side;
            if (slots[u] >= 0) {
                x[u][0] = load_once((const uint4 *)from[u]);
                if (WAY == WRITE_FP8) {
                    x[u][1] = load_once((const uint4 *)from[u] + 1);
                }
            }
        }
#pragma unroll
        for (int u = 0; u < WRITE_VECTORS; u++) {
            if (slots[u] >= 0) {
                *(uint4 *)to[u] = stored<WAY>(p, sides[u], heads[u], x[u]);
            }
        }
    }
}

/* 8 elements of a row with its own scale, which LANES lanes compute together. */
template <int LANES>
GPU_INLINE uint2 scale_row(const uint4 &x, int32_t from, int32_t to, float *row_scale)
{
    const uint32_t words[4] = {x.x, x.y, x.z, x.w};
    float largest = 0.0f, number[8];
#pragma unroll
    for (int i = 0; i < 8; i++) {
        number[i] = number_of_word(words[i / 2], i & 1, from);
        float size = fabsf(number[i]);
        largest = isnan(size) || isnan(largest) ? NAN : fmaxf(largest, size);
    }
#pragma unroll
    for (int d = LANES / 2; d > 0; d >>= 1) {
        float other = lane_xor(largest, d);
        largest = isnan(largest) || isnan(other) ? NAN : fmaxf(largest, other);
    }
    float scale = divide_nearest(largest, to == ATTN_DTYPE_INT8 ? INT8_LARGEST : FP8_LARGEST);
    scale = scale < LEAST_ROW_SCALE ? LEAST_ROW_SCALE : scale;
    number_divisor by = divisor_of(scale);
    uint32_t out[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
        uint32_t two = to == ATTN_DTYPE_INT8
                           ? (uint8_t)number_to_int8(divide_odd(number[i], by)) |
                                 (uint32_t)(uint8_t)number_to_int8(divide_odd(number[i + 1], by))
                                     << 8
                           : shrink2<ATTN_DTYPE_FP8_E4M3>(number[i], number[i + 1], by);
        out[i / 4] |= two << (8 * (i & 2));
    }
    *row_scale = scale;
    return make_uint2(out[0], out[1]);
}

/* Converts rows of 16-bit elements to 8 bits with a scale for each row: LANES lanes for each (row,
 * side, head), 16 bytes each. */
template <int LANES> GPU_INLINE void write_scaled(const gpu_write_params &p)
{
    let_later_kernels_begin();
    int64_t items = p.num_slots * 2 * p.num_heads;
    int64_t step = (int64_t)group_count() * (WRITE_THREADS / LANES);
    int64_t first = (int64_t)group_index() * (WRITE_THREADS / LANES) + thread_index() / LANES;
    int32_t lane = thread_index() % LANES, in_warp = thread_index() % GPU_LANES / LANES;
    /* all lanes of a warp stay in the loop */
    for (; first - in_warp < items; first += step * WRITE_VECTORS) {
        int64_t slots[WRITE_VECTORS];
        int32_t sides[WRITE_VECTORS], heads[WRITE_VECTORS];
        uint4 x[WRITE_VECTORS];
#pragma unroll
        for (int u = 0; u < WRITE_VECTORS; u++) {
            int64_t i = first + u * step, row = i / (2 * p.num_heads);
            int32_t at = (int32_t)(i - row * 2 * p.num_heads);
            slots[u] = i < items ? p.slots[row] : -1;
            sides[u] = at >= p.num_heads;
            heads[u] = at - sides[u] * p.num_heads;
        }
#pragma unroll
        for (int u = 0; u < WRITE_VECTORS; u++) {
            const gpu_tensor &from = p.from[sides[u]];
            int64_t row = (first + u * step) / (2 * p.num_heads);
            x[u] = make_uint4(0, 0, 0, 0);
            if (slots[u] >= 0 && lane * 8 < p.to[sides[u]].head_size) {
                x[u] = load_once(
                    (const uint4 *)(from.data + row * from.row + heads[u] * from.head) + lane);
            }
        }
#pragma unroll
        for (int u = 0; u < WRITE_VECTORS; u++) {
            const gpu_cache &to = p.to[sides[u]];
            float scale;
            uint2 y = scale_row<LANES>(x[u], p.from[sides[u]].dtype, to.dtype, &scale);
            int64_t block = slots[u] / p.block_size, slot = slots[u] - block * p.block_size;
            if (slots[u] >= 0 && lane * 8 < to.head_size) {
                uint32_t *at = (uint32_t *)row_at(to, block, slot, heads[u]) + lane * 2;
                at[0] = y.x;
                at[1] = y.y;
            }
            if (slots[u] >= 0 && lane == 0) {
                *row_scale_at(to, block, slot, heads[u]) = scale;
            }
        }
    }
}

/* A warp for each (row, side, head), any form and layout. */
GPU_KERNEL(write_rows, gpu_write_params)
{
    let_later_kernels_begin();
    int64_t items = p.num_slots * p.sides * p.num_heads;
    int lane = lane_index();
    for (int64_t i = warp_of_grid(GPU_THREADS_write_rows); i < items;
         i += warps_of_grid(GPU_THREADS_write_rows)) {
        int64_t row = i / (p.sides * p.num_heads);
        int32_t at = (int32_t)(i - row * p.sides * p.num_heads), side = at >= p.num_heads;
        int32_t head = at - side * p.num_heads;
        int64_t slot = p.slots[row];
        if (slot >= 0) {
            const gpu_tensor &from = p.from[side];
            row_store(p.to[side], slot / p.block_size, slot % p.block_size, head,
                      from.data + row * from.row + head * from.head, from.dtype, lane);
        }
    }
}

GPU_KERNEL(write_copy, gpu_write_params)
{
    write_vectors<WRITE_COPY, uint32_t>(p);
}

GPU_KERNEL(write_copy_far, gpu_write_params)
{
    write_vectors<WRITE_COPY, int64_t>(p);
}

GPU_KERNEL(write_fp8, gpu_write_params)
{
    write_vectors<WRITE_FP8, uint32_t>(p);
}

GPU_KERNEL(write_fp8_far, gpu_write_params)
{
    write_vectors<WRITE_FP8, int64_t>(p);
}

GPU_KERNEL(write_scaled_8, gpu_write_params)
{
    write_scaled<8>(p);
}

GPU_KERNEL(write_scaled_16, gpu_write_params)
{
    write_scaled<16>(p);
}

GPU_KERNEL(write_scaled_32, gpu_write_params)
{
    write_scaled<32>(p);
}

/* Rotates a row in place: float32 in shared memory, rounded once at the end. Pairs are (d, d +
 * pairs) in the NeoX form, (2d, 2d + 1) in GPT-J's. */
GPU_DEVICE void turn_row(const gpu_write_params &p, char *row, int32_t dtype, int32_t head_size,
                         int side, int64_t position, float *x, int lane)
{
    float sum = 0.0f;
    for (int32_t d = lane; d < head_size; d += GPU_LANES) {
        x[d] = number_load(row, dtype, d);
        sum += x[d] * x[d];
    }
    if (p.norm[side] != nullptr) {
        float factor = 1.0f / sqrtf(warp_sum(sum) / (float)head_size + p.norm_eps);
        for (int32_t d = lane; d < head_size; d += GPU_LANES) {
            x[d] *= factor * number_load((const char *)p.norm[side], p.norm_dtype[side], d);
        }
    }
    sync_lanes(); /* pairs span lanes */
    const char *table = p.cos_sin.data + position * p.cos_sin.row;
    int32_t pairs = p.rotary_dim / 2;
    for (int32_t d = lane; d < pairs; d += GPU_LANES) {
        int32_t first = p.neox ? d : 2 * d, second = p.neox ? d + pairs : 2 * d + 1;
        float c = number_load(table, p.cos_sin.dtype, d);
        float s = number_load(table, p.cos_sin.dtype, pairs + d);
        float a = x[first], b = x[second];
        x[first] = a * c - b * s;
        x[second] = b * c + a * s;
    }
    sync_lanes(); /* all pairs are rotated */
    for (int32_t d = lane; d < head_size; d += GPU_LANES) {
        if (!isnan(x[d]) || !isnan(number_load(row, dtype, d))) { /* a NaN is unchanged */
            number_store(row, dtype, d, x[d]);
        }
    }
    sync_lanes(); /* row_store reads what other lanes wrote */
}

/* A warp for each (row, head of q, k or v). */
GPU_KERNEL(rope_write, gpu_write_params)
{
    GPU_SHARED float rows[ROPE_WARPS][ROPE_MAX_HEAD_SIZE];
    let_later_kernels_begin();
    int32_t heads = p.num_q_heads + 2 * p.num_heads;
    int64_t items = p.num_slots * heads;
    int warp = warp_index(), lane = lane_index();
    for (int64_t i = (int64_t)group_index() * ROPE_WARPS + warp; i < items;
         i += (int64_t)group_count() * ROPE_WARPS) {
        int64_t row = i / heads;
        int32_t head = (int32_t)(i - row * heads);
        if (head < p.num_q_heads) {
            turn_row(p, p.q.data + row * p.q.row + head * p.q.head, p.q.dtype, p.to[0].head_size, 0,
                     p.positions[row], rows[warp], lane);
            continue;
        }
        head -= p.num_q_heads;
        int side = head >= p.num_heads;
        head -= side * p.num_heads;
        const gpu_tensor &from = p.from[side];
        char *at = from.data + row * from.row + head * from.head;
        if (side == 0) {
            turn_row(p, at, from.dtype, p.to[0].head_size, 1, p.positions[row], rows[warp], lane);
        }
        int64_t slot = p.slots[row];
        if (slot >= 0) {
            row_store(p.to[side], slot / p.block_size, slot % p.block_size, head, at, from.dtype,
                      lane);
        }
    }
}
