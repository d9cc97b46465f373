/* SPDX-License-Identifier: Apache-2.0 */
/* What a run costs in the core: nanoseconds and instructions of a decode over a backend that
 * returns at once, without and with the step's keys. Where the processor's counter is closed to the
 * process, callgrind counts 20,001,000 calls: --toggle-collect=run_attends, or run_writes. */
#include <linux/perf_event.h>
#include <stdio.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "common/seconds.h"
#include "fixture.h"
#include "support/test.h"

enum { CALLS = 1000, ROUNDS = 20000 };

static inline attn_status run_calls(struct fixture *f)
{
    attn_status status = ATTN_OK;
    for (int32_t i = 0; i < CALLS && status == ATTN_OK; i++) {
        status = fixture_run(f);
    }
    return status;
}

/* By their names callgrind tells them apart. */
static attn_status __attribute__((noinline)) run_attends(struct fixture *f)
{
    return run_calls(f);
}

static attn_status __attribute__((noinline)) run_writes(struct fixture *f)
{
    return run_calls(f);
}

/* Instructions of one call in this thread; negative where there is no counter. */
static double count_instructions(struct fixture *f, attn_status (*run)(struct fixture *))
{
    struct perf_event_attr attributes = {.size = sizeof attributes,
                                         .config = PERF_COUNT_HW_INSTRUCTIONS,
                                         .disabled = 1,
                                         .exclude_kernel = 1,
                                         .exclude_hv = 1};
    int counter = (int)syscall(SYS_perf_event_open, &attributes, 0, -1, -1, 0);
    uint64_t count = 0;
    if (counter < 0) {
        return -1;
    }
    ioctl(counter, PERF_EVENT_IOC_ENABLE, 0);
    CHECK(f, run(f));
    ioctl(counter, PERF_EVENT_IOC_DISABLE, 0);
    assert_int_equal(read(counter, &count, sizeof count), sizeof count);
    close(counter);
    return (double)count / CALLS;
}

TEST(run_cost)
{
    for (int32_t write = 0; write < 2; write++) {
        static const int32_t queries[] = {1}, lens[] = {8};
        attn_status (*const run)(struct fixture *) = write ? run_writes : run_attends;
        OWNED(fixture_finish) struct fixture f;
        double least = 1;
        fixture_init(&f, "example", &(struct attn_layer_desc){.causal = 1}, queries, lens, 1, 0,
                     NULL, false);
        f.io.lse = NULL;
        if (!write) {
            f.io.flags = ATTN_RUN_NO_WRITE;
            f.batch.slot_mapping = NULL;
            f.batch.num_slots = 0;
        }
        CHECK(&f, fixture_batch(&f));
        for (int32_t i = 0; i < ROUNDS; i++) {
            const double begin = seconds_of(CLOCK_MONOTONIC);
            CHECK(&f, run(&f));
            const double took = seconds_of(CLOCK_MONOTONIC) - begin;
            least = took < least ? took : least;
        }
        const double instructions = count_instructions(&f, run);
        printf("%s: %.1f ns", write ? "write and attend" : "attend", 1e9 * least / CALLS);
        instructions < 0 ? puts(", instructions not counted")
                         : printf(", %.0f instructions\n", instructions);
    }
}
