/* SPDX-License-Identifier: Apache-2.0 */
/* The attend kernel. CTAs of 4 consumer warps and 1 or 2 producer warps process segments of the
 * plan's stream of tiles. An item is a tile of 16 rows (query, head of the group) of one KV head
 * with all of its keys; a run is the part of an item in one segment; a stage holds one tile of
 * keys. Each warp takes a part of a tile's keys, and the warps' results are combined at the end of
 * a run. A tile of n keys: 2 * n * D elements read, 64 * n * D FLOPs. Decodes are bound by memory.
 */
#ifndef CUDA_FLASH_SM80_ATTEND_CUH
#define CUDA_FLASH_SM80_ATTEND_CUH

#include "gpu/cuda/launch.cuh"
#include "sm80_4bit_4rows.cuh"
#include "sm80_head512.cuh"

template <int KIND, int D, int SWAP>
GPU_INLINE void consumer(const sm80_params &a, shared_storage<KIND, D> &smem)
{
    const gpu_params &p = a.p;
    using S = decode_shape<KIND, D>;
    using A = acc_layout<SWAP>;
    constexpr int subs = S::tile / 64, own = 16 * subs; /* keys of a warp */
    constexpr int num_scores = SWAP ? subs : 2 * subs, num_sums = SWAP ? D / 16 : D / 8;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, first = warp * own;
    const bool slow =
        p.problem.spans != nullptr || p.problem.tree != nullptr || p.problem.alibi != 0;
    const bool from_bf16 = p.q.dtype == ATTN_DTYPE_BF16;
    const bool k_scaled = S::bytes && p.k.form == GPU_ROW_SCALED;
    const bool v_scaled = S::hadamard || S::steps || (S::bytes && p.v.form == GPU_ROW_SCALED);
    /* a Hadamard-transformed f16 query needs a second f16 for its rounding error */
    const bool has_rest = S::hadamard && p.q.dtype == ATTN_DTYPE_F16;
    char *rest = (char *)terms_of(smem) + SM80_TERMS_SMEM;
    float acc_o[num_sums][4], row_max[2], row_sum[2], scale = 0.0f;
    value_scaling sums = {};
    row_terms terms;
    lane_queries<S::packed ? D : 32, SWAP> queries;
    const lane_codes codes = find_codes<D>(a.planes, first, lane);
    row_bounds rows;
    pipeline_state place;
    int32_t left = 0;      /* remaining tiles of the run */
    int32_t tile_base = 0; /* first key of the tile */
    const gpu_run *run = nullptr;
    char *sq = smem.q[0];
    bool high_rows = true;
    clear_acc(row_max, row_sum, acc_o);
    if constexpr (S::table) {
        write_levels_of(p.k.bits, levels_at(smem));
    }
#pragma unroll 1
    for (;;) {
        barrier_wait(shared_address(&smem.full[place.stage]), place.phase);
        if (left == 0) {
            int32_t slot = smem.run_of_stage[place.stage];
            if (slot == NO_RUN) {
                break;
            }
            run = &smem.runs[slot];
            left = run->count;
            tile_base = (run->row_tile.k0 & ~(S::tile - 1)) + run->tile * S::tile;
            sq = smem.q[place.q_slot];
            rows = load_row_bounds(p, *run, A::row(lane, 0), SWAP ? 1 : 8, smem.all_see[warp]);
            high_rows = SWAP || run->row_tile.num_rows > 8;
            scale = score_scale(p, run->head);
            if constexpr (S::prepared) {
                prepare_query<KIND, D>(p, *run, sq, has_rest ? rest : nullptr, terms_of(smem));
                terms = load_terms(terms_of(smem), A::row(lane, 0), A::row(lane, 1), scale);
                if constexpr (S::packed) {
                    queries.load(sq, lane);
                }
            } else if (S::bytes && from_bf16) {
                convert_query(sq, S::q_bytes);
            }
        }
        char *at = stage_at(smem, place.stage);
        /* from the lane's first key on */
        const float *k_scales = (const float *)(at + 2 * S::half) + first + A::first_key(lane);
        const float *v_scales = k_scales + S::tile;
        float acc_s[num_scores][4];
#pragma unroll
        for (int n = 0; n < num_scores; n++) {
            acc_s[n][0] = acc_s[n][1] = acc_s[n][2] = acc_s[n][3] = 0.0f;
        }
        const sm80_plane k_plane = plane_of_head<KIND>(a, 0, run->head);
        float factors[num_scores][2]; /* KIND_LEVELS: the factors of the lane's keys */
        if constexpr (KIND == KIND_LEVELS) {
            constexpr int each = SWAP ? 1 : 2; /* two at a time would spill */
#pragma unroll
            for (int sub = 0; sub < subs; sub++) {
                dot_levels<D, SWAP, 1>(at, levels_at(smem), k_plane, p.k.bits, sq, rest, has_rest,
                                       queries, first + sub * 16, lane, high_rows,
                                       &acc_s[sub * each], &factors[sub * each]);
            }
        } else if constexpr (KIND == KIND_K8V4) {
            dot_e4m3_rows<D, SWAP, subs>(at, k_plane, sq, queries, first, lane, high_rows, acc_s);
        } else if constexpr (S::packed) {
            dot_codes<KIND, D, SWAP, subs>(at, at + codes.key, k_plane, sq, rest, has_rest, queries,
                                           first, lane, high_rows, acc_s);
        } else if constexpr (KIND == KIND_F32 && SWAP) {
#pragma unroll
            for (int sub = 0; sub < subs; sub++) {
                if (run->row_tile.num_rows <= 4) {
                    dot_floats_8rows<D, S::tile, 4>(at, sq, first + sub * 16, lane, acc_s[sub]);
                } else {
                    dot_floats_8rows<D, S::tile, 8>(at, sq, first + sub * 16, lane, acc_s[sub]);
                }
            }
        } else if constexpr (KIND == KIND_F32) {
            dot_floats<D, S::tile, subs>(at, sq, first, lane, acc_s);
        } else {
#pragma unroll
            for (int kk = 0; kk < D / 16; kk++) {
                uint32_t query[4];
                load_query<KIND, D>(sq, kk, lane, query);
#pragma unroll
                for (int sub = 0; sub < subs; sub++) {
                    dot_step<KIND, D, S::tile, SWAP>(at, first + sub * 16, kk, lane, query,
                                                     &acc_s[SWAP ? sub : 2 * sub]);
                }
            }
        }
        const sm80_plane v_plane = plane_of_head<KIND>(a, 1, run->head);
        int32_t base = tile_base + first;
        int view = view_of_tile(p, *run, rows, smem.all_see[warp], base, base + 16 * subs - 1);
        if ((a.mapped || S::packed) && view != SEES_ALL &&
            (tile_base < run->row_tile.k0 || tile_base + S::tile > run->row_tile.k1)) {
            int32_t low = run->row_tile.k0 - tile_base, high = run->row_tile.k1 - tile_base;
            if constexpr (S::packed) {
                clear_scales<KIND, D>(at, v_plane, first, own, low, high, lane);
            } else {
                clear_values<KIND, D, S::tile>(at + S::half, warp * own, own, low, high, lane);
                for (int key = warp * own + lane; v_scaled && key < (warp + 1) * own; key += 32) {
                    if (key < low || key >= high) {
                        ((float *)(at + 2 * S::half))[S::tile + key] = 0.0f;
                    }
                }
            }
            __syncwarp(); /* the warp reads only its own keys */
        }
        if constexpr (S::prepared) {
            scale_scores<KIND, SWAP>(terms, k_scales, acc_s);
        }
        if constexpr (KIND == KIND_LEVELS) {
#pragma unroll
            for (int i = 0; i < 4 * num_scores; i++) {
                acc_s[i / 4][i % 4] *= factors[i / 4][SWAP ? i % 4 >> 1 : i & 1];
            }
        }
        if (k_scaled) {
#pragma unroll
            for (int n = 0; n < num_scores; n++) {
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    acc_s[n][e] *= k_scales[A::key(n, e)];
                }
            }
        }
        score_tile<KIND == KIND_F32, S::prepared, SWAP>(p, *run, rows, A::row(lane, 0), scale, slow,
                                                        high_rows, view == SEES_ALL,
                                                        base + A::first_key(lane), acc_s);
        bool exactly = false; /* int8 and int4 codes are always finite */
        if constexpr (KIND == KIND_NVFP4) {
            exactly = view == SEES_APART && has_nan_scales<D>(at, v_plane, first, 16 * subs, lane);
        } else if constexpr (!S::prepared) {
            exactly = view == SEES_APART &&
                      has_nonfinite_values<KIND, D, S::tile>(at + S::half, first, 16 * subs, lane);
        }
        online_softmax<SWAP>(high_rows, acc_s, row_max, row_sum, sums.zero_sum, acc_o);
        if (v_scaled) {
            bool apart = view == SEES_APART;
            float scales[num_scores][2];
            load_value_scales<KIND, SWAP>(at, v_scales, v_plane, first, lane, apart, acc_s,
                                          sums.zero_sum, scales);
            scale_probs<KIND, SWAP>(scales, apart, acc_s, sums, acc_o);
        }
        if (exactly) {
            add_exactly<KIND, D, SWAP, S::tile>(at, v_plane, first, 0, lane, acc_s, acc_o);
        } else {
#pragma unroll
            for (int sub = 0; sub < subs; sub++) {
                const int key = first + sub * 16;
                const float(&p0)[4] = acc_s[SWAP ? sub : 2 * sub],
                      (&p1)[4] = acc_s[SWAP ? sub : 2 * sub + 1];
                if constexpr (S::packed) {
                    add_codes<KIND, D, SWAP>(at, at + codes.value + sub * 16 * v_plane.pitch,
                                             v_plane, p.v.bits, key, lane,
                                             packed_probs<SWAP>(p0, p1), acc_o, sums.zero_sum);
                } else if constexpr (KIND == KIND_F32 && SWAP) {
                    add_floats_8rows<D, S::tile>(at + S::half, key, lane, p0, acc_o);
                } else if constexpr (KIND == KIND_F32) {
                    add_floats<D, S::tile>(at + S::half, key, lane, p0, p1, acc_o);
                } else if constexpr (S::bytes) {
                    add_bytes<KIND, D, S::tile, SWAP>(at + S::half, key, lane, p0, p1, acc_o,
                                                      sums.zero_sum);
                } else {
                    add_values<KIND, D, S::tile>(at + S::half, key, lane, p0, p1, acc_o);
                }
            }
        }
        tile_base += S::tile;
        left--;
        end_tile<KIND, D, SWAP>(a, smem, *run, left == 0, v_scaled, place, row_max, row_sum, sums,
                                acc_o);
    }
}

