# SPDX-License-Identifier: Apache-2.0
"""``struct attn_collectives`` (``attn/collectives.h``) for layers whose cache is spread over ranks: over an NCCL
communicator, or over a group of torch's for CPUs."""
from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from ctypes import byref, c_void_p, sizeof
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .._declarations import Status, attn_collective_args, attn_collectives, attn_error
from .._library import Library, find
from ..errors import AttnError, make

_SLOTS = ("all_gather", "all_to_all", "reduce_scatter_f32", "all_reduce_max_f32")


def nccl(communicator: int) -> int:
    """The address of a table over an ``ncclComm_t`` (RCCL: the same), for the rest of the process.

    All its ranks call this together. The collectives run on the stream of the step, without the interpreter, and can be captured.
    """
    name = "libattn_nccl.so.0"
    folder = Path(find()).parent
    near = [path for path in (folder / name, folder.parent / "collectives" / name) if path.is_file()]
    try:
        library = ctypes.CDLL(str(near[0]) if near else name)
    except OSError as error:
        raise make(Status.NOT_FOUND, name, str(error)) from None
    table = c_void_p()
    create = library.attn_nccl_collectives_create
    create.restype, create.argtypes = ctypes.c_int32, [c_void_p, c_void_p, c_void_p]
    status = create(communicator, byref(table), Library.error_ref())
    if status:
        raise Library.error(status)
    assert table.value is not None
    return table.value


def _bytes(address: int, count: int) -> torch.Tensor:
    return torch.frombuffer((ctypes.c_uint8 * count).from_address(address), dtype=torch.uint8)


class GroupTable:
    """A table over a group of ``torch.distributed`` whose tensors lie in host memory, gloo's for one.

    The one place where libattn calls Python: its step waits inside ``run`` until the ranks have exchanged their parts.

    Parameters
    ----------
    group : torch.distributed.ProcessGroup, optional
        Not kept: ``destroy_process_group`` ends it, and what runs over the table afterwards fails.
        None: a table that selection can ask about, whose collectives fail.
    rank, world_size : int
        In the group.
    """

    def __init__(self, group: Any, rank: int, world_size: int) -> None:
        self._group: Callable[[], Any] = (lambda: None) if group is None else weakref.ref(group)
        self._world_size = world_size
        kinds = dict(attn_collectives._fields_)
        slots = {name: kinds[name](self._guarded(getattr(self, f"_{name}"))) for name in _SLOTS}
        self._struct = attn_collectives(struct_size=sizeof(attn_collectives), rank=rank, world_size=world_size, **slots)
        self._kept = slots

    @property
    def address(self) -> int:
        """``struct attn_collectives *``, as long as this object."""
        return ctypes.addressof(self._struct)

    def _guarded(self, collective: Callable[[attn_collective_args, Any], None]) -> Callable[[int, int], int]:
        def call(args: int, error: int) -> int:
            try:
                group = self._group()
                if group is None:
                    raise make(Status.ORDER, "collectives", "the ranks are not connected")
                given = attn_collective_args.from_address(args)
                if given.count > 0:
                    collective(given, group)
                return 0
            except BaseException as failure:  # nothing may pass through the library's frames
                status = failure.status if isinstance(failure, AttnError) else Status.DEVICE
                if error:
                    struct = attn_error.from_address(error)
                    struct.status = status
                    struct.field = b"collectives"
                    text = f"{type(failure).__name__}: {failure}".encode(errors="replace")
                    struct.message = text[:attn_error.message.size - 1]
                return int(status)

        return call

    def _all_gather(self, a: attn_collective_args, group: Any) -> None:
        received = _bytes(a.receive, self._world_size * a.count).chunk(self._world_size)
        dist.all_gather(list(received), _bytes(a.send, a.count), group=group)

    def _all_to_all(self, a: attn_collective_args, group: Any) -> None:
        size = self._world_size * a.count
        dist.all_to_all_single(_bytes(a.receive, size), _bytes(a.send, size), group=group)

    def _reduce_scatter_f32(self, a: attn_collective_args, group: Any) -> None:
        """Summed in the order of ranks, so that a result does not depend on who came first."""
        size = 4 * self._world_size * a.count
        parts = torch.empty(size, dtype=torch.uint8)
        dist.all_to_all_single(parts, _bytes(a.send, size), group=group)
        torch.sum(parts.view(torch.float32).view(self._world_size, -1), 0,
                  out=_bytes(a.receive, 4 * a.count).view(torch.float32))

    def _all_reduce_max_f32(self, a: attn_collective_args, group: Any) -> None:
        received = _bytes(a.receive, 4 * a.count)
        received.copy_(_bytes(a.send, 4 * a.count))
        dist.all_reduce(received.view(torch.float32), dist.ReduceOp.MAX, group=group)


__all__ = ["GroupTable", "nccl"]
