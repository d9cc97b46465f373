/* SPDX-License-Identifier: Apache-2.0 */
/* Mistakes of what every call keeps: structs of a newer core, extensions, errors, outputs on
 * failure. */
#include "mutants.h"

static const struct mutant mutants[] = {
    {.name = "mutant_calls_grown_refused", .structs = STRUCTS_GROWN_REFUSED},
    {.name = "mutant_calls_extension_refused", .structs = STRUCTS_EXTENSION_REFUSED},
    {.name = "mutant_calls_error_written", .writes_error = true},
    {.name = "mutant_calls_error_needed", .needs_error = true},
    {.name = "mutant_calls_outputs_left", .leaves_outputs = true},
    {.name = "mutant_calls_state_left", .leaves_state = true},
};
const struct mutant_list call_mutants = {mutants, sizeof mutants / sizeof *mutants};
