/* SPDX-License-Identifier: Apache-2.0 */
/* The attend of sm_80 and later, host side: which arguments it serves, how it divides them, and its
 * tensor maps. */
#include "sm80_attend.h"

#include "cuda_flash/kinds.h"
#include "gpu/cuda/code.h"
#include "gpu/host/schedule.h"

#define LEAST_PARTS 8 /* parts of an item with a multiprocessor each */
#define SWAP8_ROWS 8  /* rows of a request up to which operands are swapped */
#define SWAP4_ROWS 4  /* the same for the 4-row kernels of 4-bit caches */

/* Decodes form one stream of tiles. Other batches are items, which CTAs draw one by one. */
static void choose_rows(const struct attn_prepared *prepared, const struct attn_batch *batch,
                        struct schedule_host *plan)
{
    bool decode = (int64_t)batch->max_query_len * prepared->group <= GPU_FEW_ROWS;
    plan->by_item = prepared->invariant || !decode;
    plan->tile_rows = SM80_ROWS;
}

/* Keys of a tile; agrees with `decode_shape` in sm80_producer.cuh. */
static int32_t tile_of(const struct attn_prepared *prepared, bool cached, int32_t tile_rows)
{
    const bool narrow = prepared->narrow && cached;
    if (prepared->padded_size > 256) {
        return narrow ? SM80_TILE : SM80_LARGE_HEAD_TILE;
    }
    return narrow && (prepared->padded_size <= 128 || prepared->packed) ? SM80_NARROW_TILE
                                                                        : SM80_TILE;
}

/* Whether the kernel with swapped operands runs: up to 8 rows and a kind that has it. It sums in
 * another order, so a batch-invariant layer never uses it. */
static bool takes_swap(const struct attn_attend_args *args, int32_t kind)
{
    const struct schedule_host *plan = args->schedule_host;
    return (kind >= KIND_E4M3 || kind == KIND_F32) && plan->request_rows <= SWAP8_ROWS &&
           !args->prepared->invariant;
}

static enum sm80_swap swap_of(const struct attn_attend_args *args, int32_t kind)
{
    const struct schedule_host *plan = args->schedule_host;
    bool four = kind >= KIND_INT4 && kind <= KIND_LEVELS && args->prepared->padded_size <= 128;
    return !takes_swap(args, kind)                    ? SM80_NO_SWAP
           : four && plan->request_rows <= SWAP4_ROWS ? SM80_SWAP4
                                                      : SM80_SWAP8;
}

/* CTAs of a multiprocessor. One CTA, with more tiles in flight, is faster for a single request with
 * so few items that two CTAs would double the parts to merge. On an H200, 32/8 heads, D 128, two
 * and one: R 1, L 8192 15.2 and 14.0 us, with 4 queries 24.6 and 19.3, soft cap 15.5 and 14.6, fp8
 * 14.1 and 13.4; D 64 12.3 and 13.1; two requests 22.9 and 22.7, but 24.0 and 25.8 if one is 64
 * times longer. Terms that are computed in calls take too long for one CTA. */
static int32_t ctas_of_sm(const struct attn_attend_args *args)
{
    const struct gpu_device *device = &args->instance->device;
    const struct attn_prepared *prepared = args->prepared;
    const struct schedule_host *plan = args->schedule_host;
    const struct attn_layer_desc *layer = args->layer;
    bool in_calls =
        layer->alibi != ATTN_ALIBI_NONE || layer->tree_mask != ATTN_TREE_NONE || layer->prefix_lm;
    bool few = plan->num_reqs == 1 && prepared->num_kv_heads * LEAST_PARTS <= device->num_sms;
    bool one = few && device->major >= 9 && !plan->by_item && !in_calls;
    bool wide = layer->dtype == ATTN_DTYPE_F32; /* two tiles of float32 fill a multiprocessor */
    /* `swap_ctas` in sm80_producer.cuh */
    bool three = prepared->dense && takes_swap(args, KIND_LEVELS);
    return wide || prepared->padded_size > 128 || (one && prepared->padded_size == 128) ? 1
           : three                                                                      ? 3
                                                                                        : 2;
}

