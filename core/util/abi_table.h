/* SPDX-License-Identifier: Apache-2.0 */
/* Every struct of the ABI that the core reads or writes, described once: sizes, the chains that
 * extensions stand in, ranges of numbers, and what pointers point at. Reading, copying, the check
 * of addresses and the lists of known extensions follow from a struct's row and its fields. */
#ifndef CORE_UTIL_ABI_TABLE_H
#define CORE_UTIL_ABI_TABLE_H

#include <attn/version.h>
#include <stddef.h>
#include <stdint.h>

/* X(name, struct, size in ABI 0.3, class, fields) */
#define ABI_STRUCTS(X)                                                                             \
    X(RUNTIME_OPTIONS, attn_runtime_options, 80, ABI_INPUT, runtime_options)                       \
    X(HOST, attn_host, 64, ABI_TABLE, none)                                                        \
    X(PLUGIN, attn_plugin, 88, ABI_TABLE, none)                                                    \
    X(KERNELS, attn_kernels, 272, ABI_TABLE, none)                                                 \
    X(COLLECTIVES, attn_collectives, 64, ABI_TABLE, none)                                          \
    X(DEVICE_INFO, attn_device_info, 88, ABI_TABLE, device_info)                                   \
    X(BACKEND_CAPS, attn_backend_caps, 320, ABI_DECLARED, backend_caps)                            \
    X(PLUGIN_INFO, attn_plugin_info, 64, ABI_OUTPUT, none)                                         \
    X(BACKEND_INFO, attn_backend_info, 32, ABI_OUTPUT, none)                                       \
    X(SELECT_OPTIONS, attn_select_options, 64, ABI_INPUT, none)                                    \
    X(CHOICE, attn_choice, 80, ABI_OUTPUT, none)                                                   \
    X(REASON, attn_reason, 40, ABI_OUTPUT, none)                                                   \
    X(LAYER_DESC, attn_layer_desc, 264, ABI_OPEN, layer_desc)                                      \
    X(LAYER_PARAMS, attn_layer_params, 104, ABI_INPUT, layer_params)                               \
    X(MODEL_OPTIONS, attn_model_options, 48, ABI_INPUT, model_options)                             \
    X(KV_VIEW, attn_kv_view, 120, ABI_INPUT, kv_view)                                              \
    X(CACHE_SPEC, attn_cache_spec, 200, ABI_OUTPUT, none)                                          \
    X(CACHE_MEMORY, attn_cache_memory, 64, ABI_INPUT, cache_memory)                                \
    X(BLOCK_TRANSFER, attn_block_transfer, 64, ABI_INPUT, block_transfer)                          \
    X(AMAX_ARGS, attn_amax_args, 56, ABI_INPUT, amax_args)                                         \
    X(COPY_ARGS, attn_copy_args, 64, ABI_INPUT, copy_args)                                         \
    X(FILL_ARGS, attn_fill_args, 72, ABI_INPUT, fill_args)                                         \
    X(PLAN_OPTIONS, attn_plan_options, 32, ABI_INPUT, plan_options)                                \
    X(LIMITS, attn_limits, 40, ABI_INPUT, limits)                                                  \
    X(WORKSPACE, attn_workspace, 64, ABI_INPUT, workspace)                                         \
    X(BATCH, attn_batch, 296, ABI_OPEN, batch)                                                     \
    X(BATCH_SPLIT, attn_batch_split, 32, ABI_OUTPUT, none)                                         \
    X(BATCH_ORDER, attn_batch_order, 56, ABI_INPUT, batch_order)                                   \
    X(RANK_KEYS, attn_rank_keys, 56, ABI_INPUT, none)                                              \
    X(STEP_IO, attn_step_io, 72, ABI_OPEN, step_io)                                                \
    /* elements of arrays, which have no struct_size of their own */                               \
    X(CACHE_DESC, attn_cache_desc, 32, ABI_ELEMENT, cache_desc)                                    \
    X(BATCH_TABLE, attn_batch_table, 120, ABI_ELEMENT, batch_table)                                \
    X(BLOCK_MEMORY, attn_block_memory, 16, ABI_ELEMENT, none)                                      \
    X(RANGE, attn_range, 12, ABI_ELEMENT, none)                                                    \
    X(HEAD_SIZE_RANGE, attn_head_size_range, 28, ABI_ELEMENT, none)                                \
    X(REFUSED_COMBINATION, attn_refused_combination, 72, ABI_ELEMENT, refused_combination)         \
    X(VENDOR_CODE, attn_vendor_code, 16, ABI_ELEMENT, vendor_code)

