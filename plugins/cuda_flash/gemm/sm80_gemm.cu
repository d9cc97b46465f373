/* SPDX-License-Identifier: Apache-2.0 */
/* The launch of batched_gemm on tensor cores, and the calls it serves. */
#include "gpu/cuda/code.h"
#include "gpu/cuda/launch.cuh"
#include "sm80_gemm.cuh"

/* Shapes by rows of a tile. With short k, more CTAs share a multiprocessor, so that their prologues
 * and epilogues overlap. */
typedef gemm_shape<1, 4, 1, 4, 4> rows_16;
typedef gemm_shape<2, 2, 2, 8, 4> rows_64_short;
typedef gemm_shape<2, 4, 2, 4, 2> rows_64;
typedef gemm_shape<2, 2, 4, 8, 2> rows_128;
typedef gemm_shape<4, 2, 4, 8, 1> rows_256;

#define SHORT_K (2 * GEMM_STEP)

/* The shared memory for as many stages as k has steps. */
template <class S> static int gemm_bytes(const gpu_gemm_params &p)
{
    const int32_t steps = (p.k + GEMM_STEP - 1) / GEMM_STEP;
    return (steps < GEMM_STAGES ? steps : GEMM_STAGES) * S::stage_bytes;
}

/* With q NULL, only loads the kernel. */
template <int KIND, bool ALONG_K, bool WIDE, class S>
static cudaError_t launch_tiles(const struct gpu_device *device, const sm80_gemm_params *q,
                                cudaStream_t stream)
{
    if (q == nullptr) {
        const int most = GEMM_STAGES * S::stage_bytes;
        return cudaFuncSetAttribute(gemm_tiles<KIND, ALONG_K, WIDE, S>,
                                    cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    most < device->smem_of_cta ? most : device->smem_of_cta);
    }
    const int64_t items = (int64_t)q->p.count * ((q->p.m + S::rows - 1) / S::rows) *
                          ((q->p.n + GEMM_TILE_COLUMNS - 1) / GEMM_TILE_COLUMNS);
    return launch_kernel(gemm_tiles<KIND, ALONG_K, WIDE, S>, *q,
                         (unsigned)(items < 1 << 30 ? items : 1 << 30), S::threads,
                         gemm_bytes<S>(q->p), stream, cuda_runs_sm90(device));
}

template <int KIND, bool ALONG_K> static cudaError_t make_ready(const struct gpu_device *device)
{
    cudaError_t error = launch_tiles<KIND, ALONG_K, true, rows_16>(device, nullptr, nullptr);
    error =
        error ? error : launch_tiles<KIND, ALONG_K, true, rows_64_short>(device, nullptr, nullptr);
    error = error ? error : launch_tiles<KIND, ALONG_K, true, rows_64>(device, nullptr, nullptr);
    error = error ? error : launch_tiles<KIND, ALONG_K, true, rows_128>(device, nullptr, nullptr);
    error = error ? error : launch_tiles<KIND, ALONG_K, true, rows_256>(device, nullptr, nullptr);
    return error ? error
                 : launch_tiles<KIND, ALONG_K, false, rows_64_short>(device, nullptr, nullptr);
}

template <int KIND, bool ALONG_K>
static cudaError_t launch_rows(const struct gpu_device *device, const sm80_gemm_params *q,
                               cudaStream_t stream)
{
    if (q == nullptr) {
        return make_ready<KIND, ALONG_K>(device);
    }
    const gpu_gemm_params &p = q->p;
    const bool is_short = p.k <= SHORT_K;
    if (!q->wide_a || q->weights != GEMM_WEIGHTS_WIDE || !q->wide_out) {
        return launch_tiles<KIND, ALONG_K, false, rows_64_short>(device, q, stream);
    }
    if (p.m <= rows_16::rows) {
        return launch_tiles<KIND, ALONG_K, true, rows_16>(device, q, stream);
    }
    if (p.m > rows_128::rows && !is_short && gemm_bytes<rows_256>(p) <= device->smem_of_cta) {
        return launch_tiles<KIND, ALONG_K, true, rows_256>(device, q, stream);
    }
    if (p.m > rows_64::rows && gemm_bytes<rows_128>(p) <= device->smem_of_cta) {
        return launch_tiles<KIND, ALONG_K, true, rows_128>(device, q, stream);
    }
    return is_short ? launch_tiles<KIND, ALONG_K, true, rows_64_short>(device, q, stream)
                    : launch_tiles<KIND, ALONG_K, true, rows_64>(device, q, stream);
}

