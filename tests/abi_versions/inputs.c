/* SPDX-License-Identifier: Apache-2.0 */
/* An engine of the next version: inputs CORE this|next. A core takes tables that are longer than it
 * knows, and refuses inputs whose unknown fields are set, by name. */
#include <attn/api.h>
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define TAIL(s) memset((s).grown_tail, 0xff, sizeof(s).grown_tail)
#define CHECK(condition)                                                                           \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            fprintf(stderr, "inputs: line %d: %s (%d: %s: %s)\n", __LINE__, #condition,            \
                    error.status, error.field, error.message);                                     \
            return EXIT_FAILURE;                                                                   \
        }                                                                                          \
    } while (0)

static struct attn_error error = ATTN_ERROR_INIT;

int main(int argc, char **argv)
{
    void *library = argc > 2 ? dlopen(argv[1], RTLD_NOW | RTLD_LOCAL) : NULL;
    const int knows = argc > 2 && strcmp(argv[2], "next") == 0;
    attn_get_api_fn *get_api = NULL;
    const struct attn_api *api;
    CHECK(library != NULL && (*(void **)&get_api = dlsym(library, ATTN_GET_API_SYMBOL)) != NULL);
    /* Nothing from before the range, nor from another major. */
    CHECK(get_api(0, ATTN_ABI_VERSION_MIN - 1, &api, &error) == ATTN_ERROR_ABI_VERSION);
    CHECK(get_api(ATTN_MAKE_VERSION(9, 0), ATTN_MAKE_VERSION(9, 9), &api, &error) ==
          ATTN_ERROR_ABI_VERSION);
    CHECK(get_api(ATTN_ABI_VERSION_MIN, ATTN_ABI_VERSION, &api, &error) == ATTN_OK);
    CHECK(ATTN_VERSION_ACCEPTS(api->abi_version));
    CHECK(ATTN_HAS_SLOT(api, runtime_create));
    CHECK(ATTN_HAS_FIELD(api, grown_tail) == knows);

    struct attn_host host = {.struct_size = sizeof host};
    struct attn_runtime_options options = {
        .struct_size = sizeof options, .host = &host, .no_default_plugins = 1, .isolation = -1};
    attn_runtime *runtime;
    TAIL(host);
    CHECK(api->runtime_create(&options, &runtime, &error) == ATTN_OK);
    api->runtime_destroy(runtime);
    TAIL(options);
    CHECK((api->runtime_create(&options, &runtime, &error) == ATTN_OK) == knows);
    CHECK(knows || (error.status == ATTN_ERROR_STRUCT_SIZE && runtime == NULL &&
                    strcmp(error.field, "attn_runtime_options") == 0));
    api->runtime_destroy(runtime);
    memset(options.grown_tail, 0, sizeof options.grown_tail);
    CHECK(api->runtime_create(&options, &runtime, &error) == ATTN_OK);

    struct attn_layer_desc layer = {.struct_size = sizeof layer,
                                    .name = "layer",
                                    .causal = 1,
                                    .dtype = ATTN_DTYPE_F32,
                                    .num_q_heads = 4,
                                    .num_kv_heads = 2,
                                    .head_size = 64,
                                    .scale = 0.125f,
                                    .block_size = 16};
    const struct attn_layer_desc *layers[] = {&layer};
    attn_assignment *assignment;
    CHECK(api->select(runtime, NULL, layers, 1, &assignment, &error) == ATTN_OK);
    api->assignment_destroy(assignment);
    TAIL(layer);
    CHECK((api->select(runtime, NULL, layers, 1, &assignment, &error) == ATTN_OK) == knows);
    CHECK(knows || (error.status == ATTN_ERROR_STRUCT_SIZE && assignment == NULL &&
                    strcmp(error.field, "attn_layer_desc") == 0));
    api->assignment_destroy(assignment);
    memset(layer.grown_tail, 0, sizeof layer.grown_tail);
    /* An extension grows in the same way, and an element of one of its arrays. */
    struct attn_cache_desc cache = {
        .role = ATTN_CACHE_EXTRA, .kv_dtype = ATTN_KV_F32, .num_heads = 1, .head_size = 8};
    struct attn_layer_caches caches = {.ext = {ATTN_EXT_LAYER_CACHES, 0, sizeof caches, NULL},
                                       .caches = &cache,
                                       .num_caches = 1,
                                       .cache_stride = sizeof cache};
    layer.next = &caches.ext;
    for (int i = 0; i < 3; i++) {
        memset(caches.grown_tail, i == 1 ? 0xff : 0, sizeof caches.grown_tail);
        memset(cache.grown_tail, i == 2 ? 0xff : 0, sizeof cache.grown_tail);
        CHECK(api->select(runtime, NULL, layers, 1, &assignment, &error) != ATTN_OK);
        /* cpu_ref takes no such caches: that is what is refused where the tails are understood */
        const int tail = error.status == ATTN_ERROR_STRUCT_SIZE &&
                         strcmp(error.field, i == 1 ? "attn_layer_desc" : "attn_cache_desc") == 0;
        CHECK(tail == (i > 0 && !knows));
    }
    layer.next = NULL;
    /* No backend declares it: refused at selection, whether the bit is known or not. */
    layer.needed_features = UINT64_C(1) << 62;
    CHECK(api->select(runtime, NULL, layers, 1, &assignment, &error) != ATTN_OK);
    CHECK(strcmp(error.field, "needed_features") == 0);
    api->runtime_destroy(runtime);
    return EXIT_SUCCESS;
}
