# SPDX-License-Identifier: Apache-2.0
"""SGLang's layers in libattn's words."""
from __future__ import annotations

from typing import Any, NoReturn

import torch

from ..._declarations import Status
from ...errors import make
from ...layers import LayerDesc, MlaDesc
from ...torch.steps import Member
from ...torch.store import DTYPES, Params, identity

KV_DTYPES = {torch.float16: "f16", torch.bfloat16: "bf16", torch.float32: "f32", torch.float8_e4m3fn: "fp8_e4m3",
             torch.float8_e5m2: "fp8_e5m2"}


def refuse(field: str, asked: Any, supported: str) -> NoReturn:
    """What SGLang asks and this adapter does not carry."""
    raise make(Status.UNSUPPORTED, field, f"{asked}; supported: {supported}")


class PoolLayer:
    """A `RadixAttention` as it ran last, with its pages of the token pool, for `libattn.torch.steps.Steps`."""

    def __init__(self, layer: Any) -> None:
        self.layer, self.impl = layer, self
        self._asked: Any = None

    def ask(self, dtype: torch.dtype, k_buffer: torch.Tensor, v_buffer: torch.Tensor, page_size: int, chunk_size: int,
            sinks: torch.Tensor | None, tree: bool) -> None:
        """Take what the layer is now called with, and describe it where that has changed.

        Parameters
        ----------
        k_buffer, v_buffer : [slots, heads, head_size]
        chunk_size : int
            Of layers with ``use_irope``.
        tree : bool
            Whether steps verify drafts, which see some of those before them.
        """
        layer = self.layer
        params: Params = () if sinks is None else (("sinks", sinks),)
        if k_buffer.dtype.itemsize == 1:
            params += (("k_scale", float(layer.k_scale_float or 1.0)), ("v_scale", float(layer.v_scale_float or 1.0)))
        asked = (dtype, k_buffer.data_ptr(), v_buffer.data_ptr(), k_buffer.shape, identity(params))
        if asked == self._asked:
            return
        self.desc = describe(layer, dtype, k_buffer.dtype, page_size, chunk_size, sinks is not None, tree)
        whole = k_buffer.shape[0] // page_size * page_size
        self.kv_cache, self.v_pages = (buffer[:whole].view(-1, page_size, *buffer.shape[1:])
                                       for buffer in (k_buffer, v_buffer))
        self.params, self._asked = params, asked

    def version(self, layer: Any) -> Any:
        """A layer is bound again when this changes."""
        return self._asked

    def member(self, layer: Any, k_pages: torch.Tensor, metadata: Any, dtype: Any) -> Member:
        """The layer for `Steps`."""
        return Member(self.desc, self.layer.layer_id, self.params, k_pages, self.v_pages)


class LatentLayer(PoolLayer):
    """A `RadixAttention` over latent rows (MLA): SGLang projects queries into latent space and outputs out of it."""

    def ask(self, dtype: torch.dtype, rows: torch.Tensor, page_size: int, sizes: MlaDesc, tree: bool) -> None:  # type: ignore[override]
        """As `PoolLayer.ask`; `rows` [slots, 1, rank + rope]."""
        asked = (dtype, rows.data_ptr(), rows.shape)
        if asked == self._asked:
            return
        if rows.dtype != dtype:
            refuse("kv_cache_dtype", f"{rows.dtype} with activations of {dtype}", "auto, next to multi-head latent attention")
        self.desc = describe_latent(self.layer.tp_q_head_num, self.layer.scaling, dtype, page_size, sizes, tree)
        whole = rows.shape[0] // page_size * page_size
        self.kv_cache, self.v_pages = rows[:whole].view(-1, page_size, *rows.shape[1:]), None
        self.params, self._asked = (), asked


def latent_sizes(model: Any) -> MlaDesc:
    """Those of a model with multi-head latent attention, whose queries SGLang projects."""
    return MlaDesc(model.kv_lora_rank, model.qk_nope_head_dim, model.qk_rope_head_dim, model.v_head_dim)


def describe_latent(num_heads: int, scale: float, dtype: torch.dtype, page_size: int, sizes: MlaDesc, tree: bool) -> LayerDesc:
    """Describe a layer of multi-head latent attention, on one rank."""
    return LayerDesc("layers.0", num_heads, 1, sizes.kv_lora_rank + sizes.qk_rope_head_dim, scale, "mla", DTYPES[dtype],
                     head_size_v=sizes.v_head_dim, tree_mask="bits" if tree else "none", block_size=page_size, mla=sizes)


def describe(layer: Any, dtype: torch.dtype, kv_dtype: torch.dtype, page_size: int, chunk_size: int,
             has_sinks: bool, tree: bool) -> LayerDesc:
    """Describe a `RadixAttention`; raises `libattn.UnsupportedError` where its word has no counterpart here."""
    kind = str(getattr(layer.attn_type, "value", layer.attn_type))
    # decoder_bidirectional is causal but for an image's tokens, whose places do not come here.
    if layer.is_cross_attention or kind not in ("decoder", "encoder_only"):
        refuse("attn_type", "cross" if layer.is_cross_attention else kind, "decoder, encoder_only")
    if dtype not in DTYPES or kv_dtype not in KV_DTYPES:
        refuse("dtype", f"{dtype} with a cache of {kv_dtype}", f"{', '.join(map(str, KV_DTYPES))}")
    if getattr(layer, "xai_temperature_len", -1) > 0:
        refuse("xai_temperature_len", layer.xai_temperature_len, "-1")
    if layer.pos_encoding_mode != "NONE":
        refuse("pos_encoding_mode", layer.pos_encoding_mode, "NONE")
    if layer.logit_cap and layer.logit_capping_method != "tanh":
        refuse("logit_capping_method", layer.logit_capping_method, "tanh")
    # SGLang's window counts the keys before the query's own.
    window = layer.sliding_window_size if layer.sliding_window_size is not None else -1
    if window > -1 and kind != "decoder":
        refuse("sliding_window_size", f"{window} of {kind}", "-1, and windows of decoders")
    scales: dict[str, Any] = {}
    if KV_DTYPES[kv_dtype].startswith("fp8"):
        scales = {"k_scale_form": "per_tensor", "v_scale_form": "per_tensor"}
    return LayerDesc("layers.0", layer.tp_q_head_num, layer.tp_k_head_num, layer.qk_head_dim, layer.scaling,
                     "decoder", DTYPES[dtype], KV_DTYPES[kv_dtype], head_size_v=layer.v_head_dim,
                     causal=kind == "decoder", window=(window, 0) if window > -1 else None,
                     chunk_size=chunk_size if layer.use_irope else 0, soft_cap=float(layer.logit_cap or 0.0),
                     has_sinks=has_sinks, tree_mask="bits" if tree else "none", block_size=page_size, **scales)


__all__ = ["KV_DTYPES", "LatentLayer", "PoolLayer", "describe", "describe_latent", "latent_sizes", "refuse"]
