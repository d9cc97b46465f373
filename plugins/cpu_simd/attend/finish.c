/* SPDX-License-Identifier: Apache-2.0 */
/* Queries in, outputs and log-sum-exps out, and the merge of split parts. */
#include "internal.h"

/* [latent | rope] of a query and head, in the compute type */
static void load_latent_query(const struct problem *problem, int64_t row, int64_t head, char *out)
{
    const struct latent_parts *parts = problem->latent;
    const struct engine *engine = problem->shape.engine;
    engine->unpack[problem->q_element](out, tensor_row(parts->q_latent, row, head), parts->rank);
    if (parts->rope > 0) {
        engine->unpack[problem->q_element](out + (int64_t)parts->rank * engine->element_bytes,
                                           tensor_row(parts->q_rope, row, head), parts->rope);
    }
}

static float value_factor(const struct problem *problem, int32_t head)
{
    if (!problem->values.head_scale) {
        return 1.0f;
    }
    return (float)scale_of_head(problem->params->v_scale, problem->params->v_scale_host,
                                scale_form_of(problem->layer, true), head);
}

/* As int4 and TurboQuant keep their keys; in bf16 with what that rounds off behind it. */
static void load_turned_query(const struct problem *problem, const void *memory, char *out)
{
    const struct variant *variant = problem->instance->variant;
    const struct layer_shape *shape = &problem->shape;
    const struct engine *engine = shape->engine;
    float row[MAX_HEAD_SIZE], rounded[MAX_HEAD_SIZE];
    variant->f32->unpack[problem->q_element](row, memory, shape->depth);
    bool levels = problem->keys.coding == CODING_LEVELS;
    const float *signs = levels ? NULL : int4_signs(problem->params, false);
    int4_turn_query(variant, signs, row, shape->depth);
    engine->unpack[ELEMENT_F32](out, row, shape->depth);
    if (shape->query_parts > 1) {
        variant->f32->unpack[engine->element](rounded, out, shape->depth);
        for (int32_t d = 0; d < shape->depth; d++) {
            row[d] -= rounded[d];
        }
        engine->unpack[ELEMENT_F32](out + (size_t)(shape->depth_padded / 2 * engine->element_bytes),
                                    row, shape->depth);
    }
}

/* Rows of the item are token-major: row = token * group + head of the group. Rows up to
 * rows_padded become zero. */
void load_queries(const struct attend_run *run, const struct work_item *item, int32_t head, char *q,
                  int32_t rows_padded)
{
    const struct problem *problem = &run->problem;
    const struct layer_shape *shape = &problem->shape;
    const struct engine *engine = shape->engine;
    const struct attn_tensor *tensor = run->args->q;
    int64_t first = problem->batch->query_start_loc[item->request] + (int64_t)item->token;
    size_t row_bytes = (size_t)shape->depth_padded * (size_t)engine->element_bytes;
    char *out = q;
    for (int32_t t = 0; t < item->num_tokens; t++) {
        for (int32_t g = 0; g < shape->group; g++, out += row_bytes) {
            int32_t q_head = head * shape->group + g;
            memset(out, 0, row_bytes);
            if (tensor == NULL) {
                load_latent_query(problem, first + t, q_head, out);
            } else if (problem->keys.nibbles || problem->keys.coding == CODING_LEVELS) {
                load_turned_query(problem, tensor_row(tensor, first + t, q_head), out);
            } else {
                engine->unpack[problem->q_element](out, tensor_row(tensor, first + t, q_head),
                                                   shape->depth);
            }
        }
    }
    int32_t rows = item->num_tokens * shape->group;
    if (rows_padded > rows) {
        memset(out, 0, (size_t)(rows_padded - rows) * row_bytes);
    }
}

/* What was summed as the cache keeps it: int8_kv's channels have scales of their own, int4's rows
 * are turned. In `plain`, or the sums themselves. */
static const float *plain_values(const struct problem *problem, int32_t head, const float *sums,
                                 float *plain)
{
    int32_t width = problem->shape.width;
    const struct row_form *form = &problem->shape.values;
    if (!problem->paged || (!form->channel_scale && !form->nibbles)) {
        return sums;
    }
    if (form->nibbles) {
        memcpy(plain, sums, (size_t)width * sizeof(float));
        int4_turn_back(problem->instance->variant, int4_signs(problem->params, true), plain, width);
        return plain;
    }
    const float *scale = channel_scales(&problem->shape, problem->params) + (int64_t)head * width;
    for (int32_t d = 0; d < width; d++) {
        plain[d] = sums[d] * scale[d];
    }
    return plain;
}

