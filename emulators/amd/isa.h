/* SPDX-License-Identifier: Apache-2.0 */
/* An interpreter of AMD GPU machine code: loads a code object as it is shipped, reads its
 * instructions from llvm-objdump's listing once, and runs workgroups on the CPU, a wave at a time
 * and all lanes of a wave together. Each access is checked. Errors are collected in the machine;
 * the first one stops the launch.
 *
 * Whether a register's value may be used is kept next to it: a lane of a vector register and a bit
 * of a scalar register are "known" once written from known values. What is not known may be moved
 * and computed with, but not be an address, a stored value or a condition. */
#ifndef AMD_ISA_H
#define AMD_ISA_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#define LANES 64
#define NUM_VECTORS 512 /* VGPRs, then AGPRs from 256 on */
#define FIRST_AGPR 256
#define ALL_LANES UINT64_MAX
#define MAX_SOURCES 4
#define SHARED_APERTURE 0x20000u /* high word of a flat address in LDS */

/* Numbers of scalar registers here. */
enum scalar_register {
    REG_VCC = 106,
    REG_M0 = 108,
    REG_NULL = 109,
    REG_EXEC = 110,
    REG_TTMP = 112,
    REG_SHARED_BASE = 128,
    REG_PRIVATE_BASE = 130,
    REG_SCC = 132,
    NUM_SCALARS = 136
};

enum operand_kind { OPERAND_NONE, OPERAND_VECTOR, OPERAND_SCALAR, OPERAND_CONSTANT };

enum operand_mods { MOD_NEG = 1, MOD_ABS = 2, MOD_SEXT = 4 };

/* How fast.c takes a source; FETCH_ANY: by source_lanes. */
enum fetch { FETCH_ANY, FETCH_VECTOR, FETCH_PAIR, FETCH_CONSTANT, FETCH_SCALAR };

struct operand {
    uint8_t kind, mods, words; /* words: 32 bits each */
    char type;                 /* as the operation's signature says it */
    uint16_t reg;
    uint8_t fetch;         /* enum fetch */
    uint64_t value;        /* OPERAND_CONSTANT */
    const uint32_t *lanes; /* a constant spread over lanes and words */
};

enum insn_flags {
    INSN_CLAMP = 1,
    INSN_DPP = 2,
    INSN_SDWA = 4,
    INSN_BOUND_CTRL = 8,
    INSN_GLC = 16, /* an atomic gives the old value back */
    INSN_OFF = 32  /* no scalar address */
};

enum dpp_control {
    DPP_QUAD_PERM,
    DPP_ROW_SHL,
    DPP_ROW_SHR,
    DPP_ROW_ROR,
    DPP_ROW_MIRROR,
    DPP_ROW_HALF_MIRROR,
    DPP_ROW_BCAST,
    DPP_ROW_SHARE,
    DPP_ROW_XMASK,
    DPP_ROW_NEWBCAST,
    DPP_WAVE_SHR,
    DPP_DPP8
};

enum sdwa_select {
    SEL_BYTE_0,
    SEL_BYTE_1,
    SEL_BYTE_2,
    SEL_BYTE_3,
    SEL_WORD_0,
    SEL_WORD_1,
    SEL_DWORD
};

struct wave;
struct insn;
typedef void insn_run(struct wave *w, const struct insn *i);
/* Lanes 0 .. n - 1 of an operation, n = 32 or 64; the second word of a 64-bit value stands LANES
 * further. A source may be the destination, unless one of them has two words. */
typedef void lanes_run(uint32_t *d, const uint32_t *a, const uint32_t *b, const uint32_t *c,
                       unsigned n);

/* Which of the machine's units an instruction occupies: for counts. */
enum insn_class {
    CLASS_SCALAR,
    CLASS_VECTOR,
    CLASS_TRANSCENDENTAL,
    CLASS_MATRIX,
    CLASS_SCALAR_MEMORY,
    CLASS_VECTOR_MEMORY,
    CLASS_LDS,
    CLASS_CONTROL,
    CLASS_COUNT
};

