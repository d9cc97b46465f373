/* SPDX-License-Identifier: Apache-2.0 */
/* Sizes and shared memory of a prefill CTA: a warp group that copies and two or three that compute.
 */
#ifndef CUDA_FLASH_SM90_SHAPE_CUH
#define CUDA_FLASH_SM90_SHAPE_CUH

#include "cuda_flash/ptx/sm90_copy.cuh"
#include "gpu/device/softmax.h"
#include "gpu/device/visible.h"
#include "sm90_prefill.h"

/* GROUPED: tiles lie in groups of 8 rows with all their columns, else column by column. TERMS: of
 * enum prefill_terms, those that scores have; or PREFILL_ANY. SCALES: of enum prefill_scales. */
template <int KIND_, int D_, int DV_, int KEYS_, int QUERIES_, bool GROUPED, int TERMS,
          int SCALES = PREFILL_UNSCALED, int GROUPS = 2>
struct prefill_shape {
    static constexpr int kind = KIND_, d = D_, dv = DV_, keys = KEYS_, terms = TERMS,
                         scales = SCALES;
    static constexpr int query_buffers = QUERIES_;
    static constexpr bool grouped = GROUPED;
    /* warp groups that compute, of 64 rows each */
    static constexpr int groups = GROUPS, rows = 64 * groups, warps = 4 * groups,
                         threads = 128 + 128 * groups;
    static constexpr bool wide = GROUPS == 3; /* sm90_head64.cuh */
    static constexpr bool fp8 = SCALES == PREFILL_IN_FP8;
    static constexpr bool by_head = fp8 || SCALES == PREFILL_BY_HEAD;
    static constexpr int q_row = d * (fp8 ? 1 : 2), q_bytes = rows * q_row;
    static constexpr int k_bytes = keys * q_row, v_bytes = keys * dv * 2;
    /* an item's end waits until the next scores have begun, where there are registers for both */
    static constexpr bool early = DV_ <= 128 && TERMS != PREFILL_ANY;
    /* rows' bases seldom move (move_bases): f16 has not the exponents for it. Linear ALiBi falls
     * from tile to tile, since they are walked from the last on */
    static constexpr bool steady =
        KIND_ == KIND_BF16 && (TERMS & ~(PREFILL_CAPPED | PREFILL_LINEAR)) == 0;
    /* inner tiles wait for products of values behind their exponentials (leave_values) */
    static constexpr bool waits_behind =
        (steady && (DV_ == 64 || (DV_ == 128 && TERMS == PREFILL_CAPPED))) ||
        (TERMS == PREFILL_LINEAR && DV_ > 128);
    /* linear ALiBi comes out of the products of inner tiles (prefill_ramp), where there are
     * registers for it; bytes of the table of keys' places in a tile */
    static constexpr bool ramps = TERMS == PREFILL_LINEAR && DV_ <= 128;
    static constexpr int ramp_bytes = ramps ? KEYS_ * 16 + 128 : 16;
    /* loops of their own for inner tiles, where there are registers for them */
    static constexpr bool walks =
        TERMS != PREFILL_ANY || (DV_ <= 128 && SCALES == PREFILL_UNSCALED);
    /* of tiles at edges only the half that rows see is weighed, where there are registers for it */
    static constexpr bool halves = KEYS_ == 128 && walks && (TERMS == 0 || D_ == DV_) &&
                                   TERMS != PREFILL_ANY && SCALES != PREFILL_BY_KEY;
    /* dims of an output row that wait in shared memory at a time, whether they can leave it as
     * boxes, and how 8 rows lie in different banks there: swizzled, or by 16 bytes more
     * (place_of_out) */
    static constexpr int out_dims = d == dv && d > 64 && SCALES != PREFILL_BY_KEY ? 128 : 64;
    static constexpr bool boxes_rows = out_dims == DV_ && TERMS != PREFILL_ANY && !wide;
    static constexpr bool swizzles = boxes_rows || ramps;
    static constexpr int out_pitch = out_dims * 2 + (swizzles ? 0 : 16);
    /* packed numbers take the place of sums; with f16 ptxas serialises all wgmma then (C7511) */
    static constexpr bool packs_in_place = KIND_ == KIND_BF16 && TERMS != PREFILL_ANY && !wide;
    /* of a tile, where keys have one each */
    static constexpr int num_scales = SCALES == PREFILL_BY_KEY ? keys : 4;
    /* items may be parts, likewise */
    static constexpr bool cuts =
        rows == PREFILL_ROWS && DV_ <= 128 && (TERMS != PREFILL_ANY || SCALES != PREFILL_BY_KEY);
    /* outputs that are codes, where there are registers for them */
    static constexpr bool codes = DV_ <= 128 ? TERMS != PREFILL_ANY || SCALES == PREFILL_UNSCALED
                                             : TERMS == 0 && SCALES != PREFILL_BY_KEY;
    /* of a thread; as many of each as there are for all when the kernel begins */
    static constexpr int copy_registers = groups == 2 ? 40 : 32;
    static constexpr int compute_registers = groups == 2 ? 232 : 160;
    static_assert(copy_registers + groups * compute_registers <=
                      (groups + 1) * (65536 / threads / 8 * 8),
                  "registers of a CTA");
    /* bytes between groups of 8 rows of a tile, and between its columns of 64 dims */
    static constexpr int k_group = GROUPED ? d * 16 : 1024, v_group = GROUPED ? dv * 16 : 1024;
    static constexpr int column = GROUPED ? 1024 : keys * 128;
    static_assert(q_row % 128 == 0 && dv % 64 == 0, "columns of 128 bytes");
    static_assert((keys & (keys - 1)) == 0, "tiles are aligned to their size");
};

