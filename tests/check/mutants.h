/* SPDX-License-Identifier: Apache-2.0 */
/* Wrong backends: each is cpu_ref with one mistake that a vendor might make, put in between by
 * changing the arguments on the way in or the outputs on the way out. attn-check has to catch every
 * one of them. */
#ifndef CHECK_MUTANTS_H
#define CHECK_MUTANTS_H

#include <attn/draft/index_lists.h>
#include <attn/draft/indexer.h>
#include <attn/mla.h>
#include <attn/plugin.h>
#include <stdbool.h>

#define MAX_REQS 64
#define MAX_TABLE (1 << 16)
#define MAX_TOKENS 4096
#define MAX_HEADS 64
#define MAX_DIMS 1024

/* Everything of one attend that a mistake may change; the pointers in `args` lead here. */
struct mutable_args {
    struct attn_attend_args args;
    struct attn_layer_desc layer;
    struct attn_layer_params params;
    struct attn_kv_quant_params quant;
    struct attn_batch batch;
    struct attn_kv_view k_cache, v_cache;
    float sinks[MAX_HEADS], slopes[MAX_HEADS];
    float q_scale[MAX_HEADS], k_scale[MAX_HEADS], v_scale[MAX_HEADS];
    float floats[MAX_DIMS], one;
    int32_t seq_lens[MAX_REQS], query_start_loc[MAX_REQS + 1];
    int32_t spans[4 * MAX_REQS];
    int32_t table[MAX_TABLE];
    struct attn_io_mla io_mla;
    struct attn_indexer_desc indexer;
    struct attn_index_lists lists;
    struct attn_io_index_lists io_lists;
    int32_t lengths[MAX_TABLE];
};

/* What the plan's memory of a mutant keeps. */
struct kept {
    const int32_t *block_table;
    int32_t num_reqs;
    int32_t seq_lens[MAX_REQS];
};

/* How structs of a newer core and unknown extensions are taken. */
enum mutant_structs { STRUCTS_BY_THE_RULE, STRUCTS_GROWN_REFUSED, STRUCTS_EXTENSION_REFUSED };

struct gdn_copy; /* mutant_gdn.c */

/* NULL: as cpu_ref does it. */
struct mutant {
    const char *name;
    uint64_t features; /* declared next to cpu_ref's */
    void (*before)(struct mutable_args *m);
    void (*after)(const struct attn_attend_args *args);
    /* before cpu_ref's kernel, in a copy of its arguments */
    void (*write)(struct attn_write_kv_args *args);
    void (*rope)(struct attn_write_kv_args *args, struct attn_io_rope *rope);
    void (*merge)(struct attn_merge_states_args *args);
    void (*gather)(struct attn_gather_kv_args *args);
    void (*gemm)(struct attn_batched_gemm_args *args);
    void (*quantize)(struct attn_quantize_args *args);
    void (*amax)(struct attn_amax_args *args);
    void (*copy_blocks)(struct attn_copy_blocks_args *args);
    void (*fill)(struct attn_fill_args *args);
    void (*gdn)(struct gdn_copy *copy);
    /* behind a kernel that succeeded: of write_kv for each key that it wrote */
    void (*written)(const struct attn_write_kv_args *args, int64_t t, int64_t slot, int64_t head);
    void (*merged)(const struct attn_merge_states_args *args);
    void (*gdn_after)(const struct attn_attend_args *args);
    /* make_block_table, which is declared only then */
    void (*table)(const struct attn_block_table_args *args, int32_t mistake);
    int32_t mistake;                     /* of table */
    void (*mla)(struct mutable_args *m); /* attend_mla and attend_mla_sparse, before */
    void (*mla_after)(const struct attn_attend_args *args);
    attn_status (*mla_takes)(const struct attn_attend_args *args); /* before anything else */
    const struct attn_mla_caps *latent; /* declared instead of cpu_ref's */
    /* attend writes codes, which is declared then; changes what quantizes its numbers */
    void (*codes)(struct attn_quantize_args *args);
    void (*plan)(const struct attn_attend_args *args, int32_t mode, struct kept *kept);
    void (*planned)(struct mutable_args *m, const struct kept *kept); /* before, with the plan's */
    int32_t structs;                                                  /* enum mutant_structs */
    bool writes_error;    /* of an attend that succeeds */
    bool needs_error;     /* to attend */
    bool leaves_outputs;  /* of a create that fails */
    bool leaves_state;    /* of a prepare that fails */
    bool ignores_updates; /* of the block table */
    bool overruns_plan;   /* writes past what schedule_size asked for */
    bool allocates;       /* in every attend */
    bool deep;            /* takes much of the stack in every attend */
    bool fused;           /* attend writes the keys itself */
};

struct attn_instance {
    attn_instance *real;
    const struct attn_plugin *plugin;
    const struct attn_kernels *kernels;
    const struct attn_host *host;
    const struct mutant *mutant;
    struct attn_kernels table; /* what it declares of mutant_kernels */
};

/* mutant_table.c */
extern const struct attn_kernels mutant_kernels;

/* mutant_attend.c. Behind a kernel: a request alone gets another bit than in its batch. */
void mutant_bits_by_batch(const struct attn_attend_args *args);
/* mutant_gdn.c: cpu_ref's gated_delta with the mutant's mistakes around it. */
attn_status gdn_with_mistake(const struct attn_instance *me, const struct attn_attend_args *args,
                             struct attn_error *error);
/* mutant_output.c. An attend of mutants with `codes`, whose layer writes codes. */
attn_status mutant_attend_codes(const struct attn_kernels *kernels, const struct mutant *mutant,
                                struct mutable_args *m, struct attn_error *error);

/* mutant_*.c, each what it knows */
struct mutant_list {
    const struct mutant *mutants;
    int32_t count;
};
extern const struct mutant_list attend_mutants, block_mutants, call_mutants, gdn_mutants,
    index_mutants, kernel_mutants, list_mutants, mla_mutants, output_mutants, quantized_mutants,
    shared_mutants, term_mutants;

#endif
