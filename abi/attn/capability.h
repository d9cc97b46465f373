/* SPDX-License-Identifier: Apache-2.0 */
/* What a backend declares. The core checks a layer against this data, so every backend answers
 * alike; only combinations that no list here can express go to the plugin's own `supports`. */
#ifndef ATTN_CAPABILITY_H
#define ATTN_CAPABILITY_H

#include "kv_cache.h"
#include "status.h"

/* A device, as a probe reports it without initialising a GPU runtime. Text is borrowed until the
 * callee returns. */
struct attn_device_info {
    size_t struct_size;
    const struct attn_ext *next;
    struct attn_device device;
    const char *name; /* "NVIDIA H200", "AMD EPYC" */
    const char *arch; /* "sm_90", "gfx942", "x86-64" */
    const char *isa;  /* comma-separated: "avx2,avx512f,avx512_bf16"; may be empty */
    int32_t compute_capability_major;
    int32_t compute_capability_minor;
    int32_t num_multiprocessors; /* CPU: cores */
    int32_t reserved;
    int64_t memory_bytes;
    /* [a-z][a-z0-9_]*: whose numbers `device` has. CPU, CUDA, ROCm and oneAPI devices are numbered
     * by their drivers, alike for all plugins: NULL. Of every other type a device is (namespace,
     * type, id), and NULL is the plugin's name: plugins share such a device, and so caches on it,
     * only where they name the same namespace. */
    const char *device_namespace;
    /* as the vendor's tools write it: "GPU-…"; NULL or "": not known without its driver */
    const char *uuid;
};

/* Sizes min .. max in steps of `multiple`; one size is min = max, multiple 1. It never grows. */
struct attn_range {
    int32_t min;
    int32_t max;
    int32_t multiple;
};

/* head_size and head_size_v that go together. `same` 1: Dv = D only, and `v` is not read. It never
 * grows. */
struct attn_head_size_range {
    struct attn_range qk;
    struct attn_range v;
    int32_t same;
};

/* What this backend cannot do together: a layer that has all of the terms and features, and is of
 * what the other fields say, is refused. An element of an array, whose owner says its size; a row
 * with an unknown tail that is not zero is dropped. */
struct attn_refused_combination {
    uint64_t terms;
    uint64_t features;
    uint64_t kv_dtypes; /* 0: of any; else one of these */
    const char *why;    /* one line */
    uint64_t dtypes;    /* as kv_dtypes: activations */
    uint64_t layer_kinds;
    uint64_t phases;
    struct attn_range head_size; /* head sizes of q and k; max 0: any */
    int32_t reserved;
};

/* A vendor's code that a backend takes; an element of an array, whose owner says its size. */
struct attn_vendor_code {
    int32_t list; /* enum attn_name_list: DTYPE (of q_dtype), KV_DTYPE, KV_LAYOUT or CACHE_ROLE */
    int32_t code; /* ATTN_VENDOR_CODE or above */
    /* for people, [a-z][a-z0-9_]*: "acme_q6"; layers, reasons and assignments have the number */
    const char *name;
};

/* Kernel slots, as bits of attn_backend_caps.kernels, in the order of struct attn_kernels. */
#define ATTN_KERNEL_ATTEND (1ull << 0)
#define ATTN_KERNEL_WRITE_KV (1ull << 1)
#define ATTN_KERNEL_MERGE_STATES (1ull << 2)
#define ATTN_KERNEL_ROPE_WRITE_KV (1ull << 3)
#define ATTN_KERNEL_ATTEND_MLA (1ull << 4)
#define ATTN_KERNEL_ATTEND_MLA_SPARSE (1ull << 5)
#define ATTN_KERNEL_GATHER_KV (1ull << 6)
#define ATTN_KERNEL_RECURRENT (1ull << 7)
#define ATTN_KERNEL_BATCHED_GEMM (1ull << 8)
#define ATTN_KERNEL_QUANTIZE (1ull << 9)
#define ATTN_KERNEL_AMAX (1ull << 10)
#define ATTN_KERNEL_COPY_BLOCKS (1ull << 11)
#define ATTN_KERNEL_COPY (1ull << 12)
#define ATTN_KERNEL_FILL (1ull << 13)
#define ATTN_KERNEL_MAKE_BLOCK_TABLE (1ull << 14) /* the last one of the table */

/* One backend on one device in one variant. Arrays and text are borrowed until the sink returns;
 * the core copies them, and of the extensions those that it knows. Masks: bit 1 << code; bits that
 * the core does not know are dropped (version.h, declarations). */
