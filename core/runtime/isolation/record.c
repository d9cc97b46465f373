/* SPDX-License-Identifier: Apache-2.0 */
#include "runtime/isolation/record.h"

#include <attn/plugin.h>
#include <string.h>

#include "util/hash.h"
#include "runtime/probe.h"

#define MAGIC "ATTNPROB"
#define HEADER_SIZE 32
#define MAX_ITEMS 4096

/* One walk for both directions, so that they cannot differ: with `out` it appends, else it reads.
 */
struct codec {
    struct text *out;
    const unsigned char *at;
    size_t left;
    struct arena *arrays;
    bool failed;
};

ATTN_STATIC_ASSERT(sizeof(struct attn_device_info) == 88 && sizeof(struct attn_backend_caps) == 320,
                   "a field that is added is coded below, and RECORD_FORMAT goes up");

static const void *take(struct codec *c, size_t size)
{
    if (c->failed || size > c->left) {
        c->failed = true;
        return NULL;
    }
    const void *at = c->at;
    c->at += size;
    c->left -= size;
    return at;
}

static uint64_t code_integer(struct codec *c, uint64_t value, size_t size)
{
    unsigned char bytes[8];
    if (c->out != NULL) {
        for (size_t i = 0; i < size; i++) {
            bytes[i] = (unsigned char)(value >> (8 * i));
        }
        text_add_bytes(c->out, bytes, size);
        return value;
    }
    const unsigned char *at = take(c, size);
    value = 0;
    for (size_t i = 0; i < size && at != NULL; i++) {
        value |= (uint64_t)at[i] << (8 * i);
    }
    return value;
}

static void code_u64(struct codec *c, uint64_t *value)
{
    *value = code_integer(c, *value, 8);
}

static void code_u32(struct codec *c, uint32_t *value)
{
    *value = (uint32_t)code_integer(c, *value, 4);
}

static void code_i32(struct codec *c, int32_t *value)
{
    *value = (int32_t)(uint32_t)code_integer(c, (uint32_t)*value, 4);
}

static void code_text(struct codec *c, const char **text)
{
    uint32_t size = c->out != NULL ? (uint32_t)strlen(*text) + 1 : 0;
    code_u32(c, &size);
    if (c->out != NULL) {
        text_add_bytes(c->out, *text, size);
        return;
    }
    const char *at = take(c, size);
    /* Ends with its NUL and has no other. */
    if (at == NULL || size == 0 || memchr(at, '\0', size) != at + size - 1) {
        c->failed = true;
        at = "";
    }
    *text = at;
}

/* The array itself, or room for `count` items. */
static void *code_array(struct codec *c, const void *array, int32_t *count, size_t size)
{
    code_i32(c, count);
    if (c->out != NULL) {
        return (void *)(uintptr_t)array;
    }
    if (c->failed || *count < 0 || *count > MAX_ITEMS || (size_t)*count > c->left) {
        c->failed = true;
        *count = 0;
    }
    void *items = *count > 0 ? arena_array(c->arrays, (size_t)*count, size) : NULL;
    c->failed |= *count > 0 && items == NULL;
    *count = items != NULL ? *count : 0;
    return items;
}

static void code_device(struct codec *c, struct attn_device_info *d)
{
    code_i32(c, &d->device.type);
    code_i32(c, &d->device.id);
    code_text(c, &d->name);
    code_text(c, &d->arch);
    code_text(c, &d->isa);
    code_text(c, &d->device_namespace);
    code_text(c, &d->uuid);
    code_i32(c, &d->compute_capability_major);
    code_i32(c, &d->compute_capability_minor);
    code_i32(c, &d->num_multiprocessors);
    uint64_t memory = (uint64_t)d->memory_bytes;
    code_u64(c, &memory);
    d->memory_bytes = (int64_t)memory;
}

static void code_range(struct codec *c, struct attn_range *range)
{
    code_i32(c, &range->min);
    code_i32(c, &range->max);
    code_i32(c, &range->multiple);
}

