#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# A part of attn-check over a backend, held to its committed list of capabilities.
# usage: variants.sh ATTN-CHECK ATTN-INFO BACKEND[@VARIANT] I/N LIST; exit 77 where this machine has not the variant
set -u
check=$1 info=$2 target=$3 part=$4 list=$5
backend=${target%@*} variant=""
[ "$backend" = "$target" ] || variant=${target#*@}
"$info" --json 2>/dev/null |
    awk -v name="\"$backend\"," -v variant="\"$variant\"," '$1 == "\"name\":" { ours = $2 == name }
        ours && $1 == "\"variant\":" { if ($2 == variant) { found = 1 } ours = 0 }
        END { exit !found }' || exit 77
"$check" "$target" --part "$part" --expect "$list"
