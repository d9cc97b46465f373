# SPDX-License-Identifier: Apache-2.0
"""A step: a batch, its plan, and a run per layer.

`Plan.update` and `Plan.run` release the interpreter's lock. Descriptors of tensors can be made once
(`libattn.Tensor`, `libattn.Rows`) and passed again every step.
"""
from __future__ import annotations

import array
import ctypes
import math
from collections.abc import Sequence
from ctypes import addressof, byref, c_void_p, sizeof
from typing import TYPE_CHECKING, Any

from ._declarations import (ATTN_RUN_NO_ATTEND, ATTN_RUN_NO_WRITE, BatchMode, PlanMode, Status, attn_batch,
                            attn_batch_split, attn_limits, attn_plan_options, attn_step_io, attn_workspace)
from .errors import make
from .handles import Handle, Owned
from .layers import code_of
from .tensors import Rows, Tensor, as_tensor, as_writable

if TYPE_CHECKING:
    from .model import Layer, Model

NO_WRITE, NO_ATTEND = ATTN_RUN_NO_WRITE, ATTN_RUN_NO_ATTEND
_TYPECODES = {"int32": "i", "int64": "q", "uint8": "B"}


def _integers(name: str, value: Any, dtype: str, kept: list[Any], count: int = 0) -> int:
    """Address of `count` contiguous integers or more: a tensor as it is, a sequence as a copy."""
    if hasattr(value, "__dlpack__") or isinstance(value, Tensor):
        t = as_tensor(value)
        if t.dtype != dtype or not t.is_contiguous():
            raise make(Status.INVALID_ARGUMENT, name, f"{t}; contiguous {dtype} is needed")
        kept.append(t)
        address, given = t.data, math.prod(t.shape)
    else:
        copy = array.array(_TYPECODES[dtype], value)
        kept.append(copy)
        address, given = copy.buffer_info()
    if given < count:
        raise make(Status.INVALID_ARGUMENT, name, f"{given} numbers; the batch needs {count}")
    return address


