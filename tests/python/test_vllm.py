# SPDX-License-Identifier: Apache-2.0
"""The vLLM adapter against vLLM's recorded interface. Inside the engine it runs by tools/test_engines.sh."""
import collections
import enum
import os
import subprocess
import sys
import tempfile
import types
import unittest
from dataclasses import replace
from typing import Any, NamedTuple
from unittest import mock

import torch

import published
import libattn
import libattn.torch
from captured import Graph
from common import attention, causal, each_backend, peaked, worst, worst_of

registered: dict[Any, str] = {}


class _Custom(str):
    def get_path(self) -> str:
        return registered[self]


class _Registry:
    CUSTOM = _Custom("CUSTOM")


class _MambaRegistry:
    GDN_ATTN = "vllm's own"
    CUSTOM = _Custom("CUSTOM of states")


def _state_blocks(table: torch.Tensor, seq_lens: torch.Tensor, spec: Any, mode: str) -> torch.Tensor:
    """As vLLM's own: with a prefix cache the block of a request's last token."""
    if mode == "none":
        return table
    return table.gather(1, ((seq_lens.long() - 1) // spec.block_size).clamp_min(0)[:, None])


class _CpuPlatform:
    """As vLLM's own: whatever is selected, its own backend is what comes."""

    @classmethod
    def get_attn_backend_cls(cls, selected_backend: Any, config: Any, num_heads: int | None = None) -> str:
        return "vllm's own"

    @classmethod
    def check_and_update_config(cls, config: Any) -> None:
        """As vLLM's own next to MLA."""
        config.scheduler_config.enable_chunked_prefill = config.cache_config.enable_prefix_caching = False
        config.scheduler_config.max_num_batched_tokens = 4096


_replaced: dict[str, type] = {}


class _CustomOp:
    """vLLM's operators, of which other classes may be made."""

    @classmethod
    def register_oot(cls, ours: type, name: str) -> None:
        assert name not in _replaced, name  # as vLLM's own does
        _replaced[name] = ours


_Layout = enum.Enum("KVCacheLayout", ["LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"])
on_a_cpu = True
dcp_group: list[Any] = []
current: list[Any] = [None]  # vLLM's configuration
step_metadata: list[Any] = [None]
RELEASE = os.environ.get("VLLM_RELEASE", "0.33.0")
RECORDED = published.install(f"vllm-{RELEASE}", {
    "vllm.v1.attention.backends.registry": {
        "AttentionBackendEnum": _Registry, "MambaAttentionBackendEnum": _MambaRegistry,
        "register_backend": lambda backend, class_path=None, is_mamba=False: registered.update({backend: class_path})},
    "vllm.v1.kv_cache_interface": {"KVCacheLayout": _Layout},
    "vllm.model_executor.layers.quantization.utils.quant_utils": {
        "kFp8StaticTensorSym": "fp8", "kNvfp4Dynamic": "nvfp4",
        "get_and_maybe_dequant_weights": lambda layer, out_dtype: layer.weight.to(out_dtype)},
    "vllm.model_executor.custom_op": {"CustomOp": _CustomOp, "op_registry_oot": _replaced},
    "vllm.envs": {"VLLM_BATCH_INVARIANT": False, "VLLM_KV_CACHE_LAYOUT": None},
    "vllm.version": {"__version__": RELEASE},
    "vllm.config": {"get_current_vllm_config_or_none": lambda: current[0]},
    "vllm.v1.attention.backends.utils": {"get_kv_cache_layout": lambda: "HND", "mamba_get_block_table_tensor": _state_blocks},
    "vllm.forward_context": {"get_forward_context": lambda: types.SimpleNamespace(
        attn_metadata=step_metadata[0], no_compile_layers=current[0].compilation_config.static_forward_context)},
    "vllm.distributed.parallel_state": {"get_dcp_group": lambda: dcp_group[0]},
    "vllm.platforms": {"cpu_platform_plugin": lambda: "vllm's own" if on_a_cpu else None},
    "vllm.platforms.cpu": {"CpuPlatform": _CpuPlatform}})

from libattn.integrations import vllm as adapter  # noqa: E402
from libattn.integrations.vllm import describe, versions  # noqa: E402
from libattn.integrations.vllm.backend import LibattnBackend, LibattnMetadataBuilder  # noqa: E402
from libattn.integrations.vllm.layers import LatentImpl, LibattnImpl, pages_of  # noqa: E402
from libattn.integrations.vllm.vision import LibattnTowerAttention  # noqa: E402

BACKEND = RECORDED["modules"]["vllm.v1.attention.backend"]
HQ, HK, D, BLOCK, BLOCKS = 8, 2, 64, 16, 40


def _codes_of_fp8(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Latent rows as ``fp8_ds_mla`` holds them: e4m3 with a scale for each 128."""
    tiles = rows.unflatten(-1, (-1, 128))
    scales = tiles.abs().amax(-1, keepdim=True) / 448
    return (tiles / scales).to(torch.float8_e4m3fn), scales


def _tiles_of_fp8(rows: torch.Tensor) -> torch.Tensor:
    codes, scales = _codes_of_fp8(rows)
    return (codes.float() * scales).flatten(-2)


def _write_latent(cache: torch.Tensor, slots: torch.Tensor, kv_c: torch.Tensor, k_pe: torch.Tensor) -> None:
    """What vLLM's kernels do before attention."""
    if cache.dtype == torch.uint8:
        codes, scales = _codes_of_fp8(kv_c)
        parts = codes.flatten(-2).view(torch.uint8), scales.flatten(-2).view(torch.uint8), k_pe.bfloat16().view(torch.uint8)
        cache.view(-1, cache.shape[-1])[slots] = torch.cat(parts, dim=-1)
    else:
        cache.view(-1, cache.shape[-1])[slots] = torch.cat([kv_c, k_pe], dim=-1)


class Interface(unittest.TestCase):
    def test_entry_point(self) -> None:
        adapter.register()
        adapter.register()
        path = registered["CUSTOM"]
        self.assertEqual(path, f"{LibattnBackend.__module__}.{LibattnBackend.__qualname__}")
        self.assertIs(_replaced["MMEncoderAttention"], LibattnTowerAttention)

    def test_every_call_of_the_engine_fits(self) -> None:
        for ours, name in ((LibattnBackend, "AttentionBackend"), (LibattnMetadataBuilder, "AttentionMetadataBuilder"),
                           (LibattnImpl, "AttentionImpl"), (LatentImpl, "MLAAttentionImpl")):
            self.assertEqual(published.mismatches(ours, BACKEND[name]), [])
            abstract = {m for m, c in BACKEND[name]["methods"].items() if "abstract" in c.words}
            self.assertEqual({m for m in abstract if getattr(getattr(ours, m), "__isabstractmethod__", False)}, set())

    def test_every_question_is_answered(self) -> None:
        asked = {m for m in BACKEND["AttentionBackend"]["methods"] if m.startswith("supports_")}
        left_to_vllm = {"supports_dtype", "supports_kv_cache_dtype", "supports_combination", "supports_kv_connector",
                        "supports_non_causal_dcp"}
        self.assertEqual(asked - set(vars(LibattnBackend)) - left_to_vllm, set())

    def test_selector_configuration_is_taken_whole(self) -> None:
        fields = RECORDED["modules"]["vllm.v1.attention.selector"]["AttentionSelectorConfig"]["attributes"]
        values = {name: False for name in fields} | {
            "head_size": 128, "dtype": torch.bfloat16, "kv_cache_dtype": "auto", "block_size": None,
            "attn_type": "decoder", "device_capability": None}
        libattn.torch.configure(ignore_environment=True)
        self.assertEqual(LibattnBackend.validate_configuration(**values), [])
        self.assertEqual(LibattnBackend.validate_configuration(**values, a_later_argument=False), [])

    def test_reasons_have_values(self) -> None:
        libattn.torch.configure(ignore_environment=True)
        plain = {"dtype": torch.bfloat16, "kv_cache_dtype": "auto", "block_size": 16, "attn_type": "decoder"}
        for values, text in (({"head_size": 60}, "head_size.*60.*multiples of 8"),
                             ({"head_size": 64, "dtype": torch.float64}, "dtype.*float64.*bfloat16"),
                             ({"head_size": 64, "kv_cache_dtype": "fp8_ds_mla"}, "kv_dtype is fp8_ds_mla, supported: in MLA layers only"),
                             *(({"head_size": 128, name: True}, f"{name}: True, supported: no .*{what}") for name, what in (
                                 ("use_sparse", "without MLA"), ("use_pcp", "prefill context parallelism"),
                                 ("use_rswa", "sliding windows"), ("use_adaptive_verification", "query lengths"))),
                             ({"head_size": 64, "attn_type": "telepathic"}, "attn_type.*telepathic.*decoder")):
            found = LibattnBackend.validate_configuration(**{**plain, **values})
            self.assertRegex("\n".join(found), text)
            self.assertEqual(found[-1], describe.ADVICE)

    def test_sparse_latent_layers(self) -> None:
        """Served, but not over a cache that is spread over ranks where vLLM merges the outputs of latent queries itself."""
        libattn.torch.configure(ignore_environment=True)
        for dtype in ("auto", "fp8_ds_mla"):
            found = LibattnBackend.validate_configuration(head_size=576, dtype=torch.bfloat16, kv_cache_dtype=dtype,
                                                          block_size=64, use_mla=True, use_sparse=True)
            self.assertEqual(found, [])
            if versions.LATENT_QUERIES:
                found = LibattnBackend.validate_configuration(head_size=576, dtype=torch.bfloat16, kv_cache_dtype=dtype,
                                                              block_size=64, use_mla=True, use_sparse=True, use_dcp=True)
                self.assertRegex(found[0], "use_dcp: True, supported: no .*since 0.32")

    def test_a_device_that_no_plugin_has_found(self) -> None:
        libattn.torch.configure(ignore_environment=True)
        with mock.patch.object(describe, "device", lambda: ("cuda", 7)):
            found = LibattnBackend.validate_configuration(head_size=64, dtype=torch.bfloat16)
        self.assertRegex("\n".join(found), r"device: there is no cuda:7 here(.|\n)*leave out --attention-backend CUSTOM")

    def test_a_layer_that_nothing_serves(self) -> None:
        """What vLLM does not say before: refused when the model makes the layer, with its heads and window."""
        libattn.torch.configure(ignore_environment=True)
        with mock.patch.object(describe, "config", lambda: types.SimpleNamespace()), \
                self.assertRaisesRegex(libattn.AttnError, "24 heads, 5 of keys.*window .63, 0(.|\n)*leave out"):
            LibattnImpl(24, D, D**-0.5, 5, sliding_window=64)

    def test_forced_backend_gives_its_reasons(self) -> None:
        libattn.torch.configure(ignore_environment=True, backend="cpu_simd@scalar", no_default_plugins=False)
        found = LibattnBackend.validate_configuration(head_size=64, dtype=torch.float16, kv_cache_dtype="auto",
                                                      block_size=1 << 20, attn_type="decoder")
        self.assertRegex("\n".join(found), "block_size")


class Platform(unittest.TestCase):
    def config(self, **values: Any) -> Any:
        fields = {"head_size": 64, "dtype": torch.float32, "kv_cache_dtype": "auto", "block_size": 16} | values
        return collections.namedtuple("AttentionSelectorConfig", fields)(**fields)

    def test_only_on_a_cpu(self) -> None:
        global on_a_cpu
        self.assertEqual(adapter.platform(), "libattn.integrations.vllm.cpu.LibattnCpuPlatform")
        on_a_cpu = False
        self.assertIsNone(adapter.platform())
        on_a_cpu = True

    def test_custom_is_taken_or_refused_aloud(self) -> None:
        from libattn.integrations.vllm.cpu import LibattnCpuPlatform as Ours

        libattn.torch.configure(ignore_environment=True)
        adapter.register()
        self.assertEqual(Ours.get_attn_backend_cls(_Registry.CUSTOM, self.config()), registered["CUSTOM"])
        self.assertEqual(Ours.get_attn_backend_cls("CPU_ATTN", self.config(), num_heads=8), "vllm's own")
        self.assertEqual(Ours.get_attn_backend_cls(None, self.config()), "vllm's own")
        with self.assertRaisesRegex(ValueError, "head_size is 60; multiples of 8 up to 512 are allowed"):
            Ours.get_attn_backend_cls(_Registry.CUSTOM, self.config(head_size=60))

    def test_latent_layers_on_a_cpu(self) -> None:
        """Chunked prefill and the prefix cache stay as they were; refused where a draft's backend would switch them off later."""
        from libattn.integrations.vllm.cpu import LibattnCpuPlatform

        for method, backend, on in (("ngram", None, True), ("mtp", "CUSTOM", True), ("draft_model", "CUSTOM", True), ("mtp", None, True),
                                    ("draft_model", None, True), ("mtp", None, False)):
            config = types.SimpleNamespace(
                scheduler_config=types.SimpleNamespace(enable_chunked_prefill=on, max_num_batched_tokens=64),
                cache_config=types.SimpleNamespace(enable_prefix_caching=on, block_size=16),
                attention_config=types.SimpleNamespace(backend=_Registry.CUSTOM), model_config=types.SimpleNamespace(use_mla=True),
                speculative_config=types.SimpleNamespace(use_eagle=lambda method=method: method == "mtp", method=method,
                                                         attention_backend=backend and _Registry.CUSTOM))
            if on and method != "ngram" and backend is None:
                with self.assertRaisesRegex(ValueError, "speculative_config.attention_backend: None, supported next to MLA on a CPU: CUSTOM"
                                            """.*; set "attention_backend": "CUSTOM" in --speculative-config"""):
                    LibattnCpuPlatform.check_and_update_config(config)
                continue
            LibattnCpuPlatform.check_and_update_config(config)
            self.assertEqual((config.scheduler_config.enable_chunked_prefill, config.scheduler_config.max_num_batched_tokens,
                              config.cache_config.enable_prefix_caching, config.cache_config.block_size), (on, 64, on, 16))

    def test_layouts_begin_with_the_backends(self) -> None:
        for backend in each_backend():
            found = LibattnBackend.supported_kv_cache_layouts()
            self.assertEqual(found[0].name, "LBHNC" if versions.heads_first() else "LBNHC")
            self.assertEqual(set(found), set(_Layout))


def metadata(query_lens: list[int], seq_lens: list[int], tables: torch.Tensor, padded: int = 0) -> Any:
    """What vLLM's runner hands to the builder."""
    starts = torch.tensor([0, *torch.tensor(query_lens).cumsum(0)], dtype=torch.int32)
    slots = torch.tensor([int(tables[r, p // BLOCK]) * BLOCK + p % BLOCK
                          for r, (n, length) in enumerate(zip(query_lens, seq_lens))
                          for p in range(length - n, length)])
    names = BACKEND["CommonAttentionMetadata"]["attributes"]
    values: dict[str, Any] = dict.fromkeys(names)
    values |= {"query_start_loc": starts, "query_start_loc_cpu": starts, "seq_lens": torch.tensor(seq_lens).int(),
               "num_reqs": len(query_lens), "num_actual_tokens": sum(query_lens), "max_query_len": max(query_lens),
               "max_seq_len": max(seq_lens), "block_table_tensor": tables, "slot_mapping": slots, "causal": True}
    return types.SimpleNamespace(**values)


class Latent(NamedTuple):
    """Sizes of multi-head latent attention."""

    heads: int = 4
    nope: int = 16
    rope: int = 8
    rank: int = 32
    width: int = 24


class Engine:
    """Layers 3 and up of a builder, their caches, and what three requests have in them.

    Parameters
    ----------
    sizes : Latent, optional
        MLA's.
    kv : str
        vLLM's ``--kv-cache-dtype``.
    topk : int
        Keys that an indexer's lists choose.
    caches : list of tensors, optional
        The layers', in other orders than [N, Hk, B, 2 D].
    """

    ROOM = 160

    def __init__(self, dtype: torch.dtype = torch.float32, sizes: Latent | None = None, graphs: bool = False, kv: str = "auto", topk: int = 0,
                 device: torch.device | str = "cpu", caches: list[torch.Tensor] | None = None, **terms: Any) -> None:
        self.dtype, self.sizes, self.kv, self.topk, self.device, self.terms = dtype, sizes, kv, topk, torch.device(device), terms
        self.generator = g = torch.Generator().manual_seed(5)
        self.context: dict[str, Any] = {}
        self.rows: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.weights: list[torch.Tensor] = []
        self.lists = torch.full((self.ROOM, topk), -1).int() if topk else None
        for i in range(len(caches) if caches else 2):
            name = f"model.layers.{3 + i}.self_attn.attn"
            if sizes:
                impl, cache, rows = self.latent(name, sizes)
            else:
                impl = LibattnImpl(HQ, D, D**-0.5, HK, kv_cache_dtype=kv, **terms)
                cache = caches[i] if caches else torch.full((BLOCKS, HK, BLOCK, 2 * D), float("nan"), dtype=dtype)
                cache = torch.zeros(BLOCKS, HK, BLOCK, 2 * D, dtype=torch.uint8) if kv == "fp8" else cache
                rows = peaked(3, self.ROOM, HK, D, generator=g), torch.randn(3, self.ROOM, HK, D, generator=g)
            self.rows.append((rows[0].to(dtype), rows[1].to(dtype)))
            self.context[name] = types.SimpleNamespace(
                impl=impl, kv_cache=cache.to(self.device) if self.device.type != "cpu" else cache, layer_name=name, _k_scale_float=0.5,
                _v_scale_float=0.25, _k_scale=torch.tensor([0.5]))
        mode = types.SimpleNamespace(has_full_cudagraphs=lambda: True) if graphs else None
        self.config = types.SimpleNamespace(
            compilation_config=types.SimpleNamespace(static_forward_context=self.context, cudagraph_mode=mode),
            model_config=types.SimpleNamespace(dtype=dtype, max_model_len=self.ROOM))
        self.builder = LibattnMetadataBuilder(None, list(self.context), self.config, self.device)
        self.tables = torch.randperm(BLOCKS, generator=g)[:30].reshape(3, 10).int()

    def latent(self, name: str, sizes: Latent) -> tuple[Any, torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        """An MLA layer's implementation, its cache, and latent rows and rotated parts of the requests."""
        heads, nope, rope, rank, width = sizes
        weight = (torch.randn(heads * (nope + width), rank, generator=self.generator) * rank**-0.5).to(self.dtype)
        self.weights.append(weight.view(heads, nope + width, rank).double())
        impl = LatentImpl(heads, rank + rope, (nope + rope)**-0.5, kv_lora_rank=rank, qk_nope_head_dim=nope, qk_rope_head_dim=rope,
                          v_head_dim=width, kv_cache_dtype=self.kv, topk_indices_buffer=self.lists,
                          indexer=types.SimpleNamespace(topk_indices_buffer=self.lists) if self.topk and self.context else None,
                          kv_b_proj=types.SimpleNamespace(prefix=name, weight=weight.to(self.device)))
        size, dtype = (656, torch.uint8) if self.kv == "fp8_ds_mla" else (rank + rope, self.dtype)
        cache = torch.full((BLOCKS, BLOCK, size), 255 if dtype == torch.uint8 else float("nan"), dtype=dtype)
        rotated = peaked(3, self.ROOM, rope, generator=self.generator)
        return impl, cache, (torch.randn(3, self.ROOM, rank, generator=self.generator), rotated.bfloat16().float())

    def batch(self, queries: list[int], lengths: list[int], requests: list[int] | None = None) -> Any:
        """vLLM's metadata, its arrays on the device; of the first requests by default."""
        m = metadata(queries, lengths, self.tables[requests if requests is not None else slice(len(queries))])
        for name in ("query_start_loc", "seq_lens", "block_table_tensor", "slot_mapping"):
            setattr(m, name, getattr(m, name).to(self.device))
        m.max_seq_len = self.ROOM
        return m

    def inputs(self, queries: list[int], lengths: list[int], padding: int = 0) -> list[list[torch.Tensor]]:
        """q and the step's new rows of each layer, on the CPU; those of padding are NaN."""
        count = sum(queries) + padding
        heads, size = (self.sizes.heads, self.sizes.nope + self.sizes.rope) if self.sizes else (HQ, D)
        return [[peaked(count, heads, size, generator=self.generator).to(self.dtype)] +
                [torch.cat([t[r, n - c:n] for r, (c, n) in enumerate(zip(queries, lengths))] + [torch.full_like(t[0, :padding], torch.nan)])
                 for t in rows] for rows in self.rows]

    def forward(self, inputs: list[list[torch.Tensor]], m: Any) -> list[torch.Tensor]:
        """All layers; allocates the outputs."""
        outputs = []
        for (q, *new), layer, weight in zip(inputs, self.context.values(), self.weights or [None] * len(inputs)):
            out = torch.full((*q.shape[:2], self.sizes.width if self.sizes else D), 7.0, dtype=self.dtype, device=self.device)
            if self.sizes is None:
                layer.impl.forward(layer, q, *new, layer.kv_cache, m, out.flatten(1))
            elif layer.impl.is_sparse:  # since 0.32: the layer writes, and projects queries and outputs
                _write_latent(layer.kv_cache, m.slot_mapping, *new)
                up_k, up_v = weight.float().split([self.sizes.nope, self.sizes.width], dim=1)
                latent = torch.einsum("thd,hdc->htc", q[..., :self.sizes.nope], up_k).transpose(0, 1)
                found, lse = layer.impl.forward_mqa((latent, q[..., self.sizes.nope:]), layer.kv_cache, m, layer)
                assert lse is None
                out.copy_(torch.einsum("thc,hdc->thd", found, up_v))
            else:
                layer.impl.forward_mha(q, new[0], new[1][:, None], layer.kv_cache, m, layer._k_scale, out.flatten(1))
            outputs.append(out)
        return outputs

    def keys(self, layer: int) -> list[torch.Tensor]:
        """A layer's keys and values as its cache has them, [requests, tokens, heads, size]."""
        first, second = self.rows[layer]
        if self.sizes is None:
            return [(t.float() / scale).to(torch.float8_e4m3fn).float() * scale if self.kv == "fp8" else t
                    for t, scale in ((first, 0.5), (second, 0.25))]
        rows = (_tiles_of_fp8(first) if self.kv == "fp8_ds_mla" else first).double()
        k, v = (torch.einsum("hdc,rtc->rthd", part, rows)
                for part in self.weights[layer].split([self.sizes.nope, self.sizes.width], dim=1))
        return [torch.cat([k, second[:, :, None].double().expand(-1, -1, self.sizes.heads, -1)], dim=-1), v]

    def error(self, inputs: list[list[torch.Tensor]], outputs: list[torch.Tensor], queries: list[int], lengths: list[int]) -> float:
        """The worst of all layers, requests and elements, from float64."""
        starts, found = [sum(queries[:r]) for r in range(len(queries))], []

        def visible(r: int, count: int, length: int) -> torch.Tensor:
            seen = causal(count, length, self.terms.get("sliding_window") or 0)
            if self.lists is None:
                return seen
            return seen & (self.lists[starts[r]:starts[r] + count, None] == torch.arange(length)[:, None]).any(-1)

        for i, ((q, *_), out) in enumerate(zip(inputs, outputs)):
            # In float16 a sink far above the scores leaves rows under its least normal number.
            found.append(worst_of(out.cpu(), q, *self.keys(i), queries, lengths, (self.sizes.nope + self.sizes.rope if self.sizes else D)**-0.5,
                                  visible, least=2**-24 if self.dtype == torch.float16 else 0.0,
                                  soft_cap=self.terms.get("logits_soft_cap") or 0.0, sinks=self.terms.get("sinks")))
        return max(found)

    def step(self, queries: list[int], lengths: list[int], padding: int = 0) -> float:
        """An eager step; its error. Rows of padding are left alone."""
        inputs, m = self.inputs(queries, lengths, padding), self.builder.build(0, self.batch(queries, lengths), a_later_argument=1)
        for t, at in enumerate(n - c + i for c, n in zip(queries, lengths) for i in range(c if self.topk else 0)):
            self.lists[t] = -1
            chosen = torch.randperm(at + 1, generator=self.generator)[:self.topk - 2]
            self.lists[t, :len(chosen)] = chosen
        outputs = self.forward([[t.to(self.device) for t in layer] for layer in inputs], m)
        assert all(bool((out[sum(queries):] == 7.0).all()) for out in outputs)
        return self.error(inputs, outputs, queries, lengths)


def eager(engine: Engine) -> float:
    """A prefill, a chunk next to decodes, decodes, drafts."""
    lengths, found = [0, 0, 0], []
    for queries in ([20, 7, 100], [1, 30, 1], [1, 1, 1], [3, 1, 2]):
        lengths = [a + b for a, b in zip(lengths, queries)]
        found.append(engine.step(queries, lengths, 0 if engine.sizes else 3))
    return max(found)


def replayed(engine: Engine, count: int) -> float:
    """Prefills, then three replays of one graph of batches with `count` queries each, of which `build` alone says what is new; in the
    second a request is padding."""
    lengths = [40, 7, 100]
    found = [engine.step(lengths, lengths)]
    static = [[t.to(engine.device) for t in layer] for layer in engine.inputs([count] * 3, [n + count for n in lengths])]
    given = engine.batch([count] * 3, [count] * 3)
    given.slot_mapping.fill_(-1)
    m = engine.builder.build_for_cudagraph_capture(given)
    outputs: list[torch.Tensor] = []
    graph = Graph(lambda: outputs.__setitem__(slice(None), engine.forward(static, m)), engine.device)
    for requests in (3, 2, 3):
        queries, lengths = [count] * requests, [n + count for n in lengths[:requests]] + lengths[requests:]
        inputs = engine.inputs(queries, lengths, count * (3 - requests))
        for kept, new in zip(static, inputs):
            for a, b in zip(kept, new):
                a.copy_(b)
        now = engine.batch(queries, lengths[:requests])
        given.query_start_loc.copy_(torch.cat([now.query_start_loc, now.query_start_loc[-1:].expand(3 - requests)]))
        given.query_start_loc_cpu = given.query_start_loc.cpu()
        given.seq_lens.zero_()[:requests] = now.seq_lens
        given.slot_mapping.fill_(-1)[:count * requests] = now.slot_mapping
        assert engine.builder.build(0, given).captured == (3, 3 * count, count)
        with mock.patch("libattn.integrations.vllm.layers.batch_of", side_effect=AssertionError("planned in a replay")):
            graph.replay()
        found.append(engine.error(inputs, outputs, queries, lengths))
    return max(found)


class Steps(unittest.TestCase):
    def builder(self) -> LibattnMetadataBuilder:
        return LibattnMetadataBuilder(None, ["model.layers.3.self_attn.attn"], None, torch.device("cpu"))

    def layer(self) -> Any:
        return types.SimpleNamespace(layer_name="model.layers.3.self_attn.attn", _k_scale_float=0.5,
                                     _v_scale_float=0.25)

    def test_orders_of_the_cache(self) -> None:
        """Heads first, slots first, and pages of two layers next to each other."""
        for backend in each_backend():
            nan = float("nan")
            caches = [torch.full((BLOCKS, BLOCK, HK, 2 * D), nan).transpose(1, 2), torch.full((BLOCKS, 2, HK, BLOCK, 2 * D), nan)[:, 1]]
            for given in (None, caches):
                self.assertLess(eager(Engine(caches=given)), 2e-5, backend)
            row = libattn.torch.table()[0]
            self.assertEqual((row.index, row.decode.split("@")[0]), (3, backend))

    def test_terms(self) -> None:
        for backend in each_backend():
            for values in ({"sliding_window": 7}, {"logits_soft_cap": 5.0}, {"sinks": torch.linspace(-2, 5, HQ)}):
                self.assertLess(eager(Engine(**values)), 2e-5, (backend, values))

    def test_fp8_cache_with_scales(self) -> None:
        """stored = x / scale, read = stored * scale, with the layer's own scales."""
        for backend in each_backend():
            self.assertLess(eager(Engine(kv="fp8")), 1e-4, backend)

    def test_profiling_run_is_zero(self) -> None:
        impl = LibattnImpl(HQ, D, D**-0.5, HK)
        out = torch.ones(5, HQ * D)
        impl.forward(self.layer(), torch.ones(5, HQ, D), None, None, torch.empty(0), None, output=out)
        self.assertEqual(float(out.abs().max()), 0.0)

    def test_shared_cache_is_not_written(self) -> None:
        libattn.torch.configure(ignore_environment=True)
        cache = torch.zeros(BLOCKS, HK, BLOCK, 2 * D)
        impl = LibattnImpl(HQ, D, D**-0.5, HK, kv_sharing_target_layer_name="model.layers.1.self_attn.attn")
        m = self.builder().build(0, metadata([4], [4], torch.arange(4).int()[None]))
        q = torch.randn(4, HQ, D)
        impl.forward(self.layer(), q, q[:, :HK], q[:, :HK], cache, m, torch.empty(4, HQ * D))
        self.assertEqual(float(cache.abs().max()), 0.0)

    def test_update_block_table(self) -> None:
        builder = self.builder()
        first = builder.build(0, metadata([2], [2], torch.arange(4).int()[None]))
        other = builder.update_block_table(first, blk_table=torch.ones(1, 4).int(), slot_mapping=torch.zeros(2).long())
        self.assertIsNot(first, other)
        self.assertEqual(other.block_table.tolist(), [[1, 1, 1, 1]])
        self.assertEqual(first.block_table.tolist(), [[0, 1, 2, 3]])

    def test_encoder_and_cross(self) -> None:
        libattn.torch.configure(ignore_environment=True)
        generator = torch.Generator().manual_seed(2)
        q = peaked(12, HQ, D, generator=generator)
        out = torch.empty(12, HQ * D)
        encoder = LibattnImpl(HQ, D, D**-0.5, HQ, attn_type="encoder_only")
        m = self.builder().build(0, metadata([5, 7], [5, 7], torch.zeros(2, 1).int()))
        encoder.forward(self.layer(), q, q, q, torch.empty(0), m, out)
        keys = q.split([5, 7])
        self.assertLess(worst_of(out.view(12, HQ, D), q, keys, keys, [5, 7], [5, 7], D**-0.5, lambda r, n, _: torch.ones(n, n).bool()), 2e-5)
        cache = torch.full((BLOCKS, HK, BLOCK, 2 * D), float("nan"))
        keys = peaked(20, HK, D, generator=generator)
        given = metadata([3], [3], torch.tensor([[4, 2]]).int())
        given.encoder_seq_lens, given.encoder_seq_lens_cpu = torch.tensor([20]).int(), torch.tensor([20]).int().numpy()
        given.slot_mapping = torch.cat([64 + torch.arange(16), 32 + torch.arange(4)])
        cross = LibattnImpl(HQ, D, D**-0.5, HK, attn_type="encoder_decoder")
        for k in (keys, None):  # the second step brings no keys
            out = torch.empty(3, HQ * D)
            cross.forward(self.layer(), q[:3], k, k, cache, self.builder().build(0, given), out)
            expected, _ = attention(q[:3], keys, keys, D**-0.5, torch.ones(3, 20, dtype=torch.bool))
            self.assertLess(worst(out.view(3, HQ, D), expected), 2e-5)

    def test_a_connector_that_knows_other_metadata(self) -> None:
        """vLLM's example of a KV connector is refused next to MLA."""
        config = types.SimpleNamespace(kv_transfer_config=types.SimpleNamespace(kv_connector="ExampleConnector"))
        with mock.patch.object(describe, "config", lambda: config), self.assertRaisesRegex(
                libattn.UnsupportedError, "kv_transfer_config: ExampleConnector, next to MLA; to serve this model without"):
            LatentImpl(4, 40, 1, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=24)

    def test_latent_layers(self) -> None:
        """MLA layers of one builder: dense, over an indexer's lists, and over lists with rows of ``fp8_ds_mla``."""
        for backend in each_backend():
            for topk, kv in ((0, "auto"), (9, "auto"), (9, "fp8_ds_mla")):
                engine = Engine(sizes=Latent() if kv == "auto" else Latent(rope=64, rank=512), topk=topk, kv=kv)
                # A code of e4m3 that flips where float32 rounds a scale is worth 3e-3 here.
                self.assertLess(eager(engine), 1e-4 if kv == "auto" else 1e-2, (backend, topk, kv))
                self.assertEqual({layer.impl.is_sparse for layer in engine.context.values()}, {versions.LATENT_QUERIES and topk > 0})
            m = engine.builder.build(0, engine.batch([2, 1], [2, 1]))
            self.assertEqual((m.num_decodes, m.num_decode_tokens, m.num_prefills), (0, 0, 2))

    def test_multimodal_prefixes(self) -> None:
        """Ranges of images see themselves; on windowed layers past the window, or clamped to it as Gemma 4 has them."""
        ranges = {0: [(2, 9)], 2: [(1, 1), (5, 20), (24, 32)]}
        tables = torch.arange(12).reshape(3, 4).int()
        lengths = [12, 7, 33]
        generator = torch.Generator().manual_seed(5)
        for backend in ("cpu_ref", "cpu_simd"):
            for window, clamp in ((0, False), (6, False), (6, True)):
                libattn.torch.configure(ignore_environment=True, backend=backend)
                given = metadata(lengths, lengths, tables)
                given.mm_req_doc_ranges = ranges
                layer = self.layer()
                layer.use_mm_prefix, layer.mm_prefix_clamp_sliding_window = True, clamp
                q, k, v = (peaked(sum(lengths), h, D, generator=generator) for h in (HQ, HK, HK))
                out = torch.empty(sum(lengths), HQ * D)
                impl = LibattnImpl(HQ, D, D**-0.5, HK, sliding_window=window or None)
                impl.forward(layer, q, k, v, torch.zeros(BLOCKS, HK, BLOCK, 2 * D), self.builder().build(0, given), out)

                def visible(r: int, n: int, _: int, window: int = window, clamp: bool = clamp) -> torch.Tensor:
                    seen, near = causal(n, n, window), causal(n, n, window) | ~causal(n, n)
                    for first, last in ranges.get(r, ()):
                        inside = torch.zeros(n, n, dtype=torch.bool)
                        inside[first:last + 1, first:last + 1] = True
                        seen = seen | (inside & near if clamp else inside)
                    return seen

                error = worst_of(out.view(-1, HQ, D), q, k.split(lengths), v.split(lengths), lengths, lengths, D**-0.5, visible)
                self.assertLess(error, 2e-5, (backend, window, clamp))
        found = LibattnBackend.validate_configuration(head_size=64, dtype=torch.float32, use_mm_prefix=True)
        self.assertEqual(found, [])

    def test_fused_output_quantization(self) -> None:
        """fp8 with the given scale: the plain output over it, rounded; to the neighbour where float32 ends on a tie."""
        tables = torch.arange(4).int()[None]
        generator = torch.Generator().manual_seed(6)
        for backend in each_backend():
            q, k, v = (peaked(9, h, D, generator=generator).bfloat16() for h in (HQ, HK, HK))
            results = []
            for scale in (None, torch.tensor([0.02])):
                impl = LibattnImpl(HQ, D, D**-0.5, HK)
                out = torch.empty(9, HQ * D, dtype=torch.bfloat16 if scale is None else torch.float8_e4m3fn)
                impl.forward(self.layer(), q, k, v, torch.empty(0), None, out.view(torch.uint8), scale)  # profiling
                impl.forward(self.layer(), q, k, v, torch.zeros(BLOCKS, HK, BLOCK, 2 * D).bfloat16(),
                             self.builder().build(0, metadata([9], [9], tables)), out, scale)
                results.append(out.float() * (1.0 if scale is None else scale))
            plain, fused = results
            limit = plain.abs().clamp_max(448 * 0.02) * (0.0625 + 0.01) + 0.02 * 2**-9
            self.assertTrue(bool(((fused - plain.clamp(-448 * 0.02, 448 * 0.02)).abs() <= limit).all()), backend)
            self.assertGreater(float((fused != plain).float().mean()), 0.5)
        with self.assertRaisesRegex(libattn.InvalidArgumentError, "output_scale: None next to output_block_scale"):
            impl.forward(self.layer(), q, k, v, torch.empty(0), None, out, None, torch.ones(1))

    def test_fused_nvfp4(self) -> None:
        """Pairs of e2m1, and block scales in tiles of 128 rows by 4; by the formulas of docs/semantics.md."""
        generator = torch.Generator().manual_seed(6)
        numbers = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
        numbers = torch.cat([numbers, -numbers])
        for heads, rows, backend in ((HQ, 150, "cpu_ref"), (HQ, 150, "cpu_simd"), (5, 9, "cpu_simd")):
            libattn.torch.configure(ignore_environment=True, backend=backend)
            q, k, v = (peaked(rows, h, D, generator=generator).bfloat16() for h in (heads, 1, 1))
            groups = heads * D // 16
            out = torch.empty(rows, heads, D // 2, dtype=torch.uint8)
            tiles = torch.full((-(-rows // 128) * 128, -(-groups // 4) * 4), float("nan")).to(torch.float8_e4m3fn)
            plain, scale = torch.empty(rows, heads * D, dtype=torch.bfloat16), torch.tensor([[40.0]])
            impl, cache = LibattnImpl(heads, D, D**-0.5, 1), torch.zeros(BLOCKS, 1, BLOCK, 2 * D).bfloat16()
            self.assertEqual([impl.fused_output_quant_supported(key) for key in ("nvfp4", "fp8", "int8")], [True, True, False])
            self.assertFalse(LibattnImpl(heads, 72, 0.1, 1).fused_output_quant_supported("nvfp4"))
            tables = torch.arange(10).int()[None]
            for given in ((plain,), (out, scale, tiles)):
                impl.forward(self.layer(), q, k, v, cache, self.builder().build(0, metadata([rows], [rows], tables)), *given)
            found = torch.empty(rows, groups)
            flat = tiles.flatten().float()
            for r in range(rows):  # where CUTLASS looks for the scale of a row and a column
                for c in range(groups):
                    tile = r // 128 * (tiles.shape[1] // 4) + c // 4
                    found[r, c] = flat[tile * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4]
            self.assertEqual(float(flat.sum()), float(found.sum()), "padding is zero")
            blocks = plain.view(rows, groups, 16).float()
            wanted = (40.0 * blocks.abs().amax(-1) / 6).clamp_max(448)
            self.assertTrue(bool(((found - wanted).abs() <= wanted / 16 + 2**-10 + 0.02 * wanted).all()), (backend, rows))
            codes = torch.stack([out & 15, out >> 4], -1).view(rows, groups, 16).long()
            error = (numbers[codes] * found[..., None] / 40 - blocks).abs()
            limit = blocks.abs().amax(-1, keepdim=True) * (1 / 6 + 0.08) + 2**-9 / 40
            self.assertTrue(bool((error <= limit).all()), (backend, rows, float((error - limit).max())))
            tiles.copy_(torch.ones(()).to(torch.float8_e4m3fn))
            impl.forward(self.layer(), q, k, v, torch.empty(0), None, out, scale, tiles)  # profiling
            self.assertEqual((int(out.sum()), float(tiles.float().sum())), (0, 0.0))

    def test_causality_per_request(self) -> None:
        libattn.torch.configure(ignore_environment=True)
        generator = torch.Generator().manual_seed(7)
        given = metadata([6, 9], [6, 9], torch.arange(8).reshape(2, 4).int())
        given.causal = torch.tensor([True, False])
        q, k, v = (peaked(15, h, D, generator=generator) for h in (HQ, HK, HK))
        out = torch.empty(15, HQ * D)
        LibattnImpl(HQ, D, D**-0.5, HK).forward(self.layer(), q, k, v, torch.zeros(BLOCKS, HK, BLOCK, 2 * D),
                                                self.builder().build(0, given), out)
        error = worst_of(out.view(-1, HQ, D), q, k.split([6, 9]), v.split([6, 9]), [6, 9], [6, 9], D**-0.5,
                         lambda r, n, _: causal(n, n) | given.causal.logical_not()[r])
        self.assertLess(error, 2e-5)

    def test_captured_steps(self) -> None:
        """What a replay finds: `build` alone brings the plan of the captured shape to the next batch."""
        for backend in each_backend():
            for count in (1, 3):
                self.assertLess(replayed(Engine(graphs=True), count), 2e-5, (backend, count))
            self.assertLess(replayed(Engine(graphs=True, sizes=Latent()), 1), 1e-4, backend)

    def test_what_captures_keep(self) -> None:
        """Plans through dummy steps, and a batch for arrays of the same addresses."""
        libattn.torch.configure(ignore_environment=True)
        engine = Engine(graphs=True)
        builder, given = engine.builder, engine.batch([1, 1, 1], [1, 1, 1])
        self.assertEqual(builder.build_for_cudagraph_capture(given).captured, (3, 3, 1))
        for lengths in ([17, 33, 5], [18, 34, 6]):
            given.seq_lens.copy_(torch.tensor(lengths))
            given.query_start_loc_cpu = given.query_start_loc.clone()  # vLLM's runner allocates it in each step
            plans = [bound.captured[3, 3, 1] for bound in builder.steps._bounds]
            builder.build_for_cudagraph_capture(given)  # as for a dummy step of an idle rank
            self.assertEqual([bound.captured[3, 3, 1] for bound in builder.steps._bounds], plans)
            kept = builder._kept.get((3, 3, 1))
            m = builder.build(0, given)
            self.assertEqual((m.captured, m.query_start_loc_cpu.tolist()), ((3, 3, 1), [0, 1, 2, 3]))
            self.assertIs(builder._kept[3, 3, 1], kept or builder._kept[3, 3, 1], "arrays of the same addresses")
        kept = builder._kept[3, 3, 1]
        self.assertIsNone(builder._again(replace(m, spans=m.seq_lens), given.block_table_tensor), "an image's span")
        given.block_table_tensor = given.block_table_tensor.clone()
        builder.build(0, given)
        self.assertIsNot(builder._kept[3, 3, 1], kept)
        self.assertIsNone(builder.build(0, engine.batch([4, 1], [4, 1])).captured)
        spec = types.SimpleNamespace(num_kv_heads=HK, head_size=D, block_size=BLOCK)
        self.assertEqual(LibattnMetadataBuilder.get_cudagraph_support(engine.config, spec).name, "UNIFORM_BATCH")
        with self.assertRaisesRegex(libattn.OrderError, "no layer has its cache"):
            self.builder().build_for_cudagraph_capture(given)

    def test_context_parallel(self) -> None:
        """Two processes that spread a cache, see spread.py."""
        found = LibattnBackend.validate_configuration(head_size=64, dtype=torch.float32, use_dcp=True)
        self.assertEqual(found, [])
        self.assertTrue(LibattnBackend.supports_dcp())
        windows = LibattnBackend.validate_configuration(head_size=64, dtype=torch.float32, use_dcp=True,
                                                        has_sliding_window=True)
        self.assertRegex("\n".join(windows), "context_parallel.*window")
        with tempfile.TemporaryDirectory() as folder:
            ranks = [subprocess.Popen([sys.executable, "spread.py", str(rank), f"{folder}/meet"], stdout=subprocess.PIPE,
                                      stderr=subprocess.STDOUT, text=True) for rank in range(2)]
            for rank in ranks:
                output, _ = rank.communicate(timeout=50)
                self.assertEqual(rank.returncode, 0, output)

    def test_one_plan_a_step(self) -> None:
        """Layers of one builder share a plan, which is brought to a batch once a step, also where layers of another
        builder run between them."""
        libattn.torch.configure(ignore_environment=True)
        context = {f"layers.{i}": types.SimpleNamespace(
            impl=LibattnImpl(HQ, D, D**-0.5, HK, sliding_window=8 if i % 2 else None), layer_name=f"layers.{i}",
            kv_cache=torch.zeros(BLOCKS, HK, BLOCK, 2 * D)) for i in range(6)}
        config = types.SimpleNamespace(compilation_config=types.SimpleNamespace(static_forward_context=context))
        builders = [LibattnMetadataBuilder(None, list(context)[i::2], config, torch.device("cpu")) for i in range(2)]
        calls: collections.Counter[str] = collections.Counter()
        plan, update = libattn.Model.plan, libattn.Plan.update
        libattn.Model.plan = lambda *a, **k: (calls.update(["create"]), plan(*a, **k))[1]  # type: ignore[method-assign]
        libattn.Plan.update = lambda *a, **k: (calls.update(["update"]), update(*a, **k))[1]  # type: ignore[method-assign]
        try:
            for n in (1, 2, 3):
                both = [b.build(0, metadata([1], [n], torch.arange(4).int()[None])) for b in builders]
                for i, layer in enumerate(context.values()):
                    q = torch.randn(1, HQ, D)
                    layer.impl.forward(layer, q, q[:, :HK], q[:, :HK], layer.kv_cache, both[i % 2],
                                       torch.empty(1, HQ * D))
        finally:
            libattn.Model.plan, libattn.Plan.update = plan, update  # type: ignore[method-assign]
        self.assertEqual(calls["update"], 3 * 2)
        self.assertLessEqual(calls["create"], 3 * 2)  # a sequence that grows past a power of two
        self.assertEqual([row.index for row in libattn.torch.table()], list(range(6)))

    def test_weights_loaded_again(self) -> None:
        """In place, as vLLM's loaders do, which leaves the tensor's version as it was."""
        for backend in each_backend():
            sinks = torch.nn.Parameter(torch.zeros(HQ, dtype=torch.bfloat16), requires_grad=False)
            impl, builder = LibattnImpl(HQ, D, D**-0.5, HK, sinks=sinks), self.builder()
            cache = torch.zeros(BLOCKS, HK, BLOCK, 2 * D)
            q, k, v = (torch.randn(5, heads, D) for heads in (HQ, HK, HK))
            for value in (0.0, 5.0):
                sinks.data.fill_(value)
                m, out = builder.build(0, metadata([5], [5], torch.arange(4).int()[None])), torch.empty(5, HQ * D)
                impl.forward(self.layer(), q, k, v, cache, m, out)
                expected, _ = attention(q, k, v, D**-0.5, causal(5, 5), sinks=sinks)
                self.assertLess(worst(out.view(5, HQ, D), expected), 2e-5, (backend, value))

    def test_a_layer_at_the_address_of_a_freed_one(self) -> None:
        """Over the same cache, which says nothing of the layer's scale."""
        libattn.torch.configure(ignore_environment=True)
        builder, cache = self.builder(), torch.zeros(BLOCKS, HK, BLOCK, 2 * D)
        q, k, v = (torch.randn(5, heads, D) for heads in (HQ, HK, HK))
        impl, out = None, torch.empty(5, HQ * D)
        for scale in (0.1, 0.3, 0.5, 0.7):
            del impl
            impl = LibattnImpl(HQ, D, scale, HK)
            impl.forward(self.layer(), q, k, v, cache, builder.build(0, metadata([5], [5], torch.arange(4).int()[None])), out)
            self.assertLess(worst(out.view(5, HQ, D), attention(q, k, v, scale, causal(5, 5))[0]), 2e-5, scale)

    def test_unknown_arguments(self) -> None:
        LibattnImpl(HQ, D, 0.1, HK, a_later_argument=None)
        with self.assertRaisesRegex(libattn.UnsupportedError, "a_later_argument: 3"):
            LibattnImpl(HQ, D, 0.1, HK, a_later_argument=3)

    def test_pages_of_an_unknown_form(self) -> None:
        for shape in ((2, 3), (4, 2, 16, 2 * D + 1)):
            with self.assertRaisesRegex(libattn.UnsupportedError, rf"{list(shape)}".replace("[", r"\[")):
                pages_of(torch.empty(shape), D, D)
