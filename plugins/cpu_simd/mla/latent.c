/* SPDX-License-Identifier: Apache-2.0 */
/* Rows of a cache in and out one at a time: the latent rows that write_kv gets from an MLA layer,
 * and gather_kv. */
#include "cpu_simd/internal.h"

#define MAX_ROW 1024

/* The new rows of an MLA layer: one tensor, or latent and rope apart. */
struct latent_write {
    const struct attn_write_kv_args *args;
    const struct attn_tensor *parts[2];
    int32_t sizes[2];
    int32_t activation;
    struct row_form form;
    float scale;
};

/* Elements d .. d+n-1 of a row, of the cache's type. */
static void store_elements(const struct latent_write *loop, char *out, const float *row, int32_t n)
{
    const struct variant *variant = loop->args->instance->variant;
    if (loop->form.element <= ELEMENT_BF16) {
        variant->store[loop->form.element](out, row, 1.0f, n);
        return;
    }
    variant->codes->encode[loop->form.element](out, row, loop->scale, NULL, n);
}

static void copy_latent_row(const struct latent_write *loop, int64_t t, char *memory)
{
    for (int32_t i = 0; i < 2 && loop->sizes[i] > 0; i++) {
        size_t bytes = (size_t)loop->sizes[i] * (size_t)element_bytes[loop->form.element];
        memcpy(memory, tensor_row(loop->parts[i], t, 0), bytes);
        memory += bytes;
    }
}

static void write_latent_rows(void *argument, int64_t begin, int64_t end, int32_t worker)
{
    const struct latent_write *loop = argument;
    const struct attn_write_kv_args *args = loop->args;
    const struct attn_kv_view *view = args->k_cache;
    const struct variant *variant = args->instance->variant;
    int32_t size = view->head_size;
    int32_t pack = view->pack > 0 && view->pack < size ? view->pack : size;
    float row[MAX_ROW];
    for (int64_t t = begin; t < end; t++) {
        int64_t slot = args->slot_mapping[t];
        if (slot < 0) {
            continue;
        }
        char *memory = view_row(view, slot / view->block_size, slot % view->block_size, 0);
        if (loop->form.element == loop->activation && pack == size) {
            copy_latent_row(loop, t, memory);
            continue;
        }
        for (int32_t i = 0, d = 0; i < 2; d += loop->sizes[i], i++) {
            if (loop->sizes[i] > 0) {
                variant->f32->unpack[loop->activation](row + d, tensor_row(loop->parts[i], t, 0),
                                                       loop->sizes[i]);
            }
        }
        if (loop->form.coding != CODING_NONE) {
            const struct row_place at = {.variant = variant,
                                         .view = view,
                                         .form = &loop->form,
                                         .block = slot / view->block_size,
                                         .slot = slot % view->block_size};
            coded_row_write(&at, row);
            continue;
        }
        for (int32_t d = 0; d < size; d += pack, memory += view->stride_pack) {
            store_elements(loop, memory, row + d, min_i32(pack, size - d));
        }
    }
}

attn_status simd_write_latent(const struct attn_write_kv_args *args)
{
    const int32_t activation = element_of_dtype(args->layer->dtype);
    const struct attn_mla_desc *mla = mla_of(args->layer);
    const struct attn_io_mla *io = ext_of(args->next, ATTN_EXT_IO_MLA);
    struct latent_write loop = {.args = args,
                                .parts = {args->k, NULL},
                                .sizes = {args->layer->head_size, 0},
                                .activation = activation,
                                .form = row_form_of(args->layer->kv_dtype, activation, false),
                                .scale = (float)scale_of_head(args->params->k_scale,
                                                              args->params->k_scale_host,
                                                              args->layer->k_scale_form, 0)};
    if (args->k == NULL) {
        loop.parts[0] = io->kv_c;
        loop.parts[1] = io->k_pe;
        loop.sizes[0] = mla->kv_lora_rank;
        loop.sizes[1] = mla->qk_rope_head_dim;
    }
    return run_parallel(args->instance, args->num_slots, 8, write_latent_rows, &loop);
}

struct gather_loop {
    const struct attn_gather_kv_args *args;
    struct row_form form;
    int32_t out_element;
};

static void gather_row(const struct gather_loop *loop, int64_t block, int64_t slot, int64_t head,
                       char *out)
{
    const struct attn_gather_kv_args *args = loop->args;
    const struct variant *variant = args->instance->variant;
    struct row_place at = {.variant = variant,
                           .layer = args->layer,
                           .params = args->params,
                           .view = args->cache,
                           .form = &loop->form,
                           .block = block,
                           .slot = slot,
                           .head = head};
    row_read(&at, out, loop->out_element);
}

/* Items are rows of out; out_start_loc says whose they are. */
static void gather_rows(void *argument, int64_t begin, int64_t end, int32_t worker)
{
    const struct gather_loop *loop = argument;
    const struct attn_gather_kv_args *args = loop->args;
    const struct attn_batch *batch = args->batch;
    int64_t size = args->cache->block_size;
    int32_t r = 0;
    for (int64_t i = begin + args->out_start_loc[0]; i < end + args->out_start_loc[0]; i++) {
        while (i >= args->out_start_loc[r + 1]) {
            r++;
        }
        int64_t table_row = batch->block_table_row != NULL ? batch->block_table_row[r] : r;
        const int32_t *table = batch->block_table + table_row * batch->block_table_stride;
        int64_t first = args->first_key != NULL ? args->first_key[r] : 0;
        int64_t j = first + i - args->out_start_loc[r];
        for (int64_t h = 0; h < args->cache->num_heads; h++) {
            gather_row(loop, table[j / size], j % size, h, tensor_row(args->out, i, h));
        }
    }
}

attn_status simd_gather_kv(const struct attn_gather_kv_args *args, struct attn_error *error)
{
    const int32_t activation = element_of_dtype(args->layer->dtype);
    const struct gather_loop loop = {.args = args,
                                     .form = row_form_of(args->layer->kv_dtype, activation, false),
                                     .out_element = activation};
    const int64_t rows =
        (int64_t)args->out_start_loc[args->batch->num_reqs] - args->out_start_loc[0];
    return run_parallel(args->instance, rows, 16, gather_rows, &loop);
}
