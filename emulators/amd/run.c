/* SPDX-License-Identifier: Apache-2.0 */
/* A launch: workgroups one after the other, their waves in turn from barrier to barrier. */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "isa.h"

#define MOST_STEPS (UINT64_C(1) << 30) /* a wave takes fewer; an endless loop has more */

/* What a dispatch packet says (HSA runtime's hsa_kernel_dispatch_packet_t). */
struct packet {
    uint16_t header, setup, block[3], reserved;
    uint32_t grid[3]; /* threads */
    uint32_t private_bytes, group_bytes;
    uint64_t object, args, reserved2, signal;
};

#define OP_SLOTS 4096 /* more than twice the operations */

struct op_name {
    const char *name;
    size_t length;
    const struct op *op;
};

static uint32_t op_hash(const char *name, size_t length)
{
    uint32_t hash = 2166136261u;
    for (size_t n = 0; n < length; n++) {
        hash = (hash ^ (uint8_t)name[n]) * 16777619u;
    }
    return hash;
}

/* The names of the tables' rows, each in the first free slot from its hash on. */
static const struct op_name *op_slots(void)
{
    static const struct op_table *const tables[] = {&scalar_ops, &vector_ops, &memory_ops,
                                                    &matrix_ops};
    static struct op_name slots[OP_SLOTS];
    static bool filled;
    for (size_t t = 0; t < 4 && !filled; t++) {
        for (size_t n = 0; n < tables[t]->count; n++) {
            const struct op *op = &tables[t]->ops[n];
            for (const char *name = op->name; *name != '\0'; name += strspn(name, " ")) {
                const size_t length = strcspn(name, " ");
                uint32_t at = op_hash(name, length) % OP_SLOTS;
                while (slots[at].op != NULL) {
                    at = (at + 1) % OP_SLOTS;
                }
                slots[at] = (struct op_name){name, length, op};
                name += length;
            }
        }
    }
    filled = true;
    return slots;
}

/* Names that generations spell otherwise, as the tables have them. */
static const struct {
    const char *other, *ours;
} spellings[] = {
    {"ds_read2st64_", "ds_load_2addr_stride64_"},
    {"ds_read2_", "ds_load_2addr_"},
    {"ds_read_", "ds_load_"},
    {"ds_write2st64_", "ds_store_2addr_stride64_"},
    {"ds_write2_", "ds_store_2addr_"},
    {"ds_write_", "ds_store_"},
    {"_dwordx16", "_b512"},
    {"_dwordx8", "_b256"},
    {"_dwordx4", "_b128"},
    {"_dwordx3", "_b96"},
    {"_dwordx2", "_b64"},
    {"_dword", "_b32"},
    {"load_ubyte", "load_u8"},
    {"load_sbyte", "load_i8"},
    {"load_ushort", "load_u16"},
    {"load_sshort", "load_i16"},
    {"store_byte", "store_b8"},
    {"store_short", "store_b16"},
    {"_num_", "_"}, /* gfx12: the larger or smaller number, never a NaN */
    {"_nc_", "_"},  /* gfx10: without a carry, which gfx9 says otherwise */
    {"_co_", "_"},  /* gfx12: with one */
};

static const struct op *find_exactly(const char *name, size_t length, int major)
{
    const struct op_name *slots = op_slots();
    uint32_t at = op_hash(name, length) % OP_SLOTS;
    for (; slots[at].op != NULL; at = (at + 1) % OP_SLOTS) {
        const struct op *op = slots[at].op;
        if (slots[at].length == length && memcmp(slots[at].name, name, length) == 0 &&
            (op->major == 0 || op->major == major)) {
            return op;
        }
    }
    return NULL;
}

const struct op *op_find(const char *name, size_t length, int major)
{
    const struct op *op = find_exactly(name, length, major);
    char here[80], as_ours[128];
    snprintf(here, sizeof here, "%.*s", (int)length, name);
    for (size_t n = 0; n < sizeof spellings / sizeof *spellings && op == NULL; n++) {
        const char *at = strstr(here, spellings[n].other);
        if (at != NULL) {
            snprintf(as_ours, sizeof as_ours, "%.*s%s%s", (int)(at - here), here, spellings[n].ours,
                     at + strlen(spellings[n].other));
            op = find_exactly(as_ours, strlen(as_ours), major);
        }
    }
    return op;
}

