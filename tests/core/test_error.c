/* SPDX-License-Identifier: Apache-2.0 */
/* Errors, text and structs of the util room. */
#include <string.h>

#include <attn/api.h>

#include "util/arena.h"
#include "util/device.h"
#include "util/error.h"
#include "util/structs.h"
#include "util/tensor.h"
#include "util/text.h"
#include "support/services.h"
#include "support/test.h"

TEST(error_names_field_and_message)
{
    struct attn_error error = ATTN_ERROR_INIT;
    assert_int_equal(error_set(&error, ATTN_ERROR_LIMIT, "num_reqs", "%d; at most %d", 9, 8),
                     ATTN_ERROR_LIMIT);
    assert_int_equal(error.status, ATTN_ERROR_LIMIT);
    assert_string_equal(error.field, "num_reqs");
    assert_string_equal(error.message, "9; at most 8");
    assert_int_equal(error_set(NULL, ATTN_ERROR_IO, "f", "x"), ATTN_ERROR_IO);
}

/* Nothing past the caller's struct_size is written, whatever the size. */
TEST(error_stays_in_its_storage)
{
    for (size_t size = 0; size <= sizeof(struct attn_error); size++) {
        struct attn_error error;
        memset(&error, 0x5a, sizeof error);
        error.struct_size = size;
        error_set_text(&error, ATTN_ERROR_IO, "field", "a message of some length");
        for (size_t at = size < sizeof size ? sizeof size : size; at < sizeof error; at++) {
            assert_int_equal(((unsigned char *)&error)[at], 0x5a);
        }
    }
}

TEST(error_cuts_at_a_character)
{
    struct attn_error error = ATTN_ERROR_INIT;
    char text[2000];
    /* One byte, then two-byte characters: the last one that fits would be cut in half. */
    text[0] = 'x';
    for (size_t i = 1; i + 2 < sizeof text; i += 2) {
        text[i] = '\xc3';
        text[i + 1] = '\xa9';
    }
    text[sizeof text - 1] = '\0';
    error_set_text(&error, ATTN_ERROR_IO, NULL, text);
    assert_int_equal(strlen(error.message), ATTN_ERROR_MESSAGE_SIZE - 1);
    assert_true(text_is_clean(error.message, sizeof error.message));
    error_set_text(&error, ATTN_ERROR_IO, text, text + 1);
    assert_int_equal(strlen(error.message), ATTN_ERROR_MESSAGE_SIZE - 2);
    assert_true(text_is_clean(error.message, sizeof error.message));
    assert_int_equal(strlen(error.field), ATTN_ERROR_FIELD_SIZE - 1);
}

