/* SPDX-License-Identifier: Apache-2.0 */
/* The state kernel of gated delta by mma.sync: the recurrence over a request's chunks. A warp keeps
 * GROUP_ROWS rows of S [Dv, Dk] of a value head in registers and needs no other rows. With S, Y and
 * R as left operands, the accumulator of one product is the operand of the next:
 *     X = S K^T;  Y = V - X;  R = Y (T beta)^T;  O = S Q^T + R P^T;  S <- S + R K
 * (each with its decays). The warps of a team have one role each: state, R, outputs, values after
 * the convolution. Operands are f16 with a power of two for each row of S: 11 bits of precision and
 * the range of float32. */
#ifndef CUDA_FLASH_SM80_DELTA_STATE_CUH
#define CUDA_FLASH_SM80_DELTA_STATE_CUH

#include "sm80_delta_roles.cuh"

/* Stores two elements of a row of out, of which `real` exist. */
static __device__ __noinline__ void store_singly(char *to, uint32_t bits, int32_t real)
{
    if (real > 0) {
        *(uint16_t *)to = (uint16_t)bits;
    }
    if (real > 1) {
        *(uint16_t *)(to + 2) = (uint16_t)(bits >> 16);
    }
}

/* Stores a chunk's outputs, accumulators [row, token], to rows of tokens. */
GPU_INLINE void store_outputs(const sm80_delta_params &a, const state_item &item, int32_t first,
                              const float *o)
{
    int32_t lane = lane_index(), d = item.first_row + (lane & 3) * 4;
    int64_t apart = 8 * a.p.out.row;
    char *to = a.p.out.data +
               (int64_t)(item.request.first_row + first + (lane >> 2)) * a.p.out.row +
               item.head * a.p.out.head + d * 2;
    bool whole = a.wide_out == WIDE_OUT_FOUR && first + CHUNK <= item.request.num_tokens &&
                 item.first_row + GROUP_ROWS <= a.p.head_size_v;
    int32_t tokens = item.request.num_tokens - first - (lane >> 2);
    uint32_t bits[TOKEN_TILES][2];
#pragma unroll
    for (int n = 0; n < TOKEN_TILES; n++) {
        bits[n][0] = transpose(pack2<KIND_BF16>(o[4 * n], o[4 * n + 1]));
        bits[n][1] = transpose(pack2<KIND_BF16>(o[4 * n + 2], o[4 * n + 3]));
    }
    if (whole) {
#pragma unroll
        for (int n = 0; n < TOKEN_TILES; n++) {
            *(uint2 *)to = make_uint2(bits[n][0], bits[n][1]);
            to += apart;
        }
        return;
    }
#pragma unroll
    for (int n = 0; n < TOKEN_TILES; n++) {
        int32_t real = n * 8 < tokens ? a.p.head_size_v - d : 0;
        store_singly(to, bits[n][0], real);
        store_singly(to + 4, bits[n][1], real - 2);
        to += apart;
    }
}

/* Convolves a chunk's values of two rows and a quarter of the tokens (the layout of make_values)
 * and computes the largest of each row. */
template <int TAPS, int LOADS>
GPU_INLINE void store_values_of(const delta_taps<2> &taps, const uint32_t (&raw)[LOADS][1],
                                float4 (&to)[TOKEN_TILES][GPU_LANES],
                                float (&to_largest)[GROUP_ROWS])
{
    int32_t lane = lane_index(), quarter = lane >> 3;
    int32_t x_of_first = (lane & 6), half = lane & 1; /* rows 2 (lane & 7) and the next */
    float largest[2] = {0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < VALUE_TOKENS; i += 2) {
        float y[2][2];
#pragma unroll
        for (int k = 0; k < 2; k++) {
            float x[2][CHUNK_TAPS];
#pragma unroll
            for (int j = 0; j < CHUNK_TAPS; j++) {
                float2 two = two_floats<KIND_BF16>(raw[i + k + j][0]);
                x[0][j] = two.x, x[1][j] = two.y;
            }
            y[0][k] = taps.of<TAPS>(x[0], 0);
            y[1][k] = taps.of<TAPS>(x[1], 1);
        }
        int32_t tile = quarter * 2 + i / 8;
#pragma unroll
        for (int of_two = 0; of_two < 2; of_two++) {
            int32_t reader = (x_of_first + of_two) * 4 + i % 8 / 2;
            float *at = (float *)&to[tile][value_place(tile, reader)];
            *(float2 *)(at + half * 2) = make_float2(y[of_two][0], y[of_two][1]);
            largest[of_two] = fmaxf(largest[of_two], fabsf(y[of_two][0]));
            largest[of_two] = fmaxf(largest[of_two], fabsf(y[of_two][1]));
        }
    }
#pragma unroll
    for (int of_two = 0; of_two < 2; of_two++) {
        largest[of_two] = fmaxf(largest[of_two], lane_xor(largest[of_two], 8));
        largest[of_two] = fmaxf(largest[of_two], lane_xor(largest[of_two], 16));
    }
    if (quarter == 0) {
        *(float2 *)&to_largest[half * 8 + x_of_first] = make_float2(largest[0], largest[1]);
    }
}

