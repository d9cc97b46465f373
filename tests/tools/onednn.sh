#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# examples/onednn is built as its README.md says, against installed headers and PyPI's oneDNN in build/venv: green in attn-check with
# oneDNN's own bfloat16 and, where that is switched off, with float32 tiles; a model is right on it. Skipped where the package isn't there.
# usage: onednn.sh SOURCE BUILD
set -eu
source=$1 build=$2
if [ ! -f "$build/venv/include/oneapi/dnnl/dnnl.h" ]; then
    echo "skipped: $build/venv has no oneDNN; tools/test.sh makes it from tests/requirements.txt"
    exit 77
fi
root=$(mktemp -d)
trap 'rm -rf "$root"' EXIT
DESTDIR=$root/to meson install -C "$build" --no-rebuild >/dev/null
prefix=$root/to$(meson introspect "$build" --buildoptions | sed -n 's/.*"name": "prefix", "value": "\([^"]*\)".*/\1/p')
cat >"$root/pkg-config" <<END
#!/bin/sh
PKG_CONFIG_PATH=$(dirname "$(find "$root/to" -name attn-plugin.pc)") exec $(command -v pkg-config) --define-variable=prefix="$prefix" "\$@"
END
chmod +x "$root/pkg-config"
unset ATTN_PLUGIN_PATH ATTN_BACKEND
export ATTN_CACHE_DIR=''

# The installed copy: nothing of this tree is above it.
cp -r "$prefix/share/attn/examples/onednn" "$root/onednn"
PKG_CONFIG=$root/pkg-config meson setup "$root/build" "$root/onednn" -Donednn="$build/venv" >"$root/log" &&
    meson compile -C "$root/build" >>"$root/log" || {
    cat "$root/log"
    exit 1
}
plugin=$root/build/attn_onednn.so

"$prefix/bin/attn-check" "$plugin" --badge "$root/badge" | tee "$root/out"
grep -q '"color": "brightgreen"' "$root/badge"
grep -q '^onednn: [1-9][0-9]* passed, 0 failed, 0 skipped' "$root/out"
ONEDNN_MAX_CPU_ISA=AVX2 "$prefix/bin/attn-check" "$plugin" --filter 'attend.*.bf16.bf16.*' | tee "$root/out"
grep -q '^onednn: [1-9][0-9]* passed, 0 failed' "$root/out"
ATTN_PLUGIN_PATH=$plugin ATTN_BACKEND=onednn "$prefix/bin/attn-run" --model "$source/models/llama-3.1-8b.json" --layers 2 --steps 2 \
    --verify | tee "$root/out"
grep -q 'full  *onednn ' "$root/out"
# A layer with a window, which it does not declare, is refused by name.
ATTN_PLUGIN_PATH=$plugin "$prefix/bin/attn-info" --model "$source/models/gemma-2-9b.json" --explain >"$root/out"
grep 'not onednn for prefill: sliding_window' "$root/out"
ATTN_PLUGIN_PATH=$plugin "$prefix/bin/attn-info" --capabilities >"$root/out"
sed -n '/^ *onednn/,/^$/p' "$root/out" | grep -i 'step_allocates\|step allocates'
