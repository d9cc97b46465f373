/* SPDX-License-Identifier: Apache-2.0 */
/* Prefill with a consumer that finishes an item before it begins the next, for heads over 256 and
 * for layers whose bits do not depend on how a request is cut into steps. */
#ifndef CUDA_FLASH_SM90_BY_ITEM_CUH
#define CUDA_FLASH_SM90_BY_ITEM_CUH

#include "sm90_prefill.cuh"

/* Passes an item of whose rows this warp group has none, as most decodes are. */
template <class S>
GPU_INLINE void skip_item(prefill_shared<S> &smem, int32_t tiles, int q_full, int q_empty,
                          int parity, ring_place<S::stages> &stage)
{
    if (S::k_parts == 1) {
        barrier_wait(shared_address(&smem.q_full[q_full]), parity);
    }
#pragma unroll 1
    for (; tiles > 0; tiles--) {
        for (int part = stage.at * S::k_parts; part < (stage.at + 1) * S::k_parts; part++) {
            barrier_wait(shared_address(&smem.k_full[part]), stage.parity);
            __syncwarp(); /* no lane waits for a phase that has passed */
            arrive_once<S>(smem.k_empty[part]);
        }
        if (tiles == 1) {
            arrive_once<S>(smem.q_empty[q_empty]);
        }
        barrier_wait(shared_address(&smem.v_full[stage.at]), stage.parity);
        __syncwarp();
        arrive_once<S>(smem.v_empty[stage.at]);
        stage.step();
    }
}

/* A consumer warp group that finishes an item before it begins the next, whose queries and keys are
 * copied during its end: where queries have one buffer, and where decodes leave it without rows. */
template <class S>
GPU_INLINE void consumer_by_item(const prefill_params &a, prefill_shared<S> &smem, int group)
{
    const int lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) & 3;
    const int32_t row = group * 64 + warp * 16 + (lane >> 2);
    const uint64_t q = descriptor_at(shared_address(smem.q[0]) + group * (64 * 128), 0, 1024),
                   k = descriptor_at(shared_address(smem.k[0]), 0, S::k_group),
                   v = descriptor_at(shared_address(smem.v[0]), S::column, S::v_group);
    consumer_state<S> x;
    ring_place<PREFILL_SLOTS> slot;
    ring_place<S::query_buffers> query;
    ring_place<S::stages> stage, before; /* this tile's; the previous one's, whose P is ready */
#pragma unroll 1
    for (;; slot.step(), query.step()) {
        barrier_wait(shared_address(&smem.item_full[slot.at]), slot.parity);
        const prefill_item &item = smem.items[slot.at];
        if (item.tiles < 0) {
            break;
        }
        int32_t left = item.tiles, base = tile_base(item, left - 1, S::keys);
        const int q_full = q_full_of<S>(a, query.at, group),
                  q_empty = q_empty_of<S>(query.at, group);
        if (__any_sync(0xffffffffu, group * 64 >= item.row_tile.num_rows)) {
            skip_item<S>(smem, left, q_full, q_empty, query.parity, stage);
            arrive_once<S>(smem.item_empty[slot.at]);
            continue;
        }
        bool before_inner = false;
        x.row_max[0] = x.row_max[1] = -INFINITY;
        x.row_sum[0] = x.row_sum[1] = 0.0f;
        clear(x.acc_o);
        auto begin_qk = [&]() {
            const uint64_t keys = descriptor_again(k, stage.at * (S::k_bytes / 16));
            const int at = S::query_buffers > 1 ? __shfl_sync(0xffffffffu, query.at, 0) : 0;
            const uint64_t queries = descriptor_again(q, at * (S::q_bytes / 16));
            if constexpr (S::k_parts > 1) {
                start_qk_parts<S>(smem, stage.parity, queries, keys, x.acc_s);
            } else {
                start_qk<S>(queries, keys, x.acc_s);
            }
        };
        /* Turns acc_s of the tile at `base` into probabilities and moves to the next tile. The
         * second tile takes the general path, too, which makes row_max finite. */
        auto softmax_tile = [&](bool first) {
            const int32_t tile = left - 1;
            const bool inner = tile >= item.inner_first && tile < item.inner_end;
            const float shift[2] = {0.0f, 0.0f};
            pin(x.acc_s);
            arrive_once<S>(smem.k_empty[S::k_parts > 1 ? S::k_parts - 1 : stage.at]);
            if (tile == 0) {
                arrive_once<S>(smem.q_empty[q_empty]);
            }
            if (!inner) {
                row_bounds rows;
                load_row_bounds<S>(a, item, row, rows);
                apply_mask(rows, base + (lane & 3) * 2, x.acc_s);
            }
            x.rescales =
                S::lazy_rescale && lazy_update_row_max(x.row_max, x.row_sum, x.scores_scale);
            if (S::lazy_rescale && inner && !first) {
                init_row_max(x.row_max);
            } else {
                update_row_max<S>(a.scale_log2, shift, x.acc_s, x.row_max, x.row_sum,
                                  x.scores_scale);
                x.rescales = true;
            }
            scale_apply_exp2(a.scale_log2, shift, x.acc_s, x.row_max, x.row_sum);
            before_inner = inner && !first;
            left--;
            base -= S::keys;
            before = stage;
            stage.step();
        };
        /* Adds P V of the tile before the one at `base`. */
        auto begin_pv = [&]() {
            if (__any_sync(0xffffffffu, x.scores_scale[0] != 1.0f || x.scores_scale[1] != 1.0f)) {
                rescale_o<S>(x);
            }
            barrier_wait(shared_address(&smem.v_full[before.at]), before.parity);
            clear_values<S>(item, base + S::keys, smem.v[before.at], 1 + group);
            start_pv<S>(descriptor_again(v, before.at * (S::v_bytes / 16)), x.p, 1, x.acc_o);
        };
        if (S::k_parts == 1) {
            barrier_wait(shared_address(&smem.q_full[q_full]), query.parity);
        }
        barrier_wait(shared_address(&smem.k_full[stage.at]), stage.parity);
        begin_qk();
        wgmma_wait<0>();
        softmax_tile(true);
        pack_p<S>(x.acc_s, x.p);
#pragma unroll 1
        while (left > 0) {
            barrier_wait(shared_address(&smem.k_full[stage.at]), stage.parity);
            const int32_t tiles = left - max(item.inner_first, 1);
            if (before_inner && tiles > 0) {
                const int at = S::query_buffers > 1 ? __shfl_sync(0xffffffffu, query.at, 0) : 0;
                inner_tiles<S>(a, smem, item, row, descriptor_again(q, at * (S::q_bytes / 16)), k,
                               v, 0, tiles, base, before, stage, x);
                left -= tiles;
                base -= tiles * S::keys;
                before.at = S::stages > 1 ? stage.at ^ 1 : 0;
                before.parity = stage.parity ^ (before.at == S::stages - 1);
            }
            begin_qk();
            begin_pv();
            wgmma_wait<1>();
            const int released = before.at; /* by the time of finish_pv */
            softmax_tile(false);
            finish_pv<S, true>(x, smem.v_empty[released]);
        }
        begin_pv();
        wgmma_wait<0>();
        pin(x.acc_o);
        arrive_once<S>(smem.v_empty[before.at]);
        epilogue<S>(a, item, row, x.row_max, x.row_sum, x.acc_o, smem.out[group * 4 + warp]);
        __syncwarp(); /* all lanes have read the item */
        arrive_once<S>(smem.item_empty[slot.at]);
    }
    if (S::boxes_rows && lane == 0) {
        wait_for_stored_boxes();
    }
}

#endif
