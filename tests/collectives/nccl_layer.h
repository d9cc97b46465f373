/* SPDX-License-Identifier: Apache-2.0 */
/* A layer of cuda_flash on one GPU, whole or spread over the ranks, and its steps; for nccl_spread
 * and nccl_speed. */
#ifndef COLLECTIVES_NCCL_LAYER_H
#define COLLECTIVES_NCCL_LAYER_H

#include "nccl_ranks.h"
#include "support/client.h"

enum { NCCL_MAX_ROWS = 4096, NCCL_MAX_REQS = 8, LATENT = 512, ROPE = 64 };

/* A layer and its requests. hk 0: MLA, absorbed in the core. */
struct geometry {
    int32_t hq, hk, d;
    int32_t block, blocks; /* keys of a block, blocks of a request */
    int32_t reqs;
    int32_t dtype;
};

struct trial {
    struct rank *rank;
    const struct attn_api *api;
    attn_runtime *runtime;
    int32_t *tables; /* [reqs, blocks] */
    void *used[64];  /* device memory of the trial */
    int32_t num_used;
    struct attn_error error;
};

/* The layer, spread (`cp`) or whole. */
struct planned_layer {
    struct geometry geometry;
    const struct attn_context_parallel *cp;
    attn_assignment *assignment;
    attn_model *model;
    attn_plan *plan;
    void *cache, *workspace;
    size_t cache_bytes;
};

/* The tensors of one run, and what the extensions that it may need point at. */
struct run_tensors {
    struct attn_step_io io;
    struct attn_io_mla mla;
    struct attn_tensor q, q_pe, k, v, out, lse;
    int64_t shapes[6][3];
};

#define TRY(t, call)                                                                               \
    do {                                                                                           \
        attn_status status_ = (call);                                                              \
        HOLD((t)->rank, status_ == ATTN_OK, "%s: %d, %s: %s", #call, status_, (t)->error.field,    \
             (t)->error.message);                                                                  \
        if (status_ != ATTN_OK) {                                                                  \
            return false;                                                                          \
        }                                                                                          \
    } while (0)

/* The core, with cuda_flash alone; the caller destroys t->runtime. */
bool trial_open(struct trial *t);
/* Device memory until trial_release, with these bytes, or poisoned. */
void *trial_keep(struct trial *t, const void *bytes, size_t size);
void trial_release(struct trial *t);
/* Requests' blocks, backwards. False without memory. */
bool trial_tables(struct trial *t, const struct geometry *g);

/* Selected, bound and planned for; its cache is poisoned. planned_layer_finish leaves the memory.
 */
bool planned_layer_init(struct trial *t, struct planned_layer *s);
void planned_layer_finish(struct trial *t, struct planned_layer *s);

/* Tensors of `tokens` rows: new keys and values, the same on every rank, from `seed`; with
 * `attends` also queries, this rank's own, an output and its LSE. */
struct run_tensors *run_tensors(struct trial *t, const struct geometry *g, int64_t tokens,
                                uint32_t seed, bool attends);

/* Plans positions first[r] .. end[r]-1 of every request. */
bool planned_layer_plan(struct trial *t, struct planned_layer *s, const int32_t *first,
                        const int32_t *end);
/* `runs` runs of the layer, captured; NULL on failure. */
cudaGraphExec_t planned_layer_capture(struct trial *t, struct planned_layer *s,
                                      struct attn_step_io *io, int32_t runs);

#endif
