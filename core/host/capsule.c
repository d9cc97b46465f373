/* SPDX-License-Identifier: Apache-2.0 */
#include "host/capsule.h"

#include <attn/tensor.h>
#include <attn/types.h>
#include <inttypes.h>
#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "util/safe_text.h"

#define HEAD "attn-capsule 1"
#define MOST_KEYS (1 << 24) /* of a request */
#define LINE 256            /* bytes of one with a single value */

/* Lines with one value: a text, or a number from `least` to `most`, or a float32's bits. */
static const struct field {
    const char *name;
    size_t at;
    enum { TEXT, INTEGER, FLOAT } kind;
    int32_t least, most;
} fields[] = {
#define AT(member) #member, offsetof(struct capsule, member)
    {AT(library), TEXT, 0, 0},
    {AT(layer), TEXT, 0, 0},
    {AT(prefill), TEXT, 0, 0},
    {AT(decode), TEXT, 0, 0},
    {AT(step), INTEGER, 0, INT32_MAX},
    {AT(real), INTEGER, 0, 1},
    {AT(dtype), INTEGER, ATTN_DTYPE_F16, ATTN_DTYPE_F32},
    {AT(num_q_heads), INTEGER, 1, CAPSULE_HEADS},
    {AT(num_kv_heads), INTEGER, 1, CAPSULE_HEADS},
    {AT(head_size), INTEGER, 8, CAPSULE_HEAD_SIZE},
    {AT(head_size_v), INTEGER, 8, CAPSULE_HEAD_SIZE},
    {AT(scale), FLOAT, 0, 0},
    {AT(causal), INTEGER, ATTN_CAUSAL_YES, ATTN_CAUSAL_NO},
    {AT(has_window), INTEGER, 0, 1},
    {AT(window_left), INTEGER, -1, INT32_MAX},
    {AT(window_right), INTEGER, -1, INT32_MAX},
    {AT(chunk_size), INTEGER, 0, INT32_MAX},
    {AT(chunk_lookback), INTEGER, 0, INT32_MAX},
    {AT(soft_cap), FLOAT, 0, 0},
    {AT(alibi), INTEGER, ATTN_ALIBI_NONE, ATTN_ALIBI_SQRT},
    {AT(has_sinks), INTEGER, 0, 1},
    {AT(block_size), INTEGER, 1, 65536},
    {AT(k_stride_slot), INTEGER, 0, INT32_MAX},
    {AT(k_stride_head), INTEGER, 0, INT32_MAX},
    {AT(v_stride_slot), INTEGER, 0, INT32_MAX},
    {AT(v_stride_head), INTEGER, 0, INT32_MAX},
    {"not_finite_q", offsetof(struct capsule, not_finite[0]), INTEGER, 0, INT32_MAX},
    {"not_finite_k", offsetof(struct capsule, not_finite[1]), INTEGER, 0, INT32_MAX},
    {"not_finite_v", offsetof(struct capsule, not_finite[2]), INTEGER, 0, INT32_MAX},
    {"not_finite_out", offsetof(struct capsule, not_finite[3]), INTEGER, 0, INT32_MAX},
    {AT(num_reqs), INTEGER, 1, CAPSULE_REQUESTS},
#undef AT
};
#define NUM_FIELDS (sizeof fields / sizeof *fields)

/* Lines with many values: lengths as integers, the others as float32. */
static const struct list {
    const char *name;
    size_t at;
    bool integers;
} lists[] = {
    {"query_lens", offsetof(struct capsule, query_lens), true},
    {"seq_lens", offsetof(struct capsule, seq_lens), true},
    {"q_statistics", offsetof(struct capsule, statistics[0]), false},
    {"k_statistics", offsetof(struct capsule, statistics[1]), false},
    {"v_statistics", offsetof(struct capsule, statistics[2]), false},
    {"out_statistics", offsetof(struct capsule, statistics[3]), false},
    {"sinks", offsetof(struct capsule, sinks), false},
    {"slopes", offsetof(struct capsule, slopes), false},
};
#define NUM_LISTS (sizeof lists / sizeof *lists)

static int32_t list_length(const struct capsule *c, size_t list)
{
    return list < 2       ? c->num_reqs
           : list < 6     ? 2 * capsule_heads(c, (int32_t)list - 2)
           : list == 6    ? c->has_sinks * c->num_q_heads
           : c->alibi > 0 ? c->num_q_heads
                          : 0;
}

int32_t capsule_heads(const struct capsule *c, int32_t tensor)
{
    return tensor == 0 || tensor == 3 ? c->num_q_heads : c->num_kv_heads;
}

