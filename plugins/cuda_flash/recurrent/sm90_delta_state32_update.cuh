/* SPDX-License-Identifier: Apache-2.0 */
/* The warp group that updates 32 rows of S, transposed, over a request's chunks, see
 * sm90_delta_state32.cuh. */
#ifndef CUDA_FLASH_SM90_DELTA_STATE32_UPDATE_CUH
#define CUDA_FLASH_SM90_DELTA_STATE32_UPDATE_CUH

#include "sm90_delta_segments.cuh"
#include "sm90_delta_state64.cuh"

#define STATE32_ROWS 32   /* rows of S */
#define STATE32_PARTS 7   /* parts in the ring; the state and output groups use them alternately */
#define STATE32_CLUSTER 2 /* CTAs that copy for each other, at most */
#define STATE32_THREADS STATE64_THREADS    /* warp groups: state, outputs, values, single warps */
#define STATE32_SUMS (STATE32_ROWS / 2)    /* accumulators of a lane for 64 rows */
#define STATE32_COLUMNS (STATE32_ROWS / 4) /* adjacent rows of S that a lane has */
#define STATE32_TOKENS 8                   /* tokens of a lane in the convolution */
#define STATE32_LARGEST (STATE32_ROWS + 8) /* padded against bank conflicts */
#define STATE32_AHEAD 3                    /* chunks from the values to the L2 prefetch */

/* A part of a chunk: k, inverse and decays, or q, scores and decays. Gates per channel have a third
 * between them, the keys decayed to the chunk's end; each channel's decay over the chunk replaces
 * the decays of its tokens. */
struct alignas(1024) chunk_part {
    uint16_t tall[CHUNK][CHUNK_DIMS];
    uint16_t square[CHUNK][CHUNK];
    float from_start[CHUNK], to_end[CHUNK];
};
#define DECAY_BYTES ((int)(2 * CHUNK * sizeof(float)))
/* The parts of a chunk. */
template <bool CHANNELS> constexpr int parts_of_chunk = CHANNELS ? 3 : 2;
#define PART_BYTES ((int)(CHUNK * (CHUNK_DIMS + CHUNK) * sizeof(uint16_t)) + DECAY_BYTES)
static_assert(offsetof(chunk_head, to_end) == offsetof(chunk_head, from_start) + DECAY_BYTES / 2,
              "decays are copied as one");
static_assert(DECAY_BYTES % (16 * STATE32_CLUSTER) == 0, "shares of a copy");

/* A right operand: a row of 64 elements for each row of S, in the layout of place16. */
typedef uint16_t state32_operand[STATE32_ROWS][CHUNK];
/* Distances in descriptors: between parts, between the halves of a tall matrix, between operands.
 */
#define PART_PLACES ((uint32_t)sizeof(chunk_part) >> 4)
#define HALF_PLACES (CHUNK * 128 >> 4)
#define OPERAND_PLACES ((uint32_t)sizeof(state32_operand) >> 4)

struct state32_memory {
    chunk_part parts[STATE32_PARTS];
    alignas(1024) state32_operand state[2][2]; /* S^T by chunk parity and half of the key dims */
    alignas(1024) state32_operand differences, change, update; /* Y, R, and R with decays */
    /* In the layout of accumulators [token, row], see state32_place; by tile, then warp. */
    float4 values[2][STATE32_COLUMNS / 2][4][GPU_LANES];
    /* the largest values of rows, by eights of tokens */
    float largest[2][GPU_LANES / 4][STATE32_LARGEST];
    float inverse[2][STATE32_ROWS];   /* 1 / unit, by chunk parity */
    float ratio[2][STATE32_ROWS];     /* the previous unit over the chunk's */
    float unit[4][STATE32_ROWS];      /* by chunk modulo 4 */
    uint32_t is_new[2];               /* whether a unit changes */
    float state_max[4][STATE32_ROWS]; /* the largest elements of S by warp, in S's units */
    uint64_t full[STATE32_PARTS], empty[STATE32_PARTS];
    uint64_t values_full[2], values_empty[2], units_ready[2], state_full[2], state_max_ready;
    uint64_t change_full, change_empty;
};