enum op_flags {
    OP_ACCUMULATES = 1, /* the destination is the last source */
    OP_SELECTS = 2,     /* v_cndmask: only the chosen value has to be known */
    OP_COMPARES = 4,    /* the result is a mask of lanes */
    OP_TO_EXEC = 8,     /* v_cmpx */
    OP_HIGH_HALF = 16,  /* writes the high 16 bits, keeps the low ones */
    OP_SEL_WORDS = 32   /* v_pk_mov: a word of each source, by op_sel alone */
};

/* An operation, by one name or several with blanks between them. `types` has a letter per operand,
 * results before '=': F f32, U 32 bits, H f16, W 16 bits, D f64, L 64 bits, P two f16, p two 16-bit
 * integers, Q two f32, M a mask of lanes, S/T/O/X/Y scalars of 1/2/4/8/16 words, digits: vectors of
 * so many words ('a' 16), A an address in one or two words. */
struct op {
    const char *name, *types;
    insn_run *run;
    lanes_run *lanes;
    uint16_t flags;
    uint8_t unit;  /* enum insn_class */
    int32_t arg;   /* what `run` makes of it */
    uint8_t major; /* which targets have it in this form; 0: all */
};

/* What each step reads stands in front. */
struct insn {
    insn_run *run;
    lanes_run *lanes; /* op's */
    const struct op *op;
    uint8_t num_dst, num_src;
    uint8_t unit;   /* op's */
    uint8_t direct; /* the result may be written while sources are read */
    uint16_t flags;
    struct operand src[MAX_SOURCES], dst[2];
    int32_t offset, offset1; /* memory's; other instructions have their immediate in offset */
    uint32_t target;         /* index of the instruction that a branch goes to */
    uint8_t op_sel, op_sel_hi, neg_lo, neg_hi, omod;
    uint8_t dpp, dpp_arg, row_mask, bank_mask;
    uint8_t dst_sel, src_sel[2], dst_unused; /* SDWA; dst_unused: 0 pad, 1 sext, 2 preserve */
    uint8_t perm[8];
    const struct insn *second; /* the second half of a dual instruction */
    uint64_t address;
    const char *text;
};

struct region {
    uint64_t begin, end;
    bool writable;
};

/* What a code object holds, loaded at its own place in memory. */
struct kernel {
    char name[128];
    uint32_t entry; /* index of an instruction, once they are read */
    uint32_t group_bytes, kernarg_bytes, properties, rsrc1, rsrc2, rsrc3;
    uint32_t private_bytes, preload;
};

struct code {
    char target[32];
    int wave_size, major; /* major: 9, 10, 11, 12 */
    bool gfx90a;          /* and later ones of gfx9: AGPRs follow VGPRs, work item ids are packed */
    bool fnuz;            /* gfx942: AMD's own fp8 codes; later ones have OCP's */
    const void *object;   /* the caller's */
    size_t object_bytes;
    char *image; /* the object as it is loaded */
    size_t image_bytes;
    bool is_read;
    struct insn *insns;
    uint32_t num_insns;
    uint64_t text_begin; /* where the code lies */
    uint32_t *insn_at;   /* by (address - text_begin) / 4 */
    size_t text_bytes;
    struct kernel *kernels;
    uint32_t num_kernels;
    char *listing;
};

/* A word of LDS: who has touched which bytes of it since the last barrier. */
struct lds_mark {
    uint32_t epoch;
    uint32_t writers, readers;    /* waves, a bit each */
    uint8_t written, read, known; /* bytes, a bit each; known: ever written */
};

struct machine {
    struct region *regions; /* sorted */
    uint32_t num_regions, room, last_region;
    char error[512];
    bool failed;
    uint64_t counts[CLASS_COUNT];
    uint64_t insns, bytes_read, bytes_written, lds_bytes;
    uint64_t *executed; /* by instruction, of the code that runs; NULL: not wanted */
};

