/* SPDX-License-Identifier: Apache-2.0 */
#include "tune.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "common/cache_lines.h"
#include "common/device.h"
#include "common/find.h"
#include "host/conformance.h"
#include "host/measurement.h"
#include "util/hash.h"

bool tune_takes(enum shape_kind_code kind)
{
    return kind != SHAPE_MIXED && kind != SHAPE_WRITE && kind != SHAPE_MERGE &&
           kind != SHAPE_DISPATCH;
}

static bool usable(const struct result *result)
{
    return result->error[0] == '\0' && !result->timing.failed && result->rank_shape[0] != '\0';
}

/* What all lines of these measurements share. */
struct origin {
    char device[MEASUREMENT_DEVICE_SIZE];
    uint64_t drivers;
    char date[16];
    const struct report *report;
    const char *backend; /* --backend: only its lines are replaced; or NULL */
};

static void find_origin(struct origin *origin, const struct session *session)
{
    const time_t now = time(NULL);
    struct tm day;
    struct attn_device_info info;
    if (device_describe(session->api, session->runtime, session->device.device, &info)) {
        measurement_device(&info, origin->device);
    }
    origin->drivers = drivers_hash(HASH_INIT);
    strftime(origin->date, sizeof origin->date, "%Y-%m-%d", gmtime_r(&now, &day));
}

/* Keys or, in prefill, queries of each request. */
static void name_bucket(const struct result *result, char *text, size_t size)
{
    const enum parameter length =
        result->phase == ATTN_PHASE_PREFILL || result->shape.kind == SHAPE_GDN ? PARAMETER_S
                                                                               : PARAMETER_L;
    snprintf(text, size, "%dx%d", shape_int(&result->shape, PARAMETER_R),
             shape_int(&result->shape, length));
}

static bool write_line(const struct origin *origin, const struct session *session,
                       const struct result *result, FILE *file)
{
    struct measurement m = {.nanoseconds = (int64_t)(1e3 * result->timing.time_us + 0.5),
                            .spread = (int32_t)(100 * result->timing.spread + 0.5),
                            .drivers = origin->drivers};
    char line[1024];
    struct attn_error error = ATTN_ERROR_INIT;
    const int32_t index = backend_find(session->api, session->runtime, result->backend, &error);
    if (index < 0) {
        return false;
    }
    const char *version = backend_caps(session->api, session->runtime, index)->version;
    m.nanoseconds += m.nanoseconds == 0;
    snprintf(m.device, sizeof m.device, "%s", origin->device);
    snprintf(m.shape, sizeof m.shape, "%s", result->rank_shape);
    snprintf(m.phase, sizeof m.phase, "%s", phase_names[result->phase]);
    snprintf(m.backend, sizeof m.backend, "%s", result->backend);
    snprintf(m.version, sizeof m.version, "%.31s", version[0] != '\0' ? version : "-");
    for (char *at = m.version; *at != '\0'; at++) {
        *at = *at == ' ' ? '_' : *at;
    }
    snprintf(m.date, sizeof m.date, "%s", origin->date);
    name_bucket(result, m.bucket, sizeof m.bucket);
    return file_hash(backend_file(session->api, session->runtime, index), &m.file) &&
           measurement_text(&m, line, sizeof line) && fputs(line, file) >= 0;
}

/* A layer's times of one phase are measured together and replaced together. */
static bool is_replaced(const void *user, const char *line)
{
    const struct origin *origin = user;
    struct measurement m;
    for (int32_t i = 0; i < origin->report->count; i++) {
        const struct result *r = &origin->report->results[i];
        if (usable(r) && measurement_parse(&m, line) &&
            measurement_is_of(&m, origin->device, r->rank_shape, phase_names[r->phase],
                              origin->backend != NULL ? r->backend : m.backend)) {
            return true;
        }
    }
    return false;
}

attn_status tune_write(const struct report *report, const struct session *session, char *path,
                       size_t size, struct attn_error *error)
{
    struct origin origin = {.report = report, .backend = session->options->backends[0]};
    int32_t count = 0;
    char *text = NULL;
    size_t length = 0;
    for (int32_t i = 0; i < report->count; i++) {
        count += usable(&report->results[i]);
    }
    if (count == 0) {
        return cache_lines_fail(error, "--tune",
                                "no time was kept (none was measured, or --model's spreads are "
                                "above --max-spread); the ranks stay as they were");
    }
    attn_status status = cache_lines_path(RANKS_FILE, path, size, error);
    FILE *out = status == ATTN_OK ? open_memstream(&text, &length) : NULL;
    if (out == NULL) {
        return status ? status : cache_lines_fail(error, path, strerror(errno));
    }
    bool written = true;
    find_origin(&origin, session);
    for (int32_t i = 0; i < report->count; i++) {
        if (usable(&report->results[i])) {
            written &= write_line(&origin, session, &report->results[i], out);
        }
    }
    written &= fclose(out) == 0;
    status = written ? cache_lines_write("attn-bench", path, text, is_replaced, &origin, error)
                     : cache_lines_fail(error, path,
                                        "a plugin file cannot be read, or no memory is left");
    free(text);
    return status;
}
