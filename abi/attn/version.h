/* SPDX-License-Identifier: Apache-2.0 */
/* The ABI's version, its export mark, and the two fields with which every struct that crosses
 * begins. */
#ifndef ATTN_VERSION_H
#define ATTN_VERSION_H

#include <stddef.h>
#include <stdint.h>

/* A version is major << 16 | minor. A minor step only appends, and versions of one major work
 * together in both directions; a major step may break. */
#define ATTN_MAKE_VERSION(major, minor) (((uint32_t)(major) << 16) | (uint32_t)(minor))
/* 0.3. Literals, here and in all masks, since bindgen expands no macro of a macro */
#define ATTN_ABI_VERSION 0x00003u
#define ATTN_ABI_VERSION_MIN 0x00003u
#define ATTN_VERSION_MAJOR(version) ((version) >> 16)
#define ATTN_VERSION_MINOR(version) ((version)&0xffffu)

/* Negotiation. The caller passes the oldest version that it works with and the one that it was
 * built for; the callee answers with a table whose abi_version is the one that *it* was built for,
 * or with ATTN_ERROR_ABI_VERSION. Either may be the newer. The callee asks SERVES of the caller's
 * range, the caller asks ACCEPTS of the answer. */
#define ATTN_VERSION_SERVES(min, max) ((min) <= ATTN_ABI_VERSION && (max) >= ATTN_ABI_VERSION_MIN)
#define ATTN_VERSION_ACCEPTS(version)                                                              \
    (ATTN_VERSION_MAJOR(version) == ATTN_VERSION_MAJOR(ATTN_ABI_VERSION) &&                        \
     (version) >= ATTN_ABI_VERSION_MIN)

#if defined(__cplusplus)
#define ATTN_STATIC_ASSERT(condition, message) static_assert(condition, message)
#define ATTN_EXTERN_C extern "C"
#else
#define ATTN_STATIC_ASSERT(condition, message) _Static_assert(condition, message)
#define ATTN_EXTERN_C
#endif

#if defined(_WIN32)
#define ATTN_EXPORT ATTN_EXTERN_C __declspec(dllexport)
#else
#define ATTN_EXPORT ATTN_EXTERN_C __attribute__((visibility("default")))
#endif

/* The upper half of every word of flags that an engine passes is for hints: one that is not known
 * is ignored. In the lower half it is refused by name. */
#define ATTN_FLAG_HINTS 0xffff0000u

ATTN_STATIC_ASSERT(sizeof(void *) == 8 && sizeof(size_t) == 8,
                   "libattn's ABI is for 64-bit machines");

/* Every struct that crosses the ABI begins with
 *
 *     size_t struct_size;            sizeof(the struct) as the writer of it was compiled
 *     const struct attn_ext *next;   NULL, or a chain of typed extensions
 *
 * A reader takes min(struct_size, its own sizeof) bytes; a missing tail means 0, which is the
 * default of every field. A struct_size under the one in ABI 0.3 is refused
 * (ATTN_ERROR_STRUCT_SIZE). What an unknown tail means, written by somebody newer, depends on the
 * class:
 *
 * Inputs (what an engine passes to the core: options, layers, parameters, views, batches, runs). A
 * tail of zeros is ignored; any other is refused by name (ATTN_ERROR_STRUCT_SIZE), since ignoring
 * it would change the result. Reserved fields must be 0 and flags known: both are refused by name.
 *
 * Tables (attn_api, attn_plugin, attn_kernels, attn_host, attn_collectives, the sinks). The tail is
 * ignored: a newer table has more slots. Before a slot that is not in ABI 0.3 is called, ask
 * ATTN_HAS_SLOT.
 *
 * Declarations (attn_device_info, attn_backend_caps and their extensions). The tail is ignored, and
 * so are bits of masks that are not known and rows of `refused` that hold such bits: no layer that
 * the reader can describe needs them. A later field may add an ability; what it would take away has
 * to be refused by `supports`, too.
 *
 * Kernels' arguments, and what they point to, are the core's. The core has refused whatever it does
 * not know, and whatever a backend has not declared, before a kernel sees it; so a kernel looks at
 * no struct_size. It reads the fields and looks up the extensions that it knows, and ignores the
 * rest. A field of a later version comes with a bit of the layer or a feature that a backend has
 * to declare. A plugin that reads such a field works with an older core, too, by asking
 * attn_host.abi_version in create, or ATTN_HAS_FIELD in prepare. */
#define ATTN_HAS_FIELD(pointer, field)                                                             \
    ((size_t)((const char *)(&(pointer)->field + 1) - (const char *)(pointer)) <=                  \
     (pointer)->struct_size)
