/* SPDX-License-Identifier: Apache-2.0 */
/* A table whose struct_size lies. */
#include "../common.h"

static const struct attn_plugin table = {
    .struct_size = SIZE_MAX, .abi_version = ATTN_ABI_VERSION, .name = "table_size_large"};
SOUND_ENTRY(table)
