/* SPDX-License-Identifier: Apache-2.0 */
/* Quantized attention outputs: where codes and scales are written. */
#ifndef GPU_OUTPUT_H
#define GPU_OUTPUT_H

#include <stdint.h>

struct gpu_output {
    int32_t form;         /* enum attn_output_form; PLAIN: the other fields are not used */
    int32_t group, shift; /* dims that share a scale, all of one head; group is 2^shift */
    int32_t pow2;         /* scales are powers of two */
    int32_t dims;         /* dims of a head */
    const float *scale;   /* the tensor's scale: static fp8, nvfp4 (NULL: 1) */
    void *block_scales;   /* float, or e4m3 bytes of nvfp4 */
    int64_t scale_row, scale_column; /* elements between tokens and between groups */
};

#endif
