/* SPDX-License-Identifier: Apache-2.0 */
#include "compositions.h"

#define LISTED(id, table) &table,
const struct composition *const compositions[MAX_COMPOSITIONS + 1] = {COMPOSITIONS(LISTED)};
