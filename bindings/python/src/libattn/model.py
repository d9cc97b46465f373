# SPDX-License-Identifier: Apache-2.0
"""Bound layers: their caches, parameters and groups."""
from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from ctypes import Structure, byref, c_int32, c_int64, c_void_p, sizeof
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ._declarations import (CopyKind, GroupKind, KvSpecKind, Status, attn_block_memory, attn_block_transfer, attn_kv_spec, attn_kv_view,
                            attn_layer_params)
from .errors import make
from .extensions import gdn_state
from .handles import Handle, Owned
from .layers import code_of
from .step import Plan
from .tensors import Tensor, as_tensor, as_writable

if TYPE_CHECKING:
    from .layers import LayerDesc
    from .runtime import Runtime
    from .selection import Assignment


@dataclass(frozen=True)
class KvSpec:
    """What an engine allocates for a layer, in the layout that the backend likes best."""

    kind: int
    kv_dtype: int
    layout: int
    block_size: int
    num_kv_heads: int
    head_size: int
    head_size_v: int
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


@dataclass(frozen=True)
class KvView:
    """K or V in an engine's own layout, for `Layer.bind_kv_views`.

    Parameters
    ----------
    data : tensor
        Strided ``[block, slot, head, dim]``, or ``[block, slot, head, dim // pack, pack]`` of packed rows.
    scale : tensor, optional
        Of caches with scales: float32 ``[block, slot, head]`` (it may lie inline behind the row), or nvfp4's e4m3
        bytes ``[block, slot, head, D / 16]``.
    head_size : int
        Where it is not what the shape says: rows of 4-bit elements.
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
    view = attn_kv_view(struct_size=sizeof(attn_kv_view), data=t.data, num_blocks=t.shape[0], block_size=t.shape[1],
                        num_heads=t.shape[2], head_size=given.head_size or math.prod(t.shape[3:]),
                        stride_block=t.strides[0] * size, stride_slot=t.strides[1] * size,
                        stride_head=t.strides[2] * size)
    if len(t.shape) == 5:
        view.pack, view.stride_pack = t.shape[4], t.strides[3] * size
    if given.scale is not None:
        s = as_writable("scale", given.scale)
        if s.shape[:3] != t.shape[:3] or len(s.shape) > 4 or (len(s.shape) == 4 and s.strides[3] != 1):
            raise make(Status.INVALID_ARGUMENT, "scale", f"{s} with strides {s.strides}; {list(t.shape[:3])}, or a "
                       "contiguous fourth dimension, is needed")
        view.scale = s.data
        view.scale_stride_block, view.scale_stride_slot, view.scale_stride_head = (n * s.itemsize for n in s.strides[:3])
        kept.append(s)
    return view, kept


class Layer:
    """One layer of a `Model`; lives as long as it."""

    def __init__(self, model: Model, index: int, desc: LayerDesc) -> None:
        self.model = model
        self.index = index
        self.name = desc.name
        self.num_q_heads = desc.num_q_heads
        self.api = model.api
        self._pointer = self.api.model_layer(model.handle, index)
        self._memory: tuple[Any, ...] = ()
        self._params: tuple[Any, ...] = ()

    @property
    def handle(self) -> int:
        """``attn_layer *``."""
        self.model.owner.value  # raises if the model is closed
        return self._pointer

    @property
    def group(self) -> int:
        """Its block-table group: one block table and one plan serve the layers of a group."""
        return self.api.layer_group(self.handle, GroupKind.BLOCK_TABLE, 0)

    @property
    def kv_spec(self) -> KvSpec:
        """What to allocate for it."""
        s = attn_kv_spec(struct_size=sizeof(attn_kv_spec))
        self.api.check(self.api.layer_kv_spec(self.handle, byref(s), self.api.error_ref()))
        return KvSpec(s.kind, s.kv_dtype, s.layout, s.block_size, s.num_kv_heads, s.head_size, s.head_size_v,
                      s.sliding_window, s.chunk_size, s.sink_len, s.page_bytes, s.padded_page_bytes, s.alignment,
                      tuple(s.shape[:s.ndim]), tuple(s.stride_order[:s.ndim]))

    def bind_kv(self, memory: Any, num_blocks: int) -> None:
        """Hand cache memory in, in the spec's own layout.

        Parameters
        ----------
        memory : tensor
            Contiguous, at least ``num_blocks * kv_spec.padded_page_bytes`` bytes.
        num_blocks : int
            How many blocks it holds.
        """
        t, spec = as_writable("memory", memory), self.kv_spec
        latent = spec.kind in (KvSpecKind.MLA, KvSpecKind.SLIDING_WINDOW_MLA)
        needed = num_blocks * spec.padded_page_bytes
        if not t.is_contiguous() or t.nbytes < needed:
            raise make(Status.INVALID_ARGUMENT, "memory", f"{t}; contiguous memory of {needed} bytes is needed")
        k, v = attn_kv_view(struct_size=sizeof(attn_kv_view)), attn_kv_view(struct_size=sizeof(attn_kv_view))
        api = self.api
        v_ref = None if latent else byref(v)
        api.check(api.layer_kv_views(self.handle, t.data, num_blocks, byref(k), v_ref, api.error_ref()))
        api.check(api.layer_bind_kv(self.handle, byref(k), v_ref, api.error_ref()))
        self._memory = (t,)

    def bind_kv_views(self, k: Any, v: Any | None) -> None:
        """Hand the engine's own layout in: strided tensors ``[block, slot, head, dim]`` or `KvView`; `v` None: MLA."""
        k_view, k_kept = view_of(k)
        v_view, v_kept = view_of(v) if v is not None else (None, [])
        api = self.api
        api.check(api.layer_bind_kv(self.handle, byref(k_view), byref(v_view) if v_view is not None else None,
                                    api.error_ref()))
        self._memory = (*k_kept, *v_kept)

    def bind_state(self, state: Any, conv_state: Any | None = None) -> None:
        """Hand a gated-delta layer's state in: float32 [slots, Hv, Dv, Dk], and the convolution's window."""
        struct = gdn_state(state, conv_state)
        self.api.check(self.api.layer_bind_state(self.handle, byref(struct), self.api.error_ref()))
        self._memory = (struct,)

    def bind_params(self, sinks: Any | None = None, alibi_slopes: Any | None = None, sink_k: Any | None = None,
                    sink_v: Any | None = None, q_scale: Any | float | None = None, k_scale: Any | float | None = None,
                    v_scale: Any | float | None = None, p_scale: Any | float | None = None,
                    extensions: Sequence[Structure] = ()) -> None:
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
        params = attn_layer_params(struct_size=sizeof(attn_layer_params))
        kept: list[Any] = []
        for name, value in (("sinks", sinks), ("alibi_slopes", alibi_slopes)):
            if value is not None:
                setattr(params, name, self._floats(name, value, kept, self.num_q_heads))
        for name, value in (("sink_k", sink_k), ("sink_v", sink_v)):
            if value is not None:
                kept.append(as_tensor(value))
                setattr(params, name, kept[-1].pointer)
        for name, value in (("q_scale", q_scale), ("k_scale", k_scale), ("v_scale", v_scale), ("p_scale", p_scale)):
            if isinstance(value, (int, float)):
                setattr(params, f"{name}_host", float(value))
            elif value is not None:
                setattr(params, name, self._floats(name, value, kept))
        for ext in reversed(extensions):
            ext.ext.next = params.next
            params.next = ctypes.addressof(ext)
            kept.append(ext)
        self.api.check(self.api.layer_bind_params(self.handle, byref(params), self.api.error_ref()))
        self._params = (params, *kept)

    @staticmethod
    def _floats(name: str, value: Any, kept: list[Any], count: int = 1) -> int:
        t = as_tensor(value)
        if t.dtype != "f32" or not t.is_contiguous() or math.prod(t.shape) < count:
            raise make(Status.INVALID_ARGUMENT, name, f"{t}; contiguous float32 of {count} or more is needed")
        kept.append(t)
        return t.data


