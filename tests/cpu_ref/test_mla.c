/* SPDX-License-Identifier: Apache-2.0 */
/* attend_mla, attend_mla_sparse, and latent rows written and gathered, against the formulas in
 * float64 over unpaged rows. Usage: test_mla FILE.so */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "formats.h"
#include "harness.h"
#include "latent.h"
#include "support/test.h"

#define SEED 97
#define COUNT(array) ((int32_t)(sizeof(array) / sizeof *(array)))

static const struct mla_case cases[] = {
    {"decode", ATTN_DTYPE_F32, 0, 16, 512, 64, 16, 5, {1, 1, 1, 1, 0}, {1, 16, 17, 33, 4}},
    {"bf16", ATTN_DTYPE_BF16, 0, 8, 512, 64, 64, 2, {1, 1}, {70, 64}, .joined = 1},
    {"f16, several queries", ATTN_DTYPE_F16, 0, 9, 512, 64, 16, 4, {4, 1, 2, 16}, {20, 1, 16, 16}},
    {"small latent",
     ATTN_DTYPE_F32,
     0,
     3,
     64,
     16,
     4,
     3,
     {2, 3, 1},
     {9, 3, 8},
     .first_row = 3,
     .padding = 4,
     .table_rows = 1},
    {"no rope", ATTN_DTYPE_F32, 0, 2, 32, 0, 4, 2, {1, 2}, {5, 7}},
    {"sinks, soft cap",
     ATTN_DTYPE_F32,
     0,
     5,
     64,
     16,
     4,
     3,
     {1, 2, 1},
     {9, 3, 0},
     .has_sinks = 1,
     .soft_cap = 20},
    {"window", ATTN_DTYPE_F32, 0, 4, 64, 16, 4, 3, {1, 5, 2}, {19, 23, 4}, .window = 6},
    {"not causal", ATTN_DTYPE_F32, 0, 4, 64, 16, 4, 2, {3, 5}, {19, 5}, .not_causal = 1},
    {"fp8 cache",
     ATTN_DTYPE_BF16,
     ATTN_KV_FP8_E4M3,
     8,
     512,
     64,
     16,
     3,
     {1, 1, 3},
     {40, 17, 5},
     .k_scale = 0.03f},
    {"e5m2, fp8 query",
     ATTN_DTYPE_BF16,
     ATTN_KV_FP8_E5M2,
     8,
     512,
     64,
     16,
     2,
     {1, 2},
     {40, 17},
     .k_scale = 0.5f,
     .fp8_query = 1},
    {"fp8_ds_mla", ATTN_DTYPE_BF16, ATTN_KV_FP8_DS_MLA, 8, 512, 64, 64, 3, {1, 2, 1}, {65, 17, 64}},
    {"sparse", ATTN_DTYPE_F32, 0, 9, 512, 64, 16, 4, {1, 5, 17, 1}, {50, 20, 17, 1}, .topk = 8},
    {"sparse fp8_ds_mla",
     ATTN_DTYPE_BF16,
     ATTN_KV_FP8_DS_MLA,
     16,
     512,
     64,
     64,
     3,
     {1, 3, 0},
     {100, 70, 9},
     .topk = 32,
     .joined = 1},
    {"sparse, not causal",
     ATTN_DTYPE_F32,
     0,
     4,
     64,
     16,
     4,
     2,
     {3, 1},
     {30, 20},
     .topk = 8,
     .not_causal = 1},
    {"sparse rows elsewhere",
     ATTN_DTYPE_F32,
     0,
     4,
     64,
     16,
     4,
     3,
     {1, 4, 2},
     {9, 30, 0},
     .topk = 5,
     .first_row = 2,
     .padding = 3,
     .table_rows = 1,
     .has_sinks = 1},
    {"a visible NaN", ATTN_DTYPE_F32, 0, 4, 64, 16, 4, 3, {1, 1, 2}, {9, 4, 7}, .nan_key = 1},
};

static attn_status write_keys(struct latent *p, const struct reference *reference,
                              struct attn_error *error)
{
    struct attn_write_kv_args args = {.struct_size = sizeof args,
                                      .next = p->c->joined ? NULL : &p->io.ext,
                                      .instance = reference->instance,
                                      .layer = &p->layer,
                                      .params = &p->params,
                                      .k_cache = &p->view,
                                      .slot_mapping = p->slots,
                                      .num_slots = p->num_keys,
                                      .k = p->c->joined ? &p->k_joined.tensor : NULL};
    return reference->kernels->write_kv(&args, error);
}

