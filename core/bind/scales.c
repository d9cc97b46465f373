/* SPDX-License-Identifier: Apache-2.0 */
/* Scales calculated from what runs bring: largest magnitudes over range constants. */
#include <float.h>
#include <math.h>
#include <string.h>

#include "bind/bound.h"
#include "bind/model.h"
#include "bind/place.h"
#include "runtime/runtime.h"
#include "select/names.h"
#include "util/structs.h"
#include "util/tensor.h"

#define MIN_CALIBRATION 72 /* size in ABI 0.3 */

/* The largest values that q, k and v are expected to reach. */
enum { RANGE_Q = 200, RANGE_K = 200, RANGE_V = 100 };

/* The backend that finds largest magnitudes, and moves floats on a device; or NULL with the reason.
 */
static const struct instance *find_amax(const attn_layer *layer, struct attn_error *error)
{
    const struct instance *instance = layer->served[ATTN_PHASE_PREFILL].instance;
    const struct attn_kernels *k = &instance->kernels;
    const bool moves =
        layer->model->device.type == ATTN_DEVICE_CPU || (k->copy != NULL && k->synchronize != NULL);
    if (k->amax != NULL && moves) {
        return instance;
    }
    error_set(error, ATTN_ERROR_UNSUPPORTED, "amax",
              "%s: scales are calculated by a backend with amax and, on a device, copy and "
              "synchronize",
              instance->caps->name);
    return NULL;
}

/* Floats between the layer's memory and the host's; there when it returns. */
static attn_status move_floats(const attn_layer *layer, const struct instance *instance,
                               void *stream, float *to, const float *from, int32_t count,
                               int32_t kind, struct attn_error *error)
{
    const size_t bytes = (size_t)count * sizeof *to;
    struct attn_error why = ATTN_ERROR_INIT;
    if (layer->model->device.type == ATTN_DEVICE_CPU) {
        memcpy(to, from, bytes);
        return ATTN_OK;
    }
    const struct attn_copy_args copy = {.struct_size = sizeof copy,
                                        .instance = instance->handle,
                                        .stream = stream,
                                        .destination = to,
                                        .source = from,
                                        .bytes = bytes,
                                        .kind = kind};
    const struct attn_stream_args wait = {
        .struct_size = sizeof wait, .instance = instance->handle, .stream = stream};
    attn_status status = instance->kernels.copy(&copy, &why);
    status = status == ATTN_OK ? instance->kernels.synchronize(&wait, &why) : status;
    return status == ATTN_OK ? ATTN_OK : error_relay(error, status, &why);
}

static attn_status call_amax(const struct instance *instance, const struct attn_amax_args *args,
                             struct attn_error *error)
{
    struct attn_error why = ATTN_ERROR_INIT;
    attn_status status = instance->kernels.amax(args, &why);
    return status == ATTN_OK ? ATTN_OK : error_relay(error, status, &why);
}

/* Copied, `io` being there. */
static attn_status read_calibration(const attn_layer *layer,
                                    const struct attn_calibration *calibration,
                                    struct attn_calibration *read, struct attn_error *error)
{
    attn_status status =
        struct_read(read, sizeof *read, MIN_CALIBRATION, calibration, "attn_calibration", error);
    status = status == ATTN_OK ? ext_check(read->next, NULL, 0, "attn_calibration", error) : status;
    if (status == ATTN_OK && (layer == NULL || read->io == NULL || read->reserved != 0)) {
        status = error_set(error, ATTN_ERROR_INVALID_ARGUMENT, "io",
                           "layer %p, io %p, reserved %d; both are needed, and reserved is 0",
                           (const void *)layer, (const void *)read->io, read->reserved);
    }
    return status;
}

