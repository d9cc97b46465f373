/* SPDX-License-Identifier: Apache-2.0 */
/* A struct of the ABI with these fields, and its own size in the first one. */
#ifndef SUPPORT_SIZED_H
#define SUPPORT_SIZED_H

#define SIZED(type, ...) ((struct type){.struct_size = sizeof(struct type), __VA_ARGS__})

#endif
