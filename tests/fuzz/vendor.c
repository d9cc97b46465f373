/* SPDX-License-Identifier: Apache-2.0 */
/* A vendor whose every answer is made of the fuzzer's bytes: what its probe reports, the reasons
 * and statuses that it gives, its table of kernels, the sizes that it asks for, texts without an
 * end. Whatever it says, the engine gets a status that it knows and a text that ends. */
#include <stdlib.h>
#include <string.h>

#include "backend.h"
#include "bind/bound.h"
#include "runtime/probe.h"
#include "support/client.h"

#define LARGEST_MEMORY ((size_t)16 << 20)
#define MAX_TOKENS 8

/* What the vendor's functions read their answers from. */
static struct input *script;
static struct blocks *memory;
static const struct attn_error *engines;

static attn_status answer(struct attn_error *error)
{
    const uint8_t tag = input_byte(script);
    if (tag < 160) {
        return ATTN_OK;
    }
    if (error != NULL && (tag & 1)) {
        const char *text = input_text(script, "the vendor's reason");
        memset(error->message, tag & 2 ? 'm' : 0, sizeof error->message);
        memset(error->field, tag & 4 ? 0xff : 0, sizeof error->field);
        if (text != NULL && !(tag & 2)) {
            memcpy(error->message, text, strnlen(text, sizeof error->message));
        }
        if (tag & 8 && error != engines) { /* run() hands on the engine's own */
            error->struct_size = (size_t)input_int64(script);
        }
        error->status = input_int(script);
    }
    return (attn_status)input_int(script);
}

BACKEND_KERNEL(attend, attn_attend_args, answer(error))
BACKEND_KERNEL(write_kv, attn_write_kv_args, answer(error))
BACKEND_KERNEL(merge, attn_merge_states_args, answer(error))

static attn_status schedule_size(const struct attn_schedule_size_args *args,
                                 struct attn_schedule_size *size, struct attn_error *error)
{
    size->host_bytes = (size_t)input_int64(script);
    size->device_bytes = (size_t)input_int64(script);
    return answer(error);
}

static attn_status plan(const struct attn_attend_args *args, int32_t mode, struct attn_error *error)
{
    return answer(error);
}

static attn_status prepare(const struct attn_prepare_args *args, attn_prepared **prepared,
                           struct attn_error *error)
{
    *prepared = (attn_prepared *)(void *)memory;
    return answer(error);
}

static void release(attn_instance *instance, attn_prepared *prepared)
{
}

/* The table is as large as it says, and some of its slots may be empty. */
static const struct attn_kernels *make_kernels(void)
{
    struct attn_kernels table = {.attend = attend,
                                 .write_kv = write_kv,
                                 .merge_states = merge,
                                 .prepare = prepare,
                                 .release = release,
                                 .schedule_size = schedule_size,
                                 .schedule = plan};
    const uint8_t tag = input_byte(script);
    table.attend = tag == 1 ? NULL : table.attend;
    table.write_kv = tag == 2 ? NULL : table.write_kv;
    table.merge_states = tag == 3 ? NULL : table.merge_states;
    table.release = tag == 4 ? NULL : table.release;
    table.schedule_size = tag == 5 ? NULL : table.schedule_size;
    table.schedule = tag == 6 ? NULL : table.schedule;
    table.prepare = tag < 128 ? NULL : table.prepare;
    table.struct_size = input_struct_size(script, sizeof table);
    return blocks_struct(memory, script, &table, sizeof table, table.struct_size);
}

static attn_status create(const struct attn_create_args *args, attn_instance **instance,
                          const struct attn_kernels **kernels, struct attn_error *error)
{
    const uint8_t tag = input_byte(script);
    *instance = tag == 1 ? NULL : (attn_instance *)(void *)memory;
    *kernels = tag == 2 ? NULL : make_kernels();
    return answer(error);
}

static void destroy(attn_instance *instance)
{
}

static attn_status supports(const struct attn_supports_args *args,
                            const struct attn_reason_sink *reasons, struct attn_error *error)
{
    for (int32_t i = input_byte(script) % 3; i > 0; i--) {
        const char *field = input_text(script, "field"), *asked = input_text(script, "asked");
        reasons->refuse(reasons->user, field, asked, input_text(script, "supported"));
    }
    return answer(error);
}

static void report_device(const struct attn_probe_sink *sink)
{
    struct attn_device_info device = {.struct_size = input_struct_size(script, sizeof device),
                                      .device = {ATTN_DEVICE_CPU, 0},
                                      .name = input_text(script, "device"),
                                      .arch = input_text(script, "x86-64"),
                                      .isa = input_text(script, "avx2")};
    input_patch(script, &device.device, 0, sizeof device.device);
    sink->device(sink->user,
                 blocks_struct(memory, script, &device, sizeof device, device.struct_size), NULL);
}

static void report_backend(const struct attn_probe_sink *sink)
{
    static const struct attn_head_size_range heads[] = {{{8, 512, 8}, {8, 512, 8}, 0}};
    static const struct attn_range blocks[] = {{1, 4096, 1}};
    struct fixture fixture;
    fixture_init(&fixture);
    struct attn_backend_caps caps = *fixture_add(&fixture, "vendor", "", 1);
    fixture_finish(&fixture);
    const size_t kernels = offsetof(struct attn_backend_caps, kernels);
    const size_t arrays = offsetof(struct attn_backend_caps, head_sizes);
    const size_t numbers = offsetof(struct attn_backend_caps, preferred_layout);
    const size_t after = offsetof(struct attn_backend_caps, extensions);
    caps.head_sizes = heads;
    caps.block_sizes = blocks;
    caps.num_head_sizes = caps.num_block_sizes = 1;
    caps.name = input_text(script, "vendor");
    caps.variant = input_text(script, "");
    caps.dtypes = 7 << ATTN_DTYPE_F16;
    input_patch(script, (uint8_t *)&caps + kernels, 0, arrays - kernels);
    input_patch(script, (uint8_t *)&caps + numbers, 0, after - numbers);
    const uint32_t ids[] = {(uint32_t)input_int(script), (uint32_t)input_int(script)};
    caps.extensions = ids;
    caps.num_extensions = input_byte(script) % 3;
    caps.struct_size = input_struct_size(script, sizeof caps);
    sink->backend(sink->user, blocks_struct(memory, script, &caps, sizeof caps, caps.struct_size),
                  NULL);
}