/* A part of the ring and the number of completed rounds. */
struct part_place {
    int32_t part;
    uint32_t round;

    __device__ __forceinline__ void advance(int32_t by)
    {
        part += by;
        bool wraps = part >= STATE32_PARTS;
        part -= wraps ? STATE32_PARTS : 0;
        round += wraps;
    }
};

/* The row of S, counted from the CTA's first, of a lane's accumulator i. */
GPU_INLINE int32_t row_of_sum(int32_t i)
{
    return (lane_index() & 3) * STATE32_COLUMNS + (i >> 2) * 2 + (i & 1);
}

/* The position of a lane's four values of a tile. One instruction's writes, of four tiles and two
 * warps' tokens, use different banks. */
GPU_INLINE int32_t state32_place(int32_t tile, int32_t warp, int32_t lane)
{
    return lane ^ (tile | (warp & 1) << 2);
}

/* Releases one part of each chunk, the first one being `first`, of PARTS, to the copying warps of
 * all CTAs of the cluster. The address stays in its register: after a remote arrival a register
 * that it reads cannot be written for hundreds of clocks. */
template <int PARTS> struct part_giver {
    uint32_t at;

    __device__ __forceinline__ part_giver(state32_memory &m, int32_t first)
    {
        uint32_t rank = min((uint32_t)lane_index(), cluster_size() - 1);
        at = remote_address(shared_address(&m.empty[first]), rank) + (STATE32_PARTS - PARTS) * 8;
    }

    /* Call before each give, some time after the previous one. */
    __device__ __forceinline__ void advance(int32_t part)
    {
        at += part >= PARTS ? PARTS * 8 : (PARTS - STATE32_PARTS) * 8;
    }

    __device__ __forceinline__ void give() const
    {
        sync_lanes();
        if (lane_index() < (int32_t)cluster_size()) {
            barrier_arrive_remote(at);
        }
    }
};

/* Stores accumulators of 64 rows, 16 of each warp, as a right operand with a reduction of 64. */
GPU_INLINE void store_operand(uint32_t to, const float (&x)[STATE32_SUMS])
{
    int32_t lane = lane_index(), row = (lane & 7) + (lane >> 4) * 8;
    uint32_t at = to + place16<8>(row, (warp_index() & 3) * 2 + (lane >> 3 & 1));
#pragma unroll
    for (int i = 0; i < STATE32_SUMS; i += 8) {
        const uint32_t four[4] = {
            pack2<KIND_F16>(x[i], x[i + 1]), pack2<KIND_F16>(x[i + 2], x[i + 3]),
            pack2<KIND_F16>(x[i + 4], x[i + 5]), pack2<KIND_F16>(x[i + 6], x[i + 7])};
        store4_transposed(at + i * 2 * 128, four);
    }
}

/* d = left right, or d += left right with `adds`, with a reduction of 64. TRANSPOSED: rows of left
 * are the reduction. */
template <bool TRANSPOSED>
GPU_INLINE void multiply_64(float (&d)[STATE32_SUMS], uint64_t left, uint64_t right, int adds)
{
#pragma unroll
    for (int step = 0; step < TOKEN_STEPS; step++) {
        wgmma_ss_small_n<KIND_F16, STATE32_ROWS, TRANSPOSED>(
            d, left + step * (TRANSPOSED ? 128 : 2), right + step * 2, adds | step);
    }
}

/* S^T: a lane has rows lane / 4 and that + 8 of its warp's 16 in each half of the key dims; columns
 * as in row_of_sum. */
struct state32_rows {
    float s[2][STATE32_SUMS], x[STATE32_SUMS]; /* x: X, then Y, then R */

