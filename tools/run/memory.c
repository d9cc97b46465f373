/* SPDX-License-Identifier: Apache-2.0 */
/* What crosses to the device: memory that stays, and pools for the arrays of a plan and the rows of
 * a layer's run, which are given back at once; and the error of a run that lacks it. */
#include <stdio.h>

#include "common/command.h"
#include "engine.h"

attn_status engine_fail(struct run_engine *engine, attn_status status, const char *field,
                        const char *what)
{
    return engine->status = command_error(&engine->error, status, field, "%s", what);
}

attn_status engine_take(struct run_engine *engine, bool host, size_t bytes, const char *what,
                        void **memory)
{
    char why[sizeof engine->error.message], text[sizeof why], name[DEVICE_NAME_SIZE];
    attn_status status = device_take(&engine->device, host, bytes, memory, &engine->error);
    if (status != ATTN_OK) {
        snprintf(why, sizeof why, "%s", engine->error.message);
        snprintf(text, sizeof text, "%.1f MiB of %.64s: %.600s; try --scale or --layers",
                 (double)bytes / (1 << 20), device_name(engine->device.device, name), why);
        engine_fail(engine, status, what, text);
    }
    return status;
}

void *pool_send(struct run_engine *engine, struct pool *pool, const void *source, size_t bytes)
{
    void *memory = NULL;
    if (pool->count == POOL_ITEMS) {
        engine_fail(engine, ATTN_ERROR_LIMIT, "pool", "a step has too many tensors");
    } else if (engine_take(engine, false, bytes > 0 ? bytes : 1, "a step's tensors", &memory) ==
               ATTN_OK) {
        pool->items[pool->count++] = memory;
    }
    bool sent = memory != NULL &&
                device_copy_in(&engine->device, memory, source, bytes, &engine->error) == ATTN_OK;
    return sent ? memory : NULL;
}

attn_status engine_wait(struct run_engine *engine)
{
    return engine->api->device->synchronize(engine->device.opened, NULL, &engine->error);
}

void pool_reset(struct run_engine *engine, struct pool *pool)
{
    while (pool->count > 0) {
        device_give(&engine->device, false, pool->items[--pool->count]);
    }
}

attn_status params_send(struct run_engine *engine, struct run_layer *layer, int32_t index,
                        const void *source, size_t bytes)
{
    attn_status status =
        engine_take(engine, false, bytes, "parameters", &layer->device_params[index]);
    return status ? status
                  : device_copy_in(&engine->device, layer->device_params[index], source, bytes,
                                   &engine->error);
}
