/* SPDX-License-Identifier: Apache-2.0 */
/* The states through a request's chunks by wgmma: 64 rows of S [Dv, Dk] of a value head are the
 * left sides of a warp group's products, from registers, so that sums of one are the next one's
 * operand. One warp group walks, one makes the outputs from what the first leaves it, two convolve
 * the values, of every other chunk each.
 *     X = S K^T;  Y = V - decay X;  R = Y T^T;  O = decay S Q^T + R P^T;  S <- decay S + R K
 * S, Y and R are f16 operands in units of a power of two for each row. Every token multiplies S by
 * I - beta k k^T, which with |k| <= 1 lengthens no row, and adds beta v k^T: with M the largest
 * value of a row in the chunk, |S| grows by CHUNK M at most, and no number of Y, R or S gets past
 * |S| + (CHUNK + 1) M. So the unit is chosen before anything of the chunk is multiplied. */
#ifndef CUDA_FLASH_SM90_DELTA_WALK_CUH
#define CUDA_FLASH_SM90_DELTA_WALK_CUH

#include "ptx/sm90_copy.cuh"
#include "ptx/sm90_wgmma.cuh"
#include "sm80_delta_walk.cuh"

#define WIDE_TEAMS 4 /* warps of a warp group, GROUP_ROWS rows of S each */
#define WIDE_GROUPS 4
#define WIDE_THREADS (WIDE_GROUPS * WIDE_TEAMS * GPU_LANES)
#define WIDE_STAGES 3
/* Numbers of a chunk stay below 2^MOST_BITS of their unit; f16 ends at 2^16. A unit is left alone
 * for as long as the bound is not below 2^LEAST_BITS of it. */
#define MOST_BITS 15
#define LEAST_BITS 10
#define CHOSEN_BITS 14
#define NORM_OF_LARGEST 11.3138f /* sqrt(CHUNK_DIMS) */
#define BOUND_CHUNKS 8           /* from one look at all of S to the next */

typedef walk_memory<WIDE_TEAMS> wide_memory;

/* d = a b, or with `adds` d += a b: a in registers, as sums of 16 columns become when they are
 * packed; rows of b are 16 numbers deep. */
