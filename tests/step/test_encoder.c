/* SPDX-License-Identifier: Apache-2.0 */
/* A multimodal encoder in fp8: over more steps than the history is deep the outputs are those of
 * the formula in float64, scale = largest amax of the last n steps / 448, with e4m3 rounded here.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include <attn/api.h>
#include <attn/draft/mm_encoder.h>

#include "support/client.h"
#include "support/number.h"
#include "support/oracle.h"
#include "support/random.h"
#include "support/tensor.h"
#include "support/test.h"

enum { REQS = 3, TOKENS = 20, HEADS = 4, KV_HEADS = 2, SIZE = 24, HISTORY = 16, STEPS = 37 };

static const int32_t start[REQS + 1] = {0, 7, 8, TOKENS};
static const struct attn_api *api;

struct encoder {
    attn_runtime *runtime;
    attn_model *model;
    attn_plan *plan;
    void *workspace;
    float q[TOKENS + 1][HEADS][SIZE], k[TOKENS + 1][KV_HEADS][SIZE], v[TOKENS + 1][KV_HEADS][SIZE];
    float out[TOKENS + 1][HEADS][SIZE];
    float history[3][HISTORY], scales[3];
    bool nan_in_last_value;
    struct attn_error error;
};

static attn_status try_bind(struct encoder *e, const struct attn_mm_encoder_state *state)
{
    const struct attn_layer_params params =
        SIZED(attn_layer_params, .next = state != NULL ? &state->ext : NULL);
    return api->layer_bind_params(api->model_layer(e->model, 0), &params, &e->error);
}

static attn_status try_create(struct encoder *e, const char *backend,
                              const struct attn_mm_encoder_quant *quant)
{
    const struct attn_layer_desc layer =
        SIZED(attn_layer_desc, .next = &quant->ext, .name = "vision.0", .kind = ATTN_LAYER_ENCODER,
              .encoder = ATTN_ENCODER_MULTIMODAL, .dtype = ATTN_DTYPE_F32, .num_q_heads = HEADS,
              .num_kv_heads = KV_HEADS, .head_size = SIZE, .scale = 0.25f);
    const struct attn_layer_desc *layers[] = {&layer};
    struct attn_runtime_options options = client_options(PLUGINS);
    options.backend = NULL;
    options.isolation = -1;
    options.validate = 1;
    memset(e, 0, sizeof *e);
    e->error = (struct attn_error)ATTN_ERROR_INIT;
    attn_status status = api->runtime_create(&options, &e->runtime, &e->error);
    return status ? status
                  : client_model(api, e->runtime, CLIENT_ORDER(backend), layers, 1, &e->model,
                                 &e->error);
}

static void make_plan(struct encoder *e)
{
    CHECK(e, client_plan(api, e->model, 0, CLIENT_LIMITS(4, 32, 0), &e->plan, &e->workspace,
                         &e->error));
    memset(e->workspace, 0xff, client_workspace_bytes(api, e->plan)); /* NaN */
}

static void finish(struct encoder *e)
{
    api->plan_destroy(e->plan);
    api->model_destroy(e->model);
    api->runtime_destroy(e->runtime);
    free(e->workspace);
}

/* Rows after the batch, or of k and v before it where they have starts of their own, are large:
 * they must not count for the largest. */
static attn_status step_from(struct encoder *e, uint64_t seed, const float size[3],
                             const int32_t *key_start)
{
    const int32_t first = key_start != NULL ? key_start[0] : 0;
    static const int64_t wide[] = {TOKENS + 1, HEADS, SIZE},
                         narrow[] = {TOKENS + 1, KV_HEADS, SIZE};
    struct shaped q, k, v, out;
    struct attn_batch batch = client_batch(REQS, start, NULL);
    batch.key_start_loc = key_start;
    const struct attn_step_io io =
        SIZED(attn_step_io, .q = shaped_set(&q, e->q, ATTN_DTYPE_F32, 3, wide, NULL),
              .k = shaped_set(&k, e->k, ATTN_DTYPE_F32, 3, narrow, NULL),
              .v = shaped_set(&v, e->v, ATTN_DTYPE_F32, 3, narrow, NULL),
              .out = shaped_set(&out, e->out, ATTN_DTYPE_F32, 3, wide, NULL));
    random_floats(&seed, &e->q[0][0][0], TOKENS * HEADS * SIZE, size[0]);
    random_floats(&seed, &e->k[first][0][0], TOKENS * KV_HEADS * SIZE, size[1]);
    random_floats(&seed, &e->v[first][0][0], TOKENS * KV_HEADS * SIZE, size[2]);
    for (int32_t i = 0; i < HEADS * SIZE; i++) {
        const int32_t other = first > 0 ? 0 : TOKENS;
        e->out[TOKENS][i / SIZE][i % SIZE] = NAN;
        e->q[TOKENS][i / SIZE][i % SIZE] = e->k[other][i / SIZE % KV_HEADS][i % SIZE] =
            e->v[other][i / SIZE % KV_HEADS][i % SIZE] = 1e6f;
    }
    if (e->nan_in_last_value) {
        e->v[first + TOKENS - 1][0][0] = NAN;
    }
    int32_t host[2][REQS + 1]; /* which no run reads */
    memcpy(host[0], start, sizeof host[0]);
    memcpy(host[1], key_start != NULL ? key_start : start, sizeof host[1]);
    batch.query_start_loc_host = host[0];
    batch.key_start_loc_host = key_start != NULL ? host[1] : NULL;
    attn_status status = api->plan_batch(e->plan, &batch, NULL, &e->error);
    memset(host, 0x7f, sizeof host);
    return status ? status : api->run(e->plan, api->model_layer(e->model, 0), &io, &e->error);
}

