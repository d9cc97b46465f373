/* SPDX-License-Identifier: Apache-2.0 */
/* Texts of a run that is refused: the value that was found, next to what is allowed. */
#include <stdio.h>
#include <string.h>

#include "step/plan_state.h"
#include "util/error.h"

attn_status check_rows(const char *field, const struct attn_tensor *found,
                       const struct tensor_form *wanted, int64_t rows, struct attn_error *error)
{
    struct attn_tensor kind;
    tensor_set_kind(&kind, wanted->kind);
    CHECK_TENSOR(found, NULL, field, 3, {rows, wanted->heads, wanted->head_size}, 1, kind.dtype);
    return ATTN_OK;
}

attn_status check_input(const attn_plan *plan, const char *field, const struct attn_tensor *found,
                        const struct tensor_form *wanted, int64_t rows, struct attn_error *error)
{
    TRY(check_rows(field, found, wanted, rows, error));
    return validate_tensor(plan, found, field, error);
}

/* What a kernel has left becomes clean text after `words`, as far as it goes. */
attn_status operation_failed(const char *words, attn_status status, struct attn_error *error)
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

attn_status step_fail(const struct step *step, attn_status status, struct attn_error *error)
{
    const char *prefill = step->layer->served[ATTN_PHASE_PREFILL].instance->caps->name;
    const char *decode = step->layer->served[ATTN_PHASE_DECODE].instance->caps->name;
    const bool two = decode != prefill;
    char words[ATTN_ERROR_MESSAGE_SIZE];
    snprintf(words, sizeof words, "layer '%s', %s%s%s", step->layer->desc->name, prefill,
             two ? " and " : "", two ? decode : "");
    return operation_failed(words, status, error);
}
