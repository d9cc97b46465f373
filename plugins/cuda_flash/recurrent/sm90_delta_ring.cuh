/* SPDX-License-Identifier: Apache-2.0 */
/* A step of a layer with a ring of inputs (ATTN_CACHE_REPLAY): one token, or a few of which all but
 * the first are drafts. With S_0 the state in the slot, e the decays of all tokens since, e_j of
 * those after token j of the ring or of the step, up to and including the step's token t:
 *     S_t x = S_0 (e x) + sum_j u_j <k_j, e_j x>,  x = k_t and x = q_t
 * A step reads S_0 by a bulk copy and the ring's rows, 4 Dv Dk + tokens (2 Dk + 2 Dv) bytes of a
 * head, and makes the products with k_j while the copy runs. Where the state is due,
 *     S = S_0 e + sum_j u_j (e_j k_j)^T + u_0 k_0^T
 * is made of the rows in shared memory, 4 Dv Dk bytes more. Before a request goes in chunks, S is
 * written without its tokens. Latencies are the limit. */
#ifndef CUDA_FLASH_SM90_DELTA_RING_CUH
#define CUDA_FLASH_SM90_DELTA_RING_CUH

#include "sm90_delta_ring_rows.cuh"

/* Sums of COUNT numbers, a power of two, over as many lanes; a lane returns number lane % COUNT. */
template <int COUNT> GPU_INLINE float lane_sums(const float (&x)[COUNT])
{
    if constexpr (COUNT == 1) {
        return x[0];
    } else {
        constexpr int half = COUNT / 2;
        const bool upper = lane_index() & half;
        float sums[half];
#pragma unroll
        for (int i = 0; i < half; i++) {
            const float given = upper ? x[i] : x[i + half];
            sums[i] = (upper ? x[i + half] : x[i]) + lane_xor(given, half);
        }
        return lane_sums(sums);
    }
}

/* A thread's inputs: its channel of q and k and row of v and of the ring's u. A gate per head and b
 * are those of the step's token whose number is the lane, and `past` is the ring's gate whose age
 * is the lane less one. A lane has eight channels of every eighth key and four rows of every fourth
 * u. */
template <int TOKENS> struct ring_inputs {
    typedef ring_step<TOKENS> step;
    step_channel<TOKENS> q, k, v;
    uint4 keys[step::most / 8];
    uint2 u[step::most / 4];
    uint32_t a[TOKENS], b;
    float a_log, bias, past;

    template <int ROWS>
    __device__ __forceinline__ void load(const gpu_delta_params &p, const delta_request &request,
                                         const ring_tokens &ring, const step_place<ROWS> &at)
    {
        const int32_t thread = (int32_t)thread_index(), lane = lane_index();
        const int32_t row = min(thread, at.rows - 1), last = request.num_tokens - 1;
        const int32_t gate = ring.by_channel ? at.head * p.rule.gates + thread : at.head;
        const int32_t channel = at.key_head * CHUNK_DIMS + thread;
        q.load(p, request, p.first_q + channel);
        k.load(p, request, p.first_k + channel);
        v.load(p, request, p.first_v + at.head * p.head_size_v + at.first + row);
#pragma unroll
        for (int t = 0; t < TOKENS; t++) {
            const int32_t token = min(ring.by_channel ? t : lane, last);
            const bool is_read = p.rule.gate != ATTN_GATE_CONSTANT && (t == 0 || ring.by_channel);
            a[t] = is_read ? matrix_bits(p.a, request.first_row + token, gate) : 0;
        }
        b = p.rule.write_gate == ATTN_WRITE_GATE_SIGMOID
                ? matrix_bits(p.b, request.first_row + min(lane, last), at.head)
                : 0;
        a_log = p.rule.gate == ATTN_GATE_GIVEN ? 0.0f : p.a_log[at.head];
        bias = p.rule.gate == ATTN_GATE_GIVEN || p.rule.gate == ATTN_GATE_CONSTANT
                   ? 0.0f
                   : p.dt_bias[gate];
        past = !ring.by_channel && lane > 0 && lane <= ring.count ? *ring.gates_of(lane - 1) : 0.0f;
#pragma unroll
        for (int i = 0; i < step::most / 8; i++) {
            const int32_t age = lane / 4 + 8 * i;
            keys[i] = age < ring.count ? ((const uint4 *)ring.of(age))[column_of_lane() / 8]
                                       : make_uint4(0, 0, 0, 0);
        }
#pragma unroll
        for (int i = 0; i < step::most / 4; i++) {
            const int32_t age = lane / 8 + 4 * i;
            const int32_t at_row = ring.u + 2 * min(row_of_lane(), at.rows - 4);
            u[i] = age < ring.count ? *(const uint2 *)(ring.of(age) + at_row) : make_uint2(0, 0);
        }
    }

    /* Rolls the windows. */
    template <int ROWS>
    __device__ __forceinline__ void roll(const step_place<ROWS> &at, int32_t num_tokens) const
    {
        if (at.rank == 0) {
            q.roll(num_tokens);
            k.roll(num_tokens);
        }
        if ((int32_t)thread_index() < at.rows) {
            v.roll(num_tokens);
        }
    }

    /* Copies the windows of a fork, from entry `from` on. */
    template <int ROWS>
    __device__ __forceinline__ void copy(const step_place<ROWS> &at, int32_t from) const
    {
        if (at.rank == 0) {
            q.copy(from);
            k.copy(from);
        }
        if ((int32_t)thread_index() < at.rows) {
            v.copy(from);
        }
    }
};