/* Sums as the values themselves would have made them. */
static void to_plain_units(const struct problem *problem, const struct row_block *rows)
{
    const struct layer_shape *shape = &problem->shape;
    float plain[MAX_HEAD_SIZE];
    for (int32_t m = 0; m < rows->num_tokens * shape->group; m++) {
        float *row = rows->accumulator + (int64_t)m * shape->width_padded;
        const float *values = plain_values(problem, rows->head, row, plain);
        if (values != row) {
            memcpy(row, values, (size_t)shape->width * sizeof(float));
        }
        problem->instance->variant->scale_row(row, value_factor(problem, rows->head),
                                              shape->width_padded);
    }
}

static char *output_row(const struct attend_run *run, int64_t row, int32_t q_head)
{
    const struct attn_tensor *out = run->args->out;
    return tensor_data(out) +
           (row * tensor_stride(out, 0) + q_head * tensor_stride(out, 1)) * (out->dtype.bits / 8);
}

/* Stores wait for lines that are in no cache: an output row's are asked for a token ahead. */
static void prefetch_row(const struct attend_run *run, int64_t row, int32_t q_head)
{
    const char *next = output_row(run, row, q_head);
    int32_t bytes = run->problem.shape.width * (run->args->out->dtype.bits / 8);
    for (int32_t i = 0; i < bytes; i += 64) {
        __builtin_prefetch(next + i, 1);
    }
}

/* Output row and LSE of query `row` of the step and query head `q_head`. */
static void write_row(const struct attend_run *run, int64_t row, int32_t q_head,
                      const float *accumulator, float reference, float sum)
{
    const struct problem *problem = &run->problem;
    const struct attn_tensor *out = run->args->out;
    const struct attn_tensor *lse = run->args->lse;
    int32_t head = q_head / problem->shape.group;
    float factor;
    float top = reference; /* the exponent that `all` is over */
    float all = sum;
    bool empty = reference == -INFINITY && sum == 0.0f;
    if (problem->layer->has_sinks != 0) {
        float sink = problem->params->sinks[q_head] * LOG2_E;
        top = sink > reference ? sink : reference;
        float shrink = empty ? 0.0f : exp2f(reference - top);
        all = sum * shrink + (sink == -INFINITY ? 0.0f : exp2f(sink - top));
        factor = empty ? 0.0f : shrink / all;
    } else {
        factor = empty ? 0.0f : 1.0f / sum;
    }
    int32_t type = out->dtype.code == ATTN_CODE_BFLOAT ? 2 : out->dtype.bits == 16 ? 1 : 0;
    float plain[MAX_HEAD_SIZE];
    const bool is_plain = problem->shape.sink_len > 0;
    factor *= is_plain ? 1.0f : value_factor(problem, head);
    if (!empty && !is_plain) {
        accumulator = plain_values(problem, head, accumulator, plain);
    }
    problem->instance->variant->store[type](output_row(run, row, q_head), accumulator, factor,
                                            problem->shape.width);
    if (lse != NULL) {
        int64_t at = q_head * tensor_stride(lse, 0) + row * tensor_stride(lse, 1);
        bool nothing = empty && top == -INFINITY;
        ((float *)tensor_data(lse))[at] = nothing ? -INFINITY : (top + log2f(all)) * LN_2;
    }
}

/* Where partial results' references begin; their sums follow. */
static float *partial_state(const struct attend_run *run)
{
    return run->partials +
           (size_t)run->schedule->needs.partial_rows * (size_t)run->problem.shape.width_padded;
}

