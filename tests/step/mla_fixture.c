/* SPDX-License-Identifier: Apache-2.0 */
#include "mla_fixture.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "support/client.h"
#include "support/layer.h"
#include "support/number.h"
#include "support/oracle.h"
#include "support/random.h"

static uint64_t state;

const struct attn_tensor *tensor(struct mla *m, int32_t which, void *data, int32_t ndim, int64_t a,
                                 int64_t b, int64_t c, int64_t sa, int64_t sb)
{
    const int64_t strides[] = {sa, ndim > 2 ? sb : 1, 1};
    const int32_t dtype = m->s->dtype != 0 ? m->s->dtype : ATTN_DTYPE_F32;
    return shaped_set(&m->tensors[which], data, dtype, ndim, (int64_t[]){a, b, c}, strides);
}

/* Bytes of a number of the activations. */
static int64_t element(const struct mla *m)
{
    return m->s->dtype == 0 || m->s->dtype == ATTN_DTYPE_F32 ? 4 : 2;
}

/* Floats become numbers of the activations' dtype, in place. */
static void encode(const struct mla *m, float *values, int64_t count)
{
    for (int64_t i = 0; i < count && element(m) < 4; i++) {
        number_store(values, i, m->s->dtype, values[i]);
    }
}

void open_core(struct mla *m)
{
    struct attn_runtime_options options = client_options(PLUGINS);
    options.ignore_environment = getenv("ATTN_RECORD") == NULL;
    options.num_threads = 2;
    options.validate = 1;
    options.isolation = -1; /* valgrind shows another processor than a process of its own sees */
    CHECK(m, client_open(CORE_FILE, &options, &m->api, &m->runtime, &m->error));
}

void describe(struct mla *m)
{
    const struct setting *s = m->s;
    m->desc = (struct attn_mla_desc){.kv_lora_rank = RANK,
                                     .qk_nope_head_dim = NOPE,
                                     .qk_rope_head_dim = ROPE,
                                     .v_head_dim = V,
                                     .topk = s->lists ? 0 : s->topk,
                                     .absorb_in_core = !s->latent,
                                     .padded_num_q_heads = s->padded,
                                     .weight_dtype = s->int8         ? ATTN_DTYPE_INT8
                                                     : s->mxfp4      ? ATTN_DTYPE_MXFP4
                                                     : s->dtype != 0 ? s->dtype
                                                                     : ATTN_DTYPE_F32,
                                     .context_workspace_tokens = s->chunk};
    m->cp = EXTENSION(attn_context_parallel, ATTN_EXT_CONTEXT_PARALLEL, NULL, .decode = s->ranks,
                      .interleave = s->interleave, .reduce = s->reduce);
    m->lists = EXTENSION(attn_index_lists, ATTN_EXT_DRAFT_INDEX_LISTS, NULL, .max_entries = s->topk,
                         .has_lengths = s->lengths);
    m->desc.ext.next = s->ranks != NULL ? &m->cp.ext : s->lists ? &m->lists.ext : NULL;
    m->described = SIZED(
        attn_layer_desc, .name = "mla", .dtype = s->dtype != 0 ? s->dtype : ATTN_DTYPE_F32,
        .tree_mask = s->tree ? ATTN_TREE_BITS : ATTN_TREE_NONE,
        .kv_dtype = s->ds_mla ? ATTN_KV_FP8_DS_MLA
                    : s->fp8  ? s->fp8
                              : ATTN_KV_AUTO,
        .output_form = s->fp8_out ? ATTN_OUTPUT_FP8_STATIC : ATTN_OUTPUT_PLAIN,
        .num_q_heads = s->heads, .block_size = BLOCK, .has_window = s->window > 0,
        .window_left = s->window > 0 ? s->window - 1 : -1, .window_right = s->window > 0 ? 0 : -1,
        .has_sinks = s->has_sinks,
        .q_scale_form = s->fp8_query ? ATTN_SCALE_PER_TENSOR : ATTN_SCALE_NONE,
        .q_dtype = s->fp8_query ? ATTN_DTYPE_FP8_E4M3 : ATTN_DTYPE_DEFAULT, .needs_lse = !s->no_lse,
        .batch_invariant = s->invariant, .num_speculative_tokens = s->drafted);
    layer_set_mla(&m->described, &m->desc);
    m->described.head_size_v = 0;
    m->described.scale = 0.21f;
}