class Batch:
    """One step's batch, ``struct attn_batch``.

    Arrays are tensors (borrowed) or sequences of integers (copied: CPU backends only). On a CPU `*_host` defaults
    to the array itself; a device needs host copies of `query_start_loc` and, where the plan wants them, lengths.

    Parameters
    ----------
    query_start_loc : [R + 1] int32
        First row of each request in q and out.
    seq_lens : [R] int32, optional
        Keys of each request, the step's own included; needed with a cache.
    block_table : [rows, blocks] int32, optional
        Needed with a cache.
    slot_mapping : [rows of k and v] int64, optional
        ``block * block_size + offset``; negative skips the row.
    key_start_loc : [R + 1] int32, optional
        Contiguous keys that are longer than the queries.
    num_tokens : int, optional
        Rows of q with padding; by default ``query_start_loc[R]``.
    num_actual_tokens : int, optional
        Rows that are computed, the rest of out is left as it is; by default ``query_start_loc[R]``.
    causal_per_request : [R] uint8, optional
        For layers that were described with it.
    logits_indices : int32, optional
        Fast prefill: the rows that are computed.
    spans : per request a sequence of (first, last), or a pair of int32 tensors [spans, 2] and [R + 1], optional
        Prefix-LM spans, both ends included.
    causal : bool, optional
        None: as the layer says.
    max_query_len, max_seq_len : int
        Bounds; 0: found from the host copies.
    mode : str
        ``auto``, ``idle``, ``draft``, ``target_verify`` or ``profile``.
    extensions : sequence of ctypes structures
        ``attn_batch_recurrent`` and such, chained in order.
    """

    def __init__(self, query_start_loc: Any, seq_lens: Any | None = None, block_table: Any | None = None,
                 slot_mapping: Any | None = None, *, query_start_loc_host: Any | None = None,
                 seq_lens_host: Any | None = None, key_start_loc: Any | None = None,
                 key_start_loc_host: Any | None = None, encoder_seq_lens: Any | None = None,
                 encoder_seq_lens_host: Any | None = None, block_table_row: Any | None = None,
                 num_tokens: int | None = None, num_actual_tokens: int | None = None, causal: bool | None = None,
                 causal_per_request: Any | None = None, logits_indices: Any | None = None, spans: Any | None = None,
                 max_encoder_seq_len: int = 0, max_query_len: int = 0, max_seq_len: int = 0,
                 common_prefix_len: int = 0, mode: str = "auto", flags: int = 0, tree: Any | None = None,
                 extensions: Sequence[ctypes.Structure] = ()) -> None:
        self._kept: list[Any] = list(extensions)
        starts = query_start_loc if query_start_loc_host is None else query_start_loc_host
        host = starts.tolist() if hasattr(starts, "tolist") else list(starts)
        if not host:
            raise make(Status.INVALID_ARGUMENT, "query_start_loc", "no number; one more than requests is needed")
        rows, reqs = host[-1], len(host) - 1
        self.struct = attn_batch(struct_size=sizeof(attn_batch), mode=code_of("mode", mode, BatchMode), flags=flags,
                                 num_reqs=reqs, num_tokens=rows if num_tokens is None else num_tokens,
                                 num_actual_tokens=rows if num_actual_tokens is None else num_actual_tokens,
                                 max_query_len=max_query_len, max_seq_len=max_seq_len,
                                 max_encoder_seq_len=max_encoder_seq_len,
                                 causal=0 if causal is None else 1 if causal else 2,
                                 common_prefix_len=common_prefix_len)
        self._pair("query_start_loc", query_start_loc, host, reqs + 1)
        self._pair("seq_lens", seq_lens, seq_lens_host, reqs)
        self._pair("key_start_loc", key_start_loc, key_start_loc_host, reqs + 1)
        self._pair("encoder_seq_lens", encoder_seq_lens, encoder_seq_lens_host, reqs)
        if block_table is not None:
            self._table(block_table)
        if block_table_row is not None:
            self.struct.block_table_row = _integers("block_table_row", block_table_row, "int32", self._kept, reqs)
        if slot_mapping is not None:
            self.struct.slot_mapping = _integers("slot_mapping", slot_mapping, "int64", self._kept)
            self.struct.num_slots = len(slot_mapping)
        if causal_per_request is not None:
            self.struct.causal_per_request = _integers("causal_per_request", causal_per_request, "uint8", self._kept,
                                                       reqs)
        if logits_indices is not None:
            self.struct.logits_indices = _integers("logits_indices", logits_indices, "int32", self._kept)
            self.struct.num_logits_indices = len(logits_indices)
        if spans is not None:
            self._spans(spans)
        if tree is not None:
            self._tree(tree)
        for ext in reversed(extensions):
            ext.ext.next = self.struct.next
            self.struct.next = ctypes.addressof(ext)
        self.pointer = ctypes.addressof(self.struct)

    def _pair(self, name: str, value: Any | None, host: Any | None, count: int) -> None:
        """A device array and its host copy; on a CPU they are one."""
        if value is None:
            return
        setattr(self.struct, name, _integers(name, value, "int32", self._kept, count))
        last = self._kept[-1]
        if host is not None:
            setattr(self.struct, f"{name}_host", _integers(f"{name}_host", host, "int32", self._kept, count))
        elif not isinstance(last, Tensor) or last.device[0] == "cpu":
            setattr(self.struct, f"{name}_host", getattr(self.struct, name))

    def _table(self, table: Any) -> None:
        if hasattr(table, "__dlpack__") or isinstance(table, Tensor):
            t = as_tensor(table)
            if t.dtype != "int32" or len(t.shape) != 2 or (t.strides[1] != 1 and t.shape[1] > 1):
                raise make(Status.INVALID_ARGUMENT, "block_table", f"{t}; int32 [rows, blocks] with contiguous rows")
            self._kept.append(t)
            rows, stride, data = t.shape[0], t.strides[0], t.data
        else:
            lists = [list(row) for row in table]
            rows, stride = len(lists), max([len(row) for row in lists], default=0)
            flat = [entry for row in lists for entry in row + [0] * (stride - len(row))]
            data = _integers("block_table", flat, "int32", self._kept)
        self.struct.block_table, self.struct.block_table_stride, self.struct.block_table_rows = data, stride, rows

    def _spans(self, spans: Any) -> None:
        if len(spans) == 2 and all(hasattr(part, "__dlpack__") or isinstance(part, Tensor) for part in spans):
            flat, starts = spans
            self.struct.num_spans = len(flat)
        else:
            if len(spans) != self.struct.num_reqs:
                raise make(Status.INVALID_ARGUMENT, "spans", f"{len(spans)} lists; {self.struct.num_reqs} requests")
            flat = [end for request in spans for span in request for end in span]
            starts = [0]
            for request in spans:
                starts.append(starts[-1] + len(request))
            self.struct.num_spans = starts[-1]
        self.struct.spans = _integers("spans", flat, "int32", self._kept, 2 * self.struct.num_spans)
        self.struct.span_start_loc = _integers("span_start_loc", starts, "int32", self._kept, self.struct.num_reqs + 1)

    def _tree(self, tree: Any) -> None:
        t = as_tensor(tree)
        if len(t.shape) != 3 or t.itemsize != 4 or t.strides[2] != 1:
            raise make(Status.INVALID_ARGUMENT, "tree", f"{t}; [R or 1, rows, words or columns] of 4-byte elements")
        self._kept.append(t)
        self.struct.tree = t.data
        self.struct.tree_stride_request = 0 if t.shape[0] == 1 else t.strides[0]
        self.struct.tree_stride_row = t.strides[1]


