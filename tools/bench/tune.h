/* SPDX-License-Identifier: Apache-2.0 */
/* `--tune`: times on file, by which the core's selections then go for that device, shape and phase.
 */
#ifndef BENCH_TUNE_H
#define BENCH_TUNE_H

#include "report.h"

/* Shapes that a layer's rank can come from. */
bool tune_takes(enum shape_kind_code kind);
/* Writes the measured results to `<cache directory>/ranks` next to what stands there; `path` gets
 * the file's name. */
attn_status tune_write(const struct report *report, const struct session *session, char *path,
                       size_t size, struct attn_error *error);

#endif
