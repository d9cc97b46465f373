/* SPDX-License-Identifier: Apache-2.0 */
/* attn-run: an engine's attention without its weights. It serves a model's layers with the selected
 * backends over paged caches, in continuous batches, and holds every output against an independent
 * computation. */
#include "common/json.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/command.h"
#include "common/find.h"
#include "common/names.h"
#include "engine.h"

static const char usage[] =
    "usage: attn-run --model FILE|--qkv FILE [--layers N] [--scale F] [--steps N] [--replay N]\n"
    "                [--requests FILE] [--seed S] [--verify] [--json] [--help] [--version]\n"
    "       attn-run --capsule FILE [--backend NAME] [--seed S] [--json]\n"
    "\n"
    "Runs a model's attention layers over a paged KV cache in continuous batches.\n"
    "\n"
    "  --model FILE     a model's config.json\n"
    "  --qkv FILE       recorded activations (safetensors), replayed instead\n"
    "  --capsule FILE   a step that ATTN_RECORD has kept, run again and held to cpu_ref\n"
    "  --backend NAME   that runs it, as in ATTN_BACKEND\n"
    "  --layers N       at most N layers a tower, but one of each kind (default all)\n"
    "  --scale F        factor on the length of the long request (default 1)\n"
    "  --steps N        steps (default 4)\n"
    "  --replay N       recurrent layers write a state once in N tokens, by a ring of inputs\n"
    "  --requests FILE  JSON list of {\"arrival\", \"prompt\", \"output\", \"preempt_at\", "
    "\"encoder\", \"shares\",\n"
    "                   \"shared\"}: the first `shared` tokens are those of the earlier request "
    "`shares`\n"
    "  --seed S         of the inputs (default 1)\n"
    "  --verify         holds every output against a float64 computation over unpaged keys\n"
    "  --json           one JSON document on stdout\n"
    "\n"
    "Exit status: 0 ok, 1 failed or, with --verify, not every layer was right, 2 usage;\n"
    "of --capsule: 0 within the bound, 1 off or not run.\n";

static int parse(int argc, char **argv, struct settings *s)
{
    const struct command_option names[] = {
        {"model", .text = &s->model},
        {"qkv", .text = &s->qkv},
        {"capsule", .text = &s->capsule},
        {"backend", .text = &s->backend},
        {"layers", .count = &s->layers, .least = 1, .most = 1024},
        {"scale", .number = &s->scale, .most = 16, .numbers = "a number"},
        {"steps", .count = &s->steps, .least = 1, .most = 4096},
        {"replay", .count = &s->replay, .least = 1, .most = 1024},
        {"requests", .text = &s->requests},
        {"seed", .seed = &s->seed},
        {"verify", &s->verify},
        {"json", &s->json}};
    const struct command command = {"attn-run", usage, .options = names,
                                    .num_options = sizeof names / sizeof *names};
    *s = (struct settings){.steps = 4, .scale = 1, .seed = 1};
    int code = command_parse(&command, argc, argv);
    const int inputs = (s->model != NULL) + (s->qkv != NULL) + (s->capsule != NULL);
    if (code < 0 && (inputs != 1 || (s->backend != NULL && s->capsule == NULL))) {
        fputs(usage, stderr);
        code = EXIT_USAGE;
    }
    return code;
}

static bool layer_right(const struct run_layer *layer)
{
    return layer->tally.compared > 0 && layer->tally.max_error <= 1;
}

static void tell_json(const struct run_engine *engine, bool verified, double max_error,
                      int64_t compared, double seconds)
{
    struct json *root = json_object();
    char device[DEVICE_NAME_SIZE];
    json_add(root, "device", json_string(device_name(engine->device.device, device)));
    json_add(root, "verified", json_bool(verified));
    json_add(root, "max_error", json_number(isfinite(max_error) ? max_error : 1e30));
    json_add(root, "compared_elements", json_number((double)compared));
    struct json *layers = json_add(root, "layers", json_array());
    for (int32_t i = 0; i < engine->num_layers; i++) {
        const struct run_layer *layer = &engine->layers[i];
        struct json *item = json_object();
        json_add(item, "index", json_number(i));
        json_add(item, "name", json_string(layer->source->name));
        json_add(item, "kind", json_string(layer_kind_name(&layer->source->desc)));
        json_add(item, "backend", json_string(layer->backend));
        json_add(item, "max_error",
                 json_number(isfinite(layer->tally.max_error) ? layer->tally.max_error : 1e30));
        json_push(layers, item);
    }
    json_add(root, "tokens", json_number((double)engine->tokens));
    json_add(root, "seconds", json_number(seconds));
    json_print(root);
    json_destroy(root);
}