/* The kernel for the cache's elements (enum gpu_kind); -1: no kernel. */
static int32_t kind_of(const struct gpu_params *p)
{
    static const int8_t kinds[ATTN_DTYPE_INT8 + 1] = {
        [ATTN_DTYPE_F32] = KIND_F32 + 1,       [ATTN_DTYPE_F16] = KIND_F16 + 1,
        [ATTN_DTYPE_BF16] = KIND_BF16 + 1,     [ATTN_DTYPE_FP8_E4M3] = KIND_E4M3 + 1,
        [ATTN_DTYPE_FP8_E5M2] = KIND_E5M2 + 1, [ATTN_DTYPE_INT8] = KIND_INT8 + 1,
    };
    if (p->k.form == p->v.form && p->k.form == GPU_ROW_INT4) {
        return KIND_INT4;
    }
    if (p->k.form == p->v.form && p->k.form == GPU_ROW_NVFP4) {
        return KIND_NVFP4;
    }
    if (p->k.form == GPU_ROW_LEVELS && p->v.form == GPU_ROW_STEPS) {
        return KIND_LEVELS;
    }
    if (p->k.form == GPU_ROW_NUMBERS && p->k.dtype == ATTN_DTYPE_FP8_E4M3 &&
        p->v.form == GPU_ROW_STEPS) {
        return KIND_K8V4;
    }
    bool plain = p->k.form < GPU_ROW_INT4 && p->v.form < GPU_ROW_INT4 && p->k.dtype == p->v.dtype;
    return plain ? kinds[p->k.dtype] - 1 : -1;
}

const char *sm80_load(const struct gpu_device *device, const struct attn_layer_desc *layer)
{
    struct gpu_params cached = {0}, own = {0};
    cached.k.dtype = gpu_stored_as(layer, false, &cached.k.form);
    cached.v.dtype = gpu_stored_as(layer, true, &cached.v.form);
    own.k.dtype = own.v.dtype = layer->dtype;
    own.k.form = own.v.form = GPU_ROW_NUMBERS;
    const int32_t kinds[2] = {kind_of(&own), kind_of(&cached)};
    const char *cause = NULL;
    for (int i = 0; i < 2 && cause == NULL; i++) {
        cause = kinds[i] >= 0 ? sm80_launch(device, kinds[i], NULL, NULL) : NULL;
    }
    return cause;
}

/* Whether the attend makes the units of lists. */
static bool makes_units(const struct gpu_params *p)
{
    return p->problem.listed > 0 && p->problem.units == NULL;
}

/* Finds the number of CTAs, at most the plan's, and of stages in each. The sizes are those of
 * `decode_shape` in sm80_producer.cuh. False if not even one CTA with two stages fits. */
static bool fit_stages(const struct attn_attend_args *args, const struct gpu_params *p,
                       int32_t *ctas, int32_t *stages)
{
    const struct gpu_device *device = &args->instance->device;
    const struct schedule_host *plan = args->schedule_host;
    int32_t sms = device->num_sms - plan->prefill_sms;
    int32_t kind = kind_of(p), d = args->prepared->padded_size, tile = p->schedule.tile;
    bool hadamard = kind == KIND_INT4 || kind == KIND_LEVELS;
    int32_t q_element = kind == KIND_F32 ? 4 : 2;
    int32_t row = kind == KIND_K8V4   ? d * 3 / 4
                  : kind >= KIND_INT4 ? d / 2
                  : kind >= KIND_E4M3 ? d
                                      : q_element * d;
    int32_t scales = kind == KIND_LEVELS  ? tile * SM80_LEVELS_ROOM
                     : kind == KIND_K8V4  ? tile * SM80_K8V4_ROOM
                     : kind == KIND_NVFP4 ? 2 * tile * (d / 16)
                     : kind == KIND_INT4  ? 2 * tile * 4
                                          : 0;
    bool wide = d > 256;
    int32_t tail = wide && kind < KIND_E4M3 ? 0 : 1024;
    int32_t both = 2 * tile * row; /* bytes of K and V of a tile */
    int32_t stage = both + (scales > tail ? scales : tail);
    int32_t fixed = SM80_FIXED_SMEM + (kind >= KIND_E4M3 ? SM80_TERMS_SMEM : 0) +
                    (hadamard ? 3
                     : wide   ? 1
                              : 2) *
                        SM80_ROWS * d * q_element +
                    (wide ? SM80_SCORES_SMEM(tile) : 0);
    fixed = kind == KIND_LEVELS && d == 128 ? SM80_LEVELS_AT(fixed) + SM80_LEVELS_TABLE : fixed;
    for (int32_t of_sm = p->schedule.ctas / sms; of_sm > 0; of_sm--) {
        int32_t room = device->smem_of_sm / of_sm - 1024;
        room = room < device->smem_of_cta ? room : device->smem_of_cta;
        int32_t fitting = (room - fixed - (makes_units(p) ? SM80_LISTS_SMEM : 0)) / stage;
        if (fitting >= 2) {
            int32_t most = SM80_ON_THE_WAY / (of_sm * both);
            bool all = kind == KIND_F32 || kind >= KIND_E4M3 || wide || most > SM80_MAX_STAGES;
            /* a CTA alone works on a stage while others are filled */
            int32_t least = of_sm == 1 ? 3 : 2;
            most = all ? SM80_MAX_STAGES : most < least ? least : most;
            *stages = fitting < most ? fitting : most;
            *ctas = sms * of_sm;
            return true;
        }
    }
    return false;
}