def stream_handle(stream: Any | None) -> int | None:
    """The address of a stream: a number, or an object such as ``torch.cuda.Stream``."""
    if stream is None or isinstance(stream, int):
        return stream
    for name in ("cuda_stream", "sycl_queue", "ptr"):
        if hasattr(stream, name):
            return getattr(stream, name)
    raise make(Status.INVALID_ARGUMENT, "stream", f"{type(stream).__name__}; a number or a torch or CuPy stream")


class Plan(Owned):
    """One batch in flight of one block-table group. From one thread at a time.

    Parameters
    ----------
    model : Model
        Its layers have their caches bound.
    group : int
        The block-table group.
    max_num_reqs, max_num_tokens : int
        Limits of every batch.
    max_query_len, max_seq_len, max_blocks_per_req : int
        Further limits; 0: unknown.
    graph : bool
        Make the state for capture and replay now.
    """

    def __init__(self, model: Model, group: int = 0, *, max_num_reqs: int, max_num_tokens: int,
                 max_query_len: int = 0, max_seq_len: int = 0, max_blocks_per_req: int = 0,
                 graph: bool = False) -> None:
        self.model = model
        self.api = model.api
        created = c_void_p()
        limits = attn_limits(struct_size=sizeof(attn_limits), max_num_reqs=max_num_reqs,
                             max_num_tokens=max_num_tokens, max_query_len=max_query_len, max_seq_len=max_seq_len,
                             max_blocks_per_req=max_blocks_per_req)
        options = attn_plan_options(struct_size=sizeof(attn_plan_options), limits=addressof(limits),
                                    graph=int(graph))
        self.api.check(self.api.plan_create(model.handle, group, byref(options), byref(created),
                                            self.api.error_ref()))
        self.owner = Handle("plan", created.value, self.api.plan_destroy, model.owner)
        self._io = attn_step_io(struct_size=sizeof(attn_step_io))
        self._io_ref = byref(self._io)
        self._workspace: Any = None
        self._batch: Batch | None = None

    @property
    def workspace_bytes(self) -> int:
        """Device memory for the worst case of the limits, to be aligned to 256."""
        workspace = attn_workspace(struct_size=sizeof(attn_workspace))
        self.api.check(self.api.plan_workspace(self.handle, byref(workspace), self.api.error_ref()))
        return workspace.bytes

    @property
    def graph_level(self) -> int:
        """The least level of its layers, see ``GraphLevel``."""
        return self.api.plan_graph_level(self.handle)

    @property
    def graph_fill(self) -> int:
        """For padded lengths in a replay."""
        return self.api.plan_graph_fill(self.handle)

    def bind_workspace(self, memory: Any) -> None:
        """Hand the workspace in; borrowed for the plan's life."""
        t = as_writable("workspace", memory)
        workspace = attn_workspace(struct_size=sizeof(attn_workspace), memory=t.data, bytes=t.nbytes)
        self.api.check(self.api.plan_bind_workspace(self.handle, byref(workspace), self.api.error_ref()))
        self._workspace = t

    def update(self, batch: Batch, stream: Any | None = None, mode: str | None = None) -> None:
        """Plan a batch, once per step. `mode`: ``capture``, ``replay``, ``out_of_graph``, ``in_graph``."""
        api, handle = self.api, self.owner.value
        if mode is None:
            status = api.plan_batch(handle, batch.pointer, stream_handle(stream), api.error_ref())
        else:
            status = api.plan_graph(handle, code_of("mode", mode, PlanMode), batch.pointer, stream_handle(stream),
                                    api.error_ref())
        api.check(status)
        self._batch = batch

    def update_block_table(self, source: Plan, tables: Batch, stream: Any | None = None) -> None:
        """Plan another group of the same step: everything but the tables and slots is `source`'s."""
        self.api.check(self.api.plan_update_block_table(self.handle, source.handle, tables.pointer,
                                                        stream_handle(stream), self.api.error_ref()))
        self._batch = tables

    @property
    def split(self) -> tuple[int, int, int, int]:
        """Decodes, prefills, decode tokens, prefill tokens of the planned batch."""
        split = attn_batch_split()
        self.api.check(self.api.plan_split(self.handle, byref(split)))
        return split.num_decodes, split.num_prefills, split.num_decode_tokens, split.num_prefill_tokens

    def run(self, layer: Layer, q: Any | None, k: Any | None, v: Any | None, out: Any | None,
            lse: Any | None = None, stream: Any | None = None, flags: int = 0,
            extensions: Sequence[ctypes.Structure] = ()) -> None:
        """Write the step's keys and attend.

        Parameters
        ----------
        q, k, v, out : tensor
            ``[T, heads, head_size]``, any strides with the last one 1. `Tensor` and `Rows` are taken as they are.
        lse : tensor, optional
            float32 ``[Hq, T]``.
        flags : int
            `NO_WRITE`, `NO_ATTEND`.
        extensions : sequence of ctypes structures
            ``attn_io_recurrent``, ``attn_io_mla`` and such.
        """
        io = self._io
        kept = [None if t is None else t if isinstance(t, (Tensor, Rows)) else Tensor(t) for t in (q, k, v, out, lse)]
        for name, t in (("out", kept[3]), ("lse", kept[4])):
            if isinstance(t, Tensor) and t.read_only:
                as_writable(name, t)
        io.q, io.k, io.v, io.out, io.lse = [None if t is None else t.pointer for t in kept]
        io.stream, io.flags, io.next = stream_handle(stream), flags, None
        for ext in reversed(extensions):
            ext.ext.next = io.next
            io.next = ctypes.addressof(ext)
        api = self.api
        status = api.run(self.owner.value, layer._pointer, self._io_ref, api.error_ref())
        if status:
            raise api.error(status)

    def run_pointers(self, layer: int, q: int | None, k: int | None, v: int | None, out: int | None,
                     stream: int | None = None, flags: int = 0, extension: ctypes.Structure | None = None) -> None:
        """`run` for engines that keep their own descriptors: addresses of ``attn_layer`` and ``attn_tensor``."""
        io = self._io
        io.q, io.k, io.v, io.out, io.lse, io.stream, io.flags = q, k, v, out, None, stream, flags
        io.next = None if extension is None else ctypes.addressof(extension)
        api = self.api
        status = api.run(self.owner.value, layer, self._io_ref, api.error_ref())
        if status:
            raise api.error(status)
