# SPDX-License-Identifier: Apache-2.0
"""Writes the table of docs/conformance.md: what attn-check found of each backend, by feature.

usage: conformance.py [--check]
       conformance.py --record ON FILE.json...

A record in docs/conformance/ is the part of `attn-check NAME --json` that the table needs. --record makes records of such
documents, ON being the device and, of a library, its version; documents of one backend are parts of a run (`--part I/N`).
Without it the page is written; with --check nothing is, and
the exit status is 1 if the page is not up to date.
"""
from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from features import Needs, both, feature, has, kernel, kv, term

RECORDS = Path(__file__).resolve().parent / "conformance"
PAGE = RECORDS.with_suffix(".md")
BEGIN, END = "<!-- conformance.py: begin -->", "<!-- conformance.py: end -->"
KEPT = ("backend", "version", "mode", "passed", "failed", "skipped")
ATTEND = r"(attend|engine)(_output|_lists)?\."

#: (feature, what is declared of it, the cases that fail it, by their names)
FEATURES: list[tuple[str, Needs, str]] = [
    ("decoder layers over pages", both(has("layer_kinds", "decoder"), feature("paged_kv")),
     ATTEND + r"[^.]*(prefill|decode|extend|mixed|shared|speculative)"),
    ("encoder layers", has("layer_kinds", "encoder"), ATTEND + "encoder"),
    ("cross layers", has("layer_kinds", "cross"), ATTEND + r".*cross"),
    ("sliding window", term("sliding_window"), ATTEND + r".*\+window"),
    ("chunked local", term("chunked_local"), ATTEND + r".*\+chunk"),
    ("soft cap", term("soft_cap"), ATTEND + r".*\+soft_cap"),
    ("ALiBi", term("alibi"), ATTEND + r".*\+alibi"),
    ("sinks", term("sinks"), ATTEND + r".*\+sinks"),
    ("static sink", term("static_sink"), ATTEND + r".*\+static_sink"),
    ("prefix-LM spans", term("prefix_lm"), ATTEND + r".*\+spans"),
    ("tree masks", term("tree_bits"), ATTEND + r".*\+tree"),
    ("lists of keys", has("index_lists", "attend"), r"(attend|engine)_lists\."),
    ("cache in f16 or bf16", lambda caps: any(name in caps["kv_dtypes"] for name in ("f16", "bf16")),
     ATTEND + r".*\.b?f16\.b?f16\."),
    ("cache in f32", kv("f32"), ATTEND + r".*\.f32\.f32\."),
    ("cache in fp8", kv("fp8_e4m3"), r".*\.fp8_e[45]m[23][.-]"),
    ("cache in int8 or fp8 per token", kv("int8_per_token_head"), r".*_per_token_head"),
    ("two-level int8", kv("int8_kv"), r".*\.int8_kv?\."),
    ("nvfp4", kv("nvfp4"), r".*\.nvfp4\."),
    ("q8_0, q4_0", kv("q8_0", "q4_0"), r".*q[48]_0"),
    ("TurboQuant", kv("turboquant_k8v4"), r".*turboquant"),
    ("graph capture and replay", lambda caps: caps["graph_level"] == 64, r".*\.(in_graph|replay)$"),
    ("batch invariance", feature("batch_invariant"), r".*\.alone$"),
    ("RoPE and write", kernel("rope_write_kv"), r"rope_write_kv\."),
    ("merge of states", kernel("merge_states"), r"merge_states\."),
    ("MLA", kernel("attend_mla"), r"attend_mla\."),
    ("sparse MLA", kernel("attend_mla_sparse"), r"attend_mla_sparse\."),
    ("recurrent layers", kernel("recurrent"), r"(gated_delta|recurrent)\."),
    ("indexers", has("layer_kinds", "indexer"), r"index\."),
    ("outputs as codes", has("output_forms", "fp8_static"), r"(attend|engine)_output\."),
    ("calls, conduct, threads, steps without work", lambda caps: True, r"(calls|conduct|two_threads|idle|undeclared)\b"),
]


def record(found: dict[str, Any], where: str) -> dict[str, Any]:
    """What of a document the table needs; failures by name alone."""
    keys = ("layer_kinds", "terms", "features", "kernels", "kv_dtypes", "index_lists", "output_forms", "graph_level")
    return {**{key: found[key] for key in KEPT}, "on": where, "features": {key: found["features"][key] for key in keys},
            "failures": [failure["case"] for failure in found["failures"]]}


def cell(needs: Needs, cases: str, found: dict[str, Any]) -> str:
    """What a backend's row says of a feature."""
    if not needs(found["features"]):
        return "refused"
    failed = [name for name in found["failures"] if re.match(cases, name)]
    more = f" and {len(failed) - 1} more" if len(failed) > 1 else ""
    return f"failed: `{failed[0]}`{more}" if failed else "passed"


def table() -> str:
    """The table of all records."""
    records = [json.loads(path.read_text()) for path in sorted(RECORDS.glob("*.json"))]
    rows = [["feature", *(found["backend"] for found in records)], ["---"] * (len(records) + 1),
            ["on", *(found["on"] for found in records)],
            ["library, suite", *(f"{found['version']}, {found['mode']}" for found in records)],
            ["passed; failed; skipped cases", *(f"{found['passed']}; {found['failed']}; {found['skipped']}" for found in records)],
            *([name, *(cell(needs, cases, found) for found in records)] for name, needs, cases in FEATURES)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["--record"] and len(arguments) > 2:
        runs: dict[str, dict[str, Any]] = {}
        for name in arguments[2:]:
            found = json.loads(Path(name).read_text())
            run = runs.setdefault(found["backend"], found)
            if run is not found:
                for count in ("passed", "failed", "skipped", "failures"):
                    run[count] += found[count]
        for found in runs.values():
            target = RECORDS / f"{found['backend'].replace('@', '-')}.json"
            RECORDS.mkdir(exist_ok=True)
            lines = ",\n".join(f" {json.dumps(key)}: {json.dumps(value)}" for key, value in record(found, arguments[1]).items())
            target.write_text(f"{{\n{lines}\n}}\n")
    elif arguments not in ([], ["--check"]):
        print(__doc__, file=sys.stderr)
        return 2
    text = PAGE.read_text()
    before, rest = text.split(BEGIN)
    page = f"{before}{BEGIN}\n{table()}\n{END}{rest.split(END)[1]}"
    if "--check" not in arguments:
        PAGE.write_text(page)
    elif page != text:
        print("conformance.py: docs/conformance.md is not up to date; run python3 docs/conformance.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
