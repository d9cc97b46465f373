/* SPDX-License-Identifier: Apache-2.0 */
/* Rows are moved by runs of layers that this file describes to the core: a writer has the target's
 * cache and runs without attending, on rows that lie in the source's cache or were read from it. */
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "caches.h"

#define MAX_ROWS 65536       /* written by a run */
#define MAX_READ_TOKENS 1024 /* read at once from a quantized source */
#define VECTOR 16            /* bytes at whose multiples every backend copies rows unchanged */
#define MAX_TAKEN 8
#define REFUSE(status, ...) layout_refuse(c->error, ATTN_ERROR_##status, __VA_ARGS__)
#define TRY(call)                                                                                  \
    do {                                                                                           \
        attn_status tried = (call);                                                                \
        if (tried != ATTN_OK) {                                                                    \
            return tried;                                                                          \
        }                                                                                          \
    } while (0)

/* A layer's K and V, [0] and [1] throughout. */
struct side {
    const struct attn_layout_side *given;
    struct caches caches;
    struct scale {
        int32_t form;
        const float *data;
        float host;
    } scales[2];
};

/* A layer of a model of its own, with a plan. */
struct worker {
    attn_model *model;
    attn_layer *layer;
    attn_plan *plan;
};

struct conversion {
    const struct attn_api *api;
    attn_runtime *runtime;
    attn_open_device *device;
    void *stream;
    int64_t num_tokens;
    struct side source, target;
    struct worker writer, readers[2];
    int32_t dtype; /* the written rows' */
    int64_t *slots, *device_slots;
    int32_t *numbers, *device_numbers; /* the writer's batch, then the readers' */
    void *zeros, *rows[2];
    void *taken[MAX_TAKEN]; /* all memory on the device */
    int32_t num_taken;
    struct attn_error *error;
};

/* query_start_loc, whose end is seq_lens, and block_table of a step of one token. */
static const int32_t writer_batch[] = {0, 1, 0};
#define WRITER_NUMBERS (int32_t)(sizeof writer_batch / sizeof *writer_batch)

static bool is_plain(int32_t kv_dtype)
{
    return kv_dtype >= ATTN_KV_F16 && kv_dtype <= ATTN_KV_F32;
}

static bool is_packed(const struct attn_kv_view *view)
{
    return view->pack > 0 && view->pack < view->head_size;
}

static int64_t bytes_of(int32_t dtype)
{
    return dtype == ATTN_DTYPE_F32 ? 4 : 2;
}

