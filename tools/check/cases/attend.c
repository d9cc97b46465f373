/* SPDX-License-Identifier: Apache-2.0 */
#include "cases/attend.h"

#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "cases/kernel_test.h"
#include "cases/problem.h"
#include "cases/problem_copy.h"
#include "common/command.h"
#include "harness/trial.h"
#include "harness/watch.h"
#include "support/number.h"

#define CASES_EACH 12 /* for each of two threads */

const char *const trial_way_names[TRIAL_WAY_COUNT] = {
    "plain", "replanned", "two_plans", "table_update", "replay", "in_graph", "alone", "parts"};

int32_t trial_graph_level(int32_t shape)
{
    return shape == SHAPE_DECODE || shape == SHAPE_LONG_DECODE ? ATTN_GRAPH_SINGLE_TOKEN_DECODE
           : shape == SHAPE_SPECULATIVE                        ? ATTN_GRAPH_UNIFORM_BATCH
                                                               : ATTN_GRAPH_ALWAYS;
}

bool trial_way_declared(const struct attn_backend_caps *caps, int32_t shape, int32_t way)
{
    switch (way) {
    case TRIAL_TABLE_UPDATE:
        return (caps->features & ATTN_FEATURE_UPDATE_BLOCK_TABLE) && shape_is_paged(shape);
    case TRIAL_REPLAY:
    case TRIAL_IN_GRAPH:
        return caps->graph_level >= trial_graph_level(shape);
    case TRIAL_ALONE:
        return (caps->features & ATTN_FEATURE_BATCH_INVARIANT) != 0;
    case TRIAL_PARTS:
        return (caps->features & ATTN_FEATURE_BATCH_INVARIANT_PREFIX) && shape_is_paged(shape);
    default:
        return true;
    }
}

/* A plan for other blocks, and other slots, that update_block_table then replaces. */
static attn_status plan_and_update(struct problem_copy *copy, struct attn_error *error)
{
    struct attn_batch *batch = &copy->binding.batch;
    const struct attn_batch whole = *batch;
    batch->block_table = (const int32_t *)(copy->memory + copy->problem->at.other_table);
    batch->slot_mapping = (const int64_t *)(copy->memory + copy->problem->at.other_slots);
    attn_status status = problem_copy_plan(copy, ATTN_PLAN_EAGER, error);
    *batch = whole;
    if (status == ATTN_OK && copy->backend->kernels.update_block_table != NULL) {
        struct attn_attend_args args = copy->binding.attend;
        args.q = args.k = args.v = args.out = args.lse = NULL;
        status = copy->backend->kernels.update_block_table(&args, error);
    }
    return status;
}

static attn_status plan_by_way(struct problem_copy *copy, int32_t way, struct attn_error *error)
{
    attn_status status = ATTN_OK;
    if (way == TRIAL_REPLANNED) {
        const struct copy_step step = problem_copy_step(copy);
        status = copy_step_plan_shorter(&step, ATTN_PLAN_EAGER, error);
    } else if (way == TRIAL_TABLE_UPDATE) {
        return plan_and_update(copy, error);
    }
    return status == ATTN_OK ? problem_copy_plan(copy, ATTN_PLAN_EAGER, error) : status;
}

bool trial_serves(void *user, const struct factor_value *v)
{
    struct trial *trial = user;
    struct attn_layer_desc layer;
    case_layer(v, &layer);
    return trial_supports(trial, trial->reference, &layer, case_phase(v)) &&
           trial_supports(trial, trial->tested, &layer, case_phase(v));
}

uint8_t *wanted_rows(const struct check_problem *problem)
{
    uint8_t *rows = command_calloc((size_t)problem->num_tokens, 1);
    const int32_t *listed = PROBLEM_AT(problem, int32_t, logits_indices);
    for (int32_t t = problem->first_row; t < problem->num_actual_tokens; t++) {
        rows[t] = problem->v[FACTOR_FAST_PREFILL].a == 0;
    }
    for (int32_t i = 0; i < problem->num_logits; i++) {
        rows[listed[i]] = 1;
    }
    return rows;
}

/* Whether rows of `row` bytes at `at` of the image that belong to others, before the batch's first
 * and after its last, are as they were. */
