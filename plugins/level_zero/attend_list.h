/* SPDX-License-Identifier: Apache-2.0 */
/* The attends on matrix units. X(dtype of the cache, padded head size, rows of an item): the entry
 * is kernel_attend_<kind>_<size>_<rows>, of LEVEL_ZERO_SUBGROUPS(rows) subgroups of 16. */
#ifndef LEVEL_ZERO_ATTEND_LIST_H
#define LEVEL_ZERO_ATTEND_LIST_H

#define LEVEL_ZERO_TILE 64 /* keys */
#define LEVEL_ZERO_LANES 16
#define LEVEL_ZERO_SUBGROUPS(rows) ((rows) == 16 ? 4 : 8)

#define LEVEL_ZERO_SHAPES(X, kind, KIND)                                                           \
    X(kind, KIND, 64, 16) X(kind, KIND, 64, 64) X(kind, KIND, 128, 16) X(kind, KIND, 128, 64)

#define LEVEL_ZERO_ATTENDS(X)                                                                      \
    LEVEL_ZERO_SHAPES(X, f16, F16)                                                                 \
    LEVEL_ZERO_SHAPES(X, bf16, BF16)                                                               \
    LEVEL_ZERO_SHAPES(X, e4m3, FP8_E4M3)                                                           \
    LEVEL_ZERO_SHAPES(X, int8, INT8)

#endif