/* Whether 4-bit rows have the kernel's head size and can be copied at least 4 bytes at a time. */
static bool serves_codes(const struct attn_attend_args *args, const struct gpu_params *p,
                         int32_t kind)
{
    const struct gpu_problem *problem = &p->problem;
    uint64_t bits = gpu_cache_bits(&p->k) | gpu_cache_bits(&p->v);
    for (int32_t i = 0; i < 2; i++) {
        const struct gpu_cache *c = i == 0 ? &p->k : &p->v;
        bits |= (uint64_t)(uintptr_t)c->row_scale | (uint64_t)c->row_scale_block |
                (uint64_t)c->row_scale_slot | (uint64_t)c->row_scale_head;
    }
    return problem->paged && bits % 4 == 0 && problem->head_size == problem->head_size_v &&
           problem->head_size == args->prepared->padded_size && problem->head_size <= 256 &&
           (kind != KIND_NVFP4 || problem->block_size % 4 == 0);
}

/* Whether rows of `bytes` are contiguous, and `rows` of them can be copied as one span of whole 16
 * bytes. */
static bool has_spans(const void *data, int64_t block, int64_t slot, int64_t head, int64_t bytes,
                      int32_t rows)
{
    uint64_t bits =
        (uint64_t)(uintptr_t)data | (uint64_t)block | (uint64_t)head | (uint64_t)(bytes * rows);
    return slot == bytes && bits % 16 == 0;
}

/* The largest copy of 16, 8 or 4 bytes with which rows of both caches have the same offset in every
 * slot; 0: no such copy. Keys of KIND_K8V4 are read 4 bytes at a time. */
static int32_t unit_of_rows(const struct gpu_params *p, bool together)
{
    const struct gpu_cache *k = &p->k, *v = together ? k : &p->v;
    uint64_t slots = (uint64_t)(uintptr_t)k->data | (uint64_t)(uintptr_t)v->data |
                     (uint64_t)k->block | (uint64_t)v->block | (uint64_t)k->slot |
                     (uint64_t)v->slot;
    uint64_t heads = (uint64_t)k->head | (uint64_t)v->head;
    if (slots % 4 != 0 || heads % (k->form == GPU_ROW_LEVELS ? 2 : 4) != 0) {
        return 0;
    }
    return slots % 16 == 0 ? 16 : slots % 8 == 0 ? 8 : 4;
}

/* The pitch of rows in a stage that holds for every head when rows are copied in aligned pieces of
 * `unit` bytes. */
static int32_t pitch_in_pieces(const struct gpu_cache *c, int32_t row, int32_t heads, int32_t unit)
{
    int64_t before = 0;
    for (int32_t i = 0; i < heads; i++) {
        int64_t own = i * c->head % unit;
        before = own > before ? own : before;
    }
    return (row + (int32_t)before + unit - 1) / unit * unit;
}

/* Lays out TurboQuant's rows in a stage: a slot's key and value consecutive or in planes of their
 * own, copied as spans of whole blocks or in pieces. False if the cache has another layout. */
