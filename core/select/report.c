/* SPDX-License-Identifier: Apache-2.0 */
/* ATTN_LOG=info: who serves what, and why, in one line for each group of layers. */
#include <stdio.h>
#include <string.h>

#include "select/names.h"
#include "select/select.h"

#define MAX_GROUPS 64 /* lines at most */

struct group {
    int32_t first, last, count;
};

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
static void tell_choice(const attn_runtime *runtime, const struct attn_choice *choice, char *text,
                        size_t size)
{
    char why[200];
    if (choice->backend < 0) {
        snprintf(text, size, "none");
        return;
    }
    const char *file = runtime->plugins[runtime->backends[choice->backend].plugin].file;
    const size_t length = strlen(choice->rule);
    if (choice->forced) {
        snprintf(why, sizeof why, "forced by '%.150s'", choice->rule);
    } else if (choice->measured) {
        snprintf(why, sizeof why, "the fastest measured here");
    } else {
        snprintf(why, sizeof why, "rank %d", choice->rank);
    }
    snprintf(text, size, "%s of %s, %s%s%.150s%s", choice->name, file, why,
             choice->forced || length == 0     ? ""
             : choice->rule[length - 1] == '?' ? "; nothing meets the wish '"
                                               : "; within '",
             choice->forced ? "" : choice->rule, choice->forced || length == 0 ? "" : "'");
}

static void tell_group(const struct attn_assignment *a, const struct group *group)
{
    const struct assignment_layer *first = &a->layers[group->first],
                                  *last = &a->layers[group->last];
    char prefill[700], decode[700];
    tell_choice(a->runtime, &first->phases[ATTN_PHASE_PREFILL].choice, prefill, sizeof prefill);
    tell_choice(a->runtime, &first->phases[ATTN_PHASE_DECODE].choice, decode, sizeof decode);
    const bool one = strcmp(prefill, decode) == 0;
    runtime_log(a->runtime, ATTN_LOG_INFO, "%d %s layers, '%.60s' to '%.60s': %s%s%s%s",
                group->count, name_of_kind(first->layer.desc.kind), first->layer.desc.name,
                last->layer.desc.name, one ? "" : "prefill by ", prefill, one ? "" : "; decode by ",
                one ? "" : decode);
}

void selection_log(const struct attn_assignment *assignment)
{
    struct group groups[MAX_GROUPS];
    int32_t count = 0;
    if (assignment->runtime->settings.log_level < ATTN_LOG_INFO) {
        return;
    }
    for (int32_t i = 0; i < assignment->num_layers; i++) {
        int32_t g = 0;
        while (g < count &&
               !same_group(&assignment->layers[groups[g].first], &assignment->layers[i])) {
            g++;
        }
        if (g == MAX_GROUPS) {
            break;
        }
        if (g == count) {
            groups[count++] = (struct group){.first = i};
        }
        groups[g].last = i;
        groups[g].count++;
    }
    for (int32_t g = 0; g < count; g++) {
        tell_group(assignment, &groups[g]);
    }
}
