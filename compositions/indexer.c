/* SPDX-License-Identifier: Apache-2.0 */
/* Indexers: layers that choose keys for others. A step writes index keys, which write_kv may norm,
 * rotate and transform first, and is one call of `attend`, whose output is lists. */
#include <attn/draft/index_write.h>
#include <attn/indexer.h>
#include <string.h>

#include "compositions.h"
#include "select/names.h"
#include "step/plan_state.h"

static int32_t num_forced(const struct attn_indexer_desc *x)
{
    return x->first_entries + x->last_entries + x->tail;
}

/* Fields that do not go together; each by itself is within its range. */
static attn_status check_together(const struct attn_layer_desc *l,
                                  const struct attn_indexer_desc *x, struct attn_error *error)
{
    BAD_IF(l->num_kv_heads != 1 || (l->head_size_v != 0 && l->head_size_v != l->head_size),
           "num_kv_heads",
           "layer '%s': num_kv_heads %d, head_size_v %d; an indexer has one head of index keys and "
           "no values: 1, and 0 or head_size",
           l->name, l->num_kv_heads, l->head_size_v);
    BAD_IF(l->num_q_heads % x->num_groups != 0, "num_groups",
           "layer '%s': num_groups %d does not divide num_q_heads %d", l->name, x->num_groups,
           l->num_q_heads);
    BAD_IF(x->tail && (x->tokens_per_row == 1 || x->rows_per_entry > 1), "tail",
           "layer '%s': tail is 1 with tokens_per_row %d and rows_per_entry %d; it needs rows of "
           "several tokens, each an entry",
           l->name, x->tokens_per_row, x->rows_per_entry);
    BAD_IF(!x->forced_on_top && num_forced(x) > x->topk, "first_entries",
           "layer '%s': first_entries, last_entries and tail are %d together and topk is %d, in "
           "which they are counted without forced_on_top",
           l->name, num_forced(x), x->topk);
    BAD_IF(l->block_size % x->tokens_per_row != 0, "tokens_per_row",
           "layer '%s': tokens_per_row %d does not divide block_size %d", l->name,
           x->tokens_per_row, l->block_size);
    const uint32_t plain = 1u << ATTN_KV_AUTO | 1u << ATTN_KV_F16 | 1u << ATTN_KV_BF16 |
                           1u << ATTN_KV_F32 | 1u << ATTN_KV_FP8_E4M3 | 1u << ATTN_KV_FP8_E5M2 |
                           1u << ATTN_KV_FP8_E4M3FNUZ | 1u << ATTN_KV_FP8_PER_TOKEN_HEAD |
                           1u << ATTN_KV_MXFP4;
    BAD_IF(l->kv_dtype >= NUM_KV_DTYPES || !(plain >> l->kv_dtype & 1), "kv_dtype",
           "layer '%s': kv_dtype is %s; index keys are auto, f16, bf16, f32, fp8_e4m3, fp8_e5m2, "
           "fp8_e4m3fnuz, fp8_per_token_head or mxfp4",
           l->name, code_text(ATTN_NAMES_KV_DTYPE, l->kv_dtype).text);
    return ATTN_OK;
}

/* What a write does to a key goes with its size. */
static attn_status check_write(const struct attn_layer_desc *l, const struct attn_index_write *w,
                               struct attn_error *error)
{
    BAD_IF((w->rope == ATTN_ROPE_NONE) != (w->rotary_dim == 0) || w->rotary_dim % 2 != 0,
           "rotary_dim",
           "layer '%s': rotary_dim is %d with rope %d; 0 without rope, with it an even number",
           l->name, w->rotary_dim, w->rope);
    BAD_IF(w->rope == ATTN_ROPE_NONE && w->rotary_first != 0, "rotary_first",
           "layer '%s': rotary_first is %d; 0 without rope", l->name, w->rotary_first);
    BAD_IF(w->rotary_first > l->head_size - w->rotary_dim, "rotary_first",
           "layer '%s': dims %d to %d are rotated; a key has %d", l->name, w->rotary_first,
           w->rotary_first + w->rotary_dim - 1, l->head_size);
    BAD_IF(w->hadamard && (l->head_size & (l->head_size - 1)) != 0, "hadamard",
           "layer '%s': head_size is %d; a Hadamard transform needs a power of two", l->name,
           l->head_size);
    BAD_IF(w->norm == ATTN_KEY_NORM_NONE && w->rope == ATTN_ROPE_NONE && !w->hadamard,
           "attn_index_write", "layer '%s': has neither norm nor rope nor hadamard", l->name);
    return ATTN_OK;
}

