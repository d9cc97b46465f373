/* SPDX-License-Identifier: Apache-2.0 */
/* The states through a request's chunks, a whole value head of 128 rows of S in a CTA: for batches
 * with more heads than multiprocessors, where a chunk's keys are read once for all rows. Two warp
 * groups have 64 rows each, see wide_rows, and make their outputs, too; the third makes the values,
 * by FMA: mma.sync waits for the matrix units, which wgmma of the other two keeps. */
#ifndef CUDA_FLASH_SM90_DELTA_STATE128_CUH
#define CUDA_FLASH_SM90_DELTA_STATE128_CUH

#include "sm90_delta_state64.cuh"

#define WHOLE_GROUPS 3
#define WHOLE_THREADS (WHOLE_GROUPS * WIDE_TEAMS * GPU_LANES)
#define WHOLE_TEAMS (2 * WIDE_TEAMS)
#define WHOLE_STAGES 2
#define WARP_TILES 2                             /* of 16 channels, of a warp that makes values */
#define RAW_PIECES (WARP_TILES * GROUP_ROWS / 8) /* of 16 bytes, of a row of inputs */
#define RAW_ROWS (CHUNK + 8)                     /* a chunk's, and the three before it */
#define RAW_ROW_BYTES (RAW_PIECES * 16)
/* What values are handed on in: x = -y log2(e) is what the convolution makes of y, with e^-y = 2^x.
 */
#define VALUE_SCALE -0.6931471805599453f
#define VALUES_ABREAST 8 /* tokens */

struct whole_memory {
    uint64_t there[WHOLE_STAGES], free[WHOLE_STAGES];
    uint64_t values_there[WHOLE_TEAMS][2], values_free[WHOLE_TEAMS][2];
    float largest[2][WHOLE_TEAMS][GROUP_ROWS]; /* of a row's values */
    /* as sums [row, token] have them, see whole_place */
    float4 values[2][WHOLE_TEAMS][TOKEN_TILES][GPU_LANES];
    /* inputs of a warp's channels from three tokens before a chunk on, see raw_place */
    char raw[WIDE_TEAMS][2][RAW_ROWS * RAW_ROW_BYTES];
    const char *keys, *head;     /* of the first chunk */
    uint32_t done[WHOLE_STAGES]; /* warps that are, with all chunks of a stage */
    chunk_stage stages[WHOLE_STAGES];
};

/* Where 16 bytes of a row of inputs stand: those of eight rows, and of two 32 apart, in different
 * banks. */
static __device__ __forceinline__ uint32_t raw_place(int32_t row, int32_t piece)
{
    return (uint32_t)((row ^ (row >> 5 & 1)) * RAW_ROW_BYTES + (piece ^ (row >> 1 & 3)) * 16);
}

/* Where a lane's values of a tile of tokens stand: those that one instruction writes, of two teams
 * or two halves of the chunk, in different banks. */
static __device__ __forceinline__ int32_t whole_place(int32_t team, int32_t tile, int32_t lane)
{
    return lane ^ (lane >> 3 & 3) ^ ((tile >> 2 ^ team) & 1) << 2;
}

