/* SPDX-License-Identifier: Apache-2.0 */
/* ATTN_VALIDATE=1: every index of a batch and every number of a tensor, before a kernel follows it.
 * Only memory that the host can read is looked at. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "step/plan_state.h"

/* A window of numbers at a time, whose bits fit on the stack. */
int64_t find_second(const void *numbers, size_t size, int64_t count, int64_t first, int64_t end)
{
    uint64_t seen[512];
    const int64_t window = 64 * (int64_t)(sizeof seen / sizeof *seen);
    for (; first < end; first += window) {
        memset(seen, 0, sizeof seen);
        for (int64_t i = 0; i < count; i++) {
            const int64_t number = size == sizeof(int64_t) ? ((const int64_t *)numbers)[i]
                                                           : ((const int32_t *)numbers)[i];
            if (number < first || number >= end || number - first >= window) {
                continue;
            }
            const int64_t at = number - first;
            if (seen[at / 64] >> (at % 64) & 1) {
                return i;
            }
            seen[at / 64] |= UINT64_C(1) << (at % 64);
        }
    }
    return -1;
}

/* "request 1, token 3: slot 128"; of a further table, or with padding among the slots, "row 3: slot
 * 128". */
static void name_slot(char *text, size_t size, const struct attn_batch *b, const int64_t *slots,
                      int64_t t)
{
    const bool of_tokens = b != NULL && b->num_reqs > 0 && b->num_slots <= b->num_actual_tokens &&
                           t >= b->query_start_loc_host[0];
    int32_t r = 0;
    while (of_tokens && r + 1 < b->num_reqs && b->query_start_loc_host[r + 1] <= t) {
        r++;
    }
    if (of_tokens) {
        snprintf(text, size, "request %d, token %lld: slot %lld", r, (long long)t,
                 (long long)slots[t]);
    } else {
        snprintf(text, size, "row %lld: slot %lld", (long long)t, (long long)slots[t]);
    }
}

/* Slots below `num_slots`, each of one token, or negative: padding, of which there may be any
 * number. `batch`: whose they are; NULL: a further table's. */
static attn_status validate_slot_list(const int64_t *slots, int64_t count, int64_t num_slots,
                                      const struct attn_batch *batch, struct attn_error *error)
{
    const char *field = batch != NULL ? "slot_mapping" : "tables";
    int64_t low = num_slots, high = -1;
    char slot[80];
    for (int64_t t = 0; t < count; t++) {
        if (slots[t] >= num_slots) {
            name_slot(slot, sizeof slot, batch, slots, t);
            return BAD(field, "%s; the cache has slots 0 to %lld", slot, (long long)num_slots - 1);
        }
        low = slots[t] >= 0 && slots[t] < low ? slots[t] : low;
        high = slots[t] > high ? slots[t] : high;
    }
    const int64_t second = find_second(slots, sizeof *slots, count, low, high + 1);
    if (second >= 0) {
        name_slot(slot, sizeof slot, batch, slots, second);
        return BAD(field, "%s is that of an earlier token, too", slot);
    }
    return ATTN_OK;
}

/* First key that any query of the request can see; keys before it may lie in undefined blocks. */
static int64_t first_visible(const struct attn_layer_desc *l, int64_t first_position)
{
    int64_t from = 0;
    if (l->prefix_lm) {
        return 0;
    }
    if (l->has_window && l->window_left >= 0) {
        from = first_position - l->window_left;
    }
    if (l->chunk_size > 0) {
        int64_t chunk = first_position / l->chunk_size - l->chunk_lookback;
        from = chunk > 0 ? chunk * l->chunk_size : 0;
    }
    return from > 0 ? from : 0;
}

/* The same of all layers of the plan, which share the table. */
static int64_t first_visible_to_any(const attn_plan *plan, int64_t first_position)
{
    int64_t first = first_position > 0 ? first_position : 0; /* a cross layer's is below */
    for (int32_t i = 0; i < plan->num_steps && first > 0; i++) {
        const int64_t from = first_visible(plan->steps[i].layer->desc, first_position);
        first = from < first ? from : first;
    }
    return first;
}

