/* SPDX-License-Identifier: Apache-2.0 */
#include "cases/steps.h"
#include "cases/attend.h"

#include <pthread.h>
#include <stdio.h>

#define CASES_EACH 12

struct lane {
    struct trial trial;
    const struct steps_variant *from;
    int32_t first;
    uint64_t seed;
    enum trial_result result;
};

static void *run_lane(void *argument)
{
    struct lane *lane = argument;
    lane->result = TRIAL_SKIPPED;
    for (int32_t i = lane->first; i < lane->from->num_cases && i < 2 * CASES_EACH; i += 2) {
        enum trial_result result =
            trial_attend(&lane->trial, lane->from->space, &lane->from->cases[i],
                         lane->seed + (uint64_t)i, TRIAL_PLAIN);
        if (result == TRIAL_FAILED) {
            lane->result = result;
            break;
        }
        lane->result = result == TRIAL_PASSED ? result : lane->result;
    }
    return NULL;
}

enum trial_result steps_two_threads(struct trial *trial, const void *variant, uint64_t seed)
{
    struct lane lanes[2];
    pthread_t thread;
    for (int32_t i = 0; i < 2; i++) {
        lanes[i] = (struct lane){*trial, variant, i, seed, TRIAL_SKIPPED};
        lanes[i].trial.concurrent = true;
    }
    if (pthread_create(&thread, NULL, run_lane, &lanes[1]) != 0) {
        snprintf(trial->message, sizeof trial->message, "no thread could be started");
        return TRIAL_FAILED;
    }
    run_lane(&lanes[0]);
    pthread_join(thread, NULL);
    for (int32_t i = 0; i < 2; i++) {
        if (lanes[i].result == TRIAL_FAILED) {
            *trial = lanes[i].trial;
            trial->concurrent = false;
            return TRIAL_FAILED;
        }
    }
    return lanes[0].result == TRIAL_PASSED && lanes[1].result == TRIAL_PASSED ? TRIAL_PASSED
                                                                              : TRIAL_SKIPPED;
}
