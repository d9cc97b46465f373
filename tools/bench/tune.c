/* SPDX-License-Identifier: Apache-2.0 */
#include "tune.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "common/cache_lines.h"
#include "common/command.h"
#include "common/device.h"
#include "common/find.h"
#include "common/names.h"
#include "host/conformance.h"
#include "host/measurement.h"
#include "support/client.h"
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

#define TOO_SLOW 4.0 /* times the fastest: not measured in larger buckets */
#define BUCKETS 3

/* Requests, and keys or, in prefill, queries of each; small ones first. */
static const int32_t cpu_buckets[2][BUCKETS][2] = {{{1, 64}, {1, 512}, {1, 2048}},
                                                   {{1, 512}, {1, 4096}, {8, 1024}}};
static const int32_t gpu_buckets[2][BUCKETS][2] = {{{1, 512}, {1, 4096}, {4, 2048}},
                                                   {{1, 4096}, {32, 2048}, {8, 16384}}};

struct tuned {
    const struct model_layer *layer; /* the first of the sort */
    int32_t index, num_layers;
    int32_t phase;
    char note[160];                    /* why it is not measured, or what of it */
    bool left_out[MAX_TUNED_BACKENDS]; /* refused, or too slow */
    int32_t results[BUCKETS][2];       /* first and end in the report */
};

static void sort_key(const struct model_layer *layer, const char *kv_dtype, char *key)
{
    measurement_shape(&layer->desc, dtype_name(layer->desc.dtype), kv_dtype, key);
}

/* The rule of a recurrent layer, as --shape numbers it; -1: it has no number. */
static int32_t rule_of(const struct model_layer *layer)
{
    const struct attn_recurrent_rule *rule = &layer->rule;
    return rule->ext.id == 0                          ? 0
           : rule->rule == ATTN_RULE_GATED_DELTA      ? (rule->gate_per_channel ? 1 : 0)
           : rule->gate == ATTN_GATE_CONSTANT         ? 3
           : rule->write_gate == ATTN_WRITE_GATE_STEP ? 2
                                                      : -1;
}

/* The text of --shape for a layer in a bucket; NULL, or why there is no such shape. A prefill finds
 * its few inputs in the caches, as after a projection; a decode does not find its keys there. */
static const char *shape_of(const struct model_layer *layer, int32_t phase, const int32_t bucket[2],
                            char *text, size_t size)
{
    const struct attn_layer_desc *d = &layer->desc;
    const struct attn_mla_desc *mla = &layer->mla;
    const struct attn_recurrent_desc *gdn = &layer->gdn;
    const bool prefill = phase == ATTN_PHASE_PREFILL;
    if (d->kind == ATTN_LAYER_RECURRENT) {
        const int32_t rule = rule_of(layer);
        snprintf(text, size,
                 "gdn:r=%d,s=%d,hk=%d,hv=%d,dk=%d,dv=%d,conv=%d,rule=%d,state_bits=%d,rotate=%d",
                 bucket[0], prefill ? bucket[1] : 1, gdn->num_k_heads, gdn->num_v_heads,
                 gdn->head_size_k, gdn->head_size_v, gdn->conv_width, rule,
                 gdn->state_dtype == ATTN_DTYPE_BF16 ? 16 : 32, !prefill);
        return rule < 0 ? "no shape has its rule" : NULL;
    }
    if (d->kind == ATTN_LAYER_MLA) {
        char topk[32] = "";
        if (mla->topk > 0) {
            snprintf(topk, sizeof topk, ",topk=%d", mla->topk);
        }
        snprintf(text, size, "mla%s:r=%d,l=%d,hq=%d,lora=%d,rope=%d,nope=%d,dv=%d,absorb=%d%s",
                 mla->topk > 0 ? "_sparse" : "", bucket[0], bucket[1], d->num_q_heads,
                 mla->kv_lora_rank, mla->qk_rope_head_dim, mla->qk_nope_head_dim, mla->v_head_dim,
                 mla->absorb_in_core, topk);
        return prefill ? "no shape is the prefill of MLA" : NULL;
    }
    snprintf(text, size,
             "%s:r=%d,%s=%d,hq=%d,hkv=%d,d=%d,dv=%d,window=%d,chunk=%d,softcap=%g,"
             "sinks=%d,alibi=%d,rotate=%d",
             phase_names[phase], bucket[0], prefill ? "s" : "l", bucket[1], d->num_q_heads,
             d->num_kv_heads, d->head_size, d->head_size_v, d->has_window ? d->window_left + 1 : 0,
             d->chunk_size, (double)d->soft_cap, d->has_sinks, d->alibi, !prefill);
    return d->kind != ATTN_LAYER_DECODER ? "no shape is of its kind" : NULL;
}