template <int KIND>
static cudaError_t launch_kind(const struct gpu_device *device, const sm80_gemm_params *q,
                               cudaStream_t stream)
{
    if (q == nullptr) {
        cudaError_t error = launch_rows<KIND, false>(device, q, stream);
        return error ? error : launch_rows<KIND, true>(device, q, stream);
    }
    const gpu_batch_matrix &w = q->p.w;
    return w.row < w.column ? launch_rows<KIND, true>(device, q, stream)
                            : launch_rows<KIND, false>(device, q, stream);
}

static const char *launch(const struct gpu_device *device, const sm80_gemm_params *q, void *stream)
{
    cudaError_t error = cudaSuccess;
    device_scope inside(device);
    if (q == nullptr || q->p.a.dtype == ATTN_DTYPE_BF16) {
        error = launch_kind<KIND_BF16>(device, q, (cudaStream_t)stream);
    }
    if (error == cudaSuccess && (q == nullptr || q->p.a.dtype == ATTN_DTYPE_F16)) {
        error = launch_kind<KIND_F16>(device, q, (cudaStream_t)stream);
    }
    return cause_of(error);
}

/* Whether lines of a matrix, `line` elements apart, can be copied eight elements (`bytes` bytes) at
 * a time. */
static bool is_wide(const gpu_batch_matrix &x, int64_t line, int64_t element, uint32_t bytes)
{
    return element == 1 && line % 8 == 0 && x.batch % 8 == 0 && (uintptr_t)x.data % bytes == 0;
}

static int32_t weights_of(const struct gpu_gemm_params *p, bool along_k)
{
    const gpu_batch_matrix &w = p->w, &s = p->block_scale;
    const int64_t line = along_k ? w.column : w.row, element = along_k ? w.row : w.column;
    /* otherwise the last copy would read past the end */
    const bool eights = (along_k ? p->k : p->n) % 8 == 0;
    if (s.data != NULL) {
        const bool shares = (along_k ? p->scale_rows : p->scale_columns) > 1;
        const int64_t scale_line = along_k ? s.column : s.row, own = along_k ? s.row : s.column;
        return !eights || !is_wide(w, line, element, 4) ? GEMM_WEIGHTS_ANY
               : shares                                 ? GEMM_WEIGHTS_MXFP4_SHARED
               : is_wide(s, scale_line, own, 8)         ? GEMM_WEIGHTS_MXFP4_OWN
                                                        : GEMM_WEIGHTS_ANY;
    }
    if (w.dtype != p->a.dtype) {
        return eights && is_wide(w, line, element, 8) ? GEMM_WEIGHTS_FP8 : GEMM_WEIGHTS_ANY;
    }
    return is_wide(w, line, element, 16) ? GEMM_WEIGHTS_WIDE : GEMM_WEIGHTS_ANY;
}

static const char *run(const struct gpu_device *device, const struct gpu_gemm_params *p,
                       void *stream)
{
    struct sm80_gemm_params q = {*p};
    q.weights = weights_of(p, p->w.row < p->w.column);
    q.wide_a = is_wide(p->a, p->a.row, p->a.column, 16);
    q.wide_out = p->out.dtype == p->a.dtype && p->n % 8 == 0 &&
                 is_wide(p->out, p->out.row, p->out.column, 16);
    return launch(device, &q, stream);
}

static const char *load(const struct gpu_device *device)
{
    return launch(device, NULL, NULL);
}

/* Activations are 16 bits, and weights must convert to them exactly: mxfp4 has the range of bf16.
 */
static bool takes(const struct gpu_gemm_params *p)
{
    if (p->k <= 0 || (p->a.dtype != ATTN_DTYPE_BF16 && p->a.dtype != ATTN_DTYPE_F16)) {
        return false;
    }
    if (p->block_scale.data != NULL) {
        return p->a.dtype == ATTN_DTYPE_BF16;
    }
    return p->w.dtype == p->a.dtype || p->w.dtype == ATTN_DTYPE_FP8_E4M3 ||
           p->w.dtype == ATTN_DTYPE_FP8_E5M2;
}

extern "C" const struct gpu_gemm sm80_gemm;
const struct gpu_gemm sm80_gemm = {load, takes, run};
