/* SPDX-License-Identifier: Apache-2.0 */
/* The attend of sm_80 and later, host side: which arguments it walks, how it divides them, and its
 * maps. */
#include "sm80_attend.h"

#include "gpu/host/schedule.h"

#define LONG_QUERIES 8192 /* of a request, on average */
#define LEAST_PARTS 8     /* of an item, whose CTAs have a multiprocessor each */

/* Decodes: a stream of rows of 16. Else items of 16 rows, that whoever is free takes, up to
 * requests of so many queries that 64 rows, which share a key's reading, are faster. On an H200,
 * 32/8 heads, D 128, a stream of rows of 64 against items of 16: prefill 1 x 2048 0.77 and 0.37 ms,
 * 1 x 16384 13.9 and 19.6 ms, 4 x 512 next to 32 decodes 0.92 and 0.28 ms; D 256, 1 x 8192: 16.3
 * and 10.2. */
static void choose_rows(const struct attn_prepared *prepared, const struct attn_batch *batch,
                        struct schedule_host *plan)
{
    const int32_t *start = batch->query_start_loc_host;
    bool decode = (int64_t)batch->max_query_len * prepared->group <= GPU_FEW_ROWS;
    int64_t queries = batch->num_reqs > 0 ? start[batch->num_reqs] - start[0] : 0;
    bool is_long =
        queries > LONG_QUERIES * (int64_t)batch->num_reqs && prepared->padded_size <= 128;
    plan->by_item = prepared->invariant || (!decode && !is_long);
    plan->tile_rows = decode || plan->by_item ? 16 : 64;
}

/* As `shape` in sm80_produce.cuh has it. */
static int32_t tile_of(const struct attn_prepared *prepared, bool cached, int32_t tile_rows)
{
    bool narrow = prepared->narrow && cached && tile_rows == 16 && prepared->padded_size <= 128;
    return narrow ? SM80_NARROW_TILE : SM80_TILE;
}

/* CTAs of a multiprocessor. One, with more tiles on the way, where a single request makes so few
 * items that two would leave twice as many parts of each to be merged. On an H200, 32/8 heads,
 * D 128, two and one: R 1, L 8192 15.2 and 14.0 us, with 4 queries 24.6 and 19.3, soft cap 15.5 and
 * 14.6, fp8 14.1 and 13.4; D 64 12.3 and 13.1; two requests 22.9 and 22.7, but 24.0 and 25.8 if one
 * is 64 times longer. What is scored in calls computes too long for one. */
static int32_t ctas_of_sm(const struct attn_attend_args *args)
{
    const struct gpu_device *device = &args->instance->device;
    const struct attn_prepared *prepared = args->prepared;
    const struct schedule_host *plan = args->schedule_host;
    const struct attn_layer_desc *layer = args->layer;
    bool in_calls =
        layer->alibi != ATTN_ALIBI_NONE || layer->tree_mask != ATTN_TREE_NONE || layer->prefix_lm;
    bool few = plan->num_reqs == 1 && prepared->num_kv_heads * LEAST_PARTS <= device->num_sms;
    bool one = few && device->major >= 9 && plan->tile_rows == 16 && !plan->by_item && !in_calls;
    return prepared->padded_size > 128 || (one && prepared->padded_size == 128) ? 1 : 2;
}

static bool is_narrow(const struct gpu_params *p)
{
    return p->k.dtype >= ATTN_DTYPE_FP8_E4M3;
}

/* How many CTAs, at most the plan's, with how many stages each multiprocessor holds; the sizes are
 * those of `shape` in sm80_produce.cuh. False: not two stages of one. */
static bool fit_stages(const struct gpu_device *device, const struct gpu_params *p, int32_t *ctas,
                       int32_t *stages)
{
    const struct gpu_problem *problem = &p->problem;
    int32_t element = is_narrow(p) ? 1 : 2;
    int32_t size =
        problem->head_size > problem->head_size_v ? problem->head_size : problem->head_size_v;
    int32_t d = size <= 64 ? 64 : size <= 128 ? 128 : SM80_MAX_SIZE;
    int32_t both = 2 * p->schedule.tile * d * element; /* bytes of a tile's keys and values */
    bool split = p->schedule.tile_rows == 16;
    int32_t stage = both + (split || element == 1 ? 1024 : 0);
    int32_t fixed = SM80_FIXED_SMEM + (split ? 2 * 16 : 64) * d * 2;
    for (int32_t of_sm = p->schedule.ctas / device->num_sms; of_sm > 0; of_sm--) {
        int32_t room = device->smem_of_sm / of_sm - 1024;
        room = room < device->smem_of_cta ? room : device->smem_of_cta;
        int32_t fitting = (room - fixed) / stage;
        if (fitting >= 2) {
            int32_t most = SM80_ON_THE_WAY / (of_sm * both);
            most = element == 1 || most > SM80_MAX_STAGES ? SM80_MAX_STAGES : most < 2 ? 2 : most;
            *stages = fitting < most ? fitting : most;
            *ctas = device->num_sms * of_sm;
            return true;
        }
    }
    return false;
}

