/* SPDX-License-Identifier: Apache-2.0 */
/* A peer of attn-bench: causal float32 attention by the formula, on the host. PEER_WRONG in the
 * environment doubles its outputs. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "bench/peer.h"

#define MAX_LAYERS 512

struct peer {
    const struct attn_layer_desc *layer;
    const struct attn_batch *batch;
    struct attn_kv_view k[MAX_LAYERS], v[MAX_LAYERS];
    const struct attn_step_io *io[MAX_LAYERS];
    int32_t count;
};

const char *peer_name(void)
{
    return "formula 1.0";
}

void *peer_create(const struct attn_layer_desc *layer, const struct attn_layer_params *params,
                  const struct attn_batch *batch, char *why)
{
    struct peer *peer = NULL;
    if (layer->dtype != ATTN_DTYPE_F32 || layer->kind != ATTN_LAYER_DECODER || params->sinks) {
        snprintf(why, 256, "takes plain layers of float32");
    } else {
        peer = calloc(1, sizeof *peer);
    }
    if (peer != NULL) {
        *peer = (struct peer){.layer = layer, .batch = batch};
    }
    return peer;
}

int peer_bind(void *user, const struct attn_kv_view *k, const struct attn_kv_view *v,
              const struct attn_step_io *io)
{
    struct peer *peer = user;
    if (peer->count == MAX_LAYERS) {
        return 1;
    }
    peer->k[peer->count] = *k;
    peer->v[peer->count] = *v;
    peer->io[peer->count++] = io;
    return 0;
}

static const float *row(const struct peer *peer, const struct attn_kv_view *view, int32_t request,
                        int32_t position, int32_t head)
{
    int32_t block =
        peer->batch
            ->block_table[request * peer->batch->block_table_stride + position / view->block_size];
    return (const float *)((const char *)view->data + block * view->stride_block +
                           position % view->block_size * view->stride_slot +
                           head * view->stride_head);
}

int peer_run(void *user, int32_t index)
{
    const struct peer *peer = user;
    const struct attn_batch *batch = peer->batch;
    const struct attn_kv_view *k = &peer->k[index], *v = &peer->v[index];
    const int32_t heads = peer->layer->num_q_heads, *starts = batch->query_start_loc_host;
    const float *q = peer->io[index]->q->data;
    float *out = peer->io[index]->out->data;
    const float scale = getenv("PEER_WRONG") != NULL ? 2.0f : 1.0f;
    for (int32_t r = 0; r < batch->num_reqs; r++) {
        for (int64_t i = (int64_t)starts[r] * heads; i < (int64_t)starts[r + 1] * heads; i++) {
            int32_t position = batch->seq_lens_host[r] - starts[r + 1] + (int32_t)(i / heads);
            int32_t head = (int32_t)(i % heads) / (heads / k->num_heads);
            double sum = 0, rows[512] = {0};
            for (int32_t j = 0; j <= position; j++) {
                const float *key = row(peer, k, r, j, head), *value = row(peer, v, r, j, head);
                double score = 0;
                for (int32_t d = 0; d < k->head_size; d++) {
                    score += (double)q[i * k->head_size + d] * key[d];
                }
                score = exp(score * peer->layer->scale);
                sum += score;
                for (int32_t d = 0; d < v->head_size; d++) {
                    rows[d] += score * value[d];
                }
            }
            for (int32_t d = 0; d < v->head_size; d++) {
                out[i * v->head_size + d] = scale * (float)(rows[d] / sum);
            }
        }
    }
    return 0;
}

void peer_destroy(void *user)
{
    free(user);
}
