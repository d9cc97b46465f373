/* SPDX-License-Identifier: Apache-2.0 */
/* The plugin's part of a case: write, hide what must not be read, attend. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "formats.h"
#include "problem.h"

#define SKIPPED_EVERY 5

static void expect_row(struct problem *p, int32_t is_v, int64_t slot, const double *row)
{
    const struct attend_case *c = p->c;
    int64_t dims = is_v ? p->dv : c->head_size;
    int32_t form = is_v ? c->v_scale_form : c->k_scale_form;
    const float *scales = is_v ? p->v_scale : p->k_scale;
    for (int64_t i = 0; i < c->num_kv_heads * dims; i++) {
        int64_t head = i / dims;
        double scale = form == ATTN_SCALE_NONE ? 1 : scales[form == ATTN_SCALE_PER_HEAD ? head : 0];
        int64_t at = problem_cache_offset(p, is_v, slot / c->block_size, slot % c->block_size, head,
                                          i % dims);
        if (!isnan(row[i])) {
            format_store(p->cache_expected + at, 0, p->kv_number, row[i] / scale);
        }
    }
}

/* One row a key that its request owns, shuffled; every fifth is skipped and full of garbage. */
static int64_t list_rows(const struct problem *p, int64_t *keys, int64_t *slots)
{
    const struct attend_case *c = p->c;
    int32_t *order = malloc(sizeof(int32_t) * (size_t)(p->num_keys + 1));
    int64_t n = 0;
    random_permutation(order, (int32_t)p->num_keys);
    for (int64_t i = 0; i < p->num_keys; i++) {
        int32_t r = 0;
        while (order[i] >= p->key_start[r + 1]) {
            r++;
        }
        int64_t key = order[i] - p->key_start[r];
        if (problem_owner(p, r, key) != r) {
            continue;
        }
        keys[n] = order[i];
        slots[n++] = (int64_t)problem_block(p, r, key) * c->block_size + key % c->block_size;
        if (n % SKIPPED_EVERY == 0) {
            keys[n] = 0;
            slots[n++] = -1 - random_below(100);
        }
    }
    free(order);
    return n;
}

attn_status problem_write(struct problem *p, const struct reference *reference,
                          struct attn_error *error)
{
    const struct attend_case *c = p->c;
    int64_t H = c->num_kv_heads, D = c->head_size, E = p->dv, wide = c->fused ? 16 : 0;
    int64_t room = 2 * p->num_keys + 2, k_row = H * D + wide, v_row = H * E + wide;
    int64_t bytes = format_bytes(c->dtype);
    int64_t *keys = malloc((size_t)room * 8), *slots = malloc((size_t)room * 8);
    uint8_t *k = problem_memory(room * k_row * bytes, 1, POISON);
    uint8_t *v = problem_memory(room * v_row * bytes, 1, POISON);
    struct test_tensor k_tensor, v_tensor;
    int64_t n = list_rows(p, keys, slots);
    for (int64_t t = 0; t < n; t++) {
        for (int64_t i = 0; i < H * D && slots[t] >= 0; i++) {
            double x = p->k_given[keys[t] * H * D + i];
            if (!isnan(x)) {
                format_store(k, t * k_row + i, c->dtype, x);
            }
        }
        for (int64_t i = 0; i < H * E && slots[t] >= 0; i++) {
            double x = p->v_given[keys[t] * H * E + i];
            if (!isnan(x)) {
                format_store(v, t * v_row + i, c->dtype, x);
            }
        }
        if (slots[t] >= 0) {
            expect_row(p, 0, slots[t], p->k_given + keys[t] * H * D);
            expect_row(p, 1, slots[t], p->v_given + keys[t] * H * E);
        }
    }
    /* the tensors are longer than the slots: only num_slots rows are real */
    struct attn_write_kv_args args = {
        .struct_size = sizeof args,
        .instance = reference->instance,
        .layer = &p->layer,
        .params = &p->params,
        .k_cache = &p->k_view,
        .v_cache = &p->v_view,
        .slot_mapping = slots,
        .num_slots = n,
        .k = tensor_set(&k_tensor, k, c->dtype, 3, (int64_t[]){n + 2, H, D},
                        (int64_t[]){k_row, D, 1}),
        .v = tensor_set(&v_tensor, v, c->dtype, 3, (int64_t[]){n + 2, H, E},
                        (int64_t[]){v_row, E, 1}),
    };
    slots[n] = slots[n + 1] = 0;
    attn_status status = reference->kernels->write_kv(&args, error);
    free(keys);
    free(slots);
    free(k);
    free(v);
    return status;
}

void problem_hide(struct problem *p, int32_t request, int64_t key)
{
    const struct attend_case *c = p->c;
    for (int32_t is_v = 0; is_v < 2; is_v++) {
        int64_t dims = is_v ? p->dv : c->head_size;
        for (int64_t i = 0; i < c->num_kv_heads * dims; i++) {
            int64_t head = i / dims, d = i % dims, size = format_bytes(p->kv_number);
            if (c->block_size == 0) {
                int64_t stride = is_v ? p->v_stride : p->k_stride;
                int64_t at = (p->key_start[request] + key) * stride + i;
                memset((is_v ? p->v_memory : p->k_memory) + at * size, POISON, (size_t)size);
                continue;
            }
            int64_t at = problem_cache_offset(p, is_v, problem_block(p, request, key),
                                              key % c->block_size, head, d);
            memset(p->cache + at, POISON, (size_t)size);
            memset(p->cache_expected + at, POISON, (size_t)size);
        }
    }
}

attn_status problem_attend(struct problem *p, const struct reference *reference,
                           struct attn_error *error)
{
    const struct attend_case *c = p->c;
    struct attn_attend_args args = {
        .struct_size = sizeof args,
        .instance = reference->instance,
        .layer = &p->layer,
        .params = &p->params,
        .batch = &p->batch,
        .k_cache = c->block_size ? &p->k_view : NULL,
        .v_cache = c->block_size ? &p->v_view : NULL,
        .flags = ATTN_RUN_NO_WRITE,
        .q = &p->q_tensor.tensor,
        .k = c->block_size ? NULL : &p->k_tensor.tensor,
        .v = c->block_size ? NULL : &p->v_tensor.tensor,
        .out = &p->out_tensor.tensor,
        .lse = c->no_lse ? NULL : &p->lse_tensor.tensor,
    };
    return reference->kernels->attend(&args, error);
}