static attn_status step(struct encoder *e, uint64_t seed, const float size[3])
{
    return step_from(e, seed, size, NULL);
}

static double largest(const float *x, int32_t count)
{
    double most = 0;
    for (int32_t i = 0; i < count; i++) {
        most = fmax(most, fabs((double)x[i]));
    }
    return most;
}

static void quantize(double *to, const float *from, int32_t count, double scale)
{
    for (int32_t i = 0; i < count; i++) {
        to[i] = number_round((double)(float)((double)from[i] / scale), ATTN_DTYPE_FP8_E4M3) * scale;
    }
}

/* Largest error against attention over the rounded inputs. */
static double error_of(const struct encoder *e, const double scale[3])
{
    static double q[TOKENS][HEADS][SIZE], k[TOKENS][KV_HEADS][SIZE], v[TOKENS][KV_HEADS][SIZE];
    static double out[TOKENS][HEADS][SIZE];
    double worst = 0, lse[TOKENS * HEADS], scores[TOKENS];
    quantize(q[0][0], e->q[0][0], TOKENS * HEADS * SIZE, scale[0]);
    quantize(k[0][0], e->k[0][0], TOKENS * KV_HEADS * SIZE, scale[1]);
    quantize(v[0][0], e->v[0][0], TOKENS * KV_HEADS * SIZE, scale[2]);
    for (int32_t r = 0; r < REQS; r++) {
        const struct oracle_request request = {.num_q_heads = HEADS,
                                               .num_kv_heads = KV_HEADS,
                                               .head_size = SIZE,
                                               .head_size_v = SIZE,
                                               .num_queries = start[r + 1] - start[r],
                                               .num_keys = start[r + 1] - start[r],
                                               .q = q[start[r]][0],
                                               .k = k[start[r]][0],
                                               .v = v[start[r]][0],
                                               .scale = 0.25,
                                               .left = -1,
                                               .right = -1,
                                               .out = out[start[r]][0],
                                               .lse = lse};
        oracle_attend(&request, scores);
    }
    const double *right = (const double *)out;
    const float *found = (const float *)e->out;
    for (int32_t i = 0; i < TOKENS * HEADS * SIZE; i++) {
        const double error = fabs(right[i] - (double)found[i]);
        worst = error <= worst ? worst : isnan(error) ? INFINITY : error;
    }
    return worst;
}

/* A burst at step 5 holds the scales up until it is n steps old, and not one step longer. */
TEST(scales_follow_the_history)
{
    struct attn_mm_encoder_quant quant = EXTENSION(attn_mm_encoder_quant, ATTN_EXT_DRAFT_MM_ENCODER,
                                                   NULL, .fp8 = 1, .amax_history_len = HISTORY);
    double seen[3][STEPS];
    for (int32_t padded = 0; padded <= 32; padded += 32) {
        struct encoder e;
        quant.padded_head_size = padded;
        assert_ok(try_create(&e, "cpu_ref", &quant));
        const struct attn_mm_encoder_state memory = EXTENSION(
            attn_mm_encoder_state, ATTN_EXT_DRAFT_MM_ENCODER_STATE, NULL, e.history[0], e.scales);
        assert_ok(try_bind(&e, &memory));
        make_plan(&e);
        for (int32_t i = 0; i < STEPS; i++) {
            if (i == 20) { /* another process goes on with what this one left */
                float history[3][HISTORY];
                memcpy(history, e.history, sizeof history);
                finish(&e);
                assert_ok(try_create(&e, "cpu_ref", &quant));
                memcpy(e.history, history, sizeof history);
                assert_ok(try_bind(&e, &memory));
                make_plan(&e);
            }
            float burst = i == 5 ? 4 : 1;
            const float size[3] = {burst * 0.5f, burst * 0.75f, burst * (1 + (float)(i % 3))};
            double scale[3];
            assert_ok(step(&e, (uint64_t)i, size));
            seen[0][i] = largest(&e.q[0][0][0], TOKENS * HEADS * SIZE);
            seen[1][i] = largest(&e.k[0][0][0], TOKENS * KV_HEADS * SIZE);
            seen[2][i] = largest(&e.v[0][0][0], TOKENS * KV_HEADS * SIZE);
            for (int32_t x = 0; x < 3; x++) {
                double most = 0;
                for (int32_t n = i < HISTORY ? 0 : i - HISTORY + 1; n <= i; n++) {
                    most = fmax(most, seen[x][n]);
                }
                scale[x] = (double)((float)most / 448.0f);
                assert_true(fabs((double)e.scales[x] - scale[x]) <= 1e-6 * scale[x]);
            }
            if (!(error_of(&e, scale) < 1e-4)) {
                fail_msg("step %d, padded to %d: off by %g", i, padded, error_of(&e, scale));
            }
            assert_true(isnan(e.out[TOKENS][0][0])); /* not a row of the batch */
        }
        finish(&e);
    }
}

