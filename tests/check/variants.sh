#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# attn-check over every variant of a backend that this machine has, held to its committed list of capabilities.
# usage: variants.sh ATTN-CHECK ATTN-INFO BACKEND LIST; exit 77 where no variant is there
set -u
check=$1 info=$2 backend=$3 list=$4
variants=$("$info" --json 2>/dev/null |
    awk -v name="\"$backend\"," '$1 == "\"name\":" { ours = $2 == name }
        ours && $1 == "\"variant\":" { gsub(/[",]/, "", $2); print "@" $2; ours = 0 }')
[ -n "$variants" ] || exit 77
failed=0
for variant in $variants; do
    "$check" "$backend${variant%@}" --expect "$list" || failed=1
done
exit $failed
