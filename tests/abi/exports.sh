#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Each library exports exactly the one symbol named after it (and its version), is bound when it is loaded, and is
# never unloaded: after a dlclose the core would not know any more which plugin files are in the process.
set -eu
while [ $# -gt 0 ]; do
    exported=$(nm -D --defined-only "$1" | awk '$2 != "A" {sub(/@.*/, "", $3); print $3}')
    [ "$exported" = "$2" ] || { echo "$1 exports: $exported; only $2 is allowed"; exit 1; }
    flags=$(readelf -d "$1" | sed -n 's/.*Flags: //p')
    case $flags in *NOW*NODELETE*) ;; *) echo "$1 has the flags: $flags; NOW and NODELETE are wanted"; exit 1 ;; esac
    shift 2
done
