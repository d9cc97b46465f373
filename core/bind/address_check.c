/* SPDX-License-Identifier: Apache-2.0 */
#include <attn/draft/mm_encoder.h>

#include "bind/address_check.h"

#include <string.h>

#include "bind/bound.h"
#include "util/device.h"
#include "util/structs.h"

/* Do kernels on `own` read memory of another device type? Page-locked and managed memory both do,
 * and on a CPU all that the host can read. */
static bool serves(struct attn_device own, struct attn_device memory)
{
    switch (memory.type) {
    case 0:
    case ATTN_DEVICE_CPU:
        return own.type == ATTN_DEVICE_CPU;
    case ATTN_DEVICE_CUDA_MANAGED:
        return true;
    case ATTN_DEVICE_CUDA_HOST:
        return own.type == ATTN_DEVICE_CUDA || own.type == ATTN_DEVICE_CPU;
    case ATTN_DEVICE_ROCM_HOST:
        return own.type == ATTN_DEVICE_ROCM || own.type == ATTN_DEVICE_CPU;
    default:
        return device_same(own, memory);
    }
}

static void add(char *to, const char *text)
{
    memcpy(to + strlen(to), text, strlen(text) + 1);
}

/* "on cpu:0; the layer's backend runs on cuda:0" */
static attn_status refuse(const attn_model *model, struct attn_device memory, const char *field,
                          struct attn_error *error)
{
    char message[160] = "on ", name[DEVICE_TEXT_SIZE];
    add(message, device_text(memory, name));
    add(message, "; the layer's backend runs on ");
    add(message, device_text(model->device, name));
    return error_set_text(error, ATTN_ERROR_INVALID_ARGUMENT, field, message);
}

attn_status address_check_device(const attn_model *model, struct attn_device stated,
                                 const char *field, struct attn_error *error)
{
    return stated.type == 0 || serves(model->device, stated) ? ATTN_OK
                                                             : refuse(model, stated, field, error);
}

attn_status address_check_tensor(const attn_model *model, const struct attn_tensor *tensor,
                                 const char *field, struct attn_error *error)
{
    return tensor == NULL || serves(model->device, tensor->device)
               ? ATTN_OK
               : refuse(model, tensor->device, field, error);
}

/* The device whose memory lies there; type 0: not known. */
static struct attn_device owner_of(const attn_model *model, const void *address)
{
    const struct instance *asked = model->asked;
    struct attn_device owner = {0, 0};
    if (asked != NULL && address != NULL) {
        const struct attn_memory_args args = {.struct_size = sizeof args,
                                              .instance = asked->handle,
                                              .memory = (void *)(uintptr_t)address};
        struct attn_error why = ATTN_ERROR_INIT;
        if (asked->kernels.memory_device(&args, &owner, &why) != ATTN_OK) {
            owner.type = 0;
        }
    }
    return owner;
}

attn_status address_ask(const attn_model *model, const void *address, const char *field,
                        struct attn_error *error)
{
    return address_check_device(model, owner_of(model, address), field, error);
}

attn_status address_ask_host(const attn_model *model, const void *address, const char *field,
                             struct attn_error *error)
{
    struct attn_device owner = owner_of(model, address);
    char message[160] = "on ", name[DEVICE_TEXT_SIZE];
    if (serves((struct attn_device){ATTN_DEVICE_CPU, 0}, owner)) {
        return ATTN_OK;
    }
    add(message, device_text(owner, name));
    add(message, "; the host reads it");
    return error_set_text(error, ATTN_ERROR_INVALID_ARGUMENT, field, message);
}

/* One thing that parameters point at. */
struct pointed {
    const char *field;
    const void *address;
    const struct attn_tensor *tensor;
};

