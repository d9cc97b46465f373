/* SPDX-License-Identifier: Apache-2.0 */
/* A listing of llvm-objdump, once, into the form that the interpreter walks. */
#define _GNU_SOURCE
#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "isa.h"

#define MAX_OPERANDS 8
#define MAX_TEXT 256

/* A line in its parts: mnemonic, operands between commas, modifiers after the last one. */
struct line {
    char text[MAX_TEXT], *name, *operands[MAX_OPERANDS], *mods;
    int count;
};

struct reader {
    struct code *code;
    char *unknown; /* names, with spaces between them */
    size_t room;
    const char *cause;
};

static const struct {
    const char *name;
    uint16_t reg;
} scalar_names[] = {
    {"vcc_lo", REG_VCC},
    {"vcc_hi", REG_VCC + 1},
    {"vcc", REG_VCC},
    {"exec_lo", REG_EXEC},
    {"exec_hi", REG_EXEC + 1},
    {"exec", REG_EXEC},
    {"m0", REG_M0},
    {"null", REG_NULL},
    {"src_shared_base", REG_SHARED_BASE},
    {"src_private_base", REG_PRIVATE_BASE},
    {"src_scc", REG_SCC},
    {"scc", REG_SCC},
};

static int words_of(char type, int wave_size)
{
    switch (type) {
    case 'D':
    case 'L':
    case 'Q':
    case 'T':
        return 2;
    case 'O':
        return 4;
    case 'X':
        return 8;
    case 'Y':
    case 'a':
        return 16;
    case 'M':
        return wave_size / 32;
    default:
        return type >= '2' && type <= '9' ? type - '0' : 1;
    }
}

/* v3, v[4:7], a2, s[0:1], ttmp9; what stands for registers of `kind`. */
static bool parse_range(const char *text, unsigned base, unsigned limit, struct operand *o)
{
    unsigned first, last;
    int used = 0;
    if (sscanf(text, "[%u:%u]%n", &first, &last, &used) == 2 && text[used] == '\0') {
        o->words = (uint8_t)(last - first + 1);
    } else if (sscanf(text, "[%u]%n", &first, &used) == 1 && used > 0 && text[used] == '\0') {
        o->words = 1;
        last = first;
    } else if (sscanf(text, "%u%n", &first, &used) == 1 && text[used] == '\0') {
        o->words = 1;
        last = first;
    } else {
        return false;
    }
    o->reg = (uint16_t)(base + first);
    return last >= first && base + last < limit;
}

static bool parse_register(const char *text, struct operand *o)
{
    if ((text[0] == 'v' || text[0] == 'a') && (isdigit((unsigned char)text[1]) || text[1] == '[')) {
        o->kind = OPERAND_VECTOR;
        return parse_range(text + 1, text[0] == 'a' ? FIRST_AGPR : 0,
                           text[0] == 'a' ? NUM_VECTORS : FIRST_AGPR, o);
    }
    o->kind = OPERAND_SCALAR;
    if (text[0] == 's' && (isdigit((unsigned char)text[1]) || text[1] == '[')) {
        return parse_range(text + 1, 0, REG_VCC, o);
    }
    if (strncmp(text, "ttmp", 4) == 0) {
        return parse_range(text + 4, REG_TTMP, REG_SHARED_BASE, o);
    }
    for (size_t i = 0; i < sizeof scalar_names / sizeof *scalar_names; i++) {
        if (strcmp(text, scalar_names[i].name) == 0) {
            o->reg = scalar_names[i].reg;
            o->words = 0; /* as the signature says */
            return true;
        }
    }
    return false;
}

/* An inline constant or literal takes its operand's type. */
static bool parse_constant(const char *text, struct operand *o)
{
    char *end;
    bool hex = strncmp(text, "0x", 2) == 0;
    bool point = !hex && strpbrk(text, ".") != NULL;
    if (point) {
        double number = strtod(text, &end);
        o->value = o->type == 'D'                     ? as_bits64(number)
                   : o->type == 'H' || o->type == 'P' ? float_to_half((float)number)
                                                      : as_bits((float)number);
        /* 1 / (2 pi) is rounded as the manual has it */
    } else {
        long long number = strtoll(text, &end, 0);
        o->value = (uint64_t)number;
        if (o->type == 'D' && hex) {
            o->value <<= 32;
        } else if (o->type == 'L' && hex) {
            o->value = (uint64_t)(uint32_t)number;
        }
    }
    if (o->type == 'W' || o->type == 'H') {
        o->value &= 0xffff;
    }
    o->kind = OPERAND_CONSTANT;
    return *end == '\0' && end != text;
}

