/* SPDX-License-Identifier: Apache-2.0 */
/* Wrong backends: each is cpu_ref with one mistake that a vendor might make, put in between by changing the arguments
 * on the way in or the outputs on the way out. attn-check has to catch every one of them. */
#include <attn/plugin.h>
#include <dlfcn.h>
#include <math.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#define MAX_REQS 64
#define MAX_TABLE (1 << 16)
#define MAX_TOKENS 4096
#define MAX_HEADS 64

/* Everything of one attend that a mistake may change; the pointers in `args` lead here. */
struct mutable_args {
    struct attn_attend_args args;
    struct attn_layer_desc layer;
    struct attn_layer_params params;
    struct attn_batch batch;
    float sinks[MAX_HEADS], slopes[MAX_HEADS], k_scale[MAX_HEADS], v_scale[MAX_HEADS];
    int32_t seq_lens[MAX_REQS];
    int32_t spans[4 * MAX_REQS];
    int32_t table[MAX_TABLE];
};

struct mutant {
    const char *name;
    void (*before)(struct mutable_args *m); /* NULL: nothing */
    void (*after)(const struct attn_attend_args *args);
    attn_status (*write)(const struct attn_kernels *kernels, const struct attn_write_kv_args *args,
                         struct attn_error *error);
    attn_status (*merge)(const struct attn_kernels *kernels,
                         const struct attn_merge_states_args *args, struct attn_error *error);
};

struct attn_instance {
    attn_instance *real;
    const struct attn_plugin *plugin;
    const struct attn_kernels *kernels;
    const struct attn_host *host;
    const struct mutant *mutant;
};

static void window_too_long(struct mutable_args *m)
{
    m->layer.window_left += m->layer.window_left >= 0;
}

static void window_too_short(struct mutable_args *m)
{
    m->layer.window_left -= m->layer.window_left > 0;
}

static void window_one_sided(struct mutable_args *m)
{
    m->layer.window_right = m->layer.has_window ? 0 : m->layer.window_right;
}

static void sink_missing(struct mutable_args *m)
{
    m->layer.has_sinks = 0;
    m->params.sinks = NULL;
}

static void sink_twice(struct mutable_args *m)
{
    for (int32_t h = 0; m->params.sinks != NULL && h < m->layer.num_q_heads; h++) {
        m->sinks[h] = m->params.sinks[h] + logf(2);
    }
    m->params.sinks = m->params.sinks != NULL ? m->sinks : NULL;
}

static void scale_twice(struct mutable_args *m)
{
    m->layer.scale *= m->layer.scale;
}

static void soft_cap_missing(struct mutable_args *m)
{
    m->layer.soft_cap = 0;
}

static void alibi_sign(struct mutable_args *m)
{
    for (int32_t h = 0; m->params.alibi_slopes != NULL && h < m->layer.num_q_heads; h++) {
        m->slopes[h] = -m->params.alibi_slopes[h];
    }
    m->params.alibi_slopes = m->params.alibi_slopes != NULL ? m->slopes : NULL;
}

static void alibi_sqrt_linear(struct mutable_args *m)
{
    m->layer.alibi = m->layer.alibi == ATTN_ALIBI_SQRT ? ATTN_ALIBI_LINEAR : m->layer.alibi;
}

/* Sees one key too many. */
static void causal_late(struct mutable_args *m)
{
    if (m->layer.causal && !m->layer.has_window && !m->layer.causal_per_request &&
        !m->layer.prefix_lm && !m->layer.tree_mask && !m->layer.chunk_size) {
        m->layer.causal = 0;
        m->layer.has_window = 1;
        m->layer.window_left = -1;
        m->layer.window_right = 1;
    }
}

static void chunk_lookback(struct mutable_args *m)
{
    m->layer.chunk_lookback += m->layer.chunk_size > 0;
}

static void static_sink_missing(struct mutable_args *m)
{
    m->layer.sink_len = 0;
    m->params.sink_k = m->params.sink_v = NULL;
}

