/* SPDX-License-Identifier: Apache-2.0 */
/* The states through a request's chunks, a whole value head of 128 rows of S in a CTA: for batches
 * with more heads than multiprocessors, where a chunk's keys are read once for all rows. Two warp
 * groups have 64 rows each, see wide_rows, and make their outputs, too. The third convolves the
 * values on the matrix units: with the weights of a tap as a diagonal matrix D_i of 16 channels,
 * V = sum_i D_i X_i, X_i the inputs [channel, token] shifted by a token a tap. SiLU is left to the
 * groups that walk, which wait for the third. A number that is not finite so reaches the 15
 * channels next to it. */
#ifndef CUDA_FLASH_SM90_DELTA_WHOLE_CUH
#define CUDA_FLASH_SM90_DELTA_WHOLE_CUH

#include "sm90_delta_walk.cuh"

#define WHOLE_GROUPS 3
#define WHOLE_THREADS (WHOLE_GROUPS * WIDE_TEAMS * GPU_LANES)
#define WHOLE_TEAMS (2 * WIDE_TEAMS)
#define WHOLE_STAGES 2
#define WARP_TILES 2                             /* of 16 channels, of a warp that convolves */
#define RAW_PIECES (WARP_TILES * GROUP_ROWS / 8) /* of 16 bytes, of a row of inputs */
#define RAW_ROWS (CHUNK + 8)                     /* a chunk's, and the three before it */
#define RAW_ROW_BYTES (RAW_PIECES * 16)
#define LARGEST_BELOW 0.279f /* |SiLU| of numbers below 0 at most; of others it is below these */

struct whole_memory {
    uint64_t there[WHOLE_STAGES], free[WHOLE_STAGES];
    uint64_t values_there[WHOLE_TEAMS][2], values_free[WHOLE_TEAMS][2];
    float largest[2][WHOLE_TEAMS][GROUP_ROWS]; /* of a row's values */
    float bias[WHOLE_TEAMS][GROUP_ROWS];       /* of its channel */
    /* before SiLU, as sums [row, token] have them */
    float4 values[2][WHOLE_TEAMS][TOKEN_TILES][GPU_LANES];
    /* inputs of a warp's channels from three tokens before a chunk on, see raw_place */
    char raw[WIDE_TEAMS][2][RAW_ROWS * RAW_ROW_BYTES];
    chunk_stage stages[WHOLE_STAGES];
};

/* Where 16 bytes of a row of inputs stand: those of eight rows in different banks. */
static __device__ __forceinline__ uint32_t raw_place(int32_t row, int32_t piece)
{
    return (uint32_t)(row * RAW_ROW_BYTES + (piece ^ (row >> 1 & 3)) * 16);
}

static __device__ void init_whole(whole_memory &m)
{
    if (thread_index() == 0) {
        for (int32_t i = 0; i < WHOLE_STAGES; i++) {
            barrier_init(shared_address(&m.there[i]), 1);
            barrier_init(shared_address(&m.free[i]), WHOLE_TEAMS * GPU_LANES);
        }
        for (int32_t team = 0; team < WHOLE_TEAMS; team++) {
            for (int32_t i = 0; i < 2; i++) {
                barrier_init(shared_address(&m.values_there[team][i]), GPU_LANES);
                barrier_init(shared_address(&m.values_free[team][i]), GPU_LANES);
            }
        }
        fence_barriers();
    }
    sync_group();
}

/* What a warp group multiplies a chunk with. */
struct whole_rights {
    uint64_t keys, depths, queries, inverse, scores;
};

struct whole_rows : wide_rows {
    /* Y in x's place, from X. */
    __device__ __forceinline__ void make_differences(const chunk_stage &stage, whole_memory &m,
                                                     int32_t team, int32_t c,
                                                     float (&x)[CHUNK / 2]) const
    {
        int32_t lane = lane_index(), pair = (lane & 3) * 2;
        float inverses[2] = {inverse_of(unit[0]), inverse_of(unit[1])};
        const float4 *values = m.values[c & 1][team][0] + lane;
#pragma unroll
        for (int n = 0; n < TOKEN_TILES; n++) {
            float4 four = values[n * GPU_LANES];
            float2 decay = *(const float2 *)&stage.head.from_start[n * 8 + pair];
            x[4 * n] = fmaf(-decay.x, x[4 * n], fast_silu(four.x) * inverses[0]);
            x[4 * n + 1] = fmaf(-decay.y, x[4 * n + 1], fast_silu(four.y) * inverses[0]);
            x[4 * n + 2] = fmaf(-decay.x, x[4 * n + 2], fast_silu(four.z) * inverses[1]);
            x[4 * n + 3] = fmaf(-decay.y, x[4 * n + 3], fast_silu(four.w) * inverses[1]);
        }
        barrier_give(m.values_free[team][c & 1]);
    }

