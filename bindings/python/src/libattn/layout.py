# SPDX-License-Identifier: Apache-2.0
"""One name for the layout of a layer's caches, as ``attn-info --layouts`` gives it."""
from __future__ import annotations

from typing import TYPE_CHECKING

from ._declarations import CacheRole, attn_cache_spec, attn_kv_view

if TYPE_CHECKING:
    from .model import Layer

_OUTSIDE = -1  # not within a block: the distance depends on the number of blocks


def _within(view: attn_kv_view, stride: int, count: int) -> int:
    if count <= 1:  # no stride that counts
        return 0
    return _OUTSIDE if view.num_blocks > 1 and stride >= view.stride_block else stride


def _distance(view: attn_kv_view, start: int | None, end: int | None) -> int:
    size = (end or 0) - (start or 0)
    return size if abs(size) < view.stride_block else _OUTSIDE


def _line(spec: attn_cache_spec, view: attn_kv_view, first: attn_kv_view) -> str:
    pack = view.pack if view.pack < view.head_size else 0
    together = spec.role <= CacheRole.CONV and view.stride_block == first.stride_block
    values = {
        "role": spec.role, "dtype": spec.kv_dtype, "heads": view.num_heads, "head_size": view.head_size,
        "block": spec.block_size, "rows": view.block_size, "tokens": spec.tokens_per_row, "table": spec.table, "of": spec.of,
        "slot": _within(view, view.stride_slot, view.block_size), "head": _within(view, view.stride_head, view.num_heads),
        "pack": pack, "pack_stride": _within(view, view.stride_pack, 2) if pack else 0,
        "plane": _distance(view, first.data, view.data) if together else _OUTSIDE}
    if view.scale:
        values.update(
            scale=_distance(view, view.data, view.scale) if view.scale_stride_block == view.stride_block else _OUTSIDE,
            scale_slot=_within(view, view.scale_stride_slot, view.block_size),
            scale_head=_within(view, view.scale_stride_head, view.num_heads))
    return " ".join(f"{name}={value:d}" for name, value in values.items())


def layout_text(layer: Layer) -> str:
    """What `layout_id` is a hash of: a line for the layer and one for each cache. Caches have to be bound."""
    desc, gdn = layer.desc.to_struct()[0], layer.desc.gdn
    specs = layer._cache_specs()
    views = [layer.cache_view(i) for i in range(len(specs))]
    values_first = " values_first=1" if layer.desc.rule and layer.desc.rule.values_first else ""
    head = (f"attn-layout 1 rope={desc.rope} drafts={gdn.num_speculative_tokens if gdn else 0} "
            f"checkpoints={gdn.checkpoint_interval if gdn else 0}{values_first}")
    return "\n".join([head, *(_line(s, v, views[0]) for s, v in zip(specs, views))]) + "\n"


def layout_id(layer: Layer) -> str:
    """32 hexadecimal digits: layers of one id hold the same bytes in a block, on whatever machine they are.

    dtype, sizes, order of rows, scales, places of the planes, rotation of keys and drafted states count; where the memory
    lies, how many blocks it has and how far apart they are do not.
    """
    text, value, halves = layout_text(layer).encode(), 0xcbf29ce484222325, []  # FNV-1a of 64 bits, and on from there
    for _ in range(2):
        for byte in text:
            value = (value ^ byte) * 0x100000001b3 % 2**64
        halves.append(f"{value:016x}")
    return "".join(halves)
