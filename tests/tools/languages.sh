#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# The headers from other languages: C++20 takes the examples as they are, bindgen and cgo the constants and structs. Rust
# and Go run where their compilers are; at least C++ always does.
# usage: languages.sh SOURCE LIBATTN
set -eu
source=$1 core=$2 ran='C++20'
root=$(mktemp -d)
trap 'rm -rf "$root"' EXIT
export ATTN_CACHE_DIR=''

for example in engine plugin; do
    ${CXX:-c++} -std=c++20 -x c++ -Wall -Wextra -Werror -Wno-missing-field-initializers -fsyntax-only -I "$source/abi" \
        "$source/examples/$example.c"
done
if command -v bindgen >/dev/null && command -v rustc >/dev/null; then
    bindgen "$source/abi/attn/api.h" -- -I "$source/abi" >"$root/attn.rs" 2>/dev/null
    ATTN_BINDINGS=$root/attn.rs rustc -A warnings -o "$root/rust" "$source/examples/rust/main.rs"
    ATTN_BACKEND=cpu_ref "$root/rust" "$core" | grep -q '^served by cpu_ref; causal is bit 0x1$'
    ran="$ran, Rust"
fi
if command -v go >/dev/null; then
    GO111MODULE=off GOCACHE=$root/cache GOFLAGS='' CGO_CFLAGS="-I$source/abi" go build -o "$root/go" "$source/examples/go/main.go"
    ATTN_BACKEND=cpu_ref "$root/go" "$core" | grep -q '^served by cpu_ref; causal is bit 0x1$'
    ran="$ran, Go"
fi
echo "ran: $ran"
