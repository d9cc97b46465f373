# SPDX-License-Identifier: Apache-2.0
"""Gated-delta and MLA layers through the package, held against their definitions."""
import unittest

import torch
import torch.nn.functional as functional

import libattn
from common import attention, causal, peaked, planned, worst
from libattn import extensions
from libattn.torch.weights import fp8_mla_weights

F64 = torch.float64


class GatedDelta(unittest.TestCase):
    HK, HV, DK, DV, WIDTH = 2, 4, 16, 24, 4

    def recurrence(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, a: torch.Tensor, b: torch.Tensor,
                   state: torch.Tensor) -> torch.Tensor:
        """One request; `state` [Hv, Dv, Dk] is moved on in place."""
        g = -torch.exp(self.a_log.to(F64)) * functional.softplus(a.to(F64) + self.dt_bias.to(F64))
        beta = torch.sigmoid(b.to(F64))
        q, k = (x.to(F64) * torch.rsqrt(x.to(F64).pow(2).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
        rows = []
        for t in range(len(q)):
            out = []
            for h in range(self.HV):
                key, query = k[t, h * self.HK // self.HV], q[t, h * self.HK // self.HV] * self.DK**-0.5
                state[h] *= torch.exp(g[t, h])
                rest = beta[t, h] * (v[t, h].to(F64) - state[h] @ key)
                state[h] += torch.outer(rest, key)
                out.append(state[h] @ query)
            rows.append(torch.stack(out))
        return torch.stack(rows)

    def run_backend(self, conv: bool) -> None:
        """Two requests of different lengths, then a decode step in place; the states too."""
        generator = torch.Generator().manual_seed(8)
        self.a_log, self.dt_bias = (torch.rand(self.HV, generator=generator) for _ in range(2))
        channels = 2 * self.HK * self.DK + self.HV * self.DV
        weight = torch.randn(channels, self.WIDTH, generator=generator) * 0.5
        desc = libattn.LayerDesc("gdn", self.HK, self.HK, self.DK, kind="recurrent", head_size_v=self.DV,
                                 gdn=libattn.GdnDesc(self.HK, self.HV, self.DK, self.DV, self.WIDTH if conv else 0,
                                                     conv, True))
        runtime = libattn.Runtime(ignore_environment=True)
        model = runtime.bind(runtime.select([desc]))
        layer = model.layers[0]
        state = torch.zeros(5, self.HV, self.DV, self.DK)
        window = torch.zeros(5, channels, self.WIDTH - 1) if conv else None
        layer.bind_state(state, window)
        layer.bind_params(extensions=[extensions.gdn_weights(self.a_log, self.dt_bias, weight if conv else None)])
        slots = torch.tensor([3, 1], dtype=torch.int32)
        states = torch.zeros(2, self.HV, self.DV, self.DK, dtype=F64)
        before: list[torch.Tensor] = [torch.zeros(self.WIDTH - 1, channels) for _ in range(2)]
        lengths = [0, 0]
        for queries in ([9, 70], [1, 1]):
            lengths = [n + m for n, m in zip(lengths, queries)]
            starts = [0, queries[0], sum(queries)]
            mixed = torch.randn(sum(queries), channels, generator=generator)
            a, b = (torch.randn(sum(queries), self.HV, generator=generator) for _ in range(2))
            batch = libattn.Batch(starts, lengths, extensions=[extensions.gdn_batch(slots)])
            plan = planned(model, batch)
            out = torch.empty(sum(queries), self.HV, self.DV)
            parts = mixed.split([self.HK * self.DK, self.HK * self.DK, self.HV * self.DV], dim=1)
            shaped = [p.reshape(len(mixed), -1, d) for p, d in zip(parts, (self.DK, self.DK, self.DV))]
            plan.run(layer, *([None] * 3 if conv else shaped), out,
                     extensions=[extensions.gdn_io(a, b, mixed if conv else None)])
            for r in range(2):
                rows = slice(starts[r], starts[r + 1])
                x = mixed[rows]
                if conv:
                    whole = torch.cat([before[r], x])
                    before[r] = whole[-(self.WIDTH - 1):]
                    x = functional.silu(functional.conv1d(whole.T[None].to(F64), weight[:, None].to(F64),
                                                          groups=channels)[0].T)
                q, k, v = (p.reshape(len(x), -1, d) for p, d in zip(
                    x.split([self.HK * self.DK, self.HK * self.DK, self.HV * self.DV], dim=1),
                    (self.DK, self.DK, self.DV)))
                expected = self.recurrence(q, k, v, a[rows], b[rows], states[r])
                self.assertLess(worst(out[rows], expected), 1e-4, (queries, r))
                self.assertLess(float((state[slots[r]] - states[r]).abs().max()), 1e-4)
        self.assertEqual(float(state[[0, 2, 4]].abs().max()), 0.0)

    def test_without_convolution(self) -> None:
        self.run_backend(False)

    def test_with_convolution(self) -> None:
        self.run_backend(True)

    def test_wrong_state_is_named(self) -> None:
        desc = libattn.LayerDesc("gdn", self.HK, self.HK, self.DK, kind="recurrent", head_size_v=self.DV,
                                 gdn=libattn.GdnDesc(self.HK, self.HV, self.DK, self.DV, 0, False, True))
        runtime = libattn.Runtime(ignore_environment=True)
        layer = runtime.bind(runtime.select([desc])).layers[0]
        with self.assertRaisesRegex(libattn.InvalidArgumentError, "state.*f16.*f32"):
            layer.bind_state(torch.zeros(1, 2, 3, 4).half())


class Latent(unittest.TestCase):
    def test_absorbed_decode_and_prefill(self) -> None:
        """Two requests prefilled, then a step each: as plain attention over projected keys."""
        heads, nope, rope, rank, width, block = 4, 16, 8, 32, 24, 16
        generator = torch.Generator().manual_seed(3)
        scale = (nope + rope)**-0.5
        desc = libattn.LayerDesc("mla", heads, 1, rank + rope, scale, "mla", head_size_v=width, block_size=block,
                                 mla=libattn.MlaDesc(rank, nope, rope, width, absorb_in_core=True, weight_dtype="f32"))
        runtime = libattn.Runtime(ignore_environment=True)
        model = runtime.bind(runtime.select([desc], backend="cpu_ref"))
        layer = model.layers[0]
        layer.bind_kv(libattn.allocate(8 * layer.kv_spec.padded_page_bytes), 8)
        projection = torch.randn(heads * (nope + width), rank, generator=generator) * rank**-0.5
        layer.bind_params(extensions=[extensions.mla_weights(projection)])
        split = projection.view(heads, nope + width, rank).double()
        tables = [[5, 2], [7, 0]]
        latent = [torch.randn(32, rank, generator=generator) for _ in range(2)]
        rotated = [peaked(32, rope, generator=generator) for _ in range(2)]
        lengths = [0, 0]
        for queries in ([20, 7], [1, 1]):
            lengths = [n + m for n, m in zip(lengths, queries)]
            starts = [0, queries[0], sum(queries)]
            places = [range(n - m, n) for n, m in zip(lengths, queries)]
            slots = [tables[r][p // block] * block + p % block for r in range(2) for p in places[r]]
            plan = planned(model, libattn.Batch(starts, lengths, tables, slots))
            q_nope = peaked(sum(queries), heads, nope, generator=generator)
            q_pe = peaked(sum(queries), heads, rope, generator=generator)
            new = [torch.cat([t[r][list(p)] for r, p in enumerate(places)]) for t in (latent, rotated)]
            out = torch.empty(sum(queries), heads, width)
            plan.run(layer, None, None, None, out, extensions=[extensions.mla_io(q_nope, q_pe, *new)])
            for r in range(2):
                rows, length = slice(starts[r], starts[r + 1]), lengths[r]
                c = latent[r][:length].double()
                k = torch.einsum("hdc,tc->thd", split[:, :nope], c)
                v = torch.einsum("hdc,tc->thd", split[:, nope:], c)
                k = torch.cat([k, rotated[r][:length, None].double().expand(-1, heads, -1)], dim=-1)
                q = torch.cat([q_nope, q_pe], dim=-1)[rows]
                expected, _ = attention(q, k, v, scale, causal(queries[r], length))
                self.assertLess(worst(out[rows], expected), 1e-4, (queries, r))

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
            runtime = libattn.Runtime(ignore_environment=True)
            model = runtime.bind(runtime.select([desc], backend=backend))
            layer = model.layers[0]
            layer.bind_kv(libattn.allocate(2 * layer.kv_spec.padded_page_bytes), 2)
            layer.bind_params(extensions=[fp8_mla_weights(split.reshape(-1, rank), heads, nope)])
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
                error = (out - expected).norm(dim=(0, 2)) / expected.norm(dim=(0, 2))  # of each head
                self.assertLess(float(error.max()), 0.12, (backend, count))
                self.assertGreater(float(error.min()), 1e-3)  # quantized at all


if __name__ == "__main__":
    unittest.main()
