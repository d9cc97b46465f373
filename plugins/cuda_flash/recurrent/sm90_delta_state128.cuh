/* SPDX-License-Identifier: Apache-2.0 */
/* The state kernel for whole value heads: 128 rows of S for each CTA, for batches with more heads
 * than multiprocessors, since a chunk's keys are read once for all rows. Two warp groups have 64
 * rows each (state64_rows) and also make their outputs. The third convolves the values with FMA,
 * since mma.sync would wait for the tensor cores, which wgmma keeps busy. */
#ifndef CUDA_FLASH_SM90_DELTA_STATE128_CUH
#define CUDA_FLASH_SM90_DELTA_STATE128_CUH

#include "sm90_delta_state64.cuh"

#define STATE128_GROUPS 3
#define STATE128_THREADS (STATE128_GROUPS * STATE64_TEAMS * GPU_LANES)
#define STATE128_TEAMS (2 * STATE64_TEAMS)
#define STATE128_STAGES 2
#define WARP_TILES 2                             /* tiles of 16 channels of a warp that convolves */
#define RAW_PIECES (WARP_TILES * GROUP_ROWS / 8) /* 16-byte pieces of a row of inputs */
/* rows of a chunk and of the three tokens before it */
#define RAW_ROWS (CHUNK + 8)
#define RAW_ROW_BYTES (RAW_PIECES * 16)
/* The unit of stored values: the convolution computes x = -y log2(e), so that e^-y = 2^x. */
#define VALUE_SCALE -0.6931471805599453f
#define VALUES_AT_ONCE 8 /* tokens convolved at once */

struct state128_memory {
    uint64_t full[STATE128_STAGES], empty[STATE128_STAGES];
    uint64_t values_full[STATE128_TEAMS][2], values_empty[STATE128_TEAMS][2];
    float largest[2][STATE128_TEAMS][GROUP_ROWS]; /* the largest value of each row */
    /* In the layout of accumulators [row, token], see state128_place. */
    float4 values[2][STATE128_TEAMS][TOKEN_TILES][GPU_LANES];
    /* Inputs of a warp's channels, starting three tokens before a chunk (raw_place). */
    char raw[STATE64_TEAMS][2][RAW_ROWS * RAW_ROW_BYTES];
    const char *keys, *head; /* the first chunk's */
    /* warps that have finished the chunks of a stage, counted over all chunks */
    uint32_t done[STATE128_STAGES];
    chunk_stage stages[STATE128_STAGES];
};

/* The offset of 16 bytes of a row of inputs. Eight rows, and two rows 32 apart, use different
 * banks. */
GPU_INLINE uint32_t raw_place(int32_t row, int32_t piece)
{
    return (uint32_t)((row ^ (row >> 5 & 1)) * RAW_ROW_BYTES + (piece ^ (row >> 1 & 3)) * 16);
}

/* The position of a lane's values in a token tile. One instruction's writes, of two teams or two
 * halves of the chunk, use different banks. */
GPU_INLINE int32_t state128_place(int32_t team, int32_t tile, int32_t lane)
{
    return lane ^ (lane >> 3 & 3) ^ ((tile >> 2 ^ team) & 1) << 2;
}

static __device__ void init_state128(state128_memory &m)
{
    if (thread_index() == 0) {
        for (int32_t i = 0; i < STATE128_STAGES; i++) {
            barrier_init(shared_address(&m.full[i]), 1);
            barrier_init(shared_address(&m.empty[i]), STATE128_TEAMS * GPU_LANES);
            m.done[i] = 0;
        }
        for (int32_t team = 0; team < STATE128_TEAMS; team++) {
            for (int32_t i = 0; i < 2; i++) {
                barrier_init(shared_address(&m.values_full[team][i]), GPU_LANES);
                barrier_init(shared_address(&m.values_empty[team][i]), GPU_LANES);
            }
        }
        fence_barriers();
    }
    sync_group();
}

