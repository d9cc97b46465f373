/* SPDX-License-Identifier: Apache-2.0 */
/* Reading an assignment. */
#include "select/assignment.h"

#include "util/structs.h"

attn_assignment *assignment_keep(const attn_assignment *assignment)
{
    attn_assignment *kept = (attn_assignment *)(uintptr_t)assignment; /* all but `users` is const */
    atomic_fetch_add(&kept->users, 1);
    return kept;
}

void assignment_destroy(attn_assignment *assignment)
{
    if (assignment != NULL && atomic_fetch_sub(&assignment->users, 1) == 1) {
        attn_runtime *runtime = assignment->runtime;
        arena_finish(&assignment->arena);
        runtime_free(runtime, assignment, sizeof *assignment);
    }
}

int32_t assignment_num_layers(const attn_assignment *assignment)
{
    return assignment != NULL ? assignment->num_layers : 0;
}

static attn_status find_phase(const attn_assignment *assignment, int32_t layer, int32_t phase,
                              const struct assignment_phase **found)
{
    if (assignment == NULL || phase < 0 || phase >= NUM_PHASES) {
        return ATTN_ERROR_INVALID_ARGUMENT;
    }
    if (layer < 0 || layer >= assignment->num_layers) {
        return ATTN_ERROR_NOT_FOUND;
    }
    *found = &assignment->layers[layer].phases[phase];
    return ATTN_OK;
}

static attn_status find_verdict(const attn_assignment *assignment, int32_t layer, int32_t phase,
                                int32_t backend, const struct verdict **found)
{
    const struct assignment_phase *at = NULL;
    TRY(find_phase(assignment, layer, phase, &at));
    if (backend < 0 || backend >= assignment->num_backends) {
        return ATTN_ERROR_NOT_FOUND;
    }
    *found = &at->verdicts[backend];
    return ATTN_OK;
}

attn_status assignment_choice(const attn_assignment *assignment, int32_t layer, int32_t phase,
                              struct attn_choice *choice)
{
    const struct assignment_phase *at = NULL;
    TRY(find_phase(assignment, layer, phase, &at));
    return struct_write(choice, &at->choice, ABI_CHOICE);
}

attn_status assignment_verdict(const attn_assignment *assignment, int32_t layer, int32_t phase,
                               int32_t backend, int32_t *verdict, int32_t *num_reasons)
{
    const struct verdict *found = NULL;
    TRY(find_verdict(assignment, layer, phase, backend, &found));
    if (verdict != NULL) {
        *verdict = found->code;
    }
    if (num_reasons != NULL) {
        *num_reasons = found->num_reasons;
    }
    return ATTN_OK;
}

attn_status assignment_reason(const attn_assignment *assignment, int32_t layer, int32_t phase,
                              int32_t backend, int32_t index, struct attn_reason *reason)
{
    const struct verdict *found = NULL;
    TRY(find_verdict(assignment, layer, phase, backend, &found));
    if (index < 0 || index >= found->num_reasons) {
        return ATTN_ERROR_NOT_FOUND;
    }
    return struct_write(reason, &found->reasons[index], ABI_REASON);
}
