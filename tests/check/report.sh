#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# What attn-check says of a wrong plugin: what the failed cases have in common, which kernel was not declared, how to
# repeat a case, and which case took the process down.
# usage: report.sh ATTN-CHECK PLUGIN.c ABI CC...
set -u
check=$1 source=$2 abi=$3
shift 3
root=$(mktemp -d)
trap 'rm -rf "$root"' EXIT
failed=0

# expect PATTERN: in what the last run printed
expect() {
    grep -q -- "$1" "$root/out" || {
        echo "no '$1' in:"
        tail -20 "$root/out"
        failed=1
    }
}

cc="$*"
# change SED-EXPRESSION: builds the example with one line changed
change() {
    sed "$1" "$source" >"$root/wrong.c"
    cmp -s "$source" "$root/wrong.c" && { echo "'$1' changes nothing"; failed=1; }
    $cc -std=c11 -O2 -w -shared -fPIC -fvisibility=hidden -I "$abi" "$root/wrong.c" -lm -o "$root/attn_wrong.so"
}

# fails FILTER: the changed example does, of these cases
fails() {
    "$check" "$root/attn_wrong.so" --filter "$1" >"$root/out" 2>&1 && failed=1
}

change 's/j < position - l->window_left/j <= position - l->window_left/'
"$check" "$root/attn_wrong.so" --filter 'attend.*' --badge "$root/badge" >"$root/out" 2>&1 && failed=1
expect '--badge: is of all cases'
"$check" "$root/attn_wrong.so" --filter 'attend.*' --junit "$root/xml" >"$root/out" 2>&1 && failed=1
line=$(grep '^<testsuite name="example"' "$root/xml")
[ "$line" = "<testsuite name=\"example\" tests=\"$(grep -c '<testcase ' "$root/xml")\" failures=\"$(grep -c '<failure ' "$root/xml")\" skipped=\"$(grep -c '<skipped ' "$root/xml")\">" ] || {
    echo "junit: $line"
    failed=1
}
grep -q '"><failure message="[^"]*allowed error' "$root/xml" || { echo 'junit: no failure with its message'; failed=1; }
expect '^all [0-9]* failed attends have window, as [0-9]* of the [0-9]* others$'
expect "^the first in a debugger: gdb --args attn-check $root/attn_wrong.so --full --seed 1 --filter 'attend\."
repeat=$(sed -n "s/^the first in a debugger.*--filter '\(.*\)'$/\1/p" "$root/out")
"$check" "$root/attn_wrong.so" --full --seed 1 --filter "$repeat" >"$root/out" 2>&1 && failed=1
expect '1 failed'
# a time for each attend that passes and for no failed one, and none for cases through the core
# count TEXT: lines of the document that have it
count() {
    grep -c -- "$1" "$root/out"
}
passed() {
    sed -n 's/.*"passed": \([0-9]*\),/\1/p' "$root/out"
}
"$check" "$root/attn_wrong.so" --filter 'attend.decode.*' --bench --json >"$root/out" 2>&1 && failed=1
[ "$(passed)" -gt 0 ] && [ "$(count '"time_us": [0-9.]*[1-9]')" -eq "$(passed)" ] && [ "$(count '"repeat": .* --bench"')" -gt 0 ] || {
    echo 'times:'
    tail -20 "$root/out"
    failed=1
}
"$check" "$root/attn_wrong.so" --filter 'engine.decode.*' --bench --json >"$root/out" 2>&1
[ "$(passed)" -gt 0 ] && [ "$(count '"time_us"')" -eq 0 ] || { echo 'times through the core'; failed=1; }
"$check" "$root/attn_wrong.so" --filter 'merge_states*' --bench >"$root/out" 2>&1
expect '^ *[0-9.]* us  merge_states\.f32\.plain\.d72$'
# a timed run that fails is the case's failure
change '/^static attn_status merge_states/,/^{/s/^{/{ static int calls; if (++calls > 1) { return ATTN_ERROR_DEVICE; }/'
"$check" "$root/attn_wrong.so" --filter 'merge_states.f32.plain.d72' >"$root/out" 2>&1 || failed=1
"$check" "$root/attn_wrong.so" --filter 'merge_states.f32.plain.d72' --bench >"$root/out" 2>&1 && failed=1
expect '^       a timed run: status [0-9]* (device error)'
change 's/\.merge_states = merge_states/.merge_states = NULL/'
"$check" "$root/attn_wrong.so" >"$root/out" 2>&1 && failed=1
expect 'merge_states is set in the declared mask and NULL in the table of kernels'

# A crash, an exit and an abort cost one case each; the others run and are all in both documents.
crashes='if (a->batch->num_reqs > 4) { *(volatile char *)a->out->data = ((volatile char *)a->workspace)[1 << 30]; }'
change "s/float s = 0, before = m;/float s = 0, before = m; $crashes/"
"$check" "$root/attn_wrong.so" --filter 'attend.*' --json --junit "$root/xml" >"$root/out" 2>"$root/err" && failed=1
[ "$(grep -c '<testcase ' "$root/xml")" -gt 100 ] || { echo 'junit: the cases next to a crash are not there'; failed=1; }
for document in out xml; do
    grep -q 'crashed with SIGSEGV at address 0x[0-9a-f]*, 1073741823 bytes past the end of workspace\|crashed with SIGSEGV at address 0x' "$root/$document" ||
        { echo "$document: no crash"; failed=1; }
