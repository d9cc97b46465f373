# SPDX-License-Identifier: Apache-2.0
"""Two of vLLM's classes: the backend that answers, and the builder that plans (`layers`: the implementations that step).

Written against the published interface of vLLM 0.33 and tolerant of what other releases add or lack: methods take
and ignore arguments that they do not know, and both forms of the cache are read, ``[N, Hk, B, 2 D]`` and the older
``[2, N, B, Hk, D]``.
"""
from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import AttentionBackend, AttentionCGSupport, AttentionMetadataBuilder, MultipleOf

from ..._declarations import KvLayout
from ...errors import AttnError
from ...torch.steps import Steps
from ...torch.store import store
from . import describe
from .layers import LatentImpl, LibattnImpl
from .metadata import LibattnMetadata, batch_of, host_copy, spans_of
from .ranks import likely, spread

#: What vLLM may ask that this adapter does not carry; the answer is a reason, never silence.
NOT_CARRIED = {
    "use_sparse": "sparse attention", "use_pcp": "prefill context parallelism",
    "use_rswa": "reference sliding windows",
    "use_adaptive_verification": "query lengths that differ on host and device",
}


def reasons(desc: Any) -> list[str]:
    """Why no backend serves a layer, one line per backend and phase; empty if one does."""
    found = store.runtime.select([desc], device=describe.device(), keep_unserved=True)
    lines = []
    for phase in ("prefill", "decode"):
        if found.choice(0, phase).status:
            lines += [f"{phase}: {v.backend}: {v.verdict}: {'; '.join(map(str, v.reasons))}"
                      for v in found.verdicts(0, phase) if v.verdict != "other_device"]
    return lines


def _serves(head_size: int = 128, **terms: Any) -> bool:
    """Whether a usual layer with these terms can be served."""
    return not reasons(describe.layer("layers.0", 8, 8, head_size, torch.bfloat16, **terms))


def _heads_first() -> bool:
    """Whether the backend that serves a usual layer prefers a page's heads before its slots."""
    desc = describe.layer("layers.0", 8, 8, 128, torch.bfloat16)
    found = store.runtime.select([desc], device=describe.device(), keep_unserved=True).choice(0, "decode")
    return found.layout in (KvLayout.HND, KvLayout.HND_INNER, KvLayout.HND_ROWS)


