/* SPDX-License-Identifier: Apache-2.0 */
/* A roofline and a curve over the length, drawn by gnuplot, which gets commands and data through a
 * pipe. */
#ifndef BENCH_PLOT_H
#define BENCH_PLOT_H

#include "report.h"

/* Whether gnuplot is there and the file can be written; asked before anything is measured. */
bool plot_possible(const char *path, struct attn_error *error);
attn_status plot_write(const struct report *report, const struct session *session, const char *path,
                       struct attn_error *error);

#endif
