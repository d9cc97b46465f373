/* SPDX-License-Identifier: Apache-2.0 */
/* The producer warp group of a prefill CTA: one warp draws items, one copies their queries and
 * keys, one copies their values. */
#ifndef CUDA_FLASH_SM90_PRODUCER_CUH
#define CUDA_FLASH_SM90_PRODUCER_CUH

#include <stddef.h>

#include "gpu/device/rows.h"
#include "sm90_shape.cuh"

/* The factor of an item's Q K^T: the scales of its keys and queries. */
GPU_INLINE float scale_of_head(const prefill_params &a, int32_t head)
{
    return cache_scale(a.narrow[0], head) * query_scale(a.p, head);
}

/* Whether the ALiBi biases of a KV head's rows fall with the distance and the slopes fit into two
 * f16 numbers. */
GPU_INLINE bool slopes_fall(const prefill_params &a, int32_t head)
{
    bool fall = true;
    for (int32_t h = threadIdx.x & 31; h < a.p.problem.group; h += 32) {
        const float slope = a.p.problem.slopes[head * a.p.problem.group + h] * a.bias_scale;
        fall = fall && slope >= 0.0f && slope < PREFILL_RAMP_UNIT * 65504.0f;
    }
    return __all_sync(0xffffffffu, fall);
}

#define PREFILL_DRAWER 2 /* the warp that draws items */

/* Draws the CTA's items: first number blockIdx.x, then the next free number each time the previous
 * item is nearly copied. Every item draws once, so the CTA that draws the last number resets the
 * counter. The first is read before earlier kernels have ended: the one that plans lets no later
 * kernel begin before its end, and releases its stores. */
template <class S> GPU_INLINE void draw_items(const prefill_params &a, prefill_shared<S> &smem)
{
    constexpr int words = sizeof(prefill_item) / 4;
    static_assert(words <= 32, "a word for a lane");
    const int lane = threadIdx.x & 31;
    int32_t index = blockIdx.x, parity = 0;
    /* the halves of an item of the schedule */
    const int32_t halves = S::wide ? (a.p.problem.head_size_v + S::dv - 1) / S::dv : 1;
    auto load = [&](int32_t count) {
        if (S::wide && lane == offsetof(prefill_item, part) / 4) {
            return index % halves;
        }
        return index < count && lane < words
                   ? __ldcg((const int32_t *)&a.items[index / halves] + lane)
                   : -1;
    };
    int32_t word = load(a.room), items = __ldcg(&a.header->items) * halves; /* both loads overlap */
    const int32_t ctas = (int32_t)gridDim.x;
    const bool shares = items > ctas;
    wait_for_earlier_kernels();
    let_later_kernels_begin();
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
            word = -1; /* no inner tiles: all take the general path */
        }
        barrier_wait(shared_address(&smem.item_empty[slot.at]), slot.parity ^ 1);
        if (lane < words) {
            ((int32_t *)&smem.items[slot.at])[lane] = index < items ? word : -1;
        }
        barrier_arrive(shared_address(&smem.item_full[slot.at])); /* all 32 lanes arrive */
        if (index >= items) {
            break;
        }
        if (shares) {
            barrier_wait(shared_address(&smem.item_wanted), parity);
            parity ^= 1;
        }
        draw();
    }
}

template <class S>
GPU_INLINE void copy_query_column(const prefill_params &a, const prefill_item &item, uint32_t to,
                                  uint32_t barrier, int column)
{
    int32_t token = item.row_tile.query_start + item.first_query;
    box_place at = {{column * 64, item.head * a.p.problem.group, token, 0, 0}};
    copy_box5(to + column * (S::rows * 128), &a.q_map, at, barrier);
}

template <class S>
GPU_INLINE void copy_queries(const prefill_params &a, const prefill_item &item, uint32_t to,
                             uint32_t barrier, int lane)
{
    if (lane == 0) {
        barrier_arrive_expect(barrier, a.query_bytes);
    }
    __syncwarp();
    if (lane < S::q_row / 128) {
        copy_query_column<S>(a, item, to, barrier, lane);
    }
}

/* Copies an item's queries for each warp group as soon as the group has read the previous item's,
 * whose parity is `parity`; or for both at once, where no whole queries are 64 rows. */
