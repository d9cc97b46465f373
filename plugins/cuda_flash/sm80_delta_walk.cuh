/* SPDX-License-Identifier: Apache-2.0 */
/* The states through a request's chunks. A warp has GROUP_ROWS rows of S [Dv, Dk] of a value head
 * in registers and needs no other warp's: with S, Y and R as the left sides of products, the sums
 * of one are the operand of the next, X = S K^T;  Y = beta (V - X);  R = Y T^T;  O = S Q^T + R P^T;
 * S <- S + R K (each with its decays). One warp of a team walks so, one makes the outputs from what
 * the first leaves it, one convolves the values. Operands are f16 behind a power of two for each
 * row of S: 11 bits, which float32's range keeps. */
#ifndef CUDA_FLASH_SM80_DELTA_WALK_CUH
#define CUDA_FLASH_SM80_DELTA_WALK_CUH

#include "sm80_delta_prepare.cuh"

#define KEY_STEPS (CHUNK_DIMS / 16)
#define KEY_TILES (CHUNK_DIMS / 8)
#define TOKEN_STEPS (CHUNK / 16)
#define TOKEN_TILES (CHUNK / 8)
#define VALUE_TOKENS 16 /* of a lane that convolves */
/* Operands' exponents at most: f16 ends at 2^16. R is up to CHUNK times Y. */
#define STATE_BITS 14
#define CHANGE_BITS 8

struct chunk_stage {
    struct chunk_keys keys;
    struct chunk_head head;
};

/* What the warps of a team hand on. */
struct team_memory {
    float4 values[2][TOKEN_TILES][GPU_LANES]; /* as sums [row, token] have them, see value_place */
    uint4 state[KEY_STEPS][GPU_LANES], change[TOKEN_STEPS][GPU_LANES]; /* operands: S, R */
    float2 state_scale[GPU_LANES], change_scale[GPU_LANES];
};

struct team_barriers {
    uint64_t values_there[2], values_free[2], state_there, state_free, change_there, change_free;
};

#define MOST_STAGES 4
template <int TEAMS> struct walk_memory {
    uint64_t there[MOST_STAGES], free[MOST_STAGES];
    team_barriers barriers[TEAMS];
    team_memory teams[TEAMS];
    chunk_stage stages[1]; /* as many as there are */
};

/* Roles by warps: chains, outputs, values, of which the first copies, too. With two teams, a
 * quarter of a multiprocessor has a chain, the others no more than an output and values. */
template <int TEAMS> struct walk_roles {
    static constexpr int outputs = TEAMS, values = TEAMS == 2 ? 6 : 2 * TEAMS;
    static constexpr int warps = values + TEAMS, threads = warps * GPU_LANES;
};

static __device__ __forceinline__ void barrier_wait_for(const uint64_t &barrier, int32_t count)
{
    barrier_wait(shared_address(&barrier), count & 1);
}

static __device__ __forceinline__ void barrier_give(const uint64_t &barrier)
{
    barrier_arrive(shared_address(&barrier));
}

/* A power of two of which numbers up to `largest` are less than 2^(bits + 1), and its inverse. */
struct row_scale {
    float scale, inverse;
};

static __device__ __forceinline__ row_scale scale_of(float largest, int32_t bits)
{
    int32_t exponent = (int32_t)(float_bits(largest) >> 23) - bits;
    exponent = min(max(exponent, 20), 240);
    return {bits_float((uint32_t)exponent << 23), bits_float((uint32_t)(254 - exponent) << 23)};
}

/* Scales of rows lane / 4 and lane / 4 + 8 of sums. */
template <int TILES>
static __device__ __forceinline__ void scale_rows(const float (&x)[TILES][4], int32_t bits,
                                                  row_scale (&scale)[2])
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

/* Sums of 16 columns as the left side of a product. */
static __device__ __forceinline__ void pack_step(uint32_t (&a)[4], const float (&front)[4],
                                                 const float (&back)[4],
                                                 const row_scale (&scale)[2])
{
    a[0] = pack2<KIND_F16>(front[0] * scale[0].inverse, front[1] * scale[0].inverse);
    a[1] = pack2<KIND_F16>(front[2] * scale[1].inverse, front[3] * scale[1].inverse);
    a[2] = pack2<KIND_F16>(back[0] * scale[0].inverse, back[1] * scale[0].inverse);
    a[3] = pack2<KIND_F16>(back[2] * scale[1].inverse, back[3] * scale[1].inverse);
}

