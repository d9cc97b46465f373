/* SPDX-License-Identifier: Apache-2.0 */
/* Layer descriptions with extensions through selection, and what is served through binding: the
 * cache that a layer asks for. Each layer is a sample with some of its words changed, structs of
 * wild sizes, and chains of any extensions. */
#include <string.h>

#include "backend.h"
#include "bind/bound.h"
#include "support/client.h"
#include "util/counts.h"
#include "util/structs.h"

#define MOST_LAYERS 4

/* Links a copy of an extension, which says some size or id, in front of the chain. */
static struct attn_ext *link_ext(struct blocks *blocks, struct input *input, struct attn_ext *ext,
                                 size_t size, const struct attn_ext *next)
{
    input_patch(input, ext, sizeof *ext, size - size % 4);
    const size_t says = input_struct_size(input, size);
    struct attn_ext *copy = blocks_struct(blocks, input, ext, size, says);
    const uint8_t tag = input_byte(input);
    copy->id = tag == 1 ? (uint32_t)input_int(input) : copy->id;
    copy->id =
        copy->id == ATTN_EXT_CONTEXT_PARALLEL ? ext->id : copy->id; /* that one holds pointers */
    copy->flags = tag == 2 ? ATTN_EXT_OPTIONAL : (uint32_t)(tag == 3 ? 2 : 0);
    copy->struct_size = says;
    copy->next = tag == 4 ? copy : next;
    return copy;
}

/* Further caches of any form, in elements of any size, of which as many are there as they say. */
static struct attn_ext *link_caches(struct blocks *blocks, struct input *input, struct sampled *s,
                                    const struct attn_ext *next)
{
    const size_t element = input_struct_size(input, sizeof s->cache);
    const int32_t count = input_byte(input) % (ATTN_MAX_CACHES + 2);
    const size_t stride = element <= MAX_ELEMENT ? element : sizeof s->cache;
    uint8_t *array = blocks_add(blocks, (size_t)count * stride);
    for (int32_t i = 0; i < count; i++) {
        struct attn_cache_desc cache = s->cache;
        input_patch(input, &cache, 0, sizeof cache);
        memcpy(array + (size_t)i * stride, &cache, stride < sizeof cache ? stride : sizeof cache);
    }
    s->caches.num_caches = count;
    s->caches.cache_stride = element <= INT32_MAX ? (int32_t)element : INT32_MAX;
    s->caches.caches = input_byte(input) == 1 ? NULL : (const struct attn_cache_desc *)array;
    struct attn_layer_caches *copy =
        blocks_struct(blocks, input, &s->caches, sizeof s->caches, sizeof s->caches);
    copy->ext.next = next;
    return &copy->ext;
}

static struct attn_ext *add_extensions(struct blocks *blocks, struct input *input,
                                       struct sampled *s)
{
    /* Pointers in the middle of a context-parallel extension are not numbers. */
    struct attn_context_parallel cp = s->cp;
    struct attn_collectives *ranks = blocks_add(blocks, sizeof *ranks);
    struct attn_ext *next = NULL;
    const uint8_t more = input_byte(input);
    *ranks = s->ranks;
    if (sample_has(s, &s->cp.ext) || more & 1) {
        input_patch(input, ranks, offsetof(struct attn_collectives, rank),
                    offsetof(struct attn_collectives, all_gather));
        const uint8_t tag = input_byte(input);
        cp.decode = tag == 1 ? NULL : ranks;
        cp.prefill = tag == 2 ? ranks : NULL;
        ranks->all_to_all = tag == 3 ? NULL : ranks->all_to_all;
        ranks->struct_size = input_struct_size(input, sizeof *ranks);
        const size_t says = input_struct_size(input, sizeof cp);
        input_patch(input, &cp, offsetof(struct attn_context_parallel, interleave), sizeof cp);
        cp.ext.struct_size = says;
        struct attn_ext *copy = blocks_struct(blocks, input, &cp, sizeof cp, says);
        copy->struct_size = says;
        next = copy;
    }
    const uint32_t chosen =
        (more >> 1 & 15u) | (more & 32 ? input_byte(input) << 4 : 0u) | (more & 64u) << 6;
    const struct {
        struct attn_ext *ext;
        size_t size;
    } all[] = {{&s->mla.ext, sizeof s->mla},
               {&s->gdn.ext, sizeof s->gdn},
               {&s->mm_quant.ext, sizeof s->mm_quant},
               {&s->lists.ext, sizeof s->lists},
               {&s->rule.ext, sizeof s->rule},
               {&s->norm.ext, sizeof s->norm},
               {&s->indexer.ext, sizeof s->indexer},
               {&s->index_write.ext, sizeof s->index_write},
               {&s->compressor.ext, sizeof s->compressor},
               {&s->compressed.ext, sizeof s->compressed},
               {&s->output_rope.ext, sizeof s->output_rope},
               {&s->rounding.ext, sizeof s->rounding}};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        if (sample_has(s, all[i].ext) || chosen >> i & 1) {
            next = link_ext(blocks, input, all[i].ext, all[i].size, next);
        }
    }
    if (sample_has(s, &s->caches.ext) || chosen >> 12) {
        next = link_caches(blocks, input, s, next);
    }
    return next;
}

