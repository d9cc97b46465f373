/* SPDX-License-Identifier: Apache-2.0 */
/* The copying warp group of a prefill CTA: one warp takes items, one copies their queries and keys,
 * one their values. */
#ifndef CUDA_FLASH_SM90_PRODUCE_CUH
#define CUDA_FLASH_SM90_PRODUCE_CUH

#include <stddef.h>

#include "gpu/device/rows.h"
#include "sm90_shape.cuh"

/* What an item's products are multiplied by. */
static __device__ __forceinline__ float scale_of_head(const prefill_params &a, int32_t head)
{
    return cache_scale(a.narrow[0], head) * query_scale(a.p, head);
}

/* Whether the biases of a KV head's rows fall from key to key before a query, by slopes that fit
 * into two parts of f16. */
static __device__ __forceinline__ bool slopes_fall(const prefill_params &a, int32_t head)
{
    bool fall = true;
    for (int32_t h = threadIdx.x & 31; h < a.p.problem.group; h += 32) {
        const float slope = a.p.problem.slopes[head * a.p.problem.group + h] * a.of_bias;
        fall = fall && slope >= 0.0f && slope < PREFILL_RAMP_UNIT * 65504.0f;
    }
    return __all_sync(0xffffffffu, fall);
}

/* Items for this CTA: number blockIdx.x, then whatever number it draws when the one before is
 * nearly copied. Every item draws one number, so who gets the last puts the counter back. */
template <class S>
static __device__ __forceinline__ void take_items(const prefill_params &a, prefill_shared<S> &mine)
{
    constexpr int words = sizeof(prefill_item) / 4;
    static_assert(words <= 32, "a word for a lane");
    const int lane = threadIdx.x & 31;
    int32_t index = blockIdx.x, parity = 0;
    auto load = [&](int32_t count) {
        return index < count && lane < words ? ((const int32_t *)&a.items[index])[lane] : -1;
    };
    int32_t word = load(a.room), items = a.header->items; /* both at once */
    const int32_t ctas = (int32_t)gridDim.x;
    const bool shares = items > ctas;
    auto draw = [&]() {
        int32_t drawn = 0;
        index = items;
        if (shares && lane == 0) {
            drawn = atomicAdd(&a.header->taken, 1);
            if (drawn == items - 1) {
                a.header->taken = 0;
            }
        }
        if (shares) {
            index = ctas + __shfl_sync(0xffffffffu, drawn, 0);
            word = load(items);
        }
    };
    ring_place<PREFILL_SLOTS> slot;
    for (;; slot.step()) {
        if (S::scales != PREFILL_UNSCALED) {
            int32_t head = __shfl_sync(0xffffffffu, word, 1);
            while (index < items && (head < a.first_head || head >= a.end_head)) {
                draw();
                head = __shfl_sync(0xffffffffu, word, 1);
            }
            if (S::by_head && index < items && lane == offsetof(prefill_item, scale) / 4) {
                word = __float_as_int(scale_of_head(a, head));
            }
        }
        if (S::terms == PREFILL_LINEAR && index < items &&
            !slopes_fall(a, __shfl_sync(0xffffffffu, word, 1)) &&
            lane == offsetof(prefill_item, inner_end) / 4) {
            word = -1; /* all tiles go the general way */
        }
        barrier_wait(shared_address(&mine.item_empty[slot.at]), slot.parity ^ 1);
        if (lane < words) {
            ((int32_t *)&mine.items[slot.at])[lane] = index < items ? word : -1;
        }
        barrier_arrive(shared_address(&mine.item_full[slot.at])); /* all lanes: 32 arrivals */
        if (index >= items) {
            break;
        }
        if (shares) {
            barrier_wait(shared_address(&mine.item_wanted), parity);
            parity ^= 1;
        }
        draw();
    }
}

/* The block of the box rows that this lane looks up, of a tile that begins at key `base`. */
template <class S>
static __device__ __forceinline__ int32_t block_of_lane(const prefill_params &a,
                                                        const prefill_item &item, int32_t base,
                                                        int lane)
{
    int32_t rows = a.k.box_rows, key = base + lane * rows;
    if (!a.p.problem.paged || lane * rows >= S::keys || !is_copied(item, key, rows)) {
        return 0;
    }
    return a.p.problem.block_table[item.row_tile.table + key / a.p.problem.block_size];
}

/* One tile of K or V. `block`: of block_of_lane; further: bytes that the barrier counts next to
 * it. */
