/* SPDX-License-Identifier: Apache-2.0 */
#include "common/layout_convert.h"

#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/device.h"

#define MAX_SLOTS 65536      /* written by the runs between two copies to the device */
#define MAX_READ_TOKENS 1024 /* read at once from a quantized source */
#define VECTOR 16            /* bytes at whose multiples every backend copies rows unchanged */
#define TRY(call)                                                                                  \
    do {                                                                                           \
        attn_status tried = (call);                                                                \
        if (tried != ATTN_OK) {                                                                    \
            return tried;                                                                          \
        }                                                                                          \
    } while (0)

/* A layer of a model of its own, with a plan. */
struct worker {
    attn_model *model;
    attn_layer *layer;
    attn_plan *plan;
    void *workspace;
};

struct conversion {
    const struct attn_api *api;
    attn_runtime *runtime;
    const struct layout_tokens *tokens;
    const struct layout_side *sides[2]; /* source, target */
    struct attn_kv_view views[2][2];    /* K's and V's; raw bytes as elements of 16 bits */
    struct device device;
    void *stream;
    struct worker writer, readers[2];
    int32_t dtype; /* the written rows' */
    int64_t *to;   /* host: the target's slot of each of the source's, or -1 */
    int64_t *slots, *device_slots;
    int32_t *numbers; /* device: of the writer's batch */
    int32_t *table;   /* device: of a reader's */
    void *zeros, *rows[2];
    struct attn_error *error;
};

static attn_status refuse(struct attn_error *error, attn_status status, const char *field,
                          const char *format, ...)
{
    if (error != NULL) {
        va_list values;
        error->status = status;
        snprintf(error->field, sizeof error->field, "%s", field);
        va_start(values, format);
        vsnprintf(error->message, sizeof error->message, format, values);
        va_end(values);
    }
    return status;
}

static bool is_plain(int32_t kv_dtype)
{
    return kv_dtype >= ATTN_KV_F16 && kv_dtype <= ATTN_KV_F32;
}

static bool is_fp8(int32_t kv_dtype)
{
    return kv_dtype >= ATTN_KV_FP8_E4M3 && kv_dtype <= ATTN_KV_FP8_E4M3FNUZ;
}

static int64_t bytes_of(int32_t dtype)
{
    return dtype == ATTN_DTYPE_F32 ? 4 : 2;
}

static attn_status check_layers(const struct layout_side *source, const struct layout_side *target,
                                struct attn_error *error)
{
    const struct layout_side *sides[] = {source, target};
    for (int32_t i = 0; i < 2; i++) {
        const struct attn_cache_spec *specs = sides[i]->specs;
        if (sides[i]->num_caches != 2 || specs[0].role != ATTN_CACHE_K ||
            specs[1].role != ATTN_CACHE_V) {
            return refuse(error, ATTN_ERROR_UNSUPPORTED, "caches",
                          "%s has %d caches, the first of role %d; layers of one K and one V alone "
                          "are converted",
                          sides[i]->layer->name, sides[i]->num_caches,
                          sides[i]->num_caches > 0 ? specs[0].role : 0);
        }
    }
    for (int32_t i = 0; i < 2; i++) {
        const struct {
            const char *field;
            int32_t have, want;
        } same[] = {{"num_kv_heads", target->views[i].num_heads, source->views[i].num_heads},
                    {i == 0 ? "head_size" : "head_size_v", target->views[i].head_size,
                     source->views[i].head_size},
                    {"rope", target->layer->rope, source->layer->rope}};
        for (size_t f = 0; f < sizeof same / sizeof *same; f++) {
            if (same[f].have != same[f].want) {
                return refuse(error, ATTN_ERROR_INVALID_ARGUMENT, same[f].field,
                              "%d of the target, %d of the source; they have to be equal",
                              same[f].have, same[f].want);
            }
        }
    }
    const struct attn_kv_view *k = &source->views[0], *v = &source->views[1];
    const int32_t kv_dtype = source->specs[0].kv_dtype;
    if (kv_dtype != source->specs[1].kv_dtype || kv_dtype > ATTN_KV_INT8_PER_TOKEN_HEAD) {
        return refuse(
            error, ATTN_ERROR_UNSUPPORTED, "kv_dtype",
            "%d of the source's K and %d of its V; supported: one for both, 1 to 8 (plain "
            "numbers, fp8, 8 bits per token and head)",
            kv_dtype, source->specs[1].kv_dtype);
    }
    if ((k->pack > 0 && k->pack < k->head_size) || (v->pack > 0 && v->pack < v->head_size) ||
        k->block_size != v->block_size) {
        return refuse(
            error, ATTN_ERROR_UNSUPPORTED, "pack",
            "%d and %d in blocks of %d and %d of the source; supported: rows in one piece, "
            "blocks of one size",
            k->pack, v->pack, k->block_size, v->block_size);
    }
    return ATTN_OK;
}

