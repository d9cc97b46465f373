/* SPDX-License-Identifier: Apache-2.0 */
/* Queries of a request that ranks split, as slices of their own. */
#include "ranks.h"

enum { SENT, GATHERED, ORDERED, SLICED };

struct slice {
    int32_t first, end; /* among the request's queries */
};

int32_t queries_slices(const attn_layer *layer)
{
    return layer_splits_queries(layer) && layer->selected->cp->order == ATTN_CP_ZIGZAG ? 2 : 1;
}

static struct slice slice_of(const attn_layer *layer, int32_t queries, int32_t rank, int32_t i)
{
    int32_t parts = layer_query_ranks(layer) * queries_slices(layer);
    int32_t size = (int32_t)(((int64_t)queries + parts - 1) / parts);
    int64_t place = i == 0 ? rank : parts - 1 - rank;
    int64_t first = place * size, end = first + size;
    return (struct slice){(int32_t)(first < queries ? first : queries),
                          (int32_t)(end < queries ? end : queries)};
}

int32_t queries_of(const attn_layer *layer, int32_t queries, int32_t rank)
{
    int32_t count = 0;
    for (int32_t i = 0; i < queries_slices(layer); i++) {
        struct slice s = slice_of(layer, queries, rank, i);
        count += s.end - s.first;
    }
    return count;
}

attn_status queries_init(attn_plan *plan, struct attn_error *error)
{
    struct parallel_plan *p = parallel_plan(plan);
    const attn_layer *layer = plan->steps[0].layer;
    const int64_t reqs = plan->limits.max_num_reqs, ranks = layer_query_ranks(layer);
    const int64_t slices = queries_slices(layer) * reqs, runs = slices * (ranks + 1);
    plan->max_reqs *= queries_slices(layer);
    /* starts, lengths, rows and key starts of the slices; and, for the context that is attended for
     * all ranks, starts, lengths and rows of every request and of the padding after each rank's */
    plan->num_host_ints += 4 * (slices + 1) + 3 * (ranks * (reqs + 1) + 1);
    ERROR_IF(runs > INT32_MAX, ATTN_ERROR_LIMIT, "max_num_reqs",
             "%d requests over %d ranks are %lld runs of keys; at most %d",
             plan->limits.max_num_reqs, layer_query_ranks(layer), (long long)runs, INT32_MAX);
    p->runs = arena_array(&plan->arena, (size_t)runs, sizeof *p->runs);
    return p->runs != NULL ? ATTN_OK : NO_MEMORY("plan", "%lld runs", (long long)runs);
}

static int64_t row_bytes(const struct tensor_form *rows)
{
    return rows->heads * rows->head_size * tensor_of_kind(rows->kind).dtype.bits / 8;
}

void queries_add_areas(attn_plan *plan, const struct step *step)
{
    struct parallel_plan *p = parallel_plan(plan);
    const attn_layer *layer = step->layer;
    int64_t ranks = layer_query_ranks(layer), tokens = plan->limits.max_num_tokens;
    int64_t rows[] = {tokens, ranks * tokens, ranks * tokens,
                      layer_is_spread(layer) ? queries_slices(layer) * ranks * tokens : 0};
    static const uint32_t uses[] = {KEYS, KEYS, ALWAYS, MERGE};
    for (int32_t part = 0; part < 2; part++) {
        for (int32_t area = SENT; area <= SLICED; area++) {
            plan_area(plan, &p->at.keys[part][area],
                      rows[area] * row_bytes(part == 0 ? &step->k : &step->v), uses[area]);
        }
    }
}

