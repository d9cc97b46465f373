/* SPDX-License-Identifier: Apache-2.0 */
#include "common/capsule_read.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "util/safe_text.h"

#define MOST_KEYS (1 << 24) /* keys of a request */
#define LINE 256            /* bytes of one with a single value */

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

static const char *read_field(struct reading *r, struct capsule *c,
                              const struct capsule_field *field)
{
    char text[LINE], allowed[80];
    void *value = (char *)c + field->at;
    if (!take(r, field->name, text)) {
        return refuse(r, field->name, "missing", "it is the next line of a capsule");
    }
    if (field->kind == CAPSULE_TEXT) {
        if (!text_is_clean(text, CAPSULE_NAME - 1)) {
            return refuse(r, field->name, text, "clean text of up to 159 bytes is allowed");
        }
        memcpy(value, text, strlen(text) + 1);
        return NULL;
    }
    if (field->kind == CAPSULE_FLOAT) {
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
    const size_t length = strlen(capsule_lists[list].name);
    const int32_t count = capsule_list_length(c, list);
    if ((size_t)(r->end - r->at) <= length ||
        memcmp(r->at, capsule_lists[list].name, length) != 0) {
        return refuse(r, capsule_lists[list].name, "missing", "it is the next line of a capsule");
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
        void *value = (char *)c + capsule_lists[list].at + 4 * (size_t)n;
        if (left < 2 || r->at[0] != ' ') {
            return refuse(r, capsule_lists[list].name, "cut short", "a value for each is needed");
        }
        memcpy(text, r->at + 1, size);
        text[size] = '\0';
        if (strlen(text) != size ||
            (capsule_lists[list].integers ? !read_integer(text, 1, MOST_KEYS, value)
                                          : !read_float(text, value))) {
            return refuse(r, capsule_lists[list].name, text,
                          capsule_lists[list].integers
                              ? "1 to 2^24 is allowed"
                              : "finite float32 as 8 hexadecimal digits are");
        }
        r->at += 1 + size;
    }
    if (r->at == r->end || *r->at != '\n') {
        return refuse(r, capsule_lists[list].name, "longer", "a value for each is needed");
    }
    r->at++;
    return NULL;
}

static const char *check_heads(struct reading *r, const struct capsule *c)
{
    char text[16];
    const bool latent = c->kv_lora_rank > 0;
    snprintf(text, sizeof text, "%d", c->kv_lora_rank);
    if (latent && (c->num_kv_heads != 1 || c->head_size <= c->kv_lora_rank)) {
        return refuse(r, "kv_lora_rank", text, "less than head_size, with one KV head, is allowed");
    }
    if (latent != (c->qk_nope_head_dim > 0)) {
        return refuse(r, "kv_lora_rank", text, "both it and qk_nope_head_dim are 0, or neither");
    }
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
    const size_t head = sizeof CAPSULE_HEAD;
    memset(c, 0, sizeof *c);
    if (length < head || memcmp(bytes, CAPSULE_HEAD "\n", head) != 0) {
        return refuse(&r, "the first line", "another", "'" CAPSULE_HEAD "' is that of a capsule");
    }
    r.at += head;
    const char *wrong = NULL;
    for (size_t i = 0; i < CAPSULE_FIELDS && wrong == NULL; i++) {
        wrong = read_field(&r, c, &capsule_fields[i]);
    }
    wrong = wrong == NULL ? check_heads(&r, c) : wrong;
    for (size_t i = 0; i < CAPSULE_LISTS && wrong == NULL; i++) {
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