/* One thread copies keys and head of chunk c to its stage. */
GPU_INLINE void copy_chunk128(const sm80_delta_params &a, int32_t c, state128_memory &m)
{
    chunk_stage &stage = m.stages[c & 1];
    uint32_t full = shared_address(&m.full[c & 1]);
    int64_t further = c * a.chunk_bytes;
    barrier_arrive_expect(full, STAGE_BYTES);
    copy_span(shared_address(&stage.keys), m.keys + further, sizeof stage.keys, full);
    copy_span(shared_address(&stage.head), m.head + further, sizeof stage.head, full);
}

/* Ends chunk c for a warp. The last warp starts the copy of the stage's next chunk. */
GPU_INLINE void end_chunk128(const sm80_delta_params &a, int32_t c, int32_t num_chunks,
                             state128_memory &m)
{
    barrier_give(m.empty[c & 1]);
    sync_lanes();
    if (lane_index() == 0) {
        uint32_t before;
        asm volatile("atom.relaxed.cta.shared.add.u32 %0, [%1], 1;"
                     : "=r"(before)
                     : "r"(shared_address(&m.done[c & 1]))
                     : "memory");
        if (before % STATE128_TEAMS == STATE128_TEAMS - 1 && c + STATE128_STAGES < num_chunks) {
            barrier_wait_for(m.empty[c & 1], c >> 1); /* does not block */
            copy_chunk128(a, c + STATE128_STAGES, m);
        }
    }
    sync_lanes();
}

/* The descriptors of a chunk's operands. */
struct state128_operands {
    uint64_t keys, depths, queries, inverse, scores;
};

struct state128_rows : state64_rows {
    /* Turns X into Y. */
    __device__ __forceinline__ void make_differences(const chunk_stage &stage, state128_memory &m,
                                                     int32_t team, int32_t c,
                                                     float (&x)[CHUNK / 2]) const
    {
        int32_t lane = lane_index(), pair = (lane & 3) * 2;
        float inverses[2] = {inverse_of(unit[0]) * VALUE_SCALE, inverse_of(unit[1]) * VALUE_SCALE};
        const float4(*values)[GPU_LANES] = m.values[c & 1][team];
#pragma unroll
        for (int n = 0; n < TOKEN_TILES; n++) {
            float4 four = values[n][state128_place(team, n, lane)];
            float2 decay = *(const float2 *)&stage.head.from_start[n * 8 + pair];
            x[4 * n] = fmaf(-decay.x, x[4 * n], four.x * inverses[0]);
            x[4 * n + 1] = fmaf(-decay.y, x[4 * n + 1], four.y * inverses[0]);
            x[4 * n + 2] = fmaf(-decay.x, x[4 * n + 2], four.z * inverses[1]);
            x[4 * n + 3] = fmaf(-decay.y, x[4 * n + 3], four.w * inverses[1]);
        }
        barrier_give(m.values_empty[team][c & 1]);
    }

    /* Applies the chunk's decays to the state's part of O. */
    GPU_INLINE void decay_outputs(const chunk_stage &stage, float (&o)[CHUNK / 2])
    {
        int32_t pair = (lane_index() & 3) * 2;
#pragma unroll
        for (int n = 0; n < TOKEN_TILES; n++) {
            float2 decay = *(const float2 *)&stage.head.from_start[n * 8 + pair];
            o[4 * n] *= decay.x, o[4 * n + 1] *= decay.y;
            o[4 * n + 2] *= decay.x, o[4 * n + 3] *= decay.y;
        }
    }

    /* Starts O += R P^T and S += R K (add_keys). */
    __device__ __forceinline__ void add_changes(const chunk_stage &stage,
                                                const float (&r)[CHUNK / 2],
                                                const state128_operands &rights,
                                                float (&o)[CHUNK / 2])
    {
        int32_t pair = (lane_index() & 3) * 2;
        uint32_t change[TOKEN_STEPS][4];
        float2 decay[TOKEN_TILES];
#pragma unroll
        for (int step = 0; step < TOKEN_STEPS; step++) {
            pack_sums(change[step], r, step);
        }
#pragma unroll
        for (int n = 0; n < TOKEN_TILES; n++) {
            decay[n] = *(const float2 *)&stage.head.to_end[n * 8 + pair];
        }
        pin(o);
        wgmma_begin();
#pragma unroll
        for (int step = 0; step < TOKEN_STEPS; step++) {
            wgmma_rs_bk<KIND_F16, CHUNK>(o, change[step], rights.scores + step * 2, 1);
        }
        wgmma_commit();
        add_keys(r, decay, rights.depths);
    }

