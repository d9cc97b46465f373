# SPDX-License-Identifier: Apache-2.0
"""tools/exactness.py: what it measures on a small scale, with a model of random weights in place of a real one."""
import contextlib
import io
import pathlib
import sys
import unittest
from typing import Any
from unittest import mock

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import libattn
from common import BACKENDS

TOOL = pathlib.Path(__file__).parents[2] / "tools/exactness.py"
sys.path.insert(0, str(TOOL.parent))
import exactness  # noqa: E402

#: The most that the output may be off, relative to its root mean square; fewer bits, more.
ERRORS = {"f32": 1e-4, "bf16": 0.005, "f16": 0.001, "fp8_e4m3": 0.08, "fp8_e5m2": 0.15, "fp8_e4m3fnuz": 0.08,
          "fp8_per_token_head": 0.08, "int8_per_token_head": 0.015, "int4_per_token_head": 0.22, "int8_kv": 0.02,
          "int8_k": 0.015, "nvfp4": 0.22, "turboquant_k8v4": 0.15, "turboquant_4bit_nc": 0.15, "turboquant_k3v4_nc": 0.2,
          "turboquant_3bit_nc": 0.3, "q8_0": 0.015, "q4_0": 0.2, "fp8_e4m3+q": 0.12}


def maker(backend: str, kv_dtype: str) -> Any:
    runtime = libattn.Runtime(ignore_environment=True, backend=backend)
    return lambda **sizes: exactness.open_cache(runtime, "cpu", kv_dtype, "f32", **sizes)


class Exactness(unittest.TestCase):
    def test_needles(self) -> None:
        self.assertEqual(list(ERRORS), exactness.DTYPES)
        for backend in BACKENDS:
            found = {}
            for kv_dtype, most in ERRORS.items():
                try:
                    found[kv_dtype] = exactness.needles(maker(backend, kv_dtype), 1024, 32)
                except libattn.UnsupportedError:
                    self.assertEqual((backend, kv_dtype), ("cpu_simd", "fp8_e4m3fnuz"))
                    continue
                self.assertLess(found[kv_dtype]["error"], most, (backend, kv_dtype))
                self.assertGreater(found[kv_dtype]["needles"], 0.75, (backend, kv_dtype))
            for kv_dtype in ("f32", "bf16", "f16", "int8_per_token_head"):
                self.assertEqual(found[kv_dtype]["needles"], 1, (backend, kv_dtype))
            self.assertLess(found["bf16"]["error"], found["fp8_e4m3"]["error"] / 4)
            self.assertLess(found["fp8_e4m3"]["error"], found["int4_per_token_head"]["error"])

    def test_perplexity(self) -> None:
        torch.manual_seed(1)
        llama = LlamaForCausalLM(LlamaConfig(hidden_size=128, intermediate_size=128, num_hidden_layers=2, vocab_size=97,
                                             num_attention_heads=4, num_key_value_heads=2, initializer_range=0.3))
        tokens = torch.randint(0, 97, (70,))
        with torch.no_grad():
            logits = [llama.eval()(input_ids=w[None]).logits[0, :-1] for w in tokens[:64].split(32)]
        loss = torch.stack([torch.nn.functional.cross_entropy(x, w[1:]) for x, w in zip(logits, tokens.split(32))]).mean()
        model = exactness.Model(llama, tokens, 3, 32)
        self.assertEqual(len(model.windows), 2)  # whole ones
        plain, coarse = (model.perplexity(maker("cpu_ref", kv)) for kv in ("f32", "int4_per_token_head"))
        self.assertAlmostEqual(plain["perplexity"] / float(loss.exp()), 1, places=4)
        self.assertEqual(plain["same_token"], 1)
        self.assertNotAlmostEqual(coarse["perplexity"] / plain["perplexity"], 1, places=3)
        self.assertLess(coarse["same_token"], 1)

    def test_arguments(self) -> None:
        for arguments, text in ((["--dtypes", "bf16,int3"], "--dtypes: 'int3'; allowed are f32, bf16"),
                                (["--keys", "64"], "--keys: 64; 256 needles take 4096"),
                                (["--window", "1"], "--windows, --window: 2 of 1 tokens")):
            with mock.patch.object(sys, "argv", ["exactness.py", *arguments]), self.assertRaises(SystemExit) as ended, \
                    contextlib.redirect_stderr(io.StringIO()) as said:
                exactness.main()
            self.assertEqual(ended.exception.code, 2)
            self.assertIn(text, said.getvalue())
