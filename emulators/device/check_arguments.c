/* SPDX-License-Identifier: Apache-2.0 */
/* What the fake device refuses: places that a kernel there could not follow, and those that the
 * host could not. */
#include "fake_device.h"

#include <attn/collectives.h>
#include <attn/draft/mm_encoder.h>
#include <attn/recurrent.h>
#include <attn/mla.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

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

static attn_status check_tensor(const void *pointer, const char *name, struct attn_error *error)
{
    const struct attn_tensor *tensor = pointer;
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

/* A struct's member that points somewhere, and what has to hold of that. */
struct pointer {
    const char *name;
    size_t offset;
    attn_status (*check)(const void *target, const char *name, struct attn_error *error);
};

/* `pointers` ends with a row without a name; a struct that is not there has nothing wrong. */
static attn_status check_pointers(const void *owner, const struct pointer *pointers,
                                  struct attn_error *error)
{
    attn_status status = ATTN_OK;
    for (; owner != NULL && pointers->name != NULL && status == ATTN_OK; pointers++) {
        const void *target;
        memcpy(&target, (const char *)owner + pointers->offset, sizeof target);
        status = pointers->check(target, pointers->name, error);
    }
    return status;
}

/* The rows of a type, which is `self` inside POINTERS. */
#define POINTER(member, check)                                                                     \
    {                                                                                              \
#member, offsetof(self, member), check                                                     \
    }
#define ADDRESS(member) POINTER(member, check_address)
#define HOST(member) POINTER(member, check_host)
#define TENSOR(member) POINTER(member, check_tensor)
#define POINTERS(type, owner, error, ...)                                                          \
    do {                                                                                           \
        typedef struct type self;                                                                  \
        static const struct pointer pointers[] = {__VA_ARGS__, {NULL, 0, NULL}};                   \
        return check_pointers(owner, pointers, error);                                             \
    } while (0)

static attn_status check_view(const void *view, const char *name, struct attn_error *error)
{
    POINTERS(attn_kv_view, view, error, ADDRESS(data), ADDRESS(scale));
}

/* An extension of parameters, batches or runs; ids tell them apart. */
static attn_status check_extension(const struct attn_ext *ext, struct attn_error *error)
{
    switch (ext->id) {
    case ATTN_EXT_MLA_WEIGHTS:
        POINTERS(attn_mla_weights, ext, error, TENSOR(kv_b_proj), TENSOR(w_uk), TENSOR(w_uv),
                 TENSOR(w_uk_scale), TENSOR(w_uv_scale));
    case ATTN_EXT_RECURRENT_WEIGHTS:
        POINTERS(attn_recurrent_weights, ext, error, ADDRESS(a_log), ADDRESS(dt_bias),
                 TENSOR(conv_weight), TENSOR(conv_bias));
    case ATTN_EXT_KV_QUANT_PARAMS:
        POINTERS(attn_kv_quant_params, ext, error, ADDRESS(hadamard_signs_k),
                 ADDRESS(hadamard_signs_v), ADDRESS(v_channel_scale));
    case ATTN_EXT_DRAFT_MM_ENCODER_STATE:
        POINTERS(attn_mm_encoder_state, ext, error, ADDRESS(amax_history), ADDRESS(scales));
    case ATTN_EXT_BATCH_RECURRENT:
        POINTERS(attn_batch_recurrent, ext, error, ADDRESS(state_slots), ADDRESS(has_initial_state),
                 ADDRESS(num_accepted_tokens));
    case ATTN_EXT_BATCH_CONTEXT:
        POINTERS(attn_batch_context_parallel, ext, error, ADDRESS(local_seq_lens),
                 HOST(local_seq_lens_host));
    case ATTN_EXT_IO_MLA:
        POINTERS(attn_io_mla, ext, error, TENSOR(q_nope), TENSOR(q_pe), TENSOR(kv_c), TENSOR(k_pe),
                 ADDRESS(topk_indices));
    case ATTN_EXT_IO_RECURRENT:
        POINTERS(attn_io_recurrent, ext, error, TENSOR(mixed_qkv), TENSOR(a), TENSOR(b));
    case ATTN_EXT_IO_OUTPUT_QUANT:
        POINTERS(attn_io_output_quant, ext, error, ADDRESS(scale), TENSOR(block_scales));
    case ATTN_EXT_IO_ROPE:
        POINTERS(attn_io_rope, ext, error, ADDRESS(positions), TENSOR(cos_sin),
                 TENSOR(q_norm_weight), TENSOR(k_norm_weight));
    default:
        return ATTN_OK;
    }
}

static attn_status check_extensions(const void *first, const char *name, struct attn_error *error)
{
    attn_status status = ATTN_OK;
    for (const struct attn_ext *ext = first; ext != NULL && status == ATTN_OK; ext = ext->next) {
        status = check_extension(ext, error);
    }
    return status;
}

#define VIEW(member) POINTER(member, check_view)
#define EXTENSIONS(member) POINTER(member, check_extensions)
#define PARAMS(member) POINTER(member, check_params)
#define BATCH(member) POINTER(member, check_batch)

static attn_status check_params(const void *params, const char *name, struct attn_error *error)
{
    POINTERS(attn_layer_params, params, error, ADDRESS(sinks), ADDRESS(alibi_slopes),
             TENSOR(sink_k), TENSOR(sink_v), ADDRESS(q_scale), ADDRESS(k_scale), ADDRESS(v_scale),
             ADDRESS(p_scale), EXTENSIONS(next));
}

static attn_status check_batch(const void *batch, const char *name, struct attn_error *error)
{
    POINTERS(attn_batch, batch, error, ADDRESS(query_start_loc), HOST(query_start_loc_host),
             ADDRESS(seq_lens), HOST(seq_lens_host), ADDRESS(key_start_loc),
             HOST(key_start_loc_host), ADDRESS(block_table), ADDRESS(block_table_row),
             ADDRESS(slot_mapping), ADDRESS(causal_per_request), ADDRESS(encoder_seq_lens),
             HOST(encoder_seq_lens_host), ADDRESS(logits_indices), ADDRESS(spans),
             ADDRESS(span_start_loc), ADDRESS(tree), EXTENSIONS(next));
}

attn_status check_attend(const struct attn_attend_args *args, struct attn_error *error)
{
    POINTERS(attn_attend_args, args, error, PARAMS(params), BATCH(batch), VIEW(k_cache),
             VIEW(v_cache), EXTENSIONS(next), HOST(schedule_host), ADDRESS(workspace), TENSOR(q),
             TENSOR(k), TENSOR(v), TENSOR(out), TENSOR(lse));
}

attn_status check_write(const struct attn_write_kv_args *args, struct attn_error *error)
{
    POINTERS(attn_write_kv_args, args, error, PARAMS(params), VIEW(k_cache), VIEW(v_cache),
             EXTENSIONS(next), ADDRESS(slot_mapping), TENSOR(q), TENSOR(k), TENSOR(v));
}

attn_status check_gather(const struct attn_gather_kv_args *args, struct attn_error *error)
{
    POINTERS(attn_gather_kv_args, args, error, PARAMS(params), VIEW(cache), BATCH(batch),
             ADDRESS(first_key), ADDRESS(out_start_loc), TENSOR(out));
}

attn_status check_merge(const struct attn_merge_states_args *args, struct attn_error *error)
{
    POINTERS(attn_merge_states_args, args, error, EXTENSIONS(next), TENSOR(prefix_out),
             TENSOR(prefix_lse), TENSOR(suffix_out), TENSOR(suffix_lse), TENSOR(out), TENSOR(lse));
}

attn_status check_gemm(const struct attn_batched_gemm_args *args, struct attn_error *error)
{
    POINTERS(attn_batched_gemm_args, args, error, TENSOR(a), TENSOR(w), ADDRESS(w_scale),
             TENSOR(out), TENSOR(w_block_scale));
}

attn_status check_quantize(const struct attn_quantize_args *args, struct attn_error *error)
{
    POINTERS(attn_quantize_args, args, error, TENSOR(x), TENSOR(out), ADDRESS(scale),
             TENSOR(block_scales));
}

attn_status check_amax(const struct attn_amax_args *args, struct attn_error *error)
{
    POINTERS(attn_amax_args, args, error, TENSOR(x), ADDRESS(out));
}

attn_status check_table(const struct attn_block_table_args *args, struct attn_error *error)
{
    POINTERS(attn_block_table_args, args, error, ADDRESS(block_table), ADDRESS(block_table_row),
             ADDRESS(page_indices), ADDRESS(page_start_loc), ADDRESS(last_page_len),
             ADDRESS(seq_lens), ADDRESS(out), ADDRESS(out_seq_lens));
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
