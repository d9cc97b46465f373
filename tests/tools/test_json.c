/* SPDX-License-Identifier: Apache-2.0 */
/* The JSON that tools write: escapes, numbers, nesting, and what happens to text that is no UTF-8.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include <cjson/cJSON.h>

#include "common/json.h"
#include "support/test.h"

/* What json_print puts on stdout; free it. */
static char *printed(const struct json *root)
{
    char file[] = "/tmp/attn-json-XXXXXX";
    char *text = calloc(1, 65536);
    int fd = mkstemp(file), old = dup(STDOUT_FILENO);
    assert_non_null(text);
    assert_true(fd >= 0 && old >= 0);
    fflush(stdout);
    dup2(fd, STDOUT_FILENO);
    bool whole = json_print(root);
    fflush(stdout);
    dup2(old, STDOUT_FILENO);
    assert_true(pread(fd, text, 65535, 0) >= 0);
    close(old);
    close(fd);
    unlink(file);
    assert_true(whole);
    return text;
}

/* A string printed, then read by cJSON. */
static void check_text(const char *given, const char *expected)
{
    struct json *root = json_string(given);
    char *text = printed(root);
    cJSON *read = cJSON_Parse(text);
    assert_true(cJSON_IsString(read));
    assert_string_equal(read->valuestring, expected);
    for (const char *c = text; *c != '\n'; c++) {
        assert_true((unsigned char)*c >= 0x20 && *c != 0x7f); /* nothing that steers a terminal */
    }
    cJSON_Delete(read);
    free(text);
    json_destroy(root);
}

TEST(test_text_survives)
{
    check_text("plain", "plain");
    check_text("", "");
    check_text("quote \" and \\ and / \n\t\x01\x1b[31m\x7f",
               "quote \" and \\ and / \n\t\x01\x1b[31m\x7f");
    check_text("\xc2\x9b"
               "31m",
               "\xc2\x9b"
               "31m"); /* C1's control sequence introducer */
    check_text("\xc3\xa4 \xe2\x82\xac \xf0\x9f\x98\x80", "\xc3\xa4 \xe2\x82\xac \xf0\x9f\x98\x80");
}

TEST(test_invalid_utf8_is_replaced)
{
    check_text("a\xff"
               "b",
               "a\xef\xbf\xbd"
               "b");
    check_text("\xc3", "\xef\xbf\xbd");                                 /* cut off */
    check_text("\xc0\x80", "\xef\xbf\xbd\xef\xbf\xbd");                 /* overlong */
    check_text("\xed\xa0\x80", "\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd"); /* a surrogate */
    check_text("\xf4\x90\x80\x80", "\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd");
}

TEST(test_numbers_read_back_equal)
{
    static const double numbers[] = {0, -1, 3, 0.1, 1.0 / 3, 1e300, 5e-324, 4294967296.0, -2.5e-7};
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++) {
        struct json *root = json_number(numbers[i]);
        char *text = printed(root);
        assert_true(strtod(text, NULL) == numbers[i]);
        free(text);
        json_destroy(root);
    }
    struct json *root = json_array();
    json_push(root, json_number(NAN));
    json_push(root, json_number(-INFINITY));
    char *text = printed(root);
    assert_string_equal(text, "[\n  null,\n  null\n]\n");
    free(text);
    json_destroy(root);
}

TEST(test_a_tree_is_read_back)
{
    struct json *root = json_object();
    struct json *list = json_add(root, "list", json_array());
    json_push(list, json_bool(true));
    json_push(list, json_null());
    json_add(json_push(list, json_object()), "deep", json_string(NULL));
    json_add(root, "empty", json_object());
    json_add(root, "name", json_string("x"));
    json_add(root, "count", json_number(7));
    assert_int_equal(json_count(list), 3);
    assert_int_equal(json_count(NULL), 0);
    assert_string_equal(json_text(root, "name"), "x");
    assert_string_equal(json_text(root, "count"), "-");
    assert_string_equal(json_text(root, "absent"), "-");
    assert_true(json_value(root, "count") == 7);
    assert_null(json_get(root, "absent"));
    char *text = printed(root);
    assert_string_equal(text,
                        "{\n  \"list\": [\n    true,\n    null,\n    {\n      \"deep\": null\n"
                        "    }\n  ],\n  \"empty\": {},\n  \"name\": \"x\",\n  \"count\": 7\n}\n");
    free(text);
    json_destroy(root);
}

/* What is added to nothing is destroyed, which sanitizers see. */
TEST(test_nowhere_to_add)
{
    assert_null(json_add(NULL, "nowhere", json_number(1)));
    json_destroy(NULL);
}
