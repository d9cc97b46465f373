/* SPDX-License-Identifier: Apache-2.0 */
/* attn-info: what is on this machine, and which backend would serve each layer of a model, with
 * every reason. */
#include "common/json.h"
#include "common/find.h"
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/cache_lines.h"
#include "common/command.h"
#include "common/declared.h"
#include "common/device.h"
#include "common/model_config.h"
#include "common/names.h"
#include "host/conformance.h"
#include "host/measurement.h"
#include "info/info.h"
#include "support/client.h"
#include "util/hash.h"

static const char usage[] =
    "usage: attn-info [--model FILE [--layouts] [--lock FILE]] [--explain] [--devices]\n"
    "                 [--capabilities] [--html FILE] [--json] [--help] [--version]\n"
    "       attn-info --diff A B\n"
    "\n"
    "Lists plugins and backends; with a model, the backend of every layer and phase.\n"
    "\n"
    "  --model FILE    a model's config.json\n"
    "  --explain       for each layer, why the other backends were not taken\n"
    "  --devices       lists the devices, too\n"
    "  --capabilities  lists what each backend declares\n"
    "  --json          one JSON document on stdout\n"
    "  --html FILE     writes the same document as a page, too\n"
    "  --layouts       for each layer, the id of its caches' layout\n"
    "  --lock FILE     writes what was chosen, and the files that it was chosen from; "
    "ATTN_LOCK=FILE\n"
    "                  then refuses any other choice\n"
    "  --diff A B      what differs between two locks\n"
    "\n"
    "Exit status: 0 every layer is served, 1 a layer is not or an order was refused, 2 usage;\n"
    "of --diff: 0 the same choice, 1 another.\n";

static const char *const verdict_names[] = {"chosen", "eligible", "excluded by a rule",
                                            "unsupported", "on another device"};

struct options {
    const char *model, *lock, *html;
    const char *diff, *with; /* two locks */
    bool explain, layouts, devices, capabilities, json;
};

struct info {
    const struct attn_api *api;
    attn_runtime *runtime;
    struct attn_device device;   /* that a model is selected for */
    attn_assignment *assignment; /* NULL without a model */
    char *times;                 /* the file of measured times; or NULL */
    char device_key[MEASUREMENT_DEVICE_SIZE];
    struct model_config config;
    struct options options;
};

static int parse(int argc, char **argv, struct options *options)
{
    const struct command_option names[] = {
        {"model", .text = &options->model},       {"lock", .text = &options->lock},
        {"diff", .text = &options->diff},         {"explain", &options->explain},
        {"layouts", &options->layouts},           {"devices", &options->devices},
        {"capabilities", &options->capabilities}, {"json", &options->json},
        {"html", .text = &options->html}};
    const struct command command = {"attn-info",
                                    usage,
                                    .options = names,
                                    .num_options = sizeof names / sizeof *names,
                                    .operand = &options->with,
                                    .may_lack_operand = true};
    const int code = command_parse(&command, argc, argv);
    if (code < 0 && ((options->diff == NULL) != (options->with == NULL) ||
                     (options->diff != NULL && options->html != NULL) ||
                     ((options->lock != NULL || options->layouts) && options->model == NULL))) {
        fprintf(stderr, "attn-info: %s\n%s",
                options->diff != NULL && options->html != NULL ? "--diff writes no page"
                : options->lock != NULL                        ? "--lock needs --model"
                : options->layouts                             ? "--layouts needs --model"
                : options->diff != NULL                        ? "--diff needs two files"
                                                               : "a file is only --diff's",
                usage);
        return EXIT_USAGE;
    }
    return code;
}

static struct json *plugins_json(const struct info *info)
{
    struct json *plugins = json_array();
    for (int32_t i = 0; i < info->api->plugin_count(info->runtime); i++) {
        struct attn_plugin_info plugin = {.struct_size = sizeof plugin};
        struct json *item = json_object();
        info->api->plugin_info(info->runtime, i, &plugin);
        json_add(item, "file", json_string(plugin.file));
        json_add(item, "status", json_string(info->api->status_text(plugin.status)));
        json_add(item, "reason", json_string(plugin.reason));
        json_push(plugins, item);
    }
    return plugins;
}