attn_status layer_calculate_scales(attn_layer *layer, const struct attn_calibration *calibration,
                                   struct attn_error *error)
{
    static const float ranges[] = {RANGE_Q, RANGE_K, RANGE_V};
    static const char *const names[] = {"q", "k", "v"};
    struct attn_calibration read;
    attn_status status = read_calibration(layer, calibration, &read, error);
    if (status != ATTN_OK) {
        return status;
    }
    const struct attn_step_io *io = read.io;
    const struct attn_tensor *tensors[] = {io->q, io->k, io->v}, *second_q = NULL;
    struct own_tensor rows;
    for (const struct composition *const *c = layer->compositions; *c != NULL; c++) {
        if ((*c)->scale_inputs != NULL) {
            second_q = (*c)->scale_inputs(io, &rows, tensors);
        }
    }
    if (!(read.range >= 0 && read.range < INFINITY)) {
        return error_set(error, ATTN_ERROR_INVALID_ARGUMENT, "range",
                         "%g; above 0, or 0 for the constants, %d for q, %d for k and %d for v",
                         (double)read.range, RANGE_Q, RANGE_K, RANGE_V);
    }
    float *scales[] = {read.q_scale, read.k_scale, read.v_scale};
    const struct instance *instance = find_amax(layer, error);
    if (instance == NULL) {
        return ATTN_ERROR_UNSUPPORTED;
    }
    for (int32_t i = 0; i < 3; i++) {
        struct attn_amax_args args = {
            sizeof args, NULL, instance->handle, io->stream, tensors[i], scales[i], 0, 0};
        if (scales[i] == NULL) {
            continue;
        }
        if (!tensor_is_numbers(tensors[i], 3) ||
            (i == 0 && second_q != NULL && !tensor_is_numbers(second_q, 3))) {
            return error_set(error, ATTN_ERROR_INVALID_ARGUMENT, names[i],
                             "%s, whose scale is asked for, is NULL or not [rows, heads, size] of "
                             "numbers with a contiguous last dimension",
                             names[i]);
        }
        status = place_check_tensor(layer->model, tensors[i], names[i], error);
        if (status == ATTN_OK && i == 0 && second_q != NULL) {
            status = place_check_tensor(layer->model, second_q, names[i], error);
        }
        status = status == ATTN_OK ? call_amax(instance, &args, error) : status;
        if (status == ATTN_OK && i == 0 && second_q != NULL) {
            args.x = second_q;
            args.accumulate = 1;
            status = call_amax(instance, &args, error);
        }
        if (status != ATTN_OK) {
            return status;
        }
        float scale;
        status = move_floats(layer, instance, io->stream, &scale, scales[i], 1,
                             ATTN_COPY_DEVICE_TO_HOST, error);
        scale = scale > 0 ? scale / (read.range > 0 ? read.range : ranges[i]) : 1;
        status = status == ATTN_OK ? move_floats(layer, instance, io->stream, scales[i], &scale, 1,
                                                 ATTN_COPY_HOST_TO_DEVICE, error)
                                   : status;
        if (status != ATTN_OK) {
            return status;
        }
    }
    return ATTN_OK;
}

static attn_status check_values(const attn_layer *layer, const struct attn_tensor *v,
                                struct attn_error *error)
{
    const struct attn_layer_desc *l = layer->desc;
    if (!tensor_is_numbers(v, 3) || v->shape[1] != l->num_kv_heads ||
        v->shape[2] != l->head_size_v) {
        return error_set(error, ATTN_ERROR_INVALID_ARGUMENT, "v",
                         "layer '%s': v is NULL or not [rows, %d, %d] of numbers with a contiguous "
                         "last dimension",
                         l->name, l->num_kv_heads, l->head_size_v);
    }
    return place_check_tensor(layer->model, v, "v", error);
}

/* Largest |v| of each channel, into `amax` of the layer's memory and `found` of the host's: to the
 * amax kernel every channel of a head is a head of size 1. */
