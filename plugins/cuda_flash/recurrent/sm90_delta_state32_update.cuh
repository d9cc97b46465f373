/* SPDX-License-Identifier: Apache-2.0 */
/* The warp group that walks: 32 rows of S, transposed, through a request's chunks, see
 * sm90_delta_state32.cuh. */
#ifndef CUDA_FLASH_SM90_DELTA_STATE32_UPDATE_CUH
#define CUDA_FLASH_SM90_DELTA_STATE32_UPDATE_CUH

#include "sm90_delta_state64.cuh"

#define NARROW_ROWS 32   /* of S */
#define NARROW_PARTS 7   /* of the ring: in turn what the walk and what the outputs need */
#define NARROW_CLUSTER 2 /* CTAs that copy for each other, at most */
#define NARROW_THREADS WIDE_THREADS      /* groups: walk, outputs, values, single warps */
#define NARROW_SUMS (NARROW_ROWS / 2)    /* of a lane: of 64 rows */
#define NARROW_COLUMNS (NARROW_ROWS / 4) /* of a lane: rows of S, which lie together */
#define NARROW_TOKENS 8                  /* of a lane that convolves */
#define NARROW_LARGEST (NARROW_ROWS + 8) /* stored without conflicts of banks */
#define NARROW_AHEAD 3                   /* chunks from values to inputs that the L2 asks for */

/* Half of a chunk: k, the inverse and decays, or q, scores and decays. */
struct alignas(1024) narrow_part {
    uint16_t tall[CHUNK][CHUNK_DIMS];
    uint16_t square[CHUNK][CHUNK];
    float from_start[CHUNK], to_end[CHUNK];
};
#define DECAY_BYTES ((int)(2 * CHUNK * sizeof(float)))
#define PART_BYTES ((int)(CHUNK * (CHUNK_DIMS + CHUNK) * sizeof(uint16_t)) + DECAY_BYTES)
static_assert(offsetof(chunk_head, to_end) == offsetof(chunk_head, from_start) + DECAY_BYTES / 2,
              "decays are copied as one");
static_assert(DECAY_BYTES % (16 * NARROW_CLUSTER) == 0, "shares of a copy");

/* A right side: a row of 64 numbers for each row of S, as place16 has them. */
typedef uint16_t narrow_operand[NARROW_ROWS][CHUNK];
/* In a matrix_at: from a part, half of its tall matrix, an operand to the next. */
#define PART_PLACES ((uint32_t)sizeof(narrow_part) >> 4)
#define HALF_PLACES (CHUNK * 128 >> 4)
#define OPERAND_PLACES ((uint32_t)sizeof(narrow_operand) >> 4)

struct narrow_memory {
    narrow_part parts[NARROW_PARTS];
    alignas(1024) narrow_operand state[2][2]; /* of every other chunk: S^T, its halves of a key */
    alignas(1024) narrow_operand differences, change, update; /* Y, R, and R with decays */
    /* as sums [token, row] have them, see narrow_place; tiles of sums, then warps */
    float4 values[2][NARROW_COLUMNS / 2][4][GPU_LANES];
    float largest[2][GPU_LANES / 4][NARROW_LARGEST]; /* of rows' values, by eights of tokens */
    float inverse[2][NARROW_ROWS];                   /* of every other chunk's units */
    float ratio[2][NARROW_ROWS];                     /* of the unit before to a chunk's */
    float unit[4][NARROW_ROWS];                      /* of every fourth chunk */
    uint32_t is_new[2];                              /* a unit is */
    float look[4][NARROW_ROWS]; /* the largest of S, by each walking warp, in its units */
    uint64_t there[NARROW_PARTS], free[NARROW_PARTS];
    uint64_t values_there[2], values_free[2], units_there[2], state_there[2], look_there;
    uint64_t change_there, change_free;
};

/* A part of the ring and how often it has been round. */
struct part_place {
    int32_t part;
    uint32_t round;

