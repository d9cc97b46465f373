/* SPDX-License-Identifier: Apache-2.0 */
/* Gated delta for one token. Memory bandwidth is the limit, so bulk copies of whole state rows to
 * shared memory start before anything else. The CTAs that read the windows of a key head form a
 * cluster, which rolls the windows once all CTAs have read them. */
#ifndef CUDA_FLASH_SM90_DELTA_STEP_CUH
#define CUDA_FLASH_SM90_DELTA_STEP_CUH

#include "sm80_delta_inputs.cuh"

#define STEP_THREADS 128 /* one channel of q and of k for each thread */
#define STEP_WARPS (STEP_THREADS / GPU_LANES)
/* lanes for each row of the state, with CHUNK_DIMS / 4 / STEP_LANES pieces of 16 bytes each */
#define STEP_LANES 8
#define STEP_PIECES (CHUNK_DIMS / 4 / STEP_LANES)
#define STEP_TAPS 4

template <int ROWS> struct step_memory {
    float4 state[ROWS][CHUNK_DIMS / 4];
    float q[CHUNK_DIMS], k[CHUNK_DIMS], v[ROWS], out[ROWS];
    float sums[STEP_WARPS][3]; /* sums of q q, k k, k q */
    uint64_t full;
};

/* Inputs of one channel, the oldest first (the first three from the window), and its weights. */
struct step_channel {
    uint32_t input[STEP_TAPS], weight[STEP_TAPS];
    char *window;
    float bias;

    __device__ __forceinline__ void load(const sm80_delta_params &a, const delta_request &request,
                                         int64_t channel)
    {
        const gpu_delta_params &p = a.p;
        const char *before =
            p.window + request.window_from * p.window_slot + channel * p.window_channel;
        window = p.window + request.slots[0] * p.window_slot + channel * p.window_channel;
#pragma unroll
        for (int i = 0; i < STEP_TAPS - 1; i++) {
            input[i] = request.has_state ? ((const uint16_t *)before)[i] : 0;
        }
        input[STEP_TAPS - 1] =
            *(const uint16_t *)(p.mixed.data + request.first_row * p.mixed.row + channel * 2);
        const char *weights = p.conv_weight.data + channel * p.conv_weight.row * 2;
#pragma unroll
        for (int i = 0; i < STEP_TAPS; i++) {
            weight[i] = *(const uint16_t *)(weights + i * p.conv_weight.column * 2);
        }
        bias = p.conv_bias.data != nullptr ? matrix_number(p.conv_bias, 0, channel) : 0.0f;
    }

    template <int KIND> __device__ __forceinline__ float convolve(const gpu_delta_params &p) const
    {
        float y = bias;
#pragma unroll
        for (int i = 0; i < STEP_TAPS; i++) {
            y = fmaf(two_floats<KIND>(weight[i]).x, two_floats<KIND>(input[i]).x, y);
        }
        return p.conv_silu ? divide_fast(y, 1.0f + exp_fast(-y)) : y;
    }

    __device__ __forceinline__ void roll() const
    {
#pragma unroll
        for (int i = 0; i < STEP_TAPS - 1; i++) {
            ((uint16_t *)window)[i] = (uint16_t)input[i + 1];
        }
    }
};

/* Starts the copy of the CTA's rows to shared memory. */
template <int ROWS>
static __device__ __forceinline__ void fetch_state(step_memory<ROWS> &m, const float *from,
                                                   int32_t rows)
{
    uint32_t full = shared_address(&m.full);
    int32_t bytes = rows * CHUNK_DIMS * 4;
    asm volatile("{.reg .b64 s; mbarrier.arrive.expect_tx.shared.b64 s, [%0], %1;}" ::"r"(full),
                 "r"(bytes)
                 : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], "
                 "[%1], %2, [%3];" ::"r"(shared_address(m.state)),
                 "l"(from), "r"(bytes), "r"(full)
                 : "memory");
}

/* What a token does to each row. */
struct step_token {
    float decay, beta, k_factor, q_factor, kq;
};

