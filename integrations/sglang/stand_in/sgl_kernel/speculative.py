# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import torch


def reconstruct_indices_from_tree_mask(tree_mask: torch.Tensor, seq_lens: torch.Tensor, positions: torch.Tensor,
                                       retrieve_index: torch.Tensor, retrieve_next_token: torch.Tensor,
                                       retrieve_next_sibling: torch.Tensor, requests: int, drafts: int) -> None:
    """Each draft's position, first child and next sibling (-1: none), from which drafts sees which."""
    mask = tree_mask.view(requests, drafts, drafts)
    retrieve_index[:] = torch.arange(requests * drafts).view(requests, drafts)
    positions[:] = (seq_lens[:, None] + mask.sum(-1) - 1).flatten()
    retrieve_next_token.fill_(-1)
    retrieve_next_sibling.fill_(-1)
    for b in range(requests):
        last: dict[int, int] = {}  # the last child so far, by its parent
        for i in range(1, drafts):
            parent = int(mask[b, i, :i].nonzero()[-1])
            (retrieve_next_sibling if parent in last else retrieve_next_token)[b, last.get(parent, parent)] = i
            last[parent] = i
