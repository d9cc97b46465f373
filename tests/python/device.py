# SPDX-License-Identifier: Apache-2.0
"""The model families on a GPU, through whatever backend libattn chooses there, and times next to torch's own.

Not part of CI: it needs a GPU, torch and Transformers. From the root, with a build in build/:

    PYTHONPATH=bindings/python/src:tests/python python3 tests/python/device.py [PART OF A NAME] [--times] [--generate]

A line per check; exit 1 if one failed. With --times or --generate no checks: times of whole models next to torch's attention.
"""
from __future__ import annotations

import inspect
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import transformers

import families
import libattn
import libattn.integrations.transformers as integration

#: Largest error of a logit relative to the logits' spread, in float32 from eager in float32.
BOUNDS = {torch.float32: 1e-4}
failed = 0


def report(what: str, good: bool, detail: str) -> None:
    """One line; a failure counts."""
    global failed
    failed += not good
    print(f"{'ok  ' if good else 'FAIL'} {what}: {detail}", flush=True)


def prompts(device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Three prompts, padded on the left."""
    ids = torch.randint(2, families.VOCABULARY, (3, 40), generator=torch.Generator().manual_seed(4))
    mask = (torch.arange(40)[None] >= torch.tensor([25, 3, 0])[:, None]).long()
    return (ids * mask).to(device), mask.to(device)


@torch.no_grad()
def decoder(family: families.Family) -> None:
    """float32 against eager; half precision no further from float32 than eager by half again."""
    ids, mask = prompts("cuda")
    real = mask.bool()
    model = family.make().cuda()
    truth = model(ids, attention_mask=mask).logits[real]
    tokens = model.generate(ids, attention_mask=mask, max_new_tokens=64, do_sample=False)
    integration.configure()
    model.set_attn_implementation("libattn")
    try:
        error = float((model(ids, attention_mask=mask).logits[real] - truth).abs().max())
        again = model.generate(ids, attention_mask=mask, max_new_tokens=64, do_sample=False)
        served = {row.prefill for row in integration.table()}
        report(f"{family.name} float32", error < BOUNDS[torch.float32] * max(1.0, float(truth.std())),
               f"error {error:.1e}, same tokens {bool(torch.equal(again, tokens))}, {served}")
    except libattn.UnsupportedError as refusal:
        report(f"{family.name} float32", True, f"refused: {str(refusal).splitlines()[-1][:150]}")
    for dtype in (torch.bfloat16, torch.float16):
        model = family.make(dtype=dtype).cuda()
        distances = []
        for implementation in ("eager", "libattn"):
            model.set_attn_implementation(implementation)
            logits = model(ids, attention_mask=mask).logits[real].float()
            distances.append(float((logits - truth).pow(2).mean().sqrt()))
        model.generate(ids, attention_mask=mask, max_new_tokens=64, do_sample=False)
        served = {row.prefill for row in integration.table()}
        report(f"{family.name} {str(dtype)[6:]}", distances[1] < 1.5 * distances[0],
               f"distance {distances[1]:.4f}, eager's {distances[0]:.4f}, {served}")


@torch.no_grad()
def cross(family: families.Family, make_inputs: Callable[..., Any]) -> None:
    """Encoder and decoder with cross attention, float32 against eager."""
    model = family.make().cuda()
    inputs = {name: value.cuda() for name, value in make_inputs(3).items()}
    ids = (torch.arange(30).reshape(3, 10) + 2).cuda()
    truth = model(**inputs, decoder_input_ids=ids).logits
    integration.configure()
    model.set_attn_implementation("libattn")
    error = float((model(**inputs, decoder_input_ids=ids).logits - truth).abs().max())
    report(f"{family.name} float32", error < BOUNDS[torch.float32] * max(1.0, float(truth.std())),
           f"error {error:.1e}, {({row.prefill for row in integration.table()})}")


@torch.no_grad()
def encoder(family: families.Family, make_inputs: Callable[..., Any], output: str) -> None:
    """An encoder's output, float32 against eager."""
    model = family.make().cuda()
    inputs = {name: value.cuda() for name, value in make_inputs().items()}
    real = inputs["attention_mask"].bool() if output == "last_hidden_state" and "attention_mask" in inputs else ...
    truth = getattr(model(**inputs), output)[real]
    integration.configure()
    model.set_attn_implementation("libattn")
    error = float((getattr(model(**inputs), output)[real] - truth).abs().max())
    report(f"{family.name} float32", error < BOUNDS[torch.float32] * max(1.0, float(truth.std())),
           f"error {error:.1e}, {({row.prefill for row in integration.table()})}")


@torch.no_grad()
def batching(family: families.Family, pages: int) -> None:
    """Continuous batching of mixed lengths: the tokens of each prompt as eager generates it alone."""
    from transformers import ContinuousBatchingConfig, GenerationConfig
    model = family.make().cuda()
    ids = [torch.randint(2, families.VOCABULARY, (n,), generator=torch.Generator().manual_seed(n)).tolist()
           for n in (3, 31, 17, 1, 24)]
    truth = []
    for prompt in ids:
        row = torch.tensor([prompt], device="cuda")
        truth.append(model.generate(row, attention_mask=torch.ones_like(row), max_new_tokens=20,
                                    do_sample=False)[0, len(prompt):].tolist())
    integration.configure()
    try:
        model.set_attn_implementation("paged|libattn")
    except ValueError:
        print(f"skip {family.name} continuous batching: Transformers {transformers.__version__} takes no paged|libattn")
        return
    model.set_attn_implementation("libattn")
    known = inspect.signature(ContinuousBatchingConfig).parameters
    page = "page_size" if "page_size" in known else "block_size"  # renamed between releases
    options = {page: 16, "num_blocks": 64, "max_batch_tokens": 24, "max_blocks_per_request": pages}
    answers = model.generate_batch(
        ids, generation_config=GenerationConfig(max_new_tokens=20, do_sample=False, pad_token_id=0, eos_token_id=-1),
        continuous_batching_config=ContinuousBatchingConfig(**{n: v for n, v in options.items() if n in known}),
        progress_bar=False)
    found = {tuple(a.prompt_ids): a.generated_tokens for a in answers.values()}
    same = [found.get(tuple(prompt)) for prompt in ids] == truth
    report(f"{family.name} continuous batching, {'block tables' if pages else 'gathered keys'}", same,
           f"same tokens {same}, {({row.prefill for row in integration.table()})}")


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
    named = {family.name: family for family in families.DECODERS}
    checks: list[tuple[str, Callable[[], None]]] = [(f.name, partial(decoder, f)) for f in families.DECODERS]
    checks += [(entry[0].name, partial(cross, *entry)) for entry in families.CROSS]
    checks += [(entry[0].name, partial(encoder, *entry)) for entry in families.ENCODERS]
    checks += [(f"{name} batching", partial(batching, named[name], pages))
               for name, pages in (("llama", 0), ("gemma3", 0), ("gpt-oss", 0), ("llama", 8), ("qwen3", 8))]
    if {"--times", "--generate"} & set(sys.argv[1:]):
        checks = [("llama times", times)] if "--times" in sys.argv[1:] else []
        checks += [(name, partial(generation, named[name])) for name in _WIDE if "--generate" in sys.argv[1:]]
    for name, check in checks:
        if sys.argv[1:] and not sys.argv[1].startswith("-") and sys.argv[1] not in name:
            continue
        try:
            check()
        except Exception as error:  # noqa: BLE001  the next one is tried all the same
            report(name, False, f"{type(error).__name__}: {str(error)[:300]}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
