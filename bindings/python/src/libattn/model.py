# SPDX-License-Identifier: Apache-2.0
"""Bound layers: their caches, parameters and groups."""
from __future__ import annotations

import math
from collections.abc import Sequence
from ctypes import addressof, byref, c_int32, c_void_p
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ._declarations import (CacheRole, CopyKind, DtypeId, GroupKind, KvDtype, KvSpecKind, ScaleForm, Status, attn_amax_args,
                            attn_block_memory, attn_block_transfer, attn_cache_memory, attn_cache_spec, attn_kv_view,
                            attn_layer_params, attn_model_options)
from .errors import make
from .handles import Owned, Unique
from .layers import code_of
from .step import Plan, stream_handle
from .structs import Record, Struct, chained, check_lengths, refused
from .tensors import Tensor, as_tensor, as_writable

if TYPE_CHECKING:
    from .layers import LayerDesc
    from .runtime import Runtime
    from .selection import Assignment


#: dtypes of caches whose elements engines have in tensors of the same dtype; others are bytes to them.
_PLAIN = {int(dtype): dtype.name.lower() for dtype in (KvDtype.F16, KvDtype.BF16, KvDtype.F32)}


class KvSpec(Record):
    """What an engine allocates for the caches of a layer's kind, in the layout that the backend likes best: what the
    ``struct attn_cache_spec`` of its first caches say, K's (or the latent rows', the state's) and V's."""

    kind: int
    kv_dtype: int
    layout: int
    block_size: int
    kernel_block_size: int
    num_kv_heads: int
    head_size: int
    head_size_v: int
    kv_dtype_v: int
    sliding_window: int
    chunk_size: int
    sink_len: int
    page_bytes: int
    padded_page_bytes: int
    alignment: int
    shape: tuple[int, ...]
    stride_order: tuple[int, ...]

    @property
    def has_cache(self) -> bool:
        """Encoders, and layers that read another's cache, have none."""
        return self.kind != KvSpecKind.NONE


class CacheSpec(Record):
    """One of a layer's caches: ``struct attn_cache_spec``."""


@dataclass(frozen=True)
class KvView:
    """K or V in an engine's own layout, for `Layer.bind_kv_views`.

    Parameters
    ----------
    data : tensor
        Strided ``[block, slot, head, dim]``, or ``[block, slot, head, dim // pack, pack]`` of packed rows.
    scale : tensor, optional
        Scales of the rows: float32 ``[block, slot, head]``, which may lie inline after each row, or nvfp4's e4m3
        bytes ``[block, slot, head, D / 16]``.
    head_size : int
        The head size of rows of 4-bit elements, which their shape does not say.
    """

    data: Any
    scale: Any | None = None
    head_size: int = 0


def view_of(tensor: Any) -> tuple[attn_kv_view, list[Tensor]]:
    """``struct attn_kv_view`` of a strided tensor or a `KvView`, and its owners."""
    given = tensor if isinstance(tensor, KvView) else KvView(tensor)
    t = as_writable("view", given.data)
    if len(t.shape) not in (4, 5) or (t.strides[-1] != 1 and t.shape[-1] != 1):
        raise make(Status.INVALID_ARGUMENT, "view", f"{t} with strides {t.strides}; [block, slot, head, dim] with a "
                   "contiguous last dimension is needed")
    size, kept = t.itemsize, [t]
    view = attn_kv_view(data=t.data, device=t.device_struct, num_blocks=t.shape[0], block_size=t.shape[1],
                        num_heads=t.shape[2], head_size=given.head_size or math.prod(t.shape[3:]),
                        stride_block=t.strides[0] * size, stride_slot=t.strides[1] * size,
                        stride_head=t.strides[2] * size)
    if len(t.shape) == 5:
        view.pack, view.stride_pack = t.shape[4], t.strides[3] * size
    if given.scale is not None:
        s = as_writable("scale", given.scale)
        if s.shape[:3] != t.shape[:3] or len(s.shape) > 4 or (s.strides[3] != 1 if len(s.shape) == 4 else s.dtype != "f32"):
            raise make(Status.INVALID_ARGUMENT, "scale", f"{s} with strides {s.strides}; f32 {list(t.shape[:3])}, or a "
                       "contiguous fourth dimension, is needed")
        view.scale = s.data
        view.scale_stride_block, view.scale_stride_slot, view.scale_stride_head = (n * s.itemsize for n in s.strides[:3])
        kept.append(s)
    return view, kept


