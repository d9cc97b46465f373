/* SPDX-License-Identifier: Apache-2.0 */
#include "dispatch_pair.h"

#include <stdlib.h>

static void set_arguments(struct dispatch_pair *pair)
{
    struct measured *measured = &pair->measured;
    const struct attn_step_io *io = &measured->io[0].io;
    pair->layer = measured->layer.desc;
    pair->layer.name = measured->names[0];
    pair->layer.kv_dtype = measured->choice.kv_dtype;
    pair->layer.block_size = measured->layer.spec.block_size;
    pair->layer.head_size_v =
        pair->layer.head_size_v > 0 ? pair->layer.head_size_v : pair->layer.head_size;
    pair->params = (struct attn_layer_params){.struct_size = sizeof pair->params};
    pair->attend = (struct attn_attend_args){.struct_size = sizeof pair->attend,
                                             .instance = pair->bare.instance,
                                             .layer = &pair->layer,
                                             .params = &pair->params,
                                             .batch = &measured->batch,
                                             .k_cache = &measured->k_view,
                                             .v_cache = &measured->v_view,
                                             .stream = measured->session->stream,
                                             .flags = ATTN_RUN_NO_WRITE,
                                             .phase = ATTN_PHASE_DECODE,
                                             .q = io->q,
                                             .k = io->k,
                                             .v = io->v,
                                             .out = io->out};
    pair->write = (struct attn_write_kv_args){.struct_size = sizeof pair->write,
                                              .instance = pair->bare.instance,
                                              .layer = &pair->layer,
                                              .params = &pair->params,
                                              .k_cache = &measured->k_view,
                                              .v_cache = &measured->v_view,
                                              .slot_mapping = measured->batch.slot_mapping,
                                              .num_slots = measured->batch.num_slots,
                                              .stream = measured->session->stream,
                                              .k = io->k,
                                              .v = io->v};
}

/* What the core does at bind and plan, for the one layer. */
static attn_status plan_direct(struct dispatch_pair *pair, struct attn_error *error)
{
    const struct attn_kernels *kernels = pair->bare.kernels;
    const struct requests *requests = &pair->measured.requests;
    pair->limits = (struct attn_limits){.struct_size = sizeof pair->limits,
                                        .max_num_reqs = requests->count,
                                        .max_num_tokens = (int32_t)requests->num_tokens,
                                        .max_query_len = requests->max_query_len,
                                        .max_seq_len = requests->max_seq_len,
                                        .max_blocks_per_req = (int32_t)pair->measured.table_stride};
    attn_status status = ATTN_OK;
    pair->size.struct_size = sizeof pair->size;
    const struct attn_prepare_args prepare_args = {.struct_size = sizeof prepare_args,
                                                   .instance = pair->bare.instance,
                                                   .layer = &pair->layer,
                                                   .params = &pair->params,
                                                   .k_cache = pair->attend.k_cache,
                                                   .v_cache = pair->attend.v_cache,
                                                   .phase = ATTN_PHASE_DECODE};
    if (kernels->prepare != NULL) {
        status = kernels->prepare(&prepare_args, &pair->attend.prepared, error);
    }
    struct attn_schedule_size_args sized = {.struct_size = sizeof sized,
                                            .instance = pair->bare.instance,
                                            .prepared = pair->attend.prepared,
                                            .limits = &pair->limits};
    if (status == ATTN_OK && kernels->create_plan_state != NULL) {
        status = kernels->create_plan_state(&sized, &pair->attend.plan_state, error);
    }
    sized.plan_state = pair->attend.plan_state;
    if (status == ATTN_OK && kernels->schedule_size != NULL) {
        status = kernels->schedule_size(&sized, &pair->size, error);
    }
    if (status != ATTN_OK) {
        return status;
    }
    pair->attend.schedule_host = pair->schedule_host = malloc(pair->size.host_bytes + 1);
    pair->attend.workspace = memory_take(&pair->measured.memory, pair->size.device_bytes + 1);
    pair->attend.scratch = memory_take(&pair->measured.memory, pair->size.scratch_bytes + 1);
    if (pair->schedule_host == NULL || pair->attend.workspace == NULL ||
        pair->attend.scratch == NULL) {
        return memory_refused(error);
    }
    pair->attend.limits = &pair->limits;
    pair->attend.schedule_host_bytes = pair->size.host_bytes;
    pair->attend.workspace_bytes = pair->size.device_bytes;
    pair->attend.scratch_bytes = pair->size.scratch_bytes;
    if (kernels->schedule != NULL) {
        struct attn_attend_args args = pair->attend;
        args.q = args.k = args.v = args.out = NULL;
        status = kernels->schedule(&args, ATTN_PLAN_EAGER, error);
    }
    return status;
}

