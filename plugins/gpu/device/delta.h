/* SPDX-License-Identifier: Apache-2.0 */
/* Recurrent kernels: a request's part of a step, gates, rows of the state. */
#ifndef GPU_DEVICE_DELTA_H
#define GPU_DEVICE_DELTA_H

#include <attn/draft/recurrent.h>

#include "gpu/delta.h"
#include "gpu/device/number.h"

#define L2_EPSILON 1e-6f
#define SOFTPLUS_LINEAR 20.0f

/* One request of a step, as gdn_request of common/recurrent.h. */
struct delta_request {
    int32_t first_row, num_tokens;
    const int32_t *slots;
    const int32_t *checkpoints;      /* slots, one for each multiple of p.checkpoint_interval */
    int32_t context;                 /* tokens before the step; 0 without lengths */
    int32_t from;                    /* index of the state that it starts from */
    int32_t state_from, window_from; /* the slots of that state and of the window before the step */
    bool has_state, keeps_all;
};

/* Loads everything it needs before the first decision, so that latency is paid once. */
GPU_INLINE bool enter_request(const gpu_delta_params &p, int32_t r, delta_request &request)
{
    int32_t first = p.query_start[r], end = p.query_start[r + 1];
    request.slots = p.state_slots + r * p.state_slots_stride;
    int32_t slot = request.slots[0];
    int32_t accepted = p.num_accepted != nullptr ? p.num_accepted[r] : 1;
    int32_t length = p.seq_lens != nullptr ? p.seq_lens[r] : 1;
    bool has_state = p.has_state != nullptr && p.has_state[r] != 0;
    const int32_t *row =
        p.initial_slots != nullptr ? p.initial_slots + r * p.initial_slots_stride : request.slots;
    int32_t initial = row[0];
    request.first_row = first;
    request.num_tokens = min(end, p.num_tokens) - first;
    request.from = accepted - 1;
    request.keeps_all = p.num_accepted != nullptr && request.num_tokens <= 1 + p.num_drafted;
    if (request.num_tokens <= 0 || slot < 0 || slot >= p.num_slots || length == 0 ||
        request.from < 0 || request.from > p.num_drafted) {
        return false;
    }
    request.has_state = p.has_state != nullptr ? has_state : length > request.num_tokens;
    request.window_from = p.in_place ? slot : initial;
    request.state_from =
        request.from > 0 && p.has_ring == 0 ? row[request.from] : request.window_from;
    request.context = p.seq_lens != nullptr ? length - (end - first) : 0;
    request.checkpoints = p.checkpoint_slots + r * p.checkpoint_slots_stride;
    return request.state_from >= 0 && request.state_from < p.num_slots && initial >= 0 &&
           initial < p.num_slots;
}

/* The checkpoint slot for the state after `done` tokens of the step; negative if there is none. */
GPU_INLINE int32_t checkpoint_slot(const gpu_delta_params &p, const delta_request &request,
                                   int32_t done)
{
    int32_t interval = p.checkpoint_interval, position = request.context + done;
    if (interval == 0 || position % interval != 0) {
        return -1;
    }
    int32_t slot = request.checkpoints[position / interval - request.context / interval - 1];
    return slot < p.num_slots ? slot : -1;
}

/* Which requests a plugin's own kernels take. Kernels of chunks write checkpoints only at the ends
 * of whole chunks, and the interval is a multiple of a chunk; the kernel of rings writes none. */
GPU_INLINE bool goes_in_chunks(const gpu_delta_params &p, const delta_request &request)
{
    return p.chunked_from > 0 && request.num_tokens >= p.chunked_from && !request.keeps_all &&
           (p.checkpoint_interval == 0 || request.context % DELTA_CHUNK == 0);
}

GPU_INLINE bool is_one_step(const gpu_delta_params &p, const delta_request &request)
{
    return request.num_tokens <= p.steps_apart && (request.num_tokens == 1 || request.keeps_all) &&
           (p.has_ring == 0 || p.checkpoint_interval == 0 ||
            request.context % p.checkpoint_interval + request.num_tokens < p.checkpoint_interval);
}

/* Random bits of row `row` of the state [Hv Dv, Dk] after `tokens` tokens of the request: r of
 * columns `column` to column + 7, two in each word (attn_recurrent_rounding). */
struct state_random {
    uint32_t x[4];
};