static const struct attn_layer_desc *add_layer(struct blocks *blocks, struct input *input,
                                               int32_t index)
{
    static const char *const names[MOST_LAYERS] = {"layers.0", "layers.1", "b", "layers.3"};
    struct sampled s;
    sample_layer(&s, input_byte(input) % SAMPLE_COUNT);
    s.desc.name = input_text(input, names[index]);
    const uint8_t shares = input_byte(input);
    s.desc.kv_sharing_target = shares == 1   ? names[0]
                               : shares == 2 ? input_text(input, names[1])
                                             : NULL;
    s.desc.next = add_extensions(blocks, input, &s);
    input_patch(input, &s.desc, offsetof(struct attn_layer_desc, kind), sizeof s.desc);
    const size_t says = input_struct_size(input, sizeof s.desc);
    struct attn_layer_desc *copy = blocks_struct(blocks, input, &s.desc, sizeof s.desc, says);
    memcpy(copy, &says, sizeof says);
    return input_byte(input) == 255 ? NULL : copy;
}

static void check_verdicts(const attn_assignment *assignment, int32_t num_backends)
{
    for (int32_t i = 0; i < assignment->num_layers * NUM_PHASES; i++) {
        struct attn_choice choice = {.struct_size = sizeof choice};
        FUZZ_CHECK(assignment_choice(assignment, i / 2, i % 2, &choice) == ATTN_OK);
        FUZZ_CHECK(choice.backend >= -1 && choice.backend < num_backends);
        FUZZ_CHECK((choice.backend < 0) == (choice.status != ATTN_OK));
        FUZZ_CHECK(choice.kv_dtype != ATTN_KV_AUTO);
        for (int32_t b = 0; b < num_backends; b++) {
            int32_t verdict = -1, num_reasons = -1;
            FUZZ_CHECK(assignment_verdict(assignment, i / 2, i % 2, b, &verdict, &num_reasons) ==
                       ATTN_OK);
            FUZZ_CHECK((verdict == ATTN_VERDICT_CHOSEN) == (b == choice.backend));
            FUZZ_CHECK((verdict == ATTN_VERDICT_UNSUPPORTED) == (num_reasons > 0));
            for (int32_t r = 0; r < num_reasons; r++) {
                struct attn_reason reason = {.struct_size = sizeof reason};
                FUZZ_CHECK(assignment_reason(assignment, i / 2, i % 2, b, r, &reason) == ATTN_OK);
                FUZZ_CHECK(reason.field[0] != '\0' &&
                           strlen(reason.asked) + strlen(reason.supported) > 0);
            }
        }
    }
}

