/* SPDX-License-Identifier: Apache-2.0 */
/* What the rooms above ask a runtime for. */
#include "runtime/runtime.h"

#include <stdarg.h>
#include <stdio.h>

#include "util/device.h"
#include "util/structs.h"
#include "util/text.h"

void *runtime_alloc(const attn_runtime *runtime, size_t size)
{
    return host_alloc(&runtime->host, size);
}

void runtime_free(const attn_runtime *runtime, void *memory, size_t size)
{
    host_free(&runtime->host, memory, size);
}

void runtime_log(const attn_runtime *runtime, int32_t level, const char *format, ...)
{
    char line[1200];
    va_list arguments;
    if (level > runtime->settings.log_level) {
        return;
    }
    va_start(arguments, format);
    vsnprintf(line, sizeof line, format, arguments);
    va_end(arguments);
    runtime->host.log(runtime->host.user, level, "core", line);
}

void runtime_stage(const attn_runtime *runtime, const char *file, const char *stage)
{
    if (runtime->on_stage != NULL) {
        runtime->on_stage(stage);
    }
    runtime_log(runtime, ATTN_LOG_DEBUG, "%s: enters its %s", file, stage);
}

int32_t plugin_count(const attn_runtime *runtime)
{
    return runtime != NULL ? runtime->num_plugins : 0;
}

attn_status plugin_info(const attn_runtime *runtime, int32_t index, struct attn_plugin_info *info)
{
    if (index < 0 || index >= plugin_count(runtime)) {
        return ATTN_ERROR_NOT_FOUND;
    }
    const struct plugin *plugin = &runtime->plugins[index];
    const struct attn_plugin_info found = {.struct_size = sizeof found,
                                           .file = plugin->file,
                                           .name = plugin->name,
                                           .version = plugin->version,
                                           .vendor = plugin->vendor,
                                           .status = plugin->status,
                                           .num_backends = plugin->num_backends,
                                           .reason = plugin->reason};
    return struct_write(info, &found, ABI_PLUGIN_INFO);
}

int32_t device_count(const attn_runtime *runtime)
{
    return runtime != NULL ? runtime->num_devices : 0;
}

attn_status runtime_find_device(const attn_runtime *runtime, struct attn_device device,
                                const char *device_namespace, const struct attn_device_info **info,
                                struct attn_error *error)
{
    char name[DEVICE_TEXT_SIZE];
    struct text there;
    int32_t fitting = 0;
    for (int32_t i = 0; i < runtime->num_devices; i++) {
        const struct attn_device_info *one = &runtime->devices[i];
        if (device_same(one->device, device) &&
            (device_namespace == NULL || strcmp(one->device_namespace, device_namespace) == 0)) {
            *info = one;
            fitting++;
        }
    }
    if (fitting == 1) {
        return ATTN_OK;
    }
    *info = NULL;
    text_init(&there, &runtime->host);
    for (int32_t i = 0; i < runtime->num_devices; i++) {
        const struct attn_device_info *one = &runtime->devices[i];
        text_add(&there, "%s%s%s%s", i > 0 ? ", " : "", device_text(one->device, name),
                 one->device_namespace[0] != '\0' ? " of " : "", one->device_namespace);
    }
    const char *list = there.length > 0 ? text_get(&there) : "no device";
    attn_status status =
        fitting > 1 ? BAD("device_namespace",
                          "%s is in several namespaces, one of which has to be named; there is %s",
                          device_text(device, name), list)
                    : error_set(error, ATTN_ERROR_NOT_FOUND, "device",
                                "there is no %s%s%s here; there is %s", device_text(device, name),
                                device_namespace != NULL ? " of " : "",
                                device_namespace != NULL ? device_namespace : "", list);
    text_finish(&there);
    return status;
}

bool backend_is_on(const struct backend *backend, const struct attn_device_info *device)
{
    return device != NULL && device_same(backend->caps.device, device->device) &&
           strcmp(backend->device_namespace, device->device_namespace) == 0;
}

attn_status device_info(const attn_runtime *runtime, int32_t index, struct attn_device_info *info)
{
    return index < 0 || index >= device_count(runtime)
               ? ATTN_ERROR_NOT_FOUND
               : struct_write(info, &runtime->devices[index], ABI_DEVICE_INFO);
}

int32_t backend_count(const attn_runtime *runtime)
{
    return runtime != NULL ? runtime->num_backends : 0;
}

attn_status backend_info(const attn_runtime *runtime, int32_t index, struct attn_backend_info *info)
{
    if (index < 0 || index >= backend_count(runtime)) {
        return ATTN_ERROR_NOT_FOUND;
    }
    const struct attn_backend_info found = {sizeof found, NULL, &runtime->backends[index].caps,
                                            runtime->backends[index].plugin, 0};
    return struct_write(info, &found, ABI_BACKEND_INFO);
}
