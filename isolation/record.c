/* SPDX-License-Identifier: Apache-2.0 */
/* The answer of a probe as bytes. */
#include "isolation.h"

#include <attn/plugin.h>
#include <string.h>

#include "runtime/probe.h"
#include "util/hash.h"
#include "util/structs.h"

#define MAGIC "ATTNPROB"
#define MAX_ITEMS 4096

struct header {
    char magic[8];
    uint64_t format, size, sum; /* size and FNV-1a of the payload */
};

/* One walk for both directions, so that they cannot differ: with `out` it appends, else it reads.
 */
struct codec {
    struct text *out;
    const unsigned char *at;
    size_t left;
    struct arena *arrays;
    bool failed;
};

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

/* A number or a struct of numbers, as this machine has it: a record is of one machine. */
static void code_bytes(struct codec *c, void *value, size_t size)
{
    if (c->out != NULL) {
        text_add_bytes(c->out, value, size);
        return;
    }
    const void *at = take(c, size);
    memset(value, 0, size);
    if (at != NULL) {
        memcpy(value, at, size);
    }
}

static void code_text(struct codec *c, const char **text)
{
    uint32_t size = c->out != NULL ? (uint32_t)strlen(*text) + 1 : 0;
    code_bytes(c, &size, sizeof size);
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

#define MAX_IMAGE 512 /* bytes of a struct that is coded */
ATTN_STATIC_ASSERT(sizeof(struct attn_backend_caps) <= MAX_IMAGE, "the largest of them");

static void code_array(struct codec *c, void *ours, const struct abi_field *field);

/* A struct as its bytes without what points elsewhere, then its texts and arrays in the order of
 * its fields. What is read points into the bytes and `arrays`. */
static void code_struct(struct codec *c, void *ours, enum abi_id id)
{
    const struct abi_struct *row = &abi_structs[id];
    unsigned char image[MAX_IMAGE] = {0};
    if (c->out != NULL) {
        memcpy(image, ours, row->size);
        for (const struct abi_field *f = row->fields; f->name != NULL; f++) {
            if (f->kind == FIELD_TEXT || f->kind == FIELD_ARRAY) {
                memset(image + f->at, 0, sizeof(void *));
            }
        }
        if (row->class != ABI_ELEMENT) { /* struct_size and next */
            memset(image, 0, sizeof(size_t) + sizeof(void *));
        }
        text_add_bytes(c->out, image, row->size);
    } else {
        code_bytes(c, ours, row->size);
        if (row->class != ABI_ELEMENT) {
            memcpy(ours, &row->size, sizeof row->size);
            memset((char *)ours + sizeof(size_t), 0, sizeof(void *));
        }
    }
    for (const struct abi_field *f = row->fields; f->name != NULL; f++) {
        if (f->kind == FIELD_TEXT) {
            const char *text = field_pointer(ours, f);
            code_text(c, &text);
            memcpy((char *)ours + f->at, &text, sizeof text);
        } else if (f->kind == FIELD_ARRAY) {
            code_array(c, ours, f);
        }
    }
}

static void code_array(struct codec *c, void *ours, const struct abi_field *field)
{
    const size_t size = abi_structs[field->max].size;
    const void *array = field_pointer(ours, field);
    unsigned char *items = (unsigned char *)(uintptr_t)array;
    int32_t count;
    memcpy(&count, (char *)ours + field->min, sizeof count);
    if (c->out == NULL) {
        const bool good =
            !c->failed && count >= 0 && count <= MAX_ITEMS && size * (size_t)count <= c->left;
        items = good && count > 0 ? arena_array(c->arrays, (size_t)count, size) : NULL;
        c->failed |= !good || (count > 0 && items == NULL);
        count = items != NULL ? count : 0;
        memcpy((char *)ours + field->min, &count, sizeof count);
        memcpy((char *)ours + field->at, &items, sizeof items);
    }
    for (int32_t i = 0; i < count; i++) {
        unsigned char item[MAX_IMAGE];
        memcpy(item, items + (size_t)i * size, size);
        code_struct(c, item, (enum abi_id)field->max);
        if (c->out == NULL) {
            memcpy(items + (size_t)i * size, item, size);
        }
    }
}

/* Only those that the core knows are in its copy; they are plain data after their header. */
static void code_extensions(struct codec *c, struct attn_backend_caps *caps)
{
    int32_t count = 0;
    const struct attn_ext *ext = c->out != NULL ? caps->next : NULL, **last = &caps->next;
    for (const struct attn_ext *e = ext; e != NULL; e = e->next) {
        count++;
    }
    code_bytes(c, &count, sizeof count);
    for (int32_t i = 0; i < count && !c->failed; i++) {
        uint32_t id = ext != NULL ? ext->id : 0;
        code_bytes(c, &id, sizeof id);
        const struct abi_struct *row = abi_find(id, ABI_BACKEND_CAPS);
        const size_t size = row != NULL ? row->size - sizeof *ext : 0;
        if (c->out != NULL) {
            text_add_bytes(c->out, ext + 1, size);
            ext = ext->next;
            continue;
        }
        const void *data = row != NULL ? take(c, size) : NULL;
        struct attn_ext *copy = data != NULL ? arena_alloc(c->arrays, row->size) : NULL;
        if (copy == NULL) {
            c->failed = true;
            return;
        }
        *copy = (struct attn_ext){id, 0, row->size, NULL};
        memcpy(copy + 1, data, size);
        *last = copy;
        last = &copy->next;
    }
}

static void code_head(struct codec *c, struct record *r)
{
    code_bytes(c, &r->key, sizeof r->key);
    code_text(c, &r->file);
    code_bytes(c, &r->deadline_ms, sizeof r->deadline_ms);
    code_bytes(c, &r->status, sizeof r->status);
    code_text(c, &r->field);
    code_text(c, &r->message);
    code_bytes(c, &r->abi_version, sizeof r->abi_version);
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
    struct header header = {MAGIC, RECORD_FORMAT, 0, 0}; /* size and sum come last */
    code_bytes(&c, &header, sizeof header);
    code_head(&c, &head);
    code_bytes(&c, &num_devices, sizeof num_devices);
    code_bytes(&c, &num_backends, sizeof num_backends);
    for (int32_t i = 0; i < num_devices; i++) {
        struct attn_device_info device = found->devices[i];
        code_struct(&c, &device, ABI_DEVICE_INFO);
    }
    for (int32_t i = 0; i < num_backends; i++) {
        struct attn_backend_caps caps = found->backends[i].caps;
        code_struct(&c, &caps, ABI_BACKEND_CAPS);
        code_extensions(&c, &caps);
    }
    if (out->failed) {
        return;
    }
    char *at = out->data + start;
    header.size = out->length - start - sizeof header;
    header.sum = hash_bytes(HASH_INIT, at + sizeof header, (size_t)header.size);
    memcpy(at, &header, sizeof header);
}

const char *record_read(struct record *record, const unsigned char *bytes, size_t size)
{
    struct codec c = {.at = bytes, .left = size};
    struct header header;
    code_bytes(&c, &header, sizeof header);
    *record = (struct record){.file = ""};
    if (c.failed || memcmp(header.magic, MAGIC, sizeof header.magic) != 0) {
        return "is no record of a probe";
    }
    if (header.format != RECORD_FORMAT) {
        return "has another format";
    }
    if (header.size != c.left) {
        return header.size > c.left ? "is truncated" : "is longer than it says";
    }
    if (hash_bytes(HASH_INIT, c.at, c.left) != header.sum) {
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
    code_bytes(&c, &num_devices, sizeof num_devices);
    code_bytes(&c, &num_backends, sizeof num_backends);
    for (int32_t i = 0; i < num_devices && !c.failed; i++) {
        struct attn_device_info device;
        code_struct(&c, &device, ABI_DEVICE_INFO);
        if (!c.failed) {
            sink->device(sink->user, &device, NULL);
        }
    }
    for (int32_t i = 0; i < num_backends && !c.failed; i++) {
        struct attn_backend_caps caps;
        code_struct(&c, &caps, ABI_BACKEND_CAPS);
        code_extensions(&c, &caps);
        caps.refused_stride = (int32_t)sizeof *caps.refused;
        caps.vendor_code_stride = (int32_t)sizeof *caps.vendor_codes;
        if (!c.failed) {
            sink->backend(sink->user, &caps, NULL);
        }
    }
    return !c.failed && c.left == 0 && num_devices >= 0 && num_backends >= 0;
}
