/* SPDX-License-Identifier: Apache-2.0 */
/* attn-info: what is on this machine, and which backend would serve each layer of a model, with
 * every reason. */
#include <cjson/cJSON.h>
#include <getopt.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/library.h"
#include "common/model_config.h"

#define EXIT_USAGE 2

static const char usage[] =
    "usage: attn-info [--model FILE] [--explain] [--devices] [--json] [--help] [--version]\n"
    "\n"
    "Lists plugins and backends; with a model, the backend of every layer and phase.\n"
    "\n"
    "  --model FILE  a model's config.json\n"
    "  --explain     for each layer, why the other backends were not taken\n"
    "  --devices     lists the devices, too\n"
    "  --json        one JSON document on stdout\n"
    "\n"
    "Exit status: 0 every layer is served, 1 a layer is not or an order was refused, 2 usage.\n";

static const char *const phase_names[] = {"prefill", "decode"};

struct options {
    const char *model;
    bool explain, devices, json;
};

struct info {
    const struct attn_api *api;
    attn_runtime *runtime;
    attn_assignment *assignment; /* NULL without a model */
    struct model_config config;
    struct options options;
};

static int fail_with(const char *what, const struct attn_error *error)
{
    fprintf(stderr, "attn-info: %s: %s%s%s\n", what, error->field,
            error->field[0] != '\0' ? ": " : "", error->message);
    return EXIT_FAILURE;
}

static int parse(int argc, char **argv, struct options *options)
{
    static const struct option names[] = {{"model", required_argument, NULL, 'm'},
                                          {"explain", no_argument, NULL, 'e'},
                                          {"devices", no_argument, NULL, 'd'},
                                          {"json", no_argument, NULL, 'j'},
                                          {"help", no_argument, NULL, 'h'},
                                          {"version", no_argument, NULL, 'v'},
                                          {NULL, 0, NULL, 0}};
    int c;
    *options = (struct options){NULL, false, false, false};
    while ((c = getopt_long(argc, argv, "", names, NULL)) != -1) {
        switch (c) {
        case 'm':
            options->model = optarg;
            break;
        case 'e':
            options->explain = true;
            break;
        case 'd':
            options->devices = true;
            break;
        case 'j':
            options->json = true;
            break;
        case 'h':
            fputs(usage, stdout);
            return EXIT_SUCCESS;
        case 'v':
            puts("attn-info " ATTN_VERSION);
            return EXIT_SUCCESS;
        default:
            fputs(usage, stderr);
            return EXIT_USAGE;
        }
    }
    if (optind != argc) {
        fputs(usage, stderr);
        return EXIT_USAGE;
    }
    return -1;
}

static cJSON *plugins_json(const struct info *info)
{
    cJSON *plugins = cJSON_CreateArray();
    for (int32_t i = 0; i < info->api->plugin_count(info->runtime); i++) {
        struct attn_plugin_info plugin = {.struct_size = sizeof plugin};
        cJSON *item = cJSON_CreateObject();
        info->api->plugin_info(info->runtime, i, &plugin);
        cJSON_AddStringToObject(item, "file", plugin.file);
        cJSON_AddStringToObject(item, "status", info->api->status_text(plugin.status));
        cJSON_AddStringToObject(item, "reason", plugin.reason);
        cJSON_AddItemToArray(plugins, item);
    }
    return plugins;
}

static cJSON *devices_json(const struct info *info)
{
    cJSON *devices = cJSON_CreateArray();
    for (int32_t i = 0; i < info->api->device_count(info->runtime); i++) {
        struct attn_device_info device = {.struct_size = sizeof device};
        cJSON *item = cJSON_CreateObject();
        info->api->device_info(info->runtime, i, &device);
        cJSON_AddNumberToObject(item, "type", device.device.type);
        cJSON_AddNumberToObject(item, "id", device.device.id);
        cJSON_AddStringToObject(item, "name", device.name);
        cJSON_AddStringToObject(item, "arch", device.arch);
        cJSON_AddStringToObject(item, "isa", device.isa);
        cJSON_AddNumberToObject(item, "num_multiprocessors", device.num_multiprocessors);
        cJSON_AddNumberToObject(item, "memory_bytes", (double)device.memory_bytes);
        cJSON_AddItemToArray(devices, item);
    }
    return devices;
}

