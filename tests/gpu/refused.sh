#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# What GPU backends refuse of batch_invariant 2, whose other layers they declare: states of 16 bits, with what is allowed.
# usage: refused.sh ATTN-CHECK PLUGIN.so
set -u
. "$(dirname "$0")/../tools/expect.sh"
expect 0 '^skipped 2 .*: refused: batch_invariant 2 with states of 16 bits, supported: 0, 1, or 2 with states in float32$' \
    "$1" "$2" --filter 'gated_delta.bf16.mixed*invariant2*'
exit $failed
