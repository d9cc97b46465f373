/* SPDX-License-Identifier: Apache-2.0 */
#include "planned.h"

#include "client.h"

attn_status planned_prepare(const struct attn_kernels *kernels, struct attn_attend_args *call,
                            const struct attn_limits *limits, struct attn_schedule_size *size,
                            struct attn_error *error)
{
    const struct attn_prepare_args prepare_args = SIZED(
        attn_prepare_args, .instance = call->instance, .layer = call->layer, .params = call->params,
        .k_cache = call->k_cache, .v_cache = call->v_cache, .phase = call->phase);
    struct attn_schedule_size_args sized =
        SIZED(attn_schedule_size_args, .instance = call->instance, .limits = limits);
    attn_status status = ATTN_OK;
    if (kernels->prepare != NULL) {
        status = kernels->prepare(&prepare_args, &call->prepared, error);
    }
    sized.prepared = call->prepared;
    if (status == ATTN_OK && kernels->create_plan_state != NULL) {
        status = kernels->create_plan_state(&sized, &call->plan_state, error);
    }
    sized.plan_state = call->plan_state;
    if (status == ATTN_OK && kernels->schedule_size != NULL) {
        status = kernels->schedule_size(&sized, size, error);
    }
    return status;
}

void planned_release(const struct attn_kernels *kernels, const struct attn_attend_args *call)
{
    if (call->plan_state != NULL && kernels->destroy_plan_state != NULL) {
        kernels->destroy_plan_state(call->instance, call->plan_state);
    }
    if (call->prepared != NULL && kernels->release != NULL) {
        kernels->release(call->instance, call->prepared);
    }
}
