/* SPDX-License-Identifier: Apache-2.0 */
/* Two caches under one softmax, as an engine runs them: steps over a window of own rows and over
 * rows that stand for several tokens, held to the formula in float64. What no query sees is NaN;
 * needles stand in rows that decide, and in those next to them that must not. */
#include <attn/draft/compressed.h>
#include <attn/draft/output_rope.h>
#include <math.h>
#include <stdio.h>

#include "common/command.h"
#include "common/names.h"
#include "core/engine.h"
#include "core/steps.h"
#include "support/layer.h"
#include "support/number.h"
#include "support/oracle.h"
#include "support/random.h"

enum { REQS = STEPS_REQS, TOKENS = STEPS_TOKENS, LONGEST = STEPS_LONGEST, BLOCK = STEPS_BLOCK };
enum { ROW_COLUMNS = 3, ROW_BLOCKS = REQS * ROW_COLUMNS + 1, ROTARY = 64 };
enum { WINDOW = 24, TOPK_FEW = 16, MAX_SIZE = 512, V4_CODES = 448, V4_ROW = 576, V4_SCALES = 8 };
enum { WIDE_WINDOW = 70, WIDE_TOPK = 512 }; /* several tiles of a kernel for both caches */

struct compressed_variant {
    int32_t ratio, topk, size, heads, dtype, kv_dtype, window; /* window 0: all own rows are seen */
    float soft_cap;
    bool rotates;  /* the output's last ROTARY dims */
    bool captured; /* the step of decodes runs as a graph */
    bool no_sinks;
};

enum { Q = STEPS_OPERANDS, OWN, POOLED, CACHE, ROW_CACHE, OUT, LSE, SINKS, ROW_LENS };
enum { ROW_TABLE = ROW_LENS + 1, ROW_SLOTS, TOPK, POSITIONS, COS_SIN, NUM_OPERANDS };

struct compressed_case {
    const struct compressed_variant *v;
    struct steps steps;
    int32_t row_lens[STEPS][REQS];
    double scale;
};

static double *values_of(const struct kernel_test *test, int32_t operand, int32_t dtype, int64_t at,
                         int32_t count, double *values)
{
    for (int32_t d = 0; d < count; d++) {
        values[d] = number_load(test_input(test, operand), at + d, dtype);
    }
    return values;
}

/* Makes a row one that a head of a query scores higher by `more`. */
static void add_needle(const struct compressed_case *c, struct kernel_test *test, int32_t operand,
                       int64_t row, int32_t token, int32_t head, double more)
{
    const int32_t size = c->v->size, dtype = c->v->dtype;
    double q[MAX_SIZE] = {0}, key[MAX_SIZE] = {0};
    values_of(test, Q, dtype, ((int64_t)token * c->v->heads + head % c->v->heads) * size, size, q);
    values_of(test, operand, dtype, row * size, size, key);
    const double factor = more / (c->scale * oracle_dot(q, q, size));
    for (int32_t d = 0; d < size; d++) {
        number_store(test_input(test, operand), row * size + d, dtype, key[d] + factor * q[d]);
    }
}

/* For the last query of each request: the row that it finishes or the last one that is finished, a
 * row that its list does not name, the last own row in the window and the first one outside. */
static void add_needles(const struct compressed_case *c, struct kernel_test *test)
{
    for (int32_t r = 0; r < REQS; r++) {
        const int32_t end = steps_end(&c->steps, r), rows = end / c->v->ratio;
        const int32_t last = steps_token(&c->steps, r, end - 1);
        if (rows > 0) {
            add_needle(c, test, POOLED, steps_token(&c->steps, r, rows * c->v->ratio - 1), last, 0,
                       12);
        }
        if (c->v->topk > 0) {
            add_needle(c, test, POOLED, steps_token(&c->steps, r, rows / 2 * c->v->ratio - 1), last,
                       1, 24);
        }
        if (c->v->window > 0 && end > c->v->window) {
            const int32_t first = end - c->v->window;
            add_needle(c, test, OWN, steps_token(&c->steps, r, first), last, 2, 12);
            add_needle(c, test, OWN, steps_token(&c->steps, r, first - 1), last, 3, 24);
        }
    }
}

/* Finished rows, each once, and what lists nothing; the last query of a request names the row of
 * its needle and not the one in the middle. Every eighth list is empty. */
