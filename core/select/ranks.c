/* SPDX-License-Identifier: Apache-2.0 */
#include "select/ranks.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "select/names.h"

#define MAX_FILE (1 << 20)
#define MAX_LINES 8192

static bool read_file(char *path, char **content, size_t *size, struct arena *arena)
{
    FILE *file = fopen(path, "re");
    *content = NULL;
    *size = 0;
    if (file == NULL) {
        return true;
    }
    long end = fseek(file, 0, SEEK_END) == 0 ? ftell(file) : 0;
    size_t most = end > 0 && end < MAX_FILE ? (size_t)end : end > 0 ? MAX_FILE : 0;
    rewind(file);
    char *memory = arena_alloc(arena, most + 1);
    if (memory != NULL) {
        *size = fread(memory, 1, most, file);
        *content = memory;
    }
    fclose(file);
    return memory != NULL;
}

static bool parse_line(const char *line, struct measurement *item, struct arena *arena)
{
    char arch[64], shape[128], phase[16], backend[160];
    double time_us;
    int used = 0;
    if (sscanf(line, "%63s %127s %15s %159s %lf %n", arch, shape, phase, backend, &time_us,
               &used) != 5 ||
        line[used] != '\0' || !isfinite(time_us) || time_us <= 0) {
        return false;
    }
    for (item->phase = 0; item->phase < ATTN_PHASE_COUNT; item->phase++) {
        if (strcmp(phase, name_of_phase(item->phase)) == 0) {
            item->arch = arena_string(arena, arch);
            item->shape = arena_string(arena, shape);
            item->backend = arena_string(arena, backend);
            item->time_us = time_us;
            return item->arch != NULL && item->shape != NULL && item->backend != NULL;
        }
    }
    return false;
}

bool ranks_read(struct ranks *ranks, const attn_runtime *runtime, struct arena *arena)
{
    char path[4096], *content, *next;
    size_t size;
    int32_t broken = 0;
    *ranks = (struct ranks){NULL, 0};
    const char *folder = runtime->settings.cache_dir;
    if (folder == NULL || folder[0] == '\0' ||
        snprintf(path, sizeof path, "%s/ranks", folder) >= (int)sizeof path) {
        return true;
    }
    if (!read_file(path, &content, &size, arena)) {
        return false;
    }
    if (content == NULL) {
        return true;
    }
    ranks->items = arena_array(arena, MAX_LINES, sizeof *ranks->items);
    if (ranks->items == NULL) {
        return false;
    }
    for (char *line = content; line < content + size && ranks->count < MAX_LINES; line = next) {
        next = memchr(line, '\n', (size_t)(content + size - line));
        next = next != NULL ? next : content + size;
        *next++ = '\0';
        if (line[0] == '\0' || line[0] == '#') {
            continue;
        }
        if (parse_line(line, &ranks->items[ranks->count], arena)) {
            ranks->count++;
        } else {
            broken++;
        }
    }
    if (broken > 0) {
        runtime_log(runtime, ATTN_LOG_WARN, "%s: %d lines are no measurement and were passed over",
                    path, broken);
    }
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
             name_of_kv_dtype(layer->kv_dtype));
    for (int32_t i = ranks->count - 1; i >= 0; i--) {
        const struct measurement *item = &ranks->items[i];
        if (item->phase == phase && strcmp(item->backend, backend) == 0 &&
            strcmp(item->shape, shape) == 0 && strcmp(item->arch, arch) == 0) {
            return item->time_us;
        }
    }
    return 0;
}
