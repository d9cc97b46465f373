/* SPDX-License-Identifier: Apache-2.0 */
/* One token of any rule. Memory bandwidth is the limit, so bulk copies of whole state rows to
 * shared memory start before anything else. The CTAs that read the windows of a key head form a
 * cluster, which rolls the windows once all CTAs have read them. */
#ifndef CUDA_FLASH_SM90_DELTA_STEP_CUH
#define CUDA_FLASH_SM90_DELTA_STEP_CUH

#include "sm80_delta_inputs.cuh"

#define STEP_THREADS 128 /* one channel of q and of k for each thread */
#define STEP_WARPS (STEP_THREADS / GPU_LANES)
#define STEP_TAPS 4

/* The pieces of 16 bytes of a state's row, which have STATE's type. */
template <int STATE> struct step_pieces {
    static constexpr int numbers = STATE == KIND_F32 ? 4 : 8; /* in a piece */
    static constexpr int of_row = CHUNK_DIMS / numbers;
    static constexpr int lanes = STATE == KIND_F32 ? 8 : 16; /* for a row */
    static constexpr int of_lane = of_row / lanes;

    /* The first number of a lane's piece i. */
    GPU_INLINE int32_t column(int i)
    {
        return (i * lanes + lane_index() % lanes) * numbers;
    }

    GPU_INLINE void unpack(const uint4 &piece, float *to)
    {
        const uint32_t words[4] = {piece.x, piece.y, piece.z, piece.w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if constexpr (STATE == KIND_F32) {
                to[i] = bits_float(words[i]);
            } else {
                float2 two = two_floats<STATE>(words[i]);
                to[2 * i] = two.x, to[2 * i + 1] = two.y;
            }
        }
    }

    GPU_INLINE uint4 pack(const float *x)
    {
        uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if constexpr (STATE == KIND_F32) {
                words[i] = float_bits(x[i]);
            } else {
                words[i] = pack2<STATE>(x[2 * i], x[2 * i + 1]);
            }
        }
        return make_uint4(words[0], words[1], words[2], words[3]);
    }

    /* A piece from `column` on of row `head_row` of the state; SEEDED: rounded by a seed. */
    template <bool SEEDED>
    GPU_INLINE uint4 pack(const gpu_delta_rule &rule, int32_t head_row, int32_t tokens,
                          int32_t column, const float *x)
    {
        if constexpr (SEEDED) {
            state_random r = random_of_eight(rule, head_row, tokens, column);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                r.x[i] = pack2_by<STATE>(x[2 * i], x[2 * i + 1], r.x[i]);
            }
            return make_uint4(r.x[0], r.x[1], r.x[2], r.x[3]);
        } else {
            return pack(x);
        }
    }
};

template <int STATE, int ROWS> struct step_memory {
    uint4 state[ROWS][step_pieces<STATE>::of_row];
    float q[CHUNK_DIMS], k[CHUNK_DIMS], decay[CHUNK_DIMS], v[ROWS], out[ROWS];
    float sums[STEP_WARPS][3]; /* sums of q q, k k, k q */
    float beta;
    uint64_t full;
};

/* The offset of item i: takes_steps bounds `apart` to 32 bits, of which one product is enough. */
GPU_INLINE int64_t offset_of(int32_t i, int64_t apart)
{
    return (int64_t)i * (int32_t)apart;
}

/* Inputs of one channel, the oldest first (the first three from the window), and its weights.
 * Missing tokens repeat the request's last one. */
