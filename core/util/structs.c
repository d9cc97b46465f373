/* SPDX-License-Identifier: Apache-2.0 */
#include "util/structs.h"

#include <attn/types.h>
#include <stdio.h>
#include <string.h>

/* No struct of any ABI is larger; a larger struct_size is garbage, and its tail may not be read. */
#define MAX_STRUCT_SIZE 65536
#define HEADER_SIZE (sizeof(size_t) + sizeof(void *))

/* The first byte of an unknown tail that is not 0, or `given`. */
static size_t find_unknown(const void *source, size_t known, size_t given)
{
    size_t at = known < given ? known : given;
    while (at < given && ((const unsigned char *)source)[at] == 0) {
        at++;
    }
    return at;
}

static attn_status refuse_tail(const char *what, uint32_t id, size_t given, size_t at, size_t known,
                               struct attn_error *error)
{
    char which[40] = "";
    if (id != 0) {
        snprintf(which, sizeof which, "extension %u, ", id);
    }
    return error_set(error, ATTN_ERROR_STRUCT_SIZE, what,
                     "%s%s.struct_size is %zu and byte %zu is not 0; this library knows %zu bytes, "
                     "and an unknown tail has to be all zero",
                     which, what, given, at, known);
}

attn_status struct_check(const void *ours, enum abi_id id, const char *layer,
                         struct attn_error *error)
{
    const char *mark = layer != NULL ? "'" : "", *name = layer != NULL ? "layer " : "";
    const char *whose = layer != NULL ? layer : abi_structs[id].name;
    for (const struct abi_field *f = abi_structs[id].fields; f->name != NULL; f++) {
        const void *at = (const char *)ours + f->at;
        int32_t number = 0;
        uint64_t mask = 0;
        if (f->kind == FIELD_INT || f->kind == FIELD_CODE) {
            memcpy(&number, at, sizeof number);
            BAD_IF((number < f->min || number > f->max) &&
                       !(f->kind == FIELD_CODE && number >= ATTN_VENDOR_CODE),
                   f->name, "%s%s%s%s: %s is %d; allowed are %d to %d", name, mark, whose, mark,
                   f->name, number, f->min, f->max);
        } else if (f->kind == FIELD_MASK) {
            memcpy(&mask, at, sizeof mask);
            BAD_IF(mask >> f->max != 0, f->name,
                   "%s%s%s%s: %s is %#llx; bits from %d on are not known here", name, mark, whose,
                   mark, f->name, (unsigned long long)mask, f->max);
        }
    }
    return ATTN_OK;
}

attn_status struct_read(void *copy, enum abi_id id, const void *source, struct attn_error *error)
{
    const struct abi_struct *row = &abi_structs[id];
    size_t given = 0;
    memset(copy, 0, row->size);
    BAD_IF(source == NULL, row->name, "%s is NULL; a struct is required", row->name);
    memcpy(&given, source, sizeof given);
    ERROR_IF(given < row->minimum || given > MAX_STRUCT_SIZE, ATTN_ERROR_STRUCT_SIZE, row->name,
             "%s.struct_size is %zu; allowed are %zu to %d", row->name, given, row->minimum,
             MAX_STRUCT_SIZE);
    memcpy(copy, source, given < row->size ? given : row->size);
    memcpy(copy, &row->size, sizeof row->size);
    if (row->class == ABI_INPUT || row->class == ABI_OPEN) {
        const size_t unknown = find_unknown(source, row->size, given);
        if (unknown < given) {
            return refuse_tail(row->name, 0, given, unknown, row->size, error);
        }
    }
    if (row->class == ABI_INPUT || row->class == ABI_DECLARED) {
        const struct attn_ext *next;
        memcpy(&next, (const char *)copy + sizeof(size_t), sizeof next);
        TRY(ext_check(next, id, NULL, 0, error));
    }
    return row->class == ABI_INPUT ? struct_check(copy, id, NULL, error) : ATTN_OK;
}

bool element_stride_is_good(enum abi_id id, int64_t stride)
{
    return stride >= (int64_t)abi_structs[id].minimum && stride <= MAX_ELEMENT;
}

attn_status element_read(void *copy, enum abi_id id, const void *array, int64_t stride,
                         int32_t index, struct attn_error *error)
{
    const struct abi_struct *row = &abi_structs[id];
    const size_t given = (size_t)stride;
    const unsigned char *source = (const unsigned char *)array + (size_t)index * given;
    const size_t unknown = find_unknown(source, row->size, given);
    memset(copy, 0, row->size);
    memcpy(copy, source, given < row->size ? given : row->size);
    ERROR_IF(unknown != given, ATTN_ERROR_STRUCT_SIZE, row->name,
             "elements of %zu bytes, and byte %zu of number %d is not 0; this library knows %zu "
             "bytes, and an unknown tail has to be all zero",
             given, unknown, index, row->size);
    return ATTN_OK;
}

