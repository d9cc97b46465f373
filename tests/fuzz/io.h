/* SPDX-License-Identifier: Apache-2.0 */
/* What one run of a layer of each sort reads and writes: sound tensors of just the rows that the
 * batch has, of which some are then other than they have to be. */
#ifndef TESTS_FUZZ_IO_H
#define TESTS_FUZZ_IO_H

#include "backend.h"

#define MOST_IO_TENSORS 16

struct io {
    struct attn_step_io run;
    struct attn_tensor tensors[MOST_IO_TENSORS];
    int64_t shapes[MOST_IO_TENSORS][3];
    int32_t count;
    const struct attn_tensor *rows[1]; /* for attn_io_caches */
};

/* How many rows of q and out, of k and v, and of a further table's cache. */
struct io_rows {
    int64_t tokens, keys, further;
};

/* Tensors and extensions of the layer's sort. It may not move. false: a shape claims more than
 * there is. */
bool io_draw(struct blocks *blocks, struct input *input, const struct sampled *s,
             struct io_rows rows, struct io *io);

#endif