class Layer(Unique):
    """One layer of a `Model`; lives as long as it."""

    def __init__(self, model: Model, index: int, desc: LayerDesc) -> None:
        self.model = model
        self.index = index
        self.desc = desc
        self.name = desc.name
        self.num_q_heads = desc.num_q_heads
        self.api = model.api
        self._pointer = model.ask("model_layer", index)
        self._memory: tuple[Any, ...] = ()
        self._params: tuple[Any, ...] = ()

    @property
    def handle(self) -> int:
        """``attn_layer *``."""
        self.model.owner.value  # raises if the model is closed
        return self._pointer

    def call(self, function: str, *args: Any) -> None:
        """A function of the table on this layer; raises what it reports."""
        with self.model.owner:
            self.api.call(function, self._pointer, *args)

    @property
    def group(self) -> int:
        """Its block-table group: one block table and one plan serve the layers of a group."""
        return self.schedule_group(GroupKind.BLOCK_TABLE)

    def schedule_group(self, kind: int = GroupKind.SCHEDULE, phase: int = 0) -> int:
        """Its group of layers that share one schedule in a phase."""
        with self.model.owner:
            return self.api.layer_group(self._pointer, kind, phase)

    @property
    def kv_spec(self) -> KvSpec:
        """What to allocate for it."""
        specs = self._cache_specs()
        first, second = (specs + 2 * [attn_cache_spec()])[:2]
        second = second if second.role == CacheRole.V else first
        return KvSpec(first, num_kv_heads=first.num_heads, head_size_v=second.head_size, kv_dtype_v=second.kv_dtype,
                      shape=tuple(first.shape[:first.ndim]), stride_order=tuple(first.stride_order[:first.ndim]))

    @property
    def caches(self) -> list[CacheSpec]:
        """All its caches: of its kind, then those that its description adds."""
        return [CacheSpec(s, shape=tuple(s.shape[:s.ndim]), stride_order=tuple(s.stride_order[:s.ndim]))
                for s in self._cache_specs()]

    def _cache_specs(self) -> list[attn_cache_spec]:
        with self.model.owner:
            count = self.api.layer_num_caches(self._pointer)
        specs = [attn_cache_spec() for _ in range(count)]
        for i, s in enumerate(specs):
            self.call("layer_cache_spec", i, byref(s))
        return specs

    def cache_view(self, index: int) -> attn_kv_view:
        """The view of a bound cache, ``struct attn_kv_view``."""
        view = attn_kv_view()
        self.call("layer_cache_view", index, byref(view))
        return view

    def bind_kv(self, memory: Any, num_blocks: int) -> None:
        """Hand cache memory in, in the spec's own layout.

        Parameters
        ----------
        memory : tensor
            Contiguous, at least ``num_blocks * kv_spec.padded_page_bytes`` bytes.
        num_blocks : int
            How many blocks it holds.
        """
        self.bind_memory(memory, num_blocks)

    @staticmethod
    def _room(name: str, memory: Any, needed: int) -> Tensor:
        t = as_writable(name, memory)
        if not t.is_contiguous() or t.nbytes < needed:
            raise make(Status.INVALID_ARGUMENT, name, f"{t}; contiguous memory of {needed} bytes is needed")
        return t

    def bind_kv_views(self, k: Any, v: Any | None) -> None:
        """Hand the engine's own layout in: strided tensors ``[block, slot, head, dim]`` or `KvView`; `v` None: MLA."""
        self.bind_caches([k] if v is None else [k, v])

    def bind_state(self, state: Any, conv_state: Any | None = None, ring: Any | None = None) -> None:
        """Hand a recurrent layer's state in: [slots, Hv, Dv, Dk] of its state_dtype, the convolution's window, and the ring
        of replay, [slots, *rows, heads, row] as its spec says."""
        t = as_writable("state", state)
        code = code_of("state_dtype", self.desc.gdn.state_dtype, DtypeId) if self.desc.gdn else DtypeId.DEFAULT
        dtype = DtypeId(code or DtypeId.F32).name.lower()
        if t.dtype != dtype or len(t.shape) != 4 or t.strides[1:] != (t.shape[2] * t.shape[3], t.shape[3], 1):
            raise refused("state", f"{t}; {dtype} [slots, Hv, Dv, Dk] with compact slots is needed")
        made = [(self._slots(t, t.shape[2] * t.shape[3]), [t])]
        if conv_state is not None:
            c = as_writable("conv_state", conv_state)
            if len(c.shape) != 3 or c.strides[2] != 1 or c.shape[0] != t.shape[0]:
                raise refused("conv_state", f"{c}; [{t.shape[0]}, channels, width - 1] with a contiguous last dimension is "
                              "needed")
            made.append((self._slots(c, c.shape[2]), [c]))
        self._bind_views(made + ([] if ring is None else [view_of(ring)]))

    @staticmethod
    def _slots(t: Tensor, row: int) -> attn_kv_view:
        """The view of a state or a window: a slot a block, a head or channel a head."""
        slot, head = (t.itemsize * stride for stride in t.strides[:2])
        return attn_kv_view(data=t.data, num_blocks=t.shape[0], block_size=1, num_heads=t.shape[1], head_size=row,
                            stride_block=slot, stride_slot=slot, stride_head=head, device=t.device_struct)

    def bind_caches(self, views: Sequence[Any], keep: bool = True) -> None:
        """Hand all its caches in, in the order of `caches`: tensors ``[block, slot, head, dim]`` or `KvView`. Without `keep` their
        memory lives as long as its owner says."""
        self._bind_views([view_of(view) for view in views], keep)

    def _bind_views(self, made: Sequence[tuple[attn_kv_view, list[Any]]], keep: bool = True) -> None:
        for spec, (_, (t, *_)) in zip(self._cache_specs(), made):
            wanted = _PLAIN.get(spec.kv_dtype)
            # A view does not say what its elements are. NumPy, which has no bf16, brings them as bits.
            if wanted is not None and t.dtype not in (wanted, f"uint{wanted[-2:]}"):
                raise refused("view", f"{t}; the layer's cache has {wanted}")
        pointers = (c_void_p * max(1, len(made)))(*(addressof(view) for view, _ in made))
        self.call("layer_bind_caches", pointers, len(made))
        self._memory = tuple(kept for _, kept in made) if keep else ()

    def bind_memory(self, memory: Any, num_blocks: int, further: Sequence[Any] = (),
                    further_num_blocks: Sequence[int] = ()) -> None:
        """Hand memory for all its caches in, in the layout of their specs.

        Parameters
        ----------
        memory : tensor
            As in `bind_kv`; of a recurrent layer, `num_blocks` state slots.
        further : sequence of tensors
            Of the caches that the description adds, ``page_bytes`` a block each.
        further_num_blocks : sequence of int
            How many blocks they hold.
        """
        own = {CacheRole.K, CacheRole.V, CacheRole.LATENT, CacheRole.STATE, CacheRole.CONV}
        specs = [spec for i, spec in enumerate(self.caches) if i > 0 and spec.role not in own]  # an indexer's first is its own
        if len(further) != len(specs) or len(further_num_blocks) != len(specs):
            raise make(Status.INVALID_ARGUMENT, "further", f"{len(further)} tensors and {len(further_num_blocks)} numbers of "
                       f"blocks; the layer has {len(specs)} further caches")
        held = [self._room("memory", memory, num_blocks * self.kv_spec.padded_page_bytes),
                *(self._room("further", t, n * spec.page_bytes) for t, n, spec in zip(further, further_num_blocks, specs))]
        struct = attn_cache_memory(base=held[0].data, num_blocks=num_blocks, device=held[0].device_struct)
        if specs:
            struct.further, struct.further_num_blocks = held[1:], list(further_num_blocks)
        self.call("layer_bind_memory", byref(struct))
        self._memory = (struct, *held)

    def bind_params(self, sinks: Any | None = None, alibi_slopes: Any | None = None, sink_k: Any | None = None,
                    sink_v: Any | None = None, q_scale: Any | float | None = None, k_scale: Any | float | None = None,
                    v_scale: Any | float | None = None, p_scale: Any | float | None = None,
                    extensions: Sequence[Struct] = ()) -> None:
        """Hand parameters in; borrowed until the layer is bound again or its model closed.

        Parameters
        ----------
        sinks, alibi_slopes : tensor [Hq], float32
            Needed exactly where the layer was described with them.
        sink_k, sink_v : tensor [sink_len, Hk, D]
            A static sink's keys and values.
        q_scale, k_scale, v_scale, p_scale : float or tensor
            Of quantized caches, queries and probabilities.
        extensions : sequence of ctypes structures
            `libattn.extensions.gdn_weights`, `mla_weights`, `kv_quant_params`.
        """
        params = attn_layer_params()
        for name, value in (("q_scale", q_scale), ("k_scale", k_scale), ("v_scale", v_scale), ("p_scale", p_scale)):
            if value is not None:
                setattr(params, f"{name}_host" if isinstance(value, (int, float)) else name, value)
        params.sinks, params.alibi_slopes, params.sink_k, params.sink_v = sinks, alibi_slopes, sink_k, sink_v
        dims, where = self._dims, f"layer '{self.name}'"
        check_lengths(params, where, **dims)
        kept = chained(params, extensions, where, **dims)
        self.call("layer_bind_params", byref(params))
        self._params = (params, kept)

    @property
    def _dims(self) -> dict[str, Any]:
        """What lengths of parameters depend on."""
        d, g = self.desc, self.desc.gdn
        Hk, Dv = d.num_kv_heads, d.head_size_v or d.head_size
        return {
            "heads": max(d.num_q_heads, d.mla.padded_num_q_heads if d.mla else 0), "Hk": Hk, "D": d.head_size, "Dv": Dv,
            "Hv": g.num_v_heads if g else 0,
            "gate_width": g.head_size_k if g and d.rule and d.rule.gate_per_channel else 1,
            "amax_history_len": d.encoder_quant.amax_history_len if d.encoder_quant else 0, "scales": (1, 1, Hk, Hk * Dv),
            **{name: code_of(name, getattr(d, name), ScaleForm) for name in ("q_scale_form", "k_scale_form", "v_scale_form")}}

    def amax(self, x: Any, out: Any, *, per_head: bool = False, accumulate: bool = False,
             stream: Any | None = None) -> None:
        """The largest ``|x|``, x [T, heads, size], into float32 `out`: [1], or [heads] with `per_head`.

        Scales from first batches are this by a constant: 200 for q and k and 100 for v are usual. With `accumulate` out
        keeps what is larger already, so it takes one call for each batch; scales of v per (head, channel) are ``per_head``
        of v as [T, Hk Dv, 1].
        """
        tensor = as_tensor(x)
        struct = attn_amax_args(stream=stream_handle(stream), x=tensor, out=as_writable("out", out), per_head=per_head,
                                accumulate=accumulate)
        check_lengths(struct, f"layer '{self.name}'", heads=tensor.shape[1] if len(tensor.shape) == 3 else 1)
        self.call("layer_amax", byref(struct))


