/* SPDX-License-Identifier: Apache-2.0 */
/* Prefill on sm_90a: 128 rows of one KV head against tiles of keys, by wgmma. Two warp groups have
 * 64 rows each; scores of the next tile are multiplied while weights of this one are made, also
 * from one item to the next. Tiles that all rows see whole are walked in a loop that holds nothing
 * but arithmetic; the others, at the edges of what rows see, go a general way that gives the same
 * bits. A tile of 128 keys of D 128: 64 KiB of keys and values, 8.4 MFLOP in 2048 clocks of the
 * tensor cores; its 16384 exponentials take 1024 clocks. Keys are taken from the last tile to the
 * first on a grid from position 0, an item by one CTA. */
#ifndef CUDA_FLASH_SM90_PREFILL_CUH
#define CUDA_FLASH_SM90_PREFILL_CUH

#include "cuda_flash/ptx/sm90_wgmma.cuh"
#include "sm90_epilogue.cuh"
#include "sm90_launch.h"
#include "sm90_producer.cuh"

template <class S>
static __device__ __forceinline__ void step_keys(uint64_t q, uint64_t k, float (&s)[S::keys / 2])
{
#pragma unroll
    for (int i = 0; i < S::q_row / 32; i++) {
        const uint64_t a = q + (i >> 2) * (S::rows * 8) + (i & 3) * 2;
        const uint64_t b = k + (i >> 2) * (S::column / 16) + (i & 3) * 2;
        if constexpr (S::fp8) {
            wgmma_rows_fp8<S::keys>(s, a, b, i > 0);
        } else {
            wgmma_rows<S::kind, S::keys>(s, a, b, i > 0);
        }
    }
}

/* s = queries x keys; places of matrix_at. */
template <class S>
static __device__ __forceinline__ void multiply_keys(uint64_t q, uint64_t k,
                                                     float (&s)[S::keys / 2])
{
    pin(s);
    wgmma_begin();
    step_keys<S>(q, k, s);
    wgmma_commit();
}

/* The same plus slopes x keys' places in the tile. */
template <class S>
static __device__ __forceinline__ void multiply_sloping_keys(uint64_t q, uint64_t k,
                                                             const uint32_t (&slopes)[4],
                                                             uint64_t ramp, float (&s)[S::keys / 2])
{
    pin(s);
    wgmma_begin();
    step_keys<S>(q, k, s);
    wgmma_terms<S::kind, S::keys>(s, slopes, ramp);
    wgmma_commit();
}

/* o = weights x values, or with `adds` o += weights x values. */
template <class S>
static __device__ __forceinline__ void
multiply_values(uint64_t v, const uint32_t (&w)[S::keys / 16][4], int adds, float (&o)[S::dv / 2])
{
    pin(o);
    wgmma_begin();
#pragma unroll
    for (int i = 0; i < S::keys / 16; i++) {
        wgmma_weights<S::kind, S::dv>(o, w[i], v + i * (S::v_group / 8), /* two groups */
                                      i > 0 ? 1 : adds);
    }
    wgmma_commit();
}

template <class S>
static __device__ __forceinline__ void pack_weights(const float (&s)[S::keys / 2],
                                                    uint32_t (&w)[S::keys / 16][4])
{
#pragma unroll
    for (int i = 0; i < S::keys / 16; i++) {
#pragma unroll
        for (int c = 0; c < 4; c++) {
            w[i][c] = pack2<S::kind>(s[8 * i + 2 * c], s[8 * i + 2 * c + 1]);
        }
    }
}

/* Keys of an item that have values: those of whole boxes from its first on, before its end. */
static __device__ __forceinline__ prefill_range valued_keys(const prefill_params &a,
                                                            const prefill_item &item)
{
    return {a.p.problem.paged ? item.row_tile.k0 & ~(a.v.box_rows - 1) : 0, item.row_tile.length};
}

/* Whether a tile has keys without values. */
template <class S>
static __device__ __forceinline__ bool lacks_values(const prefill_params &a,
                                                    const prefill_item &item, int32_t base)
{
    prefill_range keys = valued_keys(a, item);
    return base < keys.first || base + S::keys > keys.end;
}