static void fill_list(const struct compressed_case *c, int32_t token, int32_t *to, uint64_t *random)
{
    int32_t list[WIDE_TOPK];
    const int32_t rows = (c->steps.position[token] + 1) / c->v->ratio, r = c->steps.request[token];
    const int32_t first = rows > 0 ? random_below(random, rows) : 0;
    const bool last = c->steps.position[token] == steps_end(&c->steps, r) - 1;
    for (int32_t i = 0; i < c->v->topk; i++) {
        const int32_t row = i < rows ? (first + 5 * i) % rows : -1;
        const bool again = i > 0 && rows % 5 == 0; /* steps of 5 then meet rows twice */
        list[i] = i == 2 || again || (last && (row == rows - 1 || row == rows / 2)) ? -1 : row;
        list[i] = token % 8 == 7 && !last ? -1 : i == 3 ? rows : i == 5 ? 1 << 20 : list[i];
    }
    if (last) {
        list[4] = rows - 1;
    }
    for (int32_t i = 0; i < c->v->topk; i++) { /* long ones are spread over all of their places */
        to[c->v->topk > TOPK_FEW ? i * 13 % c->v->topk : i] = list[i];
    }
}

static void fill(const struct compressed_case *c, struct kernel_test *test, uint64_t *random)
{
    const struct compressed_variant *v = c->v;
    int32_t *table = test_input(test, ROW_TABLE);
    steps_fill(&c->steps, test, random);
    random_order(random, table, REQS * ROW_COLUMNS, 1);
    oracle_angles(test_input(test, COS_SIN), STEPS_LONGEST, ROTARY);
    for (int32_t h = 0; h < v->heads; h++) {
        ((float *)test_input(test, SINKS))[h] = (float)(1 + 2 * random_normal(random));
    }
    for (int32_t t = 0; t < TOKENS; t++) {
        const int32_t row = (c->steps.position[t] + 1) / v->ratio - 1, r = c->steps.request[t];
        const bool finishes = (c->steps.position[t] + 1) % v->ratio == 0;
        int64_t *row_slot = (int64_t *)test_input(test, ROW_SLOTS) + t;
        ((int64_t *)test_input(test, POSITIONS))[t] = c->steps.position[t];
        *row_slot = finishes ? steps_slot(table, ROW_COLUMNS, r, row) : -1;
        for (int32_t d = 0; d < v->size; d++) { /* tiles of other magnitudes */
            const double x = ldexp(random_normal(random), -(d / 64 % 3));
            const int64_t at = (int64_t)t * v->size + d;
            number_store(test_input(test, OWN), at, v->dtype, ldexp(x, t % 4 - 2));
            if (finishes) {
                number_store(test_input(test, POOLED), at, v->dtype, x);
            }
        }
    }
    add_needles(c, test);
    for (int32_t t = 0; t < TOKENS && v->topk > 0; t++) {
        fill_list(c, t, (int32_t *)test_input(test, TOPK) + (int64_t)t * v->topk, random);
    }
}

/* The layer and what it points to. */
struct described {
    struct attn_layer_desc layer;
    struct attn_mla_desc mla;
    struct layer_compressed compressed;
    struct attn_output_rope rope;
};

static void describe(const struct compressed_variant *v, struct described *x)
{
    x->rope =
        EXTENSION(attn_output_rope, ATTN_EXT_DRAFT_OUTPUT_ROPE, NULL,
                  .form = v->ratio == 4 ? ATTN_ROPE_GPTJ : ATTN_ROPE_NEOX, .rotary_dim = ROTARY);
    x->layer = SIZED(attn_layer_desc, .name = "compressed", .dtype = v->dtype,
                     .kv_dtype = v->kv_dtype, .num_q_heads = v->heads, .soft_cap = v->soft_cap,
                     .has_sinks = !v->no_sinks, .block_size = BLOCK, .needs_lse = 1);
    layer_set_window(&x->layer, v->window);
    layer_set_compressed(&x->layer, &x->mla, &x->compressed, v->size, v->topk, v->ratio, BLOCK);
    x->compressed.rows.ext.next = v->rotates ? &x->rope.ext : NULL;
    x->layer.scale = (float)(2 / sqrt(v->size));
}