static cJSON *backends_json(const struct info *info)
{
    cJSON *backends = cJSON_CreateArray();
    for (int32_t i = 0; i < info->api->backend_count(info->runtime); i++) {
        struct attn_backend_info backend = {.struct_size = sizeof backend};
        cJSON *item = cJSON_CreateObject(), *device = cJSON_CreateObject();
        info->api->backend_info(info->runtime, i, &backend);
        cJSON_AddStringToObject(item, "name", backend.caps->name);
        cJSON_AddStringToObject(item, "variant", backend.caps->variant);
        cJSON_AddStringToObject(item, "version", backend.caps->version);
        cJSON_AddStringToObject(item, "vendor", backend.caps->vendor);
        cJSON_AddNumberToObject(device, "type", backend.caps->device.type);
        cJSON_AddNumberToObject(device, "id", backend.caps->device.id);
        cJSON_AddItemToObject(item, "device", device);
        cJSON_AddItemToArray(backends, item);
    }
    return backends;
}

static void add_choice(const struct info *info, cJSON *layer, int32_t index, int32_t phase)
{
    struct attn_choice choice = {.struct_size = sizeof choice};
    cJSON *item = cJSON_CreateObject();
    info->api->assignment_choice(info->assignment, index, phase, &choice);
    if (choice.backend >= 0) {
        cJSON_AddStringToObject(item, "backend", choice.name);
    } else {
        cJSON_AddNullToObject(item, "backend");
    }
    cJSON_AddStringToObject(item, "rule", choice.rule);
    cJSON_AddBoolToObject(item, "forced", choice.forced);
    cJSON_AddBoolToObject(item, "measured", choice.measured);
    cJSON_AddItemToObject(layer, phase_names[phase], item);
}

static void add_rejected(const struct info *info, cJSON *layer, int32_t index)
{
    cJSON *rejected = cJSON_CreateArray();
    for (int32_t phase = 0; phase < ATTN_PHASE_COUNT; phase++) {
        for (int32_t b = 0; b < info->api->backend_count(info->runtime); b++) {
            struct attn_backend_info backend = {.struct_size = sizeof backend};
            int32_t verdict, count;
            info->api->assignment_verdict(info->assignment, index, phase, b, &verdict, &count);
            if (verdict == ATTN_VERDICT_CHOSEN || verdict == ATTN_VERDICT_ELIGIBLE) {
                continue;
            }
            cJSON *item = cJSON_CreateObject(), *reasons = cJSON_CreateArray();
            char name[160];
            info->api->backend_info(info->runtime, b, &backend);
            snprintf(name, sizeof name, "%s%s%s", backend.caps->name,
                     backend.caps->variant[0] != '\0' ? "@" : "", backend.caps->variant);
            cJSON_AddStringToObject(item, "backend", name);
            cJSON_AddStringToObject(item, "phase", phase_names[phase]);
            for (int32_t r = 0; r < count; r++) {
                struct attn_reason reason = {.struct_size = sizeof reason};
                cJSON *why = cJSON_CreateObject();
                info->api->assignment_reason(info->assignment, index, phase, b, r, &reason);
                cJSON_AddStringToObject(why, "field", reason.field);
                cJSON_AddStringToObject(why, "asked", reason.asked);
                cJSON_AddStringToObject(why, "supported", reason.supported);
                cJSON_AddItemToArray(reasons, why);
            }
            cJSON_AddItemToObject(item, "reasons", reasons);
            cJSON_AddItemToArray(rejected, item);
        }
    }
    cJSON_AddItemToObject(layer, "rejected", rejected);
}