static void code_arrays(struct codec *c, struct attn_backend_caps *caps)
{
    struct attn_head_size_range *heads =
        code_array(c, caps->head_sizes, &caps->num_head_sizes, sizeof *heads);
    for (int32_t i = 0; i < caps->num_head_sizes; i++) {
        code_range(c, &heads[i].qk);
        code_range(c, &heads[i].v);
        code_i32(c, &heads[i].same);
    }
    struct attn_range *blocks =
        code_array(c, caps->block_sizes, &caps->num_block_sizes, sizeof *blocks);
    for (int32_t i = 0; i < caps->num_block_sizes; i++) {
        code_range(c, &blocks[i]);
    }
    struct attn_refused_combination *refused =
        code_array(c, caps->refused, &caps->num_refused, sizeof *refused);
    for (int32_t i = 0; i < caps->num_refused; i++) {
        code_u64(c, &refused[i].terms);
        code_u64(c, &refused[i].features);
        code_u64(c, &refused[i].kv_dtypes);
        code_text(c, &refused[i].why);
        code_u64(c, &refused[i].dtypes);
        code_u64(c, &refused[i].layer_kinds);
        code_u64(c, &refused[i].phases);
        code_range(c, &refused[i].head_size);
    }
    uint32_t *extensions =
        code_array(c, caps->extensions, &caps->num_extensions, sizeof *extensions);
    for (int32_t i = 0; i < caps->num_extensions; i++) {
        code_u32(c, &extensions[i]);
    }
    struct attn_vendor_code *codes =
        code_array(c, caps->vendor_codes, &caps->num_vendor_codes, sizeof *codes);
    for (int32_t i = 0; i < caps->num_vendor_codes; i++) {
        code_i32(c, &codes[i].list);
        code_i32(c, &codes[i].code);
        code_text(c, &codes[i].name);
    }
    caps->vendor_codes = codes;
    caps->vendor_code_stride = (int32_t)sizeof *codes;
    caps->extensions = extensions;
    caps->refused_stride = (int32_t)sizeof *refused;
    caps->head_sizes = heads;
    caps->block_sizes = blocks;
    caps->refused = refused;
}

/* Only those that the core knows are in its copy; they are plain data behind their header. */
static void code_extensions(struct codec *c, struct attn_backend_caps *caps)
{
    int32_t count = 0;
    for (const struct attn_ext *e = c->out != NULL ? caps->next : NULL; e != NULL; e = e->next) {
        count++;
    }
    code_i32(c, &count);
    const struct attn_ext *source = caps->next;
    struct attn_ext *last = NULL;
    for (int32_t i = 0; i < count && !c->failed; i++) {
        struct attn_ext header = c->out != NULL ? *source : (struct attn_ext){0};
        uint64_t size = header.struct_size;
        code_u32(c, &header.id);
        code_u32(c, &header.flags);
        code_u64(c, &size);
        if (c->out != NULL) {
            text_add_bytes(c->out, source + 1, (size_t)size - sizeof header);
            source = source->next;
            continue;
        }
        const void *data = size >= sizeof header && size <= c->left + sizeof header
                               ? take(c, (size_t)size - sizeof header)
                               : NULL;
        struct attn_ext *copy = data != NULL ? arena_alloc(c->arrays, (size_t)size) : NULL;
        if (copy == NULL) {
            c->failed = true;
            return;
        }
        *copy = (struct attn_ext){header.id, header.flags, (size_t)size, NULL};
        memcpy(copy + 1, data, (size_t)size - sizeof header);
        if (last != NULL) {
            last->next = copy;
        } else {
            caps->next = copy;
        }
        last = copy;
    }
}

static void code_backend(struct codec *c, struct attn_backend_caps *caps)
{
    code_text(c, &caps->name);
    code_text(c, &caps->variant);
    code_text(c, &caps->version);
    code_text(c, &caps->vendor);
    code_i32(c, &caps->device.type);
    code_i32(c, &caps->device.id);
    uint64_t *const masks[] = {
        &caps->kernels,       &caps->layer_kinds,   &caps->phases,
        &caps->dtypes,        &caps->kv_dtypes,     &caps->q_dtypes,
        &caps->terms,         &caps->features,      &caps->view_forms,
        &caps->layouts,       &caps->k_scale_forms, &caps->v_scale_forms,
        &caps->p_scale_forms, &caps->output_forms,  &caps->decode_write_kv_dtypes,
        &caps->cache_roles};
    for (size_t i = 0; i < sizeof masks / sizeof *masks; i++) {
        code_u64(c, masks[i]);
    }
    code_arrays(c, caps);
    int32_t *const numbers[] = {&caps->preferred_layout,  &caps->preferred_block_size,
                                &caps->graph_level,       &caps->graph_fill_seq_len,
                                &caps->reorder_threshold, &caps->kv_alignment,
                                &caps->io_alignment,      &caps->max_group,
                                &caps->max_num_q_heads,   &caps->max_speculative_tokens,
                                &caps->rank[0],           &caps->rank[1],
                                &caps->rank[2],           &caps->rank[3],
                                &caps->max_tables,        &caps->graph_max_query_len};
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++) {
        code_i32(c, numbers[i]);
    }
    code_extensions(c, caps);
}

