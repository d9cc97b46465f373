/* SPDX-License-Identifier: Apache-2.0 */
/* The two backends of a case, how it ended and why, and how long its kernels take. */
#ifndef CHECK_TRIAL_H
#define CHECK_TRIAL_H

#include <stdbool.h>

#include "common/device.h"
#include "harness/backend.h"

enum trial_result { TRIAL_PASSED, TRIAL_FAILED, TRIAL_SKIPPED };

struct trial {
    struct backend *reference;
    struct backend *tested;
    const struct device *device;
    struct core *core;                          /* has the tested backend, too */
    char message[ATTN_ERROR_MESSAGE_SIZE + 80]; /* why it failed or was skipped */
    bool concurrent; /* another thread runs at the same time: its allocations cannot be
                        distinguished */
    bool bench;      /* cases that pass are timed */
    double us;       /* what the case's kernels take; 0: not timed */
};

/* Keeps the message and gives `result`. */
#if defined(__GNUC__)
__attribute__((format(printf, 3, 4)))
#endif
enum trial_result
trial_say(struct trial *trial, enum trial_result result, const char *format, ...);
/* A call of the backend gave `status`; names it and the backend's own text. */
enum trial_result trial_call_failed(struct trial *trial, const char *what, attn_status status,
                                    const struct attn_error *error);

/* Each ends the function: with a failure where `broken` holds; with one where the call returns an
 * error; with what the call returns unless that is TRIAL_PASSED. */
#define TRIAL_FAIL_IF(trial, broken, ...)                                                          \
    do {                                                                                           \
        if (broken) {                                                                              \
            return trial_say(trial, TRIAL_FAILED, __VA_ARGS__);                                    \
        }                                                                                          \
    } while (0)
#define TRIAL_CALL(trial, what, call, error)                                                       \
    do {                                                                                           \
        const attn_status status_ = (call);                                                        \
        if (status_ != ATTN_OK) {                                                                  \
            return trial_call_failed(trial, what, status_, error);                                 \
        }                                                                                          \
    } while (0)
#define TRIAL_TRY(call)                                                                            \
    do {                                                                                           \
        const enum trial_result result_ = (call);                                                  \
        if (result_ != TRIAL_PASSED) {                                                             \
            return result_;                                                                        \
        }                                                                                          \
    } while (0)

/* What the device's memory holds once everything on it is done, to be freed; NULL, with a message,
 * where it cannot be read. */
uint8_t *trial_read(struct trial *trial, const struct device *device, const void *memory,
                    size_t bytes);

/* A call of the backend was refused as unsupported: the case is skipped, with its text if there is
 * any. */
enum trial_result trial_call_refused(struct trial *trial, const struct attn_error *error);

/* What the backend's own `supports` says; its last reason is kept. */
bool trial_supports(struct trial *trial, const struct backend *backend,
                    const struct attn_layer_desc *layer, int32_t phase);

/* The result of a case of this layer that was called or refused: a refusal of batch_invariant 2 is
 * a failure where the backend declares it. Not called for states of 16 bits, which may be refused.
 */
enum trial_result trial_of_layer(struct trial *trial, const struct attn_layer_desc *layer,
                                 enum trial_result result);

/* How long a case's kernel takes: `attn-check --bench`. */
#define STOPWATCH_MAX_RUNS 31

/* While a backend has one, it times the kernels that are called between begin and end. */
struct stopwatch {
    const struct device *device;
    double begun_at;
    double run_seconds; /* the kernels of this run */
    double runs[STOPWATCH_MAX_RUNS];
    int32_t num_runs;
    bool capturing; /* the call is recorded as a graph, which is timed in its place */
    bool no_graphs; /* the device has none, or the kernel cannot be captured */
};

/* Around one call of a kernel; without a stopwatch they do nothing. */
void stopwatch_begin(struct backend *backend, void *stream);
void stopwatch_end(struct backend *backend, void *stream);

/* With --bench: runs the case's call, with its kernels in it, again and again. The trial gets the
 * median of a run's kernels; no time where a run calls none. A run that fails fails the case. */
typedef attn_status stopwatch_run(void *user, struct attn_error *error);
enum trial_result stopwatch_trial(struct trial *trial, stopwatch_run *run, void *user);

#endif
