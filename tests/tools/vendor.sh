#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# docs/writing-a-backend.md as it is printed: its sh blocks run one after the other in an empty folder, with nothing but
# what `meson install` put down. Where a command names no cases of its own, one kernel's stand for all: tests/tools/examples.sh
# runs the example through every case.
# usage: vendor.sh MODELS BUILD DOCUMENT
set -eu
models=$1 build=$2 document=$3
root=$(mktemp -d)
trap 'rm -rf "$root"' EXIT
DESTDIR=$root/to meson install -C "$build" --no-rebuild >/dev/null
prefix=$root/to$(meson introspect "$build" --buildoptions | sed -n 's/.*"name": "prefix", "value": "\([^"]*\)".*/\1/p')
mkdir "$root/bin" "$root/empty"

cat >"$root/bin/attn-check" <<END
#!/bin/sh
case "\$*" in
*--filter*) ;;
*) set -- "\$@" --filter 'merge_states*' ;;
esac
exec "$prefix/bin/attn-check" "\$@"
END
cat >"$root/bin/pkg-config" <<END
#!/bin/sh
PKG_CONFIG_PATH=$(dirname "$(find "$root/to" -name attn.pc)") exec $(command -v pkg-config) --define-variable=prefix="$prefix" "\$@"
END
chmod +x "$root"/bin/*

# meson.build is there before the block that uses it.
awk '/^```meson/ { on = 1; next } /^```/ { on = 0 } on' "$document" >"$root/meson.build"
awk '/^```sh/ { on = 1; next } /^```/ { on = 0 } on' "$document" >"$root/walk.sh"
[ "$(wc -l <"$root/walk.sh")" -ge 20 ]
{
    sed "/^mkdir yours/ a cp $root/meson.build $models/llama-3.1-8b.json . && mv llama-3.1-8b.json config.json" "$root/walk.sh"
} >"$root/walk2.sh"
cd "$root/empty"
unset ATTN_PLUGIN_PATH ATTN_BACKEND
PATH=$root/bin:$prefix/bin:$PATH ATTN_CACHE_DIR='' sh -eux "$root/walk2.sh" >"$root/out" 2>&1 || {
    cat "$root/out"
    exit 1
}
[ "$(grep -c '^yours: [1-9][0-9]* passed, 0 failed' "$root/out")" -ge 5 ] || {
    cat "$root/out"
    exit 1
}
grep -q ' T attn_plugin_entry$' "$root/out"
grep -q 'elements compared, all right' "$root/out"
echo "$(grep -c . "$root/walk.sh") documented commands"