/* NONE_APART: layers without a convolution have code of their own. */
template <bool NONE_APART, int LOADS>
GPU_INLINE void store_values(const delta_taps<2> &taps, const uint32_t (&raw)[LOADS][1],
                             float4 (&to)[TOKEN_TILES][GPU_LANES], float (&to_largest)[GROUP_ROWS])
{
    if (taps.are_usual()) {
        store_values_of<TAPS_USUAL>(taps, raw, to, to_largest);
    } else if (!NONE_APART || taps.convolves) {
        store_values_of<TAPS_ANY>(taps, raw, to, to_largest);
    } else {
        store_values_of<TAPS_NONE>(taps, raw, to, to_largest);
    }
}

/* Loads inputs of tokens t .. t + LOADS - 1; tokens past the end read the last, and their results
 * are not used. If all exist, there is no check for each. */
template <int LOADS>
GPU_INLINE void load_inputs(const delta_source<2> &source, int32_t t, bool is_wide,
                            uint32_t (&to)[LOADS][1])
{
    if (is_wide && t >= 0 && t + LOADS <= source.num_tokens) {
        const char *at = source.rows + t * source.row;
#pragma unroll
        for (int i = 0; i < LOADS; i++) {
            to[i][0] = *(const uint32_t *)at;
            at += source.row;
        }
        return;
    }
#pragma unroll 1
    for (int i = 0; i < LOADS; i++, t++) {
        bool is_before = t < 0, is_there = !is_before || t >= source.oldest;
        const char *at = is_before ? source.window + (int64_t)(source.entry + t) * 2
                                   : source.rows + min(t, source.num_tokens - 1) * source.row;
        int64_t apart = source.real < 2 ? 0 : is_before ? source.channel : 2;
        uint32_t two = 0;
        if (is_there) {
            two = *(const uint16_t *)at | (uint32_t) * (const uint16_t *)(at + apart) << 16;
        }
#pragma unroll
        for (int k = 0; k < LOADS; k++) {
            to[k][0] = k == i ? two : to[k][0];
        }
    }
}

/* For rules without a delta: the values' direct part of a chunk's outputs. */
GPU_INLINE void skip_values(const sm80_delta_params &a, int32_t head, team_memory &team,
                            team_barriers &barriers, int32_t c, float (&skipped)[TOKEN_TILES][4])
{
    int32_t lane = lane_index();
    const float *skips = a.p.rule.skip;
    clear(skipped);
    barrier_wait_for(barriers.values_full[c & 1], c >> 1);
    if (skips != nullptr) {
        float skip = skips[head];
#pragma unroll
        for (int n = 0; n < TOKEN_TILES; n++) {
            float4 v = team.values[c & 1][n][value_place(n, lane)];
            skipped[n][0] = skip * v.x, skipped[n][1] = skip * v.y;
            skipped[n][2] = skip * v.z, skipped[n][3] = skip * v.w;
        }
    }
    barrier_give(barriers.values_empty[c & 1]);
}

