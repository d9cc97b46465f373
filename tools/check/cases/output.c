/* SPDX-License-Identifier: Apache-2.0 */
/* Attends that write codes: which are tried, their buffers, and what is held of them. Decoded, they
 * are the reference's numbers within the attend's bound and half a step of their format. */
#include "cases/problem.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "cases/kernel_test.h"
#include "common/names.h"
#include "support/client.h"
#include "support/number.h"

#define LARGEST_FP8 448
#define LARGEST_E2M1 6
#define LEAST_AMAX 1e-10
#define STATIC_SCALE 0.004f /* outputs of size 1: some saturate */
#define GLOBAL_SCALE 300.0f /* block scales are then among e4m3's normal numbers */
#define SLACK 1e-5          /* relative error of products and quotients in float32 */

const struct case_output case_outputs[CASE_OUTPUTS] = {
    {ATTN_OUTPUT_FP8_STATIC, 0, 0},    {ATTN_OUTPUT_FP8_GROUP_64, 0, 0},
    {ATTN_OUTPUT_FP8_GROUP_64, 1, 1},  {ATTN_OUTPUT_FP8_GROUP_128, 0, 1},
    {ATTN_OUTPUT_FP8_GROUP_128, 1, 0}, {ATTN_OUTPUT_NVFP4, 0, 0},
};

static int32_t group_of(int32_t form)
{
    static const int32_t groups[ATTN_OUTPUT_NVFP4 + 1] = {1, 1, 64, 128, 16};
    return groups[form];
}

bool case_output_fits(const struct case_space *space, const struct attend_case *c,
                      const struct case_output *output)
{
    int32_t columns =
        case_value(space, c, FACTOR_HEADS).a * case_value(space, c, FACTOR_HEAD_SIZE).b;
    return space->caps.output_forms >> output->form & 1 && columns % group_of(output->form) == 0;
}

void case_output_name(const struct case_output *output, char *name, size_t size)
{
    snprintf(name, size, "%s%s%s", code_name(ATTN_NAMES_OUTPUT_FORM, output->form),
             output->pow2 ? ".pow2" : "", output->column_major ? ".column_major" : "");
}

int64_t output_row_bytes(const struct check_problem *p)
{
    int32_t of_byte = p->output.form == ATTN_OUTPUT_NVFP4 ? 2 : 1;
    return problem_row_elements(p, p->hq, p->dv) / of_byte;
}

static int64_t num_groups(const struct check_problem *p)
{
    return (int64_t)p->hq * p->dv / group_of(p->output.form);
}

void output_add(struct check_problem *p)
{
    struct problem_buffers *at = &p->at;
    size_t tokens = (size_t)p->num_tokens;
    if (p->output.form == ATTN_OUTPUT_PLAIN) {
        return;
    }
    at->codes = image_add(&p->image, "out", tokens * (size_t)output_row_bytes(p), 256, true);
    at->code_scales = image_add(&p->image, "code_scales",
                                tokens * (size_t)num_groups(p) * sizeof(float), 256, true);
    at->code_scale = image_add(&p->image, "output_scale", sizeof(float), 256, false);
    *PROBLEM_AT(p, float, code_scale) =
        p->output.form == ATTN_OUTPUT_NVFP4 ? GLOBAL_SCALE : STATIC_SCALE;
}