const attn_layer *plan_smallest(const attn_plan *plan, int32_t table)
{
    const attn_layer *smallest = plan->steps[0].layer->owner;
    for (int32_t i = 1; i < plan->num_steps; i++) {
        const attn_layer *owner = plan->steps[i].layer->owner;
        const bool fewer = layer_num_blocks(owner, table) < layer_num_blocks(smallest, table);
        smallest = fewer ? owner : smallest;
    }
    return smallest;
}

/* Lengths of which the host had none: within the bounds, and the step's own tokens included. */
static attn_status validate_lengths(const struct attn_batch *b, bool cross,
                                    struct attn_error *error)
{
    for (int32_t r = 0; r < b->num_reqs; r++) {
        const int32_t length = b->seq_lens[r];
        const int32_t query_len = b->query_start_loc[r + 1] - b->query_start_loc[r];
        BAD_IF(length < 0 || (b->max_seq_len > 0 && length > b->max_seq_len) ||
                   (!cross && length != 0 && length < query_len),
               "seq_lens",
               "request %d has %d keys on the device and %d queries; 0, or from its queries to "
               "max_seq_len, %d",
               r, length, query_len, b->max_seq_len);
    }
    return ATTN_OK;
}

/* Blocks of one table that a kernel will follow. */
static attn_status validate_table(const attn_plan *plan, int32_t number,
                                  const struct attn_batch_table *t, struct attn_error *error)
{
    const attn_layer *smallest = plan_smallest(plan, number);
    const int64_t num_blocks = layer_num_blocks(smallest, number) / layer_parts(smallest, number);
    const int32_t *start = plan->given.query_start_loc;
    const bool own = number == 0;
    const int64_t in_block = plan->made[number].rows_per_entry;
    char where[24] = "";
    if (!own) {
        snprintf(where, sizeof where, "table %d, ", number);
    }
    for (int32_t r = 0; r < plan->given.num_reqs; r++) {
        const int64_t row = t->block_table_row != NULL ? t->block_table_row[r] : r;
        const int64_t length = t->seq_lens[r], queries = start[r + 1] - start[r];
        const int64_t last = (length + in_block - 1) / in_block;
        BAD_IF(row < 0 || row >= t->block_table_rows, own ? "block_table_row" : "tables",
               "%srequest %d has row %lld; the table has rows 0 to %lld", where, r, (long long)row,
               (long long)t->block_table_rows - 1);
        BAD_IF(length < 0 || last > t->block_table_stride, own ? "seq_lens" : "tables",
               "%srequest %d has %lld keys; a row of %lld blocks of %lld holds %lld", where, r,
               (long long)length, (long long)t->block_table_stride, (long long)in_block,
               (long long)(t->block_table_stride * in_block));
        int64_t count;
        const int32_t *entries = table_entries(plan, number, t, r, &count);
        BAD_IF(last > count, "page_start_loc", "%srequest %d has %lld keys and %lld pages of %lld",
               where, r, (long long)length, (long long)count, (long long)in_block);
        int64_t begin =
            own && length > 0 ? first_visible_to_any(plan, length - queries) / in_block : 0;
        for (int64_t i = begin; i < last && (queries > 0 || !own); i++) {
            int32_t block = entries[i];
            BAD_IF(block < 0 || block >= num_blocks, own ? "block_table" : "tables",
                   "%srequest %d, position %lld (entry %lld): block %d; the cache of layer '%s' "
                   "has blocks 0 to %lld",
                   where, r, (long long)(i * in_block), (long long)i, block, smallest->desc->name,
                   (long long)num_blocks - 1);
        }
    }
    return ATTN_OK;
}

/* The batch's tables beyond its own, as far as caches lie in them. */
static attn_status validate_further(const attn_plan *plan, struct attn_error *error)
{
    for (int32_t number = 1; number <= plan->num_tables; number++) {
        const struct attn_batch_table *t = &plan->tables[0][number - 1];
        const int64_t blocks = layer_num_blocks(plan_smallest(plan, number), number);
        if (blocks < INT64_MAX) {
            const int64_t slots = blocks * plan->made[number].rows_per_entry;
            TRY(validate_table(plan, number, t, error));
            TRY(validate_slot_list(t->slot_mapping, t->num_slots, slots, NULL, error));
        }
    }
    return ATTN_OK;
}

