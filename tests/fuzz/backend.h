/* SPDX-License-Identifier: Apache-2.0 */
/* Two backends that declare much and compute nothing, and one layer of each sort (samples.c).
 * `whole` serves every kind of layer by itself; of `parts` the core has to compose what it can.
 * Their plan slot follows every number of the view that it gets, as a kernel would. Their other
 * kernels hold tensors and slots to what the core promises, read the first and last number of each
 * row, and write those of outputs. */
#ifndef TESTS_FUZZ_BACKEND_H
#define TESTS_FUZZ_BACKEND_H

#include <attn/draft/compressed.h>
#include <attn/draft/compressor.h>
#include <attn/draft/index_lists.h>
#include <attn/draft/index_write.h>
#include <attn/draft/mm_encoder.h>
#include <attn/draft/output_rope.h>
#include <attn/draft/recurrent.h>

#include "../core/select_fixture.h"
#include "fuzz.h"

#define NUM_BLOCKS 40 /* in a cache */
#define NUM_SLOTS 12  /* for states */

enum sample {
    SAMPLE_PLAIN,
    SAMPLE_SLIDING,
    SAMPLE_CHUNKED,
    SAMPLE_CROSS,
    SAMPLE_ENCODER,
    SAMPLE_STATIC_SINK,
    SAMPLE_MLA,
    SAMPLE_MLA_SPARSE,
    SAMPLE_GDN,
    SAMPLE_PARALLEL, /* a cache spread over three ranks */
    SAMPLE_MM_ENCODER,
    SAMPLE_SPECULATIVE,
    SAMPLE_LISTS,
    SAMPLE_ROPE,
    SAMPLE_QUANTIZED, /* its output is */
    SAMPLE_OUTPUT_ROPE,
    SAMPLE_RULE, /* a gate per channel, a norm, rounded states, checkpoints */
    SAMPLE_RING,
    SAMPLE_INDEXER,
    SAMPLE_COMPRESSOR,
    SAMPLE_COMPRESSED, /* rows of two caches */
    SAMPLE_COUNT
};

/* A description with everything that may hang on it. */
struct sampled {
    struct attn_layer_desc desc;
    struct attn_mla_desc mla;
    struct attn_recurrent_desc gdn;
    struct attn_context_parallel cp;
    struct attn_mm_encoder_quant mm_quant;
    struct attn_index_lists lists;
    struct attn_recurrent_rule rule;
    struct attn_recurrent_norm norm;
    struct attn_recurrent_rounding rounding;
    struct attn_indexer_desc indexer;
    struct attn_index_write index_write;
    struct attn_compressor_desc compressor;
    struct attn_compressed_rows compressed;
    struct attn_output_rope output_rope;
    struct attn_layer_caches caches;
    struct attn_cache_desc cache; /* the one of them */
    struct attn_collectives ranks;
};
/* It may not move: its extensions are linked. */
void sample_layer(struct sampled *sampled, int32_t sample);
/* Binds it, to addresses: nothing reads or writes there. */
void sample_bind(const struct sampled *sampled, attn_layer *layer, struct attn_error *error);
bool sample_has(const struct sampled *sampled, const struct attn_ext *ext);

/* A collective that moves nothing. */
attn_status backend_exchange(const struct attn_collective_args *args, struct attn_error *error);

/* A kernel that does nothing but end. */
#define BACKEND_KERNEL(name, type, status)                                                         \
    static attn_status name(const struct type *args, struct attn_error *error)                     \
    {                                                                                              \
        (void)args;                                                                                \
        return status;                                                                             \
    }

/* A runtime that has both, on the CPU. */
void backend_init(struct fixture *fixture);

/* What kernels may rely on; set before plan_batch. */
struct promised {
    int32_t max_num_reqs, max_num_tokens;
    bool host_only;     /* device arrays were not the host's: not followed */
    bool slots;         /* slots were checked */
    int64_t num_blocks; /* each entry of the table below it; 0: the table was not checked */
    int64_t plans;      /* counted */
};
extern struct promised promised;

/* A kernel that breaks its word: set before calls of the core. */
struct hostile {
    int32_t
        after; /* n > 0: the n-th call of a kernel fails, with an error text that does not end */
    int32_t status; /* whatever it is */
    size_t bytes;   /* above 0: what a schedule asks for */
};
extern struct hostile hostile;

#endif
