/* SPDX-License-Identifier: Apache-2.0 */
/* Prefill with heads of 64 dims and no terms: three consumer warp groups have 64 rows each of one
 * KV head. A tile of 128 keys takes 1536 clocks of the tensor cores, as many of exponentials, and
 * some 1,000 instructions of each scheduler, whose three warps are in different phases. A thread
 * has 160 registers, 128 of which hold acc_s, acc_o and P, so everything that can be reloaded or
 * recomputed is. The pipeline is the same as in sm90_prefill.cuh. */
#ifndef CUDA_FLASH_SM90_HEAD64_CUH
#define CUDA_FLASH_SM90_HEAD64_CUH

#include "sm90_prefill.cuh"

/* Reads threadIdx.x at the place of the call, so that values derived from it do not occupy
 * registers from the kernel's beginning on. */
GPU_INLINE int32_t thread_again()
{
    int32_t x;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
    return x;
}

/* The first of a lane's two rows of an item; the second is 8 further. */
GPU_INLINE int32_t row_of_lane()
{
    const int32_t thread = thread_again() - 128;
    return (thread >> 5) * 16 + (thread >> 2 & 7);
}

/* Advances a matrix descriptor by `further` times 16 bytes. The shuffle from lane 0 shows the
 * compiler that the descriptor is uniform, so that it and the ring positions stay in uniform
 * registers. */
GPU_INLINE uint64_t descriptor_here(uint64_t matrix, uint32_t further)
{
    const uint32_t low = __shfl_sync(0xffffffffu, (uint32_t)matrix + further, 0);
    return (matrix & 0xffffffff00000000u) | low;
}

/* As inner_tiles in sm90_prefill.cuh. */
template <class S>
GPU_INLINE void inner_tiles_head64(const prefill_params &a, prefill_shared<S> &smem, uint64_t q,
                                   uint64_t k, uint64_t v, int32_t tiles,
                                   ring_place<PREFILL_STAGES> before,
                                   ring_place<PREFILL_STAGES> stage, consumer_state<S> &x)
{
    const float shift[2] = {0.0f, 0.0f};
    if (S::lazy_rescale) { /* rows whose scores so far are all -inf */
        x.row_max[0] = x.row_max[0] == -INFINITY ? 0.0f : x.row_max[0];
        x.row_max[1] = x.row_max[1] == -INFINITY ? 0.0f : x.row_max[1];
    }
    x.rescales = true;
    q = descriptor_here(q, 0);
    uint64_t keys = descriptor_here(k, stage.at * (S::k_bytes / 16)),
             values = descriptor_here(v, before.at * (S::v_bytes / 16));
#pragma unroll 1
    for (; tiles > 0; tiles--) {
        start_qk<S>(descriptor_again(q), descriptor_again(keys), x.acc_s);
        rescale_o<S>(x);
        barrier_wait(shared_address(&smem.v_full[before.at]), before.parity);
        start_pv<S>(descriptor_again(values), x.p, 1, x.acc_o);
        x.rescales = !S::lazy_rescale || lazy_update_row_max(x.row_max, x.row_sum, x.scores_scale);
        wgmma_wait<1>();
        pin(x.acc_s);
        arrive_once<S>(smem.k_empty[stage.at]);
        if (!S::lazy_rescale) {
            update_row_max<S>(a.scale_log2, shift, x.acc_s, x.row_max, x.row_sum, x.scores_scale);
        }
        scale_apply_exp2(a.scale_log2, shift, x.acc_s, x.row_max, x.row_sum);
        finish_pv<S, S::pv_waits_late>(x, smem.v_empty[before.at]);
        before = stage;
        stage.step();
        keys = descriptor_here(k, stage.at * (S::k_bytes / 16));
        values = descriptor_here(v, before.at * (S::v_bytes / 16));
        barrier_wait(shared_address(&smem.k_full[stage.at]), stage.parity);
    }
    x.rescales = true;
}

