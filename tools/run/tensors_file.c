/* SPDX-License-Identifier: Apache-2.0 */
#include "tensors_file.h"

#include <cjson/cJSON.h>
#include <stdlib.h>
#include <string.h>

#include "common/command.h"

#define MAX_FILE ((size_t)1 << 32)
#define MAX_HEADER (100 << 20)
#define INVALID ATTN_ERROR_INVALID_ARGUMENT

attn_status tensors_open(struct tensors_file *file, const char *name, struct attn_error *error)
{
    uint64_t length;
    *file = (struct tensors_file){NULL, 0, NULL, 0, NULL};
    const char *why;
    file->bytes = (uint8_t *)read_whole_file(name, MAX_FILE, &file->size, &why);
    attn_status status = file->bytes == NULL ? command_error(error, INVALID, "file", "%s", why)
                         : file->size < 8
                             ? command_error(error, INVALID, "file", "is no safetensors file")
                             : ATTN_OK;
    if (status == ATTN_OK) {
        /* little-endian, as every machine that this runs on */
        memcpy(&length, file->bytes, sizeof length);
        if (length > MAX_HEADER || length > file->size - 8) {
            status = command_error(error, INVALID, "header", "its length is larger than the file");
        } else {
            file->header = cJSON_ParseWithLength((const char *)file->bytes + 8, (size_t)length);
            file->data = file->bytes + 8 + length;
            file->data_size = file->size - 8 - (size_t)length;
            status = cJSON_IsObject(file->header)
                         ? ATTN_OK
                         : command_error(error, INVALID, "header", "is not a JSON object");
        }
    }
    if (status != ATTN_OK) {
        tensors_close(file);
    }
    return status;
}

void tensors_close(struct tensors_file *file)
{
    cJSON_Delete(file->header);
    free(file->bytes);
    *file = (struct tensors_file){NULL, 0, NULL, 0, NULL};
}

const void *tensors_find(const struct tensors_file *file, const char *name, const char *dtype,
                         int32_t ndim, int64_t *shape, struct attn_error *error)
{
    const cJSON *entry = cJSON_GetObjectItemCaseSensitive(file->header, name);
    const cJSON *sizes = cJSON_GetObjectItemCaseSensitive(entry, "shape");
    const cJSON *offsets = cJSON_GetObjectItemCaseSensitive(entry, "data_offsets");
    const char *found = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(entry, "dtype"));
    double begin = cJSON_GetNumberValue(cJSON_GetArrayItem(offsets, 0));
    double end = cJSON_GetNumberValue(cJSON_GetArrayItem(offsets, 1)), bytes = 4;
    if (found == NULL || strcmp(found, dtype) != 0 || cJSON_GetArraySize(sizes) != ndim) {
        command_error(error, INVALID, name,
                      "is missing, or not of the dtype and number of dimensions that is read");
        return NULL;
    }
    for (int32_t i = 0; i < ndim; i++) {
        double size = cJSON_GetNumberValue(cJSON_GetArrayItem(sizes, i));
        if (!(size >= 1 && size <= 1 << 30)) {
            command_error(error, INVALID, name, "has a dimension that is not 1 to 2^30");
            return NULL;
        }
        shape[i] = (int64_t)size;
        bytes *= size;
    }
    if (!(begin >= 0 && end - begin == bytes && end <= (double)file->data_size) ||
        ((uintptr_t)(file->data + (size_t)begin) % 4 != 0)) {
        command_error(error, INVALID, name,
                      "lies outside of the file, or its size is not that of its shape");
        return NULL;
    }
    return file->data + (size_t)begin;
}

const char *tensors_metadata(const struct tensors_file *file, const char *name)
{
    const cJSON *metadata = cJSON_GetObjectItemCaseSensitive(file->header, "__metadata__");
    return cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(metadata, name));
}
