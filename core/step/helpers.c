/* SPDX-License-Identifier: Apache-2.0 */
/* What an engine's scheduler needs around a batch. */
#include "step/plan.h"

#include <stdbool.h>

#include "util/error.h"

/* `prompt_len` below 0: not known, and so every short request is a decode. */
static int32_t class_of(int32_t query_len, int32_t seq_len, int32_t prompt_len, int32_t threshold,
                        int32_t short_extend)
{
    int32_t context = seq_len - query_len;
    if (query_len <= threshold && (prompt_len < 0 || (context > 0 && context >= prompt_len))) {
        return ATTN_REQUEST_DECODE;
    }
    if (context <= 0) {
        return ATTN_REQUEST_PREFILL;
    }
    return query_len <= short_extend ? ATTN_REQUEST_SHORT_EXTEND : ATTN_REQUEST_LONG_EXTEND;
}

attn_status batch_order(const int32_t *query_lens, const int32_t *seq_lens,
                        const int32_t *prompt_lens, int32_t num_reqs, int32_t threshold,
                        int32_t short_extend, int32_t *order, int32_t *moved,
                        struct attn_error *error)
{
    int32_t count = 0;
    if (query_lens == NULL || seq_lens == NULL || order == NULL || moved == NULL || num_reqs < 0 ||
        threshold < 0) {
        return error_set(
            error, ATTN_ERROR_INVALID_ARGUMENT, "num_reqs",
            "query_lens %p, seq_lens %p, order %p, moved %p, num_reqs %d, threshold %d; none "
            "may be NULL or below 0",
            (const void *)query_lens, (const void *)seq_lens, (void *)order, (void *)moved,
            num_reqs, threshold);
    }
    *moved = 0;
    for (int32_t wanted = ATTN_REQUEST_DECODE; wanted <= ATTN_REQUEST_PREFILL; wanted++) {
        for (int32_t r = 0; r < num_reqs; r++) {
            int32_t prompt_len = prompt_lens != NULL ? prompt_lens[r] : -1;
            if (class_of(query_lens[r], seq_lens[r], prompt_len, threshold, short_extend) ==
                wanted) {
                *moved |= count != r;
                order[count++] = r;
            }
        }
    }
    return ATTN_OK;
}

int32_t context_parallel_length(int32_t length, int32_t rank, int32_t world_size,
                                int32_t interleave)
{
    if (length < 0 || world_size <= 0 || rank < 0 || rank >= world_size || interleave <= 0) {
        return -1;
    }
    int64_t round = (int64_t)world_size * interleave;
    int64_t whole = length / round;
    int64_t rest = length - whole * round - (int64_t)rank * interleave;
    rest = rest < 0 ? 0 : rest > interleave ? interleave : rest;
    return (int32_t)(whole * interleave + rest);
}

attn_status context_parallel_slots(const int64_t *positions, int64_t num_positions,
                                   const int32_t *block_row, int32_t block_size, int32_t rank,
                                   int32_t world_size, int32_t interleave, int64_t *slots,
                                   struct attn_error *error)
{
    if (positions == NULL || block_row == NULL || slots == NULL || num_positions < 0 ||
        block_size <= 0 || world_size <= 0 || rank < 0 || rank >= world_size || interleave <= 0 ||
        block_size % interleave != 0) {
        return error_set(
            error, ATTN_ERROR_INVALID_ARGUMENT, "interleave",
            "%lld positions, block_size %d, rank %d of %d, interleave %d; the interleave must "
            "divide the block size, and nothing may be NULL",
            (long long)num_positions, block_size, rank, world_size, interleave);
    }
    int64_t virtual_block = (int64_t)block_size * world_size;
    for (int64_t i = 0; i < num_positions; i++) {
        int64_t offset = positions[i] % virtual_block;
        int64_t local =
            offset / ((int64_t)world_size * interleave) * interleave + offset % interleave;
        bool ours = positions[i] >= 0 && offset / interleave % world_size == rank;
        slots[i] =
            ours ? block_row[positions[i] / virtual_block] * (int64_t)block_size + local : -1;
    }
    return ATTN_OK;
}