/* Captured, and run by its graph alone. */
static attn_status run_captured(struct check_engine *e, struct kernel_call *call,
                                const struct attn_batch *batch, const struct attn_step_io *io,
                                struct attn_error *error)
{
    const struct attn_api *api = e->core->api;
    attn_plan *plan = e->plans[0].plan;
    attn_status status = api->plan_graph(plan, ATTN_PLAN_CAPTURE, batch, call->stream, error);
    const bool captures = status == ATTN_OK && device_capture_begin(call->device, call->stream);
    status = status == ATTN_OK ? api->run(plan, e->layer, io, error) : status;
    void *graph = captures ? device_capture_end(call->device, call->stream) : NULL;
    status = status == ATTN_OK && captures
                 ? api->plan_graph(plan, ATTN_PLAN_REPLAY, batch, call->stream, error)
                 : status;
    if (status == ATTN_OK && captures) {
        status = graph != NULL && device_graph_launch(call->device, graph, call->stream)
                     ? ATTN_OK
                     : ATTN_ERROR_DEVICE;
    }
    uint8_t drained; /* the graph may not be destroyed under its own launch */
    device_read(call->device, &drained, call->base, 1);
    device_graph_finish(call->device, graph);
    return status;
}

static attn_status run_step(struct check_engine *e, const void *context, struct kernel_call *call,
                            int32_t s, struct attn_error *error)
{
    const struct compressed_case *c = context;
    static const int32_t by_token[] = {Q, OWN, POOLED, OUT, LSE};
    struct kernel_call now;
    struct attn_batch batch = steps_batch(&c->steps, call, s);
    const struct attn_batch_table rows = {
        .block_table = call_array(call, ROW_TABLE),
        .block_table_stride = ROW_COLUMNS,
        .slot_mapping = (int64_t *)call_array(call, ROW_SLOTS) + c->steps.first[s],
        .num_slots = batch.num_slots,
        .seq_lens = (int32_t *)call_array(call, ROW_LENS) + s * REQS,
        .seq_lens_host = c->row_lens[s]};
    batch.tables = &rows;
    batch.num_tables = 1;
    batch.table_stride = sizeof rows;
    call_bind(&now, call->test, call->backend, call->device, call->base);
    for (int32_t i = 0; i < 5; i++) {
        call_narrow(&now, by_token[i], by_token[i] == LSE, c->steps.first[s], batch.num_tokens);
    }
    const struct attn_tensor *const pooled[] = {&now.tensors[POOLED]};
    const struct attn_io_output_rope rope =
        EXTENSION(attn_io_output_rope, ATTN_EXT_DRAFT_IO_OUTPUT_ROPE, NULL,
                  .positions = (int64_t *)call_array(call, POSITIONS) + c->steps.first[s],
                  .cos_sin = &now.tensors[COS_SIN]);
    const struct attn_io_caches caches =
        EXTENSION(attn_io_caches, ATTN_EXT_IO_CACHES, c->v->rotates ? &rope.ext : NULL,
                  .rows = pooled, .num_rows = 1);
    struct attn_io_mla mla = EXTENSION(attn_io_mla, ATTN_EXT_IO_MLA, &caches.ext,
                                       .q_nope = &now.tensors[Q], .kv_c = &now.tensors[OWN]);
    if (c->v->topk > 0) {
        mla.topk_indices =
            (int32_t *)call_array(call, TOPK) + (int64_t)c->steps.first[s] * c->v->topk;
        mla.topk_stride = c->v->topk;
    }
    const struct attn_step_io io = SIZED(attn_step_io, .next = &mla.ext, .stream = call->stream,
                                         .out = &now.tensors[OUT], .lse = &now.tensors[LSE]);
    return c->v->captured && s == 1 ? run_captured(e, call, &batch, &io, error)
                                    : steps_run(e, call, s, &batch, &io, error);
}

static attn_status run_steps(struct kernel_call *call, const void *context,
                             struct attn_error *error)
{
    const struct compressed_case *c = context;
    const int64_t row_blocks = ROW_BLOCKS;
    void *rows = call_array(call, ROW_CACHE);
    struct described x;
    describe(c->v, &x);
    const struct attn_layer_params params =
        SIZED(attn_layer_params, .sinks = c->v->no_sinks ? NULL : call_array(call, SINKS));
    const struct attn_cache_memory memory =
        SIZED(attn_cache_memory, .base = call_array(call, CACHE), .num_blocks = STEPS_BLOCKS,
              .further = &rows, .further_num_blocks = &row_blocks, .num_further = 1);
    const struct steps_layer layer = {&c->steps, &x.layer, &params,
                                      &memory,   run_step, c->v->captured};
    return steps_call(&layer, call, context, error);
}

