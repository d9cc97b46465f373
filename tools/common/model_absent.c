/* SPDX-License-Identifier: Apache-2.0 */
/* Stands for model_config.c in a build without the distribution's JSON package. */
#include "command.h"
#include "model_config.h"

attn_status model_config_read(struct model_config *config, const char *file,
                              struct attn_error *error)
{
    *config = (struct model_config){.layers = NULL};
    return command_error(error, ATTN_ERROR_UNSUPPORTED, "configuration",
                         "built without libcjson, which reads configurations");
}

void model_config_warn(const struct model_config *config, const char *tool, const char *file)
{
}

void model_config_finish(struct model_config *config)
{
}
