/* SPDX-License-Identifier: Apache-2.0 */
/* merge_states, rope_write_kv, gather_kv, quantize, amax and batched_gemm, each against what its
 * header says. Inputs that a kernel may write over are kept before it runs. */
#include <math.h>
#include <string.h>

#include "checked.h"
#include "support/number.h"

#define F32_BOUND 1e-6 /* relative to a value; float32 sums of float64 terms */
#define MAX_DIMS 1024

static double number_at(const struct attn_tensor *tensor, int64_t i, int64_t j, int64_t d)
{
    double x;
    tensor_load(tensor, i, j, d, 1, &x);
    return x;
}

static double slack_of(double wanted)
{
    return F32_BOUND * (1 + fabs(wanted));
}

/* ---- merge_states */

/* Both sides of all rows: [rows, heads, dims] and, after them, [rows, heads]. */
static double *keep_side(const struct attn_merge_states_args *args, const struct attn_tensor *out,
                         const struct attn_tensor *lse, int64_t rows)
{
    int64_t heads = args->out->shape[1], dims = args->out->shape[2];
    double *kept = checked_memory(rows * heads * (dims + 1));
    for (int64_t i = 0; i < rows * heads; i++) {
        int64_t row = args->first_row + i / heads;
        tensor_load(out, row, i % heads, 0, dims, kept + i * dims);
        kept[rows * heads * dims + i] = number_at(lse, i % heads, 0, row);
    }
    return kept;
}

/* Weights as shares of the sum; an empty side's output is not read. */
static attn_status verify_merged(const struct attn_merge_states_args *args, int64_t i,
                                 const double *prefix, double a, const double *suffix, double b,
                                 struct attn_error *error)
{
    int64_t heads = args->out->shape[1], dims = args->out->shape[2];
    int64_t row = args->first_row + i / heads, head = i % heads;
    const struct attn_io_output_quant *quant = extension(args->next, ATTN_EXT_IO_OUTPUT_QUANT);
    double scale =
        quant != NULL && quant->scale != NULL && args->out->dtype.bits == 8 ? *quant->scale : 1;
    bool first = !isinf(a), second = !isinf(b);
    double lse = first && second ? fmax(a, b) + log1p(exp(-fabs(a - b))) : first ? a : b;
    lse = isnan(a) || isnan(b) ? NAN : first || second ? lse : -INFINITY;
    for (int64_t d = 0; d < dims; d++) {
        double wanted =
            ((first ? exp(a - lse) * prefix[d] : 0) + (second ? exp(b - lse) * suffix[d] : 0)) /
            scale;
        double found = number_at(args->out, row, head, d);
        wanted = first || second ? wanted : 0;
        if (!checked_near(found, wanted, slack_of(wanted), tensor_dtype(args->out))) {
            return checked_wrong(error, "merged out", row, head, d, found, wanted);
        }
    }
    double found = args->lse != NULL ? number_at(args->lse, head, 0, row) : lse;
    return args->lse == NULL || checked_near(found, lse, slack_of(lse), ATTN_DTYPE_F32)
               ? ATTN_OK
               : checked_wrong(error, "merged lse", row, head, 0, found, lse);
}

attn_status checked_merge_states(const struct attn_merge_states_args *args,
                                 struct attn_error *error)
{
    int64_t heads = args->out->shape[1], dims = args->out->shape[2];
    int64_t count = args->num_rows * heads;
    int64_t with_prefix =
        args->num_rows_with_prefix < args->num_rows ? args->num_rows_with_prefix : args->num_rows;
    checked_begin();
    double *prefix = keep_side(args, args->prefix_out, args->prefix_lse, with_prefix);
    double *suffix = keep_side(args, args->suffix_out, args->suffix_lse, args->num_rows);
    attn_status status = cpu_ref_kernels->merge_states(args, error);
    for (int64_t i = 0; i < count && status == ATTN_OK; i++) {
        bool both = i / heads < with_prefix;
        status = verify_merged(args, i, prefix + (both ? i * dims : 0),
                               both ? prefix[with_prefix * heads * dims + i] : -INFINITY,
                               suffix + i * dims, suffix[count * dims + i], error);
    }
    checked_end();
    return status;
}

