/* SPDX-License-Identifier: Apache-2.0 */
#include "latent.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "formats.h"

#define NO_BLOCK 0x7ffffff0
#define COUNT(array) ((int32_t)(sizeof(array) / sizeof *(array)))

static int32_t table_row(const struct latent *p, int32_t r)
{
    return p->c->table_rows ? p->table_row[r] : r;
}

int64_t slot_of(const struct latent *p, int32_t r, int32_t j)
{
    int32_t b = p->c->block_size;
    return (int64_t)p->table[table_row(p, r) * p->stride + j / b] * b + j % b;
}

static void place(struct latent *p)
{
    const struct mla_case *c = p->c;
    int32_t blocks = 0, used = 0;
    p->query_start[0] = c->first_row;
    for (int32_t r = 0; r < c->num_reqs; r++) {
        int32_t needed = (c->seq_lens[r] + c->block_size - 1) / c->block_size;
        p->query_start[r + 1] = p->query_start[r] + c->query_lens[r];
        p->key_start[r + 1] = p->key_start[r] + c->seq_lens[r];
        p->stride = needed + 2 > p->stride ? needed + 2 : p->stride;
        p->table_row[r] = (r * 5 + 3) % 11;
        blocks += needed;
    }
    p->num_rows = p->query_start[c->num_reqs] + c->padding;
    p->num_keys = p->key_start[c->num_reqs];
    p->num_blocks = blocks + 2;
    int32_t *order = filled_memory(p->num_blocks, sizeof *order, 0);
    random_permutation(order, (int32_t)p->num_blocks);
    p->table = filled_memory(11 * p->stride, sizeof *p->table, 0);
    for (int32_t i = 0; i < 11 * p->stride; i++) {
        p->table[i] = NO_BLOCK;
    }
    for (int32_t r = 0; r < c->num_reqs; r++) {
        for (int32_t b = 0; b * c->block_size < c->seq_lens[r]; b++) {
            p->table[table_row(p, r) * p->stride + b] = order[used++];
        }
    }
    free(order);
}

/* What a slot holds of a row, and what it reads as. */
static void encode_row(const struct latent *p, const double *row, uint8_t *memory, double *value)
{
    static const int32_t plain[] = {-1,
                                    ATTN_DTYPE_F16,
                                    ATTN_DTYPE_BF16,
                                    ATTN_DTYPE_F32,
                                    ATTN_DTYPE_FP8_E4M3,
                                    ATTN_DTYPE_FP8_E5M2};
    if (p->kv_dtype != ATTN_KV_FP8_DS_MLA) {
        int32_t number = plain[p->kv_dtype];
        double scale = p->c->k_scale != 0 ? p->c->k_scale : 1;
        for (int32_t d = 0; d < p->size; d++) {
            format_store(memory, d, number, row[d] / scale);
            value[d] = format_load(memory, d, number) * scale;
        }
        return;
    }
    for (int32_t tile = 0; tile < 4; tile++) {
        double amax = 0;
        for (int32_t d = 0; d < 128; d++) {
            amax = fmax(amax, fabs(row[tile * 128 + d]));
        }
        float scale = (float)fmax(amax / 448, FLT_MIN);
        memcpy(memory + 512 + 4 * tile, &scale, 4);
        for (int32_t d = tile * 128; d < (tile + 1) * 128; d++) {
            format_store(memory, d, ATTN_DTYPE_FP8_E4M3, row[d] / scale);
            value[d] = format_load(memory, d, ATTN_DTYPE_FP8_E4M3) * scale;
        }
    }
    for (int32_t d = 0; d < 64; d++) {
        format_store(memory + 528, d, ATTN_DTYPE_BF16, row[512 + d]);
        value[512 + d] = format_load(memory + 528, d, ATTN_DTYPE_BF16);
    }
}

static void draw_keys(struct latent *p)
{
    const struct mla_case *c = p->c;
    p->given = filled_memory((int64_t)p->num_keys * p->size, sizeof(double), 0);
    p->keys = filled_memory((int64_t)p->num_keys * p->size, sizeof(double), 0);
    p->k_memory = filled_memory((int64_t)p->num_keys * p->size, 4, POISON);
    p->k_pe_memory = filled_memory((int64_t)p->num_keys * (p->c->rope + 1), 4, POISON);
    p->slots = filled_memory(p->num_keys, sizeof *p->slots, 0);
    p->cache_bytes = p->num_blocks * c->block_size * p->row_bytes;
    p->cache = filled_memory(p->cache_bytes, 1, POISON);
    p->expected = filled_memory(p->cache_bytes, 1, POISON);
    for (int32_t r = 0; r < c->num_reqs; r++) {
        for (int32_t j = 0; j < c->seq_lens[r]; j++) {
            int32_t at = p->key_start[r] + j;
            double *row = p->given + (int64_t)at * p->size;
            for (int32_t d = 0; d < p->size; d++) {
                double x = d % 200 == 7 ? 30 * random_normal() : random_normal();
                x = c->nan_key && j == c->seq_lens[r] - 1 && d == 1 ? NAN : x;
                row[d] = format_round(c->dtype, x);
                bool rope = !c->joined && d >= c->rank;
                format_store(rope ? p->k_pe_memory : p->k_memory,
                             rope        ? (int64_t)at * c->rope + d - c->rank
                             : c->joined ? (int64_t)at * p->size + d
                                         : (int64_t)at * c->rank + d,
                             c->dtype, row[d]);
            }
            p->slots[at] = slot_of(p, r, j);
            encode_row(p, row, p->expected + p->slots[at] * p->row_bytes,
                       p->keys + (int64_t)at * p->size);
        }
    }
}