/* X(name, struct, size in ABI 0.3, the struct in whose chain it stands, fields, what a layer has
 * that reads it; NULL: every layer may), the name being that of its id, ATTN_EXT_name */
#define ABI_EXTENSIONS(X)                                                                          \
    X(MLA_DESC, attn_mla_desc, 64, LAYER_DESC, mla_desc, NULL)                                     \
    X(RECURRENT_DESC, attn_recurrent_desc, 72, LAYER_DESC, recurrent_desc, NULL)                   \
    X(DRAFT_RECURRENT_RULE, attn_recurrent_rule, 64, LAYER_DESC, recurrent_rule, NULL)             \
    X(DRAFT_RECURRENT_NORM, attn_recurrent_norm, 40, LAYER_DESC, recurrent_norm, NULL)             \
    X(DRAFT_RECURRENT_ROUNDING, attn_recurrent_rounding, 40, LAYER_DESC, recurrent_rounding, NULL) \
    X(INDEXER_DESC, attn_indexer_desc, 64, LAYER_DESC, indexer_desc, NULL)                         \
    X(CONTEXT_PARALLEL, attn_context_parallel, 56, LAYER_DESC, context_parallel, NULL)             \
    X(DRAFT_MM_ENCODER, attn_mm_encoder_quant, 40, LAYER_DESC, mm_encoder_quant, NULL)             \
    X(LAYER_CACHES, attn_layer_caches, 40, LAYER_DESC, none, NULL)                                 \
    X(DRAFT_INDEX_LISTS, attn_index_lists, 48, LAYER_DESC, index_lists, NULL)                      \
    X(DRAFT_COMPRESSED_ROWS, attn_compressed_rows, 32, LAYER_DESC, compressed_rows, NULL)          \
    X(DRAFT_COMPRESSOR_DESC, attn_compressor_desc, 40, LAYER_DESC, compressor_desc, NULL)          \
    X(DRAFT_OUTPUT_ROPE, attn_output_rope, 32, LAYER_DESC, output_rope, NULL)                      \
    X(DRAFT_INDEX_WRITE, attn_index_write, 48, LAYER_DESC, index_write, NULL)                      \
    X(MLA_WEIGHTS, attn_mla_weights, 64, LAYER_PARAMS, mla_weights, "kind mla")                    \
    X(RECURRENT_WEIGHTS, attn_recurrent_weights, 56, LAYER_PARAMS, recurrent_weights,              \
      "kind recurrent")                                                                            \
    X(KV_QUANT_PARAMS, attn_kv_quant_params, 48, LAYER_PARAMS, kv_quant_params, NULL)              \
    X(DRAFT_MM_ENCODER_STATE, attn_mm_encoder_state, 40, LAYER_PARAMS, mm_encoder_state,           \
      "attn_mm_encoder_quant")                                                                     \
    X(DRAFT_RECURRENT_SKIP, attn_recurrent_skip, 32, LAYER_PARAMS, recurrent_skip,                 \
      "attn_recurrent_rule")                                                                       \
    X(DRAFT_RECURRENT_NORM_WEIGHT, attn_recurrent_norm_weight, 32, LAYER_PARAMS,                   \
      recurrent_norm_weight, "attn_recurrent_norm")                                                \
    X(BATCH_RECURRENT, attn_batch_recurrent, 88, BATCH, batch_recurrent, "kind recurrent")         \
    X(DRAFT_BATCH_REPLAY, attn_batch_replay, 32, BATCH, batch_replay, "a cache of role replay")    \
    X(BATCH_CONTEXT, attn_batch_context_parallel, 56, BATCH, batch_context_parallel,               \
      "attn_context_parallel")                                                                     \
    X(IO_MLA, attn_io_mla, 72, STEP_IO, io_mla, "kind mla")                                        \
    X(IO_RECURRENT, attn_io_recurrent, 48, STEP_IO, io_recurrent, "kind recurrent")                \
    X(DRAFT_IO_RECURRENT_GATE, attn_io_recurrent_gate, 32, STEP_IO, io_recurrent_gate,             \
      "attn_recurrent_norm")                                                                       \
    X(IO_INDEXER, attn_io_indexer, 40, STEP_IO, io_indexer, "kind indexer")                        \
    X(IO_OUTPUT_QUANT, attn_io_output_quant, 40, STEP_IO, io_output_quant,                         \
      "a quantized output_form")                                                                   \
    X(DRAFT_IO_COMPRESSOR, attn_io_compressor, 56, STEP_IO, io_compressor, "kind compressor")      \
    X(DRAFT_IO_OUTPUT_ROPE, attn_io_output_rope, 40, STEP_IO, io_output_rope, "attn_output_rope")  \
    X(DRAFT_IO_INDEX_WRITE, attn_io_index_write, 64, STEP_IO, io_index_write, "attn_index_write")  \
    X(IO_ROPE, attn_io_rope, 72, STEP_IO, io_rope, "rope")                                         \
    X(IO_CACHES, attn_io_caches, 40, STEP_IO, io_caches, "attn_layer_caches")                      \
    X(DRAFT_IO_INDEX_LISTS, attn_io_index_lists, 64, STEP_IO, io_index_lists, "attn_index_lists")  \
    X(CAPS_MLA, attn_mla_caps, 48, BACKEND_CAPS, none, NULL)                                       \
    X(CAPS_RECURRENT, attn_recurrent_caps, 56, BACKEND_CAPS, none, NULL)                           \
    X(DRAFT_RECURRENT_CAPS, attn_recurrent_rule_caps, 48, BACKEND_CAPS, none, NULL)                \
    X(CAPS_INDEXER, attn_indexer_caps, 56, BACKEND_CAPS, none, NULL)                               \
    X(DRAFT_INDEX_LISTS_CAPS, attn_index_lists_caps, 56, BACKEND_CAPS, none, NULL)                 \
    X(DRAFT_COMPRESSED_CAPS, attn_compressed_caps, 48, BACKEND_CAPS, none, NULL)

