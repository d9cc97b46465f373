/* SPDX-License-Identifier: Apache-2.0 */
/* Scalar operations and the flow of control. Source: AMD's "RDNA3" and "CDNA3 Instruction Set
 * Architecture" reference guides, "SALU Instructions". */
#include <math.h>

#include "isa.h"

#define KNOWN UINT64_MAX

uint64_t scalar_get(struct wave *w, const struct operand *o, uint64_t *known)
{
    if (o->kind == OPERAND_CONSTANT) {
        *known = KNOWN;
        return o->value;
    }
    if (o->reg == REG_SCC) {
        *known = w->scc_known ? KNOWN : 0;
        return w->scc;
    }
    if (o->words >= 2) { /* pairs are even, but a mask's first word may be odd in wave32 */
        *known = w->s_known[o->reg] | (uint64_t)w->s_known[o->reg + 1] << 32;
        return w->s[o->reg] | (uint64_t)w->s[o->reg + 1] << 32;
    }
    *known = w->s_known[o->reg] | (w->s_known[o->reg] == UINT32_MAX ? KNOWN << 32 : 0);
    return w->s[o->reg];
}

void scalar_set(struct wave *w, const struct operand *o, uint64_t value, uint64_t known)
{
    if (o->reg == REG_NULL) {
        return;
    }
    if ((o->reg & ~1) == REG_EXEC && (uint32_t)known != UINT32_MAX) {
        wave_fail(w, "EXEC from what was never written");
    }
    w->s[o->reg] = (uint32_t)value;
    w->s_known[o->reg] = (uint32_t)known;
    if (o->words >= 2) {
        w->s[o->reg + 1] = (uint32_t)(value >> 32);
        w->s_known[o->reg + 1] = (uint32_t)(known >> 32);
    }
}

uint64_t mask_get(struct wave *w, const struct operand *o, uint64_t *known)
{
    uint64_t mask = scalar_get(w, o, known);
    return mask & all_lanes(w);
}

void mask_set(struct wave *w, const struct operand *o, uint64_t mask, uint64_t known)
{
    struct operand to = *o;
    to.words = w->lanes == 64 ? 2 : 1;
    scalar_set(w, &to, mask, known);
}

/* Sources a, b as T, result as T; SCC from `d` where the operation sets it. */
#define ENTER(T)                                                                                   \
    uint64_t a_known, b_known = KNOWN;                                                             \
    const T a = (T)scalar_get(w, &i->src[0], &a_known);                                            \
    const T b = i->num_src > 1 ? (T)scalar_get(w, &i->src[1], &b_known) : (T)0;                    \
    const uint64_t width = sizeof(T) == 8 ? KNOWN : UINT32_MAX;                                    \
    const bool all = ((a_known & b_known) & width) == width;                                       \
    (void)a, (void)b;

#define LEAVE(D, VALUE) scalar_set(w, &i->dst[0], (uint64_t)(D)(VALUE), all ? KNOWN : 0);

#define SCC(VALUE)                                                                                 \
    w->scc = (VALUE);                                                                              \
    w->scc_known = all;

#define PLAIN(NAME, T, VALUE)                                                                      \
    static void NAME(struct wave *w, const struct insn *i)                                         \
    {                                                                                              \
        ENTER(T)                                                                                   \
        LEAVE(T, VALUE)                                                                            \
    }

#define FLAGGED(NAME, T, VALUE, FLAG)                                                              \
    static void NAME(struct wave *w, const struct insn *i)                                         \
    {                                                                                              \
        ENTER(T)                                                                                   \
        const T d = (T)(VALUE);                                                                    \
        LEAVE(T, d)                                                                                \
        SCC(FLAG)                                                                                  \
    }

/* Bits of the result are known apart from each other. */
#define LOGIC(NAME, T, VALUE, KNOWN_BITS)                                                          \
    static void NAME(struct wave *w, const struct insn *i)                                         \
    {                                                                                              \
        ENTER(T)                                                                                   \
        const T d = (T)(VALUE), ak = (T)a_known, bk = (T)b_known;                                  \
        const T known = (T)(KNOWN_BITS);                                                           \
        (void)ak, (void)bk, (void)all;                                                             \
        scalar_set(w, &i->dst[0], (uint64_t)d, (uint64_t)known | ~width);                          \
        w->scc = d != 0;                                                                           \
        w->scc_known = known == (T)KNOWN || (d & known) != 0;                                      \
    }

