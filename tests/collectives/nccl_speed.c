/* SPDX-License-Identifier: Apache-2.0 */
/* One long request, decoded from a captured graph: all heads on one GPU, then each rank its own
 * heads over a cache that lies spread over the ranks, by collectives and by windows, in turns. A
 * row for each on stdout. */
#include <stdlib.h>

#include "nccl_layer.h"

enum { RUNS = 8, ROUNDS = 5, LAUNCHES = 6, BLOCK = 64 };

static const struct {
    const char *name;
    int32_t hq, hk, d; /* heads of the whole layer */
    int32_t keys;
} cells[] = {
    {"32/8 heads, D 128", 32, 8, 128, 131072}, {"32/8 heads, D 128", 32, 8, 128, 1048576},
    {"MLA, 128 heads", 128, 0, 128, 131072},   {"MLA, 128 heads", 128, 0, 128, 1048576},
    {"MLA, 32 heads", 32, 0, 128, 1048576},
};

static int order(const void *a, const void *b)
{
    float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

/* A layer, whole or spread, captured, and what its rounds took. */
struct timed_layer {
    struct planned_layer planned;
    struct run_tensors *tensors;
    cudaGraphExec_t graph;
    float ms[ROUNDS];
};

static bool prepare(struct trial *t, struct timed_layer *w)
{
    const struct geometry *g = &w->planned.geometry;
    int32_t first = g->blocks * g->block - 1, end = first + 1;
    if (!planned_layer_init(t, &w->planned)) {
        return false;
    }
    w->tensors = run_tensors(t, g, 1, 4, true);
    cudaMemsetAsync(w->planned.cache, 0, w->planned.cache_bytes, t->rank->stream); /* any keys do */
    w->graph = planned_layer_plan(t, &w->planned, &first, &end)
                   ? planned_layer_capture(t, &w->planned, &w->tensors->io, RUNS)
                   : NULL;
    return w->graph != NULL;
}

static bool launch(struct trial *t, const struct timed_layer *w, float *ms)
{
    cudaEvent_t begin = NULL, ended = NULL;
    bool done = cudaEventCreate(&begin) == cudaSuccess && cudaEventCreate(&ended) == cudaSuccess;
    cudaEventRecord(begin, t->rank->stream);
    for (int32_t k = 0; k < LAUNCHES; k++) {
        cudaGraphLaunch(w->graph, t->rank->stream);
    }
    cudaEventRecord(ended, t->rank->stream);
    done = done && cudaStreamSynchronize(t->rank->stream) == cudaSuccess &&
           cudaEventElapsedTime(ms, begin, ended) == cudaSuccess;
    HOLD(t->rank, done, "no times: %s", cudaGetErrorString(cudaGetLastError()));
    cudaEventDestroy(begin);
    cudaEventDestroy(ended);
    return done;
}

/* Microseconds of one run. */
static double median(struct timed_layer *w)
{
    qsort(w->ms, ROUNDS, sizeof *w->ms, order);
    return w->ms[ROUNDS / 2] * 1e3 / (LAUNCHES * RUNS);
}

/* A cell by all timed in turns; false where a rank may be left waiting. */
static bool time_cell(struct trial *t, size_t which)
{
    const struct attn_collectives *ranks = t->rank->ranks, plain = without_windows(ranks);
    const int32_t n = ranks->world_size, count = has_windows(ranks) ? 3 : 2;
    struct attn_context_parallel cp[2] = {
        {.ext = {.id = ATTN_EXT_CONTEXT_PARALLEL, .struct_size = sizeof *cp},
         .decode = &plain,
         .interleave = BLOCK,
         .reduce = ATTN_CP_ALL_TO_ALL}};
    struct timed_layer timed[3] = {0};
    bool going = true;
    cp[1] = cp[0];
    cp[1].decode = ranks;
    for (int32_t i = 0; i < count; i++) {
        timed[i].planned.geometry = (struct geometry){cells[which].hq / (i > 0 ? n : 1),
                                                      cells[which].hk,
                                                      cells[which].d,
                                                      BLOCK,
                                                      cells[which].keys / BLOCK,
                                                      1,
                                                      ATTN_DTYPE_BF16};
        timed[i].planned.cp = i > 0 ? &cp[i - 1] : NULL;
        going = going && (i > 0 || trial_tables(t, &timed[i].planned.geometry)) &&
                prepare(t, &timed[i]);
    }
    for (int32_t round = -1; round < ROUNDS && going; round++) {
        for (int32_t i = 0; i < count && going; i++) {
            going = launch(t, &timed[i], &timed[i].ms[round < 0 ? 0 : round]);
        }
    }
    for (int32_t i = 0; i < count; i++) {
        if (timed[i].graph != NULL) {
            cudaGraphExecDestroy(timed[i].graph);
            planned_layer_finish(t, &timed[i].planned);
        }
        free(timed[i].tensors);
    }
    trial_release(t);
    if (ranks->rank == 0 && going) {
        const double one = median(&timed[0]);
        printf("| %s, %d keys | %.1f |", cells[which].name, cells[which].keys, one);
        for (int32_t i = 1; i < count; i++) {
            const double time = median(&timed[i]);
            printf(" %.1f | %.2f |", time, one / (n * time));
        }
        printf("\n");
    }
    return going;
}

void time_spread(struct rank *rank)
{
    struct trial *t = calloc(1, sizeof *t);
    t->rank = rank;
    t->error = (struct attn_error)ATTN_ERROR_INIT;
    bool going = trial_open(t);
    if (rank->ranks->rank == 0) {
        printf("one request, us a decode: one GPU | %d by collectives | of %d times its speed | by "
               "windows | same\n",
               rank->ranks->world_size, rank->ranks->world_size);
    }
    for (size_t which = 0; which < sizeof cells / sizeof *cells && going; which++) {
        going = time_cell(t, which);
    }
    if (t->api != NULL) {
        t->api->runtime_destroy(t->runtime);
    }
    free(t);
}