class Model(Owned):
    """Bound layers of one assignment.

    Parameters
    ----------
    runtime : Runtime
        Has to outlive the model; it is kept alive here.
    assignment : Assignment
        Complete; may be closed afterwards.
    options
        Of ``struct attn_model_options``: ``native_device``, ``native_context``, ``backend_options`` (texts "backend.key=value").
    """

    def __init__(self, runtime: Runtime, assignment: Assignment, **options: Any) -> None:
        self.runtime = runtime
        self.api = runtime.api
        given = attn_model_options(**options)
        with assignment.owner as handle:
            self.owner = runtime.make("model", "model_create", "model_destroy", handle, byref(given), kept=given)
        self.layers = [Layer(self, i, desc) for i, desc in enumerate(assignment.layers)]

    @property
    def groups(self) -> list[list[int]]:
        """Layer indices of each block-table group."""
        return self.groups_of(GroupKind.BLOCK_TABLE)

    def groups_of(self, kind: int) -> list[list[int]]:
        """Layer indices of each group of a kind, ``libattn.abi.GroupKind``."""
        result = []
        indices, count = (c_int32 * max(1, len(self.layers)))(), c_int32()
        for group in range(self.ask("model_num_groups", kind)):
            self.call("model_group", kind, group, addressof(indices), len(self.layers), byref(count))
            result.append(list(indices[:count.value]))
        return result

    def copy_blocks(self, pairs: Sequence[tuple[int, int]], group: int = 0, kind: str = "device_to_device",
                    other: Sequence[Any] | None = None, stream: int | None = None, table: int = 0) -> None:
        """Copy blocks of one table, in its caches of all layers of a block-table group.

        Parameters
        ----------
        pairs : sequence of (source, destination)
            Blocks.
        kind : str
            ``device_to_device`` inside the cache, ``device_to_host`` or ``host_to_device``.
        other : sequence of tensors, one per layer of the group
            Host memory of whole blocks, ``padded_page_bytes`` apart; to be kept until the stream is done.
        table : int
            0: the batch's own; else one of `further`, whose caches have blocks of their own numbers.
        """
        transfer = attn_block_transfer(group=group, table=table, kind=code_of("kind", kind, CopyKind),
                                       num_pairs=len(pairs),
                                       pairs=[block for pair in pairs for block in pair], stream=stream_handle(stream))
        transfer.num_pairs = len(pairs)
        if other is not None:
            held = [as_tensor(t) if kind == "host_to_device" else as_writable("other", t) for t in other]
            self._check_other(group, held, 1 + max((pair[kind != "host_to_device"] for pair in pairs), default=-1))
            transfer.other = [attn_block_memory(base=t.data) for t in held]
        self.call("copy_blocks", byref(transfer))

    def _check_other(self, group: int, held: Sequence[Tensor], blocks: int) -> None:
        """Refuse other memory that is not one tensor of so many blocks for each layer of the group."""
        layers = self.groups[group] if 0 <= group < len(self.groups) else []
        if layers and len(held) != len(layers):
            raise make(Status.INVALID_ARGUMENT, "other", f"{len(held)} tensors; the group has {len(layers)} layers")
        for index, t in zip(layers, held):
            needed = blocks * self.layers[index].kv_spec.padded_page_bytes
            if t.nbytes < needed or not t.is_contiguous():
                raise make(Status.INVALID_ARGUMENT, "other", f"{t} for layer '{self.layers[index].name}'; contiguous "
                           f"memory of {blocks} blocks, {needed} bytes, is needed")

    def plan(self, group: int = 0, **limits: Any) -> Plan:
        """A plan for one block-table group; see `Plan` for the limits. Caches must be bound before."""
        return Plan(self, group, **limits)
