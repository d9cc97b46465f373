/* SPDX-License-Identifier: Apache-2.0 */
/* What the write of an indexer's key does to it first (attn/draft/index_write.h), in double
 * precision. */
#ifndef PLUGINS_COMMON_INDEX_WRITE_H
#define PLUGINS_COMMON_INDEX_WRITE_H

#include <attn/draft/index_write.h>

#include "common/entry.h"
#include "common/rope.h"

/* A layer norm is an RMS norm of what differs from the mean. */
static inline void index_write_norm(const struct attn_index_write *write,
                                    const struct attn_io_index_write *io, double *row, int32_t size)
{
    double bias[ROPE_MAX_SIZE], mean = 0;
    for (int32_t d = 0; d < size && write->norm == ATTN_KEY_NORM_LAYER; d++) {
        mean += row[d] / size;
    }
    for (int32_t d = 0; d < size; d++) {
        row[d] -= mean;
    }
    rope_norm_row(io->norm_weight, (double)io->norm_eps, row, size);
    if (io->norm_bias != NULL) {
        number_load_row(bias, (const uint8_t *)io->norm_bias->data + io->norm_bias->byte_offset,
                        number_dtype_name(io->norm_bias->dtype), size);
        for (int32_t d = 0; d < size; d++) {
            row[d] += bias[d];
        }
    }
}

/* Sylvester's matrix times 1 / sqrt(size). */
static inline void index_write_hadamard(double *row, int32_t size)
{
    for (int32_t span = 1; span < size; span *= 2) {
        for (int32_t d = 0; d < size; d++) {
            if ((d & span) == 0) {
                const double x = row[d], y = row[d + span];
                row[d] = x + y;
                row[d + span] = x - y;
            }
        }
    }
    for (int32_t d = 0; d < size; d++) {
        row[d] /= sqrt((double)size);
    }
}

/* Loads row t of the step's keys into `row` and changes it as `write` says; NULL: not at all. */
static inline void index_write_load(const struct attn_write_kv_args *args,
                                    const struct attn_index_write *write, int64_t t, double *row)
{
    const struct attn_io_index_write *io =
        write != NULL ? ext_of(args->next, ATTN_EXT_DRAFT_IO_INDEX_WRITE) : NULL;
    const int32_t size = args->k_cache->head_size;
    number_load_row(row, tensor_row(args->k, t, 0), number_dtype_name(args->k->dtype), size);
    if (write == NULL) {
        return;
    }
    if (write->norm != ATTN_KEY_NORM_NONE) {
        index_write_norm(write, io, row, size);
    }
    if (write->rope != ATTN_ROPE_NONE) {
        rope_rotate_row(write->rope, io->cos_sin, io->positions[t], row + write->rotary_first,
                        write->rotary_dim);
    }
    if (write->hadamard) {
        index_write_hadamard(row, size);
    }
}

#endif
