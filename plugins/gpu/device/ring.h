/* SPDX-License-Identifier: Apache-2.0 */
/* A request's ring of inputs (ATTN_CACHE_REPLAY) and the places in it. */
#ifndef GPU_DEVICE_RING_H
#define GPU_DEVICE_RING_H

#include "gpu/device/delta.h"

/* What a ring does to a request: its tokens that the state has not seen, and how many of the step's
 * are in the state that is written; 0: none is. */
struct ring_request {
    int32_t replayed, written;
};

GPU_INLINE bool enter_ring(const gpu_ring_params &p, int32_t r, const delta_request &request,
                           ring_request &ring)
{
    const int32_t drafted = p.delta.num_drafted;
    const bool is_short = request.num_tokens <= 1 + (p.delta.num_accepted != nullptr ? drafted : 0);
    ring.replayed = request.has_state ? p.ring_tokens[r] : 0;
    const bool stays = request.has_state && request.state_from == request.slots[0] &&
                       ring.replayed < p.rows - 2 * drafted - 1;
    ring.written = !is_short ? request.num_tokens : stays ? 0 : 1;
    return ring.replayed >= 0 && ring.replayed < p.rows - drafted &&
           ring.replayed <= request.context;
}

/* The row of token t of the step, below 0 of one before it. */
GPU_INLINE char *ring_row(const gpu_ring_params &p, const delta_request &request, int32_t slot,
                          int32_t t, int32_t head)
{
    const int32_t group = p.delta.num_v_heads / p.delta.num_k_heads;
    return p.ring + slot * p.ring_slot + (request.context + t) % p.rows * p.ring_row +
           head / group * p.ring_head;
}

/* Places in a row, in bytes: u and the gates of a value head. */
GPU_INLINE int32_t ring_u(const gpu_ring_params &p, int32_t head)
{
    const int32_t member = head % (p.delta.num_v_heads / p.delta.num_k_heads);
    return (p.delta.head_size_k + member * p.delta.head_size_v) * number_bytes_of(p.dtype);
}

GPU_INLINE int32_t ring_gates(const gpu_ring_params &p, int32_t head)
{
    const int32_t group = p.delta.num_v_heads / p.delta.num_k_heads, member = head % group;
    const int32_t inputs = p.delta.head_size_k + group * p.delta.head_size_v;
    return (inputs + inputs % 2) * number_bytes_of(p.dtype) + member * p.delta.rule.gates * 4;
}

#endif
