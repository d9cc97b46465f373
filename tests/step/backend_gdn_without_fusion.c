/* SPDX-License-Identifier: Apache-2.0 */
/* A backend for GDN in float32, with the least that one can have: the recurrence without a
 * convolution, a token at a time, no drafts. */
#include <attn/recurrent.h>
#include <math.h>

#include "float_backend.h"

ATTN_EXPORT int32_t seen_delta_requests; /* seen so far */

static float *row(const struct attn_tensor *t, int64_t i, int64_t j, int64_t width)
{
    int64_t first = t->strides != NULL ? t->strides[0] : t->shape[1] * width;
    int64_t second = t->strides != NULL ? t->strides[1] : width;
    return (float *)((char *)t->data + t->byte_offset) + i * first + j * second;
}

static void one_token(const struct attn_attend_args *a, const struct attn_recurrent_desc *g,
                      int64_t t, int32_t h, float *s)
{
    const struct attn_io_recurrent *io =
        (const struct attn_io_recurrent *)ext_of(a->next, ATTN_EXT_IO_RECURRENT);
    const struct attn_recurrent_weights *w =
        (const struct attn_recurrent_weights *)ext_of(a->params->next, ATTN_EXT_RECURRENT_WEIGHTS);
    int32_t head = h / (g->num_v_heads / g->num_k_heads), dk = g->head_size_k;
    const float *q = row(a->q, t, head, dk), *k = row(a->k, t, head, dk),
                *v = row(a->v, t, h, g->head_size_v);
    float x = *row(io->a, t, h, 1) + w->dt_bias[h], beta = 1 / (1 + expf(-*row(io->b, t, h, 1)));
    float decay = expf(-expf(w->a_log[h]) * (x > 20 ? x : log1pf(expf(x)))), nq = 1e-6f, nk = 1e-6f;
    for (int32_t i = 0; i < dk; i++) {
        nq += q[i] * q[i];
        nk += k[i] * k[i];
    }
    nq = g->qk_l2norm ? sqrtf(nq) : 1;
    nk = g->qk_l2norm ? sqrtf(nk) : 1;
    for (int32_t d = 0; d < g->head_size_v; d++) {
        float seen = 0, o = 0;
        for (int32_t i = 0; i < dk; i++) {
            s[d * dk + i] *= decay;
            seen += s[d * dk + i] * k[i] / nk;
        }
        for (int32_t i = 0; i < dk; i++) {
            s[d * dk + i] += beta * (v[d] - seen) * k[i] / nk;
            o += s[d * dk + i] * q[i] / nq * a->layer->scale;
        }
        row(a->out, t, h, g->head_size_v)[d] = o;
    }
}

static attn_status gated_delta(const struct attn_attend_args *a, struct attn_error *error)
{
    const struct attn_recurrent_desc *g =
        (const struct attn_recurrent_desc *)ext_of(a->layer->next, ATTN_EXT_RECURRENT_DESC);
    const struct attn_batch_recurrent *states =
        (const struct attn_batch_recurrent *)ext_of(a->batch->next, ATTN_EXT_BATCH_RECURRENT);
    int64_t stride = states->state_slots_stride > 0 ? states->state_slots_stride : 1;
    for (int32_t r = 0; r < a->batch->num_reqs; r++) {
        int32_t first = a->batch->query_start_loc[r], end = a->batch->query_start_loc[r + 1];
        int32_t slot = states->state_slots[r * stride];
        int started = states->has_initial_state != NULL ? states->has_initial_state[r]
                                                        : a->batch->seq_lens[r] > end - first;
        seen_delta_requests++;
        for (int32_t h = 0; h < g->num_v_heads && slot >= 0 && end > first; h++) {
            float *s = (float *)((char *)a->k_cache->data + slot * a->k_cache->stride_block +
                                 h * a->k_cache->stride_head);
            for (int32_t i = 0; i < g->head_size_v * g->head_size_k && !started; i++) {
                s[i] = 0;
            }
            for (int32_t t = first; t < end; t++) {
                one_token(a, g, t, h, s);
            }
        }
    }
    return ATTN_OK;
}

static const struct attn_kernels kernels = {.struct_size = sizeof kernels,
                                            .recurrent = gated_delta};

static attn_status probe(const struct attn_host *host, const struct attn_probe_sink *sink,
                         struct attn_error *error)
{
    const struct attn_recurrent_caps gdn = {.ext = {ATTN_EXT_CAPS_RECURRENT, 0, sizeof gdn, NULL},
                                            .head_size_k_max = 64,
                                            .head_size_v_max = 64};
    const struct attn_backend_caps caps = {.struct_size = sizeof caps,
                                           .next = &gdn.ext,
                                           .name = "gdn_without_fusion",
                                           .variant = "",
                                           .version = "0.1.0",
                                           .vendor = "you",
                                           .device = {ATTN_DEVICE_CPU, 0},
                                           .kernels = ATTN_KERNEL_RECURRENT,
                                           .layer_kinds = 1 << ATTN_LAYER_RECURRENT,
                                           .phases = 3,
                                           .dtypes = 1 << ATTN_DTYPE_F32,
                                           .terms = ATTN_TERM_CAUSAL,
                                           .output_forms = 1,
                                           .rank = {-1, -1}};
    attn_status status = sink->device(sink->user, &float_backend_cpu, error);
    return status == ATTN_OK ? sink->backend(sink->user, &caps, error) : status;
}

FLOAT_BACKEND_ENTRY("gdn_without_fusion")