#define ABI_NAME(name, ...) ABI_##name,
enum abi_id {
    ABI_STRUCTS(ABI_NAME) ABI_EXTENSION_ID, /* a number */
    ABI_EXTENSIONS(ABI_NAME) NUM_ABI,
    ABI_FIRST_EXT = ABI_EXTENSION_ID + 1
};
#undef ABI_NAME

enum abi_class {
    ABI_INPUT,    /* an engine's: unknown tails, extensions and numbers out of range are refused */
    ABI_OPEN,     /* an input whose chain may hold vendors' extensions: the code that knows their
                     ids checks the chain, and the numbers */
    ABI_TABLE,    /* a table of functions, or what a driver reports: an unknown tail is ignored */
    ABI_DECLARED, /* the same with a chain that is checked */
    ABI_OUTPUT,   /* written for a caller */
    ABI_ELEMENT
};

enum abi_field_kind {
    FIELD_INT,   /* int32_t of min to max */
    FIELD_CODE,  /* the same, or a vendor's */
    FIELD_MASK,  /* uint64_t, of which `max` bits are known */
    FIELD_FLOAT, /* any value */
    FIELD_LONG,  /* int64_t */
    FIELD_TEXT,  /* const char * */
    FIELD_ARRAY, /* in a declaration: max is an element's enum abi_id, min where its count stands */
    FIELD_TENSOR, /* const struct attn_tensor *, which kernels read or write */
    FIELD_DEVICE, /* memory that kernels read or write */
    FIELD_HOST    /* memory that the host reads */
};

struct abi_field {
    const char *name;
    size_t at;
    enum abi_field_kind kind;
    int32_t min, max;
    uint32_t layer_kinds; /* attn_layer_desc: bits 1 << enum attn_layer_kind; others have it 0 */
};

struct abi_struct {
    const char *name;
    size_t size, minimum; /* here, and in ABI 0.3 */
    enum abi_class class;
    const struct abi_field *fields; /* in the order of the struct; ends with one without a name */
    uint32_t ext_id;                /* an extension; else 0 */
    enum abi_id on;                 /* in whose chain it stands */
    const char *reader;
};

/* By enum abi_id. */
extern const struct abi_struct abi_structs[NUM_ABI];

/* The row of an extension that stands in the chain of `on`; NULL: none has that id. */
const struct abi_struct *abi_find(uint32_t ext_id, enum abi_id on);

/* Bits of a layer, a uint64_t: which extensions of its parameters, batches and runs it reads. */
ATTN_STATIC_ASSERT(NUM_ABI - ABI_FIRST_EXT <= 64, "a bit for each extension");
#define ABI_READS(name) (UINT64_C(1) << (ABI_##name - ABI_FIRST_EXT))

#endif
