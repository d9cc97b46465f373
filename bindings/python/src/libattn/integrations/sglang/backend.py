# SPDX-License-Identifier: Apache-2.0
"""SGLang's attention backend: extend, decode, mixed and idle batches over its token pool, and captured decodes.

Written against the published interface of SGLang 0.5.23; captures also by that of releases before 0.5.16. Speculative verification, encoder lengths, hybrid
sliding-window pools, MLA and captured prefills are refused with a reason; linear attention (GDN) stays SGLang's own,
which puts its own backend next to this one.
"""
from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

from ..._declarations import Status
from ...errors import make
from ...step import NO_WRITE, Batch
from ...torch.steps import Shape, Steps
from ...torch.store import stream_of
from .layers import PoolLayer, refuse


@dataclass(eq=False)
class Step:
    """One step's batch; layers that run with the same object share its plan."""

    batch: Batch
    num_tokens: int
    captured: Shape | None = None
    ran: set[int] = field(default_factory=set)  #: layers of a captured step that ran in the present forward


@dataclass
class Arrays:
    """Arrays of captured decodes: a replay reads them at the addresses of the capture."""

    query_start_loc: torch.Tensor  #: one query each
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor


class LibattnBackend(AttentionBackend):
    """One per model runner.

    Parameters
    ----------
    runner : ModelRunner
        For its pools and page size.
    """

    needs_cpu_seq_lens: bool = True

    def __init__(self, runner: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        if getattr(runner, "use_mla_backend", False):
            refuse("use_mla_backend", True, "no (MLA is not carried by libattn's SGLang adapter)")
        self.req_to_token_pool = runner.req_to_token_pool
        self.token_to_kv_pool = runner.token_to_kv_pool
        if getattr(self.token_to_kv_pool, "swa_layer_nums", 0):
            refuse("token_to_kv_pool", "a hybrid pool with sliding layers of their own", "one pool for all layers "
                   "(--disable-hybrid-swa-memory)")
        self.page_size = int(getattr(runner, "page_size", 1) or 1)
        self.chunk_size = int(getattr(runner, "attention_chunk_size", None) or 0)  # Llama 4's layers with `use_irope`
        self.forward_metadata: Step | None = None
        self.layers: dict[int, PoolLayer] = {}  # those that ran, by the address of SGLang's
        self.together: list[PoolLayer] = []     # those of them that are bound together
        self.steps = Steps(lambda: self.together, max_seq_len=self.req_to_token_pool.req_to_token.shape[1])
        self.arrays: Arrays | None = None
        self.batches: dict[int, tuple[np.ndarray, Batch]] = {}  # captured decodes, by requests

    # Metadata. Eager steps come to the first; captures and replays to the pair.
    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Read the batch; it is planned when the first layer runs."""
        self._gather()
        mode = forward_batch.forward_mode
        if mode.is_idle():
            self.forward_metadata = None
            return
        lengths = self._lengths(forward_batch)
        queries = np.ones_like(lengths) if mode.is_decode() else _numbers(forward_batch, "extend_seq_lens")
        starts = np.concatenate([[0], np.cumsum(queries)]).astype(np.int32)
        host, table = torch.from_numpy(lengths), self._table(forward_batch, lengths)
        count = int(starts[-1])
        batch = Batch(torch.from_numpy(starts).to(table.device), host.to(table.device), table.contiguous(),
                      forward_batch.out_cache_loc.to(torch.int64)[:count], query_start_loc_host=torch.from_numpy(starts),
                      seq_lens_host=host, max_seq_len=int(lengths.max(initial=1)))
        self.forward_metadata = Step(batch, count)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Arrays for captured decodes. From here on layers are served by backends that capture those, or refused."""
        if max_num_tokens != max_bs:
            refuse("max_num_tokens", f"{max_num_tokens} of {max_bs} requests", "one token a request in a captured batch; "
                   "others in eager steps (--disable-cuda-graph)")
        table = self.req_to_token_pool.req_to_token
        device, columns = table.device, -(-table.shape[1] // self.page_size)
        self.arrays = Arrays(torch.arange(max_bs + 1, dtype=torch.int32, device=device),
                             torch.ones(max_bs, dtype=torch.int32, device=device),
                             torch.zeros(max_bs, columns, dtype=torch.int32, device=device),
                             torch.full((max_bs,), -1, dtype=torch.int64, device=device))
        self.batches.clear()
        self.steps.graph_level = "single_token_decode"
        self.steps.clear()

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Bring a decode's arrays, and outside of a capture its plans, to the batch that replays the graph."""
        mode, arrays = forward_batch.forward_mode, self.arrays
        if not mode.is_decode():
            refuse("forward_mode", f"a captured {getattr(mode, 'name', mode)}", "captured DECODE; prefills in eager steps "
                   "(--disable-prefill-cuda-graph)")
        if arrays is None:
            raise make(Status.ORDER, "init_cuda_graph_state", "not called before a capture")
        lengths, slots = self._lengths(forward_batch), forward_batch.out_cache_loc
        requests = len(lengths)
        given = 0 if slots is None else min(requests, len(slots))
        arrays.seq_lens[:requests].copy_(forward_batch.seq_lens)
        self._table(forward_batch, lengths, arrays.block_table[:requests])
        if given:
            arrays.slot_mapping[:given].copy_(slots[:given])
        if given < requests:
            arrays.slot_mapping[given:requests].fill_(-1)
        shape, batch = (requests, requests, 1), self._captured_batch(arrays, lengths)
        self.forward_metadata = Step(batch, requests, shape)
        if not in_capture and not self.steps.replay(shape, lambda: batch):
            raise make(Status.ORDER, "capture", f"a replay of {requests} requests; they were not captured, or layers were "
                       "bound anew since")

    def _captured_batch(self, arrays: Arrays, lengths: np.ndarray) -> Batch:
        """Made once for a number of requests, since only lengths change."""
        requests = len(lengths)
        if requests not in self.batches:
            host = np.ones(requests, np.int32)
            self.batches[requests] = host, Batch(
                arrays.query_start_loc[:requests + 1], arrays.seq_lens[:requests], arrays.block_table[:requests],
                arrays.slot_mapping[:requests], query_start_loc_host=torch.arange(requests + 1, dtype=torch.int32),
                seq_lens_host=torch.from_numpy(host), max_query_len=1)
        host, batch = self.batches[requests]
        host[:] = lengths
        batch.struct.max_seq_len = int(lengths.max(initial=1))
        return batch

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Comes before each forward of a capture, two of which warm up. Layers are known once they ran, so plans for the
        captured shape are made here; nothing is recorded."""
        step = self.forward_metadata
        if step is None or step.captured is None or _is_capturing(self.req_to_token_pool.req_to_token.device):
            return
        step.ran.clear()
        self._gather()
        if self.together:
            self.steps.capture(step.captured, step, lambda: step.batch, None)

    # Releases before 0.5.16 have this pair instead. They bring no slots: a decode's token is the last of its request.
    def init_forward_metadata_capture_cuda_graph(self, bs: int, num_tokens: int, req_pool_indices: torch.Tensor,
                                                 seq_lens: torch.Tensor, encoder_lens: Any, forward_mode: Any,
                                                 spec_info: Any) -> None:
        """Comes once before the forwards of a capture; `_run` sees where the second of them begins."""
        self.init_forward_metadata_out_graph(
            self._decode(bs, req_pool_indices, seq_lens, None, encoder_lens, forward_mode, spec_info), in_capture=True)

    def init_forward_metadata_replay_cuda_graph(self, bs: int, req_pool_indices: torch.Tensor, seq_lens: torch.Tensor,
                                                seq_lens_sum: int, encoder_lens: Any, forward_mode: Any, spec_info: Any,
                                                seq_lens_cpu: torch.Tensor | None = None, *_: Any) -> None:
        self.init_forward_metadata_out_graph(
            self._decode(bs, req_pool_indices, seq_lens, seq_lens_cpu, encoder_lens, forward_mode, spec_info))

    def _decode(self, bs: int, req_pool_indices: torch.Tensor, seq_lens: torch.Tensor, seq_lens_cpu: torch.Tensor | None,
                encoder_lens: Any, forward_mode: Any, spec_info: Any) -> SimpleNamespace:
        """A batch of the later interface. A length of 1 is padding, since a decode follows a prompt, and is not written."""
        indices, lengths = req_pool_indices[:bs], seq_lens[:bs]
        last = self.req_to_token_pool.req_to_token[indices.long(), (lengths.long() - 1).clamp_min(0)]
        fill = self.get_cuda_graph_seq_len_fill_value()
        return SimpleNamespace(
            forward_mode=forward_mode, spec_info=spec_info, encoder_lens=encoder_lens, req_pool_indices=indices,
            seq_lens=lengths, seq_lens_cpu=None if seq_lens_cpu is None else seq_lens_cpu[:bs],
            out_cache_loc=torch.where(lengths > fill, last.long(), -1))

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    def support_triton(self) -> bool:
        return True

    def _gather(self) -> None:
        """Layers that ran alone are bound together from the next step on, unless a graph holds the others where they are."""
        if len(self.layers) > len(self.together) and not self.steps.captures:
            self.together = list(self.layers.values())
            self.steps.clear()

    def _lengths(self, forward_batch: Any) -> np.ndarray:
        if getattr(forward_batch, "spec_info", None) is not None:
            refuse("spec_info", type(forward_batch.spec_info).__name__, "no speculative batches")
        if getattr(forward_batch, "encoder_lens", None) is not None:
            refuse("encoder_lens", "cross attention", "decoders without an encoder")
        return _numbers(forward_batch, "seq_lens")

    def _table(self, forward_batch: Any, lengths: np.ndarray, out: torch.Tensor | None = None) -> torch.Tensor:
        """Block tables as long as the longest request, from SGLang's table of tokens; into the first columns of `out`."""
        page = self.page_size
        width = max(1, int(-(-lengths.max(initial=1) // page)))
        slots = self.req_to_token_pool.req_to_token[forward_batch.req_pool_indices.long(), :width * page:page].int()
        return torch.div(slots, page, rounding_mode="floor", out=None if out is None else out[:, :width])

    def forward_extend(self, q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None, layer: Any,
                       forward_batch: Any, save_kv_cache: bool = True, **kwargs: Any) -> torch.Tensor:
        return self._run(q, k, v, layer, save_kv_cache, kwargs)

    forward_decode = forward_mixed = forward_extend

    def _run(self, q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None, layer: Any, save_kv_cache: bool,
             kwargs: dict[str, Any]) -> torch.Tensor:
        sinks = kwargs.pop("sinks", None)
        for name, value in kwargs.items():
            if value is not None and value is not False:
                refuse(name, type(value).__name__, "no (not known to libattn's SGLang adapter)")
        step = self.forward_metadata
        if step is None:
            raise make(Status.ORDER, "init_forward_metadata", "a layer runs and no batch was given")
        if step.captured is not None:
            if id(layer) in step.ran:  # another forward begins
                self.init_forward_metadata_in_graph(None)
            step.ran.add(id(layer))
        mine = self.layers.get(id(layer)) or PoolLayer(layer)
        mine.ask(q.dtype, self.token_to_kv_pool.get_key_buffer(layer.layer_id),
                 self.token_to_kv_pool.get_value_buffer(layer.layer_id), self.page_size, self.chunk_size, sinks)
        self.layers[id(layer)] = mine
        rows = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        out = q.new_empty(rows.shape[0], layer.tp_q_head_num, layer.v_head_dim)
        writes = save_kv_cache and k is not None and v is not None
        new = (k.view(-1, layer.tp_k_head_num, layer.qk_head_dim), v.view(-1, layer.tp_v_head_num, layer.v_head_dim)) \
            if writes else (None, None)
        if rows.shape[0] > step.num_tokens:  # padded to a size that the engine likes
            step.batch.struct.num_tokens = rows.shape[0]
            out[step.num_tokens:] = 0
        place = self.steps.place(layer, mine, mine.kv_cache, step, None)
        plan = self.steps.plan(place, step, lambda: step.batch)
        place.bound.run_rows(stream_of(q.device), rows, *new, out, 0 if writes else NO_WRITE, place.at, plan)
        return out.view(-1, layer.tp_q_head_num * layer.v_head_dim)


def _is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _numbers(forward_batch: Any, name: str) -> np.ndarray:
    """Lengths on the host: the engine's own copy where there is one."""
    host = getattr(forward_batch, f"{name}_cpu", None)
    values = host if host is not None else getattr(forward_batch, name)
    return torch.as_tensor(values).cpu().numpy().astype(np.int32)
