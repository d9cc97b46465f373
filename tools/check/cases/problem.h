/* SPDX-License-Identifier: Apache-2.0 */
/* One attend with its inputs in an image, and its arguments bound to any copy of that image. */
#ifndef CHECK_PROBLEM_H
#define CHECK_PROBLEM_H

#include <attn/kernels.h>

#include "cases/lists.h"
#include "harness/image.h"
#include "harness/trial.h"

#define PROBLEM_MAX_REQS 16
#define PROBLEM_LOOSE_ROWS 40  /* host bounds may be so many rows more than all requests have */
#define PROBLEM_LOOSE_KEYS 7   /* and so many keys more than one request has */
#define PROBLEM_TREE_WIDTH 160 /* most queries of a request */

struct request {
    int32_t query_len;
    int32_t seq_len; /* keys, the step's own included; without a cache: keys */
};

/* Offsets of the buffers in the image. */
struct problem_buffers {
    size_t q, k, v, out, lse;
    size_t cache, cache_scales, cache_end;
    size_t context_k, context_v, context_slots;
    size_t query_start_loc, key_start_loc, seq_lens, block_table, block_table_row, slot_mapping;
    size_t other_table; /* valid blocks of no request */
    size_t other_slots; /* every row skipped */
    size_t logits_indices;
    size_t causal, sinks, alibi_slopes, sink_k, sink_v;
    size_t q_scale, k_scale, v_scale, p_scale, signs_k, signs_v, channel_scale;
    size_t spans, span_start_loc, tree;
    size_t codes, code_scales, code_scale;
    size_t indices, list_lengths;
};

struct check_problem {
    const struct case_space *space;
    struct factor_value v[FACTOR_COUNT];
    int32_t shape, dtype, hq, hk, d, dv, block_size; /* some of these values */
    struct case_output output;
    struct case_lists lists;
    int32_t prompts;
    struct lists_shape lists_shape;
    struct image image;
    struct problem_buffers at;
    struct request requests[PROBLEM_MAX_REQS];
    int32_t num_reqs;
    int32_t first_row;         /* row of the first request; rows before it are another's */
    int32_t num_tokens;        /* rows of q and out, padding rows included */
    int32_t num_actual_tokens; /* end of the last request's rows */
    int32_t num_keys;          /* rows of k and v, first_row included */
    int32_t num_context;
    int32_t num_spans;
    int32_t shared; /* leading keys of all requests that lie in the same blocks */
    int32_t num_logits;
    int32_t q_dtype; /* enum attn_dtype_id of q */
    int64_t num_blocks;
    int64_t table_stride;
    int32_t phase;
    bool paged;
};

/* A buffer in the initial image. */
#define PROBLEM_AT(p, type, buffer) ((type *)(void *)((p)->image.bytes + (p)->at.buffer))

/* An output that is codes. */
struct output_binding {
    struct attn_tensor codes, scales;
    struct attn_io_output_quant quant;
    int64_t shape[3], strides[3], scale_shape[2];
};

/* The arguments over one copy of the image. Host arrays stay in the initial image. */
struct binding {
    struct attn_layer_desc layer;
    struct attn_layer_params params;
    struct attn_kv_quant_params quant;
    struct attn_batch batch;
    struct attn_kv_view k_cache, v_cache;
    struct attn_tensor q, k, v, out, lse, sink_k, sink_v, context_k, context_v;
    int64_t shapes[9][3], strides[9][3];
    struct output_binding output;
    struct lists_binding lists;
    struct attn_attend_args attend;
    struct attn_write_kv_args write;
    struct attn_write_kv_args write_context;
};

/* problem.c. Random inputs with logits of standard deviation 4 and a needle per request and head.
 * The cache's context is not filled yet: the reference writes it (binding.write_context).
 * image_finish of its image is due. */
void problem_init(struct check_problem *problem, const struct case_space *space,
                  const struct attend_case *attend_case, uint64_t seed);
/* Keys of a request that are in the cache before the step. */
static inline int32_t problem_context(const struct check_problem *p, int32_t r)
{
    const struct request *request = &p->requests[r];
    int32_t own = p->shape == SHAPE_CROSS ? 0 : request->query_len;
    return p->paged && request->seq_len > own ? request->seq_len - own : 0;
}
/* Elements between rows: contiguous, or slices of a wider fused tensor. */
static inline int64_t problem_row_elements(const struct check_problem *p, int32_t heads,
                                           int32_t head_size)
{
    return (int64_t)heads * head_size * (p->v[FACTOR_STRIDES].a ? 2 : 1);
}

/* fill.c */
void problem_fill(struct check_problem *problem, uint64_t *random);

/* bind.c. `base` is the copy's address in the memory of `device`; `host` an equal copy that the
 * host can read. */
void problem_bind(const struct check_problem *problem, struct binding *binding, uint8_t *base,
                  uint8_t *host, struct attn_device device);

/* output.c. Attends whose output is codes (enum attn_output_form), which the backend declares to
 * write. */
#define CASE_OUTPUTS 6
extern const struct case_output case_outputs[CASE_OUTPUTS];

/* Whether the form is declared and its groups divide the case's rows. */
bool case_output_fits(const struct case_space *space, const struct attend_case *c,
                      const struct case_output *output);
/* "fp8_group_64.pow2", at most `size` bytes. */
void case_output_name(const struct case_output *output, char *name, size_t size);

/* Adds the buffers of codes to a problem's image, if it has some. */
void output_add(struct check_problem *p);
/* The tested side's layer and arguments then ask for codes, over its copy of the image at `base`;
 * `b` keeps what they point at. The reference goes on writing numbers. */
void output_bind(const struct check_problem *p, struct output_binding *b,
                 struct attn_layer_desc *layer, struct attn_attend_args *args, uint8_t *base,
                 struct attn_device device);
/* Bytes of a row of codes: rows are slices of wider ones where the case's are. */
int64_t output_row_bytes(const struct check_problem *p);
/* Compares codes and scales with the reference's numbers in `out`, for rows whose rows[t] is set.
 */
enum trial_result verify_codes(struct trial *trial, const struct check_problem *p,
                               const struct attn_tensor *out, const uint8_t *rows,
                               const uint8_t *expected, const uint8_t *found);
/* Clears codes and scales of the batch's rows without rows[t] in an image that was read back: of
 * rows that a fast prefill was not asked for, codes may be of anything. */
void output_forget(const struct check_problem *p, const uint8_t *rows, uint8_t *found);

#endif
