# SPDX-License-Identifier: Apache-2.0
"""From masks to requests.

Engines that work on padded batches say who sees whom with a mask ``[B, 1, S, L]``. Kernels take requests: rows of
queries, a run of keys, causal or not, a window. A mask whose rows each see one run of keys *is* a set of requests,
and this module finds it: padding on either side, caches that are longer than what is filled, packed documents,
chunks, prefixes and images that see themselves in both directions are all of that kind. Nothing is assumed: what
comes out is checked against the mask row by row, and a mask that is not of that kind is refused.
"""
from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from .._declarations import Status
from ..errors import make

#: (left, right) next to the query's own position; -1 is open.
Window = tuple[int, int] | None


@dataclass(frozen=True, eq=False)
class Segments:
    """Requests of one padded batch.

    Attributes
    ----------
    requests : int64 [R, 5]
        Batch index, first and end query row, first and end key, in the order of batch and row.
    causal : bool
        Of all requests: the last query of each sees all its keys, the one before one less, …
    window : (int, int) or None
        What the layer has to be described with.
    complete : bool
        Every query row belongs to a request; the others are padding and their output is zero.
    """

    requests: np.ndarray
    causal: bool
    window: Window
    complete: bool

    @property
    def sees_all(self) -> bool:
        """Whether the window leaves out no key of a request of one query."""
        if self.window is None or self.window[0] < 0:
            return True
        return int((self.requests[:, 4] - self.requests[:, 3]).max(initial=0)) <= self.window[0] + 1

    @cached_property
    def of_each(self) -> Segments | None:
        """Those of one entry, where there are several and each is one request of the same rows and keys."""
        several = len(self.requests) > 1 and self.complete
        alike = several and np.array_equal(self.requests[:, 0], np.arange(len(self.requests))) \
            and bool((self.requests[:, 1:] == self.requests[0, 1:]).all())
        return Segments(self.requests[:1], self.causal, self.window, self.complete) if alike else None


def whole(batch: int, queries: int, keys: int, causal: bool, window: Window) -> Segments:
    """Every row of the batch sees all of `keys`, causal or not; without queries or keys there is no request."""
    b = np.arange(batch if queries > 0 and keys > 0 else 0, dtype=np.int64)
    zero = np.zeros_like(b)
    return Segments(np.stack([b, zero, zero + queries, zero, zero + keys], axis=1), causal, window, keys > 0)


def _counted(visible: torch.Tensor, length: int) -> torch.Tensor:
    """[3, B, S]: visible keys, first and end of each row, by operators of torch."""
    bits, count = visible.view(torch.uint8), visible.sum(-1)  # argmax is the first of equal ones
    return torch.stack([count, bits.argmax(-1), length - bits.flip(-1).argmax(-1)]) * (count > 0)