attn_status struct_write(void *destination, const void *source, enum abi_id id)
{
    const struct abi_struct *row = &abi_structs[id];
    unsigned char *to = destination;
    size_t given = 0;
    if (destination == NULL) {
        return ATTN_ERROR_INVALID_ARGUMENT;
    }
    memcpy(&given, destination, sizeof given);
    if (given < row->minimum || given > MAX_STRUCT_SIZE) {
        return ATTN_ERROR_STRUCT_SIZE;
    }
    const size_t known = given < row->size ? given : row->size;
    memcpy(to + HEADER_SIZE, (const unsigned char *)source + HEADER_SIZE, known - HEADER_SIZE);
    memset(to + known, 0, given - known);
    return ATTN_OK;
}

attn_status struct_give(void *destination, const void *source, enum abi_id id,
                        struct attn_error *error)
{
    attn_status status = struct_write(destination, source, id);
    return status == ATTN_OK ? status
                             : error_set(error, status, abi_structs[id].name,
                                         "it is at %p; a struct_size of at least %zu is needed",
                                         destination, abi_structs[id].minimum);
}

const void *field_pointer(const void *ours, const struct abi_field *field)
{
    const void *pointer;
    memcpy(&pointer, (const char *)ours + field->at, sizeof pointer);
    return pointer;
}

const void *ext_find(const struct attn_ext *next, uint32_t id)
{
    for (int32_t i = 0; next != NULL && i < MAX_CHAIN; i++) {
        if (next->id == id) {
            return next;
        }
        next = next->next;
    }
    return NULL;
}

bool ext_same(const struct attn_ext *a, const struct attn_ext *b, uint32_t but)
{
    for (;; a = a->next, b = b->next) {
        a = a != NULL && a->id == but ? a->next : a;
        b = b != NULL && b->id == but ? b->next : b;
        if (a == NULL || b == NULL) {
            return a == b;
        }
        if (a->id != b->id || a->struct_size != b->struct_size ||
            memcmp(a + 1, b + 1, a->struct_size - sizeof *a) != 0) {
            return false;
        }
    }
}

void ext_copy(struct attn_ext *copy, const struct attn_ext *ext, size_t size)
{
    memset(copy, 0, size);
    memcpy(copy, ext, ext->struct_size < size ? ext->struct_size : size);
    copy->struct_size = size;
    copy->next = NULL;
}

const struct attn_ext *ext_copy_chain(struct arena *arena, const struct attn_ext *given,
                                      enum abi_id on, bool all)
{
    const struct attn_ext *first = NULL, **last = &first;
    for (int32_t i = ABI_FIRST_EXT; i < NUM_ABI + all; i++) {
        const struct abi_struct *row = i < NUM_ABI ? &abi_structs[i] : NULL;
        for (const struct attn_ext *ext = given; ext != NULL; ext = ext->next) {
            if (row != NULL ? ext->id != row->ext_id || row->on != on
                            : !ext_is_handed_on(ext->id)) {
                continue;
            }
            const size_t size = row != NULL ? row->size : ext->struct_size;
            struct attn_ext *copy = arena_alloc(arena, size);
            if (copy == NULL) {
                return NULL;
            }
            ext_copy(copy, ext, size);
            *last = copy;
            last = &copy->next;
        }
    }
    return first;
}

/* Refuses an extension that is smaller than its first version, or whose unknown tail is not zero,
 * as struct_read does. `row` NULL: the core does not know the extension. */
static attn_status check_size(const struct attn_ext *ext, const struct abi_struct *row,
                              const char *name, struct attn_error *error)
{
    const size_t minimum = row != NULL ? row->minimum : sizeof(struct attn_ext);
    ERROR_IF(ext->struct_size < minimum || ext->struct_size > MAX_STRUCT_SIZE,
             ATTN_ERROR_STRUCT_SIZE, name,
             "extension %u of %s has struct_size %zu; allowed are %zu to %d", ext->id, name,
             ext->struct_size, minimum, MAX_STRUCT_SIZE);
    if (row == NULL || abi_structs[row->on].class == ABI_DECLARED) {
        return ATTN_OK;
    }
    const size_t unknown = find_unknown(ext, row->size, ext->struct_size);
    return unknown == ext->struct_size
               ? ATTN_OK
               : refuse_tail(name, ext->id, ext->struct_size, unknown, row->size, error);
}

