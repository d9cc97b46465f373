/* SPDX-License-Identifier: Apache-2.0 */
#include "common/file.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#define FIRST_ROOM ((size_t)1 << 16) /* first buffer for a pipe, doubled as it goes on */

char *read_whole_file(const char *name, size_t most, size_t *size, const char **why)
{
    struct stat info;
    FILE *in = fopen(name, "rbe");
    char *bytes = NULL;
    size_t room = 0;
    *why = in == NULL || fstat(fileno(in), &info) != 0            ? strerror(errno)
           : !S_ISREG(info.st_mode) && !S_ISFIFO(info.st_mode)    ? "not a regular file"
           : S_ISREG(info.st_mode) && (size_t)info.st_size > most ? "is too large"
                                                                  : NULL;
    *size = 0;
    while (*why == NULL && *size == room) {
        room = room > 0 ? 2 * room : S_ISREG(info.st_mode) ? (size_t)info.st_size + 1 : FIRST_ROOM;
        char *larger = realloc(bytes, room + 1);
        if (larger == NULL) {
            *why = "no memory";
            break;
        }
        bytes = larger;
        *size += fread(bytes + *size, 1, room - *size, in);
        *why = ferror(in) ? "cannot be read" : *size > most ? "is too large" : NULL;
    }
    if (in != NULL) {
        fclose(in);
    }
    if (*why != NULL) {
        free(bytes);
        return NULL;
    }
    bytes[*size] = '\0';
    return bytes;
}
