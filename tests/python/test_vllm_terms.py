# SPDX-License-Identifier: Apache-2.0
"""What vLLM's operators switch on, through the adapter: batch invariance, cascades, quantized caches and queries, value
sizes, and the releases that are served."""
import dataclasses
import os
import re
import subprocess
import sys
import tempfile
import types
import unittest
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import published
import libattn
import libattn.torch
import test_vllm as recorded
from common import attention, causal, each_backend, peaked, worst, worst_of
from libattn.integrations.vllm import describe, versions
from libattn.integrations.vllm.backend import LibattnBackend, LibattnMetadataBuilder
from libattn.integrations.vllm.layers import LatentImpl, LibattnImpl
from libattn.integrations.vllm.vision import LibattnTowerAttention
from libattn.torch.store import store
from test_vllm import BLOCK, D, HK, HQ, metadata

import vllm.envs  # a stand-in, as all of vLLM here
import vllm.version
from vllm.v1.attention.backends.registry import AttentionBackendEnum


class Settings(unittest.TestCase):
    def setUp(self) -> None:
        self.addCleanup(recorded.current.__setitem__, 0, None)
        libattn.torch.configure(ignore_environment=True)

    def config(self, **values: Any) -> Any:
        """vLLM's configuration, current from here on."""
        recorded.current[0] = types.SimpleNamespace(**values)
        return recorded.current[0]

    def layer(self, **values: Any) -> Any:
        return types.SimpleNamespace(layer_name="model.layers.0.attn", _k_scale_float=0.5, _v_scale_float=0.25,
                                     _q_scale_float=0.125, **values)

    def builder(self, config: Any = None) -> LibattnMetadataBuilder:
        return LibattnMetadataBuilder(types.SimpleNamespace(block_size=BLOCK), ["model.layers.0.attn"], config,
                                      torch.device("cpu"))


class BatchInvariance(Settings):
    """As vLLM tests it: the bits of one request, alone and among others."""

    def outputs(self, latent: bool, others: int, chunks: list[int]) -> torch.Tensor:
        """Rows of a request of 600 tokens that is read in chunks and then decodes three, with so many decodes before it."""
        generator = torch.Generator().manual_seed(3)
        heads, length = HQ, 603
        need = [torch.randn(length, *shape, generator=generator) for shape in (
            [(heads, 24), (32,), (1, 8)] if latent else [(heads, D), (HK, D), (HK, D)])]
        weight = torch.randn(heads * (16 + 24), 32, generator=generator) * 0.2
        if latent:
            impl: Any = LatentImpl(heads, 40, 24**-0.5, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8,
                                   v_head_dim=24, kv_b_proj=types.SimpleNamespace(prefix="model.layers.0"))
            impl.projection = weight
            cache = torch.zeros(1000, BLOCK, 40)
        else:
            impl, cache = LibattnImpl(HQ, D, D**-0.5, HK), torch.zeros(1000, HK, BLOCK, 2 * D)
        tables = torch.randperm(1000, generator=generator).reshape(5, 200).int()
        builder, layer, rows, done = self.builder(), self.layer(), [], 0
        for count in (*chunks, 1, 1, 1):
            queries, lengths = [1] * others + [count], [3000 + i for i in range(others)] + [done + count]
            m = builder.build(0, metadata(queries, lengths, torch.cat([tables[1:others + 1], tables[:1]])))
            new = [torch.cat([torch.randn(others, *t.shape[1:], generator=generator), t[done:done + count]]) for t in need]
            out = torch.empty(others + count, heads * (24 if latent else D))
            if latent:
                impl.forward_mha(*new, cache, m, torch.ones(1), out)
            else:
                impl.forward(layer, *new, cache, m, out)
            rows.append(out[others:])
            done += count
        return torch.cat(rows)

    def test_the_bits_of_a_request(self) -> None:
        for latent in (False, True):
            for prefix_caching in (False, True):
                with mock.patch.object(vllm.envs, "VLLM_BATCH_INVARIANT", True):
                    libattn.torch.configure(ignore_environment=True, num_threads=4)
                    self.config(cache_config=types.SimpleNamespace(enable_prefix_caching=prefix_caching))
                    self.assertEqual(describe.invariance(), 2 if prefix_caching else 1)
                    alone = self.outputs(latent, 0, [600])
                    for others, chunks in ((4, [600]), (1, [600]), *(((4, [256, 344]), (0, [17, 583])) if prefix_caching
                                                                     else ())):
                        self.assertTrue(torch.equal(self.outputs(latent, others, chunks), alone),
                                        (latent, prefix_caching, others, chunks))

    def test_it_is_asked(self) -> None:
        """Without it the same steps give other bits, so the test above can fail; and it reaches the layer's description."""
        libattn.torch.configure(ignore_environment=True, num_threads=4)
        self.assertFalse(torch.equal(self.outputs(False, 4, [600]), self.outputs(False, 0, [600])))
        self.config(scheduler_config=types.SimpleNamespace(enable_chunked_prefill=True))
        with mock.patch.object(vllm.envs, "VLLM_BATCH_INVARIANT", True):
            self.assertEqual(LibattnImpl(HQ, D, 0.1, HK)._describe(self.layer(), torch.float32, 16).batch_invariant, 2)
            self.assertTrue(LibattnBackend.supports_batch_invariance())

    def test_refused_by_name(self) -> None:
        """Where a backend has one level and not the other."""
        self.config(cache_config=types.SimpleNamespace(enable_prefix_caching=True))
        with mock.patch.object(describe, "layer", wraps=describe.layer) as asked:
            LibattnBackend.validate_configuration(head_size=64, dtype=torch.float32, use_batch_invariant=True)
        self.assertEqual(asked.call_args.kwargs["batch_invariant"], 2)

    def test_norms(self) -> None:
        """A warning where vLLM's own norms depend on the batch, and only there."""
        def warnings(release: str, ops: list[str], first: str, asked: bool = True) -> int:
            versions._warn.cache_clear()
            priority = types.SimpleNamespace(fused_add_rms_norm=[first, "native"])
            self.config(compilation_config=types.SimpleNamespace(custom_ops=ops),
                        kernel_config=types.SimpleNamespace(ir_op_priority=priority))
            with mock.patch.object(vllm.version, "__version__", release), self.assertLogs("libattn", "WARNING") as log:
                versions.logging.getLogger("libattn").warning("something, which assertLogs needs")
                for _ in range(2):
                    LibattnBackend.validate_configuration(head_size=64, dtype=torch.float32, use_batch_invariant=asked)
            return sum("-rms_norm" in line and "vllm#48271" in line for line in log.output)

        self.assertEqual([warnings("0.26.0", ["all"], "native"), warnings("0.26.0", ["-rms_norm", "all"], "vllm_c"),
                          warnings("0.26.0", ["none", "+rms_norm"], "native")], [1, 1, 1])
        self.assertEqual([warnings("0.26.0", ["-rms_norm", "all"], "native"), warnings("0.26.0", ["none"], "native"),
                          warnings("0.26.0", ["all"], "native", False), warnings("0.33.0", ["all"], "vllm_c")], [0, 0, 0, 0])


