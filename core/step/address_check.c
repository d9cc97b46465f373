/* SPDX-License-Identifier: Apache-2.0 */
/* Where what a batch and a run bring lies, and errors of a device that come late. */
#include "bind/address_check.h"

#include <attn/io.h>

#include "step/plan_state.h"
#include "util/structs.h"

attn_status address_check_table(const attn_plan *plan, const struct attn_batch_table *table,
                                struct attn_error *error)
{
    return plan->model->asked == NULL || (plan->asked_tables && !plan->validate)
               ? ATTN_OK
               : address_check_all(plan->model, table, ABI_BATCH_TABLE, NULL, "tables", true,
                                   error);
}

attn_status address_check_batch(attn_plan *plan, const struct attn_batch *batch,
                                struct attn_error *error)
{
    if (plan->model->asked == NULL || (plan->asked && !plan->validate)) {
        return ATTN_OK;
    }
    TRY(address_check_all(plan->model, batch, ABI_BATCH, batch->next, NULL, true, error));
    plan->asked = true;
    return ATTN_OK;
}

attn_status settle_device_errors(const attn_plan *plan, void *stream, attn_status status,
                                 struct attn_error *error)
{
    struct attn_error why = ATTN_ERROR_INIT, clean = ATTN_ERROR_INIT;
    const struct instance *instance = NULL;
    for (int32_t i = 0; i < plan->model->num_instances && instance == NULL; i++) {
        const struct instance *other = &plan->model->instances[i];
        instance = other->kernels.synchronize != NULL ? other : NULL;
    }
    if (status != ATTN_OK || instance == NULL || plan->capturing) {
        return status;
    }
    const struct attn_stream_args args = {
        .struct_size = sizeof args, .instance = instance->handle, .stream = stream};
    status = instance->kernels.synchronize(&args, &why);
    if (status == ATTN_OK) {
        return ATTN_OK;
    }
    error_relay(&clean, status, &why);
    return error_set(error, status_is_known(status) ? status : ATTN_ERROR_PLUGIN, clean.field,
                     "step %llu: %s", (unsigned long long)plan->serial, clean.message);
}
