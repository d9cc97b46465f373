/* SPDX-License-Identifier: Apache-2.0 */
/* What a GPU plugin's probe finds on a machine that the test makes up. */
#ifndef TESTS_GPU_FOUND_H
#define TESTS_GPU_FOUND_H

#include <attn/plugin.h>

#include "support/test.h"

/* Sets an environment variable; NULL removes it. */
void set_variable(const char *name, const char *value);
/* Probes. `devices`: "id:arch/multiprocessors " of each; `backends`: "id " of each. Without a
 * backend the plugin is absent by the error's `field` (NULL: any). */
void expect_found(const struct attn_plugin *plugin, const char *devices, const char *backends,
                  const char *field);
/* The plugin in the file that a test's one argument names; NULL, and says why. */
const struct attn_plugin *plugin_of_argument(int argc, char **argv);

#endif
