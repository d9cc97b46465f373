/* SPDX-License-Identifier: Apache-2.0 */
/* Queries in, outputs and log-sum-exps out, and the merge of split parts. */
#include "cpu_simd/internal.h"

/* [latent | rope] of a query and head, in the compute type */
static void load_latent_query(const struct attend_problem *problem, int64_t row, int64_t head,
                              char *out)
{
    const struct latent_parts *parts = problem->latent;
    const struct tile_kernels *kernels = problem->shape.kernels;
    kernels->unpack[problem->q_element](out, tensor_row(parts->q_latent, row, head), parts->rank);
    if (parts->rope > 0) {
        kernels->unpack[problem->q_element](out + (int64_t)parts->rank * kernels->element_bytes,
                                            tensor_row(parts->q_rope, row, head), parts->rope);
    }
}

static float value_factor(const struct attend_problem *problem, int32_t head)
{
    if (!problem->values.head_scale) {
        return 1.0f;
    }
    return (float)scale_of_head(problem->params->v_scale, problem->params->v_scale_host,
                                scale_form_of(problem->layer, true), head);
}

/* Loads a query rotated as int4 and TurboQuant rotate their keys; in bf16 followed by what rounding
 * to bf16 lost. */
static void load_rotated_query(const struct attend_problem *problem, const void *memory, char *out)
{
    const struct variant *variant = problem->instance->variant;
    const struct layer_shape *shape = &problem->shape;
    const struct tile_kernels *kernels = shape->kernels;
    float row[MAX_HEAD_SIZE], rounded[MAX_HEAD_SIZE];
    variant->f32->unpack[problem->q_element](row, memory, shape->depth);
    bool levels = problem->keys.coding == CODING_LEVELS;
    const float *signs = levels ? NULL : int4_signs(problem->params, false);
    int4_rotate_query(variant, signs, row, shape->depth);
    kernels->unpack[ELEMENT_F32](out, row, shape->depth);
    if (shape->query_parts > 1) {
        variant->f32->unpack[kernels->element](rounded, out, shape->depth);
        for (int32_t d = 0; d < shape->depth; d++) {
            row[d] -= rounded[d];
        }
        kernels->unpack[ELEMENT_F32](
            out + (size_t)(shape->depth_padded / 2 * kernels->element_bytes), row, shape->depth);
    }
}

/* Rows of the item are token-major: row = token * group + head of the group. Rows up to
 * rows_padded become zero. */
void load_queries(const struct attend_run *run, const struct work_item *item, int32_t head, char *q,
                  int32_t rows_padded)
{
    const struct attend_problem *problem = &run->problem;
    const struct layer_shape *shape = &problem->shape;
    const struct tile_kernels *kernels = shape->kernels;
    const struct attn_tensor *tensor = run->args->q;
    int64_t first = problem->batch->query_start_loc[item->request] + (int64_t)item->token;
    size_t row_bytes = (size_t)shape->depth_padded * (size_t)kernels->element_bytes;
    char *out = q;
    for (int32_t t = 0; t < item->num_tokens; t++) {
        for (int32_t g = 0; g < shape->group; g++, out += row_bytes) {
            int32_t q_head = head * shape->group + g;
            memset(out, 0, row_bytes);
            if (tensor == NULL) {
                load_latent_query(problem, first + t, q_head, out);
            } else if (problem->keys.nibbles || problem->keys.coding == CODING_LEVELS) {
                load_rotated_query(problem, tensor_row(tensor, first + t, q_head), out);
            } else {
                kernels->unpack[problem->q_element](out, tensor_row(tensor, first + t, q_head),
                                                    shape->depth);
            }
        }
    }
    int32_t rows = item->num_tokens * shape->group;
    if (rows_padded > rows) {
        memset(out, 0, (size_t)(rows_padded - rows) * row_bytes);
    }
}

/* Undoes the cache's form of values in one row of acc_o: int8_kv's channels have scales of their
 * own, int4's rows are rotated. Returns `plain`, or the row itself where nothing has to be done. */
static const float *plain_values(const struct attend_problem *problem, int32_t head,
                                 const float *sums, float *plain)
{
    int32_t width = problem->shape.width;
    const struct row_form *form = &problem->shape.values;
    if (!problem->paged || (!form->channel_scale && !form->nibbles)) {
        return sums;
    }
    if (form->nibbles) {
        memcpy(plain, sums, (size_t)width * sizeof(float));
        int4_rotate_back(problem->instance->variant, int4_signs(problem->params, true), plain,
                         width);
        return plain;
    }
    const float *scale = channel_scales(&problem->shape, problem->params) + (int64_t)head * width;
    for (int32_t d = 0; d < width; d++) {
        plain[d] = sums[d] * scale[d];
    }
    return plain;
}

