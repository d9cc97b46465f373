/* SPDX-License-Identifier: Apache-2.0 */
#include "runtime/probe.h"

#include <stdio.h>
#include <string.h>

#include "util/structs.h"
#include "util/text.h"

#define MIN_DEVICE_INFO 72 /* sizes in ABI 0.1 */
#define MIN_CAPS 256
#define MAX_DEVICES 64
#define MAX_BACKENDS 256
#define MAX_RANGES 256
#define MAX_LABEL 255
#define MAX_ISA 1023
#define BAD(field, ...) error_set(&found->error, ATTN_ERROR_PLUGIN, field, __VA_ARGS__)

static attn_status no_memory(struct found *found)
{
    return error_set(&found->error, ATTN_ERROR_OUT_OF_MEMORY, "probe", "no memory for what it reports");
}

static attn_status take_device(void *user, const struct attn_device_info *info)
{
    struct found *found = user;
    struct attn_device_info device;
    attn_status status = struct_read(&device, sizeof device, MIN_DEVICE_INFO, info,
                                     "attn_device_info", &found->error);
    if (status == ATTN_OK && (!text_is_clean(device.name, MAX_LABEL) ||
                              !text_is_clean(device.arch, MAX_LABEL) ||
                              (device.isa != NULL && !text_is_clean(device.isa, MAX_ISA)))) {
        status = BAD("device", "name, arch or isa is not clean UTF-8 text");
    }
    if (status == ATTN_OK && found->num_devices == MAX_DEVICES) {
        status = BAD("device", "more than %d devices", MAX_DEVICES);
    }
    if (status == ATTN_OK) {
        device.next = NULL;
        device.name = arena_string(found->arena, device.name);
        device.arch = arena_string(found->arena, device.arch);
        device.isa = arena_string(found->arena, device.isa != NULL ? device.isa : "");
        status = device.name && device.arch && device.isa ? ATTN_OK : no_memory(found);
    }
    if (status == ATTN_OK) {
        found->devices[found->num_devices++] = device;
    }
    found->status = found->status == ATTN_OK ? status : found->status;
    return status;
}

/* A mask with bits that this ABI does not know would mean that nobody checks them. */
static attn_status check_masks(struct found *found, const struct attn_backend_caps *c)
{
    const struct {
        const char *field;
        uint64_t mask;
        int32_t count;
    } masks[] = {
        {"kernels", c->kernels, ATTN_KERNEL_COUNT},
        {"layer_kinds", c->layer_kinds, ATTN_LAYER_KIND_COUNT},
        {"phases", c->phases, ATTN_PHASE_COUNT},
        {"dtypes", c->dtypes, ATTN_DTYPE_COUNT},
        {"kv_dtypes", c->kv_dtypes, ATTN_KV_DTYPE_COUNT},
        {"q_dtypes", c->q_dtypes, ATTN_DTYPE_COUNT},
        {"terms", c->terms, ATTN_TERM_COUNT},
        {"features", c->features, ATTN_FEATURE_COUNT},
        {"walks", c->walks, 5},
        {"layouts", c->layouts, ATTN_KV_LAYOUT_COUNT},
        {"k_scale_forms", c->k_scale_forms, 4},
        {"v_scale_forms", c->v_scale_forms, 4},
        {"p_scale_forms", c->p_scale_forms, 4},
        {"output_forms", c->output_forms, ATTN_OUTPUT_FORM_COUNT},
    };
    for (size_t i = 0; i < sizeof masks / sizeof *masks; i++) {
        if (masks[i].mask >> masks[i].count != 0) {
            return BAD(masks[i].field, "%s: %s is %#llx; bits from %d on are not known", c->name,
                       masks[i].field, (unsigned long long)masks[i].mask, masks[i].count);
        }
    }
    if (c->kernels == 0 || c->layer_kinds == 0 || c->phases == 0 || c->dtypes == 0) {
        return BAD("kernels", "%s: kernels, layer_kinds, phases and dtypes may not be empty", c->name);
    }
    return ATTN_OK;
}