static attn_status check_all(const attn_model *model, const struct pointed *all, size_t count,
                             struct attn_error *error)
{
    attn_status status = ATTN_OK;
    for (size_t i = 0; i < count && status == ATTN_OK; i++) {
        const struct attn_tensor *tensor = all[i].tensor;
        status = address_check_tensor(model, tensor, all[i].field, error);
        if (status == ATTN_OK) {
            status = address_ask(model, tensor != NULL ? tensor->data : all[i].address,
                                 all[i].field, error);
        }
    }
    return status;
}

attn_status address_check_params(const attn_model *model, const struct attn_layer_params *params,
                                 struct attn_error *error)
{
    const struct attn_mla_weights *mla =
        (const struct attn_mla_weights *)ext_find(params->next, ATTN_EXT_MLA_WEIGHTS);
    const struct attn_recurrent_weights *gdn =
        (const struct attn_recurrent_weights *)ext_find(params->next, ATTN_EXT_RECURRENT_WEIGHTS);
    const struct attn_recurrent_skip *skip =
        (const struct attn_recurrent_skip *)ext_find(params->next, ATTN_EXT_DRAFT_RECURRENT_SKIP);
    const struct attn_kv_quant_params *quant =
        (const struct attn_kv_quant_params *)ext_find(params->next, ATTN_EXT_KV_QUANT_PARAMS);
    const struct attn_mm_encoder_state *encoder = (const struct attn_mm_encoder_state *)ext_find(
        params->next, ATTN_EXT_DRAFT_MM_ENCODER_STATE);
    const struct pointed own[] = {
        {"sinks", params->sinks, NULL},     {"alibi_slopes", params->alibi_slopes, NULL},
        {"sink_k", NULL, params->sink_k},   {"sink_v", NULL, params->sink_v},
        {"q_scale", params->q_scale, NULL}, {"k_scale", params->k_scale, NULL},
        {"v_scale", params->v_scale, NULL}, {"p_scale", params->p_scale, NULL}};
    attn_status status = address_check_device(model, params->device, "attn_layer_params", error);
    status = status == ATTN_OK ? check_all(model, own, 8, error) : status;
    if (status == ATTN_OK && mla != NULL) {
        const struct pointed all[] = {{"kv_b_proj", NULL, mla->kv_b_proj},
                                      {"w_uk", NULL, mla->w_uk},
                                      {"w_uv", NULL, mla->w_uv},
                                      {"w_uk_scale", NULL, mla->w_uk_scale},
                                      {"w_uv_scale", NULL, mla->w_uv_scale}};
        status = check_all(model, all, 5, error);
    }
    if (status == ATTN_OK && gdn != NULL) {
        const struct pointed all[] = {{"a_log", gdn->a_log, NULL},
                                      {"dt_bias", gdn->dt_bias, NULL},
                                      {"conv_weight", NULL, gdn->conv_weight},
                                      {"conv_bias", NULL, gdn->conv_bias}};
        status = check_all(model, all, 4, error);
    }
    if (status == ATTN_OK && skip != NULL) {
        status = address_ask(model, skip->skip, "skip", error);
    }
    if (status == ATTN_OK && quant != NULL) {
        const struct pointed all[] = {{"hadamard_signs_k", quant->hadamard_signs_k, NULL},
                                      {"hadamard_signs_v", quant->hadamard_signs_v, NULL},
                                      {"v_channel_scale", quant->v_channel_scale, NULL}};
        status = check_all(model, all, 3, error);
    }
    if (status == ATTN_OK && encoder != NULL) {
        const struct pointed all[] = {{"amax_history", encoder->amax_history, NULL},
                                      {"scales", encoder->scales, NULL}};
        status = check_all(model, all, 2, error);
    }
    return status;
}

attn_status address_check_view(const attn_model *model, const struct attn_kv_view *view,
                               const char *field, struct attn_error *error)
{
    attn_status status = address_check_device(model, view->device, field, error);
    status = status == ATTN_OK ? address_ask(model, view->data, field, error) : status;
    return status == ATTN_OK ? address_ask(model, view->scale, field, error) : status;
}
