# SPDX-License-Identifier: Apache-2.0
"""What a layer is (``attn/layer.h``): everything that changes its meaning, so that nothing is dropped silently."""
from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from enum import IntEnum
from typing import Any, ClassVar

from . import _declarations
from ._declarations import (ATTN_LAYER_DRAFT_COMPRESSOR, Alibi, CpOrder, CpReduce, DtypeId, Encoder, GraphLevel,
                            IndexerActivation, KvDtype, LayerKind, ListGroups, OutputForm, RecurrentGate, RecurrentGateActivation, RecurrentUpdate,
                            RecurrentWriteGate, Rope, ScaleForm, Status, TreeMask, attn_context_parallel,
                            attn_index_lists, attn_indexer_desc, attn_layer_desc, attn_mla_desc, attn_mm_encoder_quant,
                            attn_recurrent_desc, attn_recurrent_norm, attn_recurrent_rounding, attn_recurrent_rule)
from .errors import make
from .structs import Struct, chained

#: Fields that are given by name, and their enumerations.
_CODES: dict[str, type[IntEnum]] = {
    "kind": LayerKind, "dtype": DtypeId, "kv_dtype": KvDtype, "kv_dtype_v": KvDtype, "alibi": Alibi, "tree_mask": TreeMask,
    "q_scale_form": ScaleForm, "k_scale_form": ScaleForm, "v_scale_form": ScaleForm, "p_scale_form": ScaleForm,
    "q_dtype": DtypeId, "output_form": OutputForm, "graph_level": GraphLevel, "rope": Rope, "weight_dtype": DtypeId,
    "state_dtype": DtypeId, "rule": RecurrentUpdate, "gate": RecurrentGate, "write_gate": RecurrentWriteGate,
    "activation": IndexerActivation, "gate_activation": RecurrentGateActivation,
    "reduce": CpReduce, "order": CpOrder, "groups": ListGroups,
}
_MASKS = {"needed_view_forms": "ATTN_VIEW_", "needed_features": "ATTN_FEATURE_"}
#: Names of layers that are a kind and a parameter.
_ENCODERS = {"encoder_only": Encoder.ONLY, "mm_encoder": Encoder.MULTIMODAL}
_KINDS: dict[Any, Any] = {**dict.fromkeys(_ENCODERS, "encoder"), "mla_sparse": "mla", "static_sink": "decoder",
                          "gdn": "recurrent", "compressor": ATTN_LAYER_DRAFT_COMPRESSOR}


def code_of(field: str, value: str | int, codes: type[IntEnum]) -> int:
    """The number of a name such as ``"fp8_e4m3"``; numbers, vendors' codes too, are taken as they are."""
    if isinstance(value, str):
        if value.upper() not in codes.__members__:
            raise make(Status.INVALID_ARGUMENT, field,
                       f"'{value}'; allowed are {', '.join(codes.__members__).lower()}")
        return int(codes[value.upper()])
    return int(value)


def mask_of(field: str, value: int | Iterable[str], prefix: str) -> int:
    """The bits of names such as ``"lse"``, of constants that begin with `prefix`; a number is taken as it is."""
    if isinstance(value, int):
        return value
    bits = {name.removeprefix(prefix).lower(): bit for name, bit in vars(_declarations).items()
            if name.startswith(prefix) and not name.endswith("_COUNT")}
    for name in value:
        if name not in bits:
            raise make(Status.INVALID_ARGUMENT, field, f"'{name}'; allowed are {', '.join(bits)}")
    return sum(bits[name] for name in dict.fromkeys(value))


class _Described:
    """A dataclass whose fields are those of a struct, codes by name."""

    _struct: ClassVar[type[Struct]]

    def to_struct(self) -> Any:
        """The struct."""
        given = {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]
        return self._struct(**{name: code_of(name, value, _CODES[name]) if name in _CODES else value
                               for name, value in given.items()})


@dataclass(frozen=True)
class MlaDesc(_Described):
    """Multi-head latent attention, see ``attn/mla.h``."""

    _struct = attn_mla_desc
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    topk: int = 0
    absorb_in_core: bool = False
    padded_num_q_heads: int = 0
    weight_dtype: str | int = "default"
    context_workspace_tokens: int = 0


@dataclass(frozen=True)
class GdnDesc(_Described):
    """A recurrent layer, see ``attn/recurrent.h``."""

    _struct = attn_recurrent_desc
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
    has_initial_slots: bool = False
    checkpoint_interval: int = 0


@dataclass(frozen=True)
class RecurrentRule(_Described):
    """How tokens change a recurrent layer's state where it is not the gated delta rule with a gate per head: a draft, see
    ``attn/draft/recurrent.h``."""

    _struct = attn_recurrent_rule
    rule: str | int = "gated_delta"
    gate: str | int = "softplus"
    gate_per_channel: bool = False
    write_gate: str | int = "sigmoid"
    values_first: bool = False
    has_skip: bool = False
    gate_bound: float = 0.0
    dt_min: float = 0.0
    dt_max: float = 0.0


@dataclass(frozen=True)
class RecurrentNorm(_Described):
    """A norm and a gate of a recurrent layer's output: a draft, see ``attn/draft/recurrent.h``."""

    _struct = attn_recurrent_norm
    epsilon: float
    gate_activation: str | int = "silu"
    gate_first: bool = False
    num_groups: int = 0


