/* SPDX-License-Identifier: Apache-2.0 */
/* cpu_ref as the backend "cpu_ref_checked": its kernels compare what they have written with the
 * formulas in float64 and fail where it is wrong, so that every case of attn-check holds cpu_ref to
 * them. Nothing of a plugin or of the core is included here, no header either. */
#ifndef CPU_REF_CHECKED_H
#define CPU_REF_CHECKED_H

#include <attn/draft/compressor.h>
#include <attn/indexer.h>
#include <attn/plugin.h>
#include <stdbool.h>

/* cpu_ref's own kernels */
extern const struct attn_kernels *const cpu_ref_kernels;

/* Indexers' lists and compressors' rows are held to their formulas by attn-check's own cases. */
static inline bool attends(const struct attn_layer_desc *layer)
{
    return layer->kind != ATTN_LAYER_INDEXER && layer->kind != ATTN_LAYER_DRAFT_COMPRESSOR;
}

/* What cpu_ref wrote is not what the formula says: fills *error (may be NULL) and returns its
 * status. */
attn_status checked_wrong(struct attn_error *error, const char *what, int64_t row, int64_t head,
                          int64_t dim, double found, double wanted);
/* A comparison stands between these two, one at a time: a step may not allocate, so the memory is
 * the plugin's own. */
void checked_begin(void);
void checked_end(void);
/* `count` zeros that live until checked_clear or checked_end. */
double *checked_memory(int64_t count);
void checked_clear(void);

/* Whether a number of a dtype (enum attn_dtype_id) is `wanted`, rounded from `slack` around it. */
bool checked_near(double found, double wanted, double slack, int32_t dtype);
double checked_rms(const double *row, int64_t count);

/* Element [i, j, first ..] of a tensor on, `count` of them. */
void tensor_load(const struct attn_tensor *tensor, int64_t i, int64_t j, int64_t first,
                 int64_t count, double *row);
int32_t tensor_dtype(const struct attn_tensor *tensor);
/* Bytes of element d of a view's row. */
uint8_t *view_element(const struct attn_kv_view *view, int64_t block, int64_t slot, int64_t head,
                      int64_t d, int32_t dtype);
/* A scale per tensor or head: the device's, else the host's, of which 0 reads as 1. */
double head_scale(const float *device, float host, int32_t form, int64_t head);
const void *extension(const struct attn_ext *next, uint32_t id);
/* The dtype of K's or V's cache. */
static inline int32_t layer_dtype(const struct attn_layer_desc *layer, bool value)
{
    return value && layer->kv_dtype_v != 0 ? layer->kv_dtype_v : layer->kv_dtype;
}

/* rows.c. One slot and head of a cache of any kv_dtype. */
struct cache_row {
    const struct attn_layer_desc *layer;
    const struct attn_layer_params *params;
    const struct attn_kv_view *view;
    bool value;
    int64_t block, slot, head;
};
/* What it reads as. */
void row_load(const struct cache_row *row, double *x);
/* Whether it holds the row that was given for a token, to the bit. */
attn_status row_hold(const struct cache_row *row, int64_t token, const double *given,
                     struct attn_error *error);

/* e2m1: its number, and the nearest code, the even one of two. */
double number_from_e2m1(uint32_t code);
uint32_t number_to_e2m1(double x);

/* attend.c, write.c, delta.c, kernels.c: cpu_ref's kernel, then the comparison. */
attn_status checked_attend(const struct attn_attend_args *args, struct attn_error *error);
attn_status checked_attend_mla(const struct attn_attend_args *args, struct attn_error *error);
attn_status checked_attend_mla_sparse(const struct attn_attend_args *args,
                                      struct attn_error *error);
attn_status checked_write_kv(const struct attn_write_kv_args *args, struct attn_error *error);
/* The comparison of checked_write_kv alone. */
attn_status checked_written(const struct attn_write_kv_args *args, struct attn_error *error);
attn_status checked_gated_delta(const struct attn_attend_args *args, struct attn_error *error);
attn_status checked_merge_states(const struct attn_merge_states_args *args,
                                 struct attn_error *error);
attn_status checked_rope_write_kv(const struct attn_write_kv_args *args, struct attn_error *error);
attn_status checked_gather_kv(const struct attn_gather_kv_args *args, struct attn_error *error);
attn_status checked_quantize(const struct attn_quantize_args *args, struct attn_error *error);
attn_status checked_amax(const struct attn_amax_args *args, struct attn_error *error);
attn_status checked_batched_gemm(const struct attn_batched_gemm_args *args,
                                 struct attn_error *error);

#endif