/* Weights become codes with scales, and what these stand for what the formula reads. */
static void encode_weights(struct mla *m)
{
    static const double e2m1[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
    uint64_t random = 5;
    for (int32_t i = 0; i < m->s->heads * (NOPE + V) * RANK; i++) {
        int32_t h = i / ((NOPE + V) * RANK), r = i / RANK % (NOPE + V), d = i % RANK;
        int32_t of_v = r >= NOPE, at = (h * NOPE + r) * RANK + d, block = at / 32;
        if (of_v) { /* blocks of both lie along the latent row */
            at = (h * RANK + d) * V + r - NOPE;
            block = (h * (RANK / 32) + d / 32) * V + r - NOPE;
        }
        uint8_t *codes = m->codes[of_v];
        if (m->s->int8) {
            m->head_scales[h] = 0.002f + 0.001f * (float)(h * 3 % 4);
            codes[at] = (uint8_t)(int8_t)nearbyint(m->weights[i] * 250);
            m->weights[i] = (float)(int8_t)codes[at] * m->head_scales[h];
        } else {
            int32_t power = 122 + (h + r + d / 32) % 4, code = random_below(&random, 16);
            int32_t other = at % 2 ? codes[at / 2] & 15 : codes[at / 2] & 0xf0;
            codes[at / 2] = (uint8_t)(other | code << 4 * (at % 2));
            m->block_scales[of_v][block] = (uint8_t)power;
            m->weights[i] = (float)((code & 8 ? -1 : 1) * e2m1[code & 7] * ldexp(1, power - 127));
        }
    }
}

static const struct attn_tensor *weight(struct mla *m, int32_t which, void *data,
                                        struct attn_dtype dtype, int32_t ndim, int64_t a, int64_t b,
                                        int64_t c)
{
    shaped_set(&m->weight[which], data, ATTN_DTYPE_F32, ndim, (int64_t[]){a, b, c}, NULL);
    m->weight[which].tensor.dtype = dtype;
    m->weight[which].tensor.data = (uint8_t *)data - 4; /* within a larger buffer */
    m->weight[which].tensor.byte_offset = 4;
    return &m->weight[which].tensor;
}

static void give_weights(struct mla *m)
{
    const struct setting *s = m->s;
    const bool coded = s->int8 || s->mxfp4;
    const struct attn_dtype dtype = s->int8 ? (struct attn_dtype){ATTN_CODE_INT, 8, 1}
                                    : s->mxfp4
                                        ? (struct attn_dtype){ATTN_CODE_FLOAT4_E2M1FN, 4, 1}
                                        : number_dtype(s->dtype != 0 ? s->dtype : ATTN_DTYPE_F32);
    const struct attn_dtype e8m0 = {ATTN_CODE_FLOAT8_E8M0FNU, 8, 1};
    m->given = EXTENSION(attn_mla_weights, ATTN_EXT_MLA_WEIGHTS, NULL, );
    if (!s->split && !coded) {
        m->given.kv_b_proj = weight(m, 0, m->weights, dtype, 2, s->heads * (NOPE + V), RANK, 0);
        return;
    }
    if (coded) {
        encode_weights(m);
    }
    m->given.w_uk =
        weight(m, 0, coded ? (void *)m->codes[0] : m->uk, dtype, 3, s->heads, NOPE, RANK);
    m->given.w_uv = weight(m, 1, coded ? (void *)m->codes[1] : m->uv, dtype, 3, s->heads, RANK, V);
    if (s->int8) {
        m->given.w_uk_scale = m->given.w_uv_scale =
            weight(m, 2, m->head_scales, number_dtype(ATTN_DTYPE_F32), 1, s->heads, 0, 0);
    } else if (s->mxfp4) {
        m->given.w_uk_scale = weight(m, 2, m->block_scales[0], e8m0, 3, s->heads, NOPE, RANK / 32);
        m->given.w_uv_scale = weight(m, 3, m->block_scales[1], e8m0, 3, s->heads, RANK / 32, V);
    }
}

static void bind(struct mla *m)
{
    struct attn_cache_spec spec;
    struct attn_layer_params params =
        SIZED(attn_layer_params, .next = &m->given.ext, .k_scale_host = m->k_scale,
              .q_scale_host = m->s->fp8_query ? QUERY_SCALE : 0,
              .sinks = m->s->has_sinks ? m->sinks : NULL);
    OPEN_LAYER(m, m->s->backend, &m->described);
    CHECK(m, client_cache(m->api, m->layer, NUM_BLOCKS, &spec, &m->cache, &m->error));
    assert_int_equal(spec.kind,
                     m->s->window > 0 ? ATTN_KV_SPEC_SLIDING_WINDOW_MLA : ATTN_KV_SPEC_MLA);
    assert_int_equal(spec.page_bytes,
                     m->s->ds_mla ? BLOCK * 656 : BLOCK * ROW * (m->s->fp8 ? 1 : element(m)));
    give_weights(m);
    CHECK(m, m->api->layer_bind_params(m->layer, &params, &m->error));
    OPEN_PLAN(m, MAX_REQS, 100, MAX_LENGTH);
}

static void draw(struct mla *m)
{
    const struct setting *s = m->s;
    int32_t used = 0;
    m->starts[0] = s->first_row;
    state += s->ranks != NULL ? 1000 * (uint64_t)s->ranks->rank : 0; /* a rank's own heads */
    for (int32_t h = 0; h < s->heads; h++) {
        m->sinks[h] = (float)random_within(&state, 3);
        for (int32_t i = 0; i < (NOPE + V) * RANK; i++) {
            float w = (float)random_within(&state, 2.8 / sqrt(RANK));
            int32_t r = i / RANK, d = i % RANK;
            m->weights[h * (NOPE + V) * RANK + i] = w;
            if (r < NOPE) {
                m->uk[(h * NOPE + r) * RANK + d] = w;
            } else {
                m->uv[(h * RANK + d) * V + r - NOPE] = w;
            }
        }
    }
    uint64_t own = state;
    state = s->ranks != NULL ? 99 : state; /* the rows are all ranks' */
    for (int32_t r = 0; r < s->num_reqs; r++) {
        m->starts[r + 1] = m->starts[r] + s->queries[r];
        m->lens[r] = s->lens[r];
        for (int32_t b = 0; b < MAX_BLOCKS; b++) {
            m->table[r][b] = b * BLOCK < s->lens[r] ? used++ * 7 % NUM_BLOCKS : INT32_MIN;
        }
        for (int32_t i = 0; i < s->lens[r] * ROW; i++) {
            m->rows[r][i / ROW][i % ROW] = (float)random_within(&state, 2);
        }
        for (int32_t i = 0; i < s->queries[r]; i++) {
            int32_t length = s->lens[r] - s->queries[r] + i + 1, n = 0;
            /* a stretch with gaps; what is out of range or later is no key */
            for (; n < s->topk; n++) {
                static const int32_t wrong[] = {-1, 1 << 20};
                m->topk[m->starts[r] + i][n] =
                    n % 3 == 2 ? wrong[n / 3 % 2] : (n * 5 + i) % (length + 2);
            }
        }
    }
    state = s->ranks != NULL ? own : state;
    for (int32_t i = 0; i < m->starts[s->num_reqs] * MAX_HEADS * (RANK + ROPE); i++) {
        (&m->q[0][0][0])[i] = (float)random_within(&state, 3);
    }
    for (int32_t i = 0; i < m->starts[s->num_reqs] * MAX_HEADS && s->moved; i++) {
        float *q = m->q[i / MAX_HEADS][i % MAX_HEADS];
        memcpy(q + RANK, q + NOPE, ROPE * sizeof *q);
        memset(q + NOPE, 0, ROPE * sizeof *q);
    }
    encode(m, &m->q[0][0][0], (int64_t)m->starts[s->num_reqs] * MAX_HEADS * (RANK + ROPE));
    encode(m, m->weights, MAX_HEADS * (NOPE + V) * RANK);
}

/* The slot of position j; -1: another rank's. */
static int64_t slot_of(const struct mla *m, int32_t r, int32_t j)
{
    const struct setting *s = m->s;
    int32_t n = s->ranks != NULL ? s->ranks->world_size : 1, each = s->ranks ? s->interleave : 1;
    int32_t at = j % (BLOCK * n), rank = s->ranks != NULL ? s->ranks->rank : 0;
    return at / each % n != rank
               ? -1
               : (int64_t)m->table[r][j / (BLOCK * n)] * BLOCK + at / (n * each) * each + at % each;
}

/* Keys of every request, one after the other, the step's own in the rows of its tokens; returns
 * how many rows. */
int32_t stage_keys(struct mla *m, bool context)
{
    int32_t count = context ? 0 : m->starts[0];
    for (int32_t i = 0; i < count; i++) {
        m->slots[i] = -1;
    }
    for (int32_t r = 0; r < m->s->num_reqs; r++) {
        int32_t own = m->lens[r] - m->s->queries[r];
        for (int32_t j = context ? 0 : own; j < (context ? own : m->lens[r]); j++, count++) {
            m->slots[count] = slot_of(m, r, j);
            memcpy(m->kv_c[count], m->rows[r][j], sizeof m->kv_c[0]);
            memcpy(m->k_pe[count], m->rows[r][j] + RANK, sizeof m->k_pe[0]);
        }
    }
    encode(m, m->kv_c[0], (int64_t)count * RANK);
    encode(m, m->k_pe[0], (int64_t)count * ROPE);
    return count;
}

static double through_fp8(double x, double scale, int32_t dtype)
{
    return number_round(x / scale, dtype) * scale;
}

/* Codes in place of the floats that they round. */
static void encode_query(struct mla *m, int32_t which, float *values, int64_t count)
{
    for (int64_t i = 0; i < count; i++) {
        number_store(values, i, ATTN_DTYPE_FP8_E4M3, values[i] / QUERY_SCALE);
    }
    m->tensors[which].tensor.dtype = number_dtype(ATTN_DTYPE_FP8_E4M3);
}

void set_io(struct mla *m, int32_t keys)
{
    const struct setting *s = m->s;
    int64_t tokens = m->starts[s->num_reqs], heads = s->padded > 0 ? s->padded : s->heads;
    int64_t width = s->latent ? RANK : NOPE, row = MAX_HEADS * (RANK + ROPE);
    m->ext =
        EXTENSION(attn_io_mla, ATTN_EXT_IO_MLA, NULL, .topk_indices = m->topk[0], .topk_stride = 8);
    if (s->lists) {
        for (int32_t t = 0; t < MAX_REQS * 40; t++) {
            m->list_lengths[t] = s->topk;
        }
        m->lists_io =
            EXTENSION(attn_io_index_lists, ATTN_EXT_DRAFT_IO_INDEX_LISTS, NULL,
                      .indices = m->topk[0], .token_stride = 8,
                      .lengths = s->lengths ? m->list_lengths : NULL, .length_stride = s->lengths);
        m->ext.topk_indices = NULL;
        m->ext.ext.next = &m->lists_io.ext;
    }
    m->ext.kv_c = tensor(m, 0, m->kv_c, 2, keys, RANK, 0, RANK, 1);
    m->ext.k_pe = tensor(m, 1, m->k_pe, 2, keys, ROPE, 0, ROPE, 1);
    if (!s->apart) { /* slices of one row, as a projection leaves them */
        m->ext.q_nope = tensor(m, 2, m->q, 3, tokens, heads, width, row, RANK + ROPE);
        m->ext.q_pe = tensor(m, 3, (char *)m->q + (s->moved ? RANK : width) * element(m), 3, tokens,
                             heads, ROPE, row, RANK + ROPE);
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
    m->io = SIZED(attn_step_io, .next = &m->ext.ext);
    m->io.out = tensor(m, 4, m->out, 3, tokens, s->heads, size, s->heads * size, size);
    if (s->fp8_out) {
        static const float scale = 0.02f;
        m->tensors[4].tensor.dtype = number_dtype(ATTN_DTYPE_FP8_E4M3);
        m->quant = EXTENSION(attn_io_output_quant, ATTN_EXT_IO_OUTPUT_QUANT, NULL, .scale = &scale);
        m->quant.ext.next = m->ext.ext.next;
        m->ext.ext.next = &m->quant.ext;
    }
    m->io.lse = s->no_lse ? NULL : tensor(m, 5, m->lse, 2, heads, tokens, 0, tokens, 1);
    m->tensors[5].tensor.dtype = number_dtype(ATTN_DTYPE_F32);
}

static void set_batch(struct mla *m, int32_t keys)
{
    static const uint32_t all = UINT32_MAX; /* every row of every request sees all */
    m->batch = client_batch(m->s->num_reqs, m->starts, m->lens);
    m->batch.block_table = m->table[0];
    m->batch.block_table_stride = MAX_BLOCKS;
    m->batch.slot_mapping = m->slots;
    m->batch.num_slots = keys;
    m->batch.tree = m->s->tree ? &all : NULL;
}

struct mla *mla_create(const struct setting *s)
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
        step(m);
    }
    keys = stage_keys(m, false);
    set_batch(m, keys);
    set_io(m, keys);
    return m;
}

