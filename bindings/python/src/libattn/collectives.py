# SPDX-License-Identifier: Apache-2.0
"""``struct attn_collectives`` (``attn/collectives.h``) over functions of the caller's: layers spread over ranks that any
transport connects (MPI, sockets, shared memory). `libattn.torch.ranks` has tables over torch's groups and NCCL."""
from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import sizeof

from ._declarations import Status, attn_collective_args, attn_collectives, attn_error
from .errors import AttnError

Exchange = Callable[[memoryview, memoryview], None]

# Whether what is sent, and what is received, has a part for each rank; bytes of what `count` counts.
_FORMS = {"all_gather": (False, True, 1), "all_to_all": (True, True, 1), "reduce_scatter_f32": (True, False, 4),
          "all_reduce_max_f32": (False, False, 4)}


def _bytes(address: int, count: int) -> memoryview:
    return memoryview((ctypes.c_uint8 * count).from_address(address)).cast("B")


class Collectives:
    """A table whose collectives are Python functions, of ranks whose caches lie in host memory.

    A step waits inside ``run`` until its ranks have exchanged their parts; the interpreter's lock is taken for each call.

    Parameters
    ----------
    rank, world_size : int
        This rank's number and how many there are.
    all_gather, all_to_all, reduce_scatter_f32, all_reduce_max_f32 : callable
        ``f(send, receive)`` with bytes: parts of all ranks stand in their order. `reduce_scatter_f32` sums float32, in the
        order of ranks, and each keeps its part; `all_reduce_max_f32` keeps the greatest. What it raises fails the run.
    """

    def __init__(self, rank: int, world_size: int, all_gather: Exchange, all_to_all: Exchange, reduce_scatter_f32: Exchange,
                 all_reduce_max_f32: Exchange) -> None:
        kinds = dict(attn_collectives._fields_)
        given = {"all_gather": all_gather, "all_to_all": all_to_all, "reduce_scatter_f32": reduce_scatter_f32,
                 "all_reduce_max_f32": all_reduce_max_f32}
        self._kept = {name: kinds[name](_guarded(f, world_size, *_FORMS[name])) for name, f in given.items()}
        self._struct = attn_collectives(struct_size=sizeof(attn_collectives), rank=rank, world_size=world_size, **self._kept)

    @property
    def address(self) -> int:
        """``struct attn_collectives *`` for `ContextParallel`, as long as this object; it outlives the model."""
        return ctypes.addressof(self._struct)


def _guarded(exchange: Exchange, ranks: int, sends_all: bool, receives_all: bool, unit: int) -> Callable[[int, int], int]:
    def call(args: int, error: int) -> int:
        try:
            a = attn_collective_args.from_address(args)
            if a.count > 0:
                exchange(_bytes(a.send, a.count * unit * (ranks if sends_all else 1)),
                         _bytes(a.receive, a.count * unit * (ranks if receives_all else 1)))
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


__all__ = ["Collectives"]