#define LOGIC_BOTH(NAME, VALUE, KNOWN_BITS)                                                        \
    LOGIC(NAME##32, uint32_t, VALUE, KNOWN_BITS)                                                   \
    LOGIC(NAME##64, uint64_t, VALUE, KNOWN_BITS)

#define AND_KNOWN ((ak & bk) | (ak & ~a) | (bk & ~b))
#define OR_KNOWN ((ak & bk) | (ak & a) | (bk & b))

LOGIC_BOTH(s_and, a &b, AND_KNOWN)
LOGIC_BOTH(s_or, a | b, OR_KNOWN)
LOGIC_BOTH(s_xor, a ^ b, ak &bk)
LOGIC_BOTH(s_andn2, a & ~b, (ak & bk) | (ak & ~a) | (bk & b))
LOGIC_BOTH(s_orn2, a | ~b, (ak & bk) | (ak & a) | (bk & ~b))
LOGIC_BOTH(s_nand, ~(a &b), AND_KNOWN)
LOGIC_BOTH(s_nor, ~(a | b), OR_KNOWN)
LOGIC_BOTH(s_xnor, ~(a ^ b), ak &bk)
LOGIC_BOTH(s_not, ~a, ak)

static void s_mov(struct wave *w, const struct insn *i)
{
    uint64_t known, value = scalar_get(w, &i->src[0], &known);
    scalar_set(w, &i->dst[0], value, known);
}

static void s_movk(struct wave *w, const struct insn *i)
{
    scalar_set(w, &i->dst[0], (uint64_t)(int64_t)(int16_t)i->offset, KNOWN);
}

static void s_cmov(struct wave *w, const struct insn *i)
{
    if (!w->scc_known) {
        wave_fail(w, "SCC from what was never written");
    }
    if (w->scc) {
        s_mov(w, i);
    }
}

static void s_cselect(struct wave *w, const struct insn *i)
{
    uint64_t known, value = scalar_get(w, &i->src[w->scc ? 0 : 1], &known);
    scalar_set(w, &i->dst[0], value, w->scc_known ? known : 0);
}

#define FA as_float(a)
#define FB as_float(b)
#define FLOATS(NAME, VALUE) PLAIN(NAME, uint32_t, as_bits(VALUE))

/* a * b + c, rounded once. */
static void s_fma_f32(struct wave *w, const struct insn *i)
{
    uint64_t c_known;
    const uint32_t c = (uint32_t)scalar_get(w, &i->src[2], &c_known);
    ENTER(uint32_t)
    scalar_set(w, &i->dst[0], as_bits(fmaf(FA, FB, as_float(c))),
               all && (uint32_t)c_known == UINT32_MAX ? KNOWN : 0);
}

static void s_addc(struct wave *w, const struct insn *i)
{
    ENTER(uint32_t)
    uint64_t sum = i->op->arg ? (uint64_t)a - b - w->scc : (uint64_t)a + b + w->scc;
    scalar_set(w, &i->dst[0], (uint32_t)sum, all && w->scc_known ? KNOWN : 0);
    w->scc = (sum >> 32) != 0;
    w->scc_known = w->scc_known && all;
}

static uint64_t bit_field(uint64_t a, unsigned offset, unsigned width, bool is_signed,
                          unsigned bits)
{
    if (width == 0) {
        return 0;
    }
    uint64_t d = offset < bits ? a >> offset : 0;
    if (width < 64) {
        d &= (UINT64_C(1) << width) - 1;
    }
    if (is_signed && width < bits && (d >> (width - 1) & 1)) {
        d |= ~UINT64_C(0) << width;
    }
    return d;
}

/* A 64-bit value with a 32-bit second source. */
#define WIDE(NAME, T, VALUE)                                                                       \
    static void NAME(struct wave *w, const struct insn *i)                                         \
    {                                                                                              \
        uint64_t a_known, b_known;                                                                 \
        const T a = (T)scalar_get(w, &i->src[0], &a_known);                                        \
        const uint32_t b = (uint32_t)scalar_get(w, &i->src[1], &b_known);                          \
        const bool all = a_known == KNOWN && (uint32_t)b_known == UINT32_MAX;                      \
        const T d = (T)(VALUE);                                                                    \
        LEAVE(T, d)                                                                                \
        SCC(d != 0)                                                                                \
    }

/* Counts of a 32- or 64-bit source in a 32-bit result. */
#define COUNTS(NAME, T, VALUE)                                                                     \
    static void NAME(struct wave *w, const struct insn *i)                                         \
    {                                                                                              \
        ENTER(T)                                                                                   \
        const uint32_t d = (uint32_t)(VALUE);                                                      \
        LEAVE(uint32_t, d)                                                                         \
    }

#define COUNTS_FLAGGED(NAME, T, VALUE) FLAGGED(NAME, T, VALUE, d != 0)

#define COMPARE(NAME, T, VALUE)                                                                    \
    static void NAME(struct wave *w, const struct insn *i)                                         \
    {                                                                                              \
        ENTER(T)                                                                                   \
        SCC(VALUE)                                                                                 \
    }

/* A register with the immediate, of type K. */
#define COMPARE_K(NAME, T, K, VALUE)                                                               \
    static void NAME(struct wave *w, const struct insn *i)                                         \
    {                                                                                              \
        ENTER(T)                                                                                   \
        const T k = (T)(K)i->offset;                                                               \
        SCC(VALUE)                                                                                 \
    }

#define OP(FORM, NAME, TYPES, ...) FORM(NAME, __VA_ARGS__)
#define SAME(NAME, TYPES, OPERATION)
#define COMPARISON(NAME, T, K, SIGN)                                                               \
    COMPARE(s_cmp_##NAME, T, a SIGN b)                                                             \
    COMPARE_K(s_cmpk_##NAME, T, K, a SIGN k)
#include "scalar_list.h"

/* s_addk, s_mulk: the register and the immediate. */
static void s_addk(struct wave *w, const struct insn *i)
{
    uint64_t known;
    uint32_t a = (uint32_t)scalar_get(w, &i->dst[0], &known), b = (uint32_t)(int16_t)i->offset;
    uint32_t d = i->op->arg ? a * b : a + b;
    scalar_set(w, &i->dst[0], d, known);
    if (!i->op->arg) {
        w->scc = ((a ^ d) & (b ^ d)) >> 31;
        w->scc_known = (uint32_t)known == UINT32_MAX;
    }
}

static void s_bitset(struct wave *w, const struct insn *i)
{
    uint64_t known, bit_known, value = scalar_get(w, &i->dst[0], &known);
    uint64_t bit = UINT64_C(1) << (scalar_get(w, &i->src[0], &bit_known) & 63);
    scalar_set(w, &i->dst[0], i->op->arg ? value | bit : value & ~bit, known);
}

/* EXEC is kept in the destination and changed by the source. */
enum { SAVE_AND, SAVE_OR, SAVE_ANDN2, SAVE_ANDN1, SAVE_XOR, SAVE_ORN2 };

static void saveexec(struct wave *w, const struct insn *i)
{
    uint64_t known, a = mask_get(w, &i->src[0], &known), exec = exec_of(w);
    const uint64_t all = all_lanes(w);
    const uint64_t results[] = {a & exec, a | exec, a & ~exec, exec & ~a, a ^ exec, a | ~exec};
    const uint64_t decided[] = {~exec, exec, exec, ~exec, 0, 0}; /* by EXEC alone */
    const uint64_t d = results[i->op->arg];
    known |= decided[i->op->arg];
    if ((known & all) != all) {
        wave_fail(w, "EXEC from what was never written");
    }
    mask_set(w, &i->dst[0], exec, KNOWN);
    w->s64[REG_EXEC / 2] = d & all;
    w->scc = (d & all) != 0;
    w->scc_known = true;
}

static void s_branch(struct wave *w, const struct insn *i)
{
    w->pc = i->target;
}

enum { ON_SCC0, ON_SCC1, ON_VCCZ, ON_VCCNZ, ON_EXECZ, ON_EXECNZ };

static void s_cbranch(struct wave *w, const struct insn *i)
{
    static const struct operand vcc = {.kind = OPERAND_SCALAR, .reg = REG_VCC, .words = 2};
    uint64_t known = KNOWN, all = all_lanes(w), mask;
    bool taken;
    switch (i->op->arg) {
    case ON_SCC0:
    case ON_SCC1:
        known = w->scc_known ? KNOWN : 0;
        taken = w->scc == (i->op->arg == ON_SCC1);
        break;
    case ON_VCCZ:
    case ON_VCCNZ:
        mask = scalar_get(w, &vcc, &known) & all;
        known = (mask & known) != 0 ? KNOWN : known | ~all;
        taken = (mask == 0) == (i->op->arg == ON_VCCZ);
        break;
    default:
        taken = (exec_of(w) == 0) == (i->op->arg == ON_EXECZ);
        break;
    }
    if (known != KNOWN) {
        wave_fail(w, "a branch on what was never written");
    }
    w->pc = taken ? i->target : w->pc;
}

static void s_endpgm(struct wave *w, const struct insn *i)
{
    w->ended = true;
}

static void s_barrier(struct wave *w, const struct insn *i)
{
    w->waits = true;
}

/* gfx12's barrier in two steps. What a wave does between them is not ordered by it: LDS is refused
 * there (reach_lds). */
static void s_barrier_signal(struct wave *w, const struct insn *i)
{
    w->signalled = true;
}

static void s_barrier_wait(struct wave *w, const struct insn *i)
{
    if (!w->signalled) {
        wave_fail(w, "waits at a barrier that it has not signalled");
    }
    w->signalled = false;
    w->waits = true;
}

void run_nothing(struct wave *w, const struct insn *i)
{
}

static void unwanted(struct wave *w, const struct insn *i)
{
    wave_fail(w, "an instruction that no kernel of ours should have");
}

static void s_getpc(struct wave *w, const struct insn *i)
{
    scalar_set(w, &i->dst[0], i->address + 4, KNOWN);
}

static void jump_to(struct wave *w, uint64_t address, uint64_t known)
{
    uint64_t word = (address - w->code->text_begin) / 4;
    if (known != KNOWN || word >= w->code->text_bytes / 4 || w->code->insn_at[word] == UINT32_MAX) {
        wave_fail(w, "a jump to %#lx, where no code is", address);
        return;
    }
    w->pc = w->code->insn_at[word];
}

static void s_setpc(struct wave *w, const struct insn *i)
{
    uint64_t known, to = scalar_get(w, &i->src[0], &known);
    if (i->num_dst > 0) { /* s_swappc */
        scalar_set(w, &i->dst[0], i->address + 4, KNOWN);
    }
    jump_to(w, to, known);
}

#define S(NAME, TYPES, RUN, ARG)                                                                   \
    {                                                                                              \
#NAME, TYPES, RUN, NULL, 0, CLASS_SCALAR, ARG                                              \
    }
#define C(NAMES, TYPES, RUN, ARG)                                                                  \
    {                                                                                              \
        NAMES, TYPES, RUN, NULL, 0, CLASS_CONTROL, ARG                                             \
    }
#define BOTH(NAME, RUN) S(NAME##_b32, "S=SS", RUN##32, 0), S(NAME##_b64, "T=TT", RUN##64, 0)
#define SAVE(NAME, ARG)                                                                            \
    S(NAME##_saveexec_b64, "T=T", saveexec, ARG), S(NAME##_saveexec_b32, "S=S", saveexec, ARG)

#define OP(FORM, NAME, TYPES, ...) S(NAME, TYPES, NAME, 0),
#define SAME(NAME, TYPES, OPERATION) S(NAME, TYPES, OPERATION, 0),
#define COMPARISON(NAME, T, K, SIGN)                                                               \
    S(s_cmp_##NAME, "SS", s_cmp_##NAME, 0), S(s_cmpk_##NAME, "Si", s_cmpk_##NAME, 0),

static const struct op ops[] = {
#include "scalar_list.h"
    BOTH(s_and, s_and),
    BOTH(s_or, s_or),
    BOTH(s_xor, s_xor),
    BOTH(s_andn2, s_andn2),
    BOTH(s_and_not1, s_andn2),
    BOTH(s_orn2, s_orn2),
    BOTH(s_or_not1, s_orn2),
    BOTH(s_nand, s_nand),
    BOTH(s_nor, s_nor),
    BOTH(s_xnor, s_xnor),
    S(s_not_b32, "S=S", s_not32, 0),
    S(s_not_b64, "T=T", s_not64, 0),
    S(s_mov_b32, "S=S", s_mov, 0),
    S(s_mov_b64, "T=T", s_mov, 0),
    S(s_movk_i32, "S=i", s_movk, 0),
    S(s_cmov_b32, "S=S", s_cmov, 0),
    S(s_cmov_b64, "T=T", s_cmov, 0),
    S(s_cselect_b32, "S=SS", s_cselect, 0),
    S(s_cselect_b64, "T=TT", s_cselect, 0),
    S(s_addc_u32, "S=SS", s_addc, 0),
    S(s_subb_u32, "S=SS", s_addc, 1),
    S(s_add_co_ci_u32, "S=SS", s_addc, 0),
    S(s_sub_co_ci_u32, "S=SS", s_addc, 1),
    S(s_fmamk_f32, "S=SSS", s_fma_f32, 0),
    S(s_fmaak_f32, "S=SSS", s_fma_f32, 0),
    {"s_fmac_f32", "S=SS", s_fma_f32, NULL, OP_ACCUMULATES, CLASS_SCALAR, 0, 0},
    S(s_addk_i32, "S=i", s_addk, 0),
    S(s_mulk_i32, "S=i", s_addk, 1),
    S(s_bitset0_b32, "S=S", s_bitset, 0),
    S(s_bitset1_b32, "S=S", s_bitset, 1),
    S(s_bitset0_b64, "T=S", s_bitset, 0),
    S(s_bitset1_b64, "T=S", s_bitset, 1),
    SAVE(s_and, SAVE_AND),
    SAVE(s_or, SAVE_OR),
    SAVE(s_andn2, SAVE_ANDN2),
    SAVE(s_and_not1, SAVE_ANDN2),
    SAVE(s_andn1, SAVE_ANDN1),
    SAVE(s_and_not0, SAVE_ANDN1),
    SAVE(s_xor, SAVE_XOR),
    SAVE(s_orn2, SAVE_ORN2),
    SAVE(s_or_not1, SAVE_ORN2),
    C("s_branch", "i", s_branch, 0),
    C("s_cbranch_scc0", "i", s_cbranch, ON_SCC0),
    C("s_cbranch_scc1", "i", s_cbranch, ON_SCC1),
    C("s_cbranch_vccz", "i", s_cbranch, ON_VCCZ),
    C("s_cbranch_vccnz", "i", s_cbranch, ON_VCCNZ),
    C("s_cbranch_execz", "i", s_cbranch, ON_EXECZ),
    C("s_cbranch_execnz", "i", s_cbranch, ON_EXECNZ),
    C("s_endpgm", "*", s_endpgm, 0),
    C("s_barrier", "*", s_barrier, 0),
    C("s_barrier_signal", "*", s_barrier_signal, 0),
    C("s_barrier_wait", "*", s_barrier_wait, 0),
    C("s_getpc_b64", "T=", s_getpc, 0),
    C("s_setpc_b64", "T", s_setpc, 0),
    C("s_swappc_b64", "T=T", s_setpc, 0),
    /* Nothing to do: instructions run in order, and their hints and caches are not emulated. */
    C("s_waitcnt s_waitcnt_vscnt s_waitcnt_vmcnt s_waitcnt_lgkmcnt s_waitcnt_depctr "
      "s_wait_alu s_wait_kmcnt s_wait_loadcnt s_wait_storecnt s_wait_dscnt s_wait_expcnt "
      "s_wait_samplecnt s_wait_bvhcnt s_wait_loadcnt_dscnt s_wait_storecnt_dscnt "
      "s_wait_idle",
      "*", run_nothing, 0),
    C("s_setreg_imm32_b32 s_setreg_b32 s_nop s_sleep s_setprio s_delay_alu s_clause "
      "s_inst_prefetch s_set_inst_prefetch_distance s_sendmsg",
      "*", run_nothing, 0),
    C("global_wb global_inv global_wbinv s_icache_inv buffer_gl0_inv buffer_gl1_inv "
      "buffer_wbl2 buffer_inv buffer_wbinvl1 buffer_wbinvl1_vol s_dcache_wb",
      "*", run_nothing, 0),
    C("s_code_end s_trap", "*", unwanted, 0),
};

const struct op_table scalar_ops = {ops, sizeof ops / sizeof *ops};
