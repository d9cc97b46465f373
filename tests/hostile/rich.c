/* SPDX-License-Identifier: Apache-2.0 */
/* No defect: two devices, two backends, and something in every field that a declaration has. */
#include "common.h"

#include <attn/recurrent.h>
#include <attn/mla.h>

static const struct attn_range blocks[] = {{16, 64, 16}, {128, 1024, 128}};
static const struct attn_head_size_range heads[] = {{{64, 256, 64}, {64, 256, 64}, 1},
                                                    {{192, 192, 1}, {128, 128, 1}, 0}};
static const struct attn_refused_combination refused[] = {
    {ATTN_TERM_ALIBI | ATTN_TERM_SOFT_CAP, 0, 0,
     "ALiBi und Deckel: nicht zusammen \xe2\x80\x94 nie"},
    {0, ATTN_FEATURE_LSE, UINT64_C(1) << ATTN_KV_FP8_E4M3, "no LSE over fp8"},
    {.why = "decodes of 128 in bf16",
     .dtypes = 1 << ATTN_DTYPE_BF16,
     .layer_kinds = 1 << ATTN_LAYER_DECODER,
     .phases = 1 << ATTN_PHASE_DECODE,
     .head_size = {128, 128, 1}}};
static const uint32_t extensions[] = {0x10077, 0xffffffff};

static attn_status probe(const struct attn_host *host, const struct attn_probe_sink *sink,
                         struct attn_error *error)
{
    const struct attn_recurrent_caps gdn = {
        {ATTN_EXT_CAPS_RECURRENT, 0, sizeof gdn, NULL}, 128, 256, 4, 3};
    const struct attn_ext other = {0x10077, ATTN_EXT_OPTIONAL, sizeof other, &gdn.ext};
    const struct attn_mla_caps mla = {
        {ATTN_EXT_CAPS_MLA, 0, sizeof mla, &other}, 512, 64, 16, 2, 2048, 64};
    struct attn_device_info device = sound_device();
    struct attn_backend_caps caps = sound_caps("rich");
    attn_status status;
    device.isa = "one,two";
    device.uuid = "GPU-00ff";
    device.compute_capability_major = 9;
    device.compute_capability_minor = 1;
    device.num_multiprocessors = 132;
    device.memory_bytes = INT64_C(1) << 40;
    status = sink->device(sink->user, &device, error);
    device.device.id = 1;
    device.name = "second test CPU";
    status = status ? status : sink->device(sink->user, &device, error);
    caps.variant = "wide";
    caps.head_sizes = heads;
    caps.num_head_sizes = 2;
    caps.block_sizes = blocks;
    caps.num_block_sizes = 2;
    caps.kv_dtypes |= UINT64_C(1) << ATTN_KV_FP8_E4M3;
    caps.q_dtypes = UINT64_C(1) << ATTN_DTYPE_BF16;
    caps.terms |= ATTN_TERM_ALIBI | ATTN_TERM_SOFT_CAP;
    caps.features |= ATTN_FEATURE_LSE;
    caps.k_scale_forms = 2;
    caps.v_scale_forms = 4;
    caps.p_scale_forms = 6;
    caps.output_forms = 3;
    caps.graph_level = ATTN_GRAPH_ALWAYS;
    caps.graph_fill_seq_len = 1;
    caps.reorder_threshold = 4;
    caps.kv_alignment = 32;
    caps.io_alignment = 64;
    caps.max_group = 8;
    caps.max_num_q_heads = 256;
    caps.max_speculative_tokens = 5;
    caps.rank[0] = -3;
    caps.rank[1] = 77;
    caps.decode_write_kv_dtypes = UINT64_C(1) << ATTN_KV_FP8_E4M3;
    caps.refused = refused;
    caps.num_refused = 3;
    caps.refused_stride = sizeof *refused;
    caps.extensions = extensions;
    caps.num_extensions = 2;
    status = status ? status : sink->backend(sink->user, &caps, error);
    caps.device.id = 1;
    caps.next = &mla.ext;
    return status ? status : sink->backend(sink->user, &caps, error);
}

static const struct attn_plugin table = SOUND_TABLE("rich", probe);
SOUND_ENTRY(table)
