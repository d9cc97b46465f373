/* SPDX-License-Identifier: Apache-2.0 */
#include "shape_tables.h"

#include <attn/kv_cache.h>
#include <stdlib.h>

#include "common/names.h"

const struct parameter_limits parameters[PARAMETER_COUNT] = {
    [PARAMETER_R] = {"r", 1, 65536, true},
    [PARAMETER_L] = {"l", 0, 1 << 24, true},
    [PARAMETER_S] = {"s", 1, 1 << 20, true},
    [PARAMETER_SKEW] = {"skew", 0, 1, true},
    [PARAMETER_PREFILLS] = {"prefills", 1, 4096, true},
    [PARAMETER_HQ] = {"hq", 1, 4096, true},
    [PARAMETER_HKV] = {"hkv", 1, 4096, true},
    [PARAMETER_D] = {"d", 8, 4096, true},
    [PARAMETER_DV] = {"dv", 0, 4096, true},
    [PARAMETER_BLOCK] = {"block", 0, 65536, true},
    [PARAMETER_LAYOUT] = {"layout", LAYOUT_OWN, ATTN_KV_LAYOUT_HND_ROWS, true},
    [PARAMETER_WINDOW] = {"window", 0, 1 << 24, true},
    [PARAMETER_CHUNK] = {"chunk", 0, 1 << 24, true},
    [PARAMETER_SOFTCAP] = {"softcap", 0, 1e6, false},
    [PARAMETER_SINKS] = {"sinks", 0, 1, true},
    [PARAMETER_ALIBI] = {"alibi", 0, 2, true},
    [PARAMETER_INVARIANT] = {"invariant", 0, 2, true},
    [PARAMETER_CAUSAL] = {"causal", 0, 1, true},
    [PARAMETER_SHUFFLE] = {"shuffle", 0, 1, true},
    [PARAMETER_WRITE] = {"write", 0, 1, true},
    [PARAMETER_ROTATE] = {"rotate", 0, 1, true},
    [PARAMETER_LORA] = {"lora", 8, 4096, true},
    [PARAMETER_ROPE] = {"rope", 8, 1024, true},
    [PARAMETER_NOPE] = {"nope", 8, 1024, true},
    [PARAMETER_ABSORB] = {"absorb", 0, 1, true},
    [PARAMETER_TOPK] = {"topk", 1, 65536, true},
    [PARAMETER_HK] = {"hk", 1, 4096, true},
    [PARAMETER_HV] = {"hv", 1, 4096, true},
    [PARAMETER_DK] = {"dk", 8, 1024, true},
    [PARAMETER_CONV] = {"conv", 0, 64, true},
    [PARAMETER_LAYERS] = {"layers", 1, 4096, true},
    [PARAMETER_SEED] = {"seed", 0, 4294967295.0, true},
};

#define HEADS                                                                                      \
    {PARAMETER_HQ, 32}, {PARAMETER_HKV, 8}, {PARAMETER_D, 128},                                    \
    {                                                                                              \
        PARAMETER_DV, 0                                                                            \
    }
#define PLACE                                                                                      \
    {PARAMETER_BLOCK, 0}, {PARAMETER_LAYOUT, LAYOUT_OWN},                                          \
    {                                                                                              \
        PARAMETER_SHUFFLE, 1                                                                       \
    }
#define TERMS                                                                                      \
    {PARAMETER_WINDOW, 0}, {PARAMETER_CHUNK, 0}, {PARAMETER_SOFTCAP, 0}, {PARAMETER_SINKS, 0},     \
        {PARAMETER_ALIBI, 0},                                                                      \
    {                                                                                              \
        PARAMETER_INVARIANT, 0                                                                     \
    }
#define LATENT                                                                                     \
    {PARAMETER_HQ, 16}, {PARAMETER_LORA, 512}, {PARAMETER_ROPE, 64}, {PARAMETER_NOPE, 128},        \
        {PARAMETER_DV, 128}, {PARAMETER_BLOCK, 0}, {PARAMETER_SHUFFLE, 1},                         \
    {                                                                                              \
        PARAMETER_ABSORB, 0                                                                        \
    }
#define SEED                                                                                       \
    {                                                                                              \
        PARAMETER_SEED, 1                                                                          \
    }
#define ROTATE                                                                                     \
    {                                                                                              \
        PARAMETER_ROTATE, 1                                                                        \
    }
#define END                                                                                        \
    {                                                                                              \
        PARAMETER_COUNT, 0                                                                         \
    }
