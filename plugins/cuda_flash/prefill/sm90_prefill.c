/* SPDX-License-Identifier: Apache-2.0 */
/* Prefill on sm_90a, host side: which layers and tensors it serves, its workspace and its launches.
 */
#include "gpu/host/schedule.h"
#include "sm90_prefill.h"

#define SECTION_BYTES (8 << 20) /* K and V of a section, which stay in the L2 */
#define MOST_BOXES 32           /* boxes of a tile; each lane has one */
#define OUT_ROWS 16             /* rows of an item that a warp writes */
#define LEAST_PARTS 8           /* parts of an item with a multiprocessor each */
#define LEAST_SCALE 1e-6f       /* a smaller softmax scale is applied to the scores first */
#define CLOCKS_OF_KEYS 2400     /* 128 rows and keys, D 128 */
#define CLOCKS_OF_ITEM 3600     /* an item's prologue and epilogue */
#define SLOWED_BY_DECODES 1.33  /* the part by which decodes alone slow a prefill */
#define BYTES_OF_CLOCK 2500     /* read by all multiprocessors together */
#define BYTES_OF_SM 32          /* read by one multiprocessor, at least */
#define SHARE_STEPS 3           /* after which a batch's time changes by less than 2 % */
#define LONG_ITEM 1024          /* keys from which on cutting an item may pay */
#define LEAST_PART 512          /* keys of one part */
#define KEYS_OF_CUT 640         /* the cost of writing and merging parts, in keys */
#define GAIN_OF_HEAD64 0.15     /* the part of the time that 192 rows save */
#define HEAD64_WAVES 2          /* items for each multiprocessor from which on 192 rows pay */
#define LONG_KEYS 1408          /* keys of an item from which on parts may pay */
#define WIDE_SIZE 512           /* heads over 256 */
#define MOST_COPIED (160 << 20) /* scratch for copies of narrow keys and values */

/* Element types of queries, rows and outputs. With the target bf16 (meson_options.txt) float16 has
 * no kernels here. */
static bool has_kernels_of(int32_t dtype)
{
#ifdef CUDA_FLASH_BF16_ALONE
    return dtype == ATTN_DTYPE_BF16;
#else
    return dtype == ATTN_DTYPE_BF16 || dtype == ATTN_DTYPE_F16;
#endif
}

/* The kernel's padded head size of K. V has the same size, except 128 with 192 and 256 with 512,
 * where an item has half of the values. */
static int32_t size_of(int32_t head_size, int32_t head_size_v)
{
    int32_t larger = head_size > head_size_v ? head_size : head_size_v;
    return larger <= 64                             ? 64
           : larger <= 128                          ? 128
           : head_size <= 192 && head_size_v <= 128 ? 192
           : larger <= 256                          ? 256
                                                    : WIDE_SIZE;
}

static int32_t keys_of(int32_t size)
{
    return size >= 256 ? 64 : 128;
}

/* Rows of a page in one box: a power of two, so that a tile consists of whole boxes. */
static int32_t box_rows_of(int32_t block_size, int32_t keys)
{
    int32_t rows = block_size & -block_size;
    return rows < keys ? rows : keys;
}

/* Whether a tile can be assembled from boxes of page rows. */
static bool has_boxes(int32_t block_size, int32_t size)
{
    int32_t keys = keys_of(size), rows = box_rows_of(block_size, keys);
    return rows >= 8 && keys / rows * (size / 64) <= MOST_BOXES;
}

/* Bytes of a copied key and value of one KV head; 0 if the layer's caches are read in place or are
 * not served. A copied key must be exact in the layer's type, and an int4 key without its Hadamard
 * transform has 11 bits. */
static int64_t copy_bytes(const struct attn_layer_desc *layer, const struct attn_kv_view *view)
{
    int32_t own = layer->dtype == ATTN_DTYPE_BF16 ? ATTN_KV_BF16 : ATTN_KV_F16;
    int32_t size = size_of(layer->head_size, layer->head_size_v), of_boxes = size;
    bool served = false;
    size = size == 192 ? 256 : size; /* copies are padded to 256 */
    switch (layer->kv_dtype) {
    case ATTN_KV_FP8_E4M3:
    case ATTN_KV_FP8_E5M2:
    case ATTN_KV_FP8_PER_TOKEN_HEAD:
    case ATTN_KV_INT8_PER_TOKEN_HEAD:
    case ATTN_KV_INT8_KV:
    case ATTN_KV_INT8_K:
    case ATTN_KV_NVFP4:
        served = true;
        break;
    case ATTN_KV_INT4_PER_TOKEN_HEAD:
        served = layer->dtype == ATTN_DTYPE_F16 && layer->head_size == size &&
                 layer->head_size_v == size && size <= 128;
        break;
    default:
        served = (layer->kv_dtype == ATTN_KV_AUTO || layer->kv_dtype == own) && view != NULL &&
                 !has_boxes(view->block_size, of_boxes);
        break;
    }
    served = served && has_kernels_of(layer->dtype) &&
             (layer->head_size | layer->head_size_v) % 16 == 0 && layer->head_size <= 256 &&
             layer->head_size_v <= 256;
    return served ? 4 * (int64_t)size + (int64_t)sizeof(float) : 0;
}

/* Whether rows of the cache can be read 16 elements at a time. */
static bool can_copy(const struct attn_kv_view *view, int32_t kv_dtype)
{
    bool nibbles = kv_dtype == ATTN_KV_NVFP4 || kv_dtype == ATTN_KV_INT4_PER_TOKEN_HEAD;
    uint64_t bits = (uint64_t)(uintptr_t)view->data | (uint64_t)view->stride_block |
                    (uint64_t)view->stride_slot | (uint64_t)view->stride_head;
    return (view->pack == 0 || view->pack >= view->head_size) && bits % (nibbles ? 4 : 16) == 0;
}

