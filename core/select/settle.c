/* SPDX-License-Identifier: Apache-2.0 */
#include "select/settle.h"

#include <stdio.h>

#include "select/match.h"
#include "select/names.h"
#include "util/counts.h"

static void fill_choice(struct selection *selection, const struct layer *layer,
                        const struct rule *rule, const struct candidate *candidates,
                        int32_t backend, int32_t phase, struct assignment_phase *out)
{
    struct attn_choice *choice = &out->choice;
    bool named = rule != NULL && rule->num_wanted > 0;
    *choice = (struct attn_choice){.struct_size = sizeof *choice,
                                   .backend = backend,
                                   .name = "",
                                   .rule = rule != NULL ? rule->text : "",
                                   .kv_dtype = layer->desc.kv_dtype,
                                   .kv_dtype_v = kv_dtype_of(&layer->desc, true),
                                   .status = ATTN_OK};
    if (backend < 0) {
        choice->forced = named && !rule->wish;
        choice->status = choice->forced ? ATTN_ERROR_REFUSED : ATTN_ERROR_NO_BACKEND;
        return;
    }
    const struct candidate *candidate = &candidates[backend];
    const struct backend *taken = &selection->runtime->backends[backend];
    choice->forced = named && candidate->wanted < rule->num_wanted;
    choice->name = arena_string(selection->arena, taken->full_name);
    selection->failed |= choice->name == NULL;
    choice->rank = taken->caps.rank[phase];
    choice->measured = candidate->measured;
    choice->composed = candidate->match.composed;
    choice->graph_level = candidate->match.graph_level;
    choice->block_size = candidate->match.block_size;
    choice->kernel_block_size = candidate->match.kernel_block_size;
}

/* Layout: what decode prefers if prefill can read it, a vendor's for K and V alone; a sharing layer
 * takes its target's. */
static int32_t common_layout(const struct selection *selection, const int32_t *chosen,
                             const struct layer *layer)
{
    const struct attn_backend_caps *d = &selection->runtime->backends[chosen[1]].caps;
    const struct attn_backend_caps *p = &selection->runtime->backends[chosen[0]].caps;
    const uint64_t cut = UINT64_C(1) << ATTN_KV_LAYOUT_PACKED_K;
    uint64_t both = d->layouts & p->layouts;
    if (d->preferred_layout >= ATTN_VENDOR_CODE && !layer->is_latent && !layer->has_states &&
        declares_code(p, ATTN_NAMES_KV_LAYOUT, 0, d->preferred_layout)) {
        return d->preferred_layout;
    }
    const bool whole = kv_rows_are_whole(layer->desc.kv_dtype) ||
                       kv_rows_are_whole(kv_dtype_of(&layer->desc, true));
    both &= whole && both != cut ? ~cut : both;
    for (int32_t i = 0; i < 2; i++) {
        const int32_t preferred = (i == 0 ? d : p)->preferred_layout;
        if (preferred < ATTN_VENDOR_CODE && both >> preferred & 1) {
            return preferred;
        }
    }
    for (int32_t layout = 0; layout < NUM_KV_LAYOUTS; layout++) {
        if (both >> layout & 1) {
            return layout;
        }
    }
    return d->preferred_layout;
}

void settle_sharing(struct selection *selection, const struct layer *layer,
                    struct verdict *verdicts, struct candidate *candidates)
{
    if (layer->sharing_target < 0) {
        return;
    }
    const struct attn_choice *target =
        &selection->assignment->layers[layer->sharing_target].phases[ATTN_PHASE_DECODE].choice;
    for (int32_t b = 0; b < selection->runtime->num_backends && target->backend >= 0; b++) {
        const struct attn_backend_caps *caps = &selection->runtime->backends[b].caps;
        struct reasons reasons = {selection->arena, &selection->runtime->host, NULL, 0, 0, false};
        if (!candidates[b].eligible) {
            continue;
        }
        if (!declares_code(caps, ATTN_NAMES_KV_LAYOUT, caps->layouts, target->layout)) {
            reasons_add(&reasons, "kv_sharing_target",
                        code_text(ATTN_NAMES_KV_LAYOUT, target->layout).text,
                        "other layouts than the target's");
        }
        if (!range_holds(caps->block_sizes, caps->num_block_sizes, target->kernel_block_size)) {
            char asked[32];
            snprintf(asked, sizeof asked, "blocks of %d", target->kernel_block_size);
            reasons_add(&reasons, "kv_sharing_target", asked, "other block sizes");
        }
        candidates[b].match.block_size = target->block_size;
        candidates[b].match.kernel_block_size = target->kernel_block_size;
        selection->failed |= reasons.failed;
        if (reasons.count > 0) {
            candidates[b].eligible = false;
            verdicts[b] = (struct verdict){ATTN_VERDICT_UNSUPPORTED, reasons.count, reasons.items};
        }
    }
}

void settle_layer(struct selection *selection, struct assignment_layer *out,
                  const struct rule *const *rules, struct candidate *const candidates[NUM_PHASES],
                  struct verdict *const verdicts[NUM_PHASES])
{
    struct layer *layer = &out->layer;
    int32_t chosen[NUM_PHASES];
    candidates_choose(selection, layer, rules, candidates, chosen);
    if (!layer_has_cache(&layer->desc)) { /* encoders have one phase */
        chosen[ATTN_PHASE_DECODE] = chosen[ATTN_PHASE_PREFILL];
    }
    for (int32_t phase = 0; phase < NUM_PHASES; phase++) {
        if (chosen[phase] >= 0) {
            verdicts[phase][chosen[phase]].code = ATTN_VERDICT_CHOSEN;
        }
        out->phases[phase].verdicts = verdicts[phase];
        fill_choice(selection, layer, rules[phase], candidates[phase], chosen[phase], phase,
                    &out->phases[phase]);
    }
    if (chosen[0] >= 0 && chosen[1] >= 0 && layer_has_cache(&layer->desc)) {
        int32_t block = out->phases[ATTN_PHASE_DECODE].choice.block_size;
        int32_t kernel = candidates_kernel_block(selection, layer, candidates, chosen);
        int32_t layout = common_layout(selection, chosen, layer);
        if (layer->sharing_target >= 0) {
            const struct attn_choice *target =
                &selection->assignment->layers[layer->sharing_target].phases[0].choice;
            layout = target->layout;
            kernel = target->kernel_block_size;
        }
        for (int32_t phase = 0; phase < NUM_PHASES; phase++) {
            out->phases[phase].choice.block_size = block;
            out->phases[phase].choice.kernel_block_size = kernel;
            out->phases[phase].choice.layout = layout;
        }
        layer->desc.block_size = kernel;
        layer->blocks_per_entry = kernel > 0 ? block / kernel : 1;
    }
    selection->assignment->complete &= chosen[0] >= 0 && chosen[1] >= 0;
}