template <int TOKENS = 1> struct step_channel {
    uint32_t input[STEP_TAPS - 1 + TOKENS], weight[STEP_TAPS];
    char *window;
    float bias;

    __device__ __forceinline__ void load(const gpu_delta_params &p, const delta_request &request,
                                         int32_t channel)
    {
        const int64_t of_channel = offset_of(channel, p.window_channel);
        const char *before =
            p.window + request.window_from * p.window_slot + of_channel + request.from * 2;
        window = p.window + request.slots[0] * p.window_slot + of_channel;
#pragma unroll
        for (int i = 0; i < STEP_TAPS - 1; i++) {
            input[i] = request.has_state ? ((const uint16_t *)before)[i] : 0;
        }
#pragma unroll
        for (int t = 0; t < TOKENS; t++) {
            const int32_t row = request.first_row + min(t, request.num_tokens - 1);
            input[STEP_TAPS - 1 + t] =
                *(const uint16_t *)(p.mixed.data + offset_of(row, p.mixed.row) + channel * 2);
        }
        const char *weights = p.conv_weight.data + offset_of(channel, p.conv_weight.row * 2);
        if (p.conv_weight.column == 1 && p.conv_weight.row == STEP_TAPS &&
            (uint64_t)p.conv_weight.data % 8 == 0) {
            const uint2 four = *(const uint2 *)weights;
            weight[0] = four.x & 0xffff, weight[1] = four.x >> 16;
            weight[2] = four.y & 0xffff, weight[3] = four.y >> 16;
        } else {
#pragma unroll
            for (int i = 0; i < STEP_TAPS; i++) {
                weight[i] = *(const uint16_t *)(weights + i * p.conv_weight.column * 2);
            }
        }
        const uint16_t *biases = (const uint16_t *)p.conv_bias.data;
        bias = biases != nullptr ? float_of_bf16(biases[channel * p.conv_bias.column]) : 0.0f;
    }

    __device__ __forceinline__ float convolve(const gpu_delta_params &p, int t = 0) const
    {
        float y = bias;
#pragma unroll
        for (int i = 0; i < STEP_TAPS; i++) {
            y = fmaf(two_floats<KIND_BF16>(weight[i]).x, two_floats<KIND_BF16>(input[t + i]).x, y);
        }
        return p.conv_silu ? divide_fast(y, 1.0f + exp_fast(-y)) : y;
    }

    /* Stores the window after the step, all inputs but the oldest, `apart` bytes after the slot's.
     */
    __device__ __forceinline__ void roll(int32_t num_tokens = 1, int64_t apart = 0) const
    {
#pragma unroll
        for (int i = 0; i < STEP_TAPS - 2 + TOKENS; i++) {
            if (i < STEP_TAPS - 2 + num_tokens) {
                ((uint16_t *)(window + apart))[i] = (uint16_t)input[i + 1];
            }
        }
    }

    /* Stores the window before the step, from entry `from` on. */
    __device__ __forceinline__ void copy(int32_t from) const
    {
#pragma unroll
        for (int i = 0; i < STEP_TAPS - 1; i++) {
            ((uint16_t *)window)[from + i] = (uint16_t)input[i];
        }
    }
};

/* An element of a matrix, not yet converted, so that several loads may be in flight. */
GPU_INLINE uint32_t matrix_bits(const gpu_matrix &m, int32_t i, int32_t j)
{
    int64_t at = offset_of(i, m.row) + offset_of(j, m.column);
    return m.dtype == ATTN_DTYPE_F32 ? ((const uint32_t *)m.data)[at]
                                     : ((const uint16_t *)m.data)[at];
}

GPU_INLINE float number_of(uint32_t bits, int32_t dtype)
{
    return dtype == ATTN_DTYPE_F32 ? bits_float(bits) : narrow_number((uint16_t)bits, dtype);
}

/* The inputs of a thread's decay and of beta. */
struct step_gates {
    uint32_t a, b;
    float a_log, bias;

    __device__ __forceinline__ void load(const gpu_delta_params &p, int32_t row, int32_t head,
                                         int32_t at)
    {
        int32_t gate = p.rule.gate;
        a = gate == ATTN_GATE_CONSTANT ? 0 : matrix_bits(p.a, row, at);
        b = p.rule.write_gate == ATTN_WRITE_GATE_SIGMOID ? matrix_bits(p.b, row, head) : 0;
        a_log = gate == ATTN_GATE_GIVEN ? 0.0f : p.a_log[head];
        bias = gate == ATTN_GATE_GIVEN || gate == ATTN_GATE_CONSTANT ? 0.0f : p.dt_bias[at];
    }

