/* SPDX-License-Identifier: Apache-2.0 */
/* The states through a request's chunks, transposed, 32 rows of S of a value head in a CTA: for
 * so few requests that each multiprocessor has at most one of these. What is prepared of a chunk
 * is the left side of all products, 64 rows; columns are rows of S. Sums are packed and stored to
 * shared memory, where they are the right side of the next product, for all groups.
 *     X = K S^T;  Y = V - decay X;  R = T Y;  S^T <- decay S^T + K^T R    by a warp group
 *     O = decay Q S^T + P R                                               by another
 * A third makes the values. Of the rest a warp copies, of two CTAs of a head each half of all for
 * both, a warp chooses units, and a warp asks the L2 for inputs. A chunk of a CTA has 2.1 MFLOP,
 * 512 clocks of the matrix units. 50 KB are copied, 64 KB of left and 32 KB of right sides read,
 * 36 KB of sums and values stored and 16 KB of them read again: 1,450 clocks of shared memory.
 * Units of S, Y and R are those of wide_rows. A chunk's are chosen while the one before it is
 * walked, so that S is in them before it is packed.
 */
#ifndef CUDA_FLASH_SM90_DELTA_STATE32_CUH
#define CUDA_FLASH_SM90_DELTA_STATE32_CUH

#include "sm90_delta_state32_update.cuh"

/* Outputs of a chunk to rows of tokens: a lane has eight neighbouring numbers of two. */
static __device__ __forceinline__ void store_narrow_outputs(const sm80_delta_params &a,
                                                            const walk_item &item, int32_t c,
                                                            bool is_wide,
                                                            const float (&o)[NARROW_SUMS])
{
    int32_t d = item.first_row + row_of_sum(0);
    int32_t t = c * CHUNK + (warp_index() & 3) * 16 + (lane_index() >> 2);
    char *to = a.p.out.data + (int64_t)(item.request.first_row + t) * a.p.out.row +
               item.head * a.p.out.head + d * 2;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        uint32_t bits[NARROW_COLUMNS / 2];
#pragma unroll
        for (int k = 0; k < NARROW_COLUMNS / 2; k++) {
            bits[k] = pack2<KIND_BF16>(o[4 * k + 2 * half], o[4 * k + 2 * half + 1]);
        }
        bool is_there = t + half * 8 < item.request.num_tokens;
        if (is_wide) {
            if (is_there) {
                *(uint4 *)to = make_uint4(bits[0], bits[1], bits[2], bits[3]);
            }
        } else {
#pragma unroll
            for (int k = 0; k < NARROW_COLUMNS / 2; k++) {
                store_singly(to + k * 4, bits[k], is_there ? a.p.head_size_v - d - 2 * k : 0);
            }
        }
        to += 8 * a.p.out.row;
    }
}

