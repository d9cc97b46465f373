/* SPDX-License-Identifier: Apache-2.0 */
/* What a backend may declare. */
#include "runtime/probe.h"

#include <attn/draft/index_write.h>
#include <attn/draft/output_rope.h>
#include <string.h>

#include "select/names.h"
#include "util/device.h"
#include "util/structs.h"
#include "util/counts.h"

#define MAX_RANGES 256
#define MAX_LABEL 255
#define MAX_ISA 1023
#define BIT(code) (UINT64_C(1) << (code))

/* Types whose numbers are host memory's are places of data, and no devices that run a layer. */
static bool device_runs_layers(struct attn_device device)
{
    return device.type >= 1 && device.id >= 0 && device.type != ATTN_DEVICE_CUDA_HOST &&
           device.type != ATTN_DEVICE_ROCM_HOST && device.type != ATTN_DEVICE_CUDA_MANAGED;
}

attn_status device_check(const struct attn_device_info *d, struct attn_error *error)
{
    REFUSE_IF(!text_is_clean(d->name, MAX_LABEL) || !text_is_clean(d->arch, MAX_LABEL) ||
                  (d->uuid != NULL && !text_is_clean(d->uuid, MAX_LABEL)) ||
                  (d->isa != NULL && !text_is_clean(d->isa, MAX_ISA)),
              "device",
              "name, arch, uuid or isa is not clean UTF-8 text of at most %d bytes (isa: %d)",
              MAX_LABEL, MAX_ISA);
    REFUSE_IF(!device_runs_layers(d->device), "device",
              "%s: device type %d, id %d; a type of 1 or above other than host memory's (%d, %d, "
              "%d), and an id of 0 or above",
              d->name, d->device.type, d->device.id, ATTN_DEVICE_CUDA_HOST, ATTN_DEVICE_ROCM_HOST,
              ATTN_DEVICE_CUDA_MANAGED);
    REFUSE_IF(d->device_namespace != NULL && d->device_namespace[0] != '\0' &&
                  (device_is_numbered(d->device) || !text_is_name(d->device_namespace)),
              "device_namespace",
              "%s: device type %d in namespace '%.63s'; [a-z][a-z0-9_]* of at most 63 bytes, and "
              "none for CPU, CUDA, ROCm and oneAPI, whose drivers number them",
              d->name, d->device.type,
              text_is_clean(d->device_namespace, MAX_LABEL) ? d->device_namespace : "?");
    REFUSE_IF(struct_check(d, ABI_DEVICE_INFO, NULL, error) != ATTN_OK || d->memory_bytes < 0,
              "device", "%s: a number of it is negative, or its reserved field is not 0", d->name);
    return ATTN_OK;
}

const struct attn_vendor_code *vendor_code_at(const struct attn_backend_caps *caps, int32_t at)
{
    return (const void *)((const char *)caps->vendor_codes +
                          (size_t)at * (size_t)caps->vendor_code_stride);
}

/* Is one of the vendor's codes of that list there, `code` or, with 0, any? False, too, of an array
 * that caps_check refuses. */
static bool has_vendor_code(const struct attn_backend_caps *c, int32_t list, int32_t code)
{
    const bool readable = c->vendor_codes != NULL && c->num_vendor_codes <= MAX_RANGES &&
                          element_stride_is_good(ABI_VENDOR_CODE, c->vendor_code_stride);
    for (int32_t i = 0; readable && i < c->num_vendor_codes; i++) {
        const struct attn_vendor_code *own = vendor_code_at(c, i);
        if (own->list == list && (code == 0 || own->code == code)) {
            return true;
        }
    }
    return false;
}