template <class S>
static __device__ __forceinline__ void
copy_tile(const prefill_params &a, const prefill_walk &walk, const prefill_item &item, int32_t base,
          int32_t block, uint32_t to, uint32_t barrier, int further, int lane)
{
    int32_t box = walk.columns == 1 ? lane : lane / walk.columns;
    int32_t column = lane - box * walk.columns, key = base + box * walk.box_rows;
    bool mine = lane < walk.boxes && is_copied(item, key, walk.box_rows);
    block = __shfl_sync(0xffffffffu, block, box);
    int count = __popc(__ballot_sync(0xffffffffu, mine));
    if (lane == 0) {
        barrier_arrive_expect(barrier, count * walk.box_bytes + further);
    }
    __syncwarp();
    if (!mine) {
        return;
    }
    int32_t head = S::scales == PREFILL_UNSCALED ? item.head : item.head - a.first_head;
    int32_t row = key + item.row_tile.key_start;
    int32_t slot = a.p.problem.paged ? key % a.p.problem.block_size : 0;
    box_place at;
    if (walk.form == PREFILL_ROW_BOX) {
        at = {{0, row, head * walk.head_step, 0, 0}};
    } else if (walk.form == PREFILL_PAGE_BOX) {
        at = {{0, 0, head * walk.head_step, slot >> 3, block}};
    } else if (walk.form == PREFILL_ROW_COLUMNS) {
        at = {{column * 64, row, head, 0, 0}};
    } else {
        at = {{column * 64, slot, head, block, 0}};
    }
    copy_box5(to + box * walk.row_step + column * walk.column_step, &walk.map, at, barrier);
}

template <class S>
static __device__ __forceinline__ void copy_queries(const prefill_params &a,
                                                    const prefill_item &item, uint32_t to,
                                                    uint32_t barrier, int lane)
{
    if (lane == 0) {
        barrier_arrive_expect(barrier, a.query_bytes);
    }
    __syncwarp();
    if (lane < S::q_row / 128) {
        int32_t token = item.row_tile.query_start + item.first_query;
        box_place at = {{lane * 64, item.head * a.p.problem.group, token, 0, 0}};
        copy_box5(to + lane * (S::rows * 128), &a.q_map, at, barrier);
    }
}

/* All tiles of the CTA's items, from an item's last to its first: values, or queries and keys. */
template <class S, bool VALUES>
static __device__ __forceinline__ void copy_items(const prefill_params &a, prefill_shared<S> &mine)
{
    const int lane = threadIdx.x & 31;
    constexpr int scale_bytes = !VALUES && S::scales == PREFILL_BY_KEY ? S::keys * 4 : 0;
    ring_place<PREFILL_SLOTS> slot;
    ring_place<S::query_buffers> query;
    ring_place<PREFILL_STAGES> stage;
#pragma unroll 1
    for (;; slot.step()) {
        barrier_wait(shared_address(&mine.item_full[slot.at]), slot.parity);
        const prefill_item &item = mine.items[slot.at];
        int32_t left = item.tiles;
        if (item.tiles < 0) {
            break;
        }
        int32_t base = tile_base(item, left - 1, S::keys);
        int32_t block = block_of_lane<S>(a, item, base, lane);
        bool first = !VALUES;
        const int32_t late = min(left, PREFILL_AHEAD);
#pragma unroll 1
        for (; left > 0; left--) {
            if (!VALUES && left == late && lane == 0) {
                barrier_arrive(shared_address(&mine.item_wanted));
            }
            int32_t next = 0;
            if (left > 1) { /* looked up a tile ahead */
                next = block_of_lane<S>(a, item, base - S::keys, lane);
            }
            uint64_t &empty = VALUES ? mine.v_empty[stage.at] : mine.k_empty[stage.at];
            uint64_t &full = VALUES ? mine.v_full[stage.at] : mine.k_full[stage.at];
            barrier_wait(shared_address(&empty), stage.parity ^ 1);
            copy_tile<S>(a, VALUES ? a.v : a.k, item, base, block,
                         shared_address(VALUES ? mine.v[stage.at] : mine.k[stage.at]),
                         shared_address(&full), scale_bytes, lane);
            if (scale_bytes > 0 && lane == 0) {
                copy_span(shared_address(mine.key_scale[stage.at]), key_scales_of(a, item) + base,
                          scale_bytes, shared_address(&full));
            }
            if (first) {
                barrier_wait(shared_address(&mine.q_empty[query.at]), query.parity ^ 1);
                copy_queries<S>(a, item, shared_address(mine.q[query.at]),
                                shared_address(&mine.q_full[query.at]), lane);
                query.step();
                first = false;
            }
            stage.step();
            base -= S::keys;
            block = next;
        }
    }
    if (!VALUES) {
        barrier_wait(shared_address(&mine.k_empty[stage.at]), stage.parity ^ 1);
        if (lane == 0) { /* no keys: the consumers look at the item, which is none */
            barrier_arrive(shared_address(&mine.k_full[stage.at]));
        }
    }
}

#endif