/* A consumer's position. Ring positions follow from the counters. */
template <class S> struct consumer_progress {
    uint32_t tiles = 0, items = 0; /* before the current one */
    /* tiles of the item, including this one; 0: this tile is the next item's first */
    int32_t left = 0;

    /* The stage of the tile `before` tiles earlier. */
    __device__ __forceinline__ ring_place<PREFILL_STAGES> stage(uint32_t before) const
    {
        ring_place<PREFILL_STAGES> place;
        place.at = (tiles - before) % PREFILL_STAGES;
        place.parity = (tiles - before) / PREFILL_STAGES % 2;
        return place;
    }
    /* The slot of the item `before` items earlier. */
    __device__ __forceinline__ int slot(uint32_t before) const
    {
        return (items - before) % PREFILL_SLOTS;
    }
    __device__ __forceinline__ int query() const
    {
        return items % S::query_buffers;
    }
};

template <class S>
GPU_INLINE void consumer_head64(const prefill_params &a, prefill_shared<S> &smem, int group)
{
    static_assert(S::terms == 0 && S::scales == PREFILL_UNSCALED && !S::cuts, "as it is planned");
    const uint64_t q = descriptor_at(shared_address(smem.q[0]) + group * (64 * 128), 0, 1024),
                   k = descriptor_uniform(shared_address(smem.k[0]), 0, S::k_group),
                   v = descriptor_uniform(shared_address(smem.v[0]), S::column, S::v_group);
    consumer_state<S> x;
    consumer_progress<S> at;
    x.row_max[0] = x.row_max[1] = x.row_sum[0] = x.row_sum[1] = 0.0f;
    auto out_smem = [&]() { return smem.out[(thread_again() >> 5) - 4]; };
    auto begin_qk = [&]() {
        if (at.left == 0) {
            at.left = smem.items[at.slot(0)].tiles;
            smem.prev_rows[thread_again() - 128] =
                make_float4(x.row_max[0], x.row_max[1], x.row_sum[0], x.row_sum[1]);
            x.row_max[0] = x.row_max[1] = -INFINITY;
            x.row_sum[0] = x.row_sum[1] = 0.0f;
            barrier_wait(shared_address(&smem.q_full[at.query()]), at.items / S::query_buffers % 2);
        }
        start_qk<S>(descriptor_again(q, at.query() * (S::q_bytes / 16)),
                    descriptor_again(k, at.stage(0).at * (S::k_bytes / 16)), x.acc_s);
    };
    /* Loads what the rows see, if the tile needs masks. Returns whether it is an inner tile. */
    auto load_bounds = [&](row_bounds &rows) {
        const prefill_item &item = smem.items[at.slot(0)];
        const int32_t tile = at.left - 1;
        const bool inner = tile >= item.inner_first && tile < item.inner_end;
        rows = {}; /* reset, so that no registers carry it from tile to tile */
        if (!inner) {
            load_row_bounds<S>(a, item, row_of_lane(), rows);
        }
        return inner;
    };
    /* Turns the tile's acc_s into P. */
    auto softmax_tile = [&](const row_bounds &rows, bool inner) {
        const prefill_item &item = smem.items[at.slot(0)];
        const int32_t base = tile_base(item, at.left - 1, S::keys);
        const float shift[2] = {0.0f, 0.0f};
        pin(x.acc_s);
        arrive_once<S>(smem.k_empty[at.stage(0).at]);
        at.left--;
        if (at.left == 0) {
            arrive_once<S>(smem.q_empty[at.query()]);
        }
        if (!inner) {
            apply_mask(rows, base + (thread_again() & 3) * 2, x.acc_s);
        }
        if (S::lazy_rescale) {
            lazy_update_row_max(x.row_max, x.row_sum, x.scores_scale);
        }
        update_row_max<S>(a.scale_log2, shift, x.acc_s, x.row_max, x.row_sum, x.scores_scale);
        scale_apply_exp2(a.scale_log2, shift, x.acc_s, x.row_max, x.row_sum);
    };
    /* Advances to the next tile; false at the end. */
    auto advance = [&]() {
        at.tiles++;
        barrier_wait(shared_address(&smem.k_full[at.stage(0).at]), at.stage(0).parity);
        at.items += at.left == 0;
        return smem.items[at.slot(0)].tiles >= 0;
    };
    bool starts_item = true; /* this tile is its item's first */
    bool prev_starts_item =
        true; /* the previous tile is its item's first; acc_o still holds the item before it */
    auto rescale_or_finish = [&]() {
        if (!prev_starts_item) {
            rescale_o<S>(x);
        } else if (at.items > starts_item) {
            const int ended = at.slot(1 + starts_item);
            const float4 left = smem.prev_rows[thread_again() - 128];
            const float row_max[2] = {left.x, left.y}, row_sum[2] = {left.z, left.w};
            epilogue<S>(a, smem.items[ended], row_of_lane(), row_max, row_sum, x.acc_o, out_smem());
            __syncwarp(); /* all lanes have read the item */
            arrive_once<S>(smem.item_empty[ended]);
        }
    };
    auto begin_pv = [&]() {
        const ring_place<PREFILL_STAGES> before = at.stage(1);
        const prefill_item &item = smem.items[at.slot(starts_item)];
        barrier_wait(shared_address(&smem.v_full[before.at]), before.parity);
        const int32_t base = tile_base(item, starts_item ? 0 : at.left, S::keys);
        const int32_t first =
            a.p.problem.paged ? (item.row_tile.k0 & ~(a.v.box_rows - 1)) - base : 0;
        if (first > 0) { /* the rows of boxes before k0 are not copied */
            clear_value_rows<S>(smem.v[before.at], 0, first, threadIdx.x & 127, 128);
            barrier_group(thread_again() >> 7);
        }
        clear_values<S>(item, base, smem.v[before.at], thread_again() >> 7);
        start_pv<S>(descriptor_again(v, before.at * (S::v_bytes / 16)), x.p, !prev_starts_item,
                    x.acc_o);
    };
    barrier_wait(shared_address(&smem.k_full[0]), 0);
    if (smem.items[0].tiles < 0) {
        return;
    }
    begin_qk();
    row_bounds rows;
    bool inner = load_bounds(rows);
    wgmma_wait<0>();
    softmax_tile(rows, inner);
    pack_p<S>(x.acc_s, x.p);
#pragma unroll
    for (int i = 0; i < S::dv / 2; i++) {
        x.acc_o[i] = 0.0f;
    }
    x.rescales = true;
    bool more = advance();
#pragma unroll 1
    while (more) {
        /* The first two tiles of an item take the general path; inner tiles after them take the
         * inner loop. */
        const int32_t tiles = at.left - smem.items[at.slot(0)].inner_first;
        if (!prev_starts_item && at.left < smem.items[at.slot(0)].inner_end && at.left > 0 &&
            tiles > 0) {
            inner_tiles_head64<S>(a, smem, descriptor_again(q, at.query() * (S::q_bytes / 16)), k,
                                  v, tiles, at.stage(1), at.stage(0), x);
            at.tiles += tiles;
            at.left -= tiles;
            if (at.left == 0) {
                arrive_once<S>(smem.q_empty[at.query()]);
                at.items++;
                more = smem.items[at.slot(0)].tiles >= 0;
                if (!more) {
                    break;
                }
            }
        }
        starts_item = at.left == 0;
        rescale_or_finish();
        begin_qk();
        begin_pv();
        inner = load_bounds(rows);
        wgmma_wait<1>();
        prev_starts_item = starts_item;
        softmax_tile(rows, inner);
        finish_pv<S, true>(x, smem.v_empty[at.stage(1).at]);
        more = advance();
    }
    starts_item = true;
    rescale_or_finish();
    begin_pv();
    wgmma_wait<0>();
    pin(x.acc_o);
    epilogue<S>(a, smem.items[at.slot(1)], row_of_lane(), x.row_max, x.row_sum, x.acc_o,
                out_smem());
}

#endif
