/* SPDX-License-Identifier: Apache-2.0 */
/* Kernels beside attend: the KV write and the merge of two states. */
#include <cuda_runtime.h>

#include "../common/number.h"
#include "../common/tensors.h"
#include "number.cuh"
#include "visible.cuh"

/* One of K and V: rows [num_slots, heads, head_size] into the cache. */
struct write_side {
    flash_rows from;
    flash_cache to;
    int32_t head_size, vectors; /* vectors: 16-byte pieces of a row that are copied as they are */
};

struct write_params {
    write_side side[2];
    const int64_t *slots;
    int64_t num_slots;
    int32_t num_heads, block_size, kv_dtype; /* as an attn_dtype_name */
};

/* x / scale truncated with a sticky last bit, so that the step to fp8 rounds once. */
static __device__ __forceinline__ float divide_sticky(float x, float scale)
{
    float q = __fdiv_rz(x, scale);
    return fmaf(-q, scale, x) != 0.0f ? __int_as_float(__float_as_int(q) | 1) : q;
}

static __device__ __forceinline__ void write_elements(const write_params &p, const write_side &s,
                                                      const char *from, char *to, int32_t head,
                                                      int32_t lane, int32_t lanes)
{
    bool fp8 = p.kv_dtype >= ATTN_DTYPE_FP8_E4M3;
    float scale = fp8 ? cache_scale(s.to, head) : 1.0f;
    for (int32_t d = lane; d < s.head_size; d += lanes) {
        int32_t outer = s.to.pack > 0 ? d / s.to.pack : 0;
        int32_t inner = s.to.pack > 0 ? d - outer * s.to.pack : d;
        float x = number_load(from, s.from.dtype, d);
        number_store(to + outer * s.to.pack_stride, p.kv_dtype, inner,
                     fp8 && isfinite(x) ? divide_sticky(x, scale) : x);
    }
}

/* A CTA per token, K and V by the grid's second dimension. */
static __global__ void __launch_bounds__(128) write_kv(const __grid_constant__ write_params p)
{
    const write_side &s = p.side[blockIdx.y];
    for (int64_t row = blockIdx.x; row < p.num_slots; row += gridDim.x) {
        int64_t slot = p.slots[row];
        if (slot < 0) {
            continue;
        }
        int64_t block = slot / p.block_size;
        const char *from = s.from.data + row * s.from.row;
        char *to = (char *)s.to.data + block * s.to.block + (slot - block * p.block_size) * s.to.slot;
        if (s.vectors > 0) {
            for (int32_t i = threadIdx.x; i < s.vectors * p.num_heads; i += 128) {
                int32_t head = i / s.vectors, v = i - head * s.vectors;
                *(uint4 *)(to + head * s.to.head + v * 16) =
                    *(const uint4 *)(from + head * s.from.head + v * 16);
            }
            continue;
        }
        for (int32_t head = threadIdx.x / 32; head < p.num_heads; head += 4) {
            write_elements(p, s, from + head * s.from.head, to + head * s.to.head, head,
                           threadIdx.x & 31, 32);
        }
    }
}

static write_side side_of(const struct attn_tensor *tensor, const struct attn_kv_view *view,
                          const float *scale, float scale_host, int32_t form, int32_t kv)
{
    write_side s = {};
    int32_t size = tensor->dtype.bits / 8;
    s.from.data = (char *)tensor->data + tensor->byte_offset;
    s.from.row = tensor_stride(tensor, 0) * size;
    s.from.head = tensor_stride(tensor, 1) * size;
    s.from.dtype = number_dtype_name(tensor->dtype);
    s.to.data = (const char *)view->data;
    s.to.block = view->stride_block;
    s.to.slot = view->stride_slot;
    s.to.head = view->stride_head;
    s.to.pack = view->pack > 0 && view->pack < view->head_size ? view->pack : 0;
    s.to.pack_stride = view->stride_pack;
    s.to.scale = form != ATTN_SCALE_NONE ? scale : nullptr;
    s.to.scale_host = form != ATTN_SCALE_NONE && scale_host != 0 ? scale_host : 1.0f;
    s.to.scale_per_head = form == ATTN_SCALE_PER_HEAD;
    s.head_size = view->head_size;
    uint64_t all = (uint64_t)s.from.data | s.from.row | s.from.head | (uint64_t)s.to.data |
                   s.to.block | s.to.slot | s.to.head | (uint64_t)(view->head_size * size);
    s.vectors = s.from.dtype == kv && s.to.pack == 0 && all % 16 == 0 ? view->head_size * size / 16
                                                                      : 0;
    return s;
}

