/* SPDX-License-Identifier: Apache-2.0 */
/* Vector operations without modifiers, DPP and SDWA, which is most of them: sources are taken where
 * they lie, and the result is written there, too, where all lanes are on. What run_lanes does for
 * all of them, in the same order. */
#include <string.h>

#include "isa.h"

static inline const uint32_t *fetch(struct wave *w, const struct insn *i, int n, uint32_t *room,
                                    uint64_t *known)
{
    const struct operand *o = &i->src[n];
    uint64_t own;
    switch (o->fetch) {
    case FETCH_VECTOR:
        *known &= w->v_known[o->reg];
        return w->v[o->reg];
    case FETCH_PAIR:
        *known &= w->v_known[o->reg] & w->v_known[o->reg + 1];
        return w->v[o->reg];
    case FETCH_CONSTANT:
        return o->lanes;
    case FETCH_SCALAR:
        *known &= w->s_known[o->reg] == UINT32_MAX ? ALL_LANES : 0;
        for (int l = 0; l < LANES; l++) {
            room[l] = w->s[o->reg];
        }
        return room;
    default: {
        const uint32_t *lanes = source_lanes(w, i, n, room, &own);
        *known &= own;
        return lanes;
    }
    }
}

/* SOURCES of them, results of WORDS words. */
static inline __attribute__((always_inline)) void run_plain(struct wave *w, const struct insn *i,
                                                            int sources, int words)
{
    _Alignas(64) uint32_t rooms[3][2 * LANES], d[2 * LANES];
    uint64_t known = ALL_LANES, exec = exec_of(w);
    const uint32_t *x[3] = {NULL, NULL, NULL};
    for (int n = 0; n < sources; n++) {
        x[n] = fetch(w, i, n, rooms[n], &known);
    }
    unsigned reg = i->dst[0].reg;
    if ((exec & all_lanes(w)) == all_lanes(w) && i->direct) {
        i->lanes(w->v[reg], x[0], x[1], x[2], w->lanes);
        for (int n = 0; n < words; n++) {
            w->v_known[reg + (unsigned)n] = known;
        }
        return;
    }
    i->lanes(d, x[0], x[1], x[2], w->lanes);
    for (int n = 0; n < words; n++) {
        write_lanes(w, &i->dst[0], n, d + n * LANES, known, exec);
    }
}

#define PLAIN(SOURCES, WORDS)                                                                      \
    static void run_##SOURCES##_to_##WORDS(struct wave *w, const struct insn *i)                   \
    {                                                                                              \
        run_plain(w, i, SOURCES, WORDS);                                                           \
    }
PLAIN(1, 1)
PLAIN(2, 1)
PLAIN(3, 1)
PLAIN(1, 2)
PLAIN(2, 2)
PLAIN(3, 2)

/* v_cndmask_b32: each lane takes what the mask says, and is known as that is. */
static void run_select(struct wave *w, const struct insn *i)
{
    _Alignas(64) uint32_t rooms[2][2 * LANES], d[LANES], chosen[LANES];
    uint64_t a_known = ALL_LANES, b_known = ALL_LANES, mask_known;
    const uint32_t *a = fetch(w, i, 0, rooms[0], &a_known);
    const uint32_t *b = fetch(w, i, 1, rooms[1], &b_known);
    uint64_t mask = mask_get(w, &i->src[2], &mask_known);
    spread_mask(mask, chosen, UINT32_MAX);
    for (unsigned l = 0; l < LANES; l++) {
        d[l] = (b[l] & chosen[l]) | (a[l] & ~chosen[l]);
    }
    write_lanes(w, &i->dst[0], 0, d, mask_known & ((a_known & ~mask) | (b_known & mask)),
                exec_of(w));
}

/* v_cmp: lanes that are off give 0. */
static void run_compare(struct wave *w, const struct insn *i)
{
    _Alignas(64) uint32_t rooms[2][2 * LANES], d[LANES];
    uint64_t known = ALL_LANES, exec = exec_of(w);
    const uint32_t *a = fetch(w, i, 0, rooms[0], &known);
    const uint32_t *b = fetch(w, i, 1, rooms[1], &known);
    i->lanes(d, a, b, NULL, w->lanes);
    mask_set(w, &i->dst[0], mask_of_lanes(d, w->lanes) & exec, known | ~exec);
}

static void choose_fetch(struct operand *o)
{
    int words = words_of_type(o->type);
    if (o->type == 'M' || o->mods != 0) {
        return;
    }
    if (o->kind == OPERAND_VECTOR) {
        o->fetch = words == 2 ? FETCH_PAIR : FETCH_VECTOR;
    } else if (o->kind == OPERAND_CONSTANT) {
        o->fetch = FETCH_CONSTANT;
    } else if (words == 1 && o->words == 1 && o->reg != REG_SCC) {
        o->fetch = FETCH_SCALAR;
    }
}

static bool overlaps(const struct operand *o, unsigned first, unsigned words)
{
    unsigned own = (unsigned)words_of_type(o->type);
    return o->kind == OPERAND_VECTOR && o->reg < first + words && first < o->reg + own;
}

/* Words of a result come apart, so that a source in their place would be read too late. */
static bool is_direct(const struct insn *i, int words)
{
    for (int n = 0; n < i->num_src && words > 1; n++) {
        if (overlaps(&i->src[n], i->dst[0].reg, (unsigned)words)) {
            return false;
        }
    }
    return true;
}

void insn_specialise(struct insn *i)
{
    static insn_run *const runs[2][3] = {{run_1_to_1, run_2_to_1, run_3_to_1},
                                         {run_1_to_2, run_2_to_2, run_3_to_2}};
    if (i->run != run_lanes || (i->flags & (INSN_CLAMP | INSN_DPP | INSN_SDWA)) || i->omod != 0 ||
        i->op_sel != 0 || i->op_sel_hi != 0xff || (i->neg_lo | i->neg_hi) != 0 ||
        (i->op->flags & OP_TO_EXEC) || i->num_src < 1 || i->num_src > 3) {
        return;
    }
    for (int n = 0; n < i->num_src; n++) {
        choose_fetch(&i->src[n]);
    }
    char type = i->num_dst > 0 ? i->dst[0].type : '\0';
    if (i->op->flags & OP_COMPARES) {
        i->run = i->num_src == 2 && type == 'M' ? run_compare : i->run;
    } else if (i->op->flags & OP_SELECTS) {
        i->run = i->num_src == 3 && type == 'U' ? run_select : i->run;
    } else if (type != '\0' && strchr("FUPpDLQ", type) != NULL) {
        i->direct = is_direct(i, words_of_type(type));
        i->run = runs[words_of_type(type) - 1][i->num_src - 1];
    }
}
