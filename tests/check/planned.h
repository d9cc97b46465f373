/* SPDX-License-Identifier: Apache-2.0 */
/* A schedule for cpu_ref, included by mutants of plugin.c: it keeps what an attend then uses. */
#ifndef OVERRUN
#define OVERRUN 0
#endif

struct plan_copy {
    const int32_t *block_table;
    int32_t num_reqs, seq_lens[64];
};
__attribute__((unused)) static struct plan_copy in_common; /* all plans share it */

static attn_status schedule_size(const struct attn_schedule_size_args *args,
                                 struct attn_schedule_size *size, struct attn_error *error)
{
    size->host_bytes = sizeof(struct plan_copy);
    size->device_bytes = 64;
    return ATTN_OK;
}

static attn_status schedule(const struct attn_attend_args *args, int32_t mode,
                            struct attn_error *error)
{
    struct plan_copy *copy = args->schedule_host;
    copy->block_table = args->batch->block_table;
    memset(args->workspace, 0, OVERRUN ? 64 + 1 : 0);
#if defined(KEEP_LENGTHS)
    if (KEEP_LENGTHS == &in_common || mode != ATTN_PLAN_REPLAY) {
        const int32_t *lens = args->batch->seq_lens;
        KEEP_LENGTHS->num_reqs = lens != NULL ? args->batch->num_reqs : 0;
        for (int32_t r = 0; r < KEEP_LENGTHS->num_reqs; r++) {
            KEEP_LENGTHS->seq_lens[r] = lens[r];
        }
    }
#endif
    return ATTN_OK;
}

__attribute__((unused)) static attn_status update(const struct attn_attend_args *args,
                                                  struct attn_error *error)
{
    return schedule(args, ATTN_PLAN_EAGER, error);
}

static attn_status planned_attend(const struct attn_attend_args *args, struct attn_error *error)
{
    struct plan_copy *copy = args->schedule_host;
    struct attn_batch batch = *args->batch;
    struct attn_attend_args changed = *args;
    changed.batch = &batch;
#if defined(KEEP_TABLE) || defined(IGNORE_UPDATES)
    batch.block_table = copy->block_table;
#elif defined(KEEP_LENGTHS)
    if (batch.seq_lens != NULL && KEEP_LENGTHS->num_reqs == batch.num_reqs) {
        batch.seq_lens = KEEP_LENGTHS->seq_lens;
    }
#endif
    (void)copy;
    return ref_attend(&changed, error);
}

#if defined(IGNORE_UPDATES)
#define PLANNED                                                                                    \
    .schedule_size = schedule_size, .schedule = schedule,                                          \
    .update_block_table = ref_update_block_table
#else
#define PLANNED .schedule_size = schedule_size, .schedule = schedule, .update_block_table = update
#endif
