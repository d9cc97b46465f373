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

/* One way of doing it, captured, and what its rounds took. */
struct way {
    struct side side;
    struct run_tensors *tensors;
    cudaGraphExec_t graph;
    float ms[ROUNDS];
};

static bool prepare(struct trial *t, struct way *w)
{
    const struct geometry *g = &w->side.geometry;
    int32_t first = g->blocks * g->block - 1, end = first + 1;
    if (!side_init(t, &w->side)) {
        return false;
    }
    w->tensors = run_tensors(t, g, 1, 4, true);
    cudaMemsetAsync(w->side.cache, 0, w->side.cache_bytes, t->rank->stream); /* any keys do */
    w->graph = side_plan(t, &w->side, &first, &end)
                   ? side_capture(t, &w->side, &w->tensors->io, RUNS)
                   : NULL;
    return w->graph != NULL;
}

static bool launch(struct trial *t, const struct way *w, float *ms)
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
static double median(struct way *w)
{
    qsort(w->ms, ROUNDS, sizeof *w->ms, order);
    return w->ms[ROUNDS / 2] * 1e3 / (LAUNCHES * RUNS);
}

/* A cell by all ways in turns; false where a rank may be left waiting. */
static bool time_cell(struct trial *t, size_t which)
{
    const struct attn_collectives *ranks = t->rank->ranks, plain = without_windows(ranks);
    const int32_t n = ranks->world_size, count = has_windows(ranks) ? 3 : 2;
    struct attn_context_parallel cp[2] = {
        {.ext = {.id = ATTN_EXT_CONTEXT_PARALLEL, .struct_size = sizeof *cp},
         .decode = &plain,
         .interleave = BLOCK,
         .reduce = ATTN_CP_ALL_TO_ALL}};
    struct way ways[3] = {0};
    bool going = true;
    cp[1] = cp[0];
    cp[1].decode = ranks;
    for (int32_t i = 0; i < count; i++) {
        ways[i].side.geometry = (struct geometry){cells[which].hq / (i > 0 ? n : 1),
                                                  cells[which].hk,
                                                  cells[which].d,
                                                  BLOCK,
                                                  cells[which].keys / BLOCK,
                                                  1,
                                                  ATTN_DTYPE_BF16};
        ways[i].side.cp = i > 0 ? &cp[i - 1] : NULL;
        going = going && (i > 0 || trial_tables(t, &ways[i].side.geometry)) && prepare(t, &ways[i]);
    }
    for (int32_t round = -1; round < ROUNDS && going; round++) {
        for (int32_t i = 0; i < count && going; i++) {
            going = launch(t, &ways[i], &ways[i].ms[round < 0 ? 0 : round]);
        }
    }
    for (int32_t i = 0; i < count; i++) {
        if (ways[i].graph != NULL) {
            cudaGraphExecDestroy(ways[i].graph);
            side_finish(t, &ways[i].side);
        }
        free(ways[i].tensors);
    }
    trial_release(t);
    if (ranks->rank == 0 && going) {
        const double one = median(&ways[0]);
        printf("| %s, %d keys | %.1f |", cells[which].name, cells[which].keys, one);
        for (int32_t i = 1; i < count; i++) {
            const double time = median(&ways[i]);
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
