/* SPDX-License-Identifier: Apache-2.0 */
#include "select/candidates.h"

#include <stdio.h>
#include <string.h>

#include "select/bound.h"
#include "select/names.h"
#include "util/device.h"
#include "util/structs.h"

#define MAX_REASONS 32 /* from one plugin against one layer */
#define MAX_TEXT 1023

struct refusals {
    struct reasons *reasons;
    int32_t taken;
};

/* A plugin's words go into messages and JSON. */
static const char *clean(const char *text, const char *otherwise)
{
    return text == NULL || text[0] == '\0' ? otherwise
           : text_is_clean(text, MAX_TEXT) ? text
                                           : "(a text that is not clean UTF-8)";
}

static void take_reason(void *user, const char *field, const char *asked, const char *supported)
{
    struct refusals *refusals = user;
    if (refusals->taken++ < MAX_REASONS) {
        reasons_add(refusals->reasons, clean(field, "supports"), clean(asked, "this layer"),
                    clean(supported, "not stated"));
    }
}

/* The plugin's own word, asked last and only if the data agrees. */
static void ask_plugin(struct selection *selection, const struct backend *backend,
                       const struct layer *layer, int32_t phase, int32_t block_size,
                       struct reasons *reasons)
{
    const struct attn_plugin *plugin;
    struct attn_error error = ATTN_ERROR_INIT, why = ATTN_ERROR_INIT;
    struct refusals refusals = {reasons, 0};
    struct attn_reason_sink sink = {sizeof sink, NULL, &refusals, take_reason};
    struct attn_layer_desc desc = layer->desc;
    attn_status status = runtime_plugin_table(selection->runtime, backend->plugin, &plugin, &error);
    if (status != ATTN_OK) {
        reasons_add(reasons, "plugin", "loaded", error.message);
        return;
    }
    if (plugin->supports == NULL) {
        return;
    }
    desc.block_size = block_size > 0 ? block_size : desc.block_size;
    const struct attn_supports_args args =
        ABI_ARGS(.caps = &backend->caps, .layer = &desc, .phase = phase);
    status = plugin->supports(&args, &sink, &why);
    if (status != ATTN_OK && reasons->count == 0) {
        error_relay(&error, status, &why);
        reasons_add(reasons, error.field[0] != '\0' ? error.field : "supports", "this layer",
                    error.message);
    }
}

/* Place in the rule's list, or -1 if the rule excludes the backend. */
static int32_t place_in_rule(const struct rule *rule, const struct backend *backend)
{
    int32_t place = rule != NULL ? rule->num_wanted : 0;
    int32_t wanted = 0;
    for (int32_t i = 0; rule != NULL && i < rule->num_patterns; i++) {
        const struct pattern *pattern = &rule->patterns[i];
        bool fits = pattern_fits(pattern->text, backend->caps.name, backend->caps.variant);
        if (fits && pattern->exclude) {
            return -1;
        }
        if (fits && wanted < place) {
            place = wanted;
        }
        wanted += !pattern->exclude;
    }
    return place;
}

static void refuse_device(const struct selection *selection, const struct backend *backend,
                          struct reasons *reasons)
{
    static const struct attn_device cpu = {ATTN_DEVICE_CPU, 0};
    const struct attn_device_info *info = selection->assignment->device;
    const struct attn_device device = info != NULL ? info->device : cpu;
    const bool other_numbers = device_same(device, backend->caps.device);
    char name[DEVICE_TEXT_SIZE], asked[128], has[128];
    snprintf(asked, sizeof asked, "%s%s%s%s", device_text(device, name),
             other_numbers ? " of " : "", other_numbers ? info->device_namespace : "",
             selection->options->device.type != 0 ? "" : ", as none was stated");
    snprintf(has, sizeof has, "%s%s%s", device_text(backend->caps.device, name),
             other_numbers ? " of " : "", other_numbers ? backend->device_namespace : "");
    reasons_add(reasons, "device", asked, has);
}

/* Times count where all backends that have them were measured as they are today, and only of those
 * that have all buckets; else declared ranks decide. */
