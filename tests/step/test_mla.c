/* SPDX-License-Identifier: Apache-2.0 */
/* MLA steps through the public table: absorbed decodes, prefill per head over context in chunks, sparse, against each
 * head's own attention in float64; what a poor backend is refused for, and what is composed of it. */
#include <attn/api.h>
#include <dlfcn.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { MAX_REQS = 5, MAX_LENGTH = 80, BLOCK = 8, MAX_BLOCKS = 12, MAX_HEADS = 8, NUM_BLOCKS = 64 };
#if defined(PUBLISHED_SIZES) /* what fp8_ds_mla rows are made for */
enum { NOPE = 128, ROPE = 64, V = 128, RANK = 512, ROW = RANK + ROPE };
#else
enum { NOPE = 16, ROPE = 8, V = 24, RANK = 32, ROW = RANK + ROPE };
#endif

struct setting {
    const char *backend;
    int32_t heads, padded;
    int32_t chunk;    /* context_workspace_tokens */
    int32_t topk;     /* sparse */
    bool split;       /* w_uk and w_uv instead of kv_b_proj */
    bool apart;       /* q_nope and q_pe in tensors of their own */
    bool latent;      /* no absorption: the engine projects */
    bool fp8;         /* cache */
    bool ds_mla;      /* cache of fp8_ds_mla rows */
    bool fp8_out;
    bool fp8_query;   /* apart */
    int32_t window;
    bool has_sinks;
    int32_t first_row; /* query_start_loc[0] */
    bool no_lse;
    int32_t drafted;
    int32_t num_reqs, queries[MAX_REQS], lens[MAX_REQS];
};

struct mla {
    const struct setting *s;
    const struct attn_api *api;
    attn_runtime *runtime;
    attn_model *model;
    attn_plan *plan;
    struct attn_layer_desc layer;
    struct attn_mla_desc desc;
    float weights[MAX_HEADS * (NOPE + V) * RANK], uk[MAX_HEADS * NOPE * RANK], uv[MAX_HEADS * RANK * V];
    float rows[MAX_REQS][MAX_LENGTH][ROW]; /* as the engine has them */
    float q[MAX_REQS * 40][MAX_HEADS][RANK + ROPE];
    int32_t starts[MAX_REQS + 1], lens[MAX_REQS], table[MAX_REQS][MAX_BLOCKS], topk[MAX_REQS * 40][8];
    int64_t slots[MAX_REQS * MAX_LENGTH];
    float kv_c[MAX_REQS * MAX_LENGTH][RANK], k_pe[MAX_REQS * MAX_LENGTH][ROPE];
    float nope[MAX_REQS * 40 * MAX_HEADS * RANK], pe[MAX_REQS * 40 * MAX_HEADS * ROPE];
    float *out, *lse, k_scale;
    void *cache, *workspace;
    struct attn_batch batch;
    struct attn_tensor tensors[8];
    int64_t shapes[8][3], strides[8][3];
    struct attn_io_mla ext;
    struct attn_io_output_quant quant;
    float sinks[MAX_HEADS];
    struct attn_step_io io;
    struct attn_error error;
};

