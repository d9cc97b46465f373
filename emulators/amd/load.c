/* SPDX-License-Identifier: Apache-2.0 */
/* A code object at a place of its own in memory. Sources: "User Guide for AMDGPU Backend" of LLVM,
 * "ELF Code Object" and "Kernel Descriptor". */
#define _GNU_SOURCE
#include <elf.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "isa.h"
#include "util/hash.h"

#define ABS64 3

static const struct {
    unsigned machine; /* the machine's bits in e_flags */
    const char *name;
    int major;
} targets[] = {{0x3f, "gfx90a", 9},   {0x4c, "gfx942", 9},   {0x4f, "gfx950", 9},
               {0x36, "gfx1030", 10}, {0x41, "gfx1100", 11}, {0x46, "gfx1101", 11},
               {0x47, "gfx1102", 11}, {0x44, "gfx1103", 11}, {0x43, "gfx1150", 11},
               {0x4a, "gfx1151", 11}, {0x55, "gfx1152", 11}, {0x48, "gfx1200", 12},
               {0x4e, "gfx1201", 12}};

static bool find_target(struct code *code, unsigned flags)
{
    for (size_t i = 0; i < sizeof targets / sizeof *targets; i++) {
        if (targets[i].machine == (flags & 0xff)) {
            snprintf(code->target, sizeof code->target, "%s", targets[i].name);
            code->major = targets[i].major;
            code->wave_size = code->major == 9 ? 64 : 32;
            code->gfx90a = code->major == 9;
            code->fnuz = code->gfx90a && strcmp(code->target, "gfx950") != 0;
            return true;
        }
    }
    return false;
}

static bool load_segments(struct code *code, const char *image, const Elf64_Ehdr *header)
{
    const Elf64_Phdr *segments = (const Elf64_Phdr *)(image + header->e_phoff);
    for (int i = 0; i < header->e_phnum; i++) {
        uint64_t end = segments[i].p_vaddr + segments[i].p_memsz;
        if (segments[i].p_type == PT_LOAD && end > code->image_bytes) {
            code->image_bytes = end;
        }
    }
    code->image = aligned_alloc(4096, (code->image_bytes + 8191) / 4096 * 4096);
    if (code->image == NULL) {
        return false;
    }
    memset(code->image, 0, code->image_bytes);
    for (int i = 0; i < header->e_phnum; i++) {
        if (segments[i].p_type == PT_LOAD) {
            memcpy(code->image + segments[i].p_vaddr, image + segments[i].p_offset,
                   segments[i].p_filesz);
        }
        if (segments[i].p_type == PT_LOAD && (segments[i].p_flags & PF_X)) {
            code->text_begin = (uint64_t)code->image + segments[i].p_vaddr;
            code->text_bytes = segments[i].p_memsz;
        }
    }
    return code->text_bytes > 0;
}

static void relocate(struct code *code, const char *image, const Elf64_Ehdr *header)
{
    const Elf64_Shdr *sections = (const Elf64_Shdr *)(image + header->e_shoff);
    for (int i = 0; i < header->e_shnum; i++) {
        if (sections[i].sh_type != SHT_RELA) {
            continue;
        }
        const Elf64_Rela *rows = (const Elf64_Rela *)(image + sections[i].sh_offset);
        const Elf64_Sym *symbols =
            (const Elf64_Sym *)(image + sections[sections[i].sh_link].sh_offset);
        for (size_t n = 0; n < sections[i].sh_size / sizeof *rows; n++) {
            uint64_t value = (uint64_t)code->image + (uint64_t)rows[n].r_addend;
            if (ELF64_R_TYPE(rows[n].r_info) == ABS64) {
                value += symbols[ELF64_R_SYM(rows[n].r_info)].st_value;
            }
            memcpy(code->image + rows[n].r_offset, &value, sizeof value);
        }
    }
}

static uint32_t word_at(const char *at)
{
    uint32_t word;
    memcpy(&word, at, sizeof word);
    return word;
}

/* Kernels are the symbols NAME.kd. */
static bool find_kernels(struct code *code, const char *image, const Elf64_Ehdr *header)
{
    const Elf64_Shdr *sections = (const Elf64_Shdr *)(image + header->e_shoff);
    for (int i = 0; i < header->e_shnum; i++) {
        if (sections[i].sh_type != SHT_DYNSYM) {
            continue;
        }
        const Elf64_Sym *symbols = (const Elf64_Sym *)(image + sections[i].sh_offset);
        const char *names = image + sections[sections[i].sh_link].sh_offset;
        size_t count = sections[i].sh_size / sizeof *symbols;
        code->kernels = calloc(count + 1, sizeof *code->kernels);
        for (size_t n = 0; code->kernels != NULL && n < count; n++) {
            const char *name = names + symbols[n].st_name;
            size_t length = strlen(name);
            if (length < 4 || strcmp(name + length - 3, ".kd") != 0) {
                continue;
            }
            struct kernel *k = &code->kernels[code->num_kernels++];
            const char *at = code->image + symbols[n].st_value;
            int64_t entry;
            memcpy(&entry, at + 16, sizeof entry);
            uint64_t address = (uint64_t)(at + entry);
            snprintf(k->name, sizeof k->name, "%.*s", (int)length - 3, name);
            k->group_bytes = word_at(at);
            k->private_bytes = word_at(at + 4);
            k->kernarg_bytes = word_at(at + 8);
            k->rsrc3 = word_at(at + 44);
            k->rsrc1 = word_at(at + 48);
            k->rsrc2 = word_at(at + 52);
            k->properties = word_at(at + 56) & 0xffff;
            k->preload = word_at(at + 56) >> 16;
            if (k->properties & 1 << 10) {
                code->wave_size = 32;
            }
            k->entry = (uint32_t)((address - code->text_begin) / 4); /* words, until parsed */
        }
    }
    return code->num_kernels > 0;
}

