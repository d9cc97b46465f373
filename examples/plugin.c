/* SPDX-License-Identifier: Apache-2.0 */
/* The smallest useful backend: attend, write_kv and merge_states in float32, with what a layer
 * keeps between bind and run (prepare) and scratch for a step (schedule_size). The core composes
 * cross attention, encoders, chunked local attention, static sinks and cascades of it. Compiles as
 * C11 and as C++20.
 *
 *     cc -shared -fPIC -fvisibility=hidden -I abi examples/plugin.c -lm -o attn_example.so
 *     ATTN_PLUGIN_PATH=$PWD/attn_example.so ATTN_BACKEND=example attn-info */
#include <attn/plugin.h>
#include <math.h>
#include <string.h>

/* A library's handles would stand here, one for each thread or stream that may be in a step. */
struct attn_instance {
    const struct attn_host *host;
};

/* One layer in one phase: what is worked out once. */
struct attn_prepared {
    int32_t group; /* query heads of a KV head */
    int32_t head_size_v;
};

static float *row(const struct attn_tensor *t, int64_t i, int64_t j)
{
    int64_t s0 = t->strides ? t->strides[0] : t->ndim > 2 ? t->shape[1] * t->shape[2] : t->shape[1];
    int64_t s1 = t->strides ? t->strides[1] : t->ndim > 2 ? t->shape[2] : 1;
    return (float *)((char *)t->data + t->byte_offset) + i * s0 + j * s1;
}

static float *slot(const struct attn_kv_view *view, int64_t block, int64_t offset, int64_t head)
{
    return (float *)((char *)view->data + block * view->stride_block + offset * view->stride_slot +
                     head * view->stride_head);
}

/* Key or value j of request r: in the cache through the block table, or contiguous. */
static const float *key(const struct attn_attend_args *a, int v, int64_t r, int64_t j, int64_t head)
{
    const struct attn_batch *b = a->batch;
    if (a->k_cache == NULL) {
        const int32_t *start = b->key_start_loc ? b->key_start_loc : b->query_start_loc;
        return row(v ? a->v : a->k, start[r] + j, head);
    }
    const struct attn_kv_view *view = v ? a->v_cache : a->k_cache;
    int64_t table_row = b->block_table_row ? b->block_table_row[r] : r;
    int32_t block = b->block_table[table_row * b->block_table_stride + j / view->block_size];
    return slot(view, block, j % view->block_size, head);
}

static void attend_row(const struct attn_attend_args *a, int64_t r, int64_t token, int64_t h,
                       int64_t position, int64_t length)
{
    const struct attn_layer_desc *l = a->layer;
    int64_t head = h / a->prepared->group;
    int causal = (a->batch->causal ? a->batch->causal : l->causal) == ATTN_CAUSAL_YES;
    const float *q = row(a->q, token, h);
    float *out = row(a->out, token, h), *mean = (float *)a->scratch;
    float m = -INFINITY, sum = 0;
    memset(mean, 0, sizeof *mean * (size_t)a->prepared->head_size_v);
    for (int64_t j = 0; j < length; j++) {
        float s = 0, before = m;
        if ((causal && j > position) ||
            (l->has_window && l->window_left >= 0 && j < position - l->window_left) ||
            (l->has_window && l->window_right >= 0 && j > position + l->window_right)) {
            continue;
        }
        const float *k = key(a, 0, r, j, head), *v = key(a, 1, r, j, head);
        for (int32_t d = 0; d < l->head_size; d++) {
            s += q[d] * k[d];
        }
        s *= l->scale;
        m = fmaxf(m, s);
        float shrink = before == m ? 1 : expf(before - m), w = expf(s - m);
        sum = sum * shrink + w;
        for (int32_t d = 0; d < l->head_size_v; d++) {
            mean[d] += (v[d] - mean[d]) * (w / sum); /* a sum could be more than a float is */
        }
    }
    for (int32_t d = 0; d < l->head_size_v; d++) {
        out[d] = mean[d];
    }
    if (a->lse != NULL) {
        /* a visible NaN is in both */
        *row(a->lse, h, token) = sum != 0 ? m + logf(sum) : -INFINITY;
    }
}