static void spans_exclusive(struct mutable_args *m)
{
    for (int32_t i = 0; m->batch.spans != NULL && i < m->batch.num_spans && i < 2 * MAX_REQS; i++) {
        m->spans[2 * i] = m->batch.spans[2 * i];
        m->spans[2 * i + 1] = m->batch.spans[2 * i + 1] - 1;
    }
    m->batch.spans = m->batch.spans != NULL ? m->spans : NULL;
}

static void span_window_missing(struct mutable_args *m)
{
    m->layer.prefix_lm_window = 0;
}

static void tree_ignored(struct mutable_args *m)
{
    m->layer.tree_mask = ATTN_TREE_NONE;
    m->batch.tree = NULL;
}

static void tree_shared(struct mutable_args *m)
{
    m->batch.tree_stride_request = 0;
}

/* Rows in another order than block_table_row says: each request reads its neighbour's. Entries that are garbage for the
 * neighbour become block 0, since a crash would prove less. */
static void table_row_ignored(struct mutable_args *m)
{
    const struct attn_batch *batch = m->args.batch;
    if (batch->block_table == NULL || batch->block_table_row == NULL) {
        return;
    }
    for (int32_t r = 0; r < batch->num_reqs; r++) {
        int64_t row = batch->block_table_row[(r + 1) % batch->num_reqs];
        for (int64_t b = 0; b < batch->block_table_stride; b++) {
            int32_t block = batch->block_table[row * batch->block_table_stride + b];
            bool valid = block >= 0 && block < m->args.k_cache->num_blocks;
            m->table[r * batch->block_table_stride + b] = valid ? block : 0;
        }
    }
    m->batch.block_table = m->table;
    m->batch.block_table_row = NULL;
}

static void key_start_ignored(struct mutable_args *m)
{
    m->batch.key_start_loc = NULL;
    m->batch.key_start_loc_host = NULL;
}

static void causal_flags_ignored(struct mutable_args *m)
{
    m->batch.causal_per_request = NULL;
}

/* One key past the end, where its slot still lies in the last block. */
static void unmasked_tail(struct mutable_args *m)
{
    for (int32_t r = 0; m->batch.seq_lens != NULL && r < m->batch.num_reqs; r++) {
        int32_t length = m->batch.seq_lens[r];
        m->seq_lens[r] = length + (length % m->args.k_cache->block_size != 0);
    }
    if (m->batch.seq_lens != NULL && m->args.k_cache != NULL) {
        m->batch.seq_lens = m->batch.seq_lens_host = m->seq_lens;
    }
}

static void last_page_wrong(struct mutable_args *m)
{
    const struct attn_batch *batch = m->args.batch;
    if (m->args.k_cache == NULL || batch->block_table == NULL) {
        return;
    }
    memcpy(m->table, batch->block_table,
           (size_t)(batch->block_table_rows * batch->block_table_stride) * sizeof *m->table);
    for (int32_t r = 0; r < batch->num_reqs; r++) {
        int64_t row = batch->block_table_row != NULL ? batch->block_table_row[r] : r;
        int32_t *entries = m->table + row * batch->block_table_stride;
        int32_t last = (batch->seq_lens[r] - 1) / m->args.k_cache->block_size;
        if (batch->seq_lens[r] > 0 && last > 0 && entries[last - 1] >= 0) {
            entries[last] = entries[last - 1];
        }
    }
    m->batch.block_table = m->table;
}

static void k_scale_ignored(struct mutable_args *m)
{
    m->params.k_scale = NULL;
}

static void head_scales_as_tensor(struct mutable_args *m)
{
    for (int32_t h = 0; m->params.v_scale != NULL && h < m->layer.num_kv_heads; h++) {
        m->v_scale[h] = m->params.v_scale[0];
    }
    m->params.v_scale = m->params.v_scale != NULL ? m->v_scale : NULL;
}

static void v_scale_twice(struct mutable_args *m)
{
    int32_t count = m->layer.v_scale_form == ATTN_SCALE_PER_HEAD ? m->layer.num_kv_heads : 1;
    for (int32_t h = 0; m->params.v_scale != NULL && h < count; h++) {
        m->v_scale[h] = m->params.v_scale[h] * m->params.v_scale[h];
    }
    m->params.v_scale = m->params.v_scale != NULL ? m->v_scale : NULL;
}