/* What a thread makes of its inputs: k and g of its channel and v of its row, for each token. */
template <int TOKENS> struct ring_thread {
    typedef ring_step<TOKENS> step;
    float q[TOKENS], k[TOKENS], v[TOKENS], g[TOKENS];

    /* Makes them, and beta in shared memory. */
    template <class MEMORY>
    __device__ __forceinline__ void make(MEMORY &m, const gpu_delta_params &p,
                                         const ring_inputs<TOKENS> &inputs)
    {
        const bool by_channel = p.rule.gates > 1,
                   by_step = p.rule.write_gate == ATTN_WRITE_GATE_STEP;
        const int32_t thread = (int32_t)thread_index();
        float dt[TOKENS] = {};
#pragma unroll
        for (int t = 0; t < TOKENS; t++) {
            q[t] = inputs.q.convolve(p, t), k[t] = inputs.k.convolve(p, t);
            v[t] = inputs.v.convolve(p, t);
        }
        /* q and k are computed, so the windows have been read. The barrier orders no writes. */
        asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::"f"(q[0]), "f"(k[0]) : "memory");
#pragma unroll
        for (int t = 0; t < TOKENS; t++) {
            if (t == 0 || by_channel) {
                g[t] = log_decay_of(p.rule, number_of(inputs.a[t], p.a.dtype), inputs.a_log,
                                    inputs.bias, &dt[t]);
            }
            if (by_channel && by_step && thread == 0) {
                m.betas[t] = dt[t];
            }
        }
        if (thread < TOKENS && !(by_channel && by_step)) {
            m.betas[thread] = p.rule.write_gate == ATTN_WRITE_GATE_SIGMOID
                                  ? sigmoid(number_of(inputs.b, p.b.dtype))
                              : by_step ? dt[0]
                                        : 1.0f;
        }
#pragma unroll
        for (int t = TOKENS - 1; t >= 0 && !by_channel; t--) {
            g[t] = lane_read(g[0], t);
        }
    }

    /* Makes the warp's sums of the step's own products. */
    template <class MEMORY> __device__ __forceinline__ void multiply_own(MEMORY &m) const
    {
        float x[step::sums] = {};
#pragma unroll
        for (int t = 0; t < TOKENS; t++) {
            float past = 0.0f;
            x[step::of_q(t)] = q[t] * q[t];
            x[step::of_k(t)] = k[t] * k[t];
            x[step::of_kq(t, t)] = k[t] * q[t];
#pragma unroll
            for (int s = t - 1; s >= 0; s--) {
                past += g[s + 1];
                const float decayed = k[s] * expf(past);
                x[step::of_kq(t, s)] = decayed * q[t];
                x[step::of_kk(t, s)] = decayed * k[t];
            }
        }
        float sum = lane_sums(x);
#pragma unroll
        for (int distance = step::sums; distance < GPU_LANES; distance *= 2) {
            sum += lane_xor(sum, distance);
        }
        if (lane_index() < step::sums) {
            m.sums[warp_index()][lane_index()] = sum;
        }
    }

    /* Writes k and q of the thread's channel, times a factor and the decay of the step's tokens. */
    template <class MEMORY>
    __device__ __forceinline__ void write_parts(MEMORY &m, float factor) const
    {
        float past = 0.0f;
#pragma unroll
        for (int t = 0; t < TOKENS; t++) {
            past += g[t];
            const float e = factor * expf(past);
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const float x = e * (i == 0 ? k[t] : q[t]), high = high_part(x);
                m.parts[4 * t + 2 * i][thread_index()] = high;
                m.parts[4 * t + 2 * i + 1][thread_index()] = x - high;
            }
        }
    }

    /* Writes what the due state needs of the first token. */
    template <class MEMORY>
    __device__ __forceinline__ void write_first(MEMORY &m, float of_lane, float decay) const
    {
        const int32_t thread = (int32_t)thread_index();
        m.k[thread] = k[0];
        m.gates[thread] = g[0];
        m.decay[thread] = decay * expf(g[0]);
        if (thread < 16 * step::depths) {
            m.decays[thread] = of_lane * expf(g[0]);
        }
    }

    /* Makes and writes the tokens' outputs and their rows of the ring. */
    template <int STATE, int ROWS>
    __device__ __forceinline__ void
    finish(ring_memory<STATE, ROWS, TOKENS> &m, const gpu_ring_params &ring,
           const delta_request &request, int32_t written, const step_place<ROWS> &at) const
    {
        const gpu_delta_params &p = ring.delta;
        const int32_t thread = (int32_t)thread_index();
        const float skip = p.rule.skip != nullptr ? p.rule.skip[at.head] : 0.0f;
        float x[step::columns], u[TOKENS];
#pragma unroll
        for (int i = 0; i < step::columns; i++) {
            x[i] = request.has_state && thread < ROWS ? m.rows[i][thread] : 0.0f;
        }
#pragma unroll
        for (int age = 0; age < step::most; age++) {
            const float change = float_of_bf16(m.changes[age][thread % ROWS]);
#pragma unroll
            for (int i = 0; i < step::columns; i++) {
                x[i] = fmaf(change, m.products[age][i], x[i]);
            }
        }
#pragma unroll
        for (int t = 0; t < TOKENS; t++) {
            if (t >= request.num_tokens) {
                break;
            }
            const float k_factor = m.k_factor(t, p.l2norm);
            char *row = ring_row(ring, request, request.slots[0], t, at.head);
            if (thread < at.rows) {
                float a = x[2 * t], b = x[2 * t + 1];
#pragma unroll
                for (int s = 0; s < t; s++) {
                    a = fmaf(m.totals[step::of_kk(t, s)], u[s], a);
                    b = fmaf(m.totals[step::of_kq(t, s)], u[s], b);
                }
                const float change = m.betas[t] * (v[t] - (p.rule.additive ? 0.0f : k_factor * a));
                const float q_norm = p.l2norm ? rsqrtf(m.totals[step::of_q(t)] + L2_EPSILON) : 1.0f;
                u[t] = change * k_factor;
                b = fmaf(m.totals[step::of_kq(t, t)], u[t], b);
                char *out = p.out.data + (int64_t)(request.first_row + t) * p.out.row +
                            at.head * p.out.head;
                ((uint16_t *)out)[at.first + thread] =
                    (uint16_t)pack2<KIND_BF16>(fmaf(p.scale * q_norm, b, skip * v[t]), 0.0f);
                if (t >= written) {
                    ((uint16_t *)(row + ring_u(ring, at.head)))[at.first + thread] =
                        (uint16_t)pack2<KIND_BF16>(change, 0.0f);
                }
            }
            if (t >= written && at.rank == 0) {
                ((uint16_t *)row)[thread] = (uint16_t)pack2<KIND_BF16>(k[t] * k_factor, 0.0f);
            }
            if (t >= written && at.first == 0 && thread < p.rule.gates) {
                ((float *)(row + ring_gates(ring, at.head)))[thread] = g[t];
            }
        }
        if (written > 0 && thread < ROWS) {
            m.rows[0][thread] = thread < at.rows ? u[0] : 0.0f;
        }
    }
};

