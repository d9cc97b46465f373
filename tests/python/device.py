# SPDX-License-Identifier: Apache-2.0
"""The model families on a GPU, through whatever backend libattn chooses there, and times beside torch's own.

Not part of CI: it needs a GPU, torch and Transformers. From the root, with a build in build/:

    PYTHONPATH=bindings/python/src:tests/python python3 tests/python/device.py [--times]

A line per check; exit 1 if one failed.
"""
from __future__ import annotations

import sys
import time
from collections.abc import Callable
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


def main() -> int:
    integration.register()
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, {torch.cuda.get_device_name()}")
    for plugin in libattn.Runtime().plugins:
        print(f"{plugin.name or plugin.file}: {plugin.num_backends} backends {plugin.reason}")
    for family in families.DECODERS:
        try:
            decoder(family)
        except Exception as error:  # noqa: BLE001  the next family is tried all the same
            report(family.name, False, f"{type(error).__name__}: {str(error)[:300]}")
    if "--times" in sys.argv[1:]:
        times()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
