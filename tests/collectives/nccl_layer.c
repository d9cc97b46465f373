/* SPDX-License-Identifier: Apache-2.0 */
#include "nccl_layer.h"

#include <stdlib.h>
#include <string.h>

bool trial_open(struct trial *t)
{
    struct attn_runtime_options options = client_options(t->rank->plugins);
    TRY(t, client_open(t->rank->core, &options, &t->api, &t->runtime, &t->error));
    return true;
}

void *trial_keep(struct trial *t, const void *bytes, size_t size)
{
    void *memory = device_copy(bytes, size);
    HOLD(t->rank, memory != NULL && t->num_used < 64, "no device memory for %zu bytes", size);
    t->used[t->num_used++ % 64] = memory;
    return memory;
}

void trial_release(struct trial *t)
{
    cudaStreamSynchronize(t->rank->stream);
    for (int32_t i = 0; i < t->num_used && i < 64; i++) {
        cudaFree(t->used[i]);
    }
    t->num_used = 0;
    free(t->tables);
    t->tables = NULL;
}

bool trial_tables(struct trial *t, const struct geometry *g)
{
    int32_t all = g->reqs * g->blocks;
    t->tables = calloc((size_t)all, sizeof *t->tables);
    for (int32_t i = 0; t->tables != NULL && i < all; i++) {
        t->tables[i] = all - 1 - i;
    }
    return t->tables != NULL;
}

static float random_value(uint32_t *state)
{
    *state = *state * 1664525u + 1013904223u;
    return (float)(*state >> 8) / (1 << 24) - 0.5f;
}

/* [rows, heads, size] of the layer's dtype on the device; heads 0: [rows, size]. */
static struct attn_tensor random_rows(struct trial *t, int32_t dtype, uint32_t seed, int64_t rows,
                                      int64_t heads, int64_t size, float scale, int64_t *shape)
{
    int64_t count = rows * (heads > 0 ? heads : 1) * size;
    bool wide = dtype == ATTN_DTYPE_F32;
    size_t bytes = (size_t)count * (wide ? 4 : 2);
    char *host = calloc(1, bytes + 4);
    for (int64_t i = 0; i < count; i++) {
        float value = scale * random_value(&seed);
        memcpy(host + i * (wide ? 4 : 2), (char *)&value + (wide ? 0 : 2), wide ? 4 : 2);
    }
    shape[0] = rows, shape[1] = heads > 0 ? heads : size, shape[2] = size;
    struct attn_tensor tensor = {trial_keep(t, host, bytes),
                                 {ATTN_DEVICE_CUDA, t->rank->ranks->rank},
                                 heads > 0 ? 3 : 2,
                                 {wide ? ATTN_CODE_FLOAT : ATTN_CODE_BFLOAT, wide ? 32 : 16, 1},
                                 shape,
                                 NULL,
                                 0};
    free(host);
    return tensor;
}

struct run_tensors *run_tensors(struct trial *t, const struct geometry *g, int64_t tokens,
                                uint32_t seed, bool attends)
{
    struct run_tensors *r = calloc(1, sizeof *r);
    const bool latent = g->hk == 0;
    const uint32_t own = 900 + (uint32_t)t->rank->ranks->rank;
    r->io = SIZED(attn_step_io, .flags = attends ? 0 : ATTN_RUN_NO_ATTEND);
    r->k = random_rows(t, g->dtype, seed, tokens, g->hk, latent ? LATENT : g->d, 4, r->shapes[0]);
    r->v = random_rows(t, g->dtype, seed + 1, tokens, g->hk, latent ? ROPE : g->d, 2, r->shapes[1]);
    if (attends) {
        r->q = random_rows(t, g->dtype, own, tokens, g->hq, g->d, 4, r->shapes[2]);
        r->out = random_rows(t, g->dtype, seed + 2, tokens, g->hq, g->d, 99, r->shapes[3]);
        r->shapes[4][0] = g->hq, r->shapes[4][1] = tokens;
        r->lse = (struct attn_tensor){trial_keep(t, NULL, (size_t)(g->hq * tokens) * 4),
                                      r->q.device,
                                      2,
                                      {ATTN_CODE_FLOAT, 32, 1},
                                      r->shapes[4],
                                      NULL,
                                      0};
        r->io.out = &r->out, r->io.lse = &r->lse;
    }
    if (latent) {
        r->mla = EXTENSION(attn_io_mla, ATTN_EXT_IO_MLA, NULL, .kv_c = &r->k, .k_pe = &r->v);
        if (attends) {
            r->q_pe = random_rows(t, g->dtype, own + 50, tokens, g->hq, ROPE, 1, r->shapes[5]);
            r->mla.q_nope = &r->q, r->mla.q_pe = &r->q_pe;
        }
        r->io.next = &r->mla.ext;
    } else {
        r->io.k = &r->k, r->io.v = &r->v, r->io.q = attends ? &r->q : NULL;
    }
    return r;
}

