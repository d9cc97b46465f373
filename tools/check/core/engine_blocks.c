/* SPDX-License-Identifier: Apache-2.0 */
/* copy_blocks of a model's layers through the core: out to the host's memory, inside the cache and
 * in again. Every row of every layer stands where the moves lead, every other byte where it was,
 * and the host's memory is what it is with cpu_ref. */
#include <stdlib.h>
#include <string.h>

#include "common/command.h"
#include "common/names.h"
#include "support/client.h"
#include "support/owned.h"
#include "support/random.h"
#include "cases/cases.h"
#include "core/engine.h"
#include "harness/image.h"
#include "harness/trial.h"

enum { LAYERS = 3, BLOCKS = 9, SWAP_BLOCKS = 4, SWAP_GAP = 512, ALIGNMENT = 256 };

static const int64_t pairs_out[] = {3, 1, 0, 2}, pairs_within[] = {1, 4, 2, 5},
                     pairs_in[] = {1, 6, 2, 7};
/* What the moves make of the cache: (the block now, the block it was before). */
static const int64_t moved[] = {4, 1, 5, 2, 6, 3, 7, 0};

/* The caches of one backend's model, one layer after the other, and its swap space. */
struct caches {
    struct core *core;
    const struct device *device;
    attn_model *model;
    size_t layer_bytes;
    size_t scales; /* offset of those that stand apart */
    uint8_t *memory;
    struct attn_kv_view views[LAYERS][2];
    int64_t page_bytes;
    uint8_t *swap; /* the host's */
    size_t swap_bytes;
};