/* Whether scores have a term: known to the compiler but in the kernel for any terms. */
template <class S>
static __device__ __forceinline__ bool has_term(const prefill_params &a, int term)
{
    return ((S::terms == PREFILL_ANY ? a.terms : S::terms) & term) != 0;
}

/* Keys or tiles first .. end - 1. */
struct prefill_range {
    int32_t first, end;
};

/* The query of a row, counted from its item's first, and its head in the group. */
struct prefill_row {
    int32_t query, head;
};

static __device__ __forceinline__ prefill_row split_row(const prefill_params &a, int32_t row)
{
    int32_t query = row * a.group_inverse >> 16;
    return {query, row - query * a.p.problem.group};
}

template <class S> struct prefill_shared {
    alignas(1024) char q[S::query_buffers][S::q_bytes];
    alignas(1024) char k[PREFILL_STAGES][S::k_bytes];
    alignas(1024) char v[PREFILL_STAGES][S::v_bytes];
    alignas(1024) char out[S::warps][16 * S::out_pitch];
    alignas(128) char ramp[S::ramp_bytes];
    float4 ended[S::wide ? S::warps * 32 : 1]; /* of a lane: bases and sums of the item before */
    alignas(16) float key_scale[PREFILL_STAGES][S::num_scales];
    alignas(16) prefill_item items[PREFILL_SLOTS];
    uint64_t q_full[S::query_buffers], q_empty[S::query_buffers];
    uint64_t k_full[PREFILL_STAGES], k_empty[PREFILL_STAGES];
    uint64_t v_full[PREFILL_STAGES], v_empty[PREFILL_STAGES];
    uint64_t item_full[PREFILL_SLOTS], item_empty[PREFILL_SLOTS], item_wanted;
    uint64_t first_scores; /* of one warp group, then of the other */
};

/* A place in a ring of COUNT and the parity of the turn. */
template <int COUNT> struct ring_place {
    int at = 0, parity = 0;
    __device__ __forceinline__ void step()
    {
        at = at + 1 == COUNT ? 0 : at + 1;
        parity ^= at == 0;
    }
};

/* First key of an item's tile `t`. */
static __device__ __forceinline__ int32_t tile_base(const prefill_item &item, int32_t t, int keys)
{
    return (item.row_tile.k0 & ~(keys - 1)) + t * keys;
}

/* The scales of an item's keys, from its request's first on. */
static __device__ __forceinline__ const float *key_scales_of(const prefill_params &a,
                                                             const prefill_item &item)
{
    return a.key_scale + (item.head - a.first_head) * a.copied_rows + item.row_tile.key_start;
}

#endif
