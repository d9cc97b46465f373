/* SPDX-License-Identifier: Apache-2.0 */
/* Declarations that are unknown, impossible or contradict each other: the same status and reason
 * whether the plugin is probed in this process or in its own. The argument is libattn.so.1. */
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "fixture.h"
#include "support/test.h"

static const struct {
    const char *name;
    attn_status status;
    const char *reason;
} cases[] = {
    {"", ATTN_OK, ""},
    {"name_is_null", ATTN_ERROR_PLUGIN,
     "name: a backend's name is not [a-z][a-z0-9_]* of at most 63 bytes"},
    {"name_is_empty", ATTN_ERROR_PLUGIN,
     "name: a backend's name is not [a-z][a-z0-9_]* of at most 63 bytes"},
    {"name_is_4_kb", ATTN_ERROR_PLUGIN,
     "name: a backend's name is not [a-z][a-z0-9_]* of at most 63 bytes"},
    {"name_is_not_utf8", ATTN_ERROR_PLUGIN,
     "name: a backend's name is not [a-z][a-z0-9_]* of at most 63 bytes"},
    {"variant_is_no_name", ATTN_ERROR_PLUGIN,
     "variant: declares: the variant is not [a-z][a-z0-9_]* of at most 63 bytes"},
    {"version_is_null", ATTN_ERROR_PLUGIN,
     "version: declares: version or vendor is not clean UTF-8 text of at most 255 bytes"},
    {"vendor_has_control", ATTN_ERROR_PLUGIN,
     "version: declares: version or vendor is not clean UTF-8 text of at most 255 bytes"},
    {"vendor_is_not_utf8", ATTN_ERROR_PLUGIN,
     "version: declares: version or vendor is not clean UTF-8 text of at most 255 bytes"},
    {"kernel_is_unknown", ATTN_OK, ""},
    {"layer_kind_is_unknown", ATTN_OK, ""},
    {"phase_is_unknown", ATTN_OK, ""},
    {"feature_is_unknown", ATTN_OK, ""},
    {"view_form_is_unknown", ATTN_OK, ""},
    {"output_form_is_unknown", ATTN_OK, ""},
    {"decode_write_is_unknown", ATTN_OK, ""},
    {"decode_write_of_no_cache", ATTN_ERROR_PLUGIN,
     "decode_write_kv_dtypes: declares: decode_write_kv_dtypes is 0x400; some of kv_dtypes, 0x8, "
     "with the kernel write_kv for the steps of other kinds"},
    {"decode_write_alone", ATTN_ERROR_PLUGIN,
     "decode_write_kv_dtypes: declares: decode_write_kv_dtypes is 0x8; some of kv_dtypes, 0x8, "
     "with the kernel write_kv for the steps of other kinds"},
    {"no_kernels", ATTN_ERROR_PLUGIN,
     "kernels: declares: kernels, layer_kinds, phases and dtypes may not be empty"},
    {"no_phases", ATTN_ERROR_PLUGIN,
     "kernels: declares: kernels, layer_kinds, phases and dtypes may not be empty"},
    {"no_dtypes", ATTN_ERROR_PLUGIN,
     "kernels: declares: kernels, layer_kinds, phases and dtypes may not be empty"},
    {"mla_without_kernel", ATTN_ERROR_PLUGIN,
     "layer_kinds: declares: mla layers without the kernel attend_mla or attend_mla_sparse"},
    {"gdn_without_kernel", ATTN_ERROR_PLUGIN,
     "layer_kinds: declares: gdn layers without the kernel recurrent"},
    {"decoder_without_attend", ATTN_ERROR_PLUGIN,
     "layer_kinds: declares: decoder, encoder or cross layers without the kernel attend"},
    {"decoder_without_write", ATTN_ERROR_PLUGIN,
     "kernels: declares: decoder layers without write_kv or fused write"},
    {"rope_without_kernel", ATTN_ERROR_PLUGIN,
     "features: declares: a rotation without the kernel rope_write_kv"},
    {"index_write_without_indexers", ATTN_ERROR_PLUGIN,
     "features: declares: index_write without the kernel write_kv or without kind indexer"},
    {"index_write_without_write", ATTN_ERROR_PLUGIN,
     "features: declares: index_write without the kernel write_kv or without kind indexer"},
    {"quantized_query_without_dtypes", ATTN_ERROR_PLUGIN,
     "q_dtypes: declares: quantized queries without q_dtypes"},
    {"invariant_prefix_alone", ATTN_ERROR_PLUGIN,
     "features: declares: batch-invariant with prefix caching and not without"},
    {"layout_without_view_form", ATTN_ERROR_PLUGIN,
     "layouts: declares: layout 4 without its form 0x2 in view_forms 0x1"},
    {"packed_without_view_form", ATTN_ERROR_PLUGIN,
     "layouts: declares: layout 5 without its form 0x4 in view_forms 0x1"},
    {"preferred_layout_is_negative", ATTN_ERROR_PLUGIN,
     "preferred_layout: declares: preferred_layout -1 is not one of its layouts"},
    {"preferred_block_size_is_none", ATTN_ERROR_PLUGIN,
     "preferred_block_size: declares: preferred_block_size 24 is not one of its "
     "block_sizes"},
    {"paged_without_kv_dtypes", ATTN_ERROR_PLUGIN,
     "block_sizes: declares: paged keys without block_sizes, layouts, view_forms or kv_dtypes"},
    {"paged_without_blocks", ATTN_ERROR_PLUGIN,
     "block_sizes: declares: paged keys without block_sizes, layouts, view_forms or kv_dtypes"},
    {"attend_without_heads", ATTN_ERROR_PLUGIN, "head_sizes: declares: attend without head_sizes"},
    {"heads_run_backwards", ATTN_ERROR_PLUGIN,
     "head_sizes: declares: head_sizes[0].qk is 64..32 in steps of 64"},
    {"head_size_v_is_zero", ATTN_ERROR_PLUGIN,
     "head_sizes: declares: head_sizes[0].v is 0..256 in steps of 64"},
    {"same_is_seven", ATTN_ERROR_PLUGIN, "head_sizes: declares: head_sizes[0].same is 7; 0 or 1"},
    {"block_size_is_zero", ATTN_ERROR_PLUGIN,
     "block_sizes: declares: block_sizes[1] is 0..256 in steps of 16"},
    {"step_is_negative", ATTN_ERROR_PLUGIN,
     "block_sizes: declares: block_sizes[0] is 16..256 in steps of -16"},
    {"lists_are_endless", ATTN_ERROR_PLUGIN,
     "block_sizes: declares: 1073741824 block_sizes in an array; 0 to 256 in an array"},
    {"count_is_negative", ATTN_ERROR_PLUGIN,
     "refused: declares: -1 refused at NULL; 0 to 256 in an array"},
    {"refused_has_no_array", ATTN_ERROR_PLUGIN,
     "refused: declares: 3 refused at NULL; 0 to 256 in an array"},
    {"vendor_codes_serve", ATTN_OK, ""},
    {"vendor_code_is_low", ATTN_ERROR_PLUGIN,
     "vendor_codes: declares: vendor_codes[1] is 0x7 named 'acme_pages'; vendors' begin at "
     "0x10000, "
     "and names are [a-z][a-z0-9_]* of at most 63 bytes"},
    {"vendor_code_has_no_name", ATTN_ERROR_PLUGIN,
     "vendor_codes: declares: vendor_codes[0] is 0x10001 named '?'; vendors' begin at 0x10000, and "
     "names are [a-z][a-z0-9_]* of at most 63 bytes"},
    {"vendor_codes_have_no_array", ATTN_ERROR_PLUGIN,
     "vendor_codes: declares: 2 vendor_codes at NULL; 0 to 256 in an array"},
    {"vendor_codes_overlap", ATTN_ERROR_PLUGIN,
     "vendor_code_stride: declares: vendor_code_stride is 8; 16 to 4096"},
    {"vendor_codes_prefer_none", ATTN_ERROR_PLUGIN,
     "preferred_layout: declares: preferred_layout 0 is not one of its layouts"},
    {"refused_is_empty", ATTN_ERROR_PLUGIN,
     "refused: declares: refused[0] is empty and would refuse every layer"},
    {"refused_is_unknown", ATTN_OK, ""},
    {"preferred_layout_is_unknown", ATTN_OK, ""},
    {"graph_level_is_unknown", ATTN_OK, ""},
    {"refused_text_is_foul", ATTN_ERROR_PLUGIN,
     "refused: declares: refused[0].why is not clean UTF-8 text of at most 255 bytes"},
    {"refused_is_short", ATTN_ERROR_PLUGIN,
     "refused_stride: declares: refused_stride is 40; 72 to 4096"},
    {"refused_size_runs_back", ATTN_ERROR_PLUGIN,
     "refused: declares: refused[0].head_size is 0..-1 in steps of 0"},
    {"extension_is_the_abis", ATTN_ERROR_PLUGIN,
     "extensions: declares: extensions[1] is 0x7; vendors' begin at 0x10000, drafts of "
     "kernels at 0xc00"},
    {"alignment_is_48", ATTN_ERROR_PLUGIN,
     "kv_alignment: declares: kv_alignment 48, io_alignment 0; powers of two"},
    {"threshold_is_negative", ATTN_ERROR_PLUGIN,
     "reorder_threshold: declares: reorder_threshold -1; 0 or above"},
    {"graph_level_is_negative", ATTN_ERROR_PLUGIN,
     "graph_level: declares: graph_level -1; 0 or above"},
    {"reserved_is_set", ATTN_ERROR_PLUGIN, "reserved: declares: reserved is 1; 0"},
    {"extension_is_unknown", ATTN_ERROR_EXTENSION,
     "attn_backend_caps: extension 1193046 of attn_backend_caps is not known here and not "
     "marked optional"},
    {"extension_is_too_small", ATTN_ERROR_STRUCT_SIZE,
     "attn_backend_caps: extension 13 of attn_backend_caps has struct_size 28; allowed are 48 to "
     "65536"},
    {"extension_stands_twice", ATTN_ERROR_EXTENSION,
     "attn_backend_caps: extension 13 is twice in the chain of attn_backend_caps"},
    {"extension_runs_in_circles", ATTN_ERROR_EXTENSION,
     "attn_backend_caps: extension 13 is twice in the chain of attn_backend_caps"},
    {"extension_is_negative", ATTN_ERROR_PLUGIN,
     "next: declares: number 0 of extension 13 is -512; 0 or above"},
    {"device_was_not_reported", ATTN_ERROR_PLUGIN,
     "device: declares is on device type 1, id 3, which its probe did not report"},
    {"device_is_host_memory", ATTN_ERROR_PLUGIN,
     "device: test CPU: device type 3, id 0; a type of 1 or above other than host memory's (3, 11, "
     "13), and an id of 0 or above"},
    {"device_id_is_negative", ATTN_ERROR_PLUGIN,
     "device: test CPU: device type 1, id -1; a type of 1 or above other than host memory's (3, "
     "11, "
     "13), and an id of 0 or above"},
    {"device_namespace_of_a_cpu", ATTN_ERROR_PLUGIN,
     "device_namespace: test CPU: device type 1 in namespace 'mine'; [a-z][a-z0-9_]* of at most 63 "
     "bytes, and none for CPU, CUDA, ROCm and oneAPI, whose drivers number them"},
    {"device_has_no_name", ATTN_ERROR_PLUGIN,
     "device: name, arch, uuid or isa is not clean UTF-8 text of at most 255 bytes (isa: 1023)"},
    {"device_memory_is_negative", ATTN_ERROR_PLUGIN,
     "device: test CPU: a number of it is negative, or its reserved field is not 0"},
    {"device_struct_is_small", ATTN_ERROR_STRUCT_SIZE,
     "attn_device_info: attn_device_info.struct_size is 16; allowed are 88 to 65536"},
    {"nothing", ATTN_ERROR_PLUGIN,
     "probe: answered ok and reported no backend; hardware that is not there is status 13"},
    {"backend_comes_twice", ATTN_OK, "name: declares is reported twice for one device"},
};

