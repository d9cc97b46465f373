/* SPDX-License-Identifier: Apache-2.0 */
/* The state kernel with 32 rows of S of a value head for each CTA, transposed: for so few requests
 * that each multiprocessor has at most one such CTA. The prepared matrices of a chunk, 64 rows, are
 * the left operands of all products; the columns are rows of S. Accumulators are packed and stored
 * to shared memory, where they are the right operands of the next products, for all warp groups.
 *     X = K S^T;  Y = V - decay X;  R = T Y;  S^T <- decay S^T + K^T R    one warp group
 *     O = decay Q S^T + P R                                               another one
 * A third makes the values. Single warps copy chunks (two CTAs of a head each copy half of
 * everything for both), choose the units and prefetch inputs to the L2. A chunk of a CTA has 2.1
 * MFLOP, 512 clocks of the tensor cores. 50 KB are copied, 64 KB of left and 32 KB of right
 * operands read, 36 KB of accumulators and values stored and 16 KB of them read back: 1,450 clocks
 * of shared memory. Units of S, Y and R are as in state64_rows. They are chosen one chunk ahead, so
 * that S has its unit before it is packed. */
#ifndef CUDA_FLASH_SM90_DELTA_STATE32_CUH
#define CUDA_FLASH_SM90_DELTA_STATE32_CUH

#include "sm90_delta_state32_update.cuh"

/* Stores a chunk's outputs to rows of tokens; a lane has eight adjacent elements of two tokens. */
GPU_INLINE void store_outputs32(const sm80_delta_params &a, const segment_item &item, int32_t c,
                                bool is_wide, const float (&o)[STATE32_SUMS])
{
    int32_t d = item.first_row + row_of_sum(0);
    int32_t t = (item.begin + c) * CHUNK + (warp_index() & 3) * 16 + (lane_index() >> 2);
    char *to = a.p.out.data + (int64_t)(item.request.first_row + t) * a.p.out.row +
               item.head * a.p.out.head + d * 2;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        uint32_t bits[STATE32_COLUMNS / 2];
#pragma unroll
        for (int k = 0; k < STATE32_COLUMNS / 2; k++) {
            bits[k] = pack2<KIND_BF16>(o[4 * k + 2 * half], o[4 * k + 2 * half + 1]);
        }
        bool is_there = t + half * 8 < item.request.num_tokens;
        if (is_wide) {
            if (is_there) {
                *(uint4 *)to = make_uint4(bits[0], bits[1], bits[2], bits[3]);
            }
        } else {
#pragma unroll
            for (int k = 0; k < STATE32_COLUMNS / 2; k++) {
                store_singly(to + k * 4, bits[k], is_there ? a.p.head_size_v - d - 2 * k : 0);
            }
        }
        to += 8 * a.p.out.row;
    }
}

template <int PARTS>
GPU_INLINE void make_outputs32(const sm80_delta_params &a, const segment_item &shared_item,
                               state32_memory &m, part_giver<PARTS> giver)
{
    int32_t row = (warp_index() & 3) * 16 + (lane_index() >> 2),
            num_chunks = shared_item.num_chunks;
    uint64_t parts = descriptor_at(shared_address(m.parts[0].tall), 0, 1024);
    uint64_t state = descriptor_at(shared_address(m.state), 0, 1024);
    uint64_t change = descriptor_at(shared_address(m.change), 0, 1024);
    uint64_t out = (uint64_t)(uintptr_t)a.p.out.data | (uint64_t)a.p.out.row | a.p.out.head;
    bool is_wide = out % 16 == 0 && shared_item.first_row + STATE32_ROWS <= a.p.head_size_v;
    part_place place = {PARTS - 1, 0};
    for (int32_t c = 0; c < num_chunks; c++, place.advance(PARTS)) {
        const chunk_part &part = m.parts[place.part];
        float o[STATE32_SUMS], scales[STATE32_COLUMNS];
        barrier_wait_for(m.full[place.part], (int32_t)place.round);
        float decays[2] = {part.from_start[row], part.from_start[row + 8]};
        barrier_wait_for(m.state_full[c & 1], c >> 1);
        uint64_t left = descriptor_again(parts, place.part * PART_PLACES);
        uint64_t right = descriptor_again(state, (c & 1) * 2 * OPERAND_PLACES);
        pin(o);
        wgmma_begin();
        multiply_64<false>(o, left, right, 0);
        multiply_64<false>(o, left + HALF_PLACES, right + OPERAND_PLACES, 1);
        wgmma_commit();
        state32_rows::read_columns(m.unit[c & 3], scales);
        wgmma_wait<0>();
        pin(o);
#pragma unroll
        for (int i = 0; i < STATE32_SUMS; i++) {
            o[i] *= decays[i >> 1 & 1];
        }
        barrier_wait_for(m.change_full, c);
        giver.advance(place.part);
        right = descriptor_again(change);
        pin(o);
        wgmma_begin();
        multiply_64<false>(o, left + 2 * HALF_PLACES, right, 1);
        wgmma_commit();
        wgmma_wait<0>();
        pin(o);
        barrier_give(m.change_empty);
        giver.give();
#pragma unroll
        for (int i = 0; i < STATE32_SUMS; i++) {
            o[i] *= scales[(i >> 2) * 2 + (i & 1)] * a.p.scale;
        }
        if (shared_item.has_outputs) {
            store_outputs32(a, shared_item, c, is_wide, o);
        }
    }
}

