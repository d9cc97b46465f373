/* SPDX-License-Identifier: Apache-2.0 */
/* Strided tensors as kernel parameters. */
#ifndef GPU_TENSORS_H
#define GPU_TENSORS_H

#include <stdint.h>

/* [rows, heads, dims], dims contiguous. */
struct gpu_tensor {
    char *data;
    int64_t row, head; /* bytes */
    int32_t dtype;     /* enum attn_dtype_id */
};

struct gpu_lse {
    float *data;
    int64_t head, row; /* elements */
};

struct gpu_matrix {
    const char *data;    /* NULL: none */
    int64_t row, column; /* elements */
    int32_t dtype;       /* enum attn_dtype_id */
};

#endif
