/* SPDX-License-Identifier: Apache-2.0 */
/* Buffers of one case of a kernel, worked on by the reference and by the backend under test. */
#ifndef CHECK_KERNEL_TEST_H
#define CHECK_KERNEL_TEST_H

#include "cases/compare.h"
#include "harness/image.h"
#include "harness/trial.h"

struct kernel_test {
    struct trial *trial;
    struct image image;
    uint8_t *expected; /* the reference's copy */
    uint8_t *memory;   /* the backend's, in its device's memory */
    uint8_t *found;    /* that one, read back */
    bool optional;     /* nothing declares it: a refusal of any status skips the case */
};

/* A tensor of up to three dimensions with its own arrays; strides count elements. */
struct case_tensor {
    struct attn_tensor tensor;
    int64_t shape[3];
    int64_t strides[3];
};

/* One call of a kernel over a copy of the image at `base` in the device's memory. */
typedef attn_status kernel_test_call(struct backend *backend, uint8_t *base,
                                     const struct device *device, void *stream, const void *context,
                                     struct attn_error *error);

void kernel_test_init(struct kernel_test *test, struct trial *trial);
void kernel_test_finish(struct kernel_test *test);
/* Room for `bytes`; the offset is 0 only after a failure that kernel_test_run reports. */
size_t kernel_test_add(struct kernel_test *test, const char *name, size_t bytes, bool writable);
/* Both sides run `call`. The found copy is read back and no byte next to the outputs has changed; a
 * kernel that answers ATTN_ERROR_UNSUPPORTED skips the case. */
enum trial_result kernel_test_run(struct kernel_test *test, kernel_test_call *call,
                                  const void *context);

/* After kernel_test_run: the tested backend's calls again, for `*part` 0 to `num_parts` - 1 one
 * after the other, over the first image. The whole of it has to become what one call made, bit for
 * bit; *part is -1 again. */
enum trial_result kernel_test_parts(struct kernel_test *test, kernel_test_call *call,
                                    const void *context, int32_t *part, int32_t num_parts);

/* Whether every byte that is no output is as it was. */
enum trial_result verify_image(struct trial *trial, const struct image *image,
                               const uint8_t *after);

/* compare_rows of the two copies at offset `at`, compact rows all of which count. */
enum trial_result kernel_test_compare(struct kernel_test *test, const char *what, size_t at,
                                      int64_t num_rows, int64_t heads, int64_t dims, int32_t dtype,
                                      struct bound bound);

struct case_tensor case_rows(int64_t rows, int64_t heads, int64_t dims);
/* The tensor over `data`; its arrays are those of `shaped`, which must outlive it. */
struct attn_tensor *case_bind(struct case_tensor *shaped, void *data, const struct device *device,
                              int32_t dtype, int32_t ndim);

/* Codes of 8-bit formats: at most one step apart, and few of them. */
bool codes_agree(const uint8_t *expected, const uint8_t *found, int64_t count, bool is_int8);

#endif
