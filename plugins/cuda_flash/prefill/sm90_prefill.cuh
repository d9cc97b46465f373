/* SPDX-License-Identifier: Apache-2.0 */
/* Prefill on sm_90a by wgmma: a CTA has 128 rows of one KV head, 64 for each of two consumer warp
 * groups, and loops over tiles of keys. Q K^T of the next tile runs during the softmax of the
 * current one, across items as well. Tiles that every row sees completely (inner tiles) run in a
 * loop without masks; the others take a general path that gives the same bits. A tile of 128 keys
 * of D 128 has 64 KiB of K and V and 8.4 MFLOP: 2048 clocks of the tensor cores next to 1024 of its
 * 16384 exponentials. An item belongs to one CTA, which takes its tiles from the last to the first,
 * aligned to position 0. */
#ifndef CUDA_FLASH_SM90_PREFILL_CUH
#define CUDA_FLASH_SM90_PREFILL_CUH

#include "gpu/cuda/launch.cuh"
#include "cuda_flash/ptx/sm90_wgmma.cuh"
#include "sm90_epilogue.cuh"
#include "sm90_launch.h"
#include "sm90_producer.cuh"

template <class S> GPU_INLINE void issue_qk(uint64_t q, uint64_t k, float (&acc_s)[S::keys / 2])
{
#pragma unroll
    for (int i = 0; i < S::q_row / 32; i++) {
        const uint64_t a = q + (i >> 2) * (S::rows * 8) + (i & 3) * 2;
        const uint64_t b = k + (i >> 2) * (S::column / 16) + (i & 3) * 2;
        if constexpr (S::fp8) {
            wgmma_ss_fp8<S::keys>(acc_s, a, b, i > 0);
        } else {
            wgmma_ss<S::kind, S::keys>(acc_s, a, b, i > 0);
        }
    }
}

template <class S> GPU_INLINE void arrive_once(uint64_t &barrier)
{
    if (S::three_groups ? elected() : (threadIdx.x & 31) == 0) {
        barrier_arrive(shared_address(&barrier));
    }
}

/* Starts acc_s = Q K^T; q and k are descriptors from descriptor_at. */
template <class S> GPU_INLINE void start_qk(uint64_t q, uint64_t k, float (&acc_s)[S::keys / 2])
{
    pin(acc_s);
    wgmma_begin();
    issue_qk<S>(q, k, acc_s);
    wgmma_commit();
}

/* The same of a tile whose first part has arrived. Each further part is multiplied when it has
 * arrived, and all but the last are released here; no earlier products are under way. */
template <class S>
GPU_INLINE void start_qk_parts(prefill_shared<S> &smem, int parity, uint64_t q, uint64_t k,
                               float (&acc_s)[S::keys / 2])
{
    constexpr int steps = S::q_row / 32 / S::k_parts;
    pin(acc_s);
#pragma unroll
    for (int part = 0; part < S::k_parts; part++) {
        if (part > 0) {
            barrier_wait(shared_address(&smem.k_full[part]), parity);
        }
        wgmma_begin();
#pragma unroll
        for (int i = part * steps; i < (part + 1) * steps; i++) {
            wgmma_ss<S::kind, S::keys>(acc_s, q + (i >> 2) * (S::rows * 8) + (i & 3) * 2,
                                       k + (i >> 2) * (S::column / 16) + (i & 3) * 2, i > 0);
        }
        wgmma_commit();
        if (part > 0) {
            wgmma_wait<1>();
            arrive_once<S>(smem.k_empty[part - 1]);
        }
    }
}

/* As start_qk, plus slopes x position of the key in its tile. */
template <class S>
GPU_INLINE void start_qk_alibi(uint64_t q, uint64_t k, const uint32_t (&slopes)[4], uint64_t ramp,
                               float (&acc_s)[S::keys / 2])
{
    pin(acc_s);
    wgmma_begin();
    issue_qk<S>(q, k, acc_s);
    wgmma_rs_bk<S::kind, S::keys>(acc_s, slopes, ramp);
    wgmma_commit();
}