void caps_trim(struct attn_backend_caps *c)
{
    for (const struct abi_field *f = abi_structs[ABI_BACKEND_CAPS].fields; f->name != NULL; f++) {
        uint64_t mask;
        if (f->kind == FIELD_MASK) {
            memcpy(&mask, (char *)c + f->at, sizeof mask);
            mask &= BIT(f->max) - 1;
            memcpy((char *)c + f->at, &mask, sizeof mask);
        }
    }
    if (c->preferred_layout >= NUM_KV_LAYOUTS &&
        !has_vendor_code(c, ATTN_NAMES_KV_LAYOUT, c->preferred_layout)) {
        c->preferred_layout = 0;
        while (c->layouts != 0 && !(c->layouts >> c->preferred_layout & 1)) {
            c->preferred_layout++;
        }
    }
    c->graph_level = graph_level_known(c->graph_level);
}

bool refused_read(const struct attn_backend_caps *caps, int32_t at,
                  struct attn_refused_combination *row)
{
    bool known = element_read(row, ABI_REFUSED_COMBINATION, caps->refused, caps->refused_stride, at,
                              NULL) == ATTN_OK &&
                 row->terms >> NUM_TERMS == 0 && row->features >> NUM_FEATURES == 0;
    const struct {
        uint64_t *mask;
        int32_t count;
    } lists[] = {{&row->kv_dtypes, NUM_KV_DTYPES},
                 {&row->dtypes, NUM_DTYPES},
                 {&row->layer_kinds, NUM_LAYER_KINDS},
                 {&row->phases, NUM_PHASES}};
    for (size_t i = 0; i < sizeof lists / sizeof *lists; i++) {
        const bool any = *lists[i].mask == 0;
        *lists[i].mask &= BIT(lists[i].count) - 1;
        known &= any || *lists[i].mask != 0;
    }
    return known;
}

static attn_status check_range(const struct attn_backend_caps *c, const char *field, int32_t at,
                               const char *of, const struct attn_range *range,
                               struct attn_error *error)
{
    REFUSE_IF(range->min < 1 || range->max < range->min || range->multiple < 0, field,
              "%s: %s[%d]%s is %d..%d in steps of %d", c->name, field, at, of, range->min,
              range->max, range->multiple);
    return ATTN_OK;
}

static attn_status check_refused(const struct attn_backend_caps *c, int32_t at,
                                 struct attn_error *error)
{
    struct attn_refused_combination row;
    if (element_read(&row, ABI_REFUSED_COMBINATION, c->refused, c->refused_stride, at, NULL) !=
        ATTN_OK) {
        return ATTN_OK; /* it is dropped */
    }
    REFUSE_IF((row.terms | row.features | row.kv_dtypes | row.dtypes | row.layer_kinds |
               row.phases) == 0 &&
                  row.head_size.max == 0,
              "refused", "%s: refused[%d] is empty and would refuse every layer", c->name, at);
    TRY_IF(row.head_size.max != 0,
           check_range(c, "refused", at, ".head_size", &row.head_size, error));
    REFUSE_IF(row.why != NULL && !text_is_clean(row.why, MAX_LABEL), "refused",
              "%s: refused[%d].why is not clean UTF-8 text of at most %d bytes", c->name, at,
              MAX_LABEL);
    return ATTN_OK;
}

/* A list that the core does not know is a newer one, of which nothing is asked. */
static attn_status check_vendor_codes(const struct attn_backend_caps *c, struct attn_error *error)
{
    REFUSE_IF(c->num_vendor_codes > 0 &&
                  !element_stride_is_good(ABI_VENDOR_CODE, c->vendor_code_stride),
              "vendor_code_stride", "%s: vendor_code_stride is %d; %zu to %d", c->name,
              c->vendor_code_stride, abi_structs[ABI_VENDOR_CODE].minimum, MAX_ELEMENT);
    for (int32_t i = 0; i < c->num_vendor_codes; i++) {
        const struct attn_vendor_code *code = vendor_code_at(c, i);
        REFUSE_IF(code->code < ATTN_VENDOR_CODE || !text_is_name(code->name), "vendor_codes",
                  "%s: vendor_codes[%d] is %#x named '%.63s'; vendors' begin at %#x, and names are "
                  "[a-z][a-z0-9_]* of at most 63 bytes",
                  c->name, i, (unsigned)code->code,
                  text_is_clean(code->name, MAX_LABEL) ? code->name : "?", ATTN_VENDOR_CODE);
    }
    return ATTN_OK;
}

