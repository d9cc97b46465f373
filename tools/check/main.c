/* SPDX-License-Identifier: Apache-2.0 */
/* attn-check: holds a backend to everything that it declares, against cpu_ref, through the public
 * ABI. */
#include <fnmatch.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common/cache_lines.h"
#include "common/find.h"
#include "common/command.h"
#include "common/conduct.h"
#include "common/declared.h"
#include "core/engine.h"
#include "kernels/kernels.h"
#include "harness/report.h"
#include "harness/backend.h"
#include "harness/watch.h"
#include "harness/worker.h"
#include "cases/attend.h"
#include "cases/lists.h"
#include "cases/problem.h"
#include "host/conformance.h"
#include "util/hash.h"

#define FULL_EXTRA_CASES 1500
#define QUICK_ENGINE_CASES 140
#define FULL_ENGINE_CASES 900
#define QUICK_OUTPUT_CASES 7 /* for each form; a way in turn */
#define FULL_OUTPUT_CASES 140
#define QUICK_LIST_CASES 3 /* for each form, the last through the core; a way in turn */
#define FULL_LIST_CASES 60

static const char usage[] =
    "usage: attn-check NAME|FILE.so [--quick|--full] [--filter GLOB] [--part I/N] [--seed S]\n"
    "                  [--list] [--expect FILE] [--junit FILE] [--badge FILE]\n"
    "                  [--bench] [--fail-fast] [--json] [--case-seconds N] [--record]\n"
    "                  [--help] [--version]\n"
    "\n"
    "Holds a backend to everything that it declares, element by element, against cpu_ref.\n"
    "NAME is a backend that the core finds (`cpu_simd`, `cpu_simd@avx2`); FILE.so a plugin.\n"
    "\n"
    "  --quick        a covering array of pairs, each case in one way (default)\n"
    "  --full         the same in every way, 1,500 random cases, more through the core\n"
    "  --filter GLOB  only cases whose name matches\n"
    "  --part I/N     of these, every Nth from the Ith on: parts 1/N to N/N are all\n"
    "  --seed S       of cases and inputs (default 1)\n"
    "  --list         names the cases and runs none\n"
    "  --expect FILE  a list of capabilities (the `features` of --json): what it names and\n"
    "                 the backend does not declare is a failure\n"
    "  --junit FILE   writes the results as JUnit XML too\n"
    "  --badge FILE   writes the counts as shields.io's endpoint reads them\n"
    "  --bench        times the kernel of each case that passes: the median of up to 31 runs,\n"
    "                 without its plan; on a GPU as a graph, where it can be captured\n"
    "  --record       keeps the counts where selections look for them (ATTN_BACKEND=conformant)\n"
    "  --fail-fast    stops at the first failure\n"
    "  --case-seconds N  of a processor, or of waiting, after which a case hangs (default 300)\n"
    "  --json         one JSON document on stdout\n"
    "\n"
    "Exit status: 0 all passed, 1 a case failed, 2 usage, 77 hardware absent.\n";

struct options {
    const char *target;
    const char *filter;
    const char *junit, *badge;
    const char *expect;
    int32_t part, num_parts; /* part: from 0 */
    uint64_t seed;
    int32_t case_seconds;
    bool full;
    bool list;
    bool bench;
    bool json;
    bool fail_fast;
    bool record;
};

static int fail_with(const char *what, const struct attn_error *error)
{
    return command_failed("attn-check", what, error);
}

static int fail_saying(const char *what, const char *message)
{
    struct attn_error error = ATTN_ERROR_INIT;
    command_error(&error, ATTN_ERROR_INTERNAL, "", "%s", message);
    return fail_with(what, &error);
}

static const char *parse_part(void *user, const char *text)
{
    struct options *options = user;
    char *end = NULL, *last = NULL;
    long part = strtol(text, &end, 10);
    long count = *end == '/' ? strtol(end + 1, &last, 10) : 0;
    options->part = (int32_t)part - 1;
    options->num_parts = (int32_t)count;
    return count < 1 || count > INT32_MAX || part < 1 || part > count || *last != '\0'
               ? "is not I/N with I from 1 to N"
               : NULL;
}

