/* SPDX-License-Identifier: Apache-2.0 */
/* MLA whose W_UK and W_UV are held in mxfp4: absorbed decodes, prefills per head over chunks of
 * context, sparse; and what is refused at selection and at bind. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "mla_fixture.h"
#include "support/client.h"
#include "support/random.h"

enum { MX = 32, HEADS = 4 };

/* Blocks of both lie along the latent row: w_uk [Hq, nope, rank], w_uv [Hq, rank, v]. */
static uint8_t uk[HEADS * NOPE * RANK / 2], uv[HEADS * RANK * V / 2];
static uint8_t uk_scales[HEADS * NOPE * RANK / MX], uv_scales[HEADS * RANK / MX * V];

struct mx_weights {
    struct attn_tensor w_uk, w_uv, w_uk_scale, w_uv_scale;
    struct attn_mla_weights weights;
};

static void put(uint8_t *codes, int64_t at, int32_t code)
{
    codes[at / 2] =
        (uint8_t)(at % 2 ? (codes[at / 2] & 15) | code << 4 : (codes[at / 2] & 0xf0) | code);
}

/* Codes and powers of two at random; what they stand for becomes what the formula reads. */
static void encode(struct mla *m)
{
    static const double values[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
    uint64_t random = 5;
    for (int32_t i = 0; i < HEADS * (NOPE + V) * RANK; i++) {
        int32_t h = i / ((NOPE + V) * RANK), r = i / RANK % (NOPE + V), d = i % RANK;
        int32_t power = 122 + (h + r + d / MX) % 4, v = r - NOPE;
        int32_t code = random_below(&random, 16);
        m->weights[i] = (float)((code & 8 ? -1 : 1) * values[code & 7] * ldexp(1, power - 127));
        if (r < NOPE) {
            put(uk, (h * NOPE + r) * RANK + d, code);
            uk_scales[(h * NOPE + r) * (RANK / MX) + d / MX] = (uint8_t)power;
        } else {
            put(uv, (h * RANK + d) * V + v, code);
            uv_scales[(h * (RANK / MX) + d / MX) * V + v] = (uint8_t)power;
        }
    }
}

static void describe_weights(struct mla *m, struct mx_weights *w)
{
    w->w_uk = *tensor(m, 0, uk, 3, HEADS, NOPE, RANK, NOPE * RANK, RANK);
    w->w_uv = *tensor(m, 1, uv, 3, HEADS, RANK, V, RANK * V, V);
    w->w_uk_scale =
        *tensor(m, 2, uk_scales, 3, HEADS, NOPE, RANK / MX, NOPE * RANK / MX, RANK / MX);
    w->w_uv_scale = *tensor(m, 3, uv_scales, 3, HEADS, RANK / MX, V, RANK / MX * V, V);
    w->w_uk.dtype = w->w_uv.dtype = (struct attn_dtype){ATTN_CODE_FLOAT4_E2M1FN, 4, 1};
    w->w_uk_scale.dtype = w->w_uv_scale.dtype = (struct attn_dtype){ATTN_CODE_FLOAT8_E8M0FNU, 8, 1};
    w->weights =
        (struct attn_mla_weights){.ext = {ATTN_EXT_MLA_WEIGHTS, 0, sizeof w->weights, NULL},
                                  .w_uk = &w->w_uk,
                                  .w_uv = &w->w_uv,
                                  .w_uk_scale = &w->w_uk_scale,
                                  .w_uv_scale = &w->w_uv_scale};
}

/* The fixture's model over again, its cache with the contexts kept, for weights in mxfp4. */
static attn_layer *select_mxfp4(struct mla *m)
{
    const struct attn_layer_desc *layers[] = {&m->layer};
    struct attn_kv_view k = {.struct_size = sizeof k};
    m->api->plan_destroy(m->plan);
    m->api->model_destroy(m->model);
    m->plan = NULL;
    m->desc.weight_dtype = ATTN_DTYPE_MXFP4;
    CHECK(m, client_model(m->api, m->runtime, CLIENT_ORDER(m->s->backend), layers, 1, &m->model,
                          &m->error));
    attn_layer *layer = m->api->model_layer(m->model, 0);
    CHECK(m, client_views(m->api, layer, m->cache, NUM_BLOCKS, &k, NULL, &m->error));
    CHECK(m, client_bind(m->api, layer, &k, NULL, &m->error));
    return layer;
}

static void hold(const struct setting *s, bool per_head)
{
    OWNED(mla_end) struct mla *m = mla_create(s);
    struct mx_weights w;
    attn_layer *layer = select_mxfp4(m);
    encode(m);
    describe_weights(m, &w);
    const struct attn_layer_params params = {.struct_size = sizeof params, .next = &w.weights.ext};
    CHECK(m, m->api->layer_bind_params(layer, &params, &m->error));
    free(m->workspace);
    CHECK(m, client_plan(m->api, m->model, 0, CLIENT_LIMITS(MAX_REQS, 100, MAX_LENGTH), &m->plan,
                         &m->workspace, &m->error));
    set_io(m, stage_keys(m, false));
    step(m);
    compare(m, per_head);
}

TEST(test_decode)
{
    hold(&(struct setting){"cpu_ref", .heads = HEADS, .num_reqs = 4, .queries = {1, 1, 1, 1},
                           .lens = {30, 1, 41, 12}},
         true);
}

TEST(test_prefill)
{
    hold(&(struct setting){"cpu_ref", .heads = HEADS, .chunk = 8, .num_reqs = 3,
                           .queries = {1, 5, 3}, .lens = {30, 20, 3}},
         true);
}

TEST(test_sparse)
{
    hold(&(struct setting){"cpu_ref", .heads = HEADS, .topk = 6, .num_reqs = 3,
                           .queries = {1, 5, 3}, .lens = {30, 20, 3}},
         false);
}

TEST(test_refused_at_selection)
{
    const struct setting s = {"cpu_ref", .heads = HEADS, .num_reqs = 1, .queries = {1},
                              .lens = {30}};
    const struct attn_select_options options = {.struct_size = sizeof options,
                                                .backend = "latent_only"};
    OWNED(mla_end) struct mla *m = mla_create(&s);
    const struct attn_layer_desc *layers[] = {&m->layer};
    attn_assignment *assignment;
    CHECK(m, m->api->select(m->runtime, &options, layers, 1, &assignment, &m->error));
    m->api->assignment_destroy(assignment);
    m->desc.weight_dtype = ATTN_DTYPE_MXFP4;
    assert_int_not_equal(m->api->select(m->runtime, &options, layers, 1, &assignment, &m->error),
                         ATTN_OK);
    assert_non_null(strstr(m->error.message, "weight_dtype"));
    assert_non_null(strstr(m->error.message, "mxfp4"));
    m->desc.weight_dtype = 15;
    assert_int_not_equal(m->api->select(m->runtime, NULL, layers, 1, &assignment, &m->error),
                         ATTN_OK);
    assert_non_null(strstr(m->error.message, "weight_dtype is 15; 0 to 7, or 16 (mxfp4)"));
}

static void refuse(struct mla *m, attn_layer *layer, const struct mx_weights *w, const char *field)
{
    const struct attn_layer_params params = {.struct_size = sizeof params, .next = &w->weights.ext};
    m->error = (struct attn_error)ATTN_ERROR_INIT;
    INVALID(&m->error, field, m->api->layer_bind_params(layer, &params, &m->error));
}

TEST(test_refused_at_bind)
{
    const struct setting s = {"cpu_ref", .heads = HEADS, .num_reqs = 1, .queries = {1},
                              .lens = {30}};
    OWNED(mla_end) struct mla *m = mla_create(&s);
    struct mx_weights w;
    m->api->plan_destroy(m->plan);
    m->plan = NULL;
    describe_weights(m, &w); /* not what the layer said */
    refuse(m, m->api->model_layer(m->model, 0), &w, "w_uk");
    attn_layer *layer = select_mxfp4(m);
    w.weights.w_uk_scale = NULL;
    refuse(m, layer, &w, "w_uk_scale");
    w.weights.w_uk_scale = w.weights.w_uv_scale;
    refuse(m, layer, &w, "w_uk_scale");
    describe_weights(m, &w);
    w.w_uv_scale.dtype = (struct attn_dtype){ATTN_CODE_FLOAT, 32, 1};
    refuse(m, layer, &w, "w_uv_scale");
    describe_weights(m, &w);
    w.w_uv.dtype = (struct attn_dtype){ATTN_CODE_FLOAT, 32, 1};
    refuse(m, layer, &w, "w_uv");
    describe_weights(m, &w);
    w.weights.kv_b_proj = tensor(m, 4, m->weights, 2, HEADS * (NOPE + V), RANK, 0, RANK, 1);
    refuse(m, layer, &w, "kv_b_proj");
}
