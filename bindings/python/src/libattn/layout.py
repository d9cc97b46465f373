# SPDX-License-Identifier: Apache-2.0
"""Layouts of layers' caches: one name for each, and conversion from one into another, by ``libattn_layout`` (``attn/draft/layout.h``)."""
from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import byref, c_int64, c_void_p
from typing import TYPE_CHECKING, Any

from ._declarations import ATTN_LAYOUT_ID_SIZE, ATTN_LAYOUT_TEXT_SIZE, attn_layout_side
from .structs import refused

if TYPE_CHECKING:
    from .model import Layer


def _call(function: str, layer: Layer, *args: Any) -> None:
    call = getattr(layer.api.companion("libattn_layout.so.0", "layout"), function)
    with layer.model.runtime.owner:
        status = call(c_void_p(layer.api.table), *args, layer.api.error_ref())
    if status:
        raise layer.api.error(status)


def _side(layer: Layer, blocks: Sequence[int] = ()) -> attn_layout_side:
    desc, kept = layer.desc.to_struct()
    side = attn_layout_side(layer=layer.handle, desc=desc, params=layer._params[0] if layer._params else None,
                            blocks=[int(block) for block in blocks])
    side._desc = desc, kept  # alive as long as the struct
    return side


def _described(layer: Layer) -> tuple[str, str]:
    found = ctypes.create_string_buffer(ATTN_LAYOUT_ID_SIZE), ctypes.create_string_buffer(ATTN_LAYOUT_TEXT_SIZE)
    _call("attn_layout_id", layer, byref(_side(layer)), *found)
    return found[0].value.decode(), found[1].value.decode()


def layout_text(layer: Layer) -> str:
    """What `layout_id` is a hash of: a line for the layer and one for each cache. Caches have to be bound."""
    return _described(layer)[1]


def layout_id(layer: Layer) -> str:
    """32 hexadecimal digits: layers of one id hold the same bytes in a block, on whatever machine they are.

    dtype, sizes, order of rows, scales, places of the planes, rotation of keys and drafted states count; where the memory
    lies, how many blocks it has and how far apart they are do not.
    """
    return _described(layer)[0]


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
    if c_int64(num_tokens).value != num_tokens:
        raise refused("num_tokens", f"{num_tokens}; 64 bits are allowed")
    sides = _side(source, source_blocks), _side(target, target_blocks)
    _call("attn_layout_convert", source, c_void_p(source.model.runtime.handle), *map(byref, sides), c_int64(num_tokens))


__all__ = ["layout_convert", "layout_id", "layout_text"]