static attn_status check_lists(const struct attn_backend_caps *c, struct attn_error *error)
{
    for (const struct abi_field *f = abi_structs[ABI_BACKEND_CAPS].fields; f->name != NULL; f++) {
        int32_t count = 0;
        if (f->kind != FIELD_ARRAY) {
            continue;
        }
        const void *array = field_pointer(c, f);
        memcpy(&count, (const char *)c + f->min, sizeof count);
        REFUSE_IF(count < 0 || count > MAX_RANGES || (count > 0 && array == NULL), f->name,
                  "%s: %d %s %s; 0 to %d in an array", c->name, count, f->name,
                  array != NULL ? "in an array" : "at NULL", MAX_RANGES);
    }
    for (int32_t i = 0; i < c->num_block_sizes; i++) {
        TRY(check_range(c, "block_sizes", i, "", &c->block_sizes[i], error));
    }
    for (int32_t i = 0; i < c->num_head_sizes; i++) {
        const struct attn_head_size_range *heads = &c->head_sizes[i];
        TRY(check_range(c, "head_sizes", i, ".qk", &heads->qk, error));
        TRY_IF(heads->same == 0, check_range(c, "head_sizes", i, ".v", &heads->v, error));
        REFUSE_IF(heads->same < 0 || heads->same > 1, "head_sizes",
                  "%s: head_sizes[%d].same is %d; 0 or 1", c->name, i, heads->same);
    }
    REFUSE_IF(c->num_refused > 0 &&
                  !element_stride_is_good(ABI_REFUSED_COMBINATION, c->refused_stride),
              "refused_stride", "%s: refused_stride is %d; %zu to %d", c->name, c->refused_stride,
              abi_structs[ABI_REFUSED_COMBINATION].minimum, MAX_ELEMENT);
    for (int32_t i = 0; i < c->num_extensions; i++) {
        REFUSE_IF(!ext_is_handed_on(c->extensions[i]), "extensions",
                  "%s: extensions[%d] is %#x; vendors' begin at %#x, drafts of kernels at %#x",
                  c->name, i, c->extensions[i], ATTN_EXT_VENDOR, ATTN_EXT_DRAFT_KERNELS);
    }
    TRY(check_vendor_codes(c, error));
    for (int32_t i = 0; i < c->num_refused; i++) {
        TRY(check_refused(c, i, error));
    }
    return ATTN_OK;
}

static attn_status check_numbers(const struct attn_backend_caps *c, struct attn_error *error)
{
    for (const struct abi_field *f = abi_structs[ABI_BACKEND_CAPS].fields; f->name != NULL; f++) {
        int32_t value;
        memcpy(&value, (const char *)c + f->at, sizeof value);
        REFUSE_IF(f->kind == FIELD_INT && (value < f->min || value > f->max), f->name,
                  f->max == 0 ? "%s: %s is %d; 0" : "%s: %s %d; 0 or above", c->name, f->name,
                  value);
    }
    REFUSE_IF((c->kv_alignment & (c->kv_alignment - 1)) != 0 ||
                  (c->io_alignment & (c->io_alignment - 1)) != 0,
              "kv_alignment", "%s: kv_alignment %d, io_alignment %d; powers of two", c->name,
              c->kv_alignment, c->io_alignment);
    return ATTN_OK;
}

