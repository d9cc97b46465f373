/* SPDX-License-Identifier: Apache-2.0 */
/* Operands and roles of the sm_80 state kernel: the memory through which the warps of a team
 * exchange operands, and the two roles on the critical path from chunk to chunk, state and chain.
 */
#ifndef CUDA_FLASH_SM80_DELTA_ROLES_CUH
#define CUDA_FLASH_SM80_DELTA_ROLES_CUH

#include "sm80_delta_inputs.cuh"

#define KEY_STEPS (CHUNK_DIMS / 16)
#define KEY_TILES (CHUNK_DIMS / 8)
#define TOKEN_STEPS (CHUNK / 16)
#define TOKEN_TILES (CHUNK / 8)
#define VALUE_TOKENS 16 /* tokens of a lane in the convolution */
/* Exponent bounds of operands; f16 ends at 2^16. R is up to CHUNK times Y. */
#define STATE_BITS 14
#define CHANGE_BITS 8

struct alignas(1024) chunk_stage { /* alignment of tiles for wgmma */
    struct chunk_keys keys;
    struct chunk_head head;
};
/* bytes copied */
#define STAGE_BYTES ((int)(sizeof(struct chunk_keys) + sizeof(struct chunk_head)))

/* What the warps of a team exchange. */
struct team_memory {
    /* in the layout of accumulators [row, token], see value_place */
    float4 values[2][TOKEN_TILES][GPU_LANES];
    /* Operands: S, R, and R with decays up to the chunk's end; then their scales. */
    uint4 state[KEY_STEPS][GPU_LANES], change[TOKEN_STEPS][GPU_LANES];
    uint4 update[TOKEN_STEPS][GPU_LANES];
    float2 state_scale[GPU_LANES], change_scale[GPU_LANES], update_scale[GPU_LANES];
    float largest[2][GROUP_ROWS]; /* the largest value of each row */
};

struct team_barriers {
    uint64_t values_full[2], values_empty[2], state_full, change_full, change_empty, update_full,
        update_empty;
    uint64_t state_empty; /* two warps arrive */
};

#define MOST_STAGES 4
template <int TEAMS> struct state_memory {
    uint64_t full[MOST_STAGES], empty[MOST_STAGES];
    team_barriers barriers[TEAMS];
    team_memory teams[TEAMS];
    chunk_stage stages[1]; /* as many as fit */
};

/* Roles of warps: states, chains, outputs, values; the first values warp also copies chunks. The
 * loop of each role is short, so that it stays in the instruction cache of its scheduler. */
template <int TEAMS> constexpr int state_threads = (4 * TEAMS * GPU_LANES);
enum { ROLE_STATES, ROLE_CHAINS, ROLE_OUTPUTS, ROLE_VALUES };

GPU_INLINE void barrier_wait_for(const uint64_t &barrier, int32_t count)
{
    barrier_wait(shared_address(&barrier), count & 1);
}

GPU_INLINE void barrier_give(const uint64_t &barrier)
{
    barrier_arrive(shared_address(&barrier));
}

/* The inverse of a power of two. */
GPU_INLINE float inverse_of(float scale)
{
    return bits_float(254u * (1u << 23) - float_bits(scale));
}

/* Computes the scales of rows lane / 4 and lane / 4 + 8 of accumulators. */
template <int TILES>
GPU_INLINE void scale_rows(const float (&x)[TILES][4], int32_t bits, row_scale (&scale)[2])
{
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float largest = 0.0f;
#pragma unroll
        for (int n = 0; n < TILES; n++) {
            largest = fmaxf(largest, fmaxf(fabsf(x[n][2 * half]), fabsf(x[n][2 * half + 1])));
        }
        largest = fmaxf(largest, lane_xor(largest, 1));
        largest = fmaxf(largest, lane_xor(largest, 2));
        scale[half] = scale_of(largest, bits);
    }
}

GPU_INLINE void take_four(uint32_t (&left)[4], const uint4 &four)
{
    left[0] = four.x, left[1] = four.y, left[2] = four.z, left[3] = four.w;
}

/* Packs 16 columns of accumulators as a left operand. */
template <int SUMS> GPU_INLINE void pack_sums(uint32_t (&a)[4], const float (&x)[SUMS], int step)
{
#pragma unroll
    for (int i = 0; i < 4; i++) {
        a[i] = pack2<KIND_F16>(x[step * 8 + 2 * i], x[step * 8 + 2 * i + 1]);
    }
}

