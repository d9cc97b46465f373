/* SPDX-License-Identifier: Apache-2.0 */
#include "host/lock_text.h"

#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "host/cache_file.h"

#define KEY_SIZE 96

const char *lock_check(const char *text, size_t size)
{
    const size_t head = sizeof LOCK_HEAD - 1, end = sizeof LOCK_END - 1;
    if (size == 0) {
        return "is empty";
    }
    if (strncmp(text, LOCK_HEAD, head) != 0) {
        return "is no lock: its first line is not 'attn-lock 1'";
    }
    if (strlen(text) != size) {
        return "is no lock: it has a NUL";
    }
    return size < head + end || strcmp(text + size - end - 1, "\n" LOCK_END) != 0
               ? "is cut short: its last line is not 'end'"
               : NULL;
}

const char *lock_read(int descriptor, char *text)
{
    struct stat info;
    text[0] = '\0';
    if (fstat(descriptor, &info) != 0 || !S_ISREG(info.st_mode)) {
        return "is not a regular file";
    }
    if ((size_t)info.st_size > LOCK_MOST) {
        return "is larger than 1 MiB";
    }
    if (!file_read(descriptor, text, (size_t)info.st_size)) {
        text[0] = '\0';
        return "cannot be read";
    }
    text[info.st_size] = '\0';
    return lock_check(text, (size_t)info.st_size);
}

char *lock_next(char **rest)
{
    char *record = *rest;
    if (*record == '\0') {
        return NULL;
    }
    char *end = strstr(record, "\n" LOCK_END);
    *rest = end != NULL ? end + sizeof LOCK_END : record + strlen(record);
    if (end != NULL) {
        end[1] = '\0'; /* the line `end` is not compared */
    }
    return record;
}

/* The words by which a line is found: two of layers and plugins, else one. False: too long. */
static bool line_key(const char *line, char key[KEY_SIZE])
{
    const bool two = strncmp(line, "layer ", 6) == 0 || strncmp(line, "plugin ", 7) == 0;
    size_t length = strcspn(line, " \n");
    if (two) {
        length += 1 + strcspn(line + length + 1, " \n");
    }
    return snprintf(key, KEY_SIZE, "%.*s", (int)(length < KEY_SIZE ? length : KEY_SIZE), line) <
           KEY_SIZE;
}

/* What follows the key in its line; NULL: no line has it. */
static const char *find_line(const char *record, const char *key)
{
    const size_t length = strlen(key);
    const char *line = record;
    while (line != NULL) {
        if (strncmp(line, key, length) == 0 && strchr(" \n", line[length]) != NULL) {
            return line + length;
        }
        line = strchr(line, '\n');
        line = line != NULL ? line + 1 : NULL;
    }
    return NULL;
}

/* A word's length; a name is the rest of its line. */
static int word_length(const char *word)
{
    return (int)strcspn(word, strncmp(word, "name=", 5) == 0 ? "\n" : " \n");
}

struct comparison {
    const char *in_a, *in_b;
    void (*found)(void *user, const char *difference);
    void *user;
    int32_t count;
};

static void add(struct comparison *c, const char *key, const char *a, int length_a, const char *b,
                int length_b)
{
    char text[600];
    c->count += strcmp(key, "ranks") != 0;
    if (c->found != NULL) {
        snprintf(text, sizeof text, "%s: %.*s in %s, %.*s in %s", key, length_a, a, c->in_a,
                 length_b, b, c->in_b);
        c->found(c->user, text);
    }
}

/* The words of two lines with the same key. */
static void compare_lines(struct comparison *c, const char *key, const char *a, const char *b)
{
    while (*a == ' ' || *b == ' ') {
        a += *a == ' ';
        b += *b == ' ';
        const int length_a = word_length(a), length_b = word_length(b);
        if (length_a != length_b || strncmp(a, b, (size_t)length_a) != 0) {
            add(c, key, length_a > 0 ? a : "nothing", length_a > 0 ? length_a : 7,
                length_b > 0 ? b : "nothing", length_b > 0 ? length_b : 7);
        }
        a += length_a;
        b += length_b;
    }
}

/* The lines of `from` that `with` does not have, and, `first` being true, the words of the others.
 */
static int32_t compare_side(struct comparison *c, const char *from, const char *with, bool first)
{
    char key[KEY_SIZE];
    int32_t lines = 0;
    for (const char *line = from; *line != '\0'; line += strcspn(line, "\n") + 1) {
        const char *other = line_key(line, key) ? find_line(with, key) : NULL;
        lines++;
        if (other != NULL && first) {
            compare_lines(c, key, line + strlen(key), other);
        } else if (other == NULL) {
            add(c, key, first ? "there" : "not", first ? 5 : 3, first ? "not" : "there",
                first ? 3 : 5);
        }
        if (line[strcspn(line, "\n")] == '\0') {
            break;
        }
    }
    return lines;
}

int32_t lock_compare(const char *a, const char *b, const char *in_a, const char *in_b,
                     void (*found)(void *user, const char *difference), void *user)
{
    struct comparison c = {in_a, in_b, found, user, 0};
    if (strcmp(a, b) == 0) {
        return 0;
    }
    const int32_t lines_a = compare_side(&c, a, b, true);
    const int32_t lines_b = compare_side(&c, b, a, false);
    if (c.count == 0 && lines_a != lines_b) { /* a line stands twice */
        char count_a[32], count_b[32];
        add(&c, "lines", count_a, snprintf(count_a, sizeof count_a, "%d", lines_a), count_b,
            snprintf(count_b, sizeof count_b, "%d", lines_b));
    }
    return c.count;
}