class Cascade(Settings):
    """Keys that all requests have in common."""

    REQUESTS, PREFIX = 16, 512

    def run_batch(self, tables: torch.Tensor, lengths: list[int], given: int, cache: torch.Tensor, q: torch.Tensor) -> Any:
        m = self.builder().build(given, metadata([1] * len(lengths), lengths, tables))
        out = torch.empty(len(lengths), HQ * D)
        LibattnImpl(HQ, D, D**-0.5, HK, kv_sharing_target_layer_name="another").forward(
            self.layer(), q, None, None, cache, m, out)
        return m.common_prefix_len, out.view(-1, HQ, D)

    def test_the_prefix_is_attended_once(self) -> None:
        """A common prefix is attended once, by the first request's table: those of later requests may be wrong there."""
        generator = torch.Generator().manual_seed(5)
        prefix = self.PREFIX // BLOCK
        tables = torch.arange(prefix).int().expand(self.REQUESTS, -1)
        tables = torch.cat([tables, prefix + torch.arange(2 * self.REQUESTS).int().reshape(-1, 2)], 1)
        cache = peaked(prefix + 2 * self.REQUESTS, HK, BLOCK, 2 * D, generator=generator)
        lengths = [self.PREFIX + 1 + r for r in range(self.REQUESTS)]
        q = peaked(self.REQUESTS, HQ, D, generator=generator)
        wrong = tables.clone()
        wrong[1:, :prefix] = prefix + 2 * self.REQUESTS - 1
        for backend in each_backend(num_threads=1):
            for table, given in ((tables, 0), (wrong, self.PREFIX)):  # found in the tables; said by vLLM 0.26
                known, out = self.run_batch(table, lengths, given, cache, q)
                self.assertEqual(known, self.PREFIX)
                for r, n in enumerate(lengths):
                    k, v = cache[tables[r]].transpose(1, 2).reshape(-1, HK, 2 * D)[:n].split(D, -1)
                    expected, _ = attention(q[r:r + 1], k, v, D**-0.5, causal(1, n))
                    self.assertLess(worst(out[r:r + 1], expected), 2e-5, (backend, given, r))

    def test_what_is_no_prefix(self) -> None:
        builder = self.builder()
        tables = torch.zeros(8, 40).int()
        tables[3, 20] = 1
        for requests, length, expected in ((8, 640, 320), (7, 640, 0), (8, 200, 0)):
            m = builder.build(0, metadata([1] * requests, [length] * requests, tables[:requests]))
            self.assertEqual(m.common_prefix_len, expected)
        tables[5, 0] = 1
        self.assertEqual(builder.build(0, metadata([1] * 8, [640] * 8, tables)).common_prefix_len, 0)
        asked = {"num_query_heads": 8, "num_kv_heads": 2, "use_alibi": False, "use_sliding_window": False,
                 "use_local_attention": False, "num_sms": 1, "dcp_world_size": 1, "query_lens": [1] * 8}
        self.assertTrue(builder.use_cascade_attention(common_prefix_len=256, **asked))
        self.assertFalse(builder.use_cascade_attention(common_prefix_len=240, **asked))
        self.assertFalse(builder.use_cascade_attention(common_prefix_len=256, **asked | {"use_alibi": True}))

    def test_drafts_look_for_no_prefix(self) -> None:
        """What vLLM's own `build_for_drafting` calls: the batch is not looked through."""
        tables = torch.cat([torch.arange(20).int().expand(8, -1), 20 + torch.arange(8).int()[:, None]], 1)
        batch = metadata([1] * 8, [321] * 8, tables)
        for fast in (False, True):
            self.assertEqual(self.builder().build(0, batch, fast_build=fast).common_prefix_len, 0 if fast else 320)


