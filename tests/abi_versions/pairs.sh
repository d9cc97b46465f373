#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Every engine with every plugin, whichever headers they were built from. See README.md.
set -eu
core=$1 source=$2
here=$source/tests/abi_versions
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# Grows every struct that tells its size, but for those held by value; their static asserts go.
grow() {
    mkdir -p "$work/grown/attn"
    for header in "$source"/abi/attn/*.h; do
        awk '
            /^struct attn_[a-z_]+ \{/ { sized = 0; held = $2 == "attn_limits" || $2 == "attn_error" }
            /^    size_t struct_size;/ { sized = 1 }
            /^\};/ && sized && !held { print "    uint64_t grown_tail[3];"; sized = 0 }
            /^ATTN_STATIC_ASSERT\((sizeof|offsetof)\(struct/ { skip = 1 }
            !skip { print }
            skip && /;$/ { skip = 0 }
        ' "$header" >"$work/grown/attn/$(basename "$header")"
    done
    cp "$source"/examples/engine.c "$source"/examples/plugin.c "$work/grown"
}

# Builds NAME from the folder that holds attn/, and its examples.
build() {
    cc -std=gnu11 -I "$2" -o "$work/engine_$1" "$3/engine.c" -ldl
    mkdir -p "$work/plugin_$1"
    cc -std=gnu11 -shared -fPIC -fvisibility=hidden -I "$2" -o "$work/plugin_$1/attn_example.so" "$3/plugin.c" -lm
}

grow
grep -q grown_tail "$work/grown/attn/api.h" && grep -q grown_tail "$work/grown/attn/kernels.h"
build now "$source/abi" "$source/examples"
build grown "$work/grown" "$work/grown"
names="now grown"
for folder in "$here"/*/attn; do
    version=$(basename "$(dirname "$folder")")
    build "$version" "$(dirname "$folder")" "$(dirname "$folder")"
    names="$names $version"
done

pairs=0
for engine in $names; do
    for plugin in $names; do
        ATTN_CACHE_DIR='' ATTN_BACKEND=example ATTN_PLUGIN_PATH=$work/plugin_$plugin \
            "$work/engine_$engine" "$core" >"$work/out" || { echo "engine $engine, plugin $plugin failed"; exit 1; }
        for layer in full sliding; do
            grep -q "layer $layer was served by example: out\[19, 0, 0\] = 1$" "$work/out" || {
                echo "engine $engine, plugin $plugin:"
                cat "$work/out"
                exit 1
            }
        done
        pairs=$((pairs + 1))
    done
done
echo "$pairs pairs"
