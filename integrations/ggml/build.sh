#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Builds the backend against a checkout of llama.cpp or ggml and the libraries built of it.
# usage: build.sh LLAMA.CPP LIBRARIES OUT.so
set -eu
here=$(dirname "$0")
${CC:-cc} -std=c11 -D_GNU_SOURCE -O2 -Wall -Wextra -Wno-unused-parameter -Werror -shared -fPIC -fvisibility=hidden -I "$here/../../abi" \
    -I "$1/ggml/include" -I "$1/ggml/src" "$here/backend.c" "$here/layers.c" "$here/requests.c" -L"$2" -lggml-base -lggml-cpu -ldl -o "$3"
