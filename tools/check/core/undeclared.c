/* SPDX-License-Identifier: Apache-2.0 */
/* Layers with one thing that the backend does not declare: selection has to refuse them, with a
 * reason that names the field, and the plugin's own supports and prepare may not crash on them. */
#include <stdio.h>
#include <string.h>

#include <attn/draft/index_lists.h>

#include "common/names.h"
#include "core/engine.h"
#include "cases/cases.h"
#include "support/client.h"

struct undeclared {
    struct attn_layer_desc layer;
    const char *field;
    bool composable; /* the core may do it with what is declared */
};

/* The reasons against the backend, which stay readable where nothing serves the layer. */
static bool names_field(struct core *core, const attn_assignment *assignment, const char *field)
{
    const struct attn_api *api = core->api;
    for (int32_t i = 0; i < api->backend_count(core->runtime); i++) {
        struct attn_backend_info info = {.struct_size = sizeof info};
        bool ours =
            api->backend_info(core->runtime, i, &info) == ATTN_OK && info.caps == core->caps;
        for (int32_t phase = 0; ours && phase <= ATTN_PHASE_DECODE; phase++) {
            struct attn_reason reason = {.struct_size = sizeof reason};
            for (int32_t j = 0;
                 api->assignment_reason(assignment, 0, phase, i, j, &reason) == ATTN_OK; j++) {
                if (strcmp(reason.field, field) == 0 && reason.asked[0] != '\0' &&
                    reason.supported[0] != '\0') {
                    return true;
                }
            }
        }
    }
    return false;
}

static void ignore_reason(void *user, const char *field, const char *asked, const char *supported)
{
}

/* Whatever they answer: they have to answer. */
static void ask_plugin(struct trial *trial, const struct attn_layer_desc *layer)
{
    struct backend *tested = trial->tested;
    const struct attn_layer_params params = {.struct_size = sizeof params};
    struct attn_reason_sink sink = {sizeof sink, NULL, NULL, ignore_reason};
    struct attn_error error = ATTN_ERROR_INIT;
    for (int32_t phase = 0; phase <= ATTN_PHASE_DECODE; phase++) {
        attn_prepared *prepared = NULL;
        attn_status status = ATTN_OK;
        const struct attn_supports_args asked =
            SIZED(attn_supports_args, .caps = &tested->caps, .layer = layer, .phase = phase);
        const struct attn_prepare_args prepare_args =
            SIZED(attn_prepare_args, .instance = tested->instance, .layer = layer,
                  .params = &params, .phase = phase);
        if (tested->plugin->supports != NULL) {
            status = tested->plugin->supports(&asked, &sink, &error);
        }
        if (status == ATTN_OK && tested->kernels.prepare != NULL) {
            status = tested->kernels.prepare(&prepare_args, &prepared, &error);
        }
        if (status == ATTN_OK && prepared != NULL && tested->kernels.release != NULL) {
            tested->kernels.release(tested->instance, prepared);
        }
    }
}

static enum trial_result run_undeclared(struct trial *trial, const void *variant, uint64_t seed)
{
    const struct undeclared *u = variant;
    const struct attn_api *api = trial->core->api;
    const struct attn_layer_desc *layers[] = {&u->layer};
    struct attn_select_options options = core_options(trial->core);
    struct attn_error error = ATTN_ERROR_INIT;
    attn_assignment *assignment = NULL;
    ask_plugin(trial, &u->layer);
    attn_status status =
        api->select(trial->core->runtime, &options, layers, 1, &assignment, &error);
    if (status == ATTN_OK) {
        api->assignment_destroy(assignment);
        return u->composable ? TRIAL_PASSED
                             : trial_say(trial, TRIAL_FAILED, "the layer was not refused");
    }
    if ((status != ATTN_ERROR_REFUSED && status != ATTN_ERROR_NO_BACKEND) ||
        error.message[0] == '\0' || assignment != NULL) {
        return trial_call_failed(trial, "the refusal", status, &error);
    }
    options.flags = ATTN_SELECT_KEEP_UNSERVED;
    status = api->select(trial->core->runtime, &options, layers, 1, &assignment, &error);
    if (status != ATTN_OK) {
        return trial_call_failed(trial, "selection with KEEP_UNSERVED", status, &error);
    }
    bool named = names_field(trial->core, assignment, u->field);
    api->assignment_destroy(assignment);
    return named ? TRIAL_PASSED
                 : trial_say(trial, TRIAL_FAILED, "no reason names %s with what is supported",
                             u->field);
}

