/* SPDX-License-Identifier: Apache-2.0 */
/* attend_mla and attend_mla_sparse: attends of one KV head whose value is the first kv_lora_rank of
 * its key's row, with all query heads as rows of a tile. A sparse query's keys are the entries of
 * its list: the list is cut into tiles as a sequence is, and what a tile must not see is left out
 * of it. */
#include "cpu_simd/internal.h"

/* Arguments that attend gets in place of an MLA layer's. */
struct latent_call {
    struct attn_attend_args args;
    struct attn_layer_desc layer;
    struct attn_layer_params params;
    struct attn_kv_view values;
    struct latent_parts parts;
};

static void call_init(struct latent_call *call, const struct attn_attend_args *args)
{
    const struct attn_mla_desc *mla = mla_of(args->layer);
    call->args = *args;
    call->layer = *args->layer;
    call->params = *args->params;
    call->values = *args->k_cache;
    /* an unknown tail that is all zero asks for nothing */
    call->args.struct_size = sizeof call->args;
    call->layer.struct_size = sizeof call->layer;
    call->params.struct_size = sizeof call->params;
    call->values.struct_size = sizeof call->values;
    call->layer.head_size_v = mla->kv_lora_rank;
    call->values.head_size = mla->kv_lora_rank;
    /* keys and values are the same bytes */
    call->layer.v_scale_form = call->layer.k_scale_form;
    call->params.v_scale = call->params.k_scale;
    call->params.v_scale_host = call->params.k_scale_host;
    call->args.layer = &call->layer;
    call->args.params = &call->params;
    call->args.v_cache = &call->values;
    call->parts = (struct latent_parts){.rank = mla->kv_lora_rank, .rope = mla->qk_rope_head_dim};
}

attn_status simd_plan_latent(const struct attn_attend_args *args, struct attn_error *error)
{
    struct latent_call call;
    call_init(&call, args);
    return plan_attend(&call.args, &call.parts, error);
}

attn_status simd_attend_mla(const struct attn_attend_args *args, struct attn_error *error)
{
    const struct attn_io_mla *io = ext_of(args->next, ATTN_EXT_IO_MLA);
    struct latent_call call;
    call_init(&call, args);
    if (io != NULL) {
        call.parts.q_latent = io->q_nope;
        call.parts.q_rope = io->q_pe;
        call.parts.topk_indices = io->topk_indices;
        call.parts.topk_stride = io->topk_stride;
    }
    return run_attend(&call.args, &call.parts);
}