static int parse(int argc, char **argv, struct options *options)
{
    const struct command_option names[] = {
        {"quick", &options->full, .clears = true},
        {"full", &options->full},
        {"filter", .text = &options->filter},
        {"part", .parse = parse_part},
        {"seed", .seed = &options->seed},
        {"list", &options->list},
        {"expect", .text = &options->expect},
        {"junit", .text = &options->junit},
        {"badge", .text = &options->badge},
        {"bench", &options->bench},
        {"fail-fast", &options->fail_fast},
        {"json", &options->json},
        {"case-seconds", .count = &options->case_seconds, .least = 1, .most = INT32_MAX},
        {"record", &options->record}};
    const struct command command = {"attn-check",
                                    usage,
                                    .options = names,
                                    .num_options = sizeof names / sizeof *names,
                                    .operand = &options->target,
                                    .user = options};
    *options = (struct options){.seed = 1, .num_parts = 1, .case_seconds = 300};
    const int code = command_parse(&command, argc, argv);
    if (code < 0 && (options->record || options->badge != NULL) &&
        (options->filter != NULL || options->num_parts > 1 || options->list)) {
        fprintf(stderr, "attn-check: %s: is of all cases; without --filter, --part, --list\n",
                options->record ? "--record" : "--badge");
        return EXIT_USAGE;
    }
    return code;
}

/* A case's inputs follow from its name (FNV-1a) and the seed, so that they stay the same where
 * other capabilities are declared and other cases stand around it. */
static uint64_t seed_of(const struct options *options, const char *name)
{
    return hash_bytes(HASH_INIT, name, strlen(name)) + options->seed;
}

struct run {
    const struct options *options;
    const struct outlet *outlet;
    struct trial trial;
    const char *file;      /* the plugin's */
    struct conduct before; /* what no kernel may change */
    struct case_space space;
    struct attend_cases cases;
    int32_t num_matching; /* cases so far whose names match */
    int32_t num_mine;     /* those of them in this part */
    int32_t skip;         /* that earlier workers have begun */
};

/* Whether a case is to be run; it is listed instead where that was asked for. */
static bool wanted(struct run *run, const char *name)
{
    if (run->options->fail_fast && run->outlet->report->counts[TRIAL_FAILED] > 0) {
        return false;
    }
    bool mine = run->options->filter == NULL || fnmatch(run->options->filter, name, 0) == 0;
    mine = mine && run->num_matching++ % run->options->num_parts == run->options->part;
    mine = mine && run->num_mine++ >= run->skip;
    if (mine && run->options->list) {
        puts(name);
        return false;
    }
    if (mine) {
        run->trial.us = 0;
        outlet_put(run->outlet, OUTLET_CASE, 0, name, "");
    }
    return mine;
}

/* What host.h grants to a step on a CPU. */
static enum trial_result verify_stack(struct trial *trial, enum trial_result result)
{
    size_t used = atomic_exchange(&trial->tested->services.deepest_stack, 0);
    return result == TRIAL_PASSED && used > ATTN_STEP_STACK_BYTES
               ? trial_say(trial, TRIAL_FAILED, "a step took %zu bytes of stack; %d at most", used,
                           ATTN_STEP_STACK_BYTES)
               : result;
}

/* What a case has changed of the process is its failure, and is put back for the next one. */
static enum trial_result verify_conduct(struct run *run, enum trial_result result)
{
    char text[160];
    const char *done = conduct_difference(&run->before, text, sizeof text);
    if (conduct_end_children() > 0 && done == NULL) {
        done = "left a process that runs";
    }
    if (done == NULL) {
        return result;
    }
    conduct_restore(&run->before);
    conduct_read(&run->before, -1, run->before.output, false);
    return trial_say(&run->trial, TRIAL_FAILED, "conduct: a call of this case %s", done);
}

