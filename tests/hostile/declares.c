/* SPDX-License-Identifier: Apache-2.0 */
/* Declares one thing that is unknown, impossible or contradicts another: which one, HOSTILE_CASE
 * says. */
#include "common.h"

#include <attn/draft/index_write.h>
#include <attn/mla.h>
#include <stdlib.h>
#include <string.h>

#define BIT(code) (UINT64_C(1) << (code))

static char long_name[4096];
static struct attn_range ranges[2] = {{16, 256, 16}, {16, 256, 16}};
static struct attn_head_size_range heads[1] = {{{64, 256, 64}, {64, 256, 64}, 1}};
static struct attn_refused_combination rows[1] = {{ATTN_TERM_ALIBI, 0, 0, "no"}};
static struct attn_mla_caps mla[2] = {
    {{ATTN_EXT_CAPS_MLA, 0, sizeof *mla, NULL}, 512, 64, 1, 0, 0, 0},
    {{ATTN_EXT_CAPS_MLA, 0, sizeof *mla, NULL}, 512, 64, 1, 0, 0, 0}};
static struct attn_vendor_code codes[2] = {{ATTN_NAMES_KV_DTYPE, 0x10001, "acme_q6"},
                                           {ATTN_NAMES_KV_LAYOUT, 0x10002, "acme_pages"}};
static const uint32_t low_ids[2] = {0x10000, 7};
static struct attn_ext stranger = {0x123456, 0, sizeof stranger, NULL};

