#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Kernels whose results are right and that change the process around them fail, with what they changed.
# usage: conduct.sh ATTN-CHECK FOLDER
set -u
check=$1 folder=$2
failed=0

# expect MISDEED_around_STAGE WHAT [FILTER]: is all that the plugin is blamed for
expect() {
    said=$("$check" "$folder/attn_$1.so" --filter "${3:-attend.decode.*}" 2>&1 </dev/null)
    code=$?
    if [ $code -ne 1 ] || ! printf '%s\n' "$said" | grep -q "conduct: .*$2" || printf '%s\n' "$said" | grep -q 'allowed error'; then
        echo "$1: status $code, no '$2' in:"
        printf '%s\n' "$said" | tail -5
        failed=1
    fi
}
expect flush_around_create 'create changed the floating-point control word' 'conduct.*'
expect flush_around_attend 'changed the floating-point control word'
expect handler_around_attend 'changed the handler of signal 11'
expect flags_around_attend 'changed the flags or mask of signal 17'
expect blocks_signal_around_attend 'changed whether signal 2 is blocked'
expect locale_around_attend 'changed the locale'
expect rounding_around_attend 'changed the rounding mode'
expect folder_around_attend 'changed the working directory'
expect environment_around_attend 'changed the environment'
expect mask_around_attend 'changed the file mode mask'
expect affinity_around_attend 'changed the processors that it may run on'
expect limits_around_attend 'changed a resource limit'
expect streams_around_attend 'changed where descriptor 2 leads'
expect nice_around_attend 'changed the niceness'
expect altstack_around_attend 'changed the stack of signal handlers'
expect daemon_around_attend 'left a process that runs'
expect talks_around_attend "wrote on standard output: 'hello"
exit $failed