int32_t capsule_dims(const struct capsule *c, int32_t tensor)
{
    return tensor < 2 ? c->head_size : c->head_size_v;
}

int64_t capsule_rows(const struct capsule *c, int32_t tensor)
{
    const int32_t *lens = tensor == 0 || tensor == 3 ? c->query_lens : c->seq_lens;
    int64_t rows = 0;
    for (int32_t r = 0; r < c->num_reqs; r++) {
        rows += lens[r];
    }
    return rows;
}

int64_t capsule_bytes(const struct capsule *c)
{
    int64_t bytes = 0;
    for (int32_t t = 0; t < CAPSULE_TENSORS; t++) {
        /* up to 2^34 rows of up to 2^22 bytes */
        bytes += capsule_rows(c, t) * capsule_heads(c, t) * capsule_dims(c, t) *
                 (c->dtype == ATTN_DTYPE_F32 ? 4 : 2);
        if (bytes > CAPSULE_BYTES) {
            return -1;
        }
    }
    return bytes;
}

static uint32_t bits_of(const void *number)
{
    uint32_t bits;
    memcpy(&bits, number, sizeof bits);
    return bits;
}

void capsule_write(const struct capsule *c, void (*put)(void *user, const char *line), void *user)
{
    char line[LINE];
    put(user, HEAD "\n");
    for (size_t i = 0; i < NUM_FIELDS; i++) {
        const char *value = (const char *)c + fields[i].at;
        if (fields[i].kind == TEXT) {
            snprintf(line, sizeof line, "%s %s\n", fields[i].name, value);
        } else if (fields[i].kind == INTEGER) {
            snprintf(line, sizeof line, "%s %" PRId32 "\n", fields[i].name,
                     (int32_t)bits_of(value));
        } else {
            snprintf(line, sizeof line, "%s %08" PRIx32 "\n", fields[i].name, bits_of(value));
        }
        put(user, line);
    }
    for (size_t i = 0; i < NUM_LISTS; i++) {
        put(user, lists[i].name);
        for (int32_t n = 0; n < list_length(c, i); n++) {
            const uint32_t bits = bits_of((const char *)c + lists[i].at + 4 * (size_t)n);
            snprintf(line, sizeof line, lists[i].integers ? " %" PRId32 : " %08" PRIx32, bits);
            put(user, line);
        }
        put(user, "\n");
    }
    put(user, "end\n");
}

/* A file's bytes, line by line. */
struct reading {
    const char *at, *end;
    char *why;
    size_t size;
};

static const char *refuse(struct reading *r, const char *name, const char *value,
                          const char *allowed)
{
    snprintf(r->why, r->size, "%s is '%.40s'; %s", name, value, allowed);
    text_make_safe(r->why, false);
    return r->why;
}

/* What follows `name` and a blank in the next line, up to `stop`, as a text of its own. False: no
 * such line, or a longer one. */
static bool take(struct reading *r, const char *name, char text[LINE])
{
    const size_t left = (size_t)(r->end - r->at), length = strlen(name);
    const char *end = memchr(r->at, '\n', left < LINE ? left : LINE);
    if (end == NULL || (size_t)(end - r->at) <= length || r->at[length] != ' ' ||
        memcmp(r->at, name, length) != 0) {
        return false;
    }
    const size_t size = (size_t)(end - r->at) - length - 1;
    memcpy(text, r->at + length + 1, size);
    text[size] = '\0';
    r->at = end + 1;
    return strlen(text) == size;
}

static bool read_float(const char *text, float *number)
{
    const uint32_t bits = (uint32_t)strtoul(text, NULL, 16);
    memcpy(number, &bits, sizeof bits);
    return strspn(text, "0123456789abcdef") == 8 && text[8] == '\0' && isfinite(*number);
}

/* As it is written, and in no other form. */
static bool read_integer(const char *text, int32_t least, int32_t most, int32_t *number)
{
    char again[16];
    const long value = strtol(text, NULL, 10);
    *number = (int32_t)value;
    snprintf(again, sizeof again, "%" PRId32, *number);
    return value >= least && value <= most && strcmp(again, text) == 0;
}

static const char *read_field(struct reading *r, struct capsule *c, const struct field *field)
{
    char text[LINE], allowed[80];
    void *value = (char *)c + field->at;
    if (!take(r, field->name, text)) {
        return refuse(r, field->name, "missing", "it is the next line of a capsule");
    }
    if (field->kind == TEXT) {
        if (!text_is_clean(text, CAPSULE_NAME - 1)) {
            return refuse(r, field->name, text, "clean text of up to 159 bytes is allowed");
        }
        memcpy(value, text, strlen(text) + 1);
        return NULL;
    }
    if (field->kind == FLOAT) {
        return read_float(text, value)
                   ? NULL
                   : refuse(r, field->name, text,
                            "a finite float32 as 8 hexadecimal digits is allowed");
    }
    snprintf(allowed, sizeof allowed, "%d to %d is allowed", field->least, field->most);
    return read_integer(text, field->least, field->most, value)
               ? NULL
               : refuse(r, field->name, text, allowed);
}

