# SPDX-License-Identifier: Apache-2.0
"""Attention of packed batches: the rows of one request after those of another, over an engine's pages or its gathered keys."""
from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch

from .._declarations import Status
from ..errors import make
from ..model import KvView
from ..step import Batch
from . import dense
from .dense import _on
from .encoder_scales import EncoderScales
from .segments import Segments, Window
from .store import Bound, refuse_capture, store, stream_of


def _check_integers(name: str, values: torch.Tensor, dims: int) -> None:
    if values.dtype not in (torch.int32, torch.int64) or values.dim() != dims:
        raise make(Status.INVALID_ARGUMENT, name, f"{values.dtype} {list(values.shape)}; int32 of {dims} dimensions is needed")


def _lengths(name: str, values: torch.Tensor) -> np.ndarray:
    _check_integers(name, values, 1)
    refuse_capture(values.device)
    return values.detach().cpu().numpy().astype(np.int64)


@lru_cache(maxsize=8)
def _segments_of(query_starts: bytes, key_starts: bytes, rows: int, causal: bool, window: Window) -> Segments:
    """The segments of cumulative int64 lengths. Equal numbers give the same object, so that layers share a plan even if
    tensors have no version (`torch.inference_mode`)."""
    q, k = (np.frombuffer(starts, np.int64) for starts in (query_starts, key_starts))
    for name, starts in (("query_start_loc", q), ("key_start_loc", k)):
        if len(starts) != len(q) or len(starts) == 0 or starts[0] < 0 or (np.diff(starts) < 0).any():
            raise make(Status.INVALID_ARGUMENT, name, f"{starts.tolist()}; {max(len(q), 1)} numbers are needed, none below 0 or the one "
                       "before it")
    requests = np.stack([np.zeros(len(q) - 1, np.int64), q[:-1], q[1:], k[:-1], k[1:]], axis=1)
    requests = requests[(q[1:] > q[:-1]) & (k[1:] > k[:-1])]
    return Segments(requests, causal, window, int((requests[:, 2] - requests[:, 1]).sum()) == rows)


def _packed_segments(query_start_loc: torch.Tensor, key_start_loc: torch.Tensor, rows: int, causal: bool,
                     window: Window) -> Segments:
    """Requests of cumulative lengths; kept on `key_start_loc` for the layers that follow, with the memory of `query_start_loc`, whose
    address no other tensor gets as long as it is known."""
    key = None
    if not (key_start_loc.is_inference() or query_start_loc.is_inference()):
        key = (key_start_loc._version, query_start_loc._version, query_start_loc.data_ptr(), rows, causal, window)
        kept = key_start_loc.__dict__.get("_libattn_segments")
        if kept is not None and kept[0] == key:
            return kept[1]
    queries, keys = _lengths("query_start_loc", query_start_loc), _lengths("key_start_loc", key_start_loc)
    found = _segments_of(queries.tobytes(), keys.tobytes(), rows, causal, window)
    if key is not None:
        key_start_loc.__dict__["_libattn_segments"] = (key, found, query_start_loc.untyped_storage())
    return found


def attend_packed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, query_start_loc: torch.Tensor,
                  key_start_loc: torch.Tensor, *, scale: float, causal: bool = True, window: Window = None,
                  soft_cap: float = 0.0, sinks: torch.Tensor | None = None, kind: str = "decoder",
                  index: int = 0, fp8: EncoderScales | None = None) -> torch.Tensor:
    """Gathered keys: request r has query rows and keys of its own.

    Parameters
    ----------
    q : [1, Hq, T, D]
    k, v : [1, Hk, Tk, D], [1, Hk, Tk, Dv]
    query_start_loc, key_start_loc : int32 [R + 1]

    Returns
    -------
    Tensor [1, T, Hq, Dv]
    """
    dense.check_inputs(q=q, k=k, v=v, sinks=sinks)
    if len(q) != 1:
        raise make(Status.INVALID_ARGUMENT, "q", f"{list(q.shape)}; [1, Hq, T, D] is needed")
    segments = _packed_segments(query_start_loc, key_start_loc, q.shape[2], causal, window)
    return dense.attend_segments(q, k, v, segments, scale, causal, window, soft_cap, sinks, kind, index, fp8)