void wave_fail(struct wave *w, const char *format, ...)
{
    struct machine *m = w->group->machine;
    const struct insn *i = &w->code->insns[w->pc > 0 ? w->pc - 1 : 0];
    va_list args;
    w->ended = true;
    if (m->failed) {
        return;
    }
    m->failed = true;
    va_start(args, format);
    int used = vsnprintf(m->error, sizeof m->error, format, args);
    va_end(args);
    if (used > 0 && (size_t)used < sizeof m->error) {
        snprintf(m->error + used, sizeof m->error - (size_t)used, " (%s, %#lx: %s, wave %u)",
                 w->code->target, i->address - (uint64_t)w->code->image, i->text, w->index);
    }
}

static void give_pair(struct wave *w, unsigned *at, uint64_t value)
{
    w->s[*at] = (uint32_t)value;
    w->s[*at + 1] = (uint32_t)(value >> 32);
    w->s_known[*at] = w->s_known[*at + 1] = UINT32_MAX;
    *at += 2;
}

static void give_one(struct wave *w, unsigned *at, uint32_t value)
{
    w->s[*at] = value;
    w->s_known[*at] = UINT32_MAX;
    *at += 1;
}

/* User registers in the order of the kernel descriptor's bits, then the workgroup's place. */
static void enter_scalars(struct wave *w, const struct launch *l, const uint32_t *group,
                          uint64_t packet, uint64_t args)
{
    const struct kernel *k = l->kernel;
    unsigned at = 0, user = k->rsrc2 >> 1 & 31;
    at += k->properties & 1 ? 4 : 0;
    if (k->properties & 2) {
        give_pair(w, &at, packet);
    }
    at += k->properties & 4 ? 2 : 0;
    if (k->properties & 8) {
        give_pair(w, &at, args);
    }
    if (k->properties & 16) {
        give_pair(w, &at, 0);
    }
    at += (k->properties & 32 ? 2u : 0u) + (k->properties & 64 ? 1u : 0u);
    at = user;
    if (w->code->major >= 12) {
        w->s[REG_TTMP + 9] = group[0];
        w->s[REG_TTMP + 7] = group[1] | group[2] << 16;
        w->s_known[REG_TTMP + 9] = w->s_known[REG_TTMP + 7] = UINT32_MAX;
        return;
    }
    for (int d = 0; d < 3; d++) {
        if (k->rsrc2 >> (7 + d) & 1) {
            give_one(w, &at, group[d]);
        }
    }
}

static void enter_wave(struct wave *w, struct group *g, const struct launch *l, uint32_t index,
                       const uint32_t *place, uint64_t packet, uint64_t args)
{
    const struct code *code = g->code;
    uint32_t threads = l->block[0] * l->block[1] * l->block[2];
    uint32_t first = index * (uint32_t)code->wave_size;
    uint32_t left = threads - first, lanes = (uint32_t)code->wave_size;
    w->group = g;
    w->code = code;
    w->pc = l->kernel->entry;
    w->index = index;
    w->lanes = lanes;
    w->scc = w->scc_known = w->ended = w->waits = w->signalled = false;
    memset(w->s, 0xab, sizeof w->s);
    memset(w->s_known, 0, sizeof w->s_known);
    memset(w->v_known, 0, sizeof w->v_known);
    w->s64[REG_EXEC / 2] = left >= 64 ? ALL_LANES : (UINT64_C(1) << left) - 1;
    if (lanes == 32) {
        w->s64[REG_EXEC / 2] = left >= 32 ? UINT32_MAX : (UINT64_C(1) << left) - 1;
    }
    w->spread_of = 0;
    memset(w->spread, 0, sizeof w->spread);
    w->s64_known[REG_EXEC / 2] = w->s64_known[REG_SHARED_BASE / 2] = UINT64_MAX;
    w->s64[REG_SHARED_BASE / 2] = (uint64_t)SHARED_APERTURE << 32;
    w->s[REG_NULL] = 0;
    w->s_known[REG_NULL] = UINT32_MAX;
    enter_scalars(w, l, place, packet, args);
    bool packed = code->gfx90a || code->major >= 11;
    for (uint32_t n = 0; n < lanes; n++) {
        uint32_t id = first + n, x = id % l->block[0], y = id / l->block[0] % l->block[1];
        uint32_t z = id / l->block[0] / l->block[1];
        w->v[0][n] = packed ? x | y << 10 | z << 20 : x;
        w->v[1][n] = y;
        w->v[2][n] = z;
    }
    unsigned ids = l->kernel->rsrc2 >> 11 & 3;
    w->v_known[0] = ALL_LANES;
    w->v_known[1] = !packed && ids > 0 ? ALL_LANES : 0;
    w->v_known[2] = !packed && ids > 1 ? ALL_LANES : 0;
}