static bool other_rows_untouched(const struct check_problem *problem, size_t at, size_t row,
                                 const uint8_t *found)
{
    const size_t first = (size_t)problem->first_row * row, all = (size_t)problem->num_tokens * row;
    const size_t end = (size_t)problem->num_actual_tokens * row;
    const uint8_t *was = problem->image.bytes + at, *is = found + at;
    return memcmp(was, is, first) == 0 && memcmp(was + end, is + end, all - end) == 0;
}

static enum trial_result verify_out(struct trial *trial, const struct problem_copy *tested,
                                    const uint8_t *rows, const uint8_t *expected,
                                    const uint8_t *found)
{
    const struct check_problem *problem = tested->problem;
    const struct attn_tensor *out = &tested->binding.out;
    const struct compared compared = {"out",
                                      problem->dtype,
                                      out->shape[1],
                                      out->shape[2],
                                      out->strides[0],
                                      out->strides[1],
                                      problem->num_actual_tokens,
                                      rows};
    return compare_rows(trial, &compared, expected + problem->at.out, found + problem->at.out,
                        bound_of_case(problem->v));
}

enum trial_result verify_step(struct trial *trial, const struct problem_copy *reference,
                              struct problem_copy *tested)
{
    const struct check_problem *problem = tested->problem;
    const uint8_t *expected = reference->memory;
    OWNED(memory_end)
    uint8_t *found = trial_read(trial, tested->device, tested->memory, problem->image.size);
    OWNED(memory_end) uint8_t *rows = wanted_rows(problem);
    if (found == NULL) {
        return TRIAL_FAILED;
    }
    TRIAL_TRY(problem->output.form == ATTN_OUTPUT_PLAIN
                  ? verify_out(trial, tested, rows, expected, found)
                  : verify_codes(trial, problem, &reference->binding.out, rows, expected, found));
    TRIAL_TRY(verify_image(trial, &problem->image, found));
    TRIAL_FAIL_IF(trial, !plan_memory_guards_whole(&tested->plan, tested->device),
                  "the plan's memory was written past its size");
    const bool codes = problem->output.form != ATTN_OUTPUT_PLAIN;
    const size_t row = (size_t)tested->binding.out.strides[0] * number_bytes(problem->dtype);
    const size_t code_row = codes ? (size_t)output_row_bytes(problem) : 0;
    TRIAL_FAIL_IF(trial,
                  !other_rows_untouched(problem, problem->at.out, row, found) ||
                      !other_rows_untouched(problem, problem->at.codes, code_row, found),
                  "rows of out next to the batch's were written");
    TRIAL_TRY(verify_cache(trial, problem, expected, found));
    if (tested->binding.attend.lse == NULL) {
        return TRIAL_PASSED;
    }
    const int64_t *strides = tested->binding.lse.strides;
    const struct compared_lse lse = {tested->binding.lse.shape[0], strides[0], strides[1], 0,
                                     problem->num_actual_tokens,   rows};
    return compare_lse(trial, &lse, expected + problem->at.lse, found + problem->at.lse,
                       bound_of_lse(problem->v));
}

/* Reports `what` gave other bits, the place of the first byte that differs and its row. */
static enum trial_result say_other_bits(struct trial *trial, const char *what,
                                        const struct problem_copy *tested, const uint8_t *together,
                                        const uint8_t *alone)
{
    const struct check_problem *problem = tested->problem;
    const bool codes = problem->output.form != ATTN_OUTPUT_PLAIN;
    const struct attn_tensor *out = &tested->binding.out;
    const int32_t dtype = problem->dtype, bytes = (int32_t)number_bytes(dtype);
    const size_t first = codes ? problem->at.codes : problem->at.out;
    const int64_t row = codes ? output_row_bytes(problem) : out->strides[0] * bytes;
    size_t at = 0, used = problem->image.used, num_other = 0;
    char place[BUFFER_TEXT];
    int32_t r = 0;
    while (at + 1 < used && together[at] == alone[at]) {
        at++;
    }
    for (size_t i = at; i < used; i++) {
        num_other += together[i] != alone[i];
    }
    const int64_t token = at < first ? problem->num_actual_tokens : (int64_t)(at - first) / row;
    TRIAL_FAIL_IF(trial, token >= problem->num_actual_tokens, "%s, from %s on, %zu bytes", what,
                  buffer_at_offset(&problem->image, (int64_t)at, place), num_other);
    int64_t end = problem->first_row + problem->requests[0].query_len;
    while (r + 1 < problem->num_reqs && token >= end) {
        end += problem->requests[++r].query_len;
    }
    const int64_t within = (int64_t)(at - first) % row;
    const struct request *request = &problem->requests[r];
    TRIAL_FAIL_IF(trial, codes,
                  "%s: byte %lld of token %lld's codes is 0x%02x, not 0x%02x, of request %d "
                  "with %d queries over %d keys; %zu bytes are others",
                  what, (long long)within, (long long)token, alone[at], together[at], r,
                  request->query_len, request->seq_len, num_other);
    const int64_t element = (int64_t)(at - first) / bytes;
    return trial_say(trial, TRIAL_FAILED,
                     "%s: out[token %lld, head %lld, dim %lld] is %.9g, not %.9g, of request %d "
                     "with %d queries over %d keys; %zu bytes are others",
                     what, (long long)token, (long long)(within / bytes / out->strides[1]),
                     (long long)(within / bytes % out->strides[1]),
                     number_load(alone + first, element, dtype),
                     number_load(together + first, element, dtype), r, request->query_len,
                     request->seq_len, num_other);
}