/* Values of up to 11 bytes, a blank before each. */
static const char *read_list(struct reading *r, struct capsule *c, size_t list)
{
    const size_t length = strlen(lists[list].name);
    const int32_t count = list_length(c, list);
    if ((size_t)(r->end - r->at) <= length || memcmp(r->at, lists[list].name, length) != 0) {
        return refuse(r, lists[list].name, "missing", "it is the next line of a capsule");
    }
    r->at += length;
    for (int32_t n = 0; n < count; n++) {
        char text[16];
        const size_t left = (size_t)(r->end - r->at);
        size_t size = 0;
        while (size + 1 < left && size < sizeof text - 1 &&
               strchr(" \n", r->at[1 + size]) == NULL) {
            size++;
        }
        void *value = (char *)c + lists[list].at + 4 * (size_t)n;
        if (left < 2 || r->at[0] != ' ') {
            return refuse(r, lists[list].name, "cut short", "a value for each is needed");
        }
        memcpy(text, r->at + 1, size);
        text[size] = '\0';
        if (strlen(text) != size || (lists[list].integers ? !read_integer(text, 1, MOST_KEYS, value)
                                                          : !read_float(text, value))) {
            return refuse(r, lists[list].name, text,
                          lists[list].integers ? "1 to 2^24 is allowed"
                                               : "finite float32 as 8 hexadecimal digits are");
        }
        r->at += 1 + size;
    }
    if (r->at == r->end || *r->at != '\n') {
        return refuse(r, lists[list].name, "longer", "a value for each is needed");
    }
    r->at++;
    return NULL;
}

static const char *check_heads(struct reading *r, const struct capsule *c)
{
    char text[16];
    snprintf(text, sizeof text, "%d", c->num_q_heads);
    return c->num_q_heads % c->num_kv_heads == 0
               ? NULL
               : refuse(r, "num_q_heads", text, "a multiple of num_kv_heads is allowed");
}

/* What fields say together. */
static const char *check(struct reading *r, const struct capsule *c)
{
    char text[40];
    if (!(c->scale > 0) || !(c->soft_cap >= 0)) {
        return refuse(r, "scale or soft_cap", "negative",
                      "a scale above 0 and a cap from 0 are allowed");
    }
    for (int32_t i = 0; i < c->num_reqs; i++) {
        if (c->query_lens[i] > c->seq_lens[i]) {
            snprintf(text, sizeof text, "%d", c->query_lens[i]);
            return refuse(r, "query_lens", text, "up to the request's seq_lens is allowed");
        }
    }
    const int64_t bytes = capsule_bytes(c);
    if (bytes < 0) {
        return refuse(r, "seq_lens", "too long", "up to 256 MiB of tensors are allowed");
    }
    const int64_t left = r->end - r->at;
    snprintf(text, sizeof text, "%" PRId64 " bytes", left);
    return left == (c->real ? bytes : 0)
               ? NULL
               : refuse(r, "data", text, "as many as the tensors' shapes say are needed");
}

const char *capsule_read(struct capsule *c, const char *bytes, size_t length, const char **data,
                         char *why, size_t size)
{
    struct reading r = {bytes, bytes + length, why, size};
    const size_t head = sizeof HEAD;
    memset(c, 0, sizeof *c);
    if (length < head || memcmp(bytes, HEAD "\n", head) != 0) {
        return refuse(&r, "the first line", "another", "'" HEAD "' is that of a capsule");
    }
    r.at += head;
    const char *wrong = NULL;
    for (size_t i = 0; i < NUM_FIELDS && wrong == NULL; i++) {
        wrong = read_field(&r, c, &fields[i]);
    }
    wrong = wrong == NULL ? check_heads(&r, c) : wrong;
    for (size_t i = 0; i < NUM_LISTS && wrong == NULL; i++) {
        wrong = read_list(&r, c, i);
    }
    if (wrong == NULL && (r.end - r.at < 4 || memcmp(r.at, "end\n", 4) != 0)) {
        wrong = refuse(&r, "end", "missing", "it is the last line of a capsule's head");
    }
    if (wrong == NULL) {
        r.at += 4;
        wrong = check(&r, c);
    }
    *data = r.at;
    return wrong;
}
