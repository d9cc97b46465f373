#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# docs/results.py: the exact rows of a known document, a failed measurement that keeps its row, and a real run.
# usage: results.sh PYTHON RESULTS.py ATTN-BENCH
set -u
ATTN_TEST_CEILING_MIB=16 # no time is judged
export ATTN_TEST_CEILING_MIB
python=$1 results=$2 bench=$(realpath "$3")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
failed=0
page=$folder/page.md

wrong() {
    echo "$1:"
    cat "$page"
    failed=1
}

# has LINE: the page has that line.
has() { grep -qxF "$1" "$page" || wrong "not in the page: $1"; }

# result SHAPE BACKEND TIME FAILED: a decode in a document of attn-bench.
result() {
    printf '{"shape": "%s", "backend": "%s", "time_us": %s, "failed": %s, "gb_s": 123.4, "tflop_s": 0.5, "ratio_to_floor": 1.256,
        "bound": "bytes"}' "$@"
}

cat >"$page" <<END
## Another device
| run | date | command |
| --- | --- | --- |

## A device
| run | date | command |
| --- | --- | --- |
| A | 2026-01-01 | \`a\` |
| B | 2026-01-01 | \`b\` |
| C | 2026-01-01 | \`c\` |
| D | 2026-01-01 | \`d\` |

| cell | us | rate | over the floor | run | best peer | its run |
| --- | --- | --- | --- | --- | --- | --- |
| \`decode:l=1\`, f16, cache fp8_e4m3 (some words) | 1 | 1 GB/s | 1 | A | 2.00 peer | B |
| \`decode:l=2\`, f16, cache fp8_e4m3 |  |  |  |  |  |  |
| a plan | 7 |  |  | A |  |  |
| \`decode:r=1,l=64,hq=2,hkv=1\` | 1 |  |  | C |  |  |

| what | us | run |
| --- | --- | --- |
| a step | 2 | B2, D |

The end.
END
cp "$page" "$folder/before"

# A stand-in that answers what is in document, and keeps its arguments.
cat >"$folder/attn-bench" <<END
#!/bin/sh
echo "\$*" >"$folder/arguments"
cat "$folder/document"
END
chmod +x "$folder/attn-bench"
document() { printf '{"ceilings": {"read_gb_s": 100, "bf16_tflop_s": 2.5}, "results": [%s]}' "$1" >"$folder/document"; }

document "$(result decode a 10.0 false), $(result decode b 20.0 false), $(result decode c 15.0 false),
    $(result decode a 30.0 true), $(result decode b 20.0 false), $(result decode c 15.0 true)"
"$python" "$results" --only f16 "$page" 'A device' K "$folder/attn-bench" --backend a 2>"$folder/said" && wrong "a failed measurement passed"
has "| \`decode:l=1\`, f16, cache fp8_e4m3 (some words) | 10 | 123 GB/s | 1.26 | K | 1.50 c | K |"
grep -q 'decode:l=2.*failed' "$folder/said" || wrong "the failed cell is not named: $(cat "$folder/said")"
has "| K | $(date +%F) | \`attn-bench --backend a\`; floors of 100 GB/s read, 2.5 TFLOP/s in bf16 |"
grep -qF '| B |' "$page" && wrong "a run that no row names stays"
has "| D | 2026-01-01 | \`d\` |"
[ "$(cat "$folder/arguments")" = "--backend a --json --dtype f16 --kv-dtype fp8_e4m3 --shape decode:l=1 --shape decode:l=2" ] ||
    wrong "unexpected arguments: $(cat "$folder/arguments")"
diff "$folder/before" "$page" | grep '^[<>]' | grep -vE 'l=1`|B \||K \|' && wrong "other lines changed"

PYTHONPATH=$(dirname "$results") "$python" -B -c 'from results import digits
assert [digits(value) for value in (999.6, 99.96, 1234.5, 0.01234)] == ["1000", "100", "1234", "0.0123"]' || wrong "unexpected digits"
"$python" "$results" --only 'l=64' "$page" 'A device' R "$bench" --backend cpu_ref --threads 1 --budget 0.1 || wrong "a real run failed"
grep -qE '^\| `decode:r=1,l=64,hq=2,hkv=1` \| [0-9.e+]+ \| [0-9.e+-]+ [GT].* \| [0-9.]+ \| R \|  \|  \|$' "$page" || wrong "no row of a real run"
"$python" "$results" "$page" 'No device' R "$bench" 2>"$folder/said" && wrong "an unknown section passed"
grep -q "no section 'No device'" "$folder/said" || wrong "unexpected: $(cat "$folder/said")"
sed 's/^| a plan | 7 | /| a plan | 7 | | /' "$page" >"$folder/wide"
"$python" "$results" "$folder/wide" 'A device' R "$bench" 2>"$folder/said" && wrong "a row of eight columns passed"
grep -q 'the row has 8 columns, its table 7: | a plan' "$folder/said" || wrong "unexpected: $(cat "$folder/said")"
exit $failed