static void record(struct run *run, const char *name, enum trial_result result)
{
    result = verify_conduct(run, verify_stack(&run->trial, result));
    outlet_put(run->outlet, OUTLET_RESULT, (int32_t)result, name, run->trial.message);
    if (result == TRIAL_PASSED && run->trial.us > 0) {
        char us[32];
        snprintf(us, sizeof us, "%.6g", run->trial.us);
        outlet_put(run->outlet, OUTLET_TIME, 0, us, "");
    }
    crash_case(NULL, false);
}

/* "attend" or "engine", which keys or outputs it has, the case, the way. */
#define FULL_NAME_SIZE (CASE_NAME_SIZE + 80)
static const char *full_name(const struct case_space *space, const struct attend_case *c,
                             const char *kind, const char *way, char *name)
{
    char plain[CASE_NAME_SIZE], form[64] = "";
    case_name(space, c, plain, sizeof plain);
    if (c->lists.granularity > 0) {
        case_lists_name(&c->lists, form, sizeof form);
    } else if (c->output.form != ATTN_OUTPUT_PLAIN) {
        strcpy(form, "output.");
        case_output_name(&c->output, form + strlen(form), sizeof form - strlen(form));
    } else if (c->prompts) {
        strcpy(form, "prompts");
    }
    snprintf(name, FULL_NAME_SIZE, "%s%s%s%s.%s", kind, form[0] == '\0' ? "" : "_", form,
             plain + strlen("attend"), way);
    return name;
}

/* An undeclared way is another plain run. */
static void try_attend(struct run *run, const struct attend_case *c, int32_t way)
{
    const int32_t shape = case_value(&run->space, c, FACTOR_SHAPE).a;
    char name[FULL_NAME_SIZE];
    way = trial_way_declared(&run->trial.tested->caps, shape, way) ? way : TRIAL_PLAIN;
    if (wanted(run, full_name(&run->space, c, "attend", trial_way_names[way], name))) {
        record(run, name,
               trial_attend(&run->trial, &run->space, c, seed_of(run->options, name), way));
    }
}

/* Runs the case that a filter names in full, even if it is not in the covering array. */
static void run_named_attend(struct run *run)
{
    const char *filter = run->options->filter;
    const char *dot = filter != NULL ? strrchr(filter, '.') : NULL;
    char name[CASE_NAME_SIZE];
    struct attend_case c;
    if (run->num_matching > 0 || dot == NULL || strpbrk(filter, "*?[\\") != NULL ||
        (size_t)(dot - filter) >= sizeof name) {
        return;
    }
    snprintf(name, sizeof name, "%.*s", (int)(dot - filter), filter);
    if (!case_of_name(&run->space, name, &c)) {
        return;
    }
    struct attend_case possible = c;
    case_drop_conflicts(&run->space, &possible);
    int32_t shape = case_value(&run->space, &c, FACTOR_SHAPE).a;
    for (int32_t way = 0; way < TRIAL_WAY_COUNT; way++) {
        if (strcmp(dot + 1, trial_way_names[way]) == 0 && memcmp(&possible, &c, sizeof c) == 0 &&
            !case_refused(&run->space, &c) &&
            (way == TRIAL_PLAIN || trial_way_declared(&run->trial.tested->caps, shape, way))) {
            try_attend(run, &c, way);
        }
    }
}

