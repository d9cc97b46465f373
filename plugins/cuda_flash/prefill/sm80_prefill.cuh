/* SPDX-License-Identifier: Apache-2.0 */
/* Prefill by mma.sync. A CTA draws items of 128 rows (query, head of the group) of one KV head, or
 * of 64, and all its warps copy tiles of keys and multiply them with their own rows: with up to 128
 * dims 4 warps of 32 or 16 rows, with 256 dims 8 warps of 16. A tile of n keys: 4 * n * D bytes
 * read, 4 * rows * n * D FLOPs. mma.sync is the limit, and shared memory is close to it: 32 rows of
 * a warp read 320 bytes for each product of 4096 FLOPs, 16 rows 512. */
#ifndef CUDA_FLASH_SM80_PREFILL_CUH
#define CUDA_FLASH_SM80_PREFILL_CUH

#include "gpu/cuda/launch.cuh"
#include "sm80_prefill_epilogue.cuh"

#define SM80_LEAST_SCALE 1e-6f /* a smaller softmax scale is applied to the scores first */

/* The first and last key that a row sees. Rows out of range see everything; their results are
 * discarded. */
GPU_INLINE int2 bounds_of(const gpu_params &p, const gpu_run &run, int row)
{
    const int32_t index = (run.row_tile.first_row + row) / p.problem.group;
    const gpu_interval seen = interval_of(p.problem, request_of_row_tile(run.row_tile), index);
    return row < run.row_tile.num_rows ? make_int2(seen.first, seen.last) : make_int2(0, INT32_MAX);
}

/* The first and last key that all rows of a warp see, and the first and last that any sees. */
template <int BLOCKS>
GPU_INLINE int4 bounds_of_warp(const gpu_params &p, const gpu_run &run, int first_row)
{
    const int row = first_row + own_row<BLOCKS>();
    const bool real = row < run.row_tile.num_rows;
    const int2 seen = bounds_of(p, run, row);
    int4 v =
        make_int4(__reduce_max_sync(0xffffffffu, seen.x), __reduce_min_sync(0xffffffffu, seen.y),
                  __reduce_min_sync(0xffffffffu, real ? seen.x : INT32_MAX),
                  __reduce_max_sync(0xffffffffu, real ? seen.y : INT32_MIN));
    if (p.problem.tree != nullptr) { /* concerns the step's own tokens */
        v.y = min(v.y, run.row_tile.length - run.row_tile.query_len - 1);
    }
    if (p.problem.spans != nullptr) { /* beyond intervals */
        v.y = INT32_MIN;
        v.z = v.z == INT32_MAX ? INT32_MAX : 0;
        v.w = v.w == INT32_MIN ? INT32_MIN : INT32_MAX;
    }
    return v;
}

/* The run of a segment. The longest items of a causal prompt come last in the schedule. */
GPU_INLINE gpu_run run_of_segment(const gpu_params &p, int32_t index)
{
    const gpu_segment &segment = p.schedule.segments[index];
    gpu_run v;
    v.row_tile = segment.row_tile;
    const int32_t within = segment.begin - v.row_tile.start;
    v.head = within / v.row_tile.num_tiles;
    v.tile = within - v.head * v.row_tile.num_tiles;
    v.count = segment.end - segment.begin;
    v.segment = segment.index;
    v.first = segment.first;
    v.last = segment.last;
    v.item = segment.row_tile_index * p.problem.num_kv_heads + v.head;
    return v;
}

/* Caps scores, or multiplies those whose scale the exponent cannot apply. */
template <int N> GPU_INLINE void cap_scores(float cap, float scale, float (&acc_s)[N][4])
{
    const float unit = cap * LOG2E, rate = 2.0f * LOG2E * scale / cap;
#pragma unroll
    for (int n = 0; n < N; n++) {
#pragma unroll
        for (int e = 0; e < 4; e++) {
            acc_s[n][e] = cap > 0.0f
                              ? fmaf(-2.0f * unit,
                                     fast_reciprocal(fast_exp2(acc_s[n][e] * rate) + 1.0f), unit)
                              : acc_s[n][e] * (scale * LOG2E);
        }
    }
}

