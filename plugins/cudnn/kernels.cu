/* SPDX-License-Identifier: Apache-2.0 */
/* Lengths, row offsets and block tables for cuDNN: a few bytes for each request and block. Output
 * rows are read once: 2 Dv bytes for each row and head, as many as the attend has written. */
#include "cudnn/kernels.h"
#include "gpu/cuda/launch.cuh"
#include "gpu/device/search.h"

#define THREADS 128

/* A CTA for each request. cuDNN may read a table past a request's keys: there the last block
 * stands again, and so does it where an entry names no block. */
static __global__ void lengths(const __grid_constant__ cudnn_lengths_params p)
{
    const gpu_problem &batch = p.problem;
    const int32_t r = blockIdx.x, first = batch.query_start[0];
    const bool there = r < batch.num_reqs;
    const int32_t start = batch.query_start[there ? r : batch.num_reqs];
    const int32_t queries = there ? batch.query_start[r + 1] - start : 0;
    const bool rows = p.to.table == nullptr;
    const int32_t first_key = rows ? batch.key_start[0] : 0;
    const int32_t key_start = rows ? batch.key_start[there ? r : batch.num_reqs] : 0;
    const int32_t all_keys = !there ? 0
                             : rows ? batch.key_start[r + 1] - key_start
                                    : batch.seq_lens[r];
    const int32_t keys = queries > 0 ? all_keys : 0;
    const int64_t k = (int64_t)batch.num_kv_heads * batch.head_size;
    const int64_t v = (int64_t)batch.num_kv_heads * batch.head_size_v;
    const int64_t out = (int64_t)batch.num_q_heads * batch.head_size_v;
    const int64_t q = (int64_t)batch.num_q_heads * batch.head_size;
    if (threadIdx.x == 0) {
        p.to.query_lens[r] = keys > 0 ? queries : 0;
        p.to.key_lens[r] = keys;
    }
    if (threadIdx.x < 2 && (threadIdx.x == 0 || r == p.num_slots - 1)) { /* and the end */
        const int32_t i = r + (int32_t)threadIdx.x;
        const int64_t row = threadIdx.x == 0 ? start : start + queries;
        p.to.q_start[i] = row * q;
        p.to.out_start[i] = row * out;
        p.to.q_copy_start[i] = (row - first) * q;
        p.to.out_copy_start[i] = (row - first) * out;
        p.to.lse_copy_start[i] = (row - first) * batch.num_q_heads;
        if (rows) {
            const int64_t key = threadIdx.x == 0 ? key_start : key_start + all_keys;
            p.to.k_start[i] = key * k;
            p.to.v_start[i] = key * v;
            p.to.k_copy_start[i] = (key - first_key) * k;
            p.to.v_copy_start[i] = (key - first_key) * v;
        }
    }
    if (rows) {
        return;
    }
    const int32_t used = min((keys + batch.block_size - 1) / batch.block_size, p.num_columns);
    const int64_t at = there && batch.block_table_row != nullptr ? batch.block_table_row[r] : r;
    const int32_t *table = batch.block_table + at * batch.block_table_stride;
    const int32_t last = used > 0 ? table[used - 1] : 0;
    for (int32_t i = (int32_t)threadIdx.x; i < p.num_columns; i += THREADS) {
        int32_t block = i < used ? table[i] : last;
        block = block >= 0 && block < p.num_blocks ? block : last;
        p.to.table[(int64_t)r * p.num_columns + i] = block;
    }
}

static __global__ void copy_rows(const __grid_constant__ cudnn_rows_params p)
{
    const int32_t first = p.first_rows[0], rows = p.first_rows[p.num_reqs] - first;
    const int64_t vectors = p.row_bytes / 16, all = (int64_t)rows * p.heads * vectors;
    for (int64_t i = blockIdx.x * (int64_t)THREADS + threadIdx.x; i < all;
         i += (int64_t)gridDim.x * THREADS) {
        const int64_t row = i / vectors / p.heads, head = i / vectors % p.heads;
        const uint4 *from =
            (const uint4 *)(p.from.data + (first + row) * p.from.row + head * p.from.head);
        ((uint4 *)p.to)[i] = from[i % vectors];
    }
}

