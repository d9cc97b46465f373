/* SPDX-License-Identifier: Apache-2.0 */
/* Steps of three requests over a paged cache: prompts, decodes, pieces that begin and end within
 * rows of several tokens, a request without queries. */
#ifndef CHECK_STEPS_H
#define CHECK_STEPS_H

#include "cases/kernel_test.h"
#include "core/engine.h"

enum { STEPS = 4, STEPS_REQS = 3, STEPS_TOKENS = 255, STEPS_LONGEST = 149, STEPS_PROMPT = 140 };
enum { STEPS_BLOCK = 16, STEPS_COLUMNS = 10, STEPS_BLOCKS = STEPS_REQS * STEPS_COLUMNS + 1 };

struct steps {
    int32_t request[STEPS_TOKENS], position[STEPS_TOKENS]; /* each token, in the order of steps */
    int32_t first[STEPS + 1], starts[STEPS][STEPS_REQS + 1], lens[STEPS][STEPS_REQS];
};

/* The first operands of such a case. */
enum { STEPS_STARTS, STEPS_LENS, STEPS_TABLE, STEPS_SLOTS, STEPS_OPERANDS };

void steps_init(struct steps *steps);
/* The operands above, from `operands` on. */
void steps_operands(const struct steps *steps, struct operand *operands);
/* A shuffled table, and the slots of all tokens. */
void steps_fill(const struct steps *steps, struct kernel_test *test, uint64_t *random);
static inline int64_t steps_slot(const int32_t *table, int32_t columns, int32_t r, int32_t row)
{
    return (int64_t)table[r * columns + row / STEPS_BLOCK] * STEPS_BLOCK + row % STEPS_BLOCK;
}
/* The token at a position of a request. */
int32_t steps_token(const struct steps *steps, int32_t r, int32_t position);
struct attn_batch steps_batch(const struct steps *steps, const struct kernel_call *call, int32_t s);
/* A layer's steps over the operands of a call, each by `run`, which calls steps_run. */
struct steps_layer {
    const struct steps *steps;
    const struct attn_layer_desc *layer;
    const struct attn_layer_params *params; /* NULL: it has none */
    const struct attn_cache_memory *memory;
    attn_status (*run)(struct check_engine *engine, const void *context, struct kernel_call *call,
                       int32_t s, struct attn_error *error);
    bool graph; /* its plan may be captured */
};
attn_status steps_call(const struct steps_layer *layer, struct kernel_call *call,
                       const void *context, struct attn_error *error);
/* Plans a step and runs it; after the first one nothing of the heap or the allocator may go. */
attn_status steps_run(struct check_engine *engine, struct kernel_call *call, int32_t s,
                      const struct attn_batch *batch, const struct attn_step_io *io,
                      struct attn_error *error);
static inline int32_t steps_end(const struct steps *steps, int32_t r)
{
    return steps->lens[STEPS - 1][r];
}

#endif
