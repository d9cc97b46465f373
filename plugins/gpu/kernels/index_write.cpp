/* SPDX-License-Identifier: Apache-2.0 */
/* Keys of indexers: norm, rotation and Hadamard transform where the layer has them (Su et al. 2021;
 * attn/draft/index_write.h), then the write. A warp has a key, in registers, which is read and
 * written once. The limit for few keys is latency: 75 keys of 128 take 5.8 us on an H200, and 12.3
 * where each array is loaded when it is needed (`attn-check cuda_flash --bench --filter
 * index_write.dsa.bf16.bf16`). */
#include "gpu/device/rows.h"
#include "gpu/index.h"

#define WRITE_WARPS (GPU_THREADS_index_write / GPU_LANES)
#define WRITE_MAX_SIZE (LANE_DIMS * GPU_LANES)
#define WRITE_FEW (128 / GPU_LANES) /* dims of a lane of a key of up to 128 */

/* An element of 16 or 32 bits. It is converted when it is used, so that loads do not wait for one
 * another. */
GPU_INLINE uint32_t element_bits(const char *row, int32_t dtype, int32_t d)
{
    return dtype == ATTN_DTYPE_F32 ? ((const uint32_t *)row)[d] : ((const uint16_t *)row)[d];
}

GPU_INLINE float element_of(uint32_t bits, int32_t dtype)
{
    return dtype == ATTN_DTYPE_F32 ? bits_float(bits) : number_of((uint16_t)bits, dtype);
}

/* A lane's dims i GPU_LANES + lane of a row of `size` elements; 0 past them. `row` NULL: all 0. */
template <int DIMS>
GPU_INLINE void load_bits(const char *row, int32_t dtype, int32_t size, int lane,
                          uint32_t (&bits)[DIMS])
{
#pragma unroll
    for (int i = 0; i < DIMS; i++) {
        const int32_t d = i * GPU_LANES + lane;
        bits[i] = row != nullptr && d < size ? element_bits(row, dtype, d) : 0;
    }
}

/* A rotated dim's place in its pair, the pair's number, and the other dim of it. */
struct rotated_pair {
    bool second;
    int32_t pair, other;
};

GPU_INLINE rotated_pair pair_of(const gpu_index_write_params &p, int32_t d)
{
    const int32_t at = d - p.rotary_first, pairs = p.rotary_dim / 2;
    const bool second = p.neox ? at >= pairs : (at & 1) != 0;
    return {second, p.neox ? at - (second ? pairs : 0) : at / 2,
            p.neox ? (second ? d - pairs : d + pairs) : p.rotary_first + (at ^ 1)};
}

GPU_INLINE bool is_rotated(const gpu_index_write_params &p, int32_t d)
{
    return d >= p.rotary_first && d < p.rotary_first + p.rotary_dim;
}

/* Cosines and sines of a lane's dims. */
template <int DIMS>
GPU_INLINE void load_angles(const gpu_index_write_params &p, int64_t position, int lane,
                            uint32_t (&angles)[2][DIMS])
{
    const char *table = p.cos_sin.data + position * p.cos_sin.row;
#pragma unroll
    for (int i = 0; i < DIMS; i++) {
        const int32_t d = i * GPU_LANES + lane, pair = pair_of(p, d).pair;
        const bool rotates = is_rotated(p, d);
        angles[0][i] = rotates ? element_bits(table, p.cos_sin.dtype, pair) : 0;
        angles[1][i] = rotates ? element_bits(table, p.cos_sin.dtype, p.rotary_dim / 2 + pair) : 0;
    }
}