    /* Chooses the units of the chunk before any product, so that no accumulator is used in a
     * branch. */
    __device__ __forceinline__ void enter_chunk(state128_memory &m, int32_t team, int32_t c,
                                                float past)
    {
        int32_t row = lane_index() >> 2;
        float next[2];
        barrier_wait_for(m.values_full[team][c & 1], c >> 1);
        const float of_values[2] = {m.largest[c & 1][team][row], m.largest[c & 1][team][row + 8]};
        bool is_new = choose_units(of_values, next);
        if (__any_sync(GPU_ALL_LANES, is_new)) {
            multiply(unit[0] * inverse_of(next[0]), unit[1] * inverse_of(next[1]));
            unit[0] = next[0], unit[1] = next[1];
        }
        bound_rows(c, of_values, past);
    }

    __device__ __forceinline__ void
    run_chunk(const sm80_delta_params &a, const state_item &shared_item, const chunk_stage &stage,
              state128_memory &m, int32_t team, int32_t c, const state128_operands &rights)
    {
        float x[CHUNK / 2], o[CHUNK / 2], past = stage.head.from_start[CHUNK - 1];
        uint32_t left[KEY_STEPS][4];
        enter_chunk(m, team, c, past);
#pragma unroll
        for (int step = 0; step < KEY_STEPS; step++) {
            pack_sums(left[step], s, step);
        }
        multiply_dims(x, left, rights.keys);
        multiply_dims(o, left, rights.queries);
        wgmma_wait<1>();
        pin(x);
        make_differences(stage, m, team, c, x);
        multiply_inverse(x, rights.inverse);
        multiply(past, past); /* while the product with the inverse runs */
        wgmma_wait<1>();
        pin(o);
        decay_outputs(stage, o);
        wgmma_wait<0>();
        pin(x);
        add_changes(stage, x, rights, o);
        wgmma_wait<1>();
        pin(o);
        float scales[2] = {unit[0] * a.p.scale, unit[1] * a.p.scale};
#pragma unroll
        for (int i = 0; i < CHUNK / 2; i++) {
            o[i] *= scales[i >> 1 & 1];
        }
        store_outputs(a, item_of_team(shared_item, team), c * CHUNK, o);
        wgmma_wait<0>();
        pin(s);
    }
};

/* Weights of a lane's two neighbouring channels; 16 lanes cover a warp's channels. */
struct state128_taps {
    float weight[CHUNK_TAPS][2], bias[2];

    __device__ __forceinline__ state128_taps(const gpu_delta_params &p, int64_t first_channel)
    {
        int64_t channel = first_channel + lane_index() % 16 * 2;
#pragma unroll
        for (int i = 0; i < 2 && p.conv_width > 0; i++) {
            uint2 four = *(const uint2 *)(p.conv_weight.data + (channel + i) * CHUNK_TAPS * 2);
            const uint32_t bits[2] = {four.x, four.y};
            bias[i] = p.conv_bias.data != nullptr
                          ? matrix_number(p.conv_bias, 0, channel + i) * (1 / VALUE_SCALE)
                          : 0.0f;
#pragma unroll
            for (int tap = 0; tap < CHUNK_TAPS; tap += 2) {
                float2 two = two_floats<KIND_BF16>(bits[tap / 2]);
                weight[tap][i] = two.x * (1 / VALUE_SCALE);
                weight[tap + 1][i] = two.y * (1 / VALUE_SCALE);
            }
        }
    }
};