#define CHECK(m, call)                                                                                       \
    do {                                                                                                     \
        if ((call) != ATTN_OK) {                                                                             \
            fail_msg("%s: %s: %s", #call, (m)->error.field, (m)->error.message);                             \
        }                                                                                                    \
    } while (0)

#define QUERY_SCALE 0.03f

static uint32_t state;

static double random_value(void)
{
    state = state * 1664525u + 1013904223u;
    return (double)(state >> 8) / (1 << 23) - 1;
}

static const struct attn_tensor *tensor(struct mla *m, int32_t which, void *data, int32_t ndim, int64_t a, int64_t b,
                                        int64_t c, int64_t sa, int64_t sb)
{
    int64_t shape[] = {a, b, c}, strides[] = {sa, sb, 1};
    memcpy(m->shapes[which], shape, sizeof shape);
    memcpy(m->strides[which], strides, sizeof strides);
    m->strides[which][ndim - 1] = 1;
    m->tensors[which] = (struct attn_tensor){data, {ATTN_DEVICE_CPU, 0}, ndim, {ATTN_CODE_FLOAT, 32, 1},
                                             m->shapes[which], m->strides[which], 0};
    return &m->tensors[which];
}

static void open_core(struct mla *m)
{
    attn_get_api_fn *get_api;
    void *library = dlopen(CORE_FILE, RTLD_NOW | RTLD_LOCAL);
    assert_non_null(library);
    void *symbol = dlsym(library, ATTN_GET_API_SYMBOL);
    memcpy(&get_api, &symbol, sizeof get_api);
    const struct attn_runtime_options options = {.struct_size = sizeof options, .plugin_path = PLUGINS, .cache_dir = "",
                                                 .backend = "", .num_threads = 2, .validate = 1,
                                                 .ignore_environment = 1, .no_default_plugins = 1};
    CHECK(m, get_api(ATTN_ABI_VERSION_MIN, ATTN_ABI_VERSION, &m->api, &m->error));
    CHECK(m, m->api->runtime_create(&options, &m->runtime, &m->error));
}

static void describe(struct mla *m)
{
    const struct setting *s = m->s;
    m->desc = (struct attn_mla_desc){.ext = {ATTN_EXT_MLA_DESC, 0, sizeof m->desc, NULL}, .kv_lora_rank = RANK,
                                     .qk_nope_head_dim = NOPE, .qk_rope_head_dim = ROPE, .v_head_dim = V,
                                     .topk = s->topk, .absorb_in_core = !s->latent, .padded_num_q_heads = s->padded,
                                     .weight_dtype = ATTN_DTYPE_F32, .context_workspace_tokens = s->chunk};
    m->layer = (struct attn_layer_desc){
        .struct_size = sizeof m->layer, .next = &m->desc.ext, .name = "mla",
        .kind = s->topk > 0 ? ATTN_LAYER_MLA_SPARSE : ATTN_LAYER_MLA, .dtype = ATTN_DTYPE_F32,
        .kv_dtype = s->ds_mla ? ATTN_KV_FP8_DS_MLA : s->fp8 ? ATTN_KV_FP8_E4M3 : ATTN_KV_AUTO,
        .output_form = s->fp8_out ? ATTN_OUTPUT_FP8_STATIC : ATTN_OUTPUT_PLAIN, .num_q_heads = s->heads, .num_kv_heads = 1,
        .head_size = ROW, .scale = 0.21f, .causal = 1, .block_size = BLOCK,
        .has_window = s->window > 0, .window_left = s->window > 0 ? s->window - 1 : -1,
        .window_right = s->window > 0 ? 0 : -1, .has_sinks = s->has_sinks,
        .q_scale_form = s->fp8_query ? ATTN_SCALE_PER_TENSOR : ATTN_SCALE_NONE, .q_dtype = ATTN_DTYPE_FP8_E4M3,
        .needs_lse = !s->no_lse, .num_speculative_tokens = s->drafted};
}

static void bind(struct mla *m)
{
    const struct attn_select_options options = {.struct_size = sizeof options, .backend = m->s->backend};
    const struct attn_layer_desc *layers[] = {&m->layer};
    struct attn_kv_spec spec = {.struct_size = sizeof spec};
    struct attn_kv_view k = {.struct_size = sizeof k};
    attn_assignment *assignment;
    struct attn_mla_weights weights = {.ext = {ATTN_EXT_MLA_WEIGHTS, 0, sizeof weights, NULL}};
    struct attn_layer_params params = {.struct_size = sizeof params, .next = &weights.ext, .k_scale_host = m->k_scale,
                                       .q_scale_host = QUERY_SCALE,
                                       .sinks = m->s->has_sinks ? m->sinks : NULL};
    int64_t heads = m->s->heads;
    CHECK(m, m->api->select(m->runtime, &options, layers, 1, &assignment, &m->error));
    CHECK(m, m->api->model_create(m->runtime, assignment, NULL, &m->model, &m->error));
    m->api->assignment_destroy(assignment);
    attn_layer *layer = m->api->model_layer(m->model, 0);
    CHECK(m, m->api->layer_kv_spec(layer, &spec, &m->error));
    assert_int_equal(spec.kind, m->s->window > 0 ? ATTN_KV_SPEC_SLIDING_WINDOW_MLA : ATTN_KV_SPEC_MLA);
    assert_int_equal(spec.page_bytes, m->s->ds_mla ? BLOCK * 656 : BLOCK * ROW * (m->s->fp8 ? 1 : 4));
    m->cache = aligned_alloc(256, (size_t)(NUM_BLOCKS * spec.page_bytes));
    memset(m->cache, 0xff, (size_t)(NUM_BLOCKS * spec.page_bytes));
    CHECK(m, m->api->layer_kv_views(layer, m->cache, NUM_BLOCKS, &k, NULL, &m->error));
    CHECK(m, m->api->layer_bind_kv(layer, &k, NULL, &m->error));
    if (m->s->split) {
        weights.w_uk = tensor(m, 0, m->uk, 3, heads, NOPE, RANK, NOPE * RANK, RANK);
        weights.w_uv = tensor(m, 1, m->uv, 3, heads, RANK, V, RANK * V, V);
    } else {
        weights.kv_b_proj = tensor(m, 0, m->weights, 2, heads * (NOPE + V), RANK, 0, RANK, 1);
    }
    CHECK(m, m->api->layer_bind_params(layer, &params, &m->error));
    const struct attn_plan_options plan = {
        .struct_size = sizeof plan, .limits = {sizeof plan.limits, NULL, MAX_REQS, 100, 0, MAX_LENGTH, 0, 0}};
    CHECK(m, m->api->plan_create(m->model, 0, &plan, &m->plan, &m->error));
    size_t bytes = m->api->plan_workspace_bytes(m->plan);
    m->workspace = aligned_alloc(256, (bytes + 255) / 256 * 256 + 256);
    memset(m->workspace, 0xff, bytes); /* NaN: whatever is read was written first */
    CHECK(m, m->api->plan_bind_workspace(m->plan, m->workspace, bytes, &m->error));
}

static void draw(struct mla *m)
{
    const struct setting *s = m->s;
    int32_t used = 0;
    m->starts[0] = s->first_row;
    for (int32_t h = 0; h < s->heads; h++) {
        m->sinks[h] = (float)(3 * random_value());
        for (int32_t i = 0; i < (NOPE + V) * RANK; i++) {
            float w = (float)(2.8 / sqrt(RANK) * random_value());
            int32_t r = i / RANK, d = i % RANK;
            m->weights[h * (NOPE + V) * RANK + i] = w;
            if (r < NOPE) {
                m->uk[(h * NOPE + r) * RANK + d] = w;
            } else {
                m->uv[(h * RANK + d) * V + r - NOPE] = w;
            }
        }
    }
    for (int32_t r = 0; r < s->num_reqs; r++) {
        m->starts[r + 1] = m->starts[r] + s->queries[r];
        m->lens[r] = s->lens[r];
        for (int32_t b = 0; b < MAX_BLOCKS; b++) {
            m->table[r][b] = b * BLOCK < s->lens[r] ? used++ * 7 % NUM_BLOCKS : INT32_MIN;
        }
        for (int32_t i = 0; i < s->lens[r] * ROW; i++) {
            m->rows[r][i / ROW][i % ROW] = (float)(2 * random_value());
        }
        for (int32_t i = 0; i < s->queries[r]; i++) {
            int32_t length = s->lens[r] - s->queries[r] + i + 1, n = 0;
            for (; n < s->topk; n++) { /* a stretch with gaps; what is out of range or later is no key */
                static const int32_t wrong[] = {-1, 1 << 20};
                m->topk[m->starts[r] + i][n] = n % 3 == 2 ? wrong[n / 3 % 2] : (n * 5 + i) % (length + 2);
            }
        }
    }
    for (int32_t i = 0; i < m->starts[s->num_reqs] * MAX_HEADS * (RANK + ROPE); i++) {
        (&m->q[0][0][0])[i] = (float)(3 * random_value());
    }
}

/* Keys of every request, one behind the other, the step's own in the rows of its tokens; returns how many rows. */
static int32_t stage_keys(struct mla *m, bool context)
{
    int32_t count = context ? 0 : m->starts[0];
    for (int32_t i = 0; i < count; i++) {
        m->slots[i] = -1;
    }
    for (int32_t r = 0; r < m->s->num_reqs; r++) {
        int32_t own = m->lens[r] - m->s->queries[r];
        for (int32_t j = context ? 0 : own; j < (context ? own : m->lens[r]); j++, count++) {
            m->slots[count] = (int64_t)m->table[r][j / BLOCK] * BLOCK + j % BLOCK;
            memcpy(m->kv_c[count], m->rows[r][j], sizeof m->kv_c[0]);
            memcpy(m->k_pe[count], m->rows[r][j] + RANK, sizeof m->k_pe[0]);
        }
    }
    return count;
}

/* e4m3: 3 mantissa bits, exponents from -6, at most 448. */
static double through_fp8(double x, double scale)
{
    double y = fmin(fabs(x / scale), 448);
    int exponent = y > 0 ? ilogb(y) : -6;
    exponent = exponent < -6 ? -6 : exponent;
    y = ldexp(nearbyint(ldexp(y, 3 - exponent)), exponent - 3);
    return copysign(y, x) * scale;
}

/* Codes in place of the floats that they round. */
static void encode_query(struct mla *m, int32_t which, float *values, int64_t count)
{
    uint8_t *codes = (uint8_t *)values;
    for (int64_t i = 0; i < count; i++) {
        double x = through_fp8(values[i], QUERY_SCALE) / QUERY_SCALE, a = fabs(x);
        int32_t exponent = a >= 0x1p-6 ? ilogb(a) : -7;
        uint8_t code = (uint8_t)(exponent > -7 ? (exponent + 7) << 3 | ((int32_t)nearbyint(ldexp(a, 3 - exponent)) & 7)
                                               : (int32_t)nearbyint(ldexp(a, 9)));
        codes[i] = (uint8_t)(code | (signbit(x) ? 0x80 : 0));
    }
    m->tensors[which].dtype = (struct attn_dtype){ATTN_CODE_FLOAT8_E4M3FN, 8, 1};
}

static void set_io(struct mla *m, int32_t keys)
{
    const struct setting *s = m->s;
    int64_t tokens = m->starts[s->num_reqs], heads = s->padded > 0 ? s->padded : s->heads;
    int64_t width = s->latent ? RANK : NOPE, row = MAX_HEADS * (RANK + ROPE);
    m->ext = (struct attn_io_mla){.ext = {ATTN_EXT_IO_MLA, 0, sizeof m->ext, NULL}, .topk_indices = m->topk[0],
                                  .topk_stride = 8};
    m->ext.kv_c = tensor(m, 0, m->kv_c, 2, keys, RANK, 0, RANK, 1);
    m->ext.k_pe = tensor(m, 1, m->k_pe, 2, keys, ROPE, 0, ROPE, 1);
    if (!s->apart) { /* slices of one row, as a projection leaves them */
        m->ext.q_nope = tensor(m, 2, m->q, 3, tokens, heads, width, row, RANK + ROPE);
        m->ext.q_pe = tensor(m, 3, &m->q[0][0][width], 3, tokens, heads, ROPE, row, RANK + ROPE);
    } else {
        for (int64_t i = 0; i < tokens * heads; i++) {
            memcpy(m->nope + i * width, m->q[i / heads][i % heads], (size_t)width * 4);
            memcpy(m->pe + i * ROPE, m->q[i / heads][i % heads] + width, ROPE * 4);
        }
        m->ext.q_nope = tensor(m, 2, m->nope, 3, tokens, heads, width, heads * width, width);
        m->ext.q_pe = tensor(m, 3, m->pe, 3, tokens, heads, ROPE, heads * ROPE, ROPE);
    }
    if (s->fp8_query) {
        encode_query(m, 2, m->nope, tokens * heads * width);
        encode_query(m, 3, m->pe, tokens * heads * ROPE);
    }
    int64_t size = s->latent ? RANK : V;
    m->io = (struct attn_step_io){.struct_size = sizeof m->io, .next = &m->ext.ext};
    m->io.out = tensor(m, 4, m->out, 3, tokens, s->heads, size, s->heads * size, size);
    if (s->fp8_out) {
        static const float scale = 0.02f;
        m->tensors[4].dtype = (struct attn_dtype){ATTN_CODE_FLOAT8_E4M3FN, 8, 1};
        m->quant = (struct attn_io_output_quant){
            .ext = {ATTN_EXT_IO_OUTPUT_QUANT, 0, sizeof m->quant, NULL}, .scale = &scale};
        m->ext.ext.next = &m->quant.ext;
    }
    m->io.lse = s->no_lse ? NULL : tensor(m, 5, m->lse, 2, heads, tokens, 0, tokens, 1);
}

static void set_batch(struct mla *m, int32_t keys)
{
    m->batch = (struct attn_batch){
        .struct_size = sizeof m->batch, .num_reqs = m->s->num_reqs, .num_tokens = m->starts[m->s->num_reqs],
        .num_actual_tokens = m->starts[m->s->num_reqs], .causal = -1, .query_start_loc = m->starts,
        .query_start_loc_host = m->starts, .seq_lens = m->lens, .seq_lens_host = m->lens,
        .block_table = m->table[0], .block_table_stride = MAX_BLOCKS, .slot_mapping = m->slots, .num_slots = keys};
}

static struct mla *mla_create(const struct setting *s)
{
    struct mla *m = calloc(1, sizeof *m);
    state = 99;
    m->s = s;
    m->error = (struct attn_error)ATTN_ERROR_INIT;
    m->k_scale = s->fp8 ? 0.01f : 0;
    m->out = calloc(MAX_REQS * 40 * MAX_HEADS * RANK, sizeof(float));
    m->lse = calloc(MAX_REQS * 40 * MAX_HEADS, sizeof(float));
    open_core(m);
    describe(m);
    draw(m);
    bind(m);
    int32_t keys = stage_keys(m, true);
    if (keys > 0) { /* the contexts, written and not attended */
        int32_t starts[] = {0, 0}, length = 0;
        set_batch(m, keys);
        m->batch.num_reqs = 1;
        starts[1] = length = keys < MAX_LENGTH ? keys : MAX_LENGTH;
        m->batch.num_tokens = m->batch.num_actual_tokens = length;
        m->batch.query_start_loc = m->batch.query_start_loc_host = starts;
        m->batch.seq_lens = m->batch.seq_lens_host = &length;
        int32_t all[MAX_BLOCKS] = {0};
        m->batch.block_table = all;
        set_io(m, keys);
        m->io.flags = ATTN_RUN_NO_ATTEND;
        CHECK(m, m->api->plan(m->plan, &m->batch, NULL, &m->error));
        CHECK(m, m->api->run(m->plan, m->api->model_layer(m->model, 0), &m->io, &m->error));
    }
    keys = stage_keys(m, false);
    set_batch(m, keys);
    set_io(m, keys);
    return m;
}

static void mla_destroy(struct mla *m)
{
    m->api->plan_destroy(m->plan);
    m->api->model_destroy(m->model);
    m->api->runtime_destroy(m->runtime);
    free(m->cache);
    free(m->workspace);
    free(m->out);
    free(m->lse);
    free(m);
}

/* 512 e4m3 in tiles of 128 with a float32 scale each, the rope part in bf16. */
static double through_ds_mla(const float *row, int32_t d)
{
    float largest = 0;
    if (d >= RANK) {
        int exponent = row[d] != 0 ? ilogb(row[d]) : 0;
        return ldexp(nearbyint(ldexp(row[d], 7 - exponent)), exponent - 7);
    }
    for (int32_t i = d / 128 * 128; i < d / 128 * 128 + 128 && i < RANK; i++) {
        largest = fmaxf(largest, fabsf(row[i]));
    }
    return through_fp8(row[d], largest / 448);
}

static double row_value(const struct mla *m, int32_t r, int32_t j, int32_t d, bool cached)
{
    double x = m->rows[r][j][d];
    if (cached && m->s->ds_mla) {
        return through_ds_mla(m->rows[r][j], d);
    }
    return cached && m->s->fp8 ? through_fp8(x, m->k_scale) : x;
}

/* k_h,j = [W_UK,h c_j | pe_j], v_h,j = W_UV,h c_j. */
static double key_element(const struct mla *m, int32_t r, int32_t j, int32_t h, int32_t d, bool cached)
{
    double x = 0;
    if (m->s->latent) {
        return row_value(m, r, j, d, cached);
    }
    if (d >= NOPE) {
        return row_value(m, r, j, RANK + d - NOPE, cached);
    }
    for (int32_t i = 0; i < RANK; i++) {
        x += m->weights[(h * (NOPE + V) + d) * RANK + i] * row_value(m, r, j, i, cached);
    }
    return x;
}

static double value_element(const struct mla *m, int32_t r, int32_t j, int32_t h, int32_t d, bool cached)
{
    double x = 0;
    for (int32_t i = 0; i < RANK && !m->s->latent; i++) {
        x += m->weights[(h * (NOPE + V) + NOPE + d) * RANK + i] * row_value(m, r, j, i, cached);
    }
    return m->s->latent ? row_value(m, r, j, d, cached) : x;
}

static double formula(const struct mla *m, int32_t r, int32_t i, int32_t h, bool per_head, double *out)
{
    const struct setting *s = m->s;
    int32_t own = s->lens[r] - s->queries[r], position = own + i, token = m->starts[r] + i;
    int32_t count = s->topk > 0 ? s->topk : position + 1, size = s->latent ? RANK : V;
    int32_t width = s->latent ? RANK + ROPE : NOPE + ROPE;
    double scores[MAX_LENGTH], top = -INFINITY, sum = 0;
    memset(out, 0, (size_t)size * sizeof *out);
    for (int32_t n = 0; n < count; n++) {
        int32_t j = s->topk > 0 ? m->topk[token][n] : n;
        scores[n] = -INFINITY;
        if (j >= 0 && j <= position && (s->window == 0 || position - j < s->window)) {
            scores[n] = 0;
            for (int32_t d = 0; d < width; d++) {
                double q = m->q[token][h][d];
                q = s->fp8_query ? through_fp8(q, QUERY_SCALE) : q;
                scores[n] += q * key_element(m, r, j, h, d, !per_head || j < own);
            }
            scores[n] *= m->layer.scale;
        }
        top = fmax(top, scores[n]);
    }
    top = s->has_sinks ? fmax(top, m->sinks[h]) : top;
    for (int32_t n = 0; n < count; n++) {
        int32_t j = s->topk > 0 ? m->topk[token][n] : n;
        if (scores[n] != -INFINITY) {
            double w = exp(scores[n] - top);
            sum += w;
            for (int32_t d = 0; d < size; d++) {
                out[d] += w * value_element(m, r, j, h, d, !per_head || j < own);
            }
        }
    }
    sum += s->has_sinks ? exp(m->sinks[h] - top) : 0;
    for (int32_t d = 0; d < size && sum > 0; d++) {
        out[d] /= sum;
    }
    return sum > 0 ? top + log(sum) : -INFINITY;
}

static void compare(const struct mla *m, bool prefill_per_head)
{
    const struct setting *s = m->s;
    int32_t tokens = m->starts[s->num_reqs], size = s->latent ? RANK : V;
    double largest = 0, out[RANK];
    for (int32_t r = 0; r < s->num_reqs; r++) {
        for (int32_t i = 0; i < s->queries[r] * s->heads; i++) {
            int32_t token = m->starts[r] + i / s->heads, h = i % s->heads;
            bool per_head = prefill_per_head && s->queries[r] > 1 + s->drafted;
            double lse = formula(m, r, i / s->heads, h, per_head, out), rms = 1e-3;
            for (int32_t d = 0; d < size; d++) {
                rms += out[d] * out[d] / size;
            }
            for (int32_t d = 0; d < size; d++) {
                double error = fabs(m->out[(token * s->heads + h) * size + d] - out[d]) / sqrt(rms);
                largest = error <= largest ? largest : isnan(error) ? INFINITY : error;
            }
            if (!s->no_lse) {
                double got = m->lse[h * tokens + token];
                double error = got == lse ? 0 : fabs(got - lse) / (1 + fabs(lse));
                largest = error <= largest ? largest : isnan(error) ? INFINITY : error;
            }
        }
    }
    print_message("%s: largest error %.2g\n", s->backend, largest);
    assert_true(largest < 2e-5);
}

static void step(struct mla *m)
{
    CHECK(m, m->api->plan(m->plan, &m->batch, NULL, &m->error));
    CHECK(m, m->api->run(m->plan, m->api->model_layer(m->model, 0), &m->io, &m->error));
}

static void check(const struct setting *s, bool per_head)
{
    struct mla *m = mla_create(s);
    step(m);
    compare(m, per_head);
    /* a second step on the same plan finds nothing of the first */
    memset(m->out, 0xff, (size_t)m->starts[s->num_reqs] * (size_t)s->heads * V * 4);
    step(m);
    compare(m, per_head);
    mla_destroy(m);
}

static void test_decode(void **unused)
{
    (void)unused;
    check(&(struct setting){"cpu_ref", .heads = 6, .num_reqs = 4, .queries = {1, 1, 1, 1}, .lens = {1, 8, 9, 70}}, true);
    check(&(struct setting){"cpu_ref", .heads = 4, .num_reqs = 3, .queries = {3, 1, 4}, .lens = {17, 9, 24},
                            .drafted = 3, .apart = true}, true);
}

static void test_prefill(void **unused)
{
    (void)unused;
    check(&(struct setting){"cpu_ref", .heads = 6, .num_reqs = 3, .queries = {5, 30, 2}, .lens = {5, 30, 2}}, true);
    /* all contexts in one chunk, in several that cut requests, one row at a time */
    for (int32_t chunk = 0; chunk < 4; chunk++) {
        static const int32_t rows[] = {0, 7, 16, 1};
        check(&(struct setting){"cpu_ref", .heads = 6, .chunk = rows[chunk], .apart = chunk == 1, .num_reqs = 5,
                                .split = chunk == 2, .no_lse = chunk == 3, .queries = {1, 1, 4, 3, 20},
                                .lens = {30, 1, 41, 3, 60}}, true);
    }
}

static void test_idle_requests(void **unused)
{
    (void)unused;
    check(&(struct setting){"cpu_ref", .heads = 4, .chunk = 8, .num_reqs = 5, .queries = {1, 0, 5, 0, 9},
                            .lens = {12, 20, 17, 0, 40}}, true);
}

static void test_sparse(void **unused)
{
    (void)unused;
    check(&(struct setting){"cpu_ref", .heads = 6, .topk = 8, .num_reqs = 4, .queries = {1, 1, 6, 12},
                            .lens = {30, 1, 41, 12}}, false);
}

static void test_fp8(void **unused)
{
    (void)unused;
    check(&(struct setting){"cpu_ref", .heads = 6, .fp8 = true, .chunk = 16, .num_reqs = 4, .queries = {1, 1, 6, 12},
                            .lens = {30, 1, 41, 12}}, true);
}

/* A quantized query in both ways, its parts in tensors of their own. */
static void test_fp8_query(void **unused)
{
    (void)unused;
    check(&(struct setting){"cpu_ref", .heads = 6, .fp8_query = true, .apart = true, .chunk = 16, .num_reqs = 3,
                            .queries = {1, 1, 6}, .lens = {30, 9, 41}}, true);
}

/* A sink counts once, whatever the step is made of. */
static void test_sinks(void **unused)
{
    (void)unused;
    check(&(struct setting){"cpu_ref", .heads = 6, .has_sinks = true, .chunk = 9, .num_reqs = 4,
                            .queries = {1, 1, 6, 12}, .lens = {30, 9, 41, 20}}, true);
}

/* Rows before the first request's are nobody's: not read, not written. */
static void test_first_row(void **unused)
{
    const struct setting s = {"cpu_ref", .heads = 4, .first_row = 50, .chunk = 9, .apart = true, .num_reqs = 4,
                              .queries = {1, 1, 6, 12}, .lens = {30, 9, 41, 20}};
    (void)unused;
    check(&s, true);
    struct mla *m = mla_create(&s);
    memset(m->out, 0xff, (size_t)s.first_row * 4 * V * 4);
    step(m);
    for (int32_t i = 0; i < s.first_row * 4 * V; i++) {
        assert_true(isnan(m->out[i]));
    }
    mla_destroy(m);
}

/* A window needs positions, which projected context has not: everything goes the latent way. */
static void test_window(void **unused)
{
    (void)unused;
    check(&(struct setting){"cpu_ref", .heads = 4, .window = 7, .num_reqs = 4, .queries = {1, 1, 6, 12},
                            .lens = {30, 1, 41, 12}}, false);
}

/* amax / range: q over both its parts, k and v from the latent. */
static void test_scales(void **unused)
{
    const struct setting s = {"cpu_ref", .heads = 4, .apart = true, .num_reqs = 2, .queries = {1, 5}, .lens = {3, 9}};
    float q, k, v, amax_q = 0, amax_c = 0;
    (void)unused;
    struct mla *m = mla_create(&s);
    m->pe[7] = -9;
    for (int32_t i = 0; i < 6 * 4 * NOPE; i++) {
        amax_q = fmaxf(amax_q, fabsf(m->nope[i]));
    }
    for (int32_t i = 0; i < 6 * RANK; i++) {
        amax_c = fmaxf(amax_c, fabsf(m->kv_c[i / RANK][i % RANK]));
    }
    assert_true(amax_q < 9);
    CHECK(m, m->api->layer_calculate_scales(m->api->model_layer(m->model, 0), &m->io, &q, &k, &v, &m->error));
    assert_true(q == 9.0f / 200 && k == amax_c / 200 && v == amax_c / 100);
    mla_destroy(m);
}

/* The output through W_UV, then in e4m3: half a step of it away at most. */
static void test_fp8_output(void **unused)
{
    const struct setting s = {"cpu_ref", .heads = 4, .fp8_out = true, .chunk = 16, .num_reqs = 3, .queries = {1, 1, 6},
                              .lens = {30, 1, 41}};
    (void)unused;
    struct mla *m = mla_create(&s);
    step(m);
    for (int32_t r = 0; r < s.num_reqs; r++) {
        for (int32_t i = 0; i < s.queries[r] * s.heads; i++) {
            double out[RANK];
            formula(m, r, i / s.heads, i % s.heads, true, out);
            for (int32_t d = 0; d < V; d++) {
                uint8_t code = ((uint8_t *)m->out)[(m->starts[r] * s.heads + i) * V + d];
                int32_t exponent = code >> 3 & 15, mantissa = code & 7;
                double got = exponent > 0 ? ldexp(8 + mantissa, exponent - 10) : ldexp(mantissa, -9);
                got *= code & 0x80 ? -0.02 : 0.02;
                assert_true(fabs(got - out[d]) <= 0.0626 * fabs(out[d]) + 0.02 * 0x1p-10 + 1e-6);
            }
        }
    }
    mla_destroy(m);
}

/* Rows of 656 bytes: written, gathered and attended as what they read as. */
static void test_ds_mla(void **unused)
{
    (void)unused;
    check(&(struct setting){"cpu_ref", .heads = 2, .ds_mla = true, .chunk = 5, .num_reqs = 3, .queries = {1, 3, 2},
                            .lens = {9, 12, 2}}, true);
    check(&(struct setting){"cpu_ref", .heads = 2, .ds_mla = true, .topk = 4, .num_reqs = 3, .queries = {1, 3, 2},
                            .lens = {9, 12, 2}}, false);
}

/* Decodes are captured and replayed with other lengths; a capture that holds prefills is refused. */
static void test_graph(void **unused)
{
    const struct setting s = {"cpu_ref", .heads = 4, .num_reqs = 3, .queries = {1, 1, 6}, .lens = {30, 9, 41}};
    static struct setting shorter = {"cpu_ref", .heads = 4, .num_reqs = 2, .queries = {1, 1}, .lens = {22, 4}};
    (void)unused;
    struct mla *m = mla_create(&s);
    struct attn_plan_options options = {
        .struct_size = sizeof options, .limits = {sizeof options.limits, NULL, MAX_REQS, 100, 0, MAX_LENGTH, 0, 0},
        .graph = 1};
    m->api->plan_destroy(m->plan);
    CHECK(m, m->api->plan_create(m->model, 0, &options, &m->plan, &m->error));
    CHECK(m, m->api->plan_bind_workspace(m->plan, m->workspace, m->api->plan_workspace_bytes(m->plan), &m->error));
    assert_int_equal(m->api->plan_graph_level(m->plan), ATTN_GRAPH_UNIFORM_BATCH);
    assert_int_not_equal(m->api->plan_graph(m->plan, ATTN_PLAN_CAPTURE, &m->batch, NULL, &m->error), ATTN_OK);
    assert_string_equal(m->error.field, "num_prefills");
    m->batch.num_reqs = m->batch.num_tokens = m->batch.num_actual_tokens = m->batch.num_slots = 2;
    CHECK(m, m->api->plan_graph(m->plan, ATTN_PLAN_CAPTURE, &m->batch, NULL, &m->error));
    CHECK(m, m->api->run(m->plan, m->api->model_layer(m->model, 0), &m->io, &m->error));
    m->lens[0] = shorter.lens[0];
    m->lens[1] = shorter.lens[1];
    m->s = &shorter; /* the keys that far are in the cache */
    m->io.flags = ATTN_RUN_NO_WRITE;
    set_io(m, 2);
    m->io.flags = ATTN_RUN_NO_WRITE;
    CHECK(m, m->api->plan_graph(m->plan, ATTN_PLAN_REPLAY, &m->batch, NULL, &m->error));
    CHECK(m, m->api->run(m->plan, m->api->model_layer(m->model, 0), &m->io, &m->error));
    compare(m, false);
    mla_destroy(m);
}

static void test_padded_heads(void **unused)
{
    (void)unused;
    check(&(struct setting){"cpu_ref", .heads = 5, .padded = 8, .num_reqs = 3, .queries = {1, 1, 6}, .lens = {30, 1, 41},
                            .chunk = 16}, true);
}

static void test_without_absorption(void **unused)
{
    (void)unused;
    check(&(struct setting){"cpu_ref", .heads = 5, .latent = true, .num_reqs = 3, .queries = {1, 1, 6},
                            .lens = {30, 1, 41}}, false);
}

static void *symbol_of(const char *name)
{
    void *library = dlopen(POOR_FILE, RTLD_NOW | RTLD_LOCAL);
    assert_non_null(library);
    void *symbol = dlsym(library, name);
    assert_non_null(symbol);
    return symbol;
}

/* The composition on other kernels, and its promise: each row of context is gathered once. */
static void test_gathered_once(void **unused)
{
    const struct setting s = {"counted", .heads = 4, .chunk = 16, .num_reqs = 5, .queries = {1, 4, 3, 20, 1},
                              .lens = {30, 41, 3, 60, 1}, .apart = true};
    int32_t *gathered = symbol_of("poor_gathered"), *calls = symbol_of("poor_gather_calls"), rows = 0;
    int32_t *attends = symbol_of("poor_attend_calls"), *latent = symbol_of("poor_latent_calls");
    (void)unused;
    struct mla *m = mla_create(&s);
    memset(gathered, 0, 4096 * sizeof *gathered);
    *calls = *attends = *latent = 0;
    step(m);
    compare(m, true);
    for (int32_t i = 0; i < 4096; i++) {
        assert_true(gathered[i] <= 1);
        rows += gathered[i];
    }
    assert_int_equal(rows, 37 + 40); /* contexts of the prefills; the last request, of one token, stands behind them */
    assert_int_equal(*calls, 5);
    assert_int_equal(*attends, 6); /* the new keys, and the chunks */
    assert_int_equal(*latent, 1);
    mla_destroy(m);
}

/* Without attend, gather and merge everything goes the latent way. */
static void test_latent_only(void **unused)
{
    int32_t *latent = symbol_of("poor_latent_calls"), *attends = symbol_of("poor_attend_calls");
    (void)unused;
    *latent = *attends = 0;
    check(&(struct setting){"latent_only", .heads = 5, .num_reqs = 4, .queries = {1, 1, 6, 12}, .lens = {30, 1, 41, 12}},
          false);
    assert_int_equal(*latent, 4); /* decodes and prefills, twice */
    assert_int_equal(*attends, 0);
}

/* A backend without the parts is refused with each that is missing; heads that are no multiple, too. */
static void test_refusals(void **unused)
{
    static const struct {
        const char *backend, *field, *asked;
        int32_t heads, topk;
    } cases[] = {{"one_query", "mla_prefill", "gather_kv of the context", 4, 0},
                 {"one_query", "mla_prefill", "merge_states of context and new keys", 4, 0},
                 {"one_query", "max_query_len", "prefill in latent space", 4, 0},
                 {"counted", "padded_num_q_heads", "6", 6, 0},
                 {"counted", "kernel", "attend_mla_sparse", 4, 8},
                 {"counted", "layer_kind", "mla_sparse", 4, 8}};
    (void)unused;
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        struct setting s = {cases[c].backend, .heads = cases[c].heads, .topk = cases[c].topk};
        struct mla m = {.s = &s, .error = ATTN_ERROR_INIT};
        attn_assignment *assignment;
        bool found = false;
        open_core(&m);
        describe(&m);
        const struct attn_layer_desc *layers[] = {&m.layer};
        const struct attn_select_options options = {.struct_size = sizeof options, .backend = s.backend,
                                                    .flags = ATTN_SELECT_KEEP_UNSERVED};
        CHECK(&m, m.api->select(m.runtime, &options, layers, 1, &assignment, &m.error));
        for (int32_t b = 0; b < m.api->backend_count(m.runtime); b++) {
            int32_t verdict, count;
            struct attn_backend_info info = {.struct_size = sizeof info};
            CHECK(&m, m.api->backend_info(m.runtime, b, &info));
            CHECK(&m, m.api->assignment_verdict(assignment, 0, ATTN_PHASE_PREFILL, b, &verdict, &count));
            for (int32_t i = 0; i < count; i++) {
                struct attn_reason reason = {.struct_size = sizeof reason};
                CHECK(&m, m.api->assignment_reason(assignment, 0, ATTN_PHASE_PREFILL, b, i, &reason));
                found |= strcmp(info.caps->name, s.backend) == 0 && strcmp(reason.field, cases[c].field) == 0 &&
                         strcmp(reason.asked, cases[c].asked) == 0;
            }
        }
        if (!found) {
            fail_msg("%s is not refused for %s: %s", s.backend, cases[c].field, cases[c].asked);
        }
        m.api->assignment_destroy(assignment);
        m.api->runtime_destroy(m.runtime);
    }
}

