/* SPDX-License-Identifier: Apache-2.0 */
/* `merge`: a kernel that engines reach through cascades only, so it is called as the core calls it.
 */
#include "without_core.h"

#include <stdlib.h>
#include <string.h>

#include "common/command.h"
#include "common/find.h"
#include "common/names.h"
#include "support/client.h"
#include "support/number.h"
#include "support/tensor.h"
#include "common/memory.h"

enum { PREFIX_OUT, PREFIX_LSE, SUFFIX_OUT, SUFFIX_LSE, OUT, LSE, NUM_TENSORS };

struct merge {
    struct session *session;
    struct plugin_kernels plugin;
    struct memory memory;
    int64_t num_rows;
    struct shaped (*tensors)[NUM_TENSORS]; /* each copy's */
    struct work work;
};

static attn_status run(void *user, int32_t copy, struct attn_error *error)
{
    struct merge *merge = user;
    const struct shaped *t = merge->tensors[copy];
    const struct attn_merge_states_args args =
        SIZED(attn_merge_states_args, .instance = merge->plugin.instance,
              .stream = merge->session->stream, .prefix_out = &t[PREFIX_OUT].tensor,
              .prefix_lse = &t[PREFIX_LSE].tensor, .suffix_out = &t[SUFFIX_OUT].tensor,
              .suffix_lse = &t[SUFFIX_LSE].tensor, .out = &t[OUT].tensor, .lse = &t[LSE].tensor,
              .num_rows = merge->num_rows, .num_rows_with_prefix = merge->num_rows);
    return merge->plugin.kernels->merge_states(&args, error);
}

static void destroy(void *user)
{
    struct merge *merge = user;
    plugin_kernels_close(&merge->plugin);
    memory_finish(&merge->memory);
    free(merge->tensors);
    free(merge);
}

/* The variant of the named backend, or of any, that would prefill best. */
static int32_t find_backend(const struct session *session, const char *backend,
                            struct result *result, struct attn_error *error)
{
    const struct attn_api *api = session->api;
    int32_t best = -1, best_rank = INT32_MIN;
    if (backend != NULL && backend_find(api, session->runtime, backend, error) < 0) {
        return -1;
    }
    for (int32_t i = 0; i < api->backend_count(session->runtime); i++) {
        const struct attn_backend_caps *caps = backend_caps(api, session->runtime, i);
        if (memcmp(&caps->device, &session->device.device, sizeof caps->device) == 0 &&
            (backend == NULL || backend_is_named(caps, backend)) &&
            (caps->kernels & ATTN_KERNEL_MERGE_STATES) != 0 &&
            (caps->dtypes >> session->options->dtype & 1) != 0 &&
            caps->rank[ATTN_PHASE_PREFILL] > best_rank) {
            best_rank = caps->rank[ATTN_PHASE_PREFILL];
            best = i;
            backend_text(caps, result->backend, sizeof result->backend);
        }
    }
    if (best < 0) {
        command_error(error, ATTN_ERROR_NO_BACKEND, "merge_states",
                      "no backend%s%s of the device has it for %s",
                      backend != NULL ? " named " : "", backend != NULL ? backend : "",
                      dtype_name(session->options->dtype));
    }
    return best;
}

static attn_status make_tensors(struct merge *merge, const struct bench_shape *shape,
                                struct attn_error *error)
{
    const int64_t rows = merge->num_rows = shape_int(shape, PARAMETER_S);
    const int64_t heads = shape_int(shape, PARAMETER_HQ);
    int64_t dims = shape_int(shape, PARAMETER_D);
    int32_t dtype = merge->session->options->dtype;
    uint64_t random = (uint64_t)shape->value[PARAMETER_SEED];
    double elements = (double)rows * (double)heads * (double)dims;
    double out_bytes = elements * (double)number_bytes(dtype);
    double lse_bytes = (double)rows * (double)heads * sizeof(float);
    merge->work.bytes_read = 2 * (out_bytes + lse_bytes);
    merge->work.bytes_written = out_bytes + lse_bytes;
    merge->work.operations = 3 * elements;
    merge->work.arithmetic = CEILING_F32;
    merge->work.num_copies = work_copies(3 * out_bytes);
    const int64_t shapes[2][3] = {{rows, heads, dims}, {heads, rows}};
    merge->tensors = command_calloc((size_t)merge->work.num_copies, sizeof *merge->tensors);
    for (int32_t c = 0; c < merge->work.num_copies; c++) {
        for (int32_t i = 0; i < NUM_TENSORS; i++) {
            const bool lse = i == PREFIX_LSE || i == SUFFIX_LSE || i == LSE;
            const int32_t kind = lse ? ATTN_DTYPE_F32 : dtype;
            void *data =
                memory_normal(&merge->memory, kind, rows * heads * (lse ? 1 : dims), 1, &random);
            shaped_set(&merge->tensors[c][i], data, kind, lse ? 2 : 3, shapes[lse], NULL)->device =
                merge->session->device.device;
        }
    }
    return merge->memory.failed ? memory_refused(error) : ATTN_OK;
}

attn_status merge_create(const struct work **work, struct result *result, struct session *session,
                         const char *backend, struct attn_error *error)
{
    struct merge *merge = command_calloc(1, sizeof *merge);
    merge->session = session;
    merge->work = (struct work){.run = run, .destroy = destroy, .user = merge};
    memory_init(&merge->memory, &session->device);
    int32_t index = find_backend(session, backend, result, error);
    attn_status status =
        index < 0 ? error->status : plugin_kernels_open(&merge->plugin, session, index, error);
    status = status ? status : make_tensors(merge, &result->shape, error);
    return work_made(&merge->work, status, work);
}