static __device__ __forceinline__ void make_narrow_outputs(const sm80_delta_params &a,
                                                           const walk_item &kept, narrow_memory &m,
                                                           part_giver giver)
{
    int32_t row = (warp_index() & 3) * 16 + (lane_index() >> 2), num_chunks = kept.num_chunks;
    uint64_t parts = matrix_at(shared_address(m.parts[0].tall), 0, 1024);
    uint64_t state = matrix_at(shared_address(m.state), 0, 1024);
    uint64_t change = matrix_at(shared_address(m.change), 0, 1024);
    uint64_t out = (uint64_t)(uintptr_t)a.p.out.data | (uint64_t)a.p.out.row | a.p.out.head;
    bool is_wide = out % 16 == 0 && kept.first_row + NARROW_ROWS <= a.p.head_size_v;
    part_place place = {1, 0};
    for (int32_t c = 0; c < num_chunks; c++, place.advance(2)) {
        const narrow_part &part = m.parts[place.part];
        float o[NARROW_SUMS], scales[NARROW_COLUMNS];
        barrier_wait_for(m.there[place.part], (int32_t)place.round);
        float decays[2] = {part.from_start[row], part.from_start[row + 8]};
        barrier_wait_for(m.state_there[c & 1], c >> 1);
        uint64_t left = matrix_again(parts, place.part * PART_PLACES);
        uint64_t right = matrix_again(state, (c & 1) * 2 * OPERAND_PLACES);
        pin(o);
        wgmma_begin();
        multiply_64<false>(o, left, right, 0);
        multiply_64<false>(o, left + HALF_PLACES, right + OPERAND_PLACES, 1);
        wgmma_commit();
        narrow_rows::read_columns(m.unit[c & 3], scales);
        wgmma_wait<0>();
        pin(o);
#pragma unroll
        for (int i = 0; i < NARROW_SUMS; i++) {
            o[i] *= decays[i >> 1 & 1];
        }
        barrier_wait_for(m.change_there, c);
        giver.advance(place.part);
        right = matrix_again(change);
        pin(o);
        wgmma_begin();
        multiply_64<false>(o, left + 2 * HALF_PLACES, right, 1);
        wgmma_commit();
        wgmma_wait<0>();
        pin(o);
        barrier_give(m.change_free);
        giver.give();
#pragma unroll
        for (int i = 0; i < NARROW_SUMS; i++) {
            o[i] *= scales[(i >> 2) * 2 + (i & 1)] * a.p.scale;
        }
        store_narrow_outputs(a, kept, c, is_wide, o);
    }
}

/* Units of S's rows, one of a lane, chunk by chunk, by one warp; see wide_rows. */
static __device__ __forceinline__ void choose_narrow_units(const walk_item &kept, narrow_memory &m)
{
    int32_t row = lane_index(), num_chunks = kept.num_chunks;
    part_place place = {0, 0};
    float unit = 0.0f, norm = 0.0f;                /* at least |S| */
    float past = 0.0f, added = 0.0f;               /* of the chunk before */
    float past_before = 0.0f, added_before = 0.0f; /* of the one before that */
    barrier_wait_for(m.look_there, 0);
    for (int32_t c = 0; c < num_chunks; c++) {
        if (c > 0) { /* the walk has not given it back: it waits for these units before */
            barrier_wait_for(m.there[place.part], (int32_t)place.round);
            past_before = past;
            past = m.parts[place.part].from_start[CHUNK - 1];
            place.advance(2);
        }
        barrier_wait_for(m.values_there[c & 1], c >> 1);
        float most = 0.0f;
#pragma unroll
        for (int i = 0; i < GPU_LANES / 4; i++) {
            most = fmaxf(most, m.largest[c & 1][i][row]);
        }
        norm = fmaf(past, norm, added);
        if (c == 0 || (c > 1 && (c - 2) % BOUND_CHUNKS == BOUND_CHUNKS - 1)) {
            float seen = fmaxf(fmaxf(m.look[0][row], m.look[1][row]),
                               fmaxf(m.look[2][row], m.look[3][row])) *
                         NORM_OF_LARGEST;
            if (c == 0) {
                norm = seen;
                unit = scale_of(norm, CHOSEN_BITS - 1).scale;
            } else { /* before the chunk before the last, in its units */
                seen = fmaf(past_before, seen * m.unit[(c - 2) & 3][row], added_before);
                norm = fminf(norm, fmaf(past, seen, added));
            }
        }
        float bound = fmaf((float)(CHUNK + 1), most, norm);
        int32_t now = exponent_of(unit), wanted = exponent_of(bound) + 1;
        int32_t chosen = min(max(max(wanted - CHOSEN_BITS, 20), now - 100), 240);
        bool keeps = wanted - now <= MOST_BITS && wanted - now >= LEAST_BITS;
        float next = power_of(keeps ? now : chosen), inverse = inverse_of(next);
        bool is_new = any_lane(next != unit);
        m.unit[c & 3][row] = next;
        m.inverse[c & 1][row] = inverse;
        m.ratio[c & 1][row] = c == 0 ? inverse : unit * inverse;
        if (row == 0) {
            m.is_new[c & 1] = is_new;
        }
        barrier_give(m.units_there[c & 1]);
        unit = next, added_before = added, added = CHUNK * most;
    }
}