/* A row of a cache as its true values, `given` being what was written there; false: it is not what
 * the cache should hold. */
static bool load_row(const struct compressed_case *c, const struct kernel_test *test,
                     int32_t operand, int64_t slot, const double *given, double *values)
{
    const int32_t size = c->v->size, dtype = c->v->dtype;
    const uint8_t *cache = test_found(test, operand);
    bool right = true;
    if (c->v->kv_dtype != ATTN_KV_FP8_DS_V4) {
        for (int32_t d = 0; d < size; d++) {
            values[d] = number_load(cache, slot * size + d, dtype);
            right &= values[d] == given[d];
        }
        return right;
    }
    const uint8_t *block = cache + slot / BLOCK * BLOCK * (V4_ROW + V4_SCALES);
    const uint8_t *row = block + slot % BLOCK * V4_ROW;
    const uint8_t *scales = block + BLOCK * V4_ROW + slot % BLOCK * V4_SCALES;
    for (int32_t first = 0; first < V4_CODES; first += 64) {
        double largest = 1e-4;
        for (int32_t d = first; d < first + 64; d++) {
            largest = fmax(largest, fabs(given[d]));
        }
        const double scale = ldexp(1, scales[first / 64] - 127);
        right &= largest <= 448 * scale && largest > 448 * scale / 2; /* the least that holds it */
        for (int32_t d = first; d < first + 64; d++) {
            values[d] = scale * number_load(row, d, ATTN_DTYPE_FP8_E4M3);
            right &= values[d] == scale * number_round(given[d] / scale, ATTN_DTYPE_FP8_E4M3);
        }
    }
    for (int32_t d = V4_CODES; d < size; d++) {
        values[d] = number_load(row + V4_CODES, d - V4_CODES, ATTN_DTYPE_BF16);
        right &= values[d] == number_round(given[d], ATTN_DTYPE_BF16);
    }
    return right;
}

/* All rows of a request, own ones and then compressed ones. */
static enum trial_result load_rows(const struct compressed_case *c, struct kernel_test *test,
                                   int32_t r, double *keys)
{
    const int32_t size = c->v->size, end = steps_end(&c->steps, r);
    double given[MAX_SIZE] = {0};
    for (int32_t i = 0; i < end + end / c->v->ratio; i++) {
        const bool own = i < end;
        const int32_t row = own ? i : i - end;
        const int32_t token = steps_token(&c->steps, r, own ? row : (row + 1) * c->v->ratio - 1);
        const int64_t slot = ((int64_t *)test_input(test, own ? STEPS_SLOTS : ROW_SLOTS))[token];
        values_of(test, own ? OWN : POOLED, c->v->dtype, (int64_t)token * size, size, given);
        TRIAL_FAIL_IF(
            test->trial,
            !load_row(c, test, own ? CACHE : ROW_CACHE, slot, given, keys + (int64_t)i * size),
            "request %d: %s row %d of the cache is not what was written", r,
            own ? "own" : "compressed", row);
    }
    return TRIAL_PASSED;
}

/* Which rows a token sees, of its request's as load_rows has them. */
static int32_t visible_rows(const struct compressed_case *c, const struct kernel_test *test,
                            int32_t token, int32_t *visible)
{
    const int32_t p = c->steps.position[token], end = steps_end(&c->steps, c->steps.request[token]);
    const int32_t rows = (p + 1) / c->v->ratio, topk = c->v->topk;
    const int32_t *list = (const int32_t *)test_input(test, TOPK) + (int64_t)token * topk;
    int32_t count = 0;
    for (int32_t j = c->v->window > 0 && p >= c->v->window ? p - c->v->window + 1 : 0; j <= p;
         j++) {
        visible[count++] = j;
    }
    for (int32_t i = 0; i < (topk > 0 ? topk : rows); i++) {
        const int32_t row = topk > 0 ? list[i] : i;
        if (row >= 0 && row < rows) {
            visible[count++] = end + row;
        }
    }
    return count;
}

