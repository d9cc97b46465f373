/* SPDX-License-Identifier: Apache-2.0 */
/* The plugin's own functions: versions that it does not speak, hosts of other sizes, hosts without
 * memory, and what accepts NULL. */

#include "kernels/kernels.h"
#include "cases/problem_copy.h"
#include "support/client.h"
#include "support/services.h"

#define MOST_ALLOCATIONS 64

/* A host whose memory runs out. */
struct limited_host {
    struct attn_host host;
    int32_t left; /* allocations that succeed */
};

static void *limited_allocate(void *user, size_t size, size_t alignment)
{
    struct limited_host *limited = user;
    return limited->left-- > 0 ? services_allocate(user, size, alignment) : NULL;
}

static void limited_init(struct limited_host *limited, const struct backend *tested, int32_t left)
{
    limited->host = tested->services.host;
    limited->host.user = limited;
    limited->host.allocate = limited_allocate;
    limited->host.release = services_release;
    limited->left = left;
}

static attn_status create(const struct backend *tested, const struct attn_host *host,
                          attn_instance **instance, const struct attn_kernels **kernels)
{
    struct attn_error error = ATTN_ERROR_INIT;
    const struct attn_backend_caps *caps = &tested->caps;
    /* on failure both become NULL, whatever they were */
    *instance = tested->instance;
    *kernels = &tested->kernels;
    return tested->plugin->create(&SIZED(attn_create_args, .host = host, .backend = caps->name,
                                         .variant = caps->variant, .device = caps->device),
                                  instance, kernels, &error);
}

static enum trial_result run_entry(struct trial *trial, const void *variant, uint64_t seed)
{
    static const struct {
        const char *name;
        uint32_t least, most;
    } ranges[] = {{"only newer", ATTN_MAKE_VERSION(0xfffe, 0), ATTN_MAKE_VERSION(0xffff, 0)},
                  {"only older", ATTN_MAKE_VERSION(0, 0), ATTN_MAKE_VERSION(0, 0)},
                  {"no", ATTN_ABI_VERSION + 1, ATTN_ABI_VERSION - 1}};
    for (size_t i = 0; i < sizeof ranges / sizeof *ranges; i++) {
        struct attn_error error = ATTN_ERROR_INIT;
        const struct attn_plugin *plugin = NULL;
        attn_status status =
            trial->tested->entry(ranges[i].least, ranges[i].most, &plugin, i == 0 ? NULL : &error);
        TRIAL_FAIL_IF(trial, status != ATTN_ERROR_ABI_VERSION,
                      "a caller of %s versions: status %d, not %d", ranges[i].name, status,
                      ATTN_ERROR_ABI_VERSION);
    }
    /* A newer core that still works with this version. */
    const struct attn_plugin *plugin = NULL;
    attn_status status =
        trial->tested->entry(ATTN_ABI_VERSION_MIN, ATTN_ABI_VERSION + 1, &plugin, NULL);
    TRIAL_FAIL_IF(trial,
                  status != ATTN_OK || plugin == NULL || !ATTN_VERSION_ACCEPTS(plugin->abi_version),
                  "a caller of the next minor version: status %d", status);
    return TRIAL_PASSED;
}

static enum trial_result run_create_host(struct trial *trial, const void *variant, uint64_t seed)
{
    const struct attn_host *host = &trial->tested->services.host;
    _Alignas(16) uint8_t memory[sizeof *host + CALL_TAIL];
    for (int32_t change = 0; change < CALL_CHANGE_COUNT; change++) {
        struct attn_ext ext;
        attn_instance *instance;
        const struct attn_kernels *kernels;
        call_change_struct(change, host, sizeof *host, memory, &ext);
        attn_status status = create(trial->tested, (const struct attn_host *)(const void *)memory,
                                    &instance, &kernels);
        TRIAL_FAIL_IF(trial, status != ATTN_OK, "a host %s: status %d, not %d",
                      call_change_names[change], status, ATTN_OK);
        trial->tested->plugin->destroy(instance);
    }
    return TRIAL_PASSED;
}

