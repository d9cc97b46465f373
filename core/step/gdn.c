/* SPDX-License-Identifier: Apache-2.0 */
#include "step/gdn.h"

#include "util/structs.h"

#define BAD(field, ...) error_set(error, ATTN_ERROR_INVALID_ARGUMENT, field, __VA_ARGS__)
#define FAIL(field, text) error_set_text(error, ATTN_ERROR_INVALID_ARGUMENT, field, text)

void gdn_describe(struct step *step)
{
    const struct attn_gdn_desc *g = step->layer->selected->gdn;
    step->check_io = gdn_check_io;
    step->q.heads = step->k.heads = g->num_k_heads;
    step->q.head_size = step->k.head_size = g->head_size_k;
    step->v.heads = step->out.heads = g->num_v_heads;
    step->v.head_size = step->out.head_size = g->head_size_v;
}

/* Every slot that a kernel will follow, where the host can read them. */
static attn_status validate_slots(const attn_plan *plan, const struct attn_batch_gdn *states,
                                  struct attn_error *error)
{
    const struct attn_batch *b = &plan->given;
    const attn_layer *layer = plan->steps[0].layer;
    int64_t slots = layer->k_cache.num_blocks, stride = states->state_slots_stride;
    int32_t drafted = layer->selected->gdn->num_speculative_tokens;
    for (int32_t r = 0; r < b->num_reqs; r++) {
        int32_t queries = b->query_start_loc_host[r + 1] - b->query_start_loc_host[r];
        int32_t accepted = states->num_accepted_tokens != NULL ? states->num_accepted_tokens[r] : 1;
        const int32_t *row = states->state_slots + r * (stride > 0 ? stride : 1);
        if (queries == 0 || row[0] < 0) {
            continue;
        }
        if (accepted < 1 || accepted > 1 + drafted) {
            return BAD("num_accepted_tokens", "request %d: %d; 1 to %d", r, accepted, 1 + drafted);
        }
        for (int32_t i = 0; i < (states->num_accepted_tokens != NULL ? 1 + drafted : 1); i++) {
            if (row[i] >= slots) {
                return BAD("state_slots",
                           "request %d, state %d: slot %d; the layer has slots 0 to %lld", r, i,
                           row[i], (long long)slots - 1);
            }
        }
    }
    return ATTN_OK;
}

/* The extension of a part of the batch: its arrays begin at the part's first request. */
static void cut_states(attn_plan *plan, int32_t view, int32_t first)
{
    struct attn_batch_gdn *part = &plan->states[view];
    const struct attn_batch_gdn *whole = &plan->states[VIEW_WHOLE];
    *part = *whole;
    part->state_slots += first * (whole->state_slots_stride > 0 ? whole->state_slots_stride : 1);
    part->has_initial_state =
        whole->has_initial_state != NULL ? whole->has_initial_state + first : NULL;
    part->num_accepted_tokens =
        whole->num_accepted_tokens != NULL ? whole->num_accepted_tokens + first : NULL;
    plan->views[view].next = &part->ext;
}

attn_status gdn_make_views(attn_plan *plan, struct attn_error *error)
{
    const struct attn_ext *ext =
        ext_find(plan->given.next, ATTN_EXT_BATCH_GDN, sizeof(struct attn_batch_gdn));
    const struct attn_gdn_desc *g = plan->steps[0].layer->selected->gdn;
    if (ext == NULL) {
        return BAD("attn_batch_gdn", "is not on the batch; layer '%s' needs its state_slots",
                   plan->steps[0].layer->desc->name);
    }
    struct attn_batch_gdn *states = &plan->states[VIEW_WHOLE];
    *states = *(const struct attn_batch_gdn *)ext;
    states->ext.struct_size = sizeof *states;
    states->ext.next = NULL;
    if (states->state_slots == NULL || states->state_slots_stride < 0 ||
        (states->num_accepted_tokens != NULL &&
         states->state_slots_stride < 1 + g->num_speculative_tokens)) {
        return BAD(
            "state_slots",
            "%p, rows %lld apart; an array is needed, and rows of %d states where tokens are "
            "drafted",
            (const void *)states->state_slots, (long long)states->state_slots_stride,
            1 + g->num_speculative_tokens);
    }
    if (states->has_initial_state == NULL && plan->given.seq_lens == NULL) {
        return BAD("has_initial_state", "is NULL, and so is seq_lens, which would tell");
    }
    if (plan->validate && plan->model->device.type == ATTN_DEVICE_CPU) {
        attn_status status = validate_slots(plan, states, error);
        if (status != ATTN_OK) {
            return status;
        }
    }
    plan->views[VIEW_WHOLE].next = &states->ext;
    cut_states(plan, VIEW_DECODE, 0);
    cut_states(plan, VIEW_PREFILL, plan->split.num_decodes);
    return ATTN_OK;
}

