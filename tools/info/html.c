/* SPDX-License-Identifier: Apache-2.0 */
/* attn-info --html: the whole document as one page that needs no other file. */
#include "info/info.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common/command.h"

static const char head[] =
    "<!DOCTYPE html>\n<html lang=\"en\">\n<meta charset=\"utf-8\">\n<title>attn-info</title>\n"
    "<style>body{font:14px sans-serif;margin:2em}table{border-collapse:collapse}th,td{border:1px "
    "solid #ccc;padding:.2em .5em;text-align:left;vertical-align:top}th{background:#eee}"
    "</style>\n";

static void write_text(FILE *out, const char *text)
{
    for (; *text != '\0'; text++) {
        switch (*text) {
        case '&':
            fputs("&amp;", out);
            break;
        case '<':
            fputs("&lt;", out);
            break;
        case '>':
            fputs("&gt;", out);
            break;
        default:
            putc(*text, out);
        }
    }
}

static bool is_table(const struct json *value)
{
    return value->type == JSON_ARRAY && value->first != NULL && value->first->type == JSON_OBJECT;
}

static void write_value(FILE *out, const struct json *value);

/* A column for each member of the first item. Other items have the same ones. */
static void write_table(FILE *out, const struct json *items)
{
    const struct json *item, *member;
    fputs("<table>\n<tr>", out);
    JSON_EACH(member, items->first)
    {
        fputs("<th>", out);
        write_text(out, member->name);
    }
    JSON_EACH(item, items)
    {
        fputs("\n<tr>", out);
        JSON_EACH(member, items->first)
        {
            const struct json *value = json_get(item, member->name);
            fputs("<td>", out);
            if (value != NULL) {
                write_value(out, value);
            }
        }
    }
    fputs("\n</table>\n", out);
}

/* Objects and lists of objects below the first table are folded. */
static void write_value(FILE *out, const struct json *value)
{
    const struct json *item;
    if (value->type == JSON_STRING) {
        write_text(out, value->text);
    } else if (value->type == JSON_BOOL) {
        fputs(value->number != 0 ? "yes" : "no", out);
    } else if (value->type == JSON_NUMBER) {
        fprintf(out, "%.15g", value->number);
    } else if (is_table(value)) {
        fprintf(out, "<details><summary>%d</summary>", (int)json_count(value));
        write_table(out, value);
        fputs("</details>", out);
    } else {
        JSON_EACH(item, value)
        {
            if (value->type == JSON_OBJECT) {
                write_text(out, item->name);
                putc(' ', out);
            }
            write_value(out, item);
            fputs(item->next == NULL ? "" : value->type == JSON_OBJECT ? "<br>" : ", ", out);
        }
    }
}

attn_status html_write(const char *file, const struct json *root, struct attn_error *error)
{
    const struct json *member;
    struct stat info;
    FILE *out = fopen(file, "w");
    if (out == NULL) {
        return command_error(error, ATTN_ERROR_IO, "html", "%s", strerror(errno));
    }
    errno = 0;
    fputs(head, out);
    JSON_EACH(member, root)
    {
        fputs(member->type == JSON_ARRAY ? "<h2>" : "<p>", out);
        write_text(out, member->name);
        fputs(member->type == JSON_ARRAY ? "</h2>\n" : " ", out);
        if (is_table(member)) {
            write_table(out, member);
        } else {
            write_value(out, member);
        }
        putc('\n', out);
    }
    fputs("</html>\n", out);
    const bool written = fflush(out) == 0 && ferror(out) == 0;
    if (fclose(out) == 0 && written) {
        return ATTN_OK;
    }
    command_error(error, ATTN_ERROR_IO, "html", "%s",
                  errno != 0 ? strerror(errno) : "was not written");
    if (lstat(file, &info) == 0 && S_ISREG(info.st_mode)) { /* no device, and no link to one */
        (void)unlink(file);
    }
    return ATTN_ERROR_IO;
}