/* Whether two layers share a line: wrong ones have their own. */
static bool same_layer(const struct run_layer *a, const struct run_layer *b)
{
    return a == b ||
           (strcmp(a->backend, b->backend) == 0 &&
            strcmp(layer_kind_name(&a->source->desc), layer_kind_name(&b->source->desc)) == 0 &&
            (a->tally.compared > 0) == (b->tally.compared > 0) &&
            (a->tally.compared == 0 || (layer_right(a) && layer_right(b))));
}

/* Layer `first` and all like it, with the largest of their errors; nothing if an earlier one is
 * like it. `indices` has room for all layers. */
static void tell_group(const struct run_engine *engine, int32_t first, int32_t *indices)
{
    const struct run_layer *layer = &engine->layers[first];
    double max_error = 0;
    int32_t count = 0;
    char which[80];
    for (int32_t i = 0; i < engine->num_layers; i++) {
        if (same_layer(layer, &engine->layers[i])) {
            double error = engine->layers[i].tally.max_error;
            if (i < first) {
                return;
            }
            indices[count++] = i;
            max_error = error > max_error || isnan(error) ? error : max_error;
        }
    }
    layer_list(indices, count, which, sizeof which);
    printf("%6d %-15s %-24s ", count, layer_kind_name(&layer->source->desc), layer->backend);
    if (layer->tally.compared > 0) {
        printf("%-13.3g %s%s\n", max_error, which, layer_right(layer) ? "" : "  WRONG");
    } else {
        printf("not compared  %s\n", which);
    }
}

static void tell_text(const struct run_engine *engine, bool verified, int64_t compared,
                      double seconds)
{
    char device[DEVICE_NAME_SIZE];
    struct attn_device_info info;
    const bool known = device_describe(engine->api, engine->runtime, engine->device.device, &info);
    printf("on %s%s%s%s\n", device_name(engine->device.device, device), known ? " (" : "",
           known ? info.name : "", known ? ")" : "");
    printf("%-6s %-15s %-24s error / bound which\n", "layers", "kind", "backend");
    int32_t *indices = command_calloc((size_t)engine->num_layers, sizeof *indices);
    for (int32_t i = 0; i < engine->num_layers; i++) {
        tell_group(engine, i, indices);
    }
    free(indices);
    printf("%lld tokens in %.2f s; %lld elements compared%s\n", (long long)engine->tokens, seconds,
           (long long)compared,
           engine->settings->verify ? (verified ? ", all right" : ", NOT all right") : "");
}

static int print_totals(const struct run_engine *engine, double seconds)
{
    bool verified = engine->settings->verify && engine->num_layers > 0;
    double max_error = 0;
    int64_t compared = 0;
    for (int32_t i = 0; i < engine->num_layers; i++) {
        const struct run_layer *layer = &engine->layers[i];
        verified &= layer_right(layer);
        max_error = layer->tally.max_error > max_error ? layer->tally.max_error : max_error;
        compared += layer->tally.compared;
    }
    if (engine->settings->json) {
        tell_json(engine, verified, max_error, compared, seconds);
    } else {
        tell_text(engine, verified, compared, seconds);
    }
    return verified || !engine->settings->verify ? EXIT_SUCCESS : EXIT_FAILURE;
}

static int run_tool(int argc, char **argv)
{
    struct settings settings;
    struct run_engine engine = {.settings = &settings, .error = ATTN_ERROR_INIT};
    int code = parse(argc, argv, &settings);
    if (code >= 0) {
        return code;
    }
    if (settings.capsule != NULL) {
        return capsule_replay(settings.capsule, settings.backend, settings.seed, settings.json);
    }
    const double begin = seconds_of(CLOCK_MONOTONIC);
    attn_status status = library_open(&engine.api, &engine.error);
    status = status ? status : engine.api->runtime_create(NULL, &engine.runtime, &engine.error);
    if (status == ATTN_OK && settings.qkv != NULL) {
        status = engine_replay(&engine);
    } else if (status == ATTN_OK) {
        status = engine_setup(&engine);
        status = status ? status : engine_run(&engine);
    }
    const double seconds = seconds_of(CLOCK_MONOTONIC) - begin;
    if (status != ATTN_OK) {
        code = command_failed("attn-run", settings.qkv != NULL ? settings.qkv : settings.model,
                              &engine.error);
    } else {
        code = print_totals(&engine, seconds);
    }
    if (engine.api != NULL) {
        engine_finish(&engine);
        engine.api->runtime_destroy(engine.runtime);
    }
    return code;
}

int main(int argc, char **argv)
{
    return command_end("attn-run", run_tool(argc, argv));
}
