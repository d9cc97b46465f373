# SPDX-License-Identifier: Apache-2.0
"""vLLM's CPU platform with one difference: ``CUSTOM`` is served by libattn or refused with the reasons.

vLLM's own CPU platform passes every backend but its own over with a line at INFO, so ``--attention-backend CUSTOM``
would silently run something else. GPUs need none of this: their platforms validate what was asked for.
"""
from __future__ import annotations

from typing import Any

import torch
from vllm.platforms.cpu import CpuPlatform


def spread_slots(starts: torch.Tensor, positions: torch.Tensor, block_table: torch.Tensor, block_size: int,
                 world_size: int, rank: int, interleave: int) -> torch.Tensor:
    """Slots of a batch's tokens where each block of the table is one on every rank; -1: another rank's token."""
    request = torch.repeat_interleave(torch.arange(len(starts) - 1), starts[1:] - starts[:-1])
    at = positions[:len(request)]
    block, inside = at // (block_size * world_size), at % (block_size * world_size)
    slot = block_table[request, block].long() * block_size + inside // (world_size * interleave) * interleave \
        + inside % interleave
    return torch.where(inside // interleave % world_size == rank, slot, -1)


def compute_slot_mapping(num_tokens: int, max_num_tokens: int, query_start_loc: torch.Tensor, positions: torch.Tensor,
                         block_table: torch.Tensor, block_table_stride: int, slot_mapping: torch.Tensor,
                         KV_CACHE_BLOCK_SIZE: int, TOTAL_CP_WORLD_SIZE: int = 1, TOTAL_CP_RANK: int = 0,
                         CP_KV_CACHE_INTERLEAVE_SIZE: int = 1, PAD_ID: int = -1, BLOCK_SIZE: int = 1024) -> None:
    """vLLM's kernel for CPUs, which knows one rank only, and the slots of several."""
    if TOTAL_CP_WORLD_SIZE == 1:
        from vllm.utils.cpu_triton_utils import _compute_slot_mapping_kernel_impl as of_one_rank

        of_one_rank(num_tokens, max_num_tokens, query_start_loc, positions, block_table, block_table_stride, slot_mapping,
                    KV_CACHE_BLOCK_SIZE)
        return
    slots = spread_slots(query_start_loc, positions, block_table, KV_CACHE_BLOCK_SIZE, TOTAL_CP_WORLD_SIZE,
                         TOTAL_CP_RANK, CP_KV_CACHE_INTERLEAVE_SIZE)
    slot_mapping[:len(slots)] = slots
    slot_mapping[len(slots):max_num_tokens] = PAD_ID


class LibattnCpuPlatform(CpuPlatform):
    """What vLLM asks for when an engine is made on a CPU."""

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        """As vLLM's, but what its own MLA backends cannot do stays switched on: chunked prefill and the prefix cache."""
        from vllm.v1.attention.backends.registry import AttentionBackendEnum

        scheduler, cache = vllm_config.scheduler_config, vllm_config.cache_config
        kept = scheduler.enable_chunked_prefill, scheduler.max_num_batched_tokens, cache.enable_prefix_caching
        block_size = cache.block_size if getattr(cache, "user_specified_block_size", False) else None
        super().check_and_update_config(vllm_config)
        if vllm_config.attention_config.backend is AttentionBackendEnum.CUSTOM and getattr(
                vllm_config.model_config, "use_mla", False):
            from .versions import drafts_of_a_model

            drafts, changes = drafts_of_a_model(vllm_config), kept[0] or kept[2]
            if drafts is not None and drafts.attention_backend is not AttentionBackendEnum.CUSTOM and changes:
                raise ValueError(
                    f"speculative_config.attention_backend: {drafts.attention_backend}, supported next to MLA on a CPU: CUSTOM, "
                    "since with another one vLLM switches off chunked prefill and the prefix cache for the whole engine; set "
                    """"attention_backend": "CUSTOM" in --speculative-config""")
            scheduler.enable_chunked_prefill, scheduler.max_num_batched_tokens, cache.enable_prefix_caching = kept
            cache.block_size = block_size or cache.block_size

    @classmethod
    def register_triton_kernel_overrides(cls) -> None:
        """As vLLM's, and slots of a cache that is spread over ranks."""
        super().register_triton_kernel_overrides()
        from vllm.triton_utils import HAS_TRITON
        from vllm.triton_utils.dispatcher import register_kernels

        if not HAS_TRITON:
            register_kernels({"vllm.v1.worker.block_table.ComputeSlotMappingKernel.kernel": compute_slot_mapping})

    @classmethod
    def get_attn_backend_cls(cls, selected_backend: Any, attn_selector_config: Any, *args: Any, **kwargs: Any) -> str:
        """The class that serves a layer; raises `ValueError` with every reason where libattn cannot."""
        # Late, since these modules ask for the platform that is just being made.
        from vllm.v1.attention.backends.registry import AttentionBackendEnum

        from .backend import LibattnBackend

        if selected_backend is not AttentionBackendEnum.CUSTOM:
            return super().get_attn_backend_cls(selected_backend, attn_selector_config, *args, **kwargs)
        reasons = LibattnBackend.validate_configuration(**attn_selector_config._asdict(), device_capability=None)
        if reasons:
            raise ValueError("CUSTOM (libattn) cannot serve this layer:\n  " + "\n  ".join(reasons))
        return AttentionBackendEnum.CUSTOM.get_path()


__all__ = ["LibattnCpuPlatform"]