static attn_status probe(const struct attn_host *host, const struct attn_probe_sink *sink,
                         struct attn_error *error)
{
    report_device(sink);
    for (int32_t i = 1 + input_byte(script) % 3; i > 0; i--) {
        report_backend(sink);
    }
    return answer(error);
}

/* As large as a vendor may ask; more is refused as an engine out of memory would. */
static void *allocate(void *user, size_t size, size_t alignment)
{
    return size <= LARGEST_MEMORY
               ? aligned_alloc(alignment, (size + alignment - 1) / alignment * alignment)
               : NULL;
}

static void step(attn_model *model, struct attn_error *error)
{
    static float data[MAX_TOKENS * 64];
    static uint8_t cache[1 << 16] __attribute__((aligned(256)));
    const struct attn_plan_options *options = CLIENT_LIMITS(2, MAX_TOKENS, 16);
    const int32_t start[] = {0, 2}, lens[] = {2}, table[] = {0};
    const int64_t slots[] = {0, 1};
    struct attn_batch batch = client_batch(1, start, lens);
    client_blocks(&batch, table, 1, slots);
    int64_t shape[] = {MAX_TOKENS, 1, 64};
    const struct attn_tensor rows = {
        data, {ATTN_DEVICE_CPU, 0}, 3, {ATTN_CODE_FLOAT, 32, 1}, shape, NULL, 0};
    const struct attn_step_io io =
        SIZED(attn_step_io, .q = &rows, .k = &rows, .v = &rows, .out = &rows);
    struct attn_kv_view k = {.struct_size = sizeof k}, v = {.struct_size = sizeof v};
    attn_layer *layer = model_layer(model, 0);
    attn_plan *made = NULL;
    attn_status status = layer_kv_views(layer, cache, 1, &k, &v, error);
    const struct attn_kv_view *const views[] = {&k, &v};
    status = status ? status : layer_bind_caches(layer, views, 2, error);
    status = status ? status : plan_create(model, 0, options, &made, error);
    fuzz_check_error(status, error);
    FUZZ_CHECK((status == ATTN_OK) == (made != NULL));
    struct attn_workspace room = {.struct_size = sizeof room};
    if (status == ATTN_OK && plan_workspace(made, &room, error) == ATTN_OK &&
        room.bytes <= LARGEST_MEMORY) {
        room.memory = blocks_add_aligned(memory, room.bytes);
        FUZZ_CHECK(plan_bind_workspace(made, &room, error) == ATTN_OK);
        status = plan_batch(made, &batch, NULL, error);
        fuzz_check_error(status, error);
        *error = (struct attn_error)ATTN_ERROR_INIT;
        status = plan_run(made, layer, &io, error);
        if (status != ATTN_OK) { /* a kernel that succeeds may have scribbled on it */
            fuzz_check_error(status, error);
        }
    }
    plan_destroy(made);
}

static void serve(struct fixture *fixture)
{
    struct attn_error error = ATTN_ERROR_INIT;
    attn_assignment *assignment = NULL;
    attn_model *model = NULL;
    engines = &error;
    struct attn_layer_desc layer = fixture_layer("layers.0");
    layer.dtype = ATTN_DTYPE_F32;
    layer.kv_dtype = ATTN_KV_AUTO;
    layer.num_q_heads = layer.num_kv_heads = 1;
    layer.head_size = 64;
    attn_status status = fixture_select(fixture, "", &layer, 1, &assignment, &error);
    fuzz_check_error(status, &error);
    if (status == ATTN_OK) {
        status = model_create(&fixture->runtime, assignment, NULL, &model, &error);
        fuzz_check_error(status, &error);
        FUZZ_CHECK((status == ATTN_OK) == (model != NULL));
    }
    assignment_destroy(assignment);
    if (model != NULL) {
        step(model, &error);
    }
    model_destroy(model);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size)
{
    struct input input = {bytes, size};
    struct blocks blocks = {.count = 0};
    struct fixture fixture;
    struct arena arena;
    struct found found;
    struct attn_error error = ATTN_ERROR_INIT;
    script = &input;
    memory = &blocks;
    fixture_init(&fixture);
    fixture.runtime.host.allocate = allocate;
    struct attn_plugin *table = &fixture.plugins[0].table_copy;
    table->probe = probe;
    table->supports = supports;
    table->create = create;
    table->destroy = input_byte(&input) == 1 ? NULL : destroy;
    fixture.plugins[0].table = table;
    arena_init(&arena, &fixture.runtime.host);
    FUZZ_CHECK(found_init(&found, &arena, &error) == ATTN_OK);
    const attn_status status = plugin_probe(&fixture.runtime.host, table, &found, &error);
    fuzz_check_error(status, &error);
    if (status == ATTN_OK) {
        fixture.runtime.devices = found.devices;
        fixture.runtime.num_devices = found.num_devices;
        fixture.runtime.backends = found.backends;
        fixture.runtime.num_backends = found.num_backends;
        serve(&fixture);
    }
    arena_finish(&arena);
    fixture_finish(&fixture);
    blocks_free(&blocks);
    return 0;
}