/* Values that were not copied, or lie behind the request's end, become zero: 0 x NaN is NaN. Both
 * warp groups do it for themselves; they write the same. */
template <class S>
static __device__ __forceinline__ void clear_values(const prefill_params &a,
                                                    const prefill_item &item, int32_t base,
                                                    char *values, int barrier)
{
    prefill_range keys = valued_keys(a, item);
    if (!lacks_values<S>(a, item, base)) {
        return;
    }
    constexpr int chunks = S::dv / 8;
#pragma unroll 1
    for (int i = threadIdx.x & 127; i < S::keys * chunks; i += 128) {
        int row = i / chunks, chunk = i % chunks;
        if (base + row < keys.first || base + row >= keys.end) {
            *(uint4 *)(values + (row >> 3) * S::v_group + (chunk >> 3) * S::column +
                       (row & 7) * 128 + (chunk & 7) * 16) = make_uint4(0, 0, 0, 0);
        }
    }
    fence_for_boxes();
    barrier_group(barrier); /* all of it is zero */
}

template <int N> static __device__ __forceinline__ void clear(float (&x)[N])
{
#pragma unroll
    for (int i = 0; i < N; i++) {
        x[i] = 0.0f;
    }
}

/* What a lane of a computing warp group has. */
template <class S> struct prefill_lane {
    float s[S::keys / 2], o[S::dv / 2], m[2], l[2], f[2];
    bool shrinks; /* sums by f */
    uint32_t w[S::keys / 16][4];
};

template <class S> static __device__ __forceinline__ void arrive_once(uint64_t &barrier)
{
    if (S::wide ? elected() : (threadIdx.x & 31) == 0) {
        barrier_arrive(shared_address(&barrier));
    }
}

/* The weights are used, and what they are replaced by is made. BEHIND: not before those are known,
 * which the general way needs; in the loops of inner tiles, where ptxas waits some way into the
 * exponentials, it costs 9 %. */
template <class S, bool BEHIND>
static __device__ __forceinline__ void leave_values(prefill_lane<S> &x, uint64_t &empty)
{
    if (BEHIND) {
        pin(x.s);
        wgmma_wait_behind<0>(x.l[0] + x.l[1]);
    } else {
        wgmma_wait<0>();
    }
    pin(x.o);
    arrive_once<S>(empty);
    pack_weights<S>(x.s, x.w);
}

template <class S> static __device__ __forceinline__ void shrink_sums(prefill_lane<S> &x)
{
    if (!S::steady || x.shrinks) {
#pragma unroll
        for (int i = 0; i < S::dv / 2; i++) {
            x.o[i] *= x.f[(i >> 1) & 1];
        }
    }
}

/* Inner tiles of an item, from stage.at on, `base` being the first key of them: nothing but the
 * arithmetic. `before`: the tile before them, whose weights are made. */