static bool is_known(uint32_t id, enum abi_id on, const uint32_t *vendors, int32_t num_vendors)
{
    bool found = abi_find(id, on) != NULL;
    for (int32_t i = 0; i < num_vendors && !found; i++) {
        found = vendors[i] == id;
    }
    return found;
}

attn_status ext_check(const struct attn_ext *next, enum abi_id on, const uint32_t *vendors,
                      int32_t num_vendors, struct attn_error *error)
{
    const char *name = abi_structs[on].name;
    int32_t length = 0;
    for (const struct attn_ext *ext = next; ext != NULL; ext = ext->next, length++) {
        const struct abi_struct *row = abi_find(ext->id, on);
        ERROR_IF(length == MAX_CHAIN, ATTN_ERROR_EXTENSION, name,
                 "the extension chain of %s is longer than %d", name, MAX_CHAIN);
        TRY(check_size(ext, row, name, error));
        if (row != NULL && on != ABI_LAYER_DESC) { /* whose errors name the layer */
            TRY(struct_check(ext, (enum abi_id)(row - abi_structs), NULL, error));
        }
        ERROR_IF(ext->flags & ~(ATTN_EXT_OPTIONAL | ATTN_FLAG_HINTS), ATTN_ERROR_EXTENSION, name,
                 "extension %u of %s has flags %#x; allowed are %u (optional) and hints (the upper "
                 "half)",
                 ext->id, name, ext->flags, ATTN_EXT_OPTIONAL);
        ERROR_IF((ext->flags & ATTN_EXT_OPTIONAL) == 0 &&
                     !is_known(ext->id, on, vendors, num_vendors),
                 ATTN_ERROR_EXTENSION, name,
                 "extension %u of %s is not known here and not marked optional", ext->id, name);
        const struct attn_ext *before = next;
        for (int32_t i = 0; i < length; i++, before = before->next) {
            ERROR_IF(before->id == ext->id, ATTN_ERROR_EXTENSION, name,
                     "extension %u is twice in the chain of %s", ext->id, name);
        }
    }
    return ATTN_OK;
}

attn_status ext_check_readers(const struct attn_ext *next, enum abi_id on, uint64_t reads,
                              const char *layer, struct attn_error *error)
{
    for (; next != NULL; next = next->next) {
        const struct abi_struct *row = abi_find(next->id, on);
        BAD_IF(row != NULL && row->reader != NULL && !(next->flags & ATTN_EXT_OPTIONAL) &&
                   !(reads >> (row - &abi_structs[ABI_FIRST_EXT]) & 1),
               row->name, "%s%s%s%s is given; only a layer with %s reads it",
               layer != NULL ? "layer '" : "", layer != NULL ? layer : "",
               layer != NULL ? "': " : "", row->name, row->reader);
    }
    return ATTN_OK;
}

attn_status ext_narrow(const struct attn_ext **next, enum abi_id on, const uint32_t *vendors,
                       int32_t num_vendors, struct ext_room *room, struct attn_error *error)
{
    const struct attn_ext *chain = *next, **last = next, *all = *next;
    size_t used = 0;
    TRY(ext_check(chain, on, vendors, num_vendors, error));
    while (all != NULL && is_known(all->id, on, vendors, num_vendors)) {
        all = all->next;
    }
    if (all == NULL) {
        return ATTN_OK;
    }
    for (; chain != NULL; chain = chain->next) {
        if (!is_known(chain->id, on, vendors, num_vendors)) {
            continue;
        }
        ERROR_IF(chain->struct_size > sizeof room->bytes - used, ATTN_ERROR_EXTENSION,
                 abi_structs[on].name,
                 "the extensions of %s that are known here take more than %d bytes, which they may "
                 "not next to one that is not known",
                 abi_structs[on].name, ATTN_EXT_COPIED_BYTES);
        struct attn_ext *copy = (struct attn_ext *)(void *)(room->bytes + used);
        memcpy(copy, chain, chain->struct_size);
        used += (chain->struct_size + _Alignof(max_align_t) - 1) / _Alignof(max_align_t) *
                _Alignof(max_align_t);
        used = used < sizeof room->bytes ? used : sizeof room->bytes;
        *last = copy;
        last = &copy->next;
    }
    *last = NULL;
    return ATTN_OK;
}
