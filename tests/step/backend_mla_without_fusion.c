/* SPDX-License-Identifier: Apache-2.0 */
/* Backends for MLA in float32 with no fused kernel, of parts of cpu_ref: `counted` has every part
 * of a prefill per head and counts what it gathers; `latent_only` has attend_mla alone, for any
 * number of queries; `one_query` for one. */
#include <attn/mla.h>

#include "cpu_ref_backend.h"

ATTN_EXPORT int32_t seen_gathered[4096]; /* by slot of the cache */
ATTN_EXPORT int32_t seen_gather_calls, seen_attend_calls, seen_latent_calls, seen_latent_requests;

static attn_status attend_mla(const struct attn_attend_args *args, struct attn_error *error)
{
    seen_latent_calls++;
    seen_latent_requests += args->batch->num_reqs;
    return real_kernels.attend_mla(args, error);
}

/* A schedule that fits one batch only. */
struct schedule {
    int32_t num_reqs, first_row, last_row;
};

static struct schedule schedule_of(const struct attn_batch *b)
{
    return (struct schedule){b->num_reqs, b->query_start_loc_host[0],
                             b->query_start_loc_host[b->num_reqs]};
}

static attn_status schedule_size(const struct attn_schedule_size_args *args,
                                 struct attn_schedule_size *size, struct attn_error *error)
{
    size->host_bytes = sizeof(struct schedule);
    return ATTN_OK;
}

static attn_status plan(const struct attn_attend_args *a, int32_t mode, struct attn_error *error)
{
    *(struct schedule *)a->schedule_host = schedule_of(a->batch);
    return ATTN_OK;
}

static attn_status attend(const struct attn_attend_args *a, struct attn_error *error)
{
    const struct schedule made = *(const struct schedule *)a->schedule_host,
                          needed = schedule_of(a->batch);
    if (memcmp(&made, &needed, sizeof made) != 0) {
        return ATTN_ERROR_ORDER;
    }
    seen_attend_calls++;
    return real_kernels.attend(a, error);
}

static attn_status gather_kv(const struct attn_gather_kv_args *a, struct attn_error *error)
{
    seen_gather_calls++;
    for (int64_t r = 0; r < a->batch->num_reqs; r++) {
        int64_t table = a->batch->block_table_row != NULL ? a->batch->block_table_row[r] : r;
        for (int64_t i = a->out_start_loc[r]; i < a->out_start_loc[r + 1]; i++) {
            int64_t j = a->first_key[r] + i - a->out_start_loc[r], size = a->cache->block_size;
            int64_t block = a->batch->block_table[table * a->batch->block_table_stride + j / size];
            seen_gathered[block * size + j % size]++;
        }
    }
    return real_kernels.gather_kv(a, error);
}

static void change_kernels(struct attn_kernels *kernels)
{
    *kernels = SIZED(attn_kernels, .attend = attend, .write_kv = real_kernels.write_kv,
                     .merge_states = real_kernels.merge_states, .attend_mla = attend_mla,
                     .gather_kv = gather_kv, .batched_gemm = real_kernels.batched_gemm,
                     .schedule_size = schedule_size, .schedule = plan);
}

static attn_status declare_backends(const struct attn_probe_sink *sink,
                                    const struct attn_backend_caps *cpu_ref,
                                    struct attn_error *error)
{
    static const char *const names[] = {"counted", "latent_only", "one_query"};
    attn_status status = ATTN_OK;
    for (int32_t i = 0; i < 3 && status == ATTN_OK; i++) {
        const uint64_t latent =
            ATTN_KERNEL_ATTEND_MLA | ATTN_KERNEL_WRITE_KV | ATTN_KERNEL_BATCHED_GEMM;
        const uint64_t per_head =
            ATTN_KERNEL_ATTEND | ATTN_KERNEL_MERGE_STATES | ATTN_KERNEL_GATHER_KV;
        const struct attn_mla_caps mla =
            EXTENSION(attn_mla_caps, ATTN_EXT_CAPS_MLA, NULL, .kv_lora_rank_max = 512,
                      .qk_rope_head_dim_max = 64, .num_q_heads_multiple = i == 0 ? 4 : 1,
                      .max_query_len = i == 1 ? 0 : 1);
        struct attn_backend_caps caps = *cpu_ref;
        caps.next = &mla.ext;
        caps.name = names[i];
        caps.kernels = i == 0 ? latent | per_head : latent;
        caps.layer_kinds = 1 << ATTN_LAYER_MLA;
        caps.dtypes = 1 << ATTN_DTYPE_F32;
        caps.kv_dtypes = 1 << ATTN_KV_F32;
        caps.decode_write_kv_dtypes = 0;
        caps.features = ATTN_FEATURE_PAGED_KV | ATTN_FEATURE_LSE | ATTN_FEATURE_CONTIGUOUS_KV;
        caps.reorder_threshold = 2;
        caps.rank[0] = caps.rank[1] = -1;
        status = sink->backend(sink->user, &caps, error);
    }
    return status;
}

CPU_REF_BACKEND("mla_without_fusion", create, NULL)