/* x / sqrt(mean x^2 + eps) weight + bias; of a layer norm x less its mean. */
template <int DIMS>
GPU_INLINE void norm_key(const gpu_index_write_params &p, const uint32_t (&weight)[DIMS],
                         const uint32_t (&bias)[DIMS], float (&x)[DIMS], int lane)
{
    const float size = (float)p.to.head_size;
    float sum = 0.0f, squares = 0.0f;
#pragma unroll
    for (int i = 0; i < DIMS; i++) {
        sum += x[i]; /* dims past the last are 0 */
    }
    const float mean = p.layer_norm ? warp_sum(sum) / size : 0.0f;
#pragma unroll
    for (int i = 0; i < DIMS; i++) {
        x[i] = i * GPU_LANES + lane < p.to.head_size ? x[i] - mean : 0.0f;
        squares += x[i] * x[i];
    }
    const float factor = 1.0f / sqrtf(warp_sum(squares) / size + p.norm_eps);
#pragma unroll
    for (int i = 0; i < DIMS; i++) {
        x[i] = x[i] * factor * element_of(weight[i], p.weight_dtype);
        x[i] += p.bias != nullptr ? element_of(bias[i], p.bias_dtype) : 0.0f;
    }
}

/* `row` is shared memory of the warp. */
template <int DIMS>
GPU_INLINE void rotate_key(const gpu_index_write_params &p, const uint32_t (&angles)[2][DIMS],
                           float (&x)[DIMS], float *row, int lane)
{
#pragma unroll
    for (int i = 0; i < DIMS; i++) {
        row[i * GPU_LANES + lane] = x[i];
    }
    sync_lanes(); /* pairs span lanes */
#pragma unroll
    for (int i = 0; i < DIMS; i++) {
        const int32_t d = i * GPU_LANES + lane;
        if (is_rotated(p, d)) {
            const rotated_pair pair = pair_of(p, d);
            const float c = element_of(angles[0][i], p.cos_sin.dtype), y = row[pair.other];
            const float s = element_of(angles[1][i], p.cos_sin.dtype);
            x[i] = pair.second ? x[i] * c + y * s : x[i] * c - y * s;
        }
    }
    sync_lanes(); /* the memory is used again */
}

/* The least exponent with `largest`, or 6 2^-126, up to 6 2^exponent. */
GPU_INLINE int32_t exponent_of_block(float largest)
{
    const uint32_t bits = float_bits(fmaxf(largest, 7.0523694e-38f));
    const int32_t exponent = (int32_t)(bits >> 23) - 127 - 2;
    return isfinite(largest) ? exponent + ((bits & 0x7fffff) > 0x400000) : 127;
}

/* Dim `first` + lane of a row in mxfp4: 32 lanes have a block. */
GPU_INLINE void store_mxfp4(const gpu_cache &c, char *to, uint8_t *scales, float x, int32_t first,
                            int lane)
{
    const int32_t d = first + lane;
    float largest = fabsf(x);
#pragma unroll
    for (int i = MXFP4_BLOCK / 2; i > 0; i >>= 1) {
        const float other = lane_xor(largest, i);
        largest = isnan(largest) || isnan(other) ? NAN : fmaxf(largest, other);
    }
    const int32_t exponent = exponent_of_block(largest);
    const float root = bits_float((uint32_t)(127 - exponent / 2) << 23); /* no factor underflows */
    const float rest = bits_float((uint32_t)(127 - exponent + exponent / 2) << 23);
    if (lane % MXFP4_BLOCK == 0 && d < c.head_size) {
        scales[d / MXFP4_BLOCK] = (uint8_t)(isnan(largest) ? 255 : exponent + 127);
    }
    store_nibble(c, to, d, e2m1_of(isnan(largest) ? 0.0f : x * root * rest));
}

template <int DIMS>
GPU_INLINE void store_key(const gpu_cache &c, int64_t block, int64_t slot, const float (&x)[DIMS],
                          int lane)
{
    char *to = (char *)row_at(c, block, slot, 0);
    uint8_t *scales = (uint8_t *)row_scale_at(c, block, slot, 0);
    float scale = c.dtype >= ATTN_DTYPE_FP8_E4M3 ? cache_scale(c, 0) : 1.0f;
    if (c.form == GPU_ROW_SCALED) {
        float largest = 0.0f;
#pragma unroll
        for (int i = 0; i < DIMS; i++) {
            largest = isnan(x[i]) || isnan(largest) ? NAN : fmaxf(largest, fabsf(x[i]));
        }
        scale = divide_nearest(warp_largest(largest, true), FP8_LARGEST);
        scale = scale < LEAST_ROW_SCALE ? LEAST_ROW_SCALE : scale;
        if (lane == 0) {
            *(float *)scales = scale;
        }
    }
    const number_divisor by = divisor_of(scale);
#pragma unroll
    for (int i = 0; i < DIMS; i++) {
        const int32_t first = i * GPU_LANES, d = first + lane;
        if (c.form == GPU_ROW_MXFP4 && first < c.head_size) {
            store_mxfp4(c, to, scales, x[i], first, lane);
        } else if (d < c.head_size) {
            const int32_t outer = c.pack > 0 ? d / c.pack : 0;
            number_store(to + outer * c.pack_stride, c.dtype, c.pack > 0 ? d - outer * c.pack : d,
                         c.dtype >= ATTN_DTYPE_FP8_E4M3 ? divide_odd(x[i], by) : x[i]);
        }
    }
}

