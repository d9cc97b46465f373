# SPDX-License-Identifier: Apache-2.0
"""Recurrent states of 16 bits rounded by a seed (``attn_recurrent_rounding``): every code against Philox and the rule as they are
published and documented, over states that float32 holds exactly; and that rounding has no bias."""
from __future__ import annotations

import unittest

import numpy as np
import torch

import libattn
from common import one_layer, planned
from libattn import extensions

HK, HV, DK, DV, SLOTS, SEED = 2, 4, 24, 16, 9, 0x89ABCDEF_01234567
DTYPES = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32}
BACKENDS = ("cpu_ref", "cpu_simd")
#: Nothing decays and nothing is read: S + v k^T.
SUM = libattn.RecurrentRule("additive", gate="constant", write_gate="none")


def philox(counter: list[np.ndarray], key: tuple[int, int], rounds: int) -> list[np.ndarray]:
    """Philox4x32 (Salmon et al., Parallel random numbers: as easy as 1, 2, 3)."""
    c, low = [np.asarray(x, dtype=np.uint64) for x in counter], np.uint64(0xFFFFFFFF)
    for i in range(rounds):
        left, right = (np.uint64((k + i * w) % 2**32) for k, w in zip(key, (0x9E3779B9, 0xBB67AE85)))
        a, b = np.uint64(0xD2511F53) * c[0], np.uint64(0xCD9E8D57) * c[2]
        c = [b >> np.uint64(32) ^ c[1] ^ left, b & low, a >> np.uint64(32) ^ c[3] ^ right, a & low]
    return c


