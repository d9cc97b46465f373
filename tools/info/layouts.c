/* SPDX-License-Identifier: Apache-2.0 */
/* attn-info --layouts. */
#include "info/info.h"

#include <string.h>

#include <attn/draft/layout.h>

#include "common/device.h"
#include "support/client.h"

#define NUM_BLOCKS 2 /* so that distances between blocks are known */

/* The caches of a layer's kind lie in one memory, each further one in its own; none is read or
 * written. */
static attn_status bind_memory(const struct attn_api *api, attn_layer *layer,
                               const struct attn_cache_spec *specs, int32_t num_caches,
                               const struct device *device, void *taken[1 + ATTN_MAX_CACHES],
                               struct attn_error *error)
{
    int64_t blocks[ATTN_MAX_CACHES];
    struct attn_cache_memory memory =
        SIZED(attn_cache_memory, .num_blocks = NUM_BLOCKS, .device = device->device);
    attn_status status = device_take(device, false, NUM_BLOCKS * (size_t)specs[0].padded_page_bytes,
                                     &taken[0], error);
    for (int32_t i = 0; i < num_caches && status == ATTN_OK; i++) {
        if (i > 0 && specs[i].role >= ATTN_CACHE_INDEX_K) { /* an indexer's first is its own */
            blocks[memory.num_further] = NUM_BLOCKS;
            status = device_take(device, false, NUM_BLOCKS * (size_t)specs[i].page_bytes,
                                 &taken[1 + memory.num_further++], error);
        }
    }
    memory.base = taken[0];
    memory.further = &taken[1];
    memory.further_num_blocks = blocks;
    return status ? status : api->layer_bind_memory(layer, &memory, error);
}

static attn_status read_layout(const struct attn_api *api, attn_layer *layer,
                               const struct attn_layer_desc *desc, const struct device *device,
                               char *id, char *text, struct attn_error *error)
{
    const struct attn_layout_side side = SIZED(attn_layout_side, .layer = layer, .desc = desc);
    struct attn_cache_spec specs[ATTN_MAX_CACHES];
    void *taken[1 + ATTN_MAX_CACHES] = {NULL};
    const int32_t count = api->layer_num_caches(layer);
    attn_status status = ATTN_OK;
    id[0] = text[0] = '\0';
    for (int32_t i = 0; i < count && status == ATTN_OK; i++) {
        specs[i] = (struct attn_cache_spec){.struct_size = sizeof specs[i]};
        status = api->layer_cache_spec(layer, i, &specs[i], error);
    }
    if (count > 0 && status == ATTN_OK) {
        status = bind_memory(api, layer, specs, count, device, taken, error);
        status = status ? status : attn_layout_id(api, &side, id, text, error);
    }
    for (int32_t i = 0; i <= ATTN_MAX_CACHES; i++) {
        device_give(device, false, taken[i]);
    }
    return status;
}

static void add_layout(struct json *layer, const char *id, const char *text)
{
    struct json *lines = json_array();
    json_add(layer, "layout_id", json_string(id));
    for (size_t length; *text != '\0'; text += length + 1) {
        char line[ATTN_LAYOUT_TEXT_SIZE];
        length = strcspn(text, "\n");
        memcpy(line, text, length);
        line[length] = '\0';
        json_push(lines, json_string(line));
    }
    json_add(layer, "layout", lines);
}

attn_status layouts_add(const struct attn_api *api, attn_runtime *runtime,
                        const attn_assignment *assignment, struct attn_device which,
                        const struct model_config *config, struct json *layers,
                        struct attn_error *error)
{
    struct device device = {.device = which};
    attn_model *model = NULL;
    char id[ATTN_LAYOUT_ID_SIZE], text[ATTN_LAYOUT_TEXT_SIZE];
    attn_status status = device_init(&device, api, runtime, which, error);
    status =
        status == ATTN_OK ? api->model_create(runtime, assignment, NULL, &model, error) : status;
    struct json *layer = layers != NULL ? layers->first : NULL;
    for (int32_t i = 0; status == ATTN_OK && layer != NULL; i++, layer = layer->next) {
        status = read_layout(api, api->model_layer(model, i), &config->layers[i].desc, &device, id,
                             text, error);
        add_layout(layer, id, text);
    }
    api->model_destroy(model);
    device_finish(&device);
    return status;
}
