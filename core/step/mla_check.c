/* SPDX-License-Identifier: Apache-2.0 */
/* What a run of MLA must bring. */
#include "step/mla.h"
#include "util/structs.h"

#define FAIL(field, text) error_set_text(error, ATTN_ERROR_INVALID_ARGUMENT, field, text)

static bool is_flat(const struct attn_tensor *t, uint64_t kind, int64_t rows, int64_t size)
{
    struct attn_tensor like = {.data = NULL};
    tensor_set_kind(&like, kind);
    return t != NULL && t->data != NULL && t->shape != NULL && t->ndim == 2 &&
           memcmp(&t->dtype, &like.dtype, sizeof like.dtype) == 0 && t->shape[0] >= rows &&
           t->shape[1] == size && (t->strides == NULL || t->strides[1] == 1);
}

static bool is_query(const struct attn_tensor *t, const struct step *step, int64_t rows,
                     int64_t size)
{
    return t != NULL && t->data != NULL && t->shape != NULL && tensor_kind(t) == step->q.kind &&
           t->shape[0] >= rows && t->shape[1] == mla_padded_heads(step->layer) &&
           t->shape[2] == size && (t->strides == NULL || t->strides[2] == 1);
}

static attn_status check_queries(const attn_plan *plan, const struct step *step,
                                 const struct attn_step_io *io, const struct attn_io_mla *mla,
                                 struct attn_error *error)
{
    const struct attn_mla_desc *m = step->layer->selected->mla;
    int64_t tokens = plan->num_tokens;
    if (!is_query(mla->q_nope, step, tokens,
                  m->absorb_in_core ? m->qk_nope_head_dim : m->kv_lora_rank)) {
        return FAIL(
            "q_nope",
            "q_nope is NULL or not [num_tokens or more, padded_num_q_heads or num_q_heads, "
            "qk_nope_head_dim (kv_lora_rank without absorption)] of the query's dtype with a "
            "contiguous last dimension");
    }
    if (m->qk_rope_head_dim > 0 && !is_query(mla->q_pe, step, tokens, m->qk_rope_head_dim)) {
        return FAIL("q_pe",
                    "q_pe is NULL or not [num_tokens or more, padded_num_q_heads or num_q_heads, "
                    "qk_rope_head_dim] of the query's dtype with a contiguous last dimension");
    }
    if (io->lse != NULL &&
        (io->lse->ndim != 2 || io->lse->shape == NULL ||
         io->lse->shape[0] != mla_padded_heads(step->layer) || io->lse->shape[1] < tokens ||
         io->lse->dtype.bits != 32 || io->lse->dtype.code != ATTN_CODE_FLOAT)) {
        return FAIL("lse",
                    "lse is not [padded_num_q_heads or num_q_heads, num_tokens or more] float32");
    }
    if (m->topk > 0 && (mla->topk_indices == NULL || mla->topk_stride < m->topk)) {
        return FAIL("topk_indices", "topk_indices is NULL, or topk_stride under the layer's topk");
    }
    return step_check_out(plan, step, io->out, error);
}

attn_status mla_check_io(const attn_plan *plan, const struct step *step,
                         const struct attn_step_io *io, bool writes, bool attends,
                         struct attn_error *error)
{
    const struct attn_io_mla *mla =
        (const struct attn_io_mla *)ext_find(io->next, ATTN_EXT_IO_MLA, sizeof *mla);
    const struct attn_mla_desc *m = step->layer->selected->mla;
    const char *name = step->layer->desc->name;
    if (mla == NULL || io->q != NULL || io->k != NULL || io->v != NULL) {
        return FAIL("attn_io_mla",
                    "a run of MLA brings its tensors in attn_io_mla, and q, k and v are NULL");
    }
    bool projects = attends && mla_per_head(step) && plan->split.num_prefill_tokens > 0;
    int64_t rows = writes ? plan->given.num_slots : 0;
    rows = projects && plan->num_tokens > rows ? plan->num_tokens : rows;
    if ((writes || projects) && !is_flat(mla->kv_c, step->k.kind, rows, m->kv_lora_rank)) {
        return FAIL(
            "kv_c",
            "kv_c is NULL or not [rows, kv_lora_rank] of the layer's dtype with a contiguous last "
            "dimension and a row per slot and token");
    }
    if ((writes || projects) && m->qk_rope_head_dim > 0 &&
        !is_flat(mla->k_pe, step->k.kind, rows, m->qk_rope_head_dim)) {
        return FAIL(
            "k_pe",
            "k_pe is NULL or not [rows, qk_rope_head_dim] of the layer's dtype with a contiguous "
            "last dimension and a row per slot and token");
    }
    attn_status status = attends ? check_queries(plan, step, io, mla, error) : ATTN_OK;
    if (status == ATTN_OK && attends && plan->validate) {
        status = validate_tensor(plan, mla->q_nope, "q_nope", name, error);
        status = status == ATTN_OK ? validate_tensor(plan, mla->q_pe, "q_pe", name, error) : status;
    }
    return status;
}
