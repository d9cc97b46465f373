/* SPDX-License-Identifier: Apache-2.0 */
/* ATTN_LOCK: the same choice again, or a refusal; host/lock_text.h has the file's form. */
#ifndef CORE_SELECT_LOCK_H
#define CORE_SELECT_LOCK_H

#include "select/assignment.h"

/* Before an assignment is bound. With ATTN_LOCK=FILE it has to be one of the file's records, word
 * for word, else the error says what differs from the record that is nearest. With
 * ATTN_LOCK=write:FILE its record is added to the file, unless it stands there. */
attn_status lock_apply(const attn_assignment *assignment, struct attn_error *error);

#endif
