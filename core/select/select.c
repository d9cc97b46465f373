/* SPDX-License-Identifier: Apache-2.0 */
/* Selecting: the backend of each layer and phase, by rules, and the reasons against the others. */
#include <stdio.h>
#include <string.h>

#include "select/candidates.h"
#include "select/layer.h"
#include "select/names.h"
#include "util/structs.h"

#define MAX_LAYERS 100000

#define MAX_NAME 63
#define CLOSE 3 /* largest edit distance that still is a likely slip */

/* Whether a pattern of the selection text fits any backend. */
static bool names_known(const attn_runtime *runtime, const char *pattern)
{
    for (int32_t i = 0; i < runtime->num_backends; i++) {
        if (pattern_fits(pattern, runtime->backends[i].caps.name,
                         runtime->backends[i].caps.variant)) {
            return true;
        }
    }
    return false;
}

/* Levenshtein's distance of two names of at most MAX_NAME bytes. */
static int32_t distance(const char *a, const char *b)
{
    int32_t row[MAX_NAME + 2];
    size_t n = strlen(a), m = strlen(b);
    if (n > MAX_NAME || m > MAX_NAME) {
        return INT32_MAX;
    }
    for (size_t j = 0; j <= m; j++) {
        row[j] = (int32_t)j;
    }
    for (size_t i = 1; i <= n; i++) {
        int32_t diagonal = row[0];
        row[0] = (int32_t)i;
        for (size_t j = 1; j <= m; j++) {
            const int32_t above = row[j], gap = 1 + (above < row[j - 1] ? above : row[j - 1]);
            const int32_t other = diagonal + (a[i - 1] != b[j - 1]);
            row[j] = gap < other ? gap : other;
            diagonal = above;
        }
    }
    return row[m];
}

static bool tell_absent(const attn_runtime *runtime, const char *pattern, char *text, size_t size)
{
    for (int32_t i = 0; i < runtime->num_plugins; i++) {
        const struct plugin *plugin = &runtime->plugins[i];
        if (plugin->status != ATTN_OK && plugin->name != NULL &&
            pattern_fits(pattern, plugin->name, "")) {
            snprintf(text, size, ": its plugin was not taken: %.110s",
                     plugin->reason != NULL ? plugin->reason : "");
            return true;
        }
    }
    return false;
}

/* ": did you mean 'cpu_ref'?", or why the plugin of that name gave no backend. */
static void names_suggest(const attn_runtime *runtime, const char *pattern, char *text, size_t size)
{
    const char *best = NULL;
    int32_t closest = CLOSE + 1;
    text[0] = '\0';
    if (tell_absent(runtime, pattern, text, size)) {
        return;
    }
    for (int32_t i = 0; i < runtime->num_backends; i++) {
        const struct backend *backend = &runtime->backends[i];
        const char *name = strchr(pattern, '@') != NULL ? backend->full_name : backend->caps.name;
        int32_t d = distance(pattern, name);
        if (d < closest) {
            closest = d;
            best = name;
        }
    }
    if (best != NULL) {
        snprintf(text, size, ": did you mean '%.63s'?", best);
    }
}

/* Names in the selection text that fit nothing: an error for an order, a warning for an exclusion
 * or a wish. */
static attn_status check_names(const struct selection *selection, const char *text,
                               struct attn_error *error)
{
    for (int32_t r = 0; r < selection->rules.count; r++) {
        const struct rule *rule = &selection->rules.rules[r];
        for (int32_t i = 0; i < rule->num_patterns; i++) {
            const struct pattern *pattern = &rule->patterns[i];
            char what[512], suggestion[160];
            if (names_known(selection->runtime, pattern->text)) {
                continue;
            }
            names_suggest(selection->runtime, pattern->text, suggestion, sizeof suggestion);
            snprintf(what, sizeof what, "no backend is named '%.120s'%s", pattern->text,
                     suggestion);
            if (pattern->exclude || rule->wish) {
                runtime_log(selection->runtime, ATTN_LOG_WARN,
                            "ATTN_BACKEND: %s; '%s' has no effect", what, pattern->text);
                continue;
            }
            return rules_error(error, ATTN_ERROR_REFUSED, text, strlen(text), pattern->position,
                               what);
        }
    }
    return ATTN_OK;
}

