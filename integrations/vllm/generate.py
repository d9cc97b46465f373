# SPDX-License-Identifier: Apache-2.0
"""Greedy tokens from vLLM, in float32, with the attention backend that is named.

usage: generate.py MODEL CPU_ATTN|CUSTOM [--tokens N]

Prompts are token ids, longer than a step takes at once, so that prefills come in chunks and decodes beside
them; they are sent twice, and the second time what the prefix cache holds is not computed again. Prints one line of
JSON: the tokens of both passes and, for CUSTOM, which of libattn's backends served which layers.
"""
from __future__ import annotations

import argparse
import json
import os

import torch


def served() -> list[str]:
    """Backends of libattn that ran in this process; empty where vLLM's worker is another one."""
    import libattn.torch

    return sorted({f"{row.kind}: {row.prefill}, {row.decode}" for row in libattn.torch.table()})


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("backend", choices=("CPU_ATTN", "CUSTOM"))
    parser.add_argument("--tokens", type=int, default=24)
    options = parser.parse_args()
    from vllm import LLM, SamplingParams

    engine = LLM(options.model, dtype="float32", attention_backend=options.backend, max_model_len=256, seed=7,
                 enforce_eager=True, kv_cache_memory_bytes=1 << 28, max_num_batched_tokens=64, max_num_seqs=8,
                 skip_tokenizer_init=True)
    ids = torch.randint(100, 400, (6, 150), generator=torch.Generator().manual_seed(3)).tolist()
    prompts = [{"prompt_token_ids": ids[i][:length]} for i, length in enumerate((5, 1, 150, 33, 70, 17))]
    limits = SamplingParams(temperature=0, max_tokens=options.tokens, ignore_eos=True, detokenize=False)
    passes = [[list(o.outputs[0].token_ids) for o in engine.generate(prompts, limits, use_tqdm=False)]
              for _ in range(2)]
    inside = options.backend == "CUSTOM" and os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") == "0"
    print(json.dumps({"tokens": passes, "served": served() if inside else []}))


if __name__ == "__main__":
    main()
