/* SPDX-License-Identifier: Apache-2.0 */
/* A case of a kernel: its operands in one image, of which the reference and the backend under test
 * each work on a copy. */
#ifndef CHECK_KERNEL_TEST_H
#define CHECK_KERNEL_TEST_H

#include <string.h>

#include "cases/cases.h"
#include "common/bound.h"
#include "harness/image.h"
#include "harness/trial.h"
#include "harness/watch.h"
#include "support/owned.h"

/* The bounds of an attend, and of its log-sum-exp. */
struct bound bound_of_case(const struct factor_value *v);
struct bound bound_of_lse(const struct factor_value *v);

/* Rows [heads, dims] of one dtype and equal strides, and which of them count: the first num_rows,
 * of these, unless `wanted` is NULL, those that it sets. */
struct compared {
    const char *what; /* for the message */
    int32_t dtype;
    int64_t heads, dims, stride_row, stride_head; /* elements */
    int64_t num_rows;
    const uint8_t *wanted;
};

/* NaN equals NaN only. The message names the element that is farthest out of its bound. */
enum trial_result compare_rows(struct trial *trial, const struct compared *rows,
                               const void *expected, const void *found, struct bound bound);

/* A log-sum-exp [heads, rows] with these strides; rows count as in compare_rows. NaN and infinities
 * equal themselves only. */
struct compared_lse {
    int64_t heads, stride_head, stride_row;
    int64_t first_row, num_rows;
    const uint8_t *wanted;
};
enum trial_result compare_lse(struct trial *trial, const struct compared_lse *rows,
                              const void *expected, const void *found, struct bound bound);

#define OPERAND_DIMS 3
#define MAX_OPERANDS 26

/* A tensor or an array that a kernel is handed. */
struct operand {
    const char *name; /* the argument's */
    int32_t dtype;    /* enum attn_dtype_id of its elements */
    int32_t ndim;     /* 0: an array, of which `bytes` are taken */
    int64_t shape[OPERAND_DIMS];
    int64_t strides[OPERAND_DIMS]; /* elements; zeros: dense */
    size_t bytes;                  /* its buffer's; 0: what shape and strides reach */
    const void *from;              /* what it holds; NULL: see below */
    double deviation;              /* normal numbers fill it; 0: poison, until the case fills it */
    struct attn_dtype as;          /* kernels are given this in place of `dtype`, if it has bits */
    bool written;
    bool slice; /* it lies in the buffer of operand `of`, from element `first` on */
    int32_t of;
    int64_t first;
};

/* [rows, heads, width] that lie so far apart, or, of no heads, [rows, width]. */
struct operand operand_rows(const char *name, int32_t dtype, int64_t rows, int64_t stride_row,
                            int64_t heads, int64_t stride_head, int64_t width);
/* The same in the buffer of operand `of`, from element `first` on. */
struct operand operand_in(struct operand operand, int32_t of, int64_t first);

struct kernel_test {
    struct trial *trial;
    struct image image;
    const struct operand *operands; /* the case's; by index */
    int32_t num_operands;
    size_t at[MAX_OPERANDS]; /* offsets in the image */
    uint8_t *expected;       /* the reference's copy */
    uint8_t *memory;         /* the backend's, in its device's memory */
    uint8_t *found;          /* that one, read back */
    bool outputs_outside;    /* the case times its call itself, once they are compared */
    bool optional;           /* nothing declares it: a refusal of any status skips the case */
};

/* A call of one side over its copy of the image. */
struct kernel_call {
    const struct kernel_test *test;
    struct backend *backend;
    const struct device *device;
    uint8_t *base; /* the copy's, in the device's memory */
    void *stream;
    int32_t part; /* see kernel_test_parts; -1: the whole call */
    struct watch watch;
    struct attn_tensor tensors[MAX_OPERANDS];
    int64_t shapes[MAX_OPERANDS][OPERAND_DIMS], strides[MAX_OPERANDS][OPERAND_DIMS];
};
typedef attn_status kernel_call_run(struct kernel_call *call, const void *context,
                                    struct attn_error *error);