/* The target's slot of each of the source's, by both tables. */
static attn_status map_slots(struct conversion *c)
{
    const struct layout_tokens *t = c->tokens;
    const struct attn_kv_view *view[] = {&c->sides[0]->views[0], &c->sides[1]->views[0]};
    const int32_t *blocks[] = {t->source_blocks, t->target_blocks};
    static const char *const fields[] = {"source_blocks", "target_blocks"};
    const int64_t total = view[0]->num_blocks * view[0]->block_size;
    c->to = malloc((size_t)(total + 1) * sizeof *c->to);
    if (c->to == NULL) {
        return refuse(c->error, ATTN_ERROR_OUT_OF_MEMORY, "memory", "no place for %lld slots",
                      (long long)total);
    }
    memset(c->to, 0xff, (size_t)(total + 1) * sizeof *c->to);
    for (int64_t i = 0; i < t->num_tokens; i++) {
        int64_t slots[2];
        for (int32_t side = 0; side < 2; side++) {
            const int64_t size = c->sides[side]->specs[0].block_size;
            const int32_t block = blocks[side][i / size];
            const int64_t number = view[side]->num_blocks * view[side]->block_size / size;
            if (block < 0 || block >= number) {
                return refuse(c->error, ATTN_ERROR_INVALID_ARGUMENT, fields[side],
                              "entry %lld is %d; the cache has blocks 0 to %lld",
                              (long long)(i / size), block, (long long)number - 1);
            }
            slots[side] = block * size + i % size;
        }
        if (c->to[slots[0]] >= 0) {
            return refuse(c->error, ATTN_ERROR_INVALID_ARGUMENT, fields[0],
                          "entry %lld, block %d, stands there twice",
                          (long long)(i / c->sides[0]->specs[0].block_size),
                          blocks[0][i / c->sides[0]->specs[0].block_size]);
        }
        c->to[slots[0]] = slots[1];
    }
    return ATTN_OK;
}

static float scale_of(float host)
{
    return host == 0 ? 1 : host;
}

/* Whether both caches hold the same bytes for the same number, apart from their places. */
static bool is_same_fp8(const struct layout_side *source, const struct layout_side *target)
{
    static const struct attn_layer_params none;
    const struct attn_layer_params *s = source->params != NULL ? source->params : &none;
    const struct attn_layer_params *t = target->params != NULL ? target->params : &none;
    return is_fp8(source->specs[0].kv_dtype) &&
           source->specs[0].kv_dtype == target->specs[0].kv_dtype &&
           source->specs[1].kv_dtype == target->specs[1].kv_dtype && s->k_scale == t->k_scale &&
           s->v_scale == t->v_scale && scale_of(s->k_scale_host) == scale_of(t->k_scale_host) &&
           scale_of(s->v_scale_host) == scale_of(t->v_scale_host);
}

