# SPDX-License-Identifier: Apache-2.0
"""vLLM's gated delta layers through the adapter: its class is replaced where the model defines it, and steps over its cache of
states are held against Transformers' layer."""
import types
import unittest
from typing import Any
from unittest import mock

import torch
from torch import nn

import libattn
import libattn.torch
import published
import test_vllm as recorded
from common import each_backend, worst
from libattn.integrations import vllm as adapter
from libattn.integrations.vllm import describe, versions
from libattn.integrations.vllm.gdn import LibattnStateBackend, StateBuilder
from test_recurrent import HIDDEN, Subject, qwen3_5, worst_of_steps

import vllm.envs
from vllm.model_executor.layers.mamba.gdn.base import GatedDeltaNetAttention
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.registry import AttentionBackendEnum, MambaAttentionBackendEnum

SLOTS, NAME = 9, "model.layers.2.linear_attn"
RECORDED = recorded.RECORDED["modules"]
adapter.register()


class QwenGatedDeltaNetAttention(GatedDeltaNetAttention):
    """vLLM's as far as the adapter meets it; to define it calls the adapter's hook."""

    def __init__(self, subject: Subject, **values: Any) -> None:
        gdn, module = subject.gdn, subject.module
        self.tp_size, self.num_k_heads, self.num_v_heads = 1, gdn.num_k_heads, gdn.num_v_heads
        self.head_k_dim, self.head_v_dim, self.conv_kernel_size = gdn.head_size_k, gdn.head_size_v, gdn.conv_width
        self.prefix, self.activation, self.num_spec, self.kv_cache = NAME, "silu", 0, ()
        self.cache_config = types.SimpleNamespace(mamba_cache_mode="none")
        self.A_log, self.dt_bias, self.conv1d = module.A_log, module.dt_bias, nn.Module()
        self.conv1d.weight, self.conv1d.bias = module.conv1d.weight, None
        self._forward_method = self.forward_cpu
        self.channels = module.conv1d.weight.shape[0]
        self.__dict__.update(values)

    mamba_type = MambaAttentionBackendEnum.GDN_ATTN

    def get_state_shape(self) -> Any:
        return (self.conv_kernel_size - 1 + self.num_spec, self.channels), (self.num_v_heads, self.head_v_dim, self.head_k_dim)

    def get_state_dtype(self) -> Any:
        return torch.float32, torch.float32

    def forward_cpu(self) -> str:
        return "vLLM's own"

    def forward_cuda(self) -> str:
        return "its projections"

    def _forward_core(self, mixed_qkv: Any, b: Any, a: Any, core_attn_out: Any) -> None:
        core_attn_out.fill_(-1.0)


LibattnGdn = recorded._replaced["QwenGatedDeltaNetAttention"]