/* Multiplies the ring's keys, times e_j of gates per channel, with the parts of the warp's
 * channels. Returns the ring's decay of the thread's channel; of_lane: decay_of_lane. */
template <int STATE, int ROWS, int TOKENS>
GPU_INLINE float multiply_keys(ring_memory<STATE, ROWS, TOKENS> &m, const ring_tokens &ring,
                               const uint4 (&keys)[ring_step<TOKENS>::most / 8], float of_lane)
{
    typedef ring_step<TOKENS> step;
    constexpr int eights = step::most / 8;
    const int32_t lane = lane_index(), column = column_of_lane();
    const int32_t part_row = TOKENS == 1 ? lane / 4 % 4 : lane / 4;
    float past[8] = {};
    sync_lanes(); /* the warp's parts are written */
#pragma unroll
    for (int i = 0; i < eights; i += 2) {
        float x[2][8] = {}, acc[step::tiles][4] = {};
#pragma unroll
        for (int half = 0; half < 2 && i + half < eights; half++) {
            step_pieces<KIND_BF16>::unpack(keys[i + half], x[half]);
            if (ring.by_channel) {
                ring.decay_key(lane / 4 + 8 * (i + half), column, past, x[half]);
            }
        }
#pragma unroll
        for (int at = 0; at < step::tiles * 8; at += 4) {
            const int n = at / 8, c = at % 8;
            float part[4];
            load_four<KIND_F32>(&m.parts[8 * n + part_row][column + c], part);
#pragma unroll
            for (int d = 0; d < 4; d += 2) {
                const float a = x[0][c + d], b = x[1][c + d];
                const float next_a = x[0][c + d + 1], next_b = x[1][c + d + 1];
                multiply_tf32(acc[n], a, b, next_a, next_b, part[d], part[d + 1]);
                if (ring.by_channel) {
                    multiply_tf32(acc[n], a - high_part(a), b - high_part(b),
                                  next_a - high_part(next_a), next_b - high_part(next_b), part[d],
                                  part[d + 1]);
                }
            }
        }
#pragma unroll
        for (int n = 0; n < step::tiles && 4 * n + lane % 4 < step::columns; n++) {
            float *to = &m.ring_sums[warp_index()][lane / 4 + 8 * i][4 * n + lane % 4];
            to[0] = acc[n][0] + acc[n][1];
            if (i + 1 < eights) {
                to[8 * step::columns] = acc[n][2] + acc[n][3];
            }
        }
    }
    if (ring.by_channel && lane < 4) {
#pragma unroll
        for (int c = 0; c < 8; c++) {
            m.decay[column + c] = expf(past[c]);
        }
    }
    sync_lanes(); /* the warp's parts are read, its decays written */
    return ring.by_channel ? m.decay[thread_index()] : lane_read(of_lane, ring.count);
}