template <class S>
static __device__ __forceinline__ void
walk_inside(const prefill_params &a, prefill_shared<S> &mine, const prefill_item &item, int32_t row,
            uint64_t q, uint64_t k, uint64_t v, uint64_t places, int32_t tiles, int32_t base,
            ring_place<PREFILL_STAGES> before, ring_place<PREFILL_STAGES> &stage,
            prefill_lane<S> &x)
{
    prefill_rows rows;
    prefill_ramp ramp;
    if (S::terms == PREFILL_LINEAR) {
        enter_rows<S>(a, item, row, rows);
    }
    if (S::ramps) {
        ramp = ramp_of_rows<S>(rows, unit_of<S>(a, item), base);
    }
#pragma unroll 1
    for (; tiles > 0; tiles--) {
        const uint64_t keys = matrix_again(k, stage.at * (S::k_bytes / 16));
        if constexpr (S::ramps) {
            multiply_sloping_keys<S>(matrix_again(q), keys, ramp.w, matrix_again(places), x.s);
        } else {
            multiply_keys<S>(matrix_again(q), keys, x.s);
        }
        shrink_sums<S>(x);
        barrier_wait(shared_address(&mine.v_full[before.at]), before.parity);
        multiply_values<S>(matrix_again(v, before.at * (S::v_bytes / 16)), x.w, 1, x.o);
        x.shrinks = !S::steady || move_bases(x.m, x.l, x.f);
        wgmma_wait<1>();
        pin(x.s);
        if constexpr (S::scales == PREFILL_BY_KEY) {
            scale_keys(mine.key_scale[stage.at] + (threadIdx.x & 3) * 2, x.s);
        }
        arrive_once<S>(mine.k_empty[stage.at]);
        float shift[2] = {0.0f, 0.0f};
        if constexpr (S::terms == PREFILL_CAPPED) {
            cap_scores(into_of<S>(a, item), x.s);
        } else if constexpr (S::ramps) {
#pragma unroll
            for (int r = 0; r < 2; r++) {
                shift[r] = __fmul_rn(ramp.fall[r], ramp.before[r]);
                ramp.before[r] += (float)S::keys;
            }
        } else if constexpr (S::terms == PREFILL_LINEAR) {
            slope_scores(a, rows, base + (threadIdx.x & 3) * 2, x.s, shift);
        }
        if (!S::steady) {
            raise_bases<S>(unit_of<S>(a, item), shift, x.s, x.m, x.l, x.f);
        }
        soften(unit_of<S>(a, item), shift, x.s, x.m, x.l);
        leave_values<S, S::waits_behind>(x, mine.v_empty[before.at]);
        before = stage;
        stage.step();
        base -= S::keys;
        barrier_wait(shared_address(&mine.k_full[stage.at]), stage.parity);
    }
}

/* The scores of the next tile are multiplied while the weights of the tile before it are added up,
 * and when those are, the scores of the tile after it begin before anything else. */
