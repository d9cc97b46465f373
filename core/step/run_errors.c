/* SPDX-License-Identifier: Apache-2.0 */
/* Texts of a run that is refused: the value that was found, next to what is allowed. */
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "step/plan_state.h"
#include "util/error.h"

/* "float32", "bfloat16", or code and bits of one without a name here. */
static const char *dtype_text(struct attn_dtype dtype, char *text, size_t size)
{
    static const char *const names[] = {[ATTN_CODE_INT] = "int",
                                        [ATTN_CODE_UINT] = "uint",
                                        [ATTN_CODE_FLOAT] = "float",
                                        [ATTN_CODE_BFLOAT] = "bfloat"};
    if (dtype.code == ATTN_CODE_FLOAT8_E4M3FN || dtype.code == ATTN_CODE_FLOAT8_E5M2) {
        snprintf(text, size, "float8_%s", dtype.code == ATTN_CODE_FLOAT8_E5M2 ? "e5m2" : "e4m3fn");
    } else if (dtype.code < sizeof names / sizeof *names && names[dtype.code] != NULL) {
        snprintf(text, size, "%s%d", names[dtype.code], dtype.bits);
    } else {
        snprintf(text, size, "dtype code %d of %d bits", dtype.code, dtype.bits);
    }
    return text;
}

attn_status refuse_rows(const char *field, const struct attn_tensor *found,
                        const struct tensor_form *wanted, int64_t rows, struct attn_error *error)
{
    char have[40], need[40];
    struct attn_tensor kind = {0};
    tensor_set_kind(&kind, wanted->kind);
    if (found == NULL) {
        return BAD(field, "%s is NULL; [%lld or more, %lld, %lld] is needed", field,
                   (long long)rows, (long long)wanted->heads, (long long)wanted->head_size);
    }
    if (found->ndim != 3 || found->shape == NULL) {
        return BAD(field, "%s has %d dimensions, shape %p; 3 are needed: [rows, heads, dims]",
                   field, found->ndim, (const void *)found->shape);
    }
    if (found->dtype.code != kind.dtype.code || found->dtype.bits != kind.dtype.bits ||
        found->dtype.lanes != kind.dtype.lanes) {
        char lanes[24] = "";
        if (found->dtype.lanes != 1) {
            snprintf(lanes, sizeof lanes, " in %d lanes", found->dtype.lanes);
        }
        return BAD(field, "%s is %s%s; the layer's is %s", field,
                   dtype_text(found->dtype, have, sizeof have), lanes,
                   dtype_text(kind.dtype, need, sizeof need));
    }
    if (found->shape[0] < rows || found->shape[1] != wanted->heads ||
        found->shape[2] != wanted->head_size) {
        return BAD(field, "%s is [%lld, %lld, %lld]; [%lld or more, %lld, %lld] is needed", field,
                   (long long)found->shape[0], (long long)found->shape[1],
                   (long long)found->shape[2], (long long)rows, (long long)wanted->heads,
                   (long long)wanted->head_size);
    }
    if (found->data == NULL) {
        return BAD(field, "%s has no data; %lld rows are needed", field, (long long)rows);
    }
    return BAD(field, "the last stride of %s is %lld; 1, a row's dims are contiguous", field,
               found->strides != NULL ? (long long)found->strides[2] : 1);
}

attn_status refuse_tensor(const char *field, const struct attn_tensor *found,
                          struct attn_error *error, const char *format, ...)
{
    char dtype[40], shape[120] = "", wanted[200];
    va_list values;
    va_start(values, format);
    vsnprintf(wanted, sizeof wanted, format, values);
    va_end(values);
    if (found == NULL || found->shape == NULL) {
        return BAD(field, "%s %s; %s is needed", field, found == NULL ? "is NULL" : "has no shape",
                   wanted);
    }
    for (int32_t i = 0; i < found->ndim && i < 4; i++) {
        const size_t used = strlen(shape);
        snprintf(shape + used, sizeof shape - used, "%s%lld", i > 0 ? ", " : "",
                 (long long)found->shape[i]);
    }
    return BAD(
        field, "%s is [%s] %s%s of %d dimensions, the last with stride %lld; %s is needed", field,
        shape, dtype_text(found->dtype, dtype, sizeof dtype),
        found->data == NULL ? " without data" : "", found->ndim,
        found->ndim > 0 && found->strides != NULL ? (long long)found->strides[found->ndim - 1] : 1,
        wanted);
}

attn_status refuse_unwritten(struct attn_error *error)
{
    return BAD("slot_mapping",
               "the run brings k and the batch has no slots (num_slots 0): the attend would read "
               "what the cache held before; give slot_mapping, or ATTN_RUN_NO_WRITE where the "
               "cache has the keys already");
}

/* What a kernel has left becomes clean text after `words`, as far as it goes. */
static attn_status put_before(const char *words, attn_status status, struct attn_error *error)
{
    char field[ATTN_ERROR_FIELD_SIZE], message[ATTN_ERROR_MESSAGE_SIZE];
    status = error_relay(error, status, error);
    if (error == NULL || error->struct_size < sizeof *error) {
        return status;
    }
    memcpy(field, error->field, sizeof field);
    memcpy(message, error->message, sizeof message);
    return error_set(error, status, field, "%s: %s", words, message);
}

attn_status operation_failed(const char *name, attn_status status, struct attn_error *error)
{
    return put_before(name, status, error);
}

attn_status step_fail(const struct step *step, attn_status status, struct attn_error *error)
{
    const char *prefill = step->layer->served[ATTN_PHASE_PREFILL].instance->caps->name;
    const char *decode = step->layer->served[ATTN_PHASE_DECODE].instance->caps->name;
    const bool two = decode != prefill;
    char words[ATTN_ERROR_MESSAGE_SIZE];
    snprintf(words, sizeof words, "layer '%s', %s%s%s", step->layer->desc->name, prefill,
             two ? " and " : "", two ? decode : "");
    return put_before(words, status, error);
}