/* ---- rope_write_kv */

static void turn_row(const struct attn_io_rope *rope, const struct attn_tensor *weight,
                     int64_t position, int32_t dims, double *row)
{
    double turned[MAX_DIMS], sum = 0;
    int32_t rotary = rope->rotary_dim > 0 ? rope->rotary_dim : dims;
    for (int32_t d = 0; d < dims; d++) {
        sum += row[d] * row[d];
    }
    for (int32_t d = 0; d < dims; d++) {
        row[d] *=
            weight != NULL ? number_at(weight, 0, 0, d) / sqrt(sum / dims + rope->norm_eps) : 1;
        turned[d] = row[d];
    }
    for (int32_t d = 0; d < rotary; d++) {
        bool neox = rope->form == ATTN_ROPE_NEOX, low = neox ? d < rotary / 2 : d % 2 == 0;
        int32_t pair = neox ? d % (rotary / 2) : d / 2;
        int32_t other = neox ? (d + rotary / 2) % rotary : (d ^ 1);
        double c = number_at(rope->cos_sin, position, 0, pair);
        double s = number_at(rope->cos_sin, position, 0, rotary / 2 + pair);
        turned[d] = row[d] * c + (low ? -row[other] : row[other]) * s;
    }
    memcpy(row, turned, (size_t)dims * sizeof *row);
}

static attn_status verify_turned(const struct attn_write_kv_args *args,
                                 const struct attn_tensor *tensor, const struct attn_tensor *weight,
                                 double *rows, struct attn_error *error)
{
    const struct attn_io_rope *rope = extension(args->next, ATTN_EXT_IO_ROPE);
    int32_t dims = args->layer->head_size;
    for (int64_t i = 0; i < args->num_slots * tensor->shape[1]; i++) {
        int64_t row = i / tensor->shape[1], head = i % tensor->shape[1];
        turn_row(rope, weight, rope->positions[row], dims, rows + i * dims);
        for (int32_t d = 0; d < dims; d++) {
            double wanted = rows[i * dims + d], found = number_at(tensor, row, head, d);
            if (!checked_near(found, wanted, slack_of(wanted), tensor_dtype(tensor))) {
                return checked_wrong(error, "rotated", row, head, d, found, wanted);
            }
        }
    }
    return ATTN_OK;
}

static double *keep_rows(const struct attn_tensor *tensor, int64_t rows, int32_t dims)
{
    double *kept = checked_memory(rows * tensor->shape[1] * dims);
    for (int64_t i = 0; i < rows * tensor->shape[1]; i++) {
        tensor_load(tensor, i / tensor->shape[1], i % tensor->shape[1], 0, dims, kept + i * dims);
    }
    return kept;
}

/* k is rotated in place and written as it is then. */
attn_status checked_rope_write_kv(const struct attn_write_kv_args *args, struct attn_error *error)
{
    const struct attn_io_rope *rope = extension(args->next, ATTN_EXT_IO_ROPE);
    checked_begin();
    double *q = keep_rows(args->q, args->num_slots, args->layer->head_size);
    double *k = keep_rows(args->k, args->num_slots, args->layer->head_size);
    attn_status status = cpu_ref_kernels->rope_write_kv(args, error);
    status =
        status == ATTN_OK ? verify_turned(args, args->q, rope->q_norm_weight, q, error) : status;
    status =
        status == ATTN_OK ? verify_turned(args, args->k, rope->k_norm_weight, k, error) : status;
    checked_end();
    return status == ATTN_OK ? checked_written(args, error) : status;
}

/* ---- gather_kv */