    /* Returns beta. */
    __device__ __forceinline__ float make(const gpu_delta_params &p, float &log_decay) const
    {
        float step = 0.0f;
        log_decay = log_decay_of(p.rule, number_of(a, p.a.dtype), a_log, bias, &step);
        return p.rule.write_gate == ATTN_WRITE_GATE_SIGMOID ? sigmoid(number_of(b, p.b.dtype))
               : p.rule.write_gate == ATTN_WRITE_GATE_STEP  ? step
                                                            : 1.0f;
    }
};

/* A CTA's part of the work: rows first .. first + rows - 1 of a request's head, of at most MOST. */
template <int MOST> struct step_place {
    int32_t request, rank, key_head, first, rows; /* rank: in the cluster */
    int32_t group, member, head;                  /* value heads of the key head, and which */

    __device__ __forceinline__ step_place(const gpu_delta_params &p, int32_t slices)
    {
        slices = MOST == CHUNK_DIMS ? 1 : slices;
        request = (int32_t)blockIdx.z;
        rank = (int32_t)blockIdx.x;
        key_head = (int32_t)blockIdx.y;
        group = (int32_t)gridDim.x / slices;
        member = rank / slices;
        head = key_head * group + member;
        first = rank % slices * MOST;
        rows = min(MOST, p.head_size_v - first);
    }
};

/* Makes the barrier of the state's copy, and lets the launch overlap its neighbours. */
template <class MEMORY> GPU_INLINE void begin_step(MEMORY &m)
{
    if (thread_index() == 0) {
        barrier_init(shared_address(&m.full), 1);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    sync_group();
    wait_for_earlier_kernels();
    let_later_kernels_begin();
}

/* A gate per head is made by the first warp. */
GPU_INLINE bool makes_gates(const gpu_delta_params &p)
{
    return p.rule.gates > 1 || warp_index() == 0;
}

/* A thread's channels of q, k and v, and its gate. */
struct step_inputs {
    step_channel<> q, k, v;
    step_gates gates;
    bool has_value;

    template <int ROWS>
    __device__ __forceinline__ void load(const gpu_delta_params &p, const delta_request &request,
                                         const step_place<ROWS> &at)
    {
        int32_t thread = (int32_t)thread_index();
        int32_t channel = at.key_head * CHUNK_DIMS + thread;
        q.load(p, request, p.first_q + channel);
        k.load(p, request, p.first_k + channel);
        has_value = thread < at.rows;
        if (has_value) {
            v.load(p, request, p.first_v + at.head * p.head_size_v + at.first + thread);
        }
        if (makes_gates(p)) {
            gates.load(p, request.first_row, at.head,
                       p.rule.gates > 1 ? at.head * p.rule.gates + thread : at.head);
        }
    }
};

/* Starts the copy of `bytes` of the CTA's rows to shared memory. */
template <class MEMORY> GPU_INLINE void fetch_state(MEMORY &m, const char *from, int32_t bytes)
{
    uint32_t full = shared_address(&m.full);
    barrier_arrive_expect(full, bytes);
    copy_span(shared_address(m.state), from, bytes, full);
}

/* What a token does to each row; read_factor: of S k, 0 without a delta. */
struct step_token {
    float beta, k_factor, q_factor, read_factor, kq, skip;
};

/* Writes q, k, v and e^g to shared memory, and makes the token for the whole CTA; a gate per head
 * by one warp. The cluster's barrier is waited for before windows are rolled. */
template <int STATE, int ROWS>
GPU_INLINE step_token make_token(step_memory<STATE, ROWS> &m, const gpu_delta_params &p,
                                 const step_inputs &inputs, int32_t head)
{
    int32_t thread = (int32_t)thread_index();
    float q = inputs.q.convolve(p), k = inputs.k.convolve(p);
    /* q and k are computed, so the windows have been read. The barrier orders no writes. */
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::"f"(q), "f"(k) : "memory");
    m.q[thread] = q;
    m.k[thread] = k;
    if (thread < ROWS) {
        m.v[thread] = inputs.has_value ? inputs.v.convolve(p) : 0.0f;
    }
    float sums[3] = {q * q, k * k, k * q};
#pragma unroll
    for (int i = 0; i < 3; i++) {
        sums[i] = warp_sum(sums[i]);
        if (lane_index() == 0) {
            m.sums[warp_index()][i] = sums[i];
        }
    }
    step_token token;
    if (makes_gates(p)) {
        float log_decay;
        const float beta = inputs.gates.make(p, log_decay), x = expf(log_decay);
        if (p.rule.gates > 1) {
            m.decay[thread] = x;
        } else {
            ((float4 *)m.decay)[thread] = make_float4(x, x, x, x);
        }
        if (thread == 0) {
            m.beta = beta;
        }
    }
    token.skip = p.rule.skip != nullptr ? p.rule.skip[head] : 0.0f;
    sync_group();
#pragma unroll
    for (int i = 0; i < 3; i++) {
        sums[i] = m.sums[0][i] + m.sums[1][i] + m.sums[2][i] + m.sums[3][i];
    }
    token.beta = m.beta;
    token.q_factor = p.scale * (p.l2norm ? rsqrtf(sums[0] + L2_EPSILON) : 1.0f);
    token.k_factor = p.l2norm ? rsqrtf(sums[1] + L2_EPSILON) : 1.0f;
    token.read_factor = p.rule.additive ? 0.0f : token.k_factor;
    token.kq = sums[2] * token.q_factor * token.k_factor;
    return token;
}