static void check_case(size_t i, bool two)
{
    const attn_status expected = two ? ATTN_OK : cases[i].status;
    const int32_t backends = (cases[i].status == ATTN_OK) + two;
    assert_int_equal(setenv("HOSTILE_CASE", cases[i].name, 1), 0);
    assert_int_equal(setenv("HOSTILE_SECOND", two ? "1" : "", 1), 0);
    for (int32_t isolation = -1; isolation <= 1; isolation += 2) {
        attn_runtime *runtime =
            create_by(api, PLUGIN("declares") ":" PLUGIN("none"), isolation, 0, NULL, ATTN_OK);
        const struct attn_plugin_info info = info_of(api, runtime, 0);
        if (info.status != expected || strcmp(info.reason, cases[i].reason) != 0) {
            fail_msg("%s, isolation %d: status %d, '%s'", cases[i].name, isolation, info.status,
                     info.reason);
        }
        assert_int_equal(info.num_backends, backends);
        assert_int_equal(api->backend_count(runtime), 1 + backends);
        api->runtime_destroy(runtime);
    }
}

/* Each alone, and next to a sound backend of the same plugin, which is not refused with it. */
TEST(each_is_refused)
{
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        /* a device that is left out takes all backends on it along */
        bool sound = strncmp(cases[i].name, "device_", 7) != 0 ||
                     strcmp(cases[i].name, "device_was_not_reported") == 0;
        sound = sound && strcmp(cases[i].name, "nothing") != 0;
        check_case(i, false);
        if (sound) {
            check_case(i, true);
        }
    }
    print_message("%zu declarations refused\n", sizeof cases / sizeof *cases - 1);
}

int main(int argc, char **argv)
{
    const int failed = fixture_open(argc, argv);
    return failed != 0 ? failed : test_run(NULL, NULL);
}