/* The core cuts an engine's blocks into a backend's where these divide them. */
static bool parts_declared(const struct attn_backend_caps *caps, int32_t block_size)
{
    bool declared = false;
    for (int32_t part = 1; part <= block_size && !declared; part++) {
        declared =
            block_size % part == 0 && ranges_have(caps->block_sizes, caps->num_block_sizes, part);
    }
    return declared;
}

static bool head_declared(const struct attn_backend_caps *caps, int32_t head_size)
{
    bool declared = false;
    for (int32_t i = 0; i < caps->num_head_sizes; i++) {
        declared = declared || range_has(&caps->head_sizes[i].qk, head_size);
    }
    return declared;
}

static void try_numbers(const struct kernel_sink *sink, const struct attn_layer_desc *base)
{
    static const int32_t sizes[] = {8, 24, 40, 72, 80, 96, 120, 160, 192, 256, 512};
    static const int32_t blocks[] = {1, 3, 16, 24, 48, 96, 256, 4096, 1 << 16};
    const struct attn_backend_caps *caps = sink->caps;
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        struct undeclared u = {.layer = *base, .field = "head_size"};
        u.layer.head_size = u.layer.head_size_v = sizes[i];
        if (!head_declared(caps, sizes[i])) {
            kernel_try(sink, run_undeclared, &u, "undeclared.head_size.%d", sizes[i]);
        }
    }
    for (size_t i = 0; i < sizeof blocks / sizeof *blocks; i++) {
        struct undeclared u = {.layer = *base, .field = "block_size"};
        u.layer.block_size = blocks[i];
        if (!parts_declared(caps, blocks[i])) {
            kernel_try(sink, run_undeclared, &u, "undeclared.block_size.%d", blocks[i]);
        }
    }
    if (caps->max_group > 0) {
        struct undeclared u = {.layer = *base, .field = "group (num_q_heads / num_kv_heads)"};
        u.layer.num_kv_heads = 1;
        u.layer.num_q_heads = caps->max_group + 1;
        kernel_try(sink, run_undeclared, &u, "undeclared.max_group");
    }
}

/* A field of the layer, and the bit of a mask by which it is declared. */
struct row {
    const char *name, *field;
    size_t mask; /* in the capabilities */
    uint64_t bit;
    size_t member; /* in the layer */
    int32_t value;
    bool composable;
};
#define CAPS(mask) offsetof(struct attn_backend_caps, mask)
#define LAYER(member) offsetof(struct attn_layer_desc, member)
#define TERM(name) CAPS(terms), ATTN_TERM_##name
#define FEATURE(name) CAPS(features), ATTN_FEATURE_##name
#define THIRTY 0x41f00000 /* the float's bits */

static const struct row rows[] = {
    {"sliding_window", "sliding_window", TERM(SLIDING_WINDOW), LAYER(has_window), 1},
    {"soft_cap", "soft_cap", TERM(SOFT_CAP), LAYER(soft_cap), THIRTY},
    {"alibi", "alibi", TERM(ALIBI), LAYER(alibi), ATTN_ALIBI_LINEAR},
    {"alibi_sqrt", "alibi_sqrt", TERM(ALIBI_SQRT), LAYER(alibi), ATTN_ALIBI_SQRT},
    {"sinks", "sinks", TERM(SINKS), LAYER(has_sinks), 1},
    {"prefix_lm", "prefix_lm", TERM(PREFIX_LM), LAYER(prefix_lm), 1},
    {"tree_bits", "tree_mask", TERM(TREE_BITS), LAYER(tree_mask), ATTN_TREE_BITS},
    {"tree_bias", "tree_mask", TERM(TREE_BIAS), LAYER(tree_mask), ATTN_TREE_BIAS},
    {"causal_per_request", "causal_per_request", TERM(CAUSAL_PER_REQUEST),
     LAYER(causal_per_request), 1},
    {"chunked_local", "chunk_size", TERM(CHUNKED_LOCAL), LAYER(chunk_size), 64, true},
    {"static_sink", "static_sink", TERM(STATIC_SINK), LAYER(sink_len), 3, true},
    {"lse", "lse", FEATURE(LSE), LAYER(needs_lse), 1},
    {"rope", "rope", FEATURE(FUSED_ROPE), LAYER(rope), 1},
    {"qk_norm", "qk_norm", FEATURE(FUSED_ROPE_NORM), LAYER(qk_norm), 1},
    {"fast_prefill", "fast_prefill", FEATURE(FAST_PREFILL), LAYER(fast_prefill), 1},
    {"block_table_row", "block_table_row", FEATURE(BLOCK_TABLE_ROW), LAYER(needs_block_table_row),
     1},
    {"device_seq_lens", "device_seq_lens_only", FEATURE(DEVICE_SEQ_LENS),
     LAYER(device_seq_lens_only), 1},
    {"host_bounds", "host_bounds", FEATURE(HOST_BOUNDS), LAYER(host_bounds), 1},
    {"kv_dtype_v", "kv_dtype_v", FEATURE(KV_DTYPE_V), LAYER(kv_dtype_v), ATTN_KV_FP8_E4M3},
    {"batch_invariant", "batch_invariant", FEATURE(BATCH_INVARIANT), LAYER(batch_invariant), 1},
    {"quantized_query", "q_scale_form", FEATURE(QUANTIZED_QUERY), LAYER(q_scale_form),
     ATTN_SCALE_PER_TENSOR},
    {"p_scale", "p_scale_form", CAPS(p_scale_forms), 1 << ATTN_SCALE_PER_TENSOR,
     LAYER(p_scale_form), ATTN_SCALE_PER_TENSOR},
    {"output_form", "output_form", CAPS(output_forms), 1 << ATTN_OUTPUT_FP8_STATIC,
     LAYER(output_form), ATTN_OUTPUT_FP8_STATIC},
};

