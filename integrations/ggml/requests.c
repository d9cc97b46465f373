/* SPDX-License-Identifier: Apache-2.0 */
#include <stdlib.h>
#include <string.h>

#include "attention.h"

enum { F16_MINUS_INFINITY = 0xfc00, F16_MINUS_ZERO = 0x8000, WIDE_BLOCK = 64 };

static bool reserve(void *array, size_t *room, size_t bytes)
{
    void **at = array;
    if (bytes <= *room) {
        return true;
    }
    void *memory = realloc(*at, 2 * bytes);
    if (memory != NULL) {
        *at = memory;
        *room = 2 * bytes;
    }
    return memory != NULL;
}

void requests_finish(struct requests *requests)
{
    free(requests->query_start_loc);
    free(requests->seq_lens);
    free(requests->cells);
    *requests = (struct requests){0};
}

/* A row of the mask; NULL: all visible. */
static const uint16_t *mask_row(const struct ggml_tensor *mask, int64_t stream, int64_t row)
{
    return mask == NULL ? NULL
                        : (const uint16_t *)((const char *)mask->data + row * mask->nb[1] +
                                             stream % mask->ne[3] * mask->nb[3]);
}

/* How a row follows the one before it: sees the same keys, one more (*added), or others. */
enum step { SAME, ONE_MORE, OTHER };

static enum step compare_rows(const uint16_t *before, const uint16_t *row, int64_t num_keys,
                              int64_t *added)
{
    int64_t more = 0;
    if (row == NULL || memcmp(before, row, (size_t)num_keys * sizeof *row) == 0) {
        return SAME;
    }
    for (int64_t j = 0; j < num_keys; j++) {
        if (before[j] != row[j]) {
            if (before[j] != F16_MINUS_INFINITY || ++more > 1) {
                return OTHER;
            }
            *added = j;
        }
    }
    return ONE_MORE;
}

static bool valid_row(const uint16_t *row, int64_t num_keys)
{
    for (int64_t j = 0; row != NULL && j < num_keys; j++) {
        if (row[j] != 0 && row[j] != F16_MINUS_INFINITY && row[j] != F16_MINUS_ZERO) {
            return false;
        }
    }
    return true;
}

/* A new request with the cells that its first row sees. */
static int32_t *begin(struct requests *r, const uint16_t *row, int64_t num_keys, int64_t first_cell,
                      int32_t at)
{
    int32_t *cells = r->cells + (int64_t)r->count * r->stride, length = 0;
    for (int64_t j = 0; j < num_keys; j++) {
        if (row == NULL || row[j] != F16_MINUS_INFINITY) {
            cells[length++] = (int32_t)(first_cell + j);
        }
    }
    r->query_start_loc[r->count] = at;
    r->seq_lens[r->count++] = length;
    return cells;
}

/* Where every request's cells follow one another from a whole block on, its table is of blocks. */
static void widen(struct requests *r)
{
    for (int32_t i = 0; i < r->count; i++) {
        const int32_t *cells = r->cells + (int64_t)i * r->stride;
        for (int32_t j = 0; j < r->seq_lens[i]; j++) {
            if (cells[j] != cells[0] + j || cells[0] % WIDE_BLOCK != 0) {
                return;
            }
        }
    }
    for (int32_t i = 0; i < r->count; i++) {
        int32_t *cells = r->cells + (int64_t)i * r->stride,
                first = r->seq_lens[i] > 0 ? cells[0] / WIDE_BLOCK : 0;
        for (int32_t j = 0; j * WIDE_BLOCK < r->seq_lens[i]; j++) {
            cells[j] = first + j;
        }
    }
    r->block_size = WIDE_BLOCK;
}

/* The longest run from row `at` of one stream on that is one request: rows that see one key more
 * each (`growing`), or the same, of which no request has more than keys. Returns the row after it.
 */
static int64_t add_run(struct requests *r, const struct ggml_tensor *op, int64_t stream, int64_t at,
                       int64_t first_cell, bool growing)
{
    const struct ggml_tensor *mask = op->src[3];
    int64_t num_rows = op->src[0]->ne[1], num_keys = op->src[1]->ne[1], added = 0;
    const uint16_t *before = mask_row(mask, stream, at);
    int32_t *cells = begin(r, before, num_keys, first_cell, (int32_t)(stream * num_rows + at));
    int32_t *length = &r->seq_lens[r->count - 1];
    int64_t next = at + 1;
    for (; next < num_rows; next++) {
        if (*length <= (growing ? 0 : next - at)) {
            break;
        }
        const uint16_t *row = mask_row(mask, stream, next);
        enum step step = compare_rows(before, row, num_keys, &added);
        if (step != (growing ? ONE_MORE : SAME)) {
            break;
        }
        if (growing) {
            cells[(*length)++] = (int32_t)(first_cell + added);
        }
        before = row;
    }
    r->max_seq_len = *length > r->max_seq_len ? *length : r->max_seq_len;
    return next;
}

bool requests_read(struct requests *r, const struct ggml_tensor *op, int64_t num_cells,
                   int64_t first_cell, int64_t cells_per_stream, const char **why)
{
    const struct ggml_tensor *q = op->src[0], *k = op->src[1], *mask = op->src[3];
    int64_t rows = q->ne[1], streams = q->ne[3], keys = k->ne[1], added = 0;
    r->stride = keys;
    r->num_rows = (int32_t)(rows * streams);
    r->count = r->max_seq_len = 0;
    r->block_size = 1;
    *why = "no memory for the requests";
    if (!reserve(&r->query_start_loc, &r->room[0],
                 (size_t)(rows * streams + 1) * sizeof(int32_t)) ||
        !reserve(&r->seq_lens, &r->room[1], (size_t)(rows * streams) * sizeof(int32_t))) {
        return false;
    }
    *why = "the mask holds other values than 0 and minus infinity";
    for (int64_t s = 0; s < streams; s++) {
        for (int64_t i = 0; i < rows; i++) {
            if (!valid_row(mask_row(mask, s, i), keys)) {
                return false;
            }
        }
    }
    *why = "no memory for the requests";
    /* single rows are causal and not; the first pair decides */
    r->causal = rows == 1 ||
                (mask != NULL &&
                 compare_rows(mask_row(mask, 0, 0), mask_row(mask, 0, 1), keys, &added) != SAME);
    for (int64_t s = 0; s < streams; s++) {
        for (int64_t i = 0; i < rows;) {
            if (!reserve(&r->cells, &r->room[2],
                         (size_t)(r->count + 1) * (size_t)keys * sizeof(int32_t))) {
                return false;
            }
            i = add_run(r, op, s, i, first_cell + s * cells_per_stream, r->causal);
        }
    }
    r->query_start_loc[r->count] = r->num_rows;
    if (num_cells % WIDE_BLOCK == 0) {
        widen(r);
    }
    return true;
}