/* The convolution of VALUES_AT_ONCE tokens, and SiLU. */
GPU_INLINE void multiply_value_taps(const state128_taps &taps,
                                    const float (&inputs)[2][CHUNK_TAPS - 1 + VALUES_AT_ONCE],
                                    float (&y)[2][VALUES_AT_ONCE])
{
    float power[2][VALUES_AT_ONCE];
#pragma unroll
    for (int tap = 0; tap < CHUNK_TAPS; tap++) {
#pragma unroll
        for (int k = 0; k < VALUES_AT_ONCE; k++) {
#pragma unroll
            for (int j = 0; j < 2; j++) {
                y[j][k] = fmaf(taps.weight[tap][j], inputs[j][k + tap],
                               tap == 0 ? taps.bias[j] : y[j][k]);
            }
        }
    }
#pragma unroll
    for (int k = 0; k < VALUES_AT_ONCE; k++) {
        power[0][k] = fast_exp2(y[0][k]), power[1][k] = fast_exp2(y[1][k]);
    }
#pragma unroll
    for (int k = 0; k < VALUES_AT_ONCE; k++) {
        power[0][k] = fast_reciprocal(1.0f + power[0][k]);
        power[1][k] = fast_reciprocal(1.0f + power[1][k]);
    }
#pragma unroll
    for (int k = 0; k < VALUES_AT_ONCE; k++) {
        y[0][k] *= power[0][k], y[1][k] *= power[1][k];
    }
}

/* Convolves a chunk's values of teams `team` and team + 1, or takes them as they are without
 * CONVOLVES; a lane has half of the tokens. */
template <bool CONVOLVES>
GPU_INLINE void convolve_values(const state128_taps &taps, const char *raw, int32_t team,
                                int32_t of_two, state128_memory &m)
{
    int32_t lane = lane_again(), pair = lane % 8, tile = lane >> 3 & 1, half = lane >> 4;
    int32_t x = (pair >> 1) * 2, of_four = pair & 1; /* see row_of_sums */
    float largest[2] = {0.0f, 0.0f};
    const char *row = raw + half * (CHUNK / 2) * RAW_ROW_BYTES + (lane & 3) * 4;
    int32_t piece = (lane & 15) >> 2, later = half * RAW_ROW_BYTES;
    float inputs[2][CHUNK_TAPS - 1 + VALUES_AT_ONCE];
#pragma unroll
    for (int first = 0; first < CHUNK / 2; first += VALUES_AT_ONCE) { /* tokens of the half */
        constexpr int before = CHUNK_TAPS - 1;
#pragma unroll
        for (int k = 0; k < before + VALUES_AT_ONCE; k++) {
            if (first > 0 && k < before) {
                inputs[0][k] = inputs[0][k + VALUES_AT_ONCE];
                inputs[1][k] = inputs[1][k + VALUES_AT_ONCE];
                continue;
            }
            int i = first + k;
            /* raw_place(half * CHUNK / 2 + i, piece) */
            int32_t flipped = i < CHUNK / 2 ? later : RAW_ROW_BYTES - later;
            float2 two = two_floats<KIND_BF16>(*(const uint32_t *)(row + i * RAW_ROW_BYTES +
                                                                   (i & 1 ? -flipped : flipped) +
                                                                   (piece ^ (i >> 1 & 3)) * 16));
            inputs[0][k] = two.x, inputs[1][k] = two.y;
        }
        float y[2][VALUES_AT_ONCE];
        if constexpr (CONVOLVES) {
            multiply_value_taps(taps, inputs, y);
        } else {
#pragma unroll
            for (int k = 0; k < VALUES_AT_ONCE; k++) {
                y[0][k] = inputs[0][k + before] * (1 / VALUE_SCALE);
                y[1][k] = inputs[1][k + before] * (1 / VALUE_SCALE);
            }
        }
#pragma unroll
        for (int k = 0; k < VALUES_AT_ONCE; k += 2) {
            int32_t n = half * (TOKEN_TILES / 2) + first / 8;
#pragma unroll
            for (int j = 0; j < 2; j++) {
                float2 two = make_float2(y[j][k], y[j][k + 1]);
                largest[j] = fmaxf(largest[j], fmaxf(fabsf(two.x), fabsf(two.y)));
                int32_t at = state128_place(tile, n, (x + j) * 4 + k / 2);
                *(float2 *)((float *)&m.values[of_two][team + tile][n][at] + of_four * 2) = two;
            }
        }
    }
#pragma unroll
    for (int j = 0; j < 2; j++) {
        largest[j] = fmaxf(largest[j], lane_xor(largest[j], 16));
        if (half == 0) {
            m.largest[of_two][team + tile][of_four * 8 + x + j] = largest[j] * -VALUE_SCALE;
        }
    }
}

