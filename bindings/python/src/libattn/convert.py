# SPDX-License-Identifier: Apache-2.0
"""Tokens of one cache copied into another of a different layout; ``tools/common/layout_convert.c`` does the same for C."""
from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import addressof, byref, c_int32, c_int64, c_void_p
from typing import TYPE_CHECKING, Any

from ._declarations import CacheRole, DtypeId, KvDtype, ScaleForm, Status, attn_kv_view, attn_layer_params
from .device import Memory
from .errors import make
from .layers import LayerDesc, code_of
from .step import NO_ATTEND, NO_WRITE, Batch
from .structs import refused
from .tensors import Rows

if TYPE_CHECKING:
    from .device import Device
    from .model import Layer

_MAX_SLOTS = 65536  # written by the runs between two copies to the device
_MAX_READ_TOKENS = 1024  # read at once from a quantized source
_VECTOR = 16  # bytes at whose multiples every backend copies rows unchanged
_PLAIN = {KvDtype.F16: "f16", KvDtype.BF16: "bf16", KvDtype.F32: "f32"}
_FP8 = (KvDtype.FP8_E4M3, KvDtype.FP8_E5M2, KvDtype.FP8_E4M3FNUZ)


class _Side:
    """A bound layer's K and V."""

    def __init__(self, layer: Layer) -> None:
        specs = layer._cache_specs()
        if [s.role for s in specs] != [CacheRole.K, CacheRole.V]:
            raise make(Status.UNSUPPORTED, "caches", f"{layer.name} has {len(specs)} caches, the first of role "
                       f"{specs[0].role if specs else 0}; layers of one K and one V alone are converted")
        self.layer, self.desc, self.block_size = layer, layer.desc.to_struct()[0], specs[0].block_size
        self.views = [layer.cache_view(i) for i in range(2)]
        self.dtypes = [s.kv_dtype for s in specs]
        given = layer._params[0] if layer._params else attn_layer_params()
        self.scales = [(form, getattr(given, f"{name}_scale") or 0, getattr(given, f"{name}_scale_host") or 1.0)
                       if dtype not in _PLAIN else (ScaleForm.NONE, 0, 0.0) for name, form, dtype in
                       zip("kv", (self.desc.k_scale_form, self.desc.v_scale_form), self.dtypes)]
        self.extension = given.next


def _check(source: _Side, target: _Side) -> None:
    for i, (s, t) in enumerate(zip(source.views, target.views)):
        for field, have, want in (("num_kv_heads", t.num_heads, s.num_heads),
                                  ("head_size" if i == 0 else "head_size_v", t.head_size, s.head_size),
                                  ("rope", target.desc.rope, source.desc.rope)):
            if have != want:
                raise refused(field, f"{have} of the target, {want} of the source; they have to be equal")
    k, v = source.dtypes
    if k != v or k > KvDtype.INT8_PER_TOKEN_HEAD:
        raise make(Status.UNSUPPORTED, "kv_dtype", f"{k} of the source's K and {v} of its V; supported: one for both, 1 to 8 "
                   "(plain numbers, fp8, 8 bits per token and head)")
    packs, sizes = [v.pack for v in source.views], [v.block_size for v in source.views]
    if any(0 < v.pack < v.head_size for v in source.views) or sizes[0] != sizes[1]:
        raise make(Status.UNSUPPORTED, "pack", f"{packs} in blocks of {sizes} of the source; supported: rows in one piece, blocks "
                   "of one size")