/* Adds the warps' sums. */
template <int STATE, int ROWS, int TOKENS>
GPU_INLINE void add_sums(ring_memory<STATE, ROWS, TOKENS> &m, float of_lane)
{
    typedef ring_step<TOKENS> step;
    const int32_t thread = (int32_t)thread_index();
    if (thread < step::sums) {
        m.totals[thread] =
            m.sums[0][thread] + m.sums[1][thread] + m.sums[2][thread] + m.sums[3][thread];
    }
    for (int32_t i = thread; i < step::most * step::columns; i += STEP_THREADS) {
        const int32_t age = i / step::columns, c = i % step::columns;
        const float sum = m.ring_sums[0][age][c] + m.ring_sums[1][age][c] +
                          (m.ring_sums[2][age][c] + m.ring_sums[3][age][c]);
        m.products[age][c] = lane_read(of_lane, age) * sum;
    }
}

/* Writes the u of the ring's tokens, and zeros for tokens that no ring has. */
template <int STATE, int ROWS, int TOKENS>
GPU_INLINE void write_changes(ring_memory<STATE, ROWS, TOKENS> &m,
                              const uint2 (&u)[ring_step<TOKENS>::most / 4])
{
    constexpr int count = ring_step<TOKENS>::most / 4;
#pragma unroll
    for (int i = 0; i < 4 * ring_step<TOKENS>::depths && row_of_lane() < ROWS; i++) {
        *(uint2 *)&m.changes[lane_index() / 8 + 4 * i][row_of_lane()] =
            i < count ? u[i % count] : make_uint2(0, 0);
    }
}

