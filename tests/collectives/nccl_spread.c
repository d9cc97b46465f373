/* SPDX-License-Identifier: Apache-2.0 */
/* A layer whose cache is spread over GPUs gives on every GPU what it gives there alone: each has
 * its own query heads, all the same keys. Decode, drafts and chunks of prefill, MLA's decode; also
 * out of a CUDA graph that captured the exchange. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "nccl_layer.h"

enum { HQ = 16, HK = 8, D = 128, BLOCK = 16, REQS = 6, BLOCKS = 80 };

static const struct {
    const char *name;
    int32_t queries[REQS], lens[REQS];
} batches[] = {
    {"decode", {1, 1, 1, 1, 1, 1}, {40, 17, 1, 2, 333, 1234}},
    {"mixed", {1, 3, 9, 20, 5, 130}, {40, 17, 33, 20, 130, 1000}},
};

static const struct kind {
    int32_t dtype, reduce;
    bool latent, windows;
} kinds[] = {
    {ATTN_DTYPE_BF16, ATTN_CP_ALL_TO_ALL, false, false},
    {ATTN_DTYPE_F32, ATTN_CP_ALL_GATHER_REDUCE_SCATTER, false, false},
    {ATTN_DTYPE_F32, ATTN_CP_ALL_TO_ALL, false, false},
    {ATTN_DTYPE_BF16, ATTN_CP_ALL_TO_ALL, true, false},
    {ATTN_DTYPE_BF16, ATTN_CP_ALL_TO_ALL, false, true},
    {ATTN_DTYPE_F32, ATTN_CP_ALL_TO_ALL, false, true},
    {ATTN_DTYPE_BF16, ATTN_CP_ALL_TO_ALL, true, true},
};
enum { KINDS = sizeof kinds / sizeof *kinds };

/* One run over positions first[r] .. end[r]-1 of every request; `graph`: captured, then launched
 * twice. */
static bool step(struct trial *t, struct planned_layer *s, const int32_t *first, const int32_t *end,
                 struct attn_step_io *io, bool graph)
{
    cudaError_t ran = cudaSuccess;
    cudaGraphExec_t exec = NULL;
    io->stream = t->rank->stream;
    if (!planned_layer_plan(t, s, first, end) ||
        (graph && (exec = planned_layer_capture(t, s, io, 1)) == NULL)) {
        return false;
    }
    if (!graph) {
        TRY(t, t->api->run(s->plan, t->api->model_layer(s->model, 0), io, &t->error));
    }
    for (int32_t i = 0; i < 2 && graph && ran == cudaSuccess; i++) {
        ran = cudaGraphLaunch(exec, t->rank->stream);
    }
    ran = ran == cudaSuccess ? cudaStreamSynchronize(t->rank->stream) : ran;
    HOLD(t->rank, ran == cudaSuccess, "the step: %s", cudaGetErrorString(ran));
    if (graph) {
        cudaGraphExecDestroy(exec);
    }
    return ran == cudaSuccess;
}

/* Largest difference of elements, infinite for a NaN on one of them. */
static double difference(const void *a, const void *b, size_t count, bool wide)
{
    size_t size = wide ? 4 : 2;
    char *host_a = malloc(count * size), *host_b = malloc(count * size);
    double most = 0;
    cudaMemcpy(host_a, a, count * size, cudaMemcpyDeviceToHost);
    cudaMemcpy(host_b, b, count * size, cudaMemcpyDeviceToHost);
    for (size_t i = 0; i < count; i++) {
        float x = 0, y = 0;
        memcpy((char *)&x + (wide ? 0 : 2), host_a + i * size, size);
        memcpy((char *)&y + (wide ? 0 : 2), host_b + i * size, size);
        double d = fabs((double)x - (double)y);
        most = isnan(d) ? INFINITY : fmax(most, d);
    }
    free(host_a);
    free(host_b);
    return most;
}