static const uint32_t *spread_constant(uint64_t value)
{
    uint32_t *lanes = aligned_alloc(64, 2 * LANES * sizeof *lanes);
    for (int l = 0; lanes != NULL && l < LANES; l++) {
        lanes[l] = (uint32_t)value;
        lanes[LANES + l] = (uint32_t)(value >> 32);
    }
    return lanes;
}

/* -v1, |v1|, -|v1|, neg(1.0), sext(v1), abs(..); -1 is a number. */
static bool parse_operand(const struct reader *r, char *text, char type, struct operand *o)
{
    *o = (struct operand){.type = type};
    int words = words_of(type, r->code->wave_size);
    if (strncmp(text, "neg(", 4) == 0 || strncmp(text, "sext(", 5) == 0) {
        o->mods |= text[0] == 'n' ? MOD_NEG : MOD_SEXT;
        text = strchr(text, '(') + 1;
        text[strlen(text) - 1] = '\0';
    } else if (text[0] == '-' && !isdigit((unsigned char)text[1])) {
        o->mods |= MOD_NEG;
        text++;
    }
    if (text[0] == '|') {
        o->mods |= MOD_ABS;
        text++;
        text[strlen(text) - 1] = '\0';
    }
    if (parse_register(text, o)) {
        if (o->words == 0 || (o->kind == OPERAND_SCALAR && type == 'M')) {
            o->words = (uint8_t)words;
        }
        if (type == 'A' || (o->kind == OPERAND_VECTOR && words > 8 && type != 'a')) {
            return true;
        }
        /* a scalar base is two words wide where a vector one is one */
        return o->words == words || (words == 1 && o->words == 1) || type == 'n';
    }
    if (!parse_constant(text, o)) {
        return false;
    }
    o->words = (uint8_t)words;
    o->lanes = spread_constant(o->value);
    return o->lanes != NULL;
}

static void split_operands(struct line *line, char *at)
{
    int depth = 0;
    line->count = 0;
    line->mods = "";
    while (*at == ' ') {
        at++;
    }
    while (*at != '\0' && line->count < MAX_OPERANDS) {
        char *begin = at;
        while (*at != '\0' && (depth > 0 || (*at != ',' && *at != ' '))) {
            depth += *at == '[' || *at == '(';
            depth -= *at == ']' || *at == ')';
            at++;
        }
        char stop = *at;
        *at = '\0';
        line->operands[line->count++] = begin;
        if (stop == '\0') {
            return;
        }
        at++;
        if (stop == ' ') {
            line->mods = at;
            return;
        }
        while (*at == ' ') {
            at++;
        }
    }
}

static bool is_suffix(const char *name, size_t length, const char *suffix)
{
    size_t size = strlen(suffix);
    return length > size && memcmp(name + length - size, suffix, size) == 0;
}

/* Without the encoding's name. */
static size_t base_length(const char *name, struct insn *i)
{
    static const char *const suffixes[] = {"_e64_dpp", "_e32", "_e64", "_sdwa", "_dpp"};
    size_t length = strlen(name);
    for (size_t s = 0; s < sizeof suffixes / sizeof *suffixes; s++) {
        if (is_suffix(name, length, suffixes[s])) {
            i->flags |= strstr(suffixes[s], "dpp") != NULL    ? INSN_DPP
                        : strstr(suffixes[s], "sdwa") != NULL ? INSN_SDWA
                                                              : 0;
            return length - strlen(suffixes[s]);
        }
    }
    return length;
}

static bool parse_bits(const char *text, uint8_t *bits)
{
    *bits = 0;
    for (int n = 0; text[0] != ']' && n < 8; n++) {
        *bits |= (uint8_t)((text[0] == '1') << n);
        text += text[1] == ',' ? 2 : 1;
    }
    return *text == ']';
}

static bool parse_numbers(const char *text, uint8_t *numbers, int count)
{
    for (int n = 0; n < count; n++) {
        char *end;
        numbers[n] = (uint8_t)strtol(text, &end, 0);
        text = end + 1;
    }
    return text[-1] == ']';
}

