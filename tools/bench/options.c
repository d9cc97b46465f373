/* SPDX-License-Identifier: Apache-2.0 */
#include "options.h"

#include <attn/kv_cache.h>
#include <getopt.h>
#include <stdlib.h>
#include <string.h>

#include "common/names.h"
#include "support/number.h"
#include "tune.h"

#define MAX_THREADS 4096

static const char usage[] =
    "usage: attn-bench [--backend NAME]... [--shape NAME[:key=value,...]]... [--dtype D]\n"
    "                  [--kv-dtype D] [--threads N] [--csv] [--plot FILE] [--tune]\n"
    "                  [--json] [--help] [--version]\n"
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
    "  --csv            one line for each result on stdout\n"
    "  --plot FILE      roofline and length curve, .svg or .png (needs gnuplot)\n"
    "  --tune           measures every backend of the device and keeps the times, by which\n"
    "                   selections then go\n"
    "  --json           one JSON document on stdout\n"
    "\n"
    "A value may be a list a+b+c or a range a..b (doubling) or a..b/step: each is measured.\n"
    "Shapes, with their parameters:\n";

static const char ending[] =
    "\nExit status: 0 all measured, 1 a shape is not served or its measurement failed,\n"
    "2 usage, 77 hardware absent.\n";

static void print_usage(FILE *file)
{
    fputs(usage, file);
    shapes_describe(file);
    fputs(ending, file);
}

static bool parse_dtype(struct options *options, const char *text)
{
    options->dtype = dtype_of_name(text);
    if (options->dtype < ATTN_DTYPE_F16 || options->dtype > ATTN_DTYPE_F32) {
        fprintf(stderr, "attn-bench: --dtype: '%s' is not one of f16, bf16, f32\n", text);
        return false;
    }
    return true;
}

static bool parse_kv_dtype(struct options *options, const char *text)
{
    options->kv_dtype = kv_dtype_of_name(text);
    if (options->kv_dtype < 0) {
        fprintf(stderr, "attn-bench: --kv-dtype: '%s' is not one of", text);
        for (int32_t i = 0; kv_dtype_of_name(kv_dtype_name(i)) == i; i++) {
            fprintf(stderr, "%s %s", i ? "," : "", kv_dtype_name(i));
        }
        fputc('\n', stderr);
        return false;
    }
    return true;
}

static bool parse_threads(struct options *options, const char *text)
{
    char *end;
    long threads = strtol(text, &end, 10);
    if (end == text || *end != '\0' || threads < 1 || threads > MAX_THREADS) {
        fprintf(stderr, "attn-bench: --threads: '%s' is not a whole number from 1 to %d\n", text,
                MAX_THREADS);
        return false;
    }
    options->threads = (int32_t)threads;
    return true;
}

static bool parse_plot(struct options *options, const char *text)
{
    size_t length = strlen(text);
    bool known = length > 4 &&
                 (strcmp(text + length - 4, ".svg") == 0 || strcmp(text + length - 4, ".png") == 0);
    options->plot = text;
    if (!known) {
        fprintf(stderr, "attn-bench: --plot: '%s' ends in neither .svg nor .png\n", text);
    }
    return known;
}

static bool parse_shape(struct options *options, const char *text)
{
    char message[1024];
    if (!shapes_parse(&options->shapes, text, message, sizeof message)) {
        fprintf(stderr, "attn-bench: --shape %s: %s\n", text, message);
        return false;
    }
    return true;
}

static bool parse_backend(struct options *options, const char *text)
{
    if (options->num_backends == MAX_BACKENDS) {
        fprintf(stderr, "attn-bench: --backend %s: more than %d\n", text, MAX_BACKENDS);
        return false;
    }
    options->backends[options->num_backends++] = text;
    return true;
}

static int parse_one(struct options *options, int c)
{
    bool ok = true;
    switch (c) {
    case 'b':
        ok = parse_backend(options, optarg);
        break;
    case 's':
        ok = parse_shape(options, optarg);
        break;
    case 'd':
        ok = parse_dtype(options, optarg);
        break;
    case 'k':
        ok = parse_kv_dtype(options, optarg);
        break;
    case 't':
        ok = parse_threads(options, optarg);
        break;
    case 'p':
        ok = parse_plot(options, optarg);
        break;
    case 'c':
        options->csv = true;
        break;
    case 'u':
        options->tune = true;
        break;
    case 'j':
        options->json = true;
        break;
    case 'x':
        options->child = optarg;
        break;
    case 'h':
        print_usage(stdout);
        return EXIT_SUCCESS;
    case 'v':
        puts("attn-bench " ATTN_VERSION);
        return EXIT_SUCCESS;
    default:
        print_usage(stderr);
        return EXIT_USAGE;
    }
    return ok ? -1 : EXIT_USAGE;
}

int options_parse(int argc, char **argv, struct options *options)
{
    static const struct option names[] = {{"backend", required_argument, NULL, 'b'},
                                          {"shape", required_argument, NULL, 's'},
                                          {"dtype", required_argument, NULL, 'd'},
                                          {"kv-dtype", required_argument, NULL, 'k'},
                                          {"threads", required_argument, NULL, 't'},
                                          {"plot", required_argument, NULL, 'p'},
                                          {"csv", no_argument, NULL, 'c'},
                                          {"tune", no_argument, NULL, 'u'},
                                          {"json", no_argument, NULL, 'j'},
                                          {"help", no_argument, NULL, 'h'},
                                          {"version", no_argument, NULL, 'v'},
                                          {"child", required_argument, NULL, 'x'},
                                          {NULL, 0, NULL, 0}};
    int c, code = -1;
    *options = (struct options){.dtype = ATTN_DTYPE_BF16};
    while (code < 0 && (c = getopt_long(argc, argv, "", names, NULL)) != -1) {
        code = parse_one(options, c);
    }
    if (code < 0 && optind != argc) {
        fprintf(stderr, "attn-bench: '%s' is no option\n", argv[optind]);
        print_usage(stderr);
        code = EXIT_USAGE;
    }
    if (code < 0 && options->json && options->csv) {
        fputs("attn-bench: --csv: stdout is --json's already; one of them\n", stderr);
        code = EXIT_USAGE;
    }
    if (code < 0 && options->tune && options->num_backends > 1) {
        fputs("attn-bench: --tune: takes one --backend, or none for all of the device\n", stderr);
        code = EXIT_USAGE;
    }
    for (int32_t i = 0; code < 0 && options->tune && i < options->shapes.count; i++) {
        const struct shape *shape = &options->shapes.shapes[i];
        if (!tune_takes(shape->kind) || shape->value[PARAMETER_ROTATE] == 0) {
            char text[256];
            shape_text(shape, text, sizeof text);
            fprintf(stderr, "attn-bench: --tune: a layer's rank cannot come from the shape %s\n",
                    text);
            code = EXIT_USAGE;
        }
    }
    if (code < 0 && options->shapes.count == 0 &&
        !(parse_shape(options, "decode") && parse_shape(options, "prefill"))) {
        code = EXIT_FAILURE;
    }
    return code;
}

void options_finish(struct options *options)
{
    shapes_finish(&options->shapes);
}