static void compare(struct trial *t, const struct run_tensors *whole,
                    const struct run_tensors *spread, const char *what)
{
    const bool wide = whole->out.dtype.bits == 32;
    const int64_t *shape = whole->out.shape;
    /* float32: the order of sums; bf16: each part and each merge rounds once, |out| < 1 */
    double bound = wide ? 1e-4 : 1.6e-2;
    double d = difference(whole->out.data, spread->out.data,
                          (size_t)(shape[0] * shape[1] * shape[2]), wide);
    double d_lse =
        difference(whole->lse.data, spread->lse.data, (size_t)(shape[0] * shape[1]), true);
    HOLD(t->rank, d < bound && d_lse < 1e-3, "%s: out differs by %g, lse by %g", what, d, d_lse);
    if (t->rank->ranks->rank == 0) {
        printf("%s: out %g, lse %g\n", what, d, d_lse);
    }
}

static const char *name_of(const struct attn_context_parallel *cp)
{
    return cp->reduce != ATTN_CP_ALL_TO_ALL ? "reduce-scatter"
           : has_windows(cp->decode)        ? "windows"
                                            : "all to all";
}

static bool trial(struct trial *t, const struct geometry *g, size_t which,
                  const struct attn_context_parallel *cp, bool graph)
{
    struct planned_layer sides[2] = {{.geometry = *g}, {.geometry = *g, .cp = cp}};
    struct run_tensors *tensors[2] = {NULL, NULL};
    int32_t context[REQS], start[REQS] = {0}, contexts = 0, tokens = 0;
    char what[96];
    for (int32_t r = 0; r < REQS; r++) {
        context[r] = batches[which].lens[r] - batches[which].queries[r];
        contexts += context[r];
        tokens += batches[which].queries[r];
    }
    bool done =
        trial_tables(t, g) && planned_layer_init(t, &sides[0]) && planned_layer_init(t, &sides[1]);
    for (int32_t i = 0; i < 2 && done; i++) {
        struct run_tensors *old = run_tensors(t, g, contexts, 1, false);
        tensors[i] = run_tensors(t, g, tokens, 4, true);
        done = step(t, &sides[i], start, context, &old->io, false) &&
               step(t, &sides[i], context, batches[which].lens, &tensors[i]->io, graph && i == 1);
        free(old);
    }
    if (done) {
        snprintf(what, sizeof what, "%s, %s%s, interleave %d, %s%s", batches[which].name,
                 g->hk == 0 ? "mla " : "", g->dtype == ATTN_DTYPE_F32 ? "f32" : "bf16",
                 cp->interleave, name_of(cp), graph ? ", captured" : "");
        compare(t, tensors[0], tensors[1], what);
        planned_layer_finish(t, &sides[0]);
        planned_layer_finish(t, &sides[1]);
    }
    free(tensors[0]);
    free(tensors[1]);
    return done;
}

void check_spread(struct rank *rank)
{
    static const int32_t interleaves[] = {1, 2, 16};
    const struct attn_collectives plain = without_windows(rank->ranks);
    struct trial *t = calloc(1, sizeof *t);
    t->rank = rank;
    t->error = (struct attn_error)ATTN_ERROR_INIT;
    bool held = trial_open(t);
    /* Every rank makes the same trials: one that failed on one rank alone would leave the others
     * waiting, so nothing follows it. */
    for (size_t which = 0; which < sizeof batches / sizeof *batches; which++) {
        for (int32_t i = 0; i < 3 * KINDS && held; i++) {
            const struct kind *kind = &kinds[i % KINDS];
            const struct geometry g = {HQ,         kind->latent ? 0 : HK, D, BLOCK, BLOCKS, REQS,
                                       kind->dtype};
            const struct attn_context_parallel cp =
                EXTENSION(attn_context_parallel, ATTN_EXT_CONTEXT_PARALLEL, NULL,
                          .decode = kind->windows ? rank->ranks : &plain,
                          .interleave = interleaves[i / KINDS], .reduce = kind->reduce);
            if (kind->windows && !has_windows(rank->ranks)) {
                continue;
            }
            held = trial(t, &g, which, &cp, which == 0 && i >= KINDS);
            trial_release(t);
        }
    }
    if (t->api != NULL) {
        t->api->runtime_destroy(t->runtime);
    }
    free(t);
}