static bool place_levels(const struct gpu_device *device, const struct gpu_params *p,
                         struct sm80_params *a)
{
    const struct gpu_cache *k = &p->k, *v = &p->v;
    int32_t tile = p->schedule.tile, size = p->problem.block_size, codes[2], row[2];
    for (int32_t i = 0; i < 2; i++) {
        const struct gpu_cache *c = i == 0 ? k : v;
        bool has_scale = i == 1 || c->form == GPU_ROW_LEVELS;
        codes[i] = c->head_size * (has_scale ? c->bits : 8) / 8;
        row[i] = codes[i] + (!has_scale ? 0 : i == 0 ? 2 : 4);
        if (has_scale && (c->row_scale != c->data + codes[i] || c->row_scale_block != c->block ||
                          c->row_scale_slot != c->slot || c->row_scale_head != c->head)) {
            return false;
        }
    }
    a->box_rows = size < tile ? size : tile;
    a->together = v->data == k->data + row[0] && v->block == k->block && v->slot == k->slot &&
                  v->head == k->head;
    a->scale_spans = 1;
    a->unit = 1;
    int32_t pitch[2] = {a->together ? row[0] + row[1] : row[0], row[1]};
    a->mapped =
        cuda_runs_sm90(device) && (size % tile == 0 || tile % size == 0) &&
        tile / a->box_rows <= device->lanes &&
        has_spans(k->data, k->block, k->slot, k->head, pitch[0], a->box_rows) &&
        (a->together || has_spans(v->data, v->block, v->slot, v->head, pitch[1], a->box_rows));
    if (!a->mapped) {
        a->unit = unit_of_rows(p, a->together);
        if (a->unit == 0) {
            return false;
        }
        pitch[0] = pitch_in_pieces(k, pitch[0], p->problem.num_kv_heads, a->unit);
        pitch[1] = pitch_in_pieces(v, pitch[1], p->problem.num_kv_heads, a->unit);
    }
    int32_t at = a->together ? row[0] : tile * pitch[0];
    pitch[1] = a->together ? pitch[0] : pitch[1];
    a->planes[0] = (struct sm80_plane){0, pitch[0], codes[0], pitch[0]};
    a->planes[1] = (struct sm80_plane){at, pitch[1], at + codes[1], pitch[1]};
    int32_t room = k->form == GPU_ROW_LEVELS ? k->head_size + SM80_LEVELS_ROOM
                                             : k->head_size * 3 / 2 + SM80_K8V4_ROOM;
    return (a->together ? pitch[0] : pitch[0] + pitch[1]) <= room;
}

static bool serves_levels(const struct attn_attend_args *args, const struct gpu_params *p)
{
    const struct gpu_problem *problem = &p->problem;
    struct sm80_params a;
    return problem->paged && problem->head_size == problem->head_size_v &&
           problem->head_size == args->prepared->padded_size && problem->head_size <= 256 &&
           place_levels(&args->instance->device, p, &a);
}

/* Rows are copied 16 bytes at a time, and their offsets are counted in units of 16 bytes with 31
 * bits. */
static bool serves_rows(const struct attn_attend_args *args, const struct gpu_params *p,
                        int32_t kind)
{
    const struct gpu_problem *problem = &p->problem;
    int32_t multiple = kind >= KIND_E4M3 ? 16 : 1;
    int32_t size = args->prepared->padded_size;
    if ((kind == KIND_F32 && size > 128) || (kind > KIND_E5M2 && size > 256)) {
        return false;
    }
    return (kind >= KIND_E4M3 || p->k.dtype == p->q.dtype) && problem->head_size % multiple == 0 &&
           problem->head_size_v % multiple == 0 && gpu_reads_wide(args, p);
}

