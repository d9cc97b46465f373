/* SPDX-License-Identifier: Apache-2.0 */
/* The attends on matrix units. X(dtype of the cache, padded head size, rows of an item): the entry
 * is kernel_attend_<kind>_<size>_<rows>, of HIP_ATTEND_WARPS(rows) warps. */
#ifndef HIP_ATTEND_LIST_H
#define HIP_ATTEND_LIST_H

#define HIP_TILE 64         /* keys */
#define HIP_NARROW_TILE 128 /* where one row tile has all rows, and keys are 8-bit */

#define HIP_ATTEND_WARPS(rows) ((rows) == 16 ? 4 : 8)

#define HIP_ATTEND_SHAPES(X, kind, KIND)                                                           \
    X(kind, KIND, 64, 16) X(kind, KIND, 64, 64) X(kind, KIND, 128, 16) X(kind, KIND, 128, 64)

#define HIP_ATTENDS(X)                                                                             \
    HIP_ATTEND_SHAPES(X, f16, F16)                                                                 \
    HIP_ATTEND_SHAPES(X, bf16, BF16)                                                               \
    HIP_ATTEND_SHAPES(X, e4m3, E4M3)                                                               \
    HIP_ATTEND_SHAPES(X, e5m2, E5M2)                                                               \
    HIP_ATTEND_SHAPES(X, int8, INT8)

#endif
