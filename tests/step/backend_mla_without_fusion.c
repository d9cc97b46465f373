/* SPDX-License-Identifier: Apache-2.0 */
/* Backends for MLA in float32 with no fused kernel, on the example plugin's attend and merge:
 * `counted` has every part of a prefill per head and counts what it gathers; `latent_only` has
 * attend_mla alone, for any number of queries; `one_query` for one. */
#include "float_backend.h" /* first: it declares our own attn_plugin_entry */

#define attn_plugin_entry example_entry /* ours is another */
#include "../../examples/plugin.c"      /* NOLINT(bugprone-suspicious-include): for its attend */
#undef attn_plugin_entry

#include <attn/mla.h>

ATTN_EXPORT int32_t seen_gathered[4096]; /* by slot of the cache */
ATTN_EXPORT int32_t seen_gather_calls, seen_attend_calls, seen_latent_calls, seen_latent_requests;

static float *part(const struct attn_tensor *t, int64_t token, int64_t head)
{
    return row(t, token, t->ndim > 2 ? head : 0);
}

static attn_status attend_mla(const struct attn_attend_args *a, struct attn_error *error)
{
    const struct attn_io_mla *io = (const struct attn_io_mla *)ext_of(a->next, ATTN_EXT_IO_MLA);
    const struct attn_batch *b = a->batch;
    int32_t rank = a->layer->head_size_v, size = a->layer->head_size;
    seen_latent_calls++;
    seen_latent_requests += b->num_reqs;
    for (int64_t r = 0; r < b->num_reqs; r++) {
        int64_t first = b->query_start_loc[r], count = b->query_start_loc[r + 1] - first;
        for (int64_t i = 0; i < count * a->layer->num_q_heads; i++) {
            int64_t token = first + i / a->layer->num_q_heads, h = i % a->layer->num_q_heads;
            int64_t position = b->seq_lens[r] - count + i / a->layer->num_q_heads;
            float *out = row(a->out, token, h), m = -INFINITY, sum = 0;
            memset(out, 0, sizeof *out * (size_t)rank);
            for (int64_t j = 0; j <= position; j++) {
                const float *k = key(a, 0, r, j, 0), *q = part(io->q_nope, token, h),
                            *pe = part(io->q_pe, token, h);
                float s = 0, before = m;
                for (int32_t d = 0; d < size; d++) {
                    s += k[d] * (d < rank ? q[d] : pe[d - rank]);
                }
                s *= a->layer->scale;
                m = fmaxf(m, s);
                float shrink = before == m ? 1 : expf(before - m), w = expf(s - m);
                sum = sum * shrink + w;
                for (int32_t d = 0; d < rank; d++) {
                    out[d] = out[d] * shrink + w * k[d];
                }
            }
            for (int32_t d = 0; d < rank && sum > 0; d++) {
                out[d] /= sum;
            }
            if (a->lse != NULL) {
                *row(a->lse, h, token) = sum > 0 ? m + logf(sum) : -INFINITY;
            }
        }
    }
    return ATTN_OK;
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

static attn_status scheduled_size(const struct attn_schedule_size_args *args,
                                  struct attn_schedule_size *size, struct attn_error *error)
{
    attn_status status = schedule_size(args, size, error);
    size->host_bytes = sizeof(struct schedule);
    return status;
}

static attn_status plan(const struct attn_attend_args *a, int32_t mode, struct attn_error *error)
{
    *(struct schedule *)a->schedule_host = schedule_of(a->batch);
    return ATTN_OK;
}

static attn_status counted_attend(const struct attn_attend_args *a, struct attn_error *error)
{
    const struct schedule made = *(const struct schedule *)a->schedule_host,
                          needed = schedule_of(a->batch);
    if (memcmp(&made, &needed, sizeof made) != 0) {
        return ATTN_ERROR_ORDER;
    }
    seen_attend_calls++;
    return attend(a, error);
}

static attn_status write_latent(const struct attn_write_kv_args *a, struct attn_error *error)
{
    const struct attn_io_mla *io = (const struct attn_io_mla *)ext_of(a->next, ATTN_EXT_IO_MLA);
    for (int64_t t = 0; t < a->num_slots; t++) {
        int64_t at = a->slot_mapping[t], size = a->k_cache->block_size, rank = io->kv_c->shape[1];
        if (at >= 0) {
            float *to = slot(a->k_cache, at / size, at % size, 0);
            memcpy(to, row(io->kv_c, t, 0), 4 * (size_t)rank);
            memcpy(to + rank, row(io->k_pe, t, 0), 4 * (size_t)io->k_pe->shape[1]);
        }
    }
    return ATTN_OK;
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
            memcpy(row(a->out, i, 0), slot(a->cache, block, j % size, 0),
                   4 * (size_t)a->cache->head_size);
        }
    }
    return ATTN_OK;
}