GPU_INLINE int64_t quotient(int64_t x, int32_t by)
{
    return (uint64_t)x >> 32 == 0 ? (int64_t)((uint32_t)x / (uint32_t)by) : x / by;
}

/* Writes a warp's keys. Slots count tokens, of which each tokens_per_row-th has a row. For keys of
 * up to 128 dims a warp loads weights, biases and angles early, so that these loads overlap; longer
 * keys load each array right before its use, as all of them would take too many registers. */
template <int DIMS> GPU_INLINE void write_keys(const gpu_index_write_params &p, float *row)
{
    const bool early = DIMS <= WRITE_FEW;
    const char *weight = (const char *)p.weight, *bias = (const char *)p.bias;
    const int lane = lane_index();
    const int32_t size = p.to.head_size;
    uint32_t weights[DIMS], biases[DIMS], bits[DIMS], angles[2][DIMS];
    if (early) {
        load_bits<DIMS>(weight, p.weight_dtype, size, lane, weights);
        load_bits<DIMS>(bias, p.bias_dtype, size, lane, biases);
    }
    for (int64_t t = warp_of_grid(GPU_THREADS_index_write); t < p.num_slots;
         t += warps_of_grid(GPU_THREADS_index_write)) {
        const int64_t slot = p.slots[t], position = p.rotary_dim > 0 ? p.positions[t] : 0;
        float x[DIMS];
        load_bits<DIMS>(p.from.data + t * p.from.row, p.from.dtype, size, lane, bits);
        sync_lanes(); /* else compilers move the loads after the slot's */
        const int64_t at = quotient(slot, p.tokens_per_row);
        if (slot < 0 || slot - at * p.tokens_per_row != p.tokens_per_row - 1) {
            continue;
        }
        if (early && p.rotary_dim > 0) {
            load_angles<DIMS>(p, position, lane, angles);
        }
#pragma unroll
        for (int i = 0; i < DIMS; i++) {
            x[i] = element_of(bits[i], p.from.dtype);
        }
        if (weight != nullptr) {
            if (!early) {
                load_bits<DIMS>(weight, p.weight_dtype, size, lane, weights);
                load_bits<DIMS>(bias, p.bias_dtype, size, lane, biases);
            }
            norm_key<DIMS>(p, weights, biases, x, lane);
        }
        if (p.rotary_dim > 0) {
            if (!early) {
                load_angles<DIMS>(p, position, lane, angles);
            }
            rotate_key<DIMS>(p, angles, x, row, lane);
        }
        if (p.hadamard) {
            hadamard(x, size, lane);
            const float factor = 1.0f / sqrtf((float)size);
#pragma unroll
            for (int i = 0; i < DIMS; i++) {
                x[i] *= i * GPU_LANES + lane < size ? factor : 0.0f;
            }
        }
        const int64_t block = quotient(at, p.block_size);
        store_key<DIMS>(p.to, block, at - block * p.block_size, x, lane);
    }
}

GPU_KERNEL(index_write, gpu_index_write_params)
{
    GPU_SHARED float rows[WRITE_WARPS][WRITE_MAX_SIZE];
    let_later_kernels_begin();
    if (p.to.head_size <= WRITE_FEW * GPU_LANES) {
        write_keys<WRITE_FEW>(p, rows[warp_index()]);
    } else {
        write_keys<LANE_DIMS>(p, rows[warp_index()]);
    }
}