/* CTAs as delta_one has them. */
template <int STATE, int ROWS, int TOKENS>
static __global__ void __launch_bounds__(STEP_THREADS, ring_memory<STATE, ROWS, TOKENS>::ctas)
    delta_ring(const __grid_constant__ sm90_ring_params a)
{
    extern __shared__ __align__(16) char memory[];
    ring_memory<STATE, ROWS, TOKENS> &m = *(ring_memory<STATE, ROWS, TOKENS> *)memory;
    const gpu_delta_params &p = a.ring.delta;
    const int32_t thread = (int32_t)thread_index();
    const step_place<ROWS> at(p, a.slices);
    delta_request request;
    ring_request state;
    begin_step(m);
    if (!enter_request(p, at.request, request) || !enter_ring(a.ring, at.request, request, state)) {
        return; /* the whole cluster returns, below, too */
    }
    const bool in_chunks = goes_in_chunks(p, request);
    const bool forks = request.state_from != request.slots[0];
    if (in_chunks ? !request.has_state || (state.replayed == 0 && !forks)
                  : !is_one_step(p, request)) {
        return;
    }
    const ring_tokens ring(a.ring, request, state.replayed, at);
    ring_inputs<TOKENS> inputs;
    ring_thread<TOKENS> own = {};
    const char *from = state_bytes_at(p, request.state_from, at.head, at.first);
    const int32_t bytes = at.rows * step_pieces<STATE>::of_row * 16;
    const bool fetches = thread == 0 && request.has_state;
    if (ROWS < CHUNK_DIMS && fetches) {
        fetch_state(m, from, bytes);
    }
    inputs.load(p, request, ring, at);
    if (ROWS == CHUNK_DIMS && fetches) { /* many requests: inputs do not queue after the copy */
        fetch_state(m, from, bytes);
    }
    if (!in_chunks) {
        own.make(m, p, inputs);
    }
    const float of_lane = ring.decay_of_lane(inputs.past);
    own.multiply_own(m);
    write_changes(m, inputs.u);
    own.write_parts(m, 1.0f);
    const float decay = multiply_keys(m, ring, inputs.keys, of_lane);
    own.write_parts(m, decay);
    if (in_chunks || state.written > 0) {
        own.write_first(m, of_lane, decay);
    }
    sync_group(); /* parts and the warps' sums are written */
    if (!in_chunks) {
        add_sums(m, of_lane);
        asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
        inputs.roll(at, request.num_tokens);
    } else if (forks) {
        inputs.copy(at, request.from);
    }
    if (request.has_state) {
        barrier_wait(shared_address(&m.full), 0);
    }
    if (!in_chunks) {
        read_rows(m);
        sync_group(); /* the rows' sums are written */
        own.finish(m, a.ring, request, state.written, at);
    } else if (thread < ROWS) {
        m.rows[0][thread] = 0.0f;
    }
    if (in_chunks || state.written > 0) {
        sync_group(); /* u_0 is written */
        write_rows(m, ring, p.rule, request.has_state, at.rows, at.head * p.head_size_v + at.first,
                   request.context + !in_chunks,
                   state_bytes_at(p, request.slots[0], at.head, at.first));
    }
}

#endif
