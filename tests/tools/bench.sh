#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# attn-bench: what it measures has the promised form, what it cannot measure is reported with reasons. No time is judged:
# other tests run next to this one.
set -u
models=$1 bench=$(realpath "$2") info=$3 plugin=$4 reference=$5 peer=$6
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
ATTN_CACHE_DIR=$folder/cache
export ATTN_CACHE_DIR
tiny=r=2,l=64,hq=4,hkv=2,d=64
short="--budget 0.1" # no time is judged

. "$(dirname "$0")/expect.sh"

# measured NAME FIELD: the document of the last run has a number above 0 there, for every result.
numbers() {
    for field in "$@"; do
        want=$(grep -c '"shape":' "$folder/out.json")
        got=$(grep -c "\"$field\":[[:space:]]*[0-9]*\.*[0-9e+-]*[1-9]" "$folder/out.json")
        if [ "$want" -eq 0 ] || [ "$got" -lt "$want" ]; then
            echo "$field: $got of $want results have it"
            failed=1
        fi
    done
}

expect 0 'usage' "$bench" --help
expect 0 'mla_sparse' "$bench" --help
expect 0 '^attn-bench [0-9]' "$bench" --version
expect 2 'usage' "$bench" --no-such-option
expect 2 "stray" "$bench" stray
for budget in 0 -1 4000 nan 1s ''; do
    expect 2 "budget: '$budget' is not seconds above 0" "$bench" --budget "$budget"
done
expect 2 "no shape is named 'encode'; there are decode" "$bench" --shape encode
expect 2 "decode has no parameter 'heads'; it has r, l" "$bench" --shape decode:heads=3
expect 2 "r: 'x' is not a whole number from 1" "$bench" --shape decode:r=x
expect 2 "r: '1..x'" "$bench" --shape decode:r=1..x
expect 2 "layout: 'mine' is not one of own, nhd" "$bench" --shape decode:layout=mine
expect 2 'not a multiple of hkv' "$bench" --shape decode:hq=3,hkv=2
expect 2 'lists: 3; 1 or hkv' "$bench" --shape sparse:lists=3
expect 2 'lists: 3; what divides hq' "$bench" --shape index:lists=3
expect 2 'philox: 7; 0 with state_bits 32' "$bench" --shape gdn:philox=7
expect 2 'fewer than s' "$bench" --shape decode:l=4,s=8
expect 2 "'i8' is not one of f16, bf16, f32" "$bench" --dtype i8
expect 2 'is not one of auto, f16' "$bench" --kv-dtype no
expect 2 'whole number from 1' "$bench" --threads 0
expect 2 'neither .svg nor .png' "$bench" --plot curve.txt
expect 2 'which --model has not' "$bench" --tune --model "$models/llama-3.1-8b.json" --plot curve.svg
expect 1 "no backend is named 'cpu_rfe'" "$bench" --backend cpu_rfe
# What a refused plugin says is for its own name, not for a part of it or of its path.
: >"$folder/attn_refused.so"
expect 1 'is not an ELF file' env ATTN_PLUGIN_PATH="$folder/attn_refused.so" "$bench" --backend refused@fast
for name in fused refuse attn_ ''; do
    expect 1 "no backend is named '$name'" env ATTN_PLUGIN_PATH="$folder/attn_refused.so" "$bench" --backend "$name"
done

# The promised document, on every kind of shape that the reference serves.
"$bench" $short --json --backend cpu_ref --threads 1 --shape decode:$tiny --shape prefill:s=16,hq=4,hkv=2,d=64,window=8,sinks=1 \
    --shape mixed:r=2,l=32,s=16,hq=4,hkv=2,d=64 --shape varlen:r=3,s=32,hq=4,hkv=2,d=64 >"$folder/out.json" 2>"$folder/err"
[ $? -eq 0 ] || { echo "decode, prefill, mixed, varlen: "; cat "$folder/err"; failed=1; }
numbers time_us gb_s tflop_s floor_us ratio_to_floor threads
grep -q '"read_gb_s"' "$folder/out.json" && grep -q '"copy_gb_s"' "$folder/out.json" &&
    grep -q '"f32_tflop_s"' "$folder/out.json" || { echo "ceilings are missing"; failed=1; }