/* The leading keys that the batch calls common: whole blocks of them, as far as requests have them,
 * are the same in every row. */
static attn_status validate_prefix(const attn_plan *plan, struct attn_error *error)
{
    const struct attn_batch *b = &plan->given;
    const struct attn_batch_table own = own_table(b);
    const int64_t blocks = b->common_prefix_len / plan->made[0].rows_per_entry;
    const int32_t *first = NULL;
    int32_t first_request = 0;
    for (int32_t r = 0; r < b->num_reqs && b->common_prefix_len > 0; r++) {
        int64_t count;
        if (b->query_start_loc[r + 1] == b->query_start_loc[r] || b->seq_lens[r] == 0) {
            continue; /* padding */
        }
        const int32_t *entries = table_entries(plan, 0, &own, r, &count);
        for (int64_t i = 0; first != NULL && i < blocks && i < count; i++) {
            BAD_IF(entries[i] != first[i], "common_prefix_len",
                   "%d keys are called common, and entry %lld of the block table is %d for request "
                   "%d and %d for request %d",
                   b->common_prefix_len, (long long)i, first[i], first_request, entries[i], r);
        }
        if (first == NULL) {
            first = entries;
            first_request = r;
        }
    }
    return ATTN_OK;
}

/* What a batch carries besides: a kernel follows each of them. */
static attn_status validate_lists(const struct attn_batch *b, struct attn_error *error)
{
    const struct starts spans = {"", "span_start_loc", "num_spans", b->num_spans};
    TRY(check_starts(&spans, b->spans != NULL ? b->span_start_loc : NULL, b->num_reqs, error));
    for (int32_t i = 0; b->logits_indices != NULL && i < b->num_logits_indices; i++) {
        BAD_IF(b->logits_indices[i] < 0 || b->logits_indices[i] >= b->num_actual_tokens,
               "logits_indices", "logits_indices[%d] is %d; the step has rows 0 to %d", i,
               b->logits_indices[i], b->num_actual_tokens - 1);
    }
    return ATTN_OK;
}

/* No request has more queries than the host says; its lengths follow with the others'. */
static attn_status validate_bounds(const struct attn_batch *b, struct attn_error *error)
{
    for (int32_t r = 0; r < b->num_reqs; r++) {
        int64_t queries = (int64_t)b->query_start_loc[r + 1] - b->query_start_loc[r];
        int64_t most = (int64_t)b->query_start_loc_host[r + 1] - b->query_start_loc_host[r];
        BAD_IF(b->query_start_loc[0] != b->query_start_loc_host[0] || queries < 0 || queries > most,
               "query_start_loc",
               "request %d has %lld queries on the device and a bound of %lld on the host; rows "
               "begin with %d and %d",
               r, (long long)queries, (long long)most, b->query_start_loc[0],
               b->query_start_loc_host[0]);
    }
    return ATTN_OK;
}

attn_status validate_copy(const char *field, const int32_t *device, const int32_t *host,
                          int32_t count, bool bound, struct attn_error *error)
{
    for (int32_t i = 0; device != NULL && host != NULL && i < count; i++) {
        BAD_IF(device[i] > host[i] || (device[i] < host[i] && !bound), field,
               "%s[%d] is %d on the device and %d on the host", field, i, device[i], host[i]);
    }
    return ATTN_OK;
}

