#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# A part of attn-check over a backend, held to its committed list of capabilities.
# usage: variants.sh ATTN-CHECK ATTN-INFO BACKEND[@VARIANT] I/N LIST; exit 77 where this machine has not the variant
set -u
check=$1 info=$2 target=$3 part=$4 list=$5
backend=${target%@*} variant=""
[ "$backend" = "$target" ] || variant=${target#*@}
listed=$(mktemp)
trap 'rm -f "$listed"' EXIT
"$info" --json 2>/dev/null >"$listed"
# has VARIANT: whether this machine has it
has() {
    awk -v name="\"$backend\"," -v variant="\"$1\"," '$1 == "\"name\":" { ours = $2 == name }
        ours && $1 == "\"variant\":" { if ($2 == variant) { found = 1 } ours = 0 }
        END { exit !found }' "$listed"
}
has "$variant" || exit 77
# Other dtypes have the same code in avx512bf16.
cases='*'
[ "$variant" != avx512 ] || ! has avx512bf16 || cases='*bf16*'
"$check" "$target" --part "$part" --filter "$cases" --expect "$list"