static attn_status check_batch(const attn_plan *plan, const int32_t *lens, struct attn_error *error)
{
    const struct attn_batch *b = &plan->given;
    const attn_layer *layer = plan->steps[0].layer;
    const struct attn_collectives *ranks = layer->selected->cp->prefill;
    BAD_IF(b->seq_lens_host == NULL, "seq_lens_host",
           "is NULL; queries that are split over ranks need it");
    ERROR_IF(b->flags & ATTN_BATCH_IN_CAPTURE, ATTN_ERROR_UNSUPPORTED, "query_lens_host",
             "queries split over %d ranks in a capture; captures take batches whose queries every "
             "rank has",
             ranks->world_size);
    BAD_IF(b->causal == ATTN_CAUSAL_NO, "causal",
           "causal is no (2); queries that are split over ranks are causal");
    BAD_IF(b->block_table_row != NULL && (queries_slices(layer) > 1 || layer_is_spread(layer)),
           "block_table_row", "must be NULL where slices of the queries share its rows");
    for (int32_t r = 0; r < b->num_reqs; r++) {
        int32_t own = num_queries(b, r);
        BAD_IF(lens[r] < 0 || lens[r] > b->seq_lens_host[r], "query_lens_host",
               "query_lens_host[%d] is %d; 0 to the request's %d keys", r, lens[r],
               b->seq_lens_host[r]);
        int32_t expected = queries_of(layer, lens[r], ranks->rank);
        BAD_IF(own != expected, "query_start_loc",
               "request %d has %d queries here; of its %d, rank %d of %d has %d", r, own, lens[r],
               ranks->rank, ranks->world_size, expected);
    }
    BAD_IF(b->num_reqs != 0 && b->query_start_loc_host[0] != 0, "query_start_loc",
           "query_start_loc[0] is %d; 0 where queries are split over ranks",
           b->query_start_loc_host[0]);
    return ATTN_OK;
}

/* How many rows each rank has, and where its keys belong among all of them. */
static attn_status find_runs(attn_plan *plan, const int32_t *lens, struct attn_error *error)
{
    struct parallel_plan *p = parallel_plan(plan);
    const attn_layer *layer = plan->steps[0].layer;
    int32_t ranks = layer_query_ranks(layer), num_reqs = plan->given.num_reqs;
    int64_t keys = 0, widest = 0, most = plan->limits.max_num_tokens;
    for (int32_t rank = 0; rank < ranks; rank++) {
        int64_t rows = 0;
        for (int32_t r = 0; r < num_reqs; r++) {
            rows += queries_of(layer, lens[r], rank);
        }
        widest = rows > widest ? rows : widest;
        keys += rows;
    }
    ERROR_IF(widest > most, ATTN_ERROR_LIMIT, "query_lens_host",
             "a rank has %lld queries; 0 to %lld, the plan's max_num_tokens", (long long)widest,
             (long long)most);
    BAD_IF(plan->given.num_slots > keys, "num_slots",
           "%lld slots; the requests have %lld new keys over all ranks",
           (long long)plan->given.num_slots, (long long)keys);
    p->widest = (int32_t)widest;
    p->num_keys = (int32_t)keys;
    p->num_runs = 0;
    for (int32_t rank = 0; rank < ranks; rank++) {
        int64_t from = rank * widest, base = 0;
        for (int32_t r = 0; r < num_reqs; r++) {
            for (int32_t i = 0; i < queries_slices(layer); i++) {
                struct slice s = slice_of(layer, lens[r], rank, i);
                int64_t rows = s.end - s.first;
                if (rows > 0) {
                    p->runs[p->num_runs++] = (struct row_run){from, base + s.first, rows};
                }
                from += rows;
            }
            base += lens[r];
        }
    }
    return ATTN_OK;
}

attn_status queries_split(attn_plan *plan, struct attn_error *error)
{
    struct parallel_plan *p = parallel_plan(plan);
    const attn_layer *layer = plan->steps[0].layer;
    const int32_t *lens = plan->all_query_lens;
    struct attn_batch *b = &plan->given;
    p->split = lens != NULL;
    if (lens == NULL) {
        return ATTN_OK;
    }
    TRY(check_batch(plan, lens, error));
    TRY(find_runs(plan, lens, error));
    int32_t each = queries_slices(layer), slices = each * b->num_reqs, at = 0;
    struct view_requests own = view_begin(plan, slices, 0);
    int32_t *key_start = plan_take(plan, slices + 1);
    struct row_run *runs = p->runs + p->num_runs;
    int64_t base = 0;
    key_start[0] = 0;
    for (int32_t r = 0; r < b->num_reqs; r++) {
        for (int32_t i = 0; i < each; i++, at++) {
            struct slice s = slice_of(layer, lens[r], layer->selected->cp->prefill->rank, i);
            bool any = s.end > s.first;
            view_add(&own, own.start[at] + s.end - s.first,
                     any ? b->seq_lens_host[r] - lens[r] + s.end : 0, r);
            key_start[at + 1] = key_start[at] + (any ? s.end : 0);
            runs[at] = (struct row_run){base, key_start[at], any ? s.end : 0};
        }
        base += lens[r];
    }
    p->num_slice_runs = slices;
    p->key_start = key_start;
    b->block_table_rows = b->block_table_rows > 0 ? b->block_table_rows : b->num_reqs;
    view_end(plan, &own, each > 1, b);
    plan->whole = *b;
    return ATTN_OK;
}

