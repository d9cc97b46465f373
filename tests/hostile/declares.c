/* SPDX-License-Identifier: Apache-2.0 */
/* Declares one thing that is unknown, impossible or contradicts another: which one, HOSTILE_CASE
 * says. */
#include "common.h"

#include <attn/draft/index_write.h>
#include <attn/mla.h>
#include <stdlib.h>
#include <string.h>

#define BIT(code) (UINT64_C(1) << (code))

static char long_name[4096];
static struct attn_range ranges[2] = {{16, 256, 16}, {16, 256, 16}};
static struct attn_head_size_range heads[1] = {{{64, 256, 64}, {64, 256, 64}, 1}};
static struct attn_refused_combination rows[1] = {{ATTN_TERM_ALIBI, 0, 0, "no"}};
static struct attn_mla_caps mla[2] = {
    {{ATTN_EXT_CAPS_MLA, 0, sizeof *mla, NULL}, 512, 64, 1, 0, 0, 0},
    {{ATTN_EXT_CAPS_MLA, 0, sizeof *mla, NULL}, 512, 64, 1, 0, 0, 0}};
static struct attn_vendor_code codes[2] = {{ATTN_NAMES_KV_DTYPE, 0x10001, "acme_q6"},
                                           {ATTN_NAMES_KV_LAYOUT, 0x10002, "acme_pages"}};
static const uint32_t low_ids[2] = {0x10000, 7};
static struct attn_ext stranger = {0x123456, 0, sizeof stranger, NULL};

/* Changes the sound device and caps before they are reported. */
static void make_wrong(const char *wanted, struct attn_device_info *d, struct attn_backend_caps *c)
{
    if (strncmp(wanted, "vendor_code", 11) == 0) {
        codes[0].name = "acme_q6"; /* as no other case has left them */
        codes[1].code = 0x10002;
        c->vendor_codes = codes;
        c->num_vendor_codes = 2;
        c->vendor_code_stride = sizeof *codes;
    }
#define DECLARES(name, status, reason, ...)                                                        \
    if (strcmp(wanted, #name) == 0) {                                                              \
        __VA_ARGS__;                                                                               \
    }
#include "declarations.h"
}

static attn_status probe(const struct attn_host *host, const struct attn_probe_sink *sink,
                         struct attn_error *error)
{
    const char *wanted = getenv("HOSTILE_CASE");
    struct attn_device_info device = sound_device();
    struct attn_backend_caps caps = sound_caps("declares");
    wanted = wanted != NULL ? wanted : "";
    if (strcmp(wanted, "nothing") == 0) {
        return ATTN_OK;
    }
    ranges[0] = ranges[1] = (struct attn_range){16, 256, 16};
    heads[0] = sound_heads[0];
    rows[0] = (struct attn_refused_combination){ATTN_TERM_ALIBI, 0, 0, "no"};
    for (int i = 0; i < 2; i++) {
        mla[i] =
            (struct attn_mla_caps){{ATTN_EXT_CAPS_MLA, 0, sizeof *mla, NULL}, 512, 64, 1, 0, 0, 0};
    }
    make_wrong(wanted, &device, &caps);
    sink->device(sink->user, &device, NULL);
    sink->backend(sink->user, &caps, NULL);
    if (getenv("HOSTILE_SECOND") != NULL && getenv("HOSTILE_SECOND")[0] != '\0') {
        const struct attn_backend_caps second = sound_caps("next");
        sink->backend(sink->user, &second, NULL);
    }
    if (strcmp(wanted, "backend_comes_twice") == 0) {
        sink->backend(sink->user, &caps, NULL);
    }
    return ATTN_OK; /* and does not look at what the sink says */
}

static const struct attn_plugin table = SOUND_TABLE("declares", probe);
SOUND_ENTRY(table)
