/* SPDX-License-Identifier: Apache-2.0 */
#include "check_arguments.h"

#include <attn/collectives.h>
#include <attn/draft/mm_encoder.h>
#include <attn/recurrent.h>
#include <attn/mla.h>
#include <stdio.h>

#include "fake_device.h"

static attn_status refuse(const char *name, const char *what, struct attn_error *error)
{
    if (error != NULL) {
        error->status = ATTN_ERROR_DEVICE;
        snprintf(error->field, sizeof error->field, "%s", name);
        snprintf(error->message, sizeof error->message, "fake_device: %s", what);
    }
    return ATTN_ERROR_DEVICE;
}

attn_status check_address(const void *address, const char *name, struct attn_error *error)
{
    return address == NULL || fake_device_owns(address)
               ? ATTN_OK
               : refuse(name, "the host's memory in place of the device's", error);
}

static attn_status check_host(const void *address, const char *name, struct attn_error *error)
{
    return !fake_device_owns(address)
               ? ATTN_OK
               : refuse(name, "the device's memory in place of the host's", error);
}

static attn_status check_tensor(const struct attn_tensor *tensor, const char *name,
                                struct attn_error *error)
{
    const struct attn_device device = FAKE_DEVICE;
    if (tensor == NULL) {
        return ATTN_OK;
    }
    if (tensor->device.type != ATTN_DEVICE_CUDA_MANAGED && /* which is anybody's */
        (tensor->device.type != device.type || tensor->device.id != device.id)) {
        return refuse(name, "a tensor that names another device", error);
    }
    return check_address(tensor->data, name, error);
}

