/* SPDX-License-Identifier: Apache-2.0 */
#include "select_fixture.h"

#include <stdio.h>
#include <string.h>

#include "host/conformance.h"
#include "host/measurement.h"
#include "util/hash.h"
#include "support/layer.h"
#include "support/services.h"

static attn_status no_collective(const struct attn_collective_args *args, struct attn_error *error)
{
    return ATTN_ERROR_DEVICE;
}

const struct attn_collectives fixture_ranks = {.struct_size = sizeof fixture_ranks,
                                               .world_size = 2,
                                               .all_gather = no_collective,
                                               .all_to_all = no_collective,
                                               .reduce_scatter_f32 = no_collective};

static void keep_log(void *user, int32_t level, const char *who, const char *message)
{
    struct fixture *fixture = user;
    size_t used = strlen(fixture->log);
    if (level <= ATTN_LOG_INFO) {
        snprintf(fixture->log + used, sizeof fixture->log - used, "%s\n", message);
    }
}

void fixture_init(struct fixture *fixture)
{
    static char empty[] = "", plugin_name[] = "fake";
    memset(fixture, 0, sizeof *fixture);
    fixture->runtime.settings.backend = empty;
    fixture->runtime.settings.plugin_path = empty;
    fixture->runtime.settings.cache_dir = empty;
    fixture->runtime.settings.log_level = ATTN_LOG_INFO;
    fixture->runtime.host =
        SIZED(attn_host, .user = fixture, .log = keep_log, .allocate = services_allocate,
              .release = services_release, .num_threads = 1);
    fixture->table = SIZED(attn_plugin, .abi_version = ATTN_ABI_VERSION, .name = plugin_name);
    fixture->plugins[0] = (struct plugin){
        plugin_name, plugin_name, empty, empty, empty, ATTN_OK, &fixture->table, fixture->table, 0};
    fixture->devices[0] = SIZED(attn_device_info, .device = {ATTN_DEVICE_CPU, 0}, .name = "cpu",
                                .arch = "x86-64", .isa = "", .device_namespace = "");
    fixture->runtime.plugins = fixture->plugins;
    fixture->runtime.num_plugins = 1;
    fixture->runtime.devices = fixture->devices;
    fixture->runtime.num_devices = 1;
    fixture->runtime.backends = fixture->backends;
    lock_init(&fixture->runtime.lock);
}

void fixture_finish(struct fixture *fixture)
{
    lock_finish(&fixture->runtime.lock);
}

struct attn_backend_caps *fixture_add(struct fixture *fixture, const char *name,
                                      const char *variant, int32_t rank)
{
    static const struct attn_head_size_range heads[] = {{{64, 64, 1}, {0, 0, 1}, 1},
                                                        {{128, 256, 8}, {0, 0, 1}, 1},
                                                        {{192, 192, 1}, {128, 128, 1}, 0}};
    static const struct attn_range blocks[] = {{16, 128, 16}};
    int32_t index = fixture->runtime.num_backends++;
    struct backend *backend = &fixture->backends[index];
    snprintf(fixture->names[index], sizeof fixture->names[index], "%s%s%s", name,
             variant[0] != '\0' ? "@" : "", variant);
    backend->full_name = fixture->names[index];
    backend->device_namespace = "";
    backend->caps = SIZED(
        attn_backend_caps, .name = name, .variant = variant, .version = "1.0.0", .vendor = "test",
        .device = {ATTN_DEVICE_CPU, 0},
        .kernels = ATTN_KERNEL_ATTEND | ATTN_KERNEL_WRITE_KV | ATTN_KERNEL_MERGE_STATES,
        .layer_kinds = 1u << ATTN_LAYER_DECODER, .phases = 3,
        .dtypes = 1u << ATTN_DTYPE_F16 | 1u << ATTN_DTYPE_BF16,
        .kv_dtypes = 1u << ATTN_KV_F16 | 1u << ATTN_KV_BF16,
        .terms = ATTN_TERM_CAUSAL | ATTN_TERM_BIDIRECTIONAL | ATTN_TERM_SLIDING_WINDOW,
        .features = ATTN_FEATURE_PAGED_KV | ATTN_FEATURE_CONTIGUOUS_KV | ATTN_FEATURE_LSE,
        .view_forms = ATTN_VIEW_NHD, .layouts = 1u << ATTN_KV_LAYOUT_NHD | 1u << ATTN_KV_LAYOUT_HND,
        .output_forms = 1u << ATTN_OUTPUT_PLAIN, .head_sizes = heads, .num_head_sizes = 3,
        .block_sizes = blocks, .num_block_sizes = 1, .preferred_layout = ATTN_KV_LAYOUT_NHD,
        .preferred_block_size = 16, .graph_level = ATTN_GRAPH_ALWAYS, .rank = {rank, rank});
    return &backend->caps;
}

struct attn_layer_desc fixture_layer(const char *name)
{
    struct attn_layer_desc layer = layer_decoder(name, 32, 8, 128, 16);
    layer.dtype = ATTN_DTYPE_BF16;
    layer.scale = 0.088f;
    return layer;
}

attn_status fixture_select_by(struct fixture *fixture, const struct attn_select_options *options,
                              const struct attn_layer_desc *layers, int32_t count,
                              attn_assignment **assignment, struct attn_error *error)
{
    const struct attn_layer_desc *pointers[128];
    for (int32_t i = 0; i < count; i++) {
        pointers[i] = &layers[i];
    }
    *error = (struct attn_error)ATTN_ERROR_INIT;
    return observed_select(&fixture->runtime, options, pointers, count, assignment, error);
}

attn_status fixture_select(struct fixture *fixture, const char *text,
                           const struct attn_layer_desc *layers, int32_t count,
                           attn_assignment **assignment, struct attn_error *error)
{
    const struct attn_select_options options = SIZED(attn_select_options, .backend = text);
    return fixture_select_by(fixture, &options, layers, count, assignment, error);
}

void fixture_write_time(const struct fixture *fixture, FILE *file, const struct fixture_time *time)
{
    struct measurement m = {.nanoseconds = time->nanoseconds,
                            .drivers = drivers_hash(HASH_INIT),
                            .version = "1.0.0",
                            .date = "2026-01-01"};
    char line[1024];
    (void)file_hash(fixture->plugins[0].file, &m.file);
    measurement_device(&fixture->devices[0], m.device);
    snprintf(m.shape, sizeof m.shape, "%s", time->shape);
    snprintf(m.phase, sizeof m.phase, "%s", time->phase);
    snprintf(m.bucket, sizeof m.bucket, "%s", time->bucket);
    snprintf(m.backend, sizeof m.backend, "%s", time->backend);
    assert_true(measurement_text(&m, line, sizeof line));
    fputs(line, file);
}

const char *fixture_chosen(const attn_assignment *assignment, int32_t layer, int32_t phase)
{
    return assignment->layers[layer].phases[phase].choice.name;
}
