#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# The public types beside the stored baseline: any difference fails, until it is meant. Then `baseline.sh --store` writes
# it anew, and abi/CHANGES.md says the change in a line.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
abi=$here/../../abi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
command -v abidw >/dev/null 2>&1 || { echo "abigail-tools is not there"; exit 77; }
# In the folder of the headers, so that the baseline names no machine's paths.
(cd "$abi" && cc -std=c11 -g -shared -fPIC -fvisibility=hidden -I. -o "$work/surface.so" ../tests/abi/surface.c)
abidw --no-show-locs --no-comp-dir-path --no-corpus-path --headers-dir "$abi" --out-file "$work/now.abi" "$work/surface.so"
if [ "${1:-}" = --store ]; then
    cp "$work/now.abi" "$here/baseline.abi"
    exit 0
fi
if ! abidiff --leaf-changes-only "$here/baseline.abi" "$work/now.abi" >"$work/report"; then
    cat "$work/report"
    echo "the public ABI differs from tests/abi/baseline.abi; if that is meant: tests/abi/baseline.sh --store, and a line in abi/CHANGES.md"
    exit 1
fi