static attn_status check_lists(struct found *found, const struct attn_backend_caps *c)
{
    const struct {
        const char *field;
        const void *array;
        int32_t count;
    } lists[] = {{"head_sizes", c->head_sizes, c->num_head_sizes},
                 {"block_sizes", c->block_sizes, c->num_block_sizes},
                 {"refused", c->refused, c->num_refused}};
    for (size_t i = 0; i < sizeof lists / sizeof *lists; i++) {
        if (lists[i].count < 0 || lists[i].count > MAX_RANGES ||
            (lists[i].count > 0 && lists[i].array == NULL)) {
            return BAD(lists[i].field, "%s: %d %s at %p; 0 to %d in an array", c->name, lists[i].count,
                       lists[i].field, lists[i].array, MAX_RANGES);
        }
    }
    for (int32_t i = 0; i < c->num_block_sizes; i++) {
        if (c->block_sizes[i].min < 1 || c->block_sizes[i].max < c->block_sizes[i].min) {
            return BAD("block_sizes", "%s: block_sizes[%d] is %d..%d", c->name, i,
                       c->block_sizes[i].min, c->block_sizes[i].max);
        }
    }
    for (int32_t i = 0; i < c->num_head_sizes; i++) {
        if (c->head_sizes[i].qk.min < 1 || c->head_sizes[i].qk.max < c->head_sizes[i].qk.min) {
            return BAD("head_sizes", "%s: head_sizes[%d] is %d..%d", c->name, i,
                       c->head_sizes[i].qk.min, c->head_sizes[i].qk.max);
        }
    }
    return ATTN_OK;
}

/* Statements that contradict each other. */
static attn_status check_sense(struct found *found, const struct attn_backend_caps *c)
{
    bool paged = c->features & ATTN_FEATURE_PAGED_KV;
    bool writes = c->kernels & ATTN_KERNEL_WRITE_KV || c->features & ATTN_FEATURE_FUSED_WRITE;
    if (paged && (c->num_block_sizes == 0 || c->layouts == 0 || c->walks == 0 || c->kv_dtypes == 0)) {
        return BAD("block_sizes", "%s: paged keys without block_sizes, layouts, walks or kv_dtypes",
                   c->name);
    }
    if (c->layouts != 0 && (c->preferred_layout < 0 || c->preferred_layout >= ATTN_KV_LAYOUT_COUNT ||
                            !(c->layouts >> c->preferred_layout & 1))) {
        return BAD("preferred_layout", "%s: preferred_layout %d is not one of its layouts", c->name,
                   c->preferred_layout);
    }
    if (paged && (c->layer_kinds >> ATTN_LAYER_DECODER & 1) && !writes) {
        return BAD("kernels", "%s: decoder layers without write_kv or fused write", c->name);
    }
    if (c->graph_level < ATTN_GRAPH_NEVER || c->graph_level > ATTN_GRAPH_ALWAYS) {
        return BAD("graph_level", "%s: graph_level %d; 0 to 3", c->name, c->graph_level);
    }
    if (c->kernels & ATTN_KERNEL_ATTEND && c->num_head_sizes == 0) {
        return BAD("head_sizes", "%s: attend without head_sizes", c->name);
    }
    return ATTN_OK;
}

static void *copy_array(struct arena *arena, const void *array, int32_t count, size_t size, bool *failed)
{
    void *copy = count > 0 ? arena_array(arena, (size_t)count, size) : NULL;
    if (copy != NULL) {
        memcpy(copy, array, (size_t)count * size);
    }
    *failed |= count > 0 && copy == NULL;
    return copy;
}

/* Plain data that the core knows; an optional extension of others may point into the plugin, and is left to it. */
static struct attn_ext *copy_extensions(struct arena *arena, const struct attn_ext *next, bool *failed)
{
    struct attn_ext *first = NULL, **last = &first;
    for (; next != NULL; next = next->next) {
        if (next->id != ATTN_EXT_CAPS_MLA && next->id != ATTN_EXT_CAPS_GDN) {
            continue;
        }
        struct attn_ext *copy = arena_alloc(arena, next->struct_size);
        if (copy == NULL) {
            *failed = true;
            return first;
        }
        memcpy(copy, next, next->struct_size);
        copy->next = NULL;
        *last = copy;
        last = (struct attn_ext **)(uintptr_t)&copy->next;
    }
    return first;
}

static attn_status copy_caps(struct found *found, const struct attn_backend_caps *source,
                             struct backend *backend)
{
    struct attn_backend_caps *caps = &backend->caps;
    struct attn_refused_combination *refused;
    char full_name[400];
    bool failed = false;
    *caps = *source;
    snprintf(full_name, sizeof full_name, "%s%s%s", caps->name, caps->variant[0] != '\0' ? "@" : "",
             caps->variant);
    backend->full_name = arena_string(found->arena, full_name);
    caps->name = arena_string(found->arena, source->name);
    caps->variant = arena_string(found->arena, source->variant);
    caps->version = arena_string(found->arena, source->version);
    caps->vendor = arena_string(found->arena, source->vendor);
    caps->head_sizes = copy_array(found->arena, source->head_sizes, source->num_head_sizes,
                                  sizeof *caps->head_sizes, &failed);
    caps->block_sizes = copy_array(found->arena, source->block_sizes, source->num_block_sizes,
                                   sizeof *caps->block_sizes, &failed);
    refused = copy_array(found->arena, source->refused, source->num_refused, sizeof *refused, &failed);
    for (int32_t i = 0; i < source->num_refused && !failed; i++) {
        const char *why = source->refused[i].why;
        refused[i].why = arena_string(found->arena, why != NULL ? why : "");
        failed |= refused[i].why == NULL;
    }
    caps->refused = refused;
    caps->next = copy_extensions(found->arena, source->next, &failed);
    failed |= !backend->full_name || !caps->name || !caps->variant || !caps->version || !caps->vendor;
    return failed ? no_memory(found) : ATTN_OK;
}

