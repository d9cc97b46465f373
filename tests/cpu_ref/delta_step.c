/* SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "delta.h"
#include "formats.h"
#include "problem.h"

int32_t step_tokens(const struct gdn_case *c, int32_t step, int32_t r)
{
    int32_t count = c->steps[step][r];
    return count < 0 ? 2 : count; /* a skipped request has rows, too */
}

static void describe(const struct delta *p, struct step *s, int32_t step)
{
    const struct gdn_case *c = p->c;
    int64_t head = (int64_t)c->dv * c->dk, element = format_bytes(c->dtype);
    s->desc =
        (struct attn_recurrent_desc){.ext = {ATTN_EXT_RECURRENT_DESC, 0, sizeof s->desc, NULL},
                                     .num_k_heads = c->hk,
                                     .num_v_heads = c->hv,
                                     .head_size_k = c->dk,
                                     .head_size_v = c->dv,
                                     .conv_width = c->conv_width,
                                     .conv_silu = c->silu,
                                     .qk_l2norm = c->l2norm,
                                     .chunk_size = c->chunk_size,
                                     .num_speculative_tokens = c->drafted,
                                     .state_dtype = ATTN_DTYPE_F32};
    s->layer = (struct attn_layer_desc){.struct_size = sizeof s->layer,
                                        .next = &s->desc.ext,
                                        .kind = ATTN_LAYER_RECURRENT,
                                        .dtype = c->dtype,
                                        .num_q_heads = c->hk,
                                        .num_kv_heads = c->hk,
                                        .head_size = c->dk,
                                        .head_size_v = c->dv,
                                        .scale = (float)(1 / sqrt(c->dk)),
                                        .causal = 1};
    s->weights = (struct attn_recurrent_weights){
        .ext = {ATTN_EXT_RECURRENT_WEIGHTS, 0, sizeof s->weights, NULL},
        .a_log = p->a_log,
        .dt_bias = p->dt_bias,
        .conv_weight = tensor_set(&s->weight, p->weight_rows, c->dtype, 2,
                                  (int64_t[]){p->channels, c->conv_width}, NULL),
        .conv_bias = c->bias ? tensor_set(&s->bias, p->bias_rows, c->dtype, 1,
                                          (int64_t[]){p->channels}, NULL)
                             : NULL};
    s->params =
        (struct attn_layer_params){.struct_size = sizeof s->params, .next = &s->weights.ext};
    s->states = (struct attn_batch_recurrent){
        .ext = {ATTN_EXT_BATCH_RECURRENT, 0, sizeof s->states, NULL},
        .state_slots = &s->slots[0][0],
        .state_slots_stride = 4,
        .has_initial_state = c->by_length ? NULL : s->has_state,
        .num_accepted_tokens = c->drafted > 0 ? c->accepted[step] : NULL};
    s->batch = (struct attn_batch){.struct_size = sizeof s->batch,
                                   .next = &s->states.ext,
                                   .num_reqs = c->num_reqs,
                                   .num_tokens = s->rows + 2,
                                   .num_actual_tokens = s->rows,
                                   .query_start_loc = s->query_start,
                                   .query_start_loc_host = s->query_start,
                                   .seq_lens = s->seq_lens,
                                   .seq_lens_host = s->seq_lens};
    s->state_view = (struct attn_kv_view){.struct_size = sizeof s->state_view,
                                          .data = p->states,
                                          .num_blocks = NUM_SLOTS,
                                          .block_size = 1,
                                          .num_heads = c->hv,
                                          .head_size = (int32_t)head,
                                          .stride_block = 4 * head * c->hv,
                                          .stride_slot = 4 * head * c->hv,
                                          .stride_head = 4 * head};
    s->window_view = (struct attn_kv_view){.struct_size = sizeof s->window_view,
                                           .data = p->windows,
                                           .num_blocks = NUM_SLOTS,
                                           .block_size = 1,
                                           .num_heads = p->channels,
                                           .head_size = p->window,
                                           .stride_block = p->channels * (p->window + 1) * element,
                                           .stride_slot = p->channels * (p->window + 1) * element,
                                           .stride_head = (p->window + 1) * element};
}