static attn_status attend(const struct attn_attend_args *a, struct attn_error *error)
{
    const struct attn_batch *b = a->batch;
    (void)error;
    for (int64_t r = 0; r < b->num_reqs; r++) {
        int64_t first = b->query_start_loc[r], count = b->query_start_loc[r + 1] - first;
        const int32_t *start = b->key_start_loc ? b->key_start_loc : b->query_start_loc;
        int64_t length = a->k_cache ? b->seq_lens[r] : start[r + 1] - start[r];
        for (int64_t i = 0; i < count * a->layer->num_q_heads; i++) {
            int64_t token = i / a->layer->num_q_heads;
            attend_row(a, r, first + token, i % a->layer->num_q_heads, length - count + token,
                       length);
        }
    }
    return ATTN_OK;
}

static attn_status write_kv(const struct attn_write_kv_args *a, struct attn_error *error)
{
    (void)error;
    for (int64_t t = 0; t < a->num_slots; t++) {
        int64_t at = a->slot_mapping[t], size = a->k_cache->block_size;
        for (int64_t h = 0; at >= 0 && h < a->layer->num_kv_heads; h++) {
            memcpy(slot(a->k_cache, at / size, at % size, h), row(a->k, t, h),
                   4 * (size_t)a->layer->head_size);
            memcpy(slot(a->v_cache, at / size, at % size, h), row(a->v, t, h),
                   4 * (size_t)a->layer->head_size_v);
        }
    }
    return ATTN_OK;
}

static attn_status merge_states(const struct attn_merge_states_args *a, struct attn_error *error)
{
    (void)error;
    if (a->out->dtype.bits != 32) {
        return ATTN_ERROR_UNSUPPORTED; /* a quantized output, which is not declared */
    }
    for (int64_t i = 0; i < a->num_rows * a->out->shape[1]; i++) {
        int64_t n = i / a->out->shape[1], t = a->first_row + n, h = i % a->out->shape[1];
        float lse1 = *row(a->prefix_lse, h, t), lse2 = *row(a->suffix_lse, h, t);
        /* both infinities mean empty */
        lse1 = isinf(lse1) || n >= a->num_rows_with_prefix ? -INFINITY : lse1;
        lse2 = isinf(lse2) ? -INFINITY : lse2;
        float m = fmaxf(lse1, lse2);
        float w1 = isinf(lse1) ? 0 : expf(lse1 - m), w2 = isinf(lse2) ? 0 : expf(lse2 - m),
              sum = w1 + w2;
        const float *o1 = row(a->prefix_out, t, h), *o2 = row(a->suffix_out, t, h);
        for (int64_t d = 0; d < a->out->shape[2]; d++) {
            float x = (w1 != 0 ? w1 * o1[d] : 0) + (w2 != 0 ? w2 * o2[d] : 0);
            row(a->out, t, h)[d] = sum == 0 ? 0 : x / sum;
        }
        if (a->lse != NULL) {
            *row(a->lse, h, t) = sum == 0 ? -INFINITY : m + logf(sum);
        }
    }
    return ATTN_OK;
}

/* Not a step: here modules are loaded and kernels chosen. */
static attn_status prepare(const struct attn_prepare_args *a, attn_prepared **prepared,
                           struct attn_error *error)
{
    const struct attn_host *host = a->instance->host;
    (void)error;
    *prepared = (attn_prepared *)host->allocate(host->user, sizeof **prepared, 16);
    if (*prepared == NULL) {
        return ATTN_ERROR_OUT_OF_MEMORY;
    }
    (*prepared)->group = a->layer->num_q_heads / a->layer->num_kv_heads;
    (*prepared)->head_size_v = a->layer->head_size_v;
    return ATTN_OK;
}

static void release(attn_instance *instance, attn_prepared *prepared)
{
    instance->host->release(instance->host->user, prepared, sizeof *prepared);
}

/* The worst case of any batch within the limits: here one weighted sum, whatever they are. */
static attn_status schedule_size(const struct attn_schedule_size_args *a,
                                 struct attn_schedule_size *size, struct attn_error *error)
{
    (void)error;
    size->host_bytes = 0;
    size->device_bytes = 0;
    size->scratch_bytes = (size_t)a->prepared->head_size_v * sizeof(float);
    return ATTN_OK;
}

