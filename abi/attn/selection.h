/* SPDX-License-Identifier: Apache-2.0 */
/* The engine's side, 2: which backend serves which layer and phase, and why no other does. */
#ifndef ATTN_SELECTION_H
#define ATTN_SELECTION_H

#include "runtime.h"

/* succeed even if a layer has no backend or an order was refused, so that the reasons can be read;
 * such an assignment cannot be bound */
#define ATTN_SELECT_KEEP_UNSERVED 1u
/* refuse backends with ATTN_FEATURE_STEP_ALLOCATES */
#define ATTN_SELECT_NO_STEP_ALLOCATION 2u

struct attn_select_options {
    size_t struct_size;
    const struct attn_ext *next;
    /* that the layers run on, where the engine's memory lies; type 0: the CPU. best_device in api.h
     * gives one that an engine without memory of its own may take */
    struct attn_device device;
    /* NULL: the runtime's; else in place of ATTN_BACKEND, "" forces nothing */
    const char *backend;
    /* NULL, or what assignment_export gave on another rank: taken as it is or refused */
    const char *import_text;
    /* candidates, best first, for layers whose block_size is 0; NULL: any */
    const int32_t *block_sizes;
    int32_t num_block_sizes;
    uint32_t flags; /* ATTN_SELECT_* */
    /* attn_device_info's, where devices of several namespaces have this type and id; NULL:
     * there is one */
    const char *device_namespace;
};

/* The core composes these steps where the backend does not do them itself. */
#define ATTN_COMPOSE_CROSS 1u
#define ATTN_COMPOSE_ENCODER 2u
#define ATTN_COMPOSE_CHUNKED 4u
#define ATTN_COMPOSE_STATIC_SINK 8u
#define ATTN_COMPOSE_CASCADE 16u /* may be taken by a step */
#define ATTN_COMPOSE_MLA 32u
#define ATTN_COMPOSE_CONTEXT_PARALLEL 64u
#define ATTN_COMPOSE_OUTPUT_QUANT 128u
#define ATTN_COMPOSE_OUTPUT_ROPE 2048u /* the core rotates the output's last dims */
#define ATTN_COMPOSE_COMPRESSED 1024u  /* own rows, then compressed ones, merged */
#define ATTN_COMPOSE_BOTH_CACHES 4096u /* one attend to both; the core has the rows written */
#define ATTN_COMPOSE_MM_ENCODER 512u   /* q, k, v of a quantized multimodal encoder */
/* MLA's prefill per head, over projected keys and gathered context; without it latent, as decode */
#define ATTN_COMPOSE_MLA_PREFILL 256u

/* What serves one layer in one phase. Text lives as long as the assignment. */
struct attn_choice {
    size_t struct_size;
    const struct attn_ext *next;
    int32_t backend;  /* index in the runtime; -1: none */
    int32_t forced;   /* 1: by a rule of the selection text */
    const char *name; /* "cpu_ref" or "cpu_simd@avx2"; empty: none */
    const char *rule; /* the text of the rule that decided; empty: rank decided */
    int32_t rank;
    int32_t measured;    /* 1: the rank is a measurement on file */
    int32_t kv_dtype;    /* never ATTN_KV_AUTO */
    int32_t block_size;  /* 0: the layer has no cache */
    int32_t layout;      /* enum attn_kv_layout that the layer's spec will ask for */
    uint32_t composed;   /* ATTN_COMPOSE_* */
    int32_t graph_level; /* the least level of the parts */
    attn_status status;  /* ATTN_OK, ATTN_ERROR_NO_BACKEND, ATTN_ERROR_REFUSED */
    /* block_size, or a divisor of it that the kernels take, see attn_cache_spec */
    int32_t kernel_block_size;
    int32_t kv_dtype_v; /* dtype of V's cache; as kv_dtype where both are alike */
    /* What attn-check holds the backend to: an element of out is off by no more than
     * bound_of_row_rms of its row's root mean square and bound_of_element of itself, its
     * log-sum-exp by bound_of_lse (0: it has none, a recurrent layer's). Keys and values count as
     * they are stored. With no backend, or of an indexer: 0 */
    double bound_of_row_rms;
    double bound_of_element;
    double bound_of_lse;
};

enum attn_verdict_code {
    ATTN_VERDICT_CHOSEN = 0,
    ATTN_VERDICT_ELIGIBLE = 1,    /* could serve; another had the better rank or the order */
    ATTN_VERDICT_EXCLUDED = 2,    /* by a rule of the selection text */
    ATTN_VERDICT_UNSUPPORTED = 3, /* reasons say why */
    ATTN_VERDICT_OTHER_DEVICE = 4
};

/* One reason against a backend. Text lives as long as the assignment. */
struct attn_reason {
    size_t struct_size;
    const struct attn_ext *next;
    const char *field;     /* "head_size" */
    const char *asked;     /* "72" */
    const char *supported; /* "64, 128, 16..256 in steps of 8" */
};

ATTN_STATIC_ASSERT(sizeof(struct attn_select_options) == 64, "attn_select_options of ABI 0.3");
ATTN_STATIC_ASSERT(sizeof(struct attn_choice) == 104, "attn_choice of ABI 0.3 and bounds");
ATTN_STATIC_ASSERT(sizeof(struct attn_reason) == 40, "attn_reason of ABI 0.3");

#endif
