#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Every mutant of cpu_ref has to fail attn-check, the unchanged control has to pass. Prints how many were caught.
set -u
check=$1 plugin=$2 source=$3
caught=0 missed=""
ATTN_PLUGIN_PATH=$plugin
export ATTN_PLUGIN_PATH
for name in $(sed -n 's/^ *{"\(mutant_[a-z_]*\)".*/\1/p' "$source"); do
    "$check" "$name" --fail-fast >/dev/null 2>&1
    code=$?
    if [ "$name" = mutant_none ]; then
        [ $code -eq 0 ] || missed="$missed $name(control)"
    elif [ $code -eq 1 ]; then
        caught=$((caught + 1))
    else
        missed="$missed $name(exit $code)"
    fi
done
echo "$caught mutants caught"
[ -z "$missed" ] || { echo "not caught:$missed"; exit 1; }
[ $caught -ge 20 ]