/* Whether scores have no terms and the softmax scale can be applied in the exponent. */
static bool is_plain(const struct attn_layer_desc *layer)
{
    return layer->alibi == ATTN_ALIBI_NONE && layer->tree_mask == ATTN_TREE_NONE &&
           !layer->prefix_lm && !(layer->soft_cap > 0) && layer->scale >= LEAST_SCALE;
}

/* Heads over 256 have a kernel without terms, which writes 16 bytes at a time. */
static bool serves_size(const struct attn_layer_desc *layer)
{
    int32_t size = size_of(layer->head_size, layer->head_size_v);
    return size <= 256 || (layer->head_size <= size && layer->head_size_v <= size &&
                           layer->head_size_v % 8 == 0 && is_plain(layer));
}

static const char *load(const struct gpu_device *device, const struct attn_layer_desc *layer,
                        const struct attn_prepared *prepared)
{
    const bool bf16 = layer->dtype == ATTN_DTYPE_BF16;
    const int32_t size = size_of(layer->head_size, layer->head_size_v);
    uint32_t kernels = 1u << PREFILL_PLAN | 1u << PREFILL_MERGE;
    if (prepared->listed > 0 || !has_kernels_of(layer->dtype)) {
        return NULL;
    }
    if (prepared->copy_bytes > 0) {
        const uint32_t copies =
            1u << PREFILL_WIDEN | 1u << (bf16 ? PREFILL_COPIES_BF16 : PREFILL_COPIES_F16);
        const char *cause = prefill_load(device, copies, size == 192 ? 256 : size);
        if (cause != NULL) {
            return cause;
        }
    }
    kernels |= 1u << (bf16 ? PREFILL_BF16 : PREFILL_F16);
    kernels |= size == 64 ? 1u << PREFILL_HEAD64 : 0;
    if (prepared->invariant >= 2) {
        kernels |= 1u << (bf16 ? PREFILL_EXACT_BF16 : PREFILL_EXACT_F16);
    }
    return prefill_load(device, kernels, size);
}

/* Whether the bits of a row do not depend on the rows that share its item. Then they are the same
 * however a request is cut into steps, since all items walk the same tiles in the same order.
 * Linear ALiBi has another formula in inner tiles, and copies would be made of a whole cache for
 * each decode. */
static bool cuts_alike(const struct attn_attend_args *args)
{
    const struct attn_layer_desc *layer = args->layer;
    return args->prepared->copy_bytes == 0 && layer->alibi != ATTN_ALIBI_LINEAR &&
           layer->tree_mask == ATTN_TREE_NONE && !layer->prefix_lm;
}

static bool serves(const struct attn_attend_args *args)
{
    const struct attn_layer_desc *layer = args->layer;
    const struct gpu_device *device = &args->instance->device;
    int32_t kv = layer->kv_dtype,
            own = layer->dtype == ATTN_DTYPE_BF16 ? ATTN_KV_BF16 : ATTN_KV_F16;
    if (device->major != 9 || device->encode_map == NULL || !has_kernels_of(layer->dtype) ||
        layer->p_scale_form != ATTN_SCALE_NONE || args->prepared->group > PREFILL_ROWS ||
        !serves_size(layer) || (args->prepared->invariant >= 2 && !cuts_alike(args))) {
        return false;
    }
    if (args->prepared->copy_bytes > 0 && args->k_cache != NULL) {
        return can_copy(args->k_cache, kv) && can_copy(args->v_cache, kv);
    }
    if ((kv != ATTN_KV_AUTO && kv != own) || layer->q_scale_form != ATTN_SCALE_NONE ||
        layer->k_scale_form != ATTN_SCALE_NONE || layer->v_scale_form != ATTN_SCALE_NONE) {
        return false;
    }
    if (args->k_cache == NULL) {
        return true;
    }
    return has_boxes(args->k_cache->block_size, size_of(layer->head_size, layer->head_size_v));
}

/* Keys of a tile of cut items; agrees with `has_small_tiles` in sm90_prefill.cuh. */
static int32_t keys_of_parts(const struct attn_layer_desc *layer,
                             const struct attn_prepared *prepared)
{
    int32_t size = size_of(layer->head_size, layer->head_size_v);
    return size == 128 && prepared->copy_bytes == 0 && is_plain(layer) ? 64 : keys_of(size);
}

/* The number of tiles of the item with a request's last queries; no other item of the request has
 * more. */
static int64_t tiles_of_items(const struct attn_attend_args *args, int32_t tile, int64_t queries,
                              int64_t keys)
{
    const struct attn_layer_desc *layer = args->layer;
    int64_t most = keys, own = PREFILL_ROWS / args->prepared->group;
    own = own < queries ? own : queries;
    if (layer->has_window && layer->window_left >= 0 && !layer->prefix_lm) {
        int64_t right = layer->window_right > 0 ? layer->window_right : 0;
        most = layer->window_left + own + right;
    } else if (layer->chunk_size > 0) {
        most = ((int64_t)layer->chunk_lookback + 1) * layer->chunk_size + own;
    }
    return ((most < keys ? most + tile : keys) + tile - 1) / tile;
}

/* Whether items of a layer may be cut; agrees with `cuts` in sm90_shape.cuh. */
static bool has_parts(const struct attn_layer_desc *layer, const struct attn_prepared *prepared)
{
    int32_t size = size_of(layer->head_size, layer->head_size_v);
    bool plain = is_plain(layer);
    bool copies = prepared->copy_bytes > 0;
    return !prepared->invariant && (size <= 128 || (size == 192 && !copies)) && (plain || !copies);
}

/* Counts the items of a batch when each is cut into parts of `part` tiles (0: uncut); stops above
 * `most`. Also returns the tiles of the longest item. */