/* As pack_sums, in units of the rows. */
GPU_INLINE void pack_step(uint32_t (&a)[4], const float (&front)[4], const float (&back)[4],
                          const row_scale (&scale)[2])
{
    a[0] = pack2<KIND_F16>(front[0] * scale[0].inverse, front[1] * scale[0].inverse);
    a[1] = pack2<KIND_F16>(front[2] * scale[1].inverse, front[3] * scale[1].inverse);
    a[2] = pack2<KIND_F16>(back[0] * scale[0].inverse, back[1] * scale[0].inverse);
    a[3] = pack2<KIND_F16>(back[2] * scale[1].inverse, back[3] * scale[1].inverse);
}

/* The lane's ldmatrix address in a tile of COLUMNS columns of 16 bytes, aligned to 256 bytes; even
 * columns are selected by xor. rows_of: rows are 16 columns of the product; depths_of: rows are 16
 * steps of the reduction. */
template <int COLUMNS> GPU_INLINE uint32_t rows_of(uint32_t tile)
{
    int32_t lane = lane_index();
    return tile + place16<COLUMNS>((lane & 7) + (lane >> 4) * 8, lane >> 3 & 1);
}

template <int COLUMNS> GPU_INLINE uint32_t depths_of(uint32_t tile)
{
    int32_t lane = lane_index();
    return tile + place16<COLUMNS>(lane & 15, lane >> 4);
}

template <int TILES> GPU_INLINE void clear(float (&x)[TILES][4])
{
#pragma unroll
    for (int n = 0; n < TILES; n++) {
        x[n][0] = x[n][1] = x[n][2] = x[n][3] = 0.0f;
    }
}

/* The position of a lane's four values of token tile n. Lanes that store tokens far apart use
 * different banks. */
GPU_INLINE int32_t value_place(int32_t n, int32_t lane)
{
    return lane ^ (lane >> 3) ^ (n >> 1 & 1) << 2;
}

/* The row of S, of a team's rows, for accumulator row x, or x + 8 with `half`. With this order a
 * lane's outputs are four adjacent rows. */
GPU_INLINE int32_t row_of_sums(int32_t x, int32_t half)
{
    return (x >> 1) * 4 + half * 2 + (x & 1);
}

/* A CTA's work: a value head of a request. */
struct state_item {
    delta_request request;
    int32_t head, first_row; /* value head; the team's first row of S */
    int32_t first_chunk, num_chunks;
};

/* The checkpoint slot for the state after chunk c; negative if there is none. */
GPU_INLINE int32_t slot_after(const sm80_delta_params &a, const state_item &item, int32_t c)
{
    int32_t done = (c + 1) * CHUNK;
    bool is_whole = done <= item.request.num_tokens && a.p.checkpoint_interval > 0;
    return is_whole ? checkpoint_slot(a.p, item.request, done) : -1;
}

/* Right operands of one step for PAIRS pairs of tiles. Loads of a step are issued while the
 * previous step multiplies. */
template <int PAIRS> struct step_rights {
    uint32_t r[PAIRS][4];

    template <int COLUMNS>
    __device__ __forceinline__ void load_rows(uint32_t rows, int32_t column, int32_t first = 0)
    {
#pragma unroll
        for (int i = first; i < PAIRS; i++) {
            load4(r[i], (rows ^ (column & 7) * 16) + tile_at<COLUMNS>(i * 16, column));
        }
    }

    template <int COLUMNS>
    __device__ __forceinline__ void load_depths(uint32_t depths, int32_t depth, int32_t column,
                                                int32_t first = 0)
    {
#pragma unroll
        for (int i = first; i < PAIRS; i++) {
            load4_transposed(r[i], (depths ^ (column + i * 2 & 7) * 16) +
                                       tile_at<COLUMNS>(depth, column + i * 2));
        }
    }

    template <int TILES>
    __device__ __forceinline__ void add(float (&sums)[TILES][4], const uint32_t (&left)[4],
                                        int32_t first_tile = 0, int32_t first = 0) const
    {
#pragma unroll
        for (int i = first; i < PAIRS; i++) {
            multiply<KIND_F16>(sums[first_tile + 2 * i], left, r[i][0], r[i][1]);
            multiply<KIND_F16>(sums[first_tile + 2 * i + 1], left, r[i][2], r[i][3]);
        }
    }
};

typedef step_rights<TOKEN_TILES / 2> token_rights;

template <int SUMS> GPU_INLINE void clear_sums(float (&x)[SUMS])
{
#pragma unroll
    for (int i = 0; i < SUMS; i++) {
        x[i] = 0.0f;
    }
}

/* The state of rows lane / 4 and that + 8 of a warp's accumulators, in units of powers of two. */
struct state_rows {
    float s[CHUNK_DIMS / 2];
    float unit[2];

