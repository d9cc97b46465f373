#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# docs/choices.py and docs/conformance.py --record: rows replace those of their machine alone, what was not measured has none, and
# parts of a run make one record.
# usage: records.sh PYTHON DOCS
set -eu
python=$1
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
mkdir -p "$folder/docs/performance"
cp "$2"/choices.py "$2"/conformance.py "$2"/conformance.md "$2"/features.py "$folder/docs"
cd "$folder"
page=docs/choices.md
printf '# Page\n<!-- choices.py: begin -->\n<!-- choices.py: end -->\nend\n' >$page
printf '| model | layers | phase | declared: us | measured: us | buckets | gain | note |\n| --- |\n' >tuned
printf '| m | 2 of a | %s | x: %s | y: 1.0 | %s | 50 %% |  |\n' prefill 1.5 3 decode - 0 >>tuned
"$python" docs/choices.py A tuned
"$python" docs/choices.py B tuned
sed -i 's/x: 1.5/x: 2.5/' tuned
"$python" docs/choices.py B tuned
grep -qx '| A | m | 2 of a | prefill | x: 1.5 | y: 1.0 | 3 | 50 % |  |' $page
grep -qx '| B | m | 2 of a | prefill | x: 2.5 | y: 1.0 | 3 | 50 % |  |' $page
[ "$(grep -c '^| [AB] ' $page)" = 2 ]
[ "$(tail -n 1 $page)" = end ]

part() {
    printf '{"backend": "b", "version": "1", "mode": "quick", "passed": %s, "failed": %s, "skipped": 0, "failures": [%s],
        "features": {"layer_kinds": [], "terms": [], "features": [], "kernels": [], "kv_dtypes": [], "index_lists": [],
        "output_forms": [], "graph_level": 0}}' "$@"
}
part 3 0 '' >one
part 4 1 '{"case": "calls"}' >two
"$python" docs/conformance.py --record here one two
grep -qx '| passed; failed; skipped cases | 7; 1; 0 |' docs/conformance.md
grep -q '^| calls, .* | failed: `calls` |$' docs/conformance.md