static __device__ void init_whole(whole_memory &m)
{
    if (thread_index() == 0) {
        for (int32_t i = 0; i < WHOLE_STAGES; i++) {
            barrier_init(shared_address(&m.there[i]), 1);
            barrier_init(shared_address(&m.free[i]), WHOLE_TEAMS * GPU_LANES);
            m.done[i] = 0;
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

/* Chunk c's keys and head, to its stage, by one thread. */
static __device__ __forceinline__ void copy_whole(const sm80_delta_params &a, int32_t c,
                                                  whole_memory &m)
{
    chunk_stage &stage = m.stages[c & 1];
    uint32_t there = shared_address(&m.there[c & 1]);
    int64_t further = c * a.chunk_bytes;
    barrier_arrive_expect(there, STAGE_BYTES);
    copy_span(shared_address(&stage.keys), m.keys + further, sizeof stage.keys, there);
    copy_span(shared_address(&stage.head), m.head + further, sizeof stage.head, there);
}

/* A warp is done with chunk c; the last one that is has the next of the stage copied. */
static __device__ __forceinline__ void end_whole(const sm80_delta_params &a, int32_t c,
                                                 int32_t num_chunks, whole_memory &m)
{
    barrier_give(m.free[c & 1]);
    sync_lanes();
    if (lane_index() == 0) {
        uint32_t before;
        asm volatile("atom.relaxed.cta.shared.add.u32 %0, [%1], 1;"
                     : "=r"(before)
                     : "r"(shared_address(&m.done[c & 1]))
                     : "memory");
        if (before % WHOLE_TEAMS == WHOLE_TEAMS - 1 && c + WHOLE_STAGES < num_chunks) {
            barrier_wait_for(m.free[c & 1], c >> 1); /* at once */
            copy_whole(a, c + WHOLE_STAGES, m);
        }
    }
    sync_lanes();
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
        float inverses[2] = {inverse_of(unit[0]) * VALUE_SCALE, inverse_of(unit[1]) * VALUE_SCALE};
        const float4(*values)[GPU_LANES] = m.values[c & 1][team];
#pragma unroll
        for (int n = 0; n < TOKEN_TILES; n++) {
            float4 four = values[n][whole_place(team, n, lane)];
            float2 decay = *(const float2 *)&stage.head.from_start[n * 8 + pair];
            x[4 * n] = fmaf(-decay.x, x[4 * n], four.x * inverses[0]);
            x[4 * n + 1] = fmaf(-decay.y, x[4 * n + 1], four.y * inverses[0]);
            x[4 * n + 2] = fmaf(-decay.x, x[4 * n + 2], four.z * inverses[1]);
            x[4 * n + 3] = fmaf(-decay.y, x[4 * n + 3], four.w * inverses[1]);
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

    /* O += R P^T and S += R K, see add_keys, both begun. */
    __device__ __forceinline__ void add_changes(const chunk_stage &stage,
                                                const float (&r)[CHUNK / 2],
                                                const whole_rights &rights, float (&o)[CHUNK / 2])
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
        add_keys(r, decay, rights.depths);
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
        multiply(past, past); /* while R is multiplied */
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
        store_wide_outputs(a, item_of_team(kept, team), c * CHUNK, o);
        wgmma_wait<0>();
        pin(s);
    }
};

/* Weights of two neighbouring channels, a lane's; 16 lanes have a warp's. */
struct whole_taps {
    float weight[CHUNK_TAPS][2], bias[2];

    __device__ __forceinline__ whole_taps(const gpu_delta_params &p, int64_t first_channel)
    {
        int64_t channel = first_channel + lane_index() % 16 * 2;
#pragma unroll
        for (int i = 0; i < 2; i++) {
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

/* A chunk's values of the two teams from `team` on, half of the tokens a lane. */
static __device__ __forceinline__ void convolve_values(const whole_taps &taps, const char *raw,
                                                       int32_t team, int32_t of_two,
                                                       whole_memory &m)
{
    int32_t lane = lane_again(), pair = lane % 8, tile = lane >> 3 & 1, half = lane >> 4;
    int32_t x = (pair >> 1) * 2, of_four = pair & 1; /* see row_of_sums */
    float largest[2] = {0.0f, 0.0f};
    const char *row = raw + half * (CHUNK / 2) * RAW_ROW_BYTES + (lane & 3) * 4;
    int32_t piece = (lane & 15) >> 2, later = half * RAW_ROW_BYTES;
    float inputs[2][CHUNK_TAPS - 1 + VALUES_ABREAST];
#pragma unroll
    for (int first = 0; first < CHUNK / 2; first += VALUES_ABREAST) { /* tokens of the half */
        constexpr int before = CHUNK_TAPS - 1;
#pragma unroll
        for (int k = 0; k < before + VALUES_ABREAST; k++) {
            if (first > 0 && k < before) {
                inputs[0][k] = inputs[0][k + VALUES_ABREAST];
                inputs[1][k] = inputs[1][k + VALUES_ABREAST];
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
        float y[2][VALUES_ABREAST], power[2][VALUES_ABREAST];
#pragma unroll
        for (int tap = 0; tap < CHUNK_TAPS; tap++) {
#pragma unroll
            for (int k = 0; k < VALUES_ABREAST; k++) {
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    y[j][k] = fmaf(taps.weight[tap][j], inputs[j][k + tap],
                                   tap == 0 ? taps.bias[j] : y[j][k]);
                }
            }
        }
#pragma unroll
        for (int k = 0; k < VALUES_ABREAST; k++) {
            power[0][k] = fast_exp2(y[0][k]), power[1][k] = fast_exp2(y[1][k]);
        }
#pragma unroll
        for (int k = 0; k < VALUES_ABREAST; k++) {
            power[0][k] = fast_reciprocal(1.0f + power[0][k]);
            power[1][k] = fast_reciprocal(1.0f + power[1][k]);
        }
#pragma unroll
        for (int k = 0; k < VALUES_ABREAST; k += 2) {
            int32_t n = half * (TOKEN_TILES / 2) + first / 8;
#pragma unroll
            for (int j = 0; j < 2; j++) {
                float2 two = make_float2(y[j][k] * power[j][k], y[j][k + 1] * power[j][k + 1]);
                largest[j] = fmaxf(largest[j], fmaxf(fabsf(two.x), fabsf(two.y)));
                int32_t at = whole_place(tile, n, (x + j) * 4 + k / 2);
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
    uint32_t to[2] = {shared_address(raw) + raw_place(row, piece),
                      shared_address(raw) + raw_place(row + CHUNK / 2, piece) -
                          CHUNK / 2 * RAW_ROW_BYTES};
    if (before >= 0 && before + RAW_ROWS <= request.num_tokens) {
        from += t * p.mixed.row;
#pragma unroll
        for (int i = 0; i < RAW_ROWS; i += rows) {
            copy16(to[i / (CHUNK / 2) & 1] + i * RAW_ROW_BYTES, from, 16);
            from += rows * p.mixed.row;
        }
        return;
    }
#pragma unroll 1
    for (int i = 0; i < RAW_ROWS; i += rows) {
        int32_t real = min(max(t + i, 0), request.num_tokens - 1);
        if (t + i >= 0) {
            copy16((i / (CHUNK / 2) & 1 ? to[1] : to[0]) + i * RAW_ROW_BYTES,
                   from + real * p.mixed.row, t + i == real ? 16 : 0);
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

/* Values of 32 rows of S, chunk by chunk; the first warp has the first stages copied, too. */
static __device__ __forceinline__ void
make_whole_values(const sm80_delta_params &a, const walk_item &kept, whole_memory &m, int32_t warp)
{
    const gpu_delta_params &p = a.p;
    int32_t team = warp * WARP_TILES, num_chunks = kept.num_chunks;
    int64_t first_channel = 2 * (int64_t)p.num_k_heads * p.head_size_k +
                            (int64_t)kept.head * p.head_size_v + team * GROUP_ROWS;
    char *raw = m.raw[warp][0];
    constexpr int apart = RAW_ROWS * RAW_ROW_BYTES;
    wait_for_earlier_kernels(); /* chunks are prepared */
    if (warp == 0 && lane_index() == 0) {
        for (int32_t c = 0; c < min(WHOLE_STAGES, num_chunks); c++) {
            copy_whole(a, c, m);
        }
    }
    sync_lanes();
    fetch_raw(p, kept.request, first_channel, 0, raw);
    load_window(p, kept.request, first_channel, raw);
    whole_taps taps(p, first_channel);
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
        const gpu_delta_params &p = a.p;
        int64_t keys = (int64_t)p.num_k_heads * sizeof(chunk_keys);
        int32_t key_head = entered.head / a.group;
        const char *chunk = a.memory + entered.first_chunk * a.chunk_bytes;
        kept = entered;
        m.keys = chunk + key_head * (int64_t)sizeof(chunk_keys);
        m.head = chunk + keys + entered.head * (int64_t)sizeof(chunk_head);
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
            end_whole(a, c, num_chunks, m);
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
