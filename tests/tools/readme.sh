#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# The programs in README.md, as printed: the one in C builds without a warning and names a backend; the one in Python
# agrees with torch where the test environment is there.
# usage: readme.sh MODELS README LIBATTN PYTHON-PACKAGE PYTHON
set -u
readme=$2 library=$3 package=$4 python=$5
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
block() {
    awk -v begin="^\`\`\`$1\$" '$0 ~ begin { inside = 1; next } /^```$/ { inside = 0 } inside' "$readme"
}
block c >"$folder/readme.c"
block python >"$folder/readme.py"
cc -std=c11 -Wall -Wextra -Wno-missing-field-initializers -Werror -I "$(dirname "$readme")/abi" "$folder/readme.c" -ldl \
    -o "$folder/readme" || exit 1
LD_LIBRARY_PATH=$(dirname "$library")
export LD_LIBRARY_PATH
said=$("$folder/readme") || exit 1
case $said in
"decode is served by cpu_"*) ;;
*) echo "unexpected: $said"; exit 1 ;;
esac
[ -x "$python" ] && "$python" -c 'import torch' 2>/dev/null || exit 0
distance=$(PYTHONPATH=$package "$python" "$folder/readme.py") || exit 1
case $distance in
"tensor(0."* | "tensor("*e-0*) ;;
*) echo "unexpected distance: $distance"; exit 1 ;;
esac
