/* SPDX-License-Identifier: Apache-2.0 */
#include "history.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "support/client.h"
#include "support/number.h"
#include "support/random.h"
#include "support/test.h"

/* One group's batch, with the arrays behind it. */
struct step_batch {
    struct attn_batch batch;
    int32_t starts[H_REQS + 1], lens[H_REQS], table[H_REQS][H_BLOCKS];
    int64_t slots[H_TOKENS];
};

/* One layer's tensors: bf16, [T + padding, heads, H_D]. */
struct step_rows {
    uint16_t q[H_TOKENS][H_HQ][H_D], k[H_TOKENS][H_HK][H_D], v[H_TOKENS][H_HK][H_D],
        out[H_TOKENS][H_HQ][H_D];
    int64_t shapes[4][3];
    struct attn_tensor tensors[4];
};

static void bf16_store(uint16_t *row, int32_t at, double value)
{
    number_store(row, at, ATTN_DTYPE_BF16, value);
}

static double bf16_load(const uint16_t *row, int32_t at)
{
    return number_load(row, at, ATTN_DTYPE_BF16);
}

static void describe(struct history *h, const struct attn_layer_desc *layers)
{
    static const char *const names[H_LAYERS] = {"a", "b", "c", "d", "e", "f"};
    for (int32_t i = 0; i < h->num_layers; i++) {
        struct attn_layer_desc *desc = &h->layers[i].desc;
        *desc = layers[i];
        desc->struct_size = sizeof *desc;
        desc->name = names[i];
        desc->causal = 1;
        desc->dtype = ATTN_DTYPE_BF16;
        desc->num_q_heads = H_HQ;
        desc->num_kv_heads = H_HK;
        desc->head_size = H_D;
        desc->scale = 0.5f;
        desc->block_size = H_BLOCK;
        h->layers[i].owner = i;
        for (int32_t j = 0; desc->kv_sharing_target != NULL && j < i; j++) {
            h->layers[i].owner =
                strcmp(desc->kv_sharing_target, names[j]) == 0 ? j : h->layers[i].owner;
        }
    }
}

static void bind_layer(struct history *h, int32_t index)
{
    struct history_layer *l = &h->layers[index];
    attn_layer *layer = h->api->model_layer(h->model, index);
    void *cache;
    l->group = h->api->layer_group(layer, ATTN_GROUP_BLOCK_TABLE, 0);
    CHECK(h, client_cache(h->api, layer, H_POOL, &l->spec, &cache, &h->error));
    l->cache = cache;
    l->cache_bytes = (size_t)(H_POOL * l->spec.padded_page_bytes);
    assert_true((l->owner == index) == (l->spec.kind != ATTN_KV_SPEC_NONE));
    l->scale = 0.009f; /* of fp8, where it may not stand for no scale */
    for (int32_t i = 0; i < H_HK * H_D; i++) {
        l->v_channel_scale[i] = 0.008f * (float)(1 + i % 5 * 0.25);
    }
    const struct attn_kv_quant_params quant = {
        .ext = {.id = ATTN_EXT_KV_QUANT_PARAMS, .struct_size = sizeof quant},
        .v_channel_scale = l->v_channel_scale};
    const int32_t kv = l->desc.kv_dtype;
    const bool fp8 = kv == ATTN_KV_FP8_E4M3 || kv == ATTN_KV_FP8_E5M2;
    const struct attn_layer_params params = {.struct_size = sizeof params,
                                             .next = kv == ATTN_KV_INT8_KV ? &quant.ext : NULL,
                                             .k_scale_host = fp8 ? l->scale : 0,
                                             .v_scale_host = fp8 ? l->scale : 0};
    CHECK(h, h->api->layer_bind_params(layer, &params, &h->error));
}