/* What lists the file: the disassembler or, with ATTN_TEST_HIP_LISTINGS, a folder, what it said of
 * the same bytes before. */
static void listing_command(const struct code *code, const char *path, char *command, size_t room)
{
    if (getenv("ATTN_TEST_HIP_LISTINGS") == NULL) {
        snprintf(command, room, OBJDUMP " -d %s", path);
        return;
    }
    snprintf(command, room,
             "f=$ATTN_TEST_HIP_LISTINGS/%016llx; [ -e \"$f\" ] || { mkdir -p "
             "\"$ATTN_TEST_HIP_LISTINGS\" "
             "&& " OBJDUMP " -d %s >\"$f.$$\" && mv \"$f.$$\" \"$f\"; } && cat \"$f\"",
             (unsigned long long)hash_bytes(HASH_INIT, code->object, code->object_bytes), path);
}

/* The disassembler's listing of the image. */
static bool list_code(struct code *code, char *error, size_t room)
{
    char path[] = "/tmp/attn-hip-XXXXXX", command[512];
    int file = mkstemp(path);
    size_t used = 0, size = 1 << 20;
    FILE *pipe = NULL;
    if (file < 0 || write(file, code->object, code->object_bytes) != (ssize_t)code->object_bytes) {
        snprintf(error, room, "cannot write %s", path);
        goto done;
    }
    listing_command(code, path, command, sizeof command);
    pipe = popen(command, "r");
    code->listing = malloc(size);
    while (pipe != NULL && code->listing != NULL) {
        size_t got = fread(code->listing + used, 1, size - used - 1, pipe);
        used += got;
        if (got == 0) {
            break;
        }
        if (used + 1 == size) {
            size *= 2;
            char *more = realloc(code->listing, size);
            if (more == NULL) {
                free(code->listing);
            }
            code->listing = more;
        }
    }
    if (code->listing != NULL) {
        code->listing[used] = '\0';
    }
done:
    if (pipe == NULL || pclose(pipe) != 0 || code->listing == NULL) {
        snprintf(error, room, OBJDUMP " did not list the code");
        used = 0;
    }
    if (file >= 0) {
        close(file);
        unlink(path);
    }
    return used > 0;
}

static bool is_branch(const struct insn *i)
{
    return strncmp(i->op->name, "s_cbranch", 9) == 0 || strcmp(i->op->name, "s_branch") == 0;
}

/* Addresses to indices: of branches, of entries. */
static bool link_code(struct code *code, char *error, size_t room)
{
    size_t words = code->text_bytes / 4;
    code->insn_at = malloc((words + 1) * sizeof *code->insn_at);
    if (code->insn_at == NULL) {
        return false;
    }
    memset(code->insn_at, 0xff, (words + 1) * sizeof *code->insn_at);
    for (uint32_t n = 0; n < code->num_insns; n++) {
        struct insn *i = &code->insns[n];
        i->address += (uint64_t)code->image - code->text_begin;
        uint64_t word = (i->address - code->text_begin) / 4;
        if (word < words) {
            code->insn_at[word] = n;
        }
    }
    for (uint32_t n = 0; n < code->num_insns; n++) {
        struct insn *i = &code->insns[n];
        if (is_branch(i)) {
            int64_t word = (int64_t)(i->address - code->text_begin) / 4 + 1 + (int16_t)i->offset;
            i->target = word >= 0 && word < (int64_t)words ? code->insn_at[word] : UINT32_MAX;
            if (i->target == UINT32_MAX) {
                snprintf(error, room, "\"%s\" leads nowhere", i->text);
                return false;
            }
        }
    }
    for (uint32_t n = 0; n < code->num_kernels; n++) {
        code->kernels[n].entry = code->insn_at[code->kernels[n].entry];
    }
    return true;
}

struct code *code_load(const void *object, size_t bytes, char *error, size_t room)
{
    const Elf64_Ehdr *header = object;
    struct code *code = calloc(1, sizeof *code);
    snprintf(error, room, "not a code object of a known target");
    if (code == NULL || bytes < sizeof *header || memcmp(header->e_ident, ELFMAG, SELFMAG) != 0 ||
        header->e_machine != 224 || !find_target(code, header->e_flags) ||
        !load_segments(code, object, header) || !find_kernels(code, object, header)) {
        code_free(code);
        return NULL;
    }
    relocate(code, object, header);
    code->object = object;
    code->object_bytes = bytes;
    return code;
}

bool code_read(struct code *code, char *error, size_t room)
{
    code->is_read =
        code->is_read || (list_code(code, error, room) && code_parse(code, error, room) &&
                          link_code(code, error, room));
    return code->is_read;
}

static void free_constants(struct insn *i)
{
    for (int n = 0; n < MAX_SOURCES; n++) {
        free((void *)i->src[n].lanes);
    }
}

void code_free(struct code *code)
{
    if (code == NULL) {
        return;
    }
    for (uint32_t n = 0; n < code->num_insns; n++) {
        struct insn *i = &code->insns[n];
        free_constants(i);
        if (i->second != NULL) {
            free_constants((struct insn *)i->second);
            free((void *)i->second);
        }
    }
    free(code->insns);
    free(code->insn_at);
    free(code->kernels);
    free(code->listing);
    free(code->image);
    free(code);
}

const struct kernel *code_kernel(const struct code *code, const char *name)
{
    for (uint32_t n = 0; n < code->num_kernels; n++) {
        if (strcmp(code->kernels[n].name, name) == 0) {
            return &code->kernels[n];
        }
    }
    return NULL;
}
