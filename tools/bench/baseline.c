/* SPDX-License-Identifier: Apache-2.0 */
#include "baseline.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/file.h"

#define MOST_BYTES ((size_t)64 << 20)
#define TOLERANCE 0.05 /* a result may take so much longer, whatever the spreads */

attn_status baseline_open(struct baseline *baseline, const char *path, struct attn_error *error)
{
    const char *why = NULL;
    size_t size = 0;
    baseline->text = read_whole_file(path, MOST_BYTES, &size, &why);
    if (baseline->text != NULL && strncmp(baseline->text, "shape,", 6) != 0) {
        why = "is not what --csv writes: its first line does not begin with shape,";
        baseline_finish(baseline);
    }
    if (baseline->text == NULL) {
        snprintf(error->message, sizeof error->message, "%s", why);
        return error->status = ATTN_ERROR_INVALID_ARGUMENT;
    }
    return ATTN_OK;
}

void baseline_finish(struct baseline *baseline)
{
    free(baseline->text);
    baseline->text = NULL;
}

/* The row of the same shape, types, backend, device and threads, after these; or NULL. */
static const char *find_row(const struct baseline *baseline, const char *key)
{
    const size_t length = strlen(key);
    for (const char *line = baseline->text; line != NULL;
         line = strchr(line, '\n') != NULL ? strchr(line, '\n') + 1 : NULL) {
        if (strncmp(line, key, length) == 0 && line[length] == ',') {
            return line + length;
        }
    }
    return NULL;
}

void baseline_compare(const struct baseline *baseline, const char *path, struct result *result,
                      const struct session *session)
{
    const struct timing *now = &result->timing;
    struct timing then;
    char key[1024];
    result_key(result, session, key, sizeof key);
    const char *row = find_row(baseline, key);
    if (row == NULL || sscanf(row, ",%lf,%lf,%*f,%*f,%*f,%lf", &then.time_us, &then.spread,
                              &then.ratio_to_floor) != 3) {
        snprintf(result->regression, sizeof result->regression, "%s has no time of it", path);
        return;
    }
    const bool has_floor = now->ratio_to_floor > 0 && then.ratio_to_floor > 0;
    const double spreads = now->spread + then.spread;
    result->ratio_to_baseline =
        has_floor ? now->ratio_to_floor / then.ratio_to_floor : now->time_us / then.time_us;
    if (result->ratio_to_baseline > 1 + (spreads > TOLERANCE ? spreads : TOLERANCE)) {
        snprintf(result->regression, sizeof result->regression,
                 "takes %.3g times as long as in %s: %.4g us, %.3g of the floor; there %.4g us, "
                 "%.3g",
                 result->ratio_to_baseline, path, now->time_us, now->ratio_to_floor, then.time_us,
                 then.ratio_to_floor);
    }
}