static struct attn_attend_args attend_args(struct latent *p, const struct reference *reference)
{
    return (struct attn_attend_args){.struct_size = sizeof(struct attn_attend_args),
                                     .next = p->c->joined && !p->c->topk ? NULL : &p->io.ext,
                                     .instance = reference->instance,
                                     .layer = &p->layer,
                                     .params = &p->params,
                                     .batch = &p->batch,
                                     .k_cache = &p->view,
                                     .q = p->c->joined ? &p->q_tensor.tensor : NULL,
                                     .out = &p->out_tensor.tensor,
                                     .lse = &p->lse_tensor.tensor};
}

static attn_status attend(struct attn_attend_args *args, const struct reference *reference,
                          struct attn_error *error)
{
    return ((const struct attn_mla_desc *)args->layer->next)->topk > 0
               ? reference->kernels->attend_mla_sparse(args, error)
               : reference->kernels->attend_mla(args, error);
}

/* NaN into every written row that no query of its request looks at. */
static void hide_rows(struct latent *p)
{
    const struct mla_case *c = p->c;
    for (int32_t r = 0; r < c->num_reqs; r++) {
        for (int32_t j = 0; j < c->seq_lens[r]; j++) {
            bool seen = false;
            for (int32_t i = 0; i < c->query_lens[r] && !c->topk; i++) {
                seen |= sees(c, r, i, j);
            }
            for (int32_t i = 0; i < c->query_lens[r] * c->topk; i++) {
                seen |= topk_of(p, r, i / c->topk)[i % c->topk] == j && sees(c, r, i / c->topk, j);
            }
            if (!seen) {
                memset(p->cache + slot_of(p, r, j) * p->row_bytes, POISON, (size_t)p->row_bytes);
            }
        }
    }
}

/* Softmax over the listed keys, in two passes. */
static double formula(const struct latent *p, int32_t r, int32_t i, int32_t h, double *out)
{
    const struct mla_case *c = p->c;
    const double *q = p->q + ((int64_t)(p->query_start[r] + i) * c->heads + h) * p->size;
    int32_t count = c->topk ? c->topk : c->seq_lens[r];
    double *scores = filled_memory(count + 1, sizeof *scores, 0), m = -INFINITY, sum = 0;
    for (int32_t n = 0; n < count; n++) {
        int32_t j = c->topk ? topk_of(p, r, i)[n] : n;
        scores[n] = -INFINITY;
        if (sees(c, r, i, j)) {
            const double *key = p->keys + (int64_t)(p->key_start[r] + j) * p->size;
            double s = 0;
            for (int32_t d = 0; d < p->size; d++) {
                s += q[d] * key[d];
            }
            s *= p->layer.scale;
            scores[n] = c->soft_cap > 0 ? c->soft_cap * tanh(s / c->soft_cap) : s;
        }
        m = isnan(m) || isnan(scores[n]) ? NAN : fmax(m, scores[n]);
    }
    m = c->has_sinks ? fmax(m, p->sinks[h]) : m;
    memset(out, 0, (size_t)c->rank * sizeof *out);
    for (int32_t n = 0; n < count; n++) {
        if (scores[n] != -INFINITY) {
            int32_t j = c->topk ? topk_of(p, r, i)[n] : n;
            double weight = exp(scores[n] - m);
            sum += weight;
            for (int32_t d = 0; d < c->rank; d++) {
                out[d] += weight * p->keys[(int64_t)(p->key_start[r] + j) * p->size + d];
            }
        }
    }
    sum += c->has_sinks ? exp(p->sinks[h] - m) : 0;
    for (int32_t d = 0; d < c->rank && sum != 0; d++) {
        out[d] /= sum;
    }
    free(scores);
    return sum == 0 ? -INFINITY : m + log(sum);
}

static void expect(const struct mla_case *c, double got, double want, double bound,
                   const char *what, int64_t at)
{
    bool same = isnan(want)   ? isnan(got)
                : isinf(want) ? got == want
                              : fabs(got - want) <= bound * fabs(want) + 2e-7;
    if (!same) {
        fail_msg("%s: %s, element %lld: %.9g, not %.9g", c->name, what, (long long)at, got, want);
    }
}

static void compare(const struct latent *p)
{
    const struct mla_case *c = p->c;
    double out[512], bound = 1.01 * format_half_step(c->dtype);
    int32_t bytes = format_bytes(c->dtype), r = 0;
    for (int32_t t = 0; t < p->num_rows; t++) {
        while (r < c->num_reqs && t >= p->query_start[r + 1]) {
            r++;
        }
        bool inside = t >= p->query_start[0] && r < c->num_reqs;
        for (int32_t h = 0; h < c->heads; h++) {
            int64_t at = ((int64_t)t * c->heads + h) * c->rank;
            for (int32_t d = 0; d < c->rank * bytes && !inside; d++) {
                assert_int_equal(p->out[at * bytes + d], POISON);
            }
            if (inside) {
                double lse = formula(p, r, t - p->query_start[r], h, out);
                for (int32_t d = 0; d < c->rank; d++) {
                    expect(c, format_load(p->out, at + d, c->dtype), out[d], bound, "out", at + d);
                }
                expect(c, p->lse[(int64_t)h * p->num_rows + t], lse, 1e-6, "lse", t);
            }
        }
    }
}

