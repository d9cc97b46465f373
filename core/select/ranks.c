/* SPDX-License-Identifier: Apache-2.0 */
#include "select/ranks.h"

#include <locale.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "select/lines.h"
#include "select/names.h"
#include "util/counts.h"

/* A number as attn-bench writes it, whatever the process's locale says of decimal points; *end is
 * where it ends. */
static double read_number(const char *text, char **end)
{
    const locale_t plain = newlocale(LC_NUMERIC_MASK, "C", (locale_t)0);
    const locale_t before = plain != (locale_t)0 ? uselocale(plain) : (locale_t)0;
    const double number = strtod(text, end);
    if (plain != (locale_t)0) {
        uselocale(before);
        freelocale(plain);
    }
    return number;
}

static bool parse_line(const char *line, struct measurement *item, struct arena *arena)
{
    char arch[64], shape[128], phase[16], backend[160], *end;
    int used = 0;
    if (sscanf(line, "%63s %127s %15s %159s %n", arch, shape, phase, backend, &used) != 4) {
        return false;
    }
    item->time_us = read_number(line + used, &end);
    if (end == line + used || end[strspn(end, " \t\r")] != '\0' || !isfinite(item->time_us) ||
        item->time_us <= 0) {
        return false;
    }
    for (item->phase = 0; item->phase < NUM_PHASES; item->phase++) {
        if (strcmp(phase, name_of_phase(item->phase)) == 0) {
            item->arch = arena_string(arena, arch);
            item->shape = arena_string(arena, shape);
            item->backend = arena_string(arena, backend);
            return item->arch != NULL && item->shape != NULL && item->backend != NULL;
        }
    }
    return false;
}

bool ranks_read(struct ranks *ranks, const attn_runtime *runtime, struct arena *arena)
{
    struct lines lines;
    *ranks = (struct ranks){NULL, 0};
    if (!lines_read(&lines, runtime, RANKS_FILE, "measured ranks", arena)) {
        return false;
    }
    if (lines.count == 0) {
        return true;
    }
    ranks->items = arena_array(arena, (size_t)lines.count, sizeof *ranks->items);
    if (ranks->items == NULL) {
        return false;
    }
    for (int32_t i = 0; i < lines.count; i++) {
        ranks->count += parse_line(lines.items[i], &ranks->items[ranks->count], arena);
    }
    lines_warn(runtime, RANKS_FILE, "measurement", lines.count - ranks->count);
    return true;
}

double ranks_find(const struct ranks *ranks, const char *arch, const struct attn_layer_desc *layer,
                  int32_t phase, const char *backend)
{
    char shape[128];
    if (ranks->count == 0) {
        return 0;
    }
    snprintf(shape, sizeof shape, "%d/%dx%dx%d.%s.%s", layer->num_q_heads, layer->num_kv_heads,
             layer->head_size, layer->head_size_v, name_of_dtype(layer->dtype),
             kv_dtypes_text(layer->kv_dtype, layer->kv_dtype_v).text);
    for (int32_t i = ranks->count - 1; i >= 0; i--) {
        const struct measurement *item = &ranks->items[i];
        if (item->phase == phase && strcmp(item->backend, backend) == 0 &&
            strcmp(item->shape, shape) == 0 && strcmp(item->arch, arch) == 0) {
            return item->time_us;
        }
    }
    return 0;
}