/* Starts acc_o = P V, or acc_o += P V if `accumulates`. */
template <class S>
GPU_INLINE void start_pv(uint64_t v, const uint32_t (&p)[S::keys / 16][4], int accumulates,
                         float (&acc_o)[S::dv / 2])
{
    pin(acc_o);
    wgmma_begin();
#pragma unroll
    for (int i = 0; i < S::keys / 16; i++) {
        /* 16 keys are two groups of 8 */
        wgmma_rs<S::kind, S::dv>(acc_o, p[i], v + i * (S::v_group / 8), i > 0 ? 1 : accumulates);
    }
    wgmma_commit();
}

template <class S>
GPU_INLINE void pack_p(const float (&acc_s)[S::keys / 2], uint32_t (&p)[S::keys / 16][4])
{
#pragma unroll
    for (int i = 0; i < S::keys / 16; i++) {
#pragma unroll
        for (int c = 0; c < 4; c++) {
            p[i][c] = pack2<S::kind>(acc_s[8 * i + 2 * c], acc_s[8 * i + 2 * c + 1]);
        }
    }
}

/* Clears values past the request's end, because 0 x NaN is NaN. Each warp group does so on its own;
 * both write the same. */
template <class S>
GPU_INLINE void clear_values(const prefill_item &item, int32_t base, char *values, int barrier)
{
    const int32_t rows = item.row_tile.length - base;
    if (rows < S::keys) {
        clear_value_rows<S>(values, max(rows, 0), S::keys, threadIdx.x & 127, 128);
        barrier_group(barrier); /* all threads' zeros are written */
    }
}

template <int N> GPU_INLINE void clear(float (&x)[N])
{
#pragma unroll
    for (int i = 0; i < N; i++) {
        x[i] = 0.0f;
    }
}

/* The registers of a consumer thread. */
template <class S> struct consumer_state {
    float acc_s[S::keys / 2], acc_o[S::dv / 2], row_max[2], row_sum[2], scores_scale[2];
    bool rescales; /* acc_o must be multiplied by scores_scale */
    uint32_t p[S::keys / 16][4];
};

/* Waits for P V, releases its stage and packs the next P. AFTER_SOFTMAX orders the wait after the
 * exponentials, which the general path needs; inner loops where ptxas places the wait well lose 9 %
 * by it. */
template <class S, bool AFTER_SOFTMAX>
GPU_INLINE void finish_pv(consumer_state<S> &x, uint64_t &empty)
{
    if (AFTER_SOFTMAX) {
        pin(x.acc_s);
        wgmma_wait_after<0>(x.row_sum[0] + x.row_sum[1]);
    } else {
        wgmma_wait<0>();
    }
    pin(x.acc_o);
    arrive_once<S>(empty);
    pack_p<S>(x.acc_s, x.p);
}

template <class S> GPU_INLINE void rescale_o(consumer_state<S> &x)
{
    if (!S::lazy_rescale || x.rescales) {
#pragma unroll
        for (int i = 0; i < S::dv / 2; i++) {
            x.acc_o[i] *= x.scores_scale[(i >> 1) & 1];
        }
    }
}

/* The loop over inner tiles of an item. stage is the first tile's, `base` its first key, and
 * `before` the stage of the previous tile, whose P is ready. */
