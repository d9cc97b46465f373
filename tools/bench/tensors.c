/* SPDX-License-Identifier: Apache-2.0 */
/* The batch of a shape, and the tensors that each layer's run reads and writes. */
#include <stdlib.h>

#include "support/number.h"
#include "support/random.h"
#include "subject.h"

/* Logits of this standard deviation: real weights are far from uniform. */
#define LOGIT_DEVIATION 4.0

struct attn_tensor subject_tensor(struct subject *subject, struct subject_io *io, void *data,
                                  int32_t dtype, int32_t ndim, int64_t a, int64_t b, int64_t c)
{
    int64_t *shape = io->shapes[io->num_shapes++];
    shape[0] = a;
    shape[1] = b;
    shape[2] = c;
    return (struct attn_tensor){
        data, subject->session->device.device, ndim, number_dtype(dtype), shape, NULL, 0};
}

static struct attn_tensor normal_rows(struct subject *subject, struct subject_io *io, int64_t heads,
                                      int64_t dims, double deviation)
{
    int32_t dtype = subject->layer.desc.dtype;
    int64_t rows = subject->requests.num_tokens;
    void *data = memory_normal(&subject->memory, dtype, rows * (heads > 0 ? heads : 1) * dims,
                               deviation, &subject->random);
    return heads > 0 ? subject_tensor(subject, io, data, dtype, 3, rows, heads, dims)
                     : subject_tensor(subject, io, data, dtype, 2, rows, dims, 0);
}

static struct attn_tensor empty_rows(struct subject *subject, struct subject_io *io, int64_t heads,
                                     int64_t dims)
{
    int32_t dtype = subject->layer.desc.dtype;
    int64_t rows = subject->requests.num_tokens;
    void *data = memory_take(&subject->memory, (size_t)(rows * heads * dims) * number_bytes(dtype));
    return subject_tensor(subject, io, data, dtype, 3, rows, heads, dims);
}

static void decoder_io(struct subject *subject, struct subject_io *io, bool writes)
{
    const struct attn_layer_desc *desc = &subject->layer.desc;
    int32_t dv = desc->head_size_v > 0 ? desc->head_size_v : desc->head_size;
    if (writes) {
        io->k = normal_rows(subject, io, desc->num_kv_heads, desc->head_size, 1);
        io->v = normal_rows(subject, io, desc->num_kv_heads, dv, 1);
        io->io.k = &io->k;
        io->io.v = &io->v;
    } else {
        io->io.flags |= ATTN_RUN_NO_WRITE;
    }
    if (subject->shape.kind == SHAPE_WRITE) {
        io->io.flags |= ATTN_RUN_NO_ATTEND;
        return;
    }
    io->q = normal_rows(subject, io, desc->num_q_heads, desc->head_size, LOGIT_DEVIATION);
    io->out = empty_rows(subject, io, desc->num_q_heads, dv);
    io->io.q = &io->q;
    io->io.out = &io->out;
}

