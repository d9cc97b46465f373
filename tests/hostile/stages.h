/* SPDX-License-Identifier: Apache-2.0 */
/* A sound plugin but for misdeed(), which the including file defines and which happens at one STAGE
 * of a plugin's life: the build makes one plugin a misdeed and stage. With AROUND its results are
 * right, too. */
#define CONSTRUCTOR 1
#define ENTRY 2
#define PROBE 3
#define SUPPORTS 4
#define CREATE 5
#define WRITE 6
#define ATTEND 7
#if !defined(STAGE)
#error "the build has to define STAGE"
#endif

__attribute__((unused)) static void misdeed(void);

#if STAGE == CONSTRUCTOR
__attribute__((constructor)) static void constructor(void)
{
    misdeed();
}
#endif

#if defined(AROUND)
#include "around.h"
#else
#include "common.h"

static attn_status probe(const struct attn_host *host, const struct attn_probe_sink *sink,
                         struct attn_error *error)
{
    struct attn_backend_caps caps = sound_caps("staged");
#if STAGE == PROBE
    misdeed();
#endif
    return sound_report(sink, &caps);
}

static attn_status supports(const struct attn_supports_args *args,
                            const struct attn_reason_sink *reasons, struct attn_error *error)
{
#if STAGE == SUPPORTS
    misdeed();
#endif
    return ATTN_OK;
}

static attn_status attend(const struct attn_attend_args *args, struct attn_error *error)
{
#if STAGE == ATTEND
    misdeed();
#endif
    return ATTN_OK;
}

static attn_status write_kv(const struct attn_write_kv_args *args, struct attn_error *error)
{
#if STAGE == WRITE
    misdeed();
#endif
    return ATTN_OK;
}

static attn_status create(const struct attn_create_args *args, attn_instance **instance,
                          const struct attn_kernels **kernels, struct attn_error *error)
{
    static struct attn_kernels table;
    static int32_t one;
#if STAGE == CREATE
    misdeed();
#endif
    table.struct_size = sizeof table;
    table.attend = attend;
    table.write_kv = write_kv;
    *instance = (attn_instance *)(void *)&one;
    *kernels = &table;
    return ATTN_OK;
}

static struct attn_plugin table;

attn_status attn_plugin_entry(uint32_t abi_version_min, uint32_t abi_version_max,
                              const struct attn_plugin **plugin, struct attn_error *error)
{
#if STAGE == ENTRY
    misdeed();
#endif
    table.struct_size = sizeof table;
    table.abi_version = ATTN_ABI_VERSION;
    table.name = "staged";
    table.version = "1.0";
    table.vendor = "tests";
    table.probe = probe;
    table.supports = supports;
    table.create = create;
    table.destroy = sound_destroy;
    *plugin = &table;
    return ATTN_OK;
}

#endif
