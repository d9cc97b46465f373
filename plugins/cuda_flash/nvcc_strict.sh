#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Compiles kernels whose speed rests on registers and on wgmma running ahead: a spill, or wgmma that ptxas serialises,
# is an error. usage: nvcc_strict.sh NVCC ARGUMENT...
out=$("$@" -Xptxas -v 2>&1)
status=$?
lost=$(printf '%s\n' "$out" | grep -E 'serialized|C75[0-9][0-9]|[1-9][0-9]* bytes spill')
if [ $status -ne 0 ] || [ -n "$lost" ]; then
    printf '%s\n' "$out" >&2
    [ -z "$lost" ] || echo 'nvcc_strict.sh: registers are spilled or wgmma is serialised, see above' >&2
    exit 1
fi
printf '%s\n' "$out" | grep -v '^ptxas info\|bytes stack frame\|^$' >&2
exit 0