static void lse_base_two(const struct attn_attend_args *args)
{
    for (int64_t h = 0; args->lse != NULL && h < args->lse->shape[0]; h++) {
        for (int32_t t = 0; t < args->batch->num_actual_tokens; t++) {
            float *lse = (float *)args->lse->data + h * args->lse->strides[0] +
                         t * args->lse->strides[1];
            *lse *= 1.4426950408889634f;
        }
    }
}

static void padding_cleared(const struct attn_attend_args *args)
{
    size_t row = (size_t)args->out->strides[0] * args->out->dtype.bits / 8;
    memset((uint8_t *)args->out->data + (size_t)args->batch->num_actual_tokens * row, 0, row);
}

/* The first and the last query head are taken for one another. */
static void heads_exchanged(const struct attn_attend_args *args)
{
    size_t bytes = (size_t)args->out->shape[2] * args->out->dtype.bits / 8;
    size_t head = (size_t)args->out->strides[1] * args->out->dtype.bits / 8;
    size_t row = (size_t)args->out->strides[0] * args->out->dtype.bits / 8;
    uint8_t kept[4096];
    if (args->layer->num_kv_heads < 2 || bytes > sizeof kept) {
        return;
    }
    for (int32_t t = 0; t < args->batch->num_actual_tokens; t++) {
        uint8_t *first = (uint8_t *)args->out->data + (size_t)t * row;
        uint8_t *last = first + head * (size_t)(args->layer->num_q_heads - 1);
        memcpy(kept, first, bytes);
        memcpy(first, last, bytes);
        memcpy(last, kept, bytes);
    }
}

static void outputs_rounded(const struct attn_attend_args *args)
{
    for (int64_t i = 0; args->out->dtype.bits == 32 && i < args->out->shape[2]; i++) {
        uint32_t *x = (uint32_t *)args->out->data + i;
        *x &= 0xffff0000u; /* as bf16 */
    }
}

static attn_status skip_ignored(const struct attn_kernels *kernels,
                                const struct attn_write_kv_args *args, struct attn_error *error)
{
    int64_t slots[MAX_TOKENS];
    struct attn_write_kv_args changed = *args;
    for (int64_t t = 0; t < args->num_slots && t < MAX_TOKENS; t++) {
        slots[t] = args->slot_mapping[t] < 0 ? 0 : args->slot_mapping[t];
    }
    changed.slot_mapping = slots;
    return kernels->write_kv(&changed, error);
}

static attn_status last_row_dropped(const struct attn_kernels *kernels,
                                    const struct attn_write_kv_args *args,
                                    struct attn_error *error)
{
    struct attn_write_kv_args changed = *args;
    while (changed.num_slots > 0 && args->slot_mapping[changed.num_slots - 1] < 0) {
        changed.num_slots--;
    }
    changed.num_slots -= changed.num_slots > 0;
    return kernels->write_kv(&changed, error);
}

/* Weights both sides alike whatever their lse. */
static attn_status merge_ignores_empty(const struct attn_kernels *kernels,
                                       const struct attn_merge_states_args *args,
                                       struct attn_error *error)
{
    struct attn_merge_states_args changed = *args;
    changed.num_rows_with_prefix = args->num_rows;
    return kernels->merge_states(&changed, error);
}

