/* SPDX-License-Identifier: Apache-2.0 */
/* What declares.c may declare: DECLARES(case, status and reason that a scan gives, change of the
 * sound device d and caps c). FOUND is a plugin's error, WRONG one of a field that
 * the backend "declares" has, SERVES none. */
#define FOUND(name, reason, ...) DECLARES(name, ATTN_ERROR_PLUGIN, reason, __VA_ARGS__)
#define WRONG(name, field, text, ...) FOUND(name, #field ": declares: " text, __VA_ARGS__)
#define SERVES(name, ...) DECLARES(name, ATTN_OK, "", __VA_ARGS__)
#define BAD_NAME "name: a backend's name is not [a-z][a-z0-9_]* of at most 63 bytes"
#define BAD_TEXT "version or vendor is not clean UTF-8 text of at most 255 bytes"
#define EMPTY_MASK "kernels, layer_kinds, phases and dtypes may not be empty"
#define INDEX_WRITE "index_write without the kernel write_kv or without kind indexer"
#define NO_BLOCKS "paged keys without block_sizes, layouts, view_forms or kv_dtypes"
#define TWICE "attn_backend_caps: extension 13 is twice in the chain of attn_backend_caps"

FOUND(name_is_null, BAD_NAME, c->name = NULL)
FOUND(name_is_empty, BAD_NAME, c->name = "")
FOUND(name_is_4_kb, BAD_NAME, memset(long_name, 'a', sizeof long_name - 1); c->name = long_name)
FOUND(name_is_not_utf8, BAD_NAME, c->name = "\xff\xfe")
WRONG(variant_is_no_name, variant, "the variant is not [a-z][a-z0-9_]* of at most 63 bytes",
      c->variant = "AVX 512")
WRONG(version_is_null, version, BAD_TEXT, c->version = NULL)
WRONG(vendor_has_control, version, BAD_TEXT, c->vendor = "two\nlines")
WRONG(vendor_is_not_utf8, version, BAD_TEXT, c->vendor = "\xc3\x28")
SERVES(kernel_is_unknown, c->kernels |= ATTN_KERNEL_MAKE_BLOCK_TABLE << 1)
SERVES(layer_kind_is_unknown, c->layer_kinds |= BIT((ATTN_LAYER_RECURRENT + 1)))
SERVES(phase_is_unknown, c->phases |= BIT(5))
SERVES(feature_is_unknown, c->features |= BIT(63))
SERVES(view_form_is_unknown, c->view_forms |= BIT(5))
SERVES(output_form_is_unknown, c->output_forms |= BIT((ATTN_OUTPUT_NVFP4 + 1)))
SERVES(decode_write_is_unknown, c->decode_write_kv_dtypes = BIT((ATTN_KV_MXFP4 + 1)))
WRONG(decode_write_of_no_cache, decode_write_kv_dtypes,
      "decode_write_kv_dtypes is 0x400; some of kv_dtypes, 0x8, with the kernel write_kv for the "
      "steps of other kinds",
      c->decode_write_kv_dtypes = BIT(ATTN_KV_INT8_KV))
WRONG(decode_write_alone, decode_write_kv_dtypes,
      "decode_write_kv_dtypes is 0x8; some of kv_dtypes, 0x8, with the kernel write_kv for the "
      "steps of other kinds",
      c->decode_write_kv_dtypes = c->kv_dtypes;
      c->kernels = ATTN_KERNEL_ATTEND; c->features |= ATTN_FEATURE_FUSED_WRITE)
WRONG(no_kernels, kernels, EMPTY_MASK, c->kernels = 0)
WRONG(no_phases, kernels, EMPTY_MASK, c->phases = 0)
WRONG(no_dtypes, kernels, EMPTY_MASK, c->dtypes = 0)
WRONG(mla_without_kernel, layer_kinds,
      "mla layers without the kernel attend_mla or attend_mla_sparse",
      c->layer_kinds |= BIT(ATTN_LAYER_MLA))
WRONG(gdn_without_kernel, layer_kinds, "gdn layers without the kernel recurrent",
      c->layer_kinds |= BIT(ATTN_LAYER_RECURRENT))
WRONG(decoder_without_attend, layer_kinds,
      "decoder, encoder or cross layers without the kernel attend",
      c->kernels = ATTN_KERNEL_WRITE_KV)
WRONG(decoder_without_write, kernels, "decoder layers without write_kv or fused write",
      c->kernels = ATTN_KERNEL_ATTEND)
WRONG(rope_without_kernel, features, "a rotation without the kernel rope_write_kv",
      c->features |= ATTN_FEATURE_FUSED_ROPE)
