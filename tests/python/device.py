# SPDX-License-Identifier: Apache-2.0
"""The model families on a GPU, through whatever backend libattn chooses there, and times next to torch's own.

Not part of CI: it needs a GPU, torch and Transformers. From the root, with a build in build/:

    PYTHONPATH=bindings/python/src:tests/python python3 tests/python/device.py [PART OF A NAME] [--times] [--generate]

The tests of test_families, and continuous batching's of test_transformers, with all models there; exit 1 if one failed. With --times or
--generate no checks: times of whole models next to torch's attention.
"""
from __future__ import annotations

import os
import sys
import time
import unittest
from collections.abc import Callable
from typing import Any

import torch
import transformers

import families
import libattn
import libattn.integrations.transformers as integration


def timed(call: Callable[[], Any], repeats: int) -> float:
    """Median milliseconds."""
    samples = []
    for _ in range(repeats + 2):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        torch.cuda.synchronize()
        samples.append(1e3 * (time.perf_counter() - begin))
    return sorted(samples[2:])[repeats // 2]


@torch.no_grad()
def times() -> None:
    """Eight layers of Llama 3.1 8B's shape in bfloat16: prefill of 2048 and 8192, and decode steps."""
    config = transformers.LlamaConfig(hidden_size=4096, intermediate_size=14336, num_hidden_layers=8, vocab_size=1024,
                                      num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=16384,
                                      pad_token_id=0, eos_token_id=None)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = transformers.LlamaForCausalLM(config).eval()
    torch.set_default_dtype(torch.float32)
    for implementation in ("sdpa", "libattn"):
        model.set_attn_implementation(implementation)
        line = []
        for batch, length in ((1, 2048), (1, 8192), (8, 2048)):
            ids = torch.randint(1, 1024, (batch, length), device="cuda")
            prefill = timed(lambda: model(ids, use_cache=False, logits_to_keep=1), 5)
            line.append(f"prefill {batch}x{length} {prefill:.2f}")
            cache = model(ids, logits_to_keep=1).past_key_values

            def step() -> None:
                model(ids[:, :1], past_key_values=cache)

            line.append(f"decode {batch}x{length} {timed(step, 20):.2f}")
        print(f"{implementation}, ms: {', '.join(line)}", flush=True)


#: Layers of the models' own widths, few of them and with few experts: what `families` has is replaced.
_WIDE: dict[str, dict[str, Any]] = {
    "llama": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 8, "num_attention_heads": 32,  # 3.1 8B
              "num_key_value_heads": 8, "head_dim": 128},
    "gemma3": {"hidden_size": 3840, "intermediate_size": 15360, "num_hidden_layers": 6, "num_attention_heads": 16,  # 12B
               "num_key_value_heads": 8, "head_dim": 256, "sliding_window": 1024, "query_pre_attn_scalar": 256},
    "qwen3-next": {"hidden_size": 2048, "intermediate_size": 5120, "num_hidden_layers": 4, "num_attention_heads": 16,  # 80B
                   "num_key_value_heads": 2, "head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
                   "linear_key_head_dim": 128, "linear_value_head_dim": 128, "moe_intermediate_size": 512,
                   "shared_expert_intermediate_size": 512},
    "gpt-oss": {"hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 8, "num_attention_heads": 64,  # 20B
                "num_key_value_heads": 8, "head_dim": 64, "sliding_window": 128},
    "deepseek-v3": {"hidden_size": 7168, "intermediate_size": 18432, "num_hidden_layers": 4, "num_attention_heads": 128,
                    "num_key_value_heads": 128, "head_dim": 64, "q_lora_rank": 1536, "kv_lora_rank": 512,
                    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "moe_intermediate_size": 2048},
}


@torch.no_grad()
def generation(family: families.Family) -> None:
    """generate() of a model of this family's own widths in bfloat16, prompts of 1024 tokens, libattn and torch's by turns: milliseconds
    of the prompt with the first token, and of a token after it (median of 16), for lengths that are new to the process and again
    (median of three rounds, and their range)."""
    config = getattr(transformers, family.config)(**{**family.values, **_WIDE[family.name], "vocab_size": 1024,
                                                     "max_position_embeddings": 16384})
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = getattr(transformers, family.model)(config).eval()
    torch.set_default_dtype(torch.float32)
    integration.configure()
    other = "eager" if family.name == "gpt-oss" else "sdpa"  # sdpa has no sinks

    def took(ids: torch.Tensor, count: int) -> tuple[float, float]:
        ends: list[float] = []

        def token(ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
            torch.cuda.synchronize()
            ends.append(1e3 * time.perf_counter())
            return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)

        torch.cuda.synchronize()
        begin = 1e3 * time.perf_counter()
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False,
                       stopping_criteria=transformers.StoppingCriteriaList([token]))
        each = sorted(after - before for before, after in zip(ends, ends[1:]))
        return ends[0] - begin, each[len(each) // 2] if each else 0.0

    for batch in (1, 32):
        ids = torch.randint(1, 1024, (batch, 1024), device="cuda")
        found: dict[str, list[tuple[float, float]]] = {"libattn": [], other: []}
        for turn in range(4):
            for implementation, times in found.items():
                model.set_attn_implementation(implementation)
                if not turn:  # kernels and the prompt's plan
                    took(ids, 1)
                times.append(took(ids, 17))
        for implementation, times in found.items():
            prompts, tokens = (sorted(values[1:]) for values in zip(*times))
            print(f"generate {family.name}, {config.num_hidden_layers} layers, {batch}x1024 {implementation}: prompt {prompts[1]:.1f} ms "
                  f"({prompts[0]:.1f}-{prompts[2]:.1f}), a token {times[0][1]:.2f} ms, again {tokens[1]:.2f} ms "
                  f"({tokens[0]:.2f}-{tokens[2]:.2f})", flush=True)


def main() -> int:
    integration.register()
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, {torch.cuda.get_device_name()}")
    for plugin in libattn.Runtime().plugins:
        print(f"{plugin.name or plugin.file}: {plugin.num_backends} backends {plugin.reason}")
    part = next((name for name in sys.argv[1:] if not name.startswith("-")), "")
    if "--times" in sys.argv[1:]:
        times()
    if "--generate" in sys.argv[1:]:
        for family in families.DECODERS:
            if family.name in _WIDE and part in family.name:
                generation(family)
    if {"--times", "--generate"} & set(sys.argv[1:]):
        return 0
    os.environ["ATTN_TEST_DEVICE"] = "cuda"  # read when the tests are imported
    chosen = [f"-k{part.replace('-', '_')}"] if part else []
    tests = ["test_families.Families", "test_transformers.ContinuousBatching"]
    return not unittest.main(None, argv=["device.py", "-v", *chosen, *tests], exit=False).result.wasSuccessful()


if __name__ == "__main__":
    sys.exit(main())