template <int KIND, int D, int SWAP>
__global__ void __launch_bounds__(decode_shape<KIND, D>::threads,
                                  SWAP ? decode_shape<KIND, D>::swap_ctas
                                       : decode_shape<KIND, D>::ctas)
    attend(const __grid_constant__ sm80_params a)
{
    using S = decode_shape<KIND, D>;
    extern __shared__ __align__(1024) char memory[];
    shared_storage<KIND, D> &smem = *(shared_storage<KIND, D> *)memory;
    if (threadIdx.x == 0) {
        for (int i = 0; i < a.stages; i++) {
            barrier_init(shared_address(&smem.full[i]), S::threads - 128 + 1);
            barrier_init(shared_address(&smem.empty[i]), 128);
        }
        for (int i = 0; i < S::q_buffers; i++) {
            barrier_init(shared_address(&smem.q_empty[i]), 128);
        }
    }
    if (threadIdx.x >= 128 && a.mapped) {
        fetch_map(threadIdx.x < 160 ? &a.k_map : &a.v_map);
    }
    if (threadIdx.x < 128 && a.lists.entries != nullptr) {
        fetch_list(a);
    }
    __syncthreads(); /* the barriers are initialized */
    if (a.late == 0) {
        wait_for_earlier_kernels();
    }
    let_later_kernels_begin();
    if (threadIdx.x >= 128) {
        producer<KIND, D>(a, smem, threadIdx.x - 128).work();
        if (a.late > 0) {
            wait_for_earlier_kernels();
        }
    } else if constexpr (S::large_head) {
        consumer_head512<KIND, D>(a, smem);
    } else if constexpr (SWAP == SM80_SWAP4) {
        consumer_4rows<KIND, D>(a, smem);
    } else {
        consumer<KIND, D, SWAP>(a, smem);
    }
}