static uint64_t bits_of(const struct gpu_cache *c)
{
    return (uint64_t)(uintptr_t)c->data | (uint64_t)c->block | (uint64_t)c->slot |
           (uint64_t)c->head;
}

/* They copy 16 bytes at a time, and count rows' offsets in 16 bytes and 31 bits. */
static bool serves(const struct attn_attend_args *args, const struct gpu_params *p)
{
    const struct gpu_problem *problem = &p->problem;
    bool narrow = is_narrow(p);
    int32_t ctas, stages;
    if ((p->q.dtype != ATTN_DTYPE_BF16 && p->q.dtype != ATTN_DTYPE_F16) ||
        p->k.form >= GPU_ROW_INT4 || p->v.form >= GPU_ROW_INT4 || p->p_dtype >= 0) {
        return false;
    }
    if (p->k.dtype == ATTN_DTYPE_F32 || p->k.dtype != p->v.dtype ||
        (!narrow && p->k.dtype != p->q.dtype) || problem->head_size > SM80_MAX_SIZE ||
        problem->head_size_v > SM80_MAX_SIZE || p->k.pack != 0 || p->v.pack != 0) {
        return false;
    }
    if (narrow && (problem->head_size % 16 != 0 || problem->head_size_v % 16 != 0)) {
        return false;
    }
    uint64_t q = (uint64_t)(uintptr_t)p->q.data | (uint64_t)p->q.row | (uint64_t)p->q.head;
    int64_t rows = args->k_cache != NULL ? args->k_cache->num_blocks : args->k->shape[0];
    if ((bits_of(&p->k) | bits_of(&p->v) | q) % 16 != 0 || rows * p->k.block / 16 >= INT32_MAX ||
        rows * p->v.block / 16 >= INT32_MAX) {
        return false;
    }
    return p->schedule.tile == tile_of(args->prepared, narrow, p->schedule.tile_rows) &&
           fit_stages(&args->instance->device, p, &ctas, &stages);
}

/* A map of `rows` slots of `blocks` blocks in boxes of box_rows, a row at most 128 bytes each. An
 * L2 that fetched 256 would fetch halves of other boxes: 0.89 of the read ceiling instead of 0.94.
 */
static bool map_rows(const struct gpu_device *device, const struct gpu_cache *cache, int32_t heads,
                     int64_t rows, int64_t blocks, int32_t box_rows, int32_t padded_size,
                     struct tensor_map *map)
{
    int32_t element = cache->dtype >= ATTN_DTYPE_FP8_E4M3 ? 1 : 2, per_row = 128 / element;
    const struct map_shape shape = {
        .rank = 4,
        .element = element,
        .fetched = 128,
        .sizes = {(uint64_t)cache->head_size, (uint64_t)rows, (uint64_t)heads, (uint64_t)blocks},
        .strides = {(uint64_t)cache->slot, (uint64_t)cache->head, (uint64_t)cache->block},
        .box = {(uint32_t)(per_row < padded_size ? per_row : padded_size), (uint32_t)box_rows, 1,
                1},
    };
    return tensor_map_encode(device, cache->data, &shape, map);
}

/* TMA copies boxes of whole blocks: 8 rows are the period of its swizzle. */
static void map_caches(const struct attn_attend_args *args, struct sm80_params *a)
{
    const struct gpu_device *device = &args->instance->device;
    struct gpu_params *p = &a->p;
    int32_t size = args->prepared->padded_size, heads = p->problem.num_kv_heads;
    int32_t tile = p->schedule.tile, block_size = p->problem.block_size;
    int64_t rows = block_size, blocks = 1;
    a->box_rows = tile;
    if (p->problem.paged) {
        bool even = block_size % tile == 0 || (block_size % 8 == 0 && tile % block_size == 0);
        if (!even) {
            return;
        }
        blocks = args->k_cache->num_blocks;
        a->box_rows = block_size < tile ? block_size : tile;
    } else { /* one block of all rows */
        rows = args->k->shape[0] < args->v->shape[0] ? args->k->shape[0] : args->v->shape[0];
        p->k.slot = p->k.block;
        p->v.slot = p->v.block;
        p->problem.block_size = (int32_t)rows;
    }
    a->mapped = map_rows(device, &p->k, heads, rows, blocks, a->box_rows, size, &a->k_map) &&
                map_rows(device, &p->v, heads, rows, blocks, a->box_rows, size, &a->v_map);
    if (!a->mapped && !p->problem.paged) {
        p->k.slot = p->v.slot = 0;
        p->problem.block_size = 1;
    }
}

static const char *attend(const struct attn_attend_args *args, const struct gpu_params *p)
{
    const struct gpu_device *device = &args->instance->device;
    struct sm80_params a = {.p = *p, .overlaps = device->major >= 9};
    if (!fit_stages(device, p, &a.p.schedule.ctas, &a.stages)) {
        return "shared memory is too small";
    }
    map_caches(args, &a);
    return sm80_launch(device, p->k.dtype, &a, args->stream);
}

const struct gpu_matrix_kernels sm80_matrix = {
    .choose_rows = choose_rows,
    .tile = tile_of,
    .groups_of_sm = ctas_of_sm,
    .serves = serves,
    .attend = attend,
};