/* The cache that the core asks an engine for is one that it takes back. */
static void check_cache(attn_layer *layer)
{
    struct attn_cache_spec spec = {.struct_size = sizeof spec};
    struct attn_kv_view k = {.struct_size = sizeof k}, v = {.struct_size = sizeof v};
    struct attn_error error = ATTN_ERROR_INIT;
    static uint8_t somewhere[256]
        __attribute__((aligned(256))); /* an address; nothing is read there */
    void *further[ATTN_MAX_CACHES];
    int64_t blocks[ATTN_MAX_CACHES];
    for (int32_t i = 0; i < ATTN_MAX_CACHES; i++) {
        further[i] = somewhere;
        blocks[i] = 2;
    }
    const struct attn_cache_memory memory =
        SIZED(attn_cache_memory, .base = somewhere, .num_blocks = 2, .further = further,
              .further_num_blocks = blocks, .num_further = layer->num_further);
    attn_status status = layer_bind_memory(layer, &memory, &error);
    fuzz_check_error(status, &error);
    status = layer_cache_spec(layer, 0, &spec, &error);
    fuzz_check_error(status, &error);
    if (status != ATTN_OK || spec.kind == ATTN_KV_SPEC_NONE || spec.kind == ATTN_KV_SPEC_STATE) {
        return;
    }
    FUZZ_CHECK(spec.page_bytes > 0 && spec.padded_page_bytes >= spec.page_bytes);
    FUZZ_CHECK(spec.ndim >= 0 && spec.ndim <= ATTN_KV_SPEC_MAX_DIMS);
    status = layer_kv_views(layer, somewhere, 2, &k, &v, &error);
    fuzz_check_error(status, &error);
    if (status == ATTN_OK) {
        const bool latent =
            spec.kind == ATTN_KV_SPEC_MLA || spec.kind == ATTN_KV_SPEC_SLIDING_WINDOW_MLA;
        const struct attn_kv_view *const views[] = {&k, &v};
        status = layer_bind_caches(layer, views, latent ? 1 : 2, &error);
        fuzz_check_error(status, &error);
    }
}

static void bind(struct fixture *fixture, const attn_assignment *assignment)
{
    struct attn_error error = ATTN_ERROR_INIT;
    attn_model *model = NULL;
    attn_status status = model_create(&fixture->runtime, assignment, NULL, &model, &error);
    fuzz_check_error(status, &error);
    FUZZ_CHECK((status == ATTN_OK) == (model != NULL));
    FUZZ_CHECK(assignment->complete || status == ATTN_ERROR_ORDER);
    for (int32_t i = 0; model != NULL && i < assignment->num_layers; i++) {
        check_cache(model_layer(model, i));
    }
    model_destroy(model);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size)
{
    static const char *const texts[] = {"", "parts", "whole?", "decode=parts;prefill=whole"};
    static const int32_t block_sizes[] = {48, 16, 1};
    struct input input = {bytes, size};
    struct blocks blocks = {.count = 0};
    struct fixture fixture;
    struct attn_error error = ATTN_ERROR_INIT;
    attn_assignment *assignment = NULL;
    const struct attn_layer_desc *layers[MOST_LAYERS];
    const uint8_t how = input_byte(&input);
    const int32_t num_layers = 1 + input_byte(&input) % MOST_LAYERS;
    for (int32_t i = 0; i < num_layers; i++) {
        layers[i] = add_layer(&blocks, &input, i);
    }
    backend_init(&fixture);
    struct attn_select_options options = {.struct_size = sizeof options,
                                          .backend = texts[how % 4],
                                          .block_sizes = how & 4 ? block_sizes : NULL,
                                          .num_block_sizes = how & 4 ? 3 : 0,
                                          .flags = how & 8 ? ATTN_SELECT_KEEP_UNSERVED : 0};
    attn_status status =
        select_layers(&fixture.runtime, &options, layers, num_layers, &assignment, &error);
    fuzz_check_error(status, &error);
    FUZZ_CHECK((status == ATTN_OK) == (assignment != NULL));
    if (status == ATTN_OK) {
        check_verdicts(assignment, fixture.runtime.num_backends);
        bind(&fixture, assignment);
    }
    assignment_destroy(assignment);
    fixture_finish(&fixture);
    blocks_free(&blocks);
    return 0;
}
