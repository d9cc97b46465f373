/* SPDX-License-Identifier: Apache-2.0 */
#include "select/suggest.h"

#include <stdio.h>
#include <string.h>

#include "select/grammar.h"

#define MAX_NAME 63
#define CLOSE 3 /* largest edit distance that still is a likely slip */

bool names_known(const attn_runtime *runtime, const char *pattern)
{
    for (int32_t i = 0; i < runtime->num_backends; i++) {
        if (pattern_fits(pattern, runtime->backends[i].caps.name,
                         runtime->backends[i].caps.variant)) {
            return true;
        }
    }
    return false;
}

static int32_t least(int32_t a, int32_t b, int32_t c)
{
    int32_t smaller = a < b ? a : b;
    return smaller < c ? smaller : c;
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
            int32_t above = row[j];
            row[j] = least(above + 1, row[j - 1] + 1, diagonal + (a[i - 1] != b[j - 1]));
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

void names_suggest(const attn_runtime *runtime, const char *pattern, char *text, size_t size)
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
