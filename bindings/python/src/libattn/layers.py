# SPDX-License-Identifier: Apache-2.0
"""What a layer is (``attn/layer.h``): everything that changes its meaning, so that nothing is dropped silently."""
from __future__ import annotations

import ctypes
from ctypes import Structure, sizeof
from dataclasses import dataclass, fields
from enum import IntEnum
from typing import Any

from ._declarations import (ATTN_VIEW_HND, ATTN_VIEW_LATENT, ATTN_VIEW_NHD, ATTN_VIEW_PACKED,
                            ATTN_VIEW_SEPARATE_STRIDES, Alibi, DtypeId, Encoder, ExtId, GraphLevel, KvDtype, LayerKind,
                            OutputForm, Rope, ScaleForm, Status, TreeMask, attn_context_parallel, attn_ext,
                            attn_recurrent_desc, attn_layer_desc, attn_mla_desc)
from .errors import make
from .structs import filled

#: Fields that are given by name, and their enumerations.
_CODES: dict[str, type[IntEnum]] = {
    "kind": LayerKind, "dtype": DtypeId, "kv_dtype": KvDtype, "alibi": Alibi, "tree_mask": TreeMask,
    "q_scale_form": ScaleForm, "k_scale_form": ScaleForm, "v_scale_form": ScaleForm, "p_scale_form": ScaleForm,
    "q_dtype": DtypeId, "output_form": OutputForm, "graph_level": GraphLevel, "rope": Rope,
}
_VIEW_FORMS = {"nhd": ATTN_VIEW_NHD, "hnd": ATTN_VIEW_HND, "packed": ATTN_VIEW_PACKED, "latent": ATTN_VIEW_LATENT,
          "separate_strides": ATTN_VIEW_SEPARATE_STRIDES}
_CAUSAL_KINDS = (LayerKind.DECODER, LayerKind.MLA, LayerKind.RECURRENT)
#: Names of layers that are a kind and a parameter.
_ENCODERS = {"encoder_only": Encoder.ONLY, "mm_encoder": Encoder.MULTIMODAL}
_KINDS = {**dict.fromkeys(_ENCODERS, "encoder"), "mla_sparse": "mla", "static_sink": "decoder"}


def code_of(field: str, value: str | int, codes: type[IntEnum]) -> int:
    """The number of a name such as ``"fp8_e4m3"``; numbers are taken as they are."""
    if isinstance(value, str):
        if value.upper() not in codes.__members__:
            raise make(Status.INVALID_ARGUMENT, field,
                       f"'{value}'; allowed are {', '.join(codes.__members__).lower()}")
        return int(codes[value.upper()])
    return int(value)


@dataclass(frozen=True)
class MlaDesc:
    """Multi-head latent attention, see ``attn/mla.h``."""

    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    topk: int = 0
    absorb_in_core: bool = False
    padded_num_q_heads: int = 0
    weight_dtype: str | int = "default"
    context_workspace_tokens: int = 0

    def to_struct(self) -> Structure:
        """``struct attn_mla_desc``."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        values["weight_dtype"] = code_of("weight_dtype", self.weight_dtype, DtypeId)
        values["absorb_in_core"] = int(self.absorb_in_core)
        return filled(attn_mla_desc, ext=attn_ext(id=ExtId.MLA_DESC, struct_size=sizeof(attn_mla_desc)), **values)


@dataclass(frozen=True)
class GdnDesc:
    """The gated delta rule, see ``attn/recurrent.h``."""

    num_k_heads: int
    num_v_heads: int
    head_size_k: int
    head_size_v: int
    conv_width: int = 0
    conv_silu: bool = False
    qk_l2norm: bool = False
    chunk_size: int = 0
    num_speculative_tokens: int = 0
    state_dtype: str | int = "default"

    def to_struct(self) -> Structure:
        """``struct attn_recurrent_desc``."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        values["state_dtype"] = code_of("state_dtype", self.state_dtype, DtypeId)
        values["conv_silu"], values["qk_l2norm"] = int(self.conv_silu), int(self.qk_l2norm)
        return filled(attn_recurrent_desc, ext=attn_ext(id=ExtId.RECURRENT_DESC, struct_size=sizeof(attn_recurrent_desc)),
                      **values)


@dataclass(frozen=True)
class ContextParallel:
    """A layer spread over ranks, see ``attn/collectives.h``.

    Parameters
    ----------
    decode, prefill : int, optional
        Addresses of ``struct attn_collectives``, such as libattn_mpi, libattn_nccl and
        `libattn.torch.ranks` make; they outlive the model.
    all_to_all : bool
        How partial outputs are reduced; False: all-gather and reduce-scatter.
    zigzag : bool
        Order of a rank's prefill slices; False: contiguous.
    """

    decode: int | None = None
    prefill: int | None = None
    interleave: int = 0
    all_to_all: bool = False
    zigzag: bool = False

    def to_struct(self) -> Structure:
        """``struct attn_context_parallel``."""
        return filled(
            attn_context_parallel,
            ext=attn_ext(id=ExtId.CONTEXT_PARALLEL, struct_size=sizeof(attn_context_parallel)),
            decode=self.decode, prefill=self.prefill, interleave=self.interleave, reduce=int(self.all_to_all),
            order=int(self.zigzag))