    /* The addresses of the rows; rows past the end use the last. */
    GPU_INLINE void find_rows(const sm80_delta_params &a, const state_item &item, int32_t slot,
                              char *(&at)[2])
    {
        int32_t row = item.first_row + row_of_sums(lane_index() >> 2, 0);
        int32_t last = a.p.head_size_v - 1;
        at[0] = state_bytes_at(a.p, slot, item.head, min(row, last));
        at[1] = state_bytes_at(a.p, slot, item.head, min(row + 2, last));
    }

    /* The column of the pair that contains element i. */
    GPU_INLINE int32_t column_of(int i)
    {
        return (i >> 2) * 8 + (lane_index() & 3) * 2;
    }

    __device__ __forceinline__ void load(const sm80_delta_params &a, const state_item &item)
    {
        char *from[2];
        int32_t dims = a.p.head_size_k;
        clear_sums(s);
        if (item.request.has_state) {
            find_rows(a, item, item.request.state_from, from);
#pragma unroll
            for (int i = 0; i < CHUNK_DIMS / 2; i++) {
                s[i] = load_state(a.p, from[i >> 1 & 1], min(column_of(i) + (i & 1), dims - 1));
            }
#pragma unroll
            for (int i = 0; i < CHUNK_DIMS / 2; i++) {
                s[i] = column_of(i) + (i & 1) < dims ? s[i] : 0.0f;
            }
        }
    }

    /* States of 16 bits go on as they were stored; `done` of the step's tokens are in it. SEEDED: a
     * seed may round them. */
    template <bool SEEDED>
    __device__ __forceinline__ void store(const sm80_delta_params &a, const state_item &item,
                                          int32_t slot, int32_t done)
    {
        char *to[2];
        find_rows(a, item, slot, to);
        int32_t row = item.first_row + row_of_sums(lane_index() >> 2, 0);
        int32_t head_row = item.head * a.p.head_size_v + row, tokens = item.request.context + done;
#pragma unroll
        for (int i = 0; i < CHUNK_DIMS / 2; i++) {
            int half = i >> 1 & 1;
            int32_t d = column_of(i) + (i & 1);
            if (row + half * 2 < a.p.head_size_v && d < a.p.head_size_k) {
                s[i] = store_state<SEEDED>(a.p, to[half], head_row + half * 2, d, tokens,
                                           s[i] * unit[half]) *
                       inverse_of(unit[half]);
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
};

struct delta_rows : state_rows {
    __device__ void load(const sm80_delta_params &a, const state_item &item)
    {
        state_rows::load(a, item);
        unit[0] = unit[1] = 1.0f;
    }

    /* Publishes the state before chunk c to the other roles. */
    __device__ __forceinline__ void publish(team_memory &team, team_barriers &barriers, int32_t c)
    {
        row_scale scale[2];
        const float(&tiles)[KEY_TILES][4] = (float(&)[KEY_TILES][4])s;
        scale_rows(tiles, STATE_BITS, scale);
        barrier_wait_for(barriers.state_empty, c + 1);
#pragma unroll
        for (int step = 0; step < KEY_STEPS; step++) {
            uint32_t left[4];
            pack_step(left, tiles[2 * step], tiles[2 * step + 1], scale);
            team.state[step][lane_index()] = make_uint4(left[0], left[1], left[2], left[3]);
        }
        team.state_scale[lane_index()] =
            make_float2(scale[0].scale * unit[0], scale[1].scale * unit[1]);
        barrier_give(barriers.state_full);
    }

    /* S <- decay S + R K, in R's units. */
    __device__ __forceinline__ void add_keys(const chunk_stage &stage, team_memory &team,
                                             team_barriers &barriers, int32_t c)
    {
        constexpr int parts = 2 * TOKEN_STEPS;
        uint32_t keys = depths_of<CHUNK_DIMS / 8>(shared_address(stage.keys.k));
        token_rights rights[2];
        uint4 r[TOKEN_STEPS];
        rights[0].load_depths<CHUNK_DIMS / 8>(keys, 0, 0);
        float decay = stage.head.from_start[CHUNK - 1];
        barrier_wait_for(barriers.update_full, c);
        float2 scale = team.update_scale[lane_index()];
#pragma unroll
        for (int step = 0; step < TOKEN_STEPS; step++) {
            r[step] = team.update[step][lane_index()];
        }
        barrier_give(barriers.update_empty);
        float factor[2] = {decay * (unit[0] * inverse_of(scale.x)),
                           decay * (unit[1] * inverse_of(scale.y))};
        unit[0] = scale.x, unit[1] = scale.y;
        multiply(factor[0], factor[1]);
#pragma unroll
        for (int part = 0; part < parts; part++) {
            int next = part + 1;
            if (next < parts) {
                rights[next & 1].load_depths<CHUNK_DIMS / 8>(keys, next / 2 * 16,
                                                             next % 2 * TOKEN_TILES);
            }
            const uint4 &four = r[part / 2];
            const uint32_t left[4] = {four.x, four.y, four.z, four.w};
            rights[part & 1].add((float(&)[KEY_TILES][4])s, left, part % 2 * TOKEN_TILES);
        }
    }

    /* The same for rules without a delta, whose R has a unit of its own in each chunk. */
    __device__ __forceinline__ void add_apart(const chunk_stage &stage, team_memory &team,
                                              team_barriers &barriers, int32_t c)
    {
        uint32_t keys = depths_of<CHUNK_DIMS / 8>(shared_address(stage.keys.k));
        token_rights rights;
        uint4 r[TOKEN_STEPS];
        float decay = stage.head.from_start[CHUNK - 1];
        barrier_wait_for(barriers.update_full, c);
        float2 scale = team.update_scale[lane_index()];
#pragma unroll
        for (int step = 0; step < TOKEN_STEPS; step++) {
            r[step] = team.update[step][lane_index()];
        }
        barrier_give(barriers.update_empty);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float sums[TOKEN_TILES][4];
            clear(sums);
#pragma unroll
            for (int step = 0; step < TOKEN_STEPS; step++) {
                const uint32_t left[4] = {r[step].x, r[step].y, r[step].z, r[step].w};
                rights.load_depths<CHUNK_DIMS / 8>(keys, step * 16, half * TOKEN_TILES);
                rights.add(sums, left);
            }
#pragma unroll
            for (int n = 0; n < TOKEN_TILES; n++) {
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    float &to = s[(half * TOKEN_TILES + n) * 4 + i];
                    to = fmaf(sums[n][i], i >> 1 ? scale.y : scale.x, decay * to);
                }
            }
        }
    }
};

/* Computes R, what a chunk's tokens add to the state, from the state before the chunk. */
struct delta_chain {
    float unit[2]; /* units of the previous chunk */