static void refuse(struct mla *m, const char *field)
{
    m->error = (struct attn_error)ATTN_ERROR_INIT;
    attn_status status = m->api->run(m->plan, m->api->model_layer(m->model, 0), &m->io, &m->error);
    assert_int_not_equal(status, ATTN_OK);
    assert_string_equal(m->error.field, field);
}

static void test_bad_runs(void **unused)
{
    const struct setting s = {"cpu_ref", .heads = 4, .topk = 0, .num_reqs = 2, .queries = {1, 6}, .lens = {30, 41}};
    (void)unused;
    struct mla *m = mla_create(&s);
    step(m);
    struct attn_io_mla good = m->ext;
    struct attn_step_io io = m->io;
    m->io.next = NULL;
    refuse(m, "attn_io_mla");
    m->io = io;
    m->io.q = good.q_nope;
    refuse(m, "attn_io_mla");
    m->io = io;
    m->ext.q_nope = NULL;
    refuse(m, "q_nope");
    m->ext = good;
    m->ext.q_pe = good.q_nope;
    refuse(m, "q_pe");
    m->ext = good;
    m->ext.kv_c = NULL;
    refuse(m, "kv_c");
    m->ext = good;
    m->ext.k_pe = good.kv_c;
    refuse(m, "k_pe");
    m->ext = good;
    m->io.out = good.q_nope;
    refuse(m, "out");
    m->io = io;
    m->io.lse = good.kv_c;
    refuse(m, "lse");
    m->io = io;
    m->q[3][1][2] = NAN;
    refuse(m, "q_nope");
    m->q[3][1][2] = 1;
    step(m);
    compare(m, true);
    m->batch.seq_lens_host = NULL;
    assert_int_not_equal(m->api->plan(m->plan, &m->batch, NULL, &m->error), ATTN_OK);
    assert_string_equal(m->error.field, "seq_lens_host");
    mla_destroy(m);
}