# From here on ceilings read less than caches hold.
ATTN_TEST_CEILING_MIB=16
export ATTN_TEST_CEILING_MIB

# Lists of keys, and what chooses them: a list for each KV head and head, rows of tokens and blocks of rows; two caches.
"$bench" $short --json --backend cpu_ref --threads 1 --shape sparse:r=2,l=64,hq=4,hkv=2,d=64,topk=2,grain=16,lists=1+2 \
    --shape compressed:r=2,l=200,hq=4,lora=64,topk=8 --shape compressed:r=2,l=256,s=2,hq=4,lora=64,all=1,ratio=128,window=3 \
    --shape index:r=2,l=64,hq=4,d=64,topk=5 --shape index:r=1,l=64,s=8,hq=4,d=64,topk=2,lists=2,ratio=4,pool=3,relu=0,weights=0 --shape top_k:l=64,s=2,topk=5 \
    >"$folder/out.json" 2>"$folder/err"
[ $? -eq 0 ] || { echo "sparse, compressed, index: "; cat "$folder/err"; failed=1; }
numbers time_us gb_s tflop_s floor_us ratio_to_floor threads

# Recurrent layers: a prompt, and drafts, which bring a request's ring as far as its cursor goes.
gdn=r=2,hk=1,hv=2,dk=32,dv=32
"$bench" $short --json --backend cpu_ref --threads 1 --shape gdn:$gdn,s=9 --shape gdn:$gdn,s=4,drafts=3 \
    --shape gdn:$gdn,s=4,drafts=3,replay=4,cursor=6 --shape gdn:$gdn,s=3,state_bits=16,philox=7 >"$folder/out.json" 2>"$folder/err"
[ $? -eq 0 ] || { echo "gdn: "; cat "$folder/err"; failed=1; }
numbers time_us gb_s tflop_s floor_us ratio_to_floor threads

# A quantized cache, the step's own write.
expect 0 'fp8_e4m3' "$bench" $short --backend cpu_ref --threads 1 --kv-dtype fp8_e4m3 --csv --shape decode:$tiny,write=1 --shape prefill:s=16,hq=4,hkv=2,d=64,q8=1
# One layer again and again: no bytes in its floor, and no rank from its time. A layout that was asked for. One of three requests
# has 64 times the keys of the others: 640 keys and two times 10.
expect 0 '"bound":[[:space:]]*"operations"' "$bench" $short --json --backend cpu_ref --threads 1 --shape decode:$tiny,rotate=0 \
    --shape decode:$tiny,layout=nhd_inner,block=16,shuffle=0 --shape decode:r=3,l=220,skew=1,hq=4,hkv=2,d=64 --shape decode:r=2,l=70,s=40,tree=1,hq=4,hkv=2,d=64
for parameter in '"layout":[[:space:]]*"nhd_inner"' '"skew":[[:space:]]*1'; do
    printf '%s' "$output" | grep -q "$parameter" || { echo "no result of $parameter"; failed=1; }
done
expect 2 'rank cannot come from the shape decode:.*rotate=0' "$bench" --tune --shape decode:$tiny,rotate=0
# Several backends are measured in turns, and put next to the first.
"$bench" $short --json --backend cpu_ref --backend cpu_rfe --backend cpu_ref --threads 1 --shape decode:$tiny --shape merge:s=32,hq=4,d=64 \
    >"$folder/out.json" 2>/dev/null && { echo "an unknown backend among three is no failure"; failed=1; }
for field in ratio_to_first samples; do
    [ "$(grep -c "\"$field\":[[:space:]]*[0-9]" "$folder/out.json")" -eq 4 ] ||
        { echo "two backends of two shapes have not four $field"; failed=1; }
done
expect 2 'takes one --backend' "$bench" --backend cpu_ref --backend cpu_simd --tune
# The threads' own time: a mark in the heading and in the document.
expect 0 '1 thread, CPU time' "$bench" $short --backend cpu_ref --threads 1 --cpu-time --shape decode:$tiny
"$bench" $short --json --backend cpu_ref --threads 2 --cpu-time --shape decode:$tiny >"$folder/out.json" 2>/dev/null
grep -q '"cpu_time":[[:space:]]*true' "$folder/out.json" || { echo "CPU time is not marked"; failed=1; }
numbers time_us floor_us ratio_to_floor
expect 2 'not --cpu-time' "$bench" --tune --cpu-time
expect 2 'more than 8' "$bench" $(printf -- '--backend cpu_ref %.0s' 1 2 3 4 5 6 7 8 9)
# A sweep: a line for each value after the heading.
lines=$("$bench" $short --csv --backend cpu_ref --threads 2 --shape "write:s=16..64+100,hkv=2,d=64" --shape merge:s=32,hq=4,d=64 | wc -l)
[ "$lines" -eq 6 ] || { echo "the sweep and a merge have $lines lines, not 6"; failed=1; }

