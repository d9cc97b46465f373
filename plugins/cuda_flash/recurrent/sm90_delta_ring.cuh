/* SPDX-License-Identifier: Apache-2.0 */
/* One token of a layer with a ring of inputs (ATTN_CACHE_REPLAY). With S_0 the state in the slot, e
 * the decays of all tokens since, e_j of those after the ring's token j, the step's own included:
 *     S x = S_0 (e x) + sum_j u_j <k_j, e_j x>,  x = k and x = q
 * A step reads S_0 by a bulk copy and the ring's rows, 4 Dv Dk + tokens (2 Dk + 2 Dv) bytes of a
 * head, and makes the products with k_j while the copy runs. Where the state is due,
 *     S = S_0 e + sum_j u_j (e_j k_j)^T + u k^T
 * is made of the rows in shared memory, 4 Dv Dk bytes more. Before a request goes in chunks, S is
 * written without its tokens. Latencies are the limit. */
#ifndef CUDA_FLASH_SM90_DELTA_RING_CUH
#define CUDA_FLASH_SM90_DELTA_RING_CUH

#include "sm90_delta_ring_rows.cuh"

#define RING_PARTS (RING_MOST / STEP_WARPS) /* tokens of a warp */

/* Loads four numbers of every fourth token, from token `first` on, at byte `at` of its row. */
GPU_INLINE void load_parts(const ring_tokens &ring, int32_t first, int32_t at,
                           uint2 (&x)[RING_PARTS])
{
#pragma unroll
    for (int i = 0; i < RING_PARTS; i++) {
        const int32_t age = first + 4 * i;
        x[i] = age < ring.count ? *(const uint2 *)(ring.of(age) + at) : make_uint2(0, 0);
    }
}

/* Makes products and e; a warp takes every fourth token, and keys are its lanes' columns of k_j. */
template <int STATE, int ROWS>
GPU_INLINE void multiply_keys(ring_memory<STATE, ROWS> &m, const ring_tokens &ring,
                              const uint2 (&keys)[RING_PARTS])
{
    const int32_t warp = warp_index(), d = 4 * lane_index();
    float q[4], k[4], sum[4], e[4];
    load_four<KIND_F32>(&m.q[d], q);
    load_four<KIND_F32>(&m.k[d], k);
    load_four<KIND_F32>(&m.gates[d], sum);
    const float of_lane = ring.by_channel ? 0.0f : ring.decay_of_lane(sum[0]);
#pragma unroll
    for (int i = 0; i <= RING_PARTS; i++) {
        const int32_t own = STEP_WARPS * i + warp;
#pragma unroll
        for (int j = -STEP_WARPS; j < 0 && ring.by_channel; j++) {
            if (own + j >= 0 && own + j < ring.count) {
                ring.add_gates(own + j, d, sum);
            }
        }
        const float one = lane_read(of_lane, min(own, ring.count));
#pragma unroll
        for (int c = 0; c < 4; c++) {
            e[c] = ring.by_channel ? expf(sum[c]) : one;
        }
        if (i < RING_PARTS && own < ring.count) {
            float x[4], of_k = 0.0f, of_q = 0.0f;
            load_four<KIND_BF16>(&keys[i], x);
#pragma unroll
            for (int c = 0; c < 4; c++) {
                of_k = fmaf(x[c] * e[c], k[c], of_k);
                of_q = fmaf(x[c] * e[c], q[c], of_q);
            }
            of_k = warp_sum(of_k), of_q = warp_sum(of_q);
            if (lane_index() == 0) {
                m.products[own] = {of_k, of_q, one};
            }
        }
    }
    if (warp == 0) {
        *(float4 *)&m.decay[d] = make_float4(e[0], e[1], e[2], e[3]);
    }
}

/* The first of the four rows whose u a lane has, of every fourth token. */
GPU_INLINE int32_t row_of_lane()
{
    return warp_index() * GPU_LANES + lane_index() % 8 * 4;
}

/* Makes the sums over the ring's tokens. */
template <int STATE, int ROWS>
GPU_INLINE void add_changes(ring_memory<STATE, ROWS> &m, const ring_tokens &ring,
                            const uint2 (&u)[RING_PARTS])
{
    float of_k[4] = {}, of_q[4] = {};
#pragma unroll
    for (int i = 0; i < RING_PARTS; i++) {
        const int32_t age = lane_index() / 8 + 4 * i;
        if (age < ring.count) {
            const ring_product product = m.products[age];
            float x[4];
            load_four<KIND_BF16>(&u[i], x);
#pragma unroll
            for (int r = 0; r < 4; r++) {
                of_k[r] = fmaf(product.k, x[r], of_k[r]);
                of_q[r] = fmaf(product.q, x[r], of_q[r]);
            }
        }
    }
#pragma unroll
    for (int r = 0; r < 4; r++) {
        of_k[r] += lane_xor(of_k[r], 8), of_q[r] += lane_xor(of_q[r], 8);
        of_k[r] += lane_xor(of_k[r], 16), of_q[r] += lane_xor(of_q[r], 16);
        if (lane_index() / 8 == r && row_of_lane() < ROWS) {
            m.read.replayed[row_of_lane() + r] = make_float2(of_k[r], of_q[r]);
        }
    }
}

