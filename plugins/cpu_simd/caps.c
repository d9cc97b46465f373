/* SPDX-License-Identifier: Apache-2.0 */
/* The capabilities that each variant declares. */
#define _POSIX_C_SOURCE 200809L
#include "common/cpu_device.h"
#include "common/declared.h"
#include <attn/draft/compressor.h>
#include "cpu_simd/internal.h"

static const struct attn_indexer_caps indexer_caps = {COMMON_INDEXER_CAPS(16384, 1024)};
static const struct attn_recurrent_rule_caps rule_caps = {COMMON_RULE_CAPS(&indexer_caps.ext)};
static const struct attn_index_lists_caps list_caps = {COMMON_LISTS_CAPS(&rule_caps.ext),
                                                       .groups = BIT(ATTN_LISTS_SHARED) |
                                                                 BIT(ATTN_LISTS_PER_KV_HEAD)};
static const struct attn_recurrent_caps gdn_caps = {COMMON_RECURRENT_CAPS(&list_caps.ext)};
static const struct attn_mla_caps mla_caps = {COMMON_MLA_CAPS(gdn_caps)};

static const struct attn_backend_caps common_caps = {
    COMMON_CAPS,
    .layer_kinds = COMMON_LAYER_KINDS | BIT(ATTN_LAYER_INDEXER) | BIT(ATTN_LAYER_DRAFT_COMPRESSOR),
    .next = &mla_caps.ext,
    .name = "cpu_simd",
    .device = {ATTN_DEVICE_CPU, 0},
    .kernels = COMMON_KERNELS,
    .kv_dtypes = COMMON_KV_DTYPES | BIT(ATTN_KV_Q8_0) | BIT(ATTN_KV_Q4_0) | BIT(ATTN_KV_FP8_DS_V4) |
                 BIT(ATTN_KV_MXFP4),
    .terms = COMMON_TERMS | ATTN_TERM_STATIC_SINK,
    .features = COMMON_FEATURES | ATTN_FEATURE_KV_DTYPE_V,
    .block_sizes = &(const struct attn_range){1, 65536, 1},
    .preferred_layout = ATTN_KV_LAYOUT_HND,
    .preferred_block_size = 64,
    .decode_write_kv_dtypes = BIT(ATTN_KV_INT8_KV) | BIT(ATTN_KV_INT8_K),
    .cache_roles = BIT(ATTN_CACHE_REPLAY),
};

attn_status simd_probe(const struct attn_host *host, const struct attn_probe_sink *sink,
                       struct attn_error *error)
{
    const struct variant *variants[8];
    char isa[128];
    int32_t count = variants_of_machine(variants, 8, isa, sizeof(isa));
    const struct attn_device_info device = cpu_device(isa);
    attn_status status = sink->device(sink->user, &device, error);
    for (int32_t i = 0; i < count; i++) {
        struct attn_backend_caps caps = common_caps;
        caps.variant = variants[i]->name;
        caps.rank[0] = caps.rank[1] = variants[i]->rank;
        attn_status taken = sink->backend(sink->user, &caps, error);
        status = status ? status : taken;
    }
    return status;
}
