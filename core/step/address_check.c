/* SPDX-License-Identifier: Apache-2.0 */
/* Where what a batch and a run bring lies, and errors of a device that come late. */
#include "bind/address_check.h"

#include <attn/io.h>

#include "step/plan_state.h"
#include "util/structs.h"

/* The driver is asked of every array that kernels or the host will follow. */
static attn_status ask_batch(const attn_model *model, const struct attn_batch *b,
                             struct attn_error *error)
{
    const struct attn_batch_recurrent *gdn =
        (const struct attn_batch_recurrent *)ext_find(b->next, ATTN_EXT_BATCH_RECURRENT);
    const struct attn_batch_context_parallel *context =
        (const struct attn_batch_context_parallel *)ext_find(b->next, ATTN_EXT_BATCH_CONTEXT);
    const struct {
        const char *field;
        const void *address;
    } on_device[] = {{"query_start_loc", b->query_start_loc},
                     {"seq_lens", b->seq_lens},
                     {"key_start_loc", b->key_start_loc},
                     {"block_table", b->block_table},
                     {"block_table_row", b->block_table_row},
                     {"slot_mapping", b->slot_mapping},
                     {"page_indices", b->page_indices},
                     {"page_start_loc", b->page_start_loc},
                     {"last_page_len", b->last_page_len},
                     {"causal_per_request", b->causal_per_request},
                     {"encoder_seq_lens", b->encoder_seq_lens},
                     {"logits_indices", b->logits_indices},
                     {"spans", b->spans},
                     {"span_start_loc", b->span_start_loc},
                     {"tree", b->tree},
                     {"state_slots", gdn != NULL ? gdn->state_slots : NULL},
                     {"has_initial_state", gdn != NULL ? gdn->has_initial_state : NULL},
                     {"num_accepted_tokens", gdn != NULL ? gdn->num_accepted_tokens : NULL},
                     {"initial_slots", gdn != NULL ? gdn->initial_slots : NULL},
                     {"checkpoint_slots", gdn != NULL ? gdn->checkpoint_slots : NULL},
                     {"local_seq_lens", context != NULL ? context->local_seq_lens : NULL}},
      on_host[] = {{"query_start_loc_host", b->query_start_loc_host},
                   {"seq_lens_host", b->seq_lens_host},
                   {"key_start_loc_host", b->key_start_loc_host},
                   {"encoder_seq_lens_host", b->encoder_seq_lens_host},
                   {"page_start_loc_host", b->page_start_loc_host},
                   {"last_page_len_host", b->last_page_len_host}};
    attn_status status = ATTN_OK;
    for (size_t i = 0; i < sizeof on_host / sizeof *on_host && status == ATTN_OK; i++) {
        status = address_ask_host(model, on_host[i].address, on_host[i].field, error);
    }
    for (size_t i = 0; i < sizeof on_device / sizeof *on_device && status == ATTN_OK; i++) {
        status = address_ask(model, on_device[i].address, on_device[i].field, error);
    }
    return status;
}

/* Likewise of the tables next to the batch's own fields, once they are read. */
attn_status address_check_table(const attn_plan *plan, const struct attn_batch_table *t,
                                struct attn_error *error)
{
    const void *const on_device[] = {t->block_table,  t->block_table_row, t->slot_mapping,
                                     t->seq_lens,     t->page_indices,    t->page_start_loc,
                                     t->last_page_len},
                      *const on_host[] = {t->seq_lens_host, t->page_start_loc_host,
                                          t->last_page_len_host};
    attn_status status = ATTN_OK;
    if (plan->model->asked == NULL || (plan->asked_tables && !plan->validate)) {
        return ATTN_OK;
    }
    for (size_t i = 0; i < sizeof on_host / sizeof *on_host && status == ATTN_OK; i++) {
        status = address_ask_host(plan->model, on_host[i], "tables", error);
    }
    for (size_t i = 0; i < sizeof on_device / sizeof *on_device && status == ATTN_OK; i++) {
        status = address_ask(plan->model, on_device[i], "tables", error);
    }
    return status;
}

attn_status address_check_batch(attn_plan *plan, const struct attn_batch *batch,
                                struct attn_error *error)
{
    if (plan->model->asked == NULL || (plan->asked && !plan->validate)) {
        return ATTN_OK;
    }
    attn_status status = ask_batch(plan->model, batch, error);
    plan->asked = status == ATTN_OK;
    return status;
}

