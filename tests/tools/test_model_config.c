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

#define GEMMA4(layers, members)                                                                    \
    "{\"model_type\": \"gemma4_text\", \"num_hidden_layers\": " layers ", "                        \
    "\"num_attention_heads\": 2, \"hidden_size\": 128, \"sliding_window\": 8, \"head_dim\": "      \
    "64" members "}"

/* Which layers are full, as characters, and the size of the last layer's heads. */
static void check_gemma4(const char *text, const char *full, int32_t head_size)
{
    struct model_config config;
    struct attn_error error = ATTN_ERROR_INIT;
    assert_int_equal(read_text(&config, text, &error), ATTN_OK);
    assert_int_equal(config.num_layers, strlen(full));
    for (int32_t i = 0; i < config.num_layers; i++) {
        assert_int_equal(config.layers[i].desc.has_window, full[i] == 's');
        assert_int_equal(config.layers[i].desc.scale, 1);
    }
    assert_int_equal(config.layers[config.num_layers - 1].desc.head_size, head_size);
    model_config_finish(&config);
}

static void gemma4_layers(void **state)
{
    (void)state;
    check_gemma4(GEMMA4("12", ""), "sssssfsssssf", 512);
    check_gemma4(GEMMA4("8", ""), "sssssfsf", 512);
    check_gemma4(GEMMA4("2", ", \"layer_types\": [\"full_attention\", \"sliding_attention\"]"),
                 "fs", 64);
    check_gemma4(GEMMA4("2", ", \"global_head_dim\": 128"), "sf", 128);
    check_gemma4(GEMMA4("2", ", \"global_head_dim\": null"), "sf", 64);
    check_gemma4(GEMMA4("2", ", \"per_layer_config\": null"), "sf", 512);
    check_gemma4(GEMMA4("2", ", \"per_layer_config\": {}"), "sf", 512);
    check_error(GEMMA4("2", ", \"per_layer_config\": {\"01\": {}}"), "per_layer_config");
    check_error(GEMMA4("2", ", \"per_layer_config\": [1]"), "per_layer_config");
}

/* A text_config without a type of its own. */
static void types_of_decoders(void **state)
{
    static const char k3[] =
        "{\"model_type\": \"kimi_k3\", \"text_config\": {"
        "\"num_hidden_layers\": 2, \"num_attention_heads\": 2, "
        "\"hidden_size\": 128, \"linear_attn_config\": {\"kda_layers\": [1]}}}";
    static const char llama4[] = "{\"model_type\": \"llama4\", \"text_config\": {"
                                 "\"num_hidden_layers\": 4, \"num_attention_heads\": 2, "
                                 "\"hidden_size\": 128}}";
    struct model_config config;
    struct attn_error error = ATTN_ERROR_INIT;
    (void)state;
    assert_int_equal(read_text(&config, k3, &error), ATTN_OK);
    assert_false(config.guessed);
    assert_int_equal(config.layers[0].desc.kind, ATTN_LAYER_RECURRENT);
    assert_int_equal(config.layers[0].rule.gate_per_channel, 1);
    assert_int_equal(config.layers[1].desc.kind, ATTN_LAYER_MLA);
    model_config_finish(&config);
    assert_int_equal(read_text(&config, llama4, &error), ATTN_OK);
    assert_false(config.guessed);
    assert_int_equal(config.layers[2].desc.chunk_size, 8192);
    assert_int_equal(config.layers[3].desc.chunk_size, 0);
    model_config_finish(&config);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(heads_of_vision_towers),
                                       cmocka_unit_test(gemma4_layers),
                                       cmocka_unit_test(types_of_decoders)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
