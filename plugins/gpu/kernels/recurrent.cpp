/* SPDX-License-Identifier: Apache-2.0 */
/* Recurrent layers, a token at a time, with their causal convolution. The kernels delta_* have the
 * gated delta rule (attn/recurrent.h) over float32 states:
 *     S <- e^g S;  r = beta (v - S k);  S <- S + r k^T;  o = S q
 * the kernels rule_* every other rule (attn/draft/recurrent.h) and states of 16 bits; ring.cpp has
 * those with a ring of inputs.
 * A group has some rows of one head's S in registers, each warp as many of them, and
 * works through the request's tokens in stretches whose q, k, v and gates it makes in shared
 * memory. With a = e^g S k and b = e^g S q of the old S, o = b + r (k q): one pass over S, and two
 * sums over lanes for each row. Steps of one token are bound by memory: S is read and written once,
 * 8 Dv Dk bytes a head. Longer ones are bound by the latency of a token's sums. */
#include "gpu/kernels/delta_rows.h"

template <class D>
GPU_INLINE void run_request(const gpu_delta_params &p, const delta_request &request, int32_t head,
                            int32_t tile, delta_memory<D> &m)
{
    constexpr int stretch = STRETCH_OF(D::size);
    int32_t group_dim = tile * D::rows, own = warp_index() * D::warp_rows;
    delta_rows<D> rows;
    load_state(p, request, head, group_dim + own, rows);
    for (int32_t first = 0; first < request.num_tokens; first += stretch) {
        int32_t count = min(stretch, request.num_tokens - first);
        /* the previous stretch has been read, and all warps have read the old state */
        sync_group();
        load_stretch(p, request, first, count, head, group_dim, m);
        sync_group(); /* q and k are written */
        finish_stretch(p, count, m);
        sync_group(); /* q and k are normalized */
        for (int32_t t = 0; t < count; t++) {
            float out[D::warp_rows];
            run_token(p, m, t, head, own, rows, out);
            char *to = p.out.data + (int64_t)(request.first_row + first + t) * p.out.row +
                       head * p.out.head;
#pragma unroll
            for (int r = 0; r < D::warp_rows; r++) {
                if (lane_index() == r && group_dim + own + r < p.head_size_v) {
                    number_store(to, p.out.dtype, group_dim + own + r, out[r]);
                }
            }
            if (request.keeps_all) {
                store_state(p, request.slots[first + t], head, group_dim + own,
                            request.context + first + t + 1, m, rows);
            }
            if (p.checkpoint_interval > 0) {
                store_state(p, checkpoint_slot(p, request, first + t + 1), head, group_dim + own,
                            request.context + first + t + 1, m, rows);
            }
        }
    }
    if (!request.keeps_all) {
        store_state(p, request.slots[0], head, group_dim + own,
                    request.context + request.num_tokens, m, rows);
    }
}

/* Items are (request, head, rows of S). */
template <class D> GPU_INLINE void run_items(const gpu_delta_params &p, delta_memory<D> &m)
{
    int64_t items = (int64_t)p.num_reqs * p.num_v_heads * p.row_tiles;
    for (int64_t i = group_index(); i < items; i += group_count()) {
        int32_t r = (int32_t)(i / (p.num_v_heads * p.row_tiles));
        int32_t rest = (int32_t)(i - (int64_t)r * p.num_v_heads * p.row_tiles);
        delta_request request;
        if (enter_request(p, r, request) && !goes_in_chunks(p, request) &&
            !is_one_step(p, request)) {
            run_request(p, request, rest / p.row_tiles, rest % p.row_tiles, m);
        }
    }
}

GPU_KERNEL(delta_128, gpu_delta_params)
{
    GPU_SHARED delta_memory<delta_shape<128, DELTA_ROWS, GPU_THREADS_delta_128>> memory;
    run_items(p, memory);
}

GPU_KERNEL(delta_512, gpu_delta_params)
{
    GPU_SHARED delta_memory<delta_shape<512, DELTA_ROWS, GPU_THREADS_delta_512>> memory;
    run_items(p, memory);
}

GPU_KERNEL(rule_128, gpu_delta_params)
{
    GPU_SHARED delta_memory<delta_shape<128, DELTA_ROWS, GPU_THREADS_rule_128, true>> memory;
    run_items(p, memory);
}

GPU_KERNEL(rule_512, gpu_delta_params)
{
    GPU_SHARED delta_memory<delta_shape<512, DELTA_ROWS, GPU_THREADS_rule_512, true>> memory;
    run_items(p, memory);
}

/* Whole heads of up to DELTA_STEP_ROWS rows: q and k are computed once for all of them, and more of
 * the state is in flight at a time. */
GPU_KERNEL(delta_step, gpu_delta_params)
{
    GPU_SHARED delta_memory<delta_shape<128, DELTA_STEP_ROWS, GPU_THREADS_delta_step>> memory;
    run_items(p, memory);
}