/* Keys from a row on that is not the queries' give what the same keys give in their places. */
TEST(keys_with_starts_of_their_own)
{
    static const int32_t behind[REQS + 1] = {1, 8, 9, TOKENS + 1};
    struct attn_mm_encoder_quant quant = EXTENSION(attn_mm_encoder_quant, ATTN_EXT_DRAFT_MM_ENCODER,
                                                   NULL, .fp8 = 1, .amax_history_len = 1);
    const float size[3] = {1, 2, 3};
    struct encoder e;
    float out[TOKENS][HEADS][SIZE], scales[3];
    assert_ok(try_create(&e, "cpu_ref", &quant));
    const struct attn_mm_encoder_state memory = EXTENSION(
        attn_mm_encoder_state, ATTN_EXT_DRAFT_MM_ENCODER_STATE, NULL, e.history[0], e.scales);
    assert_ok(try_bind(&e, &memory));
    make_plan(&e);
    assert_ok(step(&e, 9, size));
    memcpy(out, e.out, sizeof out);
    memcpy(scales, e.scales, sizeof scales);
    assert_ok(step_from(&e, 9, size, behind));
    assert_memory_equal(e.out, out, sizeof out);
    assert_memory_equal(e.scales, scales, sizeof scales);
    e.nan_in_last_value = true; /* in a row past the queries' */
    assert_int_equal(step_from(&e, 9, size, behind), ATTN_ERROR_NAN);
    assert_non_null(strstr(e.error.message, "v[20, 0, 0] is NaN"));
    finish(&e);
}

TEST(refusals_say_what_is_missing)
{
    struct attn_mm_encoder_quant quant = EXTENSION(attn_mm_encoder_quant, ATTN_EXT_DRAFT_MM_ENCODER,
                                                   NULL, .fp8 = 1, .amax_history_len = HISTORY);
    struct encoder e;
    attn_plan *plan;
    assert_ok(try_create(&e, "cpu_ref", &quant));
    assert_int_equal(api->plan_create(e.model, 0, CLIENT_LIMITS(1, 1, 0), &plan, &e.error),
                     ATTN_ERROR_ORDER);
    assert_non_null(strstr(e.error.message, "scales of its inputs"));
    INVALID(&e.error, "attn_mm_encoder_state", try_bind(&e, NULL));
    const struct attn_mm_encoder_state no_history =
        EXTENSION(attn_mm_encoder_state, ATTN_EXT_DRAFT_MM_ENCODER_STATE, NULL, NULL, e.scales);
    INVALID(&e.error, "amax_history", try_bind(&e, &no_history));
    assert_int_equal(api->plan_create(e.model, 0, CLIENT_LIMITS(1, 1, 0), &plan, &e.error),
                     ATTN_ERROR_ORDER); /* nothing that is refused is bound */
    finish(&e);

    /* A small backend has neither the kernels nor the dtypes; its verdict names them. */
    assert_int_equal(try_create(&e, "example", &quant), ATTN_ERROR_REFUSED);
    assert_non_null(strstr(e.error.message, "mm_encoder_fp8"));
    finish(&e);

    quant.padded_head_size = 20;
    INVALID(&e.error, "padded_head_size", try_create(&e, "cpu_ref", &quant));
    finish(&e);
    quant.padded_head_size = 0;
    quant.scale_margin = -1;
    INVALID(&e.error, "scale_margin", try_create(&e, "cpu_ref", &quant));
    finish(&e);
}

int main(void)
{
    struct attn_error error = ATTN_ERROR_INIT;
    if (client_load(CORE_FILE, &api, &error) != ATTN_OK) {
        return 1;
    }
    return test_run(NULL, NULL);
}
