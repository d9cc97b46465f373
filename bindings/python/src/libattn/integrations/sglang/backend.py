# SPDX-License-Identifier: Apache-2.0
"""SGLang's attention backend: extend, decode, verify, mixed and idle batches over its token pool, and captured decodes and
verifications of drafts.

Written against the published interface of SGLang 0.5.23. Encoder lengths, hybrid sliding-window pools and captured prefills are refused
with a reason; gated delta layers (`gdn`) and the steps of a draft model (`drafts`) have modules of their own next to this one.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..._declarations import PlanMode, Status, attn_io_mla
from ...errors import make
from ...step import NO_WRITE, Batch
from .gathered import Gathered, Step
from .layers import LatentLayer, PoolLayer, latent_sizes, refuse


@dataclass
class Arrays:
    """Arrays of captured decodes or verifications: a replay reads them at the addresses of the capture."""

    query_start_loc: torch.Tensor  #: equally many queries each
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    tree: torch.Tensor | None  #: [requests, drafts, words]


class LibattnBackend(Gathered):
    """One per model runner.

    Parameters
    ----------
    runner : ModelRunner
        For its pools and page size.
    """

    needs_cpu_seq_lens: bool = True

    def __init__(self, runner: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(runner)
        #: Sizes of multi-head latent attention; None: the model has none.
        self.latent = latent_sizes(runner.model_config) if getattr(runner, "use_mla_backend", False) else None
        kept = getattr(runner, "kv_cache_dtype", None)  # as SGLang resolved it: under `auto` a checkpoint may ask for fp8
        if self.latent and kept is not None and kept != runner.model_config.dtype:
            refuse("kv_cache_dtype", kept, f"{runner.model_config.dtype}, next to multi-head latent attention (--kv-cache-dtype bfloat16 "
                   "where a checkpoint asks for fp8)")
        self.token_to_kv_pool = runner.token_to_kv_pool
        if getattr(self.token_to_kv_pool, "swa_layer_nums", 0):
            refuse("token_to_kv_pool", "a hybrid pool with sliding layers of their own", "one pool for all layers "
                   "(--disable-hybrid-swa-memory)")
        self.page_size = int(getattr(runner, "page_size", 1) or 1)
        self.chunk_size = int(getattr(runner, "attention_chunk_size", None) or 0)  # Llama 4's layers with `use_irope`
        arguments = getattr(runner, "server_args", None)
        #: Tokens of a request that a step verifies; 0 without speculation.
        self.drafts = int(arguments.speculative_num_draft_tokens) if getattr(arguments, "speculative_algorithm", None) else 0
        self.arrays: Arrays | None = None
        self.batches: dict[int, tuple[np.ndarray, Batch]] = {}  # captured decodes, by requests
        self.given: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # SGLang's arrays that those read, by requests: lengths, slots

    def _read(self, forward_batch: Any) -> Step:
        lengths, per_request = self._lengths(forward_batch)
        queries = np.full_like(lengths, per_request) if per_request else numbers(forward_batch, "extend_seq_lens")
        starts = np.concatenate([[0], np.cumsum(queries)]).astype(np.int32)
        host, table = torch.from_numpy(lengths), self._table(forward_batch, lengths)
        count = int(starts[-1])
        batch = Batch(torch.from_numpy(starts).to(table.device), host.to(table.device), table.contiguous(),
                      forward_batch.out_cache_loc.to(torch.int64)[:count], query_start_loc_host=torch.from_numpy(starts),
                      seq_lens_host=host, max_seq_len=int(lengths.max(initial=1)),
                      tree=self._tree(forward_batch) if forward_batch.forward_mode.is_target_verify() else None)
        return Step(batch, count)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Arrays for captured decodes or, with speculation, verifications. From here on layers are served by backends that capture
        those, or refused."""
        each = self.drafts or 1
        if max_num_tokens != max_bs * each:
            refuse("max_num_tokens", f"{max_num_tokens} of {max_bs} requests", f"{each} a request in a captured batch; "
                   "others in eager steps (--disable-cuda-graph)")
        table = self.req_to_token_pool.req_to_token
        device, columns = table.device, -(-table.shape[1] // self.page_size)
        tree = torch.zeros(max_bs, each, -(-each // 32), dtype=torch.int32, device=device) if self.drafts else None
        self.arrays = Arrays(torch.arange(0, max_num_tokens + 1, each, dtype=torch.int32, device=device),
                             torch.full((max_bs,), each, dtype=torch.int32, device=device),
                             torch.zeros(max_bs, columns, dtype=torch.int32, device=device),
                             torch.full((max_num_tokens,), -1, dtype=torch.int64, device=device), tree)
        self.nowhere = torch.tensor(-1, device=device)
        self.batches.clear()
        self.given.clear()
        self.steps.graph_level = "uniform_batch" if self.drafts else "single_token_decode"
        self.steps.clear()

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Bring the arrays of decodes or verifications, and outside of a capture its plans, to the batch that replays the graph. Graphs of
        decodes do some of that themselves; SGLang's table of tokens is read here, since it may change as soon as a graph is launched."""
        mode, arrays = forward_batch.forward_mode, self.arrays
        verify = self.drafts > 0
        if not (mode.is_target_verify() if verify else mode.is_decode()):
            refuse("forward_mode", f"a captured {getattr(mode, 'name', mode)}", f"captured {'TARGET_VERIFY' if verify else 'DECODE'}; "
                   "prefills in eager steps (--disable-prefill-cuda-graph)")
        if arrays is None:
            raise make(Status.ORDER, "init_cuda_graph_state", "not called before a capture")
        (lengths, each), slots = self._lengths(forward_batch), forward_batch.out_cache_loc
        requests, tokens = len(lengths), len(lengths) * each
        self._table(forward_batch, lengths, arrays.block_table[:requests])
        arrays.seq_lens[:requests].copy_(forward_batch.seq_lens + self.drafts if verify else forward_batch.seq_lens)
        if arrays.tree is not None:
            given = 0 if slots is None else min(tokens, len(slots))
            arrays.tree[:requests].copy_(self._tree(forward_batch))
            arrays.slot_mapping[:given].copy_(slots[:given])
            if given < tokens:
                arrays.slot_mapping[given:tokens].fill_(-1)
        elif in_capture:
            self.given[requests] = forward_batch.seq_lens, slots
        elif requests in self.given and arrays.slot_mapping.device.type == "cpu":  # where ATTN_VALIDATE reads them
            self._fill_arrays(arrays, requests)
        shape, batch = (requests, tokens, each), self._captured_batch(arrays, lengths, each)
        self.forward_metadata = Step(batch, tokens, shape, None if verify else lambda: self._fill_arrays(arrays, requests))
        if not in_capture:
            self.replay(shape, batch, PlanMode.REPLAY if verify else PlanMode.OUT_OF_GRAPH)

    def _fill_arrays(self, arrays: Arrays, requests: int) -> None:
        """Slots of decodes, from arrays that SGLang fills before a replay."""
        seq_lens, slots = self.given[requests]
        torch.where(self.is_there(seq_lens), slots, self.nowhere, out=arrays.slot_mapping[:requests])

    def _captured_batch(self, arrays: Arrays, lengths: np.ndarray, each: int) -> Batch:
        """Made once for a number of requests, since only lengths change."""
        requests = len(lengths)
        if requests not in self.batches:
            host = np.full(requests, each, np.int32)
            self.batches[requests] = host, Batch(
                arrays.query_start_loc[:requests + 1], arrays.seq_lens[:requests], arrays.block_table[:requests],
                arrays.slot_mapping[:requests * each], query_start_loc_host=torch.arange(0, requests * each + 1, each, dtype=torch.int32),
                seq_lens_host=torch.from_numpy(host), max_query_len=each, tree=None if arrays.tree is None else arrays.tree[:requests])
        host, batch = self.batches[requests]
        host[:] = lengths
        batch.struct.max_seq_len = int(lengths.max(initial=1))
        return batch

    def support_triton(self) -> bool:
        return True

    def _lengths(self, forward_batch: Any) -> tuple[np.ndarray, int]:
        """Keys of each request, the step's own included, and its queries where all have equally many, else 0."""
        mode, spec_info = forward_batch.forward_mode, getattr(forward_batch, "spec_info", None)
        if spec_info is not None and not self.drafts:
            refuse("spec_info", type(spec_info).__name__, "no speculative batches without --speculative-algorithm")
        if getattr(forward_batch, "encoder_lens", None) is not None:
            refuse("encoder_lens", "cross attention", "decoders without an encoder")
        lengths = numbers(forward_batch, "seq_lens")
        if not mode.is_target_verify():
            return lengths, int(mode.is_decode())
        if getattr(spec_info, "draft_token_num", None) != self.drafts:
            refuse("draft_token_num", getattr(spec_info, "draft_token_num", None), f"speculative_num_draft_tokens ({self.drafts})")
        return lengths + self.drafts, self.drafts  # the engine's are those of the context

    def _tree(self, forward_batch: Any) -> torch.Tensor:
        """[requests, drafts, words]: which drafts each draft sees. On a GPU rows of SGLang's mask begin with the context, on a CPU
        they do not. It has no rows of padding."""
        mask, drafts = forward_batch.spec_info.custom_mask, self.drafts
        column, context = torch.arange(drafts, device=mask.device), forward_batch.seq_lens.to(mask.device, torch.int64)
        if mask.device.type == "cpu":
            context = torch.zeros_like(context)
        widths = context + drafts
        rows = ((widths.cumsum(0) - widths) * drafts)[:, None] + column * widths[:, None]
        at = (rows + context[:, None])[..., None] + column
        seen = torch.nn.functional.pad(mask[at.clamp_max(len(mask) - 1)].long(), (0, -drafts % 32))
        return (seen.unflatten(-1, (-1, 32)) << torch.arange(32, device=mask.device)).sum(-1).int()

    def _table(self, forward_batch: Any, lengths: np.ndarray, out: torch.Tensor | None = None) -> torch.Tensor:
        """Block tables as long as the longest request, from SGLang's table of tokens; into the first columns of `out`."""
        page = self.page_size
        width = max(1, int(-(-lengths.max(initial=1) // page)))
        rows, requests = self.req_to_token_pool.req_to_token[:, :width * page:page], forward_batch.req_pool_indices
        if out is None or page > 1:
            slots = rows.index_select(0, requests)
            return torch.div(slots, page, rounding_mode="floor", out=None if out is None else out[:, :width])
        return torch.index_select(rows, 0, requests, out=out[:, :width])

    def forward_extend(self, q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None, layer: Any,
                       forward_batch: Any, save_kv_cache: bool = True, **kwargs: Any) -> torch.Tensor:
        return self._run(q, k, v, layer, save_kv_cache, kwargs)

    forward_decode = forward_mixed = forward_extend

    def _run(self, q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None, layer: Any, save_kv_cache: bool,
             kwargs: dict[str, Any]) -> torch.Tensor:
        sinks = kwargs.pop("sinks", None)
        latent = (kwargs.pop("q_rope", None), kwargs.pop("k_rope", None)) if self.latent else None
        if latent and latent[0] is None:
            refuse("q_rope", None, "queries in latent space, their rotary parts apart")
        for name, value in kwargs.items():
            if value is not None and value is not False:
                refuse(name, type(value).__name__, "no (not known to libattn's SGLang adapter)")
        step = self._step(layer)
        mine, keys = self.layers.get(id(layer)), self.token_to_kv_pool.get_key_buffer(layer.layer_id)
        if self.latent:
            mine = mine or LatentLayer(layer)
            mine.ask(q.dtype, keys, self.page_size, self.latent, self.drafts > 0)
        else:
            mine = mine or PoolLayer(layer)
            mine.ask(q.dtype, keys, self.token_to_kv_pool.get_value_buffer(layer.layer_id), self.page_size, self.chunk_size, sinks,
                     self.drafts > 0)
        self.layers[id(layer)] = mine
        rows = q.view(-1, layer.tp_q_head_num, layer.v_head_dim if self.latent else layer.qk_head_dim)
        out = q.new_empty(rows.shape[0], layer.tp_q_head_num, layer.v_head_dim)
        if rows.shape[0] > step.num_tokens:  # padded to a size that the engine likes
            step.batch.struct.num_tokens = rows.shape[0]
            out[step.num_tokens:] = 0
        flags = 0 if save_kv_cache and k is not None and v is not None else NO_WRITE
        if latent:
            q_rope, k_rope = latent
            given = {"q_nope": rows, "q_pe": q_rope.view(rows.shape[0], rows.shape[1], -1)}
            if not flags:
                given |= {"kv_c": k.view(k.shape[0], -1), "k_pe": k_rope.view(k.shape[0], -1)}
            self.steps.run(layer, mine, mine.kv_cache, step, None, lambda: step.batch, (None, None, None, out), flags,
                           lambda bound: bound.io(attn_io_mla, **given))
        else:
            new = (None, None) if flags else (k.view(-1, layer.tp_k_head_num, layer.qk_head_dim),
                                              v.view(-1, layer.tp_v_head_num, layer.v_head_dim))
            self.steps.run(layer, mine, mine.kv_cache, step, None, lambda: step.batch, (rows, *new, out), flags)
        return out.view(-1, layer.tp_q_head_num * layer.v_head_dim)


def numbers(forward_batch: Any, name: str) -> np.ndarray:
    """Lengths on the host: the engine's own copy where there is one."""
    host = getattr(forward_batch, f"{name}_cpu", None)
    values = host if host is not None else getattr(forward_batch, name)
    return torch.as_tensor(values).cpu().numpy().astype(np.int32)
