/* SPDX-License-Identifier: Apache-2.0 */
#include "util/structs.h"

#include <attn/api.h>
#include <attn/draft/mm_encoder.h>
#include <attn/draft/recurrent.h>
#include <attn/plugin.h>
#include <stdbool.h>
#include <string.h>

/* No struct of any ABI is larger; a larger struct_size is garbage, and its tail may not be read. */
#define MAX_STRUCT_SIZE 65536
#define MAX_CHAIN 64
#define HEADER_SIZE (sizeof(size_t) + sizeof(void *))

static attn_status read_known(void *copy, size_t size, size_t minimum, const void *source,
                              const char *name, struct attn_error *error)
{
    size_t given = 0;

    memset(copy, 0, size);
    if (source == NULL) {
        return error_set(error, ATTN_ERROR_INVALID_ARGUMENT, name,
                         "%s is NULL; a struct is required", name);
    }
    memcpy(&given, source, sizeof given);
    if (given < minimum || given > MAX_STRUCT_SIZE) {
        return error_set(error, ATTN_ERROR_STRUCT_SIZE, name,
                         "%s.struct_size is %zu; allowed are %zu to %d", name, given, minimum,
                         MAX_STRUCT_SIZE);
    }
    memcpy(copy, source, given < size ? given : size);
    memcpy(copy, &size, sizeof size);
    return ATTN_OK;
}

attn_status table_read(void *copy, size_t size, size_t minimum, const void *source,
                       const char *name, struct attn_error *error)
{
    return read_known(copy, size, minimum, source, name, error);
}

attn_status struct_read(void *copy, size_t size, size_t minimum, const void *source,
                        const char *name, struct attn_error *error)
{
    const unsigned char *bytes = source;
    size_t given = 0;
    attn_status status = read_known(copy, size, minimum, source, name, error);

    if (status != ATTN_OK) {
        return status;
    }
    memcpy(&given, source, sizeof given);
    for (size_t at = size; at < given; at++) {
        if (bytes[at] != 0) {
            return error_set(error, ATTN_ERROR_STRUCT_SIZE, name,
                             "%s.struct_size is %zu and byte %zu is not 0; this library knows "
                             "%zu bytes, and an unknown tail has to be all zero",
                             name, given, at, size);
        }
    }
    return ATTN_OK;
}

attn_status element_read(void *copy, size_t size, const void *array, size_t given, int32_t index,
                         const char *name, struct attn_error *error)
{
    const unsigned char *source = (const unsigned char *)array + (size_t)index * given;
    memset(copy, 0, size);
    memcpy(copy, source, given < size ? given : size);
    for (size_t at = size; at < given; at++) {
        if (source[at] != 0) {
            return error_set(error, ATTN_ERROR_STRUCT_SIZE, name,
                             "elements of %zu bytes, and byte %zu of number %d is not 0; this "
                             "library knows %zu bytes, and an unknown tail has to be all zero",
                             given, at, index, size);
        }
    }
    return ATTN_OK;
}

attn_status struct_write(void *destination, const void *source, size_t size, size_t minimum)
{
    unsigned char *to = destination;
    size_t given = 0;
    size_t known = 0;

    if (destination == NULL) {
        return ATTN_ERROR_INVALID_ARGUMENT;
    }
    memcpy(&given, destination, sizeof given);
    if (given < minimum || given < HEADER_SIZE || given > MAX_STRUCT_SIZE) {
        return ATTN_ERROR_STRUCT_SIZE;
    }
    known = given < size ? given : size;
    memcpy(to + HEADER_SIZE, (const unsigned char *)source + HEADER_SIZE, known - HEADER_SIZE);
    memset(to + known, 0, given - known);
    return ATTN_OK;
}

const struct attn_ext *ext_find(const struct attn_ext *next, uint32_t id)
{
    for (int32_t i = 0; next != NULL && i < MAX_CHAIN; i++) {
        if (next->id == id) {
            return next;
        }
        next = next->next;
    }
    return NULL;
}

