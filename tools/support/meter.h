/* SPDX-License-Identifier: Apache-2.0 */
/* An engine's host for tests: it counts allocations, fails one of them, and keeps what is logged.
 */
#ifndef SUPPORT_METER_H
#define SUPPORT_METER_H

#include <attn/host.h>
#include <stdio.h>
#include <string.h>

#include "client.h"
#include "services.h"

struct meter {
    long calls, fail_at; /* 0: none fails */
    long alive;
    size_t bytes;
    char log[8192]; /* a level and a message a line */
};

static void meter_log(void *user, int32_t level, const char *who, const char *message)
{
    struct meter *meter = user;
    const size_t used = strlen(meter->log);
    snprintf(meter->log + used, sizeof meter->log - used, "%d %s\n", level, message);
}

static void *meter_allocate(void *user, size_t size, size_t alignment)
{
    struct meter *meter = user;
    void *memory = NULL;
    if (++meter->calls != meter->fail_at) {
        memory = services_allocate(NULL, size, alignment);
    }
    meter->alive += memory != NULL;
    meter->bytes += memory != NULL ? size : 0;
    return memory;
}

static void meter_release(void *user, void *memory, size_t size)
{
    struct meter *meter = user;
    meter->alive -= memory != NULL;
    meter->bytes -= memory != NULL ? size : 0;
    services_release(NULL, memory, size);
}

static inline struct attn_host meter_host(struct meter *meter)
{
    return SIZED(attn_host, .user = meter, .log = meter_log, .allocate = meter_allocate,
                 .release = meter_release);
}

#endif
