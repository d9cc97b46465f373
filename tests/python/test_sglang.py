# SPDX-License-Identifier: Apache-2.0
"""The SGLang adapter against SGLang's recorded interface. It did not run inside the engine."""
import types
import unittest
from typing import Any

import torch

import published
import libattn
import libattn.torch
from common import attention, causal, peaked, worst

registered: dict[str, Any] = {}
CHOICES = ["triton"]

RECORDED = published.install("sglang-0.5.23", {
    "sglang.srt.layers.attention.attention_registry": {
        "register_attention_backend": lambda name: lambda create: registered.update({name: create})},
    "sglang.srt.arg_groups.choices": {"ATTENTION_BACKEND_CHOICES": CHOICES}})

from libattn.integrations import sglang as adapter  # noqa: E402
from libattn.integrations.sglang.backend import LibattnBackend  # noqa: E402

MODES = RECORDED["modules"]["sglang.srt.model_executor.forward_batch_info"]
HQ, HK, D = 8, 2, 64


class Mode:
    """The questions of ForwardMode that a backend is asked."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __getattr__(self, question: str) -> Any:
        if question not in MODES["ForwardMode"]["methods"]:
            raise AttributeError(question)
        return lambda *_, **__: question == f"is_{self.name}"


class Pool:
    """A token pool: one row per slot, those of padding last."""

    def __init__(self, slots: int, page: int, dtype: torch.dtype = torch.float32) -> None:
        shape = (slots + page, HK, D)
        self.k, self.v = (torch.zeros(shape).to(dtype) if dtype.itemsize == 1 else
                          torch.full(shape, float("nan"), dtype=dtype) for _ in range(2))

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        return self.k

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        return self.v


def layer(**values: Any) -> Any:
    """A RadixAttention, with the defaults that are recorded."""
    found = RECORDED["modules"]["sglang.srt.layers.radix_attention"]["RadixAttention"]["methods"]["__init__"]
    assert {"sliding_window_size", "logit_cap", "is_cross_attention"} <= set(found.names())
    return types.SimpleNamespace(**{
        "tp_q_head_num": HQ, "tp_k_head_num": HK, "tp_v_head_num": HK, "qk_head_dim": D, "v_head_dim": D,
        "scaling": D**-0.5, "layer_id": 5, "logit_cap": 0.0, "sliding_window_size": -1, "is_cross_attention": False,
        "attn_type": "decoder", "xai_temperature_len": -1, "use_irope": False, "pos_encoding_mode": "NONE",
        "logit_capping_method": "tanh", "k_scale_float": None, "v_scale_float": None, **values})


class Interface(unittest.TestCase):
    def test_entry_point(self) -> None:
        adapter.register()
        adapter.register()
        self.assertEqual(CHOICES, ["triton", "libattn"])
        self.assertIn("libattn", registered)

    def test_every_call_of_the_engine_fits(self) -> None:
        base = RECORDED["modules"]["sglang.srt.layers.attention.base_attn_backend"]["AttentionBackend"]
        self.assertEqual(published.mismatches(LibattnBackend, base), [])
        raising = {"forward_extend", "forward_decode", "forward_mixed", "init_cuda_graph_state",
                   "get_cuda_graph_seq_len_fill_value"}
        self.assertEqual(raising - set(vars(LibattnBackend)), set())


class Steps(unittest.TestCase):
    def setUp(self) -> None:
        adapter.register()

    def run_steps(self, backend: str, page: int, pool: Pool | None = None, bound: float = 2e-5, window: int = 0,
                  chunk: int = 0, stored: Any = lambda x, scale: x, sinks: torch.Tensor | None = None, **values: Any) -> None:
        """Extend, mixed extend with prefixes, decode with a padding row; each element."""
        libattn.torch.configure(ignore_environment=True, backend=backend)
        generator = torch.Generator().manual_seed(5)
        pool = pool or Pool(16 * 16, page)
        table = torch.zeros(9, 64, dtype=torch.int32)
        indices = torch.tensor([7, 2, 4])
        blocks = torch.randperm(256 // page, generator=generator)
        for n, row in enumerate(indices.tolist()):
            mine = blocks[n * (64 // page):(n + 1) * (64 // page)]
            table[row] = (mine[:, None] * page + torch.arange(page)).flatten().int()
        runner = types.SimpleNamespace(req_to_token_pool=types.SimpleNamespace(req_to_token=table),
                                       token_to_kv_pool=pool, page_size=page, use_mla_backend=False,
                                       attention_chunk_size=chunk or None)
        engine = registered["libattn"](runner)
        k_all, v_all = (peaked(3, 64, HK, D, generator=generator) for _ in range(2))
        this = layer(sliding_window_size=window - 1 if window else -1, **values)
        lengths = [0, 0, 0]
        for mode, queries in (("extend", [6, 19, 1]), ("extend", [1, 8, 20]), ("decode", [1, 1, 1])):
            lengths = [a + b for a, b in zip(lengths, queries)]
            places = [range(length - n, length) for n, length in zip(queries, lengths)]
            loc = torch.cat([table[i, list(p)] for i, p in zip(indices.tolist(), places)]).long()
            batch = types.SimpleNamespace(
                forward_mode=Mode(mode), batch_size=3, req_pool_indices=indices, seq_lens=torch.tensor(lengths),
                seq_lens_cpu=torch.tensor(lengths), out_cache_loc=loc, spec_info=None, encoder_lens=None,
                extend_seq_lens=torch.tensor(queries), extend_seq_lens_cpu=list(queries))
            q = peaked(sum(queries), HQ * D, generator=generator)
            k, v = (torch.cat([t[r, list(p)] for r, p in enumerate(places)]) for t in (k_all, v_all))
            engine.init_forward_metadata(batch)
            forward = engine.forward_decode if mode == "decode" else engine.forward_extend
            out = forward(q, k.flatten(1), v.flatten(1), this, batch, save_kv_cache=True,
                          **({} if sinks is None else {"sinks": sinks}))
            self.assertEqual(tuple(out.shape), (sum(queries), HQ * D))
            at = 0
            for r, (n, length) in enumerate(zip(queries, lengths)):
                visible = causal(n, length, window)
                if chunk:
                    visible &= torch.arange(length - n, length)[:, None] // chunk == torch.arange(length) // chunk
                expected, _ = attention(q.view(-1, HQ, D)[at:at + n], stored(k_all[r, :length], 0.5),
                                        stored(v_all[r, :length], 0.25), D**-0.5, visible,
                                        values.get("logit_cap", 0.0), sinks)
                self.assertLess(worst(out.view(-1, HQ, D)[at:at + n], expected), bound, (backend, page, mode, r))
                at += n
        found = libattn.torch.table()[0]
        self.assertEqual((found.index, found.decode.split("@")[0]), (5, backend))

    def test_page_sizes(self) -> None:
        for backend in ("cpu_ref", "cpu_simd"):
            for page in (1, 16):
                self.run_steps(backend, page)

    def test_terms(self) -> None:
        for backend in ("cpu_ref", "cpu_simd"):
            self.run_steps(backend, 1, window=9)
            self.run_steps(backend, 16, logit_cap=4.0)
            for page in (1, 16):
                self.run_steps(backend, page, chunk=16, use_irope=True)
            self.run_steps(backend, 16, sinks=torch.linspace(-1, 4, HQ))

    def test_fp8_pool(self) -> None:
        for backend in ("cpu_ref", "cpu_simd"):
            self.run_steps(backend, 16, Pool(256, 16, torch.float8_e4m3fn), 1e-4, k_scale_float=0.5, v_scale_float=0.25,
                           stored=lambda x, scale: (x / scale).to(torch.float8_e4m3fn).float() * scale)

    def engine(self, **values: Any) -> LibattnBackend:
        return registered["libattn"](types.SimpleNamespace(**{
            "req_to_token_pool": types.SimpleNamespace(req_to_token=torch.zeros(1, 8).int()),
            "token_to_kv_pool": Pool(8, 1), "page_size": 1, "use_mla_backend": False, **values}))

    def test_refusals(self) -> None:
        with self.assertRaisesRegex(libattn.UnsupportedError, "use_mla_backend"):
            self.engine(use_mla_backend=True)
        with self.assertRaisesRegex(libattn.UnsupportedError, "hybrid pool"):
            self.engine(token_to_kv_pool=types.SimpleNamespace(swa_layer_nums=3))
        engine = self.engine()
        with self.assertRaisesRegex(libattn.UnsupportedError, "cuda_graph.*disable-cuda-graph"):
            engine.init_cuda_graph_state(max_bs=4, max_num_tokens=4)
        with self.assertRaisesRegex(libattn.UnsupportedError, "spec_info"):
            engine.init_forward_metadata(types.SimpleNamespace(forward_mode=Mode("extend"), spec_info=object()))
        engine.forward_metadata = object()  # type: ignore[assignment]
        for field, values in (("attn_type", {"attn_type": "decoder_bidirectional"}),
                              ("attn_type", {"is_cross_attention": True}),
                              ("sliding_window_size", {"attn_type": "encoder_only", "sliding_window_size": 4}),
                              ("pos_encoding_mode", {"pos_encoding_mode": "ALIBI"}),
                              ("xai_temperature_len", {"xai_temperature_len": 8}),
                              ("logit_capping_method", {"logit_cap": 3.0, "logit_capping_method": "clip"})):
            with self.assertRaisesRegex(libattn.UnsupportedError, f"{field}: "):
                engine.forward_decode(torch.zeros(1, HQ * D), None, None, layer(**values), None)
        engine.forward_metadata = None
        with self.assertRaises(libattn.OrderError):
            engine.forward_decode(torch.zeros(1, HQ * D), None, None, layer(), None)

    def test_idle(self) -> None:
        engine = self.engine()
        engine.init_forward_metadata(types.SimpleNamespace(forward_mode=Mode("idle")))
        self.assertIsNone(engine.forward_metadata)


if __name__ == "__main__":
    unittest.main()
