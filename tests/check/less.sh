#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# The example plugin with one capability after the other taken out of it: what is left is still right, and attn-check is
# green. Each runs the refusals (`undeclared.*`), which follow what is not declared; the least of all runs every case.
# usage: less.sh ATTN-CHECK PLUGIN.c ABI CC...
set -u
check=$1 source=$2 abi=$3
shift 3
root=$(mktemp -d)
trap 'rm -rf "$root"' EXIT
failed=0

# word...: declares none of them, and the table has no kernel that is not declared
without() {
    cp "$source" "$root/less.c"
    for word; do
        grep -qw "$word" "$root/less.c" || { echo "$word is not in $source"; failed=1; }
        sed -i "s/\b$word\b/0/" "$root/less.c"
        [ "$word" != ATTN_KERNEL_MERGE_STATES ] || sed -i 's/\.merge_states = merge_states/.merge_states = NULL/' "$root/less.c"
    done
}

# hold NAME OPTION...
hold() {
    name=$1
    shift
    if $CC -std=c11 -O2 -w -shared -fPIC -fvisibility=hidden -I "$abi" "$root/less.c" -lm -o "$root/attn_less.so" &&
        "$check" "$root/attn_less.so" "$@" >"$root/out" 2>&1; then
        return
    fi
    echo "without $name:"
    tail -20 "$root/out"
    failed=1
}

CC=$*
least='ATTN_TERM_SLIDING_WINDOW ATTN_TERM_SYMMETRIC_WINDOW ATTN_FEATURE_CONTIGUOUS_KV ATTN_FEATURE_LSE
    ATTN_FEATURE_BLOCK_TABLE_ROW ATTN_FEATURE_MIXED_BATCH ATTN_VIEW_SEPARATE_STRIDES ATTN_KERNEL_MERGE_STATES'
for word in $least ATTN_TERM_BIDIRECTIONAL; do
    without "$word"
    hold "$word" --filter 'undeclared.*'
done
# shellcheck disable=SC2086 # words
without $least
export ATTN_CACHE_DIR="$root/cache" ATTN_PLUGIN_PATH="$root/attn_less.so"
hold 'all of these' --record
# What was recorded is shown, and is of this very file.
info=$(dirname "$check")/attn-info
shown='    attn-check --quick: [0-9]* passed, 0 failed, [0-9]* skipped (seed 1, libattn [0-9.]*)'
"$info" | grep -q "^$shown\$" || { echo 'no record in:'; "$info"; cat "$root/cache/conformance"; failed=1; }
printf x >>"$root/attn_less.so"
"$info" 2>/dev/null | grep -q "^$shown; not conformant: a record of another plugin file\$" || { echo 'a record of another file counts'; failed=1; }
truncate -s -1 "$root/attn_less.so"
"$check" "$root/attn_less.so" --record --part 1/2 2>&1 | grep -q 'record: is of all cases' || { echo 'a part was recorded'; failed=1; }
unset ATTN_CACHE_DIR ATTN_PLUGIN_PATH
# A case keeps its name: one that only the array of the lesser plugin has runs on the whole one, and a name of no case
# fails.
cp "$root/attn_less.so" "$root/attn_least.so"
cp "$source" "$root/less.c"
$CC -std=c11 -O2 -w -shared -fPIC -fvisibility=hidden -I "$abi" "$root/less.c" -lm -o "$root/attn_less.so"
for plugin in least less; do
    "$check" "$root/attn_$plugin.so" --list 2>/dev/null | grep '^attend' | sort >"$root/$plugin.txt"
done
for case in $(comm -23 "$root/least.txt" "$root/less.txt" | awk 'NR % 40 == 1'); do
    "$check" "$root/attn_less.so" --filter "$case" 2>&1 | grep -q ': 1 passed, 0 failed' || { echo "not by its name: $case"; failed=1; }
    "$check" "$root/attn_less.so" --filter "$case.x" >/dev/null 2>&1 && { echo "a name of no case passed"; failed=1; }
done
[ -n "${case:-}" ] || { echo 'both plugins have the same cases'; failed=1; }
[ "$failed" = 0 ] && tail -1 "$root/out"
exit $failed