/* SEEDED: states of 16 bits are rounded by a seed; row 0 is `head_row` of the state. */
template <bool SEEDED, int STATE, int ROWS>
GPU_INLINE void run_rows(step_memory<STATE, ROWS> &m, const gpu_delta_rule &rule,
                         const step_token &token, bool has_state, int32_t rows, int32_t head_row,
                         int32_t tokens, char *to)
{
    typedef step_pieces<STATE> pieces;
    constexpr int numbers = pieces::numbers, count = pieces::of_lane * numbers;
    int32_t lane = lane_index(), piece = lane % pieces::lanes;
    float q[count], k[count], decay[count];
#pragma unroll
    for (int i = 0; i < count; i += 4) {
        int32_t d = pieces::column(i / numbers) + i % numbers;
        *(float4 *)&q[i] = *(const float4 *)&m.q[d];
        *(float4 *)&k[i] = *(const float4 *)&m.k[d];
        *(float4 *)&decay[i] = *(const float4 *)&m.decay[d];
    }
    constexpr int rows_at_once = GPU_LANES / pieces::lanes;
#pragma unroll 2
    for (int first = warp_index() * rows_at_once; first < ROWS;
         first += STEP_WARPS * rows_at_once) {
        int32_t row = first + lane / pieces::lanes;
        float s[count], a = 0.0f, b = 0.0f;
#pragma unroll
        for (int i = 0; i < pieces::of_lane; i++) {
            pieces::unpack(m.state[row][i * pieces::lanes + piece], s + i * numbers);
        }
#pragma unroll
        for (int i = 0; i < count; i++) {
            s[i] = has_state ? s[i] * decay[i] : 0.0f;
            a = fmaf(s[i], k[i], a);
            b = fmaf(s[i], q[i], b);
        }
#pragma unroll
        for (int distance = pieces::lanes / 2; distance > 0; distance >>= 1) {
            a += lane_xor(a, distance);
            b += lane_xor(b, distance);
        }
        float v = m.v[row], change = token.beta * (v - token.read_factor * a);
        if (row >= rows) {
            continue;
        }
        if (piece == 0) {
            m.out[row] = token.q_factor * b + change * token.kq + token.skip * v;
        }
        change *= token.k_factor;
        uint4 *to_row = (uint4 *)to + (int64_t)row * pieces::of_row + piece;
#pragma unroll
        for (int i = 0; i < count; i++) {
            s[i] = fmaf(change, k[i], s[i]);
        }
#pragma unroll
        for (int i = 0; i < pieces::of_lane; i++) {
            __stcs(to_row + i * pieces::lanes,
                   pieces::template pack<SEEDED>(rule, head_row + row, tokens, pieces::column(i),
                                                 s + i * numbers));
        }
    }
}

