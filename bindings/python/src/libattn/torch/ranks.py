# SPDX-License-Identifier: Apache-2.0
"""``struct attn_collectives`` (``attn/collectives.h``) for layers whose cache is spread over ranks: over an NCCL
communicator, or over a group of torch's for CPUs."""
from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from ctypes import byref, c_void_p
from typing import Any

import torch
import torch.distributed as dist

from .._declarations import Status
from .._library import Library, open_library
from ..collectives import Collectives
from ..errors import make


def nccl(communicator: int) -> int:
    """The address of a table over an ``ncclComm_t`` (RCCL: the same), for the rest of the process.

    All its ranks call this together. The collectives run on the stream of the step, without the interpreter, and can be captured.
    """
    table = c_void_p()
    create = open_library().companion("libattn_nccl.so.0", "collectives").attn_nccl_collectives_create
    create.restype, create.argtypes = ctypes.c_int32, [c_void_p, c_void_p, c_void_p]
    status = create(communicator, byref(table), Library.error_ref())
    if status:
        raise Library.error(status)
    assert table.value is not None
    return table.value


def _tensor(data: memoryview) -> torch.Tensor:
    return torch.frombuffer(data, dtype=torch.uint8)


class GroupTable(Collectives):
    """A table over a group of ``torch.distributed`` whose tensors lie in host memory, gloo's for one.

    Parameters
    ----------
    group : torch.distributed.ProcessGroup, optional
        Not kept: ``destroy_process_group`` ends it, and what runs over the table afterwards fails.
        None: a table that selection can ask about, whose collectives fail.
    rank, world_size : int
        In the group.
    """

    def __init__(self, group: Any, rank: int, world_size: int) -> None:
        kept: Callable[[], Any] = (lambda: None) if group is None else weakref.ref(group)

        def connected() -> Any:
            there = kept()
            if there is None:
                raise make(Status.ORDER, "collectives", "the ranks are not connected")
            return there

        def all_gather(send: memoryview, receive: memoryview) -> None:
            dist.all_gather(list(_tensor(receive).chunk(world_size)), _tensor(send), group=connected())

        def all_to_all(send: memoryview, receive: memoryview) -> None:
            dist.all_to_all_single(_tensor(receive), _tensor(send), group=connected())

        def reduce_scatter_f32(send: memoryview, receive: memoryview) -> None:
            """Summed in the order of ranks, so that a result does not depend on who came first."""
            parts = torch.empty(len(send), dtype=torch.uint8)
            dist.all_to_all_single(parts, _tensor(send), group=connected())
            torch.sum(parts.view(torch.float32).view(world_size, -1), 0, out=_tensor(receive).view(torch.float32))

        def all_reduce_max_f32(send: memoryview, receive: memoryview) -> None:
            received = _tensor(receive)
            received.copy_(_tensor(send))
            dist.all_reduce(received.view(torch.float32), dist.ReduceOp.MAX, group=connected())

        super().__init__(rank, world_size, all_gather, all_to_all, reduce_scatter_f32, all_reduce_max_f32)


__all__ = ["GroupTable", "nccl"]