static __device__ __forceinline__ void pack_whole(uint32_t (&a)[4], const float (&front)[4],
                                                  const float (&back)[4])
{
    a[0] = pack2<KIND_F16>(front[0], front[1]);
    a[1] = pack2<KIND_F16>(front[2], front[3]);
    a[2] = pack2<KIND_F16>(back[0], back[1]);
    a[3] = pack2<KIND_F16>(back[2], back[3]);
}

/* Addresses of ldmatrix in tiles of so many columns of 16 bytes. Rows of the right side are 16
 * columns of the product or, `transposed`, 16 of the depth. */
template <int COLUMNS>
static __device__ __forceinline__ uint32_t rows_at(uint32_t tile, int32_t row, int32_t column)
{
    int32_t lane = lane_index();
    return tile + place16<COLUMNS>(row + (lane & 7) + (lane >> 4) * 8, column + (lane >> 3 & 1));
}

template <int COLUMNS>
static __device__ __forceinline__ uint32_t depths_at(uint32_t tile, int32_t depth, int32_t column)
{
    int32_t lane = lane_index();
    return tile + place16<COLUMNS>(depth + (lane & 15), column + (lane >> 4));
}

template <int TILES> static __device__ __forceinline__ void clear(float (&x)[TILES][4])
{
#pragma unroll
    for (int n = 0; n < TILES; n++) {
        x[n][0] = x[n][1] = x[n][2] = x[n][3] = 0.0f;
    }
}

/* Where a lane's four values of token tile n stand: those that store them, of tokens far apart,
 * meet different banks. */
static __device__ __forceinline__ int32_t value_place(int32_t n, int32_t lane)
{
    return lane ^ (lane >> 3) ^ (n >> 1 & 1) << 2;
}

/* One request's part of a launch. */
struct walk_item {
    delta_request request;
    int32_t head, first_row; /* value head; the team's first row of S */
    int32_t first_chunk, num_chunks;
};

/* Right sides of a product's step, for so many pairs of tiles: loads of a step are on the way while
 * the one before multiplies. */