/* Starts copying inputs of a warp's channels for chunk c; tokens past the end are zeros. */
GPU_INLINE void fetch_raw(const gpu_delta_params &p, const delta_request &request,
                          const char *first, int32_t c, char *raw)
{
    constexpr int rows = GPU_LANES / RAW_PIECES;
    int32_t piece = lane_index() % RAW_PIECES, row = lane_index() / RAW_PIECES;
    int32_t before = c * CHUNK - (CHUNK_TAPS - 1), t = before + row;
    const int64_t apart = p.conv_width > 0 ? p.mixed.row : p.v.row;
    const char *from = first + request.first_row * apart + piece * 16;
    uint32_t to[2] = {shared_address(raw) + raw_place(row, piece),
                      shared_address(raw) + raw_place(row + CHUNK / 2, piece) -
                          CHUNK / 2 * RAW_ROW_BYTES};
    if (before >= 0 && before + RAW_ROWS <= request.num_tokens) {
        from += t * apart;
#pragma unroll
        for (int i = 0; i < RAW_ROWS; i += rows) {
            copy16(to[i / (CHUNK / 2) & 1] + i * RAW_ROW_BYTES, from, 16);
            from += rows * apart;
        }
        return;
    }
#pragma unroll 1
    for (int i = 0; i < RAW_ROWS; i += rows) {
        int32_t real = min(max(t + i, 0), request.num_tokens - 1);
        if (t + i >= 0) {
            copy16((i / (CHUNK / 2) & 1 ? to[1] : to[0]) + i * RAW_ROW_BYTES, from + real * apart,
                   t + i == real ? 16 : 0);
        }
    }
}

/* Copies the inputs before the request from the window, one channel for each lane. */
GPU_INLINE void load_window(const gpu_delta_params &p, const delta_request &request,
                            int64_t first_channel, char *raw)
{
    int32_t lane = lane_index();
    const uint16_t *window = (const uint16_t *)(p.window + request.window_from * p.window_slot +
                                                (first_channel + lane) * p.window_channel);
#pragma unroll
    for (int i = 0; i < CHUNK_TAPS - 1; i++) {
        uint16_t one = request.has_state ? window[request.from + i] : 0;
        *(uint16_t *)(raw + raw_place(i, lane >> 3) + (lane & 7) * 2) = one;
    }
}

/* Makes the values of 32 rows of S, chunk by chunk; the first warp also starts the copies of the
 * first stages. */
GPU_INLINE void make_values128(const sm80_delta_params &a, const state_item &shared_item,
                               state128_memory &m, int32_t warp)
{
    const gpu_delta_params &p = a.p;
    int32_t team = warp * WARP_TILES, num_chunks = shared_item.num_chunks;
    int64_t first_channel =
        p.first_v + (int64_t)shared_item.head * p.head_size_v + team * GROUP_ROWS;
    bool convolves = p.conv_width > 0;
    const char *first = convolves ? p.mixed.data + first_channel * 2
                                  : p.v.data + shared_item.head * p.v.head + team * GROUP_ROWS * 2;
    char *raw = m.raw[warp][0];
    constexpr int apart = RAW_ROWS * RAW_ROW_BYTES;
    wait_for_earlier_kernels(); /* all chunks are prepared */
    if (warp == 0 && lane_index() == 0) {
        for (int32_t c = 0; c < min(STATE128_STAGES, num_chunks); c++) {
            copy_chunk128(a, c, m);
        }
    }
    sync_lanes();
    fetch_raw(p, shared_item.request, first, 0, raw);
    if (convolves) {
        load_window(p, shared_item.request, first_channel, raw);
    }
    state128_taps taps(p, first_channel);
    for (int32_t c = 0; c < num_chunks; c++) {
        int32_t of_two = c & 1;
        wait_for_copies();
        sync_lanes();
        if (c + 1 < num_chunks) {
            fetch_raw(p, shared_item.request, first, c + 1, raw + (of_two ^ 1) * apart);
        }
        for (int32_t i = 0; i < WARP_TILES; i++) {
            barrier_wait_for(m.values_empty[team + i][of_two], (c >> 1) + 1);
        }
        if (convolves) {
            convolve_values<true>(taps, raw + of_two * apart, team, of_two, m);
        } else {
            convolve_values<false>(taps, raw + of_two * apart, team, of_two, m);
        }
        for (int32_t i = 0; i < WARP_TILES; i++) {
            barrier_give(m.values_full[team + i][of_two]);
        }
    }
    for (int32_t i = 0; i < WARP_TILES; i++) {
        roll_windows(a, item_of_team(shared_item, team + i), team + i, true);
    }
    roll_windows(a, item_of_team(shared_item, warp), warp, false);
}

