/* SPDX-License-Identifier: Apache-2.0 */
/* The shapes' parameters and kinds, for those who parse and print them. */
#ifndef BENCH_SHAPE_TABLES_H
#define BENCH_SHAPE_TABLES_H

#include "shapes.h"

#define LAYOUT_OWN (-1)

struct parameter_limits {
    const char *name;
    double min, max;
    bool whole;
};

struct initial {
    enum parameter parameter;
    double value;
};

#define MAX_INITIAL 22

/* A kind takes the parameters that have an initial value here, and no others. */
struct shape_kind {
    const char *name;
    const char *what;
    struct initial initial[MAX_INITIAL];
};

extern const struct parameter_limits parameters[PARAMETER_COUNT];
extern const struct shape_kind kinds[SHAPE_KIND_COUNT];

/* 0 where the kind does not take it. */
double initial_value(enum shape_kind_code kind, enum parameter parameter);

#endif