/* Clears what the batch's rows without rows[t] hold, which a fast prefill was not asked for. */
static void forget_rows(const struct problem_copy *tested, const uint8_t *rows, uint8_t *image)
{
    const struct check_problem *problem = tested->problem;
    const struct attn_tensor *out = &tested->binding.out, *lse = &tested->binding.lse;
    const size_t bytes = number_bytes(problem->dtype);
    if (problem->output.form != ATTN_OUTPUT_PLAIN) {
        output_forget(problem, rows, image);
    }
    for (int64_t t = problem->first_row; t < problem->num_actual_tokens; t++) {
        for (int64_t h = 0; h < out->shape[1] && !rows[t]; h++) {
            int64_t at = t * out->strides[0] + h * out->strides[1];
            memset(image + problem->at.out + (size_t)at * bytes, 0, (size_t)out->shape[2] * bytes);
            if (tested->binding.attend.lse != NULL) {
                at = h * lse->strides[0] + t * lse->strides[1];
                memset(image + problem->at.lse + (size_t)at * sizeof(float), 0, sizeof(float));
            }
        }
    }
}

/* Whether the copy's image is `together` again, once read into `alone`. */
static bool same_bits(const struct problem_copy *tested, const uint8_t *rows, uint8_t *together,
                      uint8_t *alone)
{
    if (!device_read(tested->device, alone, tested->memory, tested->problem->image.size)) {
        return false;
    }
    forget_rows(tested, rows, together);
    forget_rows(tested, rows, alone);
    return memcmp(alone, together, tested->problem->image.used) == 0;
}

static attn_status run_request(struct problem_copy *tested, struct attn_batch *batch,
                               int32_t query_len, int32_t seq_len, struct attn_error *error)
{
    batch->max_query_len = query_len;
    batch->max_seq_len = seq_len;
    attn_status status = problem_copy_plan(tested, ATTN_PLAN_EAGER, error);
    return status == ATTN_OK ? problem_copy_attend(tested, error) : status;
}

/* Queries of a request's first step where it comes in two: its last query, or half of them, comes
 * later. A query that sees later keys stays with them, and so does one whose bits depend on a later
 * key that is NaN. */
static int32_t first_part(const struct problem_copy *tested, int32_t r)
{
    const struct attn_layer_desc *l = &tested->binding.layer;
    int32_t queries = tested->problem->requests[r].query_len;
    int32_t causal = tested->binding.batch.causal;
    causal = causal != ATTN_CAUSAL_DEFAULT ? causal : l->causal;
    bool later = causal != ATTN_CAUSAL_YES || l->causal_per_request || l->prefix_lm ||
                 l->tree_mask != ATTN_TREE_NONE;
    later = later || tested->problem->v[FACTOR_NAN].a != 0;
    return queries < 2 || later ? queries : r % 2 != 0 ? queries - 1 : (queries + 1) / 2;
}

/* Runs request `r`, the only one of the bound batch, in two steps. In the first step the cache
 * already holds the keys of the second, which no query sees yet. */
