/* SPDX-License-Identifier: Apache-2.0 */
/* What gated_delta checks before it reads. */
#include "common/number.h"
#include "common/structs.h"
#include "common/tensors.h"
#include "gdn.h"

#define BAD(field, ...) plugin_error(error, ATTN_ERROR_INVALID_ARGUMENT, field, __VA_ARGS__)

static attn_status check_desc(const struct attn_layer_desc *layer, struct attn_error *error)
{
    const struct attn_gdn_desc *g =
        layer != NULL ? (const struct attn_gdn_desc *)ext_of(layer->next, ATTN_EXT_GDN_DESC) : NULL;
    if (g == NULL) {
        return BAD("attn_gdn_desc", "the layer is NULL or has no attn_gdn_desc");
    }
    if (g->num_k_heads <= 0 || g->num_v_heads <= 0 || g->num_v_heads % g->num_k_heads != 0) {
        return BAD("num_v_heads", "%d value heads over %d key heads; a positive multiple",
                   g->num_v_heads, g->num_k_heads);
    }
    if (g->head_size_k <= 0 || g->head_size_k > GDN_MAX_HEAD_SIZE || g->head_size_v <= 0 ||
        g->head_size_v > GDN_MAX_HEAD_SIZE) {
        return BAD("head_size_k", "head sizes %d and %d; 1 to %d", g->head_size_k, g->head_size_v,
                   GDN_MAX_HEAD_SIZE);
    }
    if (g->conv_width < 0 || g->conv_width > GDN_MAX_CONV_WIDTH || g->chunk_size < 0) {
        return BAD("conv_width", "conv_width %d, chunk_size %d; 0 to %d, and from 0", g->conv_width,
                   g->chunk_size, GDN_MAX_CONV_WIDTH);
    }
    if (g->num_speculative_tokens < 0 || g->num_speculative_tokens >= GDN_MAX_DRAFTED) {
        return BAD("num_speculative_tokens", "%d; 0 to %d", g->num_speculative_tokens,
                   GDN_MAX_DRAFTED - 1);
    }
    if (layer->dtype < ATTN_DTYPE_F16 || layer->dtype > ATTN_DTYPE_F32) {
        return BAD("dtype", "%d; f16, bf16 or f32", layer->dtype);
    }
    return ATTN_OK;
}

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
    const struct attn_gdn_weights *w = gdn->weights;
    if (w == NULL || w->a_log == NULL || w->dt_bias == NULL) {
        return BAD(
            "attn_gdn_weights", "is not on the parameters, or a_log %p or dt_bias %p is NULL",
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
    const struct attn_gdn_desc *g = gdn->desc;
    int64_t rows = args->batch->num_actual_tokens;
    attn_status status = ATTN_OK;
    if (gdn->io == NULL) {
        return BAD("attn_io_gdn", "is not on the run");
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

static attn_status check_memory(const struct gdn *gdn, struct attn_error *error)
{
    const struct attn_gdn_desc *g = gdn->desc;
    const struct attn_kv_view *state = gdn->args->k_cache, *window = gdn->args->v_cache;
    int64_t size = (int64_t)g->head_size_v * g->head_size_k;
    int32_t width = g->conv_width - 1 + g->num_speculative_tokens;
    if (state == NULL || state->data == NULL || state->num_heads != g->num_v_heads ||
        state->head_size != size) {
        return BAD("k_cache", "the state is NULL or %d heads of %d; %d of Dv Dk, %lld, are needed",
                   state != NULL ? state->num_heads : 0, state != NULL ? state->head_size : 0,
                   g->num_v_heads, (long long)size);
    }
    if (g->conv_width > 1 &&
        (window == NULL || window->data == NULL || window->num_heads != gdn->num_channels ||
         window->head_size < width)) {
        return BAD("v_cache",
                   "the convolution's window is NULL or %d channels of %d; %lld of %d are needed",
                   window != NULL ? window->num_heads : 0, window != NULL ? window->head_size : 0,
                   (long long)gdn->num_channels, width);
    }
    return ATTN_OK;
}

/* Every index that will be followed. */
static attn_status check_slots(const struct gdn *gdn, struct attn_error *error)
{
    const struct attn_batch *batch = gdn->args->batch;
    const struct attn_batch_gdn *states = gdn->states;
    int32_t drafted = gdn->desc->num_speculative_tokens;
    int64_t num_slots = gdn->args->k_cache->num_blocks;
    if (states == NULL || states->state_slots == NULL) {
        return BAD("state_slots", "is NULL, or attn_batch_gdn is not on the batch");
    }
    if (states->has_initial_state == NULL && batch->seq_lens == NULL) {
        return BAD("has_initial_state", "is NULL, and so is seq_lens, which would tell");
    }
    if (states->num_accepted_tokens != NULL && states->state_slots_stride < 1 + drafted) {
        return BAD("state_slots_stride", "%lld; rows of %d states are needed",
                   (long long)states->state_slots_stride, 1 + drafted);
    }
    for (int32_t r = 0; r < batch->num_reqs; r++) {
        struct gdn_request request;
        if (!gdn_request_of(gdn, r, &request)) {
            continue;
        }
        if (request.from < 0 || request.from > drafted) {
            return BAD("num_accepted_tokens", "request %d: %d; 1 to %d", r, request.from + 1,
                       1 + drafted);
        }
        int64_t used = request.keeps_all ? request.num_tokens : 1;
        used = used > request.from + 1 ? used : request.from + 1;
        for (int64_t i = 0; i < used; i++) {
            if (request.slots[i] >= num_slots) {
                return BAD("state_slots", "request %d, state %lld: slot %d; negative, or 0 to %lld",
                           r, (long long)i, request.slots[i], (long long)num_slots - 1);
            }
        }
    }
    return ATTN_OK;
}

attn_status check_gated_delta(const struct attn_attend_args *args, struct attn_error *error)
{
    attn_status status = struct_attend_known(args, error);
    status = status ? status : check_instance(args->instance, error);
    status = status ? status : check_desc(args->layer, error);
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
    status = status ? status : check_memory(&gdn, error);
    return status ? status : check_slots(&gdn, error);
}