template <class S>
GPU_INLINE void
inner_tiles(const prefill_params &a, prefill_shared<S> &smem, const prefill_item &item, int32_t row,
            uint64_t q, uint64_t k, uint64_t v, uint64_t places, int32_t tiles, int32_t base,
            ring_place<S::stages> before, ring_place<S::stages> &stage, consumer_state<S> &x)
{
    row_bounds rows;
    prefill_ramp ramp;
    capped_softmax capped;
    if (S::terms == PREFILL_CAPPED) {
        capped = capped_softmax_of(item, row, pre_scale_of<S>(a, item), scale_log2_of<S>(a, item));
    }
    if (S::terms == PREFILL_LINEAR) {
        load_row_bounds<S>(a, item, row, rows);
    }
    if (S::ramps) {
        ramp = ramp_of_rows<S>(rows, scale_log2_of<S>(a, item), base);
    }
#pragma unroll 1
    for (; tiles > 0; tiles--) {
        const uint64_t keys = descriptor_again(k, stage.at * (S::k_bytes / 16));
        if constexpr (S::ramps) {
            start_qk_alibi<S>(descriptor_again(q), keys, ramp.w, descriptor_again(places), x.acc_s);
        } else if constexpr (S::k_parts > 1) {
            start_qk_parts<S>(smem, stage.parity, descriptor_again(q), keys, x.acc_s);
        } else {
            start_qk<S>(descriptor_again(q), keys, x.acc_s);
        }
        rescale_o<S>(x);
        barrier_wait(shared_address(&smem.v_full[before.at]), before.parity);
        start_pv<S>(descriptor_again(v, before.at * (S::v_bytes / 16)), x.p, 1, x.acc_o);
        x.rescales = !S::lazy_rescale || lazy_update_row_max(x.row_max, x.row_sum, x.scores_scale);
        wgmma_wait<1>();
        pin(x.acc_s);
        if constexpr (S::scales == PREFILL_BY_KEY) {
            scale_keys(smem.key_scale[stage.at] + (threadIdx.x & 3) * 2, x.acc_s);
        }
        arrive_once<S>(smem.k_empty[S::k_parts > 1 ? S::k_parts - 1 : stage.at]);
        float shift[2] = {0.0f, 0.0f};
        if constexpr (S::ramps) {
#pragma unroll
            for (int r = 0; r < 2; r++) {
                shift[r] = __fmul_rn(ramp.fall[r], ramp.before[r]);
                ramp.before[r] += (float)S::keys;
            }
        } else if constexpr (S::terms == PREFILL_LINEAR) {
            add_linear_alibi(a, rows, base + (threadIdx.x & 3) * 2, x.acc_s, shift);
        }
        static_assert(S::terms != PREFILL_CAPPED || S::lazy_rescale, "row_max is of capped scores");
        if (!S::lazy_rescale) {
            update_row_max<S>(scale_log2_of<S>(a, item), shift, x.acc_s, x.row_max, x.row_sum,
                              x.scores_scale);
        }
        if constexpr (S::terms == PREFILL_CAPPED) {
            capped_apply_exp2(capped, pre_scale_of<S>(a, item), scale_log2_of<S>(a, item), x.acc_s,
                              x.row_max, x.row_sum);
        } else {
            scale_apply_exp2(scale_log2_of<S>(a, item), shift, x.acc_s, x.row_max, x.row_sum);
        }
        finish_pv<S, S::pv_waits_late>(x, smem.v_empty[before.at]);
        before = stage;
        stage.step();
        base -= S::keys;
        barrier_wait(shared_address(&smem.k_full[stage.at]), stage.parity);
    }
}

/* A consumer warp group. Q K^T of the next tile runs while P V of the previous tile does, and it is
 * issued before anything else as soon as acc_s is free. */