/* The formula's out and log-sum-exp of a request's tokens, where the reference's would stand. */
static void expect(const struct compressed_case *c, struct kernel_test *test, int32_t r,
                   const double *keys)
{
    const int32_t size = c->v->size, heads = c->v->heads;
    double q[MAX_SIZE] = {0}, out[MAX_SIZE], scores[2 * LONGEST];
    int32_t visible[2 * LONGEST];
    for (int32_t t = 0; t < TOKENS; t++) {
        const int32_t count = c->steps.request[t] == r ? visible_rows(c, test, t, visible) : 0;
        for (int32_t h = 0; h < heads && c->steps.request[t] == r; h++) {
            const int64_t at = ((int64_t)t * heads + h) * size;
            const double sink = (double)((const float *)test_input(test, SINKS))[h];
            const struct oracle_mla head = {.rank = size,
                                            .scale = (double)(float)c->scale,
                                            .sink = c->v->no_sinks ? NULL : &sink,
                                            .soft_cap = (double)c->v->soft_cap};
            values_of(test, Q, c->v->dtype, at, size, q);
            const double lse = oracle_mla(&head, q, keys, visible, count, scores, out);
            if (c->v->rotates) {
                oracle_rotate(out, size, ROTARY, c->v->ratio != 4, c->steps.position[t], -1);
            }
            for (int32_t d = 0; d < size; d++) {
                number_store(test_expected(test, OUT), at + d, c->v->dtype, out[d]);
            }
            ((float *)test_expected(test, LSE))[(int64_t)h * TOKENS + t] = (float)lse;
        }
    }
}

static enum trial_result verify(const struct compressed_case *c, struct kernel_test *test)
{
    struct factor_value v[FACTOR_COUNT] = {{0, 0}};
    const struct compared_lse lse = {c->v->heads, TOKENS, 1, 0, TOKENS, NULL};
    OWNED(memory_end)
    double *keys = command_calloc((size_t)(2 * LONGEST * c->v->size), sizeof *keys);
    for (int32_t r = 0; r < REQS; r++) {
        TRIAL_TRY(load_rows(c, test, r, keys));
        expect(c, test, r, keys);
    }
    v[FACTOR_DTYPE].a = c->v->dtype;
    v[FACTOR_KV_DTYPE].a = c->v->kv_dtype;
    TRIAL_TRY(kernel_test_compare(test, OUT, NULL, bound_of_case(v)));
    return compare_lse(test->trial, &lse, test_expected(test, LSE), test_found(test, LSE),
                       bound_of_lse(v));
}

static enum trial_result run_compressed(struct trial *trial, const void *variant, uint64_t seed)
{
    struct compressed_case c = {.v = variant};
    const struct compressed_variant *v = c.v;
    const int64_t size = v->size;
    const size_t row = v->kv_dtype == ATTN_KV_FP8_DS_V4 ? V4_ROW + V4_SCALES
                                                        : (size_t)size * number_bytes(v->dtype);
    const size_t topk = (size_t)v->topk;
    OWNED(kernel_test_finish) struct kernel_test test;
    steps_init(&c.steps);
    c.scale = 2 / sqrt(v->size);
    for (int32_t i = 0; i < STEPS * REQS; i++) {
        c.row_lens[i / REQS][i % REQS] = c.steps.lens[i / REQS][i % REQS] / v->ratio;
    }
    struct operand operands[NUM_OPERANDS] = {
        [Q] = {"q_nope", v->dtype, 3, {TOKENS, v->heads, size}, .deviation = 2},
        [OWN] = {"kv_c", v->dtype, 2, {TOKENS, size}},
        [POOLED] = {"rows", v->dtype, 3, {TOKENS, 1, size}},
        [CACHE] = {"the layer's cache", .bytes = STEPS_BLOCKS * BLOCK * row, .written = true},
        [ROW_CACHE] = {"the further cache", .bytes = ROW_BLOCKS * BLOCK * row, .written = true},
        [OUT] = {"out", v->dtype, 3, {TOKENS, v->heads, size}, .written = true},
        [LSE] = {"lse", ATTN_DTYPE_F32, 2, {v->heads, TOKENS}, .written = true},
        [SINKS] = {"sinks", .bytes = (size_t)v->heads * sizeof(float)},
        [ROW_LENS] = {"seq_lens of the rows", .bytes = sizeof c.row_lens, .from = c.row_lens},
        [ROW_TABLE] = {"block_table of the rows", .bytes = REQS * ROW_COLUMNS * sizeof(int32_t)},
        [ROW_SLOTS] = {"slot_mapping of the rows", .bytes = TOKENS * sizeof(int64_t)},
        [TOPK] = {"topk_indices", .bytes = TOKENS * topk * sizeof(int32_t)},
        [POSITIONS] = {"positions", .bytes = TOKENS * sizeof(int64_t)},
        [COS_SIN] = {"cos_sin", ATTN_DTYPE_F32, 2, {LONGEST, ROTARY}}};
    steps_operands(&c.steps, operands);
    kernel_test_init(&test, trial, operands, NUM_OPERANDS, &seed);
    fill(&c, &test, &seed);
    TRIAL_TRY(kernel_test_run_tested(&test, run_steps, &c));
    return verify(&c, &test);
}