template <class S>
static __device__ __forceinline__ void compute(const prefill_params &a, prefill_shared<S> &mine,
                                               int group)
{
    const int lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) & 3;
    const int32_t row = group * 64 + warp * 16 + (lane >> 2);
    const uint64_t q = matrix_at(shared_address(mine.q[0]) + group * (64 * 128), 0, 1024),
                   k = matrix_at(shared_address(mine.k[0]), 0, S::k_group),
                   v = matrix_at(shared_address(mine.v[0]), S::column, S::v_group),
                   places = S::ramps ? plain_matrix_at(shared_address(mine.ramp), 128, 128) : 0;
    char *const part = mine.out[group * 4 + warp];
    prefill_lane<S> x;
    x.m[0] = x.m[1] = x.l[0] = x.l[1] = 0.0f;
    ring_place<PREFILL_SLOTS> slot;
    ring_place<S::query_buffers> query;
    ring_place<PREFILL_STAGES> stage;
    /* Of the item; the buffer's number is read from one lane, as in matrix_at: places made of it
     * are then in uniform registers. */
    auto queries = [&]() {
        const int at = S::query_buffers > 1 ? __shfl_sync(0xffffffffu, query.at, 0) : 0;
        return matrix_again(q, at * (S::q_bytes / 16));
    };
    int32_t left = 0, base = 0; /* of the item, the tile at `base` counted */
    float kept_m[2], kept_l[2]; /* of the item before */
    bool turns;                 /* the tile at `base` is its item's first */
    auto begin_scores = [&]() {
        const prefill_item &item = mine.items[slot.at];
        if (turns) {
            left = item.tiles;
            base = tile_base(item, left - 1, S::keys);
            kept_m[0] = x.m[0], kept_m[1] = x.m[1], kept_l[0] = x.l[0], kept_l[1] = x.l[1];
            x.m[0] = x.m[1] = -INFINITY;
            x.l[0] = x.l[1] = 0.0f;
            barrier_wait(shared_address(&mine.q_full[query.at]), query.parity);
        }
        multiply_keys<S>(queries(), matrix_again(k, stage.at * (S::k_bytes / 16)), x.s);
    };
    /* What the rows see, where that matters for the tile; there are no registers to keep it in from
     * tile to tile. */
    auto look = [&](const prefill_item &item, prefill_rows &rows) {
        int32_t tile = left - 1;
        bool inner = tile >= item.inner_first && tile < item.inner_end;
        if (!inner || (S::terms == PREFILL_ANY ? a.terms != 0 : S::terms == PREFILL_LINEAR)) {
            enter_rows<S>(a, item, row, rows);
        }
        return inner;
    };
    /* The scores of the tile at `base` become weights; the tile after it is looked at. */
    auto weigh = [&](const prefill_rows &rows, bool inner) {
        const prefill_item &item = mine.items[slot.at];
        int32_t key = base + (lane & 3) * 2;
        float shift[2] = {0.0f, 0.0f};
        pin(x.s);
        if constexpr (S::scales == PREFILL_BY_KEY) {
            scale_keys(mine.key_scale[stage.at] + (lane & 3) * 2, x.s);
        }
        arrive_once<S>(mine.k_empty[stage.at]);
        left--;
        base -= S::keys;
        turns = left == 0;
        if (turns) {
            arrive_once<S>(mine.q_empty[query.at]);
            query.step();
        }
        /* Those of s, of keys from the lane's first on; without a look at them where bases are
         * settled as in walk_inside. */
        auto weigh_keys = [&](int32_t first, auto &s, bool settled) {
            if (S::terms != 0 && (S::terms != PREFILL_ANY || a.terms != 0)) {
                add_terms<S>(a, item, rows, row, first, inner, s, shift);
            }
            if (!inner || (S::terms == PREFILL_ANY && a.terms != 0)) {
                mask_tile(rows, first - (lane & 3) * 2, first, s);
            }
            x.shrinks = S::steady && move_bases(x.m, x.l, x.f);
            if (!settled) {
                raise_bases<S>(unit_of<S>(a, item), shift, s, x.m, x.l, x.f);
                x.shrinks = true;
            }
            soften(unit_of<S>(a, item), shift, s, x.m, x.l);
        };
        /* Where no row sees one half of the keys, the other is all. Votes tell the compiler that
         * the branches are a warp's: else it has no uniform registers for any descriptor. */
        constexpr int n = S::keys / 4;
        float(&low)[n] = (float(&)[n])x.s, (&high)[n] = (float(&)[n])x.s[n];
        const int32_t middle = key - (lane & 3) * 2 + S::keys / 2;
        if (S::steady && inner && left + 1 < item.tiles) {
            enter_bases(x.m);
            weigh_keys(key, x.s, true);
        } else if (S::halves && !inner && __any_sync(0xffffffffu, item.row_tile.k1 <= middle)) {
            weigh_keys(key, low, false);
            clear(high);
        } else if (S::halves && !inner && __any_sync(0xffffffffu, item.row_tile.k0 >= middle)) {
            weigh_keys(key + S::keys / 2, high, false);
            clear(low);
        } else {
            weigh_keys(key, x.s, false);
        }
    };
    barrier_wait(shared_address(&mine.k_full[0]), 0);
    if (mine.items[0].tiles < 0) {
        return;
    }
    turns = true;
    /* The second group begins when the first has its scores: groups that begin together stay in
     * step, with products of both, then weights of both. The first does not wait for this parity.
     */
    barrier_wait(shared_address(&mine.first_scores), 1 - group);
    begin_scores();
    prefill_rows rows;
    bool inner = look(mine.items[0], rows);
    wgmma_wait<0>();
    arrive_once<S>(mine.first_scores);
    int adds = 0; /* the tile before, whose weights are made, is not its item's first */
    /* not as it is: an item's second tile goes the general way wherever the item stands */
    bool before_inner = false;
    weigh(rows, inner);
    pack_weights<S>(x.s, x.w);
    x.f[0] = x.f[1] = 0.0f;