/* A chunk's values of eight rows, of a warp, and the largest of each: a lane has two rows' of eight
 * tokens. */
template <bool ARE_USUAL, int LOADS>
static __device__ __forceinline__ void store_narrow_values(const delta_taps<2> &taps,
                                                           const uint32_t (&raw)[LOADS][1],
                                                           narrow_memory &m, int32_t of_two)
{
    int32_t lane = lane_index(), tile = lane & 3, eight = lane >> 2, of_lane = warp_index() & 3;
    int32_t warp = eight >> 1, half = eight & 1, row = of_lane * NARROW_COLUMNS + tile * 2;
    float y[2][NARROW_TOKENS], most[2] = {0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < NARROW_TOKENS; i++) {
        float x[2][CHUNK_TAPS];
#pragma unroll
        for (int j = 0; j < CHUNK_TAPS; j++) {
            float2 two = two_floats<KIND_BF16>(raw[i + j][0]);
            x[0][j] = two.x, x[1][j] = two.y;
        }
        y[0][i] = taps.of<ARE_USUAL>(x[0], 0);
        y[1][i] = taps.of<ARE_USUAL>(x[1], 1);
    }
#pragma unroll
    for (int i = 0; i < NARROW_TOKENS; i++) {
        int32_t at = narrow_place(tile, warp, i * 4 + of_lane);
        float *to = (float *)&m.values[of_two][tile][warp][at] + half * 2;
        *(float2 *)to = make_float2(y[0][i], y[1][i]);
        most[0] = fmaxf(most[0], fabsf(y[0][i])), most[1] = fmaxf(most[1], fabsf(y[1][i]));
    }
    *(float2 *)&m.largest[of_two][eight][row] = make_float2(most[0], most[1]);
}

/* Values of eight rows of S behind the convolution, of a warp, chunk by chunk; inputs of the next
 * are on the way meanwhile. See make_wide_values. */
static __device__ __forceinline__ void make_narrow_values(const sm80_delta_params &a,
                                                          const walk_item &kept, narrow_memory &m)
{
    const gpu_delta_params &p = a.p;
    constexpr int loads = NARROW_TOKENS + CHUNK_TAPS - 1;
    int32_t lane = lane_index(), warp = warp_index() & 3, num_chunks = kept.num_chunks;
    int32_t token = (lane >> 2) * NARROW_TOKENS - (CHUNK_TAPS - 1);
    int32_t first_row = kept.first_row + warp * NARROW_COLUMNS;
    int64_t channel =
        2 * (int64_t)p.num_k_heads * p.head_size_k + (int64_t)kept.head * p.head_size_v;
    delta_source<2> source(p, kept.request, p.v, kept.head, channel, p.head_size_v,
                           first_row + (lane & 3) * 2);
    delta_taps<2> taps;
    uint32_t raw[loads][1], next[loads][1];
    load_inputs(source, token, a.wide_values, raw);
    taps.load(p, source);
    bool are_usual = taps.are_usual();
    for (int32_t c = 0; c < num_chunks; c++) {
        if (c + 1 < num_chunks) {
            load_inputs(source, (c + 1) * CHUNK + token, a.wide_values, next);
        }
        barrier_wait_for(m.values_free[c & 1], (c >> 1) + 1);
        if (are_usual) {
            store_narrow_values<true>(taps, raw, m, c & 1);
        } else {
            store_narrow_values<false>(taps, raw, m, c & 1);
        }
        barrier_give(m.values_there[c & 1]);
#pragma unroll
        for (int i = 0; i < loads; i++) {
            raw[i][0] = next[i][0];
        }
    }
    wait_for_earlier_kernels(); /* they read the windows; a later one waits for this alone */
    if (p.conv_width > 1 && lane < NARROW_COLUMNS && first_row + lane < p.head_size_v) {
        roll_channel(p, kept.request, channel + first_row + lane);
    }
    roll_windows(a, item_of_team(kept, warp), warp, false);
}

