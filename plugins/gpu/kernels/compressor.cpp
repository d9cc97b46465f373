/* SPDX-License-Identifier: Apache-2.0 */
/* Compressors (attn/draft/compressor.h): a group pools the row that a token finishes, a thread has
 * one channel. A row of D channels reads 8 D bytes for each of its tokens, float32 value and gate;
 * the limit is that reading. */
#include "gpu/device/number.h"
#include "gpu/device/search.h"
#include "gpu/device/softmax.h"
#include "gpu/params.h"

#define COMPRESSOR_THREADS GPU_THREADS_compress
#define COMPRESSOR_AT_ONCE 4 /* tokens whose loads are in flight */

struct compressor_memory {
    float row[COMPRESSOR_THREADS];
    float squares[COMPRESSOR_THREADS / GPU_LANES];
};

/* Channel d of the row that ends at `position`: an online softmax over its tokens. */
GPU_INLINE float pool_channel(const gpu_compressor_params &p, int64_t table, int32_t position,
                              int32_t d)
{
    const int32_t own = position + 1 - p.tokens_per_row;
    float row_max = -INFINITY, row_sum = 0.0f, acc = 0.0f;
    for (int32_t first = max(p.overlaps ? own - p.tokens_per_row : own, 0); first <= position;
         first += COMPRESSOR_AT_ONCE) {
        float values[COMPRESSOR_AT_ONCE] = {}, gates[COMPRESSOR_AT_ONCE], high = row_max;
#pragma unroll
        for (int i = 0; i < COMPRESSOR_AT_ONCE; i++) {
            const int32_t at = first + i, index = at / p.block_size;
            gates[i] = -INFINITY;
            if (at <= position) {
                const int32_t part = p.overlaps && at >= own;
                const char *value =
                    p.states.data + (int64_t)p.block_table[table + index] * p.states.block +
                    (at - index * p.block_size) * p.states.slot + part * p.states.head;
                values[i] = ((const float *)value)[d];
                gates[i] = ((const float *)(value + (1 + p.overlaps) * p.states.head))[d];
                if (p.bias.data != nullptr) {
                    gates[i] += number_load(p.bias.data + at % p.tokens_per_row * p.bias.row,
                                            p.bias.dtype, part * p.states.head_size + d);
                }
            }
        }
#pragma unroll
        for (int i = 0; i < COMPRESSOR_AT_ONCE; i++) {
            high = fmaxf(high, gates[i]);
        }
        const float base = softmax_base(high), scores_scale = expf(row_max - base);
        row_sum *= scores_scale;
        acc *= scores_scale;
#pragma unroll
        for (int i = 0; i < COMPRESSOR_AT_ONCE; i++) {
            const float weight = expf(gates[i] - base);
            row_sum += weight;
            acc += weight * values[i];
        }
        row_max = high;
    }
    return acc / row_sum;
}

/* The channel's factor by the norm of memory.row. */
GPU_INLINE float norm_factor(const gpu_compressor_params &p, const compressor_memory &memory,
                             int32_t d)
{
    float sum = 0.0f;
    if (p.norm == nullptr) {
        return 1.0f;
    }
    for (int32_t i = 0; i < COMPRESSOR_THREADS / GPU_LANES; i++) {
        sum += memory.squares[i];
    }
    return number_load((const char *)p.norm, p.norm_dtype, d) /
           sqrtf(sum / (float)p.states.head_size + p.norm_eps);
}

/* Channel d of memory.row after norm and rotation. */
GPU_INLINE float finish_channel(const gpu_compressor_params &p, const compressor_memory &memory,
                                int32_t position, int32_t d)
{
    const float x = memory.row[d] * norm_factor(p, memory, d);
    const int32_t first = p.states.head_size - p.rotary_dim, at = d - first;
    const int32_t pairs = p.rotary_dim / 2;
    if (at < 0) {
        return x;
    }
    const bool second = p.neox ? at >= pairs : at % 2 == 1;
    const int32_t pair = p.neox ? at % pairs : at / 2;
    const int32_t other = p.neox ? (second ? d - pairs : d + pairs) : d ^ 1;
    const float y = memory.row[other] * norm_factor(p, memory, other);
    const char *table = p.cos_sin.data + (int64_t)position * p.cos_sin.row;
    const float c = number_load(table, p.cos_sin.dtype, pair);
    const float s = number_load(table, p.cos_sin.dtype, pairs + pair);
    return second ? x * c + y * s : x * c - y * s;
}

/* Items are tokens. */
GPU_KERNEL(compress, gpu_compressor_params)
{
    GPU_SHARED compressor_memory memory;
    const int32_t d = (int32_t)thread_index(), begin = p.query_start[0];
    const int32_t end = min(p.query_start[p.num_reqs], p.num_tokens);
    const bool has_channel = d < p.states.head_size;
    for (int32_t t = begin + (int32_t)group_index(); t < end; t += (int32_t)group_count()) {
        const int32_t r = find_last(p.query_start, p.num_reqs, t);
        const int32_t position = p.seq_lens[r] - (p.query_start[r + 1] - t);
        if (position < 0 || (position + 1) % p.tokens_per_row != 0) {
            continue;
        }
        const int64_t table =
            (p.block_table_row != nullptr ? p.block_table_row[r] : r) * p.block_table_stride;
        const float x = has_channel ? pool_channel(p, table, position, d) : 0.0f;
        const float squares = warp_sum(x * x);
        memory.row[d] = x;
        if (lane_index() == 0) {
            memory.squares[warp_index()] = squares;
        }
        sync_group(); /* the pooled row is written */
        if (has_channel) {
            number_store(p.out.data + t * p.out.row, p.out.dtype, d,
                         finish_channel(p, memory, position + 1 - p.tokens_per_row, d));
        }
        sync_group(); /* the pooled row is read */
    }
}
