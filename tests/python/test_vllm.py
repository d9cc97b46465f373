# SPDX-License-Identifier: Apache-2.0
"""The vLLM adapter against vLLM's recorded interface. Inside the engine it runs by tools/test_engines.sh."""
import collections
import enum
import types
import unittest
from collections.abc import Callable
from typing import Any

import torch

import published
import libattn
import libattn.torch
from common import attention, causal, peaked, worst

registered: dict[Any, str] = {}


class _Custom(str):
    def get_path(self) -> str:
        return registered[self]


class _Registry:
    CUSTOM = _Custom("CUSTOM")


class _CpuPlatform:
    """As vLLM's own: whatever is selected, its own backend is what comes."""

    @classmethod
    def get_attn_backend_cls(cls, selected_backend: Any, config: Any, num_heads: int | None = None) -> str:
        return "vllm's own"


_Layout = enum.Enum("KVCacheLayout", ["LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"])
on_a_cpu = True
RECORDED = published.install("vllm-0.33.0", {
    "vllm.v1.attention.backends.registry": {
        "AttentionBackendEnum": _Registry,
        "register_backend": lambda backend, class_path=None, is_mamba=False: registered.update({backend: class_path})},
    "vllm.v1.kv_cache_interface": {"KVCacheLayout": _Layout},
    "vllm.platforms": {"cpu_platform_plugin": lambda: "vllm's own" if on_a_cpu else None},
    "vllm.platforms.cpu": {"CpuPlatform": _CpuPlatform}})

from libattn.integrations import vllm as adapter  # noqa: E402
from libattn.integrations.vllm.backend import (LibattnBackend, LibattnImpl, LibattnMetadataBuilder,  # noqa: E402
                                               pages_of)

BACKEND = RECORDED["modules"]["vllm.v1.attention.backend"]
HQ, HK, D, BLOCK, BLOCKS = 8, 2, 64, 16, 24


class Interface(unittest.TestCase):
    def test_entry_point(self) -> None:
        adapter.register()
        path = registered["CUSTOM"]
        self.assertEqual(path, f"{LibattnBackend.__module__}.{LibattnBackend.__qualname__}")

    def test_every_call_of_the_engine_fits(self) -> None:
        for ours, name in ((LibattnBackend, "AttentionBackend"), (LibattnMetadataBuilder, "AttentionMetadataBuilder"),
                           (LibattnImpl, "AttentionImpl")):
            self.assertEqual(published.mismatches(ours, BACKEND[name]), [])
            abstract = {m for m, c in BACKEND[name]["methods"].items() if c["abstract"]}
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
                             ({"head_size": 64, "kv_cache_dtype": "nvfp4"}, "kv_cache_dtype.*nvfp4"),
                             ({"head_size": 64, "use_mla": True}, "use_mla: True, supported: no"),
                             ({"head_size": 64, "attn_type": "telepathic"}, "attn_type.*telepathic.*decoder")):
            found = LibattnBackend.validate_configuration(**{**plain, **values})
            self.assertRegex("\n".join(found), text)

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
        with self.assertRaisesRegex(ValueError, "head_size is 60; allowed"):
            Ours.get_attn_backend_cls(_Registry.CUSTOM, self.config(head_size=60))

    def test_layouts_begin_with_the_backends(self) -> None:
        for backend in ("cpu_ref", "cpu_simd"):
            libattn.torch.configure(ignore_environment=True, backend=backend)
            found = LibattnBackend.supported_kv_cache_layouts()
            heads_first = LibattnBackend.get_kv_cache_stride_order() == (0, 1, 3, 2, 4)
            self.assertEqual(found[0].name, "LBHNC" if heads_first else "LBNHC")
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


