# SPDX-License-Identifier: Apache-2.0
# For the tests of tools, which end with `exit $failed`.
failed=0

# expect STATUS PATTERN command...
expect() {
    want=$1 pattern=$2
    shift 2
    got=0
    output=$("$@" 2>&1) || got=$?
    if [ $got -ne "$want" ] || ! printf '%s' "$output" | grep -q -- "$pattern"; then
        echo "status $got (wanted $want), pattern '$pattern' in: $*"
        printf '%s\n' "$output" | head -n 20
        failed=1
    fi
}
