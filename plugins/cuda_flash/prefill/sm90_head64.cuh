/* SPDX-License-Identifier: Apache-2.0 */
/* Prefill of heads of 64 dims without terms: 192 rows of one KV head by three warp groups of 64. A
 * tile of 128 keys has 1536 clocks of the tensor cores, as many of exponentials, and some 1,000
 * instructions of each scheduler, whose three warps are at different ones of them. A thread has 160
 * registers, of which 128 are scores, weights and sums: what can be read or made again is not kept.
 * The order of things is that of sm90_prefill.cuh. */
#ifndef CUDA_FLASH_SM90_HEAD64_CUH
#define CUDA_FLASH_SM90_HEAD64_CUH

#include "sm90_prefill.cuh"

/* threadIdx.x, read where this stands: what is made of it would take registers from there on. */
static __device__ __forceinline__ int32_t thread_again()
{
    int32_t x;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
    return x;
}

/* Of a lane in its item, of rows `row` and row + 8. */
static __device__ __forceinline__ int32_t row_of_lane()
{
    const int32_t thread = thread_again() - 128;
    return (thread >> 5) * 16 + (thread >> 2 & 7);
}

/* A matrix so many times 16 bytes further on, read from one lane: the compiler then sees that it is
 * the same in all of them, and keeps it, and the places in rings that it comes of, in uniform
 * registers. */
static __device__ __forceinline__ uint64_t matrix_here(uint64_t matrix, uint32_t further)
{
    const uint32_t low = __shfl_sync(0xffffffffu, (uint32_t)matrix + further, 0);
    return (matrix & 0xffffffff00000000u) | low;
}

/* As walk_inside. */
template <class S>
static __device__ __forceinline__ void
walk_wide(const prefill_params &a, prefill_shared<S> &mine, uint64_t q, uint64_t k, uint64_t v,
          int32_t tiles, ring_place<PREFILL_STAGES> before, ring_place<PREFILL_STAGES> stage,
          prefill_lane<S> &x)
{
    const float shift[2] = {0.0f, 0.0f};
    if (S::steady) { /* of a row all of whose scores are -inf so far */
        x.m[0] = x.m[0] == -INFINITY ? 0.0f : x.m[0];
        x.m[1] = x.m[1] == -INFINITY ? 0.0f : x.m[1];
    }
    x.shrinks = true;
    q = matrix_here(q, 0);
    uint64_t keys = matrix_here(k, stage.at * (S::k_bytes / 16)),
             values = matrix_here(v, before.at * (S::v_bytes / 16));
#pragma unroll 1
    for (; tiles > 0; tiles--) {
        multiply_keys<S>(matrix_again(q), matrix_again(keys), x.s);
        shrink_sums<S>(x);
        barrier_wait(shared_address(&mine.v_full[before.at]), before.parity);
        multiply_values<S>(matrix_again(values), x.w, 1, x.o);
        x.shrinks = !S::steady || move_bases(x.m, x.l, x.f);
        wgmma_wait<1>();
        pin(x.s);
        arrive_once<S>(mine.k_empty[stage.at]);
        if (!S::steady) {
            raise_bases<S>(a.unit, shift, x.s, x.m, x.l, x.f);
        }
        soften(a.unit, shift, x.s, x.m, x.l);
        leave_values<S, S::waits_behind>(x, mine.v_empty[before.at]);
        before = stage;
        stage.step();
        keys = matrix_here(k, stage.at * (S::k_bytes / 16));
        values = matrix_here(v, before.at * (S::v_bytes / 16));
        barrier_wait(shared_address(&mine.k_full[stage.at]), stage.parity);
    }
    x.shrinks = true;
}