WRONG(index_write_without_indexers, features, INDEX_WRITE,
      c->features |= ATTN_FEATURE_DRAFT_INDEX_WRITE)
WRONG(index_write_without_write, features, INDEX_WRITE,
      c->features = ATTN_FEATURE_DRAFT_INDEX_WRITE;
      c->layer_kinds = BIT(ATTN_LAYER_INDEXER); c->kernels = ATTN_KERNEL_ATTEND)
WRONG(quantized_query_without_dtypes, q_dtypes, "quantized queries without q_dtypes",
      c->features |= ATTN_FEATURE_QUANTIZED_QUERY)
WRONG(invariant_prefix_alone, features, "batch-invariant with prefix caching and not without",
      c->features |= ATTN_FEATURE_BATCH_INVARIANT_PREFIX)
WRONG(layout_without_view_form, layouts, "layout 4 without its form 0x2 in view_forms 0x1",
      c->layouts |= BIT(ATTN_KV_LAYOUT_HND_ROWS))
WRONG(packed_without_view_form, layouts, "layout 5 without its form 0x4 in view_forms 0x1",
      c->layouts |= BIT(ATTN_KV_LAYOUT_PACKED_K))
WRONG(preferred_layout_is_negative, preferred_layout,
      "preferred_layout -1 is not one of its layouts", c->preferred_layout = -1)
WRONG(preferred_block_size_is_none, preferred_block_size,
      "preferred_block_size 24 is not one of its block_sizes", c->preferred_block_size = 24)
WRONG(paged_without_kv_dtypes, block_sizes, NO_BLOCKS, c->kv_dtypes = 0)
WRONG(paged_without_blocks, block_sizes, NO_BLOCKS, c->num_block_sizes = 0)
WRONG(attend_without_heads, head_sizes, "attend without head_sizes", c->num_head_sizes = 0)
WRONG(heads_run_backwards, head_sizes, "head_sizes[0].qk is 64..32 in steps of 64",
      heads[0].qk.max = 32;
      c->head_sizes = heads)
WRONG(head_size_v_is_zero, head_sizes, "head_sizes[0].v is 0..256 in steps of 64",
      heads[0].same = 0;
      heads[0].v.min = 0; c->head_sizes = heads)
WRONG(same_is_seven, head_sizes, "head_sizes[0].same is 7; 0 or 1", heads[0].same = 7;
      c->head_sizes = heads)
WRONG(vendor_code_is_low, vendor_codes,
      "vendor_codes[1] is 0x7 named 'acme_pages'; vendors' begin at 0x10000, and names are "
      "[a-z][a-z0-9_]* of at most 63 bytes",
      codes[1].code = 7)
WRONG(vendor_code_has_no_name, vendor_codes,
      "vendor_codes[0] is 0x10001 named '?'; vendors' begin at 0x10000, and names are "
      "[a-z][a-z0-9_]* of at most 63 bytes",
      codes[0].name = NULL)
WRONG(vendor_codes_have_no_array, vendor_codes, "2 vendor_codes at NULL; 0 to 256 in an array",
      c->vendor_codes = NULL)
WRONG(vendor_codes_overlap, vendor_code_stride, "vendor_code_stride is 8; 16 to 4096",
      c->vendor_code_stride = 8)
SERVES(vendor_codes_serve, c->preferred_layout = 0x10002; c->layouts = c->view_forms = 0;
       c->kv_dtypes = 0)
WRONG(vendor_codes_prefer_none, preferred_layout, "preferred_layout 0 is not one of its layouts",
      c->layouts = c->view_forms = 0)
WRONG(block_size_is_zero, block_sizes, "block_sizes[1] is 0..256 in steps of 16", ranges[1].min = 0;
      c->block_sizes = ranges; c->num_block_sizes = 2)
WRONG(step_is_negative, block_sizes, "block_sizes[0] is 16..256 in steps of -16",
      ranges[0].multiple = -16;
      c->block_sizes = ranges)
WRONG(lists_are_endless, block_sizes, "1073741824 block_sizes in an array; 0 to 256 in an array",
      c->num_block_sizes = 1 << 30)
WRONG(count_is_negative, refused, "-1 refused at NULL; 0 to 256 in an array", c->num_refused = -1)
WRONG(refused_has_no_array, refused, "3 refused at NULL; 0 to 256 in an array", c->num_refused = 3)
WRONG(refused_is_empty, refused, "refused[0] is empty and would refuse every layer",
      rows[0].terms = 0;
      c->refused = rows; c->num_refused = 1; c->refused_stride = sizeof *rows)