    __device__ __forceinline__ void advance(int32_t by)
    {
        part += by;
        bool wraps = part >= NARROW_PARTS;
        part -= wraps ? NARROW_PARTS : 0;
        round += wraps;
    }
};

/* The row of S, of the CTA's, that sum i of a lane is of. */
static __device__ __forceinline__ int32_t row_of_sum(int32_t i)
{
    return (lane_index() & 3) * NARROW_COLUMNS + (i >> 2) * 2 + (i & 1);
}

/* Where a lane's four values of a tile of sums stand: those that one instruction writes, of four
 * tiles and two warps' tokens, in different banks. */
static __device__ __forceinline__ int32_t narrow_place(int32_t tile, int32_t warp, int32_t lane)
{
    return lane ^ (tile | (warp & 1) << 2);
}

/* Where a warp says that it is done with every other part, from `first` on, to the copying warp of
 * one of the cluster's CTAs. The address stays in its register: one that an arrival at another CTA
 * reads is not free to be written for hundreds of clocks. */
struct part_giver {
    uint32_t at;

    __device__ __forceinline__ part_giver(narrow_memory &m, int32_t first)
    {
        uint32_t rank = min((uint32_t)lane_index(), cluster_size() - 1);
        at = remote_address(shared_address(&m.free[first]), rank) + NARROW_PARTS * 8 - 16;
    }

    /* Before the give of each, some time behind the one before. */
    __device__ __forceinline__ void advance(int32_t part)
    {
        at += part >= 2 ? 16 : 16 - NARROW_PARTS * 8;
    }

    __device__ __forceinline__ void give() const
    {
        sync_lanes();
        if (lane_index() < (int32_t)cluster_size()) {
            barrier_arrive_remote(at);
        }
    }
};

/* Sums of 64 rows as a right side that is 64 deep: 16 of a warp. */
static __device__ __forceinline__ void store_operand(uint32_t to, const float (&x)[NARROW_SUMS])
{
    int32_t lane = lane_index(), row = (lane & 7) + (lane >> 4) * 8;
    uint32_t at = to + place16<8>(row, (warp_index() & 3) * 2 + (lane >> 3 & 1));
#pragma unroll
    for (int i = 0; i < NARROW_SUMS; i += 8) {
        const uint32_t four[4] = {
            pack2<KIND_F16>(x[i], x[i + 1]), pack2<KIND_F16>(x[i + 2], x[i + 3]),
            pack2<KIND_F16>(x[i + 4], x[i + 5]), pack2<KIND_F16>(x[i + 6], x[i + 7])};
        store4_transposed(at + i * 2 * 128, four);
    }
}

/* d = left right, or with `adds` d += left right, 64 deep. TURNED: rows of left are the depth. */
template <bool TURNED>
static __device__ __forceinline__ void multiply_64(float (&d)[NARROW_SUMS], uint64_t left,
                                                   uint64_t right, int adds)
{
#pragma unroll
    for (int step = 0; step < TOKEN_STEPS; step++) {
        wgmma_few<KIND_F16, NARROW_ROWS, TURNED>(d, left + step * (TURNED ? 128 : 2),
                                                 right + step * 2, adds | step);
    }
}

/* S^T: a lane has rows lane / 4 and that + 8 of its warp's 16 of each half of a key, columns as
 * row_of_sum has them. */
struct narrow_rows {
    float s[2][NARROW_SUMS], x[NARROW_SUMS]; /* x: X, then R */

    static __device__ __forceinline__ int32_t key_of_sum(int32_t half, int32_t i)
    {
        return half * CHUNK + (warp_index() & 3) * 16 + (lane_index() >> 2) + (i >> 1 & 1) * 8;
    }

