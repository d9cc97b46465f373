/* SPDX-License-Identifier: Apache-2.0 */
/* The options of attn-bench, and which of them exclude each other. */
#include "session.h"

#include <attn/kv_cache.h>
#include <stdlib.h>
#include <string.h>

#include "common/command.h"
#include "common/names.h"
#include "tune.h"

#define MAX_THREADS 4096
#define MAX_SECONDS 3600

static const char usage[] =
    "usage: attn-bench [--backend NAME]... [--shape NAME[:key=value,...]]... [--dtype D]\n"
    "                  [--kv-dtype D] [--threads N] [--cpu-time] [--budget S] [--csv]\n"
    "                  [--against BUILD_OR_PLUGIN] [--peer FILE.so] [--baseline FILE] [--plot "
    "FILE]\n"
    "                  [--tune [--model FILE [--seconds N] [--max-spread P]]] [--json] [--help] "
    "[--version]\n"
    "\n"
    "Times a backend's kernels through the core and holds them to what the machine can do,\n"
    "measured in the same process before every sample.\n"
    "\n"
    "  --backend NAME   cpu_simd, cpu_simd@avx2 (default: what a selection takes); may be\n"
    "                   repeated: samples alternate, times are put next to the first one's\n"
    "  --shape SHAPE    decode:r=1,l=1024..65536; may be repeated (default: decode, prefill)\n"
    "  --dtype D        f16, bf16 (default), f32\n"
    "  --kv-dtype D     auto (default), f16, bf16, f32, fp8_e4m3, fp8_e5m2, int8_per_token_head, "
    "...\n"
    "  --threads N      of CPU backends and of their ceilings\n"
    "  --cpu-time       processor time over the threads, for a machine that others use; of CPU\n"
    "                   backends\n"
    "  --budget S       seconds for a shape and backend, ceilings included (default 3); at least\n"
    "                   seven samples are taken\n"
    "  --against PATH   the same backends of another build folder or plugin file, in turns with\n"
    "                   this one's\n"
    "  --peer FILE.so   another library by five functions (attn-bench(1)), in turns, over the "
    "same\n"
    "                   tensors\n"
    "  --baseline FILE  what --csv wrote before: fails what takes longer over its floor, by more\n"
    "                   than 5 % and both spreads, or is not in FILE\n"
    "  --csv            one line for each result on stdout\n"
    "  --plot FILE      roofline and length curve, .svg or .png (needs gnuplot)\n"
    "  --tune           measures every backend of the device and keeps the times, by which\n"
    "                   selections then go\n"
    "  --model FILE     with --tune: the layers of a model's config.json in place of --shape, by\n"
    "                   phase and bucket; shows what is chosen before and after\n"
    "  --seconds N      of --model in all (default 60)\n"
    "  --max-spread P   of --model: times whose spread is above P percent are measured once more,\n"
    "                   then not kept (default 30)\n"
    "  --json           one JSON document on stdout\n"
    "\n"
    "A value may be a list a+b+c or a range a..b (doubling) or a..b/step: each is measured.\n"
    "Shapes, with their parameters:\n";

static const char ending[] =
    "\nExit status: 0 all measured, 1 a shape is not served, its measurement failed, or a\n"
    "signal ended the run, 2 usage, 77 hardware absent.\n";

static void describe(FILE *file)
{
    shapes_describe(file);
    fputs(ending, file);
}

static const char *parse_dtype(void *user, const char *text)
{
    struct options *options = user;
    options->dtype = dtype_of_name(text);
    return options->dtype < ATTN_DTYPE_F16 || options->dtype > ATTN_DTYPE_F32
               ? "is not one of f16, bf16, f32"
               : NULL;
}

static const char *parse_kv_dtype(void *user, const char *text)
{
    static char known[512];
    struct options *options = user;
    size_t used = (size_t)snprintf(known, sizeof known, "is not one of");
    options->kv_dtype = kv_dtype_of_name(text);
    for (int32_t i = 0; kv_dtype_of_name(kv_dtype_name(i)) == i && used < sizeof known; i++) {
        used += (size_t)snprintf(known + used, sizeof known - used, "%s %s", i ? "," : "",
                                 kv_dtype_name(i));
    }
    return options->kv_dtype < 0 ? known : NULL;
}