/* One warp chooses the units of S's rows, one row for each lane, chunk by chunk; see state64_rows.
 */
template <int PARTS>
GPU_INLINE void choose_units32(const state_item &shared_item, state32_memory &m)
{
    int32_t row = lane_index(), num_chunks = shared_item.num_chunks;
    part_place place = {0, 0};
    float unit = 0.0f, norm = 0.0f;                /* norm: upper bound of |S| */
    float past = 0.0f, added = 0.0f;               /* the previous chunk's */
    float past_before = 0.0f, added_before = 0.0f; /* those of the chunk before that */
    barrier_wait_for(m.state_max_ready, 0);
    for (int32_t c = 0; c < num_chunks; c++) {
        /* the part is still held: the state group waits for these units before it releases it */
        if (c > 0) {
            barrier_wait_for(m.full[place.part], (int32_t)place.round);
            past_before = past;
            past = m.parts[place.part].from_start[CHUNK - 1];
            place.advance(PARTS);
        }
        barrier_wait_for(m.values_full[c & 1], c >> 1);
        float most = 0.0f;
#pragma unroll
        for (int i = 0; i < GPU_LANES / 4; i++) {
            most = fmaxf(most, m.largest[c & 1][i][row]);
        }
        norm = fmaf(past, norm, added);
        if (c == 0 || (c > 1 && (c - 2) % BOUND_CHUNKS == BOUND_CHUNKS - 1)) {
            float seen = fmaxf(fmaxf(m.state_max[0][row], m.state_max[1][row]),
                               fmaxf(m.state_max[2][row], m.state_max[3][row])) *
                         NORM_OF_LARGEST;
            if (c == 0) {
                norm = seen;
                unit = scale_of(norm, CHOSEN_BITS - 1).scale;
            } else { /* measured two chunks ago, in the units of that chunk */
                seen = fmaf(past_before, seen * m.unit[(c - 2) & 3][row], added_before);
                norm = fminf(norm, fmaf(past, seen, added));
            }
        }
        float next = next_unit(unit, fmaf((float)(CHUNK + 1), most, norm));
        float inverse = inverse_of(next);
        bool is_new = any_lane(next != unit);
        m.unit[c & 3][row] = next;
        m.inverse[c & 1][row] = inverse;
        m.ratio[c & 1][row] = c == 0 ? inverse : unit * inverse;
        if (row == 0) {
            m.is_new[c & 1] = is_new;
        }
        barrier_give(m.units_ready[c & 1]);
        unit = next, added_before = added, added = CHUNK * most;
    }
}

/* Convolves a chunk's values of a warp's eight rows and computes their largest; a lane has two rows
 * and eight tokens. */
