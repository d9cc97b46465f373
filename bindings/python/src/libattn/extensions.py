# SPDX-License-Identifier: Apache-2.0
"""What some layers add to parameters, batches and runs: MLA, gated delta, quantized caches and outputs, rotary
embeddings, context parallelism (``attn/mla.h``, ``recurrent.h``, ``layer.h``, ``io.h``, ``collectives.h``).

Each function gives a ctypes structure for the ``extensions`` argument of `Layer.bind_params`, `Batch` or `Plan.run`.
The tensors behind it are borrowed and kept alive by it.
"""
from __future__ import annotations

from ctypes import Structure, sizeof
from typing import Any

from ._declarations import (
    ExtId,
    Rope,
    Status,
    attn_batch_context_parallel,
    attn_io_output_quant,
    attn_io_rope,
    attn_kv_quant_params,
    attn_batch_recurrent,
    attn_ext,
    attn_recurrent_state,
    attn_recurrent_weights,
    attn_io_recurrent,
    attn_io_mla,
    attn_mla_weights,
)
from .errors import make
from .tensors import Tensor, as_tensor


def _made(kind: type[Structure], number: ExtId, kept: list[Tensor], **values: Any) -> Structure:
    struct = kind(ext=attn_ext(id=number, struct_size=sizeof(kind)), **values)
    struct._kept = kept  # a Structure takes attributes; ctypes does not see them
    return struct


def _pointer(value: Any | None, kept: list[Tensor]) -> int | None:
    """``struct attn_tensor *``; None stays NULL."""
    if value is None:
        return None
    kept.append(as_tensor(value))
    return kept[-1].pointer


def _data(name: str, value: Any | None, dtype: str, kept: list[Tensor]) -> int | None:
    """The address of contiguous elements; None stays NULL."""
    if value is None:
        return None
    t = as_tensor(value)
    if t.dtype != dtype or not t.is_contiguous():
        raise make(Status.INVALID_ARGUMENT, name, f"{t}; contiguous {dtype} is needed")
    kept.append(t)
    return t.data


def gdn_weights(a_log: Any, dt_bias: Any, conv_weight: Any | None = None, conv_bias: Any | None = None) -> Structure:
    """For `Layer.bind_params`: float32 [Hv] twice, and the convolution's [channels, width] and [channels]."""
    kept: list[Tensor] = []
    return _made(attn_recurrent_weights, ExtId.RECURRENT_WEIGHTS, kept, a_log=_data("a_log", a_log, "f32", kept),
                 dt_bias=_data("dt_bias", dt_bias, "f32", kept), conv_weight=_pointer(conv_weight, kept),
                 conv_bias=_pointer(conv_bias, kept))


def gdn_batch(state_slots: Any, has_initial_state: Any | None = None,
              num_accepted_tokens: Any | None = None) -> Structure:
    """For `Batch`.

    Parameters
    ----------
    state_slots : int32 tensor [R] or [R, 1 + n]
        Where each request's state lies; negative: skipped. Two dimensions: speculative.
    has_initial_state : uint8 tensor [R], optional
        By default where a request has more keys than queries.
    num_accepted_tokens : int32 tensor [R], optional
        Speculative.
    """
    kept: list[Tensor] = []
    slots = as_tensor(state_slots)
    return _made(attn_batch_recurrent, ExtId.BATCH_RECURRENT, kept, state_slots=_data("state_slots", slots, "int32", kept),
                 state_slots_stride=slots.strides[0] if len(slots.shape) == 2 else 1,
                 has_initial_state=_data("has_initial_state", has_initial_state, "uint8", kept),
                 num_accepted_tokens=_data("num_accepted_tokens", num_accepted_tokens, "int32", kept))


def gdn_io(a: Any, b: Any, mixed_qkv: Any | None = None) -> Structure:
    """For `Plan.run`: [T, Hv] twice, and [T, 2 Hk Dk + Hv Dv] before the convolution; without it q, k, v count."""
    kept: list[Tensor] = []
    return _made(attn_io_recurrent, ExtId.IO_RECURRENT, kept, a=_pointer(a, kept), b=_pointer(b, kept),
                 mixed_qkv=_pointer(mixed_qkv, kept))


def gdn_state(state: Any, conv_state: Any | None = None) -> Structure:
    """For `Layer.bind_state`: float32 [slots, Hv, Dv, Dk] and [slots, channels, width - 1 (+ drafted)]."""
    t = as_tensor(state)
    if t.dtype != "f32" or len(t.shape) != 4 or t.strides[1:] != (t.shape[2] * t.shape[3], t.shape[3], 1):
        raise make(Status.INVALID_ARGUMENT, "state", f"{t}; float32 [slots, Hv, Dv, Dk] with compact slots is needed")
    made = attn_recurrent_state(struct_size=sizeof(attn_recurrent_state), state=t.data, state_stride_slot=t.strides[0],
                          num_slots=t.shape[0])
    made._kept = [t]
    if conv_state is not None:
        c = as_tensor(conv_state)
        if len(c.shape) != 3 or c.strides[2] != 1 or c.shape[0] != t.shape[0]:
            raise make(Status.INVALID_ARGUMENT, "conv_state", f"{c}; [{t.shape[0]}, channels, width - 1] with a "
                       "contiguous last dimension is needed")
        made.conv_state, made.conv_stride_slot, made.conv_stride_channel = c.data, c.strides[0], c.strides[1]
        made._kept.append(c)
    return made


