/* SPDX-License-Identifier: Apache-2.0 */
/* A draft (abi/README.md, Drafts): a rotation of the output. Where keys are values, too, and come
 * rotated (DeepSeek-V4), the last dims of an output row are rotated back by its query's position.
 * docs/semantics.md, section 9.
 *
 * Decoder and MLA layers whose output is plain may have it. The core rotates what kernels write
 * (ATTN_COMPOSE_OUTPUT_ROPE): on a CPU itself, elsewhere by rope_write_kv, after what attends.
 * Other kernels see neither extension. */
#ifndef ATTN_DRAFT_OUTPUT_ROPE_H
#define ATTN_DRAFT_OUTPUT_ROPE_H

#include "../tensor.h"

#define ATTN_EXT_DRAFT_OUTPUT_ROPE 0x80du    /* struct attn_output_rope, of a layer */
#define ATTN_EXT_DRAFT_IO_OUTPUT_ROPE 0x80eu /* struct attn_io_output_rope, of a run */

/* A further ATTN_FEATURE_*. Backends of devices declare it if their rope_write_kv takes
 * attn_output_rope and attn_io_output_rope in its arguments' `next`. Where attn_output_rope is
 * there, it rotates rows query_start_loc[0] .. query_start_loc[num_reqs] - 1 (the device's) of q,
 * [T, Hq, Dv], back in place and does nothing else: num_slots is 0, k, v and the caches are NULL.
 * Other rows stay, and their positions are not read. */
#define ATTN_FEATURE_DRAFT_OUTPUT_ROPE (1ull << 21)

struct attn_output_rope { /* on attn_layer_desc */
    struct attn_ext ext;  /* id ATTN_EXT_DRAFT_OUTPUT_ROPE */
    int32_t form;         /* enum attn_rope, not NONE */
    int32_t rotary_dim;   /* even: the last dims of each head's row */
};

struct attn_io_output_rope {  /* on attn_step_io; runs that attend need it */
    struct attn_ext ext;      /* id ATTN_EXT_DRAFT_IO_OUTPUT_ROPE */
    const int64_t *positions; /* device [T] */
    /* [max position, rotary_dim]: cos half, sin half, as attn_io_rope has them for q and k: the
     * output is rotated by the negative angle */
    const struct attn_tensor *cos_sin;
};

#endif