/* For rules without a delta: applies the queries' factors to outputs and adds `skipped`. */
GPU_INLINE void finish_outputs(const chunk_stage &stage, const float (&skipped)[TOKEN_TILES][4],
                               float (&o)[TOKEN_TILES][4])
{
    int32_t pair = (lane_index() & 3) * 2;
#pragma unroll
    for (int n = 0; n < TOKEN_TILES; n++) {
        float2 factor = *(const float2 *)&stage.head.factors.query[n * 8 + pair];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            o[n][i] = fmaf(o[n][i], i & 1 ? factor.y : factor.x, skipped[n][i]);
        }
    }
}

GPU_INLINE void make_outputs(const sm80_delta_params &a, bool additive, const state_item &item,
                             const chunk_stage &stage, team_memory &team, team_barriers &barriers,
                             int32_t c)
{
    int32_t lane = lane_index(), pair = (lane & 3) * 2;
    uint32_t queries = rows_of<CHUNK_DIMS / 8>(shared_address(stage.keys.q));
    uint32_t scores = rows_of<CHUNK / 8>(shared_address(stage.head.scores));
    float o[TOKEN_TILES][4], r[TOKEN_TILES][4];
    token_rights rights[2];
    clear(o);
    clear(r);
    rights[0].load_rows<CHUNK_DIMS / 8>(queries, 0);
    barrier_wait_for(barriers.state_full, c);
    float2 state_scale = team.state_scale[lane];
#pragma unroll
    for (int step = 0; step < KEY_STEPS; step++) {
        if (step + 1 < KEY_STEPS) {
            rights[(step + 1) & 1].load_rows<CHUNK_DIMS / 8>(queries, (step + 1) * 2);
        }
        uint4 four = team.state[step][lane];
        const uint32_t left[4] = {four.x, four.y, four.z, four.w};
        rights[step & 1].add(o, left);
    }
    barrier_give(barriers.state_empty);
    rights[0].load_rows<CHUNK / 8>(scores, 0);
    barrier_wait_for(barriers.change_full, c);
    float2 change_scale = team.change_scale[lane];
#pragma unroll
    for (int step = 0; step < TOKEN_STEPS; step++) {
        if (step + 1 < TOKEN_STEPS) {
            rights[(step + 1) & 1].load_rows<CHUNK / 8>(scores, (step + 1) * 2, step + 1);
        }
        uint4 four = team.change[step][lane];
        const uint32_t left[4] = {four.x, four.y, four.z, four.w};
        rights[step & 1].add(r, left, 0, step);
    }
    barrier_give(barriers.change_empty);
#pragma unroll
    for (int n = 0; n < TOKEN_TILES; n++) {
        float2 decay = *(const float2 *)&stage.head.from_start[n * 8 + pair];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float from_state =
                o[n][i] * ((i & 1 ? decay.y : decay.x) * (i >> 1 ? state_scale.y : state_scale.x));
            o[n][i] =
                a.p.scale * fmaf(r[n][i], i >> 1 ? change_scale.y : change_scale.x, from_state);
        }
    }
    if (additive) {
        skip_values(a, item.head, team, barriers, c, r);
        finish_outputs(stage, r, o);
    }
    store_outputs(a, item, c * CHUNK, &o[0][0]);
}

/* Copies a part of a chunk from global memory; all lanes of the warp call. */
GPU_INLINE void copy_part(void *to, const void *from, int32_t bytes, const uint64_t &barrier)
{
#if __CUDA_ARCH__ >= 900
    if (lane_index() == 0) {
        copy_span(shared_address(to), from, bytes, shared_address(&barrier));
    }
#else
    for (int32_t i = lane_index() * 16; i < bytes; i += GPU_LANES * 16) {
        copy16(shared_address(to) + i, (const char *)from + i, 16);
    }
#endif
}

