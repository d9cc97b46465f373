/* SPDX-License-Identifier: Apache-2.0 */
/* Number formats: what tools write into inputs and read from outputs. `dtype` is an
 * enum attn_dtype_id. */
#ifndef SUPPORT_NUMBER_H
#define SUPPORT_NUMBER_H

#include <attn/tensor.h>

struct attn_dtype number_dtype(int32_t dtype);
size_t number_bytes(int32_t dtype);
/* Rounds to nearest even. Finite numbers past the largest saturate; infinities saturate in fp8
 * alone. `at` counts elements. */
void number_store(void *memory, int64_t at, int32_t dtype, double value);
double number_load(const void *memory, int64_t at, int32_t dtype);
/* `count` normal numbers times `deviation`, from element `first` on. */
void number_fill_normal(void *memory, int64_t first, int64_t count, int32_t dtype, double deviation,
                        uint64_t *random);
/* What a value becomes when it is stored. */
double number_round(double value, int32_t dtype);

#endif
