# SPDX-License-Identifier: Apache-2.0
"""Two of vLLM's classes: the backend that answers, and the builder that plans (`layers`: the implementations that step).

Releases and what differs between them: `versions`. Methods take and ignore arguments that they do not know.
"""
from __future__ import annotations

from copy import copy
from dataclasses import replace
from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import AttentionBackend, AttentionCGSupport, AttentionMetadataBuilder

from ..._declarations import GraphLevel
from ...errors import AttnError
from ...layers import LayerDesc
from ...step import Batch
from ...torch.steps import Shape, Steps
from ...torch.store import store
from . import describe
from .layers import LatentImpl, LibattnImpl
from .metadata import CASCADE_KEYS, CASCADE_REQUESTS, LibattnMetadata, batch_of, host_copy, prefix_of, spans_of
from .ranks import likely, spread
from .versions import LATENT_QUERIES, CacheForm, refusals, warn_of_drafts, warn_of_norms, warn_of_states

#: What vLLM may ask that this adapter does not carry; the answer is a reason, never silence.
NOT_CARRIED = {
    "use_sparse": "sparse attention without MLA",
    "use_dcp": "decode context parallelism of sparse layers, whose outputs vLLM since 0.32 merges itself,",
    "use_pcp": "prefill context parallelism", "use_rswa": "reference sliding windows",
    "use_adaptive_verification": "query lengths that differ on host and device",
}


def _serves(head_size: int = 128, **terms: Any) -> bool:
    """Whether a usual layer with these terms can be served."""
    return not describe.reasons(describe.layer("layers.0", 8, 8, head_size, torch.bfloat16, **terms))


def _asks(**terms: Any) -> Any:
    """A method that answers whether a usual layer with these terms can be served."""
    return classmethod(lambda cls: _serves(**terms))


class LibattnBackend(CacheForm, AttentionBackend):  # type: ignore[misc]
    """Answers vLLM's questions from libattn's selection."""

    accept_output_buffer: bool = True
    forward_includes_kv_cache_update: bool = True
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = list(describe.KV_DTYPES)

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[LibattnImpl] | type[LatentImpl]:
        return LatentImpl if describe.is_latent() else LibattnImpl

    @classmethod
    def is_mla(cls) -> bool:
        """Whether the model that is being made has latent rows; vLLM knows one class, ``CUSTOM``, for both."""
        return describe.is_latent()

    @classmethod
    def is_sparse(cls) -> bool:
        """As `is_mla`."""
        return describe.is_sparse()

    @staticmethod
    def get_metadata_cls() -> type[LibattnMetadata]:
        return LibattnMetadata

    @staticmethod
    def get_builder_cls() -> type[LibattnMetadataBuilder]:
        return LibattnMetadataBuilder

    # What libattn's terms cover: the layer itself is asked in validate_configuration, with all its values.
    supports_sink, supports_sliding_window = _asks(has_sinks=True), _asks(sliding_window=64)
    supports_alibi_sqrt, supports_non_causal, supports_mm_prefix = _asks(alibi="sqrt"), _asks(causal=False), _asks(prefix_lm=True)
    supports_per_head_quant_scales = _asks(kv_cache_dtype="fp8", scales_per_head=True)
    supports_rswa = supports_pcp = supports_device_cpu_query_lens_mismatch = classmethod(lambda cls: False)

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return head_size % 8 == 0 and _serves(head_size)

    @classmethod
    def supports_block_size(cls, block_size: int | None) -> bool:
        return block_size is None or _serves(block_size=block_size)

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return _serves(batch_invariant=describe.invariance(True))

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type in describe.KINDS and _serves(attn_type=attn_type)

    @classmethod
    def supports_dcp(cls) -> bool:
        return _serves(context_parallel=likely(describe.config()))

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return True

    @classmethod
    def validate_configuration(cls, head_size: int, dtype: torch.dtype, kv_cache_dtype: Any = None,
                               block_size: int | None = None, use_mla: bool = False, has_sink: bool = False,
                               use_sparse: bool = False, use_mm_prefix: bool = False,
                               use_per_head_quant_scales: bool = False, device_capability: Any = None,
                               attn_type: Any = "decoder", has_sliding_window: bool = False,
                               use_non_causal: bool = False, use_batch_invariant: bool = False,
                               use_kv_connector: bool = False, use_pcp: bool = False,
                               use_adaptive_verification: bool = False, use_dcp: bool = False, use_rswa: bool = False,
                               **later: Any) -> list[str]:
        """Every reason with its values; empty if the layer can be served.

        What vLLM has not said yet (head counts, the window's length) is asked with likely values, and with the true ones
        when the model makes the layer.
        """
        asked = {**later, "use_sparse": use_sparse and not use_mla, "use_dcp": use_dcp and use_sparse and LATENT_QUERIES,
                 "use_pcp": use_pcp, "use_rswa": use_rswa, "use_adaptive_verification": use_adaptive_verification}
        lines = [f"{name}: True, supported: no ({NOT_CARRIED.get(name, 'it')} is not carried by libattn's vLLM adapter)"
                 for name, value in asked.items() if value]
        warn_of_drafts()
        if use_batch_invariant:
            warn_of_norms()
        try:
            released = refusals()
            mla = describe.mla_of_head(head_size, use_sparse) if use_mla else None
            desc = describe.layer("layers.0", 8, 1 if mla else 8, head_size, dtype, attn_type=attn_type,
                                  head_size_v=mla.v_head_dim if mla else 0, mla=mla,
                                  sliding_window=4096 if has_sliding_window else None, kv_cache_dtype=kv_cache_dtype,
                                  has_sinks=has_sink, block_size=block_size, causal=False if use_non_causal else None,
                                  scales_per_head=use_per_head_quant_scales, prefix_lm=use_mm_prefix,
                                  device_seq_lens_only=describe.device()[0] != "cpu",
                                  batch_invariant=describe.invariance(use_batch_invariant),
                                  context_parallel=likely(describe.config()) if use_dcp else None)
            lines = released or lines + describe.reasons(desc)
        except AttnError as error:
            lines.append(str(error))
        return [*lines, describe.ADVICE] if lines else []


