/* SPDX-License-Identifier: Apache-2.0 */
/* write_kv, rope_write_kv, and the copies of blocks and bytes. */
#include "common/index_write.h"
#include "cpu_simd/internal.h"

struct write_loop {
    const struct attn_write_kv_args *args;
    const struct attn_io_rope *rope;
    int32_t activation;
    struct row_form keys;
    struct row_form values;
};

static void place_slot(struct row_place *place, int64_t slot)
{
    place->block = slot / place->view->block_size;
    place->slot = slot - place->block * place->view->block_size;
}

static void prefetch_bytes(const void *memory, int64_t bytes)
{
    for (int64_t at = 0; at < bytes; at += 64) {
        __builtin_prefetch((const char *)memory + at);
    }
}

/* Prefetches a row of the next token and its destination. Encoding a row takes longer than reading
 * it, and without this the next row is requested only after the encoding. */
static void prefetch_next_row(const struct row_place *at, const void *source, int64_t source_bytes)
{
    const int32_t size = at->view->head_size;
    prefetch_bytes(source, source_bytes);
    prefetch_bytes(view_row(at->view, at->block, at->slot, at->head),
                   code_row_bytes(at->form, size));
    if (at->form->row_scale || at->form->nibbles) {
        prefetch_bytes(view_scale(at->view, at->block, at->slot, at->head), sizeof(float));
    }
}

static void write_rows(void *argument, int64_t begin, int64_t end, int32_t worker)
{
    const struct write_loop *loop = argument;
    const struct attn_write_kv_args *args = loop->args;
    struct row_place k = {.variant = args->instance->variant,
                          .layer = args->layer,
                          .params = args->params,
                          .view = args->k_cache,
                          .form = &loop->keys};
    struct row_place v = k, next_k, next_v;
    v.view = args->v_cache;
    v.form = &loop->values;
    v.is_v = true;
    next_k = k;
    next_v = v;
    const int64_t bytes = element_bytes[loop->activation];
    for (int64_t t = begin; t < end; t++) {
        int64_t slot = args->slot_mapping[t];
        if (slot < 0) {
            continue;
        }
        const bool prefetch = t + 1 < end && args->slot_mapping[t + 1] >= 0;
        place_slot(&k, slot);
        place_slot(&v, slot);
        if (prefetch) {
            place_slot(&next_k, args->slot_mapping[t + 1]);
            place_slot(&next_v, args->slot_mapping[t + 1]);
        }
        for (int64_t h = 0; h < args->layer->num_kv_heads; h++) {
            k.head = v.head = next_k.head = next_v.head = h;
            if (prefetch) {
                prefetch_next_row(&next_k, tensor_row(args->k, t + 1, h),
                                  k.view->head_size * bytes);
                prefetch_next_row(&next_v, tensor_row(args->v, t + 1, h),
                                  v.view->head_size * bytes);
            }
            row_write(&k, tensor_row(args->k, t, h), loop->activation);
            row_write(&v, tensor_row(args->v, t, h), loop->activation);
        }
    }
}

/* Index keys, each written with the last token of its row; those that are normed, rotated or
 * transformed, in float64 first. */
static void write_index_rows(void *argument, int64_t begin, int64_t end, int32_t worker)
{
    const struct write_loop *loop = argument;
    const struct attn_write_kv_args *args = loop->args;
    const struct attn_index_write *write = ext_of(args->layer->next, ATTN_EXT_DRAFT_INDEX_WRITE);
    const int32_t tokens = indexer_of(args->layer)->tokens_per_row;
    double row[ROPE_MAX_SIZE];
    float numbers[ROPE_MAX_SIZE];
    struct row_place k = {.variant = args->instance->variant,
                          .layer = args->layer,
                          .params = args->params,
                          .view = args->k_cache,
                          .form = &loop->keys};
    for (int64_t t = begin; t < end; t++) {
        const int64_t slot = args->slot_mapping[t];
        if (slot >= 0 && slot % tokens == tokens - 1) {
            place_slot(&k, slot / tokens);
            if (write == NULL) {
                row_write(&k, tensor_row(args->k, t, 0), loop->activation);
                continue;
            }
            index_write_load(args, write, t, row);
            for (int32_t d = 0; d < k.view->head_size; d++) {
                numbers[d] = (float)row[d];
            }
            row_write(&k, (const char *)numbers, ELEMENT_F32);
        }
    }
}

static struct write_loop write_of(const struct attn_write_kv_args *args)
{
    const int32_t activation = element_of_dtype(args->layer->dtype);
    return (struct write_loop){.args = args,
                               .activation = activation,
                               .keys = row_form_of(args->layer->kv_dtype, activation, false),
                               .values =
                                   row_form_of(layer_kv_dtype(args->layer, true), activation, true),
                               .rope = ext_of(args->next, ATTN_EXT_IO_ROPE)};
}