static uint8_t parse_select(const char *text)
{
    static const char *const names[] = {"BYTE_0", "BYTE_1", "BYTE_2", "BYTE_3", "WORD_0", "WORD_1"};
    for (uint8_t n = 0; n < 6; n++) {
        if (strcmp(text, names[n]) == 0) {
            return n;
        }
    }
    return SEL_DWORD;
}

static bool parse_dpp(const char *mod, struct insn *i)
{
    static const struct {
        const char *name;
        uint8_t control;
    } rows[] = {{"row_shl:", DPP_ROW_SHL},           {"row_shr:", DPP_ROW_SHR},
                {"row_ror:", DPP_ROW_ROR},           {"row_bcast:", DPP_ROW_BCAST},
                {"row_share:", DPP_ROW_SHARE},       {"row_xmask:", DPP_ROW_XMASK},
                {"row_newbcast:", DPP_ROW_NEWBCAST}, {"wave_shr:", DPP_WAVE_SHR}};
    for (size_t n = 0; n < sizeof rows / sizeof *rows; n++) {
        size_t length = strlen(rows[n].name);
        if (strncmp(mod, rows[n].name, length) == 0) {
            i->dpp = rows[n].control;
            i->dpp_arg = (uint8_t)strtol(mod + length, NULL, 0);
            return true;
        }
    }
    if (strncmp(mod, "quad_perm:[", 11) == 0) {
        i->dpp = DPP_QUAD_PERM;
        return parse_numbers(mod + 11, i->perm, 4);
    }
    if (strncmp(mod, "dpp8:[", 6) == 0) {
        i->dpp = DPP_DPP8;
        return parse_numbers(mod + 6, i->perm, 8);
    }
    if (strcmp(mod, "row_mirror") == 0 || strcmp(mod, "row_half_mirror") == 0) {
        i->dpp = mod[4] == 'm' ? DPP_ROW_MIRROR : DPP_ROW_HALF_MIRROR;
        return true;
    }
    return false;
}

/* ds_swizzle's patterns in words. */
static bool parse_swizzle(const char *mod, struct insn *i)
{
    int32_t and_mask = 0, or_mask = 0, xor_mask = 0;
    int a, b, c, d;
    const char *at = strchr(mod, ',');
    if (sscanf(mod, "offset:swizzle(QUAD_PERM,%d,%d,%d,%d)", &a, &b, &c, &d) == 4) {
        i->offset = 0x8000 | a | b << 2 | c << 4 | d << 6;
        return true;
    }
    if (sscanf(mod, "offset:swizzle(SWAP,%d)", &a) == 1) {
        i->offset = 0x1f | a << 10;
        return true;
    }
    if (sscanf(mod, "offset:swizzle(BROADCAST,%d,%d)", &a, &b) == 2) {
        i->offset = (32 - a) | b << 5;
        return true;
    }
    if (sscanf(mod, "offset:swizzle(REVERSE,%d)", &a) == 1) {
        i->offset = 0x1f | (a - 1) << 10;
        return true;
    }
    if (strstr(mod, "BITMASK_PERM") == NULL || at == NULL) {
        return false;
    }
    at += at[1] == '"' ? 2 : 1;
    for (int bit = 4; bit >= 0; bit--, at++) {
        and_mask |= (*at == 'p' || *at == 'i') << bit;
        or_mask |= (*at == '1') << bit;
        xor_mask |= (*at == 'i') << bit;
    }
    i->offset = and_mask | or_mask << 5 | xor_mask << 10;
    return true;
}