    /* What O has of the state, with the chunk's decays. */
    static __device__ __forceinline__ void decay_outputs(const chunk_stage &stage,
                                                         float (&o)[CHUNK / 2])
    {
        int32_t pair = (lane_index() & 3) * 2;
#pragma unroll
        for (int n = 0; n < TOKEN_TILES; n++) {
            float2 decay = *(const float2 *)&stage.head.from_start[n * 8 + pair];
            o[4 * n] *= decay.x, o[4 * n + 1] *= decay.y;
            o[4 * n + 2] *= decay.x, o[4 * n + 3] *= decay.y;
        }
    }

    /* O += R P^T and S <- past S + R K, both begun. */
    __device__ __forceinline__ void add_changes(const chunk_stage &stage,
                                                const float (&r)[CHUNK / 2],
                                                const whole_rights &rights, float past,
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
            wgmma_left(o, change[step], rights.scores + step * 2, 1);
        }
        wgmma_commit();
        add_keys(r, decay, past, rights.depths);
    }

    /* Units of the chunk, before anything is multiplied: no sums are touched behind a branch. */
    __device__ __forceinline__ void enter_chunk(whole_memory &m, int32_t team, int32_t c,
                                                float past)
    {
        int32_t row = lane_index() >> 2;
        float next[2];
        barrier_wait_for(m.values_there[team][c & 1], c >> 1);
        const float of_values[2] = {m.largest[c & 1][team][row], m.largest[c & 1][team][row + 8]};
        bool is_new = choose_units(of_values, next);
        if (__any_sync(GPU_ALL_LANES, is_new)) {
            multiply(unit[0] * inverse_of(next[0]), unit[1] * inverse_of(next[1]));
            unit[0] = next[0], unit[1] = next[1];
        }
        bound_rows(c, of_values, past);
    }

    __device__ __forceinline__ void run_chunk(const sm80_delta_params &a, const walk_item &kept,
                                              const chunk_stage &stage, whole_memory &m,
                                              int32_t team, int32_t c, const whole_rights &rights)
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
        wgmma_wait<0>();
        pin(x);
        pin(o);
        decay_outputs(stage, o);
        add_changes(stage, x, rights, past, o);
        wgmma_wait<1>();
        pin(o);
        float scales[2] = {unit[0] * a.p.scale, unit[1] * a.p.scale};
#pragma unroll
        for (int i = 0; i < CHUNK / 2; i++) {
            o[i] *= scales[i >> 1 & 1];
        }
        store_wide_outputs(a, item_of_team(kept, team), c * CHUNK, o);
        wgmma_wait<0>();
        pin(s);
    }
};

/* The weights of a warp's channels as left sides, rows in the order of row_of_sums. */
struct whole_taps {
    uint32_t weight[WARP_TILES][CHUNK_TAPS][4];

    __device__ __forceinline__ void load(const gpu_delta_params &p, int64_t first_channel,
                                         float (*bias)[GROUP_ROWS])
    {
        int32_t x = lane_index() >> 2, column = lane_index() & 3; /* pairs of channels */
#pragma unroll
        for (int i = 0; i < WARP_TILES * 2; i++) {
            int32_t half = i & 1, of_tile = row_of_sums(x, half);
            int64_t channel = first_channel + i / 2 * GROUP_ROWS + of_tile;
            uint2 four = *(const uint2 *)(p.conv_weight.data + channel * CHUNK_TAPS * 2);
            if (column == 0) {
                bias[i / 2][half * 8 + x] =
                    p.conv_bias.data != nullptr ? matrix_number(p.conv_bias, 0, channel) : 0.0f;
            }
#pragma unroll
            for (int tap = 0; tap < CHUNK_TAPS; tap++) {
                uint32_t two = tap < 2 ? four.x : four.y;
                uint32_t one = (tap & 1 ? two >> 16 : two & 0xffff) << (of_tile & 1) * 16;
                weight[i / 2][tap][half] = of_tile >> 1 == column ? one : 0;
                weight[i / 2][tap][half + 2] = of_tile >> 1 == column + 4 ? one : 0;
            }
        }
    }
};

