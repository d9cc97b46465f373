# SPDX-License-Identifier: Apache-2.0
"""vLLM's three classes: the backend that answers, the builder that plans, the implementation that steps.

Written against the published interface of vLLM 0.33 and tolerant of what other releases add or lack: methods take
and ignore arguments that they do not know, and both forms of the cache are read, ``[N, Hk, B, 2 D]`` and the older
``[2, N, B, Hk, D]``.
"""
from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import (AttentionBackend, AttentionCGSupport, AttentionImpl, AttentionMetadata,
                                       AttentionMetadataBuilder, AttentionType, MultipleOf)

from ..._declarations import KvLayout, Status
from ...errors import AttnError, make
from ...step import NO_WRITE, Batch
from ...torch import run_pages
from ...torch.store import store, stream_of
from . import describe

#: What vLLM may ask that this adapter does not carry; the answer is a reason, never silence.
NOT_CARRIED = {
    "use_mla": "MLA", "use_sparse": "sparse attention", "use_mm_prefix": "bidirectional multimodal prefixes",
    "use_per_head_quant_scales": "scales per head", "use_pcp": "prefill context parallelism",
    "use_dcp": "decode context parallelism", "use_rswa": "reference sliding windows",
    "use_adaptive_verification": "query lengths that differ on host and device",
}


def _device() -> tuple[str, int]:
    if torch.cuda.is_available():
        return ("rocm" if torch.version.hip else "cuda"), torch.cuda.current_device()
    return "cpu", 0


def reasons(desc: Any) -> list[str]:
    """Why no backend serves a layer, one line per backend and phase; empty if one does."""
    found = store.runtime.select([desc], device=_device(), keep_unserved=True)
    lines = []
    for phase in ("prefill", "decode"):
        if found.choice(0, phase).status:
            lines += [f"{phase}: {v.backend}: {v.verdict}: {'; '.join(map(str, v.reasons))}"
                      for v in found.verdicts(0, phase) if v.verdict != "other_device"]
    return lines