template <int TAPS, int LOADS>
GPU_INLINE void store_values32(const delta_taps<2> &taps, const uint32_t (&raw)[LOADS][1],
                               state32_memory &m, int32_t of_two, bool is_map)
{
    int32_t lane = lane_index(), tile = lane & 3, eight = lane >> 2, of_lane = warp_index() & 3;
    int32_t warp = eight >> 1, half = eight & 1, row = of_lane * STATE32_COLUMNS + tile * 2;
    float y[2][STATE32_TOKENS], most[2] = {0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < STATE32_TOKENS; i++) {
        float x[2][CHUNK_TAPS];
#pragma unroll
        for (int j = 0; j < CHUNK_TAPS; j++) {
            float2 two = two_floats<KIND_BF16>(raw[i + j][0]);
            x[0][j] = two.x, x[1][j] = two.y;
        }
        y[0][i] = is_map ? 0.0f : taps.of<TAPS>(x[0], 0);
        y[1][i] = is_map ? 0.0f : taps.of<TAPS>(x[1], 1);
    }
#pragma unroll
    for (int i = 0; i < STATE32_TOKENS; i++) {
        int32_t at = state32_place(tile, warp, i * 4 + of_lane);
        float *to = (float *)&m.values[of_two][tile][warp][at] + half * 2;
        *(float2 *)to = make_float2(y[0][i], y[1][i]);
        most[0] = fmaxf(most[0], fabsf(y[0][i])), most[1] = fmaxf(most[1], fabsf(y[1][i]));
    }
    *(float2 *)&m.largest[of_two][eight][row] = make_float2(most[0], most[1]);
}

/* The values of a warp's eight rows of S after the convolution, chunk by chunk; inputs of the next
 * chunk are prefetched. See make_values64. */
GPU_INLINE void make_values32(const sm80_delta_params &a, const segment_item &shared_item,
                              state32_memory &m)
{
    const gpu_delta_params &p = a.p;
    constexpr int loads = STATE32_TOKENS + CHUNK_TAPS - 1;
    int32_t lane = lane_index(), warp = warp_index() & 3, num_chunks = shared_item.num_chunks;
    int32_t token = shared_item.begin * CHUNK + (lane >> 2) * STATE32_TOKENS - (CHUNK_TAPS - 1);
    int32_t first_row = shared_item.first_row + warp * STATE32_COLUMNS;
    int64_t channel = p.first_v + (int64_t)shared_item.head * p.head_size_v;
    delta_source<2> source(p, shared_item.request, p.v, shared_item.head, channel, p.head_size_v,
                           first_row + (lane & 3) * 2);
    delta_taps<2> taps;
    uint32_t raw[loads][1], next[loads][1];
    load_inputs(source, token, a.wide_values, raw);
    taps.load(p, source);
    bool are_usual = taps.are_usual(), is_map = shared_item.is_map;
    for (int32_t c = 0; c < num_chunks; c++) {
        if (c + 1 < num_chunks) {
            load_inputs(source, (c + 1) * CHUNK + token, a.wide_values, next);
        }
        barrier_wait_for(m.values_empty[c & 1], (c >> 1) + 1);
        if (are_usual) {
            store_values32<TAPS_USUAL>(taps, raw, m, c & 1, is_map);
        } else {
            store_values32<TAPS_ANY>(taps, raw, m, c & 1, is_map);
        }
        barrier_give(m.values_full[c & 1]);
#pragma unroll
        for (int i = 0; i < loads; i++) {
            raw[i][0] = next[i][0];
        }
    }
    /* the previous kernel reads the windows; the next kernel waits for this one only */
    wait_for_earlier_kernels();
    if (shared_item.begin > 0) {
        return;
    }
    if (p.conv_width > 1 && lane < STATE32_COLUMNS && first_row + lane < p.head_size_v) {
        roll_channel(p, shared_item.request, channel + first_row + lane);
    }
    roll_windows(a, item_of_team(shared_item, warp), warp, false);
}