/* Bytes of fp8 are moved two at a time, as elements of a dtype whose rows every backend copies. */
static attn_status pair_bytes(struct attn_kv_view *view, struct attn_error *error)
{
    const uint64_t all = (uint64_t)(uintptr_t)view->data | (uint64_t)view->stride_block |
                         (uint64_t)view->stride_slot | (uint64_t)view->stride_head |
                         (uint64_t)view->head_size;
    if (all % VECTOR != 0 || (view->pack > 0 && view->pack < view->head_size)) {
        return refuse(
            error, ATTN_ERROR_UNSUPPORTED, "strides",
            "%lld, %lld and %lld bytes of an fp8 cache at %p; supported: multiples of %d, "
            "and rows in one piece",
            (long long)view->stride_block, (long long)view->stride_slot,
            (long long)view->stride_head, view->data, VECTOR);
    }
    view->head_size /= 2;
    view->pack = 0;
    return ATTN_OK;
}

static uint64_t form_of(const struct attn_kv_view *k, const struct attn_kv_view *v)
{
    const bool packed =
        (k->pack > 0 && k->pack < k->head_size) || (v->pack > 0 && v->pack < v->head_size);
    const bool apart = k->stride_block != v->stride_block || k->stride_slot != v->stride_slot ||
                       k->stride_head != v->stride_head;
    return (k->stride_slot >= k->stride_head ? ATTN_VIEW_NHD : ATTN_VIEW_HND) |
           (packed ? ATTN_VIEW_PACKED : 0) | (apart ? ATTN_VIEW_SEPARATE_STRIDES : 0);
}

static attn_status open_worker(struct conversion *c, struct worker *w, struct attn_layer_desc *desc,
                               const struct attn_kv_view *k, const struct attn_kv_view *v,
                               const struct attn_layer_params *params, int32_t max_tokens)
{
    const struct attn_select_options options = {.struct_size = sizeof options,
                                                .device = c->device.device};
    const struct attn_limits limits = {.struct_size = sizeof limits,
                                       .max_num_reqs = 1,
                                       .max_num_tokens = max_tokens,
                                       .max_seq_len = max_tokens};
    const struct attn_plan_options plan = {.struct_size = sizeof plan, .limits = &limits};
    const struct attn_kv_view *views[] = {k, v};
    const struct attn_layer_desc *layers[] = {desc};
    struct attn_workspace workspace = {.struct_size = sizeof workspace};
    attn_assignment *assignment = NULL;
    desc->struct_size = sizeof *desc;
    desc->name = "layout_convert";
    desc->kind = ATTN_LAYER_DECODER;
    desc->num_q_heads = desc->num_kv_heads = k->num_heads;
    desc->head_size = k->head_size;
    desc->head_size_v = v->head_size;
    desc->scale = 1;
    desc->block_size = k->block_size;
    desc->needed_view_forms = form_of(k, v);
    TRY(c->api->select(c->runtime, &options, layers, 1, &assignment, c->error));
    attn_status status = c->api->model_create(c->runtime, assignment, NULL, &w->model, c->error);
    c->api->assignment_destroy(assignment);
    TRY(status);
    w->layer = c->api->model_layer(w->model, 0);
    TRY(c->api->layer_bind_caches(w->layer, views, 2, c->error));
    if (params != NULL) {
        TRY(c->api->layer_bind_params(w->layer, params, c->error));
    }
    TRY(c->api->plan_create(w->model, 0, &plan, &w->plan, c->error));
    TRY(c->api->plan_workspace(w->plan, &workspace, c->error));
    TRY(device_take(&c->device, false, workspace.bytes, &w->workspace, c->error));
    workspace.memory = w->workspace;
    return c->api->plan_bind_workspace(w->plan, &workspace, c->error);
}