/* A plugin's error: statuses of the ABI and clean text alone are passed on. */
TEST(error_relays_what_is_known)
{
    static const struct {
        attn_status given, status;
        const char *text, *message;
    } cases[] = {{ATTN_ERROR_DEVICE, ATTN_ERROR_DEVICE, "out of lanes", "out of lanes"},
                 {4711, ATTN_ERROR_PLUGIN, "out of lanes", "out of lanes"},
                 {ATTN_ERROR_DEVICE, ATTN_ERROR_DEVICE, "", "without a text"},
                 {ATTN_ERROR_DEVICE, ATTN_ERROR_DEVICE, "\x1b[31m", "not clean UTF-8"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct attn_error error = ATTN_ERROR_INIT, from = ATTN_ERROR_INIT;
        strcpy(from.message, cases[i].text);
        assert_int_equal(error_relay(&error, cases[i].given, &from), cases[i].status);
        assert_int_equal(error.status, cases[i].status);
        assert_non_null(strstr(error.message, cases[i].message));
    }
}

TEST(status_has_text)
{
    assert_string_equal(status_text(ATTN_OK), "ok");
    assert_string_equal(status_text(ATTN_ERROR_INTERNAL), "internal error");
    assert_string_equal(status_text(-1), "unknown status");
    assert_string_equal(status_text(21), "unknown status");
}

TEST(text_checks)
{
    char longest[65];
    assert_true(text_is_clean("\xe2\x82\xac 5", 5));
    assert_false(text_is_clean("\xe2\x82\xac 5", 4));
    assert_false(text_is_clean("\xe2\x82", 9));
    assert_false(text_is_clean("\xc0\x80", 9));
    assert_false(text_is_clean("\xed\xa0\x80", 9));
    assert_false(text_is_clean("\xf4\x90\x80\x80", 9));
    assert_false(text_is_clean("\xe0\x9f\xbf", 9)); /* overlong */
    assert_false(text_is_clean("\xf0\x8f\xbf\xbf", 9));
    assert_false(text_is_clean("a\nb", 9));
    assert_false(text_is_clean("\xc2\x9f", 9)); /* the last C1 control character */
    assert_true(text_is_clean("\xc2\xa0", 9));
    assert_false(text_is_clean(NULL, 9));
    memset(longest, 'a', sizeof longest);
    longest[64] = '\0';
    assert_false(text_is_name(longest));
    longest[63] = '\0';
    assert_true(text_is_name(longest));
    assert_false(text_is_name(""));
    assert_false(text_is_name("9a"));
    assert_false(text_is_name("cpu-ref"));
    assert_true(text_is_name("cpu_ref2"));
}

/* attn_limits of a later ABI. */
struct wide {
    struct attn_limits known;
    int64_t newer;
};

TEST(struct_read_older_and_newer)
{
    struct wide wide = {{sizeof wide, NULL, 7, 8}, 0};
    struct attn_collectives table, newer[2] = {{.struct_size = 64, .world_size = 7}};
    struct attn_limits limits;
    struct attn_error error = ATTN_ERROR_INIT;
    memset(&table, 0xff, sizeof table);
    assert_ok(struct_read(&table, ABI_COLLECTIVES, newer, &error));
    assert_int_equal(table.struct_size, sizeof table);
    assert_int_equal(table.world_size, 7);
    assert_int_equal(table.max_exchange_bytes, 0);
    newer->struct_size = sizeof newer;
    newer[1].rank = 1; /* a table or a declaration may know more */
    assert_ok(struct_read(&table, ABI_COLLECTIVES, newer, &error));
    assert_ok(struct_read(&limits, ABI_LIMITS, &wide, &error));
    assert_int_equal(limits.struct_size, sizeof limits);
    assert_int_equal(limits.max_num_tokens, 8);
    wide.newer = (int64_t)1 << 56;
    assert_int_equal(struct_read(&limits, ABI_LIMITS, &wide, &error), ATTN_ERROR_STRUCT_SIZE);
    assert_non_null(strstr(error.message, "byte 47"));
    wide.known.struct_size = sizeof limits - 1;
    assert_int_equal(struct_read(&limits, ABI_LIMITS, &wide, &error), ATTN_ERROR_STRUCT_SIZE);
    wide.known.struct_size = SIZE_MAX;
    assert_int_equal(struct_read(&limits, ABI_LIMITS, &wide, &error), ATTN_ERROR_STRUCT_SIZE);
    assert_int_equal(struct_read(&limits, ABI_LIMITS, NULL, NULL), ATTN_ERROR_INVALID_ARGUMENT);
}

TEST(struct_read_checks_numbers)
{
    struct attn_limits limits, given = {sizeof given, NULL, 1, 1, 0, 0, 0, 0};
    struct attn_error error = ATTN_ERROR_INIT;
    assert_ok(struct_read(&limits, ABI_LIMITS, &given, &error));
    given.max_num_reqs = 0;
    assert_int_equal(struct_read(&limits, ABI_LIMITS, &given, &error), ATTN_ERROR_INVALID_ARGUMENT);
    assert_string_equal(error.field, "max_num_reqs");
    given.max_num_reqs = given.reserved = 1;
    assert_int_equal(struct_read(&limits, ABI_LIMITS, &given, &error), ATTN_ERROR_INVALID_ARGUMENT);
    assert_string_equal(error.field, "reserved");
}

TEST(struct_write_keeps_header)
{
    const struct attn_ext *const mark = (const struct attn_ext *)&state;
    const struct attn_limits ours = {sizeof ours, NULL, 7, 8};
    struct wide theirs = {{sizeof theirs, mark, 1, 2}, 3};
    assert_ok(struct_write(&theirs, &ours, ABI_LIMITS));
    assert_int_equal(theirs.known.struct_size, sizeof theirs);
    assert_ptr_equal(theirs.known.next, mark);
    assert_int_equal(theirs.known.max_num_reqs, 7);
    assert_int_equal(theirs.newer, 0);
    theirs.known.struct_size = 8;
    assert_int_equal(struct_write(&theirs, &ours, ABI_LIMITS), ATTN_ERROR_STRUCT_SIZE);
    assert_int_equal(struct_write(NULL, &ours, ABI_LIMITS), ATTN_ERROR_INVALID_ARGUMENT);
}

/* A row's size in ABI 0.3 is no larger than today's, and an id leads to its row in its chain alone.
 */
TEST(every_struct_has_a_row)
{
    for (int32_t i = 0; i < NUM_ABI; i++) {
        const struct abi_struct *row = &abi_structs[i];
        assert_in_range(row->minimum, 1, row->size);
        assert_ptr_equal(abi_find(row->ext_id, row->on), i >= ABI_FIRST_EXT ? row : NULL);
        assert_null(abi_find(row->ext_id, ABI_LIMITS));
    }
    assert_null(abi_find(15, ABI_LAYER_DESC));
    assert_null(abi_find(ATTN_EXT_VENDOR, ABI_LAYER_DESC));
}

TEST(extensions)
{
    const uint32_t vendors[] = {0x10007};
    struct attn_ext last = {8, ATTN_EXT_OPTIONAL, sizeof last, NULL};
    struct attn_ext first = {0x10007, 0, sizeof first, &last};
    assert_ok(ext_check(&first, ABI_LIMITS, vendors, 1, NULL));
    assert_ptr_equal(ext_find(&first, 8), &last);
    assert_null(ext_find(&first, 9));
    last.flags = 0;
    assert_int_equal(ext_check(&first, ABI_LIMITS, vendors, 1, NULL), ATTN_ERROR_EXTENSION);
    last.flags = ATTN_EXT_OPTIONAL;
    last.struct_size = 8;
    assert_int_equal(ext_check(&first, ABI_LIMITS, vendors, 1, NULL), ATTN_ERROR_STRUCT_SIZE);
    last.struct_size = sizeof last;
    last.next = &first; /* a ring ends */
    assert_int_equal(ext_check(&first, ABI_LIMITS, vendors, 1, NULL), ATTN_ERROR_EXTENSION);
    assert_null(ext_find(&first, 9));
}

TEST(chains_have_a_longest)
{
    enum { LONGEST = 64 };
    struct attn_ext chain[LONGEST + 1];
    for (int32_t i = 0; i <= LONGEST; i++) {
        chain[i] = (struct attn_ext){8 + (uint32_t)i, ATTN_EXT_OPTIONAL, sizeof *chain,
                                     i < LONGEST ? &chain[i + 1] : NULL};
    }
    assert_ok(ext_check(&chain[1], ABI_LIMITS, NULL, 0, NULL));
    struct attn_error error = ATTN_ERROR_INIT;
    assert_int_equal(ext_check(&chain[0], ABI_LIMITS, NULL, 0, &error), ATTN_ERROR_EXTENSION);
    assert_non_null(strstr(error.message, "longer than 64"));
}

TEST(extensions_are_compared_by_content)
{
    struct counted {
        struct attn_ext ext;
        int64_t value;
    } a = {{0x10007, 0, sizeof a, NULL}, 7}, b = a;
    assert_true(ext_same(&a.ext, &b.ext, 0));
    assert_false(ext_same(&a.ext, NULL, 0));
    b.value = 8;
    assert_false(ext_same(&a.ext, &b.ext, 0));
}

/* Elements that are longer than known here, each with its own tail. */
TEST(elements_of_an_array)
{
    struct {
        struct attn_block_memory known;
        int64_t newer;
    } array[] = {{{NULL, 1}, 0}, {{NULL, 2}, 0}, {{NULL, 3}, 4}};
    struct attn_error error = ATTN_ERROR_INIT;
    struct attn_block_memory copy;
    for (int32_t i = 0; i < 3; i++) {
        assert_int_equal(element_read(&copy, ABI_BLOCK_MEMORY, array, sizeof *array, i, &error),
                         i < 2 ? ATTN_OK : ATTN_ERROR_STRUCT_SIZE);
        assert_int_equal(copy.stride, i + 1);
    }
    assert_true(element_stride_is_good(ABI_BLOCK_MEMORY, sizeof copy));
    assert_false(element_stride_is_good(ABI_BLOCK_MEMORY, sizeof copy - 1));
    assert_false(element_stride_is_good(ABI_BLOCK_MEMORY, MAX_ELEMENT + 1));
}

/* A product that overflows to a few bytes is no small array. */
TEST(arrays_of_an_arena)
{
    const struct attn_host host = {
        .struct_size = sizeof host, .allocate = services_allocate, .release = services_release};
    struct arena arena;
    arena_init(&arena, &host);
    assert_null(arena_array(&arena, SIZE_MAX / 4 + 2, 4));
    assert_non_null(arena_array(&arena, 2, 4));
    arena_finish(&arena);
}

TEST(what_a_tensor_has_to_be)
{
    float data[16];
    int64_t shape[] = {2, 4}, strides[] = {8, 1};
    struct attn_error error = ATTN_ERROR_INIT;
    struct attn_tensor tensor = {
        data, {ATTN_DEVICE_CPU, 0}, 2, {ATTN_CODE_FLOAT, 32, 1}, shape, strides, 0};
    struct tensor_need need = {"x", 2, {TENSOR_ANY, 4}};
    assert_ok(tensor_check(&tensor, &need, NULL, &error));
    strides[1] = 2;
    REFUSED(&error, "x", tensor_check(&tensor, &need, "a", &error));
    assert_string_equal(
        error.message,
        "layer 'a': x is [2, 4] float32 with a last stride of 2; [any, 4] f16, bf16 or "
        "f32, the last dimension contiguous, is needed");
    need.strided = true;
    need.shape[1] = 3;
    REFUSED(&error, "x", tensor_check(&tensor, &need, NULL, &error));
    need.more = 2;
    assert_ok(tensor_check(&tensor, &need, NULL, &error));
    tensor.data = NULL;
    REFUSED(&error, "x", tensor_check(&tensor, &need, NULL, &error));
    need.shape[1] = 0;
    assert_ok(tensor_check(&tensor, &need, NULL, &error));
    tensor.dtype.code = ATTN_CODE_INT;
    REFUSED(&error, "x", tensor_check(&tensor, &need, NULL, &error));
    need.dtype = TENSOR_BYTES;
    assert_ok(tensor_check(&tensor, &need, NULL, &error));
}

TEST(devices_have_names)
{
    static const struct {
        struct attn_device device;
        const char *text;
    } devices[] = {{{0, 0}, "cpu:0"},
                   {{ATTN_DEVICE_CPU, 0}, "cpu:0"},
                   {{ATTN_DEVICE_CUDA, 1}, "cuda:1"},
                   {{ATTN_DEVICE_CUDA_HOST, 0}, "cuda_host:0"},
                   {{ATTN_DEVICE_CUDA_MANAGED, 0}, "cuda_managed:0"},
                   {{ATTN_DEVICE_ROCM, 12}, "rocm:12"},
                   {{ATTN_DEVICE_ROCM_HOST, 0}, "rocm_host:0"},
                   {{ATTN_DEVICE_ONEAPI, 0}, "oneapi:0"},
                   {{ATTN_DEVICE_EXTENSION, -3}, "extension:-3"},
                   {{99, 0}, "type 99:0"}};
    for (size_t i = 0; i < sizeof devices / sizeof *devices; i++) {
        char text[DEVICE_TEXT_SIZE];
        assert_string_equal(device_text(devices[i].device, text), devices[i].text);
    }
}

/* Extensions of this ABI: not cut, and what a newer one adds is zero. */
TEST(extension_sizes)
{
    struct {
        struct attn_context_parallel cp;
        uint32_t newer[2];
    } given = {.cp = {.ext = {ATTN_EXT_CONTEXT_PARALLEL, 0, sizeof given, NULL}}};

    assert_ok(ext_check(&given.cp.ext, ABI_LAYER_DESC, NULL, 0, NULL));
    given.newer[1] = 1;
    assert_int_equal(ext_check(&given.cp.ext, ABI_LAYER_DESC, NULL, 0, NULL),
                     ATTN_ERROR_STRUCT_SIZE);
    given.cp.ext.struct_size = sizeof given.cp;
    assert_ok(ext_check(&given.cp.ext, ABI_LAYER_DESC, NULL, 0, NULL));
    given.cp.ext.struct_size = 28; /* through the middle of a pointer */
    assert_int_equal(ext_check(&given.cp.ext, ABI_LAYER_DESC, NULL, 0, NULL),
                     ATTN_ERROR_STRUCT_SIZE);
}

/* A copy is as large as the core knows it: zero where an older struct ends, without what a newer
 * one adds. */
TEST(extension_copies)
{
    struct {
        struct attn_context_parallel cp;
        uint64_t newer[2];
    } copy, given = {.cp = {.ext = {ATTN_EXT_CONTEXT_PARALLEL, ATTN_EXT_OPTIONAL, sizeof given,
                                    &given.cp.ext},
                            .interleave = 3,
                            .reserved = 5},
                     .newer = {1, 2}};

    memset(&copy, 0xa5, sizeof copy);
    ext_copy(&copy.cp.ext, &given.cp.ext, sizeof copy.cp);
    assert_int_equal(copy.cp.ext.struct_size, sizeof copy.cp);
    assert_null(copy.cp.ext.next);
    assert_int_equal(copy.cp.ext.flags, ATTN_EXT_OPTIONAL);
    assert_int_equal(copy.cp.interleave, 3);
    assert_int_equal(copy.cp.reserved, 5);
    assert_int_equal(copy.newer[0], 0xa5a5a5a5a5a5a5a5);
    given.cp.ext.struct_size = offsetof(struct attn_context_parallel, reserved);
    ext_copy(&copy.cp.ext, &given.cp.ext, sizeof copy.cp);
    assert_int_equal(copy.cp.ext.struct_size, sizeof copy.cp);
    assert_int_equal(copy.cp.interleave, 3);
    assert_int_equal(copy.cp.reserved, 0);
}

/* What a newer vendor says at the end of a declaration is ignored. */
TEST(declared_sizes)
{
    struct {
        struct attn_mla_caps mla;
        uint32_t newer[2];
    } given = {.mla = {.ext = {ATTN_EXT_CAPS_MLA, 0, sizeof given, NULL}}, .newer = {1, 2}};

    assert_ok(ext_check(&given.mla.ext, ABI_BACKEND_CAPS, NULL, 0, NULL));
    given.mla.ext.struct_size = 28;
    assert_int_equal(ext_check(&given.mla.ext, ABI_BACKEND_CAPS, NULL, 0, NULL),
                     ATTN_ERROR_STRUCT_SIZE);
}

/* Both macros, in the language in which this file is. */
TEST(table_slots)
{
    const struct attn_kernels all = {.struct_size = sizeof all};
    struct attn_kernels old = {.struct_size = offsetof(struct attn_kernels, copy)};
    assert_true(ATTN_HAS_FIELD(&all, update_block_table));
    assert_false(ATTN_HAS_SLOT(&all, update_block_table)); /* NULL */
    assert_true(ATTN_HAS_FIELD(&old, copy_blocks));
    assert_false(ATTN_HAS_FIELD(&old, copy));
    memset(&old.copy, 0xff, sizeof old.copy); /* memory that is another's */
    assert_false(ATTN_HAS_SLOT(&old, copy));
    assert_true(ATTN_VERSION_SERVES(ATTN_ABI_VERSION, ATTN_ABI_VERSION + 7));
    assert_true(ATTN_VERSION_SERVES(0, ATTN_ABI_VERSION_MIN));
    assert_false(ATTN_VERSION_SERVES(0, ATTN_ABI_VERSION_MIN - 1));
    assert_false(ATTN_VERSION_SERVES(ATTN_ABI_VERSION + 1, ATTN_ABI_VERSION + 7));
    assert_true(ATTN_VERSION_ACCEPTS(ATTN_ABI_VERSION + 7));
    assert_false(ATTN_VERSION_ACCEPTS(ATTN_ABI_VERSION_MIN - 1));
    assert_false(ATTN_VERSION_ACCEPTS(ATTN_ABI_VERSION + (1 << 16)));
}
