/* SPDX-License-Identifier: Apache-2.0 */
/* Recurrent layers with a ring of inputs (ATTN_CACHE_REPLAY), in recurrent.cpp's words: S in
 * registers, the ring's tokens added to it, the step's own tokens stored, S written where it is
 * due. A step reads 4 Dv Dk bytes of a head and the rows of its ring. */
#include "gpu/device/ring.h"

#include "gpu/kernels/delta_rows.h"

/* k or u, by their width and without a branch, as state_load. */
GPU_INLINE float ring_number(const gpu_ring_params &p, const char *row, int32_t d)
{
    const uint32_t bits =
        p.dtype == ATTN_DTYPE_F32 ? ((const uint32_t *)row)[d] : ((const uint16_t *)row)[d];
    return p.dtype == ATTN_DTYPE_F16 ? float_of_half((uint16_t)bits)
                                     : bits_float(p.dtype == ATTN_DTYPE_BF16 ? bits << 16 : bits);
}

/* Adds the ring's tokens to the warp's rows, which begin with row `first_dim` of the head. */
template <class D>
GPU_INLINE void replay(const gpu_ring_params &p, const delta_request &request, int32_t replayed,
                       int32_t head, int32_t first_dim, delta_rows<D> &rows)
{
    for (int32_t t = -replayed; t < 0; t++) {
        const char *row = ring_row(p, request, request.state_from, t, head);
        const char *u = row + ring_u(p, head);
        const float *g = (const float *)(row + ring_gates(p, head));
        float k[D::count], decay[D::count];
#pragma unroll
        for (int i = 0; i < D::count; i++) {
            const int32_t d = i * GPU_LANES + lane_index();
            const bool real = d < p.delta.head_size_k;
            k[i] = real ? ring_number(p, row, d) : 0.0f;
            decay[i] = real ? expf(g[p.delta.rule.gates > 1 ? d : 0]) : 0.0f;
        }
#pragma unroll
        for (int r = 0; r < D::warp_rows; r++) {
            const float change =
                first_dim + r < p.delta.head_size_v ? ring_number(p, u, first_dim + r) : 0.0f;
#pragma unroll
            for (int i = 0; i < D::count; i++) {
                rows.s[r][i] = rows.s[r][i] * decay[i] + change * k[i];
            }
        }
    }
}

/* Stores the inputs of token t of the stretch: u of the warp's rows; one group stores a head's
 * gates, and one a key head's k. */
template <class D>
GPU_INLINE void store_ring(const gpu_ring_params &p, const delta_request &request,
                           const delta_memory<D> &m, int32_t first, int32_t t, int32_t head,
                           int32_t tile, int32_t own, const float (&out)[D::outs])
{
    const int32_t group = p.delta.num_v_heads / p.delta.num_k_heads, dim = tile * D::rows + own;
    char *row = ring_row(p, request, request.slots[0], first + t, head);
#pragma unroll
    for (int r = 0; r < D::warp_rows; r++) {
        if (lane_index() == r && dim + r < p.delta.head_size_v) {
            number_store(row + ring_u(p, head), p.dtype, dim + r, out[D::warp_rows + r]);
        }
    }
    for (int32_t d = (int32_t)thread_index(); tile == 0 && d < p.delta.head_size_k;
         d += D::threads) {
        if (head % group == 0) {
            number_store(row, p.dtype, d, m.k[t][d]);
        }
        if (d < p.delta.rule.gates) {
            float step = 0.0f;
            ((float *)(row + ring_gates(p, head)))[d] = log_decay(
                p.delta, request.first_row + first + t, head, head * p.delta.rule.gates + d, &step);
        }
    }
}

/* As run_request. Writes no row of the ring that is read. */
template <class D>
GPU_INLINE void run_ring(const gpu_ring_params &p, const delta_request &request,
                         const ring_request &ring, int32_t head, int32_t tile, delta_memory<D> &m)
{
    constexpr int stretch = STRETCH_OF(D::size);
    int32_t group_dim = tile * D::rows, own = warp_index() * D::warp_rows;
    delta_rows<D> rows;
    load_state(p.delta, request, head, group_dim + own, rows);
    replay(p, request, ring.replayed, head, group_dim + own, rows);
    for (int32_t first = 0; first < request.num_tokens; first += stretch) {
        int32_t count = min(stretch, request.num_tokens - first);
        sync_group(); /* the previous stretch has been read, and all warps have read the old state
                       */
        load_stretch(p.delta, request, first, count, head, group_dim, m);
        sync_group(); /* q and k are written */
        finish_stretch(p.delta, count, m);
        sync_group(); /* q and k are normalized */
        for (int32_t t = 0; t < count; t++) {
            float out[D::outs];
            run_token(p.delta, m, t, head, own, rows, out);
            char *to = p.delta.out.data +
                       (int64_t)(request.first_row + first + t) * p.delta.out.row +
                       head * p.delta.out.head;
#pragma unroll
            for (int r = 0; r < D::warp_rows; r++) {
                if (lane_index() == r && group_dim + own + r < p.delta.head_size_v) {
                    number_store(to, p.delta.out.dtype, group_dim + own + r, out[r]);
                }
            }
            if (first + t >= ring.written) {
                store_ring(p, request, m, first, t, head, tile, own, out);
            }
            const int32_t tokens = first + t + 1;
            const int32_t slot = tokens == ring.written ? request.slots[0] : -1;
            const int32_t kept =
                p.delta.checkpoint_interval > 0 ? checkpoint_slot(p.delta, request, tokens) : -1;
#pragma unroll 1
            for (int i = 0; i < 2; i++) {
                store_state(p.delta, i == 0 ? slot : kept, head, group_dim + own,
                            request.context + tokens, m, rows);
            }
        }
    }
}

/* Items as run_items has them. */
template <class D> GPU_INLINE void run_rings(const gpu_ring_params &p, delta_memory<D> &m)
{
    const int32_t heads = p.delta.num_v_heads * p.delta.row_tiles;
    for (int64_t i = group_index(); i < (int64_t)p.delta.num_reqs * heads; i += group_count()) {
        const int32_t r = (int32_t)(i / heads), rest = (int32_t)(i - (int64_t)r * heads);
        delta_request request;
        ring_request ring;
        if (enter_request(p.delta, r, request) && !goes_in_chunks(p.delta, request) &&
            !is_one_step(p.delta, request) && enter_ring(p, r, request, ring)) {
            run_ring(p, request, ring, rest / p.delta.row_tiles, rest % p.delta.row_tiles, m);
        }
    }
}

GPU_KERNEL(ring_128, gpu_ring_params)
{
    GPU_SHARED delta_memory<delta_shape<128, DELTA_ROWS, GPU_THREADS_ring_128, true, true>> memory;
    run_rings(p, memory);
}

GPU_KERNEL(ring_512, gpu_ring_params)
{
    GPU_SHARED delta_memory<delta_shape<512, DELTA_ROWS, GPU_THREADS_ring_512, true, true>> memory;
    run_rings(p, memory);
}