def _heads_first() -> bool:
    """Whether the backend that serves a usual layer prefers a page's heads before its slots."""
    desc = describe.layer("layers.0", 8, 8, 128, torch.bfloat16)
    found = store.runtime.select([desc], device=_device(), keep_unserved=True).choice(0, "decode")
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
    def get_impl_cls() -> type[LibattnImpl]:
        return LibattnImpl

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
        return not reasons(describe.layer("layers.0", 8, 8, head_size, torch.bfloat16)) if head_size % 8 == 0 else False

    @classmethod
    def supports_block_size(cls, block_size: int | None) -> bool:
        return block_size is None or not reasons(describe.layer("layers.0", 8, 8, 128, torch.bfloat16,
                                                                block_size=block_size))

    @classmethod
    def supports_sink(cls) -> bool:
        return not reasons(describe.layer("layers.0", 8, 8, 128, torch.bfloat16, has_sinks=True))

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return not reasons(describe.layer("layers.0", 8, 8, 128, torch.bfloat16, sliding_window=64))

    @classmethod
    def supports_alibi_sqrt(cls) -> bool:
        return not reasons(describe.layer("layers.0", 8, 8, 128, torch.bfloat16, alibi="sqrt"))

    @classmethod
    def supports_non_causal(cls) -> bool:
        return not reasons(describe.layer("layers.0", 8, 8, 128, torch.bfloat16, causal=False))

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return not reasons(describe.layer("layers.0", 8, 8, 128, torch.bfloat16, batch_invariant=True))

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type in describe.KINDS and not reasons(
            describe.layer("layers.0", 8, 8, 128, torch.bfloat16, attn_type=attn_type))

    @classmethod
    def supports_mm_prefix(cls) -> bool:
        return False

    @classmethod
    def supports_rswa(cls) -> bool:
        return False

    @classmethod
    def supports_pcp(cls) -> bool:
        return False

    @classmethod
    def supports_dcp(cls) -> bool:
        return False

    @classmethod
    def supports_per_head_quant_scales(cls) -> bool:
        return False

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

        What vLLM has not told yet (head counts, the window's length) is asked with likely values, and checked with
        the true ones when the layer first runs.
        """
        asked = {**later, "use_mla": use_mla, "use_sparse": use_sparse, "use_mm_prefix": use_mm_prefix,
                 "use_per_head_quant_scales": use_per_head_quant_scales, "use_pcp": use_pcp, "use_dcp": use_dcp,
                 "use_rswa": use_rswa, "use_adaptive_verification": use_adaptive_verification}
        lines = [f"{name}: True, supported: no ({NOT_CARRIED.get(name, 'it')} is not carried by libattn's vLLM adapter)"
                 for name, value in asked.items() if value]
        try:
            desc = describe.layer("layers.0", 8, 8, head_size, dtype, attn_type=attn_type,
                                  sliding_window=4096 if has_sliding_window else None, kv_cache_dtype=kv_cache_dtype,
                                  has_sinks=has_sink, block_size=block_size, causal=False if use_non_causal else None,
                                  device_seq_lens_only=_device()[0] != "cpu", batch_invariant=use_batch_invariant)
            return lines + reasons(desc)
        except AttnError as error:
            return [*lines, str(error)]


@dataclass
class LibattnMetadata(AttentionMetadata):
    """One step of one KV-cache group. Layers that run with the same object share its plan."""

    num_actual_tokens: int
    query_start_loc: torch.Tensor
    query_start_loc_cpu: torch.Tensor | None
    seq_lens: torch.Tensor
    seq_lens_cpu: torch.Tensor | None
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    max_query_len: int
    max_seq_len: int
    causal: bool
    encoder_seq_lens: torch.Tensor | None = None
    encoder_seq_lens_cpu: torch.Tensor | None = None


def _host(values: Any | None) -> torch.Tensor | None:
    return None if values is None else torch.as_tensor(values).to("cpu", torch.int32)


class LibattnMetadataBuilder(AttentionMetadataBuilder):
    """Keeps what vLLM knows of a batch; libattn plans it when the first layer runs."""

    _cudagraph_support: ClassVar[Any] = AttentionCGSupport.NEVER
    reorder_batch_threshold: int | None = 1
    supports_update_block_table: bool = True

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device,
                 *args: Any, **kwargs: Any) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False,
              **_: Any) -> LibattnMetadata:
        m = common_attn_metadata
        if isinstance(m.causal, torch.Tensor):
            raise make(Status.UNSUPPORTED, "causal", "a flag per request; supported: one for the batch")
        if getattr(m, "mm_req_doc_ranges", None):
            raise make(Status.UNSUPPORTED, "mm_req_doc_ranges", "bidirectional ranges; supported: none")
        return LibattnMetadata(
            num_actual_tokens=m.num_actual_tokens, query_start_loc=m.query_start_loc,
            query_start_loc_cpu=_host(m.query_start_loc_cpu), seq_lens=m.seq_lens,
            seq_lens_cpu=_host(m.seq_lens) if m.seq_lens.device.type == "cpu" else None,
            block_table=m.block_table_tensor, slot_mapping=m.slot_mapping, max_query_len=m.max_query_len,
            max_seq_len=m.max_seq_len, causal=bool(m.causal),
            encoder_seq_lens=getattr(m, "encoder_seq_lens", None),
            encoder_seq_lens_cpu=_host(getattr(m, "encoder_seq_lens_cpu", None)))

    def update_block_table(self, metadata: LibattnMetadata, blk_table: torch.Tensor, slot_mapping: torch.Tensor,
                           **_: Any) -> LibattnMetadata:
        return replace(metadata, block_table=blk_table, slot_mapping=slot_mapping)

    def use_cascade_attention(self, *args: Any, **kwargs: Any) -> bool:
        """libattn's core decides about cascades itself."""
        return False


def pages_of(kv_cache: torch.Tensor, head_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V as ``[N, B, Hk, D]``: of ``[N, Hk, B, 2 D]``, or of two planes."""
    if kv_cache.dim() == 4:
        rows = kv_cache.transpose(1, 2)
        return rows[..., :head_size], rows[..., head_size:]
    if kv_cache.dim() == 5 and kv_cache.shape[0] == 2:
        return kv_cache[0], kv_cache[1]
    raise make(Status.UNSUPPORTED, "kv_cache", f"{list(kv_cache.shape)}; supported: [N, Hk, B, 2 D], [2, N, B, Hk, D]")


class LibattnImpl(AttentionImpl):
    """One layer."""

    supports_quant_query_input: bool = False
    can_return_lse_for_decode: bool = False

    def __init__(self, num_heads: int, head_size: int, scale: float, num_kv_heads: int | None = None,
                 alibi_slopes: list[float] | None = None, sliding_window: int | None = None,
                 kv_cache_dtype: str = "auto", logits_soft_cap: float | None = None,
                 attn_type: Any = AttentionType.DECODER, kv_sharing_target_layer_name: str | None = None,
                 sinks: torch.Tensor | None = None, use_alibi_sqrt: bool = False, chunk_lookback: int = -1,
                 **unknown: Any) -> None:
        for name, value in unknown.items():
            if value not in (None, False, -1):
                raise make(Status.UNSUPPORTED, name, f"{value!r}; supported: no (not known to libattn's vLLM adapter)")
        if chunk_lookback > -1:
            raise make(Status.UNSUPPORTED, "chunk_lookback", f"{chunk_lookback}; supported: -1")
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads or num_heads
        self.head_size, self.scale = head_size, float(scale)
        self.sliding_window, self.kv_cache_dtype = sliding_window, kv_cache_dtype
        self.logits_soft_cap = logits_soft_cap
        self.attn_type = str(getattr(attn_type, "value", attn_type))
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.sinks = sinks
        self.alibi = "none" if alibi_slopes is None else "sqrt" if use_alibi_sqrt else "linear"
        self.alibi_slopes = None if alibi_slopes is None else torch.tensor(alibi_slopes, dtype=torch.float32)

    def _index(self, layer: Any) -> int:
        numbers = [int(part) for part in str(getattr(layer, "layer_name", "")).split(".") if part.isdigit()]
        return numbers[-1] if numbers else 0

    def _params(self, layer: Any, quantized: bool) -> tuple[tuple[str, Any], ...]:
        params: list[tuple[str, Any]] = []
        if self.sinks is not None:
            params.append(("sinks", self.sinks))
        if self.alibi_slopes is not None:
            params.append(("alibi_slopes", self.alibi_slopes))
        if quantized:
            params += [("k_scale", float(layer._k_scale_float)), ("v_scale", float(layer._v_scale_float))]
        return tuple(params)

    def forward(self, layer: Any, query: torch.Tensor, key: torch.Tensor | None, value: torch.Tensor | None,
                kv_cache: torch.Tensor, attn_metadata: Any, output: torch.Tensor,
                output_scale: torch.Tensor | None = None, output_block_scale: torch.Tensor | None = None,
                **_: Any) -> torch.Tensor:
        """Writes the step's keys and attends; without metadata (profiling) the output is zero."""
        if output_scale is not None or output_block_scale is not None:
            raise make(Status.UNSUPPORTED, "output_scale", "a fused output quantization; supported: plain output")
        if attn_metadata is None:
            return output.fill_(0)
        m = attn_metadata
        heads = (-1, self.num_heads, self.head_size)
        q, out = query.view(heads), output.view(heads)
        k, v = (None if t is None else t.view(-1, self.num_kv_heads, self.head_size) for t in (key, value))
        if self.attn_type in ("encoder", "encoder_only"):
            self._encode(layer, q, k, v, out, m)
            return output
        k_pages, v_pages = pages_of(kv_cache, self.head_size)
        quantized = describe.KV_DTYPES[self.kv_cache_dtype].startswith("fp8")
        desc = describe.layer(
            "layers.0", self.num_heads, self.num_kv_heads, self.head_size, query.dtype, scale=self.scale,
            attn_type=self.attn_type, sliding_window=self.sliding_window, kv_cache_dtype=self.kv_cache_dtype,
            soft_cap=self.logits_soft_cap, alibi=self.alibi, has_sinks=self.sinks is not None,
            block_size=k_pages.shape[1], device_seq_lens_only=m.seq_lens_cpu is None)
        writes = k is not None and self.kv_sharing_target_layer_name is None
        run_pages(desc, self._index(layer), self._params(layer, quantized), q, k if writes else None,
                  v if writes else None, out, k_pages, v_pages, lambda: self._batch(m, q.shape[0]), m,
                  0 if writes else NO_WRITE)
        return output

    def do_kv_cache_update(self, layer: Any, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor,
                           slot_mapping: torch.Tensor) -> None:
        """`forward` writes the cache itself (``forward_includes_kv_cache_update``)."""
        raise make(Status.ORDER, "do_kv_cache_update", "called for a backend whose forward writes the cache")

    def _batch(self, m: LibattnMetadata, rows: int) -> Batch:
        device = m.query_start_loc.device
        cross = self.attn_type == "encoder_decoder"
        lengths: dict[str, Any] = {"seq_lens": m.seq_lens.to(torch.int32), "seq_lens_host": m.seq_lens_cpu}
        if cross:
            if m.encoder_seq_lens is None:
                raise make(Status.INVALID_ARGUMENT, "encoder_seq_lens", "None; a cross layer needs them")
            encoder = m.encoder_seq_lens.to(device, torch.int32)
            lengths = {"encoder_seq_lens": encoder, "encoder_seq_lens_host": m.encoder_seq_lens_cpu}
        made = Batch(m.query_start_loc.to(torch.int32), block_table=m.block_table.to(torch.int32),
                     slot_mapping=m.slot_mapping.to(torch.int64), query_start_loc_host=m.query_start_loc_cpu,
                     num_tokens=max(rows, m.num_actual_tokens), causal=not cross and bool(m.causal),
                     max_query_len=m.max_query_len, max_seq_len=0 if cross else m.max_seq_len, **lengths)
        if cross:
            made.struct.max_encoder_seq_len = int(m.encoder_seq_lens_cpu.max()) if m.encoder_seq_lens_cpu is not None \
                else m.max_seq_len
        return made

    def _encode(self, layer: Any, q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None, out: torch.Tensor,
                m: LibattnMetadata) -> None:
        if k is None or v is None:
            raise make(Status.INVALID_ARGUMENT, "key", "None; an encoder's keys come with its queries")
        desc = describe.layer("layers.0", self.num_heads, self.num_kv_heads, self.head_size, q.dtype, scale=self.scale,
                              attn_type=self.attn_type, sliding_window=self.sliding_window,
                              soft_cap=self.logits_soft_cap, alibi=self.alibi, has_sinks=self.sinks is not None)
        bound = store.bound(desc, lambda: desc, self._index(layer), q.device, self._params(layer, False))
        batch = Batch(m.query_start_loc.to(torch.int32), query_start_loc_host=m.query_start_loc_cpu,
                      num_tokens=max(q.shape[0], m.num_actual_tokens))
        stream = stream_of(q.device)
        bound.update(batch, object(), stream)
        bound.run(stream, ((name, t, t.shape, t.stride())
                           for name, t in (("q", q), ("k", k), ("v", v), ("out", out))))


__all__ = ["LibattnBackend", "LibattnImpl", "LibattnMetadata", "LibattnMetadataBuilder"]