bool sees(const struct mla_case *c, int32_t r, int32_t i, int32_t j)
{
    int32_t position = c->seq_lens[r] - c->query_lens[r] + i;
    return j >= 0 && j < c->seq_lens[r] && (c->not_causal || j <= position) &&
           (c->window == 0 || position - j < c->window);
}

int32_t *topk_of(const struct latent *p, int32_t r, int32_t i)
{
    return p->topk + (int64_t)(p->query_start[r] + i) * (p->c->topk + 3);
}

/* Lists with gaps, positions that are out of range and, where there are few keys, hardly any. */
static void draw_topk(struct latent *p)
{
    const struct mla_case *c = p->c;
    p->topk = filled_memory((int64_t)p->num_rows * (c->topk + 3), sizeof *p->topk, 0x7f);
    for (int32_t r = 0; r < c->num_reqs; r++) {
        for (int32_t i = 0; i < c->query_lens[r] && c->topk > 0; i++) {
            int32_t length = c->seq_lens[r], *order = filled_memory(length + 1, sizeof *order, 0);
            random_permutation(order, length);
            for (int32_t n = 0; n < c->topk; n++) {
                static const int32_t wrong[] = {-1, 1 << 30, INT32_MIN};
                int32_t *index = topk_of(p, r, i) + n;
                *index = n % 3 == 2 || n >= length ? wrong[n / 3 % 3] : order[n];
                *index = n == 1 && c->topk > 5 ? length : *index; /* one past the end */
            }
            free(order);
        }
    }
}

/* A query looks for one key that it sees, if any, with noise whose logits deviate by 4. */
static void draw_queries(struct latent *p)
{
    const struct mla_case *c = p->c;
    int64_t row = (int64_t)c->heads * p->size;
    p->q = filled_memory(p->num_rows * row, sizeof(double), 0);
    p->q_memory = filled_memory(p->num_rows * row, 4, POISON);
    p->q_pe_memory = filled_memory((int64_t)p->num_rows * c->heads * (c->rope + 1), 4, POISON);
    p->q_dtype = c->fp8_query ? ATTN_DTYPE_FP8_E4M3 : c->dtype;
    p->q_scale = c->fp8_query ? 0.05f : 1;
    for (int32_t r = 0; r < c->num_reqs; r++) {
        for (int32_t i = 0; i < c->query_lens[r] * c->heads; i++) {
            int32_t token = i / c->heads, h = i % c->heads, j = -1;
            for (int32_t n = 0; n < c->seq_lens[r] && j < 0; n++) {
                int32_t candidate = random_below(c->seq_lens[r]);
                j = sees(c, r, token, candidate) ? candidate : -1;
            }
            double *q = p->q + (p->query_start[r] + token) * row + (int64_t)h * p->size;
            double norm = 0, deviation = 4 / (p->layer.scale * sqrt(p->size));
            const double *key = p->keys + (int64_t)(p->key_start[r] + (j < 0 ? 0 : j)) * p->size;
            for (int32_t d = 0; d < p->size && j >= 0; d++) {
                norm += isnan(key[d]) ? 0 : key[d] * key[d];
            }
            for (int32_t d = 0; d < p->size; d++) {
                double k = j < 0 || isnan(key[d]) ? 0 : key[d] / norm;
                int64_t at = (int64_t)(p->query_start[r] + token) * c->heads + h;
                bool rope = !c->joined && d >= c->rank;
                uint8_t *memory = rope ? p->q_pe_memory : p->q_memory;
                int64_t element = rope        ? at * c->rope + d - c->rank
                                  : c->joined ? at * p->size + d
                                              : at * c->rank + d;
                double x = 5 / p->layer.scale * k + deviation / 4 * random_normal();
                format_store(memory, element, p->q_dtype, x / p->q_scale);
                q[d] = format_load(memory, element, p->q_dtype) * p->q_scale;
            }
        }
    }
}