/* One warp prefetches inputs of values to the L2, STATE32_AHEAD chunks ahead. */
GPU_INLINE void fetch_inputs32(const sm80_delta_params &a, const segment_item &shared_item,
                               state32_memory &m)
{
    const gpu_delta_params &p = a.p;
    int64_t channel = p.first_v + (int64_t)shared_item.head * p.head_size_v;
    delta_source<2> source(p, shared_item.request, p.v, shared_item.head, channel, p.head_size_v,
                           shared_item.first_row);
    int32_t half = STATE32_ROWS / 2, of_half = lane_index() & 1,
            num_chunks = shared_item.num_chunks;
    bool is_there = shared_item.first_row + of_half * half < p.head_size_v;
    for (int32_t c = 0; c < num_chunks; c++) {
        barrier_wait_for(m.values_empty[c & 1], (c >> 1) + 1);
        for (int32_t i = lane_index() >> 1; i < CHUNK; i += GPU_LANES / 2) {
            int32_t t = (shared_item.begin + c + STATE32_AHEAD) * CHUNK + i;
            if (is_there && t < shared_item.request.num_tokens) {
                fetch_line(source.rows + t * source.row + of_half * half * 2);
            }
        }
    }
}

/* One warp copies this CTA's share of all parts, for all CTAs of the cluster. */
template <bool CHANNELS>
GPU_INLINE void copy_parts32(const sm80_delta_params &a, const state_item &shared_item,
                             state32_memory &m)
{
    int32_t key_head = shared_item.head / a.group, num_chunks = shared_item.num_chunks;
    uint32_t size = cluster_size(), rank = cluster_rank(), ranks = (1u << size) - 1;
    if (a.prepare_ctas == 0) {
        wait_for_earlier_kernels(); /* all chunks are prepared */
    }
    int32_t num_prepared = a.prepare_ctas > 0 ? 0 : num_chunks;
    const char *chunk = a.memory + shared_item.first_chunk * a.chunk_bytes;
    part_place place = {0, 0};
    for (int32_t c = 0; c < num_chunks; c++, chunk += a.chunk_bytes) {
        if (c >= num_prepared) {
            num_prepared = wait_for_chunk(a, shared_item, c);
        }
        const chunk_channels &channels = ((const chunk_channels *)chunk)[shared_item.head];
        const chunk_keys &keys = CHANNELS ? channels.keys : ((const chunk_keys *)chunk)[key_head];
        const chunk_head &head = ((const chunk_head *)(chunk + a.heads_at))[shared_item.head];
        for (int32_t i = 0; i < parts_of_chunk<CHANNELS>; i++, place.advance(1)) {
            bool of_outputs = i == parts_of_chunk<CHANNELS> - 1, of_ends = CHANNELS && i == 1;
            barrier_wait_cluster(shared_address(&m.empty[place.part]),
                                 ((int32_t)place.round + 1) & 1);
            if (lane_index() == 0) {
                chunk_part &to = m.parts[place.part];
                uint32_t there = shared_address(&m.full[place.part]);
                const char *tall = (const char *)(of_ends      ? channels.ends
                                                  : of_outputs ? keys.q
                                                               : keys.k);
                const char *decays = (const char *)(of_ends ? channels.past : head.from_start);
                const char *square = (const char *)(of_outputs ? head.scores : head.inverse);
                uint32_t bytes = sizeof to.tall / size;
                barrier_arrive_expect(there, PART_BYTES - (of_ends ? sizeof to.square : 0));
                copy_span_to_all(shared_address(to.tall) + rank * bytes, tall + rank * bytes,
                                 (int)bytes, there, ranks);
                bytes = sizeof to.square / size;
                if (!of_ends) {
                    copy_span_to_all(shared_address(to.square) + rank * bytes,
                                     square + rank * bytes, (int)bytes, there, ranks);
                }
                bytes = DECAY_BYTES / size;
                copy_span_to_all(shared_address(to.from_start) + rank * bytes,
                                 decays + rank * bytes, (int)bytes, there, ranks);
            }
            sync_lanes();
        }
    }
    wait_for_earlier_kernels(); /* the next kernel waits for this one only */
}

static __device__ void init_state32(state32_memory &m)
{
    constexpr int group = STATE64_TEAMS * GPU_LANES;
    if (thread_index() == 0) {
        for (int32_t i = 0; i < STATE32_PARTS; i++) {
            barrier_init(shared_address(&m.full[i]), 1);
            barrier_init(shared_address(&m.empty[i]), STATE64_TEAMS * (int)cluster_size());
        }
        for (int32_t i = 0; i < 2; i++) {
            barrier_init(shared_address(&m.values_full[i]), group);
            barrier_init(shared_address(&m.values_empty[i]), group);
            barrier_init(shared_address(&m.units_ready[i]), GPU_LANES);
            barrier_init(shared_address(&m.state_full[i]), group);
        }
        barrier_init(shared_address(&m.state_max_ready), group);
        barrier_init(shared_address(&m.change_full), group);
        barrier_init(shared_address(&m.change_empty), group);
        fence_barriers();
    }
    sync_cluster();
}