static const struct mutant mutants[] = {
    {"mutant_window_too_long", window_too_long, NULL, NULL, NULL},
    {"mutant_window_too_short", window_too_short, NULL, NULL, NULL},
    {"mutant_window_one_sided", window_one_sided, NULL, NULL, NULL},
    {"mutant_sink_missing", sink_missing, NULL, NULL, NULL},
    {"mutant_sink_twice", sink_twice, NULL, NULL, NULL},
    {"mutant_scale_twice", scale_twice, NULL, NULL, NULL},
    {"mutant_soft_cap_missing", soft_cap_missing, NULL, NULL, NULL},
    {"mutant_alibi_sign", alibi_sign, NULL, NULL, NULL},
    {"mutant_alibi_sqrt_linear", alibi_sqrt_linear, NULL, NULL, NULL},
    {"mutant_causal_late", causal_late, NULL, NULL, NULL},
    {"mutant_chunk_lookback", chunk_lookback, NULL, NULL, NULL},
    {"mutant_static_sink_missing", static_sink_missing, NULL, NULL, NULL},
    {"mutant_spans_exclusive", spans_exclusive, NULL, NULL, NULL},
    {"mutant_span_window_missing", span_window_missing, NULL, NULL, NULL},
    {"mutant_tree_ignored", tree_ignored, NULL, NULL, NULL},
    {"mutant_tree_shared", tree_shared, NULL, NULL, NULL},
    {"mutant_table_row_ignored", table_row_ignored, NULL, NULL, NULL},
    {"mutant_key_start_ignored", key_start_ignored, NULL, NULL, NULL},
    {"mutant_causal_flags_ignored", causal_flags_ignored, NULL, NULL, NULL},
    {"mutant_unmasked_tail", unmasked_tail, NULL, NULL, NULL},
    {"mutant_last_page_wrong", last_page_wrong, NULL, NULL, NULL},
    {"mutant_k_scale_ignored", k_scale_ignored, NULL, NULL, NULL},
    {"mutant_v_scale_twice", v_scale_twice, NULL, NULL, NULL},
    {"mutant_head_scales_as_tensor", head_scales_as_tensor, NULL, NULL, NULL},
    {"mutant_lse_base_two", NULL, lse_base_two, NULL, NULL},
    {"mutant_padding_cleared", NULL, padding_cleared, NULL, NULL},
    {"mutant_heads_exchanged", NULL, heads_exchanged, NULL, NULL},
    {"mutant_outputs_rounded", NULL, outputs_rounded, NULL, NULL},
    {"mutant_skip_ignored", NULL, NULL, skip_ignored, NULL},
    {"mutant_last_row_dropped", NULL, NULL, last_row_dropped, NULL},
    {"mutant_merge_ignores_empty", NULL, NULL, NULL, merge_ignores_empty},
    {"mutant_none", NULL, NULL, NULL, NULL}, /* the control: has to pass */
};
#define NUM_MUTANTS ((int32_t)(sizeof mutants / sizeof *mutants))

static attn_status mutant_attend(const struct attn_attend_args *args, struct attn_error *error)
{
    const struct attn_instance *me = args->instance;
    static _Thread_local struct mutable_args m;
    m.args = *args;
    m.args.instance = me->real;
    m.layer = *args->layer;
    m.params = *args->params;
    m.batch = *args->batch;
    if (me->mutant->before != NULL) {
        me->mutant->before(&m);
    }
    m.args.layer = &m.layer;
    m.args.params = &m.params;
    m.args.batch = &m.batch;
    attn_status status = me->kernels->attend(&m.args, error);
    if (status == ATTN_OK && me->mutant->after != NULL) {
        me->mutant->after(args);
    }
    return status;
}

static attn_status mutant_write(const struct attn_write_kv_args *args, struct attn_error *error)
{
    struct attn_write_kv_args changed = *args;
    changed.instance = args->instance->real;
    if (args->instance->mutant->write != NULL) {
        return args->instance->mutant->write(args->instance->kernels, &changed, error);
    }
    return args->instance->kernels->write_kv(&changed, error);
}

static attn_status mutant_merge(const struct attn_merge_states_args *args, struct attn_error *error)
{
    struct attn_merge_states_args changed = *args;
    changed.instance = args->instance->real;
    if (args->instance->mutant->merge != NULL) {
        return args->instance->mutant->merge(args->instance->kernels, &changed, error);
    }
    return args->instance->kernels->merge_states(&changed, error);
}

/* No prepare or plan: cpu_ref reads everything when it runs. */
static const struct attn_kernels mutant_kernels = {
    .struct_size = sizeof mutant_kernels,
    .attend = mutant_attend,
    .write_kv = mutant_write,
    .merge_states = mutant_merge,
};

static const struct attn_plugin *real_plugin(struct attn_error *error)
{
    const struct attn_plugin *plugin = NULL;
    attn_plugin_entry_fn *entry;
    void *library = dlopen(CPU_REF_FILE, RTLD_NOW | RTLD_LOCAL);
    void *symbol = library != NULL ? dlsym(library, ATTN_PLUGIN_ENTRY_SYMBOL) : NULL;
    if (symbol == NULL) {
        return NULL;
    }
    memcpy(&entry, &symbol, sizeof entry);
    return entry(ATTN_ABI_VERSION_MIN, ATTN_ABI_VERSION, &plugin, error) == ATTN_OK ? plugin : NULL;
}

