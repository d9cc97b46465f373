/* SPDX-License-Identifier: Apache-2.0 */
/* attn-bench: how fast a backend is, next to what the machine can do, through the public ABI. */
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common/command.h"
#include "common/find.h"
#include "common/names.h"
#include "without_core.h"
#include "report.h"
#include "measured.h"
#include "tune.h"
#include "host/measurement.h"

/* Outputs of one layer by two libraries differ by less; codes of 8 bits stay well below. */
#define MAX_DIFFERENCE 0.05

/* SIGINT and SIGTERM end the run after the shape that is being measured, so that what was measured
 * is reported. A second SIGINT ends the process; not a second SIGTERM, which `timeout` sends. */
static volatile sig_atomic_t ended_by;

static void end_run(int number)
{
    ended_by = number;
}

static void catch_signals(void)
{
    struct sigaction action = {.sa_handler = end_run, .sa_flags = SA_RESTART};
    sigaction(SIGTERM, &action, NULL);
    action.sa_flags |= (int)SA_RESETHAND;
    sigaction(SIGINT, &action, NULL);
}

static int fail_with(const char *what, const struct attn_error *error)
{
    return command_failed("attn-bench", what, error);
}

static void tell_progress(const struct options *options, int32_t done,
                          const struct bench_shape *shape)
{
    char text[256];
    if (isatty(STDERR_FILENO)) {
        shape_text(shape, text, sizeof text);
        fprintf(stderr, "\r\033[K%d of %d: %s", done + 1, options->shapes.count, text);
    }
}

static void keep_error(struct result *result, attn_status status, const struct session *session,
                       const struct attn_error *error)
{
    if (status != ATTN_OK) {
        snprintf(result->error, sizeof result->error, "%s%s%s", error->field,
                 error->field[0] != '\0' ? ": " : "",
                 error->message[0] != '\0' ? error->message : session->api->status_text(status));
    }
}

static void name_for_ranks(struct result *result, const struct attn_layer_desc *desc)
{
    if (tune_takes(result->shape.kind)) {
        measurement_shape(desc, dtype_name(desc->dtype), kv_dtype_name(result->kv_dtype),
                          result->rank_shape);
    }
}

/* What is measured with: this build, and what --against and --peer name. */
struct bench {
    struct report report;
    struct session session, against;
    struct peer_file peer;
    struct tuning tuning;
};

/* A shape on one backend: what runs, and what will be reported of it. */
struct entry {
    struct result result;
    struct measured measured;
    bool has_measured;
    const struct work *work; /* what the entry runs without the core; or NULL */
};

static struct result result_for(const struct session *session, const struct bench_shape *shape,
                                const char *backend)
{
    struct result result = {
        .shape = *shape, .difference = -1, .kv_dtype = session->options->kv_dtype};
    snprintf(result.backend, sizeof result.backend, "%s", backend != NULL ? backend : "");
    return result;
}

static void entry_init(struct entry *entry, struct contender *contender, struct session *session,
                       const struct bench_shape *shape, const char *backend)
{
    struct result *result = &entry->result;
    *result = result_for(session, shape, backend);
    contender->error = (struct attn_error)ATTN_ERROR_INIT;
    contender->work = NULL;
    if (shape->kind == SHAPE_MERGE) {
        contender->status = merge_create(&entry->work, result, session, backend, &contender->error);
        contender->work = entry->work;
    } else {
        struct measured *measured = &entry->measured;
        result->reasons = json_array();
        contender->status =
            measured_init(measured, session, shape, backend, result->reasons, &contender->error);
        entry->has_measured = contender->status == ATTN_OK;
        if (entry->has_measured) {
            contender->work = &measured->work;
            memcpy(result->backend, measured->backend, sizeof result->backend);
            result->phase = measured->phase;
            result->kv_dtype = measured->choice.kv_dtype;
            name_for_ranks(result, &measured->layer.desc);
        }
    }
    if (contender->work == NULL) {
        keep_error(result, contender->status, session, &contender->error);
    }
    if (session->against) {
        size_t used = strlen(result->backend);
        snprintf(result->backend + used, sizeof result->backend - used, " of %s",
                 session->options->against);
    }
}