static void add_sort(struct tuning *tuning, int32_t index)
{
    static const int32_t any[2] = {1, 8};
    const struct model_layer *layer = &tuning->config.layers[index];
    char key[MEASUREMENT_SHAPE_SIZE], other[MEASUREMENT_SHAPE_SIZE], text[256];
    sort_key(layer, "", key);
    for (int32_t i = 0; i < tuning->count; i++) {
        sort_key(tuning->items[i].layer, "", other);
        if (strcmp(key, other) == 0) {
            tuning->items[i].num_layers++;
            tuning->items[i + 1].num_layers++; /* the other phase stands next to it */
            return;
        }
    }
    tuning->items =
        command_realloc(tuning->items, (size_t)tuning->count + 2, sizeof *tuning->items);
    for (int32_t phase = 0; phase <= ATTN_PHASE_DECODE; phase++) {
        struct tuned *item = &tuning->items[tuning->count++];
        *item = (struct tuned){.layer = layer, .index = index, .num_layers = 1, .phase = phase};
        const char *why = shape_of(layer, phase, any, text, sizeof text);
        snprintf(item->note, sizeof item->note, "%s", why != NULL ? why : "");
    }
}

attn_status tuning_init(struct tuning *tuning, struct options *options, struct attn_error *error)
{
    TRY(model_config_read(&tuning->config, options->model, error));
    model_config_warn(&tuning->config, "attn-bench", options->model);
    for (int32_t i = 0; i < tuning->config.num_layers; i++) {
        add_sort(tuning, i);
    }
    options->dtype = tuning->config.layers[0].desc.dtype;
    options->budget = options->seconds / (8.0 * tuning->count * BUCKETS);
    return ATTN_OK;
}

void tuning_finish(struct tuning *tuning)
{
    free(tuning->items);
    model_config_finish(&tuning->config);
    *tuning = (struct tuning){.count = 0};
}

/* Takes the results from `first` on that a refused backend has out of the report, and leaves
 * backends out that were refused or are too slow. False: a time's spread is above `max_spread`
 * percent. */
static bool judge(struct tuned *item, struct report *report, int32_t first, const int32_t *indices,
                  int32_t max_spread)
{
    double fastest = INFINITY;
    bool quiet = true;
    int32_t kept = first;
    for (int32_t i = first; i < report->count; i++) {
        const struct result *r = &report->results[i];
        fastest = r->error[0] == '\0' ? fmin(fastest, r->timing.time_us) : fastest;
        quiet &= r->error[0] != '\0' || 100 * r->timing.spread <= max_spread;
    }
    for (int32_t i = first; i < report->count; i++) {
        struct result *r = &report->results[i];
        const bool refused = json_count(r->reasons) > 0;
        item->left_out[indices[i - first]] =
            refused || r->error[0] != '\0' || r->timing.time_us > TOO_SLOW * fastest;
        if (refused) {
            json_destroy(r->reasons);
        } else {
            report->results[kept++] = *r;
        }
    }
    report->count = kept;
    return quiet;
}

