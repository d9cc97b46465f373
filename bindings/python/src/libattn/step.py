# SPDX-License-Identifier: Apache-2.0
"""A step: a batch, its plan, and a run per layer.

`Plan.update` and `Plan.run` release the interpreter's lock. Descriptors of tensors can be made once
(`libattn.Tensor`, `libattn.Rows`) and passed again every step.
"""
from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from ctypes import addressof, byref, c_void_p
from functools import partial
from typing import TYPE_CHECKING, Any

from ._declarations import (ATTN_RUN_NO_ATTEND, ATTN_RUN_NO_WRITE, BatchMode, KvSpecKind, PlanMode, Status, attn_batch,
                            attn_batch_split, attn_limits, attn_plan_options, attn_step_io, attn_workspace)
from .errors import make
from .handles import Owned
from .layers import code_of, mask_of
from .structs import Struct, chained, check_lengths
from .tensors import Rows, Tensor, as_tensor, as_writable

if TYPE_CHECKING:
    from .model import Layer, Model

NO_WRITE, NO_ATTEND = ATTN_RUN_NO_WRITE, ATTN_RUN_NO_ATTEND
#: Fields that a device's array and its host copy fill.
_PAIRS = ("query_start_loc", "seq_lens", "key_start_loc", "encoder_seq_lens", "page_start_loc", "last_page_len")


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
    flags : int or sequence of str
        ``no_cascade``, ``in_capture``, ``host_bounds``, ``fast_build`` (``ATTN_BATCH_*``).
    tree : [R or 1, rows, words or columns], optional
        uint32 or float32, as the layers' `tree_mask` says.
    page_indices, page_start_loc, last_page_len : int32 [pages], [R + 1], [R], optional
        Page lists in place of `block_table`, of layers with `needs_page_lists`; `last_page_len` in place of `seq_lens`.
    tables : sequence, optional
        `libattn.extensions.table` each: those of the caches that layers have beyond their kind's.
    extensions : sequence of structs
        `libattn.extensions.gdn_batch` and such.
    """

    def __init__(self, query_start_loc: Any, seq_lens: Any | None = None, block_table: Any | None = None,
                 slot_mapping: Any | None = None, *, query_start_loc_host: Any | None = None,
                 seq_lens_host: Any | None = None, key_start_loc: Any | None = None,
                 key_start_loc_host: Any | None = None, encoder_seq_lens: Any | None = None,
                 encoder_seq_lens_host: Any | None = None, block_table_row: Any | None = None,
                 num_tokens: int | None = None, num_actual_tokens: int | None = None, causal: bool | None = None,
                 causal_per_request: Any | None = None, logits_indices: Any | None = None, spans: Any | None = None,
                 max_encoder_seq_len: int = 0, max_query_len: int = 0, max_seq_len: int = 0,
                 common_prefix_len: int = 0, mode: str = "auto", flags: int | Sequence[str] = 0, tree: Any | None = None,
                 page_indices: Any | None = None, page_start_loc: Any | None = None,
                 page_start_loc_host: Any | None = None, last_page_len: Any | None = None,
                 last_page_len_host: Any | None = None, tables: Sequence[Struct] = (),
                 extensions: Sequence[Struct] = ()) -> None:
        starts = query_start_loc if query_start_loc_host is None else query_start_loc_host
        host = starts.tolist() if hasattr(starts, "tolist") else list(starts)
        if not host or not isinstance(host[0], int):
            raise make(Status.INVALID_ARGUMENT, "query_start_loc",
                       "no number; one more than requests is needed" if not host else f"{starts!r}; [R + 1] integers are needed")
        rows, reqs = host[-1], len(host) - 1
        self.struct = batch = attn_batch(
            mode=code_of("mode", mode, BatchMode), flags=mask_of("flags", flags, "ATTN_BATCH_"),
            num_reqs=reqs, num_tokens=rows if num_tokens is None else num_tokens,
            num_actual_tokens=rows if num_actual_tokens is None else num_actual_tokens, max_query_len=max_query_len,
            max_seq_len=max_seq_len, max_encoder_seq_len=max_encoder_seq_len,
            causal=0 if causal is None else 1 if causal else 2, common_prefix_len=common_prefix_len)
        if not hasattr(query_start_loc, "__dlpack__") and not isinstance(query_start_loc, Tensor):
            query_start_loc = host
        #: Entries in a row of the block table, where that is less than the distance between rows.
        self.narrow: int | None = None
        given = (query_start_loc, seq_lens, key_start_loc, encoder_seq_lens, page_start_loc, last_page_len)
        hosts = (query_start_loc_host, seq_lens_host, key_start_loc_host, encoder_seq_lens_host, page_start_loc_host,
                 last_page_len_host)
        for name, value, copy in zip(_PAIRS, given, hosts):
            self._pair(name, value, copy)
        if block_table is not None:
            self._table(block_table)
        for name, value in (("block_table_row", block_table_row), ("slot_mapping", slot_mapping),
                            ("causal_per_request", causal_per_request), ("logits_indices", logits_indices),
                            ("page_indices", page_indices)):
            if value is not None:
                setattr(batch, name, value)
        batch.num_slots, batch.num_pages = (batch.kept.get(name, (None, 0))[1] for name in ("slot_mapping", "page_indices"))
        if spans is not None:
            self._spans(spans)
        if tree is not None:
            self._tree(tree)
        if tables:
            batch.tables = list(tables)
        dims = {"R": reqs, "T": batch.num_tokens}
        for struct in (batch, *tables):
            check_lengths(struct, "the batch", **dims)
        self._kept = chained(batch, extensions, "the batch", **dims)
        self.pointer = addressof(batch)
        self._counts = (ctypes.c_int32 * 5).from_buffer(batch, attn_batch.num_reqs.offset)  # to max_seq_len

    def count(self, num_actual_tokens: int, max_seq_len: int, starts: tuple[int, Any] | None = None) -> None:
        """Use the batch again for other lengths in the same arrays. `starts`: the address of as many int32 and their owner, if
        ``query_start_loc_host`` is another array now."""
        self._counts[2], self._counts[4] = num_actual_tokens, max_seq_len
        if starts is not None:
            self.struct.query_start_loc_host = starts[0]
            self.struct.kept["query_start_loc_host"] = starts[1], 0

    def _pair(self, name: str, value: Any | None, host: Any | None) -> None:
        """A device array and its host copy; on a CPU they are one."""
        if host is not None:
            setattr(self.struct, f"{name}_host", host)
        if value is not None:
            setattr(self.struct, name, value)
            owner = self.struct.kept[name][0]
            if host is None and (not isinstance(owner, Tensor) or owner.device[0] == "cpu"):
                setattr(self.struct, f"{name}_host", getattr(self.struct, name))

    def _table(self, table: Any) -> None:
        batch = self.struct
        if hasattr(table, "__dlpack__") or isinstance(table, Tensor):
            t = as_tensor(table)
            if t.dtype != "int32" or len(t.shape) != 2 or (t.strides[1] != 1 and t.shape[1] > 1):
                raise make(Status.INVALID_ARGUMENT, "block_table", f"{t}; int32 [rows, blocks] with contiguous rows")
            rows, width, stride = *t.shape, t.strides[0] if t.shape[0] > 1 else t.shape[1]
            batch.block_table, batch.kept["block_table"] = t.data, (t, 0)
            self.narrow = width if width < stride else None
        else:
            lists = [list(row) for row in table]
            rows, stride = len(lists), max([len(row) for row in lists], default=0)
            batch.block_table = [entry for row in lists for entry in row + [0] * (stride - len(row))]
        batch.block_table_stride, batch.block_table_rows = stride, rows

    def longest(self, cross: bool) -> int:
        """Keys of the longest request, as far as the host knows."""
        address = self.struct.encoder_seq_lens_host if cross else self.struct.seq_lens_host
        return max((ctypes.c_int32 * self.struct.num_reqs).from_address(address), default=0) if address else 0

    def _spans(self, spans: Any) -> None:
        batch = self.struct
        if len(spans) == 2 and all(hasattr(part, "__dlpack__") or isinstance(part, Tensor) for part in spans):
            batch.spans, batch.span_start_loc = spans
            count = as_tensor(spans[0]).shape[0] if as_tensor(spans[0]).shape else 0
        else:
            if len(spans) != batch.num_reqs:
                raise make(Status.INVALID_ARGUMENT, "spans", f"{len(spans)} lists; {batch.num_reqs} requests")
            starts = [0]
            for request in spans:
                starts.append(starts[-1] + len(request))
            batch.spans = [end for request in spans for span in request for end in span]
            batch.span_start_loc, count = starts, starts[-1]
        batch.num_spans = count

    def _tree(self, tree: Any) -> None:
        t = as_tensor(tree)
        if len(t.shape) != 3 or t.itemsize != 4 or t.strides[2] != 1:
            raise make(Status.INVALID_ARGUMENT, "tree", f"{t}; [R or 1, rows, words or columns] of 4-byte elements")
        self.struct.tree, self.struct.kept["tree"] = t.data, (t, 0)
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
        limits = attn_limits(max_num_reqs=max_num_reqs, max_num_tokens=max_num_tokens, max_query_len=max_query_len,
                             max_seq_len=max_seq_len, max_blocks_per_req=max_blocks_per_req)
        options = attn_plan_options(limits=limits, graph=bool(graph))
        self.owner = model.make("plan", "plan_create", "plan_destroy", group, byref(options))
        self.group = group
        self._io = attn_step_io()
        self._io_ref = byref(self._io)
        self._tensors = (c_void_p * 5).from_buffer(self._io, attn_step_io.q.offset)  # q, k, v, out, lse
        self._workspace: Any = None
        self._stream: Any = None
        self._batch: Batch | None = None
        self._tables: Batch | None = None

    @property
    def workspace_bytes(self) -> int:
        """Device memory for the worst case of the limits, to be aligned to 256, the scratch included."""
        return self._parts().bytes

    @property
    def scratch_bytes(self) -> int:
        """The bytes of the workspace that all plans of a stream may share."""
        return self._parts().scratch_bytes

    def _parts(self) -> attn_workspace:
        workspace = attn_workspace()
        self.call("plan_workspace", byref(workspace))
        return workspace

    @property
    def graph_level(self) -> int:
        """The least level of its layers, see ``GraphLevel``."""
        return self.ask("plan_graph_level")

    @property
    def graph_fill(self) -> int:
        """For padded lengths in a replay."""
        return self.ask("plan_graph_fill")

    def bind_workspace(self, memory: Any, scratch: Any | None = None) -> None:
        """Hand the workspace in; borrowed for the plan's life. With `scratch`, which plans of one stream may share,
        `memory` has ``workspace_bytes - scratch_bytes``."""
        parts = [as_writable(name, given) for name, given in (("workspace", memory), ("scratch", scratch)) if given is not None]
        for t in parts:
            if not t.is_contiguous():
                raise make(Status.INVALID_ARGUMENT, "workspace", f"{t} with strides {t.strides}; contiguous memory is needed")
        apart = parts[1] if len(parts) > 1 else None
        workspace = attn_workspace(memory=parts[0].data, bytes=sum(t.nbytes for t in parts), device=parts[0].device_struct,
                                   scratch=apart.data if apart is not None else None,
                                   scratch_bytes=apart.nbytes if apart is not None else 0)
        self.call("plan_bind_workspace", byref(workspace))
        self._workspace = parts

    def _check_width(self, batch: Batch, lengths: Batch) -> None:
        """Refuses a table that is too narrow. The library cannot see this if rows lie further apart than they are wide."""
        spec = next((self.model.layers[i].kv_spec for i in self.model.groups[self.group]), None)
        if spec is not None and spec.block_size > 0 and batch.narrow is not None:
            longest = max(lengths.longest(spec.kind == KvSpecKind.CROSS), 0)
            if -(-longest // spec.block_size) > batch.narrow:
                raise make(Status.INVALID_ARGUMENT, "block_table", f"rows of {batch.narrow} entries; a request has {longest} "
                           f"keys, in blocks of {spec.block_size}")

    def update(self, batch: Batch, stream: Any | None = None, mode: str | int | None = None) -> None:
        """Plan a batch, once per step. `mode`: ``capture``, ``replay``, ``out_of_graph``, ``in_graph``."""
        if batch.narrow is not None:
            self._check_width(batch, batch)
        api = self.api
        with self.owner as handle:
            if mode is None:
                status = api.plan_batch(handle, batch.pointer, stream_handle(stream), api.error_ref())
            else:
                status = api.plan_graph(handle, code_of("mode", mode, PlanMode), batch.pointer, stream_handle(stream),
                                        api.error_ref())
        api.check(status)
        self._batch, self._tables = batch, None

    def update_block_table(self, source: Plan, tables: Batch, stream: Any | None = None) -> None:
        """Plan another group of the same step: everything but the tables and slots is `source`'s."""
        if tables.narrow is not None and source._batch is not None:
            self._check_width(tables, source._batch)
        with source.owner as other:
            self.call("plan_update_block_table", other, tables.pointer, stream_handle(stream))
        self._batch, self._tables = source._batch, tables

    @property
    def split(self) -> tuple[int, int, int, int]:
        """Decodes, prefills, decode tokens, prefill tokens of the planned batch."""
        split = attn_batch_split()
        self.call("plan_split", byref(split))
        return split.num_decodes, split.num_prefills, split.num_decode_tokens, split.num_prefill_tokens

    def run(self, layer: Layer, q: Any | None, k: Any | None, v: Any | None, out: Any | None,
            lse: Any | None = None, stream: Any | None = None, flags: int = 0,
            extensions: Sequence[Struct] = ()) -> None:
        """Write the step's keys and attend.

        Parameters
        ----------
        q, k, v, out : tensor
            ``[T, heads, head_size]``, any strides with the last one 1. `Tensor` and `Rows` are taken as they are.
        lse : tensor, optional
            float32 ``[Hq, T]``.
        flags : int
            `NO_WRITE`, `NO_ATTEND`.
        extensions : sequence of structs
            `libattn.extensions.gdn_io`, `mla_io` and such.
        """
        if layer.model is not self.model:
            raise make(Status.INVALID_ARGUMENT, "layer", f"layer '{layer.name}' is of another model than the plan")
        kept = [None if t is None else t if isinstance(t, (Tensor, Rows)) else Tensor(t) for t in (q, k, v, out, lse)]
        for name, t in (("out", kept[3]), ("lse", kept[4])):
            if isinstance(t, Tensor) and t.read_only:
                as_writable(name, t)
        chain: list[Any] = []
        if extensions:
            head = attn_step_io()
            chain = chained(head, extensions, "the batch", T=self._batch.struct.num_tokens if self._batch else 0,
                            lists=max(1, layer.desc.indexer.num_groups) if layer.desc.indexer else 1)
            chain.append(head)
        self._run(layer._pointer, [None if t is None else t.pointer for t in kept], stream, flags,
                  chain[-1].next if chain else None)

    def run_pointers(self, layer: int, q: int | None, k: int | None, v: int | None, out: int | None,
                     stream: int | None = None, flags: int = 0, extension: ctypes.Structure | None = None) -> None:
        """`run` for engines that keep their own descriptors: addresses of ``attn_layer`` and ``attn_tensor``."""
        self._run(layer, [q, k, v, out, None], stream, flags, None if extension is None else addressof(extension))

    def prepare(self, layer: int, tensors: Sequence[int | None], stream: Any = None) -> Callable[[Any], int]:
        """A run with these descriptors (q, k, v, out), to be called again and again: takes ``api.error_ref()``, gives the status.
        The caller keeps the plan open and calls `update` before each new batch."""
        io = attn_step_io.from_buffer_copy(self._io)
        (c_void_p * 5).from_buffer(io, attn_step_io.q.offset)[:] = (*tensors, None)
        io.stream, io.flags, io.next = stream_handle(stream), 0, None
        return partial(self.api.run, self.owner.value, layer, byref(io))

    def _run(self, layer: int, tensors: list[int | None], stream: Any, flags: int, chain: int | None) -> None:
        io, api = self._io, self.api
        self._tensors[:] = tensors
        if stream != self._stream:
            io.stream, self._stream = stream_handle(stream), stream
        if flags != io.flags:
            io.flags = flags
        if chain != io.next:
            io.next = chain
        with self.owner as handle:
            status = api.run(handle, layer, self._io_ref, api.error_ref())
        if status:
            raise api.error(status)