#pragma unroll
    for (int i = 0; i < S::dv / 2; i++) {
        x.o[i] = 0.0f;
    }
    /* Goes to the tile after it; false: there is none. */
    auto advance = [&]() {
        stage.step();
        barrier_wait(shared_address(&mine.k_full[stage.at]), stage.parity);
        if (turns) {
            slot.step();
        }
        return mine.items[slot.at].tiles >= 0;
    };
    /* The ring's place before `stage`, where the tile before is, and the slot of its item. */
    auto stage_before = [&]() {
        ring_place<PREFILL_STAGES> before = stage;
        before.at ^= 1;
        before.parity ^= before.at;
        return before;
    };
    auto slot_before = [&](int items) { return (slot.at - items) & (PREFILL_SLOTS - 1); };
    auto add_values = [&]() {
        const ring_place<PREFILL_STAGES> before = stage_before();
        barrier_wait(shared_address(&mine.v_full[before.at]), before.parity);
        if (!S::walks || !before_inner) { /* an inner tile has values for all of its keys */
            const prefill_item &item = mine.items[slot_before(turns)];
            clear_values<S>(a, item, turns ? tile_base(item, 0, S::keys) : base + S::keys,
                            mine.v[before.at], 1 + group);
        }
        multiply_values<S>(matrix_again(v, before.at * (S::v_bytes / 16)), x.w, adds, x.o);
    };
    bool ends = false;
    float m[2], l[2];
    auto settle = [&](const float(&item_m)[2], const float(&item_l)[2]) {
        if (!ends) {
            shrink_sums<S>(x);
            return;
        }
        const int ended = slot_before(1 + turns);
        finish_item<S>(a, mine.items[ended], row, item_m, item_l, x.o, part);
        __syncwarp(); /* all lanes have read the item */
        arrive_once<S>(mine.item_empty[ended]);
    };
    bool more = advance();
#pragma unroll 1
    while (more) {
        /* Inner tiles behind one of their item. */
        if (S::walks && !ends && !turns && before_inner &&
            (S::terms != PREFILL_ANY || !(a.terms & PREFILL_MIXED))) {
            const prefill_item &item = mine.items[slot.at];
            int32_t tiles = left - max(item.inner_first, S::query_buffers == 1);
            if (tiles > 0) {
                walk_inside<S>(a, mine, item, row, queries(), k, v, places, tiles, base,
                               stage_before(), stage, x);
                left -= tiles;
                base -= tiles * S::keys;
                adds = 1;
                if (left == 0) {
                    turns = true;
                    arrive_once<S>(mine.q_empty[query.at]);
                    query.step();
                    slot.step();
                    more = mine.items[slot.at].tiles >= 0;
                    if (!more) {
                        break;
                    }
                }
            }
        }
        if (!S::early) {
            settle(kept_m, kept_l);
        }
        begin_scores();
        if (S::early) {
            settle(m, l);
        }
        add_values();
        inner = look(mine.items[slot.at], rows);
        wgmma_wait<1>();
        ends = turns;
        m[0] = kept_m[0], m[1] = kept_m[1], l[0] = kept_l[0], l[1] = kept_l[1];
        weigh(rows, inner);
        leave_values<S, true>(x, mine.v_empty[stage.at ^ 1]);
        before_inner = inner;
        adds = !ends;
        more = advance();
    }
    settle(S::early ? m : kept_m, S::early ? l : kept_l);
    add_values();
    wgmma_wait<0>();
    pin(x.o);
    finish_item<S>(a, mine.items[slot_before(1)], row, x.m, x.l, x.o, part);
    if (S::boxes_rows && lane == 0) {
        wait_for_stored_boxes();
    }
}

/* The same of three warp groups: sm90_head64.cuh. */
template <class S>
static __device__ __forceinline__ void compute_wide(const prefill_params &a,
                                                    prefill_shared<S> &mine, int group);