/* Refuses a kind of layer or a feature whose kernel is missing. */
static attn_status check_kernels(const struct attn_backend_caps *c, struct attn_error *error)
{
    static const struct {
        uint64_t kinds;
        uint64_t kernel;
        const char *kind, *name;
    } needs[] = {
        {BIT(ATTN_LAYER_DECODER) | BIT(ATTN_LAYER_ENCODER) | BIT(ATTN_LAYER_CROSS),
         ATTN_KERNEL_ATTEND, "decoder, encoder or cross", "attend"},
        {BIT(ATTN_LAYER_MLA), ATTN_KERNEL_ATTEND_MLA | ATTN_KERNEL_ATTEND_MLA_SPARSE, "mla",
         "attend_mla or attend_mla_sparse"},
        {BIT(ATTN_LAYER_RECURRENT), ATTN_KERNEL_RECURRENT, "gdn", "recurrent"},
        {BIT(ATTN_LAYER_INDEXER) | BIT(ATTN_LAYER_DRAFT_COMPRESSOR), ATTN_KERNEL_ATTEND,
         "indexer or compressor", "attend"},
    };
    for (size_t i = 0; i < sizeof needs / sizeof *needs; i++) {
        REFUSE_IF((c->layer_kinds & needs[i].kinds) && !(c->kernels & needs[i].kernel),
                  "layer_kinds", "%s: %s layers without the kernel %s", c->name, needs[i].kind,
                  needs[i].name);
    }
    REFUSE_IF(c->decode_write_kv_dtypes != 0 && (c->decode_write_kv_dtypes & ~c->kv_dtypes ||
                                                 !(c->kernels & ATTN_KERNEL_WRITE_KV)),
              "decode_write_kv_dtypes",
              "%s: decode_write_kv_dtypes is %#llx; some of kv_dtypes, %#llx, with the kernel "
              "write_kv for the steps of other kinds",
              c->name, (unsigned long long)c->decode_write_kv_dtypes,
              (unsigned long long)c->kv_dtypes);
    const uint64_t kernels = c->kernels, features = c->features;
    const uint64_t writes = kernels & ATTN_KERNEL_WRITE_KV || features & ATTN_FEATURE_FUSED_WRITE;
    const uint64_t ropes =
        ATTN_FEATURE_FUSED_ROPE | ATTN_FEATURE_FUSED_ROPE_NORM | ATTN_FEATURE_DRAFT_OUTPUT_ROPE;
    REFUSE_IF(c->layer_kinds & BIT(ATTN_LAYER_DECODER) && features & ATTN_FEATURE_PAGED_KV &&
                  !writes,
              "kernels", "%s: decoder layers without write_kv or fused write", c->name);
    REFUSE_IF(features & ropes && !(kernels & ATTN_KERNEL_ROPE_WRITE_KV), "features",
              "%s: a rotation without the kernel rope_write_kv", c->name);
    REFUSE_IF(features & ATTN_FEATURE_DRAFT_INDEX_WRITE &&
                  !(kernels & ATTN_KERNEL_WRITE_KV && c->layer_kinds & BIT(ATTN_LAYER_INDEXER)),
              "features", "%s: index_write without the kernel write_kv or without kind indexer",
              c->name);
    REFUSE_IF(features & ATTN_FEATURE_QUANTIZED_QUERY && c->q_dtypes == 0, "q_dtypes",
              "%s: quantized queries without q_dtypes", c->name);
    REFUSE_IF(features & ATTN_FEATURE_BATCH_INVARIANT_PREFIX &&
                  !(features & ATTN_FEATURE_BATCH_INVARIANT),
              "features", "%s: batch-invariant with prefix caching and not without", c->name);
    REFUSE_IF(kernels & ATTN_KERNEL_ATTEND && c->num_head_sizes == 0, "head_sizes",
              "%s: attend without head_sizes", c->name);
    return ATTN_OK;
}

bool range_holds(const struct attn_range *ranges, int32_t count, int32_t value)
{
    for (int32_t i = 0; i < count; i++) {
        const struct attn_range *range = &ranges[i];
        const int32_t step = range->multiple > 0 ? range->multiple : 1;
        if (value >= range->min && value <= range->max && (value - range->min) % step == 0) {
            return true;
        }
    }
    return false;
}