const struct shape_kind kinds[SHAPE_KIND_COUNT] = {
    [SHAPE_DECODE] = {"decode",
                      "s queries over l keys of each request",
                      {{PARAMETER_R, 8},
                       {PARAMETER_L, 4096},
                       {PARAMETER_S, 1},
                       {PARAMETER_SKEW, 0},
                       HEADS,
                       PLACE,
                       TERMS,
                       {PARAMETER_WRITE, 0},
                       ROTATE,
                       SEED,
                       END}},
    [SHAPE_PREFILL] = {"prefill",
                       "s queries, causal unless causal=0, over l keys (0: s)",
                       {{PARAMETER_R, 1},
                        {PARAMETER_L, 0},
                        {PARAMETER_S, 2048},
                        HEADS,
                        PLACE,
                        TERMS,
                        {PARAMETER_CAUSAL, 1},
                        {PARAMETER_WRITE, 0},
                        ROTATE,
                        SEED,
                        END}},
    [SHAPE_MIXED] = {"mixed",
                     "r decodes over l keys and prefills of s tokens in one batch",
                     {{PARAMETER_R, 8},
                      {PARAMETER_L, 4096},
                      {PARAMETER_S, 512},
                      {PARAMETER_PREFILLS, 1},
                      HEADS,
                      PLACE,
                      TERMS,
                      {PARAMETER_WRITE, 0},
                      ROTATE,
                      SEED,
                      END}},
    [SHAPE_VARLEN] = {"varlen",
                      "r causal prefills of s / 16 .. s tokens",
                      {{PARAMETER_R, 8},
                       {PARAMETER_S, 2048},
                       HEADS,
                       PLACE,
                       TERMS,
                       {PARAMETER_WRITE, 0},
                       ROTATE,
                       SEED,
                       END}},
    [SHAPE_MLA] =
        {"mla",
         "s queries over l latent rows of each request",
         {{PARAMETER_R, 8}, {PARAMETER_L, 4096}, {PARAMETER_S, 1}, LATENT, ROTATE, SEED, END}},
    [SHAPE_MLA_SPARSE] = {"mla_sparse",
                          "the same over topk rows of the l",
                          {{PARAMETER_R, 8},
                           {PARAMETER_L, 4096},
                           {PARAMETER_S, 1},
                           LATENT,
                           {PARAMETER_TOPK, 2048},
                           ROTATE,
                           SEED,
                           END}},
    [SHAPE_GDN] = {"gdn",
                   "gated delta rule: s tokens of r requests with a state each",
                   {{PARAMETER_R, 8},
                    {PARAMETER_S, 1},
                    {PARAMETER_HK, 16},
                    {PARAMETER_HV, 32},
                    {PARAMETER_DK, 128},
                    {PARAMETER_DV, 128},
                    {PARAMETER_CONV, 4},
                    ROTATE,
                    SEED,
                    END}},
    [SHAPE_WRITE] = {"write",
                     "s keys and values of r requests into the cache",
                     {{PARAMETER_R, 1},
                      {PARAMETER_S, 4096},
                      {PARAMETER_HKV, 8},
                      {PARAMETER_D, 128},
                      {PARAMETER_DV, 0},
                      PLACE,
                      SEED,
                      END}},
    [SHAPE_MERGE] = {"merge",
                     "two outputs of s rows with their LSE into one",
                     {{PARAMETER_S, 4096}, {PARAMETER_HQ, 32}, {PARAMETER_D, 128}, SEED, END}},
    [SHAPE_DISPATCH] = {"dispatch",
                        "what the core adds to the kernel of a small decode",
                        {{PARAMETER_R, 1},
                         {PARAMETER_L, 8},
                         {PARAMETER_HQ, 1},
                         {PARAMETER_HKV, 1},
                         {PARAMETER_D, 64},
                         {PARAMETER_LAYERS, 61},
                         SEED,
                         END}},
};

const char *shape_name(const struct shape *shape)
{
    return kinds[shape->kind].name;
}

const char *parameter_name(enum parameter parameter)
{
    return parameters[parameter].name;
}

/* NULL: the kind does not take it. */
static const struct initial *find_initial(enum shape_kind_code kind, enum parameter parameter)
{
    const struct initial *initial = kinds[kind].initial;
    while (initial->parameter != PARAMETER_COUNT && initial->parameter != parameter) {
        initial++;
    }
    return initial->parameter == parameter ? initial : NULL;
}

bool shape_takes(enum shape_kind_code kind, enum parameter parameter)
{
    return find_initial(kind, parameter) != NULL;
}

double initial_value(enum shape_kind_code kind, enum parameter parameter)
{
    const struct initial *initial = find_initial(kind, parameter);
    return initial != NULL ? initial->value : 0;
}

static void value_text(enum parameter parameter, double value, char *text, size_t size)
{
    if (parameter == PARAMETER_LAYOUT) {
        snprintf(text, size, "%s", value < 0 ? "own" : layout_name((int32_t)value));
    } else {
        snprintf(text, size, "%.10g", value);
    }
}

void parameter_text(const struct shape *shape, enum parameter parameter, char *text, size_t size)
{
    value_text(parameter, shape->value[parameter], text, size);
}

void shape_text(const struct shape *shape, char *text, size_t size)
{
    size_t used = (size_t)snprintf(text, size, "%s", shape_name(shape));
    char mark = ':';
    for (enum parameter p = 0; p < PARAMETER_COUNT; p++) {
        char value[32];
        if (!shape_takes(shape->kind, p) || shape->value[p] == initial_value(shape->kind, p)) {
            continue;
        }
        parameter_text(shape, p, value, sizeof value);
        if (used < size) {
            used += (size_t)snprintf(text + used, size - used, "%c%s=%s", mark, parameters[p].name,
                                     value);
        }
        mark = ',';
    }
}

void shapes_finish(struct shape_list *list)
{
    free(list->shapes);
    *list = (struct shape_list){NULL, 0};
}

void shapes_describe(FILE *file)
{
    for (enum shape_kind_code kind = 0; kind < SHAPE_KIND_COUNT; kind++) {
        fprintf(file, "  %-10s %s\n            ", kinds[kind].name, kinds[kind].what);
        for (const struct initial *i = kinds[kind].initial; i->parameter != PARAMETER_COUNT; i++) {
            char value[32];
            value_text(i->parameter, i->value, value, sizeof value);
            fprintf(file, " %s=%s", parameters[i->parameter].name, value);
        }
        fputc('\n', file);
    }
}