@dataclass(frozen=True)
class LayerDesc:
    """One attention layer.

    Codes are given by their names in lower case (``kind="cross"``, ``dtype="bf16"``, ``kv_dtype="fp8_e4m3"``) or
    as numbers. What is not explained here is a field of ``struct attn_layer_desc`` with its meaning there.

    Parameters
    ----------
    name : str
        Unique in the model.
    num_q_heads, num_kv_heads, head_size, head_size_v : int
        Hq, Hk, D, Dv; `head_size_v` 0 is D.
    scale : float
        Of q kᵀ; 0 is ``1 / sqrt(head_size)``, and of MLA ``1 / sqrt(nope + rope)``.
    causal : bool, optional
        By default what the kind is: decoders are causal, encoders and cross layers not.
    window : (int, int), optional
        Keys seen to the left and to the right next to the query's own; -1 is open. A decoder's window of w tokens,
        its own included, is ``(w - 1, 0)``.
    needed_view_forms : tuple of str
        What the engine's own cache layout needs, of ``nhd``, ``hnd``, ``packed``, ``latent``, ``separate_strides``: who
        does not read it is refused at selection.
    """

    name: str
    num_q_heads: int
    num_kv_heads: int
    head_size: int
    scale: float = 0.0
    kind: str | int = "decoder"
    dtype: str | int = "f32"
    kv_dtype: str | int = "auto"
    head_size_v: int = 0
    causal: bool | None = None
    window: tuple[int, int] | None = None
    soft_cap: float = 0.0
    has_sinks: bool = False
    alibi: str | int = "none"
    chunk_size: int = 0
    chunk_lookback: int = 0
    sink_len: int = 0
    prefix_lm: bool = False
    prefix_lm_window: int = 0
    tree_mask: str | int = "none"
    causal_per_request: bool = False
    kv_sharing_target: str | None = None
    block_size: int = 0
    num_speculative_tokens: int = 0
    parallel_drafting: bool = False
    padded_page_bytes: int = 0
    q_scale_form: str | int = "none"
    k_scale_form: str | int = "none"
    v_scale_form: str | int = "none"
    p_scale_form: str | int = "none"
    q_dtype: str | int = "default"
    output_form: str | int = "plain"
    output_scale_pow2: bool = False
    output_scale_column_major: bool = False
    skip_kv_quantization: bool = False
    needs_lse: bool = False
    graph_level: str | int = "never"
    batch_invariant: int = 0
    rope: str | int = "none"
    qk_norm: bool = False
    needs_block_table_row: bool = False
    device_seq_lens_only: bool = False
    fast_prefill: bool = False
    max_seq_len: int = 0
    max_num_reqs: int = 0
    needed_view_forms: tuple[str, ...] = ()
    mla: MlaDesc | None = None
    gdn: GdnDesc | None = None
    context_parallel: ContextParallel | None = None

    def to_struct(self) -> tuple[attn_layer_desc, list[Any]]:
        """``struct attn_layer_desc``, and what it points at, to be kept until the call has returned."""
        values: dict[str, Any] = {"encoder": int(_ENCODERS.get(str(self.kind), 0))}
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in ("window", "mla", "gdn", "context_parallel", "causal", "needed_view_forms"):
                continue
            if field.name == "kind":
                value = _KINDS.get(value, value)
            if field.name in _CODES:
                value = code_of(field.name, value, _CODES[field.name])
            elif isinstance(value, str):
                value = value.encode()
            elif isinstance(value, bool):
                value = int(value)
            values[field.name] = value
        unknown = [form for form in self.needed_view_forms if form not in _VIEW_FORMS]
        if unknown:
            raise make(Status.INVALID_ARGUMENT, "needed_view_forms", f"'{unknown[0]}'; allowed are {', '.join(_VIEW_FORMS)}")
        values["needed_view_forms"] = sum(_VIEW_FORMS[form] for form in self.needed_view_forms)
        values["causal"] = int(values["kind"] in _CAUSAL_KINDS if self.causal is None else self.causal)
        size = self.mla.qk_nope_head_dim + self.mla.qk_rope_head_dim if self.mla is not None else self.head_size
        values["scale"] = self.scale or size**-0.5
        if self.window is not None:
            values.update(has_window=1, window_left=self.window[0], window_right=self.window[1])
        struct = filled(attn_layer_desc, struct_size=sizeof(attn_layer_desc), **values)
        kept: list[Any] = []
        for extension in (self.mla, self.gdn, self.context_parallel):
            if extension is not None:
                ext = extension.to_struct()
                ext.ext.next = struct.next
                struct.next = ctypes.addressof(ext)
                kept.append(ext)
        return struct, kept
