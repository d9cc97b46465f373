/* SPDX-License-Identifier: Apache-2.0 */
/* Prefill on sm_90a: 128 rows of one KV head against tiles of keys, by wgmma. Two warp groups have
 * 64 rows each; scores of the next tile are multiplied while weights of this one are made, also
 * from one item to the next. Tiles that all rows see whole are walked in loops that hold nothing
 * but arithmetic; the others, at the edges of what rows see, go a general way that gives the same
 * bits. A tile of 128 keys of D 128: 64 KiB of keys and values, 8.4 MFLOP in 2048 clocks of the
 * tensor cores; its 16384 exponentials take 1024 clocks. Keys are taken from the last tile to the
 * first on a grid from position 0, an item by one CTA. */
#ifndef CUDA_FLASH_SM90_PREFILL_CUH
#define CUDA_FLASH_SM90_PREFILL_CUH

#include "sm90_launch.h"
#include "sm90_finish.cuh"
#include "ptx/sm90_wgmma.cuh"
#include "sm90_produce.cuh"

/* s = queries x keys; places of matrix_at. */
template <class S>
static __device__ __forceinline__ void multiply_keys(uint64_t q, uint64_t k,
                                                     float (&s)[S::keys / 2])
{
    pin(s);
    wgmma_begin();
#pragma unroll
    for (int i = 0; i < S::d / 16; i++) {
        wgmma_rows<S::kind, S::keys>(s, q + (i >> 2) * (PREFILL_ROWS * 8) + (i & 3) * 2,
                                     k + (i >> 2) * (S::column / 16) + (i & 3) * 2, i > 0);
    }
    wgmma_commit();
}

