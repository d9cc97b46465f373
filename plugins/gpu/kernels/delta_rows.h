/* SPDX-License-Identifier: Apache-2.0 */
/* Rows of a head's state in the registers of a group's warps, and the tokens that go through them:
 * what recurrent.cpp and ring.cpp share. */
#ifndef GPU_KERNELS_DELTA_ROWS_H
#define GPU_KERNELS_DELTA_ROWS_H

#include "gpu/device/delta.h"
#include "gpu/device/search.h"

#include "gpu/kernels/list.h"

/* Tokens of a stretch; SIZE is at least Dk. */
#define STRETCH_OF(SIZE) (2048 / (SIZE))

/* The largest Dk, rows of S and threads of a group; ANY_RULE: a kernel rule_* or, with RING,
 * ring_*.
 */
template <int SIZE_, int ROWS_, int THREADS_, bool ANY_RULE = false, bool RING = false>
struct delta_shape {
    static constexpr int size = SIZE_, rows = ROWS_, threads = THREADS_;
    static constexpr int warps = threads / GPU_LANES, warp_rows = rows / warps;
    static constexpr int count = size / GPU_LANES; /* columns of a lane */
    static constexpr bool any_rule = ANY_RULE, ring = RING;
    /* columns of a lane that a seed rounds at a time */
    static constexpr int piece = count < 4 ? count : 4;
    static constexpr int outs = warp_rows * (RING ? 2 : 1); /* a token's o and, for a ring, u */
    static constexpr int gates = ANY_RULE ? size : 1;       /* most gates of a token */
};

template <class D> struct delta_memory {
    static constexpr int SIZE = D::size;
    float q[STRETCH_OF(SIZE)][SIZE], k[STRETCH_OF(SIZE)][SIZE];
    float v[STRETCH_OF(SIZE)][D::rows];
    float decay[STRETCH_OF(SIZE)][D::gates], beta[STRETCH_OF(SIZE)];
    float kq[STRETCH_OF(SIZE)]; /* k q */
    /* a warp's part of S while a seed rounds it */
    float row[D::any_rule ? D::warps : 1][D::piece * GPU_LANES];
};

/* Input of a channel at token t of the request. Negative tokens are in the window, whose oldest of
 * conv_width - 1 entries is number `from`. */
GPU_INLINE float mixed_number(const gpu_delta_params &p, const delta_request &request, int32_t t,
                              int64_t channel)
{
    if (t >= 0) {
        const char *row = p.mixed.data + (int64_t)(request.first_row + t) * p.mixed.row;
        return number_load(row + channel * number_bytes_of(p.mixed.dtype), p.mixed.dtype, 0);
    }
    const char *window =
        p.window + request.window_from * p.window_slot + channel * p.window_channel;
    return request.has_state
               ? number_load(window, p.window_dtype, request.from + p.conv_width - 1 + t)
               : 0.0f;
}

#define SHORT_CONV 4

GPU_INLINE float short_number(uint32_t bits, int32_t dtype)
{
    return dtype == ATTN_DTYPE_BF16 ? float_of_bf16((uint16_t)bits) : float_of_half((uint16_t)bits);
}

/* As convolve, for SHORT_CONV inputs and weights of 16 bits: all loads before the first use. */
GPU_INLINE float convolve_short(const gpu_delta_params &p, const delta_request &request, int32_t t,
                                int64_t channel, float bias)
{
    const char *mixed = p.mixed.data + channel * 2;
    const char *window = p.window + request.window_from * p.window_slot +
                         channel * p.window_channel + (int64_t)(request.from + SHORT_CONV - 1) * 2;
    const char *weights = p.conv_weight.data + channel * p.conv_weight.row * 2;
    uint32_t x[SHORT_CONV], w[SHORT_CONV];
#pragma unroll
    for (int i = 0; i < SHORT_CONV; i++) {
        int32_t at = t - (SHORT_CONV - 1) + i;
        const char *from =
            at >= 0 ? mixed + (int64_t)(request.first_row + at) * p.mixed.row : window + at * 2;
        x[i] = *(const uint16_t *)from;
        w[i] = *(const uint16_t *)(weights + i * p.conv_weight.column * 2);
    }
    float y = bias;
#pragma unroll
    for (int i = 0; i < SHORT_CONV; i++) {
        bool is_old = t - (SHORT_CONV - 1) + i < 0;
        float value = short_number(x[i], is_old ? p.window_dtype : p.mixed.dtype);
        y +=
            short_number(w[i], p.conv_weight.dtype) * (is_old && !request.has_state ? 0.0f : value);
    }
    return y;
}

