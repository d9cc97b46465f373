#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Each library exports exactly the one symbol named behind it (and its version).
set -eu
while [ $# -gt 0 ]; do
    exported=$(nm -D --defined-only "$1" | awk '$2 != "A" {sub(/@.*/, "", $3); print $3}')
    [ "$exported" = "$2" ] || { echo "$1 exports: $exported; only $2 is allowed"; exit 1; }
    shift 2
done