static int64_t min_of(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

static attn_status read_side(const struct conversion *c, const struct attn_layout_side *given,
                             struct side *side)
{
    static const struct attn_layer_params none;
    TRY(caches_read(c->api, given, &side->caches, c->error));
    const struct attn_layer_params *params = given->params != NULL ? given->params : &none;
    side->given = given;
    const struct attn_cache_spec *specs = side->caches.specs;
    if (side->caches.count != 2 || specs[0].role != ATTN_CACHE_K || specs[1].role != ATTN_CACHE_V) {
        return REFUSE(UNSUPPORTED, "caches",
                      "%s has %d caches, the first of role %d; layers of one K and one V "
                      "alone are converted",
                      given->desc->name, side->caches.count,
                      side->caches.count > 0 ? specs[0].role : 0);
    }
    if (!is_plain(specs[0].kv_dtype)) {
        side->scales[0] =
            (struct scale){given->desc->k_scale_form, params->k_scale, params->k_scale_host};
    }
    if (!is_plain(specs[1].kv_dtype)) {
        side->scales[1] =
            (struct scale){given->desc->v_scale_form, params->v_scale, params->v_scale_host};
    }
    return ATTN_OK;
}

static attn_status check_layers(const struct conversion *c)
{
    const struct caches *source = &c->source.caches, *target = &c->target.caches;
    const struct attn_kv_view *k = &source->views[0], *v = &source->views[1];
    const int32_t kv_dtype = source->specs[0].kv_dtype;
    const struct {
        const char *field;
        int32_t have, want;
    } same[] = {{"num_kv_heads", target->views[0].num_heads, k->num_heads},
                {"num_kv_heads", target->views[1].num_heads, v->num_heads},
                {"head_size", target->views[0].head_size, k->head_size},
                {"head_size_v", target->views[1].head_size, v->head_size},
                {"rope", c->target.given->desc->rope, c->source.given->desc->rope},
                {"device.type", target->views[0].device.type, k->device.type},
                {"device.id", target->views[0].device.id, k->device.id}};
    for (size_t i = 0; i < sizeof same / sizeof *same; i++) {
        if (same[i].have != same[i].want) {
            return REFUSE(INVALID_ARGUMENT, same[i].field,
                          "%d of the target, %d of the source; they have to be equal", same[i].have,
                          same[i].want);
        }
    }
    if (kv_dtype != source->specs[1].kv_dtype || kv_dtype > ATTN_KV_INT8_PER_TOKEN_HEAD) {
        return REFUSE(UNSUPPORTED, "kv_dtype",
                      "%d of the source's K and %d of its V; supported: one for both, 1 to "
                      "8 (plain numbers, fp8, 8 bits per token and head)",
                      kv_dtype, source->specs[1].kv_dtype);
    }
    if (is_packed(k) || is_packed(v) || k->block_size != v->block_size) {
        return REFUSE(UNSUPPORTED, "pack",
                      "%d and %d in blocks of %d and %d of the source; supported: rows in "
                      "one piece, blocks of one size",
                      k->pack, v->pack, k->block_size, v->block_size);
    }
    return ATTN_OK;
}

static attn_status check_blocks(const struct conversion *c, const struct side *side,
                                const char *field)
{
    const struct attn_layout_side *given = side->given;
    const struct attn_kv_view *view = &side->caches.views[0];
    const int64_t size = side->caches.specs[0].block_size;
    const int64_t needed = c->num_tokens / size + (c->num_tokens % size != 0);
    const int64_t number = view->num_blocks * view->block_size / size;
    if (c->num_tokens < 0 || given->num_blocks < needed || (needed > 0 && given->blocks == NULL)) {
        return REFUSE(INVALID_ARGUMENT, field,
                      "%lld blocks of %lld at %p; %lld tokens are asked for",
                      (long long)given->num_blocks, (long long)size, (const void *)given->blocks,
                      (long long)c->num_tokens);
    }
    bool *seen = calloc((size_t)number + 1, sizeof *seen);
    attn_status status =
        seen != NULL ? ATTN_OK
                     : REFUSE(OUT_OF_MEMORY, field, "no place for %lld blocks", (long long)number);
    for (int64_t i = 0; i < needed && status == ATTN_OK; i++) {
        const int32_t block = given->blocks[i];
        if (block < 0 || block >= number) {
            status =
                REFUSE(INVALID_ARGUMENT, field, "entry %lld is %d; the cache has blocks 0 to %lld",
                       (long long)i, block, (long long)number - 1);
        } else if (seen[block]) {
            status = REFUSE(INVALID_ARGUMENT, field, "entry %lld, block %d, stands there twice",
                            (long long)i, block);
        } else {
            seen[block] = true;
        }
    }
    free(seen);
    return status;
}

static int64_t slot_of(const struct side *side, int64_t token)
{
    const int64_t size = side->caches.specs[0].block_size;
    return side->given->blocks[token / size] * size + token % size;
}

static bool is_same_scale(const struct scale *a, const struct scale *b)
{
    return a->data == b->data && (a->host == 0 ? 1 : a->host) == (b->host == 0 ? 1 : b->host);
}

/* Whether both caches are fp8 and hold the same bytes for the same number. */
static bool is_same_fp8(const struct side *a, const struct side *b)
{
    const int32_t kv_dtype = a->caches.specs[0].kv_dtype;
    return kv_dtype >= ATTN_KV_FP8_E4M3 && kv_dtype <= ATTN_KV_FP8_E4M3FNUZ &&
           b->caches.specs[0].kv_dtype == kv_dtype && b->caches.specs[1].kv_dtype == kv_dtype &&
           is_same_scale(&a->scales[0], &b->scales[0]) &&
           is_same_scale(&a->scales[1], &b->scales[1]);
}

/* Describes bytes of fp8 as half as many elements of a dtype whose rows every backend copies. */
static attn_status pair_bytes(const struct conversion *c, struct side *side)
{
    for (int32_t i = 0; i < 2; i++) {
        struct attn_kv_view *view = &side->caches.views[i];
        const uint64_t all = (uint64_t)(uintptr_t)view->data | (uint64_t)view->stride_block |
                             (uint64_t)view->stride_slot | (uint64_t)view->stride_head |
                             (uint64_t)view->head_size;
        if (all % VECTOR != 0 || is_packed(view)) {
            return REFUSE(UNSUPPORTED, "strides",
                          "%lld, %lld and %lld bytes of an fp8 cache at %p; supported: "
                          "multiples of %d, and rows in one piece",
                          (long long)view->stride_block, (long long)view->stride_slot,
                          (long long)view->stride_head, view->data, VECTOR);
        }
        view->head_size /= 2;
        view->pack = 0;
        side->caches.specs[i].kv_dtype = ATTN_KV_BF16;
        side->scales[i] = (struct scale){0};
    }
    return ATTN_OK;
}

/* Memory on the device, until the conversion ends. */
static attn_status take(struct conversion *c, int64_t bytes, void **memory)
{
    TRY(c->api->device->allocate(c->device, ATTN_MEMORY_DEVICE, (size_t)bytes, memory, c->error));
    c->taken[c->num_taken++] = *memory;
    return ATTN_OK;
}

/* After the runs so far; the source may change on return. */
static attn_status send(const struct conversion *c, void *to, const void *from, int64_t bytes)
{
    const struct attn_copy_args copy = {.struct_size = sizeof copy,
                                        .stream = c->stream,
                                        .destination = to,
                                        .source = from,
                                        .bytes = (size_t)bytes,
                                        .kind = ATTN_COPY_HOST_TO_DEVICE};
    TRY(c->api->device->copy(c->device, &copy, c->error));
    return c->api->device->synchronize(c->device, c->stream, c->error);
}

/* Slots and batches, in the host's memory and the device's; no slot is set. */
static attn_status take_lists(struct conversion *c, int64_t num_slots, int64_t num_numbers)
{
    void *slots = NULL, *numbers = NULL;
    c->slots = malloc((size_t)num_slots * sizeof *c->slots);
    c->numbers = malloc((size_t)num_numbers * sizeof *c->numbers);
    if (c->slots == NULL || c->numbers == NULL) {
        return REFUSE(OUT_OF_MEMORY, "num_tokens", "no place for %lld slots", (long long)num_slots);
    }
    memset(c->slots, 0xff, (size_t)num_slots * sizeof *c->slots);
    memcpy(c->numbers, writer_batch, sizeof writer_batch);
    TRY(take(c, num_slots * (int64_t)sizeof *c->slots, &slots));
    TRY(take(c, num_numbers * (int64_t)sizeof *c->numbers, &numbers));
    c->device_slots = slots;
    c->device_numbers = numbers;
    return send(c, numbers, writer_batch, sizeof writer_batch);
}

static uint64_t form_of(const struct attn_kv_view *k, const struct attn_kv_view *v)
{
    const bool apart = k->stride_block != v->stride_block || k->stride_slot != v->stride_slot ||
                       k->stride_head != v->stride_head;
    return (k->stride_slot >= k->stride_head ? ATTN_VIEW_NHD : ATTN_VIEW_HND) |
           (is_packed(k) || is_packed(v) ? ATTN_VIEW_PACKED : 0) |
           (apart ? ATTN_VIEW_SEPARATE_STRIDES : 0);
}

/* Binds the parameters that reading or writing a side's rows needs. */
static attn_status bind_params(const struct conversion *c, attn_layer *layer,
                               const struct attn_layer_params *given, const struct scale *k,
                               const struct scale *v)
{
    struct attn_kv_quant_params quant;
    struct attn_layer_params params = {.struct_size = sizeof params,
                                       .k_scale = k->data,
                                       .v_scale = v->data,
                                       .k_scale_host = k->host,
                                       .v_scale_host = v->host,
                                       .device = given->device};
    for (const struct attn_ext *ext = given->next; ext != NULL; ext = ext->next) {
        if (ext->id == ATTN_EXT_KV_QUANT_PARAMS && ext->struct_size >= sizeof quant) {
            memcpy(&quant, ext, sizeof quant);
            quant.ext.next = NULL;
            params.next = &quant.ext;
        }
    }
    return c->api->layer_bind_params(layer, &params, c->error);
}

/* A layer that has part `part` of a side as its K, and the other one as its V. */
static attn_status open_worker(struct conversion *c, struct worker *w, const struct side *side,
                               int32_t part, int32_t max_tokens)
{
    const struct attn_kv_view *k = &side->caches.views[part], *v = &side->caches.views[1 - part];
    const int32_t kv_dtypes[] = {side->caches.specs[part].kv_dtype,
                                 side->caches.specs[1 - part].kv_dtype};
    const struct attn_layer_desc desc = {.struct_size = sizeof desc,
                                         .name = "layout_convert",
                                         .kind = ATTN_LAYER_DECODER,
                                         .dtype = c->dtype,
                                         .kv_dtype = kv_dtypes[0],
                                         .kv_dtype_v =
                                             kv_dtypes[1] != kv_dtypes[0] ? kv_dtypes[1] : 0,
                                         .num_q_heads = k->num_heads,
                                         .num_kv_heads = k->num_heads,
                                         .head_size = k->head_size,
                                         .head_size_v = v->head_size,
                                         .scale = 1,
                                         .has_window = side == &c->source, /* a token's own key */
                                         .block_size = k->block_size,
                                         .k_scale_form = side->scales[part].form,
                                         .v_scale_form = side->scales[1 - part].form,
                                         .needed_view_forms = form_of(k, v)};
    const struct attn_select_options options = {.struct_size = sizeof options, .device = k->device};
    const struct attn_limits limits = {.struct_size = sizeof limits,
                                       .max_num_reqs = 1,
                                       .max_num_tokens = max_tokens,
                                       .max_seq_len = max_tokens};
    const struct attn_plan_options plan = {.struct_size = sizeof plan, .limits = &limits};
    const struct attn_kv_view *views[] = {k, v};
    const struct attn_layer_desc *layers[] = {&desc};
    struct attn_workspace workspace = {.struct_size = sizeof workspace};
    attn_assignment *assignment = NULL;
    TRY(c->api->select(c->runtime, &options, layers, 1, &assignment, c->error));
    attn_status status = c->api->model_create(c->runtime, assignment, NULL, &w->model, c->error);
    c->api->assignment_destroy(assignment);
    TRY(status);
    w->layer = c->api->model_layer(w->model, 0);
    TRY(c->api->layer_bind_caches(w->layer, views, 2, c->error));
    if (side->given->params != NULL) {
        TRY(bind_params(c, w->layer, side->given->params, &side->scales[part],
                        &side->scales[1 - part]));
    }
    TRY(c->api->plan_create(w->model, 0, &plan, &w->plan, c->error));
    TRY(c->api->plan_workspace(w->plan, &workspace, c->error));
    TRY(take(c, (int64_t)workspace.bytes, &workspace.memory));
    return c->api->plan_bind_workspace(w->plan, &workspace, c->error);
}

/* [tokens, heads, head_size] of the rows' dtype, by bytes from token to token and head to head. */
struct rows {
    struct attn_tensor tensor;
    int64_t shape[3], strides[3];
};

static void rows_init(struct rows *rows, const struct conversion *c, int32_t part, void *data,
                      int64_t num_tokens, int64_t token, int64_t head)
{
    const struct attn_kv_view *view = &c->source.caches.views[part];
    const int64_t bytes = bytes_of(c->dtype);
    *rows = (struct rows){.shape = {num_tokens, view->num_heads, view->head_size},
                          .strides = {token / bytes, head / bytes, 1}};
    rows->tensor = (struct attn_tensor){
        .data = data,
        .device = view->device,
        .ndim = 3,
        .dtype = {c->dtype == ATTN_DTYPE_BF16 ? ATTN_CODE_BFLOAT : ATTN_CODE_FLOAT,
                  (uint8_t)(8 * bytes), 1},
        .shape = rows->shape,
        .strides = rows->strides};
}

/* A step of one request, whose numbers lie on the device: 0, tokens, blocks. */
static attn_status run(const struct conversion *c, const struct worker *w, const int32_t *numbers,
                       int32_t num_tokens, const int64_t *slots, int64_t num_slots,
                       const struct attn_step_io *io)
{
    const int32_t starts[] = {0, num_tokens}, size = c->source.caches.views[0].block_size;
    const struct attn_batch batch = {.struct_size = sizeof batch,
                                     .num_reqs = 1,
                                     .num_tokens = num_tokens,
                                     .num_actual_tokens = num_tokens,
                                     .max_query_len = num_tokens,
                                     .max_seq_len = num_tokens,
                                     .query_start_loc = numbers,
                                     .query_start_loc_host = starts,
                                     .seq_lens = numbers + 1,
                                     .seq_lens_host = &num_tokens,
                                     .block_table = numbers + 2,
                                     .block_table_stride = (num_tokens - 1) / size + 1,
                                     .slot_mapping = slots,
                                     .num_slots = num_slots};
    TRY(c->api->plan_batch(w->plan, &batch, c->stream, c->error));
    return c->api->run(w->plan, w->layer, io, c->error);
}

/* Writes rows into the slots that device_slots has for them, from `first` on. */
static attn_status write_rows(const struct conversion *c, const struct rows rows[2], int64_t first)
{
    const struct attn_step_io io = {.struct_size = sizeof io,
                                    .stream = c->stream,
                                    .flags = ATTN_RUN_NO_ATTEND,
                                    .k = &rows[0].tensor,
                                    .v = &rows[1].tensor};
    return run(c, &c->writer, c->device_numbers, 1, c->device_slots + first, rows[0].shape[0], &io);
}

/* A source of plain numbers is read in place: a run takes row s of consecutive blocks, which are as
 * far apart as blocks are. Rows that are not the request's have slot -1. */
static attn_status convert_in_place(struct conversion *c)
{
    const struct attn_kv_view *views = c->source.caches.views;
    int64_t size = views[0].block_size, first = INT64_MAX, last = 0;
    int64_t steps[] = {views[0].stride_block, views[1].stride_block};
    if (steps[0] == size * views[0].stride_slot && steps[1] == size * views[1].stride_slot) {
        size = 1; /* all rows are equally far apart */
        steps[0] = views[0].stride_slot;
        steps[1] = views[1].stride_slot;
    }
    for (int64_t i = 0; i < c->num_tokens; i++) {
        const int64_t block = slot_of(&c->source, i) / size;
        first = min_of(first, block);
        last = block > last ? block : last;
    }
    const int64_t count = last - first + 1;
    TRY(take_lists(c, count * size, WRITER_NUMBERS));
    for (int64_t i = 0; i < c->num_tokens; i++) {
        const int64_t slot = slot_of(&c->source, i);
        c->slots[slot % size * count + slot / size - first] = slot_of(&c->target, i);
    }
    TRY(send(c, c->device_slots, c->slots, count * size * (int64_t)sizeof *c->slots));
    for (int64_t s = 0; s < size; s++) {
        for (int64_t b = 0; b < count; b += MAX_ROWS) {
            struct rows rows[2];
            for (int32_t i = 0; i < 2; i++) {
                rows_init(&rows[i], c, i,
                          (char *)views[i].data + (first + b) * steps[i] + s * views[i].stride_slot,
                          min_of(count - b, MAX_ROWS), steps[i], views[i].stride_head);
            }
            TRY(write_rows(c, rows, s * count + b));
        }
    }
    return ATTN_OK;
}

/* Reads V's rows of a reader, by tokens that attend to their own key alone: those are the output.
 */
static attn_status read_rows(const struct conversion *c, int32_t part, int32_t num_tokens,
                             struct rows *rows)
{
    const struct attn_kv_view *views = c->source.caches.views;
    const int64_t head = views[part].head_size * bytes_of(c->dtype);
    const int64_t q_head = views[1 - part].head_size * bytes_of(c->dtype);
    struct rows q;
    rows_init(rows, c, part, c->rows[part], num_tokens, views[part].num_heads * head, head);
    rows_init(&q, c, 1 - part, c->zeros, num_tokens, views[part].num_heads * q_head, q_head);
    const struct attn_step_io io = {.struct_size = sizeof io,
                                    .stream = c->stream,
                                    .flags = ATTN_RUN_NO_WRITE,
                                    .q = &q.tensor,
                                    .out = &rows->tensor};
    return run(c, &c->readers[part], c->device_numbers + WRITER_NUMBERS, num_tokens, NULL, 0, &io);
}

static attn_status open_readers(struct conversion *c, int32_t max_tokens)
{
    const struct attn_kv_view *views = c->source.caches.views;
    int64_t bytes[2];
    for (int32_t i = 0; i < 2; i++) {
        bytes[i] =
            (int64_t)max_tokens * views[i].num_heads * views[i].head_size * bytes_of(c->dtype);
        TRY(take(c, bytes[i], &c->rows[i]));
        TRY(open_worker(c, &c->readers[i], &c->source, 1 - i, max_tokens));
    }
    struct attn_fill_args fill = {.struct_size = sizeof fill,
                                  .stream = c->stream,
                                  .row_bytes = (size_t)(bytes[0] + bytes[1]),
                                  .stride = (size_t)(bytes[0] + bytes[1]),
                                  .rows = 1};
    TRY(take(c, bytes[0] + bytes[1], &c->zeros));
    fill.destination = c->zeros;
    return c->api->device->fill(c->device, &fill, c->error);
}

/* A quantized source is read in chunks of its tokens. */
static attn_status convert_by_reading(struct conversion *c)
{
    const int32_t size = c->source.caches.specs[0].block_size;
    const int32_t rows_of_block = c->source.caches.views[0].block_size; /* a kernel's */
    const int32_t most = size < MAX_READ_TOKENS ? MAX_READ_TOKENS / size * size : size;
    TRY(take_lists(c, c->num_tokens, WRITER_NUMBERS + 2 + most));
    for (int64_t i = 0; i < c->num_tokens; i++) {
        c->slots[i] = slot_of(&c->target, i);
    }
    TRY(send(c, c->device_slots, c->slots, c->num_tokens * (int64_t)sizeof *c->slots));
    TRY(open_readers(c, most));
    for (int64_t first = 0; first < c->num_tokens; first += most) {
        const int32_t count = (int32_t)min_of(c->num_tokens - first, most);
        struct rows rows[2];
        int32_t *numbers = c->numbers + WRITER_NUMBERS, num_blocks = 0;
        numbers[0] = 0;
        numbers[1] = count;
        for (int32_t i = 0; i < count; i += rows_of_block) {
            numbers[2 + num_blocks++] = (int32_t)(slot_of(&c->source, first + i) / rows_of_block);
        }
        TRY(send(c, c->device_numbers + WRITER_NUMBERS, numbers,
                 (2 + num_blocks) * (int64_t)sizeof *numbers));
        TRY(read_rows(c, 0, count, &rows[0]));
        TRY(read_rows(c, 1, count, &rows[1]));
        TRY(write_rows(c, rows, first));
    }
    return ATTN_OK;
}

static attn_status convert(struct conversion *c)
{
    const int32_t *from = &c->source.caches.specs[0].kv_dtype;
    const int32_t to = c->target.caches.specs[0].kv_dtype;
    if (is_same_fp8(&c->source, &c->target)) {
        TRY(pair_bytes(c, &c->source));
        TRY(pair_bytes(c, &c->target));
    }
    c->dtype = is_plain(*from) ? *from : is_plain(to) ? to : c->target.given->desc->dtype;
    TRY(open_worker(c, &c->writer, &c->target, 0, 1));
    return is_plain(*from) ? convert_in_place(c) : convert_by_reading(c);
}

static void close_worker(const struct conversion *c, const struct worker *w)
{
    c->api->plan_destroy(w->plan);
    c->api->model_destroy(w->model);
}

attn_status attn_layout_convert(const struct attn_api *api, attn_runtime *runtime,
                                const struct attn_layout_side *source,
                                const struct attn_layout_side *target, int64_t num_tokens,
                                struct attn_error *error)
{
    struct conversion c = {
        .api = api, .runtime = runtime, .num_tokens = num_tokens, .error = error};
    TRY(read_side(&c, source, &c.source));
    TRY(read_side(&c, target, &c.target));
    TRY(check_layers(&c));
    TRY(check_blocks(&c, &c.source, "source_blocks"));
    TRY(check_blocks(&c, &c.target, "target_blocks"));
    if (num_tokens == 0) {
        return ATTN_OK;
    }
    TRY(api->device->open(runtime, c.source.caches.views[0].device, &c.device, error));
    attn_status status = api->device->create_stream(c.device, &c.stream, error);
    status = status == ATTN_OK ? convert(&c) : status;
    const attn_status done =
        api->device->synchronize(c.device, NULL, status == ATTN_OK ? error : NULL);
    close_worker(&c, &c.readers[0]);
    close_worker(&c, &c.readers[1]);
    close_worker(&c, &c.writer);
    for (int32_t i = 0; i < c.num_taken; i++) {
        api->device->free(c.device, ATTN_MEMORY_DEVICE, c.taken[i]);
    }
    api->device->destroy_stream(c.device, c.stream);
    api->device->close(c.device);
    free(c.slots);
    free(c.numbers);
    return status == ATTN_OK ? done : status;
}