/* With a NULL, only loads the kernel. */
template <int KIND, int D, int SWAP = SM80_NO_SWAP>
static cudaError_t launch_shape(const sm80_params *a, cudaStream_t stream)
{
    using S = decode_shape<KIND, D>;
    if (a == nullptr) {
        int device = 0, most = 0;
        cudaError_t error = cudaGetDevice(&device);
        error =
            error ? error
                  : cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
        if (S::table && !error) { /* the table's place counts on it */
            int reserved = 0;
            error =
                cudaDeviceGetAttribute(&reserved, cudaDevAttrReservedSharedMemoryPerBlock, device);
            error = error == cudaSuccess && reserved != 1024 ? cudaErrorNotSupported : error;
        }
        return error ? error
                     : cudaFuncSetAttribute(attend<KIND, D, SWAP>,
                                            cudaFuncAttributeMaxDynamicSharedMemorySize, most);
    }
    return launch_kernel(attend<KIND, D, SWAP>, *a, (unsigned)(a->p.schedule.ctas + a->late),
                         S::threads,
                         S::q_buffers * S::q_bytes + S::fixed + a->stages * S::stage +
                             (a->lists.entries != nullptr ? SM80_LISTS_SMEM : 0),
                         stream, a->overlaps != 0);
}

/* Which kernels a kind has: `swap` and `swap4` swapped operands, `wide` heads over 128 and `widest`
 * over 256 dims. */
