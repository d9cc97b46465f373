/* SPDX-License-Identifier: Apache-2.0 */
/* The batch of a shape, and the tensors that each layer's run reads and writes. */
#include <stdlib.h>

#include "support/layer.h"
#include "support/number.h"
#include "support/random.h"
#include "measured.h"

/* Logits of this standard deviation: real weights are far from uniform. */
#define LOGIT_DEVIATION 4.0

struct attn_tensor measured_tensor(struct measured *measured, struct measured_io *io, void *data,
                                   int32_t dtype, int32_t ndim, int64_t a, int64_t b, int64_t c)
{
    int64_t *shape = io->shapes[io->num_shapes++];
    shape[0] = a;
    shape[1] = b;
    shape[2] = c;
    return (struct attn_tensor){
        data, measured->session->device.device, ndim, number_dtype(dtype), shape, NULL, 0};
}

static struct attn_tensor normal_rows(struct measured *measured, struct measured_io *io,
                                      int64_t heads, int64_t dims, double deviation)
{
    const struct attn_layer_desc *desc = &measured->layer.desc;
    int32_t dtype =
        heads > 0 && desc->q_scale_form != ATTN_SCALE_NONE ? desc->q_dtype : desc->dtype;
    int64_t rows = measured->requests.num_tokens;
    void *data = memory_normal(&measured->memory, dtype, rows * (heads > 0 ? heads : 1) * dims,
                               deviation, &measured->random);
    return heads > 0 ? measured_tensor(measured, io, data, dtype, 3, rows, heads, dims)
                     : measured_tensor(measured, io, data, dtype, 2, rows, dims, 0);
}

static struct attn_tensor empty_rows(struct measured *measured, struct measured_io *io,
                                     int64_t heads, int64_t dims)
{
    int32_t dtype = measured->layer.desc.dtype;
    int64_t rows = measured->requests.num_tokens;
    void *data =
        memory_take(&measured->memory, (size_t)(rows * heads * dims) * number_bytes(dtype));
    return measured_tensor(measured, io, data, dtype, 3, rows, heads, dims);
}

static void decoder_io(struct measured *measured, struct measured_io *io, bool writes)
{
    const struct attn_layer_desc *desc = &measured->layer.desc;
    int32_t dv = desc->head_size_v > 0 ? desc->head_size_v : desc->head_size;
    if (writes) {
        io->k = normal_rows(measured, io, desc->num_kv_heads, desc->head_size, 1);
        io->v = normal_rows(measured, io, desc->num_kv_heads, dv, 1);
        io->io.k = &io->k;
        io->io.v = &io->v;
    } else {
        io->io.flags |= ATTN_RUN_NO_WRITE;
    }
    if (measured->shape.kind == SHAPE_WRITE) {
        io->io.flags |= ATTN_RUN_NO_ATTEND;
        return;
    }
    io->q = normal_rows(measured, io, desc->num_q_heads, desc->head_size, LOGIT_DEVIATION);
    io->out = empty_rows(measured, io, desc->num_q_heads, dv);
    io->io.q = &io->q;
    io->io.out = &io->out;
}

/* topk different entries, of `grain` positions each, of each token's request, [T, lists, topk]; -1
 * where the request has fewer. */
static int32_t *draw_lists(struct measured *measured, int32_t topk, int32_t grain, int32_t lists)
{
    const struct requests *requests = &measured->requests;
    int32_t *indices =
        malloc((size_t)requests->num_tokens * (size_t)lists * (size_t)topk * sizeof *indices);
    int32_t *order = malloc((size_t)requests->max_seq_len * sizeof *order);
    int32_t *at = indices;
    for (int32_t r = 0; indices != NULL && order != NULL && r < requests->count; r++) {
        int32_t keys = requests->seq_lens[r];
        for (int32_t i = 0; i < keys; i++) {
            order[i] = i;
        }
        for (int32_t n = 0; n < requests->query_lens[r] * lists; n++, at += topk) {
            /* Only what the token may see is moved, so that is what stands in front. */
            int32_t seen = (keys - requests->query_lens[r] + n / lists) / grain + 1;
            for (int32_t i = 0; i < topk; i++) {
                int32_t other = i < seen ? i + random_below(&measured->random, seen - i) : -1;
                at[i] = other >= 0 ? order[other] : -1;
                if (other >= 0) {
                    order[other] = order[i];
                    order[i] = at[i];
                }
            }
        }
    }
    free(order);
    return indices;
}

static void lists_io(struct measured *measured, struct measured_io *io, const int32_t *indices)
{
    const int64_t entries = measured->layer.lists.max_entries;
    io->lists = (struct attn_io_index_lists){
        .ext = {ATTN_EXT_DRAFT_IO_INDEX_LISTS, 0, sizeof io->lists, NULL},
        .indices = indices,
        .token_stride = shape_int(&measured->shape, PARAMETER_LISTS) * entries,
        .group_stride = entries};
    io->io.next = &io->lists.ext;
}