template <class S>
__global__ void __launch_bounds__(S::threads, 1) prefill(const __grid_constant__ prefill_params a)
{
    extern __shared__ __align__(1024) char memory[];
    prefill_shared<S> &mine = *(prefill_shared<S> *)memory;
    const int group = threadIdx.x >> 7;
    if (threadIdx.x == 0) {
        for (int i = 0; i < S::query_buffers; i++) {
            barrier_init(shared_address(&mine.q_full[i]), 1);
            barrier_init(shared_address(&mine.q_empty[i]), S::warps);
        }
        for (int i = 0; i < PREFILL_STAGES; i++) {
            barrier_init(shared_address(&mine.k_full[i]), 1);
            barrier_init(shared_address(&mine.k_empty[i]), S::warps);
            barrier_init(shared_address(&mine.v_full[i]), 1);
            barrier_init(shared_address(&mine.v_empty[i]), S::warps);
        }
        for (int i = 0; i < PREFILL_SLOTS; i++) {
            barrier_init(shared_address(&mine.item_full[i]), 32);
            barrier_init(shared_address(&mine.item_empty[i]), S::warps);
        }
        barrier_init(shared_address(&mine.item_wanted), 1);
        barrier_init(shared_address(&mine.first_scores), 4);
        fence_barriers();
        fetch_map(&a.q_map);
        fetch_map(&a.k.map);
        fetch_map(&a.v.map);
        if (S::boxes_rows && a.boxes_rows) {
            fetch_map(&a.out_map);
        }
    }
    if (S::ramps) {
        fill_ramp<S>(mine.ramp);
    }
    __syncthreads(); /* the barriers are there */
    wait_for_earlier_kernels();
    let_later_kernels_begin();
    if (group == 0) {
        give_registers<S::copy_registers>();
        const int warp = threadIdx.x >> 5;
        if (warp == 0) {
            copy_items<S, false>(a, mine);
        } else if (warp == 1) {
            copy_items<S, true>(a, mine);
        } else if (warp == 2) {
            take_items<S>(a, mine);
        }
    } else {
        take_registers<S::compute_registers>();
        if constexpr (S::wide) {
            compute_wide<S>(a, mine, group - 1);
        } else {
            compute<S>(a, mine, group - 1);
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
    cudaLaunchAttribute attribute;
    cudaLaunchConfig_t config = {};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    config.gridDim = dim3((unsigned)num_sms);
    config.blockDim = dim3(S::threads);
    config.dynamicSmemBytes = bytes;
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = 1;
    return cudaLaunchKernelEx(&config, prefill<S>, *a);
}

/* Whether there are kernels of their own for terms, and which; other calls take PREFILL_ANY, whose
 * pages come column by column: `has_kernel` and `map_tensors` in sm90_prefill.c. */
template <int KIND> static constexpr bool has_capped = KIND == KIND_BF16;
template <int TERMS> static constexpr bool has_groups = TERMS != PREFILL_ANY;
template <int TERMS> static constexpr bool has_mixed = TERMS == 0 || TERMS == PREFILL_ANY;
template <int TERMS> static constexpr bool has_large = TERMS != PREFILL_LINEAR;

/* The shape of a head size. SIZE 192 is with values of 128; copies have none of their own for it.
 */
template <int KIND, int SIZE, bool GROUPED, int TERMS, int SCALES> struct prefill_sized {
    static constexpr int queries =
        SIZE >= 192 || (SIZE == 128 && TERMS == PREFILL_ANY && SCALES == PREFILL_BY_KEY) ? 1 : 2;
    static constexpr bool there = SIZE == 192   ? has_mixed<TERMS> && SCALES == PREFILL_UNSCALED
                                  : SIZE == 256 ? has_large<TERMS>
                                                : true;
    using shape = prefill_shape<KIND, SIZE, SIZE == 192 ? 128 : SIZE, SIZE == 256 ? 64 : 128,
                                queries, GROUPED, TERMS, SCALES>;
};

/* a NULL: only loads the kernel. */
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

/* Over copies of narrow values and keys of e4m3, by queries in it. */
template <int KIND, int SIZE>
static cudaError_t launch_fp8(const prefill_params *a, int32_t num_sms, cudaStream_t stream)
{
    if constexpr (SIZE == 128 || SIZE == 256) {
        return launch_prefill_size<KIND, SIZE, false, 0, PREFILL_IN_FP8>(a, num_sms, stream);
    }
    return a == nullptr ? cudaSuccess : cudaErrorInvalidValue;
}

/* Over copies of narrow keys and values. */
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

/* a NULL: only loads the kernels. */
template <int KIND, int SIZE, int TERMS>
static cudaError_t launch_prefill_layout(const prefill_params *a, int32_t num_sms,
                                         cudaStream_t stream)
{
    if constexpr (has_groups<TERMS>) {
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
    if (a == nullptr || a->kernel == 0) {
        error = launch_prefill_layout<KIND, SIZE, 0>(a, num_sms, stream);
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