static attn_status check_cache(const struct attn_backend_caps *c, struct attn_error *error)
{
    static const uint64_t form_of_layout[NUM_KV_LAYOUTS] = {
        ATTN_VIEW_NHD, ATTN_VIEW_HND,    ATTN_VIEW_NHD,    ATTN_VIEW_HND,
        ATTN_VIEW_HND, ATTN_VIEW_PACKED, ATTN_VIEW_LATENT,
    };
    const bool pages = has_vendor_code(c, ATTN_NAMES_KV_LAYOUT, 0);
    REFUSE_IF((c->features & ATTN_FEATURE_PAGED_KV) &&
                  (c->num_block_sizes == 0 || (!pages && (c->layouts == 0 || c->view_forms == 0)) ||
                   (c->kv_dtypes == 0 && !has_vendor_code(c, ATTN_NAMES_KV_DTYPE, 0))),
              "block_sizes", "%s: paged keys without block_sizes, layouts, view_forms or kv_dtypes",
              c->name);
    for (int32_t i = 0; i < NUM_KV_LAYOUTS; i++) {
        REFUSE_IF((c->layouts >> i & 1) && !(c->view_forms & form_of_layout[i]), "layouts",
                  "%s: layout %d without its form %#llx in view_forms %#llx", c->name, i,
                  (unsigned long long)form_of_layout[i], (unsigned long long)c->view_forms);
    }
    REFUSE_IF(c->preferred_layout < 0 ||
                  (c->preferred_layout < NUM_KV_LAYOUTS && (c->layouts != 0 || pages) &&
                   !(c->layouts >> c->preferred_layout & 1)),
              "preferred_layout", "%s: preferred_layout %d is not one of its layouts", c->name,
              c->preferred_layout);
    REFUSE_IF(c->num_block_sizes > 0 && c->preferred_block_size > 0 &&
                  !range_holds(c->block_sizes, c->num_block_sizes, c->preferred_block_size),
              "preferred_block_size", "%s: preferred_block_size %d is not one of its block_sizes",
              c->name, c->preferred_block_size);
    return ATTN_OK;
}

/* Extensions are plain int32_t after their header. */
static attn_status check_extensions(const struct attn_backend_caps *c, struct attn_error *error)
{
    for (const struct attn_ext *ext = c->next; ext != NULL; ext = ext->next) {
        const struct abi_struct *row = abi_find(ext->id, ABI_BACKEND_CAPS);
        const size_t known = row != NULL ? row->size : 0;
        const size_t size = ext->struct_size < known ? ext->struct_size : known;
        const int32_t *numbers = (const int32_t *)(const void *)(ext + 1);
        for (size_t i = 0; i * sizeof *numbers + sizeof *ext < size; i++) {
            REFUSE_IF(numbers[i] < 0, "next", "%s: number %zu of extension %u is %d; 0 or above",
                      c->name, i, ext->id, numbers[i]);
        }
    }
    return ATTN_OK;
}

attn_status caps_check(const struct attn_backend_caps *c, struct attn_error *error)
{
    REFUSE_IF(!text_is_name(c->name), "name",
              "a backend's name is not [a-z][a-z0-9_]* of at most 63 bytes");
    REFUSE_IF(c->variant[0] != '\0' && !text_is_name(c->variant), "variant",
              "%s: the variant is not [a-z][a-z0-9_]* of at most 63 bytes", c->name);
    REFUSE_IF(!text_is_clean(c->version, MAX_LABEL) || !text_is_clean(c->vendor, MAX_LABEL),
              "version", "%s: version or vendor is not clean UTF-8 text of at most %d bytes",
              c->name, MAX_LABEL);
    REFUSE_IF(c->kernels == 0 || c->layer_kinds == 0 || c->phases == 0 || c->dtypes == 0, "kernels",
              "%s: kernels, layer_kinds, phases and dtypes may not be empty", c->name);
    TRY(check_lists(c, error));
    TRY(check_numbers(c, error));
    TRY(check_kernels(c, error));
    TRY(check_cache(c, error));
    return check_extensions(c, error);
}
