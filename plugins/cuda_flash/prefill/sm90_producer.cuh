/* SPDX-License-Identifier: Apache-2.0 */
/* The copying warp group of a prefill CTA: one warp takes items, one copies their queries and keys,
 * one their values. */
#ifndef CUDA_FLASH_SM90_PRODUCER_CUH
#define CUDA_FLASH_SM90_PRODUCER_CUH

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

/* All tiles of the CTA's items, from an item's last to its first: values, or queries and keys. A
 * lane has a box of each tile. Each instruction takes the place of one of the computing warps of
 * the same scheduler, so what can be is made once an item, and a tile's places come from those of
 * the tile before.
 */
template <class S, bool VALUES>
static __device__ __forceinline__ void copy_items(const prefill_params &a, prefill_shared<S> &mine)
{
    const int lane = threadIdx.x & 31;
    const prefill_walk &walk = VALUES ? a.v : a.k;
    const int box = walk.columns == 1 ? lane : lane / walk.columns;
    const int column = lane - box * walk.columns;
    const bool paged = a.p.problem.paged != 0;
    const int32_t block_size = paged ? a.p.problem.block_size : S::keys;
    const int32_t blocks = S::keys / block_size, slots = S::keys % block_size; /* of a tile */
    const uint32_t to = shared_address(VALUES ? mine.v[0] : mine.k[0]) + box * walk.row_step +
                        column * walk.column_step;
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
        /* Boxes are copied from k0 to the end of the request: behind k1 lie the step's own tokens,
         * whose blocks are there. A lane's first key is in `before` + 1 .. end - 1 then. */
        const int32_t end = lane < walk.boxes ? item.row_tile.length : 0;
        const int32_t before = item.row_tile.k0 - walk.box_rows;
        const int32_t first_head = S::scales == PREFILL_UNSCALED ? 0 : a.first_head;
        const bool whole = walk.form == PREFILL_ROW_BOX || walk.form == PREFILL_PAGE_BOX;
        const int32_t head = (item.head - first_head) * (whole ? walk.head_step : 1);
        int32_t key = tile_base(item, left - 1, S::keys) + box * walk.box_rows;
        /* of that key: its row, or slot in its block, and the block's entry */
        int32_t row = paged ? key % block_size : key + item.row_tile.key_start;
        const int64_t index = paged ? item.row_tile.table + key / block_size : 0;
        const int32_t *entry = a.p.problem.block_table + index;
        auto is_there = [&]() { return key < end && key > before; };
        int32_t block = paged && is_there() ? *entry : 0;
        bool first = !VALUES;
#pragma unroll 1
        for (; left > 0; left--) {
            if (!VALUES && lane == 0 &&
                (left == PREFILL_AHEAD || (first && left < PREFILL_AHEAD))) {
                barrier_arrive(shared_address(&mine.item_wanted));
            }
            const bool there = is_there();
            box_place at = {{column * 64, row, head, block, 0}};
            if constexpr (S::grouped) {
                at = {{0, 0, head, row >> 3, block}};
            }
            const int32_t base = key; /* of the tile, in lane 0 */
            key -= S::keys;
            if (paged) {
                row -= slots;
                entry -= blocks;
                if (row < 0) {
                    row += block_size;
                    entry--;
                }
                if (left > 1 && is_there()) { /* looked up a tile ahead */
                    block = *entry;
                }
            } else {
                row -= S::keys;
            }
            uint64_t &empty = VALUES ? mine.v_empty[stage.at] : mine.k_empty[stage.at];
            uint64_t &full = VALUES ? mine.v_full[stage.at] : mine.k_full[stage.at];
            const int count = __popc(__ballot_sync(0xffffffffu, there));
            barrier_wait(shared_address(&empty), stage.parity ^ 1);
            if (lane == 0) {
                barrier_arrive_expect(shared_address(&full), count * walk.box_bytes + scale_bytes);
            }
            __syncwarp();
            if (there) {
                copy_box5(to + stage.at * (VALUES ? S::v_bytes : S::k_bytes), &walk.map, at,
                          shared_address(&full));
            }
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