void output_bind(const struct check_problem *p, struct output_binding *b,
                 struct attn_layer_desc *layer, struct attn_attend_args *args, uint8_t *base,
                 struct attn_device device)
{
    const int32_t form = p->output.form;
    const bool nvfp4 = form == ATTN_OUTPUT_NVFP4;
    const int64_t groups = num_groups(p), heads = p->hq;
    const int64_t dims = p->dv / (nvfp4 ? 2 : 1);
    if (form == ATTN_OUTPUT_PLAIN) {
        return;
    }
    layer->output_form = form;
    layer->output_scale_pow2 = p->output.pow2;
    layer->output_scale_column_major = p->output.column_major;
    memcpy(b->shape, (int64_t[]){p->num_tokens, heads, dims}, sizeof b->shape);
    memcpy(b->strides, (int64_t[]){output_row_bytes(p), dims, 1}, sizeof b->strides);
    b->codes = (struct attn_tensor){
        base + p->at.codes, device, 3, number_dtype(ATTN_DTYPE_FP8_E4M3), b->shape, b->strides, 0};
    b->scale_shape[0] = p->output.column_major ? groups : p->num_tokens;
    b->scale_shape[1] = p->output.column_major ? p->num_tokens : groups;
    b->scales = (struct attn_tensor){
        base + p->at.code_scales, device, 2, number_dtype(ATTN_DTYPE_F32), b->scale_shape, NULL, 0};
    if (nvfp4) {
        b->codes.dtype = (struct attn_dtype){ATTN_CODE_UINT, 8, 1};
        b->scales.dtype = number_dtype(ATTN_DTYPE_FP8_E4M3);
    }
    b->quant = EXTENSION(attn_io_output_quant, ATTN_EXT_IO_OUTPUT_QUANT, NULL,
                         .scale = (const float *)(base + p->at.code_scale),
                         .block_scales = form == ATTN_OUTPUT_FP8_STATIC ? NULL : &b->scales);
    args->out = &b->codes;
    args->next = &b->quant.ext;
}

/* A group of a row: the reference's numbers, how far off each may be before it is a code, and what
 * the backend made of them. */
struct coded_group {
    const struct check_problem *problem;
    const uint8_t *found;
    int64_t token, first; /* column: of the whole row */
    int32_t size;
    double want[128], allowed[128];
    double scale;     /* what codes are multiplied by */
    double low, high; /* which scales the numbers allow */
};

