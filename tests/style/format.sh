#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Every C and CUDA file of ours is as .clang-format lays it out. Argument: clang-format.
# The recorded headers of older ABIs stay as they were.
set -eu
cd "$(dirname "$0")/../.."
find abi bindings collectives compositions core emulators examples formats isolation layout observers operators plugins tests tools -path tests/abi_versions -prune -o \
    \( -name '*.c' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh' -o -name '*.cpp' \) -print0 |
    xargs -0 "$1" --dry-run -Werror --style=file
