/* SPDX-License-Identifier: Apache-2.0 */
/* What a batch brings for recurrent layers: slots and cursors, and those of its parts. */
#include "recurrent.h"

#include <string.h>

#include "step/plan_state.h"

/* Drafted tokens after each of which a request has a state of its own. */
static int32_t drafted_states(const struct layer *layer)
{
    return layer->caches != NULL ? 0 : layer->gdn->num_speculative_tokens;
}

/* The row that request r starts from. */
static const int32_t *initial_row(const struct attn_batch_recurrent *states, int32_t r)
{
    return states->initial_slots != NULL ? states->initial_slots + r * states->initial_slots_stride
                                         : states->state_slots + r * states->state_slots_stride;
}

/* Multiples of the interval in (seq_len - query_len, seq_len]. */
static int32_t num_checkpoints(const struct attn_batch *b,
                               const struct attn_batch_recurrent *states, int32_t interval,
                               int32_t r)
{
    return states->checkpoint_slots == NULL
               ? 0
               : b->seq_lens[r] / interval - (b->seq_lens[r] - num_queries(b, r)) / interval;
}

/* Does request r begin with a state? */
static bool has_initial_state(const struct attn_batch *b, const struct attn_batch_recurrent *states,
                              int32_t r)
{
    return states->has_initial_state != NULL ? states->has_initial_state[r] != 0
                                             : b->seq_lens[r] > num_queries(b, r);
}

/* A slot that a request reads or writes in a batch; neither: it is not followed. */
struct slot_use {
    const char *array;
    int32_t slot;
    bool reads, writes;
};

/* The n-th of request r: what its state is read from, where its states go, its checkpoints. false:
 * it has no more. */
static bool slot_use_of(const attn_plan *plan, const struct attn_batch_recurrent *states, int32_t r,
                        int64_t n, struct slot_use *use)
{
    const struct attn_batch *b = &plan->given;
    const struct attn_recurrent_desc *g = plan->steps[0].layer->selected->gdn;
    const int32_t *accepted = states->num_accepted_tokens;
    const int32_t *row = states->state_slots + r * states->state_slots_stride;
    const int32_t queries = num_queries(b, r);
    const int32_t drafted = drafted_states(plan->steps[0].layer->selected);
    const bool all = accepted != NULL && queries <= 1 + drafted;
    const int32_t kept = all ? queries : 1;
    if (queries == 0 || row[0] < 0 || (b->seq_lens != NULL && b->seq_lens[r] == 0)) {
        return false;
    }
    if (n < 2) { /* the window's, the state's */
        const int32_t at = n == 1 && accepted != NULL && drafted > 0 ? accepted[r] - 1 : 0;
        *use =
            (struct slot_use){states->initial_slots != NULL ? "initial_slots" : "state_slots",
                              initial_row(states, r)[at], has_initial_state(b, states, r), false};
        return true;
    }
    if (n < 2 + kept) {
        *use = (struct slot_use){"state_slots", row[n - 2], false, row[n - 2] >= 0};
        return true;
    }
    const int64_t checkpoint = n - 2 - kept;
    if (checkpoint >= num_checkpoints(b, states, g->checkpoint_interval, r)) {
        return false;
    }
    const int32_t slot = states->checkpoint_slots[r * states->checkpoint_slots_stride + checkpoint];
    *use = (struct slot_use){"checkpoint_slots", slot, false, slot >= 0};
    return true;
}

/* May these two be one slot? Several may read it; a request's state goes to where it came from. */
static bool share_slot(const struct slot_use *a, const struct slot_use *b, bool one_request)
{
    const bool to_its_own = one_request && a->writes != b->writes &&
                            strcmp(a->writes ? a->array : b->array, "state_slots") == 0;
    const bool followed = (a->reads || a->writes) && (b->reads || b->writes);
    return !followed || a->slot != b->slot || (!a->writes && !b->writes) || to_its_own;
}