/* --peer's, over what the first backend was measured with. */
static void entry_init_peer(struct entry *entry, struct contender *contender, struct bench *bench,
                            const struct entry *first)
{
    entry->result = first->result;
    entry->result.reasons = NULL;
    entry->result.error[0] = entry->result.rank_shape[0] = '\0';
    snprintf(entry->result.backend, sizeof entry->result.backend, "%s", bench->peer.name());
    *contender = (struct contender){.error = ATTN_ERROR_INIT, .status = ATTN_ERROR_UNSUPPORTED};
    if (first->has_measured) {
        contender->status =
            peer_create(&entry->work, &bench->peer, &first->measured, &contender->error);
    } else {
        strcpy(contender->error.message, "shares the tensors of the first backend's layers");
    }
    contender->work = entry->work;
    keep_error(&entry->result, contender->status, &bench->session, &contender->error);
}

static void entry_finish(struct entry *entry)
{
    if (entry->work != NULL) {
        entry->work->destroy(entry->work->user);
    }
    if (entry->has_measured) {
        measured_finish(&entry->measured);
    }
}

/* A dispatch shape's kernels without the core, over what the backend was measured with. */
static void entry_init_direct(struct entry *entry, struct contender *contender, struct entry *first)
{
    *contender = (struct contender){.error = ATTN_ERROR_INIT};
    if (first->has_measured) {
        contender->status = direct_calls_create(&entry->work, &first->measured, &contender->error);
        contender->work = entry->work;
        keep_error(&first->result, contender->status, first->measured.session, &contender->error);
    }
}

/* Root mean square of what an output differs by from the first one, over the first one's own: the
 * same inputs are drawn for builds that ask for blocks of one size, and a peer has the first one's.
 */
static void compare_outputs(struct entry *entry, const struct contender *contender,
                            const struct entry *first, const struct contender *first_contender)
{
    const bool peer = !entry->has_measured;
    const struct measured *measured = peer ? &first->measured : &entry->measured;
    bool recurrent = first->measured.layer.desc.kind == ATTN_LAYER_RECURRENT;
    if (contender->work == NULL || !first->has_measured || (peer && recurrent) ||
        measured->spec.block_size != first->measured.spec.block_size) {
        return;
    }
    int64_t count = 0;
    double error = 0, square = 0;
    double *wanted = measured_output(&first->measured, first_contender->work, &count);
    double *found = wanted != NULL ? measured_output(measured, contender->work, &count) : NULL;
    for (int64_t i = 0; i < count && found != NULL; i++) {
        error += (found[i] - wanted[i]) * (found[i] - wanted[i]);
        square += wanted[i] * wanted[i];
    }
    if (found != NULL) {
        entry->result.difference = sqrt(error / square);
    }
    if (found != NULL && !(entry->result.difference < MAX_DIFFERENCE)) {
        snprintf(entry->result.error, sizeof entry->result.error,
                 "its output differs from the first one's by %.3g of its root mean square",
                 entry->result.difference);
    }
    free(found);
    free(wanted);
}

/* One result for each backend, all of them alive at once and measured in turns; then --against's,
 * then --peer's. `dispatch` has one backend, in turns with direct calls of its kernels. */
