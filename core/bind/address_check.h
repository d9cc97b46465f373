/* SPDX-License-Identifier: Apache-2.0 */
/* Where what an engine hands in lies: on the layers' device, or it is refused by name. */
#ifndef CORE_BIND_ADDRESS_CHECK_H
#define CORE_BIND_ADDRESS_CHECK_H

#include <attn/api.h>
#include <stdbool.h>

#include "util/abi_table.h"

/* A device that was stated; type 0: it was not, and passes. */
attn_status address_check_device(const attn_model *model, struct attn_device stated,
                                 const char *field, struct attn_error *error);
/* A tensor's; type 0 reads as the CPU. NULL passes. With `ask` the driver is asked, too. */
attn_status address_check_tensor(const attn_model *model, const struct attn_tensor *tensor,
                                 const char *field, bool ask, struct attn_error *error);
/* The driver is asked, where a backend of the model can ask it. NULL passes. Not for every step. */
attn_status address_ask(const attn_model *model, const void *address, const char *field,
                        struct attn_error *error);
/* Everything that a struct of ours and its extensions point at: the devices that tensors state, and
 * with `ask` the driver's word. Errors name the field, or `label`. */
attn_status address_check_all(const attn_model *model, const void *ours, enum abi_id id,
                              const struct attn_ext *next, const char *label, bool ask,
                              struct attn_error *error);
attn_status address_check_view(const attn_model *model, const struct attn_kv_view *view,
                               const char *field, struct attn_error *error);

#endif