/* Hides the keys that the rows of block `b` do not see. `own`: what the lane's own row sees,
 * counted from the tile's first key. */
template <int N> GPU_INLINE void mask_scores(int2 own, int b, float (&acc_s)[N][4])
{
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int from = (lane & 28) + 2 * b + i;
        const int32_t first = __shfl_sync(0xffffffffu, own.x, from) - (lane & 3) * 2;
        const int32_t last = __shfl_sync(0xffffffffu, own.y, from) - (lane & 3) * 2;
#pragma unroll
        for (int n = 0; n < N; n++) {
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const int32_t key = n * 8 + e;
                acc_s[n][2 * i + e] = key >= first && key <= last ? acc_s[n][2 * i + e] : -INFINITY;
            }
        }
    }
}

/* Adds rare terms, computed in a call, and masks. */
template <int N>
GPU_INLINE void score_block(const gpu_params &p, const gpu_run &run, int row, int32_t first_key,
                            float (&acc_s)[N][4])
{
    tile_scores<N> x;
#pragma unroll
    for (int i = 0; i < 4 * N; i++) {
        x.acc_s[i / 4][i % 4] = acc_s[i / 4][i % 4];
    }
    score_slowly<SM80_NO_SWAP>(p, run, row, first_key, x);
#pragma unroll
    for (int i = 0; i < 4 * N; i++) {
        acc_s[i / 4][i % 4] = x.acc_s[i / 4][i % 4];
    }
}

/* Raises row_max of 16 rows of a tile, whose scores are multiplied by scale >= 0 in the exponent,
 * and rescales row_sum and acc_o where it rises. */
template <int N, int ND>
GPU_INLINE void raise_row_max(float scale, const float (&acc_s)[N][4], float (&row_max)[2],
                              float (&row_sum)[2], float (&acc_o)[ND][4])
{
    float new_max[2] = {-INFINITY, -INFINITY}, unused[4] = {};
#pragma unroll
    for (int n = 0; n < N; n++) {
        new_max[0] = fmaxf(new_max[0], fmaxf(acc_s[n][0], acc_s[n][1]));
        new_max[1] = fmaxf(new_max[1], fmaxf(acc_s[n][2], acc_s[n][3]));
    }
    new_max[0] *= scale, new_max[1] *= scale;
    bool past =
        new_max[0] > row_max[0] + RESCALE_THRESHOLD || new_max[1] > row_max[1] + RESCALE_THRESHOLD;
    if (__any_sync(0xffffffffu, past)) {
        update_row_max<SM80_NO_SWAP>(0, new_max[0], row_max, row_sum, unused, acc_o);
        update_row_max<SM80_NO_SWAP>(1, new_max[1], row_max, row_sum, unused, acc_o);
    }
}

/* Makes a probability of a score; element e of its four belongs to the lane's row e / 2. */
GPU_INLINE void make_prob(float scale, int e, const float (&row_max)[2], float (&row_sum)[2],
                          float (&acc_s)[4])
{
    acc_s[e] = fast_exp2(fmaf(acc_s[e], scale, -softmax_base(row_max[e / 2])));
    row_sum[e / 2] += acc_s[e];
}