template <int TEAMS>
GPU_INLINE void copy_chunk(const sm80_delta_params &a, const state_item &item, int32_t c,
                           state_memory<TEAMS> &m)
{
    if (c >= item.num_chunks) {
        return;
    }
    chunk_stage &stage = m.stages[c % a.stages];
    const uint64_t &full = m.full[c % a.stages];
    barrier_wait_for(m.empty[c % a.stages], c / a.stages + 1);
    const gpu_delta_params &p = a.p;
    const char *chunk = a.memory + (item.first_chunk + c) * a.chunk_bytes;
    const chunk_head *heads = (const chunk_head *)(chunk + a.heads_at);
    int32_t key_head = item.head / (p.num_v_heads / p.num_k_heads);
#if __CUDA_ARCH__ >= 900
    if (lane_index() == 0) {
        barrier_arrive_expect(shared_address(&full), STAGE_BYTES);
    }
#endif
    copy_part(&stage.keys, &((const chunk_keys *)chunk)[key_head], sizeof stage.keys, full);
    copy_part(&stage.head, &heads[item.head], sizeof stage.head, full);
#if __CUDA_ARCH__ < 900
    barrier_arrive_copies(shared_address(&full));
#endif
}

/* The values of a team's rows after the convolution, chunk by chunk. A lane has two rows and a
 * quarter of the tokens. The first team's warp copies chunks for all teams, one stage behind the
 * values. */
template <int TEAMS>
GPU_INLINE void make_values(const sm80_delta_params &a, const state_item &item,
                            state_memory<TEAMS> &m, int32_t of_teams)
{
    team_memory &team = m.teams[of_teams];
    team_barriers &barriers = m.barriers[of_teams];
    const gpu_delta_params &p = a.p;
    constexpr int loads = VALUE_TOKENS + CHUNK_TAPS - 1;
    int32_t lane = lane_index(), token = (lane >> 3) * VALUE_TOKENS - (CHUNK_TAPS - 1);
    for (int32_t c = 0; of_teams == 0 && c < a.stages - 1; c++) {
        copy_chunk(a, item, c, m);
    }
    delta_source<2> source(p, item.request, p.v, item.head,
                           p.first_v + (int64_t)item.head * p.head_size_v, p.head_size_v,
                           item.first_row + (lane & 7) * 2);
    delta_taps<2> taps;
    uint32_t raw[loads][1];
    taps.load(p, source);
    load_inputs(source, token, a.wide_values, raw);
    for (int32_t c = 0; c < item.num_chunks; c++) {
        barrier_wait_for(barriers.values_empty[c & 1], (c >> 1) + 1);
        store_values<false>(taps, raw, team.values[c & 1], team.largest[c & 1]);
        barrier_give(barriers.values_full[c & 1]);
        if (c + 1 < item.num_chunks) {
            load_inputs(source, (c + 1) * CHUNK + token, a.wide_values, raw);
        }
        if (of_teams == 0) {
            copy_chunk(a, item, c + a.stages - 1, m);
        }
    }
}

