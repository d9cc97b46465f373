/* SPDX-License-Identifier: Apache-2.0 */
/* Sound in its probe; afterwards it answers one call wrongly: which, HOSTILE_CASE says. */
#include "common.h"

#include <stdlib.h>
#include <string.h>

static int32_t one;

static int is(const char *name)
{
    const char *wanted = getenv("HOSTILE_CASE");
    return wanted != NULL && strcmp(wanted, name) == 0;
}

static attn_status foul(struct attn_error *error)
{
    if (error != NULL) {
        memset(error->field, '\xff', sizeof error->field);
        memset(error->message, '\xfe', sizeof error->message);
    }
    return ATTN_ERROR_DEVICE;
}

static attn_status probe(const struct attn_host *host, const struct attn_probe_sink *sink,
                         struct attn_error *error)
{
    struct attn_backend_caps caps = sound_caps("answers");
    return sound_report(sink, &caps);
}

static attn_status supports(const struct attn_supports_args *args,
                            const struct attn_reason_sink *reasons, struct attn_error *error)
{
    if (is("supports_reasons_are_foul")) {
        reasons->refuse(reasons->user, "\xff", "two\nlines", NULL);
    }
    if (is("supports_reasons_are_null")) {
        reasons->refuse(reasons->user, NULL, NULL, NULL);
    }
    for (int i = 0; is("supports_never_ends_its_reasons") && i < 100000; i++) {
        reasons->refuse(reasons->user, "head_size", "64", "none, none and again none");
    }
    if (is("supports_error_is_foul")) {
        return foul(error);
    }
    return is("supports_fails_silently") ? 12345 : ATTN_OK;
}

static attn_status attend(const struct attn_attend_args *args, struct attn_error *error)
{
    if (is("attend_error_is_foul")) {
        return foul(error);
    }
    if (is("attend_error_is_endless") && error != NULL) { /* no byte of them ends a text */
        memset(error->field, 'f', sizeof error->field);
        memset(error->message, 'm', sizeof error->message);
        return ATTN_ERROR_DEVICE;
    }
    if (is("attend_error_is_told") && error != NULL) {
        strcpy(error->field, "workspace");
        strcpy(error->message, "launch failed: \xc3\xbc of 7");
        return ATTN_ERROR_DEVICE;
    }
    return is("attend_fails_silently") ? 12345 : ATTN_OK;
}

static attn_status write_kv(const struct attn_write_kv_args *args, struct attn_error *error)
{
    if (is("write_error_is_foul")) {
        return foul(error);
    }
    return is("write_fails_silently") ? -1 : ATTN_OK;
}

static attn_status prepare(const struct attn_prepare_args *args, attn_prepared **prepared,
                           struct attn_error *error)
{
    *prepared = NULL;
    return is("prepare_error_is_foul") ? foul(error) : ATTN_OK;
}

static void release(attn_instance *instance, attn_prepared *prepared)
{
}

static attn_status schedule_size(const struct attn_schedule_size_args *args,
                                 struct attn_schedule_size *size, struct attn_error *error)
{
    if (is("schedule_size_is_endless")) {
        memset((char *)size + sizeof(size_t) + sizeof(void *), 0x7f,
               size->struct_size - sizeof(size_t) - sizeof(void *));
    }
    if (is("schedule_size_is_endless_on_the_device")) {
        size->device_bytes = SIZE_MAX - 8;
    }
    if (is("schedule_size_is_negative")) {
        memset((char *)size + sizeof(size_t) + sizeof(void *), 0xff,
               size->struct_size - sizeof(size_t) - sizeof(void *));
    }
    return is("schedule_size_fails_silently") ? ATTN_ERROR_INTERNAL : ATTN_OK;
}

static attn_status plan(const struct attn_attend_args *args, int32_t mode, struct attn_error *error)
{
    return is("plan_error_is_foul") ? foul(error) : ATTN_OK;
}

static attn_status create(const struct attn_create_args *args, attn_instance **instance,
                          const struct attn_kernels **kernels, struct attn_error *error)
{
    static struct attn_kernels table;
    table = (struct attn_kernels){.struct_size = sizeof table,
                                  .attend = attend,
                                  .write_kv = is("slot_is_missing") ? NULL : write_kv,
                                  .prepare = prepare,
                                  .release = is("release_is_missing") ? NULL : release,
                                  .schedule_size = schedule_size,
                                  .schedule = plan};
    if (is("kernels_size_is_8")) {
        table.struct_size = 8;
    }
    if (is("kernels_size_is_endless")) {
        table.struct_size = SIZE_MAX;
    }
    *instance = is("create_gives_no_instance") ? NULL : (attn_instance *)(void *)&one;
    *kernels = is("create_gives_no_kernels") ? NULL : &table;
    if (is("create_fails_silently")) {
        return 777;
    }
    return is("create_error_is_foul") ? foul(error) : ATTN_OK;
}

static const struct attn_plugin table = {.struct_size = sizeof table,
                                         .abi_version = ATTN_ABI_VERSION,
                                         .name = "answers",
                                         .version = "1.0",
                                         .vendor = "tests",
                                         .probe = probe,
                                         .supports = supports,
                                         .create = create,
                                         .destroy = sound_destroy};
SOUND_ENTRY(table)