/* Calls a kernel; a call that allocates memory or takes a lock fails. */
#define KERNEL_CALL(call, slot, args, error)                                                       \
    kernel_call_end(call, (kernel_call_begin(call), (call)->backend->kernels.slot(args, error)),   \
                    error)
void kernel_call_begin(struct kernel_call *call);
attn_status kernel_call_end(struct kernel_call *call, attn_status status, struct attn_error *error);

static inline void *call_array(const struct kernel_call *call, int32_t operand)
{
    return call->base + call->test->at[operand];
}

/* Only `count` of the tensor's entries of a dimension, from `first` on. */
void call_narrow(struct kernel_call *call, int32_t operand, int32_t dim, int64_t first,
                 int64_t count);
/* The tensors over `base`, as kernel_test_run binds them. */
void call_bind(struct kernel_call *call, const struct kernel_test *test, struct backend *backend,
               const struct device *device, uint8_t *base);

/* Makes and fills the buffers, normal numbers in the order of the operands.
 * OWNED(kernel_test_finish) is due. */
void kernel_test_init(struct kernel_test *test, struct trial *trial, const struct operand *operands,
                      int32_t num_operands, uint64_t *random);
void kernel_test_finish(struct kernel_test *test);

/* An operand's first contents, and after kernel_test_run both sides'. */
static inline void *test_input(const struct kernel_test *test, int32_t operand)
{
    return test->image.bytes + test->at[operand];
}
static inline void *test_expected(const struct kernel_test *test, int32_t operand)
{
    return test->expected + test->at[operand];
}
static inline void *test_found(const struct kernel_test *test, int32_t operand)
{
    return test->found + test->at[operand];
}
static inline bool test_same(const struct kernel_test *test, int32_t operand, size_t bytes)
{
    return memcmp(test_expected(test, operand), test_found(test, operand), bytes) == 0;
}

/* Both sides run `call`. The found copy is read back and no byte next to the outputs has changed; a
 * kernel that answers ATTN_ERROR_UNSUPPORTED skips the case. */
enum trial_result kernel_test_run(struct kernel_test *test, kernel_call_run *run,
                                  const void *context);
/* Runs only the tested side: the case computes the right result itself. */
enum trial_result kernel_test_run_tested(struct kernel_test *test, kernel_call_run *run,
                                         const void *context);
/* stopwatch_trial of the tested backend's call over the first image; `found` stays. */
enum trial_result kernel_test_time(struct kernel_test *test, kernel_call_run *run,
                                   const void *context);
/* After kernel_test_run: the tested backend's calls again, for parts 0 to `num_parts` - 1 one after
 * the other, over the first image. The whole of it has to become what one call made, bit for bit.
 */
enum trial_result kernel_test_parts(struct kernel_test *test, kernel_call_run *run,
                                    const void *context, int32_t num_parts);

/* Passes if no byte outside of the outputs has changed. */
enum trial_result verify_image(struct trial *trial, const struct image *image,
                               const uint8_t *after);

/* A tensor of three dimensions against the reference's; with `rows` only those that it sets, and
 * the others may not have changed. */
enum trial_result kernel_test_compare(struct kernel_test *test, int32_t operand,
                                      const uint8_t *rows, struct bound bound);
enum trial_result kernel_test_other_rows(struct kernel_test *test, int32_t operand,
                                         const uint8_t *rows);
/* An output that the case compares itself: the first image takes the bytes that were right, and
 * then all others have to be as they were. After kernel_test_parts. */
static inline void test_take(struct kernel_test *test, int32_t operand, size_t at, size_t bytes)
{
    memcpy((uint8_t *)test_input(test, operand) + at, (uint8_t *)test_found(test, operand) + at,
           bytes);
}
enum trial_result kernel_test_rest(struct kernel_test *test, int32_t operand);

#endif