/* Warps of a team: readers of stages, of the state and of values. */
template <int TEAMS>
static __device__ void init_barriers(state_memory<TEAMS> &m, int32_t readers, int32_t of_state,
                                     int32_t of_values = 1)
{
    if (thread_index() == 0) {
        for (int32_t i = 0; i < MOST_STAGES; i++) {
#if __CUDA_ARCH__ >= 900
            barrier_init(shared_address(&m.full[i]), 1);
#else
            barrier_init(shared_address(&m.full[i]), GPU_LANES);
#endif
            barrier_init(shared_address(&m.empty[i]), readers * TEAMS * GPU_LANES);
        }
        for (int32_t team = 0; team < TEAMS; team++) {
            uint64_t *all = (uint64_t *)&m.barriers[team];
            for (size_t i = 0; i < sizeof(team_barriers) / sizeof *all; i++) {
                bool frees_state = &all[i] == &m.barriers[team].state_empty;
                bool frees_values = &all[i] == &m.barriers[team].values_empty[0] ||
                                    &all[i] == &m.barriers[team].values_empty[1];
                int32_t warps = frees_state ? of_state : frees_values ? of_values : 1;
                barrier_init(shared_address(&all[i]), warps * GPU_LANES);
            }
        }
        PTX_SM90("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    sync_group();
}

/* Finds the `number`-th request with enough tokens for chunks; negative if there are fewer. All
 * lanes of a warp call. */
static __device__ int32_t find_request(const gpu_delta_params &p, int32_t number)
{
    for (int32_t first = 0; first < p.num_reqs; first += GPU_LANES) {
        int32_t r = first + lane_index();
        bool is_long = r < p.num_reqs &&
                       min(p.query_start[r + 1], p.num_tokens) - p.query_start[r] >= p.chunked_from;
        uint32_t all = __ballot_sync(GPU_ALL_LANES, is_long);
        int32_t before = __popc(all & ((1u << lane_index()) - 1));
        uint32_t wanted = __ballot_sync(GPU_ALL_LANES, is_long && before == number);
        if (wanted != 0) {
            return first + __ffs((int)wanted) - 1;
        }
        number -= __popc(all);
    }
    return -1;
}

/* Finds the request and value head of CTA `index`, for `teams` teams; false if it has none. */
static __device__ bool begin_item(const sm80_delta_params &a, int32_t index, int32_t teams,
                                  int32_t team, state_item &item)
{
    const gpu_delta_params &p = a.p;
    int32_t slice = index % a.slices, rest = index / a.slices;
    int32_t r = find_request(p, rest / p.num_v_heads);
    item.head = rest % p.num_v_heads;
    if (r < 0 || !enter_request(p, r, item.request) || !goes_in_chunks(p, item.request)) {
        return false;
    }
    item.first_row = (slice * teams + team) * GROUP_ROWS;
    item.first_chunk = p.query_start[r] / a.tokens_apart + r * a.requests_apart;
    item.num_chunks = (item.request.num_tokens + CHUNK - 1) / CHUNK;
    return item.first_chunk + item.num_chunks <= a.num_chunks;
}

template <int TEAMS>
static __global__ void __launch_bounds__(state_threads<TEAMS>)
    delta_state(const __grid_constant__ sm80_delta_params a)
{
    extern __shared__ __align__(1024) char state_bytes[];
    state_memory<TEAMS> &m = *(state_memory<TEAMS> *)state_bytes;
    int32_t team = warp_index() % TEAMS, role = warp_index() / TEAMS;
    const bool additive = a.p.rule.additive;
    state_item item;
    if (!begin_item(a, (int32_t)blockIdx.x, TEAMS, team, item)) {
        return;
    }
    init_barriers(m, 3, additive ? 1 : 2, additive ? 2 : 1);
    if (role == ROLE_VALUES) {
        make_values(a, item, m, team);
    } else if (role == ROLE_STATES) {
        delta_rows rows;
        rows.load(a, item);
        for (int32_t c = 0; c < item.num_chunks; c++) {
            int32_t stage = c % a.stages;
            rows.publish(m.teams[team], m.barriers[team], c);
            barrier_wait_for(m.full[stage], c / a.stages);
            if (additive) {
                rows.add_apart(m.stages[stage], m.teams[team], m.barriers[team], c);
            } else {
                rows.add_keys(m.stages[stage], m.teams[team], m.barriers[team], c);
            }
            barrier_give(m.empty[stage]);
            int32_t slot = slot_after(a, item, c); /* the checkpoint, and at the end the state */
            int32_t last = c + 1 == item.num_chunks ? item.request.slots[0] : -1;
#pragma unroll 1
            for (int32_t i = 0; i < 2; i++, slot = last) {
                if (slot >= 0) {
                    rows.store<true>(a, item, slot, min((c + 1) * CHUNK, item.request.num_tokens));
                }
            }
        }
    } else if (role == ROLE_CHAINS) {
        delta_chain chain = {{1.0f, 1.0f}};
        for (int32_t c = 0; c < item.num_chunks; c++) {
            int32_t stage = c % a.stages;
            barrier_wait_for(m.full[stage], c / a.stages);
            chain.run_chunk(additive, m.stages[stage], m.teams[team], m.barriers[team], c);
            barrier_give(m.empty[stage]);
        }
    } else {
        for (int32_t c = 0; c < item.num_chunks; c++) {
            int32_t stage = c % a.stages;
            barrier_wait_for(m.full[stage], c / a.stages);
            make_outputs(a, additive, item, m.stages[stage], m.teams[team], m.barriers[team], c);
            barrier_give(m.empty[stage]);
        }
    }
}

#endif