static struct json *devices_json(const struct info *info)
{
    struct json *devices = json_array();
    for (int32_t i = 0; i < info->api->device_count(info->runtime); i++) {
        struct attn_device_info device = {.struct_size = sizeof device};
        struct json *item = json_object();
        info->api->device_info(info->runtime, i, &device);
        json_add(item, "type", json_number(device.device.type));
        json_add(item, "id", json_number(device.device.id));
        json_add(item, "namespace", json_string(device.device_namespace));
        json_add(item, "uuid", json_string(device.uuid));
        json_add(item, "name", json_string(device.name));
        json_add(item, "arch", json_string(device.arch));
        json_add(item, "isa", json_string(device.isa));
        json_add(item, "num_multiprocessors", json_number(device.num_multiprocessors));
        json_add(item, "memory_bytes", json_number((double)device.memory_bytes));
        json_push(devices, item);
    }
    return devices;
}

/* The next line of a text, NULL or at its end: false. */
static bool next_line(const char **at, char *line, size_t size)
{
    if (*at == NULL || **at == '\0') {
        return false;
    }
    const size_t length = strcspn(*at, "\n");
    snprintf(line, size, "%.*s", (int)length, *at);
    *at += length + ((*at)[length] == '\n');
    return true;
}

/* The counts that attn-check --record has kept of a backend, and why they no longer apply. */
static struct json *conformance_json(const char *lines, const struct attn_backend_caps *caps,
                                     const char *file)
{
    struct conformance record, last = {.backend = ""};
    uint64_t hash;
    char name[160], line[512];
    backend_text(caps, name, sizeof name);
    while (next_line(&lines, line, sizeof line)) {
        if (conformance_parse(&record, line) && conformance_is_of(&record, name, caps->device)) {
            last = record;
        }
    }
    if (last.backend[0] == '\0') {
        return json_null();
    }
    struct json *item = json_object();
    const char *lacks = file_hash(file, &hash)
                            ? conformance_lacks(&last, hash, drivers_hash(HASH_INIT))
                            : "a plugin file that cannot be read";
    json_add(item, "passed", json_number(last.passed));
    json_add(item, "failed", json_number(last.failed));
    json_add(item, "skipped", json_number(last.skipped));
    json_add(item, "mode", json_string(last.mode));
    json_add(item, "seed", json_number((double)last.seed));
    json_add(item, "version", json_string(last.version));
    json_add(item, "conformant", json_bool(lacks == NULL));
    json_add(item, "lacks", json_string(lacks != NULL ? lacks : ""));
    return item;
}

static struct json *backends_json(const struct info *info)
{
    struct json *backends = json_array();
    char path[4096], *lines = NULL;
    const char *why;
    struct attn_error error = ATTN_ERROR_INIT;
    if (cache_lines_path(CONFORMANCE_FILE, path, sizeof path, &error) == ATTN_OK) {
        lines = cache_lines_read(path, &why);
    }
    for (int32_t i = 0; i < info->api->backend_count(info->runtime); i++) {
        const struct attn_backend_caps *caps = backend_caps(info->api, info->runtime, i);
        const char *file = backend_file(info->api, info->runtime, i);
        struct json *item = json_object();
        json_add(item, "name", json_string(caps->name));
        json_add(item, "variant", json_string(caps->variant));
        json_add(item, "version", json_string(caps->version));
        json_add(item, "vendor", json_string(caps->vendor));
        json_add(item, "file", json_string(file));
        struct json *device = json_add(item, "device", json_object());
        json_add(device, "type", json_number(caps->device.type));
        json_add(device, "id", json_number(caps->device.id));
        struct json *rank = json_add(item, "rank", json_object());
        for (int32_t phase = 0; phase <= ATTN_PHASE_DECODE; phase++) {
            json_add(rank, phase_names[phase], json_number(caps->rank[phase]));
        }
        json_add(item, "conformance", conformance_json(lines, caps, file));
        if (info->options.capabilities) {
            json_add(item, "capabilities", declared_json(caps));
        }
        json_push(backends, item);
    }
    free(lines);
    return backends;
}

/* What a step of the layer does in that phase: the calls of its backend, and what the core composes
 * of them. */
