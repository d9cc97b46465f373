/* SPDX-License-Identifier: Apache-2.0 */
/* Number formats, from their definitions alone: decoding by the formula, encoding by searching the
 * codes for the nearest, ties to the even code. Slow on purpose, and nothing of a plugin's. */
#ifndef TESTS_CPU_REF_FORMATS_H
#define TESTS_CPU_REF_FORMATS_H

#include <attn/tensor.h>

#define FORMAT_E2M1 100 /* next to enum attn_dtype_id */

double format_decode(int32_t name, uint32_t code);
uint32_t format_encode(int32_t name, double value);
int32_t format_bytes(int32_t name);
/* Half a step between neighbours, relative to the value; below it the smallest step counts. */
double format_half_step(int32_t name);
double format_smallest(int32_t name);
struct attn_dtype format_dtype(int32_t name);
double format_load(const void *memory, int64_t at, int32_t name);
void format_store(void *memory, int64_t at, int32_t name, double value);
double format_round(int32_t name, double value);

#endif
