/* SPDX-License-Identifier: Apache-2.0 */
#include "report.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/command.h"
#include "common/names.h"

#define MOST_BYTES ((size_t)64 << 20)
#define TOLERANCE 0.05 /* a result may take so much longer, whatever the spreads */

static const struct {
    const char *name;
    const char *unit;
    double factor;
} ceiling_names[CEILING_COUNT] = {{"read_gb_s", "GB/s read", 1e-9},
                                  {"copy_gb_s", "GB/s copied (read and written)", 1e-9},
                                  {"f32_tflop_s", "TFLOP/s f32", 1e-12},
                                  {"bf16_tflop_s", "TFLOP/s bf16", 1e-12}};

void report_finish(struct report *report)
{
    for (int32_t i = 0; i < report->count; i++) {
        json_destroy(report->results[i].reasons);
        json_destroy(report->results[i].dispatch);
    }
    json_destroy(report->choices);
    free(report->results);
    free(report->baseline);
    *report = (struct report){.results = NULL};
}

void report_add(struct report *report, const struct result *result)
{
    report->results =
        command_realloc(report->results, (size_t)report->count + 1, sizeof *report->results);
    report->results[report->count++] = *result;
}

bool report_all_good(const struct report *report)
{
    for (int32_t i = 0; i < report->count; i++) {
        const struct result *result = &report->results[i];
        if (result->error[0] != '\0' || result->timing.failed || result->regression[0] != '\0') {
            return false;
        }
    }
    return !report->failed && report->count > 0;
}

static struct json *ceilings_json(const struct session *session)
{
    struct json *object = json_object(), *kernels = json_object();
    char device[DEVICE_NAME_SIZE];
    device_name(session->device.device, device);
    json_add(object, "device", json_string(device));
    json_add(object, "device_name", json_string(session->device_name));
    json_add(object, "threads", json_number(session->num_threads));
    json_add(object, "cpu_time", json_bool(session->options->cpu_time));
    for (enum ceiling c = 0; c < CEILING_COUNT && session->ceilings != NULL; c++) {
        double best = session->ceilings->best[c];
        if (best > 0) {
            json_add(object, ceiling_names[c].name, json_number(ceiling_names[c].factor * best));
            json_add(kernels, ceiling_names[c].name,
                     json_string(session->ceilings->kernel[c]->name));
        }
    }
    json_add(object, "kernels", kernels);
    return object;
}

static struct json *parameters_json(const struct bench_shape *shape)
{
    struct json *object = json_object();
    for (enum parameter p = 0; p < PARAMETER_COUNT; p++) {
        char text[32];
        if (!shape_takes(shape->kind, p)) {
            continue;
        }
        if (p == PARAMETER_LAYOUT) {
            parameter_text(shape, p, text, sizeof text);
            json_add(object, parameter_name(p), json_string(text));
        } else {
            json_add(object, parameter_name(p), json_number(shape->value[p]));
        }
    }
    return object;
}

static void add_timing(struct json *item, const struct timing *timing)
{
    json_add(item, "time_us", json_number(timing->time_us));
    json_add(item, "spread", json_number(timing->spread));
    json_add(item, "gb_s", json_number(timing->gb_s));
    json_add(item, "tflop_s", json_number(timing->tflop_s));
    json_add(item, "floor_us", json_number(timing->floor_us));
    json_add(item, "ratio_to_floor", json_number(timing->ratio_to_floor));
    if (timing->ratio_to_first > 0) {
        json_add(item, "ratio_to_first", json_number(timing->ratio_to_first));
    }
    json_add(item, "bound", json_string(timing->bound));
    json_add(item, "samples", json_number(timing->num_samples));
    json_add(item, "calls", json_number((double)timing->num_calls));
    json_add(item, "failed", json_bool(timing->failed));
}

