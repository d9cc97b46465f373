/* SPDX-License-Identifier: Apache-2.0 */
/* Locks: what was chosen for each layer and phase, and of which files, as text. A file holds one
 * record or several, one for each model that is bound:
 *
 *     attn-lock 1
 *     layer 0 prefill=cpu_ref decode=cpu_ref kv_dtype=bf16 block_size=16 layout=nhd name=layers.0
 *     core 0.1.0 file=9a3c04d1c2b8e6f7
 *     plugin cpu_ref 0.1.0 file=5b1f0a9d3e7c2468
 *     device arch=x86-64
 *     drivers versions=1c2b8e6f79a3c04d
 *     ranks declared
 *     end
 *
 * `drivers` stands for devices other than the CPU; `ranks` is `measured=HASH` of the file of
 * measurements where one decided. Records are compared as text. Nothing but libc is needed here:
 * attn-info --diff is built with this source too. */
#ifndef CORE_HOST_LOCK_TEXT_H
#define CORE_HOST_LOCK_TEXT_H

#include <stddef.h>
#include <stdint.h>

#define LOCK_HEAD "attn-lock 1\n"
#define LOCK_END "end\n"
#define LOCK_MOST ((size_t)1 << 20) /* bytes of a file */

/* Reads an open file into `text` of LOCK_MOST + 1 bytes, and ends it. NULL, or why it is no lock.
 */
const char *lock_read(int descriptor, char *text);
/* The same for what was read: `size` bytes, then a NUL. */
const char *lock_check(const char *text, size_t size);

/* The record at *rest, which is cut from what follows it; NULL where nothing does. */
char *lock_next(char **rest);

/* Passes each difference of two records to `found`, which may be NULL, as "layer 3: decode=a in A,
 * decode=b in B", A and B being `in_a` and `in_b`. Returns how many there are, those of `ranks`
 * left out: the same choice may have another reason. */
int32_t lock_compare(const char *a, const char *b, const char *in_a, const char *in_b,
                     void (*found)(void *user, const char *difference), void *user);

#endif