static bool parse_mod(const char *mod, struct insn *i)
{
    static const char *const ignored[] = {"glc", "slc", "dlc",  "nt",  "sc0", "sc1",
                                          "off", "lds", "fi:1", "scc", "th:", "scope:"};
    if (strncmp(mod, "offset:swizzle", 14) == 0) {
        return parse_swizzle(mod, i);
    }
    if (strncmp(mod, "offset:", 7) == 0 || strncmp(mod, "offset0:", 8) == 0 ||
        strncmp(mod, "bitop3:", 7) == 0) {
        i->offset = (int32_t)strtol(strchr(mod, ':') + 1, NULL, 0);
        return true;
    }
    if (strncmp(mod, "offset1:", 8) == 0) {
        i->offset1 = (int32_t)strtol(mod + 8, NULL, 0);
        return true;
    }
    if (strncmp(mod, "op_sel:[", 8) == 0) {
        return parse_bits(mod + 8, &i->op_sel);
    }
    if (strncmp(mod, "op_sel_hi:[", 11) == 0) {
        return parse_bits(mod + 11, &i->op_sel_hi);
    }
    if (strncmp(mod, "neg_lo:[", 8) == 0) {
        return parse_bits(mod + 8, &i->neg_lo);
    }
    if (strncmp(mod, "neg_hi:[", 8) == 0) {
        return parse_bits(mod + 8, &i->neg_hi);
    }
    if (strcmp(mod, "clamp") == 0) {
        i->flags |= INSN_CLAMP;
        return true;
    }
    if (strncmp(mod, "mul:", 4) == 0 || strcmp(mod, "div:2") == 0) {
        i->omod = mod[0] == 'd' ? 3 : mod[4] == '2' ? 1 : 2;
        return true;
    }
    if (strncmp(mod, "row_mask:", 9) == 0 || strncmp(mod, "bank_mask:", 10) == 0) {
        uint8_t mask = (uint8_t)strtol(strchr(mod, ':') + 1, NULL, 0);
        *(mod[0] == 'r' ? &i->row_mask : &i->bank_mask) = mask;
        return true;
    }
    if (strncmp(mod, "bound_ctrl:", 11) == 0) {
        i->flags |= INSN_BOUND_CTRL;
        return true;
    }
    if (strncmp(mod, "dst_sel:", 8) == 0) {
        i->dst_sel = parse_select(mod + 8);
        return true;
    }
    if (strncmp(mod, "src0_sel:", 9) == 0 || strncmp(mod, "src1_sel:", 9) == 0) {
        i->src_sel[mod[3] - '0'] = parse_select(mod + 9);
        return true;
    }
    if (strncmp(mod, "dst_unused:UNUSED_", 18) == 0) {
        i->dst_unused = mod[18] == 'P' ? (mod[19] == 'A' ? 0 : 2) : 1;
        return true;
    }
    for (size_t n = 0; n < sizeof ignored / sizeof *ignored; n++) {
        if (strncmp(mod, ignored[n], strlen(ignored[n])) == 0) {
            if (strcmp(mod, "glc") == 0 || strcmp(mod, "sc0") == 0 ||
                strcmp(mod, "th:TH_ATOMIC_RETURN") == 0) {
                i->flags |= INSN_GLC;
            }
            return true;
        }
    }
    return parse_dpp(mod, i);
}

static bool parse_mods(char *mods, struct insn *i)
{
    char *save, joined[MAX_TEXT];
    size_t length = 0;
    int depth = 0;
    for (const char *at = mods; *at != '\0' && length + 1 < sizeof joined; at++) {
        depth += *at == '(' || *at == '[';
        depth -= *at == ')' || *at == ']';
        if (*at != ' ' || depth == 0) {
            joined[length++] = *at;
        }
    }
    joined[length] = '\0';
    for (char *mod = strtok_r(joined, " ", &save); mod != NULL; mod = strtok_r(NULL, " ", &save)) {
        if (!parse_mod(mod, i)) {
            return false;
        }
    }
    return true;
}

/* The operands as the signature has them. What follows the sources of a memory operation may be
 * `off`; a scalar operation's last operand a 16-bit immediate ('i'). */
static bool parse_operands(struct reader *r, struct line *line, struct insn *i)
{
    const char *type = i->op->types;
    int next = 0;
    bool results = strchr(type, '=') != NULL;
    for (; *type != '\0'; type++) {
        if (*type == '=') {
            results = false;
            continue;
        }
        if (*type == 'r') { /* an atomic's result, if asked for */
            if (!(i->flags & INSN_GLC)) {
                continue;
            }
            if (!parse_operand(r, line->operands[next], 'n', &i->dst[i->num_dst++])) {
                return false;
            }
            next++;
            continue;
        }
        if (next >= line->count) {
            return false;
        }
        char *text = line->operands[next++];
        if (*type == 'i') {
            i->offset = (int32_t)strtol(text, NULL, 0);
        } else if (*type == 'o' && strcmp(text, "off") == 0) {
            i->flags |= INSN_OFF;
        } else if (!parse_operand(r, text, *type == 'o' ? 'T' : *type,
                                  results ? &i->dst[i->num_dst++] : &i->src[i->num_src++])) {
            return false;
        }
    }
    return next == line->count;
}

static void add_unknown(struct reader *r, const char *name, size_t length)
{
    char key[80];
    snprintf(key, sizeof key, " %.*s ", (int)length, name);
    if (strstr(r->unknown, key) == NULL && strlen(r->unknown) + length + 2 < r->room) {
        strcat(r->unknown, key + 1);
    }
}

