/* SPDX-License-Identifier: Apache-2.0 */
/* Layers other than a causal decoder's: encoders, cross attention, vision towers. */
#include <cjson/cJSON.h>
#include <math.h>
#include <string.h>

#include "model_reading.h"

/* The size of heads that share the hidden size, which stands in `field`. */
static int32_t size_of_heads(struct reading *r, const char *field, int32_t hidden, int32_t heads)
{
    if (hidden % heads != 0 || hidden / heads % 8 != 0 || hidden / heads > 512) {
        reading_fail(r, field, "%d over %d heads; heads of multiples of 8 up to 512 are allowed",
                     hidden, heads);
        return 8;
    }
    return hidden / heads;
}

static struct model_layer *make_encoder(struct reading *r, const char *prefix, int32_t encoder,
                                        int32_t index, int32_t heads, int32_t head_size,
                                        int32_t dtype)
{
    struct model_layer *layer = add_layer(r, prefix, index);
    struct attn_layer_desc *desc = &layer->desc;
    layer->tower = encoder == ATTN_ENCODER_ONLY ? 0 : 1;
    desc->kind = ATTN_LAYER_ENCODER;
    desc->encoder = encoder;
    desc->dtype = dtype;
    desc->num_q_heads = desc->num_kv_heads = heads;
    desc->head_size = head_size;
    desc->scale = (float)(1 / sqrt(head_size));
    desc->window_left = desc->window_right = -1;
    return layer;
}

static void read_whisper(struct reading *r, const cJSON *root)
{
    int32_t hidden = read_int(r, root, "d_model", 1280, 8, 1 << 20);
    int32_t encoder_heads = read_int(r, root, "encoder_attention_heads", 20, 1, 1024);
    int32_t heads = read_int(r, root, "decoder_attention_heads", 20, 1, 1024);
    int32_t encoders = read_int(r, root, "encoder_layers", 32, 1, 500);
    int32_t decoders = read_int(r, root, "decoder_layers", 32, 1, 250);
    int32_t encoder_size = size_of_heads(r, "d_model", hidden, encoder_heads);
    int32_t size = size_of_heads(r, "d_model", hidden, heads);
    for (int32_t i = 0; i < encoders; i++) {
        make_encoder(r, "encoder.layers", ATTN_ENCODER_OF_DECODER, i, encoder_heads, encoder_size,
                     ATTN_DTYPE_F16);
    }
    for (int32_t i = 0; i < decoders; i++) {
        for (int32_t cross = 0; cross < 2; cross++) {
            struct model_layer *layer = add_layer(r, cross ? "decoder.cross" : "decoder.self", i);
            struct attn_layer_desc *desc = &layer->desc;
            desc->kind = cross ? ATTN_LAYER_CROSS : ATTN_LAYER_DECODER;
            desc->dtype = ATTN_DTYPE_F16;
            desc->causal = !cross;
            desc->num_q_heads = desc->num_kv_heads = heads;
            desc->head_size = size;
            desc->scale = (float)(1 / sqrt(size));
            desc->window_left = desc->window_right = -1;
        }
    }
}

static void read_bert(struct reading *r, const cJSON *root)
{
    int32_t layers = read_int(r, root, "num_hidden_layers", 12, 1, 1000);
    struct attn_layer_desc heads = {0};
    read_heads(r, root, &heads);
    check_heads(r, &heads, "num_key_value_heads", "head_dim");
    for (int32_t i = 0; i < layers; i++) {
        make_encoder(r, "encoder.layer", ATTN_ENCODER_ONLY, i, heads.num_q_heads, heads.head_size,
                     heads.dtype);
    }
}

/* The field that gives the width of all heads; where none does, one that is absent. */
static const char *field_of_width(const cJSON *vision)
{
    static const char *const names[] = {"hidden_size", "qkv_hidden_size", "vt_hidden_size"};
    size_t i = 0;
    for (; i < 2; i++) {
        const cJSON *item = read_member(vision, names[i]);
        if (item != NULL && !cJSON_IsNull(item)) {
            break;
        }
    }
    return names[i];
}

/* Vision towers name their sizes in several ways; Kimi K3's heads have a width of their own.
 * Gemma 4's norms queries and keys in place of a scale. */
static void read_vision(struct reading *r, const cJSON *root, const char *model_type)
{
    const cJSON *vision = read_member(root, "vision_config");
    const int32_t depth = read_either(r, vision, "depth", "vt_num_hidden_layers", 27, 500);
    const int32_t layers = read_int(r, vision, "num_hidden_layers", depth, 1, 500);
    const int32_t named = read_either(r, vision, "num_heads", "vt_num_attention_heads", 16, 1024);
    const int32_t heads = read_int(r, vision, "num_attention_heads", named, 1, 1024);
    const char *field = field_of_width(vision);
    const int32_t hidden = read_int(r, vision, field, 1152, 8, 1 << 20);
    int32_t size = read_int(r, vision, "head_dim", 0, 8, 512);
    if (size == 0) {
        size = size_of_heads(r, field, hidden, heads);
    } else if (size % 8 != 0) {
        reading_fail(r, "head_dim", "%d; multiples of 8 up to 512 are allowed", size);
    }
    const bool norms = strncmp(model_type, "gemma4", strlen("gemma4")) == 0;
    for (int32_t i = 0; i < layers; i++) {
        struct model_layer *layer = make_encoder(r, "vision.layers", ATTN_ENCODER_MULTIMODAL, i,
                                                 heads, size, ATTN_DTYPE_BF16);
        layer->desc.scale = norms ? 1 : layer->desc.scale;
    }
}

void read_tower(struct reading *r, const cJSON *root, const char *model_type)
{
    if (strcmp(model_type, "whisper") == 0) {
        read_whisper(r, root);
    } else if (strcmp(model_type, "bert") == 0) {
        read_bert(r, root);
    } else {
        read_vision(r, root, model_type);
    }
}