static void add_program(struct json *item, const struct attn_choice *choice, bool recurrent,
                        int32_t phase)
{
    static const struct {
        uint32_t composed;
        const char *prefill, *decode; /* NULL: the same */
    } programs[] = {
        {ATTN_COMPOSE_COMPRESSED, "attend latent -> attend compressed -> merge", NULL},
        {ATTN_COMPOSE_BOTH_CACHES, "attend latent and compressed", NULL},
        {ATTN_COMPOSE_MLA_PREFILL,
         "project keys -> attend new keys -> gather, project and attend context -> merge",
         "absorb -> attend latent -> project up"},
        {ATTN_COMPOSE_MLA, "absorb -> attend latent -> project up", NULL},
        {ATTN_COMPOSE_MM_ENCODER, "amax -> quantize q, k, v -> attend", ""},
        {ATTN_COMPOSE_STATIC_SINK, "attend sink -> attend rest -> merge", NULL},
        {ATTN_COMPOSE_CHUNKED, "attend chunks as requests", NULL},
        {ATTN_COMPOSE_CASCADE,
         "attend, or where a common prefix pays: attend prefix -> attend rest -> merge", NULL},
        {UINT32_MAX, "attend", NULL}};
    char text[400];
    size_t at = 0;
    const uint32_t composed = choice->composed | (uint32_t)1 << 31;
    while (!(composed & programs[at].composed)) {
        at++;
    }
    const bool own = phase == ATTN_PHASE_DECODE && programs[at].decode != NULL;
    const char *attends = recurrent ? "update states"
                          : own     ? programs[at].decode
                                    : programs[at].prefill;
    snprintf(text, sizeof text, "%s%s%s%s",
             composed & ATTN_COMPOSE_CONTEXT_PARALLEL ? "gather queries -> " : "", attends,
             composed & ATTN_COMPOSE_CONTEXT_PARALLEL ? " -> reduce -> merge with new keys" : "",
             composed & ATTN_COMPOSE_OUTPUT_QUANT  ? " -> quantize"
             : composed & ATTN_COMPOSE_OUTPUT_ROPE ? " -> rotate output"
                                                   : "");
    json_add(item, "program", json_string(text));
}

/* Adds the measured times of a backend for the layer, by bucket: date, version, and why a time is
 * stale. */
static void add_times(const struct info *info, struct json *item, int32_t index, int32_t phase,
                      int32_t backend)
{
    const struct attn_layer_desc *desc = &info->config.layers[index].desc;
    const struct attn_choice choice = choice_of(info->api, info->assignment, index, phase);
    char kv_dtype[64], shape[MEASUREMENT_SHAPE_SIZE], name[BACKEND_SIZE], line[1024];
    struct measurement m;
    uint64_t file = 0;
    struct json *times = json_add(item, "times", json_array());
    if (info->times == NULL || backend < 0) {
        return;
    }
    backend_text(backend_caps(info->api, info->runtime, backend), name, sizeof name);
    const bool two = choice.kv_dtype_v != 0 && choice.kv_dtype_v != choice.kv_dtype;
    snprintf(kv_dtype, sizeof kv_dtype, "%s%s%s", kv_dtype_name(choice.kv_dtype), two ? "/" : "",
             two ? kv_dtype_name(choice.kv_dtype_v) : "");
    measurement_shape(desc, dtype_name(desc->dtype), kv_dtype, shape);
    for (const char *at = info->times; next_line(&at, line, sizeof line);) {
        if (!measurement_parse(&m, line) ||
            !measurement_is_of(&m, info->device_key, shape, phase_names[phase], name)) {
            continue;
        }
        if (file == 0) {
            (void)file_hash(backend_file(info->api, info->runtime, backend), &file);
        }
        const char *stale = measurement_stale(&m, file, drivers_hash(HASH_INIT));
        struct json *time = json_object();
        json_add(time, "bucket", json_string(m.bucket));
        json_add(time, "time_us", json_number(1e-3 * (double)m.nanoseconds));
        json_add(time, "spread", json_number(0.01 * m.spread));
        json_add(time, "version", json_string(m.version));
        json_add(time, "date", json_string(m.date));
        json_add(time, "stale", json_string(stale != NULL ? stale : ""));
        json_push(times, time);
    }
}