attn_status simd_write_kv(const struct attn_write_kv_args *args, struct attn_error *error)
{
    if (layer_is_latent(args->layer)) {
        return simd_write_latent(args);
    }
    const struct write_loop loop = write_of(args);
    return run_parallel(args->instance, args->num_slots, 8,
                        indexer_of(args->layer) != NULL ? write_index_rows : write_rows, &loop);
}

static void norm_row(const struct attn_io_rope *rope, const struct attn_tensor *weight,
                     const struct write_loop *loop, float *row, int32_t size)
{
    float weights[MAX_HEAD_SIZE];
    double sum = 0;
    loop->args->instance->variant->f32->unpack[element_of_any(weight)](weights, tensor_data(weight),
                                                                       size);
    for (int32_t d = 0; d < size; d++) {
        sum += (double)row[d] * row[d];
    }
    float factor = (float)(1.0 / sqrt(sum / size + rope->norm_eps));
    for (int32_t d = 0; d < size; d++) {
        row[d] *= factor * weights[d];
    }
}

/* Pairs (d, d + half) in the NeoX form, (2d, 2d + 1) in GPT-J's. */
static void rope_row(const struct write_loop *loop, int64_t position, float *row, int32_t size)
{
    const struct attn_io_rope *rope = loop->rope;
    const struct attn_tensor *table = rope->cos_sin;
    float angles[MAX_HEAD_SIZE];
    int32_t rotary = rope->rotary_dim > 0 ? rope->rotary_dim : size;
    int32_t half = rotary / 2;
    const char *source =
        tensor_data(table) + position * tensor_stride(table, 0) * (table->dtype.bits / 8);
    loop->args->instance->variant->f32->unpack[element_of_any(table)](angles, source, rotary);
    for (int32_t d = 0; d < half; d++) {
        int32_t first = rope->form == ATTN_ROPE_NEOX ? d : 2 * d;
        int32_t second = rope->form == ATTN_ROPE_NEOX ? d + half : 2 * d + 1;
        float x = row[first];
        float y = row[second];
        row[first] = x * angles[d] - y * angles[half + d];
        row[second] = y * angles[d] + x * angles[half + d];
    }
}

/* Norm, where there is a weight, and rope of all heads of token t, in place. */
static void rope_token(const struct write_loop *loop, const struct attn_tensor *tensor,
                       const struct attn_tensor *weight, int64_t t)
{
    const struct variant *variant = loop->args->instance->variant;
    int32_t size = (int32_t)tensor->shape[2];
    float row[MAX_HEAD_SIZE];
    for (int64_t h = 0; h < tensor->shape[1]; h++) {
        void *at = tensor_row(tensor, t, h);
        variant->f32->unpack[loop->activation](row, at, size);
        if (weight != NULL) {
            norm_row(loop->rope, weight, loop, row, size);
        }
        rope_row(loop, loop->rope->positions[t], row, size);
        variant->store[loop->activation](at, row, 1.0f, size);
    }
}

/* k is rotated in place too, so that a step without a cache finds it rotated. */
static void rope_rows(void *argument, int64_t begin, int64_t end, int32_t worker)
{
    const struct write_loop *loop = argument;
    for (int64_t t = begin; t < end; t++) {
        rope_token(loop, loop->args->q, loop->rope->q_norm_weight, t);
        rope_token(loop, loop->args->k, loop->rope->k_norm_weight, t);
    }
    write_rows(argument, begin, end, worker);
}

attn_status simd_rope_write_kv(const struct attn_write_kv_args *args, struct attn_error *error)
{
    const struct write_loop loop = write_of(args);
    return run_parallel(args->instance, args->num_slots, 4, rope_rows, &loop);
}

static void copy_pairs(void *argument, int64_t begin, int64_t end, int32_t worker)
{
    const struct attn_copy_blocks_args *args = argument;
    for (int64_t i = begin; i < end; i++) {
        const struct attn_block_copy *copy =
            (const void *)((const char *)args->copies + i * args->copy_stride);
        for (int64_t p = 0; p < args->num_pairs; p++) { /* in order: a target may be a source */
            memmove((char *)copy->destination + args->pairs[2 * p + 1] * copy->destination_stride,
                    (const char *)copy->source + args->pairs[2 * p] * copy->source_stride,
                    (size_t)copy->bytes);
        }
    }
}

attn_status simd_copy_blocks(const struct attn_copy_blocks_args *args, struct attn_error *error)
{
    return run_parallel(args->instance, args->num_copies, 1, copy_pairs, args);
}

attn_status simd_copy(const struct attn_copy_args *args, struct attn_error *error)
{
    memmove(args->destination, args->source, args->bytes);
    return ATTN_OK;
}

attn_status simd_fill(const struct attn_fill_args *args, struct attn_error *error)
{
    for (int64_t i = 0; i < args->rows; i++) {
        memset((char *)args->destination + (size_t)i * args->stride, args->value, args->row_bytes);
    }
    return ATTN_OK;
}
