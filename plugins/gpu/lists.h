/* SPDX-License-Identifier: Apache-2.0 */
/* A faster attend over lists of keys (attn/draft/index_lists.h) that reads the lists themselves. */
#ifndef GPU_LISTS_H
#define GPU_LISTS_H

#include "gpu/params.h"

struct gpu_list_attend {
    struct gpu_params attend; /* without units and schedule; its terms are the layer's */
    struct gpu_list_entries from;
    int32_t tokens; /* the batch's, as far as the host knows; num_tokens may be a row's number */
    int64_t blocks; /* the cache's */
};

struct gpu_list_kernel {
    /* Returns NULL or the cause of a failure. */
    const char *(*load)(const struct gpu_device *device);
    /* Returns false, without a launch, if it does not take these arguments. */
    bool (*attend)(const struct gpu_device *device, const struct gpu_list_attend *list,
                   void *stream, const char **cause);
};

#endif
