/* SPDX-License-Identifier: Apache-2.0 */
#include "runtime/probe.h"

#include <stdio.h>
#include <string.h>

#include "util/device.h"
#include "util/structs.h"

#define MAX_DEVICES 64
#define MAX_BACKENDS 256

/* Ends one item. Keeps the reason of the first item that is left out, and hands each reason to the
 * plugin. */
static attn_status left_out(struct found *found, attn_status status, const struct attn_error *error,
                            struct attn_error *why)
{
    if (status != ATTN_OK && found->status == ATTN_OK) {
        found->status = status;
        found->error = *error;
    }
    return status != ATTN_OK ? error_relay(why, status, error) : status;
}

static const struct attn_device_info *reported(const struct found *found, struct attn_device device)
{
    for (int32_t i = 0; i < found->num_devices; i++) {
        if (device_same(found->devices[i].device, device)) {
            return &found->devices[i];
        }
    }
    return NULL;
}

/* Replaces the texts that a struct of ours points at, missing ones by empty ones, and its arrays
 * whose elements point nowhere, by copies. False without memory. */
static bool copy_pointed(struct arena *arena, void *ours, enum abi_id id)
{
    for (const struct abi_field *f = abi_structs[id].fields; f->name != NULL; f++) {
        const void *from = field_pointer(ours, f);
        void *copy = NULL;
        if (f->kind == FIELD_TEXT) {
            copy = arena_string(arena, from != NULL ? from : "");
        } else if (f->kind == FIELD_ARRAY && abi_structs[f->max].fields->name == NULL) {
            int32_t count;
            memcpy(&count, (char *)ours + f->min, sizeof count);
            if (count == 0) {
                continue;
            }
            copy = arena_array(arena, (size_t)count, abi_structs[f->max].size);
            if (copy != NULL) {
                memcpy(copy, from, (size_t)count * abi_structs[f->max].size);
            }
        } else {
            continue;
        }
        if (copy == NULL) {
            return false;
        }
        memcpy((char *)ours + f->at, &copy, sizeof copy);
    }
    return true;
}

static attn_status read_device(struct found *found, const struct attn_device_info *info,
                               struct attn_error *error)
{
    struct attn_device_info device;
    TRY(struct_read(&device, ABI_DEVICE_INFO, info, error));
    TRY(device_check(&device, error));
    device.next = NULL;
    device.device_namespace = device.device_namespace != NULL ? device.device_namespace : "";
    const struct attn_device_info *other = reported(found, device.device);
    REFUSE_IF(other != NULL && strcmp(other->device_namespace, device.device_namespace) != 0,
              "device_namespace", "device type %d, id %d is reported in two namespaces",
              device.device.type, device.device.id);
    REFUSE_IF(found->num_devices == MAX_DEVICES, "device", "more than %d devices", MAX_DEVICES);
    NO_MEMORY_IF(!copy_pointed(found->arena, &device, ABI_DEVICE_INFO), "probe", "what it reports");
    found->devices[found->num_devices++] = device;
    return ATTN_OK;
}

static attn_status take_device(void *user, const struct attn_device_info *info,
                               struct attn_error *why)
{
    struct attn_error error = ATTN_ERROR_INIT;
    return left_out(user, read_device(user, info, &error), &error, why);
}

/* *dropped: the first row of `refused` that the core does not take; -1: it takes all. */
static attn_status copy_caps(struct found *found, const struct attn_backend_caps *source,
                             struct backend *backend, int32_t *dropped, struct attn_error *error)
{
    struct attn_backend_caps *caps = &backend->caps;
    char full_name[400];
    *caps = *source;
    snprintf(full_name, sizeof full_name, "%s%s%s", caps->name, caps->variant[0] != '\0' ? "@" : "",
             caps->variant);
    backend->full_name = arena_string(found->arena, full_name);
    struct attn_refused_combination *refused =
        arena_array(found->arena, (size_t)source->num_refused, sizeof *refused);
    struct attn_vendor_code *codes =
        arena_array(found->arena, (size_t)source->num_vendor_codes, sizeof *codes);
    bool failed = !copy_pointed(found->arena, caps, ABI_BACKEND_CAPS) || found->arena->failed;
    caps->num_refused = 0;
    for (int32_t i = 0; i < source->num_refused && !failed; i++) {
        struct attn_refused_combination *row = &refused[caps->num_refused];
        if (refused_read(source, i, row)) {
            failed = !copy_pointed(found->arena, row, ABI_REFUSED_COMBINATION);
            caps->num_refused++;
        } else if (*dropped < 0) {
            *dropped = i;
        }
    }
    for (int32_t i = 0; i < source->num_vendor_codes && !failed; i++) {
        codes[i] = *vendor_code_at(source, i); /* no more than is known of it */
        failed = !copy_pointed(found->arena, &codes[i], ABI_VENDOR_CODE);
    }
    caps->refused = refused;
    caps->refused_stride = (int32_t)sizeof *refused;
    caps->vendor_codes = codes;
    caps->vendor_code_stride = (int32_t)sizeof *codes;
    /* plain data that the core knows; an optional extension of others may point into the plugin */
    caps->next = ext_copy_chain(found->arena, source->next, ABI_BACKEND_CAPS, false);
    NO_MEMORY_IF(failed || found->arena->failed, "probe", "what it reports");
    return ATTN_OK;
}

