/* SPDX-License-Identifier: Apache-2.0 */
/* Keys of indexers: norm, rotation and Hadamard transform where the layer has them (Su et al. 2021;
 * attn/draft/index_write.h), then the write. A warp has a key, in registers; it is read and written
 * once, and the limit is memory bandwidth. */
#include "gpu/device/rows.h"
#include "gpu/index.h"

#define WRITE_WARPS (GPU_THREADS_index_write / GPU_LANES)
#define WRITE_MAX_SIZE (LANE_DIMS * GPU_LANES)

/* x / sqrt(mean x^2 + eps) weight + bias; of a layer norm x less its mean. */
GPU_INLINE void norm_key(const gpu_index_write_params &p, float (&x)[LANE_DIMS], int lane)
{
    const float size = (float)p.to.head_size;
    float sum = 0.0f, squares = 0.0f;
#pragma unroll
    for (int i = 0; i < LANE_DIMS; i++) {
        sum += x[i]; /* dims past the last are 0 */
    }
    const float mean = p.layer_norm ? warp_sum(sum) / size : 0.0f;
#pragma unroll
    for (int i = 0; i < LANE_DIMS; i++) {
        x[i] = i * GPU_LANES + lane < p.to.head_size ? x[i] - mean : 0.0f;
        squares += x[i] * x[i];
    }
    const float factor = 1.0f / sqrtf(warp_sum(squares) / size + p.norm_eps);
#pragma unroll
    for (int i = 0; i < LANE_DIMS; i++) {
        const int32_t d = i * GPU_LANES + lane;
        if (d < p.to.head_size) {
            x[i] *= factor * number_load((const char *)p.weight, p.weight_dtype, d);
            x[i] += p.bias != nullptr ? number_load((const char *)p.bias, p.bias_dtype, d) : 0.0f;
        }
    }
}

/* `row` is shared memory of the warp. */
GPU_INLINE void rotate_key(const gpu_index_write_params &p, int64_t position, float (&x)[LANE_DIMS],
                           float *row, int lane)
{
    const char *table = p.cos_sin.data + position * p.cos_sin.row;
    const int32_t pairs = p.rotary_dim / 2;
#pragma unroll
    for (int i = 0; i < LANE_DIMS; i++) {
        row[i * GPU_LANES + lane] = x[i];
    }
    sync_lanes(); /* pairs span lanes */
#pragma unroll
    for (int i = 0; i < LANE_DIMS; i++) {
        const int32_t d = i * GPU_LANES + lane, at = d - p.rotary_first;
        if (at >= 0 && at < p.rotary_dim) {
            const bool second = p.neox ? at >= pairs : (at & 1) != 0;
            const int32_t pair = p.neox ? at % pairs : at / 2;
            const int32_t other = p.neox ? (second ? d - pairs : d + pairs) : d ^ 1;
            const float c = number_load(table, p.cos_sin.dtype, pair);
            const float s = number_load(table, p.cos_sin.dtype, pairs + pair), y = row[other];
            x[i] = second ? x[i] * c + y * s : x[i] * c - y * s;
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

GPU_INLINE void store_key(const gpu_cache &c, int64_t block, int64_t slot,
                          const float (&x)[LANE_DIMS], int lane)
{
    char *to = (char *)row_at(c, block, slot, 0);
    uint8_t *scales = (uint8_t *)row_scale_at(c, block, slot, 0);
    float scale = c.dtype >= ATTN_DTYPE_FP8_E4M3 ? cache_scale(c, 0) : 1.0f;
    if (c.form == GPU_ROW_SCALED) {
        float largest = 0.0f;
#pragma unroll
        for (int i = 0; i < LANE_DIMS; i++) {
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
    for (int i = 0; i < LANE_DIMS; i++) {
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

/* Slots count tokens, of which each tokens_per_row-th has a row. */
GPU_KERNEL(index_write, gpu_index_write_params)
{
    GPU_SHARED float rows[WRITE_WARPS][WRITE_MAX_SIZE];
    const int lane = lane_index();
    let_later_kernels_begin();
    for (int64_t t = warp_of_grid(GPU_THREADS_index_write); t < p.num_slots;
         t += warps_of_grid(GPU_THREADS_index_write)) {
        const int64_t slot = p.slots[t], at = slot / p.tokens_per_row;
        float x[LANE_DIMS];
        if (slot < 0 || (slot + 1) % p.tokens_per_row != 0) {
            continue;
        }
#pragma unroll
        for (int i = 0; i < LANE_DIMS; i++) {
            const int32_t d = i * GPU_LANES + lane;
            x[i] = d < p.to.head_size ? number_load(p.from.data + t * p.from.row, p.from.dtype, d)
                                      : 0.0f;
        }
        if (p.weight != nullptr) {
            norm_key(p, x, lane);
        }
        if (p.rotary_dim > 0) {
            rotate_key(p, p.positions[t], x, rows[warp_index()], lane);
        }
        if (p.hadamard) {
            hadamard(x, p.to.head_size, lane);
            const float factor = 1.0f / sqrtf((float)p.to.head_size);
#pragma unroll
            for (int i = 0; i < LANE_DIMS; i++) {
                x[i] *= i * GPU_LANES + lane < p.to.head_size ? factor : 0.0f;
            }
        }
        store_key(p.to, at / p.block_size, at % p.block_size, x, lane);
    }
}
