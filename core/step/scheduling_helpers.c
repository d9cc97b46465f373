/* SPDX-License-Identifier: Apache-2.0 */
/* What an engine's scheduler needs around a batch. */
#include "step/plan_state.h"

/* Classes of requests, in the order in which they stand in a batch. */
enum { DECODE, SHORT_EXTEND, LONG_EXTEND, PREFILL };

/* `prompt_len` below 0: not known, and so every short request is a decode. */
static int32_t class_of(int32_t query_len, int32_t seq_len, int32_t prompt_len, int32_t threshold,
                        int32_t short_extend)
{
    const int64_t context = (int64_t)seq_len - query_len;
    if (query_len <= threshold && (prompt_len < 0 || (context > 0 && context >= prompt_len))) {
        return DECODE;
    }
    if (context <= 0) {
        return PREFILL;
    }
    return query_len <= short_extend ? SHORT_EXTEND : LONG_EXTEND;
}

attn_status batch_order(const struct attn_batch_order *requests, int32_t *order, int32_t *moved,
                        struct attn_error *error)
{
    struct attn_batch_order r;
    int32_t count = 0;
    TRY(struct_read(&r, ABI_BATCH_ORDER, requests, error));
    BAD_IF(r.query_lens == NULL || r.seq_lens == NULL || order == NULL || moved == NULL,
           "attn_batch_order", "query_lens %p, seq_lens %p, order %p, moved %p; none may be NULL",
           (const void *)r.query_lens, (const void *)r.seq_lens, (void *)order, (void *)moved);
    *moved = 0;
    for (int32_t wanted = DECODE; wanted <= PREFILL; wanted++) {
        for (int32_t i = 0; i < r.num_reqs; i++) {
            int32_t prompt_len = r.prompt_lens != NULL ? r.prompt_lens[i] : -1;
            if (class_of(r.query_lens[i], r.seq_lens[i], prompt_len, r.threshold, r.short_extend) ==
                wanted) {
                *moved |= count != i;
                order[count++] = i;
            }
        }
    }
    return ATTN_OK;
}

int32_t local_keys(int32_t length, int32_t rank, int32_t world_size, int32_t interleave)
{
    int64_t round = (int64_t)world_size * interleave;
    int64_t whole = length / round;
    int64_t rest = length - whole * round - (int64_t)rank * interleave;
    rest = rest < 0 ? 0 : rest > interleave ? interleave : rest;
    return (int32_t)(whole * interleave + rest);
}

static attn_status read_keys(const struct attn_rank_keys *given, struct attn_rank_keys *keys,
                             struct attn_error *error)
{
    TRY(struct_read(keys, ABI_RANK_KEYS, given, error));
    keys->interleave = keys->interleave == 0 ? 1 : keys->interleave;
    return keys->world_size > 0 && keys->rank >= 0 && keys->rank < keys->world_size &&
                   keys->interleave > 0
               ? ATTN_OK
               : BAD("rank",
                     "rank %d of %d, interleave %d; a rank below their number, and an interleave "
                     "of 0 (1) or above",
                     keys->rank, keys->world_size, keys->interleave);
}

attn_status context_parallel_length(const struct attn_rank_keys *given, int32_t length,
                                    int32_t *local, struct attn_error *error)
{
    struct attn_rank_keys keys;
    TRY(read_keys(given, &keys, error));
    BAD_IF(length < 0 || local == NULL, "length",
           "length %d, local %p; 0 or above, and a place for the answer", length, (void *)local);
    *local = local_keys(length, keys.rank, keys.world_size, keys.interleave);
    return ATTN_OK;
}

attn_status context_parallel_slots(const struct attn_rank_keys *given, int64_t *slots,
                                   struct attn_error *error)
{
    struct attn_rank_keys k;
    TRY(read_keys(given, &k, error));
    BAD_IF(k.positions == NULL || k.block_row == NULL || slots == NULL || k.num_positions < 0 ||
               k.block_size <= 0 || k.block_size % k.interleave != 0,
           "interleave",
           "%lld positions, block_size %d, interleave %d; the interleave must divide the block "
           "size, and nothing may be NULL",
           (long long)k.num_positions, k.block_size, k.interleave);
    int64_t virtual_block = (int64_t)k.block_size * k.world_size;
    for (int64_t i = 0; i < k.num_positions; i++) {
        int64_t offset = k.positions[i] % virtual_block;
        int64_t local =
            offset / ((int64_t)k.world_size * k.interleave) * k.interleave + offset % k.interleave;
        bool ours = k.positions[i] >= 0 && offset / k.interleave % k.world_size == k.rank;
        slots[i] =
            ours ? k.block_row[k.positions[i] / virtual_block] * (int64_t)k.block_size + local : -1;
    }
    return ATTN_OK;
}