done
grep -q '"passed": [1-9]' "$root/out" || { echo 'json: none passed next to a crash'; failed=1; }
crashed=$(sed -n 's/.*"case": "\(attend[^"]*\)".*/\1/p' "$root/out" | head -1)
fails "$crashed" # under a debugger it is this process that crashes
expect 'attn-check: attend\..*: crashed with SIGSEGV at address 0x'
expect "^  gdb --args attn-check $root/attn_wrong.so --full --seed 1 --filter 'attend\..*'$"
change 's/float s = 0, before = m;/float s = 0, before = m; if (a->batch->num_reqs > 4) { _exit(0); }/; s/^#include <math.h>/&\n#include <unistd.h>/'
fails 'attend.decode.*'
expect '^       the process was ended with exit status 0$'
expect ': [1-9][0-9]* passed, [1-9]'
# a kernel that does not come back, by working and by waiting
for stays in 'for (volatile int i = 0;; i++) { }' 'for (;;) { pause(); }'; do
    change "s/float s = 0, before = m;/float s = 0, before = m; if (a->batch->num_reqs == 1) { $stays }/; s/^#include <math.h>/&\n#include <unistd.h>/"
    "$check" "$root/attn_wrong.so" --filter 'attend.long_decode.*causal_overridden*' --case-seconds 1 >"$root/out" 2>&1 && failed=1
    expect '^       hangs: it had not returned after 1 seconds (--case-seconds)$'
    expect ': [0-9]* passed, [1-9]'
done
change 's/float s = 0, before = m;/float s = 0, before = m; *(volatile float *)((char *)a->q->data - 8) = 1;/'
fails 'attend.decode.*'
expect 'a byte that is no output was written: 8 bytes before q$'

# memory that is not there: the backend's own, said without a text, and a plan's, which attn-check takes
change 's/    if (\*prepared == NULL) {/    if (1) {/'
fails 'attend.decode.*'
expect 'prepare or schedule_size: status 3 (out of memory), without a text$'
change 's/size->device_bytes = .*/size->device_bytes = SIZE_MAX \/ 4;/'
fails 'attend.decode.*'
expect 'status 3 (out of memory): schedule_size: attn-check found no 0 bytes on the host and [0-9]* on the device for it$'

# what a step may not do, in the attend and in another kernel
promise='void *volatile taken = __builtin_malloc(8); __builtin_free(taken);'
change "s/float s = 0, before = m;/float s = 0, before = m; $promise/"
fails 'attend.decode.*'
expect "a step allocated memory: [0-9]* allocations of [0-9]* bytes in all, the first of 8 bytes by $root/attn_wrong.so+0x"
# which is no failure where it is declared
change "s/float s = 0, before = m;/float s = 0, before = m; $promise/; s/ATTN_FEATURE_LSE |/& ATTN_FEATURE_STEP_ALLOCATES |/"
"$check" "$root/attn_wrong.so" --filter 'attend.decode.*' >"$root/out" 2>&1 || { echo 'with STEP_ALLOCATES:'; tail -5 "$root/out"; failed=1; }
promise='static pthread_mutex_t lock; pthread_mutex_lock(\&lock); pthread_mutex_unlock(\&lock);'
change "s/    float \*out = row(a->out, token, h)/    $promise&/; s/^#include <math.h>/&\n#include <pthread.h>/"
fails 'attend.decode.*'
expect "a step took a lock: $root/attn_wrong.so+0x"
change "s/return ATTN_ERROR_UNSUPPORTED; .*/}{ $promise/; s/^#include <math.h>/&\n#include <pthread.h>/"
fails 'merge_states.f32*'
expect 'a step took a lock'

# a log-sum-exp of another base, results that change from run to run, a limit on groups, a second backend
change 's/m + logf(sum)/1.442695f * (m + logf(sum))/'
fails 'attend.decode.*'
expect 'lse of head .*: 1.4427 times that, so in base 2'
change 's/ATTN_FEATURE_LSE |/& ATTN_FEATURE_BATCH_INVARIANT |/; s/s \*= l->scale;/& static int again; s += 1e-6f * (float)(again++ % 7);/'
fails 'attend.*alone'
expect 'nondeterministic: the same batch gives other bits'
change 's/\.num_head_sizes = 1,/&.max_group = 4,/'
"$check" "$root/attn_wrong.so" --filter '[uc]*' >"$root/out" 2>&1 || { echo 'with max_group:'; tail -5 "$root/out"; failed=1; }
change 's/    return status == ATTN_OK ? sink->backend(sink->user, &caps, error) : status;/    struct attn_backend_caps second = caps; second.name = "second"; sink->backend(sink->user, \&caps, error); return sink->backend(sink->user, \&second, error);/'
"$check" "$root/attn_wrong.so" --filter 'merge_states.f32*' >"$root/out" 2>&1
expect "'example' is tested, and not what it has besides: second;"

change 's/.version = "0.1.0"/.version = "0.1.1"/'
"$check" "$root/attn_wrong.so" --filter 'merge_states*' >"$root/out" 2>&1
expect '^skipped [0-9]* (merge_states\..*): the kernel refused it as unsupported'
exit $failed
