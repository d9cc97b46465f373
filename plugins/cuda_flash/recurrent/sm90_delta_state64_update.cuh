/* SPDX-License-Identifier: Apache-2.0 */
/* The warp group that updates 64 rows of S over a request's chunks, see sm90_delta_state64.cuh. */
#ifndef CUDA_FLASH_SM90_DELTA_STATE64_UPDATE_CUH
#define CUDA_FLASH_SM90_DELTA_STATE64_UPDATE_CUH

#include "cuda_flash/ptx/sm90_copy.cuh"
#include "cuda_flash/ptx/sm90_wgmma.cuh"
#include "sm80_delta_state.cuh"

#define STATE64_TEAMS 4 /* warps of a warp group, each with GROUP_ROWS rows of S */
#define STATE64_GROUPS 4
#define STATE64_THREADS (STATE64_GROUPS * STATE64_TEAMS * GPU_LANES)
#define STATE64_STAGES 3
/* Elements stay below 2^MOST_BITS of their unit; f16 ends at 2^16. The unit is kept until the bound
 * falls below 2^LEAST_BITS of it. */
#define MOST_BITS 15
#define LEAST_BITS 10
#define CHOSEN_BITS 14
#define NORM_OF_LARGEST 11.3138f /* sqrt(CHUNK_DIMS) */
#define BOUND_CHUNKS 8           /* chunks between measurements of all of S */

typedef state_memory<STATE64_TEAMS> state64_memory;

/* The item of one team of a CTA. */
GPU_INLINE state_item item_of_team(const state_item &of_all, int32_t team)
{
    state_item item = of_all;
    item.first_row += team * GROUP_ROWS;
    return item;
}

/* A stage of the ring and the number of completed rounds. */
struct ring_place {
    int32_t stage;
    uint32_t round;

    __device__ __forceinline__ void advance()
    {
        bool wraps = stage == STATE64_STAGES - 1;
        stage = wraps ? 0 : stage + 1;
        round += wraps;
    }
};

GPU_INLINE void multiply_step(float (&sums)[CHUNK / 2], const uint32_t (&left)[4], uint64_t keys,
                              int step)
{
    wgmma_rs_bk<KIND_F16, CHUNK>(sums, left, keys + step / 4 * (CHUNK * 128 >> 4) + step % 4 * 2,
                                 step > 0);
}

/* sums = left k^T for all keys or queries of a chunk. */
GPU_INLINE void multiply_dims(float (&sums)[CHUNK / 2], const uint32_t (&left)[KEY_STEPS][4],
                              uint64_t keys)
{
    pin(sums);
    wgmma_begin();
#pragma unroll
    for (int step = 0; step < KEY_STEPS; step++) {
        multiply_step(sums, left[step], keys, step);
    }
    wgmma_commit();
}

/* The biased exponent of a float. */
GPU_INLINE int32_t exponent_of(float x)
{
    return (int32_t)(float_bits(x) >> 23 & 255);
}

GPU_INLINE float power_of(int32_t exponent)
{
    return bits_float((uint32_t)exponent << 23);
}

/* The unit of a row that is bounded by `bound`; `unit` is kept while it fits. The state cannot
 * overflow: next to a unit 2^100 times larger, it becomes 0. */
GPU_INLINE float next_unit(float unit, float bound)
{
    int32_t now = exponent_of(unit), wanted = exponent_of(bound) + 1;
    int32_t chosen = min(max(max(wanted - CHOSEN_BITS, 20), now - 100), 240);
    bool keeps = wanted - now <= MOST_BITS && wanted - now >= LEAST_BITS;
    return power_of(keeps ? now : chosen);
}

/* As state_rows, with a bound that units are chosen from. */
struct state64_rows : state_rows {
    float norm[2]; /* upper bound of the row's norm, without a delta of its elements */

    /* Computes the largest element of each row. */
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

    __device__ __forceinline__ void load(const sm80_delta_params &a, const state_item &item)
    {
        float largest[2];
        state_rows::load(a, item);
        find_largest(largest);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            norm[half] = largest[half] * NORM_OF_LARGEST;
            unit[half] = scale_of(norm[half], CHOSEN_BITS - 1).scale;
        }
        multiply(inverse_of(unit[0]), inverse_of(unit[1]));
    }

    /* Chooses the unit of the chunk from its largest values; true if a unit changes. */
    __device__ __forceinline__ bool choose_units(const float (&of_values)[2], float (&next)[2])
    {
        bool is_new = false;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float bound = fmaf((float)(CHUNK + 1), of_values[half], norm[half]);
            next[half] = next_unit(unit[half], bound);
            is_new |= next[half] != unit[half];
        }
        return is_new;
    }

    /* Bounds |S| after the chunk; measuring S itself is tighter than adding bounds. */
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
            if (step % 2 == 1) { /* multiplies the first two while packing the next */
                wgmma_begin();
                multiply_step(x, left[step - 1], keys, step - 1);
                multiply_step(x, left[step], keys, step);
            }
        }
        wgmma_commit();
        publish_state(left, team, barriers, c);
        barrier_wait_for(barriers.values_full[c & 1], c >> 1);
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
        barrier_give(barriers.values_empty[c & 1]);
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
#pragma unroll
        for (int i = 0; i < CHUNK / 2; i++) { /* Y, in units of `next` */
            x[i] = fmaf(i & 1 ? -decay[i / 4].y : -decay[i / 4].x, x[i], v[i]);
        }
        multiply_inverse(x, inverse);
        multiply(past, past); /* while the product with the inverse runs */
