/* SPDX-License-Identifier: Apache-2.0 */
/* examples/plugin.c but for misdeed(), which happens at one STAGE: what a plugin whose results are
 * right may do wrong besides. stages.h takes it where AROUND is defined. */
#include <attn/plugin.h>

static attn_status example_entry(uint32_t min, uint32_t max, const struct attn_plugin **out,
                                 struct attn_error *error);
#define attn_plugin_entry example_entry
#include "../../examples/plugin.c"
#undef attn_plugin_entry

#if STAGE == ATTEND
static attn_status attend_around(const struct attn_attend_args *args, struct attn_error *error)
{
    misdeed();
    return attend(args, error);
}
#endif

static attn_status create_around(const struct attn_create_args *args, attn_instance **instance,
                                 const struct attn_kernels **table, struct attn_error *error)
{
    static struct attn_kernels changed;
    const attn_status status = create(args, instance, table, error);
#if STAGE == CREATE
    misdeed();
#endif
    changed = kernels;
#if STAGE == ATTEND
    changed.attend = attend_around;
#endif
    *table = status == ATTN_OK ? &changed : NULL;
    return status;
}

attn_status attn_plugin_entry(uint32_t min, uint32_t max, const struct attn_plugin **out,
                              struct attn_error *error)
{
    static struct attn_plugin changed;
    const attn_status status = example_entry(min, max, out, error);
    changed = plugin;
    changed.create = create_around;
    *out = status == ATTN_OK ? &changed : NULL;
    return status;
}