static bool serves(const struct attn_attend_args *args, const struct gpu_params *p)
{
    const struct gpu_problem *problem = &p->problem;
    int32_t ctas, stages, kind = kind_of(p);
    bool is_short = p->q.dtype == ATTN_DTYPE_BF16 || p->q.dtype == ATTN_DTYPE_F16;
    if (kind < 0 || (kind >= KIND_INT4 && problem->listed > 0) || /* the plain kernel's */
        (kind != KIND_F32 && !is_short) || gpu_tensor_bits(&p->q) % 16 != 0 || p->p_dtype >= 0 ||
        p->k.pack != 0 || p->v.pack != 0 || problem->head_size > SM80_MAX_SIZE ||
        problem->head_size_v > SM80_MAX_SIZE) {
        return false;
    }
    bool walks = kind >= KIND_LEVELS ? serves_levels(args, p)
                 : kind >= KIND_INT4 ? serves_codes(args, p, kind)
                                     : serves_rows(args, p, kind);
    return walks && p->schedule.tile == tile_of(args->prepared, kind >= KIND_E4M3, SM80_ROWS) &&
           fit_stages(args, p, &ctas, &stages);
}

/* Producer warps make lists of up to SM80_LIST_UNITS units in shared memory. The plan has a token's
 * last key only, so that it has to see all keys of its request up to there. Each CTA makes all
 * units of its items. Where few long lists are cut into many parts, kernel list_keys makes their
 * units once. */
static bool reads_lists(const struct attn_attend_args *args, const struct gpu_params *p)
{
    const struct attn_layer_desc *layer = args->layer;
    const int64_t items = (int64_t)p->problem.num_tokens * p->problem.num_kv_heads;
    const bool pays =
        p->problem.unit_stride <= SM80_SHORT_LIST || items * 2 >= args->instance->device.num_sms;
    return pays && p->problem.unit_stride <= SM80_LIST_UNITS && !layer->has_window &&
           layer->chunk_size == 0 && args->prepared->padded_size <= 256 && serves(args, p);
}

/* Other outputs (permuted dims, heads over 256) are written plain and quantized by another kernel.
 */
static bool writes_codes(const struct attn_attend_args *args, const struct gpu_params *p)
{
    return kind_of(p) >= 0 && kind_of(p) < KIND_INT4 && args->prepared->padded_size <= 256;
}

/* A map of `rows` slots of `blocks` blocks in boxes of box_rows rows, up to 128 bytes each. L2
 * fetches of 256 bytes would fetch halves of other boxes: 0.89 of the read ceiling instead of 0.94.
 */