template <class S>
GPU_INLINE void copy_queries_by_group(const prefill_params &a, prefill_shared<S> &smem,
                                      const prefill_item &item, int parity, int lane)
{
    prefill_item rows = item;
#pragma unroll 1
    for (int group = 0; group < S::groups; group++) {
        barrier_wait(shared_address(&smem.q_empty[group]), parity);
        if (boxes_by_group<S>(a)) {
            copy_queries<S>(a, rows, shared_address(smem.q[0]) + group * (64 * 128),
                            shared_address(&smem.q_full[group]), lane);
            rows.first_query += a.queries / S::groups;
        }
    }
    if (!boxes_by_group<S>(a)) {
        copy_queries<S>(a, item, shared_address(smem.q[0]), shared_address(&smem.q_full[0]), lane);
    }
}

/* Copies a tile's keys part by part. The queries of an item come with the parts of its first tile,
 * once the previous item's have been read, whose parity is `queries`; -1: another tile. */
template <class S>
GPU_INLINE void copy_parts(const prefill_params &a, prefill_shared<S> &smem,
                           const prefill_item &item, uint32_t to, const prefill_walk &walk,
                           const box_place &at, bool there, int column, int parity, int queries)
{
    constexpr int columns = S::d / 64 / S::k_parts; /* in a part */
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int part = 0; part < S::k_parts; part++) {
        const uint32_t full = shared_address(&smem.k_full[part]);
        const bool own = there && column / columns == part;
        const int count = __popc(__ballot_sync(0xffffffffu, own));
        barrier_wait(shared_address(&smem.k_empty[part]), parity ^ 1);
        if (queries >= 0 && part == 0) {
            barrier_wait(shared_address(&smem.q_empty[0]), queries);
        }
        if (lane == 0) {
            barrier_arrive_expect(full, count * walk.box_bytes +
                                            (queries >= 0 ? a.query_bytes / S::k_parts : 0));
        }
        __syncwarp();
        if (own) {
            copy_box5(to, &walk.map, at, full);
        }
        if (queries >= 0 && lane / columns == part) {
            copy_query_column<S>(a, item, shared_address(smem.q[0]), full, lane);
        }
    }
}

/* The two warps that copy tiles meet. */
GPU_INLINE void barrier_loaders()
{
    asm volatile("bar.sync 4, 64;" ::: "memory");
}

/* Writes zeros to rows first .. end - 1 of a tile's values, as one of `threads` threads. */
template <class S>
GPU_INLINE void clear_value_rows(char *values, int first, int end, int thread, int threads)
{
    constexpr int chunks = S::dv / 8;
#pragma unroll 1
    for (int i = first * chunks + thread; i < end * chunks; i += threads) {
        const int row = i / chunks, chunk = i % chunks;
        *(uint4 *)(values + (row >> 3) * S::v_group + (chunk >> 3) * S::column + (row & 7) * 128 +
                   (chunk & 7) * 16) = make_uint4(0, 0, 0, 0);
    }
    fence_async_proxy();
}

/* Copies all tiles of the CTA's items, each item from its last tile to its first: values, or
 * queries and keys. Each lane has one box of a tile. Every instruction here takes an issue slot
 * from the consumer warps of the same scheduler, so invariants are computed once an item and
 * coordinates are derived from the previous tile's. */
