/* SPDX-License-Identifier: Apache-2.0 */
/* What is known of a library without running any of its code. */
#ifndef CORE_RUNTIME_ELF_FILE_H
#define CORE_RUNTIME_ELF_FILE_H

#include <sys/types.h>

#include "util/error.h"

/* A whole shared library for this machine. The loader maps a truncated one, too, and touches what
 * is not there. */
attn_status elf_check(int descriptor, off_t size, struct attn_error *error);

#endif
