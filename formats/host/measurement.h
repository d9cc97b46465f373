/* SPDX-License-Identifier: Apache-2.0 */
/* Times of backends, on file: `<cache_dir>/ranks`, one line for each backend and bucket:
 *
 *     DEVICE SHAPE PHASE BUCKET BACKEND NANOSECONDS SPREAD FILE DRIVERS VERSION DATE
 *     x86-64:5b1f0a9d 4/1x64x64.f16.f16 decode 8x4096 cpu_ref 481000 3 9a3c 5b1f 0.1 2026-01-31
 *
 * DEVICE is the architecture and a hash of the device's name, its features and its number of
 * processors. SHAPE says what of a layer a time depends on. BUCKET is a batch: requests x keys of
 * each, in prefill requests x queries. SPREAD is the distance of the quartiles in percent of the
 * median. FILE is a hash of the plugin file and DRIVERS one of the versions that drivers give; with
 * others a line is stale. VERSION is the plugin's. The last line of a key counts. Nothing but libc
 * is needed here: tools are built with this source too. */
#ifndef CORE_HOST_MEASUREMENT_H
#define CORE_HOST_MEASUREMENT_H

#include <attn/api.h>
#include <stdbool.h>

#define RANKS_FILE "ranks"
#define MEASUREMENT_SHAPE_SIZE 160
#define MEASUREMENT_DEVICE_SIZE 64

struct measurement {
    char device[MEASUREMENT_DEVICE_SIZE], shape[MEASUREMENT_SHAPE_SIZE], phase[16], bucket[32];
    char backend[160];
    int64_t nanoseconds; /* above 0 */
    int32_t spread;
    uint64_t file, drivers;
    char version[32], date[16];
};

/* False: no such line. */
bool measurement_parse(struct measurement *measurement, const char *line);
/* With a newline; false: it does not fit. */
bool measurement_text(const struct measurement *measurement, char *text, size_t size);
/* Whether a line is of this device, shape, phase and backend. */
bool measurement_is_of(const struct measurement *measurement, const char *device, const char *shape,
                       const char *phase, const char *backend);
/* NULL, or what it was measured with that is another one today. */
const char *measurement_stale(const struct measurement *measurement, uint64_t file,
                              uint64_t drivers);

/* NULL: a device that is not known. */
void measurement_device(const struct attn_device_info *device, char text[MEASUREMENT_DEVICE_SIZE]);
/* dtype and kv_dtype by their names. */
void measurement_shape(const struct attn_layer_desc *layer, const char *dtype, const char *kv_dtype,
                       char text[MEASUREMENT_SHAPE_SIZE]);

#endif
