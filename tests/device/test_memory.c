/* SPDX-License-Identifier: Apache-2.0 */
/* A device's memory through the core's table: the fake device's, which the host cannot touch, and
 * the host's own. */
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "support/client.h"
#include "support/test.h"

#define BYTES 10000
#define CAPACITY (1 << 20)

static const struct attn_api *api;
static attn_runtime *runtime;
static const struct attn_device fake = {ATTN_DEVICE_EXTENSION, 0}, cpu = {ATTN_DEVICE_CPU, 0};

static int open_runtime(void **state)
{
    struct attn_runtime_options options = client_options(PLUGINS);
    struct attn_error error = ATTN_ERROR_INIT;
    setenv("FAKE_DEVICE_BYTES", "1048576", 1); /* CAPACITY */
    options.isolation = -1;
    return client_open(CORE_FILE, &options, &api, &runtime, &error) == ATTN_OK ? 0 : -1;
}

static int close_runtime(void **state)
{
    api->runtime_destroy(runtime);
    return 0;
}

static void copies_and_fills(struct attn_device device)
{
    static uint8_t in[BYTES], out[BYTES];
    attn_open_device *opened;
    void *memory, *other, *locked, *stream;
    assert_ok(api->device->open(runtime, device, &opened, NULL));
    assert_int_equal(api->device->allocate(opened, ATTN_MEMORY_DEVICE, BYTES, &memory, NULL), 0);
    assert_int_equal(api->device->allocate(opened, ATTN_MEMORY_DEVICE, 0, &other, NULL), 0);
    api->device->free(opened, ATTN_MEMORY_DEVICE, other);
    assert_int_equal(api->device->allocate(opened, ATTN_MEMORY_DEVICE, BYTES, &other, NULL), 0);
    assert_int_equal(api->device->allocate(opened, ATTN_MEMORY_HOST, BYTES, &locked, NULL), 0);
    assert_int_equal((uintptr_t)memory % 256, 0);
    assert_int_equal((uintptr_t)locked % 256, 0);
    assert_ok(api->device->create_stream(opened, &stream, NULL));
    for (int32_t i = 0; i < BYTES; i++) {
        in[i] = (uint8_t)(7 * i + i / 251);
    }
    memcpy(locked, in, BYTES);
    assert_ok(
        client_copy(api, opened, memory, locked, BYTES, ATTN_COPY_HOST_TO_DEVICE, stream, NULL));
    assert_ok(
        client_copy(api, opened, other, memory, BYTES, ATTN_COPY_DEVICE_TO_DEVICE, stream, NULL));
    assert_ok(client_fill(api, opened, memory, 0x5a, 99, stream, NULL));
    assert_ok(client_copy(api, opened, out, other, BYTES, ATTN_COPY_DEVICE_TO_HOST, stream, NULL));
    assert_ok(api->device->synchronize(opened, stream, NULL));
    assert_memory_equal(in, out, BYTES);
    assert_ok(client_copy(api, opened, out, memory, BYTES, ATTN_COPY_DEVICE_TO_HOST, NULL, NULL));
    assert_ok(api->device->synchronize(opened, NULL, NULL));
    memset(in, 0x5a, 99);
    assert_memory_equal(in, out, BYTES);
    api->device->destroy_stream(opened, stream);
    api->device->free(opened, ATTN_MEMORY_HOST, locked);
    api->device->free(opened, ATTN_MEMORY_DEVICE, other);
    api->device->free(opened, ATTN_MEMORY_DEVICE, memory);
    api->device->free(opened, ATTN_MEMORY_DEVICE, NULL);
    api->device->close(opened);
    api->device->close(NULL);
}

TEST(test_fake)
{
    copies_and_fills(fake);
}

TEST(test_host)
{
    copies_and_fills(cpu);
    copies_and_fills((struct attn_device){0, 0}); /* not stated: the CPU */
}

/* What CI relies on: a touch by the host ends the process that does it. */
TEST(test_host_cannot_touch)
{
    attn_open_device *opened;
    void *memory;
    int status = 0;
    assert_ok(api->device->open(runtime, fake, &opened, NULL));
    assert_int_equal(api->device->allocate(opened, ATTN_MEMORY_DEVICE, BYTES, &memory, NULL), 0);
    for (int32_t write = 0; write < 2; write++) {
        pid_t child = fork();
        if (child == 0) {
            signal(SIGSEGV, SIG_DFL);
            volatile uint8_t *byte = memory;
            if (write) {
                *byte = 1;
            }
            _exit(*byte == 77 ? 2 : 1);
        }
        assert_int_equal(waitpid(child, &status, 0), child);
        assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGSEGV);
    }
    api->device->free(opened, ATTN_MEMORY_DEVICE, memory);
    api->device->close(opened);
}