/* topk different positions of each token's request, [T, topk]; -1 where the request has fewer. */
static int32_t *draw_topk(struct subject *subject)
{
    const struct requests *requests = &subject->requests;
    int32_t topk = subject->layer.mla.topk;
    int32_t *indices = malloc((size_t)requests->num_tokens * (size_t)topk * sizeof *indices);
    int32_t *order = malloc((size_t)requests->max_seq_len * sizeof *order);
    int32_t *at = indices;
    for (int32_t r = 0; indices != NULL && order != NULL && r < requests->count; r++) {
        int32_t keys = requests->seq_lens[r];
        for (int32_t i = 0; i < keys; i++) {
            order[i] = i;
        }
        for (int32_t t = 0; t < requests->query_lens[r]; t++, at += topk) {
            /* Only what the token may see is moved, so that is what stands in front. */
            int32_t seen = keys - requests->query_lens[r] + t + 1;
            for (int32_t i = 0; i < topk; i++) {
                int32_t other = i < seen ? i + random_below(&subject->random, seen - i) : -1;
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

static void mla_io(struct subject *subject, struct subject_io *io, const int32_t *topk)
{
    const struct attn_mla_desc *mla = &subject->layer.mla;
    int32_t heads = subject->layer.desc.num_q_heads;
    int32_t q_dims = mla->absorb_in_core ? mla->qk_nope_head_dim : mla->kv_lora_rank;
    int32_t out_dims = mla->absorb_in_core ? mla->v_head_dim : mla->kv_lora_rank;
    io->q_nope = normal_rows(subject, io, heads, q_dims, 1);
    io->q_pe = normal_rows(subject, io, heads, mla->qk_rope_head_dim, 1);
    io->kv_c = normal_rows(subject, io, 0, mla->kv_lora_rank, 1);
    io->k_pe = normal_rows(subject, io, 0, mla->qk_rope_head_dim, 1);
    io->out = empty_rows(subject, io, heads, out_dims);
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

static void gdn_io(struct subject *subject, struct subject_io *io)
{
    const struct attn_recurrent_desc *gdn = &subject->layer.gdn;
    int64_t keys = (int64_t)gdn->num_k_heads * gdn->head_size_k;
    int64_t values = (int64_t)gdn->num_v_heads * gdn->head_size_v;
    if (gdn->conv_width > 0) {
        io->mixed_qkv = normal_rows(subject, io, 0, 2 * keys + values, 1);
        io->gdn.mixed_qkv = &io->mixed_qkv;
    } else {
        io->q = normal_rows(subject, io, gdn->num_k_heads, gdn->head_size_k, 1);
        io->k = normal_rows(subject, io, gdn->num_k_heads, gdn->head_size_k, 1);
        io->v = normal_rows(subject, io, gdn->num_v_heads, gdn->head_size_v, 1);
        io->io.q = &io->q;
        io->io.k = &io->k;
        io->io.v = &io->v;
    }
    io->a = normal_rows(subject, io, 0, gdn->num_v_heads, 1);
    io->b = normal_rows(subject, io, 0, gdn->num_v_heads, 1);
    io->out = empty_rows(subject, io, gdn->num_v_heads, gdn->head_size_v);
    io->gdn.ext = (struct attn_ext){ATTN_EXT_IO_RECURRENT, 0, sizeof io->gdn, NULL};
    io->gdn.a = &io->a;
    io->gdn.b = &io->b;
    io->io.next = &io->gdn.ext;
    io->io.out = &io->out;
}

/* slots[t] of the step's own rows: the last query_len positions of each request. */
static void own_slots(const struct subject *subject, int64_t *slots)
{
    const struct requests *requests = &subject->requests;
    int32_t block_size = subject->layer.spec.block_size;
    for (int32_t r = 0; r < requests->count; r++) {
        const int32_t *row = subject->table + r * subject->table_stride;
        int32_t keys = requests->seq_lens[r];
        for (int32_t p = keys - requests->query_lens[r]; p < keys; p++) {
            *slots++ = (int64_t)row[p / block_size] * block_size + p % block_size;
        }
    }
}

static void shuffle_slots(struct subject *subject, int64_t *slots)
{
    for (int64_t i = subject->requests.num_tokens - 1; i > 0; i--) {
        int64_t other = random_below(&subject->random, (int32_t)(i + 1));
        int64_t kept = slots[i];
        slots[i] = slots[other];
        slots[other] = kept;
    }
}

static void paged_batch(struct subject *subject, bool writes)
{
    const struct requests *requests = &subject->requests;
    struct attn_batch *batch = &subject->batch;
    struct memory *memory = &subject->memory;
    size_t entries = (size_t)(requests->count * subject->table_stride);
    batch->block_table = memory_upload(memory, subject->table, entries * sizeof *subject->table);
    batch->block_table_stride = subject->table_stride;
    if (writes) {
        int64_t *slots = malloc((size_t)requests->num_tokens * sizeof *slots);
        if (slots != NULL) {
            own_slots(subject, slots);
            if (subject->shape.kind == SHAPE_WRITE &&
                subject->shape.value[PARAMETER_SHUFFLE] != 0) {
                shuffle_slots(subject, slots);
            }
        }
        batch->slot_mapping =
            memory_upload(memory, slots, (size_t)requests->num_tokens * sizeof *slots);
        batch->num_slots = requests->num_tokens;
        free(slots);
    }
}

static void gdn_batch(struct subject *subject)
{
    const struct requests *requests = &subject->requests;
    int32_t *slots = malloc((size_t)requests->count * sizeof *slots);
    for (int32_t r = 0; slots != NULL && r < requests->count; r++) {
        slots[r] = r;
    }
    subject->batch_gdn = (struct attn_batch_recurrent){
        .ext = {ATTN_EXT_BATCH_RECURRENT, 0, sizeof subject->batch_gdn, NULL},
        .state_slots =
            memory_upload(&subject->memory, slots, (size_t)requests->count * sizeof *slots)};
    subject->batch.next = &subject->batch_gdn.ext;
    free(slots);
}

static bool make_batch(struct subject *subject, bool writes)
{
    const struct requests *requests = &subject->requests;
    size_t count = (size_t)requests->count;
    int32_t *starts = calloc(count + 1, sizeof *starts);
    if (starts == NULL) {
        return false;
    }
    for (size_t r = 0; r < count; r++) {
        starts[r + 1] = starts[r] + requests->query_lens[r];
    }
    subject->batch = (struct attn_batch){
        .struct_size = sizeof subject->batch,
        .num_reqs = requests->count,
        .num_tokens = (int32_t)requests->num_tokens,
        .num_actual_tokens = (int32_t)requests->num_tokens,
        .max_query_len = requests->max_query_len,
        .max_seq_len = requests->max_seq_len,
        .query_start_loc = memory_upload(&subject->memory, starts, (count + 1) * sizeof *starts),
        .query_start_loc_host = starts, /* subject_finish's to free */
        .seq_lens = memory_upload(&subject->memory, requests->seq_lens, count * sizeof(int32_t)),
        .seq_lens_host = requests->seq_lens,
    };
    if (subject->layer.has_cache) {
        paged_batch(subject, writes);
    } else {
        gdn_batch(subject);
    }
    return true;
}

attn_status subject_tensors(struct subject *subject, struct attn_error *error)
{
    bool mla = subject->layer.desc.kind == ATTN_LAYER_MLA;
    bool writes = subject->shape.kind == SHAPE_WRITE || subject->shape.value[PARAMETER_WRITE] != 0;
    const int32_t *topk = NULL;
    if (!make_batch(subject, writes)) {
        return memory_refused(error);
    }
    if (subject->layer.mla.topk > 0) {
        int32_t *host = draw_topk(subject);
        topk = memory_upload(&subject->memory, host,
                             (size_t)subject->requests.num_tokens *
                                 (size_t)subject->layer.mla.topk * sizeof *host);
        free(host);
    }
    for (int32_t i = 0; i < subject->num_layers; i++) {
        struct subject_io *io = &subject->io[i];
        io->io =
            (struct attn_step_io){.struct_size = sizeof io->io, .stream = subject->session->stream};
        if (mla) {
            mla_io(subject, io, topk);
        } else if (subject->layer.desc.kind == ATTN_LAYER_RECURRENT) {
            gdn_io(subject, io);
        } else {
            decoder_io(subject, io, writes);
        }
    }
    return subject->memory.failed ? memory_refused(error) : ATTN_OK;
}