template <class S>
GPU_INLINE void consumer(const prefill_params &a, prefill_shared<S> &smem, int group)
{
    const int lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) & 3;
    const int32_t row = group * 64 + warp * 16 + (lane >> 2);
    const uint64_t q = descriptor_at(shared_address(smem.q[0]) + group * (64 * 128), 0, 1024),
                   k = descriptor_at(shared_address(smem.k[0]), 0, S::k_group),
                   v = descriptor_at(shared_address(smem.v[0]), S::column, S::v_group),
                   places =
                       S::ramps ? descriptor_unswizzled(shared_address(smem.ramp), 128, 128) : 0;
    char *const out_smem = smem.out[group * 4 + warp];
    consumer_state<S> x;
    x.row_max[0] = x.row_max[1] = x.row_sum[0] = x.row_sum[1] = 0.0f;
    ring_place<PREFILL_SLOTS> slot;
    ring_place<S::query_buffers> query;
    ring_place<S::stages> stage;
    /* The queries' descriptor. The buffer's index is read from one lane, as in descriptor_at, so
     * that descriptors stay in uniform registers. */
    auto queries = [&]() {
        const int at = S::query_buffers > 1 ? __shfl_sync(0xffffffffu, query.at, 0) : 0;
        return descriptor_again(q, at * (S::q_bytes / 16));
    };
    int32_t left = 0, base = 0;             /* tiles of the item, including the one at `base` */
    float prev_row_max[2], prev_row_sum[2]; /* the previous item's */
    bool starts_item;                       /* the tile at `base` is its item's first */
    auto begin_qk = [&]() {
        const prefill_item &item = smem.items[slot.at];
        if (starts_item) {
            left = item.tiles;
            base = tile_base(item, left - 1, S::keys);
            prev_row_max[0] = x.row_max[0], prev_row_max[1] = x.row_max[1],
            prev_row_sum[0] = x.row_sum[0], prev_row_sum[1] = x.row_sum[1];
            x.row_max[0] = x.row_max[1] = -INFINITY;
            x.row_sum[0] = x.row_sum[1] = 0.0f;
            barrier_wait(shared_address(&smem.q_full[q_full_of<S>(a, query.at, group)]),
                         query.parity);
        }
        start_qk<S>(queries(), descriptor_again(k, stage.at * (S::k_bytes / 16)), x.acc_s);
    };
    auto is_inner = [&](const prefill_item &item) {
        return left > item.inner_first && left <= item.inner_end;
    };
    /* Loads what the rows see, if the tile needs it; no registers are left to keep it from tile to
     * tile. */
    auto load_bounds = [&](const prefill_item &item, bool inner, row_bounds &rows) {
        if (!inner || (S::terms == PREFILL_ANY ? a.terms != 0 : S::terms == PREFILL_LINEAR)) {
            load_row_bounds<S>(a, item, row, rows);
        }
    };
    /* Turns acc_s of the tile at `base` into P and moves to the tile after it. */
    auto softmax_tile = [&](const row_bounds &rows, bool inner) {
        const prefill_item &item = smem.items[slot.at];
        int32_t key = base + (lane & 3) * 2;
        float shift[2] = {0.0f, 0.0f};
        pin(x.acc_s);
        if constexpr (S::scales == PREFILL_BY_KEY) {
            scale_keys(smem.key_scale[stage.at] + (lane & 3) * 2, x.acc_s);
        }
        arrive_once<S>(smem.k_empty[stage.at]);
        left--;
        base -= S::keys;
        starts_item = left == 0;
        if (starts_item) {
            arrive_once<S>(smem.q_empty[q_empty_of<S>(query.at, group)]);
            query.step();
        }
        /* Softmax of keys from the lane's key `first` on. `lazy`: row_max is not updated from the
         * scores, as in inner_tiles. */
        auto softmax_keys = [&](int32_t first, auto &acc_s, bool lazy) {
            if (S::terms != 0 && (S::terms != PREFILL_ANY || a.terms != 0)) {
                add_terms<S>(a, item, rows, row, first, inner, acc_s, shift);
            }
            if (!inner) {
                apply_mask(rows, first, acc_s);
            }
            x.rescales =
                S::lazy_rescale && lazy_update_row_max(x.row_max, x.row_sum, x.scores_scale);
            if (!lazy) {
                update_row_max<S>(scale_log2_of<S>(a, item), shift, acc_s, x.row_max, x.row_sum,
                                  x.scores_scale);
                x.rescales = true;
            }
            scale_apply_exp2(scale_log2_of<S>(a, item), shift, acc_s, x.row_max, x.row_sum);
        };
        /* If no row sees one half of the keys, only the other half is computed. The votes show the
         * compiler that the branches are uniform; otherwise it keeps no descriptor in uniform
         * registers. */
        constexpr int n = S::keys / 4;
        float(&low)[n] = (float(&)[n])x.acc_s, (&high)[n] = (float(&)[n])x.acc_s[n];
        const int32_t middle = key - (lane & 3) * 2 + S::keys / 2;
        if (S::lazy_rescale && S::terms != PREFILL_CAPPED && inner && left + 1 < item.tiles) {
            init_row_max(x.row_max);
            softmax_keys(key, x.acc_s, true);
        } else if (S::half_tiles && !inner && __any_sync(0xffffffffu, item.row_tile.k1 <= middle)) {
            softmax_keys(key, low, false);
            clear(high);
        } else if (S::half_tiles && !inner && __any_sync(0xffffffffu, item.row_tile.k0 >= middle)) {
            softmax_keys(key + S::keys / 2, high, false);
            clear(low);
        } else {
            softmax_keys(key, x.acc_s, false);
        }
    };
    barrier_wait(shared_address(&smem.k_full[0]), 0);
    if (smem.items[0].tiles < 0) {
        return;
    }
    starts_item = true;
    /* The second group starts when the first has its scores. Groups that start together stay in
     * step and compete for the tensor cores, then for the exponential unit. The first group does
     * not wait at this parity. */
    barrier_wait(shared_address(&smem.first_scores), 1 - group);
    begin_qk();
    row_bounds rows;
    bool inner = is_inner(smem.items[0]);
    load_bounds(smem.items[0], inner, rows);
    wgmma_wait<0>();
    arrive_once<S>(smem.first_scores);
    int accumulates = 0; /* the previous tile, whose P is ready, is not its item's first */
    /* Starts false even for an inner tile: an item's second tile takes the general path wherever
     * the item stands in the CTA's sequence. Parts need not give the same bits in every place. */
    bool before_inner = S::cuts && S::terms == 0 && inner && smem.items[0].part > 0;
    softmax_tile(rows, inner);
    if (S::lazy_rescale && before_inner) { /* an inner tile does not compute its maximum */
        init_row_max(x.row_max);
    }
    pack_p<S>(x.acc_s, x.p);
    x.scores_scale[0] = x.scores_scale[1] = 0.0f;