/* The parameters of a layer that its cache reads; `quant` gets those of its extension. */
static struct attn_layer_params cache_params(const struct layout_side *side,
                                             struct attn_kv_quant_params *quant)
{
    struct attn_layer_params params = {.struct_size = sizeof params};
    if (side->params != NULL) {
        const bool plain[] = {is_plain(side->specs[0].kv_dtype), is_plain(side->specs[1].kv_dtype)};
        params.k_scale = plain[0] ? NULL : side->params->k_scale;
        params.v_scale = plain[1] ? NULL : side->params->v_scale;
        params.k_scale_host = plain[0] ? 0 : side->params->k_scale_host;
        params.v_scale_host = plain[1] ? 0 : side->params->v_scale_host;
        params.device = side->params->device;
        for (const struct attn_ext *ext = side->params->next; ext != NULL; ext = ext->next) {
            if (ext->id == ATTN_EXT_KV_QUANT_PARAMS) {
                memcpy(quant, ext, sizeof *quant);
                quant->ext.next = NULL;
                params.next = &quant->ext;
            }
        }
    }
    return params;
}

static attn_status open_writer(struct conversion *c, bool raw)
{
    const struct layout_side *target = c->sides[1];
    const struct attn_cache_spec *specs = target->specs;
    struct attn_kv_quant_params quant;
    const struct attn_layer_params params = cache_params(target, &quant);
    struct attn_layer_desc desc = {.dtype = c->dtype, .kv_dtype = c->dtype};
    if (!raw) {
        desc.kv_dtype = specs[0].kv_dtype;
        desc.kv_dtype_v = specs[1].kv_dtype != specs[0].kv_dtype ? specs[1].kv_dtype : 0;
        desc.k_scale_form = is_plain(specs[0].kv_dtype) ? 0 : target->layer->k_scale_form;
        desc.v_scale_form = is_plain(specs[1].kv_dtype) ? 0 : target->layer->v_scale_form;
    }
    return open_worker(
        c, &c->writer, &desc, &c->views[1][0], &c->views[1][1],
        raw || (is_plain(specs[0].kv_dtype) && is_plain(specs[1].kv_dtype)) ? NULL : &params, 1);
}

/* A layer whose V is the part that is read, and whose K is the other one: a token that attends to
 * its own key alone has the row as its output. */
static attn_status open_reader(struct conversion *c, int32_t part, int32_t max_tokens)
{
    const struct layout_side *source = c->sides[0];
    const struct attn_layer_desc *layer = source->layer;
    struct attn_kv_quant_params quant;
    struct attn_layer_params params = cache_params(source, &quant);
    struct attn_layer_desc desc = {.dtype = c->dtype,
                                   .kv_dtype = source->specs[0].kv_dtype,
                                   .k_scale_form = layer->k_scale_form,
                                   .v_scale_form = layer->v_scale_form,
                                   .has_window = 1};
    if (part == 0) {
        desc.k_scale_form = layer->v_scale_form;
        desc.v_scale_form = layer->k_scale_form;
        params.k_scale = source->params != NULL ? source->params->v_scale : NULL;
        params.v_scale = source->params != NULL ? source->params->k_scale : NULL;
        params.k_scale_host = source->params != NULL ? source->params->v_scale_host : 0;
        params.v_scale_host = source->params != NULL ? source->params->k_scale_host : 0;
    }
    const size_t row = (size_t)c->views[0][part].num_heads * (size_t)c->views[0][part].head_size *
                       (size_t)bytes_of(c->dtype);
    TRY(device_take(&c->device, false, row * (size_t)max_tokens, &c->rows[part], c->error));
    return open_worker(c, &c->readers[part], &desc, &c->views[0][1 - part], &c->views[0][part],
                       &params, max_tokens);
}

/* [tokens, heads, head_size] of the rows' dtype; strides in bytes. */
static struct attn_tensor rows_tensor(const struct conversion *c, int32_t part, void *data,
                                      int64_t shape[3], int64_t strides[3], int64_t token,
                                      int64_t head)
{
    const int64_t bytes = bytes_of(c->dtype);
    shape[1] = c->views[0][part].num_heads;
    shape[2] = c->views[0][part].head_size;
    strides[0] = token / bytes;
    strides[1] = head / bytes;
    strides[2] = 1;
    return (struct attn_tensor){
        .data = data,
        .device = c->device.device,
        .ndim = 3,
        .dtype = {c->dtype == ATTN_DTYPE_BF16 ? ATTN_CODE_BFLOAT : ATTN_CODE_FLOAT,
                  (uint8_t)(8 * bytes), 1},
        .shape = shape,
        .strides = strides};
}