def _map(source: _Side, target: _Side, tables: Sequence[Sequence[int]], num_tokens: int) -> list[int]:
    """The target's slot of each of the source's, or -1."""
    slots: list[list[int]] = []
    for field, side, table in zip(("source_blocks", "target_blocks"), (source, target), tables):
        view, size = side.views[0], side.block_size
        count, needed = view.num_blocks * view.block_size // size, -(-num_tokens // size)
        used = [int(block) for block in table[:needed]]
        if len(used) < needed:
            raise refused(field, f"{len(used)} blocks of {size}; {num_tokens} tokens are asked for")
        for i, block in enumerate(used):
            if not 0 <= block < count:
                raise refused(field, f"entry {i} is {block}; the cache has blocks 0 to {count - 1}")
        if len(set(used)) < len(used):
            raise refused(field, f"{used}; a block stands there twice")
        slots.append([used[t // size] * size + t % size for t in range(num_tokens)])
    to = [-1] * (source.views[0].num_blocks * source.views[0].block_size)
    for s, t in zip(*slots):
        to[s] = t
    return to


def _pair_bytes(view: attn_kv_view) -> None:
    """Bytes of fp8 are moved two at a time, as elements of a dtype whose rows every backend copies."""
    strides = view.stride_block, view.stride_slot, view.stride_head
    if any(n % _VECTOR for n in (view.data, view.head_size, *strides)) or 0 < view.pack < view.head_size:
        raise make(Status.UNSUPPORTED, "strides", f"{strides} bytes of an fp8 cache at {view.data:#x}; supported: multiples of "
                   f"{_VECTOR}, and rows in one piece")
    view.head_size, view.pack = view.head_size // 2, 0


class _Worker:
    """A layer of a model of its own, with a plan."""

    def __init__(self, device: Device, side: _Side, views: Sequence[attn_kv_view], max_tokens: int, scales: Sequence[Any],
                 **fields: Any) -> None:
        k, v = views
        forms = ["nhd" if k.stride_slot >= k.stride_head else "hnd"]
        forms += ["packed"] * any(0 < view.pack < view.head_size for view in views)
        forms += ["separate_strides"] * any(getattr(k, n) != getattr(v, n) for n in ("stride_block", "stride_slot", "stride_head"))
        desc = LayerDesc("layout_convert", k.num_heads, k.num_heads, k.head_size, head_size_v=v.head_size, scale=1.0,
                         block_size=k.block_size, needed_view_forms=tuple(forms), k_scale_form=scales[0][0],
                         v_scale_form=scales[1][0], **fields)
        runtime = side.layer.model.runtime
        self.model = runtime.bind(runtime.select([desc], device=(device.device.type, device.device.id)))
        self.layer = self.model.layers[0]
        pointers = (c_void_p * 2)(*(addressof(view) for view in views))
        self.layer.call("layer_bind_caches", pointers, 2)
        if any(form or address or host for form, address, host in scales) or (side.extension and "window" not in fields):
            params = attn_layer_params(k_scale=scales[0][1] or None, k_scale_host=scales[0][2], v_scale=scales[1][1] or None,
                                       v_scale_host=scales[1][2], next=side.extension)
            self.layer.call("layer_bind_params", byref(params))
        self.plan = self.model.plan(0, max_num_reqs=1, max_num_tokens=max_tokens, max_seq_len=max_tokens)
        self.plan.bind_workspace(device.allocate(self.plan.workspace_bytes))

    def run(self, batch: Batch, tensors: Sequence[Rows | None], flags: int) -> None:
        self.plan.update(batch)
        self.plan.run_pointers(self.layer._pointer, *(t.pointer if t else None for t in tensors), flags=flags)


class _Conversion:
    def __init__(self, source: _Side, target: _Side, to: list[int]) -> None:
        self.source, self.target, self.to = source, target, to
        from_, into = source.dtypes[0], target.dtypes[0]
        where = source.views[0].device
        self.device = source.layer.model.runtime.open((where.type, where.id) if where.type else None)
        self.raw = from_ in _FP8 and source.dtypes == target.dtypes and source.scales == target.scales
        self.dtype = "bf16" if self.raw else _PLAIN.get(KvDtype(from_)) or _PLAIN.get(
            KvDtype(into)) or DtypeId(code_of("dtype", target.desc.dtype, DtypeId)).name.lower()
        self.size = 4 if self.dtype == "f32" else 2
        if self.raw:
            for view in source.views + target.views:
                _pair_bytes(view)
        kv = [self.dtype] * 2 if self.raw else target.dtypes
        self.writer = _Worker(self.device, target, target.views, 1, [(0, 0, 0.0)] * 2 if self.raw else target.scales,
                              dtype=self.dtype, kv_dtype=kv[0], kv_dtype_v=0 if kv[0] == kv[1] else kv[1])
        self.one = self.send(c_int32, [0, 1])

    def send(self, kind: Any, numbers: Sequence[int]) -> Memory:
        """A device's copy of integers."""
        size = ctypes.sizeof(kind) * len(numbers)
        host, copy = self.device.allocate(size, "host"), self.device.allocate(size)
        ctypes.memmove(host.data, (kind * len(numbers))(*numbers), size)
        self.device.copy(copy, host)
        self.device.synchronize()
        return copy.view("int64" if kind is c_int64 else "int32", len(numbers))

    def rows(self, view: attn_kv_view, count: int, data: int, token: int, head: int) -> Rows:
        """[tokens, heads, head_size] of the rows' dtype; strides in bytes."""
        rows = Rows(self.dtype, (self.device.device.type, self.device.device.id))
        rows.fill(data, (count, view.num_heads, view.head_size), (token // self.size, head // self.size, 1))
        return rows

    def write(self, rows: Sequence[Rows], slots: Memory) -> None:
        batch = Batch(self.one, seq_lens=self.one.view("int32", 1, offset=4), query_start_loc_host=[0, 1], seq_lens_host=[1],
                      block_table=self.one.view("int32", 1, 1), slot_mapping=slots)
        self.writer.run(batch, (None, *rows, None), NO_ATTEND)

    def in_place(self) -> None:
        """A run takes row s of consecutive blocks, which are as far apart as blocks are, from the first to the last wanted."""
        views = self.source.views
        blocks, size, step = views[0].num_blocks, views[0].block_size, [view.stride_block for view in views]
        if step == [size * view.stride_slot for view in views]:  # all rows are equally far apart
            blocks, size, step = blocks * size, 1, [view.stride_slot for view in views]
        at_once = max(1, _MAX_SLOTS // size)
        for first in range(0, blocks, at_once):
            for s in range(size):
                slots = self.to[first * size + s:(first + at_once) * size:size]
                used = [i for i, slot in enumerate(slots) if slot >= 0]
                if used:
                    begin, end = used[0], used[-1] + 1
                    rows = [self.rows(view, end - begin, view.data + (first + begin) * n + s * view.stride_slot, n, view.stride_head)
                            for view, n in zip(views, step)]
                    self.write(rows, self.send(c_int64, slots[begin:end]))

    def by_reading(self, table: Sequence[int], num_tokens: int) -> None:
        """A quantized source is read in chunks: a token that attends to its own key alone has V's row as its output."""
        views, size, scales = self.source.views, self.source.block_size, self.source.scales
        kernel = views[0].block_size
        most = max(1, _MAX_READ_TOKENS // size) * size
        readers = [_Worker(self.device, self.source, views[::order], most, scales[::order], dtype=self.dtype,
                           kv_dtype=self.source.dtypes[0], window=(0, 0)) for order in (-1, 1)]
        bytes_ = [most * view.num_heads * view.head_size * self.size for view in views]
        zeros, *outs = [self.device.allocate(n) for n in (max(bytes_), *bytes_)]
        self.device.fill(zeros)
        for first in range(0, num_tokens, most):
            count = min(most, num_tokens - first)
            blocks = [int(table[first // size + i // (size // kernel)]) * (size // kernel) + i % (size // kernel)
                      for i in range(-(-count // kernel))]
            numbers = self.send(c_int32, [0, count, *blocks])
            batch = Batch(numbers.view("int32", 2), seq_lens=numbers.view("int32", 1, offset=4), query_start_loc_host=[0, count],
                          seq_lens_host=[count], block_table=numbers.view("int32", 1, len(blocks), offset=8))
            compact = [view.head_size * self.size for view in views]
            rows = [self.rows(view, count, out.data, view.num_heads * n, n) for view, out, n in zip(views, outs, compact)]
            for i, reader in enumerate(readers):
                q = self.rows(views[1 - i], count, zeros.data, views[0].num_heads * compact[1 - i], compact[1 - i])
                reader.run(batch, (q, None, None, rows[i]), NO_WRITE)
            self.write(rows, self.send(c_int64, [self.to[blocks[i // kernel] * kernel + i % kernel] for i in range(count)]))


def layout_convert(source: Layer, target: Layer, source_blocks: Sequence[int], target_blocks: Sequence[int],
                   num_tokens: int) -> None:
    """Copy K and V of a request's tokens from one bound layer's cache into another's, on their device.

    Block sizes, order of rows and heads, places of the planes and dtype may differ. Between caches of one dtype (f32, f16,
    bf16, fp8 of equal scales) all bits arrive; other numbers are rounded to the target's dtype, those of other quantized
    sources to the activations' dtype first.

    Parameters
    ----------
    source, target : Layer
        Of one device; they share no memory, and no work on them is in flight. The source's runtime chooses the backend.
    source_blocks, target_blocks : sequence of int
        The request's rows of the two block tables, a block once.
    num_tokens : int
        Tokens 0 to num_tokens - 1 are copied; it is done on return.

    Raises
    ------
    AttnError
        Naming ``caches`` (MLA, recurrent), ``num_kv_heads``, ``head_size``, ``rope``, ``kv_dtype``, ``pack``, a table's field, or
        what the backends miss.
    """
    sides = _Side(source), _Side(target)
    _check(*sides)
    to = _map(*sides, (source_blocks, target_blocks), num_tokens)
    conversion = _Conversion(*sides, to)
    if conversion.raw or sides[0].dtypes[0] in _PLAIN:
        conversion.in_place()
    else:
        conversion.by_reading(source_blocks, num_tokens)
    conversion.device.synchronize()


__all__ = ["layout_convert"]
