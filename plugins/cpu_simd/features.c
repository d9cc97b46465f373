/* SPDX-License-Identifier: Apache-2.0 */
/* Detects the machine's ISA extensions, in baseline code. */
#define _GNU_SOURCE /* syscall */
#include "cpu_simd/internal.h"

#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#define REQUEST_XTILE_DATA_ARGUMENT 18
#define ARCH_REQ_XCOMP_PERM_CODE 0x1023

struct x86_features {
    bool avx2, avx512, avx512bf16, amx;
};

/* State that the operating system saves: bits of XCR0. */
static uint64_t enabled_state(void)
{
    uint32_t low;
    uint32_t high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return ((uint64_t)high << 32) | low;
}

/* Linux enables the tile registers for the whole process, and only on request. */
static bool request_tiles(void)
{
#if defined(__linux__) && defined(SYS_arch_prctl)
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM_CODE, REQUEST_XTILE_DATA_ARGUMENT) == 0;
#else
    return false;
#endif
}

static bool has(uint32_t word, int bit)
{
    return ((word >> bit) & 1u) != 0;
}

static struct x86_features detect(void)
{
    struct x86_features found = {0};
    uint32_t a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !has(c, 27)) {
        return found;
    }
    bool fma = has(c, 12);
    bool f16c = has(c, 29);
    uint64_t state = enabled_state();
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) {
        return found;
    }
    uint32_t leaf7_b = b;
    uint32_t leaf7_d = d;
    bool vbmi = has(c, 1);
    bool vnni = has(c, 11);
    uint32_t highest = a;
    found.avx2 = (state & 0x6) == 0x6 && fma && f16c && has(leaf7_b, 5);
    /* F, DQ, BW, VL */
    found.avx512 = found.avx2 && (state & 0xe6) == 0xe6 && has(leaf7_b, 16) && has(leaf7_b, 17) &&
                   has(leaf7_b, 30) && has(leaf7_b, 31);
    if (highest >= 1 && __get_cpuid_count(7, 1, &a, &b, &c, &d)) {
        found.avx512bf16 = found.avx512 && has(a, 5) && vbmi && vnni;
    }
    /* TILE, INT8 and BF16, with both tile states enabled */
    found.amx = found.avx512bf16 && (state & 0x60000) == 0x60000 && has(leaf7_d, 24) &&
                has(leaf7_d, 25) && has(leaf7_d, 22) && request_tiles();
    return found;
}

#elif defined(__aarch64__)
#if defined(__linux__)
#include <sys/auxv.h>

#define HWCAP2_HAS_BF16 (1ul << 14) /* HWCAP2_BF16 of asm/hwcap.h */
#endif

/* BFDOT and its conversions, optional from ARMv8.2 on. */
static bool has_bf16(void)
{
#if defined(__linux__)
    return (getauxval(AT_HWCAP2) & HWCAP2_HAS_BF16) != 0;
#else
    return false;
#endif
}
#endif

static void append(char *isa, size_t isa_bytes, const char *name)
{
    size_t used = strlen(isa);
    if (used + strlen(name) + 2 <= isa_bytes) {
        if (used > 0) {
            isa[used++] = ',';
        }
        memcpy(isa + used, name, strlen(name) + 1);
    }
}

int32_t variants_of_machine(const struct variant **variants, int32_t capacity, char *isa,
                            size_t isa_bytes)
{
    int32_t count = 0;
    isa[0] = '\0';
    variants[count++] = &variant_scalar;
#if defined(__x86_64__)
    struct x86_features found = detect();
    const struct {
        bool present;
        const struct variant *variant;
        const char *isa;
    } levels[] = {
        {found.avx2, &variant_avx2, "avx2,fma,f16c"},
        {found.avx512, &variant_avx512, "avx512f,avx512bw,avx512dq,avx512vl"},
        {found.avx512bf16, &variant_avx512bf16, "avx512_bf16,avx512_vbmi,avx512_vnni"},
        {found.amx, &variant_amx, "amx_tile,amx_bf16,amx_int8"},
    };
    for (size_t i = 0; i < sizeof(levels) / sizeof(levels[0]); i++) {
        if (levels[i].present && count < capacity) {
            variants[count++] = levels[i].variant;
            append(isa, isa_bytes, levels[i].isa);
        }
    }
#elif defined(__aarch64__)
    if (count < capacity) {
        variants[count++] = &variant_neon;
        append(isa, isa_bytes, "neon");
    }
    if (count < capacity && has_bf16()) {
        variants[count++] = &variant_neonbf16;
        append(isa, isa_bytes, "bf16");
    }
#endif
    return count;
}

const struct variant *variant_by_name(const char *name)
{
    const struct variant *variants[8];
    char isa[128];
    int32_t count = variants_of_machine(variants, 8, isa, sizeof(isa));
    for (int32_t i = 0; i < count; i++) {
        if (strcmp(variants[i]->name, name) == 0) {
            return variants[i];
        }
    }
    return NULL;
}
