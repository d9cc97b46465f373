/* SPDX-License-Identifier: Apache-2.0 */
/* The attend kernel. CTAs of 4 warps that compute and 2 that copy walk segments of the plan's
 * stream of tiles. Rows of one item are (query, head of the group) of one KV head.
 *   SPLIT: 16 rows; each warp takes 16 keys of a tile, and the warps join at the end of a run.
 *   else:  64 rows; each warp takes 16 rows and all keys of a tile.
 * A tile of n keys: 2 * n * D elements read, 4 * n * D * rows FLOPs. SPLIT is bound by memory, the
 * other by mma.sync. */
#ifndef CUDA_FLASH_SM80_ATTEND_CUH
#define CUDA_FLASH_SM80_ATTEND_CUH

#include "sm80_finish.cuh"
#include "launch.h"
#include "sm80_tile.cuh"

#define ATTEND_THREADS 192

template <int KIND, int D, bool SPLIT>
static __device__ __forceinline__ void compute(const sm80_params &a, shared<KIND, D, SPLIT> &mine)
{
    const gpu_params &p = a.p;
    using S = shape<KIND, D, SPLIT>;
    constexpr int subs = SPLIT ? S::tile / 64 : 4, own = SPLIT ? 16 * subs : 16;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const int q_row = SPLIT ? 0 : warp * 16, first = SPLIT ? warp * own : 0;
    const bool slow =
        p.problem.spans != nullptr || p.problem.tree != nullptr || p.problem.alibi != 0;
    const bool from_bf16 = p.q.dtype == ATTN_DTYPE_BF16;
    const bool k_scaled = S::bytes && p.k.form == GPU_ROW_SCALED;
    const bool v_scaled = S::bytes && p.v.form == GPU_ROW_SCALED;
    float o[D / 8][4], m[2], l[2], scale = 0.0f;
    lane_rows rows;
    int stage = 0, phase = 0, q_slot = 0;
    int32_t left = 0; /* tiles of the run that are not done */
    int32_t tile = 0;
    const gpu_run *run = nullptr;
    char *sq = mine.q[0];
    bool high_rows = true;
    clear_rows(m, l, o);
#pragma unroll 1
    for (;;) {
        barrier_wait(shared_address(&mine.full[stage]), phase);
        if (left == 0) {
            int32_t slot = mine.run_of_stage[stage];
            if (slot == NO_RUN) {
                break;
            }
            run = &mine.runs[slot];
            left = run->count;
            tile = run->tile;
            sq = mine.q[q_slot];
            rows = enter_rows(p, *run, q_row + (lane >> 2));
            high_rows = !SPLIT || run->row_tile.num_rows > 8;
            scale = p.problem.scale *
                    (p.k.form == GPU_ROW_NUMBERS ? cache_scale(p.k, run->head) : 1.0f);
            scale *= query_scale(p, run->head);
            scale *= p.problem.soft_cap > 0.0f ? 1.0f : LOG2E;
            if (S::bytes && from_bf16) {
                convert_query(sq, S::q_bytes);
            }
        }
        char *at = stage_at(mine, stage);
        const float *k_scales = (const float *)(at + 2 * S::half), *v_scales = k_scales + S::tile;
        float s[2 * subs][4];
#pragma unroll
        for (int n = 0; n < 2 * subs; n++) {
            s[n][0] = s[n][1] = s[n][2] = s[n][3] = 0.0f;
        }
#pragma unroll
        for (int kk = 0; kk < D / 16; kk++) {
            uint32_t query[4];
            load_query<KIND, D>(sq, q_row, kk, lane, query);
#pragma unroll
            for (int sub = 0; sub < subs; sub++) {
                dot_step<KIND, D, S::tile>(at, first + sub * 16, kk, lane, query, s[2 * sub],
                                           s[2 * sub + 1]);
            }
        }
        int32_t tile_base = (run->row_tile.k0 & ~(S::tile - 1)) + tile * S::tile;
        int32_t base = tile_base + first;
        if (a.mapped && (tile_base < run->row_tile.k0 || tile_base + S::tile > run->row_tile.k1)) {
            clear_values<KIND, D, S::tile>(at + S::half, warp * own, own,
                                           run->row_tile.k0 - tile_base,
                                           run->row_tile.k1 - tile_base, lane);
            if (SPLIT) {
                __syncwarp(); /* the warp's own keys are clean */
            } else {
                barrier_consumers(); /* all keys are clean */
            }
        }
        if (k_scaled) {
#pragma unroll
            for (int n = 0; n < 2 * subs; n++) {
                const float *f = k_scales + first + n * 8 + (lane & 3) * 2;
                s[n][0] *= f[0], s[n][1] *= f[1], s[n][2] *= f[0], s[n][3] *= f[1];
            }
        }
        int view = view_of_tile(p, *run, rows, base, base + 16 * subs - 1);
        score_tile(p, *run, rows, q_row + (lane >> 2), scale, slow, high_rows, view == SEES_ALL,
                   base + (lane & 3) * 2, s);
        bool exactly =
            view == SEES_APART && values_odd<KIND, D, S::tile>(at + S::half, first, 16 * subs, lane,
                                                               v_scaled ? v_scales : nullptr);
        soften(high_rows, s, m, l, o);
        if (exactly) { /* copies: what a call takes the address of leaves the registers */
            exact_step<D, subs> x;
#pragma unroll
            for (int i = 0; i < 8 * subs; i++) {
                x.s[i / 4][i % 4] = s[i / 4][i % 4];
            }
#pragma unroll
            for (int i = 0; i < D / 2; i++) {
                x.o[i / 4][i % 4] = o[i / 4][i % 4];
            }
            add_values_exactly<KIND, D, subs, S::tile>(at + S::half, first, lane,
                                                       v_scaled ? v_scales : nullptr, x);
#pragma unroll
            for (int i = 0; i < D / 2; i++) {
                o[i / 4][i % 4] = x.o[i / 4][i % 4];
            }
        } else {
#pragma unroll
            for (int sub = 0; sub < subs; sub++) {
                add_values<KIND, D, S::tile>(at + S::half, first + sub * 16, lane,
                                             v_scaled ? v_scales : nullptr, s[2 * sub],
                                             s[2 * sub + 1], o);
            }
        }
        tile++;
        left--;
        if (left == 0) {
            finish_run<KIND, D, SPLIT>(p, *run, at, &mine.last_one, m, l, o);
            clear_rows(m, l, o);
            fence_for_boxes(); /* the stage was scratch memory */
            barrier_arrive(shared_address(&mine.q_empty[q_slot]));
            q_slot = q_slot + 1 == S::q_buffers ? 0 : q_slot + 1;
        }
        /* every lane for itself: racecheck does not follow reads through __syncwarp to a barrier */
        barrier_arrive(shared_address(&mine.empty[stage]));
        stage++;
        if (stage == a.stages) {
            stage = 0;
            phase ^= 1;
        }
    }
}