template <int PAIRS> struct step_rights {
    uint32_t r[PAIRS][4];

    template <int COLUMNS>
    __device__ __forceinline__ void load_rows(uint32_t tile, int32_t column, int32_t first = 0)
    {
#pragma unroll
        for (int i = first; i < PAIRS; i++) {
            load4(r[i], rows_at<COLUMNS>(tile, i * 16, column));
        }
    }

    template <int COLUMNS>
    __device__ __forceinline__ void load_depths(uint32_t tile, int32_t depth, int32_t column,
                                                int32_t first = 0)
    {
#pragma unroll
        for (int i = first; i < PAIRS; i++) {
            load4_transposed(r[i], depths_at<COLUMNS>(tile, depth, column + i * 2));
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

/* The state of a warp's rows, in units of a power of two for each. */
struct delta_chain {
    float s[KEY_TILES][4];
    float unit[2];

    __device__ float *row(const sm80_delta_params &a, const walk_item &item, int32_t slot, int half)
    {
        return state_row(a.p, slot, item.head, item.first_row + (lane_index() >> 2) + half * 8);
    }

    __device__ bool holds(const sm80_delta_params &a, const walk_item &item, int n, int i)
    {
        return item.first_row + (lane_index() >> 2) + (i >> 1) * 8 < a.p.head_size_v &&
               n * 8 + (lane_index() & 3) * 2 + (i & 1) < a.p.head_size_k;
    }

    __device__ void load(const sm80_delta_params &a, const walk_item &item)
    {
        unit[0] = unit[1] = 1.0f;
#pragma unroll
        for (int n = 0; n < KEY_TILES; n++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float *from = row(a, item, item.request.slots[item.request.from], i >> 1);
                s[n][i] = item.request.has_state && holds(a, item, n, i)
                              ? from[n * 8 + (lane_index() & 3) * 2 + (i & 1)]
                              : 0.0f;
            }
        }
    }

    __device__ void store(const sm80_delta_params &a, const walk_item &item)
    {
#pragma unroll
        for (int n = 0; n < KEY_TILES; n++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                if (holds(a, item, n, i)) {
                    row(a, item, item.request.slots[0],
                        i >> 1)[n * 8 + (lane_index() & 3) * 2 + (i & 1)] = s[n][i] * unit[i >> 1];
                }
            }
        }
    }

    /* X = S K^T, in units of `scale` of the state's; S goes to the output's warp on the way. */
    __device__ __forceinline__ void multiply_keys(uint32_t keys, team_memory &team,
                                                  team_barriers &barriers, int32_t c,
                                                  row_scale (&scale)[2], float (&x)[TOKEN_TILES][4])
    {
        token_rights rights[2];
        rights[0].load_rows<CHUNK_DIMS / 8>(keys, 0);
        scale_rows(s, STATE_BITS, scale);
        barrier_wait_for(barriers.state_free, c + 1);
        clear(x);
#pragma unroll
        for (int step = 0; step < KEY_STEPS; step++) {
            if (step + 1 < KEY_STEPS) {
                rights[(step + 1) & 1].load_rows<CHUNK_DIMS / 8>(keys, (step + 1) * 2);
            }
            uint32_t left[4];
            pack_step(left, s[2 * step], s[2 * step + 1], scale);
            team.state[step][lane_index()] = make_uint4(left[0], left[1], left[2], left[3]);
            rights[step & 1].add(x, left);
        }
        scale[0].scale *= unit[0], scale[1].scale *= unit[1];
        team.state_scale[lane_index()] = make_float2(scale[0].scale, scale[1].scale);
        barrier_give(barriers.state_there);
    }

    /* The unit of Y, and of R and of the state behind it. Neither |R| <= 64 |Y| nor the state in it
     * leaves its format: next to a state or a chunk before that is 2^80 times larger, Y is 0. */
    __device__ __forceinline__ void choose_units(const float (&y)[TOKEN_TILES][4],
                                                 const row_scale (&of_state)[2],
                                                 row_scale (&scale)[2]) const
    {
        scale_rows(y, CHANGE_BITS, scale);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int32_t least = max((int32_t)(float_bits(of_state[half].scale) >> 23) - 80,
                                (int32_t)(float_bits(unit[half]) >> 23) - 100);
            int32_t exponent = (int32_t)(float_bits(scale[half].scale) >> 23);
            exponent = max(exponent, min(least, 240));
            scale[half] = {bits_float((uint32_t)exponent << 23),
                           bits_float((uint32_t)(254 - exponent) << 23)};
        }
    }

    /* R = Y T^T, in units of Y's scale. */
    __device__ __forceinline__ void multiply_inverse(uint32_t inverse,
                                                     const float (&y)[TOKEN_TILES][4],
                                                     const row_scale (&of_state)[2],
                                                     row_scale (&scale)[2],
                                                     float (&r)[TOKEN_TILES][4]) const
    {
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

    /* S <- decay S + R K, in R's units. */
    __device__ __forceinline__ void add_keys(uint32_t keys, const uint32_t (&r)[TOKEN_STEPS][4],
                                             const row_scale (&scale)[2], float decay)
    {
        constexpr int parts = 2 * TOKEN_STEPS;
        token_rights rights[2];
        rights[0].load_depths<CHUNK_DIMS / 8>(keys, 0, 0);
        float factor[2] = {decay * (unit[0] * scale[0].inverse),
                           decay * (unit[1] * scale[1].inverse)};
        unit[0] = scale[0].scale, unit[1] = scale[1].scale;
#pragma unroll
        for (int n = 0; n < KEY_TILES; n++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                s[n][i] *= factor[i >> 1];
            }
        }
#pragma unroll
        for (int part = 0; part < parts; part++) {
            int next = part + 1;
            if (next < parts) {
                rights[next & 1].load_depths<CHUNK_DIMS / 8>(keys, next / 2 * 16,
                                                             next % 2 * TOKEN_TILES);
            }
            rights[part & 1].add(s, r[part / 2], part % 2 * TOKEN_TILES);
        }
    }

    __device__ __forceinline__ void run_chunk(const chunk_stage &stage, team_memory &team,
                                              team_barriers &barriers, int32_t c)
    {
        int32_t lane = lane_index(), pair = (lane & 3) * 2;
        const chunk_head &head = stage.head;
        uint32_t keys = shared_address(stage.keys.k);
        float x[TOKEN_TILES][4], r[TOKEN_TILES][4];
        row_scale of_state[2], scale[2];
        multiply_keys(keys, team, barriers, c, of_state, x);
        barrier_wait_for(barriers.values_there[c & 1], c >> 1);
#pragma unroll
        for (int n = 0; n < TOKEN_TILES; n++) {
            float4 v = team.values[c & 1][n][value_place(n, lane)];
            float2 beta = *(const float2 *)&head.beta[n * 8 + pair];
            float2 decay = *(const float2 *)&head.from_start[n * 8 + pair];
            x[n][0] = beta.x * fmaf(-decay.x * of_state[0].scale, x[n][0], v.x);
            x[n][1] = beta.y * fmaf(-decay.y * of_state[0].scale, x[n][1], v.y);
            x[n][2] = beta.x * fmaf(-decay.x * of_state[1].scale, x[n][2], v.z);
            x[n][3] = beta.y * fmaf(-decay.y * of_state[1].scale, x[n][3], v.w);
        }
        barrier_give(barriers.values_free[c & 1]);
        multiply_inverse(shared_address(head.inverse), x, of_state, scale, r);
        barrier_wait_for(barriers.change_free, c + 1);
        uint32_t left[TOKEN_STEPS][4];
#pragma unroll
        for (int step = 0; step < TOKEN_STEPS; step++) {
            pack_whole(left[step], r[2 * step], r[2 * step + 1]);
            team.change[step][lane] =
                make_uint4(left[step][0], left[step][1], left[step][2], left[step][3]);
        }
        team.change_scale[lane] = make_float2(scale[0].scale, scale[1].scale);
        barrier_give(barriers.change_there);
#pragma unroll
        for (int n = 0; n < TOKEN_TILES; n++) {
            float2 decay = *(const float2 *)&head.to_end[n * 8 + pair];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                r[n][i] *= i & 1 ? decay.y : decay.x;
            }
        }
#pragma unroll
        for (int step = 0; step < TOKEN_STEPS; step++) {
            pack_whole(left[step], r[2 * step], r[2 * step + 1]);
        }
        add_keys(keys, left, scale, head.from_start[CHUNK - 1]);
    }
};