def random_bits(tokens: int, rounds: int) -> np.ndarray:
    """r of a state after so many tokens: [HV, DV, DK]."""
    row, column = np.meshgrid(np.arange(HV * DV), np.arange(DK), indexing="ij")
    words = np.stack(philox([column // 8, row, np.full_like(row, tokens), 0 * row], (SEED % 2**32, SEED >> 32), rounds))
    word = np.take_along_axis(words, (column % 8 // 2)[None], 0)[0]
    return ((word >> (16 * (column % 2)).astype(np.uint64)) % np.uint64(2**16)).astype(np.int64).reshape(HV, DV, DK)


def rounded(x: np.ndarray, r: np.ndarray, dtype: str) -> torch.Tensor:
    """float64 to a dtype of 16 bits."""
    bits, least, largest = (10, -14, 65504.0) if dtype == "f16" else (7, -126, float(torch.finfo(torch.bfloat16).max))
    nearest = torch.from_numpy(x).to(DTYPES[dtype])
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        unit = np.exp2(np.maximum(np.frexp(x)[1] - 1, least) - bits)
        below = np.floor(np.abs(x) / unit)
        up = np.floor((np.abs(x) / unit - below) * 2**16) + r >= 2**16
        found = torch.from_numpy(np.copysign((below + up) * unit, x)).to(DTYPES[dtype])
        return torch.where(torch.from_numpy(np.abs(x) <= largest), found, nearest)


class Layer:
    """A layer over states in slots."""

    def __init__(self, backend: str, dtype: str, rounds: int = 0, interval: int = 0) -> None:
        gdn = libattn.GdnDesc(HK, HV, DK, DV, state_dtype=dtype, checkpoint_interval=interval)
        desc = libattn.LayerDesc("layer", HK, HK, DK, 1.0, "recurrent", "f32", head_size_v=DV, gdn=gdn, rule=SUM,
                                 rounding=libattn.RecurrentRounding(SEED, rounds))
        self.model, self.layer = one_layer(desc, backend, validate=True)
        self.state = torch.zeros(SLOTS, HV, DV, DK, dtype=DTYPES[dtype])
        self.layer.bind_state(self.state, None)
        self.layer.bind_params(extensions=[extensions.gdn_weights(torch.full((HV,), -200.0), None)])

    def step(self, slots: list[int], lengths: list[int], tokens: list[tuple[torch.Tensor, torch.Tensor]],
             kept: list[list[int]] | None = None) -> None:
        """Tokens are k [T, HK, DK] and v [T, HV, DV] of each request."""
        k, v = (torch.cat([each[i] for each in tokens]) for i in range(2))
        starts = [0, *np.cumsum([len(each[0]) for each in tokens]).tolist()]
        batch = libattn.Batch(starts, lengths, extensions=[extensions.gdn_batch(
            torch.tensor(slots, dtype=torch.int32), checkpoint_slots=torch.tensor(kept, dtype=torch.int32) if kept else None)])
        planned(self.model, batch).run(self.layer, k.clone(), k, v, torch.empty(len(v), HV, DV), extensions=[extensions.gdn_io(None, None)])


def exact(count: int, seed: int, scales: tuple[float, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens whose sums float32 holds: signs, and integers of a scale of each head."""
    draw = torch.Generator().manual_seed(seed)
    k = torch.randint(0, 2, (count, HK, DK), generator=draw) * 2.0 - 1
    return k, torch.randint(-127, 128, (count, HV, DV), generator=draw) * torch.tensor(scales)[:, None]


def added(state: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> np.ndarray:
    """The state after all tokens."""
    with np.errstate(invalid="ignore"):
        return np.asarray(state.double().numpy() + np.einsum("thd,thk->hdk", v.double().numpy(),
                                                             k.repeat_interleave(HV // HK, 1).double().numpy()))


class Rounding(unittest.TestCase):
    #: Common numbers; those of which f16 has no normal ones; small steps of it; its largest.
    SCALES = (2.0**-12, 2.0**-30, 2.0**-20, 2.0**9)

    def test_philox(self) -> None:
        """Random123's known answers."""
        pi, key = [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344], (0xA4093822, 0x299F31D0)
        for counter, k, rounds, words in (([0] * 4, (0, 0), 10, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
                                          ([0xFFFFFFFF] * 4, (0xFFFFFFFF,) * 2, 10, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
                                          (pi, key, 10, "d16cfe09 94fdcceb 5001e420 24126ea1"),
                                          ([0] * 4, (0, 0), 7, "5f6fb709 0d893f64 4f121f81 4f730a48")):
            self.assertEqual(" ".join(f"{int(x):08x}" for x in philox(list(map(np.uint64, counter)), k, rounds)), words)

    def test_steps(self) -> None:
        """Bit by bit, over many steps, among other requests and in whatever slot: prompts, pieces of them, single tokens."""
        for backend in BACKENDS:
            for dtype, rounds in (("f16", 0), ("bf16", 0), ("f16", 7), ("bf16", 1)):
                layer = Layer(backend, dtype, rounds)
                wanted, length = torch.zeros(HV, DV, DK, dtype=DTYPES[dtype]), 0
                for i, count in enumerate((5, 1, 1, 70, 1, 3, 1, 1)):
                    k, v = exact(count, i, self.SCALES)
                    length += count
                    wanted = rounded(added(wanted, k, v), random_bits(length, rounds or 10), dtype)
                    others = [exact(1, 100 + i, self.SCALES), exact(2, 200 + i, self.SCALES)]
                    mine, order = (3 + i % 2), i % 3  # its slot and its place in the batch
                    layer.state[mine] = layer.state[3 + (i + 1) % 2]
                    requests = others[:order] + [(k, v)] + others[order:]
                    slots, lengths = [0, 1], [50 + i, 9 + 2 * i]
                    layer.step(slots[:order] + [mine] + slots[order:], lengths[:order] + [length] + lengths[order:], requests)
                    torch.testing.assert_close(layer.state[mine].view(torch.int16), wanted.view(torch.int16), rtol=0, atol=0,
                                               msg=lambda text: f"{backend} {dtype} {rounds}, step {i}: {text}")  # noqa: B023

    def test_beyond_the_largest(self) -> None:
        """To nearest: a finite number becomes no infinity by chance; infinities and NaN stay."""
        for backend in BACKENDS:
            layer = Layer(backend, "f16")
            layer.state[2, :, :, 0], layer.state[2, :, :, 1] = float("inf"), float("nan")
            v = torch.tensor([65504.0, 65519.0, 65520.0, -65503.5])[None, :, None].expand(1, HV, DV).contiguous()
            layer.step([2], [6], [(torch.ones(1, HK, DK), v)])
            state = layer.state[2].float()
            self.assertTrue(bool(torch.isinf(state[..., 0]).all()) and bool(torch.isnan(state[..., 1]).all()))
            self.assertEqual([state[h, :, 2:].unique().tolist() for h in range(3)], [[65504.0], [65504.0], [float("inf")]])
            self.assertTrue(set(state[3, :, 2:].unique().tolist()) == {-65504.0, -65472.0})

    def test_checkpoints(self) -> None:
        """A checkpoint is rounded as the state would be there, and the walk goes on from it."""
        for backend in BACKENDS:
            whole, cut = Layer(backend, "bf16", interval=16), Layer(backend, "bf16", interval=16)
            k, v = exact(40, 7, self.SCALES)
            whole.step([0], [40], [(k, v)], [[1, 2]])
            for begin, end, slot in ((0, 16, 1), (16, 32, 2), (32, 40, -1)):
                cut.step([0], [end], [(k[begin:end], v[begin:end])], [[slot]])
            self.assertTrue(torch.equal(whole.state, cut.state))

    def test_no_bias(self) -> None:
        """A third of a unit above a number is rounded up a third of the times, at each place over the steps."""
        for backend in BACKENDS:
            for dtype, unit in (("f16", 2.0**-10), ("bf16", 2.0**-7)):
                layer = Layer(backend, dtype)
                ups = torch.zeros(HV, DV, DK)
                for n in range(1, 301):
                    layer.state.zero_()
                    layer.step([0], [n], [(torch.ones(1, HK, DK), torch.full((1, HV, DV), 1 + unit / 3))])
                    ups += layer.state[0] > 1
                deviation = (2 / 9 / 300) ** 0.5
                self.assertLess(abs(float(ups.mean()) / 300 - 1 / 3), 5 * deviation / ups.numel() ** 0.5)
                self.assertLess(float((ups / 300 - 1 / 3).abs().max()), 5.5 * deviation)

    def test_refusals(self) -> None:
        with self.assertRaisesRegex(libattn.AttnError, "attn_recurrent_rounding.*state_dtype is f32"):
            Layer("cpu_ref", "f32")
        layer = Layer("cpu_ref", "f16")
        states = extensions.gdn_batch(torch.tensor([0], dtype=torch.int32), has_initial_state=torch.tensor([0], dtype=torch.uint8))
        with self.assertRaisesRegex(libattn.AttnError, "seq_lens.*attn_recurrent_rounding needs the requests' lengths"):
            planned(layer.model, libattn.Batch([0, 1], None, max_seq_len=1, extensions=[states]))


if __name__ == "__main__":
    unittest.main()
