#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# docs/results.py: the exact rows of a known document, a failed measurement without a row, and a real run.
# usage: results.sh PYTHON RESULTS.py ATTN-BENCH
set -u
ATTN_TEST_CEILING_MIB=16 # no time is judged
export ATTN_TEST_CEILING_MIB
python=$1 results=$2 bench=$(realpath "$3")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
failed=0

# result BACKEND TIME FAILED: a decode of one request in a document of attn-bench.
result() {
    printf '{"shape": "decode", "parameters": {"r": 1, "l": 512, "d": 128, "layout": "own"}, "dtype": "bf16", "kv_dtype": "fp8_e4m3",
        "backend": "%s", "time_us": %s, "gb_s": 123.4, "tflop_s": 0.5, "ratio_to_floor": 1.256, "bound": "bytes", "failed": %s}' "$@"
}
cat >"$folder/attn-bench" <<END
#!/bin/sh
[ "\$1" = --help ] && exec "$bench" --help
cat "$folder/document"
END
chmod +x "$folder/attn-bench"
printf '{"results": [%s, %s, %s]}' "$(result a 10.0 false)" "$(result b 20.0 false)" "$(result c 15.0 false)" >"$folder/document"
wanted='| `decode:r=1,l=512`, bf16, cache fp8_e4m3 | 10 | 123 GB/s | 1.26 | 1.50 (c) | K |'
rows=$("$python" "$results" K "$folder/attn-bench" --backend a --backend b) || failed=1
[ "$(printf '%s\n' "$rows" | tail -n 1)" = "$wanted" ] || { echo "unexpected rows: $rows"; failed=1; }
case $rows in
"| K | "????-??-??" | \`attn-bench --backend a --backend b\` |"*) ;;
*) echo "unexpected run: $rows"; failed=1 ;;
esac
printf '{"results": [%s]}' "$(result a 10.0 true)" >"$folder/document"
rows=$("$python" "$results" K "$folder/attn-bench") && { echo "a failed measurement passed"; failed=1; }
case $rows in
*decode*) echo "a failed measurement has a row: $rows"; failed=1 ;;
esac

rows=$("$python" "$results" K "$bench" --backend cpu_ref --threads 1 --budget 0.1 --shape decode:r=1,l=64,hq=2,hkv=1) || failed=1
case $rows in
*'| `decode:r=1,l=64,hq=2,hkv=1`, bf16 | '*' |  | K |') ;;
*) echo "unexpected: $rows"; failed=1 ;;
esac
exit $failed