def bind_pages(bound: Bound, at: int, k_pages: torch.Tensor | KvView, v_pages: torch.Tensor | KvView | None) -> None:
    """Hand an engine's pages to a bound layer, while no plan holds it; `v_pages` None: latent rows. They stay the engine's: nothing here
    keeps them."""
    bound.model.layers[at].bind_caches([pages for pages in (k_pages, v_pages) if pages is not None], keep=False)


class Step:
    """What a plan was made for; compared by identity, and kept so that nothing else takes its address."""

    def __init__(self, of: object) -> None:
        self.of = of

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Step) and self.of is not None and other.of is self.of

    def __hash__(self) -> int:
        return id(self.of)


def attend_pages(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor,
                 block_table: torch.Tensor, seq_lens: torch.Tensor, *, scale: float, window: Window = None,
                 soft_cap: float = 0.0, sinks: torch.Tensor | None = None, index: int = 0,
                 step: object = None) -> torch.Tensor:
    """Decode over an engine's own pages, one query per request: writes the new keys and attends. No copy.

    Parameters
    ----------
    q : [R, Hq, D]
    k, v : [R, Hk, D]
    k_pages, v_pages : [N, page, Hk, D], any strides with the last one 1
    block_table : int32 [R, pages]
    seq_lens : int32 [R]
        Keys of each request with the new one; 0: padding.
    step : object
        Of the layers that share batch and tables in one step; None plans for each.

    Returns
    -------
    Tensor [R, Hq, Dv]
    """
    dense.check_inputs(rows=q, keys=k, values=v, sinks=sinks)
    if seq_lens.shape != q.shape[:1]:
        raise make(Status.INVALID_ARGUMENT, "seq_lens", f"{list(seq_lens.shape)}; one for each row of q, [{len(q)}], is needed")
    size = k_pages.shape[1]
    desc = dense.describe("decoder", q.shape[1], k.shape[1], q.shape[2], v.shape[2], q.dtype, scale, True, window,
                          soft_cap, sinks is not None, size)
    refuse_capture(q.device)
    out = q.new_empty(*q.shape[:2], v.shape[2])
    pages = tuple((t.data_ptr(), t.shape, t.stride(), t.dtype) for t in (k_pages, v_pages))
    bound = store.bound(desc, lambda: desc, index, q.device, () if sinks is None else (("sinks", sinks),), pages)
    if bound.cache != pages:
        bind_pages(bound, 0, k_pages, v_pages)
        bound.cache = pages
    stream = stream_of(q.device)
    if step is None or not bound.holds(Step(step)):
        bound.update(_decode_batch(q.device, block_table, seq_lens, size), Step(step), stream)
    bound.run_rows(stream, q, k, v, out)
    return out


def _decode_batch(device: torch.device, block_table: torch.Tensor, seq_lens: torch.Tensor, size: int) -> Batch:
    _check_integers("block_table", block_table, 2)
    lengths = _lengths("seq_lens", seq_lens)
    requests = len(lengths)
    last = np.maximum(lengths - 1, 0)
    table = block_table.to(torch.int32)
    if len(table) != requests or last.max(initial=0) >= table.shape[1] * size:
        raise make(Status.INVALID_ARGUMENT, "block_table", f"{list(table.shape)} in pages of {size}; a row for each of {requests} requests, "
                   f"of up to {lengths.max(initial=0)} keys, is needed")
    pages = table.cpu().numpy()[np.arange(requests), last // size].astype(np.int64)
    slots = np.where(lengths > 0, pages * size + last % size, -1)
    starts = np.arange(requests + 1, dtype=np.int32)
    host = lengths.astype(np.int32)
    return Batch(_on(device, starts), _on(device, host), table, _on(device, slots), query_start_loc_host=starts,
                 seq_lens_host=host, max_seq_len=int(lengths.max(initial=1)))