class Model(Owned):
    """Bound layers of one assignment.

    Parameters
    ----------
    runtime : Runtime
        Has to outlive the model; it is kept alive here.
    assignment : Assignment
        Complete; may be closed afterwards.
    """

    def __init__(self, runtime: Runtime, assignment: Assignment) -> None:
        self.runtime = runtime
        self.api = runtime.api
        created = c_void_p()
        self.api.check(self.api.model_create(runtime.handle, assignment.handle, None, byref(created),
                                             self.api.error_ref()))
        self.owner = Handle("model", created.value, self.api.model_destroy, runtime.owner)
        self.layers = [Layer(self, i, desc) for i, desc in enumerate(assignment.layers)]

    @property
    def groups(self) -> list[list[int]]:
        """Layer indices of each block-table group."""
        result = []
        indices, count = (c_int32 * max(1, len(self.layers)))(), c_int32()
        for group in range(self.api.model_num_groups(self.handle, GroupKind.BLOCK_TABLE)):
            self.api.check(self.api.model_group(self.handle, GroupKind.BLOCK_TABLE, group, ctypes.addressof(indices),
                                                len(self.layers), byref(count)))
            result.append(list(indices[:count.value]))
        return result

    def copy_blocks(self, pairs: Sequence[tuple[int, int]], group: int = 0, kind: str = "device_to_device",
                    other: Sequence[Any] | None = None, stream: int | None = None) -> None:
        """Copy blocks of all layers of a block-table group.

        Parameters
        ----------
        pairs : sequence of (source, destination)
            Blocks.
        kind : str
            ``device_to_device`` inside the cache, ``device_to_host`` or ``host_to_device``.
        other : sequence of tensors, one per layer of the group
            Host memory of whole blocks, ``padded_page_bytes`` apart; to be kept until the stream is done.
        """
        memory = None
        if other is not None:
            held = [as_tensor(t) if kind == "host_to_device" else as_writable("other", t) for t in other]
            self._check_other(group, held, 1 + max((pair[kind != "host_to_device"] for pair in pairs), default=-1))
            memory = (attn_block_memory * max(1, len(held)))(*(attn_block_memory(base=t.data) for t in held))
        flat = (c_int64 * max(2, 2 * len(pairs)))(*(block for pair in pairs for block in pair))
        transfer = attn_block_transfer(struct_size=sizeof(attn_block_transfer), group=group,
                                       kind=code_of("kind", kind, CopyKind),
                                       other=None if memory is None else ctypes.addressof(memory),
                                       other_bytes=0 if memory is None else sizeof(attn_block_memory),
                                       pairs=ctypes.addressof(flat), num_pairs=len(pairs), stream=stream)
        self.api.check(self.api.copy_blocks(self.handle, byref(transfer), self.api.error_ref()))

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
