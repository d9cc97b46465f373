/* SPDX-License-Identifier: Apache-2.0 */
/* ATTN_TRACE: what happens in a model as spans (host/trace_file.h). Its instances get a table whose
 * kernels are timed, and a step that is traced another entry to its runs: without a trace nothing
 * of this is on their way. */
#ifndef CORE_STEP_TRACE_H
#define CORE_STEP_TRACE_H

#include <attn/api.h>

/* Around the life of a model whose runtime has a trace. */
void trace_model_begin(attn_model *model);
void trace_model_end(attn_model *model);
/* Around the making of a plan. 0: it is not traced, nor are its runs. */
int64_t trace_plan_begin(attn_plan *plan, const char *name);
void trace_plan_end(attn_plan *plan, const char *name, int64_t begin, attn_status status);
/* Around what is no kernel of an instance. 0: this thread is in no step that is traced. */
int64_t trace_operation(const char *name);
void trace_operation_end(const char *name, int64_t begin);

#endif