template <int KIND, class S>
__global__ void __launch_bounds__(S::threads, S::ctas)
    prefill(const __grid_constant__ sm80_prefill_params a)
{
    constexpr int D = S::size;
    if constexpr (S::ctas * (S::smem + 1024) > SM80_SMEM_OF_SM) {
        __trap(); /* no GPU of this architecture launches it */
        return;
    }
    extern __shared__ __align__(128) char memory[];
    prefill_storage<S> &smem = *(prefill_storage<S> *)memory;
    const gpu_params &p = a.p;
    const gpu_run &run = smem.run;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const int first_row = warp * S::rows;
    /* The lane's rows and chunks for ldmatrix, as place_of lays them out; chunk 2 j of a row is at
     * the address of chunk 0 with j << 5 exclusive-ored. */
    const uint32_t v_lane = (lane & 15) * 128 + (((lane >> 4) ^ (lane & 7)) << 4);
    const uint32_t k_lane =
        ((lane & 7) + (lane >> 4) * 8) * 128 + ((((lane >> 3) & 1) ^ (lane & 7)) << 4);
    const uint32_t q_lane = shared_address(smem.q) + (first_row + (lane & 15)) * (D * 2) +
                            (((lane >> 4) ^ (lane & 7)) << 4);
    const uint32_t copy_to =
        S::codes ? 0 : place_of<S::chunks, S::tile>(first_copied<S>(), threadIdx.x % S::chunks);
    const int own_key =
        a.has_stretches ? first_copied<S>() : warp * S::copied + (lane & (S::copied - 1));
    const bool slow =
        p.problem.spans != nullptr || p.problem.tree != nullptr || p.problem.alibi != 0;
    wait_for_earlier_kernels();
    let_later_kernels_begin();
    const int32_t segments = p.schedule.header->segments, given = gridDim.x;
    gpu_run next;
    if (threadIdx.x == 0 && blockIdx.x < segments) {
        next = run_of_segment(p, segments - 1 - blockIdx.x);
    }
    int32_t index = blockIdx.x;
    while (index < segments) {
        if (threadIdx.x == 0) {
            smem.run = next;
            smem.rows[0] = p.k.data + next.head * p.k.head;
            smem.rows[1] = p.v.data + next.head * p.v.head;
            smem.table = p.problem.block_table + next.row_tile.table;
            smem.inner[0] = INT32_MIN;
            smem.inner[1] = INT32_MAX;
        }
        __syncthreads(); /* the run is written, and the previous one's tiles are read */
        const int32_t count = run.count;
        copy_queries<D, S::blocks>(p, run, first_row, shared_address(smem.q + first_row * D * 2));
        int32_t base = (run.row_tile.k0 & ~(S::tile - 1)) + run.tile * S::tile;
        key_place at;
        move_place(a, smem, true, base + own_key, at);
        auto copy = [&](int32_t tile, bool values) {
            copy_rows<S>(a, smem, at, base + tile * S::tile + own_key, values,
                         copy_to + shared_address(S::codes ? codes_at(smem, values)
                                                           : tile_at(smem, tile, values)));
        };
        copy(0, false);
        if (S::pairs) {
            copy(0, true);
            move_place(a, smem, false, base + S::tile + own_key, at);
        }
        const int4 bounds_now = bounds_of_warp<S::blocks>(p, run, first_row);
        if (lane == 0) {
            smem.bounds[warp] = bounds_now;
            atomicMax(&smem.inner[0], bounds_now.x);
            atomicMin(&smem.inner[1], bounds_now.y);
        }
        auto scale = [&]() {
            return p.problem.scale * cache_scale(p.k, run.head) * query_scale(p, run.head);
        };
        const bool folds = !slow && !(p.problem.soft_cap > 0.0f) && scale() >= SM80_LEAST_SCALE;
        const float factor = folds ? scale() * LOG2E : 1.0f;
        float acc_o[S::blocks][D / 8][4], row_max[S::blocks][2], row_sum[S::blocks][2];
#pragma unroll
        for (int b = 0; b < S::blocks; b++) {
            clear_acc(row_max[b], row_sum[b], acc_o[b]);
        }
#pragma unroll 1
        for (int32_t t = 0; t < count; t++) {
            const int32_t first_key = base + t * S::tile;
            bool nonfinite = false;
            /* The barrier before values are read. Values of tiles that some row sees in part are
             * searched: a probability of 0 may meet one that is not finite. */
            auto sync_values = [&]() {
                const bool known = !S::spreads || t > 0;
                if (!known) {
                    __syncthreads(); /* `inner` is written */
                }
                if (first_key < smem.inner[0] || first_key + S::tile - 1 > smem.inner[1]) {
                    __syncwarp(); /* the warp's copies are there */
                    nonfinite = __syncthreads_or(has_nonfinite_values<KIND, D, S::tile>(
                        tile_at(smem, t, true), warp * S::copied, S::copied, lane));
                } else if (known) {
                    __syncthreads();
                }
            };
            wait_for_copies();
            if (S::spreads) {
                sync_values(); /* the tile is there, and all warps have read the previous one */
            } else {
                __syncthreads(); /* the keys are there, and all warps have read the previous tile */
            }
            if constexpr (S::codes != 0) {
                if (t == 0 && p.q.dtype == ATTN_DTYPE_BF16) {
                    convert_queries<D, S::rows>(smem.q + first_row * D * 2);
                }
                widen_rows<S>(codes_at(smem, false), tile_at(smem, t, false));
                widen_rows<S>(codes_at(smem, true), tile_at(smem, t, true));
            }
            const int4 bounds = smem.bounds[warp];
            const bool sees = first_key <= bounds.w && first_key + S::tile > bounds.z;
            const bool apart = first_key < bounds.x || first_key + S::tile - 1 > bounds.y;
            const int32_t next_key = first_key + S::tile;
            const bool more = t + 1 < count;
            const bool spread = S::spreads && more && sees && a.has_stretches &&
                                next_key >= run.row_tile.k0 &&
                                next_key + S::tile <= run.row_tile.k1;
            const char *k_from = nullptr, *v_from = nullptr;
            if (spread) {
                k_from = row_of_place(a, smem, at, false);
                v_from = row_of_place(a, smem, at, true);
            } else if (!S::pairs) {
                copy(t, true);
            } else if (more) {
                copy(t + 1, false);
                copy(t + 1, true);
            }
            if (more) {
                move_place(a, smem, false, next_key + own_key + (S::pairs ? S::tile : 0), at);
            }
            const uint32_t to = copy_to + shared_address(tile_at(smem, t + 1, false));
            auto copy_between = [&](int i) { /* the products */
                                             const uint32_t place = place_of_copy<S>(to, i);
                                             copy16_if(spread, place,
                                                       further_row(k_from, a.strides[0].step, i));
                                             copy16_if(spread, place + S::half,
                                                       further_row(v_from, a.strides[1].step, i));
            };
            if constexpr (S::codes != 0) {
                sync_values(); /* the tile is widened */
            }
            if (!more && threadIdx.x == 0 && segments > given) {
                smem.taken = atomicAdd(&p.schedule.header->taken, 1);
            }
            float acc_s[S::blocks][S::tile / 8][4];
            if (sees) {
                const uint32_t keys = shared_address(tile_at(smem, t, false)) + k_lane;
#pragma unroll
                for (int b = 0; b < S::blocks; b++) {
#pragma unroll
                    for (int n = 0; n < S::tile / 8; n++) {
                        acc_s[b][n][0] = acc_s[b][n][1] = acc_s[b][n][2] = acc_s[b][n][3] = 0.0f;
                    }
                }
#pragma unroll
                for (int kk = 0; kk < D / 16; kk++) {
                    uint32_t query[S::blocks][4];
#pragma unroll
                    for (int b = 0; b < S::blocks; b++) {
                        load4(query[b],
                              (q_lane ^ ((kk & 3) << 5)) + (kk >> 2) * 128 + b * 16 * D * 2);
                    }
#pragma unroll
                    for (int n = 0; n < S::tile / 16; n++) {
                        uint32_t key[4];
                        load4(key,
                              (keys ^ ((kk & 3) << 5)) + (kk >> 2) * S::tile * 128 + n * 16 * 128);
#pragma unroll
                        for (int b = 0; b < S::blocks; b++) {
                            multiply<KIND>(acc_s[b][2 * n], query[b], key[0], key[1]);
                            multiply<KIND>(acc_s[b][2 * n + 1], query[b], key[2], key[3]);
                        }
                    }
                    if (S::spreads && kk % 2 == 0) {
#pragma unroll
                        for (int i = kk / 2 * S::group; i < (kk / 2 + 1) * S::group; i++) {
                            if (i < S::copies) {
                                copy_between(i);
                            }
                        }
                    }
                }
                int2 own = make_int2(0, 0);
                if (apart) {
                    own = bounds_of(p, run, first_row + own_row<S::blocks>());
                    own.x -= first_key, own.y -= first_key;
                }
#pragma unroll
                for (int b = 0; b < S::blocks; b++) {
                    if (!folds) {
                        cap_scores(p.problem.soft_cap, scale(), acc_s[b]);
                    }
                    if (slow && (apart || p.problem.alibi != 0)) {
                        score_block(p, run, first_row + 16 * b + (lane >> 2),
                                    first_key + (lane & 3) * 2, acc_s[b]);
                    } else if (apart) {
                        mask_scores(own, b, acc_s[b]);
                    }
                    raise_row_max(factor, acc_s[b], row_max[b], row_sum[b], acc_o[b]);
                }
            }
            if constexpr (!S::pairs) {
                wait_for_copies();
                sync_values(); /* the values are there, and all warps have read the keys */
                if (t + 1 < count) {
                    copy(t + 1, false);
                }
            }
            if (!sees) {
                continue;
            }
            const char *const values = tile_at(smem, t, true);
            if (apart && nonfinite) {
                const char *const stage = values - decode_shape<KIND, D>::half;
                const sm80_plane none = {};
#pragma unroll
                for (int b = 0; b < S::blocks; b++) {
#pragma unroll
                    for (int i = 0; i < S::tile / 2; i++) {
                        make_prob(factor, i & 3, row_max[b], row_sum[b], acc_s[b][i / 4]);
                    }
                    add_exactly<KIND, D, SM80_NO_SWAP, S::tile>(stage, none, 0, 0, lane, acc_s[b],
                                                                acc_o[b]);
                }
                continue;
            }
            /* Probabilities of the next 16 keys are made between the products of these. */
            constexpr int probs_of_step = S::blocks * 8, steps = D / 16;
            auto make = [&](int kk, int i) {
                make_prob(factor, i & 3, row_max[i / 8], row_sum[i / 8],
                          acc_s[i / 8][2 * kk + i % 8 / 4]);
            };
#pragma unroll
            for (int i = 0; i < probs_of_step; i++) {
                make(0, i);
            }
            const uint32_t v_tile = shared_address(values) + v_lane;
#pragma unroll
            for (int kk = 0; kk < S::tile / 16; kk++) {
                uint32_t probs[S::blocks][4];
#pragma unroll
                for (int b = 0; b < S::blocks; b++) {
                    const float(&p0)[4] = acc_s[b][2 * kk], (&p1)[4] = acc_s[b][2 * kk + 1];
                    probs[b][0] = pack2<KIND>(p0[0], p0[1]);
                    probs[b][1] = pack2<KIND>(p0[2], p0[3]);
                    probs[b][2] = pack2<KIND>(p1[0], p1[1]);
                    probs[b][3] = pack2<KIND>(p1[2], p1[3]);
                }
#pragma unroll
                for (int c = 0; c < steps; c++) {
                    uint32_t value[4];
                    load4_transposed(value, (v_tile ^ ((c & 3) << 5)) + (c >> 2) * S::tile * 128 +
                                                kk * 16 * 128);
#pragma unroll
                    for (int b = 0; b < S::blocks; b++) {
                        multiply<KIND>(acc_o[b][2 * c], probs[b], value[0], value[1]);
                        multiply<KIND>(acc_o[b][2 * c + 1], probs[b], value[2], value[3]);
                    }
#pragma unroll
                    for (int i = c * probs_of_step / steps;
                         i < (c + 1) * probs_of_step / steps && kk + 1 < S::tile / 16; i++) {
                        make(kk + 1, i);
                    }
                }
            }
        }
        next = {};
        if (threadIdx.x == 0 && segments > given && given + smem.taken < segments) {
            next = run_of_segment(p, segments - 1 - given - smem.taken);
        }
        const bool whole = S::items == SM80_PREFILL_FEW_ROWS || count == run.row_tile.num_tiles;
#pragma unroll
        for (int b = 0; b < S::blocks; b++) {
            row_sum[b][0] = acc_layout<SM80_NO_SWAP>::sum(row_sum[b][0]);
            row_sum[b][1] = acc_layout<SM80_NO_SWAP>::sum(row_sum[b][1]);
        }
        if (whole) {
            write_rows<KIND, D, S::blocks, S::codes != 0>(p, run, smem.q + first_row * D * 2,
                                                          first_row, row_max, row_sum, acc_o);
        } else {
            write_part<D, S::blocks>(run, part_at<D>(p, run.segment), first_row, row_max, row_sum,
                                     acc_o);
        }
        if (segments <= given) {
            break;
        }
        __syncthreads(); /* the next number is written, and all threads have read the run */
        index = given + smem.taken;
        if (smem.taken == segments - 1 && threadIdx.x == 0) {
            p.schedule.header->taken = 0; /* the last number */
        }
    }
}