cudaError_t launch_write(const struct attn_write_kv_args *args)
{
    cudaFuncAttributes attributes;
    if (args == nullptr) {
        return cudaFuncGetAttributes(&attributes, write_kv);
    }
    const struct attn_layer_params *params = args->params;
    write_params p = {};
    int32_t kv = number_of_kv(args->layer->kv_dtype);
    p.side[0] = side_of(args->k, args->k_cache, params->k_scale, params->k_scale_host,
                        args->layer->k_scale_form, kv);
    p.side[1] = side_of(args->v, args->v_cache, params->v_scale, params->v_scale_host,
                        args->layer->v_scale_form, kv);
    p.slots = args->slot_mapping;
    p.num_slots = args->num_slots;
    p.num_heads = args->layer->num_kv_heads;
    p.block_size = args->k_cache->block_size;
    p.kv_dtype = kv;
    if (args->num_slots > 0) {
        dim3 grid((unsigned)(args->num_slots < 65536 ? args->num_slots : 65536), 2);
        write_kv<<<grid, 128, 0, (cudaStream_t)args->stream>>>(p);
    }
    return cudaGetLastError();
}

struct merge_params {
    flash_rows prefix, suffix, out;
    const float *prefix_lse, *suffix_lse;
    float *lse;
    int64_t prefix_lse_head, prefix_lse_row, suffix_lse_head, suffix_lse_row, lse_head, lse_row;
    int64_t first_row, num_rows, num_rows_with_prefix;
    int32_t heads, dims;
};

/* A warp per (row, head). */
static __global__ void __launch_bounds__(128) merge_states(const __grid_constant__ merge_params p)
{
    int64_t items = p.num_rows * p.heads;
    int lane = threadIdx.x & 31;
    for (int64_t i = blockIdx.x * 4 + (threadIdx.x >> 5); i < items; i += (int64_t)gridDim.x * 4) {
        int64_t t = p.first_row + i / p.heads, h = i % p.heads;
        float a = p.prefix_lse[h * p.prefix_lse_head + t * p.prefix_lse_row];
        float b = p.suffix_lse[h * p.suffix_lse_head + t * p.suffix_lse_row];
        a = isinf(a) || t - p.first_row >= p.num_rows_with_prefix ? -INFINITY : a;
        b = isinf(b) ? -INFINITY : b;
        float m = fmaxf(a, b), base = m == -INFINITY ? 0.0f : m;
        float wa = expf(a - base), wb = expf(b - base), sum = wa + wb;
        __syncwarp(); /* lse may be one of the inputs: all lanes have read it */
        for (int32_t d = lane; d < p.dims; d += 32) {
            float x = wa == 0.0f ? 0.0f
                                 : wa * number_load(p.prefix.data + t * p.prefix.row +
                                                        h * p.prefix.head,
                                                    p.prefix.dtype, d);
            float y = wb == 0.0f ? 0.0f
                                 : wb * number_load(p.suffix.data + t * p.suffix.row +
                                                        h * p.suffix.head,
                                                    p.suffix.dtype, d);
            number_store(p.out.data + t * p.out.row + h * p.out.head, p.out.dtype, d,
                         sum == 0.0f ? 0.0f : (x + y) / sum);
        }
        if (lane == 0 && p.lse != nullptr) {
            p.lse[h * p.lse_head + t * p.lse_row] = sum == 0.0f ? -INFINITY : base + logf(sum);
        }
    }
}

static flash_rows rows_of(const struct attn_tensor *t)
{
    int32_t size = t->dtype.bits / 8;
    flash_rows r = {(char *)t->data + t->byte_offset, tensor_stride(t, 0) * size,
                    tensor_stride(t, 1) * size, number_dtype_name(t->dtype)};
    return r;
}

cudaError_t launch_merge(const struct attn_merge_states_args *args, int32_t num_sms)
{
    cudaFuncAttributes attributes;
    if (args == nullptr) {
        return cudaFuncGetAttributes(&attributes, merge_states);
    }
    merge_params p = {};
    p.prefix = rows_of(args->prefix_out);
    p.suffix = rows_of(args->suffix_out);
    p.out = rows_of(args->out);
    p.prefix_lse = (const float *)((char *)args->prefix_lse->data + args->prefix_lse->byte_offset);
    p.suffix_lse = (const float *)((char *)args->suffix_lse->data + args->suffix_lse->byte_offset);
    p.prefix_lse_head = tensor_stride(args->prefix_lse, 0);
    p.prefix_lse_row = tensor_stride(args->prefix_lse, 1);
    p.suffix_lse_head = tensor_stride(args->suffix_lse, 0);
    p.suffix_lse_row = tensor_stride(args->suffix_lse, 1);
    if (args->lse != nullptr) {
        p.lse = (float *)((char *)args->lse->data + args->lse->byte_offset);
        p.lse_head = tensor_stride(args->lse, 0);
        p.lse_row = tensor_stride(args->lse, 1);
    }
    p.first_row = args->first_row;
    p.num_rows = args->num_rows;
    p.num_rows_with_prefix = args->num_rows_with_prefix;
    p.heads = (int32_t)args->out->shape[1];
    p.dims = (int32_t)args->out->shape[2];
    if (p.num_rows > 0 && p.heads > 0) {
        merge_states<<<num_sms * 8, 128, 0, (cudaStream_t)args->stream>>>(p);
    }
    return cudaGetLastError();
}