static void test_bad_weights(void **unused)
{
    const struct setting s = {"cpu_ref", .heads = 4, .num_reqs = 1, .queries = {1}, .lens = {30}};
    struct attn_mla_weights weights = {.ext = {ATTN_EXT_MLA_WEIGHTS, 0, sizeof weights, NULL}};
    struct attn_layer_params params = {.struct_size = sizeof params};
    (void)unused;
    struct mla *m = mla_create(&s);
    attn_layer *layer = m->api->model_layer(m->model, 0);
    m->api->plan_destroy(m->plan);
    m->plan = NULL;
    assert_int_not_equal(m->api->layer_bind_params(layer, &params, &m->error), ATTN_OK);
    assert_string_equal(m->error.field, "attn_mla_weights");
    params.next = &weights.ext;
    assert_int_not_equal(m->api->layer_bind_params(layer, &params, &m->error), ATTN_OK);
    assert_string_equal(m->error.field, "w_uk");
    weights.w_uk = tensor(m, 0, m->uk, 3, 4, NOPE, RANK, NOPE * RANK, RANK);
    weights.w_uv = tensor(m, 1, m->uv, 3, 4, RANK, V + 1, RANK * V, V);
    assert_int_not_equal(m->api->layer_bind_params(layer, &params, &m->error), ATTN_OK);
    assert_string_equal(m->error.field, "w_uv");
    weights.w_uv = tensor(m, 1, m->uv, 3, 4, RANK, V, RANK * V, V);
    weights.w_uk_scale = tensor(m, 2, m->uv, 1, 3, 0, 0, 1, 0);
    assert_int_not_equal(m->api->layer_bind_params(layer, &params, &m->error), ATTN_OK);
    assert_string_equal(m->error.field, "w_uk_scale");
    weights.w_uk_scale = NULL;
    weights.kv_b_proj = tensor(m, 3, m->weights, 2, 4 * (NOPE + V), RANK + 1, 0, RANK, 1);
    assert_int_not_equal(m->api->layer_bind_params(layer, &params, &m->error), ATTN_OK);
    assert_string_equal(m->error.field, "kv_b_proj");
    mla_destroy(m);
}

