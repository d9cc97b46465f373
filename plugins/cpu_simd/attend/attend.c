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

/* A slice may hold several of the loop's places: the first one drains the schedule. */
static void attend_body(void *argument, int64_t begin, int64_t end, int32_t worker)
{
    struct attend_loop *loop = argument;
    const struct attend_run *run = loop->run;
    const struct attend_schedule *schedule = run->schedule;
    const struct variant *variant = run->problem.instance->variant;
    struct attend_scratch scratch;
    place_scratch(&scratch, run->scratch + (size_t)worker * run->scratch_bytes, &run->problem.shape,
                  schedule->needs.rows);
    int32_t count = loop->merging ? schedule->num_merges : schedule->num_items;
    enter_variant(variant);
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
    leave_variant(variant);
}

static void parallel(const struct attend_run *run, bool merging)
{
    const struct attn_instance *instance = run->problem.instance;
    int32_t count = merging ? run->schedule->num_merges : run->schedule->num_items;
    struct attend_loop loop = {.run = run, .merging = merging};
    atomic_init(&loop.next, 0);
    if (count > 0) {
        run_parallel(instance, min_i32(count, instance->host->num_threads), 1, attend_body, &loop);
    }
}

attn_status run_attend(const struct attn_attend_args *args, const struct latent_parts *parts)
{
    struct attend_run run = {.args = args, .schedule = args->schedule_host};
    struct attend_scratch scratch;
    problem_init(&run.problem, args, parts, true);
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
    if (args->k_cache != NULL && !(args->flags & ATTN_RUN_NO_WRITE)) {
        const struct attn_write_kv_args write = write_of_attend(args);
        simd_write_kv(&write, error); /* always ATTN_OK */
    }
    return run_attend(args, NULL);
}

attn_status plan_attend(const struct attn_attend_args *args, const struct latent_parts *parts,
                        struct attn_error *error)
{
    struct attend_problem problem;
    problem_init(&problem, args, parts, false);
    return schedule_make(&problem, args->limits, args->schedule_host,
                         args->instance->host->num_threads, error);
}
