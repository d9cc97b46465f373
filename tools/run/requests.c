/* SPDX-License-Identifier: Apache-2.0 */
/* What is asked of the engine: generated from the seed, or read from a file. */
#include <cjson/cJSON.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "common/command.h"
#include "common/model_reading.h"
#include "engine.h"

#define ATTENDED_MARGIN 24 /* tokens that a long request goes past its window or chunk */
#define MAX_LENGTH (1 << 20)
#define MAX_FILE (1 << 20)

/* The longest window or chunk of the model: one request has to go past it. */
static int32_t longest_window(const struct run_engine *engine)
{
    int32_t longest = 0;
    for (int32_t i = 0; i < engine->num_layers; i++) {
        const struct attn_layer_desc *d = &engine->config.layers[i].desc;
        int32_t size = d->chunk_size > 0 ? d->chunk_size : d->has_window ? d->window_left + 1 : 0;
        longest = size > longest ? size : longest;
    }
    return longest;
}

/* A short, a middle and a long request, one that comes late and one that is preempted. */
static void generate(struct run_engine *engine)
{
    double scale = engine->settings->scale;
    int32_t window = (int32_t)ceil(longest_window(engine) * scale), steps = engine->settings->steps;
    const struct request made[] = {
        {.prompt = 33, .output = steps, .preempt_at = -1, .encoder = 100},
        {.prompt = 1, .output = 2, .preempt_at = -1, .encoder = 17},
        {.arrival = 1, .prompt = 48, .output = steps, .preempt_at = -1, .encoder = 64},
        {.prompt = 70, .output = steps + 1, .preempt_at = 1, .encoder = 33},
        {.prompt = window + ATTENDED_MARGIN, .output = steps, .preempt_at = -1, .encoder = 300},
    };
    engine->num_requests = sizeof made / sizeof *made;
    for (int32_t r = 0; r < engine->num_requests; r++) {
        engine->requests[r] = made[r];
        engine->requests[r].prompt += random_below(&engine->random, 7);
        engine->requests[r].shares = -1;
    }
}

static attn_status check_sharing(struct run_engine *engine, int32_t index)
{
    const struct request *request = &engine->requests[index];
    const bool alone = request->shares < 0;
    return alone || (request->shares < index && request->shared < request->prompt &&
                     request->shared <= engine->requests[request->shares].prompt)
               ? ATTN_OK
               : command_error(&engine->error, ATTN_ERROR_INVALID_ARGUMENT, "shares",
                               "request %d shares %d tokens with request %d; an earlier one, fewer "
                               "tokens than its own prompt and not more than the other's",
                               index, request->shared, request->shares);
}

static attn_status read_request(struct run_engine *engine, const cJSON *item)
{
    struct request *request = &engine->requests[engine->num_requests];
    const struct {
        const char *name;
        int32_t *value, otherwise, least;
    } fields[] = {{"arrival", &request->arrival, 0, 0},
                  {"prompt", &request->prompt, 1, 1},
                  {"output", &request->output, engine->settings->steps, 1},
                  {"preempt_at", &request->preempt_at, -1, -1},
                  {"encoder", &request->encoder, 64, 1},
                  {"shares", &request->shares, -1, -1},
                  {"shared", &request->shared, 0, 0}};
    const size_t count = sizeof fields / sizeof *fields;
    struct reading reading = {.error = &engine->error};
    const cJSON *member;
    if (!cJSON_IsObject(item)) {
        reading_fail(&reading, engine->settings->requests, "has an element that is no JSON object");
    }
    for (size_t i = 0; i < count; i++) {
        *fields[i].value = fields[i].otherwise;
    }
    cJSON_ArrayForEach(member, item)
    {
        size_t i = 0;
        while (i < count && strcmp(fields[i].name, member->string) != 0) {
            i++;
        }
        if (i == count) { /* else a misspelt field would silently keep its default */
            reading_fail(&reading, member->string, "is no field of a request; --help lists them");
            break;
        }
        *fields[i].value = read_int(&reading, item, fields[i].name, fields[i].otherwise,
                                    fields[i].least, MAX_LENGTH);
    }
    TRY(reading.status);
    return check_sharing(engine, engine->num_requests++);
}

static attn_status read_list(struct run_engine *engine, const cJSON *root)
{
    const cJSON *item;
    if (!cJSON_IsArray(root) || cJSON_GetArraySize(root) == 0) {
        return command_error(&engine->error, ATTN_ERROR_INVALID_ARGUMENT,
                             engine->settings->requests,
                             "is not a JSON list of one or more requests");
    }
    cJSON_ArrayForEach(item, root)
    {
        TRY(engine->num_requests < MAX_REQUESTS
                ? read_request(engine, item)
                : command_error(&engine->error, ATTN_ERROR_LIMIT, "requests",
                                "more than 64 requests"));
    }
    return ATTN_OK;
}

static attn_status read_file(struct run_engine *engine)
{
    const char *why;
    size_t size;
    char *text = read_whole_file(engine->settings->requests, MAX_FILE, &size, &why);
    if (text == NULL) {
        return command_error(&engine->error, ATTN_ERROR_IO, engine->settings->requests, "%s", why);
    }
    cJSON *root = cJSON_Parse(text);
    free(text);
    const attn_status status = read_list(engine, root);
    cJSON_Delete(root);
    return status;
}

attn_status requests_read(struct run_engine *engine)
{
    engine->random = engine->settings->seed;
    if (engine->settings->requests == NULL) {
        generate(engine);
    } else {
        TRY(read_file(engine));
    }
    for (int32_t r = 0; r < engine->num_requests; r++) {
        int32_t end = engine->requests[r].prompt + engine->requests[r].output;
        int32_t keys = engine->requests[r].encoder > end ? engine->requests[r].encoder : end;
        engine->longest = keys > engine->longest ? keys : engine->longest;
    }
    return ATTN_OK;
}
