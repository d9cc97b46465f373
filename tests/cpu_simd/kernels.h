/* SPDX-License-Identifier: Apache-2.0 */
#ifndef TESTS_CPU_SIMD_KERNELS_H
#define TESTS_CPU_SIMD_KERNELS_H

#include "check.h"

/* every kernel of one variant but attend itself */
void check_kernels(const struct backend *reference, const struct backend *simd);
/* writes.c: write_kv, which is the same code in every variant */
void check_writes(const struct backend *reference, const struct backend *simd);

#endif