static attn_status take_backend(void *user, const struct attn_backend_caps *given)
{
    static const uint32_t known[] = {ATTN_EXT_CAPS_MLA, ATTN_EXT_CAPS_GDN};
    struct found *found = user;
    struct attn_backend_caps caps;
    attn_status status =
        struct_read(&caps, sizeof caps, MIN_CAPS, given, "attn_backend_caps", &found->error);
    status = status ? status : ext_check(caps.next, known, 2, "attn_backend_caps", &found->error);
    if (status == ATTN_OK && !text_is_name(caps.name)) {
        status = BAD("name", "a backend's name is not [a-z][a-z0-9_]* of at most 63 bytes");
    }
    caps.variant = caps.variant != NULL ? caps.variant : "";
    if (status == ATTN_OK && caps.variant[0] != '\0' && !text_is_name(caps.variant)) {
        status = BAD("variant", "%s: the variant is not [a-z][a-z0-9_]* of at most 63 bytes", caps.name);
    }
    if (status == ATTN_OK && (!text_is_clean(caps.version, MAX_LABEL) || !text_is_clean(caps.vendor, MAX_LABEL))) {
        status = BAD("version", "%s: version or vendor is not clean UTF-8 text", caps.name);
    }
    status = status ? status : check_masks(found, &caps);
    status = status ? status : check_lists(found, &caps);
    status = status ? status : check_sense(found, &caps);
    if (status == ATTN_OK && found->num_backends == MAX_BACKENDS) {
        status = BAD("backend", "more than %d backends", MAX_BACKENDS);
    }
    for (int32_t i = 0; status == ATTN_OK && i < found->num_backends; i++) {
        const struct attn_backend_caps *other = &found->backends[i].caps;
        if (strcmp(other->name, caps.name) == 0 && strcmp(other->variant, caps.variant) == 0 &&
            other->device.type == caps.device.type && other->device.id == caps.device.id) {
            status = BAD("name", "%s@%s is reported twice for one device", caps.name, caps.variant);
        }
    }
    if (status == ATTN_OK) {
        status = copy_caps(found, &caps, &found->backends[found->num_backends]);
    }
    found->num_backends += status == ATTN_OK;
    found->status = found->status == ATTN_OK ? status : found->status;
    return status;
}

attn_status found_init(struct found *found, struct arena *arena, struct attn_error *error)
{
    *found = (struct found){.arena = arena, .error = ATTN_ERROR_INIT};
    found->devices = arena_array(arena, MAX_DEVICES, sizeof *found->devices);
    found->backends = arena_array(arena, MAX_BACKENDS, sizeof *found->backends);
    return found->devices != NULL && found->backends != NULL
               ? ATTN_OK
               : error_set(error, ATTN_ERROR_OUT_OF_MEMORY, "probe", "no memory for what it reports");
}

void found_reset(struct found *found)
{
    found->num_devices = found->num_backends = 0;
    found->status = ATTN_OK;
}

struct attn_probe_sink found_sink(struct found *found)
{
    return (struct attn_probe_sink){sizeof(struct attn_probe_sink), NULL, found, take_device, take_backend};
}

attn_status found_status(const struct found *found, struct attn_error *error)
{
    return found->status == ATTN_OK
               ? ATTN_OK
               : error_set(error, found->status, found->error.field, "%s", found->error.message);
}

attn_status plugin_probe(const struct attn_host *host, const struct attn_plugin *table,
                         struct found *found, struct attn_error *error)
{
    const struct attn_probe_sink sink = found_sink(found);
    struct attn_error why = ATTN_ERROR_INIT;
    attn_status status = table->probe(host, &sink, &why);
    if (found->status != ATTN_OK) { /* what was wrong with an item says more than the probe's own end */
        return found_status(found, error);
    }
    return status == ATTN_OK ? status : error_relay(error, status, &why);
}