# A signal ends the run after the shape that is measured: the rows so far are reported.
ended='ended by signal 15: [1-9][0-9]* of 64 shapes were measured'
expect 1 "$ended" timeout --preserve-status 4 "$bench" --budget 0.3 --csv --backend cpu_ref --threads 1 \
    --shape decode:r=1..64/1,l=16,hq=4,hkv=2,d=64
[ "$(printf '%s\n' "$output" | grep -c '^decode,')" -eq "$(printf '%s\n' "$output" | sed -n 's/.*ended by signal 15: \([0-9]*\) of.*/\1/p')" ] ||
    { echo "rows that a signal's report counts are missing"; failed=1; }

# What the core adds, by the reference's kernels; where instructions can be counted there is a number.
"$bench" $short --json --backend cpu_ref --dtype f32 --shape dispatch:write=0+1 >"$folder/out.json" 2>"$folder/err" ||
    { cat "$folder/err"; failed=1; }
numbers run_ns direct_ns
if command -v valgrind >/dev/null; then
    numbers added_instructions
fi

# A baseline whose times are a thousandth, or a thousand times, of today's: no time is judged.
"$bench" $short --csv --backend cpu_ref --threads 1 --shape decode:$tiny >"$folder/now.csv" 2>/dev/null
for times in 0.001 1000; do
    awk -F, -v OFS=, -v times=$times 'NR == 1 { for (i = 1; i <= NF; i++) at[$i] = i }
        NR > 1 { $at["time_us"] *= times; $at["ratio_to_floor"] *= times } { print }' "$folder/now.csv" >"$folder/$times.csv"
done
expect 0 ' of the baseline' "$bench" $short --backend cpu_ref --threads 1 --baseline "$folder/1000.csv" --shape decode:$tiny
expect 1 'times as long as in .*0.001.csv' "$bench" $short --backend cpu_ref --threads 1 --baseline "$folder/0.001.csv" --shape decode:$tiny
expect 1 'has no time of it' "$bench" $short --backend cpu_ref --threads 1 --baseline "$folder/1000.csv" --shape decode:$tiny,block=16
expect 1 'first line does not begin with shape,' "$bench" --baseline "$models/gpt-oss-20b.json"
expect 1 'absent: No such file' "$bench" --baseline "$folder/absent"
expect 2 'which --tune keeps as ranks' "$bench" --tune --baseline "$folder/now.csv"

# Another build and a plugin file in turns with this build, with the same outputs; a peer over the same tensors.
for other in "$(dirname "$bench")/.." "$reference"; do
    "$bench" $short --json --backend cpu_ref --against "$other" --threads 1 --shape decode:$tiny --shape merge:s=32,hq=4,d=64 \
        >"$folder/out.json" 2>/dev/null
    numbers ratio_to_first
    [ "$(grep -c "\"backend\":[[:space:]]*\"cpu_ref of $other\"" "$folder/out.json")" -eq 2 ] || { cat "$folder/out.json"; failed=1; }
done
expect 1 'nowhere: No such file' "$bench" --against "$folder/nowhere"
expect 1 'no backend serves' "$bench" $short --against "$folder/attn_refused.so" --shape decode:$tiny
expect 2 'measures this build alone' "$bench" --tune --against "$reference"
"$bench" $short --json --backend cpu_ref --threads 1 --dtype f32 --peer "$peer" --shape decode:$tiny,layout=nhd,block=16 \
    --shape prefill:s=16,hq=4,hkv=2,d=64 >"$folder/out.json" 2>"$folder/err" || { cat "$folder/err"; failed=1; }
