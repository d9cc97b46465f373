/* SPDX-License-Identifier: Apache-2.0 */
/* The state kernel of gated delta by wgmma, 64 rows of S [Dv, Dk] of a value head for each CTA:
 * they are the left operand of a warp group's products, in registers, so that the accumulator of
 * one product is the operand of the next. One warp group updates the state, one makes the outputs
 * from what the first publishes, two convolve the values, every other chunk each.
 *     X = S K^T;  Y = V - decay X;  R = Y T^T;  O = decay S Q^T + R P^T;  S <- decay S + R K
 * S, Y and R are f16 operands in units of a power of two for each row. A token multiplies S by I -
 * beta k k^T, which does not lengthen a row since |k| <= 1, and adds beta v k^T. With M the largest
 * value of a row in the chunk, |S| grows by at most CHUNK M, and no element of Y, R or S exceeds
 * |S| + (CHUNK + 1) M. Therefore the unit can be chosen before the chunk's products. Without a
 * delta R is V times the factors of its tokens, and M has factors.most, which bounds elements of
 * keys. */
#ifndef CUDA_FLASH_SM90_DELTA_STATE64_CUH
#define CUDA_FLASH_SM90_DELTA_STATE64_CUH

#include "sm90_delta_state64_update.cuh"

template <bool ADDITIVE>
GPU_INLINE void make_outputs64(const sm80_delta_params &a, const state_item &shared_item,
                               const chunk_stage &stage, team_memory &team, team_barriers &barriers,
                               int32_t c, uint64_t queries, uint64_t scores)
{
    int32_t lane = lane_index(), pair = (lane & 3) * 2;
    float o[CHUNK / 2], r[CHUNK / 2], skipped[TOKEN_TILES][4];
    uint32_t state[KEY_STEPS][4], change[TOKEN_STEPS][4];
    barrier_wait_for(barriers.state_full, c);
    float2 state_scale = team.state_scale[lane];
#pragma unroll
    for (int step = 0; step < KEY_STEPS; step++) {
        take_four(state[step], team.state[step][lane]);
    }
    barrier_give(barriers.state_empty);
    multiply_dims(o, state, queries);
    if constexpr (ADDITIVE) {
        skip_values(a, shared_item.head, team, barriers, c, skipped);
    }
    wgmma_wait<0>(); /* R arrives after this and uses S's registers */
    pin(o);
    barrier_wait_for(barriers.change_full, c);
    float2 change_scale = team.change_scale[lane];
#pragma unroll
    for (int step = 0; step < TOKEN_STEPS; step++) {
        take_four(change[step], team.change[step][lane]);
    }
    barrier_give(barriers.change_empty);
    pin(r);
    wgmma_begin();
#pragma unroll
    for (int step = 0; step < TOKEN_STEPS; step++) {
        wgmma_rs_bk<KIND_F16, CHUNK>(r, change[step], scores + step * 2, step > 0);
    }
    wgmma_commit();
    wgmma_wait<0>();
    pin(r);
    if (__any_sync(GPU_ALL_LANES,
                   state_scale.x != change_scale.x || state_scale.y != change_scale.y)) {
        state_scale.x *= inverse_of(change_scale.x), state_scale.y *= inverse_of(change_scale.y);
#pragma unroll
        for (int i = 0; i < CHUNK / 2; i++) {
            o[i] *= i & 2 ? state_scale.y : state_scale.x;
        }
    }
    change_scale.x *= a.p.scale, change_scale.y *= a.p.scale;
#pragma unroll
    for (int n = 0; n < TOKEN_TILES; n++) {
        float2 decay = *(const float2 *)&stage.head.from_start[n * 8 + pair];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float sum = fmaf(o[4 * n + i], i & 1 ? decay.y : decay.x, r[4 * n + i]);
            o[4 * n + i] = sum * (i & 2 ? change_scale.y : change_scale.x);
        }
    }
    if constexpr (ADDITIVE) {
        finish_outputs(stage, skipped, (float(&)[TOKEN_TILES][4])o);
    }
    store_outputs(a, item_of_team(shared_item, warp_index() % STATE64_TEAMS), c * CHUNK, o);
}

/* Waits until chunk c of an item is prepared, for ordinary loads and bulk copies of this warp;
 * checks as many flags as it has lanes. All chunks below the result are prepared. */
GPU_INLINE int32_t wait_for_chunk(const sm80_delta_params &a, const state_item &item, int32_t c)
{
    int32_t key_head = item.head / a.group;
    int32_t own = min(c + lane_index(), item.num_chunks - 1);
    const uint32_t *flag = flag_of(a, item.first_chunk + own, key_head);
    uint32_t there = 0;
    while ((there & 1) == 0) {
        uint32_t is_there;
        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(is_there) : "l"(flag) : "memory");
        there = __ballot_sync(GPU_ALL_LANES, is_there != 0);
    }
    sync_lanes();
    asm volatile("fence.proxy.async;" ::: "memory");
    return c + (~there == 0 ? GPU_LANES : __ffs((int)~there) - 1);
}