int32_t tune_backends(const struct session *session, const bool *left_out, int32_t most,
                      char names[][BACKEND_SIZE], int32_t *indices)
{
    int32_t count = 0;
    const char *wanted = session->options->backends[0];
    const int32_t all = session->api->backend_count(session->runtime);
    const int32_t known = left_out == NULL || all < MAX_TUNED_BACKENDS ? all : MAX_TUNED_BACKENDS;
    for (int32_t b = 0; b < known && count < most; b++) {
        const struct attn_backend_caps *caps = backend_caps(session->api, session->runtime, b);
        const struct attn_device *device = &session->device.device;
        if ((left_out == NULL || !left_out[b]) &&
            memcmp(&caps->device, device, sizeof *device) == 0 &&
            (wanted == NULL || backend_is_named(caps, wanted))) {
            backend_text(caps, names[count], sizeof names[count]);
            indices[count++] = b;
        }
    }
    return count;
}

static void measure_bucket(struct tuned *item, int32_t bucket, const int32_t sizes[2],
                           const struct session *session, struct report *report,
                           tune_measure *measure, void *user)
{
    char text[256], message[512], names[MAX_BACKENDS][BACKEND_SIZE];
    const char *backends[MAX_BACKENDS];
    int32_t indices[MAX_BACKENDS];
    struct shape_list shapes = {.count = 0};
    shape_of(item->layer, item->phase, sizes, text, sizeof text);
    if (!shapes_parse(&shapes, text, message, sizeof message)) {
        snprintf(item->note, sizeof item->note, "%.150s", message);
        return;
    }
    const int32_t first = report->count;
    bool quiet = false;
    /* a bucket whose times spread further is measured twice, then dropped */
    for (int32_t attempt = 0; attempt < 2 && !quiet; attempt++) {
        const int32_t count = tune_backends(session, item->left_out, MAX_BACKENDS, names, indices);
        for (int32_t i = 0; i < count; i++) {
            backends[i] = names[i];
        }
        while (report->count > first) { /* a noisy attempt left them */
            json_destroy(report->results[--report->count].reasons);
        }
        if (count > 0) {
            measure(user, &shapes.shapes[0], backends, count);
        }
        quiet = judge(item, report, first, indices, session->options->max_spread);
    }
    for (int32_t i = first; i < report->count && !quiet; i++) {
        report->results[i].rank_shape[0] = '\0';
        snprintf(item->note, sizeof item->note, "%dx%d: spread of %.0f%%, not kept", sizes[0],
                 sizes[1], 100 * report->results[i].timing.spread);
    }
    item->results[bucket][0] = first;
    item->results[bucket][1] = report->count;
    shapes_finish(&shapes);
}

void tuning_run(struct tuning *tuning, const struct session *session, struct report *report,
                tune_measure *measure, void *user)
{
    const double end = seconds_of(CLOCK_MONOTONIC) + session->options->seconds;
    const bool cpu = session->device.device.type == ATTN_DEVICE_CPU;
    for (int32_t bucket = 0; bucket < BUCKETS; bucket++) {
        for (int32_t i = 0; i < tuning->count; i++) {
            struct tuned *item = &tuning->items[i];
            const int32_t *sizes =
                cpu ? cpu_buckets[item->phase][bucket] : gpu_buckets[item->phase][bucket];
            const bool repeats = /* a state is as large whatever came before */
                bucket > 0 && item->layer->desc.kind == ATTN_LAYER_RECURRENT &&
                item->phase == ATTN_PHASE_DECODE && sizes[0] == sizes[-2];
            const bool skipped = bucket == 0 ? item->note[0] != '\0' /* no shape is like it */
                                             : item->results[0][1] == item->results[0][0];
            if (skipped || repeats) {
                continue;
            }
            if (bucket > 0 && seconds_of(CLOCK_MONOTONIC) > end) {
                snprintf(item->note, sizeof item->note, "no time was left for %dx%d", sizes[0],
                         sizes[1]);
            } else {
                measure_bucket(item, bucket, sizes, session, report, measure, user);
            }
        }
    }
}

