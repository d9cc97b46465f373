/* SPDX-License-Identifier: Apache-2.0 */
/* The entry, and what all checks need. */
#include <math.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

#include "../../step/cpu_ref_backend.h"
#include "checked.h"
#include "support/number.h"

#define MEMORY_DOUBLES (1 << 25)

const struct attn_kernels *const cpu_ref_kernels = &real_kernels;
static double memory[MEMORY_DOUBLES];
static int64_t used;
static atomic_flag busy = ATOMIC_FLAG_INIT;

void checked_begin(void)
{
    while (atomic_flag_test_and_set_explicit(&busy, memory_order_acquire)) {
    }
    checked_clear();
}

void checked_clear(void)
{
    used = 0;
}

double *checked_memory(int64_t count)
{
    double *part = memory + used;
    used += count;
    if (used > MEMORY_DOUBLES) {
        __builtin_trap(); /* a case larger than any of attn-check's: raise MEMORY_DOUBLES */
    }
    memset(part, 0, (size_t)count * sizeof *part);
    return part;
}

void checked_end(void)
{
    atomic_flag_clear_explicit(&busy, memory_order_release);
}

attn_status checked_wrong(struct attn_error *error, const char *what, int64_t row, int64_t head,
                          int64_t dim, double found, double wanted)
{
    if (error != NULL) {
        error->status = ATTN_ERROR_PLUGIN;
        snprintf(error->field, sizeof error->field, "%s", what);
        snprintf(error->message, sizeof error->message,
                 "row %lld, head %lld, element %lld is %.9g; the formula says %.9g", (long long)row,
                 (long long)head, (long long)dim, found, wanted);
    }
    return ATTN_ERROR_PLUGIN;
}

bool checked_near(double found, double wanted, double slack, int32_t dtype)
{
    if (!isfinite(wanted)) {
        return isnan(wanted) ? isnan(found) : found == wanted;
    }
    return found >= number_round(wanted - slack, dtype) &&
           found <= number_round(wanted + slack, dtype);
}

double checked_rms(const double *row, int64_t count)
{
    double sum = 0;
    for (int64_t i = 0; i < count; i++) {
        sum += isnan(row[i]) ? 0 : row[i] * row[i];
    }
    return sqrt(sum / (double)count);
}

int32_t tensor_dtype(const struct attn_tensor *tensor)
{
    for (int32_t dtype = 1; dtype <= ATTN_DTYPE_INT8; dtype++) {
        struct attn_dtype known = number_dtype(dtype);
        if (memcmp(&known, &tensor->dtype, sizeof known) == 0) {
            return dtype;
        }
    }
    return 0;
}

void tensor_load(const struct attn_tensor *tensor, int64_t i, int64_t j, int64_t first,
                 int64_t count, double *row)
{
    if (count == 0) {
        return; /* a latent row without rope has no such tensor */
    }
    const int64_t index[] = {i, j, first};
    int64_t at = 0, dense = 1;
    int32_t dtype = tensor_dtype(tensor), last = tensor->ndim - 1;
    for (int32_t d = last; d >= 0; dense *= tensor->shape[d--]) {
        at += (d == last ? first : index[d]) * (tensor->strides ? tensor->strides[d] : dense);
    }
    for (int64_t e = 0; e < count; e++) {
        row[e] = number_load((const uint8_t *)tensor->data + tensor->byte_offset,
                             at + e * (tensor->strides ? tensor->strides[last] : 1), dtype);
    }
}

uint8_t *view_element(const struct attn_kv_view *view, int64_t block, int64_t slot, int64_t head,
                      int64_t d, int32_t dtype)
{
    int64_t pack = view->pack > 0 ? view->pack : view->head_size;
    return (uint8_t *)view->data + block * view->stride_block + slot * view->stride_slot +
           head * view->stride_head + d / pack * view->stride_pack +
           d % pack * (int64_t)number_bytes(dtype);
}

double head_scale(const float *device, float host, int32_t form, int64_t head)
{
    return form == ATTN_SCALE_NONE ? 1
           : device != NULL        ? device[form == ATTN_SCALE_PER_HEAD ? head : 0]
           : host != 0             ? host
                                   : 1;
}

const void *extension(const struct attn_ext *next, uint32_t id)
{
    return ext_of(next, id);
}

static attn_status declare_backends(const struct attn_probe_sink *sink,
                                    const struct attn_backend_caps *caps, struct attn_error *why)
{
    struct attn_backend_caps mine = *caps;
    mine.name = "cpu_ref_checked";
    mine.rank[0] = mine.rank[1] = -1;
    return sink->backend(sink->user, &mine, why);
}

/* The instance is cpu_ref's own, so that a kernel's arguments need no copy. */
static void change_kernels(struct attn_kernels *kernels)
{
    kernels->attend = checked_attend;
    kernels->attend_mla = checked_attend_mla;
    kernels->attend_mla_sparse = checked_attend_mla_sparse;
    kernels->write_kv = checked_write_kv;
    kernels->recurrent = checked_gated_delta;
    kernels->merge_states = checked_merge_states;
    kernels->rope_write_kv = checked_rope_write_kv;
    kernels->gather_kv = checked_gather_kv;
    kernels->quantize = checked_quantize;
    kernels->amax = checked_amax;
    kernels->batched_gemm = checked_batched_gemm;
}

/* Under cpu_ref's name as well; other names are cpu_ref's to refuse. */
static attn_status create_checked(const struct attn_create_args *args, attn_instance **instance,
                                  const struct attn_kernels **table, struct attn_error *error)
{
    return strncmp(args->backend, "cpu_ref", 7) == 0 ? create(args, instance, table, error)
                                                     : real->create(args, instance, table, error);
}

CPU_REF_BACKEND("cpu_ref_checked", create_checked, NULL)
