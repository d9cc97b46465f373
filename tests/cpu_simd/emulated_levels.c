/* SPDX-License-Identifier: Apache-2.0 */
/* The amx level alone, on every machine with the vectors next to its tiles: the linker puts these
 * in the place of features.c's (--wrap). */
#include "cpu_simd/internal.h"

int32_t __real_variants_of_machine(const struct variant **variants, int32_t capacity, char *isa,
                                   size_t isa_bytes);
int32_t __wrap_variants_of_machine(const struct variant **variants, int32_t capacity, char *isa,
                                   size_t isa_bytes);
const struct variant *__real_variant_by_name(const char *name);
const struct variant *__wrap_variant_by_name(const char *name);

int32_t __wrap_variants_of_machine(const struct variant **variants, int32_t capacity, char *isa,
                                   size_t isa_bytes)
{
    const int32_t count = __real_variants_of_machine(variants, capacity, isa, isa_bytes);
    if (__real_variant_by_name("avx512bf16") == NULL) {
        return count;
    }
    variants[0] = &variant_amx;
    return 1;
}

const struct variant *__wrap_variant_by_name(const char *name)
{
    return strcmp(name, "amx") == 0 ? &variant_amx : __real_variant_by_name(name);
}