attn_status dispatch_init(struct dispatch_pair *pair, struct session *session,
                          const struct attn_host *host, const struct shape *shape,
                          const char *backend, bool writes, struct attn_error *error)
{
    struct shape mine = *shape;
    mine.value[PARAMETER_WRITE] = writes;
    mine.value[PARAMETER_LAYOUT] = -1;
    *pair = (struct dispatch_pair){.writes = writes, .warm_calls = 1};
    attn_status status = measured_init(&pair->measured, session, &mine, backend, NULL, error);
    if (status != ATTN_OK) {
        return status;
    }
    pair->handle = session->api->model_layer(pair->measured.model, 0);
    status = bare_backend_open(&pair->bare, session, pair->measured.choice.backend, host, error);
    if (status == ATTN_OK) {
        set_arguments(pair);
        status = plan_direct(pair, error);
    }
    status = status == ATTN_OK ? dispatch_run_calls(pair, pair->warm_calls) : status;
    status = status == ATTN_OK ? dispatch_direct_calls(pair, pair->warm_calls) : status;
    if (status != ATTN_OK) {
        dispatch_finish(pair);
    }
    return status;
}

void dispatch_finish(struct dispatch_pair *pair)
{
    if (pair->attend.plan_state != NULL) {
        pair->bare.kernels->destroy_plan_state(pair->bare.instance, pair->attend.plan_state);
    }
    pair->attend.plan_state = NULL;
    if (pair->attend.prepared != NULL) {
        pair->bare.kernels->release(pair->bare.instance, pair->attend.prepared);
    }
    bare_backend_close(&pair->bare);
    measured_finish(&pair->measured);
    free(pair->schedule_host);
    pair->schedule_host = NULL;
    pair->attend.prepared = NULL;
}

__attribute__((noinline)) attn_status dispatch_run_calls(struct dispatch_pair *pair, int64_t calls)
{
    attn_status (*run)(attn_plan *, attn_layer *, const struct attn_step_io *,
                       struct attn_error *) = pair->measured.session->api->run;
    attn_plan *plan = pair->measured.plan;
    attn_layer *layer = pair->handle;
    const struct attn_step_io *io = &pair->measured.io[0].io;
    attn_status status = ATTN_OK;
    for (int64_t i = 0; i < calls; i++) {
        status = run(plan, layer, io, NULL);
    }
    return status;
}

__attribute__((noinline)) attn_status dispatch_direct_calls(struct dispatch_pair *pair,
                                                            int64_t calls)
{
    attn_status (*attend)(const struct attn_attend_args *, struct attn_error *) =
        pair->bare.kernels->attend;
    attn_status (*write)(const struct attn_write_kv_args *, struct attn_error *) =
        pair->bare.kernels->write_kv;
    attn_status status = ATTN_OK;
    if (!pair->writes) {
        for (int64_t i = 0; i < calls; i++) {
            status = attend(&pair->attend, NULL);
        }
        return status;
    }
    for (int64_t i = 0; i < calls; i++) {
        status = write(&pair->write, NULL);
        status = status == ATTN_OK ? attend(&pair->attend, NULL) : status;
    }
    return status;
}
