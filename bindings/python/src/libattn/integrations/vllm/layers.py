# SPDX-License-Identifier: Apache-2.0
"""vLLM's implementations: one layer each, and its step."""
from __future__ import annotations

import logging
from functools import cache
from typing import Any

import torch
from vllm.v1.attention.backend import AttentionImpl, AttentionType, MLAAttentionImpl

from ..._declarations import Status, attn_io_mla
from ...errors import AttnError, make
from ...extensions import output_quant
from ...layers import MlaDesc
from ...model import KvView
from ...step import NO_WRITE, Batch
from ...torch.steps import Member
from ...torch.store import Params, store, stream_of
from . import describe
from .metadata import LibattnMetadata, batch_of


def pages_of(kv_cache: torch.Tensor, head_size: int, head_size_v: int, kv_cache_dtype: str = "auto") -> tuple[Any, Any]:
    """K and V as ``[N, B, Hk, D]`` of ``[N, Hk, B, row]``: a row is a key, then a value, or as `describe.rows_of` says."""
    rows = describe.rows_of(kv_cache_dtype, head_size, head_size_v)
    length = rows.length if rows else head_size + head_size_v
    if kv_cache.dim() != 4 or kv_cache.shape[-1] != length:
        raise make(Status.UNSUPPORTED, "kv_cache", f"{list(kv_cache.shape)} of {kv_cache_dtype}; supported: [N, Hk, B, "
                   f"{length}] of keys of {head_size} and values of {head_size_v}")
    slots = kv_cache.transpose(1, 2)
    if rows is None:
        return slots.split([head_size, head_size_v], -1)
    key, key_scales, value, value_scales, _ = slots.view(torch.uint8).split(
        [rows.key, rows.key_scales, rows.value, rows.value_scales, length - rows.key - rows.key_scales - rows.value
         - rows.value_scales], -1)
    return (KvView(key, key_scales if rows.key_scales else None, head_size), KvView(value, value_scales, head_size_v))