static int64_t count_parts(const struct attn_attend_args *args, int64_t part, int64_t most,
                           int64_t *longest)
{
    const struct attn_batch *batch = args->batch;
    const struct attn_prepared *prepared = args->prepared;
    const int32_t *start = batch->query_start_loc_host;
    const int64_t of_row_tile = (int64_t)PREFILL_ROWS / prepared->group * prepared->group;
    int64_t parts = 0;
    *longest = 0;
    for (int32_t r = 0; r < batch->num_reqs && parts <= most; r++) {
        int64_t rows = (int64_t)(start[r + 1] - start[r]) * prepared->group;
        int64_t row_tiles = (rows + of_row_tile - 1) / of_row_tile;
        int64_t tiles = tiles_of_items(args, keys_of_parts(args->layer, prepared),
                                       start[r + 1] - start[r], batch->seq_lens_host[r]);
        *longest = tiles > *longest ? tiles : *longest;
        parts += row_tiles * prepared->num_kv_heads * (part > 0 ? (tiles + part - 1) / part : 1);
    }
    return parts;
}

/* The smallest part, in tiles, with which a batch of few items gives each multiprocessor at most
 * one part; 0 if cutting costs more than it gains. */
static int32_t cut_of(const struct attn_attend_args *args)
{
    const int32_t sms = args->instance->device.num_sms;
    const int64_t most = sms < PREFILL_MOST_PARTS ? sms : PREFILL_MOST_PARTS;
    const int32_t tile = keys_of_parts(args->layer, args->prepared);
    int64_t longest, ignored;
    if (!has_parts(args->layer, args->prepared) || args->batch->seq_lens_host == NULL ||
        args->batch->num_reqs > most || count_parts(args, 0, most, &longest) > most ||
        longest * tile < LONG_KEYS) {
        return 0;
    }
    int64_t low = LEAST_PART / tile, high = longest * 4 / 5 - KEYS_OF_CUT / tile;
    if (high < low || count_parts(args, high, most, &ignored) > most) {
        return 0;
    }
    while (low < high) {
        int64_t middle = (low + high) / 2;
        if (count_parts(args, middle, most, &ignored) > most) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return (int32_t)low;
}

/* Few long items that are not cut would leave multiprocessors idle. */
static bool pays(const struct attn_attend_args *args)
{
    const struct attn_batch *batch = args->batch;
    const struct schedule_host *plan = args->schedule_host;
    const int32_t *start = batch->query_start_loc_host;
    int64_t items = 0;
    for (int32_t r = 0; r < batch->num_reqs; r++) {
        int64_t rows = (int64_t)(start[r + 1] - start[r]) * args->prepared->group;
        items += rows > plan->few_rows ? (rows + PREFILL_ROWS - 1) / PREFILL_ROWS : 0;
    }
    items *= args->prepared->num_kv_heads;
    return items > 0 && (items * LEAST_PARTS >= args->instance->device.num_sms ||
                         batch->max_seq_len <= LONG_ITEM || cut_of(args) > 0);
}

struct prefill_layout {
    /* offsets in bytes */
    size_t row_tile_start, key_tile_start, key_sum, row_tiles, items, end;
    int64_t room; /* capacity of `items` */
};

/* The scratch: parts of cut items, or from its beginning copies if none is cut. */
static size_t bytes_of_parts(const struct attn_prepared *prepared)
{
    return (size_t)PREFILL_MOST_PARTS * PREFILL_ROWS *
           ((size_t)prepared->padded_size * 2 + sizeof(float));
}

static struct prefill_layout layout_of_prefill(const struct attn_prepared *prepared, int64_t reqs,
                                               int64_t tokens)
{
    int64_t queries =
        PREFILL_ROWS / (prepared->group < PREFILL_ROWS ? prepared->group : PREFILL_ROWS);
    int64_t row_tiles = tokens / queries + reqs;
    struct prefill_layout at;
    at.row_tile_start = gpu_round_up(sizeof(struct prefill_header));
    at.key_tile_start = at.row_tile_start + gpu_round_up((size_t)(reqs + 1) * sizeof(int32_t));
    at.key_sum = at.key_tile_start + gpu_round_up((size_t)(row_tiles + 1) * sizeof(int32_t));
    at.row_tiles = at.key_sum + gpu_round_up((size_t)(reqs + 1) * sizeof(int32_t));
    at.items = at.row_tiles + gpu_round_up((size_t)row_tiles * sizeof(struct gpu_row_tile));
    at.room = row_tiles * prepared->num_kv_heads;
    at.room = at.room > PREFILL_MOST_PARTS ? at.room : PREFILL_MOST_PARTS;
    at.end = at.items + gpu_round_up((size_t)at.room * sizeof(struct prefill_item));
    return at;
}

/* The place of the copies in the scratch, and how many bytes they may take there. */
static char *place_of_copies(const struct attn_attend_args *args, int64_t *bytes)
{
    const struct schedule_host *plan = args->schedule_host;
    char *memory = prefill_scratch(args, bytes);
    size_t parts = plan->part_tiles > 0 ? bytes_of_parts(args->prepared) : 0;
    *bytes -= (int64_t)parts;
    return memory + parts;
}

/* Rows of copies for `reqs` requests of `keys` keys. */
static int64_t rows_of_copies(int64_t reqs, int64_t keys)
{
    return reqs * ((keys + PREFILL_COPY_ROWS - 1) / PREFILL_COPY_ROWS * PREFILL_COPY_ROWS);
}

/* The largest number of prefill requests. Requests with few rows are decodes and need no copy. */
static int64_t most_copied(const struct attn_prepared *prepared, int64_t reqs, int64_t tokens)
{
    int64_t most = tokens * prepared->group / (prepared->few_rows + 1);
    return most < reqs ? most : reqs;
}

/* The workspace is the plan. The scratch are parts, and copies for as many heads as fit into
 * MOST_COPIED. Plans of decodes alone need neither. */
static void bytes_of(const struct attn_instance *instance, const struct attn_prepared *prepared,
                     const struct attn_limits *limits, size_t *workspace, size_t *scratch)
{
    (void)instance;
    int64_t reqs = limits->max_num_reqs, tokens = limits->max_num_tokens;
    int64_t rows = rows_of_copies(most_copied(prepared, reqs, tokens), limits->max_seq_len);
    int64_t copies = rows * prepared->copy_bytes * prepared->num_kv_heads;
    /* up to 704 keys, rounded up to tiles, no item reaches LONG_KEYS */
    bool cuts = !prepared->invariant && prepared->padded_size <= 256 &&
                (limits->max_seq_len == 0 || limits->max_seq_len > LONG_KEYS / 2);
    *workspace = *scratch = 0;
    if (limits->max_query_len == 0 || prepared->invariant >= 2 ||
        (int64_t)limits->max_query_len * prepared->group > prepared->few_rows) {
        *workspace = layout_of_prefill(prepared, reqs, tokens).end;
        *scratch = (cuts ? bytes_of_parts(prepared) : 0) +
                   gpu_round_up((size_t)(copies < MOST_COPIED ? copies : MOST_COPIED));
    }
}

/* Rows of copies of the plan's requests, from the lengths that the host knows. */
static int64_t count_copied(const struct attn_attend_args *args, int32_t mode)
{
    const struct attn_batch *batch = args->batch;
    const struct attn_prepared *prepared = args->prepared;
    const int32_t *start = batch->query_start_loc_host;
    int64_t rows = 0;
    if (mode != ATTN_PLAN_EAGER || batch->seq_lens_host == NULL) {
        int64_t longest = batch->max_seq_len;
        if (mode != ATTN_PLAN_EAGER && args->limits != NULL &&
            args->limits->max_seq_len > longest) {
            longest = args->limits->max_seq_len;
        }
        return rows_of_copies(most_copied(prepared, batch->num_reqs, batch->num_tokens), longest);
    }
    for (int32_t r = 0; r < batch->num_reqs; r++) {
        bool many = (int64_t)(start[r + 1] - start[r]) * prepared->group > prepared->few_rows;
        rows += many ? rows_of_copies(1, batch->seq_lens_host[r]) : 0;
    }
    return rows;
}

/* The number of heads whose copies fit into the scratch together; < 1 if not even one fits. */
static int64_t heads_at_once(const struct attn_attend_args *args)
{
    const struct schedule_host *plan = args->schedule_host;
    int64_t of_head = plan->copied_rows * args->prepared->copy_bytes, bytes;
    place_of_copies(args, &bytes);
    int64_t heads = of_head > 0 ? bytes / of_head : 0, all = args->prepared->num_kv_heads;
    int64_t launches = heads > 0 ? (all + heads - 1) / heads : 0; /* with equal numbers of heads */
    return launches > 0 ? (all + launches - 1) / launches : 0;
}

/* Rows of an item. Kernels with three consumer warp groups serve heads of 64 dims without terms.
 * Their items are longer, so they pay only with several items for each multiprocessor. A
 * batch-invariant layer always uses them, because the rows that share an item must not depend on
 * the batch. */
static int32_t rows_of_items(const struct attn_attend_args *args, int32_t mode)
{
    const struct attn_layer_desc *layer = args->layer;
    const struct attn_batch *batch = args->batch;
    const struct attn_prepared *prepared = args->prepared;
    const struct schedule_host *plan = args->schedule_host;
    const int32_t *start = batch->query_start_loc_host;
    const int64_t queries = PREFILL_HEAD64_ROWS / prepared->group;
    if (size_of(layer->head_size, layer->head_size_v) != 64 || !is_plain(layer) ||
        prepared->copy_bytes > 0 || prepared->invariant >= 2) {
        return PREFILL_ROWS;
    }
    if (prepared->invariant) {
        return PREFILL_HEAD64_ROWS;
    }
    if (plan->part_tiles > 0 || plan->prefill_sms > 0) {
        return PREFILL_ROWS;
    }
    int64_t items = 0;
    if (mode != ATTN_PLAN_EAGER || batch->flags & ATTN_BATCH_HOST_BOUNDS) {
        items = batch->num_tokens / queries;
    } else {
        for (int32_t r = 0; r < batch->num_reqs; r++) {
            items += (start[r + 1] - start[r] + queries - 1) / queries;
        }
    }
    items *= prepared->num_kv_heads;
    return items >= HEAD64_WAVES * (int64_t)args->instance->device.num_sms ? PREFILL_HEAD64_ROWS
                                                                           : PREFILL_ROWS;
}

/* The number of multiprocessors for prefill in a mixed batch; decodes run on the others, and both
 * shall end together. The constants are clocks of an H200, and the bytes per clock of the whole
 * memory and of one multiprocessor. Prefill is slower the more of memory's rate decodes use.
 * 0: one after the other. */
static int32_t share_of(const struct attn_attend_args *args)
{
    const struct attn_batch *batch = args->batch;
    const struct attn_prepared *prepared = args->prepared;
    const struct attn_layer_desc *layer = args->layer;
    const struct schedule_host *plan = args->schedule_host;
    const int32_t *start = batch->query_start_loc_host;
    const int64_t sms = args->instance->device.num_sms;
    int64_t clocks = 0, bytes = 0; /* on one multiprocessor; of one KV head */
    if (prepared->copy_bytes > 0 || batch->seq_lens_host == NULL || args->k_cache == NULL ||
        prepared->padded_size > 256) {
        return 0;
    }
    const int32_t tile = keys_of(size_of(layer->head_size, layer->head_size_v));
    for (int32_t r = 0; r < batch->num_reqs; r++) {
        int64_t queries = start[r + 1] - start[r], rows = queries * prepared->group;
        int64_t keys = batch->seq_lens_host[r];
        int64_t most = queries > 0 ? tiles_of_items(args, tile, queries, keys) * tile : 0;
        if (keys < queries) {
            continue; /* padding */
        }
        if (rows > plan->few_rows) {
            int64_t items = (rows + PREFILL_ROWS - 1) / PREFILL_ROWS;
            int64_t seen = layer->causal == ATTN_CAUSAL_YES ? keys - queries / 2 : keys;
            seen = seen < most ? (seen + tile - 1) / tile * tile : most;
            const int64_t sizes = seen * prepared->padded_size / 128; /* as keys of D 128 */
            clocks += items * (CLOCKS_OF_ITEM + sizes * CLOCKS_OF_KEYS / 128);
        } else if (rows > 0) {
            bytes += (keys < most ? keys : most) * (layer->head_size + layer->head_size_v) * 2;
        }
    }
    const double by_memory = (double)bytes / BYTES_OF_CLOCK;
    if (rows_of_items(args, ATTN_PLAN_EAGER) == PREFILL_HEAD64_ROWS &&
        by_memory * (double)sms < (double)clocks * GAIN_OF_HEAD64) {
        return 0; /* the faster kernel has all multiprocessors, then the decodes have */
    }
    double length = by_memory, slowed = 0;
    for (int i = 0; i < SHARE_STEPS && length > 0; i++) {
        slowed = (double)clocks * (1 + SLOWED_BY_DECODES * by_memory / length);
        const double by_sms = (slowed + (double)bytes / BYTES_OF_SM) / (double)sms;
        length = by_sms > by_memory ? by_sms : by_memory;
    }
    /* a multiprocessor too few would cost the decodes more than the prefill */
    const double share = length > 0 ? slowed / length : 0;
    const int32_t whole = (int32_t)share + (length > by_memory ? 0 : share > (int32_t)share);
    return whole > 0 && whole < sms ? whole : 0;
}

static bool fits(const struct attn_attend_args *args, int32_t mode)
{
    struct schedule_host *plan = args->schedule_host;
    plan->prefill_rows = rows_of_items(args, mode);
    if (args->prepared->copy_bytes == 0) {
        return true;
    }
    plan->copied_rows = count_copied(args, mode);
    /* A batch-invariant layer uses the same kernel for every batch. */
    bool always = args->prepared->invariant && args->limits != NULL;
    int64_t most = always ? rows_of_copies(most_copied(args->prepared, args->limits->max_num_reqs,
                                                       args->limits->max_num_tokens),
                                           args->limits->max_seq_len)
                          : 0;
    return heads_at_once(args) > 0 && most * args->prepared->copy_bytes <= MOST_COPIED;
}

/* Sets what the plan and its attends share. */
static void set_items(struct prefill_params *a, const struct attn_attend_args *args, char *memory)
{
    const struct schedule_host *plan = args->schedule_host;
    int64_t bytes;
    struct prefill_layout at = layout_of_prefill(args->prepared, plan->num_reqs, plan->num_tokens);
    struct gpu_params *p = &a->p;
    a->queries = plan->prefill_rows / p->problem.group;
    a->group_inverse = (65536 + p->problem.group - 1) / p->problem.group;
    a->size = size_of(p->problem.head_size, p->problem.head_size_v);
    a->copies = args->prepared->copy_bytes > 0;
    a->size = a->size == 192 && a->copies ? 256 : a->size;
    a->size_v = a->size == 192 ? 128 : a->size == WIDE_SIZE ? 256 : a->size;
    a->end_head = p->problem.num_kv_heads;
    a->section_keys = SECTION_BYTES / ((p->problem.head_size + p->problem.head_size_v) * 2);
    a->header = (struct prefill_header *)memory;
    a->items = (struct prefill_item *)(memory + at.items);
    a->room = (int32_t)at.room;
    a->part_tiles = plan->part_tiles;
    a->parts = prefill_scratch(args, &bytes);
    a->part_lse = (float *)(a->parts + (size_t)PREFILL_MOST_PARTS * PREFILL_ROWS *
                                           (size_t)args->prepared->padded_size * 2);
    a->key_sum = (int32_t *)(memory + at.key_sum);
    p->schedule.tile_rows = a->queries * p->problem.group;
    p->schedule.tile =
        plan->part_tiles > 0 ? keys_of_parts(args->layer, args->prepared) : keys_of(a->size);
    p->schedule.least_rows = plan->few_rows + 1;
    p->schedule.most_rows = INT32_MAX;
    p->schedule.row_tiles = (struct gpu_row_tile *)(memory + at.row_tiles);
    p->schedule.row_tile_start = (int32_t *)(memory + at.row_tile_start);
    p->schedule.key_tile_start = (int32_t *)(memory + at.key_tile_start);
}

static const char *plan_prefill(const struct attn_attend_args *args,
                                const struct gpu_problem *problem, char *memory)
{
    struct prefill_params a = {.p.problem = *problem};
    set_items(&a, args, memory);
    return prefill_launch(&args->instance->device, PREFILL_PLAN, &a, args->stream);
}

/* A map of contiguous rows: tiles begin at any row, and rows after the last read as zero. */
static bool walk_rows(struct prefill_walk *w, const struct gpu_device *device,
                      const struct gpu_cache *c, int64_t rows, int32_t heads, int32_t size,
                      int32_t keys)
{
    uint64_t columns = (uint64_t)size / 64, step = (uint64_t)c->head / 128;
    bool whole = c->head_size == size && c->head % 128 == 0 && size <= 256;
    struct map_shape shape = {
        .rank = 5,
        .element = 2,
        .fetched = 256,
        .sizes = {(uint64_t)c->head_size, (uint64_t)rows, (uint64_t)heads, 1, 1},
        .strides = {(uint64_t)c->block, (uint64_t)c->head, 16, 16},
        .box = {64, (uint32_t)keys, 1, 1, 1},
    };
    if (whole) {
        shape.sizes[0] = 64;
        shape.sizes[2] = step * (uint64_t)(heads - 1) + columns;
        shape.strides[1] = 128;
        shape.box[2] = (uint32_t)columns;
    }
    w->form = whole ? PREFILL_ROW_BOX : PREFILL_ROW_COLUMNS;
    w->box_rows = keys;
    w->columns = whole ? 1 : (int32_t)columns;
    w->boxes = w->columns;
    w->head_step = (int32_t)step;
    w->box_bytes = keys * 128 * (int32_t)(whole ? columns : 1);
    w->column_step = keys * 128;
    w->row_step = 0;
    return tensor_map_encode(device, c->data, &shape, &w->map);
}

/* A map of pages, where a box has rows of one page. If one box has all columns, then 8 rows of each
 * column are contiguous: {64 dims, 8 slots, columns of all heads, slots / 8, blocks}. */
static bool walk_pages(struct prefill_walk *w, const struct gpu_device *device,
                       const struct gpu_cache *c, int64_t blocks, int32_t block_size, int32_t heads,
                       int32_t size, int32_t keys, bool whole)
{
    uint64_t columns = (uint64_t)size / 64, step = (uint64_t)c->head / 128;
    int32_t rows = box_rows_of(block_size, keys);
    struct map_shape shape = {
        .rank = 5,
        .element = 2,
        .fetched = 256,
        .sizes = {(uint64_t)c->head_size, (uint64_t)block_size, (uint64_t)heads, (uint64_t)blocks,
                  1},
        .strides = {(uint64_t)c->slot, (uint64_t)c->head, (uint64_t)c->block, 16},
        .box = {64, (uint32_t)rows, 1, 1, 1},
    };
    if (whole) {
        shape.sizes[0] = 64;
        shape.sizes[1] = 8;
        shape.sizes[2] = step * (uint64_t)(heads - 1) + columns;
        shape.sizes[3] = (uint64_t)block_size / 8;
        shape.sizes[4] = (uint64_t)blocks;
        shape.strides[1] = 128;
        shape.strides[2] = 8 * (uint64_t)c->slot;
        shape.strides[3] = (uint64_t)c->block;
        shape.box[1] = 8;
        shape.box[2] = (uint32_t)columns;
        shape.box[3] = (uint32_t)rows / 8;
    }
    w->form = whole ? PREFILL_PAGE_BOX : PREFILL_PAGE_COLUMNS;
    w->box_rows = rows;
    w->columns = whole ? 1 : (int32_t)columns;
    w->boxes = keys / rows * w->columns;
    w->head_step = (int32_t)step;
    w->box_bytes = rows * 128 * (int32_t)(whole ? columns : 1);
    w->column_step = keys * 128;
    w->row_step = w->box_bytes;
    return w->boxes <= MOST_BOXES && tensor_map_encode(device, c->data, &shape, &w->map);
}

static bool map_queries(struct prefill_params *a, const struct attn_attend_args *args)
{
    const struct gpu_device *device = &args->instance->device;
    const struct gpu_params *p = &a->p;
    /* TMA's element has 16 bits, two fp8 numbers. */
    int32_t of_element = a->scales == PREFILL_IN_FP8 ? 2 : 1;
    /* A box for each warp group; agrees with `q_by_group` in sm90_shape.cuh. */
    bool by_group = a->size >= 192 && a->size <= 256 && PREFILL_ROWS / 2 % p->problem.group == 0;
    int32_t queries = by_group ? a->queries / 2 : a->queries;
    const struct map_shape shape = {
        .rank = 5,
        .element = 2,
        .fetched = 256,
        .sizes = {(uint64_t)(p->problem.head_size / of_element), (uint64_t)p->problem.num_q_heads,
                  (uint64_t)args->q->shape[0], 1, 1},
        .strides = {(uint64_t)p->q.head, (uint64_t)p->q.row, 16, 16},
        .box = {64, (uint32_t)p->problem.group, (uint32_t)queries, 1, 1},
    };
    a->query_bytes = queries * p->problem.group * a->size * 2 / of_element;
    return tensor_map_encode(device, p->q.data, &shape, &a->q_map);
}

/* A map of the output in boxes of 16 rows of an item, the first a multiple of 16. A row is (query,
 * head of the group); either a query's heads are whole boxes or a box has whole queries. */
static void map_output(struct prefill_params *a, const struct attn_attend_args *args)
{
    const struct gpu_params *p = &a->p;
    int32_t group = p->problem.group, heads = group < OUT_ROWS ? group : OUT_ROWS;
    const struct map_shape rows = {
        .rank = 4,
        .element = 2,
        .fetched = 256,
        .sizes = {64, (uint64_t)p->problem.num_q_heads, (uint64_t)args->q->shape[0],
                  (uint64_t)a->size_v / 64},
        .strides = {(uint64_t)p->out.head, (uint64_t)p->out.row, 128},
        .box = {64, (uint32_t)heads, (uint32_t)(OUT_ROWS / heads), (uint32_t)a->size_v / 64},
    };
    a->wide_rows = gpu_tensor_bits(&p->out) % 16 == 0 && p->problem.head_size_v % 8 == 0;
    a->boxes_rows = a->wide_rows && OUT_ROWS % heads == 0 && group % heads == 0 &&
                    p->problem.head_size_v == a->size_v && a->output.form == ATTN_OUTPUT_PLAIN &&
                    a->part_tiles == 0 &&
                    tensor_map_encode(&args->instance->device, p->out.data, &rows, &a->out_map);
}

static bool map_tensors(struct prefill_params *a, const struct attn_attend_args *args)
{
    const struct gpu_device *device = &args->instance->device;
    const struct gpu_params *p = &a->p;
    int32_t heads = p->problem.num_kv_heads, keys = p->schedule.tile;
    if (args->k_cache == NULL) {
        return walk_rows(&a->k, device, &p->k, args->k->shape[0], heads, a->size, keys) &&
               walk_rows(&a->v, device, &p->v, args->v->shape[0], heads, a->size_v, keys);
    }
    /* Cut items start sooner with smaller boxes. */
    a->grouped = a->kernel == 0 && p->problem.head_size == 128 && p->problem.head_size_v == 128 &&
                 a->part_tiles == 0 && args->prepared->invariant < 2 &&
                 (p->k.head | p->v.head) % 128 == 0;
    return walk_pages(&a->k, device, &p->k, args->k_cache->num_blocks, p->problem.block_size, heads,
                      a->size, keys, a->grouped) &&
           walk_pages(&a->v, device, &p->v, args->k_cache->num_blocks, p->problem.block_size, heads,
                      a->size_v, keys, a->grouped);
}

/* Whether a kernel has exactly these terms; agrees with `has_capped` etc. in sm90_prefill.cuh. No
 * known model has ALiBi with heads over 128, or a soft cap in f16 or with the head sizes of MLA's
 * prefill. */
static bool has_kernel(const struct gpu_params *p, int32_t terms)
{
    int32_t size = size_of(p->problem.head_size, p->problem.head_size_v);
    return terms == 0 || (terms == PREFILL_LINEAR && size <= 128) ||
           (terms == PREFILL_CAPPED && size != 192 && p->out.dtype == ATTN_DTYPE_BF16);
}

/* The exponent applies the softmax scale or the soft cap wherever that is accurate. */
static void set_terms(struct prefill_params *a, const struct attn_prepared *prepared)
{
    const float log2e = 1.4426950408889634f;
    const struct gpu_problem *p = &a->p.problem;
    bool capped = p->soft_cap > 0, raw = p->scale >= LEAST_SCALE;
    float unit = capped ? p->soft_cap : raw ? p->scale : 1;
    a->pre_scale = capped ? p->scale / p->soft_cap : p->scale;
    a->scale_log2 = unit * log2e;
    a->bias_scale = 1 / unit;
    a->terms = (capped ? PREFILL_CAPPED
                : raw  ? 0
                       : PREFILL_MULTIPLIED) |
               (p->alibi == ATTN_ALIBI_LINEAR ? PREFILL_LINEAR : 0) |
               (p->alibi == ATTN_ALIBI_SQRT ? PREFILL_ROOT : 0) | (p->tree ? PREFILL_TREE : 0) |
               (p->spans ? PREFILL_SPANS : 0);
    /* Exact kernels have no terms; others have a reference that depends on an item's inner tiles */
    bool exact = prepared->invariant >= 2 && a->terms != 0;
    a->kernel = has_kernel(&a->p, a->terms) && !exact ? a->terms : PREFILL_ANY;
    a->terms |= (a->terms & ~(PREFILL_TREE | PREFILL_SPANS)) == 0 ? 0 : PREFILL_GENERAL;
}

/* Whether Q K^T runs in e4m3. The tensor cores accumulate such products to some 14 bits, enough for
 * bf16 but not for f16. */
static bool in_fp8(const struct gpu_params *p)
{
    const struct gpu_problem *problem = &p->problem;
    return p->q.dtype == ATTN_DTYPE_FP8_E4M3 && p->out.dtype == ATTN_DTYPE_BF16 &&
           p->k.dtype == ATTN_DTYPE_FP8_E4M3 && p->k.form == GPU_ROW_NUMBERS &&
           size_of(problem->head_size, problem->head_size_v) > 64 && !(problem->soft_cap > 0) &&
           problem->alibi == ATTN_ALIBI_NONE && problem->tree == NULL && problem->spans == NULL &&
           problem->scale >= LEAST_SCALE;
}

/* Maps the copied keys and values of a launch's heads. */
static bool map_copies(struct prefill_params *a, const struct attn_attend_args *args)
{
    const struct gpu_device *device = &args->instance->device;
    int32_t heads = a->end_head - a->first_head, keys = a->p.schedule.tile;
    struct gpu_cache *const views[2] = {&a->p.k, &a->p.v};
    struct prefill_walk *const walks[2] = {&a->k, &a->v};
    bool mapped = true;
    a->p.problem.paged = 0;
    for (int32_t i = 0; i < 2; i++) {
        int32_t size = i == 1 ? a->size_v : a->scales == PREFILL_IN_FP8 ? a->size / 2 : a->size;
        *views[i] = (struct gpu_cache){
            .data = a->copied[i],
            .block = 2 * (int64_t)size,
            .head = a->copied_rows * size * 2,
            .dtype = a->p.out.dtype,
            .head_size = size,
            .scale_host = 1,
        };
        mapped = mapped && walk_rows(walks[i], device, views[i], a->copied_rows, heads, size, keys);
    }
    return mapped;
}

/* Copies and attends some heads at a time. */
static const char *attend_copies(struct prefill_params *a, const struct attn_attend_args *args)
{
    const struct schedule_host *plan = args->schedule_host;
    const struct gpu_device *device = &args->instance->device;
    const struct gpu_problem problem = a->p.problem;
    bool bf16 = a->p.out.dtype == ATTN_DTYPE_BF16;
    int32_t heads = (int32_t)heads_at_once(args), all = problem.num_kv_heads;
    int64_t bytes;
    const char *cause = heads > 0 ? NULL : "no room for copies";
    a->narrow[0] = a->p.k;
    a->narrow[1] = a->p.v;
    a->copied_rows = plan->copied_rows;
    a->copied[0] = place_of_copies(args, &bytes);
    a->copied[1] = a->copied[0] + heads * a->copied_rows * a->size * 2;
    a->key_scale = (float *)(a->copied[1] + heads * a->copied_rows * a->size_v * 2);
    for (int32_t first = 0; first < all && cause == NULL; first += heads) {
        a->first_head = first;
        a->end_head = first + heads < all ? first + heads : all;
        a->p.problem = problem;
        cause = prefill_launch(device, PREFILL_WIDEN, a, args->stream);
        if (cause == NULL) {
            cause = map_copies(a, args)
                        ? prefill_launch(device, bf16 ? PREFILL_COPIES_BF16 : PREFILL_COPIES_F16, a,
                                         args->stream)
                        : "no tensor map of copies";
        }
    }
    return cause;
}

/* Chooses the kernel over copies and the form of its key scales. */
static void choose_scales(struct prefill_params *a, const struct gpu_params *p)
{
    bool own = a->kernel == 0 || a->kernel == PREFILL_CAPPED;
    bool by_key = !own || p->k.form == GPU_ROW_SCALED || p->k.form == GPU_ROW_INT4;
    a->kernel = a->kernel != 0 && by_key ? PREFILL_ANY : a->kernel;
    a->scales = in_fp8(p) && !by_key ? PREFILL_IN_FP8 : by_key ? PREFILL_BY_KEY : PREFILL_BY_HEAD;
}

/* Agrees with `codes` in sm90_shape.cuh: some kernels lack the registers. */
static bool writes_codes(const struct attn_attend_args *args, const struct gpu_params *p)
{
    struct prefill_params a = {.p = *p};
    bool copies = args->prepared->copy_bytes > 0 && args->k_cache != NULL;
    const struct schedule_host *plan = args->schedule_host;
    int32_t size = size_of(p->problem.head_size, p->problem.head_size_v);
    if (plan->part_tiles > 0 || size > 256) { /* the merge writes the output; no staging memory */
        return false;
    }
    set_terms(&a, args->prepared);
    if (copies) {
        choose_scales(&a, p);
    }
    bool halves = (!copies && size == 192) || a.scales == PREFILL_BY_KEY; /* out_dims is 64 there */
    if (halves && gpu_output_group(args->layer->output_form) > 64) {
        return false;
    }
    if (size <= (copies ? 128 : 192)) {
        return a.kernel != PREFILL_ANY || !copies;
    }
    return a.kernel == 0 && a.scales != PREFILL_BY_KEY;
}

/* Merges cut items. */
static const char *merge_items(const struct prefill_params *a, const struct attn_attend_args *args)
{
    return a->part_tiles > 0
               ? prefill_launch(&args->instance->device, PREFILL_MERGE, a, args->stream)
               : NULL;
}

static bool attend_prefill(const struct attn_attend_args *args, const struct gpu_params *p,
                           char *memory, bool shared, const char **cause)
{
    const struct schedule_host *plan = args->schedule_host;
    struct prefill_params a = {
        .p = *p, .ctas = shared ? plan->prefill_sms : 0, .output = gpu_output_of(args)};
    bool same = p->k.dtype == p->q.dtype && p->v.dtype == p->q.dtype && p->out.dtype == p->q.dtype;
    bool bf16 = p->q.dtype == ATTN_DTYPE_BF16;
    if (args->prepared->copy_bytes > 0 && args->k_cache != NULL) {
        set_items(&a, args, memory);
        set_terms(&a, args->prepared);
        choose_scales(&a, p);
        if ((p->q.dtype != p->out.dtype && a.scales != PREFILL_IN_FP8) ||
            gpu_tensor_bits(&p->q) % 16 != 0) {
            return false;
        }
        map_output(&a, args);
        if (!map_queries(&a, args)) {
            return false;
        }
        *cause = attend_copies(&a, args);
        *cause = *cause == NULL ? merge_items(&a, args) : *cause;
        return true;
    }
    if (!same || !has_kernels_of(p->q.dtype) || p->k.form != GPU_ROW_NUMBERS || p->k.pack != 0 ||
        p->v.pack != 0 || p->k.scale_host != 1 || p->v.scale_host != 1 ||
        (gpu_cache_bits(&p->k) | gpu_cache_bits(&p->v) | gpu_tensor_bits(&p->q)) % 16 != 0) {
        return false;
    }
    set_items(&a, args, memory);
    set_terms(&a, args->prepared);
    map_output(&a, args);
    if ((a.size == WIDE_SIZE && !a.wide_rows) || !map_queries(&a, args) || !map_tensors(&a, args)) {
        return false;
    }
    const bool exact = args->prepared->invariant >= 2 && a.kernel == 0;
    *cause = prefill_launch(&args->instance->device,
                            exact && bf16                               ? PREFILL_EXACT_BF16
                            : exact                                     ? PREFILL_EXACT_F16
                            : plan->prefill_rows == PREFILL_HEAD64_ROWS ? PREFILL_HEAD64
                            : bf16                                      ? PREFILL_BF16
                                                                        : PREFILL_F16,
                            &a, args->stream);
    *cause = *cause == NULL ? merge_items(&a, args) : *cause;
    return true;
}

const struct gpu_prefill sm90_prefill = {
    .few_rows = 16, /* two items of decode would read each key twice */
    .load = load,
    .copy_bytes = copy_bytes,
    .serves = serves,
    .fits = fits,
    .pays = pays,
    .share = share_of,
    .cut = cut_of,
    .bytes = bytes_of,
    .plan = plan_prefill,
    .takes_query = in_fp8,
    .writes_codes = writes_codes,
    .attend = attend_prefill,
};