static double e2m1(int32_t code)
{
    static const double values[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
    return code & 8 ? -values[code & 7] : values[code & 7];
}

static double decoded(const struct coded_group *g, int32_t i)
{
    const struct check_problem *p = g->problem;
    const uint8_t *row = g->found + p->at.codes + g->token * output_row_bytes(p);
    int64_t column = g->first + i;
    if (p->output.form == ATTN_OUTPUT_NVFP4) {
        return e2m1(row[column / 2] >> (column % 2 * 4) & 15) * g->scale;
    }
    return number_load(row, column, ATTN_DTYPE_FP8_E4M3) * g->scale;
}

/* Place of a group's scale among those of all rows. */
static int64_t scale_at(const struct check_problem *p, int64_t token, int64_t group)
{
    return p->output.column_major ? group * p->num_tokens + token : token * num_groups(p) + group;
}

/* The scale that was written is the one of the numbers; it is not asked of exactly, since the
 * numbers are not. */
static bool find_scale(struct coded_group *g)
{
    const struct check_problem *p = g->problem;
    const double given = *(const float *)(p->image.bytes + p->at.code_scale);
    double largest = 0, allowed = 0;
    if (p->output.form == ATTN_OUTPUT_FP8_STATIC) {
        g->scale = given;
        return true;
    }
    for (int32_t i = 0; i < g->size; i++) {
        largest = isnan(g->want[i]) ? largest : fmax(largest, fabs(g->want[i]));
        allowed = isnan(g->want[i]) ? allowed : fmax(allowed, g->allowed[i]);
    }
    int64_t at = scale_at(p, g->token, g->first / g->size);
    if (p->output.form == ATTN_OUTPUT_NVFP4) {
        double code = number_load(g->found + p->at.code_scales, at, ATTN_DTYPE_FP8_E4M3);
        double wanted = fmin(given * largest / LARGEST_E2M1, LARGEST_FP8);
        double off = given * allowed / LARGEST_E2M1 + wanted * (0x1p-4 + SLACK) + 0x1p-10;
        g->scale = code / given;
        g->low = (wanted - off) / given;
        g->high = (wanted + off) / given;
        return fabs(code - wanted) <= off;
    }
    int exponent = 0;
    g->low = fmax(largest - allowed, LEAST_AMAX) / LARGEST_FP8 * (1 - SLACK);
    g->high = fmax(largest + allowed, LEAST_AMAX) / LARGEST_FP8 * (1 + SLACK);
    g->high *= p->output.pow2 ? 2 : 1; /* the next power of two */
    g->scale = ((const float *)(g->found + p->at.code_scales))[at];
    return g->scale >= g->low && g->scale <= g->high &&
           (!p->output.pow2 || (frexp(g->scale, &exponent) == 0.5 && g->scale < g->high));
}

/* Half a step of the format at a number. */
static double half_step(const struct coded_group *g, double want)
{
    double size = fabs(want) / g->scale;
    if (g->problem->output.form == ATTN_OUTPUT_NVFP4) { /* 2.5: a number may move across 2 */
        return g->scale == 0 ? fabs(want) : g->scale * (size < 1.9 ? 0.25 : size < 3.8 ? 0.5 : 1);
    }
    return fmax(fabs(want) * 0x1p-4, g->scale * 0x1p-10);
}

static enum trial_result verify_group(struct trial *trial, struct coded_group *g)
{
    const bool nvfp4 = g->problem->output.form == ATTN_OUTPUT_NVFP4;
    TRIAL_FAIL_IF(trial, !find_scale(g),
                  "the scale of token %lld, column %lld is %g; %g to %g are right",
                  (long long)g->token, (long long)g->first, g->scale, g->low, g->high);
    double largest = g->scale * (nvfp4 ? LARGEST_E2M1 : LARGEST_FP8);
    for (int32_t i = 0; i < g->size; i++) {
        double want = fmax(-largest, fmin(largest, g->want[i])), have = decoded(g, i);
        double allowed = g->allowed[i] * (1 + 0x1p-4) + half_step(g, want) * (1 + SLACK);
        bool is_nan = isnan(g->want[i]); /* e2m1 has none */
        TRIAL_FAIL_IF(trial, is_nan ? !nvfp4 && !isnan(have) : !(fabs(have - want) <= allowed),
                      "token %lld, column %lld is %g by its code and the scale %g, not %g; "
                      "allowed error %g",
                      (long long)g->token, (long long)(g->first + i), have, g->scale, g->want[i],
                      allowed);
    }
    return TRIAL_PASSED;
}

void output_forget(const struct check_problem *p, const uint8_t *rows, uint8_t *found)
{
    const int32_t form = p->output.form;
    const size_t row = (size_t)output_row_bytes(p);
    const size_t scale = form == ATTN_OUTPUT_NVFP4 ? 1 : sizeof(float);
    for (int64_t t = p->first_row; t < p->num_actual_tokens; t++) {
        if (rows[t]) {
            continue;
        }
        memset(found + p->at.codes + (size_t)t * row, 0, row);
        for (int64_t i = 0; form != ATTN_OUTPUT_FP8_STATIC && i < num_groups(p); i++) {
            memset(found + p->at.code_scales + (size_t)scale_at(p, t, i) * scale, 0, scale);
        }
    }
}

enum trial_result verify_codes(struct trial *trial, const struct check_problem *p,
                               const struct attn_tensor *out, const uint8_t *rows,
                               const uint8_t *expected, const uint8_t *found)
{
    const struct bound bound = bound_of_case(p->v);
    const int32_t dims = p->dv, dtype = p->dtype;
    const int64_t columns = (int64_t)p->hq * dims;
    const int32_t form = p->output.form;
    struct coded_group g = {.problem = p, .found = found};
    g.size = form == ATTN_OUTPUT_FP8_STATIC ? 1 : group_of(form);
    enum trial_result result = TRIAL_PASSED;
    for (g.token = 0; g.token < p->num_actual_tokens; g.token++) {
        for (g.first = 0; g.first < columns && rows[g.token] && result == TRIAL_PASSED;
             g.first += g.size) {
            for (int32_t i = 0; i < g.size; i++) {
                int64_t head = (g.first + i) / dims, at = g.token * out->strides[0];
                at += head * out->strides[1];
                g.want[i] = number_load(expected + p->at.out, at + (g.first + i) % dims, dtype);
                g.allowed[i] = bound_allows(bound, bound_rms(expected + p->at.out, at, dtype, dims),
                                            dtype, g.want[i]);
            }
            result = verify_group(trial, &g);
        }
    }
    return result;
}
