/* SPDX-License-Identifier: Apache-2.0 */
/* Matrix instructions, by the layouts of matrix_layouts.h. Products are exact in float32 and added
 * one by one along the depth. */
#include <math.h>
#include <string.h>

#include "isa.h"
#include "matrix_layouts.h"

#define MAX_SIDE 32
#define MAX_DEPTH 32

static float fnuz_number(uint8_t code, int mantissa_bits, int bias)
{
    int exponent = (code & 0x7f) >> mantissa_bits, mantissa = code & ((1 << mantissa_bits) - 1);
    if (code == 0x80) {
        return NAN;
    }
    float size = exponent == 0 ? ldexpf((float)mantissa, 1 - bias - mantissa_bits)
                               : ldexpf((float)(mantissa | 1 << mantissa_bits),
                                        exponent - bias - mantissa_bits);
    return code & 0x80 ? -size : size;
}

/* Element e of a lane's registers. */
static float element_of(const struct wave *w, unsigned reg, unsigned lane, unsigned e, int format)
{
    unsigned bytes = format == MATRIX_F32 ? 4 : format <= MATRIX_BF16 ? 2 : 1;
    unsigned at = e * bytes;
    uint32_t word = w->v[reg + at / 4][lane] >> (8 * (at % 4));
    switch (format) {
    case MATRIX_F32:
        return as_float(word);
    case MATRIX_F16:
        return half_to_float((uint16_t)word);
    case MATRIX_BF16:
        return as_float(word << 16);
    case MATRIX_I8:
        return (float)(int8_t)word;
    case MATRIX_E4M3_FNUZ:
        return fnuz_number((uint8_t)word, 3, 8);
    default:
        return fnuz_number((uint8_t)word, 2, 16);
    }
}

static bool sources_known(struct wave *w, const struct insn *i)
{
    uint64_t all = w->lanes == 64 ? ALL_LANES : UINT32_MAX;
    for (int n = 0; n < 3; n++) {
        for (int word = 0; i->src[n].kind == OPERAND_VECTOR && word < i->src[n].words; word++) {
            if ((w->v_known[i->src[n].reg + word] & all) != all) {
                return false;
            }
        }
    }
    return true;
}

/* The lane and register of D(i, j). */
static void place_of(const struct matrix_layout *m, unsigned i, unsigned j, unsigned *lane,
                     unsigned *reg)
{
    if (m->rdna != 0) {
        *lane = j + 16 * (m->rdna == 3 ? i % 2 : i / 8);
        *reg = m->rdna == 3 ? i / 2 : i % 8;
        return;
    }
    unsigned groups = 64u / m->columns;
    *lane = j + m->columns * (i / 4 % groups);
    *reg = i % 4 + 4 * (i / (4 * groups));
}

static void run_matrix(struct wave *w, const struct insn *i)
{
    const struct matrix_layout *m = &matrix_layouts[i->op->arg];
    static _Thread_local float a[MAX_SIDE][MAX_DEPTH], b[MAX_DEPTH][MAX_SIDE],
        d[MAX_SIDE][MAX_SIDE];
    uint64_t all = w->lanes == 64 ? ALL_LANES : UINT32_MAX;
    if (exec_of(w) != all) {
        wave_fail(w, "a matrix instruction where lanes are off");
        return;
    }
    bool known = sources_known(w, i);
    const unsigned groups = m->rdna == 3 ? 1 : w->lanes / m->rows;
    for (unsigned k = 0; k < m->depth; k++) {
        unsigned group = k / m->run % groups, e = k % m->run + k / (m->run * groups) * m->run;
        for (unsigned r = 0; r < m->rows; r++) {
            a[r][k] = element_of(w, i->src[0].reg, r + m->rows * group, e, m->a);
        }
        for (unsigned c = 0; c < m->columns; c++) {
            b[k][c] = element_of(w, i->src[1].reg, c + m->columns * group, e, m->b);
        }
    }
    const struct operand *add = &i->src[2];
    for (unsigned r = 0; r < m->rows; r++) {
        for (unsigned c = 0; c < m->columns; c++) {
            unsigned lane, reg;
            place_of(m, r, c, &lane, &reg);
            d[r][c] = add->kind == OPERAND_VECTOR ? as_float(w->v[add->reg + reg][lane])
                                                  : as_float((uint32_t)add->value);
        }
        for (unsigned k = 0; k < m->depth; k++) {
            for (unsigned c = 0; c < m->columns; c++) {
                d[r][c] += a[r][k] * b[k][c];
            }
        }
    }
    for (unsigned r = 0; r < m->rows; r++) {
        for (unsigned c = 0; c < m->columns; c++) {
            unsigned lane, reg;
            place_of(m, r, c, &lane, &reg);
            w->v[i->dst[0].reg + reg][lane] = as_bits(d[r][c]);
        }
    }
    for (int word = 0; word < i->dst[0].words; word++) {
        w->v_known[i->dst[0].reg + word] = known ? ALL_LANES : 0;
    }
}

/* Names stand in the layouts' table alone. */
static struct op ops[sizeof matrix_layouts / sizeof *matrix_layouts];

__attribute__((constructor)) static void name_ops(void)
{
    for (size_t n = 0; n < sizeof ops / sizeof *ops; n++) {
        const struct matrix_layout *m = &matrix_layouts[n];
        const struct op op = {.name = m->name,
                              .types = "n=nnn",
                              .run = run_matrix,
                              .unit = CLASS_MATRIX,
                              .arg = (int32_t)n,
                              .major = m->rdna != 0 ? (uint8_t)(m->rdna + 8) : 0};
        memcpy(&ops[n], &op, sizeof op);
    }
}

const struct op_table matrix_ops = {ops, sizeof ops / sizeof *ops};