static void code_head(struct codec *c, struct record *r)
{
    uint64_t *const key[] = {&r->key.state, &r->key.device,   &r->key.inode,
                             &r->key.size,  &r->key.modified, &r->key.changed};
    for (size_t i = 0; i < sizeof key / sizeof *key; i++) {
        code_u64(c, key[i]);
    }
    code_text(c, &r->file);
    code_i32(c, &r->deadline_ms);
    code_i32(c, &r->status);
    code_text(c, &r->field);
    code_text(c, &r->message);
    code_u32(c, &r->abi_version);
    code_text(c, &r->name);
    code_text(c, &r->version);
    code_text(c, &r->vendor);
}

void record_write(struct text *out, const struct record *record, const struct found *found)
{
    struct codec c = {.out = out};
    struct record head = *record;
    bool whole = record->status == ATTN_OK;
    int32_t num_devices = whole ? found->num_devices : 0,
            num_backends = whole ? found->num_backends : 0;
    const size_t start = out->length;
    if (whole && found->status != ATTN_OK) {
        head.field = found->error.field;
        head.message = found->error.message;
    }
    text_add_bytes(out, MAGIC, 8);
    code_integer(&c, RECORD_FORMAT, 8);
    code_integer(&c, 0, 8); /* size and sum come last */
    code_integer(&c, 0, 8);
    code_head(&c, &head);
    code_i32(&c, &num_devices);
    code_i32(&c, &num_backends);
    for (int32_t i = 0; i < num_devices; i++) {
        struct attn_device_info device = found->devices[i];
        code_device(&c, &device);
    }
    for (int32_t i = 0; i < num_backends; i++) {
        struct attn_backend_caps caps = found->backends[i].caps;
        code_backend(&c, &caps);
    }
    if (out->failed) {
        return;
    }
    unsigned char *header = (unsigned char *)out->data + start;
    uint64_t size = out->length - start - HEADER_SIZE;
    uint64_t sum = hash_bytes(HASH_INIT, header + HEADER_SIZE, (size_t)size);
    for (size_t i = 0; i < 8; i++) {
        header[16 + i] = (unsigned char)(size >> (8 * i));
        header[24 + i] = (unsigned char)(sum >> (8 * i));
    }
}

const char *record_read(struct record *record, const unsigned char *bytes, size_t size)
{
    struct codec c = {.at = bytes, .left = size};
    const void *magic = take(&c, 8);
    uint64_t format = code_integer(&c, 0, 8), length = code_integer(&c, 0, 8),
             sum = code_integer(&c, 0, 8);
    *record = (struct record){.file = ""};
    if (c.failed || memcmp(magic, MAGIC, 8) != 0) {
        return "is no record of a probe";
    }
    if (format != RECORD_FORMAT) {
        return "has another format";
    }
    if (length != c.left) {
        return length > c.left ? "is truncated" : "is longer than it says";
    }
    if (hash_bytes(HASH_INIT, c.at, c.left) != sum) {
        return "is damaged: its checksum disagrees";
    }
    code_head(&c, record);
    record->items = c.at;
    record->items_size = c.left;
    if (c.failed || !text_is_clean(record->field, ATTN_ERROR_FIELD_SIZE - 1) ||
        !text_is_clean(record->message, ATTN_ERROR_MESSAGE_SIZE - 1)) {
        return "is malformed";
    }
    return NULL;
}

bool record_report(const struct record *record, const struct attn_probe_sink *sink,
                   struct arena *arrays)
{
    struct codec c = {.at = record->items, .left = record->items_size, .arrays = arrays};
    int32_t num_devices = 0, num_backends = 0;
    code_i32(&c, &num_devices);
    code_i32(&c, &num_backends);
    for (int32_t i = 0; i < num_devices && !c.failed; i++) {
        struct attn_device_info device = {.struct_size = sizeof device};
        code_device(&c, &device);
        if (!c.failed) {
            sink->device(sink->user, &device, NULL);
        }
    }
    for (int32_t i = 0; i < num_backends && !c.failed; i++) {
        struct attn_backend_caps caps = {.struct_size = sizeof caps};
        code_backend(&c, &caps);
        if (!c.failed) {
            sink->backend(sink->user, &caps, NULL);
        }
    }
    return !c.failed && c.left == 0 && num_devices >= 0 && num_backends >= 0;
}