static void add_choice(const struct info *info, struct json *layer, int32_t index, int32_t phase)
{
    const struct attn_choice choice = choice_of(info->api, info->assignment, index, phase);
    struct json *item = json_object();
    json_add(item, "backend", json_string(choice.backend >= 0 ? choice.name : NULL));
    json_add(item, "rule", json_string(choice.rule));
    json_add(item, "forced", json_bool(choice.forced));
    json_add(item, "rank", json_number(choice.rank));
    json_add(item, "measured", json_bool(choice.measured));
    add_times(info, item, index, phase, choice.backend);
    add_program(item, &choice, strcmp(json_text(layer, "kind"), "gdn") == 0, phase);
    json_add(layer, phase_names[phase], item);
}

static struct json *reasons_json(const struct info *info, int32_t index, int32_t phase,
                                 int32_t backend, int32_t count)
{
    struct json *reasons = json_array();
    for (int32_t r = 0; r < count; r++) {
        struct attn_reason reason = {.struct_size = sizeof reason};
        struct json *why = json_object();
        info->api->assignment_reason(info->assignment, index, phase, backend, r, &reason);
        json_add(why, "field", json_string(reason.field));
        json_add(why, "asked", json_string(reason.asked));
        json_add(why, "supported", json_string(reason.supported));
        json_push(reasons, why);
    }
    return reasons;
}

/* Every backend that was not taken: those that could serve the layer, with the rank that they
 * declare, and those that cannot, with all reasons. */
static void add_others(const struct info *info, struct json *layer, int32_t index)
{
    struct json *eligible = json_add(layer, "eligible", json_array());
    struct json *rejected = json_add(layer, "rejected", json_array());
    for (int32_t phase = 0; phase <= ATTN_PHASE_DECODE; phase++) {
        for (int32_t b = 0; b < info->api->backend_count(info->runtime); b++) {
            const struct attn_backend_caps *caps = backend_caps(info->api, info->runtime, b);
            int32_t verdict, count;
            char name[BACKEND_SIZE];
            info->api->assignment_verdict(info->assignment, index, phase, b, &verdict, &count);
            if (verdict == ATTN_VERDICT_CHOSEN) {
                continue;
            }
            struct json *item = json_object();
            backend_text(caps, name, sizeof name);
            json_add(item, "backend", json_string(name));
            json_add(item, "phase", json_string(phase_names[phase]));
            if (verdict == ATTN_VERDICT_ELIGIBLE) {
                json_add(item, "rank", json_number(caps->rank[phase]));
                add_times(info, item, index, phase, b);
                json_add(item, "reasons", reasons_json(info, index, phase, b, count));
                json_push(eligible, item);
            } else {
                json_add(item, "verdict", json_string(verdict_names[verdict]));
                json_add(item, "reasons", reasons_json(info, index, phase, b, count));
                json_push(rejected, item);
            }
        }
    }
}

/* Adds the bound by which attn-check compares a backend of this layer with cpu_ref. */
static void add_bound(const struct info *info, struct json *layer, int32_t index)
{
    const struct attn_choice choice =
        choice_of(info->api, info->assignment, index, ATTN_PHASE_DECODE);
    struct json *bound = json_add(layer, "bound", json_object());
    json_add(bound, "of_row_rms", json_number(choice.bound_of_row_rms));
    json_add(bound, "of_element", json_number(choice.bound_of_element));
    if (choice.bound_of_lse > 0) {
        json_add(bound, "lse", json_number(choice.bound_of_lse));
    }
}

static void read_times(struct info *info)
{
    char path[4096];
    const char *why;
    struct attn_error error = ATTN_ERROR_INIT;
    if (info->assignment != NULL &&
        cache_lines_path(RANKS_FILE, path, sizeof path, &error) == ATTN_OK) {
        info->times = cache_lines_read(path, &why);
    }
    struct attn_device_info device;
    if (device_describe(info->api, info->runtime, info->device, &device)) {
        measurement_device(&device, info->device_key);
    }
}

static struct json *layers_json(struct info *info)
{
    struct json *layers = json_array();
    read_times(info);
    for (int32_t i = 0; info->assignment != NULL && i < info->config.num_layers; i++) {
        struct json *layer = json_object();
        json_add(layer, "index", json_number(i));
        json_add(layer, "name", json_string(info->config.layers[i].name));
        json_add(layer, "kind", json_string(layer_kind_name(&info->config.layers[i].desc)));
        for (int32_t phase = 0; phase <= ATTN_PHASE_DECODE; phase++) {
            add_choice(info, layer, i, phase);
        }
        add_bound(info, layer, i);
        add_others(info, layer, i);
        json_push(layers, layer);
    }
    return layers;
}