class Caches(Settings):
    def run_steps(self, backend: str, dtype: str, cache: torch.Tensor, size: int, size_v: int, bound: float,
                  query_dtype: torch.dtype | None = None, **values: Any) -> None:
        """A prefill and a mixed step against attention over the given keys; a row's error, since codes are coarse."""
        libattn.torch.configure(ignore_environment=True, backend=backend)
        generator = torch.Generator().manual_seed(9)
        impl, layer = LibattnImpl(HQ, size, size**-0.5, HK, kv_cache_dtype=dtype), self.layer(head_size_v=size_v)
        layer.__dict__.update(values)
        tables = torch.randperm(len(cache), generator=generator)[:8].reshape(2, 4).int()
        keys = torch.randn(2, 64, HK, size, generator=generator)
        rows = torch.randn(2, 64, HK, size_v, generator=generator)
        for queries, lengths in (([20, 33], [20, 33]), ([1, 7], [21, 40])):
            q = torch.randn(sum(queries), HQ, size, generator=generator)
            k, v = (torch.cat([t[r, n - c:n] for r, (c, n) in enumerate(zip(queries, lengths))]) for t in (keys, rows))
            out = torch.empty(len(q), HQ * size_v)
            given = q if query_dtype is None else (q / layer._q_scale_float).to(query_dtype)
            impl.forward(layer, given, k, v, cache, self.builder().build(0, metadata(queries, lengths, tables)), out)
            exact = q if query_dtype is None else given.float() * layer._q_scale_float
            error = worst_of(out.view(-1, HQ, size_v), exact, keys, rows, queries, lengths, size**-0.5,
                             error=lambda found, wanted: float((found - wanted).norm() / wanted.norm()))
            self.assertLess(error, bound, (backend, dtype))

    def cache(self, dtype: str, size: int, size_v: int, heads_first: bool) -> torch.Tensor:
        """As vLLM allocates it, of a spec that the adapter has customised."""
        length = versions.CacheLayout.customize_spec(Spec(
            size, size_v, types.SimpleNamespace(name=dtype.upper()))).state_content_bytes
        shape = (12, HK, BLOCK, length) if heads_first else (12, BLOCK, HK, length)
        made = torch.full(shape, -1, dtype=torch.int8 if dtype == "int8_per_token_head" else torch.uint8)
        return made if heads_first else made.transpose(1, 2)

    def test_quantized_caches(self) -> None:
        """Each is served where vLLM's pages hold its rows, to the precision of its codes."""
        for dtype, bound in (("fp8_per_token_head", 0.04), ("int8_per_token_head", 0.02), ("int4_per_token_head", 0.2),
                             ("nvfp4", 0.2), ("turboquant_k8v4", 0.12), ("turboquant_4bit_nc", 0.15),
                             ("turboquant_k3v4_nc", 0.25), ("turboquant_3bit_nc", 0.35)):
            self.assertEqual(LibattnBackend.validate_configuration(head_size=64, dtype=torch.float32, kv_cache_dtype=dtype),
                             [])
            for backend in ("cpu_ref", "cpu_simd"):
                for heads_first in (True, False):
                    values = {"_k_scale_float": 0.01, "_v_scale_float": 0.01} if dtype == "nvfp4" else {}
                    self.run_steps(backend, dtype, self.cache(dtype, D, D, heads_first), D, D, bound, **values)

    def test_lengths_of_rows(self) -> None:
        """Bytes of a slot and head: vLLM's own numbers, heads of 128."""
        for dtype, length in (("int8_per_token_head", 264), ("int4_per_token_head", 136), ("nvfp4", 144),
                              ("turboquant_k8v4", 196), ("turboquant_4bit_nc", 134), ("turboquant_k3v4_nc", 118),
                              ("turboquant_3bit_nc", 102)):
            self.assertEqual(describe.rows_of(dtype, 128, 128).length, length)
            with mock.patch.object(describe, "is_latent", lambda: False):
                self.assertEqual(versions.CacheShape.get_kv_cache_shape(3, 16, 2, 128, dtype), (3, 2, 16, length))

    def test_refused_caches(self) -> None:
        for dtype in ("nvfp4_ds_mla", "nvfp4_4over6", "ultraquant_4bit", "octave_k3v4", "fp8_inc"):
            found = LibattnBackend.validate_configuration(head_size=64, dtype=torch.float32, kv_cache_dtype=dtype)
            self.assertRegex("\n".join(found), f"kv_cache_dtype: '{dtype}'; supported: auto, .*turboquant_3bit_nc")

    def test_calculated_scales(self) -> None:
        """Scales that vLLM sets after a layer was bound (``calculate_kv_scales``): the next step goes by them."""
        generator = torch.Generator().manual_seed(8)
        q, k, v = (torch.randn(9, heads, D, generator=generator) for heads in (HQ, HK, HK))
        impl, layer, builder = LibattnImpl(HQ, D, D**-0.5, HK, kv_cache_dtype="fp8"), self.layer(), self.builder()
        cache = torch.zeros(4, HK, BLOCK, 2 * D, dtype=torch.uint8)
        for scale in (0.5, 2.0**-20):  # the second is far too small: values saturate at 448 scales
            layer._k_scale_float = layer._v_scale_float = scale
            out = torch.empty(9, HQ * D)
            impl.forward(layer, q, k, v, cache, builder.build(0, metadata([9], [9], torch.arange(4).int()[None])), out)
            stored = [(t / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale for t in (k, v)]
            expected, _ = attention(q, *stored, D**-0.5, causal(9, 9))
            self.assertLess(worst(out.view(9, HQ, D), expected), 1e-4, scale)

    def test_value_sizes(self) -> None:
        """Values of other sizes than keys, smaller and larger, packed after them."""
        for backend in ("cpu_ref", "cpu_simd"):
            for size, size_v in ((64, 32), (32, 128)):
                self.run_steps(backend, "auto", torch.zeros(12, HK, BLOCK, size + size_v), size, size_v, 1e-5)
        self.run_steps("cpu_ref", "int8_per_token_head", self.cache("int8_per_token_head", 64, 32, True), 64, 32, 0.02)

    def test_fp8_queries(self) -> None:
        """vLLM quantizes queries where the implementation says so, which the operator switches on."""
        self.config(additional_config={"libattn": {"fp8_query": True}})
        self.assertTrue(LibattnImpl(HQ, D, 0.1, HK, kv_cache_dtype="fp8").supports_quant_query_input)
        self.assertFalse(LibattnImpl(HQ, D, 0.1, HK).supports_quant_query_input)
        recorded.current[0] = None
        self.assertFalse(LibattnImpl(HQ, D, 0.1, HK, kv_cache_dtype="fp8").supports_quant_query_input)
        for backend in ("cpu_ref", "cpu_simd"):
            self.run_steps(backend, "fp8", torch.zeros(12, HK, BLOCK, 2 * D, dtype=torch.uint8), D, D, 0.05,
                           torch.float8_e4m3fn, _k_scale_float=0.02, _v_scale_float=0.02, _q_scale_float=0.02)


class Terms(Settings):
    def test_alibi_and_chunks(self) -> None:
        """Terms that only `LibattnImpl` takes: slopes of both forms of ALiBi, and chunks with lookback in place of a window."""
        generator, n = torch.Generator().manual_seed(4), 40
        q, k, v = (peaked(n, heads, D, generator=generator) for heads in (HQ, HK, HK))
        away = (torch.arange(n)[:, None] - torch.arange(n)).abs().double()
        slopes = [2.0**-(i + 1) for i in range(HQ)]
        tilt = torch.tensor(slopes).double()[:, None, None]
        chunks = torch.arange(n)[:, None] // 8 - torch.arange(n) // 8
        for backend in each_backend():
            for values, bias, visible in (
                    ({"alibi_slopes": slopes}, -tilt * away, causal(n, n)),
                    ({"alibi_slopes": slopes, "use_alibi_sqrt": True}, -tilt * away.sqrt(), causal(n, n)),
                    ({"sliding_window": 16, "chunk_lookback": 1}, None, causal(n, n) & (chunks <= 1))):
                out = torch.empty(n, HQ * D)
                LibattnImpl(HQ, D, D**-0.5, HK, **values).forward(
                    self.layer(), q, k, v, torch.zeros(4, HK, BLOCK, 2 * D),
                    self.builder().build(0, metadata([n], [n], torch.arange(4).int()[None])), out)
                expected, _ = attention(q, k, v, D**-0.5, visible, bias=bias)
                self.assertLess(worst(out.view(n, HQ, D), expected), 2e-5, (backend, values))


class Towers(Settings):
    """vLLM's layer of vision towers, in whose place libattn's comes."""

    def tower(self, head_size: int, custom: bool = True, forced: str | None = None, **said: Any) -> LibattnTowerAttention:
        self.config(
            attention_config=types.SimpleNamespace(backend=AttentionBackendEnum.CUSTOM if custom else "FLASH_ATTN"),
            model_config=types.SimpleNamespace(multimodal_config=types.SimpleNamespace(mm_encoder_attn_backend=forced, **said)))
        made = LibattnTowerAttention(HQ, head_size, num_kv_heads=HK, prefix="visual.blocks.3.attn")
        made.head_size, made.layer_name = head_size, "visual.blocks.3.attn"  # as vLLM's own does
        return made

    def test_vision_towers(self) -> None:
        """Packed images and batches of one size, rows with heads apart and not, slices of one fused row."""
        generator = torch.Generator().manual_seed(8)
        starts = torch.tensor([0, 7, 8, 40]).int()
        for backend in each_backend():
            for size in (64, 72, 80):
                tower = self.tower(size)
                for apart, packed in ((False, True), (True, True), (False, False), (True, False)):
                    fused = peaked(1 if packed else 2, 40, (HQ + 2 * HK) * size, generator=generator)
                    given = fused.split([HQ * size, HK * size, HK * size], -1)
                    q, k, v = (t.unflatten(-1, (-1, size)) for t in given)
                    with torch.inference_mode():
                        out = tower.forward(*((q, k, v) if apart else given), starts if packed else None, max_seqlen=None)
                    self.assertEqual(out.shape, q.shape if apart else given[0].shape)
                    counts = starts.diff().tolist() if packed else [40]
                    for got, queries, keys, values in zip(out.view(q.shape), q, k, v):
                        error = worst_of(got, queries, keys.split(counts), values.split(counts), counts, counts, size**-0.5,
                                         lambda r, n, _: torch.ones(n, n).bool())
                        self.assertLess(error, 2e-5, (backend, size, apart))
            row = libattn.torch.table()[0]
            self.assertEqual((row.index, row.kind, row.prefill.split("@")[0]), (3, "mm_encoder", backend))

    def test_towers_of_one_forward_share_a_plan(self) -> None:
        """Also in inference mode, where tensors have no version."""
        tower, calls = self.tower(64), 0
        update = libattn.Plan.update

        def counted(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            return update(*args, **kwargs)

        with mock.patch.object(libattn.Plan, "update", counted), torch.inference_mode():
            for lengths in ([0, 7, 40], [0, 9, 40]):
                for _ in range(3):
                    tower.forward(*(torch.randn(1, 40, n * 64) for n in (HQ, HK, HK)), torch.tensor(lengths).int())
        self.assertEqual(calls, 2)

    def test_towers_that_are_left_to_vllm(self) -> None:
        """Unless the engine runs CUSTOM, and where the operator chose another backend for them."""
        starts = [0, 4, 8]
        for tower in (self.tower(64, custom=False), self.tower(64, forced="TORCH_SDPA")):
            self.assertFalse(tower.serves)
            with self.assertRaises(NotImplementedError):  # the stand-in of vLLM's own
                tower.maybe_compute_seq_lens("FLASHINFER", starts, "cpu")
        tower = self.tower(64)
        self.assertTrue(tower.serves)
        self.assertIsNone(tower.maybe_compute_seq_lens("FLASHINFER", starts, "cpu"))
        found = tower.maybe_recompute_cu_seqlens("FLASHINFER", starts, 512, 1, torch.device("cpu"))
        self.assertEqual((found.tolist(), found.dtype), (starts, torch.int32))
        with self.assertRaisesRegex(libattn.AttnError, "head_size is 60"):
            self.tower(60)

    def folder(self) -> str:
        made = tempfile.TemporaryDirectory()
        self.addCleanup(made.cleanup)
        return made.name

    def test_towers_in_fp8(self) -> None:
        """Scales that follow the inputs, the file that they are saved to, and towers that read it."""
        generator, starts = torch.Generator().manual_seed(9), torch.tensor([0, 7, 40]).int()
        visible = torch.zeros(40, 40, dtype=torch.bool)
        visible[:7, :7] = visible[7:, 7:] = True
        codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double()

        def rounded(t: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:  # once: torch rounds to float32 in between
            size = t.double().abs() / scale.double()
            upper = torch.bucketize(size, codes).clamp(1, 126)
            low, high = codes[upper - 1], codes[upper]
            return (torch.where(size - low < high - size, low, high).copysign(t.double()) * scale).float()

        def close(tower: LibattnTowerAttention, given: list[torch.Tensor], scales: torch.Tensor) -> float:
            out = tower.forward(*(t[None] for t in given), starts)
            expected, _ = attention(*map(rounded, given, scales), tower.head_size**-0.5, visible)
            return worst(out.view(given[0].shape), expected)

        for backend in each_backend():
            for size in (64, 72):
                saved = f"{self.folder()}/scales.json"
                fp8 = {"mm_encoder_attn_dtype": "fp8"}
                tower = self.tower(size, **fp8, mm_encoder_fp8_scale_save_path=saved, mm_encoder_fp8_scale_save_margin=1.5)
                largest = []
                for step in range(18):
                    given = [torch.randn(40, n, size, generator=generator) * (9 if step == 1 else 1) for n in (HQ, HK, HK)]
                    largest.append(torch.stack([t.abs().max() for t in given]))
                    follows = torch.stack(largest[-16:]).amax(0) / 448
                    self.assertLess(close(tower, given, follows), 2e-5, (backend, size, step))
                    self.assertTrue(torch.equal(tower.fp8.scales, follows))
                    self.assertEqual(Path(saved).exists(), step >= 15)
                first = torch.stack(largest[:16]).amax(0) / 448 * 1.5
                reader = self.tower(size, **fp8, mm_encoder_fp8_scale_path=saved)
                self.assertLess(float((reader.fp8.scales / first - 1).abs().max()), 1e-6)
                self.assertLess(close(reader, given, reader.fp8.scales), 2e-5, (backend, size))
                for wrong in ('{"q": 1, "k": 0, "v": 1}', '{"q": 1, "k": 1, "v": Infinity}', '1'):
                    Path(saved).write_text(f'{{"visual.blocks.3.attn": {wrong}}}')
                    with self.assertRaisesRegex(libattn.InvalidArgumentError, "positive numbers q, k and v"):
                        self.tower(size, **fp8, mm_encoder_fp8_scale_path=saved)
                Path(saved).write_text("{}")
                with self.assertRaisesRegex(libattn.InvalidArgumentError, "has no 'visual.blocks.3.attn'"):
                    self.tower(size, **fp8, mm_encoder_fp8_scale_path=saved)


class Page(unittest.TestCase):
    """The list of methods in docs/engines.md."""

    def test_every_class_and_method_has_its_row(self) -> None:
        """Every member of the recorded interfaces has a row, and a row that says `served` names tests that exist."""
        root = Path(__file__).resolve().parents[2]
        text = (root / "docs/engines.md").read_text(encoding="utf-8")
        page = text[text.index("## What the interfaces ask"):text.index("## ggml")]
        for name in ("vllm-0.26.0", "vllm-0.32.0", "vllm-0.33.0", "sglang-0.5.23"):
            for items in published.read(name)["modules"].values():
                for kind, content in items.items():
                    if kind in ("ForwardMode", "AttentionSelectorConfig", "MultipleOf"):
                        continue
                    asked = {kind}
                    if isinstance(content, dict):
                        asked |= {m for m in content["methods"] if m not in ("__init__", "__new__", "_eager_attention")}
                        asked |= {a for a in content["attributes"] if not a.startswith("_")}
                    self.assertEqual({a for a in asked if f"`{a}`" not in page and f"`{kind}.{a}`" not in page}, set(),
                                     (name, kind))
        written = "".join(file.read_text(encoding="utf-8") for file in root.glob("tests/python/test_*.py"))
        rows = [row.strip("| ").split(" | ") for row in page.splitlines() if row.startswith("| ")]
        for row in rows:
            tests = re.findall(r"`(test_\w+)`", row[-1])
            files = re.findall(r"`(tests/[\w/.]+)`", row[-1])
            self.assertEqual([t for t in tests if f"def {t}(" not in written], [], row)
            self.assertEqual([f for f in files if not (root / f).is_file()], [], row)
            self.assertTrue(len(row) < 3 or row[1] != "served" or tests or files, row)
        self.assertGreater(sum(row[1] == "served" for row in rows if len(row) > 2), 30)


class Releases(Settings):
    def test_every_call_of_every_release_fits(self) -> None:
        for release, form in (("0.26.0", versions.CacheShape), ("0.32.0", versions.CacheLayout),
                              ("0.33.0", versions.CacheLayout)):
            modules = published.read(f"vllm-{release}")["modules"]
            classes = modules["vllm.v1.attention.backend"] | modules[
                "vllm.model_executor.layers.attention.mm_encoder_attention"]
            for ours, name in ((LibattnBackend, "AttentionBackend"), (form, "AttentionBackend"),
                               (LibattnMetadataBuilder, "AttentionMetadataBuilder"), (LibattnImpl, "AttentionImpl"),
                               (LatentImpl, "MLAAttentionImpl"), (LibattnTowerAttention, "MMEncoderAttention")):
                self.assertEqual(published.mismatches(ours, classes[name]), [], release)
                abstract = {m for m, c in classes[name]["methods"].items() if "abstract" in c.words}
                self.assertEqual(abstract - set(dir(ours)) - set(dir(LibattnBackend)) - set(dir(form)), set(), release)

    def test_steps_of_older_releases(self) -> None:
        """The same source over the classes of another release, in a process of its own."""
        for release, form in (("0.26.0", "CacheShape"), ("0.32.0", "CacheLayout")):
            code = f"import test_vllm, test_vllm_gdn, test_vllm_index, unittest; assert test_vllm.versions.CacheForm.__name__ == '{form}'; " \
                "unittest.main(None, argv=['', 'test_vllm.Interface.test_selector_configuration_is_taken_whole', " \
                "'test_vllm.Interface.test_entry_point', 'test_vllm.Interface.test_sparse_latent_layers', " \
                "'test_vllm.Steps.test_orders_of_the_cache', " \
                "'test_vllm.Steps.test_latent_layers', 'test_vllm_gdn', 'test_vllm_index'])"
            ran = subprocess.run([sys.executable, "-c", code], env=os.environ | {"VLLM_RELEASE": release},
                                 capture_output=True, text=True, timeout=100)
            self.assertEqual(ran.returncode, 0, ran.stderr)

    def test_other_releases_are_refused(self) -> None:
        asked = {"head_size": 64, "dtype": torch.float32}
        for release, served in (("0.26.0", True), ("0.32.0+cpu", True), ("0.33.1", True), ("0.29.0", False),
                                ("0.3.3", False), ("1.0.0", False)):
            with mock.patch.object(vllm.version, "__version__", release):
                self.config(additional_config={})
                found = LibattnBackend.validate_configuration(**asked)
                self.assertEqual(not found, served, release)
                if found:
                    self.assertRegex(found[0], f"vllm: {release}, served: 0.26, 0.32, 0.33; .*any_version")
                self.config(additional_config={"libattn": {"any_version": True}})
                self.assertEqual(LibattnBackend.validate_configuration(**asked), [])
        self.config(additional_config={"libattn": {"max_num_splits": 8}})
        self.assertRegex(LibattnBackend.validate_configuration(**asked)[0],
                         "additional_config.libattn.max_num_splits: not known; known: any_version, fp8_query")

    def test_the_backend_of_a_draft(self) -> None:
        """A warning where vLLM would choose it, which it does not take from the model: its runner V1, and V2 for some methods."""
        for method, named, second, expected in (("eagle", None, False, 1), ("eagle", "CUSTOM", False, 0), ("draft_model", None, False, 1),
                                                ("ngram", None, False, 0), ("eagle", None, True, 0), ("dflash", None, True, 1)):
            versions._warn.cache_clear()
            self.config(use_v2_model_runner=second, speculative_config=types.SimpleNamespace(
                method=method, attention_backend=named, use_eagle=lambda method=method: method in ("eagle", "dflash")))
            with self.assertLogs("libattn", "WARNING") as log:
                versions.logging.getLogger("libattn").warning("something, which assertLogs needs")
                for _ in range(2):
                    LibattnBackend.validate_configuration(head_size=64, dtype=torch.float32)
            self.assertEqual(sum('"attention_backend": "CUSTOM"' in line for line in log.output), expected, (method, named, second))

    def test_the_cache_before_layouts(self) -> None:
        """Blocks first, alone and with layers, for MLA too; and no pages of one token where all layers have windows."""
        shape = versions.CacheShape
        for latent, alone in ((False, (9, 2, 16, 128)), (True, (9, 16, 64))):
            with mock.patch.object(describe, "is_latent", lambda: latent):
                self.assertEqual(shape.get_kv_cache_shape(9, 16, 2, 64), alone)
                for layers in (False, True):
                    order = shape.get_kv_cache_stride_order(include_num_layers_dimension=layers)
                    self.assertEqual((sorted(order), order[0]), (list(range(len(alone) + layers)), int(layers)))
        self.assertGreaterEqual(min(size.base for size in shape.get_supported_kernel_block_sizes()), 16)
        with mock.patch.object(describe, "is_sparse", lambda: True), mock.patch.object(describe, "is_latent", lambda: True):
            self.assertEqual(shape.get_supported_kernel_block_sizes(), [64])  # the indexer's
            self.assertEqual(shape.get_kv_cache_shape(9, 64, 1, 576, "fp8_ds_mla"), (9, 64, 656))
        self.assertEqual(shape.get_required_kv_cache_layout(), "HND" if versions.heads_first() else "NHD")
        with mock.patch.object(vllm.envs, "VLLM_KV_CACHE_LAYOUT", "NHD"):
            self.assertIsNone(shape.get_required_kv_cache_layout())

    def test_graphs_of_groups_of_several_specs(self) -> None:
        config = types.SimpleNamespace(model_config=types.SimpleNamespace(dtype=torch.float32))
        specs = {str(heads): types.SimpleNamespace(num_kv_heads=heads, head_size=64, block_size=16) for heads in (2, 4)}
        support = LibattnMetadataBuilder.get_cudagraph_support
        self.assertEqual(support(config, types.SimpleNamespace(kv_cache_specs=specs)).name, "UNIFORM_BATCH")
        with mock.patch.object(describe, "layer", wraps=describe.layer) as asked:
            support(config, types.SimpleNamespace(kv_cache_specs=specs))
        self.assertEqual([call.args[2] for call in asked.call_args_list], [2, 4])

    def test_scratch_with_the_weights(self) -> None:
        """The worst step's is taken before the cache is sized, and steps and captured plans find it."""
        def latent() -> LatentImpl:
            return LatentImpl(4, 576, 0.1, kv_lora_rank=512, qk_nope_head_dim=32, qk_rope_head_dim=64, v_head_dim=32,
                              kv_b_proj=types.SimpleNamespace(weight=torch.zeros(4 * 64, 512)))

        for make in (lambda: LibattnImpl(HQ, D, D**-0.5, HK), lambda: LibattnImpl(HQ, D, 0.1, HK, sinks=torch.zeros(HQ)),
                     lambda: LibattnImpl(HQ, D, 0.1, HK, kv_cache_dtype="fp8"), latent,
                     lambda: LibattnImpl(HQ, D, 0.1, HK, kv_cache_dtype="int4_per_token_head"),
                     lambda: LibattnImpl(HQ, D, 0.1, HK, attn_type="encoder_only")):
            libattn.torch.configure(ignore_environment=True, backend="cpu_simd")
            with mock.patch.object(describe, "limits", lambda: (5, 100, 900)), self.assertNoLogs():
                make().process_weights_after_loading(torch.float32)
            self.assertGreater(store.scratch(torch.device("cpu"), None).memory.numel(), 4096)
        libattn.torch.configure(ignore_environment=True, backend="cpu_simd")
        with mock.patch.object(describe, "limits", lambda: (5, 100, 900)):
            impl = LibattnImpl(HQ, D, D**-0.5, HK)
            impl.process_weights_after_loading(torch.float32)
        taken = store.scratch(torch.device("cpu"), None)
        first = taken.memory
        m = self.builder().build(0, metadata([9, 40], [9, 800], torch.arange(100).int().reshape(2, 50)))
        q = torch.randn(49, HQ, D)
        impl.forward(self.layer(), q, q[:, :HK], q[:, :HK], torch.zeros(100, HK, BLOCK, 2 * D), m, torch.empty(49, HQ * D))
        self.assertIs(taken.memory, first)
        libattn.torch.configure(ignore_environment=True, backend="cpu_simd")
        with mock.patch.object(describe, "limits", lambda: (5, 100, 900)), mock.patch("libattn.torch.store.stream_of", lambda device: 7):
            LibattnImpl(HQ, D, D**-0.5, HK).process_weights_after_loading(torch.float32)
        self.assertEqual(store.replays(torch.device("cpu")), 7)  # whatever stream a graph is captured on

    def test_bounds_of_lengths(self) -> None:
        """On a device vLLM's upper bounds are the lengths of a step, unless it drafts."""
        for speculative, known in ((None, [5, 9]), ("draft", None)):
            given = metadata([5, 9], [5, 9], torch.zeros(2, 4).int())
            given.seq_lens, given.seq_lens_cpu_upper_bound = given.seq_lens.to("meta"), given.seq_lens
            m = self.builder(types.SimpleNamespace(speculative_config=speculative)).build(0, given)
            self.assertEqual(None if m.seq_lens_cpu is None else m.seq_lens_cpu.tolist(), known)


@dataclasses.dataclass(frozen=True)
class Spec:
    """The fields of vLLM's FullAttentionSpec that backends read."""

    head_size: int
    head_size_v: int
    kv_quant_mode: Any = None
    num_kv_heads: int = HK
    block_size: int = BLOCK
    state_content_bytes: int | None = None
