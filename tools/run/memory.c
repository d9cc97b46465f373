/* SPDX-License-Identifier: Apache-2.0 */
/* What crosses to the device: memory that stays, the arrays of a plan and the rows of a layer's
 * run; and the error of a run that lacks it. */
#include <stdio.h>

#include "common/command.h"
#include "engine.h"

attn_status engine_fail(struct run_engine *engine, attn_status status, const char *field,
                        const char *what)
{
    return engine->status = command_error(&engine->error, status, field, "%s", what);
}

attn_status engine_refused(struct run_engine *engine, const struct memory *memory, const char *what)
{
    char text[sizeof engine->error.message], name[DEVICE_NAME_SIZE];
    engine->error = memory->error;
    if (memory->error.status != ATTN_ERROR_OUT_OF_MEMORY) {
        return engine->status = memory->error.status;
    }
    snprintf(text, sizeof text, "%.1f MiB of %.64s: %.600s; try --scale or --layers",
             (double)memory->asked / (1 << 20), device_name(engine->device.device, name),
             memory->error.message);
    return engine_fail(engine, memory->error.status, what, text);
}

attn_status engine_take(struct run_engine *engine, bool host, size_t bytes, const char *what,
                        void **memory)
{
    *memory = memory_get(&engine->kept, host, bytes);
    return *memory != NULL ? ATTN_OK : engine_refused(engine, &engine->kept, what);
}

attn_status engine_take_unwritten(struct run_engine *engine, size_t bytes, const char *what,
                                  void **memory)
{
    attn_status status = engine_take(engine, false, bytes, what, memory);
    return status ? status : device_set(&engine->device, *memory, 0xff, bytes, &engine->error);
}

void *engine_send(struct run_engine *engine, struct memory *memory, const void *source,
                  size_t bytes)
{
    void *sent = memory_upload(memory, source, bytes);
    if (sent == NULL) {
        engine_refused(engine, memory, memory == &engine->kept ? "parameters" : "a step's tensors");
    }
    return sent;
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

attn_status params_send(struct run_engine *engine, struct run_layer *layer, int32_t index,
                        const void *source, size_t bytes)
{
    layer->device_params[index] = engine_send(engine, &engine->kept, source, bytes);
    return layer->device_params[index] != NULL ? ATTN_OK : engine->error.status;
}
