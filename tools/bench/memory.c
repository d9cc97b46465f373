/* SPDX-License-Identifier: Apache-2.0 */
#include "memory.h"

#include <stdlib.h>
#include <string.h>

#include "common/command.h"
#include "support/number.h"
#include "support/random.h"

/* Odd, so that no row or head repeats another. */
#define PERIOD 65521

void memory_init(struct memory *memory, const struct device *device)
{
    *memory = (struct memory){.device = device};
}

void memory_finish(struct memory *memory)
{
    for (int32_t i = 0; i < memory->count; i++) {
        device_free(memory->device, memory->items[i]);
    }
    free(memory->items);
    memory_init(memory, memory->device);
}

void *memory_take(struct memory *memory, size_t bytes)
{
    void **items =
        memory->failed ? NULL : realloc(memory->items, sizeof *items * (size_t)(memory->count + 1));
    if (items == NULL) {
        memory->failed = true;
        return NULL;
    }
    memory->items = items;
    items[memory->count] = device_alloc(memory->device, bytes);
    if (items[memory->count] == NULL) {
        memory->failed = true;
        return NULL;
    }
    if (memory->device->device.type ==
        ATTN_DEVICE_CPU) { /* else samples would time the first touch of pages */
        memset(items[memory->count], 0, bytes);
    }
    return items[memory->count++];
}

void *memory_upload(struct memory *memory, const void *source, size_t bytes)
{
    void *destination = source != NULL ? memory_take(memory, bytes) : NULL;
    if (destination == NULL || !device_write(memory->device, destination, source, bytes)) {
        memory->failed = true;
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

attn_status memory_refused(struct attn_error *error)
{
    return command_error(error, ATTN_ERROR_OUT_OF_MEMORY, "memory", "not enough for this shape");
}
