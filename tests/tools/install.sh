#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# What `meson install` puts down works from there: tools find the core and the plugins beside them, an engine builds
# against attn.pc and needs nothing of the source tree.
set -eu
models=$1 build=$2
root=$(mktemp -d)

DESTDIR=$root meson install -C "$build" --no-rebuild >/dev/null
prefix=$root$(meson introspect "$build" --buildoptions | sed -n 's/.*"name": "prefix", "value": "\([^"]*\)".*/\1/p')
pc=$(find "$root" -name attn.pc)
library=$(find "$root" -name libattn.so.1)
plugins=$(dirname "$library")/attn
[ -f "$plugins/attn_cpu_ref.so" ]
for tool in info run check; do
    [ -f "$prefix/share/man/man1/attn-$tool.1" ]
done
for header in "$models"/../abi/attn/*.h; do
    cmp "$header" "$prefix/include/attn/$(basename "$header")"
done

for page in writing-a-backend semantics features abi; do
    [ -s "$prefix/share/doc/libattn/$page.md" ]
done

# Moved as a whole: nothing may point back at the build tree.
"$prefix/bin/attn-info" --json >info.json
grep -q "\"file\":[[:space:]]*\"$plugins/attn_cpu_ref.so\"" info.json
if grep -q "$build" info.json; then
    echo "an installed tool looks into the build tree"
    exit 1
fi
"$prefix/bin/attn-run" --model "$models/llama-3.1-8b.json" --layers 1 --steps 1 --verify

export PKG_CONFIG_PATH="$(dirname "$pc")" PKG_CONFIG_SYSROOT_DIR="$root"
${CC:-cc} -o engine "$models/../examples/engine.c" $(pkg-config --cflags attn) -ldl -lm
LD_LIBRARY_PATH=$(dirname "$library") ./engine | grep -q 'was served by'
rm -rf "$root" engine info.json
