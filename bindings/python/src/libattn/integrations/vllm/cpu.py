# SPDX-License-Identifier: Apache-2.0
"""vLLM's CPU platform with one difference: ``CUSTOM`` is served by libattn or refused with the reasons.

vLLM's own CPU platform passes every backend but its own over with a line at INFO, so ``--attention-backend CUSTOM``
would silently run something else. GPUs need none of this: their platforms validate what was asked for.
"""
from __future__ import annotations

from typing import Any

from vllm.platforms.cpu import CpuPlatform


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
            scheduler.enable_chunked_prefill, scheduler.max_num_batched_tokens, cache.enable_prefix_caching = kept
            cache.block_size = block_size or cache.block_size

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
