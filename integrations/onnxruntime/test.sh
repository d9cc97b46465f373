#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# ONNX Runtime from PyPI with examples/onnxruntime.c as a library of custom operators, next to its own GroupQueryAttention.
# Called by tools/test_engines.sh with the folder to work in and libattn.so.1, and by Meson with a Python that has onnxruntime and
# onnx, too; 10 s. Without that Python an environment of 200 MB is made and kept, and the header is fetched (header.sh).
set -eu
work=$1/onnxruntime core=$2 python=${3:-$1/onnxruntime/venv/bin/python}
here=$(cd "$(dirname "$0")" && pwd)
source=$(cd "$here/../.." && pwd)
mkdir -p "$work"
if [ $# -lt 3 ] && [ ! -f "$work/venv/complete" ]; then
    python3 -m venv "$work/venv" && "$work/venv/bin/pip" install --quiet onnxruntime onnx numpy ||
        { echo "onnxruntime: PyPI's cannot be installed" >&2 && exit 77; }
    touch "$work/venv/complete"
fi
"$python" -c 'import onnx, onnxruntime' 2>/dev/null || { echo "onnxruntime: $python has no onnxruntime or no onnx" >&2 && exit 77; }
fetch=''
[ $# -ge 3 ] || fetch=fetch
include=$(sh "$here/header.sh" "$work" $fetch) || exit
cc -std=c11 -Wall -Wextra -Werror -D_GNU_SOURCE -shared -fPIC -I "$source/abi" -isystem "$include" "$source/examples/onnxruntime.c" -ldl -lm \
    -o "$work/gqa.so"
tried=0
for backend in cpu_simd cpu_ref; do
    [ -f "$(dirname "$core")/../plugins/$backend/attn_$backend.so" ] || continue
    ATTN_BACKEND=$backend ATTN_VALIDATE=1 ATTN_LIBRARY=$core "$python" "$here/compare.py" "$work/gqa.so" ||
        { echo "FAILED on $backend"; exit 1; }
    tried=$((tried + 1))
done
[ $tried -gt 0 ]
echo "onnxruntime: $tried passed"