#pragma unroll
    for (int i = 0; i < S::dv / 2; i++) {
        x.acc_o[i] = 0.0f;
    }
    /* Advances to the next tile; false at the end. */
    auto advance = [&]() {
        stage.step();
        barrier_wait(shared_address(&smem.k_full[stage.at]), stage.parity);
        if (starts_item) {
            slot.step();
        }
        return smem.items[slot.at].tiles >= 0;
    };
    /* The stage of the previous tile and the slot of an earlier item. */
    auto stage_before = [&]() {
        ring_place<S::stages> before = stage;
        before.at = S::stages == 2 ? stage.at ^ 1 : (stage.at + S::stages - 1) % S::stages;
        before.parity ^= S::stages == 2 ? before.at : stage.at == 0;
        return before;
    };
    auto slot_before = [&](int items) { return (slot.at - items) & (PREFILL_SLOTS - 1); };
    auto begin_pv = [&]() {
        const ring_place<S::stages> before = stage_before();
        barrier_wait(shared_address(&smem.v_full[before.at]), before.parity);
        if (!S::has_inner_loop || !before_inner) { /* all keys of an inner tile have values */
            const prefill_item &item = smem.items[slot_before(starts_item)];
            clear_values<S>(item, starts_item ? tile_base(item, 0, S::keys) : base + S::keys,
                            smem.v[before.at], 1 + group);
        }
        start_pv<S>(descriptor_again(v, before.at * (S::v_bytes / 16)), x.p, accumulates, x.acc_o);
    };
    bool ends = false;
    float ended_row_max[2], ended_row_sum[2];
    auto rescale_or_finish = [&](const float(&item_row_max)[2], const float(&item_row_sum)[2]) {
        if (!ends) {
            rescale_o<S>(x);
            return;
        }
        const int ended = slot_before(1 + starts_item);
        epilogue<S>(a, smem.items[ended], row, item_row_max, item_row_sum, x.acc_o, out_smem);
        __syncwarp(); /* all lanes have read the item */
        arrive_once<S>(smem.item_empty[ended]);
    };
    bool more = advance();