/* Two numbers of a row of out, of which `real` are there. */
static __device__ __noinline__ void store_singly(char *to, uint32_t bits, int32_t real)
{
    if (real > 0) {
        *(uint16_t *)to = (uint16_t)bits;
    }
    if (real > 1) {
        *(uint16_t *)(to + 2) = (uint16_t)(bits >> 16);
    }
}

/* Outputs of a chunk, [row of S, token] in sums, to rows of tokens. */
static __device__ __forceinline__ void store_outputs(const sm80_delta_params &a,
                                                     const walk_item &item, int32_t first,
                                                     const float (&o)[TOKEN_TILES][4])
{
    int32_t lane = lane_index(), d = item.first_row + (lane & 3) * 2;
    bool whole = a.wide_out && first + CHUNK <= item.request.num_tokens &&
                 item.first_row + GROUP_ROWS <= a.p.head_size_v;
    char *to = a.p.out.data +
               (int64_t)(item.request.first_row + first + (lane >> 2)) * a.p.out.row +
               item.head * a.p.out.head + d * 2;
    int32_t tokens = item.request.num_tokens - first - (lane >> 2);
    uint32_t bits[TOKEN_TILES][2];
#pragma unroll
    for (int n = 0; n < TOKEN_TILES; n++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            bits[n][half] = pack2<KIND_BF16>(o[n][2 * half], o[n][2 * half + 1]);
            asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %0;" : "+r"(bits[n][half]));
        }
    }
    if (whole) {
#pragma unroll
        for (int n = 0; n < TOKEN_TILES; n++) {
            *(uint32_t *)(to + n * 8 * a.p.out.row) = bits[n][0];
            *(uint32_t *)(to + n * 8 * a.p.out.row + 16) = bits[n][1];
        }
        return;
    }
#pragma unroll
    for (int n = 0; n < TOKEN_TILES; n++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int32_t real = n * 8 < tokens ? a.p.head_size_v - d - half * 8 : 0;
            store_singly(to + n * 8 * a.p.out.row + half * 16, bits[n][half], real);
        }
    }
}

