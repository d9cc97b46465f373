/* SPDX-License-Identifier: Apache-2.0 */
#include "report.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/names.h"
#include "common/number.h"

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
        cJSON_Delete(report->results[i].reasons);
        cJSON_Delete(report->results[i].dispatch);
    }
    free(report->results);
    *report = (struct report){.results = NULL};
}

void report_add(struct report *report, const struct result *result)
{
    struct result *larger = realloc(report->results, sizeof *larger * (size_t)(report->count + 1));
    if (larger == NULL) {
        report->failed = true;
        cJSON_Delete(result->reasons);
        cJSON_Delete(result->dispatch);
        return;
    }
    report->results = larger;
    report->results[report->count++] = *result;
}

bool report_all_good(const struct report *report)
{
    for (int32_t i = 0; i < report->count; i++) {
        if (report->results[i].error[0] != '\0' || report->results[i].timing.failed) {
            return false;
        }
    }
    return !report->failed && report->count > 0;
}

static void device_text(const struct session *session, char *text, size_t size)
{
    const char *kind = session->device.device.type == ATTN_DEVICE_CPU    ? "cpu"
                       : session->device.device.type == ATTN_DEVICE_CUDA ? "cuda"
                       : session->device.device.type == ATTN_DEVICE_ROCM ? "rocm"
                                                                         : "device";
    snprintf(text, size, "%s:%d", kind, session->device.device.id);
}

static cJSON *ceilings_json(const struct session *session)
{
    cJSON *object = cJSON_CreateObject(), *kernels = cJSON_CreateObject();
    char device[32];
    device_text(session, device, sizeof device);
    cJSON_AddStringToObject(object, "device", device);
    cJSON_AddStringToObject(object, "device_name", session->device_name);
    cJSON_AddNumberToObject(object, "threads", session->num_threads);
    for (enum ceiling c = 0; c < CEILING_COUNT && session->ceilings != NULL; c++) {
        double best = ceilings_best(session->ceilings, c);
        if (best > 0) {
            cJSON_AddNumberToObject(object, ceiling_names[c].name, ceiling_names[c].factor * best);
            cJSON_AddStringToObject(kernels, ceiling_names[c].name,
                                    ceilings_kernel(session->ceilings, c));
        }
    }
    cJSON_AddItemToObject(object, "kernels", kernels);
    return object;
}

static cJSON *parameters_json(const struct shape *shape)
{
    cJSON *object = cJSON_CreateObject();
    for (enum parameter p = 0; p < PARAMETER_COUNT; p++) {
        char text[32];
        if (!shape_takes(shape->kind, p)) {
            continue;
        }
        if (p == PARAMETER_LAYOUT) {
            parameter_text(shape, p, text, sizeof text);
            cJSON_AddStringToObject(object, parameter_name(p), text);
        } else {
            cJSON_AddNumberToObject(object, parameter_name(p), shape->value[p]);
        }
    }
    return object;
}

static void add_timing(cJSON *item, const struct timing *timing)
{
    cJSON_AddNumberToObject(item, "time_us", timing->time_us);
    cJSON_AddNumberToObject(item, "spread", timing->spread);
    cJSON_AddNumberToObject(item, "gb_s", timing->gb_s);
    cJSON_AddNumberToObject(item, "tflop_s", timing->tflop_s);
    cJSON_AddNumberToObject(item, "floor_us", timing->floor_us);
    cJSON_AddNumberToObject(item, "ratio_to_floor", timing->ratio_to_floor);
    cJSON_AddStringToObject(item, "bound", timing->bound);
    cJSON_AddNumberToObject(item, "samples", timing->num_samples);
    cJSON_AddNumberToObject(item, "calls", (double)timing->num_calls);
    cJSON_AddBoolToObject(item, "failed", timing->failed);
}

static cJSON *result_json(const struct result *result, const struct session *session)
{
    cJSON *item = cJSON_CreateObject();
    char device[32];
    device_text(session, device, sizeof device);
    cJSON_AddStringToObject(item, "shape", shape_name(&result->shape));
    cJSON_AddItemToObject(item, "parameters", parameters_json(&result->shape));
    cJSON_AddStringToObject(item, "dtype", number_name(session->options->dtype));
    cJSON_AddStringToObject(item, "kv_dtype", kv_dtype_name(result->kv_dtype));
    if (result->backend[0] != '\0') {
        cJSON_AddStringToObject(item, "backend", result->backend);
    } else {
        cJSON_AddNullToObject(item, "backend");
    }
    cJSON_AddStringToObject(item, "device", device);
    cJSON_AddNumberToObject(item, "threads", session->num_threads);
    if (result->error[0] == '\0') {
        add_timing(item, &result->timing);
    } else {
        cJSON_AddStringToObject(item, "error", result->error);
    }
    if (result->reasons != NULL && cJSON_GetArraySize(result->reasons) > 0) {
        cJSON_AddItemToObject(item, "reasons", cJSON_Duplicate(result->reasons, true));
    }
    if (result->dispatch != NULL) {
        cJSON_AddItemToObject(item, "dispatch", cJSON_Duplicate(result->dispatch, true));
    }
    return item;
}

