/* SPDX-License-Identifier: Apache-2.0 */
#include "harness/trial.h"
#include "support/client.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum trial_result trial_say(struct trial *trial, enum trial_result result, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(trial->message, sizeof trial->message, format, arguments);
    va_end(arguments);
    return result;
}

static const char *text_of(attn_status status)
{
    switch (status) {
#define TEXT_CASE(name, value, text)                                                               \
    case value:                                                                                    \
        return text;
        ATTN_STATUS_LIST(TEXT_CASE)
#undef TEXT_CASE
    default:
        return "unknown status";
    }
}

enum trial_result trial_call_failed(struct trial *trial, const char *what, attn_status status,
                                    const struct attn_error *error)
{
    return error->message[0] == '\0'
               ? trial_say(trial, TRIAL_FAILED, "%s: status %d (%s), without a text", what, status,
                           text_of(status))
               : trial_say(trial, TRIAL_FAILED, "%s: status %d (%s): %s: %s", what, status,
                           text_of(status), error->field, error->message);
}

enum trial_result trial_call_refused(struct trial *trial, const struct attn_error *error)
{
    return error->message[0] == '\0'
               ? trial_say(trial, TRIAL_SKIPPED,
                           "the kernel refused it as unsupported, without a text")
               : trial_say(trial, TRIAL_SKIPPED, "the kernel refused it: %s: %s", error->field,
                           error->message);
}

uint8_t *trial_read(struct trial *trial, const struct device *device, const void *memory,
                    size_t bytes)
{
    uint8_t *read = malloc(bytes + 1);
    if (read == NULL || !device_read(device, read, memory, bytes)) {
        free(read);
        trial_say(trial, TRIAL_FAILED, "%zu bytes of the outputs cannot be read back", bytes);
        return NULL;
    }
    return read;
}

static void refuse(void *user, const char *field, const char *asked, const char *supported)
{
    struct trial *trial = user;
    snprintf(trial->message, sizeof trial->message, "refused: %s %s, supported: %s", field, asked,
             supported);
}

bool trial_supports(struct trial *trial, const struct backend *backend,
                    const struct attn_layer_desc *layer, int32_t phase)
{
    struct attn_reason_sink sink = {sizeof sink, NULL, trial, refuse};
    const struct attn_supports_args args =
        SIZED(attn_supports_args, .caps = &backend->caps, .layer = layer, .phase = phase);
    trial->message[0] = '\0';
    return backend->plugin->supports == NULL ||
           (backend->plugin->supports(&args, &sink, NULL) == ATTN_OK && trial->message[0] == '\0');
}

enum trial_result trial_of_layer(struct trial *trial, const struct attn_layer_desc *layer,
                                 enum trial_result result)
{
    const uint64_t features = trial->tested->caps.features;
    if (result != TRIAL_SKIPPED || layer->batch_invariant < 2 ||
        !(features & ATTN_FEATURE_BATCH_INVARIANT_PREFIX) ||
        strstr(trial->message, "batch_invariant") == NULL) {
        return result;
    }
    char why[sizeof trial->message];
    memcpy(why, trial->message, sizeof why);
    return trial_say(trial, TRIAL_FAILED, "BATCH_INVARIANT_PREFIX is declared; %.*s",
                     (int)sizeof why - 50, why);
}