#pragma unroll 1
    while (more) {
        /* Inner tiles after an inner tile of the same item. */
        if (S::has_inner_loop && !ends && !starts_item && before_inner &&
            (S::terms != PREFILL_ANY || !(a.terms & PREFILL_GENERAL))) {
            const prefill_item &item = smem.items[slot.at];
            int32_t tiles = left - max(item.inner_first, S::query_buffers == 1);
            if (tiles > 0) {
                inner_tiles<S>(a, smem, item, row, queries(), k, v, places, tiles, base,
                               stage_before(), stage, x);
                left -= tiles;
                base -= tiles * S::keys;
                accumulates = 1;
                if (left == 0) {
                    starts_item = true;
                    arrive_once<S>(smem.q_empty[q_empty_of<S>(query.at, group)]);
                    query.step();
                    slot.step();
                    more = smem.items[slot.at].tiles >= 0;
                    if (!more) {
                        break;
                    }
                }
            }
        }
        if (!S::epilogue_after_qk) {
            rescale_or_finish(prev_row_max, prev_row_sum);
        }
        begin_qk();
        if (S::epilogue_after_qk) {
            inner = is_inner(smem.items[slot.at]);
            rescale_or_finish(ended_row_max, ended_row_sum);
        }
        begin_pv();
        if (!S::epilogue_after_qk) {
            inner = is_inner(smem.items[slot.at]);
        }
        load_bounds(smem.items[slot.at], inner, rows);
        wgmma_wait<1>();
        ends = starts_item;
        ended_row_max[0] = prev_row_max[0], ended_row_max[1] = prev_row_max[1],
        ended_row_sum[0] = prev_row_sum[0], ended_row_sum[1] = prev_row_sum[1];
        softmax_tile(rows, inner);
        finish_pv<S, true>(x, smem.v_empty[S::stages == 2 ? stage.at ^ 1 : stage_before().at]);
        before_inner = inner;
        accumulates = !ends;
        more = advance();
    }
    rescale_or_finish(S::epilogue_after_qk ? ended_row_max : prev_row_max,
                      S::epilogue_after_qk ? ended_row_sum : prev_row_sum);
    begin_pv();
    wgmma_wait<0>();
    pin(x.acc_o);
    epilogue<S>(a, smem.items[slot_before(1)], row, x.row_max, x.row_sum, x.acc_o, out_smem);
    if (S::boxes_rows && lane == 0) {
        wait_for_stored_boxes();
    }
}

/* The consumer of kernels with three warp groups: sm90_head64.cuh. */
template <class S>
GPU_INLINE void consumer_head64(const prefill_params &a, prefill_shared<S> &smem, int group);

/* The consumer of kernels that finish an item before the next: sm90_by_item.cuh. */
template <class S>
GPU_INLINE void consumer_by_item(const prefill_params &a, prefill_shared<S> &smem, int group);

template <class S>
__global__ void __launch_bounds__(S::threads, 1) prefill(const __grid_constant__ prefill_params a)
{
    extern __shared__ __align__(1024) char memory[];
    prefill_shared<S> &smem = *(prefill_shared<S> *)memory;
    const int group = threadIdx.x >> 7;
    if (threadIdx.x == 0) {
        for (int i = 0; i < S::q_barriers; i++) {
            barrier_init(shared_address(&smem.q_full[i]), 1);
            barrier_init(shared_address(&smem.q_empty[i]), S::q_by_group ? 4 : S::warps);
        }
        for (int i = 0; i < S::stages; i++) {
            for (int part = i * S::k_parts; part < (i + 1) * S::k_parts; part++) {
                barrier_init(shared_address(&smem.k_full[part]), 1);
                barrier_init(shared_address(&smem.k_empty[part]), S::warps);
            }
            barrier_init(shared_address(&smem.v_full[i]), 1);
            barrier_init(shared_address(&smem.v_empty[i]), S::warps);
        }
        for (int i = 0; i < PREFILL_SLOTS; i++) {
            barrier_init(shared_address(&smem.item_full[i]), 32);
            barrier_init(shared_address(&smem.item_empty[i]), S::warps);
        }
        barrier_init(shared_address(&smem.item_wanted), 1);
        barrier_init(shared_address(&smem.first_scores), 4);
        fence_barriers();
        fetch_map(&a.q_map);
        fetch_map(&a.k.map);
        fetch_map(&a.v.map);
        if (S::boxes_rows && a.boxes_rows) {
            fetch_map(&a.out_map);
        }
    }
    if (S::ramps) {
        fill_ramp<S>(smem.ramp);
    }
    __syncthreads(); /* the barriers are initialized */
    if (threadIdx.x >> 5 != PREFILL_DRAWER) {
        wait_for_earlier_kernels();
        let_later_kernels_begin();
    }
    if (group == 0) {
        dealloc_registers<S::producer_registers>();
        const int warp = threadIdx.x >> 5;
        if (warp == 0) {
            producer<S, false>(a, smem);
        } else if (warp == 1) {
            producer<S, true>(a, smem);
        } else if (warp == PREFILL_DRAWER) {
            draw_items<S>(a, smem);
        }
    } else {
        alloc_registers<S::consumer_registers>();
        if constexpr (S::three_groups) {
            consumer_head64<S>(a, smem, group - 1);
        } else if constexpr (S::by_item) {
            consumer_by_item<S>(a, smem, group - 1);
        } else {
            consumer<S>(a, smem, group - 1);
        }
    }
}