/* Inputs of a warp's channels, for chunk c, on their way; tokens behind the last are zeros. */
static __device__ __forceinline__ void fetch_raw(const gpu_delta_params &p,
                                                 const delta_request &request,
                                                 int64_t first_channel, int32_t c, char *raw)
{
    constexpr int rows = GPU_LANES / RAW_PIECES;
    int32_t piece = lane_index() % RAW_PIECES, row = lane_index() / RAW_PIECES;
    int32_t before = c * CHUNK - (CHUNK_TAPS - 1), t = before + row;
    const char *from =
        p.mixed.data + request.first_row * p.mixed.row + first_channel * 2 + piece * 16;
    uint32_t to = shared_address(raw) + raw_place(row, piece);
    if (before >= 0 && before + RAW_ROWS <= request.num_tokens) {
        from += t * p.mixed.row;
#pragma unroll
        for (int i = 0; i < RAW_ROWS; i += rows) {
            copy16(to + i * RAW_ROW_BYTES, from, 16);
            from += rows * p.mixed.row;
        }
        return;
    }
#pragma unroll 1
    for (int i = 0; i < RAW_ROWS; i += rows) {
        int32_t real = min(max(t + i, 0), request.num_tokens - 1);
        if (t + i >= 0) {
            copy16(to + i * RAW_ROW_BYTES, from + real * p.mixed.row, t + i == real ? 16 : 0);
        }
    }
}

