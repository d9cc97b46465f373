/* SPDX-License-Identifier: Apache-2.0 */
/* Sizes and shared memory of a prefill CTA: a producer warp group and two or three consumer warp
 * groups. */
#ifndef CUDA_FLASH_SM90_SHAPE_CUH
#define CUDA_FLASH_SM90_SHAPE_CUH

#include "cuda_flash/ptx/sm90_copy.cuh"
#include "gpu/device/softmax.h"
#include "gpu/device/visible.h"
#include "sm90_prefill.h"

/* GROUPED: tiles lie in groups of 8 rows with all their columns, else column by column. TERMS: the
 * scores' terms (enum prefill_terms) or PREFILL_ANY. SCALES: enum prefill_scales. */
template <int KIND_, int D_, int DV_, int KEYS_, int QUERIES_, bool GROUPED, int TERMS,
          int SCALES = PREFILL_UNSCALED, int GROUPS = 2, bool EXACT = false>
struct prefill_shape {
    static constexpr int kind = KIND_, d = D_, dv = DV_, keys = KEYS_, terms = TERMS,
                         scales = SCALES;
    static constexpr int query_buffers = QUERIES_;
    /* With one buffer each warp group has its own barriers for its rows' queries: its next ones are
     * copied while the other group still reads its own. */
    static constexpr bool q_by_group = QUERIES_ == 1 && D_ >= 192 && D_ <= 256;
    static constexpr int q_barriers = q_by_group ? GROUPS : QUERIES_;
    static constexpr bool grouped = GROUPED;
    /* consumer warp groups, 64 rows each */
    static constexpr int groups = GROUPS, rows = 64 * groups, warps = 4 * groups,
                         threads = 128 + 128 * groups;
    static constexpr bool three_groups = GROUPS == 3; /* sm90_head64.cuh */
    /* Heads over 256: an item has all dims of the queries and keys and 256 of the values, and an
     * item of the schedule is two. A tile fills K and V; its keys come in parts of 128 dims with
     * barriers of their own, so that a part is copied as soon as both warp groups have multiplied
     * the previous tile's. */
    static constexpr bool wide = D_ > 256;
    /* consumer_by_item */
    static constexpr bool by_item = wide || EXACT;
    /* cut items of 128 dims have tiles of 64 keys; four stages fit */
    static constexpr bool small_tiles = D_ == 128 && KEYS_ == 64;
    static constexpr int stages = wide ? 1 : small_tiles ? 2 * PREFILL_STAGES : PREFILL_STAGES;
    static_assert(!small_tiles || (!by_item && !three_groups), "their loops have two stages");
    static constexpr int k_parts = wide ? 4 : 1;
    static constexpr bool fp8 = SCALES == PREFILL_IN_FP8;
    static constexpr bool by_head = fp8 || SCALES == PREFILL_BY_HEAD;
    static constexpr int q_row = d * (fp8 ? 1 : 2), q_bytes = rows * q_row;
    static constexpr int k_bytes = keys * q_row, v_bytes = keys * dv * 2;
    /* the previous item's epilogue runs after Q K^T of the next item has started, where registers
     * suffice */
    static constexpr bool epilogue_after_qk = DV_ <= 128 && TERMS != PREFILL_ANY;
    /* row_max is a reference that is seldom updated (lazy_update_row_max); f16 lacks the exponent
     * range. Linear ALiBi decreases from tile to tile, since tiles go from the last to the first */
    static constexpr bool lazy_rescale =
        KIND_ == KIND_BF16 && !EXACT && (TERMS & ~(PREFILL_CAPPED | PREFILL_LINEAR)) == 0;
    /* inner tiles wait for P V after their exponentials (finish_pv) */
    static constexpr bool pv_waits_late =
        (lazy_rescale &&
         (DV_ == 64 || SCALES == PREFILL_IN_FP8 || (DV_ == 128 && TERMS == PREFILL_CAPPED))) ||
        (TERMS == PREFILL_LINEAR && DV_ > 128);
    /* inner tiles compute linear ALiBi as part of Q K^T (prefill_ramp), where registers suffice;
     * bytes of the table of key positions */
    static constexpr bool ramps = TERMS == PREFILL_LINEAR && DV_ <= 128;
    static constexpr int ramp_bytes = ramps ? KEYS_ * 16 + 128 : 16;
    /* inner tiles have a loop of their own, where registers suffice */
    static constexpr bool has_inner_loop =
        TERMS != PREFILL_ANY || (DV_ <= 128 && SCALES == PREFILL_UNSCALED);
    /* edge tiles compute only the visible half, where registers suffice */
    static constexpr bool half_tiles = KEYS_ == 128 && has_inner_loop &&
                                       (TERMS == 0 || D_ == DV_) && TERMS != PREFILL_ANY &&
                                       SCALES != PREFILL_BY_KEY;
    /* dims of an output row that are staged in shared memory at a time, whether TMA stores them,
     * and how 8 rows avoid bank conflicts: by the swizzle or by 16 bytes of padding
     * (out_smem_offset) */
    static constexpr int out_dims = d == dv && d > 64 && SCALES != PREFILL_BY_KEY ? 128 : 64;
    static constexpr bool boxes_rows = out_dims == DV_ && TERMS != PREFILL_ANY && !three_groups;
    static constexpr bool swizzles = boxes_rows || ramps;
    static constexpr int out_pitch = out_dims * 2 + (swizzles ? 0 : 16);
    /* bytes of staging memory of a warp; where there is no room, registers are written directly */
    static constexpr int out_bytes = wide ? 16 : 16 * out_pitch;
    /* packed results reuse the registers of acc_o; in f16 this makes ptxas serialize wgmma (C7511)
     */
    static constexpr bool packs_in_place =
        KIND_ == KIND_BF16 && TERMS != PREFILL_ANY && !three_groups;
    /* key scales of a tile */
    static constexpr int num_scales = SCALES == PREFILL_BY_KEY ? keys : 4;
    /* items may be cut into parts, where registers suffice */
    static constexpr bool cuts = rows == PREFILL_ROWS && DV_ <= 128 && !EXACT &&
                                 (TERMS != PREFILL_ANY || SCALES != PREFILL_BY_KEY);
    /* quantized outputs, where registers suffice */
    static constexpr bool codes = DV_ <= 128 ? TERMS != PREFILL_ANY || SCALES == PREFILL_UNSCALED
                                             : TERMS == 0 && SCALES != PREFILL_BY_KEY && !wide;
    /* registers of a thread; together no more than the CTA starts with */
    static constexpr int producer_registers = groups == 2 ? 40 : 32;
    static constexpr int consumer_registers = groups == 2 ? 232 : 160;
    static_assert(producer_registers + groups * consumer_registers <=
                      (groups + 1) * (65536 / threads / 8 * 8),
                  "registers of a CTA");
    /* bytes between groups of 8 rows of a tile, and between its columns of 64 dims */
    static constexpr int k_group = GROUPED ? d * 16 : 1024, v_group = GROUPED ? dv * 16 : 1024;
    static constexpr int column = GROUPED ? 1024 : keys * 128;
    static_assert(q_row % 128 == 0 && dv % 64 == 0, "columns of 128 bytes");
    static_assert((keys & (keys - 1)) == 0, "tiles are aligned to their size");
};