struct forward {
    const struct attn_probe_sink *sink;
};

static attn_status forward_device(void *user, const struct attn_device_info *device)
{
    const struct forward *forward = user;
    return forward->sink->device(forward->sink->user, device);
}

static attn_status forward_backend(void *user, const struct attn_backend_caps *caps)
{
    const struct forward *forward = user;
    attn_status status = ATTN_OK;
    for (int32_t i = 0; i < NUM_MUTANTS && status == ATTN_OK; i++) {
        struct attn_backend_caps mine = *caps;
        mine.name = mutants[i].name;
        mine.kernels =
            ATTN_KERNEL_ATTEND | ATTN_KERNEL_WRITE_KV | ATTN_KERNEL_MERGE_STATES;
        mine.next = NULL;
        mine.layer_kinds &= ~((UINT64_C(1) << ATTN_LAYER_MLA) | (UINT64_C(1) << ATTN_LAYER_GDN) |
                              (UINT64_C(1) << ATTN_LAYER_MLA_SPARSE));
        mine.features &= ~(ATTN_FEATURE_FUSED_ROPE | ATTN_FEATURE_FUSED_ROPE_NORM);
        mine.rank[0] = mine.rank[1] = -1;
        status = forward->sink->backend(forward->sink->user, &mine);
    }
    return status;
}

static attn_status mutants_probe(const struct attn_host *host, const struct attn_probe_sink *sink,
                                 struct attn_error *error)
{
    struct forward forward = {sink};
    struct attn_probe_sink mine = {sizeof mine, NULL, &forward, forward_device, forward_backend};
    const struct attn_plugin *plugin = real_plugin(error);
    return plugin != NULL ? plugin->probe(host, &mine, error) : ATTN_ERROR_PLUGIN;
}

static void mutants_destroy(attn_instance *instance)
{
    if (instance != NULL) {
        instance->plugin->destroy(instance->real);
        instance->host->release(instance->host->user, instance, sizeof *instance);
    }
}

static attn_status mutants_create(const struct attn_host *host, const char *backend,
                                  const char *variant, struct attn_device device,
                                  attn_instance **instance, const struct attn_kernels **kernels,
                                  struct attn_error *error)
{
    attn_instance *me = host->allocate(host->user, sizeof *me, 16);
    attn_status status = me != NULL ? ATTN_ERROR_NOT_FOUND : ATTN_ERROR_OUT_OF_MEMORY;
    *instance = NULL;
    *kernels = NULL;
    for (int32_t i = 0; i < NUM_MUTANTS && me != NULL; i++) {
        if (strcmp(mutants[i].name, backend) == 0) {
            *me = (struct attn_instance){NULL, real_plugin(error), NULL, host, &mutants[i]};
            status = me->plugin == NULL
                         ? ATTN_ERROR_PLUGIN
                         : me->plugin->create(host, "cpu_ref", variant, device, &me->real,
                                              &me->kernels, error);
        }
    }
    if (status != ATTN_OK) {
        if (me != NULL) {
            host->release(host->user, me, sizeof *me);
        }
        return status;
    }
    *instance = me;
    *kernels = &mutant_kernels;
    return ATTN_OK;
}

static const struct attn_plugin mutants_plugin = {
    .struct_size = sizeof mutants_plugin,
    .abi_version = ATTN_ABI_VERSION,
    .name = "mutants",
    .version = "0.1.0",
    .vendor = "libattn tests",
    .probe = mutants_probe,
    .create = mutants_create,
    .destroy = mutants_destroy,
};

attn_status attn_plugin_entry(uint32_t abi_version_min, uint32_t abi_version_max,
                              const struct attn_plugin **plugin, struct attn_error *error)
{
    (void)error;
    if (abi_version_min > ATTN_ABI_VERSION || abi_version_max < ATTN_ABI_VERSION) {
        return ATTN_ERROR_ABI_VERSION;
    }
    *plugin = &mutants_plugin;
    return ATTN_OK;
}