static attn_status run_parts(struct problem_copy *tested, int32_t r, struct attn_error *error)
{
    const struct check_problem *problem = tested->problem;
    struct attn_batch *one = &tested->binding.batch;
    const struct attn_batch whole = *one;
    const int32_t *begin =
        (const int32_t *)(problem->image.bytes + problem->at.query_start_loc) + r;
    const int32_t queries = problem->requests[r].query_len, keys = problem->requests[r].seq_len;
    const int32_t cut = first_part(tested, r);
    const int32_t starts[3] = {begin[0], begin[0] + cut, begin[1]};
    const int32_t lengths[2] = {keys - queries + cut, keys};
    attn_status status = ATTN_OK;
    for (int32_t i = 0; i < (cut < queries ? 2 : 1) && status == ATTN_OK; i++) {
        bool put = batch_put_lengths(tested->device, one, &starts[i], &lengths[i]);
        one->query_start_loc_host = &starts[i];
        one->seq_lens_host = whole.seq_lens_host != NULL ? &lengths[i] : NULL;
        one->num_actual_tokens = starts[i + 1];
        status = put ? run_request(tested, one, starts[i + 1] - starts[i], lengths[i], error)
                     : ATTN_ERROR_OUT_OF_MEMORY;
    }
    batch_put_lengths(tested->device, one, begin, &keys);
    return status;
}

/* After the whole batch: every request again as a batch of its own, over the same outputs, which
 * must not change by a bit. Views with query_start_loc[0] above 0 are what the core hands out, too.
 */
static enum trial_result run_apart(struct trial *trial, struct problem_copy *tested, bool parts,
                                   struct attn_error *error)
{
    const struct check_problem *problem = tested->problem;
    const struct attn_batch whole = tested->binding.batch;
    const size_t bytes = problem->image.size;
    OWNED(memory_end)
    uint8_t *together = trial_read(trial, tested->device, tested->memory, bytes);
    OWNED(memory_end) uint8_t *alone = command_calloc(bytes, 1), *rows = wanted_rows(problem);
    attn_status status = ATTN_OK;
    if (together == NULL) {
        return TRIAL_FAILED;
    }
    for (int32_t r = 0; r < problem->num_reqs && status == ATTN_OK; r++) {
        const struct request *request = &problem->requests[r];
        tested->binding.batch = batch_of_request(&whole, r);
        status = parts && request->query_len > 0
                     ? run_parts(tested, r, error)
                     : run_request(tested, &tested->binding.batch, request->query_len,
                                   request->seq_len, error);
    }
    tested->binding.batch = whole;
    TRIAL_CALL(trial, "attend of one request", status, error);
    if (same_bits(tested, rows, together, alone)) {
        return TRIAL_PASSED;
    }
    say_other_bits(trial, "a request apart gives other bits than in its batch", tested, together,
                   alone);
    if (problem_copy_plan(tested, ATTN_PLAN_EAGER, error) == ATTN_OK &&
        problem_copy_attend(tested, error) == ATTN_OK &&
        !same_bits(tested, rows, together, alone)) {
        say_other_bits(trial,
                       "nondeterministic: the same batch gives other bits when it runs "
                       "again, and BATCH_INVARIANT is declared",
                       tested, together, alone);
    }
    return TRIAL_FAILED;
}

/* Each request's keys written again alone: they may not change the cache by a bit. */
static enum trial_result write_alone(struct trial *trial, struct problem_copy *tested)
{
    const struct check_problem *problem = tested->problem;
    const struct attn_write_kv_args whole = tested->binding.write;
    struct attn_error error = ATTN_ERROR_INIT;
    const size_t bytes = problem->image.size;
    OWNED(memory_end)
    uint8_t *together = trial_read(trial, tested->device, tested->memory, bytes);
    int64_t first = problem->first_row;
    if (together == NULL) {
        return TRIAL_FAILED;
    }
    for (int32_t r = 0; r < problem->num_reqs; r++) {
        struct attn_tensor k = *whole.k, v = *whole.v;
        int64_t k_shape[3], v_shape[3];
        struct attn_write_kv_args *one = &tested->binding.write;
        memcpy(k_shape, k.shape, sizeof k_shape);
        memcpy(v_shape, v.shape, sizeof v_shape);
        k_shape[0] = v_shape[0] = one->num_slots = problem->requests[r].query_len;
        k.shape = k_shape;
        v.shape = v_shape;
        k.data = (uint8_t *)k.data + first * k.strides[0] * (k.dtype.bits / 8);
        v.data = (uint8_t *)v.data + first * v.strides[0] * (v.dtype.bits / 8);
        one->k = &k;
        one->v = &v;
        one->slot_mapping = whole.slot_mapping + first;
        attn_status status = problem_copy_write(tested, &error);
        tested->binding.write = whole;
        TRIAL_CALL(trial, "write_kv of one request", status, &error);
        first += problem->requests[r].query_len;
    }
    OWNED(memory_end)
    uint8_t *alone = trial_read(trial, tested->device, tested->memory, bytes);
    if (alone == NULL) {
        return TRIAL_FAILED;
    }
    TRIAL_FAIL_IF(trial, memcmp(together, alone, problem->image.used) != 0,
                  "batch_invariant: keys of a request alone are written with other bits than in "
                  "their batch");
    return TRIAL_PASSED;
}