template <class S>
static cudaError_t launch_prefill_shape(const prefill_params *a, int32_t num_sms,
                                        cudaStream_t stream)
{
    constexpr size_t bytes = sizeof(prefill_shared<S>);
    static_assert(bytes <= 227 * 1024, "shared memory of a CTA");
    if (a == nullptr) {
        return cudaFuncSetAttribute(prefill<S>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    (int)bytes);
    }
    return launch_kernel(prefill<S>, *a, (unsigned)num_sms, S::threads, bytes, stream);
}

/* Which terms have kernels of their own; other calls use PREFILL_ANY. Agrees with `has_kernel` in
 * sm90_prefill.c. */
template <int KIND> static constexpr bool has_capped = KIND == KIND_BF16;
/* Which kernels have a form for PREFILL_PAGE_BOX: for others it gains nothing in pages of 16 and
 * more. Agrees with `map_tensors` in sm90_prefill.c. */
template <int SIZE, int TERMS> static constexpr bool has_groups = SIZE == 128 && TERMS == 0;
/* Cut items have tiles of 64 keys, so that parts differ by less. Agrees with `keys_of_parts` in
 * sm90_prefill.c. */
template <int SIZE> static constexpr bool has_small_tiles = SIZE == 128;
template <int TERMS> static constexpr bool has_mixed = TERMS == 0 || TERMS == PREFILL_ANY;
template <int TERMS> static constexpr bool has_large = TERMS != PREFILL_LINEAR;

/* The shape for a head size. SIZE 192 has values of 128 dims and no kernel over copies. SIZE 512
 * has values of 256 dims and only the kernel without terms. */
template <int KIND, int SIZE, bool GROUPED, int TERMS, int SCALES> struct prefill_sized {
    static constexpr int queries =
        SIZE >= 192 || (SIZE == 128 && TERMS == PREFILL_ANY && SCALES == PREFILL_BY_KEY) ? 1 : 2;
    static constexpr bool there = SIZE == 192   ? has_mixed<TERMS> && SCALES == PREFILL_UNSCALED
                                  : SIZE == 256 ? has_large<TERMS>
                                  : SIZE == 512 ? TERMS == 0
                                                : true;
    static constexpr int values = SIZE == 192 ? 128 : SIZE == 512 ? 256 : SIZE;
    using shape =
        prefill_shape<KIND, SIZE, values, SIZE >= 256 ? 64 : 128, queries, GROUPED, TERMS, SCALES>;
};

/* With a NULL, only loads the kernel. */
template <int KIND, int SIZE, bool GROUPED, int TERMS, int SCALES = PREFILL_UNSCALED>
static cudaError_t launch_prefill_size(const prefill_params *a, int32_t num_sms,
                                       cudaStream_t stream)
{
    using sized = prefill_sized<KIND, SIZE, GROUPED, TERMS, SCALES>;
    if constexpr (sized::there) {
        return launch_prefill_shape<typename sized::shape>(a, num_sms, stream);
    }
    return a == nullptr ? cudaSuccess : cudaErrorInvalidValue;
}

/* Kernels over copied values and e4m3 keys, with e4m3 queries. */
template <int KIND, int SIZE>
static cudaError_t launch_fp8(const prefill_params *a, int32_t num_sms, cudaStream_t stream)
{
    if constexpr (SIZE == 128 || SIZE == 256) {
        return launch_prefill_size<KIND, SIZE, false, 0, PREFILL_IN_FP8>(a, num_sms, stream);
    }
    return a == nullptr ? cudaSuccess : cudaErrorInvalidValue;
}