/* Counts by which a request's slots are found, and rows of its ring. */
static attn_status check_counts(const attn_plan *plan, const struct attn_batch_recurrent *states,
                                int32_t r, struct attn_error *error)
{
    const struct layer *layer = plan->steps[0].layer->selected;
    const struct attn_recurrent_desc *g = layer->gdn;
    const struct attn_batch *b = &plan->given;
    const struct attn_batch_replay *replay =
        ext_find(states->ext.next, ATTN_EXT_DRAFT_BATCH_REPLAY);
    const int32_t drafted = g->num_speculative_tokens;
    const int32_t accepted =
        states->num_accepted_tokens != NULL ? states->num_accepted_tokens[r] : 1;
    const int32_t checkpoints = num_checkpoints(&plan->given, states, g->checkpoint_interval, r);
    BAD_IF(accepted < 1 || accepted > 1 + drafted, "num_accepted_tokens", "request %d: %d; 1 to %d",
           r, accepted, 1 + drafted);
    if (replay != NULL && has_initial_state(b, states, r) && b->seq_lens[r] > 0) {
        const int32_t past = b->seq_lens[r] - num_queries(b, r);
        const int32_t rows = layer->caches->caches->block_size - drafted;
        const int32_t most = past < rows ? past : rows - 1;
        BAD_IF(replay->ring_tokens[r] < 0 || replay->ring_tokens[r] > most, "ring_tokens",
               "request %d: %d; 0 to %d", r, replay->ring_tokens[r], most);
    }
    return checkpoints <= states->checkpoint_slots_stride
               ? ATTN_OK
               : BAD("checkpoint_slots", "request %d has %d checkpoints in a row of %lld", r,
                     checkpoints, (long long)states->checkpoint_slots_stride);
}

/* Every slot that a kernel will follow, where the host can read them: it is the layer's, and, since
 * requests of a batch run at once, no other's where one writes it. */
static attn_status validate_slots(const attn_plan *plan, const struct attn_batch_recurrent *states,
                                  struct attn_error *error)
{
    const int64_t slots = layer_num_blocks(plan_smallest(plan, 0), 0);
    struct slot_use use, other;
    for (int32_t r = 0; r < plan->given.num_reqs; r++) {
        TRY_IF(num_queries(&plan->given, r) > 0 &&
                   states->state_slots[r * states->state_slots_stride] >= 0,
               check_counts(plan, states, r, error));
        for (int64_t n = 0; slot_use_of(plan, states, r, n, &use); n++) {
            BAD_IF((use.reads || use.writes) && (use.slot < 0 || use.slot >= slots), use.array,
                   "request %d %s slot %d; the layer has slots 0 to %lld", r,
                   use.writes ? "writes" : "reads", use.slot, (long long)slots - 1);
            for (int32_t s = 0; s <= r; s++) {
                for (int64_t m = 0; (s < r || m < n) && slot_use_of(plan, states, s, m, &other);
                     m++) {
                    if (!share_slot(&use, &other, s == r)) {
                        const bool state = strcmp(use.array, "state_slots") == 0;
                        return BAD(state ? other.array : use.array,
                                   "slot %d: request %d %s it (%s), and request %d %s it (%s) in "
                                   "the same batch; a slot that one writes is no other's, and is "
                                   "written once",
                                   use.slot, s, other.writes ? "writes" : "reads", other.array, r,
                                   use.writes ? "writes" : "reads", use.array);
                    }
                }
            }
        }
    }
    return ATTN_OK;
}

/* The extensions of a part of the batch: their arrays begin at the part's first request. */
static void cut_states(const struct attn_batch_recurrent *whole, int32_t first,
                       struct attn_batch_recurrent *part, struct attn_batch_replay *ring,
                       struct attn_batch *view)
{
    *part = *whole;
    if (whole->ext.next != NULL) {
        *ring = *(const struct attn_batch_replay *)whole->ext.next;
        ring->ring_tokens += first;
        part->ext.next = &ring->ext;
    }
    part->state_slots += first * whole->state_slots_stride;
    part->has_initial_state = MOVED(whole->has_initial_state, first);
    part->num_accepted_tokens = MOVED(whole->num_accepted_tokens, first);
    part->initial_slots = MOVED(whole->initial_slots, first * whole->initial_slots_stride);
    part->checkpoint_slots = MOVED(whole->checkpoint_slots, first * whole->checkpoint_slots_stride);
    view->next = &part->ext;
}

