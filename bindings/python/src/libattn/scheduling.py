# SPDX-License-Identifier: Apache-2.0
"""What a scheduler needs around a batch: the order of requests, and positions under context parallelism."""
from __future__ import annotations

from collections.abc import Sequence
from ctypes import addressof, byref, c_int32, c_int64

from ._declarations import attn_batch_order, attn_rank_keys
from ._library import Library, open_library


def _array(kind: type, values: Sequence[int]) -> object:
    return (kind * max(1, len(values)))(*values)


def batch_order(query_lens: Sequence[int], seq_lens: Sequence[int], prompt_lens: Sequence[int] | None = None, *,
                threshold: int = 1, short_extend: int | None = None, library: Library | None = None) -> list[int]:
    """The requests in the order decodes, short extends, long extends, prefills; stable.

    Parameters
    ----------
    query_lens, seq_lens : sequences of int
        The step's tokens and the keys of each request, the step's own included.
    prompt_lens : sequence of int, optional
        A request that has not read its whole prompt before this step is then no decode.
    threshold, short_extend : int
        Longest decode and longest short extend; `short_extend` None: the threshold, as vLLM has it.
    """
    api = library or open_library()
    count = len(query_lens)
    if any(lens is not None and len(lens) != count for lens in (seq_lens, prompt_lens)):
        raise ValueError(f"batch_order: {count} query_lens, {len(seq_lens)} seq_lens"
                         + (f", {len(prompt_lens)} prompt_lens" if prompt_lens is not None else ""))
    arrays = [None if lens is None else _array(c_int32, lens) for lens in (query_lens, seq_lens, prompt_lens)]
    order, moved = (c_int32 * max(1, count))(), c_int32()
    places = [None if a is None else addressof(a) for a in arrays]
    requests = attn_batch_order(query_lens=places[0], seq_lens=places[1], prompt_lens=places[2], num_reqs=count,
                                threshold=threshold, short_extend=threshold if short_extend is None else short_extend)
    api.check(api.batch_order(byref(requests), addressof(order), byref(moved), api.error_ref()))
    return list(order[:count])


def context_parallel_length(length: int, rank: int, world_size: int, interleave: int = 1,
                            library: Library | None = None) -> int:
    """How many of a request's keys lie on a rank."""
    api, local = library or open_library(), c_int32()
    keys = attn_rank_keys(rank=rank, world_size=world_size, interleave=interleave)
    api.check(api.context_parallel_length(byref(keys), length, byref(local), api.error_ref()))
    return local.value


def context_parallel_slots(positions: Sequence[int], block_row: Sequence[int], block_size: int, rank: int,
                           world_size: int, interleave: int = 1, library: Library | None = None) -> list[int]:
    """Slots of positions of one request; -1 where the token is another rank's."""
    api = library or open_library()
    span = block_size * world_size
    if span > 0 and max(positions, default=-1) // span >= len(block_row):
        raise ValueError(f"context_parallel_slots: position {max(positions)}; {len(block_row)} blocks on each of {world_size} "
                         f"ranks hold {len(block_row) * span}")
    at, row, slots = _array(c_int64, positions), _array(c_int32, block_row), (c_int64 * max(1, len(positions)))()
    keys = attn_rank_keys(rank=rank, world_size=world_size, interleave=interleave, block_size=block_size,
                          positions=addressof(at), num_positions=len(positions), block_row=addressof(row))
    api.check(api.context_parallel_slots(byref(keys), addressof(slots), api.error_ref()))
    return list(slots[:len(positions)])
