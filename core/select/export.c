/* SPDX-License-Identifier: Apache-2.0 */
/* An assignment as text, and back. */
#include "select/select.h"

#include <stdio.h>
#include <string.h>

#include "select/names.h"
#include "util/counts.h"

/* What a line says of one layer, in its words. */
struct imported {
    const char *backends[NUM_PHASES]; /* full names */
    const char *kv_dtype, *block_size, *layout, *name;
};

void assignment_add_layers(struct text *out, const attn_assignment *assignment)
{
    for (int32_t i = 0; i < assignment->num_layers; i++) {
        const struct assignment_layer *l = &assignment->layers[i];
        const struct attn_choice *choice = &l->phases[ATTN_PHASE_PREFILL].choice;
        text_add(out, "layer %d prefill=%s decode=%s kv_dtype=%s block_size=%d layout=%s name=%s\n",
                 i, choice->name, l->phases[ATTN_PHASE_DECODE].choice.name,
                 kv_dtypes_text(choice->kv_dtype, choice->kv_dtype_v).text, choice->block_size,
                 code_text(ATTN_NAMES_KV_LAYOUT, choice->layout).text, l->layer.desc.name);
    }
}

attn_status assignment_export(const attn_assignment *assignment, char *text, size_t size,
                              size_t *needed, struct attn_error *error)
{
    struct text out;
    attn_status status = ATTN_OK;
    if (assignment == NULL || needed == NULL || (text == NULL && size > 0)) {
        return BAD(assignment == NULL ? "assignment"
                   : needed == NULL   ? "needed"
                                      : "text",
                   "NULL is not allowed here");
    }
    *needed = 0;
    if (!assignment->complete) {
        return error_set(error, ATTN_ERROR_NO_BACKEND, "assignment",
                         "an assignment with unserved layers cannot be exported");
    }
    text_init(&out, &assignment->runtime->host);
    text_add_string(&out, EXPORT_HEAD "\n");
    assignment_add_layers(&out, assignment);
    if (out.failed) {
        status = NO_MEMORY("text", "the text");
    } else {
        *needed = out.length + 1;
        if (size > 0) {
            size_t fits = out.length < size ? out.length : size - 1;
            memcpy(text, text_get(&out), fits);
            text[fits] = '\0';
        }
    }
    text_finish(&out);
    return status;
}

static attn_status malformed(struct attn_error *error, int32_t line, const char *what)
{
    return error_set(error, ATTN_ERROR_SYNTAX, "import_text", "line %d: %s", line, what);
}

/* The value of the next word `key=value`; NULL if another word stands there. */
static char *value_of(char **rest, const char *key)
{
    char *word = strtok_r(NULL, " ", rest);
    size_t length = strlen(key);
    return word != NULL && strncmp(word, key, length) == 0 && word[length] == '='
               ? word + length + 1
               : NULL;
}

static attn_status parse_line(char *line, int32_t index, struct imported *out,
                              struct attn_error *error)
{
    static const char marker[] = " name=";
    char *rest = NULL, *name = strstr(line, marker), number[16];
    if (name == NULL) {
        return malformed(error, index + 2, "name=… is expected at the end");
    }
    *name = '\0';
    out->name = name + sizeof marker - 1;
    const char *word = strtok_r(line, " ", &rest), *index_text = strtok_r(NULL, " ", &rest);
    snprintf(number, sizeof number, "%d", index);
    if (word == NULL || strcmp(word, "layer") != 0 || index_text == NULL ||
        strcmp(index_text, number) != 0) {
        return malformed(error, index + 2, "`layer N` in ascending order from 0 is expected");
    }
    out->backends[ATTN_PHASE_PREFILL] = value_of(&rest, "prefill");
    out->backends[ATTN_PHASE_DECODE] = value_of(&rest, "decode");
    out->kv_dtype = value_of(&rest, "kv_dtype");
    out->block_size = value_of(&rest, "block_size");
    out->layout = value_of(&rest, "layout");
    return out->backends[0] != NULL && out->backends[1] != NULL && out->kv_dtype != NULL &&
                   out->block_size != NULL && out->layout != NULL &&
                   strtok_r(NULL, " ", &rest) == NULL
               ? ATTN_OK
               : malformed(
                     error, index + 2,
                     "prefill=, decode=, kv_dtype=, block_size=, layout= and name= are expected");
}

