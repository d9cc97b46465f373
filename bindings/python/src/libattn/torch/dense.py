# SPDX-License-Identifier: Apache-2.0
"""Attention of padded batches: q ``[B, Hq, S, D]``, k and v ``[B, Hk, L, D]``, as torch models call it.

Keys are read where they lie: an encoder's, and those of decoders and cross layers, which are described as encoders whose batch is causal
or not. Where requests share keys (documents after one prefix), or a backend refuses that, decoders and cross layers are described as
what they are, layers with a cache: their keys are written into pages in one call of the backend's own ``write_kv`` and attended through
a block table. Pages are scratch and shared by all layers of a description.
"""
from __future__ import annotations

from collections.abc import Sequence
from ctypes import addressof, c_void_p, cast
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch

from .._declarations import Phase, Status
from ..errors import make
from ..layers import EncoderQuant, LayerDesc
from ..step import Batch
from ..tensors import Rows
from . import call as in_c
from .encoder_scales import EncoderScales
from .segments import Segments, Window, of_mask, whole
from .store import DTYPES, ELEMENTS, Bound, Params, device_pair, refuse_capture, store, stream_of

_MASKS_KEPT = 16
_CALLS_KEPT = 64
_BATCHES_KEPT = 8
_LARGE_ENTRY = 8 << 20  # bytes of an entry's values, whose copy takes longer than a call
_SHAPES = {"q": "[B, Hq, S, D]", "k": "[B, Hk, L, D]", "v": "[B, Hk, L, Dv]"}
_wholes: dict[tuple[Any, ...], Segments] = {}
_again = None if in_c.c is None else in_c.c.again


def refuse_gradient(name: str, t: torch.Tensor | None) -> None:
    """Refuse a tensor whose gradient would be dropped."""
    if t is not None and t.requires_grad and torch.is_grad_enabled():
        raise make(Status.UNSUPPORTED, name, "requires a gradient, which libattn does not compute; run under "
                   "torch.no_grad() or torch.inference_mode()")


def check_inputs(**tensors: torch.Tensor | None) -> None:
    """Refuse what would be dropped or misread: gradients, and q, k and v of other than four dimensions."""
    for name, t in tensors.items():
        refuse_gradient(name, t)
        if t is not None and name in _SHAPES and t.dim() != 4:
            raise make(Status.INVALID_ARGUMENT, name, f"{list(t.shape)}; {_SHAPES[name]} is needed")


def visible_of(mask: torch.Tensor, batch: int, queries: int, keys: int) -> torch.Tensor:
    """A mask ``[B or 1, 1, S, L or more]`` as booleans ``[B, S, L]``.

    Boolean masks are True where a key is seen; additive ones have to hold 0 and minus infinity (or what stands for
    it: the smallest half of the type's range) alone.
    """
    if mask.dim() != 4 or mask.shape[2] != queries or mask.shape[3] < keys or mask.shape[0] not in (1, batch):
        raise make(Status.INVALID_ARGUMENT, "attention_mask",
                   f"{list(mask.shape)}; [{batch} or 1, 1, {queries}, {keys} or more] is needed")
    if mask.shape[1] != 1 and mask.stride(1) != 0:
        raise make(Status.UNSUPPORTED, "attention_mask", f"{list(mask.shape)}: one mask per head; supported: one mask "
                   "for all heads")
    refuse_capture(mask.device)
    mask = mask[:, 0, :, :keys]
    if mask.dtype == torch.bool:
        seen = mask
    elif not mask.dtype.is_floating_point:
        raise make(Status.INVALID_ARGUMENT, "attention_mask", f"{mask.dtype}; a boolean or additive mask is needed")
    else:
        seen = mask == 0
        hidden = mask <= torch.finfo(mask.dtype).min / 2
        if not bool((seen | hidden).all()):
            raise make(Status.UNSUPPORTED, "attention_mask", "an additive mask with values other than 0 and minus "
                       "infinity; supported: masks that show or hide a key")
    return seen.expand(batch, queries, keys)


