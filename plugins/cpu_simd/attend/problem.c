/* SPDX-License-Identifier: Apache-2.0 */
/* Arguments to a problem: shapes, row sources, visible intervals. */
#include "cpu_simd/internal.h"

/* enum element_type of the layer's queries; -1: another type. */
static int32_t query_element(const struct attn_layer_desc *layer)
{
    bool quantized = layer->q_scale_form != ATTN_SCALE_NONE;
    return element_of_dtype(quantized ? layer->q_dtype : layer->dtype);
}

/* A row of these codes is exact in bf16. */
static bool is_short(int32_t coding)
{
    return coding <= CODING_NVFP4 || coding >= CODING_DS_V4;
}

struct layer_shape shape_of_layer(const struct variant *variant,
                                  const struct attn_layer_desc *layer)
{
    struct layer_shape made = {.activation = element_of_dtype(layer->dtype)}, *shape = &made;
    shape->keys = row_form_of(layer->kv_dtype, shape->activation, false);
    shape->values = row_form_of(layer_kv_dtype(layer, true), shape->activation, true);
    shape->num_heads = layer->num_kv_heads;
    shape->group = layer->num_q_heads / layer->num_kv_heads;
    shape->depth = layer->head_size;
    shape->width = layer->head_size_v > 0 ? layer->head_size_v : layer->head_size;
    shape->width_padded = round_up(shape->width, COLUMN_MULTIPLE);
    /* its acc_o and queries stay within L2: 600 KiB */
    int32_t rows = ITEM_ROWS * 128 / max_i32(128, max_i32(shape->depth, shape->width));
    shape->item_rows = max_i32(max_i32(rows, 128), shape->group);
    /* f16 and f32 caches, and codes with steps inside a row, hold more than bf16 can: those are
     * computed in float32, as are probabilities that are to be rounded once */
    bool short_rows = shape->keys.element >= ELEMENT_BF16 &&
                      shape->values.element >= ELEMENT_BF16 && is_short(shape->keys.coding) &&
                      is_short(shape->values.coding);
    shape->any_prefix = layer->batch_invariant >= 2;
    shape->rounds = layer->p_scale_form != ATTN_SCALE_NONE;
    bool short_math =
        shape->activation == ELEMENT_BF16 && short_rows && !shape->rounds && variant->bf16 != NULL;
    shape->kernels = short_math ? variant->bf16 : variant->f32;
    /* a rotated query has more bits than the query had */
    shape->query_parts = short_math && shape->keys.nibbles ? 2 : 1;
    shape->depth_padded = shape->query_parts * round_up(shape->depth, DEPTH_MULTIPLE);
    shape->batch_invariant = layer->batch_invariant != 0;
    shape->sink_len = layer->sink_len;
    const struct attn_index_lists *lists = lists_of(layer);
    if (lists == NULL && layer->kind == ATTN_LAYER_MLA && mla_of(layer) != NULL) {
        shape->topk = mla_of(layer)->topk;
    } else if (lists != NULL) {
        shape->topk = lists->max_entries * lists->granularity;
        shape->entry_shift = __builtin_ctz((unsigned)lists->granularity);
        shape->lists_per_head = lists->groups == ATTN_LISTS_PER_KV_HEAD;
    }
    return made;
}

static void source_of_view(struct row_source *source, const struct attn_kv_view *view,
                           const struct row_form *form, int32_t row_elements)
{
    memset(source, 0, sizeof(*source));
    source->data = view->data;
    source->stride_block = view->stride_block;
    source->stride_slot = view->stride_slot;
    source->stride_head = view->stride_head;
    source->stride_pack = view->stride_pack;
    source->block_size = view->block_size;
    source->pack = view->pack > 0 && view->pack < row_elements ? view->pack : 0;
    source->element = form->element;
    source->row_elements = row_elements;
    source->nibbles = form->nibbles;
    source->head_scale = form->head_scale;
    source->coding = form->coding;
    source->bits = form->bits;
    source->row_scale = form->row_scale;
    source->row_bytes = code_row_bytes(form, row_elements);
    if (form->row_scale || form->coding != CODING_NONE) {
        source->scale = view->scale;
        source->scale_stride_block = view->scale_stride_block;
        source->scale_stride_slot = view->scale_stride_slot;
        source->scale_stride_head = view->scale_stride_head;
    }
}