/* The step's keys by the backend's own kernel. */
static enum trial_result write_keys(struct trial *trial, const struct problem_copy *reference,
                                    struct problem_copy *tested)
{
    const struct check_problem *problem = tested->problem;
    struct attn_error error = ATTN_ERROR_INIT;
    struct watch watch;
    watch_begin(&watch);
    attn_status status = problem_copy_write(tested, &error);
    status = trial->concurrent ? status : watch_end(&watch, tested->backend, status, &error);
    if (status != ATTN_OK) {
        return trial_call_failed(trial, "write_kv", status, &error);
    }
    const bool writes =
        problem->paged && !problem->v[FACTOR_WRITE].a && tested->backend->kernels.write_kv != NULL;
    if (writes && tested->binding.layer.batch_invariant) {
        TRIAL_TRY(write_alone(trial, tested));
    }
    if (!problem->paged || problem->v[FACTOR_WRITE].a ||
        problem->v[FACTOR_KV_DTYPE].a <= ATTN_KV_F32) {
        return TRIAL_PASSED;
    }
    return verify_written_keys(trial, reference, tested);
}

/* Another plan lives next to the tested one while that runs. */
static enum trial_result run_with_other_plan(struct trial *trial, struct problem_copy *tested,
                                             attn_status *status, struct attn_error *error)
{
    struct problem_copy other;
    const struct copy_step step = problem_copy_step(&other);
    bool ready = problem_copy_init(&other, tested->backend, tested->device, tested->problem);
    problem_copy_loosen(&other);
    ready = ready && problem_copy_prepare(&other, 1, error) == ATTN_OK &&
            copy_step_plan_shorter(&step, ATTN_PLAN_EAGER, error) == ATTN_OK;
    if (ready) {
        uint8_t drained; /* before the other's memory goes */
        *status = problem_copy_attend(tested, error);
        ready = device_read(tested->device, &drained, tested->memory, 1);
    }
    problem_copy_finish(&other);
    return ready ? TRIAL_PASSED : trial_call_failed(trial, "second plan", *status, error);
}

/* Runs a step from its plan to its outputs; fails it if it allocated memory or took a lock. */
static enum trial_result run_step(struct trial *trial, struct problem_copy *tested, int32_t way)
{
    struct attn_error error = ATTN_ERROR_INIT;
    bool graph = way == TRIAL_REPLAY || way == TRIAL_IN_GRAPH;
    bool counted = !trial->concurrent;
    const struct copy_step step = problem_copy_step(tested);
    struct watch watch;
    watch_begin(&watch);
    attn_status status = graph ? copy_step_captured(&step, way == TRIAL_IN_GRAPH, &error)
                               : plan_by_way(tested, way, &error);
    if (status == ATTN_OK && way == TRIAL_TWO_PLANS) {
        TRIAL_TRY(run_with_other_plan(trial, tested, &status, &error));
        counted = false; /* the second plan's memory is counted in */
    } else if (status == ATTN_OK && !graph) {
        status = problem_copy_attend(tested, &error);
    }
    status = counted ? watch_end(&watch, tested->backend, status, &error) : status;
    return status == ATTN_OK ? TRIAL_PASSED
                             : trial_call_failed(trial, "plan or attend", status, &error);
}

