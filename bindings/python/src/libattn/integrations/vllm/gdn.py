# SPDX-License-Identifier: Apache-2.0
"""vLLM's gated delta layers (Qwen3-Next, Qwen3.5): the convolution and the rule are libattn's, over vLLM's cache of states;
projections, the gated norm and the cache's blocks stay vLLM's.

The backend stands in vLLM's registry as ``MambaAttentionBackendEnum.CUSTOM``, and the layer in place of vLLM's. In the memory of
a convolution's window channels come first, whatever ``VLLM_SSM_CONV_STATE_LAYOUT`` says: vLLM only copies it whole.
"""
from __future__ import annotations

from typing import Any

import torch
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.attention.backends.utils import mamba_get_block_table_tensor

from ..._declarations import Status, attn_io_recurrent
from ...errors import make
from ...layers import LayerDesc
from ...torch.steps import Member
from ...torch.store import Params
from . import describe
from .backend import LibattnMetadataBuilder, graph_support
from .layers import index_of, reserve
from .metadata import LibattnMetadata, batch_of

#: The last line of a refusal.
LEAVE = """supported: no; to leave gated delta layers to vLLM: --additional-config '{"libattn": {"gdn": false}}'"""


class LibattnStateBackend(AttentionBackend):  # type: ignore[misc]
    """Names the builder; layers refuse what is not served when they are made."""

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_builder_cls() -> type[StateBuilder]:
        return StateBuilder

    @classmethod
    def is_ssm(cls) -> bool:
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True


