/* SPDX-License-Identifier: Apache-2.0 */
/* Scalar, global, flat and LDS accesses, each checked: that memory is there, that what an address
 * or a stored value is made of was written, and that no two waves touch a byte of LDS between
 * barriers if one writes it. */
#include <stdlib.h>
#include <string.h>

#include "isa.h"

enum access {
    BYTES = 31,
    SIGNED = 32,
    LOW16 = 64,   /* into the low half, the other is kept */
    HIGH16 = 128, /* into or from the high half */
    FLAT = 256,
    TWO = 512, /* two places of a lane, offsets in elements */
    FAR = 1024 /* with TWO: offsets are in units of 64 elements */
};

/* ---- regions ---- */

static uint32_t region_before(const struct machine *m, uint64_t address)
{
    uint32_t low = 0, high = m->num_regions;
    while (low < high) {
        uint32_t middle = (low + high) / 2;
        if (m->regions[middle].begin <= address) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low;
}

bool machine_allow(struct machine *m, const void *begin, size_t bytes, bool writable)
{
    if (m->num_regions == m->room) {
        uint32_t room = m->room * 2 + 64;
        struct region *more = realloc(m->regions, room * sizeof *more);
        if (more == NULL) {
            return false;
        }
        m->regions = more;
        m->room = room;
    }
    uint32_t at = region_before(m, (uint64_t)begin);
    memmove(m->regions + at + 1, m->regions + at, (m->num_regions - at) * sizeof *m->regions);
    m->regions[at] = (struct region){(uint64_t)begin, (uint64_t)begin + bytes, writable};
    m->num_regions++;
    return true;
}

void machine_forbid(struct machine *m, const void *begin)
{
    uint32_t at = region_before(m, (uint64_t)begin);
    if (at > 0 && m->regions[at - 1].begin == (uint64_t)begin) {
        memmove(m->regions + at - 1, m->regions + at, (m->num_regions - at) * sizeof *m->regions);
        m->num_regions--;
    }
    m->last_region = 0;
}

const struct region *machine_region(struct machine *m, uint64_t address)
{
    if (m->last_region < m->num_regions && address >= m->regions[m->last_region].begin &&
        address < m->regions[m->last_region].end) {
        return &m->regions[m->last_region];
    }
    uint32_t at = region_before(m, address);
    if (at == 0 || address >= m->regions[at - 1].end) {
        return NULL;
    }
    m->last_region = at - 1;
    return &m->regions[at - 1];
}

/* The memory at an address, of which there is always some; NULL and an error if it is not there. */
static char *reach(struct wave *w, uint64_t address, unsigned bytes, bool writes)
{
    const struct region *r = machine_region(w->group->machine, address);
    if (r == NULL || address + bytes > r->end || (writes && !r->writable)) {
        const struct machine *m = w->group->machine;
        uint32_t before = region_before(m, address);
        const struct region *near = before > 0 ? &m->regions[before - 1] : &m->regions[0];
        wave_fail(w, "%s %u bytes at %#lx, %ld bytes into the nearest memory, %lu bytes%s",
                  writes ? "writes" : "reads", bytes, address, (long)(address - near->begin),
                  near->end - near->begin, near->writable ? "" : " to read only");
        return NULL;
    }
    return (char *)address;
}

/* ---- LDS ---- */

static char *reach_lds(struct wave *w, uint32_t address, unsigned bytes, bool writes, bool *known)
{
    struct group *g = w->group;
    uint32_t me = 1u << w->index;
    *known = true;
    if (w->signalled) {
        wave_fail(w, "LDS between a barrier's signal and its wait");
        return NULL;
    }
    if ((uint64_t)address + bytes > g->lds_bytes) {
        wave_fail(w, "%s %u bytes of LDS at %u; it has %u", writes ? "writes" : "reads", bytes,
                  address, g->lds_bytes);
        return NULL;
    }
    for (uint32_t word = address / 4; word <= (address + bytes - 1) / 4; word++) {
        struct lds_mark *mark = &g->marks[word];
        uint32_t low = word * 4 < address ? address - word * 4 : 0;
        uint32_t high = word * 4 + 4 > address + bytes ? address + bytes - word * 4 : 4;
        uint8_t mask = (uint8_t)((1u << high) - (1u << low));
        if (mark->epoch != g->epoch) {
            mark->epoch = g->epoch;
            mark->writers = mark->readers = 0;
            mark->written = mark->read = 0;
        }
        bool meets_writer = (mark->writers & ~me) != 0 && (mark->written & mask) != 0;
        bool meets_reader = writes && (mark->readers & ~me) != 0 && (mark->read & mask) != 0;
        if (meets_writer || meets_reader) {
            wave_fail(w, "%s LDS at %u, which wave %d %s since the last barrier",
                      writes ? "writes" : "reads", address,
                      __builtin_ctz((meets_writer ? mark->writers : mark->readers) & ~me),
                      meets_writer ? "wrote" : "read");
            return NULL;
        }
        if (writes) {
            mark->writers |= me;
            mark->written |= mask;
            mark->known |= mask;
        } else {
            mark->readers |= me;
            mark->read |= mask;
            *known = *known && (mark->known & mask) == mask;
        }
    }
    return (char *)g->lds + address;
}

/* ---- lanes ---- */

static unsigned words_in(int32_t access)
{
    return ((unsigned)(access & BYTES) + 3) / 4;
}

/* What a register becomes of the 8 or 16 bits that were read. */
static inline uint32_t taken_part(uint32_t x, int32_t access, uint32_t old)
{
    uint32_t shift = 32 - 8 * (uint32_t)(access & BYTES);
    x = access & SIGNED ? (uint32_t)((int32_t)(x << shift) >> shift) : x;
    x = access & LOW16 ? (x & 0xffff) | (old & 0xffff0000) : x;
    return access & HIGH16 ? x << 16 | (old & 0xffff) : x;
}

static void take_lane(struct wave *w, const struct operand *dst, unsigned lane, int32_t access,
                      const char *from, bool known)
{
    unsigned bytes = (unsigned)(access & BYTES);
    uint64_t bit = UINT64_C(1) << lane;
    for (unsigned n = 0; n < words_in(access); n++) {
        uint32_t *to = &w->v[dst->reg + n][lane], x = 0;
        memcpy(&x, from + 4 * n, bytes < 4 ? bytes : 4);
        *to = bytes < 4 ? taken_part(x, access, *to) : x;
        w->v_known[dst->reg + n] = (w->v_known[dst->reg + n] & ~bit) | (known ? bit : 0);
    }
}

static void give_lane(struct wave *w, const struct operand *src, unsigned lane, int32_t access,
                      char *to)
{
    unsigned bytes = (unsigned)(access & BYTES);
    if (bytes < 4) {
        uint32_t x = w->v[src->reg][lane] >> (access & HIGH16 ? 16 : 0);
        memcpy(to, &x, bytes);
        return;
    }
    for (unsigned n = 0; n < bytes / 4; n++) {
        memcpy(to + 4 * n, &w->v[src->reg + n][lane], 4);
    }
}

/* Whether what is stored was written. */
static bool all_known(struct wave *w, const struct operand *src, int32_t access)
{
    uint64_t known = ALL_LANES, exec = exec_of(w);
    for (unsigned n = 0; n < words_in(access); n++) {
        known &= w->v_known[src->reg + n];
    }
    if ((exec & ~known) != 0) {
        wave_fail(w, "lane %d stores what was never written", __builtin_ctzll(exec & ~known));
        return false;
    }
    return true;
}

/* The addresses of lanes; false: some were never written. */
static bool enter_addresses(struct wave *w, const struct insn *i, uint64_t at[LANES])
{
    const struct operand *v = &i->src[0], *base = &i->src[i->num_src - 1];
    bool scalar = !(i->op->arg & FLAT) && !(i->flags & INSN_OFF);
    uint64_t known = w->v_known[v->reg], exec = exec_of(w), scalar_known = UINT64_MAX, from = 0;
    if (scalar) {
        from = scalar_get(w, base, &scalar_known);
    } else {
        known &= w->v_known[v->reg + 1];
    }
    if (scalar_known != UINT64_MAX || (exec & ~known) != 0) {
        wave_fail(w, "an address of what was never written");
        return false;
    }
    for (unsigned l = 0; l < w->lanes; l++) {
        uint64_t own =
            scalar ? w->v[v->reg][l] : w->v[v->reg][l] | (uint64_t)w->v[v->reg + 1][l] << 32;
        at[l] = from + own + (uint64_t)(int64_t)i->offset;
    }
    return true;
}

static char *reach_lane(struct wave *w, const struct insn *i, uint64_t address, bool writes,
                        bool *known)
{
    const struct machine *m = w->group->machine;
    const struct region *last = &m->regions[m->last_region];
    unsigned bytes = (unsigned)(i->op->arg & BYTES);
    *known = true;
    if (m->last_region < m->num_regions && address >= last->begin && address + bytes <= last->end &&
        (!writes || last->writable)) {
        return (char *)address;
    }
    if ((i->op->arg & FLAT) && address >> 32 == SHARED_APERTURE) {
        return reach_lds(w, (uint32_t)address, bytes, writes, known);
    }
    return reach(w, address, bytes, writes);
}

/* Lanes that are off take the place of one that is on. The range of all, and whether one region has
 * it. */
static bool in_one_region(struct wave *w, const struct insn *i, uint64_t at[LANES], bool writes)
{
    struct machine *m = w->group->machine;
    uint64_t exec = exec_of(w), first = at[__builtin_ctzll(exec)], low = first, high = first;
    for (unsigned l = 0; l < w->lanes; l++) {
        at[l] = exec >> l & 1 ? at[l] : first;
    }
    for (unsigned l = 0; l < w->lanes; l++) {
        low = at[l] < low ? at[l] : low;
        high = at[l] > high ? at[l] : high;
    }
    const struct region *r = machine_region(m, low);
    return r != NULL && high + (unsigned)(i->op->arg & BYTES) <= r->end && (!writes || r->writable);
}

/* What lanes read where nothing can go wrong any more. */
static void load_lanes(struct wave *w, const struct insn *i, const uint64_t at[LANES])
{
    _Alignas(64) uint32_t d[4][LANES];
    unsigned bytes = (unsigned)(i->op->arg & BYTES), words = words_in(i->op->arg);
    const struct operand *dst = &i->dst[0];
    for (unsigned l = 0; l < w->lanes; l++) {
        const char *from = (const char *)at[l];
        switch (bytes) {
        case 1:
            d[0][l] = *(const uint8_t *)from;
            break;
        case 2:
            d[0][l] = 0;
            memcpy(&d[0][l], from, 2);
            break;
        default:
            for (unsigned n = 0; n < words; n++) {
                memcpy(&d[n][l], from + 4 * n, 4);
            }
        }
    }
    const uint32_t *old = w->v[dst->reg];
    for (unsigned l = 0; l < w->lanes && bytes < 4; l++) {
        d[0][l] = taken_part(d[0][l], i->op->arg, old[l]);
    }
    for (unsigned n = 0; n < words; n++) {
        write_lanes(w, dst, (int)n, d[n], ALL_LANES, exec_of(w));
    }
}

static void run_load(struct wave *w, const struct insn *i)
{
    uint64_t at[LANES], exec = exec_of(w);
    if (exec == 0 || !enter_addresses(w, i, at)) {
        return;
    }
    w->group->machine->bytes_read +=
        (uint64_t)__builtin_popcountll(exec) * (unsigned)(i->op->arg & BYTES);
    if (in_one_region(w, i, at, false)) {
        load_lanes(w, i, at);
        return;
    }
    for (uint64_t left = exec; left != 0; left &= left - 1) {
        unsigned l = (unsigned)__builtin_ctzll(left);
        bool known;
        const char *from = reach_lane(w, i, at[l], false, &known);
        if (from == NULL) {
            return;
        }
        take_lane(w, &i->dst[0], l, i->op->arg, from, known);
    }
}

static void run_store(struct wave *w, const struct insn *i)
{
    uint64_t at[LANES], exec = exec_of(w);
    if (exec == 0 || !enter_addresses(w, i, at) || !all_known(w, &i->src[1], i->op->arg)) {
        return;
    }
    w->group->machine->bytes_written +=
        (uint64_t)__builtin_popcountll(exec) * (unsigned)(i->op->arg & BYTES);
    for (uint64_t left = exec; left != 0; left &= left - 1) {
        unsigned l = (unsigned)__builtin_ctzll(left);
        bool known;
        char *to = reach_lane(w, i, at[l], true, &known);
        if (to == NULL) {
            return;
        }
        give_lane(w, &i->src[1], l, i->op->arg, to);
    }
}

/* ---- atomics ---- */

enum atomic { ADD, SUB, SWAP, AND, OR, XOR, SMAX, SMIN, UMAX, UMIN, INC, CMPSWAP, ADD_F32 };
#define ATOMIC(KIND, BYTES_OF_IT) ((KIND) << 16 | (BYTES_OF_IT))

static uint64_t combined(enum atomic kind, uint64_t old, uint64_t x, uint64_t compared, bool wide)
{
    int64_t so = wide ? (int64_t)old : (int32_t)old, sx = wide ? (int64_t)x : (int32_t)x;
    const uint64_t results[] = {[ADD] = old + x,
                                [SUB] = old - x,
                                [SWAP] = x,
                                [AND] = old & x,
                                [OR] = old | x,
                                [XOR] = old ^ x,
                                [SMAX] = so > sx ? old : x,
                                [SMIN] = so < sx ? old : x,
                                [UMAX] = old > x ? old : x,
                                [UMIN] = old < x ? old : x,
                                [INC] = old >= x ? 0 : old + 1,
                                [CMPSWAP] = old == compared ? x : old,
                                [ADD_F32] =
                                    as_bits(as_float((uint32_t)old) + as_float((uint32_t)x))};
    return results[kind];
}

/* One lane's turn at `to`; the old value goes to the destination if it is wanted. */
static void run_atomic_lane(struct wave *w, const struct insn *i, const struct operand *data,
                            unsigned l, char *to)
{
    enum atomic kind = (enum atomic)(i->op->arg >> 16);
    unsigned bytes = (unsigned)(i->op->arg & BYTES), words = bytes / 4;
    uint64_t old = 0, x = 0, compared = 0;
    memcpy(&old, to, bytes);
    for (unsigned n = 0; n < words; n++) {
        x |= (uint64_t)w->v[data->reg + n][l] << (32 * n);
        if (kind == CMPSWAP) {
            compared |= (uint64_t)w->v[data->reg + words + n][l] << (32 * n);
        }
    }
    uint64_t now = combined(kind, old, x, compared, words == 2);
    memcpy(to, &now, bytes);
    if (i->num_dst > 0) {
        take_lane(w, &i->dst[0], l, (int32_t)bytes, (const char *)&old, true);
    }
}

static void run_atomic(struct wave *w, const struct insn *i)
{
    uint64_t at[LANES], exec = exec_of(w);
    if (exec == 0 || !enter_addresses(w, i, at) || !all_known(w, &i->src[1], i->op->arg & BYTES)) {
        return;
    }
    for (uint64_t left = exec; left != 0; left &= left - 1) {
        unsigned l = (unsigned)__builtin_ctzll(left);
        char *to = reach(w, at[l], (unsigned)(i->op->arg & BYTES), true);
        if (to == NULL) {
            return;
        }
        run_atomic_lane(w, i, &i->src[1], l, to);
    }
}

/* ---- LDS instructions ---- */

static bool enter_lds(struct wave *w, const struct insn *i, uint32_t *room, const uint32_t **at)
{
    uint64_t known;
    *at = source_lanes(w, i, 0, room, &known);
    if ((exec_of(w) & ~known) != 0) {
        wave_fail(w, "an address of LDS of what was never written");
        return false;
    }
    return true;
}

/* Loads and stores of one or two places of a lane; arg: access. */
static void run_ds(struct wave *w, const struct insn *i)
{
    _Alignas(64) uint32_t room[2 * LANES];
    const uint32_t *at;
    const int32_t access = i->op->arg;
    unsigned bytes = (unsigned)(access & BYTES), sides = access & TWO ? 2 : 1;
    uint32_t unit = access & TWO ? bytes * (access & FAR ? 64 : 1) : 1;
    uint32_t copy[LANES]; /* the destination may be the address */
    bool writes = i->num_dst == 0;
    if (exec_of(w) == 0 || !enter_lds(w, i, room, &at)) {
        return;
    }
    for (unsigned side = 0; side < sides && writes; side++) {
        if (!all_known(w, &i->src[1 + side], access)) {
            return;
        }
    }
    memcpy(copy, at, sizeof copy);
    w->group->machine->lds_bytes += (uint64_t)__builtin_popcountll(exec_of(w)) * bytes * sides;
    for (unsigned side = 0; side < sides; side++) {
        struct operand data = writes ? i->src[1 + side] : i->dst[0];
        uint32_t offset = (uint32_t)(side ? i->offset1 : i->offset) * unit;
        data.reg = (uint16_t)(data.reg + (!writes && side ? bytes / 4 : 0));
        for (uint64_t left = exec_of(w); left != 0; left &= left - 1) {
            unsigned l = (unsigned)__builtin_ctzll(left);
            bool known;
            char *place = reach_lds(w, copy[l] + offset, bytes, writes, &known);
            if (place == NULL) {
                return;
            }
            if (writes) {
                give_lane(w, &data, l, access, place);
            } else {
                take_lane(w, &data, l, access, place, known);
            }
        }
    }
}

static void run_ds_atomic(struct wave *w, const struct insn *i)
{
    _Alignas(64) uint32_t room[2 * LANES];
    const uint32_t *at;
    unsigned bytes = (unsigned)(i->op->arg & BYTES);
    if (exec_of(w) == 0 || !enter_lds(w, i, room, &at)) {
        return;
    }
    for (uint64_t left = exec_of(w); left != 0; left &= left - 1) {
        unsigned l = (unsigned)__builtin_ctzll(left);
        bool known;
        if (at[l] + (uint32_t)i->offset + bytes > w->group->lds_bytes) {
            wave_fail(w, "an atomic at %u of LDS", at[l]);
            return;
        }
        /* atomics of several waves do not race */
        struct lds_mark *mark = &w->group->marks[(at[l] + (uint32_t)i->offset) / 4];
        known = (mark->known & 15) == 15;
        if (!known) {
            wave_fail(w, "an atomic on LDS that was never written");
            return;
        }
        run_atomic_lane(w, i, &i->src[1], l, (char *)w->group->lds + at[l] + (uint32_t)i->offset);
    }
}

/* Through LDS's crossbar, no memory: a lane reads lane (address / 4); one that is off reads 0. */
static void run_bpermute(struct wave *w, const struct insn *i)
{
    _Alignas(64) uint32_t rooms[2][2 * LANES], d[LANES];
    uint64_t at_known, known, d_known = 0, exec = exec_of(w);
    const uint32_t *at = source_lanes(w, i, 0, rooms[0], &at_known);
    const uint32_t *from = source_lanes(w, i, 1, rooms[1], &known);
    for (unsigned l = 0; l < w->lanes; l++) {
        unsigned source = (at[l] + (uint32_t)i->offset) / 4 & (w->lanes - 1);
        bool on = exec >> source & 1;
        d[l] = on ? from[source] : 0;
        d_known |= (uint64_t)((on ? known >> source & 1 : 1) & (at_known >> l)) << l;
    }
    write_lanes(w, &i->dst[0], 0, d, d_known, exec);
}

static void run_permute(struct wave *w, const struct insn *i)
{
    _Alignas(64) uint32_t rooms[2][2 * LANES], d[LANES] = {0};
    uint64_t at_known, known, d_known = ALL_LANES, exec = exec_of(w);
    const uint32_t *at = source_lanes(w, i, 0, rooms[0], &at_known);
    const uint32_t *from = source_lanes(w, i, 1, rooms[1], &known);
    for (unsigned l = 0; l < w->lanes; l++) {
        if (exec >> l & 1) {
            d[(at[l] + (uint32_t)i->offset) / 4 & (w->lanes - 1)] = from[l];
        }
    }
    if ((exec & ~(known & at_known)) != 0) {
        d_known = 0;
    }
    write_lanes(w, &i->dst[0], 0, d, d_known, exec);
}

static void run_swizzle(struct wave *w, const struct insn *i)
{
    _Alignas(64) uint32_t room[2 * LANES], d[LANES];
    uint64_t known, d_known = 0, exec = exec_of(w);
    const uint32_t *from = source_lanes(w, i, 0, room, &known);
    unsigned pattern = (unsigned)i->offset;
    for (unsigned l = 0; l < w->lanes; l++) {
        unsigned source;
        if (pattern & 0x8000) {
            source = (l & ~3u) | (pattern >> (2 * (l & 3)) & 3);
        } else {
            unsigned in = l & 31;
            in = ((in & (pattern & 31)) | (pattern >> 5 & 31)) ^ (pattern >> 10 & 31);
            source = (l & ~31u) | in;
        }
        bool on = exec >> source & 1;
        d[l] = on ? from[source] : 0;
        d_known |= (uint64_t)(on ? known >> source & 1 : 1) << l;
    }
    write_lanes(w, &i->dst[0], 0, d, d_known, exec);
}

/* ---- scalar ---- */

static void run_s_load(struct wave *w, const struct insn *i)
{
    uint64_t known, offset_known, base = scalar_get(w, &i->src[0], &known);
    uint64_t offset = scalar_get(w, &i->src[1], &offset_known);
    if (i->src[1].kind == OPERAND_SCALAR) {
        offset = i->src[1].reg == REG_NULL ? 0 : (uint32_t)offset;
        offset_known = i->src[1].reg == REG_NULL ? UINT64_MAX : offset_known;
    }
    if (known != UINT64_MAX || (uint32_t)offset_known != UINT32_MAX) {
        wave_fail(w, "an address of what was never written");
        return;
    }
    unsigned words = (unsigned)i->op->arg;
    const char *from =
        reach(w, (base + offset + (uint64_t)(int64_t)i->offset) & ~UINT64_C(3), words * 4, false);
    if (from != NULL) {
        memcpy(&w->s[i->dst[0].reg], from, words * 4);
        memset(&w->s_known[i->dst[0].reg], 0xff, words * 4);
        w->group->machine->bytes_read += words * 4;
    }
}

#define S(NAME, WORDS)                                                                             \
    {                                                                                              \
#NAME, "n=TS", run_s_load, NULL, 0, CLASS_SCALAR_MEMORY, WORDS                             \
    }
#define LOAD(NAME, ARG)                                                                            \
    {"global_load_" NAME, "n=Ao", run_load, NULL, 0, CLASS_VECTOR_MEMORY, ARG},                    \
    {                                                                                              \
        "flat_load_" NAME, "n=A", run_load, NULL, 0, CLASS_VECTOR_MEMORY, (ARG) | FLAT             \
    }
#define STORE(NAME, ARG)                                                                           \
    {"global_store_" NAME, "Ano", run_store, NULL, 0, CLASS_VECTOR_MEMORY, ARG},                   \
    {                                                                                              \
        "flat_store_" NAME, "An", run_store, NULL, 0, CLASS_VECTOR_MEMORY, (ARG) | FLAT            \
    }
#define ATOM(NAMES, KIND, SIZE)                                                                    \
    {                                                                                              \
        NAMES, "rAno", run_atomic, NULL, 0, CLASS_VECTOR_MEMORY, ATOMIC(KIND, SIZE)                \
    }
#define DS(NAME, TYPES, RUN, ARG)                                                                  \
    {                                                                                              \
        "ds_" NAME, TYPES, RUN, NULL, 0, CLASS_LDS, ARG                                            \
    }

/* Loads' and stores' sizes, and halves of a register, by gfx9's names and later ones. */
#define SIZES(OP)                                                                                  \
    OP("u8", 1), OP("i8", 1 | SIGNED), OP("u16", 2), OP("i16", 2 | SIGNED), OP("b32", 4),          \
        OP("b64", 8), OP("b96", 12), OP("b128", 16)
#define STORED_SIZES(OP)                                                                           \
    OP("b8", 1), OP("b16", 2), OP("b32", 4), OP("b64", 8), OP("b96", 12), OP("b128", 16)
#define HALF(OP, NAME, LATER, ARG) OP(NAME, ARG), OP(LATER, ARG)
#define DS_LOAD(NAME, ARG) DS("load_" NAME, "n=U", run_ds, ARG)
#define DS_STORE(NAME, ARG) DS("store_" NAME, "Un", run_ds, ARG)
#define DS_TWO(NAME, ARG)                                                                          \
    DS("load_2addr_" NAME, "n=U", run_ds, (ARG) | TWO),                                            \
        DS("store_2addr_" NAME, "Unn", run_ds, (ARG) | TWO)

static const struct op ops[] = {
    S(s_load_b32, 1),
    S(s_load_b64, 2),
    S(s_load_b96, 3),
    S(s_load_b128, 4),
    S(s_load_b256, 8),
    S(s_load_b512, 16),
    SIZES(LOAD),
    HALF(LOAD, "ubyte_d16", "d16_u8", 1 | LOW16),
    HALF(LOAD, "ubyte_d16_hi", "d16_hi_u8", 1 | HIGH16),
    HALF(LOAD, "sbyte_d16", "d16_i8", 1 | SIGNED | LOW16),
    HALF(LOAD, "sbyte_d16_hi", "d16_hi_i8", 1 | SIGNED | HIGH16),
    HALF(LOAD, "short_d16", "d16_b16", 2 | LOW16),
    HALF(LOAD, "short_d16_hi", "d16_hi_b16", 2 | HIGH16),
    STORED_SIZES(STORE),
    HALF(STORE, "byte_d16_hi", "d16_hi_b8", 1 | HIGH16),
    HALF(STORE, "short_d16_hi", "d16_hi_b16", 2 | HIGH16),
    ATOM("global_atomic_add global_atomic_add_u32", ADD, 4),
    ATOM("global_atomic_sub global_atomic_sub_u32", SUB, 4),
    ATOM("global_atomic_swap global_atomic_swap_b32", SWAP, 4),
    ATOM("global_atomic_and global_atomic_and_b32", AND, 4),
    ATOM("global_atomic_or global_atomic_or_b32", OR, 4),
    ATOM("global_atomic_xor global_atomic_xor_b32", XOR, 4),
    ATOM("global_atomic_smax global_atomic_max_i32", SMAX, 4),
    ATOM("global_atomic_smin global_atomic_min_i32", SMIN, 4),
    ATOM("global_atomic_umax global_atomic_max_u32", UMAX, 4),
    ATOM("global_atomic_umin global_atomic_min_u32", UMIN, 4),
    ATOM("global_atomic_inc global_atomic_inc_u32", INC, 4),
    ATOM("global_atomic_cmpswap global_atomic_cmpswap_b32", CMPSWAP, 4),
    ATOM("global_atomic_add_f32", ADD_F32, 4),
    ATOM("global_atomic_add_x2 global_atomic_add_u64", ADD, 8),
    SIZES(DS_LOAD),
    DS_LOAD("u8_d16", 1 | LOW16),
    DS_LOAD("u8_d16_hi", 1 | HIGH16),
    DS_LOAD("u16_d16", 2 | LOW16),
    DS_LOAD("u16_d16_hi", 2 | HIGH16),
    STORED_SIZES(DS_STORE),
    DS_STORE("b8_d16_hi", 1 | HIGH16),
    DS_STORE("b16_d16_hi", 2 | HIGH16),
    DS_TWO("b32", 4),
    DS_TWO("b64", 8),
    DS_TWO("stride64_b32", 4 | FAR),
    DS_TWO("stride64_b64", 8 | FAR),
    DS("add_u32", "Un", run_ds_atomic, ATOMIC(ADD, 4)),
    DS("max_u32", "Un", run_ds_atomic, ATOMIC(UMAX, 4)),
    DS("max_i32", "Un", run_ds_atomic, ATOMIC(SMAX, 4)),
    DS("or_b32", "Un", run_ds_atomic, ATOMIC(OR, 4)),
    DS("add_rtn_u32", "n=Un", run_ds_atomic, ATOMIC(ADD, 4)),
    DS("bpermute_b32", "U=UU", run_bpermute, 0),
    DS("permute_b32", "U=UU", run_permute, 0),
    DS("swizzle_b32", "U=U", run_swizzle, 0),
    {"ds_nop", "*", run_nothing, NULL, 0, CLASS_LDS, 0},
};

const struct op_table memory_ops = {ops, sizeof ops / sizeof *ops};
