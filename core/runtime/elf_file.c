/* SPDX-License-Identifier: Apache-2.0 */
#include "runtime/elf_file.h"

#include <elf.h>
#include <stdint.h>
#include <string.h>
#include <unistd.h>

#define MAX_SEGMENTS 128
#define REFUSE(field, ...) error_set(error, ATTN_ERROR_PLUGIN, field, __VA_ARGS__)

#if defined(__x86_64__)
#define OWN_MACHINE EM_X86_64
#elif defined(__aarch64__)
#define OWN_MACHINE EM_AARCH64
#else
#define OWN_MACHINE EM_NONE /* left to the loader */
#endif
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
#define OWN_ORDER ELFDATA2LSB
#else
#define OWN_ORDER ELFDATA2MSB
#endif

static attn_status check_header(const Elf64_Ehdr *header, ssize_t got, struct attn_error *error)
{
    const unsigned char *ident = header->e_ident;
    if (got < EI_NIDENT || memcmp(ident, ELFMAG, SELFMAG) != 0) {
        return REFUSE("file", "is not an ELF file");
    }
    if (ident[EI_CLASS] != ELFCLASS64) {
        return REFUSE("file", "has ELF class %d; %d (64 bits) is needed", ident[EI_CLASS],
                      ELFCLASS64);
    }
    if (ident[EI_DATA] != OWN_ORDER) {
        return REFUSE("file", "has ELF byte order %d; %d is this machine's", ident[EI_DATA],
                      OWN_ORDER);
    }
    if (got < (ssize_t)sizeof *header) {
        return REFUSE("file", "is truncated: %zd bytes, and an ELF header has %zu", got,
                      sizeof *header);
    }
    if (OWN_MACHINE != EM_NONE && header->e_machine != OWN_MACHINE) {
        return REFUSE("file", "is for ELF machine %d; this is %d", header->e_machine, OWN_MACHINE);
    }
    if (header->e_type != ET_DYN) {
        return REFUSE("file", "has ELF type %d; %d (a shared library) is needed", header->e_type,
                      ET_DYN);
    }
    if (header->e_phentsize != sizeof(Elf64_Phdr) || header->e_phnum < 1 ||
        header->e_phnum > MAX_SEGMENTS) {
        return REFUSE("file", "has %d segments of %d bytes; 1 to %d of %zu", header->e_phnum,
                      header->e_phentsize, MAX_SEGMENTS, sizeof(Elf64_Phdr));
    }
    return ATTN_OK;
}

attn_status elf_check(int descriptor, off_t size, struct attn_error *error)
{
    Elf64_Ehdr header = {.e_type = ET_NONE};
    attn_status status = check_header(&header, pread(descriptor, &header, sizeof header, 0), error);
    for (int i = 0; i < header.e_phnum && status == ATTN_OK; i++) {
        Elf64_Phdr segment;
        const uint64_t at = header.e_phoff + (uint64_t)i * sizeof segment;
        if (at > (uint64_t)size ||
            pread(descriptor, &segment, sizeof segment, (off_t)at) != sizeof segment) {
            return REFUSE("file", "is truncated: its table of segments is not in its %lld bytes",
                          (long long)size);
        }
        if (segment.p_type == PT_LOAD && (segment.p_filesz > (uint64_t)size ||
                                          segment.p_offset > (uint64_t)size - segment.p_filesz)) {
            return REFUSE("file", "is truncated: segment %d ends at byte %llu of %lld", i,
                          (unsigned long long)(segment.p_offset + segment.p_filesz),
                          (long long)size);
        }
    }
    return status;
}