static void check_case(const struct mla_case *c, const struct reference *reference)
{
    struct attn_error error = ATTN_ERROR_INIT;
    struct latent *p = latent_create(c);
    /* every third row is skipped at first: it comes with a second call */
    int64_t *slots = filled_memory(p->num_keys, sizeof *slots, 0);
    memcpy(slots, p->slots, (size_t)p->num_keys * sizeof *slots);
    for (int32_t pass = 0; pass < 2; pass++) {
        for (int32_t i = 0; i < p->num_keys; i++) {
            p->slots[i] = (i % 3 == 0) == (pass == 1) ? slots[i] : -1 - i;
        }
        if (write_keys(p, reference, &error) != ATTN_OK) {
            fail_msg("%s: %s: %s", c->name, error.field, error.message);
        }
    }
    for (int64_t i = 0; i < p->cache_bytes && !c->nan_key; i++) {
        if (p->cache[i] != p->expected[i]) {
            fail_msg("%s: cache byte %lld (of rows of %d): %02x, not %02x", c->name, (long long)i,
                     p->row_bytes, p->cache[i], p->expected[i]);
        }
    }
    hide_rows(p);
    struct attn_attend_args args = attend_args(p, reference);
    if (attend(&args, reference, &error) != ATTN_OK) {
        fail_msg("%s: %s: %s", c->name, error.field, error.message);
    }
    compare(p);
    free(slots);
    latent_destroy(p);
}

static void test_cases(void **state)
{
    (void)state;
    for (int32_t i = 0; i < COUNT(cases); i++) {
        check_case(&cases[i], &serial);
        check_case(&cases[i], &threaded);
    }
}

/* Without an LSE nothing else changes. */
static void test_no_lse(void **state)
{
    (void)state;
    struct latent *p = latent_create(&cases[3]);
    struct attn_attend_args args = attend_args(p, &serial);
    assert_int_equal(write_keys(p, &serial, NULL), ATTN_OK);
    args.lse = NULL;
    assert_int_equal(attend(&args, &serial, NULL), ATTN_OK);
    args.lse = &p->lse_tensor.tensor;
    uint8_t *first = filled_memory((int64_t)p->num_rows * 3 * 64, 4, 0);
    memcpy(first, p->out, (size_t)p->num_rows * 3 * 64 * 4);
    assert_int_equal(attend(&args, &serial, NULL), ATTN_OK);
    assert_memory_equal(first, p->out, (size_t)p->num_rows * 3 * 64 * 4);
    free(first);
    latent_destroy(p);
}

/* Chunks of context, dequantized to the activation dtype, from any position. */
static void check_gather(const struct mla_case *c)
{
    struct latent *p = latent_create(c);
    int32_t first[MAX_REQS], start[MAX_REQS + 1] = {0};
    struct test_tensor out;
    for (int32_t r = 0; r < c->num_reqs; r++) {
        first[r] = c->seq_lens[r] / 3;
        start[r + 1] = start[r] + (c->seq_lens[r] - first[r]) - c->seq_lens[r] / 4;
    }
    int64_t rows = start[c->num_reqs];
    uint8_t *memory = filled_memory((rows + 1) * p->size, 4, POISON);
    struct attn_gather_kv_args args = {
        .struct_size = sizeof args,
        .instance = threaded.instance,
        .layer = &p->layer,
        .params = &p->params,
        .cache = &p->view,
        .batch = &p->batch,
        .first_key = first,
        .out_start_loc = start,
        .out = tensor_set(&out, memory, c->dtype, 3, (int64_t[]){rows, 1, p->size}, NULL)};
    assert_int_equal(write_keys(p, &serial, NULL), ATTN_OK);
    assert_int_equal(threaded.kernels->gather_kv(&args, NULL), ATTN_OK);
    for (int32_t r = 0; r < c->num_reqs; r++) {
        for (int64_t i = start[r] * p->size; i < start[r + 1] * p->size; i++) {
            int64_t j = p->key_start[r] + first[r] + i / p->size - start[r];
            double want = format_round(c->dtype, p->keys[j * p->size + i % p->size]);
            expect(c, format_load(memory, i, c->dtype), want, 0, "gathered", i);
        }
    }
    free(memory);
    latent_destroy(p);
}

static void test_gather(void **state)
{
    (void)state;
    for (int32_t i = 0; i < COUNT(cases); i++) {
        if (!cases[i].nan_key) {
            check_gather(&cases[i]);
        }
    }
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_cases),
        cmocka_unit_test(test_no_lse),
        cmocka_unit_test(test_gather),
    };
    return harness_main(argc, argv, SEED, tests, sizeof tests / sizeof *tests);
}