static enum trial_result run_tested(struct trial *trial, struct problem_copy *reference,
                                    struct problem_copy *tested, int32_t way)
{
    struct attn_error error = ATTN_ERROR_INIT;
    bool larger = way == TRIAL_REPLAY || way == TRIAL_IN_GRAPH;
    TRIAL_CALL(trial, "prepare or schedule_size",
               problem_copy_prepare(tested, larger ? 2 : 1, &error), &error);
    TRIAL_TRY(write_keys(trial, reference, tested));
    TRIAL_TRY(run_step(trial, tested, way));
    TRIAL_TRY(verify_step(trial, reference, tested));
    return way == TRIAL_ALONE || way == TRIAL_PARTS
               ? run_apart(trial, tested, way == TRIAL_PARTS, &error)
               : TRIAL_PASSED;
}

static attn_status attend_timed(void *user, struct attn_error *error)
{
    struct problem_copy *tested = user;
    stopwatch_begin(tested->backend, tested->stream);
    attn_status status = problem_copy_attend(tested, error);
    stopwatch_end(tested->backend, tested->stream);
    return status;
}

/* The attend alone, by an eager plan, in whichever way the case has run. */
static enum trial_result time_attend(struct trial *trial, struct problem_copy *tested)
{
    struct attn_error error = ATTN_ERROR_INIT;
    TRIAL_CALL(trial, "the plan of timed runs", problem_copy_plan(tested, ATTN_PLAN_EAGER, &error),
               &error);
    return stopwatch_trial(trial, attend_timed, tested);
}

enum trial_result trial_attend(struct trial *trial, const struct case_space *space,
                               const struct attend_case *attend_case, uint64_t seed, int32_t way)
{
    struct attn_error error = ATTN_ERROR_INIT;
    OWNED(problem_copies_finish) struct problem_copies copies;
    TRIAL_TRY(problem_copies_init(&copies, trial, space, attend_case, seed));
    struct binding *binding = &copies.tested.binding;
    binding->layer.batch_invariant = way == TRIAL_PARTS ? 2 : way == TRIAL_ALONE;
    output_bind(&copies.problem, &binding->output, &binding->layer, &binding->attend,
                copies.tested.memory, trial->device->device);
    problem_copy_loosen(&copies.tested);
    if (!trial_supports(trial, trial->tested, &binding->layer, copies.problem.phase)) {
        return TRIAL_SKIPPED;
    }
    TRIAL_CALL(trial, "reference", problem_copy_run_reference(&copies.reference, &error), &error);
    TRIAL_TRY(run_tested(trial, &copies.reference, &copies.tested, way));
    return trial->bench ? time_attend(trial, &copies.tested) : TRIAL_PASSED;
}

/* Two threads attend at once, each with its own cases. */
struct thread_share {
    struct trial trial;
    const struct attend_cases *from;
    int32_t first;
    uint64_t seed;
    enum trial_result result;
};

static void *run_share(void *argument)
{
    struct thread_share *share = argument;
    share->result = TRIAL_SKIPPED;
    for (int32_t i = share->first; i < share->from->num_cases && i < 2 * CASES_EACH; i += 2) {
        enum trial_result result =
            trial_attend(&share->trial, share->from->space, &share->from->cases[i],
                         share->seed + (uint64_t)i, TRIAL_PLAIN);
        if (result == TRIAL_FAILED) {
            share->result = result;
            break;
        }
        share->result = result == TRIAL_PASSED ? result : share->result;
    }
    return NULL;
}

enum trial_result trial_two_threads(struct trial *trial, const void *variant, uint64_t seed)
{
    struct thread_share shares[2];
    pthread_t thread;
    for (int32_t i = 0; i < 2; i++) {
        shares[i] = (struct thread_share){*trial, variant, i, seed, TRIAL_SKIPPED};
        shares[i].trial.concurrent = true;
        shares[i].trial.bench = false;
    }
    if (pthread_create(&thread, NULL, run_share, &shares[1]) != 0) {
        snprintf(trial->message, sizeof trial->message, "no thread could be started");
        return TRIAL_FAILED;
    }
    run_share(&shares[0]);
    pthread_join(thread, NULL);
    for (int32_t i = 0; i < 2; i++) {
        if (shares[i].result == TRIAL_FAILED) {
            memcpy(trial->message, shares[i].trial.message, sizeof trial->message);
            return TRIAL_FAILED;
        }
    }
    return shares[0].result == TRIAL_PASSED && shares[1].result == TRIAL_PASSED ? TRIAL_PASSED
                                                                                : TRIAL_SKIPPED;
}
