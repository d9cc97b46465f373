/* SPDX-License-Identifier: Apache-2.0 */
/* Matrix instructions, by the layouts of matrix_layouts.h. Products are exact in float32 and added
 * one by one along the depth. */
#include <math.h>
#include <string.h>

#include "isa.h"
#include "matrix_layouts.h"

#define MAX_SIDE 32
#define MAX_RUN 16 /* elements of a lane */

typedef float columns __attribute__((vector_size(64))); /* one row's */

static bool is_fnuz(int format)
{
    return format == MATRIX_E4M3_FNUZ || format == MATRIX_E5M2_FNUZ;
}

/* fnuz: 0x80 is the only NaN; e4m3: all ones is; e5m2: as IEEE has it. */
static float code_number(uint8_t code, int format)
{
    const bool fnuz = is_fnuz(format);
    const int mantissa_bits = format == MATRIX_E4M3_FNUZ || format == MATRIX_E4M3 ? 3 : 2;
    const int bias = (mantissa_bits == 3 ? 7 : 15) + fnuz;
    int exponent = (code & 0x7f) >> mantissa_bits, mantissa = code & ((1 << mantissa_bits) - 1);
    if (fnuz ? code == 0x80 : (code & 0x7f) > (format == MATRIX_E4M3 ? 0x7e : 0x7c)) {
        return NAN;
    }
    if (format == MATRIX_E5M2 && exponent == 31) {
        return code & 0x80 ? -INFINITY : INFINITY;
    }
    float size = exponent == 0 ? ldexpf((float)mantissa, 1 - bias - mantissa_bits)
                               : ldexpf((float)(mantissa | 1 << mantissa_bits),
                                        exponent - bias - mantissa_bits);
    return code & 0x80 ? -size : size;
}

/* The elements of all lanes' registers from `reg` on: element e of lane l to to[e][l]. */
static void widen(const struct wave *w, unsigned reg, unsigned count, int format,
                  float (*to)[LANES])
{
    const unsigned bytes = format == MATRIX_F32 ? 4 : format <= MATRIX_BF16 ? 2 : 1;
    for (unsigned e = 0; e < count; e++) {
        const unsigned shift = 8 * (e * bytes % 4);
        const uint32_t *from = w->v[reg + e * bytes / 4];
        for (unsigned l = 0; l < LANES && format == MATRIX_F32; l++) {
            to[e][l] = as_float(from[l]);
        }
        for (unsigned l = 0; l < LANES && format == MATRIX_F16; l++) {
            to[e][l] = half_to_float((uint16_t)(from[l] >> shift));
        }
        for (unsigned l = 0; l < LANES && format == MATRIX_BF16; l++) {
            to[e][l] = as_float(from[l] >> shift << 16);
        }
        for (unsigned l = 0; l < LANES && bytes == 1; l++) {
            uint8_t code = (uint8_t)(from[l] >> shift);
            to[e][l] = format == MATRIX_I8 ? (float)(int8_t)code : code_number(code, format);
        }
    }
}

static bool sources_known(struct wave *w, const struct insn *i)
{
    uint64_t all = all_lanes(w);
    for (int n = 0; n < 3; n++) {
        for (int word = 0; i->src[n].kind == OPERAND_VECTOR && word < i->src[n].words; word++) {
            if ((w->v_known[i->src[n].reg + word] & all) != all) {
                return false;
            }
        }
    }
    return true;
}

/* The first lane and the register of D's row i, whose columns have neighbouring lanes. */
static uint32_t *row_of(struct wave *w, const struct matrix_layout *m, unsigned first, unsigned i)
{
    if (m->rdna != 0) {
        return &w->v[first + (m->rdna == 3 ? i / 2 : i % 8)][16 * (m->rdna == 3 ? i % 2 : i / 8)];
    }
    unsigned groups = 64u / m->columns;
    return &w->v[first + i % 4 + 4 * (i / (4 * groups))][m->columns * (i / 4 % groups)];
}

static void run_matrix(struct wave *w, const struct insn *i)
{
    const struct matrix_layout *m = &matrix_layouts[i->op->arg];
    _Alignas(64) float a[MAX_RUN][LANES], b[MAX_RUN][LANES];
    columns d[MAX_SIDE][MAX_SIDE / 16]; /* registers of C may be others' of D */
    if (exec_of(w) != all_lanes(w)) {
        wave_fail(w, "a matrix instruction where lanes are off");
        return;
    }
    const bool known = sources_known(w, i);
    const unsigned groups = m->rdna == 3 ? 1 : w->lanes / m->rows;
    const struct operand *add = &i->src[2];
    const int ocp = w->code->fnuz ? 0 : MATRIX_E4M3 - MATRIX_E4M3_FNUZ;
    widen(w, i->src[0].reg, m->depth / groups, m->a + (is_fnuz(m->a) ? ocp : 0), a);
    widen(w, i->src[1].reg, m->depth / groups, m->b + (is_fnuz(m->b) ? ocp : 0), b);
    for (unsigned r = 0; r < m->rows; r++) {
        for (unsigned c = 0; c < m->columns; c += 16) {
            columns sums = (columns){0} + as_float((uint32_t)add->value);
            if (add->kind == OPERAND_VECTOR) {
                memcpy(&sums, row_of(w, m, add->reg, r) + c, sizeof sums);
            }
            for (unsigned k = 0; k < m->depth; k += m->run) {
                const unsigned group = k / m->run % groups, first = k / (m->run * groups) * m->run;
                for (unsigned e = first; e < first + m->run; e++) {
                    columns y;
                    memcpy(&y, &b[e][m->columns * group + c], sizeof y);
                    sums += a[e][r + m->rows * group] * y;
                }
            }
            d[r][c / 16] = sums;
        }
    }
    for (unsigned r = 0; r < m->rows; r++) {
        memcpy(row_of(w, m, i->dst[0].reg, r), d[r], m->columns * sizeof(float));
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
