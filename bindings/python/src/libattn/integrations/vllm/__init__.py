# SPDX-License-Identifier: Apache-2.0
"""vLLM (v1): a backend class under the name ``CUSTOM``.

The entry point ``vllm.general_plugins`` calls `register` in every process of vLLM, so ``--attention-backend CUSTOM``
is all that has to be said. Which of libattn's backends then serves which layer, and ``ATTN_BACKEND``, is libattn's
own choice; the reasons against it are what `validate_configuration` answers.
"""
from __future__ import annotations

__all__ = ["register"]


def register() -> None:
    """Make the backend known to vLLM's registry."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CUSTOM, "libattn.integrations.vllm.backend.LibattnBackend")