/* A prompt of 8 heads over 2 KV heads after a long context, whose keys backends may divide. */
static void try_long_prompt(struct run *run, int32_t dtype, int32_t kv_dtype, int32_t size)
{
    struct attend_case c;
    if (case_of_cache(&run->space, dtype, kv_dtype, &c) &&
        case_set(&run->space, &c, FACTOR_SHAPE, SHAPE_LONG_EXTEND) &&
        case_set(&run->space, &c, FACTOR_HEADS, 8) &&
        case_set(&run->space, &c, FACTOR_BLOCK_SIZE, 16)) {
        const struct factor *sizes = &run->space.factors[FACTOR_HEAD_SIZE];
        for (int32_t i = 0; i < sizes->count; i++) {
            const bool same = sizes->values[i].a == size && sizes->values[i].b == size;
            c.index[FACTOR_HEAD_SIZE] = same ? i : c.index[FACTOR_HEAD_SIZE];
        }
        case_set(&run->space, &c, FACTOR_SINKS, size == 64);
        case_set(&run->space, &c, FACTOR_LSE, 1);
        c.prompts = 1;
        case_drop_conflicts(&run->space, &c);
        if (!case_refused(&run->space, &c)) {
            try_attend(run, &c, dtype == ATTN_DTYPE_BF16 ? TRIAL_REPLANNED : TRIAL_PLAIN);
        }
    }
}

static void run_long_prompts(struct run *run)
{
    for (int32_t dtype = ATTN_DTYPE_F16; dtype <= ATTN_DTYPE_F32; dtype++) {
        try_long_prompt(run, dtype, dtype, 64);
        if (run->options->full) {
            try_long_prompt(run, dtype, dtype, 128);
            try_long_prompt(run, dtype, ATTN_KV_FP8_E4M3, 64);
            try_long_prompt(run, dtype, ATTN_KV_FP8_E4M3, 128);
        }
    }
}

/* With --full the cases of the covering array run in every way; all others run in one way, by
 * turns. */
static void run_attends(struct run *run)
{
    for (int32_t i = 0; i < run->cases.num_cases; i++) {
        const bool every = run->options->full && i < run->space.num_covering;
        const int32_t shape = case_value(&run->space, &run->cases.cases[i], FACTOR_SHAPE).a;
        for (int32_t way = 0; way < TRIAL_WAY_COUNT; way++) {
            if (every ? trial_way_declared(&run->trial.tested->caps, shape, way)
                      : way == i % TRIAL_WAY_COUNT) {
                try_attend(run, &run->cases.cases[i], way);
            }
        }
    }
    run_named_attend(run);
}

/* Attends that write codes: random cases of each form that is declared, in one way in turn. */
static void run_outputs(struct run *run)
{
    const struct options *options = run->options;
    const int32_t wanted_cases = options->full ? FULL_OUTPUT_CASES : QUICK_OUTPUT_CASES;
    for (int32_t i = 0; i < CASE_OUTPUTS; i++) {
        if (!(run->space.caps.output_forms >> case_outputs[i].form & 1)) {
            continue;
        }
        const struct attend_cases drawn =
            case_space_draw(&run->space, options->seed + (uint64_t)i, wanted_cases);
        for (int32_t c = 0; c < drawn.num_cases; c++) {
            drawn.cases[c].output = case_outputs[i];
            if (case_output_fits(&run->space, &drawn.cases[c], &case_outputs[i])) {
                try_attend(run, &drawn.cases[c], c % TRIAL_WAY_COUNT);
            }
        }
        free(drawn.cases);
    }
}

static void try_engine(struct run *run, const struct case_space *space, const struct attend_case *c,
                       int32_t way)
{
    char name[FULL_NAME_SIZE];
    if (wanted(run, full_name(space, c, "engine", engine_way_names[way], name))) {
        record(run, name, engine_trial(&run->trial, space, c, seed_of(run->options, name), way));
    }
}

/* Whether both sides serve the case with its lists, which come with conditions of their own. */
static bool serves_lists(struct run *run, const struct attend_case *c)
{
    struct factor_value v[FACTOR_COUNT];
    struct attn_layer_desc layer;
    struct lists_binding lists;
    case_values(&run->space, c, v);
    case_layer(v, &layer);
    const struct lists_shape shape =
        lists_shape(&run->space.caps, &c->lists, layer.num_q_heads, layer.num_kv_heads);
    lists_bind(&c->lists, &shape, NULL, NULL, &lists);
    layer.next = &lists.layer.ext;
    return v[FACTOR_SHAPE].a < SHAPE_CROSS &&
           trial_supports(&run->trial, run->trial.reference, &layer, case_phase(v)) &&
           trial_supports(&run->trial, run->trial.tested, &layer, case_phase(v));
}

