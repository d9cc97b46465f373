# SPDX-License-Identifier: Apache-2.0
"""What SGLang's engine calls of sglang-kernel's build for CPUs, which PyPI does not have, where the CPU has no AMX; any other
name raises when it is called. All but the first are of drafts."""
from __future__ import annotations

import ctypes
from typing import Any, NoReturn

import torch

from .speculative import reconstruct_indices_from_tree_mask


def assign_req_to_token_pool_cpu(req_pool_indices: torch.Tensor, req_to_token: torch.Tensor, start_offset: torch.Tensor,
                                 end_offset: torch.Tensor, out_cache_loc: torch.Tensor, *_: Any) -> None:
    at = 0
    for row, start, end in zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist()):
        req_to_token[row, start:end] = out_cache_loc[at:at + end - start].to(req_to_token.dtype)
        at += end - start


def assign_extend_cache_locs_cpu(req_pool_indices: torch.Tensor, req_to_token: torch.Tensor, start_offset: torch.Tensor,
                                 end_offset: torch.Tensor, out_cache_loc: torch.Tensor, *_: Any) -> None:
    at = 0
    for row, start, end in zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist()):
        out_cache_loc[at:at + end - start] = req_to_token[row, start:end].to(out_cache_loc.dtype)
        at += end - start


def verify_tree_greedy_cpu(*, predicts: torch.Tensor, accept_index: torch.Tensor, accept_token_num: torch.Tensor, candidates: torch.Tensor,
                           retrive_index: torch.Tensor, retrive_next_token: torch.Tensor, retrive_next_sibling: torch.Tensor,
                           target_predict: torch.Tensor) -> None:
    """From each request's first draft on to the child that the model would have chosen, as long as there is one."""
    for b in range(len(candidates)):
        at = accepted = 0
        accept_index[b, 0] = retrive_index[b, 0]
        while True:
            chosen, child = target_predict[b, at], int(retrive_next_token[b, at])
            predicts[retrive_index[b, at]] = chosen
            while child != -1 and candidates[b, child] != chosen:
                child = int(retrive_next_sibling[b, child])
            if child == -1:
                break
            at, accepted = child, accepted + 1
            accept_index[b, accepted] = retrive_index[b, at]
        accept_token_num[b] = accepted


def fill_accept_out_cache_loc_cpu(accept_index: torch.Tensor, out_cache_loc: torch.Tensor, accept_out_cache_loc: torch.Tensor) -> None:
    kept = accept_index[accept_index >= 0].long()
    accept_out_cache_loc[:len(kept)] = out_cache_loc[kept]


def copy_all_layer_kv_cache_cpu(data_ptrs: torch.Tensor, strides: torch.Tensor, tgt_loc: torch.Tensor, src_loc: torch.Tensor) -> None:
    """Rows of a slot, `strides` bytes each, in all caches of keys and values."""
    for data, stride in zip(data_ptrs.tolist(), strides.tolist()):
        rows = [ctypes.string_at(data + slot * stride, stride) for slot in src_loc.tolist()]
        for slot, row in zip(tgt_loc.tolist(), rows):
            ctypes.memmove(data + slot * stride, row, stride)


def assign_draft_cache_locs_contiguous_cpu(req_pool_indices: torch.Tensor, req_to_token: torch.Tensor, seq_lens: torch.Tensor,
                                           out_cache_loc: torch.Tensor, pool_len: int, topk: int, steps: int) -> None:
    rows = out_cache_loc.view(-1, topk * steps)
    for row, request, start in zip(rows, req_pool_indices.tolist(), seq_lens.tolist()):
        row.copy_(req_to_token[request, start:start + topk * steps])


def fill_bonus_tokens_cpu(accept_tokens: torch.Tensor, accept_lens: torch.Tensor, bonus_tokens: torch.Tensor, accept_stride: int) -> None:
    bonus_tokens.copy_(accept_tokens.view(-1, accept_stride).gather(1, accept_lens.long()[:, None] - 1)[:, 0])


def build_tree_kernel_efficient_cpu(parent_list: torch.Tensor, selected_index: torch.Tensor, seq_lens: torch.Tensor, tree_mask: torch.Tensor,
                                    positions: torch.Tensor, retrieve_index: torch.Tensor, retrieve_next_token: torch.Tensor,
                                    retrieve_next_sibling: torch.Tensor, topk: int, depth: int, count: int, mode: int) -> None:
    """Each token sees its ancestors. `selected_index`: the drafts after the first, among all that were scored, `topk` of each parent;
    `parent_list`: those parents, by the same count."""
    mask = tree_mask.view(-1, count, count)
    mask.copy_(torch.eye(count, dtype=torch.bool))
    for request, (parents, selected) in enumerate(zip(parent_list.tolist(), selected_index.tolist())):
        for i, scored in enumerate(selected):
            parent = 1 + selected.index(parents[scored // topk]) if scored >= topk else 0
            mask[request, i + 1] |= mask[request, parent]
    reconstruct_indices_from_tree_mask(tree_mask, seq_lens, positions, retrieve_index, retrieve_next_token, retrieve_next_sibling,
                                       len(mask), count)


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name}")

    return missing