/* Rows of q, k and v where the engine has run the convolution itself: slices of the mixed row. */
static void set_tensors(struct delta *p, struct step *s)
{
    const struct gdn_case *c = p->c;
    int64_t rows = s->rows + 2, n = p->channels;
    int32_t element = format_bytes(c->dtype);
    p->mixed_rows = problem_memory(rows * n, 4, POISON);
    p->a_rows = problem_memory(rows * c->hv, 4, POISON);
    p->b_rows = problem_memory(rows * c->hv, 4, POISON);
    p->out_rows = problem_memory(rows * c->hv * c->dv, 4, POISON);
    s->io = (struct attn_io_recurrent){
        .ext = {ATTN_EXT_IO_RECURRENT, 0, sizeof s->io, NULL},
        .mixed_qkv = c->conv_width > 0 ? tensor_set(&s->mixed, p->mixed_rows, c->dtype, 2,
                                                    (int64_t[]){rows, n}, NULL)
                                       : NULL,
        .a = tensor_set(&s->a, p->a_rows, c->dtype, 2, (int64_t[]){rows, c->hv}, NULL),
        .b = tensor_set(&s->b, p->b_rows, c->dtype, 2, (int64_t[]){rows, c->hv}, NULL)};
    const int64_t strides[] = {n, c->dk, 1}, v_strides[] = {n, c->dv, 1};
    tensor_set(&s->q, p->mixed_rows, c->dtype, 3, (int64_t[]){rows, c->hk, c->dk}, strides);
    tensor_set(&s->k, p->mixed_rows + (int64_t)c->hk * c->dk * element, c->dtype, 3,
               (int64_t[]){rows, c->hk, c->dk}, strides);
    tensor_set(&s->v, p->mixed_rows + 2 * (int64_t)c->hk * c->dk * element, c->dtype, 3,
               (int64_t[]){rows, c->hv, c->dv}, v_strides);
    tensor_set(&s->out, p->out_rows, c->dtype, 3, (int64_t[]){rows, c->hv, c->dv}, NULL);
    bool plain = c->conv_width == 0;
    s->args = (struct attn_attend_args){.struct_size = sizeof s->args,
                                        .next = &s->io.ext,
                                        .instance = threaded.instance,
                                        .layer = &s->layer,
                                        .params = &s->params,
                                        .batch = &s->batch,
                                        .k_cache = &s->state_view,
                                        .v_cache = c->conv_width > 0 ? &s->window_view : NULL,
                                        .q = plain ? &s->q.tensor : NULL,
                                        .k = plain ? &s->k.tensor : NULL,
                                        .v = plain ? &s->v.tensor : NULL,
                                        .out = &s->out.tensor};
}

void step_create(struct delta *p, struct step *s, int32_t step)
{
    const struct gdn_case *c = p->c;
    memset(s, 0, sizeof *s);
    s->query_start[0] = c->first_row;
    for (int32_t r = 0; r < c->num_reqs; r++) {
        s->query_start[r + 1] = s->query_start[r] + step_tokens(c, step, r);
        s->has_state[r] = p->length[r] > 0;
        s->seq_lens[r] = p->length[r] + step_tokens(c, step, r);
        for (int32_t i = 0; i < 4; i++) {
            s->slots[r][i] = c->steps[step][r] < 0 ? -7 : p->slots[r][i];
        }
    }
    s->rows = s->query_start[c->num_reqs];
    describe(p, s, step);
    set_tensors(p, s);
    for (int32_t r = 0; r < c->num_reqs; r++) {
        for (int32_t t = 0; t < step_tokens(c, step, r); t++) {
            int64_t from = (int64_t)r * MAX_SEQUENCE + p->length[r] + t;
            int64_t row = s->query_start[r] + t;
            for (int32_t i = 0; i < p->channels; i++) {
                format_store(p->mixed_rows, row * p->channels + i, c->dtype,
                             p->mixed[from * p->channels + i]);
            }
            for (int32_t h = 0; h < c->hv; h++) {
                format_store(p->a_rows, row * c->hv + h, c->dtype, p->a[from * c->hv + h]);
                format_store(p->b_rows, row * c->hv + h, c->dtype, p->b[from * c->hv + h]);
            }
        }
    }
}

void step_destroy(struct delta *p)
{
    free(p->mixed_rows);
    free(p->a_rows);
    free(p->b_rows);
    free(p->out_rows);
}
