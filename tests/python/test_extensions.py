# SPDX-License-Identifier: Apache-2.0
"""Gated-delta and MLA layers through the package: a state of a wrong dtype, and weights in fp8. Results: test_recurrent,
test_operators, and the engines' layers."""
import unittest

import torch

import libattn
from common import attention, bound_layer, causal, one_layer, peaked, planned
from libattn import extensions
from libattn.torch.weights import fp8_mla_weights


class GatedDelta(unittest.TestCase):
    HK, HV, DK, DV = 2, 4, 16, 24

    def test_wrong_state_is_named(self) -> None:
        desc = libattn.LayerDesc("gdn", self.HK, self.HK, self.DK, kind="recurrent", head_size_v=self.DV,
                                 gdn=libattn.GdnDesc(self.HK, self.HV, self.DK, self.DV, 0, False, True))
        _, layer = one_layer(desc)
        with self.assertRaisesRegex(libattn.InvalidArgumentError, "state.*f16.*f32"):
            layer.bind_state(torch.zeros(1, 2, 3, 4).half())

    def test_wrong_window_is_named(self) -> None:
        desc = libattn.LayerDesc("gdn", self.HK, self.HK, self.DK, kind="recurrent", head_size_v=self.DV, dtype="bf16",
                                 gdn=libattn.GdnDesc(self.HK, self.HV, self.DK, self.DV, 4, False, True))
        _, layer = one_layer(desc)
        state, window = torch.zeros(3, self.HV, self.DV, self.DK), torch.zeros(3, 2 * self.HK * self.DK + self.HV * self.DV, 3)
        layer.bind_state(state, window.bfloat16())
        with self.assertRaisesRegex(libattn.InvalidArgumentError, "view: .*f32.*; the layer's cache has bf16"):
            layer.bind_state(state, window)


class Latent(unittest.TestCase):
    def test_weights_in_fp8(self) -> None:
        """`fp8_mla_weights` of heads of very different sizes, through a prefill and a decode, to the precision of e4m3."""
        heads, nope, rope, rank, width, block = 4, 16, 8, 32, 24, 16
        generator = torch.Generator().manual_seed(3)
        desc = libattn.LayerDesc("mla", heads, 1, rank + rope, 0.0, "mla", head_size_v=width, block_size=block,
                                 mla=libattn.MlaDesc(rank, nope, rope, width, absorb_in_core=True, weight_dtype="fp8_e4m3"))
        sizes = torch.tensor([1.0, 8.0, 0.25, 3.0])[:, None, None]
        split = sizes * torch.randn(heads, nope + width, rank, generator=generator) * rank**-0.5
        latent, rotated = torch.randn(20, rank, generator=generator), peaked(20, rope, generator=generator)
        for backend in ("cpu_ref", "cpu_simd"):
            model, layer = bound_layer(desc, backend, 2, extensions=[fp8_mla_weights(split.reshape(-1, rank), heads, nope)])
            for first, length in ((0, 19), (19, 20)):
                count = length - first
                plan = planned(model, libattn.Batch([0, count], [length], [[0, 1]], list(range(first, length))))
                q_nope, q_pe = (peaked(count, heads, n, generator=generator) for n in (nope, rope))
                out = torch.empty(count, heads, width)
                plan.run(layer, None, None, None, out, extensions=[
                    extensions.mla_io(q_nope, q_pe, latent[first:length], rotated[first:length])])
                k, v = (torch.einsum("hdc,tc->thd", part, latent[:length]) for part in split.split([nope, width], 1))
                k = torch.cat([k, rotated[:length, None].expand(-1, heads, -1)], dim=-1)
                expected, _ = attention(torch.cat([q_nope, q_pe], dim=-1), k, v, (nope + rope)**-0.5, causal(count, length))
                error = (out - expected).norm(dim=(0, 2)) / expected.norm(dim=(0, 2))  # a number for each head
                self.assertLess(float(error.max()), 0.12, (backend, count))
                self.assertGreater(float(error.min()), 1e-3)  # quantized at all
