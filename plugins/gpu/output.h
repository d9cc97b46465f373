/* SPDX-License-Identifier: Apache-2.0 */
/* Where an attend writes its output as codes: what it reads and writes next to them. */
#ifndef GPU_OUTPUT_H
#define GPU_OUTPUT_H

#include <stdint.h>

struct gpu_output {
    int32_t form;         /* enum attn_output_form; PLAIN: numbers, the rest has no meaning */
    int32_t group, shift; /* dims that share a scale, all of one head: 2^shift */
    int32_t pow2;         /* scales are powers of two */
    int32_t dims;         /* of a head */
    const float *scale;   /* of the tensor: static fp8, nvfp4 (NULL: 1) */
    void *block_scales;   /* float, or e4m3 bytes of nvfp4 */
    int64_t scale_row, scale_column; /* elements between tokens and between groups */
};

#endif