SERVES(refused_is_unknown, rows[0].terms = BIT(60); c->refused = rows; c->num_refused = 1;
       c->refused_stride = sizeof *rows)
WRONG(refused_text_is_foul, refused, "refused[0].why is not clean UTF-8 text of at most 255 bytes",
      rows[0].why = "\x80";
      c->refused = rows; c->num_refused = 1; c->refused_stride = sizeof *rows)
WRONG(refused_is_short, refused_stride, "refused_stride is 40; 72 to 4096", c->refused = rows;
      c->num_refused = 1; c->refused_stride = 40)
WRONG(refused_size_runs_back, refused, "refused[0].head_size is 0..-1 in steps of 0",
      rows[0].head_size.max = -1;
      c->refused = rows; c->num_refused = 1; c->refused_stride = sizeof *rows)
WRONG(extension_is_the_abis, extensions,
      "extensions[1] is 0x7; vendors' begin at 0x10000, drafts of kernels at 0xc00",
      c->extensions = low_ids;
      c->num_extensions = 2)
WRONG(alignment_is_48, kv_alignment, "kv_alignment 48, io_alignment 0; powers of two",
      c->kv_alignment = 48)
WRONG(threshold_is_negative, reorder_threshold, "reorder_threshold -1; 0 or above",
      c->reorder_threshold = -1)
WRONG(graph_level_is_negative, graph_level, "graph_level -1; 0 or above", c->graph_level = -1)
SERVES(graph_level_is_unknown, c->graph_level = 40)
SERVES(preferred_layout_is_unknown, c->preferred_layout = 0x10007)
WRONG(reserved_is_set, reserved, "reserved is 1; 0", c->reserved = 1)
DECLARES(extension_is_unknown, ATTN_ERROR_EXTENSION,
         "attn_backend_caps: extension 1193046 of attn_backend_caps is not known here and not "
         "marked optional",
         c->next = &stranger)
DECLARES(extension_is_too_small, ATTN_ERROR_STRUCT_SIZE,
         "attn_backend_caps: extension 13 of attn_backend_caps has struct_size 28; allowed are 48 "
         "to 65536",
         mla[0].ext.struct_size = 28;
         c->next = &mla[0].ext)
DECLARES(extension_stands_twice, ATTN_ERROR_EXTENSION, TWICE, mla[0].ext.next = &mla[1].ext;
         c->next = &mla[0].ext)
DECLARES(extension_runs_in_circles, ATTN_ERROR_EXTENSION, TWICE, mla[0].ext.next = &mla[0].ext;
         c->next = &mla[0].ext)
WRONG(extension_is_negative, next, "number 0 of extension 13 is -512; 0 or above",
      mla[0].kv_lora_rank_max = -512;
      c->next = &mla[0].ext)
FOUND(device_was_not_reported,
      "device: declares is on device type 1, id 3, which its probe did not report",
      c->device.id = 3)
FOUND(device_is_host_memory,
      "device: test CPU: device type 3, id 0; a type of 1 or above other than host memory's (3, "
      "11, 13), and an id of 0 or above",
      d->device.type = ATTN_DEVICE_CUDA_HOST)
FOUND(device_namespace_of_a_cpu,
      "device_namespace: test CPU: device type 1 in namespace 'mine'; [a-z][a-z0-9_]* of at most "
      "63 bytes, and none for CPU, CUDA, ROCm and oneAPI, whose drivers number them",
      d->device_namespace = "mine")
FOUND(device_id_is_negative,
      "device: test CPU: device type 1, id -1; a type of 1 or above other than host memory's (3, "
      "11, 13), and an id of 0 or above",
      d->device.id = -1)
FOUND(device_has_no_name,
      "device: name, arch, uuid or isa is not clean UTF-8 text of at most 255 bytes (isa: 1023)",
      d->name = NULL)
FOUND(device_memory_is_negative,
      "device: test CPU: a number of it is negative, or its reserved field is not 0",
      d->memory_bytes = -1)
DECLARES(device_struct_is_small, ATTN_ERROR_STRUCT_SIZE,
         "attn_device_info: attn_device_info.struct_size is 16; allowed are 88 to 65536",
         d->struct_size = 16)
FOUND(nothing,
      "probe: answered ok and reported no backend; hardware that is not there is status 13", )
DECLARES(backend_comes_twice, ATTN_OK, "name: declares is reported twice for one device", )

#undef DECLARES
#undef WRONG
#undef FOUND
#undef SERVES
#undef BAD_NAME
#undef BAD_TEXT
#undef EMPTY_MASK
#undef INDEX_WRITE
#undef NO_BLOCKS
#undef TWICE
