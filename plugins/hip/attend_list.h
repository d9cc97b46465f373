/* SPDX-License-Identifier: Apache-2.0 */
/* The attends on matrix units. X(dtype of the cache, padded head size, rows of an item): the entry
 * is kernel_attend_<kind>_<size>_<rows>, of HIP_ATTEND_WARPS(rows) warps. fp8: queries and cache
 * are of e4m3, which gfx942 and gfx12 multiply as they are. */
#ifndef HIP_ATTEND_LIST_H
#define HIP_ATTEND_LIST_H

/* Keys of a tile: of rows that go through LDS, two tiles of them there; else the second, where they
 * are 8-bit the third. */
#define HIP_STAGED_TILE(row_bytes) ((row_bytes) > 256 ? 32 : 64)
#define HIP_TILE 64
#define HIP_NARROW_TILE 128

#define HIP_ATTEND_WARPS(rows) ((rows) == 16 ? 4 : 8)

#define HIP_ATTEND_SHAPES(X, kind, KIND)                                                           \
    X(kind, KIND, 64, 16)                                                                          \
    X(kind, KIND, 64, 64)                                                                          \
    X(kind, KIND, 128, 16) X(kind, KIND, 128, 64) X(kind, KIND, 256, 16) X(kind, KIND, 256, 64)

#define HIP_ATTENDS(X)                                                                             \
    HIP_ATTEND_SHAPES(X, f16, F16)                                                                 \
    HIP_ATTEND_SHAPES(X, bf16, BF16)                                                               \
    HIP_ATTEND_SHAPES(X, e4m3, E4M3)                                                               \
    HIP_ATTEND_SHAPES(X, e5m2, E5M2)                                                               \
    HIP_ATTEND_SHAPES(X, int8, INT8)                                                               \
    HIP_ATTEND_SHAPES(X, fp8, FP8)

#endif