/* Cuts `copy`, which the caller owns, into lines and words. */
static attn_status parse_text(char *copy, int32_t num_layers, struct imported *imported,
                              struct attn_error *error)
{
    char *at = NULL;
    char *line = strtok_r(copy, "\n", &at);
    if (line == NULL || strcmp(line, EXPORT_HEAD) != 0) {
        return malformed(error, 1, "`" EXPORT_HEAD "` is expected");
    }
    for (int32_t i = 0; i < num_layers; i++) {
        line = strtok_r(NULL, "\n", &at);
        if (line == NULL) {
            return error_set(error, ATTN_ERROR_REFUSED, "import_text",
                             "it holds %d layers; %d are being selected for", i, num_layers);
        }
        TRY(parse_line(line, i, &imported[i], error));
    }
    if (strtok_r(NULL, "\n", &at) != NULL) {
        return error_set(error, ATTN_ERROR_REFUSED, "import_text",
                         "it holds more than the %d layers that are being selected for",
                         num_layers);
    }
    return ATTN_OK;
}

static attn_status add_rule(struct rule *rule, int32_t layer, int32_t phase, const char *backend,
                            size_t position, struct arena *arena, struct attn_error *error)
{
    *rule = (struct rule){.text = "imported",
                          .where = WHERE_LAYER_PHASE,
                          .first = layer,
                          .last = phase,
                          .patterns = arena_array(arena, 1, sizeof *rule->patterns),
                          .num_patterns = 1,
                          .num_wanted = 1};
    if (rule->patterns == NULL) {
        return NO_MEMORY("import_text", "the text");
    }
    *rule->patterns = (struct pattern){backend, false, position};
    return pattern_is_glob(backend) || backend[0] == '\0'
               ? malformed(error, layer + 2, "a backend's full name is expected")
               : ATTN_OK;
}

attn_status import_rules(struct rules *rules, const char *text, int32_t num_layers,
                         struct arena *arena, const struct imported **out, struct attn_error *error)
{
    size_t count = (size_t)num_layers;
    char *copy = arena_string(arena, text);
    struct imported *imported = arena_array(arena, count, sizeof *imported);
    *out = imported;
    rules->count = 0;
    rules->rules = arena_array(arena, count * NUM_PHASES, sizeof *rules->rules);
    if (copy == NULL || imported == NULL || rules->rules == NULL) {
        return NO_MEMORY("import_text", "the text");
    }
    TRY(parse_text(copy, num_layers, imported, error));
    for (int32_t i = 0; i < num_layers; i++) {
        for (int32_t phase = 0; phase < NUM_PHASES; phase++) {
            const char *backend = imported[i].backends[phase];
            TRY(add_rule(&rules->rules[rules->count++], i, phase, backend, (size_t)(backend - copy),
                         arena, error));
        }
    }
    return ATTN_OK;
}

static attn_status hold_layer(const struct assignment_layer *layer, const struct imported *imported,
                              struct attn_error *error)
{
    const char *name = layer->layer.desc.name;
    char block_size[16];
    if (strcmp(imported->name, name) != 0) {
        return error_set(error, ATTN_ERROR_REFUSED, "name",
                         "layer '%s' is '%s' in the imported text", name, imported->name);
    }
    for (int32_t phase = 0; phase < NUM_PHASES; phase++) {
        const struct attn_choice *choice = &layer->phases[phase].choice;
        if (choice->backend < 0) {
            continue; /* reported with its reasons */
        }
        if (strcmp(choice->name, imported->backends[phase]) != 0) {
            return error_set(error, ATTN_ERROR_REFUSED, "backend",
                             "layer '%s', %s: %s in the imported text, %s here", name,
                             name_of_phase(phase), imported->backends[phase], choice->name);
        }
        const struct kv_dtypes_text dtypes = kv_dtypes_text(choice->kv_dtype, choice->kv_dtype_v);
        const struct code_text layout = code_text(ATTN_NAMES_KV_LAYOUT, choice->layout);
        snprintf(block_size, sizeof block_size, "%d", choice->block_size);
        if (strcmp(dtypes.text, imported->kv_dtype) != 0 ||
            strcmp(layout.text, imported->layout) != 0 ||
            strcmp(block_size, imported->block_size) != 0) {
            return error_set(error, ATTN_ERROR_REFUSED, "kv_cache",
                             "layer '%s': kv_dtype %s, block_size %s, layout %s in the imported "
                             "text; %s, %s, %s here",
                             name, imported->kv_dtype, imported->block_size, imported->layout,
                             dtypes.text, block_size, layout.text);
        }
    }
    return ATTN_OK;
}

attn_status import_hold(const struct attn_assignment *assignment, const struct imported *imported,
                        struct attn_error *error)
{
    for (int32_t i = 0; i < assignment->num_layers; i++) {
        TRY(hold_layer(&assignment->layers[i], &imported[i], error));
    }
    return ATTN_OK;
}