class Steps(unittest.TestCase):
    def builder(self) -> LibattnMetadataBuilder:
        return LibattnMetadataBuilder(None, ["model.layers.3.self_attn.attn"], None, torch.device("cpu"))

    def layer(self) -> Any:
        return types.SimpleNamespace(layer_name="model.layers.3.self_attn.attn", _k_scale_float=0.5,
                                     _v_scale_float=0.25)

    def run_steps(self, backend: str, cache: torch.Tensor, bound: float,
                  stored: Callable[[torch.Tensor, float], torch.Tensor] = lambda x, scale: x, **values: Any) -> None:
        """Two steps of three requests, the second mixed, with padding rows; each element."""
        libattn.torch.configure(ignore_environment=True, backend=backend)
        generator = torch.Generator().manual_seed(11)
        window = values.pop("window", 0)
        impl = LibattnImpl(HQ, D, D**-0.5, HK, sliding_window=window or None, **values)
        tables = torch.randperm(BLOCKS, generator=generator)[:12].reshape(3, 4).int()
        k_all = peaked(3, 64, HK, D, generator=generator)
        v_all = torch.randn(3, 64, HK, D, generator=generator)
        for query_lens, seq_lens in (([9, 33, 1], [9, 33, 1]), ([1, 20, 2], [10, 53, 3])):
            m = self.builder().build(common_prefix_len=0,
                                     common_attn_metadata=metadata(query_lens, seq_lens, tables), a_later_argument=1)
            rows = sum(query_lens) + 3
            q = peaked(rows, HQ, D, generator=generator)
            k, v = (torch.cat([t[r, n - c:n] for r, (c, n) in enumerate(zip(query_lens, seq_lens))]
                              + [torch.full((3, HK, D), float("nan"))]) for t in (k_all, v_all))
            out = torch.full((rows, HQ * D), 7.0)
            impl.forward(self.layer(), q, k, v, cache, m, out)
            at = 0
            for r, (count, length) in enumerate(zip(query_lens, seq_lens)):
                expected, _ = attention(q[at:at + count], stored(k_all[r, :length], 0.5),
                                        stored(v_all[r, :length], 0.25), D**-0.5, causal(count, length, window),
                                        values.get("logits_soft_cap") or 0.0, values.get("sinks"))
                self.assertLess(worst(out.view(rows, HQ, D)[at:at + count], expected), bound, (backend, r))
                at += count
            self.assertTrue(bool((out[at:] == 7.0).all()), "rows behind the last token are left alone")
        row = libattn.torch.table()[0]
        self.assertEqual((row.index, row.decode.split("@")[0]), (3, backend))

    def test_both_forms_of_the_cache(self) -> None:
        for backend in ("cpu_ref", "cpu_simd"):
            nan = float("nan")
            self.run_steps(backend, torch.full((BLOCKS, HK, BLOCK, 2 * D), nan), 2e-5)
            self.run_steps(backend, torch.full((BLOCKS, BLOCK, HK, 2 * D), nan).transpose(1, 2), 2e-5)
            self.run_steps(backend, torch.full((2, BLOCKS, BLOCK, HK, D), nan), 2e-5)

    def test_terms(self) -> None:
        for backend in ("cpu_ref", "cpu_simd"):
            for values in ({"window": 7}, {"logits_soft_cap": 5.0}, {"sinks": torch.linspace(-2, 5, HQ)}):
                self.run_steps(backend, torch.full((BLOCKS, HK, BLOCK, 2 * D), float("nan")), 2e-5, **values)

    def test_fp8_cache_with_scales(self) -> None:
        """stored = x / scale, read = stored * scale, with the layer's own scales."""
        for backend in ("cpu_ref", "cpu_simd"):
            self.run_steps(backend, torch.zeros(BLOCKS, HK, BLOCK, 2 * D, dtype=torch.uint8), 1e-4,
                           lambda x, scale: (x / scale).to(torch.float8_e4m3fn).float() * scale, kv_cache_dtype="fp8")

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
        for begin, end in ((0, 5), (5, 12)):
            part = q[begin:end]
            expected, _ = attention(part, part, part, D**-0.5, torch.ones(end - begin, end - begin, dtype=torch.bool))
            self.assertLess(worst(out.view(12, HQ, D)[begin:end], expected), 2e-5)
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

    def test_unknown_arguments(self) -> None:
        LibattnImpl(HQ, D, 0.1, HK, a_later_argument=None)
        with self.assertRaisesRegex(libattn.UnsupportedError, "a_later_argument: 3"):
            LibattnImpl(HQ, D, 0.1, HK, a_later_argument=3)

    def test_pages_of_an_unknown_form(self) -> None:
        with self.assertRaisesRegex(libattn.UnsupportedError, r"\[2, 3\]"):
            pages_of(torch.empty(2, 3), D)


if __name__ == "__main__":
    unittest.main()