/* Whether an order names the backend, or nothing is ordered at all. */
static bool may_be_meant(const struct rules *rules, const struct backend *backend)
{
    bool ordered = false;
    for (int32_t r = 0; r < rules->count; r++) {
        const struct rule *rule = &rules->rules[r];
        for (int32_t i = 0; i < rule->num_patterns && !rule->wish; i++) {
            const struct pattern *pattern = &rule->patterns[i];
            ordered |= !pattern->exclude;
            if (!pattern->exclude &&
                pattern_fits(pattern->text, backend->caps.name, backend->caps.variant)) {
                return true;
            }
        }
    }
    return !ordered;
}

/* The best device that any backend has: accelerators before the CPU, then the lowest id. Where
 * backends are ordered, theirs. */
static struct attn_device device_of_rules(const attn_runtime *runtime, const struct rules *rules)
{
    struct attn_device best = {ATTN_DEVICE_CPU, 0};
    for (int32_t b = 0; b < runtime->num_backends; b++) {
        struct attn_device device = runtime->backends[b].caps.device;
        bool accelerator = device.type != ATTN_DEVICE_CPU;
        bool have = best.type != ATTN_DEVICE_CPU;
        bool before = device.type < best.type || (device.type == best.type && device.id < best.id);
        if (accelerator && (!have || before) && may_be_meant(rules, &runtime->backends[b])) {
            best = device;
        }
    }
    return best;
}

attn_status best_device(const attn_runtime *runtime, const char *backend,
                        struct attn_device *device, struct attn_error *error)
{
    struct arena arena;
    struct rules rules;
    BAD_IF(runtime == NULL || device == NULL, "device",
           "runtime %p, device %p; neither may be NULL", (const void *)runtime, (void *)device);
    const char *text = backend != NULL ? backend : runtime->settings.backend;
    arena_init(&arena, &runtime->host);
    attn_status status = rules_parse(&rules, text, strlen(text), &arena, error);
    if (status == ATTN_OK) {
        *device = device_of_rules(runtime, &rules);
    }
    arena_finish(&arena);
    return status;
}

/* The device that is stated, or the CPU, which need not be reported. */
static attn_status take_device(const attn_runtime *runtime,
                               const struct attn_select_options *options,
                               const struct attn_device_info **info, struct attn_error *error)
{
    const struct attn_device cpu = {ATTN_DEVICE_CPU, 0};
    const struct attn_device device = options->device.type != 0 ? options->device : cpu;
    attn_status status =
        runtime_find_device(runtime, device, options->device_namespace, info, error);
    return status == ATTN_ERROR_NOT_FOUND && device.type == ATTN_DEVICE_CPU ? ATTN_OK : status;
}

static attn_status select_layer(struct selection *selection, int32_t index,
                                struct attn_error *error)
{
    struct assignment_layer *out = &selection->assignment->layers[index];
    size_t count = (size_t)selection->runtime->num_backends;
    struct candidate *candidates[NUM_PHASES];
    struct verdict *verdicts[NUM_PHASES];
    const struct rule *rules[NUM_PHASES];
    for (int32_t phase = 0; phase < NUM_PHASES; phase++) {
        candidates[phase] = arena_array(selection->arena, count + 1, sizeof **candidates);
        verdicts[phase] = arena_array(selection->arena, count + 1, sizeof **verdicts);
        NO_MEMORY_IF(candidates[phase] == NULL || verdicts[phase] == NULL, "assignment",
                     "the assignment");
        /* Encoders have one phase, whose verdicts are shown for both. */
        int32_t asked = layer_has_cache(&out->layer.desc) ? phase : ATTN_PHASE_PREFILL;
        rules[phase] = rules_find(&selection->rules, index, &out->layer.desc, asked);
        candidates_judge(selection, &out->layer, rules[phase], asked, verdicts[phase],
                         candidates[phase]);
    }
    choose_for_layer(selection, out, rules, candidates, verdicts);
    return selection->failed ? NO_MEMORY("assignment", "the assignment") : ATTN_OK;
}