struct compressed_form {
    int32_t ratio, topk;
    const char *name;
};

static void try_variant(const struct kernel_sink *sink, const struct compressed_variant *v,
                        const char *name)
{
    struct described x;
    describe(v, &x);
    if (core_serves(sink->core, &x.layer)) {
        kernel_try(sink, run_compressed, v, "compressed.%s.%s.%s.%d%s%s", name,
                   dtype_name(v->dtype), kv_dtype_name(v->kv_dtype), v->size,
                   v->rotates ? ".rotated" : "", v->captured ? ".graph" : "");
    }
}

/* Layers that a backend says it attends to as a whole: as many heads as it takes at once, fewer and
 * twice as many, over several tiles of either cache. */
static void try_whole(const struct kernel_sink *sink, const struct attn_compressed_caps *caps)
{
    static const struct compressed_form forms[] = {
        {4, WIDE_TOPK, "whole_listed"}, {4, 0, "whole"}, {128, 0, "whole_128"}};
    const int32_t most = caps->num_q_heads > 0 ? caps->num_q_heads : 4;
    const int32_t heads[] = {most, most * 5 / 16, most * 2};
    const int32_t size =
        caps->head_size > 0 && caps->head_size < MAX_SIZE ? caps->head_size : MAX_SIZE;
    int32_t dtype = ATTN_DTYPE_BF16;
    for (int32_t d = ATTN_DTYPE_F16; d <= ATTN_DTYPE_F32 && !(caps->dtypes >> dtype & 1); d++) {
        dtype = d;
    }
    for (int32_t i = 0; i < 3 * 2 * 3; i++) {
        const int32_t form = i / 6, of_heads = i % 3;
        const int32_t kv_dtype = i / 3 % 2 != 0 ? ATTN_KV_FP8_DS_V4 : dtype;
        char name[64];
        if (!(caps->kv_dtypes >> kv_dtype & 1)) {
            continue;
        }
        const struct compressed_variant v = {.ratio = forms[form].ratio,
                                             .topk = forms[form].topk,
                                             .size = size,
                                             .heads = heads[of_heads],
                                             .dtype = dtype,
                                             .kv_dtype = kv_dtype,
                                             .window = WIDE_WINDOW,
                                             .rotates = of_heads == 1,
                                             .captured = of_heads == 0};
        snprintf(name, sizeof name, "%s_%d", forms[form].name, v.heads);
        try_variant(sink, &v, name);
    }
}

void compressed_cases(const struct kernel_sink *sink)
{
    static const struct compressed_form forms[] = {
        {4, TOPK_FEW, "4_listed"}, {4, 0, "4"}, {128, 0, "128"}};
    const struct attn_mla_caps *mla = backend_extension(sink->caps, ATTN_EXT_CAPS_MLA, sizeof *mla);
    const struct attn_compressed_caps *whole =
        backend_extension(sink->caps, ATTN_EXT_DRAFT_COMPRESSED_CAPS, sizeof *whole);
    const int32_t multiple = mla != NULL ? mla->num_q_heads_multiple : 1;
    for (int32_t i = 0; i < 3 * 4; i++) { /* each form in each dtype; the third has a soft cap */
        const int32_t form = i / 4, dtype = ATTN_DTYPE_F16 + (i + form) % 3;
        const bool codes = i % 4 == 3;
        const struct compressed_variant v = {.ratio = forms[form].ratio,
                                             .topk = forms[form].topk,
                                             .size = codes ? MAX_SIZE : 128,
                                             .heads = (4 + multiple - 1) / multiple * multiple,
                                             .dtype = dtype,
                                             .kv_dtype = codes ? ATTN_KV_FP8_DS_V4 : dtype,
                                             .window = i == 6 ? 0 : WINDOW,
                                             .soft_cap = i % 4 == 2 ? 6 : 0,
                                             .rotates = i % 2 == 1,
                                             .no_sinks = i == 5};
        try_variant(sink, &v, forms[form].name);
    }
    if (whole != NULL) {
        try_whole(sink, whole);
    }
}