static void compare_times(struct selection *selection, const struct layer *layer, int32_t phase,
                          struct candidate *candidates)
{
    const attn_runtime *runtime = selection->runtime;
    int32_t most = 0, stale = -1;
    for (int32_t b = 0; b < runtime->num_backends; b++) {
        struct candidate *candidate = &candidates[b];
        if (candidate->eligible) {
            candidate->rank =
                steering.rank(selection->known, &layer->desc, phase, &runtime->backends[b]);
            most = candidate->rank.buckets > most ? candidate->rank.buckets : most;
            stale = candidate->rank.stale != NULL ? b : stale;
        }
    }
    for (int32_t b = 0; b < runtime->num_backends && stale < 0 && most > 0; b++) {
        candidates[b].measured = candidates[b].rank.buckets == most;
    }
    if (stale >= 0 && !selection->stale_reported) {
        selection->stale_reported = true;
        runtime_log(runtime, ATTN_LOG_WARN,
                    "layer '%s', %s: the times of %s on file were measured with %s and are stale; "
                    "declared ranks decide until attn-bench --tune measures again",
                    layer->desc.name, name_of(ATTN_NAMES_PHASE, phase),
                    runtime->backends[stale].full_name, candidates[stale].rank.stale);
    }
}

/* A layer that reads another's cache has to read what that one was given. */
static void check_target(const struct selection *selection, const struct layer *layer,
                         const struct attn_backend_caps *caps, struct match *match,
                         struct reasons *reasons)
{
    const struct attn_choice *target =
        &selection->assignment->layers[layer->sharing_target].phases[ATTN_PHASE_DECODE].choice;
    if (target->backend < 0) {
        return;
    }
    if (!declares_code(caps, ATTN_NAMES_KV_LAYOUT, caps->layouts, target->layout)) {
        reasons_add(reasons, "kv_sharing_target",
                    code_text(ATTN_NAMES_KV_LAYOUT, target->layout).text,
                    "other layouts than the target's");
    }
    if (!range_holds(caps->block_sizes, caps->num_block_sizes, target->kernel_block_size)) {
        char asked[32];
        snprintf(asked, sizeof asked, "blocks of %d", target->kernel_block_size);
        reasons_add(reasons, "kv_sharing_target", asked, "other block sizes");
    }
    match->block_size = target->block_size;
    match->kernel_block_size = target->kernel_block_size;
}

void candidates_judge(struct selection *selection, const struct layer *layer,
                      const struct rule *rule, int32_t phase, struct verdict *verdicts,
                      struct candidate *candidates)
{
    const attn_runtime *runtime = selection->runtime;
    const struct attn_device_info *device = selection->assignment->device;
    for (int32_t b = 0; b < runtime->num_backends; b++) {
        const struct backend *backend = &runtime->backends[b];
        struct candidate *candidate = &candidates[b];
        struct reasons reasons = {selection->arena, &runtime->host, NULL, 0, 0, false};
        *candidate = (struct candidate){.wanted = place_in_rule(rule, backend)};
        if (!backend_is_on(backend, device)) {
            refuse_device(selection, backend, &reasons);
            verdicts[b].code = ATTN_VERDICT_OTHER_DEVICE;
        } else {
            match_backend(&backend->caps, layer, phase, selection->options->block_sizes,
                          selection->options->num_block_sizes, &candidate->match, &reasons);
            if (layer->sharing_target >= 0) {
                check_target(selection, layer, &backend->caps, &candidate->match, &reasons);
            }
            if (selection->options->flags & ATTN_SELECT_NO_STEP_ALLOCATION &&
                backend->caps.features & ATTN_FEATURE_STEP_ALLOCATES) {
                reasons_add(&reasons, "step_allocation", "none", "its steps may allocate");
            }
            if (reasons.count == 0 && !reasons.failed) {
                ask_plugin(selection, backend, layer, phase, candidate->match.kernel_block_size,
                           &reasons);
            }
            verdicts[b].code = reasons.count > 0 ? ATTN_VERDICT_UNSUPPORTED : ATTN_VERDICT_ELIGIBLE;
        }
        if (candidate->wanted < 0) { /* excluded; what it lacks is reported as well */
            verdicts[b].code = ATTN_VERDICT_EXCLUDED;
            reasons_add(&reasons, "ATTN_BACKEND", backend->full_name, rule->text);
        }
        const char *lacks =
            rule != NULL && rule->conformant ? steering.lacks(selection->known, backend) : NULL;
        if (lacks != NULL) {
            verdicts[b].code = ATTN_VERDICT_EXCLUDED;
            reasons_add(&reasons, "conformance", "a record of attn-check without failures", lacks);
        }
        verdicts[b].num_reasons = reasons.count;
        verdicts[b].reasons = reasons.items;
        selection->failed |= reasons.failed;
        candidate->eligible = verdicts[b].code == ATTN_VERDICT_ELIGIBLE;
    }
    compare_times(selection, layer, phase, candidates);
}