/* Names layer, phase, backends and reasons of the first layer that is not served. */
static attn_status tell_unserved(const struct attn_assignment *assignment, struct attn_error *error)
{
    const attn_runtime *runtime = assignment->runtime;
    for (int32_t i = 0; i < assignment->num_layers; i++) {
        for (int32_t phase = 0; phase < NUM_PHASES; phase++) {
            const struct assignment_phase *p = &assignment->layers[i].phases[phase];
            struct text text;
            attn_status status = p->choice.status;
            if (status == ATTN_OK) {
                continue;
            }
            text_init(&text, &runtime->host);
            text_add(&text, "layer '%s', %s: ", assignment->layers[i].layer.desc.name,
                     name_of(ATTN_NAMES_PHASE, phase));
            text_add(&text,
                     status == ATTN_ERROR_REFUSED ? "the order '%s' cannot be met"
                                                  : "%sno backend can serve it",
                     status == ATTN_ERROR_REFUSED ? p->choice.rule : "");
            for (int32_t b = 0; b < assignment->num_backends; b++) {
                const struct verdict *verdict = &p->verdicts[b];
                for (int32_t r = 0; r < verdict->num_reasons; r++) {
                    if (r == 0) {
                        text_add(&text, "; %s:", runtime->backends[b].full_name);
                    }
                    text_add(&text, "%s %s %s (supported: %s)", r > 0 ? "," : "",
                             verdict->reasons[r].field, verdict->reasons[r].asked,
                             verdict->reasons[r].supported);
                }
            }
            return text_finish_error(&text, status, "ATTN_BACKEND", error);
        }
    }
    return ATTN_OK;
}

/* Where nothing offers a backend the selection text is not to blame: names what was looked at. */
static attn_status tell_no_backends(const attn_runtime *runtime, struct attn_error *error)
{
    struct text text;
    text_init(&text, &runtime->host);
    text_add(&text, "no plugin offers a backend; looked at: %s", runtime->searched);
    for (int32_t i = 0; i < runtime->num_plugins; i++) {
        const struct plugin *plugin = &runtime->plugins[i];
        text_add(&text, "; %s: %s", plugin->file,
                 plugin->reason[0] != '\0' ? plugin->reason : "no backend on this machine");
    }
    return text_finish_error(&text, ATTN_ERROR_NO_BACKEND, "plugins", error);
}

static attn_status read_options(struct attn_select_options *options,
                                const struct attn_select_options *given, struct attn_error *error)
{
    TRY(struct_read(options, ABI_SELECT_OPTIONS, given, error));
    const uint32_t known = ATTN_SELECT_KEEP_UNSERVED | ATTN_SELECT_NO_STEP_ALLOCATION;
    BAD_IF(options->flags & ~(known | ATTN_FLAG_HINTS), "flags",
           "%#x has unknown bits; %#x are known", options->flags, known);
    BAD_IF(options->num_block_sizes < 0 ||
               (options->num_block_sizes > 0 && options->block_sizes == NULL),
           "block_sizes", "%d block sizes at %p; a count from 0 with an array is needed",
           options->num_block_sizes, (const void *)options->block_sizes);
    for (int32_t i = 0; i < options->num_block_sizes; i++) {
        BAD_IF(options->block_sizes[i] <= 0, "block_sizes", "block_sizes[%d] is %d; 1 and above", i,
               options->block_sizes[i]);
    }
    return ATTN_OK;
}

static attn_status select_all(struct selection *selection,
                              const struct attn_layer_desc *const *layers, struct attn_error *error)
{
    struct attn_assignment *assignment = selection->assignment;
    assignment->layers = arena_array(selection->arena, (size_t)assignment->num_layers + 1,
                                     sizeof *assignment->layers);
    NO_MEMORY_IF(assignment->layers == NULL, "assignment", "the assignment");
    for (int32_t i = 0; i < assignment->num_layers; i++) {
        struct assignment_layer *layer = &assignment->layers[i];
        BAD_IF(layers[i] == NULL, "layers", "layers[%d] is NULL", i);
        TRY(layer_resolve(selection->arena, layers[i], i, assignment->layers, &layer->layer,
                          error));
        TRY(select_layer(selection, i, error));
    }
    return ATTN_OK;
}

