/* SPDX-License-Identifier: Apache-2.0 */
/* Numbers held to the bound that the core answers for a layer. */
#ifndef TOOLS_COMMON_BOUND_H
#define TOOLS_COMMON_BOUND_H

#include "select/bound.h"

/* How far an element of a row may be from `want`, `rms` being the row's. */
double bound_allows(struct bound bound, double rms, int32_t dtype, double want);
/* Over 1 where `have` is further from `want` than `allowed`; numbers that are not finite are the
 * same or not. */
double bound_ratio(double want, double have, double allowed);
/* The root mean square of the finite ones of `dims` elements from `at` on. */
double bound_rms(const void *row, int64_t at, int32_t dtype, int64_t dims);

#endif
