/* SPDX-License-Identifier: Apache-2.0 */
/* `dispatch`: a run through the core next to calls of the kernels alone, in time and in
 * instructions. */
#include "without_core.h"

#include <linux/perf_event.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "common/command.h"
#include "common/find.h"
#include "common/names.h"
#include "support/client.h"

#define COUNTED_CALLS 1000

enum way { WAY_RUN, WAY_DIRECT, NUM_WAYS };
static const char *const way_names[] = {"run", "direct"};

attn_status plugin_kernels_open(struct plugin_kernels *opened, const struct session *session,
                                int32_t index, struct attn_error *error)
{
    const struct attn_backend_caps *caps = backend_caps(session->api, session->runtime, index);
    const char *file = backend_file(session->api, session->runtime, index);
    const int32_t num_threads = session->num_threads > 0 ? session->num_threads : 1;
    *opened = (struct plugin_kernels){.services.log_level = ATTN_LOG_WARN};
    TRY(client_plugin(file, ATTN_ABI_VERSION_MIN, ATTN_ABI_VERSION, &opened->plugin, error));
    host_init(&opened->host, &opened->services, num_threads);
    opened->services.pool = pool_create(&opened->host, num_threads);
    if (opened->services.pool == NULL) {
        return command_error(error, ATTN_ERROR_OUT_OF_MEMORY, "", "%d threads cannot be started",
                             num_threads);
    }
    return opened->plugin->create(&SIZED(attn_create_args, .host = &opened->host,
                                         .backend = caps->name, .variant = caps->variant,
                                         .device = caps->device),
                                  &opened->instance, &opened->kernels, error);
}

void plugin_kernels_close(struct plugin_kernels *opened)
{
    if (opened->instance != NULL) {
        opened->plugin->destroy(opened->instance);
    }
    pool_destroy(opened->services.pool);
    *opened = (struct plugin_kernels){.plugin = NULL};
}

struct direct_calls {
    struct plugin_kernels plugin;
    struct attn_layer_desc layer;
    struct attn_limits limits;
    struct attn_attend_args attend;
    struct attn_write_kv_args write;
    void *schedule_host;
    struct work work;
};

static attn_status call_kernels(void *user, int32_t copy, struct attn_error *error)
{
    struct direct_calls *calls = user;
    const struct attn_kernels *kernels = calls->plugin.kernels;
    attn_status status = ATTN_OK;
    if (calls->write.k != NULL) {
        status = kernels->write_kv(&calls->write, error);
    }
    return status ? status : kernels->attend(&calls->attend, error);
}

static void set_arguments(struct direct_calls *calls, const struct measured *measured)
{
    const struct attn_step_io *io = &measured->io[0].step.io;
    const struct attn_batch *batch = &measured->batch;
    struct attn_layer_desc *layer = &calls->layer;
    *layer = measured->layer.desc;
    layer->name = measured->names[0];
    layer->kv_dtype = measured->choice.kv_dtype;
    layer->block_size = measured->spec.block_size;
    layer->head_size_v = layer->head_size_v > 0 ? layer->head_size_v : layer->head_size;
    calls->attend =
        SIZED(attn_attend_args, .instance = calls->plugin.instance, .layer = layer,
              .params = measured->params, .batch = batch, .k_cache = &measured->io[0].k_view,
              .v_cache = &measured->io[0].v_view, .stream = measured->session->stream,
              .flags = ATTN_RUN_NO_WRITE, .phase = measured->phase, .q = io->q, .k = io->k,
              .v = io->v, .out = io->out);
    calls->limits = client_limits(batch->num_reqs, batch->num_tokens, batch->max_query_len,
                                  batch->max_seq_len, (int32_t)measured->table_stride);
    if (measured->shape.value[PARAMETER_WRITE] != 0) {
        calls->write = SIZED(attn_write_kv_args, .instance = calls->plugin.instance, .layer = layer,
                             .params = measured->params, .k_cache = calls->attend.k_cache,
                             .v_cache = calls->attend.v_cache, .slot_mapping = batch->slot_mapping,
                             .num_slots = batch->num_slots, .stream = measured->session->stream,
                             .k = io->k, .v = io->v);
    }
}

