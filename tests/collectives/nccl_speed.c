/* SPDX-License-Identifier: Apache-2.0 */
/* One long request, decoded from a captured graph: all heads on one GPU, then each rank its own
 * heads over a cache that lies spread over the ranks. A row for each on stdout. */
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

/* Median time of one run in microseconds, 0 on failure. */
static double measure(struct trial *t, struct side *s)
{
    const struct geometry *g = &s->geometry;
    int32_t first = g->blocks * g->block - 1, end = first + 1;
    struct run_tensors *tensors = run_tensors(t, g, 1, 4, true);
    cudaEvent_t begin = NULL, ended = NULL;
    float times[ROUNDS] = {0};
    cudaGraphExec_t exec = NULL;
    cudaMemsetAsync(s->cache, 0, s->cache_bytes, t->rank->stream); /* any keys do for a time */
    bool ready = side_plan(t, s, &first, &end);
    exec = ready ? side_capture(t, s, &tensors->io, RUNS) : NULL;
    ready = exec != NULL && cudaEventCreate(&begin) == cudaSuccess &&
            cudaEventCreate(&ended) == cudaSuccess;
    for (int32_t i = -1; i < ROUNDS && ready; i++) {
        cudaEventRecord(begin, t->rank->stream);
        for (int32_t k = 0; k < LAUNCHES; k++) {
            cudaGraphLaunch(exec, t->rank->stream);
        }
        cudaEventRecord(ended, t->rank->stream);
        ready = cudaStreamSynchronize(t->rank->stream) == cudaSuccess &&
                cudaEventElapsedTime(&times[i < 0 ? 0 : i], begin, ended) == cudaSuccess;
    }
    HOLD(t->rank, ready, "no times: %s", cudaGetErrorString(cudaGetLastError()));
    qsort(times, ROUNDS, sizeof *times, order);
    if (exec != NULL) {
        cudaGraphExecDestroy(exec);
    }
    cudaEventDestroy(begin);
    cudaEventDestroy(ended);
    free(tensors);
    return ready ? times[ROUNDS / 2] * 1e3 / (LAUNCHES * RUNS) : 0;
}

/* A cell whole and spread; false where a rank may be left waiting. */
static bool time_cell(struct trial *t, size_t which)
{
    int32_t n = t->rank->ranks->world_size;
    double times[2] = {0};
    for (int32_t i = 0; i < 2; i++) {
        const struct attn_context_parallel cp = {
            .ext = {.id = ATTN_EXT_CONTEXT_PARALLEL, .struct_size = sizeof cp},
            .decode = t->rank->ranks,
            .interleave = BLOCK,
            .reduce = ATTN_CP_ALL_TO_ALL};
        struct side side = {.geometry = {cells[which].hq / (i > 0 ? n : 1), cells[which].hk,
                                         cells[which].d, BLOCK, cells[which].keys / BLOCK, 1,
                                         ATTN_DTYPE_BF16},
                            .cp = i > 0 ? &cp : NULL};
        bool made = trial_tables(t, &side.geometry) && side_init(t, &side);
        times[i] = made ? measure(t, &side) : 0;
        if (made) {
            side_finish(t, &side);
        }
        trial_release(t);
        if (times[i] <= 0) {
            return false;
        }
    }
    if (t->rank->ranks->rank == 0) {
        printf("| %s, %d keys | %.1f | %.1f | %.2f |\n", cells[which].name, cells[which].keys,
               times[0], times[1], times[0] / (n * times[1]));
    }
    return true;
}

void time_spread(struct rank *rank)
{
    struct trial *t = calloc(1, sizeof *t);
    t->rank = rank;
    t->error = (struct attn_error)ATTN_ERROR_INIT;
    bool going = trial_open(t);
    if (rank->ranks->rank == 0) {
        printf("| one request, us a decode | one GPU | %d | of %d times one GPU's speed |\n"
               "| --- | --- | --- | --- |\n",
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