bool report_json(const struct report *report, const struct session *session)
{
    cJSON *root = cJSON_CreateObject(), *results = cJSON_CreateArray();
    cJSON_AddItemToObject(root, "ceilings", ceilings_json(session));
    cJSON_AddItemToObject(root, "results", results);
    if (report->ranks_file[0] != '\0') {
        cJSON_AddStringToObject(root, "ranks_file", report->ranks_file);
    }
    for (int32_t i = 0; i < report->count; i++) {
        cJSON_AddItemToArray(results, result_json(&report->results[i], session));
    }
    char *text = cJSON_Print(root);
    cJSON_Delete(root);
    if (text == NULL) {
        return false;
    }
    puts(text);
    cJSON_free(text);
    return true;
}

static void print_dispatch(const cJSON *dispatch)
{
    const cJSON *item, *value;
    cJSON_ArrayForEach(item, dispatch)
    {
        if (!cJSON_IsObject(item)) {
            continue;
        }
        printf("  %-13s", item->string);
        cJSON_ArrayForEach(value, item)
        {
            if (cJSON_IsNumber(value)) {
                printf(" %s %.6g", value->string, value->valuedouble);
            } else if (cJSON_IsString(value)) {
                printf(" %s %s", value->string, value->valuestring);
            }
        }
        putchar('\n');
    }
}

void report_text(const struct report *report, const struct session *session)
{
    char text[512];
    device_text(session, text, sizeof text);
    printf("%s %s", text, session->device_name);
    if (session->num_threads > 0) {
        printf(", %d thread%s", session->num_threads, session->num_threads > 1 ? "s" : "");
    }
    for (enum ceiling c = 0; c < CEILING_COUNT && session->ceilings != NULL; c++) {
        double best = ceilings_best(session->ceilings, c);
        if (best > 0) {
            printf(", %.4g %s", ceiling_names[c].factor * best, ceiling_names[c].unit);
        }
    }
    printf("\n%-36s %-24s %12s %7s %9s %9s %11s %7s\n", "shape", "backend", "time us", "spread",
           "GB/s", "TFLOP/s", "floor us", "ratio");
    for (int32_t i = 0; i < report->count; i++) {
        const struct result *result = &report->results[i];
        const struct timing *t = &result->timing;
        shape_text(&result->shape, text, sizeof text);
        if (result->error[0] != '\0') {
            printf("%-36s %-24s %s\n", text, result->backend, result->error);
            continue;
        }
        printf("%-36s %-24s %12.2f %6.1f%% %9.2f %9.4f %11.2f %7.2f%s\n", text, result->backend,
               t->time_us, 100 * t->spread, t->gb_s, t->tflop_s, t->floor_us, t->ratio_to_floor,
               t->failed ? "  FAILED: under the floor" : "");
        if (result->dispatch != NULL) {
            print_dispatch(result->dispatch);
        }
    }
    if (report->ranks_file[0] != '\0') {
        printf("selections go by these times from now on: %s\n", report->ranks_file);
    }
}

void report_csv(const struct report *report, const struct session *session)
{
    char device[32];
    device_text(session, device, sizeof device);
    fputs("shape", stdout);
    for (enum parameter p = 0; p < PARAMETER_COUNT; p++) {
        printf(",%s", parameter_name(p));
    }
    puts(",dtype,kv_dtype,backend,device,threads,time_us,spread,gb_s,tflop_s,floor_us,"
         "ratio_to_floor,bound,failed");
    for (int32_t i = 0; i < report->count; i++) {
        const struct result *result = &report->results[i];
        const struct timing *t = &result->timing;
        fputs(shape_name(&result->shape), stdout);
        for (enum parameter p = 0; p < PARAMETER_COUNT; p++) {
            char value[32] = "";
            if (shape_takes(result->shape.kind, p)) {
                parameter_text(&result->shape, p, value, sizeof value);
            }
            printf(",%s", value);
        }
        printf(",%s,%s,%s,%s,%d", number_name(session->options->dtype),
               kv_dtype_name(result->kv_dtype), result->backend, device, session->num_threads);
        if (result->error[0] == '\0') {
            printf(",%.9g,%.4g,%.6g,%.6g,%.9g,%.6g,%s,%d\n", t->time_us, t->spread, t->gb_s,
                   t->tflop_s, t->floor_us, t->ratio_to_floor, t->bound, t->failed);
        } else {
            puts(",,,,,,,,1");
        }
    }
}
