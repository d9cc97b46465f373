/* SPDX-License-Identifier: Apache-2.0 */
#include "select/select.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "select/names.h"
#include "util/counts.h"

#define MAX_BLOCK 65536

/* What a line says of one layer. */
struct imported {
    const char *backends[NUM_PHASES]; /* full names */
    int32_t kv_dtype, kv_dtype_v;     /* alike, if it names one */
    int32_t block_size;
    int32_t layout;
    const char *name;
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

static bool read_number(const char *text, long most, int32_t *number)
{
    char *end = NULL;
    if (text == NULL || text[0] < '0' || text[0] > '9') {
        return false;
    }
    errno = 0;
    long value = strtol(text, &end, 10);
    *number = (int32_t)value;
    return errno == 0 && *end == '\0' && value <= most;
}

static attn_status parse_line(char *line, int32_t index, struct imported *out,
                              struct attn_error *error)
{
    static const char marker[] = " name=";
    char *rest = NULL, *name = strstr(line, marker);
    int32_t number = -1;
    if (name == NULL) {
        return malformed(error, index + 2, "name=… is expected at the end");
    }
    *name = '\0';
    out->name = name + sizeof marker - 1;
    char *word = strtok_r(line, " ", &rest);
    if (word == NULL || strcmp(word, "layer") != 0 ||
        !read_number(strtok_r(NULL, " ", &rest), INT32_MAX, &number) || number != index) {
        return malformed(error, index + 2, "`layer N` in ascending order from 0 is expected");
    }
    out->backends[ATTN_PHASE_PREFILL] = value_of(&rest, "prefill");
    out->backends[ATTN_PHASE_DECODE] = value_of(&rest, "decode");
    char *kv_dtype = value_of(&rest, "kv_dtype");
    const char *block_size = value_of(&rest, "block_size");
    const char *layout = value_of(&rest, "layout");
    if (out->backends[0] == NULL || out->backends[1] == NULL || kv_dtype == NULL ||
        block_size == NULL || layout == NULL || strtok_r(NULL, " ", &rest) != NULL) {
        return malformed(
            error, index + 2,
            "prefill=, decode=, kv_dtype=, block_size=, layout= and name= are expected");
    }
    char *second = strchr(kv_dtype, '/');
    if (second != NULL) {
        *second++ = '\0';
    }
    out->kv_dtype = code_of_text(ATTN_NAMES_KV_DTYPE, kv_dtype);
    out->kv_dtype_v = second != NULL ? code_of_text(ATTN_NAMES_KV_DTYPE, second) : out->kv_dtype;
    out->layout = code_of_text(ATTN_NAMES_KV_LAYOUT, layout);
    const bool dtypes = out->kv_dtype >= 0 && out->kv_dtype_v >= 0;
    if (!dtypes || out->layout < 0 || !read_number(block_size, MAX_BLOCK, &out->block_size)) {
        return malformed(error, index + 2,
                         !dtypes           ? "unknown kv_dtype"
                         : out->layout < 0 ? "unknown layout"
                                           : "block_size is no number up to 65536");
    }
    return ATTN_OK;
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
                         struct arena *arena, struct attn_error *error)
{
    size_t count = (size_t)num_layers;
    char *copy = arena_string(arena, text);
    struct imported *imported = arena_array(arena, count, sizeof *imported);
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
        if (choice->kv_dtype != imported->kv_dtype || choice->kv_dtype_v != imported->kv_dtype_v ||
            choice->layout != imported->layout || choice->block_size != imported->block_size) {
            return error_set(
                error, ATTN_ERROR_REFUSED, "kv_cache",
                "layer '%s': kv_dtype %s, block_size %d, layout %s in the imported "
                "text; %s, %d, %s here",
                name, kv_dtypes_text(imported->kv_dtype, imported->kv_dtype_v).text,
                imported->block_size, code_text(ATTN_NAMES_KV_LAYOUT, imported->layout).text,
                kv_dtypes_text(choice->kv_dtype, choice->kv_dtype_v).text, choice->block_size,
                code_text(ATTN_NAMES_KV_LAYOUT, choice->layout).text);
        }
    }
    return ATTN_OK;
}

attn_status import_hold(const struct attn_assignment *assignment, const char *text,
                        struct attn_error *error)
{
    const attn_runtime *runtime = assignment->runtime;
    struct arena arena;
    attn_status status = ATTN_OK;
    arena_init(&arena, &runtime->host);
    char *copy = arena_string(&arena, text);
    struct imported *imported =
        arena_array(&arena, (size_t)assignment->num_layers, sizeof *imported);
    if (copy == NULL || imported == NULL) {
        status = NO_MEMORY("import_text", "the text");
        goto done;
    }
    status = parse_text(copy, assignment->num_layers, imported, error);
    for (int32_t i = 0; status == ATTN_OK && i < assignment->num_layers; i++) {
        status = hold_layer(&assignment->layers[i], &imported[i], error);
    }
done:
    arena_finish(&arena);
    return status;
}