attn_status validate_batch(const attn_plan *plan, struct attn_error *error)
{
    const struct attn_batch *b = &plan->given;
    attn_layer *owner = plan->steps[0].layer->owner;
    const struct attn_layer_desc *l = owner->desc;
    TRY(validate_lists(b, error));
    const bool bounds = b->flags & ATTN_BATCH_HOST_BOUNDS;
    TRY(bounds ? validate_bounds(b, error)
               : validate_copy("query_start_loc", b->query_start_loc, b->query_start_loc_host,
                               b->num_reqs + 1, false, error));
    TRY(validate_copy("key_start_loc", b->key_start_loc, b->key_start_loc_host, b->num_reqs + 1,
                      false, error));
    if (!layer_has_cache(l) || b->seq_lens == NULL) { /* which states may do without */
        return ATTN_OK;
    }
    const struct attn_batch_table own = own_table(b);
    TRY(validate_copy("seq_lens", b->seq_lens, b->seq_lens_host, b->num_reqs, bounds, error));
    TRY(validate_lengths(b, l->kind == ATTN_LAYER_CROSS, error));
    if (owner->spec.kind == ATTN_KV_SPEC_STATE) {
        return ATTN_OK;
    }
    TRY(validate_table(plan, 0, &own, error));
    TRY(validate_prefix(plan, error));
    TRY(validate_further(plan, error));
    const int64_t slots = layer_num_blocks(plan_smallest(plan, 0), 0) * l->block_size;
    return validate_slot_list(b->slot_mapping, b->num_slots, slots, b, error);
}

attn_status validate_workers(const attn_plan *plan, struct attn_error *error)
{
    attn_runtime *runtime = plan->model->runtime;
    int64_t value;
    switch (host_take_wrong(&runtime->services, &value)) {
    case HOST_WRONG_WORKER:
        return BAD("parallel_for",
                   "the engine's parallel_for called a body with worker %lld; workers are 0 to %d "
                   "(attn_host.num_threads): the slice was not run",
                   (long long)value, runtime->host.num_threads - 1);
    case HOST_WRONG_ITEMS:
        return BAD("parallel_for",
                   "the engine's parallel_for ran %lld items of a loop that has others; each item "
                   "belongs to one slice, and all are done on return",
                   (long long)value);
    default:
        return ATTN_OK;
    }
}

static bool is_nan(const uint8_t *element, struct attn_dtype dtype)
{
    uint16_t half;
    float single;
    switch (dtype.bits) {
    case 16:
        memcpy(&half, element, sizeof half);
        return dtype.code == ATTN_CODE_BFLOAT ? (half & 0x7fff) > 0x7f80 : (half & 0x7fff) > 0x7c00;
    case 32:
        memcpy(&single, element, sizeof single);
        return isnan(single);
    default:
        return (dtype.code == ATTN_CODE_FLOAT8_E4M3FN && (*element & 0x7f) == 0x7f) ||
               (dtype.code == ATTN_CODE_FLOAT8_E4M3FNUZ && *element == 0x80) ||
               (dtype.code == ATTN_CODE_FLOAT8_E5M2 && (*element & 0x7f) > 0x7c);
    }
}

static bool looks_at(const attn_plan *plan, const struct attn_tensor *tensor)
{
    const int32_t mode = plan->given.mode;
    return plan->looks && mode != ATTN_BATCH_IDLE && mode != ATTN_BATCH_PROFILE && tensor != NULL &&
           tensor->data != NULL && tensor->ndim >= 2 && tensor->ndim <= 3;
}

/* The first `most` heads of it. */
static attn_status validate_row(const struct attn_tensor *tensor, int64_t t, int64_t most,
                                const char *name, struct attn_error *error)
{
    const int32_t last = tensor->ndim - 1;
    const int64_t bytes = tensor->dtype.bits / 8, all = last == 2 ? tensor->shape[1] : 1;
    const int64_t heads = all < most ? all : most;
    const int64_t dims = tensor->shape[last], dim = tensor_stride(tensor, last);
    const int64_t row = tensor_stride(tensor, 0), head = tensor_stride(tensor, last - 1);
    const uint8_t *data = tensor_data(tensor);
    for (int64_t i = 0; i < heads * dims; i++) {
        ERROR_IF(is_nan(data + (t * row + i / dims * head + i % dims * dim) * bytes, tensor->dtype),
                 ATTN_ERROR_NAN, name, "%s[%lld, %lld, %lld] is NaN", name, (long long)t,
                 (long long)(i / dims), (long long)(i % dims));
    }
    return ATTN_OK;
}