static void source_of_tensor(struct row_source *source, const struct attn_tensor *tensor,
                             const struct layer_shape *shape, int32_t row_elements)
{
    memset(source, 0, sizeof(*source));
    bool fp8 = element_of_any(tensor) == ELEMENT_E4M3;
    int32_t element = fp8 ? ELEMENT_E4M3 : shape->activation;
    int64_t bytes = element_bytes[element];
    source->data = tensor_data(tensor);
    source->stride_slot = tensor_stride(tensor, 0) * bytes;
    source->stride_head = tensor_stride(tensor, 1) * bytes;
    source->element = element;
    source->head_scale = fp8;
    source->row_elements = row_elements;
    source->row_bytes = row_elements * (int32_t)bytes;
}

static void choose_decode(struct row_source *source, const struct tile_kernels *kernels)
{
    const struct decode_kernels *codes = source->coding != CODING_NONE     ? NULL
                                         : source->nibbles                 ? kernels->decode_int4
                                         : source->element == ELEMENT_INT8 ? kernels->decode_int8
                                         : source->element >= ELEMENT_E4M3 ? kernels->decode_fp8
                                                                           : NULL;
    source->decode_codes = codes != NULL && source->pack == 0 && source->row_elements % 64 == 0 &&
                           source->row_elements <= 512;
    source->decode = source->decode_codes ? codes : kernels->decode;
}

/* MLA's top k, or the run's lists. */
static struct key_lists find_lists(const struct attn_attend_args *args,
                                   const struct latent_parts *latent)
{
    const struct attn_io_index_lists *io = ext_of(args->next, ATTN_EXT_DRAFT_IO_INDEX_LISTS);
    if (io == NULL) {
        return (struct key_lists){.entries = latent != NULL ? latent->topk_indices : NULL,
                                  .token_stride = latent != NULL ? latent->topk_stride : 0};
    }
    return (struct key_lists){io->indices, io->lengths, io->token_stride, io->group_stride,
                              io->length_stride};
}

void problem_init(struct attend_problem *problem, const struct attn_attend_args *args,
                  const struct latent_parts *latent, bool tensors)
{
    memset(problem, 0, sizeof(*problem));
    const struct attn_layer_desc *layer = args->layer;
    const struct attn_batch *batch = args->batch;
    problem->instance = args->instance;
    problem->layer = layer;
    problem->params = args->params;
    problem->latent = latent;
    problem->lists = find_lists(args, latent);
    problem->batch = batch;
    problem->paged = args->k_cache != NULL;
    problem->causal =
        (batch->causal != ATTN_CAUSAL_DEFAULT ? batch->causal : layer->causal) == ATTN_CAUSAL_YES;
    problem->q_element = query_element(layer);
    problem->causal_per_request = layer->causal_per_request != 0 && batch->causal_per_request;
    struct layer_shape *shape = &problem->shape;
    *shape = args->prepared->shape;
    problem->terms = layer->soft_cap > 0.0f || layer->alibi != ATTN_ALIBI_NONE ||
                     (problem->paged && shape->keys.row_scale) ||
                     (batch->tree != NULL && layer->tree_mask != ATTN_TREE_NONE);
    if (problem->paged) {
        source_of_view(&problem->keys, args->k_cache, &shape->keys, shape->depth);
        source_of_view(&problem->values, args->v_cache, &shape->values, shape->width);
        problem->values.is_v = true;
    } else if (tensors) {
        source_of_tensor(&problem->keys, args->k, shape, shape->depth);
        source_of_tensor(&problem->values, args->v, shape, shape->width);
    }
    int32_t native = shape->kernels->element;
    problem->keys.copies = problem->paged ? shape->query_parts : 1;
    problem->values.copies = 1;
    problem->keys.stage = problem->keys.element != native || problem->keys.pack != 0 ||
                          shape->depth != shape->depth_padded;
    problem->values.stage = problem->values.element != native || problem->values.pack != 0 ||
                            shape->width != shape->width_padded;
    choose_decode(&problem->keys, shape->kernels);
    choose_decode(&problem->values, shape->kernels);
}

/* The layer's scale times that of quantized queries. */
float query_factor(const struct attend_problem *problem, int32_t head)
{
    const struct attn_layer_params *params = problem->params;
    return problem->layer->scale * (float)scale_of_head(params->q_scale, params->q_scale_host,
                                                        problem->layer->q_scale_form, head);
}

