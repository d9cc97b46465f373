/* SPDX-License-Identifier: Apache-2.0 */
/* attend_mla on sm_90a over one cache, with a schedule, and the merge of items that it has cut. */
#include "sm90_latent.cuh"
#include "sm90_latent_merge.cuh"

/* Parts in the layout of the two warp groups: a lane has dims d and d + 1 of rows r and r + 8 from
 * each. */
struct latent_pieces {
    static constexpr int ROWS = SM90_LATENT_ROWS, COUNT = ROWS * LATENT_MAX_RANK / 256, APART = 8;
    static constexpr bool BY_ROWS = true;

    GPU_INLINE int first_row(int piece)
    {
        return (piece & 3) * 16;
    }

    GPU_INLINE int row(int piece)
    {
        return first_row(piece) + ((threadIdx.x & 31) >> 2);
    }

    GPU_INLINE void store(const sm90_latent_params &a, const gpu_row_tile &item, int piece,
                          const merged_piece &x)
    {
        const gpu_params &p = a.p.attend;
        const int dim = (piece >> 2) * 8 + (threadIdx.x & 3) * 2;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int32_t at_row = row(piece) + APART * h;
            if (at_row >= item.num_rows) {
                continue;
            }
            int32_t at = item.first_row + at_row, index = at / p.problem.group;
            int64_t token = item.query_start + index, head = at - index * p.problem.group;
            float sink = p.problem.sinks != nullptr ? p.problem.sinks[head] * LOG2E : -INFINITY;
            float *lse = dim == 0 && p.lse.data != nullptr
                             ? &p.lse.data[head * p.lse.head + token * p.lse.row]
                             : nullptr;
            float factor = softmax_close_base2(sink, h ? x.row_max.y : x.row_max.x,
                                               h ? x.row_sum.y : x.row_sum.x, lse) *
                           value_scale(p.k);
            char *to = p.out.data + token * p.out.row + head * p.out.head;
#pragma unroll
            for (int d = 0; d < 2; d++) {
                const float first = (h ? x.acc_o[d].z : x.acc_o[d].x) * factor;
                const float second = (h ? x.acc_o[d].w : x.acc_o[d].y) * factor;
                const uint32_t two = p.out.dtype == ATTN_DTYPE_BF16
                                         ? pack2<KIND_BF16>(first, second)
                                         : pack2<KIND_F16>(first, second);
                uint16_t *to_dims = (uint16_t *)to + d * 256 + dim;
                if (a.wide_out > 1) {
                    *(uint32_t *)to_dims = two;
                } else {
                    to_dims[0] = (uint16_t)two;
                    to_dims[1] = (uint16_t)(two >> 16);
                }
            }
        }
    }
};

static __global__ void __launch_bounds__(MERGE_THREADS, 1)
    merge_latent(const __grid_constant__ sm90_latent_params a)
{
    merge_cuts<latent_pieces>(a);
}

template <int KIND> static cudaError_t make_ready()
{
    cudaFuncAttributes attributes;
    cudaError_t error = cudaFuncGetAttributes(&attributes, merge_latent);
    error = error ? error : allow_memory<KIND, LATENT_BY_BOXES, true>();
    error = error ? error : allow_memory<KIND, LATENT_BY_ROWS, true>();
    if constexpr (KIND == KIND_F16) {
        error = error ? error : allow_memory<KIND, LATENT_BY_CODES, true>();
        error = error ? error : allow_memory<KIND, LATENT_BY_CODES, false>();
    } else {
        error = error ? error : allow_memory<KIND, LATENT_BY_BOXES, false>();
        error = error ? error : allow_memory<KIND, LATENT_BY_ROWS, false>();
    }
    return error;
}

template <int KIND, int PRODUCER, bool ROPE>
static cudaError_t launch_attend(const sm90_latent_params &a, int32_t num_sms, cudaStream_t stream)
{
    return launch_kernel(attend_latent<KIND, PRODUCER, ROPE, false>, a, (unsigned)num_sms,
                         latent_threads<PRODUCER>::threads, sizeof(latent_shared), stream);
}

/* The kernel for 16-bit rows, and for rows of any form that are read byte by byte. */
template <int KIND, bool ROPE>
static cudaError_t launch_numbers(const sm90_latent_params &a, int32_t num_sms, cudaStream_t stream)
{
    return a.mapped ? launch_attend<KIND, LATENT_BY_BOXES, ROPE>(a, num_sms, stream)
                    : launch_attend<KIND, LATENT_BY_ROWS, ROPE>(a, num_sms, stream);
}

template <int KIND>
static cudaError_t launch_latent(const sm90_latent_params *a, int32_t num_sms, cudaStream_t stream)
{
    static_assert(sizeof(latent_shared) <= 227 * 1024, "shared memory of a CTA");
    if (a == nullptr) {
        return make_ready<KIND>();
    }
    cudaError_t error = cudaSuccess;
    if constexpr (KIND == KIND_F16) {
        error = a->form == LATENT_FORM_OWN || !a->wide_keys
                    ? launch_numbers<KIND, true>(*a, num_sms, stream)
                : a->p.rope > 0 ? launch_attend<KIND, LATENT_BY_CODES, true>(*a, num_sms, stream)
                                : launch_attend<KIND, LATENT_BY_CODES, false>(*a, num_sms, stream);
    } else {
        error = a->p.rope > 0 ? launch_numbers<KIND, true>(*a, num_sms, stream)
                              : launch_numbers<KIND, false>(*a, num_sms, stream);
    }
    return error ? error
                 : launch_kernel(merge_latent, *a, (unsigned)num_sms, MERGE_THREADS, 0, stream);
}

extern "C" const char *sm90_latent_launch(const struct gpu_device *device,
                                          const struct sm90_latent_params *params, void *stream)
{
    /* 8-bit rows are converted to f16, which is exact, and bf16 queries with them */
    bool bf16 = params == nullptr ||
                (params->form == LATENT_FORM_OWN && params->p.attend.q.dtype == ATTN_DTYPE_BF16);
    bool f16 = params == nullptr || !bf16;
    bool swap_ab = params == nullptr || params->swap_ab;
    cudaError_t error = cudaSuccess;
    device_scope inside(device);
    if (swap_ab) {
        error = (cudaError_t)sm90_swap_ab_launch(params, device->num_sms, stream);
    }
    if (params != nullptr && swap_ab) {
        bf16 = f16 = false;
    }
    if (bf16 && error == cudaSuccess) {
        error = launch_latent<KIND_BF16>(params, device->num_sms, (cudaStream_t)stream);
    }
    if (f16 && error == cudaSuccess) {
        error = launch_latent<KIND_F16>(params, device->num_sms, (cudaStream_t)stream);
    }
    return cause_of(error);
}