/* Goes on where nothing was wrong so far. */
#define ADDRESS(owner, field)                                                                      \
    status = status != ATTN_OK ? status : check_address((owner)->field, #field, error)
#define HOST(owner, field)                                                                         \
    status = status != ATTN_OK ? status : check_host((owner)->field, #field, error)
#define TENSOR(owner, field)                                                                       \
    status = status != ATTN_OK ? status : check_tensor((owner)->field, #field, error)

static attn_status check_view(const struct attn_kv_view *view, struct attn_error *error)
{
    attn_status status = ATTN_OK;
    if (view != NULL) {
        ADDRESS(view, data);
        ADDRESS(view, scale);
    }
    return status;
}

/* Extensions of parameters, batches and runs; ids tell them apart. */
static attn_status check_extensions(const struct attn_ext *ext, struct attn_error *error)
{
    attn_status status = ATTN_OK;
    for (; ext != NULL && status == ATTN_OK; ext = ext->next) {
        const void *extension = ext;
        if (ext->id == ATTN_EXT_MLA_WEIGHTS) {
            const struct attn_mla_weights *w = extension;
            TENSOR(w, kv_b_proj);
            TENSOR(w, w_uk);
            TENSOR(w, w_uv);
            TENSOR(w, w_uk_scale);
            TENSOR(w, w_uv_scale);
        } else if (ext->id == ATTN_EXT_RECURRENT_WEIGHTS) {
            const struct attn_recurrent_weights *w = extension;
            ADDRESS(w, a_log);
            ADDRESS(w, dt_bias);
            TENSOR(w, conv_weight);
            TENSOR(w, conv_bias);
        } else if (ext->id == ATTN_EXT_KV_QUANT_PARAMS) {
            const struct attn_kv_quant_params *p = extension;
            ADDRESS(p, hadamard_signs_k);
            ADDRESS(p, hadamard_signs_v);
            ADDRESS(p, v_channel_scale);
        } else if (ext->id == ATTN_EXT_DRAFT_MM_ENCODER_STATE) {
            const struct attn_mm_encoder_state *s = extension;
            ADDRESS(s, amax_history);
            ADDRESS(s, scales);
        } else if (ext->id == ATTN_EXT_BATCH_RECURRENT) {
            const struct attn_batch_recurrent *b = extension;
            ADDRESS(b, state_slots);
            ADDRESS(b, has_initial_state);
            ADDRESS(b, num_accepted_tokens);
        } else if (ext->id == ATTN_EXT_BATCH_CONTEXT) {
            const struct attn_batch_context_parallel *b = extension;
            ADDRESS(b, local_seq_lens);
            HOST(b, local_seq_lens_host);
        } else if (ext->id == ATTN_EXT_IO_MLA) {
            const struct attn_io_mla *io = extension;
            TENSOR(io, q_nope);
            TENSOR(io, q_pe);
            TENSOR(io, kv_c);
            TENSOR(io, k_pe);
            ADDRESS(io, topk_indices);
        } else if (ext->id == ATTN_EXT_IO_RECURRENT) {
            const struct attn_io_recurrent *io = extension;
            TENSOR(io, mixed_qkv);
            TENSOR(io, a);
            TENSOR(io, b);
        } else if (ext->id == ATTN_EXT_IO_OUTPUT_QUANT) {
            const struct attn_io_output_quant *io = extension;
            ADDRESS(io, scale);
            TENSOR(io, block_scales);
        } else if (ext->id == ATTN_EXT_IO_ROPE) {
            const struct attn_io_rope *io = extension;
            ADDRESS(io, positions);
            TENSOR(io, cos_sin);
            TENSOR(io, q_norm_weight);
            TENSOR(io, k_norm_weight);
        }
    }
    return status;
}

static attn_status check_params(const struct attn_layer_params *params, struct attn_error *error)
{
    attn_status status = ATTN_OK;
    if (params == NULL) {
        return ATTN_OK;
    }
    ADDRESS(params, sinks);
    ADDRESS(params, alibi_slopes);
    TENSOR(params, sink_k);
    TENSOR(params, sink_v);
    ADDRESS(params, q_scale);
    ADDRESS(params, k_scale);
    ADDRESS(params, v_scale);
    ADDRESS(params, p_scale);
    return status != ATTN_OK ? status : check_extensions(params->next, error);
}

static attn_status check_batch(const struct attn_batch *batch, struct attn_error *error)
{
    attn_status status = ATTN_OK;
    if (batch == NULL) {
        return ATTN_OK;
    }
    ADDRESS(batch, query_start_loc);
    HOST(batch, query_start_loc_host);
    ADDRESS(batch, seq_lens);
    HOST(batch, seq_lens_host);
    ADDRESS(batch, key_start_loc);
    HOST(batch, key_start_loc_host);
    ADDRESS(batch, block_table);
    ADDRESS(batch, block_table_row);
    ADDRESS(batch, slot_mapping);
    ADDRESS(batch, causal_per_request);
    ADDRESS(batch, encoder_seq_lens);
    HOST(batch, encoder_seq_lens_host);
    ADDRESS(batch, logits_indices);
    ADDRESS(batch, spans);
    ADDRESS(batch, span_start_loc);
    ADDRESS(batch, tree);
    return status != ATTN_OK ? status : check_extensions(batch->next, error);
}

attn_status check_attend(const struct attn_attend_args *args, struct attn_error *error)
{
    attn_status status = check_params(args->params, error);
    status = status != ATTN_OK ? status : check_batch(args->batch, error);
    status = status != ATTN_OK ? status : check_view(args->k_cache, error);
    status = status != ATTN_OK ? status : check_view(args->v_cache, error);
    status = status != ATTN_OK ? status : check_extensions(args->next, error);
    HOST(args, schedule_host);
    ADDRESS(args, workspace);
    TENSOR(args, q);
    TENSOR(args, k);
    TENSOR(args, v);
    TENSOR(args, out);
    TENSOR(args, lse);
    return status;
}

attn_status check_write(const struct attn_write_kv_args *args, struct attn_error *error)
{
    attn_status status = check_params(args->params, error);
    status = status != ATTN_OK ? status : check_view(args->k_cache, error);
    status = status != ATTN_OK ? status : check_view(args->v_cache, error);
    status = status != ATTN_OK ? status : check_extensions(args->next, error);
    ADDRESS(args, slot_mapping);
    TENSOR(args, q);
    TENSOR(args, k);
    TENSOR(args, v);
    return status;
}

attn_status check_gather(const struct attn_gather_kv_args *args, struct attn_error *error)
{
    attn_status status = check_params(args->params, error);
    status = status != ATTN_OK ? status : check_view(args->cache, error);
    status = status != ATTN_OK ? status : check_batch(args->batch, error);
    ADDRESS(args, first_key);
    ADDRESS(args, out_start_loc);
    TENSOR(args, out);
    return status;
}

attn_status check_merge(const struct attn_merge_states_args *args, struct attn_error *error)
{
    attn_status status = check_extensions(args->next, error);
    TENSOR(args, prefix_out);
    TENSOR(args, prefix_lse);
    TENSOR(args, suffix_out);
    TENSOR(args, suffix_lse);
    TENSOR(args, out);
    TENSOR(args, lse);
    return status;
}

attn_status check_gemm(const struct attn_batched_gemm_args *args, struct attn_error *error)
{
    attn_status status = ATTN_OK;
    TENSOR(args, a);
    TENSOR(args, w);
    ADDRESS(args, w_scale);
    TENSOR(args, out);
    TENSOR(args, w_block_scale);
    return status;
}

attn_status check_quantize(const struct attn_quantize_args *args, struct attn_error *error)
{
    attn_status status = ATTN_OK;
    TENSOR(args, x);
    TENSOR(args, out);
    ADDRESS(args, scale);
    TENSOR(args, block_scales);
    return status;
}

attn_status check_amax(const struct attn_amax_args *args, struct attn_error *error)
{
    attn_status status = ATTN_OK;
    TENSOR(args, x);
    ADDRESS(args, out);
    return status;
}

attn_status check_copy(const void *destination, const void *source, int32_t kind,
                       struct attn_error *error)
{
    attn_status status = kind == ATTN_COPY_DEVICE_TO_HOST
                             ? check_host(destination, "destination", error)
                             : check_address(destination, "destination", error);
    if (status != ATTN_OK) {
        return status;
    }
    return kind == ATTN_COPY_HOST_TO_DEVICE ? check_host(source, "source", error)
                                            : check_address(source, "source", error);
}

attn_status check_copy_blocks(const struct attn_copy_blocks_args *args, struct attn_error *error)
{
    attn_status status = check_host(args->pairs, "pairs", error);
    for (int32_t i = 0; i < args->num_copies && status == ATTN_OK; i++) {
        const struct attn_block_copy *copy =
            (const void *)((const char *)args->copies + (int64_t)i * args->copy_stride);
        status = check_copy(copy->destination, copy->source, args->kind, error);
    }
    return status;
}

attn_status check_table(const struct attn_block_table_args *args, struct attn_error *error)
{
    attn_status status = ATTN_OK;
    ADDRESS(args, block_table);
    ADDRESS(args, block_table_row);
    ADDRESS(args, page_indices);
    ADDRESS(args, page_start_loc);
    ADDRESS(args, last_page_len);
    ADDRESS(args, seq_lens);
    ADDRESS(args, out);
    ADDRESS(args, out_seq_lens);
    return status;
}
