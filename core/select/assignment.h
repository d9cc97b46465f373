/* SPDX-License-Identifier: Apache-2.0 */
/* The outcome of a selection: complete layer descriptions, and per layer and phase the choice and
 * all verdicts. Immutable once made. */
#ifndef CORE_SELECT_ASSIGNMENT_H
#define CORE_SELECT_ASSIGNMENT_H

#include <attn/draft/compressed.h>
#include <attn/draft/index_write.h>
#include <attn/draft/output_rope.h>
#include <attn/draft/mm_encoder.h>
#include <stdatomic.h>

#include "runtime/runtime.h"
#include "util/counts.h"

#define MAX_BATCH_KEY 128

/* A layer as it was asked for, with defaults resolved (head_size_v, kv_dtype never AUTO, block_size
 * chosen: the kernel's, …); text and extensions live in the owner's arena. `desc.next` chains the
 * copied extensions. */
struct layer {
    struct attn_layer_desc desc;
    struct attn_mla_desc *mla;               /* or NULL */
    struct attn_recurrent_desc *gdn;         /* or NULL */
    struct attn_recurrent_rule *rule;        /* or NULL: the gated delta rule */
    struct attn_recurrent_norm *norm;        /* what follows a recurrent layer's rule, or NULL */
    struct attn_indexer_desc *indexer;       /* or NULL */
    struct attn_index_write *index_write;    /* or NULL: keys are stored as they come */
    struct attn_index_lists *lists;          /* or NULL: every key is listed */
    struct attn_layer_caches *caches;        /* or NULL; elements of our struct's size */
    struct attn_compressed_rows *compressed; /* or NULL: one cache of keys */
    struct attn_compressor_desc *compressor; /* or NULL */
    struct attn_output_rope *output_rope;    /* or NULL: the output is not rotated */
    struct attn_context_parallel *cp;        /* or NULL */
    struct attn_mm_encoder_quant *mm_quant;  /* or NULL */
    /* or NULL: a recurrent layer's states are rounded to nearest */
    struct attn_recurrent_rounding *rounding;
    /* how many blocks of desc.block_size one entry of the engine's block table is */
    int32_t blocks_per_entry;
    int32_t sharing_target; /* index of the layer whose cache it reads, or -1 */
    /* What compositions say of the layer (composition.resolve), for match to hold backends to. */
    uint64_t kernel; /* ATTN_KERNEL_* of its decodes */
    uint64_t reads;  /* extensions of its parameters, batches and runs: ABI_READS */
    bool has_states; /* states in slots, not keys: terms, sizes and kv_dtype do not count */
    /* one cache of whole rows, without V; heads and sizes are the extension's */
    bool is_latent;
    bool writes_apart;      /* keys are written by write_kv, even if attends could write them */
    bool out_apart;         /* attends do not write the output itself: output_forms do not count */
    int32_t attend_size;    /* head_size of its attends */
    int32_t tokens_per_row; /* in the kind's own caches: 1, or an indexer's */
    int64_t state_bytes;    /* a slot's, where has_states */
    /* What batches bring for it, beyond keys: layers of one block-table group have it alike. */
    uint8_t batch_key[MAX_BATCH_KEY];
    uint32_t read_by; /* compositions that look at it (composition.extension), a bit each by id */
};

struct verdict {
    int32_t code; /* enum attn_verdict_code */
    int32_t num_reasons;
    const struct attn_reason *reasons;
};

/* Whether a layer keeps keys in a paged cache. */
static inline bool layer_has_cache(const struct attn_layer_desc *layer)
{
    return layer->kind != ATTN_LAYER_ENCODER;
}

struct assignment_phase {
    struct attn_choice choice;
    const struct verdict *verdicts; /* [num_backends] */
};

struct assignment_layer {
    struct layer layer;
    struct assignment_phase phases[NUM_PHASES];
};

struct attn_assignment {
    attn_runtime *runtime;
    atomic_int users;   /* the engine, and models made of it; the last one frees it */
    struct arena arena; /* everything below, text included */
    const struct attn_device_info
        *device;   /* the runtime's; NULL: the CPU, which no plugin reported */
    bool complete; /* every layer and phase is served */
    int32_t num_layers;
    int32_t num_backends;
    struct assignment_layer *layers;
};

/* One user more; assignment_destroy is one less. */
attn_assignment *assignment_keep(const attn_assignment *assignment);

/* The dtype of a layer's K or V in its cache. */
static inline int32_t kv_dtype_of(const struct attn_layer_desc *l, bool value)
{
    return value && l->kv_dtype_v != 0 ? l->kv_dtype_v : l->kv_dtype;
}

/* Whether the layer states the bytes of a row (kv_row_bytes). */
static inline bool kv_is_opaque(int32_t kv_dtype)
{
    return kv_dtype == ATTN_KV_OPAQUE || kv_dtype >= ATTN_VENDOR_CODE;
}

/* One float32 scale, per tensor or per head, is the layer's. */
static inline bool kv_is_fp8(int32_t kv_dtype)
{
    return kv_dtype == ATTN_KV_FP8_E4M3 || kv_dtype == ATTN_KV_FP8_E5M2 ||
           kv_dtype == ATTN_KV_FP8_E4M3FNUZ;
}

#endif
