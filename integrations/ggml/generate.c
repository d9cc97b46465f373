/* SPDX-License-Identifier: Apache-2.0 */
/* Greedy tokens of a GGUF model through llama.cpp's own interface, with whatever backends it loads:
 * prints the tokens, and milliseconds, CPU milliseconds and switches of the prompt and of a decoded
 * token. Two runs, with and without GGML_BACKEND_PATH, are compared by tools/test_engines.sh.
 *
 *     generate MODEL.gguf K[,V] THREADS NUM_TOKENS [REPEATS-OF-THE-PROMPT [alone|slots|unified]]
 * K, V: the cache's types (f32, f16, q8_0, q4_0, ...).
 * Threads are a pool that stays, as llama-cli and llama-server make one; alone: none, and ggml
 * starts threads for each graph, of which an attention elsewhere makes many. slots, unified: more
 * requests than slots, as llama-server has them, with a cache for each slot or one for all.
 *     generate --float32 MODEL.gguf OUT.gguf      the same weights as float32 */
#include <dirent.h>
#include <llama.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>

enum { NUM_SLOTS = 3, NUM_REQUESTS = 6, MAX_BATCH = 512 };

/* Milliseconds of the clock and of all threads' CPU time, and their switches, waiting and
 * preempted.
 */
struct cost {
    double clock, cpu;
    long waits, preempted;
};

static struct cost now(void)
{
    struct timespec t;
    struct rusage usage;
    clock_gettime(CLOCK_MONOTONIC, &t);
    getrusage(RUSAGE_SELF, &usage);
    return (struct cost){1e3 * (double)t.tv_sec + 1e-6 * (double)t.tv_nsec,
                         1e3 * (double)(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) +
                             1e-3 * (double)(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec),
                         usage.ru_nvcsw, usage.ru_nivcsw};
}

static void print_cost(const char *what, struct cost from, struct cost to, int32_t times)
{
    fprintf(stderr, "%s: %.2f ms, %.2f ms of CPU, %.1f waits, %.1f preempted\n", what,
            (to.clock - from.clock) / times, (to.cpu - from.cpu) / times,
            (double)(to.waits - from.waits) / times,
            (double)(to.preempted - from.preempted) / times);
}

static int count_threads(void)
{
    DIR *tasks = opendir("/proc/self/task");
    int count = 0;
    for (struct dirent *task; tasks != NULL && (task = readdir(tasks)) != NULL;) {
        count += task->d_name[0] != '.';
    }
    if (tasks != NULL) {
        closedir(tasks);
    }
    return count;
}

static void quiet(enum ggml_log_level level, const char *text, void *user)
{
    if (level >= GGML_LOG_LEVEL_WARN) {
        fputs(text, stderr);
    }
}

/* By ggml's own name; its first type, f32, for any other word. */
static enum ggml_type type_of(const char *name)
{
    int found = GGML_TYPE_COUNT - 1;
    while (found > 0 &&
           (ggml_type_name(found) == NULL || strcmp(ggml_type_name(found), name) != 0)) {
        found--;
    }
    return (enum ggml_type)found;
}

static int to_float32(const char *in, const char *out)
{
    struct llama_model_quantize_params params = llama_model_quantize_default_params();
    params.ftype = LLAMA_FTYPE_ALL_F32;
    params.allow_requantize = true;
    return llama_model_quantize(in, out, &params) == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}

static llama_token best(struct llama_context *context, int32_t row, int32_t num_tokens)
{
    const float *logits = llama_get_logits_ith(context, row);
    llama_token token = 0;
    for (llama_token i = 1; i < num_tokens; i++) {
        token = logits[i] > logits[token] ? i : token;
    }
    return token;
}

struct slot {
    int32_t request; /* -1: free */
    int32_t position, made, row;
    llama_token token;
};

static void add_token(struct llama_batch *batch, struct slot *slot, llama_token token, int32_t seq)
{
    const int32_t i = slot->row = batch->n_tokens++;
    batch->token[i] = token;
    batch->pos[i] = slot->position++;
    batch->n_seq_id[i] = 1;
    batch->seq_id[i][0] = seq;
    batch->logits[i] = false;
}

/* Prompts of unequal lengths: one request starts a step, next to the decodes of the others, and one
 * that is done leaves its cells to the next. Prints request:token. */