/* Whether scores have a term; a constant in all kernels except PREFILL_ANY. */
template <class S> GPU_INLINE bool has_term(const prefill_params &a, int term)
{
    return ((S::terms == PREFILL_ANY ? a.terms : S::terms) & term) != 0;
}

/* A row's query, counted from its item's first, and its head in the group. */
struct prefill_row {
    int32_t query, head;
};

GPU_INLINE prefill_row split_row(const prefill_params &a, int32_t row)
{
    int32_t query = row * a.group_inverse >> 16;
    return {query, row - query * a.p.problem.group};
}

template <class S> struct prefill_shared {
    alignas(1024) char q[S::query_buffers][S::q_bytes];
    alignas(1024) char k[S::stages][S::k_bytes];
    alignas(1024) char v[S::stages][S::v_bytes];
    alignas(1024) char out[S::warps][S::out_bytes];
    alignas(128) char ramp[S::ramp_bytes];
    float4 prev_rows[S::three_groups ? S::warps * 32
                                     : 1]; /* a lane's row_max and row_sum of the previous item */
    alignas(16) float key_scale[S::stages][S::num_scales];
    alignas(16) prefill_item items[PREFILL_SLOTS];
    uint64_t q_full[S::q_barriers], q_empty[S::q_barriers];
    /* part p of a stage: [stage * k_parts + p] */
    uint64_t k_full[S::stages * S::k_parts], k_empty[S::stages * S::k_parts];
    uint64_t v_full[S::stages], v_empty[S::stages];
    uint64_t item_full[PREFILL_SLOTS], item_empty[PREFILL_SLOTS], item_wanted;
    uint64_t first_scores; /* the first warp group has its scores; then the other */
};

/* A position in a ring of COUNT stages and the parity of its round. */
template <int COUNT> struct ring_place {
    int at = 0, parity = 0;
    __device__ __forceinline__ void step()
    {
        at = at + 1 == COUNT ? 0 : at + 1;
        parity ^= at == 0;
    }
};

/* Whether a box has one warp group's queries; else it has all of an item's. */
template <class S> GPU_INLINE bool boxes_by_group(const prefill_params &a)
{
    return a.query_bytes * S::groups == S::q_bytes;
}

/* The index in q_empty of a warp group and a buffer of queries, and the index in q_full. */
template <class S> GPU_INLINE int q_empty_of(int buffer, int group)
{
    return S::q_by_group ? group : buffer;
}

template <class S> GPU_INLINE int q_full_of(const prefill_params &a, int buffer, int group)
{
    return !S::q_by_group ? buffer : boxes_by_group<S>(a) ? group : 0;
}

/* The first dim of an item's values, and their number. */
template <class S> GPU_INLINE int32_t first_dim(const prefill_item &item)
{
    return S::wide ? item.part * S::dv : 0;
}

template <class S>
GPU_INLINE int32_t dims_of_item(const prefill_params &a, const prefill_item &item)
{
    return S::wide ? min(a.p.problem.head_size_v - first_dim<S>(item), S::dv)
                   : a.p.problem.head_size_v;
}

/* The first key of an item's tile `t`. */
GPU_INLINE int32_t tile_base(const prefill_item &item, int32_t t, int keys)
{
    return (item.row_tile.k0 & ~(keys - 1)) + t * keys;
}

/* The scales of the item's keys, from its request's first key on. */
GPU_INLINE const float *key_scales_of(const prefill_params &a, const prefill_item &item)
{
    return a.key_scale + (item.head - a.first_head) * a.copied_rows + item.row_tile.key_start;
}

#endif