/* Asks the L2 for inputs of values that are some chunks ahead, by one warp. */
static __device__ __forceinline__ void fetch_narrow_inputs(const sm80_delta_params &a,
                                                           const walk_item &kept, narrow_memory &m)
{
    const gpu_delta_params &p = a.p;
    int64_t channel =
        2 * (int64_t)p.num_k_heads * p.head_size_k + (int64_t)kept.head * p.head_size_v;
    delta_source<2> source(p, kept.request, p.v, kept.head, channel, p.head_size_v, kept.first_row);
    int32_t half = NARROW_ROWS / 2, of_half = lane_index() & 1, num_chunks = kept.num_chunks;
    bool is_there = kept.first_row + of_half * half < p.head_size_v;
    for (int32_t c = 0; c < num_chunks; c++) {
        barrier_wait_for(m.values_free[c & 1], (c >> 1) + 1);
        for (int32_t i = lane_index() >> 1; i < CHUNK; i += GPU_LANES / 2) {
            int32_t t = (c + NARROW_AHEAD) * CHUNK + i;
            if (is_there && t < kept.request.num_tokens) {
                fetch_line(source.rows + t * source.row + of_half * half * 2);
            }
        }
    }
}

/* All parts, by one warp: this CTA's share of each, for all CTAs of the cluster. */
static __device__ __forceinline__ void copy_narrow_parts(const sm80_delta_params &a,
                                                         const walk_item &kept, narrow_memory &m)
{
    const gpu_delta_params &p = a.p;
    int32_t key_head = kept.head / a.group, num_chunks = kept.num_chunks;
    uint32_t size = cluster_size(), rank = cluster_rank(), ranks = (1u << size) - 1;
    if (a.preparers == 0) {
        wait_for_earlier_kernels(); /* chunks are prepared */
    }
    int32_t num_there = a.preparers > 0 ? 0 : num_chunks;
    const char *chunk = a.memory + kept.first_chunk * a.chunk_bytes;
    part_place place = {0, 0};
    for (int32_t c = 0; c < num_chunks; c++, chunk += a.chunk_bytes) {
        if (c >= num_there) {
            num_there = wait_for_chunk(a, kept, c);
        }
        const chunk_keys &keys = ((const chunk_keys *)chunk)[key_head];
        const chunk_head &head =
            ((const chunk_head *)&((const chunk_keys *)chunk)[p.num_k_heads])[kept.head];
        for (int32_t of_outputs = 0; of_outputs < 2; of_outputs++, place.advance(1)) {
            barrier_wait_cluster(shared_address(&m.free[place.part]),
                                 ((int32_t)place.round + 1) & 1);
            if (lane_index() == 0) {
                narrow_part &to = m.parts[place.part];
                uint32_t there = shared_address(&m.there[place.part]);
                const char *tall = (const char *)(of_outputs ? keys.q : keys.k);
                const char *square = (const char *)(of_outputs ? head.scores : head.inverse);
                uint32_t bytes = sizeof to.tall / size;
                barrier_arrive_expect(there, PART_BYTES);
                copy_span_to_all(shared_address(to.tall) + rank * bytes, tall + rank * bytes,
                                 (int)bytes, there, ranks);
                bytes = sizeof to.square / size;
                copy_span_to_all(shared_address(to.square) + rank * bytes, square + rank * bytes,
                                 (int)bytes, there, ranks);
                bytes = DECAY_BYTES / size;
                copy_span_to_all(shared_address(to.from_start) + rank * bytes,
                                 (const char *)head.from_start + rank * bytes, (int)bytes, there,
                                 ranks);
            }
            sync_lanes();
        }
    }
    wait_for_earlier_kernels(); /* a later one waits for this alone */
}