template <int KIND> struct kind_shapes {
    static constexpr bool widest = KIND >= KIND_BF16 && KIND <= KIND_E5M2;
    static constexpr bool swap4 = KIND >= KIND_INT4 && KIND <= KIND_LEVELS;
    static constexpr bool swap = KIND >= KIND_E4M3 || KIND == KIND_F32, wide = KIND != KIND_F32;
};

/* Launches kernels with and without swapped operands. */
template <int KIND, int D>
static cudaError_t launch_size(const sm80_params *a, int swap, cudaStream_t stream)
{
    if constexpr (kind_shapes<KIND>::swap4 && D <= 128) {
        if (swap == SM80_SWAP4) {
            return launch_shape<KIND, D, SM80_SWAP4>(a, stream);
        }
    }
    if constexpr (kind_shapes<KIND>::swap) {
        if (swap) {
            return launch_shape<KIND, D, SM80_SWAP8>(a, stream);
        }
    }
    return launch_shape<KIND, D>(a, stream);
}

template <int KIND> static cudaError_t load_kind()
{
    cudaError_t error = cudaSuccess;
    for (int swap = 0; swap <= SM80_SWAP4; swap++) {
        error = error ? error : launch_size<KIND, 64>(nullptr, swap, nullptr);
        error = error ? error : launch_size<KIND, 128>(nullptr, swap, nullptr);
        if constexpr (kind_shapes<KIND>::wide) {
            error = error ? error : launch_size<KIND, 256>(nullptr, swap, nullptr);
        }
    }
    if constexpr (kind_shapes<KIND>::widest) {
        error = error ? error : launch_shape<KIND, 512>(nullptr, nullptr);
    }
    return error;
}

template <int KIND> static cudaError_t launch_kind(const sm80_params *a, cudaStream_t stream)
{
    if (a == nullptr) {
        return load_kind<KIND>();
    }
    const gpu_problem &p = a->p.problem;
    const int32_t d = max(p.head_size, p.head_size_v);
    if (d > 256) {
        if constexpr (kind_shapes<KIND>::widest) {
            return launch_shape<KIND, 512>(a, stream);
        }
        return cudaErrorInvalidValue;
    }
    if (d > 128) {
        if constexpr (kind_shapes<KIND>::wide) {
            return launch_size<KIND, 256>(a, a->swap, stream);
        }
        return cudaErrorInvalidValue;
    }
    return d <= 64 ? launch_size<KIND, 64>(a, a->swap, stream)
                   : launch_size<KIND, 128>(a, a->swap, stream);
}

#endif
