#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# ONNX Runtime from PyPI with examples/onnxruntime.c as a library of custom operators, next to its own GroupQueryAttention.
# Called by tools/test_engines.sh with the folder to work in and libattn.so.1; 10 s, and 200 MB of packages are kept. onnxruntime_c_api.h, which no package of PyPI has, is
# looked for in ONNXRUNTIME_INCLUDE, else where Debian 13's libonnxruntime-dev puts it.
set -eu
work=$1/onnxruntime core=$2
here=$(cd "$(dirname "$0")" && pwd)
source=$(cd "$here/../.." && pwd)
include=${ONNXRUNTIME_INCLUDE:-/usr/include/onnxruntime}
if [ ! -f "$include/onnxruntime_c_api.h" ]; then
    echo "onnxruntime: no $include/onnxruntime_c_api.h: apt install libonnxruntime-dev (Debian 13), or set ONNXRUNTIME_INCLUDE" >&2
    exit 77
fi
mkdir -p "$work"
if [ ! -f "$work/venv/complete" ]; then
    python3 -m venv "$work/venv" && "$work/venv/bin/pip" install --quiet onnxruntime onnx numpy ||
        { echo "onnxruntime: PyPI's cannot be installed" >&2 && exit 77; }
    touch "$work/venv/complete"
fi
cc -std=c11 -Wall -Wextra -Werror -D_GNU_SOURCE -shared -fPIC -I "$source/abi" -isystem "$include" "$source/examples/onnxruntime.c" -ldl -lm \
    -o "$work/gqa.so"
for backend in cpu_simd cpu_ref; do
    ATTN_BACKEND=$backend ATTN_VALIDATE=1 ATTN_LIBRARY=$core "$work/venv/bin/python" "$here/compare.py" "$work/gqa.so" ||
        { echo "FAILED on $backend"; exit 1; }
done
echo "onnxruntime: 2 passed"