static struct json *whole_json(struct info *info)
{
    char abi[32];
    struct json *root = json_object();
    snprintf(abi, sizeof abi, "%u.%u", ATTN_VERSION_MAJOR(info->api->abi_version),
             ATTN_VERSION_MINOR(info->api->abi_version));
    json_add(root, "abi", json_string(abi));
    json_add(root, "version", json_string(info->api->version));
    json_add(root, "plugins", plugins_json(info));
    json_add(root, "devices", devices_json(info));
    json_add(root, "backends", backends_json(info));
    if (info->assignment != NULL) {
        char device[DEVICE_NAME_SIZE];
        json_add(root, "device", json_string(device_name(info->device, device)));
    }
    json_add(root, "layers", layers_json(info));
    return root;
}

static void print_reasons(const struct json *item)
{
    const struct json *reason;
    JSON_EACH(reason, json_get(item, "reasons"))
    {
        printf(" %s %s (supported: %s);", json_text(reason, "field"), json_text(reason, "asked"),
               json_text(reason, "supported"));
    }
}

static void print_times(const struct json *item)
{
    const struct json *time;
    JSON_EACH(time, json_get(item, "times"))
    {
        const char *stale = json_text(time, "stale");
        printf("        %s: %.6g us, spread %.0f%%, measured on %s with version %s%s%s\n",
               json_text(time, "bucket"), json_value(time, "time_us"),
               100 * json_value(time, "spread"), json_text(time, "date"),
               json_text(time, "version"), stale[0] != '\0' ? "; stale: with " : "", stale);
    }
}

static void print_explanation(const struct json *layer)
{
    const struct json *rejected;
    for (int32_t phase = 0; phase <= ATTN_PHASE_DECODE; phase++) {
        const struct json *choice = json_get(layer, phase_names[phase]);
        if (json_get(choice, "backend")->type == JSON_STRING) {
            const char *rule = json_text(choice, "rule");
            const bool forced = json_value(choice, "forced") != 0;
            printf("      %s for %s: declared rank %d%s%s%s\n", json_text(choice, "backend"),
                   phase_names[phase], (int)json_value(choice, "rank"),
                   json_value(choice, "measured") != 0 ? ", measured and on file" : "",
                   rule[0] == '\0'                 ? ""
                   : forced                        ? ", by the rule "
                   : rule[strlen(rule) - 1] == '?' ? ", nothing meets the wish "
                                                   : ", within the rule ",
                   rule);
            print_times(choice);
            printf("        %s\n", json_text(choice, "program"));
        }
    }
    const struct json *bound = json_get(layer, "bound");
    if (json_value(bound, "of_row_rms") > 0) {
        printf("      held by attn-check to %g of a row's root mean square + %g of an element\n",
               json_value(bound, "of_row_rms"), json_value(bound, "of_element"));
    }
    JSON_EACH(rejected, json_get(layer, "eligible"))
    {
        printf("      %s could serve %s: declared rank %d", json_text(rejected, "backend"),
               json_text(rejected, "phase"), (int)json_value(rejected, "rank"));
        print_reasons(rejected);
        putchar('\n');
        print_times(rejected);
    }
    JSON_EACH(rejected, json_get(layer, "rejected"))
    {
        printf("      not %s for %s:", json_text(rejected, "backend"),
               json_text(rejected, "phase"));
        if (json_count(json_get(rejected, "reasons")) == 0) {
            printf(" %s", json_text(rejected, "verdict"));
        }
        print_reasons(rejected);
        putchar('\n');
    }
}

static void print_value(const struct json *value)
{
    const struct json *item;
    if (value->type == JSON_NUMBER) {
        printf("%lld", (long long)value->number);
    } else if (value->type == JSON_BOOL) {
        printf("%s", value->number != 0 ? "yes" : "no");
    } else if (value->type == JSON_STRING) {
        printf("%s", value->text);
    }
    JSON_EACH(item, value)
    {
        printf("%s%s", value->type == JSON_OBJECT ? item->name : "",
               value->type == JSON_OBJECT ? " " : "");
        print_value(item);
        printf("%s", item->next != NULL ? ", " : "");
    }
}

