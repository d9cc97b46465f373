/* SPDX-License-Identifier: Apache-2.0 */
/* Prefill on sm_90a: 128 rows of one KV head against tiles of keys, by wgmma. Two warp groups have
 * 64 rows each; scores of the next tile are multiplied while weights of this one are made, also
 * from one item to the next. A tile of 128 keys of D 128: 64 KiB of keys and values, 8.4 MFLOP in
 * 2048 clocks of the tensor cores; its 16384 exponentials take 1024 clocks. Keys are taken from the
 * last tile to the first on a grid from position 0, an item by one CTA. */
#ifndef CUDA_FLASH_SM90_PREFILL_CUH
#define CUDA_FLASH_SM90_PREFILL_CUH

#include "sm90_launch.h"
#include "sm90_finish.cuh"
#include "ptx/sm90_wgmma.cuh"
#include "sm90_produce.cuh"

/* s = queries of this warp group x keys of a stage. */
template <class S>
static __device__ __forceinline__ void multiply_keys(uint32_t queries, uint32_t keys,
                                                     float (&s)[S::keys / 2])
{
    uint64_t q = matrix_at(queries, 0, 1024), k = matrix_at(keys, 0, S::k_group);
    pin(s);
    wgmma_begin();
#pragma unroll
    for (int i = 0; i < S::d / 16; i++) {
        wgmma_rows<S::kind, S::keys>(s, q + (i >> 2) * (PREFILL_ROWS * 8) + (i & 3) * 2,
                                     k + (i >> 2) * (S::column / 16) + (i & 3) * 2, i > 0);
    }
    wgmma_commit();
}

/* o += weights x values of a stage. */
template <class S>
static __device__ __forceinline__ void
multiply_values(uint32_t values, const uint32_t (&w)[S::keys / 16][4], float (&o)[S::dv / 2])
{
    uint64_t v = matrix_at(values, S::column, S::v_group);
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

/* Values that were not copied, or lie behind the request's end, become zero: 0 x NaN is NaN. Both
 * warp groups do it for themselves; they write the same. */
template <class S>
static __device__ __forceinline__ void clear_values(const prefill_params &a,
                                                    const prefill_item &item, int32_t base,
                                                    char *values, int barrier)
{
    int32_t low = a.p.problem.paged ? item.row_tile.k0 & ~(a.v.box_rows - 1) : 0,
            high = item.row_tile.length;
    if (base >= low && base + S::keys <= high) {
        return;
    }
    constexpr int chunks = S::dv / 8;
#pragma unroll 1
    for (int i = threadIdx.x & 127; i < S::keys * chunks; i += 128) {
        int row = i / chunks, chunk = i % chunks;
        if (base + row < low || base + row >= high) {
            *(uint4 *)(values + (row >> 3) * S::v_group + (chunk >> 3) * S::column +
                       (row & 7) * 128 + (chunk & 7) * 16) = make_uint4(0, 0, 0, 0);
        }
    }
    fence_for_boxes();
    barrier_group(barrier); /* all of it is zero */
}

template <class S>
static __device__ __forceinline__ void compute(const prefill_params &a, prefill_shared<S> &mine,
                                               int group)
{
    const int lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) & 3;
    const int32_t row = group * 64 + warp * 16 + (lane >> 2);
    const float scale = a.has_terms ? 1.0f : a.p.problem.scale * LOG2E;
    const uint32_t queries = shared_address(mine.q[0]) + group * (64 * 128);
    float s[S::keys / 2], o[S::dv / 2], m[2], l[2], f[2];
    uint32_t w[S::keys / 16][4];
    prefill_rows rows;
    ring_place<PREFILL_SLOTS> slot;
    ring_place<S::query_buffers> query;
    ring_place<PREFILL_STAGES> stage;
    int32_t left = 0, base = 0;
    auto arrive = [&](uint64_t &barrier) {
        if (lane == 0) {
            barrier_arrive(shared_address(&barrier));
        }
    };
    auto enter_item = [&](const prefill_item &item) {
        left = item.work.count;
        base = tile_base(item, item.work.first + left - 1, S::keys);
        m[0] = m[1] = -INFINITY;
        l[0] = l[1] = 0.0f;
        barrier_wait(shared_address(&mine.q_full[query.at]), query.parity);
    };
    auto begin_keys = [&]() {
        multiply_keys<S>(queries + query.at * S::q_bytes, shared_address(mine.k[stage.at]), s);
    };
    auto leave_keys = [&]() { /* the product of the keys is there */
                              pin(s);
                              arrive(mine.k_empty[stage.at]);
                              left--;
                              if (left == 0) {
                                  arrive(mine.q_empty[query.at]);
                                  query.step();
                              }
    };
    auto weigh = [&](const prefill_item &item) {
        int32_t key = base + (lane & 3) * 2;
        if (a.has_terms) {
            if (S::dv > 128) { /* no registers to keep it in */
                enter_rows(a, item, row, rows);
            }
            add_terms(a, item, rows, row, key, s);
        }
        mask_tile(rows, base, key, s);
        soften(scale, s, m, l, f);
    };
    barrier_wait(shared_address(&mine.k_full[0]), 0);
    if (mine.items[0].work.row_tile < 0) {
        return;
    }
    enter_item(mine.items[0]);
    begin_keys();
    enter_rows(a, mine.items[0], row, rows);
    wgmma_wait<0>();
    leave_keys();
    weigh(mine.items[0]);
    pack_weights<S>(s, w);
#pragma unroll
    for (int i = 0; i < S::dv / 2; i++) {
        o[i] = 0.0f;
    }
    ring_place<PREFILL_STAGES> before; /* of the tile whose weights are made */
    int before_slot = 0;
    int32_t before_base = 0;
#pragma unroll 1
    for (;;) {
        const bool ends = left == 0;
        const float ended_m[2] = {m[0], m[1]}, ended_l[2] = {l[0], l[1]};
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
        multiply_values<S>(shared_address(mine.v[before.at]), w, o);
        if (ends) {
            enter_rows(a, mine.items[slot.at], row, rows);
        }
        wgmma_wait<1>();
        leave_keys();
        weigh(mine.items[slot.at]);
        pin(s);
        wgmma_wait_behind<0>(l[0] + l[1]);
        pin(o);
        arrive(mine.v_empty[before.at]);
        pack_weights<S>(s, w);
        if (ends) {
            finish_item<S>(a, mine.items[before_slot], row, scale, ended_m, ended_l, o);
            __syncwarp(); /* all lanes have read the item */
            arrive(mine.item_empty[before_slot]);
#pragma unroll
            for (int i = 0; i < S::dv / 2; i++) {
                o[i] = 0.0f;
            }
        }
#pragma unroll
        for (int i = 0; i < S::dv / 2; i++) {
            o[i] *= f[(i >> 1) & 1];
        }
    }
    barrier_wait(shared_address(&mine.v_full[before.at]), before.parity);
    clear_values<S>(a, mine.items[before_slot], before_base, mine.v[before.at], 1 + group);
    multiply_values<S>(shared_address(mine.v[before.at]), w, o);
    wgmma_wait<0>();
    pin(o);
    finish_item<S>(a, mine.items[before_slot], row, scale, m, l, o);
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