static cJSON *layers_json(const struct info *info)
{
    cJSON *layers = cJSON_CreateArray();
    for (int32_t i = 0; info->assignment != NULL && i < info->config.num_layers; i++) {
        cJSON *layer = cJSON_CreateObject();
        cJSON_AddNumberToObject(layer, "index", i);
        cJSON_AddStringToObject(layer, "name", info->config.layers[i].name);
        cJSON_AddStringToObject(layer, "kind", model_layer_kind(&info->config.layers[i].desc));
        for (int32_t phase = 0; phase < ATTN_PHASE_COUNT; phase++) {
            add_choice(info, layer, i, phase);
        }
        add_rejected(info, layer, i);
        cJSON_AddItemToArray(layers, layer);
    }
    return layers;
}

static cJSON *whole_json(const struct info *info)
{
    char abi[32];
    cJSON *root = cJSON_CreateObject();
    snprintf(abi, sizeof abi, "%u.%u", ATTN_VERSION_MAJOR(info->api->abi_version),
             ATTN_VERSION_MINOR(info->api->abi_version));
    cJSON_AddStringToObject(root, "abi", abi);
    cJSON_AddStringToObject(root, "version", info->api->version);
    cJSON_AddItemToObject(root, "plugins", plugins_json(info));
    cJSON_AddItemToObject(root, "devices", devices_json(info));
    cJSON_AddItemToObject(root, "backends", backends_json(info));
    cJSON_AddItemToObject(root, "layers", layers_json(info));
    return root;
}

static const char *text_of(const cJSON *item, const char *name)
{
    const char *text = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(item, name));
    return text != NULL ? text : "-";
}

static void print_explanation(const cJSON *layer)
{
    const cJSON *rejected, *reason;
    for (int32_t phase = 0; phase < ATTN_PHASE_COUNT; phase++) {
        const cJSON *choice = cJSON_GetObjectItemCaseSensitive(layer, phase_names[phase]);
        if (cJSON_IsTrue(cJSON_GetObjectItemCaseSensitive(choice, "measured"))) {
            printf("      %s for %s: a measurement on file\n", text_of(choice, "backend"),
                   phase_names[phase]);
        }
    }
    cJSON_ArrayForEach(rejected, cJSON_GetObjectItemCaseSensitive(layer, "rejected"))
    {
        printf("      not %s for %s:", text_of(rejected, "backend"), text_of(rejected, "phase"));
        cJSON_ArrayForEach(reason, cJSON_GetObjectItemCaseSensitive(rejected, "reasons"))
        {
            printf(" %s %s (supported: %s);", text_of(reason, "field"), text_of(reason, "asked"),
                   text_of(reason, "supported"));
        }
        putchar('\n');
    }
}

/* The same document, for people. */
static void print_text(const cJSON *root, const struct options *options)
{
    const cJSON *item;
    printf("libattn %s, ABI %s\n\nplugins\n", text_of(root, "version"), text_of(root, "abi"));
    cJSON_ArrayForEach(item, cJSON_GetObjectItemCaseSensitive(root, "plugins"))
    {
        printf("  %s: %s%s%s\n", text_of(item, "file"), text_of(item, "status"),
               text_of(item, "reason")[0] != '\0' ? ": " : "", text_of(item, "reason"));
    }
    if (options->devices) {
        puts("\ndevices");
        cJSON_ArrayForEach(item, cJSON_GetObjectItemCaseSensitive(root, "devices"))
        {
            printf("  %s, %s, %d multiprocessors or cores, %.1f GiB %s\n", text_of(item, "name"),
                   text_of(item, "arch"),
                   cJSON_GetObjectItemCaseSensitive(item, "num_multiprocessors")->valueint,
                   cJSON_GetObjectItemCaseSensitive(item, "memory_bytes")->valuedouble / (1 << 30),
                   text_of(item, "isa"));
        }
    }
    puts("\nbackends");
    cJSON_ArrayForEach(item, cJSON_GetObjectItemCaseSensitive(root, "backends"))
    {
        printf("  %s%s%s %s (%s)\n", text_of(item, "name"),
               text_of(item, "variant")[0] != '\0' ? "@" : "", text_of(item, "variant"),
               text_of(item, "version"), text_of(item, "vendor"));
    }
    if (options->model != NULL) {
        printf("\n%-5s %-22s %-12s %-22s %-22s rule\n", "layer", "name", "kind", "prefill",
               "decode");
    }
    cJSON_ArrayForEach(item, cJSON_GetObjectItemCaseSensitive(root, "layers"))
    {
        const cJSON *prefill = cJSON_GetObjectItemCaseSensitive(item, "prefill");
        const cJSON *decode = cJSON_GetObjectItemCaseSensitive(item, "decode");
        printf("%5d %-22s %-12s %-22s %-22s %s\n",
               cJSON_GetObjectItemCaseSensitive(item, "index")->valueint, text_of(item, "name"),
               text_of(item, "kind"), text_of(prefill, "backend"), text_of(decode, "backend"),
               text_of(decode, "rule"));
        if (options->explain) {
            print_explanation(item);
        }
    }
}