static attn_status batched_gemm(const struct attn_batched_gemm_args *a, struct attn_error *error)
{
    const struct attn_tensor *x = a->a, *w = a->w, *out = a->out;
    for (int64_t i = 0; i < out->shape[0] * out->shape[1] * out->shape[2]; i++) {
        int64_t b = i / (out->shape[1] * out->shape[2]), m = i / out->shape[2] % out->shape[1],
                n = i % out->shape[2];
        float sum = 0;
        for (int64_t k = 0; k < x->shape[2]; k++) {
            sum += row(x, b, m)[k * x->strides[2]] * row(w, b, k)[n * w->strides[2]];
        }
        row(out, b, m)[n * out->strides[2]] =
            sum * (a->w_scale != NULL ? a->w_scale[a->w_scale_count > 1 ? b : 0] : 1);
    }
    return ATTN_OK;
}

static const struct attn_kernels backend_kernels = {.struct_size = sizeof backend_kernels,
                                                    .attend = counted_attend,
                                                    .write_kv = write_latent,
                                                    .merge_states = merge_states,
                                                    .attend_mla = attend_mla,
                                                    .gather_kv = gather_kv,
                                                    .batched_gemm = batched_gemm,
                                                    .prepare = prepare,
                                                    .release = release,
                                                    .schedule_size = scheduled_size,
                                                    .schedule = plan};

static attn_status backend_probe(const struct attn_host *host, const struct attn_probe_sink *sink,
                                 struct attn_error *error)
{
    static const struct attn_head_size_range head_sizes[] = {{{8, 256, 8}, {8, 256, 8}, 0}};
    static const struct attn_range block_sizes[] = {{1, 256, 1}};
    static const char *const names[] = {"counted", "latent_only", "one_query"};
    attn_status status = sink->device(sink->user, &float_backend_cpu, error);
    for (int32_t i = 0; i < 3 && status == ATTN_OK; i++) {
        const uint64_t latent =
            ATTN_KERNEL_ATTEND_MLA | ATTN_KERNEL_WRITE_KV | ATTN_KERNEL_BATCHED_GEMM;
        const uint64_t per_head =
            ATTN_KERNEL_ATTEND | ATTN_KERNEL_MERGE_STATES | ATTN_KERNEL_GATHER_KV;
        const struct attn_mla_caps mla = {.ext = {ATTN_EXT_CAPS_MLA, 0, sizeof mla, NULL},
                                          .kv_lora_rank_max = 512,
                                          .qk_rope_head_dim_max = 64,
                                          .num_q_heads_multiple = i == 0 ? 4 : 1,
                                          .max_query_len = i == 1 ? 0 : 1};
        const struct attn_backend_caps caps = {
            .struct_size = sizeof caps,
            .next = &mla.ext,
            .name = names[i],
            .variant = "",
            .version = "0.1.0",
            .vendor = "you",
            .device = {ATTN_DEVICE_CPU, 0},
            .kernels = i == 0 ? latent | per_head : latent,
            .layer_kinds = 1 << ATTN_LAYER_MLA,
            .phases = 3,
            .dtypes = 1 << ATTN_DTYPE_F32,
            .kv_dtypes = 1 << ATTN_KV_F32,
            .terms = ATTN_TERM_CAUSAL | ATTN_TERM_BIDIRECTIONAL,
            .features = ATTN_FEATURE_PAGED_KV | ATTN_FEATURE_LSE | ATTN_FEATURE_CONTIGUOUS_KV,
            .view_forms = ATTN_VIEW_LATENT,
            .layouts = 1 << ATTN_KV_LAYOUT_LATENT,
            .k_scale_forms = 1,
            .v_scale_forms = 1,
            .p_scale_forms = 1,
            .output_forms = 1,
            .head_sizes = head_sizes,
            .num_head_sizes = 1,
            .block_sizes = block_sizes,
            .num_block_sizes = 1,
            .preferred_layout = ATTN_KV_LAYOUT_LATENT,
            .preferred_block_size = 16,
            .reorder_threshold = 2,
            .rank = {-1, -1}};
        status = sink->backend(sink->user, &caps, error);
    }
    return status;
}

static attn_status backend_create(const struct attn_create_args *args, attn_instance **instance,
                                  const struct attn_kernels **table, struct attn_error *error)
{
    attn_status status = create(args, instance, table, error);
    *table = &backend_kernels;
    return status;
}

static const struct attn_plugin backend_plugin = {.struct_size = sizeof backend_plugin,
                                                  .abi_version = ATTN_ABI_VERSION,
                                                  .name = "mla_without_fusion",
                                                  .version = "0.1.0",
                                                  .vendor = "you",
                                                  .probe = backend_probe,
                                                  .create = backend_create,
                                                  .destroy = destroy};

attn_status attn_plugin_entry(uint32_t min, uint32_t max, const struct attn_plugin **out,
                              struct attn_error *error)
{
    const struct attn_plugin *example;
    attn_status status = example_entry(min, max, &example, error);
    *out = status == ATTN_OK ? &backend_plugin : NULL;
    return status;
}
