/* SPDX-License-Identifier: Apache-2.0 */
/* Attends whose output is codes (enum attn_output_form), which the backend declares to write. */
#ifndef CHECK_OUTPUT_H
#define CHECK_OUTPUT_H

#include "cases/problem.h"
#include "harness/trial.h"

#define CASE_OUTPUTS 6
extern const struct case_output case_outputs[CASE_OUTPUTS];

/* Whether the form is declared and its groups divide the case's rows. */
bool case_output_fits(const struct case_space *space, const struct attend_case *c,
                      const struct case_output *output);
/* "fp8_group_64.pow2", at most `size` bytes. */
void case_output_name(const struct case_output *output, char *name, size_t size);

/* Adds the buffers of codes to a problem's image, if it has some. */
void output_add(struct check_problem *p);
/* The tested side's layer and arguments then ask for codes, over its copy of the image at `base`;
 * `b` keeps what they point at. The reference goes on writing numbers. */
void output_bind(const struct check_problem *p, struct output_binding *b,
                 struct attn_layer_desc *layer, struct attn_attend_args *args, uint8_t *base,
                 struct attn_device device);
/* Bytes of a row of codes: rows are slices of wider ones where the case's are. */
int64_t output_row_bytes(const struct check_problem *p);
/* Compares codes and scales with the reference's numbers in `out`, for rows whose rows[t] is set.
 */
enum trial_result verify_codes(struct trial *trial, const struct check_problem *p,
                               const struct attn_tensor *out, const uint8_t *rows,
                               const uint8_t *expected, const uint8_t *found);
/* Clears codes and scales of the batch's rows without rows[t] in an image that was read back: of
 * rows that a fast prefill was not asked for, codes may be of anything. */
void output_forget(const struct check_problem *p, const uint8_t *rows, uint8_t *found);

#endif