/* Copies keys and head of chunk c, if there is one, to stage `place` once that is free and the
 * chunk is prepared; the whole warp calls. num_prepared chunks of the item are known to be
 * prepared. */
template <bool ADDITIVE>
GPU_INLINE void copy_stage(const sm80_delta_params &a, const state_item &item, int32_t c,
                           ring_place place, state64_memory &m, int32_t &num_prepared)
{
    if (c >= item.num_chunks) {
        return;
    }
    if (c >= num_prepared) {
        num_prepared = wait_for_chunk(a, item, c);
    }
    chunk_stage &stage = m.stages[place.stage];
    const uint64_t &full = m.full[place.stage];
    barrier_wait_for(m.empty[place.stage], (int32_t)place.round + 1);
    const char *chunk = a.memory + (item.first_chunk + c) * a.chunk_bytes;
    const chunk_head *heads = (const chunk_head *)(chunk + a.heads_at);
    int32_t key_head = item.head / a.group;
    if (lane_index() == 0) {
        constexpr int unused = ADDITIVE ? sizeof stage.head.inverse - sizeof stage.head.factors : 0;
        constexpr int first = sizeof stage.head.inverse - unused;
        static_assert(first % 16 == 0, "bulk copies");
        const chunk_head &head = heads[item.head];
        barrier_arrive_expect(shared_address(&full), STAGE_BYTES - unused);
        copy_span(shared_address(&stage.keys), &((const chunk_keys *)chunk)[key_head],
                  sizeof stage.keys, shared_address(&full));
        copy_span(shared_address(&stage.head), &head, first, shared_address(&full));
        copy_span(shared_address(&stage.head.scores), &head.scores,
                  sizeof head - sizeof head.inverse, shared_address(&full));
    }
    sync_lanes();
}

/* Writes a channel's convolution window after the request: its last inputs. */
GPU_INLINE void roll_channel(const gpu_delta_params &p, const delta_request &request,
                             int64_t channel)
{
    uint16_t *window =
        (uint16_t *)(p.window + request.slots[0] * p.window_slot + channel * p.window_channel);
    const char *from = p.mixed.data + channel * 2;
    int32_t history = p.conv_width - 1, first = request.num_tokens - history;
    for (int32_t i = 0; i < history; i++) {
        window[i] = *(const uint16_t *)(from + (request.first_row + first + i) * p.mixed.row);
    }
}

/* Rolls the windows that nobody else still reads: of a team's values once its first chunk is
 * convolved, and of q and k in one CTA of each key head. */
GPU_INLINE void roll_windows(const sm80_delta_params &a, const state_item &item, int32_t of_team,
                             bool of_values)
{
    const gpu_delta_params &p = a.p;
    int32_t group = a.group, lane = lane_index();
    if (p.conv_width <= 1) {
        return;
    }
    if (of_values) {
        int32_t d = item.first_row + lane;
        if (lane < GROUP_ROWS && d < p.head_size_v) {
            roll_channel(p, item.request, p.first_v + (int64_t)item.head * p.head_size_v + d);
        }
    } else if (item.first_row == of_team * GROUP_ROWS && item.head % group == 0) {
        if (a.prepare_ctas > 0) { /* the prepare kernel reads the windows for chunk 0 */
            wait_for_chunk(a, item, 0);
        }
        int32_t d = of_team * GPU_LANES + lane;
        int64_t channel = (int64_t)(item.head / group) * p.head_size_k + d;
        if (d < p.head_size_k) {
            roll_channel(p, item.request, p.first_q + channel);
            roll_channel(p, item.request, p.first_k + channel);
        }
    }
}

/* The values of a team's rows after the convolution, every other chunk from `begin` on; inputs of
 * the next chunk are prefetched. Tokens past the end have values that a beta of 0 cancels; rows
 * past the end are never stored. The first team's warp also copies the stages, two chunks ahead. */