/* Those of the tokens before the request, a channel a lane. */
static __device__ __forceinline__ void load_window(const gpu_delta_params &p,
                                                   const delta_request &request,
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

/* A chunk's values of the teams from `team` on. */
static __device__ __forceinline__ void convolve_values(const whole_taps &taps, const char *raw,
                                                       int32_t team, int32_t of_two,
                                                       whole_memory &m)
{
    int32_t lane = lane_index();
    uint32_t at[CHUNK_TAPS];
    float largest[WARP_TILES][2] = {{LARGEST_BELOW, LARGEST_BELOW}, {LARGEST_BELOW, LARGEST_BELOW}};
#pragma unroll
    for (int tap = 0; tap < CHUNK_TAPS; tap++) {
        at[tap] = shared_address(raw) + raw_place((lane & 7) + tap, lane >> 3);
    }
#pragma unroll 1
    for (int n = 0; n < TOKEN_TILES; n += 2) {
        float y[2][WARP_TILES][4];
#pragma unroll
        for (int k = 0; k < 2 * WARP_TILES; k++) {
            y[k / 2][k & 1][0] = y[k / 2][k & 1][1] = m.bias[team + (k & 1)][lane >> 2];
            y[k / 2][k & 1][2] = y[k / 2][k & 1][3] = m.bias[team + (k & 1)][(lane >> 2) + 8];
        }
#pragma unroll
        for (int tap = 0; tap < CHUNK_TAPS; tap++) { /* outside: four products are abreast */
#pragma unroll
            for (int k = 0; k < 2; k++) {
                uint32_t right[4];
                load4(right, at[tap] + (n + k) * 8 * RAW_ROW_BYTES);
                multiply<KIND_BF16>(y[k][0], taps.weight[0][tap], right[0], right[1]);
                multiply<KIND_BF16>(y[k][1], taps.weight[1][tap], right[2], right[3]);
            }
        }
#pragma unroll
        for (int k = 0; k < 2 * WARP_TILES; k++) {
            float(&z)[4] = y[k / 2][k & 1];
#pragma unroll
            for (int j = 0; j < 4; j++) {
                largest[k & 1][j >> 1] = fmaxf(largest[k & 1][j >> 1], z[j]);
            }
            m.values[of_two][team + (k & 1)][n + k / 2][lane] = make_float4(z[0], z[1], z[2], z[3]);
        }
    }
#pragma unroll
    for (int i = 0; i < WARP_TILES * 2; i++) {
        float of_row = largest[i / 2][i & 1];
        of_row = fmaxf(of_row, lane_xor(of_row, 1));
        of_row = fmaxf(of_row, lane_xor(of_row, 2));
        if ((lane & 3) == 0) {
            m.largest[of_two][team + i / 2][(i & 1) * 8 + (lane >> 2)] = of_row;
        }
    }
}

/* Values of 32 rows of S, chunk by chunk; the first warp copies the stages, too, each when the
 * chunk before the last is done with. */
static __device__ __forceinline__ void
make_whole_values(const sm80_delta_params &a, const walk_item &kept, whole_memory &m, int32_t warp)
{
    static_assert(WHOLE_STAGES == 2, "chunk c + 1 is copied once c - 1 is done with");
    const gpu_delta_params &p = a.p;
    int32_t team = warp * WARP_TILES, num_chunks = kept.num_chunks;
    int64_t first_channel = 2 * (int64_t)p.num_k_heads * p.head_size_k +
                            (int64_t)kept.head * p.head_size_v + team * GROUP_ROWS;
    char *raw = m.raw[warp][0];
    constexpr int apart = RAW_ROWS * RAW_ROW_BYTES;
    wait_for_earlier_kernels(); /* chunks are prepared */
    for (int32_t c = 0; warp == 0 && c < min(WHOLE_STAGES, num_chunks); c++) {
        copy_parts(a, kept, c, {c, 0}, m);
    }
    fetch_raw(p, kept.request, first_channel, 0, raw);
    load_window(p, kept.request, first_channel, raw);
    whole_taps taps;
    taps.load(p, first_channel, &m.bias[team]);
    for (int32_t c = 0; c < num_chunks; c++) {
        int32_t of_two = c & 1;
        wait_for_copies();
        sync_lanes();
        if (c + 1 < num_chunks) {
            fetch_raw(p, kept.request, first_channel, c + 1, raw + (of_two ^ 1) * apart);
        }
        for (int32_t i = 0; i < WARP_TILES; i++) {
            barrier_wait_for(m.values_free[team + i][of_two], (c >> 1) + 1);
        }
        convolve_values(taps, raw + of_two * apart, team, of_two, m);
        for (int32_t i = 0; i < WARP_TILES; i++) {
            barrier_give(m.values_there[team + i][of_two]);
        }
        if (warp == 0 && c > 0 && c + 1 < num_chunks) {
            copy_parts(a, kept, c + 1, {(c + 1) & 1, (uint32_t)(c + 1) >> 1}, m);
        }
    }
    for (int32_t i = 0; i < WARP_TILES; i++) {
        roll_windows(a, item_of_team(kept, team + i), team + i, true);
    }
    roll_windows(a, item_of_team(kept, warp), warp, false);
}

/* KEEPS: states behind chunks may be kept. A kernel of its own: the loop without is 10 % faster. */
template <bool KEEPS>
static __global__ void __launch_bounds__(WHOLE_THREADS, 1)
    delta_walk_whole(const __grid_constant__ sm80_delta_params a)
{
    extern __shared__ __align__(1024) char whole_bytes[];
    __shared__ walk_item kept; /* not in registers through the loops */
    whole_memory &m = *(whole_memory *)whole_bytes;
    int32_t warp = warp_index();
    walk_item entered;
    if (!enter_walk(a, WHOLE_TEAMS, 0, entered)) {
        wait_for_earlier_kernels(); /* a later one waits for this alone */
        return;
    }
    if (thread_index() == 0) {
        kept = entered;
    }
    init_whole(m);
    if (warp < WHOLE_TEAMS) {
        take_registers<208>();
        const chunk_stage &first = m.stages[0];
        constexpr uint32_t stage_apart = sizeof(chunk_stage) >> 4;
        uint64_t keys = matrix_at(shared_address(&first.keys.k), 0, 1024);
        uint64_t depths = matrix_at(shared_address(&first.keys.k), CHUNK * 128, 1024);
        uint64_t queries = matrix_at(shared_address(&first.keys.q), 0, 1024);
        uint64_t inverse = matrix_at(shared_address(&first.head.inverse), 0, 1024);
        uint64_t scores = matrix_at(shared_address(&first.head.scores), 0, 1024);
        whole_rows rows;
        rows.load(a, item_of_team(kept, warp));
        int32_t num_chunks = kept.num_chunks;
        for (int32_t c = 0; c < num_chunks; c++) {
            uint32_t at = (c & 1) * stage_apart;
            barrier_wait_for(m.there[c & 1], c >> 1);
            rows.run_chunk(a, kept, m.stages[c & 1], m, warp, c,
                           {matrix_again(keys, at), matrix_again(depths, at),
                            matrix_again(queries, at), matrix_again(inverse, at),
                            matrix_again(scores, at)});
            barrier_give(m.free[c & 1]);
            if constexpr (KEEPS) {
                int32_t slot = slot_behind(a, kept, c);
                if (slot >= 0) {
                    rows.store(a, item_of_team(kept, warp), slot);
                }
            }
        }
        rows.store(a, item_of_team(kept, warp), kept.request.slots[0]);
    } else {
        give_registers<88>();
        make_whole_values(a, kept, m, warp - WHOLE_TEAMS);
    }
}

#endif
