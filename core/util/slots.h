/* SPDX-License-Identifier: Apache-2.0 */
/* Functions of struct attn_api and its tables are declared by the types of their slots; what each
 * does stands there. A function has its slot's name, but for a few. */
#ifndef CORE_UTIL_SLOTS_H
#define CORE_UTIL_SLOTS_H

#include <attn/api.h>

#define SLOT_OF(table, slot, function) __typeof__(*((const struct table *)0)->slot) function
#define SLOT(name) SLOT_OF(attn_api, name, name)

#endif