static void describe(struct latent *p)
{
    const struct mla_case *c = p->c;
    p->mla = (struct attn_mla_desc){.ext = {ATTN_EXT_MLA_DESC, 0, sizeof p->mla, NULL},
                                    .kv_lora_rank = c->rank,
                                    .qk_nope_head_dim = 128,
                                    .qk_rope_head_dim = c->rope,
                                    .v_head_dim = 128,
                                    .topk = c->topk};
    p->layer = (struct attn_layer_desc){.struct_size = sizeof p->layer,
                                        .next = &p->mla.ext,
                                        .kind = ATTN_LAYER_MLA,
                                        .dtype = c->dtype,
                                        .kv_dtype = p->kv_dtype,
                                        .num_q_heads = c->heads,
                                        .num_kv_heads = 1,
                                        .head_size = p->size,
                                        .head_size_v = c->rank,
                                        .scale = 0.0721f,
                                        .causal = !c->not_causal,
                                        .has_window = c->window > 0,
                                        .window_left = c->window - 1,
                                        .soft_cap = c->soft_cap,
                                        .has_sinks = c->has_sinks,
                                        .block_size = c->block_size,
                                        .k_scale_form = c->k_scale != 0 ? ATTN_SCALE_PER_TENSOR : 0,
                                        .q_scale_form = c->fp8_query ? ATTN_SCALE_PER_TENSOR : 0,
                                        .q_dtype = ATTN_DTYPE_FP8_E4M3};
    for (int32_t h = 0; h < c->heads; h++) {
        p->sinks[h] = (float)(2 * random_normal());
    }
    p->params = (struct attn_layer_params){.struct_size = sizeof p->params,
                                           .sinks = c->has_sinks ? p->sinks : NULL,
                                           .k_scale = c->k_scale != 0 ? &c->k_scale : NULL,
                                           .q_scale_host = 0.05f};
    p->view = (struct attn_kv_view){.struct_size = sizeof p->view,
                                    .block_size = c->block_size,
                                    .num_heads = 1,
                                    .head_size = p->size,
                                    .num_blocks = p->num_blocks,
                                    .stride_block = (int64_t)c->block_size * p->row_bytes,
                                    .stride_slot = p->row_bytes,
                                    .stride_head = p->row_bytes};
    p->batch = (struct attn_batch){.struct_size = sizeof p->batch,
                                   .num_reqs = c->num_reqs,
                                   .num_tokens = p->num_rows,
                                   .num_actual_tokens = p->query_start[c->num_reqs],
                                   .query_start_loc = p->query_start,
                                   .query_start_loc_host = p->query_start,
                                   .seq_lens = c->seq_lens,
                                   .seq_lens_host = c->seq_lens,
                                   .block_table = p->table,
                                   .block_table_stride = p->stride,
                                   .block_table_rows = 11,
                                   .block_table_row = c->table_rows ? p->table_row : NULL};
}

static void set_tensors(struct latent *p)
{
    const struct mla_case *c = p->c;
    int64_t heads = c->heads, rows = p->num_rows, keys = p->num_keys;
    int64_t width = c->joined ? p->size : c->rank;
    p->view.data = p->cache;
    tensor_set(&p->q_tensor, p->q_memory, p->q_dtype, 3, (int64_t[]){rows, heads, width}, NULL);
    tensor_set(&p->q_pe, p->q_pe_memory, p->q_dtype, 3, (int64_t[]){rows, heads, c->rope}, NULL);
    tensor_set(&p->kv_c, p->k_memory, c->dtype, 2, (int64_t[]){keys, c->rank}, NULL);
    tensor_set(&p->k_pe, p->k_pe_memory, c->dtype, 2, (int64_t[]){keys, c->rope}, NULL);
    tensor_set(&p->k_joined, p->k_memory, c->dtype, 3, (int64_t[]){keys, 1, p->size}, NULL);
    p->out = filled_memory(rows * heads * c->rank, 4, POISON);
    p->lse = filled_memory(rows * heads, sizeof *p->lse, POISON);
    tensor_set(&p->out_tensor, p->out, c->dtype, 3, (int64_t[]){rows, heads, c->rank}, NULL);
    tensor_set(&p->lse_tensor, p->lse, ATTN_DTYPE_F32, 2, (int64_t[]){heads, rows}, NULL);
    p->io = (struct attn_io_mla){.ext = {ATTN_EXT_IO_MLA, 0, sizeof p->io, NULL},
                                 .q_nope = &p->q_tensor.tensor,
                                 .q_pe = &p->q_pe.tensor,
                                 .kv_c = &p->kv_c.tensor,
                                 .k_pe = &p->k_pe.tensor,
                                 .topk_indices = p->topk,
                                 .topk_stride = c->topk + 3};
}

struct latent *latent_create(const struct mla_case *c)
{
    static const int32_t bytes[] = {0, 2, 2, 4, 1, 1};
    struct latent *p = filled_memory(1, sizeof *p, 0);
    p->c = c;
    p->size = c->rank + c->rope;
    p->kv_dtype = c->kv_dtype ? c->kv_dtype : c->dtype;
    p->row_bytes = p->kv_dtype == ATTN_KV_FP8_DS_MLA ? 656 : p->size * bytes[p->kv_dtype];
    place(p);
    describe(p);
    draw_keys(p);
    draw_topk(p);
    draw_queries(p);
    set_tensors(p);
    return p;
}

void latent_destroy(struct latent *p)
{
    void *memory[] = {p->table,    p->topk,        p->slots,    p->given,    p->keys,
                      p->q,        p->cache,       p->expected, p->q_memory, p->q_pe_memory,
                      p->k_memory, p->k_pe_memory, p->out,      p->lse};
    for (int32_t i = 0; i < COUNT(memory); i++) {
        free(memory[i]);
    }
    free(p);
}