void history_init(struct history *h, const char *backend, const struct attn_layer_desc *layers,
                  int32_t num_layers)
{
    const struct attn_runtime_options options = client_options(PLUGINS);
    const struct attn_layer_desc *descs[H_LAYERS];
    memset(h, 0, sizeof *h);
    h->error = (struct attn_error)ATTN_ERROR_INIT;
    h->num_layers = num_layers;
    h->random = 4711;
    CHECK(h, client_open(CORE_FILE, &options, &h->api, &h->runtime, &h->error));
    describe(h, layers);
    for (int32_t i = 0; i < num_layers; i++) {
        descs[i] = &h->layers[i].desc;
    }
    CHECK(h, client_model(h->api, h->runtime, CLIENT_ORDER(backend), descs, num_layers, &h->model,
                          &h->error));
    for (int32_t i = 0; i < num_layers; i++) {
        bind_layer(h, i);
    }
    h->num_groups = h->api->model_num_groups(h->model, ATTN_GROUP_BLOCK_TABLE);
    for (int32_t g = 0; g < h->num_groups; g++) {
        CHECK(h, client_plan(h->api, h->model, g, CLIENT_LIMITS(H_REQS, H_TOKENS, H_KEYS),
                             &h->plans[g], &h->workspaces[g], &h->error));
    }
}

void history_finish(struct history *h)
{
    for (int32_t g = 0; g < h->num_groups; g++) {
        h->api->plan_destroy(h->plans[g]);
        free(h->workspaces[g]);
    }
    h->api->model_destroy(h->model);
    h->api->runtime_destroy(h->runtime);
    for (int32_t i = 0; i < h->num_layers; i++) {
        free(h->layers[i].cache);
    }
}

/* Every group spreads its blocks over its pool in an order of its own. */
static void make_batch(const struct history *h, const int32_t *query_lens, int32_t group,
                       struct step_batch *s)
{
    int32_t tokens = 0;
    memset(s, 0, sizeof *s);
    for (int32_t r = 0; r < H_REQS; r++) {
        s->lens[r] = h->lens[r] + query_lens[r];
        assert_true(s->lens[r] <= H_KEYS);
        for (int32_t b = 0; b < H_BLOCKS; b++) {
            int32_t block = ((r * H_BLOCKS + b) * (7 + group) + 3 * group) % H_POOL;
            s->table[r][b] = b * H_BLOCK < s->lens[r] ? block : INT32_MIN;
        }
        for (int32_t j = h->lens[r]; j < s->lens[r]; j++) {
            s->slots[tokens++] = (int64_t)s->table[r][j / H_BLOCK] * H_BLOCK + j % H_BLOCK;
        }
        s->starts[r + 1] = tokens;
    }
    s->batch = (struct attn_batch){.struct_size = sizeof s->batch,
                                   .num_reqs = H_REQS,
                                   .num_tokens = tokens,
                                   .num_actual_tokens = tokens,
                                   .query_start_loc = s->starts,
                                   .query_start_loc_host = s->starts,
                                   .seq_lens = s->lens,
                                   .seq_lens_host = s->lens,
                                   .block_table = s->table[0],
                                   .block_table_stride = H_BLOCKS,
                                   .slot_mapping = s->slots,
                                   .num_slots = tokens};
}

static void fill_rows(struct history *h, const struct step_batch *s, struct history_layer *l,
                      struct step_rows *rows)
{
    static const int64_t heads[] = {H_HQ, H_HK, H_HK, H_HQ};
    void *const data[] = {rows->q, rows->k, rows->v, rows->out};
    memset(rows, 0xff, sizeof *rows);
    for (int32_t r = 0; r < H_REQS; r++) {
        for (int32_t t = s->starts[r]; t < s->starts[r + 1]; t++) {
            int32_t j = h->lens[r] + t - s->starts[r];
            for (int32_t i = 0; i < H_HQ * H_D; i++) {
                bf16_store(rows->q[t][i / H_D], i % H_D, random_within(&h->random, 4));
            }
            for (int32_t i = 0; i < H_HK * H_D; i++) {
                int32_t head = i / H_D, d = i % H_D;
                bf16_store(rows->k[t][head], d, random_within(&h->random, 2));
                bf16_store(rows->v[t][head], d, random_within(&h->random, 1));
                l->k[r][j][head][d] = bf16_load(rows->k[t][head], d);
                l->v[r][j][head][d] = bf16_load(rows->v[t][head], d);
            }
            for (int32_t head = 0; head < H_HK; head++) {
                unpaged_store(l, false, head, l->k[r][j][head]);
                unpaged_store(l, true, head, l->v[r][j][head]);
            }
        }
    }
    for (int32_t i = 0; i < 4; i++) {
        rows->shapes[i][0] = s->batch.num_tokens + H_PADDING;
        rows->shapes[i][1] = heads[i];
        rows->shapes[i][2] = H_D;
        rows->tensors[i] = (struct attn_tensor){
            data[i], {ATTN_DEVICE_CPU, 0}, 3, {ATTN_CODE_BFLOAT, 16, 1}, rows->shapes[i], NULL, 0};
    }
}