/* A line for each field that a backend declares. */
static void print_capabilities(const struct json *capabilities)
{
    const struct json *field;
    JSON_EACH(field, capabilities)
    {
        printf("    %s: ", field->name);
        print_value(field);
        putchar('\n');
    }
}

static void print_conformance(const struct json *found)
{
    if (json_count(found) > 0) {
        printf(
            "    attn-check --%s: %d passed, %d failed, %d skipped (seed %.0f, libattn %s)%s%s\n",
            json_text(found, "mode"), (int)json_value(found, "passed"),
            (int)json_value(found, "failed"), (int)json_value(found, "skipped"),
            json_value(found, "seed"), json_text(found, "version"),
            json_value(found, "conformant") != 0 ? "" : "; not conformant: ",
            json_text(found, "lacks"));
    }
}

/* All of two layers but their indices and names. */
static bool same_layer(const struct json *a, const struct json *b)
{
    static const char *const members[] = {"kind",     "prefill",  "decode",
                                          "eligible", "rejected", "layout_id"};
    for (size_t i = 0; i < sizeof members / sizeof *members; i++) {
        if (!json_equal(json_get(a, members[i]), json_get(b, members[i]))) {
            return false;
        }
    }
    return true;
}

/* The layers like `first`, unless an earlier one is like it: then none. */
static int32_t layers_like(const struct json *layers, const struct json *first, int32_t *indices)
{
    const struct json *layer;
    int32_t count = 0;
    JSON_EACH(layer, layers)
    {
        if (same_layer(layer, first)) {
            if (count == 0 && layer != first) {
                return 0;
            }
            indices[count++] = (int32_t)json_value(layer, "index");
        }
    }
    return count;
}

/* A line for each group of equal layers. */
static void print_layers(const struct json *layers, const struct options *options)
{
    const struct json *layer;
    int32_t *indices = command_calloc((size_t)json_count(layers), sizeof *indices);
    printf("%-6s %-12s %-22s %-22s %-16s which\n", "layers", "kind", "prefill", "decode", "rule");
    JSON_EACH(layer, layers)
    {
        const struct json *prefill = json_get(layer, "prefill");
        const struct json *decode = json_get(layer, "decode");
        const int32_t count = layers_like(layers, layer, indices);
        char which[80];
        if (count == 0) {
            continue;
        }
        layer_list(indices, count, which, sizeof which);
        printf("%6d %-12s %-22s %-22s %-16s %s%s%s\n", count, json_text(layer, "kind"),
               json_text(prefill, "backend"), json_text(decode, "backend"),
               json_value(decode, "forced") != 0 ? json_text(decode, "rule") : "", which,
               count == 1 ? ": " : "", count == 1 ? json_text(layer, "name") : "");
        if (json_count(json_get(layer, "layout")) > 0) {
            const struct json *line;
            printf("      layout %s\n", json_text(layer, "layout_id"));
            JSON_EACH(line, json_get(layer, "layout"))
            {
                printf("        %s\n", line->text);
            }
        }
        if (options->explain) {
            print_explanation(layer);
        }
    }
    free(indices);
}

/* The same document, for people. */
static void print_text(const struct json *root, const struct options *options)
{
    const struct json *item;
    printf("libattn %s, ABI %s\n\nplugins\n", json_text(root, "version"), json_text(root, "abi"));
    JSON_EACH(item, json_get(root, "plugins"))
    {
        printf("  %s: %s%s%s\n", json_text(item, "file"), json_text(item, "status"),
               json_text(item, "reason")[0] != '\0' ? ": " : "", json_text(item, "reason"));
    }
    if (options->devices) {
        puts("\ndevices");
        JSON_EACH(item, json_get(root, "devices"))
        {
            printf("  %s, %s, %d multiprocessors or cores, %.1f GiB %s\n", json_text(item, "name"),
                   json_text(item, "arch"), (int)json_value(item, "num_multiprocessors"),
                   json_value(item, "memory_bytes") / (1 << 30), json_text(item, "isa"));
        }
    }
    puts("\nbackends");
    JSON_EACH(item, json_get(root, "backends"))
    {
        const struct json *rank = json_get(item, "rank");
        printf("  %s%s%s %s (%s) of %s, rank %d in prefill, %d in decode\n",
               json_text(item, "name"), json_text(item, "variant")[0] != '\0' ? "@" : "",
               json_text(item, "variant"), json_text(item, "version"), json_text(item, "vendor"),
               json_text(item, "file"), (int)json_value(rank, "prefill"),
               (int)json_value(rank, "decode"));
        print_conformance(json_get(item, "conformance"));
        print_capabilities(json_get(item, "capabilities"));
    }
    if (options->model != NULL) {
        printf("\nlayers on %s\n", json_text(root, "device"));
        print_layers(json_get(root, "layers"), options);
    }
}

