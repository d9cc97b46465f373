/* SPDX-License-Identifier: Apache-2.0 */
/* A backend of layers that no shipped backend has, in float32: attends that add up the rows of five
 * caches in two tables. */

#include "cpu_ref_backend.h"

static float *element(const struct attn_tensor *t, int64_t i, int64_t j, int64_t k)
{
    const int64_t last = t->ndim > 2 ? t->shape[2] : 1;
    const int64_t first = t->strides != NULL ? t->strides[0] : t->shape[1] * last;
    const int64_t second = t->strides != NULL ? t->strides[1] : last;
    return (float *)((char *)t->data + t->byte_offset) + i * first + j * second + k;
}

static float *row_of(const struct attn_kv_view *view, int64_t slot, int32_t head)
{
    return (float *)((char *)view->data + slot / view->block_size * view->stride_block +
                     slot % view->block_size * view->stride_slot +
                     head % view->num_heads * view->stride_head);
}

/* Arrays of structs are walked by the size of their writer's elements. */
static const struct attn_layer_cache *cache_of(const struct attn_layer_cache *caches, int32_t bytes,
                                               int32_t i)
{
    return (const struct attn_layer_cache *)((const char *)caches + (int64_t)i * bytes);
}

static const struct attn_batch_table *table_of(const struct attn_batch *batch, int32_t number)
{
    return (const struct attn_batch_table *)((const char *)batch->tables +
                                             (int64_t)(number - 1) * batch->table_stride);
}

static void put(const struct attn_kv_view *view, int64_t slot, const struct attn_tensor *rows,
                int64_t i)
{
    for (int32_t h = 0; h < view->num_heads && slot >= 0; h++) {
        for (int32_t d = 0; d < view->head_size; d++) {
            row_of(view, slot, h)[d] = *element(rows, i, h, d);
        }
    }
}

static attn_status write_kv(const struct attn_write_kv_args *a, struct attn_error *error)
{
    const struct attn_io_caches *io = ext_of(a->next, ATTN_EXT_IO_CACHES);
    for (int64_t i = 0; i < a->num_slots; i++) {
        put(a->k_cache, a->slot_mapping[i], a->k, i);
        put(a->v_cache, a->slot_mapping[i], a->v, i);
    }
    for (int32_t c = 0; io != NULL && c < a->num_caches; c++) {
        const struct attn_layer_cache *cache = cache_of(a->caches, a->cache_stride, c);
        const struct attn_batch_table *table =
            cache->table > 0 ? table_of(a->batch, cache->table) : NULL;
        const int64_t slots = table != NULL ? table->num_slots : a->num_slots;
        for (int64_t i = 0; io->rows[c] != NULL && i < slots; i++) {
            int64_t slot = table != NULL ? table->slot_mapping[i] : a->slot_mapping[i];
            put(cache->view, table == NULL && slot > 0 ? slot / cache->tokens_per_row : slot,
                io->rows[c], i);
        }
    }
    return ATTN_OK;
}

static int64_t slot_of(const int32_t *blocks, int32_t block_size, int64_t row)
{
    return (int64_t)blocks[row / block_size] * block_size + row % block_size;
}

/* Request r's row of a token at `position` in the batch's own table (whole rows alone), the
 * last row in another. NULL: there is no such row. */
static const float *seen(const struct attn_attend_args *a, const struct attn_layer_cache *cache,
                         int32_t r, int64_t position, int32_t head)
{
    const struct attn_batch *b = a->batch;
    const struct attn_kv_view *view = cache->view;
    if (cache->table == 0) {
        const int32_t *row =
            b->block_table +
            (b->block_table_row != NULL ? b->block_table_row[r] : r) * b->block_table_stride;
        return (position + 1) % cache->tokens_per_row == 0
                   ? row_of(view, slot_of(row, view->block_size, position / cache->tokens_per_row),
                            head)
                   : NULL;
    }
    const struct attn_batch_table *t = table_of(b, cache->table);
    const int32_t *row = t->block_table + (t->block_table_row != NULL ? t->block_table_row[r] : r) *
                                              t->block_table_stride;
    return t->seq_lens[r] > 0
               ? row_of(view, slot_of(row, view->block_size, t->seq_lens[r] - 1), head)
               : NULL;
}

static attn_status attend(const struct attn_attend_args *a, struct attn_error *error)
{
    const struct attn_batch *b = a->batch;
    const struct attn_layer_cache own[2] = {{ATTN_CACHE_K, 0, 0, 1, a->k_cache},
                                            {ATTN_CACHE_V, 0, 0, 1, a->v_cache}};
    for (int32_t r = 0; r < b->num_reqs; r++) {
        for (int32_t t = b->query_start_loc[r]; t < b->query_start_loc[r + 1]; t++) {
            int64_t position = b->seq_lens[r] - b->query_start_loc[r + 1] + t;
            for (int32_t i = 0; i < a->layer->num_q_heads * a->layer->head_size_v; i++) {
                int32_t h = i / a->layer->head_size_v, d = i % a->layer->head_size_v;
                float sum = 0;
                for (int32_t c = 0; c < 2 + a->num_caches; c++) {
                    const struct attn_layer_cache *cache =
                        c < 2 ? &own[c] : cache_of(a->caches, a->cache_stride, c - 2);
                    const float *row = seen(a, cache, r, position, h);
                    sum += row != NULL ? row[d % cache->view->head_size] : 0;
                }
                *element(a->out, t, h, d) = sum;
            }
        }
    }
    return ATTN_OK;
}

static void change_kernels(struct attn_kernels *kernels)
{
    *kernels = SIZED(attn_kernels, .attend = attend, .write_kv = write_kv);
}

static attn_status declare_backends(const struct attn_probe_sink *sink,
                                    const struct attn_backend_caps *cpu_ref,
                                    struct attn_error *error)
{
    static const struct attn_range blocks = {16, 64, 16};
    struct attn_backend_caps caps = *cpu_ref;
    caps.name = "many_caches";
    caps.kernels = ATTN_KERNEL_ATTEND | ATTN_KERNEL_WRITE_KV;
    caps.layer_kinds = 1u << ATTN_LAYER_DECODER;
    caps.dtypes = 1 << ATTN_DTYPE_F32;
    caps.kv_dtypes = 1 << ATTN_KV_F32;
    caps.decode_write_kv_dtypes = 0;
    caps.features = ATTN_FEATURE_PAGED_KV;
    caps.block_sizes = &blocks;
    caps.num_block_sizes = 1;
    caps.rank[0] = caps.rank[1] = -1;
    caps.cache_roles =
        1u << ATTN_CACHE_INDEX_K | 1u << ATTN_CACHE_SCALE | 1u << ATTN_CACHE_COMPRESSED;
    caps.max_tables = 1;
    static const struct attn_range narrow_blocks = {4, 8, 4};
    struct attn_backend_caps narrow = caps;
    narrow.name = "many_caches_narrow";
    narrow.block_sizes = &narrow_blocks;
    narrow.preferred_block_size = 4;
    attn_status status = sink->backend(sink->user, &caps, error);
    return status == ATTN_OK ? sink->backend(sink->user, &narrow, error) : status;
}

CPU_REF_BACKEND("many_caches", create, NULL)