struct group {
    struct machine *machine;
    const struct code *code;
    uint32_t lds_bytes, epoch;
    uint8_t *lds;
    struct lds_mark *marks; /* by word of LDS */
};

struct wave {
    struct group *group;
    const struct code *code;
    uint32_t pc; /* index of the next instruction */
    uint32_t index, lanes;
    bool scc, scc_known, ended, waits;
    bool signalled; /* between the two steps of gfx12's barrier */
    union {
        uint32_t s[NUM_SCALARS];
        uint64_t s64[NUM_SCALARS / 2];
    };
    union {
        uint32_t s_known[NUM_SCALARS];
        uint64_t s64_known[NUM_SCALARS / 2];
    };
    uint64_t v_known[NUM_VECTORS];
    uint64_t spread_of; /* the EXEC that `spread` has */
    _Alignas(64) uint32_t spread[LANES];
    _Alignas(64) uint32_t v[NUM_VECTORS][LANES];
};

struct launch {
    const struct kernel *kernel;
    uint32_t grid[3], block[3], dynamic_lds;
    const void *args;
    size_t arg_bytes;
};

static inline uint64_t exec_of(const struct wave *w)
{
    return w->s64[REG_EXEC / 2];
}

static inline uint64_t all_lanes(const struct wave *w)
{
    return w->lanes == 64 ? ALL_LANES : UINT32_MAX;
}

/* A vector operand's. */
static inline int words_of_type(char type)
{
    return type == 'D' || type == 'L' || type == 'Q' ? 2 : 1;
}

