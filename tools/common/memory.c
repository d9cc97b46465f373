/* SPDX-License-Identifier: Apache-2.0 */
#include "memory.h"

#include <stdlib.h>
#include <string.h>

#include "common/command.h"
#include "support/client.h"
#include "support/number.h"

/* Odd, so that no row or head repeats another. */
#define PERIOD 65521

struct memory_item {
    void *bytes;
    bool host;
};

void memory_init(struct memory *memory, const struct device *device)
{
    *memory = (struct memory){.device = device, .error = ATTN_ERROR_INIT};
}

void memory_finish(struct memory *memory)
{
    while (memory->count > 0) {
        const struct memory_item *item = &memory->items[--memory->count];
        device_give(memory->device, item->host, item->bytes);
    }
    free(memory->items);
    memory_init(memory, memory->device);
}

void *memory_get(struct memory *memory, bool host, size_t bytes)
{
    void *taken = NULL;
    if (memory->failed) {
        return NULL;
    }
    memory->asked = bytes;
    memory->error.status =
        device_take(memory->device, host, bytes > 0 ? bytes : 1, &taken, &memory->error);
    memory->failed = memory->error.status != ATTN_OK;
    if (!memory->failed) {
        memory->items =
            command_realloc(memory->items, (size_t)memory->count + 1, sizeof *memory->items);
        memory->items[memory->count++] = (struct memory_item){taken, host};
    }
    return memory->failed ? NULL : taken;
}

void *memory_take(struct memory *memory, size_t bytes)
{
    void *taken = memory_get(memory, false, bytes);
    if (taken != NULL && memory->device->device.type == ATTN_DEVICE_CPU) {
        memset(taken, 0, bytes); /* else samples would time the first touch of pages */
    }
    return taken;
}

void *memory_upload(struct memory *memory, const void *source, size_t bytes)
{
    void *destination = source != NULL ? memory_take(memory, bytes) : NULL;
    if (destination == NULL ||
        device_copy_in(memory->device, destination, source, bytes, &memory->error) != ATTN_OK) {
        memory->failed = true;
        memory->error.status =
            memory->error.status ? memory->error.status : ATTN_ERROR_OUT_OF_MEMORY;
        return NULL;
    }
    return destination;
}

void *memory_normal(struct memory *memory, int32_t dtype, int64_t elements, double deviation,
                    uint64_t *random)
{
    size_t size = number_bytes(dtype), bytes = (size_t)elements * size;
    int64_t drawn = elements < PERIOD ? elements : PERIOD;
    uint8_t *host = malloc(bytes > 0 ? bytes : 1);
    void *destination = NULL;
    if (host != NULL) {
        number_fill_normal(host, 0, drawn, dtype, deviation, random);
        for (size_t done = (size_t)drawn * size; done < bytes;) { /* doubles what is there */
            size_t more = done < bytes - done ? done : bytes - done;
            memcpy(host + done, host, more);
            done += more;
        }
        destination = memory_upload(memory, host, bytes);
    } else {
        memory->failed = true;
    }
    free(host);
    return destination;
}

attn_status memory_plan(struct memory *memory, const struct attn_api *api, attn_model *model,
                        int32_t group, const struct attn_plan_options *options, attn_plan **plan,
                        struct attn_error *error)
{
    attn_status status = api->plan_create(model, group, options, plan, error);
    const size_t bytes = status == ATTN_OK ? client_workspace_bytes(api, *plan) : 0;
    if (bytes == 0) {
        return status;
    }
    void *workspace = memory_take(memory, bytes);
    return workspace != NULL ? client_bind_workspace(api, *plan, workspace, bytes, error)
                             : memory_refused(error);
}

attn_status memory_refused(struct attn_error *error)
{
    return command_error(error, ATTN_ERROR_OUT_OF_MEMORY, "memory", "not enough for this shape");
}