static void index_io(struct measured *measured, struct measured_io *io)
{
    const struct attn_layer_desc *desc = &measured->layer.desc;
    const struct attn_indexer_desc *x = &measured->layer.indexer;
    const int64_t tokens = measured->requests.num_tokens, room = layer_list_room(x);
    void *lists =
        memory_take(&measured->memory, (size_t)(tokens * x->num_groups * room) * sizeof(int32_t));
    io->q = normal_rows(measured, io, desc->num_q_heads, desc->head_size, 1);
    io->weights = normal_rows(measured, io, 0, desc->num_q_heads, 1);
    io->out = measured_tensor(measured, io, lists, ATTN_DTYPE_F32, 3, tokens, x->num_groups, room);
    io->out.dtype = (struct attn_dtype){ATTN_CODE_INT, 32, 1};
    io->indexer =
        (struct attn_io_indexer){.ext = {ATTN_EXT_DRAFT_IO_INDEXER, 0, sizeof io->indexer, NULL},
                                 .weights = x->has_weights ? &io->weights : NULL};
    io->io.next = &io->indexer.ext;
    io->io.q = &io->q;
    io->io.out = &io->out;
    io->io.flags |= ATTN_RUN_NO_WRITE;
}

static void mla_io(struct measured *measured, struct measured_io *io, const int32_t *topk)
{
    const struct attn_mla_desc *mla = &measured->layer.mla;
    int32_t heads = measured->layer.desc.num_q_heads;
    int32_t q_dims = mla->absorb_in_core ? mla->qk_nope_head_dim : mla->kv_lora_rank;
    int32_t out_dims = mla->absorb_in_core ? mla->v_head_dim : mla->kv_lora_rank;
    io->q_nope = normal_rows(measured, io, heads, q_dims, 1);
    io->q_pe = normal_rows(measured, io, heads, mla->qk_rope_head_dim, 1);
    io->kv_c = normal_rows(measured, io, 0, mla->kv_lora_rank, 1);
    io->k_pe = normal_rows(measured, io, 0, mla->qk_rope_head_dim, 1);
    io->out = empty_rows(measured, io, heads, out_dims);
    io->mla = (struct attn_io_mla){.ext = {ATTN_EXT_IO_MLA, 0, sizeof io->mla, NULL},
                                   .q_nope = &io->q_nope,
                                   .q_pe = &io->q_pe,
                                   .kv_c = &io->kv_c,
                                   .k_pe = &io->k_pe,
                                   .topk_indices = topk,
                                   .topk_stride = mla->topk};
    io->io.next = &io->mla.ext;
    io->io.out = &io->out;
    io->io.flags |= ATTN_RUN_NO_WRITE;
}

static void gdn_io(struct measured *measured, struct measured_io *io)
{
    const struct attn_recurrent_desc *gdn = &measured->layer.gdn;
    if (gdn->conv_width > 0) {
        io->mixed_qkv = normal_rows(measured, io, 0, layer_channels(gdn), 1);
        io->gdn.mixed_qkv = &io->mixed_qkv;
    } else {
        io->q = normal_rows(measured, io, gdn->num_k_heads, gdn->head_size_k, 1);
        io->k = normal_rows(measured, io, gdn->num_k_heads, gdn->head_size_k, 1);
        io->v = normal_rows(measured, io, gdn->num_v_heads, gdn->head_size_v, 1);
        io->io.q = &io->q;
        io->io.k = &io->k;
        io->io.v = &io->v;
    }
    if (measured->layer.rule.gate != ATTN_GATE_CONSTANT) {
        io->a = normal_rows(measured, io, 0, measured_gates(measured), 1);
        io->gdn.a = &io->a;
    }
    if (measured->layer.rule.write_gate == ATTN_WRITE_GATE_SIGMOID) {
        io->b = normal_rows(measured, io, 0, gdn->num_v_heads, 1);
        io->gdn.b = &io->b;
    }
    io->out = empty_rows(measured, io, gdn->num_v_heads, gdn->head_size_v);
    io->gdn.ext = (struct attn_ext){ATTN_EXT_IO_RECURRENT, 0, sizeof io->gdn, NULL};
    io->io.next = &io->gdn.ext;
    io->io.out = &io->out;
}

/* slots[t] of the step's own rows: the last query_len positions of each request. */
static void own_slots(const struct measured *measured, int64_t *slots)
{
    const struct requests *requests = &measured->requests;
    int32_t block_size = measured_block(measured);
    for (int32_t r = 0; r < requests->count; r++) {
        const int32_t *row = measured->table + r * measured->table_stride;
        int32_t keys = requests->seq_lens[r];
        for (int32_t p = keys - requests->query_lens[r]; p < keys; p++) {
            *slots++ = (int64_t)row[p / block_size] * block_size + p % block_size;
        }
    }
}