    GPU_INLINE int32_t key_of_sum(int32_t half, int32_t i)
    {
        return half * CHUNK + (warp_index() & 3) * 16 + (lane_index() >> 2) + (i >> 1 & 1) * 8;
    }

    /* Computes the largest element of each row of S for choose_units32. In each exchange with
     * another lane, a lane keeps half of its columns. */
    __device__ __forceinline__ void store_largest(state32_memory &m) const
    {
        int32_t lane = lane_index();
        float most[STATE32_COLUMNS];
#pragma unroll
        for (int k = 0; k < STATE32_COLUMNS; k++) {
            int i = (k >> 1) * 4 + (k & 1);
            most[k] = fmaxf(fmaxf(fabsf(s[0][i]), fabsf(s[0][i + 2])),
                            fmaxf(fabsf(s[1][i]), fabsf(s[1][i + 2])));
        }
#pragma unroll
        for (int half = STATE32_COLUMNS / 2; half > 0; half /= 2) {
            bool keeps_last = (lane & half * 4) != 0;
#pragma unroll
            for (int k = 0; k < half; k++) {
                float given = keeps_last ? most[k] : most[k + half];
                float kept = keeps_last ? most[k + half] : most[k];
                most[k] = fmaxf(kept, lane_xor(given, half * 4));
            }
        }
        m.state_max[warp_index() & 3][row_of_sum(0) + (lane >> 2)] = most[0];
    }

    /* Reads a chunk's numbers for the lane's columns. */
    GPU_INLINE void read_columns(const float (&of_rows)[STATE32_ROWS], float (&x)[STATE32_COLUMNS])
    {
#pragma unroll
        for (int k = 0; k < STATE32_COLUMNS; k += 4) {
            float4 four = *(const float4 *)&of_rows[row_of_sum(0) + k];
            x[k] = four.x, x[k + 1] = four.y, x[k + 2] = four.z, x[k + 3] = four.w;
        }
    }

    GPU_INLINE void multiply_columns(float (&x)[STATE32_SUMS], const float (&of_rows)[STATE32_ROWS])
    {
        float by[STATE32_COLUMNS];
        read_columns(of_rows, by);
#pragma unroll
        for (int i = 0; i < STATE32_SUMS; i++) {
            x[i] *= by[(i >> 2) * 2 + (i & 1)];
        }
    }

    /* Loads S before the first chunk and converts it to its units. */
    __device__ __forceinline__ void load(const sm80_delta_params &a, const segment_item &item,
                                         state32_memory &m)
    {
        int32_t dims = a.p.head_size_k;
        if (item.from != nullptr) {
            wait_for_earlier_kernels();
        }
#pragma unroll
        for (int half = 0; half < 2; half++) {
            clear_sums(s[half]);
            if (item.from != nullptr || item.is_map) {
#pragma unroll
                for (int i = 0; i < STATE32_SUMS; i++) {
                    int32_t row = item.first_row + row_of_sum(i), d = key_of_sum(half, i);
                    s[half][i] = item.is_map ? (row == d ? 1.0f : 0.0f) : (*item.from)[row][d];
                }
            } else if (item.request.has_state) {
#pragma unroll
                for (int i = 0; i < STATE32_SUMS; i++) {
                    int32_t row = min(item.first_row + row_of_sum(i), a.p.head_size_v - 1);
                    const char *from = state_bytes_at(a.p, item.request.state_from, item.head, row);
                    s[half][i] = load_state(a.p, from, min(key_of_sum(half, i), dims - 1));
                }
#pragma unroll
                for (int i = 0; i < STATE32_SUMS; i++) {
                    s[half][i] = key_of_sum(half, i) < dims ? s[half][i] : 0.0f;
                }
            }
        }
        store_largest(m);
        barrier_give(m.state_max_ready);
        barrier_wait_for(m.units_ready[0], 0);
        multiply_columns(s[0], m.ratio[0]);
        multiply_columns(s[1], m.ratio[0]);
    }