/* The times of two backends over the buckets that both have: geometric means. */
static int32_t mean_times(const struct tuned *item, const struct report *report, const char *a,
                          const char *b, double times[2])
{
    double sums[2] = {0, 0};
    int32_t count = 0;
    for (int32_t k = 0; k < BUCKETS; k++) {
        double found[2] = {0, 0};
        for (int32_t i = item->results[k][0]; i < item->results[k][1]; i++) {
            const struct result *r = &report->results[i];
            if (r->rank_shape[0] != '\0' && r->error[0] == '\0') {
                found[0] = strcmp(r->backend, a) == 0 ? r->timing.time_us : found[0];
                found[1] = strcmp(r->backend, b) == 0 ? r->timing.time_us : found[1];
            }
        }
        if (found[0] > 0 && found[1] > 0) {
            sums[0] += log(found[0]);
            sums[1] += log(found[1]);
            count++;
        }
    }
    times[0] = count > 0 ? exp(sums[0] / count) : 0;
    times[1] = count > 0 ? exp(sums[1] / count) : 0;
    return count;
}

/* The name that a selection takes for each item, by declared ranks or by measured times. */
static attn_status choose(const struct tuning *tuning, const struct session *session, bool measured,
                          char (*names)[BACKEND_SIZE], struct attn_error *error)
{
    const struct attn_api *api = session->api;
    const struct attn_runtime_options settings =
        SIZED(attn_runtime_options, .cache_dir = measured ? NULL : "",
              .num_threads = session->options->threads);
    const struct attn_select_options options =
        SIZED(attn_select_options, .device = session->device.device, .backend = "",
              .flags = ATTN_SELECT_KEEP_UNSERVED);
    attn_runtime *runtime = NULL;
    attn_assignment *assignment = NULL;
    attn_status status = api->runtime_create(&settings, &runtime, error);
    status = status
                 ? status
                 : model_config_select(&tuning->config, api, runtime, &options, &assignment, error);
    for (int32_t i = 0; i < tuning->count && status == ATTN_OK; i++) {
        const struct tuned *item = &tuning->items[i];
        snprintf(names[i], sizeof names[i], "%s",
                 choice_of(api, assignment, item->index, item->phase).name);
    }
    api->assignment_destroy(assignment);
    api->runtime_destroy(runtime);
    return status;
}

attn_status tuning_compare(const struct tuning *tuning, const struct session *session,
                           struct report *report, struct attn_error *error)
{
    char(*declared)[BACKEND_SIZE] = command_calloc((size_t)tuning->count, sizeof *declared);
    char(*measured)[BACKEND_SIZE] = command_calloc((size_t)tuning->count, sizeof *measured);
    attn_status status = choose(tuning, session, false, declared, error);
    status = status ? status : choose(tuning, session, true, measured, error);
    report->choices = status == ATTN_OK ? json_array() : NULL;
    for (int32_t i = 0; i < tuning->count && status == ATTN_OK; i++) {
        const struct tuned *item = &tuning->items[i];
        struct json *row = json_object();
        char shape[MEASUREMENT_SHAPE_SIZE];
        double times[2];
        sort_key(item->layer, "auto", shape);
        const int32_t buckets = mean_times(item, report, declared[i], measured[i], times);
        json_add(row, "layer", json_string(shape));
        json_add(row, "layers", json_number(item->num_layers));
        json_add(row, "phase", json_string(phase_names[item->phase]));
        json_add(row, "declared", json_string(declared[i]));
        json_add(row, "declared_us", json_number(times[0]));
        json_add(row, "measured", json_string(measured[i]));
        json_add(row, "measured_us", json_number(times[1]));
        json_add(row, "buckets", json_number(buckets));
        json_add(row, "gain", json_number(buckets > 0 ? times[0] / times[1] - 1 : 0));
        json_add(row, "note", json_string(item->note));
        json_push(report->choices, row);
    }
    free(declared);
    free(measured);
    return status;
}