/* Kernels over copies of narrow keys and values. */
template <int KIND, int SIZE>
static cudaError_t launch_copies(const prefill_params *a, int32_t num_sms, cudaStream_t stream)
{
    prefill_launcher *const by_head = launch_prefill_size<KIND, SIZE, false, 0, PREFILL_BY_HEAD>;
    prefill_launcher *const by_key = launch_prefill_size<KIND, SIZE, false, 0, PREFILL_BY_KEY>;
    prefill_launcher *const any =
        launch_prefill_size<KIND, SIZE, false, PREFILL_ANY, PREFILL_BY_KEY>;
    if constexpr (has_capped<KIND>) {
        if (a == nullptr || (a->scales == PREFILL_BY_HEAD && a->kernel == PREFILL_CAPPED)) {
            cudaError_t error =
                launch_prefill_size<KIND, SIZE, false, PREFILL_CAPPED, PREFILL_BY_HEAD>(a, num_sms,
                                                                                        stream);
            if (a != nullptr || error != cudaSuccess) {
                return error;
            }
        }
    }
    if constexpr (KIND == KIND_BF16) {
        if (a == nullptr || a->scales == PREFILL_IN_FP8) {
            cudaError_t error = launch_fp8<KIND, SIZE>(a, num_sms, stream);
            if (a != nullptr || error != cudaSuccess) {
                return error;
            }
        }
    }
    if (a == nullptr) {
        cudaError_t error = by_head(a, 0, stream);
        error = error ? error : by_key(a, 0, stream);
        return error ? error : any(a, 0, stream);
    }
    return (a->scales == PREFILL_BY_HEAD ? by_head
            : a->kernel == 0             ? by_key
                                         : any)(a, num_sms, stream);
}

/* Kernels without terms for layers whose bits do not depend on how a request is cut into steps. */
template <int KIND, int SIZE>
static cudaError_t launch_exact(const prefill_params *a, int32_t num_sms, cudaStream_t stream)
{
    using like = typename prefill_sized<KIND, SIZE, false, 0, PREFILL_UNSCALED>::shape;
    return launch_prefill_shape<
        prefill_shape<KIND, like::d, like::dv, like::keys, like::query_buffers, false, 0,
                      PREFILL_UNSCALED, 2, true>>(a, num_sms, stream);
}

/* With a NULL, only loads the kernels. */
template <int KIND, int SIZE, int TERMS>
static cudaError_t launch_prefill_layout(const prefill_params *a, int32_t num_sms,
                                         cudaStream_t stream)
{
    if constexpr (has_groups<SIZE, TERMS>) {
        if (a == nullptr || a->grouped) {
            cudaError_t error = launch_prefill_size<KIND, SIZE, true, TERMS>(a, num_sms, stream);
            if (a != nullptr || error != cudaSuccess) {
                return error;
            }
        }
    }
    return launch_prefill_size<KIND, SIZE, false, TERMS>(a, num_sms, stream);
}

template <int KIND, int SIZE>
static cudaError_t launch_prefill(const prefill_params *a, int32_t num_sms, cudaStream_t stream)
{
    cudaError_t error = cudaSuccess;
    const bool small = has_small_tiles<SIZE> && a != nullptr && a->p.schedule.tile == 64;
    if (a == nullptr || (a->kernel == 0 && !small)) {
        error = launch_prefill_layout<KIND, SIZE, 0>(a, num_sms, stream);
    }
    if constexpr (has_small_tiles<SIZE>) {
        if (error == cudaSuccess && (a == nullptr || small)) {
            error = launch_prefill_shape<prefill_shape<KIND, SIZE, SIZE, 64, 2, false, 0>>(
                a, num_sms, stream);
        }
    }
    if constexpr (has_capped<KIND>) {
        if (error == cudaSuccess && (a == nullptr || a->kernel == PREFILL_CAPPED)) {
            error = launch_prefill_layout<KIND, SIZE, PREFILL_CAPPED>(a, num_sms, stream);
        }
    }
    if (error == cudaSuccess && (a == nullptr || a->kernel == PREFILL_LINEAR)) {
        error = launch_prefill_layout<KIND, SIZE, PREFILL_LINEAR>(a, num_sms, stream);
    }
    if (error == cudaSuccess && (a == nullptr || a->kernel == PREFILL_ANY)) {
        error = launch_prefill_layout<KIND, SIZE, PREFILL_ANY>(a, num_sms, stream);
    }
    return error;
}

#endif
