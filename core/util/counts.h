/* SPDX-License-Identifier: Apache-2.0 */
/* How many codes, or bits of a mask, this core knows of each enumeration; select/names.c has a name
 * for each of them. */
#ifndef CORE_UTIL_COUNTS_H
#define CORE_UTIL_COUNTS_H

#include <attn/api.h>
#include <attn/draft/index_lists.h>
#include <attn/draft/compressor.h>
#include <attn/draft/recurrent.h>

enum {
    NUM_PHASES = ATTN_PHASE_DECODE + 1,
    NUM_LAYER_KINDS = ATTN_LAYER_DRAFT_COMPRESSOR + 1,
    NUM_DTYPES = ATTN_DTYPE_INT8 + 1, /* that masks have */
    NUM_KV_DTYPES = ATTN_KV_MXFP4 + 1,
    NUM_KV_LAYOUTS = ATTN_KV_LAYOUT_LATENT + 1,
    NUM_CACHE_ROLES = ATTN_CACHE_REPLAY + 1,
    NUM_OUTPUT_FORMS = ATTN_OUTPUT_NVFP4 + 1,
    NUM_SCALE_FORMS = ATTN_SCALE_PER_HEAD_CHANNEL + 1,
    NUM_RULES = ATTN_RULE_ADDITIVE + 1,
    NUM_GATES = ATTN_GATE_CONSTANT + 1,
    NUM_WRITE_GATES = ATTN_WRITE_GATE_STEP + 1,
    NUM_ACTIVATIONS = ATTN_INDEXER_RELU + 1,
    NUM_LIST_GROUPS = ATTN_LISTS_PER_Q_HEAD + 1,
    NUM_KERNELS = 15,
    NUM_TERMS = 14,
    NUM_FEATURES = 23,
    NUM_VIEW_FORMS = 5
};

/* The largest layers that are described. */
#define MAX_HEADS 65536
#define MAX_HEAD_SIZE 512
#define MAX_LATENT 1024
#define MAX_ROW 65536 /* bytes or elements of a row in a cache */

#endif
