/* SPDX-License-Identifier: Apache-2.0 */
/* One float32 layer served by a named backend, with a batch of requests over random keys: what
 * tests of whole steps begin with. The core is opened as an engine opens it. */
#ifndef STEP_FIXTURE_H
#define STEP_FIXTURE_H

#include <attn/api.h>
#include <stdbool.h>

#define MAX_REQS 12
#define MAX_TOKENS 256
#define MAX_BLOCKS 96 /* blocks of one request */

struct fixture {
    const struct attn_api *api;
    attn_runtime *runtime;
    bool owns_runtime;
    attn_model *model;
    attn_layer *bound; /* the model's layer */
    attn_plan *plan;
    struct attn_layer_desc layer;
    struct attn_batch batch;
    void *cache, *workspace;
    int32_t query_start_loc[MAX_REQS + 1], seq_lens[MAX_REQS];
    int32_t block_table[MAX_REQS * MAX_BLOCKS];
    int64_t slots[MAX_TOKENS];
    float *q, *k, *v, *out, *lse, *sink_k, *sink_v, sinks[64];
    float signs[256], v_channel_scale[256]; /* parameters of quantized caches */
    int64_t shapes[7][3];
    struct attn_tensor tensors[7]; /* q, k, v, out, lse, sink_k, sink_v */
    struct attn_step_io io;
    int64_t num_blocks;
    struct attn_error error;
};

/* A causal decoder with these fields, in an initializer. */
#define DECODER(...)                                                                               \
    {                                                                                              \
        .kind = ATTN_LAYER_DECODER, .causal = 1, __VA_ARGS__                                       \
    }

/* q_lens and lens of num_reqs requests; the first `shared` keys of all lie in the same blocks.
 * Contexts are written; `layer` is completed (4 heads over 2 and D 32 if it says neither, blocks of
 * 16). `host` may be NULL. */
void fixture_init(struct fixture *f, const char *backend, const struct attn_layer_desc *layer,
                  const int32_t *query_lens, const int32_t *lens, int32_t num_reqs, int32_t shared,
                  const struct attn_host *host, bool validate);
/* A test of the file's one `static struct fixture f`, which `begin` makes. */
#define CASE(name, begin)                                                                          \
    static void name##_case(void);                                                                 \
    TEST(name)                                                                                     \
    {                                                                                              \
        begin;                                                                                     \
        name##_case();                                                                             \
        fixture_finish(&f);                                                                        \
    }                                                                                              \
    static void name##_case(void)
/* The batch of most tests: two decodes, a prefill of 9 queries over 24 keys, and one of 20. */
void fixture_mixed(struct fixture *f, const char *backend, const struct attn_layer_desc *layer,
                   bool validate);
void fixture_finish(struct fixture *f);
/* From now on each has a runtime of its own; before, those without a host share one. */
void fixture_own_runtimes(void);
/* These read the environment. */
void fixture_read_environment(void);
/* A plan, with a workspace, in place of one that is destroyed. */
void fixture_plan(struct fixture *f);
/* plan_batch of the batch, run of the io. */
attn_status fixture_batch(struct fixture *f);
/* Leaves the first request out of the batch, whose rows are then another batch's. */
void fixture_skip_first(struct fixture *f);
attn_status fixture_run(struct fixture *f);
/* Both; asserts that they succeed. */
void fixture_step(struct fixture *f);
/* A plan of the batch, and a run of the io: refused as an invalid argument that names `field`. */
void fixture_refuse_plan(struct fixture *f, const char *field);
void fixture_refuse_run(struct fixture *f, const char *field);
/* Largest difference of out and of lse between two fixtures with one batch. */
double fixture_difference(const struct fixture *a, const struct fixture *b);

#endif
