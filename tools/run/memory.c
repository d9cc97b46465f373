/* SPDX-License-Identifier: Apache-2.0 */
/* What crosses to the device: memory that stays, the arrays of a plan and the rows of a layer's
 * run; and the error of a run that lacks it. */
#include "engine.h"

attn_status engine_sent(struct run_engine *engine, const struct memory *memory, const char *what)
{
    char name[DEVICE_NAME_SIZE];
    if (!memory->failed) {
        return ATTN_OK;
    }
    engine->error = memory->error;
    return memory->error.status != ATTN_ERROR_OUT_OF_MEMORY
               ? memory->error.status
               : command_error(&engine->error, memory->error.status, what,
                               "%.1f MiB of %.64s: %.600s; try --scale or --layers",
                               (double)memory->asked / (1 << 20),
                               device_name(engine->device.device, name), memory->error.message);
}

attn_status engine_take(struct run_engine *engine, bool host, size_t bytes, const char *what,
                        void **memory)
{
    *memory = memory_get(&engine->kept, host, bytes);
    return engine_sent(engine, &engine->kept, what);
}

attn_status engine_take_unwritten(struct run_engine *engine, size_t bytes, const char *what,
                                  void **memory)
{
    TRY(engine_take(engine, false, bytes, what, memory));
    return device_set(&engine->device, *memory, 0xff, bytes, &engine->error);
}

attn_status engine_wait(struct run_engine *engine)
{
    return engine->api->device->synchronize(engine->device.opened, NULL, &engine->error);
}

struct attn_tensor *device_tensor(const struct run_engine *engine, struct shaped *to, void *data,
                                  int32_t dtype, int32_t ndim, const int64_t *shape)
{
    shaped_set(to, data, dtype, ndim, shape, NULL);
    to->tensor.device = engine->device.device;
    return &to->tensor;
}

void params_send(struct run_engine *engine, struct run_layer *layer, int32_t index,
                 const void *source, size_t bytes)
{
    layer->device_params[index] = memory_upload(&engine->kept, source, bytes);
}

attn_status params_bind(struct run_engine *engine, const struct run_layer *layer,
                        const struct attn_layer_params *params)
{
    TRY(engine_sent(engine, &engine->kept, "parameters"));
    return engine->api->layer_bind_params(layer->handle, params, &engine->error);
}