/* With a NULL, only loads the kernel. */
template <int KIND, int D, int TILES, int ROWS>
static cudaError_t launch_prefill_shape(const sm80_prefill_params *a, cudaStream_t stream)
{
    using S = prefill_shape<D, TILES, ROWS>;
    constexpr int bytes = S::smem;
    if (a == nullptr) {
        int device = 0, most = 0;
        cudaError_t error = cudaGetDevice(&device);
        error =
            error ? error
                  : cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
        cudaFuncAttributes attributes;
        error = error ? error : cudaFuncGetAttributes(&attributes, prefill_merge<KIND, D>);
        return error || most < bytes
                   ? error
                   : cudaFuncSetAttribute(prefill<KIND, S>,
                                          cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    }
    const bool overlaps = a->overlaps != 0;
    cudaError_t error =
        launch_kernel(prefill<KIND, S>, *a, (unsigned)a->ctas, S::threads, bytes, stream, overlaps);
    return error || !a->cuts ? error
                             : launch_kernel(prefill_merge<KIND, D>, *a, (unsigned)a->ctas * 2, 128,
                                             0, stream, overlaps);
}

template <int KIND, int D, int TILES>
static cudaError_t launch_prefill_rows(const sm80_prefill_params *a, cudaStream_t stream)
{
    if constexpr (D <= 128) {
        if (a == nullptr || a->p.schedule.tile_rows == SM80_PREFILL_FEW_ROWS) {
            cudaError_t error =
                launch_prefill_shape<KIND, D, TILES, SM80_PREFILL_FEW_ROWS>(a, stream);
            if (error || a != nullptr) {
                return error;
            }
        }
    }
    return launch_prefill_shape<KIND, D, TILES, SM80_PREFILL_ROWS>(a, stream);
}

template <int KIND, int D>
static cudaError_t launch_prefill_size(const sm80_prefill_params *a, int tiles, cudaStream_t stream)
{
    if constexpr (KIND >= KIND_E4M3) {
        constexpr int codes = KIND == KIND_E4M3 ? SM80_PREFILL_E4M3 : SM80_PREFILL_E5M2;
        return launch_prefill_shape<KIND_F16, D, codes, SM80_PREFILL_ROWS>(a, stream);
    } else {
        if (tiles == SM80_PREFILL_PAIRS) {
            return launch_prefill_rows<KIND, D, SM80_PREFILL_PAIRS>(a, stream);
        }
        if (D == 64 || tiles == SM80_PREFILL_NARROW_PAIRS) { /* 64 dims fit into every GPU */
            return launch_prefill_rows<KIND, D, SM80_PREFILL_NARROW_PAIRS>(a, stream);
        }
        if constexpr (D > 64) {
            return launch_prefill_rows<KIND, D, SM80_PREFILL_NARROW>(a, stream);
        }
        return cudaErrorInvalidValue;
    }
}

template <int KIND>
static cudaError_t launch_prefill_kind(const sm80_prefill_params *a, cudaStream_t stream)
{
    if (a == nullptr) {
        cudaError_t error = cudaSuccess;
        for (int tiles = 0; tiles <= SM80_PREFILL_NARROW && !error; tiles++) {
            error = launch_prefill_size<KIND, 64>(a, tiles, stream);
            error = error ? error : launch_prefill_size<KIND, 128>(a, tiles, stream);
            error = error ? error : launch_prefill_size<KIND, 256>(a, tiles, stream);
        }
        return error;
    }
    const int32_t size = max(a->p.problem.head_size, a->p.problem.head_size_v);
    return size <= 64    ? launch_prefill_size<KIND, 64>(a, a->tiles, stream)
           : size <= 128 ? launch_prefill_size<KIND, 128>(a, a->tiles, stream)
                         : launch_prefill_size<KIND, 256>(a, a->tiles, stream);
}

#endif