/* MLA's weights, this rank's own heads'. */
static bool bind_weights(struct trial *t, const struct geometry *g, attn_layer *layer)
{
    int64_t shape[3];
    struct attn_tensor rows =
        random_rows(t, g->dtype, 7, (int64_t)g->hq * 2 * g->d, 0, LATENT, 0.04f, shape);
    struct attn_mla_weights weights =
        EXTENSION(attn_mla_weights, ATTN_EXT_MLA_WEIGHTS, NULL, .kv_b_proj = &rows);
    struct attn_layer_params params = SIZED(attn_layer_params, .next = &weights.ext);
    TRY(t, t->api->layer_bind_params(layer, &params, &t->error));
    return true;
}

bool planned_layer_init(struct trial *t, struct planned_layer *s)
{
    const struct geometry *g = &s->geometry;
    const bool latent = g->hk == 0;
    const struct attn_mla_desc mla =
        EXTENSION(attn_mla_desc, ATTN_EXT_MLA_DESC, s->cp != NULL ? &s->cp->ext : NULL,
                  .kv_lora_rank = LATENT, .qk_nope_head_dim = g->d, .qk_rope_head_dim = ROPE,
                  .v_head_dim = g->d, .absorb_in_core = 1);
    const struct attn_layer_desc desc =
        SIZED(attn_layer_desc, .next = latent ? &mla.ext : mla.ext.next, .name = "layer",
              .kind = latent ? ATTN_LAYER_MLA : ATTN_LAYER_DECODER, .causal = 1, .dtype = g->dtype,
              .num_q_heads = g->hq, .num_kv_heads = latent ? 1 : g->hk,
              .head_size = latent ? LATENT + ROPE : g->d, .head_size_v = latent ? g->d : 0,
              .scale = 0.1f, .block_size = g->block, .needs_lse = 1);
    const struct attn_layer_desc *layers[] = {&desc};
    const struct attn_select_options options =
        SIZED(attn_select_options, .device = {ATTN_DEVICE_CUDA, t->rank->ranks->rank},
              .backend = "cuda_flash");
    const int64_t blocks = (int64_t)g->reqs * g->blocks;
    struct attn_cache_spec spec = {.struct_size = sizeof spec};
    struct attn_kv_view k = {.struct_size = sizeof k}, v = k;
    TRY(t, t->api->select(t->runtime, &options, layers, 1, &s->assignment, &t->error));
    TRY(t, t->api->model_create(t->runtime, s->assignment, NULL, &s->model, &t->error));
    attn_layer *layer = t->api->model_layer(s->model, 0);
    TRY(t, t->api->layer_cache_spec(layer, 0, &spec, &t->error));
    s->cache_bytes = (size_t)(blocks * spec.padded_page_bytes);
    s->cache = trial_keep(t, NULL, s->cache_bytes);
    TRY(t, client_views(t->api, layer, s->cache, blocks, &k, latent ? NULL : &v, &t->error));
    TRY(t, client_bind(t->api, layer, &k, latent ? NULL : &v, &t->error));
    if (latent && !bind_weights(t, g, layer)) {
        return false;
    }
    TRY(t, t->api->plan_create(s->model, 0,
                               CLIENT_LIMITS(g->reqs, NCCL_MAX_ROWS, g->blocks * g->block),
                               &s->plan, &t->error));
    size_t bytes = client_workspace_bytes(t->api, s->plan);
    s->workspace = trial_keep(t, NULL, bytes);
    TRY(t, client_bind_workspace(t->api, s->plan, s->workspace, bytes, &t->error));
    return true;
}

