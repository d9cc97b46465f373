/* SPDX-License-Identifier: Apache-2.0 */
/* attn-info --lock and --diff. */
#include "info/info.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common/command.h"
#include "common/json.h"
#include "host/lock_text.h"
#include "util/safe_text.h"

attn_status lock_begin(struct lock_file *lock, const char *file, struct attn_error *error)
{
    char folder[PATH_MAX], variable[PATH_MAX + 8];
    const char *slash = strrchr(file, '/');
    const char *name = slash != NULL ? slash + 1 : file;
    snprintf(folder, sizeof folder, "%.*s", slash != NULL ? (int)(name - file) : 1,
             slash != NULL ? file : ".");
    char *absolute = realpath(folder, NULL);
    if (absolute == NULL) {
        return command_error(error, ATTN_ERROR_IO, "lock", "%s", strerror(errno));
    }
    const int length =
        snprintf(lock->fresh, sizeof lock->fresh, "%s/.%s.%ld", absolute, name, (long)getpid());
    free(absolute);
    if (length >= (int)sizeof lock->fresh || name[0] == '\0') {
        return command_error(error, ATTN_ERROR_IO, "lock",
                             name[0] == '\0' ? "a folder, not a file" : "the path is too long");
    }
    lock->file = file;
    snprintf(variable, sizeof variable, "write:%s", lock->fresh);
    return setenv("ATTN_LOCK", variable, 1) == 0
               ? ATTN_OK
               : command_error(error, ATTN_ERROR_IO, "lock", "%s", strerror(errno));
}

attn_status lock_write(struct lock_file *lock, const struct attn_api *api, attn_runtime *runtime,
                       const attn_assignment *assignment, struct attn_error *error)
{
    attn_model *model = NULL;
    attn_status status = api->model_create(runtime, assignment, NULL, &model, error);
    if (status == ATTN_OK && rename(lock->fresh, lock->file) != 0) {
        status = command_error(error, ATTN_ERROR_IO, "lock", "%s", strerror(errno));
    }
    api->model_destroy(model);
    return status;
}

void lock_finish(const struct lock_file *lock)
{
    if (lock->fresh[0] != '\0') {
        (void)unlink(lock->fresh);
    }
}

/* The file's records, which are the caller's to free; NULL with the reason on stderr. */
static char *read_records(const char *file)
{
    char *text = command_calloc(1, LOCK_MOST + 1);
    const int descriptor = open(file, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    const char *why = descriptor < 0 ? strerror(errno) : lock_read(descriptor, text);
    if (descriptor >= 0) {
        close(descriptor);
    }
    if (why != NULL) {
        fprintf(stderr, "attn-info: %s: %s\n", file, why);
        free(text);
        return NULL;
    }
    return text;
}

static void keep(void *user, const char *difference)
{
    char text[640];
    snprintf(text, sizeof text, "%s", difference);
    text_make_safe(text, false);
    json_push(user, json_string(text));
}

static int compare(char *a, char *b, const char *name_a, const char *name_b, bool as_json)
{
    struct json *root = json_object(), *list = json_add(root, "differences", json_array());
    const struct json *item;
    int32_t count = 0;
    for (;;) {
        char *one = lock_next(&a), *other = lock_next(&b);
        if (one == NULL || other == NULL) {
            if (one != other) {
                count++;
                keep(list, one == NULL ? "the second lock has more models"
                                       : "the first lock has more models");
            }
            break;
        }
        count += lock_compare(one, other, name_a, name_b, keep, list);
    }
    json_add(root, "same_choice", json_bool(count == 0));
    if (as_json) {
        json_print(root);
    }
    JSON_EACH(item, as_json ? NULL : list)
    {
        printf("%s\n", item->text);
    }
    json_destroy(root);
    return count == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}

int lock_diff(const char *a, const char *b, bool as_json)
{
    char *first = read_records(a), *second = first != NULL ? read_records(b) : NULL;
    const int code = second != NULL ? compare(first, second, a, b, as_json) : EXIT_FAILURE;
    free(first);
    free(second);
    return code;
}
