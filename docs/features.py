# SPDX-License-Identifier: Apache-2.0
"""Writes docs/features.md: every feature, the backends that declare it, and the tests that hold it.

What a backend declares comes from tests/*/capabilities.json, which attn-check holds against the backend itself. With
--check nothing is written, and the exit status is 1 if the page is not up to date.
"""
from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BACKENDS = ("cpu_ref", "cpu_simd", "cuda_flash", "hip", "level_zero")
Caps = dict[str, Any]
Needs = Callable[[Caps], bool | str]


def has(key: str, *values: str) -> Needs:
    """Declares all of `values` under `key`."""
    return lambda caps: all(value in caps.get(key, ()) for value in values)


def term(*names: str) -> Needs:
    return has("terms", *names)


def feature(*names: str) -> Needs:
    return has("features", *names)


def kv(*names: str) -> Needs:
    return has("kv_dtypes", *names)


def kernel(*names: str) -> Needs:
    return has("kernels", *names)


def both(*needs: Needs) -> Needs:
    return lambda caps: all(need(caps) for need in needs)


def levels(*names: str) -> Needs:
    """Declares the first of these features, or more: which of them, counted from 1."""
    return lambda caps: ", ".join(str(i + 1) for i, name in enumerate(names) if name in caps["features"])


CHECK, RUN = "attn-check", "attn-run"
STEP = "tests/step/test_"
FORMULAS = "tests/cpu_ref/checked/"
LISTS = f"{CHECK}, tests/python/test_lists"
RULES = f"{CHECK}, {RUN}, tests/python/test_recurrent"

