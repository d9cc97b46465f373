# SPDX-License-Identifier: Apache-2.0
"""vLLM's decode context parallelism: a cache group whose tokens are spread over the ranks of its DCP group. libattn's core
exchanges queries and partial results itself, over the group's communicator; vLLM's own exchanges are not called."""
from __future__ import annotations

from functools import cache
from typing import Any

import torch

from ..._declarations import Status
from ...errors import make
from ...layers import ContextParallel
from ...torch.ranks import GroupTable, nccl


@cache
def _asked(world_size: int) -> GroupTable:
    return GroupTable(None, 0, world_size)


def likely(vllm_config: Any) -> ContextParallel:
    """For questions, which come before the groups are there."""
    parallel = getattr(vllm_config, "parallel_config", None)
    size = getattr(parallel, "decode_context_parallel_size", 1)
    return ContextParallel(decode=_asked(max(size, 2)).address, all_to_all=True,
                           interleave=getattr(parallel, "cp_kv_cache_interleave_size", 1))


@cache
def _over(group: Any) -> tuple[int, Any]:
    """The address of a table over vLLM's group, and what it is in."""
    if torch.cuda.is_available():
        communicator = getattr(group.device_communicator, "pynccl_comm", None)
        if communicator is None or communicator.disabled:
            raise make(Status.UNSUPPORTED, "decode_context_parallel_size", "the DCP group has no NCCL communicator")
        address = communicator.comm
        return nccl(getattr(address, "value", address)), communicator
    table = GroupTable(group.cpu_group, group.rank_in_group, group.world_size)
    return table.address, table


class Spread:
    """How a cache group lies over ranks."""

    def __init__(self, group: Any, interleave: int) -> None:
        self.rank, self.world_size, self.interleave = group.rank_in_group, group.world_size, interleave
        self.described = ContextParallel(decode=_over(group)[0], interleave=interleave, all_to_all=True)
        self._lengths: dict[int, torch.Tensor] = {}

    def local_lengths(self, context: torch.Tensor) -> torch.Tensor:
        """Keys of each request's context that lie here, on the device; at the same address for as many requests, since
        captured graphs read them there."""
        window = self.world_size * self.interleave
        found = context.div(window, rounding_mode="floor") * self.interleave + (
            context % window - self.rank * self.interleave).clamp(0, self.interleave)
        kept = self._lengths.setdefault(len(context), torch.empty_like(found, dtype=torch.int32))
        return kept.copy_(found)


def spread(vllm_config: Any, kv_cache_spec: Any) -> Spread | None:
    """How a cache group is spread. None: every rank has all of it, as it has recurrent states, whose specs have `shapes`."""
    parallel = getattr(vllm_config, "parallel_config", None)
    if getattr(parallel, "decode_context_parallel_size", 1) < 2 or hasattr(kv_cache_spec, "shapes") or not getattr(
            kv_cache_spec, "dcp_sharded", True):
        return None
    from vllm.distributed.parallel_state import get_dcp_group

    return Spread(get_dcp_group(), getattr(parallel, "cp_kv_cache_interleave_size", 1))


__all__ = ["Spread", "likely", "spread"]