/* o += weights x values. */
template <class S>
static __device__ __forceinline__ void
multiply_values(uint64_t v, const uint32_t (&w)[S::keys / 16][4], float (&o)[S::dv / 2])
{
    pin(o);
    wgmma_begin();
#pragma unroll
    for (int i = 0; i < S::keys / 16; i++) {
        wgmma_weights<S::kind, S::dv>(o, w[i], v + i * (S::v_group / 8)); /* two groups */
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

/* What a lane of a computing warp group has. */
template <class S> struct prefill_lane {
    float s[S::keys / 2], o[S::dv / 2], m[2], l[2], f[2];
    uint32_t w[S::keys / 16][4];
};

static __device__ __forceinline__ void arrive_once(uint64_t &barrier)
{
    if ((threadIdx.x & 31) == 0) {
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
    arrive_once(empty);
    pack_weights<S>(x.s, x.w);
}

template <class S> static __device__ __forceinline__ void shrink_sums(prefill_lane<S> &x)
{
#pragma unroll
    for (int i = 0; i < S::dv / 2; i++) {
        x.o[i] *= x.f[(i >> 1) & 1];
    }
}

/* Places of matrix_at: of an item's queries, and of the first stage. */
struct inner_matrices {
    uint64_t q, k, v;
};

/* One inner tile, from stage FROM to the other: both are known here, so that nothing but the
 * arithmetic is left. `parity`: of the keys' stage, and of the values'. `key`: the lane's first. */
template <class S, int FROM, int TERM>
static __device__ __forceinline__ void
step_inside(const prefill_params &a, prefill_shared<S> &mine, const inner_matrices &at,
            int k_parity, int v_parity, const prefill_rows &rows, int32_t key, prefill_lane<S> &x)
{
    constexpr int to = FROM ^ 1;
    barrier_wait(shared_address(&mine.k_full[to]), k_parity);
    multiply_keys<S>(matrix_again(at.q), matrix_again(at.k) + to * (S::k_bytes / 16), x.s);
    barrier_wait(shared_address(&mine.v_full[FROM]), v_parity);
    multiply_values<S>(matrix_again(at.v) + FROM * (S::v_bytes / 16), x.w, x.o);
    wgmma_wait<1>();
    pin(x.s);
    arrive_once(mine.k_empty[to]);
    float shift[2] = {0.0f, 0.0f};
    if constexpr (TERM == PREFILL_CAPPED) {
        cap_scores(a, x.s);
    } else if constexpr (TERM == PREFILL_LINEAR) {
        slope_scores(a, rows, key, x.s, shift);
    }
    soften(a.unit, shift, x.s, x.m, x.l, x.f);
    leave_values<S, false>(x, mine.v_empty[FROM]);
    shrink_sums<S>(x);
}

/* Pairs of inner tiles of an item, `key` being the lane's first of the tile before them, whose
 * stage is the first one. More code for odd tiles, or to begin at the other stage, costs short
 * items more than it saves. */
template <class S, int TERM>
static __device__ __forceinline__ void
walk_inside(const prefill_params &a, prefill_shared<S> &mine, const prefill_item &item, int32_t row,
            uint32_t queries, int32_t pairs, int32_t key, int &parity, prefill_lane<S> &x)
{
    const inner_matrices at = {matrix_at(queries, 0, 1024),
                               matrix_at(shared_address(mine.k[0]), 0, S::k_group),
                               matrix_at(shared_address(mine.v[0]), S::column, S::v_group)};
    prefill_rows rows;
    if (TERM == PREFILL_LINEAR) {
        enter_rows(a, item, row, rows);
    }
#pragma unroll 1
    for (; pairs > 0; pairs--) {
        step_inside<S, 0, TERM>(a, mine, at, parity, parity, rows, key - S::keys, x);
        step_inside<S, 1, TERM>(a, mine, at, parity ^ 1, parity, rows, key - 2 * S::keys, x);
        parity ^= 1;
        key -= 2 * S::keys;
    }
}

template <class S>
static __device__ __forceinline__ void compute(const prefill_params &a, prefill_shared<S> &mine,
                                               int group)
{
    const int lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) & 3;
    const int32_t row = group * 64 + warp * 16 + (lane >> 2);
    const uint32_t queries = shared_address(mine.q[0]) + group * (64 * 128);
    prefill_lane<S> x;
    ring_place<PREFILL_SLOTS> slot;
    ring_place<S::query_buffers> query;
    ring_place<PREFILL_STAGES> stage;
    int32_t left = 0, base = 0;
    auto enter_item = [&](const prefill_item &item) {
        left = item.work.count;
        base = tile_base(item, item.work.first + left - 1, S::keys);
        x.m[0] = x.m[1] = -INFINITY;
        x.l[0] = x.l[1] = 0.0f;
        barrier_wait(shared_address(&mine.q_full[query.at]), query.parity);
    };
    auto begin_keys = [&]() {
        multiply_keys<S>(matrix_at(queries + query.at * S::q_bytes, 0, 1024),
                         matrix_at(shared_address(mine.k[stage.at]), 0, S::k_group), x.s);
    };
    auto leave_keys = [&]() { /* the product of the keys is there */
                              pin(x.s);
                              arrive_once(mine.k_empty[stage.at]);
                              left--;
                              if (left == 0) {
                                  arrive_once(mine.q_empty[query.at]);
                                  query.step();
                              }
    };
    /* What the rows see, where that matters for the next tile; there are no registers to keep it in
     * from tile to tile. */
    auto look = [&](const prefill_item &item, prefill_rows &rows) {
        int32_t tile = item.work.first + left - 1;
        bool inner = tile >= item.inner_first && tile < item.inner_end;
        if (!inner || a.terms != 0) {
            enter_rows(a, item, row, rows);
        }
        return inner;
    };
    auto weigh = [&](const prefill_item &item, const prefill_rows &rows, bool inner) {
        int32_t key = base + (lane & 3) * 2;
        float shift[2] = {0.0f, 0.0f};
        if (!inner || a.terms != 0) {
            add_terms(a, item, rows, row, key, inner, x.s, shift);
            mask_tile(rows, base, key, x.s);
        }
        soften(a.unit, shift, x.s, x.m, x.l, x.f);
    };
    /* Pairs of the item's next tiles that are inner ones. The last tile gives the queries back;
     * where there is one buffer of them, it does so at once, in the general way. */
    auto walk = [&]() {
        const prefill_item &item = mine.items[slot.at];
        int32_t least = max(item.inner_first - item.work.first, S::query_buffers == 1),
                most = item.inner_end - item.work.first, pairs = (left - least) >> 1;
        int32_t key = base + (lane & 3) * 2;
        uint32_t q = queries + query.at * S::q_bytes;
        if ((a.terms & PREFILL_MIXED) || pairs <= 0 || left > most) {
            return;
        }
        if (left == most && lacks_values<S>(a, item, base)) { /* the tile before is none of them */
            barrier_wait(shared_address(&mine.v_full[0]), stage.parity);
            clear_values<S>(a, item, base, mine.v[0], 1 + group);
        }
        if (a.terms & PREFILL_CAPPED) {
            walk_inside<S, PREFILL_CAPPED>(a, mine, item, row, q, pairs, key, stage.parity, x);
        } else if (S::dv <= 128 && (a.terms & PREFILL_LINEAR)) {
            walk_inside<S, PREFILL_LINEAR>(a, mine, item, row, q, pairs, key, stage.parity, x);
        } else {
            walk_inside<S, 0>(a, mine, item, row, q, pairs, key, stage.parity, x);
        }
        left -= 2 * pairs;
        base -= 2 * pairs * S::keys;
        if (left == 0) {
            arrive_once(mine.q_empty[query.at]);
            query.step();
        }
    };
    barrier_wait(shared_address(&mine.k_full[0]), 0);
    if (mine.items[0].work.row_tile < 0) {
        return;
    }
    enter_item(mine.items[0]);
    begin_keys();
    prefill_rows rows;
    bool inner = look(mine.items[0], rows);
    wgmma_wait<0>();
    leave_keys();
    weigh(mine.items[0], rows, inner);
    pack_weights<S>(x.s, x.w);
#pragma unroll
    for (int i = 0; i < S::dv / 2; i++) {
        x.o[i] = 0.0f;
    }
    ring_place<PREFILL_STAGES> before; /* of the tile whose weights are made */
    int before_slot = 0;
    int32_t before_base = 0;
#pragma unroll 1
    for (;;) {
        if (stage.at == 0 && left > 1) {
            walk();
        }
        const bool ends = left == 0;
        const float ended_m[2] = {x.m[0], x.m[1]}, ended_l[2] = {x.l[0], x.l[1]};
        before = stage;
        before_slot = slot.at;
        before_base = base;
        stage.step();
        barrier_wait(shared_address(&mine.k_full[stage.at]), stage.parity);
        base -= S::keys;
        if (ends) {
            slot.step();
            if (mine.items[slot.at].work.row_tile < 0) {
                break;
            }
            enter_item(mine.items[slot.at]);
        }
        begin_keys();
        barrier_wait(shared_address(&mine.v_full[before.at]), before.parity);
        clear_values<S>(a, mine.items[before_slot], before_base, mine.v[before.at], 1 + group);
        multiply_values<S>(matrix_at(shared_address(mine.v[before.at]), S::column, S::v_group), x.w,
                           x.o);
        inner = look(mine.items[slot.at], rows);
        wgmma_wait<1>();
        leave_keys();
        weigh(mine.items[slot.at], rows, inner);
        leave_values<S, true>(x, mine.v_empty[before.at]);
        if (ends) {
            finish_item<S>(a, mine.items[before_slot], row, ended_m, ended_l, x.o);
            __syncwarp(); /* all lanes have read the item */
            arrive_once(mine.item_empty[before_slot]);
#pragma unroll
            for (int i = 0; i < S::dv / 2; i++) {
                x.o[i] = 0.0f;
            }
        }
        shrink_sums<S>(x);
    }
    barrier_wait(shared_address(&mine.v_full[before.at]), before.parity);
    clear_values<S>(a, mine.items[before_slot], before_base, mine.v[before.at], 1 + group);
    multiply_values<S>(matrix_at(shared_address(mine.v[before.at]), S::column, S::v_group), x.w,
                       x.o);
    wgmma_wait<0>();
    pin(x.o);
    finish_item<S>(a, mine.items[before_slot], row, x.m, x.l, x.o);
}

template <class S>
__global__ void __launch_bounds__(PREFILL_THREADS, 1)
    prefill(const __grid_constant__ prefill_params a)
{
    extern __shared__ __align__(1024) char memory[];
    prefill_shared<S> &mine = *(prefill_shared<S> *)memory;
    const int group = threadIdx.x >> 7;
    if (threadIdx.x == 0) {
        for (int i = 0; i < S::query_buffers; i++) {
            barrier_init(shared_address(&mine.q_full[i]), 1);
            barrier_init(shared_address(&mine.q_empty[i]), CONSUMER_WARPS);
        }
        for (int i = 0; i < PREFILL_STAGES; i++) {
            barrier_init(shared_address(&mine.k_full[i]), 1);
            barrier_init(shared_address(&mine.k_empty[i]), CONSUMER_WARPS);
            barrier_init(shared_address(&mine.v_full[i]), 1);
            barrier_init(shared_address(&mine.v_empty[i]), CONSUMER_WARPS);
        }
        for (int i = 0; i < PREFILL_SLOTS; i++) {
            barrier_init(shared_address(&mine.item_full[i]), 32);
            barrier_init(shared_address(&mine.item_empty[i]), CONSUMER_WARPS);
        }
        fence_barriers();
        fetch_map(&a.q_map);
        fetch_map(&a.k.map);
        fetch_map(&a.v.map);
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
        compute<S>(a, mine, group - 1);
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
    config.blockDim = dim3(PREFILL_THREADS);
    config.dynamicSmemBytes = bytes;
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = 1;
    return cudaLaunchKernelEx(&config, prefill<S>, *a);
}

/* a NULL: only loads the kernels. */
template <int KIND, bool GROUPED>
static cudaError_t launch_prefill_layout(const prefill_params *a, int32_t num_sms,
                                         cudaStream_t stream)
{
    using small = prefill_shape<KIND, 64, 64, 128, 2, GROUPED>;
    using middle = prefill_shape<KIND, 128, 128, 128, 2, GROUPED>;
    using mixed = prefill_shape<KIND, 192, 128, 128, 1, GROUPED>;
    using large = prefill_shape<KIND, 256, 256, 64, 1, GROUPED>;
    if (a == nullptr) {
        cudaError_t error = launch_prefill_shape<small>(a, 0, stream);
        error = error ? error : launch_prefill_shape<middle>(a, 0, stream);
        error = error ? error : launch_prefill_shape<mixed>(a, 0, stream);
        return error ? error : launch_prefill_shape<large>(a, 0, stream);
    }
    return a->size == 64    ? launch_prefill_shape<small>(a, num_sms, stream)
           : a->size == 128 ? launch_prefill_shape<middle>(a, num_sms, stream)
           : a->size == 192 ? launch_prefill_shape<mixed>(a, num_sms, stream)
                            : launch_prefill_shape<large>(a, num_sms, stream);
}

template <int KIND>
static cudaError_t launch_prefill(const prefill_params *a, int32_t num_sms, cudaStream_t stream)
{
    if (a == nullptr) {
        cudaError_t error = launch_prefill_layout<KIND, false>(a, 0, stream);
        return error ? error : launch_prefill_layout<KIND, true>(a, 0, stream);
    }
    return a->grouped ? launch_prefill_layout<KIND, true>(a, num_sms, stream)
                      : launch_prefill_layout<KIND, false>(a, num_sms, stream);
}

#endif