    /* `unit` has the units of S's rows. States of 16 bits go on as they were stored; `done` of the
     * step's tokens are in it. SEEDED: a seed may round them. */
    template <bool SEEDED>
    __device__ __forceinline__ void store(const sm80_delta_params &a, const state_item &item,
                                          int32_t slot, int32_t done,
                                          const float (&unit)[STATE32_ROWS])
    {
        int32_t first = item.head * a.p.head_size_v, tokens = item.request.context + done;
#pragma unroll
        for (int i = 0; i < STATE32_SUMS; i++) {
            int32_t row = item.first_row + row_of_sum(i);
            float of_row = unit[row_of_sum(i)];
            char *to = state_bytes_at(a.p, slot, item.head, row);
#pragma unroll
            for (int half = 0; half < 2; half++) {
                if (row < a.p.head_size_v && key_of_sum(half, i) < a.p.head_size_k) {
                    float x = store_state<SEEDED>(a.p, to, first + row, key_of_sum(half, i), tokens,
                                                  s[half][i] * of_row);
                    s[half][i] = x * inverse_of(of_row);
                }
            }
        }
    }

    /* Stores the end of a segment's piece. */
    __device__ __forceinline__ void store_end(const segment_item &item, int32_t piece,
                                              const float (&unit)[STATE32_ROWS]) const
    {
#pragma unroll
        for (int i = 0; i < STATE32_SUMS; i++) {
            float of_row = unit[row_of_sum(i)];
            float *to = item.to[ENDS_APART * piece][item.first_row + row_of_sum(i)];
            to[key_of_sum(0, i)] = s[0][i] * of_row;
            to[key_of_sum(1, i)] = s[1][i] * of_row;
        }
    }

    /* Packs S for chunk c. */
    __device__ __forceinline__ void store_half(state32_memory &m, int32_t c, int32_t half) const
    {
        store_operand(shared_address(m.state[c & 1][half]), s[half]);
    }

    /* Loads the lane's values of chunk c, in its units. */
    GPU_INLINE void load_values(const state32_memory &m, int32_t c, float (&v)[STATE32_SUMS])
    {
        int32_t lane = lane_index(), warp = warp_index() & 3;
#pragma unroll
        for (int tile = 0; tile < STATE32_COLUMNS / 2; tile++) {
            float4 four = m.values[c & 1][tile][warp][state32_place(tile, warp, lane)];
            v[4 * tile] = four.x, v[4 * tile + 1] = four.y;
            v[4 * tile + 2] = four.z, v[4 * tile + 3] = four.w;
        }
        multiply_columns(v, m.inverse[c & 1]);
    }

    /* Starts X = K S^T of chunk c; `part` has the left operands. */
    __device__ __forceinline__ void multiply_keys(int32_t c, uint64_t part, uint64_t state)
    {
        state = descriptor_again(state, (c & 1) * 2 * OPERAND_PLACES);
        pin(x);
        wgmma_begin();
        multiply_64<false>(x, part, state, 0);
        multiply_64<false>(x, part + HALF_PLACES, state + OPERAND_PLACES, 1);
        wgmma_commit();
    }