#: vLLM's word for each level of graphs.
_SUPPORT = {GraphLevel.NEVER: AttentionCGSupport.NEVER,
            GraphLevel.SINGLE_TOKEN_DECODE: AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE,
            GraphLevel.UNIFORM_BATCH: AttentionCGSupport.UNIFORM_BATCH, GraphLevel.ALWAYS: AttentionCGSupport.ALWAYS}


def graph_support(descs: list[LayerDesc]) -> Any:
    """What the backends that serve layers can all capture, at most uniform batches."""
    levels = [AttentionCGSupport.UNIFORM_BATCH.value]
    for desc in descs:
        found = store.runtime.select([desc], device=describe.device(), keep_unserved=True)
        levels += [AttentionCGSupport.NEVER.value if choice.status else _SUPPORT[GraphLevel(choice.graph_level)].value
                   for choice in (found.choice(0, phase) for phase in ("prefill", "decode"))]
    return AttentionCGSupport(min(levels))


def _graph_level(vllm_config: Any) -> str:
    """What the layers of a configuration that captures whole steps have to serve."""
    mode = getattr(getattr(vllm_config, "compilation_config", None), "cudagraph_mode", None)
    return "uniform_batch" if mode is not None and mode.has_full_cudagraphs() else "never"


class LibattnMetadataBuilder(AttentionMetadataBuilder):
    """Keeps what vLLM knows of a batch; libattn plans it when the first layer runs, or here if it is captured."""

    reorder_batch_threshold: int | None = 1
    supports_update_block_table: bool = True
    looks_for_prefix: bool = True

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device,
                 *args: Any, **kwargs: Any) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        context = getattr(getattr(vllm_config, "compilation_config", None), "static_forward_context", {})
        warn_of_states(context)
        model_config = getattr(vllm_config, "model_config", None)
        self.dtype = getattr(model_config, "dtype", torch.float32)
        self.spread = spread(vllm_config, kv_cache_spec)
        self._kept: dict[Shape, tuple[Any, LibattnMetadata, Batch]] = {}  # captured shapes
        # Without drafts vLLM's upper bounds of lengths are the lengths; a spread cache's are another matter.
        self.exact = getattr(vllm_config, "speculative_config", None) is None and self.spread is None
        self.steps = Steps(lambda: [getattr(context[name], "states", context[name]) for name in layer_names if name in context],
                           _graph_level(vllm_config), getattr(model_config, "max_model_len", 0),
                           self.spread.described if self.spread is not None else None)

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> Any:
        """What the backend that serves the group's layers can capture. Batches that mix decodes and prefills are never
        captured: a replay has to have as many decodes as the capture."""
        model_config = getattr(vllm_config, "model_config", None)
        dtype = getattr(model_config, "dtype", torch.bfloat16)
        mla = describe.mla_of(model_config)
        spreads = getattr(getattr(vllm_config, "parallel_config", None), "decode_context_parallel_size", 1) > 1
        return graph_support([
            describe.layer("layers.0", 8 * spec.num_kv_heads, spec.num_kv_heads, spec.head_size, dtype,
                           block_size=spec.block_size, mla=mla,
                           head_size_v=mla.v_head_dim if mla else getattr(spec, "head_size_v", 0),
                           context_parallel=likely(vllm_config) if spreads else None)
            for spec in getattr(kv_cache_spec, "kv_cache_specs", {"": kv_cache_spec}).values()  # layers of other heads
            if mla is None or spec.head_size == mla.kv_lora_rank + mla.qk_rope_head_dim])       # an indexer's cache has none

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False,
              **_: Any) -> LibattnMetadata:
        """`fast_build`, of drafts: no look for a common prefix, which takes longer than the rest of a small batch."""
        found = self._again(common_attn_metadata, common_attn_metadata.block_table_tensor)
        if found is not None:
            return found
        m = self._metadata(common_attn_metadata)
        shape = (m.num_reqs, m.num_actual_tokens, m.max_query_len)
        m.captured = shape  # replayed plans take lengths from the device alone, as they were captured
        if not self.steps.replay(shape, lambda: self._replayed(m, common_attn_metadata.block_table_tensor)):
            m.captured = None
            if self.looks_for_prefix:
                m.common_prefix_len = common_prefix_len or (
                    0 if fast_build else prefix_of(m, getattr(self.kv_cache_spec, "block_size", 0)))
        return m

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> LibattnMetadata:
        """The batch's shape gets plans of its own, which `build` brings to each batch that replays the graph. It keeps them, since
        the graph reads them: vLLM asks again for a graph with another number of LoRAs and, since 0.32, for dummy steps that
        replay one."""
        m = self._metadata(common_attn_metadata)
        shape = (m.num_reqs, m.num_actual_tokens, m.max_query_len)
        if not self.steps.replay(shape, lambda: batch_of(m, m.num_actual_tokens)):
            self.steps.capture(shape, m, lambda: batch_of(m, m.num_actual_tokens), self.dtype)
        m.captured = shape
        return m

    def _again(self, m: Any, table: torch.Tensor) -> LibattnMetadata | None:
        """What was made for the last batch of a captured shape, if this one's arrays have the same addresses, as those that graphs
        read have; bounds, counts and host copies, which vLLM allocates in each step, are this step's."""
        shape = (m.num_reqs, m.num_actual_tokens, m.max_query_len)
        kept = self._kept.get(shape)
        spans = getattr(m, "mm_req_doc_ranges", None) or getattr(m, "spans", None) is not None
        starts = host_copy(m.query_start_loc_cpu)
        if kept is None or spans or starts is None or kept[0] != self._arrays(m, table) or not self.steps.replays(shape):
            return None
        batch, found = kept[2], copy(kept[1])  # a third of `replace`'s time
        self._fill(m)
        found.max_seq_len, found.query_start_loc_cpu, found.seq_lens_cpu = m.max_seq_len, starts, self._lengths_on_host(m)
        batch.count(starts[m.num_reqs].item(), m.max_seq_len, (starts.data_ptr(), starts))
        self.steps.replay(shape, lambda: batch)
        return found

    def _lengths_on_host(self, m: Any) -> torch.Tensor | None:
        if isinstance(m, LibattnMetadata):
            return m.seq_lens_cpu
        return host_copy(m.seq_lens if m.seq_lens.device.type == "cpu" else
                         getattr(m, "seq_lens_cpu_upper_bound", None) if self.exact else None)

    def _fill(self, m: Any) -> None:
        """Bring the builder's own arrays to a batch."""

    @staticmethod
    def _arrays(m: Any, table: torch.Tensor) -> Any:
        """What identifies the arrays of a captured shape."""
        return (m.query_start_loc.data_ptr(), m.seq_lens.data_ptr(), table.data_ptr(), table.shape, table.stride(),
                m.slot_mapping.data_ptr(), m.slot_mapping.shape, m.causal if isinstance(m.causal, bool) else None)

    def _replayed(self, m: LibattnMetadata, table: torch.Tensor) -> Batch:
        """The batch of a captured shape, kept for the next one where nothing was converted."""
        batch = batch_of(m, m.num_actual_tokens)
        read = {"query_start_loc": m.query_start_loc, "seq_lens": m.seq_lens} | (
            {} if m.state_slots is not None else {"block_table": table, "slot_mapping": m.slot_mapping})
        others = (m.spans, m.encoder_seq_lens, m.local_seq_lens)
        if (all(other is None for other in others) and not m.causal_per_request and m.query_start_loc_cpu is not None
                and all(getattr(batch.struct, name) == t.data_ptr() for name, t in read.items())):
            self._kept[(m.num_reqs, m.num_actual_tokens, m.max_query_len)] = self._arrays(m, table), m, batch
        return batch

    def _metadata(self, m: Any) -> LibattnMetadata:
        local = None
        if self.spread is not None and m.seq_lens.device.type != "cpu":
            queries = m.query_start_loc[1:] - m.query_start_loc[:-1]
            local = self.spread.local_lengths((m.seq_lens - queries).clamp_min(0))
        return LibattnMetadata(
            steps=self.steps, num_reqs=m.num_reqs, num_prefills=m.num_reqs, num_actual_tokens=m.num_actual_tokens,
            query_start_loc=m.query_start_loc, query_start_loc_cpu=host_copy(m.query_start_loc_cpu), seq_lens=m.seq_lens,
            seq_lens_cpu=self._lengths_on_host(m),
            block_table=m.block_table_tensor, slot_mapping=m.slot_mapping, max_query_len=m.max_query_len,
            max_seq_len=m.max_seq_len, causal=m.causal if isinstance(m.causal, torch.Tensor) else bool(m.causal),
            encoder_seq_lens=getattr(m, "encoder_seq_lens", None),
            encoder_seq_lens_cpu=host_copy(getattr(m, "encoder_seq_lens_cpu", None)),
            spans=spans_of(getattr(m, "mm_req_doc_ranges", None), m.num_reqs, m.query_start_loc.device),
            local_seq_lens=local)

    def update_block_table(self, metadata: LibattnMetadata, blk_table: torch.Tensor, slot_mapping: torch.Tensor,
                           **_: Any) -> LibattnMetadata:
        m = replace(metadata, steps=self.steps, block_table=blk_table, slot_mapping=slot_mapping, common_prefix_len=0)
        found = self._again(m, blk_table) if m.captured else None
        if found is not None:
            return found
        if not (m.captured and self.steps.replay(m.captured, lambda: self._replayed(m, blk_table))):
            m.captured = None
            m.common_prefix_len = prefix_of(m, getattr(self.kv_cache_spec, "block_size", 0))
        return m

    def use_cascade_attention(self, common_prefix_len: int, query_lens: Any, num_query_heads: int, num_kv_heads: int,
                              use_alibi: bool, use_sliding_window: bool, use_local_attention: bool, num_sms: int,
                              dcp_world_size: int) -> bool:
        """Asked before 0.32, where vLLM then replays no graph: whether libattn's core would look at the batch, which
        decides when it plans."""
        return (common_prefix_len >= CASCADE_KEYS and len(query_lens) >= CASCADE_REQUESTS and dcp_world_size == 1
                and not (use_alibi or use_sliding_window or use_local_attention))


__all__ = ["LibattnBackend", "LibattnMetadataBuilder"]
