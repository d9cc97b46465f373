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

/* Parameters of shapes: constant, name, and the least and largest value. All but softcap are whole
 * numbers. */
#define SHAPE_PARAMETERS(X)                                                                        \
    X(R, "r", 1, 65536)   /* requests */                                                           \
    X(L, "l", 0, 1 << 24) /* keys of each, the step's own included; 0: as s */                     \
    X(S, "s", 1, 1 << 20) /* queries of each; varlen: of the longest; write, merge: rows */        \
    X(SKEW, "skew", 0, 1) /* 1: one request has 64 times the others' keys, as many in all */       \
    X(PREFILLS, "prefills", 1, 4096) /* mixed: requests of s queries after the r decodes */        \
    X(HQ, "hq", 1, 4096)                                                                           \
    X(HKV, "hkv", 1, 4096)                                                                         \
    X(D, "d", 8, 4096)                                                                             \
    X(DV, "dv", 0, 4096)        /* 0: as d */                                                      \
    X(BLOCK, "block", 0, 65536) /* slots; 0: the backend's choice */                               \
    X(LAYOUT, "layout", -1,                                                                        \
      ATTN_KV_LAYOUT_HND_ROWS)      /* enum attn_kv_layout; -1: the backend's own */               \
    X(WINDOW, "window", 0, 1 << 24) /* keys, the query's own included; 0: none */                  \
    X(CHUNK, "chunk", 0, 1 << 24)   /* chunked local attention; 0: none */                         \
    X(SOFTCAP, "softcap", 0, 1e6)                                                                  \
    X(SINKS, "sinks", 0, 1)                                                                        \
    X(ALIBI, "alibi", 0, 2)                                                                        \
    X(Q8, "q8", 0, 1)     /* 1: queries in e4m3, whatever the cache has */                         \
    X(TREE, "tree", 0, 1) /* 1: the s queries are drafts, of two branches after the first */       \
    X(INVARIANT, "invariant", 0, 2)                                                                \
    X(CAUSAL, "causal", 0, 1)                                                                      \
    X(SHUFFLE, "shuffle", 0, 1) /* blocks (write: slots) in random order */                        \
    X(WRITE, "write", 0, 1)     /* the step's keys are written by the same run */                  \
    X(ROTATE, "rotate", 0, 1)   /* 0: one layer again and again, whatever the caches hold of it */ \
    X(LORA, "lora", 8, 4096)    /* kv_lora_rank */                                                 \
    X(ROPE, "rope", 0, 1024)                                                                       \
    X(NOPE, "nope", 8, 1024)                                                                       \
    X(ABSORB, "absorb", 0, 1) /* 1: the core absorbs W_UK and projects with W_UV */                \
    X(TOPK, "topk", 1, 65536)                                                                      \
    X(GRAIN, "grain", 1, 128)  /* keys of an entry of a list */                                    \
    X(SHARE, "share", 1, 4096) /* neighbouring tokens with the same lists */                       \
    X(LISTS, "lists", 1,                                                                           \
      1024)             /* lists of a token: sparse: 1 or hkv; index: hq / lists heads each */     \
    X(ALL, "all", 0, 1) /* 1: all rows in place of topk */                                         \
    X(RATIO, "ratio", 1, 4096)  /* index, compressed: tokens of a row */                           \
    X(POOL, "pool", 1, 4096)    /* index: rows of an entry */                                      \
    X(RELU, "relu", 0, 1)       /* indexers */                                                     \
    X(WEIGHTS, "weights", 0, 1) /* indexers */                                                     \
    X(HK, "hk", 1, 4096)        /* gdn: key heads */                                               \
    X(HV, "hv", 1, 4096)                                                                           \
    X(DK, "dk", 8, 1024)                                                                           \
    X(CONV, "conv", 0, 64)                                                                         \
    X(RULE, "rule", 0, BENCH_RULES - 1) /* enum bench_rule */                                      \
    X(STATE_BITS, "state_bits", 16, 32) /* 16: bf16 */                                             \
    X(PHILOX, "philox", 0, 16)    /* rounds of the states' stochastic rounding; 0: to nearest */   \
    X(REPLAY, "replay", 0, 1024)  /* tokens for one write of the state, by a ring; 0: none */      \
    X(DRAFTS, "drafts", 0, 64)    /* drafts of a request, at most; none is accepted */             \
    X(CURSOR, "cursor", -1, 1024) /* tokens in each ring, at most replay - 1; -1: from 0 on by one \
                                   */                                                              \
    X(SEED, "seed", 0, 4294967295.0)

#define SHAPE_CONSTANT(id, name, from, to) PARAMETER_##id,
enum parameter { SHAPE_PARAMETERS(SHAPE_CONSTANT) PARAMETER_COUNT };

enum shape_kind_code {
    SHAPE_DECODE,
    SHAPE_PREFILL,
    SHAPE_MIXED,
    SHAPE_VARLEN,
    SHAPE_MLA,
    SHAPE_MLA_SPARSE,
    SHAPE_COMPRESSED,
    SHAPE_SPARSE,
    SHAPE_INDEX,
    SHAPE_TOP_K,
    SHAPE_GDN,
    SHAPE_WRITE,
    SHAPE_MERGE,
    SHAPE_DISPATCH,
    SHAPE_KIND_COUNT
};

struct bench_shape {
    enum shape_kind_code kind;
    double value[PARAMETER_COUNT];
};

struct shape_list {
    struct bench_shape *shapes;
    int32_t count;
};

const char *shape_name(const struct bench_shape *shape);
static inline int32_t shape_int(const struct bench_shape *shape, enum parameter parameter)
{
    return (int32_t)shape->value[parameter];
}
const char *parameter_name(enum parameter parameter);
bool shape_takes(enum shape_kind_code kind, enum parameter parameter);
/* "own", "hnd" or a number. */
void parameter_text(const struct bench_shape *shape, enum parameter parameter, char *text,
                    size_t size);
/* "decode:r=8,l=4096": every parameter that differs from the bare shape. */
void shape_text(const struct bench_shape *shape, char *text, size_t size);

/* Appends what the text means: one shape, or, where a parameter is a list `a+b+c` or a range `a..b`
 * (doubling) or `a..b/step`, their product. False with a message naming what is wrong and what is
 * allowed. */
bool shapes_parse(struct shape_list *list, const char *text, char *message, size_t size);
void shapes_finish(struct shape_list *list);
/* For --help and the manual: every shape with its parameters and defaults. */
void shapes_describe(FILE *file);

#endif
