# SPDX-License-Identifier: Apache-2.0
"""Model families through Transformers: logits as eager's in float32, and the same tokens."""
import time
import unittest
from typing import Any

import torch

import families
import libattn
import libattn.integrations.transformers as integration
from common import BACKENDS

torch.set_num_threads(1)
TOKENS = 64
#: Of logits with a standard deviation of about 1.5.
BOUND = 1e-4


def prompts() -> tuple[torch.Tensor, torch.Tensor]:
    """Three prompts of 15, 37 and 40 tokens, padded on the left."""
    ids = torch.randint(2, families.VOCABULARY, (3, 40), generator=torch.Generator().manual_seed(4))
    mask = (torch.arange(40)[None] >= torch.tensor([25, 3, 0])[:, None]).long()
    return ids * mask, mask


def kinds() -> set[str]:
    return {row.kind for row in integration.table()}


class Decoders(unittest.TestCase):
    def family(self, name: str) -> None:
        family = next(f for f in families.DECODERS if f.name == name)
        model = family.make()
        ids, mask = prompts()
        with torch.no_grad():
            expected = model(ids, attention_mask=mask).logits
            tokens = model.generate(ids, attention_mask=mask, max_new_tokens=TOKENS, do_sample=False)
        self.assertGreater(float(expected.std()), 0.5)
        self.assertGreater(len(set(tokens[:, 40:].flatten().tolist())), 10, "the model repeats itself")
        for backend in BACKENDS:
            with self.subTest(backend=backend), torch.no_grad():
                integration.register(backend=backend)
                model.set_attn_implementation("libattn")
                logits = model(ids, attention_mask=mask).logits
                self.assertLess(float((logits - expected)[mask.bool()].abs().max()), BOUND)
                again = model.generate(ids, attention_mask=mask, max_new_tokens=TOKENS, do_sample=False)
                self.assertTrue(torch.equal(again, tokens))
                self.assertEqual(kinds(), family.kinds)
                self.assertTrue(all(row.prefill.startswith(backend) and row.decode.startswith(backend)
                                    for row in integration.table()))

    def test_bfloat16(self) -> None:
        """Half precision: no further from a float64 run than eager is, by half again."""
        ids, mask = prompts()
        for name in ("llama", "gemma2", "gpt-oss"):
            family = next(f for f in families.DECODERS if f.name == name)
            with torch.no_grad():
                truth = family.make()(ids, attention_mask=mask).logits[mask.bool()]
                model = family.make(dtype=torch.bfloat16)
                eager = (model(ids, attention_mask=mask).logits[mask.bool()].float() - truth).pow(2).mean().sqrt()
                for backend in BACKENDS:
                    integration.register(backend=backend)
                    model.set_attn_implementation("libattn")
                    ours = (model(ids, attention_mask=mask).logits[mask.bool()].float() - truth).pow(2).mean().sqrt()
                    self.assertLess(float(ours), 1.5 * float(eager), (name, backend))

    def test_bloom_has_no_hook(self) -> None:
        """BLOOM computes its attention itself: it is refused, not run with another implementation."""
        import transformers
        integration.register()
        values = {"vocab_size": 97, "hidden_size": 64, "n_layer": 1, "n_head": 4}
        with self.assertRaisesRegex(libattn.UnsupportedError, "BloomForCausalLM.*computes its attention itself"):
            transformers.BloomForCausalLM._from_config(transformers.BloomConfig(**values),
                                                       attn_implementation="libattn")
        model = transformers.BloomForCausalLM(transformers.BloomConfig(**values))
        with self.assertRaisesRegex(libattn.UnsupportedError, "BloomForCausalLM"):
            model.set_attn_implementation("libattn")


class CrossModels(unittest.TestCase):
    def family(self, number: int) -> None:
        family, make_inputs = families.CROSS[number]
        model, inputs = family.make(), make_inputs(3)
        start = torch.full((3, 1), 1)
        options: dict[str, Any] = {"max_new_tokens": TOKENS, "do_sample": False, "num_beams": 1}
        if family.name == "whisper":
            options |= {"return_timestamps": False}
        with torch.no_grad():
            expected = model(**inputs, decoder_input_ids=torch.arange(30).reshape(3, 10) + 2).logits
            tokens = model.generate(**inputs, decoder_input_ids=start, **options)
        for backend in BACKENDS:
            with self.subTest(backend=backend), torch.no_grad():
                integration.register(backend=backend)
                model.set_attn_implementation("libattn")
                logits = model(**inputs, decoder_input_ids=torch.arange(30).reshape(3, 10) + 2).logits
                self.assertLess(float((logits - expected).abs().max()), BOUND)
                again = model.generate(**inputs, decoder_input_ids=start, **options)
                self.assertTrue(torch.equal(again, tokens))
                self.assertEqual(kinds(), family.kinds)

    def test_whisper(self) -> None:
        self.family(0)

    def test_bart(self) -> None:
        self.family(1)

    def test_t5_is_refused(self) -> None:
        import transformers
        integration.register()
        config = transformers.T5Config(vocab_size=97, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=4)
        model = transformers.T5ForConditionalGeneration(config).eval()
        model.set_attn_implementation("libattn")
        with torch.no_grad(), self.assertRaisesRegex(libattn.UnsupportedError, "position_bias"):
            model(input_ids=torch.arange(5)[None], decoder_input_ids=torch.arange(3)[None])


class Encoders(unittest.TestCase):
    def family(self, number: int) -> None:
        family, make_inputs, output = families.ENCODERS[number]
        model, inputs = family.make(), make_inputs()
        real = inputs["attention_mask"].bool() if output == "last_hidden_state" and "attention_mask" in inputs else ...
        with torch.no_grad():
            expected = getattr(model(**inputs), output)
        for backend in BACKENDS:
            with self.subTest(backend=backend), torch.no_grad():
                integration.register(backend=backend)
                model.set_attn_implementation("libattn")
                actual = getattr(model(**inputs), output)
                self.assertLess(float((actual - expected)[real].abs().max()), BOUND)
                self.assertEqual(kinds(), family.kinds)

    def test_vit(self) -> None:
        self.family(0)

    def test_clip(self) -> None:
        self.family(1)

    def test_modernbert(self) -> None:
        self.family(2)


def _add(family: families.Family) -> None:
    def test(self: Decoders) -> None:
        begin = time.perf_counter()
        self.family(family.name)
        print(f"{time.perf_counter() - begin:.1f} s", end=" ")

    setattr(Decoders, f"test_{family.name.replace('-', '_')}", test)


for _each in families.DECODERS:
    _add(_each)
