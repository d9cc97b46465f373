/* SPDX-License-Identifier: Apache-2.0 */
/* Layers whose queries are split over ranks. A rank's slice of a request is to its kernels a
 * request of its own, whose keys end with the slice, so that every term goes by absolute positions.
 * The step's new keys are gathered from all ranks before they are written. */
#ifndef COMPOSITIONS_SPLIT_QUERIES_H
#define COMPOSITIONS_SPLIT_QUERIES_H

#include "ranks.h"

/* Slices that a rank has of one request: 1, or 2 in zig-zag order. */
int32_t queries_slices(const attn_layer *layer);
/* Integers that a plan needs more. */
int64_t queries_max_integers(const attn_plan *plan);
attn_status queries_init(attn_plan *plan, struct attn_error *error);
void queries_add_areas(attn_plan *plan, const struct step *step);
/* Turns plan->given into this rank's slices, where the batch brings one rank's queries of requests
 * that have more. */
attn_status queries_split(attn_plan *plan, struct attn_error *error);
/* Rows of rank `rank`, one request's or all before it. */
int32_t queries_of(const attn_layer *layer, int32_t queries, int32_t rank);

/* The keys of all ranks in the order of requests, see step.bring_keys. */
attn_status queries_gather_keys(attn_plan *plan, struct step *step, const struct attn_step_io **io,
                                struct attn_error *error);
/* The same again, each slice's keys behind those of the one before. */
attn_status queries_slice_keys(attn_plan *plan, struct step *step, const struct attn_step_io *io,
                               struct all_keys *slices, struct attn_error *error);

#endif
