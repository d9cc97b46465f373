/* SPDX-License-Identifier: Apache-2.0 */
/* The table by which the core knows this room. */
#include "operators.h"

const struct steering steering = {known_read, known_rank, known_lacks, lock_choice, lock_hold};