static __device__ void init_narrow(narrow_memory &m)
{
    constexpr int group = WIDE_TEAMS * GPU_LANES;
    if (thread_index() == 0) {
        for (int32_t i = 0; i < NARROW_PARTS; i++) {
            barrier_init(shared_address(&m.there[i]), 1);
            barrier_init(shared_address(&m.free[i]), WIDE_TEAMS * (int)cluster_size());
        }
        for (int32_t i = 0; i < 2; i++) {
            barrier_init(shared_address(&m.values_there[i]), group);
            barrier_init(shared_address(&m.values_free[i]), group);
            barrier_init(shared_address(&m.units_there[i]), GPU_LANES);
            barrier_init(shared_address(&m.state_there[i]), group);
        }
        barrier_init(shared_address(&m.look_there), group);
        barrier_init(shared_address(&m.change_there), group);
        barrier_init(shared_address(&m.change_free), group);
        fence_barriers();
    }
    sync_cluster();
}

/* KEEPS: states behind chunks may be kept. */
template <bool KEEPS>
static __global__ void __launch_bounds__(NARROW_THREADS, 1)
    delta_walk_narrow(const __grid_constant__ sm80_delta_params a)
{
    extern __shared__ __align__(1024) char narrow_bytes[];
    __shared__ walk_item kept; /* not in registers through the loops */
    narrow_memory &m = *(narrow_memory *)narrow_bytes;
    int32_t role = warp_index() / WIDE_TEAMS;
    walk_item entered;
    if (!enter_walk(a, NARROW_ROWS / GROUP_ROWS, 0, entered)) { /* the whole cluster */
        wait_for_earlier_kernels(); /* a later one waits for this alone */
        return;
    }
    if (thread_index() == 0) {
        kept = entered;
    }
    init_narrow(m);
    if (role == 0) {
        take_registers<168>();
        uint64_t parts = matrix_at(shared_address(m.parts[0].tall), 0, 1024);
        uint64_t state = matrix_at(shared_address(m.state), 0, 1024);
        uint64_t differences = matrix_at(shared_address(m.differences), 0, 1024);
        part_place place = {0, 0};
        part_giver giver(m, 0);
        narrow_rows rows;
        rows.load(a, kept, m);
        rows.store_half(m, 0, 0);
        rows.store_half(m, 0, 1);
        fence_for_boxes();
        barrier_group(1);
        barrier_wait_for(m.there[0], 0);
        rows.multiply_keys(0, parts, state);
        int32_t num_chunks = kept.num_chunks;
        for (int32_t c = 0; c < num_chunks; c++) {
            rows.run_chunk(m, c, c + 1 == num_chunks, place, giver, parts, state, differences);
            if constexpr (KEEPS) {
                int32_t slot = slot_behind(a, kept, c);
                if (slot >= 0) {
                    rows.store(a, kept, slot, m.unit[min(c + 1, num_chunks - 1) & 3]);
                }
            }
        }
        wgmma_wait<0>();
        pin(rows.x);
        rows.store(a, kept, kept.request.slots[0], m.unit[(num_chunks - 1) & 3]);
    } else if (role == 1) {
        give_registers<120>();
        make_narrow_outputs(a, kept, m, part_giver(m, 1));
    } else if (role == 2) {
        give_registers<120>();
        make_narrow_values(a, kept, m);
    } else {
        give_registers<56>();
        if (warp_index() % WIDE_TEAMS == 0) {
            copy_narrow_parts(a, kept, m);
        } else if (warp_index() % WIDE_TEAMS == 1) {
            choose_narrow_units(kept, m);
        } else if (warp_index() % WIDE_TEAMS == 2) {
            fetch_narrow_inputs(a, kept, m);
        }
    }
    sync_cluster(); /* no other CTA copies or arrives here any more */
}

#endif