/* Rows of acc_o as if the values had been float32. */
static void to_plain_units(const struct attend_problem *problem, const struct row_block *rows)
{
    const struct layer_shape *shape = &problem->shape;
    float plain[MAX_HEAD_SIZE];
    for (int32_t m = 0; m < rows->num_tokens * shape->group; m++) {
        float *row = rows->acc_o + (int64_t)m * shape->width_padded;
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

/* A store waits for a line that is in no cache: an output row is prefetched one token ahead. */
static void prefetch_row(const struct attend_run *run, int64_t row, int32_t q_head)
{
    const char *next = output_row(run, row, q_head);
    int32_t bytes = run->problem.shape.width * (run->args->out->dtype.bits / 8);
    for (int32_t i = 0; i < bytes; i += 64) {
        __builtin_prefetch(next + i, 1);
    }
}

/* Output row and LSE of query `row` of the step and query head `q_head`. */
static void write_row(const struct attend_run *run, int64_t row, int32_t q_head, const float *acc_o,
                      float row_max, float row_sum)
{
    const struct attend_problem *problem = &run->problem;
    const struct attn_tensor *out = run->args->out;
    const struct attn_tensor *lse = run->args->lse;
    int32_t head = q_head / problem->shape.group;
    float factor;
    float top = row_max; /* the exponent that `all` is relative to */
    float all = row_sum;
    bool empty = row_max == -INFINITY && row_sum == 0.0f;
    if (problem->layer->has_sinks != 0) {
        float sink = problem->params->sinks[q_head] * LOG2_E;
        top = sink > row_max ? sink : row_max;
        float shrink = empty ? 0.0f : exp2f(row_max - top);
        all = row_sum * shrink + (sink == -INFINITY ? 0.0f : exp2f(sink - top));
        factor = empty ? 0.0f : shrink / all;
    } else {
        factor = empty ? 0.0f : 1.0f / row_sum;
    }
    int32_t type = out->dtype.code == ATTN_CODE_BFLOAT ? 2 : out->dtype.bits == 16 ? 1 : 0;
    float plain[MAX_HEAD_SIZE];
    const bool is_plain = problem->shape.sink_len > 0;
    factor *= is_plain ? 1.0f : value_factor(problem, head);
    if (!empty && !is_plain) {
        acc_o = plain_values(problem, head, acc_o, plain);
    }
    problem->instance->variant->store[type](output_row(run, row, q_head), acc_o, factor,
                                            problem->shape.width);
    if (lse != NULL) {
        int64_t at = q_head * tensor_stride(lse, 0) + row * tensor_stride(lse, 1);
        bool nothing = empty && top == -INFINITY;
        ((float *)tensor_data(lse))[at] = nothing ? -INFINITY : (top + log2f(all)) * LN_2;
    }
}

/* row_max of partial results; their row_sum follows. */
static float *partial_row_max(const struct attend_run *run)
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
    float *row_maxes = partial_row_max(run) + first;
    float *sums = row_maxes + run->schedule->needs.partial_rows;
    for (size_t m = 0; m < count; m++) {
        if (rows->row_max[m] != ROW_IS_DONE) {
            memcpy(run->partials + (first + m) * width, rows->acc_o + m * width,
                   width * sizeof(float));
            row_maxes[m] = rows->row_max[m];
            sums[m] = rows->row_sum[m];
        }
    }
}

/* Writes finished rows to the output. */
static void finish_rows(const struct attend_run *run, const struct row_block *rows,
                        const struct attend_scratch *scratch)
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
            if (rows->row_max[m] == ROW_IS_DONE) {
                continue;
            }
            write_row(run, first + t, rows->head * shape->group + g,
                      rows->acc_o + (int64_t)m * shape->width_padded, rows->row_max[m],
                      rows->row_sum[m]);
        }
    }
}

void finish_item(const struct attend_run *run, const struct work_item *item,
                 const struct row_block *rows, const struct attend_scratch *scratch)
{
    if (item->partial >= 0) {
        write_partial(run, item, rows);
    } else {
        finish_rows(run, rows, scratch);
    }
}

/* Merges row m of all parts; probabilities are multiplied with 2^-exponent_shift. */
static void merge_row(const struct attend_run *run, const struct merge_item *item, int32_t m,
                      float *row, float *row_max, float *row_sum, float exponent_shift)
{
    size_t width = (size_t)run->problem.shape.width_padded;
    const float *row_maxes = partial_row_max(run);
    const float *sums = row_maxes + run->schedule->needs.partial_rows;
    int32_t end = item->first + m + item->count * item->part_rows;
    float top = -INFINITY;
    for (int32_t i = item->first + m; i < end; i += item->part_rows) {
        top = row_maxes[i] > top ? row_maxes[i] : top;
    }
    *row_max = top + exponent_shift;
    *row_sum = 0.0f;
    memset(row, 0, width * sizeof(float));
    for (int32_t i = item->first + m; i < end; i += item->part_rows) {
        if (row_maxes[i] == -INFINITY && sums[i] == 0.0f) {
            continue; /* it sees no key: its acc_o is 0 */
        }
        float weight = top == -INFINITY ? 1.0f : exp2f(row_maxes[i] - top - exponent_shift);
        *row_sum += sums[i] * weight;
        run->problem.instance->variant->add_scaled(row, run->partials + (size_t)i * width, weight,
                                                   (int32_t)width);
    }
}

void merge_partials(const struct attend_run *run, const struct merge_item *item,
                    const struct attend_scratch *scratch)
{
    int32_t per_head = item->num_tokens * run->problem.shape.group;
    struct row_block rows = {.request = item->request,
                             .token = item->token,
                             .num_tokens = item->num_tokens,
                             .acc_o = scratch->acc_o,
                             .row_max = scratch->row_max,
                             .row_sum = scratch->row_sum};
    for (int32_t h = 0; h < item->num_heads; h++) {
        for (int32_t m = 0; m < per_head; m++) {
            const int32_t width = run->problem.shape.width_padded;
            float *row = rows.acc_o + (int64_t)m * width;
            merge_row(run, item, h * per_head + m, row, &rows.row_max[m], &rows.row_sum[m], 0.0f);
            if (!(run->problem.instance->variant->codes->largest(row, width) < INFINITY)) {
                merge_row(run, item, h * per_head + m, row, &rows.row_max[m], &rows.row_sum[m],
                          EXPONENT_SHIFT);
            }
        }
        rows.head = item->head + h;
        finish_rows(run, &rows, scratch);
    }
}