static bool parse_insn(struct reader *r, char *text, struct insn *i)
{
    struct line line;
    snprintf(line.text, sizeof line.text, "%s", text);
    size_t end = strlen(line.text);
    while (end > 0 && line.text[end - 1] == ' ') {
        line.text[--end] = '\0';
    }
    line.name = line.text;
    char *rest = strchr(line.text, ' ');
    if (rest != NULL) {
        *rest++ = '\0';
    }
    split_operands(&line, rest != NULL ? rest : line.text + strlen(line.text));
    i->row_mask = i->bank_mask = 15;
    i->dst_sel = i->src_sel[0] = i->src_sel[1] = SEL_DWORD;
    i->op_sel_hi = 0xff;
    size_t length = base_length(line.name, i);
    const char *name = line.name;
    char single[80];
    if (strncmp(name, "v_dual_", 7) == 0) {
        snprintf(single, sizeof single, "v_%.*s", (int)(length - 7), name + 7);
        name = single;
        length -= 5;
    }
    i->op = op_find(name, length, r->code->major);
    if (i->op == NULL) {
        add_unknown(r, name, length);
        return true;
    }
    i->run = i->op->run;
    i->lanes = i->op->lanes;
    i->unit = i->op->unit;
    if (i->op->types[0] == '*') { /* operands do not matter */
        return true;
    }
    if (name == single && (i->op->flags & OP_SELECTS) && line.count == 3) {
        line.operands[line.count++] = r->code->wave_size == 32 ? strcpy(text, "vcc_lo") : "vcc";
    }
    if (!parse_mods(line.mods, i) || !parse_operands(r, &line, i)) {
        return false;
    }
    if (i->op->flags & OP_SEL_WORDS) {
        i->op_sel_hi = i->op_sel;
    }
    if (i->op->flags & OP_ACCUMULATES) {
        i->src[i->num_src] = i->dst[0];
        i->src[i->num_src++].mods = 0;
    }
    return true;
}

static bool parse_line(struct reader *r, char *line)
{
    struct code *code = r->code;
    char *comment = strstr(line, "//"), copy[MAX_TEXT];
    struct insn *i = &code->insns[code->num_insns];
    uint64_t address;
    if (comment == NULL || sscanf(comment, "// %lx:", &address) != 1) {
        return true; /* a label */
    }
    *comment = '\0';
    while (isspace((unsigned char)*line)) {
        line++;
    }
    memset(i, 0, sizeof *i);
    i->address = code->text_begin + address; /* the section's address is taken off later */
    i->text = line;
    char *second = strstr(line, " :: ");
    if (second != NULL) {
        snprintf(copy, sizeof copy, "%.*s", (int)(second - line), line);
        struct insn *other = calloc(1, sizeof *other);
        if (other == NULL || !parse_insn(r, copy, i)) {
            free(other);
            return false;
        }
        snprintf(copy, sizeof copy, "%s", second + 4);
        other->address = i->address;
        other->text = line;
        if (!parse_insn(r, copy, other)) {
            return false;
        }
        i->second = other;
        i->run = run_dual;
    } else {
        snprintf(copy, sizeof copy, "%s", line);
        if (!parse_insn(r, copy, i)) {
            return false;
        }
        insn_specialise(i);
    }
    code->num_insns++;
    return true;
}

bool code_parse(struct code *code, char *error, size_t room)
{
    struct reader r = {.code = code, .unknown = calloc(1, 8192), .room = 8192};
    size_t lines = 0;
    bool ok = r.unknown != NULL;
    for (const char *at = code->listing; *at != '\0'; at++) {
        lines += *at == '\n';
    }
    code->insns = calloc(lines + 2, sizeof *code->insns);
    ok = ok && code->insns != NULL;
    char *save = NULL;
    if (ok) {
        strcpy(r.unknown, " ");
    }
    for (char *line = ok ? strtok_r(code->listing, "\n", &save) : NULL; line != NULL;
         line = strtok_r(NULL, "\n", &save)) {
        if (!parse_line(&r, line)) {
            snprintf(error, room, "cannot read \"%s\"", line);
            ok = false;
            break;
        }
    }
    if (ok && r.unknown[1] != '\0') {
        snprintf(error, room, "unknown instructions:%s", r.unknown);
        ok = false;
    }
    free(r.unknown);
    return ok;
}