@dataclass(frozen=True)
class RecurrentRounding(_Described):
    """Stochastic rounding of a recurrent layer's 16-bit states: a draft, see ``attn/draft/recurrent.h``."""

    _struct = attn_recurrent_rounding
    seed: int
    philox_rounds: int = 0


@dataclass(frozen=True)
class IndexerDesc(_Described):
    """A layer of kind ``"indexer"``, which chooses keys for another one: see ``attn/indexer.h``."""

    _struct = attn_indexer_desc
    topk: int
    num_groups: int = 1
    activation: str | int = "identity"
    has_weights: bool = False
    tokens_per_row: int = 1
    rows_per_entry: int = 1
    first_entries: int = 0
    last_entries: int = 0
    tail: bool = False
    forced_on_top: bool = False

    @property
    def room(self) -> int:
        """Places of a list."""
        return self.topk + self.forced_on_top * (self.first_entries + self.last_entries + self.tail)


@dataclass(frozen=True)
class EncoderQuant(_Described):
    """The fp8 path of a multimodal encoder: a draft, see ``attn/draft/mm_encoder.h``."""

    _struct = attn_mm_encoder_quant
    fp8: bool = True
    amax_history_len: int = 0
    scale_margin: float = 0.0
    padded_head_size: int = 0


@dataclass(frozen=True)
class IndexLists(_Described):
    """Keys chosen by lists that runs bring (`libattn.extensions.index_lists_io`): a draft, see
    ``attn/draft/index_lists.h``."""

    _struct = attn_index_lists
    max_entries: int
    granularity: int = 1
    groups: str | int = "shared"
    physical_slots: bool = False
    has_lengths: bool = False


@dataclass(frozen=True)
class ContextParallel:
    """A layer spread over ranks, see ``attn/collectives.h``.

    Parameters
    ----------
    decode, prefill : int, optional
        Addresses of ``struct attn_collectives``, such as libattn_mpi, libattn_nccl and `Collectives` make; they outlive the
        model.
    all_to_all : bool
        How partial outputs are reduced; False: all-gather and reduce-scatter of float32. In 16 bits always True.
    zigzag : bool
        Order of a rank's prefill slices; False: contiguous.
    """

    decode: int | None = None
    prefill: int | None = None
    interleave: int = 0
    all_to_all: bool = False
    zigzag: bool = False

    def to_struct(self) -> attn_context_parallel:
        """``struct attn_context_parallel``."""
        return attn_context_parallel(decode=self.decode, prefill=self.prefill, interleave=self.interleave,
                                     reduce=self.all_to_all, order=self.zigzag)


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
    needed_features : tuple of str
        What runs need beyond what the other fields say: ``batch_invariant``, ``device_seq_lens`` and such (``ATTN_FEATURE_*``).
    extensions : tuple of structs
        Further ones, such as `libattn.extensions.layer_caches`.
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
    needed_view_forms: int | tuple[str, ...] = ()
    needed_features: int | tuple[str, ...] = ()
    needs_page_lists: bool = False
    host_bounds: bool = False
    kv_dtype_v: str | int = "auto"
    kv_row_bytes: int = 0
    kv_row_bytes_v: int = 0
    kv_scale_bytes: int = 0
    kv_scale_bytes_v: int = 0
    mla: MlaDesc | None = None
    gdn: GdnDesc | None = None
    rule: RecurrentRule | None = None
    norm: RecurrentNorm | None = None
    rounding: RecurrentRounding | None = None
    indexer: IndexerDesc | None = None
    lists: IndexLists | None = None
    encoder_quant: EncoderQuant | None = None
    context_parallel: ContextParallel | None = None
    extensions: tuple[Struct, ...] = ()

    def to_struct(self) -> tuple[attn_layer_desc, list[Any]]:
        """``struct attn_layer_desc``, and what it points at, to be kept until the call has returned."""
        values: dict[str, Any] = {"encoder": int(_ENCODERS.get(str(self.kind), 0))}
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in ("window", "mla", "gdn", "rule", "norm", "rounding", "indexer", "lists", "encoder_quant",
                              "context_parallel", "causal", "extensions"):
                continue
            if field.name == "kind":
                value = _KINDS.get(value, value)
            if field.name in _CODES:
                value = code_of(field.name, value, _CODES[field.name])
            elif field.name in _MASKS:
                value = mask_of(field.name, value, _MASKS[field.name])
            values[field.name] = value
        values["causal"] = 0 if self.causal is None else 1 if self.causal else 2
        size = self.mla.qk_nope_head_dim + self.mla.qk_rope_head_dim if self.mla is not None else self.head_size
        values["scale"] = self.scale or (size**-0.5 if size > 0 else 1.0)
        if self.window is not None:
            values.update(has_window=1, window_left=self.window[0], window_right=self.window[1])
        struct = attn_layer_desc(**values)
        further = (self.mla, self.gdn, self.rule, self.norm, self.rounding, self.indexer, self.lists,
                   self.encoder_quant, self.context_parallel)
        described = [each.to_struct() for each in further if each is not None]
        return struct, chained(struct, [*described, *self.extensions], f"layer '{self.name}'")