    /* Chooses the unit of Y, R and the state after the chunk, such that neither |R| <= 64 |Y| nor
     * the state overflows. If the previous state or chunk is 2^80 times larger, Y becomes 0. */
    __device__ __forceinline__ void choose_units(const float (&y)[TOKEN_TILES][4],
                                                 const float2 &of_state, row_scale (&scale)[2])
    {
        scale_rows(y, CHANGE_BITS, scale);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int32_t least = max((int32_t)(float_bits(half ? of_state.y : of_state.x) >> 23) - 80,
                                (int32_t)(float_bits(unit[half]) >> 23) - 100);
            int32_t exponent = (int32_t)(float_bits(scale[half].scale) >> 23);
            exponent = max(exponent, min(least, 240));
            scale[half].scale = bits_float((uint32_t)exponent << 23);
            scale[half].inverse = inverse_of(scale[half].scale);
            unit[half] = scale[half].scale;
        }
    }

    /* Y = V - decay S K^T; beta is part of the inverse. */
    __device__ __forceinline__ void subtract_keys(const chunk_stage &stage, team_memory &team,
                                                  team_barriers &barriers, int32_t c, float2 &scale,
                                                  float (&x)[TOKEN_TILES][4])
    {
        int32_t lane = lane_index(), pair = (lane & 3) * 2;
        uint32_t keys = rows_of<CHUNK_DIMS / 8>(shared_address(stage.keys.k));
        token_rights rights[2];
        rights[0].load_rows<CHUNK_DIMS / 8>(keys, 0);
        clear(x);
        barrier_wait_for(barriers.state_full, c);
#pragma unroll
        for (int step = 0; step < KEY_STEPS; step++) {
            if (step + 1 < KEY_STEPS) {
                rights[(step + 1) & 1].load_rows<CHUNK_DIMS / 8>(keys, (step + 1) * 2);
            }
            uint4 four = team.state[step][lane];
            const uint32_t left[4] = {four.x, four.y, four.z, four.w};
            rights[step & 1].add(x, left);
        }
        scale = team.state_scale[lane];
        barrier_give(barriers.state_empty);
        barrier_wait_for(barriers.values_full[c & 1], c >> 1);
#pragma unroll
        for (int n = 0; n < TOKEN_TILES; n++) {
            float4 v = team.values[c & 1][n][value_place(n, lane)];
            float2 decay = *(const float2 *)&stage.head.from_start[n * 8 + pair];
            x[n][0] = fmaf(-decay.x * scale.x, x[n][0], v.x);
            x[n][1] = fmaf(-decay.y * scale.x, x[n][1], v.y);
            x[n][2] = fmaf(-decay.x * scale.y, x[n][2], v.z);
            x[n][3] = fmaf(-decay.y * scale.y, x[n][3], v.w);
        }
        barrier_give(barriers.values_empty[c & 1]);
    }