class StateBuilder(LibattnMetadataBuilder):
    """Each request's slot is a block of its table: the first, or where the prefix cache is on that of its last token. With drafts
    it has one for the state after each token of a step, and goes on from where its context has got since."""

    supports_update_block_table: bool = False
    looks_for_prefix: bool = False

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device, *args: Any,
                 **kwargs: Any) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device, *args, **kwargs)
        most = max(vllm_config.scheduler_config.max_num_seqs,
                   getattr(vllm_config.compilation_config, "max_cudagraph_capture_size", None) or 0)
        self.row = 1 + kv_cache_spec.num_speculative_blocks
        # Captured graphs read these where they are.
        self.slots = torch.zeros(most, self.row, dtype=torch.int32, device=device)
        self.accepted = torch.ones(most, dtype=torch.int32, device=device)
        self.context = torch.zeros(0, dtype=torch.int32, device=device)  # by first slot: keys before the request's last step
        self.mode = vllm_config.cache_config.mamba_cache_mode

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> Any:
        """What the backend that serves the layers can capture."""
        conv, (heads, size_v, size_k) = kv_cache_spec.shapes
        drafts = kv_cache_spec.num_speculative_blocks
        return graph_support([describe.gdn((max(conv) - heads * size_v) // (2 * size_k), heads, size_k, size_v,
                                           min(conv) + 1 - drafts, drafts, vllm_config.model_config.dtype, kv_cache_spec.dtypes[1],
                                           rounding=describe.rounding(vllm_config, 0))])

    def _metadata(self, m: Any) -> LibattnMetadata:
        found = super()._metadata(m)
        found.state_slots, found.accepted = self._fill(m)
        return found

    def _fill(self, m: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Each request's slots, in vLLM's own table where that has nothing else, and with drafts its accepted tokens."""
        table = m.block_table_tensor
        if self.mode == "none" and table.shape == (m.num_reqs, self.row) and table.is_contiguous():
            slots = table
        else:
            table = mamba_get_block_table_tensor(table, m.seq_lens, self.kv_cache_spec, self.mode)
            slots = self.slots[:m.num_reqs].copy_(table[:m.num_reqs, :self.row])
        if self.row == 1:
            return slots, None
        return slots, self._advance(m.seq_lens[:m.num_reqs], m.query_start_loc, slots[:, 0].long())

    def _advance(self, seq_lens: torch.Tensor, query_start_loc: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
        """How many tokens of its last step each request has kept, since the state after the last of them is where it goes on; after
        a piece of a prompt longer than a row 1, as that leaves one state."""
        if len(self.context) == 0:
            layers = self.vllm_config.compilation_config.static_forward_context
            self.context = self.context.new_zeros(len(layers[self.layer_names[0]].states.kv_cache))
        queries = query_start_loc[1:len(first) + 1] - query_start_loc[:len(first)]
        first = torch.where(queries > 0, first, 0)  # padding rows read block 0, which no request has
        context = (seq_lens - queries).int()
        kept = context - self.context[first]
        self.context[first] = context
        return self.accepted[:len(first)].copy_(torch.where((kept > 0) & (kept <= self.row), kept, 1))


class States:
    """A layer's states for `libattn.torch.steps.Steps`."""

    def __init__(self, layer: Any) -> None:
        self.layer, self.impl = layer, self
        # steps bind layers, when vLLM has no current configuration any more
        self.limits, self.batch_invariant = describe.limits(), describe.invariance()
        self.rounding = describe.rounding(describe.config(), index_of(layer.prefix) * layer.tp_size + getattr(layer, "tp_rank", 0))

    @property
    def kv_cache(self) -> torch.Tensor:
        """[slots, Hv, Dv, Dk]; without elements before vLLM has its cache."""
        found = getattr(self.layer, "kv_cache", ())
        return found[1] if len(found) == 2 else torch.empty(0)

    def describe(self, dtype: torch.dtype, device_seq_lens_only: bool) -> LayerDesc:
        layer = self.layer
        return describe.gdn(layer.num_k_heads // layer.tp_size, layer.num_v_heads // layer.tp_size, layer.head_k_dim,
                            layer.head_v_dim, layer.conv_kernel_size, layer.num_spec, dtype, layer.get_state_dtype()[1],
                            device_seq_lens_only=device_seq_lens_only, batch_invariant=self.batch_invariant, rounding=self.rounding)

    def params(self) -> Params:
        conv = self.layer.conv1d  # on a CPU with AMX vLLM packs the weight and keeps a copy
        weight = getattr(conv, "_cpu_unpacked_conv_weight", conv.weight)
        return (("a_log", self.layer.A_log), ("dt_bias", self.layer.dt_bias), ("conv_weight", weight.view(weight.shape[0], -1)))

    def version(self, layer: Any) -> Any:
        """A layer is bound again when this changes."""
        return self.layer.conv1d.weight.data_ptr()

    def member(self, layer: Any, kv_cache: torch.Tensor, m: LibattnMetadata, dtype: torch.dtype) -> Member:
        """The layer, its states and its windows as `Layer.bind_state` has them."""
        conv, state = self.layer.kv_cache
        windows = conv.flatten(1).unflatten(1, (max(conv.shape[1:]), -1))
        return Member(self.describe(dtype, m.seq_lens.device.type != "cpu"), index_of(self.layer.prefix), self.params(),
                      state.flatten(2).unsqueeze(1), windows.unsqueeze(1))

    def run(self, m: LibattnMetadata, mixed_qkv: torch.Tensor, b: torch.Tensor, a: torch.Tensor, out: torch.Tensor) -> None:
        """Rows [T, 2 Hk Dk + Hv Dv], [T, Hv] twice, [T, Hv, Dv]."""
        m.steps.run(self, self, self.kv_cache, m, mixed_qkv.dtype, lambda: batch_of(m, mixed_qkv.shape[0]), (None, None, None, out),
                    extension=lambda bound: bound.io(attn_io_recurrent, mixed_qkv=mixed_qkv, a=a, b=b))


def _refuse(layer: Any) -> None:
    """What the engine asks of states and libattn does not do over vLLM's cache."""
    cache, window = layer.cache_config, layer.get_state_dtype()[0]
    mode = getattr(cache, "mamba_cache_mode", "none")
    for field, asked in (
            ("mamba_cache_dtype", window != describe.dtype() and f"windows of {window} and activations of {describe.dtype()}"),
            ("speculative_config", layer.num_spec and mode != "none" and f"{layer.num_spec} tokens with a prefix cache, for which "
             "vLLM moves windows in its own form (--no-enable-prefix-caching)"),
            ("kv_transfer_config", layer.num_spec and getattr(describe.config(), "kv_transfer_config", None) and
             f"a connector and {layer.num_spec} drafted tokens, kept ones of which are counted from a request's first step"),
            ("mamba_cache_mode", mode == "all" and "all"),
            ("use_replayssm", getattr(cache, "use_replayssm", False)),
            ("hidden_act", layer.activation not in ("silu", "swish") and layer.activation)):
        if asked:
            raise make(Status.UNSUPPORTED, field, f"{asked}, next to gated delta layers; {LEAVE}")


def replacement(base: type) -> type:
    """vLLM's own layer, unless the engine runs ``CUSTOM`` and its operator does not leave it: then libattn's, or a refusal."""
    class LibattnGdn(base):  # type: ignore[misc,valid-type]
        serves: bool = False

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.serves = describe.is_asked() and describe.options().get("gdn", True)
            if not self.serves:
                return
            _refuse(self)
            self._forward_method = self.forward_cuda  # projections by torch on every device
            self.enable_fused_gdn_spec_decode = False  # since 0.32
            self._checkpoint_alignment = None  # since 0.33: prompts are cut where the prefix cache keeps a state
            self.states = States(self)
            desc = self.states.describe(describe.dtype(), describe.device()[0] != "cpu")
            describe.refuse_unserved(desc)
            reserve(self.states, desc, self.states.params())

        @property
        def mamba_type(self) -> Any:
            return MambaAttentionBackendEnum.CUSTOM if self.serves else super().mamba_type

        def _forward_core(self, mixed_qkv: torch.Tensor, b: torch.Tensor, a: torch.Tensor, core_attn_out: torch.Tensor,
                          *rest: Any, **more: Any) -> None:
            if not self.serves:
                super()._forward_core(mixed_qkv, b, a, core_attn_out, *rest, **more)
                return
            from vllm.forward_context import get_forward_context

            metadata = get_forward_context().attn_metadata
            m = metadata.get(self.prefix) if isinstance(metadata, dict) else None
            if m is not None:  # None: a run that measures memory
                self.states.run(m, mixed_qkv, b, a, core_attn_out)

    return LibattnGdn


__all__ = ["LibattnStateBackend", "StateBuilder", "States", "replacement"]