static struct launch *use(attn_plan *plan, struct step *step, int32_t phase, int32_t view)
{
    struct launch *launch = &step->launches[phase][PART_MAIN];
    launch->schedule->view = view;
    launch->args.batch = &plan->views[view];
    return launch;
}

void gdn_choose_calls(attn_plan *plan, struct step *step)
{
    const struct served *served = step->layer->served;
    int32_t calls = 0;
    step->program = run_attends;
    if (served[ATTN_PHASE_PREFILL].instance == served[ATTN_PHASE_DECODE].instance) {
        int32_t phase = plan->split.num_prefills == 0 ? ATTN_PHASE_DECODE : ATTN_PHASE_PREFILL;
        step->main[0] = use(plan, step, phase, VIEW_WHOLE);
        return;
    }
    if (plan->split.num_decode_tokens > 0) {
        step->main[calls++] = use(plan, step, ATTN_PHASE_DECODE, VIEW_DECODE);
    }
    if (plan->split.num_prefill_tokens > 0) {
        step->main[calls] = use(plan, step, ATTN_PHASE_PREFILL, VIEW_PREFILL);
    }
}

static bool is_flat(const struct attn_tensor *t, int64_t rows, int64_t columns)
{
    return t != NULL && t->data != NULL && t->shape != NULL && t->ndim == 2 &&
           t->shape[0] >= rows && t->shape[1] == columns;
}

static bool is_rows(const struct attn_tensor *t, const struct rows *wanted, int64_t rows)
{
    return t != NULL && t->data != NULL && t->shape != NULL && tensor_kind(t) == wanted->kind &&
           t->shape[0] >= rows && t->shape[1] == wanted->heads && t->shape[2] == wanted->head_size;
}

attn_status gdn_check_io(const attn_plan *plan, const struct step *step,
                         const struct attn_step_io *io, bool writes, bool attends,
                         struct attn_error *error)
{
    const struct attn_io_gdn *gdn =
        (const struct attn_io_gdn *)ext_find(io->next, ATTN_EXT_IO_GDN, sizeof *gdn);
    const struct attn_gdn_desc *g = step->layer->selected->gdn;
    int64_t rows = plan->num_tokens, keys = 2 * (int64_t)g->num_k_heads * g->head_size_k;
    (void)writes; /* the state moves with the attend */
    if (!attends) {
        return ATTN_OK;
    }
    if (gdn == NULL || io->lse != NULL) {
        return FAIL("attn_io_gdn", "a run of GDN needs attn_io_gdn and has no lse");
    }
    if (!is_flat(gdn->a, rows, g->num_v_heads) || !is_flat(gdn->b, rows, g->num_v_heads)) {
        return FAIL("a", "a or b is NULL or not [num_tokens or more, num_v_heads]");
    }
    if (g->conv_width > 0 &&
        !is_flat(gdn->mixed_qkv, rows, keys + (int64_t)g->num_v_heads * g->head_size_v)) {
        return FAIL("mixed_qkv", "mixed_qkv is NULL or not [num_tokens or more, 2 Hk Dk + Hv Dv]");
    }
    if (g->conv_width == 0 && (!is_rows(io->q, &step->q, rows) || !is_rows(io->k, &step->k, rows) ||
                               !is_rows(io->v, &step->v, rows))) {
        return FAIL("q", "q, k or v is NULL or not [num_tokens or more, Hk or Hv, Dk or Dv] of the "
                         "layer's dtype");
    }
    return step_check_out(plan, step, io->out, error);
}