bool ext_same(const struct attn_ext *a, const struct attn_ext *b)
{
    while (a != NULL && b != NULL && a->id == b->id && a->struct_size == b->struct_size &&
           memcmp(a + 1, b + 1, a->struct_size - sizeof *a) == 0) {
        a = a->next;
        b = b->next;
    }
    return a == NULL && b == NULL;
}

/* Where an extension's size stands: drafts' ids come after the others. */
#define PLACE(id) ((id) < ATTN_EXT_DRAFT ? (id) : (id)-ATTN_EXT_DRAFT + 32)

/* By PLACE(id): the size in ABI 0.3, under which none can be, and the size here. */
static const struct {
    size_t minimum, size;
    bool is_declared; /* of the class whose unknown tail is ignored */
} sizes[] = {
    [ATTN_EXT_MLA_DESC] = {64, sizeof(struct attn_mla_desc)},
    [ATTN_EXT_RECURRENT_DESC] = {72, sizeof(struct attn_recurrent_desc)},
    [ATTN_EXT_MLA_WEIGHTS] = {64, sizeof(struct attn_mla_weights)},
    [ATTN_EXT_RECURRENT_WEIGHTS] = {56, sizeof(struct attn_recurrent_weights)},
    [ATTN_EXT_CONTEXT_PARALLEL] = {56, sizeof(struct attn_context_parallel)},
    [ATTN_EXT_BATCH_CONTEXT] = {56, sizeof(struct attn_batch_context_parallel)},
    [ATTN_EXT_BATCH_RECURRENT] = {88, sizeof(struct attn_batch_recurrent)},
    [ATTN_EXT_IO_MLA] = {72, sizeof(struct attn_io_mla)},
    [ATTN_EXT_IO_RECURRENT] = {48, sizeof(struct attn_io_recurrent)},
    [ATTN_EXT_IO_OUTPUT_QUANT] = {40, sizeof(struct attn_io_output_quant)},
    [ATTN_EXT_IO_ROPE] = {72, sizeof(struct attn_io_rope)},
    [ATTN_EXT_KV_QUANT_PARAMS] = {48, sizeof(struct attn_kv_quant_params)},
    [ATTN_EXT_CAPS_MLA] = {48, sizeof(struct attn_mla_caps), true},
    [ATTN_EXT_CAPS_RECURRENT] = {56, sizeof(struct attn_recurrent_caps), true},
    [PLACE(ATTN_EXT_DRAFT_MM_ENCODER)] = {40, sizeof(struct attn_mm_encoder_quant)},
    [PLACE(ATTN_EXT_DRAFT_MM_ENCODER_STATE)] = {40, sizeof(struct attn_mm_encoder_state)},
    [PLACE(ATTN_EXT_DRAFT_RECURRENT_RULE)] = {64, sizeof(struct attn_recurrent_rule)},
    [PLACE(ATTN_EXT_DRAFT_RECURRENT_SKIP)] = {32, sizeof(struct attn_recurrent_skip)},
    [PLACE(ATTN_EXT_DRAFT_RECURRENT_CAPS)] = {48, sizeof(struct attn_recurrent_rule_caps), true},
    [ATTN_EXT_LAYER_CACHES] = {40, sizeof(struct attn_layer_caches)},
    [ATTN_EXT_IO_CACHES] = {40, sizeof(struct attn_io_caches)}};

/* As struct_read does it: neither cut inside of what it always had, nor with a tail that says what
 * is not known here. */