struct attn_backend_caps {
    size_t struct_size;
    const struct attn_ext *next; /* attn_mla_caps, attn_recurrent_caps */
    /* [a-z][a-z0-9_]*, at most 63 bytes, unique over plugins: "cpu_ref" */
    const char *name;
    const char *variant; /* "" or, as in name@variant, "avx512" */
    const char *version; /* "1.2.3" */
    const char *vendor;
    struct attn_device device;
    uint64_t kernels; /* ATTN_KERNEL_*: slots that will not be NULL */
    /* enum attn_layer_kind, composed ones included if all their parts are there */
    uint64_t layer_kinds;
    uint64_t phases;        /* enum attn_phase */
    uint64_t dtypes;        /* enum attn_dtype_id: activations */
    uint64_t kv_dtypes;     /* enum attn_kv_dtype */
    uint64_t q_dtypes;      /* quantized queries */
    uint64_t terms;         /* ATTN_TERM_* */
    uint64_t features;      /* ATTN_FEATURE_* */
    uint64_t view_forms;    /* ATTN_VIEW_* */
    uint64_t layouts;       /* enum attn_kv_layout: which it reads */
    uint64_t k_scale_forms; /* enum attn_scale_form */
    uint64_t v_scale_forms;
    uint64_t p_scale_forms;
    /* enum attn_output_form that attend writes itself; others need `quantize` */
    uint64_t output_forms;
    const struct attn_head_size_range *head_sizes;
    const struct attn_range *block_sizes;
    const struct attn_refused_combination *refused;
    int32_t num_head_sizes;
    int32_t num_block_sizes;
    int32_t num_refused;
    /* enum attn_kv_layout, one of layouts or of vendor_codes; another code that the core does not
     * know reads as the first of layouts */
    int32_t preferred_layout;
    int32_t preferred_block_size;
    int32_t graph_level;        /* enum attn_graph_level */
    int32_t graph_fill_seq_len; /* what padded seq_lens must hold in a replay */
    int32_t reorder_threshold;  /* query_len <= this goes the decode way; 0 reads as 1 */
    /* bytes: base and row addresses of the cache; 0 reads as the element size */
    int32_t kv_alignment;
    int32_t io_alignment;    /* bytes: rows of q, k, v, out; 0: the same */
    int32_t max_group;       /* largest Hq / Hk; 0: any */
    int32_t max_num_q_heads; /* 0: any */
    /* largest n of 1 + n queries on the decode way; 0: any */
    int32_t max_speculative_tokens;
    int32_t rank[ATTN_MAX_PHASES]; /* by enum attn_phase: higher is better; cpu_ref has 0 */
    int32_t reserved;
    /* kv_dtypes of which attend writes k and v itself in steps of decodes only; before every other
     * step write_kv does. FUSED_WRITE says it of all caches and steps */
    uint64_t decode_write_kv_dtypes;
    /* enum attn_cache_role: caches beyond those of a layer's kind that its kernels take */
    uint64_t cache_roles;
    int32_t max_tables;     /* a batch may have so many, next to its own fields; 0: none */
    int32_t refused_stride; /* from row to row of `refused` */
    /* ids of extensions, vendors' and drafts from ATTN_EXT_DRAFT_KERNELS on, that its kernels read
     * on layers, batches and runs (version.h) */
    const uint32_t *extensions;
    int32_t num_extensions;
    /* most queries of a request in a captured step of decodes (graph levels below ALWAYS); 0: any
     */
    int32_t graph_max_query_len;
    /* vendors' codes that its kernels take, next to what the masks say */
    const struct attn_vendor_code *vendor_codes;
    int32_t num_vendor_codes;
    int32_t vendor_code_stride; /* from element to element */
};

/* Where a probe puts what it finds. Each call returns ATTN_OK or, with its reason in `why`, the
 * status for which the item is left out: a core that is older than the plugin may not know its
 * device, say. The probe goes on. A backend that is taken without a row of its `refused`, whose
 * bits or tail the core does not know, is ATTN_OK, and `why` names the first such row; else the
 * message is empty. `why` may be NULL. */
struct attn_probe_sink {
    size_t struct_size;
    const struct attn_ext *next;
    void *user;
    attn_status (*device)(void *user, const struct attn_device_info *device,
                          struct attn_error *why);
    attn_status (*backend)(void *user, const struct attn_backend_caps *caps,
                           struct attn_error *why);
};

/* Where `supports` puts each reason against a layer. All text is borrowed until return. */
struct attn_reason_sink {
    size_t struct_size;
    const struct attn_ext *next;
    void *user;
    void (*refuse)(void *user, const char *field, const char *asked, const char *supported);
};

ATTN_STATIC_ASSERT(sizeof(struct attn_refused_combination) == 72,
                   "attn_refused_combination of ABI 0.3");
ATTN_STATIC_ASSERT(sizeof(struct attn_device_info) == 88, "attn_device_info of ABI 0.3");
ATTN_STATIC_ASSERT(sizeof(struct attn_backend_caps) == 320, "attn_backend_caps of ABI 0.3");
ATTN_STATIC_ASSERT(sizeof(struct attn_probe_sink) == 40, "attn_probe_sink of ABI 0.3");
ATTN_STATIC_ASSERT(sizeof(struct attn_reason_sink) == 32, "attn_reason_sink of ABI 0.3");

#endif
