# SPDX-License-Identifier: Apache-2.0
"""Greedy tokens of SGLang's engine on a CPU, in float32, with the attention backend that is named, next to Transformers'.

usage: generate.py MODEL torch_native|libattn [ngram|drafts|eagle|eagle3|mtp|states|replays] [tree]

`states`: a model with gated delta layers, whose prefix cache keeps states on a CPU without an overlapped scheduler alone.
`replays`: such a model, whose decodes are played as replays of graphs and write a state for the prefix cache at every 64th token; the
second prompts go on from the middle of the first answers.
`ngram`: with drafts of the tokens so far, in trees of at most two branches.
`drafts`, `eagle`, `eagle3`: with three tokens a step that a model or a head drafts over libattn; `tree`: with seven in three branches.
`mtp`: with three tokens a step of the model's own layer for that.
Prompts are token ids, longer than a step takes at once; they are sent twice, and the second time all but the last token comes out of
the radix cache. Prints one line of JSON: the tokens of both passes, how many the cache had, the largest distance of the chosen
tokens' log-probabilities from those of Transformers' eager model, whether all are the tokens that it would choose, how many second prompts
had more in the cache than the first prompt, and the most tokens of a step in the second pass, where drafts of n-grams are the tokens of the
first.
"""
from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

if "states" in sys.argv or "replays" in sys.argv:  # in SGLang's processes too
    import gated  # noqa: F401
if "replays" in sys.argv:
    import replays  # noqa: F401
if "mtp" in sys.argv:  # SGLang waits for CUDA there, on a CPU too
    import torch.cuda

    torch.cuda.synchronize = lambda *_: None  # type: ignore[assignment]


def main() -> None:
    import sglang
    import torch
    from transformers import AutoModelForCausalLM

    folder, backend, *more = sys.argv[1:]
    ids = torch.randint(100, 400, (6, 150), generator=torch.Generator().manual_seed(3)).tolist()
    prompts = [ids[i][:length] for i, length in enumerate((5, 1, 150, 33, 70, 17))]
    options: dict[str, dict[str, Any]] = {
        "ngram": {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 6, "speculative_ngram_max_bfs_breadth": 2},
        "tree": {"speculative_eagle_topk": 3, "speculative_num_draft_tokens": 8},
        "replays": {"mamba_radix_cache_strategy": "extra_buffer", "mamba_track_interval": 64, "disable_overlap_schedule": True},
        "states": {"mamba_radix_cache_strategy": "no_buffer", "disable_overlap_schedule": True}}
    chain = {"speculative_num_steps": 3, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 4}
    for kind, algorithm, draft in (("drafts", "STANDALONE", "multi-query"), ("eagle", "EAGLE", "eagle"), ("eagle3", "EAGLE3", "eagle3")):
        options[kind] = {"speculative_algorithm": algorithm, "speculative_draft_model_path": str(Path(folder).with_name(draft)), **chain}
    options["mtp"] = {"speculative_algorithm": "NEXTN", **chain}
    chosen = {name: value for kind in more for name, value in options[kind].items()}
    engine = sglang.Engine(
        model_path=folder, device="cpu", dtype="float32", attention_backend=backend, skip_tokenizer_init=True, disable_cuda_graph=True,
        disable_hybrid_swa_memory=True, chunked_prefill_size=64, max_total_tokens=4096, max_running_requests=8, mem_fraction_static=0.3,
        context_length=512, random_seed=7, grammar_backend="none", sampling_backend="pytorch", log_level="warning", skip_server_warmup=True,
        **chosen)
    count = 80 if "replays" in more else 24
    limits = {"temperature": 0, "max_new_tokens": count, "ignore_eos": True}
    first = engine.generate(input_ids=prompts, sampling_params=limits, return_logprob=True)
    again = [row + done["output_ids"][:60] + [99] for row, done in zip(prompts, first)] if "replays" in more else prompts
    second = engine.generate(input_ids=again, sampling_params=limits, return_logprob=True)
    engine.shutdown()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    apart, alike = 0.0, True
    for prompt, done in zip(prompts + again, first + second):
        tokens, given = done["output_ids"], torch.tensor([row[0] for row in done["meta_info"]["output_token_logprobs"]])
        with torch.no_grad():
            logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1:-1].log_softmax(-1)
        alike &= logits.argmax(-1).tolist() == tokens
        apart = max(apart, float((logits.gather(1, torch.tensor(tokens)[:, None])[:, 0] - given).abs().max()))
    beyond = sum(done["meta_info"]["cached_tokens"] > len(row) for row, done in zip(prompts, second))
    print(json.dumps({"tokens": [[done["output_ids"] for done in found] for found in (first, second)],
                      "cached": sum(done["meta_info"]["cached_tokens"] for done in second), "beyond": beyond, "apart": apart,
                      "alike": alike, "a step": max(count / (done["meta_info"].get("spec_verify_ct") or count) for done in second)}))


if __name__ == "__main__":
    main()