static attn_status read_backend(struct found *found, const struct attn_backend_caps *given,
                                struct attn_backend_caps *caps, int32_t *dropped,
                                struct attn_error *error)
{
    TRY(struct_read(caps, ABI_BACKEND_CAPS, given, error));
    caps->variant = caps->variant != NULL ? caps->variant : "";
    caps_trim(caps);
    TRY(caps_check(caps, error));
    REFUSE_IF(found->num_backends == MAX_BACKENDS, "backend", "more than %d backends",
              MAX_BACKENDS);
    for (int32_t i = 0; i < found->num_backends; i++) {
        const struct attn_backend_caps *other = &found->backends[i].caps;
        REFUSE_IF(strcmp(other->name, caps->name) == 0 &&
                      strcmp(other->variant, caps->variant) == 0 &&
                      device_same(other->device, caps->device),
                  "name", "%s is reported twice for one device", found->backends[i].full_name);
    }
    TRY(copy_caps(found, caps, &found->backends[found->num_backends], dropped, error));
    found->num_backends++;
    return ATTN_OK;
}

static attn_status take_backend(void *user, const struct attn_backend_caps *given,
                                struct attn_error *why)
{
    struct attn_backend_caps caps;
    struct attn_error error = ATTN_ERROR_INIT;
    int32_t row = -1;
    const attn_status status = read_backend(user, given, &caps, &row, &error);
    if (row >= 0) { /* the backend stays, without this row; only the plugin learns of it */
        (void)error_set(
            why, ATTN_ERROR_PLUGIN, "refused",
            "%s: refused[%d] is left out: it has bits or a tail that are not known here", caps.name,
            row);
    }
    return left_out(user, status, &error, why);
}

attn_status found_init(struct found *found, struct arena *arena, struct attn_error *error)
{
    *found = (struct found){.arena = arena, .error = ATTN_ERROR_INIT};
    found->devices = arena_array(arena, MAX_DEVICES, sizeof *found->devices);
    found->backends = arena_array(arena, MAX_BACKENDS, sizeof *found->backends);
    NO_MEMORY_IF(found->devices == NULL || found->backends == NULL, "probe", "what it reports");
    return ATTN_OK;
}

void found_reset(struct found *found)
{
    found->num_devices = found->num_backends = 0;
    found->status = ATTN_OK;
}

struct attn_probe_sink found_sink(struct found *found)
{
    return (struct attn_probe_sink){sizeof(struct attn_probe_sink), NULL, found, take_device,
                                    take_backend};
}

/* Backends on devices that were not reported are left out. */
static void drop_homeless(struct found *found)
{
    int32_t kept = 0;
    for (int32_t i = 0; i < found->num_backends; i++) {
        const struct attn_backend_caps *caps = &found->backends[i].caps;
        struct attn_error error = ATTN_ERROR_INIT;
        const struct attn_device_info *info = reported(found, caps->device);
        if (info != NULL) {
            found->backends[kept] = found->backends[i];
            found->backends[kept++].device_namespace = info->device_namespace;
            continue;
        }
        attn_status status =
            error_set(&error, ATTN_ERROR_PLUGIN, "device",
                      "%s is on device type %d, id %d, which its probe did not report", caps->name,
                      caps->device.type, caps->device.id);
        (void)left_out(found, status, &error, NULL);
    }
    found->num_backends = kept;
}

attn_status found_status(struct found *found, struct attn_error *error)
{
    drop_homeless(found);
    if (found->num_backends > 0 && found->status != ATTN_ERROR_OUT_OF_MEMORY) {
        return ATTN_OK;
    }
    ERROR_IF(found->status != ATTN_OK, found->status, found->error.field, "%s",
             found->error.message);
    return error_set(error, ATTN_ERROR_PLUGIN, "probe",
                     "answered ok and reported no backend; hardware that is not there is status %d",
                     ATTN_ERROR_ABSENT);
}

void found_note(struct found *found, const char *field, const char *message)
{
    found->status = error_set(&found->error, ATTN_ERROR_PLUGIN, field, "%s", message);
}

attn_status plugin_probe(const struct attn_host *host, const struct attn_plugin *table,
                         struct found *found, struct attn_error *error)
{
    const struct attn_probe_sink sink = found_sink(found);
    struct attn_error why = ATTN_ERROR_INIT;
    attn_status status = table->probe(host, &sink, &why);
    /* An item's error tells more than the probe's status, which may repeat it. */
    return status == ATTN_OK || found->status != ATTN_OK ? found_status(found, error)
                                                         : error_relay(error, status, &why);
}