/* Kernels see no optional extension that the backends of the layer, one for each phase, have not
 * declared. */
static void drop_undeclared(struct attn_assignment *assignment)
{
    for (int32_t i = 0; i < assignment->num_layers * NUM_PHASES; i++) {
        struct assignment_layer *layer = &assignment->layers[i / NUM_PHASES];
        const int32_t backend = layer->phases[i % NUM_PHASES].choice.backend;
        if (backend >= 0) {
            layer_drop_undeclared(&layer->layer, &assignment->runtime->backends[backend].caps);
        }
    }
}

/* By the rules, or an imported text, or the one that ATTN_LOCK takes. */
static attn_status choose(struct selection *selection, const struct attn_layer_desc *const *layers,
                          struct attn_error *error)
{
    attn_runtime *runtime = selection->runtime;
    struct attn_assignment *assignment = selection->assignment;
    const struct attn_select_options *options = selection->options;
    const bool all = !(options->flags & ATTN_SELECT_KEEP_UNSERVED);
    const char *text = options->backend != NULL ? options->backend : runtime->settings.backend;
    const char *import_text = options->import_text;
    bool conformant = false;
    TRY(rules_parse(&selection->rules, text, strlen(text), selection->arena, error));
    for (int32_t r = 0; r < selection->rules.count; r++) {
        conformant |= selection->rules.rules[r].conformant;
    }
    TRY(steering.choice(runtime, layers, assignment->num_layers, selection->arena,
                        &selection->rules, &import_text, error));
    text = import_text != NULL ? import_text : text;
    TRY_IF(runtime->num_backends == 0 && all, tell_no_backends(runtime, error));
    TRY(check_names(selection, text, error));
    TRY(take_device(runtime, options, &assignment->device, error));
    selection->known = steering.read(runtime, assignment->device, conformant, selection->arena);
    NO_MEMORY_IF(selection->known == NULL, "assignment", "the assignment");
    TRY(select_all(selection, layers, error));
    TRY_IF(import_text != NULL, steering.came_out(assignment, import_text, error));
    return !assignment->complete && all ? tell_unserved(assignment, error) : ATTN_OK;
}

attn_status select_layers(attn_runtime *runtime, const struct attn_select_options *given,
                          const struct attn_layer_desc *const *layers, int32_t num_layers,
                          attn_assignment **out, struct attn_error *error)
{
    struct attn_select_options options = {.struct_size = sizeof options};
    struct selection selection = {.runtime = runtime, .options = &options};
    attn_status status;
    BAD_IF(out == NULL, "assignment", "assignment is NULL");
    *out = NULL;
    BAD_IF(runtime == NULL || layers == NULL || num_layers <= 0 || num_layers > MAX_LAYERS,
           "num_layers",
           "runtime %p, layers %p, num_layers %d; neither may be NULL, and 1 to %d layers are "
           "allowed",
           (void *)runtime, (const void *)layers, num_layers, MAX_LAYERS);
    TRY_IF(given != NULL, read_options(&options, given, error));
    struct attn_assignment *assignment = runtime_alloc(runtime, sizeof *assignment);
    NO_MEMORY_IF(assignment == NULL, "assignment", "the assignment");
    arena_init(&assignment->arena, &runtime->host);
    assignment->runtime = runtime;
    atomic_init(&assignment->users, 1);
    assignment->complete = true;
    assignment->num_layers = num_layers;
    assignment->num_backends = runtime->num_backends;
    selection.assignment = assignment;
    selection.arena = &assignment->arena;
    status = choose(&selection, layers, error);
    if (status != ATTN_OK) {
        assignment_destroy(assignment);
        return status;
    }
    drop_undeclared(assignment);
    *out = assignment;
    return ATTN_OK;
}