/* What the core does at bind and plan, for the one layer. */
static attn_status plan_calls(struct direct_calls *calls, struct memory *memory,
                              struct attn_error *error)
{
    const struct attn_kernels *kernels = calls->plugin.kernels;
    struct attn_attend_args *attend = &calls->attend;
    struct attn_schedule_size size = {.struct_size = sizeof size};
    TRY(planned_prepare(kernels, attend, &calls->limits, &size, error));
    attend->limits = &calls->limits;
    attend->schedule_host = calls->schedule_host = command_calloc(size.host_bytes + 1, 1);
    attend->schedule_host_bytes = size.host_bytes;
    attend->workspace = memory_take(memory, size.device_bytes + 1);
    attend->workspace_bytes = size.device_bytes;
    attend->scratch = memory_take(memory, size.scratch_bytes + 1);
    attend->scratch_bytes = size.scratch_bytes;
    if (memory->failed) {
        return memory_refused(error);
    }
    struct attn_attend_args args = *attend;
    args.q = args.k = args.v = args.out = NULL;
    return kernels->schedule != NULL ? kernels->schedule(&args, ATTN_PLAN_EAGER, error) : ATTN_OK;
}

static void destroy(void *user)
{
    struct direct_calls *calls = user;
    if (calls->plugin.kernels != NULL) {
        planned_release(calls->plugin.kernels, &calls->attend);
    }
    plugin_kernels_close(&calls->plugin);
    free(calls->schedule_host);
    free(calls);
}

attn_status direct_calls_create(const struct work **work, struct measured *measured,
                                struct attn_error *error)
{
    struct direct_calls *calls = command_calloc(1, sizeof *calls);
    calls->work = (struct work){
        .host_only = true, .num_copies = 1, .run = call_kernels, .destroy = destroy, .user = calls};
    attn_status status =
        plugin_kernels_open(&calls->plugin, measured->session, measured->choice.backend, error);
    if (status == ATTN_OK) {
        set_arguments(calls, measured);
        status = plan_calls(calls, &measured->memory, error);
    }
    return work_made(&calls->work, status, work);
}

/* COUNTED_CALLS calls. Not inlined: callgrind counts inside it by its name. */
attn_status __attribute__((noinline)) instructions_run(const struct work *work)
{
    attn_status status = ATTN_OK;
    for (int32_t i = 0; i < COUNTED_CALLS && status == ATTN_OK; i++) {
        status = work->run(work->user, 0, NULL);
    }
    return status;
}

/* Instructions of one call in this thread; -1: there is no counter. */
static double count_here(const struct work *work)
{
    double result = -1;
    struct perf_event_attr attributes = {.size = sizeof attributes,
                                         .type = PERF_TYPE_HARDWARE,
                                         .config = PERF_COUNT_HW_INSTRUCTIONS,
                                         .disabled = 1,
                                         .exclude_kernel = 1,
                                         .exclude_hv = 1};
    int counter = (int)syscall(SYS_perf_event_open, &attributes, 0, -1, -1, 0);
    uint64_t count = 0;
    if (counter < 0) {
        return -1;
    }
    ioctl(counter, PERF_EVENT_IOC_ENABLE, 0);
    attn_status status = instructions_run(work);
    ioctl(counter, PERF_EVENT_IOC_DISABLE, 0);
    if (status == ATTN_OK && read(counter, &count, sizeof count) == (ssize_t)sizeof count) {
        result = (double)count / COUNTED_CALLS;
    }
    close(counter);
    return result;
}

/* The same by callgrind of `attn-bench --child`, without a variant: valgrind shows a processor that
 * lacks the newest instructions, and what the core adds does not depend on the variant. */