#: (section, [(feature, what a backend declares for it, "core" where the core composes it of other parts, tests)])
SECTIONS: list[tuple[str, list[tuple[str, Needs, str, str]]]] = [
    ("1. Attention", [
        ("causal, also per request", term("causal", "causal_per_request"), "", f"{FORMULAS}attend, {CHECK}"),
        ("bidirectional: encoder, encoder-only, multimodal encoder", both(
            term("bidirectional"), has("layer_kinds", "encoder")), "encoder layers",
         f"{FORMULAS}attend, {CHECK}, {RUN}"),
        ("cross attention", has("layer_kinds", "cross"), "of bidirectional attends", f"{STEP}compose, {CHECK}, {RUN}"),
        ("sliding window, symmetric window", term("sliding_window", "symmetric_window"), "", f"{FORMULAS}attend, {CHECK}, {RUN}"),
        ("chunked local, with lookback", term("chunked_local"), "virtual requests", f"{CHECK}, {RUN}"),
        ("soft cap", term("soft_cap"), "", f"{FORMULAS}attend, {CHECK}, {RUN}"),
        ("ALiBi, square-root form", term("alibi", "alibi_sqrt"), "", f"{FORMULAS}attend, {CHECK}, {RUN}"),
        ("sinks", term("sinks"), "", f"{FORMULAS}attend, {CHECK}, {RUN}"),
        ("static sink", term("static_sink"), "attend(sink) + attend(rest) + merge", f"{STEP}compose, {CHECK}"),
        ("prefix-LM spans", term("prefix_lm"), "", f"{FORMULAS}attend, {CHECK}"),
        ("lists of keys for each token", has("index_lists", "attend"), "", f"{STEP}lists, {FORMULAS}attend, {LISTS}"),
        ("tree masks: bits, bias", term("tree_bits", "tree_bias"), "", f"{FORMULAS}attend, {CHECK}"),
        ("log-sum-exp", feature("lse"), "", f"{FORMULAS}attend, {CHECK}"),
        ("float16, bfloat16, float32", has("dtypes", "f16", "bf16", "f32"), "", f"{FORMULAS}attend, {CHECK}"),
    ]),
    ("2. KV cache", [
        ("f16, bf16, f32", kv("auto", "f16", "bf16", "f32"), "", f"{STEP}pages, {CHECK}"),
        ("fp8 e4m3, e5m2, scales per tensor and head", both(
            kv("fp8_e4m3", "fp8_e5m2"), has("k_scale_forms", "per_tensor", "per_head")), "",
         f"{FORMULAS}rows, {STEP}pages, {CHECK}"),
        ("fp8 and int8 per token and head", kv("fp8_per_token_head", "int8_per_token_head"), "",
         f"{FORMULAS}rows, {STEP}pages, {CHECK}"),
        ("int4 per token and head, Hadamard", kv("int4_per_token_head"), "", f"{FORMULAS}rows, {STEP}pages, {CHECK}"),
        ("two-level int8", kv("int8_kv", "int8_k"), "", f"{FORMULAS}rows, {STEP}pages, {CHECK}"),
        ("two-level int8: decodes write in their attend", has("decode_write_kv_dtypes", "int8_kv", "int8_k"), "writes before",
         f"{STEP}fused_write, {CHECK}"),
        ("nvfp4", kv("nvfp4"), "", f"{FORMULAS}rows, {STEP}pages, {CHECK}"),
        ("fp8 e4m3fnuz, the AMD form", kv("fp8_e4m3fnuz"), "", f"{STEP}pages, {CHECK}"),
        ("ggml's q8_0 and q4_0", kv("q8_0", "q4_0"), "", f"{FORMULAS}rows, {STEP}pages, {CHECK}"),
        ("K and V of two dtypes", feature("kv_dtype_v"), "", f"{STEP}pages, {CHECK}"),
        ("TurboQuant: k8v4, 4bit_nc, k3v4_nc, 3bit_nc",
         kv("turboquant_k8v4", "turboquant_4bit_nc", "turboquant_k3v4_nc", "turboquant_3bit_nc"), "",
         f"{FORMULAS}rows, {STEP}pages, {CHECK}"),
        ("fp8_ds_v4 rows", kv("fp8_ds_v4"), "", f"tests/cpu_ref/test_undrawn, {CHECK}, tests/python/test_compressed"),
        ("mxfp4 keys of indexers", kv("mxfp4"), "", f"{CHECK}, tests/python/test_indexer"),
        ("fp8_ds_mla rows", kv("fp8_ds_mla"), "", f"{FORMULAS}attend, {STEP}mla"),
        ("quantized queries ([precision](semantics.md#7-precision))", feature("quantized_query"), "", f"{FORMULAS}rows, {CHECK}"),
        ("quantized probabilities", has("p_scale_forms", "per_tensor"), "", f"{FORMULAS}rows, {CHECK}"),
        ("NHD, HND, packed, K and V apart", has("view_forms", "nhd", "hnd", "packed", "separate_strides"), "",
         f"{FORMULAS}attend, {CHECK}"),
        ("RoPE (NeoX, GPT-J) + q/k norm + write", both(kernel("rope_write_kv"), feature("fused_rope_norm")), "",
         f"{FORMULAS}kernels, {CHECK}"),
        ("shared caches, hybrids, groups", kernel("attend"), "whole", f"{STEP}hybrid"),
        ("layers that skip the cache's quantization, next to quantized ones", kernel("attend"), "whole", "tests/core/test_layer_check"),
        ("page bytes and rows of every dtype and kind of layer", kernel("attend"), "whole", f"{STEP}pages, tests/core/test_bind"),
        ("block copies and swaps", kernel("copy_blocks"), "on a CPU", f"{CHECK}, {RUN}"),
        ("largest magnitudes for scales: of a tensor, heads, channels", kernel("amax"), "over several batches",
         f"{STEP}mla, tests/device/test_addresses"),
    ]),
    ("3. Batch, plan, graphs", [
        ("decode/prefill split, order of requests", kernel("attend"), "whole", f"{STEP}scheduling_helpers, tests/core/test_plan_calls"),
        ("mixed batches in one attend", feature("mixed_batch"), "two calls", f"{CHECK}"),
        ("block-table update", feature("update_block_table"), "plans again", f"{STEP}graphs, {CHECK}"),
        ("lengths on the device only", feature("device_seq_lens"), "", f"{CHECK}"),
        ("host lengths that are bounds", feature("host_bounds"), "", f"{STEP}bounds"),
        ("page lists with offsets", kernel("attend"), "on a CPU; else make_block_table",
         f"{STEP}blocks, tests/device/test_addresses, {CHECK}"),
        ("an engine's block of several kernel blocks", kernel("attend"), "on a CPU; else make_block_table",
         f"{STEP}blocks, tests/device/test_addresses"),
        ("cascade", feature("cascade"), "attend(prefix) + attend(suffix) + merge", f"{STEP}compose, {RUN}, {CHECK}"),
        ("graph capture and replay, level always", lambda caps: caps["graph_level"] == 64, "", f"{STEP}graphs, {CHECK}"),
        ("batch invariance, its levels: 1, 2 with a prefix cache too (on GPUs not of recurrent layers with states of 16 bits)",
         levels("batch_invariant", "batch_invariant_prefix"), "", f"{CHECK}"),
        ("fast prefill", feature("fast_prefill"), "", CHECK),
        ("context parallelism: decode, contexts", both(feature("lse", "contiguous_kv"), kernel("merge_states")),
         "gather, attend, exchange, merge; few rows by the table's gather_heads and merge_heads",
         "tests/collectives/test_parallel (2, 3, 4 ranks)"),
        ("context parallelism: queries of a request split", both(feature("block_table_row"), kernel("write_kv")),
         "slices as requests, keys gathered", "tests/collectives/test_queries (2, 3, 4 ranks)"),
        ("profiling, idle", kernel("attend"), "whole", f"tests/core/test_plan_calls, {CHECK}"),
    ]),
    ("4. MLA", [
        ("decode over latent rows", kernel("attend_mla"), "absorb + up-project", f"{FORMULAS}attend, {STEP}mla, {RUN}"),
        ("prefill per head over gathered context", both(kernel("gather_kv", "batched_gemm", "merge_states"),
                                                        has("layer_kinds", "mla")), "whole", f"{STEP}mla, {RUN}"),
        ("latent cache spread over ranks: decode, chunks of context", both(
            kernel("attend_mla", "gather_kv", "batched_gemm", "merge_states"), has("layer_kinds", "mla")),
         "exchange of latent queries and rows", "tests/collectives/test_latent (2, 3, 4 ranks)"),
        ("W_UK and W_UV in mxfp4", feature("mxfp4_weights"), "views per head", f"{STEP}mla, {FORMULAS}kernels, {CHECK}"),
        ("W_UK and W_UV: split from kv_b_proj or given, in 8 bits with scales", both(
            kernel("attend_mla", "batched_gemm"), has("layer_kinds", "mla")), "views per head", f"{STEP}mla, {CHECK}"),
        ("sparse", kernel("attend_mla_sparse"), "", f"{FORMULAS}attend, {STEP}mla, {RUN}"),
        ("compressed rows next to a window", feature("compressed_rows"), "one attend, or attend + attend(compressed) + merge",
         f"{STEP}compressed, {CHECK}, {RUN}, tests/python/test_compressed"),
        ("compressors: tokens pooled by gates into rows", has("layer_kinds", "compressor"), "",
         f"{STEP}compressor, {CHECK}, {RUN}, tests/python/test_compressed"),
        ("output rotated back", lambda caps: caps["name"].startswith("cpu_") or "output_rope" in caps["features"],
         "on CPUs",
         f"{STEP}output_rope, {CHECK}, {RUN}, tests/python/test_compressed"),
        ("lists of keys other than the top k", has("index_lists", "attend_mla_sparse"), "", f"{FORMULAS}attend, {LISTS}"),
    ]),
    ("5. Recurrent layers", [
        ("gated delta rule: convolution, step, chunks, drafts", kernel("recurrent"), "", f"{FORMULAS}delta, {STEP}gdn, {RUN}"),
        ("KDA: a gate per channel; with a lower bound, or given", has("recurrent", "gate_per_channel", "gate_bounded", "gate_given"),
         "", f"{FORMULAS}delta, {RULES}"),
        ("Mamba2: step as write gate, limits, skip", has("recurrent", "additive", "write_gate_step", "values_first", "skip"), "",
         f"{FORMULAS}delta, {RULES}"),
        ("lightning: constant gates", has("recurrent", "additive", "gate_constant", "write_gate_none"), "",
         f"{FORMULAS}delta, {CHECK}, tests/python/test_recurrent"),
        ("a norm and a gate of the output", has("recurrent", "output_norm"), "", f"{FORMULAS}delta, {CHECK}, tests/python/test_recurrent"),
        ("a ring of the last tokens' inputs, the state written once in n tokens (replay)", has("recurrent", "replay"), "",
         f"{FORMULAS}delta, {CHECK}, tests/python/test_replay"),
        ("states of 16 bits rounded stochastically, by a seed", has("recurrent", "stochastic_rounding"), "",
         f"{FORMULAS}delta, {CHECK}, tests/python/test_rounding"),
        ("states in bf16 and f16", has("recurrent", "state_f16", "state_bf16"), "", f"{FORMULAS}delta, {CHECK}, {RUN}"),
    ]),
    ("Indexers", [
        ("lists of the best tokens, rows or blocks; forced entries, tails", has("layer_kinds", "indexer"), "",
         f"{STEP}indexer, {CHECK}, {RUN}, tests/python/test_indexer"),
        ("norm, rotation, Hadamard transform in the write of keys", feature("index_write"), "",
         f"{STEP}indexer, {CHECK}, {RUN}, tests/python/test_indexer"),
    ]),
    ("6. Fused output and helpers", [
        ("fp8 static and in groups, nvfp4", kernel("quantize"), "attend + quantize", f"{STEP}output, {CHECK}"),
        ("the same written by the attend", has("output_forms", "fp8_static", "fp8_group_64", "fp8_group_128", "nvfp4"), "", f"{CHECK}"),
        ("multimodal encoder in fp8, scales from its amax history", feature("fp8_inputs"), "amax + quantize + attend", f"{STEP}encoder, {CHECK}"),
        ("amax", kernel("amax"), "", f"{FORMULAS}kernels, {CHECK}"),
        ("batched GEMM", kernel("batched_gemm"), "", f"{FORMULAS}kernels, {CHECK}"),
    ]),
]