/* That times the keys' scale. */
float key_factor(const struct attend_problem *problem, int32_t head)
{
    const struct attn_layer_desc *layer = problem->layer;
    const struct attn_layer_params *params = problem->params;
    float scale = query_factor(problem, head);
    if (problem->keys.head_scale) {
        scale *= (float)scale_of_head(params->k_scale, params->k_scale_host,
                                      scale_form_of(layer, false), head);
    }
    return scale;
}

bool rows_wanted(const struct attend_problem *problem, int32_t request, int32_t token,
                 int32_t count)
{
    const struct attn_batch *batch = problem->batch;
    int32_t first = batch->query_start_loc[request] + token;
    if (!problem->layer->fast_prefill || batch->logits_indices == NULL) {
        return true;
    }
    for (int32_t i = 0; i < batch->num_logits_indices; i++) {
        if (batch->logits_indices[i] >= first && batch->logits_indices[i] - first < count) {
            return true;
        }
    }
    return false;
}

int32_t request_queries(const struct attend_problem *problem, int32_t request)
{
    const int32_t *start = problem->batch->query_start_loc;
    return start[request + 1] - start[request];
}

int32_t request_keys(const struct attend_problem *problem, int32_t request)
{
    const struct attn_batch *batch = problem->batch;
    if (problem->paged) {
        return batch->seq_lens[request];
    }
    const int32_t *start = batch->key_start_loc ? batch->key_start_loc : batch->query_start_loc;
    return start[request + 1] - start[request];
}

/* Attention is bidirectional within a span of a request. The span contains p, so its union with p's
 * own interval is one interval. */
static void widen_by_spans(const struct attend_problem *problem, int32_t request, int32_t position,
                           int32_t num_keys, struct interval *seen)
{
    const struct attn_batch *batch = problem->batch;
    int32_t window = problem->layer->prefix_lm_window;
    for (int32_t i = batch->span_start_loc[request]; i < batch->span_start_loc[request + 1]; i++) {
        int32_t first = batch->spans[2 * i];
        int32_t last = batch->spans[2 * i + 1];
        if (position < first || position > last) {
            continue;
        }
        if (window > 0) {
            first = max_i32(first, position - window + 1);
        }
        seen->low = min_i32(seen->low, max_i32(first, 0));
        seen->high = max_i32(seen->high, min_i32(last, num_keys - 1) + 1);
    }
}

/* The keys of its request that a token sees, whether or not they are in a sparse list. */
static struct interval visible_keys(const struct attend_problem *problem, int32_t request,
                                    int32_t token)
{
    const struct attn_layer_desc *layer = problem->layer;
    const struct attn_batch *batch = problem->batch;
    int32_t num_keys = request_keys(problem, request);
    int32_t position = num_keys - request_queries(problem, request) + token;
    bool causal =
        problem->causal_per_request ? batch->causal_per_request[request] != 0 : problem->causal;
    int64_t low = 0;
    int64_t high = num_keys;
    if (causal) {
        high = min_i32(num_keys, position + 1);
    }
    if (layer->has_window != 0) {
        if (layer->window_left >= 0) {
            low = (int64_t)position - layer->window_left;
        }
        if (layer->window_right >= 0 && (int64_t)position + layer->window_right + 1 < high) {
            high = (int64_t)position + layer->window_right + 1;
        }
    }
    if (layer->chunk_size > 0 && position >= 0) {
        int64_t first =
            ((int64_t)position / layer->chunk_size - layer->chunk_lookback) * layer->chunk_size;
        low = first > low ? first : low;
    }
    struct interval seen = {(int32_t)(low < 0 ? 0 : low), (int32_t)(high < 0 ? 0 : high)};
    if (layer->prefix_lm != 0 && batch->spans != NULL && batch->span_start_loc != NULL) {
        widen_by_spans(problem, request, position, num_keys, &seen);
    }
    seen.high = max_i32(seen.high, seen.low);
    return seen;
}

/* A sparse query's keys are the entries of its list, visible or not. */
struct interval row_interval(const struct attend_problem *problem, int32_t request, int32_t token)
{
    if (problem->shape.topk > 0) {
        return (struct interval){0, request_keys(problem, request) > 0 ? problem->shape.topk : 0};
    }
    return visible_keys(problem, request, token);
}