/* To the next barrier or the end. */
static void run_wave(struct wave *w)
{
    const struct insn *insns = w->code->insns;
    struct machine *m = w->group->machine;
    uint64_t steps = 0;
    while (!w->ended && !w->waits) {
        const struct insn *i = &insns[w->pc++];
        i->run(w, i);
        m->counts[i->unit]++;
        if (m->executed != NULL) {
            m->executed[i - insns]++;
        }
        if (++steps > MOST_STEPS) {
            wave_fail(w, "does not end");
        }
    }
    m->insns += steps;
}

static void run_group(struct machine *m, struct wave *waves, uint32_t count)
{
    for (;;) {
        uint32_t waiting = 0;
        for (uint32_t n = 0; n < count; n++) {
            if (!waves[n].ended) {
                run_wave(&waves[n]);
            }
            if (m->failed) {
                return;
            }
            waiting += waves[n].waits;
        }
        if (waiting == 0) {
            return;
        }
        for (uint32_t n = 0; n < count; n++) {
            waves[n].waits = false;
        }
        waves[0].group->epoch++;
    }
}

static bool check_launch(struct machine *m, const struct code *code, const struct launch *l)
{
    const struct kernel *k = l->kernel;
    uint32_t threads = l->block[0] * l->block[1] * l->block[2];
    uint32_t lds = k->group_bytes + l->dynamic_lds;
    const char *cause = NULL;
    if (k->private_bytes != 0 || (k->rsrc2 & 1)) {
        cause = "scratch memory";
    } else if (threads == 0 || threads > 1024) {
        cause = "0 or more than 1024 threads";
    } else if (lds > 65536) {
        cause = "more than 64 KiB of LDS";
    } else if (l->arg_bytes > k->kernarg_bytes) {
        cause = "more arguments than the kernel has";
    } else if (k->preload != 0) {
        cause = "preloaded arguments";
    }
    if (cause != NULL) {
        m->failed = true;
        snprintf(m->error, sizeof m->error, "%s on %s asks for %s (%u threads, %u bytes of LDS)",
                 k->name, code->target, cause, threads, lds);
    }
    return cause == NULL;
}

bool machine_launch(struct machine *m, const struct code *code, const struct launch *l)
{
    uint32_t threads = l->block[0] * l->block[1] * l->block[2];
    uint32_t count = (threads + (uint32_t)code->wave_size - 1) / (uint32_t)code->wave_size;
    if (!check_launch(m, code, l)) {
        return false;
    }
    struct group g = {.machine = m, .code = code};
    g.lds_bytes = l->kernel->group_bytes + l->dynamic_lds;
    g.lds = malloc(g.lds_bytes + 64);
    g.marks = calloc(g.lds_bytes / 4 + 17, sizeof *g.marks);
    struct wave *waves = aligned_alloc(64, count * sizeof *waves);
    size_t arg_bytes = l->kernel->kernarg_bytes;
    char *args = calloc(1, arg_bytes + 64);
    struct packet packet = {.setup = 3, .group_bytes = g.lds_bytes, .args = (uint64_t)args};
    for (int d = 0; d < 3; d++) {
        packet.block[d] = (uint16_t)l->block[d];
        packet.grid[d] = l->grid[d] * l->block[d];
    }
    bool ok = g.lds != NULL && g.marks != NULL && waves != NULL && args != NULL &&
              machine_allow(m, args, arg_bytes, false) &&
              machine_allow(m, &packet, sizeof packet, false) &&
              machine_allow(m, code->image, code->image_bytes, false);
    if (ok) {
        memcpy(args, l->args, l->arg_bytes);
    } else {
        m->failed = true;
        snprintf(m->error, sizeof m->error, "no memory for a launch");
    }
    for (uint32_t z = 0; ok && z < l->grid[2]; z++) {
        for (uint32_t y = 0; ok && y < l->grid[1]; y++) {
            for (uint32_t x = 0; ok && x < l->grid[0]; x++) {
                const uint32_t place[3] = {x, y, z};
                memset(g.marks, 0, (g.lds_bytes / 4 + 17) * sizeof *g.marks);
                g.epoch = 1;
                for (uint32_t n = 0; n < count; n++) {
                    enter_wave(&waves[n], &g, l, n, place, (uint64_t)&packet, (uint64_t)args);
                }
                run_group(m, waves, count);
                ok = !m->failed;
            }
        }
    }
    machine_forbid(m, code->image);
    machine_forbid(m, &packet);
    machine_forbid(m, args);
    free(args);
    free(waves);
    free(g.marks);
    free(g.lds);
    return ok;
}
