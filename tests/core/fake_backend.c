/* SPDX-License-Identifier: Apache-2.0 */
#include "fake_backend.h"

#include <string.h>

#include "support/client.h"

struct fake_calls fake_calls;
struct attn_kernels fake_kernels;

void fake_reset(void)
{
    memset(&fake_calls, 0, sizeof fake_calls);
}

static attn_status attend(const struct attn_attend_args *args, struct attn_error *error)
{
    const struct attn_batch *b = args->batch;
    if (fake_calls.attends < 8) {
        fake_calls.num_reqs[fake_calls.attends] = b->num_reqs;
        fake_calls.phase[fake_calls.attends] = args->phase;
        fake_calls.most_reqs[fake_calls.attends] = args->limits->max_num_reqs;
        fake_calls.table_rows[fake_calls.attends] = b->block_table_rows;
        fake_calls.k[fake_calls.attends] = args->k;
    }
    fake_calls.attends++;
    fake_calls.fused += !(args->flags & ATTN_RUN_NO_WRITE);
    return ATTN_OK;
}

static attn_status write_kv(const struct attn_write_kv_args *args, struct attn_error *error)
{
    fake_calls.writes++;
    return ATTN_OK;
}

static attn_status schedule_size(const struct attn_schedule_size_args *args,
                                 struct attn_schedule_size *size, struct attn_error *error)
{
    size->host_bytes = fake_calls.schedule.host_bytes;
    size->device_bytes = fake_calls.schedule.device_bytes;
    return ATTN_OK;
}

static attn_status schedule(const struct attn_attend_args *args, int32_t mode,
                            struct attn_error *error)
{
    if (fake_calls.schedules < 8) {
        fake_calls.scheduled_phase[fake_calls.schedules] = args->phase;
    }
    fake_calls.schedules++;
    return ATTN_OK;
}

static attn_status update_block_table(const struct attn_attend_args *args, struct attn_error *error)
{
    fake_calls.updates++;
    return ATTN_OK;
}

/* Parts are counted, not merged. */
static attn_status merge_states(const struct attn_merge_states_args *args, struct attn_error *error)
{
    return ATTN_OK;
}

static attn_status prepare(const struct attn_prepare_args *args, attn_prepared **prepared,
                           struct attn_error *error)
{
    fake_calls.prepares++;
    *prepared = (attn_prepared *)(void *)&fake_calls;
    return ATTN_OK;
}

static void release(attn_instance *instance, attn_prepared *prepared)
{
    fake_calls.releases++;
}

static attn_status create(const struct attn_create_args *args, attn_instance **instance,
                          const struct attn_kernels **kernels, struct attn_error *error)
{
    fake_calls.creates++;
    fake_calls.num_options = args->num_options;
    *instance = (attn_instance *)(void *)&fake_calls;
    *kernels = &fake_kernels;
    return ATTN_OK;
}

static void destroy(attn_instance *instance)
{
    fake_calls.destroys++;
}

struct attn_backend_caps *fake_init(struct fixture *fixture)
{
    fixture_init(fixture);
    fake_kernels =
        SIZED(attn_kernels, .attend = attend, .write_kv = write_kv, .merge_states = merge_states,
              .schedule_size = schedule_size, .schedule = schedule,
              .update_block_table = update_block_table, .prepare = prepare, .release = release);
    fixture->plugins[0].table_copy.create = create;
    fixture->plugins[0].table_copy.destroy = destroy;
    fixture->plugins[0].table = &fixture->plugins[0].table_copy;
    struct attn_backend_caps *caps = fixture_add(fixture, "fake", "", 10);
    caps->kernels = ATTN_KERNEL_ATTEND | ATTN_KERNEL_WRITE_KV | ATTN_KERNEL_MERGE_STATES;
    caps->layer_kinds |= 1u << ATTN_LAYER_ENCODER;
    caps->dtypes = 1u << ATTN_DTYPE_F32;
    caps->kv_dtypes = 1u << ATTN_KV_F32;
    fake_reset();
    return caps;
}

struct attn_layer_desc fake_layer(const char *name)
{
    struct attn_layer_desc layer = fixture_layer(name);
    layer.dtype = ATTN_DTYPE_F32;
    layer.num_q_heads = 4;
    layer.num_kv_heads = 2;
    layer.head_size = FAKE_HEAD_SIZE;
    layer.scale = 0.125f;
    layer.block_size = FAKE_BLOCK_SIZE;
    return layer;
}

attn_model *fake_model(struct fixture *fixture, const struct attn_layer_desc *layers, int32_t count,
                       struct attn_error *error)
{
    attn_assignment *assignment = NULL;
    attn_model *model = NULL;
    if (fixture_select(fixture, "", layers, count, &assignment, error) == ATTN_OK) {
        model_create(&fixture->runtime, assignment, NULL, &model, error);
    }
    assignment_destroy(assignment);
    return model;
}

attn_model *fake_model_of(struct fixture *fixture, const struct attn_layer_desc *layers,
                          int32_t count)
{
    struct attn_error error = ATTN_ERROR_INIT;
    attn_model *model = fake_model(fixture, layers, count, &error);
    if (model == NULL) {
        fail_msg("%s: %s", error.field, error.message);
    }
    return model;
}

struct attn_tensor fake_tensor(float *data, int64_t *shape, int64_t rows, int64_t heads)
{
    shape[0] = rows;
    shape[1] = heads;
    shape[2] = FAKE_HEAD_SIZE;
    return (struct attn_tensor){
        data, {ATTN_DEVICE_CPU, 0}, 3, {ATTN_CODE_FLOAT, 32, 1}, shape, NULL, 0};
}