/* y_c = sum_i w_c,i x_c[t - (width - 1) + i] + bias_c, then SiLU. */
GPU_CALL float convolve(const gpu_delta_params &p, const delta_request &request, int32_t t,
                        int64_t channel)
{
    float y = p.conv_bias.data != nullptr ? matrix_number(p.conv_bias, 0, channel) : 0.0f;
    if (p.conv_width == SHORT_CONV && number_bytes_of(p.mixed.dtype) == 2 &&
        number_bytes_of(p.window_dtype) == 2 && number_bytes_of(p.conv_weight.dtype) == 2) {
        y = convolve_short(p, request, t, channel, y);
        return p.conv_silu ? silu(y) : y;
    }
    for (int32_t i = 0; i < p.conv_width; i++) {
        y += matrix_number(p.conv_weight, channel, i) *
             mixed_number(p, request, t - (p.conv_width - 1) + i, channel);
    }
    return p.conv_silu ? silu(y) : y;
}

/* Element d of q, k or v of a head, whose channels begin at `first`. */
GPU_INLINE float part_number(const gpu_delta_params &p, const delta_request &request, int32_t t,
                             const gpu_tensor &plain, int32_t head, int64_t first, int32_t d)
{
    if (p.conv_width > 0) {
        return convolve(p, request, t, first + d);
    }
    const char *row = plain.data + (int64_t)(request.first_row + t) * plain.row + head * plain.head;
    return number_load(row, plain.dtype, d);
}

/* The gates of any rule; columns without a gate stay as they are. */
template <class D>
GPU_INLINE void load_any_gates(const gpu_delta_params &p, int32_t first_row, int32_t count,
                               int32_t head, delta_memory<D> &m)
{
    int32_t gates = p.rule.gates, columns = gates > 1 ? D::size : 1;
    for (int32_t i = (int32_t)thread_index(); i < count * columns; i += D::threads) {
        int32_t t = i / columns, d = i - t * columns;
        int64_t row = first_row + t;
        float step = 0.0f;
        m.decay[t][d] = d < gates ? expf(log_decay(p, row, head, head * gates + d, &step)) : 1.0f;
        if (d == 0) {
            m.beta[t] = write_gate(p, row, head, step);
        }
    }
}

/* e^g = e^(-e^a_log softplus(a + dt_bias)), beta = 1 / (1 + e^-b). */
template <class D>
GPU_INLINE void load_gates(const gpu_delta_params &p, const delta_request &request, int32_t first,
                           int32_t count, int32_t head, delta_memory<D> &m)
{
    if constexpr (D::any_rule) {
        load_any_gates(p, request.first_row + first, count, head, m);
        return;
    }
    for (int32_t t = (int32_t)thread_index(); t < count; t += D::threads) {
        int64_t row = request.first_row + first + t;
        float x = matrix_number(p.a, row, head) + p.dt_bias[head];
        m.decay[t][0] = expf(-expf(p.a_log[head]) * softplus(x));
        m.beta[t] = sigmoid(matrix_number(p.b, row, head));
    }
}

/* Computes q, k and the group's rows of v for tokens first .. first + count - 1. */
template <class D>
GPU_INLINE void load_stretch(const gpu_delta_params &p, const delta_request &request, int32_t first,
                             int32_t count, int32_t head, int32_t first_dim, delta_memory<D> &m)
{
    int32_t dk = p.head_size_k, key_head = head / (p.num_v_heads / p.num_k_heads);
    int64_t key_channel = (int64_t)key_head * dk;
    int64_t v_channel = p.first_v + (int64_t)head * p.head_size_v;
    for (int32_t i = (int32_t)thread_index(); i < count * 2 * D::size; i += D::threads) {
        int32_t t = i / (2 * D::size), d = i % D::size, is_k = i / D::size & 1;
        float x = 0.0f;
        if (d < dk) {
            x = part_number(p, request, first + t, is_k ? p.k : p.q, key_head,
                            (is_k ? p.first_k : p.first_q) + key_channel, d);
        }
        (is_k ? m.k : m.q)[t][d] = x;
    }
    /* the last threads first, since they have less to do before */
    for (int32_t i = D::threads - 1 - (int32_t)thread_index(); i < count * D::rows;
         i += D::threads) {
        int32_t t = i / D::rows, d = first_dim + i - t * D::rows;
        m.v[t][d - first_dim] =
            d < p.head_size_v ? part_number(p, request, first + t, p.v, head, v_channel, d) : 0.0f;
    }
    load_gates(p, request, first, count, head, m);
}

