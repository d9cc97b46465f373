/* SPDX-License-Identifier: Apache-2.0 */
/* Reading a safetensors file: 8 bytes of header length, a JSON header, the data. */
#ifndef RUN_TENSORS_FILE_H
#define RUN_TENSORS_FILE_H

#include <attn/status.h>
#include <stdint.h>

struct cJSON;

struct tensors_file {
    uint8_t *bytes;
    size_t size;
    const uint8_t *data; /* after the header */
    size_t data_size;
    struct cJSON *header;
};

attn_status tensors_open(struct tensors_file *file, const char *name, struct attn_error *error);
void tensors_close(struct tensors_file *file);

/* A tensor of that dtype ("F32", "I32") and number of dimensions, checked to lie in the file; NULL
 * with the error. */
const void *tensors_find(const struct tensors_file *file, const char *name, const char *dtype,
                         int32_t ndim, int64_t *shape, struct attn_error *error);

/* Text of the metadata, or NULL. */
const char *tensors_metadata(const struct tensors_file *file, const char *name);

#endif
