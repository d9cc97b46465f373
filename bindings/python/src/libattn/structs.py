# SPDX-License-Identifier: Apache-2.0
"""Structs of the C library from Python's values: the one place where a number, a text or an address is stored.

`Struct` is the base of everything in `libattn.abi`. ctypes would cut a number to its field's bits, a text at its first NUL,
and forget the owner of an address; here all of that is refused or kept.
"""
from __future__ import annotations

import array
import ctypes
import math
import operator
import reprlib
from collections.abc import Callable, Sequence
from ctypes import addressof, c_void_p, sizeof
from functools import cache
from types import SimpleNamespace
from typing import Any, ClassVar

_TYPECODES = {"int32": "i", "int64": "q", "uint8": "B", "f32": "f", "uint32": "I"}


def refused(field: str, message: str) -> Exception:
    """The exception of an argument that is not allowed."""
    from ._declarations import Status
    from .errors import make  # needs the declarations, which need this module
    return make(Status.INVALID_ARGUMENT, field, message)


@cache
def _tensors() -> Any:
    from . import tensors  # needs the declarations, which need this module
    return tensors


class Struct(ctypes.Structure):
    """A struct of the C library: fields by name or in their order, their sizes and an extension's id filled in.

    A pointer field takes a tensor, a sequence of numbers (copied: CPU backends only), a struct, a sequence of structs, or
    an address; with a sequence or tensor, the fields that count its elements and say their size are filled in, too. The
    struct keeps what it points to alive.
    """

    _ext_: ClassVar[int] = 0
    _pointees_: ClassVar[dict[str, str]] = {}

    def __init__(self, *args: Any, **values: Any) -> None:
        first = self._fields_[0][0]
        if first == "struct_size":
            self.struct_size = sizeof(self)
        elif self._ext_:
            self.ext.id, self.ext.struct_size = self._ext_, sizeof(self)
        for (name, *_), value in zip(self._fields_[1 if first in ("struct_size", "ext") else 0:], args):
            setattr(self, name, value)
        for name, value in values.items():
            setattr(self, name, value)

    @property
    def kept(self) -> dict[str, tuple[Any, int]]:
        """By field: what owns the memory at its address, and how many elements lie there."""
        return self.__dict__.setdefault("_kept", {})

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            object.__setattr__(self, name, value)
            return
        if not hasattr(type(self), name):
            raise refused(name, f"struct {type(self).__name__} has no such field")
        before = getattr(self, name)
        try:
            if isinstance(value, str):
                value = value.encode()
            elif not isinstance(value, (int, float, bytes, type(None))):
                value = self._converted(name, value)
            super().__setattr__(name, value)
        except (TypeError, OverflowError, UnicodeError) as why:
            raise refused(name, f"{reprlib.repr(value)}: {why}") from None
        kept = getattr(self, name)
        if isinstance(kept, float):
            cut = math.isinf(kept) and not (isinstance(value, float) and math.isinf(value))
        else:
            cut = isinstance(value, (int, bytes)) and (kept or (b"" if isinstance(value, bytes) else 0)) != value
        if cut:
            super().__setattr__(name, before)
            raise refused(name, f"{value!r}; its field in struct {type(self).__name__} holds {kept!r} of it")

    def _converted(self, name: str, value: Any) -> Any:
        kind = self._pointees_.get(name)
        if kind is not None:
            address, owner, count, size = self._address(name, kind, value)
            self.kept[name] = owner, count
            for counter, number in ((f"num_{name}", count), (f"{name.removesuffix('s')}_stride", size)):
                if hasattr(type(self), counter) and counter != "block_table_stride":  # that is the engine's
                    setattr(self, counter, number)
            return address
        if hasattr(value, "__index__") and not hasattr(value, "__dlpack__"):
            return operator.index(value)
        if hasattr(value, "item") and getattr(value, "shape", None) == ():  # a number of NumPy's or torch's
            return value.item()
        declared = dict(f[:2] for f in self._fields_)[name]
        if callable(value) and isinstance(declared, type) and issubclass(declared, ctypes._CFuncPtr):
            value = value if isinstance(value, declared) else declared(value)
            self.kept[name] = value, 1
        return value

    def _address(self, name: str, kind: str, value: Any) -> tuple[int | None, Any, int, int]:
        """Address, owner, number of elements and bytes of one."""
        tensors = _tensors()
        Rows, Tensor, as_tensor, as_writable = tensors.Rows, tensors.Tensor, tensors.as_tensor, tensors.as_writable
        if isinstance(value, (ctypes.Structure, ctypes.Array)):
            return addressof(value), value, 1, sizeof(value)
        if kind == "tensor":
            value = value if isinstance(value, (Rows, Tensor)) else as_tensor(value)
            return value.pointer, value, 1, 0
        base = kind.removeprefix("mutable ")
        if base.endswith("*"):
            owners = [v if isinstance(v, (bytes, Tensor, Rows)) else v.encode() if isinstance(v, str) else as_tensor(v)
                      for v in value]
            texts = base == "char*"
            held = ((ctypes.c_char_p if texts else c_void_p) * max(1, len(owners)))(
                *(v if texts else v.data if base == "void*" else v.pointer for v in owners))
            return addressof(held), (held, owners), len(owners), 8
        if isinstance(value, Tensor) or hasattr(value, "__dlpack__"):
            t = as_tensor(value) if base == kind else as_writable(name, value)
            if base not in (t.dtype, "void") or not t.is_contiguous():
                raise refused(name, f"{t}; contiguous {'memory' if base == 'void' else base} is needed")
            return t.data, t, math.prod(t.shape), t.itemsize
        if base in _TYPECODES:
            if base != kind:
                raise refused(name, f"a {type(value).__name__}; the library writes there: a tensor of {base} is needed")
            copy = array.array(_TYPECODES[base], value)
            return copy.buffer_info()[0] or None, copy, len(copy), copy.itemsize
        items = list(value)
        kinds = {type(item) for item in items}
        if len(kinds) > 1 or not all(issubclass(k, Struct) for k in kinds):
            raise TypeError(f"structs {base} are needed")
        element = kinds.pop() if kinds else Struct
        held = (element * max(1, len(items)))(*items) if items else (c_void_p * 1)()
        return addressof(held), (held, items), len(items), sizeof(element) if items else 0