void planned_layer_finish(struct trial *t, struct planned_layer *s)
{
    t->api->plan_destroy(s->plan);
    t->api->model_destroy(s->model);
    t->api->assignment_destroy(s->assignment);
}

/* Slots of the new positions of all requests into slots[], where each begins into starts[]. */
static bool find_slots(struct trial *t, const struct planned_layer *s, const int32_t *first,
                       const int32_t *end, int32_t *starts, int64_t *slots)
{
    const struct geometry *g = &s->geometry;
    int64_t positions[NCCL_MAX_ROWS];
    int32_t n = s->cp != NULL ? s->cp->decode->world_size : 1;
    int32_t me = s->cp != NULL ? s->cp->decode->rank : 0;
    for (int32_t r = 0; r < g->reqs; r++) {
        int32_t count = end[r] - first[r];
        starts[r + 1] = starts[r] + count;
        for (int32_t i = 0; i < count; i++) {
            positions[i] = first[r] + i;
        }
        const struct attn_rank_keys keys =
            SIZED(attn_rank_keys, .rank = me, .world_size = n,
                  .interleave = s->cp != NULL ? s->cp->interleave : 1, .block_size = g->block,
                  .positions = positions, .num_positions = count,
                  .block_row = t->tables + (size_t)r * (size_t)g->blocks);
        TRY(t, t->api->context_parallel_slots(&keys, slots + starts[r], &t->error));
    }
    return true;
}

bool planned_layer_plan(struct trial *t, struct planned_layer *s, const int32_t *first,
                        const int32_t *end)
{
    const struct geometry *g = &s->geometry;
    int32_t starts[NCCL_MAX_REQS + 1] = {0};
    int64_t slots[NCCL_MAX_ROWS];
    if (!find_slots(t, s, first, end, starts, slots)) {
        return false;
    }
    size_t tables = (size_t)g->reqs * (size_t)g->blocks * sizeof *t->tables;
    const struct attn_batch batch =
        SIZED(attn_batch, .num_reqs = g->reqs, .num_tokens = starts[g->reqs],
              .num_actual_tokens = starts[g->reqs],
              .query_start_loc = trial_keep(t, starts, (size_t)(g->reqs + 1) * sizeof *starts),
              .query_start_loc_host = starts,
              .seq_lens = trial_keep(t, end, (size_t)g->reqs * sizeof *end), .seq_lens_host = end,
              .block_table = trial_keep(t, t->tables, tables), .block_table_stride = g->blocks,
              .slot_mapping = trial_keep(t, slots, (size_t)starts[g->reqs] * sizeof *slots),
              .num_slots = starts[g->reqs]);
    TRY(t, t->api->plan_batch(s->plan, &batch, t->rank->stream, &t->error));
    return true;
}

cudaGraphExec_t planned_layer_capture(struct trial *t, struct planned_layer *s,
                                      struct attn_step_io *io, int32_t runs)
{
    cudaStream_t stream = t->rank->stream;
    cudaGraph_t captured = NULL;
    cudaGraphExec_t exec = NULL;
    attn_status status = ATTN_OK;
    io->stream = stream;
    HOLD(t->rank, cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal) == cudaSuccess,
         "no capture");
    for (int32_t i = 0; i < runs && status == ATTN_OK; i++) {
        status = t->api->run(s->plan, t->api->model_layer(s->model, 0), io, &t->error);
    }
    cudaError_t ended = cudaStreamEndCapture(stream, &captured);
    HOLD(t->rank, status == ATTN_OK, "run in a capture: %s: %s", t->error.field, t->error.message);
    ended = ended == cudaSuccess ? cudaGraphInstantiate(&exec, captured, 0) : ended;
    HOLD(t->rank, ended == cudaSuccess, "the capture: %s", cudaGetErrorString(ended));
    cudaGraphDestroy(captured);
    return status == ATTN_OK && ended == cudaSuccess ? exec : NULL;
}