static void measure_together(void *user, const struct bench_shape *shape,
                             const char *const *backends, int32_t num_backends)
{
    struct bench *bench = user;
    struct contender contenders[MAX_CONTENDERS];
    struct entry *entries = command_calloc(MAX_CONTENDERS, sizeof *entries);
    const bool dispatches = shape->kind == SHAPE_DISPATCH;
    const bool against = bench->against.against && !dispatches;
    int32_t count = num_backends * (against ? 2 : 1), reported;
    for (int32_t i = 0; i < count; i++) {
        entry_init(&entries[i], &contenders[i],
                   i < num_backends ? &bench->session : &bench->against, shape,
                   backends[i % num_backends]);
    }
    if (bench->peer.name != NULL && !dispatches) {
        entry_init_peer(&entries[count], &contenders[count], bench, entries);
        count++;
    }
    reported = count;
    if (dispatches) {
        entry_init_direct(&entries[count], &contenders[count], entries);
        count++;
    }
    for (int32_t i = num_backends; i < reported; i++) {
        compare_outputs(&entries[i], &contenders[i], entries, contenders);
    }
    timing_measure(contenders, count, &bench->session);
    for (int32_t i = 0; i < reported; i++) {
        struct result *result = &entries[i].result;
        result->timing = contenders[i].timing;
        if (contenders[i].work != NULL) {
            keep_error(result, contenders[i].status, &bench->session, &contenders[i].error);
        }
        if (dispatches) {
            keep_error(result, contenders[1].status, &bench->session, &contenders[1].error);
        }
        if (dispatches && result->error[0] == '\0') {
            dispatch_compare(result, &bench->session, &contenders[0], &contenders[1]);
        }
        if (bench->report.baseline != NULL && i < num_backends && result->error[0] == '\0') {
            baseline_compare(&bench->report, result, &bench->session);
        }
        report_add(&bench->report, result);
    }
    while (count > 0) { /* a peer before what it shares */
        entry_finish(&entries[--count]);
    }
    free(entries);
}

static void measure(struct bench *bench, const struct bench_shape *shape,
                    const char *const *backends, int32_t count)
{
    const int32_t together = shape->kind == SHAPE_DISPATCH ? 1 : count;
    for (int32_t i = 0; i < count; i += together) {
        measure_together(bench, shape, backends + i, together);
    }
}

/* Every backend of the device that can serve the shape; the others are no failure, unless none is
 * left. */
static void tune_shape(struct bench *bench, const struct bench_shape *shape)
{
    struct report *report = &bench->report;
    char names[MAX_TUNED_BACKENDS][BACKEND_SIZE];
    int32_t indices[MAX_TUNED_BACKENDS];
    const int32_t first = report->count;
    const int32_t count = tune_backends(&bench->session, NULL, MAX_TUNED_BACKENDS, names, indices);
    for (int32_t i = 0; i < count; i++) {
        const char *name = names[i];
        measure(bench, shape, &name, 1);
        struct result *last = report->count > first ? &report->results[report->count - 1] : NULL;
        if (last != NULL && json_count(last->reasons) > 0) { /* it cannot serve the layer */
            json_destroy(last->reasons);
            report->count--;
        }
    }
    if (report->count == first) {
        measure(bench, shape, bench->session.options->backends, 1); /* for its reasons */
    }
}

static void keep_ranks(struct bench *bench)
{
    struct report *report = &bench->report;
    struct attn_error error = ATTN_ERROR_INIT;
    attn_status status =
        tune_write(report, &bench->session, report->ranks_file, sizeof report->ranks_file, &error);
    if (status == ATTN_OK && bench->tuning.count > 0) {
        status = tuning_compare(&bench->tuning, &bench->session, report, &error);
    }
    if (status != ATTN_OK) {
        report->ranks_file[0] = '\0';
        report->failed = true;
        fail_with("--tune", &error);
    }
}