static attn_status resolve(struct layer *layer, struct attn_error *error)
{
    struct attn_indexer_desc *x = layer->indexer;
    const struct attn_layer_desc *l = &layer->desc;
    x->num_groups = x->num_groups == 0 ? 1 : x->num_groups;
    x->tokens_per_row = x->tokens_per_row == 0 ? 1 : x->tokens_per_row;
    x->rows_per_entry = x->rows_per_entry == 0 ? 1 : x->rows_per_entry;
    TRY(check_together(l, x, error));
    TRY_IF(layer->index_write != NULL, check_write(l, layer->index_write, error));
    layer->is_latent = layer->writes_apart = true;
    layer->tokens_per_row = x->tokens_per_row;
    /* another table than those of layers whose rows hold other numbers of tokens */
    const int32_t key[] = {ATTN_LAYER_INDEXER, x->tokens_per_row};
    memcpy(layer->batch_key, key, sizeof key);
    return ATTN_OK;
}

static int32_t at_least_one(int32_t most)
{
    return most > 0 ? most : 1;
}

static void match(struct check *check, int32_t phase)
{
    const struct attn_indexer_desc *x = check->whole->indexer;
    const struct attn_indexer_caps *caps = ext_find(check->caps->next, ATTN_EXT_CAPS_INDEXER);
    if (!(check->caps->layer_kinds >> ATTN_LAYER_INDEXER & 1)) {
        return;
    }
    if (caps == NULL) {
        reasons_add(check->reasons, "attn_indexer_caps", "limits of indexers", "not declared");
        return;
    }
    CHECK_LIMITS(check, {"head_size", check->layer->head_size, caps->head_size_max},
                 {"topk", x->topk, caps->topk_max},
                 {"num_groups", x->num_groups, at_least_one(caps->num_groups_max)},
                 {"tokens_per_row", x->tokens_per_row, at_least_one(caps->tokens_per_row_max)},
                 {"rows_per_entry", x->rows_per_entry, at_least_one(caps->rows_per_entry_max)},
                 {"first_entries, last_entries, tail", num_forced(x), caps->forced_max});
    if (check->whole->index_write != NULL) {
        CHECK_NEEDS(check, "attn_index_write",
                    {check->caps->features & ATTN_FEATURE_DRAFT_INDEX_WRITE,
                     "norm, rotation or Hadamard transform of keys", "not declared"});
    }
    CHECK_DRAFT_CODE(check, "activation", x->activation, caps->activations, "identity", "relu");
}

static attn_status check_weights(const attn_plan *plan, const struct step *step,
                                 const struct attn_io_indexer *given, struct attn_error *error)
{
    const struct attn_tensor *w = given != NULL ? given->weights : NULL;
    if (!step->layer->selected->indexer->has_weights) {
        return w == NULL ? ATTN_OK
                         : BAD("weights", "is given, and the layer does not say has_weights");
    }
    CHECK_TENSOR(w, NULL, "weights", 2, {plan->num_tokens, step->q.heads}, 1);
    return ATTN_OK;
}

/* What a write reads for its norm; without one it is given nothing. */
static attn_status check_norm(const struct layer *layer, const struct attn_io_index_write *given,
                              struct attn_error *error)
{
    const int32_t norm = layer->index_write->norm;
    const int64_t size = layer->desc.head_size;
    TRY(step_check_eps(given->norm_eps, error));
    BAD_IF(given->norm_eps != 0 && norm == ATTN_KEY_NORM_NONE, "norm_eps",
           "is %g, and the layer's norm is none", (double)given->norm_eps);
    BAD_IF(given->norm_weight != NULL && norm == ATTN_KEY_NORM_NONE, "norm_weight",
           "is given, and the layer's norm is none");
    BAD_IF(given->norm_bias != NULL && norm != ATTN_KEY_NORM_LAYER, "norm_bias",
           "is given, and the layer's norm has no bias");
    CHECK_TENSOR_IF(norm != ATTN_KEY_NORM_NONE, given->norm_weight, NULL, "norm_weight", 1, {size});
    CHECK_TENSOR_IF(given->norm_bias != NULL, given->norm_bias, NULL, "norm_bias", 1, {size});
    return ATTN_OK;
}