static __device__ __forceinline__ void wgmma_left(float (&d)[CHUNK / 2], const uint32_t (&a)[4],
                                                  uint64_t b, int adds)
{
    asm volatile("{.reg .pred p; setp.ne.b32 p, %37, 0; "
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {" NAMES32
                 "}, {%32, %33, %34, %35}, %36, p, 1, 1, 0;}"
                 : SUMS32
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(adds));
}

/* The part of one of a CTA's teams. */
static __device__ __forceinline__ walk_item item_of_team(const walk_item &of_all, int32_t team)
{
    walk_item item = of_all;
    item.first_row += team * GROUP_ROWS;
    return item;
}

/* A stage of the ring and how often it has been round. */
struct ring_place {
    int32_t stage;
    uint32_t round;

    __device__ __forceinline__ void advance()
    {
        bool wraps = stage == WIDE_STAGES - 1;
        stage = wraps ? 0 : stage + 1;
        round += wraps;
    }
};

/* 16 columns of sums as the left side of a product. */
template <int SUMS>
static __device__ __forceinline__ void pack_sums(uint32_t (&a)[4], const float (&x)[SUMS], int step)
{
#pragma unroll
    for (int i = 0; i < 4; i++) {
        a[i] = pack2<KIND_F16>(x[step * 8 + 2 * i], x[step * 8 + 2 * i + 1]);
    }
}

static __device__ __forceinline__ void
multiply_step(float (&sums)[CHUNK / 2], const uint32_t (&left)[4], uint64_t keys, int step)
{
    wgmma_left(sums, left, keys + step / 4 * (CHUNK * 128 >> 4) + step % 4 * 2, step > 0);
}

/* sums = left k^T, all of a chunk's keys or queries. */
static __device__ __forceinline__ void
multiply_dims(float (&sums)[CHUNK / 2], const uint32_t (&left)[KEY_STEPS][4], uint64_t keys)
{
    pin(sums);
    wgmma_begin();
#pragma unroll
    for (int step = 0; step < KEY_STEPS; step++) {
        multiply_step(sums, left[step], keys, step);
    }
    wgmma_commit();
}

template <int SUMS> static __device__ __forceinline__ void clear_sums(float (&x)[SUMS])
{
#pragma unroll
    for (int i = 0; i < SUMS; i++) {
        x[i] = 0.0f;
    }
}

/* Exponent of a float, biased. */
static __device__ __forceinline__ int32_t exponent_of(float x)
{
    return (int32_t)(float_bits(x) >> 23 & 255);
}

static __device__ __forceinline__ float power_of(int32_t exponent)
{
    return bits_float((uint32_t)exponent << 23);
}

/* The row of S, of a team's, that row x, or with `half` x + 8, of its sums is: outputs of a lane
 * then are four rows that lie together. */
static __device__ __forceinline__ int32_t row_of_sums(int32_t x, int32_t half)
{
    return (x >> 1) * 4 + half * 2 + (x & 1);
}

/* Rows lane / 4 and lane / 4 + 8 of a warp's sums. */
struct wide_rows {
    float s[CHUNK_DIMS / 2];
    float unit[2];
    float norm[2]; /* at least */

    /* The rows' places: of those behind the last, the last's. */
    static __device__ __forceinline__ void
    find_rows(const sm80_delta_params &a, const walk_item &item, int32_t slot, float *(&at)[2])
    {
        int32_t row = item.first_row + row_of_sums(lane_index() >> 2, 0);
        int32_t last = a.p.head_size_v - 1;
        at[0] = state_row(a.p, slot, item.head, min(row, last));
        at[1] = state_row(a.p, slot, item.head, min(row + 2, last));
    }

    /* The column of the pair of numbers that number i is of. */
    static __device__ __forceinline__ int32_t column_of(int i)
    {
        return (i >> 2) * 8 + (lane_index() & 3) * 2;
    }

    /* The largest number of each row. */
    __device__ __forceinline__ void find_largest(float (&largest)[2]) const
    {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float of_half = 0.0f;
#pragma unroll
            for (int i = 2 * half; i < CHUNK_DIMS / 2; i += 4) {
                of_half = fmaxf(of_half, fmaxf(fabsf(s[i]), fabsf(s[i + 1])));
            }
            of_half = fmaxf(of_half, lane_xor(of_half, 1));
            largest[half] = fmaxf(of_half, lane_xor(of_half, 2));
        }
    }

    __device__ __forceinline__ void load(const sm80_delta_params &a, const walk_item &item)
    {
        float largest[2], *from[2];
        int32_t dims = a.p.head_size_k;
        clear_sums(s);
        if (item.request.has_state) {
            find_rows(a, item, item.request.slots[item.request.from], from);
#pragma unroll
            for (int i = 0; i < CHUNK_DIMS / 2; i++) {
                s[i] = from[i >> 1 & 1][min(column_of(i) + (i & 1), dims - 1)];
            }
#pragma unroll
            for (int i = 0; i < CHUNK_DIMS / 2; i++) {
                s[i] = column_of(i) + (i & 1) < dims ? s[i] : 0.0f;
            }
        }
        find_largest(largest);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            norm[half] = largest[half] * NORM_OF_LARGEST;
            unit[half] = scale_of(norm[half], CHOSEN_BITS - 1).scale;
        }
        multiply(inverse_of(unit[0]), inverse_of(unit[1]));
    }

    __device__ __forceinline__ void store(const sm80_delta_params &a, const walk_item &item)
    {
        float *to[2];
        find_rows(a, item, item.request.slots[0], to);
        int32_t row = item.first_row + row_of_sums(lane_index() >> 2, 0);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int32_t dims = row + half * 2 < a.p.head_size_v ? a.p.head_size_k : 0;
#pragma unroll
            for (int i = 2 * half; i < CHUNK_DIMS / 2; i += 4) {
                if (column_of(i) < dims) {
                    to[half][column_of(i)] = s[i] * unit[half];
                }
                if (column_of(i) + 1 < dims) {
                    to[half][column_of(i) + 1] = s[i + 1] * unit[half];
                }
            }
        }
    }

    __device__ __forceinline__ void multiply(float first, float second)
    {
#pragma unroll
        for (int i = 0; i < CHUNK_DIMS / 2; i++) {
            s[i] *= i & 2 ? second : first;
        }
    }

    /* The unit of the chunk, by its values' largest; true: it is another than before. The state
     * does not leave its format: next to a unit 2^100 times larger, it is 0. */
    __device__ __forceinline__ bool choose_units(const float (&of_values)[2], float (&next)[2])
    {
        bool is_new = false;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float bound = fmaf((float)(CHUNK + 1), of_values[half], norm[half]);
            int32_t now = exponent_of(unit[half]), wanted = exponent_of(bound) + 1;
            int32_t chosen = min(max(max(wanted - CHOSEN_BITS, 20), now - 100), 240);
            bool keeps = wanted - now <= MOST_BITS && wanted - now >= LEAST_BITS;
            next[half] = power_of(keeps ? now : chosen);
            is_new |= next[half] != unit[half];
        }
        return is_new;
    }

    /* The bound of |S| behind the chunk; what S holds before it says more than sums of bounds. */
    __device__ __forceinline__ void bound_rows(int32_t c, const float (&of_values)[2], float past)
    {
        if (c % BOUND_CHUNKS == BOUND_CHUNKS - 1) {
            float largest[2];
            find_largest(largest);
            norm[0] = fminf(norm[0], largest[0] * NORM_OF_LARGEST * unit[0]);
            norm[1] = fminf(norm[1], largest[1] * NORM_OF_LARGEST * unit[1]);
        }
        norm[0] = fmaf(past, norm[0], CHUNK * of_values[0]);
        norm[1] = fmaf(past, norm[1], CHUNK * of_values[1]);
    }

    /* Y in x's place, from X: in units of `next`. */
    __device__ __forceinline__ void subtract_keys(float (&x)[CHUNK / 2],
                                                  const float (&v)[CHUNK / 2],
                                                  const float2 (&decay)[TOKEN_TILES]) const
    {
#pragma unroll
        for (int i = 0; i < CHUNK / 2; i++) {
            x[i] = fmaf(i & 1 ? -decay[i / 4].y : -decay[i / 4].x, x[i], v[i]);
        }
    }

    __device__ __forceinline__ void run_chunk(const chunk_stage &stage, team_memory &team,
                                              team_barriers &barriers, int32_t c, uint64_t keys,
                                              uint64_t depths, uint64_t inverse)
    {
        int32_t lane = lane_index(), pair = (lane & 3) * 2;
        const chunk_head &head = stage.head;
        float x[CHUNK / 2], v[CHUNK / 2], next[2];
        float2 decay[TOKEN_TILES];
        uint32_t left[KEY_STEPS][4];
        pin(x);
#pragma unroll
        for (int step = 0; step < KEY_STEPS; step++) {
            pack_sums(left[step], s, step);
            if (step % 2 == 1) { /* the first two are multiplied while others are packed */
                wgmma_begin();
                multiply_step(x, left[step - 1], keys, step - 1);
                multiply_step(x, left[step], keys, step);
            }
        }
        wgmma_commit();
        barrier_wait_for(barriers.state_free, c + 1);
#pragma unroll
        for (int step = 0; step < KEY_STEPS; step++) {
            team.state[step][lane] =
                make_uint4(left[step][0], left[step][1], left[step][2], left[step][3]);
        }
        team.state_scale[lane] = make_float2(unit[0], unit[1]);
        barrier_give(barriers.state_there);
        barrier_wait_for(barriers.values_there[c & 1], c >> 1);
        const float of_values[2] = {team.largest[c & 1][lane >> 2],
                                    team.largest[c & 1][(lane >> 2) + 8]};
        bool is_new = choose_units(of_values, next);
        float inverses[2] = {inverse_of(next[0]), inverse_of(next[1])};
#pragma unroll
        for (int n = 0; n < TOKEN_TILES; n++) {
            float4 four = team.values[c & 1][n][value_place(n, lane)];
            v[4 * n] = four.x * inverses[0], v[4 * n + 1] = four.y * inverses[0];
            v[4 * n + 2] = four.z * inverses[1], v[4 * n + 3] = four.w * inverses[1];
            decay[n] = *(const float2 *)&head.from_start[n * 8 + pair];
        }
        barrier_give(barriers.values_free[c & 1]);
        float past = head.from_start[CHUNK - 1];
        bound_rows(c, of_values, past);
        wgmma_wait<0>();
        pin(x);
        if (__any_sync(GPU_ALL_LANES, is_new)) {
            float ratio[2] = {unit[0] * inverses[0], unit[1] * inverses[1]};
            multiply(ratio[0], ratio[1]);
#pragma unroll
            for (int i = 0; i < CHUNK / 2; i++) {
                x[i] *= ratio[i >> 1 & 1];
            }
            unit[0] = next[0], unit[1] = next[1];
        }
        subtract_keys(x, v, decay);
        multiply_inverse(x, inverse);
#pragma unroll
        for (int n = 0; n < TOKEN_TILES; n++) {
            decay[n] = *(const float2 *)&head.to_end[n * 8 + pair];
        }
        wgmma_wait<0>();
        pin(x);
        add_keys(x, decay, past, depths);
        hand_on_change(x, team, barriers, c);
        wgmma_wait<0>();
        pin(s);
    }

    /* R = Y T^T in Y's place. */
    static __device__ __forceinline__ void multiply_inverse(float (&y)[CHUNK / 2], uint64_t inverse)
    {
        uint32_t left[TOKEN_STEPS][4];
#pragma unroll
        for (int step = 0; step < TOKEN_STEPS; step++) {
            pack_sums(left[step], y, step);
        }
        pin(y);
        wgmma_begin();
#pragma unroll
        for (int step = 0; step < TOKEN_STEPS; step++) {
            wgmma_weights<KIND_F16, CHUNK>(y, left[step], inverse + step * (16 * 128 >> 4),
                                           step > 0);
        }
        wgmma_commit();
    }

    /* S <- past S + R K, begun. */
    __device__ __forceinline__ void add_keys(const float (&r)[CHUNK / 2],
                                             const float2 (&decay)[TOKEN_TILES], float past,
                                             uint64_t depths)
    {
        uint32_t left[TOKEN_STEPS][4];
#pragma unroll
        for (int step = 0; step < TOKEN_STEPS; step++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                float2 of_pair = decay[2 * step + i / 2];
                int32_t at = step * 8 + 2 * i;
                left[step][i] = pack2<KIND_F16>(r[at] * of_pair.x, r[at + 1] * of_pair.y);
            }
        }
        multiply(past, past);
        pin(s);
        wgmma_begin();
