/* SPDX-License-Identifier: Apache-2.0 */
/* What the parts of gated_delta share: one call's tensors and one request's place in them. */
#ifndef CPU_REF_GDN_H
#define CPU_REF_GDN_H

#include <attn/gdn.h>

#include "reference.h"

#define GDN_MAX_HEAD_SIZE 512
#define GDN_MAX_CONV_WIDTH 64
#define GDN_MAX_DRAFTED 1024
#define GDN_CHUNK 64 /* tokens of a chunk at most; a larger chunk_size is run in pieces */
#define GDN_TILE 32  /* rows of S that are worked on at a time; they are independent */

struct gdn {
    const struct attn_attend_args *args;
    const struct attn_gdn_desc *desc;
    const struct attn_gdn_weights *weights;
    const struct attn_batch_gdn *states;
    const struct attn_io_gdn *io;
    int64_t num_channels; /* 2 Hk Dk + Hv Dv, in the order q, k, v */
};

/* One request of a step. */
struct gdn_request {
    int32_t index;
    int64_t first_row;
    int64_t num_tokens;
    const int32_t *slots; /* of its states */
    int32_t from;         /* the number of the state that it starts from */
    bool has_state;       /* else it starts from zeros */
    bool keeps_all;       /* speculative: a state per token */
};

struct gdn gdn_of(const struct attn_attend_args *args);
/* false: nothing is to be done for it */
bool gdn_request_of(const struct gdn *gdn, int32_t index, struct gdn_request *request);

/* gdn_inputs.c: q (scaled), k and rows first_row .. + count - 1 of v of token t, as the delta rule
 * takes them; the gates e^g and beta. */
void gdn_load_qk(const struct gdn *gdn, const struct gdn_request *request, int64_t t, int32_t head,
                 double *q, double *k);
void gdn_load_v(const struct gdn *gdn, const struct gdn_request *request, int64_t t, int32_t head,
                int32_t first_row, int32_t count, double *v);
void gdn_load_gates(const struct gdn *gdn, const struct gdn_request *request, int64_t t,
                    int32_t head, double *decay, double *beta);
/* The window of one channel after the step. */
void gdn_roll_window(const struct gdn *gdn, const struct gdn_request *request, int64_t channel);

/* gdn_arguments.c */
attn_status check_gated_delta(const struct attn_attend_args *args, struct attn_error *error);

#endif
