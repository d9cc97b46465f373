#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Compares every public name with the stored list: macros and enumerators with their values, structs with their sizes and
# each field's offset, size and declaration, types. Any difference fails, until it is meant: then `golden.sh --store`
# writes the list again, and abi/CHANGES.md says the change in a line.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
abi=$here/../../abi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# A header without comments, one declaration or definition a line.
declarations() {
    # -fpreprocessed takes comments out and expands nothing.
    cc -fpreprocessed -dD -E -P "$1" 2>/dev/null | sed -e ':a' -e '/\\$/{N;s/\\\n/ /;ta' -e '}' | awk '
        /^[ \t]*#/ { if ($1 == "#define") { gsub(/[ \t]+/, " "); print }; next }
        { text = text " " $0; depth += gsub(/\{/, "{"); depth -= gsub(/\}/, "}") }
        depth == 0 && /;[ \t]*$/ { gsub(/[ \t]+/, " ", text); sub(/^ /, "", text); print text; text = "" }'
}

# The statements of a program that prints the list.
statements() {
    awk '
    function quoted(text) { gsub(/\\/, "\\\\", text); gsub(/"/, "\\\"", text); return "\"" text "\"" }
    function field_name(text) {
        if (match(text, /\(\*[a-z_0-9]+\)/)) { return substr(text, RSTART + 2, RLENGTH - 3) }
        sub(/\[.*$/, "", text); match(text, /[a-z_0-9]+$/); return substr(text, RSTART)
    }
    function fields(of, body,   n, parts, i) {
        n = split(body, parts, ";")
        for (i = 1; i <= n; i++) {
            gsub(/^ +| +$/, "", parts[i])
            if (parts[i] != "") { print "FIELD(" of ", " field_name(parts[i]) ", " quoted(parts[i]) ");" }
        }
    }
    $1 == "#define" && $2 ~ /\(/ { if ($2 ~ /^ATTN_STATUS_LIST/) { list = $0 } else { print "puts(" quoted($0) ");" }; next }
    $1 == "#define" { if (NF > 2 && $2 !~ /^ATTN_(EXPORT|EXTERN_C|ERROR_INIT)$/) { print "VALUE(" $2 ");" }; next }
    /^enum attn_status_code / {
        while (match(list, /X\(ATTN_[A-Z_]+/)) {
            print "VALUE(" substr(list, RSTART + 2, RLENGTH - 2) ");"; list = substr(list, RSTART + RLENGTH)
        }
        next
    }
    /^enum / {
        body = $0
        while (match(body, /ATTN_[A-Z_0-9]+ *=/)) {
            name = substr(body, RSTART, RLENGTH); sub(/ *=/, "", name); print "VALUE(" name ");"
            body = substr(body, RSTART + RLENGTH)
        }
        next
    }
    /^struct [a-z_]+ \{/ {
        print "STRUCT(struct " $2 ");"
        body = $0; sub(/^[^{]*\{/, "", body); sub(/\};?$/, "", body); fields("struct " $2, body); next
    }
    /^(typedef|ATTN_EXPORT)/ { print "puts(" quoted($0) ");" }'
}

list() {
    {
        cat <<'C'
#include <attn/api.h>
#include <attn/plugin.h>
#include <stdio.h>
static void number(const char *name, unsigned long long value) { printf("%s %#llx\n", name, value); }
static void text(const char *name, const char *value) { printf("%s \"%s\"\n", name, value); }
#define VALUE(name) _Generic((name), char *: text, const char *: text, default: number)(#name, name)
#define STRUCT(type) printf("%s %zu\n", #type, sizeof(type))
#define FIELD(type, name, what) printf("    %zu %zu %s\n", offsetof(type, name), sizeof(((type *)0)->name), what)
int main(void)
{
C
        for header in "$abi"/attn/*.h; do
            echo "puts(\"# $(basename "$header")\");"
            declarations "$header" | statements
        done
        echo 'return 0; }'
    } >"$work/list.c"
    cc -std=c11 -I "$abi" -o "$work/list" "$work/list.c" && "$work/list"
}

# Values, and fields of a struct, in lines of up to 118 columns. Both are only ever appended, so a change of the stored
# list touches the last line of its struct or of its run of values.
pack() {
    awk '
    function finish() { if (line != "") { print line }; line = "" }
    !/^(    |ATTN_[A-Z0-9_]+ [0-9])/ { finish(); print; next }
    { kind = /^ /; item = $0; sub(/^ +/, "", item) }
    line != "" && kind == last && length(line) + length(item) <= 116 { line = line "; " item; next }
    { finish(); line = $0; last = kind }
    END { finish() }'
}

# The list as it was before pack: an item a line.
unpack() { sed -e '/^    /s/; /\n    /g' -e '/^ATTN_/s/; /\n/g'; }

list >"$work/now"
unpack <"$here/golden.txt" >"$work/stored"
if [ "${1:-}" = --store ]; then
    pack <"$work/now" >"$here/golden.txt"
elif ! diff -u "$work/stored" "$work/now"; then
    echo "the public ABI differs from tests/abi/golden.txt; if that is meant: tests/abi/golden.sh --store, and a line in abi/CHANGES.md"
    exit 1
fi
