/* SPDX-License-Identifier: Apache-2.0 */
/* Block-table groups (layers of one KV specification) and plan groups (of these, layers that share
 * a schedule). */
#include <string.h>

#include "bind/bound.h"
#include "select/layer.h"

/* A layer that reads another's cache goes with that one's table. */
static bool same_table(attn_layer *a, attn_layer *b)
{
    const struct layer *x = a->owner->selected, *y = b->owner->selected;
    bool cached_x = layer_has_cache(&x->desc), cached_y = layer_has_cache(&y->desc);
    if (!cached_x || !cached_y) {
        return cached_x == cached_y;
    }
    return memcmp(a->selected->batch_key, b->selected->batch_key, MAX_BATCH_KEY) == 0 &&
           a->owner->spec.kind == b->owner->spec.kind &&
           a->owner->spec.layout == b->owner->spec.layout &&
           (!layer_has_vendor_pages(a->owner) ||
            a->owner->spec.page_bytes == b->owner->spec.page_bytes) &&
           a->owner->tokens_per_block == b->owner->tokens_per_block && layer_same_cache(x, y);
}

/* What may change a kernel's schedule: all that is described but names. */
static struct attn_layer_desc key_of(const attn_layer *layer, int32_t phase)
{
    struct attn_layer_desc key = *layer->desc;
    key.next = NULL;
    key.name = key.kv_sharing_target = NULL;
    key.needs_lse = 0; /* each run decides it */
    /* kernels that write codes may have memory for them in a plan */
    key.output_form = layer->served[phase].composed & ATTN_COMPOSE_OUTPUT_QUANT ? ATTN_OUTPUT_PLAIN
                                                                                : key.output_form;
    return key;
}

static bool same_schedule(const attn_layer *a, const attn_layer *b, int32_t phase)
{
    const struct attn_layer_desc x = key_of(a, phase), y = key_of(b, phase);
    return a->group == b->group && a->served[phase].instance == b->served[phase].instance &&
           a->served[phase].composed == b->served[phase].composed &&
           memcmp((const char *)&x, (const char *)&y, sizeof x) == 0 &&
           /* those of one table have the same further caches */
           ext_same(a->desc->next, b->desc->next, ATTN_EXT_LAYER_CACHES);
}

static void assign_group(attn_model *model, attn_layer *layer)
{
    const attn_layer *first = NULL; /* the first layer like it names the group */
    for (int32_t i = 0; i < layer->index && first == NULL; i++) {
        first = same_table(layer, &model->layers[i]) ? model->layers[i].table : NULL;
    }
    layer->table = first != NULL ? first : layer;
    layer->group = first != NULL ? first->group : model->num_groups++;
    layer->slot = 0;
    for (int32_t i = 0; i < layer->index; i++) {
        layer->slot += model->layers[i].group == layer->group;
    }
}

static void assign_plan_group(attn_model *model, attn_layer *layer, int32_t phase)
{
    int32_t like = 0;
    while (like < layer->index && !same_schedule(layer, &model->layers[like], phase)) {
        like++;
    }
    layer->served[phase].schedule_group = like < layer->index
                                              ? model->layers[like].served[phase].schedule_group
                                              : model->num_schedule_groups++;
}

void model_make_groups(attn_model *model)
{
    for (int32_t i = 0; i < model->num_layers; i++) {
        assign_group(model, &model->layers[i]);
        for (int32_t phase = 0; phase < NUM_PHASES; phase++) {
            assign_plan_group(model, &model->layers[i], phase);
        }
    }
}

int32_t model_num_groups(const attn_model *model, int32_t kind)
{
    if (model == NULL) {
        return 0;
    }
    return kind == ATTN_GROUP_BLOCK_TABLE ? model->num_groups
           : kind == ATTN_GROUP_SCHEDULE  ? model->num_schedule_groups
                                          : 0;
}

static bool in_group(const attn_layer *layer, int32_t kind, int32_t group)
{
    if (kind == ATTN_GROUP_BLOCK_TABLE) {
        return layer->group == group;
    }
    return layer->served[0].schedule_group == group || layer->served[1].schedule_group == group;
}

attn_status model_group(const attn_model *model, int32_t kind, int32_t group, int32_t *layers,
                        int32_t capacity, int32_t *count)
{
    if (group < 0 || group >= model_num_groups(model, kind) || count == NULL) {
        return ATTN_ERROR_NOT_FOUND;
    }
    *count = 0;
    for (int32_t i = 0; i < model->num_layers; i++) {
        if (in_group(&model->layers[i], kind, group)) {
            if (*count < capacity && layers != NULL) {
                layers[*count] = i;
            }
            ++*count;
        }
    }
    return ATTN_OK;
}

int32_t layer_group(const attn_layer *layer, int32_t kind, int32_t phase)
{
    if (layer == NULL || (kind == ATTN_GROUP_SCHEDULE && (phase < 0 || phase >= NUM_PHASES))) {
        return -1;
    }
    return kind == ATTN_GROUP_BLOCK_TABLE ? layer->group
           : kind == ATTN_GROUP_SCHEDULE  ? layer->served[phase].schedule_group
                                          : -1;
}