static attn_status select_model(struct info *info, struct attn_error *error)
{
    TRY(info->api->best_device(info->runtime, NULL, &info->device, error));
    TRY(model_config_read(&info->config, info->options.model, error));
    const struct attn_select_options options =
        SIZED(attn_select_options, .device = info->device, .flags = ATTN_SELECT_KEEP_UNSERVED);
    model_config_warn(&info->config, "attn-info", info->options.model);
    return model_config_select(&info->config, info->api, info->runtime, &options, &info->assignment,
                               error);
}

static bool all_served(const struct info *info)
{
    for (int32_t i = 0; info->assignment != NULL && i < info->config.num_layers; i++) {
        for (int32_t phase = 0; phase <= ATTN_PHASE_DECODE; phase++) {
            if (choice_of(info->api, info->assignment, i, phase).backend < 0) {
                return false;
            }
        }
    }
    return true;
}

static int show(struct info *info)
{
    struct json *root = whole_json(info);
    bool served = all_served(info), shown = true;
    struct attn_error error = ATTN_ERROR_INIT;
    if (served && info->options.layouts &&
        layouts_add(info->api, info->runtime, info->assignment, info->device, &info->config,
                    json_get(root, "layers"), &error) != ATTN_OK) {
        json_destroy(root);
        return command_failed("attn-info", info->options.model, &error);
    }
    if (info->options.json) {
        json_print(root);
    } else {
        print_text(root, &info->options);
    }
    if (info->options.html != NULL && html_write(info->options.html, root, &error) != ATTN_OK) {
        command_failed("attn-info", info->options.html, &error);
        shown = false;
    }
    json_destroy(root);
    if (!served) {
        fprintf(stderr, "attn-info: %s: a layer has no backend%s\n", info->options.model,
                info->options.explain || info->options.json ? "" : "; --explain tells why");
    }
    return served && shown ? EXIT_SUCCESS : EXIT_FAILURE;
}

static int run_tool(int argc, char **argv)
{
    struct info info = {.api = NULL};
    struct lock_file lock = {.file = NULL};
    struct attn_error error = ATTN_ERROR_INIT;
    int code = parse(argc, argv, &info.options);
    if (code >= 0) {
        return code;
    }
    if (info.options.diff != NULL) {
        return lock_diff(info.options.diff, info.options.with, info.options.json);
    }
    if (info.options.lock != NULL && lock_begin(&lock, info.options.lock, &error) != ATTN_OK) {
        return command_failed("attn-info", info.options.lock, &error);
    }
    if (library_open(&info.api, &error) != ATTN_OK) {
        return command_failed("attn-info", "core", &error);
    }
    if (info.api->runtime_create(NULL, &info.runtime, &error) != ATTN_OK) {
        return command_failed("attn-info", "runtime", &error);
    }
    if (info.options.model != NULL && select_model(&info, &error) != ATTN_OK) {
        code = command_failed("attn-info", info.options.model, &error);
    } else {
        code = show(&info);
        if (info.options.lock != NULL && code == EXIT_SUCCESS &&
            lock_write(&lock, info.api, info.runtime, info.assignment, &error) != ATTN_OK) {
            code = command_failed("attn-info", info.options.lock, &error);
        }
    }
    lock_finish(&lock);
    info.api->assignment_destroy(info.assignment);
    info.api->runtime_destroy(info.runtime);
    model_config_finish(&info.config);
    free(info.times);
    return code;
}

int main(int argc, char **argv)
{
    return command_end("attn-info", run_tool(argc, argv));
}