static const char *parse_plot(void *user, const char *text)
{
    struct options *options = user;
    const char *ending = strlen(text) > 4 ? text + strlen(text) - 4 : "";
    options->plot = text;
    return strcmp(ending, ".svg") == 0 || strcmp(ending, ".png") == 0
               ? NULL
               : "ends in neither .svg nor .png";
}

static const char *parse_shape(void *user, const char *text)
{
    static char message[1024] = "cannot be used: ";
    struct options *options = user;
    const size_t begin = strlen("cannot be used: ");
    return shapes_parse(&options->shapes, text, message + begin, sizeof message - begin) ? NULL
                                                                                         : message;
}

static const char *parse_backend(void *user, const char *text)
{
    struct options *options = user;
    if (options->num_backends == MAX_BACKENDS) {
        return "is more than 8";
    }
    options->backends[options->num_backends++] = text;
    return NULL;
}

int options_parse(int argc, char **argv, struct options *options)
{
    const struct command_option names[] = {
        {"backend", .parse = parse_backend},
        {"shape", .parse = parse_shape},
        {"dtype", .parse = parse_dtype},
        {"kv-dtype", .parse = parse_kv_dtype},
        {"threads", .count = &options->threads, .least = 1, .most = MAX_THREADS},
        {"budget", .number = &options->budget, .most = MAX_SECONDS, .numbers = "seconds"},
        {"plot", .parse = parse_plot},
        {"cpu-time", &options->cpu_time},
        {"csv", &options->csv},
        {"against", .text = &options->against},
        {"peer", .text = &options->peer},
        {"baseline", .text = &options->baseline},
        {"tune", &options->tune},
        {"model", .text = &options->model},
        {"seconds", .number = &options->seconds, .most = MAX_SECONDS, .numbers = "seconds"},
        {"max-spread", .count = &options->max_spread, .least = 1, .most = 10000},
        {"json", &options->json},
        {"child", .text = &options->child}};
    const struct command command = {"attn-bench",
                                    usage,
                                    .describe = describe,
                                    .options = names,
                                    .num_options = sizeof names / sizeof *names,
                                    .user = options};
    *options =
        (struct options){.dtype = ATTN_DTYPE_BF16, .budget = 3, .seconds = 60, .max_spread = 30};
    int code = command_parse(&command, argc, argv);
    const bool model = options->model != NULL, tune = options->tune;
    const struct {
        bool wrong;
        const char *what;
    } rules[] = {{options->json && options->csv, "--csv: stdout is --json's already; one of them"},
                 {tune && options->num_backends > 1,
                  "--tune: takes one --backend, or none for all of the device"},
                 {tune && (options->against != NULL || options->peer != NULL),
                  "--tune: measures this build alone, without --against and --peer"},
                 {model && (!tune || options->shapes.count > 0 || options->num_backends > 0),
                  "--model: goes with --tune, and with neither --shape nor --backend"},
                 {tune && options->baseline != NULL,
                  "--baseline: compares shapes, which --tune keeps as ranks"},
                 {model && options->plot != NULL,
                  "--plot: draws times under their floors, which --model has not"},
                 {tune && options->cpu_time && !model,
                  "--tune: keeps times of the wall's clock, not --cpu-time's"}};
    for (size_t i = 0; code < 0 && i < sizeof rules / sizeof *rules; i++) {
        if (rules[i].wrong) {
            fprintf(stderr, "attn-bench: %s\n", rules[i].what);
            code = EXIT_USAGE;
        }
    }
    for (int32_t i = 0; code < 0 && options->tune && i < options->shapes.count; i++) {
        const struct bench_shape *shape = &options->shapes.shapes[i];
        if (!tune_takes(shape->kind) || shape->value[PARAMETER_ROTATE] == 0) {
            char text[256];
            shape_text(shape, text, sizeof text);
            fprintf(stderr, "attn-bench: --tune: a layer's rank cannot come from the shape %s\n",
                    text);
            code = EXIT_USAGE;
        }
    }
    if (code < 0 && options->shapes.count == 0 &&
        (parse_shape(options, "decode") != NULL || parse_shape(options, "prefill") != NULL)) {
        code = EXIT_FAILURE;
    }
    return code;
}