def intervals(visible: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """First and end visible key of each row of a mask [B, S, L]; (0, 0) where a row sees nothing. They are found where the mask
    lies: three numbers a row (its visible keys, first and end) come to the host, not the row.

    Raises
    ------
    UnsupportedError
        A row's visible keys are not one run.
    """
    batch, length = visible.shape[0], visible.shape[-1]
    if batch > 1 and visible.stride(0) == 0:  # one for all entries
        visible = visible[:1]
    if visible.device.type == "cpu":  # NumPy's argmax ends at the first True
        seen = visible.numpy()
        count = seen.sum(-1)
        found = np.stack([count, seen.argmax(-1), length - seen[..., ::-1].argmax(-1)]) * (count > 0)
    else:
        found = _counted(visible, length).cpu().numpy()
    count, first, end = np.broadcast_to(found, (3, batch, visible.shape[1]))
    if not np.array_equal(end - first, count):
        b, row = (int(i) for i in np.argwhere(end - first != count)[0])
        raise make(Status.UNSUPPORTED, "attention_mask",
                   f"row {row} of batch entry {b} sees {int(count[b, row])} keys that are not one run "
                   f"({int(first[b, row])} to {int(end[b, row]) - 1} with gaps); supported: one run of keys per query")
    return first, end


def _runs(first: np.ndarray, end: np.ndarray, causal: bool, left: int) -> np.ndarray:
    """Starts of the maximal runs of rows that are one request.

    Causal: the end moves on by one per row, and the first key stays or, at the window's edge, follows. Not causal:
    both stay.
    """
    step_first, step_end = np.diff(first), np.diff(end)
    if causal:
        inside = (step_first == 0) & ((end[1:] - first[1:] <= left + 1) if left >= 0 else True)
        edge = (step_first == 1) & (end[1:] - first[1:] == left + 1) if left >= 0 else np.zeros_like(inside)
        joined = (step_end == 1) & (inside | edge)
    else:
        joined = (step_end == 0) & (step_first == 0)
    return np.concatenate([[0], 1 + np.flatnonzero(~joined), [len(first)]])


def _band(rows: np.ndarray, first: np.ndarray, end: np.ndarray, window: tuple[int, int]) -> int:
    """How many leading rows are one request in which row i sees keys i - left to i + right."""
    count = int(end.max() - first[0])
    place = np.arange(min(count, len(rows)))
    begin, stop = first[0], first[0] + count
    low = np.maximum(begin, begin + place - window[0]) if window[0] >= 0 else np.full_like(place, begin)
    high = np.minimum(stop, begin + place + window[1] + 1) if window[1] >= 0 else np.full_like(place, stop)
    fits = len(place) == count and np.array_equal(low, first[:count]) and np.array_equal(high, end[:count])
    return count if fits else 0


def _entry(b: int, first: np.ndarray, end: np.ndarray, causal: bool, window: Window,
           out: list[tuple[int, ...]]) -> bool:
    """Requests of one batch entry; False if the window would hide a key that a single row has to see."""
    rows = np.flatnonzero(end > first)
    if len(rows) == 0:
        return True
    left = window[0] if window is not None else -1
    begin = 0
    if not causal and window is not None and np.array_equal(rows, np.arange(rows[0], rows[0] + len(rows))):
        taken = _band(rows, first[rows], end[rows], window)
        if taken:
            out.append((b, int(rows[0]), int(rows[0]) + taken, int(first[rows[0]]), int(end[rows].max())))
            begin = taken
    rows = rows[begin:]
    if len(rows) == 0:
        return True
    for group in np.split(rows, 1 + np.flatnonzero(np.diff(rows) != 1)):
        low, high = first[group], end[group]
        if not causal and window is not None:  # a symmetric window counts from each row's own place: one by one
            starts = np.arange(len(group) + 1)
        else:
            starts = _runs(low, high, causal, left)
        for s, e in zip(starts[:-1], starts[1:]):
            if left >= 0 and high[s] - low[s] > left + 1:
                return False
            out.append((b, int(group[s]), int(group[e - 1]) + 1, int(low[s]), int(high[e - 1])))
    return True


def _candidates(first: np.ndarray, end: np.ndarray, causal: bool, window: Window) -> list[Window]:
    """Windows to try: the layer's own, none, the one that the mask shows."""
    result: list[Window] = [None] if window is None else [window, None]
    seen = end > first
    if causal and bool((np.diff(first, axis=-1) > 0).any()):
        result.append((int((end - first).max()) - 1, 0))
    elif not causal and bool(seen.any()):
        place = np.arange(first.shape[-1])
        result.append((int((place - first)[seen].max()), int((end - 1 - place)[seen].max())))
    return [w for w in result if w is None or min(w) >= 0]


def of_mask(visible: torch.Tensor, causal: bool, window: Window, own_keys: bool) -> Segments:
    """Requests of a mask.

    Parameters
    ----------
    visible : bool [B, S, L]
        True where query row i sees key j.
    causal : bool
        What the layer is; the mask decides whether its rows are.
    window : (int, int), optional
        The layer's own.
    own_keys : bool
        Query row i and key i are the same position where S = L, so that a position that no query sees is padding and
        needs no output. False for cross attention.
    """
    first, end = intervals(visible)
    batch, queries, keys = visible.shape
    if own_keys and queries == keys:
        padding = ~(visible.numpy().any(1) if visible.device.type == "cpu" else visible.any(1).cpu().numpy())
        first, end = np.where(padding, 0, first), np.where(padding, 0, end)
    if queries == 1:
        rows = np.flatnonzero(end[:, 0] > first[:, 0])
        lengths = (end - first)[rows, 0]
        kept = window if window is None or window[0] < 0 or not len(rows) or lengths.max() <= window[0] + 1 else None
        ones = np.ones_like(rows)
        requests = np.stack([rows, 0 * ones, ones, first[rows, 0], end[rows, 0]], axis=1).astype(np.int64)
        return Segments(requests, causal, kept, len(rows) == batch)
    best: tuple[list[tuple[int, ...]], bool, Window] | None = None
    for is_causal in (causal, not causal):
        for candidate in _candidates(first, end, is_causal, window if is_causal == causal else None):
            out: list[tuple[int, ...]] = []
            fits = all(_entry(b, first[b], end[b], is_causal, candidate, out) for b in range(batch))
            if fits and (best is None or len(out) < len(best[0])):
                best = (out, is_causal, candidate)
                if len(out) <= batch:
                    break
        if best is not None and len(best[0]) <= batch:
            break
    if best is None:
        raise make(Status.INTERNAL, "attention_mask", "without a window every row is a request of its own")
    requests = np.array(sorted(best[0]), dtype=np.int64).reshape(-1, 5)
    covered = int((requests[:, 2] - requests[:, 1]).sum()) == batch * queries
    return Segments(requests, best[1], best[2], covered)
