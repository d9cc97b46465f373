#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Every engine with every plugin through every core, of this version and the next. See README.md.
# usage: pairs.sh LIBATTN CPU_REF SOURCE
set -eu
core=$1 cpu_ref=$2 source=$3
here=$source/tests/abi_versions
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# The next version's headers: every struct has grown that may: those that tell their size, extensions, and elements of
# arrays whose owner tells it. The others are listed below.
mkdir -p "$work/next/attn/draft"
for header in "$source"/abi/attn/*.h "$source"/abi/attn/draft/*.h; do
    awk -v kept="$work/kept" '
        /^#define ATTN_ABI_VERSION 0x/ { $3 = "99u" }
        /^struct attn_[a-z_]+ \{/ {
            grows = $2 ~ /^attn_(cache_desc|vendor_code|batch_table|layer_cache|refused_combination|block_copy|block_memory)$/
            held = $2 ~ /^attn_(error|ext)$/; name = $2
        }
        /^    (size_t struct_size|struct attn_ext ext);/ { grows = !held }
        /^\};/ && name != "" { if (grows) { print "    uint64_t grown_tail[3];" } else { print name >>kept }; name = "" }
        /^#define ATTN_STATIC_ASSERT/ { print "#define ATTN_STATIC_ASSERT(condition, message) struct attn_not_asserted"; next }
        { print }
    ' "$header" >"$work/next/attn/${header#*/abi/attn/}"
done
sort "$work/kept" | tr '\n' ' ' >"$work/list"
if [ "$(cat "$work/list")" != "attn_device attn_dtype attn_error attn_ext attn_head_size_range attn_range attn_tensor " ]; then
    echo "structs that cannot grow: $(cat "$work/list")"
    exit 1
fi

# build NAME HEADERS FLAGS: an engine and a plugin
build() {
    mkdir -p "$work/plugin_$1"
    # shellcheck disable=SC2086
    cc -std=gnu11 $3 -I "$2" -o "$work/engine_$1" "$source/examples/engine.c" -ldl -lm
    # shellcheck disable=SC2086
    cc -std=gnu11 $3 -shared -fPIC -fvisibility=hidden -I "$2" -o "$work/plugin_$1/attn_example.so" "$here/plugin.c" -lm
}
build this "$source/abi" ""
build next "$work/next" -DNEXT
cc -std=gnu11 -I "$work/next" -o "$work/inputs" "$here/inputs.c" -ldl
mkdir "$work/objects"
# rooms have files of the same names
(cd "$source" && find core compositions formats isolation observers operators -name '*.c' | while read -r file; do
    echo "$file" "$work/objects/$(echo "$file" | tr / _).o"
done | xargs -n 2 -P 2 sh -c '
    cc -std=c11 -fPIC -fvisibility=hidden -D_GNU_SOURCE "-DATTN_LIBRARY_VERSION=\"0.99.0\"" -I "$0" -I core -I formats -c "$1" -o "$2"' "$work/next")
cc -shared -pthread -Wl,--version-script,"$source/core/libattn.map" -o "$work/libattn_next.so" "$work"/objects/*.o -ldl -lm

pairs=0
# serve CORE ENGINE PLUGIN-FILE BACKEND
serve() {
    ATTN_CACHE_DIR='' ATTN_BACKEND=$4 ATTN_PLUGIN_PATH=$3 "$work/engine_$2" "$1" >"$work/out" ||
        { echo "core $1, engine $2, plugin $3 failed"; exit 1; }
    for layer in full sliding; do
        grep -q "layer $layer was served by $4$" "$work/out" || {
            echo "core $1, engine $2, plugin $3:"
            cat "$work/out"
            exit 1
        }
    done
    pairs=$((pairs + 1))
}
for each in "$core" "$work/libattn_next.so"; do
    for engine in this next; do
        serve "$each" $engine "$work/plugin_this/attn_example.so" example
        serve "$each" $engine "$work/plugin_next/attn_example.so" example
        serve "$each" $engine "$cpu_ref" cpu_ref
    done
done
ATTN_CACHE_DIR='' ATTN_PLUGIN_PATH=$cpu_ref "$work/inputs" "$core" this
ATTN_CACHE_DIR='' ATTN_PLUGIN_PATH=$cpu_ref "$work/inputs" "$work/libattn_next.so" next
echo "$pairs pairs"