static __device__ __forceinline__ void make_outputs(const sm80_delta_params &a,
                                                    const walk_item &item, const chunk_stage &stage,
                                                    team_memory &team, team_barriers &barriers,
                                                    int32_t c)
{
    int32_t lane = lane_index(), pair = (lane & 3) * 2;
    uint32_t queries = shared_address(stage.keys.q), scores = shared_address(stage.head.scores);
    float o[TOKEN_TILES][4], r[TOKEN_TILES][4];
    token_rights rights[2];
    clear(o);
    clear(r);
    rights[0].load_rows<CHUNK_DIMS / 8>(queries, 0);
    barrier_wait_for(barriers.state_there, c);
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
    barrier_give(barriers.state_free);
    rights[0].load_rows<CHUNK / 8>(scores, 0);
    barrier_wait_for(barriers.change_there, c);
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
    barrier_give(barriers.change_free);
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
    store_outputs(a, item, c * CHUNK, o);
}

/* A chunk's part from memory, by all lanes of the warp. */
static __device__ __forceinline__ void copy_part(void *to, const void *from, int32_t bytes,
                                                 const uint64_t &barrier)
{
#if __CUDA_ARCH__ >= 900
    if (lane_index() == 0) {
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], "
                     "[%1], %2, [%3];" ::"r"(shared_address(to)),
                     "l"(from), "r"(bytes), "r"(shared_address(&barrier))
                     : "memory");
    }
#else
    for (int32_t i = lane_index() * 16; i < bytes; i += GPU_LANES * 16) {
        copy16(shared_address(to) + i, (const char *)from + i, 16);
    }
#endif
}

template <int TEAMS>
static __device__ __forceinline__ void copy_chunk(const sm80_delta_params &a, const walk_item &item,
                                                  int32_t c, walk_memory<TEAMS> &m)
{
    if (c >= item.num_chunks) {
        return;
    }
    chunk_stage &stage = m.stages[c % a.stages];
    const uint64_t &there = m.there[c % a.stages];
    barrier_wait_for(m.free[c % a.stages], c / a.stages + 1);
    const gpu_delta_params &p = a.p;
    const char *chunk = a.memory + (item.first_chunk + c) * a.chunk_bytes;
    const chunk_head *heads =
        (const chunk_head *)(chunk + p.num_k_heads * (int64_t)sizeof(chunk_keys));
    int32_t key_head = item.head / (p.num_v_heads / p.num_k_heads);
#if __CUDA_ARCH__ >= 900
    if (lane_index() == 0) {
        asm volatile("{.reg .b64 s; mbarrier.arrive.expect_tx.shared.b64 s, [%0], %1;}" ::"r"(
                         shared_address(&there)),
                     "r"((int)sizeof(chunk_stage))
                     : "memory");
    }
#endif
    copy_part(&stage.keys, &((const chunk_keys *)chunk)[key_head], sizeof stage.keys, there);
    copy_part(&stage.head, &heads[item.head], sizeof stage.head, there);
#if __CUDA_ARCH__ < 900
    barrier_arrive_copies(shared_address(&there));
#endif
}

/* Values of a team's rows behind the convolution, chunk by chunk; a lane has two rows' of a quarter
 * of the tokens. The first team's warp copies for all, one stage behind the values. */
