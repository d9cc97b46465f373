/* SPDX-License-Identifier: Apache-2.0 */
/* Malformed tensors of a run. */
#include <string.h>

#include "core/malformed.h"

/* A copy of a tensor that may be changed. */
static struct attn_tensor *copy_of(struct malformed_step *s, const struct attn_tensor *tensor)
{
    memcpy(s->shape, tensor->shape, (size_t)tensor->ndim * sizeof *s->shape);
    memcpy(s->strides, tensor->strides, (size_t)tensor->ndim * sizeof *s->strides);
    s->tensor = *tensor;
    s->tensor.shape = s->shape;
    s->tensor.strides = s->strides;
    return &s->tensor;
}

static attn_status run(struct malformed_step *s)
{
    const struct engine *e = s->engine;
    return e->core->api->run(e->plans[0].plan, e->layer, &s->io, &s->error);
}

static attn_status q_null(struct malformed_step *s)
{
    s->io.q = NULL;
    return run(s);
}

static attn_status q_heads(struct malformed_step *s)
{
    struct attn_tensor *q = copy_of(s, s->io.q);
    q->shape[1]++;
    s->io.q = q;
    return run(s);
}

static attn_status q_dtype(struct malformed_step *s)
{
    struct attn_tensor *q = copy_of(s, s->io.q);
    q->dtype = (struct attn_dtype){ATTN_CODE_BOOL, 8, 1};
    s->io.q = q;
    return run(s);
}

static attn_status q_rows(struct malformed_step *s)
{
    struct attn_tensor *q = copy_of(s, s->io.q);
    q->shape[0] = s->problem->num_actual_tokens - 1;
    s->io.q = q;
    return run(s);
}

static attn_status q_stride(struct malformed_step *s)
{
    struct attn_tensor *q = copy_of(s, s->io.q);
    q->strides[2] = 2;
    s->io.q = q;
    return run(s);
}

static attn_status k_null(struct malformed_step *s)
{
    s->io.k = NULL;
    return run(s);
}

static attn_status v_size(struct malformed_step *s)
{
    struct attn_tensor *v = copy_of(s, s->io.v);
    v->shape[2] += 8;
    s->io.v = v;
    return run(s);
}

static attn_status out_null(struct malformed_step *s)
{
    s->io.out = NULL;
    return run(s);
}

static attn_status out_dims(struct malformed_step *s)
{
    struct attn_tensor *out = copy_of(s, s->io.out);
    out->ndim = 2;
    s->io.out = out;
    return run(s);
}

static attn_status lse_shape(struct malformed_step *s)
{
    struct attn_tensor *lse = copy_of(s, &s->side->binding.lse);
    lse->shape[0]--;
    s->io.lse = lse;
    return run(s);
}

static attn_status io_size(struct malformed_step *s)
{
    s->io.struct_size = 8;
    return run(s);
}

static const struct malformed malformed[] = {
    {"q_null", q_null, "q"},
    {"q_heads", q_heads, "q"},
    {"q_dtype", q_dtype, "q"},
    {"q_rows", q_rows, "q"},
    {"q_stride", q_stride, "q"},
    {"k_null", k_null, "k"},
    {"v_head_size", v_size, "v"},
    {"out_null", out_null, "out"},
    {"out_dimensions", out_dims, "out"},
    {"lse_shape", lse_shape, "lse"},
    {"io_struct_size", io_size, "attn_step_io"},
};
const struct malformed_list malformed_runs = {malformed, sizeof malformed / sizeof *malformed};