/* Weights in 8 bits with a scale per head: what they read as is what is multiplied. */
static void test_scaled_weights(void **unused)
{
    const struct setting s = {"cpu_ref", .heads = 4, .split = true, .chunk = 8, .num_reqs = 3, .queries = {1, 5, 3},
                              .lens = {30, 20, 3}};
    static int8_t uk[4 * NOPE * RANK], uv[4 * RANK * V];
    static float scales[4] = {0.004f, 0.003f, 0.005f, 0.002f};
    struct attn_mla_weights weights = {.ext = {ATTN_EXT_MLA_WEIGHTS, 0, sizeof weights, NULL}};
    struct attn_layer_params params = {.struct_size = sizeof params, .next = &weights.ext};
    (void)unused;
    struct mla *m = mla_create(&s);
    m->api->plan_destroy(m->plan);
    for (int32_t i = 0; i < 4 * (NOPE + V) * RANK; i++) {
        int32_t h = i / ((NOPE + V) * RANK), r = i / RANK % (NOPE + V), d = i % RANK;
        int8_t code = (int8_t)nearbyint(m->weights[i] * 250);
        *(r < NOPE ? &uk[(h * NOPE + r) * RANK + d] : &uv[(h * RANK + d) * V + r - NOPE]) = code;
        m->weights[i] = (float)code * scales[h];
    }
    struct attn_tensor w_uk = *tensor(m, 0, uk, 3, 4, NOPE, RANK, NOPE * RANK, RANK);
    struct attn_tensor w_uv = *tensor(m, 1, uv, 3, 4, RANK, V, RANK * V, V);
    w_uk.dtype = w_uv.dtype = (struct attn_dtype){ATTN_CODE_INT, 8, 1};
    weights.w_uk = &w_uk;
    weights.w_uv = &w_uv;
    weights.w_uk_scale = weights.w_uv_scale = tensor(m, 2, scales, 1, 4, 0, 0, 1, 0);
    CHECK(m, m->api->layer_bind_params(m->api->model_layer(m->model, 0), &params, &m->error));
    const struct attn_plan_options plan = {
        .struct_size = sizeof plan, .limits = {sizeof plan.limits, NULL, MAX_REQS, 100, 0, MAX_LENGTH, 0, 0}};
    CHECK(m, m->api->plan_create(m->model, 0, &plan, &m->plan, &m->error));
    CHECK(m, m->api->plan_bind_workspace(m->plan, m->workspace, m->api->plan_workspace_bytes(m->plan), &m->error));
    set_io(m, stage_keys(m, false));
    step(m);
    compare(m, true);
    mla_destroy(m);
}

int main(void)
{
    /* with the published sizes only what needs them: the oracle projects every key anew */
    const struct CMUnitTest large[] = {cmocka_unit_test(test_ds_mla)};
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_graph),          cmocka_unit_test(test_fp8_output),
        cmocka_unit_test(test_fp8_query),      cmocka_unit_test(test_window),
        cmocka_unit_test(test_scales),         cmocka_unit_test(test_sinks),
        cmocka_unit_test(test_first_row),
        cmocka_unit_test(test_decode),         cmocka_unit_test(test_prefill),
        cmocka_unit_test(test_idle_requests),  cmocka_unit_test(test_sparse),
        cmocka_unit_test(test_fp8),            cmocka_unit_test(test_padded_heads),
        cmocka_unit_test(test_without_absorption), cmocka_unit_test(test_gathered_once),
        cmocka_unit_test(test_latent_only),    cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_bad_runs),       cmocka_unit_test(test_bad_weights),
        cmocka_unit_test(test_scaled_weights),
    };
    return RANK == 512 ? cmocka_run_group_tests(large, NULL, NULL) : cmocka_run_group_tests(tests, NULL, NULL);
}