/* The two areas of k and v as tensors of an io. */
static void keys_over(const attn_plan *plan, const struct step *step, int32_t area, int64_t rows,
                      const struct attn_step_io *io, struct all_keys *keys)
{
    const struct parallel_plan *p = parallel_plan(plan);
    const struct tensor_form *kinds[] = {&step->k, &step->v};
    struct own_tensor *tensors[] = {&keys->k, &keys->v};
    for (int32_t i = 0; i < 2; i++) {
        const struct attn_tensor like = tensor_like(plan, kinds[i]);
        tensor_set_rows(tensors[i], &like, plan->scratch + p->at.keys[i][area], rows,
                        kinds[i]->heads, kinds[i]->head_size);
    }
    keys->io = *io;
    keys->io.k = &keys->k.tensor;
    keys->io.v = &keys->v.tensor;
}

static attn_status copy_runs(const struct exchange_run *run, const struct row_run *runs,
                             int32_t count, int32_t from, int32_t to)
{
    const struct parallel_plan *p = run->p;
    const attn_plan *plan = run->plan;
    for (int32_t part = 0; part < 2; part++) {
        int64_t row = row_bytes(part == 0 ? &run->step->k : &run->step->v);
        uint8_t *source = plan->scratch + p->at.keys[part][from];
        uint8_t *target = plan->scratch + p->at.keys[part][to];
        for (int32_t i = 0; i < count; i++) {
            TRY(copy_bytes(run, target + runs[i].to * row, source + runs[i].from * row,
                           runs[i].rows * row));
        }
    }
    return ATTN_OK;
}

attn_status queries_gather_keys(attn_plan *plan, struct step *step,
                                const struct attn_step_io **given, struct attn_error *error)
{
    struct parallel_plan *p = parallel_plan(plan);
    const struct attn_step_io *io = *given;
    const struct attn_collectives *ranks = step->layer->selected->cp->prefill;
    const struct exchange_run run = exchange_begin(plan, step, io, 0, error);
    const struct attn_tensor *inputs[] = {io->k, io->v};
    for (int32_t part = 0; part < 2; part++) {
        const struct tensor_form *kind = part == 0 ? &step->k : &step->v;
        const size_t *areas = p->at.keys[part];
        int64_t row = row_bytes(kind);
        TRY(pack_rows(&run, plan->scratch + areas[SENT], inputs[part], kind->heads,
                      row / kind->heads, plan->given.num_actual_tokens));
        TRY(collective_run(&run, ranks, ranks->all_gather, plan->scratch + areas[SENT],
                           plan->scratch + areas[GATHERED], p->widest * row));
    }
    TRY(copy_runs(&run, p->runs, p->num_runs, GATHERED, ORDERED));
    keys_over(plan, step, ORDERED, p->num_keys, io, &p->ordered);
    *given = &p->ordered.io;
    return ATTN_OK;
}

attn_status queries_slice_keys(attn_plan *plan, struct step *step, const struct attn_step_io *io,
                               struct all_keys *slices, struct attn_error *error)
{
    struct parallel_plan *p = parallel_plan(plan);
    const struct exchange_run run = exchange_begin(plan, step, io, 0, error);
    int32_t count = p->num_slice_runs;
    keys_over(plan, step, SLICED, p->key_start[count], io, slices);
    return copy_runs(&run, p->runs + p->num_runs, count, ORDERED, SLICED);
}
