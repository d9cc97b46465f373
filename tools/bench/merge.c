/* SPDX-License-Identifier: Apache-2.0 */
#include "merge.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/find.h"
#include "common/names.h"
#include "support/number.h"
#include "direct.h"
#include "memory.h"

enum { PREFIX_OUT, PREFIX_LSE, SUFFIX_OUT, SUFFIX_LSE, OUT, LSE, NUM_TENSORS };

struct merge {
    struct session *session;
    struct direct direct;
    struct memory memory;
    int64_t rows_shape[3], lse_shape[2];
    struct attn_tensor (*tensors)[NUM_TENSORS]; /* of each copy */
    struct work work;
};

static attn_status run(void *user, int32_t copy, struct attn_error *error)
{
    struct merge *merge = user;
    const struct attn_tensor *t = merge->tensors[copy];
    const struct attn_merge_states_args args = {.struct_size = sizeof args,
                                                .instance = merge->direct.instance,
                                                .stream = merge->session->stream,
                                                .prefix_out = &t[PREFIX_OUT],
                                                .prefix_lse = &t[PREFIX_LSE],
                                                .suffix_out = &t[SUFFIX_OUT],
                                                .suffix_lse = &t[SUFFIX_LSE],
                                                .out = &t[OUT],
                                                .lse = &t[LSE],
                                                .num_rows = merge->rows_shape[0],
                                                .num_rows_with_prefix = merge->rows_shape[0]};
    return merge->direct.kernels->merge_states(&args, error);
}

/* Of the variants of the named backend, or of all, the one that would prefill best. */
static int32_t find_backend(const struct session *session, const char *backend,
                            struct attn_error *error)
{
    int32_t best = -1, best_rank = INT32_MIN, named = -1;
    if (backend != NULL) {
        named = backend_find(session->api, session->runtime, backend, error);
        if (named < 0) {
            return -1;
        }
    }
    for (int32_t i = 0; i < session->api->backend_count(session->runtime); i++) {
        struct attn_backend_info info = {.struct_size = sizeof info};
        session->api->backend_info(session->runtime, i, &info);
        bool here =
            memcmp(&info.caps->device, &session->device.device, sizeof info.caps->device) == 0;
        here = here && (backend == NULL || backend_is_named(info.caps, backend));
        if (here && info.caps->kernels & ATTN_KERNEL_MERGE_STATES &&
            info.caps->rank[ATTN_PHASE_PREFILL] > best_rank) {
            best = i;
            best_rank = info.caps->rank[ATTN_PHASE_PREFILL];
        }
    }
    if (best < 0 && named >= 0) {
        return named; /* of which the caller says why it cannot */
    }
    if (best < 0) {
        snprintf(error->message, sizeof error->message,
                 "no backend of the device has merge_states");
        error->status = ATTN_ERROR_NO_BACKEND;
    }
    return best;
}

static bool can_merge(const struct session *session, int32_t index, struct result *result,
                      struct attn_error *error)
{
    struct attn_backend_info info = {.struct_size = sizeof info};
    session->api->backend_info(session->runtime, index, &info);
    backend_text(info.caps, result->backend, sizeof result->backend);
    const char *dtype = dtype_name(session->options->dtype);
    error->status = ATTN_ERROR_NO_BACKEND;
    if ((info.caps->kernels & ATTN_KERNEL_MERGE_STATES) == 0) {
        snprintf(error->field, sizeof error->field, "kernels");
        snprintf(error->message, sizeof error->message, "%s has no merge_states", result->backend);
        return false;
    }
    if ((info.caps->dtypes >> session->options->dtype & 1) == 0) {
        snprintf(error->field, sizeof error->field, "dtype");
        snprintf(error->message, sizeof error->message, "%s does not serve %s", result->backend,
                 dtype);
        return false;
    }
    error->status = ATTN_OK;
    return true;
}

static attn_status make_tensors(struct merge *merge, const struct shape *shape,
                                struct attn_error *error)
{
    int64_t rows = shape_int(shape, PARAMETER_S), heads = shape_int(shape, PARAMETER_HQ);
    int64_t dims = shape_int(shape, PARAMETER_D);
    int32_t dtype = merge->session->options->dtype;
    uint64_t random = (uint64_t)shape->value[PARAMETER_SEED];
    double elements = (double)rows * (double)heads * (double)dims;
    double out_bytes = elements * (double)number_bytes(dtype);
    double lse_bytes = (double)rows * (double)heads * sizeof(float);
    merge->work = (struct work){.bytes_read = 2 * (out_bytes + lse_bytes),
                                .bytes_written = out_bytes + lse_bytes,
                                .operations = 3 * elements,
                                .arithmetic = CEILING_F32,
                                .num_copies = work_copies(3 * out_bytes),
                                .run = run,
                                .user = merge};
    memcpy(merge->rows_shape, (int64_t[]){rows, heads, dims}, sizeof merge->rows_shape);
    memcpy(merge->lse_shape, (int64_t[]){heads, rows}, sizeof merge->lse_shape);
    merge->tensors = calloc((size_t)merge->work.num_copies, sizeof *merge->tensors);
    for (int32_t c = 0; c < merge->work.num_copies && merge->tensors != NULL; c++) {
        for (int32_t i = 0; i < NUM_TENSORS; i++) {
            bool lse = i == PREFIX_LSE || i == SUFFIX_LSE || i == LSE;
            int32_t kind = lse ? ATTN_DTYPE_F32 : dtype;
            void *data = memory_normal(&merge->memory, kind,
                                       lse ? heads * rows : rows * heads * dims, 1, &random);
            merge->tensors[c][i] = (struct attn_tensor){data,
                                                        merge->session->device.device,
                                                        lse ? 2 : 3,
                                                        number_dtype(kind),
                                                        lse ? merge->lse_shape : merge->rows_shape,
                                                        NULL,
                                                        0};
        }
    }
    if (merge->tensors == NULL || merge->memory.failed) {
        snprintf(error->message, sizeof error->message, "not enough memory for this shape");
        return error->status = ATTN_ERROR_OUT_OF_MEMORY;
    }
    return ATTN_OK;
}

struct merge *merge_create(struct result *result, struct session *session, const char *backend,
                           struct attn_error *error)
{
    struct merge *merge = calloc(1, sizeof *merge);
    if (merge == NULL) {
        error->status = ATTN_ERROR_OUT_OF_MEMORY;
        return NULL;
    }
    merge->session = session;
    memory_init(&merge->memory, &session->device);
    int32_t index = find_backend(session, backend, error);
    attn_status status = index < 0 ? error->status : ATTN_OK;
    if (status == ATTN_OK && !can_merge(session, index, result, error)) {
        status = error->status;
    }
    status = status == ATTN_OK ? direct_open(&merge->direct, session, index, error) : status;
    status = status == ATTN_OK ? make_tensors(merge, &result->shape, error) : status;
    if (status != ATTN_OK) {
        error->status = status;
        merge_destroy(merge);
        return NULL;
    }
    return merge;
}

const struct work *merge_work(const struct merge *merge)
{
    return &merge->work;
}

void merge_destroy(struct merge *merge)
{
    if (merge == NULL) {
        return;
    }
    direct_close(&merge->direct);
    memory_finish(&merge->memory);
    free(merge->tensors);
    free(merge);
}