#: Rows of the features document that nothing serves yet.
OPEN = [
    "caches of a layer beyond K and V, latent rows or a ring, further tables of a batch: described, bound, planned and handed "
    "through (tests/step/test_many_caches); no shipped backend declares them",
    "recurrent layers: states of 8 bits: no field says them",
]


def page() -> str:
    """The whole text."""
    caps = {name: json.loads((ROOT / "tests" / name / "capabilities.json").read_text()) for name in BACKENDS}
    lines = ["# Features",
             "Written by `python3 docs/features.py` from what the backends declare (`tests/*/capabilities.json`, held against "
             "each",
             "backend by attn-check). \"core\" says what the core makes of other parts where a backend has no kernel of its own.",
             ""]
    for title, rows in SECTIONS:
        lines += [f"## {title}", f"| feature | {' | '.join(BACKENDS)} | core | tests |", "| --- " * (len(BACKENDS) + 3) + "|"]
        for name, needs, core, tests in rows:
            found = [needs(caps[backend]) for backend in BACKENDS]
            marks = [mark if isinstance(mark, str) else "yes" if mark else "" for mark in found]
            lines.append("| " + " | ".join([name, *marks, core, tests]) + " |")
        lines.append("")
    lines += ["## Not yet", *[f"- {row}" for row in OPEN], ""]
    return "\n".join(lines)


def missing_tests() -> list[str]:
    """Tests that the tables name and the tree lacks."""
    names = {test.strip().split(" ")[0] for _, rows in SECTIONS for row in rows for test in row[3].split(",")}
    return sorted(name for name in names if name.startswith("tests/") and not list(ROOT.glob(f"{name}*.c")) + list(ROOT.glob(f"{name}.py")))


def main() -> int:
    target = ROOT / "docs" / "features.md"
    absent = missing_tests()
    if absent:
        print(f"features.py: no such test: {', '.join(absent)}", file=sys.stderr)
        return 1
    if "--check" not in sys.argv[1:]:
        target.write_text(page())
    elif target.read_text() != page():
        print("features.py: docs/features.md is not up to date; run python3 docs/features.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
