# SPDX-License-Identifier: Apache-2.0
"""Drafts of a model (EAGLE, EAGLE3, STANDALONE) over libattn, in eager steps: SGLang drafts a token of each branch in a step, with a
backend for each step."""
from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch

from ...step import Batch
from .backend import LibattnBackend, numbers
from .gathered import Step
from .layers import refuse


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

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Read the batch of all steps; each is planned when its first layer runs."""
        backend, page = self.backend, self.backend.page_size
        backend.gather()
        lengths = numbers(forward_batch, "seq_lens")
        rows, slots = backend.req_to_token_pool.req_to_token, forward_batch.out_cache_loc.view(len(lengths), self.topk, self.steps)
        # A branch's tokens follow those of the branch before it in SGLang's table, which begin after the context.
        at = torch.arange(0, int(lengths.max(initial=0)) + self.steps, page, device=rows.device)
        branch = torch.arange(self.topk, device=rows.device)[:, None] * self.steps
        columns = (at + (at >= forward_batch.seq_lens[:, None, None]) * branch).clamp_max(rows.shape[1] - 1)
        table = (rows[forward_batch.req_pool_indices.long()[:, None, None], columns].flatten(0, 1) // page).int()
        starts = torch.arange(len(table) + 1, dtype=torch.int32)
        for i, step in enumerate(self.attn_backends):
            host = torch.from_numpy(np.repeat(lengths + i + 1, self.topk))
            batch = Batch(starts.to(rows.device), host.to(rows.device), table, slots[..., i].flatten().contiguous(),
                          query_start_loc_host=starts, seq_lens_host=host, max_query_len=1, max_seq_len=int(host.max()))
            step.forward_metadata = Step(batch, len(table))


def decode_backend(factory: Any) -> DraftSteps | None:
    """In the place of SGLang's `DraftBackendFactory.create_decode_backend`; None: one step has nothing to run."""
    if factory.speculative_num_steps <= 1:
        return None
    backend = factory.draft_model_runner.attn_backend
    if not isinstance(backend, LibattnBackend):
        refuse("speculative_draft_attention_backend", f"libattn, within {type(backend).__name__}",
               "libattn for draft models of attention alone")
    return DraftSteps(backend, factory.topk, factory.speculative_num_steps)
