/* SPDX-License-Identifier: Apache-2.0 */
/* The one exported symbol and the one table. */
#include "util/error.h"
#include "util/slots.h"

#if !defined(ATTN_LIBRARY_VERSION)
#error "the build has to define ATTN_LIBRARY_VERSION"
#endif

#define FILL(slot, function) .slot = function,
#define FILL_OBSERVED(slot, function) .slot = observed_##slot,

static const struct attn_device_services device_services = {
    .struct_size = sizeof(struct attn_device_services), DEVICE_SLOTS(FILL, FILL_OBSERVED)};

static const struct attn_api api_table = {.struct_size = sizeof(struct attn_api),
                                          .abi_version = ATTN_ABI_VERSION,
                                          .version = ATTN_LIBRARY_VERSION,
                                          .device = &device_services,
                                          API_SLOTS(FILL, FILL_OBSERVED)};

attn_status attn_get_api(uint32_t abi_version_min, uint32_t abi_version_max,
                         const struct attn_api **api, struct attn_error *error)
{
    BAD_IF(api == NULL, "api", "api is NULL");
    *api = NULL;
    ERROR_IF(!ATTN_VERSION_SERVES(abi_version_min, abi_version_max), ATTN_ERROR_ABI_VERSION,
             "abi_version_min", "asked for ABI %u.%u to %u.%u; libattn %s speaks %u.%u to %u.%u",
             ATTN_VERSION_MAJOR(abi_version_min), ATTN_VERSION_MINOR(abi_version_min),
             ATTN_VERSION_MAJOR(abi_version_max), ATTN_VERSION_MINOR(abi_version_max),
             ATTN_LIBRARY_VERSION, ATTN_VERSION_MAJOR(ATTN_ABI_VERSION_MIN),
             ATTN_VERSION_MINOR(ATTN_ABI_VERSION_MIN), ATTN_VERSION_MAJOR(ATTN_ABI_VERSION),
             ATTN_VERSION_MINOR(ATTN_ABI_VERSION));
    *api = &api_table;
    return ATTN_OK;
}
