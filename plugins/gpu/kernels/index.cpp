/* SPDX-License-Identifier: Apache-2.0 */
/* Indexers (attn/indexer.h). index_scores: a group has a tile of INDEX_ROWS rows of the cache
 * by up to INDEX_COLUMNS columns, each a head of one list; 2 * D FLOPs for a row and head on FMA
 * units, which is the limit. Scores are summed over a list's heads before they are stored. */
#include "gpu/device/rows.h"
#include "gpu/kernels/index_list.h"

#define INDEX_COLUMNS 64
#define INDEX_DEPTH 16 /* dims of a step */
#define INDEX_THREADS GPU_THREADS_index_scores
#define INDEX_EDGE 4 /* rows, and columns, of a thread */

static_assert(INDEX_ROWS == INDEX_COLUMNS &&
                  INDEX_ROWS * INDEX_COLUMNS == INDEX_THREADS * INDEX_EDGE * INDEX_EDGE &&
                  INDEX_ROWS * INDEX_DEPTH == INDEX_THREADS * 4,
              "each thread computes 4 x 4 scores and loads 4 numbers of each operand");

struct index_memory {
    float k[INDEX_DEPTH][INDEX_ROWS], q[INDEX_DEPTH][INDEX_COLUMNS];
    float scores[INDEX_ROWS][INDEX_COLUMNS + 1];
    float scale[INDEX_ROWS];
};

/* Lists first .. first + lists - 1 of one request, with `heads` columns each, and a tile of rows.
 */
struct index_span {
    int32_t first, lists, heads;
    int32_t row, rows; /* the tile's first; those that the last token sees */
    int32_t before;    /* columns before this round's */
    int64_t table;     /* offset of the request's row in the block table */
};

/* Element d of a row without the row's scale. */
GPU_INLINE float key_element(const gpu_cache &c, const gpu_cache_row &row, const uint8_t *scales,
                             int32_t d)
{
    if (c.form == GPU_ROW_MXFP4) {
        const uint8_t codes = *(const uint8_t *)nibble_at(c, (char *)row.data, d);
        return e2m1_number(codes >> (d & 1) * 4 & 15) * e8m0_number(scales[d / MXFP4_BLOCK]);
    }
    return row_element<false>(c, row, 0, d);
}

/* Adds the products of a round's tile to acc [row][column]. */
GPU_INLINE void multiply_tile(const gpu_index_params &p, const index_span &s, index_memory &memory,
                              float (&acc)[INDEX_EDGE][INDEX_EDGE])
{
    const int32_t thread = (int32_t)thread_index(), own = thread / 4, part = thread % 4 * 4;
    const int32_t row = s.row + own, column = s.before + own, list = s.first + column / s.heads;
    const bool has_row = row < s.rows, has_head = column < s.lists * s.heads;
    gpu_cache_row from = {nullptr, 0, nullptr};
    const uint8_t *scales = nullptr; /* mxfp4 alone has them */
    const char *query = nullptr;
    if (has_row) {
        const int32_t index = row / p.block_rows, block = p.block_table[s.table + index];
        from = enter_row<false>(p.k, block, row - index * p.block_rows, 0);
        scales = (const uint8_t *)row_scale_at(p.k, block, row - index * p.block_rows, 0);
    }
    if (has_head) {
        int32_t head = list % p.groups * s.heads + column % s.heads;
        query = p.q.data + (int64_t)(p.query_start[0] + p.first_token + list / p.groups) * p.q.row +
                (int64_t)head * p.q.head;
    }
    if (part == 0) {
        memory.scale[own] = has_row ? row_scale<false>(p.k, from) : 0.0f;
    }
    for (int32_t base = 0; base < p.k.head_size; base += INDEX_DEPTH) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int32_t d = base + part + i;
            bool has_dim = d < p.k.head_size;
            memory.k[part + i][own] = has_row && has_dim ? key_element(p.k, from, scales, d) : 0.0f;
            memory.q[part + i][own] = has_head && has_dim ? number_load(query, p.q.dtype, d) : 0.0f;
        }
        sync_group(); /* the operands are written */