/* KEEPS: writes checkpoints, and states that a seed rounds. It is a kernel of its own, because the
 * loop without checkpoints is 10 % faster. */
template <bool KEEPS>
static __global__ void __launch_bounds__(STATE128_THREADS, 1)
    delta_state128(const __grid_constant__ sm80_delta_params a)
{
    extern __shared__ __align__(1024) char state128_smem[];
    __shared__ state_item shared_item; /* kept here instead of in registers */
    state128_memory &m = *(state128_memory *)state128_smem;
    int32_t warp = warp_index();
    state_item entered;
    if (!begin_item(a, (int32_t)blockIdx.x, STATE128_TEAMS, 0, entered)) {
        wait_for_earlier_kernels(); /* the next kernel waits for this one only */
        return;
    }
    if (thread_index() == 0) {
        int32_t key_head = entered.head / a.group;
        const char *chunk = a.memory + entered.first_chunk * a.chunk_bytes;
        shared_item = entered;
        m.keys = chunk + key_head * (int64_t)sizeof(chunk_keys);
        m.head = chunk + a.heads_at + entered.head * (int64_t)sizeof(chunk_head);
    }
    init_state128(m);
    if (warp < STATE128_TEAMS) {
        alloc_registers<208>();
        const chunk_stage &first = m.stages[0];
        constexpr uint32_t stage_apart = sizeof(chunk_stage) >> 4;
        uint64_t keys = descriptor_at(shared_address(&first.keys.k), 0, 1024);
        uint64_t depths = descriptor_at(shared_address(&first.keys.k), CHUNK * 128, 1024);
        uint64_t queries = descriptor_at(shared_address(&first.keys.q), 0, 1024);
        uint64_t inverse = descriptor_at(shared_address(&first.head.inverse), 0, 1024);
        uint64_t scores = descriptor_at(shared_address(&first.head.scores), 0, 1024);
        state128_rows rows;
        rows.load(a, item_of_team(shared_item, warp));
        int32_t num_chunks = shared_item.num_chunks;
        for (int32_t c = 0; c < num_chunks; c++) {
            uint32_t at = (c & 1) * stage_apart;
            barrier_wait_for(m.full[c & 1], c >> 1);
            rows.run_chunk(a, shared_item, m.stages[c & 1], m, warp, c,
                           {descriptor_again(keys, at), descriptor_again(depths, at),
                            descriptor_again(queries, at), descriptor_again(inverse, at),
                            descriptor_again(scores, at)});
            end_chunk128(a, c, num_chunks, m);
            if constexpr (KEEPS) {
                int32_t slot = slot_after(a, shared_item, c);
                if (slot >= 0) {
                    rows.store<KEEPS>(a, item_of_team(shared_item, warp), slot, (c + 1) * CHUNK);
                }
            }
        }
        rows.store<KEEPS>(a, item_of_team(shared_item, warp), shared_item.request.slots[0],
                          shared_item.request.num_tokens);
    } else {
        dealloc_registers<88>();
        make_values128(a, shared_item, m, warp - STATE128_TEAMS);
    }
}

#endif