static attn_status write_rows(struct conversion *c, const struct attn_tensor *k,
                              const struct attn_tensor *v, const int64_t *slots, int64_t num_slots)
{
    static const int32_t starts[] = {0, 1}, one = 1;
    const struct attn_batch batch = {.struct_size = sizeof batch,
                                     .num_reqs = 1,
                                     .num_tokens = 1,
                                     .num_actual_tokens = 1,
                                     .max_query_len = 1,
                                     .max_seq_len = 1,
                                     .query_start_loc = c->numbers,
                                     .query_start_loc_host = starts,
                                     .seq_lens = c->numbers + 1,
                                     .seq_lens_host = &one,
                                     .block_table = c->numbers,
                                     .block_table_stride = 1,
                                     .slot_mapping = slots,
                                     .num_slots = num_slots};
    const struct attn_step_io io = {
        .struct_size = sizeof io, .stream = c->stream, .flags = ATTN_RUN_NO_ATTEND, .k = k, .v = v};
    TRY(c->api->plan_batch(c->writer.plan, &batch, c->stream, c->error));
    return c->api->run(c->writer.plan, c->writer.layer, &io, c->error);
}

/* A source of plain numbers is read in place: a run takes row s of consecutive blocks, which are as
 * far apart as blocks are, from the first to the last that is wanted. Others have no slot. */
static attn_status convert_in_place(struct conversion *c)
{
    struct attn_kv_view *k = &c->views[0][0], *v = &c->views[0][1];
    int64_t blocks = k->num_blocks, size = k->block_size;
    int64_t block_bytes[2] = {k->stride_block, v->stride_block};
    if (block_bytes[0] == size * k->stride_slot && block_bytes[1] == size * v->stride_slot) {
        blocks *= size; /* all rows are equally far apart */
        block_bytes[0] = k->stride_slot;
        block_bytes[1] = v->stride_slot;
        size = 1;
    }
    const int64_t at_once = size < MAX_SLOTS ? MAX_SLOTS / size : 1;
    for (int64_t first = 0; first < blocks; first += at_once) {
        const int64_t count = blocks - first < at_once ? blocks - first : at_once;
        for (int64_t b = 0; b < count; b++) {
            for (int64_t s = 0; s < size; s++) {
                c->slots[s * count + b] = c->to[(first + b) * size + s];
            }
        }
        TRY(device_copy_in(&c->device, c->device_slots, c->slots,
                           (size_t)(count * size) * sizeof *c->slots, c->error));
        for (int64_t s = 0; s < size; s++) {
            struct attn_tensor rows[2];
            int64_t from = s * count, to = from + count;
            while (from < to && c->slots[from] < 0) {
                from++;
            }
            while (to > from && c->slots[to - 1] < 0) {
                to--;
            }
            if (from == to) {
                continue;
            }
            int64_t shapes[2][3] = {{to - from}, {to - from}}, strides[2][3];
            for (int32_t i = 0; i < 2; i++) {
                const struct attn_kv_view *view = &c->views[0][i];
                char *data = (char *)view->data + (first + from - s * count) * block_bytes[i] +
                             s * view->stride_slot;
                rows[i] = rows_tensor(c, i, data, shapes[i], strides[i], block_bytes[i],
                                      view->stride_head);
            }
            TRY(write_rows(c, &rows[0], &rows[1], c->device_slots + from, to - from));
        }
    }
    return ATTN_OK;
}