#pragma unroll
        for (int n = 0; n < TOKEN_TILES; n++) {
            decay[n] = *(const float2 *)&head.to_end[n * 8 + pair];
        }
        wgmma_wait<0>();
        pin(x);
        add_keys(x, decay, depths);
        publish_change(x, team, barriers, c);
        wgmma_wait<0>();
        pin(s);
    }

    /* The same for rules without a delta, whose R are values times factors. */
    __device__ __forceinline__ void add_chunk(const chunk_stage &stage, team_memory &team,
                                              team_barriers &barriers, int32_t c, uint64_t depths)
    {
        int32_t lane = lane_index(), pair = (lane & 3) * 2;
        const chunk_head &head = stage.head;
        float r[CHUNK / 2], next[2];
        float2 decay[TOKEN_TILES];
        uint32_t left[KEY_STEPS][4];
#pragma unroll
        for (int step = 0; step < KEY_STEPS; step++) {
            pack_sums(left[step], s, step);
        }
        publish_state(left, team, barriers, c);
        barrier_wait_for(barriers.values_full[c & 1], c >> 1);
        float most = head.factors.most[0], past = head.from_start[CHUNK - 1];
        const float of_values[2] = {team.largest[c & 1][lane >> 2] * most,
                                    team.largest[c & 1][(lane >> 2) + 8] * most};
        choose_units(of_values, next);
        bound_rows(c, of_values, past);
        float inverses[2] = {inverse_of(next[0]), inverse_of(next[1])};
        multiply(past * (unit[0] * inverses[0]), past * (unit[1] * inverses[1]));
        unit[0] = next[0], unit[1] = next[1];
#pragma unroll
        for (int n = 0; n < TOKEN_TILES; n++) {
            float4 four = team.values[c & 1][n][value_place(n, lane)];
            float2 factor = *(const float2 *)&head.factors.value[n * 8 + pair];
            r[4 * n] = four.x * factor.x * inverses[0];
            r[4 * n + 1] = four.y * factor.y * inverses[0];
            r[4 * n + 2] = four.z * factor.x * inverses[1];
            r[4 * n + 3] = four.w * factor.y * inverses[1];
            decay[n] = *(const float2 *)&head.to_end[n * 8 + pair];
        }
        barrier_give(barriers.values_empty[c & 1]);
        add_keys(r, decay, depths);
        publish_change(r, team, barriers, c);
        wgmma_wait<0>();
        pin(s);
    }

    /* Publishes the state before chunk c, packed. */
    __device__ __forceinline__ void publish_state(const uint32_t (&left)[KEY_STEPS][4],
                                                  team_memory &team, team_barriers &barriers,
                                                  int32_t c) const
    {
        int32_t lane = lane_index();
        barrier_wait_for(barriers.state_empty, c + 1);
#pragma unroll
        for (int step = 0; step < KEY_STEPS; step++) {
            team.state[step][lane] =
                make_uint4(left[step][0], left[step][1], left[step][2], left[step][3]);
        }
        team.state_scale[lane] = make_float2(unit[0], unit[1]);
        barrier_give(barriers.state_full);
    }

    /* R = Y T^T, in place of Y. */
    GPU_INLINE void multiply_inverse(float (&y)[CHUNK / 2], uint64_t inverse)
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
            wgmma_rs<KIND_F16, CHUNK>(y, left[step], inverse + step * (16 * 128 >> 4), step > 0);
        }
        wgmma_commit();
    }

    /* Starts S += R K with the decays of R up to the chunk's end. */
    __device__ __forceinline__ void add_keys(const float (&r)[CHUNK / 2],
                                             const float2 (&decay)[TOKEN_TILES], uint64_t depths)
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
        pin(s);
        wgmma_begin();
#pragma unroll
        for (int step = 0; step < TOKEN_STEPS; step++) {
            wgmma_rs<KIND_F16, CHUNK_DIMS>(s, left[step], depths + step * (16 * 128 >> 4));
        }
        wgmma_commit();
    }

    __device__ __forceinline__ void publish_change(const float (&r)[CHUNK / 2], team_memory &team,
                                                   team_barriers &barriers, int32_t c) const
    {
        int32_t lane = lane_index();
        barrier_wait_for(barriers.change_empty, c + 1);
#pragma unroll
        for (int step = 0; step < TOKEN_STEPS; step++) {
            uint32_t left[4];
            pack_sums(left, r, step);
            team.change[step][lane] = make_uint4(left[0], left[1], left[2], left[3]);
        }
        team.change_scale[lane] = make_float2(unit[0], unit[1]);
        barrier_give(barriers.change_full);
    }
};

#endif
