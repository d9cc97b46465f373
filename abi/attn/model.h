/* SPDX-License-Identifier: Apache-2.0 */
/* The engine's side, 3: bound layers, groups, and plans. */
#ifndef ATTN_MODEL_H
#define ATTN_MODEL_H

#include "attend.h"
#include "collectives.h"
#include "indexer.h"
#include "recurrent.h"
#include "mla.h"
#include "selection.h"

struct attn_model_options {
    size_t struct_size;
    const struct attn_ext *next;
    /* What its backends' instances are made with, see attn_create_args: the engine's device and
     * context, and options, "backend.key=value" each, of backends of the runtime. Borrowed until
     * model_create returns */
    void *native_device;
    void *native_context;
    const char *const *backend_options;
    int32_t num_backend_options;
    int32_t reserved;
};

enum attn_group_kind {
    /* layers of one KV spec: one block table, one plan object */
    ATTN_GROUP_BLOCK_TABLE = 0,
    ATTN_GROUP_SCHEDULE = 1 /* layers of a block table's group that share one schedule */
};

struct attn_plan_options {
    size_t struct_size;
    const struct attn_ext *next;
    const struct attn_limits *limits; /* max_num_reqs and max_num_tokens are required */
    int32_t graph; /* 1: state for capture and replay at these limits is made now */
    int32_t reserved;
};

/* A plan's workspace: what plan_workspace answers, all but the two addresses, and, with `memory`
 * filled in, what plan_bind_workspace takes. It has two parts: the plan's own, which holds what
 * plan_batch makes until the last run, and scratch, which holds nothing between two calls. All
 * plans whose calls follow each other on one stream may share one scratch, the largest that any
 * needs: an engine with a plan for each captured size then has it once. */
struct attn_workspace {
    size_t struct_size;
    const struct attn_ext *next;
    void *memory; /* at a multiple of `alignment` bytes; borrowed as long as the plan */
    size_t bytes; /* size of both parts: the worst case of the plan's limits, or more */
    struct attn_device device; /* that both lie on; type 0: not stated */
    int32_t alignment;
    int32_t reserved;
    void *scratch; /* aligned, too; NULL: after the plan's own part in `memory` */
    /* the scratch's share of `bytes`: with one of its own `memory` has bytes - scratch_bytes */
    size_t scratch_bytes;
};

/* A layer's blocks in another memory (host swap space); an element of attn_block_transfer.other. */
struct attn_block_memory {
    void *base;
    /* bytes between blocks; 0: the spec's padded_page_bytes and what further caches of table 0
     * take, of other tables what a block's caches take */
    int64_t stride;
};

/* What copy_blocks moves: blocks of one table, in the caches of all layers of a block-table group
 * that the table addresses. Caches in another table have blocks of their own numbers and stay where
 * they are: a call for each table. */
struct attn_block_transfer {
    size_t struct_size;
    const struct attn_ext *next;
    int32_t group;
    int32_t kind; /* enum attn_copy_kind */
    /* one entry per layer of the group (device <-> host), or NULL (device to device inside the
     * cache) */
    const struct attn_block_memory *other;
    int32_t other_stride; /* sizeof(struct attn_block_memory) of the writer; 0 without other */
    int32_t table; /* 0: the batch's own; else as attn_layer_cache.table; a cache lies in it */
    /* host [num_pairs, 2]: source and destination block; in order, so that a destination may be
     * the source of a later pair */
    const int64_t *pairs;
    int64_t num_pairs;
    void *stream;
};

ATTN_STATIC_ASSERT(sizeof(struct attn_model_options) == 48, "attn_model_options of ABI 0.3");
ATTN_STATIC_ASSERT(sizeof(struct attn_plan_options) == 32, "attn_plan_options of ABI 0.3");
ATTN_STATIC_ASSERT(sizeof(struct attn_workspace) == 64, "attn_workspace of ABI 0.3");
ATTN_STATIC_ASSERT(sizeof(struct attn_block_memory) == 16, "attn_block_memory of ABI 0.3");
ATTN_STATIC_ASSERT(sizeof(struct attn_block_transfer) == 64, "attn_block_transfer of ABI 0.3");

#endif