/* What a write that norms, rotates and transforms reads; under validation on a CPU also that each
 * position is a row of the table. */
static attn_status check_written(const attn_plan *plan, const struct layer *layer,
                                 const struct attn_io_index_write *given, struct attn_error *error)
{
    const struct attn_index_write *w = layer->index_write;
    const int64_t tokens = layer->tokens_per_row;
    BAD_IF(given == NULL, "attn_io_index_write", "is missing, and the layer has attn_index_write");
    TRY(check_norm(layer, given, error));
    if (w->rope == ATTN_ROPE_NONE) {
        BAD_IF(given->positions != NULL, "positions", "is given, and the layer rotates no keys");
        BAD_IF(given->cos_sin != NULL, "cos_sin", "is given, and the layer rotates no keys");
        return ATTN_OK;
    }
    BAD_IF(given->positions == NULL, "positions", "is NULL, and the layer rotates keys");
    CHECK_TENSOR(given->cos_sin, NULL, "cos_sin", 2, {TENSOR_ANY, w->rotary_dim});
    for (int64_t t = 0; plan->looks && t < plan->given.num_slots; t++) {
        const int64_t slot = plan->given.slot_mapping[t], at = given->positions[t];
        BAD_IF(slot >= 0 && slot % tokens == tokens - 1 &&
                   (at < 0 || at >= given->cos_sin->shape[0]),
               "positions", "positions[%lld] is %lld; cos_sin has positions 0 to %lld",
               (long long)t, (long long)at, (long long)given->cos_sin->shape[0] - 1);
    }
    return ATTN_OK;
}

/* The tensors of a run; under validation also NaN in what is read. */
static attn_status check_io(const attn_plan *plan, const struct step *step,
                            const struct attn_step_io *io, bool writes, bool attends,
                            struct attn_error *error)
{
    const struct attn_io_indexer *given = ext_find(io->next, ATTN_EXT_IO_INDEXER);
    BAD_IF(io->v != NULL || io->lse != NULL, io->v != NULL ? "v" : "lse",
           "is given; an indexer has neither v nor lse");
    TRY_IF(writes, check_rows("k", io->k, &step->k, plan->given.num_slots, error));
    TRY_IF(writes && step->layer->selected->index_write != NULL,
           check_written(plan, step->layer->selected,
                         ext_find(io->next, ATTN_EXT_DRAFT_IO_INDEX_WRITE), error));
    /* where a row has several tokens, only the key of the last one is read */
    const bool looks = writes && step->layer->selected->tokens_per_row == 1;
    TRY_IF(looks, validate_written(plan, io->k, "k", error));
    if (!attends) {
        return ATTN_OK;
    }
    TRY(check_input(plan, "q", io->q, &step->q, plan->num_tokens, error));
    TRY(check_rows("out", io->out, &step->out, plan->num_tokens, error));
    TRY(check_weights(plan, step, given, error));
    return given != NULL ? validate_tensor(plan, given->weights, "weights", error) : ATTN_OK;
}

static attn_status build(attn_plan *plan, struct attn_error *error)
{
    FOR_SERVED(step, plan, COMPOSITION_INDEXER) {
        const struct attn_indexer_desc *x = step->layer->selected->indexer;
        const struct attn_tensor lists = {.ndim = 3, .dtype = {ATTN_CODE_INT, 32, 1}};
        step->check_io = check_io;
        step->idle_byte = 0xff;
        step->out.kind = tensor_kind(&lists);
        step->out.heads = x->num_groups;
        step->out.head_size = x->topk + (x->forced_on_top ? num_forced(x) : 0);
    }
    return ATTN_OK;
}

const struct composition composition_indexer = {
    .extension = offsetof(struct layer, indexer),
    .resolve = resolve,
    .match = match,
    .build = build,
};