static attn_status read_rows(struct conversion *c, int32_t part, int32_t count, int32_t blocks,
                             int64_t shape[3], int64_t strides[3], struct attn_tensor *rows)
{
    const int32_t starts[] = {0, count};
    const struct attn_batch batch = {.struct_size = sizeof batch,
                                     .num_reqs = 1,
                                     .num_tokens = count,
                                     .num_actual_tokens = count,
                                     .max_query_len = count,
                                     .max_seq_len = count,
                                     .query_start_loc = c->table,
                                     .query_start_loc_host = starts,
                                     .seq_lens = c->table + 1,
                                     .seq_lens_host = &count,
                                     .block_table = c->table + 2,
                                     .block_table_stride = blocks};
    const int64_t head = c->views[0][part].head_size * bytes_of(c->dtype);
    const int64_t token = c->views[0][part].num_heads * head;
    *rows = rows_tensor(c, part, c->rows[part], shape, strides, token, head);
    int64_t q_shape[3] = {count}, q_strides[3];
    const int64_t q_head = c->views[0][1 - part].head_size * bytes_of(c->dtype);
    const struct attn_tensor q = rows_tensor(c, 1 - part, c->zeros, q_shape, q_strides,
                                             c->views[0][0].num_heads * q_head, q_head);
    const struct attn_step_io io = {.struct_size = sizeof io,
                                    .stream = c->stream,
                                    .flags = ATTN_RUN_NO_WRITE,
                                    .q = &q,
                                    .out = rows};
    TRY(c->api->plan_batch(c->readers[part].plan, &batch, c->stream, c->error));
    return c->api->run(c->readers[part].plan, c->readers[part].layer, &io, c->error);
}

/* A quantized source is read in chunks of its tokens. */
static attn_status convert_by_reading(struct conversion *c, int32_t max_tokens, int32_t *table)
{
    const struct layout_tokens *t = c->tokens;
    const int64_t size = c->sides[0]->specs[0].block_size;
    const int32_t kernels = c->views[0][0].block_size, per_block = (int32_t)(size / kernels);
    for (int64_t first = 0; first < t->num_tokens; first += max_tokens) {
        const int64_t left = t->num_tokens - first;
        const int32_t count = left < max_tokens ? (int32_t)left : max_tokens;
        const int32_t blocks = (count + kernels - 1) / kernels;
        struct attn_tensor rows[2];
        int64_t shapes[2][3] = {{count}, {count}}, strides[2][3];
        table[0] = 0;
        table[1] = count;
        for (int32_t i = 0; i < blocks; i++) {
            table[2 + i] =
                t->source_blocks[first / size + i / per_block] * per_block + i % per_block;
        }
        for (int32_t i = 0; i < count; i++) {
            c->slots[i] = c->to[(int64_t)table[2 + i / kernels] * kernels + i % kernels];
        }
        TRY(device_copy_in(&c->device, c->table, table, (size_t)(2 + blocks) * sizeof *table,
                           c->error));
        TRY(device_copy_in(&c->device, c->device_slots, c->slots, (size_t)count * sizeof *c->slots,
                           c->error));
        for (int32_t i = 0; i < 2; i++) {
            TRY(read_rows(c, i, count, blocks, shapes[i], strides[i], &rows[i]));
        }
        TRY(write_rows(c, &rows[0], &rows[1], c->device_slots, count));
    }
    return ATTN_OK;
}

