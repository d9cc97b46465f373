/* SPDX-License-Identifier: Apache-2.0 */
/* Terms of layers that attn-info does not show, and the fields that errors name, by configurations.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common/model_config.h"
#include "support/test.h"

#define VISION(type, members)                                                                      \
    "{\"model_type\": \"" type "\", \"num_hidden_layers\": 1, \"hidden_size\": 64, "               \
    "\"num_attention_heads\": 2, \"vision_config\": {\"num_hidden_layers\": 1, " members "}}"

static attn_status read_text(struct model_config *config, const char *text,
                             struct attn_error *error)
{
    char file[] = "/tmp/attn-config-XXXXXX";
    const int fd = mkstemp(file);
    assert_true(fd >= 0);
    assert_int_equal(write(fd, text, strlen(text)), strlen(text));
    close(fd);
    const attn_status status = model_config_read(config, file, error);
    unlink(file);
    return status;
}

static void check_error(const char *text, const char *field)
{
    struct model_config config;
    struct attn_error error = ATTN_ERROR_INIT;
    assert_int_equal(read_text(&config, text, &error), ATTN_ERROR_INVALID_ARGUMENT);
    assert_string_equal(error.field, field);
}

/* The last layer, of the vision tower. */
static void check_tower(const char *text, int32_t head_size, double scale)
{
    struct model_config config;
    struct attn_error error = ATTN_ERROR_INIT;
    assert_int_equal(read_text(&config, text, &error), ATTN_OK);
    const struct attn_layer_desc *desc = &config.layers[config.num_layers - 1].desc;
    assert_int_equal(desc->kind, ATTN_LAYER_ENCODER);
    assert_int_equal(desc->head_size, head_size);
    assert_true(fabs(desc->scale - scale) < 1e-6);
    model_config_finish(&config);
}

static void heads_of_vision_towers(void **state)
{
    (void)state;
    check_tower(VISION("gemma3", "\"hidden_size\": 1152"), 72, 1 / sqrt(72));
    check_tower(VISION("gemma4", "\"hidden_size\": 1152"), 72, 1);
    check_tower(VISION("gemma4", "\"hidden_size\": 1152, \"head_dim\": 64"), 64, 1);
    check_tower(VISION("llama", "\"vt_hidden_size\": 1024"), 64, 1. / 8);
    check_tower(VISION("llama", "\"vt_hidden_size\": 1, \"qkv_hidden_size\": 1024"), 64, 1. / 8);
    check_tower(VISION("llama", "\"patch_size\": 14"), 72, 1 / sqrt(72));
    check_error(VISION("llama", "\"hidden_size\": 1000"), "hidden_size");
    check_error(VISION("llama", "\"qkv_hidden_size\": 1000"), "qkv_hidden_size");
    check_error(VISION("llama", "\"vt_hidden_size\": \"wide\""), "vt_hidden_size");
    check_error(VISION("llama", "\"head_dim\": 68"), "head_dim");
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(heads_of_vision_towers)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