static void run_shapes(struct bench *bench)
{
    const struct options *options = bench->session.options;
    if (options->model != NULL) {
        tuning_run(&bench->tuning, &bench->session, &bench->report, measure_together, bench);
    }
    catch_signals();
    for (int32_t i = 0; i < options->shapes.count && options->model == NULL; i++) {
        if (ended_by != 0) {
            fprintf(stderr, "attn-bench: ended by signal %d: %d of %d shapes were measured\n",
                    (int)ended_by, i, options->shapes.count);
            bench->report.failed = true;
            break;
        }
        tell_progress(options, i, &options->shapes.shapes[i]);
        if (options->tune) {
            tune_shape(bench, &options->shapes.shapes[i]);
        } else {
            measure(bench, &options->shapes.shapes[i], options->backends,
                    options->num_backends > 0 ? options->num_backends : 1);
        }
    }
    if (options->tune && ended_by == 0) {
        keep_ranks(bench);
    }
}

static int show(struct report *report, const struct session *session)
{
    const struct options *options = session->options;
    bool shown = true;
    if (isatty(STDERR_FILENO)) {
        fputs("\r\033[K", stderr);
    }
    if (options->json) {
        report_json(report, session);
    } else if (options->csv) {
        report_csv(report, session);
    } else {
        report_text(report, session);
    }
    for (int32_t i = 0; i < report->count; i++) {
        const struct result *result = &report->results[i];
        char text[256];
        shape_text(&result->shape, text, sizeof text);
        if (result->error[0] != '\0') {
            fprintf(stderr, "attn-bench: %s: %s\n", text, result->error);
        } else if (result->timing.failed) {
            fprintf(stderr,
                    "attn-bench: %s: measured under its floor (ratio %.3f): the ceilings or the "
                    "time were disturbed\n",
                    text, result->timing.ratio_to_floor);
        }
        if (result->regression[0] != '\0') {
            fprintf(stderr, "attn-bench: %s: %s\n", text, result->regression);
        }
    }
    struct attn_error error = ATTN_ERROR_INIT;
    if (options->plot != NULL && plot_write(report, session, options->plot, &error) != ATTN_OK) {
        shown = false;
        fail_with("--plot", &error);
    }
    return shown && report_all_good(report) ? EXIT_SUCCESS : EXIT_FAILURE;
}

static int bench_open(struct bench *bench, const struct options *options)
{
    struct attn_error error = ATTN_ERROR_INIT;
    if (session_init(&bench->session, options, true, &error) != ATTN_OK) {
        return fail_with(options->num_backends > 0 ? options->backends[0] : "runtime", &error);
    }
    if (options->against != NULL &&
        session_init_against(&bench->against, &bench->session, &error) != ATTN_OK) {
        return fail_with(options->against, &error);
    }
    if (options->baseline != NULL &&
        baseline_read(&bench->report, options->baseline, &error) != ATTN_OK) {
        return fail_with(options->baseline, &error);
    }
    if (options->peer != NULL && peer_file_open(&bench->peer, options->peer, &error) != ATTN_OK) {
        return fail_with(options->peer, &error);
    }
    return EXIT_SUCCESS;
}

static int run_tool(int argc, char **argv)
{
    struct options options;
    struct bench bench = {.report.results = NULL};
    struct attn_error error = ATTN_ERROR_INIT;
    int code = options_parse(argc, argv, &options);
    if (code < 0 && options.child != NULL) {
        code = dispatch_child(&options);
    }
    if (code < 0 && options.plot != NULL && !plot_possible(options.plot, &error)) {
        code = fail_with("--plot", &error);
    }
    if (code < 0 && options.model != NULL &&
        tuning_init(&bench.tuning, &options, &error) != ATTN_OK) {
        code = fail_with(options.model, &error);
    }
    if (code < 0) {
        code = bench_open(&bench, &options);
        if (code == EXIT_SUCCESS) {
            run_shapes(&bench);
            code = show(&bench.report, &bench.session);
        }
        report_finish(&bench.report);
        session_finish(&bench.against);
        session_finish(&bench.session);
    }
    tuning_finish(&bench.tuning);
    shapes_finish(&options.shapes);
    return code;
}

int main(int argc, char **argv)
{
    return command_end("attn-bench", run_tool(argc, argv));
}