static void shuffle_slots(struct measured *measured, int64_t *slots)
{
    for (int64_t i = measured->requests.num_tokens - 1; i > 0; i--) {
        int64_t other = random_below(&measured->random, (int32_t)(i + 1));
        int64_t kept = slots[i];
        slots[i] = slots[other];
        slots[other] = kept;
    }
}

static void paged_batch(struct measured *measured, bool writes)
{
    const struct requests *requests = &measured->requests;
    struct attn_batch *batch = &measured->batch;
    struct memory *memory = &measured->memory;
    size_t entries = (size_t)(requests->count * measured->table_stride);
    batch->block_table = memory_upload(memory, measured->table, entries * sizeof *measured->table);
    batch->block_table_stride = measured->table_stride;
    if (writes) {
        int64_t *slots = malloc((size_t)requests->num_tokens * sizeof *slots);
        if (slots != NULL) {
            own_slots(measured, slots);
            if (measured->shape.kind == SHAPE_WRITE &&
                measured->shape.value[PARAMETER_SHUFFLE] != 0) {
                shuffle_slots(measured, slots);
            }
        }
        batch->slot_mapping =
            memory_upload(memory, slots, (size_t)requests->num_tokens * sizeof *slots);
        batch->num_slots = requests->num_tokens;
        free(slots);
    }
}

static void gdn_batch(struct measured *measured)
{
    const struct requests *requests = &measured->requests;
    int32_t *slots = malloc((size_t)requests->count * sizeof *slots);
    for (int32_t r = 0; slots != NULL && r < requests->count; r++) {
        slots[r] = r;
    }
    measured->batch_gdn = (struct attn_batch_recurrent){
        .ext = {ATTN_EXT_BATCH_RECURRENT, 0, sizeof measured->batch_gdn, NULL},
        .state_slots =
            memory_upload(&measured->memory, slots, (size_t)requests->count * sizeof *slots)};
    measured->batch.next = &measured->batch_gdn.ext;
    free(slots);
}

static bool make_batch(struct measured *measured, bool writes)
{
    const struct requests *requests = &measured->requests;
    size_t count = (size_t)requests->count;
    int32_t *starts = calloc(count + 1, sizeof *starts);
    if (starts == NULL) {
        return false;
    }
    for (size_t r = 0; r < count; r++) {
        starts[r + 1] = starts[r] + requests->query_lens[r];
    }
    measured->batch = (struct attn_batch){
        .struct_size = sizeof measured->batch,
        .num_reqs = requests->count,
        .num_tokens = (int32_t)requests->num_tokens,
        .num_actual_tokens = (int32_t)requests->num_tokens,
        .max_query_len = requests->max_query_len,
        .max_seq_len = requests->max_seq_len,
        .query_start_loc = memory_upload(&measured->memory, starts, (count + 1) * sizeof *starts),
        .query_start_loc_host = starts, /* measured_finish's to free */
        .seq_lens = memory_upload(&measured->memory, requests->seq_lens, count * sizeof(int32_t)),
        .seq_lens_host = requests->seq_lens,
    };
    if (measured->layer.has_cache) {
        paged_batch(measured, writes);
    } else {
        gdn_batch(measured);
    }
    return true;
}

attn_status measured_tensors(struct measured *measured, struct attn_error *error)
{
    bool mla = measured->layer.desc.kind == ATTN_LAYER_MLA;
    bool writes =
        measured->shape.kind == SHAPE_WRITE || measured->shape.value[PARAMETER_WRITE] != 0;
    const bool lists = measured->layer.lists.max_entries > 0;
    const int32_t entries = lists ? measured->layer.lists.max_entries : measured->layer.mla.topk;
    const int32_t per_token = lists ? shape_int(&measured->shape, PARAMETER_LISTS) : 1;
    const int32_t *indices = NULL;
    if (!make_batch(measured, writes)) {
        return memory_refused(error);
    }
    if (entries > 0) {
        int32_t *host =
            draw_lists(measured, entries, lists ? measured->layer.lists.granularity : 1, per_token);
        indices = memory_upload(&measured->memory, host,
                                (size_t)measured->requests.num_tokens * (size_t)per_token *
                                    (size_t)entries * sizeof *host);
        free(host);
    }
    for (int32_t i = 0; i < measured->num_layers; i++) {
        struct measured_io *io = &measured->io[i];
        io->io = (struct attn_step_io){.struct_size = sizeof io->io,
                                       .stream = measured->session->stream};
        if (mla) {
            mla_io(measured, io, indices);
        } else if (measured->layer.desc.kind == ATTN_LAYER_RECURRENT) {
            gdn_io(measured, io);
        } else if (measured->layer.indexer.topk > 0) {
            index_io(measured, io);
        } else {
            decoder_io(measured, io, writes);
        }
        if (lists) {
            lists_io(measured, io, indices);
        }
    }
    return measured->memory.failed ? memory_refused(error) : ATTN_OK;
}
