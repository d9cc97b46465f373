# SPDX-License-Identifier: Apache-2.0
"""The attention and the mask function that Transformers' models call."""
from __future__ import annotations

import weakref
from typing import Any

import torch

from ..._declarations import Status
from ...errors import AttnError, make
from ...torch import attend, attend_packed, attend_pages
from ...torch.segments import Window
from .hooks import ADVICE

_counters: dict[int, tuple[weakref.ref[Any], int]] = {}


def attention_mask(*args: Any, **kwargs: Any) -> torch.Tensor | None:
    """Booleans ``[B, 1, S, L]`` as for ``sdpa``: None where causality or full sight says it all. A window hides nothing of a prompt
    that is as long, nor from one query over a cache that holds it. Chunked layers keep their mask: a chunk may begin anywhere in the
    cache."""
    from transformers.masking_utils import sdpa_mask

    window, config = kwargs.get("local_size"), kwargs.get("config")
    if (window is not None and kwargs.get("q_length") in (1, window) and kwargs.get("kv_length") == window and
            kwargs.get("allow_is_causal_skip") and config is not None and getattr(config, "attention_chunk_size", None) is None):
        kwargs["local_size"] = None
    return sdpa_mask(*args, **kwargs)


def _index(module: torch.nn.Module) -> int:
    """The layer's number: its own, or the order in which layers of its configuration were first called."""
    number = getattr(module, "layer_idx", None)
    if number is None:
        number = module.__dict__.get("_libattn_index")
    if number is None:
        config = getattr(module, "config", module)
        kept = _counters.get(id(config))
        number = kept[1] if kept is not None and kept[0]() is config else 0
        _counters[id(config)] = (weakref.ref(config), number + 1)
        module.__dict__["_libattn_index"] = number
    return number


def _kind(module: torch.nn.Module, causal: bool, queries: int, keys: int) -> str:
    if causal:
        return "decoder"
    config = getattr(module, "config", None)
    if queries != keys or getattr(module, "is_decoder", False) or "cross" in type(module).__name__.lower():
        return "cross"
    if any(hasattr(config, name) for name in ("image_size", "patch_size", "num_mel_bins")):
        return "mm_encoder"
    return "encoder" if getattr(config, "is_encoder_decoder", False) else "encoder_only"


def _window(sliding_window: int | None, causal: bool) -> Window:
    """Transformers counts the query's own position in a window of w: w - 1 keys to a side."""
    if not sliding_window:
        return None
    return (sliding_window - 1, 0) if causal else (sliding_window - 1, sliding_window - 1)


def _refuse(dropout: float, kwargs: dict[str, Any]) -> None:
    """What would change the result and cannot be said to the kernels."""
    if dropout:
        raise make(Status.UNSUPPORTED, "dropout", f"{dropout}; supported: 0 (libattn serves inference)")
    if kwargs.get("output_attentions"):
        raise make(Status.UNSUPPORTED, "output_attentions", "True; supported: no (weights are never materialised)")
    for name in ("position_bias", "head_mask"):
        if kwargs.get(name) is not None:
            raise make(Status.UNSUPPORTED, name, f"{list(kwargs[name].shape)}; supported: no (a learned bias per head "
                       "is no term of libattn's attention: masks, windows, soft caps, sinks and ALiBi are)")


class _Forward(torch.autograd.Function):
    """Lets a model run where gradients are on, and says so if they are asked for."""

    @staticmethod
    def forward(ctx: Any, call: Any, layer: str, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.layer = layer
        return call(*tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        raise make(Status.UNSUPPORTED, "backward", f"a gradient, which libattn does not compute; run under torch.no_grad()\n  "
                   f"{ctx.layer}; {ADVICE}")


def _named(module: torch.nn.Module) -> str:
    return f"layer {_index(module)}, a {type(module).__name__}"


def attention(module: torch.nn.Module, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
    """One call of a model's layer; a refusal says which layer, and what else there is."""
    try:
        return _attention(module, *args, **kwargs)
    except AttnError as error:
        raise make(error.status, error.field, f"{error.message}\n  {_named(module)}; {ADVICE}") from None


def _attention(module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
              attention_mask: torch.Tensor | None, dropout: float = 0.0, scaling: float | None = None,
              is_causal: bool | None = None, sliding_window: int | None = None, softcap: float | None = None,
              s_aux: torch.Tensor | None = None, cache: Any | None = None,
              **kwargs: Any) -> tuple[torch.Tensor, None]:
    """One call.

    Parameters
    ----------
    query, key, value : [B, heads, rows, head_size]
    attention_mask : [B, 1, S, L], optional
        From `attention_mask`, or the user's own.
    cache : PagedAttentionCache, optional
        Continuous batching's.

    Returns
    -------
    out : [B, S, Hq, Dv]
    None
        Weights are never materialised.
    """
    _refuse(dropout, kwargs)
    causal = bool(is_causal if is_causal is not None else getattr(module, "is_causal", True))
    common: dict[str, Any] = {
        "scale": scaling if scaling is not None else query.shape[-1]**-0.5, "window": _window(sliding_window, causal),
        "soft_cap": softcap or 0.0, "sinks": s_aux, "index": _index(module)}
    if cache is not None:
        return _paged(module, query, key, value, cache, common, kwargs), None
    if attention_mask is None and kwargs.get("cu_seq_lens_q") is not None and kwargs.get("cu_seq_lens_k") is not None:
        starts = (kwargs["cu_seq_lens_q"].to(torch.int32), kwargs["cu_seq_lens_k"].to(torch.int32))
        kind = _kind(module, causal, 0, 0)
        return attend_packed(query, key, value, *starts, causal=causal, kind=kind, **common), None
    queries, keys = query.shape[2], key.shape[2]
    if attention_mask is None and causal and 1 < queries < keys:
        # A prompt in an empty static cache: the slots after it hold nothing yet.
        key, value, keys = key[:, :, :queries], value[:, :, :queries], queries
    kind = _kind(module, causal, queries, keys)
    if torch.compiler.is_compiling():
        window = common.pop("window")
        sinks = common.pop("sinks")
        return torch.ops.libattn.attend(query, key, value, attention_mask, sinks, causal=causal, kind=kind,
                                        window=None if window is None else list(window), **common), None

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return attend(q, k, v, attention_mask, causal=causal, kind=kind, **common)

    if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
        return _Forward.apply(call, _named(module), query, key, value), None
    return call(query, key, value), None


def _paged(module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cache: Any,
           common: dict[str, Any], kwargs: dict[str, Any]) -> torch.Tensor:
    """Continuous batching: one batch entry holds the rows of all requests, one request after the other."""
    query_start_loc = kwargs["cu_seq_lens_q"]
    key, value = cache.update(key_states=key, value_states=value, layer_idx=module.layer_idx, kwargs=kwargs)
    starts = kwargs["cu_seq_lens_k"]  # the update has made them those of this layer's type
    if kwargs.get("block_table") is None:
        return attend_packed(query, key, value, query_start_loc.to(torch.int32), starts, causal=True, **common)
    q, k, v = (t[0].transpose(0, 1) for t in (query, key, value))
    out = attend_pages(q, k, v, kwargs["k_cache"], kwargs["v_cache"], kwargs["block_table"], starts[1:] - starts[:-1],
                       step=starts, **common)
    return out[None]
