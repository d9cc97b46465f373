/* SPDX-License-Identifier: Apache-2.0 */
/* `--tune`: times on file, by which the core's selections then go for that device, shape and phase.
 * With `--model`: every backend that can serve a model's layers, by phase and bucket, within a
 * budget, and what selections choose before and after. */
#ifndef BENCH_TUNE_H
#define BENCH_TUNE_H

#include "common/model_config.h"

#include "report.h"

/* Shapes that a layer's rank can come from. */
bool tune_takes(enum shape_kind_code kind);
/* Writes the measured results to `<cache directory>/ranks` next to what stands there; `path` gets
 * the file's name. */
attn_status tune_write(const struct report *report, const struct session *session, char *path,
                       size_t size, struct attn_error *error);

/* Measures the shape on the named backends in turns and adds a result for each to the report. */
typedef void tune_measure(void *user, const struct bench_shape *shape, const char *const *backends,
                          int32_t count);

struct tuning {
    struct model_config config;
    struct tuned *items; /* a sort of layer and a phase each */
    int32_t count;
};

/* Reads the model. Sets the options' dtype to the model's, and their budget for one measurement. */
attn_status tuning_init(struct tuning *tuning, struct options *options, struct attn_error *error);
void tuning_finish(struct tuning *tuning);

void tuning_run(struct tuning *tuning, const struct session *session, struct report *report,
                tune_measure *measure, void *user);

/* Once the times are on file: for each sort of layer and phase what declared ranks choose, what
 * times choose, and the gain; to report->choices. */
attn_status tuning_compare(const struct tuning *tuning, const struct session *session,
                           struct report *report, struct attn_error *error);

#define MAX_TUNED_BACKENDS 64
/* Names and indices of the first `most` backends of the device that fit --backend and are not left
 * out (NULL: none is). */
int32_t tune_backends(const struct session *session, const bool *left_out, int32_t most,
                      char names[][BACKEND_SIZE], int32_t *indices);

#endif
