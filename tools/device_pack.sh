#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Packs what stands in a build folder for a machine that has a GPU but no compiler: tools/device.sh BACKEND FOLDER takes
# FOLDER there as its build folder, and does all of its checks. With it a copy of the JSON library that attn-run needs.
# usage: tools/device_pack.sh BUILD_DIR FOLDER      FOLDER must not exist
set -eu
if [ $# -ne 2 ] || [ ! -f "$1/core/libattn.so.1" ] || [ -e "$2" ]; then
    sed -n 's/^# usage: /usage: /p' "$0" >&2
    exit 2
fi
build=$1 folder=$2

mkdir -p "$folder/core" "$folder/tools" "$folder/examples" "$folder/lib" "$folder/meson-private"
: >"$folder/build.ninja"                   # empty: there is nothing to build
: >"$folder/meson-private/coredata.dat"    # by which tools know that the core next to them is theirs
cp "$build/core/libattn.so.1" "$folder/core"
for tool in attn-info attn-run attn-check attn-bench attn-scan; do
    [ ! -f "$build/tools/$tool" ] || cp "$build/tools/$tool" "$folder/tools"
done
for example in engine spmd attn_example.so; do
    cp "$build/examples/$example" "$folder/examples"
done
for plugin in "$build"/plugins/*/attn_*.so; do
    name=$(basename "$(dirname "$plugin")")
    mkdir -p "$folder/plugins/$name"
    cp "$plugin" "$folder/plugins/$name"
done
json=$(ldd "$build/tools/attn-run" 2>/dev/null | sed -n 's/.*libcjson.so.1 => \([^ ]*\) .*/\1/p')
[ -z "$json" ] || cp "$json" "$folder/lib"
find "$folder" -type f \( -name '*.so*' -o -path '*/tools/*' -o -path '*/examples/*' \) -exec strip {} +
du -sh "$folder"