class LibattnBackend(AttentionBackend):
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
        """Of the model that is being made; vLLM knows one class as ``CUSTOM``."""
        return describe.is_latent()

    @staticmethod
    def get_metadata_cls() -> type[LibattnMetadata]:
        return LibattnMetadata

    @staticmethod
    def get_builder_cls() -> type[LibattnMetadataBuilder]:
        return LibattnMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None, **_: Any) -> list[Any]:
        return [MultipleOf(1)]

    @staticmethod
    def get_kv_cache_shape(num_blocks: int, block_size: int, num_kv_heads: int, head_size: int,
                           cache_dtype_str: str = "auto", **_: Any) -> tuple[int, ...]:
        """For releases before specs had a layout: K and V as two planes."""
        return (2, num_blocks, block_size, num_kv_heads, head_size)

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[Any, ...]:
        """Since 0.32: any layout is read where it lies; first the one that the chosen backend likes."""
        from vllm.v1.kv_cache_interface import KVCacheLayout

        first, second = ("LBHNC", "LBNHC") if _heads_first() else ("LBNHC", "LBHNC")
        rest = [layout for layout in KVCacheLayout if layout.name not in (first, second)]
        return (KVCacheLayout[first], KVCacheLayout[second], *rest)

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        """Physical order of those planes: heads before slots where the chosen backend likes that."""
        order = (0, 1, 3, 2, 4) if _heads_first() else (0, 1, 2, 3, 4)
        return (1, 2, 0, *(n + 1 for n in order[2:])) if include_num_layers_dimension else order

    # What libattn's terms cover: the layer itself is asked in validate_configuration, with all its values.
    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return head_size % 8 == 0 and _serves(head_size)

    @classmethod
    def supports_block_size(cls, block_size: int | None) -> bool:
        return block_size is None or _serves(block_size=block_size)

    @classmethod
    def supports_sink(cls) -> bool:
        return _serves(has_sinks=True)

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return _serves(sliding_window=64)

    @classmethod
    def supports_alibi_sqrt(cls) -> bool:
        return _serves(alibi="sqrt")

    @classmethod
    def supports_non_causal(cls) -> bool:
        return _serves(causal=False)

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return _serves(batch_invariant=True)

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type in describe.KINDS and _serves(attn_type=attn_type)

    @classmethod
    def supports_mm_prefix(cls) -> bool:
        return _serves(prefix_lm=True)

    @classmethod
    def supports_rswa(cls) -> bool:
        return False

    @classmethod
    def supports_pcp(cls) -> bool:
        return False

    @classmethod
    def supports_dcp(cls) -> bool:
        return _serves(context_parallel=likely(describe.config()))

    @classmethod
    def supports_per_head_quant_scales(cls) -> bool:
        return _serves(kv_cache_dtype="fp8", scales_per_head=True)

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        return False

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

        What vLLM has not said yet (head counts, the window's length) is asked with likely values, and checked with
        the true ones when the layer first runs.
        """
        asked = {**later, "use_sparse": use_sparse, "use_pcp": use_pcp, "use_rswa": use_rswa,
                 "use_adaptive_verification": use_adaptive_verification}
        lines = [f"{name}: True, supported: no ({NOT_CARRIED.get(name, 'it')} is not carried by libattn's vLLM adapter)"
                 for name, value in asked.items() if value]
        try:
            mla = describe.mla_of_head(head_size) if use_mla else None
            desc = describe.layer("layers.0", 8, 1 if mla else 8, head_size, dtype, attn_type=attn_type,
                                  head_size_v=mla.v_head_dim if mla else 0, mla=mla,
                                  sliding_window=4096 if has_sliding_window else None, kv_cache_dtype=kv_cache_dtype,
                                  has_sinks=has_sink, block_size=block_size, causal=False if use_non_causal else None,
                                  scales_per_head=use_per_head_quant_scales, prefix_lm=use_mm_prefix,
                                  device_seq_lens_only=describe.device()[0] != "cpu", batch_invariant=use_batch_invariant,
                                  context_parallel=likely(describe.config()) if use_dcp else None)
            return lines + reasons(desc)
        except AttnError as error:
            return [*lines, str(error)]


def _graph_level(vllm_config: Any) -> str:
    """What the layers of a configuration that captures whole steps have to serve."""
    mode = getattr(getattr(vllm_config, "compilation_config", None), "cudagraph_mode", None)
    return "uniform_batch" if mode is not None and mode.has_full_cudagraphs() else "never"


class LibattnMetadataBuilder(AttentionMetadataBuilder):
    """Keeps what vLLM knows of a batch; libattn plans it when the first layer runs, or here if it is captured."""

    reorder_batch_threshold: int | None = 1
    supports_update_block_table: bool = True

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device,
                 *args: Any, **kwargs: Any) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        context = getattr(getattr(vllm_config, "compilation_config", None), "static_forward_context", {})
        model_config = getattr(vllm_config, "model_config", None)
        self.dtype = getattr(model_config, "dtype", torch.float32)
        self.spread = spread(vllm_config, kv_cache_spec)
        self.steps = Steps(lambda: [context[name] for name in layer_names if name in context],
                           _graph_level(vllm_config), getattr(model_config, "max_model_len", 0),
                           self.spread.described if self.spread is not None else None)

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> Any:
        """What the backend that serves the group's layers can capture; batches that mix decodes and prefills are none of
        it, since a replay has to have as many decodes as were captured."""
        dtype = getattr(getattr(vllm_config, "model_config", None), "dtype", torch.bfloat16)
        mla = describe.mla_of(getattr(vllm_config, "model_config", None))
        spreads = getattr(getattr(vllm_config, "parallel_config", None), "decode_context_parallel_size", 1) > 1
        desc = describe.layer("layers.0", 8 * kv_cache_spec.num_kv_heads, kv_cache_spec.num_kv_heads,
                              kv_cache_spec.head_size, dtype, block_size=kv_cache_spec.block_size,
                              head_size_v=mla.v_head_dim if mla else 0, mla=mla,
                              context_parallel=likely(vllm_config) if spreads else None)
        found = store.runtime.select([desc], device=describe.device(), keep_unserved=True)
        levels = [0 if found.choice(0, phase).status else found.choice(0, phase).graph_level
                  for phase in ("prefill", "decode")]
        return AttentionCGSupport(min(*levels, AttentionCGSupport.UNIFORM_BATCH.value))

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False,
              **_: Any) -> LibattnMetadata:
        m = self._metadata(common_attn_metadata)
        shape = (m.num_reqs, m.num_actual_tokens, m.max_query_len)
        if self.steps.replay(shape, lambda: batch_of(m, m.num_actual_tokens)):
            m.captured = shape
        return m

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> LibattnMetadata:
        """The batch's shape gets plans of its own, which `build` brings to each batch that replays the graph."""
        m = self._metadata(common_attn_metadata)
        shape = (m.num_reqs, m.num_actual_tokens, m.max_query_len)
        self.steps.capture(shape, m, lambda: batch_of(m, m.num_actual_tokens), self.dtype)
        m.captured = shape
        return m

    def _metadata(self, m: Any) -> LibattnMetadata:
        local = None
        if self.spread is not None and m.seq_lens.device.type != "cpu":
            queries = m.query_start_loc[1:] - m.query_start_loc[:-1]
            local = self.spread.local_lengths((m.seq_lens - queries).clamp_min(0))
        return LibattnMetadata(
            steps=self.steps, num_reqs=m.num_reqs, num_prefills=m.num_reqs, num_actual_tokens=m.num_actual_tokens,
            query_start_loc=m.query_start_loc, query_start_loc_cpu=host_copy(m.query_start_loc_cpu), seq_lens=m.seq_lens,
            seq_lens_cpu=host_copy(m.seq_lens) if m.seq_lens.device.type == "cpu" else None,
            block_table=m.block_table_tensor, slot_mapping=m.slot_mapping, max_query_len=m.max_query_len,
            max_seq_len=m.max_seq_len, causal=m.causal if isinstance(m.causal, torch.Tensor) else bool(m.causal),
            encoder_seq_lens=getattr(m, "encoder_seq_lens", None),
            encoder_seq_lens_cpu=host_copy(getattr(m, "encoder_seq_lens_cpu", None)),
            spans=spans_of(getattr(m, "mm_req_doc_ranges", None), m.num_reqs, m.query_start_loc.device),
            local_seq_lens=local)

    def update_block_table(self, metadata: LibattnMetadata, blk_table: torch.Tensor, slot_mapping: torch.Tensor,
                           **_: Any) -> LibattnMetadata:
        m = replace(metadata, steps=self.steps, block_table=blk_table, slot_mapping=slot_mapping, captured=None)
        if metadata.captured and self.steps.replay(metadata.captured, lambda: batch_of(m, m.num_actual_tokens)):
            m.captured = metadata.captured
        return m

    def use_cascade_attention(self, *args: Any, **kwargs: Any) -> bool:
        """libattn's core decides about cascades itself."""
        return False


__all__ = ["LibattnBackend", "LibattnMetadataBuilder", "reasons"]