static void try_row(const struct kernel_sink *sink, const struct attn_layer_desc *base,
                    const struct row *row)
{
    const struct attn_backend_caps *caps = sink->caps;
    struct undeclared u = {.layer = *base, .field = row->field, .composable = row->composable};
    uint64_t declared;
    memcpy(&declared, (const char *)caps + row->mask, sizeof declared);
    memcpy((char *)&u.layer + row->member, &row->value, sizeof row->value);
    u.layer.window_left = u.layer.has_window ? 7 : u.layer.window_left;
    u.layer.q_dtype = u.layer.q_scale_form != 0 ? ATTN_DTYPE_FP8_E4M3 : u.layer.q_dtype;
    u.layer.rope = u.layer.qk_norm != 0 ? ATTN_ROPE_NEOX : u.layer.rope;
    bool behind = u.layer.output_form != 0 && caps->kernels & ATTN_KERNEL_QUANTIZE;
    if (!(declared & row->bit) && !behind) {
        kernel_try(sink, run_undeclared, &u, "undeclared.%s", row->name);
    }
}

static void try_dtypes(const struct kernel_sink *sink, const struct attn_layer_desc *base)
{
    char name[96];
    struct row row = {name, "dtype", CAPS(dtypes), 0, LAYER(dtype), 0, false};
    for (int32_t dtype = ATTN_DTYPE_F16; dtype <= ATTN_DTYPE_F32; dtype++) {
        snprintf(name, sizeof name, "dtype.%s", dtype_name(dtype));
        row.bit = UINT64_C(1) << dtype;
        row.value = dtype;
        try_row(sink, base, &row);
    }
    row = (struct row){name, "kv_dtype", CAPS(kv_dtypes), 0, LAYER(kv_dtype), 0, false};
    for (int32_t kv = ATTN_KV_FP8_E4M3; kv <= ATTN_KV_Q4_0; kv++) {
        snprintf(name, sizeof name, "kv_dtype.%s", kv_dtype_name(kv));
        row.bit = UINT64_C(1) << kv;
        row.value = kv;
        try_row(sink, base, &row);
    }
}

static void try_lists(const struct kernel_sink *sink, const struct attn_layer_desc *base)
{
    const struct attn_index_lists lists =
        EXTENSION(attn_index_lists, ATTN_EXT_DRAFT_INDEX_LISTS, NULL, .max_entries = 64);
    struct undeclared u = {.layer = *base, .field = "attn_index_lists"};
    u.layer.next = &lists.ext;
    if (backend_extension(sink->caps, ATTN_EXT_DRAFT_INDEX_LISTS_CAPS,
                          sizeof(struct attn_index_lists_caps)) == NULL) {
        kernel_try(sink, run_undeclared, &u, "undeclared.index_lists");
    }
}

void undeclared_cases(const struct kernel_sink *sink)
{
    struct factor_value v[FACTOR_COUNT];
    struct attn_layer_desc base;
    struct attend_case c = {{0}};
    case_drop_conflicts(sink->space, &c);
    case_values(sink->space, &c, v);
    if (!shape_is_paged(v[FACTOR_SHAPE].a) || v[FACTOR_CAUSAL].a != CAUSAL_YES) {
        return; /* without a causal layer over a cache there is no base to vary */
    }
    case_layer(v, &base);
    base.name = "undeclared";
    base.kv_dtype = ATTN_KV_AUTO;
    base.k_scale_form = base.v_scale_form = ATTN_SCALE_NONE;
    try_numbers(sink, &base);
    try_dtypes(sink, &base);
    try_lists(sink, &base);
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        try_row(sink, &base, &rows[i]);
    }
}