static attn_status channel_amax(const attn_layer *layer, const struct instance *instance,
                                const struct attn_step_io *io, float *amax, float *found,
                                struct attn_error *error)
{
    const struct attn_layer_desc *l = layer->desc;
    const struct attn_tensor *v = io->v;
    int64_t row = tensor_stride(v, 0);
    int64_t head = tensor_stride(v, 1);
    int64_t shape[3] = {v->shape[0], v->shape[2], 1}, strides[3] = {row, 1, 1};
    attn_status status = ATTN_OK;
    for (int32_t h = 0; h < l->num_kv_heads && status == ATTN_OK; h++) {
        struct attn_tensor channels = *v;
        channels.shape = shape;
        channels.strides = strides;
        channels.byte_offset += (uint64_t)(h * head) * (v->dtype.bits / 8);
        const struct attn_amax_args args = {
            .struct_size = sizeof args,
            .instance = instance->handle,
            .stream = io->stream,
            .x = &channels,
            .out = amax + (int64_t)h * l->head_size_v,
            .per_head = 1,
        };
        status = call_amax(instance, &args, error);
    }
    const int32_t count = l->num_kv_heads * l->head_size_v;
    status = status == ATTN_OK ? move_floats(layer, instance, io->stream, found, amax, count,
                                             ATTN_COPY_DEVICE_TO_HOST, error)
                               : status;
    for (int32_t i = 0; i < count && status == ATTN_OK; i++) {
        if (!isfinite(found[i])) {
            status = error_set(error, ATTN_ERROR_INVALID_ARGUMENT, "v",
                               "layer '%s': the largest value of head %d, channel %d is %g; finite "
                               "ones only",
                               l->name, i / l->head_size_v, i % l->head_size_v, (double)found[i]);
        }
    }
    return status;
}

attn_status layer_calibrate_v_scales(attn_layer *layer, const struct attn_calibration *calibration,
                                     struct attn_error *error)
{
    struct attn_calibration read;
    attn_status status = read_calibration(layer, calibration, &read, error);
    if (status != ATTN_OK) {
        return status;
    }
    float *amax = read.amax, *v_channel_scale = read.v_channel_scale, range = read.range;
    if (amax == NULL || v_channel_scale == NULL) {
        return error_set(error, ATTN_ERROR_INVALID_ARGUMENT, "amax",
                         "amax %p, v_channel_scale %p; neither may be NULL", (void *)amax,
                         (void *)v_channel_scale);
    }
    const struct attn_layer_desc *l = layer->desc;
    if (l->kv_dtype != ATTN_KV_INT8_KV) {
        return error_set(error, ATTN_ERROR_INVALID_ARGUMENT, "kv_dtype",
                         "layer '%s' has a cache of %s; scales per channel of v are %s's", l->name,
                         name_of_kv_dtype(l->kv_dtype), name_of_kv_dtype(ATTN_KV_INT8_KV));
    }
    if (!(range >= 0 && range < INFINITY)) {
        return error_set(error, ATTN_ERROR_INVALID_ARGUMENT, "range",
                         "%g; above 0, or 0 for the constant, %d", (double)range, RANGE_V);
    }
    const struct instance *instance = find_amax(layer, error);
    status = instance != NULL ? check_values(layer, read.io->v, error) : ATTN_ERROR_UNSUPPORTED;
    if (status != ATTN_OK) {
        return status;
    }
    const int32_t count = l->num_kv_heads * l->head_size_v;
    const size_t bytes = 2 * (size_t)count * sizeof(float);
    attn_runtime *runtime = layer->model->runtime;
    float *found = runtime_alloc(runtime, bytes), *before = found != NULL ? found + count : NULL;
    if (found == NULL) {
        return error_set(error, ATTN_ERROR_OUT_OF_MEMORY, "amax", "no memory for %d channels",
                         count);
    }
    void *stream = read.io->stream;
    status =
        move_floats(layer, instance, stream, before, amax, count, ATTN_COPY_DEVICE_TO_HOST, error);
    if (status == ATTN_OK) {
        status = channel_amax(layer, instance, read.io, amax, found, error);
        for (int32_t i = 0; i < count && status == ATTN_OK; i++) {
            before[i] = found[i] > before[i] ? found[i] : before[i];
            float scale = before[i] / (range > 0 ? range : (float)RANGE_V);
            /* what is nearly nothing keeps a scale that divides */
            found[i] = before[i] > 0 ? fmaxf(scale, FLT_MIN) : 1;
        }
        /* the largest so far, or, after a failure, what stood there */
        attn_status kept = move_floats(layer, instance, stream, amax, before, count,
                                       ATTN_COPY_HOST_TO_DEVICE, status == ATTN_OK ? error : NULL);
        status = status == ATTN_OK ? kept : status;
    }
    status = status == ATTN_OK ? move_floats(layer, instance, stream, v_channel_scale, found, count,
                                             ATTN_COPY_HOST_TO_DEVICE, error)
                               : status;
    runtime_free(runtime, found, bytes);
    return status;
}
