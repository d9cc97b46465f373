/* SPDX-License-Identifier: Apache-2.0 */
/* The text of an assignment from another rank. It is taken as it is, so that exporting what came of
 * it gives the same text, or refused. The first byte says how many layers are selected for. */
#include <string.h>

#include "../core/select_fixture.h"
#include "fuzz.h"
#include "support/client.h"

#define MOST_LAYERS 4

/* The export of what an import gave imports again, and is then the same. */
static void check_export(struct fixture *fixture, attn_assignment *assignment,
                         struct attn_select_options *options,
                         const struct attn_layer_desc *const *layers, int32_t num_layers)
{
    static char first[8192], second[8192];
    struct attn_error error = ATTN_ERROR_INIT;
    size_t needed = 0;
    attn_assignment *again = NULL;
    FUZZ_CHECK(assignment_export(assignment, first, sizeof first, &needed, &error) == ATTN_OK);
    FUZZ_CHECK(needed == strlen(first) + 1);
    options->import_text = first;
    FUZZ_CHECK(select_layers(&fixture->runtime, options, layers, num_layers, &again, &error) ==
               ATTN_OK);
    FUZZ_CHECK(assignment_export(again, second, sizeof second, &needed, &error) == ATTN_OK);
    FUZZ_CHECK(strcmp(first, second) == 0);
    assignment_destroy(again);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size)
{
    static const char *const names[MOST_LAYERS] = {"layers.0", "a b", "name=x", "layers.3"};
    struct fixture fixture;
    struct attn_layer_desc descs[MOST_LAYERS];
    const struct attn_layer_desc *layers[MOST_LAYERS];
    struct blocks blocks = {.count = 0};
    struct input input = {bytes, size};
    int32_t num_layers = 1 + input_byte(&input) % MOST_LAYERS;
    struct attn_error error = ATTN_ERROR_INIT;
    attn_assignment *assignment = NULL;
    char *text = blocks_add(&blocks, input.left + 1);
    memcpy(text, input.at, input.left);
    fixture_init(&fixture);
    fixture_add(&fixture, "cpu_fast", "avx2", 5);
    fixture_add(&fixture, "cpu_ref", "", 0);
    fixture_add(&fixture, "cpu_window", "", 7)->terms |= ATTN_TERM_SOFT_CAP;
    for (int32_t i = 0; i < MOST_LAYERS; i++) {
        descs[i] = fixture_layer(names[i]);
        descs[i].block_size = i == 1 ? 0 : 16;
        layers[i] = &descs[i];
    }
    descs[2].soft_cap = 30;
    struct attn_select_options options = SIZED(attn_select_options, .import_text = text);
    attn_status status =
        select_layers(&fixture.runtime, &options, layers, num_layers, &assignment, &error);
    fuzz_check_error(status, &error);
    FUZZ_CHECK((status == ATTN_OK) == (assignment != NULL));
    if (status == ATTN_OK) {
        check_export(&fixture, assignment, &options, layers, num_layers);
    }
    assignment_destroy(assignment);
    fixture_finish(&fixture);
    blocks_free(&blocks);
    return 0;
}
