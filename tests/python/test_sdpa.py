# SPDX-License-Identifier: Apache-2.0
"""torch's scaled_dot_product_attention by libattn, against torch's math backend in float64."""
import unittest
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa

import libattn.torch
from common import each_backend, peaked, worst

try:
    from torch.nn.attention import activate_flash_attention_impl, restore_flash_attention_impl
except ImportError:  # before torch 2.11
    def activate_flash_attention_impl(name: str) -> None:
        libattn.torch.activate_sdpa()

    def restore_flash_attention_impl() -> None:
        libattn.torch.activate_sdpa().remove()


def inputs(batch: int, heads: int, kv_heads: int, queries: int, keys: int, size: int = 64, transposed: bool = True,
           dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(queries * keys + heads)
    shapes = ((heads, queries), (kv_heads, keys), (kv_heads, keys))
    return [peaked(batch, n, h, size, generator=generator).transpose(1, 2).to(dtype) if transposed else
            peaked(batch, h, n, size, generator=generator).to(dtype) for h, n in shapes]


def right(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        mask = options.pop("attn_mask", None)
        mask = mask if mask is None or mask.dtype == torch.bool else mask.double()
        return sdpa(q.double(), k.double(), v.double(), attn_mask=mask, **options)


class Sdpa(unittest.TestCase):
    def setUp(self) -> None:
        activate_flash_attention_impl("libattn")
        self.addCleanup(restore_flash_attention_impl)

    def check(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bound: float = 2e-5, **options: Any) -> None:
        for backend in each_backend():
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                out = sdpa(q, k, v, **options)
            self.assertLess(worst(out, right(q, k, v, **options)), bound, (backend, q.shape, k.shape, options))
            self.assertEqual({row.decode.split("@")[0] for row in libattn.torch.table()}, {backend})
            self.assertEqual(out.stride(), torch.empty_like(q).stride())

    def test_shapes(self) -> None:
        for transposed in (True, False):
            for causal in (False, True):
                for queries, keys in ((33, 33), (7, 40), (1, 40), (40, 7)):
                    with self.subTest(transposed=transposed, causal=causal, queries=queries, keys=keys):
                        self.check(*inputs(2, 4, 4, queries, keys, transposed=transposed), is_causal=causal)

    @unittest.skipUnless(hasattr(torch.nn.attention, "activate_flash_attention_impl"), "before 2.11 torch's own choice knows no groups")
    def test_groups_scale_and_dtypes(self) -> None:
        self.check(*inputs(2, 8, 2, 20, 20), is_causal=True, enable_gqa=True, scale=0.07)
        for dtype in (torch.bfloat16, torch.float16):
            self.check(*inputs(1, 4, 2, 20, 20, dtype=dtype), bound=0.06, is_causal=True, enable_gqa=True)

    def test_masks(self) -> None:
        q, k, v = inputs(3, 4, 4, 9, 21)
        padded = (torch.arange(21) < torch.tensor([21, 5, 13])[:, None])[:, None, None].expand(3, 1, 9, 21)
        self.check(q, k, v, attn_mask=padded)
        self.check(q, k, v, attn_mask=torch.zeros(3, 1, 9, 21).masked_fill(~padded, float("-inf")))
        self.check(q, k, v, attn_mask=torch.ones(9, 21, dtype=torch.bool).tril(12))
        q, k, v = inputs(2, 4, 4, 21, 9)
        self.check(q, k, v, attn_mask=(torch.arange(9) < torch.tensor([4, 9])[:, None])[:, None, None].expand(2, 1, 21, 9))

    def test_refused(self) -> None:
        libattn.torch.configure(ignore_environment=True)
        q, k, v = inputs(1, 2, 2, 8, 8)
        for options, field in (({"attn_mask": torch.rand(8, 8)}, "attention_mask"), ({"dropout_p": 0.1}, "dropout_p"),
                               ({"attn_mask": torch.rand(1, 2, 8, 8) > 0.5}, "attention_mask"),
                               ({"attn_mask": torch.rand(2, 8, 8) > 0.5}, "attention_mask")):
            with self.assertRaises(libattn.AttnError) as caught, sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, **options)
            self.assertEqual(caught.exception.field, field)
        q.requires_grad_()
        out = sdpa(q, k, v)  # a forward alone is no training
        with self.assertRaisesRegex(libattn.AttnError, "gradient"):
            out.sum().backward()

    def test_values_of_another_size(self) -> None:
        """As torch hands them to its fused operators for GPUs: more queries than keys, which are attended in two parts."""
        libattn.torch.configure(ignore_environment=True)
        q, k, v = inputs(1, 2, 2, 7, 3)
        for options in ({"is_causal": True}, {}):
            out, *_ = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v[..., :8], **options)
            self.assertLess(worst(out, right(q, k, v[..., :8], **options)), 2e-5, options)

    def test_compiled(self) -> None:
        libattn.torch.configure(ignore_environment=True, backend="cpu_ref")
        q, k, v = inputs(2, 4, 4, 16, 16)
        compiled = torch.compile(lambda q, k, v: sdpa(q * 2, k, v, is_causal=True) + 1, fullgraph=True, backend="aot_eager")
        with torch.no_grad():
            self.assertLess(worst(compiled(q, k, v) - 1, right(q * 2, k, v, is_causal=True)), 1e-4)
        self.assertEqual([row.prefill for row in libattn.torch.table()], ["cpu_ref"])

    def test_torchs_own_afterwards(self) -> None:
        libattn.torch.configure(ignore_environment=True)
        q, k, v = inputs(1, 2, 2, 8, 8)
        restore_flash_attention_impl()
        before = len(libattn.torch.table())
        self.assertLess(worst(sdpa(q, k, v), right(q, k, v)), 1e-5)
        self.assertEqual(len(libattn.torch.table()), before)
        activate_flash_attention_impl("libattn")