static attn_status select_model(struct info *info, struct attn_error *error)
{
    const struct attn_select_options options = {.struct_size = sizeof options,
                                                .flags = ATTN_SELECT_KEEP_UNSERVED};
    attn_status status = model_config_read(&info->config, info->options.model, error);
    if (status != ATTN_OK) {
        return status;
    }
    model_config_warn(&info->config, "attn-info", info->options.model);
    const struct attn_layer_desc **layers =
        calloc((size_t)info->config.num_layers + 1, sizeof *layers);
    if (layers == NULL) {
        return ATTN_ERROR_OUT_OF_MEMORY;
    }
    for (int32_t i = 0; i < info->config.num_layers; i++) {
        layers[i] = &info->config.layers[i].desc;
    }
    status = info->api->select(info->runtime, &options, layers, info->config.num_layers,
                               &info->assignment, error);
    free(layers);
    return status;
}

static bool all_served(const struct info *info)
{
    for (int32_t i = 0; info->assignment != NULL && i < info->config.num_layers; i++) {
        for (int32_t phase = 0; phase < ATTN_PHASE_COUNT; phase++) {
            struct attn_choice choice = {.struct_size = sizeof choice};
            info->api->assignment_choice(info->assignment, i, phase, &choice);
            if (choice.backend < 0) {
                return false;
            }
        }
    }
    return true;
}

static int show(struct info *info)
{
    cJSON *root = whole_json(info);
    bool served = all_served(info);
    if (info->options.json) {
        char *text = cJSON_Print(root);
        puts(text != NULL ? text : "{}");
        cJSON_free(text);
    } else {
        print_text(root, &info->options);
    }
    cJSON_Delete(root);
    if (!served) {
        fprintf(stderr, "attn-info: %s: a layer has no backend%s\n", info->options.model,
                info->options.explain || info->options.json ? "" : "; --explain tells why");
    }
    return served ? EXIT_SUCCESS : EXIT_FAILURE;
}

int main(int argc, char **argv)
{
    struct info info = {.api = NULL};
    struct attn_error error = ATTN_ERROR_INIT;
    int code = parse(argc, argv, &info.options);
    if (code >= 0) {
        return code;
    }
    if (library_open(&info.api, &error) != ATTN_OK) {
        return fail_with("core", &error);
    }
    if (info.api->runtime_create(NULL, &info.runtime, &error) != ATTN_OK) {
        return fail_with("runtime", &error);
    }
    if (info.options.model != NULL && select_model(&info, &error) != ATTN_OK) {
        code = fail_with(info.options.model, &error);
    } else {
        code = show(&info);
    }
    info.api->assignment_destroy(info.assignment);
    info.api->runtime_destroy(info.runtime);
    model_config_finish(&info.config);
    return code;
}