TEST(test_out_of_memory)
{
    struct attn_error error = ATTN_ERROR_INIT;
    attn_open_device *opened;
    void *memory, *rest = NULL;
    assert_ok(api->device->open(runtime, fake, &opened, NULL));
    assert_ok(api->device->allocate(opened, ATTN_MEMORY_DEVICE, CAPACITY - 8192, &memory, 0));
    assert_int_equal(api->device->allocate(opened, ATTN_MEMORY_DEVICE, 8193, &rest, &error),
                     ATTN_ERROR_OUT_OF_MEMORY);
    assert_null(rest);
    assert_string_equal(error.message, "fake_device: 8193 bytes; 8192 of its 1048576 are free");
    assert_ok(api->device->allocate(opened, ATTN_MEMORY_DEVICE, 8192, &rest, NULL));
    api->device->free(opened, ATTN_MEMORY_DEVICE, memory);
    api->device->free(opened, ATTN_MEMORY_DEVICE, rest);
    assert_ok(api->device->allocate(opened, ATTN_MEMORY_DEVICE, CAPACITY - 8192, &memory, NULL));
    api->device->free(opened, ATTN_MEMORY_DEVICE, memory);
    api->device->close(opened);
    /* the host's own */
    assert_ok(api->device->open(runtime, cpu, &opened, NULL));
    assert_int_equal(api->device->allocate(opened, ATTN_MEMORY_DEVICE, SIZE_MAX - 3, &rest, &error),
                     ATTN_ERROR_OUT_OF_MEMORY);
    assert_null(rest);
    api->device->close(opened);
}

TEST(test_addresses)
{
    attn_open_device *opened;
    struct attn_device owner;
    void *memory;
    assert_ok(api->device->open(runtime, fake, &opened, NULL));
    assert_int_equal(api->device->allocate(opened, ATTN_MEMORY_DEVICE, BYTES, &memory, NULL), 0);
    assert_ok(api->device->of_address(opened, (uint8_t *)memory + 9, &owner, NULL));
    assert_memory_equal(&owner, &fake, sizeof owner);
    assert_ok(api->device->of_address(opened, &owner, &owner, NULL));
    assert_memory_equal(&owner, &cpu, sizeof owner);
    api->device->free(opened, ATTN_MEMORY_DEVICE, memory);
    api->device->close(opened);
}

TEST(test_refusals)
{
    struct attn_error error = ATTN_ERROR_INIT;
    attn_open_device *opened = (attn_open_device *)(void *)&error;
    struct attn_device best;
    void *handle = NULL;
    assert_int_equal(
        api->device->open(runtime, (struct attn_device){ATTN_DEVICE_EXTENSION, 3}, &opened, &error),
        ATTN_ERROR_NOT_FOUND);
    assert_null(opened);
    assert_string_equal(error.field, "device");
    assert_string_equal(error.message,
                        "there is no extension:3 here; there is cpu:0, extension:0 of fake_device");
    assert_int_equal(api->device->open(NULL, fake, &opened, &error), ATTN_ERROR_INVALID_ARGUMENT);
    assert_int_equal(api->device->open(runtime, fake, NULL, &error), ATTN_ERROR_INVALID_ARGUMENT);
    assert_ok(api->device->open(runtime, fake, &opened, &error));
    assert_int_equal(api->device->allocate(opened, 3, 8, &handle, &error),
                     ATTN_ERROR_INVALID_ARGUMENT);
    assert_int_equal(client_copy(api, opened, &error, &best, 8, 0, NULL, &error),
                     ATTN_ERROR_INVALID_ARGUMENT);
    assert_int_equal(client_copy(api, opened, NULL, &best, 8, 1, NULL, &error),
                     ATTN_ERROR_INVALID_ARGUMENT);
    assert_int_equal(client_fill(api, opened, NULL, 0, 8, NULL, &error),
                     ATTN_ERROR_INVALID_ARGUMENT);
    /* a kernel of the device does not take the host's memory */
    assert_int_equal(client_fill(api, opened, &best, 0, sizeof best, NULL, &error),
                     ATTN_ERROR_DEVICE);
    assert_int_equal(api->device->begin_capture(opened, NULL, &error), ATTN_ERROR_UNSUPPORTED);
    assert_string_equal(error.message, "fake_device has no begin_capture");
    assert_int_equal(api->device->end_capture(opened, NULL, &handle, &error),
                     ATTN_ERROR_UNSUPPORTED);
    assert_int_equal(api->device->launch_graph(opened, NULL, NULL, &error), ATTN_ERROR_UNSUPPORTED);
    api->device->close(opened);
    assert_ok(api->device->open(runtime, cpu, &opened, &error));
    assert_int_equal(api->device->begin_capture(opened, NULL, &error), ATTN_ERROR_UNSUPPORTED);
    assert_string_equal(error.message, "a CPU has no begin_capture");
    api->device->close(opened);
}

TEST(test_best)
{
    struct attn_error error = ATTN_ERROR_INIT;
    struct attn_device best = {0, 0};
    assert_ok(api->best_device(runtime, NULL, &best, &error));
    assert_memory_equal(&best, &fake, sizeof best);
    assert_ok(api->best_device(runtime, "cpu_ref", &best, &error));
    assert_memory_equal(&best, &cpu, sizeof best);
    assert_ok(api->best_device(runtime, "cpu_ref?", &best, &error));
    assert_memory_equal(&best, &fake, sizeof best);
    assert_int_equal(api->best_device(runtime, "=;", &best, &error), ATTN_ERROR_SYNTAX);
    assert_int_equal(api->best_device(runtime, NULL, NULL, &error), ATTN_ERROR_INVALID_ARGUMENT);
}

int main(void)
{
    return test_run(open_runtime, close_runtime);
}
