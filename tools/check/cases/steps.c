/* SPDX-License-Identifier: Apache-2.0 */
#include "cases/steps.h"
#include "cases/attend.h"

#include <pthread.h>
#include <stdio.h>

#define CASES_EACH 12

struct thread_share {
    struct trial trial;
    const struct steps_variant *from;
    int32_t first;
    uint64_t seed;
    enum trial_result result;
};

static void *run_share(void *argument)
{
    struct thread_share *share = argument;
    share->result = TRIAL_SKIPPED;
    for (int32_t i = share->first; i < share->from->num_cases && i < 2 * CASES_EACH; i += 2) {
        enum trial_result result =
            trial_attend(&share->trial, share->from->space, &share->from->cases[i],
                         share->seed + (uint64_t)i, TRIAL_PLAIN);
        if (result == TRIAL_FAILED) {
            share->result = result;
            break;
        }
        share->result = result == TRIAL_PASSED ? result : share->result;
    }
    return NULL;
}

enum trial_result steps_two_threads(struct trial *trial, const void *variant, uint64_t seed)
{
    struct thread_share shares[2];
    pthread_t thread;
    for (int32_t i = 0; i < 2; i++) {
        shares[i] = (struct thread_share){*trial, variant, i, seed, TRIAL_SKIPPED};
        shares[i].trial.concurrent = true;
    }
    if (pthread_create(&thread, NULL, run_share, &shares[1]) != 0) {
        snprintf(trial->message, sizeof trial->message, "no thread could be started");
        return TRIAL_FAILED;
    }
    run_share(&shares[0]);
    pthread_join(thread, NULL);
    for (int32_t i = 0; i < 2; i++) {
        if (shares[i].result == TRIAL_FAILED) {
            *trial = shares[i].trial;
            trial->concurrent = false;
            return TRIAL_FAILED;
        }
    }
    return shares[0].result == TRIAL_PASSED && shares[1].result == TRIAL_PASSED ? TRIAL_PASSED
                                                                                : TRIAL_SKIPPED;
}
