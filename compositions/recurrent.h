/* SPDX-License-Identifier: Apache-2.0 */
/* Recurrent layers: recurrent.c selects, binds and runs; recurrent_slots.c reads batches. */
#ifndef COMPOSITIONS_RECURRENT_H
#define COMPOSITIONS_RECURRENT_H

#include <attn/draft/recurrent.h>

#include "compositions.h"

/* By the last plan: what the views carry. */
struct recurrent_batch {
    struct attn_batch_recurrent whole, decode, prefill;
    struct attn_batch_replay rings[3]; /* theirs */
};

/* composition.view_split: checks the batch's extensions and cuts them for its parts. */
attn_status recurrent_view_split(attn_plan *plan, struct attn_error *error);

#endif