#: How many elements the library reads or writes at addresses that come without a length, by the dimensions that are known
#: where the struct is handed over (the description's, the batch's).
NEEDED: dict[tuple[str, str], Callable[[SimpleNamespace], int]] = {
    **{("attn_layer_params", name): lambda d: d.heads for name in ("sinks", "alibi_slopes")},
    ("attn_layer_params", "q_scale"): lambda d: d.scales[d.q_scale_form],
    ("attn_layer_params", "k_scale"): lambda d: d.scales[d.k_scale_form],
    ("attn_layer_params", "v_scale"): lambda d: d.scales[d.v_scale_form],
    ("attn_layer_params", "p_scale"): lambda d: 1,
    ("attn_kv_quant_params", "hadamard_signs_k"): lambda d: d.D,
    ("attn_kv_quant_params", "hadamard_signs_v"): lambda d: d.Dv,
    ("attn_kv_quant_params", "v_channel_scale"): lambda d: d.Hk * d.Dv,
    ("attn_mm_encoder_state", "amax_history"): lambda d: 3 * d.amax_history_len,
    ("attn_mm_encoder_state", "scales"): lambda d: 3,
    ("attn_recurrent_weights", "a_log"): lambda d: d.Hv,
    ("attn_recurrent_weights", "dt_bias"): lambda d: d.Hv * d.gate_width,
    ("attn_recurrent_skip", "skip"): lambda d: d.Hv,
    ("attn_amax_args", "out"): lambda d: d.heads if d.struct.per_head else 1,
    **{(struct, name): lambda d: d.R for struct in ("attn_batch", "attn_batch_table", "attn_batch_recurrent",
                                                    "attn_batch_context_parallel")
       for name in ("seq_lens", "seq_lens_host", "encoder_seq_lens", "encoder_seq_lens_host", "block_table_row",
                    "causal_per_request", "last_page_len", "last_page_len_host", "has_initial_state", "num_accepted_tokens",
                    "local_seq_lens", "local_seq_lens_host", "query_lens_host")},
    **{(struct, name): lambda d: d.R + 1 for struct in ("attn_batch", "attn_batch_table")
       for name in ("query_start_loc", "query_start_loc_host", "key_start_loc", "key_start_loc_host", "span_start_loc",
                    "page_start_loc", "page_start_loc_host")},
    ("attn_batch_recurrent", "state_slots"): lambda d: d.R * max(1, d.struct.state_slots_stride),
    ("attn_batch_recurrent", "initial_slots"): lambda d: d.R * max(1, d.struct.initial_slots_stride),
    ("attn_batch_recurrent", "checkpoint_slots"): lambda d: d.R * max(1, d.struct.checkpoint_slots_stride),
    ("attn_batch", "spans"): lambda d: 2 * d.struct.num_spans,
    ("attn_io_mla", "topk_indices"): lambda d: d.T * d.struct.topk_stride,
    ("attn_io_indexer", "lengths"): lambda d: d.T * d.lists,
    ("attn_io_index_lists", "indices"): lambda d: d.T * d.struct.token_stride,
    ("attn_io_index_lists", "lengths"): lambda d: d.T * d.struct.length_stride,
    ("attn_io_rope", "positions"): lambda d: d.T,
    ("attn_io_output_quant", "scale"): lambda d: 1,
}


