/* SPDX-License-Identifier: Apache-2.0 */
#include "dispatch.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/command.h"
#include "common/library.h"
#include "count_instructions.h"
#include "dispatch_pair.h"
#include "common/names.h"

#define COUNTED_CALLS 1000
#define WARM_CALLS 1 /* by dispatch_init, counted in a child, too */
#define ROUNDS 201
#define CALLS_IN_ROUND 50 /* few enough for a stream's queue */
#define SELECTIONS 21
#define STARTS 9

static const char *const child_names[] = {"direct", "run", "direct_write", "run_write"};
static const char *const functions[] = {"dispatch_direct_calls", "dispatch_run_calls"};

/* Backend without its variant: valgrind shows a processor that lacks the newest instructions, and
 * what the core adds does not depend on the variant. */
static void base_name(char *text, size_t size, const char *backend)
{
    snprintf(text, size, "%.*s", (int)strcspn(backend, "@"), backend);
}

static int64_t count_in_child(const struct session *session, const struct shape *shape,
                              const char *backend, int32_t way, char *why, size_t size)
{
    char name[160], spec[512];
    char *arguments[] = {(char *)"--child",
                         (char *)(uintptr_t)child_names[way],
                         (char *)"--backend",
                         name,
                         (char *)"--shape",
                         spec,
                         (char *)"--dtype",
                         (char *)(uintptr_t)dtype_name(session->options->dtype),
                         (char *)"--threads",
                         (char *)"1",
                         NULL};
    base_name(name, sizeof name, backend);
    shape_text(shape, spec, sizeof spec);
    int64_t count = callgrind_count(arguments, functions[way % 2], why, size);
    return count < 0 ? count : count * COUNTED_CALLS / (COUNTED_CALLS + WARM_CALLS);
}

/* Instructions of COUNTED_CALLS calls; -1 and why. */
static int64_t count_way(const struct session *session, struct dispatch_pair *pair, int32_t way,
                         int counter, char *why, size_t size)
{
    if (counter < 0) {
        return count_in_child(session, &pair->measured.shape, pair->measured.backend, way, why,
                              size);
    }
    counter_start(counter);
    attn_status status = way % 2 ? dispatch_run_calls(pair, COUNTED_CALLS)
                                 : dispatch_direct_calls(pair, COUNTED_CALLS);
    int64_t count = counter_stop(counter);
    return status == ATTN_OK ? count : -1;
}

static void add_instructions(struct json *item, const struct session *session,
                             struct dispatch_pair *pair)
{
    char why[256] = "the counter cannot be read";
    int counter = counter_open();
    int32_t first = pair->writes ? 2 : 0;
    int64_t direct = count_way(session, pair, first, counter, why, sizeof why);
    int64_t run = direct >= 0 ? count_way(session, pair, first + 1, counter, why, sizeof why) : -1;
    json_add(item, "counted_by", json_string(counter >= 0 ? "perf_event" : "callgrind"));
    if (run >= 0) {
        json_add(item, "run_instructions", json_number((double)run / COUNTED_CALLS));
        json_add(item, "direct_instructions", json_number((double)direct / COUNTED_CALLS));
        json_add(item, "added_instructions", json_number((double)(run - direct) / COUNTED_CALLS));
    } else {
        json_add(item, "added_instructions", json_null());
        json_add(item, "not_counted", json_string(why));
    }
    if (counter >= 0) {
        counter_close(counter);
    }
}