static size_t aligned(int64_t bytes)
{
    return ((size_t)bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
}

static void caches_finish(struct caches *c)
{
    c->core->api->model_destroy(c->model);
    device_free(c->device, c->memory);
    free(c->swap);
}

/* A model of layers that share a block table. */
static attn_status make_model(struct caches *c, const struct factor_value *v,
                              struct attn_error *error)
{
    static const char *const names[LAYERS] = {"first", "second", "third"};
    struct attn_layer_desc descs[LAYERS];
    const struct attn_layer_desc *layers[LAYERS];
    const struct attn_select_options options = core_options(c->core);
    for (int32_t i = 0; i < LAYERS; i++) {
        case_layer(v, &descs[i]);
        descs[i].name = names[i];
        layers[i] = &descs[i];
    }
    return client_model(c->core->api, c->core->runtime, &options, layers, LAYERS, &c->model, error);
}

static attn_status bind_layers(struct caches *c, const struct factor_value *v,
                               struct attn_error *error)
{
    const struct attn_api *api = c->core->api;
    struct attn_cache_spec spec = {.struct_size = sizeof spec};
    attn_status status = api->layer_cache_spec(api->model_layer(c->model, 0), 0, &spec, error);
    c->page_bytes = spec.page_bytes;
    for (int32_t i = 0; i < LAYERS && status == ATTN_OK; i++) {
        uint8_t *cache = c->memory + (size_t)i * c->layer_bytes;
        for (int32_t j = 0; j < 2; j++) {
            views_make(v, j == 1, BLOCKS, cache, cache + c->scales, &c->views[i][j]);
        }
        status = client_bind(api, api->model_layer(c->model, i), &c->views[i][0], &c->views[i][1],
                             error);
    }
    return status;
}

static attn_status caches_init(struct caches *c, const struct factor_value *v,
                               const uint8_t *initial, struct attn_error *error)
{
    TRY(make_model(c, v, error));
    c->memory = device_alloc(c->device, LAYERS * c->layer_bytes);
    if (c->memory == NULL ||
        !device_write(c->device, c->memory, initial, LAYERS * c->layer_bytes)) {
        return ATTN_ERROR_OUT_OF_MEMORY;
    }
    TRY(bind_layers(c, v, error));
    c->swap_bytes = LAYERS * SWAP_BLOCKS * (size_t)(c->page_bytes + SWAP_GAP);
    c->swap = memset(command_calloc(c->swap_bytes, 1), IMAGE_POISON, c->swap_bytes);
    return ATTN_OK;
}

/* Pages of the swap space lie further apart than those of the cache. */
static attn_status move(struct caches *c, struct attn_error *error)
{
    const struct attn_api *api = c->core->api;
    struct attn_block_memory others[LAYERS];
    int64_t stride = c->page_bytes + SWAP_GAP;
    for (int32_t i = 0; i < LAYERS; i++) {
        others[i] = (struct attn_block_memory){c->swap + i * SWAP_BLOCKS * stride, stride};
    }
    void *stream = device_stream_create(c->device);
    const struct {
        int32_t kind;
        const int64_t *pairs;
    } moves[] = {{ATTN_COPY_DEVICE_TO_HOST, pairs_out},
                 {ATTN_COPY_DEVICE_TO_DEVICE, pairs_within},
                 {ATTN_COPY_HOST_TO_DEVICE, pairs_in}};
    attn_status status = ATTN_OK;
    for (size_t i = 0; i < sizeof moves / sizeof *moves && status == ATTN_OK; i++) {
        const bool inside = moves[i].kind == ATTN_COPY_DEVICE_TO_DEVICE;
        const struct attn_block_transfer move =
            SIZED(attn_block_transfer, .kind = moves[i].kind, .other = inside ? NULL : others,
                  .other_stride = inside ? 0 : sizeof *others, .pairs = moves[i].pairs,
                  .num_pairs = 2, .stream = stream);
        status = api->copy_blocks(c->model, &move, error);
    }
    device_wait(c->device);
    device_stream_destroy(c->device, stream);
    return status;
}

/* Copies each row of a moved block, with its scale, from where it was. `base` is the address at
 * which the images begin. */
static void move_rows(const struct attn_kv_view *view, const struct factor_value *v, bool is_v,
                      const uint8_t *base, const uint8_t *before, uint8_t *expected)
{
    int32_t size = is_v ? v[FACTOR_HEAD_SIZE].b : v[FACTOR_HEAD_SIZE].a;
    int32_t pack = view->pack > 0 ? view->pack : size;
    size_t bytes = (size_t)kv_row_bytes(case_kv(v, is_v), is_v, size) * (size_t)pack / (size_t)size;
    int32_t scale = kv_scale_bytes(case_kv(v, is_v), is_v, size);
    int64_t data = (uint8_t *)view->data - base;
    int64_t scales = scale > 0 ? (uint8_t *)view->scale - base : 0;
    for (size_t i = 0; i < sizeof moved / sizeof *moved; i += 2) {
        const int64_t to = moved[i], from = moved[i + 1];
        for (int32_t n = 0; n < view->block_size * view->num_heads; n++) {
            int64_t slot = n / view->num_heads, head = n % view->num_heads;
            int64_t row = data + slot * view->stride_slot + head * view->stride_head;
            int64_t of_row =
                scales + slot * view->scale_stride_slot + head * view->scale_stride_head;
            for (int32_t d = 0; d < size; d += pack, row += view->stride_pack) {
                memcpy(expected + row + to * view->stride_block,
                       before + row + from * view->stride_block, bytes);
            }
            memcpy(expected + of_row + to * view->scale_stride_block,
                   before + of_row + from * view->scale_stride_block, (size_t)scale);
        }
    }
}

static enum trial_result verify_moved(struct trial *trial, const struct factor_value *v,
                                      const uint8_t *initial, const struct caches *reference,
                                      const struct caches *tested)
{
    size_t bytes = LAYERS * tested->layer_bytes;
    OWNED(memory_end) uint8_t *found = trial_read(trial, tested->device, tested->memory, bytes);
    OWNED(memory_end) uint8_t *expected = memcpy(command_calloc(bytes, 1), initial, bytes);
    if (found == NULL) {
        return TRIAL_FAILED;
    }
    for (int32_t i = 0; i < 2 * LAYERS; i++) {
        move_rows(&tested->views[i / 2][i % 2], v, i % 2 == 1, tested->memory, initial, expected);
    }
    TRIAL_FAIL_IF(trial, memcmp(found, expected, bytes) != 0,
                  "rows of a layer do not stand where they went, or others were written");
    TRIAL_FAIL_IF(trial,
                  tested->swap_bytes != reference->swap_bytes ||
                      memcmp(tested->swap, reference->swap, tested->swap_bytes) != 0,
                  "the other memory is not what it is with cpu_ref");
    return TRIAL_PASSED;
}

static enum trial_result run_blocks(struct trial *trial, const void *variant, uint64_t seed)
{
    const struct factor_value *v = variant;
    struct core as_reference = core_of_reference(trial->core);
    size_t scales = aligned(views_cache_bytes(v, BLOCKS));
    size_t bytes = scales + aligned(views_scales_bytes(v, BLOCKS));
    OWNED(caches_finish)
    struct caches reference = {&as_reference, &device_host, NULL, bytes, scales},
                  tested = {trial->core, trial->device, NULL, bytes, scales};
    struct caches *const caches[] = {&reference, &tested};
    struct attn_error error = ATTN_ERROR_INIT;
    OWNED(memory_end) uint8_t *initial = command_calloc(LAYERS, bytes);
    for (size_t i = 0; i < LAYERS * bytes; i++) {
        initial[i] = (uint8_t)random_bits(&seed);
    }
    for (int32_t i = 0; i < 2; i++) {
        TRIAL_CALL(trial, "caches", caches_init(caches[i], v, initial, &error), &error);
        TRIAL_CALL(trial, "copy_blocks", move(caches[i], &error), &error);
    }
    return verify_moved(trial, v, initial, &reference, &tested);
}

/* A case for each cache dtype and declared layout. */
void blocks_cases(const struct kernel_sink *sink)
{
    const struct case_space *space = sink->space;
    const struct attn_backend_caps *caps = sink->caps;
    if (caps->device.type != ATTN_DEVICE_CPU && !(caps->kernels & ATTN_KERNEL_COPY_BLOCKS)) {
        return; /* on a CPU the core moves blocks itself */
    }
    for (int32_t i = 0; i < space->factors[FACTOR_KV_DTYPE].count; i++) {
        int32_t kv = space->factors[FACTOR_KV_DTYPE].values[i].a;
        if (space->factors[FACTOR_KV_DTYPE].values[i].b != 0) {
            continue; /* moved as the caches of each dtype are */
        }
        for (int32_t layout = 0; layout < space->factors[FACTOR_LAYOUT].count; layout++) {
            struct factor_value v[FACTOR_COUNT];
            struct attend_case c;
            bool found = false;
            for (int32_t dtype = ATTN_DTYPE_F32; dtype >= ATTN_DTYPE_F16 && !found; dtype--) {
                bool fits = kv > ATTN_KV_F32 || kv == dtype;
                found = fits && case_of_cache(space, dtype, kv, &c);
            }
            c.index[FACTOR_LAYOUT] = layout;
            case_drop_conflicts(space, &c);
            if (!found ||
                case_value(space, &c, FACTOR_LAYOUT).a !=
                    space->factors[FACTOR_LAYOUT].values[layout].a ||
                case_refused(space, &c)) {
                continue;
            }
            case_values(space, &c, v);
            kernel_try(sink, run_blocks, v, "blocks.%s.%s", kv_dtype_name(kv),
                       layout_name(v[FACTOR_LAYOUT].a));
        }
    }
}