/* Prompts over lists of large blocks, of 2 KV heads of 128 dims without further terms. */
static void try_prompts(struct run *run, const struct case_lists *lists, int32_t dtype)
{
    struct attend_case c;
    if (case_of_cache(&run->space, dtype, dtype, &c) &&
        case_set(&run->space, &c, FACTOR_SHAPE, SHAPE_PREFILL) &&
        case_set(&run->space, &c, FACTOR_HEAD_SIZE, 128) &&
        case_set(&run->space, &c, FACTOR_HEADS, 8) &&
        case_set(&run->space, &c, FACTOR_BLOCK_SIZE, lists->has_lengths ? 16 : 64)) {
        case_set(&run->space, &c, FACTOR_NAN, lists->has_lengths);
        case_set(&run->space, &c, FACTOR_SINKS, lists->groups);
        case_set(&run->space, &c, FACTOR_LSE, 1);
        c.lists = *lists;
        c.lists.prompts = 1;
        if (serves_lists(run, &c)) {
            try_attend(run, &c, TRIAL_PLAIN);
        }
    }
}

/* Lists of some hundred units: of one or two tokens, and of so many that a kernel may make the
 * units of each item where it attends. */
static void try_many_entries(struct run *run, int32_t shape)
{
    const struct case_lists lists = {.granularity = 4,
                                     .groups = shape == SHAPE_SPECULATIVE ? ATTN_LISTS_PER_KV_HEAD
                                                                          : ATTN_LISTS_SHARED,
                                     .has_lengths = shape == SHAPE_SPECULATIVE,
                                     .many = 300};
    struct attend_case c;
    if (case_lists_declared(&run->space.caps, &lists, false) &&
        case_of_cache(&run->space, ATTN_DTYPE_BF16, ATTN_DTYPE_BF16, &c) &&
        case_set(&run->space, &c, FACTOR_SHAPE, shape) &&
        case_set(&run->space, &c, FACTOR_HEAD_SIZE, 64) &&
        case_set(&run->space, &c, FACTOR_HEADS, 8) &&
        case_set(&run->space, &c, FACTOR_BLOCK_SIZE, 16)) {
        case_set(&run->space, &c, FACTOR_LSE, 1);
        c.lists = lists;
        if (serves_lists(run, &c)) {
            try_attend(run, &c, TRIAL_PLAIN);
        }
    }
}

/* Attends over lists of keys: random cases of each form that is declared. */
static void run_lists(struct run *run)
{
    const struct options *options = run->options;
    const int32_t wanted_cases = options->full ? FULL_LIST_CASES : QUICK_LIST_CASES;
    int32_t way = 0;
    for (int32_t i = 0; i < CASE_LISTS; i++) {
        const struct case_lists lists = case_lists_at(i);
        if (!case_lists_declared(&run->space.caps, &lists, false)) {
            continue;
        }
        const struct attend_cases drawn = case_space_draw(
            &run->space, options->seed + (uint64_t)(CASE_OUTPUTS + i), 16 * wanted_cases);
        for (int32_t c = 0, taken = 0; c < drawn.num_cases && taken < wanted_cases; c++) {
            struct attend_case *one = &drawn.cases[c];
            one->lists = lists;
            if (!serves_lists(run, one)) {
                continue;
            }
            if (++taken % QUICK_LIST_CASES == 0) {
                try_engine(run, &run->space, one, i % ENGINE_WAY_COUNT);
            } else {
                try_attend(run, one, ++way % TRIAL_WAY_COUNT);
            }
        }
        free(drawn.cases);
        if (options->full && lists.granularity >= 64) {
            try_prompts(run, &lists, ATTN_DTYPE_BF16);
            try_prompts(run, &lists, ATTN_DTYPE_F16);
        }
    }
    try_many_entries(run, SHAPE_LONG_DECODE);
    try_many_entries(run, SHAPE_SPECULATIVE);
}

