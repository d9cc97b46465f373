# SPDX-License-Identifier: Apache-2.0
"""Model families through Transformers: logits as eager's in float32, and the same tokens. On a GPU where `device.py` asks for it, by
whatever backend libattn chooses there."""
import os
import time
import unittest
from collections.abc import Callable
from typing import Any

import torch
import transformers

import common
import families
import libattn
import libattn.integrations.transformers as integration

torch.set_num_threads(1)
TOKENS = 64
#: Of logits with a standard deviation of about 1.5.
BOUND = 1e-4
DEVICE = torch.device(os.environ.get("ATTN_TEST_DEVICE", "cpu"))
BACKENDS: tuple[str | None, ...] = common.BACKENDS if DEVICE.type == "cpu" else (None,)


def there(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.to(DEVICE) for name, value in inputs.items()}


def prompts() -> dict[str, torch.Tensor]:
    """Three prompts of 15, 37 and 40 tokens, padded on the left."""
    ids = torch.randint(2, families.VOCABULARY, (3, 40), generator=torch.Generator().manual_seed(4))
    mask = (torch.arange(40)[None] >= torch.tensor([25, 3, 0])[:, None]).long()
    return there({"input_ids": ids * mask, "attention_mask": mask})


class Families(unittest.TestCase):
    def hold(self, family: families.Family, model: Any, check: Callable[[], None]) -> None:
        """A check of the model by libattn on each backend, which serves all its layers; their kinds are the family's."""
        for backend in BACKENDS:
            with self.subTest(backend=backend), torch.no_grad():
                integration.register(backend=backend)
                model.set_attn_implementation("libattn")
                try:
                    check()
                except libattn.UnsupportedError as refusal:
                    if backend is not None:
                        raise
                    self.skipTest(str(refusal))  # a GPU's kernels in float32
                rows = integration.table()
                self.assertEqual({row.kind for row in rows}, family.kinds)
                self.assertTrue(all(name.startswith(backend or "") for row in rows for name in (row.prefill, row.decode)))

    def decoder(self, family: families.Family) -> None:
        model, inputs = family.make().to(DEVICE), prompts()
        options = {"max_new_tokens": TOKENS, "do_sample": False}
        with torch.no_grad():
            expected, tokens = model(**inputs).logits, model.generate(**inputs, **options)
        self.assertGreater(float(expected.std()), 0.5)
        self.assertGreater(len(set(tokens[:, 40:].flatten().tolist())), 10, "the model repeats itself")

        def check() -> None:
            error = (model(**inputs).logits - expected)[inputs["attention_mask"].bool()].abs()
            self.assertLess(float(error.max()), BOUND)
            self.assertTrue(torch.equal(model.generate(**inputs, **options), tokens))

        self.hold(family, model, check)

    def cross(self, family: families.Family, make_inputs: Callable[[int], dict[str, torch.Tensor]]) -> None:
        model, inputs = family.make().to(DEVICE), there(make_inputs(3))
        start, ids = torch.full((3, 1), 1, device=DEVICE), torch.arange(2, 32, device=DEVICE).reshape(3, 10)
        options: dict[str, Any] = {"max_new_tokens": TOKENS, "do_sample": False, "num_beams": 1}
        if family.name == "whisper":
            options |= {"return_timestamps": False}
        with torch.no_grad():
            expected = model(**inputs, decoder_input_ids=ids).logits
            tokens = model.generate(**inputs, decoder_input_ids=start, **options)

        def check() -> None:
            self.assertLess(float((model(**inputs, decoder_input_ids=ids).logits - expected).abs().max()), BOUND)
            self.assertTrue(torch.equal(model.generate(**inputs, decoder_input_ids=start, **options), tokens))

        self.hold(family, model, check)

    def encoder(self, family: families.Family, make_inputs: Callable[[], dict[str, torch.Tensor]], output: str) -> None:
        model, inputs = family.make().to(DEVICE), there(make_inputs())
        real = inputs["attention_mask"].bool() if output == "last_hidden_state" and "attention_mask" in inputs else ...
        with torch.no_grad():
            expected = getattr(model(**inputs), output)
        self.hold(family, model, lambda: self.assertLess(
            float((getattr(model(**inputs), output) - expected)[real].abs().max()), BOUND))

    def test_half_precision(self) -> None:
        """No further from a float64 run than eager is, by half again; on a CPU some families in bfloat16."""
        inputs, some = prompts(), DEVICE.type == "cpu"
        real = inputs["attention_mask"].bool()

        def distance(model: Any, truth: torch.Tensor) -> float:
            return float((model(**inputs).logits[real].float() - truth).pow(2).mean().sqrt())

        for family in families.DECODERS:
            if some and family.name not in ("llama", "gemma2", "gpt-oss"):
                continue
            for dtype in (torch.bfloat16, torch.float16)[:1 if some else 2]:
                model = family.make(dtype=dtype).to(DEVICE)
                with torch.no_grad():
                    truth = family.make().to(DEVICE)(**inputs).logits[real]
                    eager = distance(model, truth)
                self.hold(family, model, lambda: self.assertLess(distance(model, truth), 1.5 * eager, (family.name, dtype)))


class Refused(unittest.TestCase):
    def test_bloom_has_no_hook(self) -> None:
        """BLOOM computes its attention itself: it is refused, not run with another implementation."""
        integration.register()
        values = {"vocab_size": 97, "hidden_size": 64, "n_layer": 1, "n_head": 4}
        with self.assertRaisesRegex(libattn.UnsupportedError, "BloomForCausalLM.*computes its attention itself"):
            transformers.BloomForCausalLM._from_config(transformers.BloomConfig(**values),
                                                       attn_implementation="libattn")
        model = transformers.BloomForCausalLM(transformers.BloomConfig(**values))
        with self.assertRaisesRegex(libattn.UnsupportedError, "BloomForCausalLM"):
            model.set_attn_implementation("libattn")

    def test_t5_has_a_bias(self) -> None:
        integration.register()
        config = transformers.T5Config(vocab_size=97, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=4)
        model = transformers.T5ForConditionalGeneration(config).eval()
        model.set_attn_implementation("libattn")
        with torch.no_grad(), self.assertRaisesRegex(libattn.UnsupportedError, "position_bias"):
            model(input_ids=torch.arange(5)[None], decoder_input_ids=torch.arange(3)[None])


def _add(check: Callable[..., None], family: families.Family, *given: Any) -> None:
    def test(self: Families) -> None:
        begin = time.perf_counter()
        check(self, family, *given)
        print(f"{time.perf_counter() - begin:.1f} s", end=" ")

    setattr(Families, f"test_{family.name.replace('-', '_')}", test)


for _family in families.DECODERS:
    _add(Families.decoder, _family)
for _entry in families.CROSS:
    _add(Families.cross, *_entry)
for _entry in families.ENCODERS:
    _add(Families.encoder, *_entry)