static void run_layer(struct history *h, int32_t index, enum history_way way,
                      struct step_rows *rows)
{
    const struct history_layer *l = &h->layers[index];
    bool writes = l->owner == index;
    struct attn_step_io io = {.struct_size = sizeof io,
                              .q = &rows->tensors[0],
                              .k = writes ? &rows->tensors[1] : NULL,
                              .v = writes ? &rows->tensors[2] : NULL,
                              .out = &rows->tensors[3]};
    attn_layer *layer = h->api->model_layer(h->model, index);
    if (way == HISTORY_APART && writes) {
        io.flags = ATTN_RUN_NO_ATTEND;
        CHECK(h, h->api->run(h->plans[l->group], layer, &io, &h->error));
        io.flags = ATTN_RUN_NO_WRITE;
    }
    CHECK(h, h->api->run(h->plans[l->group], layer, &io, &h->error));
}

/* Half of bf16's last place at a value. */
static double rounding(double value)
{
    int32_t exponent;
    frexp(value, &exponent); /* in [2^(exponent - 1), 2^exponent) */
    return ldexp(1, exponent - 9);
}

/* cpu_ref computes in float64, so what remains is the output's own rounding. */
static void hold_rows(const struct history *h, const struct step_batch *s, int32_t index,
                      const struct step_rows *rows)
{
    const struct history_layer *l = &h->layers[index];
    for (int32_t r = 0; r < H_REQS; r++) {
        for (int32_t t = s->starts[r]; t < s->starts[r + 1]; t++) {
            double q[H_HQ * H_D], right[H_HQ * H_D];
            for (int32_t i = 0; i < H_HQ * H_D; i++) {
                q[i] = bf16_load(rows->q[t][i / H_D], i % H_D);
            }
            unpaged_attend(l, &h->layers[l->owner], r, h->lens[r] + t - s->starts[r], q, right);
            for (int32_t i = 0; i < H_HQ * H_D; i++) {
                double found = bf16_load(rows->out[t][i / H_D], i % H_D);
                if (!(fabs(found - right[i]) <= rounding(right[i]) + 1e-6)) {
                    fail_msg("layer '%s', request %d, row %d, head %d, dim %d: %g, not %g",
                             l->desc.name, r, t, i / H_D, i % H_D, found, right[i]);
                }
            }
        }
    }
    for (int32_t t = s->starts[H_REQS]; t < s->starts[H_REQS] + H_PADDING; t++) {
        assert_int_equal(rows->out[t][0][0], 0xffff);
        assert_int_equal(rows->out[t][H_HQ - 1][H_D - 1], 0xffff);
    }
}

void history_step(struct history *h, const int32_t *query_lens, enum history_way way)
{
    struct step_batch *batches = calloc(H_LAYERS, sizeof *batches);
    struct step_rows *rows = malloc(sizeof *rows);
    for (int32_t g = 0; g < h->num_groups; g++) {
        make_batch(h, query_lens, g, &batches[g]);
        CHECK(h, h->api->plan_batch(h->plans[g], &batches[g].batch, NULL, &h->error));
    }
    for (int32_t i = 0; i < h->num_layers; i++) {
        const struct step_batch *s = &batches[h->layers[i].group];
        fill_rows(h, s, &h->layers[i], rows);
        run_layer(h, i, way, rows);
        hold_rows(h, s, i, rows);
    }
    for (int32_t r = 0; r < H_REQS; r++) {
        h->lens[r] += query_lens[r];
    }
    free(rows);
    free(batches);
}
