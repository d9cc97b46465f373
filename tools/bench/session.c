/* SPDX-License-Identifier: Apache-2.0 */
#include "session.h"

#include <errno.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common/command.h"
#include "common/device.h"
#include "common/find.h"
#include "support/client.h"

/* As the core counts them: --threads, else ATTN_NUM_THREADS (which the core checks), else the CPUs.
 */
static int32_t count_threads(const struct options *options)
{
    const char *text = getenv("ATTN_NUM_THREADS");
    long threads = options->threads;
    if (threads == 0 && text != NULL) {
        threads = strtol(text, NULL, 10);
    }
    threads = threads > 0 ? threads : sysconf(_SC_NPROCESSORS_ONLN);
    return threads > 0 ? (int32_t)threads : 1;
}

/* The named backend's, else the one that a selection would best be made for. */
static attn_status choose_device(const struct session *session, struct attn_device *device,
                                 struct attn_error *error)
{
    const char *name = session->options->backends[0];
    if (name == NULL) {
        return session->api->best_device(session->runtime, NULL, device, error);
    }
    int32_t index = backend_find(session->api, session->runtime, name, error);
    if (index < 0) {
        return error->status;
    }
    *device = backend_caps(session->api, session->runtime, index)->device;
    return ATTN_OK;
}

static void name_device(struct session *session)
{
    struct attn_device_info info;
    session->device_name = "";
    if (device_describe(session->api, session->runtime, session->device.device, &info)) {
        session->device_name = info.name;
        session->num_units = info.num_multiprocessors;
    }
}

attn_status session_init(struct session *session, const struct options *options, bool cached,
                         struct attn_error *error)
{
    struct attn_device device;
    *session = (struct session){.options = options, .num_threads = count_threads(options)};
    const struct attn_runtime_options settings =
        SIZED(attn_runtime_options, .cache_dir = cached ? NULL : "", .isolation = cached ? 0 : -1,
              .num_threads = options->threads);
    TRY(library_open(&session->api, error));
    TRY(session->api->runtime_create(&settings, &session->runtime, error));
    TRY(choose_device(session, &device, error));
    TRY(device_init(&session->device, session->api, session->runtime, device, error));
    if (options->cpu_time && device.type != ATTN_DEVICE_CPU) {
        return command_error(error, ATTN_ERROR_UNSUPPORTED, "--cpu-time", "is of CPU backends");
    }
    session->num_threads = device.type == ATTN_DEVICE_CPU ? session->num_threads : 0;
    session->stream = device_stream_create(&session->device);
    name_device(session);
    return ATTN_OK;
}

attn_status session_init_against(struct session *session, const struct session *first,
                                 struct attn_error *error)
{
    char path[PATH_MAX], core[PATH_MAX + 32];
    struct stat found;
    struct attn_runtime_options settings =
        SIZED(attn_runtime_options, .num_threads = first->options->threads);
    *session = *first;
    session->against = true;
    session->runtime = NULL;
    session->ceilings = NULL;
    if (realpath(first->options->against, path) == NULL || stat(path, &found) != 0) {
        return command_error(error, ATTN_ERROR_NOT_FOUND, "", "%s", strerror(errno));
    }
    if (S_ISDIR(found.st_mode)) {
        snprintf(core, sizeof core, "%s/core/libattn.so.1", path);
        TRY(client_load(core, &session->api, error));
    } else {
        settings.plugin_path = path;
        settings.no_default_plugins = 1;
    }
    return session->api->runtime_create(&settings, &session->runtime, error);
}

void session_finish(struct session *session)
{
    if (session->api == NULL) {
        return;
    }
    if (!session->against) {
        ceilings_destroy(session->ceilings);
        device_stream_destroy(&session->device, session->stream);
        device_finish(&session->device);
    }
    session->api->runtime_destroy(session->runtime);
    *session = (struct session){.options = session->options};
}

attn_status session_ceilings(struct session *session, struct attn_error *error)
{
    if (session->ceilings != NULL) {
        return ATTN_OK;
    }
    int32_t units = session->num_threads > 0 ? session->num_threads : session->num_units;
    double budget = session->options->budget;
    int32_t passes = budget < 1 ? 1 : budget < 3 ? (int32_t)budget : 3;
    return ceilings_create(&session->ceilings, &session->device, units, passes,
                           session->options->cpu_time, error);
}