    /* R = Y T^T, in units of Y's scale. */
    __device__ __forceinline__ void multiply_inverse(const chunk_head &head,
                                                     const float (&y)[TOKEN_TILES][4],
                                                     const float2 &of_state, row_scale (&scale)[2],
                                                     float (&r)[TOKEN_TILES][4])
    {
        uint32_t inverse = depths_of<CHUNK / 8>(shared_address(head.inverse));
        token_rights rights[2];
        rights[0].load_depths<CHUNK / 8>(inverse, 0, 0);
        choose_units(y, of_state, scale);
        clear(r);
#pragma unroll
        for (int step = 0; step < TOKEN_STEPS; step++) {
            if (step + 1 < TOKEN_STEPS) {
                rights[(step + 1) & 1].load_depths<CHUNK / 8>(inverse, (step + 1) * 16, 0,
                                                              step + 1);
            }
            uint32_t left[4];
            pack_step(left, y[2 * step], y[2 * step + 1], scale);
            rights[step & 1].add(r, left, 0, step);
        }
    }

    /* R = V (factors), in units of its scale. */
    __device__ __forceinline__ void scale_values(const chunk_stage &stage, team_memory &team,
                                                 team_barriers &barriers, int32_t c,
                                                 row_scale (&scale)[2], float (&r)[TOKEN_TILES][4])
    {
        int32_t lane = lane_index(), pair = (lane & 3) * 2;
        barrier_wait_for(barriers.values_full[c & 1], c >> 1);
#pragma unroll
        for (int n = 0; n < TOKEN_TILES; n++) {
            float4 v = team.values[c & 1][n][value_place(n, lane)];
            float2 factor = *(const float2 *)&stage.head.factors.value[n * 8 + pair];
            r[n][0] = v.x * factor.x, r[n][1] = v.y * factor.y;
            r[n][2] = v.z * factor.x, r[n][3] = v.w * factor.y;
        }
        barrier_give(barriers.values_empty[c & 1]);
        scale_rows(r, STATE_BITS, scale);
#pragma unroll
        for (int n = 0; n < TOKEN_TILES; n++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                r[n][i] *= scale[i >> 1].inverse;
            }
        }
    }

    __device__ __forceinline__ void run_chunk(bool additive, const chunk_stage &stage,
                                              team_memory &team, team_barriers &barriers, int32_t c)
    {
        int32_t lane = lane_index(), pair = (lane & 3) * 2;
        float x[TOKEN_TILES][4], r[TOKEN_TILES][4];
        float2 of_state;
        row_scale scale[2];
        if (additive) {
            scale_values(stage, team, barriers, c, scale, r);
        } else {
            subtract_keys(stage, team, barriers, c, of_state, x);
            multiply_inverse(stage.head, x, of_state, scale, r);
        }
        float2 scales = make_float2(scale[0].scale, scale[1].scale);
        barrier_wait_for(barriers.update_empty, c + 1);
#pragma unroll
        for (int step = 0; step < TOKEN_STEPS; step++) {
            float decayed[8];
            uint32_t left[4];
#pragma unroll
            for (int n = 0; n < 2; n++) {
                float2 decay = *(const float2 *)&stage.head.to_end[(2 * step + n) * 8 + pair];
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    decayed[4 * n + i] = r[2 * step + n][i] * (i & 1 ? decay.y : decay.x);
                }
            }
            pack_sums(left, decayed, 0);
            team.update[step][lane] = make_uint4(left[0], left[1], left[2], left[3]);
        }
        team.update_scale[lane] = scales;
        barrier_give(barriers.update_full);
        barrier_wait_for(barriers.change_empty, c + 1);
#pragma unroll
        for (int step = 0; step < TOKEN_STEPS; step++) {
            uint32_t left[4];
            pack_sums(left, (float(&)[CHUNK / 2]) r, step);
            team.change[step][lane] = make_uint4(left[0], left[1], left[2], left[3]);
        }
        team.change_scale[lane] = scales;
        barrier_give(barriers.change_full);
    }
};

#endif