/* A case next to the attends. */
static void try_case(void *user, const char *name, kernel_run *kernel, const void *variant)
{
    struct run *run = user;
    if (wanted(run, name)) {
        record(run, name, kernel(&run->trial, variant, run->options->seed));
    }
}

static struct kernel_sink sink_of(struct run *run, const struct case_space *space)
{
    return (struct kernel_sink){run,      &run->trial.tested->caps, space,
                                try_case, run->trial.core,          run->options->full};
}

static void run_kernels(struct run *run)
{
    const struct kernel_sink sink = sink_of(run, &run->space);
    for (int32_t i = 0; i < NUM_KERNEL_FILES; i++) {
        if (kernel_files[i].kernels == 0 || sink.caps->kernels & kernel_files[i].kernels) {
            kernel_files[i].cases(&sink);
        }
    }
    try_case(run, "two_threads", trial_two_threads, &run->cases);
}

/* Refusals come last: a wrong result tells more. */
static void run_core_cases(struct run *run)
{
    const struct kernel_sink sink = sink_of(run, &run->space);
    call_cases(&sink);
    call_plugin_cases(&sink);
    undeclared_cases(&sink);
}

/* The declaration as JSON, as it stands in the report's document. */
static bool describe(struct run *run)
{
    char *text = NULL;
    size_t size = 0;
    FILE *out = open_memstream(&text, &size);
    struct json *declared = declared_json(&run->trial.tested->caps);
    bool ok = out != NULL && json_write(out, declared, 1);
    ok = out != NULL && fclose(out) == 0 && ok;
    if (ok) {
        outlet_put(run->outlet, OUTLET_DECLARED, 0, run->trial.tested->caps.name, text);
    }
    json_destroy(declared);
    free(text);
    return ok;
}

/* Which backend, file and drivers the record is of, as they are before the first case. */
static void begin_record(const struct run *run, const char *file)
{
    const struct attn_backend_caps *caps = &run->trial.tested->caps;
    struct conformance record = {.device = caps->device,
                                 .drivers = drivers_hash(HASH_INIT),
                                 .version = ATTN_VERSION,
                                 .mode = "quick",
                                 .seed = run->options->seed};
    char line[512];
    snprintf(record.mode, sizeof record.mode, "%s", run->options->full ? "full" : "quick");
    backend_text(caps, record.backend, sizeof record.backend);
    if (file_hash(file, &record.file) && conformance_text(&record, line, sizeof line)) {
        line[strcspn(line, "\n")] = '\0';
        outlet_put(run->outlet, OUTLET_RECORD, 0, line, "");
    }
}

static bool is_same_backend(const void *user, const char *line)
{
    const struct conformance *record = user;
    struct conformance other;
    return conformance_parse(&other, line) &&
           conformance_is_of(&other, record->backend, record->device);
}

/* With what all cases came to. */
static attn_status write_record(const struct report *report, bool complete,
                                struct attn_error *error)
{
    struct conformance record;
    char path[4096], line[512];
    if (report->record == NULL || !conformance_parse(&record, report->record)) {
        return command_error(error, ATTN_ERROR_IO, "", "the backend's file cannot be read");
    }
    record.passed = report->counts[TRIAL_PASSED];
    record.failed = report->counts[TRIAL_FAILED] + !complete;
    record.skipped = report->counts[TRIAL_SKIPPED];
    attn_status status = cache_lines_path(CONFORMANCE_FILE, path, sizeof path, error);
    if (status == ATTN_OK && conformance_text(&record, line, sizeof line)) {
        status = cache_lines_write("attn-check", path, line, is_same_backend, &record, error);
    }
    return status;
}

static enum trial_result run_conduct(struct trial *trial, const void *variant, uint64_t seed)
{
    const char *did = trial->tested->misconduct;
    return did[0] == '\0' ? TRIAL_PASSED : trial_say(trial, TRIAL_FAILED, "conduct: %s", did);
}