    /* Runs one chunk, from its X (already started) to the start of the next chunk's X, which is not
     * used after the last. The output group's P R of the previous chunk and Q S^T are released at
     * points where they overlap this group's stores. */
    template <bool CHANNELS, int PARTS>
    __device__ __forceinline__ void run_chunk(state32_memory &m, int32_t c, bool is_last,
                                              part_place &place, part_giver<PARTS> &giver,
                                              part_giver<PARTS> &of_ends, uint64_t parts,
                                              uint64_t state, uint64_t differences)
    {
        int32_t row = (warp_index() & 3) * 16 + (lane_index() >> 2);
        const chunk_part &part = m.parts[place.part];
        float v[STATE32_SUMS];
        float decays[2] = {part.from_start[row], part.from_start[row + 8]};
        float to_end[2] = {part.to_end[row], part.to_end[row + 8]};
        float past = part.from_start[CHUNK - 1], pasts[2][2];
        part_place ends = place;
        ends.advance(1);
        load_values(m, c, v);
        if (c % BOUND_CHUNKS == BOUND_CHUNKS - 1) {
            store_largest(m);
        }
        barrier_give(m.values_empty[c & 1]);
        if (c > 0) {
            barrier_give(m.change_full); /* R of the previous chunk is ready */
        }
        wgmma_wait<0>();
        pin(x);
#pragma unroll
        for (int i = 0; i < STATE32_SUMS; i++) {
            x[i] = fmaf(-decays[i >> 1 & 1], x[i], v[i]);
        }
        store_operand(shared_address(m.differences), x);
        fence_async_proxy();
        barrier_group(1);

        uint64_t left = descriptor_again(parts, place.part * PART_PLACES);
        differences = descriptor_again(differences);
        pin(x);
        wgmma_begin();
        multiply_64<true>(x, left + 2 * HALF_PLACES, differences, 0);
        wgmma_commit();
        giver.advance(place.part);
        barrier_give(m.state_full[c & 1]);
        part_place next = place;
        next.advance(PARTS);
        if (!is_last) {
            barrier_wait_for(m.full[next.part], (int32_t)next.round);
        }
        wgmma_wait<0>();
        pin(x);
#pragma unroll
        for (int i = 0; i < STATE32_SUMS; i++) {
            v[i] = CHANNELS ? x[i] : to_end[i >> 1 & 1] * x[i];
        }
        store_operand(shared_address(m.update), v);
        fence_async_proxy();
        if constexpr (CHANNELS) {
            of_ends.advance(ends.part);
            barrier_wait_for(m.full[ends.part], (int32_t)ends.round);
            left = descriptor_again(parts, ends.part * PART_PLACES);
#pragma unroll
            for (int half = 0; half < 2; half++) { /* from_start and to_end as one array */
                const float *of_half =
                    half ? m.parts[ends.part].to_end : m.parts[ends.part].from_start;
                pasts[half][0] = of_half[row], pasts[half][1] = of_half[row + 8];
            }
        }
#pragma unroll
        for (int i = 0; i < STATE32_SUMS; i++) { /* while the fence completes */
            s[0][i] *= CHANNELS ? pasts[0][i >> 1 & 1] : past;
            s[1][i] *= CHANNELS ? pasts[1][i >> 1 & 1] : past;
        }
        barrier_group(1);

        pin(s[0]);
        pin(s[1]);
        wgmma_begin();
#pragma unroll
        for (int half = 0; half < 2; half++) {
            multiply_64<true>(s[half], left + half * HALF_PLACES, differences + 2 * OPERAND_PLACES,
                              1);
            wgmma_commit();
        }
        /* the output group has read R and S^T of chunk c - 1 */
        barrier_wait_for(m.change_empty, c + 1);
        store_operand(shared_address(m.change), x);
        bool is_new = false; /* S must change to the units of the next chunk */
        if (!is_last) {
            barrier_wait_for(m.units_ready[(c + 1) & 1], (c + 1) >> 1);
            is_new = any_lane(m.is_new[(c + 1) & 1] != 0);
        }
        wgmma_wait<1>();
        pin(s[0]);
        if (is_new) {
            multiply_columns(s[0], m.ratio[(c + 1) & 1]);
        }
        store_half(m, c + 1, 0);
        wgmma_wait<0>();
        pin(s[1]);
        if (is_new) {
            multiply_columns(s[1], m.ratio[(c + 1) & 1]);
        }
        store_half(m, c + 1, 1);
        fence_async_proxy();
        barrier_group(1);

        multiply_keys(c + 1, descriptor_again(parts, next.part * PART_PLACES), state);
        if (is_last) {
            barrier_give(m.change_full);
        }
        giver.give();
        if constexpr (CHANNELS) {
            of_ends.give();
        }
        place = next;
    }
};

#endif