/* Writes the token's row of the ring. */
template <int STATE, int ROWS>
GPU_INLINE void write_token(const ring_memory<STATE, ROWS> &m, const gpu_ring_params &p,
                            const ring_tokens &ring, int32_t slot, const step_place<ROWS> &at,
                            float k_factor)
{
    const int32_t thread = (int32_t)thread_index();
    const int32_t number = ring.newest + 1 < p.rows ? ring.newest + 1 : 0;
    char *row = p.ring + slot * p.ring_slot + number * p.ring_row + at.key_head * p.ring_head;
    if (thread < at.rows) {
        ((uint16_t *)(row + ring.u))[thread] = (uint16_t)pack2<KIND_BF16>(m.v[thread], 0.0f);
    }
    if (at.rank == 0) {
        ((uint16_t *)row)[thread] = (uint16_t)pack2<KIND_BF16>(m.k[thread] * k_factor, 0.0f);
    }
    if (at.first == 0 && thread < p.delta.rule.gates) {
        ((float *)(row + ring.gates))[thread] = m.gates[thread];
    }
}

/* CTAs as delta_one has them. */
template <int STATE, int ROWS>
static __global__ void __launch_bounds__(STEP_THREADS, STATE == KIND_F32 ? 3 : 5)
    delta_ring(const __grid_constant__ sm90_ring_params a)
{
    extern __shared__ __align__(16) char memory[];
    ring_memory<STATE, ROWS> &m = *(ring_memory<STATE, ROWS> *)memory;
    const gpu_delta_params &p = a.ring.delta;
    const int32_t thread = (int32_t)thread_index();
    const step_place<ROWS> at(p, a.slices);
    delta_request request;
    ring_request state;
    begin_step(m);
    if (!enter_request(p, at.request, request, true) ||
        !enter_ring(a.ring, at.request, request, state)) {
        return; /* the whole cluster returns, below, too */
    }
    const bool in_chunks = goes_in_chunks(p, request);
    const bool forks = request.state_from != request.slots[0];
    if (in_chunks ? !request.has_state || (state.replayed == 0 && !forks)
                  : !is_one_step(p, request)) {
        return;
    }
    if (thread == 0 && request.has_state) {
        fetch_state(m, state_bytes_at(p, request.state_from, at.head, at.first),
                    at.rows * step_pieces<STATE>::of_row * 16);
    }
    const ring_tokens ring(a.ring, request, state.replayed, at);
    step_token token = {};
    step_inputs inputs;
    uint2 keys[RING_PARTS], u[RING_PARTS];
    inputs.load(p, request, at);
    load_parts(ring, warp_index(), 8 * lane_index(), keys);
    load_parts(ring, lane_index() / 8, ring.u + 2 * min(row_of_lane(), at.rows - 4), u);
    if (in_chunks) {
        m.q[thread] = m.k[thread] = m.gates[thread] = 0.0f;
        if (thread < ROWS) {
            m.v[thread] = 0.0f;
        }
        if (forks && at.rank == 0) {
            inputs.q.roll<0>();
            inputs.k.roll<0>();
        }
        if (forks && inputs.has_value) {
            inputs.v.roll<0>();
        }
        sync_group(); /* an empty token is written */
    } else {
        token = make_token(m, p, inputs, at.head, m.gates);
    }
    multiply_keys(m, ring, keys);
    sync_group(); /* products and e are written */
    write_parts(m.read.parts, m.k[thread] * m.decay[thread]);
    write_parts(m.read.parts + 4, m.q[thread] * m.decay[thread]);
    add_changes(m, ring, u);
    sync_group(); /* the ring's sums are written */
    if (request.has_state) {
        barrier_wait(shared_address(&m.full), 0);
    }
    if (!in_chunks) {
        read_rows(m, token, request.has_state);
        sync_group(); /* u is written */
        finish_token(m, p, request, inputs, at);
    }
    if (in_chunks || state.written > 0) {
        /* again, so that they need no registers before */
        load_parts(ring, lane_index() / 8, ring.u + 2 * min(row_of_lane(), at.rows - 4), u);
        if (row_of_lane() < ROWS) {
#pragma unroll
            for (int i = 0; i < RING_PARTS; i++) {
                *(uint2 *)&m.changes[lane_index() / 8 + 4 * i][row_of_lane()] = u[i];
            }
        }
        sync_group(); /* the ring's u are written */
        write_rows(m, ring, token.k_factor, request.has_state, at.rows,
                   state_bytes_at(p, request.slots[0], at.head, at.first));
    } else {
        write_token(m, a.ring, ring, request.slots[0], at, token.k_factor);
    }
}

#endif