/* Rolls the windows and writes the outputs. */
template <int STATE, int ROWS>
GPU_INLINE void finish_token(const step_memory<STATE, ROWS> &m, const gpu_delta_params &p,
                             const delta_request &request, const step_inputs &inputs,
                             const step_place<ROWS> &at)
{
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
    if (at.rank == 0) {
        inputs.q.roll();
        inputs.k.roll();
    }
    sync_group(); /* all outputs are written */
    if (inputs.has_value) {
        inputs.v.roll();
        char *out = p.out.data + request.first_row * p.out.row + at.head * p.out.head;
        int32_t thread = (int32_t)thread_index();
        ((uint16_t *)out)[at.first + thread] = (uint16_t)pack2<KIND_BF16>(m.out[thread], 0.0f);
    }
}

/* Writes the checkpoint that is due after the token, if one is: copies of the CTA's rows, which it
 * has written, and the windows. */
template <int STATE, int ROWS>
GPU_INLINE void keep_token(const gpu_delta_params &p, const delta_request &request,
                           const step_inputs &inputs, const step_place<ROWS> &at)
{
    const int32_t slot = checkpoint_slot(p, request, 1);
    if (slot < 0) {
        return;
    }
    const uint4 *from = (const uint4 *)state_bytes_at(p, request.slots[0], at.head, at.first);
    uint4 *to = (uint4 *)state_bytes_at(p, slot, at.head, at.first);
#pragma unroll 8
    for (int32_t i = (int32_t)thread_index(); i < at.rows * step_pieces<STATE>::of_row;
         i += STEP_THREADS) {
        __stcs(to + i, from[i]);
    }
    const int64_t apart = (slot - request.slots[0]) * p.window_slot;
    if (at.rank == 0) {
        inputs.q.roll(1, apart);
        inputs.k.roll(1, apart);
    }
    if (inputs.has_value) {
        inputs.v.roll(1, apart);
    }
}

/* a.slices CTAs with ROWS rows for each value head; the CTAs of a request's key head are a cluster.
 */
template <int STATE, int ROWS, bool SEEDED>
static __global__ void __launch_bounds__(STEP_THREADS, STATE == KIND_F32 ? 3 : 6)
    delta_one(const __grid_constant__ sm80_delta_params a)
{
    extern __shared__ __align__(16) char memory[];
    step_memory<STATE, ROWS> &m = *(step_memory<STATE, ROWS> *)memory;
    const gpu_delta_params &p = a.p;
    int32_t thread = (int32_t)thread_index();
    const step_place<ROWS> at(p, a.slices);
    delta_request request;
    begin_step(m);
    if (!enter_request(p, at.request, request) || !is_one_step(p, request)) {
        return; /* the whole cluster returns */
    }
    if (thread == 0 && request.has_state) {
        fetch_state(m, state_bytes_at(p, request.state_from, at.head, at.first),
                    at.rows * step_pieces<STATE>::of_row * 16);
    }
    step_inputs inputs;
    inputs.load(p, request, at);
    step_token token = make_token(m, p, inputs, at.head);
    if (request.has_state) {
        barrier_wait(shared_address(&m.full), 0);
    }
    run_rows<SEEDED>(m, p.rule, token, request.has_state, at.rows,
                     at.head * p.head_size_v + at.first, request.context + 1,
                     state_bytes_at(p, request.slots[0], at.head, at.first));
    finish_token(m, p, request, inputs, at);
    keep_token<STATE>(p, request, inputs, at);
}

#endif
