/* SPDX-License-Identifier: Apache-2.0 */
#include "core/steps.h"

#include "common/command.h"
#include "support/client.h"
#include "support/random.h"

static const int32_t queries[STEPS][STEPS_REQS] = {
    {STEPS_PROMPT, 3, 40}, {1, 1, 1}, {7, 30, 1}, {1, 0, 30}};

void steps_init(struct steps *steps)
{
    int32_t token = 0, length[STEPS_REQS] = {0};
    for (int32_t s = 0; s < STEPS; s++) {
        steps->first[s] = token;
        for (int32_t r = 0; r < STEPS_REQS; r++) {
            steps->starts[s][r] = token - steps->first[s];
            for (int32_t i = 0; i < queries[s][r]; i++, token++) {
                steps->request[token] = r;
                steps->position[token] = length[r]++;
            }
            steps->lens[s][r] = length[r];
        }
        steps->starts[s][STEPS_REQS] = token - steps->first[s];
    }
    steps->first[STEPS] = token;
}

void steps_operands(const struct steps *steps, struct operand *o)
{
    o[STEPS_STARTS] =
        (struct operand){"query_start_loc", .bytes = sizeof steps->starts, .from = steps->starts};
    o[STEPS_LENS] = (struct operand){"seq_lens", .bytes = sizeof steps->lens, .from = steps->lens};
    o[STEPS_TABLE] =
        (struct operand){"block_table", .bytes = STEPS_REQS * STEPS_COLUMNS * sizeof(int32_t)};
    o[STEPS_SLOTS] = (struct operand){"slot_mapping", .bytes = STEPS_TOKENS * sizeof(int64_t)};
}

void steps_fill(const struct steps *steps, struct kernel_test *test, uint64_t *random)
{
    int32_t *table = test_input(test, STEPS_TABLE);
    random_order(random, table, STEPS_REQS * STEPS_COLUMNS, 1);
    for (int32_t t = 0; t < STEPS_TOKENS; t++) {
        ((int64_t *)test_input(test, STEPS_SLOTS))[t] =
            steps_slot(table, STEPS_COLUMNS, steps->request[t], steps->position[t]);
    }
}

int32_t steps_token(const struct steps *steps, int32_t r, int32_t position)
{
    int32_t token = 0;
    while (steps->request[token] != r || steps->position[token] != position) {
        token++;
    }
    return token;
}

struct attn_batch steps_batch(const struct steps *steps, const struct kernel_call *call, int32_t s)
{
    struct attn_batch batch = client_batch(STEPS_REQS, steps->starts[s], steps->lens[s]);
    batch.query_start_loc = (int32_t *)call_array(call, STEPS_STARTS) + s * (STEPS_REQS + 1);
    batch.seq_lens = (int32_t *)call_array(call, STEPS_LENS) + s * STEPS_REQS;
    client_blocks(&batch, call_array(call, STEPS_TABLE), STEPS_COLUMNS,
                  (int64_t *)call_array(call, STEPS_SLOTS) + steps->first[s]);
    return batch;
}

attn_status steps_run(struct check_engine *e, struct kernel_call *call, int32_t s,
                      const struct attn_batch *batch, const struct attn_step_io *io,
                      struct attn_error *error)
{
    const struct attn_api *api = e->core->api;
    attn_plan *plan = e->plans[0].plan;
    watch_begin(&call->watch);
    attn_status status = api->plan_batch(plan, batch, call->stream, error);
    status = status == ATTN_OK ? api->run(plan, e->layer, io, error) : status;
    if (s > 0 && status == ATTN_OK &&
        watch_allocated(&call->watch, call->backend, error->message, sizeof error->message)) {
        status = error->status = ATTN_ERROR_PLUGIN;
    }
    return status;
}

attn_status steps_call(const struct steps_layer *layer, struct kernel_call *call,
                       const void *context, struct attn_error *error)
{
    struct core *core = call->test->trial->core;
    const struct attn_api *api = core->api;
    const struct attn_limits limits = client_limits(STEPS_REQS, layer->steps->first[1],
                                                    STEPS_PROMPT, STEPS_LONGEST, STEPS_COLUMNS);
    const struct attn_plan_options plan =
        SIZED(attn_plan_options, .limits = &limits, .graph = layer->graph);
    struct check_engine e;
    attn_status status = engine_open(&e, core, call->device, layer->layer, error);
    status = status ? status : api->layer_bind_memory(e.layer, layer->memory, error);
    if (status == ATTN_OK && layer->params != NULL) {
        status = api->layer_bind_params(e.layer, layer->params, error);
    }
    status = status ? status : engine_make_plan(&e, 0, &plan, error);
    for (int32_t s = 0; s < STEPS && status == ATTN_OK; s++) {
        status = layer->run(&e, context, call, s, error);
    }
    device_wait(e.device);
    if (status == ATTN_OK && !engine_guards_whole(&e)) {
        status =
            command_error(error, ATTN_ERROR_PLUGIN, "", "the workspace was written past its size");
    }
    engine_finish(&e);
    return status;
}