/* The result's own parts become part of the document. */
static struct json *result_json(struct result *result, const struct session *session)
{
    struct json *item = json_object();
    char device[DEVICE_NAME_SIZE];
    device_name(session->device.device, device);
    json_add(item, "shape", json_string(shape_name(&result->shape)));
    json_add(item, "parameters", parameters_json(&result->shape));
    json_add(item, "dtype", json_string(dtype_name(session->options->dtype)));
    json_add(item, "kv_dtype", json_string(kv_dtype_name(result->kv_dtype)));
    json_add(item, "backend", json_string(result->backend[0] != '\0' ? result->backend : NULL));
    json_add(item, "device", json_string(device));
    json_add(item, "threads", json_number(session->num_threads));
    if (result->difference >= 0) {
        json_add(item, "difference", json_number(result->difference));
    }
    if (result->error[0] == '\0') {
        add_timing(item, &result->timing);
    } else {
        json_add(item, "error", json_string(result->error));
    }
    if (result->ratio_to_baseline > 0) {
        json_add(item, "ratio_to_baseline", json_number(result->ratio_to_baseline));
    }
    if (result->regression[0] != '\0') {
        json_add(item, "regression", json_string(result->regression));
    }
    if (json_count(result->reasons) > 0) {
        json_add(item, "reasons", result->reasons);
        result->reasons = NULL;
    }
    if (result->dispatch != NULL) {
        json_add(item, "dispatch", result->dispatch);
        result->dispatch = NULL;
    }
    return item;
}

void report_json(struct report *report, const struct session *session)
{
    struct json *root = json_object();
    json_add(root, "ceilings", ceilings_json(session));
    struct json *results = json_add(root, "results", json_array());
    if (report->ranks_file[0] != '\0') {
        json_add(root, "ranks_file", json_string(report->ranks_file));
    }
    if (report->choices != NULL) {
        json_add(root, "choices", report->choices);
        report->choices = NULL;
    }
    for (int32_t i = 0; i < report->count; i++) {
        json_push(results, result_json(&report->results[i], session));
    }
    json_print(root);
    json_destroy(root);
}

static void print_dispatch(const struct json *dispatch)
{
    const struct json *value;
    putchar(' ');
    JSON_EACH(value, dispatch)
    {
        if (value->type == JSON_NUMBER) {
            printf(" %s %.6g", value->name, value->number);
        } else if (value->type == JSON_STRING) {
            printf(" %s %s", value->name, value->text);
        }
    }
    putchar('\n');
}

/* Prints a Markdown table; each row begins with the model. */
static void print_choices(const struct json *choices, const char *model)
{
    const struct json *row;
    const char *name = strrchr(model, '/') != NULL ? strrchr(model, '/') + 1 : model;
    puts("| model | layers | phase | declared: us | measured: us | buckets | gain | note |\n"
         "| --- | --- | --- | --- | --- | --- | --- | --- |");
    JSON_EACH(row, choices)
    {
        printf("| %.*s | %d of %s | %s | %s: ",
               (int)(strlen(name) - (strlen(name) > 5 ? strlen(".json") : 0)), name,
               (int)json_value(row, "layers"), json_text(row, "layer"), json_text(row, "phase"),
               json_text(row, "declared"));
        if (json_value(row, "buckets") > 0) {
            printf("%.1f | %s: %.1f | %d | %.0f %% | %s |\n", json_value(row, "declared_us"),
                   json_text(row, "measured"), json_value(row, "measured_us"),
                   (int)json_value(row, "buckets"), 100 * json_value(row, "gain"),
                   json_text(row, "note"));
        } else {
            printf("- | %s: - | 0 | - | %s |\n", json_text(row, "measured"),
                   json_text(row, "note"));
        }
    }
}

void report_text(const struct report *report, const struct session *session)
{
    char text[512];
    device_name(session->device.device, text);
    printf("%s %s", text, session->device_name);
    if (session->num_threads > 0) {
        printf(", %d thread%s", session->num_threads, session->num_threads > 1 ? "s" : "");
    }
    if (session->options->cpu_time) {
        printf(", CPU time");
    }
    for (enum ceiling c = 0; c < CEILING_COUNT && session->ceilings != NULL; c++) {
        double best = session->ceilings->best[c];
        if (best > 0) {
            printf(", %.4g %s", ceiling_names[c].factor * best, ceiling_names[c].unit);
        }
    }
    const struct options *options = session->options;
    bool several = options->num_backends > 1 || options->against != NULL || options->peer != NULL ||
                   options->model != NULL;
    printf("\n%-36s %-24s %12s %7s %9s %9s %11s %7s%s\n", "shape", "backend", "time us", "spread",
           "GB/s", "TFLOP/s", "floor us", "ratio", several ? "  to first" : "");
    for (int32_t i = 0; i < report->count; i++) {
        const struct result *result = &report->results[i];
        const struct timing *t = &result->timing;
        shape_text(&result->shape, text, sizeof text);
        if (result->error[0] != '\0') {
            printf("%-36s %-24s %s\n", text, result->backend, result->error);
            continue;
        }
        printf("%-36s %-24s %12.2f %6.1f%% %9.2f %9.4f %11.2f %7.2f", text, result->backend,
               t->time_us, 100 * t->spread, t->gb_s, t->tflop_s, t->floor_us, t->ratio_to_floor);
        if (t->ratio_to_first > 0) {
            printf("%10.3f", t->ratio_to_first);
        }
        if (result->ratio_to_baseline > 0) {
            printf("  %.3f of the baseline", result->ratio_to_baseline);
        }
        if (result->difference >= 0) {
            printf("  differs by %.2g", result->difference);
        }
        puts(t->failed ? "  FAILED: under the floor" : "");
        if (result->dispatch != NULL) {
            print_dispatch(result->dispatch);
        }
    }
    if (report->ranks_file[0] != '\0') {
        if (report->choices != NULL) {
            print_choices(report->choices, session->options->model);
        }
        printf("selections go by these times from now on: %s\n", report->ranks_file);
    }
}

