/* SPDX-License-Identifier: Apache-2.0 */
#include <stdlib.h>
#include <string.h>

#include "ranks.h"
#include "shard.h"
#include "support/client.h"

enum { ROWS = MAX_BLOCKS * BLOCK };

void shard_slots(const struct shard *s, const struct fixture *f, int32_t r, int32_t first,
                 int32_t count, int64_t *slots)
{
    int64_t positions[ROWS];
    for (int32_t i = 0; i < count; i++) {
        positions[i] = first + i;
    }
    const struct attn_rank_keys keys =
        SIZED(attn_rank_keys, .rank = s->rank, .world_size = s->num_ranks,
              .interleave = s->interleave, .block_size = BLOCK, .positions = positions,
              .num_positions = count, .block_row = &s->table[r * MAX_BLOCKS]);
    assert_ok(f->api->context_parallel_slots(&keys, slots, NULL));
}

/* The context's rows from the full cache. */
static void fill(const struct shard *s, const struct fixture *f, const struct attn_kv_view *full,
                 const struct attn_kv_view *here)
{
    size_t row = (size_t)f->layer.head_size * sizeof(float);
    int64_t slots[ROWS];
    for (int32_t r = 0; r < f->batch.num_reqs; r++) {
        int32_t context = f->seq_lens[r] - (f->query_start_loc[r + 1] - f->query_start_loc[r]);
        shard_slots(s, f, r, 0, context, slots);
        for (int32_t j = 0; j < context; j++) {
            for (int32_t h = 0; h < full->num_heads && slots[j] >= 0; h++) {
                int32_t block = f->block_table[r * MAX_BLOCKS + j / BLOCK];
                memcpy((char *)here->data + slots[j] / BLOCK * here->stride_block +
                           slots[j] % BLOCK * here->stride_slot + h * here->stride_head,
                       (const char *)full->data + block * full->stride_block +
                           j % BLOCK * full->stride_slot + h * full->stride_head,
                       row);
            }
        }
    }
}

static void bind(struct shard *s, struct fixture *f, const struct attn_context_parallel *cp)
{
    struct attn_layer_desc layer = f->layer;
    const struct attn_layer_desc *layers[] = {&layer};
    const struct attn_layer_params params =
        SIZED(attn_layer_params, .sinks = layer.has_sinks ? f->sinks : NULL);
    struct attn_kv_view k = {.struct_size = sizeof k}, v = k, full_k = k, full_v = k;
    int32_t blocks = f->batch.num_reqs * MAX_BLOCKS;
    layer.next = &cp->ext;
    CHECK(f, client_model(f->api, f->runtime, CLIENT_ORDER("cpu_ref"), layers, 1, &s->model,
                          &f->error));
    attn_layer *bound = f->api->model_layer(s->model, 0);
    CHECK(f, client_cache(f->api, bound, blocks, NULL, &s->cache, &f->error));
    CHECK(f, client_views(f->api, bound, s->cache, blocks, &k, &v, &f->error));
    CHECK(f, f->api->layer_bind_params(bound, &params, &f->error));
    CHECK(f, client_views(f->api, f->api->model_layer(f->model, 0), f->cache, f->num_blocks,
                          &full_k, &full_v, &f->error));
    fill(s, f, &full_k, &k);
    fill(s, f, &full_v, &v);
}

void shard_init(struct shard *s, struct fixture *f, const struct attn_context_parallel *cp,
                int32_t rank, int32_t num_ranks)
{
    int32_t blocks = f->batch.num_reqs * MAX_BLOCKS;
    *s = (struct shard){.rank = rank, .num_ranks = num_ranks, .interleave = cp->interleave};
    for (int32_t i = 0; i < blocks; i++) {
        s->table[i] = blocks - 1 - i;
    }
    bind(s, f, cp);
    CHECK(f, client_plan(f->api, s->model, 0, CLIENT_PLAN(1, MAX_REQS, MAX_TOKENS, ROWS), &s->plan,
                         &s->workspace, &f->error));
}

void shard_finish(struct shard *s, const struct fixture *f)
{
    f->api->plan_destroy(s->plan);
    f->api->model_destroy(s->model);
    free(s->cache);
    free(s->workspace);
}
