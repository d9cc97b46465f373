/* SPDX-License-Identifier: Apache-2.0 */
/* An assignment as text, and back. */
#include "operators.h"

#include <stdio.h>
#include <string.h>

#include "host/lock_text.h"
#include "select/names.h"
#include "util/counts.h"

static void add_layer(struct text *out, const attn_assignment *assignment, int32_t index)
{
    const struct assignment_layer *l = &assignment->layers[index];
    const struct attn_choice *choice = &l->phases[ATTN_PHASE_PREFILL].choice;
    text_add(out, "layer %d prefill=%s decode=%s kv_dtype=%s block_size=%d layout=%s name=%s\n",
             index, choice->name, l->phases[ATTN_PHASE_DECODE].choice.name,
             kv_dtypes_text(choice->kv_dtype, choice->kv_dtype_v).text, choice->block_size,
             code_text(ATTN_NAMES_KV_LAYOUT, choice->layout).text, l->layer.desc.name);
}

void assignment_add_layers(struct text *out, const attn_assignment *assignment)
{
    for (int32_t i = 0; i < assignment->num_layers; i++) {
        add_layer(out, assignment, i);
    }
}

attn_status assignment_export(const attn_assignment *assignment, char *text, size_t size,
                              size_t *needed, struct attn_error *error)
{
    struct text out;
    attn_status status = ATTN_OK;
    BAD_IF(assignment == NULL || needed == NULL || (text == NULL && size > 0),
           assignment == NULL ? "assignment"
           : needed == NULL   ? "needed"
                              : "text",
           "NULL is not allowed here");
    *needed = 0;
    ERROR_IF(!assignment->complete, ATTN_ERROR_NO_BACKEND, "assignment",
             "an assignment with unserved layers cannot be exported");
    text_init(&out, &assignment->runtime->host);
    text_add(&out, EXPORT_HEAD "\n");
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

static void add_difference(void *user, const char *difference)
{
    struct text *text = user;
    if (text->length < ATTN_ERROR_MESSAGE_SIZE) {
        text_add(text, "%s%s", text->length > 0 ? "; " : "", difference);
    }
}

attn_status refuse_choice(const attn_runtime *runtime, const char *field, const char *whose,
                          const char *record, const char *own, const char *in_record,
                          struct attn_error *error)
{
    struct text differences, whole;
    text_init(&differences, &runtime->host);
    text_init(&whole, &runtime->host);
    lock_compare(record, own, in_record, "this choice", add_difference, &differences);
    text_add(&whole, "%s holds another choice: %s", whose, text_get(&differences));
    text_finish(&differences);
    return text_finish_error(&whole, ATTN_ERROR_REFUSED, field, error);
}

static attn_status malformed(struct attn_error *error, int32_t line, const char *what)
{
    return error_set(error, ATTN_ERROR_SYNTAX, "import_text", "line %d: %s", line, what);
}

/* One order for each phase, by the beginning of a layer's line; import_hold sees to the rest. */
static attn_status read_line(struct rule *rules, char *line, int32_t layer, const char *text,
                             struct arena *arena, struct attn_error *error)
{
    int begin[NUM_PHASES] = {0}, end[NUM_PHASES] = {0};
    (void)sscanf(line, "layer %*d prefill=%n%*s%n decode=%n%*s%n", &begin[0], &end[0], &begin[1],
                 &end[1]);
    if (end[1] == 0) {
        return malformed(error, layer + 2,
                         "`layer N`, prefill=, decode= and what follows are expected");
    }
    for (int32_t phase = 0; phase < NUM_PHASES; phase++) {
        struct pattern *pattern = arena_array(arena, 1, sizeof *pattern);
        NO_MEMORY_IF(pattern == NULL, "import_text", "the text");
        line[end[phase]] = '\0';
        *pattern =
            (struct pattern){line + begin[phase], false, (size_t)(line + begin[phase] - text)};
        if (pattern_is_glob(pattern->text)) {
            return malformed(error, layer + 2, "a backend's full name is expected");
        }
        rules[phase] = (struct rule){.text = "imported",
                                     .where = WHERE_LAYER_PHASE,
                                     .first = layer,
                                     .last = phase,
                                     .patterns = pattern,
                                     .num_patterns = 1,
                                     .num_wanted = 1};
    }
    return ATTN_OK;
}

attn_status import_rules(struct rules *rules, const char *text, int32_t num_layers,
                         struct arena *arena, struct attn_error *error)
{
    char *copy = arena_string(arena, text), *rest = copy, *line;
    int32_t count = 0;
    rules->rules = arena_array(arena, (size_t)num_layers * NUM_PHASES, sizeof *rules->rules);
    NO_MEMORY_IF(copy == NULL || rules->rules == NULL, "import_text", "the text");
    if (strcmp(strsep(&rest, "\n"), EXPORT_HEAD) != 0) {
        return malformed(error, 1, "`" EXPORT_HEAD "` is expected");
    }
    while (rest != NULL && *rest != '\0') {
        line = strsep(&rest, "\n");
        TRY_IF(count < num_layers, read_line(&rules->rules[(size_t)count * NUM_PHASES], line, count,
                                             copy, arena, error));
        count++;
    }
    rules->count = num_layers * NUM_PHASES;
    return count == num_layers
               ? ATTN_OK
               : error_set(error, ATTN_ERROR_REFUSED, "import_text",
                           "it holds %d layers; %d are being selected for", count, num_layers);
}

attn_status import_hold(const attn_assignment *assignment, const char *text,
                        struct attn_error *error)
{
    struct text said, own;
    attn_status status = ATTN_OK;
    text_init(&said, &assignment->runtime->host);
    text_init(&own, &assignment->runtime->host);
    for (int32_t i = 0; i < assignment->num_layers; i++) {
        const struct assignment_phase *phases = assignment->layers[i].phases;
        text = strchr(text, '\n') + 1;
        if (phases[0].choice.backend >= 0 && phases[1].choice.backend >= 0) {
            text_add(&said, "%.*s\n", (int)strcspn(text, "\n"), text);
            add_layer(&own, assignment, i);
        } /* others are reported with their reasons */
    }
    if (said.failed || own.failed) {
        status = NO_MEMORY("import_text", "the text");
    } else if (strcmp(text_get(&said), text_get(&own)) != 0) {
        status = refuse_choice(assignment->runtime, "import_text", "the imported text",
                               text_get(&said), text_get(&own), "the text", error);
    }
    text_finish(&said);
    text_finish(&own);
    return status;
}
