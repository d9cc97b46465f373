/* SPDX-License-Identifier: Apache-2.0 */
/* What was measured, as a document, a table or lines. */
#ifndef BENCH_REPORT_H
#define BENCH_REPORT_H

#include "common/find.h"
#include "common/json.h"

#include "session.h"
#include "timing.h"

/* One measured or refused shape. */
struct result {
    struct bench_shape shape;
    char backend[BACKEND_SIZE];
    struct timing timing;
    char error[1024];         /* empty: measured */
    struct json *reasons;     /* a refusal's: backend, phase, field, asked, supported; or NULL */
    struct json *dispatch;    /* what the core adds, in `dispatch`; or NULL */
    double ratio_to_baseline; /* 0: not compared with --baseline's */
    char regression[512];     /* why --baseline fails it; empty: it does not */
    double difference; /* the output's from the first one's, relative; negative: not compared */
    int32_t phase;
    int32_t kv_dtype;
    char rank_shape[160]; /* the layer as host/measurement.h names it; empty: no rank is written */
};

struct report {
    struct result *results;
    int32_t count;
    bool failed;           /* not all was measured, or ranks could not be kept */
    char ranks_file[4096]; /* that --tune wrote; empty: none */
    struct json *choices;  /* before and after --tune --model, see tune.h; or NULL */
    char *baseline;        /* the text of --baseline's file; or NULL */
};

void report_finish(struct report *report);
/* Takes over what `result` owns. */
void report_add(struct report *report, const struct result *result);
/* Whether every shape was measured, at or above its floor. */
bool report_all_good(const struct report *report);
/* Parts of the results become parts of the document: once. */
void report_json(struct report *report, const struct session *session);
void report_text(const struct report *report, const struct session *session);
void report_csv(const struct report *report, const struct session *session);

/* --baseline, what an earlier run recorded by --csv: times over the floors of their own runs are
 * compared, so that a ceiling that has changed is no slower kernel. */
attn_status baseline_read(struct report *report, const char *path, struct attn_error *error);
/* Sets ratio_to_baseline of a result that was measured, and `regression` where it takes longer by
 * more than both spreads and a twentieth, or where the file lacks it. */
void baseline_compare(const struct report *report, struct result *result,
                      const struct session *session);

/* plot.c: a roofline and a curve over the length, drawn by gnuplot. Whether it is there and the
 * file can be written; asked before anything is measured. */
bool plot_possible(const char *path, struct attn_error *error);
attn_status plot_write(const struct report *report, const struct session *session, const char *path,
                       struct attn_error *error);

#endif
