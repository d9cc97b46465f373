/* SPDX-License-Identifier: Apache-2.0 */
/* Mistakes of what is shared: by plans that are alive together, by threads. */
#include <stdatomic.h>
#include <string.h>
#include <time.h>

#include "mutants.h"

/* The last plan's lengths, whichever plan runs. */
static struct kept last_plan;

static void keep_in_common(const struct attn_attend_args *args, int32_t mode, struct kept *kept)
{
    last_plan.num_reqs = 0;
    if (args->batch->seq_lens != NULL) {
        last_plan.num_reqs = args->batch->num_reqs;
        memcpy(last_plan.seq_lens, args->batch->seq_lens,
               (size_t)args->batch->num_reqs * sizeof *last_plan.seq_lens);
    }
}

static void use_common(struct mutable_args *m, const struct kept *kept)
{
    if (m->batch.seq_lens != NULL && last_plan.num_reqs == m->batch.num_reqs) {
        memcpy(m->seq_lens, last_plan.seq_lens, sizeof m->seq_lens);
        m->batch.seq_lens = m->seq_lens;
    }
}

/* Scratch memory of the library: two attends at once spoil each other's result. Each waits up to
 * half a second for the other thread's until two have met, so that the busiest machine sees it. */
static atomic_int inside;
static atomic_bool met;

static void enter_scratch(struct mutable_args *m)
{
    atomic_fetch_add(&inside, 1);
    for (int32_t ms = 0; ms < 500 && !atomic_load(&met); ms++) {
        nanosleep(&(struct timespec){0, 1000000}, NULL);
        if (atomic_load(&inside) > 1) {
            atomic_store(&met, true);
        }
    }
}

static void leave_scratch(const struct attn_attend_args *args)
{
    if (atomic_fetch_sub(&inside, 1) > 1) {
        size_t row = (size_t)args->out->strides[0] * args->out->dtype.bits / 8;
        memset((uint8_t *)args->out->data + (size_t)args->batch->query_start_loc[0] * row, 0x3a,
               args->out->dtype.bits / 8);
    }
}

static const struct mutant mutants[] = {
    {.name = "mutant_plans_share", .plan = keep_in_common, .planned = use_common},
    {.name = "mutant_threads_share", .before = enter_scratch, .after = leave_scratch},
};
const struct mutant_list shared_mutants = {mutants, sizeof mutants / sizeof *mutants};