static double count_in_process(const struct result *result, const struct session *session,
                               enum way way, char *why, size_t size)
{
    char path[4096], name[160], shape[512], line[1024];
    snprintf(name, sizeof name, "%.*s", (int)strcspn(result->backend, "@"), result->backend);
    shape_text(&result->shape, shape, sizeof shape);
    double collected = -1;
    const ssize_t length = readlink("/proc/self/exe", path, sizeof path - 1);
    path[length > 0 ? length : 0] = '\0';
    /* Names come to the shell as variables, in which nothing is a command. */
    setenv("ATTN_BENCH", path, 1);
    setenv("ATTN_BENCH_BACKEND", name, 1);
    snprintf(line, sizeof line,
             "exec valgrind --tool=callgrind --callgrind-out-file=/dev/null"
             " --toggle-collect=instructions_run \"$ATTN_BENCH\" --child %s"
             " --backend \"$ATTN_BENCH_BACKEND\" --shape %s --dtype %s --threads 1 2>&1",
             way_names[way], shape, dtype_name(session->options->dtype));
    fflush(NULL);
    FILE *output = popen(line, "r");
    snprintf(why, size, output != NULL ? "valgrind counted nothing" : "valgrind cannot be started");
    while (output != NULL && fgets(line, sizeof line, output) != NULL) {
        const char *at = strstr(line, "Collected : ");
        if (at != NULL) {
            collected = strtod(at + strlen("Collected : "), NULL);
        } else if (strncmp(line, "attn-bench: ", 12) == 0) {
            snprintf(why, size, "%.*s", (int)strcspn(line + 12, "\n"), line + 12);
        }
    }
    const int status = output != NULL ? pclose(output) : -1;
    if (WIFEXITED(status) && WEXITSTATUS(status) == 127) {
        snprintf(why, size, "valgrind is not installed");
    }
    return status == 0 && collected > 0 ? collected / COUNTED_CALLS : -1;
}

static void add_instructions(struct result *result, const struct session *session,
                             const struct work *const works[NUM_WAYS])
{
    struct json *item = result->dispatch;
    double count[NUM_WAYS];
    char why[256] = "";
    const char *by = "perf_event";
    for (enum way way = WAY_RUN; way < NUM_WAYS; way++) {
        count[way] = count_here(works[way]);
        if (count[way] < 0) {
            by = "callgrind";
            count[way] = count_in_process(result, session, way, why, sizeof why);
        }
    }
    if (count[WAY_RUN] >= 0 && count[WAY_DIRECT] >= 0) {
        json_add(item, "counted_by", json_string(by));
        json_add(item, "run_instructions", json_number(count[WAY_RUN]));
        json_add(item, "direct_instructions", json_number(count[WAY_DIRECT]));
        json_add(item, "added_instructions", json_number(count[WAY_RUN] - count[WAY_DIRECT]));
    } else {
        json_add(item, "added_instructions", json_null());
        json_add(item, "not_counted", json_string(why));
    }
}

void dispatch_compare(struct result *result, const struct session *session,
                      const struct contender *run, const struct contender *direct)
{
    result->timing.floor_us = direct->timing.time_us;
    result->timing.ratio_to_floor = run->timing.time_us / direct->timing.time_us;
    result->timing.ratio_to_first = 0;
    result->timing.bound = "direct call";
    result->dispatch = json_object();
    json_add(result->dispatch, "run_ns", json_number(1e3 * run->timing.time_us));
    json_add(result->dispatch, "direct_ns", json_number(1e3 * direct->timing.time_us));
    json_add(result->dispatch, "added_ns",
             json_number(1e3 * (run->timing.time_us - direct->timing.time_us)));
    add_instructions(result, session, (const struct work *const[]){run->work, direct->work});
}

static attn_status count_calls(struct session *session, const struct options *options,
                               struct attn_error *error)
{
    struct measured measured;
    TRY(session_init(session, options, false, error));
    TRY(measured_init(&measured, session, &options->shapes.shapes[0], options->backends[0], NULL,
                      error));
    const struct work *work = &measured.work;
    attn_status status = strcmp(options->child, way_names[WAY_DIRECT]) == 0
                             ? direct_calls_create(&work, &measured, error)
                             : ATTN_OK;
    status = status ? status : work->run(work->user, 0, error);
    status = status ? status : instructions_run(work);
    if (work != NULL && work->destroy != NULL) {
        work->destroy(work->user);
    }
    measured_finish(&measured);
    return status;
}

int dispatch_child(const struct options *options)
{
    struct attn_error error = ATTN_ERROR_INIT;
    struct session session;
    const attn_status status = count_calls(&session, options, &error);
    session_finish(&session);
    return status == ATTN_OK ? EXIT_SUCCESS : command_failed("attn-bench", "--child", &error);
}
