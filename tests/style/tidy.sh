#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# clang-tidy finds nothing in the core, the reference, the collectives and the tools that run models. Arguments:
# run-clang-tidy, a build folder. Kernels count in int inside a tile and tests inside a case: there its widenings
# would be noise.
set -eu
status=0
found=$("$1" -quiet -p "$2" \
    '^(?!.*/tests/).*/(core|collectives|plugins/cpu_ref|tools/(common|info|run|scan))/.*\.c$' 2>&1) || status=$?
if [ $status -ne 0 ]; then
    printf '%s\n' "$found" | grep -A3 'error:' || printf '%s\n' "$found"
fi
exit $status