static bool map_rows(const struct gpu_device *device, const struct gpu_cache *cache, int32_t heads,
                     int64_t rows, int64_t blocks, int32_t box_rows, int32_t padded_size,
                     struct tensor_map *map)
{
    int32_t element = cache->dtype >= ATTN_DTYPE_FP8_E4M3 ? 1
                      : cache->dtype == ATTN_DTYPE_F32    ? 4
                                                          : 2;
    int32_t per_row = 128 / element;
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

static bool has_scale_spans(const struct gpu_cache *c, int64_t bytes, int32_t rows)
{
    return has_spans(c->row_scale, c->row_scale_block, c->row_scale_slot, c->row_scale_head, bytes,
                     rows);
}

/* Neighbouring keys that lie in neighbouring slots. */
static int32_t slots_together(const struct gpu_problem *p)
{
    return p->listed > 0 ? 1 << p->unit_shift : p->block_size;
}

/* TMA copies boxes of whole blocks, which must be multiples of 8 rows, the period of its swizzle.
 */
static void map_caches(const struct attn_attend_args *args, struct sm80_params *a)
{
    const struct gpu_device *device = &args->instance->device;
    struct gpu_params *p = &a->p;
    int32_t size = args->prepared->padded_size, heads = p->problem.num_kv_heads;
    int32_t tile = p->schedule.tile, block_size = slots_together(&p->problem);
    int64_t rows = p->problem.block_size, blocks = 1;
    a->box_rows = tile;
    if (p->problem.paged) {
        bool even = block_size % tile == 0 || (block_size % 8 == 0 && tile % block_size == 0);
        if (!even) {
            return;
        }
        blocks = args->k_cache->num_blocks;
        a->box_rows = block_size < tile ? block_size : tile;
    } else { /* all rows are one block */
        rows = args->k->shape[0] < args->v->shape[0] ? args->k->shape[0] : args->v->shape[0];
        p->k.slot = p->k.block;
        p->v.slot = p->v.block;
        p->problem.block_size = (int32_t)rows;
    }
    a->mapped = cuda_runs_sm90(device) &&
                map_rows(device, &p->k, heads, rows, blocks, a->box_rows, size, &a->k_map) &&
                map_rows(device, &p->v, heads, rows, blocks, a->box_rows, size, &a->v_map);
    a->scale_spans = a->mapped && p->problem.paged && size <= 128 && /* a box is a whole row */
                     (p->k.form != GPU_ROW_SCALED || has_scale_spans(&p->k, 4, a->box_rows)) &&
                     (p->v.form != GPU_ROW_SCALED || has_scale_spans(&p->v, 4, a->box_rows));
    if (!a->mapped && !p->problem.paged) {
        p->k.slot = p->v.slot = 0;
        p->problem.block_size = 1;
    }
}

/* The layout of a plane in a stage; `index` is 0 for K and 1 for V. With `spans`, rows and scales
 * of a block may be contiguous in the cache and stay so in the stage. */
static struct sm80_plane plane_of(const struct gpu_cache *c, int32_t index, int32_t tile,
                                  bool spans)
{
    int32_t row = c->head_size / 2, scale = c->form == GPU_ROW_NVFP4 ? c->head_size / 16 : 4;
    int64_t before = c->row_scale - c->data;
    bool together = spans && c->form == GPU_ROW_NVFP4 && c->slot == row + scale && before == row;
    int32_t at = index * tile * (together ? row + scale : row);
    return (struct sm80_plane){
        .at = at,
        .pitch = together ? row + scale : row,
        .scale_at = together ? at + row : tile * (2 * row + index * scale),
        .scale_pitch = together ? row + scale : scale,
    };
}

/* Copies spans of whole blocks where a head's slots are contiguous and the device supports it. */
static void map_codes(const struct attn_attend_args *args, struct sm80_params *a)
{
    struct gpu_params *p = &a->p;
    int32_t tile = p->schedule.tile, size = p->problem.block_size, scales = 0, rows = 0;
    a->box_rows = size < tile ? size : tile;
    bool even = size % tile == 0 || tile % size == 0;
    for (int32_t i = 0; i < 2; i++) {
        const struct gpu_cache *c = i == 0 ? &p->k : &p->v;
        a->planes[i] = plane_of(c, i, tile, true);
        struct sm80_plane own = plane_of(c, i, tile, false);
        rows += has_spans(c->data, c->block, c->slot, c->head, a->planes[i].pitch, a->box_rows);
        scales +=
            a->planes[i].pitch != own.pitch || has_scale_spans(c, own.scale_pitch, a->box_rows);
    }
    a->mapped = cuda_runs_sm90(&args->instance->device) && even && rows == 2 &&
                tile / a->box_rows <= args->instance->device.lanes &&
                a->planes[0].pitch == a->planes[1].pitch;
    a->scale_spans = a->mapped && scales == 2;
    for (int32_t i = 0; i < 2 && !a->mapped; i++) {
        a->planes[i] = plane_of(i == 0 ? &p->k : &p->v, i, tile, false);
    }
}

static const char *attend(const struct attn_attend_args *args, const struct gpu_params *p,
                          bool shared)
{
    const struct gpu_device *device = &args->instance->device;
    struct sm80_params a = {
        .p = *p, .overlaps = cuda_runs_sm90(device), .output = gpu_output_of(args)};
    int32_t kind = kind_of(p);
    a.swap = swap_of(args, kind);
    if (makes_units(p)) {
        a.lists = gpu_entries_of(args);
    }
    if (!fit_stages(args, p, &a.p.schedule.ctas, &a.stages)) {
        return "shared memory is too small";
    }
    if (shared) {
        const struct schedule_host *plan = args->schedule_host;
        a.late = a.p.schedule.ctas / (device->num_sms - plan->prefill_sms) * plan->prefill_sms;
    }
    if (kind >= KIND_LEVELS) {
        place_levels(device, p, &a); /* cannot fail: `serves` has checked it */
    } else if (kind >= KIND_INT4) {
        map_codes(args, &a);
    } else {
        map_caches(args, &a);
    }
    return sm80_launch(device, kind, &a, args->stream);
}

const struct gpu_matrix_kernels sm80_matrix = {
    .choose_rows = choose_rows,
    .tile = tile_of,
    .groups_of_sm = ctas_of_sm,
    .serves = serves,
    .writes_codes = writes_codes,
    .reads_lists = reads_lists,
    .attend = attend,
};