GPU_INLINE state_random random_of_eight(const gpu_delta_rule &rule, int32_t row, int32_t tokens,
                                        int32_t column)
{
    state_random r = {{(uint32_t)column / 8, (uint32_t)row, (uint32_t)tokens, 0}};
    uint32_t k0 = rule.seed[0], k1 = rule.seed[1];
#pragma unroll 1
    for (int32_t i = 0; i < rule.rounds; i++) {
        const uint64_t a = (uint64_t)0xd2511f53u * r.x[0], b = (uint64_t)0xcd9e8d57u * r.x[2];
        r.x[0] = (uint32_t)(b >> 32) ^ r.x[1] ^ k0;
        r.x[1] = (uint32_t)b;
        r.x[2] = (uint32_t)(a >> 32) ^ r.x[3] ^ k1;
        r.x[3] = (uint32_t)a;
        k0 += 0x9e3779b9u;
        k1 += 0xbb67ae85u;
    }
    return r;
}

/* x as 16 bits, rounded up if its part of a unit and r, of 16 bits, make a whole one. */
GPU_INLINE uint16_t round_by(bool f16, float x, uint32_t r)
{
    const uint32_t size = float_bits(x) & 0x7fffffffu;
    uint32_t code = (size + r) >> 16;
    if (size > (f16 ? 0x477fe000u : 0x7f7f0000u)) { /* the largest finite number */
        return f16 ? half_of(x) : bf16_of(x);
    }
    if (f16) {
        code = size < 0x38800000u ? ((uint32_t)(bits_float(size) * 0x1p40f) + r) >> 16
                                  : ((size + (r >> 3)) >> 13) - (112u << 10);
    }
    return (uint16_t)(code | (float_bits(x) >> 16 & 0x8000u));
}

/* r of one column. */
GPU_INLINE uint32_t random_of(const gpu_delta_rule &rule, int32_t row, int32_t tokens,
                              int32_t column)
{
    const state_random r = random_of_eight(rule, row, tokens, column);
    const uint32_t low = column & 2 ? r.x[1] : r.x[0], high = column & 2 ? r.x[3] : r.x[2];
    return (column & 4 ? high : low) >> (column & 1) * 16 & 0xffffu;
}

GPU_INLINE float matrix_number(const gpu_matrix &m, int64_t i, int64_t j)
{
    int64_t at = i * m.row + j * m.column;
    return number_load(m.data + at * number_bytes_of(m.dtype), m.dtype, 0);
}

GPU_INLINE float silu(float x)
{
    return x / (1.0f + expf(-x));
}

GPU_INLINE float sigmoid(float x)
{
    return 1.0f / (1.0f + expf(-x));
}

/* ln(1 + e^x), accurate for small e^x; NaN where x is, which fminf does not pass. */
GPU_INLINE float softplus(float x)
{
    float e = expf(fminf(x, SOFTPLUS_LINEAR)), u = 1.0f + e;
    float small = u == 1.0f ? e : logf(u) * (e / (u - 1.0f));
    return x <= SOFTPLUS_LINEAR ? small : x;
}

/* g of a gate from its a, a_log and dt_bias; *step is its dt, where the gate has one. NaN passes
 * dt's limits. */
GPU_INLINE float log_decay_of(const gpu_delta_rule &rule, float a, float a_log, float bias,
                              float *step)
{
    if (rule.gate == ATTN_GATE_GIVEN) {
        return a;
    }
    float rate = expf(a_log), x = a + bias;
    if (rule.gate == ATTN_GATE_CONSTANT) {
        return -rate;
    }
    if (rule.gate == ATTN_GATE_BOUNDED) {
        return rule.gate_bound * sigmoid(rate * x);
    }
    float dt = softplus(x);
    dt = dt < rule.dt_min ? rule.dt_min : dt;
    *step = rule.dt_max > 0.0f && dt > rule.dt_max ? rule.dt_max : dt;
    return -rate * *step;
}

/* The same of gate `at` of token row `row`. */
GPU_INLINE float log_decay(const gpu_delta_params &p, int64_t row, int32_t head, int32_t at,
                           float *step)
{
    int32_t gate = p.rule.gate;
    float a = gate == ATTN_GATE_CONSTANT ? 0.0f : matrix_number(p.a, row, at);
    float a_log = gate == ATTN_GATE_GIVEN ? 0.0f : p.a_log[head];
    float bias = gate == ATTN_GATE_GIVEN || gate == ATTN_GATE_CONSTANT ? 0.0f : p.dt_bias[at];
    return log_decay_of(p.rule, a, a_log, bias, step);
}

/* beta of token row `row`, whose dt is `step`. */
GPU_INLINE float write_gate(const gpu_delta_params &p, int64_t row, int32_t head, float step)
{
    return p.rule.write_gate == ATTN_WRITE_GATE_SIGMOID ? sigmoid(matrix_number(p.b, row, head))
           : p.rule.write_gate == ATTN_WRITE_GATE_STEP  ? step
                                                        : 1.0f;
}

#endif
