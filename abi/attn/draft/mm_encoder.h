/* SPDX-License-Identifier: Apache-2.0 */
/* A draft (abi/README.md, Drafts): the quantized multimodal encoder. Its inputs are quantized to
 * e4m3 before the attend, by scales that are given or that the core keeps of the last steps. */
#ifndef ATTN_DRAFT_MM_ENCODER_H
#define ATTN_DRAFT_MM_ENCODER_H

#include "../version.h"

#define ATTN_EXT_DRAFT_MM_ENCODER 0x801u       /* struct attn_mm_encoder_quant, of a layer */
#define ATTN_EXT_DRAFT_MM_ENCODER_STATE 0x802u /* struct attn_mm_encoder_state, of parameters */

/* The fp8 path of a multimodal encoder (on attn_layer_desc). */
struct attn_mm_encoder_quant {
    struct attn_ext ext; /* id ATTN_EXT_DRAFT_MM_ENCODER */
    int32_t fp8;         /* 1: q, k, v are quantized to e4m3 before the attend */
    /* n > 0 (16): scale = largest amax of this and the last n - 1 steps / 448; 0: scales are given
     */
    int32_t amax_history_len;
    float scale_margin;       /* factor on saved scales; 0 reads as 1 */
    int32_t padded_head_size; /* size of q and k padded with zeros; 0: as head_size */
};

/* The memory of such an encoder (on attn_layer_params); the engine's, borrowed as long as the
 * parameters are. */
struct attn_mm_encoder_state {
    struct attn_ext ext; /* id ATTN_EXT_DRAFT_MM_ENCODER_STATE */
    /* device [3, amax_history_len], of q, k, v, the latest last: zeros at first, or what an earlier
     * process left; NULL where scales are given */
    float *amax_history;
    /* device [3], of q, k, v: written by every run, or, given, read by it. To keep them for a later
     * process an engine saves scale_margin times these and gives them with amax_history_len 0 */
    float *scales;
};

#endif