def tiles_of(block_scales: torch.Tensor) -> torch.Tensor:
    """The bytes of block scales [M, K], M of 128 and K of 4, that lie in tiles of 128 by 4 as tensor cores read them (rows 32
    apart next to each other): a view [M / 128, 4, 32, K / 4, 4] in the order of rows and columns."""
    rows, columns = block_scales.shape
    return block_scales.view(torch.uint8).view(rows // 128, columns // 4, 32, 4, 4).permute(0, 3, 2, 1, 4)


def index_of(name: str) -> int:
    """A layer's number in the model; the last number in its name."""
    numbers = [int(part) for part in name.split(".") if part.isdigit()]
    return numbers[-1] if numbers else 0


@cache
def signs_of(size: int) -> torch.Tensor:
    """Signs of an int4 cache's randomised Hadamard transform. They are fixed, since caches may outlive this process."""
    generator = torch.Generator().manual_seed(size)
    return torch.randint(0, 2, (size,), generator=generator).float() * 2 - 1


def reserve(impl: Any, desc: Any, params: Params) -> None:
    """Take the scratch of the worst step with the weights, so that vLLM counts it before it sizes its cache. A layer that nothing
    serves is refused where its caches are known."""
    if all(impl.limits):
        try:
            store.reserve(desc, 0, describe.torch_device(), params, impl.limits)
        except AttnError as error:
            logging.getLogger(__name__).warning("vLLM does not count the scratch of libattn's plans: %s", error)


def _known(arguments: dict[str, Any]) -> None:
    for name, value in arguments.items():
        if value not in (None, False, -1):
            raise make(Status.UNSUPPORTED, name, f"{value!r}; supported: no (not known to libattn's vLLM adapter)")


class LibattnImpl(AttentionImpl):
    """One layer."""

    # vLLM wants a log-sum-exp where it would merge the ranks' parts; libattn's core merges them.
    can_return_lse_for_decode: bool = True
    supports_dcp: bool = True
    supports_mtp_with_cp_non_trivial_interleave_size: bool = True

    def __init__(self, num_heads: int, head_size: int, scale: float, num_kv_heads: int | None = None,
                 alibi_slopes: list[float] | None = None, sliding_window: int | None = None,
                 kv_cache_dtype: str = "auto", logits_soft_cap: float | None = None,
                 attn_type: Any = AttentionType.DECODER, kv_sharing_target_layer_name: str | None = None,
                 sinks: torch.Tensor | None = None, use_alibi_sqrt: bool = False, chunk_lookback: int = -1,
                 **unknown: Any) -> None:
        _known(unknown)
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads or num_heads
        self.head_size, self.scale = head_size, float(scale)
        self.sliding_window, self.kv_cache_dtype = sliding_window, kv_cache_dtype
        self.logits_soft_cap, self.chunk_lookback = logits_soft_cap, chunk_lookback
        self.attn_type = str(getattr(attn_type, "value", attn_type))
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.sinks = sinks
        self.alibi = "none" if alibi_slopes is None else "sqrt" if use_alibi_sqrt else "linear"
        self.alibi_slopes = None if alibi_slopes is None else torch.tensor(alibi_slopes, dtype=torch.float32)
        self.batch_invariant = describe.invariance()
        self.output_form = "plain"
        self.causal_per_request = False
        self.supports_quant_query_input = bool(
            describe.options().get("fp8_query") and describe.KV_DTYPES.get(kv_cache_dtype) == "fp8_e4m3")
        self.quantized_query = False
        self.limits = describe.limits()
        if describe.config() is not None:
            describe.refuse_unserved(self._describe(None, describe.dtype(), 0))

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Nothing of the weights: the scratch of the layer's steps."""
        reserve(self, self._describe(None, act_dtype, 16), self._params(None))

    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        """Static fp8 per tensor and nvfp4, where a backend writes it."""
        from vllm.model_executor.layers.quantization.utils.quant_utils import kFp8StaticTensorSym, kNvfp4Dynamic

        form = "fp8_static" if quant_key == kFp8StaticTensorSym else "nvfp4" if quant_key == kNvfp4Dynamic else None
        if form is None or (form == "nvfp4" and self.head_size % 16):
            return False
        desc = self._describe(None, torch.get_default_dtype(), 0, output_form=form)
        found = store.runtime.select([desc], device=describe.device(), keep_unserved=True)
        return not any(found.choice(0, phase).status for phase in ("prefill", "decode"))

    def _describe(self, layer: Any, dtype: torch.dtype, block_size: int, **terms: Any) -> Any:
        images = bool(getattr(layer, "use_mm_prefix", False)) and self.attn_type == "decoder"
        clamp = images and getattr(layer, "mm_prefix_clamp_sliding_window", False)
        return describe.layer(
            "layers.0", self.num_heads, self.num_kv_heads, self.head_size, dtype, scale=self.scale,
            attn_type=self.attn_type, sliding_window=self.sliding_window, kv_cache_dtype=self.kv_cache_dtype,
            soft_cap=self.logits_soft_cap, alibi=self.alibi, has_sinks=self.sinks is not None, block_size=block_size,
            head_size_v=self._head_size_v(layer), batch_invariant=self.batch_invariant, chunk_lookback=self.chunk_lookback,
            prefix_lm=images, prefix_lm_window=(self.sliding_window or 0) if clamp else 0, **terms)

    def _head_size_v(self, layer: Any) -> int:
        return getattr(layer, "head_size_v", None) or self.head_size

    def _params(self, layer: Any) -> Params:
        params: list[tuple[str, Any]] = []
        if self.sinks is not None:
            params.append(("sinks", self.sinks))
        if self.alibi_slopes is not None:
            params.append(("alibi_slopes", self.alibi_slopes))
        cached = self.attn_type in ("decoder", "encoder_decoder")
        if self.quantized_query:
            params.append(("q_scale", float(layer._q_scale_float)))
        if self.kv_cache_dtype == "int4_per_token_head" and cached:
            params += [(f"hadamard_signs_{name}", signs_of(size))
                       for name, size in (("k", self.head_size), ("v", self._head_size_v(layer)))]
        if describe.KV_DTYPES[self.kv_cache_dtype] in describe.SCALED and cached and layer is not None:
            per_head = self._scales_per_head(layer)
            params += [("k_scale", layer._k_scale if per_head else float(layer._k_scale_float)),
                       ("v_scale", layer._v_scale if per_head else float(layer._v_scale_float))]
        return tuple(params)

    @staticmethod
    def _scales_per_head(layer: Any) -> bool:
        scale = getattr(layer, "_k_scale", None)
        return isinstance(scale, torch.Tensor) and scale.numel() > 1

    def version(self, layer: Any) -> Any:
        """A layer is bound again when this changes."""
        return self.output_form, self.causal_per_request, self.quantized_query, *(
            getattr(layer, f"_{name}_scale_float", 1.0) for name in "qkv")

    def member(self, layer: Any, kv_cache: torch.Tensor, m: LibattnMetadata, dtype: torch.dtype) -> Member:
        """The layer for `Steps`."""
        k_pages, v_pages = pages_of(kv_cache, self.head_size, self._head_size_v(layer), self.kv_cache_dtype)
        query = {"q_scale_form": "per_tensor", "q_dtype": "fp8_e4m3"} if self.quantized_query else {}
        desc = self._describe(layer, dtype, kv_cache.shape[2], device_seq_lens_only=m.seq_lens.device.type != "cpu",
                              causal_per_request=self.causal_per_request, output_form=self.output_form,
                              scales_per_head=self._scales_per_head(layer), **query)
        return Member(desc, index_of(str(getattr(layer, "layer_name", ""))), self._params(layer), k_pages, v_pages)

    def forward(self, layer: Any, query: torch.Tensor, key: torch.Tensor | None, value: torch.Tensor | None,
                kv_cache: torch.Tensor, attn_metadata: Any, output: torch.Tensor,
                output_scale: torch.Tensor | None = None, output_block_scale: torch.Tensor | None = None,
                **_: Any) -> torch.Tensor:
        """Writes the step's keys and attends; without metadata (profiling) the output is zero."""
        if output_block_scale is not None and output_scale is None:
            raise make(Status.INVALID_ARGUMENT, "output_scale", "None next to output_block_scale; nvfp4 has both")
        self.output_form = "plain" if output_scale is None else "fp8_static" if output_block_scale is None else "nvfp4"
        if attn_metadata is None:
            if output_block_scale is not None:
                output_block_scale.view(torch.uint8).fill_(0)
            return output.fill_(0)
        m: LibattnMetadata = attn_metadata
        size_v = self._head_size_v(layer)
        q = query.view(-1, self.num_heads, self.head_size)
        k = None if key is None else key.view(-1, self.num_kv_heads, self.head_size)
        v = None if value is None else value.view(-1, self.num_kv_heads, size_v)
        out = output.view(-1, self.num_heads, size_v // (1 + (self.output_form == "nvfp4")))
        self.quantized_query = query.dtype == torch.float8_e4m3fn
        # nvfp4: libattn writes a row of block scales for each token; vLLM's products read them in tiles.
        scales = None if output_block_scale is None else torch.zeros_like(output_block_scale)
        quant = None if output_scale is None else output_quant(
            output_scale.reshape(1), None if scales is None else scales[:q.shape[0], :self.num_heads * size_v // 16])
        if self.attn_type in ("encoder", "encoder_only"):
            self._encode(layer, q, k, v, out, m, quant)
        else:
            self._attend(layer, q, k, v, kv_cache, out, m, quant)
        if output_block_scale is not None:
            tiles_of(output_block_scale).copy_(scales.view(torch.uint8).unflatten(1, (-1, 4)).unflatten(0, (-1, 4, 32)))
        return output

    def _attend(self, layer: Any, q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None, kv_cache: torch.Tensor,
                out: torch.Tensor, m: LibattnMetadata, quant: Any) -> None:
        self.causal_per_request |= m.causal_per_request
        dtype = q.dtype if not self.quantized_query else k.dtype if k is not None else torch.get_default_dtype()
        writes = k is not None and self.kv_sharing_target_layer_name is None
        new = (k, v) if writes else (None, None)
        m.steps.run(layer, self, kv_cache, m, dtype, lambda: batch_of(m, q.shape[0], self.attn_type == "encoder_decoder"),
                    (q, *new, out), 0 if writes else NO_WRITE, lambda bound: quant)

    def do_kv_cache_update(self, layer: Any, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor,
                           slot_mapping: torch.Tensor) -> None:
        """`forward` writes the cache itself (``forward_includes_kv_cache_update``)."""
        raise make(Status.ORDER, "do_kv_cache_update", "called for a backend whose forward writes the cache")

    def _encode(self, layer: Any, q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None, out: torch.Tensor,
                m: LibattnMetadata, quant: Any) -> None:
        if k is None or v is None:
            raise make(Status.INVALID_ARGUMENT, "key", "None; an encoder's keys come with its queries")
        desc = self._describe(layer, q.dtype, 0, output_form=self.output_form)
        bound = store.bound(desc, lambda: desc, index_of(str(getattr(layer, "layer_name", ""))), q.device,
                            self._params(layer))
        batch = Batch(m.query_start_loc.to(torch.int32), query_start_loc_host=m.query_start_loc_cpu,
                      num_tokens=max(q.shape[0], m.num_actual_tokens))
        stream = stream_of(q.device)
        bound.update(batch, object(), stream)
        bound.run_rows(stream, q, k, v, out, extension=quant)


def _refuse_connector(given: Any) -> None:
    """vLLM's example moves rows of MLA where metadata is vLLM's own class, and others in the order of plain layers."""
    name = getattr(given, "kv_connector", None)
    if name == "ExampleConnector":
        raise make(Status.UNSUPPORTED, "kv_transfer_config", f"{name}, next to MLA; {describe.ADVICE}")


class LatentImpl(MLAAttentionImpl):
    """One MLA layer. vLLM's own layer would project a decode's queries into latent space, and its outputs back; here
    all requests come as prefills, with queries per head, and libattn's core does what each needs. With an indexer vLLM since
    0.32 writes the cache and projects the queries of all requests and their outputs itself."""

    supports_pcp: bool = False
    supports_quant_query_input: bool = False
    can_return_lse_for_decode: bool = True  # as above
    supports_dcp: bool = True
    supports_mtp_with_cp_non_trivial_interleave_size: bool = True

    def __init__(self, num_heads: int, head_size: int, scale: float, num_kv_heads: int = 1,
                 alibi_slopes: list[float] | None = None, sliding_window: int | None = None,
                 kv_cache_dtype: str = "auto", logits_soft_cap: float | None = None,
                 attn_type: Any = AttentionType.DECODER, kv_sharing_target_layer_name: str | None = None,
                 q_lora_rank: int | None = None, kv_lora_rank: int = 0, qk_nope_head_dim: int = 0,
                 qk_rope_head_dim: int = 0, qk_head_dim: int = 0, v_head_dim: int = 0, kv_b_proj: Any = None,
                 indexer: Any = None, topk_indices_buffer: torch.Tensor | None = None,
                 q_pad_num_heads: int | None = None, index_group_builder: Any = None, **unknown: Any) -> None:
        _known({**unknown, "alibi_slopes": alibi_slopes, "kv_sharing_target_layer_name": kv_sharing_target_layer_name})
        self._indexer, self._topk_indices = indexer, topk_indices_buffer
        if indexer is not None and describe.options().get("indexer"):
            from .indexer import serve

            serve(indexer)
        self.absorbs = describe.absorbs(int(indexer is not None or topk_indices_buffer is not None))
        self.is_sparse, self.supports_dense_mha_prefill = not self.absorbs, self.absorbs
        self.num_heads, self.num_kv_heads, self.head_size, self.scale = num_heads, 1, head_size, float(scale)
        self.sliding_window, self.kv_cache_dtype = sliding_window, kv_cache_dtype
        self.logits_soft_cap = logits_soft_cap
        self.attn_type = str(getattr(attn_type, "value", attn_type))
        self.q_lora_rank, self.kv_lora_rank, self.v_head_dim = q_lora_rank, kv_lora_rank, v_head_dim
        self.qk_nope_head_dim, self.qk_rope_head_dim = qk_nope_head_dim, qk_rope_head_dim
        self.kv_b_proj, self.batch_invariant = kv_b_proj, describe.invariance()
        self.projection: torch.Tensor | None = None
        self.k_scale: torch.Tensor | None = None
        self.limits, dtype = describe.limits(), describe.dtype()
        if describe.config() is not None:
            _refuse_connector(getattr(describe.config(), "kv_transfer_config", None))
            describe.refuse_unserved(self._describe(dtype, 64, describe.device()[0] != "cpu"))
        weight = torch.empty(num_heads * (qk_nope_head_dim + v_head_dim), kv_lora_rank, dtype=dtype, device=describe.torch_device())
        reserve(self, self._describe(dtype, 64, weight.is_cuda), (("kv_b_proj", weight),) if self.absorbs else ())

    @property
    def topk_indices_buffer(self) -> torch.Tensor | None:
        """Positions that the model's indexer chose for each token, -1 after them [tokens, k]; None: attention is dense. A draft's
        indexer may get another buffer after its layers are made."""
        return self._topk_indices if self._indexer is None else self._indexer.topk_indices_buffer

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """kv_b_proj as the checkpoint has it, unquantized. vLLM 0.26 does not call this."""
        if not self.absorbs:
            return
        from vllm.model_executor.layers.quantization.utils.quant_utils import get_and_maybe_dequant_weights

        self.projection = get_and_maybe_dequant_weights(self.kv_b_proj, out_dtype=act_dtype)

    def _describe(self, dtype: torch.dtype, block_size: int, device_seq_lens_only: bool) -> Any:
        lists = self.topk_indices_buffer
        sizes = MlaDesc(self.kv_lora_rank, self.qk_nope_head_dim, self.qk_rope_head_dim, self.v_head_dim,
                        topk=0 if lists is None else lists.shape[1], absorb_in_core=self.absorbs)
        return describe.layer(
            "layers.0", self.num_heads, 1, self.head_size, dtype, scale=self.scale, head_size_v=self.v_head_dim,
            sliding_window=self.sliding_window, kv_cache_dtype=self.kv_cache_dtype, soft_cap=self.logits_soft_cap,
            block_size=block_size, device_seq_lens_only=device_seq_lens_only, mla=sizes,
            batch_invariant=self.batch_invariant)

    def version(self, layer: Any) -> Any:
        """A layer is bound again when this changes."""
        return None if self.projection is None else self.projection.data_ptr()

    def member(self, layer: Any, kv_cache: torch.Tensor, m: LibattnMetadata, dtype: torch.dtype) -> Member:
        """The layer for `Steps`; `layer` is vLLM's, or None where `forward_mha` does not know it."""
        if self.projection is None:
            self.process_weights_after_loading(dtype)
        desc = self._describe(dtype, kv_cache.shape[-2], m.seq_lens.device.type != "cpu")
        params: list[tuple[str, Any]] = [("kv_b_proj", self.projection)] if self.absorbs else []
        if describe.KV_DTYPES[self.kv_cache_dtype] in describe.SCALED:
            params.append(("k_scale", self.k_scale if layer is None else layer._k_scale))
        rows = kv_cache.unsqueeze(-2)
        if self.kv_cache_dtype == "fp8_ds_mla":
            rows = KvView(rows, None, self.head_size)
        return Member(desc, index_of(str(getattr(self.kv_b_proj, "prefix", ""))), tuple(params), rows, None)

    def do_kv_cache_update(self, kv_c_normed: torch.Tensor, k_pe: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor,
                           kv_cache_dtype: str, k_scale: torch.Tensor, *later: Any, **named: Any) -> None:
        """vLLM's own for sparse layers since 0.32; else nothing, since `forward_mha` writes the rows with the step."""
        if not self.absorbs:
            super().do_kv_cache_update(kv_c_normed, k_pe, kv_cache, slot_mapping, kv_cache_dtype, k_scale, *later, **named)

    def forward_mha(self, q: torch.Tensor, kv_c_normed: torch.Tensor, k_pe: torch.Tensor,
                    kv_c_and_k_pe_cache: torch.Tensor, attn_metadata: Any, k_scale: torch.Tensor,
                    output: torch.Tensor, output_scale: torch.Tensor | None = None) -> None:
        """Writes the step's rows and attends."""
        self.k_scale = k_scale
        self._run(None, kv_c_and_k_pe_cache, attn_metadata, output.view(-1, self.num_heads, self.v_head_dim), 0,
                  q_nope=q[..., :self.qk_nope_head_dim], q_pe=q[..., self.qk_nope_head_dim:], kv_c=kv_c_normed,
                  k_pe=k_pe.view(-1, self.qk_rope_head_dim))

    def forward_mqa(self, q: Any, kv_c_and_k_pe_cache: torch.Tensor, attn_metadata: Any, layer: Any,
                    ) -> tuple[torch.Tensor, None]:
        """All requests of a sparse layer since 0.32: latent queries and those of rotary parts, latent outputs."""
        if self.absorbs:  # `LibattnMetadata` has no decodes
            raise make(Status.ORDER, "forward_mqa", "called for metadata without decodes")
        q_nope, q_pe = q
        out = q_nope.new_empty(q_nope.shape)
        self._run(layer, kv_c_and_k_pe_cache, attn_metadata, out, NO_WRITE, q_nope=q_nope, q_pe=q_pe)
        return out, None

    def record_logical_topk_ready(self) -> None:
        """An event for copies of vLLM's index groups, which no layer of this class is in."""

    def _run(self, layer: Any, kv_cache: torch.Tensor, m: LibattnMetadata, out: torch.Tensor, flags: int, **rows: torch.Tensor) -> None:
        def extension(bound: Any) -> Any:
            io, lists = bound.io(attn_io_mla, **rows), self.topk_indices_buffer
            if lists is not None:
                io.topk_indices, io.topk_stride = lists.data_ptr(), lists.stride(0)
            return io

        m.steps.run(layer, self, kv_cache, m, out.dtype, lambda: batch_of(m, out.shape[0]), (None, None, None, out), flags, extension)


__all__ = ["LatentImpl", "LibattnImpl", "index_of", "pages_of"]
