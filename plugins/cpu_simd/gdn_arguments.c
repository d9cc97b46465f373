/* SPDX-License-Identifier: Apache-2.0 */
/* What gated_delta checks before it reads. */
#include "gdn.h"

#define BAD(field, ...) plugin_error(error, ATTN_ERROR_INVALID_ARGUMENT, field, __VA_ARGS__)

/* f16, bf16 or f32 of so many dimensions, the last of which is as wide as asked */
static attn_status check_shape(const struct attn_tensor *tensor, const char *name, int32_t ndim,
                               int64_t rows, int64_t heads, int64_t columns, bool contiguous,
                               struct attn_error *error)
{
    if (tensor == NULL || tensor->data == NULL || tensor->shape == NULL || tensor->ndim != ndim) {
        return BAD(name, "NULL or not of %d dimensions", ndim);
    }
    int32_t element = element_of_any(tensor);
    if (element < 0 || element > ELEMENT_BF16) {
        return BAD(name, "dtype code %d of %d bits; f16, bf16 or f32", tensor->dtype.code,
                   tensor->dtype.bits);
    }
    if (tensor->shape[0] < rows || tensor->shape[ndim - 1] != columns ||
        (ndim == 3 && tensor->shape[1] != heads)) {
        return BAD(name, "%lld rows of %lld; at least %lld of %lld are needed, of %lld heads each",
                   (long long)tensor->shape[0], (long long)tensor->shape[ndim - 1], (long long)rows,
                   (long long)columns, (long long)heads);
    }
    if (contiguous && tensor_stride(tensor, ndim - 1) != 1) {
        return BAD(name, "the last dimension has stride %lld, not 1",
                   (long long)tensor_stride(tensor, ndim - 1));
    }
    return ATTN_OK;
}

static attn_status check_weights(const struct gdn *gdn, struct attn_error *error)
{
    const struct attn_recurrent_weights *w = gdn->weights;
    if (w == NULL || w->a_log == NULL || w->dt_bias == NULL) {
        return BAD(
            "attn_recurrent_weights", "is not on the parameters, or a_log %p or dt_bias %p is NULL",
            w != NULL ? (const void *)w->a_log : NULL, w != NULL ? (const void *)w->dt_bias : NULL);
    }
    if (gdn->desc->conv_width == 0) {
        return ATTN_OK;
    }
    attn_status status = check_shape(w->conv_weight, "conv_weight", 2, gdn->num_channels, 1,
                                     gdn->desc->conv_width, false, error);
    if (status == ATTN_OK && w->conv_bias != NULL) {
        status = check_shape(w->conv_bias, "conv_bias", 1, 0, 1, gdn->num_channels, false, error);
    }
    return status;
}

static attn_status check_io(const struct gdn *gdn, struct attn_error *error)
{
    const struct attn_attend_args *args = gdn->args;
    const struct attn_recurrent_desc *g = gdn->desc;
    int64_t rows = args->batch->num_actual_tokens;
    int64_t hk = g->num_k_heads, hv = g->num_v_heads;
    attn_status status = ATTN_OK;
    if (gdn->io == NULL) {
        return BAD("attn_io_recurrent", "is not on the run");
    }
    if (g->conv_width > 0) {
        status = check_shape(gdn->io->mixed_qkv, "mixed_qkv", 2, rows, 1, gdn->num_channels, true,
                             error);
    } else {
        status = check_shape(args->q, "q", 3, rows, hk, g->head_size_k, true, error);
        status =
            status ? status : check_shape(args->k, "k", 3, rows, hk, g->head_size_k, true, error);
        status =
            status ? status : check_shape(args->v, "v", 3, rows, hv, g->head_size_v, true, error);
    }
    status = status ? status : check_shape(gdn->io->a, "a", 2, rows, 1, hv, false, error);
    status = status ? status : check_shape(gdn->io->b, "b", 2, rows, 1, hv, false, error);
    return status ? status
                  : check_shape(args->out, "out", 3, rows, hv, g->head_size_v, true, error);
}

attn_status check_gated_delta(const struct attn_attend_args *args, struct attn_error *error)
{
    if (args->instance == NULL || args->params == NULL) {
        return BAD(args->instance == NULL ? "instance" : "params", "is NULL");
    }
    attn_status status = gdn_check_desc(args->layer, error);
    if (status != ATTN_OK) {
        return status;
    }
    if (args->batch == NULL || args->batch->query_start_loc == NULL || args->batch->num_reqs < 0) {
        return BAD("batch", "gated_delta needs a batch with query_start_loc");
    }
    struct gdn gdn = gdn_of(args);
    status = check_weights(&gdn, error);
    status = status ? status : check_io(&gdn, error);
    status = status ? status : gdn_check_memory(&gdn, error);
    return status ? status : gdn_check_slots(&gdn, error);
}