numbers ratio_to_first time_us
[ "$(grep -c '"difference":[[:space:]]*[0-9]' "$folder/out.json")" -eq 2 ] || { echo "a peer's outputs:"; cat "$folder/out.json"; failed=1; }
expect 1 'formula 1.0 .*differs from the first' env PEER_WRONG=1 "$bench" $short --backend cpu_ref --threads 1 --dtype f32 \
    --peer "$peer" --shape decode:$tiny
expect 1 'takes plain layers of float32' "$bench" $short --backend cpu_ref --threads 1 --peer "$peer" --shape decode:$tiny
expect 1 'undefined symbol: peer_name' "$bench" --peer "$reference"

# A plot where the plotter is, and a clear word where it is not.
if command -v gnuplot >/dev/null; then
    expect 0 '.' "$bench" $short --backend cpu_ref --threads 1 --plot "$folder/it's.svg" --shape "decode:r=1,l=16+64,hq=4,hkv=2,d=64"
    grep -q '</svg>' "$folder/it's.svg" && grep -q 'ceilings: .* GB/s' "$folder/it's.svg" || { echo "no plot was drawn"; failed=1; }
    # The name is a file's, whatever it looks like.
    (cd "$folder" && name=$(printf "|touch ran;a'\nsystem 'touch ran'\n.svg") &&
        "$bench" $short --backend cpu_ref --threads 1 --plot "$name" --shape "decode:r=1,l=16,hq=4,hkv=2,d=64" >"$folder/out" 2>&1
        grep -q '</svg>' "$name" || { echo "no plot was drawn into '$name'"; exit 1; }
        [ ! -e ran ]) || { echo "a plot's name was run"; failed=1; }
    expect 1 'nowhere/a.svg: No such file' "$bench" $short --backend cpu_ref --plot "$folder/nowhere/a.svg"
fi
mkdir "$folder/empty"
ln -s "$(command -v sh)" "$folder/empty/sh"
expect 1 'gnuplot: is not installed' env PATH="$folder/empty" "$bench" $short --backend cpu_ref --plot "$folder/none.png"