void mla_end(struct mla **m)
{
    free((*m)->cache);
    free((*m)->out);
    free((*m)->lse);
    CLOSE(*m);
}

/* 512 e4m3 in tiles of 128 with a float32 scale each, the rope part in bf16. */
static double through_ds_mla(const float *row, int32_t d)
{
    float largest = 0;
    if (d >= RANK) {
        return number_round(row[d], ATTN_DTYPE_BF16);
    }
    for (int32_t i = d / 128 * 128; i < d / 128 * 128 + 128 && i < RANK; i++) {
        largest = fmaxf(largest, fabsf(row[i]));
    }
    return through_fp8(row[d], largest / 448, ATTN_DTYPE_FP8_E4M3);
}

static double row_value(const struct mla *m, int32_t r, int32_t j, int32_t d, bool cached)
{
    double x = m->rows[r][j][d];
    if (cached && m->s->ds_mla) {
        return through_ds_mla(m->rows[r][j], d);
    }
    const bool e5m2 = m->s->fp8 == ATTN_KV_FP8_E5M2;
    const int32_t dtype = e5m2 ? ATTN_DTYPE_FP8_E5M2 : ATTN_DTYPE_FP8_E4M3;
    return cached && m->s->fp8 ? through_fp8(x, m->k_scale, dtype) : x;
}

