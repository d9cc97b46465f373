/* SPDX-License-Identifier: Apache-2.0 */
/* What the parts of recurrent layers share. */
#ifndef CPU_REF_GDN_H
#define CPU_REF_GDN_H

#include "common/recurrent.h"
#include "reference.h"

#define GDN_TILE 8 /* rows of S that are worked on at a time; they are independent */

/* gdn_inputs.c: q (scaled), k and rows first_row .. + count - 1 of v of token t, as the rule
 * takes them; the gates g, one or one of each of Dk columns, and beta. */
void gdn_load_qk(const struct gdn *gdn, const struct gdn_request *request, int64_t t, int32_t head,
                 double *q, double *k);
void gdn_load_v(const struct gdn *gdn, const struct gdn_request *request, int64_t t, int32_t head,
                int32_t first_row, int32_t count, double *v);
void gdn_load_gates(const struct gdn *gdn, const struct gdn_request *request, int64_t t,
                    int32_t head, double *g, double *beta);
/* The window of one channel after the step, and at its checkpoints. */
void gdn_roll_window(const struct gdn *gdn, const struct gdn_request *request, int64_t channel);

#endif