static const struct attn_kernels kernels = {.struct_size = sizeof kernels,
                                            .attend = attend,
                                            .write_kv = write_kv,
                                            .merge_states = merge_states,
                                            .prepare = prepare,
                                            .release = release,
                                            .schedule_size = schedule_size};

/* What is declared here is all that the core will ask for; attn-check tests exactly that. */
static attn_status probe(const struct attn_host *host, const struct attn_probe_sink *sink,
                         struct attn_error *error)
{
    static const struct attn_head_size_range head_sizes[] = {{{8, 256, 8}, {8, 256, 8}, 0}};
    static const struct attn_range block_sizes[] = {{1, 256, 1}};
    const struct attn_device_info cpu = {.struct_size = sizeof cpu,
                                         .device = {ATTN_DEVICE_CPU, 0},
                                         .name = "CPU",
                                         .arch = "generic",
                                         .isa = ""};
    const struct attn_backend_caps caps = {
        .struct_size = sizeof caps,
        .name = "example",
        .variant = "",
        .version = "0.1.0",
        .vendor = "you",
        .device = {ATTN_DEVICE_CPU, 0},
        .kernels = ATTN_KERNEL_ATTEND | ATTN_KERNEL_WRITE_KV | ATTN_KERNEL_MERGE_STATES,
        .layer_kinds = 1 << ATTN_LAYER_DECODER,
        .phases = 3,
        .dtypes = 1 << ATTN_DTYPE_F32,
        .kv_dtypes = 1 << ATTN_KV_F32,
        .terms = ATTN_TERM_CAUSAL | ATTN_TERM_BIDIRECTIONAL | ATTN_TERM_SLIDING_WINDOW |
                 ATTN_TERM_SYMMETRIC_WINDOW,
        .features = ATTN_FEATURE_PAGED_KV | ATTN_FEATURE_CONTIGUOUS_KV | ATTN_FEATURE_LSE |
                    ATTN_FEATURE_BLOCK_TABLE_ROW | ATTN_FEATURE_MIXED_BATCH,
        .view_forms = ATTN_VIEW_NHD | ATTN_VIEW_HND | ATTN_VIEW_SEPARATE_STRIDES,
        .layouts = 1 << ATTN_KV_LAYOUT_NHD | 1 << ATTN_KV_LAYOUT_HND,
        .k_scale_forms = 1,
        .v_scale_forms = 1,
        .p_scale_forms = 1,
        .output_forms = 1,
        .head_sizes = head_sizes,
        .block_sizes = block_sizes,
        .num_head_sizes = 1,
        .num_block_sizes = 1,
        .preferred_layout = ATTN_KV_LAYOUT_NHD,
        .preferred_block_size = 16,
        .rank = {-1, -1}};
    (void)host;
    (void)error;
    attn_status status = sink->device(sink->user, &cpu, error);
    return status == ATTN_OK ? sink->backend(sink->user, &caps, error) : status;
}

static attn_status create(const struct attn_create_args *args, attn_instance **instance,
                          const struct attn_kernels **table, struct attn_error *error)
{
    (void)error;
    *table = NULL; /* on failure both are */
    *instance = NULL;
    *instance = (attn_instance *)args->host->allocate(args->host->user, sizeof **instance, 16);
    if (*instance == NULL) {
        return ATTN_ERROR_OUT_OF_MEMORY;
    }
    (*instance)->host = args->host;
    *table = &kernels;
    return ATTN_OK;
}

static void destroy(attn_instance *instance)
{
    if (instance != NULL) {
        instance->host->release(instance->host->user, instance, sizeof *instance);
    }
}

static const struct attn_plugin plugin = {.struct_size = sizeof plugin,
                                          .abi_version = ATTN_ABI_VERSION,
                                          .name = "example",
                                          .version = "0.1.0",
                                          .vendor = "you",
                                          .probe = probe,
                                          .create = create,
                                          .destroy = destroy};

attn_status attn_plugin_entry(uint32_t min, uint32_t max, const struct attn_plugin **out,
                              struct attn_error *error)
{
    (void)error;
    *out = ATTN_VERSION_SERVES(min, max) ? &plugin : NULL;
    return *out != NULL ? ATTN_OK : ATTN_ERROR_ABI_VERSION;
}