/* Slots in a block that the chosen backends' kernels both take, 0: there are none. */
static int32_t common_block(const struct selection *selection, const struct layer *layer,
                            struct candidate *const candidates[NUM_PHASES],
                            const int32_t chosen[NUM_PHASES])
{
    const struct backend *backends = selection->runtime->backends;
    const int32_t prefill = chosen[ATTN_PHASE_PREFILL], decode = chosen[ATTN_PHASE_DECODE];
    const struct match *match = &candidates[ATTN_PHASE_DECODE][decode].match;
    return prefill == decode ? match->kernel_block_size
                             : kernel_block_size(&backends[decode].caps, &backends[prefill].caps,
                                                 layer, match->block_size);
}

/* An order without a wish admits only what it names. */
static bool allowed(const struct rule *rule, const struct candidate *candidate)
{
    bool order = rule != NULL && rule->num_wanted > 0 && !rule->wish;
    return candidate->eligible && (!order || candidate->wanted < rule->num_wanted);
}

/* Less is better: place in the list, then a measurement, then the estimate; the name decides ties,
 * and backends are sorted by it. */
static bool better(const struct selection *selection, const struct candidate *candidates, int32_t a,
                   int32_t b, int32_t phase)
{
    const struct candidate *x = &candidates[a], *y = &candidates[b];
    if (x->wanted != y->wanted) {
        return x->wanted < y->wanted;
    }
    if (x->measured != y->measured) {
        return x->measured;
    }
    if (x->measured && x->rank.time != y->rank.time) {
        return x->rank.time < y->rank.time;
    }
    int32_t rank_x = selection->runtime->backends[a].caps.rank[phase];
    int32_t rank_y = selection->runtime->backends[b].caps.rank[phase];
    return !x->measured && rank_x != rank_y ? rank_x > rank_y : a < b;
}

static bool one_cache(const struct selection *selection, const struct layer *layer,
                      struct candidate *const candidates[NUM_PHASES], int32_t prefill,
                      int32_t decode)
{
    const struct attn_backend_caps *a = &selection->runtime->backends[prefill].caps;
    const struct attn_backend_caps *b = &selection->runtime->backends[decode].caps;
    const int32_t pair[NUM_PHASES] = {prefill, decode};
    if (prefill == decode || !layer_has_cache(&layer->desc) || layer->has_states) {
        return true;
    }
    return ((a->layouts & b->layouts) != 0 ||
            declares_code(a, ATTN_NAMES_KV_LAYOUT, 0, b->preferred_layout)) &&
           common_block(selection, layer, candidates, pair) > 0;
}

/* Backends for both phases, -1 where none can: the best of each, if they can work on one cache,
 * else the best pair that can; `best`: of each phase alone. */
