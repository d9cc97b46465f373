#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# A target that the compiler does not know ends the set-up, with what there is to do. 3 s
# usage: unknown_target.sh ROOT COMPILER
set -eu
build=$(mktemp -d)
trap 'rm -rf "$build"' EXIT
if meson setup "$build" "$1" -Dhip-archs=gfx942,gfx999 "-Dhip-clang=$2" -Dtests=disabled -Dcpu-simd=disabled \
    -Dcuda-flash=disabled -Dlevel-zero=disabled -Dnccl=disabled -Dmpi=disabled >"$build/log"; then
    echo "gfx999 was taken"
    exit 1
fi
grep -q "hip-archs: gfx999 is none of the targets of $2 [0-9.]*; gfx950 needs clang 20 or newer" "$build/log"
