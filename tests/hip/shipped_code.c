/* SPDX-License-Identifier: Apache-2.0 */
/* A table of the kernels in the plugin's bundles, per target, and what has to hold of each: every
 * instruction is one that the interpreter knows, no scratch memory, registers and LDS that leave
 * room for the waves of a workgroup, wide loads where a kernel copies.
 * usage: shipped_code BUNDLE.. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "amd/isa.h"

static int failures;

static void fail(const struct code *code, const char *kernel, const char *what)
{
    fprintf(stderr, "FAILED %s %s: %s\n", code->target, kernel, what);
    failures++;
}

/* Instructions of a kernel: to the next kernel's entry. */
static uint32_t end_of(const struct code *code, const struct kernel *k)
{
    uint32_t end = code->num_insns;
    for (uint32_t n = 0; n < code->num_kernels; n++) {
        if (code->kernels[n].entry > k->entry && code->kernels[n].entry < end) {
            end = code->kernels[n].entry;
        }
    }
    return end;
}

/* Vector registers of a wave, by the granules of the kernel descriptor. */
static unsigned vector_registers(const struct code *code, const struct kernel *k)
{
    unsigned granules = (k->rsrc1 & 63) + 1;
    return granules * (code->gfx90a || code->wave_size == 32 ? 8 : 4);
}

/* Whether a SIMD has 1536 registers a lane, which it gives out by 24; gfx10 and small GPUs of gfx11
 * have 1024, by 16. */
static bool is_large(const struct code *code)
{
    static const char *const large[] = {"gfx1100", "gfx1101", "gfx1151", "gfx1200", "gfx1201"};
    for (size_t n = 0; n < sizeof large / sizeof *large; n++) {
        if (strcmp(code->target, large[n]) == 0) {
            return true;
        }
    }
    return false;
}

/* Waves of a SIMD that its registers hold. */
static unsigned waves_of_simd(const struct code *code, unsigned registers)
{
    unsigned all = code->gfx90a ? 512 : is_large(code) ? 1536 : 1024;
    unsigned unit = code->gfx90a ? 8 : is_large(code) ? 24 : 16;
    unsigned taken = (registers + unit - 1) / unit * unit;
    unsigned most = code->gfx90a ? 8 : 16, waves = all / taken;
    return waves < most ? waves : most;
}

/* Attends on matrix units: a group of 8 waves has a compute unit's registers, or two groups of
 * 4, and half of its LDS; on RDNA that of a pair of units. */
static void check_attend(const struct code *code, const struct kernel *k, unsigned waves,
                         unsigned wide, unsigned matrix, unsigned codes)
{
    if ((codes > 0) != (strncmp(k->name, "kernel_attend_fp8_", 18) == 0)) {
        fail(code, k->name, "products of fp8 codes, or none of them");
    }
    if (matrix == 0) {
        fail(code, k->name, "no matrix instruction");
    }
    if (wide == 0) {
        fail(code, k->name, "no load of 16 bytes");
    }
    if (waves < 2) {
        fail(code, k->name, "fewer than 2 waves of a SIMD");
    }
    if (k->group_bytes > (code->wave_size == 64 ? 32768 : 65536)) {
        fail(code, k->name, "more than half of the LDS");
    }
}

static void show_kernel(const struct code *code, const struct kernel *k)
{
    unsigned counts[CLASS_COUNT] = {0}, wide = 0, codes = 0;
    uint32_t end = end_of(code, k);
    for (uint32_t n = k->entry; n < end; n++) {
        const struct insn *i = &code->insns[n];
        counts[i->op->unit]++;
        codes += strstr(i->op->name, "_fp8_fp8") != NULL;
        wide += i->op->unit == CLASS_VECTOR_MEMORY && i->num_dst > 0 && i->dst[0].words == 4;
    }
    unsigned registers = vector_registers(code, k), waves = waves_of_simd(code, registers);
    printf("%-8s %-28s %6u %6u %5u %5u %6u %5u %5u\n", code->target, k->name, end - k->entry,
           registers, waves, k->group_bytes, counts[CLASS_VECTOR_MEMORY], wide,
           counts[CLASS_MATRIX]);
    if (k->private_bytes != 0 || (k->rsrc2 & 1)) {
        fail(code, k->name, "scratch memory");
    }
    if (k->group_bytes > 65536) {
        fail(code, k->name, "more than 64 KiB of LDS");
    }
    if (waves == 0) {
        fail(code, k->name, "more registers than a SIMD has");
    }
    if (strncmp(k->name, "kernel_write_copy", 17) == 0 && wide == 0) {
        fail(code, k->name, "no load of 16 bytes");
    }
    if (strncmp(k->name, "kernel_attend_", 14) == 0) {
        check_attend(code, k, waves, wide, counts[CLASS_MATRIX], codes);
    }
}

static void show_bundle(const char *path)
{
    static const char magic[] = "__CLANG_OFFLOAD_BUNDLE__";
    static char error[16384];
    FILE *file = fopen(path, "rb");
    size_t room = (size_t)64 << 20;
    char *bundle = malloc(room);
    uint64_t count = 0;
    size_t bytes = file != NULL && bundle != NULL ? fread(bundle, 1, room, file) : 0;
    if (bytes < 64 || bytes == room || memcmp(bundle, magic, sizeof magic - 1) != 0) {
        fprintf(stderr, "%s: no bundle\n", path);
        failures++;
        count = 0;
    } else {
        memcpy(&count, bundle + sizeof magic - 1, 8);
    }
    const char *at = bundle + sizeof magic - 1 + 8;
    for (uint64_t n = 0; n < count; n++) {
        uint64_t offset, size, length;
        memcpy(&offset, at, 8);
        memcpy(&size, at + 8, 8);
        memcpy(&length, at + 16, 8);
        at += 24 + length;
        if (size == 0) { /* the host's */
            continue;
        }
        struct code *code = code_load(bundle + offset, size, error, sizeof error);
        if (code == NULL || !code_read(code, error, sizeof error)) {
            fprintf(stderr, "%s, %.*s: %s\n", path, (int)length, at - length, error);
            failures++;
            code_free(code);
            continue;
        }
        for (uint32_t k = 0; k < code->num_kernels; k++) {
            show_kernel(code, &code->kernels[k]);
        }
        code_free(code);
    }
    free(bundle);
    if (file != NULL) {
        fclose(file);
    }
}

int main(int argc, char **argv)
{
    printf("%-8s %-28s %6s %6s %5s %5s %6s %5s %5s\n", "target", "kernel", "insns", "VGPRs",
           "waves", "LDS", "memory", "wide", "matrix");
    for (int n = 1; n < argc; n++) {
        show_bundle(argv[n]);
    }
    return failures == 0 && argc > 1 ? 0 : 1;
}
