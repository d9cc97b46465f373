/* SPDX-License-Identifier: Apache-2.0 */
/* Malformed batches of a plan. */
#include <string.h>

#include "core/malformed.h"

static attn_status starts_null(struct malformed_step *s)
{
    struct attn_batch batch = s->side->binding.batch;
    batch.query_start_loc_host = NULL;
    return malformed_plan(s, &batch);
}

static attn_status starts_decrease(struct malformed_step *s)
{
    struct attn_batch batch = s->side->binding.batch;
    int32_t starts[PROBLEM_MAX_REQS + 1];
    memcpy(starts, batch.query_start_loc_host, (size_t)(batch.num_reqs + 1) * sizeof *starts);
    starts[1] = starts[2] + 1;
    batch.query_start_loc_host = starts;
    return malformed_plan(s, &batch);
}

static attn_status table_null(struct malformed_step *s)
{
    struct attn_batch batch = s->side->binding.batch;
    batch.block_table = NULL;
    return malformed_plan(s, &batch);
}

static attn_status slots_null(struct malformed_step *s)
{
    struct attn_batch batch = s->side->binding.batch;
    batch.slot_mapping = NULL;
    return malformed_plan(s, &batch);
}

static attn_status lens_short(struct malformed_step *s)
{
    struct attn_batch batch = s->side->binding.batch;
    int32_t lens[PROBLEM_MAX_REQS];
    memcpy(lens, batch.seq_lens_host, (size_t)batch.num_reqs * sizeof *lens);
    lens[batch.num_reqs - 1] = -3;
    batch.seq_lens_host = lens;
    return malformed_plan(s, &batch);
}

static attn_status reqs_over(struct malformed_step *s)
{
    struct attn_batch batch = s->side->binding.batch;
    batch.num_reqs = 1000;
    return malformed_plan(s, &batch);
}

static attn_status tokens_over(struct malformed_step *s)
{
    struct attn_batch batch = s->side->binding.batch;
    batch.num_tokens = 1 << 20;
    return malformed_plan(s, &batch);
}

static attn_status mode_unknown(struct malformed_step *s)
{
    struct attn_batch batch = s->side->binding.batch;
    batch.mode = 77;
    return malformed_plan(s, &batch);
}

static attn_status causal_unknown(struct malformed_step *s)
{
    struct attn_batch batch = s->side->binding.batch;
    batch.causal = 5;
    return malformed_plan(s, &batch);
}

static attn_status extension_unknown(struct malformed_step *s)
{
    struct attn_batch batch = s->side->binding.batch;
    const struct attn_ext unknown = {0xfff, 0, sizeof unknown, NULL};
    batch.next = &unknown;
    return malformed_plan(s, &batch);
}

static const struct malformed malformed[] = {
    {"query_start_loc_null", starts_null, "query_start_loc"},
    {"query_start_loc_decreases", starts_decrease, "query_start_loc"},
    {"block_table_null", table_null, "block_table"},
    {"slot_mapping_null", slots_null, "slot_mapping"},
    {"seq_lens_negative", lens_short, "seq_lens"},
    {"num_reqs_over_limit", reqs_over, "num_reqs"},
    {"num_tokens_over_limit", tokens_over, "num_tokens"},
    {"mode_unknown", mode_unknown, "mode"},
    {"causal_unknown", causal_unknown, "causal"},
    {"extension_unknown", extension_unknown, "attn_batch"},
};
const struct malformed_list malformed_batches = {malformed, sizeof malformed / sizeof *malformed};