template <int KIND, int D, bool SPLIT>
__global__ void __launch_bounds__(ATTEND_THREADS, shape<KIND, D, SPLIT>::ctas)
    attend(const __grid_constant__ sm80_params a)
{
    using S = shape<KIND, D, SPLIT>;
    extern __shared__ __align__(1024) char memory[];
    shared<KIND, D, SPLIT> &mine = *(shared<KIND, D, SPLIT> *)memory;
    if (threadIdx.x == 0) {
        for (int i = 0; i < a.stages; i++) {
            barrier_init(shared_address(&mine.full[i]), 65);
            barrier_init(shared_address(&mine.empty[i]), 128);
        }
        for (int i = 0; i < S::q_buffers; i++) {
            barrier_init(shared_address(&mine.q_empty[i]), 128);
        }
    }
    if (threadIdx.x >= 128 && a.mapped) {
        fetch_map(threadIdx.x < 160 ? &a.k_map : &a.v_map);
    }
    __syncthreads(); /* the barriers are there */
    wait_for_earlier_kernels();
    let_later_kernels_begin();
    if (threadIdx.x >= 128) {
        producer<KIND, D, SPLIT>(a, mine, threadIdx.x - 128).work();
    } else {
        compute<KIND, D, SPLIT>(a, mine);
    }
}

/* a NULL: only loads the kernel. */
template <int KIND, int D, bool SPLIT>
static cudaError_t launch_shape(const sm80_params *a, cudaStream_t stream)
{
    using S = shape<KIND, D, SPLIT>;
    if (a == nullptr) {
        int device = 0, most = 0;
        cudaError_t error = cudaGetDevice(&device);
        error =
            error ? error
                  : cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
        return error ? error
                     : cudaFuncSetAttribute(attend<KIND, D, SPLIT>,
                                            cudaFuncAttributeMaxDynamicSharedMemorySize, most);
    }
    cudaLaunchAttribute attribute;
    cudaLaunchConfig_t config = {};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    config.gridDim = dim3((unsigned)a->p.schedule.ctas);
    config.blockDim = dim3(ATTEND_THREADS);
    config.dynamicSmemBytes = S::q_buffers * S::q_bytes + SM80_FIXED_SMEM + a->stages * S::stage;
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = a->overlaps ? 1 : 0;
    return cudaLaunchKernelEx(&config, attend<KIND, D, SPLIT>, *a);
}

template <int KIND> static cudaError_t load_kind()
{
    cudaError_t error = launch_shape<KIND, 64, true>(nullptr, nullptr);
    error = error ? error : launch_shape<KIND, 64, false>(nullptr, nullptr);
    error = error ? error : launch_shape<KIND, 128, true>(nullptr, nullptr);
    error = error ? error : launch_shape<KIND, 128, false>(nullptr, nullptr);
    return error ? error : launch_shape<KIND, 256, true>(nullptr, nullptr);
}

template <int KIND> static cudaError_t launch_kind(const sm80_params *a, cudaStream_t stream)
{
    if (a == nullptr) {
        return load_kind<KIND>();
    }
    const gpu_problem &p = a->p.problem;
    int32_t d = max(p.head_size, p.head_size_v);
    if (a->p.schedule.tile_rows == 16) {
        return d <= 64    ? launch_shape<KIND, 64, true>(a, stream)
               : d <= 128 ? launch_shape<KIND, 128, true>(a, stream)
                          : launch_shape<KIND, 256, true>(a, stream);
    }
    return d <= 64 ? launch_shape<KIND, 64, false>(a, stream)
                   : launch_shape<KIND, 128, false>(a, stream);
}

#endif