static attn_status convert(struct conversion *c)
{
    const struct layout_side *source = c->sides[0], *target = c->sides[1];
    const int32_t from = source->specs[0].kv_dtype, to = target->specs[0].kv_dtype;
    const bool raw = is_same_fp8(source, target), reads = !raw && !is_plain(from);
    const int32_t size = source->specs[0].block_size;
    const int32_t max_tokens = size < MAX_READ_TOKENS ? MAX_READ_TOKENS / size * size : size;
    static const int32_t numbers[] = {0, 1};
    memcpy(c->views[0], source->views, sizeof c->views[0]);
    memcpy(c->views[1], target->views, sizeof c->views[1]);
    c->dtype = raw              ? ATTN_DTYPE_BF16
               : is_plain(from) ? from
               : is_plain(to)   ? to
                                : target->layer->dtype;
    for (int32_t i = 0; raw && i < 4; i++) {
        TRY(pair_bytes(&c->views[i / 2][i % 2], c->error));
    }
    const size_t most = size > MAX_SLOTS ? (size_t)size : MAX_SLOTS;
    void *taken[2];
    c->slots = malloc(most * sizeof *c->slots);
    int32_t *table = malloc((size_t)(max_tokens + 2) * sizeof *table);
    attn_status status =
        c->slots != NULL && table != NULL
            ? open_writer(c, raw)
            : refuse(c->error, ATTN_ERROR_OUT_OF_MEMORY, "memory", "no place for %zu slots", most);
    if (status == ATTN_OK) {
        status = device_take(&c->device, false, most * sizeof *c->slots, &taken[0], c->error);
        c->device_slots = status == ATTN_OK ? taken[0] : NULL;
    }
    if (status == ATTN_OK) {
        status = device_take(&c->device, false, sizeof numbers, &taken[1], c->error);
        c->numbers = status == ATTN_OK ? taken[1] : NULL;
    }
    if (status == ATTN_OK) {
        status = device_copy_in(&c->device, c->numbers, numbers, sizeof numbers, c->error);
    }
    for (int32_t i = 0; reads && i < 2 && status == ATTN_OK; i++) {
        status = open_reader(c, i, max_tokens);
    }
    if (reads && status == ATTN_OK) {
        const int32_t head = c->views[0][0].head_size > c->views[0][1].head_size
                                 ? c->views[0][0].head_size
                                 : c->views[0][1].head_size;
        const size_t bytes = (size_t)max_tokens * (size_t)c->views[0][0].num_heads * (size_t)head *
                             (size_t)bytes_of(c->dtype);
        status = device_take(&c->device, false, (size_t)(max_tokens + 2) * sizeof *table, &taken[0],
                             c->error);
        c->table = status == ATTN_OK ? taken[0] : NULL;
        status =
            status == ATTN_OK ? device_take(&c->device, false, bytes, &c->zeros, c->error) : status;
        status = status == ATTN_OK ? device_set(&c->device, c->zeros, 0, bytes, c->error) : status;
    }
    if (status == ATTN_OK) {
        c->stream = device_stream_create(&c->device);
        status = reads ? convert_by_reading(c, max_tokens, table) : convert_in_place(c);
    }
    free(table);
    return status;
}

static void close_worker(struct conversion *c, struct worker *w)
{
    c->api->plan_destroy(w->plan);
    c->api->model_destroy(w->model);
    device_give(&c->device, false, w->workspace);
}

attn_status layout_convert(const struct attn_api *api, attn_runtime *runtime,
                           struct attn_device device, const struct layout_side *source,
                           const struct layout_side *target, const struct layout_tokens *tokens,
                           struct attn_error *error)
{
    struct conversion c = {.api = api,
                           .runtime = runtime,
                           .tokens = tokens,
                           .sides = {source, target},
                           .error = error};
    TRY(check_layers(source, target, error));
    TRY(device_init(&c.device, api, runtime, device, error));
    attn_status status = map_slots(&c);
    status = status == ATTN_OK ? convert(&c) : status;
    const attn_status done = api->device->synchronize(c.device.opened, NULL, error);
    status = status == ATTN_OK ? done : status;
    close_worker(&c, &c.readers[0]);
    close_worker(&c, &c.readers[1]);
    close_worker(&c, &c.writer);
    void *const taken[] = {c.device_slots, c.numbers, c.table, c.zeros, c.rows[0], c.rows[1]};
    for (size_t i = 0; i < sizeof taken / sizeof *taken; i++) {
        device_give(&c.device, false, taken[i]);
    }
    device_stream_destroy(&c.device, c.stream);
    device_finish(&c.device);
    free(c.slots);
    free(c.to);
    return status;
}