attn_status checked_gather_kv(const struct attn_gather_kv_args *args, struct attn_error *error)
{
    static double wanted[MAX_DIMS], found[MAX_DIMS];
    const struct attn_batch *batch = args->batch;
    const struct attn_kv_view *view = args->cache;
    int32_t dtype = tensor_dtype(args->out), r = 0;
    attn_status status = cpu_ref_kernels->gather_kv(args, error);
    checked_begin();
    for (int64_t i = args->out_start_loc[0];
         i < args->out_start_loc[batch->num_reqs] && status == ATTN_OK; i++) {
        while (i >= args->out_start_loc[r + 1]) {
            r++;
        }
        int64_t table_row = batch->block_table_row ? batch->block_table_row[r] : r;
        int64_t key = i - args->out_start_loc[r] + (args->first_key ? args->first_key[r] : 0);
        int64_t entry = table_row * batch->block_table_stride + key / view->block_size;
        for (int32_t h = 0; h < view->num_heads && status == ATTN_OK; h++) {
            row_load(&(struct cache_row){args->layer, args->params, view, false,
                                         batch->block_table[entry], key % view->block_size, h},
                     wanted);
            tensor_load(args->out, i, h, 0, view->head_size, found);
            for (int32_t d = 0; d < view->head_size && status == ATTN_OK; d++) {
                status = checked_near(found[d], wanted[d], 0x1p-40 * fabs(wanted[d]), dtype)
                             ? ATTN_OK
                             : checked_wrong(error, "gathered", i, h, d, found[d], wanted[d]);
            }
        }
    }
    checked_end();
    return status;
}

/* ---- quantize, amax */

/* Column c of a token, whose heads follow each other. */
static double column(const struct attn_tensor *x, int64_t token, int64_t c)
{
    return number_at(x, token, c / x->shape[2], c % x->shape[2]);
}

static double largest_column(const struct attn_tensor *x, int64_t token, int64_t c, int64_t count)
{
    double largest = 0;
    for (int64_t i = 0; i < count; i++) {
        largest = fmax(largest, fabs(column(x, token, c + i)));
    }
    return largest;
}

/* The scale of a column's group as it was written; `wrong`: it is not what it should be. */
static double group_scale(const struct attn_quantize_args *args, int64_t token, int64_t c,
                          bool *wrong)
{
    int64_t size = args->form == ATTN_OUTPUT_FP8_GROUP_64 ? 64 : 128;
    double scale = fmax(largest_column(args->x, token, c / size * size, size), 1e-10) / 448;
    double found = args->scale_column_major ? number_at(args->block_scales, c / size, 0, token)
                                            : number_at(args->block_scales, token, 0, c / size);
    int exponent;
    if (args->scale_pow2) {
        *wrong = frexp(found, &exponent) != 0.5 || found < scale || found >= 2 * scale;
    } else {
        *wrong = !checked_near(found, scale, 0, ATTN_DTYPE_F32);
    }
    return found;
}

static attn_status verify_code(const struct attn_quantize_args *args, int64_t token, int64_t c,
                               struct attn_error *error)
{
    bool per_head = args->scale_form == ATTN_SCALE_PER_HEAD, wrong = false;
    double x = column(args->x, token, c), scale;
    int32_t dtype = tensor_dtype(args->out);
    if (args->form == ATTN_OUTPUT_NVFP4) { /* two in a byte; scales e4m3 */
        double global = args->scale != NULL ? *args->scale : 1;
        double wanted_scale = number_round(
            global * largest_column(args->x, token, c / 16 * 16, 16) / 6, ATTN_DTYPE_FP8_E4M3);
        const struct attn_tensor *codes = args->out;
        int64_t row = codes->strides ? codes->strides[0] : codes->shape[codes->ndim - 1];
        uint8_t pair = ((const uint8_t *)codes->data + codes->byte_offset)[token * row + c / 2];
        scale = number_at(args->block_scales, token, 0, c / 16);
        uint32_t wanted = scale == 0 ? 0 : number_to_e2m1(x * global / scale);
        uint32_t found = pair >> c % 2 * 4 & 15;
        return scale == wanted_scale && found == wanted
                   ? ATTN_OK
                   : checked_wrong(error, "nvfp4 code", token, 0, c, found, wanted);
    }
    scale = args->form == ATTN_OUTPUT_FP8_STATIC ? args->scale[per_head ? c / args->x->shape[2] : 0]
                                                 : group_scale(args, token, c, &wrong);
    double wanted = number_round(x / scale, dtype), found = column(args->out, token, c);
    return !wrong && (found == wanted || (isnan(found) && isnan(wanted)))
               ? ATTN_OK
               : checked_wrong(error, wrong ? "scale" : "code", token, 0, c, wrong ? scale : found,
                               wanted);
}