template <int ROWS>
static __device__ __forceinline__ void run_rows(step_memory<ROWS> &m, const step_token &token,
                                                bool has_state, int32_t rows, float *to)
{
    int32_t lane = lane_index(), piece = lane % STEP_LANES;
    float4 q[STEP_PIECES], k[STEP_PIECES];
#pragma unroll
    for (int i = 0; i < STEP_PIECES; i++) {
        q[i] = ((const float4 *)m.q)[i * STEP_LANES + piece];
        k[i] = ((const float4 *)m.k)[i * STEP_LANES + piece];
    }
    constexpr int rows_at_once = GPU_LANES / STEP_LANES;
#pragma unroll 2
    for (int first = warp_index() * rows_at_once; first < ROWS;
         first += STEP_WARPS * rows_at_once) {
        int32_t row = first + lane / STEP_LANES;
        float4 s[STEP_PIECES];
        float a = 0.0f, b = 0.0f;
#pragma unroll
        for (int i = 0; i < STEP_PIECES; i++) {
            s[i] = has_state ? m.state[row][i * STEP_LANES + piece] : make_float4(0, 0, 0, 0);
            a = fmaf(s[i].x, k[i].x, fmaf(s[i].y, k[i].y, a));
            a = fmaf(s[i].z, k[i].z, fmaf(s[i].w, k[i].w, a));
            b = fmaf(s[i].x, q[i].x, fmaf(s[i].y, q[i].y, b));
            b = fmaf(s[i].z, q[i].z, fmaf(s[i].w, q[i].w, b));
        }
#pragma unroll
        for (int distance = STEP_LANES / 2; distance > 0; distance >>= 1) {
            a += lane_xor(a, distance);
            b += lane_xor(b, distance);
        }
        float change = token.beta * (m.v[row] - token.decay * token.k_factor * a);
        if (row >= rows) {
            continue;
        }
        if (piece == 0) {
            m.out[row] = token.decay * token.q_factor * b + change * token.kq;
        }
        change *= token.k_factor;
#pragma unroll
        for (int i = 0; i < STEP_PIECES; i++) {
            float4 x = make_float4(fmaf(change, k[i].x, token.decay * s[i].x),
                                   fmaf(change, k[i].y, token.decay * s[i].y),
                                   fmaf(change, k[i].z, token.decay * s[i].z),
                                   fmaf(change, k[i].w, token.decay * s[i].w));
            __stcs((float4 *)(to + (int64_t)row * CHUNK_DIMS + (i * STEP_LANES + piece) * 4), x);
        }
    }
}

/* a.slices CTAs with ROWS rows for each value head; the CTAs of a request's key head are a cluster.
 */
template <int KIND, int ROWS>
static __global__ void __launch_bounds__(STEP_THREADS)
    delta_one(const __grid_constant__ sm80_delta_params a)
{
    extern __shared__ __align__(16) char memory[];
    step_memory<ROWS> &m = *(step_memory<ROWS> *)memory;
    const gpu_delta_params &p = a.p;
    int32_t thread = (int32_t)thread_index(), group = p.num_v_heads / p.num_k_heads;
    int32_t rank = (int32_t)blockIdx.x % (group * a.slices);
    int32_t rest = (int32_t)blockIdx.x / (group * a.slices), key_head = rest % p.num_k_heads;
    int32_t head = key_head * group + rank / a.slices, first = rank % a.slices * ROWS;
    int32_t rows = min(ROWS, p.head_size_v - first);
    delta_request request;
    if (thread == 0) {
        barrier_init(shared_address(&m.full), 1);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    sync_group();
    wait_for_earlier_kernels();
    let_later_kernels_begin();
    if (!enter_request(p, rest / p.num_k_heads, request) || !is_one_step(p, request)) {
        return; /* the whole cluster returns */
    }
    float *state = state_row(p, request.slots[0], head, first);
    if (thread == 0 && request.has_state) {
        fetch_state(m, state_row(p, request.state_from, head, first), rows);
    }
    int64_t q_channel = (int64_t)key_head * CHUNK_DIMS + thread;
    int64_t keys = (int64_t)p.num_k_heads * CHUNK_DIMS;
    step_channel of_q, of_k, of_v;
    of_q.load(a, request, q_channel);
    of_k.load(a, request, keys + q_channel);
    bool has_value = thread < rows;
    if (has_value) {
        of_v.load(a, request, 2 * keys + (int64_t)head * p.head_size_v + first + thread);
    }
    float x = matrix_number(p.a, request.first_row, head) + p.dt_bias[head];
    float gate = matrix_number(p.b, request.first_row, head);
    float q = of_q.convolve<KIND>(p), k = of_k.convolve<KIND>(p);
    /* q and k are computed, so the windows have been read. The barrier orders no writes. */
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::"f"(q), "f"(k) : "memory");
    m.q[thread] = q;
    m.k[thread] = k;
    if (thread < ROWS) {
        m.v[thread] = has_value ? of_v.convolve<KIND>(p) : 0.0f;
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
    token.decay = expf(-expf(p.a_log[head]) * softplus(x));
    token.beta = 1.0f / (1.0f + expf(-gate));
    sync_group();
#pragma unroll
    for (int i = 0; i < 3; i++) {
        sums[i] = m.sums[0][i] + m.sums[1][i] + m.sums[2][i] + m.sums[3][i];
    }
    token.q_factor = p.scale * (p.l2norm ? 1.0f / sqrtf(sums[0] + L2_EPSILON) : 1.0f);
    token.k_factor = p.l2norm ? 1.0f / sqrtf(sums[1] + L2_EPSILON) : 1.0f;
    token.kq = sums[2] * token.q_factor * token.k_factor;
    if (request.has_state) {
        barrier_wait(shared_address(&m.full), 0);
    }
    run_rows(m, token, request.has_state, rows, state);
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
    if (rank == 0) {
        of_q.roll();
        of_k.roll();
    }
    sync_group(); /* all outputs are written */
    if (has_value) {
        of_v.roll();
        char *out = p.out.data + request.first_row * p.out.row + head * p.out.head;
        ((uint16_t *)out)[first + thread] = (uint16_t)pack2<KIND>(m.out[thread], 0.0f);
    }
}

#endif