#pragma unroll
        for (int step = 0; step < TOKEN_STEPS; step++) {
            wgmma_weights<KIND_F16, CHUNK_DIMS>(s, left[step], depths + step * (16 * 128 >> 4));
        }
        wgmma_commit();
    }

    __device__ __forceinline__ void hand_on_change(const float (&r)[CHUNK / 2], team_memory &team,
                                                   team_barriers &barriers, int32_t c) const
    {
        int32_t lane = lane_index();
        barrier_wait_for(barriers.change_free, c + 1);
#pragma unroll
        for (int step = 0; step < TOKEN_STEPS; step++) {
            uint32_t left[4];
            pack_sums(left, r, step);
            team.change[step][lane] = make_uint4(left[0], left[1], left[2], left[3]);
        }
        team.change_scale[lane] = make_float2(unit[0], unit[1]);
        barrier_give(barriers.change_there);
    }
};

static __device__ __forceinline__ void take_four(uint32_t (&left)[4], const uint4 &four)
{
    left[0] = four.x, left[1] = four.y, left[2] = four.z, left[3] = four.w;
}

/* Outputs of a chunk, [row of sums, token], to rows of tokens. */
static __device__ __forceinline__ void store_wide_outputs(const sm80_delta_params &a,
                                                          const walk_item &item, int32_t first,
                                                          const float (&o)[CHUNK / 2])
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