static bool serve(struct llama_context *context, int32_t num_tokens, const llama_token *prompt,
                  int32_t count, int32_t wanted)
{
    struct slot slots[NUM_SLOTS];
    struct llama_batch batch = llama_batch_init(MAX_BATCH, 0, 1);
    int32_t started = 0, done = 0;
    bool ok = true;
    for (int32_t s = 0; s < NUM_SLOTS; s++) {
        slots[s].request = -1;
    }
    while (ok && done < NUM_REQUESTS) {
        bool joined = started == NUM_REQUESTS;
        batch.n_tokens = 0;
        for (int32_t s = 0; s < NUM_SLOTS; s++) {
            struct slot *slot = &slots[s];
            if (slot->request >= 0) {
                add_token(&batch, slot, slot->token, s);
            } else if (!joined) {
                joined = true;
                *slot = (struct slot){.request = started++};
                for (int32_t i = slot->request; i < count; i += slot->request + 1) {
                    add_token(&batch, slot, prompt[i], s);
                }
            } else {
                continue;
            }
            batch.logits[slot->row] = true;
        }
        ok = llama_decode(context, batch) == 0;
        for (int32_t s = 0; ok && s < NUM_SLOTS; s++) {
            if (slots[s].request >= 0) {
                slots[s].token = best(context, slots[s].row, num_tokens);
                printf("%d:%d ", slots[s].request, slots[s].token);
            }
            if (slots[s].request >= 0 && ++slots[s].made == wanted) {
                llama_memory_seq_rm(llama_get_memory(context), s, -1, -1);
                slots[s].request = -1;
                done++;
            }
        }
    }
    printf("\n");
    llama_batch_free(batch);
    return ok;
}

int main(int argc, char **argv)
{
    static const char text[] =
        "The history of the bicycle begins in the early nineteenth century, when a German "
        "baron built a machine of wood that was pushed along with the feet. ";
    static llama_token tokens[8192];
    char prompt[16 * sizeof text] = "";
    llama_log_set(quiet, NULL);
    ggml_backend_load_all();
    if (argc == 4 && strcmp(argv[1], "--float32") == 0) {
        return to_float32(argv[2], argv[3]);
    }
    if (argc < 5) {
        return 2;
    }
    for (int i = 0; i < (argc > 5 ? atoi(argv[5]) : 1) && i < 15; i++) {
        strcat(prompt, text);
    }
    struct llama_model *model = llama_model_load_from_file(argv[1], llama_model_default_params());
    struct llama_context_params params = llama_context_default_params();
    params.n_ctx = 4096;
    params.n_batch = params.n_ubatch = MAX_BATCH;
    params.n_threads = params.n_threads_batch = atoi(argv[3]);
    params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;
    char *of_v = strchr(argv[2], ',');
    if (of_v != NULL) {
        *of_v++ = '\0';
    }
    params.type_k = type_of(argv[2]);
    params.type_v = type_of(of_v != NULL ? of_v : argv[2]);
    const char *mode = argc > 6 ? argv[6] : "";
    const bool serves = strcmp(mode, "slots") == 0 || strcmp(mode, "unified") == 0;
    params.n_seq_max = serves ? NUM_SLOTS : 1;
    params.kv_unified = strcmp(mode, "unified") == 0;
    struct llama_context *context = model != NULL ? llama_init_from_model(model, params) : NULL;
    if (context == NULL) {
        return EXIT_FAILURE;
    }
    ggml_backend_reg_t cpu =
        ggml_backend_dev_backend_reg(ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU));
    ggml_threadpool_t (*new_pool)(struct ggml_threadpool_params *) = NULL;
    void (*free_pool)(ggml_threadpool_t) = NULL;
    ggml_threadpool_t pool = NULL;
    if (strcmp(mode, "alone") != 0) {
        struct ggml_threadpool_params pool_params =
            ggml_threadpool_params_default(params.n_threads);
        *(void **)&new_pool = ggml_backend_reg_get_proc_address(cpu, "ggml_threadpool_new");
        *(void **)&free_pool = ggml_backend_reg_get_proc_address(cpu, "ggml_threadpool_free");
        pool = new_pool(&pool_params);
        llama_attach_threadpool(context, pool, NULL);
    }
    const struct llama_vocab *vocab = llama_model_get_vocab(model);
    int32_t count =
        llama_tokenize(vocab, prompt, (int32_t)strlen(prompt), tokens, 8192, true, true);
    if (serves) {
        return serve(context, llama_vocab_n_tokens(vocab), tokens, count, atoi(argv[4]))
                   ? EXIT_SUCCESS
                   : EXIT_FAILURE;
    }
    struct cost begin = now();
    for (int32_t i = 0; i < count; i += MAX_BATCH) {
        if (llama_decode(context,
                         llama_batch_get_one(tokens + i,
                                             count - i < MAX_BATCH ? count - i : MAX_BATCH)) != 0) {
            return EXIT_FAILURE;
        }
    }
    struct cost prefilled = now();
    int32_t wanted = atoi(argv[4]);
    for (int32_t i = 0; i < wanted; i++) {
        llama_token token = best(context, -1, llama_vocab_n_tokens(vocab));
        printf("%d ", token);
        if (llama_decode(context, llama_batch_get_one(&token, 1)) != 0) {
            return EXIT_FAILURE;
        }
    }
    struct cost end = now();
    printf("\n");
    fprintf(stderr, "prompt of %d tokens\n", count);
    print_cost("prompt", begin, prefilled, 1);
    print_cost("a token", prefilled, end, wanted);
    fprintf(stderr, "threads at the end: %d\n", count_threads());
    llama_free(context);
    if (pool != NULL) {
        free_pool(pool);
    }
    llama_model_free(model);
    return EXIT_SUCCESS;
}
