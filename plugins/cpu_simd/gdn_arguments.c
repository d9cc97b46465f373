/* SPDX-License-Identifier: Apache-2.0 */
/* What gated_delta checks before it reads. */
#include "gdn.h"

#define BAD(field, ...) plugin_error(error, ATTN_ERROR_INVALID_ARGUMENT, field, __VA_ARGS__)

attn_status check_gdn_desc(const struct attn_layer_desc *layer, struct attn_error *error)
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
    const struct attn_gdn_weights *w = gdn->weights;
    if (w == NULL || w->a_log == NULL || w->dt_bias == NULL) {
        return BAD(
            "attn_gdn_weights", "is not on the parameters, or a_log %p or dt_bias %p is NULL",
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
    const struct attn_gdn_desc *g = gdn->desc;
    int64_t rows = args->batch->num_actual_tokens;
    int64_t hk = g->num_k_heads, hv = g->num_v_heads;
    attn_status status = ATTN_OK;
    if (gdn->io == NULL) {
        return BAD("attn_io_gdn", "is not on the run");
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
    if (status != ATTN_OK) {
        return status;
    }
    if (args->instance == NULL || args->params == NULL) {
        return BAD(args->instance == NULL ? "instance" : "params", "is NULL");
    }
    status = check_gdn_desc(args->layer, error);
    if (status != ATTN_OK) {
        return status;
    }
    if (args->batch == NULL || args->batch->query_start_loc == NULL || args->batch->num_reqs < 0) {
        return BAD("batch", "gated_delta needs a batch with query_start_loc");
    }
    struct gdn gdn = gdn_of(args);
    status = check_weights(&gdn, error);
    status = status ? status : check_io(&gdn, error);
    status = status ? status : check_memory(&gdn, error);
    return status ? status : check_slots(&gdn, error);
}