/* What a run brings in one extension; the tensors first. */
struct brought {
    const char *field;
    const struct attn_tensor *tensor;
    const void *address;
};

static attn_status check_brought(const attn_plan *plan, const struct brought *brought, size_t count,
                                 struct attn_error *error)
{
    attn_status status = ATTN_OK;
    for (size_t i = 0; i < count && status == ATTN_OK; i++) {
        const struct attn_tensor *tensor = brought[i].tensor;
        status = address_check_tensor(plan->model, tensor, brought[i].field, error);
        if (status == ATTN_OK && plan->validate) {
            status = address_ask(plan->model, tensor != NULL ? tensor->data : brought[i].address,
                                 brought[i].field, error);
        }
    }
    return status;
}

static attn_status check_extension(const attn_plan *plan, const struct attn_ext *ext,
                                   struct attn_error *error)
{
    const void *extension = ext;
    if (ext->id == ATTN_EXT_IO_MLA) {
        const struct attn_io_mla *io = extension;
        const struct brought all[] = {{"q_nope", io->q_nope, NULL},
                                      {"q_pe", io->q_pe, NULL},
                                      {"kv_c", io->kv_c, NULL},
                                      {"k_pe", io->k_pe, NULL},
                                      {"topk_indices", NULL, io->topk_indices}};
        return check_brought(plan, all, 5, error);
    }
    if (ext->id == ATTN_EXT_IO_RECURRENT) {
        const struct attn_io_recurrent *io = extension;
        const struct brought all[] = {
            {"mixed_qkv", io->mixed_qkv, NULL}, {"a", io->a, NULL}, {"b", io->b, NULL}};
        return check_brought(plan, all, 3, error);
    }
    if (ext->id == ATTN_EXT_IO_OUTPUT_QUANT) {
        const struct attn_io_output_quant *io = extension;
        const struct brought all[] = {{"block_scales", io->block_scales, NULL},
                                      {"scale", NULL, io->scale}};
        return check_brought(plan, all, 2, error);
    }
    if (ext->id == ATTN_EXT_IO_ROPE) {
        const struct attn_io_rope *io = extension;
        const struct brought all[] = {{"cos_sin", io->cos_sin, NULL},
                                      {"q_norm_weight", io->q_norm_weight, NULL},
                                      {"k_norm_weight", io->k_norm_weight, NULL},
                                      {"positions", NULL, io->positions}};
        return check_brought(plan, all, 4, error);
    }
    return ATTN_OK;
}

attn_status address_check_run(const attn_plan *plan, const struct attn_step_io *io,
                              struct attn_error *error)
{
    const struct brought all[] = {{"q", io->q, NULL},
                                  {"k", io->k, NULL},
                                  {"v", io->v, NULL},
                                  {"out", io->out, NULL},
                                  {"lse", io->lse, NULL}};
    attn_status status = check_brought(plan, all, 5, error);
    for (const struct attn_ext *ext = io->next; ext != NULL && status == ATTN_OK; ext = ext->next) {
        status = check_extension(plan, ext, error);
    }
    return status;
}

attn_status settle_device_errors(const attn_plan *plan, void *stream, attn_status status,
                                 struct attn_error *error)
{
    struct attn_error why = ATTN_ERROR_INIT, clean = ATTN_ERROR_INIT;
    const struct instance *instance = NULL;
    for (int32_t i = 0; i < plan->model->num_instances && instance == NULL; i++) {
        const struct instance *other = &plan->model->instances[i];
        instance = other->kernels.synchronize != NULL ? other : NULL;
    }
    if (status != ATTN_OK || instance == NULL || plan->capturing) {
        return status;
    }
    const struct attn_stream_args args = {
        .struct_size = sizeof args, .instance = instance->handle, .stream = stream};
    status = instance->kernels.synchronize(&args, &why);
    if (status == ATTN_OK) {
        return ATTN_OK;
    }
    error_relay(&clean, status, &why);
    return error_set(error, status_is_known(status) ? status : ATTN_ERROR_PLUGIN, clean.field,
                     "step %llu: %s", (unsigned long long)plan->serial, clean.message);
}
