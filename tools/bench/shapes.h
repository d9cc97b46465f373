/* SPDX-License-Identifier: Apache-2.0 */
/* What can be measured: named shapes with parameters, as `--shape NAME:key=value,…` states them. */
#ifndef BENCH_SHAPES_H
#define BENCH_SHAPES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

/* What a recurrent layer computes. */
enum bench_rule { BENCH_GATED_DELTA, BENCH_KDA, BENCH_MAMBA2, BENCH_LIGHTNING, BENCH_RULES };

enum parameter {
    PARAMETER_R,        /* requests */
    PARAMETER_L,        /* keys of each, the step's own included; 0: as s */
    PARAMETER_S,        /* queries of each; varlen: of the longest; write, merge: rows */
    PARAMETER_SKEW,     /* decode: 1: one request has 64 times the others' keys, as many in all */
    PARAMETER_PREFILLS, /* mixed: requests of s queries behind the r decodes */
    PARAMETER_HQ,
    PARAMETER_HKV,
    PARAMETER_D,
    PARAMETER_DV,     /* 0: as d */
    PARAMETER_BLOCK,  /* slots; 0: the backend's choice */
    PARAMETER_LAYOUT, /* enum attn_kv_layout; -1: the backend's own */
    PARAMETER_WINDOW, /* keys, the query's own included; 0: none */
    PARAMETER_CHUNK,  /* chunked local attention; 0: none */
    PARAMETER_SOFTCAP,
    PARAMETER_SINKS,
    PARAMETER_ALIBI,
    PARAMETER_INVARIANT,
    PARAMETER_CAUSAL,
    PARAMETER_SHUFFLE, /* blocks (write: slots) in random order */
    PARAMETER_WRITE,   /* the step's keys are written by the same run */
    PARAMETER_ROTATE,  /* 0: one layer again and again, whatever the caches hold of it */
    PARAMETER_LORA,    /* kv_lora_rank */
    PARAMETER_ROPE,
    PARAMETER_NOPE,
    PARAMETER_ABSORB, /* 1: the core absorbs W_UK and projects with W_UV */
    PARAMETER_TOPK,
    PARAMETER_GRAIN,   /* keys of an entry of a list */
    PARAMETER_LISTS,   /* lists of a token: sparse: 1 or hkv; index: hq / lists heads each */
    PARAMETER_RATIO,   /* index: tokens of a row */
    PARAMETER_POOL,    /* index: rows of an entry */
    PARAMETER_RELU,    /* index */
    PARAMETER_WEIGHTS, /* index */
    PARAMETER_HK,      /* gdn: key heads */
    PARAMETER_HV,
    PARAMETER_DK,
    PARAMETER_CONV,
    PARAMETER_RULE,       /* enum bench_rule */
    PARAMETER_STATE_BITS, /* 16: bf16 */
    PARAMETER_SEED,
    PARAMETER_COUNT
};

enum shape_kind_code {
    SHAPE_DECODE,
    SHAPE_PREFILL,
    SHAPE_MIXED,
    SHAPE_VARLEN,
    SHAPE_MLA,
    SHAPE_MLA_SPARSE,
    SHAPE_SPARSE,
    SHAPE_INDEX,
    SHAPE_GDN,
    SHAPE_WRITE,
    SHAPE_MERGE,
    SHAPE_DISPATCH,
    SHAPE_KIND_COUNT
};

struct shape {
    enum shape_kind_code kind;
    double value[PARAMETER_COUNT];
};

struct shape_list {
    struct shape *shapes;
    int32_t count;
};

const char *shape_name(const struct shape *shape);
static inline int32_t shape_int(const struct shape *shape, enum parameter parameter)
{
    return (int32_t)shape->value[parameter];
}
const char *parameter_name(enum parameter parameter);
bool shape_takes(enum shape_kind_code kind, enum parameter parameter);
/* "own", "hnd" or a number. */
void parameter_text(const struct shape *shape, enum parameter parameter, char *text, size_t size);
/* "decode:r=8,l=4096": every parameter that differs from the bare shape. */
void shape_text(const struct shape *shape, char *text, size_t size);

/* Appends what the text means: one shape, or, where a parameter is a list `a+b+c` or a range `a..b`
 * (doubling) or `a..b/step`, their product. False with a message naming what is wrong and what is
 * allowed. */
bool shapes_parse(struct shape_list *list, const char *text, char *message, size_t size);
void shapes_finish(struct shape_list *list);
/* For --help and the manual: every shape with its parameters and defaults. */
void shapes_describe(FILE *file);

#endif