/* Both ways in turn: what they differ by is far less than what both vary with the machine. */
static void time_pair(struct dispatch_pair *pair, struct timing *timing, double *added_ns)
{
    double run[ROUNDS], direct[ROUNDS], added[ROUNDS];
    for (int32_t i = 0; i < ROUNDS; i++) {
        double begin = now_seconds();
        dispatch_direct_calls(pair, CALLS_IN_ROUND);
        direct[i] = (now_seconds() - begin) / CALLS_IN_ROUND;
        device_wait(&pair->measured.session->device); /* outside: what the host does is timed */
        begin = now_seconds();
        dispatch_run_calls(pair, CALLS_IN_ROUND);
        run[i] = (now_seconds() - begin) / CALLS_IN_ROUND;
        device_wait(&pair->measured.session->device);
        added[i] = run[i] - direct[i];
    }
    double median = quantile(run, ROUNDS, 0.5), floor = quantile(direct, ROUNDS, 0.5);
    timing->time_us = 1e6 * median;
    timing->spread = (quantile(run, ROUNDS, 0.75) - quantile(run, ROUNDS, 0.25)) / median;
    timing->floor_us = 1e6 * floor;
    timing->ratio_to_floor = median / floor;
    timing->num_samples = ROUNDS;
    timing->num_calls = ROUNDS * CALLS_IN_ROUND;
    timing->bound = "direct call";
    *added_ns = 1e9 * quantile(added, ROUNDS, 0.5);
}

static attn_status measure_pair(struct result *result, struct session *session,
                                const struct attn_host *host, const char *backend, bool writes,
                                struct attn_error *error)
{
    struct dispatch_pair pair;
    struct timing timing = {.bound = ""};
    double added_ns;
    attn_status status =
        dispatch_init(&pair, session, host, &result->shape, backend, writes, error);
    if (status != ATTN_OK) {
        return status;
    }
    struct json *item =
        json_add(result->dispatch, writes ? "write_attend" : "attend", json_object());
    time_pair(&pair, &timing, &added_ns);
    json_add(item, "run_ns", json_number(1e3 * timing.time_us));
    json_add(item, "direct_ns", json_number(1e3 * timing.floor_us));
    json_add(item, "added_ns", json_number(added_ns));
    add_instructions(item, session, &pair);
    if (!writes) {
        result->timing = timing;
        memcpy(result->backend, pair.measured.backend, sizeof result->backend);
        result->phase = pair.measured.phase;
        result->kv_dtype = pair.measured.choice.kv_dtype;
    }
    dispatch_finish(&pair);
    return ATTN_OK;
}

/* Layers of a large model, every other one sliding, judged against every backend. */
static attn_status measure_selection(struct json *dispatch, const struct session *session,
                                     int32_t count, struct attn_error *error)
{
    struct attn_layer_desc *layers = calloc((size_t)count, sizeof *layers);
    const struct attn_layer_desc **pointers = calloc((size_t)count, sizeof *pointers);
    char(*names)[32] = calloc((size_t)count, sizeof *names);
    const struct attn_select_options options = {.struct_size = sizeof options,
                                                .device = session->device.device,
                                                .backend = "",
                                                .flags = ATTN_SELECT_KEEP_UNSERVED};
    double times[SELECTIONS];
    attn_status status = layers && pointers && names ? ATTN_OK : memory_refused(error);
    for (int32_t i = 0; i < count && status == ATTN_OK; i++) {
        snprintf(names[i], sizeof names[i], "layer.%d", i);
        layers[i] = (struct attn_layer_desc){.struct_size = sizeof layers[i],
                                             .name = names[i],
                                             .dtype = session->options->dtype,
                                             .num_q_heads = 32,
                                             .num_kv_heads = 8,
                                             .head_size = 128,
                                             .scale = 0.088f,
                                             .causal = 1,
                                             .has_window = i % 2,
                                             .window_left = i % 2 ? 4095 : -1,
                                             .window_right = i % 2 ? 0 : -1};
        pointers[i] = &layers[i];
    }
    for (int32_t i = 0; i < SELECTIONS && status == ATTN_OK; i++) {
        attn_assignment *assignment;
        double begin = now_seconds();
        status =
            session->api->select(session->runtime, &options, pointers, count, &assignment, error);
        times[i] = now_seconds() - begin;
        session->api->assignment_destroy(assignment);
    }
    if (status == ATTN_OK) {
        struct json *item = json_add(dispatch, "selection", json_object());
        json_add(item, "layers", json_number(count));
        json_add(item, "backends", json_number(session->api->backend_count(session->runtime)));
        json_add(item, "ms", json_number(1e3 * quantile(times, SELECTIONS, 0.5)));
    }
    free(names);
    free(pointers);
    free(layers);
    return status;
}