static attn_status check_size(const struct attn_ext *ext, bool known, const char *name,
                              struct attn_error *error)
{
    const size_t place = PLACE(ext->id);
    bool sized = known && place < sizeof sizes / sizeof *sizes;
    size_t minimum = sized ? sizes[place].minimum : sizeof(struct attn_ext);
    if (ext->struct_size < minimum || ext->struct_size > MAX_STRUCT_SIZE) {
        return error_set(error, ATTN_ERROR_STRUCT_SIZE, name,
                         "extension %u of %s has struct_size %zu; allowed are %zu to %d", ext->id,
                         name, ext->struct_size, minimum, MAX_STRUCT_SIZE);
    }
    if (!sized || sizes[place].is_declared) {
        return ATTN_OK;
    }
    for (size_t at = sizes[place].size; at < ext->struct_size; at++) {
        if (((const unsigned char *)ext)[at] != 0) {
            return error_set(error, ATTN_ERROR_STRUCT_SIZE, name,
                             "extension %u of %s has struct_size %zu and byte %zu is not 0; this "
                             "library knows %zu bytes, and an unknown tail has to be all zero",
                             ext->id, name, ext->struct_size, at, sizes[place].size);
        }
    }
    return ATTN_OK;
}

static bool is_known(uint32_t id, const uint32_t *known, int32_t num_known)
{
    for (int32_t i = 0; i < num_known; i++) {
        if (known[i] == id) {
            return true;
        }
    }
    return false;
}

/* One of a chain, of which `before` are before it. */
static attn_status check_one(const struct attn_ext *chain, int32_t before,
                             const struct attn_ext *ext, bool known, const char *name,
                             struct attn_error *error)
{
    attn_status status = check_size(ext, known, name, error);
    if (status != ATTN_OK) {
        return status;
    }
    if (ext->flags & ~(ATTN_EXT_OPTIONAL | ATTN_FLAG_HINTS)) {
        return error_set(error, ATTN_ERROR_EXTENSION, name,
                         "extension %u of %s has flags %#x; allowed are %u (optional) and hints "
                         "(the upper half)",
                         ext->id, name, ext->flags, ATTN_EXT_OPTIONAL);
    }
    if ((ext->flags & ATTN_EXT_OPTIONAL) == 0 && !known) {
        return error_set(error, ATTN_ERROR_EXTENSION, name,
                         "extension %u of %s is not known here and not marked optional", ext->id,
                         name);
    }
    for (; before > 0; before--, chain = chain->next) {
        if (chain->id == ext->id) {
            return error_set(error, ATTN_ERROR_EXTENSION, name,
                             "extension %u is twice in the chain of %s", ext->id, name);
        }
    }
    return ATTN_OK;
}

/* *all: every extension is known. */
static attn_status check_chain(const struct attn_ext *chain, const uint32_t *known,
                               int32_t num_known, bool *all, const char *name,
                               struct attn_error *error)
{
    int32_t length = 0;
    *all = true;
    for (const struct attn_ext *ext = chain; ext != NULL; ext = ext->next, length++) {
        const bool is_ours = is_known(ext->id, known, num_known);
        attn_status status =
            length < MAX_CHAIN
                ? check_one(chain, length, ext, is_ours, name, error)
                : error_set(error, ATTN_ERROR_EXTENSION, name,
                            "the extension chain of %s is longer than %d", name, MAX_CHAIN);
        if (status != ATTN_OK) {
            return status;
        }
        *all &= is_ours;
    }
    return ATTN_OK;
}

attn_status ext_check(const struct attn_ext *next, const uint32_t *known, int32_t num_known,
                      const char *name, struct attn_error *error)
{
    bool all;
    return check_chain(next, known, num_known, &all, name, error);
}

attn_status ext_narrow(const struct attn_ext **next, const uint32_t *known, int32_t num_known,
                       struct ext_room *room, const char *name, struct attn_error *error)
{
    const struct attn_ext *chain = *next, **last = next;
    size_t used = 0;
    bool all;
    attn_status status = check_chain(chain, known, num_known, &all, name, error);
    if (status != ATTN_OK || all) {
        return status;
    }
    for (; chain != NULL; chain = chain->next) {
        if (!is_known(chain->id, known, num_known)) {
            continue;
        }
        if (chain->struct_size > sizeof room->bytes - used) {
            return error_set(error, ATTN_ERROR_EXTENSION, name,
                             "the extensions of %s that are known here take more than %d bytes, "
                             "which they may not next to one that is not known",
                             name, ATTN_EXT_COPIED_BYTES);
        }
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
