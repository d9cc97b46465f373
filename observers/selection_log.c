/* SPDX-License-Identifier: Apache-2.0 */
/* ATTN_LOG=info: who serves what, and why, in one line for each group of layers. */
#include <string.h>

#include "observers.h"
#include "select/assignment.h"
#include "select/names.h"
#include "util/text.h"

static bool same_choice(const struct attn_choice *a, const struct attn_choice *b)
{
    return a->backend == b->backend && a->forced == b->forced && a->rank == b->rank &&
           a->measured == b->measured && strcmp(a->rule, b->rule) == 0;
}

static bool same_group(const struct assignment_layer *a, const struct assignment_layer *b)
{
    return a->layer.desc.kind == b->layer.desc.kind &&
           same_choice(&a->phases[0].choice, &b->phases[0].choice) &&
           same_choice(&a->phases[1].choice, &b->phases[1].choice);
}

/* "cpu_simd@avx2 of /usr/lib/attn/attn_cpu_simd.so, rank 9" */
static void add_choice(struct text *out, const attn_runtime *runtime,
                       const struct attn_choice *choice)
{
    const size_t length = strlen(choice->rule);
    if (choice->backend < 0) {
        text_add(out, "none");
        return;
    }
    text_add(out, "%s of %s, ", choice->name,
             runtime->plugins[runtime->backends[choice->backend].plugin].file);
    if (choice->forced) {
        text_add(out, "forced by '%s'", choice->rule);
        return;
    }
    text_add(out, choice->measured ? "the fastest measured here" : "rank %d", choice->rank);
    if (length > 0) {
        text_add(out, "; %s '%s'",
                 choice->rule[length - 1] == '?' ? "nothing meets the wish" : "within",
                 choice->rule);
    }
}

static void log_group(const struct attn_assignment *a, int32_t first, int32_t last, int32_t count)
{
    const struct assignment_layer *layer = &a->layers[first];
    const struct attn_choice *prefill = &layer->phases[ATTN_PHASE_PREFILL].choice,
                             *decode = &layer->phases[ATTN_PHASE_DECODE].choice;
    struct text text;
    text_init(&text, &a->runtime->host);
    if (same_choice(prefill, decode)) {
        add_choice(&text, a->runtime, prefill);
    } else {
        text_add(&text, "prefill by ");
        add_choice(&text, a->runtime, prefill);
        text_add(&text, "; decode by ");
        add_choice(&text, a->runtime, decode);
    }
    runtime_log(a->runtime, ATTN_LOG_INFO, "%d %s layers, '%.60s' to '%.60s': %s", count,
                name_of(ATTN_NAMES_LAYER_KIND, layer->layer.desc.kind), layer->layer.desc.name,
                a->layers[last].layer.desc.name, text_get(&text));
    text_finish(&text);
}

void selection_log(const struct attn_assignment *a)
{
    for (int32_t i = 0; a->runtime->settings.log_level >= ATTN_LOG_INFO && i < a->num_layers; i++) {
        int32_t first = 0, last = i, count = 0;
        while (!same_group(&a->layers[first], &a->layers[i])) {
            first++;
        }
        for (int32_t j = i; first == i && j < a->num_layers; j++) {
            if (same_group(&a->layers[i], &a->layers[j])) {
                last = j;
                count++;
            }
        }
        if (first == i) {
            log_group(a, first, last, count);
        }
    }
}
