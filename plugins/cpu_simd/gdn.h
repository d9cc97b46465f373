/* SPDX-License-Identifier: Apache-2.0 */
/* What the parts of gated_delta share: one call's tensors, a request's place in them, and a
 * worker's memory. */
#ifndef CPU_SIMD_GDN_H
#define CPU_SIMD_GDN_H

#include "internal.h"

#define GDN_MAX_HEAD_SIZE 512
#define GDN_MAX_CONV_WIDTH 64
#define GDN_MAX_DRAFTED 1024
#define GDN_CHUNK 64 /* tokens of a chunk at most; a larger chunk_size is run in pieces */

struct gdn {
    const struct attn_attend_args *args;
    const struct attn_gdn_desc *desc;
    const struct attn_gdn_weights *weights;
    const struct attn_batch_gdn *states;
    const struct attn_io_gdn *io;
    const struct variant *variant;
    int64_t num_channels; /* 2 Hk Dk + Hv Dv, in the order q, k, v */
    int32_t activation;   /* enum element_type */
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

/* A worker's memory: rows are padded to COLUMN_MULTIPLE floats, with zeros. */
struct gdn_scratch {
    int32_t depth; /* padded Dk */
    int32_t width; /* padded Dv */
    float *q;      /* [C, depth], scaled */
    float *k;      /* [C, depth] */
    float *v;      /* [C, width]; r of the chunk replaces it */
    float *o;      /* [C, width] */
    float *kt;     /* [depth, C]: k transposed */
    float *kw;     /* [depth, C]: kt times decays */
    float *kk;     /* [C, C]: k k^T */
    float *qk;     /* [C, C]: q k^T */
    float *d;      /* [C, C]: decay from behind token j to token t */
    float *state;  /* [depth, width]: S transposed; of a step S itself */
    float *raw;    /* [conv_width - 1 + C, wider of both]: inputs of the convolution */
    float *taps;   /* [conv_width + 1, wider]: weights, then the bias */
    float decay[GDN_CHUNK];
    float beta[GDN_CHUNK];
    float e[GDN_CHUNK]; /* decay from the chunk's beginning through token t */
};

/* gdn.c */
struct gdn gdn_of(const struct attn_attend_args *args);
/* false: nothing is to be done for it */
bool gdn_request_of(const struct gdn *gdn, int32_t index, struct gdn_request *request);

/* gdn_inputs.c: rows of `count` tokens from `first` on, as the delta rule takes them */
void gdn_load_qk(const struct gdn *gdn, const struct gdn_request *request, int64_t first,
                 int32_t count, int32_t head, struct gdn_scratch *scratch);
void gdn_load_v(const struct gdn *gdn, const struct gdn_request *request, int64_t first,
                int32_t count, int32_t head, struct gdn_scratch *scratch);
void gdn_load_gates(const struct gdn *gdn, const struct gdn_request *request, int64_t first,
                    int32_t count, int32_t head, struct gdn_scratch *scratch);
/* The window of one channel after the step. */
void gdn_roll_window(const struct gdn *gdn, const struct gdn_request *request, int64_t channel);

/* gdn_arguments.c */
attn_status check_gated_delta(const struct attn_attend_args *args, struct attn_error *error);

#endif