/* Records the first error of a launch, with the instruction that stands before w->pc. */
void wave_fail(struct wave *w, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Loads a code object, which has to stay: NULL and the cause in `error`. */
struct code *code_load(const void *object, size_t bytes, char *error, size_t room);
/* Reads its instructions from llvm-objdump's listing, the first time; false with the cause. */
bool code_read(struct code *code, char *error, size_t room);
void code_free(struct code *code);
const struct kernel *code_kernel(const struct code *code, const char *name);

/* Reads a listing into code->insns; false with the cause in `error`, all unknown names listed. */
bool code_parse(struct code *code, char *error, size_t room);
/* The operation of that name on gfx9, 10, 11 or 12; not from several threads at once. */
const struct op *op_find(const char *name, size_t length, int major);

/* Memory that kernels may touch. */
bool machine_allow(struct machine *m, const void *begin, size_t bytes, bool writable);
void machine_forbid(struct machine *m, const void *begin);
const struct region *machine_region(struct machine *m, uint64_t address);
/* Runs a kernel to its end; false: machine->error says why. */
bool machine_launch(struct machine *m, const struct code *code, const struct launch *launch);

/* The lanes of a source, in place or in `room` (two words of LANES), and which are known. */
const uint32_t *source_lanes(struct wave *w, const struct insn *i, int which,
                             uint32_t room[2 * LANES], uint64_t *known);
/* Writes `words` words of lanes, where EXEC has them. */
void write_lanes(struct wave *w, const struct operand *dst, int word, const uint32_t *from,
                 uint64_t known, uint64_t lanes);
uint64_t scalar_get(struct wave *w, const struct operand *o, uint64_t *known);
void scalar_set(struct wave *w, const struct operand *o, uint64_t value, uint64_t known);
uint64_t mask_get(struct wave *w, const struct operand *o, uint64_t *known);
void mask_set(struct wave *w, const struct operand *o, uint64_t mask, uint64_t known);

/* The tables of operations. */
struct op_table {
    const struct op *ops;
    size_t count;
};
extern const struct op_table scalar_ops, vector_ops, memory_ops, matrix_ops;

insn_run run_lanes, run_dual, run_nothing;
/* Once an instruction is read: a faster `run` for what needs nothing unusual. */
void insn_specialise(struct insn *i);

/* Masks and lanes: 0 or 1 in each, all bits or none in each. */
static inline uint64_t mask_of_lanes(const uint32_t *lanes, unsigned n)
{
#if defined(__AVX512F__)
    uint64_t mask = 0;
    for (unsigned l = 0; l < n; l += 16) {
        __m512i x = _mm512_loadu_si512(lanes + l);
        mask |= (uint64_t)_mm512_test_epi32_mask(x, x) << l;
    }
    return mask;
#else
    uint64_t mask = 0;
    for (unsigned l = 0; l < n; l++) {
        mask |= (uint64_t)(lanes[l] != 0) << l;
    }
    return mask;
#endif
}

static inline void spread_mask(uint64_t mask, uint32_t *lanes, uint32_t value)
{
#if defined(__AVX512F__)
    for (unsigned l = 0; l < LANES; l += 16) {
        _mm512_storeu_si512(lanes + l, _mm512_maskz_set1_epi32((__mmask16)(mask >> l), (int)value));
    }
#else
    for (unsigned l = 0; l < LANES; l++) {
        lanes[l] = mask >> l & 1 ? value : 0;
    }
#endif
}

/* The same bits as another type. */
#define SAME_BITS(NAME, TO, FROM)                                                                  \
    static inline TO NAME(FROM given)                                                              \
    {                                                                                              \
        union {                                                                                    \
            FROM given;                                                                            \
            TO taken;                                                                              \
        } x = {given};                                                                             \
        return x.taken;                                                                            \
    }
SAME_BITS(as_float, float, uint32_t)
SAME_BITS(as_bits, uint32_t, float)
SAME_BITS(as_double, double, uint64_t)
SAME_BITS(as_bits64, uint64_t, double)

/* Bit 0 as bit 31, and so on. */
static inline uint32_t reversed(uint32_t x)
{
    x = (x & 0x55555555) << 1 | (x >> 1 & 0x55555555);
    x = (x & 0x33333333) << 2 | (x >> 2 & 0x33333333);
    x = (x & 0x0f0f0f0f) << 4 | (x >> 4 & 0x0f0f0f0f);
    return __builtin_bswap32(x);
}

static inline float half_to_float(uint16_t bits)
{
    uint32_t sign = (uint32_t)(bits & 0x8000) << 16, rest = bits & 0x7fff;
    if (rest >= 0x7c00) {
        return as_float(sign | 0x7f800000 | (rest & 0x3ff) << 13 | ((rest & 0x3ff) ? 0x400000 : 0));
    }
    /* scaled by a power of two, exactly, so that denormals come right */
    return as_float(as_bits(as_float(rest << 13) * 0x1p112f) | sign);
}

/* Towards zero, to the nearest that there is; NaN: 0. */
static inline int32_t to_i32(double x)
{
    return x != x ? 0 : x <= -2147483648.0 ? INT32_MIN : x >= 2147483647.0 ? INT32_MAX : (int32_t)x;
}

static inline uint32_t to_u32(double x)
{
    return x != x || x <= 0.0 ? 0 : x >= 4294967295.0 ? UINT32_MAX : (uint32_t)x;
}

/* Rounded to nearest, halves to even. */
static inline uint16_t float_to_half(float number)
{
    uint32_t bits = as_bits(number), sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff;
    if (size > 0x7f800000) {
        return (uint16_t)(sign | 0x7e00 | (size >> 13 & 0x3ff));
    }
    if (size >= 0x477ff000) {
        return (uint16_t)(sign | 0x7c00);
    }
    if (size < 0x38800000) { /* 0.5 has an ulp of 2^-24 */
        return (uint16_t)(sign | (as_bits(as_float(size) + 0.5f) - 0x3f000000));
    }
    size += 0xfff + (size >> 13 & 1);
    return (uint16_t)(sign | (size - 0x38000000) >> 13);
}

#endif
