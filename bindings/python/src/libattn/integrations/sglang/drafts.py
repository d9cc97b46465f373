# SPDX-License-Identifier: Apache-2.0
"""Drafts of a model (EAGLE, EAGLE3, STANDALONE) over libattn: SGLang drafts a token of each branch in a step, with a backend for each
step. One CUDA graph captures all steps of a number of requests."""
from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..._declarations import Status
from ...errors import make
from ...step import Batch
from .backend import LibattnBackend, numbers
from .gathered import Step
from .layers import refuse


@dataclass
class Captured:
    """Arrays of captured steps: a replay reads them at the addresses of the capture."""

    starts: torch.Tensor
    seq_lens: torch.Tensor  #: [steps, branches]
    block_table: torch.Tensor
    slot_mapping: torch.Tensor  #: [steps, branches]


class DraftSteps:
    """What SGLang calls a backend of several draft steps.

    Parameters
    ----------
    backend : LibattnBackend
        Of the draft model; all steps share its layers.
    topk : int
        Branches of a request, each a request of the batch.
    steps : int
        Tokens of a branch; the last one is not run.
    """

    needs_cpu_seq_lens: bool = True

    def __init__(self, backend: LibattnBackend, topk: int, steps: int) -> None:
        self.backend, self.topk, self.steps = backend, topk, steps
        self.attn_backends = [copy.copy(backend) for _ in range(steps - 1)]
        self.arrays: Captured | None = None
        self.batches: dict[int, list[tuple[np.ndarray, Batch]]] = {}  # captured steps, by branches

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Read the batch of all steps; each is planned when its first layer runs."""
        self.backend.gather()
        lengths, slots = numbers(forward_batch, "seq_lens"), forward_batch.out_cache_loc.view(-1, self.steps)
        table = self._table(forward_batch, lengths)
        starts = torch.arange(len(table) + 1, dtype=torch.int32)
        for i, step in enumerate(self.attn_backends):
            host = torch.from_numpy(np.repeat(lengths + i + 1, self.topk))
            batch = Batch(starts.to(table.device), host.to(table.device), table, slots[:, i].contiguous(),
                          query_start_loc_host=starts, seq_lens_host=host, max_query_len=1, max_seq_len=int(host.max()))
            step.forward_metadata = Step(batch, len(table))

    def _table(self, forward_batch: Any, lengths: np.ndarray, out: torch.Tensor | None = None) -> torch.Tensor:
        """Block tables of all branches; into the first columns of `out`."""
        rows, page = self.backend.req_to_token_pool.req_to_token, self.backend.page_size
        # A branch's tokens follow those of the branch before it in SGLang's table, which begin after the context.
        at = torch.arange(0, min(int(lengths.max(initial=0)) + self.steps, rows.shape[1]), page, device=rows.device)
        branch = torch.arange(self.topk, device=rows.device)[:, None] * self.steps
        columns = (at + (at >= forward_batch.seq_lens[:, None, None]) * branch).clamp_max(rows.shape[1] - 1)
        slots = rows[forward_batch.req_pool_indices.long()[:, None, None], columns].flatten(0, 1).int()
        return torch.div(slots, page, rounding_mode="floor", out=None if out is None else out[:, :slots.shape[1]])

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Arrays for captured steps. From here on the draft model's layers are served by backends that capture decodes, or refused."""
        if self.backend.steps.captures:  # to bind layers again would free what those graphs read
            refuse("speculative_adaptive", "a second set of captured drafts", "one number of steps, or --disable-cuda-graph")
        table, branches, count = self.backend.req_to_token_pool.req_to_token, max_bs * self.topk, self.steps - 1
        device = table.device
        self.arrays = Captured(torch.arange(branches + 1, dtype=torch.int32, device=device),
                               torch.ones(count, branches, dtype=torch.int32, device=device),
                               torch.zeros(branches, -(-table.shape[1] // self.backend.page_size), dtype=torch.int32, device=device),
                               torch.full((count, branches), -1, dtype=torch.int64, device=device))
        self.batches.clear()
        self.backend.steps.graph_level = "single_token_decode"
        self.backend.steps.clear()

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Bring the arrays, and outside of a capture the plans, to the batch that replays the graph."""
        arrays, lengths = self.arrays, numbers(forward_batch, "seq_lens")
        if arrays is None:
            raise make(Status.ORDER, "init_cuda_graph_state", "not called before a capture")
        branches, slots = len(lengths) * self.topk, forward_batch.out_cache_loc.view(-1, self.steps)
        given = min(branches, len(slots))  # those of padding are not written
        ahead = torch.arange(1, self.steps, device=arrays.seq_lens.device)[:, None]
        arrays.seq_lens[:, :branches].copy_(forward_batch.seq_lens.repeat_interleave(self.topk, output_size=branches) + ahead)
        arrays.slot_mapping[:, :given].copy_(slots[:given, :-1].T)
        arrays.slot_mapping[:, given:branches].fill_(-1)
        self._table(forward_batch, lengths, arrays.block_table[:branches])
        for i, (step, (host, batch)) in enumerate(zip(self.attn_backends, self._captured(arrays, branches))):
            host[:] = np.repeat(lengths + i + 1, self.topk)
            batch.struct.max_seq_len = int(host.max())
            shape = branches, branches, 1, i
            step.forward_metadata = Step(batch, branches, shape)
            if not in_capture:
                self.backend.replay(shape, batch)

    def _captured(self, arrays: Captured, branches: int) -> list[tuple[np.ndarray, Batch]]:
        """A batch for each step, and its lengths on the host."""
        if branches not in self.batches:
            starts, hosts = torch.arange(branches + 1, dtype=torch.int32), np.ones((self.steps - 1, branches), np.int32)
            self.batches[branches] = [
                (host, Batch(arrays.starts[:branches + 1], arrays.seq_lens[i, :branches], arrays.block_table[:branches],
                             arrays.slot_mapping[i, :branches], query_start_loc_host=starts, seq_lens_host=torch.from_numpy(host),
                             max_query_len=1)) for i, host in enumerate(hosts)]
        return self.batches[branches]

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Comes before each forward of a capture, two of which warm up."""
        self.backend.gather()
        for step in self.attn_backends:
            step.together = self.backend.together
            step.init_forward_metadata_in_graph(forward_batch)


def decode_backend(factory: Any) -> DraftSteps | None:
    """In the place of SGLang's `DraftBackendFactory.create_decode_backend`; None: one step has nothing to run."""
    if factory.speculative_num_steps <= 1:
        return None
    backend = factory.draft_model_runner.attn_backend
    if not isinstance(backend, LibattnBackend):
        refuse("speculative_draft_attention_backend", f"libattn, within {type(backend).__name__}",
               "libattn for draft models of attention alone")
    return DraftSteps(backend, factory.topk, factory.speculative_num_steps)