#define ATTN_HAS_SLOT(table, slot) (ATTN_HAS_FIELD(table, slot) && (table)->slot != NULL)
/* The same of an extension, whose header is its field `ext`. */
#define ATTN_EXT_HAS_FIELD(pointer, field)                                                         \
    ((size_t)((const char *)(&(pointer)->field + 1) - (const char *)(pointer)) <=                  \
     (pointer)->ext.struct_size)

struct attn_ext {
    uint32_t id;                 /* ATTN_EXT_*: which struct begins with this header */
    uint32_t flags;              /* ATTN_EXT_OPTIONAL or 0; hints in the upper half */
    size_t struct_size;          /* size of the whole extension */
    const struct attn_ext *next; /* the next extension, or NULL; each id once in a chain */
};

/* Whoever does not know the extension may ignore it. Without the flag an unknown extension is
 * refused with ATTN_ERROR_EXTENSION and its id, since ignoring it would change the meaning. Kernels
 * see those alone that the core knows or their backend has declared: on a batch or a run that
 * brings any other, the rest is handed on as copies of at most ATTN_EXT_COPIED_BYTES together. */
#define ATTN_EXT_OPTIONAL 1u
#define ATTN_EXT_COPIED_BYTES 4096

/* Ids below 0x1000 are the project's, from ATTN_EXT_DRAFT on its drafts'; a vendor takes
 * ATTN_EXT_VENDOR + any number that it owns. Drafts from ATTN_EXT_DRAFT_KERNELS on are between
 * engines and kernels: what follows is said of them as of vendors'. An engine may put a vendor's on
 * a layer, and, of ids that the layer has, on its runs; on a batch of ids that every layer of the
 * plan has. The core copies struct_size bytes of a layer's (what they point to must live as long as
 * the assignment and its models) and hands them to kernels: on the layer's `next`, on the batch's,
 * and, of runs, on that of attends and writes which are no part of a composed step. Backends that
 * do not declare the id (attn_backend_caps.extensions) are refused at selection, unless the
 * extension is optional: it is then left out where one of the layer's backends has not declared it.
 */
#define ATTN_EXT_DRAFT 0x800u
#define ATTN_EXT_DRAFT_KERNELS 0xc00u
#define ATTN_EXT_VENDOR 0x10000u
enum attn_ext_id {
    ATTN_EXT_MLA_DESC = 1,          /* struct attn_mla_desc, on attn_layer_desc */
    ATTN_EXT_RECURRENT_DESC = 2,    /* struct attn_recurrent_desc, on attn_layer_desc */
    ATTN_EXT_MLA_WEIGHTS = 3,       /* struct attn_mla_weights, on attn_layer_params */
    ATTN_EXT_RECURRENT_WEIGHTS = 4, /* struct attn_recurrent_weights, on attn_layer_params */
    ATTN_EXT_CONTEXT_PARALLEL = 5,  /* struct attn_context_parallel, on attn_layer_desc */
    ATTN_EXT_BATCH_CONTEXT = 6,     /* struct attn_batch_context_parallel, on attn_batch */
    ATTN_EXT_BATCH_RECURRENT = 7,   /* struct attn_batch_recurrent, on attn_batch */
    ATTN_EXT_IO_MLA = 8,            /* struct attn_io_mla, on attn_step_io */
    ATTN_EXT_IO_RECURRENT = 9,      /* struct attn_io_recurrent, on attn_step_io */
    ATTN_EXT_IO_OUTPUT_QUANT = 10,  /* struct attn_io_output_quant, on attn_step_io */
    ATTN_EXT_IO_ROPE = 11,          /* struct attn_io_rope, on attn_step_io */
    ATTN_EXT_KV_QUANT_PARAMS = 12,  /* struct attn_kv_quant_params, on attn_layer_params */
    ATTN_EXT_CAPS_MLA = 13,         /* struct attn_mla_caps, on attn_backend_caps */
    ATTN_EXT_CAPS_RECURRENT = 14,   /* struct attn_recurrent_caps, on attn_backend_caps */
    ATTN_EXT_LAYER_CACHES = 17,     /* struct attn_layer_caches, on attn_layer_desc */
    ATTN_EXT_IO_CACHES = 18,        /* struct attn_io_caches, on attn_step_io */
    ATTN_EXT_INDEXER_DESC = 19,     /* struct attn_indexer_desc, on attn_layer_desc */
    ATTN_EXT_IO_INDEXER = 20,       /* struct attn_io_indexer, on attn_step_io */
    ATTN_EXT_CAPS_INDEXER = 21      /* struct attn_indexer_caps, on attn_backend_caps */
};

ATTN_STATIC_ASSERT(sizeof(struct attn_ext) == 24, "attn_ext is frozen");

#endif