static __device__ __forceinline__ void
make_wide_outputs(const sm80_delta_params &a, const walk_item &kept, const chunk_stage &stage,
                  team_memory &team, team_barriers &barriers, int32_t c, uint64_t queries,
                  uint64_t scores)
{
    int32_t lane = lane_index(), pair = (lane & 3) * 2;
    float o[CHUNK / 2], r[CHUNK / 2];
    uint32_t state[KEY_STEPS][4], change[TOKEN_STEPS][4];
    barrier_wait_for(barriers.state_there, c);
    float2 state_scale = team.state_scale[lane];
#pragma unroll
    for (int step = 0; step < KEY_STEPS; step++) {
        take_four(state[step], team.state[step][lane]);
    }
    barrier_give(barriers.state_free);
    multiply_dims(o, state, queries);
    wgmma_wait<0>(); /* R comes later than this, and takes S's registers */
    pin(o);
    barrier_wait_for(barriers.change_there, c);
    float2 change_scale = team.change_scale[lane];
#pragma unroll
    for (int step = 0; step < TOKEN_STEPS; step++) {
        take_four(change[step], team.change[step][lane]);
    }
    barrier_give(barriers.change_free);
    pin(r);
    wgmma_begin();
#pragma unroll
    for (int step = 0; step < TOKEN_STEPS; step++) {
        wgmma_left(r, change[step], scores + step * 2, step > 0);
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
    store_wide_outputs(a, item_of_team(kept, warp_index() % WIDE_TEAMS), c * CHUNK, o);
}

/* A chunk's values of two rows and a quarter of the tokens, as make_values has them, and the
 * largest of each row. */
template <bool ARE_USUAL, int LOADS>
static __device__ __forceinline__ void
store_values(const delta_taps<2> &taps, const uint32_t (&raw)[LOADS][1],
             float4 (&to)[TOKEN_TILES][GPU_LANES], float (&to_largest)[GROUP_ROWS])
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
            y[0][k] = taps.of<ARE_USUAL>(x[0], 0);
            y[1][k] = taps.of<ARE_USUAL>(x[1], 1);
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

/* Inputs of tokens t .. t + LOADS - 1; those behind the last are the last's, and mean nothing.
 * Where all of them are there, without a look at each. */
template <int LOADS>
static __device__ __forceinline__ void load_inputs(const delta_source<2> &source, int32_t t,
                                                   bool is_wide, uint32_t (&to)[LOADS][1])
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

/* Chunk c's keys and head, to stage `place`. */
static __device__ __forceinline__ void copy_stage(const sm80_delta_params &a, const walk_item &item,
                                                  int32_t c, ring_place place, wide_memory &m)
{
    if (c >= item.num_chunks) {
        return;
    }
    chunk_stage &stage = m.stages[place.stage];
    const uint64_t &there = m.there[place.stage];
    barrier_wait_for(m.free[place.stage], (int32_t)place.round + 1);
    const gpu_delta_params &p = a.p;
    const char *chunk = a.memory + (item.first_chunk + c) * a.chunk_bytes;
    const chunk_head *heads =
        (const chunk_head *)(chunk + p.num_k_heads * (int64_t)sizeof(chunk_keys));
    int32_t key_head = item.head / (p.num_v_heads / p.num_k_heads);
    if (lane_index() == 0) {
        barrier_arrive_expect(shared_address(&there), STAGE_BYTES);
        copy_span(shared_address(&stage.keys), &((const chunk_keys *)chunk)[key_head],
                  sizeof stage.keys, shared_address(&there));
        copy_span(shared_address(&stage.head), &heads[item.head], sizeof stage.head,
                  shared_address(&there));
    }
    sync_lanes();
}

/* A channel's window behind the request: its last inputs. */
static __device__ __forceinline__ void roll_channel(const gpu_delta_params &p,
                                                    const delta_request &request, int64_t channel)
{
    uint16_t *window =
        (uint16_t *)(p.window + request.slots[0] * p.window_slot + channel * p.window_channel);
    const char *from = p.mixed.data + channel * 2;
    int32_t history = p.conv_width - 1, first = request.num_tokens - history;
    for (int32_t i = 0; i < history; i++) {
        window[i] = *(const uint16_t *)(from + (request.first_row + first + i) * p.mixed.row);
    }
}

/* The windows of the channels that nobody else reads any more: a team's values, once its chunk of
 * the first tokens is made, and in one CTA of a key head q and k, which are prepared. */
static __device__ __forceinline__ void
roll_windows(const sm80_delta_params &a, const walk_item &item, int32_t of_team, bool of_values)
{
    const gpu_delta_params &p = a.p;
    int32_t group = p.num_v_heads / p.num_k_heads, lane = lane_index();
    int64_t keys = (int64_t)p.num_k_heads * p.head_size_k;
    if (p.conv_width <= 1) {
        return;
    }
    if (of_values) {
        int32_t d = item.first_row + lane;
        if (lane < GROUP_ROWS && d < p.head_size_v) {
            roll_channel(p, item.request, 2 * keys + (int64_t)item.head * p.head_size_v + d);
        }
    } else if (item.first_row == of_team * GROUP_ROWS && item.head % group == 0) {
        int32_t d = of_team * GPU_LANES + lane;
        int64_t channel = (int64_t)(item.head / group) * p.head_size_k + d;
        if (d < p.head_size_k) {
            roll_channel(p, item.request, channel);
            roll_channel(p, item.request, keys + channel);
        }
    }
}

/* Values of a team's rows behind the convolution, of every other chunk from `begin` on; inputs of
 * the next are on the way behind them. Tokens behind the last have numbers that a beta of 0 takes
 * away, rows behind the last such that nothing reads. The first team's warp copies the stages, two
 * chunks before they are needed. */
static __device__ __forceinline__ void make_wide_values(const sm80_delta_params &a,
                                                        const walk_item &kept, wide_memory &m,
                                                        int32_t of_team, int32_t begin)
{
    static_assert(WIDE_STAGES == 3, "chunk c + 2 is copied once c - 1 is done with");
    team_memory &team = m.teams[of_team];
    team_barriers &barriers = m.barriers[of_team];
    const gpu_delta_params &p = a.p;
    constexpr int loads = VALUE_TOKENS + CHUNK_TAPS - 1;
    int32_t lane = lane_index(), token = (lane >> 3) * VALUE_TOKENS - (CHUNK_TAPS - 1);
    int64_t keys = (int64_t)p.num_k_heads * p.head_size_k;
    ring_place place = {begin, 0};
    const walk_item item = item_of_team(kept, of_team);
    wait_for_earlier_kernels(); /* chunks are prepared */
    if (of_team == 0) {
        copy_stage(a, kept, begin, place, m);
    }
    delta_source<2> source(p, item.request, p.v, item.head,
                           2 * keys + (int64_t)item.head * p.head_size_v, p.head_size_v,
                           item.first_row + (lane & 7) * 2);
    delta_taps<2> taps;
    uint32_t raw[loads][1];
    load_inputs(source, begin * CHUNK + token, a.wide_values, raw);
    taps.load(p, source);
    bool are_usual = taps.are_usual();
    for (int32_t c = begin; c < kept.num_chunks; c += 2) {
        barrier_wait_for(barriers.values_free[begin], (c >> 1) + 1);
        if (are_usual) {
            store_values<true>(taps, raw, team.values[begin], team.largest[begin]);
        } else {
            store_values<false>(taps, raw, team.values[begin], team.largest[begin]);
        }
        barrier_give(barriers.values_there[begin]);
        if (c + 2 < kept.num_chunks) {
            load_inputs(source, (c + 2) * CHUNK + token, a.wide_values, raw);
        }
        if (of_team == 0) {
            place.advance();
            place.advance();
            copy_stage(a, kept, c + 2, place, m);
        }
    }
    roll_windows(a, item_of_team(kept, of_team), of_team, begin == 0);
}

static __global__ void __launch_bounds__(WIDE_THREADS, 1)
    delta_walk_wide(const __grid_constant__ sm80_delta_params a)
{
    extern __shared__ __align__(1024) char wide_bytes[];
    __shared__ walk_item kept; /* not in registers through the loops */
    wide_memory &m = *(wide_memory *)wide_bytes;
    int32_t warp = warp_index(), team = warp % WIDE_TEAMS, role = warp / WIDE_TEAMS;
    walk_item entered;
    if (!enter_walk(a, WIDE_TEAMS, 0, entered)) {
        wait_for_earlier_kernels(); /* a later one waits for this alone */
        return;
    }
    if (thread_index() == 0) {
        kept = entered;
    }
    init_barriers(m, 2, 1);
    const chunk_stage &first = m.stages[0];
    constexpr uint32_t stage_apart = sizeof(chunk_stage) >> 4;
    ring_place place = {0, 0};
    if (role == 0) {
        take_registers<216>();
        uint64_t keys = matrix_at(shared_address(&first.keys.k), 0, 1024);
        uint64_t depths = matrix_at(shared_address(&first.keys.k), CHUNK * 128, 1024);
        uint64_t inverse = matrix_at(shared_address(&first.head.inverse), 0, 1024);
        wide_rows rows;
        rows.load(a, item_of_team(kept, team));
        int32_t num_chunks = kept.num_chunks;
        for (int32_t c = 0; c < num_chunks; c++, place.advance()) {
            uint32_t at = place.stage * stage_apart;
            barrier_wait_for(m.there[place.stage], (int32_t)place.round);
            rows.run_chunk(m.stages[place.stage], m.teams[team], m.barriers[team], c,
                           matrix_again(keys, at), matrix_again(depths, at),
                           matrix_again(inverse, at));
            barrier_give(m.free[place.stage]);
        }
        rows.store(a, item_of_team(kept, team));
    } else if (role == 1) {
        give_registers<120>();
        uint64_t queries = matrix_at(shared_address(&first.keys.q), 0, 1024);
        uint64_t scores = matrix_at(shared_address(&first.head.scores), 0, 1024);
        int32_t num_chunks = kept.num_chunks;
        for (int32_t c = 0; c < num_chunks; c++, place.advance()) {
            uint32_t at = place.stage * stage_apart;
            barrier_wait_for(m.there[place.stage], (int32_t)place.round);
            make_wide_outputs(a, kept, m.stages[place.stage], m.teams[team], m.barriers[team], c,
                              matrix_again(queries, at), matrix_again(scores, at));
            barrier_give(m.free[place.stage]);
        }
    } else {
        give_registers<88>();
        make_wide_values(a, kept, m, team, role - 2);
    }
}

#endif