def segments_of(mask: torch.Tensor | None, batch: int, queries: int, keys: int, causal: bool, window: Window,
                own_keys: bool) -> Segments:
    """Requests of a call; those of a mask are kept on it for the layers that follow."""
    if mask is None:
        key = (batch, queries, keys, causal, window)
        found = _wholes.get(key)
        if found is None:
            if len(_wholes) > 1024:
                _wholes.clear()
            found = _wholes[key] = whole(batch, queries, keys, causal, window)
        return found
    if mask.is_inference():
        return of_mask(visible_of(mask, batch, queries, keys), causal, window, own_keys)
    kept = mask.__dict__.setdefault("_libattn_segments", {})
    key = (mask.data_ptr(), mask._version, batch, queries, keys, causal, window, own_keys)
    if key not in kept:
        if len(kept) > _MASKS_KEPT:
            kept.clear()
        kept[key] = of_mask(visible_of(mask, batch, queries, keys), causal, window, own_keys)
    return kept[key]


def _on(device: torch.device, values: np.ndarray) -> torch.Tensor:
    tensor = torch.from_numpy(np.ascontiguousarray(values))
    return tensor if device.type == "cpu" else tensor.to(device, non_blocking=True)


def _copied(t: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor, copied by 16 bytes where it can be: torch copies transposed rows element by element. Not every XPU has
    complex numbers of 16 bytes."""
    wide = 16 // t.element_size()
    if t.stride(-1) == 1 and not t.is_xpu and not any(n % wide for n in (t.shape[-1], t.data_ptr() // t.element_size(), *t.stride()[:-1])):
        return t.view(torch.complex128).clone(memory_format=torch.contiguous_format).view(t.dtype)
    return t.clone(memory_format=torch.contiguous_format)  # contiguous() keeps any stride of a dimension of one element


def _step(t: torch.Tensor) -> int | None:
    """How many rows an entry of a tensor [B, H, N, D] lies after the one before; None: no whole number, or elements apart."""
    if t.stride(3) != 1 and t.shape[3] != 1:
        return None
    if t.shape[0] == 1:
        return t.shape[2]
    entry, row = t.stride(0), t.stride(2)
    return entry // row if entry > 0 and row > 0 and entry % row == 0 else None


def _rows(t: torch.Tensor) -> tuple[torch.Tensor, int]:
    """The tensor, or a copy that has a step, and the step."""
    step = _step(t)
    return (_copied(t), t.shape[1] * t.shape[2]) if step is None else (t, step)


def _starts(segments: Segments, queries: int, step: int) -> np.ndarray | None:
    """[2, requests + 1]: the first row of each request in queries and in keys, gaps between them as requests without the others.
    None: keys overlap."""
    requests = segments.requests
    rows, row_ends = (requests[:, i] + requests[:, 0] * queries for i in (1, 2))
    keys, key_ends = (requests[:, i] + requests[:, 0] * step for i in (3, 4))
    before, before_keys = (np.concatenate([[0], ends[:-1]]) for ends in (row_ends, key_ends))
    if (keys < before_keys).any():
        return None
    # In front of a request: keys without queries, then padding, queries without keys.
    apart, padding = np.flatnonzero(keys > before_keys), np.flatnonzero(rows > before)
    if len(apart) or len(padding):
        at = np.concatenate([apart, padding])
        row_ends = np.insert(row_ends, at, np.concatenate([before[apart], rows[padding]]))
        key_ends = np.insert(key_ends, at, np.concatenate([keys[apart], keys[padding]]))
    found = np.zeros((2, len(row_ends) + 1), np.int32)
    found[:, 1:] = row_ends, key_ends
    return found


def _contiguous_batch(bound: Bound, segments: Segments, queries: int, step: int, stream: int | None) -> Batch | None:
    """Keys where they lie: the batch of before, if it differs in lengths of keys alone. None: they overlap."""
    starts, causal = _starts(segments, queries, step), segments.causal and queries > 1
    if starts is None:
        return None
    like = (starts[0].tobytes(), causal, stream)
    if bound.contiguous is not None and bound.contiguous[0] == like:
        _, batch, host, there = bound.contiguous
        host[1] = starts[1]
        if there is not None:
            there.copy_(torch.from_numpy(host), non_blocking=there.is_cuda)  # CUDA has read what is not pinned when this returns
        return batch
    with torch.inference_mode(False):  # filled in other modes too
        device = _on(bound.device, starts)
    batch = Batch(device[0], key_start_loc=device[1], query_start_loc_host=starts[0], key_start_loc_host=starts[1],
                  causal=causal)
    bound.contiguous = like, batch, starts, None if bound.device.type == "cpu" else device
    return batch


def _clusters(requests: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Groups of requests whose keys overlap: the group of each, and [groups, 3]: batch index, first key, end key."""
    if (requests[1:, 0] > requests[:-1, 0]).all():  # one of each batch entry
        return np.arange(len(requests)), requests[:, (0, 3, 4)]
    order = np.lexsort((requests[:, 3], requests[:, 0]))
    member = np.zeros(len(requests), dtype=np.int64)
    groups: list[list[int]] = []
    for r in order.tolist():
        b, _, _, key, key_end = requests[r].tolist()
        if groups and groups[-1][0] == b and key < groups[-1][2]:
            groups[-1][2] = max(groups[-1][2], key_end)
        else:
            groups.append([b, key, key_end])
        member[r] = len(groups) - 1
    return member, np.array(groups, dtype=np.int64).reshape(-1, 3)


def _paged_batch(bound: Bound, segments: Segments, queries: int, keys: int, step: int,
                 cross: bool) -> tuple[Batch, int] | None:
    """Keys in pages: each group of overlapping requests in blocks of its own, and how many blocks. None: one begins inside a
    block."""
    size, requests = bound.block_size, segments.requests
    member, bounds = _clusters(requests)
    offset = requests[:, 3] - bounds[member, 1]
    if (offset % size).any():
        return None
    blocks = -(-(bounds[:, 2] - bounds[:, 1]) // size)
    base = np.concatenate([[0], np.cumsum(blocks)])
    batch = int(requests[:, 0].max()) + 1
    slots = np.full((batch - 1) * step + keys, -1, dtype=np.int64)
    for (b, first, end), block in zip(bounds.tolist(), base.tolist()):
        slots[b * step + first:b * step + end] = np.arange(block * size, block * size + end - first)
    lengths = requests[:, 4] - requests[:, 3]
    widest = int(-(-lengths.max() // size))
    table = (base[member] + offset // size)[:, None] + np.arange(widest)
    table = np.minimum(table, base[-1] - 1).astype(np.int32)
    # Rows between requests are padding: a request of length 0 holds them.
    rows, end_rows = (requests[:, i] + requests[:, 0] * queries for i in (1, 2))
    gaps = np.flatnonzero(rows > np.concatenate([[0], end_rows[:-1]]))
    index = np.arange(len(requests))
    if len(gaps):
        index, end_rows = np.insert(index, gaps, -1), np.insert(end_rows, gaps, rows[gaps])
    starts = np.concatenate([[0], end_rows])
    seq_lens = np.where(index >= 0, lengths[index], 0).astype(np.int32)
    device, host = bound.device, starts.astype(np.int32)
    names = ("encoder_seq_lens", "encoder_seq_lens_host") if cross else ("seq_lens", "seq_lens_host")
    given = dict(zip(names, (_on(device, seq_lens), seq_lens)))
    made = Batch(_on(device, host), block_table=_on(device, table[index]), slot_mapping=_on(device, slots),
                 query_start_loc_host=host, causal=not cross and segments.causal,
                 max_seq_len=0 if cross else int(lengths.max()), **given)
    if cross:
        made.struct.max_encoder_seq_len = int(lengths.max())
    return made, int(base[-1])


def dtype_of(dtype: torch.dtype) -> str:
    """A layer's dtype by torch's."""
    if dtype not in DTYPES:
        raise make(Status.UNSUPPORTED, "dtype", f"{dtype}; supported: {', '.join(map(str, DTYPES))}")
    return DTYPES[dtype]


@lru_cache(maxsize=256)
def describe(kind: str, num_q_heads: int, num_kv_heads: int, head_size: int, head_size_v: int, dtype: torch.dtype,
             scale: float, causal: bool, window: Window, soft_cap: float, sinks: bool, block_size: int,
             history: int | None = None) -> LayerDesc:
    """A layer of a torch model; `history`, of a multimodal encoder in fp8: steps that its scales follow, 0: given ones."""
    if window is not None and len(window) != 2:
        raise make(Status.INVALID_ARGUMENT, "window", f"{window}; (left, right) is needed")
    if history is not None and kind != "mm_encoder":
        raise make(Status.UNSUPPORTED, "fp8", f"a {kind}, as which keys that requests share are attended; supported: mm_encoder")
    quantized = None if history is None else EncoderQuant(  # e4m3 kernels read 16 elements at a time
        amax_history_len=history, padded_head_size=-(-head_size // 16) * 16 if head_size % 16 else 0)
    return LayerDesc("layers.0", num_q_heads, num_kv_heads, head_size, scale, kind, dtype_of(dtype),
                     head_size_v=head_size_v, causal=causal and kind == "decoder", window=window, soft_cap=soft_cap,
                     has_sinks=sinks, block_size=block_size if kind in ("decoder", "cross") else 0, encoder_quant=quantized)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None, *, scale: float,
           causal: bool, window: Window = None, soft_cap: float = 0.0, sinks: torch.Tensor | None = None,
           kind: str = "decoder", index: int = 0, fp8: EncoderScales | None = None,
           out: torch.Tensor | None = None) -> torch.Tensor:
    """One layer's attention over a padded batch.

    Parameters
    ----------
    q : [B, Hq, S, D]
    k, v : [B, Hk, L, D], [B, Hk, L, Dv]
        All keys of the step, the cached ones included.
    mask : [B or 1, 1, S, L], optional
        Booleans, or 0 and minus infinity. With one, it alone says who sees whom.
    causal : bool
        Without a mask: bottom-right aligned.
    window : (int, int), optional
        Keys to the left and right next to the query's own position.
    soft_cap : float
        0: none.
    sinks : [Hq], optional
        Logits in the softmax's denominator.
    kind : str
        ``decoder``, ``encoder_only``, ``mm_encoder`` or ``cross``.
    index : int
        Of the layer in the model, for ``ATTN_BACKEND`` and the table.
    fp8 : EncoderScales, optional
        Of a ``mm_encoder`` whose q, k and v are quantized to e4m3.
    out : [B, S, Hq, Dv], optional
        Contiguous; by default a new tensor.

    Returns
    -------
    Tensor [B, S, Hq, Dv]
        Rows that see no key are zero.

    Raises
    ------
    UnsupportedError
        With the reasons of every backend.
    """
    if torch.is_grad_enabled():
        check_inputs(q=q, k=k, v=v, sinks=sinks)
    if _again is not None and mask is None and sinks is None and fp8 is None and out is None:
        found = _again(q, k, v, scale, causal, window, soft_cap, kind, index)
        if found is not None:
            return found
    segments = None
    if mask is not None:
        if q.dim() != 4 or k.dim() != 4:
            check_inputs(q=q, k=k)
        segments = segments_of(mask, q.shape[0], q.shape[2], k.shape[2], causal, window, kind != "cross")
    return attend_segments(q, k, v, segments, scale, causal, window, soft_cap, sinks, kind, index, fp8, out)


def output(out: torch.Tensor | None, q: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """A new tensor like `q`, or the caller's; one that kernels do not write where it lies is refused."""
    if out is None:
        return q.new_empty(shape)
    if out.shape != shape or out.dtype != q.dtype or out.device != q.device or not out.is_contiguous():
        raise make(Status.INVALID_ARGUMENT, "out", f"{out.dtype} {list(out.shape)} of strides {list(out.stride())} on "
                   f"{out.device}; {q.dtype} {list(shape)}, contiguous, on {q.device} is needed")
    return out


def _query_rows(q: torch.Tensor) -> torch.Tensor:
    """[B, S, Hq, D] whose rows of all batch entries are evenly apart."""
    rows = q.transpose(1, 2)
    even = rows.shape[0] == 1 or rows.shape[1] == 1 or rows.stride(0) == rows.shape[1] * rows.stride(1)
    return rows if even and rows.stride(3) == 1 else _copied(rows)


class _Call:
    """A call that was made, for those after it that differ in addresses alone."""

    __slots__ = ("bound", "planned", "stream", "device", "complete", "shape", "kept", "data", "run", "error_ref", "error")

    def __init__(self, bound: Bound, stream: int | None, complete: bool, shape: tuple[int, ...], rows: Sequence[Rows]) -> None:
        assert bound.plan is not None
        self.bound, self.planned, self.stream, self.complete, self.shape = bound, bound.planned, stream, complete, shape
        self.device = None if stream is None else bound.device  # whose stream may be another one next time
        self.kept, self.data = rows, [row.data for row in rows]
        self.run = bound.plan.prepare(bound.layer.handle, [row.pointer for row in rows], stream)
        self.error_ref = bound.plan.api.error_ref

    def refuse_capture(self) -> None:
        """For `keep`."""
        refuse_capture(self.bound.device)

    def keep(self, generation: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, constants: tuple[Any, ...]) -> None:
        """For calls in C that differ in addresses alone, unless all were forgotten since `generation`."""
        bound, (plan, layer, io) = self.bound, self.run.args
        self.error = self.error_ref()._obj  # this thread's
        in_c.c.keep(generation, q, k, v, constants, self, (bound, self.planned, bound.workspace, bound.indices, bound.recent, bound.place, self.shape),
                    (*(row.pointer for row in self.kept), cast(self.run.func, c_void_p).value, plan, layer, addressof(io._obj),
                     addressof(self.error)))

    def again(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None, out: torch.Tensor | None,
              index: int) -> torch.Tensor | None:
        """The same on other addresses; None where this batch is no longer the one that is planned."""
        bound = self.bound
        if (bound.planned is not self.planned or bound.workspace.planned is not bound or index not in bound.indices
                or self.device is not None and stream_of(self.device) != self.stream):
            return None
        if sinks is not None and bound.sinks is not None:
            bound.sinks.copy_(sinks.detach())
        bound.recent[0] = bound.place
        out = q.new_empty(self.shape) if out is None else output(out, q, self.shape)
        if not self.complete:
            out.zero_()
        data = self.data
        data[0].value, data[1].value, data[2].value, data[3].value = q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr()
        status = self.run(self.error_ref())
        if status:
            raise bound.model.api.error(status)
        return out


def attend_segments(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segments: Segments | None, scale: float,
                    causal: bool, window: Window, soft_cap: float, sinks: torch.Tensor | None, kind: str, index: int,
                    fp8: EncoderScales | None = None, out: torch.Tensor | None = None) -> torch.Tensor:
    """`attend` for requests that are known; None: every row of the batch sees its keys, as `causal` and `window` say."""
    if q.is_cuda or q.is_xpu:
        refuse_capture(q.device)
    key = (q.shape, q.stride(), k.shape, k.stride(), v.shape, v.stride(), q.dtype, k.dtype, v.dtype, q.device, k.device, v.device,
           segments, scale, causal, window, soft_cap, kind, None if sinks is None else sinks.shape)
    generation = 0 if in_c.c is None else in_c.c.generation()  # first: configure() of another thread drops what is kept
    calls = store.here().calls
    call = calls.get(key) if fp8 is None else None
    if call is not None:
        found = call.again(q, k, v, sinks, out, index)
        if found is not None:
            return found
    constants = (scale, causal, window, soft_cap, kind) if segments is None and sinks is None else None
    check_inputs(q=q, k=k, v=v)
    batch, heads, queries, head_size = q.shape
    keys = k.shape[2]
    if k.shape[::3] != q.shape[::3] or v.shape[:3] != k.shape[:3]:
        raise make(Status.INVALID_ARGUMENT, "k", f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}; [B, Hq, S, D], "
                   "[B, Hk, L, D] and [B, Hk, L, Dv] are needed")
    if sinks is not None and sinks.shape != (heads,):
        raise make(Status.INVALID_ARGUMENT, "sinks", f"{list(sinks.shape)}; one for each head, [{heads}], is needed")
    if not (q.dtype == k.dtype == v.dtype and q.device == k.device == v.device):
        raise make(Status.INVALID_ARGUMENT, "k", f"q {q.dtype} on {q.device}, k {k.dtype} on {k.device}, v {v.dtype} on {v.device}; one "
                   "dtype and one device are needed")
    if segments is None:
        segments = segments_of(None, batch, queries, keys, causal, window, True)
    # Rows of an encoder and of a cross layer see one run of keys in both directions; what else a mask shows goes through pages.
    if kind != "decoder" and segments.causal and queries > 1:
        kind = "decoder"
    shape = (batch, queries, heads, v.shape[3])
    out = output(out, q, shape)
    if not segments.complete:
        out.zero_()
    if len(segments.requests) == 0:
        return out
    each = segments.of_each if fp8 is None and _step(k) != _step(v) else None
    if each is not None and v[0].numel() * v.element_size() >= _LARGE_ENTRY:  # keys and values in place, entry by entry
        for b in range(batch):
            attend_segments(q[b:b + 1], k[b:b + 1], v[b:b + 1], each, scale, causal, window, soft_cap, sinks, kind, index,
                            out=out[b:b + 1])
        return out
    given = (q.data_ptr(), k.data_ptr(), v.data_ptr())
    q_rows = _query_rows(q)
    k, step = _rows(k)
    v, step_v = _rows(v)
    if step != step_v:
        k, v = _copied(k), _copied(v)
        step = k.shape[1] * keys if batch > 1 else keys
    described = (heads, k.shape[1], head_size, v.shape[3], q.dtype, scale, causal, segments.window, soft_cap,
                 sinks is not None)
    params: Params = ()
    if fp8 is not None:
        params = (("scales", fp8.scales),)
        params += () if fp8.history is None else (("amax_history", fp8.history),)
    history = None if fp8 is None else 0 if fp8.history is None else fp8.history.shape[1]
    bound = _planned(described, history, segments, queries, keys, step, kind, index, q.device, params)
    if sinks is not None and bound.sinks is not None:
        bound.sinks.copy_(sinks.detach())
    row = (batch - 1) * step + keys
    q_stride = q_rows.stride(0) if queries == 1 else q_rows.stride(1)
    tensors = ((q_rows, (batch * queries, heads, head_size), (q_stride, q_rows.stride(2), 1)),
               (k, (row, k.shape[1], head_size), (k.stride(2), k.stride(1), 1)),
               (v, (row, v.shape[1], shape[3]), (v.stride(2), v.stride(1), 1)),
               (out, (batch * queries, heads, shape[3]), (heads * shape[3], shape[3], 1)))
    pair = device_pair(q.device)
    rows = [Rows(ELEMENTS[t.dtype], pair) for t, _, _ in tensors]
    for filled, (t, sizes, strides) in zip(rows, tensors):
        filled.fill(t.data_ptr(), sizes, strides)
    call = _Call(bound, stream_of(q.device), segments.complete, shape, rows)
    bound.model.api.check(call.run(call.error_ref()))
    if fp8 is None and given == (q_rows.data_ptr(), k.data_ptr(), v.data_ptr()):  # none of them is a copy
        if len(calls) >= _CALLS_KEPT and key not in calls:
            del calls[next(iter(calls))]
        calls[key] = call
        if constants is not None and in_c.c is not None:
            call.keep(generation, q, k, v, constants)
    return out


def _planned(described: tuple[Any, ...], history: int | None, segments: Segments, queries: int, keys: int, step: int,
             kind: str, index: int, device: torch.device, params: Params) -> Bound:
    """The bound layer with this batch planned.

    Decoders and cross layers come first as encoders over keys in place; then in pages of the backend's own block size; in blocks of 1
    where requests begin inside each other's keys; and an encoder whose requests share keys is served as a bidirectional decoder, through
    pages. Layers that differ in their sinks' values share a plan: each copies its own to where the plan reads them, on the stream of its
    run.
    """
    stream = stream_of(device)
    key, purpose = (segments, queries, keys, step, stream), ("scratch", stream if described[-1] else None)
    if kind in ("decoder", "cross"):
        window = None if queries == 1 and segments.sees_all else segments.window
        encoder = (*described[:6], False, window, *described[8:])
        found = store.in_place(described, partial(describe, kind, *described, 0), partial(describe, "encoder_only", *encoder, 0), index,
                               device, purpose, key, Phase.DECODE if queries == 1 else Phase.PREFILL)
        if found is not None and _prepared(found, key, segments, queries, keys, step, "encoder_only", device):
            return found
    for candidate, block_size in ((kind, 0), (kind, 1), ("decoder", 0), ("decoder", 1)):
        bound = store.bound((candidate, block_size, described, history),
                            partial(describe, candidate, *described, block_size, history), index, device, params, purpose,
                            alone=True, shares_sinks=True)
        if _prepared(bound, key, segments, queries, keys, step, candidate, device):
            return bound
    raise make(Status.INTERNAL, "attention_mask", "blocks of one key hold every run of keys")


def _prepared(bound: Bound, key: tuple[Any, ...], segments: Segments, queries: int, keys: int, step: int, kind: str,
              device: torch.device) -> bool:
    """Plan the batch of `key`, unless it is the one that is planned; False: the layer's blocks, or no blocks, cannot hold it."""
    if bound.holds(key):
        return True
    if bound.block_size == 0:
        batch = _contiguous_batch(bound, segments, queries, step, stream_of(device))
        if batch is None:
            return False
        bound.update(batch, key, stream_of(device))
        return True
    batches, described_as = store.here().batches, (key, bound.block_size, kind == "cross", device)
    if described_as not in batches:  # layers that differ in a window, a soft cap or sinks share it
        if len(batches) >= _BATCHES_KEPT:
            del batches[next(iter(batches))]
        batches[described_as] = _paged_batch(bound, segments, queries, keys, step, kind == "cross")
    made = batches[described_as]
    if made is None:
        return False
    bound.reserve(made[1])
    bound.update(made[0], key, stream_of(device))
    return True
