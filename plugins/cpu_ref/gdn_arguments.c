/* SPDX-License-Identifier: Apache-2.0 */
/* What gated_delta checks before it reads. */
#include "common/number.h"
#include "common/tensors.h"
#include "gdn.h"

#define BAD(field, ...) plugin_error(error, ATTN_ERROR_INVALID_ARGUMENT, field, __VA_ARGS__)

static attn_status check_flat(const struct attn_tensor *tensor, const char *name, int64_t rows,
                              int64_t columns, bool contiguous, struct attn_error *error)
{
    attn_status status = check_tensor(tensor, name, 2, 0, 0, error);
    if (status == ATTN_OK && (tensor->shape[0] < rows || tensor->shape[1] != columns)) {
        status = BAD(name, "%s is [%lld, %lld], not [%lld or more, %lld]", name,
                     (long long)tensor->shape[0], (long long)tensor->shape[1], (long long)rows,
                     (long long)columns);
    }
    if (status == ATTN_OK && contiguous && tensor_stride(tensor, 1) != 1) {
        status = BAD(name, "the last dimension of %s has stride %lld, not 1", name,
                     (long long)tensor_stride(tensor, 1));
    }
    return status;
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
    attn_status status = check_flat(w->conv_weight, "conv_weight", gdn->num_channels,
                                    gdn->desc->conv_width, false, error);
    if (status == ATTN_OK && w->conv_bias != NULL) {
        status = check_tensor(w->conv_bias, "conv_bias", 1, 0, 0, error);
        if (status == ATTN_OK && w->conv_bias->shape[0] != gdn->num_channels) {
            status = BAD("conv_bias", "has %lld channels, not %lld",
                         (long long)w->conv_bias->shape[0], (long long)gdn->num_channels);
        }
    }
    return status;
}

static attn_status check_rows_3d(const struct attn_tensor *tensor, const char *name, int64_t rows,
                                 int64_t heads, int64_t size, struct attn_error *error)
{
    attn_status status = check_tensor(tensor, name, 3, heads, size, error);
    return status == ATTN_OK ? check_rows(tensor, name, rows, error) : status;
}

static attn_status check_io(const struct gdn *gdn, struct attn_error *error)
{
    const struct attn_attend_args *args = gdn->args;
    const struct attn_recurrent_desc *g = gdn->desc;
    int64_t rows = args->batch->num_actual_tokens;
    attn_status status = ATTN_OK;
    if (gdn->io == NULL) {
        return BAD("attn_io_recurrent", "is not on the run");
    }
    if (g->conv_width > 0) {
        status = check_flat(gdn->io->mixed_qkv, "mixed_qkv", rows, gdn->num_channels, true, error);
    } else {
        status = check_rows_3d(args->q, "q", rows, g->num_k_heads, g->head_size_k, error);
        status = status ? status
                        : check_rows_3d(args->k, "k", rows, g->num_k_heads, g->head_size_k, error);
        status = status ? status
                        : check_rows_3d(args->v, "v", rows, g->num_v_heads, g->head_size_v, error);
    }
    status = status ? status : check_flat(gdn->io->a, "a", rows, g->num_v_heads, false, error);
    status = status ? status : check_flat(gdn->io->b, "b", rows, g->num_v_heads, false, error);
    status = status ? status
                    : check_rows_3d(args->out, "out", rows, g->num_v_heads, g->head_size_v, error);
    if (status == ATTN_OK && number_dtype_name(args->out->dtype) > ATTN_DTYPE_F32) {
        status = plugin_error(error, ATTN_ERROR_UNSUPPORTED, "out",
                              "out has dtype code %d of %d bits; f16, bf16 and f32 are written",
                              args->out->dtype.code, args->out->dtype.bits);
    }
    return status;
}

attn_status check_gated_delta(const struct attn_attend_args *args, struct attn_error *error)
{
    attn_status status = check_instance(args->instance, error);
    status = status ? status : gdn_check_desc(args->layer, error);
    if (status == ATTN_OK && args->params == NULL) {
        status = BAD("params", "is NULL");
    }
    if (status == ATTN_OK && (args->batch == NULL || args->batch->query_start_loc == NULL ||
                              args->batch->num_reqs < 0)) {
        status = BAD("batch", "gated_delta needs a batch with query_start_loc");
    }
    if (status != ATTN_OK) {
        return status;
    }
    struct gdn gdn = gdn_of(args);
    status = check_weights(&gdn, error);
    status = status ? status : check_io(&gdn, error);
    status = status ? status : gdn_check_memory(&gdn, error);
    return status ? status : gdn_check_slots(&gdn, error);
}