/* Writes `count` inputs of a channel, starting with token t, to the front of its window in slot
 * `slot`. */
GPU_INLINE void store_window(const gpu_delta_params &p, const delta_request &request, int32_t slot,
                             int64_t channel, int32_t t, int32_t count)
{
    char *window = p.window + slot * p.window_slot + channel * p.window_channel;
    for (int32_t n = 0; n < count; n++) {
        number_store(window, p.window_dtype, n, mixed_number(p, request, t + n, channel));
    }
}

/* Writes the windows after the step, in a kernel after the delta rule since several heads read a
 * window. A thread has a channel of a request and moves its entries towards the front, so that none
 * is overwritten unread. With (h, x) the conv_width - 1 inputs before the step and its own, the
 * window becomes the last conv_width - 1 of them; if all states are kept, (h, x) without the first.
 * Windows of checkpoints are written first, since they may need the old one. */
GPU_KERNEL(delta_roll, gpu_delta_params)
{
    int64_t channels =
        2 * (int64_t)p.num_k_heads * p.head_size_k + (int64_t)p.num_v_heads * p.head_size_v;
    int64_t items = channels * p.num_reqs, step = (int64_t)group_count() * GPU_THREADS_delta_roll;
    int64_t first = (int64_t)group_index() * GPU_THREADS_delta_roll + thread_index();
    int32_t history = p.conv_width - 1, interval = p.checkpoint_interval;
    for (int64_t i = first; i < items; i += step) {
        int32_t r = (int32_t)(i / channels);
        int64_t channel = i - r * channels;
        delta_request request;
        if (!enter_request(p, r, request) || is_one_step(p, request)) {
            continue;
        }
        int32_t done = interval > 0 ? interval - request.context % interval : 0;
        for (; interval > 0 && done <= request.num_tokens; done += interval) {
            int32_t slot = checkpoint_slot(p, request, done);
            if (slot >= 0) {
                store_window(p, request, slot, channel, done - history, history);
            }
        }
        if (p.chunks_roll && goes_in_chunks(p, request)) {
            continue;
        }
        int32_t skipped = request.keeps_all ? 1 : request.num_tokens;
        store_window(p, request, request.slots[0], channel, skipped - history,
                     history + request.num_tokens - skipped);
    }
}

/* Element i of the heads from `head` on: what the norm takes of it, and its activated gate. */
GPU_INLINE float gated_output(const gpu_delta_norm_params &p, int64_t token, int32_t head,
                              int32_t i, float &gate)
{
    const int32_t dv = p.delta.head_size_v, h = head + i / dv, d = i % dv;
    const float x = number_load(p.delta.out.data + token * p.delta.out.row + h * p.delta.out.head,
                                p.delta.out.dtype, d);
    const float z =
        number_load(p.gate.data + token * p.gate.row + h * p.gate.head, p.gate.dtype, d);
    gate = p.sigmoid ? sigmoid(z) : silu(z);
    return p.gate_first ? x * gate : x;
}

/* A warp for each token and heads with one mean. */
GPU_KERNEL(delta_norm, gpu_delta_norm_params)
{
    const int32_t dv = p.delta.head_size_v, size = p.num_heads * dv;
    const int32_t groups = p.delta.num_v_heads / p.num_heads, first = p.delta.query_start[0];
    const int64_t items = (int64_t)(p.delta.num_tokens - first) * groups;
    for (int64_t item = warp_of_grid(GPU_THREADS_delta_norm); item < items;
         item += warps_of_grid(GPU_THREADS_delta_norm)) {
        const int32_t token = first + (int32_t)(item / groups);
        const int32_t head = (int32_t)(item % groups) * p.num_heads;
        delta_request request;
        if (token >= p.delta.query_start[p.delta.num_reqs] ||
            !enter_request(p.delta, find_last(p.delta.query_start, p.delta.num_reqs, token),
                           request)) {
            continue;
        }
        float sum = 0.0f, gate;
        for (int32_t i = lane_index(); i < size; i += GPU_LANES) {
            const float x = gated_output(p, token, head, i, gate);
            sum += x * x;
        }
        const float mean = warp_sum(sum) / (float)size;
        /* NaN of infinity: divided by it, the other outputs would be zeros */
        const float rms = sqrtf(mean + (mean - mean) + p.epsilon);
        for (int32_t i = lane_index(); i < size; i += GPU_LANES) {
            const int32_t h = head + i / dv, d = i % dv;
            const float x = gated_output(p, token, head, i, gate) / rms *
                            matrix_number(p.weight, 0, p.per_head ? h * dv + d : d);
            number_store(p.delta.out.data + token * p.delta.out.row + h * p.delta.out.head,
                         p.delta.out.dtype, d, p.gate_first ? x : x * gate);
        }
    }
}
