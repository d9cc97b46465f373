# SPDX-License-Identifier: Apache-2.0
"""Greedy tokens of SGLang's engine on a CPU, in float32, with the attention backend that is named, next to Transformers'.

usage: generate.py MODEL torch_native|libattn [ngram|drafts|states]

`states`: a model with gated delta layers, whose prefix cache keeps states on a CPU without an overlapped scheduler alone.
`ngram`: with drafts of the tokens so far, in trees of at most two branches.
`drafts`: with one token a step that the model multi-query drafts over torch_native, as EAGLE's verification has it.
Prompts are token ids, longer than a step takes at once; they are sent twice, and the second time all but the last token comes out of
the radix cache. Prints one line of JSON: the tokens of both passes, how many the cache had, the largest distance of the chosen
tokens' log-probabilities from those of Transformers' eager model, whether all are the tokens that it would choose, and the most tokens
of a step in the second pass, where drafts of n-grams are the tokens of the first.
"""
from __future__ import annotations

import json
import sys
from pathlib import Path

if "drafts" in sys.argv:  # in SGLang's processes too
    import drafts  # noqa: F401
if "states" in sys.argv:
    import gated  # noqa: F401


def main() -> None:
    import sglang
    import torch
    from transformers import AutoModelForCausalLM

    folder, backend, *more = sys.argv[1:]
    ids = torch.randint(100, 400, (6, 150), generator=torch.Generator().manual_seed(3)).tolist()
    prompts = [ids[i][:length] for i, length in enumerate((5, 1, 150, 33, 70, 17))]
    options = {"ngram": {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 6, "speculative_ngram_max_bfs_breadth": 2},
               "drafts": {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": str(Path(folder).with_name("multi-query")),
                          "speculative_num_steps": 1, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 2,
                          "speculative_draft_attention_backend": "torch_native"},
               "states": {"mamba_radix_cache_strategy": "no_buffer", "disable_overlap_schedule": True}}
    chosen = {name: value for kind in more for name, value in options[kind].items()}
    engine = sglang.Engine(
        model_path=folder, device="cpu", dtype="float32", attention_backend=backend, skip_tokenizer_init=True, disable_cuda_graph=True,
        disable_hybrid_swa_memory=True, chunked_prefill_size=64, max_total_tokens=4096, max_running_requests=8, mem_fraction_static=0.3,
        context_length=512, random_seed=7, grammar_backend="none", sampling_backend="pytorch", log_level="warning", skip_server_warmup=True,
        **chosen)
    passes = [engine.generate(input_ids=prompts, sampling_params={"temperature": 0, "max_new_tokens": 24, "ignore_eos": True},
                              return_logprob=True) for _ in range(2)]
    engine.shutdown()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    apart, alike = 0.0, True
    for prompt, done in zip(prompts * 2, passes[0] + passes[1]):
        tokens, given = done["output_ids"], torch.tensor([row[0] for row in done["meta_info"]["output_token_logprobs"]])
        with torch.no_grad():
            logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1:-1].log_softmax(-1)
        alike &= logits.argmax(-1).tolist() == tokens
        apart = max(apart, float((logits.gather(1, torch.tensor(tokens)[:, None])[:, 0] - given).abs().max()))
    print(json.dumps({"tokens": [[done["output_ids"] for done in found] for found in passes],
                      "cached": sum(done["meta_info"]["cached_tokens"] for done in passes[1]), "apart": apart, "alike": alike,
                      "a step": max(24 / (done["meta_info"].get("spec_verify_ct") or 24) for done in passes[1])}))


if __name__ == "__main__":
    main()