/* The columns of a CSV line that say what is measured, up to the time. */
static void result_key(const struct result *result, const struct session *session, char *text,
                       size_t size)
{
    char device[DEVICE_NAME_SIZE];
    size_t used = (size_t)snprintf(text, size, "%s", shape_name(&result->shape));
    for (enum parameter p = 0; p < PARAMETER_COUNT && used < size; p++) {
        char value[32] = "";
        if (shape_takes(result->shape.kind, p)) {
            parameter_text(&result->shape, p, value, sizeof value);
        }
        used += (size_t)snprintf(text + used, size - used, ",%s", value);
    }
    device_name(session->device.device, device);
    if (used < size) {
        snprintf(text + used, size - used, ",%s,%s,%s,%s,%d", dtype_name(session->options->dtype),
                 kv_dtype_name(result->kv_dtype), result->backend, device, session->num_threads);
    }
}

void report_csv(const struct report *report, const struct session *session)
{
    fputs("shape", stdout);
    for (enum parameter p = 0; p < PARAMETER_COUNT; p++) {
        printf(",%s", parameter_name(p));
    }
    puts(",dtype,kv_dtype,backend,device,threads,time_us,spread,gb_s,tflop_s,floor_us,"
         "ratio_to_floor,bound,failed,ratio_to_first");
    for (int32_t i = 0; i < report->count; i++) {
        const struct result *result = &report->results[i];
        const struct timing *t = &result->timing;
        char key[1024];
        result_key(result, session, key, sizeof key);
        fputs(key, stdout);
        if (result->error[0] == '\0') {
            printf(",%.9g,%.4g,%.6g,%.6g,%.9g,%.6g,%s,%d,", t->time_us, t->spread, t->gb_s,
                   t->tflop_s, t->floor_us, t->ratio_to_floor, t->bound, t->failed);
            printf(t->ratio_to_first > 0 ? "%.6g\n" : "\n", t->ratio_to_first);
        } else {
            puts(",,,,,,,,1,");
        }
    }
}

attn_status baseline_read(struct report *report, const char *path, struct attn_error *error)
{
    const char *why = NULL;
    size_t size = 0;
    report->baseline = read_whole_file(path, MOST_BYTES, &size, &why);
    if (report->baseline != NULL && strncmp(report->baseline, "shape,", 6) != 0) {
        why = "is not what --csv writes: its first line does not begin with shape,";
    }
    return why == NULL ? ATTN_OK : command_error(error, ATTN_ERROR_INVALID_ARGUMENT, "", "%s", why);
}

/* The row of the same shape, types, backend, device and threads, after these; or NULL. */
static const char *find_row(const char *baseline, const char *key)
{
    const size_t length = strlen(key);
    for (const char *line = baseline; line != NULL;
         line = strchr(line, '\n') != NULL ? strchr(line, '\n') + 1 : NULL) {
        if (strncmp(line, key, length) == 0 && line[length] == ',') {
            return line + length;
        }
    }
    return NULL;
}

void baseline_compare(const struct report *report, struct result *result,
                      const struct session *session)
{
    const char *path = session->options->baseline;
    const struct timing *now = &result->timing;
    struct timing then;
    char key[1024];
    result_key(result, session, key, sizeof key);
    const char *row = find_row(report->baseline, key);
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