template <int TEAMS>
static __device__ __forceinline__ void make_values(const sm80_delta_params &a,
                                                   const walk_item &item, walk_memory<TEAMS> &m,
                                                   int32_t of_teams)
{
    team_memory &team = m.teams[of_teams];
    team_barriers &barriers = m.barriers[of_teams];
    const gpu_delta_params &p = a.p;
    constexpr int loads = VALUE_TOKENS + CHUNK_TAPS - 1;
    int32_t lane = lane_index(), row = (lane & 7) * 2, quarter = lane >> 3;
    int32_t begin = quarter * VALUE_TOKENS;
    int64_t keys = (int64_t)p.num_k_heads * p.head_size_k;
    for (int32_t c = 0; of_teams == 0 && c < a.stages - 1; c++) {
        copy_chunk(a, item, c, m);
    }
    delta_source<2> source(p, item.request, p.v, item.head,
                           2 * keys + (int64_t)item.head * p.head_size_v, p.head_size_v,
                           item.first_row + row);
    delta_taps<2> taps;
    uint32_t raw[loads][1];
    taps.load(p, source);
    source.load<loads>(begin - (CHUNK_TAPS - 1), a.wide_values, raw);
    for (int32_t c = 0; c < item.num_chunks; c++) {
        barrier_wait_for(barriers.values_free[c & 1], (c >> 1) + 1);
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
#pragma unroll
                for (int of_two = 0; of_two < 2; of_two++) {
                    bool real = c * CHUNK + begin + i + k < item.request.num_tokens;
                    float value = taps.of(x[of_two], of_two);
                    y[of_two][k] = real && of_two < source.real ? value : 0.0f;
                }
            }
            int32_t tile = quarter * 2 + i / 8;
#pragma unroll
            for (int of_two = 0; of_two < 2; of_two++) {
                int32_t reader = (row + of_two) % 8 * 4 + i % 8 / 2;
                float *to = (float *)&team.values[c & 1][tile][value_place(tile, reader)];
                *(float2 *)(to + (row + of_two) / 8 * 2) = make_float2(y[of_two][0], y[of_two][1]);
            }
        }
        barrier_give(barriers.values_there[c & 1]);
        if (c + 1 < item.num_chunks) {
            source.load<loads>((c + 1) * CHUNK + begin - (CHUNK_TAPS - 1), a.wide_values, raw);
        }
        if (of_teams == 0) {
            copy_chunk(a, item, c + a.stages - 1, m);
        }
    }
}

template <int TEAMS> static __device__ void init_barriers(walk_memory<TEAMS> &m)
{
    if (thread_index() == 0) {
        for (int32_t i = 0; i < MOST_STAGES; i++) {
#if __CUDA_ARCH__ >= 900
            barrier_init(shared_address(&m.there[i]), 1);
#else
            barrier_init(shared_address(&m.there[i]), GPU_LANES);
#endif
            barrier_init(shared_address(&m.free[i]), 2 * TEAMS * GPU_LANES);
        }
        for (int32_t team = 0; team < TEAMS; team++) {
            uint64_t *all = (uint64_t *)&m.barriers[team];
            for (size_t i = 0; i < sizeof(team_barriers) / sizeof *all; i++) {
                barrier_init(shared_address(&all[i]), GPU_LANES);
            }
        }
#if __CUDA_ARCH__ >= 900
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
    }
    sync_group();
}

template <int TEAMS>
static __global__ void __launch_bounds__(walk_roles<TEAMS>::threads)
    delta_walk(const __grid_constant__ sm80_delta_params a)
{
    using roles = walk_roles<TEAMS>;
    extern __shared__ __align__(16) char memory[];
    walk_memory<TEAMS> &m = *(walk_memory<TEAMS> *)memory;
    const gpu_delta_params &p = a.p;
    int32_t slice = (int32_t)blockIdx.x % a.slices, rest = (int32_t)blockIdx.x / a.slices;
    int32_t r = rest / p.num_v_heads, warp = warp_index();
    walk_item item;
    item.head = rest % p.num_v_heads;
    item.first_chunk = p.query_start[r] / a.tokens_apart + r * a.requests_apart;
    if (!enter_request(p, r, item.request) || !goes_in_chunks(p, item.request)) {
        return;
    }
    item.num_chunks = (item.request.num_tokens + CHUNK - 1) / CHUNK;
    if (item.first_chunk + item.num_chunks > a.num_chunks) {
        return;
    }
    init_barriers(m);
    int32_t team = warp % TEAMS;
    team = warp >= roles::values ? warp - roles::values : team;
    item.first_row = (slice * TEAMS + team) * GROUP_ROWS;
    if (warp >= roles::values) {
        make_values(a, item, m, team);
    } else if (warp < roles::outputs) {
        delta_chain chain;
        chain.load(a, item);
        for (int32_t c = 0; c < item.num_chunks; c++) {
            int32_t stage = c % a.stages;
            barrier_wait_for(m.there[stage], c / a.stages);
            chain.run_chunk(m.stages[stage], m.teams[team], m.barriers[team], c);
            barrier_give(m.free[stage]);
        }
        chain.store(a, item);
    } else if (warp < 2 * TEAMS) {
        for (int32_t c = 0; c < item.num_chunks; c++) {
            int32_t stage = c % a.stages;
            barrier_wait_for(m.there[stage], c / a.stages);
            make_outputs(a, item, m.stages[stage], m.teams[team], m.barriers[team], c);
            barrier_give(m.free[stage]);
        }
    }
}

#endif