# A measurement on file decides over the estimates, for that layer alone, and attn-info says so.
cat >"$folder/tiny.json" <<END
{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2, "hidden_size": 256,
 "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "torch_dtype": "float32", "max_position_embeddings": 512}
END
export ATTN_PLUGIN_PATH="$plugin"
expect 0 '"measured":[[:space:]]*false' "$info" --json --model "$folder/tiny.json"
expect 2 'rank cannot come from the shape write' "$bench" --tune --shape write
expect 0 'selections go by these times' "$bench" $short --tune --threads 1 --dtype f32 --backend example --shape "decode:r=1,l=16+32,hq=4,hkv=2,d=64"
grep -q '^x86-64:[^ ]* 4/2x64x64.f32.f32 decode 1x32 example [0-9]' "$folder/cache/ranks" || { echo "ranks:"; cat "$folder/cache/ranks"; failed=1; }
expect 0 '"backend":[[:space:]]*"example"' "$info" --json --model "$folder/tiny.json"
expect 0 'example for decode: declared rank .*, measured and on file' "$info" --explain --model "$folder/tiny.json"
expect 0 '1x32: .* us, spread .*, measured on 20.* with version' "$info" --explain --model "$folder/tiny.json"
# Other plugin files make them stale, by name.
sed 's/ [0-9a-f]\{16\} / 0123456789abcdef /' "$folder/cache/ranks" >"$folder/stale"
(umask 077; mkdir "$folder/other"; cp "$folder/stale" "$folder/other/ranks")
expect 0 'stale: with another plugin file' env ATTN_CACHE_DIR="$folder/other" "$info" --explain --model "$folder/tiny.json"
expect 0 '"measured":[[:space:]]*false' env ATTN_CACHE_DIR="$folder/other" "$info" --json --model "$folder/tiny.json"
# Another backend's time joins it; the same one's is replaced.
printf 'x86-64 1/1x8x8.f32.f32 decode other 1\n' >>"$folder/cache/ranks"
expect 0 'ranks' "$bench" $short --tune --threads 1 --dtype f32 --backend cpu_ref --shape "decode:r=1,l=16,hq=4,hkv=2,d=64"
expect 0 'ranks' "$bench" $short --tune --threads 1 --dtype f32 --backend cpu_ref --shape "decode:r=1,l=16,hq=4,hkv=2,d=64"
[ "$(wc -l <"$folder/cache/ranks")" -eq 4 ] || { echo "ranks:"; cat "$folder/cache/ranks"; failed=1; }
# A planted link is no place to write to, no cache none at all, and the file is the user's alone.
mv "$folder/cache/ranks" "$folder/elsewhere"
ln -s "$folder/elsewhere" "$folder/cache/ranks"
cp "$folder/elsewhere" "$folder/before"
(umask 0; expect 0 'is a symbolic link' "$bench" $short --tune --threads 1 --dtype f32 --backend cpu_ref --shape "decode:r=1,l=16,hq=4,hkv=2,d=64"; exit $failed) || failed=1
cmp "$folder/elsewhere" "$folder/before" || failed=1
[ ! -L "$folder/cache/ranks" ] && [ "$(stat -c %a "$folder/cache/ranks")" = 600 ] || { ls -l "$folder/cache"; failed=1; }
expect 1 'ATTN_CACHE_DIR: is empty' env ATTN_CACHE_DIR= "$bench" $short --tune --threads 1 --dtype f32 --backend cpu_ref --shape "decode:r=1,l=16,hq=4,hkv=2,d=64"
expect 1 'ATTN_CACHE_DIR' env ATTN_CACHE_DIR=here "$bench" $short --tune --threads 1 --dtype f32 --backend cpu_ref --shape "decode:r=1,l=16,hq=4,hkv=2,d=64"
# Two ranks of a job whose times differ: the second would choose otherwise, and takes what the first one chose.
run=$(dirname "$info")/attn-run
for rank in 0 1; do
    (umask 077; mkdir "$folder/rank$rank"
        awk -v rank=$rank '$3 == "decode" && $4 == "1x16" { $6 = ($5 == "example") == (rank == 0) ? 1 : 1000; print }' \
            "$folder/before" >"$folder/rank$rank/ranks")
done
if [ -x "$run" ]; then
    job="$run --model $folder/tiny.json --steps 1"
    expect 0 'example' env ATTN_CACHE_DIR="$folder/rank0" ATTN_LOCK="write:$folder/job" $job
    expect 1 'decode=example in the lock, decode=cpu_ref in this choice' env ATTN_CACHE_DIR="$folder/rank1" ATTN_LOCK="$folder/job" $job
    expect 0 'example' env ATTN_CACHE_DIR="$folder/rank1" ATTN_LOCK="take:$folder/job" $job
    sed 's/^core [^ ]*/core 9.9/' "$folder/job" >"$folder/newer"
    expect 1 'core: 9.9 in the lock' env ATTN_CACHE_DIR="$folder/rank1" ATTN_LOCK="take:$folder/newer" $job
fi
unset ATTN_PLUGIN_PATH
# A model's layers, by phase and bucket: what was chosen before and what is now.
expect 2 'goes with --tune' "$bench" --model "$folder/tiny.json"
expect 2 'is not seconds' "$bench" --tune --model "$folder/tiny.json" --seconds 0
expect 2 'max-spread' "$bench" --tune --model "$folder/tiny.json" --max-spread 0
expect 1 'nowhere.json' "$bench" --tune --model "$folder/nowhere.json"
if "$info" --model "$folder/tiny.json" >/dev/null 2>&1; then
    expect 0 '^| tiny | 2 of 4/2x64x64.f32.auto | decode | cpu_' "$bench" --tune --model "$folder/tiny.json" --seconds 1 --max-spread 10000 --threads 1 --cpu-time
    expect 0 '"declared_us"' "$bench" --json --tune --model "$folder/tiny.json" --seconds 1 --max-spread 10000 --threads 1 --cpu-time
    grep -q '4/2x64x64.f32.f32 prefill 1x64 cpu_' "$folder/cache/ranks" || { echo "ranks:"; cat "$folder/cache/ranks"; failed=1; }
fi

# What is not served: reasons, and exit 1.
expect 1 'example for decode: dtype bf16 (supported: f32' env ATTN_PLUGIN_PATH="$plugin" "$bench" $short --backend example --shape decode
expect 1 '"supported":' env ATTN_PLUGIN_PATH="$plugin" "$bench" $short --json --backend example --shape decode
expect 1 'multiples of 8 up to 512 are allowed' "$bench" $short --backend cpu_ref --shape decode:d=1020
exit $failed
