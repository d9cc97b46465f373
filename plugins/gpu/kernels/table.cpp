/* SPDX-License-Identifier: Apache-2.0 */
/* make_block_table: a group for each piece of a request's row. The limit is memory: 4 bytes an
 * entry. */
#include "gpu/device/target.h"
#include "gpu/params.h"

GPU_KERNEL(make_table, gpu_table_params)
{
    const int32_t piece = 8 * GPU_THREADS_make_table;
    const int32_t pieces = (p.num_columns + piece - 1) / piece, parts = p.blocks_per_entry;
    for (int64_t item = group_index(); item < (int64_t)p.num_reqs * pieces; item += group_count()) {
        int32_t r = (int32_t)(item / pieces), from = (int32_t)(item % pieces) * piece;
        int64_t row = p.block_table_row != nullptr ? p.block_table_row[r] : r, count;
        const int32_t *entries;
        if (p.page_indices != nullptr) {
            count = (int64_t)p.page_start[r + 1] - p.page_start[r];
            entries = p.page_indices + p.page_start[r];
        } else {
            count = ((int64_t)p.seq_lens[r] + p.tokens_per_entry - 1) / p.tokens_per_entry;
            entries = p.block_table + row * p.block_table_stride;
        }
        int64_t end = count * parts < p.num_columns ? count * parts : p.num_columns;
        end = end < from + piece ? end : from + piece;
        for (int64_t i = from + (int32_t)thread_index(); i < end; i += GPU_THREADS_make_table) {
            int32_t entry = (int32_t)i / parts;
            p.out[r * (int64_t)p.num_columns + i] =
                (int32_t)((uint32_t)entries[entry] * (uint32_t)parts +
                          (uint32_t)((int32_t)i - entry * parts));
        }
        if (from == 0 && thread_index() == 0 && p.out_seq_lens != nullptr) {
            p.out_seq_lens[r] =
                count > 0 ? (int32_t)((count - 1) * p.tokens_per_entry) + p.last_page_len[r] : 0;
        }
    }
}
