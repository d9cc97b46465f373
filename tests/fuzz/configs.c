/* SPDX-License-Identifier: Apache-2.0 */
/* A model's config.json: read, cut down, and what was read is a layer that the core could be asked
 * about. */
#include <string.h>

#include "common/model_config.h"
#include "fuzz.h"
#include "util/counts.h"

static void check_layers(const struct model_config *config)
{
    for (int32_t i = 0; i < config->num_layers; i++) {
        const struct model_layer *layer = &config->layers[i];
        const struct attn_layer_desc *desc = &layer->desc;
        FUZZ_CHECK(desc->struct_size == sizeof *desc && desc->name == layer->name);
        FUZZ_CHECK(memchr(layer->name, '\0', sizeof layer->name) != NULL && layer->name[0] != '\0');
        FUZZ_CHECK(layer->tower >= 0 && layer->tower <= 1);
        FUZZ_CHECK(desc->num_q_heads > 0 && desc->num_kv_heads > 0 && desc->head_size > 0);
        FUZZ_CHECK(desc->scale > 0);
        FUZZ_CHECK(layer->shares_cache == (desc->kv_sharing_target != NULL));
        const uintptr_t next = (uintptr_t)desc->next, at = (uintptr_t)layer;
        FUZZ_CHECK(next == 0 || (next >= at && next < at + sizeof *layer)); /* its own extension */
        FUZZ_CHECK(desc->kind >= 0 && desc->kind < NUM_LAYER_KINDS);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size)
{
    struct model_config config;
    struct attn_error error = ATTN_ERROR_INIT;
    attn_status status = model_config_read(&config, fuzz_file(bytes, size), &error);
    fuzz_check_error(status, &error);
    FUZZ_CHECK(status == ATTN_OK || config.layers == NULL);
    if (status == ATTN_OK) {
        int32_t count = size > 0 ? bytes[size - 1] % 16 : 0, before = config.num_layers;
        check_layers(&config);
        model_config_keep(&config, count);
        FUZZ_CHECK(config.num_layers <= before && (before == 0 || config.num_layers > 0));
        check_layers(&config);
        model_config_finish(&config);
    }
    return 0;
}