attn_status checked_quantize(const struct attn_quantize_args *args, struct attn_error *error)
{
    const struct attn_tensor *x = args->x;
    attn_status status = cpu_ref_kernels->quantize(args, error);
    for (int64_t i = 0; i < x->shape[0] * x->shape[1] * x->shape[2] && status == ATTN_OK; i++) {
        int64_t columns = x->shape[1] * x->shape[2];
        status = verify_code(args, i / columns, i % columns, error);
    }
    return status;
}

attn_status checked_amax(const struct attn_amax_args *args, struct attn_error *error)
{
    const struct attn_tensor *x = args->x;
    int64_t count = args->per_head ? x->shape[1] : 1;
    int64_t width = args->per_head ? x->shape[2] : x->shape[1] * x->shape[2];
    checked_begin();
    double *wanted = checked_memory(count);
    for (int64_t h = 0; h < count; h++) {
        wanted[h] = args->accumulate ? args->out[h] : 0;
        for (int64_t t = 0; t < x->shape[0]; t++) {
            wanted[h] = fmax(wanted[h], largest_column(x, t, h * width, width));
        }
    }
    attn_status status = cpu_ref_kernels->amax(args, error);
    for (int64_t h = 0; h < count && status == ATTN_OK; h++) {
        status = args->out[h] == wanted[h]
                     ? ATTN_OK
                     : checked_wrong(error, "amax", 0, h, 0, args->out[h], wanted[h]);
    }
    checked_end();
    return status;
}

/* ---- batched_gemm */

/* A weight, mxfp4 with the scale of its block (OCP Microscaling Formats 1.0). */
static double weight_at(const struct attn_batched_gemm_args *args, int64_t b, int64_t k, int64_t n)
{
    const struct attn_tensor *w = args->w, *s = args->w_block_scale;
    const int64_t dense[] = {w->shape[1] * w->shape[2], w->shape[2], 1};
    const int64_t *strides = w->strides ? w->strides : dense;
    if (s == NULL) {
        return number_at(w, b, k, n);
    }
    int64_t at = b * strides[0] + k * strides[1] + n * strides[2];
    const uint8_t *pair = (const uint8_t *)w->data + w->byte_offset + at / 2;
    const int64_t dense_scales[] = {s->shape[1] * s->shape[2], s->shape[2], 1};
    strides = s->strides ? s->strides : dense_scales;
    int64_t of_block = b * strides[0] + k / (w->shape[1] / s->shape[1]) * strides[1] +
                       n / (w->shape[2] / s->shape[2]) * strides[2];
    uint8_t exponent = ((const uint8_t *)s->data + s->byte_offset)[of_block];
    return number_from_e2m1(*pair >> at % 2 * 4 & 15) *
           (exponent == 255 ? NAN : ldexp(1, exponent - 127));
}

attn_status checked_batched_gemm(const struct attn_batched_gemm_args *args,
                                 struct attn_error *error)
{
    const int64_t *shape = args->out->shape;
    attn_status status = cpu_ref_kernels->batched_gemm(args, error);
    for (int64_t i = 0; i < shape[0] * shape[1] * shape[2] && status == ATTN_OK; i++) {
        int64_t b = i / (shape[1] * shape[2]), m = i / shape[2] % shape[1], n = i % shape[2];
        double wanted = 0, found = number_at(args->out, b, m, n);
        for (int64_t k = 0; k < args->a->shape[2]; k++) {
            wanted += number_at(args->a, b, m, k) * weight_at(args, b, k, n);
        }
        wanted *= args->w_scale ? args->w_scale[args->w_scale_count > 1 ? b : 0] : 1;
        if (!checked_near(found, wanted, slack_of(wanted), tensor_dtype(args->out))) {
            return checked_wrong(error, "product", b, m, n, found, wanted);
        }
    }
    return status;
}
