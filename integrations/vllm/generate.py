# SPDX-License-Identifier: Apache-2.0
"""Greedy tokens from vLLM, in float32, with the attention backend that is named.

usage: generate.py MODEL CPU_ATTN|CUSTOM|transformers [--tokens N] [--ranks N] [--interleave N] [--drafts N] [--speed]
                   [--head FOLDER | --mtp] [--kind KIND] [--connector FOLDER]

Prompts are token ids, longer than a step takes at once, so that prefills come in chunks and decodes next to
them; they are sent twice, and the second time what the prefix cache holds is not computed again. Prints one line of
JSON: the tokens of both passes and, for CUSTOM, which of libattn's backends served which layers. `transformers`: the tokens of
its own eager model instead, for layers that vLLM has on a CPU in bfloat16 alone.

With --kind only layers of that kind have the backend, the others CPU_ATTN. With --connector vLLM's example of a KV connector keeps
the keys of the first pass in FOLDER and brings them in the second; prompts are longer than its blocks, and no prefix cache is on.

With --drafts tokens are proposed that followed the same ones before, and the prefix cache is off; with --head those that the head in
FOLDER drafts over the same backend (`eagle3` in its name: EAGLE3, else EAGLE), next to the prefix cache, and how many of them were accepted
stands in the line. With --mtp the model's own layer drafts them; the prefix cache is off next to gated delta layers.

With --speed instead: two prompts of 1900 tokens, in bfloat16, and seconds of their prefill and of a decoded token, of
the clock and of all threads' CPU time, which other work on the machine changes less.
"""
from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import torch


def served() -> list[str]:
    """Backends of libattn that ran in this process; empty where vLLM's worker is another one."""
    import libattn.torch

    return sorted({f"{row.kind}: {row.prefill}, {row.decode}" for row in libattn.torch.table()})


def speed(engine: Any, tokens: int) -> dict[str, float]:
    """Seconds and CPU seconds: a prefill, then the same prompts out of the prefix cache with `tokens` decoded after them."""
    from vllm import SamplingParams

    ids = torch.randint(100, 400, (4, 1900), generator=torch.Generator().manual_seed(3)).tolist()
    taken = []
    for rows, count in ((ids[:2], 1), (ids[2:], 1), (ids[2:], 1 + tokens)):  # the first warms up
        limits = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
        start = time.monotonic(), time.process_time()
        engine.generate([{"prompt_token_ids": row} for row in rows], limits, use_tqdm=False)
        taken.append((time.monotonic() - start[0], time.process_time() - start[1]))
    return {"prefill": taken[1][0], "token": taken[2][0] / tokens, "prefill_cpu": taken[1][1],
            "token_cpu": taken[2][1] / tokens}


def eager(model: str, prompts: list[list[int]], tokens: int) -> list[list[int]]:
    """Greedy tokens of Transformers' model, one request at a time."""
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
    return [loaded.generate(torch.tensor([ids]), max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False,
                            pad_token_id=0, eos_token_id=None)[0, len(ids):].tolist() for ids in prompts]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("backend", choices=("CPU_ATTN", "CUSTOM", "transformers"))
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--interleave", type=int, default=1)
    parser.add_argument("--drafts", type=int, default=0)
    parser.add_argument("--speed", action="store_true")
    parser.add_argument("--head")
    parser.add_argument("--mtp", action="store_true")
    parser.add_argument("--kind")
    parser.add_argument("--connector")
    options = parser.parse_args()
    ids = torch.randint(100, 400, (6, 150), generator=torch.Generator().manual_seed(3)).tolist()
    prompts = [ids[i][:length] for i, length in enumerate((5, 1, 150, 33, 70, 17)) if length > 16 or not options.connector]
    if options.backend == "transformers":
        print(json.dumps({"tokens": [eager(options.model, prompts, options.tokens)] * 2, "served": []}))
        return
    from vllm import LLM, SamplingParams

    # vLLM 0.32's CPU kernel for rotary embeddings takes wrong strides of MLA's rotary parts: tokens depend on the batch.
    config = (Path(options.model) / "config.json").read_text()
    latent, made = "kv_lora_rank" in config, bool(options.head or options.mtp)  # drafts of a model
    drafts = {"method": "ngram", "num_speculative_tokens": options.drafts, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
    if options.head:
        drafts = {"method": "eagle3" if "eagle3" in options.head else "eagle", "model": options.head,
                  "num_speculative_tokens": options.drafts}
    elif options.mtp:
        drafts = {"method": "mtp", "num_speculative_tokens": options.drafts}
    if made:  # vLLM chooses another backend for it else
        drafts["attention_backend"] = options.backend
    given: dict[str, Any] = {"attention_backend": options.backend}
    if options.kind:
        given = {"attention_config": {"backend": "CPU_ATTN", "backend_per_kind": {options.kind: options.backend}}}
    if options.connector:  # it takes whole prompts
        given.update(kv_transfer_config={"kv_connector": "ExampleConnector", "kv_role": "kv_both",
                                         "kv_connector_extra_config": {"shared_storage_path": options.connector}}, block_size=16)
    engine = LLM(options.model, compilation_config={"custom_ops": ["-rotary_embedding"] if latent else []},
                 dtype="bfloat16" if options.speed else "float32",
                 max_model_len=2048 if options.speed else 256, seed=7, enforce_eager=True,
                 enable_prefix_caching=not (options.drafts and (not made or "linear_num_key_heads" in config) or options.connector),
                 speculative_config=drafts if options.drafts else None,
                 kv_cache_memory_bytes=1 << 28, max_num_batched_tokens=2048 if options.speed or options.connector else 64, max_num_seqs=8,
                 skip_tokenizer_init=True, disable_log_stats=not made, tensor_parallel_size=options.ranks,
                 decode_context_parallel_size=options.ranks, cp_kv_cache_interleave_size=options.interleave, **given)
    if options.speed:
        print(json.dumps(speed(engine, options.tokens)))
        return
    limits = SamplingParams(temperature=0, max_tokens=options.tokens, ignore_eos=True, detokenize=False)
    rows = [{"prompt_token_ids": row} for row in prompts]
    passes = [[list(o.outputs[0].token_ids) for o in engine.generate(rows, limits, use_tqdm=False)] for _ in range(2)]
    inside = options.ranks == 1 and options.backend == "CUSTOM" and os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") == "0"
    metrics = engine.get_metrics() if made else []
    print(json.dumps({"tokens": passes, "served": served() if inside else [],
                      "accepted": sum(one.value for one in metrics if one.name == "vllm:spec_decode_num_accepted_tokens")}))


if __name__ == "__main__":
    main()