/* With one allocation more each time, until it succeeds. */
static enum trial_result run_create_no_memory(struct trial *trial, const void *variant,
                                              uint64_t seed)
{
    for (int32_t left = 0; left < MOST_ALLOCATIONS; left++) {
        struct limited_host limited;
        attn_instance *instance;
        const struct attn_kernels *kernels;
        limited_init(&limited, trial->tested, left);
        if (create(trial->tested, &limited.host, &instance, &kernels) == ATTN_OK) {
            bool whole = kernels != NULL;
            trial->tested->plugin->destroy(instance);
            return whole ? TRIAL_PASSED
                         : trial_say(trial, TRIAL_FAILED, "create succeeded without kernels");
        }
        TRIAL_FAIL_IF(trial, instance != NULL || kernels != NULL,
                      "create failed after %d allocations and an output is not NULL", left);
    }
    return trial_say(trial, TRIAL_FAILED, "create failed %d times", MOST_ALLOCATIONS);
}

/* A prepare that fails for lack of memory sets its result to NULL. */
static enum trial_result prepare_no_memory(struct trial *trial, const struct binding *binding)
{
    const struct attn_kernels *kernels;
    attn_instance *instance;
    struct limited_host limited;
    limited_init(&limited, trial->tested, MOST_ALLOCATIONS);
    attn_status status = create(trial->tested, &limited.host, &instance, &kernels);
    enum trial_result result = TRIAL_FAILED;
    if (status != ATTN_OK) {
        return trial_say(trial, result, "create: status %d", status);
    }
    const struct attn_prepare_args args =
        SIZED(attn_prepare_args, .instance = instance, .layer = &binding->layer,
              .params = &binding->params, .k_cache = binding->attend.k_cache,
              .v_cache = binding->attend.v_cache, .phase = binding->attend.phase);
    trial_say(trial, result, "prepare failed %d times", MOST_ALLOCATIONS);
    result = kernels->prepare == NULL ? TRIAL_PASSED : result;
    for (int32_t left = 0; left < MOST_ALLOCATIONS && result != TRIAL_PASSED; left++) {
        struct attn_error error = ATTN_ERROR_INIT;
        attn_prepared *prepared = (attn_prepared *)(void *)&limited; /* anything but NULL */
        limited.left = left;
        status = kernels->prepare(&args, &prepared, &error);
        if (status == ATTN_OK) {
            result = TRIAL_PASSED;
            if (kernels->release != NULL) {
                kernels->release(instance, prepared);
            }
        } else if (prepared != NULL) {
            trial_say(trial, result,
                      "prepare failed after %d allocations and what it gave is not NULL", left);
            break;
        }
    }
    trial->tested->plugin->destroy(instance);
    return result;
}

static enum trial_result run_prepare_no_memory(struct trial *trial, const void *variant,
                                               uint64_t seed)
{
    const struct attend_variant *v = variant;
    struct check_problem problem;
    struct problem_copy tested = {.device = trial->device};
    problem_init(&problem, v->space, &v->attend_case, seed);
    enum trial_result result = problem_copy_init(&tested, trial->tested, trial->device, &problem)
                                   ? prepare_no_memory(trial, &tested.binding)
                                   : trial_say(trial, TRIAL_FAILED, "no memory for the case");
    problem_copy_finish(&tested);
    image_finish(&problem.image);
    return result;
}

/* Calls what accepts NULL; a crash fails the case. */
static enum trial_result run_nothing(struct trial *trial, const void *variant, uint64_t seed)
{
    trial->tested->plugin->destroy(NULL);
    if (trial->tested->kernels.release != NULL) {
        trial->tested->kernels.release(trial->tested->instance, NULL);
    }
    return TRIAL_PASSED;
}

void call_plugin_cases(const struct kernel_sink *sink)
{
    struct attend_variant v = {.space = sink->space};
    kernel_try(sink, run_entry, NULL, "calls.entry");
    kernel_try(sink, run_create_host, NULL, "calls.create.host");
    kernel_try(sink, run_create_no_memory, NULL, "calls.create.no_memory");
    if (case_of_any_cache(
            sink->space,
            &v.attend_case)) { /* a backend without it passes: there is nothing to fail */
        kernel_try(sink, run_prepare_no_memory, &v, "calls.prepare.no_memory");
    }
    kernel_try(sink, run_nothing, NULL, "calls.null");
}