#pragma unroll
        for (int d = 0; d < INDEX_DEPTH; d++) {
            float k[INDEX_EDGE], q[INDEX_EDGE];
#pragma unroll
            for (int i = 0; i < INDEX_EDGE; i++) {
                k[i] = memory.k[d][thread % 16 * INDEX_EDGE + i];
                q[i] = memory.q[d][thread / 16 * INDEX_EDGE + i];
            }
#pragma unroll
            for (int i = 0; i < INDEX_EDGE; i++) {
#pragma unroll
                for (int j = 0; j < INDEX_EDGE; j++) {
                    acc[i][j] += k[i] * q[j];
                }
            }
        }
        sync_group(); /* the operands are read */
    }
}

/* Each head's score with its activation and weight. */
GPU_INLINE void apply_weights(const gpu_index_params &p, const index_span &s, index_memory &memory,
                              const float (&acc)[INDEX_EDGE][INDEX_EDGE])
{
    const int32_t thread = (int32_t)thread_index();
    const float factor = p.scale * (p.q_scale != nullptr ? *p.q_scale : p.q_scale_host);
#pragma unroll
    for (int j = 0; j < INDEX_EDGE; j++) {
        const int32_t at = thread / 16 * INDEX_EDGE + j, column = s.before + at;
        const int32_t list = s.first + column / s.heads;
        float weight = 1.0f;
        if (p.weights.data != nullptr && column < s.lists * s.heads) {
            const char *row =
                p.weights.data +
                (int64_t)(p.query_start[0] + p.first_token + list / p.groups) * p.weights.row +
                (int64_t)(list % p.groups * s.heads + column % s.heads) * p.weights.head;
            weight = number_load(row, p.weights.dtype, 0);
        }
#pragma unroll
        for (int i = 0; i < INDEX_EDGE; i++) {
            const int32_t row = thread % 16 * INDEX_EDGE + i;
            float x = acc[i][j] * memory.scale[row] * factor;
            x = p.relu && x < 0.0f ? 0.0f : x; /* a NaN stays */
            memory.scores[row][at] = x * weight;
        }
    }
}

GPU_INLINE void score_span(const gpu_index_params &p, index_span &s, index_memory &memory)
{
    const int32_t thread = (int32_t)thread_index(), row = thread % INDEX_ROWS;
    const int32_t columns = s.lists * s.heads;
    float sum = 0.0f; /* several rounds: of the only list */
    for (s.before = 0; s.before < columns; s.before += INDEX_COLUMNS) {
        float acc[INDEX_EDGE][INDEX_EDGE] = {};
        multiply_tile(p, s, memory, acc);
        apply_weights(p, s, memory, acc);
        sync_group(); /* the scores are written */
        const int32_t heads = min(s.heads, columns - s.before);
        for (int32_t i = thread / INDEX_ROWS; i < s.lists; i += INDEX_THREADS / INDEX_ROWS) {
            sum = s.before == 0 ? 0.0f : sum;
            for (int32_t h = 0; h < min(heads, INDEX_COLUMNS); h++) {
                sum += memory.scores[row][i * s.heads + h];
            }
            if (s.before + INDEX_COLUMNS >= columns &&
                s.row + row < find_list(p, s.first + i).rows) {
                p.scores[(s.first + i) * p.score_stride + s.row + row] = sum;
            }
        }
        sync_group(); /* the memory is used again */
    }
}

GPU_KERNEL(index_scores, gpu_index_params)
{
    GPU_SHARED index_memory memory;
    index_span s;
    s.heads = p.heads / p.groups;
    const int32_t lists = count_lists(p), tile = max(INDEX_COLUMNS / s.heads, 1);
    const int64_t row_tiles = (p.max_rows + INDEX_ROWS - 1) / INDEX_ROWS;
    const int64_t items = row_tiles * ((lists + tile - 1) / tile);
    clear_arrived<INDEX_THREADS>(p);
    let_later_kernels_begin();
    for (int64_t item = group_index(); item < items; item += group_count()) {
        s.row = (int32_t)(item % row_tiles) * INDEX_ROWS;
        s.first = (int32_t)(item / row_tiles) * tile;
        const int32_t end = min(s.first + tile, lists);
        for (; s.first < end; s.first += s.lists) { /* lists of one request at a time */
            const int32_t request = find_list(p, s.first).request;
            const int32_t next = p.query_start[request + 1] - p.query_start[0] - p.first_token;
            s.lists = min(next * p.groups, end) - s.first;
            s.rows = find_list(p, s.first + s.lists - 1).rows;
            s.table =
                (int64_t)(p.block_table_row != nullptr ? p.block_table_row[request] : request) *
                p.block_table_stride;
            if (s.row < s.rows) {
                score_span(p, s, memory);
            }
        }
    }
}
