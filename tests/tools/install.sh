#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# What `meson install` puts down works from there: tools find the core and the plugins next to them, an engine builds
# against attn.pc and needs nothing of the source tree.
set -eu
models=$1 build=$2
root=$(mktemp -d)
trap 'rm -rf "$root"' EXIT

DESTDIR=$root meson install -C "$build" --no-rebuild >/dev/null
prefix=$root$(meson introspect "$build" --buildoptions | sed -n 's/.*"name": "prefix", "value": "\([^"]*\)".*/\1/p')
pc=$(find "$root" -name attn.pc)
library=$(find "$root" -name libattn.so.1)
plugins=$(dirname "$library")/attn
[ -f "$plugins/attn_cpu_ref.so" ]
for tool in info run check; do
    [ -f "$prefix/share/man/man1/attn-$tool.1" ]
done
for header in "$models"/../abi/attn/*.h "$models"/../abi/attn/draft/*.h; do
    cmp "$header" "$prefix/include/${header#*/abi/}"
done

for page in engine writing-a-backend semantics features abi; do
    [ -s "$prefix/share/doc/libattn/$page.md" ]
done

# Moved as a whole: nothing may point back at the build tree.
"$prefix/bin/attn-info" --json >"$root/info.json"
grep -q "\"file\":[[:space:]]*\"$plugins/attn_cpu_ref.so\"" "$root/info.json"
if grep -q "$build" "$root/info.json"; then
    echo "an installed tool looks into the build tree"
    exit 1
fi
"$prefix/bin/attn-run" --model "$models/llama-3.1-8b.json" --layers 1 --steps 1 --verify

export PKG_CONFIG_PATH="$(dirname "$pc")" PKG_CONFIG_SYSROOT_DIR="$root"
${CC:-cc} -o "$root/engine" "$models/../examples/engine.c" $(pkg-config --cflags attn) -ldl -lm
LD_LIBRARY_PATH=$(dirname "$library") "$root/engine" | grep -q 'was served by'
# So does what works on layouts.
printf '#include <attn/draft/layout.h>\nint main(void) { return attn_layout_convert == 0; }\n' >"$root/layout.c"
${CC:-cc} -o "$root/layout" "$root/layout.c" $(pkg-config --cflags --libs attn-layout)
LD_LIBRARY_PATH=$(dirname "$library") "$root/layout"
# A vendor's flags bring headers and no library; the plugin that they build is found.
[ -z "$(pkg-config --libs attn-plugin | tr -d ' ')" ]
${CC:-cc} -shared -fPIC -fvisibility=hidden $(pkg-config --cflags attn-plugin) "$models/../examples/plugin.c" -lm -o "$root/attn_example.so"
ATTN_PLUGIN_PATH=$root/attn_example.so "$prefix/bin/attn-info" | grep -q '  example '
if command -v cmake >/dev/null; then
    cp "$models"/../examples/*.c "$root"
    cat >"$root/CMakeLists.txt" <<'END'
cmake_minimum_required(VERSION 3.20)
project(client C)
find_package(attn 0.1 REQUIRED)
add_executable(engine engine.c)
target_link_libraries(engine attn::attn dl m)
add_executable(layout layout.c)
target_link_libraries(layout attn::layout)
add_library(yours MODULE plugin.c)
target_link_libraries(yours attn::plugin m)
END
    cmake -S "$root" -B "$root/client" -DCMAKE_PREFIX_PATH="$prefix" >/dev/null
    cmake --build "$root/client" >/dev/null
    LD_LIBRARY_PATH=$(dirname "$library") "$root/client/engine" | grep -q 'was served by'
    if ldd "$root/client/libyours.so" | grep attn; then
        exit 1
    fi
fi