/* Heads of the item one after another. */
static void write_partial(const struct attend_run *run, const struct work_item *item,
                          const struct row_block *rows)
{
    const struct layer_shape *shape = &run->problem.shape;
    const size_t count = (size_t)item->num_tokens * (size_t)shape->group;
    const size_t first = (size_t)item->partial + (size_t)(rows->head - item->head) * count;
    const size_t width = (size_t)shape->width_padded;
    float *references = partial_state(run) + first;
    float *sums = references + run->schedule->needs.partial_rows;
    for (size_t m = 0; m < count; m++) {
        if (rows->reference[m] != ROW_IS_DONE) {
            memcpy(run->partials + (first + m) * width, rows->accumulator + m * width,
                   width * sizeof(float));
            references[m] = rows->reference[m];
            sums[m] = rows->sum[m];
        }
    }
}

/* Whole sums of rows to the output. */
static void finish_rows(const struct attend_run *run, const struct row_block *rows, char *scratch)
{
    const struct layer_shape *shape = &run->problem.shape;
    int64_t first = run->problem.batch->query_start_loc[rows->request] + (int64_t)rows->token;
    if (shape->sink_len > 0) {
        to_plain_units(&run->problem, rows);
        add_static_sinks(run, rows, scratch);
    }
    for (int32_t t = 0; t < rows->num_tokens; t++) {
        if (!rows_wanted(&run->problem, rows->request, rows->token + t, 1)) {
            continue;
        }
        for (int32_t g = 0, m = t * shape->group; g < shape->group; g++, m++) {
            if (t + 1 < rows->num_tokens) {
                prefetch_row(run, first + t + 1, rows->head * shape->group + g);
            }
            if (rows->reference[m] == ROW_IS_DONE) {
                continue;
            }
            write_row(run, first + t, rows->head * shape->group + g,
                      rows->accumulator + (int64_t)m * shape->width_padded, rows->reference[m],
                      rows->sum[m]);
        }
    }
}

void finish_item(const struct attend_run *run, const struct work_item *item,
                 const struct row_block *rows, char *scratch)
{
    if (item->partial >= 0) {
        write_partial(run, item, rows);
    } else {
        finish_rows(run, rows, scratch);
    }
}

/* Row m of all parts' rows, and 2^-lowered of their sums. */
static void merge_row(const struct attend_run *run, const struct merge_item *item, int32_t m,
                      float *row, float *reference, float *sum, float lowered)
{
    size_t width = (size_t)run->problem.shape.width_padded;
    const float *references = partial_state(run);
    const float *sums = references + run->schedule->needs.partial_rows;
    int32_t end = item->first + m + item->count * item->part_rows;
    float top = -INFINITY;
    for (int32_t i = item->first + m; i < end; i += item->part_rows) {
        top = references[i] > top ? references[i] : top;
    }
    *reference = top + lowered;
    *sum = 0.0f;
    memset(row, 0, width * sizeof(float));
    for (int32_t i = item->first + m; i < end; i += item->part_rows) {
        if (references[i] == -INFINITY && sums[i] == 0.0f) {
            continue; /* sees nothing: its accumulator is 0 */
        }
        float weight = top == -INFINITY ? 1.0f : exp2f(references[i] - top - lowered);
        *sum += sums[i] * weight;
        run->problem.instance->variant->add_scaled(row, run->partials + (size_t)i * width, weight,
                                                   (int32_t)width);
    }
}

void merge_partials(const struct attend_run *run, const struct merge_item *item, char *scratch)
{
    const struct scratch_layout *at = &run->layout;
    int32_t per_head = item->num_tokens * run->problem.shape.group;
    struct row_block rows = {.request = item->request,
                             .token = item->token,
                             .num_tokens = item->num_tokens,
                             .accumulator = (float *)(scratch + at->accumulator),
                             .reference = (float *)(scratch + at->reference),
                             .sum = (float *)(scratch + at->sum)};
    for (int32_t h = 0; h < item->num_heads; h++) {
        for (int32_t m = 0; m < per_head; m++) {
            const int32_t width = run->problem.shape.width_padded;
            float *row = rows.accumulator + (int64_t)m * width;
            merge_row(run, item, h * per_head + m, row, &rows.reference[m], &rows.sum[m], 0.0f);
            if (!(run->problem.instance->variant->codes->largest(row, width) < INFINITY)) {
                merge_row(run, item, h * per_head + m, row, &rows.reference[m], &rows.sum[m],
                          LOWERED);
            }
        }
        rows.head = item->head + h;
        finish_rows(run, &rows, scratch);
    }
}