def check_lengths(struct: Struct, where: str, **dims: Any) -> None:
    """Refuse arrays that are shorter than what the library reads."""
    known = SimpleNamespace(struct=struct, **dims)
    for name, (_, count) in struct.__dict__.get("_kept", {}).items():
        needed = NEEDED.get((type(struct).__name__, name))
        if needed is not None and count < needed(known):
            raise refused(name, f"{count} numbers; {where} needs {needed(known)}")


def chained(struct: Struct, extensions: Sequence[Struct], where: str, **dims: Any) -> list[Any]:
    """Append extensions to a struct's chain, in order: copies of them, so that one may go to many structs. To be kept."""
    copies: list[Any] = []
    for ext in reversed(extensions):
        if not isinstance(ext, Struct) or not ext._ext_:
            raise refused("extensions", f"{ext!r}; structs of libattn.extensions or libattn.abi are needed")
        check_lengths(ext, where, **dims)
        copy = type(ext).from_buffer_copy(ext)
        copy.ext.next, struct.next = struct.next, addressof(copy)
        copies.append((copy, ext))
    return copies


def values(struct: Struct) -> dict[str, Any]:
    """The fields of a struct that the library has filled as Python's values; addresses and what is reserved left out."""
    found: dict[str, Any] = {}
    for name, *_ in struct._fields_:
        value = getattr(struct, name)
        declared = getattr(type(struct), name)
        if name in ("struct_size", "next") or name.startswith("reserved") or name in struct._pointees_:
            continue
        if isinstance(value, ctypes.Array):
            value = tuple(value)
        elif isinstance(value, Struct):
            inner = values(value)
            value = tuple(inner.values()) if len(inner) == 2 else inner
        elif isinstance(value, (bytes, type(None))) and declared.size == 8:
            value = (value or b"").decode(errors="replace")
        found[name] = value
    return found


class Record:
    """What the library says in a struct: its fields as Python's values. Immutable."""

    def __init__(self, struct: Struct, **more: Any) -> None:
        self.__dict__.update(values(struct), **more)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"{type(self).__name__} is immutable")

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and other.__dict__ == self.__dict__

    def __hash__(self) -> int:
        return hash(repr(self))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in self.__dict__.items())})"


__all__ = ["NEEDED", "Record", "Struct", "chained", "check_lengths", "refused", "values"]