    /* The largest number of each row of S, for those who choose units. Of a lane's columns it
     * keeps half each time that it takes another lane's. */
    __device__ __forceinline__ void store_largest(narrow_memory &m) const
    {
        int32_t lane = lane_index();
        float most[NARROW_COLUMNS];
#pragma unroll
        for (int k = 0; k < NARROW_COLUMNS; k++) {
            int i = (k >> 1) * 4 + (k & 1);
            most[k] = fmaxf(fmaxf(fabsf(s[0][i]), fabsf(s[0][i + 2])),
                            fmaxf(fabsf(s[1][i]), fabsf(s[1][i + 2])));
        }
#pragma unroll
        for (int half = NARROW_COLUMNS / 2; half > 0; half /= 2) {
            bool keeps_last = (lane & half * 4) != 0;
#pragma unroll
            for (int k = 0; k < half; k++) {
                float given = keeps_last ? most[k] : most[k + half];
                float kept = keeps_last ? most[k + half] : most[k];
                most[k] = fmaxf(kept, lane_xor(given, half * 4));
            }
        }
        m.look[warp_index() & 3][row_of_sum(0) + (lane >> 2)] = most[0];
    }

    /* What a chunk has of each of the lane's columns. */
    static __device__ __forceinline__ void read_columns(const float (&of_rows)[NARROW_ROWS],
                                                        float (&x)[NARROW_COLUMNS])
    {
#pragma unroll
        for (int k = 0; k < NARROW_COLUMNS; k += 4) {
            float4 four = *(const float4 *)&of_rows[row_of_sum(0) + k];
            x[k] = four.x, x[k + 1] = four.y, x[k + 2] = four.z, x[k + 3] = four.w;
        }
    }

    static __device__ __forceinline__ void multiply_columns(float (&x)[NARROW_SUMS],
                                                            const float (&of_rows)[NARROW_ROWS])
    {
        float by[NARROW_COLUMNS];
        read_columns(of_rows, by);
#pragma unroll
        for (int i = 0; i < NARROW_SUMS; i++) {
            x[i] *= by[(i >> 2) * 2 + (i & 1)];
        }
    }