/* Processes of their own, since a plugin is loaded once in a process; the first one fills the
 * cache. */
static void measure_start(struct json *dispatch, const struct session *session)
{
    char *arguments[] = {(char *)"--child", (char *)"start", NULL};
    double times[STARTS];
    int32_t count = 0;
    child_number(arguments);
    for (int32_t i = 0; i < STARTS; i++) {
        double seconds = child_number(arguments);
        if (seconds > 0) {
            times[count++] = seconds;
        }
    }
    struct json *item = json_add(dispatch, "start", json_object());
    json_add(item, "plugins", json_number(session->api->plugin_count(session->runtime)));
    if (count > 0) {
        json_add(item, "ms", json_number(1e3 * quantile(times, count, 0.5)));
    } else {
        json_add(item, "ms", json_null());
    }
}

attn_status dispatch_measure(struct result *result, struct session *session, const char *backend,
                             struct attn_error *error)
{
    struct services *services = services_create(1);
    struct options serial_options = *session->options;
    struct session serial;
    serial_options.threads = 1;
    if (services == NULL) {
        return memory_refused(error);
    }
    attn_status status =
        session_init(&serial, &serial_options, services_host(services), true, error);
    if (status == ATTN_OK) {
        result->dispatch = json_object();
        status = measure_pair(result, &serial, services_host(services), backend, false, error);
        if (status == ATTN_OK) {
            status = measure_pair(result, &serial, services_host(services), backend, true, error);
        }
        if (status == ATTN_OK) {
            status = measure_selection(result->dispatch, session,
                                       shape_int(&result->shape, PARAMETER_LAYERS), error);
        }
        if (status == ATTN_OK) {
            measure_start(result->dispatch, session);
        }
        session_finish(&serial);
    }
    services_destroy(services);
    return status;
}

static int child_start(void)
{
    const struct attn_api *api;
    attn_runtime *runtime;
    struct attn_error error = ATTN_ERROR_INIT;
    double begin = now_seconds();
    attn_status status = library_open(&api, &error);
    status = status == ATTN_OK ? api->runtime_create(NULL, &runtime, &error) : status;
    double elapsed = now_seconds() - begin;
    if (status != ATTN_OK) {
        fprintf(stderr, "attn-bench: start: %s: %s\n", error.field, error.message);
        return EXIT_FAILURE;
    }
    printf("%.9f\n", elapsed);
    api->runtime_destroy(runtime);
    return EXIT_SUCCESS;
}

static int child_count(const struct options *options, int32_t way)
{
    struct attn_error error = ATTN_ERROR_INIT;
    struct services *services = services_create(1);
    struct session session;
    struct dispatch_pair pair;
    attn_status status = ATTN_ERROR_OUT_OF_MEMORY;
    if (services != NULL) {
        status = session_init(&session, options, services_host(services), false, &error);
    }
    if (status == ATTN_OK) {
        status = dispatch_init(&pair, &session, services_host(services), &options->shapes.shapes[0],
                               options->backends[0], way >= 2, &error);
        if (status == ATTN_OK) {
            status = way % 2 ? dispatch_run_calls(&pair, COUNTED_CALLS)
                             : dispatch_direct_calls(&pair, COUNTED_CALLS);
            dispatch_finish(&pair);
        }
        session_finish(&session);
    }
    services_destroy(services);
    if (status != ATTN_OK) {
        fprintf(stderr, "attn-bench: %s: %s\n", error.field, error.message);
    }
    return status == ATTN_OK ? EXIT_SUCCESS : EXIT_FAILURE;
}

int dispatch_child(const struct options *options)
{
    if (strcmp(options->child, "start") == 0) {
        return child_start();
    }
    for (int32_t way = 0; way < 4; way++) {
        if (strcmp(options->child, child_names[way]) == 0) {
            return child_count(options, way);
        }
    }
    fprintf(stderr,
            "attn-bench: --child: '%s' is not start, direct, run, direct_write or run_write\n",
            options->child);
    return EXIT_USAGE;
}