def mla_weights(kv_b_proj: Any | None = None, w_uk: Any | None = None, w_uv: Any | None = None,
                w_uk_scale: Any | None = None, w_uv_scale: Any | None = None) -> Structure:
    """For `Layer.bind_params`: [Hq (nope + v), rank] as the checkpoint has it, or already split per head."""
    kept: list[Tensor] = []
    given = {"kv_b_proj": kv_b_proj, "w_uk": w_uk, "w_uv": w_uv, "w_uk_scale": w_uk_scale, "w_uv_scale": w_uv_scale}
    return _made(attn_mla_weights, ExtId.MLA_WEIGHTS, kept, **{k: _pointer(v, kept) for k, v in given.items()})


def mla_io(q_nope: Any, q_pe: Any, kv_c: Any | None = None, k_pe: Any | None = None,
           topk_indices: Any | None = None) -> Structure:
    """For `Plan.run`, in place of q, k, v.

    Parameters
    ----------
    q_nope : [T, Hq, nope], or [T, Hq, rank] without absorption in the core
    q_pe : [T, Hq, rope]
    kv_c, k_pe : [T, rank], [T, rope], optional
        The step's own latent rows; None: nothing is written.
    topk_indices : int32 [T, k], optional
        Sparse.
    """
    kept: list[Tensor] = []
    top = as_tensor(topk_indices) if topk_indices is not None else None
    return _made(attn_io_mla, ExtId.IO_MLA, kept, q_nope=_pointer(q_nope, kept), q_pe=_pointer(q_pe, kept),
                 kv_c=_pointer(kv_c, kept), k_pe=_pointer(k_pe, kept),
                 topk_indices=_data("topk_indices", top, "int32", kept), topk_stride=top.strides[0] if top else 0)


def kv_quant_params(hadamard_signs_k: Any | None = None, hadamard_signs_v: Any | None = None,
                    v_channel_scale: Any | None = None) -> Structure:
    """For `Layer.bind_params` of quantized caches: float32 [D] and [Dv] of +-1 (int4), [Hk, Dv] (int8_kv)."""
    kept: list[Tensor] = []
    given = {"hadamard_signs_k": hadamard_signs_k, "hadamard_signs_v": hadamard_signs_v,
             "v_channel_scale": v_channel_scale}
    return _made(attn_kv_quant_params, ExtId.KV_QUANT_PARAMS, kept,
                 **{name: _data(name, value, "f32", kept) for name, value in given.items()})


def rope_io(positions: Any, cos_sin: Any, form: str = "neox", rotary_dim: int = 0, q_norm_weight: Any | None = None,
            k_norm_weight: Any | None = None, norm_eps: float = 0.0) -> Structure:
    """For `Plan.run` of a layer with `rope`: q and k are rotated with the cache write, q in place.

    Parameters
    ----------
    positions : int64 tensor [T]
    cos_sin : tensor [max position, rotary_dim]
        The cosines' half, then the sines'.
    form : str
        ``neox`` or ``gptj``.
    rotary_dim : int
        0: head_size.
    q_norm_weight, k_norm_weight : tensor [D], optional
        RMS norm of each head's row before the rotation, with `norm_eps`.
    """
    if form.upper() not in Rope.__members__:
        raise make(Status.INVALID_ARGUMENT, "form", f"'{form}'; allowed are neox, gptj")
    kept: list[Tensor] = []
    return _made(attn_io_rope, ExtId.IO_ROPE, kept, form=Rope[form.upper()], rotary_dim=rotary_dim,
                 positions=_data("positions", positions, "int64", kept), cos_sin=_pointer(cos_sin, kept),
                 q_norm_weight=_pointer(q_norm_weight, kept), k_norm_weight=_pointer(k_norm_weight, kept),
                 norm_eps=norm_eps)


def output_quant(scale: Any | None = None, block_scales: Any | None = None) -> Structure:
    """For `Plan.run` of a layer with an `output_form`: float32 [1] that is read, and the scales that are written."""
    kept: list[Tensor] = []
    return _made(attn_io_output_quant, ExtId.IO_OUTPUT_QUANT, kept, scale=_data("scale", scale, "f32", kept),
                 block_scales=_pointer(block_scales, kept))


def context_parallel_batch(local_seq_lens: Any | None = None, query_positions: Any | None = None, *,
                           local_seq_lens_host: Any | None = None, max_local_seq_len: int = 0,
                           query_lens_host: Any | None = None) -> Structure:
    """For `Batch` of layers with a `ContextParallel`: int32 tensors as in ``struct attn_batch_context_parallel``."""
    kept: list[Tensor] = []
    given = {"local_seq_lens": local_seq_lens, "local_seq_lens_host": local_seq_lens_host,
             "query_positions": query_positions, "query_lens_host": query_lens_host}
    return _made(attn_batch_context_parallel, ExtId.BATCH_CONTEXT, kept, max_local_seq_len=max_local_seq_len,
                 **{name: _data(name, value, "int32", kept) for name, value in given.items()})