/* Cases through the core, each in one way in turn. */
static void run_engines(struct run *run)
{
    const int32_t wanted_cases = run->options->full ? FULL_ENGINE_CASES : QUICK_ENGINE_CASES;
    struct case_space space;
    engine_space_init(&space, &run->trial);
    const struct attend_cases drawn = case_space_draw(&space, run->options->seed, wanted_cases);
    for (int32_t i = 0; i < drawn.num_cases; i++) {
        try_engine(run, &space, &drawn.cases[i], i % ENGINE_WAY_COUNT);
    }
    const struct kernel_sink sink = sink_of(run, &space);
    idle_cases(&sink);
    blocks_cases(&sink);
    compressed_cases(&sink);
    compressor_cases(&sink);
    engine_output_cases(&sink);
    free(drawn.cases);
    case_space_finish(&space);
}

static bool declared_slots_there(const struct backend *backend, struct attn_error *error)
{
    for (int32_t i = 0; i < NUM_CALLS; i++) {
        const struct call_target *target = &call_targets[i];
        void (*slot)(void);
        memcpy(&slot, (const char *)&backend->kernels + target->slot, sizeof slot);
        const bool declared = (backend->caps.kernels & target->kernel) != 0;
        if ((slot != NULL) != declared) {
            command_error(error, ATTN_ERROR_PLUGIN, "kernels",
                          "%s is %s in the declared mask and %s in the table of kernels",
                          target->name, declared ? "set" : "not set",
                          slot != NULL ? "there" : "NULL");
            return false;
        }
    }
    return true;
}

/* EXIT_SUCCESS: to the end, whatever was found. */
static int run_suite(struct run *run)
{
    const struct options *options = run->options;
    struct attn_error error = ATTN_ERROR_INIT;
    if (!declared_slots_there(run->trial.tested, &error)) {
        return fail_with("declared capabilities", &error);
    }
    if (!describe(run)) {
        return fail_saying(options->target, "no memory for the declaration");
    }
    if (options->record) {
        begin_record(run, run->file);
    }
    if (!case_space_init(&run->space, &run->trial.tested->caps)) {
        return fail_saying("declared capabilities",
                           "a factor has no declared value: no case can be made");
    }
    run->space.serves = trial_serves;
    run->space.user = &run->trial;
    run->cases = case_space_cover(&run->space, options->seed, options->full ? FULL_EXTRA_CASES : 0);
    if (options->expect != NULL && !options->list && run->skip == 0) {
        bool holds = declared_holds(&run->trial.tested->caps, options->expect, run->trial.message,
                                    sizeof run->trial.message);
        record(run, "capabilities", holds ? TRIAL_PASSED : TRIAL_FAILED);
    }
    try_case(run, "conduct.create", run_conduct, NULL);
    run_kernels(run);
    run_attends(run);
    run_long_prompts(run);
    run_outputs(run);
    run_lists(run);
    run_engines(run);
    run_core_cases(run);
    return EXIT_SUCCESS;
}

/* What is needed to run the cases, in this process or another one. */
struct job {
    struct options options;
    struct resolved resolved;
};

/* Names a file's other backends, which are not tested. */
static void name_others(const struct job *job, const struct backend *tested)
{
    if (job->resolved.name == NULL && tested->others[0] != '\0') {
        fprintf(stderr,
                "attn-check: %s: '%s%s%s' is tested, and not what it has besides: %s; "
                "ATTN_PLUGIN_PATH=%s "
                "attn-check NAME tests another one\n",
                job->options.target, tested->caps.name, tested->caps.variant[0] != '\0' ? "@" : "",
                tested->caps.variant, tested->others, job->resolved.file);
    }
}

