/* SPDX-License-Identifier: Apache-2.0 */
/* A backend that counts its calls and computes nothing, in a runtime filled by hand: no plugin
 * file. */
#ifndef TESTS_CORE_FAKE_BACKEND_H
#define TESTS_CORE_FAKE_BACKEND_H

#include "select_fixture.h"

#define FAKE_HEAD_SIZE 64
#define FAKE_BLOCK_SIZE 16

/* Calls since the last fake_reset. */
struct fake_calls {
    int32_t attends;
    int32_t writes;
    int32_t fused;     /* attends that had to write */
    int32_t schedules; /* and those that were planned */
    int32_t updates;   /* changes of a block table alone */
    int32_t creates, destroys, prepares, releases;
    int32_t num_options; /* options of the last create */
    /* batches of the first attends */
    int32_t num_reqs[8], phase[8];
    int32_t most_reqs[8]; /* by their limits */
    int64_t table_rows[8];
    const struct attn_tensor *k[8];
    int32_t scheduled_phase[8];
    struct attn_schedule_size schedule; /* what schedule_size answers */
};
extern struct fake_calls fake_calls;
/* What it hands out when it is created: tests take slots away, or add some, after fake_init. */
extern struct attn_kernels fake_kernels;
void fake_reset(void);

/* A fixture whose one backend is the fake; caps may be changed before fake_model. */
struct attn_backend_caps *fake_init(struct fixture *fixture);
/* float32, causal, 4 query heads on 2. */
struct attn_layer_desc fake_layer(const char *name);
/* NULL if selection or creation fails; the text is in *error. */
attn_model *fake_model(struct fixture *fixture, const struct attn_layer_desc *layers, int32_t count,
                       struct attn_error *error);
/* The same, which has to succeed. */
attn_model *fake_model_of(struct fixture *fixture, const struct attn_layer_desc *layers,
                          int32_t count);
/* Binds K's and V's view. */
static inline attn_status bind_kv(attn_layer *layer, const struct attn_kv_view *k,
                                  const struct attn_kv_view *v, struct attn_error *error)
{
    return layer_bind_caches(layer, (const struct attn_kv_view *const[]){k, v}, 2, error);
}
static inline void model_end(attn_model **model)
{
    model_destroy(*model);
}
struct attn_tensor fake_tensor(float *data, int64_t *shape, int64_t rows, int64_t heads);

#endif