template <bool ADDITIVE>
GPU_INLINE void make_values64(const sm80_delta_params &a, const state_item &shared_item,
                              state64_memory &m, int32_t of_team, int32_t begin)
{
    static_assert(STATE64_STAGES == 3, "chunk c + 2 is copied once c - 1 is done with");
    team_memory &team = m.teams[of_team];
    team_barriers &barriers = m.barriers[of_team];
    const gpu_delta_params &p = a.p;
    constexpr int loads = VALUE_TOKENS + CHUNK_TAPS - 1;
    int32_t lane = lane_index(), token = (lane >> 3) * VALUE_TOKENS - (CHUNK_TAPS - 1);
    ring_place place = {begin, 0};
    const state_item item = item_of_team(shared_item, of_team);
    if (a.prepare_ctas == 0) {
        wait_for_earlier_kernels(); /* all chunks are prepared */
    }
    int32_t num_prepared = a.prepare_ctas > 0 ? 0 : item.num_chunks;
    if (of_team == 0) {
        copy_stage<ADDITIVE>(a, shared_item, begin, place, m, num_prepared);
    }
    delta_source<2> source(p, item.request, p.v, item.head,
                           p.first_v + (int64_t)item.head * p.head_size_v, p.head_size_v,
                           item.first_row + (lane & 7) * 2);
    delta_taps<2> taps;
    uint32_t raw[loads][1];
    load_inputs(source, begin * CHUNK + token, a.wide_values, raw);
    taps.load(p, source);
    for (int32_t c = begin; c < shared_item.num_chunks; c += 2) {
        barrier_wait_for(barriers.values_empty[begin], (c >> 1) + 1);
        store_values<ADDITIVE>(taps, raw, team.values[begin], team.largest[begin]);
        barrier_give(barriers.values_full[begin]);
        if (c + 2 < shared_item.num_chunks) {
            load_inputs(source, (c + 2) * CHUNK + token, a.wide_values, raw);
        }
        if (of_team == 0) {
            place.advance();
            place.advance();
            copy_stage<ADDITIVE>(a, shared_item, c + 2, place, m, num_prepared);
        }
    }
    roll_windows(a, item_of_team(shared_item, of_team), of_team, begin == 0);
    wait_for_earlier_kernels(); /* the next kernel waits for this one only */
}

/* KEEPS: writes checkpoints, and states that a seed rounds. It is a kernel of its own, because the
 * loop without checkpoints is 10 % faster. ADDITIVE: for rules without a delta. */
template <bool KEEPS, bool ADDITIVE>
static __global__ void __launch_bounds__(STATE64_THREADS, 1)
    delta_state64(const __grid_constant__ sm80_delta_params a)
{
    extern __shared__ __align__(1024) char state64_smem[];
    __shared__ state_item shared_item; /* kept here instead of in registers */
    state64_memory &m = *(state64_memory *)state64_smem;
    int32_t warp = warp_index(), team = warp % STATE64_TEAMS, role = warp / STATE64_TEAMS;
    state_item entered;
    if (!begin_item(a, (int32_t)blockIdx.x, STATE64_TEAMS, 0, entered)) {
        wait_for_earlier_kernels(); /* the next kernel waits for this one only */
        return;
    }
    if (thread_index() == 0) {
        shared_item = entered;
    }
    init_barriers(m, 2, 1, ADDITIVE ? 2 : 1);
    const chunk_stage &first = m.stages[0];
    constexpr uint32_t stage_apart = sizeof(chunk_stage) >> 4;
    ring_place place = {0, 0};
    if (role == 0) {
        alloc_registers<ADDITIVE ? 176 : 216>();
        uint64_t keys = descriptor_at(shared_address(&first.keys.k), 0, 1024);
        uint64_t depths = descriptor_at(shared_address(&first.keys.k), CHUNK * 128, 1024);
        uint64_t inverse = descriptor_at(shared_address(&first.head.inverse), 0, 1024);
        state64_rows rows;
        rows.load(a, item_of_team(shared_item, team));
        int32_t num_chunks = shared_item.num_chunks;
        for (int32_t c = 0; c < num_chunks; c++, place.advance()) {
            uint32_t at = place.stage * stage_apart;
            barrier_wait_for(m.full[place.stage], (int32_t)place.round);
            if constexpr (ADDITIVE) {
                rows.add_chunk(m.stages[place.stage], m.teams[team], m.barriers[team], c,
                               descriptor_again(depths, at));
            } else {
                rows.run_chunk(m.stages[place.stage], m.teams[team], m.barriers[team], c,
                               descriptor_again(keys, at), descriptor_again(depths, at),
                               descriptor_again(inverse, at));
            }
            barrier_give(m.empty[place.stage]);
            if constexpr (KEEPS) {
                int32_t slot = slot_after(a, shared_item, c);
                if (slot >= 0) {
                    rows.store<KEEPS>(a, item_of_team(shared_item, team), slot, (c + 1) * CHUNK);
                }
            }
        }
        rows.store<KEEPS>(a, item_of_team(shared_item, team), shared_item.request.slots[0],
                          shared_item.request.num_tokens);
    } else if (role == 1) {
        if constexpr (ADDITIVE) {
            alloc_registers<144>();
        } else {
            dealloc_registers<120>();
        }
        uint64_t queries = descriptor_at(shared_address(&first.keys.q), 0, 1024);
        uint64_t scores = descriptor_at(shared_address(&first.head.scores), 0, 1024);
        int32_t num_chunks = shared_item.num_chunks;
        for (int32_t c = 0; c < num_chunks; c++, place.advance()) {
            uint32_t at = place.stage * stage_apart;
            barrier_wait_for(m.full[place.stage], (int32_t)place.round);
            make_outputs64<ADDITIVE>(a, shared_item, m.stages[place.stage], m.teams[team],
                                     m.barriers[team], c, descriptor_again(queries, at),
                                     descriptor_again(scores, at));
            barrier_give(m.empty[place.stage]);
        }
    } else {
        dealloc_registers<ADDITIVE ? 96 : 88>();
        make_values64<ADDITIVE>(a, shared_item, m, team, role - 2);
    }
}

#endif
