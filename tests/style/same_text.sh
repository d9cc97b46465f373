#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Whether two folders of objects hold the same machine code, for commits that rename or move: prints the objects whose
# code only one side has. Objects are compared by their code, so names and paths may differ.
# usage: tests/style/same_text.sh BEFORE AFTER      exit status: 0 same, 1 different, 2 an argument holds no object
set -eu
list=$(mktemp -d)
trap 'rm -rf "$list"' EXIT
for side in 1 2; do
    eval "folder=\${$side}"
    find "$folder" -name '*.o' | sort | while read -r object; do
        code=$(objdump -s -j .text -j .text.hot -j .text.unlikely -j .text.startup "$object" 2>/dev/null |
            sed 1,3d | sha256sum | cut -c1-64)
        echo "$code $object"
    done >"$list/$side"
    [ -s "$list/$side" ] || { echo "same_text: no objects in '$folder'" >&2; exit 2; }
    cut -c1-64 "$list/$side" | sort >"$list/code$side"
done
if cmp -s "$list/code1" "$list/code2"; then
    echo "same code in $(wc -l <"$list/code1") objects"
    exit 0
fi
comm -23 "$list/code1" "$list/code2" | while read -r code; do grep "^$code" "$list/1" | sed 's/^[^ ]*/before:/'; done
comm -13 "$list/code1" "$list/code2" | while read -r code; do grep "^$code" "$list/2" | sed 's/^[^ ]*/after: /'; done
exit 1