class GatedDelta(unittest.TestCase):
    rounds_states = False

    def setUp(self) -> None:
        self.addCleanup(recorded.current.__setitem__, 0, None)
        self.addCleanup(recorded.step_metadata.__setitem__, 0, None)
        libattn.torch.configure(ignore_environment=True)
        self.subject = qwen3_5()

    def configure(self, mode: str = "none", **additional: Any) -> Any:
        graphs = types.SimpleNamespace(has_full_cudagraphs=lambda: True)
        model = types.SimpleNamespace(dtype=torch.float32, max_model_len=128, seed=5)
        recorded.current[0] = types.SimpleNamespace(
            attention_config=types.SimpleNamespace(backend=AttentionBackendEnum.CUSTOM), model_config=model,
            additional_config={"libattn": additional},
            mamba_config=types.SimpleNamespace(enable_stochastic_rounding=self.rounds_states, stochastic_rounding_philox_rounds=7),
            cache_config=types.SimpleNamespace(mamba_cache_mode=mode),
            scheduler_config=types.SimpleNamespace(max_num_seqs=8, max_num_batched_tokens=256, enable_chunked_prefill=True),
            compilation_config=types.SimpleNamespace(static_forward_context={}, cudagraph_mode=graphs))
        return recorded.current[0]

    def layer(self, **values: Any) -> Any:
        found = LibattnGdn(self.subject, **values)
        found.__init__(self.subject, **values)
        return found

    def served(self, mode: str = "none", **values: Any) -> tuple[Any, Any]:
        """A layer with its cache, pages as vLLM has them, and its builder."""
        config = self.configure(mode)
        layer = self.layer(**values)
        self.assertIsNone(layer._checkpoint_alignment)
        self.assertEqual((layer.mamba_type, layer._forward_method()), (MambaAttentionBackendEnum.CUSTOM, "its projections"))
        shapes = layer.get_state_shape()
        if mode == "align":  # as with VLLM_SSM_CONV_STATE_LAYOUT=DS
            shapes = shapes[0][::-1], shapes[1]
        sizes = [torch.Size(shape).numel() for shape in shapes]
        pages = torch.full((SLOTS, sum(sizes) + 24), float("nan"))  # padded, as pages next to attention's are
        layer.kv_cache = [part.unflatten(1, shape) for part, shape in zip(pages[:, :sum(sizes)].split(sizes, 1), shapes)]
        config.compilation_config.static_forward_context[NAME] = layer
        spec = types.SimpleNamespace(shapes=shapes, dtypes=layer.get_state_dtype(), block_size=16,
                                     num_speculative_blocks=layer.num_spec)
        return layer, StateBuilder(spec, [NAME], config, torch.device("cpu"))

    def step(self, layer: Any, metadata: Any, x: torch.Tensor) -> torch.Tensor:
        mixed, a, b = self.subject.inputs(x)
        out = torch.full((len(x), layer.num_v_heads, layer.head_v_dim), 7.0)
        recorded.step_metadata[0] = {NAME: metadata}
        layer._forward_core(mixed, b, a, out)
        return out

    def test_registry(self) -> None:
        self.assertEqual(recorded.registered[MambaAttentionBackendEnum.CUSTOM],
                         f"{LibattnStateBackend.__module__}.{LibattnStateBackend.__qualname__}")
        self.assertIs(LibattnStateBackend.get_builder_cls(), StateBuilder)
        recorded._replaced.pop("QwenGatedDeltaNetAttention")  # as where the model was imported before the plugin
        adapter.register()
        self.assertTrue(issubclass(recorded._replaced["QwenGatedDeltaNetAttention"], QwenGatedDeltaNetAttention))
        self.assertEqual((LibattnStateBackend.is_ssm(), LibattnStateBackend.supports_batch_invariance()), (True, True))

    def test_every_call_of_the_engine_fits(self) -> None:
        qwen = RECORDED["vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn"]["QwenGatedDeltaNetAttention"]
        for ours, theirs in ((LibattnGdn, qwen), (StateBuilder, RECORDED["vllm.v1.attention.backend"]["AttentionMetadataBuilder"]),
                             (LibattnStateBackend, RECORDED["vllm.v1.attention.backend"]["AttentionBackend"])):
            self.assertEqual(published.mismatches(ours, theirs), [])
        self.assertLessEqual({"_forward_core", "get_state_shape", "forward_cuda"}, set(qwen["methods"]))

    def test_layers_of_others(self) -> None:
        """vLLM's recurrent layers are named, once; nothing is logged of libattn's, of attention, and of those that an operator left."""
        self.addCleanup(versions._warn.cache_clear)
        versions._warn.cache_clear()
        layer, _ = self.served()
        config = recorded.current[0]
        context = config.compilation_config.static_forward_context
        context["model.layers.3.self_attn.attn"] = types.SimpleNamespace()
        config.additional_config["libattn"]["gdn"] = False
        context["model.layers.4.linear_attn"] = self.layer()
        self.assertEqual(context["model.layers.4.linear_attn"].mamba_type, MambaAttentionBackendEnum.GDN_ATTN)

        def build() -> None:
            recorded.LibattnMetadataBuilder(None, ["model.layers.3.self_attn.attn"], config, torch.device("cpu"))

        with self.assertNoLogs():
            build()
        for name, kind in (("5.kda", "KimiGatedDeltaNetAttention"), ("6.kda", "KimiGatedDeltaNetAttention"), ("7.mixer", "MambaMixer2")):
            context[f"model.layers.{name}"] = type(kind, (), {"mamba_type": "vLLM's own"})()
        with self.assertLogs("libattn.integrations.vllm.versions", "WARNING") as logs:
            build()
            build()
        self.assertEqual([line.partition("own backends, not libattn, serve ")[2] for line in logs.output], [
            "2 KimiGatedDeltaNetAttention (the first model.layers.5.kda), 1 MambaMixer2 (the first model.layers.7.mixer); of recurrent "
            "layers libattn serves QwenGatedDeltaNetAttention"])

    def test_steps(self) -> None:
        """Prompts, a chunk over earlier context next to decodes, in slots of a table or, with a prefix cache, of its blocks."""
        for backend in ("cpu_ref", "cpu_simd"):
            for mode in ("none", "align"):
                libattn.torch.configure(ignore_environment=True, backend=backend)
                layer, builder = self.served(mode)
                tables = (torch.tensor([[3], [1]]) if mode == "none" else torch.tensor([[3, 5, 3, 5, 3], [1, 6, 1, 6, 1]])).int()
                at = [-1, -1]

                def step(queries: list[int], lengths: list[int], x: torch.Tensor) -> torch.Tensor:
                    given = recorded.metadata(queries, lengths, torch.zeros(2, 6).int())
                    given.block_table_tensor = tables
                    m = builder.build(0, given)
                    for r, slot in enumerate(m.state_slots.tolist()):  # vLLM copies states between blocks
                        if lengths[r] > queries[r] and slot != at[r]:
                            for part in layer.kv_cache:
                                part[slot] = part[at[r]]
                        at[r] = slot
                    out = self.step(layer, m, torch.cat([x, torch.full((3, HIDDEN), float("nan"))]))
                    self.assertTrue(bool((out[len(x):] == 7.0).all()), "rows of padding are left alone")
                    return self.subject.finish(out[:len(x)], x)

                self.assertLess(worst_of_steps(self.subject, step), 1e-3, (backend, mode))
                row = libattn.torch.table()[-1]
                self.assertEqual((row.index, row.kind, row.decode.split("@")[0]), (2, "recurrent", backend))

    def test_captured_steps(self) -> None:
        """A replay of three requests, of which one is padding, reads the slots that its batch has."""
        layer, builder = self.served()
        self.assertIs(StateBuilder.get_cudagraph_support(recorded.current[0], builder.kv_cache_spec),
                      AttentionCGSupport.UNIFORM_BATCH)
        hidden = torch.randn(2, 12, HIDDEN, generator=torch.Generator().manual_seed(5))
        tables = torch.tensor([[4], [7], [0]]).int()

        def given(queries: list[int], lengths: list[int]) -> Any:
            made = recorded.metadata(queries, lengths, torch.zeros(3, 6).int())
            made.block_table_tensor = tables
            return made

        self.step(layer, builder.build(0, given([9, 9, 0], [9, 9, 0])), hidden[:, :9].flatten(0, 1))
        self.assertEqual(builder.build_for_cudagraph_capture(given([1, 1, 1], [1, 1, 1])).captured, (3, 3, 1))
        tables.copy_(torch.tensor([[7], [4], [0]]))
        for t in (9, 10, 11):
            batch = given([1, 1, 0], [t + 1, t + 1, 0])
            batch.num_actual_tokens, batch.max_query_len = 3, 1
            m = builder.build(0, batch)
            self.assertEqual((m.captured, m.state_slots.data_ptr()), ((3, 3, 1), tables.data_ptr()))
            x = torch.stack([hidden[1, t], hidden[0, t], hidden[0, 0]])
            out = self.subject.finish(self.step(layer, m, x), x)
            for r, row in ((1, out[0]), (0, out[1])):
                expected = self.subject.module(hidden[r, :t + 1][None])[0, -1]
                self.assertLess(worst(row, expected), 1e-3, (t, r))

    def test_the_bits_of_a_request(self) -> None:
        """The same for a prompt alone and in pieces next to others. While steps run, vLLM has no current
        configuration; here it keeps what the stand-in reads."""
        generator = torch.Generator().manual_seed(9)
        inputs = [self.subject.inputs(torch.randn(150, HIDDEN, generator=generator)) for _ in range(2)]
        for backend in each_backend():
            found = []
            for steps in ([(150, 0)], [(70, 80), (1, 1), (79, 64)]):
                with mock.patch.object(vllm.envs, "VLLM_BATCH_INVARIANT", True):
                    layer, builder = self.served()
                    recorded.current[0] = types.SimpleNamespace(compilation_config=recorded.current[0].compilation_config)
                    rows, at = [], [0, 0]
                    for queries in steps:
                        mixed, a, b = (torch.cat([part[n:n + count] for part, n, count in zip(parts, at, queries)])
                                       for parts in zip(*inputs))
                        at = [n + count for n, count in zip(at, queries)]
                        given = recorded.metadata(list(queries), at, torch.zeros(2, 20).int())
                        given.block_table_tensor = torch.tensor([[3], [1]]).int()
                        recorded.step_metadata[0] = {NAME: builder.build(0, given)}
                        out = torch.empty(len(mixed), layer.num_v_heads, layer.head_v_dim)
                        layer._forward_core(mixed, b, a, out)
                        rows.append(out[:queries[0]])
                found.append(torch.cat(rows))
            self.assertTrue(torch.equal(*found), backend)

    def test_drafts(self) -> None:
        """Three drafted tokens a step, of which some are rejected: the next step goes on from the last that was kept. Pieces of
        prompts that are as short as a step of drafts, and steps without drafts, go by the same count."""
        for backend in each_backend():
            layer, builder = self.served(num_spec=3)
            self.assertIs(StateBuilder.get_cudagraph_support(recorded.current[0], builder.kv_cache_spec),
                          AttentionCGSupport.UNIFORM_BATCH)
            generator = torch.Generator().manual_seed(7)
            hidden = torch.randn(2, 60, HIDDEN, generator=generator)
            tables = torch.tensor([[3, 8, 5, 1], [7, 2, 4, 6]]).int()
            at = [0, 0]
            for queries, kept in (([20, 3], [20, 3]), ([2, 9], [2, 9]), ([4, 4], [1, 3]), ([4, 1], [4, 1]), ([1, 4], [1, 2]),
                                  ([0, 4], [0, 4]), ([4, 4], [2, 2]), ([1, 1], [1, 1])):
                given = recorded.metadata(queries, [n + c for n, c in zip(at, queries)], torch.zeros(2, 6).int())
                given.block_table_tensor = tables
                x = []
                for r, (count, right) in enumerate(zip(queries, kept)):
                    rows = hidden[r, at[r]:at[r] + count].clone()
                    rows[right:] = torch.randn(count - right, HIDDEN, generator=generator)  # drafts that are rejected
                    x.append(rows)
                x = torch.cat(x)
                out = self.subject.finish(self.step(layer, builder.build(0, given), x), x)
                for r, rows in enumerate(out.split(queries)):
                    end = at[r] + kept[r]
                    if end > at[r]:
                        expected = self.subject.module(hidden[r, :end][None])[0, at[r]:]
                        self.assertLess(worst(rows[:kept[r]], expected), 1e-3, (backend, queries, r))
                    at[r] = end

    def test_kept_tokens(self) -> None:
        """Counted from a request's first step on, whoever had its slots before; rows of padding touch no request's count."""
        _, builder = self.served(num_spec=3)
        tables = torch.tensor([[3, 8, 5, 1], [3, 8, 5, 1]]).int()  # the second row is stale
        for tokens, length, kept in ((20, 20, 1), (4, 24, 1), (4, 26, 2), (4, 30, 4), (1, 28, 1),  # 3 of the last step's 4 rejected
                                     (2, 2, 1), (1, 3, 2), (4, 7, 1),      # another request, whose prompt comes in short pieces
                                     (5, 5, 1), (3, 8, 1), (4, 12, 3)):    # the same again, after it was preempted
            given = recorded.metadata([tokens, 0], [length, 0], torch.zeros(2, 6).int())
            given.block_table_tensor = tables
            self.assertEqual(builder.build(0, given).accepted.tolist(), [kept, 1], (tokens, length))

    def test_a_run_that_measures_memory(self) -> None:
        layer, _ = self.served()
        out = torch.full((3, layer.num_v_heads, layer.head_v_dim), 7.0)
        layer._forward_core(None, None, None, out)
        self.assertTrue(bool((out == 7.0).all()))

    def test_left_to_vllm(self) -> None:
        """Where the engine runs another backend, or its operator says so."""
        for change in (lambda config: config.additional_config["libattn"].update(gdn=False),
                       lambda config: setattr(config.attention_config, "backend", "FLASH_ATTN")):
            change(self.configure())
            layer = self.layer()
            self.assertEqual((layer.serves, layer.mamba_type, layer._forward_method()),
                             (False, MambaAttentionBackendEnum.GDN_ATTN, "vLLM's own"))
            out = torch.zeros(2, 3)
            layer._forward_core(None, None, None, out)
            self.assertTrue(bool((out == -1.0).all()))

    def test_states_rounded_by_a_seed(self) -> None:
        """vLLM's two options reach the layer, whose states are other ones then, within a unit."""
        states = []
        for self.rounds_states in (False, True):
            layer, builder = self.served(get_state_dtype=lambda: (torch.float32, torch.float16))
            self.assertEqual(layer.states.describe(torch.float32, False).rounding,
                             libattn.RecurrentRounding(5 + (2 << 32), 7) if self.rounds_states else None)
            layer.kv_cache[1] = layer.kv_cache[1].half()
            given = recorded.metadata([6], [6], torch.tensor([[3, 0, 0, 0, 0, 0]]).int())
            self.step(layer, builder.build(0, given), torch.randn(6, HIDDEN, generator=torch.Generator().manual_seed(1)))
            states.append(layer.kv_cache[1][3].float())
        self.assertTrue(0.2 < (states[0] != states[1]).float().mean() < 0.8)
        self.assertTrue(bool(((states[0] - states[1]).abs() <= states[0].abs() * 2**-10 + 2**-24).all()))

    def test_refusals(self) -> None:
        """By name, with what to do, when the model makes the layer."""
        self.configure()
        for values, text in (({"num_spec": 3, "cache_config": types.SimpleNamespace(mamba_cache_mode="align")},
                              "speculative_config: 3 tokens with a prefix cache"),
                              ({"activation": "gelu"}, "hidden_act: gelu"),
                             ({"get_state_dtype": lambda: (torch.float16, torch.float32)}, "mamba_cache_dtype: windows of torch.float16"),
                             ({"cache_config": types.SimpleNamespace(mamba_cache_mode="all")}, "mamba_cache_mode: all"),
                             ({"cache_config": types.SimpleNamespace(use_replayssm=True)}, "use_replayssm: True")):
            with self.assertRaisesRegex(libattn.UnsupportedError, f"{text}.*next to gated delta layers; supported: no; .*gdn.: false"):
                self.layer(**values)
        self.configure().kv_transfer_config = object()
        self.layer()
        with self.assertRaisesRegex(libattn.UnsupportedError, "kv_transfer_config: a connector and 3 drafted tokens"):
            self.layer(num_spec=3)
        with mock.patch.object(describe, "dtype", lambda: torch.float64), self.assertRaisesRegex(
                libattn.UnsupportedError, "dtype: torch.float64 with states of torch.float32; supported: torch.float16"):
            self.layer(get_state_dtype=lambda: (torch.float64, torch.float32))