int64_t validate_end_row(const attn_plan *plan)
{
    const struct attn_batch *b = &plan->given;
    return b->flags & ATTN_BATCH_HOST_BOUNDS ? b->query_start_loc[b->num_reqs]
                                             : b->num_actual_tokens;
}

attn_status validate_rows(const attn_plan *plan, const struct attn_tensor *tensor, int64_t first,
                          int64_t end, const char *name, struct attn_error *error)
{
    for (int64_t t = first; looks_at(plan, tensor) && t < end && t < tensor->shape[0]; t++) {
        TRY(validate_row(tensor, t, INT64_MAX, name, error));
    }
    return ATTN_OK;
}

attn_status validate_heads(const attn_plan *plan, const struct attn_tensor *tensor, int64_t heads,
                           const char *name, struct attn_error *error)
{
    const int64_t end = looks_at(plan, tensor) ? validate_end_row(plan) : 0;
    for (int64_t t = plan->first_row; t < end && t < tensor->shape[0]; t++) {
        TRY(validate_row(tensor, t, heads, name, error));
    }
    return ATTN_OK;
}

attn_status validate_tensor(const attn_plan *plan, const struct attn_tensor *tensor,
                            const char *name, struct attn_error *error)
{
    return validate_heads(plan, tensor, INT64_MAX, name, error);
}

attn_status validate_written(const attn_plan *plan, const struct attn_tensor *tensor,
                             const char *name, struct attn_error *error)
{
    const struct attn_batch *b = &plan->given;
    for (int64_t t = 0; looks_at(plan, tensor) && t < b->num_slots && t < tensor->shape[0]; t++) {
        TRY_IF(b->slot_mapping[t] >= 0, validate_row(tensor, t, INT64_MAX, name, error));
    }
    return ATTN_OK;
}

attn_status validate_apart(const struct attn_tensor *tensor, const char *name,
                           struct attn_error *error)
{
    int64_t reach = 0; /* by the dimensions with smaller strides */
    uint32_t seen = 0;
    if (tensor == NULL || tensor->strides == NULL || tensor->data == NULL) {
        return ATTN_OK;
    }
    for (int32_t i = 0; i < tensor->ndim; i++) {
        int32_t next = -1;
        for (int32_t d = 0; d < tensor->ndim; d++) {
            if (!(seen >> d & 1) && (next < 0 || tensor->strides[d] < tensor->strides[next])) {
                next = d;
            }
        }
        seen |= 1u << next;
        const int64_t more = tensor->shape[next] - 1, stride = tensor->strides[next];
        BAD_IF(more > 0 && (stride <= reach || stride > (INT64_MAX - reach) / more), name,
               "%s is written, and its stride %lld of dimension %d makes elements share bytes, or "
               "reach past all memory; above %lld",
               name, (long long)stride, next, (long long)reach);
        reach += more > 0 ? more * stride : 0;
    }
    return ATTN_OK;
}

attn_status wait_for_device_errors(const attn_plan *plan, void *stream, attn_status status,
                                   struct attn_error *error)
{
    struct attn_error why = ATTN_ERROR_INIT, clean = ATTN_ERROR_INIT;
    const struct instance *instance = NULL;
    for (int32_t i = 0; i < plan->model->num_instances && instance == NULL; i++) {
        const struct instance *other = &plan->model->instances[i];
        instance = other->kernels.synchronize != NULL ? other : NULL;
    }
    if (status != ATTN_OK || instance == NULL || plan->capturing) {
        return status;
    }
    const struct attn_stream_args args = KERNEL_ARGS(instance, stream, .graph = NULL);
    status = instance->kernels.synchronize(&args, &why);
    if (status == ATTN_OK) {
        return ATTN_OK;
    }
    error_relay(&clean, status, &why);
    return error_set(error, status_is_known(status) ? status : ATTN_ERROR_PLUGIN, clean.field,
                     "step %llu: %s", (unsigned long long)plan->serial, clean.message);
}