/* Where a computing warp group is. Places in rings follow from the counts. */
template <class S> struct prefill_progress {
    uint32_t tiles = 0, items = 0; /* before this one */
    int32_t left = 0; /* tiles of the item with this one; 0: this one is the next item's first */

    /* Of the tile so many before this one. */
    __device__ __forceinline__ ring_place<PREFILL_STAGES> stage(uint32_t before) const
    {
        ring_place<PREFILL_STAGES> place;
        place.at = (tiles - before) % PREFILL_STAGES;
        place.parity = (tiles - before) / PREFILL_STAGES % 2;
        return place;
    }
    /* Of the item so many before this one's. */
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
static __device__ __forceinline__ void compute_wide(const prefill_params &a,
                                                    prefill_shared<S> &mine, int group)
{
    static_assert(S::terms == 0 && S::scales == PREFILL_UNSCALED && !S::cuts, "as it is planned");
    const uint64_t q = matrix_at(shared_address(mine.q[0]) + group * (64 * 128), 0, 1024),
                   k = matrix_of_all(shared_address(mine.k[0]), 0, S::k_group),
                   v = matrix_of_all(shared_address(mine.v[0]), S::column, S::v_group);
    prefill_lane<S> x;
    prefill_progress<S> at;
    x.m[0] = x.m[1] = x.l[0] = x.l[1] = 0.0f;
    auto part = [&]() { return mine.out[(thread_again() >> 5) - 4]; };
    auto begin_scores = [&]() {
        if (at.left == 0) {
            at.left = mine.items[at.slot(0)].tiles;
            mine.ended[thread_again() - 128] = make_float4(x.m[0], x.m[1], x.l[0], x.l[1]);
            x.m[0] = x.m[1] = -INFINITY;
            x.l[0] = x.l[1] = 0.0f;
            barrier_wait(shared_address(&mine.q_full[at.query()]), at.items / S::query_buffers % 2);
        }
        multiply_keys<S>(matrix_again(q, at.query() * (S::q_bytes / 16)),
                         matrix_again(k, at.stage(0).at * (S::k_bytes / 16)), x.s);
    };
    /* What the rows see, where that matters for the tile. */
    auto look = [&](prefill_rows &rows) {
        const prefill_item &item = mine.items[at.slot(0)];
        const int32_t tile = at.left - 1;
        const bool inner = tile >= item.inner_first && tile < item.inner_end;
        rows = {}; /* not what it was: that would take registers from tile to tile */
        if (!inner) {
            enter_rows<S>(a, item, row_of_lane(), rows);
        }
        return inner;
    };
    /* The scores of the tile become weights; the tile after it is looked at. */
    auto weigh = [&](const prefill_rows &rows, bool inner) {
        const prefill_item &item = mine.items[at.slot(0)];
        const int32_t base = tile_base(item, at.left - 1, S::keys);
        const float shift[2] = {0.0f, 0.0f};
        pin(x.s);
        arrive_once<S>(mine.k_empty[at.stage(0).at]);
        at.left--;
        if (at.left == 0) {
            arrive_once<S>(mine.q_empty[at.query()]);
        }
        if (!inner) {
            mask_tile(rows, base, base + (thread_again() & 3) * 2, x.s);
        }
        if (S::steady) {
            move_bases(x.m, x.l, x.f);
        }
        raise_bases<S>(a.unit, shift, x.s, x.m, x.l, x.f);
        soften(a.unit, shift, x.s, x.m, x.l);
    };
    /* Goes to the tile after it; false: there is none. */
    auto advance = [&]() {
        at.tiles++;
        barrier_wait(shared_address(&mine.k_full[at.stage(0).at]), at.stage(0).parity);
        at.items += at.left == 0;
        return mine.items[at.slot(0)].tiles >= 0;
    };
    bool begins = true; /* this tile is its item's first */
    bool fresh = true;  /* the tile before is its item's first: sums are of the item before that */
    auto settle = [&]() {
        if (!fresh) {
            shrink_sums<S>(x);
        } else if (at.items > begins) {
            const int ended = at.slot(1 + begins);
            const float4 left = mine.ended[thread_again() - 128];
            const float m[2] = {left.x, left.y}, l[2] = {left.z, left.w};
            finish_item<S>(a, mine.items[ended], row_of_lane(), m, l, x.o, part());
            __syncwarp(); /* all lanes have read the item */
            arrive_once<S>(mine.item_empty[ended]);
        }
    };
    auto add_values = [&]() {
        const ring_place<PREFILL_STAGES> before = at.stage(1);
        const prefill_item &item = mine.items[at.slot(begins)];
        barrier_wait(shared_address(&mine.v_full[before.at]), before.parity);
        clear_values<S>(a, item, tile_base(item, begins ? 0 : at.left, S::keys), mine.v[before.at],
                        thread_again() >> 7);
        multiply_values<S>(matrix_again(v, before.at * (S::v_bytes / 16)), x.w, !fresh, x.o);
    };
    barrier_wait(shared_address(&mine.k_full[0]), 0);
    if (mine.items[0].tiles < 0) {
        return;
    }
    begin_scores();
    prefill_rows rows;
    bool inner = look(rows);
    wgmma_wait<0>();
    weigh(rows, inner);
    pack_weights<S>(x.s, x.w);
#pragma unroll
    for (int i = 0; i < S::dv / 2; i++) {
        x.o[i] = 0.0f;
    }
    x.shrinks = true;
    bool more = advance();
#pragma unroll 1
    while (more) {
        /* Inner tiles behind one of their item, of which the first two go the general way. */
        const int32_t tiles = at.left - mine.items[at.slot(0)].inner_first;
        if (!fresh && at.left < mine.items[at.slot(0)].inner_end && at.left > 0 && tiles > 0) {
            walk_wide<S>(a, mine, matrix_again(q, at.query() * (S::q_bytes / 16)), k, v, tiles,
                         at.stage(1), at.stage(0), x);
            at.tiles += tiles;
            at.left -= tiles;
            if (at.left == 0) {
                arrive_once<S>(mine.q_empty[at.query()]);
                at.items++;
                more = mine.items[at.slot(0)].tiles >= 0;
                if (!more) {
                    break;
                }
            }
        }
        begins = at.left == 0;
        settle();
        begin_scores();
        add_values();
        inner = look(rows);
        wgmma_wait<1>();
        fresh = begins;
        weigh(rows, inner);
        leave_values<S, true>(x, mine.v_empty[at.stage(1).at]);
        more = advance();
    }
    begins = true;
    settle();
    add_values();
    wgmma_wait<0>();
    pin(x.o);
    finish_item<S>(a, mine.items[at.slot(1)], row_of_lane(), x.m, x.l, x.o, part());
}

#endif