/* KEEPS: writes checkpoints, and states that a seed rounds. CHANNELS: gates per channel. */
template <bool KEEPS, bool CHANNELS>
static __global__ void __launch_bounds__(STATE32_THREADS, 1)
    delta_state32(const __grid_constant__ sm80_delta_params a)
{
    extern __shared__ __align__(1024) char state32_smem[];
    __shared__ segment_item shared_item; /* kept here instead of in registers */
    state32_memory &m = *(state32_memory *)state32_smem;
    constexpr int of_chunk = parts_of_chunk<CHANNELS>;
    int32_t role = warp_index() / STATE64_TEAMS;
    segment_item entered;
    if (!begin_segment(a, STATE32_ROWS / GROUP_ROWS, entered)) { /* true for the whole cluster */
        wait_for_earlier_kernels(); /* the next kernel waits for this one only */
        return;
    }
    if (thread_index() == 0) {
        shared_item = entered;
    }
    init_state32(m);
    if (role == 0) {
        alloc_registers<168>();
        uint64_t parts = descriptor_at(shared_address(m.parts[0].tall), 0, 1024);
        uint64_t state = descriptor_at(shared_address(m.state), 0, 1024);
        uint64_t differences = descriptor_at(shared_address(m.differences), 0, 1024);
        part_place place = {0, 0};
        part_giver<of_chunk> giver(m, 0), of_ends(m, 1);
        state32_rows rows;
        rows.load(a, shared_item, m);
        rows.store_half(m, 0, 0);
        rows.store_half(m, 0, 1);
        fence_async_proxy();
        barrier_group(1);
        barrier_wait_for(m.full[0], 0);
        rows.multiply_keys(0, parts, state);
        int32_t num_chunks = shared_item.num_chunks;
        for (int32_t c = 0, piece = 0; c < num_chunks; piece++) {
            if (c > 0) {
                rows.store_end(shared_item, piece - 1, m.unit[c & 3]);
            }
            for (const int32_t end = shared_item.end_of(a, piece); c < end; c++) {
                rows.run_chunk<CHANNELS>(m, c, c + 1 == num_chunks, place, giver, of_ends, parts,
                                         state, differences);
                if constexpr (KEEPS) {
                    int32_t slot = slot_after(a, shared_item, c);
                    if (slot >= 0) {
                        rows.store<KEEPS>(a, shared_item, slot, (c + 1) * CHUNK,
                                          m.unit[min(c + 1, num_chunks - 1) & 3]);
                    }
                }
            }
        }
        wgmma_wait<0>();
        pin(rows.x);
        const float(&unit)[STATE32_ROWS] = m.unit[(num_chunks - 1) & 3];
        if (shared_item.to != nullptr) {
            rows.store_end(shared_item, shared_item.num_pieces - 1, unit);
        } else {
            rows.store<KEEPS>(a, shared_item, shared_item.request.slots[0],
                              shared_item.request.num_tokens, unit);
        }
    } else if (role == 1) {
        dealloc_registers<120>();
        make_outputs32(a, shared_item, m, part_giver<of_chunk>(m, of_chunk - 1));
    } else if (role == 2) {
        dealloc_registers<120>();
        make_values32(a, shared_item, m);
    } else {
        dealloc_registers<56>();
        if (warp_index() % STATE64_TEAMS == 0) {
            copy_parts32<CHANNELS>(a, shared_item, m);
        } else if (warp_index() % STATE64_TEAMS == 1) {
            choose_units32<of_chunk>(shared_item, m);
        } else if (warp_index() % STATE64_TEAMS == 2) {
            fetch_inputs32(a, shared_item, m);
        }
    }
    sync_cluster(); /* other CTAs no longer copy or arrive here */
}

#endif