    /* S as it is before the first chunk, in its units. */
    __device__ __forceinline__ void load(const sm80_delta_params &a, const walk_item &item,
                                         narrow_memory &m)
    {
        int32_t dims = a.p.head_size_k;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            clear_sums(s[half]);
            if (item.request.has_state) {
#pragma unroll
                for (int i = 0; i < NARROW_SUMS; i++) {
                    int32_t row = min(item.first_row + row_of_sum(i), a.p.head_size_v - 1);
                    const float *from = state_row(a.p, item.request.state_from, item.head, row);
                    s[half][i] = from[min(key_of_sum(half, i), dims - 1)];
                }
#pragma unroll
                for (int i = 0; i < NARROW_SUMS; i++) {
                    s[half][i] = key_of_sum(half, i) < dims ? s[half][i] : 0.0f;
                }
            }
        }
        store_largest(m);
        barrier_give(m.look_there);
        barrier_wait_for(m.units_there[0], 0);
        multiply_columns(s[0], m.ratio[0]);
        multiply_columns(s[1], m.ratio[0]);
    }

    /* unit: of S's rows. */
    __device__ __forceinline__ void store(const sm80_delta_params &a, const walk_item &item,
                                          int32_t slot, const float (&unit)[NARROW_ROWS]) const
    {
#pragma unroll
        for (int i = 0; i < NARROW_SUMS; i++) {
            int32_t row = item.first_row + row_of_sum(i);
            float of_row = unit[row_of_sum(i)];
            float *to = state_row(a.p, slot, item.head, row);
#pragma unroll
            for (int half = 0; half < 2; half++) {
                if (row < a.p.head_size_v && key_of_sum(half, i) < a.p.head_size_k) {
                    to[key_of_sum(half, i)] = s[half][i] * of_row;
                }
            }
        }
    }

    /* Packs S for chunk c. */
    __device__ __forceinline__ void store_half(narrow_memory &m, int32_t c, int32_t half) const
    {
        store_operand(shared_address(m.state[c & 1][half]), s[half]);
    }

    /* The lane's values of chunk c, in its units. */
    static __device__ __forceinline__ void load_values(const narrow_memory &m, int32_t c,
                                                       float (&v)[NARROW_SUMS])
    {
        int32_t lane = lane_index(), warp = warp_index() & 3;
#pragma unroll
        for (int tile = 0; tile < NARROW_COLUMNS / 2; tile++) {
            float4 four = m.values[c & 1][tile][warp][narrow_place(tile, warp, lane)];
            v[4 * tile] = four.x, v[4 * tile + 1] = four.y;
            v[4 * tile + 2] = four.z, v[4 * tile + 3] = four.w;
        }
        multiply_columns(v, m.inverse[c & 1]);
    }

    /* X = K S^T of chunk c, begun. part: its left sides. */
    __device__ __forceinline__ void multiply_keys(int32_t c, uint64_t part, uint64_t state)
    {
        state = matrix_again(state, (c & 1) * 2 * OPERAND_PLACES);
        pin(x);
        wgmma_begin();
        multiply_64<false>(x, part, state, 0);
        multiply_64<false>(x, part + HALF_PLACES, state + OPERAND_PLACES, 1);
        wgmma_commit();
    }

    /* From X that is begun to the next chunk's; behind the last, that is in vain. P R of the chunk
     * before and Q S^T are let go where they run while this group stores. */
    __device__ __forceinline__ void run_chunk(narrow_memory &m, int32_t c, bool is_last,
                                              part_place &place, part_giver &giver, uint64_t parts,
                                              uint64_t state, uint64_t differences)
    {
        int32_t row = (warp_index() & 3) * 16 + (lane_index() >> 2);
        const narrow_part &part = m.parts[place.part];
        float v[NARROW_SUMS];
        float decays[2] = {part.from_start[row], part.from_start[row + 8]};
        float to_end[2] = {part.to_end[row], part.to_end[row + 8]};
        float past = part.from_start[CHUNK - 1];
        load_values(m, c, v);
        if (c % BOUND_CHUNKS == BOUND_CHUNKS - 1) {
            store_largest(m);
        }
        barrier_give(m.values_free[c & 1]);
        if (c > 0) {
            barrier_give(m.change_there); /* of the chunk before */
        }
        wgmma_wait<0>();
        pin(x);
#pragma unroll
        for (int i = 0; i < NARROW_SUMS; i++) {
            x[i] = fmaf(-decays[i >> 1 & 1], x[i], v[i]);
        }
        store_operand(shared_address(m.differences), x);
        fence_for_boxes();
        barrier_group(1);

        uint64_t left = matrix_again(parts, place.part * PART_PLACES);
        differences = matrix_again(differences);
        pin(x);
        wgmma_begin();
        multiply_64<true>(x, left + 2 * HALF_PLACES, differences, 0);
        wgmma_commit();
        giver.advance(place.part);
        barrier_give(m.state_there[c & 1]);
        part_place next = place;
        next.advance(2);
        if (!is_last) {
            barrier_wait_for(m.there[next.part], (int32_t)next.round);
        }
        wgmma_wait<0>();
        pin(x);
#pragma unroll
        for (int i = 0; i < NARROW_SUMS; i++) {
            v[i] = to_end[i >> 1 & 1] * x[i];
        }
        store_operand(shared_address(m.update), v);
        fence_for_boxes();
#pragma unroll
        for (int i = 0; i < NARROW_SUMS; i++) { /* while the fence waits */
            s[0][i] *= past, s[1][i] *= past;
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
        barrier_wait_for(m.change_free, c + 1); /* and what chunk c - 1 had of S^T */
        store_operand(shared_address(m.change), x);
        bool is_new = false; /* S is to be in units of the next chunk */
        if (!is_last) {
            barrier_wait_for(m.units_there[(c + 1) & 1], (c + 1) >> 1);
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
        fence_for_boxes();
        barrier_group(1);

        multiply_keys(c + 1, matrix_again(parts, next.part * PART_PLACES), state);
        if (is_last) {
            barrier_give(m.change_there);
        }
        giver.give();
        place = next;
    }
};

#endif