void find_rows(const struct attend_problem *problem, const struct row_source *source,
               int32_t request, int32_t head, int32_t first, int32_t n, const void **rows,
               const void **scale_rows)
{
    const struct attn_batch *batch = problem->batch;
    const char *base = source->data + head * source->stride_head;
    if (!problem->paged) {
        const int32_t *start = batch->key_start_loc ? batch->key_start_loc : batch->query_start_loc;
        base += (start[request] + (int64_t)first) * source->stride_slot;
        for (int32_t i = 0; i < n; i++) {
            rows[i] = base + i * source->stride_slot;
        }
        return;
    }
    int32_t row = batch->block_table_row ? batch->block_table_row[request] : request;
    const int32_t *table = batch->block_table + row * batch->block_table_stride;
    int32_t size = source->block_size;
    int32_t index = first / size;
    int32_t slot = first % size;
    for (int32_t i = 0; i < n; index++, slot = 0) {
        int64_t block = table[index];
        const char *at = base + block * source->stride_block;
        const char *scale = source->scale == NULL
                                ? NULL
                                : source->scale + block * source->scale_stride_block +
                                      head * source->scale_stride_head;
        for (; i < n && slot < size; i++, slot++) {
            rows[i] = at + slot * source->stride_slot;
            if (scale != NULL && scale_rows != NULL) {
                scale_rows[i] = scale + slot * source->scale_stride_slot;
            }
        }
    }
}

void load_scales(const void *const *scale_rows, int64_t offset, int32_t n, float *scales)
{
    for (int32_t i = 0; i < n; i++) {
        memcpy(&scales[i], (const char *)scale_rows[i] + offset, sizeof(float));
    }
}

int32_t find_listed_rows(const struct attend_problem *problem, const struct row_source *source,
                         const struct work_item *item, int32_t first, int32_t n, const void **rows,
                         const void **scale_rows)
{
    const struct attn_batch *batch = problem->batch;
    const struct key_lists *lists = &problem->lists;
    const int32_t shift = problem->shape.entry_shift, mask = (1 << shift) - 1;
    struct interval seen = visible_keys(problem, item->request, item->token);
    int64_t query = batch->query_start_loc[item->request] + (int64_t)item->token;
    int64_t head = problem->shape.lists_per_head ? item->head : 0;
    const int32_t *list = lists->entries + query * lists->token_stride + head * lists->head_stride;
    int64_t row = batch->block_table_row ? batch->block_table_row[item->request] : item->request;
    const int32_t *table = batch->block_table + row * batch->block_table_stride;
    const char *data = source->data + item->head * source->stride_head;
    int32_t count = 0, end = first + n;
    if (lists->lengths != NULL) {
        end = min_i32(end, lists->lengths[query * lists->length_stride + head] << shift);
    }
    for (int32_t i = first; i < end; i++) {
        int64_t j = (int64_t)list[i >> shift] * (mask + 1) + (i & mask);
        if (j < seen.low || j >= seen.high) {
            continue;
        }
        int64_t block = table[j / source->block_size], slot = j % source->block_size;
        if (source->scale != NULL && scale_rows != NULL) {
            scale_rows[count] = source->scale + block * source->scale_stride_block +
                                slot * source->scale_stride_slot +
                                item->head * source->scale_stride_head;
        }
        rows[count++] = data + block * source->stride_block + slot * source->stride_slot;
    }
    return count;
}

void apply_score_terms(const struct attend_problem *problem, const struct work_item *item,
                       int32_t head, int32_t first_row, int32_t rows, int32_t first_key,
                       float scale, const float *key_scale, float *scores, int32_t n)
{
    const struct attn_layer_desc *layer = problem->layer;
    const int32_t group = problem->shape.group;
    const int32_t position = request_keys(problem, item->request) -
                             request_queries(problem, item->request) + item->token;
    struct score_terms terms = {
        .scale = scale, .soft_cap = layer->soft_cap, .key_scale = key_scale, .alibi = layer->alibi};
    for (int32_t m = first_row; m < first_row + rows; m++, scores += SCORE_STRIDE) {
        const int32_t token = m / group;
        terms.distance = (float)(position + token - first_key);
        if (layer->alibi != ATTN_ALIBI_NONE) {
            terms.slope = problem->params->alibi_slopes[head * group + m % group];
        }
        problem->instance->variant->terms(scores, n, &terms);
    }
}

void rescale_o(const struct attend_problem *problem, float *acc_o, const float *scores_scale,
               int32_t rows)
{
    const int32_t width = problem->shape.width_padded;
    for (int32_t r = 0; r < rows; r++) {
        if (scores_scale[r] != 1.0f) {
            problem->instance->variant->scale_row(acc_o + (int64_t)r * width, scores_scale[r],
                                                  width);
        }
    }
}