@unittest.skipUnless(torch.cuda.is_available(), "no GPU")
class Gpu(unittest.TestCase):
    def setUp(self) -> None:
        activate_flash_attention_impl("libattn")
        self.addCleanup(restore_flash_attention_impl)
        libattn.torch.configure(ignore_environment=True)

    def test_each_fused_operator(self) -> None:
        for fused in (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION):
            for queries, keys, causal in ((100, 100, True), (100, 100, False), (1, 300, False), (40, 300, False)):
                q, k, v = (t.cuda() for t in inputs(2, 4, 4, queries, keys, dtype=torch.bfloat16))
                with sdpa_kernel(fused):
                    out = sdpa(q, k, v, is_causal=causal)
                self.assertLess(worst(out, right(q, k, v, is_causal=causal)), 0.06, (fused, queries, keys, causal))
        self.assertEqual({row.prefill for row in libattn.torch.table()}, {"cuda_flash"})

    def test_float32_and_masks(self) -> None:
        q, k, v = (t.cuda() for t in inputs(3, 4, 4, 9, 21))
        padded = (torch.arange(21) < torch.tensor([21, 5, 13])[:, None])[:, None, None].expand(3, 1, 9, 21).cuda()
        for options in ({}, {"is_causal": True}, {"attn_mask": padded}):
            with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
                self.assertLess(worst(sdpa(q, k, v, **options), right(q, k, v, **options)), 1e-4, options)

    def test_compiled(self) -> None:
        q, k, v = (t.cuda() for t in inputs(2, 4, 4, 64, 64, dtype=torch.bfloat16))
        compiled = torch.compile(lambda q, k, v: sdpa(q, k, v, is_causal=True) + 1, fullgraph=True)
        with torch.no_grad():
            self.assertLess(worst(compiled(q, k, v) - 1, right(q, k, v, is_causal=True)), 0.1)