#define CHANGE(name, statement)                                                                    \
    if (strcmp(wanted, #name) == 0) {                                                              \
        statement;                                                                                 \
    }                                                                                              \
    (void)0

/* Changes the sound device and caps before they are reported. */
static void make_wrong(const char *wanted, struct attn_device_info *d, struct attn_backend_caps *c)
{
    CHANGE(name_is_null, c->name = NULL);
    CHANGE(name_is_empty, c->name = "");
    CHANGE(name_is_4_kb, memset(long_name, 'a', sizeof long_name - 1); c->name = long_name);
    CHANGE(name_is_not_utf8, c->name = "\xff\xfe");
    CHANGE(variant_is_no_name, c->variant = "AVX 512");
    CHANGE(version_is_null, c->version = NULL);
    CHANGE(vendor_has_control, c->vendor = "two\nlines");
    CHANGE(vendor_is_not_utf8, c->vendor = "\xc3\x28");
    CHANGE(kernel_is_unknown, c->kernels |= ATTN_KERNEL_MAKE_BLOCK_TABLE << 1);
    CHANGE(layer_kind_is_unknown, c->layer_kinds |= BIT((ATTN_LAYER_RECURRENT + 1)));
    CHANGE(phase_is_unknown, c->phases |= BIT(5));
    CHANGE(feature_is_unknown, c->features |= BIT(63));
    CHANGE(view_form_is_unknown, c->view_forms |= BIT(5));
    CHANGE(output_form_is_unknown, c->output_forms |= BIT((ATTN_OUTPUT_NVFP4 + 1)));
    CHANGE(decode_write_is_unknown, c->decode_write_kv_dtypes = BIT((ATTN_KV_MXFP4 + 1)));
    CHANGE(decode_write_of_no_cache, c->decode_write_kv_dtypes = BIT(ATTN_KV_INT8_KV));
    CHANGE(decode_write_alone, c->decode_write_kv_dtypes = c->kv_dtypes;
           c->kernels = ATTN_KERNEL_ATTEND; c->features |= ATTN_FEATURE_FUSED_WRITE);
    CHANGE(no_kernels, c->kernels = 0);
    CHANGE(no_phases, c->phases = 0);
    CHANGE(no_dtypes, c->dtypes = 0);
    CHANGE(mla_without_kernel, c->layer_kinds |= BIT(ATTN_LAYER_MLA));
    CHANGE(gdn_without_kernel, c->layer_kinds |= BIT(ATTN_LAYER_RECURRENT));
    CHANGE(decoder_without_attend, c->kernels = ATTN_KERNEL_WRITE_KV);
    CHANGE(decoder_without_write, c->kernels = ATTN_KERNEL_ATTEND);
    CHANGE(rope_without_kernel, c->features |= ATTN_FEATURE_FUSED_ROPE);
    CHANGE(index_write_without_indexers, c->features |= ATTN_FEATURE_DRAFT_INDEX_WRITE);
    CHANGE(index_write_without_write, c->features = ATTN_FEATURE_DRAFT_INDEX_WRITE;
           c->layer_kinds = BIT(ATTN_LAYER_INDEXER); c->kernels = ATTN_KERNEL_ATTEND);
    CHANGE(quantized_query_without_dtypes, c->features |= ATTN_FEATURE_QUANTIZED_QUERY);
    CHANGE(invariant_prefix_alone, c->features |= ATTN_FEATURE_BATCH_INVARIANT_PREFIX);
    CHANGE(layout_without_view_form, c->layouts |= BIT(ATTN_KV_LAYOUT_HND_ROWS));
    CHANGE(packed_without_view_form, c->layouts |= BIT(ATTN_KV_LAYOUT_PACKED_K));
    CHANGE(preferred_layout_is_negative, c->preferred_layout = -1);
    CHANGE(preferred_block_size_is_none, c->preferred_block_size = 24);
    CHANGE(paged_without_kv_dtypes, c->kv_dtypes = 0);
    CHANGE(paged_without_blocks, c->num_block_sizes = 0);
    CHANGE(attend_without_heads, c->num_head_sizes = 0);
    CHANGE(heads_run_backwards, heads[0].qk.max = 32; c->head_sizes = heads);
    CHANGE(head_size_v_is_zero, heads[0].same = 0; heads[0].v.min = 0; c->head_sizes = heads);
    CHANGE(same_is_seven, heads[0].same = 7; c->head_sizes = heads);
    if (strncmp(wanted, "vendor_code", 11) == 0) {
        codes[0].name = "acme_q6"; /* as no other case has left them */
        codes[1].code = 0x10002;
        c->vendor_codes = codes;
        c->num_vendor_codes = 2;
        c->vendor_code_stride = sizeof *codes;
    }
    CHANGE(vendor_code_is_low, codes[1].code = 7);
    CHANGE(vendor_code_has_no_name, codes[0].name = NULL);
    CHANGE(vendor_codes_have_no_array, c->vendor_codes = NULL);
    CHANGE(vendor_codes_overlap, c->vendor_code_stride = 8);
    CHANGE(vendor_codes_serve, c->preferred_layout = 0x10002; c->layouts = c->view_forms = 0;
           c->kv_dtypes = 0);
    CHANGE(vendor_codes_prefer_none, c->layouts = c->view_forms = 0);
    CHANGE(block_size_is_zero, ranges[1].min = 0; c->block_sizes = ranges; c->num_block_sizes = 2);
    CHANGE(step_is_negative, ranges[0].multiple = -16; c->block_sizes = ranges);
    CHANGE(lists_are_endless, c->num_block_sizes = 1 << 30);
    CHANGE(count_is_negative, c->num_refused = -1);
    CHANGE(refused_has_no_array, c->num_refused = 3);
    CHANGE(refused_is_empty, rows[0].terms = 0; c->refused = rows; c->num_refused = 1;
           c->refused_stride = sizeof *rows);
    CHANGE(refused_is_unknown, rows[0].terms = BIT(60); c->refused = rows; c->num_refused = 1;
           c->refused_stride = sizeof *rows);
    CHANGE(refused_text_is_foul, rows[0].why = "\x80"; c->refused = rows; c->num_refused = 1;
           c->refused_stride = sizeof *rows);
    CHANGE(refused_is_short, c->refused = rows; c->num_refused = 1; c->refused_stride = 40);
    CHANGE(refused_size_runs_back, rows[0].head_size.max = -1; c->refused = rows;
           c->num_refused = 1; c->refused_stride = sizeof *rows);
    CHANGE(extension_is_the_abis, c->extensions = low_ids; c->num_extensions = 2);
    CHANGE(alignment_is_48, c->kv_alignment = 48);
    CHANGE(threshold_is_negative, c->reorder_threshold = -1);
    CHANGE(graph_level_is_negative, c->graph_level = -1);
    CHANGE(graph_level_is_unknown, c->graph_level = 40);
    CHANGE(preferred_layout_is_unknown, c->preferred_layout = 0x10007);
    CHANGE(reserved_is_set, c->reserved = 1);
    CHANGE(extension_is_unknown, c->next = &stranger);
    CHANGE(extension_is_too_small, mla[0].ext.struct_size = 28; c->next = &mla[0].ext);
    CHANGE(extension_stands_twice, mla[0].ext.next = &mla[1].ext; c->next = &mla[0].ext);
    CHANGE(extension_runs_in_circles, mla[0].ext.next = &mla[0].ext; c->next = &mla[0].ext);
    CHANGE(extension_is_negative, mla[0].kv_lora_rank_max = -512; c->next = &mla[0].ext);
    CHANGE(device_was_not_reported, c->device.id = 3);
    CHANGE(device_is_host_memory, d->device.type = ATTN_DEVICE_CUDA_HOST);
    CHANGE(device_namespace_of_a_cpu, d->device_namespace = "mine");
    CHANGE(device_id_is_negative, d->device.id = -1);
    CHANGE(device_has_no_name, d->name = NULL);
    CHANGE(device_memory_is_negative, d->memory_bytes = -1);
    CHANGE(device_struct_is_small, d->struct_size = 16);
}

static attn_status probe(const struct attn_host *host, const struct attn_probe_sink *sink,
                         struct attn_error *error)
{
    const char *wanted = getenv("HOSTILE_CASE");
    struct attn_device_info device = sound_device();
    struct attn_backend_caps caps = sound_caps("declares");
    wanted = wanted != NULL ? wanted : "";
    if (strcmp(wanted, "nothing") == 0) {
        return ATTN_OK;
    }
    ranges[0] = ranges[1] = (struct attn_range){16, 256, 16};
    heads[0] = sound_heads[0];
    rows[0] = (struct attn_refused_combination){ATTN_TERM_ALIBI, 0, 0, "no"};
    for (int i = 0; i < 2; i++) {
        mla[i] =
            (struct attn_mla_caps){{ATTN_EXT_CAPS_MLA, 0, sizeof *mla, NULL}, 512, 64, 1, 0, 0, 0};
    }
    make_wrong(wanted, &device, &caps);
    sink->device(sink->user, &device, NULL);
    sink->backend(sink->user, &caps, NULL);
    if (getenv("HOSTILE_SECOND") != NULL && getenv("HOSTILE_SECOND")[0] != '\0') {
        const struct attn_backend_caps second = sound_caps("next");
        sink->backend(sink->user, &second, NULL);
    }
    if (strcmp(wanted, "backend_comes_twice") == 0) {
        sink->backend(sink->user, &caps, NULL);
    }
    return ATTN_OK; /* and does not look at what the sink says */
}

static const struct attn_plugin table = SOUND_TABLE("declares", probe);
SOUND_ENTRY(table)
