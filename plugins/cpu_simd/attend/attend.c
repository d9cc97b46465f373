/* SPDX-License-Identifier: Apache-2.0 */
/* The kernel slots attend and plan, and the parallel loop. */
#include <stdatomic.h>

#include "common/recurrent.h"
#include "cpu_simd/internal.h"

struct attend_loop {
    const struct attend_run *run;
    atomic_int next; /* index into the schedule's order */
    bool merging;
};

static void attend_worker(struct attend_loop *loop, int32_t worker)
{
    const struct attend_run *run = loop->run;
    const struct attend_schedule *schedule = run->schedule;
    const struct variant *variant = run->problem.instance->variant;
    struct attend_scratch scratch;
    place_scratch(&scratch, run->scratch + (size_t)worker * run->scratch_bytes, &run->problem.shape,
                  schedule->needs.rows);
    int32_t count = loop->merging ? schedule->num_merges : schedule->num_items;
    if (variant->enter != NULL) {
        variant->enter();
    }
    for (;;) {
        int32_t i = atomic_fetch_add_explicit(&loop->next, 1, memory_order_relaxed);
        if (i >= count) {
            break;
        }
        if (loop->merging) {
            const struct merge_item *merge = &schedule_merges(schedule)[i];
            if (rows_wanted(&run->problem, merge->request, merge->token, merge->num_tokens)) {
                merge_partials(run, merge, &scratch);
            }
            continue;
        }
        const struct work_item *item = &schedule_items(schedule)[schedule_order(schedule)[i]];
        if (!rows_wanted(&run->problem, item->request, item->token, item->num_tokens)) {
            continue;
        }
        if (item->decode) {
            run_decode(run, item, &scratch);
        } else {
            run_packed(run, item, &scratch);
        }
    }
    if (variant->leave != NULL) {
        variant->leave();
    }
}

/* A slice may hold several of the loop's places: the first one drains the schedule. */
static void attend_body(void *argument, int64_t begin, int64_t end, int32_t worker)
{
    attend_worker(argument, worker);
}

static void parallel(const struct attend_run *run, bool merging)
{
    const struct attn_host *host = run->problem.instance->host;
    int32_t count = merging ? run->schedule->num_merges : run->schedule->num_items;
    struct attend_loop loop = {.run = run, .merging = merging};
    atomic_init(&loop.next, 0);
    if (count > 0) {
        host->parallel_for(host->user, min_i32(count, host->num_threads), 1, attend_body, &loop);
    }
}

/* Idle and profiling steps: zeros, and the workspace touched. */
static void write_zeros(const struct attn_attend_args *args, const struct attend_problem *problem)
{
    const struct attn_tensor *out = args->out;
    int64_t bytes = out->dtype.bits / 8;
    for (int64_t t = 0; t < problem->batch->num_actual_tokens; t++) {
        for (int64_t h = 0; h < out->shape[1]; h++) {
            char *row =
                tensor_data(out) + (t * tensor_stride(out, 0) + h * tensor_stride(out, 1)) * bytes;
            memset(row, 0, (size_t)(out->shape[2] * bytes));
        }
    }
    if (problem->batch->mode == ATTN_BATCH_PROFILE && args->scratch != NULL) {
        memset(args->scratch, 0, args->scratch_bytes);
    }
}

static bool no_work(const struct attn_batch *batch)
{
    return batch->mode == ATTN_BATCH_IDLE || batch->mode == ATTN_BATCH_PROFILE;
}

attn_status run_attend(const struct attn_attend_args *args, const struct latent_parts *parts,
                       struct attn_error *error)
{
    struct attend_run run;
    struct attend_scratch scratch;
    attn_status status = problem_init(&run.problem, args, parts, true, error);
    if (status != ATTN_OK) {
        return status;
    }
    if (no_work(args->batch)) {
        write_zeros(args, &run.problem);
        return ATTN_OK;
    }
    if (args->schedule_host == NULL || args->scratch == NULL) {
        return fail(error, ATTN_ERROR_ORDER, args->scratch ? "schedule_host" : "scratch",
                    "NULL: attend needs the memory that plan has filled");
    }
    run.args = args;
    run.schedule = args->schedule_host;
    run.scratch_bytes = place_scratch(&scratch, NULL, &run.problem.shape, run.schedule->needs.rows);
    size_t workers = (size_t)run.problem.instance->host->num_threads;
    run.scratch = args->scratch;
    run.partials = (float *)(run.scratch + workers * run.scratch_bytes);
    parallel(&run, false);
    parallel(&run, true);
    return ATTN_OK;
}

attn_status simd_attend(const struct attn_attend_args *args, struct attn_error *error)
{
    attn_status status = ATTN_OK;
    if (args != NULL && args->batch != NULL && args->k_cache != NULL && !no_work(args->batch) &&
        !(args->flags & ATTN_RUN_NO_WRITE)) {
        const struct attn_write_kv_args write = write_of_attend(args);
        status = simd_write_kv(&write, error);
    }
    return status == ATTN_OK ? run_attend(args, NULL, error) : status;
}

attn_status plan_attend(const struct attn_attend_args *args, const struct latent_parts *parts,
                        int32_t mode, struct attn_error *error)
{
    struct attend_problem problem;
    attn_status status = problem_init(&problem, args, parts, false, error);
    if (status != ATTN_OK) {
        return status;
    }
    if (args->schedule_host == NULL || args->limits == NULL) {
        return fail(error, ATTN_ERROR_INVALID_ARGUMENT, args->limits ? "schedule_host" : "limits",
                    "NULL");
    }
    (void)mode; /* lengths are readable in every mode: each is a fresh schedule */
    struct attend_schedule *schedule = args->schedule_host;
    int32_t num_threads = args->instance->host->num_threads;
    if (no_work(args->batch)) {
        schedule->num_items = 0;
        schedule->num_merges = 0;
        return ATTN_OK;
    }
    return schedule_make(&problem, args->limits, schedule, num_threads, error);
}
