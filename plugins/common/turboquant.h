/* SPDX-License-Identifier: Apache-2.0 */
/* TurboQuant's rows: what backends and their kernels share. A row is one string of codes of 3 or 4
 * bits, lowest first; what belongs to the row as a whole are 16-bit floats at the view's `scale`.
 */
#ifndef PLUGINS_COMMON_TURBOQUANT_H
#define PLUGINS_COMMON_TURBOQUANT_H

#include <attn/kv_cache.h>

#define TURBOQUANT_EPSILON 1e-8  /* added to a key's norm before it divides */
#define TURBOQUANT_STEP 1e-8     /* least step between values' codes */
#define TURBOQUANT_LARGEST 65504 /* the largest float16 */

/* Levels of a rotated key's coordinates above 0, of a normal distribution of variance 1; those
 * below are their mirror image. Lloyd's iteration with integrals by 200 trapezoids a cell up
 * to 10.5 deviations, which is what caches in use hold; the exact levels (Max 1960) differ by 0.1
 * %. */
#define TURBOQUANT_LEVELS_3 0.24498359f, 0.7556455f, 1.34318f, 2.15034954f
#define TURBOQUANT_LEVELS_4                                                                        \
    0.12842766f, 0.38813779f, 0.65687992f, 0.94244824f, 1.25625757f, 1.61788176f, 2.06844712f,     \
        2.73092222f

/* Bits of a code of K or V; 0: no turboquant codes, as the e4m3 keys of k8v4. */
static inline int32_t turboquant_bits(int32_t kv_dtype, int32_t is_v)
{
    switch (kv_dtype) {
    case ATTN_KV_TURBOQUANT_K8V4:
        return is_v ? 4 : 0;
    case ATTN_KV_TURBOQUANT_4BIT_NC:
        return 4;
    case ATTN_KV_TURBOQUANT_K3V4_NC:
        return is_v ? 4 : 3;
    case ATTN_KV_TURBOQUANT_3BIT_NC:
        return 3;
    default:
        return 0;
    }
}

#endif
