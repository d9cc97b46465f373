/* SPDX-License-Identifier: Apache-2.0 */
/* Reading the engine's batch and cutting it into its decode and prefill parts. */
#include "bind/address_check.h"
#include "step/plan_state.h"

/* The most queries that one of requests first .. end-1 has. */
static int32_t longest_query(const struct attn_batch *batch, int32_t first, int32_t end)
{
    int32_t longest = 0;
    for (int32_t r = first; r < end; r++) {
        longest = num_queries(batch, r) > longest ? num_queries(batch, r) : longest;
    }
    return longest;
}

static attn_status check_counts(const attn_plan *plan, const struct attn_batch *b,
                                struct attn_error *error)
{
    const struct attn_limits *limits = &plan->limits;
    TRY(check_limit("num_reqs", b->num_reqs, limits->max_num_reqs, error));
    BAD_IF(b->num_actual_tokens < 0 || b->num_actual_tokens > b->num_tokens, "num_actual_tokens",
           "num_actual_tokens is %d; 0 to num_tokens, %d", b->num_actual_tokens, b->num_tokens);
    TRY(check_limit("max_query_len", b->max_query_len, limits->max_query_len, error));
    TRY(check_limit("max_seq_len", b->max_seq_len, limits->max_seq_len, error));
    const uint32_t known =
        ATTN_BATCH_NO_CASCADE | ATTN_BATCH_IN_CAPTURE | ATTN_BATCH_HOST_BOUNDS | ATTN_FLAG_HINTS;
    return (b->flags & ~known) == 0
               ? struct_check(b, ABI_BATCH, NULL, error)
               : BAD("flags", "flags is %#x; %#x is not known here", b->flags, b->flags & ~known);
}

static attn_status check_queries(struct attn_batch *b, struct attn_error *error)
{
    const int32_t *start = b->query_start_loc_host;
    BAD_IF(start == NULL || b->query_start_loc == NULL, "query_start_loc",
           "query_start_loc %p, query_start_loc_host %p; both are required",
           (const void *)b->query_start_loc, (const void *)start);
    TRY(check_starts(&(struct starts){"", "query_start_loc"}, start, b->num_reqs, error));
    const int32_t longest = longest_query(b, 0, b->num_reqs);
    BAD_IF(b->num_reqs > 0 && start[b->num_reqs] != b->num_actual_tokens, "query_start_loc",
           "query_start_loc[%d] is %d, num_actual_tokens %d; they must agree", b->num_reqs,
           start[b->num_reqs], b->num_actual_tokens);
    BAD_IF(b->max_query_len > 0 && b->max_query_len < longest, "max_query_len",
           "max_query_len is %d and a request has %d queries", b->max_query_len, longest);
    b->max_query_len = b->max_query_len > 0 ? b->max_query_len : longest;
    return ATTN_OK;
}

/* Contiguous keys: as queries, or with starts of their own. */
static attn_status check_key_starts(const struct attn_batch *b, struct attn_error *error)
{
    const int32_t *start = b->key_start_loc != NULL ? b->key_start_loc_host : NULL;
    BAD_IF(b->key_start_loc != NULL && start == NULL, "key_start_loc_host",
           "key_start_loc needs its host copy");
    return check_starts(&(struct starts){"", "key_start_loc"}, start, b->num_reqs, error);
}

static attn_status check_cache(attn_plan *plan, struct attn_batch *b, struct attn_error *error)
{
    attn_layer *owner = plan->steps[0].layer->owner;
    if (owner->spec.kind == ATTN_KV_SPEC_STATE) {
        return ATTN_OK; /* states by slot: attn_batch_recurrent */
    }
    if (!layer_has_cache(owner->desc)) {
        return check_key_starts(b, error);
    }
    struct attn_batch_table own = own_table(b);
    if (owner->desc->kind == ATTN_LAYER_CROSS) { /* their keys are the encoder's */
        BAD_IF(b->encoder_seq_lens == NULL, "encoder_seq_lens",
               "a cross layer needs encoder_seq_lens");
        own.seq_lens = b->encoder_seq_lens;
        own.seq_lens_host = b->encoder_seq_lens_host;
        own.max_seq_len = b->max_encoder_seq_len;
    } else { /* views have requests of their own number */
        b->encoder_seq_lens = b->encoder_seq_lens_host = NULL;
    }
    TRY(table_check(plan, b, 0, &own, error));
    own_table_put(b, &own);
    return ATTN_OK;
}

