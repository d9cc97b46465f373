/* SPDX-License-Identifier: Apache-2.0 */
/* examples/plugin.c with an attend and a write_kv that return at once. */
#include <attn/plugin.h>

static attn_status example_entry(uint32_t min, uint32_t max, const struct attn_plugin **out,
                                 struct attn_error *error);
#define attn_plugin_entry example_entry
#include "../../examples/plugin.c" /* NOLINT(bugprone-suspicious-include): it is changed below */
#undef attn_plugin_entry

static attn_status idle_attend(const struct attn_attend_args *args, struct attn_error *error)
{
    return ATTN_OK;
}

static attn_status idle_write(const struct attn_write_kv_args *args, struct attn_error *error)
{
    return ATTN_OK;
}

static attn_status create_idle(const struct attn_create_args *args, attn_instance **instance,
                               const struct attn_kernels **table, struct attn_error *error)
{
    static struct attn_kernels idle;
    idle = kernels;
    idle.attend = idle_attend;
    idle.write_kv = idle_write;
    const attn_status status = create(args, instance, table, error);
    *table = &idle;
    return status;
}

attn_status attn_plugin_entry(uint32_t min, uint32_t max, const struct attn_plugin **out,
                              struct attn_error *error)
{
    static struct attn_plugin idle;
    const attn_status status = example_entry(min, max, out, error);
    idle = plugin;
    idle.create = create_idle;
    *out = &idle;
    return status;
}