double formula(const struct mla *m, int32_t r, int32_t i, int32_t h, bool per_head, double *out)
{
    static double keys[MAX_LENGTH][ROW], weights[(NOPE + V) * RANK];
    const struct setting *s = m->s;
    int32_t own = s->lens[r] - s->queries[r], position = own + i, token = m->starts[r] + i;
    int32_t seen[MAX_LENGTH], count = 0;
    double q[RANK + ROPE], scores[MAX_LENGTH], sink = m->sinks[h];
    const struct oracle_mla head = {NOPE,
                                    ROPE,
                                    V,
                                    RANK,
                                    m->described.scale,
                                    s->latent ? NULL : weights,
                                    s->has_sinks ? &sink : NULL};
    for (int32_t n = 0; n < (s->topk > 0 ? s->topk : position + 1); n++) {
        int32_t j = s->topk > 0 ? m->topk[token][n] : n;
        if (j >= 0 && j <= position && (s->window == 0 || position - j < s->window)) {
            seen[count++] = j;
        }
    }
    for (int32_t j = 0; j <= position; j++) {
        for (int32_t d = 0; d < ROW; d++) {
            keys[j][d] = row_value(m, r, j, d, !per_head || j < own);
        }
    }
    for (int32_t n = 0; n < (NOPE + V) * RANK; n++) {
        weights[n] = m->weights[h * (NOPE + V) * RANK + n];
    }
    for (int32_t d = 0; d < RANK + ROPE; d++) {
        q[d] = s->fp8_query ? through_fp8(m->q[token][h][d], QUERY_SCALE, ATTN_DTYPE_FP8_E4M3)
                            : m->q[token][h][d];
    }
    return oracle_mla(&head, q, keys[0], seen, count, scores, out);
}

void compare(const struct mla *m, bool prefill_per_head)
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

void step(struct mla *m)
{
    PLAN(m);
    RUN(m);
}

void check(const struct setting *s, bool per_head)
{
    OWNED(mla_end) struct mla *m = mla_create(s);
    step(m);
    compare(m, per_head);
    /* a second step on the same plan finds nothing of the first */
    memset(m->out, 0xff, (size_t)m->starts[s->num_reqs] * (size_t)s->heads * V * 4);
    step(m);
    compare(m, per_head);
}