static int run_cases(void *user, const struct outlet *outlet, int32_t skip)
{
    struct job *job = user;
    const struct options *options = &job->options;
    struct attn_error error = ATTN_ERROR_INIT;
    struct backend reference, tested;
    struct device device;
    struct core core = {NULL};
    int code = EXIT_SUCCESS;
    if (backend_open(&reference, job->resolved.reference, "cpu_ref", NULL, &error) != ATTN_OK) {
        return fail_with("cpu_ref", &error);
    }
    struct run run = {
        .options = options, .outlet = outlet, .file = job->resolved.file, .skip = skip};
    const int kept = options->list ? -1 : dup(STDOUT_FILENO);
    const int output = options->list ? -1 : conduct_catch_output();
    crash_watch(options->target, options->seed);
    conduct_read(&run.before, -1, output, true);
    outlet_put(outlet, OUTLET_STAGE, 0, "load", "");
    attn_status status =
        backend_open(&tested, job->resolved.file, job->resolved.name, &run.before, &error);
    if (status == ATTN_OK) {
        if (skip == 0) {
            name_others(job, &tested);
        }
        watch_init(tested.caps.device.type);
        status = core_open(&core, &job->resolved, &tested.caps, &error);
        if (status == ATTN_OK) {
            status = device_init(&device, core.api, core.runtime, tested.caps.device, &error);
        }
        if (status == ATTN_OK) {
            run.trial =
                (struct trial){&reference, &tested, &device, &core, .bench = options->bench};
            conduct_read(&run.before, -1, output, false);
            code = run_suite(&run);
            outlet_put(outlet, OUTLET_STAGE, 0, "destroy", "");
            case_space_finish(&run.space);
            free(run.cases.cases);
            device_finish(&device);
        }
        core_close(&core);
        backend_close(&tested);
    }
    backend_close(&reference);
    fflush(stdout);
    if (kept >= 0) {
        dup2(kept, STDOUT_FILENO);
        close(kept);
    }
    if (output >= 0) {
        close(output);
    }
    if (status != ATTN_OK) {
        error.status = status;
        return fail_with(options->target, &error);
    }
    return code;
}

/* The one case of a filter without wildcards runs in this process, where a debugger has it. */
static bool runs_here(const struct options *options)
{
    return options->list || (options->filter != NULL && strpbrk(options->filter, "*?[\\") == NULL &&
                             !options->json && options->junit == NULL);
}

static int run_tool(int argc, char **argv)
{
    struct job job;
    struct attn_error error = ATTN_ERROR_INIT;
    int code = parse(argc, argv, &job.options);
    if (code >= 0) {
        return code;
    }
    const struct options *options = &job.options;
    if (resolve(&job.resolved, options->target, &error) != ATTN_OK) {
        return fail_with(options->target, &error);
    }
    struct report report = {.target = options->target,
                            .seed = options->seed,
                            .junit = options->junit,
                            .full = options->full,
                            .bench = options->bench,
                            .progress = isatty(STDERR_FILENO) && !options->json};
    if (runs_here(options)) {
        code = run_cases(&job, &(const struct outlet){&report, -1}, 0);
    } else {
        code = workers_run(&report, run_cases, &job, options->case_seconds, options->fail_fast);
    }
    if (!options->list && (code == EXIT_SUCCESS || report.num_lines > 0)) {
        if (report.progress) {
            fputc('\n', stderr);
        }
        if (options->json) {
            report_json(&report);
        } else {
            report_text(&report);
        }
        if (options->junit != NULL && !report_junit(&report)) {
            code = fail_saying(options->junit, "cannot be written");
        }
        if (options->badge != NULL && !report_badge(&report, options->badge)) {
            code = fail_saying(options->badge, "cannot be written");
        }
        if (options->record && write_record(&report, code == EXIT_SUCCESS, &error) != ATTN_OK) {
            code = fail_with("--record", &error);
        }
        code = code == EXIT_SUCCESS && !report_passed(&report) ? EXIT_FAILURE : code;
    }
    report_finish(&report);
    return code;
}

int main(int argc, char **argv)
{
    return command_end("attn-check", run_tool(argc, argv));
}
