/* SPDX-License-Identifier: Apache-2.0 */
#include "bind/address_check.h"

#include "bind/bound.h"
#include "util/device.h"

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

/* "on cpu:0; the layer's backend runs on cuda:0" */
static attn_status refuse(const attn_model *model, struct attn_device memory, const char *field,
                          struct attn_error *error)
{
    char name[DEVICE_TEXT_SIZE], own[DEVICE_TEXT_SIZE];
    return BAD(field, "on %s; the layer's backend runs on %s", device_text(memory, name),
               device_text(model->device, own));
}

attn_status address_check_device(const attn_model *model, struct attn_device stated,
                                 const char *field, struct attn_error *error)
{
    return stated.type == 0 || serves(model->device, stated) ? ATTN_OK
                                                             : refuse(model, stated, field, error);
}

/* The device whose memory lies there; type 0: not known. */
static struct attn_device owner_of(const attn_model *model, const void *address)
{
    const struct instance *asked = model->asked;
    struct attn_device owner = {0, 0};
    if (asked != NULL && address != NULL) {
        const struct attn_memory_args args =
            ABI_ARGS(.instance = asked->handle, .memory = (void *)(uintptr_t)address);
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

/* What address_ask does, for an array that the host reads. */
static attn_status ask_host(const attn_model *model, const void *address, const char *field,
                            struct attn_error *error)
{
    const struct attn_device owner = owner_of(model, address);
    char name[DEVICE_TEXT_SIZE];
    return serves((struct attn_device){ATTN_DEVICE_CPU, 0}, owner)
               ? ATTN_OK
               : BAD(field, "on %s; the host reads it", device_text(owner, name));
}

attn_status address_check_tensor(const attn_model *model, const struct attn_tensor *tensor,
                                 const char *field, bool ask, struct attn_error *error)
{
    if (tensor == NULL) {
        return ATTN_OK;
    }
    if (!serves(model->device, tensor->device)) {
        return refuse(model, tensor->device, field, error);
    }
    return ask ? address_ask(model, tensor->data, field, error) : ATTN_OK;
}

static attn_status check_fields(const attn_model *model, const void *ours,
                                const struct abi_field *field, const char *label, bool ask,
                                struct attn_error *error)
{
    for (; field->name != NULL; field++) {
        const char *name = label != NULL ? label : field->name;
        if (field->kind == FIELD_TENSOR) {
            TRY(address_check_tensor(model, field_pointer(ours, field), name, ask, error));
        } else if (ask && field->kind == FIELD_DEVICE) {
            TRY(address_ask(model, field_pointer(ours, field), name, error));
        } else if (ask && field->kind == FIELD_HOST) {
            TRY(ask_host(model, field_pointer(ours, field), name, error));
        }
    }
    return ATTN_OK;
}

attn_status address_check_all(const attn_model *model, const void *ours, enum abi_id id,
                              const struct attn_ext *next, const char *label, bool ask,
                              struct attn_error *error)
{
    TRY(check_fields(model, ours, abi_structs[id].fields, label, ask, error));
    for (; next != NULL; next = next->next) {
        const struct abi_struct *row = abi_find(next->id, id);
        TRY_IF(row != NULL, check_fields(model, next, row->fields, label, ask, error));
    }
    return ATTN_OK;
}

attn_status address_check_view(const attn_model *model, const struct attn_kv_view *view,
                               const char *field, struct attn_error *error)
{
    TRY(address_check_device(model, view->device, field, error));
    return address_check_all(model, view, ABI_KV_VIEW, NULL, field, true, error);
}