/* Whether one of 8 numbers is NaN: of f16, or of bf16. */
static __device__ bool has_nan(const uint4 &x, uint32_t infinity)
{
    const uint32_t words[4] = {x.x, x.y, x.z, x.w};
    bool found = false;
    for (uint32_t word : words) {
        found = found || (word & 0x7fff) > infinity || (word >> 16 & 0x7fff) > infinity;
    }
    return found;
}

/* A CTA for each row. A masked value that is NaN may have reached the output, since cuDNN
 * multiplies it by 0; a row without keys is not cuDNN's. */
static __global__ void finish(const __grid_constant__ cudnn_finish_params p)
{
    const int32_t first = p.query_start[0], end = p.query_start[p.num_reqs];
    const uint32_t infinity = p.out.dtype == ATTN_DTYPE_F16 ? 0x7c00 : 0x7f80;
    const int32_t vectors = p.head_size / 8;
    for (int32_t i = (int32_t)blockIdx.x; i < p.num_rows; i += (int32_t)gridDim.x) {
        const int32_t token = first + i;
        bool bad = false;
        if (token < end) {
            bad = p.all_unfinished != 0 ||
                  p.key_lens[find_last(p.query_start, p.num_reqs, token)] <= 0;
            for (int32_t j = (int32_t)threadIdx.x; j < p.heads * vectors; j += THREADS) {
                uint4 *out = (uint4 *)(p.out.data + token * p.out.row + j / vectors * p.out.head) +
                             j % vectors;
                const uint4 *from = p.copied != nullptr ? (const uint4 *)p.copied +
                                                              (int64_t)i * p.heads * vectors + j
                                                        : out;
                const uint4 x = *from;
                bad = bad || has_nan(x, infinity);
                if (p.copied != nullptr) {
                    *out = x;
                }
            }
            for (int32_t h = (int32_t)threadIdx.x; h < p.heads && p.lse.data != nullptr;
                 h += THREADS) {
                p.lse.data[h * p.lse.head + token * p.lse.row] =
                    p.log_sum_exp[(int64_t)i * p.heads + h];
            }
        }
        bad = __syncthreads_or(bad) != 0;
        if (threadIdx.x == 0) {
            p.unfinished[i] = bad ? token : -1;
        }
    }
}

template <class PARAMS>
static const char *launch(const struct gpu_device *device, void (*kernel)(PARAMS),
                          const PARAMS &params, int64_t groups, void *stream)
{
    device_scope inside(device);
    return cause_of(launch_kernel(kernel, params, dim3((unsigned)groups), THREADS, 0,
                                  (cudaStream_t)stream, false));
}

extern "C" const char *cudnn_launch_lengths(const struct gpu_device *device,
                                            const struct cudnn_lengths_params *params, void *stream)
{
    return launch(device, lengths, *params, params->num_slots, stream);
}

extern "C" const char *cudnn_launch_copy(const struct gpu_device *device,
                                         const struct cudnn_rows_params *params, void *stream)
{
    return launch(device, copy_rows, *params, (int64_t)device->num_sms * 8, stream);
}

extern "C" const char *cudnn_launch_finish(const struct gpu_device *device,
                                           const struct cudnn_finish_params *params, void *stream)
{
    const int64_t most = (int64_t)device->num_sms * 16;
    return launch(device, finish, *params, params->num_rows < most ? params->num_rows : most,
                  stream);
}

extern "C" const char *cudnn_load_kernels(const struct gpu_device *device)
{
    device_scope inside(device);
    cudaFuncAttributes attributes;
    cudaError_t error = cudaFuncGetAttributes(&attributes, lengths);
    error = error ? error : cudaFuncGetAttributes(&attributes, copy_rows);
    error = error ? error : cudaFuncGetAttributes(&attributes, finish);
    return cause_of(error);
}

extern "C" void cudnn_enter(const struct gpu_device *device)
{
    ((CUresult(CUDAAPI *)(CUcontext))device->push)((CUcontext)device->context);
}

extern "C" void cudnn_leave(const struct gpu_device *device)
{
    CUcontext popped;
    ((CUresult(CUDAAPI *)(CUcontext *))device->pop)(&popped);
}