attn_status recurrent_view_split(attn_plan *plan, struct attn_error *error)
{
    const struct attn_ext *ext = ext_find(plan->given.next, ATTN_EXT_BATCH_RECURRENT);
    const struct layer *layer = plan->steps[0].layer->selected;
    const struct attn_recurrent_desc *g = layer->gdn;
    const struct attn_batch_replay *replay =
        ext_find(plan->given.next, ATTN_EXT_DRAFT_BATCH_REPLAY);
    BAD_IF(ext == NULL, "attn_batch_recurrent",
           "is not on the batch; layer '%s' needs its state_slots",
           plan->steps[0].layer->desc->name);
    struct recurrent_batch *parts = plan->data[COMPOSITION_RECURRENT];
    struct attn_batch_recurrent *states = &parts->whole;
    *states = *(const struct attn_batch_recurrent *)ext;
    states->ext.struct_size = sizeof *states;
    states->ext.next = NULL;
    states->state_slots_stride += states->state_slots_stride == 0; /* 0: 1 */
    states->initial_slots_stride += states->initial_slots_stride == 0;
    const int32_t row = states->num_accepted_tokens != NULL ? 1 + drafted_states(layer) : 0;
    if (layer->caches != NULL) {
        BAD_IF(replay == NULL || replay->ring_tokens == NULL || plan->given.seq_lens == NULL,
               "attn_batch_replay",
               "%p, ring_tokens %p, seq_lens %p; a layer with a ring needs all three",
               (const void *)replay, replay != NULL ? (const void *)replay->ring_tokens : NULL,
               (const void *)plan->given.seq_lens);
        parts->rings[0] = *replay;
        parts->rings[0].ext.struct_size = sizeof *replay;
        parts->rings[0].ext.next = NULL;
        replay = &parts->rings[0];
        states->ext.next = &replay->ext;
    }
    BAD_IF(states->state_slots == NULL || states->state_slots_stride < row, "state_slots",
           "%p, rows %lld apart; an array is needed, and rows of %d states where tokens are "
           "drafted",
           (const void *)states->state_slots, (long long)states->state_slots_stride,
           1 + drafted_states(layer));
    BAD_IF(states->initial_slots != NULL && states->initial_slots_stride < row,
           "initial_slots_stride", "is %lld; rows of %d states where tokens are drafted",
           (long long)states->initial_slots_stride, 1 + drafted_states(layer));
    BAD_IF(states->checkpoint_slots != NULL && plan->given.seq_lens == NULL, "seq_lens",
           "is NULL; checkpoint_slots need the requests' lengths");
    BAD_IF((states->initial_slots != NULL && !g->has_initial_slots) ||
               (states->checkpoint_slots != NULL &&
                (g->checkpoint_interval == 0 || states->checkpoint_slots_stride < 0)),
           "initial_slots",
           "%p, checkpoint_slots %p, rows %lld apart; a layer that brings them says "
           "has_initial_slots or checkpoint_interval",
           (const void *)states->initial_slots, (const void *)states->checkpoint_slots,
           (long long)states->checkpoint_slots_stride);
    BAD_IF(states->has_initial_state == NULL && plan->given.seq_lens == NULL, "has_initial_state",
           "is NULL, and so is seq_lens, from which it would follow");
    TRY_IF(plan->looks, validate_slots(plan, states, error));
    plan->whole.next = &states->ext;
    cut_states(states, 0, &parts->decode, &parts->rings[1], &plan->decode);
    cut_states(states, plan->split.num_decodes, &parts->prefill, &parts->rings[2], &plan->prefill);
    return ATTN_OK;
}
