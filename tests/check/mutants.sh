#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Every mutant of cpu_ref has to fail attn-check, the unchanged controls have to pass, and declaring less than a
# committed list says has to fail. Prints how many of this part's mutants were caught: every COUNTth, from the PARTth on.
# usage: mutants.sh ATTN-CHECK PLUGIN FOLDER LIST ENTRY PART COUNT
set -u
check=$1 plugin=$2 folder=$(dirname "$3") list=$4 entry=$5 part=$6 count=$7
caught=0 missed=""
# The kind of cases that has to catch a mutant, or to pass with a control: there every fourth, since attn_check_cpu_ref_* runs all.
# The two plain controls pass cases of every kind.
cases_of() {
    case $1 in
    control_plain) echo --quick '[!e]*' ;;
    control_fused) echo --quick 'engine.*' ;;
    control_cleared_behind_nan) echo --full 'engine.*.fp8_per_token_head.*nan1*' ;;
    *_short_sums | *_shorter_sums)
        echo --full attend.prefill.bf16.fp8_e4m3.d224x224.h9-3.b16.hnd.causal_overridden+query204.s2101.r0.n0.f0.w0.l1.q0.plain
        ;;
    mutant_threads_share) echo --quick two_threads ;;
    mutant_list_*) echo --quick 'attend_lists*' ;;
    mutant_rule_*) echo --quick 'recurrent*' ;;
    mutant_index_*) echo --quick 'index.*' ;;
    mutant_gdn_*) echo --quick 'gated_delta*' ;;
    mutant_mla_* | control_mla_*) echo --quick 'attend_mla*' ;;
    mutant_codes_* | control_codes) echo --quick 'attend_output.*' ;;
    mutant_calls_*) echo --quick 'calls.*' ;;
    mutant_tables_* | control_tables) echo --quick 'make_block_table.*' ;;
    mutant_copies_*) echo --quick 'blocks.*' ;;
    mutant_fills_*) echo --quick 'idle.*' ;;
    mutant_cascade_*) echo --quick 'engine_output.*' ;;
    mutant_merge_*) echo --quick 'merge_states.*' ;;
    mutant_rope_*) echo --quick 'rope_write_kv.*' ;;
    mutant_gather_*) echo --quick 'gather_kv.*' ;;
    mutant_gemm_*) echo --quick 'batched_gemm.*' ;;
    mutant_quantize_*) echo --quick 'quantize.*' ;;
    mutant_amax_*) echo --quick 'amax.*' ;;
    *) echo --quick 'attend.*' ;;
    esac
}
ATTN_PLUGIN_PATH=$plugin
export ATTN_PLUGIN_PATH
results=$(for name in $(sed -n 's/^ *{\.name = "\([a-z_]*\)".*/\1/p' "$folder"/mutant_*.c |
    awk -v part="$part" -v count="$count" 'NR % count == part % count'); do
    case $name in control_cleared* | control_short*) part=1/1 ;; control_*) part=1/4 ;; *) part=1/1 ;; esac
    echo "$name" "$part" "$(cases_of "$name")"
done | xargs -P "$(nproc)" -L 1 sh -c '
    said=$("$0" "$1" --part "$2" "$3" --fail-fast --filter "$4" 2>&1)
    code=$?
    case $code:$said in 1:*"FAILED "* | 1:*" crashed with "*) code=caught ;; esac
    echo "$1:$code"' "$check")
for result in $results; do
    case $result in
    control_*:0) ;;
    mutant_*:caught) caught=$((caught + 1)) ;;
    *) missed="$missed $result" ;;
    esac
done
if [ "$part" -eq 1 ]; then
    # without copy it is no longer what the list says
    "$check" control_plain --filter amax.f32.per_head --expect "$list" >/dev/null 2>&1 && missed="$missed shrunken:0"
    # behind an entry that takes every range of versions
    ATTN_PLUGIN_PATH=$entry "$check" control_plain --filter calls.entry >/dev/null 2>&1
    code=$?
    if [ $code -eq 1 ]; then caught=$((caught + 1)); else missed="$missed entry:$code"; fi
fi
echo "$caught mutants caught"
[ -z "$missed" ] || { echo "not caught:$missed"; exit 1; }
[ $caught -ge 40 ]