/* Computes the norms of q and k, the scale of q, and k q, one warp for each token. */
template <class D>
GPU_INLINE void finish_stretch(const gpu_delta_params &p, int32_t count, delta_memory<D> &m)
{
    int32_t lane = lane_index();
    for (int32_t t = warp_index(); t < count; t += D::warps) {
        float qq = 0.0f, kk = 0.0f, kq = 0.0f;
        for (int32_t d = lane; d < D::size; d += GPU_LANES) {
            float q = m.q[t][d], k = m.k[t][d];
            qq += q * q, kk += k * k, kq += k * q;
        }
        float q_factor = p.scale, k_factor = 1.0f;
        if (p.l2norm) {
            q_factor *= 1.0f / sqrtf(warp_sum(qq) + L2_EPSILON);
            k_factor = 1.0f / sqrtf(warp_sum(kk) + L2_EPSILON);
        }
        kq = warp_sum(kq) * q_factor * k_factor;
        for (int32_t d = lane; d < D::size; d += GPU_LANES) {
            m.q[t][d] *= q_factor;
            m.k[t][d] *= k_factor;
        }
        if (lane == 0) {
            m.kq[t] = kq;
        }
    }
}

/* Rows of S in a warp's registers: lane l has columns l, l + GPU_LANES and so on. */
template <class D> struct delta_rows {
    float s[D::warp_rows][D::count];
};

template <class D> GPU_INLINE int32_t state_type(const gpu_delta_params &p)
{
    return D::any_rule ? p.rule.state_dtype : ATTN_DTYPE_F32;
}

template <class D>
GPU_INLINE char *state_bytes(const gpu_delta_params &p, int32_t slot, int32_t head, int32_t row)
{
    return p.state + slot * p.state_slot + head * p.state_head +
           (int64_t)row * p.head_size_k * number_bytes_of(state_type<D>(p));
}

/* A number of the state, float32 or, in kernels rule_*, of 16 bits; 0 if it is not real. Bits go by
 * their width and are converted without a branch, since clang takes minutes for 64 choices of a
 * type. nvcc has the choices: without them kernel_rule_128 has 104 registers for 80, and steps take
 * half as long again. */
template <class D>
GPU_INLINE float state_load(const gpu_delta_params &p, const char *row, int32_t d, bool real)
{
    int32_t dtype = state_type<D>(p);
#ifdef __CUDACC__
    return real ? number_load(row, dtype, d) : 0.0f;
#else
    uint32_t bits = 0;
    if (real) {
        bits = dtype == ATTN_DTYPE_F32 ? ((const uint32_t *)row)[d] : ((const uint16_t *)row)[d];
    }
    return dtype == ATTN_DTYPE_F16 ? float_of_half((uint16_t)bits)
                                   : bits_float(dtype == ATTN_DTYPE_BF16 ? bits << 16 : bits);
#endif
}

/* Numbers of 16 bits go on as they were stored. */
template <class D>
GPU_INLINE void state_store(const gpu_delta_params &p, char *row, int32_t d, bool real, float &x)
{
    int32_t dtype = state_type<D>(p);
#ifdef __CUDACC__
    if (real) {
        number_store(row, dtype, d, x);
        if constexpr (D::any_rule) {
            x = number_load(row, dtype, d);
        }
    }
#else
    uint16_t bits = dtype == ATTN_DTYPE_BF16 ? bf16_of(x) : half_of(x);
    if (real && dtype == ATTN_DTYPE_F32) {
        ((float *)row)[d] = x;
    } else if (real) {
        ((uint16_t *)row)[d] = bits;
    }
    x = dtype == ATTN_DTYPE_F32    ? x
        : dtype == ATTN_DTYPE_BF16 ? bits_float((uint32_t)bits << 16)
                                   : float_of_half(bits);
#endif
}

template <class D>
GPU_INLINE void load_state(const gpu_delta_params &p, const delta_request &request, int32_t head,
                           int32_t first_dim, delta_rows<D> &rows)
{
#pragma unroll
    for (int r = 0; r < D::warp_rows; r++) {
        const char *from = state_bytes<D>(p, request.state_from, head, first_dim + r);
        bool real = request.has_state && first_dim + r < p.head_size_v;
#pragma unroll
        for (int i = 0; i < D::count; i++) {
            int32_t d = i * GPU_LANES + lane_index();
            rows.s[r][i] = state_load<D>(p, from, d, real && d < p.head_size_k);
        }
    }
}

/* Rounds the warp's rows by a seed; `head_row` is the first one's number in [Hv Dv]. A lane takes
 * eight neighbouring columns, which share random bits. */