template <class S, bool VALUES>
GPU_INLINE void producer(const prefill_params &a, prefill_shared<S> &smem)
{
    const int lane = threadIdx.x & 31;
    const prefill_walk &walk = VALUES ? a.v : a.k;
    const int box = walk.columns == 1 ? lane : lane / walk.columns;
    const int column = lane - box * walk.columns;
    const bool paged = a.p.problem.paged != 0;
    const int32_t block_size = paged ? a.p.problem.block_size : S::keys;
    const int32_t blocks = S::keys / block_size, slots = S::keys % block_size; /* per tile */
    const uint32_t to = shared_address(VALUES ? smem.v[0] : smem.k[0]) + box * walk.row_step +
                        column * walk.column_step;
    constexpr int scale_bytes = !VALUES && S::scales == PREFILL_BY_KEY ? S::keys * 4 : 0;
    ring_place<PREFILL_SLOTS> slot;
    ring_place<S::query_buffers> query;
    ring_place<S::stages> stage;
#pragma unroll 1
    for (;; slot.step()) {
        barrier_wait(shared_address(&smem.item_full[slot.at]), slot.parity);
        const prefill_item &item = smem.items[slot.at];
        int32_t left = item.tiles;
        if (item.tiles < 0) {
            break;
        }
        /* Boxes are copied from k0 to the end of the request: the step's own tokens after k1 have
         * blocks, too. The first key of a box to copy is in before + 1 .. end - 1. */
        const int32_t end = lane < walk.boxes ? item.row_tile.length : 0;
        const int32_t before = item.row_tile.k0 - walk.box_rows;
        const int32_t first_head = S::scales == PREFILL_UNSCALED ? 0 : a.first_head;
        const bool whole = walk.form == PREFILL_ROW_BOX || walk.form == PREFILL_PAGE_BOX;
        const int32_t head = (item.head - first_head) * (whole ? walk.head_step : 1);
        int32_t key = tile_base(item, left - 1, S::keys) + box * walk.box_rows;
        /* The key's row, or its slot in its block, and the block's entry in the table. */
        int32_t row = paged ? key % block_size : key + item.row_tile.key_start;
        const int64_t index = paged ? item.row_tile.table + key / block_size : 0;
        const int32_t *entry = a.p.problem.block_table + index;
        auto is_there = [&]() { return key < end && key > before; };
        int32_t block = paged && is_there() ? *entry : 0;
        bool first = !VALUES;
        /* A part's first tile waits for memory: queries and keys are copied before values. */
        const bool ordered = S::cuts && !S::q_by_group && item.part > 0;
        auto load_queries = [&]() {
            barrier_wait(shared_address(&smem.q_empty[query.at]), query.parity ^ 1);
            copy_queries<S>(a, item, shared_address(smem.q[query.at]),
                            shared_address(&smem.q_full[query.at]), lane);
        };
        if (ordered && VALUES) {
            barrier_loaders();
        } else if (ordered) {
            load_queries();
        }
#pragma unroll 1
        for (; left > 0; left--) {
            if (!VALUES && lane == 0 &&
                (left == PREFILL_AHEAD || (first && left < PREFILL_AHEAD))) {
                barrier_arrive(shared_address(&smem.item_wanted));
            }
            const bool there = is_there();
            box_place at = {{column * 64 + (VALUES ? first_dim<S>(item) : 0), row, head, block, 0}};
            if constexpr (S::grouped) {
                at = {{0, 0, head, row >> 3, block}};
            }
            const int32_t base = key; /* the tile's first key, in lane 0 */
            key -= S::keys;
            if (paged) {
                row -= slots;
                entry -= blocks;
                if (row < 0) {
                    row += block_size;
                    entry--;
                }
                if (left > 1 && is_there()) { /* looks up the block one tile ahead */
                    block = *entry;
                }
            } else {
                row -= S::keys;
            }
            if constexpr (!VALUES && S::k_parts > 1) {
                copy_parts<S>(a, smem, item, to, walk, at, there, column, stage.parity,
                              first ? query.parity ^ 1 : -1);
                if (first) {
                    query.step();
                    first = false;
                }
                stage.step();
                continue;
            }
            uint64_t &empty = VALUES ? smem.v_empty[stage.at] : smem.k_empty[stage.at];
            uint64_t &full = VALUES ? smem.v_full[stage.at] : smem.k_full[stage.at];
            const int count = __popc(__ballot_sync(0xffffffffu, there));
            barrier_wait(shared_address(&empty), stage.parity ^ 1);
            /* Boxes before k0 are not copied. Three groups have no registers left for it. */
            if (VALUES && !S::three_groups && paged && left == 1) {
                const int32_t rows = item.row_tile.k0 & (S::keys - 1) & ~(walk.box_rows - 1);
                clear_value_rows<S>(smem.v[stage.at], 0, rows, lane, 32);
                __syncwarp(); /* all lanes' zeros are written */
            }
            if (lane == 0) {
                barrier_arrive_expect(shared_address(&full), count * walk.box_bytes + scale_bytes);
            }
            __syncwarp();
            if (there) {
                copy_box5(to + stage.at * (VALUES ? S::v_bytes : S::k_bytes), &walk.map, at,
                          shared_address(&full));
            }
            if (scale_bytes > 0 && lane == 0) {
                copy_span(shared_address(smem.key_scale[stage.at]), key_scales_of(a, item) + base,
                          scale_bytes, shared_address(&full));
            }
            if (first) {
                if constexpr (S::q_by_group) {
                    copy_queries_by_group<S>(a, smem, item, query.parity ^ 1, lane);
                } else if (ordered) {
                    barrier_loaders();
                } else {
                    load_queries();
                }
                query.step();
                first = false;
            }
            stage.step();
        }
    }
    if (!VALUES) {
        barrier_wait(shared_address(&smem.k_empty[stage.at]), stage.parity ^ 1);
        if (lane == 0) { /* a stage without keys: the consumers find that the items have ended */
            barrier_arrive(shared_address(&smem.k_full[stage.at]));
        }
    }
}

#endif