static void choose(const struct selection *selection, const struct layer *layer,
                   const struct rule *const *rules, struct candidate *const candidates[NUM_PHASES],
                   int32_t best[NUM_PHASES], int32_t chosen[NUM_PHASES])
{
    int32_t count = selection->runtime->num_backends;
    const struct candidate *p = candidates[ATTN_PHASE_PREFILL], *d = candidates[ATTN_PHASE_DECODE];
    for (int32_t phase = 0; phase < NUM_PHASES; phase++) {
        chosen[phase] = -1;
        for (int32_t b = 0; b < count; b++) {
            if (allowed(rules[phase], &candidates[phase][b]) &&
                (chosen[phase] < 0 ||
                 better(selection, candidates[phase], b, chosen[phase], phase))) {
                chosen[phase] = b;
            }
        }
    }
    memcpy(best, chosen, NUM_PHASES * sizeof *best);
    if (best[0] < 0 || best[1] < 0 || one_cache(selection, layer, candidates, best[0], best[1])) {
        return;
    }
    /* Decode runs most often: its best partner for each, decode's order first. */
    int32_t prefill = -1, decode = -1;
    for (int32_t i = 0; i < count; i++) {
        for (int32_t j = 0; j < count; j++) {
            if (!allowed(rules[0], &p[i]) || !allowed(rules[1], &d[j]) ||
                !one_cache(selection, layer, candidates, i, j)) {
                continue;
            }
            bool first = decode < 0;
            bool decode_better = !first && j != decode && better(selection, d, j, decode, 1);
            bool prefill_better = !first && j == decode && better(selection, p, i, prefill, 0);
            if (first || decode_better || prefill_better) {
                prefill = i;
                decode = j;
            }
        }
    }
    chosen[0] = prefill;
    chosen[1] = decode;
}

/* Why the best backend of a phase was not taken: the other phase's cannot work on its cache. */
static void add_cache_reason(struct selection *selection, int32_t phase,
                             const int32_t chosen[NUM_PHASES], struct verdict *verdict)
{
    const struct attn_runtime *runtime = selection->runtime;
    struct reasons reasons = {selection->arena, &runtime->host, NULL, 0, 0, false};
    char asked[224];
    if (verdict->code != ATTN_VERDICT_ELIGIBLE) {
        return;
    }
    snprintf(asked, sizeof asked, "one with %s for %s",
             runtime->backends[chosen[1 - phase]].full_name, name_of(ATTN_NAMES_PHASE, 1 - phase));
    reasons_add(&reasons, "cache", asked, "other layouts or block sizes");
    selection->failed |= reasons.failed;
    verdict->num_reasons = reasons.count;
    verdict->reasons = reasons.items;
}

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
    bound_set(choice, &layer->desc);
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

void choose_for_layer(struct selection *selection, struct assignment_layer *out,
                      const struct rule *const *rules,
                      struct candidate *const candidates[NUM_PHASES],
                      struct verdict *const verdicts[NUM_PHASES])
{
    struct layer *layer = &out->layer;
    int32_t chosen[NUM_PHASES], best[NUM_PHASES];
    choose(selection, layer, rules, candidates, best, chosen);
    if (!layer_has_cache(&layer->desc)) { /* encoders have one phase */
        chosen[ATTN_PHASE_DECODE] = chosen[ATTN_PHASE_PREFILL];
    }
    for (int32_t phase = 0; phase < NUM_PHASES; phase++) {
        if (chosen[phase] >= 0) {
            verdicts[phase][chosen[phase]].code = ATTN_VERDICT_CHOSEN;
            if (best[phase] != chosen[phase] && best[phase] >= 0 && chosen[1 - phase] >= 0 &&
                layer_has_cache(&layer->desc)) {
                add_cache_reason(selection, phase, chosen, &verdicts[phase][best[phase]]);
            }
        }
        out->phases[phase].verdicts = verdicts[phase];
        fill_choice(selection, layer, rules[phase], candidates[phase], chosen[phase], phase,
                    &out->phases[phase]);
    }
    if (chosen[0] >= 0 && chosen[1] >= 0 && layer_has_cache(&layer->desc)) {
        int32_t block = out->phases[ATTN_PHASE_DECODE].choice.block_size;
        int32_t kernel = common_block(selection, layer, candidates, chosen);
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