template <class D>
GPU_INLINE void round_rows(const gpu_delta_params &p, int32_t head_row, int32_t tokens,
                           delta_memory<D> &m, delta_rows<D> &rows)
{
    constexpr int columns = D::piece * GPU_LANES;
    const bool f16 = p.rule.state_dtype == ATTN_DTYPE_F16;
    float *row = m.row[warp_index()];
#pragma unroll
    for (int at = 0; at < D::warp_rows * D::count; at += D::piece) {
        const int r = at / D::count, from = at % D::count;
#pragma unroll
        for (int i = 0; i < D::piece; i++) {
            row[i * GPU_LANES + lane_index()] = rows.s[r][from + i];
        }
        sync_lanes();
#pragma unroll 1
        for (int32_t first = lane_index() * 8; first < columns; first += GPU_LANES * 8) {
            const state_random random =
                random_of_eight(p.rule, head_row + r, tokens, from * GPU_LANES + first);
#pragma unroll
            for (int i = 0; i < 8; i++) {
                const uint32_t own = random.x[i / 2] >> i % 2 * 16 & 0xffffu;
                const uint16_t bits = round_by(f16, row[first + i], own);
                row[first + i] = f16 ? float_of_half(bits) : float_of_bf16(bits);
            }
        }
        sync_lanes();
#pragma unroll
        for (int i = 0; i < D::piece; i++) {
            rows.s[r][from + i] = row[i * GPU_LANES + lane_index()];
        }
        sync_lanes();
    }
}

/* tokens: of the request in the state. */
template <class D>
GPU_INLINE void store_state(const gpu_delta_params &p, int32_t slot, int32_t head,
                            int32_t first_dim, int32_t tokens, delta_memory<D> &m,
                            delta_rows<D> &rows)
{
    if (slot < 0 || slot >= p.num_slots) {
        return;
    }
    if constexpr (D::any_rule) {
        if (p.rule.rounds > 0) {
            round_rows(p, head * p.head_size_v + first_dim, tokens, m, rows);
        }
    }
#pragma unroll
    for (int r = 0; r < D::warp_rows; r++) {
        char *to = state_bytes<D>(p, slot, head, first_dim + r);
#pragma unroll
        for (int i = 0; i < D::count; i++) {
            int32_t d = i * GPU_LANES + lane_index();
            bool real = first_dim + r < p.head_size_v && d < p.head_size_k;
            state_store<D>(p, to, d, real, rows.s[r][i]);
        }
    }
}

/* Runs token t of the stretch for the warp's rows, `own` of the group's; out: their elements of o,
 * then of u.
 * Rows go in fours, which leaves registers for the state. */
template <class D>
GPU_INLINE void run_token(const gpu_delta_params &p, const delta_memory<D> &m, int32_t t,
                          int32_t head, int32_t own, delta_rows<D> &rows, float (&out)[D::outs])
{
    constexpr int batch = D::warp_rows < 4 ? D::warp_rows : 4;
    float q[D::count], k[D::count];
    float decay[D::any_rule ? D::count : 1], beta = m.beta[t], kq = m.kq[t];
    float skip = D::any_rule && p.rule.skip != nullptr ? p.rule.skip[head] : 0.0f;
    bool delta = !D::any_rule || !p.rule.additive;
    if constexpr (!D::any_rule) {
        decay[0] = m.decay[t][0];
    }
#pragma unroll
    for (int i = 0; i < D::count; i++) {
        q[i] = m.q[t][i * GPU_LANES + lane_index()];
        k[i] = m.k[t][i * GPU_LANES + lane_index()];
        if constexpr (D::any_rule) {
            decay[i] = m.decay[t][p.rule.gates > 1 ? i * GPU_LANES + lane_index() : 0];
        }
    }
#pragma unroll
    for (int first = 0; first < D::warp_rows; first += batch) {
        float a[batch], b[batch];
#pragma unroll
        for (int r = 0; r < batch; r++) {
            a[r] = b[r] = 0.0f;
#pragma unroll
            for (int i = 0; i < D::count; i++) {
                float &s = rows.s[first + r][i];
                s *= decay[D::any_rule ? i : 0];
                a[r] += s * k[i];
                b[r] += s * q[i];
            }
        }
#pragma unroll
        for (int d = GPU_LANES / 2; d > 0; d >>= 1) {
#pragma unroll
            for (int r = 0; r < batch; r++) {
                a[r] += lane_xor(a[r], d);
                b[r] += lane_xor(b[r], d);
            }
        }
#pragma unroll
        for (int r = 0; r < batch; r++) {
            float v = m.v[t][own + first + r];
            float change = beta * (delta ? v - a[r] : v);
            out[first + r] = b[r] + change * kq;
            if constexpr (D::ring) {
                out[D::warp_rows + first + r] = change;
            }
            if (D::any_rule && p.rule.skip != nullptr) {
                out[first + r] += skip * v;
            }
#pragma unroll
            for (int i = 0; i < D::count; i++) {
                rows.s[first + r][i] += change * k[i];
            }
        }
    }
}

#endif