/* Where what a batch brings lies: for the first one, and under validation. */
static attn_status check_addresses(attn_plan *plan, const struct attn_batch *batch,
                                   struct attn_error *error)
{
    if (plan->model->asked == NULL || (plan->asked && !plan->validate)) {
        return ATTN_OK;
    }
    TRY(address_check_all(plan->model, batch, ABI_BATCH, batch->next, NULL, true, error));
    plan->asked = true;
    return ATTN_OK;
}

attn_status batch_read(attn_plan *plan, const struct attn_batch *batch, struct attn_error *error)
{
    struct attn_batch read;
    TRY(struct_read(&read, ABI_BATCH, batch, error));
    plan->received = read;
    TRY(ext_narrow(&read.next, ABI_BATCH, plan->vendor_ids, plan->num_vendor_ids,
                   &plan->batch_extensions, error));
    TRY(check_limit("num_tokens", read.num_tokens, plan->limits.max_num_tokens, error));
    if (read.mode != ATTN_BATCH_PROFILE) {
        TRY(check_addresses(plan, &read, error));
        TRY(check_counts(plan, &read, error));
        TRY(batch_check_fields(plan, &read, error));
    }
    const bool checked = read.mode != ATTN_BATCH_PROFILE && read.mode != ATTN_BATCH_IDLE;
    if (checked) {
        TRY(check_queries(&read, error));
        TRY(check_cache(plan, &read, error));
        TRY(tables_read(plan, &read, error));
    }
    const struct attn_batch_context_parallel *ranks = ext_find(read.next, ATTN_EXT_BATCH_CONTEXT);
    plan->given = read;
    plan->all_query_lens = ranks != NULL && plan->takes.all_queries ? ranks->query_lens_host : NULL;
    plan->num_tokens = read.num_tokens;
    plan->first_row = checked && read.num_reqs > 0 ? read.query_start_loc_host[0] : 0;
    const int32_t *keys = checked && read.key_start_loc != NULL ? read.key_start_loc_host : NULL;
    plan->first_key_row = keys != NULL ? keys[0] : plan->first_row;
    plan->num_key_rows = keys != NULL ? keys[read.num_reqs] : read.num_actual_tokens;
    return ATTN_OK;
}

void batch_cut(const struct attn_batch *whole, int32_t first, int32_t end, struct attn_batch *part)
{
    const int32_t *start = whole->query_start_loc_host;
    *part = *whole;
    part->num_reqs = end - first;
    part->num_actual_tokens = start[end];
    part->query_start_loc += first;
    part->query_start_loc_host += first;
    part->key_start_loc = MOVED(whole->key_start_loc, first);
    part->key_start_loc_host = MOVED(whole->key_start_loc_host, first);
    part->causal_per_request = MOVED(whole->causal_per_request, first);
    part->encoder_seq_lens = MOVED(whole->encoder_seq_lens, first);
    part->encoder_seq_lens_host = MOVED(whole->encoder_seq_lens_host, first);
    part->span_start_loc = MOVED(whole->span_start_loc, first);
    struct attn_batch_table own = own_table(whole);
    table_cut(&own, first);
    own_table_put(part, &own);
    if (whole->tree != NULL) {
        part->tree = (const uint8_t *)whole->tree + (int64_t)4 * first * whole->tree_stride_request;
    }
    part->max_query_len = longest_query(whole, first, end);
}

void batch_split(attn_plan *plan)
{
    const struct attn_batch *whole = &plan->whole;
    const int32_t *start = whole->query_start_loc_host;
    int32_t decodes = 0;
    while (decodes < whole->num_reqs && num_queries(whole, decodes) <= plan->decode_threshold) {
        decodes++;
    }
    batch_cut(whole, 0, decodes, &plan->decode);
    batch_cut(whole, decodes, whole->num_reqs, &plan->prefill);
    if (plan->num_tables > 0) {
        tables_cut(plan, 1, 0, &plan->decode);
        tables_cut(plan, 2, decodes, &plan->prefill);
    }
    int32_t decode_tokens = start[decodes] - start[0];
    plan->split =
        (struct attn_batch_split){.struct_size = sizeof plan->split,
                                  .num_decodes = decodes,
                                  .num_prefills = whole->num_reqs - decodes,
                                  .num_decode_tokens = decode_tokens,
                                  .num_prefill_tokens = start[whole->num_reqs] - start[decodes]};
}
