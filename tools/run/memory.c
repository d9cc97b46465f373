/* SPDX-License-Identifier: Apache-2.0 */
/* What crosses to the device: memory that stays, and pools for the arrays of a plan and the rows of
 * a layer's run, which are given back at once; and the error of a run that lacks it. */
#include <stdio.h>

#include "engine.h"

#define POOL_FIRST ((size_t)1 << 20) /* bytes; doubled until a step fits */
#define ALIGNMENT 256

attn_status engine_fail(struct run_engine *engine, attn_status status, const char *field,
                        const char *what)
{
    engine->status = engine->error.status = status;
    snprintf(engine->error.field, sizeof engine->error.field, "%s", field);
    snprintf(engine->error.message, sizeof engine->error.message, "%s", what);
    return status;
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

static void *pool_take(struct run_engine *engine, struct pool *pool, size_t bytes)
{
    bytes = (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    if (pool->count == 0 || pool->size - pool->used < bytes) {
        size_t size = pool->size > 0 ? 2 * pool->size : POOL_FIRST;
        while (size < bytes) {
            size *= 2;
        }
        if (pool->count == POOL_BLOCKS) {
            engine_fail(engine, ATTN_ERROR_LIMIT, "pool", "a step is too large; try --scale");
            return NULL;
        }
        if (engine_take(engine, false, size, "a step's tensors", &pool->blocks[pool->count]) !=
            ATTN_OK) {
            return NULL;
        }
        pool->count++;
        pool->size = size;
        pool->used = 0;
    }
    void *memory = (uint8_t *)pool->blocks[pool->count - 1] + pool->used;
    pool->used += bytes;
    return memory;
}

void *pool_send(struct run_engine *engine, struct pool *pool, const void *source, size_t bytes)
{
    void *memory = pool_take(engine, pool, bytes);
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
    pool->used = 0;
    for (int32_t i = 0; i + 1 < pool->count; i++) {
        device_give(&engine->device, false, pool->blocks[i]);
    }
    if (pool->count > 0) {
        pool->blocks[0] = pool->blocks[pool->count - 1];
        pool->count = 1;
    }
}

void pool_finish(struct run_engine *engine, struct pool *pool)
{
    pool_reset(engine, pool);
    if (pool->count > 0) {
        device_give(&engine->device, false, pool->blocks[0]);
    }
    *pool = (struct pool){.count = 0};
}

attn_status params_send(struct run_engine *engine, struct run_layer *layer, int32_t index,
                        const void *source, size_t bytes)
{
    attn_status status =
        engine_take(engine, false, bytes, "parameters", &layer->device_params[index]);
    return status == ATTN_OK ? device_copy_in(&engine->device, layer->device_params[index], source,
                                              bytes, &engine->error)
                             : status;
}
